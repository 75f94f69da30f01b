"""Steps per second of our scripts and of others' PPO, with the same settings, in alternation.

    python benchmarks/throughput.py --env-id CartPole-v1 --num-envs 4
    python benchmarks/throughput.py --env-id CartPole-v1 --script-dir DIR    # and another copy of ppo.py
    python benchmarks/throughput.py --store     # all, for the tables
    python benchmarks/throughput.py --env-id CartPole-v1 --num-envs 4 --peers --cleanrl DIR \\
        --timesteps 300000 --goal 475

Stable-Baselines3 always takes part. `--peers` adds SBX, which is Stable-Baselines3 in JAX, Tianshou, TorchRL
and skrl (`pip install sbx-rl tianshou torchrl skrl`). DIR is a checkout of CleanRL with a virtual environment
DIR/.venv that has what its `ppo.py`, `ppo_continuous_action.py` and `ppo_atari.py` need (`pip install torch
gymnasium[mujoco]==0.29.1 mujoco==2.3.7 ale-py==0.10.1 opencv-python-headless==4.10.0.84 numpy==1.26.4
tensorboard tyro`).
Breakout is only run with Stable-Baselines3, SBX and CleanRL.

Each run is a process of its own, with one thread (SBX, and all on Atari: all cores). The speed is that of the
training loop after the third iteration, so the start, compiling and the evaluation do not count. "start" is
the seconds from the start of the process to the first step, plus what the first three iterations took longer
than later ones. `--goal` adds the seconds from the start of the process until the mean of the last 100
training episodes reached this return. Ours and CleanRL log to TensorBoard, by whose times they are measured;
the others log nothing. On a busy machine, speeds say little, and the ratio of neighbouring runs says more.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
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
CHEETAH += " --norm-obs --norm-rewards --no-recompute-advantages --adapt none"
CASES = {  # environment: script, flags, those of its variants, numbers of environments, and least steps
    "CartPole-v1": ("ppo", CARTPOLE, [""], [1, 4, 16, 64, 256, 1024], 30_000),
    "HalfCheetah-v5": ("ppo_continuous", CHEETAH, ["", "--compile", "--compile --async-envs"], [8], 30_000),
    "BreakoutNoFrameskip-v4": ("ppo_atari", SIZES, ["", "--bfloat16"], [8], 6_000),
}
ACTIVATIONS = {"CartPole-v1": "Tanh", "HalfCheetah-v5": "ELU"}
CLEANRL = {  # its files, and the names that its version of Gymnasium has
    "CartPole-v1": ("ppo", "CartPole-v1"),
    "HalfCheetah-v5": ("ppo_continuous_action", "HalfCheetah-v4"),
    "BreakoutNoFrameskip-v4": ("ppo_atari", "ale_py:BreakoutNoFrameskip-v4"),
}
PEERS = "tianshou", "torchrl", "skrl"  # functions of peers.py
OTHERS = "sb3", "sbx", "cleanrl", *PEERS
Rows = list[tuple[float, float, float]]  # steps, mean return of 100 episodes, and time, of each iteration


@dataclass
class Args:  # the comments are the texts of --help
    env_id: str | None = None  # only this environment
    num_envs: int | None = None  # only with so many environments
    rounds: int = 3  # runs of each, in alternation
    timesteps: int | None = None  # transitions per run; default: some seconds' worth
    script_dir: Path | None = None  # also run the scripts in this folder
    peers: bool = False  # also run SBX, Tianshou, TorchRL and skrl
    cleanrl: Path | None = None  # also run CleanRL, which is in this folder
    goal: float | None = None  # also measure the seconds until this return
    store: bool = False  # store the results for the tables


def events(tag: str) -> list[Any]:
    """The values of a tag in the log of the run in the current folder."""
    log = EventAccumulator(str(next(Path("runs").iterdir())), {"scalars": 0}).Reload()
    return log.Scalars(tag)


def run_ours(script: Any, args: Any) -> Rows:
    """Train with our script in the current folder."""
    script.train(args)
    returns = {event.step: event.value for event in events("charts/episodic_return_100")}
    return [(event.step, returns.get(event.step, np.nan), event.wall_time) for event in events("losses/kl")]


def run_cleanrl(folder: str, args: Any) -> Rows:
    """Train with the file of CleanRL in a process of its own packages."""
    file, env_id = CLEANRL[args.env_id]
    names = "num_envs", "num_steps", "num_minibatches", "update_epochs", "learning_rate"
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    words += [f"--total-timesteps={args.total_timesteps:.0f}", f"--seed={args.seed}", "--no-clip-vloss"]
    words += [f"--vf-coef={args.vf_coef}", f"--ent-coef={args.ent_coef}", "--no-cuda"]
    command = [f"{folder}/.venv/bin/python", f"{folder}/cleanrl/{file}.py", *words, "--env-id", env_id]
    environment = {**os.environ, "PYTHONPATH": folder}
    if args.env_id in ACTIVATIONS:
        environment["OMP_NUM_THREADS"] = "1"
    subprocess.run(command, check=True, capture_output=True, env=environment)
    episodes, rows = events("charts/episodic_return"), []
    for event in events("charts/SPS"):
        returns = [episode.value for episode in episodes if episode.step <= event.step][-100:]
        rows.append((event.step, float(np.mean(returns or np.nan)), event.wall_time))
    return rows


def run_sb3(library: str, args: Any) -> Rows:
    """Train with Stable-Baselines3 or SBX. Their value loss lacks our ½."""
    settings: dict[str, Any] = {
        "n_envs": args.num_envs,
        "normalize": getattr(args, "norm_obs", False),
        "n_steps": args.num_steps,
        "batch_size": args.num_steps * args.num_envs // args.num_minibatches,
        "n_epochs": args.update_epochs,
        "learning_rate": f"linear {args.learning_rate}",
        "ent_coef": args.ent_coef,
        "vf_coef": args.vf_coef / 2,
    }
    if args.env_id in ACTIVATIONS:
        settings["policy_kwargs"] = {"activation_fn": ACTIVATIONS[args.env_id], "log_std_init": -0.5}
    _, rows = train_sb3(args.env_id, int(args.total_timesteps), args.seed, settings, library)
    return [tuple(map(float, row)) for row in rows]


def train(variant: str, scripts: Path, script: Any, args: Any) -> Rows:
    """Train in this process, in the current folder."""
    import torch

    if variant not in OTHERS:
        return run_ours(script, args)
    if variant == "cleanrl":
        return run_cleanrl(str(scripts), args)
    if args.env_id in ACTIVATIONS:
        torch.set_num_threads(1)
    if variant in PEERS:
        import peers

        progress = peers.Progress()
        script.seed_everything(args.seed)
        getattr(peers, variant)(args, progress)
        return progress.rows
    return run_sb3("sbx" if variant == "sbx" else "stable_baselines3", args)


def measure(
    variant: str, scripts: Path, env_id: str, num_envs: int, steps: int, seed: int, goal: float | None
) -> dict[str, float]:
    """One run, in this process. The variant is one of OTHERS, or flags of our script."""
    start = time.time()
    sys.path.insert(0, str(scripts))
    name, flags, *_ = CASES[env_id]
    script: Any = importlib.import_module(name)
    sizes = f"--env-id {env_id} --num-envs {num_envs} --total-timesteps {steps} --seed {seed}"
    own = "" if variant in OTHERS else variant
    args = tyro.cli(script.Args, args=f"{sizes} {FLAGS} {flags} {own}".split())
    output = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), output:
        rows = train(variant, scripts, script, args)
    (first, _, begin), (last, _, end) = rows[2], rows[-1]
    speed = (last - first) / (end - begin)
    result = {"sps": speed, "start": begin - start - first / speed}
    if goal is not None:
        times = [now for _, value, now in rows if value >= goal]
        result["seconds"] = times[0] - start if times else math.inf
    return result


def spread(values: Iterable[float]) -> list[float]:
    """Lowest, median and highest."""
    return np.quantile(list(values), (0, 0.5, 1), method="nearest").round(3).tolist()


def compare(
    env_id: str, num_envs: int, steps: int, args: Args, folders: list[Path], others: list[tuple[str, Path]]
) -> dict[str, Any]:
    """Measure in alternation, and print a table per folder. Returns the results of the last folder."""
    from report import markdown, speed_table  # not in the processes that are measured: it needs memory

    print(f"\n{env_id}, {num_envs:,} environments, {steps:,} steps, {args.rounds} rounds", flush=True)
    contestants = [(flags, folder) for flags in CASES[env_id][2] for folder in folders] + others
    runs: dict[Any, list[dict[str, float]]] = {contestant: [] for contestant in contestants}
    for seed in range(1, args.rounds + 1):
        for contestant in contestants:
            task = *contestant, env_id, num_envs, steps, seed, args.goal
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                result = process.submit(measure, *task).result()
            print(f"{contestant[0] or 'eager'}, seed {seed}: {result}", flush=True)
            runs[contestant].append(result)
        for made in runs.values():
            made[-1]["ratio"] = made[-1]["sps"] / result["sps"]  # to Stable-Baselines3, which came last
    about = {"env_id": env_id, "num_envs": num_envs, "timesteps": steps, "rounds": args.rounds}
    about |= {"goal": args.goal, **provenance()}
    for folder in folders:
        variants = {
            flags: {name: spread(result[name] for result in made) for name in made[0]}
            for (flags, of), made in runs.items()
            if of == folder or flags in OTHERS
        }
        print(f"\n{folder}\n{markdown(speed_table([about | {'variants': variants}]))}", flush=True)
    return about | {"variants": variants}


def main() -> None:
    """The command line."""
    args = tyro.cli(Args, description=__doc__)
    folders = [args.script_dir.resolve(), ROOT] if args.script_dir else [ROOT]
    if args.store:
        refuse_uncommitted()
    for env_id in [args.env_id] if args.env_id else CASES:
        *_, sizes, least = CASES[env_id]
        others = [("sb3", ROOT)]
        if args.peers:
            names = ("sbx", *PEERS) if env_id in ACTIVATIONS else ("sbx",)
            others = [*((name, ROOT) for name in names), *others]
        if args.cleanrl:
            others.insert(0, ("cleanrl", args.cleanrl.resolve()))
        for num_envs in [args.num_envs] if args.num_envs else sizes:
            steps = args.timesteps or max(least, 6 * 128 * num_envs)
            row = compare(env_id, num_envs, steps, args, folders, others)
            if args.store:
                rows = [*(json.loads(STORED.read_text()) if STORED.exists() else []), row]
                latest = {(row["env_id"], row["num_envs"]): json.dumps(row) for row in rows}
                STORED.write_text("[\n" + ",\n".join(latest[task] for task in sorted(latest)) + "\n]\n")


if __name__ == "__main__":
    main()
