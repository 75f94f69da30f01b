"""Steps per second of our scripts and of others' PPO, with the same settings, in alternation.

    python benchmarks/throughput.py --env-id CartPole-v1 --num-envs 4
    python benchmarks/throughput.py --env-id CartPole-v1 --script-dir DIR    # and another copy of ppo.py
    python benchmarks/throughput.py --store     # all, for the tables: about 15 minutes on an idle machine
    python benchmarks/throughput.py --store --env-id HalfCheetah-v5 --sbx --cleanrl DIR

Stable-Baselines3 always takes part. SBX is Stable-Baselines3 in JAX (`pip install sbx-rl`). DIR is a checkout
of CleanRL with a virtual environment DIR/.venv that has what its `ppo.py` and `ppo_continuous_action.py` need
(`pip install torch gymnasium[mujoco]==0.29.1 mujoco==2.3.7 numpy<2 tensorboard tyro`).

Each run is a process of its own, with one thread (Atari: all cores). The speed is that of the training
loop after the first iteration, so the start, compiling and the evaluation do not count. Ours and CleanRL log
to TensorBoard, by whose times they are measured; the others log nothing. On a busy machine, speeds say
little, and the ratio of neighbouring runs says more.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from experiments import HERE
from run import ROOT, provenance, refuse_uncommitted, train_sb3
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

STORED = HERE / "throughput.json"
FLAGS = "--norm-adv --gae-lambda 0.95 --eval-episodes 1"
SIZES = "--num-steps 128 --num-minibatches 4 --update-epochs 4 --learning-rate 2.5e-4"  # CleanRL's
CARTPOLE = f"{SIZES} --no-norm-obs --no-norm-rewards"
CHEETAH = "--num-steps 256 --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4"
CHEETAH += " --norm-obs --norm-rewards --no-recompute-advantages"
CASES = {  # environment: script, flags, those of its variants, numbers of environments, and least steps
    "CartPole-v1": ("ppo", CARTPOLE, ["", "--compile"], [1, 4, 16, 64, 256, 1024], 30_000),
    "HalfCheetah-v5": ("ppo_continuous", CHEETAH, ["", "--compile", "--compile --async-envs"], [8], 30_000),
    "BreakoutNoFrameskip-v4": ("ppo_atari", SIZES, ["", "--bfloat16"], [8], 6_000),
}
ACTIVATIONS = {"CartPole-v1": "Tanh", "HalfCheetah-v5": "ELU"}
CLEANRL = {"CartPole-v1": "ppo", "HalfCheetah-v5": "ppo_continuous_action"}  # its files
OTHERS = {"sb3": "stable_baselines3", "sbx": "sbx", "cleanrl": "cleanrl"}


def logged(tag: str) -> tuple[EventAccumulator, list[Any]]:
    """The log of the run in the current folder, and its values of a tag that each iteration writes."""
    log = EventAccumulator(str(next(Path("runs").iterdir())), {"scalars": 0}).Reload()
    return log, log.Scalars(tag)


def run_ours(script: Any, args: Any) -> dict[str, float]:
    """Train with our script in the current folder: speed, and seconds of compiling."""
    script.train(args)
    log, events = logged("losses/kl")
    first, last = events[0], events[-1]
    seconds = last.wall_time - first.wall_time
    result = {"sps": (last.step - first.step) / seconds}
    if getattr(args, "compile", False):
        result["compiling"] = first.wall_time - log.FirstEventTimestamp() - seconds / (len(events) - 1)
    return result


def run_cleanrl(folder: str, args: Any) -> dict[str, float]:
    """Train with the file of CleanRL in a process of its own packages. It has HalfCheetah-v4."""
    name = CLEANRL[args.env_id]
    names = "num_envs", "num_steps", "num_minibatches", "update_epochs", "learning_rate"
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    words += [f"--total-timesteps={args.total_timesteps:.0f}", "--no-cuda"]
    words += ["--env-id", args.env_id.replace("v5", "v4")]
    command = [f"{folder}/.venv/bin/python", f"{folder}/cleanrl/{name}.py", *words]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _, events = logged("charts/SPS")
    first, last = events[0], events[-1]
    return {"sps": (last.step - first.step) / (last.wall_time - first.wall_time)}


def run_sb3(library: str, args: Any) -> dict[str, float]:
    """Train with Stable-Baselines3 or SBX. Their value loss lacks our ½, hence 0.25, not 0.5."""
    import torch

    settings: dict[str, Any] = {
        "n_envs": args.num_envs,
        "normalize": getattr(args, "norm_obs", False),
        "n_steps": args.num_steps,
        "batch_size": args.num_steps * args.num_envs // args.num_minibatches,
        "n_epochs": args.update_epochs,
        "learning_rate": f"linear {args.learning_rate}",
        "ent_coef": 0.01,
        "vf_coef": 0.25,
    }
    if args.env_id in ACTIVATIONS:
        torch.set_num_threads(1)
        settings["policy_kwargs"] = {"activation_fn": ACTIVATIONS[args.env_id]}
    _, rollouts = train_sb3(args.env_id, int(args.total_timesteps), 1, settings, library)
    steps, _, seconds = rollouts[-1] - rollouts[1]  # SBX compiles its update after the first
    return {"sps": steps / seconds}


def measure(variant: str, scripts: Path, env_id: str, num_envs: int, steps: int) -> dict[str, float]:
    """One run, in this process. The variant is a key of OTHERS, or flags of our script."""
    sys.path.insert(0, str(scripts))
    name, flags, *_ = CASES[env_id]
    script: Any = importlib.import_module(name)
    sizes = f"--env-id {env_id} --num-envs {num_envs} --total-timesteps {steps}"
    own = "" if variant in OTHERS else variant
    args = tyro.cli(script.Args, args=f"{sizes} {FLAGS} {flags} {own}".split())
    output = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), output:
        if variant not in OTHERS:
            return run_ours(script, args)
        return run_cleanrl(str(scripts), args) if variant == "cleanrl" else run_sb3(OTHERS[variant], args)


def spread(values: Iterable[float]) -> list[float]:
    """Lowest, median and highest."""
    return np.quantile(list(values), (0, 0.5, 1)).round(3).tolist()


def compare(
    env_id: str, num_envs: int, steps: int, rounds: int, folders: list[Path], others: list[tuple[str, Path]]
) -> dict[str, Any]:
    """Measure in alternation, and print a table per folder. Returns the results of the last folder."""
    from report import markdown, speed_table  # not in the processes that are measured: it needs memory

    print(f"\n{env_id}, {num_envs:,} environments, {steps:,} steps, {rounds} rounds", flush=True)
    contestants = [(flags, folder) for flags in CASES[env_id][2] for folder in folders] + others
    runs: dict[Any, list[dict[str, float]]] = {contestant: [] for contestant in contestants}
    for _ in range(rounds):
        for contestant in contestants:
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                result = process.submit(measure, *contestant, env_id, num_envs, steps).result()
            runs[contestant].append(result)
        for made in runs.values():
            made[-1]["ratio"] = made[-1]["sps"] / result["sps"]  # to Stable-Baselines3, which came last
    about = {"env_id": env_id, "num_envs": num_envs, "timesteps": steps, "rounds": rounds, **provenance()}
    for folder in folders:
        variants = {
            flags: {name: spread(result[name] for result in made) for name in made[0]}
            for (flags, of), made in runs.items()
            if of == folder or flags in OTHERS
        }
        print(f"\n{folder}\n{markdown(speed_table([about | {'variants': variants}]))}", flush=True)
    return about | {"variants": variants}


@dataclass
class Args:  # the comments are the texts of --help
    env_id: str | None = None  # only this environment
    num_envs: int | None = None  # only with so many environments
    rounds: int = 3  # runs of each, in alternation
    timesteps: int | None = None  # transitions per run; default: some seconds' worth
    script_dir: Path | None = None  # also run the scripts in this folder
    sbx: bool = False  # also run SBX
    cleanrl: Path | None = None  # also run CleanRL, which is in this folder
    store: bool = False  # store the results of this repository's scripts for the tables


def main() -> None:
    """The command line."""
    args = tyro.cli(Args, description=__doc__)
    folders = [args.script_dir.resolve(), ROOT] if args.script_dir else [ROOT]
    if args.store:
        refuse_uncommitted()
    for env_id in [args.env_id] if args.env_id else CASES:
        *_, sizes, least = CASES[env_id]
        others = [("sb3", ROOT)]
        if args.sbx and env_id in CLEANRL:
            others.insert(0, ("sbx", ROOT))
        if args.cleanrl and env_id in CLEANRL:
            others.insert(0, ("cleanrl", args.cleanrl.resolve()))
        for num_envs in [args.num_envs] if args.num_envs else sizes:
            steps = args.timesteps or max(least, 6 * 128 * num_envs)
            row = compare(env_id, num_envs, steps, args.rounds, folders, others)
            if args.store:
                rows = [*(json.loads(STORED.read_text()) if STORED.exists() else []), row]
                latest = {(row["env_id"], row["num_envs"]): json.dumps(row) for row in rows}
                STORED.write_text("[\n" + ",\n".join(latest[task] for task in sorted(latest)) + "\n]\n")


if __name__ == "__main__":
    main()
