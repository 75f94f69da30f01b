"""Draw the figures from the stored results, and two equations.

    python benchmarks/figures.py

Each figure is made for a light and for a dark page.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from experiments import (
    BREAKOUT,
    CLASSIC,
    EXPERIMENTS,
    HERE,
    MUJOCO,
    OWN_FLAGS,
    PONG,
    PUBLISHED,
    STUDIES,
    Study,
    Task,
)
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from stored import curves, load

sys.path.insert(0, str(HERE.parent))
from ppo import compute_gae

THEMES = {"light": ("#ffffff", "#1f2328", "#d1d9e0"), "dark": ("#0d1117", "#f0f6fc", "#3d444d")}
COLORS = ("#0d87d6", "#e8730c", "#1a9e77", "#c060b8", "#9a8000")  # differ on both, also when colour-blind
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
AXIS = {
    "return": "return (last 100 episodes)",
    "kl": "KL from the old policy, nats",
    "clip_fraction": "clip fraction",
    "entropy": "entropy, nats",
}
Panel = tuple[str, str]  # environment and quantity


def draw_curve(axes: Axes, found: pd.DataFrame, quantity: str, label: str, index: int) -> None:
    """The mean over seeds as a line, and their range as a band, where all of them have a value."""
    y = curves(found, quantity)
    x = (np.arange(y.shape[1]) + 0.5) / y.shape[1] * found.steps.iloc[0] / 1000
    complete = ~np.isnan(y).any(0)
    x, y = x[complete], y[:, complete]
    axes.plot(x, y.mean(0), color=COLORS[index], linestyle=STYLES[index], label=f"{label} (seeds: {len(y)})")
    axes.fill_between(x, y.min(0), y.max(0), color=COLORS[index], alpha=0.18, linewidth=0)


def learning_curves(
    results: pd.DataFrame,
    labels: Mapping[str, str],  # by name of the experiment
    panels: list[Panel],
    columns: int,
    title: str = "",
    levels: Mapping[str, float] | None = None,  # a return to reach, by environment
) -> Figure:
    """A panel for each environment and quantity, with a curve for each experiment."""
    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(2.7 * columns, 6.5), 2.3 * rows + 1.2), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    order = list(dict.fromkeys(labels.values()))
    handles: dict[str, Any] = {}
    for axes, (env_id, quantity) in zip(grid, panels, strict=False):
        for name, label in labels.items():
            found = results[(results.experiment == name) & (results.env_id == env_id)]
            if len(found):
                draw_curve(axes, found, quantity, label, order.index(label))
        if levels and env_id in levels:
            axes.axhline(levels[env_id], color="gray", linewidth=1, linestyle="--", label="best published")
        axes.set_title(env_id, fontsize="medium")
        axes.set_xlabel("thousand steps")
        axes.set_yscale("log" if quantity == "kl" else "linear")
        handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    for axes, (_, quantity) in zip(grid[::columns], panels[::columns], strict=True):
        axes.set_ylabel(AXIS[quantity])
    for axes in grid[len(panels) :]:
        axes.axis("off")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=min(columns, 3))
    figure.suptitle(f"{title}\nline: mean of the seeds; band: lowest to highest seed", fontsize="medium")
    return figure


def of_tasks(results: pd.DataFrame, tasks: list[Task]) -> pd.DataFrame:
    """The runs of these tasks."""
    return results[[task in tasks for task in zip(results.env_id, results.steps, strict=True)]]


def study_figure(results: pd.DataFrame, study: Study) -> Figure:
    """A column per task, a row per quantity."""
    panels = [(env_id, quantity) for quantity in study.quantities for env_id, _ in study.tasks]
    labels = {name: EXPERIMENTS[name].label for name in study.experiments}
    return learning_curves(of_tasks(results, study.tasks), labels, panels, len(study.tasks), study.title)


def classic_figure(results: pd.DataFrame) -> Figure:
    """Classic control beside Stable-Baselines3."""
    tasks = [task for task in CLASSIC if task != ("CartPole-v1", 500_000)]
    labels = {"classic": "ppo.py", "sb3-rl-zoo": "Stable-Baselines3, RL Zoo's settings"}
    panels = [(env_id, "return") for env_id, _ in tasks]
    title = "ppo.py at its defaults, and Stable-Baselines3 with the RL Zoo's settings for each environment"
    return learning_curves(of_tasks(results, tasks), labels, panels, len(tasks), title)


def mujoco_figure(results: pd.DataFrame) -> Figure:
    """Continuous control beside Stable-Baselines3, with the best published returns."""
    panels = [(env_id, "return") for env_id, _ in MUJOCO]
    levels = {env_id: best for env_id, (best, *_) in PUBLISHED.items()}
    labels = {"continuous": "ppo_continuous.py at its defaults"}
    labels |= {"sb3-rl-zoo-mujoco": "Stable-Baselines3, RL Zoo's settings"}
    labels |= dict.fromkeys(OWN_FLAGS, "ppo_continuous.py with flags for the task")
    return learning_curves(of_tasks(results, MUJOCO), labels, panels, 4, levels=levels)


def atari_figure(results: pd.DataFrame) -> Figure:
    """Atari games on a CPU: Pong and a long run of Breakout, and a short one beside Stable-Baselines3."""
    long = f"{BREAKOUT}, 10M steps"
    results = results.assign(env_id=results.env_id.where(results.steps < 10_000_000, long))
    labels = {"atari-breakout": "ppo_atari.py at its defaults", "atari-sb3": "Stable-Baselines3"}
    labels["atari-pong"] = "ppo_atari.py with flags for Pong"
    panels = [(env_id, "return") for env_id in (PONG, long, BREAKOUT)]
    return learning_curves(results, labels, panels, 3, levels={long: PUBLISHED[BREAKOUT][0]})


def objective_figure() -> Figure:
    """The clipped objective of one transition against its ratio, for both signs of the advantage."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    ratio = np.linspace(0, 2, 401)
    for axes, advantage in zip(figure.subplots(1, 2), (1, -1), strict=True):
        clipped = np.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
        axes.plot(ratio, ratio * advantage, color=COLORS[1], linestyle="--", label="$r A$, not clipped")
        axes.plot(ratio, clipped, color=COLORS[0], linewidth=2.5, label=r"$L^{\mathrm{CLIP}}$")
        axes.plot(1, advantage, "o", color=COLORS[0])
        axes.set_xticks([0, 0.8, 1, 1.2, 2], ["0", "1−ε", "1", "1+ε", "2"])
        axes.set_xlabel(r"ratio $r = \pi(a|s)\,/\,\pi_{\mathrm{old}}(a|s)$")
        axes.set_ylabel("objective of one transition")
        better = "more" if advantage > 0 else "less"
        axes.set_title(f"$A = {advantage:+}$: the action should be {better} likely", fontsize="medium")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def gae_figure() -> Figure:
    """The rewards and values of an episode, and its advantages by `compute_gae` for three λ."""
    rewards = torch.tensor([0.0, 0, 0, 0, -0.5, 0, 0, 0, 0, 1, 0, 0])
    values = torch.tensor([0.2, 0.25, 0.2, 0.3, 0.1, 0.3, 0.4, 0.35, 0.6, 0.8, 0.1, 0.05, 0.0])
    truncated = torch.zeros(12, dtype=torch.bool)
    terminated = torch.arange(12) == 11
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.bar(range(12), rewards.numpy(), width=0.4, color=COLORS[1], label="reward $r_t$")
    top.plot(values[:-1], "o-", color=COLORS[2], label="the critic's value $V(s_t)$")
    top.set_ylabel("reward, value")
    for gae_lambda, color, style, note in (
        (0.0, COLORS[0], "o-", r"one step, $\delta_t$"),
        (0.95, COLORS[3], "o--", "in between"),
        (1.0, COLORS[1], "o-.", "the whole episode"),
    ):
        advantages, _ = compute_gae(rewards, values, terminated, truncated, 0.99, gae_lambda)
        bottom.plot(advantages, style, color=color, label=rf"$\lambda = {gae_lambda:g}$: {note}")
    bottom.axhline(0, color="gray", linewidth=0.8)
    bottom.set_ylabel(r"advantage $A_t$ ($\gamma = 0.99$)")
    bottom.set_xlabel("step $t$ of an episode that ends after step 11")
    for axes in (top, bottom):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def style(theme: str) -> Any:
    """Matplotlib's settings for a light or a dark page."""
    background, text, lines = THEMES[theme]
    return {
        "figure.facecolor": background, "axes.facecolor": background, "savefig.facecolor": background,
        "text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text,
        "axes.edgecolor": lines, "grid.color": lines, "axes.grid": True, "grid.linewidth": 0.5,
        "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9,
    }  # fmt: skip


def draw(folder: Path) -> None:
    """Draw all figures into the folder."""
    folder.mkdir(exist_ok=True)
    results = load()
    for theme in THEMES:
        with mpl.rc_context(style(theme)):
            made = {name: study_figure(results, study) for name, study in STUDIES.items()}
            made |= {"classic": classic_figure(results), "mujoco": mujoco_figure(results)}
            made |= {"atari": atari_figure(results)}
            made |= {"objective": objective_figure(), "gae": gae_figure()}
            for name, figure in made.items():
                figure.savefig(folder / f"{name}-{theme}.png", dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    draw(HERE / "figures")
