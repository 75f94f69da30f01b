"""A rollout holds what the environments did, step by step, and actions that the policy has sampled."""

import copy
import itertools
import math

import numpy as np
import pytest
import scipy.stats
import scripted_envs
import torch
from gymnasium import spaces
from helpers import CONTINUOUS, DISCRETE, RewardScale, direct_gae, each_script, float64, normalized

KEY, STEPS, ROLLOUTS = 10, 5, 12
SCRIPTED, BOX = DISCRETE.env_id, CONTINUOUS.env_id
ONE_ARRAY = '{"one_array": true}'  # an environment that reuses its arrays of observations and ends
VARIANTS = {  # script, settings, type of the environments
    "sync": (DISCRETE, {"env_id": SCRIPTED}, "SyncVectorEnv"),
    "async": (DISCRETE, {"env_id": SCRIPTED, "async_envs": True}, "AsyncVectorEnv"),
    "one": (DISCRETE, {"env_id": SCRIPTED, "num_envs": 1, "num_steps": 2}, "SyncVectorEnv"),
    "one-step": (DISCRETE, {"env_id": SCRIPTED, "num_steps": 1}, "SyncVectorEnv"),
    "one-array": (DISCRETE, {"env_id": SCRIPTED, "env_kwargs": ONE_ARRAY}, "SyncVectorEnv"),
    "async-one-array": (
        DISCRETE, {"env_id": SCRIPTED, "env_kwargs": ONE_ARRAY, "async_envs": True}, "AsyncVectorEnv"
    ),
    "box": (CONTINUOUS, {"env_id": BOX}, "SyncVectorEnv"),
    "box-async": (CONTINUOUS, {"env_id": BOX, "async_envs": True}, "AsyncVectorEnv"),
    "box-one-array": (CONTINUOUS, {"env_id": BOX, "env_kwargs": ONE_ARRAY}, "SyncVectorEnv"),
}  # fmt: skip
pytestmark = pytest.mark.filterwarnings("ignore:.*share an object")  # the reused array


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


COLUMNS = "obs", "next_obs", "rewards", "terminated", "truncated"


def replay(key, actions):
    """Play the script with these actions.

    Return the columns of its transitions by name, its episodes as (row of the last step, return, length), and
    the observation that the next action would be for.
    """
    rows, episodes = [], []
    start = -np.ones_like(actions[0])
    episode, step, total, last = 0, 0, 0.0, start
    for row, action in enumerate(actions):
        obs = scripted_envs.observation(key, episode, step, last)
        last, value = action, scripted_envs.reward(key, episode, step, action)
        step, total = step + 1, total + value
        ended = step == scripted_envs.length(key, episode)
        ends = scripted_envs.ending(key, episode) if ended else (False, False)
        rows.append((obs, scripted_envs.observation(key, episode, step, last), value, *ends))
        if ended:
            episodes.append((row, total, step))
            episode, step, total, last = episode + 1, 0, 0.0, start
    columns = dict(zip(COLUMNS, map(np.stack, zip(*rows, strict=True)), strict=True))
    return columns, episodes, scripted_envs.observation(key, episode, step, last)


@pytest.mark.parametrize("variant", VARIANTS)
def test_rollouts_have_each_transition_and_episode_of_the_scripted_environments(variant):
    """Observations, rewards and ends are the script's, also from one rollout to the next.

    The next observation of a step that ends an episode is the last one of that episode. The first one of the
    next episode is where the next step starts. Each action is a sample of the policy for its observation.
    """
    case, settings, kind = VARIANTS[variant]
    agent, copies, episodes_of, found = collect(case, ROLLOUTS, **settings)
    assert found == kind
    steps, envs = copies[0].rewards.shape
    actions = received(case, np.concatenate([rollout.actions.numpy() for rollout in copies]))
    ends = []
    for n in range(envs):
        columns, episodes, last = replay(KEY + n, actions[:, n])
        for name, column in columns.items():
            joined = np.concatenate([getattr(rollout, name)[:, n] for rollout in copies])
            np.testing.assert_allclose(joined, column, rtol=1e-5, atol=1e-6, err_msg=name)
        for i, rollout in enumerate(copies, start=1):
            following = columns["obs"][i * steps] if i < ROLLOUTS else last
            np.testing.assert_allclose(rollout.current_obs[n], following, rtol=1e-5, atol=1e-6)
        ends += [(row, n, total, length) for row, total, length in episodes]
    for i, found in enumerate(episodes_of):
        expected = [end[2:] for end in sorted(ends) if i * steps <= end[0] < (i + 1) * steps]
        assert len(found) == len(expected)
        np.testing.assert_allclose(np.ravel(found), np.ravel(expected), rtol=1e-5)
    for rollout in copies:
        np.testing.assert_allclose(rollout.policies, case.policy(agent, rollout.obs), rtol=1e-4, atol=1e-5)
    assert_sampled(case, agent, copies)


@pytest.mark.parametrize("variant", VARIANTS)
def test_advantages_are_those_of_the_environments_own_transitions(variant):
    """They are summed here in float64, from the script alone, while the networks learn.

    Episodes are terminated, truncated, or both at once, some of them in the last step of a rollout. The
    batch has one row for each transition, with its observation, value, return and scaled reward.
    """
    case, settings, _ = VARIANTS[variant]
    args = case.make_args(**{"num_steps": STEPS, "num_minibatches": 1, **settings})
    envs, agent, rollout = case.begin(args)
    scale, agents, batches = RewardScale(agent, rollout, args.gamma), [], []
    for _ in range(ROLLOUTS):
        agents.append(copy.deepcopy(agent))
        case.script.collect_rollout(envs, agent, rollout, args)
        batches.append(case.make_batch(agent, rollout, args))
        case.update(agent, batches[-1], args)
    envs.close()
    shape = args.num_steps, args.num_envs
    actions = np.concatenate([float64(batch.actions.unflatten(0, shape)) for batch in batches])
    logs = [replay(KEY + n, received(case, actions[:, n]))[0] for n in range(args.num_envs)]
    kinds = set()
    for i, (acting, batch) in enumerate(zip(agents, batches, strict=True)):
        rows = slice(i * args.num_steps, (i + 1) * args.num_steps)
        columns = (np.stack([log[name][rows] for log in logs], 1) for name in COLUMNS)
        obs, next_obs, rewards, terminated, truncated = columns
        values, next_values = case.values(acting, obs), case.values(acting, next_obs)
        rewards, ends = scale.scale(rewards, terminated | truncated), (terminated, truncated)
        advantages = direct_gae(rewards, values, *ends, args.gamma, args.gae_lambda, next_values)
        expected = {"obs": normalized(acting, obs), "old_values": values, "rewards": rewards}
        expected |= {"advantages": advantages, "returns": advantages + values}
        for name, column in expected.items():
            found = float64(getattr(batch, name).unflatten(0, shape))
            np.testing.assert_allclose(found, column, rtol=1e-4, atol=1e-4, err_msg=name)
        kinds |= {*zip(terminated[-1].tolist(), truncated[-1].tolist(), strict=True)}
    assert args.num_envs == 1 or kinds == {*itertools.product((False, True), repeat=2)}


@each_script
@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("norm_rewards", [False, True])
def test_a_batch_stays_as_it_is_while_the_next_rollout_is_collected(case, norm_obs, norm_rewards):
    """The next rollout is written to the same arrays, so a batch must not share their memory."""
    args = case.make_args(env_id=case.env_id, num_steps=STEPS, norm_obs=norm_obs, norm_rewards=norm_rewards)
    envs, agent, rollout = case.begin(args)
    case.script.collect_rollout(envs, agent, rollout, args)
    normalised = case.script.normalize_rollout(agent, rollout, args)
    kept = [*normalised, *case.script.make_batch(agent, rollout, *normalised, args)]
    before = copy.deepcopy(kept)
    for _ in range(2):
        case.script.collect_rollout(envs, agent, rollout, args)
        batch = case.make_batch(agent, rollout, args)
    envs.close()
    assert all(torch.equal(x, y) for x, y in zip(kept, before, strict=True))
    assert not torch.equal(batch.obs, kept[0].flatten(0, 1))


@each_script
def test_a_rollout_has_the_actions_that_were_drawn_although_environments_change_theirs(case):
    args = case.make_args(env_id=case.env_id, num_steps=STEPS)
    envs, agent, rollout = case.begin(args)
    step, given = envs.step, []

    def step_and_change(actions):
        given.append(actions.copy())
        result = step(actions)
        actions[...] = 0
        return result

    envs.step = step_and_change
    case.script.collect_rollout(envs, agent, rollout, args)
    envs.close()
    actions = received(case, rollout.actions.numpy())
    assert np.abs(actions).max() > 0
    np.testing.assert_allclose(actions, np.stack(given), rtol=1e-6)


def assert_sampled(case, agent, rollouts):
    """Check that log π(a|s) is -H(π) on average, and that the noise of continuous actions is normal."""
    surprise, noise = [], []
    for rollout in rollouts:
        policy = torch.from_numpy(case.policy(agent, rollout.obs))
        distribution, actions = case.distribution(policy), rollout.actions
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
    actions = np.stack([rollout.actions.numpy() for rollout in copies])
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
