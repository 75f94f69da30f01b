"""Probe environments: each isolates one thing that PPO must learn, and its answer is known."""

import functools
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

import ppo

GAMMA = 0.8


class Probe(VectorEnv):
    """Episodes of `length` steps. Observed are a cue of -1 or 1, drawn at the start, and the one-hot step.

    `reward` is a function of the probe and the actions [N]; `first` are the actions at the episodes' start.
    The step that is seen wraps around: an episode that is cut off looks as if it had just begun.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, num_envs, reward, length=1, truncates=False):
        self.num_envs, self.reward, self.length, self.truncates = num_envs, reward, length, truncates
        self.single_observation_space = spaces.Box(-1, 1, (1 + length,))
        self.single_action_space = spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def look(self):
        return look(self.cue, self.at % self.length, self.length)

    def begin(self, which):
        self.cue = np.where(which, self.np_random.choice([-1, 1], self.num_envs), self.cue)
        self.at = np.where(which, 0, self.at)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.at, self.first = np.zeros((3, self.num_envs), dtype=int)
        self.done = np.zeros(self.num_envs, dtype=bool)
        self.begin(~self.done)
        return self.look(), {}

    def step(self, actions):
        self.at = self.at % self.length  # where an episode is over, the step is filler: anything goes
        self.first = np.where(self.at == 0, actions, self.first)
        rewards = np.where(self.done, 0.0, self.reward(self, actions))
        self.at, filler = self.at + 1, self.done
        self.done = (self.at == self.length) & ~filler
        self.begin(filler)
        ends = self.done.copy(), np.zeros(self.num_envs, dtype=bool)
        return self.look(), rewards, *(reversed(ends) if self.truncates else ends), {}


def look(cue, step, length):
    """Observations [N, D] of a probe."""
    return np.column_stack([cue, np.eye(length)[np.broadcast_to(step, np.shape(cue))]]).astype(np.float32)


def learn(reward, iterations=60, length=1, truncates=False, **settings):
    """Train on a probe as `train` does. Returns the agent before and after it, and what became of it."""
    plain = {"num_envs": 16, "num_steps": 13, "hidden_size": 32, "learning_rate": 1e-2, "update_epochs": 4}
    unscaled = {
        "norm_rewards": False,
        "norm_obs": False,
        "anneal_lr": False,
        "ent_coef": 0.0,
        "device": "cpu",
    }
    fast = {"num_minibatches": 2, "total_timesteps": 10**9, "gamma": GAMMA}
    args = ppo.Args(**{**plain, **unscaled, **fast, **settings})
    ppo.check_args(args)
    torch.manual_seed(1)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(
        Probe(args.num_envs, reward, length, truncates), stats_key="rollout_episode"
    )
    one_hot = np.zeros(1 + length, dtype=bool)
    before, agent = (ppo.Agent(args, one_hot, envs.single_action_space) for _ in range(2))
    before.load_state_dict(agent.state_dict())
    optimizer = torch.optim.Adam([ppo.flatten_parameters(agent)], args.learning_rate, eps=1e-5, fused=True)
    state = ppo.State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)
    rollout, figures, history = ppo.Rollout(args, 1 + length), {}, []
    rollout.obs[-1] = torch.as_tensor(envs.reset(seed=1)[0])
    for _ in range(iterations):
        ppo.adjust_coefficients(state, args, figures)
        ppo.collect_rollout(envs, agent, rollout)
        figures = ppo.update(agent, optimizer, rollout, state, args)
        state.global_step += int(rollout.valid.sum())
        history.append(figures)
    (adam,) = optimizer.state.values()
    steps = int(adam["step"]) / iterations
    return SimpleNamespace(before=before, agent=agent, args=args, state=state, history=history, steps=steps)


@torch.no_grad()
def values(agent, length):
    """V [length, 2] of every step, with both cues."""
    obs = torch.stack([torch.from_numpy(look([-1, 1], step, length)) for step in range(length)])
    return agent.value(agent.normalize(obs))


@torch.no_grad()
def chances(agent, best, length):
    """The probabilities [length, 2] of the best actions for cue -1 and for cue 1, at every step."""
    obs = torch.stack([torch.from_numpy(look([-1, 1], step, length)) for step in range(length)])
    return agent.policy(agent.normalize(obs)).exp()[:, [0, 1], list(best)]


def assert_learns_values(expected, tolerance, reward, **settings):
    """The critic comes to the known values [length, 2] (or [length, 1]), from somewhere else."""
    expected = torch.tensor(expected).expand(-1, 2)
    run = learn(reward, length=len(expected), **settings)
    assert (values(run.before, len(expected)) - expected).abs().max() > 3 * tolerance
    assert (values(run.agent, len(expected)) - expected).abs().max() < tolerance


def assert_learns_actions(best, reward, length=1, at=0, **settings):
    """The policy comes to prefer the best action for cues -1 and 1, from indifference. Returns the run."""
    run = learn(reward, length=length, **settings)
    assert (chances(run.before, best, length) - 0.5).abs().max() < 0.05
    assert chances(run.agent, best, length)[at].min() > 0.9
    return run


def one(probe, action):
    """A reward of 1 a step."""
    return np.ones(probe.num_envs)


def match(probe, action):
    """A reward for the action that the cue asks for."""
    return action == (probe.cue > 0)


# What the critic learns


def test_value_of_a_constant():
    """A reward of 1 in episodes of one step has the value 1."""
    assert_learns_values([[1.0]], 0.05, one, iterations=30)


def test_value_from_the_observation():
    """The critic tells states apart by what is seen."""
    assert_learns_values([[-1.0, 1.0]], 0.05, lambda probe, action: probe.cue, iterations=30)


def test_discounting():
    """A reward a step later is worth γ times as much, and the critic knows which step it is."""
    assert_learns_values([[GAMMA], [1.0]], 0.05, lambda probe, action: probe.at)


def test_value_does_not_cross_episodes():
    """What later episodes bring is no part of an episode's value."""
    rewards, expected = np.array([1.0, -2.6, 2.0]), [[0.2], [-1.0], [2.0]]
    assert_learns_values(expected, 0.1, lambda probe, action: rewards[probe.at])


def test_termination_ends_the_future():
    """A reward of 1 a step until termination after k steps is worth the finite sum that remains."""
    sums = [[sum(GAMMA**i for i in range(5 - step))] for step in range(5)]
    assert_learns_values(sums, 0.25, one)


def test_time_limit_does_not_end_the_future():
    """The same, but cut off after k steps, is worth 1 / (1 - γ): the time limit is no part of the task."""
    forever = [[1 / (1 - GAMMA)]] * 5
    assert_learns_values(forever, 0.25, one, truncates=True)


# What the actor learns


def test_prefers_an_action():
    """The policy comes to prefer the action that is rewarded."""
    assert_learns_actions((1, 1), lambda probe, action: action, iterations=20)


def test_avoids_an_action():
    """The policy comes to avoid the action that is punished."""
    assert_learns_actions((0, 0), lambda probe, action: -action, iterations=20)


def test_action_for_a_later_reward():
    """An episode's first action is credited with a reward that comes two steps later."""
    reward = lambda probe, action: (probe.first == (probe.cue > 0)) * (probe.at == 2)  # noqa: E731
    assert_learns_actions((0, 1), reward, length=3)


# How it learns: settings, and the coefficients that they move

PLAIN = {"iterations": 30}
VARIANTS = {
    "kl-penalty": ({"surrogate": "kl-penalty", "adapt": "kl-coef"}, {"kl_coef"}),
    "adapt clip-coef": ({"adapt": "clip-coef"}, {"clip_coef"}),
    "adapt learning-rate": (
        {"adapt": "learning-rate", "learning_rate": 3e-3, "desired_kl": 1e-5},
        {"learning_rate"},
    ),
    "anneal-lr": ({"anneal_lr": True, "total_timesteps": 4000}, {"learning_rate"}),
    "recompute-advantages": ({"recompute_advantages": True}, set()),
    "clip-vloss": ({"clip_vloss": True}, set()),
    "target-kl": ({"target_kl": 0.01}, set()),
    "A2C": ({"update_epochs": 1, "num_minibatches": 1, "iterations": 60}, set()),
    "no norm-adv": ({"norm_adv": False, "allow_unsafe": True}, set()),
    "norm-rewards": ({"norm_rewards": True}, set()),
    "norm-obs": ({"norm_obs": True}, set()),
}


@functools.cache
def plain_run():
    """The probe learnt with none of the variants."""
    return assert_learns_actions((0, 1), match, **PLAIN)


def test_action_from_the_observation():
    """The policy comes to choose the action by what is seen, and to be sure of it."""
    run = plain_run()
    assert run.steps == run.args.update_epochs * run.args.num_minibatches
    assert run.history[0]["losses/entropy"] > 0.5
    assert run.history[-1]["losses/entropy"] < 0.05


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_learns(name):
    """Each variant learns the action from the observation, takes effect, and moves its coefficient only."""
    settings, moves = VARIANTS[name]
    run = assert_learns_actions((0, 1), match, **{**PLAIN, **settings})
    coefficients = ("learning_rate", "clip_coef", "kl_coef", "ent_coef")
    assert {name for name in coefficients if getattr(run.state, name) != getattr(run.args, name)} == moves
    assert run.history != plain_run().history


def test_target_kl_ends_passes_early():
    """With --target-kl, some iterations make fewer gradient steps, and the policy moves less in each."""
    run = learn(match, target_kl=0.01, **PLAIN)
    assert run.steps < plain_run().steps
    assert run.history[0]["losses/kl"] < 0.5 * plain_run().history[0]["losses/kl"]


def test_target_entropy_is_kept():
    """With --target-entropy, the policy that would become sure stays as random as asked for."""
    settings = {"target_entropy": 0.3, "ent_coef": 0.1, "learning_rate": 3e-3}
    run = learn(match, iterations=100, norm_adv=False, allow_unsafe=True, **settings)
    entropies = [figures["losses/entropy"] for figures in run.history]
    assert np.mean(entropies[-50:]) == pytest.approx(0.3, abs=0.08)
    assert run.state.ent_coef == pytest.approx(0.43, rel=0.4)  # 1 / log(p / (1 - p)) where H(p) = 0.3
    assert chances(run.agent, (0, 1), 1).min() > 0.6
