"""The benchmarks: what is run, stored and reported, and that a killed runner loses and repeats nothing."""

from __future__ import annotations

import fnmatch
import importlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import ale_py
import experiments
import gymnasium as gym
import numpy as np
import pytest
import report
import run as runner
import torch
import tyro

import ppo
import ppo_atari
import ppo_continuous

gym.register_envs(ale_py)
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo.py": ppo, "ppo_continuous.py": ppo_continuous, "ppo_atari.py": ppo_atari}

TINY = """
EXPERIMENTS[:] = [
    Experiment("tiny", "ppo.py", {"CartPole-v1": 4_000, "FrozenLake-v1": 4_000}, 3, "--eval-episodes 2"),
    Experiment("sb3", "sb3", {"CartPole-v1": 600}, 1, settings={"CartPole-v1": {"n_envs": 2, "n_steps": 64}}),
]
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of the script and the benchmarks, without git and results, whose list is short."""
    (tmp_path / "benchmarks").mkdir()
    for path in (
        "ppo.py",
        *(f"benchmarks/{name}.py" for name in ("experiments", "run", "time_limit_as_death")),
    ):
        shutil.copy(ROOT / path, tmp_path / path)
    with open(tmp_path / "benchmarks/experiments.py", "a") as file:
        file.write(TINY)
    return tmp_path


def start(copy: Path, *flags: str) -> subprocess.Popen:
    """The runner, in a session of its own, as a scheduler starts it."""
    command = [sys.executable, "benchmarks/run.py", *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=copy, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def finish(copy: Path, *flags: str) -> tuple[int, str]:
    """Run the runner to its end: exit status and output."""
    process = start(copy, *flags)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def stored(copy: Path) -> dict[str, float]:
    """Names of the stored results, and when they were written."""
    folder = copy / "benchmarks/results"
    return {str(path.relative_to(folder)): path.stat().st_mtime for path in sorted(folder.rglob("*.json"))}


def test_killed_runner_goes_on(copy):
    """SIGKILL to the runner, or to it and all its runs: every result is there in the end, each made once."""
    expected = {
        f"tiny/{env}_4000/{seed}.json" for env in ("CartPole-v1", "FrozenLake-v1") for seed in (1, 2, 3)
    }
    expected |= {"sb3/CartPole-v1_600/1.json"}
    before: dict[str, float] = {}
    for kill in (os.kill, os.killpg):
        process = start(copy)
        while len(stored(copy)) < len(before) + 2:
            assert process.poll() is None
            time.sleep(0.05)
        kill(process.pid, signal.SIGKILL)  # in the middle of the next two runs
        process.wait()
        before |= stored(copy)
    status, output = finish(copy)
    assert (status, output.splitlines()[-1]) == (0, "7 of 7 stored")
    after = stored(copy)
    assert set(after) == expected
    assert {name: after[name] for name in before} == before  # finished ones were left alone
    for folder in (copy / "benchmarks/unfinished").glob("tiny/*/*"):
        assert len(list(folder.glob("runs/*/checkpoint.pt"))) == 1, "done twice"
    content = json.loads((copy / "benchmarks/results/tiny/CartPole-v1_4000/1.json").read_text())
    assert len(content["final"]["greedy"]) == 2
    assert content["args"]["env_id"] == "CartPole-v1"
    assert content["seconds"] > 0
    assert finish(copy)[1] == "7 of 7 stored\n"  # and nothing is left to do


def test_interrupted_runs_go_on_from_their_checkpoint(copy):
    """Ctrl-C: the runs save a checkpoint; the next start goes on from it and says so in the result."""
    text = (copy / "benchmarks/experiments.py").read_text().replace("4_000", "40_000")
    (copy / "benchmarks/experiments.py").write_text(text)
    flags = ("--only", "tiny/CartPole-v1", "--seeds", "1")
    process = start(copy, *flags)
    log = copy / "benchmarks/unfinished/tiny/CartPole-v1_40000/1/log.txt"
    while not log.exists() or "left" not in log.read_text():  # a status line: it trains
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert not stored(copy)
    status, output = finish(copy, *flags)
    assert (status, output.splitlines()[-1]) == (0, "1 of 1 stored")
    result = json.loads((copy / "benchmarks/results/tiny/CartPole-v1_40000/1.json").read_text())
    assert result["sessions"] == 2
    assert "To go on" in log.read_text()
    seconds = [x for x in result["curve"]["seconds"] if x is not None]
    assert seconds == sorted(seconds)  # no pause, no jump back


def test_a_failing_run_is_reported_and_the_others_are_done(copy):
    """A run that fails is named with its log, the exit status is 1, and nothing is stored for it."""
    with open(copy / "benchmarks/experiments.py", "a") as file:
        file.write('EXPERIMENTS.insert(0, Experiment("bad", "ppo.py", {"NoSuch-v0": 4_000}, 1))\n')
    status, output = finish(copy, "--only", "*/1", "--jobs", "1")
    assert status == 1
    assert "bad/NoSuch-v0_4000/1  failed, see" in output
    assert output.splitlines()[-1] == "3 of 4 stored, 1 failed"
    assert not (copy / "benchmarks/results/bad/NoSuch-v0_4000/1.json").exists()


def test_dry_run_print_and_bad_requests(copy):
    """--dry-run and --print list what is missing and do nothing; a printed line does its run alone."""
    status, output = finish(copy, "--dry-run", "--seeds", "2")
    assert status == 0
    assert output.count("missing") == 5
    assert "0 of 5 stored" in output
    status, output = finish(copy, "--print", "--only", "*/FrozenLake", "--seeds", "1")
    (line,) = output.splitlines()
    subprocess.run(line, shell=True, cwd="/", check=True, capture_output=True)
    assert set(stored(copy)) == {"tiny/FrozenLake-v1_4000/1.json"}
    assert finish(copy, "--print", "--only", "*/FrozenLake", "--seeds", "1") == (0, "")
    status, output = finish(copy, "--only", "NoSuch")
    assert status == 2
    assert "no run is called so" in output


def test_uncommitted_code_is_refused(copy):
    """A result names its commit, so there must be one that has the code."""
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=copy, check=True)
    status, output = finish(copy)
    assert status == 2
    assert "commit first" in output
    assert "not stored: commit" in finish(copy, "--check", "--only", "*/CartPole")[1]
    assert not (copy / "benchmarks/results").exists()


def test_check_notices_a_change(copy):
    """Short runs come out bit for bit the same, until the code changes."""
    flags = ("--check", "--only", "*/CartPole")
    assert finish(copy, *flags) == (0, "tiny/CartPole-v1_8000/1: new, stored\n")
    status, output = finish(copy, *flags)
    assert status == 0
    assert "as at commit" in output
    text = (copy / "ppo.py").read_text()
    assert "learning_rate: float = 1e-3" in text
    (copy / "ppo.py").write_text(
        text.replace("learning_rate: float = 1e-3", "learning_rate: float = 1.0000001e-3")
    )
    status, output = finish(copy, *flags)
    assert status == 1
    assert "DIFFERS" in output


def test_changes_of_a_script(tmp_path):
    """Each listed change is of text that its script has once, and is what the changed script runs."""
    changed = {run.experiment.name: run.experiment for run in experiments.runs() if run.experiment.changes}
    assert changed
    for experiment in changed.values():
        module = runner.load_script(experiment, tmp_path)
        text = (tmp_path / experiment.script).read_text()
        assert all(new in text for _, new in experiment.changes)
        assert Path(module.__file__) == tmp_path / experiment.script
    relu = runner.load_script(changed["mujoco-relu"], tmp_path)
    torch.manual_seed(0)
    mlp, x = relu.MLP(3, 8, 2, 1.0), torch.randn(5, 3)
    (first, b1), (second, b2), (last, b3) = mlp.layers
    expected = ((x @ first.T + b1).clamp(0) @ second.T + b2).clamp(0) @ last.T + b3
    assert torch.allclose(mlp(x), expected, atol=1e-6)
    broken = replace(changed["mujoco-relu"], changes=(("no such text", ""),))
    with pytest.raises(SystemExit, match="must have once"):
        runner.load_script(broken, tmp_path)


def test_stored_results_have_the_settings_of_today():
    """What an experiment's flags and the script's defaults say now is what its stored runs were made with."""
    settings = {}
    for run in experiments.runs():
        if run.experiment.script == "sb3" or not run.path.exists():
            continue
        if run.experiment.name not in settings:
            script = importlib.import_module(run.experiment.script.removesuffix(".py"))
            settings[run.experiment.name] = asdict(script.tyro.cli(script.Args, args=run.flags))
        now = settings[run.experiment.name] | {
            "env_id": run.env_id,
            "total_timesteps": run.steps,
            "seed": run.seed,
        }
        stored = json.loads(run.path.read_text())["args"]
        assert stored == {name: now[name] for name in stored}, run.name
    assert {"ppo", "mujoco", "atari-pong"} < settings.keys()


def test_what_another_version_began_is_done_anew(tmp_path, monkeypatch):
    """A run goes on from a checkpoint of the same script only; its result names one commit."""
    experiment = experiments.Experiment("x", "ppo.py", {"CartPole-v1": 2_000}, 1, "--eval-episodes 1")
    run = experiments.Run(experiment, "CartPole-v1", 2_000, 1)
    monkeypatch.setattr(runner, "git", lambda *_: "this-version")
    assert runner.run_ours(run, tmp_path)["sessions"] == 1
    (checkpoint,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert runner.run_ours(run, tmp_path)["sessions"] == 2
    assert checkpoint.exists()
    monkeypatch.setattr(runner, "git", lambda *_: "another-version")
    assert runner.run_ours(run, tmp_path)["sessions"] == 1
    assert not checkpoint.exists()


def test_seeds_are_counted_from_the_first(copy):
    """--seeds takes that many of each experiment, wherever its seeds begin."""
    with open(copy / "benchmarks/experiments.py", "a") as file:
        file.write('EXPERIMENTS.append(Experiment("late", "ppo.py", {"CartPole-v1": 9}, 3, first_seed=11))\n')
    status, output = finish(copy, "--dry-run", "--only", "late", "--seeds", "2")
    assert status == 0
    assert [line.rpartition("/")[2] for line in output.splitlines()[:-1]] == ["11", "12"]


def test_returns_over_the_best_published():
    """Above 1 is better, also where returns are costs."""
    assert report.normalized(np.array([2909.55]), "HalfCheetah-v5") == pytest.approx(0.5)
    assert report.normalized(np.array([-8.2, -2.05]), "Reacher-v5") == pytest.approx([0.5, 2])
    each = [
        [{"final": {"training": share * report.BEST[env_id][0]}} for share in (0.2, 0.4)]
        for env_id in experiments.LOCOMOTION
    ]
    assert report.over_published(each) == pytest.approx(np.array([[0.2] * 3, [0.4] * 3]))


def test_ablation_table():
    """Entries run on all tasks with as many seeds as the defaults, best first, beside the defaults."""

    def found(*shares):
        runs = ({"final": {"training": share * 1000}} for share in shares)
        return list(runs)

    results = {}
    default, tanh, relu, *_ = experiments.ABLATED
    for name, shares in {default: (1, 2), tanh: (3, 4), relu: (5,)}.items():
        for task in report.tasks(experiments.LOCOMOTION):
            results[name, task] = found(*shares)
    _, *rows = report.ablation_table(results)
    assert [row[0] for row in rows] == [experiments.ABLATED[tanh], experiments.ABLATED[default]]
    share = sum(1000 / report.BEST[env_id][0] for env_id in experiments.LOCOMOTION) / 3
    assert rows[0][-1].startswith(f"**{3.5 * share:.2f}** [")
    low, high = map(float, re.findall(r"[\d.]+", rows[1][-1].partition("[")[2]))
    assert share <= low + 0.005 < 1.5 * share < high <= 2 * share + 0.005
    assert rows[1][2] == "1500.0 ± 707.1"
    del results[tanh, ("Walker2d-v5", 300_000)]
    assert len(list(report.ablation_table(results))) == 2


def test_full_length_table():
    """The defaults of each environment, then its entries as far as they were run, each seed's mean beside."""
    env_id, (_, names) = next(iter(experiments.FULL_LENGTH.items()))
    entry = f"mujoco-but-{names.split()[1]}"  # the first was not run
    task = env_id, experiments.MUJOCO[env_id]
    results = {("mujoco", task): [{"final": {"training": 1.0, "greedy": [2.0, 4.0]}}]}
    results[entry, task] = [{"final": {"training": 10.0, "greedy": [20.0, 40.0 + x]}} for x in (0, 20)]
    _, *rows = report.full_length_table(results)
    assert rows == [
        [env_id, "the defaults", "1", "1.00", "**3.0**", "3"],
        [env_id, experiments.ABLATED[entry], "2", "10.0 ± 0.0", "**35.0 ± 7.1**", "30, 40"],
    ]


def test_candidates_table():
    """Greedy returns, with the number of seeds; a mean over the published only of what was run everywhere."""
    published = {env_id: best for env_id, (best, *_) in report.BEST.items()}
    results = {
        (name, task): [{"final": {"greedy": [share * published[task[0]]] * 2}} for share in shares]
        for name, shares in {"mujoco-start": (1, 1), "mujoco": (1,)}.items()
        for task in report.tasks(experiments.MUJOCO)
        if (name, task[0]) != ("mujoco", "Ant-v5")
    }
    head, *rows, mean, median = report.candidates_table(results)
    assert [row[0] for row in rows][::10] == ["HalfCheetah-v5, 1M", "Pendulum-v1, 100k"]
    columns = dict(zip(head, zip(*rows, mean, median, strict=True), strict=True))
    assert columns["the start"][1] == "2609.3 ± 0.0 (2)"
    assert columns["the start"][-2:] == ("**1.00**", "**1.00**")
    today = columns["today's defaults"]
    assert (today[1], today[3], *today[-2:]) == ("2609.3 (1)", "", "", "")
    assert set(columns["the same, log std not below -2.3"]) == {""}


def test_thin():
    """Means over equal parts of the steps, the last part including what is beyond; None for what is empty."""
    steps = np.array([1, 20, 21, 60, 1000, 1010])
    thinned = runner.thin(steps, np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), 1000)
    assert len(thinned) == 50
    assert thinned[:4] == [1.5, 3.0, 4.0, None]
    assert thinned[-1] == 5.5


def test_seconds_do_not_count_pauses():
    """Two sessions, of 3 and 2 seconds, with a pause of 90 between them."""
    walls = np.array([101.0, 103.0, 194.0, 195.0])
    assert runner.seconds_of(walls, [100.0, 193.0]).tolist() == [1.0, 3.0, 4.0, 5.0]
    walls = np.array([101.0, 194.0])  # the middle session was killed before it logged anything
    assert runner.seconds_of(walls, [100.0, 150.0, 193.0]).tolist() == [1.0, 2.0]


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
        assert {(name, task) for name in study.labels for task in report.tasks(study.tasks)} <= have


STORED = [run for run in experiments.runs() if run.path.exists()]


def test_stored_results_are_those_of_the_list():
    """What is stored is listed, with its commit and what its flags mean; MuJoCo and Atari may lack runs."""
    missing = {run.experiment.name for run in experiments.runs() if run not in STORED}
    assert all(name.startswith(("mujoco", "atari")) for name in missing)
    others = {"short-runs", "throughput"}
    files = {path for path in experiments.RESULTS.rglob("*.json") if path.stem not in others}
    assert files == {run.path for run in STORED}
    for run in STORED:
        result = json.loads(run.path.read_text())
        assert result["run"] == run.name
        assert len(result["commit"]) == 40
        episodes = result["args"].get("eval_episodes", 10)
        assert len(result["final"]["greedy"]) == len(result["final"]["stochastic"]) == episodes
        if run.experiment.script != "sb3":
            now = ppo.asdict(tyro.cli(SCRIPTS[run.experiment.script].Args, args=run.flags))
            assert now | result["args"] == now  # but for settings that are newer than the result
            assert (
                abs(result["seconds"] - max(x or 0 for x in result["curve"]["seconds"])) < result["seconds"]
            )


def test_every_listed_code_has_a_short_run():
    """`run.py --check` has something to compare with for all that is stored."""
    short = json.loads((experiments.RESULTS / "short-runs.json").read_text())
    assert {run.name for run in runner.short_runs(STORED)} == set(short)


def test_tables_match_the_stored_results():
    """What report.py would write stands in the files already, numbers and all."""
    made = report.tables()
    for path in (ROOT / "README.md", ROOT / "benchmarks/README.md"):
        text = path.read_text()
        assert report.fill(text, made) == text, f"run python benchmarks/report.py: {path} is out of date"
    everything = (ROOT / "README.md").read_text() + (ROOT / "benchmarks/README.md").read_text()
    assert all(f"<!-- table: {name} -->" in everything for name in made)


def test_fill_changes_nothing_but_the_tables():
    """Empty and filled markers, side by side, get their tables; what stands around them stays."""
    document = "a\n<!-- table: x -->\n<!-- end -->\nb\n<!-- table: y-1 -->\n| old |\n\n<!-- end -->\nc"
    filled = report.fill(document, {"x": "| 1 |\n| 2 |", "y-1": "| 3 |"})
    assert filled == (
        "a\n<!-- table: x -->\n| 1 |\n| 2 |\n<!-- end -->\nb\n<!-- table: y-1 -->\n| 3 |\n<!-- end -->\nc"
    )
    assert report.fill(filled, {"x": "| 1 |\n| 2 |", "y-1": "| 3 |"}) == filled


def test_statistics_of_the_tables():
    """Interquartile mean, spread and probability of improvement against their definitions."""
    ours, theirs = np.arange(1.0, 9.0), np.array([0.0, 4.5, 4.5, 20.0])
    ordered = sorted(ours)[2:-2]
    assert report.iqm(ours).startswith(f"{np.mean(ordered):.1f} [")
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in ours for b in theirs]
    assert report.improvement(ours, theirs).startswith(f"{np.mean(wins):.2f} [")
    assert report.spread(ours) == f"4.5 ± {math.sqrt(((ours - 4.5) ** 2).sum() / 7):.1f}"
    low, high = (float(x) for x in report.iqm(ours).split("[")[1].rstrip("]").split(", "))
    assert 1 <= low < 4.5 < high <= 8


def test_figures(tmp_path, monkeypatch):
    """Each study and both equations are drawn in two themes, and the committed files are those."""
    import figures

    committed = {path.name for path in figures.FIGURES.iterdir()}
    monkeypatch.setattr(figures, "FIGURES", tmp_path)
    made = {path.name for path in figures.draw(report.load())}
    names = {*experiments.STUDIES, "mujoco", "atari", "ablation", "objective", "gae"}
    assert made == committed == {f"{name}-{theme}.png" for name in names for theme in ("light", "dark")}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in made)


def test_drawn_objective_is_the_clipped_one():
    """The figure beside the equation shows min(r A, clip(r, 1 - ε, 1 + ε) A)."""
    import figures

    for axes, advantage in zip(figures.objective_figure().axes, (1, -1), strict=True):
        ratios, objective = (np.asarray(x, dtype=float) for x in axes.lines[1].get_data())
        expected = np.minimum(ratios * advantage, np.clip(ratios, 0.8, 1.2) * advantage)
        np.testing.assert_allclose(objective, expected, atol=1e-5)


def test_throughput_command():
    """One short round of both prints speeds, ratio and shares, and stores nothing."""
    before = (experiments.RESULTS / "throughput.json").read_bytes()
    flags = ["--env-id", "CartPole-v1", "--num-envs", "2", "--rounds", "1", "--timesteps", "1024"]
    command = [sys.executable, str(ROOT / "benchmarks/throughput.py"), *flags]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for part in ("ppo.py --compile", "Stable-Baselines3", "environment", "advantages", "compiling"):
        assert part in output
    assert (experiments.RESULTS / "throughput.json").read_bytes() == before


def test_commands_in_the_readmes_select_runs():
    """Each pattern after --only is that of some runs, and each link and figure is a file."""
    names = [run.name for run in experiments.runs()]
    for folder in (ROOT, ROOT / "benchmarks"):
        text = (folder / "README.md").read_text()
        for pattern in re.findall(r"run\.py --only ('[^']+'|\S+)", text):
            assert fnmatch.filter(names, f"{pattern.strip(chr(39))}*"), pattern
        for path in re.findall(r'(?:srcset|src)="([^"]+)"|\]\((?!http)([^)#]+)\)', text):
            assert (folder / "".join(path)).is_file(), path
