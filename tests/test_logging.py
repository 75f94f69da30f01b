"""The logs of a run: TensorBoard's curves, the name of its folder, Weights & Biases."""

import json
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import user_envs
from helpers import DISCRETE, checkpoint_in, curves, load, memory_too, run


@memory_too
def test_each_iteration_logs_the_returns_and_lengths_of_the_episodes_that_ended_in_it(case, tmp_path):
    """They are those that the environment itself has counted."""
    run(case, tmp_path, num_envs=1, num_minibatches=1, num_steps=128, total_timesteps=1000)
    path = checkpoint_in(tmp_path)
    data, end = curves(path.parent), 0
    episodes, recent = user_envs.LOG["episodes"], []
    ends = np.cumsum([length for _, length in episodes])
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


def test_a_run_logs_added_metrics_and_saves_each_minute_without_losing_the_last_checkpoint(
    tmp_path, monkeypatch
):
    """A metric that a changed loss adds becomes a curve; a name with a slash is its whole tag.

    The speed is the mean since the start. A checkpoint is saved after the first iteration, then each minute.
    If saving fails, the last one is still there.
    """
    monkeypatch.chdir(tmp_path)
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    args = DISCRETE.make_args(env_id=DISCRETE.walk)
    agent, state = DISCRETE.make_agent(args), DISCRETE.make_state(args)
    state.global_step = 1000
    path = tmp_path / "runs" / "run" / "checkpoint.pt"
    written = DISCRETE.script.Run(path, args, agent, DISCRETE.make_optimizer(agent), state)
    names = "kl", "grad_norm", "clipfrac", "explained_variance", "critic_error", "entropy", "first_approx_kl"
    for clock[0], state.global_step, saved in ((30, 1100, 1100), (50, 1300, 1100), (100, 1500, 1500)):
        metrics = dict.fromkeys(names, 1.0) | {"mine": np.float32(clock[0]), "charts/mine": 2 * clock[0]}
        written.log(metrics, [(5.0, 10)])
        path = checkpoint_in(tmp_path)
        assert load(path)["state"]["global_step"] == saved
    data = curves(path.parent, left_out=())
    assert data["losses/mine"] == {1100: 30, 1300: 50, 1500: 100}
    assert data["charts/mine"] == {1100: 60, 1300: 100, 1500: 200}
    assert data["charts/SPS"] == {1100: pytest.approx(100 / 30), 1300: 300 / 50, 1500: 500 / 100}

    def full_disk(content, path):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="disk full"):
        written.save()
    assert load(path)["state"]["global_step"] == 1500


def test_each_run_has_one_folder_named_by_environment_experiment_seed_and_time(tmp_path):
    """Slashes and colons in a name make no other folders. No two runs share a folder."""
    for _ in range(2):
        run(DISCRETE, tmp_path, "--exp-name", "../a b:c", total_timesteps=130, seed=7)
    names = sorted(path.parent.name for path in tmp_path.glob("runs/*/checkpoint.pt"))
    assert len(names) == 2
    for name in names:
        assert re.fullmatch(r"user_envs_Walk-v0__[\w.-]*a_b_c__7__[\d-]+", name)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


def test_track_mirrors_tensorboard_to_wandb_under_the_name_of_the_runs_folder(tmp_path, monkeypatch):
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
