"""Tasks that need a memory."""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class Cue(gym.Env):
    """One of four cues is shown at the start. Eight steps later, the action that names it returns 1."""

    observation_space, action_space = spaces.Box(0, 1, (5,), np.float32), spaces.Discrete(4)

    def observe(self):
        shown = self.cue if self.time == 0 else 4 if self.time == 8 else None
        return np.float32([shown == i for i in range(5)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.time = self.np_random.integers(4), 0
        return self.observe(), {}

    def step(self, action):
        over = self.time == 8
        reward = float(over and action == self.cue)
        self.time += 1
        return self.observe(), reward, over, False, {}


def positions(env_id, kept, **kwargs):
    """An environment of which only these numbers of the observation are seen."""
    env = gym.make(env_id, **kwargs)
    space = env.observation_space
    box = spaces.Box(space.low[kept], space.high[kept])
    return gym.wrappers.TransformObservation(env, lambda obs: obs[kept], box)


def grid(**kwargs):
    import minigrid  # noqa: F401

    return gym.wrappers.FlattenObservation(__import__("minigrid.wrappers").wrappers.ImgObsWrapper(gym.make("MiniGrid-MemoryS7-v0", **kwargs)))


gym.register("Cue-v0", Cue)
gym.register("PositionOnlyCartPole-v1", lambda **kwargs: positions("CartPole-v1", [0, 2], **kwargs))
gym.register("PositionOnlyAcrobot-v1", lambda **kwargs: positions("Acrobot-v1", [0, 1, 2, 3], **kwargs))
gym.register("MemoryS7-v0", grid)
