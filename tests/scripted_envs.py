"""These environments have known transitions, and are registered when this module is imported.

A script belongs to a key, which is the seed of the reset modulo 1000, so that a test can tell the
environments of a vector apart whichever way they are vectorised.
"""

import gymnasium as gym
import numpy as np
from gymnasium import spaces


def length(key, episode):
    """Return the number of steps of an episode, from 1 to 7."""
    return (3 + 2 * key + 5 * episode) % 7 + 1


def ending(key, episode):
    """Return how an episode ends: (terminated, truncated)."""
    return ((True, False), (False, True), (True, True))[(key + episode) % 3]


def reward(key, episode, step, action):
    """Return the reward of a step, which is exact in float32 for discrete actions."""
    return 100.0 * key + 10 * episode + step + float(np.sum(action)) / 4


def observation(key, episode, step, last_action):
    """Return the observation before a step. The last action is -1 at the start of an episode."""
    return np.array([key, episode, step, *np.ravel(last_action)], dtype=np.float32)


class Scripted(gym.Env):
    """It follows the script, with discrete actions.

    With `one_array`, it writes each observation, also that of a reset, into the array it returned before, and
    reuses two arrays for the ends.
    """

    observation_space = spaces.Box(-np.inf, np.inf, (4,))
    action_space = spaces.Discrete(3)

    def __init__(self, one_array=False):
        self.array = np.zeros(self.observation_space.shape, np.float32) if one_array else None
        self.ends = np.zeros(2, bool)

    def observe(self, action):
        obs = observation(self.key, self.episode, self.step_count, action)
        if self.array is None:
            return obs
        self.array[:] = obs
        return self.array

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.key, self.episode = seed % 1000, -1
        self.episode, self.step_count = self.episode + 1, 0
        self.ends[:] = False
        return self.observe(-np.ones(self.action_space.shape)), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        value = reward(self.key, self.episode, self.step_count, action)
        self.step_count += 1
        over = self.step_count == length(self.key, self.episode)
        self.ends[:] = ending(self.key, self.episode) if over else (False, False)
        ends = self.ends.tolist() if self.array is None else (self.ends[0, ...], self.ends[1, ...])
        return self.observe(action), value, *ends, {}


class ScriptedBox(Scripted):
    """It has actions of three numbers, of which one has no bounds."""

    observation_space = spaces.Box(-np.inf, np.inf, (6,))
    action_space = spaces.Box(np.float32([-2, 0, -np.inf]), np.float32([1, 10, np.inf]))


class Still(gym.Env):
    """Its state is always the same, and its reward 1. Only a time limit ends an episode."""

    observation_space = spaces.Box(-9, 9, (2,))

    def __init__(self, action_space):
        self.action_space = action_space

    def reset(self, *, seed=None, options=None):
        return np.ones(2, np.float32), {}

    def step(self, action):
        return np.ones(2, np.float32), 1.0, False, False, {}


gym.register("Scripted-v0", Scripted)
gym.register("ScriptedBox-v0", ScriptedBox)
for name, actions in (("Still-v0", spaces.Discrete(3)), ("StillBox-v0", spaces.Box(-1, 1, (2,)))):
    gym.register(name, Still, max_episode_steps=7, kwargs={"action_space": actions})
