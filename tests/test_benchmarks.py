"""Tests of the benchmarks: their lists, stored results, statistics and pages."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib
import itertools
import math
import re
import sys
from pathlib import Path

import ale_py
import arms
import experiments
import gymnasium as gym
import language
import numpy as np
import pandas as pd
import pytest
import run as runner
import torch
import tyro
from helpers import check

gym.register_envs(ale_py)
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def report():
    """Import report.py only if a test needs it: that takes seconds."""
    return importlib.import_module("report")


@pytest.mark.nightly
@pytest.mark.parametrize("only", ["pendulum", "language-ours"])
def test_the_small_version_of_a_gpu_measurement_prints_its_numbers(only, monkeypatch, capsys):
    pytest.importorskip("datasets")
    import gpu

    monkeypatch.setattr(sys, "argv", ["gpu.py", "--only", only, "--small"])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    shown = capsys.readouterr().out
    assert end.value.code == 0, shown
    lines = re.findall(rf"^{only}.*", shown, re.MULTILINE)
    assert len(lines) == 1
    for line in lines:
        assert re.search(r"seconds [\d.e-]+  .*speed [\d,.]+  .*memory [\d.]+", line)


@pytest.mark.slow
def test_the_sweep_over_model_types_tells_refused_from_wrong_ones(tmp_path, monkeypatch, capsys):
    """Without the scripts' own check, a model to which padding matters is found to be wrong."""
    pytest.importorskip("transformers")
    import model_types

    import grpo

    monkeypatch.setattr(model_types, "FILE", tmp_path / "types.csv")
    monkeypatch.setattr(sys, "argv", ["model_types.py", "gpt2", "roberta"])
    model_types.main()
    monkeypatch.setattr(grpo, "check_actor", lambda *given: None)
    monkeypatch.setattr(sys, "argv", ["model_types.py", "roberta"])
    model_types.main()
    rows = re.findall(r"^(\w+)  grpo  (\w+)", capsys.readouterr().out, re.MULTILINE)
    assert rows == [("gpt2", "agree"), ("roberta", "refused"), ("roberta", "WRONG")]


@pytest.mark.slow
def test_listed_experiments_have_names_of_their_own_and_flags_that_their_scripts_accept():
    """Their environments exist, and studies compare listed runs."""
    listed = experiments.runs()
    assert len({run.name for run in listed}) == len(listed)
    for run in {(run.experiment.name, run.env_id): run for run in listed}.values():
        if run.experiment.program == "memory.py" or run.experiment.commit:  # not installed, or not here
            continue
        if run.experiment.script == "sb3":
            assert gym.make(run.env_id).spec
        elif run.experiment.script.endswith(".py"):
            with experiments.script_of(run) as script:
                check(script, tyro.cli(script.Args, args=run.arguments))
    have = {(run.experiment.name, (run.env_id, run.steps)) for run in listed}
    for study in experiments.STUDIES.values():
        assert {(name, task) for name in study.experiments for task in study.tasks} <= have


def test_each_stored_result_is_of_a_listed_run_with_its_flags_and_curve():
    listed = {run.key: run for run in experiments.runs()}
    table = pd.read_csv(runner.RUNS, keep_default_na=False)
    curves = pd.read_csv(runner.CURVES)
    assert not table.duplicated(runner.KEY).any()
    for row in table.itertuples():
        run = listed[row.experiment, row.env_id, row.steps, row.seed]
        assert row.flags == run.flags, run.name
        assert len(row.commit) == 40
    programs = {name: experiment.program for name, experiment in experiments.EXPERIMENTS.items()}
    with_curves = table[table.experiment.map(programs) != "memory.py"]
    keys = set(map(tuple, with_curves[runner.KEY].to_numpy()))
    assert set(map(tuple, curves[curves.quantity == "return"][runner.KEY].to_numpy())) == keys


@pytest.mark.slow
def test_the_probability_of_improvement_equals_rliables(report):
    from rliable.metrics import probability_of_improvement

    ours, theirs = np.arange(16.0).reshape(8, 2), np.array([[0, 1], [4, 5.5], [4.5, 20], [9, 12]])
    value, low, high = report.interval(report.probability_of_improvement, ours, theirs)
    assert value == pytest.approx(probability_of_improvement(ours, theirs))
    assert low < value < high
    assert report.spread(np.array([2.0, 4.0, 9.0])) == f"5.0 ± {math.sqrt((9 + 1 + 16) / 2):.1f}"


@pytest.mark.slow
def test_the_mean_over_tasks_counts_tasks_alike_whatever_their_numbers_of_seeds(report):
    """Its interval is that of all ways to draw seeds."""
    tasks = [(np.array([1.0, 5, 6]), np.array([2, 4, 5.5])), (np.array([3.0, 8]), np.array([3.0, 9]))]
    by_hand = (5 / 9 + 1.5 / 4) / 2  # pairs that are won; a tie is half of one
    seeds = [scores for task in tasks for scores in task]
    means = []
    for drawn in itertools.product(*(itertools.product(scores, repeat=len(scores)) for scores in seeds)):
        wins = [[(a > b) + (a == b) / 2 for a in x for b in y] for x, y in (drawn[:2], drawn[2:])]
        means.append(np.mean([np.mean(won) for won in wins]))
    low, high = np.quantile(means, [0.025, 0.975])
    assert report.mean_chance(tasks) == f"{by_hand:.2f} [{low:.2f}, {high:.2f}]"


@pytest.mark.slow
def test_the_tables_of_the_pages_are_those_of_the_stored_results_and_of_the_code(report):
    """Each committed figure is shown, and each figure that a page shows is committed."""
    import language_report

    made = report.tables()
    for path in report.PAGES:
        text = path.read_text()
        assert report.fill(text, made) == text, f"run python benchmarks/report.py: {path} is out of date"
    made, text = language_report.tables(*language_report.load()), language_report.PAGE.read_text()
    assert report.fill(text, made) == text, "run python benchmarks/language_report.py"
    pages = "".join(path.read_text() for path in (*report.PAGES, *ROOT.glob("docs/*.md")))
    committed = {path.name for path in experiments.FIGURES.iterdir()}
    assert set(re.findall(r"figures/([\w-]+\.\w+)", pages)) == committed


@pytest.mark.slow
def test_each_figure_has_curves(report):
    """Of stored results, and of the scripts' equations."""
    import figures

    made = figures.figures(report.load())
    assert {"gae", "objective", "reinforce"} <= made.keys()
    for name, figure in made.items():
        assert any(axes.lines or axes.patches for axes in figure.axes), name


@pytest.mark.slow
def test_each_only_flag_on_the_pages_selects_runs(report):
    names = [run.name for run in experiments.runs()]
    for path in report.PAGES:
        for only in re.findall(r"run\.py --only '?([^\s'`]+)", path.read_text().replace("--only NAME", "")):
            assert any(name.startswith(only) or fnmatch.fnmatch(name, only) for name in names), only


def test_each_stored_run_of_a_language_model_is_of_a_study_with_its_flags_and_curve():
    studies = {study.name: study for study in language.STUDIES}
    assert len(studies) == len(language.STUDIES)
    for study in language.STUDIES:
        check(study.script, tyro.cli(study.script.Args, args=study.flags.split()))
    runs, curves = pd.read_csv(language.RUNS, keep_default_na=False), pd.read_csv(language.CURVES)
    assert not runs.duplicated(["study", "seed"]).any()
    for run in runs[runs.task.isin(["reviews", "sums"])].itertuples():
        study = studies[run.study]
        assert (run.script, run.task) == (study.script.__name__, study.task)
        assert (run.flags, run.fault) == (study.flags, study.fault)
        assert run.seed in study.seeds
        points = curves[(curves.study == run.study) & (curves.seed == run.seed)]
        assert points.episodes.tolist() == list(range(0, run.episodes + 1, language.SPACING))


def test_planted_bugs_fit_the_scripts_and_flags_of_all_runs_are_theirs(report):
    """What a bug replaces is in its script once, and a bug changes the text or the flags."""
    verdicts = report.verdicts
    cases = verdicts.cases()
    assert len({case.folder for case in cases}) == len(cases)
    for case in cases:
        text = verdicts.text_of(case)
        compile(text, case.script, "exec")
        assert bool(case.changes) == (text != (ROOT / f"{case.script}.py").read_text())
        if case.bug and not case.changes:
            assert case.flags != verdicts.TASKS[case.script]
        script = importlib.import_module(case.script)
        tyro.cli(script.Args, args=[*case.flags.split(), "--seed", str(case.seed)])


@pytest.mark.slow
@pytest.mark.parametrize("bug", ["", "the ratio is always 1"])
def test_a_run_is_done_and_judged(bug, report, tmp_path, monkeypatch):
    verdicts = report.verdicts
    monkeypatch.setattr(verdicts, "RUNS", tmp_path)
    changes = (verdicts.BUGS[bug]["ppo_minimal"],) if bug else ()
    case = verdicts.Case("ppo_minimal", "--total-timesteps 10240", 1, bug, changes)
    verdicts.do(case)
    rows = verdicts.judge(case)
    assert {row["iterations"] for row in rows} == {10}
    assert ("WRONG" in {row["verdict"] for row in rows}) == bool(bug)


def changed(name: str):
    """ppo_continuous.py, and its names that a change of arms.py replaces."""
    import ppo_continuous

    return ppo_continuous, arms.CHANGES[name](ppo_continuous)


def test_the_beta_policy_equals_pytorchs_distributions():
    _, names = changed("beta-policy")
    torch.manual_seed(0)
    old, new = 1 + 5 * torch.rand(2, 7, 6, dtype=torch.float64)
    betas = [torch.distributions.Beta(*policy.chunk(2, -1)) for policy in (old, new)]
    x = betas[0].sample()  # in 0 to 1; actions are in -1 to 1, so densities are half of it
    expected = (betas[0].log_prob(x) - math.log(2)).sum(-1)
    torch.testing.assert_close(names["log_prob"](old, 2 * x - 1), expected)
    torch.testing.assert_close(names["entropy"](old), (betas[0].entropy() + math.log(2)).sum(-1))
    kl = torch.distributions.kl_divergence(*betas).sum(-1)
    torch.testing.assert_close(names["kl_divergence"](old, new), kl)
    torch.testing.assert_close(names["most_likely"](old), 2 * betas[0].mean - 1)
    actions = names["sample"](old.expand(20_000, 7, 6))
    torch.testing.assert_close(actions.mean(0), 2 * betas[0].mean - 1, atol=0.02, rtol=0)


def test_coloured_noise_has_variance_1_and_the_spectrum_of_its_exponent():
    """Its correlations are those of the spectrum. The last step of a rollout is hardly like the first."""
    torch.manual_seed(0)
    noise = arms.coloured(256, 2000, 6, exponent=0.5)
    assert noise.var().item() == pytest.approx(1, abs=0.01)
    frequencies = np.abs(np.fft.fftfreq(512))
    frequencies[0] = frequencies[1]
    expected = np.fft.ifft(frequencies**-0.5).real
    for lag in (1, 2, 10, 100, 255):
        found = (noise[lag:] * noise[:-lag]).mean().item()
        assert found == pytest.approx(expected[lag] / expected[0], abs=0.02), lag
    assert abs(expected[255] / expected[0]) < 0.02


def test_normalised_targets_keep_values_and_scale_the_loss():
    script, names = changed("popart")
    agent = names["Agent"](script.Args(), gym.spaces.Box(-1, 1, (4,)), 2)
    torch.manual_seed(0)
    obs, returns = torch.randn(64, 4), 100 + 30 * torch.randn(64)
    before = agent.value(obs)
    with torch.no_grad():
        agent.include(returns)
    torch.testing.assert_close(agent.value(obs), before, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(agent.target_std(), returns.std(correction=0))
    policy = agent.policy(obs).detach()
    batch = script.Batch(obs, script.sample(policy), policy, before, returns, returns, returns)
    state = script.State(0.1, 0.2, 1, 0)
    _, metrics = names["ppo_loss"](agent, batch, script.Args(), state)
    expected = 0.5 * ((before - returns) / returns.std(correction=0)).square().mean()
    torch.testing.assert_close(metrics["value_loss"], expected)


def test_the_moments_of_targets_stay_exact_where_the_mean_is_large():
    script, names = changed("popart")
    agent = names["Agent"](script.Args(), gym.spaces.Box(-1, 1, (4,)), 2)
    for _ in range(100):
        agent.include(100 + 0.5 * torch.randn(2048))
    assert agent.target_mean.item() == pytest.approx(100, abs=0.02)
    assert agent.target_std().item() == pytest.approx(0.5, abs=0.02)
    for _ in range(200):
        agent.include(torch.full((2048,), 100.0))
    assert agent.target_std().item() == pytest.approx(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["", *arms.CHANGES])
def test_each_arm_trains_as_it_says(name, tmp_path, monkeypatch):
    """For three iterations of Pendulum. Resumed, it goes on as such."""
    monkeypatch.chdir(tmp_path)
    flags = "--num-steps 64 --num-minibatches 4 --update-epochs 2 --eval-episodes 1"
    arm = experiments.Experiment("arm", "", "ppo_continuous.py", [], flags, change=name)
    run = experiments.Run(arm, "Pendulum-v1", 1024, 1)
    with experiments.script_of(run) as script:
        args = tyro.cli(script.Args, args=run.arguments)
        last = Path(script.train(args)["checkpoint"])
    if name == "averaged":  # another policy, with the same normalisers
        played, weights = (torch.load(file)["agent"] for file in (last.with_name("averaged.pt"), last))
        assert not torch.equal(played["actor.0.weight"], weights["actor.0.weight"])
        assert torch.equal(played["obs_moments.mean"], weights["obs_moments.mean"])
    with experiments.script_of(run) as script:
        results = script.train(dataclasses.replace(args, resume="latest", total_timesteps=1536))
    content = torch.load(results["checkpoint"], weights_only=True)
    adam, settings = content["optimizer"], content["args"]
    assert tuple(adam["param_groups"][0]["betas"]) == (
        (0.99, 0.99) if name == "equal-betas" else (0.9, 0.999)
    )
    assert adam["state"][1]["step"] == (8 if name == "relative-time" else 24)
    assert settings["gamma"] == pytest.approx(1 - 0.01 * 0.1 ** (2 / 3) if name == "rising-horizon" else 0.99)
    assert ("averaged_returns" in results) == (name == "averaged")
    assert ("target_mean" in content["agent"]) == (name == "popart")


def made_up(rows: list[tuple], **columns) -> pd.DataFrame:
    """Stored results: experiment, environment, seed and final return of runs of a million steps."""
    table = pd.DataFrame(rows, columns=["experiment", "env_id", "seed", "greedy"])
    return table.assign(
        steps=1_000_000,
        sessions=1,
        training=table.greedy,
        best=np.nan,
        averaged=np.nan,
        sampled=np.nan,
        **columns,
    )


def test_bold_and_ahead_compare_final_policies_alone(report):
    """On Hopper, XuanCe's last policies have 2,132.5, the RL Zoo's 2,410.4, and others' best 3,450."""
    hopper, swimmer = ("Hopper-v5", 1_000_000), ("Swimmer-v5", 1_000_000)
    ours = [("now-continuous", hopper[0], seed, 2000.0 + 400 * seed) for seed in (1, 2)]
    ours += [("now-continuous", swimmer[0], seed, 50.0) for seed in (1, 2)]
    results = made_up(ours).assign(sampled=[2200, 2200, 40, 60])
    (row,) = report.returns(results, ["now-continuous"], [hopper], "sb3-rl-zoo-mujoco")
    assert row["final"] == "**2600.0 ± 282.8**"
    assert "**" not in row["XuanCe, final"] + row["published, final"] + row["published, other protocols"]
    assert "[3450.1](" in row["published, other protocols"]
    assert "[2410.4 ± 10.0](" in row["published, final"]
    said = report.standing(results)
    assert "On 1 of 2" in said
    assert "behind on Swimmer (50.0; RL Zoo: 281.6)" in said
    assert "behind XuanCe on Swimmer (50.0; 83.8)." in said
    assert "Hopper" not in said
    said = report.standing(results.assign(sampled=[2000, 2000, 90, 90]))
    assert "behind XuanCe on Hopper (2,000.0; 2,132.5)." in said
    results = made_up([*ours, ("sb3-rl-zoo-mujoco", hopper[0], 1, 3000.0)])
    (row,) = report.returns(results, ["now-continuous"], [hopper], "sb3-rl-zoo-mujoco")
    assert row["Stable-Baselines3 here"].startswith("**3000.0**")
    assert row["final"] == "2600.0 ± 282.8"
    said = report.standing(results)
    assert "Hopper (2,600.0; Stable-Baselines3 here: 3,000.0)" in said
    assert "above all of Stable-Baselines3's on none." in said


def test_an_equal_return_is_not_ahead_and_overlapping_seeds_are_not_apart(report):
    """On InvertedPendulum, XuanCe has 1,000, too. Reacher's seeds overlap; Pusher's do not."""
    ours = {"InvertedPendulum-v5": (1000.0, 1000.0), "Reacher-v5": (-3.5, -3.9), "Pusher-v5": (-25.0, -26.0)}
    theirs = {"InvertedPendulum-v5": (900.0, 1000.0), "Reacher-v5": (-3.8, -4.4), "Pusher-v5": (-26.5, -30.0)}
    named = ("now-continuous", ours), ("sb3-rl-zoo-mujoco", theirs)
    rows = [
        (name, env_id, seed, final)
        for name, tasks in named
        for env_id, seeds in tasks.items()
        for seed, final in enumerate(seeds)
    ]
    said = report.standing(made_up(rows))
    assert "On 2 of 3" in said
    assert "equal to the highest on InvertedPendulum (XuanCe), and behind on none" in said
    assert "above all of Stable-Baselines3's on Pusher." in said


def test_best_policies_are_counted_by_their_returns_in_new_episodes(report):
    """Of four runs, the last policy is the best one in one; in another, it is the better one after all."""
    rows = [
        ("now-continuous", "Hopper-v5", seed, final)
        for seed, final in enumerate((1000.0, 900.0, 500.0, 800.0))
    ]
    rows += [("now-continuous", "Pendulum-v1", 1, -150.0), ("now-swimmer", "Swimmer-v5", 1, 300.0)]
    best, steps = [1000.0, 901.0, 650.0, 700.0, -10.0, 400.0], [1_001_472, *[500_000] * 5]
    said = report.kept(made_up(rows).assign(best=best, best_step=steps))
    assert "Of 4 runs" in said
    assert "the last policy is the best one in 1." in said
    assert "better than the last policy in 2 of the others, and worse in 1:" in said
    assert "better in 1 and worse in 1." in said
    assert said.endswith("Hopper 2 (500, then 650).")


def test_plain_ppo_stands_beside_the_defaults_of_its_own_script(report):
    """Today's rows alone: those of the earlier text have the same settings and another name."""
    rows = [("now-plain-ppo_continuous-cleanrl", "Hopper-v5", seed, 3000.0) for seed in (301, 302)]
    rows += [
        ("plain-ppo_continuous-cleanrl", "Hopper-v5", 1, 9000.0),
        ("now-continuous", "Hopper-v5", 1301, 3100.0),
    ]
    rows += [("now-plain-ppo-cleanrl", "Acrobot-v1", 301, -80.0), ("now-classic", "Acrobot-v1", 101, -76.0)]
    results = made_up(rows).assign(steps=[*[1_000_000] * 4, 500_000, 500_000])
    table = {(row["environment, steps"], row["settings of"]): row for row in report.plain_table(results)}
    hopper, acrobot = table["Hopper-v5, 1M", "CleanRL"], table["Acrobot-v1, 500k", "CleanRL"]
    assert (hopper["seeds"], hopper["final"], hopper["final, our defaults"]) == (
        "2",
        "3000.0 ± 0.0",
        "3100.0",
    )
    assert (acrobot["final"], acrobot["final, our defaults"]) == ("-80.0", "-76.0")


def test_rows_of_today_replace_earlier_ones_once_a_task_has_all_its_seeds(report):
    """Earlier tables become a sentence, which compares final returns; single seeds are listed by theirs."""
    hopper, swimmer = ("Hopper-v5", 1_000_000), ("Swimmer-v5", 1_000_000)
    names = experiments.NOW + experiments.LAST
    before = [("continuous", hopper[0], seed, 6000.0 - 1000 * seed) for seed in (3, 1, 5, 4, 2)]
    before += [("continuous", swimmer[0], seed, 60.0) for seed in (1, 2)]
    before += [("continuous-swimmer", swimmer[0], seed, 300.0) for seed in (1, 2)]
    now = [("now-swimmer", swimmer[0], seed, 310.0) for seed in range(5)]
    now += [("now-continuous", hopper[0], seed, 3504.0 - seed) for seed in (4, 0, 3, 2, 1)]
    flag = "P is 1.00 [1.00, 1.00] (Swimmer-v5, 1M, `--gamma 0.999`)"
    both = "P is 0.80 [0.60, 1.00], from 0.60 (Hopper-v5, 1M) to 1.00 (Swimmer-v5, 1M, `--gamma 0.999`)"
    for done, (seeds, final) in {9: ("5 (earlier text)", "**3000.0"), 10: ("5", "**3502.0")}.items():
        results = made_up([*before, *now[:done]])
        (row,) = report.returns(results, names, [hopper], "sb3-rl-zoo-mujoco")
        assert (row["seeds"], row["final"].split(" ± ")[0]) == (seeds, final)
        said = report.earlier_tables(results, experiments.EARLIER_TABLES["earlier-mujoco"])
        assert said.endswith(f": {both if done == 10 else flag}."), said
        listed = {row["environment, steps"]: row for row in report.seeds_table(results)}
        assert bool(listed["Hopper-v5, 1M"]["final"]) == (done == 10)
    alone = made_up(now[5:6])  # without earlier rows, what there is counts
    assert report.newest(alone, names, hopper) == {"the defaults": "now-continuous"}
    results.loc[results.experiment == "now-continuous", "best"] = [4000.0, 3700.0, 3800.0, 3900.0, np.nan]
    listed = {row["environment, steps"]: row for row in report.seeds_table(results)}
    assert listed["Hopper-v5, 1M"] == {
        "environment, steps": "Hopper-v5, 1M",
        "final, earlier text": "1000, 2000, 3000, 4000, 5000",
        "final": "3500, 3501, 3502, 3503, 3504",
        "best": "4000, 3800, 3900, –, 3700",
    }


def test_a_figure_has_one_curve_of_a_label_that_of_todays_rows(report):
    import figures

    hopper = ("Hopper-v5", 1_000_000)
    rows = [("continuous", hopper[0], seed, 1.0) for seed in range(3)]
    rows += [("now-continuous", hopper[0], seed, 1.0) for seed in range(5)]
    results = made_up(rows)
    results["return"] = [np.full(50, float(name == "now-continuous")) for name in results.experiment]
    labels = dict.fromkeys(("now-continuous", "continuous"), "ours")
    figure = figures.learning_curves(results, labels, [(hopper, "return")], 1, False)
    (line,) = figure.axes[0].lines
    assert (line.get_ydata() == 1).all()


@pytest.mark.slow
def test_a_run_stores_the_last_and_the_best_policys_returns_and_those_of_sampled_actions(
    tmp_path, monkeypatch
):
    """As the script's own evaluation has them; the same if it was stopped in its evaluation."""
    import ppo_continuous

    monkeypatch.setattr(runner, "HERE", tmp_path)
    flags = "--num-steps 128 --eval-every 2048 --eval-episodes 2"
    experiment = experiments.Experiment("now-test", "", "ppo_continuous.py", [], flags)
    run = experiments.Run(experiment, "Pendulum-v1", 4096, 1)
    first, curves = runner.run_ours(run)
    again, _ = runner.run_ours(run)
    names = "greedy", "best", "best_step", "best_chosen", "sampled"
    for name in names:
        np.testing.assert_array_equal(first[name], again[name])
    (last,) = (tmp_path / "unfinished").rglob("checkpoint.pt")
    args = tyro.cli(ppo_continuous.Args, args=run.arguments)
    for file, name in (("checkpoint.pt", "greedy"), ("best.pt", "best")):
        np.testing.assert_array_equal(ppo_continuous.evaluate(last.with_name(file), args), first[name])
    assert not np.array_equal(first["sampled"], first["greedy"])
    assert first["best_step"] in (2048, 4096)
    assert len(curves["return"].split()) == runner.POINTS


def test_xuances_returns_are_those_of_the_last_and_of_each_seeds_best_evaluation(tmp_path, capsys):
    import xuance

    for seed, returns in enumerate(([1, 5, 3], [2, 9, 7])):
        folder = tmp_path / "mujoco/Hopper-v5/ppo/results" / f"seed_{seed}"
        folder.mkdir(parents=True)
        pd.DataFrame({"step": [1, 2, 3], "avg_return": returns}).to_csv(folder / "learning_curve.csv")
    xuance.main(tmp_path)
    assert capsys.readouterr().out == "Hopper-v5 (2 seeds): 5.0 2.8 7.0 2.8\n"


def test_arms_are_compared_on_the_seeds_of_their_stage(report):
    """The long horizon counts where no episode can end early; averaged weights have a column."""
    tasks = experiments.ONE_TASKS
    rows = [
        *(("one", env_id, seed, 10.0) for env_id, _ in tasks for seed in (1001, 1002)),
        *(("one-gamma-997", tasks[0][0], seed, 20.0) for seed in (1001, 1002)),
        *(("one-gamma-997", tasks[1][0], seed, 5.0) for seed in (1001, 1002)),
        ("one", tasks[1][0], 1101, 1.0),  # of another stage
        *(("one-gamma-995", env_id, 1001, 5.0) for env_id, _ in tasks),  # a single seed
    ]
    results = made_up(rows)
    results.loc[results.experiment == "one", "averaged"] = 11.0
    table = {row["arm"]: row for row in report.one_table(results, tasks, range(1001, 1004))}
    chances = {arm: float(row["P"].split()[0]) for arm, row in table.items() if row["P"]}
    assert chances == {
        "γ = 0.997": 0.5,
        "averaged weights": 1.0,
        "γ = 0.997 where no episode can end early": 0.75,
    }
    rows.append(("one", tasks[1][0], 1003, 11.0))  # where it is the defaults, their spread is not its own
    spread = made_up(rows).assign(averaged=11.0)
    table = {row["arm"]: row["P"] for row in report.one_table(spread, tasks, range(1001, 1004))}
    assert table["γ = 0.997 where no episode can end early"] == "0.75 [0.75, 0.75]"
    results["sessions"] = 2  # resumed: the average is another one
    assert "averaged weights" not in {
        row["arm"] for row in report.one_table(results, tasks, range(1001, 1004))
    }
