"""The command line: refusals, help, what a run prints, and that the same seed gives the same run."""

import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields, replace

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
import plot
import ppo
import ppo_atari
import ppo_continuous
import ppo_gpu
import ppo_lstm
import ppo_rlhf

REFUSALS = {  # words of the command, and what the refusal must say
    "--num-envs 0": "--num-envs must be at least 1, not 0",
    "--num-steps 1": "--num-steps must be at least 2, not 1",
    "--num-minibatches 300": "--num-minibatches must be at most 256",
    "--seed -1": "--seed",
    "--device gpu": "use cpu",
    "--device meta": "use cpu",  # tensors without numbers
    "--adapt kl-coef": "needs --surrogate kl-penalty",
    "--adapt clip-coef --surrogate kl-penalty": "needs --surrogate clip",
    "--clip-coef 0.1 --surrogate kl-penalty": "--clip-coef needs --surrogate clip",
    "--resume a.pt --evaluate a.pt": "do not go together",
    "--desired-kl 0.02": "--desired-kl needs --adapt",
    "--kl-coef 3": "--kl-coef needs --surrogate kl-penalty",
    "--target-entropy 1 --anneal-ent-coef": "--target-entropy",
    "--no-norm-adv": "--norm-adv",
    "--anneal-lr False": "without True or False",
    "--resume none.pt": "none.pt",
    "--evaluate .": "checkpoint.pt",
    "--env-id user_envs:Words-v0": "does not flatten to a vector",
    "--env-id user_envs:Unknown-v0": "does not flatten to a vector",
    f"--resume {__file__}": "not a checkpoint",
    "--env-id BreakoutNoFrameskip-v4": "use ppo_atari.py",
    "--env-id user_envs:Pairs-v0": "docs/recipes.md",
    "--env-id user_envs:FromOne-v0": "docs/recipes.md",
    '--env-kwargs {"wings":2}': "unexpected keyword argument 'wings'",
    '--env-id user_envs:Probe-v0 --env-kwargs {"pays":"cue"} --capture-video': "'render_mode'",
    "--env-id CartPole-v9": "v1",
    "--env-id no_module:Env-v0": "no_module",
    "--env-id Pendulum-v1": "ppo_continuous.py",
    "--env-kwargs {": "--env-kwargs {: Expecting",
}


def assert_refused(case, folder, words, expected):
    """One line with the script's name, exit status 2, and nothing is written."""
    done = call(case, folder, *words)
    assert (done.status, done.out) == (2, "")
    assert done.err.startswith(f"{case.file}: ")
    assert done.err.count("\n") == 1
    assert expected in done.err
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("words", REFUSALS)
def test_refusals(words, tmp_path):
    """Common mistakes end in one line, which says what to change."""
    assert_refused(DISCRETE, tmp_path, words.split(), REFUSALS[words])


@pytest.mark.parametrize(
    ("case", "words", "expected"),
    [
        (CONTINUOUS, "--env-id CartPole-v1", "see ppo.py"),
        (CONTINUOUS, "--env-id user_envs:Pairs-v0", "docs/recipes.md"),
        (CONTINUOUS, "--env-id user_envs:FarBox-v0", "scale or shift actions"),
        (CONTINUOUS, "--env-id user_envs:FarBox-v0 --no-scale-actions", "scale or shift actions"),
        (CONTINUOUS, "--init-log-std -3", "--init-log-std must not be below --min-log-std"),
        (CONTINUOUS, "--adam-beta2 1", "--adam-beta2 must be from 0.001 to 0.99999"),
        (LSTM, "--env-id Pendulum-v1", "ppo_continuous.py"),
        (CONTINUOUS, "--no-norm-rewards", "--norm-rewards or --norm-adv"),
        (LSTM, "--hidden-size 0", "--hidden-size must be from 1 to 65536, not 0"),
        (LSTM, "--num-minibatches 17", "--num-minibatches must be at most --num-envs"),
        (LSTM, "--num-minibatches 16 --num-steps 2", "raise --num-steps"),
        (ATARI, "--env-id CartPole-v1", "use ppo.py"),
        (ATARI, "--env-id NoSuchGame-v4", "NoSuchGame"),
        (ATARI, "--num-minibatches 5", "--num-minibatches must divide the 1024"),
        (ATARI, '--env-kwargs {"wings":2}', "'wings'"),
        (ATARI, '--env-kwargs {"episodic_life":true}', "'episodic_life'"),
        (ATARI, '--env-kwargs {"reward_clipping":true}', "'reward_clipping'"),
        (ATARI, '--env-kwargs {"stack_num":2}', "'stack_num'"),
        (ATARI, '--env-kwargs {"num_envs":2}', "'num_envs'"),
        (ATARI, '--env-kwargs {"frameskip":1}', "'frameskip'"),
    ],
)
def test_refusals_of_other_scripts(case, words, expected, tmp_path):
    """What is not the same in all scripts."""
    assert_refused(case, tmp_path, words.split(), expected)


SCRIPTS = ppo, ppo_continuous, ppo_atari, ppo_lstm, ppo_gpu, ppo_rlhf, grpo
OPTIONAL = "target_kl", "target_entropy", "desired_kl", "keep_every", "kl_target"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_bounds(script):
    """Each number is refused by its flag's name outside its limits, and if it is NaN; defaults pass."""
    kinds = "int", "float", int, float
    numbers = {setting.name for setting in fields(script.Args) if setting.type in kinds}
    assert numbers | {*OPTIONAL} >= script.BOUNDS.keys() >= numbers
    defaults = [getattr(script, name) for name in ("PRETRAINED", "OTHERS") if hasattr(script, name)]
    for args in (script.Args(), *defaults):
        script.check_bounds(args)
    for name, (low, high) in script.BOUNDS.items():
        flag = f"--{name.replace('_', '-')} must be "
        wrong = [low - 1, math.nan] + ([high * 2 + 1] if high < math.inf else [])
        for value in wrong:
            with pytest.raises(ValueError, match=flag):
                script.check_bounds(replace(script.Args(), **{name: value}))
        for value in (low, min(high, 10**9)):
            script.check_bounds(replace(script.Args(), **{name: value}))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_settings_of_other_types(script):
    """A program may give any: those of another type, or none of the choices, are refused by name."""
    wrong = {"seed": 1.5, "learning_rate": "0.1", "track": "False", "num_minibatches": 2.0}
    wrong |= {"target_kl": "0.03", "exp_name": 5, "device": torch.device("cpu"), "max_grad_norm": True}
    wrong |= {"surrogate": "Clip", "adapt": "learning_rate", "cell": "LSTM", "kl_in": "Loss", "gamma": None}
    for name, value in wrong.items():
        if hasattr(script.Args, name):
            with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be"):
                script.check_bounds(replace(script.Args(), **{name: value}))


@pytest.mark.parametrize(
    ("case", "words"),
    [(DISCRETE, "--update-epochs 99"), (CONTINUOUS, "--clip-coef 0.7"), (LSTM, "--max-grad-norm -1"),
     (ATARI, "--gae-lambda 3"), (DISCRETE, "--total-timesteps nan"), (CONTINUOUS, "--learning-rate -1")],
)  # fmt: skip
def test_a_setting_out_of_bounds_is_refused(case, words, tmp_path):
    """In one line, before anything is written."""
    assert_refused(case, tmp_path, words.split(), f"{words.split()[0]} must be")


@memory_too
def test_whole_numbers_are_numbers(case, tmp_path, monkeypatch):
    """A program may write 0 or 1 where a setting has a fraction."""
    monkeypatch.chdir(tmp_path)
    whole = {"learning_rate": 0, "gamma": 1, "gae_lambda": 1, "max_grad_norm": 1, "init_log_std": 0}
    known = {name: value for name, value in (SMALL | whole).items() if hasattr(case.script.Args, name)}
    case.script.train(case.script.Args(env_id=case.walk, **known))


@atari_too
def test_what_is_only_evaluated_is_not_trained_unchecked(case):
    """`train` trains, whatever `evaluate` says, so it checks the settings."""
    with pytest.raises(ValueError, match="--gamma must be"):
        case.script.train(case.script.Args(evaluate="none.pt", gamma=1.5))


def test_a_program_may_raise_the_bounds(tmp_path, monkeypatch):
    """To study what is refused."""
    monkeypatch.setitem(ppo.BOUNDS, "clip_coef", (0, 1000))
    run(DISCRETE, tmp_path, clip_coef=500)


def test_the_folder_of_a_run_is_its_checkpoint(trained, tmp_path):
    """For --evaluate and --resume, on the command line and in Python."""
    folder = trained(DISCRETE).checkpoint.parent
    shown = call(DISCRETE, tmp_path, "--evaluate", folder, "--env-id", DISCRETE.walk)
    assert (shown.status, shown.out.count("evaluation return")) == (0, 1)
    assert ppo.Args(resume=str(folder)).resume == str(folder / "checkpoint.pt")
    assert grpo.Args(resume=str(folder)).resume == str(folder / "checkpoint.pt")


def test_a_file_in_the_place_of_runs(tmp_path):
    """It is said before training begins."""
    (tmp_path / "runs").touch()
    done = call(DISCRETE, tmp_path, "--total-timesteps", 300)
    assert (done.status, done.out) == (2, "")
    assert "runs is a file" in done.err


def test_compiling_without_a_compiler(tmp_path, monkeypatch):
    """One line, which names it."""
    monkeypatch.setenv("CXX", "no-such-compiler")
    for case in (DISCRETE, CONTINUOUS):
        assert_refused(case, tmp_path, ["--compile"], "no-such-compiler")


@memory_too
def test_time_left(case, tmp_path, monkeypatch):
    """At a minute per iteration of at most 128 transitions, 1,280 take some ten minutes."""
    clock = itertools.count(0, 60)
    monkeypatch.setattr(case.script.time, "monotonic", lambda: next(clock))
    printed = run(case, tmp_path, total_timesteps=1280).out
    left = re.findall(r"(\d+):(\d\d):(\d\d) left", printed)
    seconds = [int(hours) * 3600 + int(minutes) * 60 + int(rest) for hours, minutes, rest in left]
    assert 3 * 60 <= seconds[0] <= 40 * 60
    assert max(seconds) <= 40 * 60
    assert seconds[-1] == 0


def test_the_program_that_runs_is_copied_too(tmp_path):
    """So that `plot.py` tells apart the runs of a program that was edited in between."""
    program = "import ppo\nppo.train(ppo.Args(num_steps=16, total_timesteps=300, seed={}))\n# {}\n"
    for seed, text in ((1, "first"), (2, "second")):
        (tmp_path / "mine.py").write_text(program.format(seed, text))
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "mine.py"]
        subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True)
    folders = sorted(path.parent for path in tmp_path.glob("runs/*/checkpoint.pt"))
    assert [(folder / "mine.py").read_text()[-7:-1].strip() for folder in folders] == ["first", "second"]
    assert all((folder / "ppo.py").is_file() for folder in folders)
    counts = plot.load_runs((str(tmp_path / "runs"),), "losses/kl").groupby("experiment").size()
    assert counts.tolist() == [1, 1]


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_checkpoints_of_others_are_refused(flag, trained, tmp_path):
    """Another script's, or another environment's: one line, and nothing is written."""
    image = ["--env-id", DISCRETE.walk, "--env-kwargs", '{"observation":"image"}']
    more = ["--total-timesteps", 2000]
    words = [flag, trained(DISCRETE).checkpoint, *image, *more]
    assert_refused(DISCRETE, tmp_path, words, f"not for {DISCRETE.walk}")
    words = [flag, trained(DISCRETE).checkpoint, "--env-id", DISCRETE.walk, "--hidden-size", 32, *more]
    assert_refused(DISCRETE, tmp_path, words, "of another script or size")
    for path in (trained(DISCRETE).checkpoint, trained(CONTINUOUS).checkpoint):
        words = [flag, path, "--env-id", "ALE/Pong-v5", "--total-timesteps", 2000]
        assert_refused(ATARI, tmp_path, words, "of another script")
    words = [flag, trained(DISCRETE).checkpoint, "--env-id", DISCRETE.walk, *more]
    assert_refused(CONTINUOUS, tmp_path, words, "see ppo.py")


def test_a_checkpoint_of_an_older_version_loads(trained, tmp_path):
    """A setting that no longer exists is ignored."""
    content = load(trained(DISCRETE).checkpoint)
    content["args"]["allow_unsafe"] = True
    torch.save(content, tmp_path / "checkpoint.pt")
    run(DISCRETE, tmp_path, "--evaluate", "checkpoint.pt")


def test_missing_packages_are_named(tmp_path, monkeypatch):
    """With the command that installs them."""
    for case, words, package in (
        (ATARI, [], "ale-py"), (DISCRETE, ["--track"], "wandb"), (DISCRETE, ["--capture-video"], "moviepy"),
    ):  # fmt: skip
        monkeypatch.setattr(case.script, "find_spec", lambda name: None)
        assert_refused(case, tmp_path, words, f"pip install {package}".replace(" ale-py", " 'ale-py"))


@atari_too
def test_help(case, tmp_path):
    """The script's purpose, and each flag with a text."""
    assert_help(case, tmp_path)


@memory_too
def test_what_a_run_prints(case, trained, tmp_path):
    """What it does, its checkpoint, progress, and the evaluation. The checkpoint resumes.

    What concerns only the run itself is not taken from a checkpoint.
    """
    done, saved = trained(case), load(trained(case).checkpoint)
    for text in (r"^ +3\d\d steps  return [\d.]+", r"^evaluation return [\d.]+ ± [\d.]+ "):
        assert re.search(text, done.printed, re.MULTILINE)
    (path,) = re.findall(r"^checkpoint (\S+),", done.printed, re.MULTILINE)
    shutil.copytree(done.folder / "runs", tmp_path / "runs")
    words = "--resume", path, "--env-id", case.walk
    over = call(case, tmp_path, *words)  # it is finished, which is said
    assert over.status == 2
    assert f"{saved['state']['global_step']} steps: raise --total-timesteps" in over.err
    assert same(load(checkpoint_in(tmp_path)), saved)
    assert call(case, tmp_path, *words, "--total-timesteps", 500).status == 0
    saved["args"] |= {"device": "cuda:9", "track": True, "evaluate": "none.pt"}
    torch.save(saved, tmp_path / "checkpoint.pt")
    resumed = run(case, tmp_path, "--resume", "checkpoint.pt", total_timesteps=600)
    assert f"{saved['state']['global_step']} of 600 steps" in resumed.out


def test_a_copied_script_runs_alone(tmp_path):
    """Runs are named by the file that runs, and have its text with them."""
    shutil.copy(ROOT / "ppo.py", tmp_path / "mine.py")
    words = flags(total_timesteps=300, num_steps=16, eval_episodes=1)
    subprocess.run([sys.executable, "mine.py", *words], cwd=tmp_path, check=True, capture_output=True)
    folder = checkpoint_in(tmp_path).parent
    assert folder.name.startswith("CartPole-v1__mine__1__")
    assert (folder / "mine.py").read_text() == (tmp_path / "mine.py").read_text()


@memory_too
@pytest.mark.parametrize(("word", "equal"), [("--seed=1", True), ("--seed=2", False), ("--async-envs", True)])
def test_the_same_seed_gives_the_same_run(case, word, equal, trained, tmp_path):
    """Bit for bit, also where environments are processes; another seed does not."""
    run(case, tmp_path, word)
    one, other = load(trained(case).checkpoint), load(checkpoint_in(tmp_path))
    for name in ("agent", "optimizer", "state", "random"):
        assert same(one[name], other[name]) == equal, name


def test_seeds_of_environments(tmp_path):
    """No two environments have the same one, in runs whose seeds follow each other, and in evaluations."""
    seen = []
    for seed in (1, 2, 3, 21):  # the hash of 21 is near 2**31
        run(DISCRETE, tmp_path, seed=seed)
        assert len(set(user_envs.LOG["seeds"])) == len(user_envs.LOG["seeds"]) == 4 + 3
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
    """It lies in the current folder; a checkpoint of someone else does not have it imported."""
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
    """FrozenLake's, for example."""
    env = {"env_id": "user_envs:Probe-v0", "env_kwargs": '{"pays": "match"}'}
    done = call(DISCRETE, tmp_path, *flags(**SMALL | env))
    printed = [float(value) for value in re.findall(r"steps  return (\S+)", done.out)]
    logged = [*curves(checkpoint_in(tmp_path).parent)["charts/episodic_return_100"].values()]
    assert [printed[0], printed[-1]] == pytest.approx([logged[0], logged[-1]], rel=1e-3)
    assert 0 < printed[0] != round(printed[0], 1)
