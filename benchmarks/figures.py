"""The figures: learning curves from the stored results, and two equations drawn by calling `ppo.py` itself.

`report.py` calls this. Each figure is made twice, for a light and for a dark page.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from experiments import BREAKOUT, HERE, LOCOMOTION, MUJOCO, PONG, STUDIES, Study
from matplotlib.axes import Axes
from matplotlib.figure import Figure

sys.path.insert(0, str(HERE.parent))
import ppo

FIGURES = HERE / "figures"
THEMES = {"light": ("#ffffff", "#1f2328", "#d1d9e0"), "dark": ("#0d1117", "#f0f6fc", "#3d444d")}
COLORS = ("#0d87d6", "#e8730c", "#1a9e77", "#c060b8", "#9a8000")  # tell apart on both, also when colour-blind
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
AXIS = {
    "return": "return (last 100 episodes)",
    "kl": "KL from the old policy, nats",
    "clip_fraction": "clip fraction",
    "entropy": "entropy, nats",
}


def table_of(results: list[dict[str, Any]], quantity: str) -> np.ndarray:
    """[seeds, parts] of the stored curves; NaN where a part of one has no value."""
    return np.array([result["curve"][quantity] for result in results], dtype=float)


def curve(axes: Axes, x: np.ndarray, y: np.ndarray, index: int, label: str) -> None:
    """The mean over seeds as a line, from where all of them have a value, and their range as a band."""
    here = ~np.isnan(y).any(0)
    low, mean, high = y[:, here].min(0), y[:, here].mean(0), y[:, here].max(0)
    (line,) = axes.plot(x[here], mean, color=COLORS[index], linestyle=STYLES[index], label=label)
    axes.fill_between(x[here], low, high, color=line.get_color(), alpha=0.18, linewidth=0)


def study_figure(study: Study, tasks: list, results: dict) -> Figure:
    """A column a task, a row a quantity."""
    rows, columns = len(study.quantities), len(tasks)
    figure = Figure(figsize=(max(2.7 * columns, 6.5), 2.4 * rows + 1), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for row, quantity in enumerate(study.quantities):
        name, _, against = quantity.partition(" against ")
        for column, (env_id, steps) in enumerate(tasks):
            axes = grid[row][column]
            for index, (entry, label) in enumerate(study.labels.items()):
                found = results.get((entry, (env_id, steps)))
                if not found:
                    continue
                y = table_of(found, name)
                x = (np.arange(y.shape[1]) + 0.5) / y.shape[1] * steps / 1000
                if against:
                    x = table_of(found, "seconds").mean(0)
                curve(axes, x, y, index, f"{label} ({len(found)} seeds)")
            axes.set_xlabel("seconds, two runs at a time" if against else "thousand steps")
            if name == "kl":
                axes.set_yscale("log")
            if column == 0:
                axes.set_ylabel(AXIS[name])
            if row == 0:
                axes.set_title(env_id)
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2 if columns < 3 else 3)
    figure.suptitle(
        f"{study.title}\nline: mean of the seeds; band: lowest to highest seed", fontsize="medium"
    )
    return figure


def mujoco_figure(results: dict) -> Figure:
    """Learning curves of continuous control, each beside the best published return."""
    from report import BEST

    figure = Figure(figsize=(9, 6.6), layout="constrained")
    grid = figure.subplots(3, 4)
    for axes, (env_id, steps) in zip(grid.flat, MUJOCO.items(), strict=False):
        axes.set_title(env_id, fontsize="medium")
        axes.axhline(BEST[env_id][0], color=COLORS[1], linestyle="--", label="best published")
        if ("mujoco", (env_id, steps)) not in results:
            continue
        y = table_of(results["mujoco", (env_id, steps)], "return")
        x = (np.arange(y.shape[1]) + 0.5) / y.shape[1] * steps / 1000
        curve(axes, x, y, 0, "ppo_continuous.py, with sampled actions")
        seeds = "1 seed" if len(y) == 1 else f"{len(y)} seeds"
        axes.set_title(f"{env_id}, {seeds}", fontsize="medium")
    grid[-1][-1].axis("off")
    grid[-1][-1].legend(*grid[0][0].get_legend_handles_labels(), loc="center")
    figure.supxlabel("thousand steps", fontsize="medium")
    figure.supylabel("return (last 100 episodes)", fontsize="medium")
    figure.suptitle("line: mean of the seeds; band: lowest to highest seed", fontsize="medium")
    return figure


def ablation_figure(results: dict) -> Figure:
    """The ablation of continuous control: returns over the best published, by entry, with intervals."""
    from report import ablation, interval, over_published
    from rliable.metrics import aggregate_mean

    over = {label: over_published(found) for label, found in ablation(results).values()}
    ends = {label: interval(aggregate_mean, scores) for label, scores in over.items()}
    labels = sorted(ends, key=lambda label: ends[label][0])
    figure = Figure(figsize=(8, 1.6 + 0.25 * len(labels)), layout="constrained")
    axes = figure.subplots()
    for index, (env_id, marker) in enumerate(zip(LOCOMOTION, "^sv", strict=True)):
        pairs = [(x, y) for y, label in enumerate(labels) for x in over[label][:, index]]
        style = {"color": COLORS[index + 1], "marker": marker, "alpha": 0.7, "s": 18}
        axes.scatter(*zip(*pairs, strict=True), **style, label=f"{env_id}, a seed")
    middle, low, high = np.array([ends[label] for label in labels]).T
    style = {"color": COLORS[0], "fmt": "o", "label": "mean, with its 95% interval"}
    axes.errorbar(middle, range(len(labels)), xerr=(middle - low, high - middle), **style)
    axes.axvline(next(iter(ends.values()))[0], color="gray", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("return in training after 300,000 steps / the best published for PPO at 1M steps")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def atari_figure(results: dict) -> Figure:
    """Learning curves of Atari games on the CPU: Pong and Breakout against steps, Breakout against time."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    columns = (PONG, "thousand steps"), (BREAKOUT, "thousand steps"), (BREAKOUT, "minutes on a core")
    labels, peer = ("ppo_atari.py", "Stable-Baselines3"), "atari-sb3"
    handles: dict[str, Any] = {}
    for axes, (game, unit) in zip(figure.subplots(1, 3), columns, strict=True):
        for (name, (env_id, steps)), found in results.items():
            if name not in ("atari-pong", "atari-breakout", peer) or env_id != game:
                continue
            y = table_of(found, "return")
            x = (np.arange(y.shape[1]) + 0.5) / y.shape[1] * steps / 1000
            if unit != "thousand steps":
                x = table_of(found, "seconds").mean(0) / 60
            curve(axes, x, y, int(name == peer), labels[name == peer])
        axes.set_title(game, fontsize="medium")
        axes.set_xlabel(unit)
        handles |= {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2)
    figure.supylabel("return (last 100 games)", fontsize="medium")
    return figure


def objective_figure() -> Figure:
    """The clipped objective of one row against its ratio, for both signs of the advantage, by `ppo_loss`."""
    figure = Figure(figsize=(8, 3.4), layout="constrained")
    ratios, old, epsilon = torch.linspace(0.01, 2, 400), 0.4, 0.2
    args = ppo.Args(norm_adv=False, vf_coef=0.0, ent_coef=0.0, clip_coef=epsilon)
    state = ppo.State(learning_rate=0.0, clip_coef=epsilon, kl_coef=0.0, ent_coef=0.0)
    for axes, advantage in zip(figure.subplots(1, 2), (1.0, -1.0), strict=True):
        objective = []
        for ratio in ratios:
            policy = torch.stack([ratio * old, 1 - ratio * old]).log().unsqueeze(0)
            zero = torch.zeros(1)
            batch = ppo.Batch(
                obs=zero,
                actions=torch.zeros(1, dtype=torch.int64),
                policy=policy,
                log_probs=torch.full((1,), old).log(),
                values=zero,
                advantages=torch.full((1,), advantage),
                returns=zero,
            )
            loss, _ = ppo.ppo_loss(policy, zero, batch, state, args)
            objective.append(-float(loss))
        axes.plot(ratios, advantage * ratios, color=COLORS[1], linestyle="--", label="$r A$, not clipped")
        axes.plot(
            ratios,
            objective,
            color=COLORS[0],
            linewidth=2.5,
            label=r"$L^{\mathrm{CLIP}}$, drawn by calling ppo_loss",
        )
        axes.plot([1], [advantage], "o", color=COLORS[0])
        for edge in (1 - epsilon, 1 + epsilon):
            axes.axvline(edge, color="gray", linewidth=0.8, linestyle=":")
        axes.set_xticks([0, 1 - epsilon, 1, 1 + epsilon, 2], ["0", "1−ε", "1", "1+ε", "2"])
        axes.set_xlabel(r"ratio $r = \pi(a|s)\,/\,\pi_{\mathrm{old}}(a|s)$")
        axes.set_ylabel("objective of one row")
        better = "more" if advantage > 0 else "less"
        axes.set_title(f"$A = {advantage:+.0f}$: the action should be {better} likely", fontsize="medium")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


def gae_figure() -> Figure:
    """What `compute_gae` makes of one episode's rewards and values for three λ."""
    steps = 12
    rewards = torch.zeros(steps, 1)
    rewards[4], rewards[9] = -0.5, 1.0
    values = torch.tensor([0.2, 0.25, 0.2, 0.3, 0.1, 0.3, 0.4, 0.35, 0.6, 0.8, 0.1, 0.05, 0.0]).unsqueeze(1)
    terminated, truncated = torch.zeros(2, steps, 1, dtype=torch.bool)
    terminated[-1] = True
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True)
    top.bar(range(steps), rewards.squeeze(1), width=0.4, color=COLORS[1], label="reward $r_t$")
    top.plot(range(steps), values[:-1].squeeze(1), "o-", color=COLORS[2], label="the critic's value $V(s_t)$")
    top.set_ylabel("reward, value")
    for index, gae_lambda in enumerate((0.0, 0.95, 1.0)):
        advantages, _ = ppo.compute_gae(rewards, values, terminated, truncated, 0.99, gae_lambda)
        note = {0.0: r"one step, $\delta_t$", 1.0: "the whole episode"}.get(gae_lambda, "in between")
        line = {"color": COLORS[(0, 3, 1)[index]], "linestyle": STYLES[(0, 1, 3)[index]]}
        bottom.plot(
            range(steps),
            advantages.squeeze(1),
            marker="o",
            **line,
            label=rf"$\lambda = {gae_lambda:g}$: {note}",
        )
    bottom.axhline(0, color="gray", linewidth=0.8)
    bottom.set_ylabel(r"advantage $A_t$ ($\gamma = 0.99$)")
    bottom.set_xlabel("step $t$ of an episode that ends after step 11")
    for axes in (top, bottom):
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def draw(results: dict) -> Iterator[Path]:
    """Draw all figures into `FIGURES`; yield their paths."""
    from report import tasks

    FIGURES.mkdir(exist_ok=True)
    for theme, (background, text, lines) in THEMES.items():
        style = {
            "figure.facecolor": background, "axes.facecolor": background, "savefig.facecolor": background,
            "text.color": text, "axes.labelcolor": text, "xtick.color": text, "ytick.color": text,
            "axes.edgecolor": lines, "grid.color": lines, "axes.grid": True, "grid.linewidth": 0.5,
            "legend.frameon": False, "axes.spines.top": False, "axes.spines.right": False, "font.size": 9,
        }  # fmt: skip
        with mpl.rc_context(style):
            made = {
                name: study_figure(study, list(tasks(study.tasks)), results)
                for name, study in STUDIES.items()
            }
            made |= {"mujoco": mujoco_figure(results), "ablation": ablation_figure(results)}
            made |= {"atari": atari_figure(results)}
            made |= {"objective": objective_figure(), "gae": gae_figure()}
            for name, figure in made.items():
                path = FIGURES / f"{name}-{theme}.png"
                figure.savefig(path, dpi=130, metadata={"Software": None})
                yield path
