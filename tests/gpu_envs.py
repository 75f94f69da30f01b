"""Environments for test_gpu.py, each with what `ppo_gpu.Pendulums` has: `--env-id gpu_envs:Scripted`."""

import numpy as np
import torch
from torch import nn


class Scripted:
    """Episodes whose observations, rewards and ends follow from three numbers: environment, episode and step.

    Results are written to the same memory in every step, as simulators do. The last number of an observation
    is the last action, which is 0 in a first one.
    """

    obs_size, actor_obs_size, action_size, max_steps = 4, 3, 2, 6

    def __init__(self, args):
        self.n, self.device = args.num_envs, args.device
        self.steps = torch.zeros(self.n)
        self.episode = np.zeros(self.n, int)
        ends = torch.zeros(2, self.n, dtype=torch.bool)
        self.results = torch.zeros(self.n, 4), torch.zeros(self.n), *ends, torch.zeros(self.n, 4)

    @staticmethod
    def observe(n, episode, step, action=0.0):
        return [n + 0.5, episode - 0.25, step / 2, action]

    @staticmethod
    def reward(n, episode, step):
        return 0.3 * n - 0.1 * episode + np.cos(3 * step)

    @staticmethod
    def ends(n, episode, step):
        """Terminated and truncated after this step, from 1: of 1 to 6 steps, with all kinds of ends."""
        length, kind = 1 + (2 * n + 3 * episode) % 6, (n + episode) % 3
        return bool(step == length and kind != 0), bool(step == 6 or (step == length and kind != 1))

    def reset(self):
        self.episode += 1
        self.steps.zero_()
        self.results[0][:] = torch.tensor([self.observe(n, e, 0) for n, e in enumerate(self.episode)])
        return self.results[0]

    def step(self, actions):
        obs, rewards, terminated, truncated, last_obs = self.results
        for n, episode in enumerate(self.episode):
            step, action = int(self.steps[n]) + 1, float(actions[n, 0])
            last_obs[n] = obs[n] = torch.tensor(self.observe(n, episode, step, action))
            rewards[n] = self.reward(n, episode, step)
            terminated[n], truncated[n] = self.ends(n, episode, step)
            self.steps[n] = step
            if terminated[n] or truncated[n]:
                if terminated[n]:
                    last_obs[n] = torch.nan  # as of a simulation that diverged
                self.episode[n] += 1
                self.steps[n] = 0
                obs[n] = torch.tensor(self.observe(n, self.episode[n], 0))
        return self.results


class Target(nn.Module):
    """The reward is high where the action is the cue, which is new in each step; a second number is noise."""

    obs_size, actor_obs_size, action_size, max_steps = 2, 1, 1, 5

    def __init__(self, args):
        super().__init__()
        self.steps = nn.Buffer(torch.zeros(args.num_envs))
        self.obs = nn.Buffer(torch.zeros(args.num_envs, 2))

    def reset(self):
        self.steps.zero_()
        self.obs.uniform_(-1, 1)
        return self.obs.clone()

    def step(self, actions):
        rewards = -(actions[:, 0] - self.obs[:, 0]).square()
        self.steps.add_(1)
        truncated = self.steps >= self.max_steps
        self.steps.mul_(~truncated)
        self.obs.uniform_(-1, 1)
        obs = self.obs.clone()
        return obs, rewards, torch.zeros_like(truncated), truncated, obs

    def snapshot(self):
        return self.obs[0].tolist()

    def render(self, snapshots):
        return [np.full((32, 32, 3), int(100 + 100 * cue), np.uint8) for cue, _ in snapshots]


class Wrong(Target):
    """One of the results of `step` is not as it must be."""

    def __init__(self, args, index, change):
        super().__init__(args)
        self.index, self.change = index, change

    def step(self, actions):
        results = list(super().step(actions))
        results[self.index] = self.change(results[self.index])
        return results


def another_shape(args):
    return Wrong(args, 1, lambda x: x.unsqueeze(-1))


class Moved(Target):
    """A step replaces a buffer: a CUDA graph would go on with the old one."""

    def step(self, actions):
        self.steps = self.steps + 0
        return super().step(actions)


def info_too(args):
    envs = Target(args)
    step = envs.step
    envs.step = lambda actions: (*step(actions), {})
    return envs


def reset_with_info(args):
    envs = Target(args)
    reset = envs.reset
    envs.reset = lambda: (reset(), {})
    return envs


def nan_rewards(args):
    return Wrong(args, 1, lambda x: torch.where(torch.rand_like(x) < 0.02, torch.nan, x))
