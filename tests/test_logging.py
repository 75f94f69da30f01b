"""What a run leaves behind: TensorBoard's curves, the folder's name, Weights & Biases, and advice."""

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import user_envs
from helpers import CONTINUOUS, DISCRETE, call, checkpoint_in, curves, load, memory_too, run


@memory_too
def test_episodes(case, tmp_path):
    """Returns and lengths of the episodes that ended in an iteration, as the environment saw it."""
    run(case, tmp_path, num_envs=1, num_minibatches=1, num_steps=128, total_timesteps=1000)
    path = checkpoint_in(tmp_path)
    data, end = curves(path.parent), 0
    episodes, recent = user_envs.LOG["episodes"], []
    ends = np.cumsum([length for _, length in episodes])
    if case is CONTINUOUS:  # its first rollout sets the normalisers; after each episode comes a filler row
        end = np.count_nonzero(ends + np.arange(len(ends)) <= 128)
    for step in data["losses/kl"]:
        first, end = end, np.searchsorted(ends, step, side="right")
        returns, lengths = zip(*episodes[first:end], strict=True)
        recent += returns
        assert data["charts/episodic_return"][step] == pytest.approx(np.mean(returns), rel=1e-5)
        assert data["charts/episodic_length"][step] == pytest.approx(np.mean(lengths), rel=1e-5)
        assert data["charts/episodic_return_100"][step] == pytest.approx(np.mean(recent[-100:]), rel=1e-5)
    assert len(recent) > 100
    assert step == load(path)["state"]["global_step"]
    evaluated = [value for value, _ in episodes[-3:]]
    assert data["eval/greedy_return"] == {step: pytest.approx(np.mean(evaluated), rel=1e-5)}


def test_a_run(tmp_path, monkeypatch):
    """What a changed loss adds to the metrics is a curve; a name with a slash is its whole tag.

    It may be a number of NumPy: a checkpoint can be loaded all the same. The speed is that since the start.
    Each minute a checkpoint is saved; where that fails, the last one is still there.
    """
    monkeypatch.chdir(tmp_path)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    args = DISCRETE.make_args(env_id=DISCRETE.walk)
    agent, state = DISCRETE.make_agent(args), DISCRETE.make_state(args)
    state.global_step = 1000
    written = DISCRETE.script.Run(args, agent, DISCRETE.make_optimizer(agent), state)
    path = checkpoint_in(tmp_path)
    names = "kl", "grad_norm", "clipfrac", "explained_variance", "critic_error", "entropy", "first_approx_kl"
    for clock[0], state.global_step, saved in ((30, 1100, 1000), (50, 1300, 1000), (80, 1500, 1500)):
        metrics = dict.fromkeys(names, 1.0) | {"mine": np.float32(clock[0]), "charts/mine": 2 * clock[0]}
        written.log(metrics, [(5.0, 10)])
        assert load(path)["state"]["global_step"] == saved
    data = curves(path.parent, left_out=())
    assert data["losses/mine"] == {1100: 30, 1300: 50, 1500: 80}
    assert data["charts/mine"] == {1100: 60, 1300: 100, 1500: 160}
    assert data["charts/SPS"] == {1100: pytest.approx(100 / 30), 1300: 300 / 50, 1500: 500 / 80}

    def full_disk(content, path):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="disk full"):
        written.finish()
    assert load(path)["state"]["global_step"] == 1500


def test_folder_names(tmp_path):
    """<env>__<exp>__<seed>__<time>, one folder whatever stands in a name; and no two runs share one."""
    for _ in range(2):
        run(DISCRETE, tmp_path, "--exp-name", "../a b:c", total_timesteps=130, seed=7)
    names = sorted(path.parent.name for path in tmp_path.glob("runs/*/checkpoint.pt"))
    assert len(names) == 2
    for name in names:
        assert re.fullmatch(r"user_envs_Walk-v0__[\w.-]*a_b_c__7__[\d-]+", name)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_tracking(tmp_path, monkeypatch):
    """--track mirrors TensorBoard to W&B, under the name of the run's folder."""
    lines = ["import glob, json", "def init(**settings):"]
    lines.append("    json.dump(settings | {'before': glob.glob('runs/*/*')}, open('called.json', 'w'))")
    (tmp_path / "wandb.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    run(DISCRETE, tmp_path, "--track", total_timesteps=130, ent_coef=0.03)
    called = json.loads((tmp_path / "called.json").read_text())
    assert called["sync_tensorboard"] is True
    assert called["before"] == []  # W&B mirrors only what is written after it has begun
    assert called["config"]["ent_coef"] == 0.03
    assert called["name"] == checkpoint_in(tmp_path).parent.name
    sys.modules.pop("wandb")


# Advice

HEALTHY = {
    "entropy": 0.6, "kl": 0.006, "first_approx_kl": 1e-7, "explained_variance": 0.5, "critic_error": 0.3,
    "std": 0.6, "progress": 0.3, "gain": 2.0,
}  # fmt: skip
ROWS = [  # how the text begins, iterations, metrics that give it, and some that keep it silent
    ("KL > 0.01 before", 1, {"first_approx_kl": 0.02}, {"first_approx_kl": 0.005}),
    ("KL > 1", 1, {"kl": 1.1}, {"kl": 0.9}),
    ("KL > 0.05", 5, {"kl": 0.07}, {"kl": 0.04}),
    ("KL < 1e-6", 20, {"kl": 9e-7, "gain": np.nan}, {"gain": 1.1}),
    ("explained variance", 20, {"explained_variance": 0.04}, {"critic_error": 0.02}),
    ("all episodes", 20, {"gain": 0.0}, {"gain": np.nan}),
    ("the return is lower", 10, {"gain": -0.6}, {"gain": -0.4}),
    ("the return is lower", 10, {"gain": 0.4, "progress": 0.6}, {"progress": 0.4}),
    ("mean standard deviation", 10, {"std": 3.1}, {"std": 2.9}),
]


@pytest.mark.parametrize(("start", "iterations", "bad", "silent"), ROWS)
def test_advice(start, iterations, bad, silent):
    """It is given when its condition has held so many times in a row, once; and else it is silent."""
    script = CONTINUOUS.script  # it has all of ppo.py's, and one more
    (text,) = [text for _, _, text in script.ADVICE if text.startswith(start)]
    bad, streaks = HEALTHY | bad, [0] * len(script.ADVICE)
    rows = [HEALTHY] * 100 + [bad] * (iterations - 1) + [bad | silent] * 100 + [bad] * 50 + [HEALTHY]
    given = [i for i, metrics in enumerate(rows) if text in script.advise(metrics, streaks)]
    assert given == [200 + 2 * (iterations - 1)]


def test_advice_of_a_run(tmp_path, monkeypatch, capsys):
    """It counts iterations over the whole run, and compares the last returns with the first."""
    monkeypatch.chdir(tmp_path)
    args = DISCRETE.make_args(env_id=DISCRETE.walk, total_timesteps=3000)
    agent, state = DISCRETE.make_agent(args), DISCRETE.make_state(args)
    written = DISCRETE.script.Run(args, agent, DISCRETE.make_optimizer(agent), state)
    random = np.random.default_rng(0)

    def log(iterations, kl=0.01, mean=20.0):
        capsys.readouterr()
        for _ in range(iterations):
            state.global_step += 10
            metrics = HEALTHY | {"kl": kl, "grad_norm": 1.0}
            written.log(metrics, [(value, 10) for value in random.normal(mean, 2.0, 10)])
        return capsys.readouterr().out

    assert log(9, kl=0.07).count("KL > 0.05") == 1
    assert "the return" not in log(40, mean=30.0)  # it has risen
    assert log(40, mean=15.0).count("the return is lower") == 1
    assert log(20, mean=25.0).count("the return is lower") == 0
    assert state.global_step < 1500
    assert log(100, mean=20.0).count("the return is lower or hardly higher") == 1  # in the second half


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "must", "false"),
    [
        ("", "", "KL|explained|all episodes|the return"),
        ("--learning-rate 1", "KL > 1", ""),
        ("--learning-rate 0.05", "KL > 0.05", "KL < 1e-6"),
        ("--learning-rate 1e-7 --total-timesteps 60000", "KL < 1e-6", "KL > 1"),
        ("--vf-coef 0", "explained variance", "KL < 1e-6"),
        ("--ent-coef 10", "the return is lower or hardly higher", "KL"),
        ("--gamma 0", "the return is lower", "KL"),
    ],
)
def test_a_broken_run_is_told_the_truth(words, must, false, tmp_path):
    """On CartPole: what must be said is said, and nothing that is false."""
    shown = call(DISCRETE, tmp_path, "--total-timesteps", 40_000, "--eval-episodes", 1, *words.split())
    assert shown.status == 0
    said = [text for _, _, text in DISCRETE.script.ADVICE if text in shown.out]
    assert [text for text in said if must in text] or not must
    assert not [text for text in said if false and text.startswith(tuple(false.split("|")))]
