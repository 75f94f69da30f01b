"""What a run leaves behind: TensorBoard's curves and hyperparameters, the folder's name, W&B."""

import json
import re
import sys
from itertools import pairwise

import cli_helpers as cli
import numpy as np
import pytest
import user_envs
from cli_helpers import PPO, SMALL, call, checkpoint_in, each_script, load, run, steps_done
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

STATISTICS = {"": np.mean, "_std": np.std, "_min": np.min, "_max": np.max}


@each_script
def test_episodes(script, tmp_path):
    """Returns and lengths of the episodes that ended in the iteration, as the environment saw it."""
    run(script, tmp_path, "--no-norm-obs", total_timesteps=1500)  # or ppo_continuous.py logs no first rollout
    data = cli.curves(checkpoint_in(tmp_path).parent)
    steps, episodes, recent = sorted(data["losses/kl"]), user_envs.LOG["episodes"], []
    for before, step in pairwise([0, *steps]):
        ended = [(value, length) for at, value, length in episodes if before < at <= step]
        recent += [value for value, _ in ended]
        for name, values in zip(("return", "length"), zip(*ended, strict=True), strict=True):
            for suffix, statistic in STATISTICS.items():
                logged = data[f"charts/episodic_{name}{suffix}"][step]
                assert logged == pytest.approx(statistic(values), rel=1e-5), (name, suffix, step)
        assert data["charts/episodic_return_100"][step] == pytest.approx(np.mean(recent[-100:]), rel=1e-5)
    assert len(recent) > 100
    evaluated = [value for at, value, _ in episodes if at > steps[-1]]
    assert data["eval/greedy_return"] == {steps[-1]: pytest.approx(np.mean(evaluated), rel=1e-5)}
    assert steps[-1] == steps_done(checkpoint_in(tmp_path))


@each_script
def test_curves(script, tmp_path):
    """All tags are there, at each iteration; schedules are what the settings say, and the speed is right."""
    flags = ["--no-norm-obs", "--adapt", "none", "--anneal-ent-coef", "--env-kwargs", "sleep=0.001"]
    run(script, tmp_path, *flags, total_timesteps=600, learning_rate=0.002, ent_coef=0.03)
    log = cli.events(checkpoint_in(tmp_path).parent)
    data = {tag: [(e.step, e.value, e.wall_time) for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
    losses = "value_loss policy_loss entropy old_approx_kl approx_kl clipfrac explained_variance grad_norm kl"
    tags = {f"losses/{name}" for name in [*losses.split(), "policy_mismatch"]}
    tags |= {f"charts/{name}" for name in ("learning_rate", "clip_coef", "ent_coef", "kl_coef")}
    steps = [step for step, _, _ in data["losses/kl"]]
    for tag in tags:
        assert [step for step, _, _ in data[tag]] == steps, tag
    remaining = [1 - step / 600 for step in [0, *steps[:-1]]]
    for tag, start in (("learning_rate", 0.002), ("ent_coef", 0.03)):
        expected = [start * share for share in remaining]
        assert [value for _, value, _ in data[f"charts/{tag}"]] == pytest.approx(expected, rel=1e-4)
    began = data["losses/kl"][0]
    for step, speed, now in data["charts/SPS"][-3:]:
        assert speed == pytest.approx((step - began[0]) / (now - began[2]), rel=0.3)
    if script is PPO:
        assert 1.0 < data["losses/entropy"][0][1] <= 1.0987  # near log 3
    assert all(value < 1e-4 for _, value, _ in data["losses/policy_mismatch"])


@each_script
def test_hyperparameters(script, tmp_path):
    """TensorBoard's page of hyperparameters has the settings of the algorithm, and the results to compare."""
    run(script, tmp_path, total_timesteps=200, ent_coef=0.03)
    contents = cli.events(checkpoint_in(tmp_path).parent).PluginTagToContent("hparams")
    start = HParamsPluginData.FromString(contents["_hparams_/session_start_info"]).session_start_info
    assert {"env_id", "seed", "num_envs", "ent_coef"} <= set(start.hparams) <= set(script.module.SAVED)
    assert "vf_coef" not in start.hparams, "it has its default"
    assert start.hparams["ent_coef"].number_value == 0.03
    experiment = HParamsPluginData.FromString(contents["_hparams_/experiment"]).experiment
    tags = {metric.name.tag for metric in experiment.metric_infos}
    assert tags == {"charts/episodic_return_100", "eval/greedy_return"}


def test_folder_names(tmp_path):
    """<env>__<exp>__<seed>__<time>, one folder whatever stands in a name; and no two runs share one."""
    for _ in range(2):
        run(PPO, tmp_path, "--exp-name", "../a b:c", total_timesteps=50, seed=7)
    names = sorted(path.parent.name for path in tmp_path.glob("runs/*/checkpoint.pt"))
    assert len(names) == 2
    for name in names:
        assert re.fullmatch(r"user_envs_Walk-v0__[\w.-]*a_b_c__7__[\d-]+", name)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


WANDB = """
import json, types
def finish(exit_code=0):
    open("finished.txt", "a").write(f"{exit_code} ")
def init(**settings):
    json.dump(settings, open("called.json", "w"))
    return types.SimpleNamespace(finish=finish)
"""


@pytest.fixture
def wandb(tmp_path, monkeypatch):
    """A module `wandb` that writes down how it is called. Returns what it wrote."""
    (tmp_path / "wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    yield lambda: json.loads((tmp_path / "called.json").read_text())
    sys.modules.pop("wandb", None)


@each_script
def test_tracking(script, wandb, tmp_path):
    """--track mirrors TensorBoard to W&B, in one run there that a resumed one continues."""
    flags = ["--track", "--wandb-project-name", "p", "--wandb-entity", "e"]
    run(script, tmp_path, *flags, total_timesteps=200, ent_coef=0.03)
    first, path = wandb(), checkpoint_in(tmp_path)
    assert (first["project"], first["entity"], first["sync_tensorboard"]) == ("p", "e", True)
    assert first["config"]["ent_coef"] == 0.03
    assert first["name"] == path.parent.name
    assert "track" not in load(path)["args"]
    (tmp_path / "called.json").unlink()
    run(script, path.parent, *flags, "--resume", path.name, total_timesteps=400)  # from within its folder
    (path.parent / "called.json").rename(tmp_path / "called.json")
    assert (wandb()["id"], wandb()["resume"]) == (first["id"], "allow")
    kwargs = ["--env-kwargs", "fault='raise', at=300"]
    assert call(script, tmp_path, "--env-id", script.env(), *SMALL, *flags, *kwargs).status == 1
    finished = [(folder / "finished.txt").read_text() for folder in (path.parent, tmp_path)]
    assert finished == ["0 ", "0 1 "], "the next run of this process has its own"


def test_tracking_that_is_refused(wandb, tmp_path):
    """What W&B says, or that it is missing, in one line, and no folder."""
    (tmp_path / "wandb.py").write_text("def init(**settings):\n    raise Exception('no API key')\n")
    cli.assert_refused(call(PPO, tmp_path, "--track"), tmp_path, "no API key")
    (tmp_path / "wandb.py").write_text("raise ImportError('No module named wandb')\n")
    sys.modules.pop("wandb", None)
    cli.assert_refused(call(PPO, tmp_path, "--track"), tmp_path, "wandb")
