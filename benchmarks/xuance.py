"""XuanCe's returns of PPO, for `XUANCE` in experiments.py.

python benchmarks/xuance.py DIR    # a checkout of https://github.com/agi-brain/xuance-benchmarks
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import tyro


def main(folder: Path, /) -> None:
    """Print mean and deviation over seeds, of the last evaluation and of each seed's best one."""
    for task in sorted(folder.glob("*/*/ppo/results")):
        curves = [pd.read_csv(path).avg_return for path in sorted(task.glob("seed_*/learning_curve.csv"))]
        last = pd.Series([curve.iloc[-1] for curve in curves])
        best = pd.Series([curve.max() for curve in curves])
        numbers = (f"{x:.1f}" for x in (last.mean(), last.std(), best.mean(), best.std()))
        print(task.parent.parent.name, f"({len(curves)} seeds):", *numbers)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
