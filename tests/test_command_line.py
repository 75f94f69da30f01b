"""The command line: refusals, help, plan, what a run prints, and that the same seed gives the same run."""

import dataclasses
import re
import sys

import pytest
import torch
import user_envs
from helpers import (
    ATARI,
    CONTINUOUS,
    DISCRETE,
    atari_too,
    call,
    checkpoint_in,
    each_script,
    flags,
    load,
    run,
    same,
)

REFUSALS = {  # words of the command, and what the refusal must say
    "--num-envs 0": "--num-envs",
    "--num-minibatches 300": "--num-minibatches must be at most 256",
    "--num-envs 100000": "--total-timesteps must be at least 6400000",
    "--gamma 1.5": "--gamma",
    "--gae-lambda nan": "--gae-lambda",
    "--learning-rate 0": "--learning-rate",
    "--clip-coef 0.4": "--allow-unsafe",
    "--update-epochs 31": "--allow-unsafe",
    "--no-norm-adv --no-norm-rewards": "--allow-unsafe",
    "--adapt kl-coef": "--surrogate kl-penalty",
    "--adapt clip-coef --surrogate kl-penalty": "--surrogate clip",
    "--target-entropy 0.5 --ent-coef 0": "--ent-coef",
    "--resume none.pt": "none.pt",
    "--evaluate none.pt": "none.pt",
    "--env-id CartPole-v9": "v1",
    "--env-id CartPol-v1": "CartPole",
    "--env-id no_module:Env-v0": "no_module",
    "--env-id Pendulum-v1": "use ppo_continuous.py",
    "--env-kwargs {": "--env-kwargs is not JSON",
}
if not torch.cuda.is_available():
    REFUSALS["--device cuda"] = "use cpu"


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
        (CONTINUOUS, "--init-log-std -3 --min-log-std -2", "--min-log-std"),
        (CONTINUOUS, "--env-id CartPole-v1", "use ppo.py"),
        (ATARI, "--env-id CartPole-v1", "use ppo.py"),
        (ATARI, "--no-norm-adv --no-clip-rewards", "--allow-unsafe"),
        (ATARI, "--env-id NoSuchGame-v4", "NoSuchGame"),
    ],
)
def test_refusals_of_other_scripts(case, words, expected, tmp_path):
    """What is not the same in all scripts."""
    assert_refused(case, tmp_path, words.split(), expected)


def test_unsafe_settings_can_be_allowed(tmp_path):
    """--allow-unsafe is what the refusal says; one epoch needs no normalisation."""
    unsafe = ["--clip-coef", 0.4, "--update-epochs", 31, "--no-norm-adv", "--no-norm-rewards"]
    assert call(DISCRETE, tmp_path, *unsafe, "--allow-unsafe", "--plan").status == 0
    safe = ["--update-epochs", 1, "--no-norm-adv", "--no-norm-rewards"]
    assert call(DISCRETE, tmp_path, *safe, "--plan").status == 0


@atari_too
def test_help(case, tmp_path):
    """The script's purpose, three examples, and each flag with a text."""
    shown = call(case, tmp_path, "--help")
    assert shown.status == 0
    assert len(re.findall(rf"^ +(python|torchrun) .*{case.file}", shown.out, re.MULTILINE)) == 3
    plain = re.sub(r"[│╭╮╰╯─\s]+", " ", shown.out)
    assert case.script.__doc__.split("\n")[0] in plain
    for setting in dataclasses.fields(case.script.Args):
        flag = re.escape(f" --{setting.name.replace('_', '-')}")
        assert re.search(rf"{flag}\b[^·]*?\w\w\w \w.*?\(default: ", plain), flag


@atari_too
def test_plan(case, tmp_path):
    """Sizes, schedules, and all advice with its iterations; nothing is written."""
    sizes = {"num_envs": 6, "num_steps": 40, "num_minibatches": 3, "update_epochs": 7}
    env = {} if case is ATARI else {"env_id": case.walk}
    settings = env | sizes | {"total_timesteps": "2e6", "learning_rate": 0.0123}
    planned = call(case, tmp_path, *flags(**settings), "--plan")
    assert (planned.status, planned.err, list(tmp_path.iterdir())) == (0, "", [])
    for text in ("2,000,000 steps", "seed 1", "6 env", "240 tr", "21 gradient steps", "0.0123 to 0"):
        assert text in planned.out
    for iterations, _, text in case.script.ADVICE:
        assert re.search(rf"\b{iterations} .*{re.escape(text)}", planned.out)


@each_script
def test_what_a_run_prints(case, trained, tmp_path):
    """The plan, progress, the evaluation, and commands that work; a resumed run says where it goes on.

    What concerns only the run itself is not taken from a checkpoint.
    """
    done, saved = trained(case), load(trained(case).checkpoint)
    assert "300 steps, rounded up" in done.printed
    assert re.search(r"^ +3\d\d steps  return \d+\.\d  KL 0\.\d+", done.printed, re.MULTILINE)
    assert re.search(r"^evaluation return [\d.]+ ± [\d.]+, 3 episodes$", done.printed, re.MULTILINE)
    path = re.search(rf"^resume +python {case.file} --resume (\S+)$", done.printed, re.MULTILINE)[1]
    assert (done.folder / path).samefile(done.checkpoint)
    saved["args"] |= {"device": "cuda:9", "plan": True, "track": True, "evaluate": "none.pt"}
    torch.save(saved, tmp_path / "checkpoint.pt")
    resumed = run(case, tmp_path, "--resume", "checkpoint.pt", total_timesteps=600)
    steps, rate = re.search(
        r"^resumed +after ([\d,]+) steps, learning rate (\S+)$", resumed.out, re.M
    ).groups()
    assert int(steps) == saved["state"]["global_step"]
    assert 0 < float(rate) <= saved["args"]["learning_rate"]


@each_script
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
    for seed in (1, 2, 3):
        run(DISCRETE, tmp_path, seed=seed)
        assert len(set(user_envs.LOG["seeds"])) == len(user_envs.LOG["seeds"]) == 4 + 3
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
    call(DISCRETE, tmp_path, "--env-id", "stranger:Mine-v0", "--plan")
    assert (tmp_path / "imported").exists()
