"""Environments: which are taken, what is said when one fails, policies, evaluation, and `train` in code."""

import io
import math
import multiprocessing
import os
import random
import re
import signal
import sys
import threading

import cli_helpers as cli
import gymnasium as gym
import numpy as np
import pytest
import torch
import user_envs
from cli_helpers import CONTINUOUS, PPO, SIZE, SMALL, call, checkpoint_in, each_script, load, run, steps_done
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

SPACES = "vector", "discrete", "dict", "tuple", "text", "board"


# Which environments are taken


@cli.each_script_fast
@pytest.mark.parametrize(
    ("name", "settings", "kind"),
    [
        ("Walk", {}, SyncVectorEnv),
        ("NativeNextStep", {}, user_envs.Native),
        ("NativeSameStep", {}, SyncVectorEnv),
        ("NativeNextStep", {"env_kwargs": "observation='dict'"}, SyncVectorEnv),
        ("NativeNextStep", {"env_kwargs": "max_episode_steps=5"}, SyncVectorEnv),
        ("NativeNextStep", {"env_kwargs": "disable_env_checker=True"}, user_envs.Native),
    ],
)
def test_environments_reset_in_the_next_step(script, name, settings, kind, tmp_path):
    """An environment's own vector version is used if it resets as the rollout needs it."""
    envs = script.module.make_envs(script.args(env_id=script.env(name), **settings))
    assert type(envs.unwrapped) is kind
    assert envs.num_envs == 4
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    envs.close()


@each_script
@pytest.mark.parametrize("name", SPACES)
def test_observations_that_flatten(script, name, tmp_path):
    """Dict, Tuple and Discrete observations train; one-hot entries are not normalised."""
    run(script, tmp_path, total_timesteps=300, env_kwargs=f"observation='{name}'")
    agent = load(checkpoint_in(tmp_path))["agent"]
    assert agent["normalised"].sum() == {"discrete": 0, "text": 6, "board": 6}.get(name, 3)
    assert len(agent["normalised"]) == gym.spaces.flatdim(user_envs.OBSERVATIONS[name])


@each_script
@pytest.mark.parametrize("place", ["put in its place", "in a copy"])
def test_a_vector_version_does_not_replace_wrappers(script, place, tmp_path, monkeypatch):
    """What a user's `make_env` wraps an environment in is part of training, too."""
    make_env = script.module.make_env

    def wrapped(args, **kwargs):
        return gym.wrappers.TransformReward(make_env(args, **kwargs), lambda reward: reward + 1000)

    if place == "in a copy":
        wrapped.__module__ = script.module.__name__
    monkeypatch.setattr(script.module, "make_env", wrapped)
    monkeypatch.chdir(tmp_path)
    results = script.module.train(script.args(env_id=script.env("NativeNextStep"), total_timesteps=300))
    assert results["training_return"] > 1000


@each_script
def test_a_vector_version_does_not_replace_a_changed_environment(script, tmp_path, monkeypatch):
    """Nor attributes that a `make_env` changes which is put in the place of the script's."""
    make_env = script.module.make_env

    def changed(args, **kwargs):
        env = make_env(args, **kwargs)
        env.unwrapped.endless = True
        return env

    monkeypatch.setattr(script.module, "make_env", changed)
    monkeypatch.chdir(tmp_path)
    settings = {"total_timesteps": 300, "eval_max_steps": 10}
    results = script.module.train(script.args(env_id=script.env("NativeNextStep"), **settings))
    assert math.isnan(results["training_return"])


@each_script
def test_infos_need_not_be_alike(script, tmp_path):
    """Environments may return infos that a vector environment could not merge."""
    run(script, tmp_path, total_timesteps=300, env_kwargs="fault='infos'")


UNSUITED = {  # script, environment and arguments: what the refusal says, and must not say
    (PPO, "Pendulum-v1", ""): ("ppo_continuous.py", "ppo.py:.*ppo.py"),
    (PPO, "ALE/Pong-v5", ""): ("ppo_atari.py", "ppo_continuous"),
    (PPO, "CarRacing-v3", ""): ("images as observations", r"use ppo|\.py.*\.py"),
    (PPO, "CarRacing-v3", "continuous=False"): ("images as observations", r"use ppo|\.py.*\.py"),
    (PPO, "user_envs:Walk-v0", "observation='image'"): ("images as observations", r"use ppo|\.py.*\.py"),
    (PPO, "user_envs:Walk-v0", "observation='sequence'"): ("Sequence", "use ppo"),
    (CONTINUOUS, "CartPole-v1", ""): ("use ppo.py", "ppo_atari"),
    (CONTINUOUS, "ALE/Pong-v5", ""): ("ppo_atari.py", "use ppo.py"),
    (CONTINUOUS, "PongNoFrameskip-v4", ""): ("PongNoFrameskip-v4", "use ppo.py"),
    (CONTINUOUS, "CarRacing-v3", ""): ("images as observations", r"use ppo|\.py.*\.py"),
}


@pytest.mark.parametrize("case", UNSUITED, ids=lambda case: f"{case[0].module.__name__}-{case[1]}-{case[2]}")
def test_unsuited_environments(case, tmp_path):
    """Refused in one line, with the script that can train on it if there is one, and never in a circle."""
    script, env_id, kwargs = case
    if "CarRacing" in env_id:
        pytest.importorskip("Box2D")
    result = call(script, tmp_path, "--env-id", env_id, f"--env-kwargs={kwargs}")
    said, unsaid = UNSUITED[case]
    cli.assert_refused(result, tmp_path, said)
    assert not re.search(unsaid, result.err)


def test_further_wrappers(tmp_path):
    """Wrappers that an environment is registered with are part of it, in training and in evaluation."""
    cut = gym.wrappers.TimeLimit.wrapper_spec(max_episode_steps=4)
    gym.register("Wrapped-v0", user_envs.Walk, kwargs={"endless": True}, additional_wrappers=(cut,))
    done = call(PPO, tmp_path, "--env-id", "Wrapped-v0", *SMALL, "--total-timesteps", 200)
    assert (done.status, done.err) == (0, "")
    results = re.search(r"from ([\d.]+) to ([\d.]+)", done.out)
    assert 2 <= float(results[1]) <= float(results[2]) <= 6


# Environments that fail


@each_script
@pytest.mark.parametrize("fault", ["raise", "reset"])
def test_an_exception_is_shown_as_it_is(script, fault, tmp_path):
    """After its traceback, the command to resume; exit status 1."""
    kwargs = f"fault='{fault}', at=300"
    flags = ["--env-kwargs", kwargs, "--checkpoint-seconds", 1e-9]
    result = call(script, tmp_path, "--env-id", script.env(), *SMALL, *flags)
    assert result.status == 1
    traceback = result.err.index("Traceback (most recent call last)")
    shown = re.search(r"^RuntimeError: the simulator of seed \d+ broke$", result.err, re.MULTILINE).start()
    resumed = result.err.index("--resume")
    assert "user_envs.py" in result.err, "the traceback must show where it was raised"
    assert traceback < shown < resumed
    path = checkpoint_in(tmp_path)
    assert 0 < steps_done(path) <= 300
    assert cli.printed_checkpoint(result.err, "--resume", tmp_path).samefile(path)
    assert f"{steps_done(path):,}" in result.err.splitlines()[-1]


@each_script
def test_environments_are_closed(script, tmp_path):
    """After training and after an exception; and no two exist where one is asked for."""
    run(script, tmp_path, "--num-envs", 1, env_kwargs="fault='only one'", total_timesteps=100)
    assert user_envs.LOG["open"] == []
    result = call(script, tmp_path, "--env-id", script.env(), *SMALL, "--env-kwargs", "fault='raise', at=200")
    assert result.status == 1
    assert user_envs.LOG["open"] == []


@each_script
def test_workers_have_random_numbers_of_their_own(script, monkeypatch):
    """Also those that environments draw from the global generators, which processes inherit."""
    monkeypatch.setattr(multiprocessing.current_process(), "_name", "AsyncVectorEnv-worker")
    drawn = []
    with cli.this_process_as_it_was():
        for seed, index in ((1, 0), (1, 1), (2, 0), (1, 0)):
            script.module.FlatEnv(script.args(seed=seed), index).close()
            drawn.append((random.random(), np.random.random()))  # noqa: NPY002
    assert drawn[0] == drawn[3]
    assert len({number for numbers in drawn for number in numbers}) == 6


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_a_worker_fails(fault, tmp_path):
    """In a worker process, too; and one that dies does not make the run hang."""
    kwargs = f"fault='{fault}', at=100"
    flags = ["--env-kwargs", kwargs, "--checkpoint-seconds", 1e-9, "--async-envs"]
    result = cli.shell(PPO, tmp_path, "--env-id", PPO.env(), *SMALL, *flags)
    assert result.status == 1
    assert 0 < steps_done(checkpoint_in(tmp_path)) <= 4 * 100
    assert cli.printed_checkpoint(result.err, "--resume", tmp_path).samefile(checkpoint_in(tmp_path))
    if fault == "raise":
        assert re.search(r"Worker-[0-3]", result.err)
        assert "RuntimeError: the simulator of seed" in result.err


@pytest.mark.slow
def test_a_worker_cannot_start(tmp_path):
    """The others end, too, and its exception is shown."""
    flags = ["--env-id", PPO.env(), "--async-envs", "--env-kwargs", "fault='third'"]
    result = cli.shell(PPO, tmp_path, *flags)
    assert result.status == 1
    assert "RuntimeError: there are two licences" in result.err


@each_script
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("nan start", ["environment ", "not finite", "nan"]),
        ("nan observation", ["environment ", "not finite", "step", "nan"]),
        ("nan reward", ["environment ", "not finite", "step", "reward nan"]),
        ("shape", ["environment ", "4 numbers", "its space is Box", "(3,)"]),
        ("column", ["environment ", "shape (3, 1)", "its space is Box", "(3,)"]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_bad_values_are_reported(script, fault, words, tmp_path):
    """Not finite, or of another shape than the space says: environment, step, expected and actual."""
    kwargs = f"fault='{fault}', at=300"
    result = call(script, tmp_path, "--env-id", script.env(), *SMALL, "--env-kwargs", kwargs)
    assert result.status == 1
    for word in words:
        assert word in result.err
    assert "--resume" in result.err


@pytest.mark.slow
def test_a_refusal_after_workers_have_started(tmp_path):
    """It is one line, too."""
    run(PPO, tmp_path, total_timesteps=50)
    flags = ["--resume", checkpoint_in(tmp_path), "--env-id", PPO.env(), "--async-envs"]
    result = cli.shell(PPO, tmp_path, *flags)
    assert (result.status, result.err.count("\n")) == (2, 1), result.err


# Policies


def policy_of(script, folder, name, **settings):
    """The policy of a short run, and the agent with the same weights."""
    kwargs = f"observation='{name}'"
    run(script, folder, total_timesteps=300, learning_rate=0.01, env_kwargs=kwargs, **settings)
    path = checkpoint_in(folder)
    env = gym.wrappers.FlattenObservation(script.module.make_env(script.args(env_kwargs=kwargs)))
    agent = script.module.Agent(script.args(), env.observation_space, env.action_space)
    agent.load_state_dict(load(path)["agent"])
    return script.module.load_policy(path), agent, env


@cli.each_script_fast
@pytest.mark.parametrize("name", SPACES)
def test_a_policy_takes_the_environments_observations(script, name, tmp_path):
    """One or a batch of them, as they are; its actions are the most likely ones, within the bounds."""
    policy, agent, env = policy_of(script, tmp_path, name)
    space = user_envs.OBSERVATIONS[name]
    space.seed(1)
    singles = [space.sample() for _ in range(20)]
    batch = concatenate(space, singles, create_empty_array(space, 20))
    flat = torch.tensor(np.stack([gym.spaces.flatten(space, obs) for obs in singles]), dtype=torch.float32)
    outputs = agent.actor(agent.normalize(flat)).detach().double().numpy()
    scaled = np.clip(1 + 3 * outputs, -2, 4)  # from -1 to 1 to the bounds
    expected = 5 + outputs.argmax(-1) if script is PPO else scaled
    actions = policy(batch)
    assert actions == pytest.approx(expected, abs=1e-5)
    assert len({str(action) for action in actions}) > 1, "always the same action: the test shows nothing"
    for obs, action in zip(singles, actions, strict=True):
        assert env.action_space.contains(policy(obs))
        assert policy(obs) == pytest.approx(action, abs=1e-6)
    assert batch_space(env.action_space, 20).contains(actions)


@each_script
@pytest.mark.parametrize("name", ["dict", "tuple"])
def test_a_policy_takes_what_training_takes(script, name, tmp_path):
    """Parts with another type than the space's, or just outside of it, which Gymnasium only warns of."""
    policy, _, _ = policy_of(script, tmp_path, name)
    space = user_envs.OBSERVATIONS[name]
    space.seed(1)
    single = space.sample()
    key = "position" if name == "dict" else 1
    parts = dict(single) if name == "dict" else list(single)
    parts[key] = parts[key].astype(np.float64)
    parts[key][0] = 5.01  # the space ends at 5
    odd = parts if name == "dict" else tuple(parts)
    assert not space.contains(odd)
    assert np.shape(policy(odd)) == np.shape(policy(single))


@each_script
def test_an_environment_that_cannot_be_shown(script, tmp_path):
    """--capture-video is refused before training; without it, no command is printed that would fail."""
    for name, word in (("Blind", "an argument does not fit"), ("Dark", "cannot be rendered")):
        refused = cli.call(script, tmp_path, "--env-id", script.env(name), "--capture-video")
        cli.assert_refused(refused, tmp_path, word)
    done = run(script, tmp_path, env_id=script.env("Blind"), total_timesteps=300)
    assert "--resume" in done.out
    assert "--capture-video" not in done.out


@each_script
def test_a_policy_refuses_other_observations(script, tmp_path):
    """Those of another length are not broadcast."""
    policy, _, _ = policy_of(script, tmp_path, "vector")
    for shape in ((1,), (4,), (5, 1), (3, 1)):
        with pytest.raises(ValueError, match="the policy takes 3 numbers, not"):
            policy(np.ones(shape, np.float32))


@each_script
def test_an_evaluation_on_another_environment(script, tmp_path):
    """Refused if its observations or its actions do not fit, in one line."""
    run(script, tmp_path, total_timesteps=300)
    other = {PPO: "CartPole-v1", CONTINUOUS: "Pendulum-v1"}[script]
    for flags in (["--env-id", other], ["--env-kwargs", "observation='dict'"]):
        flags = ["--env-id", script.env(), "--evaluate", checkpoint_in(tmp_path), *flags]
        refused = call(script, tmp_path, *flags)
        assert (refused.status, refused.err.count("\n")) == (2, 1), refused.err
        assert "does not fit the observations and actions of" in refused.err


@each_script
def test_a_policy_drops_nothing(script, tmp_path, monkeypatch):
    """Dropout, which a user may add, is for training only."""

    class Dropping(script.module.Agent):
        def __init__(self, *args):
            super().__init__(*args)
            self.actor.append(torch.nn.Dropout(0.5))

    monkeypatch.setattr(script.module, "Agent", Dropping)
    monkeypatch.chdir(tmp_path)
    results = script.module.train(script.args(env_id=script.env(), total_timesteps=300))
    policy = script.module.load_policy(results["checkpoint"])
    assert len({str(policy(np.array([1.0, -2.0, 3.0], np.float32))) for _ in range(40)}) == 1


@each_script
def test_an_evaluation_that_cannot_be_shown(script, tmp_path):
    """One line, too."""
    run(script, tmp_path, env_id=script.env("Dark"), total_timesteps=300)
    flags = ["--env-id", script.env("Dark"), "--evaluate", checkpoint_in(tmp_path), "--capture-video"]
    refused = call(script, tmp_path, *flags)
    assert (refused.status, refused.err.count("\n")) == (2, 1), refused.err
    assert "cannot be rendered" in refused.err


@cli.each_script_fast
def test_a_policy_samples(script, tmp_path):
    """With `sample`, the actions are distributed as the policy says."""
    policy, agent, env = policy_of(script, tmp_path, "vector")
    obs = np.array([1.0, -2.0, 3.0], np.float32)
    torch.manual_seed(1)
    actions = policy(np.tile(obs, (4000, 1)), sample=True)
    distribution = agent.policy(agent.normalize(torch.tensor(obs))).detach()
    if script is PPO:
        shares = [(actions == 5 + action).mean() for action in range(3)]
        assert shares == pytest.approx(distribution.exp().tolist(), abs=0.03)
    else:
        mean, std = distribution[0].item(), distribution[1].exp().item()
        assert np.median(actions) == pytest.approx(1 + 3 * mean, abs=0.1)
        assert actions.min() == -2
        assert (actions == -2).mean() == pytest.approx(0.5 * math.erfc((1 + mean) / std / 2**0.5), abs=0.03)
    assert env.action_space.contains(policy(obs, sample=True))
    assert policy(obs) == policy(obs)


@pytest.mark.slow
@each_script
def test_a_policy_in_another_program(script, tmp_path):
    """Other code, in another folder, needs the script, the checkpoint, and the environment's module."""
    run(script, tmp_path, total_timesteps=200)
    lines = [
        "import sys",
        f"sys.path.append({str(cli.ROOT)!r})",
        f"from {script.module.__name__} import load_policy, Refused",
        f"path = {str(checkpoint_in(tmp_path))!r}",
        "try: load_policy(path)",
        "except Refused as error: assert 'user_envs' in str(error)",
        "else: raise SystemExit('it imported the module by itself')",
        "import user_envs",
        "print(load_policy(path)([0.0, 0.0, 0.0]))",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines))
    (tmp_path / "elsewhere").mkdir()
    done = cli.finish(cli.start(tmp_path / "elsewhere", [sys.executable, "../program.py"]))
    assert (done.status, done.err) == (0, "")
    policy = script.module.load_policy(checkpoint_in(tmp_path))
    assert done.out == f"{policy([0.0, 0.0, 0.0])}\n"


# Evaluation


@each_script
def test_an_evaluation_repeats(script, tmp_path):
    """It gives the returns that training ended with, changes nothing, and depends on the seed."""
    done = run(script, tmp_path, total_timesteps=300)
    path = checkpoint_in(tmp_path)
    files = {file: file.read_bytes() for file in path.parent.iterdir()}
    results = []
    for more in ([], ["--eval-episodes", 3], ["--eval-episodes", 3, "--seed", 5], ["--eval-episodes", 7]):
        evaluated = call(script, tmp_path, "--evaluate", path, "--env-id", script.env(), *more)
        results += re.findall("^evaluation.*", evaluated.out, re.MULTILINE)
    assert results[1] in done.out
    assert "10 episodes" in results[0]
    assert results[1] != results[2]
    assert "7 episodes" in results[3]
    assert files == {file: file.read_bytes() for file in path.parent.iterdir()}


def test_an_evaluation_cuts_endless_episodes(tmp_path):
    """--eval-max-steps ends them."""
    done = run(PPO, tmp_path, total_timesteps=100, env_kwargs="endless=True", eval_max_steps=7)
    steps = len(user_envs.LOG["steps"]) - steps_done(checkpoint_in(tmp_path))
    assert steps == 3 * 7
    assert 3.5 <= float(re.search(r"evaluation return ([\d.]+)", done.out)[1]) <= 10.5


# `train` in other people's code


@each_script
def test_train_returns_results(script, tmp_path, monkeypatch):
    """The checkpoint, the training return, and the returns of the evaluation's episodes; in a thread, too."""
    monkeypatch.chdir(tmp_path)
    handlers, results = [signal.getsignal(number) for number in range(1, 20)], []
    user_envs.LOG.clear()
    thread = threading.Thread(target=lambda: results.append(script.module.train(script.args())))
    thread.start()
    thread.join(timeout=120)
    assert handlers == [signal.getsignal(number) for number in range(1, 20)]
    assert set(results[0]) == {"checkpoint", "training_return", "greedy_returns"}
    assert (tmp_path / results[0]["checkpoint"]).samefile(checkpoint_in(tmp_path))
    returns = [value for _, value, _ in user_envs.LOG["episodes"]]
    assert results[0]["greedy_returns"].tolist() == returns[-3:]
    skipped = SIZE if script is CONTINUOUS else 0  # its first rollout only sets the normalisers
    seen = [value for step, value, _ in user_envs.LOG["episodes"][:-3] if step > skipped]
    assert results[0]["training_return"] == pytest.approx(np.mean(seen), rel=0.15)


@each_script
def test_settings_that_are_numpys_numbers(script, tmp_path, monkeypatch):
    """As from a loop over `np.logspace`: the checkpoint can be loaded, and the evaluation has done that."""
    monkeypatch.chdir(tmp_path)
    args = script.args(learning_rate=np.float64(1e-3), num_envs=np.int64(4), anneal_lr=np.bool_(False))
    args.gamma = np.float64(0.9)
    results = script.module.train(args)
    assert len(results["greedy_returns"]) == 3
    assert load(checkpoint_in(tmp_path))["args"]["learning_rate"] == 1e-3


class Tee:
    """What people put in the place of standard output."""

    def __init__(self):
        self.text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


@each_script
def test_standard_output_of_others(script, tmp_path, monkeypatch):
    """A tee, a notebook's stream, and one that has no Greek letters."""
    monkeypatch.chdir(tmp_path)
    tee = Tee()
    monkeypatch.setattr(sys, "stdout", tee)
    script.module.train(script.args())
    assert "evaluation return" in tee.text
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "argv", [script.file, "--plan"])
    script.module.main()
    assert "rollout " in sys.stdout.getvalue()
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", ascii_only)
    script.module.say("outside 1 ± ε")
    assert ascii_only.buffer.getvalue() == b"outside 1 ? ?\n"


def test_train_raises(tmp_path, monkeypatch):
    """What is refused is an exception, and nothing is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PPO.module.Refused, match="--num-envs"):
        PPO.module.train(PPO.args(num_envs=0))
    with pytest.raises(CONTINUOUS.module.Refused, match="total-timesteps"):
        CONTINUOUS.module.train(CONTINUOUS.args(total_timesteps=10))
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
def test_train_in_a_process_of_a_pool(tmp_path):
    """As in a search of settings: Ctrl-C still reaches the process, which is no worker of this script."""
    lines = [
        "import multiprocessing, signal, sys, threading",
        f"sys.path.append({str(cli.ROOT)!r})",
        "import ppo",
        "def job(seed):",
        "    args = ppo.Args(env_id='user_envs:Walk-v0', total_timesteps=100, eval_episodes=1, seed=seed)",
        "    thread = threading.Thread(target=lambda: print(sorted(ppo.train(args)), flush=True))",
        "    thread.start()",
        "    thread.join()",
        "    return signal.getsignal(signal.SIGINT) is signal.default_int_handler",
        "if __name__ == '__main__':",
        "    with multiprocessing.Pool(1) as pool: print('kept', pool.map(job, [1]))",
    ]
    (tmp_path / "program.py").write_text("\n".join(lines))
    done = cli.finish(cli.start(tmp_path, [sys.executable, "program.py"]))
    assert (done.status, done.err) == (0, "")
    assert "greedy_returns" in done.out
    assert "kept [True]" in done.out
