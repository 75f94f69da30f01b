"""What once trained wrongly without a word, or failed only after training."""

import copy
import json
import os
import random
import re
import runpy
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import Enum
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
import user_envs
from gymnasium import spaces
from helpers import (
    CONTINUOUS,
    DISCRETE,
    ROOT,
    SMALL,
    call,
    checkpoint_in,
    curves,
    each_script,
    flags,
    load,
    memory_too,
    run,
    same,
)

import ppo

WALK = {"env_id": DISCRETE.walk}
common = pytest.mark.parametrize("case", [DISCRETE], ids=repr)  # text that is the same in each script


def train(case, folder, monkeypatch, **settings):
    """Call `train` in a folder, as a program does, with small settings."""
    monkeypatch.chdir(folder)
    user_envs.LOG.clear()
    return case.script.train(case.script.Args(**{"env_id": case.walk} | SMALL | settings))


def with_env(case, monkeypatch, change):
    """Let `make_env` of a script return `change(env)`."""
    make_env = case.script.make_env
    monkeypatch.setattr(case.script, "make_env", lambda args, **kwargs: change(make_env(args, **kwargs)))


# Random numbers


@memory_too
def test_training_is_the_same_with_an_evaluation_after_each_iteration(case, tmp_path, monkeypatch):
    """Also where the environment draws from the generators of Python and NumPy, and from its spaces."""

    shared = case.script.make_env(case.script.Args(env_id=case.walk)).action_space

    class Drawing(user_envs.Walk):
        action_space = copy.deepcopy(shared)  # all instances have the same one

        def __init__(self, render_mode=None):
            super().__init__("box" if case is CONTINUOUS else "discrete")
            del self.action_space

        def step(self, action):
            obs, reward, *ends = super().step(action)
            drawn = random.random() + np.random.random() + self.action_space.sample().mean()  # noqa: NPY002
            return obs, reward + drawn, *ends

    monkeypatch.setattr(case.script, "make_env", lambda args, **kwargs: Drawing())
    log, contents = case.script.Run.log, []

    def evaluating(run, *arguments):
        log(run, *arguments)
        run.save()
        case.script.evaluate(run.path, run.args)

    for i, changed in enumerate((log, evaluating)):
        monkeypatch.setattr(case.script.Run, "log", changed)
        (tmp_path / str(i)).mkdir()
        contents.append(load(train(case, tmp_path / str(i), monkeypatch)["checkpoint"]))
    assert same(contents[0]["agent"], contents[1]["agent"])
    assert len(user_envs.LOG["episodes"]) > 30


@memory_too
def test_runs_are_equal_though_an_environment_draws_from_its_spaces(case, tmp_path, monkeypatch):
    """An opponent often does. The evaluation is equal, too."""

    class Opponent(gym.Wrapper):
        def step(self, action):
            obs, reward, *ends = self.env.step(action)
            return obs, reward + self.action_space.sample().mean(), *ends

    with_env(case, monkeypatch, lambda env: Opponent(env.unwrapped))
    agents, returns = [], []
    for name in "ab":
        (tmp_path / name).mkdir()
        results = train(case, tmp_path / name, monkeypatch)
        agents.append(load(results["checkpoint"])["agent"])
        returns.append(results["greedy_returns"].tolist())
    assert same(*agents)
    assert returns[0] == returns[1]


# Settings, coefficients and checkpoints


@dataclass
class Mine(ppo.Args):
    """A program's settings; one has no default that the class itself could hold."""

    sizes: list[int] = field(default_factory=lambda: [64, 64])


def test_settings_that_a_checkpoint_would_forget_are_refused():
    """A program may pass settings of a class of its own, and not put it in the place of `Args`."""
    with pytest.raises(ValueError, match=r"would forget .*sizes"):
        ppo.train(Mine())


class Mode(Enum):
    FAST = 1


def test_a_setting_with_a_default_factory_is_loaded_from_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(ppo, "Args", Mine)
    results = train(DISCRETE, tmp_path, monkeypatch, sizes=[8, 4])
    assert ppo.load_checkpoint(results["checkpoint"])[0].sizes == [8, 4]


@pytest.mark.parametrize("where", ["settings", "state"])
def test_what_a_checkpoint_cannot_hold_fails_at_the_first_save(where, tmp_path, monkeypatch):
    """Otherwise, the checkpoint could not be loaded after hours of training."""
    log = ppo.Run.log

    def changed(run, *arguments):
        if where == "settings":
            run.args.mode = Mode.FAST
        else:
            run.state.cost = np.float64(0.5)
        log(run, *arguments)

    monkeypatch.setattr(ppo.Run, "log", changed)
    with pytest.raises(Exception, match="Unsupported global"):
        train(DISCRETE, tmp_path, monkeypatch, total_timesteps=3000)
    assert len(user_envs.LOG["steps"]) <= 1 + SMALL["num_envs"] * SMALL["num_steps"]


ADAPTED = [  # settings, the last iteration's KL and entropy, the coefficient, and what it becomes
    ({"clip_coef": 0.005, "adapt": "clip-coef"}, (1.0, 0.5), "clip_coef", 0.0025),
    ({"ent_coef": 50.0, "target_entropy": 1.0}, (0.0, 0.5), "ent_coef", 55.0),
    ({"kl_coef": 1e-6, "adapt": "kl-coef", "surrogate": "kl-penalty"}, (0.0, 0.5), "kl_coef", 5e-7),
    ({"clip_coef": 0.5, "adapt": "clip-coef"}, (0.0, 0.5), "clip_coef", 1.0),
]


@each_script
@pytest.mark.parametrize(("settings", "last", "name", "expected"), ADAPTED)
def test_an_adapted_coefficient_moves_where_it_should_within_the_bounds_of_a_setting(
    case, settings, last, name, expected, monkeypatch
):
    """The last one's bounds were raised by a program."""
    monkeypatch.setitem(case.script.BOUNDS, "clip_coef", (1e-3, 2))
    args = case.make_args(**settings)
    state = case.make_state(args)
    state.kl, state.entropy = last
    case.script.adjust_coefficients(state, args)
    assert getattr(state, name) == pytest.approx(expected)


def test_each_group_of_parameters_keeps_its_ratio_to_the_learning_rate(tmp_path, monkeypatch):
    """Also in a resumed run."""

    def adam(parameters, rate, **others):
        parameters = [*parameters]
        return torch.optim.Adam(
            [{"params": parameters[:6]}, {"params": parameters[6:], "lr": rate / 4}], rate
        )

    monkeypatch.setattr(ppo, "Adam", adam)
    results = train(DISCRETE, tmp_path, monkeypatch)
    for more in ({}, {"resume": results["checkpoint"], "total_timesteps": 600}):
        if more:
            train(DISCRETE, tmp_path, monkeypatch, **more)
        first, second = load(results["checkpoint"])["optimizer"]["param_groups"]
        assert 0 < first["lr"] < 1e-3
        assert second["lr"] == pytest.approx(first["lr"] / 4)


def test_metrics_keep_no_graph(tmp_path, monkeypatch):
    """A copy may add one without `detach`; with --compile, it would fail far from there."""
    ppo_loss, seen = ppo.ppo_loss, []

    def changed(*arguments):
        loss, metrics = ppo_loss(*arguments)
        return loss, metrics | {"mine": loss * 2}

    args = DISCRETE.make_args()
    agent = DISCRETE.make_agent(args)
    batch = DISCRETE.make_batch(agent, DISCRETE.make_rollout(args, agent), args)
    monkeypatch.setattr(ppo, "ppo_loss", changed)
    for compute in (ppo.compute_gradients,):
        seen.append(compute(agent, batch, args, DISCRETE.make_state(args)))
    assert not any(metric.requires_grad for metric in seen[0].values())


@memory_too
def test_where_all_returns_are_equal_no_explained_variance_is_logged(case, tmp_path):
    """A solved bandit gave NaN or minus infinity."""
    env_id, kwargs = case.walk.replace("Walk", "Probe"), '{"pays": "always"}'
    run(case, tmp_path, "--no-norm-rewards", "--norm-adv", env_id=env_id, env_kwargs=kwargs)
    data = curves(checkpoint_in(tmp_path).parent)
    assert "losses/explained_variance" not in data
    for values in data.values():
        assert np.isfinite([*values.values()]).all()


def test_a_policy_for_a_missing_device_is_refused_by_pytorch(trained):
    if torch.cuda.is_available():
        pytest.skip("there is such a device")
    env = ppo.make_env(ppo.Args(env_id=DISCRETE.walk))
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        ppo.load_policy(trained(DISCRETE).checkpoint, env, "cuda")


# Environments


class Changed(gym.Wrapper):
    """Changes what `reset` and `step` return, and what the space says."""

    def __init__(self, env, space=None, obs=None, first=None, reward=None, end=None):
        super().__init__(env)
        self.observation_space = env.observation_space if space is None else space
        self.obs, self.first, self.reward, self.end = obs, first, reward, end

    def reset(self, **kwargs):
        obs, info = self.env.reset(**kwargs)
        return (obs if self.obs is None else self.obs(obs), info) if self.first is None else self.first(obs)

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        obs = obs if self.obs is None else self.obs(obs)
        reward = reward if self.reward is None else self.reward(reward)
        terminated = terminated if self.end is None else self.end(terminated)
        return obs, reward, terminated, truncated, info


@common
@pytest.mark.parametrize("is_dict", [False, True])
def test_decimals_are_not_cut_where_a_space_says_that_there_are_none(case, is_dict, monkeypatch):
    """They are where Gymnasium flattens such a space, alone or in a `Dict`."""
    space, obs = spaces.Box(-9, 9, (3,), np.int64), np.array([0.25, -1.5, 2.0])
    given, expected = obs, [*obs]
    if is_dict:
        space, given, expected = spaces.Dict(a=space, b=spaces.Discrete(2)), {"a": obs, "b": 1}, [*obs, 0, 1]
    with_env(case, monkeypatch, lambda env: Changed(env, space, lambda _: given))
    envs = case.script.make_envs(case.script.Args(env_id=case.walk, num_envs=1), 1)
    assert envs.reset()[0].tolist() == [expected]


@common
@pytest.mark.parametrize("wrapper", ["NormalizeObservation", "NormalizeReward"])
def test_normalisers_around_an_environment_are_refused_by_name(case, wrapper, tmp_path, monkeypatch):
    """People bring them from elsewhere. Their statistics would not be saved."""
    with_env(case, monkeypatch, lambda env: gym.wrappers.TimeLimit(getattr(gym.wrappers, wrapper)(env), 50))
    with pytest.raises(ValueError, match=wrapper):
        train(case, tmp_path, monkeypatch)
    assert os.listdir(tmp_path) == []


@common
def test_one_and_the_same_environment_for_all_is_refused(case, tmp_path, monkeypatch):
    env = case.script.make_env(case.script.Args(env_id=case.walk))
    monkeypatch.setattr(case.script, "make_env", lambda args, **kwargs: env)
    with pytest.raises(ValueError, match="new environment"):
        train(case, tmp_path, monkeypatch)
    assert os.listdir(tmp_path) == []


@memory_too
def test_observations_of_another_shape_and_the_same_size_are_taken_in_training_and_evaluation(
    case, tmp_path, monkeypatch
):
    """The policy took three rows of one number for three observations."""
    with_env(case, monkeypatch, lambda env: Changed(env, obs=lambda obs: obs.reshape(3, 1)))
    results = train(case, tmp_path, monkeypatch)
    assert results["greedy_returns"].tolist() == [value for value, _ in user_envs.LOG["episodes"]][-3:]


WRONG = {
    "one number for three": {"obs": lambda obs: obs[:1]},
    "an array in place of a pair": {"space": spaces.Box(-5, 5, (2,)), "first": lambda obs: obs[:2]},
    "two rewards": {"reward": lambda reward: np.array([reward, reward])},
    "two ends": {"end": lambda end: np.array([end, end])},
}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_would_be_broadcast_fails_before_training(wrong, is_async, tmp_path, monkeypatch):
    with_env(DISCRETE, monkeypatch, lambda env: Changed(env, **WRONG[wrong]))
    with pytest.raises((ValueError, TypeError)):
        train(DISCRETE, tmp_path, monkeypatch, async_envs=is_async)
    assert os.listdir(tmp_path) == []


def test_a_reset_that_seeds_pytorch_is_refused(tmp_path, monkeypatch):
    """Each episode would explore as the one before. Drawing from its generator does no harm."""

    def seeding(obs):
        torch.manual_seed(42)
        return obs, {}

    def drawing(obs):
        return obs + torch.rand(3).numpy(), {}

    make_env = ppo.make_env
    monkeypatch.setattr(ppo, "make_env", lambda args, **kwargs: Changed(make_env(args), first=drawing))
    train(DISCRETE, tmp_path, monkeypatch)
    monkeypatch.setattr(ppo, "make_env", lambda args, **kwargs: Changed(make_env(args), first=seeding))
    with pytest.raises(ValueError, match="seeds PyTorch"):
        train(DISCRETE, tmp_path, monkeypatch)


@memory_too
def test_training_and_evaluation_must_have_the_same_actions(case, tmp_path, monkeypatch):
    """A program may replace one of `make_envs` and `make_env`, and forget the other."""
    make_envs, other = case.script.make_envs, {CONTINUOUS: "discrete"}.get(case, "box")
    kwargs = f'{{"action": "{other}"}}'
    monkeypatch.setattr(
        case.script, "make_envs", lambda args, seed: make_envs(replace(args, env_kwargs=kwargs), seed)
    )
    with pytest.raises(ValueError, match="different action spaces"):
        train(case, tmp_path, monkeypatch)


@common
def test_observations_of_several_parts_and_rewards_of_any_number_train_and_are_evaluated(
    case, tmp_path, monkeypatch
):
    """Such an observation has no shape that NumPy could tell."""
    space = spaces.Tuple((spaces.Discrete(3), spaces.Box(-1, 1, (2,))))
    with_env(case, monkeypatch, lambda env: Changed(env, space, lambda _: space.sample(), reward=Decimal))
    results = train(case, tmp_path, monkeypatch)
    assert results["greedy_returns"].tolist() == [value for value, _ in user_envs.LOG["episodes"]][-3:]


def test_a_single_end_or_reward_in_an_array_is_taken(tmp_path, monkeypatch):
    with_env(DISCRETE, monkeypatch, lambda env: Changed(env, reward=np.atleast_1d, end=np.atleast_1d))
    results = train(DISCRETE, tmp_path, monkeypatch)
    assert results["greedy_returns"].tolist() == [value for value, _ in user_envs.LOG["episodes"]][-3:]


@common
def test_observations_from_0_to_1_are_normalised_unless_they_are_binary(case, tmp_path, monkeypatch):
    """Prices that are scaled to 0 to 1 may differ in the third digit. The kind of the space decides."""
    unit = spaces.Box(0, 1, (2,))
    space = spaces.Dict(
        a=unit,
        b=spaces.Discrete(3),
        c=spaces.MultiBinary(2),
        d=spaces.Tuple((spaces.MultiDiscrete([2, 2]), unit)),
        e=spaces.Box(0, 1, (1,), np.int8),
        f=spaces.Box(0, 255, (1,), np.uint8),
    )
    kept = [False] * 2 + [True] * 3 + [True] * 2 + [True] * 4 + [False] * 2 + [True] + [False]
    with_env(case, monkeypatch, lambda env: Changed(env, space, lambda _: space.sample()))
    content = load(train(case, tmp_path, monkeypatch)["checkpoint"])
    assert content["agent"]["binary_obs"].tolist() == kept


STORED = Path(__file__).parent / "ppo_0.2.pt"


def test_a_checkpoint_of_version_0_2_keeps_its_rule_for_observations_from_0_to_1():
    """It has no mask. Its networks have learnt with such numbers as they are, here one of two."""
    space = spaces.Box(np.float32([0, -1]), np.float32([1, 1]))

    class Env(gym.Env):
        observation_space, action_space = space, spaces.Discrete(3)

    actions = json.loads(STORED.with_suffix(".json").read_text())
    for env in (Env(), ppo.Flat(Env())):
        policy = ppo.load_policy(STORED, env)
        assert [int(policy(np.float32(obs))) for obs in actions["obs"]] == actions["actions"]
    assert len(set(actions["actions"])) == 3


@common
def test_a_large_offset_that_float32_rounds_away_is_told(case, tmp_path, monkeypatch):
    """Seconds since 1970, for example. Other runs are told nothing."""

    def shifted(env):
        space = spaces.Box(-np.inf, np.inf, (3,), np.float64)
        return Changed(env, space, lambda obs: obs + np.array([0, 1.7e9, 0]))

    assert "digits" not in run(case, tmp_path).out
    with_env(case, monkeypatch, shifted)
    printed = run(case, tmp_path).out
    assert printed.count("too few digits for observations [1]") == 1


BAD = {"reward": 1e20, "obs": 1e20, "next_obs": np.nan}


@common
@pytest.mark.parametrize("name", BAD)
def test_a_number_that_is_nan_or_too_large_is_told_with_its_step_and_environment(
    case, name, tmp_path, monkeypatch
):
    """The learning rate was blamed. Here, environment 2 of 4 is wrong from its sixth step."""
    made = []

    def change(env):
        made.append(env)
        if len(made) != 4:  # the first is for the evaluation
            return env
        steps = []

        def broken(value):
            steps.append(value)
            return value * 0 + BAD[name] if len(steps) > 5 else value

        if name == "reward":
            return Changed(gym.wrappers.TimeLimit(env, 50), reward=broken)
        return Changed(env, obs=broken)

    kwargs = '{"endless": true}' if name != "next_obs" else '{"fault": "nan at a time limit"}'
    with_env(case, monkeypatch, change if name != "next_obs" else lambda env: env)
    with pytest.raises(FloatingPointError, match=rf"{name} is .* in step \d+ .* in environment \d") as raised:
        train(case, tmp_path, monkeypatch, env_kwargs=kwargs)
    if name != "next_obs":
        assert "environment 2" in str(raised.value)


def test_the_share_of_observations_at_the_limit_is_logged(tmp_path, monkeypatch):
    """A sentinel makes others look the same. Here, a number is 1e9 once in 200 steps."""
    steps = []

    def rarely(obs):
        steps.append(obs)
        return obs + np.array([0, 0, 1e9 * (len(steps) % 200 == 0)], np.float32)

    with_env(DISCRETE, monkeypatch, lambda env: Changed(env, obs=rarely))
    run(DISCRETE, tmp_path, total_timesteps=1000)
    values = [*curves(checkpoint_in(tmp_path).parent)["losses/obs_clipfrac"].values()]
    assert 0 < max(values[1:]) < 0.01


# The end of a run, and its files


def test_a_run_is_saved_where_it_began_though_its_environment_changes_the_folder(tmp_path, monkeypatch):
    def moved(env):
        (tmp_path / "elsewhere").mkdir(exist_ok=True)
        os.chdir(tmp_path / "elsewhere")
        return env

    with_env(DISCRETE, monkeypatch, moved)
    done = call(DISCRETE, tmp_path, *flags(**WALK | SMALL))
    assert (done.status, done.err) == (0, "")
    assert load(checkpoint_in(tmp_path))["state"]["global_step"] >= 300
    assert re.search(r"resume: .*--resume (\S+)", done.out)[1] == str(checkpoint_in(tmp_path))
    assert os.listdir(tmp_path / "elsewhere") == []


def test_an_environment_that_cannot_exist_beside_others_fails_before_anything_is_written(
    tmp_path, monkeypatch
):
    """One that holds a port, for example, failed after training, when the evaluation made another."""
    alive = []

    def single(env):
        alive.append(env)
        if len(alive) > 1:
            raise OSError("Address already in use")
        return env

    with_env(DISCRETE, monkeypatch, single)
    with pytest.raises(OSError, match="Address"):
        train(DISCRETE, tmp_path, monkeypatch, num_envs=1, num_minibatches=1)
    assert os.listdir(tmp_path) == []


def test_an_environment_that_fails_in_its_first_reset_leaves_no_folder(tmp_path, monkeypatch):
    def broken(obs):
        raise RuntimeError("no level left")

    with_env(DISCRETE, monkeypatch, lambda env: Changed(env, first=broken))
    with pytest.raises(RuntimeError, match="no level left"):
        train(DISCRETE, tmp_path, monkeypatch)
    assert os.listdir(tmp_path) == []


@common
def test_what_a_run_prints_can_be_printed_in_ascii(case, trained):
    """Some terminals have no other characters: the run failed with its last line."""
    assert trained(case).printed.isascii()


def test_printed_commands_can_be_pasted_though_a_path_has_a_space(trained, tmp_path):
    folder = tmp_path / "my runs"
    folder.mkdir()
    torch.save(load(trained(DISCRETE).checkpoint), folder / "checkpoint.pt")
    words = "--resume", folder / "checkpoint.pt", "--env-id", DISCRETE.walk, "--total-timesteps", 500
    done = call(DISCRETE, tmp_path, *words)
    commands = [
        shlex.split(line.partition(":")[2]) for line in re.findall("^(?:resume|watch):.*", done.out, re.M)
    ]
    assert [command[:3] for command in commands] == [
        ["python", "ppo.py", "--resume"],
        ["python", "ppo.py", "--evaluate"],
    ]
    for command in commands:
        assert (tmp_path / command[3]).samefile(folder / "checkpoint.pt")


def test_the_command_to_resume_that_a_complete_run_prints_can_be_pasted_though_the_run_was_short(tmp_path):
    """It asked for fewer steps than an iteration has."""
    printed = run(DISCRETE, tmp_path, total_timesteps=50).out
    (line,) = re.findall("^resume: python ppo.py (.*)", printed, re.M)
    done = call(DISCRETE, tmp_path, *shlex.split(line))
    assert done.status == 0, done.err
    steps = load(checkpoint_in(tmp_path))["state"]["global_step"]
    assert steps == 2 * 128


def test_the_command_to_watch_is_printed_where_an_environment_can_render(trained, tmp_path):
    assert "\nwatch: " in trained(DISCRETE).printed
    kwargs = '{"pays": "always"}'
    assert "watch:" not in run(DISCRETE, tmp_path, env_id="user_envs:Probe-v0", env_kwargs=kwargs).out


@common
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_evaluation_within_an_episode_and_reports_what_was_played(
    case, number, tmp_path, monkeypatch
):
    """Training is complete: the exit status is 0. Afterwards, Ctrl-C is Python's again."""
    steps, training = [], 1 + 3 * SMALL["num_envs"] * SMALL["num_steps"]

    def interrupt(reward):
        steps.append(reward)
        if len(steps) == training + 41:
            os.kill(os.getpid(), number)
        return reward

    before = signal.getsignal(number)
    with_env(case, monkeypatch, lambda env: Changed(env, reward=interrupt))
    done = call(case, tmp_path, *flags(**{"env_id": case.walk} | SMALL | {"eval_episodes": 5000}))
    assert done.status == 0
    assert len(steps) == training + 41
    played = int(re.search(r"in (\d+) episodes", done.out)[1])
    assert 1 <= played < 41
    logged = curves(checkpoint_in(tmp_path).parent)["eval/greedy_return"]
    assert len(logged) == 1
    assert signal.getsignal(number) is before


def test_a_program_can_train_after_a_run_that_was_stopped(tmp_path, monkeypatch):
    """In a notebook, a second run did nothing, and returned NaN."""
    ppo.STOP.set()
    results = train(DISCRETE, tmp_path, monkeypatch)
    assert results["training_return"] > 0
    assert len(results["greedy_returns"]) == 3


# --resume, --evaluate and --init


@common
def test_latest_is_the_newest_run_of_this_name(case, tmp_path):
    for name, seed in (("a", 1), ("a", 2), ("b", 3), ("a__b", 4)):
        run(case, tmp_path, exp_name=name, seed=seed)
    for words, steps in (([], 384), (["--total-timesteps", 500], 512)):
        flag = "--resume" if words else "--evaluate"
        done = call(case, tmp_path, flag, "latest", "--exp-name", "a", "--env-id", case.walk, *words)
        assert (done.status, done.err) == (0, "")
        assert f"after {steps} steps" in done.out
    reached = {
        path.parent.name.split("__")[-2]: load(path)["state"]["global_step"]
        for path in tmp_path.glob("runs/*/*.pt")
    }
    assert reached == {"1": 384, "2": 512, "3": 384, "4": 384}


@memory_too
def test_init_begins_a_new_run_with_the_networks_and_normalisers_of_a_checkpoint(case, trained, tmp_path):
    """The optimizer is new, and the step is 0. With a learning rate of 0, the networks stay as they are."""
    start = trained(case).checkpoint
    run(case, tmp_path, "--init", start, learning_rate=0, total_timesteps=1)
    old, new = load(start), load(checkpoint_in(tmp_path))
    networks = [name for name in old["agent"] if "moments" not in name]
    assert networks
    assert all(torch.equal(old["agent"][name], new["agent"][name]) for name in networks)
    rows = SMALL["num_envs"] * SMALL["num_steps"]
    assert new["state"]["global_step"] == rows
    for moments in ("obs_moments", "return_moments"):
        assert new["agent"][f"{moments}.count"] == old["agent"][f"{moments}.count"] + rows
    assert {slot["step"].item() for slot in new["optimizer"]["state"].values()} == {4}
    assert checkpoint_in(tmp_path).parent.name != start.parent.name


HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""


@common
def test_a_run_that_is_still_going_is_not_resumed(case, trained, tmp_path):
    """Both would write the same files. Once the other process is gone, it can be resumed."""
    torch.save(load(trained(case).checkpoint), tmp_path / "checkpoint.pt")
    command = [sys.executable, "-c", HOLD, tmp_path / ".lock"]
    words = ["--resume", tmp_path, "--env-id", case.walk, "--total-timesteps", 500]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        refused = call(case, tmp_path, *words)
        other.kill()
    assert (refused.status, refused.err.count("\n")) == (2, 1)
    assert "still going" in refused.err
    for _ in range(2):  # this process holds no lock, either
        assert call(case, tmp_path, *words).status in (0, 2)
    assert load(tmp_path / "checkpoint.pt")["state"]["global_step"] == 512


@pytest.mark.parametrize("file", ["ppo.py", "ppo_atari.py"])
def test_torchrun_is_refused(file, monkeypatch, capsys):
    """Each process would train the same run."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", [file])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / file), run_name="__main__")
    assert end.value.code == 2
    assert "torchrun" in capsys.readouterr().err


def test_a_resumed_run_reads_its_checkpoint_twice_and_makes_one_environment_more_than_it_has(
    trained, tmp_path, monkeypatch
):
    """Once for the settings, once for the networks."""
    path = tmp_path / "checkpoint.pt"
    torch.save(load(trained(DISCRETE).checkpoint), path)
    torch_load, read = torch.load, []

    def counted(file, **kwargs):
        read.append((os.path.abspath(file), path.stat().st_mtime_ns))
        return torch_load(file, **kwargs)

    written = path.stat().st_mtime_ns
    monkeypatch.setattr(torch, "load", counted)
    run(DISCRETE, tmp_path, "--resume", path, total_timesteps=500)
    assert read.count((str(path), written)) == 2
    assert len(user_envs.LOG["made"]) == SMALL["num_envs"] + 1
