"""Run the experiments of `experiments.py`, and add the results to `results/data/runs.csv` and `curves.csv`.

    python benchmarks/run.py --dry-run           # list what is missing
    python benchmarks/run.py                     # do the missing runs, one after another, with one thread
    python benchmarks/run.py --only 'ppo/CartPole*/[123]'

Start it several times, and each process does other runs. It can be stopped or killed at any time. Started
again, it does what is still missing; a run of our scripts resumes from its checkpoint.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import tyro
from experiments import DATA, HERE, ROOT, SB3, STUDIES, Run, runs, script_of
from filelock import FileLock, Timeout

sys.path.insert(0, str(ROOT))  # where the scripts are
RUNS, CURVES, SPEEDS = DATA / "runs.csv", DATA / "curves.csv", DATA / "speeds.csv"
KEY = ["experiment", "env_id", "steps", "seed"]  # columns that identify a run
POINTS = 50  # of a stored learning curve
TAGS = {  # of learning curves in TensorBoard, by quantity
    "return": "charts/episodic_return_100",
    "kl": "losses/kl",
    "clip_fraction": "losses/clipfrac",
    "entropy": "losses/entropy",
}


def git(*command: str) -> str:
    """The output of git in this repository; "" if there is none."""
    done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def refuse_uncommitted() -> None:
    """A result names its commit, so the code must be committed."""
    changed = git("status", "--porcelain", "--", "*.py", "benchmarks/*.py", "benchmarks/sb3*")
    if changed:
        sys.exit(f"a result names its commit, so commit first: {' '.join(changed.split())}")


def provenance() -> dict[str, Any]:
    """What a result was made with: commit, versions and machine."""
    cpu = platform.processor()
    with contextlib.suppress(OSError):
        cpu = re.findall(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[0]
    packages = ("torch", "gymnasium", "numpy", "mujoco", "stable-baselines3")
    system = f"{platform.system()} {platform.machine()}"
    return {
        "commit": git("rev-parse", "HEAD") or "unknown",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "system": system},
    }


def in_words(about: dict[str, Any]) -> dict[str, str]:
    """The provenance of a result, as it is stored."""
    return {
        "commit": about["commit"],
        "machine": " / ".join(str(part) for part in about["machine"].values()),
        "versions": " ".join(f"{package}={number}" for package, number in about["versions"].items()),
    }


def missing(selected: list[Run]) -> list[Run]:
    """Those without a stored result, or with one that was made with other flags."""
    if not RUNS.exists():
        return selected
    stored = pd.read_csv(RUNS, keep_default_na=False).set_index(KEY)["flags"].to_dict()
    return [run for run in selected if stored.get(run.key) != run.flags]


def store(path: Path, rows: list[dict[str, Any]], columns: list[str]) -> None:
    """Add rows to a CSV file, in the place of those with the same `columns`. Processes take turns."""
    with FileLock(HERE / "unfinished" / "lock"):
        table = pd.DataFrame(rows)
        if path.exists():
            stored = pd.read_csv(path, float_precision="round_trip", dtype_backend="numpy_nullable")
            table = pd.concat([stored, table])
        table = table.drop_duplicates(columns, keep="last").sort_values(columns)
        table.to_csv(path.with_suffix(".tmp"), index=False, lineterminator="\n")
        path.with_suffix(".tmp").replace(path)  # so the file is always complete


def thin(steps: np.ndarray, values: np.ndarray, total: int) -> str:
    """Means of `values`, logged at `steps`, over `POINTS` equal parts of `total` steps; nan if empty."""
    part = np.minimum((steps - 1) * POINTS // total, POINTS - 1)
    means = (values[part == index].mean() if (part == index).any() else np.nan for index in range(POINTS))
    return " ".join(f"{mean:.6g}" for mean in means)


def run_ours(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """Train with a script of ours, from its checkpoint if it was stopped: results, and learning curves."""
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with script_of(run) as script, contextlib.chdir(folder_of(run)):
        args = tyro.cli(script.Args, args=run.arguments)
        checkpoint = next(Path().glob("runs/*/checkpoint.pt"), None)
        steps = torch.load(checkpoint, weights_only=True)["state"]["global_step"] if checkpoint else 0
        if steps < run.steps:
            results = script.train(replace(args, resume=checkpoint and str(checkpoint)))
        else:  # it was stopped in its evaluation
            results = {"checkpoint": checkpoint, "greedy_returns": script.evaluate(checkpoint, args)}
            if (best := checkpoint.with_name("best.pt")).exists():
                state = torch.load(best, weights_only=True)["state"]
                results |= {"best_return": state["best_return"], "best_step": state["best_step"]}
                results["best_replayed"] = script.evaluate(best, args)
        if run.experiment.name.startswith("now-"):  # some published returns are of sampled actions
            with mock.patch.object(script, "most_likely", script.sample):
                results["sampled"] = script.evaluate(results["checkpoint"], args)
        folder = Path(results["checkpoint"]).parent
        log = EventAccumulator(str(folder), {"scalars": 0}).Reload()
        sessions = len(list(folder.glob("events*")))  # processes that trained
    curves = {}
    for quantity, tag in TAGS.items():
        if tag in log.Tags()["scalars"]:  # ppo_gpu.py has no losses/kl
            steps, values = np.array([(event.step, event.value) for event in log.Scalars(tag)]).T
            curves[quantity] = thin(steps, values, run.steps)
    between = np.diff([event.wall_time for event in log.Scalars("charts/SPS")])  # iterations
    seconds = between[between < 60].sum()  # more is a pause between two processes
    result = {"training": log.Scalars(TAGS["return"])[-1].value, "greedy": results["greedy_returns"]}
    result["averaged"] = results.get("averaged_returns", ())  # see arms.py
    result["sampled"] = results.get("sampled", ())
    if len(best := results.get("best_replayed", ())):  # with --eval-every
        result |= {"best": best, "best_step": results["best_step"], "best_chosen": results["best_return"]}
    return result | {"seconds": seconds, "sessions": sessions}, curves


def run_sb3(run: Run) -> tuple[dict[str, Any], dict[str, str]]:
    """Train with Stable-Baselines3: results, and learning curves by quantity."""
    import peers
    import torch
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    start, settings = time.time(), SB3[run.env_id]
    model, rows = peers.train_sb3(run.env_id, run.steps, run.seed, settings)
    envs = peers.sb3_envs(run.env_id, 10, run.seed + 1000)
    if settings.get("normalize"):
        envs = VecNormalize(envs, training=False, norm_reward=False)
        envs.obs_rms = model.get_vec_normalize_env().obs_rms
    greedy, _ = evaluate_policy(model, envs, 10, return_episode_rewards=True)
    steps, returns, times = np.array(rows).T
    ended = ~np.isnan(returns)
    result = {"training": returns[-1], "greedy": greedy, "seconds": times[-1] - start, "sessions": 1}
    return result, {"return": thin(steps[ended], returns[ended], run.steps)}


def folder_of(run: Run) -> Path:
    """Where a run has its checkpoint until it is done. It is made."""
    folder = HERE / "unfinished" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_one(run: Run) -> None:
    """Do one run and store its result, with those of its learning curves that a table or figure shows."""
    about = in_words(provenance())
    result, curves = run_sb3(run) if run.experiment.script == "sb3" else run_ours(run)
    name, shown = dict(zip(KEY, run.key, strict=True)), {"return"}
    for study in STUDIES.values():
        if run.experiment.name in study.experiments and (run.env_id, run.steps) in study.tasks:
            shown.update(study.quantities)
    rows = [name | {"quantity": quantity, "points": curves[quantity]} for quantity in shown]
    store(CURVES, rows, [*KEY, "quantity"])
    row = {
        "flags": run.flags,
        "training": round(float(result["training"]), 4),  # return of the last 100 episodes
        "greedy": round(float(np.mean(result["greedy"])), 4),
        "greedy_std": round(float(np.std(result["greedy"])), 4),
        "episodes": len(result["greedy"]),
        "seconds": round(float(result["seconds"]), 1),
        "sessions": result["sessions"],
    }
    for kind in ("best", "averaged", "sampled"):  # played in the same episodes as the last policy
        if len(returns := result.get(kind, ())):
            row |= {kind: round(float(np.mean(returns)), 4), f"{kind}_std": round(float(np.std(returns)), 4)}
    if "best_step" in result:
        row |= {"best_step": result["best_step"], "best_chosen": round(float(result["best_chosen"]), 4)}
    store(RUNS, [name | row | about], KEY)  # from now on, the run is stored
    shutil.rmtree(folder_of(run) / "runs", ignore_errors=True)
    print(run.name, "done", flush=True)


@dataclass
class Args:  # the comments are the texts of --help
    only: str = ""  # runs whose name begins with this, or matches it with * and ?
    dry_run: bool = False  # list what is missing


def main() -> None:
    """The command line. Exit status: 0 done, 1 refused or runs failed, 130 stopped."""
    args, failed = tyro.cli(Args, description=__doc__), 0
    found = [run for run in runs() if run.name.startswith(args.only) or fnmatch.fnmatch(run.name, args.only)]
    for commit in sorted({run.experiment.commit for run in found} - {""}):
        print(f"some of these need an earlier script: git checkout {commit}")
    found = [run for run in found if not run.experiment.commit]
    selected = [run for run in found if run.experiment.program == "run.py"]
    for run in missing(found):
        if run not in selected:
            print("missing", run.name, f"(python benchmarks/{run.experiment.program})")
    if args.dry_run:
        for run in missing(selected):
            print("missing", run.name)
    else:
        refuse_uncommitted()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have turned it off
        for run in missing(selected):
            try:
                with FileLock(folder_of(run) / "lock", blocking=False):
                    if missing([run]):  # no other process has done it meanwhile
                        run_one(run)
            except Timeout:
                print(run.name, "is being done by another process", flush=True)
            except Exception:
                failed += 1
                print(f"{run.name} failed\n{traceback.format_exc()}", flush=True)
    print(f"{len(selected) - len(missing(selected))} of {len(selected)} stored")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
