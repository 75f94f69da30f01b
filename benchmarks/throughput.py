"""Steps a second of `ppo.py` beside Stable-Baselines3's PPO, at the same settings, in alternation, in one go.

    python benchmarks/throughput.py              # the ratio, and where our time goes
    python benchmarks/throughput.py --growth     # also: speed and memory for 1 to 1,024 environments

Both train CartPole-v1 at CleanRL's settings (4 environments x 128 steps, 4 minibatches, 4 epochs, networks of
64-64 tanh) with one thread, each run in a process of its own. What counts is the training loop as a user runs
it: ours with TensorBoard, advice and status lines, Stable-Baselines3's `learn` without a logger. Start-up and
evaluation count for neither. An absolute figure says little on a shared machine; the ratio of neighbouring
runs says more.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, MINIBATCHES, EPOCHS, LEARNING_RATE = 128, 4, 4, 2.5e-4


def run_ours(num_envs: int, timesteps: int) -> dict[str, Any]:
    """Train with ppo.py in a temporary folder; return its own steps a second, and shares of time by part."""
    sys.path.insert(0, str(ROOT))
    import ppo

    seconds = dict.fromkeys(("environment", "collect", "advantages", "update", "loop"), 0.0)

    def timed(part: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - start

        return call

    def make_envs(*args: Any, **kwargs: Any) -> Any:
        envs, one_hot = original(*args, **kwargs)
        envs.step = timed("environment", envs.step)
        return envs, one_hot

    def evaluate(*args: Any) -> dict[str, Any]:
        return {"returns": ppo.np.zeros(1), "lengths": ppo.np.zeros(1)}

    original, ppo.make_envs, ppo.evaluate = ppo.make_envs, make_envs, evaluate
    ppo.compute_gae = timed("advantages", ppo.compute_gae)
    ppo.collect_rollout, ppo.update = timed("collect", ppo.collect_rollout), timed("update", ppo.update)
    last: dict[str, float] = {}

    def report(writer: Any, figures: dict[str, float], *rest: Any) -> list[str]:
        last.update(figures)
        return original_report(writer, figures, *rest)

    original_report, ppo.report = ppo.report, report
    args = ppo.Args(
        num_envs=num_envs, total_timesteps=timesteps, num_steps=NUM_STEPS, num_minibatches=MINIBATCHES,
        update_epochs=EPOCHS, learning_rate=LEARNING_RATE, gae_lambda=0.95,
        norm_obs=False, norm_rewards=False,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        ppo.train(args)
        os.chdir(ROOT)
    total = timesteps / last["charts/SPS"]
    parts = {
        "environment": seconds["environment"],
        "acting": seconds["collect"] - seconds["environment"],
        "advantages": seconds["advantages"],
        "update": seconds["update"] - seconds["advantages"],
    }
    shares = {part: value / total for part, value in parts.items()}
    return {"sps": last["charts/SPS"], "shares": shares | {"other": 1 - sum(shares.values())}}


def run_sb3(num_envs: int, timesteps: int) -> dict[str, Any]:
    """Train with Stable-Baselines3 at the same settings; its value loss lacks our ½, so vf_coef is 0.25."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env

    torch.set_num_threads(1)
    model = PPO(
        "MlpPolicy", make_vec_env("CartPole-v1", num_envs), device="cpu", n_steps=NUM_STEPS, n_epochs=EPOCHS,
        batch_size=NUM_STEPS * num_envs // MINIBATCHES, learning_rate=lambda left: LEARNING_RATE * left,
        ent_coef=0.01, vf_coef=0.25,
    )  # fmt: skip
    start = time.monotonic()
    model.learn(timesteps)
    return {"sps": model.num_timesteps / (time.monotonic() - start)}


def measure(which: str, num_envs: int, timesteps: int) -> dict[str, Any]:
    """One run in a fresh process."""
    command = [
        sys.executable,
        __file__,
        "--one",
        which,
        "--num-envs",
        str(num_envs),
        "--timesteps",
        str(timesteps),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> str:
    """Median and range, as text."""
    return f"{statistics.median(values):>9,.0f}  ({min(values):,.0f} to {max(values):,.0f})"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in alternation")
    parser.add_argument("--timesteps", type=int, default=60_000, help="transitions of a run")
    parser.add_argument("--num-envs", type=int, default=4, help="environments")
    parser.add_argument("--growth", action="store_true", help="also measure 1 to 1,024 environments")
    parser.add_argument("--one", choices=("ours", "sb3"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        result = (run_ours if options.one == "ours" else run_sb3)(options.num_envs, options.timesteps)
        result["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return

    ours, theirs = [], []
    for round_ in range(options.rounds):
        ours.append(measure("ours", options.num_envs, options.timesteps))
        theirs.append(measure("sb3", options.num_envs, options.timesteps))
        print(
            f"round {round_ + 1}: {ours[-1]['sps']:,.0f} / {theirs[-1]['sps']:,.0f} steps a second",
            flush=True,
        )
    ratios = [a["sps"] / b["sps"] for a, b in zip(ours, theirs, strict=True)]
    print(f"\nsteps a second, median and range of {options.rounds} rounds, {options.num_envs} environments")
    print(f"  ppo.py            {spread([run['sps'] for run in ours])}")
    print(f"  Stable-Baselines3 {spread([run['sps'] for run in theirs])}")
    print(f"  ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    shares = {part: statistics.median(run["shares"][part] for run in ours) for part in ours[0]["shares"]}
    print("  ppo.py's time: " + ", ".join(f"{part} {share:.0%}" for part, share in shares.items()))
    if options.growth:
        print("\nenvironments   ppo.py steps/s      MiB   Stable-Baselines3 steps/s      MiB   ratio")
        for num_envs in (1, 4, 16, 64, 256, 1024):
            steps = max(20_000, 4 * NUM_STEPS * num_envs)
            us, them = measure("ours", num_envs, steps), measure("sb3", num_envs, steps)
            line = f"{num_envs:>12} {us['sps']:>16,.0f} {us['mib']:>8,.0f} {them['sps']:>27,.0f}"
            print(f"{line} {them['mib']:>8,.0f} {us['sps'] / them['sps']:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
