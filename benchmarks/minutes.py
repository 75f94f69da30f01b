"""Return against minutes: our scripts, Stable-Baselines3 and CleanRL, each with its settings for the task.

    python benchmarks/minutes.py DIR    # does what runs.csv lacks, one run after another
    python benchmarks/figures.py        # draws the figure

Ours has its defaults, Stable-Baselines3 the settings of its RL Zoo (sb3.json), and CleanRL the defaults of
its `ppo.py` and `ppo_continuous_action.py`. DIR is a checkout of CleanRL with a virtual environment DIR/.venv
(`pip install torch gymnasium[mujoco]==0.29.1 mujoco==2.3.7 numpy==1.26.4 tensorboard tyro box2d pygame`).
Each run is a process with one thread, whose clock is the processor's time since the process started, in what
TensorBoard logs, too. Time in which other programs have the core does not count, but they share its caches,
and slow it all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import tyro
from experiments import HERE, ROOT, SB3, Run, runs
from peers import CLEANRL_FILES, CLOCK, SCRIPT, versions_in
from run import CURVES, KEY, RUNS, in_words, missing, provenance, refuse_uncommitted, store
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

POINTS = 100  # of a curve
TRAIN_SB3 = CLOCK + "from peers import train_sb3; train_sb3(*map(json.loads, sys.argv[1:]))"


def curve(run: Run, cleanrl: Path) -> tuple[np.ndarray, np.ndarray]:
    """Train. Returns minutes and the mean return of the last 100 episodes, up to `POINTS` times."""
    script = run.experiment.script
    if script == "cleanrl":
        file, env_id = CLEANRL_FILES[run.env_id]
        sizes = ["--total-timesteps", str(run.steps), "--seed", str(run.seed)]
        words = [str(cleanrl / ".venv/bin/python"), "-c", SCRIPT, str(cleanrl / "cleanrl" / file)]
        words += ["--env-id", env_id, *sizes, "--no-cuda"]
    elif script == "sb3":
        settings = SB3[run.env_id] | {"tensorboard_log": "runs"}
        words = [sys.executable, "-c", TRAIN_SB3]
        words += map(json.dumps, (run.env_id, run.steps, run.seed, settings))
    else:
        words = [sys.executable, "-c", SCRIPT, str(ROOT / script), *run.arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{cleanrl}{os.pathsep}{HERE}"}
    environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # in the process itself, whose time counts
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(words, check=True, cwd=folder, env=environment, stdout=subprocess.DEVNULL)
        log = EventAccumulator(str(next(Path(folder).glob("**/events*")).parent), {"scalars": 0}).Reload()
    tags = "charts/episodic_return_100", "rollout/ep_rew_mean", "charts/episodic_return"
    tag = next(tag for tag in tags if tag in log.Tags()["scalars"])
    minutes, returns = np.array([(event.wall_time / 60, event.value) for event in log.Scalars(tag)]).T
    if tag == "charts/episodic_return":  # CleanRL logs each episode
        returns = np.array([returns[max(0, i - 99) : i + 1].mean() for i in range(len(returns))])
    kept = np.unique(np.linspace(0, len(returns) - 1, POINTS).astype(int))
    return minutes[kept], returns[kept]


def main(cleanrl: Path, /) -> None:
    """Do the runs that are not stored yet. Each is stored as soon as it is there."""
    refuse_uncommitted()
    planned = [run for run in runs() if run.experiment.program == "minutes.py"]
    for run in sorted(missing(planned), key=lambda run: run.seed):
        minutes, returns = curve(run, cleanrl.resolve())
        name, about = dict(zip(KEY, run.key, strict=True)), in_words(provenance())
        if run.experiment.script == "cleanrl":
            about["versions"] = versions_in(cleanrl, "torch", "gymnasium", "numpy", "mujoco")
        points = {"minutes": minutes, "return": returns}
        texts = {quantity: " ".join(f"{x:.5g}" for x in values) for quantity, values in points.items()}
        rows = [name | {"quantity": quantity, "points": text} for quantity, text in texts.items()]
        store(CURVES, rows, [*KEY, "quantity"])
        row = {"flags": run.flags, "training": round(returns[-1], 4), "seconds": round(minutes[-1] * 60, 1)}
        store(RUNS, [name | row | {"sessions": 1} | about], KEY)
        print(f"{run.name}: {returns[-1]:.4g} after {minutes[-1]:.2f} min", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
