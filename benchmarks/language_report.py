"""Tables and figures of the runs that language.py stored.

python benchmarks/language_report.py
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib as mpl
import pandas as pd
from experiments import HERE
from figures import COLORS, STYLES, THEMES, save, style
from language import CURVES, RUNS
from matplotlib.figure import Figure
from report import Row, fill, markdown
from scipy.interpolate import PchipInterpolator

PAGE = HERE.parent / "docs/ppo_and_grpo.md"
FRONTIER = "(ppo|grpo)-(reviews|beta-(1|0.5|0.2|0.05))$"  # studies, as patterns
PLACEMENTS = "grpo-reviews|rloo|(ppo|grpo)-beta-0.5|k3"
LOW = "ppo-reviews|ppo-beta"
METHODS = {"PPO": "ppo", "GRPO": "grpo"}


def load() -> tuple[pd.DataFrame, pd.DataFrame]:
    """The runs, with their J as a share of the highest optimum found for the seed and β; and their curves."""
    runs = pd.read_csv(RUNS).fillna({"flags": "", "fault": ""})
    runs = runs[runs.task.isin(["reviews", "sums"])].copy()  # the others are those of other programs
    judge = runs.study.where(runs.study.str.contains("iterated"), "")  # reward models that are their own
    runs["best"] = runs.groupby(["seed", "kl_coef", judge]).objective_optimum.transform("max")
    runs["of_best"] = runs.objective / runs.best
    curves = pd.read_csv(CURVES).merge(runs, on=["study", "seed"], suffixes=("", "_at_end"))
    curves["share"] = (curves.score - curves.reference_score - curves.kl_coef * curves.kl) / curves.best
    return runs, curves


def middle(values: pd.Series, form: str = "{:.1%}") -> str:
    """Median, lowest and highest; nothing if there are none."""
    if values.dropna().empty:
        return ""
    low, median, high = (form.format(x) for x in values.quantile([0, 0.5, 1]))
    return median if low == high else f"{median} ({low} to {high})"


def with_frontier(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of seeds that have all ten of the frontier."""
    found = runs[runs.study.str.match(FRONTIER)].groupby("seed").study.nunique()
    return runs[runs.seed.isin(found.index[found == 10])]


def paired(table: pd.DataFrame, task: str) -> pd.DataFrame:
    """The rows of seeds that both methods have on a task."""
    ppo, grpo = (set(table.seed[table.study == f"{method}-{task}"]) for method in METHODS.values())
    return table[table.seed.isin(ppo & grpo)]


def seeds_table(runs: pd.DataFrame) -> Iterator[Row]:
    """The defaults, seed by seed, and their medians."""
    columns = {
        "PPO, reviews": ("ppo-reviews", "share_of_optimum"),
        "GRPO, reviews": ("grpo-reviews", "share_of_optimum"),
        "sums before": ("grpo-sums", "gold_before"),
        "GRPO, sums": ("grpo-sums", "gold"),
        "PPO, sums": ("ppo-sums", "gold"),
    }
    for seed in (*sorted(runs.seed.unique()), "median"):
        found = runs if seed == "median" else runs[runs.seed == seed]
        cells = {label: middle(found[found.study == name][x]) for label, (name, x) in columns.items()}
        yield {"seed": f"{seed}"} | cells


def frontier_table(runs: pd.DataFrame) -> Iterator[Row]:
    """Scores at the same KL, as means over the seeds that have all runs.

    GRPO's runs of all β, and the reference (0, 0), are interpolated to the KL of each run of PPO.
    """
    runs = with_frontier(runs)
    runs = runs[runs.study.str.match(FRONTIER)].sort_values("kl")
    ppo, grpo = runs[runs.script == "ppo_rlhf"], runs[runs.script == "grpo"]
    curves = {seed: PchipInterpolator([0, *x.kl], [0, *x.score]) for seed, x in grpo.groupby("seed")}
    # None of GRPO's runs may have as large a KL.
    ends = grpo.groupby("seed").kl.max()
    found = [curves[x.seed](x.kl) if x.kl <= ends[x.seed] else float("nan") for x in ppo.itertuples()]
    ppo = ppo.assign(grpo=[float(x) for x in found])
    labels = {"kl": "KL of PPO", "score": "score of PPO", "grpo": "score of GRPO at this KL"}
    labels["best_score_at_kl"] = "best score at this KL"
    for beta, found in ppo.groupby("kl_coef"):
        cells = {label: f"{found[x].mean():.2f}".replace("nan", "") for x, label in labels.items()}
        yield {"β": f"{beta:g}", "seeds": f"{len(found)}"} | cells


def results_table(runs: pd.DataFrame, studies: str) -> Iterator[Row]:
    """What studies reach, with the studies as a pattern."""
    found = runs[runs.study.str.match(studies)].sort_values(["kl_coef", "script"], kind="stable")
    for (script, flags, fault), group in found.groupby(["script", "flags", "fault"], sort=False):
        yield {
            "run": f"`{script}.py {flags}`" + (f", fault: {fault}" if fault else ""),
            "seeds": f"{len(group)}",
            "share of best": middle(group.of_best, "{:.0%}"),
            "KL": middle(group.kl, "{:.1f}"),
            "score": middle(group.score, "{:.2f}"),
            "best at this KL": middle(group.best_score_at_kl, "{:.2f}"),
            "taste": middle(group.gold, "{:.1f}"),
        }


def iterated_table(runs: pd.DataFrame) -> Iterator[Row]:
    """Runs whose reward model or β changes, beside the same ones whose do not, of the same seed."""
    pairs = [("ppo-reviews", "ppo-iterated"), ("ppo-beta-0.002", "ppo-low-iterated"), ("ppo-kl-target",)]
    for names in pairs:
        for name in names:
            for run in runs[(runs.study == name) & (runs.seed == 1)].itertuples():
                yield {
                    "run": f"`ppo_rlhf.py {run.flags}`".replace(" `", "`"),
                    "KL": f"{run.kl:.2f}",
                    "score by the last reward model": f"{run.score:.2f}",
                    "taste before": f"{run.gold_before:.2f}",
                    "taste": f"{run.gold:.2f}",
                }


def cost_table(runs: pd.DataFrame, curves: pd.DataFrame) -> Iterator[Row]:
    """What the methods take in all, and until 90% of the best J, or of the sums; with the same seeds."""
    for task, quantity in (("reviews", "share"), ("sums", "gold")):
        for label, method in METHODS.items():
            both = paired(runs, task), paired(curves, task)
            found, points = (x[x.study == f"{method}-{task}"] for x in both)
            good = points[points[quantity] >= 0.9].groupby("seed")[["tokens", "seconds"]].min().median()
            yield {
                "run": f"{label}, {task}",
                "seeds": f"{len(found)}",
                "tokens": f"{found.tokens.mean() / 1000:.0f}k",
                "gradient steps": f"{found.gradient_steps.iloc[0]:,.0f}",
                "seconds": middle(found.seconds, "{:.0f}"),
                "to 90%": f"{good.tokens / 1000:.0f}k tokens, {good.seconds:.0f} s",
            }


def frontier_figure(runs: pd.DataFrame) -> Figure:
    """Left: score against KL. Right: score and the human's taste as β falls."""
    figure = Figure(figsize=(8, 3.3), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = with_frontier(runs)
    ppo = runs[runs.study.str.match("ppo-(reviews|beta)")]
    means = ppo.groupby("kl_coef")[["kl", "score", "gold", "kl_optimum", "score_optimum"]].mean()
    best = means[means.index >= 0.05]
    left.plot(best.kl_optimum, best.score_optimum, color=COLORS[4], label="optimum, by β")
    right.plot(means.kl, means.score, STYLES[0], color=COLORS[0], label="score of PPO")
    right.plot(means.kl, means.gold, STYLES[1], color=COLORS[1], label="the human's taste")
    right.plot(ppo.kl, ppo.gold, ".", color=COLORS[1], alpha=0.5, label="of each run")
    kinds = {"PPO": "ppo-(reviews|beta)", "GRPO": "grpo-", "k3 in the loss": "k3-in-l"}
    kinds["k3 in the reward"] = "k3-in-r"
    for index, (label, studies) in enumerate(kinds.items()):
        found = runs[runs.study.str.match(studies) & (runs.kl_coef >= 0.05)]
        left.plot(found.kl, found.score, "o^x+"[index], color=COLORS[index], label=label, alpha=0.8)
    left.set_ylabel("score by the reward model")
    for axes in (left, right):
        axes.set_xlabel("KL to the reference, nats per response")
        axes.legend()
    return figure


def comparison_figure(curves: pd.DataFrame) -> Figure:
    """Both tasks against tokens and seconds: means over seeds, with the lowest and highest as a band."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    grid = figure.subplots(2, 2, sharey="row")
    for row, (task, quantity) in zip(grid, (("reviews", "share"), ("sums", "gold")), strict=True):
        row[0].set_ylabel(f"{task}: {'share of best J' if task == 'reviews' else 'held out, right'}")
        for axes, x in zip(row, ("tokens", "seconds"), strict=True):
            for index, (label, method) in enumerate(METHODS.items()):
                found = paired(curves, task)
                points = found[found.study == f"{method}-{task}"].groupby("episodes")
                at, y = points[x].mean(), points[quantity]
                axes.plot(at, y.mean(), STYLES[index], color=COLORS[index], label=label)
                axes.fill_between(at, y.min(), y.max(), color=COLORS[index], alpha=0.18, linewidth=0)
            axes.set_xlabel(x)
            axes.legend(loc="lower right")
    return figure


def draw(runs: pd.DataFrame, curves: pd.DataFrame, folder: Path) -> None:
    """Draw each figure for a light and for a dark page."""
    for theme in THEMES:
        with mpl.rc_context(style(theme)):
            made = {"language": frontier_figure(runs), "language-comparison": comparison_figure(curves)}
            for name, figure in made.items():
                save(figure, folder / f"{name}-{theme}.png")


def tables(runs: pd.DataFrame, curves: pd.DataFrame) -> dict[str, str]:
    """All tables as Markdown, by name."""
    made = {"seeds": seeds_table(runs), "frontier": frontier_table(runs), "cost": cost_table(runs, curves)}
    made |= {"placement": results_table(runs, PLACEMENTS), "low": results_table(runs, LOW)}
    made["iterated"] = iterated_table(runs)
    return {name: markdown(rows) for name, rows in made.items()}


def main() -> None:
    """The command line."""
    runs, curves = load()
    PAGE.write_text(fill(PAGE.read_text(), tables(runs, curves)))
    draw(runs, curves, HERE.parent / "results/figures")


if __name__ == "__main__":
    main()
