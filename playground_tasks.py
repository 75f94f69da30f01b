"""MuJoCo Playground (Zakka et al. 2025, arXiv:2502.08844) for ppo_gpu.py, by JAX.

    pip install playground               # on a GPU also: pip install "jax[cuda13]"
    python ppo_gpu.py --env-id CheetahRun
    python ppo_gpu.py --env-id Go1JoystickFlatTerrain --env-kwargs '{"reward_config.scales.torques": 0}'

Tensors of PyTorch and JAX share their memory (DLPack). It is also an example of an adapter to a simulator.
"""

import os
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Playground:
    """N environments of MuJoCo Playground. As in its training, each starts all episodes in one state."""

    def __init__(self, args: Any, **kwargs: Any):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to PyTorch
        import jax
        from mujoco_playground import registry

        if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # of torchrun
            jax.config.update("jax_cuda_visible_devices", os.environ["LOCAL_RANK"])
        config = registry.get_default_config(args.env_id)
        config.update({"impl": "jax"} if "impl" in config else {})
        config.lock()  # other names are an error
        config.update_from_flattened_dict(kwargs)
        self.jax, self.env = jax, registry.load(args.env_id, config)
        self.action_size, self.max_steps = self.env.action_size, config.episode_length
        self.steps = torch.zeros(args.num_envs, device=args.device)
        parts = jax.eval_shape(self.env.reset, jax.random.key(0)).obs
        if isinstance(parts, dict) and parts.keys() != {"state", "privileged_state"}:
            raise ValueError(f"{args.env_id} has observations {', '.join(parts)}: only vectors are supported")
        sizes = [part.shape[-1] for part in jax.tree.leaves(parts)]
        self.obs_size, self.actor_obs_size = sum(sizes), sizes[-1]

        def step(state: Any, start: Any, action: Any, cut: Any) -> tuple:
            after = self.env.step(state, action)
            next_obs = self.merge(after.obs)
            terminated = (after.done > 0) | ~jax.numpy.isfinite(after.reward + next_obs.sum())
            over = terminated | cut
            first, last = (start.data, start.obs), (after.data, after.obs)
            data, obs = jax.tree.map(lambda x, y: jax.numpy.where(over, x, y), first, last)
            results = self.merge(obs), after.reward, terminated, cut, next_obs
            return after.replace(data=data, obs=obs), results, after.metrics

        self.reset_one, self.step_one = self.env.reset, step  # of one environment
        self.jit_reset, self.jit_step = jax.jit(jax.vmap(self.env.reset)), jax.jit(jax.vmap(step))

    def merge(self, obs: Any) -> Any:
        """In one array, what the robot sees ("state"), then what only the simulator knows."""
        return self.jax.numpy.concatenate(self.jax.tree.leaves(obs)[::-1], -1)

    def reset(self) -> Tensor:
        key = self.jax.random.key(torch.randint(2**31, ()).item())  # torch.manual_seed decides it
        self.state = self.start = self.jit_reset(self.jax.random.split(key, len(self.steps)))
        self.steps.zero_()
        return torch.from_dlpack(self.merge(self.start.obs))

    def step(self, actions: Tensor) -> tuple[Tensor, ...]:
        self.steps += 1
        action, cut = map(self.jax.dlpack.from_dlpack, (actions.clamp(-1, 1), self.steps >= self.max_steps))
        self.state, results, metrics = self.jit_step(self.state, self.start, action, cut)
        obs, rewards, terminated, truncated, next_obs = map(torch.from_dlpack, results)
        self.log = {name: torch.from_dlpack(x) for name, x in metrics.items()}  # terms of the reward
        self.steps *= ~(terminated | truncated)
        return obs, rewards, terminated, truncated, next_obs

    def snapshot(self) -> Any:
        """The state of the first environment."""
        return self.jax.tree.map(lambda x: x[0], self.state)

    def render(self, snapshots: list) -> list[np.ndarray]:
        """An image [H, W, 3] of each."""
        return self.env.render(snapshots)
