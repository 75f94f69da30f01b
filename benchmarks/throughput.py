"""Steps a second of our scripts beside Stable-Baselines3's PPO, at the same settings, in alternation.

    python benchmarks/throughput.py --env-id CartPole-v1 --num-envs 4
    python benchmarks/throughput.py --store             # everything, some 35 minutes on an idle machine

CartPole runs with ppo.py at CleanRL's settings (128 steps, 4 minibatches, 4 epochs, 64-64 tanh) and 1 to
1,024 environments; HalfCheetah and Humanoid with ppo_continuous.py (8 environments, 256 steps, minibatches of
64, 10 epochs, 64-64 ELU), with observations normalised and rewards scaled by both. Breakout runs with
ppo_atari.py (8 environments, 128 steps, minibatches of 256, 4 epochs), and beside it the two things that
limit it: its games without a network, and its network without games. Each run is a process of its own, with
one thread (Breakout: all cores), ours also with --compile, --bfloat16, and with --async-envs, which are
processes more, where that may pay. What counts is the training loop as a user runs it, from the second
iteration on: ours with TensorBoard and status lines, Stable-Baselines3's `learn` without a logger. Start-up,
compiling (which is stated) and evaluation count for none. An absolute figure says little on a shared machine;
the ratio of neighbouring runs says more. With --store, the figures replace those that `report.py` makes the
tables of.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import operator
import os
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

from experiments import RESULTS
from run import git, provenance, write

ROOT = Path(__file__).resolve().parent.parent
FLAGS = {
    "ours": "", "compiled": " --compile", "workers": " --compile --async-envs", "bfloat16": " --bfloat16",
    "both": " --bfloat16 --compile",
}  # fmt: skip
LIMITS = {
    "games": "the games alone", "network": "the network alone", "rough": "the same in bfloat16",
    "graphs": "the same in bfloat16, compiled",
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """What is the same for all who are compared."""

    script: str
    sizes: tuple[int, ...]  # numbers of environments
    num_steps: int
    minibatches: int
    epochs: int
    learning_rate: float
    normalize: bool
    who: tuple[str, ...] = ("ours", "compiled", "workers", "sb3")
    timesteps: int = 30_000  # at least


CASES = {
    "CartPole-v1": Case(
        "ppo", (1, 4, 16, 64, 256, 1024), 128, 4, 4, 2.5e-4, False, ("ours", "compiled", "sb3")
    ),
    "HalfCheetah-v5": Case("ppo_continuous", (8,), 256, 32, 10, 3e-4, True),
    "Humanoid-v5": Case("ppo_continuous", (8,), 256, 32, 10, 3e-4, True),
    "BreakoutNoFrameskip-v4": Case(
        "ppo_atari", (8,), 128, 4, 4, 2.5e-4, False, ("ours", "bfloat16", "both", *LIMITS, "sb3"), 6_000
    ),
}


def settings(script: Any, case: Case, env_id: str, num_envs: int, timesteps: int, who: str) -> Any:
    """The script's settings."""
    own: dict[str, Any] = {"norm_obs": case.normalize, "norm_rewards": case.normalize}
    own["async_envs"] = who == "workers"
    if case.script == "ppo_atari":
        own = {"bfloat16": who in ("bfloat16", "both", "rough", "graphs")}
    return script.Args(
        env_id=env_id, num_envs=num_envs, total_timesteps=timesteps, num_steps=case.num_steps,
        num_minibatches=case.minibatches, update_epochs=case.epochs, learning_rate=case.learning_rate,
        gae_lambda=0.95, norm_adv=True, recompute_advantages=False, **own,
        compile=who in ("compiled", "workers", "both", "graphs"),
    )  # fmt: skip


def run_limit(case: Case, env_id: str, num_envs: int, timesteps: int, who: str) -> dict[str, Any]:
    """Steps a second of ppo_atari.py's games without the network, or of the network without the games."""
    import torch

    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(case.script)
    args = settings(script, case, env_id, num_envs, timesteps, who)
    torch.set_num_threads(script.count_threads(args))
    script.keep_memory()
    envs = script.make_envs(args, num_envs)
    envs.reset(seed=1)
    agent = script.Agent(args, envs.single_action_space).to(script.pick_device(args))
    optimizer = torch.optim.Adam([script.flatten_parameters(agent)], eps=1e-5, fused=True)
    rollout, marks = script.Rollout(args, agent, num_envs), []
    state = script.State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)
    actions = torch.randint(agent.num_actions, (case.num_steps, num_envs))
    rollout.obs.random_(256)
    rollout.actions.copy_(actions)
    rollout.valid[:] = True
    act = script.compiled(agent.act, rollout.obs.device.type) if args.compile else agent.act
    for _ in range(1 + max(1, timesteps // (case.num_steps * num_envs))):
        if who == "games":
            for action in actions.numpy():
                envs.step(action)
        else:
            with torch.inference_mode():
                for obs, noise in zip(rollout.obs, agent.noise(case.num_steps, num_envs), strict=False):
                    act(obs, noise)[0].cpu()
            script.update(agent, optimizer, rollout, state, args)
        marks.append(time.perf_counter())
    return {"sps": (len(marks) - 1) * case.num_steps * num_envs / (marks[-1] - marks[0])}


def run_ours(case: Case, env_id: str, num_envs: int, timesteps: int, who: str) -> dict[str, Any]:
    """Train in a temporary folder: steps a second, shares of time by part, and seconds of compiling."""
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(case.script)
    seconds = dict.fromkeys(("environment", "collect", "advantages", "update"), 0.0)
    marks: list[tuple[int, float]] = []  # steps and time at the end of each iteration
    first: dict[str, float] = {}

    def timed(part: str, function: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += time.perf_counter() - start

        return call

    def make_envs(*args: Any, **kwargs: Any) -> Any:
        made = original_make_envs(*args, **kwargs)
        envs = made[0] if isinstance(made, tuple) else made
        envs.step = timed("environment", envs.step)
        return made

    def report(writer: Any, figures: dict, rollout: Any, state: Any, args: Any) -> list[str]:
        messages = original_report(writer, figures, rollout, state, args)
        if not marks:
            first.update(seconds)
            seconds.update(dict.fromkeys(seconds, 0.0))
        marks.append((state.global_step, time.perf_counter()))
        return messages

    original_make_envs, script.make_envs = script.make_envs, make_envs
    original_report, script.report = script.report, report
    nothing = {"returns": script.np.zeros(1), "lengths": script.np.zeros(1)}
    script.evaluate = lambda *_: nothing
    script.compute_gae = timed("advantages", script.compute_gae)
    script.collect_rollout = timed("collect", script.collect_rollout)
    script.update = timed("update", script.update)
    args = settings(script, case, env_id, num_envs, timesteps, who)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(folder)
        script.train(args)
        os.chdir(ROOT)
    (steps, start), (all_steps, end) = marks[0], marks[-1]
    total = end - start
    parts = {
        "environment": seconds["environment"],
        "acting": seconds["collect"] - seconds["environment"],
        "advantages": seconds["advantages"],
        "update": seconds["update"] - seconds["advantages"],
    }
    shares = {part: value / total for part, value in parts.items()}
    compiling = first["update"] - seconds["update"] / (len(marks) - 1)
    return {
        "sps": (all_steps - steps) / total,
        "shares": shares | {"other": 1 - sum(shares.values())},
        "compiling": compiling,
    }


def run_sb3(case: Case, env_id: str, num_envs: int, timesteps: int) -> dict[str, Any]:
    """Train with Stable-Baselines3 at the same settings; its value loss lacks our ½, so vf_coef is 0.25."""
    import ale_py
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize

    marks: list[tuple[int, float]] = []

    class Mark(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            marks.append((self.num_timesteps, time.perf_counter()))

    pixels = case.script == "ppo_atari"
    if pixels:
        gymnasium.register_envs(ale_py)
    else:
        torch.set_num_threads(1)
    envs = VecFrameStack(make_atari_env(env_id, num_envs), 4) if pixels else make_vec_env(env_id, num_envs)
    batch_size = case.num_steps * num_envs // case.minibatches
    activation = torch.nn.ELU if case.script == "ppo_continuous" else torch.nn.Tanh
    model = PPO(
        "CnnPolicy" if pixels else "MlpPolicy", VecNormalize(envs) if case.normalize else envs,
        n_steps=case.num_steps, n_epochs=case.epochs, batch_size=batch_size, ent_coef=0.01, vf_coef=0.25,
        learning_rate=lambda left: case.learning_rate * left, device="auto" if pixels else "cpu",
        policy_kwargs={} if pixels else {"activation_fn": activation},
    )  # fmt: skip
    model.learn(timesteps, callback=Mark())
    steps, start = marks[1]  # the start of the second iteration
    return {"sps": (model.num_timesteps - steps) / (time.perf_counter() - start)}


def measure(who: str, env_id: str, num_envs: int, timesteps: int) -> dict[str, Any]:
    """One run in a fresh process."""
    flags = ["--env-id", env_id, "--num-envs", str(num_envs), "--timesteps", str(timesteps)]
    command = [sys.executable, __file__, "--one", who, *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def spread(values: list[float]) -> list[float]:
    """Lowest, median and highest."""
    return [round(x, 3) for x in (min(values), statistics.median(values), max(values))]


def compare(env_id: str, num_envs: int, timesteps: int, rounds: int) -> dict[str, Any]:
    """All in alternation; of speeds, and ratios to Stable-Baselines3, the lowest, median and highest."""
    runs: dict[str, list[dict[str, Any]]] = {who: [] for who in CASES[env_id].who}
    for _ in range(rounds):
        for who in runs:
            runs[who].append(measure(who, env_id, num_envs, timesteps))
    about = {"env_id": env_id, "num_envs": num_envs, "timesteps": timesteps, "rounds": rounds}
    row: dict[str, Any] = about | provenance()
    for who in runs:
        row[who] = {"sps": spread([run["sps"] for run in runs[who]])}
        row[who]["mib"] = round(statistics.median(run["mib"] for run in runs[who]))
        if "shares" in runs[who][0]:
            pairs = zip(runs[who], runs["sb3"], strict=True)
            row[who]["ratio"] = spread([ours["sps"] / theirs["sps"] for ours, theirs in pairs])
            parts = runs[who][0]["shares"]
            row[who]["shares"] = {
                part: spread([run["shares"][part] for run in runs[who]])[1] for part in parts
            }
        if who in ("compiled", "workers", "both"):
            row[who]["compiling"] = spread([run["compiling"] for run in runs[who]])
    return row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--env-id", choices=CASES, help="only this one")
    parser.add_argument("--num-envs", type=int, help="only with so many environments")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in alternation")
    parser.add_argument("--timesteps", type=int, help="transitions of a run; default: some seconds' worth")
    parser.add_argument("--store", action="store_true", help="keep the figures for the tables")
    parser.add_argument("--one", choices=(*FLAGS, *LIMITS, "sb3"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        one = CASES[options.env_id], options.env_id, options.num_envs, options.timesteps
        function = run_limit if options.one in LIMITS else run_ours
        result = run_sb3(*one) if options.one == "sb3" else function(*one, options.one)
        result["mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps(result))
        return
    code = {"benchmarks/throughput.py", *(f"{case.script}.py" for case in CASES.values())}
    if options.store and (changed := git("status", "--porcelain", "--", *sorted(code))):
        parser.error(f"stored figures name their commit: commit first what has changed: {changed}")
    print(f"steps a second, median and range of {options.rounds} rounds; ratio to Stable-Baselines3; memory")
    for env_id, case in CASES.items():
        for num_envs in (options.num_envs,) if options.num_envs else case.sizes:
            if env_id != (options.env_id or env_id):
                continue
            steps = options.timesteps or max(case.timesteps, 6 * case.num_steps * num_envs)
            row = compare(env_id, num_envs, steps, options.rounds)
            print(f"{env_id}, {num_envs:,} environments, {steps:,} steps")
            for who in case.who:
                name = (
                    f"{case.script}.py{FLAGS[who]}" if who in FLAGS else LIMITS.get(who, "Stable-Baselines3")
                )
                low, median, high = row[who]["sps"]
                print(f"  {name:<40}{median:>8,.0f} ({low:,.0f} to {high:,.0f})", end="")
                if "ratio" in row[who]:
                    print("  {1:.2f} ({0:.2f} to {2:.2f})".format(*row[who]["ratio"]), end="")
                print(f"  {row[who]['mib']:,} MiB")
                if "shares" in row[who]:
                    shares = row[who]["shares"].items()
                    print("    " + ", ".join(f"{part} {share:.0%}" for part, share in shares), end="")
                    compiling = row[who].get("compiling")
                    print(f"; compiling {compiling[1]:.0f} s" if compiling else "", flush=True)
            if options.store:
                path, key = RESULTS / "throughput.json", operator.itemgetter("env_id", "num_envs")
                kept = json.loads(path.read_text()) if path.exists() else []
                write(path, sorted([*(old for old in kept if key(old) != key(row)), row], key=key))


if __name__ == "__main__":
    main()
