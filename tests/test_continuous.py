"""What is ppo_continuous.py's own: its Gaussian policy, its actions' bounds, its figures, its command line.

What it shares with ppo.py is tested there; test_copies.py sees that it is the same.
"""

import copy
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import scripted_envs
import torch
from gymnasium import spaces
from helpers import (
    brute_force_gae,
    brute_force_rewards,
    float64,
    helpers_of,
    layer_pairs,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from torch.distributions import Independent, Normal, kl_divergence

import ppo_continuous as ppo

SCRIPT = Path(ppo.__file__)
D, A = 3, 2  # entries of an observation, of an action
FAST = settings(max_examples=40, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)
INF = math.inf


# Helpers

of_ppo = helpers_of(ppo)
make_state, make_optimizer = of_ppo.make_state, of_ppo.make_optimizer
make_rollout, learn = of_ppo.make_rollout, of_ppo.learn


def make_args(**changes):
    plain = {"init_log_std": -0.5, "min_log_std": -20, "stagger": False, "device": "cpu"}
    return of_ppo.make_args(**plain | changes)


def make_agent(args, space=None, seed=0, size=D):
    """An agent whose means depend on what it sees, and whose standard deviations differ."""
    torch.manual_seed(seed)
    space = spaces.Box(-1, 1, (A,)) if space is None else space
    agent = ppo.Agent(args, np.zeros(size, dtype=bool), space)
    with torch.no_grad():
        agent.actor[-1].weight.mul_(60)
        agent.log_std += 0.3 * torch.randn(agent.num_actions)
        for layer in (*agent.actor, *agent.critic):
            layer.bias.normal_(std=0.1)
    agent.obs_moments.update(0.5 + 2 * torch.randn(50, size))
    agent.return_moments.update(1 + 3 * torch.randn(50, 1))
    return agent


def normal(policy):
    """What a policy vector means, in torch.distributions."""
    mean, log_std = policy.chunk(2, -1)
    return Independent(Normal(mean, log_std.exp()), 1)


# log_prob, entropy, kl_divergence


def random_policies(seed, rows, actions, scale):
    """Two policies and actions that are near the first, in float64."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(5, rows, actions, generator=generator, dtype=torch.float64) * scale
    old = torch.cat([numbers[0], numbers[1].clamp(-3, 2)], -1)
    new = torch.cat([numbers[0] + 0.5 * numbers[2], (numbers[1] + 0.3 * numbers[3]).clamp(-3, 2)], -1)
    return old.requires_grad_(), new.requires_grad_(), numbers[0] + numbers[4]


CASES = {
    "seed": SEEDS,
    "rows": st.integers(1, 5),
    "actions": st.integers(1, 6),
    "scale": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
}


def assert_same_with_gradients(ours, theirs, *variables):
    """Equal values, and equal gradients in the variables."""
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    gradients = (torch.autograd.grad(x.sum(), variables, allow_unused=True) for x in (ours, theirs))
    for own, other in zip(*gradients, strict=True):
        zero = torch.zeros_like(variables[0])
        own, other = (zero if x is None else x for x in (own, other))
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-9)


@FAST
@given(**CASES)
def test_distribution_functions_match_torch_distributions(seed, rows, actions, scale):
    """log π(a|s), H(π) and the KL, and their gradients in the policy vectors, are those of PyTorch."""
    old, new, taken = random_policies(seed, rows, actions, scale)
    assert ppo.log_prob(old, taken).shape == ppo.entropy(old).shape == (rows,)
    assert ppo.kl_divergence(old, new).shape == (rows,)
    assert_same_with_gradients(ppo.log_prob(old, taken), normal(old).log_prob(taken), old)
    assert_same_with_gradients(ppo.entropy(old), normal(old).entropy(), old)
    assert_same_with_gradients(ppo.kl_divergence(old, new), kl_divergence(normal(old), normal(new)), old, new)


def numpy_log_prob(mean, std, action):
    """The logarithm of a product of normal densities."""
    densities = np.exp(-((action - mean) ** 2) / (2 * std**2)) / (std * np.sqrt(2 * np.pi))
    return np.log(densities.prod())


def numpy_entropy(std):
    return 0.5 * np.log((2 * np.pi * np.e) ** len(std) * np.prod(std**2))  # ½ log det 2πeΣ


def numpy_kl(old_mean, old_std, mean, std):
    """½ (tr Σ⁻¹Σ_old + (μ - μ_old)ᵀ Σ⁻¹ (μ - μ_old) - A + log (det Σ / det Σ_old))"""
    inverse = np.linalg.inv(np.diag(std**2))
    distance = (mean - old_mean) @ inverse @ (mean - old_mean)
    return 0.5 * (
        np.trace(inverse @ np.diag(old_std**2))
        + distance
        - len(std)
        + np.log(np.prod(std**2) / np.prod(old_std**2))
    )


def test_distribution_functions_match_numpy():
    """The same against the closed forms for any covariance, which are written otherwise."""
    old, new, taken = (x.detach() for x in random_policies(7, 50, 3, 1.0))
    old_means, old_stds, means, stds = old[:, :3], old[:, 3:].exp(), new[:, :3], new[:, 3:].exp()
    old_means, old_stds, means, stds = map(float64, (old_means, old_stds, means, stds))
    for i in range(len(old)):
        log_prob = numpy_log_prob(old_means[i], old_stds[i], taken[i].numpy())
        kl = numpy_kl(old_means[i], old_stds[i], means[i], stds[i])
        assert ppo.log_prob(old, taken)[i].item() == pytest.approx(log_prob, abs=1e-9)
        assert ppo.entropy(old)[i].item() == pytest.approx(numpy_entropy(old_stds[i]), abs=1e-9)
        assert ppo.kl_divergence(old, new)[i].item() == pytest.approx(kl, abs=1e-9)


def test_distribution_functions_by_hand():
    """A standard normal distribution, and one that is twice as wide and 1 further."""
    standard, other = torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, math.log(2)]])
    assert ppo.log_prob(standard, torch.tensor([[1.0]])).item() == pytest.approx(-1.418939)
    assert ppo.entropy(standard).item() == pytest.approx(1.418939)
    assert ppo.kl_divergence(standard, other).item() == pytest.approx(math.log(2) + 2 / 8 - 0.5)
    assert ppo.kl_divergence(other, standard).item() == pytest.approx(-math.log(2) + 5 / 2 - 0.5)


# Agent


def test_noise_is_standard_normal():
    """Noise has the shape [T, N, A], and the moments of a standard normal distribution."""
    agent = make_agent(make_args())
    torch.manual_seed(0)
    noise = agent.noise(200, 300)
    assert noise.shape == (200, 300, A)
    assert noise.dtype == torch.float32
    assert abs(noise.mean().item()) < 4 / noise.numel() ** 0.5
    assert noise.var().item() == pytest.approx(1, abs=0.02)
    assert (noise**4).mean().item() == pytest.approx(3, abs=0.1)


def test_act_samples_from_the_policy():
    """Sampled actions have the policy's mean and standard deviation; entries and rows are independent."""
    agent = make_agent(make_args())
    torch.manual_seed(1)
    rows = 40_000
    obs = torch.tensor([[0.3, -1.0, 2.0]]).expand(rows, D)
    actions, policy = agent.act(obs, agent.noise(rows))
    assert actions.shape == (rows, A)
    assert policy.shape == (rows, 2 * A)
    mean, log_std = policy[0].chunk(2)
    assert (mean.abs() > 0.05).all()
    assert (log_std[0] - log_std[1]).abs() > 0.05
    scaled = ((actions - mean) / log_std.exp()).double()
    assert scaled.mean(0).abs().max() < 4 / rows**0.5
    assert (scaled.var(0) - 1).abs().max() < 4 * (2 / rows) ** 0.5
    assert (scaled[:, 0] * scaled[:, 1]).mean().abs() < 4 / rows**0.5
    assert (scaled[1:] * scaled[:-1]).mean(0).abs().max() < 4 / rows**0.5


def test_act_without_noise_is_greedy():
    """Without noise the action is the mean, which is that of the normalised observation."""
    agent = make_agent(make_args())
    obs = 3 * torch.randn(20, D)
    greedy, policy = agent.act(obs)
    seen = ((obs - agent.obs_moments.mean) / (agent.obs_moments.var + 1e-8).sqrt()).clamp(-10, 10)
    torch.testing.assert_close(greedy, agent.actor(seen))
    assert torch.equal(greedy, policy[:, :A])
    assert greedy.std(0).min() > 0.1
    assert not torch.allclose(greedy, agent.act(obs, agent.noise(20))[0], atol=0.1)


@pytest.mark.parametrize("init_log_std", [-0.5, 0.7, 1])
def test_first_policy(init_log_std):
    """At first, all means are near 0 and the log standard deviations --init-log-std, for all states."""
    torch.manual_seed(0)
    agent = ppo.Agent(make_args(init_log_std=init_log_std), np.zeros(D, dtype=bool), spaces.Box(-1, 1, (A,)))
    mean, log_std = agent.policy(torch.randn(7, D)).chunk(2, -1)
    assert mean.abs().max() < 0.05
    assert torch.equal(log_std, init_log_std * torch.ones(7, A))
    assert torch.equal(agent.policy(torch.randn(4, 5, D))[..., A:], init_log_std * torch.ones(4, 5, A))


def test_log_std_is_a_parameter_that_is_learnt():
    """It is one of the weights that the gradient is taken in and that the optimiser moves, for all states."""
    args = make_args()
    agent = make_agent(args)
    assert sum(weight is agent.log_std for weight in agent.weights) == 1
    before = agent.log_std.detach().clone()
    learn(agent, make_rollout(args, agent), args)
    assert ((agent.log_std - before).abs() > 1e-3).all()
    log_std = agent.policy(torch.randn(9, D))[:, A:]
    assert torch.equal(log_std, agent.log_std.expand(9, A))


def test_min_log_std_is_a_floor():
    """No step leaves a log standard deviation below it; what is above is left alone, and can rise from it."""
    free = make_args(update_epochs=1, num_minibatches=1)
    agent = make_agent(free)
    rollout, before = make_rollout(free, agent), agent.log_std.detach().clone()
    learn(agent, rollout, free)
    reached, vector = agent.log_std.detach().clone(), weights(agent)
    assert (reached != before).all()
    low, between = reached.min().item(), reached.mean().item()
    for least, expected in ((-20, reached), (low, reached), (between, reached.clamp(min=between))):
        agent, args = make_agent(free), make_args(update_epochs=1, num_minibatches=1, min_log_std=least)
        learn(agent, make_rollout(args, agent), args)
        assert torch.equal(agent.log_std, expected)
        others = weights(agent) != vector
        assert others.sum() == (expected != reached).sum()
    for ent_coef, rises in ((0.0, False), (100.0, True)):  # from the floor, where the first step starts
        agent = make_agent(free)
        with torch.no_grad():
            agent.log_std.fill_(-1.0)
        args = make_args(min_log_std=-1.0, ent_coef=ent_coef, vf_coef=0.0, norm_adv=False)
        rollout = make_rollout(args, agent)
        rollout.actions = agent.act(rollout.obs[:-1])[0].detach()  # all at the mean
        rollout.rewards.abs_()  # so that σ falls, but for a bonus
        learn(agent, rollout, args)
        assert (agent.log_std > -1).all() if rises else (agent.log_std == -1).all()


BOXES = {  # low, high, policy's actions, environment's actions
    "asymmetric": ([-2, 0, 5], [1, 10, 6], [[-1, -1, -1], [1, 1, 1], [0, 0.5, -0.5], [-1.1, 3, 9]],
                   [[-2, 0, 5], [1, 10, 6], [-0.5, 7.5, 5.25], [-2, 10, 6]]),
    "infinite": ([-INF, -INF], [INF, INF], [[-1, 0.3], [1, -77.5]], [[-1, 0.3], [1, -77.5]]),
    "one-sided": ([-INF, 0.5], [0.5, INF], [[0.25, 0.75], [2, -3], [-9, 9]],
                  [[0.25, 1.25], [0.5, 0.5], [-9, 9.5]]),
    "far": ([100, -INF], [INF, -7], [[0, 0], [-1, 1], [3, -3]], [[100, -7], [100, -7], [103, -10]]),
    "widest": ([-1.7e308], [1.7e308], [[0], [-77.5]], [[0], [-77.5]]),
    "huge": ([-3.4e38], [3.4e38], [[0], [-77.5]], [[0], [-77.5]]),
    "mixed": ([-INF, 2, -1], [INF, 4, INF], [[5, -1, 5], [-5, 0.25, -5]], [[5, 2, 5], [-5, 3.25, -1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", BOXES)
def test_env_actions(name):
    """-1 and 1 are the finite bounds; what lies beyond is cut; without two, 0 is the value nearest to 0."""
    low, high, actions, expected = BOXES[name]
    dtype = np.float64 if name == "widest" else np.float32
    box = spaces.Box(dtype(low), dtype(high), dtype=dtype)
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), box)
    acted = agent.env_actions(np.float32(actions))
    assert acted.dtype == dtype
    np.testing.assert_allclose(acted, expected, rtol=1e-6)
    assert all(box.contains(action) for action in acted)


def test_env_actions_have_the_shape_of_the_space():
    """Actions of more than one axis: the policy's vector is laid out in order, with each entry's bounds."""
    box = spaces.Box(-2, 3, (2, 3))
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), box)
    assert agent.num_actions == 6
    actions = np.linspace(-1.5, 1.5, 24, dtype=np.float32).reshape(4, 6)
    acted = agent.env_actions(actions)
    assert (acted.shape, acted.dtype) == ((4, 2, 3), np.float32)
    np.testing.assert_allclose(acted[0], np.clip(0.5 + 2.5 * actions[0].reshape(2, 3), -2, 3), rtol=1e-6)
    np.testing.assert_allclose(acted.reshape(4, 6), np.clip(0.5 + 2.5 * actions, -2, 3), rtol=1e-6)
    low = np.float32([[-1, -2], [-3, -4]])
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), spaces.Box(low, -2 * low))
    np.testing.assert_array_equal(agent.env_actions(-np.ones((1, 4), np.float32)), low[None])
    np.testing.assert_array_equal(agent.env_actions(np.ones((1, 4), np.float32)), -2 * low[None])


def test_env_actions_have_the_type_of_the_space():
    """A space of float64 is given float64 within its bounds."""
    box = spaces.Box(-0.1, 0.7, (1,), np.float64)
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), box)
    assert all(box.contains(action) for action in agent.env_actions(np.float32([[-1], [1], [0.3], [9]])))


# collect_rollout

LOW, HIGH = np.float32([-2, 0, -INF]), np.float32([1, 10, INF])
KEY, ENVS, STEPS, ROLLOUTS = 10, 4, 5, 8
HEARD = {}  # the actions that came to each environment, by its key


class Scripted(gym.Env):
    """The script of `scripted_envs`, with Box actions; observed are key, episode, step and last action."""

    observation_space = spaces.Box(-np.inf, np.inf, (6,))
    action_space = spaces.Box(LOW, HIGH)

    def __init__(self, ends=True):
        self.ends = ends

    def observe(self, action):
        return np.array([self.key, self.episode, self.time, *action], dtype=np.float32)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.key, self.episode = seed % 1000, -1
        self.episode, self.time = self.episode + 1, 0
        return self.observe([0, 0, 0]), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        HEARD.setdefault(self.key, []).append(action.copy())
        reward = scripted_envs.reward(self.key, self.episode, self.time, 0)
        self.time += 1
        over = self.ends and self.time == scripted_envs.length(self.key, self.episode)
        ends = scripted_envs.ending(self.key, self.episode) if over else (False, False)
        return self.observe(action), reward, *ends, {}


class Constant(gym.Env):
    """A reward of 1 a step, for ever; observed is nothing that tells."""

    observation_space = spaces.Box(-1, 1, (1,))
    action_space = spaces.Box(-1, 1, (1,))

    def reset(self, *, seed=None, options=None):
        return np.ones(1, dtype=np.float32), {}

    def step(self, action):
        return np.ones(1, dtype=np.float32), 1.0, False, False, {}


class Target(gym.Env):
    """Episodes of one step: the best action is the target that is seen, in the action's own range."""

    observation_space = spaces.Box(-1, 1, (2,))
    action_space = spaces.Box(np.float32([-3, 10]), np.float32([5, 30]))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.target = self.np_random.uniform(-0.8, 0.8, 2).astype(np.float32)
        return self.target, {}

    def step(self, action):
        wanted = np.array([1, 20]) + np.array([4, 10]) * self.target
        error = (action - wanted) / np.array([4, 10])
        return self.target.copy(), -float(np.square(error).sum()), True, False, {}


class Wave(gym.Env):
    """Random observations and rewards, in episodes of 7 steps that only a time limit ends."""

    observation_space = spaces.Box(-np.inf, np.inf, (D,))
    action_space = spaces.Box(-1, 1, (A,))

    def observe(self):
        return (4 + np.array([1, 3, 10]) * self.np_random.normal(size=3)).astype(np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        return self.observe(), float(3 + self.np_random.normal()), False, False, {}


gym.register("ScriptedBox-v0", Scripted)
gym.register("Constant-v0", Constant, max_episode_steps=5)
gym.register("Target-v0", Target)
gym.register("Wave-v0", Wave, max_episode_steps=7)


def begin(args, agent=None, seed=KEY):
    """Environments just reset, an agent and an empty rollout."""
    envs, one_hot = ppo.make_envs(args, args.num_envs)
    agent = agent or make_agent(args, envs.single_action_space, size=len(one_hot))
    rollout = ppo.Rollout(args, len(one_hot), agent.num_actions)
    rollout.obs[-1] = torch.as_tensor(envs.reset(seed=seed)[0])
    return envs, agent, rollout


@pytest.fixture(scope="module")
def script():
    """Several consecutive rollouts of the script, joined along time, and what came to the environments."""
    HEARD.clear()
    sizes = {"num_envs": ENVS, "num_steps": STEPS, "hidden_size": 8}
    envs, agent, rollout = begin(make_args(env_id="ScriptedBox-v0", **sizes, init_log_std=0.3))
    names, copies = ("obs", "actions", "rewards", "terminated", "truncated", "valid"), []
    for _ in range(ROLLOUTS):
        ppo.collect_rollout(envs, agent, rollout)
        policies = agent.policy(agent.normalize(rollout.obs))
        torch.testing.assert_close(rollout.acting_policy, policies[-2])
        copies.append(SimpleNamespace(**{name: getattr(rollout, name).clone() for name in names}))
        copies[-1].episodes = rollout.episodes
    envs.close()
    joined = SimpleNamespace(**{name: torch.cat([getattr(c, name) for c in copies]) for name in names[1:]})
    return copies, joined, {key: np.array(actions) for key, actions in HEARD.items()}


def within_bounds(actions):
    """What the environments must receive for the policy's actions, in float64."""
    actions = np.asarray(actions, dtype=np.float64)
    return np.clip(actions * np.array([1.5, 5, 1]) + np.array([-0.5, 5, 0]), LOW, HIGH)


def test_stored_actions_are_the_sampled_ones(script):
    """Stored is what was sampled, also beyond the bounds; what came to the environment lies within them."""
    _, joined, heard = script
    assert joined.actions.shape == (ROLLOUTS * STEPS, ENVS, 3)
    assert joined.actions[..., :2].abs().max() > 1.5
    for n in range(ENVS):
        stored = joined.actions[:, n][joined.valid[:, n]].numpy()
        received = heard[KEY + n]
        assert received.dtype == np.float32
        np.testing.assert_allclose(received, within_bounds(stored), rtol=1e-5, atol=1e-6)
        assert ((received == LOW) | (received == HIGH)).any(0).tolist() == [True, True, False]
        assert (np.abs(stored[:, 2] - received[:, 2]) < 1e-6).all()


def test_stored_actions_are_mean_plus_noise():
    """Each row's action is the mean of its own observation, and the row's own noise times σ."""
    envs, agent, rollout = begin(make_args(env_id="ScriptedBox-v0", num_steps=STEPS))
    drawn, noise = [], agent.noise
    agent.noise = lambda *shape: drawn.append(noise(*shape)) or drawn[-1]
    ppo.collect_rollout(envs, agent, rollout)
    envs.close()
    mean = agent.actor(agent.normalize(rollout.obs[:-1]))
    assert torch.cat(drawn).shape == mean.shape == (STEPS, ENVS, 3)
    torch.testing.assert_close(rollout.actions, (mean + agent.log_std.exp() * torch.cat(drawn)).detach())


def test_rollout_is_the_script(script):
    """Observations, true successors, rewards, ends, filler rows and episodes, across rollout borders too."""
    copies, joined, _ = script
    kinds, episodes = set(), {i: [] for i in range(ROLLOUTS)}
    for n in range(ENVS):
        key, episode, time, last, ended, total = KEY + n, 0, 0, np.zeros(3), False, 0.0
        for row in range(ROLLOUTS * STEPS):
            i, t = divmod(row, STEPS)
            now = [key, episode, time, *last]
            np.testing.assert_allclose(copies[i].obs[t, n], now, rtol=1e-5, atol=1e-6)
            flags = joined.terminated[row, n].item(), joined.truncated[row, n].item()
            assert joined.valid[row, n].item() == (not ended)
            if ended:  # filler
                assert (joined.rewards[row, n].item(), flags) == (0, (False, False))
                episode, time, last, ended, total = episode + 1, 0, np.zeros(3), False, 0.0
                following = [key, episode, 0, 0, 0, 0]
            else:
                reward = scripted_envs.reward(key, episode, time, 0)
                last, time, total = within_bounds(joined.actions[row, n]), time + 1, total + reward
                ended = time == scripted_envs.length(key, episode)
                assert joined.rewards[row, n].item() == reward
                assert flags == (scripted_envs.ending(key, episode) if ended else (False, False))
                following = [key, episode, time, *last]
                if ended:
                    kinds.add((*flags, t == STEPS - 1))
                    episodes[i].append((t, n, total, time))
            np.testing.assert_allclose(copies[i].obs[t + 1, n], following, rtol=1e-5, atol=1e-6)
    assert {(True, False, False), (False, True, False), (False, True, True)} <= kinds
    for i, ends in episodes.items():
        assert copies[i].episodes == [(total, steps) for _, _, total, steps in sorted(ends)]


# ppo_loss and update


def random_batch(seed, rows=14):
    """A policy and values of the networks as they are now, and a batch of what the old ones made."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    old = torch.cat([noise(rows, A), 0.4 * noise(rows, A)], -1)
    actions = old[:, :A] + old[:, A:].exp() * noise(rows, A)
    log_probs = normal(old).log_prob(actions)
    batch = ppo.Batch(noise(rows, D), actions, old, log_probs, noise(rows), noise(rows), noise(rows))
    return old + 0.2 * noise(rows, 2 * A), batch.values + 0.5 * noise(rows), batch


def reference_loss(policy, values, batch, state, args):
    """The loss and its figures, row by row, in NumPy and float64."""
    policy, values = np.asarray(policy), np.asarray(values)
    _, actions, old_policy, old_log_probs, old_values, advantages, returns = (x.numpy() for x in batch)
    if args.norm_adv:
        advantages = (advantages - np.mean(advantages)) / (np.std(advantages, ddof=1) + 1e-8)
    sums = dict.fromkeys(ppo.FIGURES, 0.0)
    for i, action in enumerate(actions):
        mean, std = policy[i, :A], np.exp(policy[i, A:])
        old_mean, old_std = old_policy[i, :A], np.exp(old_policy[i, A:])
        log_ratio = numpy_log_prob(mean, std, action) - old_log_probs[i]
        ratio, eps = np.exp(log_ratio), state.clip_coef
        if args.surrogate == "clip":
            bound = min(ratio, 1 + eps) if advantages[i] >= 0 else max(ratio, 1 - eps)
            objective = advantages[i] * bound
        else:
            objective = ratio * advantages[i] - state.kl_coef * numpy_kl(old_mean, old_std, mean, std)
        error = (values[i] - returns[i]) ** 2
        if args.clip_vloss:
            held = min(max(values[i], old_values[i] - eps), old_values[i] + eps)
            error = max(error, (held - returns[i]) ** 2)
        sums["policy_loss"] -= objective
        sums["value_loss"] += error / 2
        sums["entropy"] += numpy_entropy(std)
        sums["old_approx_kl"] -= log_ratio
        sums["approx_kl"] += ratio - 1 - log_ratio
        sums["clipfrac"] += ratio > 1 + eps or ratio < 1 - eps
    figures = {name: total / len(actions) for name, total in sums.items()}
    loss = figures["policy_loss"] + args.vf_coef * figures["value_loss"] - state.ent_coef * figures["entropy"]
    return loss, figures


@pytest.mark.parametrize("surrogate", ["clip", "kl-penalty"])
@pytest.mark.parametrize(("clip_vloss", "norm_adv"), [(False, False), (True, True)])
def test_loss_and_figures_match_numpy(surrogate, clip_vloss, norm_adv):
    """Loss and all figures equal the row-by-row reference, the gradient its central differences."""
    changes = {"surrogate": surrogate, "clip_vloss": clip_vloss, "norm_adv": norm_adv}
    args = make_args(**changes, kl_coef=1.7, ent_coef=0.3, vf_coef=0.8, clip_coef=0.15)
    state = make_state(args)
    sides = set()  # on which a ratio is clipped, and the advantage's sign
    for seed in range(3):
        policy, values, batch = random_batch(seed)
        ratio = (normal(policy).log_prob(batch.actions) - batch.log_probs).exp()
        side = ((ratio - 1) / args.clip_coef).trunc().sign()
        sides |= set(zip(side.tolist(), (batch.advantages > 0).tolist(), strict=True))
        policy, values = policy.requires_grad_(), values.requires_grad_()
        loss, figures = ppo.ppo_loss(policy, values, batch, state, args)
        gradients = torch.autograd.grad(loss, (policy, values))
        policy, values = policy.detach(), values.detach()
        expected, expected_figures = reference_loss(policy, values, batch, state, args)
        assert loss.item() == pytest.approx(expected, rel=1e-9)
        named = dict(zip(ppo.FIGURES, figures.tolist(), strict=True))
        assert named == pytest.approx(expected_figures, rel=1e-6, abs=1e-9)
        assert 0 < named["clipfrac"] < 1
        for variable, gradient in zip((policy, values), gradients, strict=True):
            for index in np.ndindex(*variable.shape):
                losses = []
                for change in (1e-6, -1e-6):
                    moved = variable.clone()
                    moved[index] += change
                    inputs = (moved, values) if variable is policy else (policy, moved)
                    losses.append(reference_loss(*inputs, batch, state, args)[0])
                assert gradient[index].item() == pytest.approx((losses[0] - losses[1]) / 2e-6, abs=1e-6)
    assert {(side, positive) for side in (-1, 1) for positive in (False, True)} <= sides


class SpacesOnly(gym.Env):
    """What Stable-Baselines3 must see to build its networks."""

    observation_space = spaces.Box(-np.inf, np.inf, (D,), np.float32)
    action_space = spaces.Box(-1, 1, (A,))


def make_sb3(agent, rollout, args):
    """Stable-Baselines3's PPO with our weights, and the valid rows of our rollout in its buffer."""
    rows = int(rollout.valid.sum())
    model = PPO(
        "MlpPolicy",
        SpacesOnly(),
        learning_rate=args.learning_rate,
        n_steps=rows,
        batch_size=rows // args.num_minibatches,
        n_epochs=args.update_epochs,
        clip_range=args.clip_coef,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef / 2,  # its value loss has no ½
        max_grad_norm=args.max_grad_norm,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.ELU},
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    with torch.no_grad():
        model.policy.log_std.copy_(agent.log_std)
        for ours, theirs in layer_pairs(agent, model.policy):
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)
        mean, var = agent.obs_moments.mean, agent.obs_moments.var
        obs = ((rollout.obs - mean) / var.sqrt()).clamp(-10, 10)
        flat, actions = obs[:-1].flatten(0, 1), rollout.actions.flatten(0, 1)
        old_values, log_probs, _ = model.policy.evaluate_actions(flat, actions)
        values = model.policy.predict_values(obs.flatten(0, 1)).reshape(obs.shape[:2])
    rewards = brute_force_rewards(agent, rollout, args.gamma)
    ends = rollout.terminated.numpy(), rollout.truncated.numpy()
    advantages = brute_force_gae(rewards, float64(values), *ends, args.gamma, args.gae_lambda).flatten()
    buffer, valid = model.rollout_buffer, rollout.valid.flatten().numpy()
    buffer.observations[:, 0], buffer.actions[:, 0] = flat.numpy()[valid], actions.numpy()[valid]
    buffer.values[:, 0], buffer.log_probs[:, 0] = old_values[valid, 0].numpy(), log_probs.numpy()[valid]
    buffer.advantages[:, 0] = advantages[valid]
    buffer.returns[:, 0] = buffer.advantages[:, 0] + buffer.values[:, 0]
    buffer.full = True
    return model


@pytest.mark.parametrize(
    ("changes", "minibatches"), [({}, 1), ({"norm_adv": False, "max_grad_norm": 100.0, "ent_coef": 0.1}, 4)]
)
def test_update_matches_stable_baselines3(monkeypatch, changes, minibatches):
    """From the same weights, rows and order, 6 epochs lead to Stable-Baselines3's weights and figures."""
    args = make_args(update_epochs=6, num_minibatches=minibatches, **changes)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    for t, n in np.argwhere(rollout.valid.numpy())[::-1][: int(rollout.valid.sum()) % minibatches]:
        rollout.valid[t, n] = False  # a number of rows that Stable-Baselines3 splits as we do
    rows = int(rollout.valid.sum())
    rng = np.random.default_rng(0)
    orders = [rng.permutation(rows) for _ in range(args.update_epochs)]
    ours, theirs = iter(orders), iter(orders)
    monkeypatch.setattr(torch, "randperm", lambda n: torch.from_numpy(next(ours)))
    monkeypatch.setattr(np.random, "permutation", lambda n: next(theirs))
    model, before, log_std = make_sb3(agent, rollout, args), weights(agent), agent.log_std.detach().clone()
    figures = learn(agent, rollout, args)
    model.train()
    assert next(ours, None) is next(theirs, None) is None  # both have used all orders
    assert (weights(agent) - before).abs().max() > 1e-2
    assert (agent.log_std - log_std).abs().min() > 1e-3
    torch.testing.assert_close(agent.log_std, model.policy.log_std, rtol=0, atol=2e-5)
    for own, other in layer_pairs(agent, model.policy):
        torch.testing.assert_close(own.weight, other.weight, rtol=0, atol=2e-5)
        torch.testing.assert_close(own.bias, other.bias, rtol=0, atol=2e-5)
    logged = model.logger.name_to_value
    for name, other, factor in (
        ("policy_loss", "policy_gradient_loss", 1),
        ("value_loss", "value_loss", 0.5),
        ("entropy", "entropy_loss", -1),
        ("clipfrac", "clip_fraction", 1),
        ("explained_variance", "explained_variance", 1),
    ):
        assert figures[f"losses/{name}"] == pytest.approx(factor * logged[f"train/{other}"], abs=1e-4)


def test_kl_figure_and_mismatch():
    """`kl` is the exact KL from the old policy on valid rows; `policy_mismatch` sees an error of log σ."""
    args = make_args()
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    old, stale = copy.deepcopy(agent), make_rollout(args, agent)
    figures = learn(agent, rollout, args)
    obs = old.normalize(rollout.obs[:-1])[rollout.valid]
    exact = kl_divergence(normal(old.policy(obs)), normal(agent.policy(obs))).mean().item()
    assert exact > 1e-4
    assert figures["losses/kl"] == pytest.approx(exact, rel=1e-3)
    assert figures["losses/policy_mismatch"] < 1e-6
    stale.acting_policy[rollout.valid[-1].nonzero()[0], -1] += 0.01  # a log standard deviation
    assert learn(old, stale, args)["losses/policy_mismatch"] == pytest.approx(0.01, rel=1e-3)


def test_minibatches_keep_rows_together(monkeypatch):
    """In a minibatch, an observation stands with the action taken there, uncut, and its log-probability."""
    args = make_args(num_minibatches=3, norm_obs=False)
    agent = make_agent(args)
    rollout, seen = make_rollout(args, agent), []
    rows = zip(rollout.obs[:-1][rollout.valid], rollout.actions[rollout.valid], strict=True)
    known = {tuple(obs.tolist()): action for obs, action in rows}
    old, original = copy.deepcopy(agent), ppo.ppo_loss
    monkeypatch.setattr(ppo, "ppo_loss", lambda *given: seen.append(given[2]) or original(*given))
    learn(agent, rollout, args)
    for batch in seen:
        assert batch.actions.shape == (len(batch.obs), A)
        assert batch.policy.shape == (len(batch.obs), 2 * A)
        for obs, action in zip(batch.obs, batch.actions, strict=True):
            assert torch.equal(known[tuple(obs.tolist())], action)
        torch.testing.assert_close(batch.policy, old.policy(batch.obs))
        torch.testing.assert_close(batch.log_probs, normal(batch.policy).log_prob(batch.actions))
    assert sum(len(batch.obs) for batch in seen) == args.update_epochs * len(known)


def test_compiled_gradient():
    """--compile gives what eager gives, for any size and moving coefficients, without compiling each time."""
    args = make_args(max_grad_norm=0.3)
    agent, state = make_agent(args), make_state(args)
    rollout = make_rollout(args, agent)
    obs, actions = agent.normalize(rollout.obs[:-1]).flatten(0, 1), rollout.actions.flatten(0, 1)
    with torch.no_grad():
        policy = agent.policy(obs) + 0.1 * torch.randn(len(obs), 2 * A)
    numbers = torch.randn(3, len(obs)).unbind()
    whole = ppo.Batch(obs, actions, policy, ppo.log_prob(policy, actions), *numbers)
    compiled = ppo.compiled(ppo.gradient)
    for size, state.ent_coef in ((40, 0.01), (39, 0.02), (17, 0.03), (2, 0.04)):
        batch = ppo.Batch(*(x[:size] for x in whole))
        with torch._dynamo.config.patch(error_on_recompile=size <= 17):
            ours = compiled(agent, batch, state, args)
        torch.testing.assert_close(ours, ppo.gradient(agent, batch, state, args), rtol=1e-4, atol=1e-6)


# The normalisers


class Witness:
    """Computes the moments of raw observations and of discounted returns, in float64, row by row."""

    def __init__(self, args):
        self.args, self.obs, self.returns = args, [], []
        self.restart()

    def restart(self):
        self.under_way = np.zeros(self.args.num_envs)

    def see(self, rollout):
        for t, n in np.ndindex(*rollout.valid.shape):
            if rollout.valid[t, n]:
                self.obs.append(float64(rollout.obs[t, n]))
                self.under_way[n] = self.args.gamma * self.under_way[n] + rollout.rewards[t, n].item()
                self.returns.append(self.under_way[n])
            else:
                self.under_way[n] = 0

    def agrees(self, agent):
        for moments, rows in ((agent.obs_moments, self.obs), (agent.return_moments, self.returns)):
            rows = np.array(rows).reshape(len(rows), -1)
            np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(moments.var, rows.var(0), rtol=1e-4)
            assert moments.count == len(rows)


def test_normalisers_are_those_of_all_rows(tmp_path):
    """Over iterations and a resumed run, the moments are those of all valid rows' raw values so far."""
    args = make_args(env_id="Wave-v0", num_envs=3, num_steps=9, hidden_size=8, gamma=0.9)
    envs, _, rollout = begin(args, ppo.Agent(args, np.zeros(D, dtype=bool), Wave.action_space))
    agent = ppo.Agent(args, np.zeros(D, dtype=bool), envs.single_action_space)
    optimizer, state, witness = make_optimizer(agent), make_state(args), Witness(args)
    for _ in range(4):
        ppo.collect_rollout(envs, agent, rollout)
        witness.see(rollout)
        ppo.update(agent, optimizer, rollout, state, args)
        state.global_step += int(rollout.valid.sum())
        witness.agrees(agent)
    assert rollout.truncated.any()
    assert not rollout.terminated.any()
    assert len(witness.obs) == state.global_step < 4 * 3 * 9
    writer = SimpleNamespace(flush=lambda: None)
    ppo.save_checkpoint(tmp_path / "checkpoint.pt", writer, agent, optimizer, state, args)
    envs.close()

    other = ppo.Agent(args, np.zeros(D, dtype=bool), Wave.action_space)
    other_optimizer = make_optimizer(other)
    saved, state = ppo.load_checkpoint(str(tmp_path / "checkpoint.pt"), other, other_optimizer)
    assert (saved, state.global_step) == (args, len(witness.obs))
    assert torch.equal(weights(other), weights(agent))
    assert torch.equal(other.log_std, agent.log_std)
    witness.agrees(other)
    witness.restart()  # the environments start anew
    envs, _, rollout = begin(args, other, seed=77)
    for _ in range(3):
        ppo.collect_rollout(envs, other, rollout)
        witness.see(rollout)
        ppo.update(other, other_optimizer, rollout, state, args)
        witness.agrees(other)
    envs.close()
    assert not torch.equal(other.log_std, agent.log_std)


# Learning


def train(env_id, iterations, **changes):
    """Train as `ppo.train` does, and return the agent and the last figures."""
    small = {"num_envs": 16, "num_steps": 13, "hidden_size": 32, "learning_rate": 1e-2, "update_epochs": 4}
    plain = {"norm_obs": False, "norm_rewards": False, "ent_coef": 0.0, "anneal_lr": False}
    args = make_args(env_id=env_id, **small | plain | changes)
    ppo.check_args(args)
    torch.manual_seed(1)
    envs, one_hot = ppo.make_envs(args, args.num_envs)
    agent = ppo.Agent(args, one_hot, envs.single_action_space)
    rollout = ppo.Rollout(args, len(one_hot), agent.num_actions)
    rollout.obs[-1] = torch.as_tensor(envs.reset(seed=1)[0])
    optimizer, state = make_optimizer(agent), make_state(args)
    for _ in range(iterations):
        ppo.collect_rollout(envs, agent, rollout)
        figures = ppo.update(agent, optimizer, rollout, state, args)
    envs.close()
    return agent, figures | ppo.action_figures(agent, rollout)


def truncations(env_id, **changes):
    """The steps, counted from 1, of 30 in which each of 4 environments is truncated, and not terminated."""
    args = make_args(env_id=env_id, **changes)
    envs, _ = ppo.make_envs(args, 4)
    envs.reset(seed=KEY)
    ends = [envs.step(np.zeros(envs.action_space.shape, np.float32))[2:4] for _ in range(30)]
    envs.close()
    return [[t for t, end in enumerate(ends, 1) if end[1][n] and not end[0][n]] for n in range(4)]


def test_stagger_cuts_one_episode_of_each_environment():
    """With a limit of 7 steps, three of 4 are first cut after 1, 3 and 5 steps; all then by the limit."""
    together, apart = [[7, 15, 23]] * 4, [[7, 15, 23], [1, 9, 17, 25], [3, 11, 19, 27], [5, 13, 21, 29]]
    assert truncations("Wave-v0") == together
    assert truncations("Wave-v0", stagger=True, async_envs=True) == apart
    assert truncations("Wave-v0", stagger=True) == apart
    for env_id in ("ScriptedBox-v0", "Target-v0"):  # without a limit
        assert truncations(env_id, stagger=True) == truncations(env_id)


def test_evaluation_is_not_staggered(tmp_path):
    """Each environment plays its first episode to the end."""
    args = make_args(env_id="Wave-v0", num_envs=4, eval_episodes=4, stagger=True)
    played = ppo.evaluate(make_agent(args), args, "greedy", tmp_path)
    assert played["lengths"].tolist() == [7] * 4


def test_time_limit_does_not_end_the_future():
    """A reward of 1 a step, cut off after 5 steps, is worth 1 / (1 - 0.9) = 10, not 1 + 0.9 + ... = 4.1."""
    agent, _ = train("Constant-v0", 60, gamma=0.9, gae_lambda=0.95)
    assert agent.value(torch.ones(1, 1)).item() == pytest.approx(10, abs=0.5)


@pytest.mark.parametrize("surrogate", ["clip", "kl-penalty"])
def test_action_from_the_observation(surrogate):
    """The policy comes to take the action that is best for what it sees, and to be more sure of it."""
    agent, figures = train("Target-v0", 60, surrogate=surrogate)
    targets = torch.cartesian_prod(torch.linspace(-0.7, 0.7, 5), torch.linspace(-0.7, 0.7, 5))
    with torch.no_grad():
        actions = agent.env_actions(agent.act(targets)[0].numpy())
    errors = np.abs((actions - [1, 20]) / [4, 10] - targets.numpy())
    assert errors.mean() < 0.1
    assert errors.max() < 0.3
    assert figures["losses/std_max"] < 0.5 * math.exp(-0.5)


# Advice

HEALTHY = {
    "losses/policy_loss": -0.01, "losses/value_loss": 0.5, "losses/entropy": -0.6,
    "losses/old_approx_kl": 0.005, "losses/approx_kl": 0.005, "losses/clipfrac": 0.1,
    "losses/grad_norm": 40.0, "losses/kl": 0.006,
    "losses/explained_variance": 0.5, "losses/relative_error": 0.3, "losses/policy_mismatch": 1e-7,
    "losses/std": 0.5, "losses/std_min": 0.4, "losses/std_max": 0.6, "losses/outside": 0.1,
}  # fmt: skip


def figures(**changed):
    """The figures of a healthy iteration, but for some."""
    return {**HEALTHY, **{f"losses/{name}": value for name, value in changed.items()}}


@pytest.mark.parametrize(
    ("name", "bad", "good"),
    [
        ("narrow", {"std_min": 0.0199}, {"std_min": 0.0201}),
        ("wide", {"std_max": 3.01}, {"std_max": 2.99}),
        ("outside", {"outside": 0.801}, {"outside": 0.799}),
    ],
)
def test_each_condition_begins_once_and_ends_once(name, bad, good):
    """It begins after 10 iterations in a row, ends after as many without, and is silent on the safe side."""
    args, state = ppo.Args(), make_state(make_args())
    assert not any(ppo.diagnose(figures(**good), state, args) for _ in range(100))
    said = [ppo.diagnose(figures(**bad), state, args) for _ in range(30)]
    assert [len(messages) for messages in said] == [0] * 9 + [1] + [0] * 20
    assert said[9][0].startswith(f"[{name}] ")
    assert re.search(r"--[a-z-]+", said[9][0]), "the message must name a flag to change"
    flags = {field.name for field in fields(ppo.Args)}
    assert {flag.replace("-", "_") for flag in re.findall(r"--([a-z-]+)", said[9][0])} <= flags
    assert state.active == [name]
    said = [ppo.diagnose(figures(**good), state, args) for _ in range(30)]
    assert [len(messages) for messages in said] == [0] * 9 + [1] + [0] * 20
    assert said[9][0].startswith(f"[{name}] is over")
    assert state.active == []


def test_an_entropy_below_zero_is_no_fault():
    """The entropy of a density may be negative: no advice, and --target-entropy may be."""
    state = make_state(make_args())
    assert not any(ppo.diagnose(figures(entropy=-12.0), state, ppo.Args()) for _ in range(100))
    ppo.check_args(ppo.Args(target_entropy=-6.0, ent_coef=0.01))


def test_advice_is_as_in_the_table():
    """All conditions, with their numbers of iterations."""
    named = {condition.__name__: held for condition, held in ppo.ADVICE.items()}
    common = {"kl_watch": 5, "kl_act": 5, "drift": 10, "idle": 20, "critic": 20, "mismatch": 1}
    assert named == common | {"narrow": 10, "wide": 10, "outside": 10}


def test_action_figures_by_hand():
    """σ and its extremes, and the share of entries beyond their bounds; filler rows do not count."""
    args = make_args(num_envs=2, num_steps=2)
    box = spaces.Box(np.float32([-2, 0, -INF]), np.float32([1, INF, INF]))
    agent = ppo.Agent(args, np.zeros(D, dtype=bool), box)
    agent.log_std.data = torch.tensor([0.1, 0.5, 0.3]).log()
    rollout = ppo.Rollout(args, D, 3)
    rollout.actions[:] = torch.tensor([
        [[-1.1, -0.1, 50.0], [0.9, 7.0, 0.0]],  # two beyond, none
        [[1.01, 0.0, -9.0], [5.0, -5.0, 0.0]],  # one; and two in a filler row
    ])  # fmt: skip
    rollout.valid[:] = torch.tensor([[True, True], [True, False]])
    measured = ppo.action_figures(agent, rollout)
    expected = {"std": 0.3, "std_min": 0.1, "std_max": 0.5, "outside": 3 / 9}
    assert measured == pytest.approx({f"losses/{name}": value for name, value in expected.items()})
    assert all(type(value) is float for value in measured.values())


def test_action_figures_of_actions_with_two_axes():
    """Each entry is compared with its own bounds."""
    args = make_args(num_envs=1, num_steps=2)
    low = np.float32([[-1, -2], [-3, -4]])
    agent = ppo.Agent(args, np.zeros(D, dtype=bool), spaces.Box(low, -2 * low))
    rollout = ppo.Rollout(args, D, 4)
    rollout.actions[:, 0] = torch.tensor([[-1.1, -0.9, 0.9, 1.1], [1.1, 0.0, 0.0, 0.0]])
    rollout.valid[:] = True
    assert ppo.action_figures(agent, rollout)["losses/outside"] == pytest.approx(3 / 8)


# The command line


def shell(folder, *args, script=SCRIPT, timeout=200, isolated=False):
    """Run the script in a folder, in a process of its own; returns returncode, stdout and stderr."""
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "FORCE_COLOR", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, *(["-I"] if isolated else []), script, *map(str, args)],
        cwd=folder,
        env={**kept, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=timeout,
    )


def results(text):
    return re.findall(r"^(?:greedy|stochastic) .*$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A finished run of a copy of the script, alone in an empty folder; not to be changed."""
    folder = tmp_path_factory.mktemp("short")
    shutil.copy(SCRIPT, folder)
    sizes = ["--num-envs", 4, "--num-steps", 32, "--num-minibatches", 4, "--eval-episodes", 3]
    flags = ["--env-id", "Pendulum-v1", "--total-timesteps", 600, *sizes]
    done = shell(folder, *flags, script=SCRIPT.name, isolated=True)
    assert (done.returncode, done.stderr) == (0, "")
    (run,) = (folder / "runs").iterdir()
    return SimpleNamespace(folder=folder, checkpoint=run / "checkpoint.pt", stdout=done.stdout)


@pytest.fixture
def main(tmp_path, monkeypatch, capsys):
    """`main("--flag", value, ...)` calls ppo_continuous.main in an empty folder."""

    def call(*args):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["ppo_continuous.py", *map(str, args)])
        status = 0
        try:
            ppo.main()
        except SystemExit as end:
            status = end.code
        output = capsys.readouterr()
        return SimpleNamespace(returncode=status, stdout=output.out, stderr=output.err)

    return call


def assert_refused(result, *words):
    """Exit status 2 and one line on stderr that has the words."""
    assert result.returncode == 2, result
    assert result.stderr.startswith("ppo_continuous.py: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_inverted_pendulum_is_solved(tmp_path):
    """At the defaults, 50,000 steps end with the highest return there is, and no advice on the way."""
    pytest.importorskip("mujoco")
    done = shell(tmp_path, "--env-id", "InvertedPendulum-v5", "--total-timesteps", 50_000)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^greedy +return ([\d.]+).* 10 episodes", done.stdout, re.MULTILINE)[1] == "1000.0"
    assert "[" not in done.stdout


def test_copied_alone_it_runs(short):
    """In an empty folder, with nothing else on the path, the script trains and evaluates."""
    assert len(results(short.stdout)) == 2
    assert all("3 episodes, length 200.0" in line for line in results(short.stdout))
    greedy, stochastic = (line.split()[2:] for line in results(short.stdout))
    assert greedy != stochastic
    others = "|".join({path.stem for path in SCRIPT.parent.glob("*.py")} | {"tests", "benchmarks"})
    assert not re.search(
        rf"^\s*(import|from) ({others})\b", SCRIPT.read_text(), re.MULTILINE
    )  # installed here


def test_evaluation_repeats(short):
    """A new process gets exactly the returns printed when training ended."""
    evaluated = shell(short.folder, "--evaluate", short.checkpoint)
    assert (evaluated.returncode, evaluated.stderr) == (0, "")
    assert results(evaluated.stdout) == results(short.stdout)


def test_resume_goes_on(short, main, tmp_path):
    """A resumed run starts at the checkpoint's step, learns on from its policy, and saves in its folder."""
    folder = tmp_path / "run"
    shutil.copytree(short.checkpoint.parent, folder)
    before = torch.load(short.checkpoint, weights_only=True)
    assert before["format"] == "ppo-continuous-1"
    resumed = main("--resume", folder / "checkpoint.pt", "--total-timesteps", 1000)
    assert (resumed.returncode, resumed.stderr) == (0, "")
    after = torch.load(folder / "checkpoint.pt", weights_only=True)
    steps = [content["state"]["global_step"] for content in (before, after)]
    assert 600 <= steps[0] < 1000 <= steps[1] < 1000 + 4 * 32
    counts = [content["agent"]["obs_moments.count"].item() for content in (before, after)]
    assert counts == steps
    moved = (after["agent"]["log_std"] - before["agent"]["log_std"]).abs()
    assert 0 < moved.max() < 0.1
    assert not (tmp_path / "runs").exists()
    assert_refused(
        main("--resume", folder / "checkpoint.pt", "--init-log-std", 0),
        f"init_log_std {ppo.Args.init_log_std}",
    )


def test_adam_has_a_short_memory_of_scale(short):
    """Its β2 is 0.99; its learning rate is what is left of the schedule."""
    content = torch.load(short.checkpoint, weights_only=True)
    (group,) = content["optimizer"]["param_groups"]
    assert (tuple(group["betas"]), group["eps"]) == ((0.9, 0.99), 1e-5)
    assert 0 < group["lr"] < 3e-4


def test_first_rollout_is_for_the_normalisers(main, monkeypatch):
    """It counts as steps, is not learnt from, and is all that the normalisers of the first update know."""
    collect, update, rollouts, updates = ppo.collect_rollout, ppo.update, [], []

    def collecting(envs, agent, rollout):
        collect(envs, agent, rollout)
        rollouts.append(rollout.obs[:-1][rollout.valid].double())

    def updating(agent, optimizer, rollout, state, args):
        counts = agent.obs_moments.count.item(), agent.return_moments.count.item()
        moments = agent.obs_moments.mean.double(), agent.obs_moments.var.double()
        updates.append((state.global_step, counts, moments, weights(agent)))
        return update(agent, optimizer, rollout, state, args)

    monkeypatch.setattr(ppo, "collect_rollout", collecting)
    monkeypatch.setattr(ppo, "update", updating)
    flags = ["--env-id", "Pendulum-v1", "--num-envs", 4, "--num-steps", 32, "--num-minibatches", 4]
    flags += ["--update-epochs", 2, "--eval-episodes", 1, "--no-stagger", "--total-timesteps"]
    done = main(*flags, 384)
    assert done.returncode == 0
    assert "8 gradient steps, 16 in all" in done.stdout
    (step, counts, (mean, var), first), (second_step, *_, second) = updates
    assert (step, counts, second_step) == (128, (128, 128), 256)
    torch.testing.assert_close(mean, rollouts[0].mean(0), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(var, rollouts[0].var(0, correction=0), rtol=1e-5, atol=1e-6)
    assert len(rollouts) == 3
    assert not torch.equal(first, second)
    (checkpoint,) = Path("runs").glob("*/checkpoint.pt")
    main("--resume", checkpoint, "--total-timesteps", 512)
    assert updates[2][:2] == (384, (384, 384))
    main(*flags, 128, "--no-norm-obs")
    assert updates[3][:2] == (0, (0, 0))


def test_discrete_actions_are_refused(tmp_path):
    """One line, exit status 2, nothing written; it names the script that can."""
    refused = shell(tmp_path, "--env-id", "CartPole-v1")
    assert_refused(refused, "CartPole-v1", "Discrete(2)", "not a Box", "ppo.py")
    assert list(tmp_path.iterdir()) == []


def test_other_spaces_are_refused(main, tmp_path):
    """Images belong to ppo_atari.py; what is neither a Box nor Discrete belongs to no script."""
    act = spaces.Box(-1, 1, (2,))
    image = scripted_envs.blank("BoxImage-v0", spaces.Box(0, 255, (32, 32, 3), np.uint8), act)
    assert_refused(main("--env-id", image), "images", "(32, 32, 3)", "ppo_atari.py")
    grey = scripted_envs.blank("BoxGrey-v0", spaces.Box(0, 255, (32, 32), np.uint8), act)
    assert_refused(main("--env-id", grey), "images", "(32, 32)", "ppo_atari.py")
    many = scripted_envs.blank("Many-v0", spaces.Box(-1, 1, (2,)), spaces.MultiDiscrete([2, 3]))
    refused = main("--env-id", many)
    assert_refused(refused, "MultiDiscrete", "not a Box")
    assert "trains these" not in refused.stderr
    whole = scripted_envs.blank("Whole-v0", spaces.Box(-1, 1, (2,)), spaces.Box(0, 9, (2,), np.int64))
    assert_refused(main("--env-id", whole), "int64", "not a Box of real numbers")
    empty = scripted_envs.blank("Empty-v0", spaces.Box(-1, 1, (2,)), spaces.Box(-1, 1, (0,)))
    assert_refused(main("--env-id", empty), "(0,)", "not a Box of real numbers")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [-5.1, 3.1, "nan"])
def test_init_log_std_has_bounds(main, value):
    """A standard deviation that is nonsense is refused."""
    assert_refused(main("--plan", "--init-log-std", value), "--init-log-std", "[-5, 3]")


def test_min_log_std_has_bounds(main):
    """It may be so small that it never tells, but not above the standard deviation at first."""
    assert_refused(main("--plan", "--min-log-std", -21), "--min-log-std", "[-20, 3]")
    refused = main("--plan", "--min-log-std", -0.6, "--init-log-std", -0.7)
    assert_refused(refused, "--min-log-std", "--init-log-std", "-0.6", "-0.7")


def test_floor_given_anew_holds_at_once(short, main, tmp_path, monkeypatch):
    """A higher --min-log-std at --resume is that of the policy that acts first, not only after its update."""
    collect, seen = ppo.collect_rollout, []

    def collecting(envs, agent, rollout):
        seen.append(agent.log_std.min().item())
        collect(envs, agent, rollout)

    monkeypatch.setattr(ppo, "collect_rollout", collecting)
    content = torch.load(short.checkpoint, weights_only=True)
    content["agent"]["log_std"].fill_(-2.0)
    torch.save(content, tmp_path / "checkpoint.pt")
    flags = ["--resume", tmp_path / "checkpoint.pt", "--total-timesteps", 1000]
    assert main(*flags, "--min-log-std", -1.5).returncode == 0
    assert seen[0] == -1.5


def test_first_rollout_is_not_all(main):
    """Steps that the normalisers' rollout would use up are refused, unless there is none."""
    flags = ["--env-id", "Pendulum-v1", "--num-envs", 4, "--num-steps", 64, "--plan", "--total-timesteps"]
    assert_refused(main(*flags, 256), "--total-timesteps is 256", "256 steps", "--no-norm-obs")
    assert main(*flags, 257).returncode == 0
    assert main(*flags, 256, "--no-norm-obs").returncode == 0


def test_checkpoint_of_the_other_script_is_refused(short, main, tmp_path):
    """A checkpoint says which script it is of."""
    content = torch.load(short.checkpoint, weights_only=True) | {"format": "ppo-discrete-1"}
    torch.save(content, tmp_path / "checkpoint.pt")
    assert_refused(main("--evaluate", tmp_path / "checkpoint.pt"), "ppo-discrete-1", "ppo-continuous-1")


def test_help_has_every_flag(main, monkeypatch):
    """--help lists each setting, and its default."""
    monkeypatch.setenv("COLUMNS", "120")
    shown = main("--help")
    assert shown.returncode == 0
    for setting in fields(ppo.Args):
        assert f"--{setting.name.replace('_', '-')}" in shown.stdout
    text = " ".join(shown.stdout.split())  # for lines are broken anywhere
    assert text.count("(default: ") == len(fields(ppo.Args))
