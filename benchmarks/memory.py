"""Tasks that need a memory: ppo_lstm.py, ppo.py, and RecurrentPPO of sb3-contrib.

    python ppo_lstm.py --env-id benchmarks.memory:PositionOnlyCartPole-v1 --total-timesteps 1e5
    pip install --no-deps popgym sb3-contrib
    python benchmarks/memory.py --run    # what memory.csv lacks
    python benchmarks/memory.py          # the table

RecurrentPPO has the settings of RL Baselines3 Zoo where it has some for the task (for CartPole without
velocities, and for Acrobot with them), else its defaults with 16 environments. With "ours", it has those of
ppo_lstm.py, and one LSTM for actor and critic. A return is the mean of the last 100 episodes of training.
Each run is a process with one thread. Seconds are of its CPU time, from the start to the last update's end.
"""

import importlib
import itertools
import math
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "results/data/memory.csv"
TASKS = {  # steps, and the return that counts as solved
    "Cue-v0": (100_000, 0.95),
    "PositionOnlyCartPole-v1": (100_000, 475),
    "PositionOnlyAcrobot-v1": (150_000, -100),
    "popgym:popgym-RepeatPreviousEasy-v0": (300_000, 0.9),
}
NETWORK = {"shared_lstm": True, "enable_critic_lstm": False, "lstm_hidden_size": 128, "net_arch": []}
OURS = {
    "n_envs": 16, "n_steps": 128, "batch_size": 512, "n_epochs": 10, "gae_lambda": 0.95, "ent_coef": 0.01,
    "learning_rate": 1e-3, "linear": ("learning_rate",), "normalize": True, "policy_kwargs": NETWORK,
}  # fmt: skip
ZOO = {
    "PositionOnlyCartPole-v1": {
        "n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
        "ent_coef": 0.0, "learning_rate": 1e-3, "clip_range": 0.2, "linear": ("learning_rate", "clip_range"),
    },
    "PositionOnlyAcrobot-v1": {
        "n_envs": 16, "n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4, "ent_coef": 0.0, "normalize": True,
    },
}  # fmt: skip
RUNS = [(task, library) for task in TASKS for library in ("ppo_lstm", "RecurrentPPO")]
RUNS += [("Cue-v0", "ppo"), ("PositionOnlyCartPole-v1", "RecurrentPPO, ours")]
Rows = list[tuple[float, float, float]]  # steps, return and CPU time after each iteration


class Cue(gym.Env):
    """One of four cues is shown at the start. Eight steps later, the action that names it returns 1."""

    observation_space, action_space = spaces.Box(0, 1, (5,), np.float32), spaces.Discrete(4)

    def observe(self):
        shown = {0: self.cue, 8: 4}.get(self.time)  # the fifth number asks for the answer
        return np.float32([shown == i for i in range(5)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.time = self.np_random.integers(4), 0
        return self.observe(), {}

    def step(self, action):
        over = self.time == 8
        self.time += 1
        return self.observe(), float(over and action == self.cue), over, False, {}


def positions(env_id, numbers, **kwargs):
    """An environment of whose observations only some numbers are seen."""
    env = gym.make(env_id, **kwargs)
    box = env.observation_space
    seen = spaces.Box(box.low[numbers], box.high[numbers])
    return gym.wrappers.TransformObservation(env, lambda obs: obs[numbers], seen)


gym.register("Cue-v0", Cue)
gym.register("PositionOnlyCartPole-v1", lambda **kwargs: positions("CartPole-v1", [0, 2], **kwargs))
gym.register("PositionOnlyAcrobot-v1", lambda **kwargs: positions("Acrobot-v1", [0, 1, 2, 3], **kwargs))


def run_ours(script, task, steps, seed) -> Rows:
    """Train with a script of this repository."""
    rows = []

    class Run(script.Run):
        def log(self, metrics, episodes):
            super().log(metrics, episodes)
            rows.append((self.state.global_step, self.average, time.process_time()))

    script.Run = Run
    script.train(
        script.Args(env_id=task, total_timesteps=steps, seed=seed, exp_name=f"memory-{script.__name__}")
    )
    return rows


def run_sb3(settings, task, steps, seed) -> Rows:
    """Train with RecurrentPPO."""
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import VecNormalize

    rows, settings = [], dict(settings)
    envs = make_vec_env(task, settings.pop("n_envs", 16), seed)
    if settings.pop("normalize", False):
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    for name in settings.pop("linear", ()):
        settings[name] = lambda remaining, first=settings[name]: first * remaining
    model = RecurrentPPO("MlpLstmPolicy", envs, seed=seed, device="cpu", **settings)

    def note():
        returns = [episode["r"] for episode in model.ep_info_buffer or ()]  # of the last 100 episodes
        rows.append((model.num_timesteps, np.mean(returns or np.nan), time.process_time()))

    class Log(BaseCallback):
        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:  # that is, after an update
            note()

    model.learn(steps, callback=Log())
    note()
    return rows[1:]


def run_one(task, library, seed) -> None:
    """Train, and store a row of the results."""
    import torch
    from run import git, store

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    steps, goal = TASKS[task]
    start = time.process_time()
    if library.startswith("ppo"):
        rows = run_ours(importlib.import_module(library), task, steps, seed)
    else:
        rows = run_sb3(OURS if "ours" in library else ZOO.get(task, {}), task, steps, seed)
    steps, last, end = rows[-1]
    reached = [now - start for _, value, now in rows if value >= goal]
    row = {"task": task, "library": library, "seed": seed, "steps": steps, "return": round(float(last), 3)}
    row |= {"seconds": round(end - start, 1), "seconds_to_goal": round(reached[0], 1) if reached else None}
    names = "torch", "gymnasium", "stable-baselines3", "sb3-contrib", "popgym"
    row |= {
        "commit": git("rev-parse", "HEAD"),
        "versions": " ".join(f"{name}={version(name)}" for name in names),
    }
    store(RESULTS, [row], ["task", "library", "seed"])


def main() -> None:
    """The command line."""
    if "--one" in sys.argv:
        run_one(*sys.argv[2:4], int(sys.argv[4]))
        return
    import pandas as pd

    table = pd.read_csv(RESULTS) if RESULTS.exists() else pd.DataFrame(columns=["task", "library", "seed"])
    done = set(table[["task", "library", "seed"]].itertuples(index=False, name=None))
    for seed, (task, library) in itertools.product((1, 2, 3), RUNS if "--run" in sys.argv else []):
        if (task, library, seed) not in done:
            subprocess.run([sys.executable, __file__, "--one", task, library, str(seed)], check=True)
    print("| task | library | runs | return | steps per second | seconds to the goal |")
    print("| --- " * 6 + "|")
    for (task, library), rows in pd.read_csv(RESULTS).groupby(["task", "library"], sort=False):
        spread = f" ± {rows['return'].std():.2g}" if len(rows) > 1 else ""
        speed = (rows["steps"] / rows["seconds"]).mean()
        reached = ["never" if math.isnan(value) else f"{value:.0f}" for value in rows["seconds_to_goal"]]
        print(f"| {task} | {library} | {len(rows)} | {rows['return'].mean():.4g}{spread} ", end="")
        print(f"| {speed:,.0f} | {', '.join(reached)} |")


if __name__ == "__main__":
    main()
