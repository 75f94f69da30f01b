"""Tests of ppo_atari.py: DeepMind's protocol, rollouts, the convolutional network, updates and runs."""

import json
import os
import re
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import scipy.stats
import torch
from atari_games import CUT, LIVES, SHORT, Games, SmallNetwork, make_games
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from helpers import (
    ATARI,
    call,
    checkpoint_in,
    curves,
    direct_gae,
    flags,
    float64,
    load,
    same,
    same_step_ends,
    weights,
)
from stable_baselines3.common.policies import ActorCriticCnnPolicy
from torch.utils._pytree import tree_map

import ppo_atari as ppo

SMALL = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "num_threads": 1, "device": "cpu"}


def make_args(**changes):
    return ppo.Args(**{**SMALL, **changes})


def make_agent(args, num_actions=5, seed=0):
    """Return an agent whose policy depends on the images."""
    torch.manual_seed(seed)
    agent = ppo.Agent(args, num_actions)
    with torch.no_grad():
        agent.actor.weight.mul_(100)
    return agent


def make_rollout(args, agent, seed=0, chance=0.2):
    """Return a rollout of random images, rewards and values, with actions that the agent has sampled.

    FIRE is forced in some of the steps that follow an end, and in the first step of one game. Where no game
    was cut, `last_values` has numbers that mean nothing.
    """
    rng = np.random.default_rng(seed)
    rollout = ppo.Rollout(args, agent.actor.out_features)
    shape = args.num_steps, args.num_envs
    rollout.terminated[:], rollout.truncated[:] = same_step_ends(rng, *shape, chance)
    rollout.forced[1:] = (rollout.terminated[:-1] & ~rollout.truncated[:-1]) & (rng.random(shape) < 0.5)[1:]
    rollout.forced[0, 0] = True
    rollout.obs = torch.from_numpy(rng.integers(0, 256, (shape[0] + 1, shape[1], 4, 84, 84), dtype=np.uint8))
    rollout.rewards[:] = rng.choice([-3, -2, 0, 0, 1, 2], size=shape)
    torch.manual_seed(seed)
    with torch.no_grad():
        rollout.policies = agent(rollout.obs[:-1].flatten(0, 1))[0].unflatten(0, shape)
    rollout.actions = torch.distributions.Categorical(logits=rollout.policies).sample()
    rollout.values = torch.randn(shape[0] + 1, shape[1])
    rollout.last_values = torch.where(torch.from_numpy(rollout.truncated), torch.randn(shape), 1e6)
    return rollout


# The protocol: DeepMind's. Gymnasium has an implementation of its own.


class Fire(gym.Wrapper):
    """It presses FIRE for one frame after a reset."""

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        obs, _, _, _, info = self.env.step(1)
        return obs, info


def reference(game, fire, max_frames):
    """Return a game with Gymnasium's wrappers, which starts without frames without an action."""
    env = gym.make(
        f"ALE/{game}-v5",
        frameskip=1,
        repeat_action_probability=0.0,
        max_num_frames_per_episode=max_frames or 10**6,
    )
    env = AtariPreprocessing(Fire(env) if fire else env, noop_max=0, frame_skip=4, screen_size=84)
    return FrameStackObservation(env, 4, padding_type="zero")


@pytest.mark.parametrize(
    ("game", "fire", "limit", "steps"),  # limit in frames
    [
        ("Breakout", True, None, 700),
        ("Breakout", True, 200, 160),
        pytest.param("MsPacman", False, None, 700, marks=pytest.mark.slow),  # lives and no FIRE button
        pytest.param("MsPacman", False, 900, 700, marks=pytest.mark.slow),
        pytest.param("Pong", True, None, 2200, marks=pytest.mark.slow),  # no lives
        pytest.param("Freeway", False, 400, 300, marks=pytest.mark.slow),  # neither
    ],
)
def test_images_rewards_and_ends_are_those_of_gymnasiums_wrappers(game, fire, limit, steps):
    """Four images in their order, frame numbers and scores agree as well, over whole games.

    A game is reset in the step that ends it, and then `final_obs` is its last observation. Gymnasium's
    wrappers do not end episodes at lost lives, so the test counts lives.
    """
    kwargs = {"noop_max": 0} | ({"max_num_frames_per_episode": limit} if limit else {})
    envs = ppo.make_envs(make_args(env_id=f"{game}NoFrameskip-v4", env_kwargs=json.dumps(kwargs)), 1)
    env = reference(game, fire, limit and limit + fire)  # the frame of FIRE does not count
    obs, _ = envs.reset(seed=3)
    expected, expected_info = env.reset(seed=3)
    lives, lost, games, seen = expected_info["lives"], False, 0, set()
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(obs[0], expected)
    for _ in range(steps):
        action = int(rng.integers(env.action_space.n))
        obs, reward, terminated, truncated, info = envs.step(np.array([action]))
        forced = fire and lost
        expected, raw, over, cut, expected_info = env.step(1 if forced else action)
        lost = expected_info["lives"] < lives and not (over or cut)
        assert reward[0] == raw
        assert terminated[0] == (over or lost)
        assert truncated[0] == cut
        assert info["forced"][0] == forced
        assert info["game_over"][0] == (over or cut)
        if over or cut:
            np.testing.assert_array_equal(info["final_obs"][0], expected)
            expected, expected_info = env.reset()
            games += 1
        lives = expected_info["lives"]
        np.testing.assert_array_equal(obs[0], expected)
        assert info["episode_frame_number"][0] == expected_info["episode_frame_number"]
        seen |= {name for name, value in (("life", lost), ("cut", cut)) if value}
    assert games >= 1
    assert ("cut" in seen) == (limit is not None)
    assert ("life" in seen) == (game in ("Breakout", "MsPacman"))


def first_images(**settings):
    envs = ppo.make_envs(make_args(**settings), 2)
    envs.reset(seed=5)
    images = [envs.step(np.array([2 + t // 3 % 2, 3]))[0] for t in range(40)]
    envs.close()
    return np.stack(images)


@pytest.mark.slow
def test_the_names_of_a_game_differ_only_in_sticky_actions():
    """--env-kwargs are arguments of the ALE."""
    names = "BreakoutNoFrameskip-v4", "ALE/Breakout-v5"
    first, sticky = [first_images(env_id=name) for name in names]
    assert not np.array_equal(first, sticky)
    plain = '{"repeat_action_probability": 0.0}'
    assert np.array_equal(first, first_images(env_id=names[1], env_kwargs=plain))


# Rollouts


def play(num_steps, *scripts, forward=None, fire=1):
    """Return a rollout of scripted games, the games that ended, the environments and the agent."""
    args = make_args(num_envs=len(scripts), num_steps=num_steps)
    agent, envs = make_agent(args), make_games(*scripts, fire=fire)
    rollout = ppo.Rollout(args, 5)
    rollout.obs[-1] = torch.from_numpy(envs.reset()[0])
    return rollout, ppo.collect_rollout(envs, forward or agent, rollout, args), envs, agent


def number(obs):
    """Return the number that an image shows, as a value, and a policy that prefers no action."""
    return torch.zeros(len(obs), 5).log_softmax(-1), obs[:, 0, 0, 0].float()


@pytest.mark.parametrize("fire", [1, 3])
def test_a_lost_life_ends_an_episode_but_not_the_game(fire):
    """FIRE is pressed in the next step, unless the game is over. Games that are reported are whole ones."""
    rollout, games, envs, _ = play(12, LIVES, CUT, fire=fire)
    # steps of the first game: 0 1 2(life lost) 3(forced) 4(life lost) 5(forced, game over), and again
    assert rollout.terminated[:, 0].tolist() == 2 * [False, False, True, False, True, True]
    assert rollout.forced[:, 0].tolist() == 2 * [False, False, False, True, False, True]
    assert not rollout.truncated[:, 0].any()
    assert not rollout.forced[:, 1].any()
    assert rollout.rewards[:, 0].tolist() == [0, 5, -2, 7, 0, 0, 0, 10, -4, 14, 0, 0]
    assert rollout.obs[:, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 10, 11, 12, 13, 14, 15, 20]
    expected = torch.where(torch.from_numpy(rollout.forced), fire, rollout.actions)
    assert envs.unwrapped.actions == expected.tolist()
    assert games == [(5, 3), (10, 6), (10, 3), (15, 3), (20, 6), (20, 3)]
    batch = ppo.make_batch(rollout, make_args(num_envs=2))
    assert batch.weights.view(12, 2)[:, 0].tolist() == 2 * [1, 1, 1, 0, 1, 0]
    assert (batch.weights.view(12, 2)[:, 1] == 1).all()


ENDS = {  # scripts, and where they lose a life
    "no life is lost": ([(0, 3, 0, 0), (0, 3, 0, 1)], [0, 0]),
    "a life is lost in the last step": ([(0, 3, 0, 0), (0, 2, 0, 1)], [0, 0]),
    "a life is lost before": ([(0, 2, 0, 0), (0, 2, 0, 1)], [1, 0]),
    "the next game has fewer lives": ([(0, 4, 0, 0), (0, 4, 0, 1)], [0, 0]),
    "the last life is lost, and the next game has fewer": ([(0, 5, 0, 0), (0, 0, 1, 0)], [0, 0]),
}


@pytest.mark.parametrize(("script", "lost"), ENDS.values(), ids=ENDS)
def test_the_step_after_a_game_is_one_to_learn_from(script, lost):
    """It is the first of the next game, and its action is not replaced. A cut game has not terminated."""
    rollout, games, envs, _ = play(6, script, script)
    over = np.array([row[2] for row in script])
    assert rollout.terminated[:, 0].astype(int).tolist() == 3 * (over | lost).tolist()
    assert rollout.truncated[:, 0].astype(int).tolist() == 3 * [row[3] for row in script]
    assert rollout.forced[:, 0].astype(int).tolist() == 3 * [0, lost[0]]
    expected = torch.where(torch.from_numpy(rollout.forced), 1, rollout.actions)
    assert envs.unwrapped.actions == expected.tolist()
    assert [length for _, length in games] == [2] * 6
    assert rollout.obs[:, 0, 0, 0, 0].tolist() == [0, 1, 10, 11, 20, 21, 30]


def test_a_rollout_continues_where_the_last_one_ended():
    """FIRE may be forced in its first step. Policies and values of all images are stored."""
    rollout, games, envs, agent = play(3, LIVES, LIVES)
    last = rollout.obs[-1].clone()
    games += ppo.collect_rollout(envs, agent, rollout, make_args(num_envs=2, num_steps=3))
    assert torch.equal(rollout.obs[0], last)
    assert rollout.forced[:, 0].tolist() == [True, False, True]
    assert games == [(10, 6), (10, 6)]
    with torch.no_grad():
        log_policy, values = agent(rollout.obs.flatten(0, 1))
    torch.testing.assert_close(rollout.values.flatten(), values)
    torch.testing.assert_close(rollout.policies.flatten(0, 1), log_policy[:-2])


@pytest.mark.parametrize("clip_rewards", [True, False])
def test_advantages_count_the_last_image_of_a_cut_game_and_none_after_a_lost_life(clip_rewards):
    """Nor after a game that is over in the step of the frame limit. The value of an image is its number."""
    both = (2, 3, 0, 0), (1, 3, 1, 1)
    rollout, _, envs, _ = play(11, LIVES, CUT, both, forward=number)
    batch = ppo.make_batch(rollout, make_args(num_envs=3, clip_rewards=clip_rewards))
    ends, reached = (rollout.terminated, rollout.truncated), np.array(envs.unwrapped.reached)
    rewards, values = rollout.rewards, float64(rollout.obs[:-1, :, 0, 0, 0])
    rewards = np.sign(rewards) if clip_rewards else rewards
    expected = direct_gae(rewards, values, *ends, ppo.Args.gamma, ppo.Args.gae_lambda, reached)
    np.testing.assert_allclose(batch.advantages.view(11, 3), expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch.returns.view(11, 3), expected + values, rtol=1e-4, atol=1e-4)
    assert ends[1].sum() == 3 + 5  # frame limits
    assert rollout.rewards.max() == 14


def test_actions_are_samples_of_the_policy():
    """The policy is the same for all images here."""
    policy, args = torch.tensor([0.6, 0.25, 0.1, 0.04, 0.01]), make_args(num_envs=50, num_steps=40)
    envs, rollout = make_games(*[LIVES] * 50), ppo.Rollout(args, 5)
    envs.reset()
    torch.manual_seed(0)
    ppo.collect_rollout(envs, lambda obs: (policy.log().expand(50, -1), torch.zeros(50)), rollout, args)
    counts = np.bincount(rollout.actions.flatten(), minlength=5)
    assert scipy.stats.chisquare(counts, policy * 2000).pvalue > 1e-4


def test_games_without_a_fire_button_are_played_by_the_policy_alone():
    rollout, _, envs, _ = play(6, LIVES, LIVES, fire=None)
    assert rollout.terminated[:, 0].tolist() == [False, False, True, False, True, True]
    assert not rollout.forced.any()
    assert envs.unwrapped.actions == rollout.actions.tolist()


# The network


def test_the_network_equals_stable_baselines3s():
    """Its NatureCNN policy with our weights gives the same outputs."""
    agent = make_agent(make_args(), 5)
    box = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    policy = ActorCriticCnnPolicy(box, spaces.Discrete(5), lambda _: 1e-3)
    extractor = policy.features_extractor
    ours = [layer for layer in [*agent.trunk, agent.actor, agent.critic] if hasattr(layer, "weight")]
    theirs = [*extractor.cnn, extractor.linear[0], policy.action_net, policy.value_net]
    theirs = [layer for layer in theirs if hasattr(layer, "weight")]
    for one, other in zip(ours, theirs, strict=True):
        other.load_state_dict(one.state_dict())
    obs = torch.randint(0, 256, (6, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        log_policy, values = agent(obs)
        expected = policy.get_distribution(obs).distribution
        torch.testing.assert_close(log_policy, expected.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, policy.predict_values(obs).squeeze(-1), atol=1e-5, rtol=1e-5)


# The update


def learn(agent, rollout, args, recorded=ppo.recorded):
    """Learn from a rollout, as in an iteration of `train`."""
    torch.manual_seed(1)
    optimizer, batch = torch.optim.Adam(agent.parameters(), eps=1e-5), ppo.make_batch(rollout, args)
    example = [torch.zeros_like(column[: len(column) // args.num_minibatches]) for column in batch]
    compute = recorded(lambda *columns: ppo.compute_gradients(agent, ppo.Batch(*columns), args), *example)
    return ppo.update(agent, optimizer, compute, batch, args, ATARI.make_state(args))


def on_static_memory(function, *examples):
    """Stand in for `recorded`: like a CUDA graph, each call overwrites the results of the one before."""
    inputs, results = [example.clone() for example in examples], None

    def replay(*values):
        nonlocal results
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)
        new = tree_map(torch.Tensor.detach, function(*inputs))
        results = (
            tree_map(torch.clone, new) if results is None else tree_map(torch.Tensor.copy_, results, new)
        )
        return results

    return replay


@pytest.mark.parametrize("clip_rewards", [True, False])
def test_forced_rows_weigh_0_and_metrics_leave_them_out(clip_rewards):
    """Advantages, returns and metrics agree with NumPy in float64. Rewards are clipped to their signs."""
    args = make_args(num_minibatches=1, update_epochs=1, clip_rewards=clip_rewards)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    before, learnt = rollout.rewards.copy(), ~rollout.forced
    batch, values = ppo.make_batch(rollout, args), float64(rollout.values)
    np.testing.assert_array_equal(rollout.rewards, before)
    rewards = np.clip(before, -1, 1) if clip_rewards else before
    next_values = np.where(rollout.truncated, float64(rollout.last_values), values[1:])
    ends = rollout.terminated, rollout.truncated
    advantages = direct_gae(rewards, values[:-1], *ends, args.gamma, args.gae_lambda, next_values)
    returns = advantages + values[:-1]
    columns = rollout.obs[:-1], rollout.actions, rollout.policies, values[:-1], advantages, returns, learnt
    for name, column, expected in zip(batch._fields, batch, columns, strict=True):
        column = column.unflatten(0, learnt.shape).numpy()
        np.testing.assert_allclose(column, np.asarray(expected), rtol=1e-5, atol=1e-5, err_msg=name)
    metrics = learn(agent, rollout, args)
    explained = 1 - advantages[learnt].var() / returns[learnt].var()
    error = np.sqrt((advantages[learnt] ** 2).mean() / (returns[learnt] ** 2).mean())
    assert metrics["explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert metrics["critic_error"] == pytest.approx(error, rel=1e-4)
    with torch.no_grad():
        new, _ = agent(rollout.obs[:-1].flatten(0, 1))
    old, new = float64(rollout.policies)[learnt], float64(new).reshape(*learnt.shape, -1)[learnt]
    assert metrics["kl"] == pytest.approx((np.exp(old) * (old - new)).sum(-1).mean(), rel=1e-3)
    of_all = 1 - advantages.var() / returns.var()
    assert abs(of_all - explained) > 1e-3, "the rows that are left out make no difference"


def test_from_a_minibatch_of_forced_rows_alone_nothing_is_learnt():
    """Its gradients are 0, and no number is NaN."""
    args = make_args()
    agent = make_agent(args)
    batch = ppo.make_batch(make_rollout(args, agent), args)
    batch = batch._replace(weights=torch.zeros_like(batch.weights))
    metrics = ppo.compute_gradients(agent, batch, args)
    assert not any(parameter.grad.any() for parameter in agent.parameters())
    assert np.isfinite([metric.item() for metric in metrics.values()]).all()
    assert ppo.mean_kl(agent, batch) == 0


@pytest.mark.parametrize("reward", [0, 1])
def test_where_all_returns_are_equal_there_is_no_explained_variance(reward):
    """It would be NaN or minus infinity. Those of forced rows do not count."""
    args = make_args(gamma=0.0)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    rollout.rewards[:] = np.where(rollout.forced, -1, reward)
    metrics = learn(agent, rollout, args)
    assert not {"explained_variance", "critic_error"} & metrics.keys()
    assert np.isfinite([*metrics.values()]).all()
    rollout.rewards[-1, -1] = -1
    assert {"explained_variance", "critic_error"} <= learn(agent, rollout, args).keys()


def test_metrics_keep_no_graph(monkeypatch):
    """A copy may add one without `detach`."""
    ppo_loss, args = ppo.ppo_loss, make_args()
    agent = make_agent(args)

    def changed(*arguments):
        loss, metrics = ppo_loss(*arguments)
        return loss, metrics | {"mine": loss * 2}

    monkeypatch.setattr(ppo, "ppo_loss", changed)
    metrics = ppo.compute_gradients(agent, ppo.make_batch(make_rollout(args, agent), args), args)
    assert not any(metric.requires_grad for metric in metrics.values())


def test_target_kl_stops_after_the_first_epoch_whose_last_minibatch_is_above_it():
    kls = []
    for epochs in (1, 2, 3):
        args = make_args(update_epochs=epochs, learning_rate=1e-4)
        agent = make_agent(args)
        kls.append(learn(agent, make_rollout(args, agent), args)["kl"])  # of the last minibatch
    for target_kl in (min(kls) / 2, (kls[0] + kls[1]) / 2, 1e9):
        args = make_args(update_epochs=3, learning_rate=1e-4, target_kl=target_kl)
        agent = make_agent(args)
        expected = next((kl for kl in kls if kl > target_kl), kls[-1])
        assert learn(agent, make_rollout(args, agent), args)["kl"] == expected


def test_each_epoch_permutes_all_rows():
    args = make_args(update_epochs=2)
    agent = make_agent(args)
    rollout, seen = make_rollout(args, agent), []
    agent.register_forward_pre_hook(lambda _, inputs: seen.extend(inputs[0].flatten(1).double().mean(1)))
    learn(agent, rollout, args)
    first, second, _ = torch.stack(seen).split([32, 32, 16])  # the last are for the KL divergence
    rows = rollout.obs[:-1].flatten(0, 1).flatten(1).double().mean(1)
    assert not torch.equal(first, second)
    for epoch in (first, second):
        assert torch.equal(epoch.sort()[0], rows.sort()[0])


def test_steps_recorded_as_a_cuda_graph_learn_the_same_as_plain_ones():
    """Weights, metrics and a rollout are the same, bit for bit, if each call overwrites the last results."""
    results = []
    for recorded in (ppo.recorded, on_static_memory):
        args = make_args(update_epochs=2)
        agent = make_agent(args)
        metrics = learn(agent, make_rollout(args, agent), args, recorded)
        with torch.no_grad():
            forward = recorded(agent, torch.zeros(2, 4, 84, 84, dtype=torch.uint8))
        torch.manual_seed(2)
        rollout, *_ = play(8, LIVES, CUT, forward=forward)
        assert rollout.truncated.any()
        columns = rollout.policies, rollout.values, rollout.actions, rollout.last_values
        results.append((weights(agent), metrics, *columns))
    (one, metrics, *rows), (other, other_metrics, *other_rows) = results
    assert torch.equal(one, other)
    assert metrics == other_metrics
    assert all(map(torch.equal, rows, other_rows))


# Runs


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Let the script play scripted games, with a small network, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        ppo, "make_envs", lambda args, num_envs: make_games(*[LIVES, SHORT] * (num_envs // 2))
    )
    monkeypatch.setattr(ppo, "Agent", SmallNetwork)
    Games.resets.clear()
    return tmp_path


RUN = SMALL | {"num_envs": 2, "total_timesteps": 40, "update_epochs": 1, "eval_episodes": 2}


def test_a_run_of_scripted_games_logs_resumes_and_evaluates(folder):
    """Two runs are the same. Statistics are of whole games, and a resumed run has new games.

    All steps count, also those in which FIRE was forced.
    """
    args = ppo.Args(**RUN)
    results = [ppo.train(args), ppo.train(args)]
    for result in results:
        assert result["greedy_returns"].tolist() == [10, 7]  # of the first games alone
        assert result["training_return"] == np.mean([10, 20, 30, 40, *range(7, 7 * 13, 7)])
    path, again = (Path(result["checkpoint"]) for result in results)
    content, data = load(path), curves(path.parent)
    assert same(content, load(again))
    (group,) = content["optimizer"]["param_groups"]
    assert (group["eps"], group["weight_decay"], tuple(group["betas"])) == (1e-5, 0, (0.9, 0.999))
    assert [*data["losses/kl"]] == [16, 32, 48]
    assert content["state"]["global_step"] == 48
    assert {slot["step"].item() for slot in content["optimizer"]["state"].values()} == {2 * 3}
    rates = args.learning_rate * (1 - np.array([0, 16, 32]) / 40)
    assert [*data["charts/learning_rate"].values()] == pytest.approx(rates)
    assert group["lr"] == pytest.approx(rates[-1])
    assert data["charts/episodic_return"][16] == (10 + 7 + 14 + 21 + 28) / 5
    assert data["charts/episodic_return_max"][16] == 28
    assert data["charts/episodic_length"][16] == pytest.approx((6 + 2 + 2 + 2 + 2) / 5)
    assert data["eval/greedy_return"] == {48: 8.5}
    ppo.train(replace(args, resume=str(path), total_timesteps=60))
    after, data = load(path), curves(path.parent)
    assert after["state"]["global_step"] == 64
    assert {slot["step"].item() for slot in after["optimizer"]["state"].values()} == {2 * 4}
    assert [*data["losses/kl"]] == [16, 32, 48, 64]
    seeds = [seed for seed, _ in Games.resets]
    assert seeds[:2] == seeds[2:4]
    assert len({*seeds[2:5]}) == 3
    assert seeds[5] == seeds[1]
    assert max(seeds) + 2 < 2**31  # the ALE takes no others


def test_init_begins_a_new_run_with_the_networks_of_a_checkpoint(folder):
    """The optimizer is new, and the step is 0. With a learning rate of 0, the networks stay as they are."""
    first = ppo.train(ppo.Args(**RUN))["checkpoint"]
    new = ppo.train(ppo.Args(**RUN | {"init": first, "total_timesteps": 1, "learning_rate": 0.0}))[
        "checkpoint"
    ]
    old, content = load(first), load(new)
    assert Path(new).parent != Path(first).parent
    assert same(content["agent"], old["agent"])
    assert content["state"]["global_step"] == 16
    assert {slot["step"].item() for slot in content["optimizer"]["state"].values()} == {2}


def test_latest_resumes_and_evaluates_the_newest_run(folder):
    """Its settings are those of the checkpoint. The run says how to resume and watch it."""
    done = call(ATARI, folder, *flags(**RUN, exp_name="a"))
    assert (done.status, done.err) == (0, "")
    assert re.findall(r"^(\w+): +python", done.out, re.M) == ["resume", "watch"]
    assert "do not compute the same policy" not in done.out
    again = call(ATARI, folder, "--evaluate", "latest", "--exp-name", "a", "--device", "cpu")
    assert (again.status, again.err) == (0, "")
    assert again.out in done.out
    assert (
        "evaluation return 8.5 +/- 1.5 in 2 games with the most likely actions, after 48 steps" in again.out
    )
    words = "--resume", "latest", "--exp-name", "a", "--device", "cpu"
    over = call(ATARI, folder, *words)  # it is finished, which is said
    assert over.status == 2
    assert "trained for 48 steps: raise --total-timesteps" in over.err
    more = call(ATARI, folder, *words, "--total-timesteps", 60)
    assert (more.status, more.err) == (0, "")
    assert load(checkpoint_in(folder))["state"]["global_step"] == 64


def test_an_evaluation_that_is_stopped_returns_nothing(folder, capsys):
    """The games that had ended would be the short ones."""
    results = ppo.train(ppo.Args(**RUN))
    assert len(results["greedy_returns"]) == 2
    capsys.readouterr()
    ppo.STOP.set()
    try:
        assert len(ppo.evaluate(results["checkpoint"], ppo.Args(**RUN))) == 0
    finally:
        ppo.STOP.clear()
    assert capsys.readouterr().out == ""


def test_ctrl_c_in_the_evaluation_at_the_end_leaves_a_complete_run(folder, monkeypatch):
    """It comes when one game of two has ended. The exit status is 0."""
    step, count = Games.step, []

    def interrupted(envs, actions):
        if len(Games.resets) == 2:
            count.append(1)
            if len(count) == 3:
                os.kill(os.getpid(), signal.SIGINT)
        return step(envs, actions)

    monkeypatch.setattr(Games, "step", interrupted)
    done = call(ATARI, folder, *flags(**RUN))
    assert done.status == 0
    assert len(count) == 3
    assert "evaluation return" not in done.out
    assert load(checkpoint_in(folder))["state"]["global_step"] == 48
    assert "eval/greedy_return" not in curves(checkpoint_in(folder).parent)


def test_numpy_numbers_are_accepted_as_settings(folder):
    """They are saved as plain numbers, so that the checkpoint loads."""
    settings = {"learning_rate": np.float64(1e-3), "num_steps": np.int64(16)}
    content = load(ppo.train(ppo.Args(**RUN | settings))["checkpoint"])
    assert (content["args"]["learning_rate"], content["args"]["num_steps"]) == (1e-3, 16)


def test_a_program_can_train_after_a_run_that_was_stopped(folder):
    """In a notebook, a second run did nothing."""
    ppo.STOP.set()
    assert len(ppo.train(ppo.Args(**RUN))["greedy_returns"]) == 2


def test_each_group_of_parameters_keeps_its_ratio_to_the_learning_rate(folder, monkeypatch):
    """Also in a resumed run."""

    def adam(parameters, rate, **others):
        parameters = [*parameters]
        return torch.optim.Adam(
            [{"params": parameters[:2]}, {"params": parameters[2:], "lr": rate / 4}], rate
        )

    monkeypatch.setattr(ppo, "Adam", adam)
    path = ppo.train(ppo.Args(**RUN))["checkpoint"]
    for more in ({}, {"resume": path, "total_timesteps": 60}):
        if more:
            ppo.train(ppo.Args(**RUN | more))
        first, second = load(path)["optimizer"]["param_groups"]
        assert 0 < first["lr"] < ppo.Args.learning_rate
        assert second["lr"] == pytest.approx(first["lr"] / 4)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, None])
def test_environments_that_do_not_reset_in_the_same_step_are_refused(mode, folder, monkeypatch):
    """Their rollouts would have rows that are no transitions. Nothing is written."""
    monkeypatch.setattr(Games, "metadata", {"autoreset_mode": mode} if mode else {})
    with pytest.raises(ppo.Refused, match="same step"):
        ppo.train(ppo.Args(**RUN))
    assert os.listdir(folder) == []


def test_a_policy_for_other_actions_is_refused(folder):
    """The simulator would wait for ever, or press other buttons."""
    args = ppo.Args(**RUN)
    for num_actions in (9, 4):  # the scripted games have 5
        content = {"args": vars(args), "agent": ppo.Agent(args, num_actions).state_dict(), "state": {}}
        torch.save(content, "checkpoint.pt")
        with pytest.raises(ppo.Refused, match=f"{num_actions} actions"):
            ppo.evaluate("checkpoint.pt", args)


def test_no_games_to_evaluate_are_refused(folder):
    """The simulator would break off with a segmentation fault."""
    with pytest.raises(ppo.Refused, match="--eval-episodes must be at least 1"):
        ppo.evaluate("checkpoint.pt", ppo.Args(**RUN | {"eval_episodes": 0}))


def test_settings_that_a_checkpoint_would_forget_are_refused():
    """A program may pass settings of a class of its own, and not put it in the place of `Args`."""

    @dataclass
    class Mine(ppo.Args):
        sizes: int = 64

    with pytest.raises(ppo.Refused, match=r"would forget .*sizes"):
        ppo.train(Mine())


@pytest.mark.slow
def test_training_on_a_game_is_the_same_with_evaluations_and_without(tmp_path, monkeypatch):
    """All games are cut by the frame limit, after 10 steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo, "Agent", SmallNetwork)
    kwargs = '{"max_num_frames_per_episode": 40, "noop_max": 0}'
    args = make_args(env_kwargs=kwargs, eval_episodes=2, total_timesteps=96)
    never, often = (load(ppo.train(replace(args, eval_every=every))["checkpoint"]) for every in (0, 1))
    assert same(never["agent"], often["agent"])
    assert same(never["optimizer"], often["optimizer"])
    assert len(never["state"]["returns"]) == len(often["state"]["returns"]) == 4 * 2


@pytest.mark.slow
def test_a_loaded_policy_plays_the_evaluation_which_records_a_video(tmp_path):
    """A loaded policy takes one observation or several. Returns are of the first games, and unclipped."""
    settings = {"env_id": "ALE/MsPacman-v5", "env_kwargs": '{"max_num_frames_per_episode": 600}'}
    args = make_args(**settings, eval_episodes=3)
    agent, path = make_agent(args, 9), tmp_path / "checkpoint.pt"
    torch.save({"args": vars(args), "agent": agent.state_dict(), "state": {"global_step": 7}}, path)
    policy = ppo.load_policy(path)
    obs = np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    with torch.no_grad():
        greedy = agent(torch.from_numpy(obs))[0].argmax(-1).tolist()
    assert policy(obs).tolist() == [policy(one).item() for one in obs] == greedy
    envs = ppo.make_envs(args, 3)
    obs, _ = envs.reset(seed=ppo.hash_seed(1, 2**40) // 2)
    returns, over = np.zeros(3), np.zeros(3, bool)
    while not over.all():
        obs, rewards, _, _, infos = envs.step(policy(obs))
        returns += rewards * ~over
        over |= infos["game_over"]
    assert returns.max() > 20  # a pellet is worth 10
    np.testing.assert_array_equal(ppo.evaluate(path, replace(args, capture_video=True)), returns)
    assert len([*tmp_path.glob("videos/*.mp4")]) == 1
