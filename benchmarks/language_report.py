"""Tables and figures of the runs that language.py stored.

    python benchmarks/language_report.py              # rewrite the tables of docs/, and redraw the figures
    python benchmarks/language_report.py --check      # do the tables match the stored results?

A run's own share of the optimum counts the responses that its policy visits. To compare policies, `of best`
takes, for each seed and β, the highest optimum that any run has found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from experiments import HERE
from figures import COLORS, STYLES, THEMES, style
from language import FIVE, LANGUAGE
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from report import Row, fill, interval, markdown
from rliable.metrics import aggregate_iqm

PAGES = HERE.parent / "docs"
RARER = {("ppo_rlhf", "rarer"): "PPO, rarer responses"}
METHODS = {("ppo_rlhf", "default"): "PPO", ("grpo", "default"): "GRPO", ("grpo", "rloo"): "RLOO"}
SUMS = {("ppo_rlhf", "sums"): "PPO", ("grpo", "sums"): "GRPO"}


def load_runs() -> pd.DataFrame:
    """All stored runs, with their share of the best optimum found."""
    runs = pd.DataFrame([json.loads(path.read_text()) for path in sorted(LANGUAGE.glob("*/*.json"))])
    same_reward = runs[~runs.study.str.startswith(("iterated", "sums", "rarer"))]
    tasks = same_reward.groupby(["seed", "kl_coef", "temperature"])
    best, before = tasks.objective_optimum.transform("max"), tasks.objective_reference.transform("mean")
    runs["of_best"] = (same_reward.objective_actor - before) / (best - before)
    runs["before"], runs["best"] = before, best
    return runs


def chosen(runs: pd.DataFrame, script: str, study: str) -> pd.DataFrame:
    """The runs of a study."""
    return runs[(runs.script == script) & (runs.study == study)].sort_values("seed")


def middle(values: pd.Series, form: str = "{:.1%}") -> str:
    """Median, lowest and highest."""
    low, median, high = (form.format(x) for x in np.quantile(values, (0, 0.5, 1)))
    return f"{median} ({low} to {high})"


def iqm(values: pd.Series) -> str:
    """Interquartile mean over seeds, and its 95% bootstrap interval."""
    return "{:.1%} [{:.1%}, {:.1%}]".format(*interval(aggregate_iqm, values.to_numpy()))


def seeds_table(runs: pd.DataFrame) -> Iterator[Row]:
    """The default runs, seed by seed."""
    for (script, study), label in (METHODS | RARER).items():
        found = chosen(runs, script, study)
        shares = {run.seed: f"{run.share_of_optimum:.1%}" for run in found.itertuples()}
        yield {
            "reviews": label,
            **{f"seed {seed}": shares.get(seed, "") for seed in FIVE},
            "median": f"**{found.share_of_optimum.median():.1%}**",
            "of best, seeds 1 to 3": middle(found[found.seed <= 3].of_best) if study != "rarer" else "",
            "J": middle(found.objective_actor, "{:.2f}"),
            "taste": middle(found.gold, "{:.2f}"),
        }


FRONTIER = {
    **{f"frontier-{kl_coef}": f"β = {kl_coef}" for kl_coef in ("1", "0.5", "0.2")},
    "default": "β = 0.1",
    **{f"frontier-{kl_coef}": f"β = {kl_coef}" for kl_coef in ("0.05", "0.02")},
    "low-0.01": "β = 0.01",
    "low-0.002": "β = 0.002",
    "iterated-0.002": "β = 0.002, reward model learnt again",
    "k3-in-reward": "fault: β = 0.5, k3 in the reward",
    "temperature-0.7": "β = 0.1, temperature 0.7",
    "temperature-left-out": "fault: β = 0.1, temperature 0.7, but not in learning",
}


def frontier_table(runs: pd.DataFrame) -> Iterator[Row]:
    """PPO by β, with the reward model learnt again, and with the two faults."""
    for study, label in FRONTIER.items():
        found = chosen(runs, "ppo_rlhf", study)
        found = found[found.seed <= (2 if "temperature" in study else 3)]
        yield {
            "PPO": label,
            "seeds": f"{len(found)}",
            "share of its own optimum": middle(found.share_of_optimum),
            "KL": f"{found.kl_actor.median():.2f}",
            "optimum's KL": f"{found.kl_optimum.median():.2f}",
            "score": f"{found.score.median():.2f}",
            "taste": middle(found.gold, "{:.2f}"),
        }


def placement_table(runs: pd.DataFrame) -> Iterator[Row]:
    """GRPO by where the KL is, by the scale of rewards, and by β."""
    labels = {
        "reward": "k1 in the reward",
        "loss": "k3 in the loss",
        "loss-weighted": "k3 times the ratio, in the loss",
    }
    for scale, prefix, usual, seeds in (("none", "", "rloo", 3), ("group", "std-", "default", 2)):
        for kl_in, label in labels.items():
            row = {"KL": label, "`--scale-rewards`": scale, "seeds": f"{seeds}"}
            for kl_coef in (0.05, 0.1, 0.5):
                study = usual if (kl_in, kl_coef) == ("reward", 0.1) else f"{prefix}{kl_in}-{kl_coef:g}"
                found = chosen(runs, "grpo", study)
                row[f"β = {kl_coef}"] = middle(found[found.seed <= seeds].of_best)
            yield row
    found = chosen(runs, "grpo", "published")
    published = {
        "KL": "k3 in the loss, all as published",
        "`--scale-rewards`": "group",
        "seeds": f"{len(found)}",
    }
    yield dict.fromkeys(row, "") | published | {"β = 0.1": middle(found.of_best)}


def reached(found: pd.DataFrame, column: str, level: float) -> float:
    """Where the share of the best optimum reaches a level: the median over seeds; NaN if it does not."""
    places = []
    for _, run in found.iterrows():
        share = (np.array(run.curves["objective"]) - run.before) / (run.best - run.before)
        above = np.flatnonzero(share >= level)
        places.append(run.curves[column][above[0]] if len(above) else np.nan)
    return float(np.median(places))


def comparison_table(runs: pd.DataFrame) -> Iterator[Row]:
    """What the methods reach, and what they take."""
    for (script, study), label in METHODS.items():
        found, sums = chosen(runs, script, study), chosen(runs, script, "sums")
        curves = found.curves
        yield {
            "": label,
            "tokens": f"{np.mean([curve['tokens'][-1] for curve in curves]) / 1000:.0f}k",
            "gradient steps": f"{found.gradient_steps.iloc[0]:,}",
            "seconds": f"{np.median([curve['seconds'][-1] for curve in curves]):.0f}",
            "reviews, of best": iqm(found.of_best) if len(found) == len(FIVE) else middle(found.of_best),
            "tokens to 80%": f"{reached(found, 'tokens', 0.8) / 1000:.0f}k",
            "seconds to 80%": f"{reached(found, 'seconds', 0.8):.0f}",
            "sums, right": iqm(sums.accuracy) if study == "default" else "",
            "seconds for sums": (
                f"{np.median([curve['seconds'][-1] for curve in sums.curves]):.0f}"
                if study == "default"
                else ""
            ),
        }


def sensitivity_table(runs: pd.DataFrame) -> Iterator[Row]:
    """GRPO by group size, PPO by λ."""
    for setting, script, prefix, values, default in SENSITIVITY:
        for value in values:
            found = chosen(runs, script, "default" if value == default else f"{prefix}-{value:g}")
            found = found[found.seed <= 3]
            yield {
                "setting": f"{setting} = {value:g}",
                "share of best": middle(found.of_best),
                "taste": middle(found.gold, "{:.2f}"),
            }


SENSITIVITY = [
    ("GRPO, G", "grpo", "group", (2, 4, 8, 16, 32), 8),
    ("PPO, λ", "ppo_rlhf", "lambda", (0, 0.95, 1), 1),
]


def frontier_figure(runs: pd.DataFrame) -> Figure:
    """Score against KL, with the frontier of the optimum; then score and taste as β falls."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    ours = runs[runs.script == "ppo_rlhf"]
    known = ours[ours.study.str.match("default|frontier") & (ours.seed <= 3)]
    optimum = known.groupby("kl_coef")[["kl_optimum", "objective_optimum"]].mean().reset_index()
    scores = optimum.objective_optimum + optimum.kl_coef * optimum.kl_optimum
    left.plot(optimum.kl_optimum, scores, "-", color=COLORS[4], label="optimum, by β")
    best = np.mean(list(ours[ours.best_of_n.notna() & (ours.seed <= 3)].best_of_n), 0)
    left.plot(best[:, 1], best[:, 2], ":", color=COLORS[2], label="best of n")
    kinds = {
        "default|frontier": ("PPO, β from 1 to 0.02", COLORS[0], "o"),
        "k3-in-reward": ("fault: k3 in the reward", COLORS[1], "x"),
        "temperature-left-out": ("fault: temperature left out of learning", COLORS[3], "+"),
    }
    for pattern, (label, color, marker) in kinds.items():
        found = ours[ours.study.str.match(pattern) & (ours.seed <= 3)]
        score = found.objective_actor + found.kl_coef * found.kl_actor
        left.plot(found.kl_actor, score, marker, color=color, label=label)
    left.set_xlabel("KL to the reference, nats per response")
    left.set_ylabel("score by the reward model")
    left.legend(loc="lower right")
    found = ours[ours.study.str.match("default|frontier|low") & (ours.seed <= 3)]
    again = ours[ours.study.str.startswith("iterated")]
    for rows, column, label, index in (
        (found, "score", "score", 0),
        (found, "gold", "taste, never learnt from", 1),
        (again, "gold", "taste, reward model learnt again", 2),
    ):
        means = rows.groupby("study")[["kl_actor", column]].mean().sort_values("kl_actor")
        right.plot(rows.kl_actor, rows[column], ".", color=COLORS[index], alpha=0.5)
        line = STYLES[index] if len(means) > 1 else "o"
        right.plot(means.kl_actor, means[column], line, color=COLORS[index], label=label)
    right.set_xlabel("KL to the reference, nats per response, as β falls from 1 to 0.002")
    right.legend(loc="center right")
    return figure


def draw_curves(axes: Axes, found: pd.DataFrame, x: str, y: np.ndarray, label: str, index: int) -> None:
    """The mean over seeds, and their range as a band."""
    if x == "gradient steps":
        at = np.linspace(0, found.gradient_steps.iloc[0], y.shape[1])
    else:
        at = np.mean([curve[x] for curve in found.curves], 0) / (1000 if x == "tokens" else 1)
    axes.plot(at, y.mean(0), STYLES[index], color=COLORS[index], label=f"{label} (seeds: {len(y)})")
    axes.fill_between(at, y.min(0), y.max(0), color=COLORS[index], alpha=0.18, linewidth=0)


def comparison_figure(runs: pd.DataFrame) -> Figure:
    """Both tasks against tokens, gradient steps and seconds."""
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    grid = figure.subplots(2, 3, sharey="row")
    units = {"tokens": "thousand tokens generated", "gradient steps": "gradient steps", "seconds": "seconds"}
    for column, (x, unit) in enumerate(units.items()):
        for index, ((script, study), label) in enumerate(METHODS.items()):
            found = chosen(runs, script, study)
            objective = np.array([curve["objective"] for curve in found.curves])
            before, best = found.before.to_numpy()[:, None], found.best.to_numpy()[:, None]
            draw_curves(grid[0, column], found, x, (objective - before) / (best - before), label, index)
        for index, ((script, study), label) in enumerate(SUMS.items()):
            found = chosen(runs, script, study)
            accuracy = np.array([curve["gold"] for curve in found.curves])
            draw_curves(grid[1, column], found, x, accuracy, label, index)
        grid[1, column].set_xlabel(unit)
    grid[0, 0].set_ylim(0.3, 1.05)
    grid[0, 0].set_ylabel("reviews: share of best, sampled")
    grid[1, 0].set_ylabel("sums held out: share right")
    grid[0, 0].legend(loc="lower right")
    grid[1, 0].legend(loc="lower right")
    return figure


def sensitivity_figure(runs: pd.DataFrame) -> Figure:
    """Share of the optimum by group size and by λ."""
    figure = Figure(figsize=(7, 3), layout="constrained")
    for index, (axes, (setting, script, prefix, values, default)) in enumerate(
        zip(figure.subplots(1, 2, sharey=True), SENSITIVITY, strict=True)
    ):
        medians = []
        for value in values:
            found = chosen(runs, script, "default" if value == default else f"{prefix}-{value:g}")
            shares = found[found.seed <= 3].of_best
            axes.plot([value] * len(shares), shares, ".", color=COLORS[index], alpha=0.5)
            medians.append(shares.median())
        axes.plot(values, medians, STYLES[index], color=COLORS[index])
        axes.set_xlabel(setting)
        if prefix == "group":
            axes.set_xscale("log", base=2)
            axes.set_ylabel("reviews: share of best")
    return figure


def draw(runs: pd.DataFrame, folder: Path) -> None:
    """Draw each figure for a light and for a dark page."""
    makers: dict[str, Any] = {
        "language": frontier_figure,
        "language-comparison": comparison_figure,
        "language-sensitivity": sensitivity_figure,
    }
    for theme in THEMES:
        with mpl.rc_context(style(theme)):
            for name, make in makers.items():
                make(runs).savefig(folder / f"{name}-{theme}.png", dpi=130)


def tables(runs: pd.DataFrame) -> dict[str, str]:
    """All tables as Markdown, by name."""
    made = {
        "seeds": seeds_table,
        "frontier": frontier_table,
        "placement": placement_table,
        "comparison": comparison_table,
        "sensitivity": sensitivity_table,
    }
    return {name: markdown(table(runs)) for name, table in made.items()}


def main() -> None:
    """The command line. Exit status: 0 done, 1 with --check if a table differs."""
    check, runs, differ = "--check" in sys.argv, load_runs(), False
    made = tables(runs)
    for path in sorted(PAGES.glob("*.md")):
        before = path.read_text()
        after = fill(before, made)
        differ = differ or after != before
        if not check:
            path.write_text(after)
    if not check:
        draw(runs, HERE / "figures")
    print(f"tables {'differ' if check else 'rewritten'}" if differ else "the tables are up to date")
    sys.exit(check and differ)


if __name__ == "__main__":
    main()
