"""Steps per CPU second of our scripts and of others' PPO, with the same settings, in alternation.

    python benchmarks/speed.py --env-id CartPole-v1
    python benchmarks/speed.py --peers --cleanrl DIR --purejaxrl DIR --store    # all, for the tables

Stable-Baselines3 always takes part. `--peers` adds SBX, which is Stable-Baselines3 in JAX, and on Pendulum
RSL-RL (`pip install sbx-rl rsl-rl-lib`). The DIR of CleanRL is a checkout with a virtual environment
DIR/.venv that has what its `ppo.py`, `ppo_continuous_action.py` and `ppo_atari.py` need (`pip install torch
ale-py==0.10.1 gymnasium[mujoco]==0.29.1 mujoco==2.3.7 opencv-python-headless==4.10.0.84 numpy==1.26.4
tensorboard tyro`), that of PureJaxRL one with `pip install jax gymnax==0.0.9 flax optax distrax brax navix`.

Each run is a process of its own, with one thread on one core (macOS lets no program choose its core), and its
clock is the processor's time of that process: time in which other programs have the core does not count, but
they share its caches and slow it. So ratios of neighbouring runs say more than speeds do. The speed
is that of the training loop after the third iteration: start, compiling and evaluation do not count.
"goal" is the CPU seconds from the start of the process until the mean return of 100 training episodes
reached the goal. Ours and CleanRL log to TensorBoard, by whose times they are measured; the others log
nothing. PureJaxRL's environment is a function in JAX, compiled together with the training.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import multiprocessing
import os
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import peers
import tyro
from experiments import ROOT
from run import SPEEDS, in_words, provenance, refuse_uncommitted, store

CLEANRL_SETTINGS = (
    "--num-steps 128 --num-minibatches 4 --update-epochs 4 --learning-rate 2.5e-4 --eval-episodes 1"
)
ATARI = f"{CLEANRL_SETTINGS} --num-threads 1"
CARTPOLE = f"{CLEANRL_SETTINGS} --norm-adv --gae-lambda 0.95 --no-norm-obs --no-norm-rewards"
CHEETAH = "--num-steps 256 --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --eval-episodes 1"
CHEETAH += " --norm-adv --gae-lambda 0.95 --no-recompute-advantages --adapt none"


@dataclass(frozen=True)
class Case:
    """What is measured on an environment."""

    script: str
    num_envs: int
    steps: int
    flags: str
    variants: tuple[str, ...]  # flags of ours
    others: tuple[str, ...]  # functions of peers.py; the last is Stable-Baselines3's
    goal: float | None = None  # a return


COMMON = "sbx", "cleanrl", "sb3"
TENSORS = "purejaxrl_pendulum", "rsl_rl", "sb3_tensors"
CASES = {
    "CartPole-v1": Case("ppo", 4, 50_000, CARTPOLE, ("", "--compile"), ("purejaxrl", *COMMON)),
    "HalfCheetah-v5": Case("ppo_continuous", 8, 50_000, CHEETAH, ("", "--compile"), COMMON),
    "BreakoutNoFrameskip-v4": Case("ppo_atari", 8, 6_000, ATARI, ("", "--bfloat16"), COMMON),
    "Pendulum": Case("ppo_gpu", 1024, 1_000_000, "--device cpu", ("", "--compile"), TENSORS, goal=-200),
}


PACKAGES = {"sbx": "sbx-rl", "rsl_rl": "rsl-rl-lib"}


@dataclass
class Args:  # the comments are the texts of --help
    env_id: str | None = None  # only this environment
    rounds: int = 3  # runs of each, in alternation
    timesteps: int | None = None  # transitions per run; default: some seconds' worth
    peers: bool = False  # also run SBX or RSL-RL
    cleanrl: Path | None = None  # also run CleanRL, which is in this folder
    purejaxrl: Path | None = None  # also run PureJaxRL, which is in this folder
    store: bool = False  # store the results for the tables


def ours(script: Any, args: Any) -> peers.Rows:
    """Train with our script in the current folder."""
    folder = Path(script.train(args)["checkpoint"]).parent
    returns = {event.step: event.value for event in peers.events(folder, "charts/episodic_return_100")}
    times = peers.events(folder, "charts/SPS")  # one in each iteration
    return [(event.step, returns.get(event.step, np.nan), event.wall_time) for event in times]


def measure(env_id: str, variant: str, steps: int, seed: int) -> dict[str, float]:
    """One run, in this process. The variant is flags of our script, or a function of peers.py."""
    case = CASES[env_id]
    time.time = time.process_time  # the clock of all that logs
    sys.path.insert(0, str(ROOT))
    script: Any = importlib.import_module(case.script)
    own = "" if variant in case.others else variant
    sizes = f"--env-id {env_id} --num-envs {case.num_envs} --total-timesteps {steps} --seed {seed}"
    args = tyro.cli(script.Args, args=f"{sizes} {case.flags} {own}".split())
    output = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), output:
        rows = getattr(peers, variant)(args) if variant in case.others else ours(script, args)
    (first, _, begin), (last, _, end) = rows[2], rows[-1]
    result = {"speed": (last - first) / (end - begin)}
    if case.goal is not None:
        reached = [now for _, value, now in rows if value >= case.goal]
        result["goal"] = min(reached, default=math.inf)
    return result


def in_a_process(*task: Any) -> dict[str, float]:
    """`measure`, in a process of its own, on one core."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), take_one_core) as process:
        return process.submit(measure, *task).result()


def take_one_core() -> None:
    """Stay on one core, with all threads and processes that this process starts."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def compare(env_id: str, args: Args) -> list[dict[str, Any]]:
    """Measure in alternation, and print a table. Returns its rows."""
    from report import markdown, speed_table  # not in the processes that are measured: it needs memory

    case = CASES[env_id]
    chosen = {"sbx": args.peers, "rsl_rl": args.peers}
    chosen |= {"cleanrl": args.cleanrl, "purejaxrl": args.purejaxrl, "purejaxrl_pendulum": args.purejaxrl}
    steps, others = args.timesteps or case.steps, [name for name in case.others if chosen.get(name, True)]
    runs: dict[str, list[dict[str, float]]] = {variant: [] for variant in (*case.variants, *others)}
    for seed in range(1, args.rounds + 1):
        for variant, made in runs.items():
            made.append(in_a_process(env_id, variant, steps, seed))
            print(f"{env_id} {variant or 'eager'}, seed {seed}: {made[-1]}", flush=True)
        for results in runs.values():
            results[-1]["ratio"] = results[-1]["speed"] / made[-1]["speed"]  # to the last, Stable-Baselines3
    about = {"env_id": env_id, "num_envs": case.num_envs, "timesteps": steps, "rounds": args.rounds}
    rows = []
    for variant, results in runs.items():
        measured = {name: " ".join(f"{x[name]:.5g}" for x in results) for name in results[0]}
        row = about | {"variant": variant or "eager"} | measured | in_words(provenance())
        if variant == "cleanrl":
            packages = "torch", "gymnasium", "numpy", "mujoco", "ale-py"
            row["versions"] = peers.versions_in(args.cleanrl, *packages)
        elif variant.startswith("purejaxrl"):
            row["versions"] = peers.versions_in(args.purejaxrl, "jax", "gymnax", "flax", "optax", "distrax")
        elif variant in PACKAGES:
            row["versions"] += f" {PACKAGES[variant]}={version(PACKAGES[variant])}"
        rows.append(row)
    print(markdown(speed_table(pd.DataFrame(rows))), flush=True)
    return rows


def main() -> None:
    """The command line."""
    args = tyro.cli(Args, description=__doc__)
    for name, folder in {"CLEANRL": args.cleanrl, "PUREJAXRL": args.purejaxrl}.items():
        if folder:
            os.environ[name] = str(folder.resolve())
    if args.store:
        refuse_uncommitted()
    for env_id in [args.env_id] if args.env_id else CASES:
        rows = compare(env_id, args)
        if args.store:
            store(SPEEDS, rows, ["env_id", "num_envs", "variant"])


if __name__ == "__main__":
    main()
