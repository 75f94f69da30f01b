"""What `--eval-every` costs, and what `best.pt` is worth: the rows of `results/data/best.csv`.

    python benchmarks/best.py                      # does the runs that it lacks, one after another
    python benchmarks/best.py InvertedPendulum-v5  # those of an environment

Each run is a process with one thread, a million steps of ppo_continuous.py. HalfCheetah is trained with
evaluations and without, to compare the processor's seconds.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile

import numpy as np
import pandas as pd
import tyro
from experiments import DATA, ROOT
from run import in_words, provenance, refuse_uncommitted, store

BEST = DATA / "best.csv"
KEY = ["env_id", "seed", "eval_every"]
STEPS, EVERY = 1_000_000, 50_000
RUNS = [("HalfCheetah-v5", 1, 0), ("HalfCheetah-v5", 1, EVERY)]
RUNS += [(env_id, seed, EVERY) for env_id in ("InvertedPendulum-v5", "Walker2d-v5") for seed in (1, 2, 3)]


def train(env_id: str, seed: int, eval_every: int) -> None:
    """Train in this process, and print the results as a line of JSON."""
    sys.path.insert(0, str(ROOT))
    import ppo_continuous as ppo

    args = ppo.Args(env_id=env_id, seed=seed, total_timesteps=STEPS, eval_every=eval_every)
    results = ppo.train(args)
    usage = resource.getrusage(resource.RUSAGE_SELF)
    row = {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "training": results["training_return"],
        "final": np.mean(results["greedy_returns"]),
        "final_std": np.std(results["greedy_returns"]),
    }
    if eval_every > 0:
        row["best_step"] = results["best_step"]
        row["best_chosen"] = results["best_return"]
        row["best_replayed"] = np.mean(results["best_replayed"])
        row["best_replayed_std"] = np.std(results["best_replayed"])
    print(json.dumps({name: round(value, 4) for name, value in row.items()}))


def main(env_ids: tyro.conf.Positional[tuple[str, ...]] = (), /) -> None:
    """Do the runs that best.csv lacks, of these environments or of all."""
    refuse_uncommitted()
    done = pd.read_csv(BEST)[KEY].to_numpy().tolist() if BEST.exists() else []
    for run in RUNS:
        if [*run] in done or (env_ids and run[0] not in env_ids):
            continue
        words = [sys.executable, __file__, "--run", *map(str, run)]
        with tempfile.TemporaryDirectory() as folder:
            out = subprocess.run(words, check=True, cwd=folder, stdout=subprocess.PIPE, text=True).stdout
        row = dict(zip(KEY, run, strict=True)) | json.loads(out.splitlines()[-1])
        print(row, flush=True)
        store(BEST, [row | in_words(provenance())], KEY)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        train(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        tyro.cli(main)
