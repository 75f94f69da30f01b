"""Evaluations while a script trains: they change nothing that is learnt, and the best policy is kept."""

import contextlib
import copy
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import atari_games
import gpu_envs
import numpy as np
import pytest
import torch
import user_envs
from helpers import CONTINUOUS, DISCRETE, LSTM, SMALL, call, checkpoint_in, curves, flags, load, same

import ppo
import ppo_atari
import ppo_continuous
import ppo_gpu
import ppo_lstm

SIZE = 4 * 8  # transitions per iteration
THREE = 2.5 * SIZE  # --total-timesteps that take three iterations
SETTINGS = {  # their environments draw from Python's and NumPy's generators
    ppo: {"env_id": "user_envs:Global-v0", "hidden_size": 16},
    ppo_continuous: {"env_id": "user_envs:GlobalBox-v0", "hidden_size": 16},
    ppo_lstm: {"env_id": "user_envs:Global-v0", "hidden_size": 16},
    ppo_atari: {"env_id": "ALE/Pong-v5", "num_threads": 1, "device": "cpu"},
    ppo_gpu: {"env_id": "gpu_envs:Draws", "hidden_sizes": (16, 16), "device": "cpu"},
}
each_script = pytest.mark.parametrize("script", SETTINGS, ids=lambda script: script.__name__)
# ppo_continuous.py and ppo_lstm.py have the same text as ppo.py.
each_text = pytest.mark.parametrize("script", [ppo, ppo_atari, ppo_gpu], ids=lambda script: script.__name__)


@pytest.fixture(autouse=True)
def small_atari(monkeypatch):
    """Give ppo_atari.py scripted games and a small network."""

    def make_envs(args, num_envs):
        scripts = [atari_games.LIVES, atari_games.SHORT, atari_games.CUT, atari_games.LIVES][:num_envs]
        return atari_games.make_games(*scripts, kind=atari_games.DrawnGames)

    with monkeypatch.context() as patch:  # which a test does not undo
        patch.setattr(ppo_atari, "make_envs", make_envs)
        patch.setattr(ppo_atari, "Agent", atari_games.SmallNetwork)
        yield


def train(script, folder, **changes):
    """Train in a folder. Return the results, the content of the checkpoint, its folder, and the output."""
    folder.mkdir(exist_ok=True)
    known = vars(script.Args())
    small = {name: value for name, value in SMALL.items() if name in known} | {"num_steps": 8}
    args = script.Args(**small | SETTINGS[script] | {"total_timesteps": THREE} | changes)
    out = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(out):
        results = script.train(args)
    path = folder / results["checkpoint"]
    return SimpleNamespace(**results, path=path, content=load(path), folder=path.parent, out=out.getvalue())


def script_evaluations(script, monkeypatch, *means):
    """Let a script's evaluations have these mean returns. Return a list of what they evaluate."""
    played = []

    def evaluate(path, args, env):
        played.append(SimpleNamespace(seed=args.seed, name=Path(path).name, agent=load(path)["agent"]))
        return np.array([-1.0, 0.0, 1.0]) + means[len(played) - 1]

    monkeypatch.setattr(script, "evaluate", evaluate)
    return played


@each_script
def test_training_is_the_same_with_evaluations_and_without(script, tmp_path):
    """Weights, optimizer and curves are equal bit for bit, also if environments use global generators."""
    without = train(script, tmp_path / "without")
    often = train(script, tmp_path / "often", eval_every=1.0)
    for part in ("agent", "optimizer"):
        assert same(without.content[part], often.content[part])
    expected, logged = curves(without.folder), curves(often.folder)
    assert logged.pop("eval/final_return") == expected.pop("eval/greedy_return")
    greedy = logged.pop("eval/greedy_return")
    assert [*greedy] == [*logged["losses/value_loss"]]  # after each iteration
    assert max(greedy.values()) == pytest.approx(often.best_return)
    del logged["eval/best_replayed"]
    assert logged == expected
    assert without.greedy_returns.tolist() == often.greedy_returns.tolist()
    assert len(without.best_replayed) == 0
    assert not (without.folder / "best.pt").exists()


@each_script
def test_two_runs_that_resume_a_checkpoint_are_identical(script, tmp_path):
    """One of them evaluates after each iteration, the other one only at its end."""
    first = train(script, tmp_path, eval_every=1.0)
    more = {"resume": str(first.path), "total_timesteps": 2 * THREE}
    again = [train(script, tmp_path, **more, eval_every=1.0)]
    torch.save(first.content, first.path)
    again.append(train(script, tmp_path, **more))
    for part in ("agent", "optimizer"):
        assert same(again[0].content[part], again[1].content[part])
        assert not same(again[0].content[part], first.content[part])


@each_text
def test_the_best_policy_is_kept_and_played_again_in_other_episodes(script, tmp_path, monkeypatch):
    """Of three, the second is the best. At the end, the last one and the best one play new episodes."""
    played = script_evaluations(script, monkeypatch, 3, 7, 5, 4, 6)
    done = train(script, tmp_path, eval_every=1.0)
    first, second, third, last, best = played
    assert first.seed == second.seed == third.seed != last.seed == best.seed
    assert [each.name for each in played] == 4 * ["checkpoint.pt"] + ["best.pt"]
    content = load(done.folder / "best.pt")
    assert same(content["agent"], second.agent)
    assert same(best.agent, second.agent)
    assert same(third.agent, last.agent)
    assert not same(second.agent, last.agent)
    logged = curves(done.folder)
    steps = [*logged["losses/value_loss"]]
    assert logged["eval/greedy_return"] == dict(zip(steps, (3, 7, 5), strict=True))
    assert logged["eval/final_return"] == {steps[2]: 4}
    assert logged["eval/best_replayed"] == {steps[2]: 6}
    for state in (content["state"], done.content["state"]):
        assert (state["best_return"], state["best_step"]) == (7, steps[1])
    assert (done.best_return, done.greedy_returns.mean(), done.best_replayed.mean()) == (7, 4, 6)
    assert done.best_step == steps[1]
    assert f"best.pt: chosen after {steps[1]:,} steps for a mean return of 7; in the new" in done.out
    assert "it has 6, the last policy 4" in done.out
    assert len(played) == 5


@each_text
def test_a_resumed_run_replaces_the_best_policy_by_one_that_is_not_worse(script, tmp_path, monkeypatch):
    """It knows the best return also if it was killed before it wrote that into its checkpoint."""
    script_evaluations(script, monkeypatch, 3, 7, 5, 4, 6)
    done = train(script, tmp_path, eval_every=1.0)
    best, state = load(done.folder / "best.pt"), done.content["state"]
    state.update(best_return=3.0, best_step=1)
    torch.save(done.content, done.path)
    settings = {"eval_every": 1.0, "resume": str(done.path), "total_timesteps": state["global_step"] + 1}
    script_evaluations(script, monkeypatch, 6, 4, 6)
    more = train(script, tmp_path, **settings)
    assert more.best_return == more.content["state"]["best_return"] == 7
    assert same(load(done.folder / "best.pt"), best)
    script_evaluations(script, monkeypatch, 7, 4, 6)  # as good
    settings["total_timesteps"] = more.content["state"]["global_step"] + 1
    more = train(script, tmp_path, **settings)
    assert (more.best_return, more.best_replayed.mean()) == (7, 6)
    curves(done.folder)  # no step is logged twice
    assert same(load(done.folder / "best.pt")["agent"], more.content["agent"])


@each_text
def test_stop_at_ends_training_once_an_evaluation_reaches_it(script, tmp_path, monkeypatch):
    """The run is complete: the last policy is evaluated."""
    script_evaluations(script, monkeypatch, 3, 7, 5, 6)
    done = train(script, tmp_path, eval_every=1.0, stop_at=7.0, total_timesteps=1e6)
    assert len(curves(done.folder)["losses/value_loss"]) == 2
    assert (done.greedy_returns.mean(), done.best_replayed.mean()) == (5, 6)
    assert "--stop-at 7" in done.out
    with pytest.raises(ValueError, match="--stop-at needs --eval-every"):
        train(script, tmp_path, stop_at=7.0)


def test_evaluations_are_after_every_so_many_steps_and_at_the_end(tmp_path, monkeypatch):
    """Here every two iterations, and after the fifth, which is the last."""
    played = script_evaluations(ppo, monkeypatch, *range(5))
    done = train(ppo, tmp_path, eval_every=1.7 * SIZE, total_timesteps=4.5 * SIZE)
    logged = curves(done.folder)
    steps = [*logged["losses/value_loss"]]
    assert [*logged["eval/greedy_return"]] == [steps[1], steps[3], steps[4]]
    assert len(played) == 5


def test_an_evaluation_whose_return_is_nan_chooses_nothing(tmp_path, monkeypatch):
    script_evaluations(ppo, monkeypatch, np.nan, 7, np.nan, 4, 6)
    assert train(ppo, tmp_path, eval_every=1.0).best_return == 7


@each_text
def test_an_evaluation_in_which_the_run_was_killed_is_made_up_for(script, tmp_path, monkeypatch):
    """The resumed run evaluates after its first iteration. Otherwise, it would do so two iterations later."""
    with monkeypatch.context() as patch:
        patch.setattr(script, "evaluate", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(script, tmp_path, eval_every=1.7 * SIZE, total_timesteps=4.5 * SIZE)
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    more = {"eval_every": 1.7 * SIZE, "total_timesteps": 4.5 * SIZE}
    script_evaluations(script, monkeypatch, *range(5))
    done = train(script, tmp_path, resume=str(path), **more)
    logged = curves(done.folder)
    steps = [*logged["losses/value_loss"]]
    assert [*logged["eval/greedy_return"]] == steps[2:]


def test_an_evaluation_after_which_the_run_was_killed_is_not_repeated(tmp_path, monkeypatch):
    """It is in the checkpoint and in the curves, although the run was killed in the next iteration."""
    collect_rollout, count = ppo.collect_rollout, []

    def killed(*arguments):
        count.append(1)
        return collect_rollout(*arguments) if len(count) < 3 else 1 / 0

    settings = {"eval_every": 1.7 * SIZE, "total_timesteps": 4.5 * SIZE}
    script_evaluations(ppo, monkeypatch, *range(5))
    with monkeypatch.context() as patch:
        patch.setattr(ppo, "collect_rollout", killed)
        with pytest.raises(ZeroDivisionError):
            train(ppo, tmp_path, **settings)
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    done = train(ppo, tmp_path, resume=str(path), **settings)
    logged = curves(done.folder)
    steps = [*logged["losses/value_loss"]]
    assert [*logged["eval/greedy_return"]] == [steps[1], steps[3], steps[4]]


@each_text
def test_a_run_that_was_killed_after_it_wrote_best_pt_keeps_it(script, tmp_path, monkeypatch):
    """The checkpoint was not written yet. The next policies are worse."""
    write, written = script.Run.write, []

    def killed(run, path):
        write(run, path)
        written.append(path.name)
        if path.name == "best.pt":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        script_evaluations(script, patch, 7)
        patch.setattr(script.Run, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            train(script, tmp_path, eval_every=1.0)
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    best = load(path.with_name("best.pt"))
    assert load(path)["state"]["best_return"] == -np.inf
    script_evaluations(script, monkeypatch, 3, 5, 4, 6)
    done = train(script, tmp_path, eval_every=1.0, resume=str(path))
    assert (done.best_return, done.best_replayed.mean()) == (7, 6)
    assert same(load(path.with_name("best.pt")), best)


# With the same environment from the first step to the last


@pytest.mark.parametrize("case", [DISCRETE, CONTINUOUS, LSTM], ids=repr)
def test_one_environment_is_made_for_all_evaluations_and_closed_once(case, tmp_path):
    """The command line says what best.pt was chosen for, and evaluates it again with the same returns."""
    words = flags(**SMALL, env_id=case.walk)
    done = call(case, tmp_path, *words, "--eval-every", 1, "--total-timesteps", THREE)
    assert (done.status, done.err) == (0, "")
    assert len(user_envs.LOG["made"]) == len(user_envs.LOG["closed"]) == 1 + SMALL["num_envs"]
    best = checkpoint_in(tmp_path).with_name("best.pt")
    lines = done.out.splitlines()
    assert lines[-1].startswith("best.pt: chosen after")
    again = call(case, tmp_path, "--evaluate", best, "--env-id", case.walk)
    assert again.out.strip() == lines[-2]


def test_videos_of_the_last_policy_and_of_the_best_one_are_recorded(tmp_path, monkeypatch):
    """Here the first policy is the best, as the others are not evaluated. That evaluation is not recorded."""
    pytest.importorskip("moviepy")
    evaluate_if_due = ppo.Run.evaluate_if_due

    def once(run, env):
        if not run.best_path.exists():
            evaluate_if_due(run, env)

    monkeypatch.setattr(ppo.Run, "evaluate_if_due", once)
    settings = {"env_id": DISCRETE.walk, "capture_video": True, "eval_episodes": 2}
    done = train(ppo, tmp_path, **settings, eval_every=1.0)
    assert done.out.count("videos: ") == 2
    for name in ("videos", "best_videos"):
        assert len([*tmp_path.glob(f"runs/*/{name}/*.mp4")]) == 2


@pytest.mark.parametrize(("script", "step"), [(ppo, 13), (ppo_atari, 4), (ppo_gpu, 2)])
def test_ctrl_c_in_an_evaluation_ends_the_run_and_keeps_the_best_policy(script, step, tmp_path, monkeypatch):
    """It comes in a step of the second evaluation. The episodes that were played to their end choose nothing.

    In ppo.py, episodes of at most 12 steps follow each other; the others play all at once.
    """
    load_policy, policies = script.load_policy, []

    def interrupted(*arguments):
        policies.append(load_policy(*arguments))

        def policy(obs):
            count[0] += 1
            if len(policies) == 2 and count[0] == step:
                script.STOP.set()
            return policies[-1](obs)

        count = [0]
        return policy

    monkeypatch.setattr(script, "load_policy", interrupted)
    try:
        done = train(script, tmp_path, eval_every=1.0, **({"eval_episodes": 20} if script is ppo else {}))
    finally:
        script.STOP.clear()
    logged = curves(done.folder)
    steps = [*logged["losses/value_loss"]]
    assert done.content["state"]["global_step"] == steps[-1] == steps[1]
    assert [*logged["eval/greedy_return"]] == [done.content["state"]["best_step"]] == steps[:1]
    assert len(done.greedy_returns) == len(done.best_replayed) == 0
    monkeypatch.undo()
    more = train(script, tmp_path, eval_every=1.0, resume=str(done.path))
    assert len(more.best_replayed) == len(more.greedy_returns) > 0


@each_text
def test_the_best_policy_is_not_resumed(script, tmp_path):
    """A resumed run would write its checkpoints over it."""
    best = shutil.copy(train(script, tmp_path, total_timesteps=1).path, tmp_path / "best.pt")
    with pytest.raises(ValueError, match=r"best\.pt cannot be resumed"):
        train(script, tmp_path, resume=str(best), total_timesteps=1000)


@pytest.mark.parametrize(
    "script", [ppo, ppo_continuous, ppo_lstm, ppo_atari], ids=lambda script: script.__name__
)
def test_a_new_run_starts_from_the_best_policy(script, tmp_path):
    done = train(script, tmp_path, eval_every=1.0)
    best = done.folder / "best.pt"
    new = train(script, tmp_path, init=str(best), total_timesteps=1, learning_rate=0.0)
    weights = load(best)["agent"]
    assert all(same(new.content["agent"][name], x) for name, x in weights.items() if "moments" not in name)
    assert new.folder != done.folder
    assert new.best_return == -np.inf


def test_an_environment_that_trains_is_not_the_one_that_evaluates(tmp_path, monkeypatch):
    """An evaluation would disturb its episode."""
    env = ppo.make_env(ppo.Args())
    monkeypatch.setattr(ppo, "make_env", lambda args, **kwargs: env)
    with pytest.raises(ppo.Refused, match="a new environment in each call"):
        train(ppo, tmp_path, num_envs=1, eval_every=1.0)


# Environments on a GPU, where evaluations need environments of their own


def test_environments_that_cannot_exist_twice_fail_before_the_first_rollout(tmp_path, monkeypatch):
    made = []

    class Once(gpu_envs.Draws):
        def __init__(self, args):
            super().__init__(args)
            made.append(self)
            if len(made) > 1:
                raise RuntimeError("there is only one simulator")

    monkeypatch.setattr(gpu_envs, "Draws", Once)
    with pytest.raises(RuntimeError, match="only one simulator"):
        train(ppo_gpu, tmp_path, eval_every=1.0)
    assert not list(tmp_path.iterdir())


def test_environments_with_the_tensors_of_those_that_train_are_refused_in_one_line(tmp_path):
    """They are of one simulator, and an evaluation would break off its episodes."""
    case = SimpleNamespace(script=ppo_gpu, file="ppo_gpu.py")
    words = flags(env_id="gpu_envs:one_simulator", device="cpu", num_envs=4, num_steps=8, num_minibatches=2)
    done = call(case, tmp_path, *words, "--eval-every", 1)
    assert (done.status, done.out, list(tmp_path.iterdir())) == (2, "", [])
    assert done.err == "ppo_gpu.py: eval_envs has the tensors of envs, whose episodes must go on\n"


def test_a_program_gives_environments_to_evaluate_in(tmp_path, monkeypatch):
    """Those that train are not disturbed."""
    monkeypatch.chdir(tmp_path)
    args = ppo_gpu.Args(**SETTINGS[ppo_gpu], num_envs=4, num_steps=8, num_minibatches=2)
    args.eval_every, args.total_timesteps = 1.0, THREE
    envs, eval_envs = gpu_envs.Draws(args), gpu_envs.Draws(args)
    with pytest.raises(ValueError, match="train needs eval_envs"):
        ppo_gpu.train(args, envs)
    with pytest.raises(ValueError, match="has the tensors of envs"):
        ppo_gpu.train(args, envs, copy.copy(envs))
    with pytest.raises(ValueError, match="another obs_size"):
        ppo_gpu.train(args, envs, ppo_gpu.Pendulums(args))
    results = ppo_gpu.train(args, envs, eval_envs)
    monkeypatch.undo()
    other = train(ppo_gpu, tmp_path, eval_every=1.0, update_epochs=args.update_epochs)
    assert same(load(tmp_path / results["checkpoint"])["agent"], other.content["agent"])
