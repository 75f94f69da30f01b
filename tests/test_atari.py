"""What is ppo_atari.py's own: DeepMind's protocol on the ALE, the convolutional network, several processes.

What it shares with ppo.py is tested there; test_copies.py sees that it is the same.
"""

import inspect
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import cv2
import gymnasium as gym
import numpy as np
import pytest
import torch
from ale_py.vector_env import AtariVectorEnv
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation
from helpers import brute_force_gae, float64, random_ends
from stable_baselines3.common.policies import ActorCriticCnnPolicy
from torch.distributions import Categorical

import ppo_atari as ppo

SCRIPT = Path(ppo.__file__)
WORKER = Path(__file__).with_name("atari_worker.py")
SMALL = {"num_envs": 4, "num_steps": 8, "num_minibatches": 2, "num_threads": 1, "device": "cpu"}
QUICK = ("--num-envs", 2, "--num-steps", 16, "--num-minibatches", 2, "--num-threads", 1, "--device", "cpu")
QUICK = (*QUICK, "--eval-episodes", 1)


def make_args(**changes):
    return replace(ppo.Args(), **SMALL | changes)


def make_agent(args, num_actions=5, seed=0):
    torch.manual_seed(seed)
    agent = ppo.Agent(args, spaces.Discrete(num_actions))
    with torch.no_grad():  # so that policies depend on what is seen
        agent.actor.weight.mul_(100)
    return agent


def make_state(args):
    return ppo.State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)


def make_rollout(args, agent, seed=0, chance=0.2):
    """A rollout of random images and rewards, with actions that the agent has sampled."""
    rng = np.random.default_rng(seed)
    rollout = ppo.Rollout(args, agent, args.num_envs)
    ends = random_ends(rng, args.num_steps, args.num_envs, chance)
    rollout.terminated, rollout.truncated, rollout.valid = map(torch.from_numpy, ends)
    rollout.obs.copy_(torch.from_numpy(rng.integers(0, 256, rollout.obs.shape, dtype=np.uint8)))
    rollout.rewards.copy_(torch.from_numpy(np.sign(rng.normal(size=rollout.rewards.shape)) * ends[2]))
    torch.manual_seed(seed)
    with torch.no_grad():
        for t, obs in enumerate(rollout.obs):
            action, policy, rollout.values[t] = agent.act(obs, agent.noise(args.num_envs))
            if t < args.num_steps:
                rollout.actions[t], rollout.policy[t] = action, policy
    return rollout


def run(*flags, cwd, launcher=(sys.executable,), status=0, timeout=200):
    command = [*launcher, str(SCRIPT), *map(str, flags)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


# The protocol: DeepMind's, of which Gymnasium has an implementation of its own.


class Fire(gym.Wrapper):
    """Presses FIRE for one frame after a reset."""

    def reset(self, **kwargs):
        _, info = self.env.reset(**kwargs)
        obs, _, _, _, info = self.env.step(1)
        return obs, info


def reference(game, fire, **settings):
    """One game by Gymnasium's wrappers, without no-ops at the start."""
    env = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0, **settings)
    env = AtariPreprocessing(Fire(env) if fire else env, noop_max=0, frame_skip=4, screen_size=84)
    return FrameStackObservation(env, 4, padding_type="zero")


@pytest.fixture
def no_noops(monkeypatch):
    """Games of ours begin without no-ops, which are drawn otherwise than Gymnasium's."""
    make_vec = gym.make_vec
    monkeypatch.setattr(gym, "make_vec", lambda *args, **kwargs: make_vec(*args, **kwargs, noop_max=0))


@pytest.mark.parametrize(
    ("game", "fire", "steps"),
    [("Breakout", True, 700), ("Pong", True, 1100), ("MsPacman", False, 700), ("Freeway", False, 300)],
)
def test_the_protocol_is_gymnasiums(game, fire, steps, no_noops):
    """Step by step the same images, rewards, ends and frame numbers, over whole games.

    MsPacman has lives and no FIRE button, Freeway neither. The reference's lost lives are counted here.
    """
    envs = ppo.make_envs(make_args(env_id=f"{game}NoFrameskip-v4"), 1)
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
        assert info["lives"][0] == lives
        assert info["episode_frame_number"][0] == expected_info["episode_frame_number"]
        assert ("rollout_episode" in info) == over
        if over:
            assert info["rollout_episode"]["r"][0] == score
            games += 1
    assert games >= 1 or game == "Freeway"


@pytest.mark.parametrize(("game", "most", "fire"), [("Breakout", 28, 1), ("Freeway", 29, 0)])
def test_how_games_begin(game, most, fire):
    """A frame of FIRE where there is that button, then 0 to 28 frames without action, else 0 to 29."""
    envs, frames = ppo.make_envs(make_args(env_id=game), 8), set()
    assert envs.pressed == fire  # after a lost life, too; action 1 is FIRE where there is that button
    for seed in range(8):
        _, info = envs.reset(seed=100 * seed)
        frames |= set((info["episode_frame_number"] - fire).tolist())
    envs.close()
    assert frames <= set(range(most + 1))
    assert len(frames) > 15


def test_a_game_is_cut_after_its_frames(monkeypatch):
    """The ALE's time limit truncates; the limit itself is its default, half an hour at 60 frames a second."""
    make_vec = gym.make_vec
    monkeypatch.setattr(
        gym, "make_vec", lambda *a, **kwargs: make_vec(*a, **kwargs, max_num_frames_per_episode=400)
    )
    envs = ppo.make_envs(make_args(env_id="Pong"), 1)
    envs.reset(seed=1)
    ends = [envs.step(np.array([0]))[2:4] for _ in range(105)]
    assert sum(truncated[0] for _, truncated in ends) == 1
    assert not any(terminated[0] for terminated, _ in ends)
    assert inspect.signature(AtariVectorEnv).parameters["max_num_frames_per_episode"].default == 108_000


def test_names_of_a_game():
    """The names by which users know a game mean the same."""
    names = ("Breakout", "BreakoutNoFrameskip-v4", "BreakoutDeterministic-v0", "ALE/Breakout-v5")
    firsts = []
    for name in names:
        envs = ppo.make_envs(make_args(env_id=name), 2)
        envs.reset(seed=5)
        firsts.append(envs.step(np.array([2, 3]))[0])
        assert envs.unwrapped.spec.kwargs["repeat_action_probability"] == 0
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        envs.close()
    for first in firsts[1:]:
        np.testing.assert_array_equal(first, firsts[0])


def test_a_video_shows_the_first_game(tmp_path):
    """The images of a video are the first game's observations, but in colour and full size."""
    envs = ppo.make_envs(make_args(env_id="Pong"), 3, tmp_path)
    rng, shapes = np.random.default_rng(0), []
    envs.reset(seed=1)
    for _ in range(60):
        obs, *_ = envs.step(rng.integers(6, size=3))
    for image in envs.env.render():
        grey = cv2.resize(image @ [0.299, 0.587, 0.114], (84, 84), interpolation=cv2.INTER_AREA)
        errors = [np.abs(grey - own[-1]).mean() for own in obs]
        assert errors[0] < 0.35 < min(errors[1:])
        shapes.append(image.shape)
    assert shapes == [(210, 160, 3)] * 3
    envs.close()


def test_sticky_actions():
    """With the flag, games of the same seed and actions go another way than without."""
    frames = []
    for sticky in (0.0, 0.0, 0.25):
        envs = ppo.make_envs(make_args(env_id="Breakout", sticky_actions=sticky), 1)
        envs.reset(seed=5)
        frames.append([envs.step(np.array([2 + t // 3 % 2]))[0] for t in range(40)])
    np.testing.assert_array_equal(frames[0], frames[1])
    assert not np.array_equal(frames[0], frames[2])


class Scripted(gym.vector.VectorEnv):
    """Two games that follow a script of (reward, lives, terminated, truncated); images show the step.

    They reset in the step after an end, as the ALE's do, and keep the actions that reach them.
    """

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    num_envs = 2
    single_action_space = spaces.Discrete(5)
    single_observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    script = ((0, 3, 0, 0), (5, 3, 0, 0), (-2, 2, 0, 0), (7, 2, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0))

    def reset(self, **_):
        self.at, self.over, self.actions = np.array([-1, -1]), np.zeros(2, dtype=bool), []
        return self.images(), {"lives": np.array([3, 3])}

    def images(self):
        return np.broadcast_to((self.at + 1)[:, None, None, None], (2, 4, 84, 84)).astype(np.uint8)

    def step(self, actions):
        self.actions.append(actions.tolist())
        self.at = np.where(self.over, -1, self.at + 1)
        rows = [(0, 3, 0, 0) if at < 0 else self.script[at] for at in self.at]
        rewards, lives, terminated, truncated = (np.array(x) for x in zip(*rows, strict=True))
        terminated, truncated = terminated.astype(bool), truncated.astype(bool)
        self.over = terminated | truncated
        return self.images(), rewards.astype(float), terminated, truncated, {"lives": lives}


def scripted(clip_rewards=True, pressed=1, script=Scripted.script):
    games = Scripted()
    games.script = script
    envs = gym.wrappers.vector.RecordEpisodeStatistics(games, stats_key="rollout_episode")
    return ppo.LostLives(envs, pressed, clip_rewards)


def play(num_steps, seed=0, compile=False, **changes):
    """A rollout of two scripted games, and what it was collected with."""
    args = make_args(num_envs=2, num_steps=num_steps, compile=compile)
    agent, envs = make_agent(args), scripted(**changes)
    rollout = ppo.Rollout(args, agent, 2)
    rollout.obs[-1] = torch.as_tensor(envs.reset()[0])
    torch.manual_seed(seed)
    ppo.collect_rollout(envs, agent, rollout, args)
    return rollout, envs, agent, args


def test_lives_forced_rows_and_statistics():
    """Lost lives end episodes, not games; the row after an end is a filler; statistics are of whole games."""
    rollout, envs, *_ = play(12)
    # steps of a game: 0 1 2(life lost) 3(forced) 4(life lost) 5(forced, game over) then the reset, and again
    game_ends, lost = [0, 0, 0, 0, 0, 1, 0], [0, 0, 1, 0, 1, 0, 0]
    ends = np.array(game_ends) + lost
    valid = [1, 1, 1, 0, 1, 0, 0]
    assert rollout.terminated[:, 0].int().tolist() == [*ends, *ends[:5]]
    assert rollout.valid[:, 0].int().tolist() == [*valid, *valid[:5]]
    assert not rollout.truncated.any()
    assert rollout.rewards[:7, 0].tolist() == [0, 1, -1, 1, 0, 0, 0]
    actions = np.array(envs.unwrapped.actions)
    assert (actions[[3, 5, 10]] == 1).all()
    free = [0, 1, 2, 4, 7, 8, 9, 11]
    np.testing.assert_array_equal(actions[free], rollout.actions.numpy()[free])
    assert rollout.episodes == [(10.0, 6), (10.0, 6)]
    np.testing.assert_array_equal(rollout.obs[:8, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5, 6, 0])


def test_the_row_after_a_time_limit_is_a_filler():
    """A game that is cut: the next row resets. A life that is lost in the last step is a death as well."""
    for lives, dead in ((3, False), (2, True)):
        rollout, envs, agent, args = play(8, script=((0, 3, 0, 0), (0, lives, 0, 1)))
        assert rollout.truncated[:6, 0].int().tolist() == [0, 1, 0, 0, 1, 0]
        assert rollout.terminated[:6, 0].int().tolist() == [0, dead, 0, 0, dead, 0]
        assert rollout.valid[:6, 0].int().tolist() == [1, 1, 0, 1, 1, 0]
        assert [length for _, length in rollout.episodes[:2]] == [2, 2]
        ppo.collect_rollout(envs, agent, rollout, args)  # the last row was cut
        assert rollout.valid[:, 0].int().tolist() == [0, 1, 1, 0, 1, 1, 0, 1]


def test_a_rollout_goes_on_where_the_last_ended():
    """Filler rows carry over; what acted is stored: the policy and the values, of true observations."""
    rollout, envs, agent, args = play(6)
    last = rollout.obs[-1].clone()
    ppo.collect_rollout(envs, agent, rollout, args)
    assert torch.equal(rollout.obs[0], last)
    assert rollout.valid[:, 0].int().tolist() == [0, 1, 1, 1, 0, 1]
    with torch.no_grad():
        for t in range(7):
            policy, values = agent(rollout.obs[t])
            torch.testing.assert_close(rollout.values[t], values)
            if t < 6:
                torch.testing.assert_close(rollout.policy[t], policy)


def test_each_step_has_noise_of_its_own(monkeypatch):
    """The action that is stored is the likeliest of the policy plus that step's noise, drawn for it alone."""
    drawn, noise = [], ppo.Agent.noise
    monkeypatch.setattr(ppo.Agent, "noise", lambda *a: drawn.append(noise(*a)) or drawn[-1])
    rollout, *_ = play(12)
    noises = torch.cat([x.reshape(-1, 2, 5) for x in drawn])
    assert len(noises) == len(noises.unique(dim=0)) == 12
    assert torch.equal(rollout.actions, (rollout.policy + noises).argmax(-1))
    assert not torch.equal(rollout.actions, rollout.policy.argmax(-1))


def test_unclipped_rewards_and_no_fire():
    """Rewards as the game gives them, where they are asked for; no operation where there is no FIRE."""
    envs = scripted(clip_rewards=False, pressed=0)
    envs.reset()
    rewards = [envs.step(np.array([4, 4]))[1][0] for _ in range(4)]
    assert rewards == [0, 5, -2, 7]
    assert envs.unwrapped.actions == [[4, 4], [4, 4], [4, 4], [0, 0]]


# The network


def test_the_network_is_stable_baselines3s():
    """The outputs of its NatureCNN policy with our weights: sizes, order of layers, scaling of images."""
    agent = make_agent(make_args(), 5)
    box = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    policy = ActorCriticCnnPolicy(box, spaces.Discrete(5), lambda _: 1e-3)
    layers = [part for part in agent.trunk if hasattr(part, "weight")]
    theirs = [part for part in policy.features_extractor.cnn if hasattr(part, "weight")]
    theirs.append(policy.features_extractor.linear[0])
    pairs = [*zip(layers, theirs, strict=True)]
    pairs += [(agent.actor, policy.action_net), (agent.critic, policy.value_net)]
    for ours, their in pairs:
        their.load_state_dict(ours.state_dict())
    obs = torch.randint(0, 256, (6, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        log_policy, values = agent(obs)
        expected = policy.get_distribution(obs).distribution
        torch.testing.assert_close(log_policy, expected.logits, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(values, policy.predict_values(obs).squeeze(-1), atol=1e-5, rtol=1e-5)


def test_initial_weights():
    """Orthogonal, with the gains of Huang 2022: near-uniform policies at first."""
    torch.manual_seed(0)
    agent = ppo.Agent(make_args(), spaces.Discrete(6))
    gains = dict.fromkeys((0, 2, 4, 7), 2**0.5)
    for index, gain in gains.items():
        matrix = agent.trunk[index].weight.flatten(1)
        small = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
        torch.testing.assert_close(small @ small.T, gain**2 * torch.eye(len(small)), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(agent.actor.weight @ agent.actor.weight.T, 1e-4 * torch.eye(6))
    assert agent.critic.weight.norm().item() == pytest.approx(1)
    obs = torch.randint(0, 256, (3, 4, 84, 84), dtype=torch.uint8)
    assert (agent(obs)[0].exp() - 1 / 6).abs().max() < 0.02


def test_bfloat16_is_close():
    """Products in bfloat16 change policies and values little, and leave what is returned in float32."""
    args = make_args()
    agent, rough = make_agent(args), make_agent(replace(args, bfloat16=True))
    obs = torch.randint(0, 256, (32, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        for exact, close in zip(agent(obs), rough(obs), strict=True):
            assert close.dtype == torch.float32
            assert 0 < (exact - close).abs().max() < 0.05 * (1 + exact.abs().max())


def test_sampled_actions_follow_the_policy():
    """Frequencies of sampled actions are the policy's probabilities; without noise, the likeliest acts."""
    agent = make_agent(make_args())
    obs = torch.randint(0, 256, (1, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        policy, _ = agent(obs)
        samples = (policy + agent.noise(20_000)).argmax(-1)
        counts = torch.bincount(samples, minlength=5) / 20_000
        assert (counts - policy.exp()[0]).abs().max() < 4 * (0.25 / 20_000) ** 0.5
        assert agent.act(obs)[0] == policy.argmax()


# The update


def reference_update(agent, rollout, args):
    """The gradient of the loss over all valid rows, by autograd in float64 and torch.distributions."""
    valid = rollout.valid.flatten()
    rewards, values = float64(rollout.rewards), float64(rollout.values)
    ends = rollout.terminated.numpy(), rollout.truncated.numpy()
    advantages = brute_force_gae(rewards, values, *ends, args.gamma, args.gae_lambda)
    returns = torch.from_numpy(advantages + values[:-1]).flatten()[valid]
    advantages = torch.from_numpy(advantages).flatten()[valid]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
    actions = rollout.actions.flatten()[valid]
    old = Categorical(logits=rollout.policy.double().flatten(0, 1)[valid]).log_prob(actions)
    agent.double()
    agent.precision = torch.float64
    images = rollout.obs[:-1].flatten(0, 1)[valid].double() / 255
    features = agent.trunk(images)
    new = Categorical(logits=agent.actor(features))
    ratio = (new.log_prob(actions) - old).exp()
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    loss = -torch.min(ratio * advantages, clipped * advantages).mean()
    loss = loss + args.vf_coef * 0.5 * (agent.critic(features).squeeze(-1) - returns).square().mean()
    loss = loss - args.ent_coef * new.entropy().mean()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in agent.parameters()])


@pytest.mark.parametrize(
    ("norm_adv", "clip_vloss", "compile"), [(True, False, False), (False, True, False), (True, False, True)]
)
def test_a_gradient_step_by_brute_force(norm_adv, clip_vloss, compile):
    """`update`'s gradient is that of the loss over all valid rows, computed another way in float64.

    Clipping the change of the values does not alter it, for before the first step they have not changed.
    """
    args = make_args(norm_adv=norm_adv, num_minibatches=1, update_epochs=1, max_grad_norm=1e9)
    args = replace(args, clip_vloss=clip_vloss, compile=compile)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    expected = reference_update(make_agent(args), rollout, args)
    vector = ppo.flatten_parameters(agent)
    optimizer = torch.optim.SGD([vector], 1.0)
    before = vector.detach().clone()
    figures = ppo.update(agent, optimizer, rollout, replace(make_state(args), learning_rate=1.0), args)
    moved = (before - vector.detach()).double()
    assert (moved - expected).norm() < 1e-4 * expected.norm()
    assert figures["losses/grad_norm"] == pytest.approx(expected.norm().item(), rel=1e-4)


def reference_passes(agent, rollout, args, minibatches, learning_rate):
    """All passes over a rollout, in float64 by autograd, torch.distributions and one Adam for all tensors.

    `minibatches` are the rows of each, pass by pass. Returns the weights and the figures.
    """
    agent.double()
    agent.precision = torch.float64
    parameters = list(agent.parameters())
    optimizer = torch.optim.Adam(parameters, learning_rate, eps=1e-5)

    def look(images):
        features = agent.trunk(images.double() / 255)
        return Categorical(logits=agent.actor(features)), agent.critic(features).squeeze(-1)

    def targets(values):
        ends = rollout.terminated.numpy(), rollout.truncated.numpy()
        advantages = brute_force_gae(
            float64(rollout.rewards), float64(values), *ends, args.gamma, args.gae_lambda
        )
        return [torch.from_numpy(x).flatten() for x in (advantages, advantages + float64(values)[:-1])]

    images, actions = rollout.obs[:-1].flatten(0, 1), rollout.actions.flatten()
    policies, held = rollout.policy.double().flatten(0, 1), rollout.values[:-1].double().flatten()
    advantages, returns = targets(rollout.values)
    each = []
    for number, rows_of_a_pass in enumerate(minibatches):
        if number and args.recompute_advantages:
            with torch.no_grad():
                advantages, returns = targets(torch.stack([look(x)[1] for x in rollout.obs]))
        for rows in rows_of_a_pass:
            old, (new, values) = Categorical(logits=policies[rows]), look(images[rows])
            learnt = advantages[rows]
            if args.norm_adv:
                learnt = (learnt - learnt.mean()) / (learnt.std(correction=0) + 1e-8)
            ratio = (new.log_prob(actions[rows]) - old.log_prob(actions[rows])).exp()
            bounded = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
            losses = (values - returns[rows]) ** 2 / 2
            if args.clip_vloss:
                near = held[rows] + (values - held[rows]).clamp(-args.clip_coef, args.clip_coef)
                losses = torch.maximum(losses, (near - returns[rows]) ** 2 / 2)
            policy_loss = -torch.minimum(ratio * learnt, bounded * learnt).mean()
            loss = policy_loss + args.vf_coef * losses.mean() - args.ent_coef * new.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
            optimizer.step()
            kl = torch.distributions.kl_divergence(old, new).mean()
            clipped = (ratio != bounded).double().mean()
            row = policy_loss, losses.mean(), new.entropy().mean(), clipped, kl, norm
            each.append([x.item() for x in row])
    names = ("policy_loss", "value_loss", "entropy", "clipfrac", "kl", "grad_norm")
    figures = dict(zip(names, np.mean(each, 0), strict=True))
    figures["kl"] = np.mean(each[-args.num_minibatches :], 0)[4]  # that of the last pass
    return torch.cat([x.detach().flatten() for x in parameters]), figures


@pytest.mark.parametrize(
    ("norm_adv", "clip_vloss", "recompute"), [(True, True, True), (False, False, False), (False, True, True)]
)
def test_passes_by_brute_force(monkeypatch, norm_adv, clip_vloss, recompute):
    """Three passes of two minibatches, with everything clipped: weights and figures, against float64.

    The learning rate is the state's, not the one that the optimiser was made with.
    """
    args = make_args(update_epochs=3, norm_adv=norm_adv, clip_vloss=clip_vloss, max_grad_norm=0.1)
    args = replace(args, recompute_advantages=recompute, clip_coef=0.02)
    agent, deal, dealt = make_agent(args), ppo.deal, []
    rollout = make_rollout(args, agent)
    rollout.rewards.mul_(3)  # targets that the critic cannot reach at once

    def spy(*settings):
        order, weights = deal(*settings)
        dealt.append([rows[weight > 0] for rows, weight in zip(order, weights, strict=True)])
        return order, weights

    monkeypatch.setattr(ppo, "deal", spy)
    vector = ppo.flatten_parameters(agent)
    before = vector.detach().double()
    state = replace(make_state(args), learning_rate=3e-4)
    figures = ppo.update(agent, torch.optim.Adam([vector], 0.7, eps=1e-5), rollout, state, args)
    weights, expected = reference_passes(make_agent(args), rollout, args, dealt, 3e-4)
    moved = (weights - before).norm()
    assert len(dealt) == 3
    assert (weights - vector.detach()).norm() < 1e-2 * moved
    assert expected["clipfrac"] > 0.1
    assert expected["grad_norm"] > 2 * args.max_grad_norm
    for name, value in expected.items():
        assert figures[f"losses/{name}"] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_what_filler_rows_hold_does_not_matter():
    """Actions, rewards and policies of filler rows, however wild, change no weight and no figure."""
    args = make_args(update_epochs=2)
    results = []
    for wild in (False, True):
        agent = make_agent(args)
        rollout = make_rollout(args, agent)
        filler = ~rollout.valid
        assert filler.sum() >= 4
        if wild:
            # The image in a filler row is the true successor of the row before: it stays. What follows it,
            # where that is a filler's successor alone, is the first of an episode, and valid.
            rollout.rewards[filler], rollout.actions[filler] = 1e6, 4
            rollout.policy[filler] = -3.0
        vector = ppo.flatten_parameters(agent)
        torch.manual_seed(1)
        figures = ppo.update(agent, torch.optim.Adam([vector], 1e-3), rollout, make_state(args), args)
        results.append((vector.detach().clone(), figures))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize(
    ("rows", "parts", "size"), [(32, 4, 8), (29, 4, 8), (17, 4, 8), (30, 7, 5), (5, 4, 8)]
)
def test_minibatches_are_a_partition(rows, parts, size):
    """Each row is dealt once, parts differ by one row at most, and weights make sums into means."""
    numbers = torch.arange(100, 100 + rows)
    order, shares = ppo.deal(numbers, parts, size)
    assert order.shape == shares.shape == (parts, size)
    assert sorted(order[shares > 0].tolist()) == numbers.tolist()
    counts = (shares > 0).sum(1)
    assert counts.max() - counts.min() <= 1
    torch.testing.assert_close(shares.sum(1), torch.ones(parts))
    assert not torch.equal(order, ppo.deal(numbers, parts, size)[0])


def test_normalized_advantages():
    """Mean 0 and standard deviation 1 over the rows that count, in each minibatch."""
    advantages = torch.randn(3, 8) * 5 + 7
    _, shares = ppo.deal(torch.arange(20), 3, 8)
    result = ppo.normalize(advantages, shares)
    for row, weight in zip(result, shares, strict=True):
        real = row[weight > 0]
        assert real.mean().abs() < 1e-5
        assert real.std(correction=0).item() == pytest.approx(1, abs=1e-5)


def brute_force_advantages(rollout, values, args):
    """Of the valid rows, sorted."""
    ends = rollout.terminated.numpy(), rollout.truncated.numpy()
    advantages = brute_force_gae(
        float64(rollout.rewards), float64(values), *ends, args.gamma, args.gae_lambda
    )
    return torch.from_numpy(advantages).float()[rollout.valid].sort().values


def test_recomputed_advantages(monkeypatch):
    """With the flag, the second pass learns from advantages of the new critic; without, from the first's."""
    for recompute in (False, True):
        args = make_args(
            update_epochs=2, recompute_advantages=recompute, num_minibatches=1, learning_rate=0.1
        )
        args = replace(args, norm_adv=False)
        agent, learnt = make_agent(args), []
        rollout = make_rollout(args, agent)
        expected = [brute_force_advantages(rollout, rollout.values, args)]
        gradient, vector = ppo.gradient, ppo.flatten_parameters(agent)

        def spy(agent, batch, *others, learnt=learnt, gradient=gradient):
            learnt.append(batch.advantages[batch.weights > 0].sort().values)
            return gradient(agent, batch, *others)

        monkeypatch.setattr(ppo, "gradient", spy)
        optimizer = torch.optim.SGD([vector], 1e-2)
        step = optimizer.step

        def then(*_, step=step, expected=expected, agent=agent, rollout=rollout, args=args):
            step()
            with torch.no_grad():
                values = torch.stack([agent(obs)[1] for obs in rollout.obs])
            expected.append(brute_force_advantages(rollout, values, args))

        optimizer.step = then
        ppo.update(agent, optimizer, rollout, make_state(args), args)
        monkeypatch.setattr(ppo, "gradient", gradient)
        assert (expected[0] - expected[1]).abs().max() > 1e-3
        for advantages, right in zip(learnt, expected if recompute else expected[:1] * 2, strict=False):
            torch.testing.assert_close(advantages, right, atol=1e-4, rtol=1e-4)


def test_target_kl_ends_the_passes(monkeypatch):
    """Passes end with the first whose steps meet a KL above the target."""

    def passes(**changes):
        args = make_args(num_minibatches=1, **changes)
        agent, deals, deal = make_agent(args), [], ppo.deal
        rollout = make_rollout(args, agent)
        with monkeypatch.context() as patch:
            patch.setattr(ppo, "deal", lambda *a: deals.append(1) or deal(*a))
            optimizer = torch.optim.Adam([ppo.flatten_parameters(agent)], 1e-3)
            figures = ppo.update(agent, optimizer, rollout, make_state(args), args)
        return len(deals), figures["losses/kl"]

    kls = [passes(update_epochs=epochs)[1] for epochs in (1, 2, 3, 4)]
    assert kls[0] < 1e-6 < kls[1] < kls[2] < kls[3]  # the first pass meets none
    assert passes(update_epochs=4, target_kl=2 * kls[3])[0] == 4
    for number in (1, 2, 3):
        target = (kls[number - 1] + kls[number]) / 2
        assert passes(update_epochs=4, target_kl=target) == (number + 1, kls[number])


def test_figures():
    """Explained variance, relative error and KL, against NumPy; and whether the policy that acted learns."""
    args = make_args(update_epochs=1, num_minibatches=1)
    agent = make_agent(args)
    rollout = make_rollout(args, agent)
    values, valid = float64(rollout.values), rollout.valid.numpy()
    ends = rollout.terminated.numpy(), rollout.truncated.numpy()
    advantages = brute_force_gae(float64(rollout.rewards), values, *ends, args.gamma, args.gae_lambda)[valid]
    returns = advantages + values[:-1][valid]
    vector = ppo.flatten_parameters(agent)
    figures = ppo.update(agent, torch.optim.Adam([vector], 1e-3), rollout, make_state(args), args)
    assert figures["losses/explained_variance"] == pytest.approx(
        1 - advantages.var() / returns.var(), abs=1e-4
    )
    expected = np.sqrt((advantages**2).mean() / (returns**2).mean())
    assert figures["losses/relative_error"] == pytest.approx(expected, rel=1e-4)
    assert figures["losses/kl"] == pytest.approx(0, abs=1e-6)  # of the first pass's only minibatch
    assert figures["losses/policy_mismatch"] < 1e-5
    agent = make_agent(args)
    vector = ppo.flatten_parameters(agent)
    first, last = rollout.valid[-1].nonzero()[[0, -1], 0]
    rollout.policy[-1, first] += 0.5
    rollout.policy[-1, last], rollout.valid[-1, last] = 9.0, False  # a filler row counts for nothing
    figures = ppo.update(agent, torch.optim.Adam([vector], 1e-3), rollout, make_state(args), args)
    assert figures["losses/policy_mismatch"] == pytest.approx(0.5, abs=1e-4)


def test_changing_coefficients_are_not_compiled_anew():
    """What CUDA graphs are made of is one graph for all values of the coefficients, not one for each."""
    from torch._dynamo import config

    args = make_args(num_minibatches=1)
    agent = make_agent(args)
    rollout = make_rollout(args, agent, chance=0.0)
    order, shares = ppo.deal(torch.arange(32), 1, 32)
    advantages, returns = torch.randn(2, 32)
    stored = rollout.obs[:-1], rollout.actions, rollout.policy, rollout.values[:-1], rollout.values[:-1]
    batch = ppo.Batch(*(x.flatten(0, 1)[order[0]] for x in stored), returns, advantages, shares[0])
    torch._dynamo.reset()
    config.trace_autograd_ops = True
    graph = torch.compile(ppo.gradient, dynamic=None, fullgraph=True, backend="eager")
    for step in range(1, 13):
        state = replace(make_state(args), ent_coef=0.01 * step, clip_coef=0.3 / step)
        for one, other in zip(
            graph(agent, batch, state, args), ppo.gradient(agent, batch, state, args), strict=True
        ):
            torch.testing.assert_close(one, other)


def test_compiled_acting():
    """A compiled rollout is that of the eager one: the same actions, policies and values."""
    eager, compiled = (play(12, 3, compile)[0] for compile in (False, True))
    assert torch.equal(eager.actions, compiled.actions)
    torch.testing.assert_close(eager.policy, compiled.policy, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(eager.values, compiled.values, atol=1e-4, rtol=1e-4)


# Learning


class Squares(gym.vector.VectorEnv):
    """A bright bar in one of 4 places; to name it is worth 1. 10 steps cost a life; 2 lives are a game."""

    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012
    single_action_space = spaces.Discrete(4)
    single_observation_space = spaces.Box(0, 255, (4, 84, 84), np.uint8)

    def __init__(self, num_envs):
        self.num_envs = num_envs

    def show(self):
        self.place = self.rng.integers(0, 4, self.num_envs)
        images = np.zeros((self.num_envs, 4, 84, 84), dtype=np.uint8)
        for n, place in enumerate(self.place):
            images[n, :, :, 21 * place : 21 * place + 21] = 200
        return images

    def reset(self, seed=None, options=None):
        self.rng = np.random.default_rng(seed)
        self.at, self.over = np.zeros(self.num_envs, dtype=int), np.zeros(self.num_envs, dtype=bool)
        return self.show(), {"lives": np.full(self.num_envs, 2)}

    def step(self, actions):
        rewards = (actions == self.place).astype(float) * ~self.over
        self.at = np.where(self.over, 0, self.at + 1)
        self.over = self.at >= 20
        lives = 2 - self.at // 10
        return self.show(), rewards, self.over, np.zeros(self.num_envs, dtype=bool), {"lives": lives}


def make_squares(args, num_envs, video=None):
    envs = gym.wrappers.vector.RecordEpisodeStatistics(Squares(num_envs), stats_key="rollout_episode")
    return ppo.LostLives(envs, 0, args.clip_rewards)


def test_learns_from_pixels(tmp_path, monkeypatch, capsys):
    """A task that only the image decides is learnt in a minute, by the whole of `train`."""

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo, "make_envs", make_squares)
    args = make_args(num_envs=8, num_steps=16, num_minibatches=2, total_timesteps=3_000, learning_rate=1e-3)
    results = ppo.train(args)
    assert results["greedy"]["returns"].mean() >= 18  # of 19, for one row of 20 is forced; chance is 5
    assert "return" in capsys.readouterr().out


def test_same_seed_same_weights(tmp_path, monkeypatch):
    """Two runs with a seed end with the same weights, bit for bit; another seed does not."""
    monkeypatch.setattr(ppo, "make_envs", make_squares)
    ends = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        ppo.train(make_args(total_timesteps=64, seed=seed, eval_episodes=1))
        (checkpoint,) = Path("runs").glob("*/checkpoint.pt")
        ends.append(torch.load(checkpoint, weights_only=True)["agent"])
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    assert not all(torch.equal(ends[0][name], ends[2][name]) for name in ends[0])


def test_every_process_and_the_evaluation_play_games_of_their_own(tmp_path, monkeypatch):
    """Seeds of games and random numbers differ by process and from evaluation's; episodes are exchanged."""
    seeds, exchanged = [], []

    class Recorded(Squares):
        def reset(self, seed=None, options=None):
            seeds.append((seed, torch.initial_seed()))
            return super().reset(seed)

    def make_envs(args, num_envs, video=None):
        envs = gym.wrappers.vector.RecordEpisodeStatistics(Recorded(num_envs), stats_key="rollout_episode")
        return ppo.LostLives(envs, 0, args.clip_rewards)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo, "make_envs", make_envs)
    monkeypatch.setattr(ppo, "collective", lambda operation, *_: exchanged.append(operation))
    for rank in (0, 1):  # one after the other: nothing is exchanged in fact
        monkeypatch.setattr(ppo, "world", lambda rank=rank: (rank, 2))
        ppo.train(make_args(num_envs=4, total_timesteps=32, eval_episodes=3))
    first, greedy, stochastic, second = seeds
    assert second[0] == first[0] + 2  # beyond the 2 games of the first process
    assert second[1] == first[1] + 1
    assert min(greedy[0], stochastic[0]) >= 2**30 > second[0] + 2
    assert ppo.dist.all_gather_object in exchanged


def test_a_signal_ends_training_after_the_iteration(tmp_path, monkeypatch, capsys):
    """SIGTERM: a checkpoint, the command that goes on from it, and status 143; and it does go on."""
    monkeypatch.setattr(ppo, "make_envs", make_squares)
    monkeypatch.chdir(tmp_path)
    original, update, handler = ppo.update, [], signal.getsignal(signal.SIGTERM)

    def interrupted(*args):
        if not update:
            os.kill(os.getpid(), signal.SIGTERM)
        update.append(1)
        return original(*args)

    monkeypatch.setattr(ppo, "update", interrupted)
    args = make_args(total_timesteps=10_000, eval_episodes=1)
    with pytest.raises(SystemExit) as stop:
        ppo.train(args)
    assert stop.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == handler
    (checkpoint,) = tmp_path.glob("runs/*/checkpoint.pt")
    _, state = ppo.load_checkpoint(str(checkpoint))
    assert 0 < state.global_step <= 32
    assert f"SIGTERM after step {state.global_step}. To go on: python " in capsys.readouterr().out
    ppo.train(replace(args, resume=str(checkpoint), total_timesteps=state.global_step + 40))
    assert ppo.load_checkpoint(str(checkpoint))[1].global_step >= state.global_step + 40


def test_evaluation_is_greedy_or_sampled(tmp_path, monkeypatch, capsys):
    """Greedy evaluation takes the likeliest action only, sampled evaluation all in their shares."""
    taken = []

    class Watched(Squares):
        def step(self, actions):
            taken.extend(actions.tolist())
            return super().step(actions)

    def make_envs(args, num_envs, video=None):
        envs = gym.wrappers.vector.RecordEpisodeStatistics(Watched(num_envs), stats_key="rollout_episode")
        return ppo.LostLives(envs, 2, args.clip_rewards)

    monkeypatch.setattr(ppo, "make_envs", make_envs)
    args = make_args(eval_episodes=20)
    agent = ppo.Agent(args, spaces.Discrete(4))
    with torch.no_grad():
        agent.actor.weight.zero_()
        agent.actor.bias.copy_(torch.tensor([0.1, 0.2, 0.4, 0.3]).log())
    result = ppo.evaluate(agent, args, "greedy", tmp_path)
    assert set(taken) == {2}
    assert (result["lengths"] == 20).all()
    taken.clear()
    ppo.evaluate(agent, args, "stochastic", tmp_path)
    assert np.bincount(taken) / len(taken) == pytest.approx([0.1, 0.2, 0.4, 0.3], abs=0.1)


def test_evaluation_counts_the_first_game_of_each(tmp_path, monkeypatch, capsys):
    """Games of unequal length: while the longest goes on, second games of the others change nothing."""

    class Unequal(Scripted):
        """The second game ends after two steps and is worth more each time."""

        def step(self, actions):
            obs, rewards, terminated, truncated, info = super().step(actions)
            terminated[1] = self.over[1] = self.at[1] == 1
            self.games = getattr(self, "games", 0) + terminated[1]
            rewards[1] = 10 ** int(self.games) if self.at[1] >= 0 else 0
            info["lives"][1] = 3 * (not terminated[1])
            return obs, rewards, terminated, truncated, info

    def make_envs(args, num_envs, video=None):
        envs = gym.wrappers.vector.RecordEpisodeStatistics(Unequal(), stats_key="rollout_episode")
        return ppo.LostLives(envs, 1, args.clip_rewards)

    monkeypatch.setattr(ppo, "make_envs", make_envs)
    args = make_args(eval_episodes=2)
    result = ppo.evaluate(make_agent(args), args, "greedy", tmp_path)
    assert result["lengths"].tolist() == [6, 2]
    assert result["returns"].tolist() == [10, 11]


def test_threads_and_devices(monkeypatch):
    """Each of a machine's processes takes its share of the cores, and a GPU of its own."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert ppo.count_threads(make_args(num_threads=0)) == 8
    assert ppo.count_threads(make_args(num_threads=3)) == 3
    assert ppo.pick_device(make_args(device="cpu")) == torch.device("cpu")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert ppo.count_threads(make_args(num_threads=0)) == 2
    assert ppo.pick_device(make_args(device="cuda")) == torch.device("cuda", 3)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ppo.Refused, match="4 processes need a GPU each, and this machine has 2"):
        ppo.check_args(make_args(device="auto", num_minibatches=1))


def test_threads_of_the_games(monkeypatch):
    """The games have --num-threads, but not more threads than there are games."""
    given, make_vec = [], gym.make_vec
    monkeypatch.setattr(gym, "make_vec", lambda *_, **kwargs: given.append(kwargs) or make_vec(*_, **kwargs))
    for num_threads in (1, 2, 5):
        ppo.make_envs(make_args(num_threads=num_threads), 3).close()
    assert [kwargs["num_threads"] for kwargs in given] == [1, 2, 3]


# The command line


def test_bad_input(tmp_path):
    """One line that says what is wrong and what to do, status 2, and nothing written."""
    cases = {
        "--env-id Brekout-v5": "the ALE has no Brekout, but Breakout",
        "--env-id CartPole-v1": "the ALE has no CartPole",
        "--num-minibatches 300": "--num-minibatches is 300; it must be at most 128",
        "--adapt learning-rate --update-epochs 1 --num-minibatches 1": "--adapt needs several gradient steps",
        "--sticky-actions 1.5": "--sticky-actions is 1.5, not in [0, 1]",
        "--no-clip-rewards --no-norm-adv": "several epochs need --norm-adv or --clip-rewards",
        "--resume nowhere.pt": "nowhere.pt is no checkpoint",
    }
    for flags, message in cases.items():
        with pytest.raises(SystemExit) as stop:
            run_main(flags.split(), tmp_path)
        assert stop.value.code == 2
        assert message in run_main.error
        assert run_main.error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def run_main(flags, folder):
    """`main` in this process; what it wrote to stderr is kept in `run_main.error`."""
    import contextlib
    import io

    argv, before, error = sys.argv, os.getcwd(), io.StringIO()
    sys.argv = [str(SCRIPT), *flags]
    os.chdir(folder)
    try:
        with contextlib.redirect_stderr(error):
            ppo.main()
    finally:
        sys.argv = argv
        os.chdir(before)
        run_main.error = error.getvalue()


def test_without_the_ale(tmp_path, monkeypatch):
    """Where ale-py is missing, the command that installs it is named."""
    monkeypatch.setattr(ppo, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        run_main(["--env-id", "Pong"], tmp_path)
    assert "pip install ale-py" in run_main.error


def test_train_resume_evaluate_and_video(tmp_path):
    """A run, going on with it, evaluating it to the same returns, and a video of the first game."""
    run("--env-id", "Pong", *QUICK, "--total-timesteps", 64, cwd=tmp_path)
    (checkpoint,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert ppo.load_checkpoint(checkpoint)[1].global_step == 64
    done = run("--resume", checkpoint, "--total-timesteps", 128, cwd=tmp_path)
    assert ppo.load_checkpoint(checkpoint)[1].global_step == 128
    greedy = re.findall(r"^greedy +return (\S+) .* length (\S+?),?$", done.stdout, re.M)
    done = run("--evaluate", checkpoint, "--capture-video", cwd=tmp_path)
    again = re.findall(r"^greedy +return (\S+) .* length (\S+?),", done.stdout, re.M)
    assert greedy
    assert greedy == again
    (video,) = tmp_path.glob("runs/*/videos/*.mp4")
    assert video.stat().st_size > 10_000


# Several processes


def test_two_processes_learn_like_one(tmp_path):
    """Halves of a rollout in two processes, and all of it in one: the same weights and figures."""
    subprocess.run([*TORCHRUN, str(WORKER), str(tmp_path / "two.pt")], check=True, timeout=200)
    subprocess.run([sys.executable, str(WORKER), str(tmp_path / "one.pt")], check=True, timeout=200)
    one, two = torch.load(tmp_path / "one.pt"), torch.load(tmp_path / "two.pt")
    moved = (one["weights"] - one["before"]).norm()
    assert moved > 0.1
    assert (one["weights"] - two["weights"]).norm() < 1e-3 * moved
    assert one["figures"].keys() == two["figures"].keys()
    for name, value in one["figures"].items():
        assert two["figures"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_two_processes_train(tmp_path):
    """Under torchrun, one folder, one report, and a checkpoint from which one process goes on."""
    done = run("--env-id", "Pong", *QUICK, "--total-timesteps", 80, cwd=tmp_path, launcher=TORCHRUN)
    assert done.stdout.count("folder ") == 1
    assert len(list(tmp_path.glob("runs/*/events*"))) == 1
    (checkpoint,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert f"torchrun --nproc-per-node 2 {SCRIPT} --resume" in done.stdout
    saved, state = ppo.load_checkpoint(checkpoint)
    assert saved.num_envs == 2
    assert state.global_step == 96  # 3 iterations of 2 x 16: a process alone would need 5
    run("--resume", checkpoint, "--total-timesteps", 128, cwd=tmp_path)
    assert ppo.load_checkpoint(checkpoint)[1].global_step == 128


def test_processes_that_cannot_share(tmp_path):
    """A number of environments that the processes cannot share equally is refused, once."""
    done = run("--num-envs", 3, cwd=tmp_path, launcher=TORCHRUN, status=1)
    assert done.stderr.count("--num-envs is 3, which 2 processes cannot share equally") == 1
    assert not list(tmp_path.iterdir())


def test_a_killed_process_ends_the_run(tmp_path):
    """The other one says so, ends, and leaves a checkpoint, from which one process goes on."""
    command = [*TORCHRUN, str(SCRIPT), "--env-id", "Pong", *map(str, QUICK), "--checkpoint-seconds", "0.1"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
        wait_for(lambda: "KL" in (tmp_path / "log").read_text(), 120)  # a line of the progress
        children = subprocess.run(
            ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
        )
        second = max(map(int, children.stdout.split()))
        os.kill(second, signal.SIGKILL)
        assert process.wait(120) != 0
    text = (tmp_path / "log").read_text()
    assert "ppo_atari.py: the processes cannot exchange data (is one gone?)" in text
    assert "Last checkpoint: torchrun --nproc-per-node 2" in text
    (checkpoint,) = tmp_path.glob("runs/*/checkpoint.pt")
    _, state = ppo.load_checkpoint(checkpoint)
    assert state.global_step > 0
    run("--resume", checkpoint, "--total-timesteps", state.global_step + 32, cwd=tmp_path)
    assert ppo.load_checkpoint(checkpoint)[1].global_step == state.global_step + 32


def wait_for(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
