"""Checkpoints: what they hold, and that a run that was stopped or killed resumes."""

import itertools
import os
import shutil
from itertools import pairwise

import pytest
import torch
import user_envs
from helpers import (
    CONTINUOUS,
    DISCRETE,
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
    assert steps[1] <= SIZE * (2 if case is CONTINUOUS else 1)  # its first rollout sets the normalisers
    assert all(b - a <= SIZE for a, b in pairwise(steps[1:])), "the curves have a gap"
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
    words = "--surrogate", "kl-penalty", "--adapt", "kl-coef", "--desired-kl", "1000"
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


FAULTS = {
    "raise": "RuntimeError: the simulator broke",
    "nan reward": "FloatingPointError: a reward or an observation is NaN",
    "nan observation": "FloatingPointError: a reward or an observation is NaN",
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
