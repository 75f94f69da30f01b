"""The benchmarks: what is run, stored and reported, and that a runner which is killed loses nothing."""

from __future__ import annotations

import fnmatch
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import ale_py
import experiments
import figures
import gymnasium as gym
import language
import language_report
import numpy as np
import optimum
import pandas as pd
import pytest
import report
import run as runner
import torch
import tyro
from rliable.metrics import probability_of_improvement

import ppo
import ppo_atari
import ppo_continuous

gym.register_envs(ale_py)
ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {"ppo.py": ppo, "ppo_continuous.py": ppo_continuous, "ppo_atari.py": ppo_atari}

TINY = """
SB3["CartPole-v1"] = {"n_envs": 2, "n_steps": 64, "learning_rate": "linear 0.001", "normalize": True}
TASKS = [("CartPole-v1", 4_000), ("FrozenLake-v1", 4_000)]
EXPERIMENTS = {
    "tiny": Experiment("tiny", "", "ppo.py", each(TASKS, 3), "--eval-episodes 2"),
    "peer": Experiment("peer", "", "sb3", each([("CartPole-v1", 600)], 1)),
}
"""


@pytest.fixture
def copy(tmp_path):
    """A copy of ppo.py and the runner with a short list of experiments, without git and results."""
    (tmp_path / "benchmarks").mkdir()
    for path in ("ppo.py", *(f"benchmarks/{name}" for name in ("experiments.py", "run.py", "sb3.json"))):
        shutil.copy(ROOT / path, tmp_path / path)
    with open(tmp_path / "benchmarks/experiments.py", "a") as file:
        file.write(TINY)
    return tmp_path


def start(copy: Path, *flags: str) -> subprocess.Popen:
    """The runner, in a process group of its own."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "benchmarks/run.py", *flags]
    return subprocess.Popen(command, cwd=copy, start_new_session=True, **options)


def finish(copy: Path, *flags: str) -> tuple[int, str]:
    """Exit status and output of the runner."""
    process = start(copy, *flags)
    output, _ = process.communicate(timeout=200)
    return process.returncode, output


def results_in(copy: Path) -> dict[str, pd.Series]:
    """The rows of stored results, by the names of their runs."""
    path = copy / "benchmarks/results.csv"
    if not path.exists():
        return {}
    table = pd.read_csv(path)
    return {f"{row.experiment}/{row.env_id}_{row.steps}/{row.seed}": row for _, row in table.iterrows()}


@pytest.mark.slow
def test_a_killed_runner_does_what_is_missing(copy):
    """SIGKILL to the runner, or to it and its runs: in the end every result is there, each made once."""
    before: dict[str, pd.Series] = {}
    for kill in (os.kill, os.killpg):
        process = start(copy)
        while len(results_in(copy)) < len(before) + 2:
            assert process.poll() is None
            time.sleep(0.05)
        kill(process.pid, signal.SIGKILL)
        process.wait()
        before |= results_in(copy)
    status, output = finish(copy)
    assert (status, output.splitlines()[-1]) == (0, "7 of 7 stored")
    after = results_in(copy)
    seeds = {f"tiny/{env}_4000/{seed}" for env in ("CartPole-v1", "FrozenLake-v1") for seed in (1, 2, 3)}
    assert set(after) == seeds | {"peer/CartPole-v1_600/1"}
    for name, row in before.items():
        assert row.equals(after[name]), name  # what was stored was left alone
    for name, episodes in (("tiny/CartPole-v1_4000/1", 2), ("peer/CartPole-v1_600/1", 10)):
        assert after[name].episodes == episodes
        assert 0 < after[name].training <= 500
        assert after[name].seconds > 0
    assert len(pd.read_csv(copy / "benchmarks/curves.csv")) == 7
    assert finish(copy)[1] == "7 of 7 stored\n"


@pytest.mark.slow
def test_a_stopped_run_continues(copy):
    """Ctrl-C ends the runner and its runs; the run then continues from its checkpoint."""
    with open(copy / "benchmarks/experiments.py", "a") as file:
        file.write('TASKS = [("CartPole-v1", 40_000, 1)]\n')
        file.write('EXPERIMENTS["long"] = Experiment("long", "", "ppo.py", TASKS, "--eval-episodes 2")\n')
    folder = copy / "benchmarks/unfinished/long/CartPole-v1_40000/1"
    process = start(copy, "--only", "long")
    while not (folder / "log.txt").exists() or " steps  return" not in (folder / "log.txt").read_text():
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    with pytest.raises(ProcessLookupError):  # no process of the group is left
        os.killpg(process.pid, 0)
    assert not results_in(copy)
    status, output = finish(copy, "--only", "long")
    assert status == 0, output
    assert results_in(copy)["long/CartPole-v1_40000/1"].sessions == 2
    assert len(set(re.findall(r"folder +(\S+)", (folder / "log.txt").read_text()))) == 1
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_run_that_was_stopped_in_its_evaluation(copy, monkeypatch):
    """Training is complete: only the evaluation is done again."""
    folder = copy / "benchmarks/unfinished/tiny/CartPole-v1_4000/1"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    trained = ppo.train(ppo.Args(env_id="CartPole-v1", total_timesteps=4_000, seed=1, eval_episodes=2))
    status, output = finish(copy, "--only", "tiny/CartPole-v1_4000/1")
    assert status == 0, output
    row = results_in(copy)["tiny/CartPole-v1_4000/1"]
    assert row.greedy == pytest.approx(trained["greedy_returns"].mean(), abs=1e-3)
    assert "rollout" not in (folder / "log.txt").read_text()  # no training


@pytest.mark.slow
def test_listing_one_and_failing(copy):
    """--dry-run only lists; --one does a run alone, from anywhere; a failing run is named; refusals."""
    with open(copy / "benchmarks/experiments.py", "a") as file:
        file.write('EXPERIMENTS["bad"] = Experiment("bad", "", "ppo.py", [("NoSuch-v0", 4_000, 1)])\n')
    _, output = finish(copy, "--dry-run", "--only", "*/[12]")
    assert (output.count("missing"), output.splitlines()[-1]) == (6, "0 of 6 stored")
    one = [sys.executable, str(copy / "benchmarks/run.py"), "--one", "tiny/FrozenLake-v1_4000/1"]
    subprocess.run(one, cwd="/", check=True, capture_output=True)
    assert set(results_in(copy)) == {"tiny/FrozenLake-v1_4000/1"}
    status, output = finish(copy, "--only", "bad")
    assert status == 1
    assert "bad/NoSuch-v0_4000/1 failed" in output
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    status, output = finish(copy)
    assert status == 1
    assert "commit first" in output


@pytest.mark.slow
def test_list_of_experiments_is_sound():
    """No two runs share a file; flags are accepted; environments exist; what studies compare is run."""
    listed = experiments.runs()
    assert len({run.name for run in listed}) == len(listed)
    for run in {(run.experiment.name, run.env_id): run for run in listed}.values():
        assert gym.make(run.env_id).spec
        if run.experiment.script != "sb3":
            script = SCRIPTS[run.experiment.script]
            script.check_args(tyro.cli(script.Args, args=run.arguments))
    have = {(run.experiment.name, (run.env_id, run.steps)) for run in listed}
    for study in experiments.STUDIES.values():
        assert {(name, task) for name in study.experiments for task in study.tasks} <= have


def test_stored_results_are_those_of_the_list():
    """Each row is of a listed run with its flags, each once, with its commit and its curve."""
    listed = {run.key: run for run in experiments.runs()}
    table = pd.read_csv(runner.RESULTS, keep_default_na=False)
    curves = pd.read_csv(runner.CURVES)
    assert not table.duplicated(runner.KEY).any()
    for row in table.itertuples():
        run = listed[row.experiment, row.env_id, row.steps, row.seed]
        assert row.flags == run.flags, run.name
        assert len(row.commit) == 40
    keys = set(map(tuple, table[runner.KEY].to_numpy()))
    assert set(map(tuple, curves[curves.quantity == "return"][runner.KEY].to_numpy())) == keys


def test_thin():
    """Means over equal parts of the steps, the last with what is beyond; nan where there is none."""
    steps = np.array([1, 20, 21, 60, 1000, 1010])
    thinned = runner.thin(steps, np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]), 1000).split()
    assert len(thinned) == 50
    assert thinned[:4] == ["1.5", "3", "4", "nan"]
    assert thinned[-1] == "5.5"


def test_statistics_of_the_tables():
    """The probability of improvement, against rliable's, and the spread."""
    ours, theirs = np.arange(16.0).reshape(8, 2), np.array([[0, 1], [4, 5.5], [4.5, 20], [9, 12]])
    value, low, high = report.interval(report.probability_of_improvement, ours, theirs)
    assert value == pytest.approx(probability_of_improvement(ours, theirs))
    assert low < value < high
    assert report.spread(np.array([2.0, 4.0, 9.0])) == f"5.0 ± {math.sqrt((9 + 1 + 16) / 2):.1f}"


@pytest.mark.slow
def test_tables_match_the_stored_results():
    """The tables in the files are those that report.py makes."""
    made, marks = report.tables(), set()
    for path in (ROOT / "README.md", ROOT / "benchmarks/README.md"):
        text = path.read_text()
        assert report.fill(text, made) == text, f"run python benchmarks/report.py: {path} is out of date"
        marks |= set(re.findall(r"<!-- table: ([\w-]+) -->", text))
    assert marks == made.keys()


def test_fill_changes_nothing_but_the_tables():
    """Empty and filled marks get their tables; the text around them stays."""
    made, document = {"x": "| 1 |\n| 2 |"}, "a\n<!-- table: x -->\n{}<!-- end -->\nb"
    for before in ("", "| old |\n\n"):
        assert report.fill(document.format(before), made) == document.format("| 1 |\n| 2 |\n")


@pytest.mark.slow
def test_figures(tmp_path):
    """Figures are drawn in two themes, and the committed files are those."""
    figures.draw(tmp_path)
    language_report.draw(*language_report.load(), tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    names = {*experiments.STUDIES, "classic", "mujoco", "atari", "objective", "gae"}
    names |= {"language", "language-comparison"}
    assert made == {f"{name}-{theme}.png" for name in names for theme in ("light", "dark")}
    committed = {path.name for path in (ROOT / "benchmarks/figures").iterdir()}
    assert committed == made | {"trl-light.png", "trl-dark.png"}


@pytest.mark.slow
def test_throughput_command(copy):
    """A round compares two copies of a script with the peer, and stores nothing."""
    before = (ROOT / "benchmarks/throughput.json").read_bytes()
    flags = ["--env-id", "CartPole-v1", "--num-envs", "2", "--rounds", "1", "--timesteps", "1024"]
    command = [sys.executable, str(ROOT / "benchmarks/throughput.py"), *flags, "--script-dir", str(copy)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for variant in ("eager", "Stable-Baselines3"):
        row = rf"\| CartPole-v1, N = 2 \| {variant} \| ([\d,]+) \|"
        speeds = [int(speed.replace(",", "")) for speed in re.findall(row, output)]
        assert len(speeds) == 2
        assert min(speeds) > 100
    assert (ROOT / "benchmarks/throughput.json").read_bytes() == before


def test_commands_in_the_readmes_select_runs():
    """Each value of --only is that of some runs."""
    names = [run.name for run in experiments.runs()]
    for path in (ROOT / "README.md", ROOT / "benchmarks/README.md"):
        text = re.sub(r"git worktree .*", "", path.read_text())  # those of another commit
        for only in re.findall(r"run\.py --only '?([^\s'`]+)", text):
            assert any(name.startswith(only) or fnmatch.fnmatch(name, only) for name in names), only


# Language models


def test_language_tables_are_up_to_date():
    """The tables of the page are those that language_report.py makes."""
    made = language_report.tables(*language_report.load())
    text = language_report.PAGE.read_text()
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", text)) == made.keys()
    assert report.fill(text, made) == text, "run python benchmarks/language_report.py"


def test_language_studies():
    """Their scripts accept their flags, and the stored runs are theirs, each once, with its curve."""
    studies = {study.name: study for study in language.STUDIES}
    assert len(studies) == len(language.STUDIES)
    for study in language.STUDIES:
        study.script.check_args(tyro.cli(study.script.Args, args=study.flags.split()))
    runs, curves = pd.read_csv(language.RUNS, keep_default_na=False), pd.read_csv(language.CURVES)
    assert not runs.duplicated(["study", "seed"]).any()
    for run in runs.itertuples():
        study = studies[run.study]
        assert (run.script, run.task) == (study.script.__name__, study.task)
        assert (run.flags, run.fault) == (study.flags, study.fault)
        assert run.seed in study.seeds
        points = curves[(curves.study == run.study) & (curves.seed == run.seed)]
        assert points.episodes.tolist() == list(range(0, run.episodes + 1, language.SPACING))


@pytest.fixture
def quick(monkeypatch):
    """Supervised models and reward models learn nothing."""
    for script in (language.rlhf, language.grpo):
        fit = script.fit
        monkeypatch.setattr(
            script, "fit", lambda network, loss, _, rate, name, fit=fit: fit(network, loss, 2, rate, name)
        )
    language.base_models.cache_clear()
    yield
    language.base_models.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo-reviews", "ppo-sums", "grpo-reviews", "grpo-sums", "k3-in-reward"])
def test_language_run(name, quick, monkeypatch):
    """Each script runs on each task; the script and the models of the seed are afterwards as before."""
    monkeypatch.setattr(language, "compare_with_optimum", lambda *_: {"share_of_optimum": 0.5})
    study = next(study for study in language.STUDIES if study.name == name)
    models, _ = language.base_models(study.task, 1)
    weights = {name: x.clone() for name, x in models.state_dict().items()}
    before = dict(vars(study.script))
    flags = f"{study.flags} --total-episodes 5120 --num-minibatches 1 --micro-batch-size 512"
    result, points = language.run_study(study._replace(flags=flags), 1)
    assert dict(vars(study.script)) == before
    assert all(torch.equal(x, weights[name]) for name, x in models.state_dict().items())
    assert result.keys() <= set(language.RUN_COLUMNS.split())
    assert points[0].keys() <= set(language.CURVE_COLUMNS.split())
    assert [point["episodes"] for point in points] == [0, 2560, 5120]
    assert 5120 < result["tokens"] <= language.LONGEST[study.task] * 5120
    assert result["gradient_steps"] == (40 if study.script is language.rlhf else 20)


def test_reviews_have_the_same_scores_for_grpo(quick):
    """As a reward function of texts, with the penalty for missing stop tokens."""
    models, task = language.base_models("reviews", 1)
    rows, args = task.prompts * 4, language.rlhf.Args()
    _, for_grpo = language.for_grpo(models, task, language.grpo.Args())
    responses, _ = language.rlhf.generate(models.actor, task, rows, args)
    rewards = language.rlhf.score(models, task, rows, responses, args)
    assert {0.0, -2.0} == set(rewards["missing_eos"].tolist())
    texts = language.rlhf.decode(task.tokenizer, responses)
    scores = for_grpo.reward_functions["review_score"](rows, texts)
    torch.testing.assert_close(scores, sum(rewards.values()))


def test_k3_in_the_reward():
    """The fault changes what the script computes."""
    kl, mask = torch.tensor([[0.5, -0.5]]), torch.ones(1, 2, dtype=torch.bool)
    rewards = language.k3_in_reward(torch.zeros(1), kl, mask, 1.0)
    assert rewards.flatten().tolist() == pytest.approx([1 - math.exp(-0.5) - 0.5, 1 - math.exp(0.5) + 0.5])


def test_best_score_at_the_same_kl():
    """A trained policy scores at most as much as the best one of its KL; no policy has a higher J than π*."""
    torch.manual_seed(1)
    args = language.rlhf.Args(resume="so that nothing is learnt", max_response_length=2)
    models, task = language.rlhf.make_reviews(args)
    for parameter in (*models.actor.parameters(), *models.reward_model.parameters()):
        parameter.data += 0.1 * torch.randn_like(parameter)
    task = task._replace(prompts=task.prompts[:2])
    found = optimum.compare_with_optimum(models, task, args, 0.3, floor=1e-30)
    assert found["left_out"] == pytest.approx(0, abs=1e-9)
    assert found["best_score_at_kl"] > found["score"]
    ref, scores = torch.log_softmax(torch.randn(50).double(), 0), torch.randn(50).double()
    score, kl = optimum.best_policy([[ref, ref, scores]], 0.5)
    for _ in range(100):
        other = torch.log_softmax(ref + scores / 0.5 + 0.1 * torch.randn(50).double(), 0)
        other_score, other_kl = optimum.score_and_kl([[ref, other, scores]], [other])
        assert other_score - 0.5 * other_kl < score - 0.5 * kl


def test_optimum_of_other_checkpoints(tmp_path):
    """Only those of ppo_rlhf.py on its reviews are accepted."""
    for settings in ({"model": "gpt2", "kl_target": None}, {"model": None}):  # the second is of grpo.py
        torch.save({"args": settings}, tmp_path / "checkpoint.pt")
        with pytest.raises(ValueError, match="only these can be enumerated"):
            optimum.load(tmp_path / "checkpoint.pt")
