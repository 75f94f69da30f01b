"""Tasks that need a memory, for `ppo_lstm.py`: what one observation shows is not enough to act well.

    python ppo_lstm.py --env-id memory_tasks:PositionOnlyCartPole-v1 --total-timesteps 1e5

The others are `memory_tasks:PositionOnlyAcrobot-v1` and `memory_tasks:Cue-v0` (without a picture).
"""

import gymnasium as gym
import numpy as np


class Cue(gym.Env):
    """One of four cues is shown at the start. Eight steps later, the action that names it returns 1."""

    observation_space = gym.spaces.MultiBinary(5)
    action_space = gym.spaces.Discrete(4)

    def observe(self):
        shown = {0: self.cue, 8: 4}.get(self.time)  # the fifth number asks for the answer
        return np.int8([shown == i for i in range(5)])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.time = self.np_random.integers(4), 0
        return self.observe(), {}

    def step(self, action):
        over = self.time == 8
        self.time += 1
        return self.observe(), float(over and action == self.cue), over, False, {}


def without_velocities(env_id, positions, **kwargs):
    """An environment of whose observations only the numbers at `positions` are shown."""
    env = gym.make(env_id, **kwargs)
    box = env.observation_space
    shown = gym.spaces.Box(box.low[positions], box.high[positions])
    return gym.wrappers.TransformObservation(env, lambda obs: obs[positions], shown)


def position_only_cartpole(**kwargs):
    """CartPole: the position of the cart and the angle of the pole."""
    return without_velocities("CartPole-v1", [0, 2], **kwargs)


def position_only_acrobot(**kwargs):
    """Acrobot: the sines and cosines of its two angles."""
    return without_velocities("Acrobot-v1", [0, 1, 2, 3], **kwargs)


gym.register("Cue-v0", Cue)
gym.register("PositionOnlyCartPole-v1", position_only_cartpole)
gym.register("PositionOnlyAcrobot-v1", position_only_acrobot)
