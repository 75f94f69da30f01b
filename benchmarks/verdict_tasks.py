"""Tasks for `verdicts.py` that a check of a run easily gets wrong. Importing this file registers them.

python ppo.py --env-id verdict_tasks:Curriculum-v0 --total-timesteps 1e5
"""

import gymnasium as gym
import numpy as np


def blind(env_id: str) -> gym.Env:
    """An environment that shows nothing: all numbers of its observations are 0."""
    env = gym.make(env_id)
    return gym.wrappers.TransformObservation(env, np.zeros_like, env.observation_space)


class Bandit(gym.Env):
    """Ten arms, of which each pull pays 1 or 0. The best one pays always, in episodes of one step."""

    observation_space = gym.spaces.Box(0, 1, (1,))
    action_space = gym.spaces.Discrete(10)

    def reset(self, *, seed=None, options=None):
        """Begin a pull."""
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        """Pull an arm: number k pays with probability (k + 1) / 10."""
        payment = float(self.np_random.random() < (action + 1) / 10)
        return np.zeros(1, np.float32), payment, True, False, {}


class Curriculum(gym.Env):
    """Name the sign of a number that is seen with noise, 20 times; mistakes cost more with each episode.

    At first they cost nothing, and all agents have 60. After 100 episodes, an agent that has learnt has 55,
    and one that acts at random 30.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (1,))
    action_space = gym.spaces.Discrete(2)
    episode = 0

    def observe(self):
        """Draw a sign, and show it."""
        self.sign = self.np_random.integers(2)
        return np.float32([2 * self.sign - 1 + self.np_random.normal(0, 0.7)])

    def reset(self, *, seed=None, options=None):
        """Begin an episode."""
        super().reset(seed=seed)
        self.episode += 1
        self.time = 0
        return self.observe(), {}

    def step(self, action):
        """Name a sign."""
        self.time += 1
        cost = 3 * min(1, self.episode / 100) * (action != self.sign)
        return self.observe(), float(3 - cost), self.time == 20, False, {}


class NoisyReward(gym.RewardWrapper):
    """CartPole with noise of standard deviation 3 in each reward."""

    def __init__(self):
        super().__init__(gym.make("CartPole-v1"))

    def reward(self, reward):
        """The reward, with noise."""
        return float(reward) + 3 * float(self.np_random.standard_normal())


gym.register("BlindCartPole-v0", lambda: blind("CartPole-v1"))
gym.register("BlindPendulum-v0", lambda: blind("Pendulum-v1"))
gym.register("Bandit-v0", Bandit)
gym.register("Curriculum-v0", Curriculum)
gym.register("NoisyReward-v0", NoisyReward)
