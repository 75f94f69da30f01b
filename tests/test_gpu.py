"""What is ppo_gpu.py's own: rollouts, environments, CUDA graphs, several processes, its command line."""

import contextlib
import copy
import importlib.util
import inspect
import io
import itertools
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gpu_envs
import graph_emulator
import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
from helpers import checkpoint_in, curves, flags, load, same, weights
from torch.distributions import Independent, Normal
from torch.optim import Adam

import ppo_gpu as ppo

CASE = SimpleNamespace(script=ppo, file="ppo_gpu.py")
SMALL = {"num_envs": 16, "num_steps": 8, "num_minibatches": 4, "update_epochs": 2, "hidden_size": 16}
SMALL |= {"device": "cpu", "total_timesteps": 8 * 16 * 8}
SCRIPTED = "gpu_envs:Scripted"


def make_args(**changes):
    return ppo.Args(**SMALL | {"env_id": "gpu_envs:Target"} | changes)


def make_agent(args, sizes=(4, 3, 2), seed=0):
    """An agent whose policy depends on what it sees, and whose statistics are not those of a new one."""
    torch.manual_seed(seed)
    agent = ppo.Agent(args, *sizes)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    agent.obs_moments.update(0.5 + 2 * torch.randn(50, sizes[0]))
    agent.return_moments.update(1 + 3 * torch.randn(50, 1))
    return agent


def make_batch(agent, rollout, args):
    return ppo.make_batch(agent, rollout, *ppo.normalize_rollout(agent, rollout), args)


def call(folder, *words, **settings):
    return helpers.call(CASE, folder, *flags(**settings), *words)


def run(folder, *words, **settings):
    """A short run from the command line, which must succeed. Returns what it printed, and its checkpoint."""
    folder.mkdir(exist_ok=True, parents=True)
    done = call(folder, *words, **{"env_id": "gpu_envs:Target"} | SMALL | settings)
    assert (done.status, done.err) == (0, ""), done.err
    return done.out, checkpoint_in(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A short run on the pendulums: its folder, what it printed, and its checkpoint."""
    folder = tmp_path_factory.mktemp("gpu")
    printed, path = run(folder, env_id="Pendulum", total_timesteps=16 * 8 * 60)
    return SimpleNamespace(folder=folder, printed=printed, path=path)


# Environments


def test_pendulums_are_gymnasiums():
    """For 1,000 steps: observations, rewards, the time limit, and how episodes start."""
    envs = ppo.Pendulums(make_args(num_envs=3)).double()
    envs.reset()
    theirs = [gym.make("Pendulum-v1") for _ in range(3)]
    rng, ends = np.random.default_rng(0), 0
    for env in theirs:
        env.reset()
    for _ in range(1000):
        actions = rng.uniform(-1.5, 1.5, (3, 1)).astype(np.float32)
        states = torch.stack([envs.angle, envs.speed]).numpy()
        obs, rewards, terminated, truncated, last_obs = envs.step(torch.from_numpy(actions).double())
        assert not terminated.any()
        for n, env in enumerate(theirs):
            env.unwrapped.state = states[:, n]  # the same again, as errors of rounding grow near the top
            their_obs, their_reward, _, their_end, _ = env.step(2 * actions[n])
            np.testing.assert_allclose(last_obs[n], their_obs, atol=1e-5)
            assert rewards[n].item() == pytest.approx(their_reward, abs=1e-5)
            assert truncated[n] == their_end
            assert torch.equal(obs[n], last_obs[n]) != their_end
            if their_end:
                env.reset()
                ends += 1
    assert ends == 3 * 5
    many = ppo.Pendulums(make_args(num_envs=20_000))
    many.reset()
    for values, bound in ((many.angle, np.pi), (many.speed, 1)):
        assert values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / np.sqrt(3), rel=0.02)
        assert values.mean().item() == pytest.approx(0, abs=0.03 * bound)


WRONG = {
    "another_shape": r"rewards must be .*\[16\] .* not .*\[16, 1\]",
    "info_too": "5 tensors, not 6",
    "Moved": "step changes steps, .* in its place, or set recordable = False",
    "CountsInPython": "step changes count",
    "CountsInAList": "step changes counts",
    "CountsInAPart": "step changes _part",
    "ReplacesABuffer": "step changes count",
    "DrawsFromNumpy": "step changes np.random",
    "DrawsFromItsOwn": "step changes generator",
    "HiddenState": "step changes drift, which is not in state_dict",
    "CountsInItsClass": "step changes count",
    "CopiesItsState": "level of state_dict must be a tensor, and no copy",
    "NoLimit": "has no max_steps",
    "no_limit": "max_steps must be a number of steps, not inf",
    "scalar_steps": "steps must be a tensor of 16 numbers",
    "no_log": "log must be a dict, not NoneType",
    "sees_too_much": "actor_obs_size must be from 1 to obs_size, 2",
    "text_in_log": r"log\['speed'\] must be a tensor on cpu, not float",
    "reset_with_info": "reset returns must be .* not tuple",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_environments(name, tmp_path):
    """What `reset` and `step` return is checked at once: one sentence, exit status 2, and no folder."""
    done = call(tmp_path, **SMALL, env_id=f"gpu_envs:{name}")
    assert (done.status, done.out, list(tmp_path.iterdir())) == (2, "", [])
    assert re.fullmatch(f"ppo_gpu.py: gpu_envs:{name}:? .*{WRONG[name]}.*\n", done.err)
    args = make_args(env_id=f"gpu_envs:{name}")
    with pytest.raises(ValueError, match=WRONG[name]):  # so are environments that a program makes
        ppo.train(args, getattr(gpu_envs, name)(args))


BEHAVES = {  # what an environment does with its actions, and how it is meant
    "ClampsInPlace": lambda args: gpu_envs.ClampsACopy(args),
    "Smooth": lambda args: gpu_envs.Smooth(args, copies=True),
}


@pytest.mark.parametrize("name", BEHAVES)
def test_actions_are_the_environments_to_change_and_to_keep(name, tmp_path, monkeypatch):
    """What is learnt, logged and evaluated is as if it had taken a copy."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id=name)
    envs = getattr(gpu_envs, name)(args), BEHAVES[name](args)
    one, other = (ppo.train(args, each) for each in envs)
    assert same(load(one["checkpoint"])["agent"], load(other["checkpoint"])["agent"])
    assert (one["greedy_returns"] == other["greedy_returns"]).all()
    logged = curves(Path(one["checkpoint"]).parent)
    assert max(logged["losses/first_approx_kl"].values()) < 1e-6
    assert logged == curves(Path(other["checkpoint"]).parent)


def test_environments_are_seeded_before_they_are_made():
    """What they draw then is decided by the seed, whatever was drawn before."""
    masses = []
    for seed in (3, 3, 4):
        torch.rand(5), np.random.default_rng().random()
        masses.append(torch.stack(ppo.make_envs(make_args(env_id="gpu_envs:RandomMasses", seed=seed)).masses))
    assert torch.equal(masses[0], masses[1])
    assert (masses[0] != masses[2]).any(1).all()


def test_a_curriculum_is_the_checkpoints(tmp_path, monkeypatch):
    """Evaluated, and resumed with other numbers of environments, it is at the level where training ended."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="gpu_envs:Curriculum", total_timesteps=8 * 16 * 6)
    results = ppo.train(args)
    path = results["checkpoint"]
    level = load(path)["state"]["episodes"]["envs.level"].item()
    assert level == pytest.approx(6 * 8 * 0.01)  # and none of the check
    assert ppo.evaluate(path, args, ppo.make_envs(args)) == pytest.approx(results["greedy_returns"])
    more = replace(args, resume=path, num_envs=32, total_timesteps=args.total_timesteps + 1)
    ppo.train(more)
    assert load(path)["state"]["episodes"]["envs.level"].item() == pytest.approx(level + 8 * 0.01)


@pytest.mark.parametrize("name", ["Curriculum", "ReplacesItsLevel"])
def test_the_level_that_is_saved_is_the_last_one(name, tmp_path):
    """Whether it changes in its place or, where steps are not recorded, is replaced."""
    _, path = run(tmp_path, env_id=f"gpu_envs:{name}")
    assert load(path)["state"]["episodes"]["envs.level"].item() == pytest.approx(8 * 8 * 0.01, abs=0.011)


def test_levels_of_other_numbers_of_environments(tmp_path):
    """They cannot be restored, which is said."""
    _, path = run(tmp_path, env_id="gpu_envs:LevelForEach")
    same_number = call(tmp_path, "--evaluate", path, env_id="gpu_envs:LevelForEach", device="cpu")
    assert "begin anew" not in same_number.out
    for what, total in (("--evaluate", 1024), ("--resume", 2048)):
        words = {"env_id": "gpu_envs:LevelForEach", "device": "cpu", "num_envs": 32, "total_timesteps": total}
        done = call(tmp_path, what, path, **words)
        assert re.search("begin anew: .*envs.level", done.out), done


def test_a_run_is_named_by_its_environments(tmp_path, monkeypatch):
    """Those that a program gives: so the command line takes no others for them."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="Pendulum")
    path = ppo.train(args, gpu_envs.Target(args))["checkpoint"]
    assert "Target" in path
    assert load(path)["args"]["env_id"] == "Target"


def test_environments_with_networks(tmp_path):
    """Gradients are off in them, also in `reset`; a buffer that is an expanded tensor does not harm."""
    _, path = run(tmp_path, env_id="gpu_envs:Neural")
    done = call(tmp_path, "--resume", path, env_id="gpu_envs:Neural", device="cpu", total_timesteps=2048)
    assert (done.status, done.err) == (0, "")


SHAPES = {0: lambda obs: obs[:1], 1: lambda rewards: rewards[0], 4: lambda last_obs: last_obs[:, :1]}


@pytest.mark.parametrize("index", SHAPES)
def test_later_steps_are_checked_too(index, tmp_path, monkeypatch):
    """Results of other shapes would broadcast without a word."""
    monkeypatch.chdir(tmp_path)
    args = make_args()
    with pytest.raises(ValueError, match="returned other shapes than the first one"):
        ppo.train(args, gpu_envs.Later(args, index, SHAPES[index]))


@pytest.mark.parametrize("value", [float("inf"), 1e20])
def test_nothing_that_is_not_finite_is_saved(value, tmp_path, monkeypatch):
    """A huge observation is clipped for the networks, but spoils the statistics: the run stops at once."""
    monkeypatch.chdir(tmp_path)
    args = make_args(keep_every=1.0)
    envs = gpu_envs.Later(args, 0, lambda obs: torch.where(obs > 0, value, obs))
    shown = f"{value:g}".replace("+", ".")
    with pytest.raises(FloatingPointError, match=rf"number \d of the observation of .* is {shown}"):
        ppo.train(args, envs)
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert load(path)["state"]["global_step"] == 2 * 128
    assert all(x.isfinite().all() for x in load(path)["agent"].values())


def test_a_bug_of_an_environment_keeps_its_traceback(tmp_path):
    """Only what the script refuses is one line."""
    done = call(tmp_path, env_id="gpu_envs:has_a_bug", **SMALL)
    assert done.status == 1
    assert "in has_a_bug" in done.err


def test_last_observations_of_the_next_episodes(tmp_path, monkeypatch):
    """A simulator that returns what follows the reset is seen; said once."""
    monkeypatch.chdir(tmp_path)
    for right in (False, True):
        args, said = make_args(), io.StringIO()
        with contextlib.redirect_stdout(said):
            ppo.train(args, gpu_envs.AfterReset(args, right))
        assert said.getvalue().count("last_obs is what reset returned") == (0 if right else 1)


def test_an_evaluation_tells_what_the_environment_logs(tmp_path, capsys):
    """Means over the episodes that count."""
    printed, path = run(tmp_path, env_id="gpu_envs:Logs")
    assert re.search(r"means of its steps: reward/effort [\d.e-]+, half 0.5, success [\d.e-]+", printed)
    args = make_args(num_envs=3, env_id="LogsItsSteps")
    ppo.evaluate(path, args, gpu_envs.LogsItsSteps(args))
    assert "means of its steps: step 1.67\n" in capsys.readouterr().out  # of 1, 1, 2, 1, 2, 3


def test_an_evaluation_can_be_stopped(trained, monkeypatch):
    """By Ctrl-C: at once, without a result."""
    monkeypatch.setattr(ppo.STOP, "is_set", lambda: True)
    args = make_args(env_id="Pendulum")
    envs = ppo.make_envs(args)
    monkeypatch.setattr(envs, "step", lambda actions: 1 / 0)
    assert len(ppo.evaluate(trained.path, args, envs)) == 0


def test_an_environment_may_need_gradients(tmp_path, monkeypatch):
    """In training, and in the evaluation."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="gpu_envs:NeedsGradients")
    assert len(ppo.train(args)["greedy_returns"]) == 16


def test_a_simulation_that_diverged_ends_the_episode(tmp_path, monkeypatch):
    """Where it says so by `terminated`: reward 0 there, counted; training and evaluation go on."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="Diverges")
    path = Path(ppo.train(args, gpu_envs.Diverges(args))["checkpoint"])
    logged = curves(path.parent)
    assert sum(logged["env/diverged"].values()) * 8 * 16 == pytest.approx(9)  # of 1 + 64 steps
    # The first episode is not logged. All others are of 7 steps, the last of which gives nothing.
    assert {*logged["charts/episodic_return"].values()} == {6}
    envs = gpu_envs.Diverges(args)
    envs.max_steps = 20
    assert ppo.evaluate(path, args, envs).tolist() == [20, 6, *[20] * 14]


def test_what_is_not_finite_is_named(tmp_path, monkeypatch):
    """The environment, the kind of number, and its place; or that the environment is not to blame."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="Diverges")
    with pytest.raises(FloatingPointError, match="the reward of environment 1 is nan in step 5 of"):
        ppo.train(args, gpu_envs.Diverges(args, says_so=False))
    agent = make_agent(args)
    rollout = random_rollout(args, agent)
    assert "environment's numbers are finite" in ppo.not_finite(rollout)
    for name, column in (("observation", rollout.obs), ("action", rollout.actions)):
        for value in (float("nan"), float("-inf"), 1e30):
            old = column[3, 2, 1].item()
            column[3, 2, 1] = value
            place = f"number 1 of the {name} of environment 2 is {value:g} in step 3"
            assert ppo.not_finite(rollout).startswith(place)
            column[3, 2, 1] = old


def test_what_the_environment_logs(tmp_path):
    """Means over an iteration: of all environments, of one number, and of what is known at ends only."""
    _, path = run(tmp_path, env_id="gpu_envs:Logs")
    logged = curves(path.parent)
    assert {*logged["env/half"].values()} == {0.5}
    assert all(0 < value < 4 for value in logged["env/reward/effort"].values())
    assert all(0 <= value <= 1 for value in logged["env/success"].values())
    assert len({*logged["env/success"].values()}) > 1
    torch.manual_seed(0)
    args = make_args(env_id="gpu_envs:Logs")
    envs, agent, seen = gpu_envs.Logs(args), make_agent(args, (2, 1, 1)), []
    step = envs.step

    def watched(actions):
        results = step(actions)
        seen.append({name: x.clone() for name, x in envs.log.items()})
        return results

    envs.step = watched
    _, means = ppo.collect_rollout(envs, partial(ppo.act, agent), envs.reset(), torch.zeros(3, 16), args)
    for name in ("reward/effort", "success"):
        values = torch.cat([x[name] for x in seen])
        assert means[name].item() == pytest.approx(values[~values.isnan()].mean().item()), name


def test_large_rewards_are_seen(tmp_path, monkeypatch):
    """The share of scaled rewards at the clip, and the standard deviation of the policy that acted."""
    monkeypatch.chdir(tmp_path)
    args = make_args(gamma=0.0)
    envs = gpu_envs.Wrong(args, 1, lambda x: torch.where(torch.rand_like(x) < 0.005, -1e3, x))
    logged = curves(Path(ppo.train(args, envs)["checkpoint"]).parent)
    assert 0 < np.mean([*logged["losses/reward_clipfrac"].values()]) < 0.03
    assert logged["losses/std"][128] == pytest.approx(np.exp(-0.5))


# Rollout and batch


def random_rollout(args, agent, seed=0):
    """Random rows, with ends of all kinds in all steps, and NaN for the state after a terminal one."""
    torch.manual_seed(seed)
    shape = args.num_steps, args.num_envs
    obs, last_obs = 1 + 2 * torch.randn(2, *shape, agent.obs_moments.mean.numel())
    with torch.no_grad():
        actions, log_probs = ppo.act(agent, obs)
    terminated, truncated = torch.rand(2, *shape) < 0.15
    last_obs[terminated] = torch.nan
    rewards = 0.3 + torch.randn(shape)
    sums = torch.randn(args.num_steps, 3, args.num_envs)
    return ppo.Rollout(obs, actions, log_probs, rewards, terminated, truncated, last_obs, sums)


def test_the_actor_does_not_see_what_only_the_simulator_knows():
    """It acts on the first numbers of an observation; the critic sees all."""
    agent = make_agent(make_args())
    obs = torch.randn(5, 4)
    changed = obs + torch.tensor([0, 0, 0, 1.0])
    assert torch.equal(agent.policy(obs), agent.policy(changed))
    assert not torch.equal(agent.policy(obs), agent.policy(obs + torch.tensor([0, 0, 1.0, 0])))
    assert (agent.value(obs) != agent.value(changed)).all()


def replay(n, episode, steps, actions):
    """What `Scripted` does in one environment, step by step: rows; and sums, of which 0.9 discounts one."""
    rows, sums, discounted, total, step, action = [], [], 0.0, np.nan, 0, 0.0
    for t in range(steps):
        obs = gpu_envs.Scripted.observe(n, episode, step, action)
        step, action = step + 1, float(actions[t])
        reward = gpu_envs.Scripted.reward(n, episode, step)
        terminated, truncated = gpu_envs.Scripted.ends(n, episode, step)
        last_obs = gpu_envs.Scripted.observe(n, episode, step, action)
        discounted, total = 0.9 * discounted + reward, total + reward
        rows.append((obs, reward, terminated, truncated, last_obs))
        sums.append((discounted, total, step))
        if terminated or truncated:
            episode, step, discounted, total, action = episode + 1, 0, 0.0, 0.0, 0.0
    return rows, sums


def test_a_rollout_is_the_script():
    """Each row of several rollouts, with ends in all places; and the actions are the policy's.

    So are discounted returns, returns and lengths, but for the returns of first episodes, which are NaN.
    """
    args = make_args(env_id=SCRIPTED, num_envs=7, num_steps=5, gamma=0.9)
    agent, envs = make_agent(args), gpu_envs.Scripted(args)
    obs, sums = envs.reset().clone(), torch.zeros(3, 7)
    sums[1] = torch.nan
    rollouts, noise = [], []
    for _ in range(8):
        with torch.no_grad():
            rollout, _ = ppo.collect_rollout(envs, partial(ppo.act, agent), obs, sums, args)
            policy = agent.policy(agent.normalize(rollout.obs))
        torch.testing.assert_close(rollout.log_probs, ppo.log_prob(policy, rollout.actions))
        means, log_stds = policy.chunk(2, -1)
        noise.append((rollout.actions - means) / log_stds.exp())
        rollouts.append(rollout)
    noise = torch.stack(noise)
    assert abs(noise.mean()) < 0.15
    assert abs(noise.std() - 1) < 0.1
    joined = ppo.Rollout(*(torch.cat(column) for column in zip(*rollouts, strict=True)))
    kinds = set()
    for n in range(7):
        rows, sums = replay(n, 1, 40, joined.actions[:, n, 0])
        obs, rewards, terminated, truncated, last_obs = map(np.array, zip(*rows, strict=True))
        np.testing.assert_allclose(joined.obs[:, n], obs, rtol=1e-6)
        np.testing.assert_allclose(joined.rewards[:, n], rewards, rtol=1e-5)
        np.testing.assert_array_equal(joined.terminated[:, n], terminated)
        np.testing.assert_array_equal(joined.truncated[:, n], truncated)
        np.testing.assert_allclose(joined.last_obs[:, n][~terminated], last_obs[~terminated], rtol=1e-6)
        np.testing.assert_allclose(joined.sums[:, :, n], sums, rtol=1e-5)
        ends = zip(terminated, truncated, np.arange(40) % 5, strict=True)
        kinds |= {(a, b, step in (0, 4)) for a, b, step in ends if a or b}
    # terminated, truncated, both; in the first or last step of a rollout, and elsewhere
    assert len(kinds) == 6


def test_a_batch_is_exact():
    """Scaled rewards, advantages, returns and statistics of two rollouts, against NumPy in float64.

    All rows are there, observations are normalised as they were when acting, and no result is NaN.
    """
    args = make_args(num_envs=6, num_steps=9, gamma=0.9, gae_lambda=0.8)
    agent = make_agent(args)
    moments = agent.return_moments
    mean, std, count = moments.mean.item(), moments.var.sqrt().item(), int(moments.count)
    seen = [mean - std, mean + std] * (count // 2)  # other numbers with the same moments
    for seed in range(2):
        before, rollout = copy.deepcopy(agent), random_rollout(args, agent, seed)
        batch = make_batch(agent, rollout, args)
        assert all(column.isfinite().all() for column in batch)
        rewards = rollout.rewards.double().numpy()
        seen += rollout.sums[:, 0].flatten().tolist()  # of discounted returns
        scaled = np.clip(rewards / np.sqrt(np.var(seen) + 1e-8), -10, 10)
        with torch.no_grad():
            obs = before.normalize(rollout.obs)
            values, next_values = before.value(obs), before.value(before.normalize(rollout.last_obs))
        ends = rollout.terminated.numpy(), rollout.truncated.numpy()
        advantages = helpers.direct_gae(scaled, values.numpy(), *ends, 0.9, 0.8, next_values.numpy())
        np.testing.assert_allclose(batch.advantages, advantages.flatten(), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(
            batch.returns, (advantages + values.numpy()).flatten(), rtol=1e-3, atol=1e-4
        )
        assert torch.equal(batch.obs, obs.flatten(0, 1))
        assert torch.equal(batch.actions, rollout.actions.flatten(0, 1))
        assert torch.equal(batch.old_log_probs, rollout.log_probs.flatten())
        assert agent.obs_moments.count == 50 + (seed + 1) * 54
    assert moments.var.item() == pytest.approx(np.var(seen), rel=1e-4)


# Update


def reference_update(agent, batch, orders, args, rate):
    """K epochs, written anew: the equations by torch.distributions, and gradients clipped by hand."""
    optimizer, norms = Adam(agent.parameters(), rate, eps=1e-5), []
    for order in orders:
        for rows in np.array_split(order.numpy(), args.num_minibatches):
            obs, actions, old, advantages, returns, _ = (column[rows] for column in batch)
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
            mean, log_std = agent.policy(obs).chunk(2, -1)
            normal = Independent(Normal(mean, log_std.exp()), 1)
            ratio = (normal.log_prob(actions) - old).exp()
            low, high = 1 - args.clip_coef, 1 + args.clip_coef
            worse = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low)) * advantages
            value_loss = ((agent.value(obs) - returns) ** 2).mean() / 2
            loss = args.vf_coef * value_loss - worse.mean() - args.ent_coef * normal.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.cat([x.grad.flatten() for x in agent.parameters()]).norm().item())
            for x in agent.parameters():
                x.grad *= min(1, args.max_grad_norm / (norms[-1] + 1e-6))
            optimizer.step()
    return norms


@pytest.mark.parametrize(
    "changes",
    [{}, {"clip_coef": 0.02, "ent_coef": 0.1, "vf_coef": 2.0}, {"max_grad_norm": 0.1, "num_minibatches": 5}],
)
def test_an_update_is_the_equations(changes):
    """Weights after all epochs on batches whose ratios clip, by an independent implementation in float64."""
    args = make_args(num_envs=8, num_steps=9, learning_rate=3e-3, **changes)
    agent = make_agent(args)
    batch = make_batch(agent, random_rollout(args, agent), args)
    batch = ppo.Batch(*(column.double() for column in batch))
    agent.double()
    other = copy.deepcopy(agent)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    orders = torch.stack([torch.randperm(72), torch.randperm(72)])
    metrics = ppo.update(agent, optimizer, ppo.compute_gradients, batch, orders, args)
    norms = reference_update(other, batch, orders, args, args.learning_rate)
    torch.testing.assert_close(weights(agent), weights(other), rtol=1e-7, atol=1e-9)
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms))
    assert metrics["clipfrac"] > 0.05 or args.clip_coef > 0.1
    errors = 1 - batch.advantages.var() / batch.returns.var()
    assert metrics["explained_variance"] == pytest.approx(errors.item())


def test_every_row_is_learnt_from(tmp_path, monkeypatch):
    """Once in each epoch, in another order, with a learning rate that is 0 where training ends."""
    update, seen = ppo.update, []
    monkeypatch.setattr(ppo, "update", lambda *x: seen.extend(x[4].clone()) or update(*x))
    _, path = run(tmp_path, learning_rate=0.01)
    assert len(seen) == 8 * 2
    assert all(torch.equal(order.sort().values, torch.arange(128)) for order in seen)
    assert len({tuple(order.tolist()) for order in seen}) == 16
    rates = [*curves(path.parent)["charts/learning_rate"].values()]
    assert rates == pytest.approx([0.01 * (1 - i / 8) for i in range(8)])


def test_the_learning_rate_follows_the_kl(tmp_path, monkeypatch):
    """With --desired-kl: before each gradient step but the first, by the KL so far, in RSL-RL's limits."""
    compute, found = ppo.compute_gradients, []

    def watched(agent, *given):
        metrics = compute(agent, *given)
        found.append(metrics["approx_kl"].item())
        return metrics

    monkeypatch.setattr(ppo, "compute_gradients", watched)
    settings = {"update_epochs": 10, "total_timesteps": 20 * 128, "learning_rate": 3e-3, "ent_coef": 0.3}
    _, path = run(tmp_path / "a", desired_kl=0.02, **settings)
    rate, rates = 3e-3, []
    for i, kl in enumerate(found):
        kl = 0.02 if i % 40 == 0 else kl
        rate = rate / 1.5 if kl > 0.04 else rate * 1.5 if kl < 0.01 else rate
        rate = min(max(rate, 1e-5), 1e-2)
        rates.append(rate)
    logged = curves(path.parent)["charts/learning_rate"]
    assert [*logged.values()] == pytest.approx(np.reshape(rates, (-1, 40)).mean(1), rel=1e-4)
    assert min(rates) < 3e-3 < max(rates)
    assert load(path)["optimizer"]["param_groups"][0]["lr"].item() == pytest.approx(rates[-1], rel=1e-4)


def test_resuming_with_an_adapted_learning_rate(tmp_path):
    """It goes on, unless a flag gives another one."""
    settings = {"env_id": "gpu_envs:Target", "device": "cpu"}
    _, path = run(tmp_path, desired_kl=0.02, learning_rate=1e-5)
    last = load(path)["optimizer"]["param_groups"][0]["lr"].item()
    assert last > 1e-3
    for rate, total in ((None, 1152), (2e-5, 1280)):
        more = settings | {"total_timesteps": total} | ({"learning_rate": rate} if rate else {})
        assert call(tmp_path, "--resume", path, **more).status == 0
        first = curves(path.parent)["charts/learning_rate"][total]
        expected = rate or last
        assert expected / 20 < first < expected * 20  # it is adapted within the iteration, too


@pytest.mark.slow
def test_compiled(tmp_path):
    """--compile computes the same gradients: after an iteration, the same weights up to rounding."""
    if torch.__version__ < "2.13":
        pytest.skip("needs PyTorch 2.13")
    paths = [run(tmp_path / name, *words, total_timesteps=128)[1] for name, words in COMPILED.items()]
    plain, fast = (load(path)["agent"] for path in paths)
    for name in plain:
        torch.testing.assert_close(fast[name], plain[name], rtol=1e-3, atol=1e-5)
    for words in ("--device cuda", "--device mps"):
        assert call(tmp_path, "--compile", *words.split()).status == 2


COMPILED = {"plain": [], "compiled": ["--compile"]}


# CUDA graphs, on a CPU: `recorded` itself, with a stand-in for torch.cuda


ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture
def cuda(monkeypatch):
    """`train` with CUDA graphs: on a GPU, those of torch.cuda, elsewhere an emulator's."""
    if ON_GPU:
        strict = {"check_input_liveness": True} if torch.__version__ >= "2.13" else {}
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, **strict))
        return
    text, on_gpu = inspect.getsource(ppo.train), ' and args.device == "cuda"'
    assert text.count(on_gpu) == 1
    exec(text.replace(on_gpu, ""), vars(ppo), namespace := {})
    monkeypatch.setattr(ppo, "train", namespace["train"])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph_emulator.CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph_emulator.graph)


def checkpoints(folder, *words, **settings):
    """Of a run without graphs, and of one with them."""
    settings |= {"max_grad_norm": 0.3, "total_timesteps": 16 * 8 * 7, "device": DEVICE}
    _, plain = run(folder / "plain", "--no-cuda-graphs", *words, **settings)
    _, graphs = run(folder / "graphs", *words, **settings)
    return plain, graphs


RECORDED = "Pendulum", "gpu_envs:Curriculum", "gpu_envs:Privileged", "gpu_envs:Logs"
NOT_RECORDED = SCRIPTED, "gpu_envs:ClampsACopy"  # of which each choice of actions is


GRAPHS = [*([env_id, []] for env_id in (*RECORDED, *NOT_RECORDED)), ["Pendulum", ["--desired-kl", "0.01"]]]


@pytest.mark.parametrize(("env_id", "words"), GRAPHS)
def test_graphs_change_nothing(env_id, words, tmp_path, cuda):
    """Training with recorded functions gives the same checkpoint and curves: on a CPU, bit for bit.

    It fails if results are kept without a copy, if memory is freed or replaced that a graph uses, if a number
    that changes is not a tensor, or if a recorded function reads the device.
    """
    if ON_GPU and env_id == SCRIPTED:
        pytest.skip("is on the CPU")
    plain, graphs = checkpoints(tmp_path, *words, env_id=env_id)
    one, other = load(plain), load(graphs)
    if ON_GPU:
        for name, x in one["agent"].items():
            torch.testing.assert_close(other["agent"][name], x, rtol=1e-2, atol=1e-3)
        return
    for content in (one, other):
        for x in content["state"]["episodes"].values():
            x.nan_to_num_(7)  # NaN is not equal to NaN
    for name in ("agent", "state", "random"):
        assert same(one[name], other[name]), name
    assert same(one["optimizer"]["state"], other["optimizer"]["state"])
    assert curves(plain.parent) == curves(graphs.parent)


FAULTS = "Moved", "CountsInPython", "ReplacesABuffer", "DrawsFromNumpy", "Smooth", "ClampsInPlace"


@pytest.mark.parametrize("name", FAULTS)
def test_what_graphs_would_get_wrong(name, tmp_path, monkeypatch, cuda):
    """Environments that break their promise to be recordable: refused, and if not, an error or other weights.

    With `recordable = False`, they are right.
    """
    environment = getattr(gpu_envs, name)
    monkeypatch.setattr(environment, "recordable", False)
    settings = SMALL | {"env_id": f"gpu_envs:{name}", "device": DEVICE, "total_timesteps": 16 * 8 * 7}
    plain, graphs = checkpoints(tmp_path / "right", env_id=f"gpu_envs:{name}")
    assert ON_GPU or same(load(plain)["agent"], load(graphs)["agent"])
    if name == "ClampsInPlace":  # without a copy of the actions, it would be wrong without graphs, too
        return
    if name == "Smooth":
        text = inspect.getsource(ppo.collect_rollout)
        exec(text.replace("actions.clone()", "actions"), vars(ppo), namespace := {})
        monkeypatch.setattr(ppo, "collect_rollout", namespace["collect_rollout"])
    else:
        monkeypatch.setattr(environment, "recordable", True)
        monkeypatch.setattr(ppo, "check_envs", lambda *_: None)
    _, plain = run(tmp_path / "plain", "--no-cuda-graphs", **settings)
    graphs = call(tmp_path, **settings)
    if graphs.status == 0:
        assert not same(load(plain)["agent"], load(checkpoint_in(tmp_path))["agent"])
    else:
        assert re.search("cannot be part of|was freed|captur", graphs.err)


# Runs


def test_what_a_run_prints_and_holds(trained):
    """Its path, the return of whole episodes, and a checkpoint that loads without executing code."""
    assert re.search(r"^ +7,680 steps  return -1\d\d\d", trained.printed, re.MULTILINE)
    (path,) = re.findall(r"^checkpoint (\S+),", trained.printed, re.MULTILINE)
    assert (trained.folder / path).samefile(trained.path)
    content = load(trained.path)
    assert content["state"]["global_step"] == 7680
    assert content["agent"]["obs_moments.count"] == content["agent"]["return_moments.count"] == 7680
    assert {slots["step"].item() for slots in content["optimizer"]["state"].values()} == {60 * 2 * 4}


def test_a_run_that_was_stopped_resumes_as_if_it_had_not_been(trained, tmp_path, monkeypatch):
    """What a run saved last is of a whole iteration; from there, episodes and all else continue.

    Weights, statistics, optimizer and curves are those of a run that was not stopped, bit for bit.
    """
    log = ppo.Run.log

    def stopped(run, *args):
        if run.state.global_step == 27 * 128:
            raise KeyboardInterrupt  # after the update
        log(run, *args)
        run.save()

    monkeypatch.setattr(ppo.Run, "log", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, env_id="Pendulum", total_timesteps=7680)
    path = checkpoint_in(tmp_path)
    assert load(path)["state"]["global_step"] == 26 * 128
    monkeypatch.setattr(ppo.Run, "log", log)
    done = call(tmp_path, "--resume", path, device="cpu")
    assert (done.status, done.err) == (0, "")
    assert "3,328 of 7,680 steps" in done.out
    for name in ("agent", "optimizer", "state", "random"):
        assert same(load(path)[name], load(trained.path)[name]), name
    resumed, whole = curves(path.parent), curves(trained.path.parent)
    whole["charts/episodic_return_100"] = resumed["charts/episodic_return_100"] = None  # of this process
    assert resumed == whole


def test_resuming_with_other_environments(trained, tmp_path):
    """Of another number: their episodes are new, and the rest continues; on a CPU, also if a GPU began."""
    path, content = tmp_path / "checkpoint.pt", load(trained.path)
    content["optimizer"]["param_groups"][0]["capturable"] = True  # as on a GPU
    torch.save(content, path)
    done = call(tmp_path, "--resume", path, device="cpu", num_envs=32, total_timesteps=7680 + 512)
    assert (done.status, done.err) == (0, "")
    assert load(path)["agent"]["obs_moments.count"] == load(path)["state"]["global_step"] == 7680 + 512
    assert not load(path)["optimizer"]["param_groups"][0]["capturable"]


def test_a_policy_acts_as_in_training(trained):
    """`load_policy` gives the means for raw observations; an evaluation has one episode per environment."""
    act, content = ppo.load_policy(trained.path), load(trained.path)
    obs = torch.randn(5, 3)
    assert not act(obs).requires_grad
    assert torch.equal(ppo.load_policy(trained.path.parent)(obs), act(obs))  # the folder of a run will do
    agent = ppo.Agent(ppo.Args(**content["args"]), 3, 3, 1)
    agent.load_state_dict(content["agent"])
    assert torch.equal(act(obs), agent.policy(agent.normalize(obs))[:, :1])
    args = make_args(env_id="Pendulum", num_envs=5)
    returns = ppo.evaluate(trained.path, args, ppo.make_envs(args))
    envs, totals = ppo.make_envs(args), torch.zeros(5)
    torch.manual_seed(1 + 2**30)
    obs = envs.reset()
    for _ in range(200):
        obs, rewards, *_ = envs.step(act(obs))
        totals += rewards
    np.testing.assert_allclose(returns, totals, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["gpu_envs:Privileged", SCRIPTED])
def test_an_exported_policy(env_id, tmp_path):
    """It takes what the actor sees; as ONNX, as a program, and traced, it acts as `load_policy`.

    So does the agent, for all that the critic sees, in batches of other sizes.
    """
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    _, path = run(tmp_path, env_id=env_id)
    args, content = ppo.load_checkpoint(path)
    agent = ppo.Agent(args, *(sizes := content["agent"]["sizes"].tolist()))
    agent.load_state_dict(content["agent"])
    policy = ppo.load_policy(path)
    full = 20 * torch.randn(256, sizes[0])  # some are clipped
    seen = full[:, : sizes[1]]
    assert sizes[1] < sizes[0]
    assert (agent.normalize(full)[:, : sizes[1]].abs() == 10).any()
    expected = agent.policy(agent.normalize(full)).chunk(2, -1)[0].detach()
    torch.testing.assert_close(policy(seen), expected)
    assert not any(name.startswith("agent.critic") for name in policy.state_dict())
    program = torch.export.export(policy, (seen[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.onnx.export(program, f=str(tmp_path / "policy.onnx"), external_data=False)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx")
    (actions,) = session.run(None, {session.get_inputs()[0].name: seen.numpy()})
    for exported in (actions, program.module()(seen), torch.jit.trace(policy, seen[:2])(seen)):
        np.testing.assert_allclose(exported, expected, rtol=1e-4, atol=1e-5)


def test_checkpoints_that_are_kept(tmp_path):
    """With --keep-every, beside the last one; resumed, each goes on in a folder of its own."""
    _, path = run(tmp_path, keep_every=300, total_timesteps=8 * 128)
    folders = sorted(path.parent.glob("at_*"), key=lambda folder: int(folder.name[3:]))
    assert [folder.name for folder in folders] == ["at_384", "at_640", "at_1024"]
    for folder in folders:
        assert load(folder / path.name)["state"]["global_step"] == int(folder.name[3:])
    assert same(load(folders[-1] / path.name), load(path))
    before = path.read_bytes()
    done = call(tmp_path, "--resume", folders[0], device="cpu", env_id="gpu_envs:Target")
    assert (done.status, done.err) == (0, "")
    for name in ("agent", "optimizer", "random"):
        assert same(load(folders[0] / path.name)[name], load(path)[name]), name
    assert path.read_bytes() == before


def test_other_sizes_than_the_checkpoints(trained, tmp_path):
    """One sentence, whether it is to be resumed or evaluated."""
    for words in ("--hidden-size 32", "--env-id gpu_envs:Target"):
        for what in ("--resume", "--evaluate"):
            done = call(tmp_path, what, trained.path, *words.split(), total_timesteps=1e5, device="cpu")
            assert done.status == 2
            assert "is of another script or size, or not for" in done.err
            assert done.err.count("\n") == 1
    assert [*tmp_path.iterdir()] == []


def test_an_evaluation_of_one_environment(trained, tmp_path):
    """Its spread is 0, not nan."""
    done = call(tmp_path, "--evaluate", trained.path, num_envs=1, device="cpu")
    assert "± 0 with" in done.out


def test_evaluation_ends_with_each_episode(tmp_path):
    """What an environment does after its first end does not count, and NaN neither."""
    _, path = run(tmp_path, env_id=SCRIPTED)
    args = make_args(env_id=SCRIPTED, num_envs=7)
    envs = gpu_envs.Scripted(args)
    returns = ppo.evaluate(path, args, envs)
    expected = []
    for n in range(7):
        last = next(step for step in range(1, 7) if any(gpu_envs.Scripted.ends(n, 1, step)))
        expected.append(sum(gpu_envs.Scripted.reward(n, 1, step) for step in range(1, last + 1)))
    np.testing.assert_allclose(returns, expected, rtol=1e-5)


def test_video(tmp_path):
    """Of the first environment, where it can render; the pendulums cannot."""
    pytest.importorskip("moviepy")
    _, path = run(tmp_path, "--capture-video")
    assert path.with_name("video.mp4").stat().st_size > 1000
    refused = call(tmp_path, "--capture-video", **SMALL)
    assert refused.status == 2
    assert "environments with snapshot and render" in refused.err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_is_saved(number, trained, tmp_path, monkeypatch):
    """Training ends after the iteration, without an evaluation; resumed, it goes on as if it had not been."""
    collect, count = ppo.collect_rollout, itertools.count(1)

    def interrupted(*given):
        if next(count) == 3:
            os.kill(os.getpid(), number)
        return collect(*given)

    monkeypatch.setattr(ppo, "collect_rollout", interrupted)
    done = call(tmp_path, **SMALL | {"env_id": "Pendulum", "total_timesteps": 7680})
    assert done.status == 130
    assert "evaluation" not in done.out
    path = checkpoint_in(tmp_path)
    assert load(path)["state"]["global_step"] == 3 * 128
    monkeypatch.undo()
    assert call(tmp_path, "--resume", path.parent, device="cpu").status == 0
    for name in ("agent", "optimizer", "state", "random"):
        assert same(load(path)[name], load(trained.path)[name]), name


def test_acting_with_dropout_is_seen(tmp_path, monkeypatch):
    """The warning of the other scripts, once."""

    class Agent(ppo.Agent):
        def __init__(self, *given):
            super().__init__(*given)
            self.actor = torch.nn.Sequential(torch.nn.Dropout(0.05), self.actor)

    warning = "acting and learning do not compute the same policy"
    assert warning not in run(tmp_path / "a")[0]
    monkeypatch.setattr(ppo, "Agent", Agent)
    assert run(tmp_path / "b", hidden_size=64)[0].count(warning) == 1


def test_nan_is_named(tmp_path):
    """A NaN in the environment stops the run; no checkpoint has it."""
    done = call(tmp_path, env_id="gpu_envs:nan_rewards", **SMALL)
    assert done.status == 1
    assert re.search("the reward of environment \\d+ is nan", done.err)
    assert not [*tmp_path.glob("runs/*/checkpoint.pt")]


REFUSALS = {
    "--num-minibatches 4097": "--num-minibatches must be at most 4096",
    "--gamma 1.5": "--gamma must be from 0 to 1, not 1.5",
    "--cuda-graphs False": "without True or False",
    "--env-id no_module:f": "no_module",
    "--env-id gpu_envs:Nope": "has no attribute 'Nope'",
    "--device cuda:1": "--device must be cpu, cuda or mps, not cuda:1: see CUDA_VISIBLE_DEVICES",
    "--device meta": "--device must be cpu, cuda or mps",
    "--desired-kl 0.01 --learning-rate 0.1": "from 1e-5 to 0.01",
    "--desired-kl -1": "--desired-kl must be from",
    "--keep-every 0": "--keep-every must be at least 1",
    "--num-envs 0": "--num-envs must be at least 1",
    "--resume none.pt": "none.pt",
    "--resume gpu_envs.py": "is not a checkpoint",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals(words, tmp_path):
    """Common mistakes end in one line, with exit status 2, before anything is written."""
    words = words.replace("gpu_envs.py", gpu_envs.__file__)
    done = call(tmp_path, "--device", "cpu", *words.split())
    assert (done.status, done.out, list(tmp_path.iterdir())) == (2, "", [])
    assert REFUSALS[words.replace(gpu_envs.__file__, "gpu_envs.py")] in done.err
    assert done.err.count("\n") == 1


def test_help_and_defaults(tmp_path):
    """Each flag has a text; other environments than the pendulums have other defaults."""
    helpers.assert_help(CASE, tmp_path)
    shown = call(tmp_path, "--env-id", "gpu_envs:Target", "--help").out
    assert re.search(r"--num-envs INT [^-]*default: 2048", shown)
    done = call(tmp_path, "--env-id", "gpu_envs:Target", "--num-minibatches", 70_000)
    assert "must be at most 16384" in done.err  # 2,048 environments of 32 steps


# Several processes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WORKER = Path(__file__).with_name("gpu_worker.py")


@pytest.mark.parametrize("name", ["ppo_gpu", "grpo"])
def test_a_rank_alone_is_no_torchrun(name, monkeypatch):
    """Some clusters set RANK for a program that is the only one: it logs and saves all the same."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    spec = importlib.util.spec_from_file_location(f"{name}_again", helpers.ROOT / f"{name}.py")
    monkeypatch.setitem(sys.modules, spec.name, script := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(script)
    assert (script.RANK, script.PROCESSES) == (0, 1)


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_environments(tmp_path):
    """Moments against NumPy; weights and metrics of an update, on halves of a rollout and on all of it.

    In `train`, environments and actions differ, weights and statistics do not, and one process can resume
    what two have trained, and the reverse; a curriculum goes on in both.
    """
    for launcher in ([sys.executable], TORCHRUN):
        subprocess.run([*launcher, str(WORKER), str(tmp_path)], check=True, timeout=200)
    one, *others = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    x = 1000 + 0.1 * np.random.default_rng(0).normal(size=(2, 600, 3))
    for each in (one, *others):
        mean, var, count = each["moments"]
        np.testing.assert_allclose(mean, x.reshape(-1, 3).mean(0), rtol=1e-6)
        np.testing.assert_allclose(var, x.reshape(-1, 3).var(0), rtol=0.02)
        assert count == 1200
        torch.testing.assert_close(each["weights"], one["weights"], rtol=1e-5, atol=1e-6)
        for name, value in one["metrics"].items():
            if name != "explained_variance":  # the mean of both
                assert each["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
        # For each of two gradient steps: two for advantages, one of all gradients. Then all metrics.
        assert len(each["messages"]) == (0 if each is one else 2 * 3 + 1)
    assert same(*(other["trained"] for other in others))
    assert not torch.equal(others[0]["obs"], others[1]["obs"])
    path = checkpoint_in(tmp_path)
    assert load(path)["state"]["global_step"] == load(path)["agent"]["obs_moments.count"].item() == 4096
    for each in (one, *others):  # 8 iterations of 8 steps, then 12 more; checks and evaluations have a few
        assert each["level"].item() == pytest.approx(0.67 if each is one else 1.63, abs=0.08)
    done = call(tmp_path, "--resume", path, total_timesteps=5000, env_id="gpu_envs:Curriculum")
    assert (done.status, done.err) == (0, "")
    assert load(path)["state"]["global_step"] >= 5000


# Learning


@pytest.mark.slow
def test_pendulums_are_solved(tmp_path):
    """By the defaults, in half of their steps, to about -150; a random policy has -1200."""
    done = call(tmp_path, device="cpu", total_timesteps=500_000)
    (result,) = curves(checkpoint_in(tmp_path).parent)["eval/greedy_return"].values()
    assert result > -180, done.out


# MuJoCo Playground: pip install -e ".[playground]"


@pytest.mark.slow
def test_playground(tmp_path, monkeypatch):
    """Steps are those of the environment itself; at the time limit, it returns to where it started.

    Of observations in two parts, what the robot sees comes first, then what only the simulator knows; other
    dicts are refused. Then a few iterations of training.
    """
    registry = pytest.importorskip("mujoco_playground").registry
    import jax

    load_env = registry.load

    def load_with(parts):
        def load(*args):
            env = load_env(*args)
            reset, step = env.reset, env.step

            def with_parts(state):
                return state.replace(obs=parts(state.obs))

            env.reset, env.step = lambda key: with_parts(reset(key)), lambda *x: with_parts(step(*x))
            return env

        return load

    args = make_args(env_id="CartpoleBalance", num_envs=10, num_minibatches=2, total_timesteps=240)
    monkeypatch.setattr(registry, "load", load_with(lambda obs: {"pixels": obs}))
    with pytest.raises(ValueError, match="pixels"):
        ppo.Playground(args)
    monkeypatch.setattr(registry, "load", load_with(lambda x: {"state": x[:2], "privileged_state": x}))
    envs = ppo.Playground(args)
    assert (envs.actor_obs_size, envs.obs_size, envs.action_size, envs.max_steps) == (2, 7, 1, 1000)
    envs.max_steps = 3
    first = envs.reset().clone()
    plain, state = jax.jit(jax.vmap(envs.env.step)), envs.state
    for t in range(1, 7):
        actions = torch.rand(10, 1) * 3 - 1.5
        state = plain(state, np.clip(actions.numpy(), -1, 1))
        obs, rewards, terminated, truncated, last_obs = envs.step(actions)
        np.testing.assert_allclose(last_obs[:, :2], np.asarray(state.obs["state"]), atol=1e-5)
        np.testing.assert_allclose(last_obs[:, 2:], np.asarray(state.obs["privileged_state"]), atol=1e-5)
        np.testing.assert_allclose(rewards, np.asarray(state.reward), atol=1e-5)
        assert not terminated.any()
        assert truncated.all() == truncated.any() == (t % 3 == 0)
        assert torch.equal(obs, first if t % 3 == 0 else last_obs)
        state = envs.start if t % 3 == 0 else state
    assert not torch.equal(first, envs.reset())
    monkeypatch.chdir(tmp_path)
    results = ppo.train(args, envs)
    assert results["training_return"] > 0
    assert len(results["greedy_returns"]) == 10
