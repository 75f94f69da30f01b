"""How soon `ppo.py` solves CartPole-v1: until the last 100 training episodes average 475, over seeds 1 to 10.

    python benchmarks/solve.py
    python benchmarks/solve.py --seeds 3 -- --learning-rate 2e-3    # flags of ppo.py after the dashes

Each seed is one run of the command line, one after the other. Seconds count from the start of the process, so
imports and all else are in them; steps are transitions learnt from. Both are read from TensorBoard's events.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = Path(__file__).resolve().parent.parent / "ppo.py"
SOLVED, TAG = 475, "charts/episodic_return_100"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10, help="runs, with seeds 1, 2, ...")
    parser.add_argument("flags", nargs="*", help="flags for ppo.py, after --")
    options = parser.parse_args()
    steps, seconds, greedy = [], [], []
    for seed in range(1, options.seeds + 1):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(SCRIPT), "--seed", str(seed), *options.flags]
            start = time.time()
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
            events = EventAccumulator(str(next(Path(folder, "runs").iterdir())), {"scalars": 0}).Reload()
            curve = events.Scalars(
                TAG
            )  # of at most 100 episodes; the first 100 are far too short to reach 475
        solved = next((event for event in curve if event.value >= SOLVED), None)
        steps.append(solved.step if solved else float("inf"))
        seconds.append(solved.wall_time - start if solved else float("inf"))
        greedy.extend(float(mean) for mean in re.findall(r"greedy +return (\S+)", done.stdout))
        print(f"seed {seed:>2}: {steps[-1]:>9,} steps, {seconds[-1]:5.1f} s; greedy {greedy[-1]}", flush=True)
    print(f"median   : {statistics.median(steps):>9,.0f} steps, {statistics.median(seconds):5.1f} s")
    print(f"worst    : {max(steps):>9,.0f} steps, {max(seconds):5.1f} s; greedy 500.0: {greedy.count(500.0)}")


if __name__ == "__main__":
    main()
