"""Steps per second of our scripts and of Stable-Baselines3's PPO, with the same settings, in alternation.

    python benchmarks/throughput.py --env-id CartPole-v1 --num-envs 4
    python benchmarks/throughput.py --env-id CartPole-v1 --script-dir DIR    # and another copy of ppo.py
    python benchmarks/throughput.py --store     # all, for the tables: about 35 minutes on an idle machine

Each run is a process of its own, with one thread (Atari: all cores). The speed is that of the training
loop after the first iteration, so the start, compiling and the evaluation do not count. Ours log to
TensorBoard, by whose times it is measured; Stable-Baselines3 logs nothing. On a busy machine, speeds say
little, and the ratio of neighbouring runs says more.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from experiments import RESULTS
from run import ROOT, git, provenance, train_sb3, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

VARIANTS = {
    "ours": "",
    "compiled": "--compile",
    "workers": "--compile --async-envs",
    "bfloat16": "--bfloat16",
    "both": "--bfloat16 --compile",
}


@dataclass(frozen=True)
class Case:
    """What is the same for all that are compared."""

    script: str
    sizes: tuple[int, ...]  # numbers of environments
    num_steps: int
    num_minibatches: int
    update_epochs: int
    learning_rate: float
    flags: str  # of our script
    variants: tuple[str, ...]
    timesteps: int = 30_000  # at least


SIZES = (1, 4, 16, 64, 256, 1024)
CARTPOLE, MUJOCO = "--no-norm-obs --no-norm-rewards", "--norm-obs --norm-rewards --no-recompute-advantages"
SMALL, WORKERS, ATARI = ("ours", "compiled"), ("ours", "compiled", "workers"), ("ours", "bfloat16", "both")
CASES = {
    "CartPole-v1": Case("ppo", SIZES, 128, 4, 4, 2.5e-4, CARTPOLE, SMALL),
    "HalfCheetah-v5": Case("ppo_continuous", (8,), 256, 32, 10, 3e-4, MUJOCO, WORKERS),
    "Humanoid-v5": Case("ppo_continuous", (8,), 256, 32, 10, 3e-4, MUJOCO, WORKERS),
    "BreakoutNoFrameskip-v4": Case("ppo_atari", (8,), 128, 4, 4, 2.5e-4, "", ATARI, 6_000),
}


def run_ours(case: Case, env_id: str, num_envs: int, timesteps: int, flags: str) -> dict[str, Any]:
    """Train with our script in the current folder: speed, shares of the time, and seconds of compiling."""
    script = importlib.import_module(case.script)
    calls: dict[str, list[tuple[float, float]]] = {}  # by name, when each call ended and how long it took

    def timed(name: str, function: Callable) -> Callable:
        calls[name] = []

        def call(*args: Any) -> Any:
            start = time.time()
            result = function(*args)
            calls[name].append((time.time(), time.time() - start))
            return result

        return call

    def collect_rollout(envs: Any, *args: Any) -> None:
        if "environment" not in calls:
            envs.step = timed("environment", envs.step)
        collect(envs, *args)

    collect, script.collect_rollout = script.collect_rollout, timed("collect", collect_rollout)
    for name in {"make_batch", "update"} & set(dir(script)):
        setattr(script, name, timed(name, getattr(script, name)))
    command = (
        f"--env-id {env_id} --num-envs {num_envs} --total-timesteps {timesteps} --num-steps {case.num_steps} "
        f"--num-minibatches {case.num_minibatches} --update-epochs {case.update_epochs} --norm-adv "
        f"--learning-rate {case.learning_rate} --gae-lambda 0.95 --eval-episodes 1 {case.flags} {flags}"
    )
    if hasattr(script.Args, "eval_max_steps"):
        command += " --eval-max-steps 1"
    script.train(tyro.cli(script.Args, args=command.split()))
    log = EventAccumulator(str(next(Path("runs").iterdir())), {"scalars": 0}).Reload()
    events = log.Scalars("losses/kl")  # one per iteration
    first, last = events[0], events[-1]
    total = last.wall_time - first.wall_time
    spent = {name: sum(x for end, x in ended if end > first.wall_time) for name, ended in calls.items()}
    seconds = {
        "environment": spent["environment"],
        "acting": spent["collect"] - spent["environment"],
        "advantages": spent.get("make_batch", 0.0),
        "update": spent["update"],
    }
    seconds["other"] = total - sum(seconds.values())
    shares = {part: x / total for part, x in seconds.items()}
    result = {"sps": (last.step - first.step) / total, "shares": shares}
    if "--compile" in flags:
        result["compiling"] = first.wall_time - log.FirstEventTimestamp() - total / (len(events) - 1)
    return result


def run_sb3(case: Case, env_id: str, num_envs: int, timesteps: int) -> dict[str, Any]:
    """Train with Stable-Baselines3. Its value loss lacks our ½, hence a coefficient of 0.25, not 0.5."""
    import torch

    settings = {
        "n_envs": num_envs,
        "normalize": "--norm-obs" in case.flags,
        "n_steps": case.num_steps,
        "batch_size": case.num_steps * num_envs // case.num_minibatches,
        "n_epochs": case.update_epochs,
        "learning_rate": f"linear {case.learning_rate}",
        "ent_coef": 0.01,
        "vf_coef": 0.25,
    }
    if case.script != "ppo_atari":
        torch.set_num_threads(1)
        activation = torch.nn.ELU if case.script == "ppo_continuous" else torch.nn.Tanh
        settings["policy_kwargs"] = {"activation_fn": activation}
    _, logged = train_sb3(env_id, timesteps, 1, settings)
    steps, _, seconds = logged[-1] - logged[0]
    return {"sps": steps / seconds}


def measure(who: str, scripts: Path, env_id: str, num_envs: int, timesteps: int) -> dict[str, Any]:
    """One run in a process of its own."""
    flags = ["--env-id", env_id, "--num-envs", str(num_envs), "--timesteps", str(timesteps)]
    command = [sys.executable, __file__, "--one", who, "--script-dir", str(scripts), *flags]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: Any) -> list[float]:
    """Lowest, median and highest."""
    ordered = sorted(values)
    return [round(x, 3) for x in (ordered[0], statistics.median(ordered), ordered[-1])]


def summarize(runs: list[dict[str, Any]], peers: list[dict[str, Any]]) -> dict[str, Any]:
    """What several rounds measured of one contestant, beside Stable-Baselines3 in the same rounds."""
    row: dict[str, Any] = {"sps": spread(run["sps"] for run in runs)}
    row["mib"] = round(statistics.median(run["mib"] for run in runs))
    if "shares" in runs[0]:
        row["ratio"] = spread(run["sps"] / peer["sps"] for run, peer in zip(runs, peers, strict=True))
        row["shares"] = {part: spread(run["shares"][part] for run in runs)[1] for part in runs[0]["shares"]}
    if "compiling" in runs[0]:
        row["compiling"] = spread(run["compiling"] for run in runs)
    return row


def show(name: str, row: dict[str, Any]) -> None:
    """Print a contestant's numbers."""
    low, median, high = row["sps"]
    print(f"  {name:<50}{median:>8,.0f} ({low:,.0f} to {high:,.0f}), {row['mib']:,} MiB", flush=True)
    if "shares" in row:
        shares = ", ".join(f"{part} {share:.0%}" for part, share in row["shares"].items())
        ratio = "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["ratio"])
        compiling = f"; compiling {row['compiling'][1]:.0f} s" if "compiling" in row else ""
        print(f"    ratio {ratio}; {shares}{compiling}", flush=True)


def compare(env_id: str, num_envs: int, steps: int, rounds: int, folders: list[Path]) -> dict[str, Any]:
    """Measure all contestants in alternation, and print what came out. Returns the results, to be stored."""
    print(f"{env_id}, {num_envs:,} environments, {steps:,} steps, {rounds} rounds", flush=True)
    case, peer = CASES[env_id], ("sb3", ROOT)
    contestants = [*((variant, folder) for variant in case.variants for folder in folders), peer]
    runs: dict[Any, list[dict[str, Any]]] = {contestant: [] for contestant in contestants}
    for _ in range(rounds):
        for who, folder in contestants:
            runs[who, folder].append(measure(who, folder, env_id, num_envs, steps))
    about = {"env_id": env_id, "num_envs": num_envs, "timesteps": steps, "rounds": rounds}
    stored: dict[str, Any] = about | provenance()
    for who, folder in contestants:
        row = summarize(runs[who, folder], runs[peer])
        name = f"{folder.name}/{case.script}.py {VARIANTS.get(who)}"
        show("Stable-Baselines3" if who == "sb3" else name, row)
        stored[who] = row
    return stored


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--env-id", choices=CASES, help="only this one")
    parser.add_argument("--num-envs", type=int, help="only with so many environments")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in alternation")
    parser.add_argument("--timesteps", type=int, help="transitions per run; default: some seconds' worth")
    parser.add_argument("--script-dir", type=Path, help="also run the scripts in this folder")
    parser.add_argument("--store", action="store_true", help="store the results for the tables")
    parser.add_argument("--one", choices=(*VARIANTS, "sb3"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.path.insert(0, str(options.script_dir))
        one = CASES[options.env_id], options.env_id, options.num_envs, options.timesteps
        result = run_sb3(*one) if options.one == "sb3" else run_ours(*one, VARIANTS[options.one])
        result["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"\n{json.dumps(result)}")
        return
    folders = [ROOT]
    if options.script_dir:
        folders.append(options.script_dir.resolve())
    uncommitted = git("status", "--porcelain", "--", "ppo*.py", "benchmarks/*.py")
    if options.store and (options.script_dir or uncommitted):
        parser.error("what is stored names its commit: commit first, and leave out --script-dir")
    print("steps per second: median and range; memory; ratio to Stable-Baselines3; shares of the time")
    for env_id in [options.env_id] if options.env_id else CASES:
        case = CASES[env_id]
        for num_envs in [options.num_envs] if options.num_envs else case.sizes:
            steps = options.timesteps or max(case.timesteps, 6 * case.num_steps * num_envs)
            row = compare(env_id, num_envs, steps, options.rounds, folders)
            if options.store:
                path = RESULTS / "throughput.json"
                rows = json.loads(path.read_text()) if path.exists() else []
                rows = [old for old in rows if (old["env_id"], old["num_envs"]) != (env_id, num_envs)]
                write(path, sorted([*rows, row], key=lambda row: (row["env_id"], row["num_envs"])))


if __name__ == "__main__":
    main()
