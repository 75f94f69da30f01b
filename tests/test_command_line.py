"""The command line: refusals, help, what a run prints, and that the same seed gives the same run."""

import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
import user_envs
from helpers import (
    ATARI,
    CONTINUOUS,
    DISCRETE,
    LSTM,
    ROOT,
    SMALL,
    assert_help,
    atari_too,
    call,
    checkpoint_in,
    curves,
    flags,
    load,
    memory_too,
    run,
    same,
)

import grpo
import ppo
import ppo_atari
import ppo_continuous
import ppo_gpu
import ppo_lstm
import ppo_rlhf

REFUSALS = {  # words of the command, one of each kind, and what the refusal must say
    "--num-envs 0": "--num-envs must be from 1 to inf, not 0",
    "--num-minibatches 513": "two transitions",
    "--no-norm-adv": "--norm-adv",
    "--kl-coef 3": "--kl-coef has no effect",
    "--target-entropy 1 --anneal-ent-coef": "--anneal-ent-coef has no effect",
    "--surrogate kl-penalty --adapt clip-coef": "--adapt has no effect",
    "--resume a.pt --evaluate a.pt": "cannot be combined",
    "--init a.pt --evaluate a.pt": "cannot be combined",
    "--evaluate latest --exp-name a": "no checkpoint of a run with --exp-name a",
    f"--evaluate {__file__}": "not a checkpoint",
    "--env-id user_envs:Pairs-v0": "MultiDiscrete([2 3]), not Discrete(n)",
    "--env-id user_envs:FromOne-v0": "Discrete(3, start=1), not Discrete(n) from 0",
    "--env-id Pendulum-v1": "ppo_continuous.py",
    "--env-id user_envs:Blind-v0 --capture-video": "render_mode='rgb_array'",
}
REFUSALS_OF_OTHERS = [  # what ppo.py does not have
    (CONTINUOUS, "--env-id CartPole-v1", "for Discrete: ppo.py"),
    (CONTINUOUS, "--env-id user_envs:FarBox-v0", "scale or shift them"),
    (CONTINUOUS, "--init-log-std -3", "--init-log-std must not be below --min-log-std"),
    (CONTINUOUS, "--no-norm-rewards", "--norm-rewards or --norm-adv"),
    (LSTM, "--num-minibatches 17", "--num-minibatches must be at most --num-envs"),
    (ATARI, "--env-id CartPole-v1", "use ppo.py"),
    (ATARI, "--num-minibatches 5", "--num-minibatches must divide the 1024"),
]
CASES = [*((DISCRETE, *items) for items in REFUSALS.items()), *REFUSALS_OF_OTHERS]


def assert_refused(case, folder, words, expected):
    """Check that the refusal is one line with the script's name, and that nothing is written."""
    done = call(case, folder, *words)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"{case.file}: ")
    assert done.err.count("\n") == 1
    assert expected in done.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(("case", "words", "expected"), CASES, ids=str)
def test_a_mistake_on_the_command_line_is_refused_in_one_line(case, words, expected, tmp_path):
    """The line says what to change."""
    assert_refused(case, tmp_path, words.split(), expected)


LOUD = {  # words of the command, and what Python, PyTorch, Gymnasium or tyro say
    "--anneal-lr False": "False",
    "--device gpu": "Expected one of cpu, cuda",
    "--resume none.pt": "FileNotFoundError",
    "--env-id CartPole-v9": "gymnasium.error",
    "--env-kwargs {": "JSONDecodeError",
    "--env-id user_envs:Words-v0": "cannot be flattened",
    '--env-id user_envs:Walk-v0 --env-kwargs {"fault":"raise"}': "the simulator broke",
}
LOUD_IN_ATARI = {
    "--env-id ALE/Pung-v5": "gymnasium.error",
    '--env-kwargs {"episodic_life":true}': "multiple values for keyword argument 'episodic_life'",
    '--env-kwargs {"stack_num":1}': "multiple values for keyword argument 'stack_num'",
    '--env-kwargs {"difficulty":1}': "unexpected keyword argument 'difficulty'",
}
LOUD_CASES = [*((DISCRETE, *items) for items in LOUD.items())]
LOUD_CASES += [(ATARI, *items) for items in LOUD_IN_ATARI.items()]


@pytest.mark.parametrize(("case", "words", "expected"), LOUD_CASES, ids=str)
def test_other_mistakes_are_told_in_the_words_of_the_library_before_anything_is_written(
    case, words, expected, tmp_path
):
    """The simulator breaks in its first step, which is tried. In Atari games, the protocol is fixed."""
    done = call(case, tmp_path, *words.split())
    assert done.status in (1, 2)
    assert expected in done.err
    assert list(tmp_path.iterdir()) == []


SCRIPTS = ppo, ppo_continuous, ppo_atari, ppo_lstm, ppo_gpu, ppo_rlhf, grpo
OPTIONAL = "target_kl", "target_entropy", "desired_kl", "keep_every", "kl_target", "stop_at"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_numbers_outside_their_bounds_are_refused(script):
    """The refusal names the flag. NaN is refused, too; all defaults and all limits pass."""
    kinds = "int", "float", int, float
    numbers = {setting.name for setting in fields(script.Args) if setting.type in kinds}
    assert numbers | {*OPTIONAL} >= script.BOUNDS.keys() >= numbers
    defaults = [getattr(script, name) for name in ("PRETRAINED", "OTHERS") if hasattr(script, name)]
    check = script.check_settings if hasattr(script, "check_settings") else script.check

    def refusal(args):
        try:
            check(args)
        except ValueError as error:  # it may not fit to other settings
            return str(error)
        return ""

    for args in (script.Args(), *defaults):
        assert "must be from" not in refusal(args)
    for name, (low, high) in script.BOUNDS.items():
        flag = f"--{name.replace('_', '-')} must be "
        wrong = [low - 1, math.nan] + ([high * 2 + 1] if high < math.inf else [])
        for value in wrong:
            with pytest.raises(ValueError, match=flag):
                check(replace(script.Args(), **{name: value}))
        for value in (low, min(high, 10**9)):
            assert f"{flag}from" not in refusal(replace(script.Args(), **{name: value}))


@memory_too
def test_a_choice_that_is_not_offered_is_refused(case):
    """A program may pass any value. Another surrogate, for example, would be taken for the KL penalty."""
    name = {LSTM: "cell"}.get(case, "surrogate")
    with pytest.raises(ValueError, match=f"{name} must be one of .*, not 'Clip'"):
        case.script.check_settings(case.make_args(**{name: "Clip"}))


def test_a_program_may_raise_the_bounds(tmp_path, monkeypatch):
    """Settings that are refused can thus be studied."""
    monkeypatch.setitem(ppo.BOUNDS, "clip_coef", (0, 1000))
    run(DISCRETE, tmp_path, clip_coef=500)


def test_the_folder_of_a_run_is_accepted_as_its_checkpoint(trained, tmp_path):
    """--evaluate and --resume accept it, on the command line and in a program."""
    folder = trained(DISCRETE).checkpoint.parent
    shown = call(DISCRETE, tmp_path, "--evaluate", folder, "--env-id", DISCRETE.walk)
    assert (shown.status, shown.out.count("evaluation return")) == (0, 1)
    assert len(ppo.evaluate(folder, ppo.Args(env_id=DISCRETE.walk))) == 10


@pytest.mark.slow
def test_a_run_keeps_copies_of_the_script_and_of_the_program_that_started_it(tmp_path):
    """So `plot.py` tells apart the runs of a program that was edited in between."""
    program = "import ppo\nppo.train(ppo.Args(num_steps=16, total_timesteps=300, eval_episodes=1))\n"
    (tmp_path / "mine.py").write_text(program)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "mine.py"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    folder = checkpoint_in(tmp_path).parent
    assert (folder / "mine.py").read_text() == program
    assert (folder / "ppo.py").read_text() == (ROOT / "ppo.py").read_text()


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_checkpoints_of_other_scripts_and_environments_are_refused(flag, trained, tmp_path):
    """PyTorch says which sizes differ, and nothing is written."""
    image = ["--env-id", DISCRETE.walk, "--env-kwargs", '{"observation":"image"}']
    words = [flag, trained(DISCRETE).checkpoint, *image, "--total-timesteps", 2000]
    done = call(DISCRETE, tmp_path, *words)
    assert done.status == 1
    assert "actor.0.weight" in done.err
    assert list(tmp_path.iterdir()) == []
    for path in (trained(DISCRETE).checkpoint, trained(CONTINUOUS).checkpoint):
        words = [flag, path, "--env-id", "ALE/Pong-v5", "--total-timesteps", 2000, "--norm-adv"]
        done = call(ATARI, tmp_path, *words)
        assert done.status == 1
        assert "actor.bias" in done.err
        assert list(tmp_path.iterdir()) == []
    content = load(trained(DISCRETE).checkpoint)
    content["args"]["env_id"] = CONTINUOUS.walk
    (tmp_path / "folder").mkdir()
    torch.save(content, tmp_path / "theirs.pt")
    words = [flag, tmp_path / "theirs.pt", "--env-id", CONTINUOUS.walk, "--total-timesteps", 2000]
    done = call(CONTINUOUS, tmp_path / "folder", *words)
    assert done.status in (1, 2)
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_checkpoint_with_a_setting_that_no_longer_exists_loads(trained, tmp_path):
    """An older version wrote it. The setting is ignored."""
    content = load(trained(DISCRETE).checkpoint)
    content["args"]["allow_unsafe"] = True
    torch.save(content, tmp_path / "checkpoint.pt")
    run(DISCRETE, tmp_path, "--evaluate", "checkpoint.pt")


@pytest.mark.parametrize(("case", "env_id"), [(DISCRETE, DISCRETE.walk), (ATARI, "ALE/Pong-v5")], ids=str)
def test_a_missing_package_is_named_before_training(case, env_id, tmp_path, monkeypatch):
    """The refusal names the command that installs it. Otherwise, moviepy would be missed after training."""
    monkeypatch.setattr(case.script, "find_spec", lambda name: None)
    assert_refused(case, tmp_path, ["--env-id", env_id, "--capture-video"], "pip install moviepy")


@atari_too
def test_help_tells_the_purpose_and_explains_each_flag(case, tmp_path):
    """The texts are the docstring and the comments of the settings."""
    assert_help(case, tmp_path)


@memory_too
def test_a_run_prints_its_progress_evaluation_and_a_checkpoint_that_resumes(case, trained, tmp_path):
    """Settings that concern only the first run, such as the device, are not taken from the checkpoint."""
    done, saved = trained(case), load(trained(case).checkpoint)
    for text in (r"^ +3\d\d steps  return [\d.]+", r"^evaluation return [\d.]+ \+/- [\d.]+ in 3 episodes"):
        assert re.search(text, done.printed, re.MULTILINE)
    (path,) = re.findall(r"^checkpoint (\S+),", done.printed, re.MULTILINE)
    shutil.copytree(done.folder / "runs", tmp_path / "runs")
    words = "--resume", tmp_path / Path(path).relative_to(done.folder), "--env-id", case.walk
    over = call(case, tmp_path, *words)  # it is finished, which is said
    assert over.status == 2
    assert f"{saved['state']['global_step']} steps: raise --total-timesteps" in over.err
    assert same(load(checkpoint_in(tmp_path)), saved)
    assert call(case, tmp_path, *words, "--total-timesteps", 500).status == 0
    saved["args"] |= {"device": "cuda:9", "track": True, "evaluate": "none.pt"}
    torch.save(saved, tmp_path / "checkpoint.pt")
    resumed = run(case, tmp_path, "--resume", "checkpoint.pt", total_timesteps=600)
    assert f"{saved['state']['global_step']} of 600 steps" in resumed.out


@pytest.mark.slow
def test_a_copied_script_runs_alone(tmp_path):
    """Runs are named after the file, and have a copy of its text."""
    shutil.copy(ROOT / "ppo.py", tmp_path / "mine.py")
    words = flags(total_timesteps=300, num_steps=16, eval_episodes=1)
    subprocess.run([sys.executable, "mine.py", *words], cwd=tmp_path, check=True, capture_output=True)
    folder = checkpoint_in(tmp_path).parent
    assert folder.name.startswith("CartPole-v1__mine__1__")
    assert (folder / "mine.py").read_text() == (tmp_path / "mine.py").read_text()


SEEDS = [(DISCRETE, "--seed=2", False), (LSTM, "--async-envs", True)]
SEEDS += [(case, "--seed=1", True) for case in (DISCRETE, CONTINUOUS, LSTM)]


@pytest.mark.parametrize(("case", "word", "equal"), SEEDS, ids=str)
def test_the_same_seed_gives_the_same_run_bit_for_bit(case, word, equal, trained, tmp_path):
    """Environments may be processes. Another seed gives another run."""
    run(case, tmp_path, word)
    one, other = load(trained(case).checkpoint), load(checkpoint_in(tmp_path))
    for name in ("agent", "optimizer", "state"):
        assert same(one[name], other[name]) == equal, name


def test_no_two_environments_have_the_same_seed(tmp_path):
    """This holds within a run, with the step that is tried and the evaluation, and between runs."""
    seen = []
    for seed in (1, 2, 3, 21):  # the hash of 21 is near 2**31
        run(DISCRETE, tmp_path, seed=seed)
        assert len(set(user_envs.LOG["seeds"])) == len(user_envs.LOG["seeds"]) == 1 + 4 + 3
        assert max(user_envs.LOG["seeds"]) < 2**31  # some simulators take no others
        seen += user_envs.LOG["seeds"]
    assert len(set(seen)) == len(seen)


MODULE = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv
open("imported", "w").close()
gym.register("Mine-v0", CartPoleEnv, max_episode_steps=20)
"""


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_a_module_is_imported_only_if_the_command_line_names_it(flag, trained, tmp_path):
    """A checkpoint of someone else must not import a module that lies in the current folder."""
    (tmp_path / "stranger.py").write_text(MODULE)
    content = load(trained(DISCRETE).checkpoint)
    content["args"]["env_id"] = "stranger:Mine-v0"
    torch.save(content, tmp_path / "theirs.pt")
    sys.modules.pop("stranger", None)
    for words in ([], ["--env-id", "CartPole-v1"]):
        done = call(DISCRETE, tmp_path, flag, "theirs.pt", *words)
        assert done.status == 2
        assert "--env-id stranger:Mine-v0" in done.err
        assert not (tmp_path / "imported").exists()
    call(DISCRETE, tmp_path, "--env-id", "stranger:Mine-v9")  # is imported, and has no such version
    assert (tmp_path / "imported").exists()


def test_returns_below_one_are_readable(tmp_path):
    """Those of FrozenLake, for example, are printed with enough digits."""
    env = {"env_id": "user_envs:Probe-v0", "env_kwargs": '{"pays": "match"}'}
    done = call(DISCRETE, tmp_path, *flags(**SMALL | env))
    printed = [float(value) for value in re.findall(r"steps  return (\S+)", done.out)]
    logged = [*curves(checkpoint_in(tmp_path).parent)["charts/episodic_return_100"].values()]
    assert [printed[0], printed[-1]] == pytest.approx([logged[0], logged[-1]], rel=1e-3)
    assert 0 < printed[0] != round(printed[0], 1)
