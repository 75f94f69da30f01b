"""Make the tables of README.md and benchmarks/README.md from the stored results.

    python benchmarks/report.py              # rewrite the tables
    python benchmarks/report.py --check      # do the tables match the stored results?

A table stands between the marks `<!-- table: NAME -->` and `<!-- end -->`. Each seed counts once, with the
mean of its episodes. ± is the standard deviation over seeds. IQM is the interquartile mean over seeds with
its 95% stratified bootstrap interval. P is the probability that a seed of ours is better than one of theirs.
Both are computed by rliable (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical
Precipice").
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import experiments
import numpy as np
import pandas as pd
from rliable.library import get_interval_estimates
from rliable.metrics import aggregate_iqm, aggregate_mean, probability_of_improvement
from stored import curves, load, select

ROOT = experiments.HERE.parent
VARIANTS = {who: f"`{flags}`" for who, flags in experiments.VARIANTS.items()}
VARIANTS |= {"ours": "eager", "sb3": "Stable-Baselines3"}
Row = dict[str, str]  # the cells of a table, by the column's title


def interval(function: Callable, *scores: np.ndarray) -> tuple[float, float, float]:
    """A statistic of one or two sets of scores, [seeds] or [seeds, tasks], and the ends of its 95% interval.

    The bootstrap draws the seeds of each task separately.
    """
    np.random.seed(0)  # rliable draws from NumPy's global generator  # noqa: NPY002
    tables = tuple(x.reshape(len(x), -1) for x in scores)  # [seeds, tasks]
    point, ends = get_interval_estimates(
        {"": tables if len(tables) > 1 else tables[0]}, lambda *x: np.array([function(*x)]), reps=2000
    )
    return float(point[""][0]), float(ends[""][0, 0]), float(ends[""][1, 0])


def digits(scores: Any) -> int:
    """Decimal places of a score."""
    return 2 if np.abs(scores).max() <= 1 else 1


def spread(scores: Any) -> str:
    """Mean and standard deviation."""
    deviation = f" ± {np.std(scores, ddof=1):.{digits(scores)}f}" if len(scores) > 1 else ""
    return f"{np.mean(scores):.{digits(scores)}f}{deviation}"


def iqm(scores: pd.Series) -> str:
    """Interquartile mean and its interval; nothing for a single seed."""
    if len(scores) < 2:
        return ""
    middle, low, high = (f"{x:.{digits(scores)}f}" for x in interval(aggregate_iqm, scores.to_numpy()))
    return f"{middle} [{low}, {high}]"


def improvement(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Probability of improvement and its interval."""
    return "{:.2f} [{:.2f}, {:.2f}]".format(*interval(probability_of_improvement, ours, theirs))


def short(steps: int) -> str:
    """100000 as 100k, 1000000 as 1M."""
    return f"{steps // 1_000_000}M" if steps % 1_000_000 == 0 else f"{steps // 1000}k"


def returns(found: pd.DataFrame) -> Row:
    """The columns that the tables of returns share."""
    return {
        "seeds": f"{len(found)}",
        "last 100 training episodes": spread(found.training),
        "greedy": f"**{spread(found.greedy)}**",
        "greedy, IQM": iqm(found.greedy),
    }


def published(env_id: str) -> str:
    """The best return published for PPO, if there is one that we know of."""
    if env_id not in experiments.PUBLISHED:
        return ""
    mean, std, source = experiments.PUBLISHED[env_id]
    return f"{mean:.1f} {'' if std is None else f'± {std:.1f} '}{source}"


def environment(name: str, env_id: str) -> str:
    """The environment, and the flags of an experiment that are not the defaults."""
    label = experiments.EXPERIMENTS[name].label
    return env_id if label == "the defaults" else f"{env_id}, {label}"


def beside_sb3(results: pd.DataFrame, name: str, peer: str, task: experiments.Task) -> Row:
    """An experiment on a task, beside the best published return and Stable-Baselines3 as run here."""
    ours, theirs = select(results, name, task), select(results, peer, task)
    env_id, steps = task
    row = {
        "environment": environment(name, env_id),
        "steps": short(steps),
        **returns(ours),
        "best published": published(env_id),
        "Stable-Baselines3 here, greedy": "",
        "P": "",
    }
    if len(theirs):
        seeds = "1 seed" if len(theirs) == 1 else f"{len(theirs)} seeds"
        row["Stable-Baselines3 here, greedy"] = f"{spread(theirs.greedy)} ({seeds})"
        row["P"] = improvement(ours.greedy.to_numpy(), theirs.greedy.to_numpy())
    return row


def classic_table(results: pd.DataFrame) -> Iterator[Row]:
    """Classic control."""
    rows = [("classic", task) for task in experiments.CLASSIC]
    rows.insert(3, ("classic-acrobot", ("Acrobot-v1", 500_000)))
    rows.append(("taxi", ("Taxi-v4", 500_000)))
    for name, task in rows:
        yield beside_sb3(results, name, "sb3-rl-zoo", task)


def over_published(returns: np.ndarray, env_id: str) -> np.ndarray:
    """Returns over the best published one, inverted if they are costs: above 1 is better."""
    best = experiments.PUBLISHED[env_id][0]
    return returns / best if best > 0 else best / returns


def mujoco_rows() -> Iterator[tuple[str, experiments.Task]]:
    """Experiments and tasks of continuous control: the defaults, and after them flags of the task's own."""
    for task in experiments.MUJOCO:
        yield "continuous", task
        for name, (env_id, *_) in experiments.OWN_FLAGS.items():
            if env_id == task[0]:
                yield name, task


def mujoco_table(results: pd.DataFrame) -> Iterator[Row]:
    """Continuous control: also as a multiple of the best published return."""
    with_flags: dict[str, float] = {}  # the multiple, by environment; the flags are those of its last row
    defaults: dict[str, float] = {}
    for name, task in mujoco_rows():
        mean = select(results, name, task).greedy.mean()
        ratio = over_published(mean, task[0])
        with_flags[task[0]] = ratio
        defaults.setdefault(task[0], ratio)
        row = beside_sb3(results, name, "sb3-rl-zoo-mujoco", task)
        yield row | {"ours / published": f"{ratio:.2f}"}
    without = {env_id: ratio for env_id, ratio in defaults.items() if env_id != "Humanoid-v5"}
    for name, average in (
        ("median of the defaults", np.median([*defaults.values()])),
        ("mean of the defaults", np.mean([*defaults.values()])),
        ("mean of the defaults, without Humanoid", np.mean([*without.values()])),
        (
            "the same, with the rows that have flags",
            np.mean([with_flags[env_id] for env_id in without]),
        ),
    ):
        yield dict.fromkeys(row, "") | {"environment": name, "ours / published": f"**{average:.2f}**"}


def atari_table(results: pd.DataFrame) -> Iterator[Row]:
    """Atari: each experiment on each game that it was run on."""
    for (name, env_id, steps), found in results.groupby(["experiment", "env_id", "steps"], sort=False):
        if name.startswith("atari"):
            training = curves(found, "return")
            part, rest = divmod(250_000 * training.shape[1], steps)
            at_250k = "" if rest else spread(training[:, part - 1])  # "" if no part of the curve ends there
            yield {
                "game": env_id,
                "settings": experiments.EXPERIMENTS[name].label,
                "steps": short(steps),
                "seeds": f"{len(found)}",
                "training, at 250k": at_250k,
                "last 100 games of training": spread(found.training),
                "greedy": f"**{spread(found.greedy)}**",
                "games": f"{found.episodes.iloc[0]}",
                "minutes": f"{found.seconds.mean() / 60:.0f}",
                "best published": published(env_id),
            }


def ablation_table(results: pd.DataFrame) -> Iterator[Row]:
    """One detail of continuous control changed at a time, best first; what was run on all three tasks."""
    rows = []
    for name in ("mujoco", *experiments.ABLATION):
        found = [select(results, name, task) for task in experiments.LOCOMOTION]
        if all(len(x) == experiments.ABLATION_SEEDS for x in found):
            over = np.stack([over_published(x.training, x.env_id.iloc[0]) for x in found], 1)
            mean, low, high = interval(aggregate_mean, over)
            row = {"entry": experiments.EXPERIMENTS[name].label, "seeds": f"{experiments.ABLATION_SEEDS}"}
            row |= {x.env_id.iloc[0].removesuffix("-v5"): spread(x.training) for x in found}
            rows.append((mean, row | {"over the best published": f"**{mean:.2f}** [{low:.2f}, {high:.2f}]"}))
    for _, row in sorted(rows, key=lambda pair: -pair[0]):
        yield row


def study_table(study: experiments.Study, results: pd.DataFrame) -> Iterator[Row]:
    """The entries of a study on each task, and means over training of what their updates were like."""
    for task in study.tasks:
        default = curves(select(results, "ppo", task), "return")
        for name in study.experiments:
            found = select(results, name, task)
            over_training = np.nanmean(curves(found, "return"), 1)
            better = "" if name == "ppo" else improvement(over_training, np.nanmean(default, 1))
            kl, clip_fraction, entropy = (
                np.nanmean(curves(found, quantity)) for quantity in ("kl", "clip_fraction", "entropy")
            )
            yield {
                "task": f"{task[0]}, {short(task[1])}",
                "entry": experiments.EXPERIMENTS[name].label,
                "seeds": f"{len(found)}",
                "last 100 training episodes": spread(found.training),
                "greedy, IQM": iqm(found.greedy),
                "mean over training": spread(over_training),
                "P, default": better,
                "KL": f"{kl:.4f}",
                "clip fraction": f"{clip_fraction:.3f}",
                "entropy": f"{entropy:.2f}",
            }


def speed_table(rows: list[dict[str, Any]]) -> Iterator[Row]:
    """What throughput.py stored: speed beside Stable-Baselines3, memory, and shares of the time by part."""
    parts = list(rows[0]["ours"]["shares"])
    for row in rows:
        for who, label in VARIANTS.items():
            if who in row:
                found = row[who]
                shares, compiling = found.get("shares", {}), found.get("compiling")
                yield {
                    "task": f"{row['env_id']}, N = {row['num_envs']:,}",
                    "variant": label,
                    "steps per second": "{1:,.0f} ({0:,.0f} to {2:,.0f})".format(*found["sps"]),
                    "ratio": "**{1:.2f}** ({0:.2f} to {2:.2f})".format(*found["ratio"]) if shares else "",
                    "memory, MiB": f"{found['mib']:,}",
                    **{part: f"{shares[part]:.0%}" if shares else "" for part in parts},
                    "compiling, s": f"{compiling[1]:.0f}" if compiling else "",
                }


def short_table(results: pd.DataFrame, rows: list[tuple[str, experiments.Task]]) -> Iterator[Row]:
    """Greedy returns of experiments on tasks, beside the best published; with the steps unless all are 1M."""
    same = all(steps == 1_000_000 for _, (_, steps) in rows)
    for name, (env_id, steps) in rows:
        yield {
            "environment": environment(name, env_id),
            "steps": "" if same else short(steps),
            "greedy return": spread(select(results, name, (env_id, steps)).greedy),
            "best published": published(env_id).partition(" (")[0],
        }


def short_speed_table(rows: list[dict[str, Any]]) -> Iterator[Row]:
    """Steps per second of three tasks."""
    for env_id, num_envs, who in (
        ("CartPole-v1", 4, "compiled"),
        ("HalfCheetah-v5", 8, "compiled"),
        ("BreakoutNoFrameskip-v4", 8, "bfloat16"),
    ):
        (row,) = (row for row in rows if (row["env_id"], row["num_envs"]) == (env_id, num_envs))
        yield {
            "environment": f"{env_id}, N = {num_envs}",
            "ours": f"{row['ours']['sps'][1]:,.0f}",
            "ours, with a flag": f"{row[who]['sps'][1]:,.0f} ({VARIANTS[who]})",
            "Stable-Baselines3": f"{row['sb3']['sps'][1]:,.0f}",
        }


def markdown(rows: Iterable[Row]) -> str:
    """A table as Markdown; its head is that of the first row. Columns without any entry are left out."""
    rows = list(rows)
    columns = [column for column in rows[0] if any(row[column] for row in rows)]
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> dict[str, str]:
    """All tables as Markdown, by name."""
    results, speed = load(), json.loads((experiments.RESULTS / "throughput.json").read_text())
    classic = [("classic", task) for task in experiments.CLASSIC if task != ("CartPole-v1", 500_000)]
    atari = [
        ("atari-pong", (experiments.PONG, 2_000_000)),
        ("atari-breakout", (experiments.BREAKOUT, 10_000_000)),
    ]
    made = {name: study_table(study, results) for name, study in experiments.STUDIES.items()}
    made |= {
        "classic": classic_table(results),
        "mujoco": mujoco_table(results),
        "atari": atari_table(results),
        "ablation": ablation_table(results),
        "speed": speed_table(speed),
        "classic-short": short_table(results, classic),
        "mujoco-short": short_table(results, [row for row in mujoco_rows() if row[1][1] == 1_000_000]),
        "atari-short": short_table(results, atari),
        "speed-short": short_speed_table(speed),
    }
    return {name: markdown(rows) for name, rows in made.items()}


def fill(document: str, made: dict[str, str]) -> str:
    """The document with the tables between its marks replaced."""
    return re.sub(
        r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{made[match[2]]}\n{match[3]}",
        document,
        flags=re.DOTALL,
    )


def main() -> None:
    """The command line. Exit status: 0 done, 1 with --check if a table differs."""
    check, made, differ = "--check" in sys.argv, tables(), []
    for path in (ROOT / "README.md", experiments.HERE / "README.md"):
        before = path.read_text()
        after = fill(before, made)
        if after != before:
            differ.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(after)
    print(f"tables {'differ' if check else 'rewritten'} in: {', '.join(differ) or 'no file'}")
    sys.exit(check and bool(differ))


if __name__ == "__main__":
    main()
