"""Checkpoints: what they hold, and that a run that was stopped or killed resumes."""

import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
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
    atari_too,
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
    """The checkpoint in a copy of the run below another folder."""
    return shutil.copytree(path.parent, folder / "runs" / path.parent.name) / path.name


def resume(case, path, *words, **settings):
    """Resume a run. Returns what its checkpoint then holds, and its curves."""
    run(case, path.parent, "--resume", path.name, *words, **{"total_timesteps": 700} | settings)
    return load(path), curves(path.parent)


@memory_too
def test_a_checkpoint_is_complete(case, trained, tmp_path):
    """It loads without executing code: settings, weights, normalisers, optimizer and random state."""
    path = trained(case).checkpoint
    content, data = load(path), curves(copied(path, tmp_path).parent)
    step = content["state"]["global_step"]
    assert content["args"]["hidden_size"] == 16
    for name in {"kl", "entropy"} & content["state"].keys():
        assert content["state"][name] == pytest.approx(list(data[f"losses/{name}"].values())[-1], rel=1e-5)
    assert content["agent"]["obs_moments.count"] == content["agent"]["return_moments.count"] == step
    shapes = sorted(slot["exp_avg"].shape for slot in content["optimizer"]["state"].values())
    learnt = [value.shape for name, value in content["agent"].items() if "_moments" not in name]
    assert shapes == sorted(learnt)
    assert content["random"].dtype == torch.uint8
    assert (path.parent / case.file).read_text() == (ROOT / case.file).read_text()  # what made it
    assert sorted(file.name[:6] for file in path.parent.iterdir()) == ["checkp", "events", case.file[:6]]


@memory_too
def test_two_resumes_are_identical(case, trained, tmp_path):
    """What follows a checkpoint is the same, bit for bit, also where an earlier attempt went further.

    Environments have seeds that are new, and do not replay their episodes.
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
def test_every_part_of_a_checkpoint_counts(case, trained, tmp_path):
    """Where random state, optimizer or a normaliser differs, so does what follows."""
    content, after = load(trained(case).checkpoint), []
    parts = [content, content | {"random": torch.Generator().manual_seed(7).get_state()}]
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


def test_resumed_episodes_are_whole(tmp_path):
    """No episode that is logged was cut for any reason but its time limit, which is 7 steps here."""
    sizes = {"num_envs": 4, "num_steps": 16, "num_minibatches": 2, "eval_episodes": 1}
    words = flags(env_id="scripted_envs:StillBox-v0", **sizes)
    assert call(CONTINUOUS, tmp_path, *words, "--total-timesteps", 200).status == 0
    path = checkpoint_in(tmp_path)
    words = ["--resume", path, "--env-id", "scripted_envs:StillBox-v0", "--total-timesteps", 400]
    assert call(CONTINUOUS, tmp_path, *words).status == 0
    assert set(curves(path.parent)["charts/episodic_length"].values()) == {7}


def test_adapted_coefficients_continue(tmp_path):
    """A resumed run adapts the coefficient from where it was, at once."""
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
    """The checkpoint is of the last minute's whole iteration, however far the next one has come."""
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


def interrupting(case, monkeypatch, iteration, numbers):
    """Send these signals to this process at the start of the update of an iteration."""
    ppo_update, count = case.script.update, itertools.count(1)

    def update(*arguments):
        if next(count) == iteration:
            for number in numbers:
                os.kill(os.getpid(), number)
        return ppo_update(*arguments)

    monkeypatch.setattr(case.script, "update", update)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@atari_too
def test_a_stopped_run_is_saved(case, number, tmp_path, monkeypatch):
    """Ctrl-C and SIGTERM end it after the iteration, which is saved; it is not evaluated, and resumes."""
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
    if case is not ATARI:
        monkeypatch.undo()
        resumed = call(case, tmp_path, *resume_words.split(), "--total-timesteps", 600)
        assert resumed.status == 0
        steps = int(re.search(r"after ([\d,]+) steps", resumed.out)[1].replace(",", ""))
        assert 600 <= steps == load(path)["state"]["global_step"]


@memory_too
def test_the_command_to_resume_is_not_refused(case, tmp_path):
    """Also where a run of few steps went on to the end of a rollout."""
    done = run(case, tmp_path, total_timesteps=10)
    (words,) = re.findall(r"^resume: python \S+ (.*)$", done.out, re.M)
    resumed = call(case, tmp_path, *words.split(), "--env-id", case.walk)
    assert (resumed.status, resumed.err) == (0, "")


STOPPED = SMALL | {"total_timesteps": 100_000}
STOPPED_ATARI = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1, "num_threads": 1}
STOPPED_ATARI |= {"total_timesteps": 100_000, "env_id": "ALE/Pong-v5", "device": "cpu"}


@each_script
def test_a_second_ctrl_c_stops_at_once(case, tmp_path, monkeypatch):
    """What the iteration before saved is still there."""
    interrupting(case, monkeypatch, 3, [signal.SIGINT, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        run(case, tmp_path, total_timesteps=100_000)
    path = checkpoint_in(tmp_path)
    assert load(path)["state"]["global_step"] == min(curves(path.parent)["losses/kl"])  # the first one's


@pytest.mark.slow
def test_a_crash_leaves_no_worker(tmp_path):
    """Workers ignore what ends the run; they do not outlive it, nor keep it from ending."""
    words = ["--async-envs", "--env-id", "user_envs:Walk-v0", "--env-kwargs", '{"fault": "raise", "at": 50}']
    command = [sys.executable, ROOT / "ppo.py", *words, *flags(**SMALL)]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the simulator broke" in done.stderr


@memory_too
def test_a_simulator_that_cannot_be_closed(case, tmp_path, monkeypatch):
    """What was learnt is saved before."""
    make_envs = case.script.make_envs

    def make(*given):
        envs = make_envs(*given)
        envs.close = lambda: 1 / 0
        return envs

    monkeypatch.setattr(case.script, "make_envs", make)
    known = {name: value for name, value in SMALL.items() if hasattr(case.script.Args, name)}
    assert call(case, tmp_path, *flags(env_id=case.walk, **known)).status == 1
    assert load(checkpoint_in(tmp_path))["state"]["global_step"] >= 300


@each_script
def test_resuming_overwrites_no_program(case, trained, tmp_path):
    """A script of the same name beside the checkpoint stays; the first half of the run was made by it."""
    path = copied(trained(case).checkpoint, tmp_path)
    (path.parent / case.file).write_text("# mine")
    resume(case, path)
    assert (path.parent / case.file).read_text() == "# mine"


@each_script
def test_a_mistake_in_resuming_loses_nothing(case, trained, tmp_path, monkeypatch):
    """Until a resumed run has made an iteration, its checkpoint stays as it was, with its settings."""
    path = copied(trained(case).checkpoint, tmp_path)
    before = load(path)
    interrupting(case, monkeypatch, 1, [signal.SIGINT, signal.SIGINT])
    with pytest.raises(KeyboardInterrupt):
        resume(case, path, "--learning-rate=1")
    assert same(load(path), before)
    monkeypatch.undo()
    monkeypatch.setattr(case.script, "make_envs", lambda *given: 1 / 0)
    call(case, tmp_path, "--resume", path, "--env-id", case.walk, "--total-timesteps", 700, "--gamma", 0.5)
    assert same(load(path), before)


@memory_too
def test_a_finished_run_stays_as_it_is(case, trained, tmp_path, monkeypatch):
    """Resumed from Python, it is evaluated, and not saved: its settings are those with which it ran."""
    path = copied(trained(case).checkpoint, tmp_path)
    before = load(path)
    monkeypatch.chdir(tmp_path)
    args = replace(case.script.Args(**before["args"]), resume=str(path), learning_rate=0.5)
    results = case.script.train(args)
    assert same(load(path), before)
    assert results["training_return"] == pytest.approx(np.mean(before["state"]["returns"]))


@memory_too
def test_the_last_returns_are_saved(case, trained, tmp_path):
    """The mean of 100 episodes continues where the run was stopped; so does what `train` returns."""
    path = copied(trained(case).checkpoint, tmp_path)
    content = load(path)
    assert 20 < len(content["state"]["returns"]) <= 100
    content["state"]["returns"] = [777.0] * 5  # to be known again
    torch.save(content, path)
    after, data = resume(case, path, total_timesteps=content["state"]["global_step"] + 1)
    returns = after["state"]["returns"]
    assert returns[:5] == [777.0] * 5
    assert 5 < len(returns) <= 100
    assert max(returns[5:]) < 777
    last = [*data["charts/episodic_return_100"].values()][-1]
    assert last == pytest.approx(np.mean(returns), rel=1e-5)


@memory_too
def test_no_episode_is_repeated(case, tmp_path):
    """Of environments that draw from the generators of Python and NumPy: the resumed run has new numbers."""
    draws = case.walk.replace("Walk", "Draws")
    seen = []
    for total in (300, 700):
        words = ["--resume", checkpoint_in(tmp_path)] if seen else flags(**SMALL)
        assert call(case, tmp_path, *words, "--env-id", draws, "--total-timesteps", total).status == 0
        seen.append({tuple(numbers) for numbers in user_envs.LOG["drawn"]})
        assert len(seen[-1]) == len(user_envs.LOG["drawn"])  # the evaluation's are others, too
    assert len(seen[0]) > 100
    assert len(seen[0] & seen[1]) <= 40  # those of the evaluations, which are the same


def test_workers_of_a_resumed_run_draw_new_numbers():
    """Their generators are seeded by the seed and the step."""
    script, seen = DISCRETE.script, []
    args = DISCRETE.make_args(env_id="user_envs:Draws-v0", async_envs=True)
    for step in (0, 0, 500):
        envs = script.make_envs(args, script.seed_everything(args.seed, step))
        seen.append(envs.reset(seed=1)[0])
        envs.close()
    assert (seen[0] == seen[1]).all()
    assert not set(seen[0].flatten()) & set(seen[2].flatten())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_workers_too(number, tmp_path):
    """A terminal or `timeout` sends them to all processes of a run; the workers must not die of them."""
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
    "nan reward": "FloatingPointError: a reward or an observation is NaN",
    "nan observation": "FloatingPointError: a reward or an observation is NaN",
    "nan at the start": "FloatingPointError: a reward or an observation is NaN",
}


@memory_too
@pytest.mark.parametrize("fault", FAULTS)
def test_what_goes_wrong_is_shown_and_not_saved(case, fault, trained, tmp_path):
    """An environment's exception as it is, or that a loss is not finite."""
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
    """An object whose pickle executes code."""

    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_no_code_of_a_checkpoint_is_executed(flag, trained, tmp_path):
    """It fails, and nothing is changed."""
    torch.save(load(trained(DISCRETE).checkpoint) | {"more": Stranger()}, tmp_path / "bad.pt")
    assert call(DISCRETE, tmp_path, flag, "bad.pt", "--env-id", DISCRETE.walk).status != 0
    assert os.listdir(tmp_path) == ["bad.pt"]


@pytest.mark.parametrize("flag", ["--resume", "--evaluate"])
def test_files_that_are_no_checkpoints(flag, trained, tmp_path):
    """One line each: an empty path, half of a file, and a language model's."""
    whole = trained(DISCRETE).checkpoint
    (tmp_path / "half.pt").write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    torch.save({"args": {}, "weights": {}, "episodes": 5}, tmp_path / "language.pt")
    for path, expected in (("", "need the path"), ("half.pt", "not a checkpoint"), ("language.pt", "not a")):
        done = call(DISCRETE, tmp_path, flag, path)
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert expected in done.err


KEPT = [(case, "--no-norm-obs") for case in (DISCRETE, CONTINUOUS, LSTM)]
KEPT += [(case, "--no-norm-rewards --norm-adv") for case in (DISCRETE, CONTINUOUS, LSTM)]
KEPT += [(CONTINUOUS, "--no-scale-actions"), (CONTINUOUS, "--activation tanh")]


@pytest.mark.parametrize(("case", "words"), KEPT, ids=str)
def test_networks_keep_what_they_have_learnt_with(case, words, trained, tmp_path):
    """Otherwise, they would see or mean other numbers: a flag that changes it is refused."""
    name = words.split()[0].replace("--no-", "--")
    for flag in ("--resume", "--evaluate"):
        given = [flag, trained(case).checkpoint, "--env-id", case.walk, "--total-timesteps", 900]
        done = call(case, tmp_path, *given, *words.split())
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert f"{name} must be as in" in done.err


def test_another_beta2_counts_in_a_resumed_run(trained, tmp_path):
    """It is Adam's from there on, not that of the saved optimizer."""
    path = copied(trained(CONTINUOUS).checkpoint, tmp_path)
    content, _ = resume(CONTINUOUS, path, "--adam-beta2", "0.9")
    assert content["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.9)


def test_beta2_counts_in_a_new_run(tmp_path):
    """It is that of the optimizer from the first step on."""
    run(CONTINUOUS, tmp_path, "--adam-beta2", "0.9")
    content = load(checkpoint_in(tmp_path))
    assert content["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.9)


def test_another_floor_counts_from_the_first_action_of_a_resumed_run(trained, tmp_path):
    """Acting with a narrow policy, and learning a wide one, would be a large step."""
    path = copied(trained(CONTINUOUS).checkpoint, tmp_path)
    before = len(curves(path.parent)["losses/kl"])
    _, data = resume(CONTINUOUS, path, "--min-log-std", "1")
    assert max([*data["losses/kl"].values()][before:]) < 0.1
    assert min([*data["losses/std"].values()][before:]) >= np.exp(1) * (1 - 1e-6)


@pytest.mark.parametrize("case", [DISCRETE, CONTINUOUS], ids=repr)
def test_metrics_of_numpy_are_saved_as_numbers(case, tmp_path, monkeypatch):
    """A changed `update` may average them with NumPy: the run can still be resumed."""
    original = case.script.update

    def update(*given):
        return {name: np.float64(value) for name, value in original(*given).items()}

    monkeypatch.setattr(case.script, "update", update)
    run(case, tmp_path)
    content, _ = resume(case, checkpoint_in(tmp_path))
    assert content["state"]["global_step"] >= 700


def test_an_unknown_activation_is_not_another_one(trained, tmp_path):
    """A checkpoint of a changed copy is refused, rather than played with other networks."""
    path = copied(trained(CONTINUOUS).checkpoint, tmp_path)
    content = load(path)
    content["args"]["activation"] = "relu"
    torch.save(content, path)
    done = call(CONTINUOUS, tmp_path, "--evaluate", path, "--env-id", CONTINUOUS.walk)
    assert done.status == 2
    assert "of another script" in done.err
