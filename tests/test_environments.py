"""Environments of users, policies that are loaded for them, evaluation, and `train` called by a program."""

from dataclasses import replace

import gymnasium as gym
import numpy as np
import pytest
import torch
import user_envs
from gymnasium.vector import SyncVectorEnv
from helpers import (
    CONTINUOUS,
    DISCRETE,
    LSTM,
    SMALL,
    call,
    checkpoint_in,
    each_script,
    load,
    memory_too,
    run,
)
from torch import nn

import ppo

SPACES = "vector", "discrete", "dict", "image"


@memory_too
@pytest.mark.parametrize("mode", ["NextStep", "Disabled", None])
def test_environments_that_do_not_reset_in_the_same_step_are_refused(case, mode, tmp_path, monkeypatch):
    """Their rollouts would have rows that are no transitions. Nothing is written."""

    def make_envs(args, seed):
        makers = [lambda: case.script.make_env(args)] * 4
        envs = SyncVectorEnv(makers, autoreset_mode=mode or "SameStep")
        if mode is None:  # a vector environment of another package may not say how it resets
            envs.metadata = {}
        return envs

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(case.script, "make_envs", make_envs)
    with pytest.raises(ValueError, match="same step"):
        case.script.train(case.make_args(env_id=case.walk))
    assert list(tmp_path.iterdir()) == []


def test_environments_in_processes_draw_numbers_that_the_seed_and_the_step_decide():
    """They may draw from global generators. All draw different numbers, and new ones in a resumed run."""
    args, seen = DISCRETE.make_args(env_id="user_envs:Global-v0", async_envs=True), []
    for step in (0, 0, 500):
        envs = ppo.make_envs(args, ppo.hash_seed(args.seed, step))
        seen.append(envs.reset(seed=1)[0])
        envs.close()
    for column in seen[0].T:
        assert len(set(column.tolist())) == 4
    np.testing.assert_array_equal(*seen[:2])
    assert not set(seen[0].flatten()) & set(seen[2].flatten())


def test_each_environment_that_a_run_makes_is_closed(tmp_path):
    run(DISCRETE, tmp_path)
    assert len(user_envs.LOG["made"]) == SMALL["num_envs"] + 1  # one for the evaluation
    assert set(user_envs.LOG["made"]) == set(user_envs.LOG["closed"])


def policy_of(case, folder, observation):
    """Return a policy that depends on the observation, an agent with its weights, and the environment."""
    run(case, folder, env_kwargs=f'{{"observation": "{observation}"}}')
    path = checkpoint_in(folder)
    content = load(path)
    args = case.script.Args(**content["args"])
    env = case.script.make_env(args)
    agent = case.script.Agent(
        args, gym.spaces.flatten_space(env.observation_space), case.count(env.action_space)
    )
    agent.load_state_dict(content["agent"])
    torch.manual_seed(1)
    scale = 1.0 if case is DISCRETE else 0.2  # so that actions differ, and not all are at their bounds
    for name, parameter in agent.actor.named_parameters():
        parameter.data += scale * torch.randn(parameter.shape) * ("weight" in name)
    torch.save(content | {"agent": agent.state_dict()}, path)
    return case.script.load_policy(path, env), agent, env


POLICIES = [*((DISCRETE, space) for space in SPACES), (CONTINUOUS, "vector"), (CONTINUOUS, "dict")]


@pytest.mark.parametrize(("case", "observation"), POLICIES, ids=str)
def test_a_loaded_policy_takes_the_environments_observations(case, observation, tmp_path):
    """It takes one observation of any space, or a batch of a Box. Actions are greedy, within the bounds."""
    policy, agent, env = policy_of(case, tmp_path, observation)
    env.observation_space.seed(1)
    singles = [env.observation_space.sample() for _ in range(20)]
    flat = np.stack([gym.spaces.flatten(env.observation_space, obs) for obs in singles]).astype(np.float32)
    assert agent.binary_obs.sum() == {"discrete": 6, "dict": 4}.get(observation, 0)  # one-hot stays as it is
    outputs = agent.actor(agent.normalize(torch.tensor(flat))).detach().double().numpy()
    scaled = np.clip(1 + 3 * outputs, -2, 4)  # from -1 to 1 to the bounds
    assert case is DISCRETE or np.mean((scaled > -2) & (scaled < 4)) > 0.3
    expected = outputs.argmax(-1) if case is DISCRETE else scaled
    actions = [policy(obs) for obs in singles]
    assert np.stack(actions) == pytest.approx(expected, abs=1e-5)
    assert len({str(action) for action in actions}) > 1, "always the same action: the test shows nothing"
    assert all(env.action_space.contains(action) for action in actions)
    if observation in ("vector", "image"):
        assert policy(np.stack(singles)) == pytest.approx(expected, abs=1e-5)


def test_a_loaded_policy_calls_agent_policy_with_dropout_off(tmp_path, monkeypatch):
    """A copy of the script may change `Agent.policy`."""
    policy, agent, env = policy_of(DISCRETE, tmp_path, "vector")
    original = ppo.Agent.policy

    def changed(agent, obs):
        return nn.functional.dropout(original(agent, obs), 0.9, agent.training).flip(-1)

    monkeypatch.setattr(ppo.Agent, "policy", changed)
    obs = np.stack([env.observation_space.sample() for _ in range(20)])
    flipped = original(agent, agent.normalize(torch.tensor(obs, dtype=torch.float32))).flip(-1)
    np.testing.assert_array_equal(policy(obs), flipped.argmax(-1))


@each_script
def test_an_evaluation_finds_the_returns_that_a_plain_loop_finds(case, trained):
    """They are undiscounted and unclipped, by the policy of `load_policy`."""
    path = trained(case).checkpoint
    args = replace(case.script.Args(**load(path)["args"]), eval_episodes=5)
    user_envs.LOG.clear()
    returns = case.script.evaluate(path, args)
    assert returns.tolist() == [value for value, _ in user_envs.LOG["episodes"]][-5:]
    env, seeds = case.script.make_env(args), user_envs.LOG["seeds"][-5:]
    policy, again = case.script.load_policy(path, env), []
    for seed in seeds:
        obs, _ = env.reset(seed=seed)
        rewards, over = [], False
        while not over:
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            rewards.append(reward)
            over = terminated or truncated
        again.append(sum(rewards))
    assert again == returns.tolist()


@pytest.mark.slow
def test_an_evaluation_cuts_endless_episodes_after_10000_steps_and_says_so(trained, tmp_path):
    words = ["--env-id", DISCRETE.walk, "--env-kwargs", '{"endless": true}', "--eval-episodes", 1]
    shown = call(DISCRETE, tmp_path, "--evaluate", trained(DISCRETE).checkpoint, *words)
    assert "episode 1 was stopped after 10,000 steps" in shown.out
    assert len(user_envs.LOG["steps"]) == 1 + 10_000  # one is tried


@pytest.mark.slow
@pytest.mark.parametrize("case", [DISCRETE, LSTM], ids=repr)
def test_capture_video_writes_a_file_for_each_episode(case, trained, tmp_path):
    torch.save(load(trained(case).checkpoint), tmp_path / "checkpoint.pt")
    words = ["--env-id", case.walk, "--capture-video", "--eval-episodes", 2]
    assert call(case, tmp_path, "--evaluate", "checkpoint.pt", *words).status == 0
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 2


@memory_too
def test_train_returns_the_checkpoint_the_training_return_and_the_greedy_returns(case, tmp_path, monkeypatch):
    """It raises a ValueError if a setting is refused."""
    monkeypatch.chdir(tmp_path)
    user_envs.LOG.clear()
    changes = {"env_id": case.walk, "norm_obs": False, "total_timesteps": 300, "eval_episodes": 3}
    with pytest.raises(ValueError, match="--num-envs must be from 1"):
        case.script.train(case.make_args(num_envs=0))
    results = case.script.train(case.make_args(**changes))
    names = {"checkpoint", "training_return", "greedy_returns", "best_return", "best_step", "best_replayed"}
    assert set(results) == names
    assert (tmp_path / results["checkpoint"]).samefile(checkpoint_in(tmp_path))
    returns = [value for value, _ in user_envs.LOG["episodes"]]
    assert results["greedy_returns"].tolist() == returns[-3:]
    assert results["training_return"] == pytest.approx(np.mean(returns[:-3]))


def test_the_environment_that_make_env_returns_is_the_one_that_trains(monkeypatch):
    """CartPole has a vector version of its own, which would ignore wrappers and changed attributes."""
    make_env = ppo.make_env

    def changed(args, **kwargs):
        env = make_env(args, **kwargs).unwrapped
        env.force_mag = 0.0  # so that both actions do the same
        return gym.wrappers.TransformReward(env, lambda reward: 3 * reward)

    monkeypatch.setattr(ppo, "make_env", changed)
    envs = ppo.make_envs(ppo.Args(num_envs=2), 1)
    envs.reset(seed=0)
    after, rewards, *_ = envs.step(np.zeros(2, int))
    assert rewards.tolist() == [3, 3]
    envs.reset(seed=0)
    other, *_ = envs.step(np.ones(2, int))
    np.testing.assert_array_equal(after, other)


def test_numpy_numbers_are_accepted_as_settings(tmp_path, monkeypatch):
    """They are saved as plain numbers, so that the checkpoint loads."""
    monkeypatch.chdir(tmp_path)
    settings = {"learning_rate": np.float64(1e-3), "num_steps": np.int64(32), "total_timesteps": 300}
    args = DISCRETE.make_args(env_id=DISCRETE.walk, **settings)
    args.gamma = np.float64(0.9)  # later, too
    results = ppo.train(args)
    content = load(results["checkpoint"])
    assert (content["args"]["learning_rate"], content["args"]["num_steps"]) == (1e-3, 32)


@memory_too
def test_a_terminal_observation_may_be_nan(case, tmp_path):
    """It counts nowhere, since the task ended the episode."""
    run(case, tmp_path, env_kwargs='{"fault": "nan at the end"}')
    assert all(torch.isfinite(x).all() for x in load(checkpoint_in(tmp_path))["agent"].values())


def test_an_evaluation_does_not_depend_on_random_numbers_drawn_before(trained, tmp_path):
    """Environments may draw from global generators."""
    path, content, drawn = tmp_path / "checkpoint.pt", load(trained(DISCRETE).checkpoint), []
    content["args"]["env_id"] = "user_envs:Global-v0"
    torch.save(content, path)
    for count in (1, 5):
        np.random.random(count)  # noqa: NPY002
        words = ["--evaluate", path, "--env-id", "user_envs:Global-v0", "--eval-episodes", 4]
        shown = call(DISCRETE, tmp_path, *words)
        assert shown.status == 0
        drawn.append((user_envs.LOG["drawn"][:], shown.out))
    assert drawn[0] == drawn[1]
    assert f"after {load(path)['state']['global_step']:,} steps" in shown.out
