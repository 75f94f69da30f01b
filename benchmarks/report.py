"""Make the tables and figures from the stored results: rewrites README.md, benchmarks/README.md and figures/.

    python benchmarks/report.py              # tables and figures
    python benchmarks/report.py --check      # do the tables in the files match the stored results?

A table stands between the markers `<!-- table: NAME -->` and `<!-- end -->`. In all of them a seed counts
once, with the mean of its episodes. ± is the standard deviation over seeds, IQM the interquartile mean over
seeds with its 95% stratified bootstrap interval, and P the probability that a seed of ours beats one of
theirs (Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the Statistical Precipice"; computed
by their rliable).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from experiments import (
    ABLATED,
    ATARI,
    CANDIDATES,
    CLASSIC,
    FULL_LENGTH,
    HERE,
    LOCOMOTION,
    MUJOCO,
    RESULTS,
    SCREENED,
    SEARCH,
    STUDIES,
    Study,
    runs,
)

ROOT, FIGURES = HERE.parent, HERE / "figures"
Results = dict[tuple[str, tuple[str, int]], list[dict[str, Any]]]  # by experiment and task
PUBLISHED = {  # Stable-Baselines3's RL Zoo, benchmark.md, which has the settings tuned for each environment
    "CartPole-v1": "500.0 ± 0.0 at 100k",
    "Acrobot-v1": "-73.5 ± 18.2 at 1M",
    "MountainCar-v0": "-110.4 ± 19.5 at 1M",
    "LunarLander-v3": "242.1 ± 31.8 at 1M (v2)",
}
BEST = {  # the best PPO at these steps that we found published: mean, spread, who, version
    "HalfCheetah-v5": (5819.1, 663.5, "RL Zoo, v3"),
    "Hopper-v5": (2609.3, 700.8, "Tianshou, v3"),
    "Walker2d-v5": (4000.0, None, "ikostrikov"),
    "Ant-v5": (3258.4, 1079.3, "Tianshou, v3"),
    "Humanoid-v5": (787.1, 193.5, "Tianshou, v3"),
    "Swimmer-v5": (281.6, 9.7, "RL Zoo, v3"),
    "Reacher-v5": (-4.1, 0.3, "Tianshou, v2"),
    "InvertedPendulum-v5": (1000.0, 0.0, "Tianshou, v2"),
    "InvertedDoublePendulum-v5": (9231.3, 270.4, "Tianshou, v2"),
    "Pusher-v5": (-40.4, 7.2, "CleanRL, v4"),
    "Pendulum-v1": (-172.2, None, "RL Zoo, v1"),
}
BEST_ATARI = {  # the same, at 10M steps
    "PongNoFrameskip-v4": "21.0 ± 0.1 (RL Zoo)",
    "BreakoutNoFrameskip-v4": "414.7 ± 28.1 (CleanRL)",
    "BeamRiderNoFrameskip-v4": "3397.0 ± 1662.4 (RL Zoo)",
    "QbertNoFrameskip-v4": "15627.1 ± 3313.5 (RL Zoo)",
    "SpaceInvadersNoFrameskip-v4": "960.3 ± 425.4 (RL Zoo)",
}
WAYS = {  # to run our scripts, by throughput.py's name for them
    "ours": "eager",
    "compiled": "`--compile`",
    "workers": "`--compile --async-envs`",
    "bfloat16": "`--bfloat16`",
    "both": "`--bfloat16 --compile`",
}


def load() -> Results:
    """The stored results, in the order of their seeds, by experiment and task."""
    results: Results = {}
    for run in runs():
        if run.path.exists():
            results.setdefault((run.experiment.name, run.task), []).append(json.loads(run.path.read_text()))
    for found in results.values():
        found.sort(key=lambda result: int(result["run"].rpartition("/")[2]))
    return results


def score(results: list[dict[str, Any]], mode: str) -> np.ndarray:
    """[seeds] mean return in training (the last 100 episodes) or of an evaluation."""
    return np.array([np.mean(result["final"][mode]) for result in results])


def mean_over_training(results: list[dict[str, Any]], quantity: str) -> np.ndarray:
    """[seeds] mean of a learning curve, from where it begins: how good and how early."""
    return np.array([np.mean([x for x in run["curve"][quantity] if x is not None]) for run in results])


def interval(function: Callable, *scores: np.ndarray) -> tuple[float, float, float]:
    """A statistic of one or two sets of scores, [seeds] or [seeds, tasks], and the ends of its 95% interval.

    The bootstrap draws the seeds of each task separately.
    """
    from rliable.library import get_interval_estimates

    np.random.seed(0)  # rliable draws from NumPy's global generator  # noqa: NPY002
    tables = tuple(x.reshape(len(x), -1) for x in scores)  # [seeds, tasks]
    point, ends = get_interval_estimates(
        {"": tables if len(tables) > 1 else tables[0]}, lambda *x: np.array([function(*x)]), reps=2000
    )
    return float(point[""][0]), float(ends[""][0, 0]), float(ends[""][1, 0])


def iqm(scores: np.ndarray) -> str:
    """Interquartile mean and its interval, as text; nothing for a single seed."""
    from rliable.metrics import aggregate_iqm

    if len(scores) < 2:
        return ""
    digits = 2 if abs(scores).max() <= 1 else 1
    return "{:.{d}f} [{:.{d}f}, {:.{d}f}]".format(*interval(aggregate_iqm, scores), d=digits)


def improvement(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Probability of improvement and its interval, as text."""
    from rliable.metrics import probability_of_improvement

    return "{:.2f} [{:.2f}, {:.2f}]".format(*interval(probability_of_improvement, ours, theirs))


def spread(scores: np.ndarray) -> str:
    """Mean and standard deviation, as text."""
    digits = 2 if abs(scores).max() <= 1 else 1
    deviation = f" ± {scores.std(ddof=1):.{digits}f}" if len(scores) > 1 else ""
    return f"{scores.mean():.{digits}f}{deviation}"


def tasks(listed: Mapping[str, int | tuple[int, ...]]) -> Iterator[tuple[str, int]]:
    """Environment and steps, one by one."""
    for env_id, lengths in listed.items():
        for steps in lengths if isinstance(lengths, tuple) else (lengths,):
            yield env_id, steps


def short(steps: int) -> str:
    """100000 as 100k, 1000000 as 1M."""
    return f"{steps // 1_000_000}M" if steps % 1_000_000 == 0 else f"{steps // 1000}k"


def classic_table(results: Results) -> Iterator[list[str]]:
    """The classic suite: ours, the published, and the peer that was run here."""
    yield [
        *("environment", "steps", "seeds", "last 100 training episodes", "greedy", "greedy, IQM"),
        *("best published", "Stable-Baselines3 here, greedy", "P"),
    ]
    rows = [("ppo", task, "") for task in tasks(CLASSIC)]
    rows.insert(3, ("no-entropy-bonus", ("Acrobot-v1", 500_000), ", `--ent-coef 0`"))
    for name, (env_id, steps), flags in rows:
        ours, theirs = results[name, (env_id, steps)], results["sb3-rl-zoo", (env_id, steps)]
        greedy, peer = score(ours, "greedy"), score(theirs, "greedy")
        yield [
            env_id + flags,
            short(steps),
            f"{len(ours)}",
            spread(score(ours, "training")),
            f"**{spread(greedy)}**",
            iqm(greedy),
            PUBLISHED[env_id],
            f"{spread(peer)} ({len(peer)} seeds)",
            improvement(greedy, peer),
        ]


def normalized(scores: np.ndarray, env_id: str) -> np.ndarray:
    """Returns as multiples of the best published, or for costs that over ours: above 1 is better."""
    best = BEST[env_id][0]
    return scores / best if best > 0 else best / scores


def mujoco_table(results: Results) -> Iterator[list[str]]:
    """Continuous control: ours beside the best published, and as a multiple of it."""
    yield [
        *("environment", "steps", "seeds", "last 100 training episodes", "greedy", "greedy, IQM"),
        *("best published", "ours / theirs"),
    ]
    ratios = []
    for env_id, steps in tasks(MUJOCO):
        ours = results["mujoco", (env_id, steps)]
        greedy, (mean, std, who) = score(ours, "greedy"), BEST[env_id]
        ratios.append(float(normalized(greedy.mean(), env_id)))
        yield [
            env_id,
            short(steps),
            f"{len(ours)}",
            spread(score(ours, "training")),
            f"**{spread(greedy)}**",
            iqm(greedy),
            f"{mean:.1f}{'' if std is None else f' ± {std:.1f}'} ({who})",
            f"{ratios[-1]:.2f}",
        ]
    for name, average in (("mean", np.mean), ("median", np.median)):
        yield [name, "", "", "", "", "", "", f"**{average(ratios):.2f}**"]


def candidates_table(results: Results) -> Iterator[list[str]]:
    """What was or may become continuous control's defaults: greedy returns, and over the best published."""
    yield ["environment", *CANDIDATES.values()]
    ratios: dict[str, list[float]] = {name: [] for name in CANDIDATES}
    for task in tasks(MUJOCO):
        cells = []
        for name in CANDIDATES:
            greedy = score(results.get((name, task), []), "greedy")
            cells.append(f"{spread(greedy)} ({len(greedy)})" if len(greedy) else "")
            ratios[name] += [float(normalized(greedy.mean(), task[0]))] if len(greedy) else []
        yield [f"{task[0]}, {short(task[1])}", *cells]
    for label, average in (("mean", np.mean), ("median", np.median)):
        cells = (f"**{average(x):.2f}**" if len(x) == len(MUJOCO) else "" for x in ratios.values())
        yield [f"{label}, over the best published", *cells]


def atari_table(results: Results) -> Iterator[list[str]]:
    """Atari: each experiment of `ATARI` on each game that it was run on."""
    early = 250_000
    yield [
        *("game", "", "steps", "seeds", f"training, at {short(early)}", "last 100 games of training"),
        *("greedy", "sampled actions", "games", "minutes", "best published, at 10M"),
    ]
    for (name, (env_id, steps)), found in results.items():
        if name in ATARI:
            curves = np.array([run["curve"]["return"] for run in found], dtype=float)
            training, greedy, sampled = (
                spread(score(found, mode)) for mode in ("training", "greedy", "stochastic")
            )
            yield [
                *(env_id, ATARI[name], short(steps), f"{len(found)}"),
                spread(curves[:, early * curves.shape[1] // steps - 1]),
                *(training, f"**{greedy}**", sampled, f"{len(found[0]['final']['greedy'])}"),
                f"{np.mean([run['seconds'] for run in found]) / 60:.0f}",
                BEST_ATARI[env_id],
            ]


def over_published(found: list[list[dict[str, Any]]]) -> np.ndarray:
    """[seeds, tasks] returns in training on `LOCOMOTION`, as multiples of the best published."""
    each = [normalized(score(x, "training"), env_id) for x, env_id in zip(found, LOCOMOTION, strict=True)]
    return np.stack(each, 1)


def ablation(results: Results) -> dict[str, tuple[str, list[list[dict[str, Any]]]]]:
    """Of the defaults, and of each entry that was run on all tasks: the label, and the results on each."""
    found = {name: [results.get((name, task), []) for task in tasks(LOCOMOTION)] for name in ABLATED}
    seeds = len(next(iter(found.values()))[0])
    return {
        name: (ABLATED[name], each)
        for name, each in found.items()
        if seeds > 1 and all(len(x) == seeds for x in each)
    }


def ablation_table(results: Results) -> Iterator[list[str]]:
    """One detail of continuous control changed at a time: returns in training, and over the published."""
    from rliable.metrics import aggregate_mean

    names = [env_id.partition("-")[0] for env_id in LOCOMOTION]
    yield ["entry", "seeds", *names, "mean, over the best published"]
    rows = []
    for label, found in ablation(results).values():
        over = over_published(found)
        mean, low, high = interval(aggregate_mean, over)
        cells = [spread(score(x, "training")) for x in found]
        rows.append((mean, [label, f"{len(over)}", *cells, f"**{mean:.2f}** [{low:.2f}, {high:.2f}]"]))
    yield from (row for _, row in sorted(rows, key=lambda pair: -pair[0]))


def full_length_table(results: Results) -> Iterator[list[str]]:
    """Entries of the ablation at the table's length, as far as they were run, beside the defaults."""
    yield ["environment", "entry", "seeds", "last 100 training episodes", "greedy", "greedy, seed by seed"]
    for env_id, (_, names) in FULL_LENGTH.items():
        for name in ("mujoco", *(f"mujoco-but-{name}" for name in names.split())):
            if found := results.get((name, (env_id, MUJOCO[env_id]))):
                training, greedy = (score(found, mode) for mode in ("training", "greedy"))
                each = f"**{spread(greedy)}**", ", ".join(f"{x:.0f}" for x in greedy)
                yield [env_id, ABLATED[name], f"{len(found)}", spread(training), *each]


def search_table(results: Results) -> Iterator[list[str]]:
    """The search for continuous control's defaults: training / greedy of each seed, as far as it was run."""
    columns = dict.fromkeys(task for listed, *_ in SEARCH for task in tasks(listed))
    yield ["entry", *(f"{env_id.partition('-')[0]}, {short(steps)}" for env_id, steps in columns)]
    for name, (label, *_) in SCREENED.items():
        found = [results.get((f"mujoco-{name}", task), []) for task in columns]
        pairs = ([[np.mean(x["final"][m]) for m in ("training", "greedy")] for x in each] for each in found)
        yield [label, *("; ".join("{:.0f} / {:.0f}".format(*pair) for pair in each) for each in pairs)]


def study_table(study: Study, results: Results) -> Iterator[list[str]]:
    """A study: its entries on each task, with what their updates were like, on average over training."""
    yield [
        *("task", "entry", "seeds", "last 100 training episodes", "greedy, IQM", "mean over training"),
        *("P, default", "KL", "clip fraction", "entropy"),
    ]
    for task in tasks(study.tasks):
        for name, label in study.labels.items():
            found, default = results[name, task], results["ppo", task]
            over = mean_over_training(found, "return")
            means = (
                mean_over_training(found, quantity).mean() for quantity in ("kl", "clip_fraction", "entropy")
            )
            yield [
                f"{task[0]}, {short(task[1])}",
                label,
                f"{len(found)}",
                spread(score(found, "training")),
                iqm(score(found, "greedy")),
                spread(over),
                "" if name == "ppo" else improvement(over, mean_over_training(default, "return")),
                *("{:.4f} {:.3f} {:.2f}".format(*means).split()),
            ]


def speed_table(rows: list[dict[str, Any]], env_ids: tuple[str, ...]) -> Iterator[list[str]]:
    """What throughput.py stored of some environments."""
    rows = [row for row in rows if row["env_id"] in env_ids]
    labels = {who: label for who, label in (WAYS | {"ours": "steps/s"}).items() if who in rows[0]}
    ratios = ("ratio", *list(labels.values())[1:])
    yield ["environment", "N", *labels.values(), "Stable-Baselines3", *ratios, "memory, MiB"]
    for row in rows:
        yield [
            row["env_id"],
            f"{row['num_envs']:,}",
            *("{1:,.0f} ({0:,.0f} to {2:,.0f})".format(*row[who]["sps"]) for who in (*labels, "sb3")),
            *("**{1:.2f}** ({0:.2f} to {2:.2f})".format(*row[who]["ratio"]) for who in labels),
            ", ".join(f"{row[who]['mib']:,}" for who in (*labels, "sb3") if who != "workers"),
        ]


def shares_table(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """Where the time of our scripts goes."""
    yield ["environment", "N", "", *rows[0]["ours"]["shares"], "compiling, s"]
    for row in rows:
        for who in (who for who in WAYS if who in row):
            compiling = row[who].get("compiling")
            shares = (f"{share:.0%}" for share in row[who]["shares"].values())
            last = f"{compiling[1]:.0f}" if compiling else ""
            yield [row["env_id"], f"{row['num_envs']:,}", WAYS[who], *shares, last]


def limits_table(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """How near ppo_atari.py comes to its games and its network, each alone, in turn."""
    yield ["environment", "N", "", "steps/s", "the games alone", "the network alone", "in turn", "reached"]
    for row in (row for row in rows if "games" in row):
        for who, network in (("ours", "network"), ("bfloat16", "rough"), ("both", "graphs")):
            if network not in row:  # stored before it was measured
                continue
            reached, *alone = (row[key]["sps"][1] for key in (who, "games", network))
            limit = 1 / sum(1 / speed for speed in alone)
            figures = (f"{speed:,.0f}" for speed in (reached, *alone, limit))
            yield [row["env_id"], f"{row['num_envs']:,}", WAYS[who], *figures, f"{reached / limit:.0%}"]


def tables() -> dict[str, str]:
    """All tables as Markdown, by name."""
    results = load()
    made = {"classic": classic_table(results)}
    made |= {"mujoco": mujoco_table(results), "atari": atari_table(results)}
    made |= {"ablation": ablation_table(results), "search": search_table(results)}
    made |= {"candidates": candidates_table(results), "full-length": full_length_table(results)}
    made |= {name: study_table(study, results) for name, study in STUDIES.items() if name != "classic"}
    speed = json.loads((RESULTS / "throughput.json").read_text())
    made["speed-classic"] = speed_table(speed, ("CartPole-v1",))
    made["speed-mujoco"] = speed_table(speed, ("HalfCheetah-v5", "Humanoid-v5"))
    made["speed-atari"] = speed_table(speed, ("BreakoutNoFrameskip-v4",))
    made |= {"shares": shares_table(speed), "limits": limits_table(speed)}
    text = {}
    for name, rows in made.items():
        head, *body = (f"| {' | '.join(row)} |" for row in rows)
        text[name] = "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *body])
    return text


def fill(document: str, made: dict[str, str]) -> str:
    """The document with what stands between its markers replaced by the tables."""
    return re.sub(
        r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)",
        lambda match: f"{match[1]}{made[match[2]]}\n{match[3]}",
        document,
        flags=re.DOTALL,
    )


def main() -> None:
    """The command line. Exit status: 0 done, 1 the tables differ."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="change nothing, but say whether something would"
    )
    options = parser.parse_args()
    made, differ = tables(), []
    for path in (ROOT / "README.md", HERE / "README.md"):
        before = path.read_text()
        if (after := fill(before, made)) != before:
            differ.append(str(path.relative_to(ROOT)))
            if not options.check:
                path.write_text(after)
    print(f"tables {'differ' if options.check else 'rewritten'} in: {', '.join(differ) or 'no file'}")
    if options.check:
        sys.exit(bool(differ))
    from figures import draw

    for path in draw(load()):
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
