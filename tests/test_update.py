"""What an iteration makes of a rollout: its batch, its minibatches, its gradient steps, and its metrics."""

import copy
import math
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from helpers import (
    CONTINUOUS,
    DISCRETE,
    D,
    RewardScale,
    direct_gae,
    each_script,
    float64,
    normalized,
    weights,
)
from stable_baselines3 import PPO
from stable_baselines3.common.logger import Logger
from stable_baselines3.common.type_aliases import RolloutBufferSamples
from torch import nn
from torch.optim import SGD, Adam


def reference(case, agent, rollout, args):
    """The columns [B, ...] of a rollout's batch, computed in NumPy and float64."""
    policy = case.policy(agent, rollout.obs, args.norm_obs)
    values = case.values(agent, rollout.obs, args.norm_obs)
    rewards = rollout.rewards.astype(np.float64)
    if args.norm_rewards:
        rewards = RewardScale(agent, rollout, args.gamma).scale(rewards, rollout.valid)
    ends = rollout.terminated, rollout.truncated
    advantages = direct_gae(rewards, values, *ends, args.gamma, args.gae_lambda)
    obs = normalized(agent, rollout.obs[:-1], args.norm_obs)
    columns = obs, rollout.actions, policy[:-1], values[:-1], advantages, advantages + values[:-1]
    return [column[rollout.valid] for column in columns]


class Recorder:
    """Keeps the minibatches that `update` calls a step with, what it returned, and the agent then."""

    def __init__(self, step, agent=None):
        self.step, self.agent = step, agent
        self.batches, self.metrics, self.agents = [], [], []

    def __call__(self, batch):
        self.batches.append(batch)
        self.agents.append(copy.deepcopy(self.agent))
        self.metrics.append(self.step(batch))
        return self.metrics[-1]


def places(minibatch, batch):
    """Which transitions of a batch a minibatch holds, by their observations."""
    known = {tuple(obs): i for i, obs in enumerate(batch.obs.tolist())}
    return [known[tuple(obs)] for obs in minibatch.obs.tolist()]


# make_batch


@each_script
@pytest.mark.parametrize("norm_obs", [False, True])
@pytest.mark.parametrize("norm_rewards", [False, True])
def test_batch(case, norm_obs, norm_rewards):
    """All columns of each transition, in order, without filler rows or gradients, and metrics of the data."""
    args = case.make_args(norm_obs=norm_obs, norm_rewards=norm_rewards)
    agent = case.make_agent(args)
    if case is CONTINUOUS:
        agent.high[1] = np.inf
    for seed in range(3):
        rollout = case.make_rollout(args, agent, seed, chance=0.4)
        columns = reference(case, agent, rollout, args)
        batch, *_, metrics = case.script.make_batch(agent, rollout, args)
        assert not rollout.valid.all()
        for name, column, wanted in zip(batch._fields, batch, columns, strict=True):
            np.testing.assert_allclose(float64(column), wanted, atol=1e-4, err_msg=name)
            assert not column.requires_grad
        _, actions, policy, _, advantages, returns = columns
        expected = {"explained_variance": 1 - advantages.var() / returns.var()}
        expected["critic_error"] = np.linalg.norm(advantages) / np.linalg.norm(returns)
        if case is DISCRETE:
            entropies = case.distribution(torch.from_numpy(policy)).entropy()
            expected["relative_entropy"] = entropies.mean().item() / math.log(4)
        else:
            stds = float64(agent.log_std.exp())
            expected |= {"std": stds.mean(), "std_min": stds.min(), "std_max": stds.max()}
            expected["outside"] = ((actions < -1) | (actions > [1, np.inf])).mean()
            assert expected["outside"] > 0
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-3)


@each_script
def test_statistics_change_only_after_acting_and_learning_agree(case):
    """Learning sees observations as acting did; then the moments include each transition once."""
    args = case.make_args(env_id=case.env_id, num_steps=9)
    envs, agent, rollout = case.begin(args)
    obs, returns, running = [], [], np.zeros(4)
    agent.obs_moments = case.script.RunningMoments(agent.obs_size)
    agent.return_moments = case.script.RunningMoments(1)
    step = case.make_step(agent, args)
    for _ in range(4):
        acting = copy.deepcopy(agent)
        case.script.collect_rollout(envs, agent, rollout)
        assert all(torch.equal(x, y) for x, y in zip(agent.buffers(), acting.buffers(), strict=True))
        expected = reference(case, acting, rollout, args)[0]
        batch, *estimate, metrics = case.script.make_batch(agent, rollout, args)
        np.testing.assert_allclose(float64(batch.obs), expected, rtol=1e-4, atol=1e-4)
        assert metrics["policy_mismatch"] < 1e-4
        case.script.update(agent, step, batch, *estimate, args)
        for t, n in np.ndindex(*rollout.valid.shape):
            running[n] = (args.gamma * running[n] + rollout.rewards[t, n]) * rollout.valid[t, n]
            if rollout.valid[t, n]:
                obs.append(rollout.obs[t, n].copy())
                returns.append([running[n]])
        for moments, data in ((agent.obs_moments, obs), (agent.return_moments, returns)):
            data = np.array(data, np.float64)
            np.testing.assert_allclose(moments.mean, data.mean(0), rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(moments.var, data.var(0), rtol=1e-3, atol=1e-4)
            assert moments.count == len(data)
    envs.close()


@each_script
def test_policy_mismatch(case):
    """It is the largest difference of the last step's log policies between acting and learning."""
    args = case.make_args(env_id=case.env_id, num_steps=9)
    envs, agent, rollout = case.begin(args)
    case.script.collect_rollout(envs, agent, rollout)
    envs.close()

    def mismatch(agent):
        *_, metrics = case.script.make_batch(copy.deepcopy(agent), copy.deepcopy(rollout), args)
        return metrics["policy_mismatch"]

    assert mismatch(agent) < 1e-4
    acted = rollout.acting_policy.clone()
    for error in (0.01, -0.01):
        rollout.acting_policy = acted.clone()
        rollout.acting_policy[1, 1] += error
        assert mismatch(agent) == pytest.approx(0.01, rel=1e-2)
    rollout.acting_policy = acted
    agent.actor.insert(2, nn.Dropout(0.5))  # acts and learns in different ways
    assert mismatch(agent) > 1e-4


# update


@each_script
@pytest.mark.parametrize(
    ("steps", "envs", "minibatches"), [(12, 4, 2), (12, 4, 5), (8, 3, 12), (4, 1, 2), (6, 1, 3), (3, 2, 3)]
)
def test_minibatches(case, steps, envs, minibatches):
    """Each epoch permutes all transitions; sizes differ by one at most, and are never below 2."""
    args = case.make_args(num_steps=steps, num_envs=envs, num_minibatches=minibatches)
    agent = case.make_agent(args)
    rollout = case.make_rollout(args, agent, seed=3, chance=0.3)
    batch, *estimate, _ = case.script.make_batch(agent, rollout, args)
    recorder = Recorder(lambda minibatch: torch.zeros(7))
    case.script.update(agent, recorder, batch, *estimate, args)
    size = len(batch.obs)
    number = min(minibatches, size // 2)
    assert len(recorder.batches) == 3 * number
    epochs = []
    for epoch in range(3):
        order = []
        for minibatch in recorder.batches[epoch * number : (epoch + 1) * number]:
            where = places(minibatch, batch)
            for name, part, whole in zip(batch._fields, minibatch, batch, strict=True):
                assert torch.equal(part, whole[where]), name
            assert len(where) in (size // number, math.ceil(size / number))
            assert len(where) >= 2
            order += where
        assert sorted(order) == list(range(size))
        epochs.append(order)
    if size > 10:
        assert sorted(epochs[0]) != epochs[0] != epochs[1] != epochs[2] != sorted(epochs[2])


def layer_pairs(agent, policy):
    """Our layers, and those of Stable-Baselines3's policy in the same places."""
    extractor = policy.mlp_extractor
    theirs = extractor.policy_net[0], extractor.policy_net[2], policy.action_net
    theirs += extractor.value_net[0], extractor.value_net[2], policy.value_net
    return zip((*agent.actor[::2], *agent.critic[::2]), theirs, strict=True)


def make_sb3(case, agent, args):
    """Stable-Baselines3's PPO with our weights."""
    env = gym.Env()  # of which it must see the spaces
    env.observation_space = spaces.Box(-np.inf, np.inf, (D,), np.float32)
    env.action_space = spaces.Discrete(4) if case is DISCRETE else case.action_space
    policy = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}}
    policy["activation_fn"] = nn.Tanh if case is DISCRETE else nn.ELU
    policy["optimizer_kwargs"] = {"eps": 1e-5, "betas": case.betas}
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
        (2, {"norm_adv": False, "max_grad_norm": 100.0, "ent_coef": 0.1}),
        (4, {"max_grad_norm": 0.1, "vf_coef": 2.0}),
        (8, {"clip_coef": 0.05, "norm_adv": False}),
    ],
)
def test_update_matches_stable_baselines3(case, minibatches, changes):
    """With the same minibatches of the same rollout, weights and metrics are those of Stable-Baselines3."""
    args = case.make_args(update_epochs=6, num_minibatches=minibatches, **changes)
    agent = case.make_agent(args)
    rollout = case.make_rollout(args, agent)
    columns, model = reference(case, agent, rollout, args), make_sb3(case, agent, args)
    obs, actions, policy, values, advantages, returns = map(torch.from_numpy, columns)
    log_probs = case.distribution(policy).log_prob(actions)
    theirs = obs, actions.reshape(len(obs), -1), values, log_probs, advantages, returns
    batch, *estimate, data_metrics = case.script.make_batch(agent, rollout, args)
    recorder, before = Recorder(case.make_step(agent, args)), weights(agent)
    metrics = case.script.update(agent, recorder, batch, *estimate, args)
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
        assert (data_metrics | metrics)[name] == pytest.approx(factor * logged[f"train/{other}"], abs=2e-4)


@each_script
def test_metrics_of_an_update(case):
    """Means over all gradient steps, and the exact KL divergence of the last policy from the old one."""
    args = case.make_args(learning_rate=1e-2, num_minibatches=3)
    agent = case.make_agent(args)
    rollout = case.make_rollout(args, agent, chance=0.4)
    old = copy.deepcopy(agent)
    recorder = Recorder(case.make_step(agent, args))
    metrics = case.learn(agent, rollout, args, step=recorder)
    assert len(recorder.metrics) == 9
    means = torch.stack(recorder.metrics).double().mean(0).tolist()
    assert [metrics[name] for name in case.script.METRICS] == pytest.approx(means, rel=1e-5, abs=1e-8)
    assert metrics["clipfrac"] > 0
    agent.obs_moments = old.obs_moments  # the statistics of this iteration
    pair = [case.policy(x, rollout.obs[:-1])[rollout.valid] for x in (old, agent)]
    kl = torch.distributions.kl_divergence(*(case.distribution(torch.from_numpy(x)) for x in pair))
    assert metrics["kl"] == pytest.approx(kl.mean().item(), rel=1e-3)
    assert metrics["kl"] > 1e-3


@each_script
def test_target_kl_stops_the_epochs(case):
    """The first epoch that ends above --target-kl is the last; what it did stays."""
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


@pytest.mark.parametrize("norm_rewards", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_recompute_advantages(norm_rewards, recompute):
    """Each epoch but the first has advantages by the current critic, of the same rewards; all else is old."""
    settings = {"recompute_advantages": recompute, "norm_rewards": norm_rewards, "num_minibatches": 1}
    args = CONTINUOUS.make_args(learning_rate=1e-2, **settings)
    agent = CONTINUOUS.make_agent(args)
    rollout = CONTINUOUS.make_rollout(args, agent)
    rollout.rewards *= 5  # far from what scaling makes of them
    old, data = copy.deepcopy(agent), copy.deepcopy(rollout)
    batch, *estimate, _ = CONTINUOUS.script.make_batch(agent, rollout, args)
    recorder = Recorder(CONTINUOUS.make_step(agent, args), agent)
    CONTINUOUS.script.update(agent, recorder, batch, *estimate, args)
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


# Gradient steps


@each_script
@pytest.mark.parametrize("surrogate", ["clip", "kl-penalty"])
@pytest.mark.parametrize("limit", [0.01, 1e6])
def test_one_epoch_of_one_minibatch_is_a_step_of_a2c(case, surrogate, limit):
    """With plain gradient descent: A2C's gradient, clipped, times the state's learning rate."""
    settings = {"update_epochs": 1, "num_minibatches": 1, "surrogate": surrogate, "max_grad_norm": limit}
    args = case.make_args(norm_adv=False, clip_vloss=True, **settings)
    agent, state = case.make_agent(args), case.make_state(args)
    state.learning_rate = 0.02
    rollout, a2c = case.make_rollout(args, agent), copy.deepcopy(agent)
    columns = reference(case, agent, rollout, args)
    obs, _, _, _, advantages, returns = (torch.from_numpy(x).float() for x in columns)
    step = case.make_step(agent, args, state, SGD(agent.parameters(), 99.0))
    metrics = case.learn(agent, rollout, args, step=step)
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


def change(agent):
    """Change an agent as a user may. Returns its new parameters that are to learn, and those that are not."""
    torch.manual_seed(9)
    agent.actor[2] = nn.Linear(64, 64)
    agent.critic.insert(2, nn.LayerNorm(64))
    agent.actor[0].weight.requires_grad_(False)
    agent.unused = nn.Parameter(torch.ones(3))
    learnt = [*agent.actor[2].parameters(), *agent.critic[2].parameters()]
    return learnt, [agent.actor[0].weight, agent.unused]


@each_script
def test_changed_networks_act_and_learn(case):
    """A replaced layer, an added module, a frozen and an unused parameter do what they would anywhere."""
    args = case.make_args()
    original, agent = case.make_agent(args), case.make_agent(args)
    learnt, kept = change(agent)
    obs = torch.randn(9, D)
    assert (agent.value(obs) - original.value(obs)).abs().max() > 0.1
    policy = agent.act(obs.numpy())[1]
    assert (policy - original.act(obs.numpy())[1]).abs().max() > 0.1
    np.testing.assert_allclose(float64(policy), case.policy(agent, obs), atol=1e-5)
    before = [x.detach().clone() for x in (*learnt, *kept)]
    case.learn(agent, case.make_rollout(args, agent), args)
    moved = [not torch.equal(x, y) for x, y in zip(before, (*learnt, *kept), strict=True)]
    assert moved == [True] * len(learnt) + [False] * len(kept)


@pytest.mark.slow
@each_script
@pytest.mark.parametrize("first", [30, D])
def test_compiled_steps_are_those_of_eager(case, first):
    """The same parameters, moments and metrics; other sizes and coefficients compile nothing anew."""
    penalty = {"surrogate": "kl-penalty", "min_log_std": -0.5} if case is CONTINUOUS else {}
    args = case.make_args(max_grad_norm=0.3, kl_coef=1, ent_coef=1, **penalty)  # whole numbers
    agents, optimizers, steps, state = [], [], [], case.make_state(args)
    for compiled in (False, True):
        agent = case.make_agent(args)
        learnt, kept = change(agent)
        decay = {"weight_decay": 0.1, "decoupled_weight_decay": True} if first == D else {}  # as AdamW
        agent.unused.data.zero_()  # or a compiled step would let it decay, too
        optimizer = Adam(agent.parameters(), 99.0, eps=1e-5, betas=case.betas, fused=True, **decay)
        rollout = case.make_rollout(args, agent)
        batch, *estimate, _ = case.script.make_batch(agent, rollout, args)
        step = case.make_step(agent, args, state, optimizer)
        step(batch)  # Adam has moments before the compiled steps begin, as after --resume
        agent.zero_grad()
        steps.append(case.script.compile_gradient_step(agent, optimizer, args, state) if compiled else step)
        agents.append(agent)
        optimizers.append(optimizer)
    before = [x.detach().clone() for x in (*learnt, *kept)]
    for i, size in enumerate([first, 30, 29, 17, 2, *range(3, 30)]):
        state.ent_coef, state.clip_coef = 0.01 + 0.001 * i, 0.2 - 0.001 * i
        state.learning_rate, state.kl_coef = 1e-3 / (i + 1), 1 + 0.1 * i
        minibatch = type(batch)(*(column[:size] for column in batch))
        with torch._dynamo.config.patch(error_on_recompile=i > 0):
            eager, compiled = (step(minibatch) for step in steps)
        torch.testing.assert_close(eager, compiled, rtol=1e-3, atol=1e-5)
    for step, agent in zip(steps, agents, strict=True):
        torch.manual_seed(1)
        case.script.update(agent, step, batch, *estimate, args)
    torch.testing.assert_close(weights(agents[0]), weights(agents[1]), rtol=0, atol=1e-6)
    moved = [not torch.equal(x, y) for x, y in zip(before, (*learnt, *kept), strict=True)]
    assert moved == [True] * len(learnt) + [False] * len(kept)
    saved = [optimizer.state_dict()["state"] for optimizer in optimizers]
    for name, slot in saved[0].items():
        torch.testing.assert_close(saved[1][name], slot, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_a_compiled_loss_sees_coefficients_only(monkeypatch):
    """What else is in the state would be the same in all steps: it is an error, not a silent constant."""
    args, loss = DISCRETE.make_args(), DISCRETE.script.ppo_loss
    agent, state = DISCRETE.make_agent(args), DISCRETE.make_state(args)
    batch, *_ = DISCRETE.script.make_batch(agent, DISCRETE.make_rollout(args, agent), args)

    def scheduled(agent, batch, args, state):
        total, metrics = loss(agent, batch, args, state)
        return total * (1 + state.global_step), metrics

    monkeypatch.setattr(DISCRETE.script, "ppo_loss", scheduled)
    optimizer = Adam(agent.parameters(), eps=1e-5)
    step = DISCRETE.script.compile_gradient_step(agent, optimizer, args, state)
    with pytest.raises(Exception, match="global_step"):
        step(batch)


@pytest.mark.slow
@each_script
def test_each_run_of_a_process_compiles_its_own_steps(case):
    """A second run does not get the graph of the first, which has other settings and sizes."""
    for changes in ({}, {"vf_coef": 5.0, "clip_vloss": True, "norm_adv": False}, {"hidden_size": 8}):
        args = case.make_args(**changes)
        agents, metrics = [case.make_agent(args) for _ in range(2)], []
        batch, *_ = case.script.make_batch(agents[0], case.make_rollout(args, agents[0]), args)
        for agent, compiled in zip(agents, (False, True), strict=True):
            optimizer = Adam(agent.parameters(), 99.0, eps=1e-5, betas=case.betas, fused=True)
            state = case.make_state(args)
            step = case.make_step(agent, args, state, optimizer)
            if compiled:
                step = case.script.compile_gradient_step(agent, optimizer, args, state)
            metrics.append(step(batch))
        torch.testing.assert_close(metrics[0], metrics[1], rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(weights(agents[0]), weights(agents[1]), rtol=0, atol=1e-6)


def test_floor_of_the_standard_deviation():
    """No step leaves a log σ below --min-log-std; from there it can rise; nothing else is touched."""
    case, one = CONTINUOUS, {"update_epochs": 1, "num_minibatches": 1}
    ends = {}
    for floor in (-20.0, -0.5):
        args = case.make_args(**one, min_log_std=floor)
        agent = case.make_agent(args)
        agent.log_std.data.fill_(-0.499)
        case.learn(agent, case.make_rollout(args, agent), args)
        ends[floor] = agent
    free, floored = ends[-20.0], ends[-0.5]
    assert free.log_std.min() < -0.5
    assert torch.equal(floored.log_std, free.log_std.clamp(min=-0.5))
    assert (weights(floored) != weights(free)).sum() == (free.log_std < -0.5).sum()
    args = case.make_args(min_log_std=-1.0, ent_coef=100.0)
    agent = case.make_agent(args)
    agent.log_std.data.fill_(-1.0)
    case.learn(agent, case.make_rollout(args, agent), args)
    assert (agent.log_std > -1).all()


# train


@each_script
@pytest.mark.parametrize("norm_obs", [False, True])
def test_training(case, norm_obs, tmp_path, monkeypatch):
    """Adam's settings, gradient steps, statistics; a first rollout is for these alone, if continuous."""
    monkeypatch.chdir(tmp_path)
    sizes = {"num_envs": 2, "num_steps": 20, "hidden_size": 8, "eval_episodes": 1, "total_timesteps": 70}
    args = case.make_args(env_id=case.env_id, norm_obs=norm_obs, **sizes)
    path = case.script.train(args)["checkpoint"]
    content = torch.load(path, weights_only=True)
    (group,) = content["optimizer"]["param_groups"]
    assert (group["eps"], group["weight_decay"], group["amsgrad"]) == (1e-5, 0, False)
    assert tuple(group["betas"]) == case.betas
    assert 0 < group["lr"] < 3e-3  # that of the last iteration
    learning = 2 if case is CONTINUOUS and norm_obs else 3
    assert {slot["step"].item() for slot in content["optimizer"]["state"].values()} == {3 * 2 * learning}
    steps = content["state"]["global_step"]
    assert 70 <= steps < 3 * 40
    assert content["agent"]["obs_moments.count"] == content["agent"]["return_moments.count"] == steps
    if case is CONTINUOUS:  # a new limit holds from the first action on
        args = replace(args, resume=path, total_timesteps=200, init_log_std=0.0, min_log_std=-0.1)
        case.script.train(args, stop=[1])
        log_std = torch.load(path, weights_only=True)["agent"]["log_std"]
        assert log_std.tolist() == pytest.approx([-0.1] * 3)
