"""Checkpoints are complete, and a run that was stopped or killed resumes from its last one."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise

import numpy as np
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
    call,
    checkpoint_in,
    curves,
    each_script,
    flags,
    load,
    memory_too,
    run,
    same,
)

SIZE = SMALL["num_envs"] * SMALL["num_steps"]


def copied(path, folder):
    """Copy a run below another folder, and return the path of its checkpoint there."""
    return shutil.copytree(path.parent, folder / "runs" / path.parent.name) / path.name


def resume(case, path, *words, **settings):
    """Resume a run. Return the content of its checkpoint, and its curves."""
    run(case, path.parent, "--resume", path.name, *words, **{"total_timesteps": 700} | settings)
    return load(path), curves(path.parent)


@memory_too
def test_a_checkpoint_has_settings_weights_normalisers_and_optimizer(case, trained, tmp_path):
    """It loads without executing code, and the run's folder has the text of the script beside it."""
    path = trained(case).checkpoint
    content, data = load(path), curves(copied(path, tmp_path).parent)
    step = content["state"]["global_step"]
    assert content["args"]["hidden_size"] == 16
    for name in {"kl", "entropy"} & content["state"].keys():
        assert content["state"][name] == pytest.approx(list(data[f"losses/{name}"].values())[-1], rel=1e-5)
    assert content["agent"]["obs_moments.count"] == content["agent"]["return_moments.count"] == step
    shapes = sorted(slot["exp_avg"].shape for slot in content["optimizer"]["state"].values())
    learnt = [
        value.shape
        for name, value in content["agent"].items()
        if "_moments" not in name and name != "binary_obs"
    ]
    assert shapes == sorted(learnt)
    assert (path.parent / case.file).read_text() == (ROOT / case.file).read_text()  # what made it
    assert sorted(file.name[:6] for file in path.parent.iterdir()) == [
        ".lock",
        "checkp",
        "events",
        case.file[:6],
    ]


@memory_too
def test_two_runs_that_resume_a_checkpoint_are_identical(case, trained, tmp_path):
    """They are equal bit for bit, even if an earlier attempt had gone further.

    Environments get new seeds, so that they do not repeat their episodes.
    """
    first = copied(trained(case).checkpoint, tmp_path / "a")
    early, second = load(first), copied(first, tmp_path / "b")
    after, data = resume(case, first)
    assert not {*user_envs.LOG["seeds"][:4]} & {*trained(case).seeds}
    torch.rand(7)  # nothing may depend on what this process did before
    again, data_again = resume(case, second)
    assert same(after, again)
    assert data == data_again
    torch.save(early, first)  # as if the process had been killed before it wrote another checkpoint
    again, data_again = resume(case, first)
    assert same(after, again)
    assert data == data_again
    steps = [0, *data["losses/kl"]]
    assert all(b - a <= SIZE for a, b in pairwise(steps)), "the curves have a gap"
    assert steps[-1] == after["state"]["global_step"] > early["state"]["global_step"]


@each_script
def test_a_resumed_run_uses_every_part_of_its_checkpoint(case, trained, tmp_path):
    """If the step, the optimizer or a normaliser differs, the weights that follow do."""
    content, after = load(trained(case).checkpoint), []
    parts = [content, content | {"state": content["state"] | {"global_step": 128}}]
    parts.append(content | {"agent": content["agent"] | {"obs_moments.mean": torch.ones(3)}})
    parts.append(content | {"agent": content["agent"] | {"return_moments.var": 9 * torch.ones(1)}})
    slots = content["optimizer"]["state"].items()
    zeroed = {name: slot | {"exp_avg": 0 * slot["exp_avg"]} for name, slot in slots}
    parts.append(content | {"optimizer": content["optimizer"] | {"state": zeroed}})
    for i, changed in enumerate(parts):
        copy = copied(trained(case).checkpoint, tmp_path / str(i))
        torch.save(changed, copy)
        after.append(resume(case, copy, total_timesteps=400)[0]["agent"]["actor.0.weight"])
    assert not any(torch.equal(after[0], other) for other in after[1:])


def test_a_resumed_run_continues_to_adapt_its_coefficient(tmp_path):
    """The first iteration of the resumed run halves the value that the last one had."""
    words = "--surrogate", "kl-penalty", "--adapt", "kl-coef", "--desired-kl", "10"
    run(DISCRETE, tmp_path, *words, total_timesteps=400)
    path = checkpoint_in(tmp_path)
    before = curves(path.parent)["charts/kl_coef"]
    values = list(resume(DISCRETE, path)[1]["charts/kl_coef"].values())
    assert len(values) > len(before)
    assert values == pytest.approx([0.5**i for i in range(len(values))])


# Runs that stop early


@memory_too
def test_an_interrupted_update_is_not_saved(case, tmp_path, monkeypatch):
    """The checkpoint is that of the last whole iteration, wherever the next one was interrupted."""
    ppo_loss, minutes, contents = case.script.ppo_loss, itertools.count(0, 61), []
    monkeypatch.setattr(case.script.time, "monotonic", lambda: next(minutes))  # each iteration takes a minute
    for last in (13, 16):  # the first and the last gradient step of the fourth iteration
        count = itertools.count(1)

        def interrupted(*arguments, count=count, last=last):
            if next(count) == last:
                raise KeyboardInterrupt
            return ppo_loss(*arguments)

        monkeypatch.setattr(case.script, "ppo_loss", interrupted)
        (tmp_path / str(last)).mkdir()
        with pytest.raises(KeyboardInterrupt):
            run(case, tmp_path / str(last), total_timesteps=5000)
        path = checkpoint_in(tmp_path / str(last))
        contents.append(load(path))
        logged = list(curves(path.parent)["losses/kl"])
        assert len(logged) == 3
        assert contents[-1]["state"]["global_step"] == logged[-1]
        assert contents[-1]["agent"]["obs_moments.count"] == logged[-1]
    assert same(*contents)


def interrupting(case, monkeypatch, iteration, numbers, pause=0.0):
    """Send these signals to this process when the update of an iteration begins."""
    ppo_update, count = case.script.update, itertools.count(1)

    def update(*arguments):
        if next(count) == iteration:
            for number in numbers:
                os.kill(os.getpid(), number)
                time.sleep(pause)
        return ppo_update(*arguments)

    monkeypatch.setattr(case.script, "update", update)


def test_a_ctrl_c_that_comes_twice_at_once_is_one(tmp_path, monkeypatch):
    """`timeout` passes on the signal that the terminal has sent to both."""
    interrupting(DISCRETE, monkeypatch, 2, [signal.SIGINT, signal.SIGINT])
    done = call(DISCRETE, tmp_path, *flags(**STOPPED | {"env_id": DISCRETE.walk}))
    assert done.status == 130
    assert load(checkpoint_in(tmp_path))["state"]["global_step"] == 2 * SIZE


STOPS = [(case, signal.SIGINT) for case in (DISCRETE, CONTINUOUS, ATARI, LSTM)] + [(DISCRETE, signal.SIGTERM)]


@pytest.mark.parametrize(("case", "number"), STOPS, ids=str)
def test_ctrl_c_and_sigterm_save_a_run_that_then_resumes(case, number, tmp_path, monkeypatch):
    """Training ends after the iteration, without an evaluation, with exit status 130."""
    interrupting(case, monkeypatch, 2, [number])
    words = flags(**STOPPED_ATARI if case is ATARI else STOPPED | {"env_id": case.walk})
    done = call(case, tmp_path, *words)
    assert done.status == 130
    assert done.err == "" or "Traceback" not in done.err
    path = checkpoint_in(tmp_path)
    data = curves(path.parent)
    assert load(path)["state"]["global_step"] == max(data["losses/kl"])
    assert len(data["losses/kl"]) == 2
    assert "eval/greedy_return" not in data
    assert "evaluation return" not in done.out
    (resume_words,) = re.findall(r"^resume: python \S+ (.*)$", done.out, re.M)
    assert "--total-timesteps" not in resume_words
    monkeypatch.undo()
    total = 40 if case is ATARI else 600
    words = [*resume_words.split(), "--device", "cpu", "--total-timesteps", total]
    resumed = call(case, tmp_path, *words)
    assert resumed.status == 0
    steps = int(re.search(r"after ([\d,]+) steps", resumed.out)[1].replace(",", ""))
    assert total <= steps == load(path)["state"]["global_step"]


STOPPED = SMALL | {"total_timesteps": 100_000}
STOPPED_ATARI = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "num_threads": 1}
STOPPED_ATARI |= {"total_timesteps": 100_000, "device": "cpu", "eval_episodes": 1}
STOPPED_ATARI |= {"env_id": "ALE/Pong-v5", "env_kwargs": '{"max_num_frames_per_episode":40}'}


def test_a_second_ctrl_c_stops_at_once_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    interrupting(DISCRETE, monkeypatch, 3, [signal.SIGINT, signal.SIGINT], pause=1.1)
    with pytest.raises(KeyboardInterrupt):
        run(DISCRETE, tmp_path, total_timesteps=100_000)
    path = checkpoint_in(tmp_path)
    assert load(path)["state"]["global_step"] == min(curves(path.parent)["losses/kl"])  # the first one's


@pytest.mark.slow
def test_a_run_whose_environment_crashes_in_a_process_of_its_own_ends(tmp_path):
    """The process returns, with the environment's error, and no worker keeps it alive."""
    words = ["--async-envs", "--env-id", "user_envs:Walk-v0", "--env-kwargs", '{"fault": "raise", "at": 50}']
    command = [sys.executable, ROOT / "ppo.py", *words, *flags(**SMALL)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the simulator broke" in done.stderr


def test_a_run_is_saved_although_its_environments_fail_to_close(tmp_path, monkeypatch):
    make_envs = DISCRETE.script.make_envs

    def make(*given):
        envs = make_envs(*given)
        envs.close = lambda: 1 / 0
        return envs

    monkeypatch.setattr(DISCRETE.script, "make_envs", make)
    done = call(DISCRETE, tmp_path, *flags(env_id=DISCRETE.walk, **SMALL))
    assert done.status == 0
    assert "ZeroDivisionError" in done.err
    assert "evaluation return" in done.out
    assert load(checkpoint_in(tmp_path))["state"]["global_step"] >= 300


def test_resuming_does_not_overwrite_the_copy_of_the_script(trained, tmp_path):
    """That copy made the first half of the run."""
    path = copied(trained(DISCRETE).checkpoint, tmp_path)
    (path.parent / "ppo.py").write_text("# mine")
    resume(DISCRETE, path)
    assert (path.parent / "ppo.py").read_text() == "# mine"


@each_script
def test_a_checkpoint_stays_as_it_was_until_a_resumed_run_has_made_an_iteration(
    case, trained, tmp_path, monkeypatch
):
    """So a mistake in resuming, such as a wrong learning rate, loses nothing."""
    path = copied(trained(case).checkpoint, tmp_path)
    before = load(path)
    interrupting(case, monkeypatch, 1, [signal.SIGINT, signal.SIGINT], pause=1.1)
    with pytest.raises(KeyboardInterrupt):
        resume(case, path, "--learning-rate=1")
    assert same(load(path), before)
    monkeypatch.undo()
    monkeypatch.setattr(case.script, "make_envs", lambda *given: 1 / 0)
    call(case, tmp_path, "--resume", path, "--env-id", case.walk, "--total-timesteps", 700, "--gamma", 0.5)
    assert same(load(path), before)


def test_the_mean_return_of_100_episodes_continues_in_a_resumed_run(trained, tmp_path):
    path = copied(trained(DISCRETE).checkpoint, tmp_path)
    content = load(path)
    assert 20 < len(content["state"]["returns"]) <= 100
    content["state"]["returns"] = [777.0] * 5  # to be known again
    torch.save(content, path)
    after, data = resume(DISCRETE, path, total_timesteps=content["state"]["global_step"] + 1)
    returns = after["state"]["returns"]
    assert returns[:5] == [777.0] * 5
    assert 5 < len(returns) <= 100
    assert max(returns[5:]) < 777
    last = [*data["charts/episodic_return_100"].values()][-1]
    assert last == pytest.approx(np.mean(returns), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.nightly)])
def test_a_signal_to_all_processes_of_a_run_stops_and_saves_it(number, tmp_path):
    """A terminal or `timeout` sends it to the workers, too, which must not die of it."""
    words = ["--async-envs", "--num-envs", "3", "--num-minibatches", "2", "--total-timesteps", "1e7"]
    process = subprocess.Popen(
        [sys.executable, "-u", ROOT / "ppo.py", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines = iter(process.stdout.readline, "")
    assert any(" steps  " in line for line in lines)  # it trains
    os.killpg(process.pid, number)
    rest = "".join(lines)
    assert process.wait(60) == 130
    assert "Traceback" not in rest
    assert "resume: " in rest
    assert rest.count("stopping after") == 1
    assert load(checkpoint_in(tmp_path))["state"]["global_step"] > 0


FAULTS = {
    "raise": "RuntimeError: the simulator broke",
    "nan reward": "FloatingPointError: reward is nan in step",
    "nan observation": "FloatingPointError: obs is nan in step",
    "nan at a time limit": "FloatingPointError: next_obs is nan in step",  # its value counts
}
FAULTY = [(DISCRETE, "raise"), *itertools.product((DISCRETE, CONTINUOUS, LSTM), [*FAULTS][1:])]


@pytest.mark.parametrize(("case", "fault"), FAULTY, ids=str)
def test_an_environment_that_fails_or_returns_nan_stops_the_run_and_is_not_saved(
    case, fault, trained, tmp_path
):
    """The environment's exception keeps its traceback. NaN is named."""
    path = copied(trained(case).checkpoint, tmp_path)
    before, kwargs = load(path), f'{{"fault": "{fault}", "at": 50}}'
    words = ["--resume", path, "--env-id", case.walk, *flags(total_timesteps=5000, env_kwargs=kwargs)]
    done = call(case, tmp_path, *words)
    assert done.status == 1
    assert done.err.index("Traceback") < done.err.index(FAULTS[fault])
    after = load(path)
    for name in ("agent", "optimizer", "state"):
        assert same(after[name], before[name]), name


class Stranger:
    """An object that executes code when it is unpickled."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_no_code_of_a_checkpoint_is_executed(flag, trained, tmp_path):
    """Such a checkpoint is refused, and nothing is written."""
    torch.save(load(trained(DISCRETE).checkpoint) | {"more": Stranger()}, tmp_path / "bad.pt")
    assert call(DISCRETE, tmp_path, flag, "bad.pt", "--env-id", DISCRETE.walk).status != 0
    assert os.listdir(tmp_path) == ["bad.pt"]


def test_half_of_a_checkpoint_and_one_of_a_language_model_do_not_load(trained, tmp_path):
    whole = trained(DISCRETE).checkpoint
    (tmp_path / "half.pt").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    torch.save({"args": {}, "weights": {}, "episodes": 5}, tmp_path / "language.pt")
    for path, status, words in (("half.pt", 1, "Error"), ("language.pt", 2, "not a checkpoint of this")):
        done = call(DISCRETE, tmp_path, "--resume", path)
        assert done.status == status
        assert words in done.err


KEPT = [(DISCRETE, "--no-norm-obs"), (LSTM, "--no-norm-rewards --norm-adv")]
KEPT += [(CONTINUOUS, "--no-scale-actions"), (CONTINUOUS, "--activation tanh")]


@pytest.mark.parametrize(("case", "words"), KEPT, ids=str)
def test_flags_that_change_the_inputs_or_outputs_of_saved_networks_are_refused(
    case, words, trained, tmp_path
):
    """Otherwise, the networks would see numbers, or mean actions, other than those they have learnt with."""
    name = words.split()[0].replace("--no-", "--")
    for flag in ("--resume", "--init"):
        given = [flag, trained(case).checkpoint, "--env-id", case.walk, "--total-timesteps", 900]
        done = call(case, tmp_path, *given, *words.split())
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert f"{name} must be as in" in done.err


def test_unsafe_flags_are_refused_for_a_resumed_run_too(trained, tmp_path):
    path = copied(trained(DISCRETE).checkpoint, tmp_path)
    words = "--resume", path, "--env-id", DISCRETE.walk, "--total-timesteps", 900, "--no-norm-adv"
    done = call(DISCRETE, tmp_path, *words)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "--norm-adv" in done.err


def test_adam_beta2_is_used_by_new_and_by_resumed_runs(trained, tmp_path):
    """A resumed run uses the flag's value, not that of the saved optimizer."""
    (tmp_path / "new").mkdir()
    run(CONTINUOUS, tmp_path / "new", "--adam-beta2", "0.9")
    content, _ = resume(CONTINUOUS, copied(trained(CONTINUOUS).checkpoint, tmp_path), "--adam-beta2", "0.9")
    for saved in (content, load(checkpoint_in(tmp_path / "new"))):
        assert saved["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.9)


def test_another_min_log_std_applies_from_the_first_action_of_a_resumed_run(trained, tmp_path):
    """Acting with a narrow policy and learning a wide one would be a large step.

    The logged deviation is that of 128 actions, here within 5 standard deviations.
    """
    path = copied(trained(CONTINUOUS).checkpoint, tmp_path)
    before = len(curves(path.parent)["losses/kl"])
    _, data = resume(CONTINUOUS, path, "--min-log-std", "1")
    assert max([*data["losses/kl"].values()][before:]) < 0.1
    assert min([*data["losses/std"].values()][before:]) > np.exp(1) * (1 - 5 / np.sqrt(2 * SIZE))
