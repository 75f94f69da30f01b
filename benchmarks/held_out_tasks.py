"""Small environments, all correct, whose training curves look unusual.

python ppo.py --env-id held_out_tasks:TwoDoors-v0 --total-timesteps 1e5
"""

import gymnasium as gym
import numpy as np


class TwoDoors(gym.Env):
    """One step: the observation shows which of two doors has the reward of 1. Solved almost at once."""

    observation_space = gym.spaces.MultiBinary(2)
    action_space = gym.spaces.Discrete(2)

    def observe(self):
        return np.int8([self.door == 0, self.door == 1])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.door = int(self.np_random.integers(2))
        return self.observe(), {}

    def step(self, action):
        return self.observe(), float(action == self.door), True, False, {}


class Queue(gym.Env):
    """Jobs arrive at random, at a rate that switches; faster service costs more. It never terminates.

    The reward is minus the square of the queue and the cost of the service: from 0 to about -1,700 a step.
    """

    observation_space = gym.spaces.Box(np.float32([0, 0]), np.float32([40, 1]))
    action_space = gym.spaces.Discrete(4)
    rates = 0.5, 1.6

    def observe(self):
        return np.float32([self.jobs, self.busy])

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.jobs, self.busy = int(self.np_random.integers(41)), int(self.np_random.integers(2))
        return self.observe(), {}

    def step(self, action):
        arrivals = int(self.np_random.poisson(self.rates[self.busy]))
        self.jobs = min(max(self.jobs - int(action), 0) + arrivals, 40)
        if self.np_random.random() < 0.02:
            self.busy = 1 - self.busy
        return self.observe(), -float(self.jobs**2 + 10 * int(action) ** 2), False, False, {}


class ManyActions(gym.Env):
    """One of 8 contexts is shown, and one of 64 actions is right there; those near it get a little."""

    observation_space = gym.spaces.MultiBinary(8)
    action_space = gym.spaces.Discrete(64)

    def observe(self):
        return (np.arange(8) == self.context).astype(np.int8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.context, self.time = int(self.np_random.integers(8)), 0
        return self.observe(), {}

    def step(self, action):
        right = 8 * self.context + (3 * self.context) % 8
        reward = 1.0 if action == right else 0.2 if action // 8 == self.context else 0.0
        self.context, self.time = int(self.np_random.integers(8)), self.time + 1
        return self.observe(), reward, self.time == 16, False, {}


class Coin(gym.Env):
    """Rewards of +1 or -1 by the toss of a coin, whatever one does, until a random end: nothing to learn."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Discrete(3)

    def observe(self):
        return self.np_random.standard_normal(4, np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observe(), {}

    def step(self, action):
        reward = 1.0 if self.np_random.random() < 0.5 else -1.0
        return self.observe(), reward, bool(self.np_random.random() < 0.1), False, {}


class TMaze(gym.Env):
    """The first observation shows a side; after a corridor of 20 steps, one must turn to it (+4, or -1)."""

    observation_space = gym.spaces.MultiBinary(4)  # left shown, right shown, corridor, junction
    action_space = gym.spaces.Discrete(3)  # forward, left, right
    length = 20

    def observe(self):
        shown = self.side if self.time == 0 else 3 if self.time >= self.length else 2
        return (np.arange(4) == shown).astype(np.int8)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.side, self.time = int(self.np_random.integers(2)), 0
        return self.observe(), {}

    def step(self, action):
        if self.time >= self.length:
            return self.observe(), 4.0 if action == 1 + self.side else -1.0, True, False, {}
        self.time += 1
        return self.observe(), 0.0, False, False, {}


gym.register("TwoDoors-v0", TwoDoors)
gym.register("Queue-v0", Queue, max_episode_steps=5000)
gym.register("ManyActions-v0", ManyActions)
gym.register("Coin-v0", Coin)
gym.register("TMaze-v0", TMaze)
