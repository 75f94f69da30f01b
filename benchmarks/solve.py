"""How soon `ppo.py` solves CartPole-v1: until the last 100 training episodes have a mean return of 475.

    python benchmarks/solve.py
    python benchmarks/solve.py --seeds 3 -- --learning-rate 2e-3    # flags of ppo.py after the dashes

The seeds run one after another. Seconds count from the start of the process, with its imports.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(__file__).resolve().parent.parent / "ppo.py"
SOLVED = 475


def solve(seed: int, flags: list[str]) -> tuple[float, float, float]:
    """Steps and seconds until it is solved, and the return of the evaluation."""
    command = [sys.executable, str(SCRIPT), "--seed", str(seed), *flags]
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        log = EventAccumulator(str(next(Path(folder, "runs").iterdir())), {"scalars": 0}).Reload()
    greedy = float(re.findall(r"evaluation return (\S+)", done.stdout)[0])
    for event in log.Scalars("charts/episodic_return_100"):
        if event.value >= SOLVED:
            return event.step, event.wall_time - start, greedy
    return math.inf, math.inf, greedy


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs, with seeds 1, 2, ...")
    parser.add_argument("flags", nargs="*", help="flags for ppo.py, after --")
    options = parser.parse_args()
    results = []
    for seed in range(1, options.seeds + 1):
        results.append(solve(seed, options.flags))
        print("seed {}: {:,.0f} steps, {:.1f} s; greedy {:.1f}".format(seed, *results[-1]), flush=True)
    steps, seconds, greedy = zip(*results, strict=True)
    print(f"median: {statistics.median(steps):,.0f} steps, {statistics.median(seconds):.1f} s")
    print(f"worst: {max(steps):,.0f} steps, {max(seconds):.1f} s; greedy {min(greedy):.1f}")


if __name__ == "__main__":
    main()
