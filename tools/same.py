"""Compare what the scripts train here with what they trained at another commit.

    python tools/same.py c632ad5                 # every run below
    python tools/same.py c632ad5 --only ppo.py   # runs whose command contains this text

Each short, seeded run is made twice on the CPU: by the script as it stands in this folder, and by the script
of the commit, both in the environment of the Python that runs this. For each it prints whether the weights
and normalisers of the last checkpoint and the greedy evaluation are equal to the bit, or how much they
differ. The exit status is 1 if anything differs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
RUNS = """
ppo.py --total-timesteps 8000
ppo.py --total-timesteps 6000 --num-envs 4 --num-steps 128 --no-norm-obs --no-norm-rewards
ppo.py --total-timesteps 6000 --env-id FrozenLake-v1
ppo.py --total-timesteps 6000 --env-id Acrobot-v1
ppo.py --total-timesteps 6000 --env-id LunarLander-v3 --norm-obs --target-kl 0.02
ppo.py --total-timesteps 4000 --env-id Blackjack-v1 --seed 2
ppo.py --total-timesteps 6000 --env-id Acrobot-v1 --surrogate kl-penalty --adapt kl-coef
ppo.py --total-timesteps 6000 --env-id Acrobot-v1 --adapt clip-coef --clip-vloss --target-entropy 0.5
ppo.py --total-timesteps 6000 --env-id Acrobot-v1 --adapt learning-rate --target-kl 0.02 --anneal-ent-coef
ppo.py --total-timesteps 4000 --async-envs --num-envs 4
ppo.py --total-timesteps 4000 --env-id Acrobot-v1 then --total-timesteps 8000 --gamma 0.98
ppo_continuous.py --total-timesteps 8000
ppo_continuous.py --total-timesteps 6000 --activation tanh --norm-adv --clip-vloss
ppo_continuous.py --total-timesteps 6000 --env-id Hopper-v5
ppo_continuous.py --total-timesteps 6000 --env-id Pendulum-v1
ppo_continuous.py --total-timesteps 6000 --env-id Swimmer-v5 --gamma 0.9999 --gae-lambda 0.98
ppo_continuous.py --total-timesteps 6000 --env-id InvertedDoublePendulum-v5 --min-log-std -2
ppo_continuous.py --total-timesteps 6000 --env-id Pendulum-v1 --no-norm-obs --no-norm-rewards --norm-adv
ppo_continuous.py --total-timesteps 6000 --env-id Pendulum-v1 --no-recompute-advantages
ppo_continuous.py --total-timesteps 6000 --env-id Pendulum-v1 --adapt none --ent-coef 0.01
ppo_continuous.py --total-timesteps 6000 --env-id Pendulum-v1 --surrogate kl-penalty --adapt kl-coef
ppo_continuous.py --total-timesteps 6000 --env-id Pendulum-v1 --async-envs
ppo_continuous.py --total-timesteps 6000 --compile
ppo_continuous.py --total-timesteps 5000 --env-id Hopper-v5 then --total-timesteps 8000
ppo_atari.py --total-timesteps 2048 --num-threads 1 --eval-episodes 2
ppo_atari.py --total-timesteps 2048 --num-threads 1 --eval-episodes 2 --bfloat16
ppo_atari.py --total-timesteps 2048 --num-threads 1 --eval-episodes 2 --env-id PongNoFrameskip-v4 --clip-vloss
ppo_atari.py --total-timesteps 1024 --num-threads 1 then --total-timesteps 2048 --num-threads 1
ppo_lstm.py --total-timesteps 8000
ppo_lstm.py --total-timesteps 6000 --env-id Acrobot-v1 --cell gru --no-norm-obs --no-norm-rewards
ppo_lstm.py --total-timesteps 5000 then --total-timesteps 10000
ppo_gpu.py --device cpu --total-timesteps 50000
ppo_gpu.py --device cpu --total-timesteps 50000 --num-envs 64 --num-steps 32
ppo_gpu.py --device cpu --total-timesteps 50000 then --total-timesteps 100000
ppo_rlhf.py --total-episodes 1024
ppo_rlhf.py --total-episodes 512 then --total-episodes 1024
grpo.py --total-episodes 1024
grpo.py --total-episodes 1024 then --total-episodes 2048
"""


def run(folder: Path, command: str, scripts: Path) -> None:
    """Make one run of the table in an empty folder; what follows "then" resumes it."""
    for part in command.split(" then "):
        words = shlex.split(part)
        if words[0].endswith(".py"):
            script, *words = words
        else:
            words += ["--resume", str(checkpoint(folder))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            [sys.executable, scripts / script, *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
        )
        if ran.returncode:
            raise RuntimeError(f"{command}\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")


def checkpoint(folder: Path) -> Path:
    """The only checkpoint in a folder."""
    (path,) = folder.glob("runs/*/checkpoint.pt")
    return path


def tensors(content: object, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors of real numbers in a checkpoint but the optimizer's, by name."""
    if isinstance(content, torch.Tensor):
        return {name: content} if content.is_floating_point() else {}
    found = {}
    if isinstance(content, dict):
        for key, value in content.items():
            if not key.startswith("optimizer"):
                found |= tensors(value, f"{name}.{key}".strip("."))
    return found


def trained(folder: Path) -> dict[str, torch.Tensor]:
    """What a run has learnt, by name: the tensors of its checkpoint, and its greedy evaluation."""
    path = checkpoint(folder)
    results = tensors(torch.load(path, map_location="cpu", weights_only=True))
    events = EventAccumulator(str(path.parent)).Reload()
    if "eval/greedy_return" in events.Tags()["scalars"]:
        results["evaluation"] = torch.tensor([event.value for event in events.Scalars("eval/greedy_return")])
    return results


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> str:
    """What differs between two runs, or an empty text."""
    found = [f"{name} only in one" for name in sorted(ours.keys() ^ theirs.keys())]
    gaps = {
        name: (ours[name].double() - theirs[name].double()).abs().max().item()
        for name in ours.keys() & theirs.keys()
        if not np.array_equal(ours[name], theirs[name], equal_nan=True)
    }
    if gaps:
        worst = max(gaps, key=gaps.__getitem__)
        found.append(f"{len(gaps)} of {len(ours)} tensors differ, {worst} most, by {gaps[worst]:.2g}")
    return "; ".join(found)


def main(commit: str, /, only: str = "") -> None:
    """Compare the scripts of this folder with those of a commit."""
    commands = [line for line in RUNS.strip().splitlines() if only in line]
    if not commands:
        sys.exit(f"no run has {only!r} in its command")
    differing = 0
    with tempfile.TemporaryDirectory() as temporary:
        scripts = Path(temporary, "scripts")
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=True).stdout
        scripts.mkdir()
        subprocess.run(["tar", "-x", "-C", scripts], input=archive, check=True)
        for number, command in enumerate(commands):
            results = []
            for side, source in (("ours", ROOT), ("theirs", scripts)):
                folder = Path(temporary, f"{number}-{side}")
                folder.mkdir()
                run(folder, command, source)
                results.append(trained(folder))
            differs = difference(*results)
            differing += bool(differs)
            print(f"{differs or 'equal':<8} {command}", flush=True)
    print(f"{len(commands) - differing} of {len(commands)} equal to the bit")
    sys.exit(1 if differing else 0)


if __name__ == "__main__":
    tyro.cli(main)
