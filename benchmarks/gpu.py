"""`ppo_gpu.py` beside other libraries' PPO: steps per second, and seconds until a return is reached.

    python benchmarks/gpu.py                                   # pendulums, on a CPU or a GPU
    python benchmarks/gpu.py --env-id CheetahRun --goal 850    # of MuJoCo Playground, where there is a GPU

Pendulums are those of `ppo_gpu.py`, N = 1,024, for RSL-RL (`pip install rsl-rl-lib`) and Stable-Baselines3,
too, which gets them as NumPy arrays. CheetahRun is trained by `ppo_gpu.py`, by RSL-RL in the same ones
and by Brax with Playground's own settings (`pip install -e ".[playground]" "jax[cuda13]" rsl-rl-lib`).
Rollouts, epochs, minibatches, networks, γ and λ of RSL-RL and Stable-Baselines3 are ours, the rest are their
defaults (RSL-RL adapts its learning rate) with normalised observations.

Each run is a process of its own, which on a CPU has one thread. Seconds are those since the process started,
so imports and compiling count, until the mean return of the last 100 whole episodes in training reached the
goal (Brax: of its evaluation). Speeds are of the second half of training.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Rows = list[tuple[float, float, float]]  # steps, mean return of the last 100 episodes, and time


class Episodes:
    """Returns of whole episodes: the first of each environment are left out, as they may be shortened."""

    def __init__(self, args: Any):
        self.sums = torch.full((args.num_envs,), torch.nan, device=args.device)
        self.returns: deque[float] = deque(maxlen=100)
        self.args, self.steps, self.rows = args, 0, []

    def add(self, rewards: torch.Tensor, ended: torch.Tensor) -> None:
        """A step of all environments; a row is added after each rollout."""
        self.sums += rewards
        self.returns += self.sums[ended & ~self.sums.isnan()].tolist()
        self.sums = torch.where(ended, 0, self.sums)
        self.steps += len(rewards)
        if self.steps % (self.args.num_envs * self.args.num_steps) == 0:
            self.rows.append((self.steps, float(np.mean(self.returns or np.nan)), time.time()))


def ours(args: Any) -> Rows:
    """`ppo_gpu.py`, by its curves."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    import ppo_gpu

    folder = Path(ppo_gpu.train(args)["checkpoint"]).parent
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    returns = {event.step: event.value for event in log.Scalars("charts/episodic_return_100")}
    events = log.Scalars("charts/SPS")
    return [(event.step, returns.get(event.step, np.nan), event.wall_time) for event in events]


def rsl_rl(args: Any) -> Rows:
    """RSL-RL 5, with the environments behind its interface."""
    from rsl_rl.env import VecEnv
    from rsl_rl.runners import OnPolicyRunner
    from tensordict import TensorDict

    import ppo_gpu

    envs, episodes = ppo_gpu.make_envs(args), Episodes(args)

    class Adapter(VecEnv):
        num_envs, num_actions, max_episode_length = args.num_envs, envs.action_size, envs.max_steps
        device, cfg, obs = args.device, {}, envs.reset()

        @property
        def episode_length_buf(self) -> torch.Tensor:
            return envs.steps.long()

        @episode_length_buf.setter
        def episode_length_buf(self, value: torch.Tensor) -> None:
            envs.steps.copy_(value)

        def get_observations(self) -> TensorDict:
            parts = {"actor": self.obs[:, : envs.actor_obs_size], "critic": self.obs}
            return TensorDict(parts, [self.num_envs])

        def step(self, actions: torch.Tensor) -> tuple:
            self.obs, rewards, terminated, truncated, _ = envs.step(actions)
            episodes.add(rewards, terminated | truncated)
            limits = {"time_outs": truncated & ~terminated}
            return self.get_observations(), rewards, (terminated | truncated).long(), limits

    network = {"class_name": "MLPModel", "hidden_dims": [args.hidden_size] * 2, "obs_normalization": True}
    noise = {"class_name": "GaussianDistribution", "init_std": float(np.exp(args.init_log_std))}
    algorithm = {
        "class_name": "PPO",
        "gamma": args.gamma,
        "lam": args.gae_lambda,
        "entropy_coef": args.ent_coef,
    }
    algorithm |= {"num_learning_epochs": args.update_epochs, "num_mini_batches": args.num_minibatches}
    settings = {
        "num_steps_per_env": args.num_steps,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["actor"], "critic": ["critic"]},
        "actor": network | {"distribution_cfg": noise},
        "critic": network,
        "algorithm": algorithm | {"learning_rate": args.learning_rate},
    }
    torch.manual_seed(args.seed)
    runner = OnPolicyRunner(Adapter(), settings, None, args.device)
    iterations = -(-int(args.total_timesteps) // (args.num_envs * args.num_steps))
    runner.learn(iterations, init_at_random_ep_len=True)
    return episodes.rows


def sb3(args: Any) -> Rows:
    """Stable-Baselines3, with the pendulums as NumPy arrays."""
    import gymnasium as gym
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import VecEnv, VecNormalize

    import ppo_gpu

    envs, episodes = ppo_gpu.make_envs(args), Episodes(args)

    class Adapter(VecEnv):
        def reset(self) -> np.ndarray:
            obs = envs.reset().cpu().numpy()
            envs.steps.random_(envs.max_steps)
            return obs

        def step_async(self, actions: np.ndarray) -> None:
            self.actions = actions

        def step_wait(self) -> tuple:
            results = envs.step(torch.as_tensor(self.actions, device=args.device))
            episodes.add(results[1], results[2] | results[3])
            obs, rewards, terminated, truncated, last_obs = (x.cpu().numpy() for x in results)
            infos: list[dict] = [{} for _ in obs]
            for n in np.flatnonzero(terminated | truncated):
                limit = bool(truncated[n] and not terminated[n])
                infos[n] = {"terminal_observation": last_obs[n], "TimeLimit.truncated": limit}
            return obs, rewards, terminated | truncated, infos

        def close(self) -> None:
            pass

        def get_attr(self, name: str, indices: Any = None) -> list:
            return [None] * self.num_envs

        def set_attr(self, name: str, value: Any, indices: Any = None) -> None:
            pass

        def env_method(self, name: str, *args: Any, **kwargs: Any) -> list:
            return [None] * self.num_envs

        def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list:
            return [False] * self.num_envs

    obs = gym.spaces.Box(-np.inf, np.inf, (envs.obs_size,))
    vector = VecNormalize(
        Adapter(args.num_envs, obs, gym.spaces.Box(-1, 1, (envs.action_size,))), gamma=args.gamma
    )
    size = args.num_envs * args.num_steps // args.num_minibatches
    sizes = {"n_steps": args.num_steps, "batch_size": size, "n_epochs": args.update_epochs}
    network = {
        "net_arch": [args.hidden_size] * 2,
        "log_std_init": args.init_log_std,
        "activation_fn": torch.nn.ELU,
    }
    rates = {"learning_rate": args.learning_rate, "gamma": args.gamma, "gae_lambda": args.gae_lambda}
    PPO(
        "MlpPolicy", vector, policy_kwargs=network, seed=args.seed, device=args.device, **sizes, **rates
    ).learn(int(args.total_timesteps))
    return episodes.rows


def brax(args: Any) -> Rows:
    """Brax's PPO with Playground's settings for this environment."""
    import functools

    from brax.training.agents.ppo import networks, train
    from mujoco_playground import dm_control_suite, registry, wrapper
    from mujoco_playground.config import dm_control_suite_params, locomotion_params

    control = args.env_id in dm_control_suite.ALL_ENVS
    settings = dict((dm_control_suite_params if control else locomotion_params).brax_ppo_config(args.env_id))
    sizes = settings.pop("network_factory", {})
    settings |= {"num_timesteps": int(args.total_timesteps), "seed": args.seed}
    rows: Rows = []
    train.train(
        environment=registry.load(args.env_id, config_overrides={"impl": "jax"}),
        wrap_env_fn=wrapper.wrap_for_brax_training,
        network_factory=functools.partial(networks.make_ppo_networks, **sizes),
        progress_fn=lambda step, metrics: rows.append(
            (step, float(metrics["eval/episode_reward"]), time.time())
        ),
        **settings,
    )
    return rows


def one(name: str, env_id: str, seed: int, steps: float | None) -> None:
    """One run in this process; prints its rows as the last line."""
    import ppo_gpu

    defaults = ppo_gpu.Args() if env_id == "Pendulum" else ppo_gpu.OTHERS
    args = replace(defaults, env_id=env_id, seed=seed, device=DEVICE)
    args = replace(args, total_timesteps=steps or args.total_timesteps)
    log = contextlib.redirect_stdout(sys.stderr)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), log:
        rows = globals()[name](args)
    print(json.dumps(rows))


def main(
    env_id: str = "Pendulum",
    goal: float = -200,
    seeds: tuple[int, ...] = (1, 2, 3),
    timesteps: float | None = None,
    only: str = "",
    one_run: str = "",
) -> None:
    """Make all runs one after another, and print a table of medians and ranges over seeds."""
    if one_run:
        one(one_run, env_id, seeds[0], timesteps)
        return
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU, one thread"
    print(f"{env_id} on {device}\n\n| PPO | steps per second | seconds to {goal:g} |\n| --- | --- | --- |")
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if DEVICE == "cpu" else {})
    for name in ("ours", "rsl_rl", "sb3") if env_id == "Pendulum" else ("ours", "rsl_rl", "brax"):
        speeds, seconds = [], []
        for seed in seeds if only in name else ():
            words = ["--one-run", name, "--env-id", env_id, "--seeds", str(seed)]
            words += ["--timesteps", str(timesteps)] if timesteps else []
            start = time.time()
            done = subprocess.run(
                [sys.executable, __file__, *words],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            rows = np.array(json.loads(done.stdout.splitlines()[-1]), float)
            half = rows[len(rows) // 2 :]
            speeds.append((half[-1, 0] - half[0, 0]) / (half[-1, 2] - half[0, 2]))
            reached = rows[rows[:, 1] >= goal, 2]
            seconds.append(reached[0] - start if len(reached) else np.inf)
        if speeds:
            ranges = [f"{np.median(x):,.0f} ({min(x):,.0f} to {max(x):,.0f})" for x in (speeds, seconds)]
            print(f"| {name} | {ranges[0]} | {ranges[1]} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
