"""Steps per second of our scripts and of Stable-Baselines3's PPO, with the same settings, in alternation.

    python benchmarks/throughput.py --env-id CartPole-v1 --num-envs 4
    python benchmarks/throughput.py --env-id CartPole-v1 --script-dir DIR    # and another copy of ppo.py
    python benchmarks/throughput.py --store     # all, for the tables: about 15 minutes on an idle machine

Each run is a process of its own, with one thread (Atari: all cores). The speed is that of the training
loop after the first iteration, so the start, compiling and the evaluation do not count. Ours log to
TensorBoard, by whose times it is measured; Stable-Baselines3 logs nothing. On a busy machine, speeds say
little, and the ratio of neighbouring runs says more.
"""

from __future__ import annotations

import importlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from experiments import RESULTS, VARIANTS
from run import ROOT, provenance, refuse, refuse_uncommitted, train_sb3, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


@dataclass(frozen=True)
class Case:
    """What is the same for all that are compared."""

    script: str
    sizes: tuple[int, ...]  # numbers of environments
    num_steps: int
    num_minibatches: int
    update_epochs: int
    learning_rate: float
    flags: str  # of our script
    variants: tuple[str, ...]
    timesteps: int = 30_000  # at least


SIZES = (1, 4, 16, 64, 256, 1024)
CARTPOLE, MUJOCO = "--no-norm-obs --no-norm-rewards", "--norm-obs --norm-rewards --no-recompute-advantages"
SMALL, WORKERS, ATARI = ("ours", "compiled"), ("ours", "compiled", "workers"), ("ours", "bfloat16")
CASES = {
    "CartPole-v1": Case("ppo", SIZES, 128, 4, 4, 2.5e-4, CARTPOLE, SMALL),
    "HalfCheetah-v5": Case("ppo_continuous", (8,), 256, 32, 10, 3e-4, MUJOCO, WORKERS),
    "BreakoutNoFrameskip-v4": Case("ppo_atari", (8,), 128, 4, 4, 2.5e-4, "", ATARI, 6_000),
}


def run_ours(flags: str, case: Case, env_id: str, num_envs: int, timesteps: int) -> dict[str, Any]:
    """Train with our script in the current folder: speed, shares of the time, and seconds of compiling."""
    script: Any = importlib.import_module(case.script)
    calls: dict[str, list[tuple[float, float]]] = {}  # by name, when each call ended and how long it took

    def timed(name: str, function: Callable) -> Callable:
        calls[name] = []

        def call(*args: Any) -> Any:
            start = time.time()
            result = function(*args)
            calls[name].append((time.time(), time.time() - start))
            return result

        return call

    def collect_rollout(envs: Any, *args: Any) -> None:
        if "environment" not in calls:
            envs.step = timed("environment", envs.step)
        collect(envs, *args)

    collect = script.collect_rollout
    script.collect_rollout = collect_rollout
    for name in {"collect_rollout", "normalize_rollout", "make_batch", "update"} & set(dir(script)):
        setattr(script, name, timed(name, getattr(script, name)))
    command = (
        f"--env-id {env_id} --num-envs {num_envs} --total-timesteps {timesteps} --num-steps {case.num_steps} "
        f"--num-minibatches {case.num_minibatches} --update-epochs {case.update_epochs} --norm-adv "
        f"--learning-rate {case.learning_rate} --gae-lambda 0.95 --eval-episodes 1 "
        f"{case.flags} {flags}"
    )
    script.train(tyro.cli(script.Args, args=command.split()))
    log = EventAccumulator(str(next(Path("runs").iterdir())), {"scalars": 0}).Reload()
    events = log.Scalars("losses/kl")  # one per iteration
    first, last = events[0], events[-1]
    total = last.wall_time - first.wall_time
    spent = {
        name: sum(seconds for end, seconds in made if end > first.wall_time) / total
        for name, made in calls.items()
    }
    shares = {
        "environment": spent["environment"],
        "acting": spent["collect_rollout"] - spent["environment"],
        "advantages": spent["make_batch"] + spent.get("normalize_rollout", 0.0),
        "update": spent["update"],
    }
    shares["other"] = 1 - sum(shares.values())
    result = {"sps": (last.step - first.step) / total, "shares": shares}
    if "--compile" in flags:
        result["compiling"] = first.wall_time - log.FirstEventTimestamp() - total / (len(events) - 1)
    return result


def run_sb3(case: Case, env_id: str, num_envs: int, timesteps: int) -> dict[str, Any]:
    """Train with Stable-Baselines3. Its value loss lacks our ½, hence a coefficient of 0.25, not 0.5."""
    import torch

    settings: dict[str, Any] = {
        "n_envs": num_envs,
        "normalize": "--norm-obs" in case.flags,
        "n_steps": case.num_steps,
        "batch_size": case.num_steps * num_envs // case.num_minibatches,
        "n_epochs": case.update_epochs,
        "learning_rate": f"linear {case.learning_rate}",
        "ent_coef": 0.01,
        "vf_coef": 0.25,
    }
    if case.script != "ppo_atari":
        torch.set_num_threads(1)
        settings["policy_kwargs"] = {"activation_fn": "ELU" if case.script == "ppo_continuous" else "Tanh"}
    _, logged = train_sb3(env_id, timesteps, 1, settings)
    steps, _, seconds = logged[-1] - logged[0]
    return {"sps": steps / seconds}


def measure(who: str, scripts: Path, env_id: str, num_envs: int, timesteps: int) -> dict[str, Any]:
    """One run in a process of its own."""
    flags = ["--env-id", env_id, "--num-envs", str(num_envs), "--timesteps", str(timesteps)]
    command = [sys.executable, __file__, "--one", who, "--script-dir", str(scripts), *flags]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: Iterable[float]) -> list[float]:
    """Lowest, median and highest."""
    return np.quantile(list(values), (0, 0.5, 1)).round(3).tolist()


def summarize(runs: list[dict[str, Any]], peers: list[dict[str, Any]]) -> dict[str, Any]:
    """What several rounds measured of one contestant, beside Stable-Baselines3 in the same rounds."""
    row: dict[str, Any] = {"sps": spread(run["sps"] for run in runs)}
    row["mib"] = round(statistics.median(run["mib"] for run in runs))
    if "shares" in runs[0]:
        row["ratio"] = spread(run["sps"] / peer["sps"] for run, peer in zip(runs, peers, strict=True))
        row["shares"] = {part: spread(run["shares"][part] for run in runs)[1] for part in runs[0]["shares"]}
    if "compiling" in runs[0]:
        row["compiling"] = spread(run["compiling"] for run in runs)
    return row


def compare(env_id: str, num_envs: int, steps: int, rounds: int, folders: list[Path]) -> dict[str, Any]:
    """Measure in alternation, and print a table per folder. Returns the results of the last folder."""
    from report import markdown, speed_table  # not in the processes that are measured: it needs memory

    print(f"\n{env_id}, {num_envs:,} environments, {steps:,} steps, {rounds} rounds", flush=True)
    variants, peer = CASES[env_id].variants, ("sb3", ROOT)
    contestants = [*((variant, folder) for variant in variants for folder in folders), peer]
    runs: dict[Any, list[dict[str, Any]]] = {contestant: [] for contestant in contestants}
    for _ in range(rounds):
        for who, folder in contestants:
            runs[who, folder].append(measure(who, folder, env_id, num_envs, steps))
    about = {"env_id": env_id, "num_envs": num_envs, "timesteps": steps, "rounds": rounds, **provenance()}
    for folder in folders:
        row = about | {who: summarize(runs[who, folder], runs[peer]) for who in variants}
        row["sb3"] = summarize(runs[peer], runs[peer])
        print(f"\n{folder}\n{markdown(speed_table([row]))}", flush=True)
    return row


def store(row: dict[str, Any]) -> None:
    """Add a result to the stored ones, in the place of that of the same task."""
    path = RESULTS / "throughput.json"
    rows = json.loads(path.read_text()) if path.exists() else []
    tasks = {(old["env_id"], old["num_envs"]): old for old in [*rows, row]}
    write(path, [tasks[task] for task in sorted(tasks)])


@dataclass
class Args:  # the comments are the texts of --help
    env_id: str | None = None  # only this environment
    num_envs: int | None = None  # only with so many environments
    rounds: int = 3  # runs of each, in alternation
    timesteps: int | None = None  # transitions per run; default: some seconds' worth
    script_dir: Path | None = None  # also run the scripts in this folder
    store: bool = False  # store the results of this repository's scripts for the tables
    one: str | None = None  # run this variant, in this process


def main() -> None:
    """The command line."""
    args = tyro.cli(Args, description=__doc__)
    if args.env_id not in (None, *CASES):
        refuse(f"--env-id must be one of {', '.join(CASES)}")
    if args.one:
        sys.path.insert(0, str(args.script_dir))
        one: Any = (CASES[str(args.env_id)], args.env_id, args.num_envs, args.timesteps)
        result = run_sb3(*one) if args.one == "sb3" else run_ours(VARIANTS[args.one], *one)
        result["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"\n{json.dumps(result)}")
        return
    folders = [args.script_dir.resolve(), ROOT] if args.script_dir else [ROOT]
    if args.store:
        refuse_uncommitted()
    for env_id in [args.env_id] if args.env_id else CASES:
        case = CASES[env_id]
        for num_envs in [args.num_envs] if args.num_envs else case.sizes:
            steps = args.timesteps or max(case.timesteps, 6 * case.num_steps * num_envs)
            row = compare(env_id, num_envs, steps, args.rounds, folders)
            if args.store:
                store(row)


if __name__ == "__main__":
    main()
