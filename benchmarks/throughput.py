"""Steps a second of `ppo.py` beside Stable-Baselines3's PPO, at the same settings, in alternation, in one go.

    python benchmarks/throughput.py              # 1 to 1,024 environments, about 8 minutes on an idle machine
    python benchmarks/throughput.py --num-envs 4

Both train CartPole-v1 at CleanRL's settings (4 environments x 128 steps, 4 minibatches, 4 epochs, networks of
64-64 tanh), and with other numbers of environments, with one thread, each run in a process of its own. What
counts is the training loop as a user runs it: ours with TensorBoard, advice and status lines,
Stable-Baselines3's `learn` without a logger. Start-up and evaluation count for neither. An absolute figure
says little on a shared machine; the ratio of neighbouring runs says more. The full measurement is stored for
`report.py` to make the table of.
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

from experiments import RESULTS
from run import provenance, write

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
    size = ["--num-envs", str(num_envs), "--timesteps", str(timesteps)]
    command = [sys.executable, __file__, "--one", which, *size]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> list[float]:
    """Lowest, median and highest."""
    return [round(x, 3) for x in (min(values), statistics.median(values), max(values))]


def compare(num_envs: int, timesteps: int, rounds: int) -> dict[str, Any]:
    """Both in alternation: [lowest, median, highest] speed and ratio, memory, and our shares of time."""
    pairs = [[measure(which, num_envs, timesteps) for which in ("ours", "sb3")] for _ in range(rounds)]
    ours, theirs = zip(*pairs, strict=True)
    return {
        "num_envs": num_envs,
        "timesteps": timesteps,
        "ours": spread([run["sps"] for run in ours]),
        "sb3": spread([run["sps"] for run in theirs]),
        "ratio": spread([a["sps"] / b["sps"] for a, b in pairs]),
        "mib": [round(statistics.median(run["mib"] for run in runs)) for runs in (ours, theirs)],
        "shares": {part: spread([run["shares"][part] for run in ours])[1] for part in ours[0]["shares"]},
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of each, in alternation")
    parser.add_argument("--timesteps", type=int, help="transitions of a run; default: some seconds' worth")
    parser.add_argument(
        "--num-envs", type=int, help="environments; default: 1 to 1,024, and store the figures"
    )
    parser.add_argument("--one", choices=("ours", "sb3"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        result = (run_ours if options.one == "ours" else run_sb3)(options.num_envs, options.timesteps)
        result["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return
    print(f"steps a second, median and range of {options.rounds} rounds; memory; shares of ppo.py's time")
    rows = []
    for num_envs in [options.num_envs] if options.num_envs else (1, 4, 16, 64, 256, 1024):
        steps = options.timesteps or max(30_000, 5 * NUM_STEPS * num_envs)
        rows.append(row := compare(num_envs, steps, options.rounds))
        print(f"{num_envs:>5} environments, {steps:,} steps")
        for name, label in (("ours", "ppo.py"), ("sb3", "Stable-Baselines3")):
            low, median, high = row[name]
            print(f"      {label:<18}{median:>8,.0f}  ({low:,.0f} to {high:,.0f})  ", end="")
            print(f"{row['mib'][name == 'sb3']:>6,.0f} MiB")
        low, median, high = row["ratio"]
        print(f"      ratio             {median:>8.2f}  ({low:.2f} to {high:.2f})")
        print(
            "      " + ", ".join(f"{part} {share:.0%}" for part, share in row["shares"].items()), flush=True
        )
    if not options.num_envs:
        write(RESULTS / "throughput.json", provenance() | {"rounds": options.rounds, "growth": rows})


if __name__ == "__main__":
    main()
