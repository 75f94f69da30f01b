"""The stored results, as `report.py` and `figures.py` use them."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
from experiments import Task, runs


def load() -> pd.DataFrame:
    """One row per stored run. `greedy` is the mean of the evaluation's episodes."""
    rows = []
    for run in runs():
        if run.path.exists():
            stored = json.loads(run.path.read_text())
            final, (env_id, steps) = stored["final"], run.task
            rows.append(
                {
                    "experiment": run.experiment.name,
                    "env_id": env_id,
                    "steps": steps,
                    "seed": run.seed,
                    "training": final["training"],  # mean return of the last 100 training episodes
                    "greedy": np.mean(final["greedy"]),
                    "episodes": len(final["greedy"]),
                    "seconds": stored["seconds"],
                    "curve": stored["curve"],
                }
            )
    return pd.DataFrame(rows)


def select(results: pd.DataFrame, experiment: str, task: Task) -> pd.DataFrame:
    """The runs of an experiment on a task, by seed; empty if there are none."""
    env_id, steps = task
    same_task = (results.env_id == env_id) & (results.steps == steps)
    return results[same_task & (results.experiment == experiment)].sort_values("seed")


def curves(found: pd.DataFrame, quantity: str) -> np.ndarray:
    """Learning curves [seeds, parts of the run]; NaN where nothing was logged."""
    return np.array([curve[quantity] for curve in found.curve], dtype=float)
