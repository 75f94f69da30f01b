"""Make the tables of the pages from the stored results, and those of docs/metrics.md from coach.py's rules.

    python benchmarks/report.py

A table stands between the marks `<!-- table: NAME -->` and `<!-- end -->`. Each seed counts once, with the
mean of its episodes. ± is the standard deviation over seeds. P is the probability that a seed is better than
one of the defaults, with its 95% bootstrap interval, by rliable (Agarwal et al. 2021, "Deep Reinforcement
Learning at the Edge of the Statistical Precipice").
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import experiments
import numpy as np
import pandas as pd
import verdicts
from best import BEST
from experiments import EXPERIMENTS, ROOT, Study, Task
from rliable.library import get_interval_estimates
from rliable.metrics import aggregate_iqm
from run import CURVES, KEY, RUNS, SPEEDS
from scipy.stats import bootstrap
from verdicts import VERDICTS

sys.path.insert(0, str(ROOT))
import coach

Row = dict[str, str]  # the cells of a table, by the column's title
LANGUAGE_RUNS = experiments.DATA / "language.csv"
LANGUAGE_CURVES = experiments.DATA / "language_curves.csv"
NAMES = "README.md", "results/README.md", "results/ablation.md", "results/one_setting.md"
NAMES += "docs/scripts.md", "docs/metrics.md"
PAGES = [ROOT / name for name in NAMES]
SUMMARY = ["Acrobot-v1, 500k", "MountainCar-v0, 1M", "LunarLander-v3, 1M", "HalfCheetah-v5, 1M"]
SUMMARY += ["Hopper-v5, 1M", "Humanoid-v5, 1M", "Swimmer-v5, 1M", "BreakoutNoFrameskip-v4, 10M"]


def load() -> pd.DataFrame:
    """One row per run, with a column for each quantity of its learning curves: an array, or NaN."""
    curves = pd.read_csv(CURVES)
    curves["points"] = [np.array(text.split(), float) for text in curves.points]
    by_quantity = curves.set_index([*KEY, "quantity"]).points.unstack()
    runs = pd.read_csv(RUNS)
    runs = runs.reindex(columns=[*runs, *{"best", "averaged", "sampled"} - {*runs}])  # of some runs
    return runs.join(by_quantity, on=KEY)


def select(results: pd.DataFrame, experiment: str, task: Task) -> pd.DataFrame:
    """The runs of an experiment on a task, by seed; empty if there are none."""
    env_id, steps = task
    same_task = (results.env_id == env_id) & (results.steps == steps)
    return results[same_task & (results.experiment == experiment)].sort_values("seed")


def newest(results: pd.DataFrame, names: list[str], task: Task) -> dict[str, str]:
    """Experiments whose runs of a task count, by label. `names` begins with the newest ones.

    Of those with the same label, it is the first that has all of its planned runs, or else the last one.
    """
    chosen: dict[str, str] = {}
    for name in reversed(names):
        experiment, done = EXPERIMENTS[name], len(select(results, name, task))
        planned = sum((env_id, steps) == task for env_id, steps, _ in experiment.plan)
        if done and (done >= planned or experiment.label not in chosen):
            chosen[experiment.label] = name
    return {label: name for name in names for label in chosen if chosen[label] == name}


def probability_of_improvement(ours: np.ndarray, theirs: np.ndarray) -> float:
    """That a seed of ours, [n, tasks], is better than one of theirs, [m, tasks]: faster than rliable's."""
    return np.mean(0.5 + 0.5 * np.sign(ours[:, None] - theirs))


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


def mean_chance(pairs: list[tuple[np.ndarray, np.ndarray]]) -> str:
    """P, averaged over tasks with any numbers of seeds each: ours and theirs; with its 95% interval."""

    def mean(*seeds: np.ndarray) -> float:
        return np.mean([*map(probability_of_improvement, seeds[::2], seeds[1::2])])

    seeds = [scores for pair in pairs for scores in pair]
    found = bootstrap(seeds, mean, n_resamples=2000, vectorized=False, method="percentile", rng=0)
    return "{:.2f} [{:.2f}, {:.2f}]".format(mean(*seeds), *found.confidence_interval)


def spread(scores: Any) -> str:
    """Mean and standard deviation."""
    if len(scores) == 0:
        return ""
    digits = 2 if np.abs(scores).max() <= 1 else 1
    deviation = f" ± {np.std(scores, ddof=1):.{digits}f}" if len(scores) > 1 else ""
    return f"{np.mean(scores):.{digits}f}{deviation}"


def with_worst(scores: pd.Series) -> str:
    """Mean and standard deviation, the worst seed, and the number of seeds."""
    return f"{spread(scores)}; {scores.min():.4g} ({len(scores)})"


def name_of(task: Task) -> str:
    """An environment and steps: 100000 as 100k, 1000000 as 1M."""
    env_id, steps = task
    return f"{env_id}, {steps // 1_000_000}M" if steps % 1_000_000 == 0 else f"{env_id}, {steps // 1000}k"


def cited(known: experiments.Published, bold: bool = False) -> str:
    """A published return, with a link, its source and what it is."""
    text = f"{known.mean:.1f}" if known.std is None else f"{known.mean:.1f} ± {known.std:.1f}"
    text = f"**{text}**" if bold else text
    kind = {"final": "", "best": "best evaluation", "training": "in training"}[known.kind]
    about = ", ".join(filter(None, [known.source, kind, known.about]))
    return f"[{text}]({experiments.SOURCES[known.source]}) ({about})"


def final_policies(results: pd.DataFrame, task: Task, peer: str) -> dict[str, float]:
    """Mean returns of others' final policies on a task: Stable-Baselines3 here, and what is published."""
    theirs = {"Stable-Baselines3 here": select(results, peer, task).greedy.mean()}
    theirs["XuanCe"] = experiments.XUANCE.get(task[0], (np.nan,))[0]
    for known in experiments.PUBLISHED.get(task[0], ()):
        if known.kind == "final":
            theirs[known.source] = known.mean
    return {name: round(mean, 1) for name, mean in theirs.items() if not np.isnan(mean)}


def returns(results: pd.DataFrame, names: list[str], tasks: list[Task], peer: str) -> Iterator[Row]:
    """Returns on each task, with the defaults and with flags, beside Stable-Baselines3 and published ones.

    Of the final policies, whatever has the highest mean, as it is printed, is bold.
    """

    def mark(text: str, mean: float) -> str:
        return f"**{text}**" if round(mean, 1) == highest else text

    for task in tasks:
        for label, name in newest(results, names, task).items():
            found = select(results, name, task)
            others = final_policies(results, task, peer)
            highest = max([round(found.greedy.mean(), 1), *others.values()])
            theirs, other = select(results, peer, task).greedy, ""
            if len(theirs):
                other = mark(spread(theirs), theirs.mean())
                if task[0] in experiments.SB3_NOTES:
                    other += f" ({experiments.SB3_NOTES[task[0]]})"
            best = found.best.dropna()
            xuance = {"XuanCe, final": "", "XuanCe, best": ""}
            if task[0] in experiments.XUANCE:
                mean, std, best_mean, best_std, at = experiments.XUANCE[task[0]]
                at = at and f" ({at})"
                xuance["XuanCe, final"] = f"{mark(f'{mean:.1f} ± {std:.1f}', mean)}{at}"
                xuance["XuanCe, best"] = f"{best_mean:.1f} ± {best_std:.1f}{at}"
            known = experiments.PUBLISHED.get(task[0], [])
            final = [cited(x, x.mean == highest) for x in known if x.kind == "final"]
            earlier = " (earlier text)" if EXPERIMENTS[name].commit else ""
            yield {
                "environment, steps": name_of(task) + ("" if label == "the defaults" else f", {label}"),
                "seeds": f"{len(found)}{earlier}",
                "last 100 training episodes": spread(found.training),
                "final": mark(spread(found.greedy), found.greedy.mean()),
                "sampled actions": spread(found.sampled.dropna()),
                "best": spread(best),
                "Stable-Baselines3 here": other,
                **xuance,
                "published, final": "; ".join(final),
                "published, other protocols": "; ".join(cited(x) for x in known if x.kind != "final"),
            }


def standing(results: pd.DataFrame) -> str:
    """On how many of MuJoCo's tasks the defaults' final policies are ahead of all others, and where not.

    XuanCe's evaluations sample actions, so it is also compared with returns of the final policies that do so.
    """
    ours = {}
    for task in experiments.MUJOCO:
        found = select(results, experiments.NOW[0], task)
        if task[0].endswith("-v5") and len(found):
            ours[task] = found
    behind, below, equal, apart = [], [], [], []
    for task, found in ours.items():
        others, mean = final_policies(results, task, "sb3-rl-zoo-mujoco"), round(found.greedy.mean(), 1)
        name = max(others, key=others.__getitem__)
        short = task[0].removesuffix("-v5")
        if others[name] > mean:
            behind.append(f"{short} ({mean:,.1f}; {name}: {others[name]:,.1f})")
        elif others[name] == mean:
            equal.append(f"{short} ({name})")
        if found.greedy.min() > select(results, "sb3-rl-zoo-mujoco", task).greedy.max():
            apart.append(short)
        sampled = round(found.sampled.mean(), 1)
        if others["XuanCe"] > sampled:
            below.append(f"{short} ({sampled:,.1f}; {others['XuanCe']:,.1f})")
    ahead = f"{len(ours) - len(behind) - len(equal)} of {len(ours)}"
    return (
        f"**On {ahead} MuJoCo tasks, `ppo_continuous.py`, with one setting for all, has the highest mean "
        "return of a final policy that we know of.** It is equal to the highest on "
        f"{', '.join(equal) or 'none'}, and behind on {', '.join(behind) or 'none'}. Each of its seeds is "
        f"above all of Stable-Baselines3's on {', '.join(apart) or 'none'}. XuanCe's evaluations sample "
        "actions, and those here take the most likely ones. With sampled actions, it is behind XuanCe on "
        f"{', '.join(below) or 'none'}."
    )


def atari_table(results: pd.DataFrame) -> Iterator[Row]:
    """Atari games; after 250k steps, training returns beside Stable-Baselines3's."""
    tasks = [experiments.PONG, experiments.BREAKOUT, experiments.BREAKOUT_SHORT]
    names = experiments.NOW_ATARI + experiments.LAST_ATARI
    rows = [*returns(results, names, tasks, "")]
    yield from rows
    (name,) = newest(results, names, tasks[-1]).values()
    curve = np.stack(select(results, name, tasks[-1])["return"])
    theirs = select(results, "atari-sb3", experiments.BREAKOUT_SB3).training
    yield dict.fromkeys(rows[0], "") | {
        "environment, steps": f"{tasks[-1][0]}, 250k of 500k",
        "last 100 training episodes": spread(curve[:, curve.shape[1] // 2 - 1]),
        "Stable-Baselines3 here": f"{spread(theirs)} in training",
    }


def study_table(results: pd.DataFrame, study: Study) -> Iterator[Row]:
    """The entries of a study on each task: returns, and the mean of a quantity over training."""
    for task in study.tasks:
        default = np.nanmean(np.stack(select(results, "ppo", task)["return"]), 1)
        for name in study.experiments:
            found = select(results, name, task)
            over_training = np.nanmean(np.stack(found["return"]), 1)
            better = interval(probability_of_improvement, over_training, default)
            row = {
                "task": name_of(task),
                "entry": EXPERIMENTS[name].label,
                "last 100 training episodes": spread(found.training),
                "mean over training": spread(over_training),
                "P, default": "" if name == "ppo" else "{:.2f} [{:.2f}, {:.2f}]".format(*better),
                "greedy": spread(found.greedy),
            }
            for quantity in study.quantities[1:2]:  # in the place of the greedy return
                row |= {"greedy": "", quantity: f"{np.nanmean(np.stack(found[quantity])):.4f}"}
            yield row


VARIANTS = {"eager": "ours", "--compile": "ours, `--compile`", "--bfloat16": "ours, `--bfloat16`"}
VARIANTS |= {"cleanrl": "CleanRL", "sbx": "SBX", "rsl_rl": "RSL-RL"}
VARIANTS |= dict.fromkeys(("purejaxrl", "purejaxrl_pendulum"), "PureJaxRL (environment in JAX)")
VARIANTS |= {"sb3": "Stable-Baselines3", "sb3_tensors": "Stable-Baselines3"}


def span(runs: Any, digits: int = 0) -> str:
    """Median and range of what several runs measured, such as "1.5 2 3"; nothing if it was not measured."""
    if not runs or not isinstance(runs, str):  # "", or NaN
        return ""
    values = np.quantile(np.array(runs.split(), float), (0, 0.5, 1), method="nearest")
    low, median, high = (f"{value:,.{digits}f}".replace("inf", "never") for value in values)
    return median if low == high else f"{median} ({low} to {high})"


def span_of(values: pd.Series, digits: int) -> str:
    """Median and range of numbers."""
    return span(" ".join(f"{value:.6g}" for value in values), digits)


def load_speeds() -> pd.DataFrame:
    """What speed.py stored, in the order of VARIANTS."""
    speeds = pd.read_csv(SPEEDS)
    speeds = speeds[speeds.variant.isin([*VARIANTS])]
    speeds = speeds.sort_values("variant", key=lambda names: names.map([*VARIANTS].index))
    return speeds.sort_values("env_id", kind="stable")


def speed_table(speeds: pd.DataFrame) -> Iterator[Row]:
    """What speed.py stored: speed beside other libraries."""
    for row in speeds.itertuples():
        yield {
            "task": f"{row.env_id}, N = {row.num_envs:,}",
            "variant": VARIANTS[row.variant],
            "steps per CPU second": span(row.speed),
            "ratio": span(row.ratio, 2),
            "CPU seconds to the goal": span(getattr(row, "goal", "")),
        }


def ratios_table(speeds: pd.DataFrame) -> Iterator[Row]:
    """Medians of the speeds, divided by Stable-Baselines3's in the same round."""
    for (env_id, num_envs), found in speeds.groupby(["env_id", "num_envs"]):
        cells = dict.fromkeys(("ours", "ours, with a flag", "SBX", "CleanRL", "PureJaxRL", "RSL-RL"), "")
        for row in found.itertuples():
            ratio = span(row.ratio, 1).split(" ")[0]
            label = VARIANTS[row.variant].split(" (")[0]
            if row.variant.startswith("--"):
                label, ratio = "ours, with a flag", f"{ratio} (`{row.variant}`)"
            if label in cells:
                cells[label] = ratio
        yield {"task, environments": f"{env_id}, {num_envs:,}"} | cells


def device_table() -> Iterator[Row]:
    """Single runs on a GPU, as gpu.py makes them."""
    speeds = pd.read_csv(SPEEDS)
    speeds = speeds.reindex(columns=[*speeds, *{"goal", "seconds", "memory"} - {*speeds}])
    for run in speeds[speeds.machine.str.startswith("NVIDIA")].itertuples():
        seconds, goal, peak = (pd.to_numeric(x) for x in (run.seconds, run.goal, run.memory))
        yield {
            "`python ...`": f"`{run.variant}`",
            "transitions": f"{run.timesteps:,}",
            "transitions per second": f"{float(run.speed):,.0f}",
            "last 100 training episodes": "" if np.isnan(run.training) else f"{run.training:.1f}",
            "greedy": "" if np.isnan(run.greedy) else f"{run.greedy:.1f}",
            "seconds": "" if np.isnan(seconds) else f"{seconds:,.1f}",
            "seconds to −200": "" if np.isnan(goal) else f"{goal:,.1f}",
            "GiB": "" if np.isnan(peak) else f"{peak:.1f}",
        }


def settings_table() -> Iterator[Row]:
    """The flags for the settings of others."""
    for (script, whose), flags in experiments.PLAIN.items():
        yield {"settings of": whose, "script": f"`{script}`", "flags": f"`{flags}`"}


def plain_table(results: pd.DataFrame) -> Iterator[Row]:
    """Returns with the settings of others, beside those that CleanRL has published."""
    plain = [
        (task, experiment)
        for script, tasks in experiments.PLAIN_TASKS.items()
        for task in tasks
        for experiment in experiments.PLAINS
        if experiment.script == script
    ]
    defaults = {"ppo.py": experiments.NOW_CLASSIC[0], "ppo_continuous.py": experiments.NOW[0]}
    for task, experiment in plain:
        found, whose = select(results, experiment.name, task), experiment.label
        mean, deviation = experiments.CLEANRL_RETURNS[task[0]]
        yield {
            "environment, steps": name_of(task),
            "settings of": whose,
            "seeds": f"{len(found)}",
            "last 100 training episodes": spread(found.training),
            "final": spread(found.greedy),
            "final, our defaults": spread(select(results, defaults[experiment.script], task).greedy),
            "CleanRL, published": f"{mean:,.1f} ± {deviation:.1f}" if whose == "CleanRL" else "",
        }


def ablation_table(results: pd.DataFrame) -> Iterator[Row]:
    """One change of ppo_continuous.py at a time: greedy returns, and scores (0: random, 1: published)."""
    tasks = experiments.ABLATION_TASKS
    random = np.array([experiments.RANDOM[env_id] for env_id, _ in tasks])
    best = np.array([experiments.SCORE_1[env_id] for env_id, _ in tasks])
    known: dict[str, np.ndarray] = {}  # scores [seeds, tasks] by experiment
    for experiment in experiments.ABLATION:
        found = [select(results, experiment.name, task).set_index("seed").greedy for task in tasks]
        row = {"change": experiment.label}
        for task, greedy in zip(tasks, found, strict=True):
            row[name_of(task)] = with_worst(greedy) if len(greedy) else ""
        row |= {"seeds": "", "interquartile mean": "", "P": "", "P, last change": ""}
        if len(together := pd.concat(found, axis=1, join="inner")):  # the seeds that all tasks have
            scores = (together.to_numpy() - random) / (best - random)
            row["seeds"] = f"{len(scores)}"
            row["interquartile mean"] = "{:.2f} [{:.2f}, {:.2f}]".format(*interval(aggregate_iqm, scores))
            known[experiment.name] = scores
            before = experiments.LAST_CHANGE_OF.get(experiment.name)
            for column, other in (("P", "ablation"), ("P, last change", before)):
                if other in known and other != experiment.name:
                    better = interval(probability_of_improvement, scores, known[other])
                    row[column] = "{:.2f} [{:.2f}, {:.2f}]".format(*better)
        if any(map(len, found)):
            yield row


def comparison_table(
    results: pd.DataFrame, tasks: list[Task], without: tuple[str, str], with_it: tuple[str, str]
) -> Iterator[Row]:
    """Greedy returns of two experiments (name, title), and P. On Swimmer, both have a flag and "-swimmer"."""
    pairs = []
    for task in tasks:
        end = "-swimmer" if task == experiments.SWIMMER else ""
        one, other = (select(results, name + end, task).greedy.to_numpy() for name, _ in (without, with_it))
        if len(one) and len(other):
            pairs.append((other, one))
            row = {"environment, steps": name_of(task), without[1]: with_worst(one)}
            yield row | {with_it[1]: with_worst(other), "P": f"{probability_of_improvement(other, one):.2f}"}
    if len(pairs) == len(tasks):
        yield {"environment, steps": "all", without[1]: "", with_it[1]: "", "P": mean_chance(pairs)}


def one_table(results: pd.DataFrame, tasks: list[Task], seeds: range) -> Iterator[Row]:
    """Arms of results/one_setting.md that have these seeds: greedy returns, and P against the defaults.

    Two arms have no runs of their own: averaged weights, and a long horizon where no episode can end early.
    """
    results = results[results.seed.isin(seeds)]
    found = {
        name: [select(results, f"{name}-ant" if "Ant" in task[0] else name, task) for task in tasks]
        for name in experiments.ONE_ARMS
    }
    scores = {name: [rows.greedy for rows in tables] for name, tables in found.items()}
    labels = {name: label for name, (label, _, _) in experiments.ONE_ARMS.items()}
    whole = [rows[rows.sessions == 1] for rows in found["one"]]  # resumed, it is another average
    scores["averaged"] = [rows.averaged.dropna() for rows in whole]
    labels["averaged"] = "averaged weights"
    endless = [task[0] in ("HalfCheetah-v5", "Swimmer-v5") for task in tasks]
    both = zip(endless, scores["one-gamma-997"], scores["one"], strict=True)
    scores["endless"] = [long if no_end else usual for no_end, long, usual in both]
    labels["endless"] = "γ = 0.997 where no episode can end early"
    for name, greedy in scores.items():
        if min(map(len, greedy)) > 1:  # P needs two seeds
            row = {"arm": labels[name]}
            row |= {name_of(task): with_worst(x) for task, x in zip(tasks, greedy, strict=True)}
            pairs = [(x.to_numpy(), y.to_numpy()) for x, y in zip(greedy, scores["one"], strict=True)]
            if name == "endless":  # where it is the defaults, P is 0.5, which is certain
                tie = np.zeros(2), np.zeros(2)
                pairs = [pair if no_end else tie for pair, no_end in zip(pairs, endless, strict=True)]
            yield row | {"P": "" if name == "one" else mean_chance(pairs)}


def layout_table(results: pd.DataFrame) -> Iterator[Row]:
    """Returns with filler rows (before) and without (now), and P that a seed of now is better."""
    pairs: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"training": [], "greedy": []}
    for before, now, tasks in experiments.BOTH_LAYOUTS:
        for task in tasks:
            old, new = select(results, before, task), select(results, now, task)
            row = {"environment, steps": name_of(task), "before": before, "seeds": f"{len(old)}, {len(new)}"}
            for kind, found in pairs.items():
                scores = new[kind].dropna().to_numpy(), old[kind].dropna().to_numpy()
                row |= {f"{kind} before": spread(scores[1]), f"{kind} now": spread(scores[0])}
                row[f"P, {kind}"] = mean_chance([scores]) if min(map(len, scores)) else ""
                found += [scores] if min(map(len, scores)) else []
            yield row
    yield dict.fromkeys(row, "") | {
        "environment, steps": "all",
        **{f"P, {kind}": mean_chance(found) for kind, found in pairs.items()},
    }


def earlier_tables(results: pd.DataFrame, forms: list[experiments.Earlier]) -> str:
    """A sentence for each earlier form of a table: how probable it is that a seed of now is better."""
    lines = []
    for form in forms:
        pairs: dict[str, tuple[np.ndarray, np.ndarray]] = {}  # final returns now and then, by task
        for task in form.tasks:
            names = newest(results, form.now, task)
            for name in form.names:
                label, before = EXPERIMENTS[name].label, select(results, name, task).greedy.to_numpy()
                if len(before) and names.get(label, name) != name:
                    title = f"{name_of(task)}, {label}".removesuffix(", the defaults")
                    pairs[title] = select(results, names[label], task).greedy.to_numpy(), before
        if pairs:
            chances = {title: probability_of_improvement(*pair) for title, pair in pairs.items()}
            low, high = min(chances, key=chances.__getitem__), max(chances, key=chances.__getitem__)
            ends = f", from {chances[low]:.2f} ({low}) to {chances[high]:.2f} ({high})"
            ends = ends if len(pairs) > 1 else f" ({low})"
            lines.append(f"- {form.about}: P is {mean_chance([*pairs.values()])}{ends}.")
    return "\n".join(lines)


def seeds_table(results: pd.DataFrame) -> Iterator[Row]:
    """Each seed of continuous control at the defaults, from the worst to the best final return.

    The best policies stand in the order of their seeds' last ones.
    """

    def listed(scores: pd.Series) -> str:
        digits = 0 if len(scores) and scores.abs().max() >= 1000 else 1
        return ", ".join("–" if np.isnan(score) else f"{score:.{digits}f}" for score in scores)

    for task in experiments.MUJOCO:
        names = [experiments.NOW[0], experiments.LAST[0]]
        now, before = (select(results, name, task).sort_values("greedy") for name in names)
        if names[0] not in newest(results, names, task).values():  # some seeds are not done
            now = now[:0]
        yield {
            "environment, steps": name_of(task),
            "final, earlier text": listed(before.greedy),
            "final": listed(now.greedy),
            "best": listed(now.best),
        }


def networks_table(results: pd.DataFrame) -> Iterator[Row]:
    """Training returns of the networks, and the mean over tasks of the share of the best published return."""
    tasks = experiments.NETWORK_TASKS
    best = [experiments.SCORE_1[env_id] for env_id, _ in tasks]
    for experiment in experiments.NETWORKS:
        found = [select(results, experiment.name, task).training for task in tasks]
        if {len(returns) for returns in found} != {3}:  # not done yet
            continue
        shares = np.transpose(found) / best  # [seeds, tasks]
        row = {"networks": experiment.label, "seeds": f"{len(shares)}"}
        row |= {name_of(task): spread(returns) for task, returns in zip(tasks, found, strict=True)}
        yield row | {"share": "{:.2f} [{:.2f}, {:.2f}]".format(*interval(np.mean, shares))}


def memory_table(results: pd.DataFrame) -> Iterator[Row]:
    """Tasks that need a memory."""
    for task, (steps, goal) in experiments.MEMORY_TASKS.items():
        for experiment in experiments.MEMORY:
            found = select(results, experiment.name, (task, steps))
            if len(found):
                reached = ["never" if np.isnan(x) else f"{x:.0f}" for x in found.seconds_to_goal]
                yield {
                    "task, steps": name_of((task.removeprefix("popgym:popgym-"), steps)),
                    "goal": f"{goal}",
                    "trained by": experiment.label,
                    "runs": f"{len(found)}",
                    "return": spread(found.training),
                    "CPU seconds": f"{found.seconds.mean():.0f}",
                    "to the goal, seed by seed": ", ".join(reached),
                }


def trl_table() -> Iterator[Row]:
    """The same model, trained by grpo.py and by TRL: medians of the seeds, and their range."""
    runs, curves = pd.read_csv(LANGUAGE_RUNS), pd.read_csv(LANGUAGE_CURVES)
    curves["batch"] = curves.groupby(["study", "seed"]).seconds.diff()
    runs = runs.merge(curves.groupby(["study", "seed"]).batch.median(), on=["study", "seed"])
    for loss, name in experiments.TRL_LOSSES.items():
        ours, theirs = (
            runs[runs.study == f"llama-{library}-{loss}"].set_index("seed") for library in ("grpo", "trl")
        )
        yield {
            "aggregation here (in TRL)": f"{loss} ({name})",
            "reward, last 10 batches: here": span_of(ours.score, 3),
            "TRL": span_of(theirs.score, 3),
            "CPU seconds per batch, TRL over here": span_of(theirs.batch / ours.batch, 2),
            "peak MiB: here": f"{ours.peak_mib.median():.0f}",
            "peak MiB: TRL": f"{theirs.peak_mib.median():.0f}",
        }


def minutes_table(results: pd.DataFrame) -> Iterator[Row]:
    """Returns at the end, and CPU minutes: means and standard deviations over seeds."""
    for task in experiments.TIMED:
        for experiment in experiments.MINUTES:
            found = select(results, experiment.name, task)
            if len(found):
                yield {
                    "environment, steps": name_of(task),
                    "trained by": experiment.label,
                    "last 100 training episodes": spread(found.training),
                    "minutes of one core": spread(found.seconds / 60),
                }


def rules_table(rules: list[coach.Rule], problem: str) -> Iterator[Row]:
    """Rules of coach.py, with the title of the column of problems. Unsafe settings need no iterations."""
    for rule in rules:
        yield {
            "rule": f"`{rule.when}`",
            "n": "" if rule in coach.UNSAFE else f"{rule.iterations}",
            problem: rule.problem,
            "what to do": rule.remedy,
        }


def load_verdicts(held_out: bool) -> pd.DataFrame:
    """What coach.py says of runs: those on which its limits were chosen, or the others."""
    rows = pd.read_csv(VERDICTS, keep_default_na=False)
    return rows[rows.held_out == held_out].copy()


def found_table() -> Iterator[Row]:
    """What coach.py says of planted bugs: for each script, the iteration at which it was known.

    It is the first thing that is WRONG, or else the first question, that about Gymnasium's threshold last.
    """
    rows = load_verdicts(held_out=False)
    rows["order"] = (
        rows.found + 1e6 * (rows.verdict != "WRONG") + 1e3 * rows.problem.str.contains("Gymnasium")
    )
    for bug in verdicts.BUGS:
        cells: dict[tuple[bool, str], Row] = {}
        for script, found in rows[rows.bug == bug].groupby("script"):
            first = found.sort_values("order").iloc[0]
            mark = {"WRONG": f"**{first.found}**", "QUESTION": f"{first.found}", "": "-"}[first.verdict]
            problem = first.problem or "nothing"
            cells.setdefault((first.verdict != "WRONG", problem), {})[script] = mark
        for i, (is_question, problem) in enumerate(sorted(cells)):
            marks = cells[is_question, problem]
            yield {
                "planted bug": bug if i == 0 else "",
                "what `check` says": problem,
                **{script.removeprefix("ppo_"): marks.get(script, "") for script in verdicts.TASKS},
            }


def said(rows: pd.DataFrame, verdict: str) -> str:
    """The problems of a verdict, with the number of runs or, of a single run, the iteration."""
    chosen = rows[rows.verdict == verdict]
    if rows.seed.nunique() == 1:
        return "; ".join(f"{row.problem} ({row.found})" for row in chosen.itertuples())
    return "; ".join(
        f"{problem} ({count} of {rows.seed.nunique()})"
        for problem, count in chosen.groupby("problem", sort=False).seed.nunique().items()
    )


def alarms_table() -> Iterator[Row]:
    """What coach.py says of sound runs, by script and task."""
    rows = load_verdicts(held_out=False).query("bug == ''")
    for script, flags, _ in verdicts.SOUND:
        runs = rows[(rows.script == script) & (rows["flags"] == flags)]
        yield {
            "sound runs of": f"`{script}.py {flags}`".replace(" `", "`"),
            "runs": f"{runs.seed.nunique()}",
            "WRONG": said(runs, "WRONG") or "none",
            "QUESTION": said(runs, "QUESTION"),
        }


def held_out_table() -> Iterator[Row]:
    """What coach.py says of the bugs and sound runs that were made without knowing its rules."""
    rows = load_verdicts(held_out=True)
    for (script, bug, flags), runs in rows.groupby(["script", "bug", "flags"], sort=False):
        yield {
            "run": f"`{script}.py`: {bug}" if bug else f"sound: `{script}.py {flags}`",
            "WRONG": said(runs, "WRONG"),
            "QUESTION": said(runs, "QUESTION"),
        }


def kept(results: pd.DataFrame) -> str:
    """How often a run's best policy beats its last one in new episodes: MuJoCo, the defaults."""
    found = results[results.experiment == experiments.NOW[0]]
    found = found[found.env_id.str.endswith("-v5") & found.best.notna()]
    gain = (found.best - found.greedy) / found.greedy.abs()  # 0 where it is the last policy
    last = found.best_step >= found.steps  # a run ends with its last whole iteration, after `steps`
    far = [
        f"{run.env_id.removesuffix('-v5')} {run.seed} ({run.greedy:,.0f}, then {run.best:,.0f})"
        for run in found[gain > 0.1].sort_values(["env_id", "seed"]).itertuples()
    ]
    return (
        f"**Of {len(found)} runs of the table at the defaults, the last policy is the best one in "
        f"{last.sum()}.** In new episodes, `best.pt` is better than the last policy in {(gain > 0).sum()} "
        f"of the others, and worse in {(gain < 0).sum()}: by more than a tenth, better in {len(far)} and "
        f"worse in {(gain < -0.1).sum()}. Where it is better by that much: {', '.join(far)}."
    )


def best_table() -> Iterator[Row]:
    """Of each run with evaluations: the last policy, and the best one."""
    for row in pd.read_csv(BEST).query("eval_every > 0").sort_values(["env_id", "seed"]).itertuples():
        yield {
            "environment": row.env_id,
            "seed": f"{row.seed}",
            "last policy in new episodes": f"{row.final:.1f} ± {row.final_std:.1f}",
            "best.pt, after steps": f"{row.best_step:,.0f}",
            "return that chose it": f"{row.best_chosen:.1f}",
            "best.pt in new episodes": f"{row.best_replayed:.1f} ± {row.best_replayed_std:.1f}",
        }


def markdown(rows: Iterable[Row]) -> str:
    """A table as Markdown; its head is that of the first row. Columns without any entry are left out."""
    rows = list(rows)
    columns = [column for column in next(iter(rows), {}) if any(row[column] for row in rows)]
    lines = [columns, ["---"] * len(columns), *([row[column] for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def tables() -> dict[str, str]:
    """All tables as Markdown, by name."""
    results = load()
    made = {name: [*study_table(results, study)] for name, study in experiments.STUDIES.items()}
    tasks = [*experiments.CLASSIC, experiments.TAXI]
    names = experiments.NOW_CLASSIC + experiments.LAST_CLASSIC
    made["classic"] = [*returns(results, names, tasks, "sb3-rl-zoo")]
    names = experiments.NOW + experiments.LAST
    made["mujoco"] = [*returns(results, names, experiments.MUJOCO, "sb3-rl-zoo-mujoco")]
    made["seeds"] = [*seeds_table(results)]
    made["ablation"] = [*ablation_table(results)]
    tasks = [*experiments.RECOMPUTE_TASKS, experiments.SWIMMER]
    titles = ("once", "computed once"), ("recompute", "before each epoch")
    made["recompute"] = [*comparison_table(results, tasks, *titles)]
    tasks = [*experiments.BETA2_TASKS, experiments.SWIMMER]
    titles = ("continuous", "β2 = 0.999"), ("beta2", "β2 = 0.99")
    made["beta2"] = [*comparison_table(results, tasks, *titles)]
    made["one-stage-1"] = [*one_table(results, experiments.ONE_TASKS, range(1001, 1004))]
    made["one-stage-2"] = [*one_table(results, experiments.ONE_FIVE, range(1101, 1106))]
    made["layout"] = [*layout_table(results)]
    made["networks"] = [*networks_table(results)]
    made["settings"] = [*settings_table()]
    made["plain"] = [*plain_table(results)]
    made["atari"] = [*atari_table(results)]
    names = [experiment.name for experiment in experiments.GPU]
    made["gpu"] = [*returns(results, names, [experiments.PENDULUMS, experiments.BALANCE], "")]
    made["device"] = [*device_table()]
    made["memory"] = [*memory_table(results)]
    made["minutes"] = [*minutes_table(results)]
    made["trl"] = [*trl_table()]
    made["best"] = [*best_table()]
    made["speed"] = [*speed_table(load_speeds())]
    made["ratios"] = [*ratios_table(load_speeds())]
    rows = made["classic"] + made["mujoco"] + made["atari"]
    left_out = "sampled actions", "best", "XuanCe, best", "published, other protocols"
    rows = [row for row in rows if row["environment, steps"] in SUMMARY]
    made["summary"] = [{key: row[key] for key in row if key not in left_out} for row in rows]
    made["unsafe"] = [*rules_table(coach.UNSAFE, "what is wrong")]
    rules = [rule for rule in coach.RULES if rule not in coach.UNSAFE]
    made["rules"] = [*rules_table(rules, "what is wrong")]
    made["found"] = [*found_table()]
    made["alarms"] = [*alarms_table()]
    made["held-out"] = [*held_out_table()]
    made["questions"] = [*rules_table(coach.QUESTIONS, "what may be wrong")]
    texts = {name: earlier_tables(results, forms) for name, forms in experiments.EARLIER_TABLES.items()}
    texts |= {"standing": standing(results), "kept": kept(results)}
    return {name: markdown(rows) for name, rows in made.items()} | texts


def fill(document: str, made: dict[str, str]) -> str:
    """The document with the tables between its marks replaced."""
    return re.sub(
        r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{made[match[2]]}\n{match[3]}",
        document,
        flags=re.DOTALL,
    )


def main() -> None:
    """The command line."""
    made = tables()
    for path in PAGES:
        path.write_text(fill(path.read_text(), made))


if __name__ == "__main__":
    main()
