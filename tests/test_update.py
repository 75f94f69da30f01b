"""The update of an iteration: batch, minibatches, gradient steps, metrics; plain PPO; `train`."""

import copy
import inspect
import math
import shlex
from dataclasses import replace
from functools import partial
from unittest import mock

import experiments
import gymnasium as gym
import numpy as np
import pytest
import torch
import tyro
from gymnasium import spaces
from helpers import (
    CONTINUOUS,
    DISCRETE,
    LSTM,
    D,
    RewardScale,
    checkpoint_in,
    curves,
    direct_gae,
    each_script,
    float64,
    load,
    memory_too,
    normalized,
    run,
    weights,
)
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch import nn
from torch.distributions import Categorical, Normal
from torch.optim import SGD, Adam


def reference(case, agent, rollout, args):
    """Compute the columns [B, ...] of a rollout's batch in NumPy and float64."""
    obs, policy = (compute(agent, rollout.obs, args.norm_obs) for compute in (normalized, case.policy))
    values, next_values = (case.values(agent, x, args.norm_obs) for x in (rollout.obs, rollout.next_obs))
    rewards, ends = rollout.rewards, (rollout.terminated, rollout.truncated)
    if args.norm_rewards:
        rewards = RewardScale(agent, rollout, args.gamma).scale(rewards, ends[0] | ends[1])
    advantages = direct_gae(rewards, values, *ends, args.gamma, args.gae_lambda, next_values)
    columns = obs, rollout.actions.numpy(), policy, values, advantages, advantages + values, rewards
    return [column.reshape(-1, *column.shape[2:]) for column in columns]


class Recorder:
    """A stand-in for `ppo_loss` that keeps the minibatches, the metrics and copies of the agent."""

    def __init__(self, loss):
        self.loss, self.batches, self.metrics, self.agents = loss, [], [], []

    def __call__(self, agent, minibatch, args, state):
        self.batches.append(minibatch)
        self.agents.append(copy.deepcopy(agent))
        loss, metrics = self.loss(agent, minibatch, args, state)
        self.metrics.append(metrics)
        return loss, metrics


def places(minibatch, batch):
    """Return the indices of a minibatch's transitions in the batch, found by their observations."""
    known = {tuple(obs): i for i, obs in enumerate(batch.obs.tolist())}
    return [known[tuple(obs)] for obs in minibatch.obs.tolist()]


@each_script
def test_learning_normalises_observations_as_acting_did(case):
    """Only then do the statistics change. They count each transition once, by its first observation.

    Before the first gradient step, the policy is the one that acted, up to rounding.
    """
    args = case.make_args(env_id=case.env_id, num_steps=9)
    envs, agent, rollout = case.begin(args)
    obs, returns, running = [], [], np.zeros(4)
    agent.obs_moments = case.script.RunningMoments(rollout.obs.shape[-1])
    agent.return_moments = case.script.RunningMoments(1)
    for _ in range(4):
        acting = copy.deepcopy(agent)
        case.script.collect_rollout(envs, agent, rollout, args)
        assert all(torch.equal(x, y) for x, y in zip(agent.buffers(), acting.buffers(), strict=True))
        expected = reference(case, acting, rollout, args)[0]
        batch = case.make_batch(agent, rollout, args)
        np.testing.assert_allclose(float64(batch.obs), expected, rtol=1e-4, atol=1e-4)
        metrics = case.update(agent, batch, args)
        assert abs(metrics["first_approx_kl"]) < 1e-6 < 1e-4 < metrics["kl"]
        for t, n in np.ndindex(*rollout.rewards.shape):
            obs.append(rollout.obs[t, n].copy())
            running[n] = args.gamma * running[n] + rollout.rewards[t, n]
            returns.append([running[n]])
            if rollout.terminated[t, n] or rollout.truncated[t, n]:
                running[n] = 0.0
        for moments, data in ((agent.obs_moments, obs), (agent.return_moments, returns)):
            data = np.array(data, np.float64)
            np.testing.assert_allclose(moments.mean, data.mean(0), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(moments.var, data.var(0), rtol=1e-3, atol=1e-4)
            assert moments.count == len(data)
    envs.close()


# update


@each_script
def test_each_epoch_splits_all_transitions_into_minibatches_of_nearly_equal_size(case):
    """Each epoch has another order. Sizes differ by one at most."""
    minibatches = 5
    args = case.make_args(num_minibatches=minibatches)
    agent = case.make_agent(args)
    rollout = case.make_rollout(args, agent, seed=3, chance=0.3)
    batch = case.make_batch(agent, rollout, args)
    recorder = Recorder(case.script.ppo_loss)
    case.update(agent, batch, args, loss=recorder)
    size = len(batch.obs)
    assert len(recorder.batches) == 3 * minibatches
    epochs = []
    for epoch in range(3):
        order = []
        for minibatch in recorder.batches[epoch * minibatches : (epoch + 1) * minibatches]:
            where = places(minibatch, batch)
            assert len(where) in (size // minibatches, math.ceil(size / minibatches))
            order += where
        assert sorted(order) == list(range(size))
        epochs.append(order)
    assert sorted(epochs[0]) != epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])


def layer_pairs(agent, policy):
    """Pair our layers with those of Stable-Baselines3's policy."""
    extractor = policy.mlp_extractor
    theirs = [*extractor.policy_net, policy.action_net, *extractor.value_net, policy.value_net]
    ours, theirs = ([x for x in layers if hasattr(x, "weight")] for layers in (agent.modules(), theirs))
    return zip(ours, theirs, strict=True)


def make_sb3(case, agent, args):
    """Make Stable-Baselines3's PPO with our weights."""
    env = gym.Env()  # of which it must see the spaces
    env.observation_space = spaces.Box(-np.inf, np.inf, (D,), np.float32)
    env.action_space = spaces.Discrete(4) if case is DISCRETE else spaces.Box(-1, 1, (2,))
    policy = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    policy["activation_fn"] = nn.ELU if getattr(args, "activation", "tanh") == "elu" else nn.Tanh
    policy["optimizer_kwargs"] = {"eps": 1e-5}
    model = PPO(
        "MlpPolicy",
        env,
        learning_rate=args.learning_rate,
        n_epochs=args.update_epochs,
        clip_range=args.clip_coef,
        normalize_advantage=args.norm_adv,
        ent_coef=args.ent_coef,
        vf_coef=args.vf_coef / 2,  # its value loss has no ½
        max_grad_norm=args.max_grad_norm,
        policy_kwargs=policy,
        device="cpu",
    )
    model.set_logger(Logger(None, []))
    with torch.no_grad():
        if case is CONTINUOUS:
            model.policy.log_std.copy_(agent.log_std)
        for ours, theirs in layer_pairs(agent, model.policy):
            theirs.weight.copy_(ours.weight)
            theirs.bias.copy_(ours.bias)
    return model


@each_script
@pytest.mark.parametrize(
    ("minibatches", "changes"),
    [
        (1, {}),
        (2, {"norm_adv": False, "max_grad_norm": 100.0, "ent_coef": 0.1, "norm_obs": False}),
        (4, {"max_grad_norm": 0.1, "vf_coef": 2.0, "norm_rewards": False}),
        (8, {"clip_coef": 0.05, "norm_adv": False}),
        (4, {"activation": "tanh"}),
    ],
)
def test_an_update_gives_the_weights_and_metrics_of_stable_baselines3(case, minibatches, changes):
    """Both learn from the same minibatches of the same rollout."""
    if case is DISCRETE:
        changes = {name: value for name, value in changes.items() if name != "activation"}  # always tanh
    args = case.make_args(update_epochs=6, num_minibatches=minibatches, **changes)
    agent = case.make_agent(args)
    rollout = case.make_rollout(args, agent)
    columns, model = reference(case, agent, rollout, args), make_sb3(case, agent, args)
    obs, actions, policy, values, advantages, returns, _ = map(torch.from_numpy, columns)
    log_probs = case.distribution(policy).log_prob(actions)
    theirs = obs, actions.reshape(len(obs), -1), values, log_probs, advantages, returns
    batch = case.make_batch(agent, rollout, args)
    for name, column, wanted in zip(batch._fields, batch, columns, strict=True):
        np.testing.assert_allclose(float64(column), wanted, atol=1e-4, err_msg=name)
    recorder, before = Recorder(case.script.ppo_loss), weights(agent)
    metrics = case.update(agent, batch, args, loss=recorder)
    minibatches = []
    for minibatch in recorder.batches:
        where = places(minibatch, batch)
        minibatches.append(RolloutBufferSamples(*(column[where].float() for column in theirs)))
    epochs = iter(np.array_split(np.arange(len(minibatches)), args.update_epochs))
    model.rollout_buffer.get = lambda batch_size: (minibatches[i] for i in next(epochs))
    model.rollout_buffer.values, model.rollout_buffer.returns = columns[3], columns[5]
    model.train()
    assert next(epochs, None) is None
    assert (weights(agent) - before).abs().max() > 1e-2
    if case is CONTINUOUS:
        torch.testing.assert_close(agent.log_std, model.policy.log_std, rtol=0, atol=3e-5)
    for own, other in layer_pairs(agent, model.policy):
        torch.testing.assert_close(own.weight, other.weight, rtol=0, atol=3e-5)
        torch.testing.assert_close(own.bias, other.bias, rtol=0, atol=3e-5)
    logged = model.logger.name_to_value
    for name, other, factor in (
        ("policy_loss", "policy_gradient_loss", 1),
        ("value_loss", "value_loss", 0.5),
        ("entropy", "entropy_loss", -1),
        ("clipfrac", "clip_fraction", 1),
        ("explained_variance", "explained_variance", 1),
    ):
        assert metrics[name] == pytest.approx(factor * logged[f"train/{other}"], abs=2e-4)


@each_script
def test_an_update_returns_means_over_its_gradient_steps_and_the_exact_kl(case):
    """It also returns metrics of the data, such as the explained variance."""
    args = case.make_args(learning_rate=1e-2, num_minibatches=3)
    agent = case.make_agent(args)
    rollout = case.make_rollout(args, agent, chance=0.4)
    rollout.rewards[0, 0] = 1000
    agent.return_moments.count.fill_(5000)  # so that one enormous reward is clipped
    old, recorder = copy.deepcopy(agent), Recorder(case.script.ppo_loss)
    *_, advantages, returns, rewards = reference(case, agent, rollout, args)
    metrics = case.learn(agent, rollout, args, loss=recorder)
    assert len(recorder.metrics) == 9
    expected = {"explained_variance": 1 - advantages.var() / returns.var()}
    expected["critic_error"] = np.linalg.norm(advantages) / np.linalg.norm(returns)
    expected["reward_clipfrac"] = (np.abs(rewards) == 10).mean()
    expected["obs_clipfrac"] = 0.0
    expected["first_approx_kl"] = recorder.metrics[0]["approx_kl"].item()
    for name in recorder.metrics[0]:
        expected[name] = np.mean([step[name].item() for step in recorder.metrics])
    assert metrics["clipfrac"] > 0
    assert metrics["reward_clipfrac"] > 0
    expected["charts/learning_rate"] = 1e-2  # the other coefficients do not change
    agent.obs_moments = old.obs_moments  # the statistics of this iteration
    pair = [case.policy(x, rollout.obs) for x in (old, agent)]
    kl = torch.distributions.kl_divergence(*(case.distribution(torch.from_numpy(x)) for x in pair))
    expected["kl"] = kl.mean().item()
    assert expected["kl"] > 1e-3
    if case is CONTINUOUS:
        means = case.policy(old, rollout.obs)[..., : case.num_actions]
        expected["std"] = np.sqrt(np.mean((float64(rollout.actions) - means) ** 2))
    assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-8)


@each_script
def test_the_first_epoch_that_ends_above_target_kl_is_the_last(case):
    """Its gradient steps are kept."""
    ends = []
    for epochs in range(1, 7):
        args = case.make_args(update_epochs=epochs)
        agent = case.make_agent(args)
        metrics = case.learn(agent, case.make_rollout(args, agent), args)
        ends.append((metrics["kl"], weights(agent)))
    (first, _), (second, _), (third, _) = ends[:3]
    assert 0 < first < second < third < 1e3
    for target, last in ((first / 2, 0), ((first + second) / 2, 1), ((second + third) / 2, 2), (1e3, 5)):
        args = case.make_args(update_epochs=6, target_kl=target)
        agent = case.make_agent(args)
        metrics = case.learn(agent, case.make_rollout(args, agent), args)
        assert metrics["kl"] == ends[last][0]
        assert torch.equal(weights(agent), ends[last][1])


@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_advantages_uses_the_current_critic_in_each_epoch(recompute):
    """Rewards are scaled as in the first epoch. Old values stay, since value clipping starts from them."""
    settings = {"recompute_advantages": recompute, "norm_rewards": True, "num_minibatches": 1}
    args = CONTINUOUS.make_args(learning_rate=1e-2, **settings)
    agent = CONTINUOUS.make_agent(args)
    rollout = CONTINUOUS.make_rollout(args, agent)
    rollout.rewards *= 5  # far from what scaling makes of them
    old, data = copy.deepcopy(agent), copy.deepcopy(rollout)
    normalised = CONTINUOUS.script.normalize_rollout(agent, rollout, args)
    remake = partial(CONTINUOUS.script.make_batch, agent, rollout, *normalised, args)
    batch, recorder = remake(), Recorder(CONTINUOUS.script.ppo_loss)
    CONTINUOUS.update(agent, batch, args, loss=recorder, remake=remake)
    changes = []
    for epoch, minibatch in enumerate(recorder.batches):
        first = reference(CONTINUOUS, old, data, args)
        critic = copy.deepcopy(old)
        if recompute:
            critic.critic = recorder.agents[epoch].critic
        expected = first[:4] + reference(CONTINUOUS, critic, data, args)[4:]
        where = places(minibatch, batch)
        for name, part, whole in zip(batch._fields, minibatch, expected, strict=True):
            np.testing.assert_allclose(float64(part), whole[where], atol=2e-4, err_msg=f"{name}, {epoch}")
        changes.append(np.abs(expected[5] - first[5]).max())
    assert (changes[1] > 0.01) == (changes[2] > changes[1]) == recompute
    assert len(changes) == 3


# Plain PPO


def plain_forward(layers, x):
    """Compute a network of tanh layers and a linear one from its weights and biases."""
    *hidden, (weight, bias) = layers
    for each_weight, each_bias in hidden:
        x = torch.tanh(x @ each_weight.T + each_bias)
    return x @ weight.T + bias


def plain_loss(actor, log_std, critic, rows, args):
    """Compute a minibatch's loss by the textbook, in float64. `log_std` is None for discrete actions."""
    obs, actions, old_log_probs, old_values, advantages, returns = rows
    outputs, values = plain_forward(actor, obs), plain_forward(critic, obs).squeeze(-1)
    distribution = Categorical(logits=outputs) if log_std is None else Normal(outputs, log_std.exp())
    log_probs, entropies = distribution.log_prob(actions), distribution.entropy()
    if log_std is not None:
        log_probs, entropies = log_probs.sum(-1), entropies.sum(-1)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    ratio, epsilon = torch.exp(log_probs - old_log_probs), args.clip_coef
    limit = torch.where(advantages > 0, 1 + epsilon, 1 - epsilon)
    objective = torch.where(advantages > 0, torch.minimum(ratio, limit), torch.maximum(ratio, limit))
    errors = (values - returns) ** 2
    if args.clip_vloss:
        near = torch.maximum(torch.minimum(values, old_values + epsilon), old_values - epsilon)
        errors = torch.maximum(errors, (near - returns) ** 2)
    loss = -(objective * advantages).mean() + args.vf_coef * errors.mean() / 2
    return loss - args.ent_coef * entropies.mean()


def assert_defaults_of_stable_baselines3(args):
    """Check that our settings mean what its PPO has by default."""
    known = {name: one.default for name, one in inspect.signature(PPO.__init__).parameters.items()}
    batch_size = args.num_envs * args.num_steps // args.num_minibatches
    ours = {
        "learning_rate": args.learning_rate, "n_steps": args.num_steps, "batch_size": batch_size,
        "n_epochs": args.update_epochs, "gamma": args.gamma, "gae_lambda": args.gae_lambda,
        "clip_range": args.clip_coef, "clip_range_vf": 0.2 if args.clip_vloss else None,
        "normalize_advantage": args.norm_adv, "ent_coef": args.ent_coef,
        "vf_coef": args.vf_coef / 2,  # its value loss has no ½
        "max_grad_norm": args.max_grad_norm, "target_kl": args.target_kl,
    }  # fmt: skip
    assert ours == {name: known[name] for name in ours}
    assert (args.num_envs, args.anneal_lr, args.norm_obs, args.norm_rewards) == (1, False, False, False)


@pytest.mark.parametrize(("script", "whose"), experiments.PLAIN)
def test_with_the_flags_for_plain_ppo_an_update_equals_one_written_by_hand(script, whose):
    """The documents give these flags for the settings of the paper and of other libraries."""
    case = DISCRETE if script == "ppo.py" else CONTINUOUS
    flags = shlex.split(experiments.PLAIN[script, whose])
    args = tyro.cli(case.script.Args, args=flags)
    case.script.check_settings(args)
    if whose == "Stable-Baselines3":
        assert_defaults_of_stable_baselines3(args)
    args = replace(args, update_epochs=5, num_minibatches=8, num_steps=256, num_envs=1)
    agent = case.make_agent(args)
    rollout = case.make_rollout(args, agent)
    rollout.rewards *= 3  # so that some values move by more than ε
    columns = [torch.from_numpy(column) for column in reference(case, agent, rollout, args)]
    log_probs = case.distribution(columns[2]).log_prob(columns[1])
    columns = [columns[0], columns[1], log_probs, *columns[3:6]]

    copied = copy.deepcopy(agent).double()
    actor, critic = (
        [(layer.weight, layer.bias) for layer in network if hasattr(layer, "weight")]
        for network in (copied.actor, copied.critic)
    )
    log_std = getattr(copied, "log_std", None)
    parameters = [*copied.parameters()]
    batch, recorder, before = (
        case.make_batch(agent, rollout, args),
        Recorder(case.script.ppo_loss),
        weights(agent),
    )
    optimizer = Adam(agent.parameters(), 99.0, eps=1e-5)
    case.update(agent, batch, args, loss=recorder, optimizer=optimizer)

    means, squares = ([torch.zeros_like(x) for x in parameters] for _ in range(2))
    for step, minibatch in enumerate(recorder.batches, start=1):
        rows = [column[places(minibatch, batch)] for column in columns]
        gradients = torch.autograd.grad(plain_loss(actor, log_std, critic, rows, args), parameters)
        norm = math.sqrt(sum(gradient.square().sum() for gradient in gradients))
        for parameter, gradient, mean, square in zip(parameters, gradients, means, squares, strict=True):
            clipped = gradient * min(1, args.max_grad_norm / norm)
            mean.mul_(0.9).add_(0.1 * clipped)
            square.mul_(0.999).add_(0.001 * clipped**2)
            root = (square / (1 - 0.999**step)).sqrt() + 1e-5
            parameter.data -= args.learning_rate * mean / (1 - 0.9**step) / root
    assert step == 40
    assert (weights(agent) - before).abs().max() > 3e-3
    torch.testing.assert_close(weights(agent).double(), weights(copied), rtol=0, atol=3e-5)


# Gradient steps


@each_script
@pytest.mark.parametrize("surrogate", ["clip", "kl-penalty"])
@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_one_epoch_of_one_minibatch_is_a_step_of_a2c(case, surrogate, limit):
    """With plain gradient descent, the step is A2C's clipped gradient times the learning rate."""
    settings = {"update_epochs": 1, "num_minibatches": 1, "surrogate": surrogate, "max_grad_norm": limit}
    args = case.make_args(norm_adv=False, **settings)
    agent, state = case.make_agent(args), case.make_state(args)
    state.learning_rate = 0.02
    rollout, a2c = case.make_rollout(args, agent), copy.deepcopy(agent)
    columns = reference(case, agent, rollout, args)
    obs, _, _, _, advantages, returns, _ = (torch.from_numpy(x).float() for x in columns)
    metrics = case.learn(agent, rollout, args, optimizer=SGD(agent.parameters(), 99.0), state=state)
    distribution = case.distribution(a2c.policy(obs))
    policy_loss = -(distribution.log_prob(torch.from_numpy(columns[1])) * advantages).mean()
    value_loss = (0.5 * (a2c.value(obs) - returns) ** 2).mean()
    entropy = distribution.entropy().mean()
    (policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy).backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in a2c.parameters()])
    expected = weights(a2c) - 0.02 * gradient * min(1, limit / gradient.norm())
    torch.testing.assert_close(weights(agent), expected, rtol=1e-4, atol=2e-7)
    values = {"grad_norm": gradient.norm(), "policy_loss": -advantages.mean(), "value_loss": value_loss}
    for name, value in (values | {"entropy": entropy}).items():
        assert metrics[name] == pytest.approx(value.item(), rel=1e-3), name
    assert [metrics["approx_kl"], metrics["clipfrac"]] == pytest.approx([0, 0], abs=1e-6)


COMPILED = [(DISCRETE, "clip", "inductor"), (CONTINUOUS, "kl-penalty", "aot_eager")]
NIGHTLY = [(CONTINUOUS, "clip", "inductor"), (DISCRETE, "kl-penalty", "aot_eager")]
COMPILED += [pytest.param(*given, marks=pytest.mark.nightly) for given in NIGHTLY]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "surrogate", "backend"), COMPILED, ids=str)
def test_compiled_gradients_and_metrics_equal_eager_ones(case, surrogate, backend, monkeypatch):
    """They do for batches of all sizes, and when coefficients change.

    aot_eager makes the same graphs as inductor, without a C++ compiler, which takes most of the time.
    """
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    args = case.make_args(max_grad_norm=0.3, surrogate=surrogate, clip_vloss=surrogate == "clip")
    agents, state = [case.make_agent(args) for _ in range(2)], case.make_state(args)
    computes = case.script.compute_gradients, case.script.compiled(case.script.compute_gradients)
    rollout = case.make_rollout(args, agents[0])
    rollout.policies += 0.2 * torch.randn(rollout.policies.shape)  # so that ratios are not 1, and clip
    batch = case.make_batch(copy.deepcopy(agents[0]), rollout, args)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for i, size in enumerate([len(batch.obs), 30, 29, 17, 4]):
        state.kl_coef, state.clip_coef, state.ent_coef = 1 + 0.5 * i, 0.3 - 0.04 * i, 0.1 * i
        minibatch, metrics, gradients = case.script.Batch(*(column[:size] for column in batch)), [], []
        for agent, compute in zip(agents, computes, strict=True):
            agent.zero_grad()
            metrics.append(compute(agent, minibatch, args, state))
            gradients.append(torch.cat([parameter.grad.flatten() for parameter in agent.parameters()]))
        torch.testing.assert_close(metrics[0], metrics[1], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)
        assert 0 < metrics[0]["clipfrac"] < 1
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= graphs + 2  # not one for each value


def test_no_gradient_step_leaves_a_log_std_below_its_minimum():
    args, recorder = CONTINUOUS.make_args(min_log_std=-0.5), Recorder(CONTINUOUS.script.ppo_loss)
    agent = CONTINUOUS.make_agent(args)
    agent.log_std.data.fill_(-0.499)
    CONTINUOUS.learn(agent, CONTINUOUS.make_rollout(args, agent), args, loss=recorder)
    assert min(seen.log_std.min() for seen in (*recorder.agents, agent)) == -0.5


# train


@memory_too
@pytest.mark.parametrize("norm_obs", [False, True])
def test_training_uses_adam_with_a_linear_schedule_and_counts_each_transition_once(case, norm_obs, tmp_path):
    """Adam has ε = 1e-5 and the usual βs. The normalisers' counts are the number of transitions."""
    sizes = {"num_envs": 2, "num_steps": 20, "num_minibatches": 2, "total_timesteps": 150}
    if case is not LSTM:
        sizes["adapt"] = "none"
    run(case, tmp_path, "--norm-obs" if norm_obs else "--no-norm-obs", learning_rate=3e-3, **sizes)
    path = checkpoint_in(tmp_path)
    content, data = load(path), curves(path.parent)
    logged = data["losses/kl"]
    (group,) = content["optimizer"]["param_groups"]
    assert (group["eps"], group["weight_decay"], group["amsgrad"]) == (1e-5, 0, False)
    assert tuple(group["betas"]) == (0.9, 0.999)
    rates = [*data["charts/learning_rate"].values()]
    assert group["lr"] == pytest.approx(rates[-1])
    expected = [3e-3 * (1 - step / 150) for step in [*logged][:-1]]  # by the steps before each iteration
    assert rates[1:] == pytest.approx(expected)
    steps = content["state"]["global_step"]
    assert {slot["step"].item() for slot in content["optimizer"]["state"].values()} == {2 * 2 * len(logged)}
    assert 150 <= steps < 150 + 40
    assert content["agent"]["obs_moments.count"] == content["agent"]["return_moments.count"] == steps


def test_a_run_warns_once_if_the_policy_has_dropout(tmp_path, monkeypatch):
    """The agent acts with other units than it learns with. A run without dropout has no warning."""
    case = DISCRETE

    class Agent(case.script.Agent):
        def __init__(self, *given):
            super().__init__(*given)
            self.actor = torch.nn.Sequential(torch.nn.Dropout(0.05), self.actor)

    settings = {"total_timesteps": 2000, "learning_rate": 1e-2}
    warning = "acting and learning do not compute the same policy"
    assert warning not in run(case, tmp_path, **settings).out
    monkeypatch.setattr(case.script, "Agent", Agent)
    assert run(case, tmp_path, **settings).out.count(warning) == 1


@pytest.mark.slow
def test_a_loss_that_cannot_be_compiled_as_a_whole_is_an_error():
    """A loss that reads a number would otherwise be compiled in parts, without gradients."""
    case = CONTINUOUS
    args = case.make_args()
    agent, state = case.make_agent(args), case.make_state(args)
    batch = case.make_batch(agent, case.make_rollout(args, agent), args)

    def reads_a_number(*arguments):
        loss, metrics = ppo_loss(*arguments)
        return (2 * loss if metrics["entropy"].item() > 0 else loss), metrics

    ppo_loss = case.script.ppo_loss
    compiled = case.script.compiled(case.script.compute_gradients)
    with (
        mock.patch.object(case.script, "ppo_loss", reads_a_number),
        pytest.raises(torch._dynamo.exc.TorchDynamoException),
    ):
        compiled(agent, batch, args, state)
