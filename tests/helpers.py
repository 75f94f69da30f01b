"""Helpers of the tests: the scripts, random rollouts, computations in float64, and calls of a script."""

import contextlib
import copy
import io
import os
import re
import signal
import sys
import traceback
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import user_envs
from gymnasium import spaces
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.distributions import Categorical, Independent, Normal
from torch.optim import Adam

import ppo
import ppo_atari
import ppo_continuous
import ppo_lstm

ROOT = Path(__file__).resolve().parent.parent
D = 3  # numbers per observation
PLAIN = {  # these tests rely on these settings, whatever the defaults are
    "num_envs": 4, "num_steps": 12, "gamma": 0.97, "gae_lambda": 0.9, "hidden_size": 64,
    "learning_rate": 3e-3, "anneal_lr": True, "update_epochs": 3, "num_minibatches": 2, "max_grad_norm": 0.5,
    "surrogate": "clip", "clip_coef": 0.2, "kl_coef": 1.0, "clip_vloss": False, "vf_coef": 0.5,
    "norm_adv": True, "norm_obs": True, "norm_rewards": True, "recompute_advantages": False,
    "adapt": "none", "desired_kl": 0.02, "target_kl": None,
    "ent_coef": 0.01, "anneal_ent_coef": False, "target_entropy": None,
    "scale_actions": True, "init_log_std": -0.5, "min_log_std": -20.0, "activation": "elu",
}  # fmt: skip
SMALL = {  # settings of short runs from the command line
    "num_envs": 4, "num_steps": 32, "update_epochs": 2, "num_minibatches": 2, "eval_episodes": 3,
    "hidden_size": 16, "total_timesteps": 300,
}  # fmt: skip


class Case:
    """One script, and the distribution of its policies."""

    def __init__(self, script):
        self.script, self.file = script, f"{script.__name__}.py"

    def __repr__(self):
        return self.script.__name__

    def make_args(self, **changes):
        known = {setting.name for setting in fields(self.script.Args)}
        plain = {name: value for name, value in PLAIN.items() if name in known}
        settings = plain | changes
        if settings.get("adapt") == "none":
            settings.pop("desired_kl")  # scripts refuse what has no effect
        return replace(self.script.Args(), **settings)

    def make_state(self, args):
        coefficients = [field.name for field in fields(self.script.State) if hasattr(args, field.name)]
        return self.script.State(*(getattr(args, name) for name in coefficients))

    def make_agent(self, args, seed=0, obs_space=None, num_actions=None):
        """Return an agent whose policy depends on the observation, with statistics of its own."""
        torch.manual_seed(seed)
        obs_space = obs_space or spaces.Box(-np.inf, np.inf, (D,))
        agent = self.script.Agent(args, obs_space, num_actions or self.num_actions)
        with torch.no_grad():
            for parameter in agent.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
        agent.obs_moments.update(0.5 + 2 * torch.randn(50, spaces.flatdim(obs_space)))
        agent.return_moments.update(1 + 3 * torch.randn(50, 1))
        return agent

    def make_optimizer(self, agent):
        return Adam(agent.parameters(), 99.0, eps=1e-5)  # the learning rate is the state's

    def make_rollout(self, args, agent, seed=0, chance=0.2):
        """Return a rollout of random observations and rewards, with actions that the agent has sampled."""
        rng = np.random.default_rng(seed)
        rollout = self.script.Rollout(args, D)
        terminated, truncated = same_step_ends(rng, args.num_steps, args.num_envs, chance)
        rollout.terminated[:], rollout.truncated[:] = terminated, truncated
        seen, last = 1 + 2 * rng.normal(size=(2, args.num_steps + 1, args.num_envs, D))
        ended = (terminated | truncated)[..., np.newaxis]
        rollout.obs[:], rollout.next_obs[:] = seen[:-1], np.where(ended, last[1:], seen[1:])
        rollout.current_obs = seen[-1].astype(np.float32)
        rollout.rewards[:] = 0.3 + rng.normal(size=rollout.rewards.shape)
        rollout.discounted_returns[:] = rng.normal(size=args.num_envs)
        torch.manual_seed(seed)
        with torch.no_grad():
            rollout.policies = agent.policy(agent.normalize(torch.tensor(rollout.obs)))
            rollout.actions = self.distribution(rollout.policies).sample()
        return rollout

    def begin(self, args, seed=10):
        """Return environments just reset, an agent and an empty rollout."""
        envs = self.script.make_envs(args, self.script.hash_seed(args.seed, 0))
        obs_space, num_actions = envs.single_observation_space, self.count(envs.single_action_space)
        agent = self.make_agent(args, 3, obs_space, num_actions)
        size = obs_space.shape[0]
        agent.obs_moments.mean.copy_(torch.linspace(11, 3, size))
        agent.obs_moments.var.copy_(torch.linspace(1, 9, size))
        rollout = self.script.Rollout(args, size)
        rollout.current_obs, _ = envs.reset(seed=seed)
        return envs, agent, rollout

    def make_batch(self, agent, rollout, args):
        normalised = self.script.normalize_rollout(agent, rollout, args)
        return self.script.make_batch(agent, rollout, *normalised, args)

    def update(self, agent, batch, args, seed=0, loss=None, optimizer=None, state=None, remake=None):
        """Call `update` of the script, with its permutations seeded. Return its metrics."""
        torch.manual_seed(seed)
        optimizer, state = optimizer or self.make_optimizer(agent), state or self.make_state(args)
        compute = self.script.compute_gradients
        with mock.patch.object(self.script, "ppo_loss", loss or self.script.ppo_loss):
            more = [remake] if self.script is ppo_continuous else []
            return self.script.update(agent, optimizer, compute, batch, args, state, *more)

    def learn(self, agent, rollout, args, **given):
        """Learn from a rollout as in an iteration. See `update`."""
        return self.update(agent, self.make_batch(agent, rollout, args), args, **given)

    def policy(self, agent, obs, norm_obs=True):
        """Return an agent's policy for raw observations [..., D], in float64."""
        inputs = torch.from_numpy(normalized(agent, obs, norm_obs))
        return float64(copy.deepcopy(agent).double().policy(inputs))

    def values(self, agent, obs, norm_obs=True):
        """Return an agent's values [...] of raw observations [..., D], in float64."""
        return float64(
            copy.deepcopy(agent).double().value(torch.from_numpy(normalized(agent, obs, norm_obs)))
        )


class Discrete(Case):
    """A policy is a vector, log π(·|s)."""

    env_id, walk = "scripted_envs:Scripted-v0", "user_envs:Walk-v0"
    num_actions = 4

    def count(self, space):
        return int(space.n)

    def distribution(self, policy):
        return Categorical(logits=policy)

    def random_policies(self, seed, rows, actions, scale):
        """Return two policies, and actions, in float64."""
        generator = torch.Generator().manual_seed(seed)
        logits = scale * torch.randn(2, rows, actions, generator=generator, dtype=torch.float64)
        chosen = torch.randint(actions, (rows,), generator=generator)
        old, new = torch.log_softmax(logits[0], -1), torch.log_softmax(logits[0] + 0.4 * logits[1], -1)
        return old, new, chosen


class Continuous(Case):
    """A policy is a vector of means, then log standard deviations."""

    env_id, walk = "scripted_envs:ScriptedBox-v0", "user_envs:WalkBox-v0"
    num_actions = 2

    def count(self, space):
        return space.shape[0]

    def distribution(self, policy):
        mean, log_std = policy.chunk(2, -1)
        return Independent(Normal(mean, log_std.exp()), 1)

    def random_policies(self, seed, rows, actions, scale):
        """Return two policies, and actions that are near, in float64."""
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(5, rows, actions, generator=generator, dtype=torch.float64)
        old = torch.cat([scale * numbers[0], numbers[1].clamp(-3, 1)], -1)
        new = torch.cat([scale * numbers[0] + 0.2 * numbers[2], old[:, actions:] + 0.2 * numbers[3]], -1)
        return old, new, scale * numbers[0] + old[:, actions:].exp() * numbers[4]


DISCRETE, CONTINUOUS = Discrete(ppo), Continuous(ppo_continuous)
LSTM = Discrete(ppo_lstm)  # its memory, rollout, batch, loss and update are tested in test_lstm.py
ATARI = Discrete(ppo_atari)  # its networks, rollout and update are tested in test_atari.py
each_script = pytest.mark.parametrize("case", [DISCRETE, CONTINUOUS], ids=repr)
memory_too = pytest.mark.parametrize("case", [DISCRETE, CONTINUOUS, LSTM], ids=repr)
atari_too = pytest.mark.parametrize("case", [DISCRETE, CONTINUOUS, ATARI, LSTM], ids=repr)


def same_step_ends(rng, steps, envs, chance):
    """Return terminated, truncated [steps, envs] of environments that reset in the step that ends an episode.

    Each step may end an episode, by either kind of end or by both at once.
    """
    ended, kind = rng.random((steps, envs)) < chance, rng.integers(3, size=(steps, envs))
    return ended & (kind != 1), ended & (kind != 0)


def weights(agent):
    """Return all parameters as one vector."""
    return torch.cat([parameter.detach().flatten() for parameter in agent.parameters()]).clone()


def float64(tensor):
    return tensor.detach().double().numpy()


def normalized(agent, obs, norm_obs=True):
    """Return raw observations [..., D] as the networks see them."""
    obs = np.asarray(obs, np.float64)
    if not norm_obs:
        return obs
    scaled = (obs - float64(agent.obs_moments.mean)) / np.sqrt(float64(agent.obs_moments.var) + 1e-8)
    return np.clip(scaled, -10, 10)


def direct_gae(rewards, values, terminated, truncated, gamma, gae_lambda, next_values=None):
    """Sum A_t = Σ_l (γλ)^l δ_{t+l} for each t by itself, up to the episode's end or the last row.

    Row t of `next_values` is the value of the state that step t led to. Without them, it is row t+1 of
    `values`, which then have one row more.
    """
    next_values = values[1:] if next_values is None else next_values
    advantages = np.zeros(rewards.shape)
    for t, n in np.ndindex(*rewards.shape):
        for step in range(t, len(rewards)):
            future = 0.0 if terminated[step, n] else gamma * next_values[step, n]
            delta = rewards[step, n] + future - values[step, n]
            advantages[t, n] += (gamma * gae_lambda) ** (step - t) * delta
            if terminated[step, n] or truncated[step, n]:
                break
    return advantages


class RewardScale:
    """Divide rewards by the deviation of all discounted returns so far, one transition at a time."""

    def __init__(self, agent, rollout, gamma):
        """Continue from the statistics of an agent, and from the episodes under way in a rollout."""
        self.gamma, self.running = gamma, rollout.discounted_returns.tolist()
        moments = agent.return_moments
        mean, std, count = moments.mean.item(), np.sqrt(moments.var.item()), int(moments.count.item())
        self.seen = [mean - std, mean + std] * (count // 2)  # other numbers with the same moments

    def scale(self, rewards, ended):
        """Return the scaled rewards [steps, envs] of the next steps. `ended` says which ended an episode."""
        for t, n in np.ndindex(*rewards.shape):
            self.running[n] = self.gamma * self.running[n] + float(rewards[t, n])
            self.seen.append(self.running[n])
            if ended[t, n]:
                self.running[n] = 0.0
        return np.clip(rewards / np.sqrt(np.var(self.seen) + 1e-8), -10, 10)


def flags(**settings):
    """Return settings as words of a command."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def call(case, folder, *words):
    """Run a script's `main` in a folder, in this process. Return its status, output and errors."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    user_envs.LOG.clear()
    sys.path_importer_cache.pop(".", None)  # it is another folder now
    before, argv, path = Path.cwd(), sys.argv, sys.path[:]
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            os.chdir(folder)
            sys.argv = [case.file, *map(str, words)]
            case.script.main()
        except SystemExit as end:
            status = end.code or 0
        except Exception:  # what Python does with it
            traceback.print_exc()
            status = 1
        finally:
            os.chdir(before)
            sys.argv, sys.path[:] = argv, path
            for number, handler in handlers.items():
                signal.signal(number, handler)
            if hasattr(case.script, "STOP"):  # the next call is as in a new process
                case.script.STOP.clear()
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue())


def run(case, folder, *words, **settings):
    """Call a script with the small settings, on its `Walk`. It must succeed."""
    known = {setting.name for setting in fields(case.script.Args)}
    small = {name: value for name, value in SMALL.items() if name in known}
    if "--resume" in words or "--evaluate" in words:
        small = {}
    done = call(case, folder, *flags(**{"env_id": case.walk} | small | settings), *words)
    assert (done.status, done.err) == (0, "")
    return done


def check(script, args):
    """Raise what a script would raise for these settings, or their environment, before it trains."""
    if hasattr(script, "check"):
        script.check(args)
    else:
        script.check_settings(args)
        if hasattr(script, "make_eval_env"):
            script.make_eval_env(args).close()


def assert_help(case, folder):
    """Check that --help tells the script's purpose and has a text for each flag."""
    shown = call(case, folder, "--help")
    assert shown.status == 0
    plain = re.sub(r"[│╭╮╰╯─\s]+", " ", shown.out)
    assert case.script.__doc__.split("\n")[0] in plain
    for setting in fields(case.script.Args):
        flag = f" --{setting.name.replace('_', '-')}"
        assert re.search(rf"{flag}\b[^(]*?\w\w\w \w.*?\(default: ", plain), flag


def checkpoint_in(folder):
    """Return the path of the checkpoint of the only run below a folder."""
    (path,) = folder.glob("runs/*/checkpoint.pt")
    return path


def load(path):
    """Return the content of a checkpoint."""
    return torch.load(path, weights_only=True)


def same(a, b):
    """Compare nested dicts and lists with tensors in them, bit for bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else repr(a) == repr(b)


TIMES = "charts/SPS", "charts/seconds_collecting", "charts/seconds_learning"


def curves(folder, left_out=TIMES):
    """Return a run's curves by tag and step, without the speed. A step that is logged twice fails."""
    files = sorted(folder.glob("events*"), key=lambda path: path.stat().st_mtime_ns)
    for i, path in enumerate(files):  # TensorBoard orders them by name, which has the second they began in
        path.rename(folder / f"events.out.tfevents.{i:09}")
    log, found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload(), {}
    for tag in log.Tags()["scalars"]:
        steps = [event.step for event in log.Scalars(tag)]
        assert steps == sorted(set(steps)), f"{tag} has a step twice, or goes back"
        if tag not in left_out:
            found[tag] = {event.step: event.value for event in log.Scalars(tag)}
    return found
