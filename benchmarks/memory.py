"""Tasks that need a memory: ppo_lstm.py, ppo.py, and RecurrentPPO of sb3-contrib.

    pip install -e '.[benchmarks]' && pip install --no-deps popgym sb3-contrib
    python benchmarks/memory.py      # does what runs.csv lacks
    python benchmarks/report.py      # the table

RecurrentPPO has the settings of RL Baselines3 Zoo where it has some for the task (for CartPole without
velocities, and for Acrobot with them), else its defaults with 16 environments. "With our settings", it has
those of ppo_lstm.py, and one LSTM for actor and critic. A return is the mean of the last 100 episodes of
training. Each run is a process with one thread. Seconds are of its CPU time, from the start to the end of the
last update.
"""

import contextlib
import importlib
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

import numpy as np
import tyro
from experiments import MEMORY_TASKS, ROOT, Run, runs
from run import KEY, RUNS, in_words, missing, provenance, refuse_uncommitted, store

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
Rows = list[tuple[float, float, float]]  # steps, return and CPU time after each iteration


def run_ours(script, args) -> Rows:
    """Train with a script of this repository."""
    rows = []

    class Run(script.Run):
        def log(self, metrics, episodes):
            super().log(metrics, episodes)
            average = float(np.mean(self.state.returns or np.nan))
            rows.append((self.state.global_step, average, time.process_time()))

    script.Run = Run
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        script.train(args)
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


def run_one(run: Run) -> None:
    """Train, and store a row of the results."""
    import torch

    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT))
    importlib.import_module("memory_tasks")
    name, start = run.experiment.name, time.process_time()
    if run.experiment.script == "sb3-contrib":
        settings = OURS if name == "memory-sb3-ours" else ZOO.get(run.env_id, {})
        rows = run_sb3(settings, run.env_id, run.steps, run.seed)
    else:
        script = importlib.import_module(run.experiment.script.removesuffix(".py"))
        rows = run_ours(script, tyro.cli(script.Args, args=run.arguments))
    _, last, end = rows[-1]
    reached = [now - start for _, value, now in rows if value >= MEMORY_TASKS[run.env_id][1]]
    row = dict(zip(KEY, run.key, strict=True)) | {"flags": run.flags, "training": round(float(last), 3)}
    row["seconds"] = round(end - start, 1)
    if reached:
        row["seconds_to_goal"] = round(reached[0], 1)
    about = provenance()
    about["versions"] |= {name: version(name) for name in ("sb3-contrib", "popgym")}
    store(RUNS, [row | {"sessions": 1} | in_words(about)], KEY)


def main(name: str = "", /) -> None:
    """Do each missing run in a process of its own. With the name of a run, do this one here."""
    refuse_uncommitted()
    planned = {run.name: run for run in runs() if run.experiment.program == "memory.py"}
    if name and name not in planned:
        sys.exit(f"no run is called {name}: {', '.join(planned)}")
    if name:
        run_one(planned[name])
        return
    for run in missing([*planned.values()]):
        subprocess.run([sys.executable, __file__, run.name], check=True)


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
