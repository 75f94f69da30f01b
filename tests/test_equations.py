"""The mathematics of ppo.py, each equation against an independent computation.

Independent means: plain loops in float64, `torch.distributions`, finite differences, or Stable-Baselines3.
"""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
from helpers import (
    brute_force_gae,
    brute_force_rewards,
    float64,
    helpers_of,
    layer_pairs,
    random_ends,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3 import PPO
from stable_baselines3.common.buffers import RolloutBuffer
from stable_baselines3.common.logger import Logger
from torch.distributions import Categorical
from torch.optim import SGD, Adam

import ppo

D, A = 3, 4  # entries of an observation, actions
FAST = settings(max_examples=40, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**32 - 1)


# Helpers

of_ppo = helpers_of(ppo)
make_args, make_state, make_optimizer = of_ppo.make_args, of_ppo.make_state, of_ppo.make_optimizer
make_rollout, learn = of_ppo.make_rollout, of_ppo.learn


def make_agent(args, seed=0, one_hot=None):
    """An agent whose policy is far from uniform, and whose statistics are not those of a new one."""
    torch.manual_seed(seed)
    agent = ppo.Agent(args, np.zeros(D, dtype=bool) if one_hot is None else one_hot, gym.spaces.Discrete(A))
    with torch.no_grad():
        agent.actor[-1].weight.mul_(60)
        for layer in (*agent.actor, *agent.critic):
            layer.bias.normal_(std=0.1)
    agent.obs_moments.update(0.5 + 2 * torch.randn(50, D))
    agent.return_moments.update(1 + 3 * torch.randn(50, 1))
    return agent


def networks(agent, obs):
    """The distribution and the values that an agent's networks, in float64, give for raw observations."""
    agent = copy.deepcopy(agent).double()
    with torch.no_grad():
        inputs = agent.normalize(obs.double())
        return Categorical(logits=agent.actor(inputs)), agent.critic(inputs)[..., 0].numpy()


def gae_case(seed, steps, envs, chance, first_filler=False):
    """Random float64 inputs of `compute_gae` and the mask of the valid rows."""
    rng = np.random.default_rng(seed)
    terminated, truncated, valid = random_ends(rng, steps, envs, chance)
    if first_filler:
        valid[0] &= terminated[0] | truncated[0] | (rng.random(envs) < 0.5)
    rewards, values = rng.normal(0, 5, (steps, envs)), rng.normal(0, 5, (steps + 1, envs))
    return rewards * valid, values, terminated, truncated, valid


def gae(rewards, values, terminated, truncated, gamma, lam):
    """`ppo.compute_gae` for NumPy arrays."""
    tensors = (torch.from_numpy(x) for x in (rewards, values, terminated, truncated))
    return (x.numpy() for x in ppo.compute_gae(*tensors, gamma, lam))


@pytest.fixture
def recorder(monkeypatch):
    """Records each call of `ppo_loss`; with `recorder.agent` set, also the agent's state at that time."""
    recorder = SimpleNamespace(calls=[], agent=None)
    original = ppo.ppo_loss

    def record(policy, values, batch, state, args):
        loss, figures = original(policy, values, batch, state, args)
        agent = copy.deepcopy(recorder.agent.state_dict()) if recorder.agent else None
        recorder.calls.append(SimpleNamespace(batch=batch, figures=figures, loss=loss.item(), agent=agent))
        return loss, figures

    monkeypatch.setattr(ppo, "ppo_loss", record)
    return recorder


# compute_gae


@FAST
@given(
    seed=SEEDS,
    steps=st.integers(2, 10),
    envs=st.integers(1, 3),
    chance=st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    gamma=st.sampled_from([0.0, 0.5, 0.99, 1.0]),
    lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    first_filler=st.booleans(),
)
def test_gae_is_the_sum_of_discounted_deltas(seed, steps, envs, chance, gamma, lam, first_filler):
    """Advantages are Σ (γλ)^l δ_{t+l} up to the episode's end, returns are A + V, in every valid row."""
    rewards, values, terminated, truncated, valid = gae_case(seed, steps, envs, chance, first_filler)
    advantages, returns = gae(rewards, values, terminated, truncated, gamma, lam)
    expected = brute_force_gae(rewards, values, terminated, truncated, gamma, lam)
    np.testing.assert_allclose(advantages[valid], expected[valid], rtol=1e-12, atol=1e-11)
    np.testing.assert_allclose(returns[valid], (expected + values[:-1])[valid], rtol=1e-12, atol=1e-11)


@FAST
@given(seed=SEEDS, steps=st.integers(2, 8), lam=st.sampled_from([0.0, 0.3, 0.95, 1.0]))
def test_gae_returns_are_the_lambda_return(seed, steps, lam):
    """Returns are (1-λ) Σ λ^{n-1} G^(n) + λ^{H-1} G^(H), a mixture of n-step returns (GAE paper, eq. 16)."""
    rewards, values, terminated, truncated, valid = gae_case(seed, steps, 1, 0.25)
    _, returns = gae(rewards, values, terminated, truncated, 0.9, lam)
    ends = (terminated | truncated)[:, 0]
    for t in np.flatnonzero(valid[:, 0]):
        horizon = next((k for k in range(t, steps) if ends[k]), steps - 1) - t + 1
        n_step = []
        for n in range(1, horizon + 1):
            future = 0.0 if terminated[t + n - 1, 0] else values[t + n, 0]
            n_step.append(sum(0.9**k * rewards[t + k, 0] for k in range(n)) + 0.9**n * future)
        mixture = sum((1 - lam) * lam ** (n - 1) * n_step[n - 1] for n in range(1, horizon))
        assert returns[t, 0] == pytest.approx(mixture + lam ** (horizon - 1) * n_step[-1], abs=1e-10)


@FAST
@given(seed=SEEDS, steps=st.integers(2, 10), chance=st.sampled_from([0.2, 0.5, 1.0]))
def test_gae_valid_rows_do_not_depend_on_filler_rows(seed, steps, chance):
    """Garbage rewards in filler rows, and garbage values where the future is 0, change no valid row."""
    rewards, values, terminated, truncated, valid = gae_case(seed, steps, 2, chance)
    expected = gae(rewards, values, terminated, truncated, 0.99, 0.95)
    rng = np.random.default_rng(seed)
    rewards = np.where(valid, rewards, 1e6 * rng.normal(size=rewards.shape))
    dead = np.concatenate([np.zeros((1, 2), dtype=bool), terminated])  # values [T+1, N] after a termination
    values = np.where(dead, 1e6 * rng.normal(size=values.shape), values)
    for x, y in zip(expected, gae(rewards, values, terminated, truncated, 0.99, 0.95), strict=True):
        np.testing.assert_array_equal(x[valid], y[valid])


@pytest.mark.parametrize(
    ("terminated", "truncated", "expected"),
    [
        (False, False, 2 + 0.5 * 40 - 30),  # the rollout's last row: bootstrapped
        (False, True, 2 + 0.5 * 40 - 30),  # time limit: bootstrapped
        (True, False, 2 - 30),
        (True, True, 2 - 30),  # both at once: terminated
    ],
)
def test_gae_end_in_the_last_row(terminated, truncated, expected):
    """By hand, T = 2: how an end in the last row counts, and how it reaches the row before."""
    rewards, values = np.array([[1.0], [2.0]]), np.array([[10.0], [30.0], [40.0]])
    ends = np.array([[False], [terminated]]), np.array([[False], [truncated]])
    advantages, returns = gae(rewards, values, *ends, 0.5, 0.8)
    assert advantages[:, 0].tolist() == pytest.approx([1 + 0.5 * 30 - 10 + 0.5 * 0.8 * expected, expected])
    assert returns[:, 0].tolist() == pytest.approx([advantages[0, 0] + 10, expected + 30])


def test_gae_time_limit_bootstraps_and_stops_the_sum():
    """By hand: at a time limit the successor's value counts, while rewards after it do not."""
    rewards, values = np.array([[1.0], [0.0], [100.0]]), np.array([[10.0], [20.0], [30.0], [40.0]])
    ends = np.zeros((3, 1), dtype=bool), np.array([[True], [False], [False]])
    advantages, _ = gae(rewards, values, *ends, 0.5, 1.0)
    assert advantages[0, 0] == pytest.approx(1 + 0.5 * 20 - 10)
    assert advantages[2, 0] == pytest.approx(100 + 0.5 * 40 - 30)


def test_gae_in_float32_keeps_dtype_and_shape():
    """Float32 inputs, as in training, give float32 results [T, N] near the float64 ones."""
    rewards, values, terminated, truncated, valid = gae_case(0, 40, 5, 0.1)
    singles = (torch.from_numpy(x).float() for x in (rewards, values))
    ends = torch.from_numpy(terminated), torch.from_numpy(truncated)
    expected = brute_force_gae(rewards, values, terminated, truncated, 0.99, 0.95)
    results = ppo.compute_gae(*singles, *ends, 0.99, 0.95)
    for result, want in zip(results, (expected, expected + values[:-1]), strict=True):
        assert result.dtype == torch.float32
        assert result.shape == (40, 5)
        np.testing.assert_allclose(result.numpy()[valid], want[valid], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("gamma", "lam"), [(0.99, 0.95), (0.9, 0.0), (1.0, 1.0)])
def test_gae_matches_stable_baselines3(gamma, lam):
    """Without time limits and filler rows, advantages and returns are Stable-Baselines3's."""
    steps, envs = 30, 4
    rng = np.random.default_rng(7)
    rewards, values = rng.normal(size=(steps, envs)), rng.normal(size=(steps + 1, envs))
    terminated = rng.random((steps, envs)) < 0.2
    terminated[-1] = [True, False, True, False]
    space = gym.spaces.Box(-1, 1, (D,))
    buffer = RolloutBuffer(steps, space, gym.spaces.Discrete(A), "cpu", lam, gamma, envs)
    buffer.rewards[:], buffer.values[:] = rewards, values[:-1]
    buffer.episode_starts[1:] = terminated[:-1]  # there, a row that starts an episode follows the last row
    buffer.compute_returns_and_advantage(torch.from_numpy(values[-1]), terminated[-1])
    advantages, returns = gae(rewards, values, terminated, np.zeros_like(terminated), gamma, lam)
    np.testing.assert_allclose(advantages, buffer.advantages, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(returns, buffer.returns, rtol=1e-4, atol=1e-4)


@FAST
@given(seed=SEEDS, steps=st.integers(2, 10))
def test_lambda_1_is_reinforce_with_baseline(seed, steps):
    """λ = 1: advantages are discounted rewards-to-go, bootstrapped where cut short, minus V (REINFORCE)."""
    rewards, values, terminated, truncated, valid = gae_case(seed, steps, 2, 0.2)
    advantages, returns = gae(rewards, values, terminated, truncated, 0.9, 1.0)
    for t, n in np.argwhere(valid):
        to_go, factor, step = 0.0, 1.0, t
        while True:
            to_go, factor = to_go + factor * rewards[step, n], factor * 0.9
            if terminated[step, n]:
                break
            if truncated[step, n] or step == steps - 1:
                to_go += factor * values[step + 1, n]
                break
            step += 1
        assert returns[t, n] == pytest.approx(to_go, abs=1e-10)
        assert advantages[t, n] == pytest.approx(to_go - values[t, n], abs=1e-10)


# log_prob, entropy, kl_divergence, Agent.act


@FAST
@given(seed=SEEDS, rows=st.integers(1, 5), actions=st.integers(1, 6), scale=st.sampled_from([0.0, 1.0, 20.0]))
def test_distribution_functions_match_torch_distributions(seed, rows, actions, scale):
    """log π(a|s), H and KL are those of `torch.distributions.Categorical`; KL's order matters."""
    generator = torch.Generator().manual_seed(seed)
    old, new = scale * torch.randn(2, rows, actions, generator=generator, dtype=torch.float64)
    chosen = torch.randint(actions, (rows,), generator=generator)
    old_log, new_log = torch.log_softmax(old, -1), torch.log_softmax(new, -1)
    p, q = Categorical(logits=old), Categorical(logits=new)
    for result, expected in (
        (ppo.log_prob(old_log, chosen), p.log_prob(chosen)),
        (ppo.entropy(old_log), p.entropy()),
        (ppo.kl_divergence(old_log, new_log), torch.distributions.kl_divergence(p, q)),
    ):
        assert result.shape == (rows,)
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)


def test_policy_and_value_are_the_networks_as_described():
    """The policy is log softmax of tanh layers, in NumPy; the value is a scalar for each observation."""
    agent = make_agent(make_args())
    obs = torch.randn(6, 2, D)

    def forward(layers, x):
        *hidden, (weight, bias) = [(float64(layer.weight), float64(layer.bias)) for layer in layers]
        for w, b in hidden:
            x = np.tanh(x @ w.T + b)
        return x @ weight.T + bias

    logits = forward(agent.actor, float64(obs))
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(float64(agent.policy(obs)), expected, atol=1e-5)
    np.testing.assert_allclose(
        float64(agent.value(obs)), forward(agent.critic, float64(obs))[..., 0], atol=1e-5
    )


def test_act_samples_from_the_policy():
    """Frequencies of sampled actions fit the policy (chi-square, and pairs of rows are independent)."""
    agent, rows = make_agent(make_args()), 20_000
    obs = torch.tensor([0.3, -1.0, 2.0]).expand(2, rows, D)
    torch.manual_seed(5)
    with torch.no_grad():
        actions, policy = agent.act(obs, agent.noise(2, rows))
        probabilities = Categorical(logits=agent.actor(agent.normalize(obs[0, 0]))).probs
        torch.testing.assert_close(policy[0, 0].exp(), probabilities)
    assert probabilities.max() < 0.9
    assert probabilities.min() > 0.005
    expected = rows * float64(probabilities)
    counts = np.bincount(actions[0].numpy(), minlength=A)
    assert ((counts - expected) ** 2 / expected).sum() < 21  # 3 degrees of freedom: p = 0.0001
    pairs = np.bincount((A * actions[0] + actions[1]).numpy(), minlength=A * A)
    expected = np.outer(expected, expected).flatten() / rows
    assert ((pairs - expected) ** 2 / expected).sum() < 45  # 15 degrees of freedom: p = 0.0001


def test_act_without_noise_is_greedy():
    """Without noise, the actions are the likeliest, for raw observations that `act` normalises itself."""
    agent, obs = make_agent(make_args()), 3 * torch.randn(50, D)
    actions, policy = agent.act(obs)
    distribution, _ = networks(agent, obs)
    assert actions.tolist() == distribution.probs.argmax(-1).tolist()
    assert len(set(actions.tolist())) > 1
    np.testing.assert_allclose(float64(policy), distribution.logits.numpy(), atol=1e-5)


def test_noise_is_standard_gumbel():
    """The noise [*shape, A] has the standard Gumbel's mean, variance and distribution function."""
    torch.manual_seed(0)
    noise = make_agent(make_args()).noise(100, 200)
    assert noise.shape == (100, 200, A)
    assert noise.mean().item() == pytest.approx(np.euler_gamma, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert (noise < 0).float().mean().item() == pytest.approx(math.exp(-1), abs=0.01)


# ppo_loss


def random_batch(seed, rows=7, dtype=torch.float64):
    """Logits and values of the networks as they are now, and a batch of what the old ones made."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    old = torch.log_softmax(normal(rows, A), -1)
    actions = torch.randint(A, (rows,), generator=generator)
    old_log_probs = old[torch.arange(rows), actions]
    batch = ppo.Batch(normal(rows, D), actions, old, old_log_probs, normal(rows), normal(rows), normal(rows))
    return old + 0.4 * normal(rows, A), batch.values + 0.5 * normal(rows), batch


def reference_loss(logits, values, batch, state, args):
    """The loss and its figures, row by row, in NumPy and float64."""
    logits, values = np.asarray(logits), np.asarray(values)
    _, actions, old_policy, old_log_probs, old_values, advantages, returns = (x.numpy() for x in batch)
    if args.norm_adv and len(advantages) > 1:
        advantages = (advantages - np.mean(advantages)) / (np.std(advantages, ddof=1) + 1e-8)
    sums = dict.fromkeys(ppo.FIGURES, 0.0)
    for i, action in enumerate(actions):
        p = np.exp(logits[i]) / np.exp(logits[i]).sum()
        q = np.exp(old_policy[i])
        ratio, eps = p[action] / np.exp(old_log_probs[i]), state.clip_coef
        if args.surrogate == "clip":
            if advantages[i] >= 0:  # the paper's figure 1
                objective = advantages[i] * min(ratio, 1 + eps)
            else:
                objective = advantages[i] * max(ratio, 1 - eps)
        else:
            objective = ratio * advantages[i] - state.kl_coef * sum(q * np.log(q / p))
        error = (values[i] - returns[i]) ** 2
        if args.clip_vloss:
            held = min(max(values[i], old_values[i] - eps), old_values[i] + eps)
            error = max(error, (held - returns[i]) ** 2)
        sums["policy_loss"] -= objective
        sums["value_loss"] += error / 2
        sums["entropy"] -= sum(p * np.log(p))
        sums["old_approx_kl"] += -np.log(ratio)
        sums["approx_kl"] += ratio - 1 - np.log(ratio)
        sums["clipfrac"] += ratio > 1 + eps or ratio < 1 - eps
    figures = {name: total / len(actions) for name, total in sums.items()}
    loss = figures["policy_loss"] + args.vf_coef * figures["value_loss"] - state.ent_coef * figures["entropy"]
    return loss, figures


def loss_of(logits, values, batch, **changes):
    """Loss, figures by name, and the loss's gradient in the logits and in the values."""
    args = make_args(**changes)
    logits, values = logits.clone().requires_grad_(), values.clone().requires_grad_()
    loss, figures = ppo.ppo_loss(torch.log_softmax(logits, -1), values, batch, make_state(args), args)
    loss.backward()
    return loss.item(), dict(zip(ppo.FIGURES, figures.tolist(), strict=True)), logits.grad, values.grad


@pytest.mark.parametrize("surrogate", ["clip", "kl-penalty"])
@pytest.mark.parametrize("clip_vloss", [False, True])
@pytest.mark.parametrize("norm_adv", [False, True])
def test_loss_and_figures_match_numpy(surrogate, clip_vloss, norm_adv):
    """Loss and all figures equal the row-by-row reference, the gradient its central differences."""
    changes = {"surrogate": surrogate, "clip_vloss": clip_vloss, "norm_adv": norm_adv}
    changes |= {"kl_coef": 1.7, "ent_coef": 0.3, "vf_coef": 0.8, "clip_coef": 0.15}
    args = make_args(**changes)
    state = make_state(args)
    for seed in range(3):
        logits, values, batch = random_batch(seed)
        loss, figures, logits_grad, values_grad = loss_of(logits, values, batch, **changes)
        expected, expected_figures = reference_loss(logits, values, batch, state, args)
        assert loss == pytest.approx(expected, rel=1e-9)
        assert figures == pytest.approx(expected_figures, rel=1e-9, abs=1e-12)
        assert 0 < figures["clipfrac"] < 1
        for variable, gradient in ((logits, logits_grad), (values, values_grad)):
            for index in np.ndindex(*variable.shape):
                losses = []
                for change in (1e-6, -1e-6):
                    moved = variable.clone()
                    moved[index] += change
                    inputs = (moved, values) if variable is logits else (logits, moved)
                    losses.append(reference_loss(*inputs, batch, state, args)[0])
                assert gradient[index].item() == pytest.approx((losses[0] - losses[1]) / 2e-6, abs=1e-7)


def test_figures_are_named_as_expected():
    """The names that dashboards rely on, in the order in which `ppo_loss` gives them."""
    assert ppo.FIGURES == ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "gradient"),
    [  # gradient: of the loss in the ratio
        (+1, 0.5, -0.5, -1),
        (+1, 1.1, -1.1, -1),
        (+1, 1.5, -1.2, 0),  # good, and likely enough already
        (-1, 0.5, 0.8, 0),  # bad, and unlikely enough already
        (-1, 0.9, 0.9, 1),
        (-1, 1.5, 1.5, 1),
    ],
)
def test_clipped_objective_by_hand(advantage, ratio, loss, gradient):
    """ε = 0.2: value and gradient of -min(r A, clip(r) A) below, within and above the clip range."""
    old, new = (torch.tensor([[p, 1 - p]]).double().log() for p in (0.4, 0.4 * ratio))
    zero = torch.zeros(1, dtype=torch.float64)
    batch = ppo.Batch(zero, torch.tensor([0]), old, old[:, 0], zero, zero + advantage, zero)
    args = make_args(norm_adv=False, ent_coef=0.0, vf_coef=0.0, clip_coef=0.2)
    policy = new.clone().requires_grad_()
    result, _ = ppo.ppo_loss(policy, zero, batch, make_state(args), args)
    result.backward()
    assert result.item() == pytest.approx(loss)
    assert policy.grad[0, 0].item() == pytest.approx(gradient * ratio)  # ∂r/∂log π = r
    assert policy.grad[0, 1].item() == 0


@pytest.mark.parametrize(
    ("clip_vloss", "value", "target", "loss", "gradient"),
    [  # the old value is 1, ε is 0.2
        (False, 2.0, 3.0, 0.5, -1.0),
        (False, 2.0, 1.5, 0.125, 0.5),
        (True, 1.1, 3.0, 0.5 * 1.9**2, -1.9),  # within ±ε: as without
        (True, 2.0, 3.0, 0.5 * 1.8**2, 0.0),  # went far to the target: the held value's loss is larger
        (True, 2.0, 1.0, 0.5, 1.0),  # went far beyond the target: the loss without holding is larger
        (True, 0.0, -1.0, 0.5 * 1.8**2, 0.0),  # the same downwards
        (True, 0.0, 1.0, 0.5, -1.0),
    ],
)
def test_value_loss_by_hand(clip_vloss, value, target, loss, gradient):
    """½ (V - R)², or the larger of it and the same with V held within ±ε of the old value; with gradient."""
    logits, _, batch = random_batch(0, rows=1)
    one = torch.ones(1, dtype=torch.float64)
    batch = batch._replace(values=one, returns=target * one, advantages=0 * one)
    changes = {"clip_vloss": clip_vloss, "ent_coef": 0.0, "vf_coef": 0.25, "clip_coef": 0.2}
    result, figures, _, values_grad = loss_of(logits, value * one, batch, **changes)
    assert figures["value_loss"] == pytest.approx(loss)
    assert result == pytest.approx(0.25 * loss)
    assert values_grad.item() == pytest.approx(0.25 * gradient)


def test_entropy_bonus_raises_the_entropy():
    """The bonus lowers the loss by ent_coef · H, and a step down its gradient raises the entropy."""
    logits, values, batch = random_batch(1)
    batch = batch._replace(advantages=torch.zeros_like(batch.advantages))
    loss, figures, gradient, _ = loss_of(logits, values, batch, vf_coef=0.0, ent_coef=0.7)
    before = Categorical(logits=logits).entropy().mean().item()
    assert figures["entropy"] == pytest.approx(before)
    assert loss == pytest.approx(-0.7 * before)
    assert Categorical(logits=logits - 0.1 * gradient).entropy().mean().item() > before + 1e-4


def test_kl_penalty_is_exact_and_from_the_old_policy():
    """With no advantage, the penalised objective is β KL(old ‖ new), as `torch.distributions` has it."""
    logits, values, batch = random_batch(2)
    batch = batch._replace(advantages=torch.zeros_like(batch.advantages))
    changes = {"surrogate": "kl-penalty", "kl_coef": 3.0, "vf_coef": 0.0, "ent_coef": 0.0}
    loss, figures, _, _ = loss_of(logits, values, batch, **changes)
    old, new = Categorical(logits=batch.policy), Categorical(logits=logits)
    expected = 3 * torch.distributions.kl_divergence(old, new).mean().item()
    assert loss == figures["policy_loss"] == pytest.approx(expected)


@FAST
@given(seed=SEEDS, scale=st.floats(0.01, 100), shift=st.floats(-100, 100))
def test_norm_adv_forgets_scale_and_offset(seed, scale, shift):
    """With norm_adv, advantages count in units of their own standard deviation, from their own mean."""
    logits, values, batch = random_batch(seed)
    moved = batch._replace(advantages=scale * batch.advantages + shift)
    loss, _, gradient, _ = loss_of(logits, values, batch)
    moved_loss, _, moved_gradient, _ = loss_of(logits, values, moved)
    assert moved_loss == pytest.approx(loss, abs=1e-5)
    torch.testing.assert_close(moved_gradient, gradient, rtol=1e-4, atol=1e-5)
    raw, raw_moved = (loss_of(logits, values, x, norm_adv=False)[0] for x in (batch, moved))
    assert abs(raw - raw_moved) > 1e-6 or (abs(scale - 1) < 0.1 and abs(shift) < 0.1)


def test_norm_adv_at_the_edges():
    """One row is not normalised, for it has no deviation; two are; equal advantages become 0, not NaN."""
    logits, values, batch = random_batch(3, rows=1)
    loss, figures, gradient, _ = loss_of(logits, values, batch)
    raw_loss, raw_figures, raw_gradient, _ = loss_of(logits, values, batch, norm_adv=False)
    assert (loss, figures, gradient.tolist()) == (raw_loss, raw_figures, raw_gradient.tolist())
    assert gradient.abs().max() > 0
    logits, values, batch = random_batch(3, rows=2)
    args = make_args()
    expected, _ = reference_loss(logits, values, batch, make_state(args), args)
    assert loss_of(logits, values, batch)[0] == pytest.approx(expected)
    logits, values, batch = random_batch(3, rows=5)
    equal = batch._replace(advantages=torch.full_like(batch.advantages, 2.0))
    loss, figures, gradient, _ = loss_of(logits, values, equal, ent_coef=0.0)
    assert figures["policy_loss"] == 0
    assert gradient.abs().max() == 0
    assert math.isfinite(loss)


def test_loss_reads_its_coefficients_from_state():
    """ε, β and the entropy coefficient are the state's, which schedules move, not the settings'."""
    logits, values, batch = random_batch(4)
    for surrogate in ("clip", "kl-penalty"):
        args = make_args(surrogate=surrogate, clip_vloss=True, clip_coef=0.9)
        state = ppo.State(1.0, clip_coef=0.05, kl_coef=7.0, ent_coef=0.5)
        loss, figures = ppo.ppo_loss(torch.log_softmax(logits, -1), values, batch, state, args)
        expected, expected_figures = reference_loss(logits, values, batch, state, args)
        assert loss.item() == pytest.approx(expected)
        assert figures.tolist() == pytest.approx(list(expected_figures.values()))
        _, settings_figures = reference_loss(logits, values, batch, make_state(args), args)
        assert expected_figures["clipfrac"] > settings_figures["clipfrac"]


def test_figures_carry_no_gradient():
    """Figures hold no computation graph, which would keep each minibatch's memory until the end."""
    logits, values, batch = random_batch(5)
    args = make_args()
    policy = torch.log_softmax(logits.requires_grad_(), -1)
    loss, figures = ppo.ppo_loss(policy, values.requires_grad_(), batch, make_state(args), args)
    assert loss.requires_grad
    assert loss.shape == ()
    assert not figures.requires_grad


# Special cases


@pytest.mark.parametrize("surrogate", ["clip", "kl-penalty"])
def test_gradient_at_the_old_policy_is_the_policy_gradient(surrogate):
    """Where new and old policy agree, PPO's gradient is A2C's: of -(log π(a|s) A).mean() and the rest."""
    args = make_args(norm_adv=False, surrogate=surrogate, clip_vloss=True)
    agent = make_agent(args)
    obs, actions = torch.randn(20, D), torch.randint(A, (20,))
    advantages, returns = torch.randn(2, 20)
    policy, values = agent.policy(obs), agent.value(obs)
    log_probs = policy[torch.arange(20), actions]
    batch = ppo.Batch(obs, actions, policy.detach(), log_probs.detach(), values.detach(), advantages, returns)
    loss, _ = ppo.ppo_loss(policy, values, batch, make_state(args), args)
    gradients = torch.autograd.grad(loss, [*agent.parameters()])
    distribution = Categorical(logits=agent.actor(obs))
    a2c = -(distribution.log_prob(actions) * advantages).mean()
    a2c = a2c + args.vf_coef * 0.5 * torch.nn.functional.mse_loss(agent.value(obs), returns)
    a2c = a2c - args.ent_coef * distribution.entropy().mean()
    for gradient, expected in zip(gradients, torch.autograd.grad(a2c, [*agent.parameters()]), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


def test_one_epoch_of_one_minibatch_is_a_step_of_a2c():
    """An update with K = M = 1 and plain gradient descent moves the weights by -lr times A2C's gradient."""
    args = make_args(
        update_epochs=1, num_minibatches=1, norm_adv=False, max_grad_norm=1e6, norm_rewards=False
    )
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    reference, obs, rows = copy.deepcopy(agent), agent.normalize(rollout.obs), rollout.valid
    figures = learn(agent, rollout, args, optimizer=SGD([ppo.flatten_parameters(agent)], 99.0))

    values = float64(reference.value(obs))
    ends = rollout.terminated.numpy(), rollout.truncated.numpy()
    brute = brute_force_gae(float64(rollout.rewards), values, *ends, args.gamma, args.gae_lambda)
    advantages, returns = torch.from_numpy(brute).float(), torch.from_numpy(brute + values[:-1]).float()
    distribution = Categorical(logits=reference.actor(obs[:-1]))
    policy_loss = -(distribution.log_prob(rollout.actions) * advantages)[rows].mean()
    value_loss = (0.5 * (reference.value(obs[:-1]) - returns) ** 2)[rows].mean()
    entropy = distribution.entropy()[rows].mean()
    (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in reference.parameters()])
    torch.testing.assert_close(weights(agent), weights(reference) - args.learning_rate * gradient)
    assert figures["losses/grad_norm"] == pytest.approx(gradient.norm().item(), rel=1e-4)
    assert figures["losses/policy_loss"] == pytest.approx(-advantages[rows].mean().item(), rel=1e-4)
    assert figures["losses/value_loss"] == pytest.approx(value_loss.item(), rel=1e-4)
    assert figures["losses/entropy"] == pytest.approx(entropy.item(), rel=1e-4)
    assert [figures[f"losses/{name}"] for name in ("approx_kl", "clipfrac")] == pytest.approx(
        [0, 0], abs=1e-6
    )


# update, against Stable-Baselines3


class SpacesOnly(gym.Env):
    """What Stable-Baselines3 must see to build its networks."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (D,), np.float32)
    action_space = gym.spaces.Discrete(A)


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
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh},
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    with torch.no_grad():
        for ours, theirs in layer_pairs(agent, model.policy):
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)
        mean, var = agent.obs_moments.mean, agent.obs_moments.var
        obs = ((rollout.obs - mean) / var.sqrt()).clamp(-10, 10)
        flat, actions = obs[:-1].flatten(0, 1), rollout.actions.flatten()
        old_values, log_probs, _ = model.policy.evaluate_actions(flat, actions)
        values = model.policy.predict_values(obs.flatten(0, 1)).reshape(obs.shape[:2])
    rewards = brute_force_rewards(agent, rollout, args.gamma)
    ends = rollout.terminated.numpy(), rollout.truncated.numpy()
    advantages = brute_force_gae(rewards, float64(values), *ends, args.gamma, args.gae_lambda).flatten()
    buffer, valid = model.rollout_buffer, rollout.valid.flatten().numpy()
    buffer.observations[:, 0], buffer.actions[:, 0, 0] = flat.numpy()[valid], actions.numpy()[valid]
    buffer.values[:, 0], buffer.log_probs[:, 0] = old_values[valid, 0].numpy(), log_probs.numpy()[valid]
    buffer.advantages[:, 0] = advantages[valid]
    buffer.returns[:, 0] = buffer.advantages[:, 0] + buffer.values[:, 0]
    buffer.full = True
    return model


@pytest.mark.parametrize(
    ("changes", "minibatches"),
    [
        ({}, 1),
        ({"norm_adv": False, "max_grad_norm": 100.0, "ent_coef": 0.1}, 1),
        ({"max_grad_norm": 0.1, "vf_coef": 2.0}, 4),
        ({"clip_coef": 0.05, "norm_adv": False}, 8),
    ],
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
    model, before = make_sb3(agent, rollout, args), weights(agent)
    figures = learn(agent, rollout, args)
    model.train()
    assert next(ours, None) is next(theirs, None) is None  # both have used all orders
    assert (weights(agent) - before).abs().max() > 1e-2
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


# RunningMoments, scale_rewards, normalize


@FAST
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=8),
    offset=st.floats(-1e3, 1e3),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
    seed=SEEDS,
)
def test_running_moments_are_those_of_all_rows(sizes, offset, scale, seed):
    """Batches of any sizes merge to the mean and the population variance of all rows at once."""
    rng = np.random.default_rng(seed)
    batches = [(offset + scale * rng.normal(size=(size, 2))).astype(np.float32) for size in sizes]
    moments = ppo.RunningMoments(2)
    for batch in batches:
        moments.update(torch.from_numpy(batch))
    rows = np.concatenate(batches).astype(np.float64)
    error = 1e-6 * (abs(offset) + scale)  # float32 resolves no more
    np.testing.assert_allclose(moments.mean, rows.mean(0), rtol=0, atol=3 * error)
    np.testing.assert_allclose(moments.var, rows.var(0), rtol=1e-4, atol=20 * error * scale + error**2)
    assert moments.count == len(rows)


def test_running_moments_by_hand():
    """Means far apart: the variance has the part between the batches, not only that within."""
    moments = ppo.RunningMoments(1)
    for batch in ([[0.0], [2.0]], [[10.0]], [[4.0], [4.0], [4.0]]):
        moments.update(torch.tensor(batch))
    assert moments.mean.item() == pytest.approx(4.0)
    assert moments.var.item() == pytest.approx((16 + 4 + 36) / 6)
    assert not moments.mean.requires_grad


def rewards_case(seed, gamma, rollouts=2, steps=8, envs=3, heavy=False):
    """A stream of rows cut into rollouts, and the discounted return at each row, summed for itself."""
    args = make_args(num_steps=steps, num_envs=envs, gamma=gamma)
    rng = np.random.default_rng(seed)
    terminated, truncated, valid = random_ends(rng, rollouts * steps, envs, 0.25)
    rewards = (0.5 + rng.normal(size=valid.shape)).astype(np.float32) * valid
    if heavy:
        rewards[rewards.argmax() // envs] *= 300
    discounted = np.zeros(valid.shape)
    for t, n in np.argwhere(valid):
        start = max((k + 1 for k in range(t) if not valid[k, n]), default=0)
        discounted[t, n] = sum(gamma ** (t - k) * float(rewards[k, n]) for k in range(start, t + 1))
    rollout = ppo.Rollout(args, D)
    for i in range(rollouts):
        part = slice(i * steps, (i + 1) * steps)
        rollout.rewards.copy_(torch.from_numpy(rewards[part]))
        for name, values in (("terminated", terminated), ("truncated", truncated), ("valid", valid)):
            getattr(rollout, name).copy_(torch.from_numpy(values[part]))
        upto = discounted[: part.stop][valid[: part.stop]]
        yield args, rollout, upto, rewards[part]


@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("seed", range(4))
def test_scale_rewards_matches_brute_force(seed, gamma):
    """Rewards over the deviation of all discounted returns so far; episodes go on across rollouts."""
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), gym.spaces.Discrete(A))
    for args, rollout, seen, rewards in rewards_case(seed, gamma):
        scaled = ppo.scale_rewards(agent, rollout, args.gamma)
        np.testing.assert_allclose(float64(scaled), rewards / np.sqrt(seen.var() + 1e-8), rtol=1e-4)
        assert agent.return_moments.mean.item() == pytest.approx(seen.mean(), rel=1e-4, abs=1e-5)
        assert agent.return_moments.var.item() == pytest.approx(seen.var(), rel=1e-4)
        assert agent.return_moments.count == len(seen)


def test_scale_rewards_clips_at_10():
    """Scaled rewards are held within ±10, also negative ones; others stay in proportion."""
    for sign in (1, -1):
        agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), gym.spaces.Discrete(A))
        *_, (args, rollout, seen, rewards) = rewards_case(0, 0.0, rollouts=1, steps=300, heavy=True)
        rollout.rewards.mul_(sign)
        scaled = float64(ppo.scale_rewards(agent, rollout, args.gamma))
        expected = sign * rewards / np.sqrt(seen.var() + 1e-8)
        assert np.abs(expected).max() > 12
        assert np.abs(scaled).max() == 10
        np.testing.assert_allclose(scaled, np.clip(expected, -10, 10), rtol=1e-4)


def test_scale_rewards_without_any_reward():
    """Where all rewards are 0, the scaled ones are 0 and not NaN."""
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), gym.spaces.Discrete(A))
    rollout = ppo.Rollout(make_args(), D)
    rollout.valid[:] = True
    assert ppo.scale_rewards(agent, rollout, 0.99).abs().max() == 0


def test_scale_rewards_ignores_rewards_of_filler_rows():
    """A reward in a filler row, which belongs to no transition, changes no valid row and no statistic."""
    results = []
    for garbage in (0.0, 123.0):
        agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), gym.spaces.Discrete(A))
        for args, rollout, _, _ in rewards_case(1, 0.9):
            rollout.rewards[~rollout.valid] = garbage
            scaled = ppo.scale_rewards(agent, rollout, args.gamma)[rollout.valid]
            results.append([*scaled.tolist(), agent.return_moments.var.item()])
    half = len(results) // 2
    assert results[:half] == results[half:]


def test_normalize_matches_numpy():
    """(x - mean) / std within ±10 for quantities; entries of one-hot parts are left as they are."""
    one_hot = np.array([False, True, False])
    agent = make_agent(make_args(), one_hot=one_hot)
    obs = torch.tensor([[0.0, 1.0, 0.5], [3.0, 0.0, -2.0], [1e4, 50.0, -1e4]])
    mean, var = float64(agent.obs_moments.mean), float64(agent.obs_moments.var)
    assert np.abs(mean).min() > 0.05
    assert np.abs(var - 1).min() > 0.5
    expected = np.clip((float64(obs) - mean) / np.sqrt(var), -10, 10)
    expected[:, 1] = obs[:, 1]
    np.testing.assert_allclose(agent.normalize(obs).numpy(), expected, rtol=1e-5)
    assert agent.normalize(obs[None]).shape == (1, 3, D)
    assert agent.normalize(obs)[2].tolist() == [10, 50, -10]


def test_normalize_of_a_constant_is_finite():
    """An entry that never changes has variance 0: at its value it is 0, and nowhere is it infinite."""
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), gym.spaces.Discrete(A))
    agent.obs_moments.update(torch.ones(5, D))
    assert agent.normalize(torch.ones(D)).tolist() == [0, 0, 0]
    assert agent.normalize(torch.full((D,), 2.0)).tolist() == [10, 10, 10]


def test_without_norm_obs_nothing_is_normalised():
    """With norm_obs off, networks see raw observations, and the statistics are left alone."""
    args = make_args(norm_obs=False)
    agent = make_agent(args)
    obs = 1e3 * torch.randn(4, D)
    assert torch.equal(agent.normalize(obs), obs)
    before = copy.deepcopy(agent.obs_moments.state_dict())
    learn(agent, make_rollout(args, agent), args)
    assert all(torch.equal(value, before[name]) for name, value in agent.obs_moments.state_dict().items())


# adapt, adjust_coefficients


@FAST
@given(
    value=st.floats(0.02, 5), factor=st.sampled_from([2.0, 0.5, 1 / 1.5]), measured=st.floats(0, 1, width=32)
)
def test_adapt_moves_only_outside_the_band(value, factor, measured):
    """Times the factor above the band, divided by it below, as it is within, and never out of bounds."""
    result = ppo.adapt(value, factor, (0.1, 3.0), measured, 0.25, 0.5)
    moved = value * factor if measured > 0.5 else value / factor if measured < 0.25 else value
    assert result == pytest.approx(sorted((0.1, moved, 3.0))[1])


def test_adapt_at_the_edges_of_the_band():
    """Both edges belong to the band; both bounds hold; inside the bounds, doubling and halving are exact."""
    for measured, expected in ((0.25, 1.0), (0.5, 1.0), (0.501, 2.0), (0.249, 0.5)):
        assert ppo.adapt(1.0, 2.0, (0.1, 3.0), measured, 0.25, 0.5) == expected
    assert ppo.adapt(2.0, 2.0, (0.1, 3.0), 1.0, 0.25, 0.5) == 3.0
    assert ppo.adapt(0.15, 2.0, (0.1, 3.0), 0.0, 0.25, 0.5) == 0.1


@pytest.mark.parametrize(
    ("adapt", "name", "when_high", "bounds"),
    [
        ("kl-coef", "kl_coef", 2.0, (1e-4, 1e4)),
        ("clip-coef", "clip_coef", 0.5, (0.01, 0.3)),
        ("learning-rate", "learning_rate", 1 / 1.5, (1e-5, 1e-2)),
    ],
)
def test_adapt_choices(adapt, name, when_high, bounds):
    """Each choice moves its coefficient against the KL, 1.5 times off the set point, within its bounds."""
    surrogate = "kl-penalty" if adapt == "kl-coef" else "clip"
    changes = {"anneal_lr": False, "learning_rate": 1e-2, "surrogate": surrogate, "ent_coef": 0.0}
    args = make_args(adapt=adapt, desired_kl=0.02, **changes)
    for kl, factor in ((0.0301, when_high), (0.0299, 1), (0.0134, 1), (0.0133, 1 / when_high)):
        state = make_state(args)
        if adapt == "learning-rate":
            state.learning_rate = 1e-3  # for --learning-rate is the most that it may be
        expected = {key: getattr(state, key) for key in ("learning_rate", "clip_coef", "kl_coef")}
        expected[name] = min(expected[name] * factor, bounds[1])
        ppo.adjust_coefficients(state, args, {"losses/kl": kl})
        assert {key: getattr(state, key) for key in expected} == pytest.approx(expected, rel=1e-12)
    for kl in (0.0, 1.0):  # for ever too low, or too high
        for _ in range(60):
            ppo.adjust_coefficients(state, args, {"losses/kl": kl})
        assert getattr(state, name) == bounds[(when_high > 1) == (kl > 0.5)]


def test_nothing_adapts_before_the_first_iteration():
    """Without figures yet, coefficients are the settings'; without --adapt, the KL moves nothing."""
    for adapt in ("clip-coef", "learning-rate", "none"):
        args = make_args(adapt=adapt, desired_kl=0.02, target_entropy=1.0)
        state = make_state(args)
        ppo.adjust_coefficients(state, args, {})
        assert state == make_state(args)
    args = make_args(adapt="none", anneal_lr=False)
    state = make_state(args)
    ppo.adjust_coefficients(state, args, {"losses/kl": 5.0, "losses/entropy": 0.1})
    assert state == make_state(args)


def test_annealing_is_linear_in_the_steps_left():
    """Learning rate and entropy coefficient are those of the start times the share left, each if asked to."""
    for anneal_lr, anneal_ent_coef in ((False, False), (True, False), (False, True), (True, True)):
        args = make_args(total_timesteps=1000, anneal_lr=anneal_lr, anneal_ent_coef=anneal_ent_coef)
        state = make_state(args)
        for step, left in ((0, 1.0), (250, 0.75), (900, 0.1), (1000, 0.0)):
            state.global_step = step
            ppo.adjust_coefficients(state, args, {"losses/kl": 9.0, "losses/entropy": 0.0})
            assert state.learning_rate == pytest.approx(args.learning_rate * (left if anneal_lr else 1))
            assert state.ent_coef == pytest.approx(args.ent_coef * (left if anneal_ent_coef else 1))
            assert (state.clip_coef, state.kl_coef) == (args.clip_coef, args.kl_coef)


@pytest.mark.parametrize("anneal_lr", [False, True])
def test_adaptive_learning_rate_stays_below_the_scheduled(anneal_lr):
    """--adapt learning-rate goes on from its last value, up to the rate that there would be without it."""
    args = make_args(
        adapt="learning-rate", desired_kl=0.01, total_timesteps=100, learning_rate=0.004, anneal_lr=anneal_lr
    )
    most = 0.001 if anneal_lr else 0.004
    for last, kl, expected in ((0.0005, 0.01, 0.0005), (0.0005, 0.001, 0.00075), (0.009, 0.01, most)):
        state = make_state(args)
        state.global_step, state.learning_rate = 75, last
        ppo.adjust_coefficients(state, args, {"losses/kl": kl})
        assert state.learning_rate == pytest.approx(expected)
    for _ in range(20):  # for ever too low a KL
        ppo.adjust_coefficients(state, args, {"losses/kl": 0.0})
    assert state.learning_rate == pytest.approx(most)


def test_target_entropy():
    """The bonus rises by a tenth below the band, falls above it, stays within it, and is never 0."""
    args = make_args(target_entropy=1.0, entropy_tolerance=0.1, ent_coef=0.02, anneal_ent_coef=True)
    for measured, factor in ((0.89, 1.1), (0.91, 1), (1.09, 1), (1.11, 1 / 1.1)):
        state = make_state(args)
        state.global_step = 100_000
        ppo.adjust_coefficients(state, args, {"losses/kl": 0.0, "losses/entropy": measured})
        assert state.ent_coef == pytest.approx(0.02 * factor, rel=1e-12)
    for measured, bound in ((0.0, 10.0), (2.0, 1e-5)):
        for _ in range(200):
            ppo.adjust_coefficients(state, args, {"losses/kl": 0.0, "losses/entropy": measured})
        assert state.ent_coef == bound


# update


@pytest.mark.parametrize("norm_rewards", [False, True])
@pytest.mark.parametrize("changes", [{}, {"surrogate": "kl-penalty"}, {"recompute_advantages": True}])
def test_filler_rows_influence_nothing(norm_rewards, changes):
    """Other garbage in filler rows leaves weights, statistics and figures the same, bit for bit."""
    args = make_args(norm_rewards=norm_rewards, num_envs=16, target_kl=10.0, clip_vloss=True, **changes)
    results = []
    for garbage in (0.0, 1e3):
        agent = make_agent(args)
        rollout = make_rollout(args, agent, chance=0.4)
        filler = ~rollout.valid
        after_death = torch.zeros_like(filler)  # there, the last observation's value is not used either
        after_death[1:] = rollout.terminated[:-1]
        rollout.obs[:-1][after_death] = garbage
        rollout.actions[filler] = int(garbage > 0)
        rollout.rewards[filler] = 0 if norm_rewards else garbage  # `scale_rewards` has its own test
        rollout.acting_policy[filler[-1]] = -garbage
        assert 0 < filler[-1].sum() < args.num_envs
        assert 0 < after_death.sum() < filler.sum()
        figures = learn(agent, rollout, args)
        results.append((weights(agent), {**agent.state_dict()}, figures))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())
    assert results[0][2] == results[1][2]


def row_ids(batch, agent, rollout):
    """Which rows of the rollout a minibatch holds, by their observations."""
    ids = {tuple(row): i for i, row in enumerate(agent.normalize(rollout.obs[:-1]).flatten(0, 1).tolist())}
    return [ids[tuple(row)] for row in batch.obs.tolist()]


@pytest.mark.parametrize(
    ("steps", "envs", "minibatches"), [(12, 4, 2), (12, 4, 5), (8, 3, 12), (4, 1, 2), (3, 1, 1), (3, 2, 3)]
)
def test_minibatches_partition_the_valid_rows(recorder, steps, envs, minibatches):
    """Each epoch shows each valid row once, in parts that differ by at most one row and have two or more."""
    args = make_args(num_steps=steps, num_envs=envs, num_minibatches=minibatches, update_epochs=3)
    agent = make_agent(args)
    rollout = make_rollout(args, agent, seed=3, chance=0.3)
    agent_before = copy.deepcopy(agent)
    learn(agent, rollout, args)
    valid = rollout.valid.flatten().nonzero().squeeze(-1).tolist()
    parts = min(minibatches, len(valid) // 2)
    assert len(recorder.calls) == 3 * parts
    epochs = []
    for epoch in range(3):
        ids = [
            row_ids(x.batch, agent_before, rollout)
            for x in recorder.calls[epoch * parts : (epoch + 1) * parts]
        ]
        sizes = [len(part) for part in ids]
        assert min(sizes) >= 2
        assert max(sizes) - min(sizes) <= 1
        epochs.append([i for part in ids for i in part])
        assert sorted(epochs[-1]) == valid
    if len(valid) > 10:
        assert epochs[0] != epochs[1] != epochs[2] != valid != epochs[0]


def test_one_valid_row_is_enough():
    """A rollout of T = 2 may hold a single valid row: it trains, and loss and weights are finite."""
    args = make_args(num_steps=2, num_envs=1, num_minibatches=1)
    agent = make_agent(args)
    rollout = make_rollout(args, agent, chance=0.0)
    rollout.valid[0] = False
    before = weights(agent)
    figures = learn(agent, rollout, args)
    assert weights(agent).isfinite().all()
    assert not torch.equal(weights(agent), before)
    assert all(math.isfinite(figures[f"losses/{name}"]) for name in (*ppo.FIGURES, "grad_norm", "kl"))


@pytest.mark.parametrize("norm_rewards", [False, True])
@pytest.mark.parametrize("norm_obs", [False, True])
def test_batches_hold_what_the_old_networks_made(recorder, norm_rewards, norm_obs):
    """All fields of all rows, in all epochs, are those of the rollout and of the old networks."""
    args = make_args(norm_rewards=norm_rewards, norm_obs=norm_obs)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    old = copy.deepcopy(agent)
    distribution, values = networks(old, rollout.obs)
    rewards = brute_force_rewards(old, rollout, args.gamma) if norm_rewards else float64(rollout.rewards)
    ends = rollout.terminated.numpy(), rollout.truncated.numpy()
    advantages = brute_force_gae(rewards, values, *ends, args.gamma, args.gae_lambda)
    logits = distribution.logits[:-1]
    expected = {
        "actions": rollout.actions.numpy(),
        "policy": logits.numpy(),
        "log_probs": Categorical(logits=logits).log_prob(rollout.actions).numpy(),
        "values": values[:-1],
        "advantages": advantages,
        "returns": advantages + values[:-1],
    }
    learn(agent, rollout, args)
    assert len(recorder.calls) == args.update_epochs * args.num_minibatches
    for call in recorder.calls:
        ids = row_ids(call.batch, old, rollout)
        for name, all_rows in expected.items():
            rows = all_rows.reshape(-1, *all_rows.shape[2:])[ids]
            np.testing.assert_allclose(float64(getattr(call.batch, name)), rows, atol=1e-4, err_msg=name)
            assert not getattr(call.batch, name).requires_grad


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_advantages(recorder, monkeypatch, recompute):
    """Each epoch but the first has the advantages of the critic as it is then; all else stays the old."""
    args = make_args(
        recompute_advantages=recompute, num_minibatches=1, learning_rate=1e-2, norm_rewards=False
    )
    agent = recorder.agent = make_agent(args)
    rollout = make_rollout(args, agent)
    old = copy.deepcopy(agent)
    _, old_values = networks(old, rollout.obs)
    passes, original = [], ppo.compute_gae
    monkeypatch.setattr(ppo, "compute_gae", lambda *inputs: passes.append(1) or original(*inputs))
    learn(agent, rollout, args)
    assert len(passes) == (args.update_epochs if recompute else 1)
    ends = rollout.terminated.numpy(), rollout.truncated.numpy()
    changes = []
    for epoch, call in enumerate(recorder.calls):
        critic = copy.deepcopy(old)
        critic.load_state_dict(call.agent)
        values = networks(critic, rollout.obs)[1] if recompute and epoch else old_values
        advantages = brute_force_gae(float64(rollout.rewards), values, *ends, args.gamma, args.gae_lambda)
        ids = row_ids(call.batch, old, rollout)
        changes.append(np.abs(values - old_values).max())
        np.testing.assert_allclose(float64(call.batch.advantages), advantages.flatten()[ids], atol=1e-4)
        returns = (advantages + values[:-1]).flatten()[ids]
        np.testing.assert_allclose(float64(call.batch.returns), returns, atol=1e-4)
        np.testing.assert_allclose(float64(call.batch.values), old_values[:-1].flatten()[ids], atol=1e-4)
    assert (changes[1] > 0.01) == (changes[2] > changes[1]) == recompute
    assert len(changes) == 3


def test_target_kl_ends_the_passes_within_it():
    """The first pass that ends beyond the target is halved until it ends within; none follows it."""
    passes = []  # the weights after 0, 1, ... passes, and the KL that they have come to
    for epochs in range(7):
        args = make_args(update_epochs=max(epochs, 1))
        agent = make_agent(args)
        rollout = make_rollout(args, agent)
        old = copy.deepcopy(agent)
        figures = learn(agent, rollout, args) if epochs else {"losses/kl": 0.0}
        passes.append((weights(agent), figures["losses/kl"]))
    kls = [kl for _, kl in passes]
    assert kls[0] < kls[1] < kls[2] < kls[3]

    def kl_of(vector):
        """The mean KL of these weights from the old policy on the valid rows, in float64."""
        new = copy.deepcopy(old)
        torch.nn.utils.vector_to_parameters(vector, new.parameters())
        pair = (networks(x, rollout.obs[:-1])[0] for x in (old, new))
        return torch.distributions.kl_divergence(*pair)[rollout.valid].mean().item()

    halves = []
    for target, last in [(kls[1] / 2, 1), (kls[1] / 1000, 1), (kls[1] + 0.7 * (kls[2] - kls[1]), 2)]:
        (begin, _), (end, _) = passes[last - 1 : last + 1]
        half = next(n for n in range(1, 11) if kl_of(end.lerp(begin, 1 - 0.5**n)) <= target)
        halves.append(half)
        args = make_args(update_epochs=6, target_kl=target)
        agent = make_agent(args)
        # The figure is how far the passes went, so that --adapt sees what was too far.
        assert learn(agent, make_rollout(args, agent), args)["losses/kl"] == kls[last] > target
        assert kl_of(weights(agent)) <= target
        torch.testing.assert_close(weights(agent), end.lerp(begin, 1 - 0.5**half), rtol=0, atol=1e-6)
    assert len(set(halves)) > 1
    args = make_args(update_epochs=6, target_kl=10.0)  # never reached
    agent = make_agent(args)
    assert learn(agent, make_rollout(args, agent), args)["losses/kl"] == kls[6]
    assert torch.equal(weights(agent), passes[6][0])


def test_target_kl_that_nothing_can_meet_undoes_the_pass():
    """Where even the smallest part of a pass is too far, nothing of it is left."""
    args = make_args(update_epochs=3, target_kl=1e-12, learning_rate=1e-1)
    agent = make_agent(args)
    before = weights(agent)
    learn(agent, make_rollout(args, agent), args)
    assert torch.equal(weights(agent), before)


def test_kl_figure_is_the_exact_kl_on_valid_rows():
    """`kl` is the mean KL(old ‖ new) over the valid rows, of the policy before and after the update."""
    args = make_args(learning_rate=1e-2)
    agent = make_agent(args)
    rollout = make_rollout(args, agent, chance=0.4)
    old, new = copy.deepcopy(agent), agent
    figures = learn(agent, rollout, args)
    new = copy.deepcopy(agent)
    new.obs_moments.load_state_dict(old.obs_moments.state_dict())  # as they were in the update
    pair = (networks(x, rollout.obs[:-1])[0] for x in (old, new))
    kl = torch.distributions.kl_divergence(*pair)[rollout.valid].mean().item()
    assert kl > 1e-3
    assert figures["losses/kl"] == pytest.approx(kl, rel=1e-3)


def test_critic_figures():
    """1 - Var(R - V) / Var(R) and the relative error √(E[(R - V)²] / E[R²]) of valid rows, old critic."""
    args = make_args(norm_rewards=False)
    agent = make_agent(args)
    rollout = make_rollout(args, agent, chance=0.4)
    _, values = networks(agent, rollout.obs)
    ends, valid = (rollout.terminated.numpy(), rollout.truncated.numpy()), rollout.valid.numpy()
    advantages = brute_force_gae(float64(rollout.rewards), values, *ends, args.gamma, args.gae_lambda)[valid]
    returns = advantages + values[:-1][valid]
    expected = 1 - advantages.var() / returns.var()
    figures = learn(agent, rollout, args)
    assert figures["losses/explained_variance"] == pytest.approx(expected, rel=1e-4)
    expected = np.linalg.norm(advantages) / np.linalg.norm(returns)
    assert figures["losses/relative_error"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("steps", "minibatches", "calls"), [(12, 3, 9), (3, 6, 15)])  # 6 do not fit
def test_figures_are_means_over_all_minibatches(recorder, steps, minibatches, calls):
    """All epochs and minibatches, however many fit the rows, count the same in the means."""
    args = make_args(num_steps=steps, num_minibatches=minibatches)
    agent = make_agent(args)
    figures = learn(agent, make_rollout(args, agent), args)
    expected = torch.stack([call.figures for call in recorder.calls]).double().mean(0)
    assert len(recorder.calls) == calls
    assert expected[-1] > 0
    for name, value in zip(ppo.FIGURES, expected.tolist(), strict=True):
        assert figures[f"losses/{name}"] == pytest.approx(value, rel=1e-5, abs=1e-8)


def test_gradient_norm_is_logged_before_and_applied_after_clipping():
    """`grad_norm` is the norm before clipping; with plain descent, a step is lr times the norm allowed."""
    args = make_args(update_epochs=1, num_minibatches=1, max_grad_norm=1e6)
    agent = make_agent(args)
    before = weights(agent)
    unclipped = learn(
        agent, make_rollout(args, agent), args, optimizer=SGD([ppo.flatten_parameters(agent)], 99.0)
    )
    norm = ((weights(agent) - before).norm() / args.learning_rate).item()
    assert norm > 0.2
    assert unclipped["losses/grad_norm"] == pytest.approx(norm, rel=1e-3)
    args = replace(args, max_grad_norm=0.01)
    agent = make_agent(args)
    clipped = learn(
        agent, make_rollout(args, agent), args, optimizer=SGD([ppo.flatten_parameters(agent)], 99.0)
    )
    step = (weights(agent) - before).norm().item()
    assert clipped["losses/grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert step == pytest.approx(args.learning_rate * 0.01, rel=2e-2)


def test_steps_have_the_learning_rate_of_the_state():
    """The step size is the state's, which schedules move, not the settings' or the optimiser's own."""
    args = make_args(update_epochs=1, num_minibatches=1)
    changes = []
    for learning_rate in (args.learning_rate, args.learning_rate / 4):
        agent = make_agent(args)
        rollout, before, state = make_rollout(args, agent), weights(agent), make_state(args)
        state.learning_rate = learning_rate
        ppo.update(agent, SGD([ppo.flatten_parameters(agent)], 99.0), rollout, state, args)
        changes.append((weights(agent) - before).norm().item())
    assert changes[0] == pytest.approx(4 * changes[1], rel=1e-2)


def test_mean_gradient_norm(monkeypatch):
    """Over several steps, `grad_norm` is the mean of the norms before clipping."""
    norms, original = [], ppo.gradient

    def record(agent, batch, state, args):
        loss, _ = ppo.ppo_loss(agent.policy(batch.obs), agent.value(batch.obs), batch, state, args)
        parts = torch.autograd.grad(loss, list(agent.parameters()))
        norms.append(np.sqrt(sum((float64(part) ** 2).sum() for part in parts)))
        return original(agent, batch, state, args)

    monkeypatch.setattr(ppo, "gradient", record)
    args = make_args(num_minibatches=3)
    agent = make_agent(args)
    figures = learn(agent, make_rollout(args, agent), args)
    assert len(norms) == 9
    assert figures["losses/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-5)


def make_batch(args, agent):
    """The rows of a random rollout, as `update` makes a batch of them, with random values and returns."""
    rollout = make_rollout(args, agent)
    obs, actions = agent.normalize(rollout.obs[:-1]).flatten(0, 1), rollout.actions.flatten()
    with torch.no_grad():
        policy = torch.log_softmax(agent.actor(obs) + 0.2 * torch.randn(len(obs), A), -1)
    numbers = torch.randn(3, len(obs)).unbind()
    return ppo.Batch(obs, actions, policy, ppo.log_prob(policy, actions), *numbers)


@pytest.mark.parametrize("limit", [0.05, 100.0])
def test_gradient_is_that_of_backward_and_clip_grad_norm(limit):
    """The vector, its norm and the figures, against PyTorch's ordinary way to get them."""
    args = make_args(max_grad_norm=limit)
    agent, state = make_agent(args), make_state(args)
    batch = make_batch(args, agent)
    vector, norm, figures = ppo.gradient(agent, batch, state, args)
    loss, expected = ppo.ppo_loss(agent.policy(batch.obs), agent.value(batch.obs), batch, state, args)
    loss.backward()
    before = torch.nn.utils.clip_grad_norm_(agent.parameters(), limit)
    assert 0.1 < before < 10
    torch.testing.assert_close(norm, before)
    torch.testing.assert_close(figures, expected)
    torch.testing.assert_close(vector, torch.cat([x.grad.flatten() for x in agent.parameters()]))


def test_compiled_gradient():
    """--compile gives what eager gives, for any size and moving coefficients, without compiling each time."""
    args = make_args(max_grad_norm=0.3)
    agent, state = make_agent(args), make_state(args)
    whole = make_batch(args, agent)
    compiled = ppo.compiled(ppo.gradient)
    for size, state.ent_coef in ((40, 0.01), (39, 0.02), (17, 0.03), (2, 0.04)):
        batch = ppo.Batch(*(x[:size] for x in whole))
        with torch._dynamo.config.patch(error_on_recompile=size <= 17):
            ours = compiled(agent, batch, state, args)
        torch.testing.assert_close(ours, ppo.gradient(agent, batch, state, args), rtol=1e-4, atol=1e-6)


def test_compiled_update():
    """A whole update with --compile ends where one without ends."""
    args = make_args(update_epochs=2)
    figures, ends = [], []
    for compile_ in (False, True):
        agent = make_agent(args)
        figures.append(learn(agent, make_rollout(args, agent), replace(args, compile=compile_)))
        ends.append(weights(agent))
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-5)
    assert figures[0] == pytest.approx(figures[1], rel=1e-3, abs=1e-5)


def test_policy_mismatch_figure():
    """It is 0 for an honest rollout, and the largest error of a valid row's log policy for another."""
    args = make_args(num_envs=16)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    assert 0 < rollout.valid[-1].sum() < 16
    assert learn(copy.deepcopy(agent), rollout, args)["losses/policy_mismatch"] < 1e-5
    n = rollout.valid[-1].nonzero()[0].item()
    for error in (0.01, -0.01):
        rollout.acting_policy[n, 1] += error
        measured = learn(copy.deepcopy(agent), rollout, args)["losses/policy_mismatch"]
        assert measured == pytest.approx(0.01, rel=1e-2)
        rollout.acting_policy[n, 1] -= error
    rollout.acting_policy[~rollout.valid[-1]] += 5
    assert learn(copy.deepcopy(agent), rollout, args)["losses/policy_mismatch"] < 1e-5


def test_observation_statistics_change_only_at_the_end(recorder):
    """They are those of acting until the last minibatch, then take in the valid rows' raw observations."""
    args = make_args()
    agent = recorder.agent = make_agent(args)
    rollout = make_rollout(args, agent, chance=0.4)
    mean, var, count = (float64(getattr(agent.obs_moments, name)) for name in ("mean", "var", "count"))
    learn(agent, rollout, args)
    for call in recorder.calls:
        for name, value in (("mean", mean), ("var", var), ("count", count)):
            np.testing.assert_array_equal(float64(call.agent[f"obs_moments.{name}"]), value)
    rows = float64(rollout.obs[:-1][rollout.valid])
    total = count + len(rows)
    expected = (count * mean + rows.sum(0)) / total
    squares = (count * (var + mean**2) + (rows**2).sum(0)) / total
    assert agent.obs_moments.count == total
    np.testing.assert_allclose(float64(agent.obs_moments.mean), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(float64(agent.obs_moments.var), squares - expected**2, rtol=1e-4)


def test_return_statistics_change_only_with_norm_rewards():
    """The return's statistics take in each valid row once an update, and nothing without norm_rewards."""
    for norm_rewards in (False, True):
        args = make_args(norm_rewards=norm_rewards)
        agent = make_agent(args)
        rollout = make_rollout(args, agent)
        count = agent.return_moments.count.item()
        learn(agent, rollout, args)
        assert agent.return_moments.count.item() - count == norm_rewards * rollout.valid.sum()


def test_update_names_its_figures():
    """The tags that `update` returns, which dashboards and `diagnose` rely on."""
    args = make_args()
    agent = make_agent(args)
    names = *ppo.FIGURES, "grad_norm", "kl", "explained_variance", "relative_error", "policy_mismatch"
    figures = learn(agent, make_rollout(args, agent), args)
    assert list(figures) == [f"losses/{name}" for name in names]
    assert all(isinstance(value, float) for value in figures.values())


def test_update_improves_what_it_optimises():
    """After an update, good actions are likelier and bad ones less so, values nearer to their targets."""
    args = make_args(num_steps=32, num_envs=8, num_minibatches=1, learning_rate=1e-3, ent_coef=0.0)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    old = copy.deepcopy(agent)
    before, values = networks(old, rollout.obs)
    rewards = brute_force_rewards(old, rollout, args.gamma)
    ends, valid = (rollout.terminated.numpy(), rollout.truncated.numpy()), rollout.valid
    advantages = brute_force_gae(rewards, values, *ends, args.gamma, args.gae_lambda)
    learn(agent, rollout, args)
    agent.obs_moments.load_state_dict(old.obs_moments.state_dict())
    after, new_values = networks(agent, rollout.obs)
    change = [(x.logits[:-1].gather(-1, rollout.actions[..., None])[..., 0])[valid] for x in (before, after)]
    centred = advantages[valid] - advantages[valid].mean()
    assert ((change[1] - change[0]).numpy() * centred).mean() > 0
    targets = (advantages + values[:-1])[valid]
    assert np.square(new_values[:-1][valid] - targets).mean() < np.square(values[:-1][valid] - targets).mean()


# Initialisation


def test_initial_weights_are_orthogonal():
    """Gain √2 for hidden layers, 0.01 for the policy's last, 1 for the value's; biases 0 (Huang 2022)."""
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), gym.spaces.Discrete(A))
    layers = [*agent.actor, *agent.critic]
    gains = (math.sqrt(2), math.sqrt(2), 0.01, math.sqrt(2), math.sqrt(2), 1.0)
    shapes = [(64, D), (64, 64), (A, 64), (64, D), (64, 64), (1, 64)]
    assert [tuple(layer.weight.shape) for layer in layers] == shapes
    for layer, gain in zip(layers, gains, strict=True):
        w = float64(layer.weight)
        small = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        np.testing.assert_allclose(small, gain**2 * np.eye(len(small)), atol=1e-5 * gain**2)
        assert layer.bias.abs().max() == 0
    assert len([*agent.parameters()]) == 2 * len(layers)  # nothing else is learnt


def test_first_policy_is_nearly_uniform():
    """The small last gain makes a new agent's actions about equally likely."""
    agent = ppo.Agent(make_args(), np.zeros(D, dtype=bool), gym.spaces.Discrete(A))
    entropy = Categorical(logits=agent.policy(torch.randn(100, D))).entropy()
    assert entropy.min().item() == pytest.approx(math.log(A), abs=1e-3)


def test_training_uses_adam_with_epsilon_1e_5(monkeypatch, capsys):
    """The optimiser of `train` is Adam on all parameters, with ε = 1e-5 as in the original implementation."""
    made = []

    class Recording(Adam):
        def __init__(self, parameters, *args, **kwargs):
            super().__init__(parameters, *args, **kwargs)
            made.append(self)

    monkeypatch.setattr(ppo, "Adam", Recording)
    ppo.train(make_args(plan=True))
    (optimizer,) = made
    (group,) = optimizer.param_groups
    (vector,) = group["params"]
    sizes = (4 * 64 + 64) * 2 + (64 * 64 + 64) * 2 + (64 * 2 + 2) + (64 + 1)
    assert vector.numel() == sizes
    assert (group["eps"], group["lr"], group["betas"]) == (1e-5, 3e-3, (0.9, 0.999))
    assert (group["weight_decay"], group["amsgrad"]) == (0, False)


def test_flat_parameters_are_views():
    """The vector holds every parameter once; a step of Adam on it is a step of Adam on them."""
    args = make_args()
    ours, theirs = make_agent(args), make_agent(args)
    vector = ppo.flatten_parameters(ours)
    assert torch.equal(vector, torch.cat([parameter.flatten() for parameter in theirs.parameters()]))
    settings = {"lr": 0.01, "eps": 1e-5, "fused": True}
    optimizers = Adam([vector], **settings), Adam(theirs.parameters(), **settings)
    for _ in range(3):
        vector.grad = torch.randn_like(vector)
        torch.nn.utils.vector_to_parameters(
            vector.grad, gradients := [torch.zeros_like(x) for x in theirs.weights]
        )
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    for (name, own), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6, msg=name)
    vector.data.zero_()
    assert all((parameter == 0).all() for parameter in ours.parameters())
