"""Return against minutes: our scripts, Stable-Baselines3 and CleanRL, each with its settings for the task.

    python benchmarks/minutes.py DIR    # does what minutes.csv lacks, one run after another
    python benchmarks/figures.py        # draws the figure

Ours has its defaults, Stable-Baselines3 the settings of its RL Zoo (sb3.json), and CleanRL the defaults of
its `ppo.py` and `ppo_continuous_action.py`. DIR is a checkout of CleanRL with a virtual environment DIR/.venv
(`pip install torch gymnasium[mujoco]==0.29.1 mujoco==2.3.7 numpy==1.26.4 tensorboard tyro box2d pygame`).
Each run is a process with one thread, whose clock is the processor's time since the process started, in what
TensorBoard logs, too. So other programs on the machine hardly matter.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import tyro
from experiments import DATA, HERE, ROOT, SB3
from run import in_words, provenance, refuse_uncommitted, store
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

MINUTES = DATA / "minutes.csv"
KEY = ["env_id", "library", "steps", "seed"]  # columns that identify a run
POINTS = 100  # of a curve
SEEDS = 1, 2, 3
TASKS = {  # steps; our script and flags; CleanRL's file and, as its Gymnasium is older, the task's name there
    "CartPole-v1": (100_000, "ppo.py", [], "ppo.py", "CartPole-v1"),
    "LunarLander-v3": (1_000_000, "ppo.py", [], "ppo.py", "LunarLander-v2"),
    "HalfCheetah-v5": (
        300_000, "ppo_continuous.py", ["--compile"], "ppo_continuous_action.py", "HalfCheetah-v4",
    ),
}  # fmt: skip
LIBRARIES = "ours", "CleanRL", "Stable-Baselines3"
# The clock of a run is the processor's time of its process.
CLOCK = "import json, runpy, sys, time; time.time = time.process_time; "
SCRIPT = CLOCK + "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
TRAIN_SB3 = CLOCK + "from peers import train_sb3; train_sb3(*map(json.loads, sys.argv[1:]))"


def curve(library: str, env_id: str, seed: int, cleanrl: Path) -> tuple[np.ndarray, np.ndarray]:
    """Train. Returns minutes and the mean return of the last 100 episodes, up to `POINTS` times."""
    steps, script, flags, cleanrl_file, cleanrl_id = TASKS[env_id]
    sizes = ["--total-timesteps", str(steps), "--seed", str(seed)]
    if library == "ours":
        words = [sys.executable, "-c", SCRIPT, str(ROOT / script), "--env-id", env_id, *sizes, *flags]
    elif library == "CleanRL":
        words = [str(cleanrl / ".venv/bin/python"), "-c", SCRIPT, str(cleanrl / "cleanrl" / cleanrl_file)]
        words += ["--env-id", cleanrl_id, *sizes, "--no-cuda"]
    else:
        settings = SB3[env_id] | {"tensorboard_log": "runs"}
        words = [sys.executable, "-c", TRAIN_SB3, *map(json.dumps, (env_id, steps, seed, settings))]
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


def cleanrl_versions(cleanrl: Path) -> str:
    """What CleanRL's scripts run with."""
    code = "from importlib.metadata import version as v; "
    code += "print(*(f'{x}={v(x)}' for x in ('torch', 'gymnasium', 'numpy', 'mujoco')))"
    return subprocess.check_output([cleanrl / ".venv/bin/python", "-c", code], text=True).strip()


def main(cleanrl: Path, /) -> None:
    """Do the runs that are not stored yet. Each is stored as soon as it is there."""
    refuse_uncommitted()
    stored = pd.read_csv(MINUTES).set_index(KEY).index if MINUTES.exists() else []
    for seed in SEEDS:
        for env_id, (steps, *_) in TASKS.items():
            for library in LIBRARIES:
                key = env_id, library, steps, seed
                if key in stored:
                    continue
                minutes, returns = curve(library, env_id, seed, cleanrl.resolve())
                points = {"minutes": minutes, "returns": returns}
                texts = {name: " ".join(f"{x:.5g}" for x in values) for name, values in points.items()}
                row = dict(zip(KEY, key, strict=True)) | texts | in_words(provenance())
                if library == "CleanRL":
                    row["versions"] = cleanrl_versions(cleanrl)
                store(MINUTES, [row], KEY)
                print(f"{env_id} {library} {seed}: {returns[-1]:.4g} after {minutes[-1]:.2f} min", flush=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
