"""Scripted games in the place of the ALE's, and a small network, for tests of ppo_atari.py."""

import random

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import nn

import ppo_atari

# Steps of a game: (reward, lives, terminated, truncated).
LIVES = (0, 3, 0, 0), (5, 3, 0, 0), (-2, 2, 0, 0), (7, 2, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0)
CUT = (1, 3, 0, 0), (1, 3, 0, 0), (3, 3, 0, 1)
SHORT = (4, 3, 0, 0), (3, 3, 1, 0)


class Games(gym.vector.VectorEnv):
    """The games follow scripts. Images show game and step.

    They reset in the step that ends a game, as the ALE's do. The second game pays twice the rewards, and so
    on. All start with 3 lives.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012
    single_action_space = spaces.Discrete(5)
    resets = []  # noqa: RUF012 - the seed of each, and a list of the actions that follow

    def __init__(self, *scripts):
        self.scripts, self.num_envs = scripts, len(scripts)

    def reset(self, seed=None, **_):
        self.at, self.games = np.zeros((2, self.num_envs), int)
        self.actions, self.reached = [], []  # also the number of the image that each step led to
        self.resets.append((seed, self.actions))
        return self.images(), {"lives": np.full(self.num_envs, 3)}

    def numbers(self):
        return (10 * self.games + self.at + 100 * np.arange(self.num_envs)) % 256

    def images(self):
        shape = self.num_envs, 4, 84, 84
        return np.broadcast_to(self.numbers()[:, None, None, None], shape).astype(np.uint8)

    def step(self, actions):
        self.actions.append(actions.tolist())
        rows = [script[at] for at, script in zip(self.at, self.scripts, strict=True)]
        rewards, lives, terminated, truncated = (np.array(column) for column in zip(*rows, strict=True))
        rewards = rewards * (self.games + 1)
        self.at += 1
        self.reached.append(self.numbers())
        infos, over = {}, (terminated | truncated) > 0
        if over.any():  # the other games have images that mean nothing
            infos["final_obs"] = np.where(over[:, None, None, None], self.images(), 255).astype(np.uint8)
        self.at[over], self.games = 0, self.games + over
        infos["lives"] = np.where(over, 3, lives)
        return self.images(), rewards, terminated > 0, truncated > 0, infos


class DrawnGames(Games):
    """Images and rewards are drawn from the global generators of NumPy and Python."""

    def images(self):
        return np.random.randint(256, size=(self.num_envs, 4, 84, 84), dtype=np.uint8)  # noqa: NPY002

    def step(self, actions):
        images, rewards, *ends, infos = super().step(actions)
        return images, rewards + random.randrange(9) - 4, *ends, infos


def make_games(*scripts, fire=1, kind=Games):
    return ppo_atari.LostLives(kind(*scripts), fire)


class SmallNetwork(ppo_atari.Agent):
    """It is quick to make, to save and to evaluate; the convolutional one takes 20 megabytes."""

    def __init__(self, args, num_actions):
        nn.Module.__init__(self)
        self.use_bfloat16 = args.bfloat16
        self.trunk = nn.Sequential(nn.AvgPool2d(12), nn.Flatten(), nn.Linear(4 * 7 * 7, 16), nn.Tanh())
        self.actor, self.critic = nn.Linear(16, num_actions), nn.Linear(16, 1)
