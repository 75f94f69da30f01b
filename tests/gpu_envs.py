"""Environments for test_gpu.py, each with what `ppo_gpu.Pendulums` has: `--env-id gpu_envs:Scripted`."""

import copy
import random

import numpy as np
import torch
from torch import nn


class Scripted:
    """Its observations, rewards and ends follow from three numbers: environment, episode and step.

    It writes results to the same memory in every step, as simulators do. The last number of an observation
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
        """Return terminated and truncated after a step, from 1. Episodes have 1 to 6 steps, with all ends."""
        length, kind = 1 + (2 * n + 3 * episode) % 6, (n + episode) % 3
        return bool(step == length and kind != 0), bool(step == 6 or (step == length and kind != 1))

    def reset(self):
        self.episode += 1
        self.steps.zero_()
        self.results[0][:] = torch.tensor([self.observe(n, e, 0) for n, e in enumerate(self.episode)])
        return self.results[0]

    def step(self, actions):
        obs, rewards, terminated, truncated, next_obs = self.results
        for n, episode in enumerate(self.episode):
            step, action = int(self.steps[n]) + 1, float(actions[n, 0])
            next_obs[n] = obs[n] = torch.tensor(self.observe(n, episode, step, action))
            rewards[n] = self.reward(n, episode, step)
            terminated[n], truncated[n] = self.ends(n, episode, step)
            self.steps[n] = step
            if terminated[n] or truncated[n]:
                if terminated[n]:
                    next_obs[n] = torch.nan  # as of a simulation that diverged
                self.episode[n] += 1
                self.steps[n] = 0
                obs[n] = torch.tensor(self.observe(n, self.episode[n], 0))
        actions.fill_(torch.nan)  # they are the environment's to change
        return self.results


class Target(nn.Module):
    """The reward is high where the action is the cue, which is new in each step; a second number is noise."""

    obs_size, actor_obs_size, action_size, max_steps = 2, 1, 1, 5
    recordable = True

    def __init__(self, args):
        super().__init__()
        self.steps = nn.Buffer(torch.zeros(args.num_envs, device=args.device))
        self.obs = nn.Buffer(torch.zeros(args.num_envs, 2, device=args.device))

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


def target(args):
    """A function that makes environments."""
    return Target(args)


class Changed(Target):
    """After some steps, `change` is applied to one of the results of `step`."""

    recordable = False

    def __init__(self, args, index, change, after=0):
        super().__init__(args)
        self.index, self.change, self.after, self.count = index, change, after, 0

    def step(self, actions):
        results = list(super().step(actions))
        self.count += 1
        if self.count > self.after:
            results[self.index] = self.change(results[self.index])
        return results


class Draws(Target):
    """Rewards have noise of Python's and NumPy's generators."""

    recordable = False

    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        return obs, rewards + random.random() + np.random.random(), *others  # noqa: NPY002


# Environments that are refused


def one_simulator(args, made=[]):  # noqa: B006
    """Return another object in each call, with the tensors of the first one."""
    made.append(made[0] if made else Target(args))
    return copy.copy(made[0])


def another_shape(args):
    return Changed(args, 1, lambda x: x.unsqueeze(-1))


def has_a_bug(args):
    x, y = [args]
    return x, y


class Moved(Target):
    """A step replaces a buffer: a CUDA graph would go on with the old one."""

    def step(self, actions):
        self.steps = self.steps + 0
        return super().step(actions)


class CountsInPython(Target):
    """Each step costs more, by a number that is not a tensor."""

    count = 0

    def step(self, actions):
        self.count += 1
        obs, rewards, *others = super().step(actions)
        return obs, rewards - 0.001 * self.count, *others


class DrawsFromNumpy(Target):
    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        return obs, rewards + float(np.random.random()), *others  # noqa: NPY002


class HiddenState(Target):
    """A step changes a tensor that is no buffer, so no checkpoint has it."""

    def __init__(self, args):
        super().__init__(args)
        self.drift = torch.zeros(args.num_envs)

    def step(self, actions):
        self.drift.add_(0.01)
        obs, rewards, *others = super().step(actions)
        return obs, rewards - self.drift, *others


class CopiesItsSteps(Target):
    """Its `steps` are a copy, so that time limits cannot be spread."""

    recordable = False

    def __init__(self, args):
        super().__init__(args)
        self.clock = nn.Buffer(self.steps)
        del self.steps

    @property
    def steps(self):
        return self.clock.clone()

    def step(self, actions):
        self.clock.add_(1)
        truncated = self.clock >= self.max_steps
        self.clock.mul_(~truncated)
        self.obs.uniform_(-1, 1)
        obs = self.obs.clone()
        return obs, -actions[:, 0].square(), torch.zeros_like(truncated), truncated, obs

    def reset(self):
        self.clock.zero_()
        return self.obs.uniform_(-1, 1).clone()


class CopiesItsState(Target):
    """What a checkpoint has cannot be given back to it."""

    def state_dict(self, *args, **kwargs):
        return {name: x.clone() for name, x in super().state_dict(*args, **kwargs).items()}


class KeepsItsSteps(Target):
    """After a reset, episodes would end at once."""

    def reset(self):
        steps = self.steps.clone()
        obs = super().reset()
        self.steps.copy_(steps)
        return obs


class PreviousAction(Target):
    """A step keeps the last action in a tensor that is no buffer."""

    def __init__(self, args):
        super().__init__(args)
        self.last = torch.zeros(args.num_envs, 1)

    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        rewards = rewards - (actions - self.last).square().squeeze(-1)
        self.last.copy_(actions)
        return obs, rewards, *others


class ResetsToAnotherShape(Target):
    def reset_where(self, where):
        return self.obs[0]


# Environments as users have them


class Terrain(Target):
    """The reward is the environment's share of all numbers: 0 for the first, nearly 1 for the last."""

    max_steps = 5.0  # as 20 / 4 would give it

    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        return obs, torch.arange(len(rewards), device=rewards.device) / len(rewards), *others


class Configured(Target):
    """Its rewards are scaled by an argument, which is in the checkpoint."""

    def __init__(self, args, scale=1.0):
        super().__init__(args)
        self.scale = nn.Buffer(torch.tensor(float(scale), device=args.device))


class Late(nn.Module):
    """Its episodes end where the steps are above the time limit, which is nearly 3."""

    obs_size = actor_obs_size = action_size = 1
    max_steps = 0.3 / 0.1

    def __init__(self, args):
        super().__init__()
        self.steps = nn.Buffer(torch.zeros(args.num_envs, device=args.device))

    def reset(self):
        self.steps.zero_()
        return torch.ones(len(self.steps), 1)

    def step(self, actions):
        self.steps.add_(1)
        truncated = self.steps > self.max_steps
        rewards, obs = self.steps.clone(), torch.ones(len(self.steps), 1)
        self.steps.mul_(~truncated)
        return obs, rewards, torch.zeros_like(truncated), truncated, obs


class SeedsInReset(Target):
    def reset(self):
        torch.manual_seed(0)
        return super().reset()


class Explodes(Target):
    """A strong action makes its state infinite. It does not terminate, but can start anew."""

    def __init__(self, args):
        super().__init__(args)
        self.place = nn.Buffer(torch.zeros(args.num_envs, device=args.device))

    def observe(self):
        return torch.stack([self.obs[:, 0], self.place], -1)

    def reset(self):
        self.place.zero_()
        super().reset()
        return self.observe()

    def reset_where(self, where):
        self.place.copy_(torch.where(where, 0, self.place))
        self.steps.mul_(~where)
        return self.observe()

    def step(self, actions):
        _, rewards, terminated, truncated, _ = super().step(actions)
        self.place.copy_(torch.where(actions[:, 0] > 1, torch.inf, self.place + 0.1))
        next_obs = self.observe()
        return self.reset_where(truncated), rewards + 0 * self.place, terminated, truncated, next_obs


class Still(Target):
    """Its observation never changes."""

    recordable = False

    def reset(self):
        return 1 + 0 * super().reset()

    def step(self, actions):
        obs, *others, next_obs = super().step(actions)
        return 1 + 0 * obs, *others, 1 + 0 * next_obs


class Precise(Target):
    """It notes with which precision matrices are multiplied in its steps."""

    recordable = False
    seen: set = set()  # noqa: RUF012

    def step(self, actions):
        self.seen.add(torch.get_float32_matmul_precision())
        return super().step(actions)


class Curriculum(Target):
    """With each step, the task becomes harder, by a level that all environments share."""

    def __init__(self, args):
        super().__init__(args)
        self.level = nn.Buffer(torch.zeros((), device=args.device))

    def step(self, actions):
        obs, rewards, terminated, truncated, next_obs = super().step(actions)
        self.raise_level()
        return obs, rewards - self.level, terminated, truncated, next_obs

    def raise_level(self):
        self.level.add_(0.01)


class ReplacesItsLevel(Curriculum):
    """The level is a new tensor after each step, which is allowed where steps are not recorded."""

    recordable = False

    def raise_level(self):
        self.level = self.level + 0.01


class RandomMasses(Target):
    """Its robots have masses that are drawn when it is made."""

    def __init__(self, args):
        super().__init__(args)
        self.masses = torch.rand(args.num_envs), torch.from_numpy(np.random.random(args.num_envs))  # noqa: NPY002


class Logs(Target):
    """It logs the number of the step, a number of each environment, and success, but only at ends."""

    def __init__(self, args):
        super().__init__(args)
        self.count = nn.Buffer(torch.zeros((), device=args.device))

    def step(self, actions):
        results = super().step(actions)
        self.count.add_(1)
        numbers = torch.arange(len(actions), dtype=torch.float32, device=actions.device)
        success = torch.where(results[3], 1.0, torch.nan)
        self.log = {"step": self.count, "reward/number": numbers, "success": success}
        return results


class Smooth(Target):
    """Changes of actions cost, so it keeps the last ones, without a copy."""

    recordable = False
    previous = 0

    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        rewards = rewards - (actions - self.previous).square().squeeze(-1)
        self.previous = actions
        return obs, rewards, *others


class Diverges:
    """In every seventh step, environment 1 gives NaN and starts anew. It terminates, if it says so."""

    obs_size = actor_obs_size = 2
    action_size, max_steps = 1, 1000

    def __init__(self, args, says_so=True):
        self.steps = torch.zeros(args.num_envs)
        self.says_so, self.count = says_so, 0

    def reset(self):
        self.steps.zero_()
        return torch.zeros(len(self.steps), 2)

    def step(self, actions):
        self.count += 1
        obs, rewards = torch.rand(len(self.steps), 2), torch.ones(len(self.steps))
        next_obs, terminated = obs.clone(), torch.zeros(len(obs), dtype=torch.bool)
        if self.count % 7 == 0:
            rewards[1] = next_obs[1, 1] = torch.nan
            terminated[1] = self.says_so
        self.steps.add_(1)
        truncated = self.steps >= self.max_steps
        self.steps.mul_(~(terminated | truncated))
        return obs, rewards, terminated, truncated, next_obs
