"""Run the experiments of `experiments.py`, and store a small file for each run.

    python benchmarks/run.py --dry-run           # what is stored, and what is missing
    python benchmarks/run.py                     # do the missing runs, one process per core
    python benchmarks/run.py --only 'ppo/CartPole*/[123]'

It can be stopped or killed at any time. Started again, it does what is still missing; a run of our scripts
goes on from its checkpoint. A run that another process is doing is waited for.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import tyro
from experiments import HERE, Run, runs
from filelock import FileLock
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # where the scripts are
POINTS = 50  # of a stored learning curve
TAGS = {  # of a learning curve, by name in TensorBoard
    "charts/episodic_return_100": "return",
    "losses/kl": "kl",
    "losses/clipfrac": "clip_fraction",
    "losses/entropy": "entropy",
    "losses/explained_variance": "explained_variance",
}


def write(path: Path, content: Any) -> None:
    """Write JSON with lists on one line. If the process is killed, the previous file is still there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = re.sub(r"\[[^\[\]{}]*\]", lambda match: " ".join(match[0].split()), json.dumps(content, indent=1))
    path.with_suffix(".tmp").write_text(text + "\n")
    path.with_suffix(".tmp").replace(path)


def git(*command: str) -> str:
    """The output of git in this repository; "" if there is none."""
    done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def refuse(reason: str) -> NoReturn:
    """End with one line, and status 2."""
    print(f"{Path(sys.argv[0]).name}: {reason}", file=sys.stderr)
    sys.exit(2)


def refuse_uncommitted() -> None:
    """A result names its commit, so the code must be committed."""
    changed = git("status", "--porcelain", "--", "ppo*.py", "benchmarks/*.py")
    if changed:
        refuse(f"a result names its commit, so commit first: {' '.join(changed.split())}")


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


def thin(steps: np.ndarray, values: np.ndarray, total: int) -> list[float | None]:
    """Means of `values`, logged at `steps`, over `POINTS` equal parts of `total` steps; None if empty."""
    part = np.minimum((steps - 1) * POINTS // total, POINTS - 1)
    means = (values[part == index].mean() if (part == index).any() else None for index in range(POINTS))
    return [None if mean is None else float(f"{mean:.6g}") for mean in means]


def training_seconds(starts: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Seconds of training at each of `times`, if it was started at each of `starts`: pauses do not count."""
    marks = np.concatenate([starts, times])
    pauses = [(start - marks[marks < start].max()) * (times > start) for start in starts[1:]]
    return times - starts[0] - sum(pauses)


def run_ours(run: Run) -> dict[str, Any]:
    """Train with one of our scripts: settings, returns and learning curve.

    Where an earlier process was stopped, it goes on from the checkpoint; `sessions` counts the processes.
    """
    begin = time.time()
    import torch

    script = importlib.import_module(run.experiment.script.removesuffix(".py"))
    args = tyro.cli(script.Args, args=run.flags)
    with contextlib.chdir(log_of(run).parent):
        checkpoint = next(Path().glob("runs/*/checkpoint.pt"), None)
        with open("starts.txt", "a" if checkpoint else "w") as file:
            print(begin, file=file)
        steps = torch.load(checkpoint, weights_only=True)["state"]["global_step"] if checkpoint else 0
        if steps < run.steps:
            results = script.train(replace(args, resume=checkpoint and str(checkpoint)))
        else:  # it was stopped in its evaluation
            results = {"checkpoint": checkpoint, "greedy_returns": script.evaluate(checkpoint, args)}
        if "greedy_returns" not in results:
            raise KeyboardInterrupt  # training was stopped
        log = EventAccumulator(str(Path(results["checkpoint"]).parent), {"scalars": 0}).Reload()
        starts = np.loadtxt("starts.txt", ndmin=1)
    curve = {}
    for tag, name in TAGS.items():
        logged = log.Scalars(tag)
        curve[name] = thin(np.array([x.step for x in logged]), np.array([x.value for x in logged]), run.steps)
    logged = log.Scalars("losses/kl")  # in every iteration
    seconds = training_seconds(starts, np.array([x.wall_time for x in logged]))
    curve["seconds"] = thin(np.array([x.step for x in logged]), seconds, run.steps)
    training = log.Scalars("charts/episodic_return_100")[-1].value
    return {
        "args": asdict(args),
        "sessions": len(starts),
        "seconds": round(float(seconds[-1]), 2),
        "final": {"training": training, "greedy": results["greedy_returns"].tolist()},
        "curve": curve,
    }


def sb3_envs(env_id: str, num_envs: int, seed: int) -> Any:
    """Environments as Stable-Baselines3 has them."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    if "NoFrameskip" not in env_id:
        return make_vec_env(env_id, num_envs, seed=seed)
    gym.register_envs(ale_py)
    return VecFrameStack(make_atari_env(env_id, num_envs, seed), 4)


def train_sb3(env_id: str, steps: int, seed: int, settings: dict[str, Any]) -> tuple[Any, np.ndarray]:
    """Train with Stable-Baselines3: the model, and steps, return and time at each rollout's end [..., 3].

    The settings are those of its `PPO`, with the activation function by its name, and "n_envs", "normalize"
    (observations and rewards) and "scheduled": the steps in which "linear x" decays from x to 0.
    """
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecNormalize

    settings, logged = dict(settings), []
    envs = sb3_envs(env_id, settings.pop("n_envs"), seed)
    if settings.pop("normalize", False):
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    scheduled = settings.pop("scheduled", steps)
    for name, value in settings.items():
        if str(value).startswith("linear"):
            first = float(value.split()[1])
            settings[name] = lambda remaining, first=first: first * remaining
    if "policy_kwargs" in settings:
        network = settings["policy_kwargs"]
        settings["policy_kwargs"] = network | {"activation_fn": getattr(torch.nn, network["activation_fn"])}
    pixels = "NoFrameskip" in env_id
    policy, device = ("CnnPolicy", "auto") if pixels else ("MlpPolicy", "cpu")
    model = PPO(policy, envs, seed=seed, device=device, **settings)

    class Log(BaseCallback):
        def _on_step(self) -> bool:
            return model.num_timesteps < steps or scheduled == steps

        def _on_rollout_end(self) -> None:
            returns = [episode["r"] for episode in model.ep_info_buffer or ()]  # of the last 100 episodes
            logged.append((model.num_timesteps, np.mean(returns or np.nan), time.time()))

    model.learn(scheduled, callback=Log())
    return model, np.array(logged)


def run_sb3(run: Run) -> dict[str, Any]:
    """Train with Stable-Baselines3: settings, returns and learning curve."""
    start = time.time()
    import torch
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize

    torch.set_num_threads(1)
    settings = run.experiment.settings[run.env_id]
    model, logged = train_sb3(run.env_id, run.steps, run.seed, settings)
    evaluation = sb3_envs(run.env_id, 10, run.seed + 1000)
    if settings.get("normalize"):
        evaluation = VecNormalize(evaluation, training=False, norm_reward=False)
        evaluation.obs_rms = model.get_vec_normalize_env().obs_rms
    greedy: Any = evaluate_policy(model, evaluation, 10, return_episode_rewards=True)[0]
    steps, returns, seconds = logged[:, 0], logged[:, 1], logged[:, 2] - start
    ended = ~np.isnan(returns)
    return {
        "args": settings | {"env_id": run.env_id, "seed": run.seed},
        "seconds": round(float(seconds[-1]), 2),
        "final": {"training": float(returns[-1]), "greedy": [float(x) for x in greedy]},
        "curve": {
            "return": thin(steps[ended], returns[ended], run.steps),
            "seconds": thin(steps, seconds, run.steps),
        },
    }


def run_one(run: Run) -> None:
    """Do one run and store its result, unless it is stored."""
    with FileLock(log_of(run).with_name("lock")):  # another process may be doing it
        if not run.path.exists():
            about = {"run": run.name, **provenance()}
            result = run_sb3(run) if run.experiment.script == "sb3" else run_ours(run)
            write(run.path, about | result)
            shutil.rmtree(log_of(run).with_name("runs"), ignore_errors=True)  # its checkpoint


def log_of(run: Run) -> Path:
    """The file with what a run prints. Its folder is made."""
    folder = HERE / "unfinished" / run.name
    folder.mkdir(parents=True, exist_ok=True)
    return folder / "log.txt"


def start(run: Run) -> subprocess.Popen:
    """Start one run in a process of its own, with one thread."""
    command = [sys.executable, __file__, "--one", run.name]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    with open(log_of(run), "a") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, env=one_thread)


def work_through(todo: list[Run], jobs: int) -> int:
    """Do the runs, `jobs` at a time, each in its own process. Returns how many failed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # also where a shell started it in the background
        signal.signal(number, signal.default_int_handler)
    waiting, failed = list(todo), 0
    running: dict[subprocess.Popen, Run] = {}
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                run = waiting.pop(0)
                running[start(run)] = run
            time.sleep(0.2)
            for process in [process for process in running if process.poll() is not None]:
                run = running.pop(process)
                failed += process.returncode != 0
                outcome = f"failed, see {log_of(run)}" if process.returncode else "done"
                done = len(todo) - len(waiting) - len(running)
                print(f"{done}/{len(todo)}  {run.name}  {outcome}", flush=True)
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()
    return failed


@dataclass
class Args:  # the comments are the texts of --help
    only: str = ""  # runs whose name begins with this, or matches it with * and ?
    jobs: int = os.cpu_count() or 1  # processes at a time
    dry_run: bool = False  # list what is stored and what is missing
    one: str | None = None  # do the run with this name, in this process


def main() -> None:
    """The command line. Exit status: 0 done, 1 runs failed, 2 refused, 130 stopped."""
    args = tyro.cli(Args, description=__doc__)
    if args.one:
        selected = [run for run in runs() if run.name == args.one]
    else:
        selected = [x for x in runs() if x.name.startswith(args.only) or fnmatch.fnmatch(x.name, args.only)]
    if not selected:
        refuse(f"no run has this name; --dry-run lists all {len(runs())}")
    if args.jobs < 1:
        refuse("--jobs must be at least 1")
    todo = [run for run in selected if not run.path.exists()]
    if args.dry_run:
        for run in selected:
            print("missing" if run in todo else "stored ", run.name)
        print(f"{len(selected) - len(todo)} of {len(selected)} stored")
        return
    refuse_uncommitted()
    if args.one:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # training saves, and stops
        run_one(selected[0])
        return
    try:
        failed = work_through(todo, args.jobs)
    except KeyboardInterrupt:
        sys.exit(130)
    print(f"{len(selected) - failed} of {len(selected)} stored{f', {failed} failed' if failed else ''}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
