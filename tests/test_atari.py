"""What is ppo_atari.py's own: DeepMind's protocol, the convolutional network, several processes."""

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from cli_helpers import (
    Script,
    assert_refused,
    call,
    checkpoint_in,
    curves,
    environment,
    load,
    same,
    steps_done,
)
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from helpers import direct_gae, float64, random_ends
from stable_baselines3.common.policies import ActorCriticCnnPolicy

import ppo as ppo_discrete
import ppo_atari as ppo

ATARI = Script(ppo)
SMALL = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "num_threads": 1, "device": "cpu"}
QUICK = ["--env-id", "Pong", "--num-envs", 2, "--num-steps", 16, "--num-minibatches", 2, "--num-threads", 1]
QUICK += ["--device", "cpu", "--eval-episodes", 2, "--eval-max-steps", 60]


def make_args(**changes):
    return ppo.Args(**{**SMALL, **changes})


def make_agent(args, num_actions=5, seed=0):
    """An agent whose policy depends on what it sees."""
    torch.manual_seed(seed)
    agent = ppo.Agent(args, spaces.Discrete(num_actions))
    with torch.no_grad():
        agent.actor.weight.mul_(100)
    return agent


def make_state(args):
    return ppo.State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)


def make_rollout(args, agent, seed=0, chance=0.2):
    """A rollout of all processes, of random images and rewards, with actions that the agent has sampled."""
    rng = np.random.default_rng(seed)
    rollout = ppo.Rollout(args, agent)
    shape = args.num_steps, args.num_envs
    rollout.terminated, rollout.truncated, rollout.valid = random_ends(rng, *shape, chance)
    rollout.obs = torch.from_numpy(rng.integers(0, 256, (shape[0] + 1, shape[1], 4, 84, 84), dtype=np.uint8))
    rollout.rewards = np.sign(rng.normal(size=shape)).astype(np.float32) * rollout.valid
    torch.manual_seed(seed)
    with torch.no_grad():
        steps = [agent.act(obs, ppo.gumbel_noise(shape[1], agent.num_actions)) for obs in rollout.obs]
    rollout.actions = torch.stack([actions for actions, _, _ in steps[:-1]]).numpy()
    rollout.policies = torch.stack([log_policy for _, log_policy, _ in steps[:-1]])
    rollout.values = torch.stack([values for _, _, values in steps])
    return rollout


# The protocol: DeepMind's. Gymnasium has an implementation of its own.


class Fire(gym.Wrapper):
    """Presses FIRE for one frame after a reset."""

    def reset(self, **kwargs):
        self.env.reset(**kwargs)
        obs, _, _, _, info = self.env.step(1)
        return obs, info


def reference(game, fire):
    """One game by Gymnasium's wrappers, without frames without an action at the start."""
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    env = AtariPreprocessing(Fire(env) if fire else env, noop_max=0, frame_skip=4, screen_size=84)
    return FrameStackObservation(env, 4, padding_type="zero")


@pytest.mark.parametrize(
    ("game", "fire", "steps"),
    [("Breakout", True, 700), ("Pong", True, 1100), ("MsPacman", False, 700), ("Freeway", False, 300)],
)
def test_the_protocol_is_gymnasiums(game, fire, steps):
    """Step by step the same four images in their order, rewards, ends and frame numbers, over whole games.

    MsPacman has lives and no FIRE button, Freeway neither. The reference's lost lives are counted here.
    """
    envs = ppo.make_envs(make_args(env_id=f"{game}NoFrameskip-v4", env_kwargs="noop_max=0"), 1)
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
        assert ("episode_statistics" in info) == over
        if over:
            assert info["episode_statistics"]["r"][0] == score
            games += 1
    assert games >= 1 or game == "Freeway"


@pytest.mark.slow
@pytest.mark.parametrize(("game", "most", "fire"), [("Breakout", 28, 1), ("Freeway", 29, 0)])
def test_how_games_begin(game, most, fire):
    """A frame of FIRE where there is that button, then 0 to 28 frames without action, else 0 to 29."""
    envs, frames = ppo.make_envs(make_args(env_id=game), 8), set()
    for seed in range(8):
        _, info = envs.reset(seed=100 * seed)
        frames |= set((info["episode_frame_number"] - fire).tolist())
    envs.close()
    assert frames <= set(range(most + 1))
    assert len(frames) > 15


def test_a_game_is_cut_after_its_frames():
    """The ALE's time limit truncates; the limit is its default, half an hour at 60 frames a second."""
    envs = ppo.make_envs(make_args(env_id="Pong", env_kwargs="max_num_frames_per_episode=400"), 1)
    envs.reset(seed=1)
    ends = [envs.step(np.array([0]))[2:4] for _ in range(105)]
    assert sum(truncated[0] for _, truncated in ends) == 1
    assert not any(terminated[0] for terminated, _ in ends)
    assert inspect.signature(AtariVectorEnv).parameters["max_num_frames_per_episode"].default == 108_000


def first_images(**settings):
    envs = ppo.make_envs(make_args(**settings), 2)
    envs.reset(seed=5)
    images = [envs.step(np.array([2 + t // 3 % 2, 3]))[0] for t in range(40)]
    envs.close()
    return np.stack(images)


def test_names_of_a_game_and_sticky_actions():
    """The names by which users know a game mean the same; sticky actions are off unless asked for."""
    names = "Breakout", "BreakoutNoFrameskip-v4", "BreakoutDeterministic-v0", "ALE/Breakout-v5"
    first, *others = [first_images(env_id=name) for name in names]
    assert all(np.array_equal(first, other) for other in others)
    assert not np.array_equal(first, first_images(env_id="Breakout", sticky_actions=0.25))
    assert not np.array_equal(first, first_images(env_id="Breakout", env_kwargs="noop_max=0"))


REFUSALS = {
    "--env-id Brekout-v5": "the ALE has no game Brekout; the closest names are Breakout",
    "--env-id CartPole-v1": "the ALE has no game CartPole",
    "--env-id ALE/NoSuchGame-v5": "the ALE has no game NoSuchGame",
    "--env-kwargs img_width=80": "(4, 84, 80)",
    "--env-kwargs no_such_argument=1": "no_such_argument",
    "--env-kwargs num_envs=3": "num_envs",
    "--env-kwargs episodic_life=True": "episodic_life",
    "--env-kwargs continuous=True": "continuous",
    "--num-minibatches 513": "--num-minibatches must be at most 512",
    "--sticky-actions 1.5": "--sticky-actions is 1.5",
    "--num-steps 7": "--num-steps is 7",
    "--no-clip-rewards --no-norm-adv": "several epochs need --norm-adv or --clip-rewards",
    "--device cuda": "cuda",
}


@pytest.mark.parametrize("flags", REFUSALS)
def test_refusals(flags, tmp_path):
    """One line that says what is wrong and never sends a user to another script; nothing is written."""
    if flags == "--device cuda" and torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    result = call(ATARI, tmp_path, *flags.split())
    assert_refused(result, tmp_path, REFUSALS[flags])
    assert "use ppo" not in result.err


# Rollouts


LIVES = (0, 3, 0, 0), (5, 3, 0, 0), (-2, 2, 0, 0), (7, 2, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)


class Scripted(gym.vector.VectorEnv):
    """Games that follow scripts of (reward, lives, terminated, truncated). Images show the step.

    They reset in the step after an end, as the ALE's do, and keep the actions that reach them.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_action_space = spaces.Discrete(5)

    def __init__(self, *scripts):
        self.scripts, self.num_envs = scripts, len(scripts)

    def reset(self, **_):
        self.at, self.over = np.full(self.num_envs, -1), np.zeros(self.num_envs, bool)
        self.actions = []
        return self.images(), {"lives": np.full(self.num_envs, 3)}

    def images(self):
        shape = self.num_envs, 4, 84, 84
        return np.broadcast_to((self.at + 1)[:, None, None, None], shape).astype(np.uint8)

    def step(self, actions):
        self.actions.append(actions.tolist())
        self.at = np.where(self.over, -1, self.at + 1)
        rows = [
            (0, 3, 0, 0) if at < 0 else script[at] for at, script in zip(self.at, self.scripts, strict=True)
        ]
        rewards, lives, terminated, truncated = (np.array(column) for column in zip(*rows, strict=True))
        self.over = terminated.astype(bool) | truncated.astype(bool)
        return self.images(), rewards.astype(float), terminated > 0, truncated > 0, {"lives": lives}


def scripted(*scripts, button=1, clip_rewards=True):
    games = gym.wrappers.vector.RecordEpisodeStatistics(Scripted(*scripts), stats_key="episode_statistics")
    return ppo.LostLives(games, button, clip_rewards)


def play(num_steps, *scripts):
    """A rollout of scripted games, and what it was collected with."""
    args = make_args(num_envs=len(scripts), num_steps=num_steps)
    agent, envs = make_agent(args), scripted(*scripts)
    rollout = ppo.Rollout(args, agent)
    rollout.obs[-1] = torch.from_numpy(envs.reset()[0])
    ppo.collect_rollout(envs, agent, rollout)
    return rollout, envs, agent


def test_lost_lives_and_filler_rows():
    """Lost lives end episodes, not games; the row after an end is a filler; statistics are of whole games."""
    rollout, envs, _ = play(12, LIVES, LIVES)
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
    assert rollout.episodes == [(10.0, 6), (10.0, 6)]
    assert rollout.obs[:8, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4, 5, 6, 0]


def test_one_game_ends_as_another_loses_a_life():
    """Only the game that ended is reported."""
    rollout, *_ = play(5, ((0, 3, 0, 0), (1, 3, 0, 0), (4, 3, 1, 0)), LIVES)
    assert rollout.terminated[2].all()
    assert rollout.episodes == [(5.0, 3)]


def test_the_row_after_a_time_limit_is_a_filler():
    """A game that is cut: the next row resets. A life lost in the last step ends the episode as well."""
    for lives, dead in ((3, False), (2, True)):
        script = (0, 3, 0, 0), (0, lives, 0, 1)
        rollout, envs, agent = play(8, script, script)
        assert rollout.truncated[:6, 0].astype(int).tolist() == [0, 1, 0, 0, 1, 0]
        assert rollout.terminated[:6, 0].astype(int).tolist() == [0, dead, 0, 0, dead, 0]
        assert rollout.valid[:6, 0].astype(int).tolist() == [1, 1, 0, 1, 1, 0]
        assert [length for _, length in rollout.episodes] == [2] * 6
        ppo.collect_rollout(envs, agent, rollout)  # the last row was cut
        assert rollout.valid[:, 0].astype(int).tolist() == [0, 1, 1, 0, 1, 1, 0, 1]


def test_a_rollout_continues_where_the_last_ended():
    """Filler rows carry over; the policy and the values of what was seen are stored."""
    rollout, envs, agent = play(6, LIVES, LIVES)
    last = rollout.obs[-1].clone()
    ppo.collect_rollout(envs, agent, rollout)
    assert torch.equal(rollout.obs[0], last)
    assert rollout.valid[:, 0].astype(int).tolist() == [0, 1, 1, 1, 0, 1]
    with torch.no_grad():
        log_policy, values = agent(rollout.obs.flatten(0, 1))
    torch.testing.assert_close(rollout.values.flatten(), values)
    torch.testing.assert_close(rollout.policies.flatten(0, 1), log_policy[:-2])


def test_a_rollout_is_what_the_game_showed():
    """Played again with the same seed and actions, a game gives the images, rewards and ends of a rollout."""
    args = make_args(env_id="Breakout", num_envs=2, num_steps=60)
    envs = ppo.make_envs(args, 2)
    rollout = ppo.Rollout(args, agent := make_agent(args, 4))
    rollout.obs[-1] = torch.from_numpy(envs.reset(seed=7)[0])
    ppo.collect_rollout(envs, agent, rollout)
    again = ppo.make_envs(args, 2)
    np.testing.assert_array_equal(rollout.obs[0], again.reset(seed=7)[0])
    for t in range(60):
        obs, rewards, terminated, *_ = again.step(rollout.actions[t])
        np.testing.assert_array_equal(rollout.obs[t + 1], obs)
        np.testing.assert_array_equal(rollout.rewards[t], rewards)
        np.testing.assert_array_equal(rollout.terminated[t], terminated)
    assert rollout.terminated.any()


def test_actions_are_sampled_anew():
    """Of a uniform policy, each step's and each rollout's actions differ, and none is rare."""
    args = make_args(num_envs=64, num_steps=40)
    agent, envs = ppo.Agent(args, spaces.Discrete(5)), scripted(*[LIVES] * 64)
    torch.nn.init.zeros_(agent.actor.weight)
    rollout = ppo.Rollout(args, agent)
    rollout.obs[-1] = torch.from_numpy(envs.reset()[0])
    actions = []
    for _ in range(2):
        ppo.collect_rollout(envs, agent, rollout)
        actions += rollout.actions.tolist()
    assert len(np.unique(actions, axis=0)) == 80
    assert np.bincount(np.ravel(actions)) / 5120 == pytest.approx([0.2] * 5, abs=0.03)


def test_unclipped_rewards_and_no_fire():
    """Rewards as the game gives them, where they are asked for; no operation where there is no FIRE."""
    envs = scripted(LIVES, LIVES, button=0, clip_rewards=False)
    envs.reset()
    assert [envs.step(np.array([4, 4]))[1][0] for _ in range(4)] == [0, 5, -2, 7]
    assert envs.unwrapped.actions == [[4, 4], [4, 4], [4, 4], [0, 0]]


# The network


def test_the_network_is_stable_baselines3s():
    """The outputs of its NatureCNN policy with our weights: sizes, order of layers, scaling of images."""
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


def test_initial_weights():
    """Orthogonal, with the gains of [37], and near-uniform policies at first."""
    agent = ppo.Agent(make_args(), spaces.Discrete(6))
    gains = {agent.trunk[index]: 2**0.5 for index in (0, 2, 4, 7)} | {agent.actor: 0.01, agent.critic: 1.0}
    for layer, gain in gains.items():
        matrix = layer.weight.flatten(1) / gain
        product = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
        torch.testing.assert_close(product, torch.eye(len(product)), atol=1e-4, rtol=1e-4)
        assert not layer.bias.any()


def test_bfloat16_and_compile():
    """Products in bfloat16 change policies and values a little, a compiled network hardly at all."""
    obs = torch.randint(0, 256, (32, 4, 84, 84), dtype=torch.uint8)
    exact, rounded, compiled = (
        make_agent(make_args()),
        make_agent(make_args(bfloat16=True)),
        make_agent(make_args()),
    )
    compiled.compile(mode="reduce-overhead", dynamic=False)  # as `train` does
    with torch.no_grad():
        for x, near, equal in zip(exact(obs), rounded(obs), compiled(obs), strict=True):
            assert near.dtype == torch.float32
            assert 0 < (x - near).abs().max() < 0.05 * (1 + x.abs().max())
            torch.testing.assert_close(x, equal, atol=1e-4, rtol=1e-4)


# The update


def learn(agent, rollout, args, optimizer=None):
    """An iteration's learning, as in `train`."""
    optimizer = optimizer or torch.optim.Adam(agent.parameters(), eps=1e-5)
    batch, metrics = ppo.make_batch(agent, rollout, args)
    torch.manual_seed(1)
    step = partial(ppo.gradient_step, agent, optimizer, args, make_state(args))
    return metrics | ppo.update(agent, step, batch, args)


def test_a_batch():
    """Returns, explained variance and error are those of the valid rows; the policy that acted learns."""
    args = make_args()
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    batch, metrics = ppo.make_batch(agent, rollout, args)
    ends, values = (rollout.terminated, rollout.truncated), float64(rollout.values)
    advantages = direct_gae(rollout.rewards.astype(float), values, *ends, args.gamma, args.gae_lambda)
    valid, returns = rollout.valid, advantages + values[:-1]
    np.testing.assert_allclose(batch.returns.reshape(returns.shape)[valid], returns[valid], atol=1e-5)
    np.testing.assert_array_equal(batch.weights.reshape(returns.shape), valid)
    explained = 1 - advantages[valid].var() / returns[valid].var()
    error = np.sqrt((advantages[valid] ** 2).mean() / (returns[valid] ** 2).mean())
    assert metrics["explained_variance"] == pytest.approx(explained, abs=1e-4)
    assert metrics["critic_error"] == pytest.approx(error, rel=1e-4)
    assert metrics["policy_mismatch"] < 1e-5
    rollout.policies[1, 2] += 0.5
    assert ppo.make_batch(agent, rollout, args)[1]["policy_mismatch"] == pytest.approx(0.5, abs=1e-4)


def test_what_filler_rows_hold_does_not_matter():
    """Wild actions, rewards and policies of filler rows change no weight and no metric of the update."""
    results = []
    for wild in (False, True):
        args = make_args(update_epochs=2)
        agent = make_agent(args)
        rollout = make_rollout(args, agent)
        filler = ~rollout.valid
        assert filler.sum() >= 4
        if wild:
            rollout.rewards[filler], rollout.actions[filler] = 1e6, 4
            rollout.policies[torch.from_numpy(filler)] = -3.0
        metrics = learn(agent, rollout, args)
        results.append(([*agent.parameters()], {name: metrics[name] for name in (*ppo.METRICS, "kl")}))
    assert all(torch.equal(one, other) for one, other in zip(results[0][0], results[1][0], strict=True))
    assert results[0][1] == results[1][1]


def test_a_network_may_change():
    """A replaced layer learns, and a parameter that is not used does no harm."""
    args = make_args()
    agent = make_agent(args)
    agent.trunk[7], agent.unused = torch.nn.Linear(3136, 512), torch.nn.Linear(3, 3)
    before = agent.trunk[7].weight.clone()
    learn(agent, make_rollout(args, agent), args)
    assert not torch.equal(before, agent.trunk[7].weight)


class Fixed:
    """An agent of both scripts, whose outputs are given."""

    def __init__(self, logits, values):
        self.outputs = logits.log_softmax(-1), values

    def __call__(self, obs):
        return self.outputs

    def policy(self, obs):
        return self.outputs[0]

    def value(self, obs):
        return self.outputs[1]


@pytest.mark.parametrize(
    "changes", [{}, {"norm_adv": True}, {"clip_vloss": True}, {"surrogate": "kl-penalty", "vf_coef": 2.0}]
)
def test_the_loss_is_that_of_ppo(changes):
    """The loss, its gradient and metrics are those of ppo.py on the transitions, without the filler rows."""
    torch.manual_seed(0)
    logits, old_logits, numbers = torch.randn(40, 3), torch.randn(40, 3), torch.randn(4, 40)
    actions, valid = torch.randint(3, (40,)), torch.rand(40) > 0.3
    args, results = make_args(**{"norm_adv": False, "ent_coef": 0.1, "clip_coef": 0.3, **changes}), []
    for script, rows in ((ppo, torch.arange(40)), (ppo_discrete, valid.nonzero().squeeze())):
        policy, values = logits[rows].requires_grad_(), numbers[0, rows].requires_grad_()
        old_values, advantages, returns = numbers[1:, rows]
        if (
            script is ppo_discrete and args.norm_adv
        ):  # by the sample's standard deviation, not the unbiased one
            advantages = (advantages - advantages.mean()) / advantages.std(correction=0)
        columns = [actions[rows], old_logits[rows].log_softmax(-1), old_values, advantages, returns]
        batch = script.Batch(*columns[:1], *columns, *([valid.float()] if script is ppo else []))
        settings = args if script is ppo else ppo.replace(args, norm_adv=False)
        loss, metrics = script.ppo_loss(Fixed(policy, values), batch, settings, make_state(args))
        loss.backward()
        gradient = torch.zeros(40, 4)
        gradient[rows] = torch.cat([policy.grad, values.grad.unsqueeze(-1)], -1)
        results.append((loss, metrics, gradient))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


# The command line


@pytest.mark.slow
def test_train_resume_and_evaluate(tmp_path):
    """The same run twice, resumed, and evaluated to the same returns."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        done = call(ATARI, tmp_path / name, *QUICK, "--total-timesteps", 64)
        assert (done.status, done.err) == (0, "")
    a, b = checkpoint_in(tmp_path / "a"), checkpoint_in(tmp_path / "b")
    assert steps_done(a) == 64
    assert same(load(a), load(b))
    assert curves(a.parent) == curves(b.parent)
    settings = QUICK[-6:]
    done = call(ATARI, tmp_path, "--resume", a, "--total-timesteps", 128, *settings, "--compile")
    assert (done.status, steps_done(a)) == (0, 128), done.err
    again = call(ATARI, tmp_path, "--evaluate", a, *settings)
    assert re.findall("evaluation .*", again.out) == re.findall("evaluation .*", done.out) != []


@pytest.mark.slow
def test_a_policy_its_evaluation_and_a_video(tmp_path):
    """`load_policy` takes one observation or several; `evaluate` plays with it, and films the first game."""
    args = make_args(env_id="MsPacman", sticky_actions=0.25, eval_episodes=3, eval_max_steps=80)
    agent, path = make_agent(args, 9), tmp_path / "checkpoint.pt"
    save_policy(path, args, agent)
    policy = ppo.load_policy(path)
    obs = np.random.default_rng(0).integers(0, 256, (5, 4, 84, 84), dtype=np.uint8)
    with torch.no_grad():
        log_policy, _ = agent(torch.from_numpy(obs))
    greedy = log_policy.argmax(-1).tolist()
    assert policy(obs).tolist() == [policy(one) for one in obs] == greedy
    for other in (obs.transpose(0, 2, 3, 1), obs[0, :2], obs[:2].reshape(8, 84, 84)):
        with pytest.raises(ValueError, match="the policy takes observations"):
            policy(other)
    samples = np.bincount(policy(np.repeat(obs[:1], 2000, 0), sample=True), minlength=9) / 2000
    np.testing.assert_allclose(samples, log_policy[0].exp(), atol=0.05)

    envs = ppo.make_envs(make_args(env_id="MsPacman", sticky_actions=0.25, clip_rewards=False), 3)
    obs, _ = envs.reset(seed=ppo.seed_everything(1) % 2**29 + 2**30)
    returns, seen = np.zeros(3), []
    for _ in range(80):
        obs, rewards, *_ = envs.step(policy(obs))
        seen.append(obs[:, -1])
        returns += rewards
    assert returns.max() > 20  # unclipped: a pellet is worth 10
    results = ppo.evaluate(path, ppo.replace(args, capture_video=True))
    assert results.tolist() == returns.tolist()
    images = frames(tmp_path)
    assert np.shape(images) == (80, 210, 160, 3)
    grey = [cv2.resize(image @ [0.114, 0.587, 0.299], (84, 84)) for image in images]
    moving = [np.ravel(shown - np.mean(shown, 0)) for shown in (grey, *np.swapaxes(seen, 0, 1))]
    likeness = np.corrcoef(moving)[0]
    assert likeness[1] > 0.8 > max(likeness[2:]) + 0.2, likeness


def save_policy(path, args, agent):
    """Write what `load_policy` and `evaluate` need of a checkpoint."""
    saved = {name: getattr(args, name) for name in ppo.SAVED}
    torch.save({"format": ppo.FORMAT, "args": saved, "agent": agent.state_dict()}, path)


def test_a_policy_drops_nothing(tmp_path, monkeypatch):
    """Dropout, which a user may add, is for training only."""

    class Dropping(ppo.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.trunk.append(torch.nn.Dropout(0.5))

    monkeypatch.setattr(ppo, "Agent", Dropping)
    args, path = make_args(env_id="Pong"), tmp_path / "checkpoint.pt"
    save_policy(path, args, make_agent(args, 6))
    policy = ppo.load_policy(path)
    obs = np.random.default_rng(0).integers(0, 256, (20, 4, 84, 84), dtype=np.uint8)
    assert len({tuple(policy(obs).tolist()) for _ in range(5)}) == 1


def frames(folder):
    """The images of the only video of a run, in OpenCV's order of colours."""
    (video,) = folder.glob("videos/*.mp4")
    capture, images = cv2.VideoCapture(str(video)), []
    while (frame := capture.read())[0]:
        images.append(frame[1])
    return images


# Several processes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WORKER = Path(__file__).with_name("atari_worker.py")


def worker(what, folder):
    """The results of a function of `atari_worker.py`: of one process, and of the two of torchrun."""
    for launcher in ([sys.executable], TORCHRUN):
        words = [*launcher, str(WORKER), what, str(folder)]
        subprocess.run(words, check=True, timeout=200, cwd=folder, env=environment())
    return [torch.load(folder / name / "results.pt", weights_only=False) for name in ("1-0", "2-0", "2-1")]


@pytest.mark.slow
def test_two_processes_learn_like_one(tmp_path):
    """Halves of a rollout in two processes: the weights and metrics of all of it in one.

    They start with the first one's weights, draw random numbers of their own, and stop at --target-kl
    together, whatever the KL divergence of their own transitions is.
    """
    one, first, second = worker("share_of_an_update", tmp_path)
    for results in (one, one["stopped"]):
        others = (first, second) if results is one else (first["stopped"], second["stopped"])
        for other in others:
            assert (results["weights"] - other["weights"]).norm() < 1e-4 * results["weights"].norm()
            assert len(results["kls"]) == len(other["kls"])
        for name in {*results["metrics"]} - {"policy_mismatch"}:  # the latter is a process's own
            assert others[0]["metrics"][name] == pytest.approx(
                results["metrics"][name], rel=1e-3, abs=1e-5
            ), name
    assert len(one["kls"]) == 4
    assert len(one["stopped"]["kls"]) == 3
    assert first["kls_here"][-1] != pytest.approx(second["kls_here"][-1], rel=0.05)
    assert not torch.equal(first["noise"], second["noise"])


@pytest.mark.slow
def test_all_games_differ(tmp_path):
    """Those of the processes, of a resumed run, and of the evaluation have seeds of their own."""
    one, first, second = worker("seeds_of_games", tmp_path)
    begun, evaluation, resumed, evaluation_again = one
    assert evaluation == evaluation_again
    assert first == [(2, begun[1]), evaluation]
    assert second == [(2, begun[1] + 2)]
    seeds = [set(range(seed, seed + games)) for games, seed in (begun, evaluation, resumed)]
    assert len(set.union(*seeds)) == 4 + 2 + 4


def start_torchrun(folder, *flags):
    """Start a run of two processes, and wait for its first line of progress. Returns it, and its log."""
    words = [*TORCHRUN, str(Path(ppo.__file__)), *map(str, [*QUICK, *flags])]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(words, cwd=folder, env=environment(), stdout=log, stderr=log)
    end = time.monotonic() + 120
    while " steps  " not in (folder / "log").read_text() and process.poll() is None:
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.1)
    return process, folder / "log"


def children(process):
    """The processes that torchrun has started, by rank."""
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True)
    return sorted(map(int, found.stdout.split()))


def progress(log):
    """The steps of the last line of progress."""
    return int(re.findall(r"([\d,]+) steps  ", log)[-1].replace(",", ""))


@pytest.mark.slow
def test_torchrun(tmp_path):
    """Two processes write one folder and one report; one process can resume, two evaluate, not all share."""
    process, log = start_torchrun(tmp_path, "--total-timesteps", 80)
    assert process.wait(120) == 0, log.read_text()
    text = log.read_text()
    assert text.count("folder ") == text.count("evaluation ") == 1
    path = checkpoint_in(tmp_path)
    assert len(list(path.parent.glob("events*"))) == 1
    assert f"torchrun --nproc-per-node 2 {ppo.__file__} --resume runs" in text
    assert steps_done(path) == 96  # 3 iterations of 2 x 16: a process alone would need 5
    done = call(ATARI, tmp_path, "--resume", path, "--total-timesteps", 128, *QUICK[-8:])
    assert (done.status, steps_done(path)) == (0, 128)
    words = [*TORCHRUN, ppo.__file__, "--evaluate", str(path), *map(str, QUICK[-4:])]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=True)
    assert re.findall("evaluation .*", shown.stdout) == re.findall("evaluation .*", done.out)
    words = [*TORCHRUN, ppo.__file__, "--num-envs", "3"]
    shown = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert "--num-envs is 3, which 2 processes cannot share equally" in shown.stderr


@pytest.mark.slow
@pytest.mark.parametrize("who", ["torchrun", "first", "second"])
def test_a_signal_stops_all_processes(who, tmp_path):
    """Whoever gets SIGTERM, all stop after the same iteration, and the checkpoint holds it."""
    process, log = start_torchrun(tmp_path, "--log-seconds", 1e-6)
    pids = {"torchrun": process.pid, "first": children(process)[0], "second": children(process)[1]}
    os.kill(pids[who], signal.SIGTERM)
    assert process.wait(25) != 0  # after 30 seconds, torchrun would end them by SIGKILL
    text = log.read_text()
    assert re.search(r"^resume +torchrun", text, re.MULTILINE), text
    assert "evaluation " not in text
    assert steps_done(checkpoint_in(tmp_path)) == progress(text) > 0


@pytest.mark.slow
def test_a_killed_process_ends_the_run(tmp_path):
    """The other one fails, and says how to resume. One process can."""
    process, log = start_torchrun(tmp_path, "--checkpoint-seconds", 0.01)
    os.kill(children(process)[1], signal.SIGKILL)
    assert process.wait(60) != 0
    path, text = checkpoint_in(tmp_path), log.read_text()
    assert "steps with: torchrun --nproc-per-node 2" in text
    steps = steps_done(path)
    assert steps > 0
    done = call(ATARI, tmp_path, "--resume", path, "--total-timesteps", steps + 32, *QUICK[-8:])
    assert (done.status, steps_done(path)) == (0, steps + 32)


def test_threads_and_devices(monkeypatch):
    """Each of a machine's processes takes its share of the cores, and a GPU of its own."""
    cores = len(os.sched_getaffinity(0))
    assert [ppo.count_threads(ppo.Args(num_threads=n)) for n in (0, 3)] == [cores, 3]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(cores))
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert ppo.count_threads(ppo.Args(num_threads=0)) == 1
    assert [ppo.pick_device(ppo.Args(device=name)) for name in ("cpu", "cuda")] == ["cpu", "cuda:3"]
