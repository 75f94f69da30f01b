"""A rollout holds what the environments did, row by row, and actions that the policy has sampled."""

import copy
import math

import numpy as np
import pytest
import scipy.stats
import scripted_envs
import torch
from gymnasium import spaces
from helpers import CONTINUOUS, DISCRETE

KEY, STEPS, ROLLOUTS = 10, 5, 12
SCRIPTED, BOX = DISCRETE.env_id, CONTINUOUS.env_id
VARIANTS = {  # script, settings, type of the environments
    "sync": (DISCRETE, {"env_id": SCRIPTED}, "SyncVectorEnv"),
    "async": (DISCRETE, {"env_id": SCRIPTED, "async_envs": True}, "AsyncVectorEnv"),
    "one": (DISCRETE, {"env_id": SCRIPTED, "num_envs": 1, "num_steps": 2}, "SyncVectorEnv"),
    "box": (CONTINUOUS, {"env_id": BOX}, "SyncVectorEnv"),
    "box-async": (CONTINUOUS, {"env_id": BOX, "async_envs": True}, "AsyncVectorEnv"),
}


def collect(case, rollouts, **settings):
    """Return the agent, copies of consecutive rollouts, their episodes, and the type of the environments."""
    args = case.make_args(**{"num_steps": STEPS, **settings})
    envs, agent, rollout = case.begin(args)
    copies, episodes = [], []
    for _ in range(rollouts):
        episodes.append(case.script.collect_rollout(envs, agent, rollout, args))
        copies.append(copy.deepcopy(rollout))
    envs.close()
    return agent, copies, episodes, type(envs.unwrapped).__name__


def received(case, actions):
    """Return the actions that the environments receive for those of a rollout."""
    if case is DISCRETE:
        return actions
    space = scripted_envs.ScriptedBox.action_space
    return np.clip(actions * [1.5, 5, 1] + [-0.5, 5, 0], space.low, space.high)


def replay(key, actions):
    """Play the script with these actions. Return rows, (row, return, length) of episodes, the last state."""
    rows, episodes = [], []
    start = -np.ones_like(actions[0])
    episode, step, total, last, ended = 0, 0, 0.0, start, False
    for row, action in enumerate(actions):
        obs = scripted_envs.observation(key, episode, step, last)
        if ended:  # filler
            rows.append((obs, 0.0, False, False, False))
            episode, step, total, last, ended = episode + 1, 0, 0.0, start, False
            continue
        last, value = action, scripted_envs.reward(key, episode, step, action)
        step, total = step + 1, total + value
        ended = step == scripted_envs.length(key, episode)
        terminated, truncated = scripted_envs.ending(key, episode) if ended else (False, False)
        rows.append((obs, value, terminated, truncated, True))
        if ended:
            episodes.append((row, total, step))
    return rows, episodes, scripted_envs.observation(key, episode, step, last)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rollouts_have_each_transition_and_episode_of_the_scripted_environments(variant):
    """Observations, rewards, ends and filler rows are the script's, also from one rollout to the next.

    Each action is a sample of the policy for its row's normalised observation.
    """
    case, settings, kind = VARIANTS[variant]
    agent, copies, episodes_of, found = collect(case, ROLLOUTS, **settings)
    assert found == kind
    steps, envs = copies[0].rewards.shape
    actions = received(case, np.concatenate([rollout.actions for rollout in copies]))
    ends = []
    for n in range(envs):
        rows, episodes, last = replay(KEY + n, actions[:, n])
        obs, *columns = zip(*rows, strict=True)
        for name, column in zip(("rewards", "terminated", "truncated", "valid"), columns, strict=True):
            joined = np.concatenate([getattr(rollout, name)[:, n] for rollout in copies])
            np.testing.assert_allclose(joined, column, rtol=1e-6, err_msg=name)
        obs = np.stack([*obs, last])
        for i, rollout in enumerate(copies):
            expected = obs[i * steps : (i + 1) * steps + 1]
            np.testing.assert_allclose(rollout.obs[:, n], expected, rtol=1e-5, atol=1e-6)
        ends += [(row, n, total, length) for row, total, length in episodes]
    for i, found in enumerate(episodes_of):
        expected = [end[2:] for end in sorted(ends) if i * steps <= end[0] < (i + 1) * steps]
        assert len(found) == len(expected)
        np.testing.assert_allclose(np.ravel(found), np.ravel(expected), rtol=1e-5)
    assert_sampled(case, agent, copies)


def assert_sampled(case, agent, rollouts):
    """Check that log π(a|s) is -H(π) on average, and that the noise of continuous actions is normal."""
    surprise, noise = [], []
    for rollout in rollouts:
        policy = torch.from_numpy(case.policy(agent, rollout.obs[:-1]))
        distribution, actions = case.distribution(policy), torch.from_numpy(rollout.actions)
        surprise += (-distribution.log_prob(actions) - distribution.entropy()).flatten().tolist()
        if case is CONTINUOUS:
            mean, log_std = policy.chunk(2, -1)
            noise += ((actions - mean) / log_std.exp()).flatten().tolist()
    assert abs(np.mean(surprise)) < 4 * np.std(surprise) / math.sqrt(len(surprise))
    assert not noise or scipy.stats.kstest(noise, scipy.stats.norm.cdf).pvalue > 1e-3


@pytest.mark.parametrize(
    ("case", "env_id"), [(DISCRETE, "Still-v0"), (CONTINUOUS, "StillBox-v0")], ids=["ppo", "ppo_continuous"]
)
def test_actions_have_the_policys_distribution_and_are_independent(case, env_id):
    """All states are equal here. Actions do not depend on those of other steps, environments or rollouts."""
    agent, copies, *_ = collect(case, 3, env_id=env_id, num_envs=8, num_steps=400)
    actions = np.stack([rollout.actions for rollout in copies])
    if case is DISCRETE:
        policy = np.exp(case.policy(agent, np.ones(2)))
        assert policy.min() > 0.05
        assert np.ptp(policy) > 0.1
        counts = np.bincount(actions.flatten(), minlength=3)
        assert scipy.stats.chisquare(counts, policy * actions.size).pvalue > 1e-4
    assert_sampled(case, agent, copies)
    for axis in range(actions.ndim):
        order = np.moveaxis(actions - actions.mean((0, 1, 2)), axis, 0)
        assert scipy.stats.pearsonr(order[:-1].flatten(), order[1:].flatten()).pvalue > 1e-4


# Continuous actions

INF = math.inf
BOXES = {  # low, high, policy's actions, environment's actions
    "asymmetric": ([-2, 0, 5], [1, 10, 6], [[-1, -1, -1], [1, 1, 1], [0, 0.5, -0.5], [-1.1, 3, 9]],
                   [[-2, 0, 5], [1, 10, 6], [-0.5, 7.5, 5.25], [-2, 10, 6]]),
    "infinite": ([-INF, -INF], [INF, INF], [[-1, 0.3], [1, -77.5]], [[-1, 0.3], [1, -77.5]]),
    "one-sided": ([-INF, 0.5], [0.5, INF], [[0.25, 0.75], [2, -3], [-9, 9]],
                  [[0.25, 0.75], [0.5, 0.5], [-9, 9]]),
    "huge": ([-3.4e38, -1e10, -1e6, 0], [3.4e38, 1e10, 1e6, 1e7], [[0.5, -2, 0.5, 3], [-3, 9, -0.25, -1]],
             [[0.5, -2, 5e5, 3], [-3, 9, -2.5e5, 0]]),
    "mixed": ([-INF, 2, -1], [INF, 4, INF], [[5, -1, 5], [-5, 0.25, -5]], [[5, 2, 5], [-5, 3.25, -1]]),
}  # fmt: skip


@pytest.mark.parametrize("name", BOXES)
def test_actions_from_minus_1_to_1_are_scaled_to_the_bounds_and_clipped(name):
    """A number without two finite bounds is not scaled."""
    low, high, actions, expected = BOXES[name]
    box = spaces.Box(np.float32(low), np.float32(high))
    acted = CONTINUOUS.script.rescaler(box, CONTINUOUS.make_args())(np.float32(actions))
    np.testing.assert_allclose(acted, expected, rtol=1e-6)
    assert all(box.contains(action) for action in acted)
    acted = CONTINUOUS.script.rescaler(box, CONTINUOUS.make_args(scale_actions=False))(np.float32(actions))
    np.testing.assert_allclose(acted, np.clip(actions, low, high), rtol=1e-6)
    assert all(box.contains(action) for action in acted)


@pytest.mark.parametrize(("dtype", "low", "high"), [(np.int8, -100, 100), (np.int64, 0, 3)])
def test_integer_actions_are_rounded_and_do_not_overflow(dtype, low, high):
    box = spaces.Box(low, high, (3,), dtype)
    actions = np.float32([[-1, 0, 1], [0.26, 3, -9], [-0.5, 0.5, 0.9]])
    middle, half = (low + high) / 2, (high - low) / 2
    expected = np.clip(np.round(middle + half * actions.astype(float)), low, high)
    acted = CONTINUOUS.script.rescaler(box, CONTINUOUS.make_args())(actions)
    np.testing.assert_array_equal(acted, expected)
    assert all(box.contains(action) for action in acted)
