"""Each equation equals an independent computation, by NumPy or torch.distributions, in float64."""

import itertools
import math

import gymnasium as gym
import numpy as np
import pytest
import scipy.special
import torch
from gymnasium import spaces
from helpers import (
    ATARI,
    CONTINUOUS,
    DISCRETE,
    LSTM,
    D,
    RewardScale,
    atari_too,
    direct_gae,
    each_script,
    float64,
    same_step_ends,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import kl_divergence

import ppo
import ppo_gpu

FAST = settings(max_examples=30, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)


# Distributions


@atari_too
@FAST
@given(seed=SEEDS, rows=st.integers(1, 5), actions=st.integers(1, 6), scale=st.sampled_from([0.0, 1.0, 20.0]))
def test_log_prob_entropy_and_kl_equal_those_of_torch_distributions(case, seed, rows, actions, scale):
    script, (old, new, chosen) = case.script, case.random_policies(seed, rows, actions, scale)
    p, q = case.distribution(old), case.distribution(new)
    for result, expected in (
        (script.log_prob(old, chosen), p.log_prob(chosen)),
        (script.entropy(old), p.entropy()),
        (script.kl_divergence(old, new), kl_divergence(p, q)),
    ):
        assert result.shape == (rows,)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


@FAST
@given(seed=SEEDS, actions=st.integers(2, 6), scale=st.sampled_from([0.0, 1.0, 3.0]))
def test_discrete_actions_are_drawn_with_their_probabilities(seed, actions, scale):
    """The counts are within 5 standard deviations. An action with a logit of -1e8 is never drawn."""
    rng, draws = np.random.default_rng(seed), 100_000
    logits = rng.uniform(-scale, scale, (2, actions))
    logits[1, rng.integers(actions)] = -1e8
    torch.manual_seed(seed)
    for policy in torch.log_softmax(torch.tensor(logits, dtype=torch.float32), -1):
        counts = np.bincount(ppo.sample(policy.expand(draws, -1)), minlength=actions)
        expected = scipy.special.softmax(float64(policy))
        deviations = np.sqrt(draws * expected * (1 - expected))
        assert (np.abs(counts - draws * expected) <= 5 * deviations + 1e-2).all()


@FAST
@given(seed=SEEDS, size=st.integers(1, 3), scale=st.sampled_from([0.0, 1.0, 20.0]))
def test_continuous_actions_have_the_policys_means_and_deviations(seed, size, scale):
    """Components are independent."""
    rng, draws = np.random.default_rng(seed), 100_000
    means, log_stds = scale * rng.normal(size=size), rng.uniform(-5, 2, size)
    policy = torch.tensor(np.concatenate([means, log_stds]), dtype=torch.float32)
    torch.manual_seed(seed)
    chosen = float64(CONTINUOUS.script.sample(policy.expand(draws, -1)))
    noise = (chosen - means) / np.exp(log_stds)
    rounding = 1e-6 * scale / np.exp(log_stds)
    assert (np.abs(noise.mean(0)) <= 5 / math.sqrt(draws) + rounding).all()
    np.testing.assert_allclose(noise.T @ noise / draws, np.eye(size), atol=5 * math.sqrt(2 / draws))


@each_script
def test_the_most_likely_action_has_the_largest_probability(case):
    """No other action has a larger one."""
    old, _, others = case.random_policies(0, 200, case.num_actions, 1.0)
    likely = case.distribution(old).log_prob(case.script.most_likely(old))
    assert (likely >= case.distribution(old).log_prob(others)).all()
    assert (likely > case.distribution(old).log_prob(others)).any()


# compute_gae


GAE = given(
    seed=SEEDS,
    steps=st.integers(1, 10),
    envs=st.integers(1, 3),
    chance=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    gae_lambda=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
)


@FAST
@GAE
def test_gae_is_the_sum_of_discounted_deltas(seed, steps, envs, chance, gamma, gae_lambda):
    """The sum goes to the episode's end. Returns are A + V. The values of terminal states count nowhere."""
    rng = np.random.default_rng(seed)
    terminated, truncated = same_step_ends(rng, steps, envs, chance)
    rewards, values, next_values = rng.normal(0, 5, (3, steps, envs))
    ends, factors = (terminated, truncated), (gamma, gae_lambda)
    expected = direct_gae(rewards, values, *ends, *factors, next_values)
    next_values[terminated] = np.nan  # a simulator may fail there
    inputs = map(torch.from_numpy, (rewards, values, next_values, *ends))
    advantages, returns = (x.numpy() for x in ppo.compute_gae(*inputs, *factors))
    np.testing.assert_allclose(advantages, expected, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(returns, expected + values, rtol=1e-6, atol=1e-5)


# ppo_loss


class Given:
    """A stand-in for an agent whose policy and values are given."""

    def __init__(self, policy, values):
        self.given_policy, self.given_values = policy, values

    def policy(self, obs):
        return self.given_policy

    def value(self, obs):
        return self.given_values

    def __call__(self, *inputs):
        return self.given_policy, self.given_values


COEFFICIENTS = "learning_rate", "clip_coef", "kl_coef", "ent_coef"


def random_batch(case, seed, rows=12):
    """Return policies and values of the current networks, and a batch of old ones, in float64."""
    generator = torch.Generator().manual_seed(seed)
    old, new, actions = case.random_policies(seed, rows, case.num_actions, 1.0)
    noise = torch.randn(5, rows, D, generator=generator, dtype=torch.float64)
    old_values, advantages, returns = noise[1:4, :, 0]
    columns = {"obs": noise[0], "actions": actions, "old_policy": old, "old_values": old_values}
    columns |= {"advantages": advantages, "returns": returns, "rewards": noise[2, :, 1]}
    columns["weights"] = torch.tensor([1.0, 1.0, 0.0] * (rows // 3), dtype=torch.float64)
    columns["starts"] = columns["memory"] = noise[0]  # what the agent sees does not matter here
    batch = case.script.Batch(**{name: columns[name] for name in case.script.Batch._fields})
    return new.requires_grad_(), (old_values + 0.5 * noise[4, :, 0]).requires_grad_(), batch


def reference_loss(case, policy, values, batch, args, surrogate, coefficients):
    """Compute the loss and its metrics by torch.distributions."""
    epsilon = coefficients["clip_coef"]
    if case is ATARI:  # in its batches, forced rows have a weight of 0
        rows = batch.weights == 1
        policy, values, batch = policy[rows], values[rows], batch._make(column[rows] for column in batch)
    advantages, returns, actions = batch.advantages, batch.returns, batch.actions
    new, old = case.distribution(policy), case.distribution(batch.old_policy)
    if args.norm_adv:
        std = advantages.std(correction=0 if case is ATARI else 1)
        advantages = (advantages - advantages.mean()) / (std + 1e-8)
    log_ratio = new.log_prob(actions) - old.log_prob(actions)
    ratio = log_ratio.exp()
    if surrogate == "clip":  # [PPO], figure 1
        bounded = torch.where(advantages >= 0, ratio.clamp(max=1 + epsilon), ratio.clamp(min=1 - epsilon))
        objective = bounded * advantages
    else:
        objective = ratio * advantages - coefficients["kl_coef"] * kl_divergence(old, new)
    error = (values - returns) ** 2
    if getattr(args, "clip_vloss", False):
        near = torch.minimum(torch.maximum(values, batch.old_values - epsilon), batch.old_values + epsilon)
        error = torch.maximum(error, (near - returns) ** 2)
    metrics = {
        "policy_loss": -objective, "value_loss": error / 2, "entropy": new.entropy(),
        "approx_kl": ratio - 1 - log_ratio,
        "clipfrac": ((ratio > 1 + epsilon) | (ratio < 1 - epsilon)).double(),
    }  # fmt: skip
    metrics = {name: rows.mean() for name, rows in metrics.items()}
    loss = metrics["policy_loss"] + args.vf_coef * metrics["value_loss"]
    return loss - coefficients["ent_coef"] * metrics["entropy"], metrics


BOOLS = False, True
SURROGATES = (DISCRETE, "clip"), (DISCRETE, "kl-penalty"), (CONTINUOUS, "clip"), (CONTINUOUS, "kl-penalty")


CASES = [*itertools.product([*SURROGATES, (ATARI, "clip")], BOOLS)]
CASES += [((LSTM, "clip"), False)]  # it has no clip_vloss


@pytest.mark.parametrize(("case", "surrogate", "clip_vloss"), [(*a, b) for a, b in CASES], ids=str)
@pytest.mark.parametrize("norm_adv", BOOLS)
def test_ppo_loss_its_gradients_and_metrics_equal_the_reference(case, surrogate, clip_vloss, norm_adv):
    """The loss uses the coefficients of the state, which may have been adapted, not those of the settings."""
    coefficients = {"clip_coef": 0.15, "kl_coef": 1.7, "ent_coef": 0.3}
    settings = {"norm_adv": norm_adv, "vf_coef": 0.8}
    settings |= {} if case is LSTM else {"clip_vloss": clip_vloss}
    if case in (ATARI, LSTM):  # their coefficients are settings
        args = case.make_args(**settings, clip_coef=0.15, ent_coef=0.3)
        rest = (args,)
    else:
        state = case.make_state(case.make_args(**coefficients))
        fixed = {name: value for name, value in coefficients.items() if not hasattr(state, name)}
        args = case.make_args(surrogate=surrogate, **settings, **fixed)
        rest = args, state
    sides = set()
    for seed in range(3):
        inputs, values, batch = random_batch(case, seed)
        policy = inputs if case is CONTINUOUS else torch.log_softmax(inputs, -1)
        loss, metrics = case.script.ppo_loss(Given(policy, values), batch, *rest)
        reference = reference_loss(case, policy, values, batch, args, surrogate, coefficients)
        expected, expected_metrics = reference
        assert not any(metric.requires_grad for metric in metrics.values())
        assert metrics.keys() == expected_metrics.keys()
        for name, metric in metrics.items():
            torch.testing.assert_close(metric.double(), expected_metrics[name], rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
        gradients, expected_gradients = (
            torch.autograd.grad(x, (inputs, values), materialize_grads=True, retain_graph=True)
            for x in (loss, expected)
        )
        torch.testing.assert_close(gradients, expected_gradients, rtol=1e-6, atol=1e-9)
        log_probs = [case.distribution(x).log_prob(batch.actions) for x in (policy, batch.old_policy)]
        side = (((log_probs[0] - log_probs[1]).exp() - 1) / 0.15).trunc().sign()
        sides |= set(zip(side.tolist(), (batch.advantages > 0).tolist(), strict=True))
    assert sides == set(itertools.product((-1, 0, 1), BOOLS))  # all ways to be clipped occurred


def test_equal_advantages_are_normalised_to_0_and_not_to_nan():
    policy, values, batch = random_batch(DISCRETE, 3)
    batch = batch._replace(advantages=torch.full_like(batch.advantages, 2.0))
    args = DISCRETE.make_args(ent_coef=0.0)
    state = DISCRETE.make_state(args)
    loss, metrics = ppo.ppo_loss(Given(policy, values), batch, args, state)
    (gradient,) = torch.autograd.grad(loss, policy)
    assert metrics["policy_loss"] == gradient.abs().max() == 0


# Networks


@pytest.mark.parametrize("case", [DISCRETE, CONTINUOUS, ATARI, LSTM], ids=repr)
def test_initial_weights_are_orthogonal_and_biases_0(case):
    """W Wᵀ is 2 I in hidden layers, near 0 in the actor's last layer, I in the critic's and in an LSTM."""
    torch.manual_seed(0)
    space = spaces.Box(-np.inf, np.inf, (D,), np.float32)
    sizes = (6,) if case is ATARI else (space, case.num_actions)
    agent = case.script.Agent(case.make_args(), *sizes)
    for name, weight in agent.named_parameters():
        if "weight" in name:
            last = weight.shape[0] in (1, case.num_actions, 6)
            expected = (1.0 if "critic" in name else 1e-4) if last else 1.0 if "rnn" in name else 2.0
            matrix = weight.detach().flatten(1)
            product = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
            torch.testing.assert_close(product, expected * torch.eye(len(product)), rtol=0, atol=1e-4)
    assert not any(p.any() for name, p in agent.named_parameters() if "bias" in name)
    if case is CONTINUOUS:
        assert agent.log_std.unique().tolist() == [-0.5]  # --init-log-std


# Running statistics


@pytest.mark.parametrize("script", [ppo, ppo_gpu])
@FAST
@given(seed=SEEDS, offset=st.floats(-1e3, 1e3), scale=st.sampled_from([0.1, 1.0, 30.0]))
def test_running_moments_of_batches_equal_mean_and_variance_of_all_data(script, seed, offset, scale):
    rng = np.random.default_rng(seed)
    moments, data = script.RunningMoments(2), np.zeros((0, 2))
    for size in rng.integers(1, 20, 6):
        batch = (offset + scale * rng.normal(size=(size, 2))).astype(np.float32)
        moments.update(torch.from_numpy(batch))
        data = np.concatenate([data, batch])
    error = 1e-6 * (abs(offset) + scale)  # the resolution of float32
    np.testing.assert_allclose(moments.mean, data.mean(0), rtol=0, atol=3 * error)
    np.testing.assert_allclose(moments.var, data.var(0), rtol=1e-4, atol=20 * error * scale + error**2)
    assert moments.count == len(data)


def test_observations_are_normalised_unless_they_are_one_hot_or_binary():
    """All are clipped to ±10. A `Box` from 0 to 1 may have any numbers in between."""
    box, binary = spaces.Box(np.float32([0]), np.float32([1])), spaces.MultiBinary(1)
    others = spaces.Box(np.float32([0, 0]), np.float32([5, np.inf]))
    env = gym.Env()
    env.observation_space = spaces.Tuple((box, binary, others))
    flat_env = ppo.Flat(env)
    space = flat_env.observation_space
    agent = DISCRETE.make_agent(DISCRETE.make_args(), obs_space=space)
    agent.binary_obs |= torch.from_numpy(flat_env.binary_obs)
    obs = torch.tensor([[0.0, 1.0, 0.5, 3.0], [3.0, 0.25, -2.0, 7.0], [1e4, 50.0, -1e4, 1.0]])
    mean, var = float64(agent.obs_moments.mean), float64(agent.obs_moments.var)
    assert np.abs(mean).min() > 0.01
    assert np.abs(var - 1).min() > 0.5
    expected = np.clip((float64(obs) - mean) / np.sqrt(var), -10, 10)
    expected[:, 1] = obs[:, 1].clamp(-10, 10)
    np.testing.assert_allclose(agent.normalize(obs), expected, rtol=1e-5)
    assert agent.normalize(obs[None])[0, 2, [0, 2]].tolist() == [10, -10]
    assert agent.normalize(torch.tensor([0.0, 1e-7, 0.0, 0.0]))[1] == 1e-7
    agent.obs_moments.var.zero_()  # a number that never changed
    agent.obs_moments.mean.copy_(obs[0])
    assert agent.normalize(obs[0]).tolist() == [0, 1, 0, 0]
    agent = DISCRETE.make_agent(DISCRETE.make_args(norm_obs=False), obs_space=space)
    assert torch.equal(agent.normalize(obs), obs)


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_rewards_are_divided_by_the_deviation_of_all_discounted_returns_so_far(gamma):
    """They are, over several rollouts, and clipped to ±10. Each episode's return starts from 0."""
    args = DISCRETE.make_args(num_steps=40, num_envs=6, gamma=gamma)
    agent, rng, largest = DISCRETE.make_agent(args), np.random.default_rng(2), 0
    agent.return_moments = ppo.RunningMoments(1)
    rollout = DISCRETE.make_rollout(args, agent)
    reference = RewardScale(agent, rollout, gamma)
    ends = same_step_ends(rng, 5 * args.num_steps, args.num_envs, 0.2)
    for start in range(0, 5 * args.num_steps, args.num_steps):
        terminated, truncated = (x[start : start + args.num_steps] for x in ends)
        rollout.terminated[:], rollout.truncated[:] = terminated, truncated
        rewards = (0.05 + 0.1 * rng.normal(size=terminated.shape)) * (start > 0)  # at first, there are none
        if start > 100:
            rewards[[7, 20], [0, 1]] = -30, 30
        rollout.rewards[:] = rewards
        *_, scaled = ppo.normalize_rollout(agent, rollout, args)
        expected = reference.scale(rollout.rewards, terminated | truncated)
        np.testing.assert_allclose(float64(scaled), expected, rtol=1e-4)
        largest = max(largest, scaled.max().item(), -scaled.min().item())
        assert agent.return_moments.mean.item() == pytest.approx(np.mean(reference.seen), rel=1e-4, abs=1e-5)
        assert agent.return_moments.count == len(reference.seen)
    assert (largest == 10) or gamma == 1


# adjust_coefficients


def adjusted(args, state, script=ppo, **metrics):
    """Return the coefficients of the next iteration, after one with these metrics, if any."""
    vars(state).update(metrics)
    script.adjust_coefficients(state, args)
    return {name: getattr(state, name) for name in COEFFICIENTS if hasattr(state, name)}


@each_script
@pytest.mark.parametrize(("anneal_lr", "anneal_ent_coef"), list(itertools.product(BOOLS, BOOLS)))
def test_schedules_are_linear_in_the_remaining_steps(case, anneal_lr, anneal_ent_coef):
    """Without --adapt, the KL divergence changes no coefficient."""
    changes = {"anneal_lr": anneal_lr, "anneal_ent_coef": anneal_ent_coef}
    args = case.make_args(total_timesteps=1000, **changes)
    state = case.make_state(args)
    for step, left in ((0, 1.0), (250, 0.75), (900, 0.1), (1000, 0.0)):
        state.global_step = step
        lr, ent_coef = 3e-3 * (left if anneal_lr else 1), 0.01 * (left if anneal_ent_coef else 1)
        for metrics in ({}, {"kl": 9.0, "entropy": 0.0}, {"kl": 0.0, "entropy": 9.0}):
            expected = {"learning_rate": lr, "clip_coef": 0.2, "kl_coef": 1.0, "ent_coef": ent_coef}
            assert adjusted(args, state, case.script, **metrics) == pytest.approx(expected)


ADAPTED = [  # a coefficient, its factor if the KL is too high, and its bounds
    ("kl_coef", 2.0, (0.0, 1e4)),
    ("clip_coef", 0.5, (1e-3, 0.3)),
    ("learning_rate", 1 / 1.5, (1e-5, 1e-2)),
]


@each_script
@pytest.mark.parametrize(("name", "factor", "bounds"), ADAPTED, ids=repr)
def test_adapt_moves_its_coefficient_alone_once_the_kl_is_1_5_times_off(case, name, factor, bounds):
    """The coefficient stays within its bounds."""
    surrogate = "kl-penalty" if name == "kl_coef" else "clip"
    settings = {"anneal_lr": False, "learning_rate": 1e-2, "clip_coef": 0.1, "surrogate": surrogate}
    args = case.make_args(adapt=name.replace("_", "-"), **settings)

    def new_state():
        state = case.make_state(args)
        state.learning_rate = 1e-3 if name == "learning_rate" else 1e-2
        return state

    before = adjusted(args, new_state(), case.script)  # no metrics before the first iteration
    assert before["learning_rate"] == new_state().learning_rate
    for kl, change in ((0.0301, factor), (0.0299, 1), (0.0134, 1), (0.0133, 1 / factor)):
        state = new_state()
        after = before | {name: before[name] * change}
        assert adjusted(args, state, case.script, kl=kl, entropy=1.0) == pytest.approx(after, rel=1e-12)
    for kl in (0.0, 1.0):
        for _ in range(60):
            after = adjusted(args, state, case.script, kl=kl, entropy=1.0)
        assert after[name] == pytest.approx(bounds[(factor > 1) == (kl > 0.5)], abs=1e-12)


@each_script
def test_an_adapted_learning_rate_stays_below_the_annealed_one(case):
    args = case.make_args(adapt="learning-rate", total_timesteps=1000, learning_rate=0.004)
    same, rises, falls, last = (750, 5e-4, 0.02), (750, 5e-4, 0.001), (750, 0.009, 0.02), (999, 1e-5, 0.02)
    for (step, rate, kl), expected in ((same, 5e-4), (rises, 7.5e-4), (falls, 1e-3), (last, 4e-6)):
        state = case.make_state(args)
        state.global_step, state.learning_rate = step, rate
        rates = adjusted(args, state, case.script, kl=kl, entropy=1.0)
        assert rates["learning_rate"] == pytest.approx(expected)


@each_script
def test_target_entropy_raises_the_coefficient_below_it_and_lowers_it_above(case):
    """It does so by a tenth, outside a tolerance."""
    args = case.make_args(target_entropy=1.0, ent_coef=0.02, anneal_ent_coef=True)
    for entropy, factor in ((0.94, 1.1), (0.96, 1), (1.04, 1), (1.06, 1 / 1.1)):
        state = case.make_state(args)
        state.global_step = 100_000
        after = adjusted(args, state, case.script, kl=0.0, entropy=entropy)
        assert after["ent_coef"] == pytest.approx(0.02 * factor)
    for entropy, bound in ((0.0, 100.0), (2.0, 0.0)):
        for _ in range(500):
            after = adjusted(args, state, case.script, kl=0.0, entropy=entropy)
        assert after["ent_coef"] == pytest.approx(bound, abs=1e-12)
    assert adjusted(args, state, case.script, kl=0.0, entropy=0.0)["ent_coef"] == 1e-5  # it grows at once
