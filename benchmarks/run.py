"""Run the experiments of `experiments.py`, and store a small file for each run.

    python benchmarks/run.py --dry-run           # what is there, what is missing, how long it may take
    python benchmarks/run.py                     # run what is missing, a process a core
    python benchmarks/run.py --only ppo/CartPole --seeds 3
    python benchmarks/run.py --print             # the missing runs as independent command lines
    python benchmarks/run.py --check             # do the stored results still stand for this code?

Stop it at any time, or kill it, and start it again: finished runs are left alone, and interrupted ones of our
scripts go on from their checkpoints (Stable-Baselines3's start anew). A run that another process is busy with
is waited for, not done twice.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import io
import json
import operator
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from experiments import HERE, RESULTS, Experiment, Run, runs
from filelock import FileLock

ROOT, WORK = HERE.parent, HERE / "unfinished"
POINTS = 50  # of a stored learning curve
TAGS = {  # of a learning curve, by name in TensorBoard
    "charts/episodic_return_100": "return",
    "losses/kl": "kl",
    "losses/clipfrac": "clip_fraction",
    "losses/entropy": "entropy",
    "losses/explained_variance": "explained_variance",
}


def write(path: Path, content: Any) -> None:
    """Write JSON; if killed, `path` is as it was, or whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), json.dumps(content, indent=1))
    temporary.write_text(text + "\n")
    temporary.replace(path)


def git(*command: str) -> str:
    """What git prints about this repository; "" where there is none."""
    done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def provenance() -> dict[str, Any]:
    """What a result was made with: commit, versions and machine."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
        cpu = models[0].partition(":")[2].strip() if models else cpu
    packages = ("torch", "gymnasium", "numpy", "mujoco", "stable-baselines3")
    return {
        "commit": git("rev-parse", "HEAD") or "unknown",
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "machine": {
            "cpu": cpu,
            "cores": os.cpu_count(),
            "system": f"{platform.system()} {platform.machine()}",
        },
    }


def thin(steps: np.ndarray, values: np.ndarray, total: int) -> list[float | None]:
    """Means of `values`, logged at `steps`, over `POINTS` equal parts of `total` steps; None if empty."""
    part = np.minimum((steps - 1) * POINTS // total, POINTS - 1)
    means = (values[part == index].mean() if (part == index).any() else None for index in range(POINTS))
    return [None if mean is None else float(f"{mean:.6g}") for mean in means]


def seconds_of(walls: np.ndarray, starts: list[float]) -> np.ndarray:
    """Seconds of work until each of the times `walls`, not counting pauses: sessions began at `starts`."""
    session = np.searchsorted(starts, walls, side="right") - 1
    lengths = [max(walls[session == n], default=start) - start for n, start in enumerate(starts)]
    before = np.concatenate([[0.0], np.cumsum(lengths)[:-1]])
    return walls - np.array(starts)[session] + before[session]


def load_script(experiment: Experiment, folder: Path) -> Any:
    """The experiment's script as a module; one whose text is changed lies in `folder`."""
    text = (ROOT / experiment.script).read_text()
    for old, new in experiment.changes:
        if text.count(old) != 1:
            raise SystemExit(f"{experiment.name} changes {old!r}, which {experiment.script} must have once")
        text = text.replace(old, new)
    path = (folder if experiment.changes else ROOT) / experiment.script
    if experiment.changes:
        path.write_text(text)
    spec = importlib.util.spec_from_file_location(f"{path.stem} of {experiment.name}", path)
    assert spec
    assert spec.loader
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def train(run: Run, folder: Path) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Train with one of our scripts in `folder`, or go on from the checkpoint there.

    Returns the settings, the returns of the evaluations by mode, and TensorBoard's log.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    script = load_script(run.experiment, folder)
    args = script.tyro.cli(script.Args, args=run.flags)
    settings, before = script.asdict(args), Path.cwd()
    os.chdir(folder)
    try:
        if found := sorted(Path("runs").glob("*/checkpoint.pt"), key=lambda path: path.stat().st_mtime):
            _, state = script.load_checkpoint(str(found[-1]))
            finished = state.global_step >= run.steps  # killed during the evaluation, then
            args = script.replace(args, **{"evaluate" if finished else "resume": str(found[-1])})
        results = script.train(args)
        newest = max(Path("runs").iterdir(), key=lambda path: path.stat().st_mtime)
        log = EventAccumulator(str(newest), {"scalars": 0}).Reload()
    finally:
        os.chdir(before)
    return settings, {mode: result["returns"].tolist() for mode, result in results.items()}, log


def run_ours(run: Run, folder: Path) -> dict[str, Any]:
    """Train with one of our scripts, or go on from its checkpoint in `folder`; return figures and curve.

    What another version of the script has begun is done anew.
    """
    begun = (folder / "sessions.txt").read_text().splitlines() if (folder / "sessions.txt").exists() else []
    if any(line.split()[1:] != git("rev-parse", f"HEAD:{run.experiment.script}").split() for line in begun):
        shutil.rmtree(folder / "runs", ignore_errors=True)
        (folder / "sessions.txt").unlink()
    with open(folder / "sessions.txt", "a") as file:
        print(time.time(), git("rev-parse", f"HEAD:{run.experiment.script}"), file=file)
    settings, returns, log = train(run, folder)
    starts = [float(line.split()[0]) for line in (folder / "sessions.txt").read_text().splitlines()]
    curve = {}
    for tag, name in TAGS.items():
        logged = log.Scalars(tag)
        steps, walls = np.array([x.step for x in logged]), np.array([x.wall_time for x in logged])
        curve[name] = thin(steps, np.array([x.value for x in logged]), run.steps)
        if tag == "losses/kl":  # is logged in every iteration
            seconds = seconds_of(walls, starts)
            curve["seconds"] = thin(steps, seconds, run.steps)
    return {
        "args": settings,
        "sessions": len(starts),
        "seconds": round(float(seconds[-1]), 2),
        "final": {"training": log.Scalars("charts/episodic_return_100")[-1].value, **returns},
        "curve": curve,
    }


def run_sb3(run: Run, folder: Path) -> dict[str, Any]:
    """Train with Stable-Baselines3; return final figures and curve."""
    logged, start = [], time.time()
    import ale_py
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    settings = dict(run.experiment.settings[run.env_id])
    normalize, num_envs = settings.pop("normalize", False), settings.pop("n_envs")
    scheduled = settings.pop("scheduled", run.steps)  # steps in which what is linear falls to 0
    pixels = "NoFrameskip" in run.env_id
    torch.set_num_threads(1)
    gymnasium.register_envs(ale_py)

    def make(number: int, seed: int) -> Any:
        return (
            VecFrameStack(make_atari_env(run.env_id, number, seed), 4)
            if pixels
            else make_vec_env(run.env_id, number, seed=seed)
        )

    for name, value in settings.items():
        if isinstance(value, str):  # "linear 0.001": from there to 0
            settings[name] = partial(operator.mul, float(value.split()[1]))  # called with the share left
    envs = make(num_envs, run.seed)
    if normalize:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    policy = "CnnPolicy" if pixels else "MlpPolicy"
    model = PPO(policy, envs, seed=run.seed, device="auto" if pixels else "cpu", **settings)

    class Log(BaseCallback):
        def _on_step(self) -> bool:
            return model.num_timesteps < run.steps or scheduled == run.steps

        def _on_rollout_end(self) -> None:
            returns = [episode["r"] for episode in model.ep_info_buffer]  # of the last 100 episodes
            logged.append((model.num_timesteps, np.mean(returns or np.nan), time.time() - start))

    model.learn(scheduled, callback=Log())
    evaluation = make(10, run.seed + 1000)
    if normalize:
        evaluation = VecNormalize(evaluation, training=False, norm_reward=False)
        evaluation.obs_rms = envs.obs_rms
    returns = {
        mode: evaluate_policy(
            model, evaluation, 10, deterministic=mode == "greedy", return_episode_rewards=True
        )[0]
        for mode in ("greedy", "stochastic")
    }
    steps, means, walls = np.array(logged).T
    ended = ~np.isnan(means)
    return {
        "args": run.experiment.settings[run.env_id] | {"env_id": run.env_id, "seed": run.seed},
        "sessions": 1,
        "seconds": round(float(walls[-1]), 2),
        "final": {
            "training": float(means[-1]),
            **{mode: [float(r) for r in x] for mode, x in returns.items()},
        },
        "curve": {
            "return": thin(steps[ended], means[ended], run.steps),
            "seconds": thin(steps, walls, run.steps),
        },
    }


def run_one(run: Run) -> None:
    """Do one run and store its result, unless it is stored."""
    run.path.parent.mkdir(parents=True, exist_ok=True)
    folder = WORK / run.name
    folder.mkdir(parents=True, exist_ok=True)
    # Another runner may be busy with it, or a process that outlived its runner.
    with FileLock(folder / "lock"):
        if run.path.exists():
            return
        about = {"run": run.name, **provenance()}
        result = run_sb3(run, folder) if run.experiment.script == "sb3" else run_ours(run, folder)
        write(run.path, about | result)


def work_through(todo: list[Run], jobs: int) -> int:
    """Do the runs in as many processes at a time as `jobs`; return how many failed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started it in the background
        signal.signal(number, signal.default_int_handler)
    total, waiting, failed, shown = len(todo), list(todo), 0, time.monotonic()
    running: dict[subprocess.Popen, Run] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                folder = WORK / run.name
                folder.mkdir(parents=True, exist_ok=True)
                with open(folder / "log.txt", "a") as log:
                    environment = os.environ | {"OMP_NUM_THREADS": "1"}
                    process = subprocess.Popen(command(run), stdout=log, stderr=log, env=environment)
                running[process] = run
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                failed += bool(process.returncode)
                outcome = "done" if not process.returncode else f"failed, see {WORK / run.name / 'log.txt'}"
                print(f"{total - len(waiting) - len(running):>4}/{total}  {run.name}  {outcome}", end="  ")
                left = timedelta(seconds=round(estimate([*waiting, *running.values()]) / jobs))
                print(f"{left} left", flush=True)
                shown = time.monotonic()
            if time.monotonic() - shown > 60:
                names = ", ".join(run.name for run in running.values())
                print(f"{total - len(waiting) - len(running):>4}/{total}  busy with {names}", flush=True)
                shown = time.monotonic()
    finally:
        for process in running:  # after Ctrl-C or SIGTERM: our scripts save a checkpoint and end
            process.terminate()
        for process in running:
            process.wait()
    return failed


def command(run: Run) -> list[str]:
    """The command line that does one run."""
    return [sys.executable, str(HERE / "run.py"), "--one", run.name]


def estimate(todo: list[Run]) -> float:
    """Seconds that the runs will take one after another, judged by stored ones, the likest for each."""
    speeds: dict[Any, list[float]] = {}
    for run in runs():
        if run.path.exists():
            speed = json.loads(run.path.read_text())["seconds"] / run.steps
            for key in ((run.experiment.name, run.env_id), run.experiment.script, None):
                speeds.setdefault(key, []).append(speed)
    keys = (((run.experiment.name, run.env_id), run.experiment.script, None) for run in todo)
    likest = (next((speeds[key] for key in three if key in speeds), [1e-4]) for three in keys)
    return sum(float(np.median(speed)) * run.steps for run, speed in zip(todo, likest, strict=True))


def short_run(run: Run) -> dict[str, Any]:
    """All that a short run logs, by TensorBoard tag, but the time; and its evaluations."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        _, returns, log = train(run, Path(folder))
    tags = sorted(tag for tag in log.Tags()["scalars"] if tag != "charts/SPS")
    return {tag: [event.value for event in log.Scalars(tag)] for tag in tags} | returns


def short_runs(selected: list[Run]) -> list[Run]:
    """A short run of each experiment of ours, on its first environment."""
    first: dict[str, Run] = {}
    for run in runs():
        first.setdefault(run.experiment.name, replace(run, steps=8_000, seed=1))
    wanted = {run.experiment.name for run in selected if run.experiment.script != "sb3"}
    return [run for name, run in first.items() if name in wanted]


def check(selected: list[Run], committed: bool) -> int:
    """Repeat a short run of each experiment and compare it with the stored one, bit for bit.

    Where none is stored yet, it is stored, if the code is committed. Returns how many differ.
    """
    path, differ = RESULTS / "short-runs.json", 0
    stored = json.loads(path.read_text()) if path.exists() else {}
    for run in short_runs(selected):
        name, now = run.name, short_run(run)
        if name not in stored and not committed:
            verdict = "new, not stored: commit the code first"
        elif name not in stored:
            stored[name] = provenance() | {"figures": now}
            write(path, stored)
            verdict = "new, stored"
        elif json.dumps(stored[name]["figures"]) == json.dumps(now):  # NaN, too, equals itself there
            verdict = f"as at commit {stored[name]['commit'][:7]}"
        else:
            differ += 1
            here, there = (
                json.dumps({k: x[k] for k in ("versions", "machine")}) for x in (provenance(), stored[name])
            )
            verdict = f"DIFFERS from commit {stored[name]['commit'][:7]}"
            verdict += "" if here == there else f", which ran on {there}; this is {here}"
        print(f"{name}: {verdict}", flush=True)
    if differ:
        print("Remove the stored results of what differs, and its short runs, and run again.")
    return differ


def main() -> None:
    """The command line. Exit status: 0 done, 1 runs failed or differ, 2 bad request, 130 stopped."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--only", default="", help="runs whose name begins with this; * and ? as in a shell")
    parser.add_argument("--seeds", type=int, help="at most this many seeds of each experiment")
    parser.add_argument("--jobs", type=int, default=cores, help="processes at a time; default: a core each")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--dry-run", action="store_true", help="say what is there and what is missing")
    what.add_argument("--print", action="store_true", help="print missing runs as independent command lines")
    what.add_argument("--check", action="store_true", help="repeat short runs and compare them, bit for bit")
    what.add_argument("--one", metavar="RUN", help="do this run, in this process")
    options = parser.parse_args()
    selected = [run for run in runs() if fnmatch.fnmatch(run.name, f"{options.only}*")]
    if options.seeds is not None:
        selected = [run for run in selected if run.seed < run.experiment.first_seed + options.seeds]
    if options.one:
        selected = [run for run in runs() if run.name == options.one]
    todo = [run for run in selected if not run.path.exists()]
    if not selected:
        parser.error(f"no run is called so; --dry-run lists all {len(runs())}")
    if options.dry_run or options.print:
        for run in todo if options.print else selected:
            state = "stored " if run.path.exists() else "missing"
            print(shlex.join(command(run)) if options.print else f"{state}  {run.name}")
        if options.dry_run:
            hours = timedelta(seconds=round(estimate(todo) / options.jobs))
            print(f"{len(selected) - len(todo)} of {len(selected)} stored; the others take about {hours}")
        return
    code = sorted({"benchmarks/*.py", *(run.experiment.script for run in selected)} - {"sb3"})
    changed = git("status", "--porcelain", "--", *code)
    if options.check:
        sys.exit(bool(check(selected, committed=not changed)))
    if changed:
        parser.error(f"a result names its commit: commit first what has changed: {' '.join(changed.split())}")
    if options.one:
        run_one(selected[0])
        return
    try:
        failed = work_through(todo, options.jobs)
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"{len(selected) - failed} of {len(selected)} stored" + (f", {failed} failed" if failed else ""))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
