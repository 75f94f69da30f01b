# /// script
# requires-python = ">=3.11"
# dependencies = ["matplotlib", "pandas<3", "tensorboard", "tyro>=0.9.1"]
# ///
"""Learning curves of runs, from their TensorBoard files. Runs of CleanRL have the same tags.

    python plot.py runs/* --output curves.png
    python plot.py runs/* --compare

Each environment has a panel, each experiment a line: the mean of its seeds, with their range as a band. A dot
is an evaluation of one seed: its mean return with the most likely actions. Runs that differ in more than
the seed are different experiments, named by the settings that differ, and by a hash of the script if its text
differs: `sha1sum runs/*/*.py` lists the hashes of all runs.
"""

import hashlib
import logging
import re
import sys
from dataclasses import dataclass
from glob import glob
from pathlib import Path
from typing import Literal

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

try:
    import matplotlib.pyplot as plt
    import pandas as pd
    from matplotlib.ticker import EngFormatter
except ImportError as error:
    sys.exit(f'plot.py needs {error.name}: pip install matplotlib "pandas<3"')

RUN = re.compile(r"(?P<env_id>.+?)__(?P<experiment>.+)__(?P<seed>-?\d+)__(?P<date>[\d-]+)")  # its folder
TAGS = "charts/episodic_return", "reward", "objective/scores"  # one of them is in the runs of every script
OUTSIDE = {  # settings that do not change what is learnt
    "seed", "exp_name", "plan", "resume", "evaluate", "eval_episodes", "eval_every", "stop_at",
    "capture_video", "track", "wandb_project_name", "wandb_entity", "device", "num_threads", "compile",
    "async_envs", "env_id",
}  # fmt: skip
plt.style.use(["seaborn-v0_8-whitegrid", "seaborn-v0_8-colorblind"])


@dataclass
class Args:  # the comments are the texts of --help
    runs: tyro.conf.Positional[tuple[str, ...]] = ("runs",)  # folders with runs, at any depth
    tag: str | None = None  # the scalar to plot, as TensorBoard names it; default: returns, or rewards
    x: Literal["steps", "seconds"] = "steps"  # seconds leave out the pause before a --resume
    smooth: float = 0.05  # average over this share of the panel's longest run; 0 for none
    output: str | None = None  # file of the figure (.png, .pdf, .svg); default: a window, else curves.png
    compare: bool = False  # print a table of the last values instead


def read_events(folder: Path) -> EventAccumulator:
    """What a run has logged. TensorBoard drops steps that a --resume repeats."""
    logging.getLogger("tensorboard").setLevel("ERROR")  # it warns of each step that it drops
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all, not a sample
    return events.Reload() if folder.is_dir() else events


def read_settings(events: EventAccumulator) -> dict[str, str]:
    """The settings that decide what is learnt, from the table that the script has logged."""
    for tag in {"settings/text_summary", "hyperparameters/text_summary"} & set(events.Tags()["tensors"]):
        table = events.Tensors(tag)[-1].tensor_proto.string_val[0].decode()
        rows = re.findall(r"^\|(\w+)\|(.*?)\|$", table.split("|-|-|")[1], re.M | re.S)
        return {name: value for name, value in rows if name not in OUTSIDE}
    return {}


def read_curve(events: EventAccumulator, tag: str | None) -> pd.DataFrame:
    """The values of a tag, by default the first of TAGS that was logged, with their steps and seconds."""
    logged = events.Tags()["scalars"]
    tag = tag or next((name for name in TAGS if name in logged), "")
    scalars = events.Scalars(tag) if tag in logged else []
    values = [(event.wall_time, event.step, event.value) for event in scalars]
    curve = pd.DataFrame(values, columns=["wall_time", "steps", "value"], dtype=float)
    curve["seconds"] = curve.wall_time - (events.FirstEventTimestamp() if scalars else 0)
    for file in sorted(Path(events.path).glob("events.out.tfevents.[0-9]*"))[1:]:  # a file per --resume,
        start = int(file.name.split(".")[3])  # with its time in the name
        before = curve.wall_time[curve.wall_time < start]
        curve.loc[curve.wall_time >= start, "seconds"] -= start - before.max() if len(before) else 0
    return curve[np.isfinite(curve.value)].assign(tag=tag)


def name_by_settings(runs: pd.DataFrame) -> None:
    """Add to the name of each experiment the settings in which its runs differ."""
    for _, group in runs.groupby(["env_id", "experiment"]):
        settings = pd.DataFrame(list(group.settings), index=group.index)
        numbers = settings.apply(pd.to_numeric, errors="coerce")  # 1e5, 100000 and 100000.0 are equal
        settings = numbers.map("{:.15g}".format).where(numbers.notna(), settings).fillna("unknown")
        for name in settings.columns[settings.nunique() > 1]:
            runs.loc[group.index, "experiment"] += ", " + name + " " + settings[name]


def load_runs(paths: tuple[str, ...], tag: str | None) -> pd.DataFrame:
    """A row per run: env_id, experiment, seed, date, folder and curve. It prints what it skips, and why."""
    folders: set[Path] = set()
    for path in [Path(path) for pattern in paths for path in glob(pattern) or [pattern]]:
        files = [path] if path.is_file() else path.rglob("*tfevents*")
        folders |= {file.parent for file in files} or {path}
    rows = []
    for folder in sorted(folders):
        events = read_events(folder)
        curve = read_curve(events, tag)
        if len(curve) and (name := RUN.fullmatch(folder.name)):
            copy = b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))
            script = hashlib.sha1(copy).hexdigest()[:6] if copy else "unknown"  # not all runs have a copy
            about = {"folder": folder, "curve": curve, "settings": read_settings(events), "script": script}
            greedy = read_curve(events, "eval/greedy_return")
            rows.append({**name.groupdict(), **about, "greedy": greedy})
        else:
            missing = tag or " or ".join(TAGS)
            reason = "its name is not env_id__exp_name__seed__date" if len(curve) else f"it has no {missing}"
            print(f"skipped {folder}: {reason}", file=sys.stderr)
    if not rows:
        print("plot.py: nothing to plot", file=sys.stderr)
        sys.exit(2)
    runs = pd.DataFrame(rows).sort_values("date")
    runs.loc[runs.date.str.isdigit(), "experiment"] += " (CleanRL)"  # its folders end in the Unix time
    edited = runs.groupby("experiment").script.transform("nunique") > 1
    runs.loc[edited, "experiment"] += ", script " + runs.script[edited]
    name_by_settings(runs)
    older = runs.duplicated(["env_id", "experiment", "seed"], keep="last")
    for folder in runs.folder[older]:
        print(f"skipped {folder}: a later run has its script, settings and seed", file=sys.stderr)
    runs = runs[~older]
    for _, group in runs.groupby(["env_id", "experiment"]):
        ends = [curve.steps.max() for curve in group.curve]
        for folder, end in zip(group.folder, ends, strict=True):
            if end < 0.9 * max(ends):
                text = f"{folder} ends after {end:,.0f} steps, another seed after {max(ends):,.0f}"
                print(f"note: {text}; is it complete, or did --stop-at end it?", file=sys.stderr)
    return runs


def smooth(curve: pd.DataFrame, x: str, window: float, points: np.ndarray) -> np.ndarray:
    """The curve at these points of x, where each value is the mean of those from x - window to x."""
    sums = np.concatenate([[0.0], curve.value.cumsum()])
    first, end = curve[x].searchsorted(curve[x] - window), curve[x].searchsorted(curve[x], "right")
    return np.interp(points, curve[x], (sums[end] - sums[first]) / (end - first))


def draw(runs: pd.DataFrame, args: Args) -> None:
    """A panel for each environment, with a line for each experiment."""
    panels = runs.groupby("env_id")
    experiments = sorted(set(runs.experiment))
    columns = int(np.ceil(np.sqrt(len(panels))))
    rows = int(np.ceil(len(panels) / columns))
    lines_of = {}  # an example of each experiment, for the legend
    height = 3.6 * rows + 0.17 * max(0, len(experiments) - 3)  # a long legend does not squeeze the panels
    figure = plt.figure(figsize=(5 * columns, height), dpi=150, layout="constrained")
    for place, (env_id, panel) in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        window = float(f"{args.smooth * max(curve[args.x].max() for curve in panel.curve):.1g}")  # round
        for experiment, group in panel.groupby("experiment"):
            start = max(curve[args.x].min() for curve in group.curve)
            end = min(curve[args.x].max() for curve in group.curve)
            points = np.linspace(start, max(start, end), 500)
            lines = [smooth(curve, args.x, window, points) for curve in group.curve]
            index = experiments.index(experiment)
            color, style = f"C{index % 6}", ("-", "--", ":", "-.")[index // 6 % 4]  # there are 6 colours
            marker = "" if start < end else "o"
            (lines_of[experiment],) = axes.plot(points, np.mean(lines, 0), color + style + marker)
            axes.fill_between(points, np.min(lines, 0), np.max(lines, 0), alpha=0.2, fc=color)
            evaluations = pd.concat([*group.greedy])
            if len(evaluations) and args.tag is None:
                axes.plot(evaluations[args.x], evaluations.value, color + ".", alpha=0.6)
        name = panel.curve.iloc[0].tag.iloc[0].split("/")[-1].replace("_", " ")
        smoothing = f"\nmean of the last {window:,.10g} {args.x}" if window else ""
        axes.set(title=env_id, xlabel=args.x, ylabel=name + smoothing, xlim=(0, None))
        axes.xaxis.set_major_formatter(EngFormatter(sep="") if args.x == "steps" else "{x:,.10g}")
    counts = runs.groupby(["experiment", "env_id"]).size()
    labels = []
    for experiment in lines_of:
        fewest, most = counts[experiment].min(), counts[experiment].max()
        labels.append(f"{experiment}, seeds: {most if fewest == most else f'{fewest} to {most}'}")
    has_dots = args.tag is None and any(len(greedy) for greedy in runs.greedy)
    title = "mean and range of seeds" + ("\ndots: evaluations (most likely actions)" if has_dots else "")
    figure.legend(lines_of.values(), labels, loc="outside lower center", title=title)
    output = args.output or ("curves.png" if plt.get_backend().lower() == "agg" else None)
    if output:  # or there is no display, hence agg
        try:
            plt.savefig(output)
        except (OSError, ValueError) as error:  # no such folder, no such format
            print(f"plot.py: cannot save {output}: {error}", file=sys.stderr)
            sys.exit(2)
        print(f"saved {output}")
    else:
        plt.show()


def last_value(curve: pd.DataFrame, end: float) -> float:
    """The mean of the last 10% of a curve, if it is cut after `end` steps."""
    known = curve[curve.steps <= end]
    late = known[known.steps >= 0.9 * end]
    return (late if len(late) else known.tail(1)).value.mean()


def compare(runs: pd.DataFrame, args: Args) -> None:
    """Print each experiment's last values: their interquartile mean, with its 95% bootstrap interval."""
    random, table = np.random.default_rng(0), []
    for names, group in runs.groupby(["env_id", "experiment"]):
        end = min(curve.steps.max() for curve in group.curve)
        last = [last_value(curve, end) for curve in group.curve]
        size, cut = len(last), len(last) // 4
        samples = np.vstack([last, random.choice(last, (10_000, size))])  # the runs, then resampled runs
        means = np.sort(samples)[:, cut : size - cut].mean(1)
        ends = "{:.5g} to {:.5g}".format(*np.percentile(means[1:], (2.5, 97.5)))
        table.append((*names, f"{end:,.0f}", size, f"{means[0]:.5g}", ends if size > 1 else "-"))
    columns = "environment", "experiment", "steps", "seeds", "interquartile mean", "95% interval"
    print(pd.DataFrame(table, columns=columns).to_string(index=False))
    tags = " or ".join(sorted({curve.tag.iloc[0] for curve in runs.curve}))
    print(
        f"{tags}: mean of the last 10% of the steps that all seeds have. Intervals of few seeds are narrow."
    )


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if not 0 <= args.smooth <= 1:
        print(f"plot.py: --smooth {args.smooth} is not between 0 and 1", file=sys.stderr)
        sys.exit(2)
    present = compare if args.compare else draw
    present(load_runs(args.runs, args.tag), args)


if __name__ == "__main__":
    main()
