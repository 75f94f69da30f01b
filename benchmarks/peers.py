"""PPO of other libraries, with the settings of our scripts, for `run.py` and `speed.py`.

`sb3`, `sbx`, `cleanrl`, `purejaxrl`, `purejaxrl_pendulum`, `rsl_rl` and `sb3_tensors` train with the settings
of one of our scripts. They return rows of steps, mean return of the last 100 training episodes, and time, at
the end of each rollout.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

Rows = list[tuple[float, float, float]]
CLEANRL_FILES = {  # and the names that its version of Gymnasium has
    "CartPole-v1": ("ppo.py", "CartPole-v1"),
    "LunarLander-v3": ("ppo.py", "LunarLander-v2"),
    "HalfCheetah-v5": ("ppo_continuous_action.py", "HalfCheetah-v4"),
    "BreakoutNoFrameskip-v4": ("ppo_atari.py", "ale_py:BreakoutNoFrameskip-v4"),
}
# A script, in a process whose clock is the processor's time.
CLOCK = "import json, runpy, sys, time; time.time = time.process_time; "
SCRIPT = CLOCK + "del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
ACTIVATIONS = {"CartPole-v1": "Tanh", "HalfCheetah-v5": "ELU"}


def events(folder: Path, tag: str) -> list[Any]:
    """What a run logged under a tag."""
    return EventAccumulator(str(folder), {"scalars": 0}).Reload().Scalars(tag)


def versions_in(folder: Path, *packages: str) -> str:
    """Versions in the virtual environment of a checkout, and the commit of the checkout."""
    code = "import sys; from importlib.metadata import version; "
    code += "print(*(f'{name}={version(name)}' for name in sys.argv[1:]))"
    python = str(folder / ".venv/bin/python")
    versions = subprocess.check_output([python, "-c", code, *packages], text=True).strip()
    commit = subprocess.check_output(["git", "-C", folder, "rev-parse", "--short", "HEAD"], text=True).strip()
    return f"{versions} checkout={commit}"


# Stable-Baselines3, and SBX, which is Stable-Baselines3 in JAX


def sb3_envs(env_id: str, num_envs: int, seed: int) -> Any:
    """Environments as Stable-Baselines3 has them."""
    import ale_py
    import gymnasium as gym
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    gym.register_envs(ale_py)
    if "NoFrameskip" in env_id:
        return VecFrameStack(make_atari_env(env_id, num_envs, seed), 4)
    return make_vec_env(env_id, num_envs, seed)


def train_sb3(
    env_id: str, steps: int, seed: int, settings: dict[str, Any], library: str = "stable_baselines3"
) -> tuple[Any, Rows]:
    """Train with Stable-Baselines3 or SBX ("sbx"): the model, and rows.

    The settings are those of its `PPO`, with the activation function by its name, and "n_envs", "normalize"
    (observations and rewards) and "scheduled": the steps in which "linear x" decays from x to 0.
    """
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecNormalize

    settings, rows = dict(settings), []
    envs = sb3_envs(env_id, settings.pop("n_envs"), seed)
    if settings.pop("normalize", False):
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    scheduled = settings.pop("scheduled", steps)
    for name, value in settings.items():
        if str(value).startswith("linear"):
            first = float(value.split()[1])
            settings[name] = lambda remaining, first=first: first * remaining
    if "policy_kwargs" in settings:
        network = settings["policy_kwargs"]
        name, functions = network["activation_fn"], torch.nn
        if library == "sbx":
            name, functions = name.lower(), importlib.import_module("flax.linen")
        settings["policy_kwargs"] = network | {"activation_fn": getattr(functions, name)}
    policy, device = ("CnnPolicy", "auto") if "NoFrameskip" in env_id else ("MlpPolicy", "cpu")
    model = importlib.import_module(library).PPO(policy, envs, seed=seed, device=device, **settings)

    class Log(BaseCallback):
        def _on_step(self) -> bool:
            return model.num_timesteps < steps or scheduled == steps

        def _on_rollout_end(self) -> None:
            returns = [episode["r"] for episode in model.ep_info_buffer or ()]  # of the last 100 episodes
            rows.append((model.num_timesteps, float(np.mean(returns or np.nan)), time.time()))

    model.learn(scheduled, callback=Log())
    return model, rows


def sb3(args: Any, library: str = "stable_baselines3") -> Rows:
    """Stable-Baselines3 with the settings of our script. Its value loss lacks our ½."""
    settings: dict[str, Any] = {
        "n_envs": args.num_envs,
        "normalize": getattr(args, "norm_obs", False),
        "n_steps": args.num_steps,
        "batch_size": args.num_steps * args.num_envs // args.num_minibatches,
        "n_epochs": args.update_epochs,
        "learning_rate": f"linear {args.learning_rate}",
        "ent_coef": args.ent_coef,
        "vf_coef": args.vf_coef / 2,
    }
    if args.env_id in ACTIVATIONS:
        settings["policy_kwargs"] = {"activation_fn": ACTIVATIONS[args.env_id], "log_std_init": -0.5}
    return train_sb3(args.env_id, int(args.total_timesteps), args.seed, settings, library)[1]


def sbx(args: Any) -> Rows:
    """SBX with the settings of our script."""
    return sb3(args, "sbx")


# CleanRL


def cleanrl(args: Any) -> Rows:
    """The file of CleanRL, in a process with its own packages. The folder is that of `speed.py --cleanrl`."""
    folder = os.environ["CLEANRL"]
    file, env_id = CLEANRL_FILES[args.env_id]
    names = ["num_envs", "num_steps", "num_minibatches", "update_epochs", "learning_rate"]
    names += ["vf_coef", "ent_coef"]
    words = [f"--{name.replace('_', '-')}={getattr(args, name)}" for name in names]
    words += [f"--total-timesteps={args.total_timesteps:.0f}", f"--seed={args.seed}", "--env-id", env_id]
    command = [f"{folder}/.venv/bin/python", "-c", SCRIPT, f"{folder}/cleanrl/{file}", *words]
    environment = os.environ | {"PYTHONPATH": folder}
    subprocess.run(
        [*command, "--no-clip-vloss", "--no-cuda"], check=True, capture_output=True, env=environment
    )
    (run,) = Path("runs").iterdir()
    episodes, rows = events(run, "charts/episodic_return"), []
    for event in events(run, "charts/SPS"):
        returns = [episode.value for episode in episodes if episode.step <= event.step][-100:]
        rows.append((event.step, float(np.mean(returns or np.nan)), event.wall_time))
    return rows


# PureJaxRL

PUREJAXRL = """
import json, sys, time
import jax
from ppo import make_train
config, key = json.loads(sys.argv[1]), jax.random.PRNGKey(int(sys.argv[2]))
train = jax.jit(make_train(config)).lower(key).compile()
begin = time.process_time()
jax.block_until_ready(train(key))
print(begin, time.process_time())
"""


def purejaxrl(args: Any) -> Rows:
    """PureJaxRL's `ppo.py`, in a process with its own packages; the folder is that of `--purejaxrl`.

    Training is one call, which is compiled before it is measured. So there are rows of its begin and its end.
    """
    folder = Path(os.environ["PUREJAXRL"])
    settings = purejaxrl_settings(args)
    command = [str(folder / ".venv/bin/python"), "-c", PUREJAXRL, json.dumps(settings), str(args.seed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder / "purejaxrl")
    begin, end = map(float, done.stdout.splitlines()[-1].split())
    size = args.num_envs * args.num_steps
    return [(0, np.nan, begin)] * 3 + [(args.total_timesteps // size * size, np.nan, end)]


def purejaxrl_settings(args: Any) -> dict[str, Any]:
    """Those of our script, as PureJaxRL calls them."""
    return {
        "ENV_NAME": args.env_id,
        "NUM_ENVS": args.num_envs,
        "NUM_STEPS": args.num_steps,
        "TOTAL_TIMESTEPS": int(args.total_timesteps),
        "NUM_MINIBATCHES": args.num_minibatches,
        "UPDATE_EPOCHS": args.update_epochs,
        "LR": args.learning_rate,
        "ANNEAL_LR": True,
        "GAMMA": args.gamma,
        "GAE_LAMBDA": args.gae_lambda,
        "CLIP_EPS": args.clip_coef,
        "ENT_COEF": args.ent_coef,
        "VF_COEF": args.vf_coef,
        "MAX_GRAD_NORM": args.max_grad_norm,
        "ACTIVATION": "tanh",
    }


# Its `ppo_continuous_action.py` with the widths and the first deviation of our script, on gymnax's pendulums,
# whose actions of -1 to 1 become the torque of ours, for that program clips actions so.
PUREJAXRL_PENDULUM = """
import json, pathlib, sys, time
import gymnax, jax, numpy as np
config, key, log_std = json.loads(sys.argv[1]), jax.random.PRNGKey(int(sys.argv[2])), sys.argv[3]
class Pendulums(type(gymnax.make("Pendulum-v1")[0])):
    def step_env(self, key, state, action, params):
        return super().step_env(key, state, 2 * action, params)
    def observation_space(self, params):
        return super().observation_space(self.default_params)
program = pathlib.Path("ppo_continuous_action.py").read_text()
changes = {"256": str(config["HIDDEN"]), "nn.initializers.zeros": f"constant({log_std})"}
changes["BraxGymnaxWrapper(config["] = "(lambda _: Pendulums())(config["
for old, new in changes.items():
    assert old in program
    program = program.replace(old, new)
__name__ = "program"  # not "__main__", which would run its own training
exec(program)
train = jax.jit(make_train(config)).lower(key).compile()
begin = time.process_time()
info = jax.block_until_ready(train(key))["metrics"]
end, rows, returns = time.process_time(), [], []
updates = len(info["returned_episode"])
for i in range(updates):
    ended = np.asarray(info["returned_episode"][i])
    returns += np.asarray(info["returned_episode_returns"][i])[ended].tolist()
    mean = float(np.mean(returns[-100:])) if returns else float("nan")
    rows.append(((i + 1) * ended.size, mean, begin + (end - begin) * (i + 1) / updates))
print(json.dumps(rows))
"""


def purejaxrl_pendulum(args: Any) -> Rows:
    """PureJaxRL on gymnax's pendulums. Its iterations take equal times, so these are divided evenly."""
    folder = Path(os.environ["PUREJAXRL"])
    settings = purejaxrl_settings(args) | {"NORMALIZE_ENV": True, "HIDDEN": args.hidden_size}
    words = json.dumps(settings), str(args.seed), str(args.init_log_std)
    command = [str(folder / ".venv/bin/python"), "-c", PUREJAXRL_PENDULUM, *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder / "purejaxrl")
    return [tuple(row) for row in json.loads(done.stdout.splitlines()[-1])]


# For the environments of ppo_gpu.py


class Episodes:
    """Returns of whole episodes: the first of each environment are left out, as they may be shortened."""

    def __init__(self, args: Any):
        self.sums = torch.full((args.num_envs,), torch.nan, device=args.device)
        self.returns: deque[float] = deque(maxlen=100)
        self.size, self.steps, self.rows = args.num_envs * args.num_steps, 0, []

    def add(self, rewards: torch.Tensor, ended: torch.Tensor) -> None:
        """A step of all environments; a row is added after each rollout."""
        self.sums += rewards
        self.returns += self.sums[ended & ~self.sums.isnan()].tolist()
        self.sums = torch.where(ended, 0, self.sums)
        self.steps += len(rewards)
        if self.steps % self.size == 0:
            self.rows.append((self.steps, float(np.mean(self.returns or np.nan)), time.time()))


def rsl_rl(args: Any) -> Rows:
    """RSL-RL 5, with the environments behind its interface. It adapts its learning rate."""
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
            return TensorDict({"policy": self.obs}, [self.num_envs])

        def step(self, actions: torch.Tensor) -> tuple:
            self.obs, rewards, terminated, truncated, _ = envs.step(actions)
            episodes.add(rewards, terminated | truncated)
            limits = {"time_outs": truncated & ~terminated}
            return self.get_observations(), rewards, (terminated | truncated).long(), limits

    network = {"class_name": "MLPModel", "hidden_dims": [args.hidden_size] * 2, "obs_normalization": True}
    noise = {"class_name": "GaussianDistribution", "init_std": float(np.exp(args.init_log_std))}
    settings = {
        "num_steps_per_env": args.num_steps,
        "save_interval": 10**9,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": network | {"distribution_cfg": noise},
        "critic": network,
        "algorithm": {
            "class_name": "PPO",
            "gamma": args.gamma,
            "lam": args.gae_lambda,
            "entropy_coef": args.ent_coef,
            "num_learning_epochs": args.update_epochs,
            "num_mini_batches": args.num_minibatches,
            "learning_rate": args.learning_rate,
        },
    }
    torch.manual_seed(args.seed)
    runner = OnPolicyRunner(Adapter(), settings, None, args.device)
    iterations = -(-int(args.total_timesteps) // (args.num_envs * args.num_steps))
    runner.learn(iterations, init_at_random_ep_len=True)
    return episodes.rows


def sb3_tensors(args: Any) -> Rows:
    """Stable-Baselines3, which gets the tensors as NumPy arrays."""
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

        def get_attr(self, name: str, indices: Any = None) -> list:
            return [None] * self.num_envs

        def env_is_wrapped(self, wrapper: Any, indices: Any = None) -> list:
            return [False] * self.num_envs

        close = set_attr = env_method = None  # abstract there, and not called here

    obs = gym.spaces.Box(-np.inf, np.inf, (envs.obs_size,))
    actions = gym.spaces.Box(-1, 1, (envs.action_size,))
    vector = VecNormalize(Adapter(args.num_envs, obs, actions), gamma=args.gamma)
    network = {"net_arch": [args.hidden_size] * 2, "log_std_init": args.init_log_std}
    model = PPO(
        "MlpPolicy",
        vector,
        n_steps=args.num_steps,
        batch_size=args.num_envs * args.num_steps // args.num_minibatches,
        n_epochs=args.update_epochs,
        learning_rate=args.learning_rate,
        gamma=args.gamma,
        gae_lambda=args.gae_lambda,
        policy_kwargs=network | {"activation_fn": torch.nn.ELU},
        seed=args.seed,
        device=args.device,
    )
    model.learn(int(args.total_timesteps))
    return episodes.rows
