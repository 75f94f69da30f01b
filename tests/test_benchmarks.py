"""The benchmarks: what is run, stored and reported."""

from __future__ import annotations

import fnmatch
import itertools
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ale_py
import experiments
import figures
import gpu
import gymnasium as gym
import language
import language_report
import numpy as np
import pandas as pd
import pytest
import report
import run as runner
import tyro
from rliable.metrics import probability_of_improvement

gym.register_envs(ale_py)
ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("only", ["pendulum", "language-ours"])
def test_what_is_measured_on_a_gpu(only, monkeypatch, capsys):
    """The small version runs, and each measurement has its numbers. (Playground's take long to compile.)"""
    pytest.importorskip("datasets")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", only, "--small"])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    shown = capsys.readouterr().out
    assert end.value.code == 0, shown
    lines = re.findall(rf"^{only}.*", shown, re.MULTILINE)
    assert len(lines) == 1
    for line in lines:
        assert re.search(r"seconds [\d.e-]+  .*speed [\d,.]+  .*memory [\d.]+", line)


@pytest.mark.slow
def test_list_of_experiments_is_sound():
    """No two runs share a file; flags are accepted; environments exist; what studies compare is run."""
    listed = experiments.runs()
    assert len({run.name for run in listed}) == len(listed)
    for run in {(run.experiment.name, run.env_id): run for run in listed}.values():
        if run.experiment.program == "memory.py" or run.experiment.commit:  # not installed, or not here
            continue
        if run.experiment.script == "sb3":
            assert gym.make(run.env_id).spec
        elif run.experiment.script.endswith(".py"):
            with experiments.script_of(run) as script:
                script.check(tyro.cli(script.Args, args=run.arguments))
    have = {(run.experiment.name, (run.env_id, run.steps)) for run in listed}
    for study in experiments.STUDIES.values():
        assert {(name, task) for name in study.experiments for task in study.tasks} <= have


def test_stored_results_are_those_of_the_list():
    """Each row is of a listed run with its flags, each once, with its commit and its curve."""
    listed = {run.key: run for run in experiments.runs()}
    table = pd.read_csv(runner.RUNS, keep_default_na=False)
    curves = pd.read_csv(runner.CURVES)
    assert not table.duplicated(runner.KEY).any()
    for row in table.itertuples():
        run = listed[row.experiment, row.env_id, row.steps, row.seed]
        assert row.flags == run.flags, run.name
        assert len(row.commit) == 40
    programs = {name: experiment.program for name, experiment in experiments.EXPERIMENTS.items()}
    with_curves = table[table.experiment.map(programs) != "memory.py"]
    keys = set(map(tuple, with_curves[runner.KEY].to_numpy()))
    assert set(map(tuple, curves[curves.quantity == "return"][runner.KEY].to_numpy())) == keys


def test_statistics_of_the_tables():
    """The probability of improvement, against rliable's, and the spread."""
    ours, theirs = np.arange(16.0).reshape(8, 2), np.array([[0, 1], [4, 5.5], [4.5, 20], [9, 12]])
    value, low, high = report.interval(report.probability_of_improvement, ours, theirs)
    assert value == pytest.approx(probability_of_improvement(ours, theirs))
    assert low < value < high
    assert report.spread(np.array([2.0, 4.0, 9.0])) == f"5.0 ± {math.sqrt((9 + 1 + 16) / 2):.1f}"


def test_the_mean_over_tasks_and_its_interval():
    """Tasks count alike, whatever their numbers of seeds. The interval is that of all ways to draw seeds."""
    tasks = [(np.array([1.0, 5, 6]), np.array([2, 4, 5.5])), (np.array([3.0, 8]), np.array([3.0, 9]))]
    by_hand = (5 / 9 + 1.5 / 4) / 2  # pairs that are won; a tie is half of one
    seeds = [scores for task in tasks for scores in task]
    means = []
    for drawn in itertools.product(*(itertools.product(scores, repeat=len(scores)) for scores in seeds)):
        wins = [[(a > b) + (a == b) / 2 for a in x for b in y] for x, y in (drawn[:2], drawn[2:])]
        means.append(np.mean([np.mean(won) for won in wins]))
    low, high = np.quantile(means, [0.025, 0.975])
    assert report.mean_chance(tasks) == f"{by_hand:.2f} [{low:.2f}, {high:.2f}]"


@pytest.mark.slow
def test_tables_match_the_stored_results():
    """The tables in the files are those that report.py makes."""
    made = report.tables()
    for path in report.PAGES:
        text = path.read_text()
        assert report.fill(text, made) == text, f"run python benchmarks/report.py: {path} is out of date"


@pytest.mark.slow
def test_figures(tmp_path):
    """Figures are drawn in two themes, and the committed files are those; a page shows each."""
    figures.draw(tmp_path)
    language_report.draw(*language_report.load(), tmp_path)
    made = {path.name for path in tmp_path.iterdir()} | {"agents.webp"}
    assert made == {path.name for path in experiments.FIGURES.iterdir()}
    pages = "".join(path.read_text() for path in (*report.PAGES, *ROOT.glob("docs/*.md")))
    assert made == set(re.findall(r"figures/([\w-]+\.\w+)", pages))


def test_commands_in_the_readmes_select_runs():
    """Each value of --only is that of some runs."""
    names = [run.name for run in experiments.runs()]
    for path in report.PAGES:
        for only in re.findall(r"run\.py --only '?([^\s'`]+)", path.read_text().replace("--only NAME", "")):
            assert any(name.startswith(only) or fnmatch.fnmatch(name, only) for name in names), only


# Language models


def test_language_tables_are_up_to_date():
    """The tables of the page are those that language_report.py makes."""
    made = language_report.tables(*language_report.load())
    text = language_report.PAGE.read_text()
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", text)) == made.keys()
    assert report.fill(text, made) == text, "run python benchmarks/language_report.py"


def test_language_studies():
    """Their scripts accept their flags, and the stored runs are theirs, each once, with its curve."""
    studies = {study.name: study for study in language.STUDIES}
    assert len(studies) == len(language.STUDIES)
    for study in language.STUDIES:
        study.script.check(tyro.cli(study.script.Args, args=study.flags.split()))
    runs, curves = pd.read_csv(language.RUNS, keep_default_na=False), pd.read_csv(language.CURVES)
    assert not runs.duplicated(["study", "seed"]).any()
    for run in runs[runs.task.isin(["reviews", "sums"])].itertuples():
        study = studies[run.study]
        assert (run.script, run.task) == (study.script.__name__, study.task)
        assert (run.flags, run.fault) == (study.flags, study.fault)
        assert run.seed in study.seeds
        points = curves[(curves.study == run.study) & (curves.seed == run.seed)]
        assert points.episodes.tolist() == list(range(0, run.episodes + 1, language.SPACING))


TINY = """
SB3["CartPole-v1"] = {"n_envs": 2, "n_steps": 64, "learning_rate": "linear 0.001", "normalize": True}
EXPERIMENTS = {
    "tiny": Experiment("tiny", "", "ppo.py", [("CartPole-v1", 20_000, 1)], "--eval-episodes 2"),
    "gpu": Experiment("gpu", "", "ppo_gpu.py", [("Pendulum", 20_000, 1)], "--num-envs 16 --device cpu"),
    "peer": Experiment("peer", "", "sb3", [("CartPole-v1", 600, 1)]),
    "bad": Experiment("bad", "", "ppo.py", [("NoSuch-v0", 4_000, 1)]),
}
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the scripts and the runner with a short list of experiments, without git and results."""
    (tmp_path / "results/data").mkdir(parents=True)
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    for name in ("ppo.py", "ppo_gpu.py"):
        shutil.copy(ROOT / name, tmp_path)
    with open(tmp_path / "benchmarks/experiments.py", "a") as file:
        file.write(TINY)
    return tmp_path


@pytest.mark.slow
def test_the_runner(copy):
    """What is missing is listed, done, and stored once; Ctrl-C stops a run, which then continues."""
    command = [sys.executable, "-u", "benchmarks/run.py"]

    def finish(*flags):
        done = subprocess.run([*command, *flags], cwd=copy, capture_output=True, text=True, timeout=200)
        return done.returncode, done.stdout.splitlines()

    assert finish("--dry-run")[1] == [
        "missing tiny/CartPole-v1_20000/1", "missing gpu/Pendulum_20000/1", "missing peer/CartPole-v1_600/1",
        "missing bad/NoSuch-v0_4000/1", "0 of 4 stored",
    ]  # fmt: skip
    process = subprocess.Popen([*command, "--only", "tiny"], cwd=copy, stdout=subprocess.PIPE, text=True)
    while " steps  return" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) != 0
    status, output = finish()
    assert (status, output[-1]) == (1, "3 of 4 stored")
    assert "bad/NoSuch-v0_4000/1 failed" in output
    table = pd.read_csv(copy / "results/data/runs.csv").set_index("experiment")
    assert dict(table.sessions) == {"tiny": 2, "gpu": 1, "peer": 1}
    assert dict(table.episodes) == {"tiny": 2, "gpu": 16, "peer": 10}
    assert (table.seconds > 0).all()
    assert 0 < table.training["tiny"] <= 500
    assert set(pd.read_csv(copy / "results/data/curves.csv").experiment) == {"tiny", "gpu", "peer"}
    assert finish("--dry-run")[1] == ["missing bad/NoSuch-v0_4000/1", "3 of 4 stored"]
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    assert finish()[0] == 1  # uncommitted
