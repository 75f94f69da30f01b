"""Tests of plot.py: runs of ours and of CleanRL, skipped and resumed runs, the figure and the table."""

import sys
import time
from pathlib import Path

import numpy as np
import pytest
from torch.utils.tensorboard import SummaryWriter

pytest.importorskip("matplotlib")
pytest.importorskip("pandas")
import plot

TAG = "charts/episodic_return"
OURS = "CartPole-v1__ppo__{}__20260102-030405-{:06}"


def write(folder, points, tag=TAG, purge_step=None, start=None):
    """Write (step, value) points as a run does, a second of wall time for each step."""
    start = start or time.time()
    with SummaryWriter(str(folder), purge_step=purge_step) as writer:
        for step, value in points:
            writer.add_scalar(tag, value, step, walltime=start + step)


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Write three seeds of ours, of which one is shorter, and two of CleanRL, with two episodes per step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    plot.plt.switch_backend("agg")
    for seed, end in (1, 1000), (2, 1000), (3, 800):
        write(Path("runs", OURS.format(seed, 0)), [(step, seed) for step in range(100, end + 1, 100)])
    for seed in 1, 2:
        episodes = [(step, value) for step in range(4, 1001, 4) for value in (0, 10 * seed)]
        write(Path("runs", f"CartPole-v1__ppo__{seed}__1760000000"), episodes)
    return tmp_path / "runs"


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["plot.py", *map(str, arguments)])
    plot.main()


def test_the_figure_has_a_line_of_our_runs_and_one_of_cleanrls(runs, monkeypatch):
    figures = []
    monkeypatch.setattr(plot.plt, "savefig", lambda path: figures.append(plot.plt.gcf()))
    run(monkeypatch, "runs/*")
    (axes,) = figures[0].axes
    ours, cleanrl = axes.lines
    labels = [text.get_text() for text in figures[0].legends[0].get_texts()]
    assert labels == ["ppo, seeds: 3", "ppo (CleanRL), seeds: 2"]
    assert ours.get_xdata()[[0, -1]].tolist() == [100, 800]  # what all seeds have
    np.testing.assert_allclose(ours.get_ydata(), 2)
    np.testing.assert_allclose(cleanrl.get_ydata(), 7.5)
    assert axes.collections[0].get_datalim(axes.transData).intervaly.tolist() == [1, 3]


def test_evaluations_are_dots_beside_the_curve_of_training(runs, monkeypatch):
    """They are not smoothed. With --tag, the curve is what was asked for, alone."""
    greedy = [(500, 3.0), (1000, 5.0)]
    write(runs / OURS.format(1, 0), greedy, tag="eval/greedy_return")
    figures = []
    monkeypatch.setattr(plot.plt, "savefig", lambda path: figures.append(plot.plt.gcf()))
    run(monkeypatch, "runs/*")
    (dots,) = [
        line for line in figures[0].axes[0].lines if line.get_marker() == "." and len(line.get_xdata())
    ]
    assert [*zip(dots.get_xdata(), dots.get_ydata(), strict=True)] == greedy
    run(monkeypatch, "runs/*", "--tag", "charts/episodic_return")
    assert not any(line.get_marker() == "." for line in figures[1].axes[0].lines)


def test_runs_with_other_settings_than_the_seed_are_other_lines(tmp_path, monkeypatch, capsys):
    """Each learning rate is a line. The frequency of evaluations does not matter."""
    monkeypatch.chdir(tmp_path)
    for number, (seed, rate) in enumerate([(1, 0.1), (2, 0.1), (1, 0.2)]):
        folder = Path("runs", f"built-in__grpo__{seed}__20260102-030405-{number:06}")
        write(folder, [(100, rate), (200, rate)], tag="reward")
        with SummaryWriter(str(folder)) as writer:
            rows = f"|seed|{seed}|\n|learning_rate|{rate}|\n|eval_every|{number}|\n|gamma|0.9|"
            writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")
    run(monkeypatch, "runs", "--compare")
    out, err = capsys.readouterr()
    _header, first, second, _ = out.splitlines()
    assert " ".join(first.split()) == "built-in grpo, learning_rate 0.1 200 2 0.1 0.1 to 0.1"
    assert " ".join(second.split()) == "built-in grpo, learning_rate 0.2 200 1 0.2 -"
    assert err == ""


def seeds_of_experiments(paths=("runs",)):
    return plot.load_runs(paths, None).groupby(["env_id", "experiment"]).size().to_dict()


def test_runs_of_edited_scripts_are_other_lines(tmp_path, monkeypatch, capsys):
    """Lines are named by a hash of the script, in all panels. CleanRL's runs have no copy of the script."""
    monkeypatch.chdir(tmp_path)
    names = [OURS.format(1 + number % 2, number) for number in range(5)]
    names += ["CartPole-v1__ppo__1__1760000000", names[0].replace("CartPole", "Acrobot")]
    for name, text in zip(names, ["a", "b", "b", "", "", "", "a"], strict=True):
        write(Path("runs", name), [(100, 1.0)])
        if text:
            Path("runs", name, "ppo.py").write_text(text)
    assert seeds_of_experiments() == {
        ("Acrobot-v1", "ppo, script 86f7e4"): 1,
        ("CartPole-v1", "ppo (CleanRL)"): 1,
        ("CartPole-v1", "ppo, script 86f7e4"): 1,
        ("CartPole-v1", "ppo, script e9d71f"): 2,
        ("CartPole-v1", "ppo, script unknown"): 2,
    }
    assert capsys.readouterr().err == ""
    assert seeds_of_experiments(("runs/A*", f"runs/{names[0]}")) == {
        ("Acrobot-v1", "ppo"): 1,
        ("CartPole-v1", "ppo"): 1,
    }


def test_the_table_has_the_last_values_and_names_a_shorter_seed(runs, monkeypatch, capsys):
    run(monkeypatch, "runs", "--compare")
    out, err = capsys.readouterr()
    _header, ours, cleanrl, _ = out.splitlines()
    assert OURS.format(3, 0) in err
    assert ours.split() == ["CartPole-v1", "ppo", "800", "3", "2", "1", "to", "3"]
    assert cleanrl.split() == ["CartPole-v1", "ppo", "(CleanRL)", "1,000", "2", "7.5", "5", "to", "10"]


def test_runs_that_are_skipped_are_named(runs, monkeypatch, capsys):
    write(runs / OURS.format(4, 0), [(1, 1.0)], tag="losses/kl")
    write(runs / "no_run", [(1, 1.0)])
    write(runs / OURS.format(1, 1), [(1, 1.0), (2, np.nan), (3, 1.0)])  # later than seed 1 of the fixture
    (runs / "empty").mkdir()
    run(monkeypatch, "runs/*", "missing")
    lines = capsys.readouterr().err.splitlines()
    skipped = [line for line in lines if not line.startswith("note: ")]
    assert [Path(line.split(": ")[0].removeprefix("skipped ")).name for line in skipped] == [
        "missing", OURS.format(4, 0), "empty", "no_run", OURS.format(1, 0),
    ]  # fmt: skip


@pytest.mark.parametrize("words", [["runs", "--output", "curves.xyz"], ["runs", "--smooth", "1.5"], ["none"]])
def test_mistakes_end_in_one_line(words, runs, monkeypatch, capsys):
    """The mistakes are a format that does not exist, a flag out of its range, and a folder without runs."""
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *words)
    assert capsys.readouterr().err.splitlines()[-1].startswith("plot.py: ")


def test_the_curve_of_a_resumed_run_has_no_step_twice_and_no_pause(tmp_path):
    start = time.time() - 10_000
    write(tmp_path, [(step, 1.0) for step in range(1, 7)], start=start)
    (first,) = tmp_path.iterdir()
    first.rename(tmp_path / f"events.out.tfevents.{int(start)}.host")
    write(tmp_path, [(step, 2.0) for step in range(5, 9)], purge_step=5)  # from a checkpoint at step 4
    curve = plot.read_curve(plot.read_events(tmp_path), TAG)
    assert curve.steps.tolist() == list(range(1, 9))
    assert curve.value.tolist() == [1.0] * 4 + [2.0] * 4
    assert curve.seconds.is_monotonic_increasing
    assert curve.seconds.max() < 100


def test_equal_numbers_in_settings_are_one_experiment(tmp_path, monkeypatch):
    """5000 comes from the command line, 5000.0 from Python. The last run's script has no such setting."""
    monkeypatch.chdir(tmp_path)
    for seed, row in enumerate(["|steps|5000|", "|steps|5000.0|", "|steps|5e3|", "|steps|None|", ""]):
        folder = Path("runs", OURS.format(seed, 0))
        write(folder, [(100, 1.0)])
        with SummaryWriter(str(folder)) as writer:
            writer.add_text("settings", f"|setting|value|\n|-|-|\n|norm|True|\n{row}")
    assert seeds_of_experiments() == {
        ("CartPole-v1", "ppo, steps 5000"): 3,
        ("CartPole-v1", "ppo, steps None"): 1,
        ("CartPole-v1", "ppo, steps unknown"): 1,
    }


def test_the_table_cuts_all_seeds_at_the_same_step(tmp_path, monkeypatch, capsys):
    """The last 10% are those of the shortest seed. Later values of longer ones do not count."""
    monkeypatch.chdir(tmp_path)
    for seed, end in ((1, 1000), (2, 920)):
        points = [(step, float(step)) for step in range(20, end + 1, 20)]
        write(Path("runs", OURS.format(seed, 0)), points)
    run(monkeypatch, "runs", "--compare")
    line = capsys.readouterr().out.splitlines()[1].split()
    assert line[2:5] == ["920", "2", "880"]  # the mean of 840, 860, ..., 920, in both


def test_the_interquartile_mean_of_8_seeds_leaves_out_two_at_each_end(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for seed, value in enumerate([0, 1, 10, 11, 12, 13, 1000, 2000]):
        write(Path("runs", OURS.format(seed, 0)), [(100, value), (200, value)])
    run(monkeypatch, "runs", "--compare")
    assert capsys.readouterr().out.splitlines()[1].split()[4] == "11.5"


def test_a_smoothed_value_is_the_mean_of_the_window_that_ends_there():
    curve = plot.pd.DataFrame({"steps": np.arange(10.0), "value": [0.0] * 5 + [8.0] * 5})
    smoothed = plot.smooth(curve, "steps", 3, np.arange(10.0))
    assert smoothed.tolist() == [0, 0, 0, 0, 0, 2, 4, 6, 8, 8]
