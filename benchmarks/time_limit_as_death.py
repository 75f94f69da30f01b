"""Environments that report a time limit as a terminal state, for the study of this mistake.

python ppo.py --env-id time_limit_as_death:TimeLimitAsDeath/MountainCar-v0
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
    """The environment, with its time limit as a terminal state."""
    return TimeLimitAsDeath(gym.make(env_id, **kwargs))


for env_id in ("MountainCar-v0", "Acrobot-v1", "LunarLander-v3"):
    gym.register(f"TimeLimitAsDeath/{env_id}", partial(make, env_id))
