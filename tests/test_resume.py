"""Checkpoints: what they hold, when they are written, and that a run that was stopped or killed resumes."""

import os
import random
import resource
import shutil
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

import cli_helpers as cli
import numpy as np
import pytest
import torch
import user_envs
from cli_helpers import (
    CONTINUOUS,
    PPO,
    SIGNALS,
    SIZE,
    SMALL,
    call,
    checkpoint_in,
    each_script,
    load,
    run,
    steps_done,
)


def trained(script, folder, *args, **settings):
    """The checkpoint of a run of some iterations."""
    run(script, folder, *args, **{"total_timesteps": 600, **settings})
    return checkpoint_in(folder)


def resume(script, path, *args, **settings):
    """Resume a run. Returns what it printed."""
    time.sleep(1.1)  # TensorBoard orders the files of one process by their second
    return run(script, path.parents[2], "--resume", path, *args, **settings)


def copied(path, folder):
    """The checkpoint in a copy of the run below another folder."""
    return shutil.copytree(path.parent, folder / "runs" / path.parent.name) / path.name


def stopped(script, folder, at, *args, number=signal.SIGTERM, fault="signal", **settings):
    """Run until step `at`, in which the process gets a signal. Returns the result, and the checkpoint."""
    kwargs = f"fault='{fault}', at={at}, number={int(number)}"
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    result = call(script, folder, "--env-id", script.env(), "--env-kwargs", kwargs, *SMALL, *args, *flags)
    return result, checkpoint_in(folder)


# What a checkpoint holds


@each_script
def test_a_checkpoint_is_complete(script, tmp_path):
    """It loads without executing code: settings, weights, normalisers, optimizer and random state."""
    path = trained(script, tmp_path, vf_coef=0.37)
    content = load(path)
    assert content["format"] == script.module.FORMAT
    assert content["args"]["vf_coef"] == 0.37
    step = content["state"]["global_step"]
    assert content["agent"]["obs_moments.count"] == content["agent"]["return_moments.count"] == step
    assert {"actor.0.weight", "critic.0.weight"} <= content["agent"].keys()
    shapes = sorted(slot["exp_avg"].shape for slot in content["optimizer"]["state"].values())
    normaliser = "obs_moments", "return_moments", "normalised"
    weights = [value for name, value in content["agent"].items() if not name.startswith(normaliser)]
    assert shapes == sorted(value.shape for value in weights)
    assert content["random"].dtype == torch.uint8
    assert sorted(file.name[:6] for file in path.parent.iterdir()) == ["checkp", "events"]


def test_machine_and_tracking_are_not_saved(tmp_path):
    """Device, threads, processes and W&B come from the command line, never from a file."""
    ours = {"device", "num_threads", "compile", "async_envs", "track", "wandb_project_name", "wandb_entity"}
    ours |= {"capture_video", "allow_unsafe", "resume", "evaluate", "plan"}
    path = trained(PPO, tmp_path, total_timesteps=50)
    content = load(path)
    assert not ours & content["args"].keys()
    content["args"] |= {"device": "cuda", "num_threads": 77, "async_envs": True, "track": True}
    torch.save(content, path)
    resume(PPO, path, total_timesteps=300)
    assert torch.get_num_threads() == 1
    assert "wandb" not in sys.modules


# How training continues


@each_script
def test_two_resumes_are_identical(script, tmp_path):
    """What follows a checkpoint is the same, bit for bit, also where an earlier attempt went further."""
    first = trained(script, tmp_path / "a")
    early, second = load(first), copied(first, tmp_path / "b")
    resume(script, first, total_timesteps=1200)
    torch.rand(7)  # nothing may depend on what this process did before
    resume(script, second, total_timesteps=1200)
    results = load(first), cli.curves(first.parent)
    assert cli.same(results[0], load(second))
    assert results[1] == cli.curves(second.parent)
    assert not cli.same(results[0]["agent"], early["agent"])
    torch.save(early, first)  # as if the process had been killed before it wrote another checkpoint
    resume(script, first, total_timesteps=1200)
    assert cli.same(results[0], load(first))
    assert results[1] == cli.curves(first.parent)
    steps = [0, *results[1]["losses/kl"]]
    skipped = 1 + (script is CONTINUOUS)  # its first rollout only sets the normalisers
    assert steps[1] <= skipped * SIZE
    assert all(b - a <= SIZE for a, b in pairwise(steps[1:])), "the curves have a gap"
    assert steps[-1] == steps_done(first)


@pytest.mark.slow
@each_script
def test_every_part_of_a_checkpoint_counts(script, tmp_path):
    """Where random state, optimizer or a normaliser differs, so does what follows."""
    path, after = trained(script, tmp_path), []
    content = load(path)
    parts = {
        "none": content,
        "random": content | {"random": torch.Generator().manual_seed(7).get_state()},
        "obs": content | {"agent": content["agent"] | {"obs_moments.mean": torch.ones(3)}},
        "returns": content | {"agent": content["agent"] | {"return_moments.var": 9 * torch.ones(1)}},
    }
    for name, changed in parts.items():
        copy = copied(path, tmp_path / name)
        torch.save(changed, copy)
        resume(script, copy, total_timesteps=700)
        after.append(load(copy)["agent"]["actor.0.weight"])
    copy = copied(path, tmp_path / "optimizer")
    for slot in content["optimizer"]["state"].values():
        slot["exp_avg"].zero_()
    torch.save(content, copy)
    resume(script, copy, total_timesteps=700)
    after.append(load(copy)["agent"]["actor.0.weight"])
    assert not any(torch.equal(after[0], other) for other in after[1:])


@each_script
def test_resumed_environments_do_not_replay_episodes(script, tmp_path):
    """The episodes of a resumed run, and those of an evaluation, are new ones."""
    path, starts = trained(script, tmp_path), []
    for steps in (1200, 1800, 2400):
        starts.append(set(user_envs.LOG["starts"]))
        assert len(starts[-1]) == len(user_envs.LOG["starts"])
        resume(script, path, total_timesteps=steps)
    for i in range(3):
        assert len(starts[i]) > 20
        for j in range(i):
            assert len(starts[i] & starts[j]) <= 3, "only those of the evaluation may be the same"


@each_script
def test_global_generators_do_not_replay_episodes(script, tmp_path, monkeypatch):
    """Nor where environments draw from Python's and NumPy's."""

    def draw(walk):
        return np.full(3, (random.random() + np.random.random()) / 2, np.float32)  # noqa: NPY002

    monkeypatch.setattr(user_envs.Walk, "observe", draw)
    path, starts = trained(script, tmp_path), []
    for steps in (1200, 1800):
        starts.append(set(user_envs.LOG["starts"]))
        assert len(starts[-1]) == len(user_envs.LOG["starts"]), "the evaluation repeats episodes of training"
        resume(script, path, total_timesteps=steps)
    assert len(starts[0]) > 20
    assert len(starts[0] & starts[1]) <= 3, "only those of the evaluation may be the same"


ADAPTED = {  # what is adapted: flags, and the factor of a step
    "kl_coef": ("--surrogate kl-penalty --adapt kl-coef --desired-kl 1000", 2),
    "clip_coef": ("--adapt clip-coef --desired-kl 1e-9", 2),
    "learning_rate": ("--adapt learning-rate --no-anneal-lr --desired-kl 1e-9", 1.5),
    "ent_coef": ("--target-entropy 0.01 --ent-coef 0.1", 1.1),
}


@each_script
@pytest.mark.parametrize("name", ADAPTED)
def test_adapted_coefficients_continue(script, name, tmp_path):
    """A resumed run adapts the coefficient from where it was, at once; a flag that is given replaces it."""
    flags, factor = ADAPTED[name]
    steps = (3 + (script is CONTINUOUS)) * SIZE  # its first rollout only sets the normalisers
    path = trained(script, tmp_path, *flags.split(), learning_rate=1e-3, total_timesteps=steps)
    before = cli.curves(path.parent)[f"charts/{name}"]
    default, last = load(path)["args"][name], list(before.values())[-1]
    assert max(last / default, default / last) > 1.05 * factor**2, (
        "it was not adapted: the test shows nothing"
    )
    copy = copied(path, tmp_path / "copy")
    resume(script, path, total_timesteps=700)
    after = [value for step, value in cli.curves(path.parent)[f"charts/{name}"].items() if step not in before]
    assert max(after[0] / last, last / after[0]) == pytest.approx(factor), "an adaptation was skipped"
    resume(script, copy, total_timesteps=700, **{name: 0.123})
    after = [value for step, value in cli.curves(copy.parent)[f"charts/{name}"].items() if step not in before]
    assert max(after[0] / 0.123, 0.123 / after[0]) == pytest.approx(factor)


@each_script
@pytest.mark.parametrize("name", ["clip_coef", "kl_coef"])
def test_a_coefficient_that_is_no_longer_adapted(script, name, tmp_path):
    """With --adapt none, a resumed run has the setting again."""
    flags, _ = ADAPTED[name]
    steps = (3 + (script is CONTINUOUS)) * SIZE
    path = trained(script, tmp_path, *flags.split(), learning_rate=1e-3, total_timesteps=steps)
    default = load(path)["args"][name]
    assert load(path)["state"][name] != default
    resume(script, path, "--adapt", "none", total_timesteps=700)
    assert load(path)["state"][name] == default


@each_script
def test_flags_override_saved_ones(script, tmp_path):
    """With --resume, a flag that is given counts, and the others are as they were."""
    path = trained(script, tmp_path, vf_coef=0.37, gamma=0.9)
    before = path.read_bytes()
    flags = ["--learning-rate", 0.0123, "--no-anneal-lr", "--adapt", "none"]
    planned = call(script, tmp_path, "--resume", path, "--env-id", script.env(), *flags, "--plan")
    assert "learning rate 0.0123, adapt none" in planned.out
    assert path.read_bytes() == before, "--plan wrote"
    step = steps_done(path)
    resume(script, path, *flags, total_timesteps=800)
    saved = load(path)["args"]
    assert (saved["learning_rate"], saved["anneal_lr"], saved["vf_coef"]) == (0.0123, False, 0.37)
    rates = [value for at, value in cli.curves(path.parent)["charts/learning_rate"].items() if at > step]
    assert rates == pytest.approx([0.0123] * 2)
    assert checkpoint_in(tmp_path) == path


@each_script
def test_advice_survives_a_resume(script, tmp_path):
    """An advice that needs 20 iterations is given when 12 were before and 8 after a resume; and only once."""
    settings = {"learning_rate": 1e-9, "total_timesteps": 10**5}
    result, path = stopped(script, tmp_path, 12 * SIZE, "--no-anneal-lr", "--adapt", "none", **settings)
    assert (result.status, result.out.count("[idle]")) == (143, 0)
    args = "--resume", path, "--env-kwargs", f"fault='signal', at={12 * SIZE}", "--env-id", script.env()
    assert call(script, tmp_path, *args).out.count("[idle]") == 1
    assert call(script, tmp_path, *args).out.count("[idle]") == 0
    assert len(cli.events(path.parent).Tensors("advice/text_summary")) == 1


# When a checkpoint is written


@each_script
def test_checkpoint_seconds(script, tmp_path):
    """Checkpoints are written at the start, then so often, and at the end."""
    seconds, watch = 0.2, "fault='watch', sleep=0.0005"
    path = trained(script, tmp_path, checkpoint_seconds=seconds, env_kwargs=watch, total_timesteps=1500)
    times = [event.wall_time for event in cli.events(path.parent).Scalars("losses/kl")]
    saved = sorted(set(user_envs.LOG["saved"]))  # in the last one, the evaluation steps
    longest = max(b - a for a, b in pairwise([user_envs.LOG["steps"][0], *times]))
    assert saved[0] <= user_envs.LOG["steps"][0]
    assert saved[-1] >= times[-1]
    gaps = [b - a for a, b in pairwise(saved)]
    assert len(gaps) >= 3
    assert min(gaps[:-1]) > 0.9 * seconds
    assert max(gaps) < seconds + 2 * longest


def test_a_full_disk(tmp_path):
    """If a checkpoint cannot be written, the one before stays, and the exit status is 1."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    flags = ["--env-id", PPO.env(), *SMALL, "--hidden-size", 64, "--checkpoint-seconds", 1e-9]
    resource.setrlimit(resource.RLIMIT_FSIZE, (80_000, hard))  # the first, without Adam's moments, fits
    try:
        result = call(PPO, tmp_path, *flags, "--total-timesteps", 600)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert result.status == 1
    assert "--resume" in result.err
    path = checkpoint_in(tmp_path)
    assert steps_done(path) == 0
    resume(PPO, path, total_timesteps=300, hidden_size=64)
    assert steps_done(path) >= 300


@each_script
def test_no_checkpoint_is_not_finite(script, tmp_path):
    """A run that diverges keeps its last finite checkpoint, says how to resume, and ends with status 1."""
    settings = ["--no-norm-rewards", "--no-norm-adv", "--allow-unsafe", "--checkpoint-seconds", 1e-9]
    kwargs = "fault='huge reward', at=400"
    result = call(script, tmp_path, "--env-id", script.env(), *SMALL, *settings, "--env-kwargs", kwargs)
    assert result.status == 1
    assert "not finite" in result.err
    assert result.err.count("\n") == 3, "one line, where it failed, and how to resume"
    assert "--allow-unsafe" in cli.printed_command(result.err, "--resume"), "or it would be refused"
    path = checkpoint_in(tmp_path)
    assert 200 < steps_done(path) <= 400
    assert all(tensor.isfinite().all() for tensor in cli.tensors(load(path)))
    assert cli.printed_checkpoint(result.err, "--resume", tmp_path).samefile(path)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    """Whatever makes them so: here, a checkpoint that someone changed."""
    path = trained(PPO, tmp_path)
    content = load(path)
    content["agent"]["critic.4.bias"] += torch.inf
    torch.save(content, path)
    before = path.read_bytes()
    result = call(PPO, tmp_path, "--resume", path, "--env-id", PPO.env(), "--total-timesteps", 900)
    assert result.status == 1
    assert "not finite" in result.err
    assert path.read_bytes() == before


@pytest.mark.slow
def test_sigkill_at_any_time(tmp_path):
    """Killed three times while it writes a checkpoint, a run can be resumed, and its curves are whole."""
    flags = ["--env-id", PPO.env(), *SMALL, "--hidden-size", 256, "--total-timesteps", 1e6]
    for attempt in range(3):
        process = cli.start(tmp_path, cli.command(PPO, *flags, "--checkpoint-seconds", 1e-9))
        deadline = time.monotonic() + 120
        while not (paths := [*tmp_path.glob("runs/*/checkpoint.pt")]) or steps_done(paths[0]) < 500 * attempt:
            assert time.monotonic() < deadline, "it does not train"
            time.sleep(0.01)
        while not paths[0].with_suffix(".tmp").exists():
            assert time.monotonic() < deadline, "a checkpoint is not written beside the last one"
        os.killpg(process.pid, signal.SIGKILL)
        assert cli.finish(process).status == -signal.SIGKILL
        path = checkpoint_in(tmp_path)
        load(path)
        flags = ["--resume", path, "--env-id", PPO.env()]
    before = steps_done(path)
    done = cli.shell(PPO, tmp_path, *flags, "--total-timesteps", before + 300)
    assert (done.status, done.err) == (0, "")
    steps = [0, *cli.curves(path.parent)["losses/kl"]]
    assert all(b - a <= SIZE for a, b in pairwise(steps)), "the curves have a gap"
    assert steps[-1] == steps_done(path) >= before + 300


# Signals


@each_script
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_and_ends(script, number, tmp_path):
    """The iteration is finished and saved, the command to resume is printed, and nothing is evaluated."""
    result, path = stopped(script, tmp_path, 450, number=number, total_timesteps=5000)
    assert (result.status, result.err) == (128 + number, "")
    steps = steps_done(path)
    assert 450 <= steps < 450 + SIZE
    assert steps == len(user_envs.LOG["steps"]) == list(cli.curves(path.parent)["losses/kl"])[-1]
    assert cli.printed_checkpoint(result.out.splitlines()[-1], "--resume", tmp_path).samefile(path)
    resume(script, path, total_timesteps=steps + 1, env_kwargs="")
    assert steps < steps_done(path) <= steps + SIZE


@each_script
def test_a_signal_in_the_evaluation_loses_nothing(script, tmp_path):
    """Training is complete by then: its checkpoint and curves are there, and the evaluation is finished."""
    at = {PPO: 2 * SIZE, CONTINUOUS: 3 * SIZE}[script] + 1
    kwargs = ["--eval-max-steps", 500, "--eval-episodes", 200]
    result, path = stopped(script, tmp_path, at, *kwargs, total_timesteps=at - SIZE)
    assert (result.status, result.err) == (143, "")
    assert at - SIZE <= steps_done(path) < at
    assert "200 episodes" in result.out
    assert "--total-timesteps" in result.out.splitlines()[-1], "without it, the command would be refused"
    assert "eval/greedy_return" in cli.curves(path.parent)


@pytest.mark.slow
def test_a_second_signal_acts_at_once(tmp_path):
    """The process dies of it; the checkpoint is the one before."""
    flags = ["--env-kwargs", "fault='signals', at=300", "--checkpoint-seconds", 3600]
    result = cli.shell(PPO, tmp_path, "--env-id", PPO.env(), *SMALL, *flags)
    assert result.status == -signal.SIGTERM
    assert steps_done(checkpoint_in(tmp_path)) == 0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="Windows has no SIGHUP")
def test_nohup(tmp_path):
    """Where a hang-up is to be ignored, it is."""
    kwargs = f"fault='signal', at=300, number={int(signal.SIGHUP)}"
    flags = ["--env-id", PPO.env(), "--env-kwargs", kwargs, *SMALL, "--total-timesteps", 600]
    result = cli.finish(cli.start(tmp_path, ["nohup", *cli.command(PPO, *flags)]))
    assert result.status == 0
    assert steps_done(checkpoint_in(tmp_path)) >= 600


@pytest.mark.slow
def test_worker_processes_do_not_outlive_a_failure(tmp_path):
    """Other people's code has no reason to end them."""
    code = "import ppo; ppo.train(ppo.Args(async_envs=True, num_envs=2, resume='missing.pt'))"
    result = cli.finish(cli.start(tmp_path, [sys.executable, "-c", code], PYTHONPATH=str(cli.ROOT)))
    assert result.status == 1
    assert "Refused: missing.pt" in result.err


START = """
import multiprocessing
import ppo
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    ppo.main()
"""


@pytest.mark.slow
def test_a_signal_ends_spawned_worker_processes(tmp_path):
    """They do not inherit the main process's handlers. The iterations before are saved."""
    (tmp_path / "start.py").write_text(START)
    kwargs = f"fault='signal group', at=40, number={int(signal.SIGTERM)}"
    flags = ["--env-id", PPO.env(), "--env-kwargs", kwargs, "--async-envs", *SMALL]
    words = [sys.executable, "start.py", *map(str, flags), "--total-timesteps", "1e6"]
    paths = os.pathsep.join([str(cli.ROOT), str(cli.ROOT / "tests")])
    result = cli.finish(cli.start(tmp_path, words, PYTHONPATH=paths))
    assert (result.status, result.err) == (143, "")
    assert "--resume" in result.out.splitlines()[-1]
    assert 0 < steps_done(checkpoint_in(tmp_path)) <= SIZE


@pytest.mark.slow
def test_a_signal_ends_worker_processes_while_the_policy_learns(tmp_path):
    """They cannot be closed any more; nothing is lost."""
    patch = """
def update(*arguments):
    os.killpg(0, signal.SIGTERM)
    time.sleep(1)
    return ppo_update(*arguments)

import os, signal, time
ppo_update, ppo.update = ppo.update, update
if __name__"""
    (tmp_path / "start.py").write_text(START.replace("if __name__", patch))
    flags = ["--env-id", PPO.env(), "--async-envs", *SMALL, "--total-timesteps", "1e6"]
    words = [sys.executable, "start.py", *map(str, flags)]
    paths = os.pathsep.join([str(cli.ROOT), str(cli.ROOT / "tests")])
    result = cli.finish(cli.start(tmp_path, words, PYTHONPATH=paths))
    assert (result.status, result.err) == (143, "")
    assert "--resume" in result.out.splitlines()[-1]
    assert 0 < steps_done(checkpoint_in(tmp_path)) <= SIZE


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes(number, tmp_path):
    """Ctrl-C in a terminal and job schedulers signal worker processes, too: they step on."""
    kwargs = f"fault='signal group', at=40, number={int(number)}"
    flags = ["--env-kwargs", kwargs, "--async-envs", "--total-timesteps", 10**6]
    result = cli.shell(PPO, tmp_path, "--env-id", PPO.env(), *SMALL, *flags)
    assert (result.status, result.err) == (128 + number, "")
    assert SIZE < steps_done(checkpoint_in(tmp_path)) <= 2 * SIZE


# Checkpoints that are refused


class Stranger:
    """An object whose pickle executes code."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


def damaged(path: Path, how: str) -> None:
    """Replace a checkpoint by a bad one."""
    content = load(path)
    changed = {
        "a list": [1, 2],
        "code": content | {"more": Stranger()},
        "another format": content | {"format": "ppo-other-7"},
        "no settings": {"format": content["format"]},
        "another size": content | {"args": content["args"] | {"hidden_size": 32}},
    }
    if how == "half":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "text":
        path.write_text("hello\n")
    elif how == "folder":
        path.unlink()
        path.mkdir()
    else:
        torch.save(changed[how], path)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A checkpoint of ppo.py, not to be changed."""
    return trained(PPO, tmp_path_factory.mktemp("good"), total_timesteps=100)


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
@pytest.mark.parametrize(
    "how",
    ["half", "text", "folder", "a list", "code", "another format", "no settings", "another size"],
)
def test_a_bad_checkpoint_is_one_line(how, flag, good, tmp_path):
    """It is refused with its name, and nothing of it is executed."""
    path = shutil.copy(good, tmp_path / "bad.pt")
    damaged(path, how)
    flags = [flag, "bad.pt", "--env-id", PPO.env(), "--total-timesteps", 900]
    cli.assert_refused(call(PPO, tmp_path, *flags), tmp_path, "bad.pt")
    assert os.listdir(tmp_path) == ["bad.pt"]


def test_a_checkpoint_of_another_script(good, tmp_path):
    """It is refused with both formats."""
    result = call(CONTINUOUS, tmp_path, "--resume", good, "--env-id", CONTINUOUS.env())
    cli.assert_refused(result, tmp_path, PPO.module.FORMAT, CONTINUOUS.module.FORMAT)


def test_a_complete_run_needs_more_steps(good, tmp_path):
    """It is refused with the flag that helps."""
    result = call(PPO, tmp_path, "--resume", good, "--env-id", PPO.env())
    cli.assert_refused(result, tmp_path, "--total-timesteps", str(steps_done(good)))


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_a_strangers_module_is_not_imported(flag, good, tmp_path, monkeypatch):
    """A module that a file names is imported only if the command line names it, too."""
    (tmp_path / "stranger.py").write_text("from pathlib import Path\nPath('imported').touch()\n")
    content = load(good)
    content["args"]["env_id"] = "stranger:Walk-v0"
    torch.save(content, tmp_path / "theirs.pt")
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("stranger", None)
    for more in ([], ["--env-id", "CartPole-v1"]):
        result = call(PPO, tmp_path, flag, "theirs.pt", *more)
        cli.assert_refused(result, tmp_path, "--env-id stranger:Walk-v0")
        assert not (tmp_path / "imported").exists()
    call(PPO, tmp_path, flag, "theirs.pt", "--env-id", "stranger:Walk-v0")
    assert (tmp_path / "imported").exists()
