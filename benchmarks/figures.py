"""Draw the figures from the stored results, and two equations, for light and for dark pages.

python benchmarks/figures.py          # those whose curves changed
python benchmarks/figures.py --all
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import experiments
import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
from experiments import EXPERIMENTS, FIGURES, MINUTES, ROOT, TIMED, TRL_LOSSES, Task
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from report import LANGUAGE_CURVES, VARIANTS, load, load_speeds, name_of, newest, select

sys.path.insert(0, str(ROOT))
from ppo import compute_gae

THEMES = {"light": ("#ffffff", "#1f2328", "#d1d9e0"), "dark": ("#0d1117", "#f0f6fc", "#3d444d")}
COLORS = ("#0d87d6", "#e8730c", "#1a9e77", "#c060b8", "#9a8000")  # differ on both, also when colour-blind
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
AXIS = {"return": "return (last 100 episodes)", "kl": "KL, nats (log scale)", "entropy": "entropy, nats"}
AXIS["clip_fraction"] = "clip fraction"
PEER = "Stable-Baselines3"


def draw_curve(axes: Axes, found: pd.DataFrame, quantity: str, label: str, index: int) -> None:
    """The mean over seeds as a line, and their range as a band, where all of them have a value."""
    y = np.stack(found[quantity])  # [seeds, parts of the run]
    x = (np.arange(y.shape[1]) + 0.5) / y.shape[1] * found.steps.iloc[0] / 1000
    complete = ~np.isnan(y).any(0)
    x, y = x[complete], y[:, complete]
    axes.plot(x, y.mean(0), color=COLORS[index], linestyle=STYLES[index], label=label)
    axes.fill_between(x, y.min(0), y.max(0), color=COLORS[index], alpha=0.18, linewidth=0)


def learning_curves(
    results: pd.DataFrame, labels: dict[str, str], panels: list[tuple[Task, str]], columns: int, best: bool
) -> Figure:
    """A panel for each task and quantity, a curve for each experiment, perhaps the best published policy.

    `labels` begins with the newest experiments, which replace earlier ones.
    """
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(max(2.7 * columns, 6.5), 2.3 * rows + 1), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flatten()
    order = list(dict.fromkeys(labels.values()))  # experiments with the same label have the same colour
    if best or PEER in order:  # whose colour is the same in all figures
        order = [order[0], PEER, *(label for label in order[1:] if label != PEER)]
    handles: dict[str, Any] = {}
    seeds: dict[str, list[int]] = {}
    for axes, (task, quantity) in zip(grid, panels, strict=False):
        for name in newest(results, [*labels], task).values():
            found, label = select(results, name, task), labels[name]
            draw_curve(axes, found, quantity, label, order.index(label))
            seeds.setdefault(label, []).append(len(found))
        if best:
            final = [x.mean for x in experiments.PUBLISHED[task[0]] if x.kind == "final"]
            final += experiments.XUANCE.get(task[0], ())[:1]
            axes.axhline(max(final), color="gray", linewidth=1, linestyle="--", label="best published, final")
        axes.set_title(name_of(task), fontsize="medium")
        axes.set(xlabel="thousand steps", yscale="log" if quantity == "kl" else "linear")
        if axes in grid[::columns]:
            axes.set_ylabel(AXIS[quantity])
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    for axes in grid[len(panels) :]:
        axes.axis("off")
    shown = [f"{label} ({in_words(seeds[label])})" if label in seeds else label for label in handles]
    figure.legend(handles.values(), shown, loc="outside lower center", ncols=min(columns, 3))
    figure.suptitle("line: mean of the seeds; band: lowest to highest seed", fontsize="medium")
    return figure


def in_words(seeds: list[int]) -> str:
    """The numbers of seeds in the panels of a figure."""
    low, high = min(seeds), max(seeds)
    return f"seeds: {low}" if low == high else f"seeds: {low} to {high}"


def figures(results: pd.DataFrame) -> dict[str, Figure]:
    """All figures, by name."""
    made = {"objective": objective_figure(), "gae": gae_figure()}
    made |= {"speed": speed_figure(), "minutes": minutes_figure(results), "trl": trl_figure()}
    for name, study in experiments.STUDIES.items():
        labels = {experiment: EXPERIMENTS[experiment].label for experiment in study.experiments}
        if name == "epochs":
            labels["ppo"] = "K = 15, the default"
        panels = [(task, quantity) for quantity in study.quantities for task in study.tasks]
        made[name] = learning_curves(results, labels, panels, len(study.tasks), False)
    panels = [(task, "return") for task in experiments.CLASSIC if task != ("CartPole-v1", 500_000)]
    labels = dict.fromkeys(("now-classic", "classic"), "ppo.py at its defaults") | {"sb3-rl-zoo": PEER}
    made["classic"] = learning_curves(results, labels, panels, 4, False)
    names = experiments.NOW + experiments.LAST
    panels = [(task, "return") for task in experiments.MUJOCO if newest(results, names, task)]
    labels = dict.fromkeys(names, "ppo_continuous.py with flags for the task")
    labels |= dict.fromkeys(("now-continuous", "continuous"), "ppo_continuous.py at its defaults")
    labels["sb3-rl-zoo-mujoco"] = PEER
    made["mujoco"] = learning_curves(results, labels, panels, 4, True)
    panels = [(experiments.PONG, "return"), (experiments.BREAKOUT, "return")]
    labels = dict.fromkeys(("now-breakout", "atari-breakout"), "ppo_atari.py at its defaults")
    labels |= dict.fromkeys(("now-pong", "atari-pong"), "with flags for Pong")
    made["atari"] = learning_curves(results, labels, panels, 2, True)
    return made


def speed_figure() -> Figure:
    """Steps per CPU second on each task: a bar for the median of the runs, and a line for their range.

    Environments in JAX are another class: their bar is cut, with its number beside it.
    """
    tasks = load_speeds().groupby("env_id")
    figure = Figure(figsize=(3 * len(tasks), 2.5), layout="constrained")
    for axes, (env_id, found) in zip(figure.subplots(1, len(tasks)), tasks, strict=True):
        names = [VARIANTS[name].replace("`", "") for name in found.variant]
        runs = [np.sort(np.array(text.split(), float)) for text in found.speed]
        limit = 1.15 * max(
            speeds.max() for name, speeds in zip(names, runs, strict=True) if "JAX" not in name
        )
        for y, (name, speeds) in enumerate(zip(names, runs, strict=True)):
            median = np.median(speeds)
            axes.barh(y, min(median, limit), color=COLORS[0 if name.startswith("ours") else 1])
            if median > limit:
                axes.text(limit, y, f"{median:,.0f} ▸", ha="right", va="center", color="white")
            else:
                axes.plot(speeds, np.full(len(speeds), y), color="gray")
        axes.set_xlim(0, limit)
        axes.set_yticks(range(len(names)), [name.replace(" (", "\n(") for name in names])
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_title(f"{env_id}, N = {found.num_envs.iloc[0]:,}", fontsize="medium")
        axes.set_xlabel("steps per CPU second")
    figure.suptitle("one core, the same settings for all", fontsize="medium")
    return figure


def minutes_figure(results: pd.DataFrame) -> Figure:
    """Return against minutes: a panel for each task, a line for each seed."""
    figure = Figure(figsize=(8, 3.1), layout="constrained")
    labels = list(dict.fromkeys(experiment.label for experiment in MINUTES))
    for axes, task in zip(figure.subplots(1, 3), TIMED, strict=True):
        for experiment in MINUTES:
            index = labels.index(experiment.label)
            for i, (_, row) in enumerate(select(results, experiment.name, task).iterrows()):
                label = experiment.label if i == 0 else None
                axes.plot(
                    row["minutes"], row["return"], color=COLORS[index], linestyle=STYLES[index], label=label
                )
        axes.set_title(name_of(task), fontsize="medium")
        axes.set(xscale="log", xlabel="minutes of one core (log scale)")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_locator(NullLocator())
    figure.axes[0].set_ylabel(AXIS["return"])
    figure.suptitle("each with its own settings for the task; a line for each seed", fontsize="medium")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def trl_figure() -> Figure:
    """Reward of grpo.py and of TRL, for each loss: the mean over seeds as a line, their range as a band."""
    stored = pd.read_csv(LANGUAGE_CURVES)
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, (loss, theirs) in zip(figure.subplots(1, 3, sharey=True), TRL_LOSSES.items(), strict=True):
        for index, (library, label) in enumerate({"grpo": "grpo.py", "trl": "TRL"}.items()):
            found = stored[stored.study == f"llama-{library}-{loss}"]
            curves = found.pivot(index="episodes", columns="seed", values="score")
            low, high, batches = curves.min(axis=1), curves.max(axis=1), curves.index / 256
            axes.plot(batches, curves.mean(axis=1), STYLES[index], color=COLORS[index], label=label)
            axes.fill_between(batches, low, high, color=COLORS[index], alpha=0.18, linewidth=0)
        axes.set(title=f"{loss} (TRL: {theirs})", xlabel="batch", ylabel="mean reward of the batch")
        axes.label_outer()
        axes.legend(loc="lower right")
    return figure


def objective_figure() -> Figure:
    """The clipped objective of one transition against its ratio, for both signs of the advantage."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    ratio = np.linspace(0, 2, 401)
    for axes, advantage, better in zip(figure.subplots(1, 2), (1, -1), ("more", "less"), strict=True):
        clipped = np.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
        axes.plot(ratio, ratio * advantage, color=COLORS[1], linestyle="--", label="$r A$, not clipped")
        axes.plot(ratio, clipped, color=COLORS[0], linewidth=2.5, label=r"$L^{\mathrm{CLIP}}$")
        axes.plot(1, advantage, "o", color=COLORS[0], label="before the first gradient step")
        axes.set_xticks([0, 0.8, 1, 1.2, 2], ["0", "1−ε", "1", "1+ε", "2"])
        axes.set_xlabel(r"ratio $r = \pi(a|s)\,/\,\pi_{\mathrm{old}}(a|s)$")
        axes.set_ylabel("objective of one transition")
        axes.set_title(f"$A = {advantage:+}$: the action should be {better} likely", fontsize="medium")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def gae_figure() -> Figure:
    """The rewards and values of an episode, and its advantages by `compute_gae` for three λ."""
    rewards = torch.tensor([0.0, 0, 0, 0, -0.5, 0, 0, 0, 0, 1, 0, 0])
    values = torch.tensor([0.2, 0.25, 0.2, 0.3, 0.1, 0.3, 0.4, 0.35, 0.6, 0.8, 0.1, 0.05, 0.0])
    truncated, terminated = torch.zeros(12, dtype=torch.bool), torch.arange(12) == 11
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.bar(range(12), rewards.numpy(), width=0.4, color=COLORS[1], label="reward $r_t$")
    top.plot(values[:-1], "o-", color=COLORS[2], label="the critic's value $V(s_t)$")
    top.set_ylabel("reward, value")
    notes = {0.0: (0, r"one step, $\delta_t$"), 0.95: (3, "in between"), 1.0: (1, "the whole episode")}
    for gae_lambda, (index, note) in notes.items():
        advantages, _ = compute_gae(rewards, values[:-1], values[1:], terminated, truncated, 0.99, gae_lambda)
        label = rf"$\lambda = {gae_lambda:g}$: {note}"
        bottom.plot(advantages, marker="o", linestyle=STYLES[index], color=COLORS[index], label=label)
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


def save(figure: Figure, path: Path, always: bool = True) -> None:
    """Save a figure in 100 colours, for small files. Unless `always`, only if curves or words changed."""
    lines = [line.get_xydata() for axes in figure.axes for line in axes.lines]
    words = [text.get_text() for text in figure.findobj(Text)]
    digest = hashlib.sha256(np.float32(np.concatenate(lines)).tobytes() + repr(words).encode()).hexdigest()
    if not always and path.exists() and Image.open(path).info.get("curves") == digest:
        return
    figure.dpi = 200  # sharp on screens with many pixels
    canvas, about = FigureCanvasAgg(figure), PngInfo()
    canvas.draw()
    about.add_text("curves", digest)
    image = (
        Image.fromarray(np.asarray(canvas.buffer_rgba()))
        .convert("RGB")
        .quantize(100, Image.Quantize.MAXCOVERAGE)
    )
    image.save(path, optimize=True, pnginfo=about)


def draw(folder: Path, always: bool = True) -> None:
    """Draw the figures into the folder."""
    for theme in THEMES:
        with mpl.rc_context(style(theme)):
            for name, figure in figures(load()).items():
                save(figure, folder / f"{name}-{theme}.png", always)


if __name__ == "__main__":
    draw(FIGURES, "--all" in sys.argv)
