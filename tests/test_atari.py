"""Tests of ppo_atari.py: DeepMind's protocol, rollouts, the convolutional network, updates and runs."""

from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import scipy.stats
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from helpers import ATARI, curves, direct_gae, float64, load, random_ends, same, weights
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
    """Return a rollout of random images and rewards, with actions that the agent has sampled."""
    rng = np.random.default_rng(seed)
    rollout = ppo.Rollout(args, agent.actor.out_features)
    shape = args.num_steps, args.num_envs
    rollout.terminated, rollout.truncated, rollout.valid = random_ends(rng, *shape, chance)
    rollout.obs = torch.from_numpy(rng.integers(0, 256, (shape[0] + 1, shape[1], 4, 84, 84), dtype=np.uint8))
    rollout.rewards = np.sign(rng.normal(size=shape)).astype(np.float32) * rollout.valid
    torch.manual_seed(seed)
    with torch.no_grad():
        policies, values = agent(rollout.obs.flatten(0, 1))
    rollout.values = values.unflatten(0, (-1, shape[1]))
    rollout.policies = policies.unflatten(0, (-1, shape[1]))[:-1]
    rollout.actions = torch.distributions.Categorical(logits=rollout.policies).sample().numpy()
    return rollout


# The protocol: DeepMind's. Gymnasium has an implementation of its own.


class Fire(gym.Wrapper):
    """It presses FIRE for one frame after a reset."""

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        obs, _, _, _, info = self.env.step(1)
        return obs, info


def reference(game, fire):
    """Return a game with Gymnasium's wrappers, which starts without frames without an action."""
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = AtariPreprocessing(Fire(env) if fire else env, noop_max=0, frame_skip=4, screen_size=84)
    return FrameStackObservation(env, 4, padding_type="zero")


@pytest.mark.parametrize(
    ("game", "fire", "steps"),
    [
        ("Breakout", True, 700),
        pytest.param("MsPacman", False, 700, marks=pytest.mark.slow),  # it has lives and no FIRE button
        pytest.param("Pong", True, 1100, marks=pytest.mark.slow),
        pytest.param("Freeway", False, 300, marks=pytest.mark.slow),  # it has neither
    ],
)
def test_images_rewards_and_ends_are_those_of_gymnasiums_wrappers(game, fire, steps):
    """Four images in their order, frame numbers and scores agree as well, over whole games.

    Gymnasium's wrappers do not end episodes at lost lives, so the test counts lives.
    """
    envs = ppo.make_envs(make_args(env_id=f"{game}NoFrameskip-v4", env_kwargs='{"noop_max": 0}'), 1)
    env = reference(game, fire)
    obs, info = envs.reset(seed=3)
    expected, expected_info = env.reset(seed=3)
    lives, lost, over, games, score = expected_info["lives"], False, False, 0, 0.0
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(obs[0], expected)
    for _ in range(steps):
        action = int(rng.integers(env.action_space.n))
        obs, reward, terminated, truncated, info = envs.step(np.array([action]))
        if over:  # the step that resets
            expected, expected_info = env.reset()
            raw, over, cut, lost, score = 0.0, False, False, False, 0.0
        else:
            forced = (1 if fire else 0) if lost else action
            expected, raw, over, cut, expected_info = env.step(forced)
            score += raw
            lost = expected_info["lives"] < lives and not over
        lives = expected_info["lives"]
        np.testing.assert_array_equal(obs[0], expected)
        assert reward[0] == np.sign(raw)
        assert terminated[0] == (over or lost)
        assert truncated[0] == cut
        assert info["episode_frame_number"][0] == expected_info["episode_frame_number"]
        assert ("episode" in info) == over
        if over:
            assert info["episode"]["r"][0] == score
            games += 1
    assert games >= 1 or game == "Freeway"


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


LIVES = (0, 3, 0, 0), (5, 3, 0, 0), (-2, 2, 0, 0), (7, 2, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)


class Scripted(gym.vector.VectorEnv):
    """The games follow scripts of (reward, lives, terminated, truncated). Images show the step.

    They reset in the step after an end, as the ALE's do. The second game pays twice the rewards, and so on.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_action_space = spaces.Discrete(5)
    resets = []  # noqa: RUF012 - the seed of each, and a list of the actions that follow

    def __init__(self, *scripts):
        self.scripts, self.num_envs = scripts, len(scripts)

    def reset(self, seed=None, **_):
        self.at, self.over = np.full(self.num_envs, -1), np.zeros(self.num_envs, bool)
        self.games, self.actions = np.ones(self.num_envs), []
        self.resets.append((seed, self.actions))
        return self.images(), {"lives": np.full(self.num_envs, 3)}

    def images(self):
        shape = self.num_envs, 4, 84, 84
        return np.broadcast_to((self.at + 1)[:, None, None, None], shape).astype(np.uint8)

    def step(self, actions):
        self.actions.append(actions.tolist())
        self.at = np.where(self.over, -1, self.at + 1)
        self.games += self.over
        rows = [
            (0, 3, 0, 0) if at < 0 else script[at] for at, script in zip(self.at, self.scripts, strict=True)
        ]
        rewards, lives, terminated, truncated = (np.array(column) for column in zip(*rows, strict=True))
        self.over = terminated.astype(bool) | truncated.astype(bool)
        return self.images(), rewards * self.games, terminated > 0, truncated > 0, {"lives": lives}


def scripted(*scripts, button=1, clip_rewards=True):
    games = gym.wrappers.vector.RecordEpisodeStatistics(Scripted(*scripts))
    return ppo.LostLives(games, button, clip_rewards)


def play(num_steps, *scripts, forward=None):
    """Return a rollout of scripted games, the games that ended, the environments and the agent."""
    args = make_args(num_envs=len(scripts), num_steps=num_steps)
    agent, envs = make_agent(args), scripted(*scripts)
    rollout = ppo.Rollout(args, 5)
    rollout.obs[-1] = torch.from_numpy(envs.reset()[0])
    return rollout, ppo.collect_rollout(envs, forward or agent, rollout, args), envs, agent


def test_a_lost_life_ends_an_episode_but_not_the_game():
    """The row after an end is a filler, and statistics are of whole games."""
    rollout, episodes, envs, _ = play(12, LIVES, LIVES)
    # steps of a game: 0 1 2(life lost) 3(forced) 4(life lost) 5(forced, game over) then the reset, and again
    ends, valid = [0, 0, 1, 0, 1, 1, 0], [1, 1, 1, 0, 1, 0, 0]
    assert rollout.terminated[:, 0].astype(int).tolist() == [*ends, *ends[:5]]
    assert rollout.valid[:, 0].astype(int).tolist() == [*valid, *valid[:5]]
    assert not rollout.truncated.any()
    assert rollout.rewards[:7, 0].tolist() == [0, 1, -1, 1, 0, 0, 0]
    actions = np.array(envs.unwrapped.actions)
    assert (actions[[3, 5, 10]] == 1).all()
    free = [0, 1, 2, 4, 7, 8, 9, 11]
    np.testing.assert_array_equal(actions[free], rollout.actions[free])
    assert episodes == [(10.0, 6), (10.0, 6)]
    assert rollout.obs[:8, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


def test_the_row_after_a_time_limit_is_a_filler():
    """A life that is lost in the last step ends the episode as well."""
    for lives, dead in ((3, False), (2, True)):
        script = (0, 3, 0, 0), (0, lives, 0, 1)
        rollout, episodes, envs, agent = play(8, script, script)
        assert rollout.truncated[:6, 0].astype(int).tolist() == [0, 1, 0, 0, 1, 0]
        assert rollout.terminated[:6, 0].astype(int).tolist() == [0, dead, 0, 0, dead, 0]
        assert rollout.valid[:6, 0].astype(int).tolist() == [1, 1, 0, 1, 1, 0]
        assert [length for _, length in episodes] == [2] * 6
        ppo.collect_rollout(envs, agent, rollout, make_args(num_envs=2))  # the last row was cut
        assert rollout.valid[:, 0].astype(int).tolist() == [0, 1, 1, 0, 1, 1, 0, 1]


def test_a_rollout_continues_where_the_last_one_ended():
    """A filler row may be the first one. Policies and values of all images are stored."""
    rollout, _, envs, agent = play(6, LIVES, LIVES)
    last = rollout.obs[-1].clone()
    ppo.collect_rollout(envs, agent, rollout, make_args(num_envs=2, num_steps=6))
    assert torch.equal(rollout.obs[0], last)
    assert rollout.valid[:, 0].astype(int).tolist() == [0, 1, 1, 1, 0, 1]
    with torch.no_grad():
        log_policy, values = agent(rollout.obs.flatten(0, 1))
    torch.testing.assert_close(rollout.values.flatten(), values)
    torch.testing.assert_close(rollout.policies.flatten(0, 1), log_policy[:-2])


def test_actions_are_samples_of_the_policy():
    """The policy is the same for all images here."""
    policy, args = torch.tensor([0.6, 0.25, 0.1, 0.04, 0.01]), make_args(num_envs=50, num_steps=40)
    envs, rollout = scripted(*[LIVES] * 50), ppo.Rollout(args, 5)
    envs.reset()
    torch.manual_seed(0)
    ppo.collect_rollout(envs, lambda obs: (policy.log(), torch.zeros(50)), rollout, args)
    counts = np.bincount(rollout.actions.flatten(), minlength=5)
    assert scipy.stats.chisquare(counts, policy * 2000).pvalue > 1e-4


def test_rewards_may_be_unclipped_and_a_game_without_fire_starts_without_an_action():
    envs = scripted(LIVES, LIVES, button=0, clip_rewards=False)
    envs.reset()
    assert [envs.step(np.array([4, 4]))[1][0] for _ in range(4)] == [0, 5, -2, 7]
    assert envs.unwrapped.actions == [[4, 4], [4, 4], [4, 4], [0, 0]]


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


def test_filler_rows_weigh_0_and_metrics_leave_them_out():
    """Advantages, returns and metrics agree with NumPy in float64."""
    args = make_args(num_minibatches=1, update_epochs=1)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    batch, valid = ppo.make_batch(rollout, args), rollout.valid
    ends, values = (rollout.terminated, rollout.truncated), float64(rollout.values)
    advantages = direct_gae(rollout.rewards.astype(float), values, *ends, args.gamma, args.gae_lambda)
    returns = advantages + values[:-1]
    columns = rollout.obs[:-1], rollout.actions, rollout.policies, values[:-1], advantages, returns, valid
    for name, column, expected in zip(batch._fields, batch, columns, strict=True):
        column = column.unflatten(0, valid.shape).numpy()
        np.testing.assert_allclose(column[valid], np.asarray(expected)[valid], atol=1e-5, err_msg=name)
    assert (batch.weights == 0).sum() == (~valid).sum() > 0
    metrics = learn(agent, rollout, args)
    explained = 1 - advantages[valid].var() / returns[valid].var()
    error = np.sqrt((advantages[valid] ** 2).mean() / (returns[valid] ** 2).mean())
    assert metrics["explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert metrics["critic_error"] == pytest.approx(error, rel=1e-4)
    with torch.no_grad():
        new, _ = agent(rollout.obs[:-1].flatten(0, 1))
    old, new = float64(rollout.policies)[valid], float64(new).reshape(*valid.shape, -1)[valid]
    assert metrics["kl"] == pytest.approx((np.exp(old) * (old - new)).sum(-1).mean(), rel=1e-3)


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
        rollout, *_ = play(8, LIVES, LIVES, forward=forward)
        results.append((weights(agent), metrics, rollout.policies, rollout.values))
    (one, metrics, *rows), (other, other_metrics, *other_rows) = results
    assert torch.equal(one, other)
    assert metrics == other_metrics
    assert all(map(torch.equal, rows, other_rows))


# The command line


SHORT = (4, 3, 0, 0), (3, 3, 1, 0)


def make_scripted(args, num_envs, **_):
    """Stand in for `make_envs`."""
    return scripted(*[LIVES, SHORT] * (num_envs // 2))


def test_a_run_of_scripted_games_logs_resumes_and_evaluates(tmp_path, monkeypatch):
    """Two runs are the same. Statistics are of whole games, and a resumed run has new games."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo, "make_envs", make_scripted)
    Scripted.resets.clear()
    args = make_args(num_envs=2, total_timesteps=40, update_epochs=1, eval_episodes=2)
    results = [ppo.train(args), ppo.train(args)]
    for result in results:
        assert result["greedy_returns"].tolist() == [10, 7]  # of the first games alone
    path, again = (Path(result["checkpoint"]) for result in results)
    content, data = load(path), curves(path.parent)
    assert same(content, load(again))
    (group,) = content["optimizer"]["param_groups"]
    assert (group["eps"], group["weight_decay"], tuple(group["betas"])) == (1e-5, 0, (0.9, 0.999))
    steps = [*data["losses/kl"]]
    assert (
        steps[0] == 5 + 6
    )  # see `test_a_lost_life_ends_an_episode_but_not_the_game`; each third row is a filler
    assert {slot["step"].item() for slot in content["optimizer"]["state"].values()} == {2 * len(steps)}
    rates = args.learning_rate * (1 - np.array([0, *steps[:-1]]) / 40)
    assert [*data["charts/learning_rate"].values()] == pytest.approx(rates)
    assert group["lr"] == pytest.approx(rates[-1])
    assert data["charts/episodic_return"][steps[0]] == (10 + 7 + 14 + 21) / 4
    assert data["charts/episodic_length"][steps[0]] == (6 + 2 + 2 + 2) / 4
    ppo.train(replace(args, resume=str(path), total_timesteps=60))
    assert load(path)["state"]["global_step"] >= 60
    seeds = [seed for seed, _ in Scripted.resets]
    assert seeds[:2] == seeds[2:4]
    assert len({*seeds[2:5]}) == 3
    assert seeds[5] == seeds[1]


@pytest.mark.slow
def test_a_loaded_policy_plays_the_evaluation_which_records_a_video(tmp_path):
    """A loaded policy takes one observation or several."""
    settings = {"env_id": "ALE/MsPacman-v5", "env_kwargs": '{"max_num_frames_per_episode": 600}'}
    args = make_args(**settings, eval_episodes=3, clip_rewards=False)
    agent, path = make_agent(args, 9), tmp_path / "checkpoint.pt"
    torch.save({"args": vars(args), "agent": agent.state_dict(), "state": {"global_step": 7}}, path)
    policy = ppo.load_policy(path)
    obs = np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    with torch.no_grad():
        greedy = agent(torch.from_numpy(obs))[0].argmax(-1).tolist()
    assert policy(obs).tolist() == [policy(one).item() for one in obs] == greedy
    envs = ppo.make_envs(args, 3)
    obs, _ = envs.reset(seed=ppo.seed_everything(1) % 2**29 + 2**30)
    returns = np.zeros(3)
    for _ in range(120):
        obs, rewards, *_ = envs.step(policy(obs))
        returns += rewards
    assert returns.max() > 20  # unclipped: a pellet is worth 10
    assert (ppo.evaluate(path, replace(args, capture_video=True)) >= returns).all()
    assert len([*tmp_path.glob("videos/*.mp4")]) == 1
