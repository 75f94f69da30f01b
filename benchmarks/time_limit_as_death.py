"""Environments that report a time limit as an end: what PPO learns from if it mistakes the one for the other.

`ppo.py --env-id time_limit_as_death:TimeLimitAsDeath/MountainCar-v0` trains on one. Only the study of time
limits uses them; no flag of the scripts brings this mistake back.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import gymnasium as gym


class TimeLimitAsDeath(gym.Wrapper):
    """Turns `truncated` into `terminated`."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """As `Env.step`, but never truncated."""
        obs, reward, terminated, truncated, info = self.env.step(action)
        return obs, reward, terminated or truncated, False, info


def make(env_id: str, **kwargs: Any) -> gym.Env:
    """The environment `env_id`, time limit included, with its time limit as an end."""
    return TimeLimitAsDeath(gym.make(env_id, **kwargs))


for env_id in ("MountainCar-v0", "Acrobot-v1", "LunarLander-v3"):
    gym.register(f"TimeLimitAsDeath/{env_id}", partial(make, env_id))
