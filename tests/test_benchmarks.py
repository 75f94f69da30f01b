"""The benchmarks: what is run, stored and reported, and that a runner which is killed loses nothing."""

from __future__ import annotations

import fnmatch
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ale_py
import experiments
import figures
import gymnasium as gym
import language
import language_report
import numpy as np
import pandas as pd
import pytest
import report
import run as runner
import time_limit_as_death
import torch
import tyro

import ppo
import ppo_atari
import ppo_continuous

gym.register_envs(ale_py)
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo.py": ppo, "ppo_continuous.py": ppo_continuous, "ppo_atari.py": ppo_atari}
LEARNING = {  # settings that change what is learnt
    "adapt", "anneal_ent_coef", "anneal_lr", "clip_coef", "clip_rewards", "clip_vloss", "desired_kl",
    "ent_coef", "env_id", "gae_lambda", "gamma", "hidden_size", "init_log_std", "kl_coef", "learning_rate",
    "max_grad_norm", "min_log_std", "norm_adv", "norm_obs", "norm_rewards", "num_envs", "num_minibatches",
    "num_steps", "recompute_advantages", "seed", "stagger", "surrogate", "target_entropy", "target_kl",
    "total_timesteps", "update_epochs", "vf_coef",
}  # fmt: skip
STORED = [run for run in experiments.runs() if run.path.exists()]

TINY = """
TASKS = [("CartPole-v1", 4_000), ("FrozenLake-v1", 4_000)]
PEER = {"CartPole-v1": {"n_envs": 2, "n_steps": 64, "learning_rate": "linear 0.001", "normalize": True}}
EXPERIMENTS = {
    "tiny": Experiment("tiny", "", "ppo.py", each(TASKS, 3), "--eval-episodes 2"),
    "sb3": Experiment("sb3", "", "sb3", each([("CartPole-v1", 600)], 1), settings=PEER),
}
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of ppo.py and the runner with a short list of experiments, without git and results."""
    (tmp_path / "benchmarks").mkdir()
    for path in ("ppo.py", "benchmarks/experiments.py", "benchmarks/run.py"):
        shutil.copy(ROOT / path, tmp_path / path)
    with open(tmp_path / "benchmarks/experiments.py", "a") as file:
        file.write(TINY)
    return tmp_path


def start(copy: Path, *flags: str) -> subprocess.Popen:
    """The runner, in a process group of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "benchmarks/run.py", *flags]
    return subprocess.Popen(command, cwd=copy, start_new_session=True, **options)


def finish(copy: Path, *flags: str) -> tuple[int, str]:
    """Exit status and output of the runner."""
    process = start(copy, *flags)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def results_in(copy: Path) -> dict[str, float]:
    """Names of the stored results, and when they were written."""
    folder = copy / "benchmarks/results"
    return {str(path.relative_to(folder)): path.stat().st_mtime for path in folder.rglob("*.json")}


@pytest.mark.slow
def test_a_killed_runner_does_what_is_missing(copy):
    """SIGKILL to the runner, or to it and its runs: in the end every result is there, each made once."""
    before: dict[str, float] = {}
    for kill in (os.kill, os.killpg):
        process = start(copy)
        while len(results_in(copy)) < len(before) + 2:
            assert process.poll() is None
            time.sleep(0.05)
        kill(process.pid, signal.SIGKILL)
        process.wait()
        before |= results_in(copy)
    status, output = finish(copy)
    assert (status, output.splitlines()[-1]) == (0, "7 of 7 stored")
    after = results_in(copy)
    seeds = {f"tiny/{env}_4000/{seed}.json" for env in ("CartPole-v1", "FrozenLake-v1") for seed in (1, 2, 3)}
    assert set(after) == seeds | {"sb3/CartPole-v1_600/1.json"}
    assert {name: after[name] for name in before} == before  # what was stored was left alone
    for name, episodes in (("tiny/CartPole-v1_4000/1.json", 2), ("sb3/CartPole-v1_600/1.json", 10)):
        result = json.loads((copy / "benchmarks/results" / name).read_text())
        assert len(result["final"]["greedy"]) == episodes
        assert result["args"]["env_id"] == "CartPole-v1"
        seconds = [x for x in result["curve"]["seconds"] if x is not None]
        assert 0 < seconds[0] <= seconds[-1] <= result["seconds"] + 0.1
    assert finish(copy)[1] == "7 of 7 stored\n"


@pytest.mark.slow
def test_ctrl_c_stops_the_runs(copy):
    """The runner ends with status 130, and so do its runs; nothing unfinished is stored."""
    text = (copy / "benchmarks/experiments.py").read_text().replace("4_000", "4_000_000")
    (copy / "benchmarks/experiments.py").write_text(text)
    process = start(copy, "--only", "tiny/CartPole-v1_4000000/1")
    log = copy / "benchmarks/unfinished/tiny/CartPole-v1_4000000/1/log.txt"
    while not log.exists() or "rollout" not in log.read_text():  # it trains
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not results_in(copy)
    with pytest.raises(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, 0)


def test_pauses_are_no_training():
    """Started at 10, 100 and 200 s; the second process logged nothing."""
    times = np.array([15.0, 20.0, 205.0, 210.0])
    seconds = runner.training_seconds(np.array([10.0, 100.0, 200.0]), times)
    assert seconds.tolist() == [5.0, 10.0, 15.0, 20.0]


@pytest.mark.slow
def test_a_stopped_run_goes_on(copy):
    """From its checkpoint: the stored curve begins with the first process, and nothing is left over."""
    flags = "--eval-episodes 2"
    with open(copy / "benchmarks/experiments.py", "a") as file:
        file.write('TASKS = [("CartPole-v1", 100_000, 1)]\n')
        file.write(f'EXPERIMENTS["long"] = Experiment("long", "", "ppo.py", TASKS, "{flags}")\n')
    folder = copy / "benchmarks/unfinished/long/CartPole-v1_100000/1"
    process = start(copy, "--only", "long")
    while not (folder / "log.txt").exists() or " steps  return" not in (folder / "log.txt").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not results_in(copy)
    assert finish(copy, "--only", "long")[0] == 0
    result = json.loads((copy / "benchmarks/results/long/CartPole-v1_100000/1.json").read_text())
    assert result["sessions"] == 2
    assert len(set(re.findall(r"folder +(\S+)", (folder / "log.txt").read_text()))) == 1
    assert None not in result["curve"]["seconds"]
    assert result["curve"]["seconds"] == sorted(result["curve"]["seconds"])
    assert result["args"]["resume"] is None
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_in_its_evaluation(copy, monkeypatch):
    """Training is complete: only the evaluation is done again."""
    folder = copy / "benchmarks/unfinished/tiny/CartPole-v1_4000/1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    trained = ppo.train(ppo.Args(env_id="CartPole-v1", total_timesteps=4_000, seed=1, eval_episodes=2))
    Path("starts.txt").write_text(f"{time.time() - 30}\n")
    status, output = finish(copy, "--only", "tiny/CartPole-v1_4000/1")
    assert status == 0, output
    result = json.loads((copy / "benchmarks/results/tiny/CartPole-v1_4000/1.json").read_text())
    assert result["final"]["greedy"] == trained["greedy_returns"].tolist()
    assert result["sessions"] == 2
    assert "rollout" not in (folder / "log.txt").read_text()  # no training


@pytest.mark.slow
def test_listing_one_and_failing(copy):
    """--dry-run only lists; --one does a run alone, from anywhere; a failing run is named; refusals."""
    with open(copy / "benchmarks/experiments.py", "a") as file:
        file.write('EXPERIMENTS["bad"] = Experiment("bad", "", "ppo.py", [("NoSuch-v0", 4_000, 1)])\n')
    _, output = finish(copy, "--dry-run", "--only", "*/[12]")
    assert (output.count("missing"), output.splitlines()[-1]) == (6, "0 of 6 stored")
    one = [sys.executable, str(copy / "benchmarks/run.py"), "--one", "tiny/FrozenLake-v1_4000/1"]
    subprocess.run(one, cwd="/", check=True, capture_output=True)
    assert set(results_in(copy)) == {"tiny/FrozenLake-v1_4000/1.json"}
    status, output = finish(copy, "--only", "bad")
    assert status == 1
    assert "bad/NoSuch-v0_4000/1  failed, see" in output
    assert output.splitlines()[-1] == "0 of 1 stored, 1 failed"
    status, output = finish(copy, "--only", "NoSuch")
    assert status == 2
    assert output.startswith("run.py: no run has this name; ")
    assert finish(copy, "--jobs", "0") == (2, "run.py: --jobs must be at least 1\n")
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    status, output = finish(copy)
    assert status == 2
    assert output.startswith("run.py: a result names its commit, so commit first: ")


@pytest.mark.slow
def test_list_of_experiments_is_sound():
    """No two runs share a file; flags are accepted; environments exist; what studies compare is run."""
    listed = experiments.runs()
    assert len({run.name for run in listed}) == len(listed)
    for run in {(run.experiment.name, run.env_id): run for run in listed}.values():
        assert gym.make(run.env_id).spec
        if run.experiment.script != "sb3":
            script = SCRIPTS[run.experiment.script]
            script.check_args(tyro.cli(script.Args, args=run.flags))
    have = {(run.experiment.name, run.task) for run in listed}
    for study in experiments.STUDIES.values():
        assert {(name, task) for name in study.experiments for task in study.tasks} <= have


def test_stored_results_are_those_of_the_list():
    """What is stored is listed, with its commit and with what the flags and defaults mean."""
    files = {path for path in experiments.RESULTS.rglob("*.json") if path.parent != experiments.RESULTS}
    assert files == {run.path for run in STORED}
    missing = {run.experiment.name for run in experiments.runs()} - {run.experiment.name for run in STORED}
    assert missing <= {"atari-gpu"}, "not run so far"
    settings = {}
    for run in STORED:
        result = json.loads(run.path.read_text())
        assert result["run"] == run.name
        assert len(result["commit"]) == 40
        if run.experiment.script == "sb3":
            continue
        script = SCRIPTS[run.experiment.script]
        if run.experiment.name not in settings:
            settings[run.experiment.name] = vars(tyro.cli(script.Args, args=run.flags))
        own = {"env_id": run.env_id, "total_timesteps": run.steps, "seed": run.seed}
        expected = settings[run.experiment.name] | own
        for name in LEARNING & expected.keys() & result["args"].keys():
            assert result["args"][name] == expected[name], f"{run.name}: {name}"


def test_thin():
    """Means over equal parts of the steps, the last with what is beyond; None where there is none."""
    steps = np.array([1, 20, 21, 60, 1000, 1010])
    thinned = runner.thin(steps, np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), 1000)
    assert len(thinned) == 50
    assert thinned[:4] == [1.5, 3.0, 4.0, None]
    assert thinned[-1] == 5.5


def test_ablation_table():
    """Only entries that were run on all tasks, best first."""
    assert report.over_published(np.array([-8.2]), "Reacher-v5") == pytest.approx(0.5)  # a cost
    rows = []
    shares_of = {"mujoco": (1, 1.5, 2), "mujoco-but-lambda-0.9": (3, 3.5, 4), "mujoco-but-norm-adv": (5, 5)}
    for name, shares in shares_of.items():
        for env_id, steps in experiments.LOCOMOTION:
            best = experiments.PUBLISHED[env_id][0]
            rows += [(name, env_id, steps, seed, share * best) for seed, share in enumerate(shares)]
    columns = ["experiment", "env_id", "steps", "seed", "training"]
    table = list(report.ablation_table(pd.DataFrame(rows, columns=columns)))
    assert [row["entry"] for row in table] == ["λ = 0.9", "the defaults"]
    last = "over the best published"
    assert table[0][last].startswith("**3.50** [")
    low, high = map(float, re.findall(r"[\d.]+", table[1][last].partition("[")[2]))
    assert 1 <= low < 1.5 < high <= 2
    assert table[1]["Walker2d"] == "6000.0 ± 2000.0"


def test_statistics_of_the_tables():
    """Interquartile mean, spread and probability of improvement against their definitions."""
    ours, theirs = np.arange(1.0, 9.0), np.array([0.0, 4.5, 4.5, 20.0])
    text = report.iqm(pd.Series(ours))
    assert text.startswith(f"{np.mean(ours[2:-2]):.1f} [")
    low, high = (float(x) for x in text.split("[")[1].rstrip("]").split(", "))
    assert 1 <= low < 4.5 < high <= 8
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in ours for b in theirs]
    assert report.improvement(ours, theirs).startswith(f"{np.mean(wins):.2f} [")
    assert report.spread(ours) == f"4.5 ± {math.sqrt(((ours - 4.5) ** 2).sum() / 7):.1f}"


@pytest.mark.slow
def test_tables_match_the_stored_results():
    """The tables in the files are those that report.py makes."""
    made, marks = report.tables(), set()
    for path in (ROOT / "README.md", ROOT / "benchmarks/README.md"):
        text = path.read_text()
        assert report.fill(text, made) == text, f"run python benchmarks/report.py: {path} is out of date"
        marks |= set(re.findall(r"<!-- table: ([\w-]+) -->", text))
    assert marks == made.keys()


def test_fill_changes_nothing_but_the_tables():
    """Empty and filled marks get their tables; the text around them stays."""
    made, document = {"x": "| 1 |\n| 2 |"}, "a\n<!-- table: x -->\n{}<!-- end -->\nb"
    for before in ("", "| old |\n\n"):
        assert report.fill(document.format(before), made) == document.format("| 1 |\n| 2 |\n")


@pytest.mark.slow
def test_figures(tmp_path):
    """Figures are drawn in two themes, and the committed files are those."""
    figures.draw(tmp_path)
    language_report.draw(language_report.load_runs(), tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert made == {path.name for path in (ROOT / "benchmarks/figures").iterdir()}
    names = {*experiments.STUDIES, "classic", "mujoco", "atari", "objective", "gae"}
    names |= {"language", "language-comparison", "language-sensitivity"}
    assert made == {f"{name}-{theme}.png" for name in names for theme in ("light", "dark")}


@pytest.mark.slow
def test_throughput_command(copy):
    """A round compares both variants of two copies of a script with the peer, and stores nothing."""
    before = (experiments.RESULTS / "throughput.json").read_bytes()
    flags = ["--env-id", "CartPole-v1", "--num-envs", "2", "--rounds", "1", "--timesteps", "1024"]
    command = [sys.executable, str(ROOT / "benchmarks/throughput.py"), *flags, "--script-dir", str(copy)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for folder in (ROOT, copy.resolve()):
        assert f"\n{folder}\n| task | variant | steps per second | ratio |" in output
    for variant in ("eager", "`--compile`", "Stable-Baselines3"):
        row = rf"\| CartPole-v1, N = 2 \| {variant} \| ([\d,]+) \("
        speeds = [int(speed.replace(",", "")) for speed in re.findall(row, output)]
        assert len(speeds) == 2
        assert min(speeds) > 100
    assert (experiments.RESULTS / "throughput.json").read_bytes() == before


def test_time_limit_as_death():
    """A time limit is reported as a terminal state."""
    env = time_limit_as_death.make("MountainCar-v0", max_episode_steps=2)
    env.reset(seed=1)
    assert [env.step(0)[2:4] for _ in range(2)] == [(False, False), (True, False)]


def test_commands_in_the_readmes_select_runs():
    """Each value of --only is that of some runs."""
    names = [run.name for run in experiments.runs()]
    for path in (ROOT / "README.md", ROOT / "benchmarks/README.md"):
        for only in re.findall(r"run\.py --only '?([^\s'`]+)", path.read_text()):
            assert any(name.startswith(only) or fnmatch.fnmatch(name, only) for name in names), only


# Language models


@pytest.fixture(autouse=True)
def modules_as_they_were(monkeypatch):
    """The benchmark loads fresh copies of scripts, which other tests must not see."""
    for name in ("ppo_rlhf", "grpo"):
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))


def test_language_tables_are_up_to_date():
    """The tables in docs/ are those that language_report.py makes."""
    made = language_report.tables(language_report.load_runs())
    text = (ROOT / "docs/ppo_and_grpo.md").read_text()
    assert all(f"<!-- table: {name} -->" in text for name in made)
    assert report.fill(text, made) == text, "run python benchmarks/language_report.py"


@pytest.mark.parametrize("study", language.STUDIES, ids=lambda study: f"{study.script}/{study.name}")
def test_language_studies(study):
    """Each has settings that its script accepts, and its stored runs were made with them."""
    script = language.load_script(study.script)
    default = script.SUMS if "--task sums" in study.flags else script.Args()
    script.check_args(tyro.cli(script.Args, args=study.flags.split(), default=default))
    for path in language.LANGUAGE.glob(f"{study.script}/{study.name}__*.json"):
        stored = json.loads(path.read_text())
        assert (stored["study"], stored["script"]) == (study.name, study.script)
        assert stored["flags"] == study.flags
        assert path.stem.endswith(f"__{stored['seed']}")
        assert abs(stored.get("identity", 0)) < 1e-9, "J* - J = β KL(π ‖ π*)"
        assert len(stored["curves"]["score"]) == language.POINTS


def test_faults_are_planted():
    """They change what the script computes: k3 in the reward, and no temperature in learning."""
    script = language.load_script("ppo_rlhf")
    language.k3_in_reward(script)
    kl, mask = torch.tensor([[0.5, -0.5]]), torch.ones(1, 2, dtype=torch.bool)
    rewards = script.token_rewards(torch.zeros(1), kl, mask, 1.0)
    assert rewards.flatten().tolist() == pytest.approx([1 - math.exp(-0.5) - 0.5, 1 - math.exp(0.5) + 0.5])
    gpt = script.GPT(5)
    batch = script.Responses(torch.tensor([[2, 3, 1]]), torch.ones(1, 3, dtype=torch.bool), mask)
    before = [script.token_log_probs(gpt, batch, temperature) for temperature in (1.0, 0.5)]
    language.no_temperature_in_learning(script)
    after = script.token_log_probs(gpt, batch, 0.5)
    assert torch.equal(after, before[0])
    assert not torch.equal(after, before[1])
