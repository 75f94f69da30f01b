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


class Curriculum(Target):
    """With each step, the task becomes harder: by a level that all environments share."""

    def __init__(self, args):
        super().__init__(args)
        self.level = nn.Buffer(torch.zeros((), device=args.device))

    def step(self, actions):
        obs, rewards, terminated, truncated, last_obs = super().step(actions)
        self.level.add_(0.01)
        return obs, rewards - self.level, terminated, truncated, last_obs


class Privileged(Target):
    """The second number of an observation is only the critic's, and is part of the reward."""

    def step(self, actions):
        noise = self.obs[:, 1].clone()
        obs, rewards, *ends, last_obs = super().step(actions)
        return obs, rewards + noise, *ends, last_obs


class Logs(Target):
    """It logs a term of the reward, a number that is the same for all, and success, known at ends only."""

    def step(self, actions):
        effort = actions[:, 0].square()
        results = super().step(actions)
        success = torch.where(results[3], (results[1] > -0.5).float(), torch.nan)
        self.log = {"reward/effort": effort, "half": torch.full_like(effort[0], 0.5), "success": success}
        return results


class LogsItsSteps(Target):
    """Environment n ends after n + 1 steps; it logs the number of the step, and 100 ever after."""

    recordable = False

    def reset(self):
        self.count = 0
        return super().reset()

    def step(self, actions):
        obs, rewards, _, truncated, last_obs = super().step(actions)
        self.count += 1
        end = torch.arange(len(rewards)) + 1
        self.log = {"step": torch.where(self.count <= end, float(self.count), 100.0)}
        return obs, rewards, self.count == end, truncated, last_obs


class ClampsInPlace(Target):
    """It writes into its actions."""

    recordable = False

    def step(self, actions):
        return super().step(actions.clamp_(-0.1, 0.1))


class ClampsACopy(Target):
    """What `ClampsInPlace` means."""

    recordable = False

    def step(self, actions):
        return super().step(actions.clamp(-0.1, 0.1))


class Smooth(Target):
    """Changes of actions cost: it keeps the last ones."""

    recordable = False

    def __init__(self, args, copies=False):
        super().__init__(args)
        self.copies, self.previous = copies, torch.zeros(args.num_envs, 1, device=args.device)

    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        rewards = rewards - (actions - self.previous).square().squeeze(-1)
        self.previous = actions.clone() if self.copies else actions
        return obs, rewards, *others


class CountsInPython(Target):
    """Each step costs more: a number of Python's."""

    count = 0

    def step(self, actions):
        self.count += 1
        obs, rewards, *others = super().step(actions)
        return obs, rewards - 0.001 * self.count, *others


class CountsInAList(CountsInPython):
    def __init__(self, args):
        super().__init__(args)
        self.counts = [0]

    def step(self, actions):
        self.counts[0] += 1
        obs, rewards, *others = Target.step(self, actions)
        return obs, rewards - 0.001 * self.counts[0], *others


class CountsInAPart(Target):
    """The number is an attribute of an object that it has."""

    def __init__(self, args):
        super().__init__(args)
        self._part = Part()

    def step(self, actions):
        self._part.count += 1
        obs, rewards, *others = super().step(actions)
        return obs, rewards - 0.001 * self._part.count, *others


class Part:
    count = 0


class ReplacesABuffer(Target):
    """In each step, or from a step on that it knows by a number of Python's."""

    def __init__(self, args):
        super().__init__(args)
        self.drift, self.count = nn.Buffer(torch.zeros(args.num_envs, device=args.device)), 0

    def step(self, actions):
        self.count += 1
        if self.count > 40:
            self.drift = self.drift + 0.01
        obs, rewards, *others = super().step(actions)
        return obs, rewards - self.drift, *others


class DrawsFromNumpy(Target):
    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        return obs, rewards + float(np.random.random()), *others  # noqa: NPY002


class DrawsFromItsOwn(Target):
    """From a generator that belongs to it."""

    def __init__(self, args):
        super().__init__(args)
        self.generator = np.random.default_rng(args.seed)

    def step(self, actions):
        obs, rewards, *others = super().step(actions)
        return obs, rewards + float(self.generator.random()), *others


class RandomMasses(Target):
    """What it draws when it is made: a robot of its own."""

    def __init__(self, args):
        super().__init__(args)
        self.masses = torch.rand(args.num_envs), torch.from_numpy(np.random.random(args.num_envs))  # noqa: NPY002


class Diverges:
    """In steps of a period, environment 1 gives no number, terminates, and starts anew."""

    obs_size = actor_obs_size = 2
    action_size, max_steps = 1, 1000

    def __init__(self, args, period=7, says_so=True):
        self.steps = torch.zeros(args.num_envs)
        self.period, self.says_so, self.count = period, says_so, 0

    def reset(self):
        return torch.zeros(len(self.steps), 2)

    def step(self, actions):
        self.count += 1
        obs, rewards = torch.rand(len(self.steps), 2), torch.ones(len(self.steps))
        last_obs, terminated = obs.clone(), torch.zeros(len(obs), dtype=torch.bool)
        if self.count % self.period == 0:
            rewards[1] = last_obs[1, 1] = torch.nan
            terminated[1] = self.says_so
        self.steps.add_(1)
        truncated = self.steps >= self.max_steps
        self.steps.mul_(~(terminated | truncated))
        return obs, rewards, terminated, truncated, last_obs


class NeedsGradients(Target):
    """Its reward's slope: a simulator that is differentiated inside."""

    recordable = False

    def step(self, actions):
        with torch.enable_grad():
            x = actions.clone().requires_grad_()
            (slope,) = torch.autograd.grad(x.square().sum(), x)
        obs, rewards, *others = super().step(actions)
        return obs, rewards - slope.squeeze(-1).abs(), *others


class NoLimit(Target):
    max_steps = property()


def text_in_log(args):
    envs = Target(args)
    envs.log = {"speed": 1.0}
    return envs


class HiddenState(Target):
    """What `step` changes is no buffer, so no checkpoint has it."""

    def __init__(self, args):
        super().__init__(args)
        self.drift = torch.zeros(args.num_envs)

    def step(self, actions):
        self.drift.add_(0.01)
        obs, rewards, *others = super().step(actions)
        return obs, rewards - self.drift, *others


class CountsInItsClass(Target):
    count = 0

    def step(self, actions):
        type(self).count += 1
        obs, rewards, *others = super().step(actions)
        return obs, rewards - 0.001 * self.count, *others


class CopiesItsState(Scripted):
    def __init__(self, args):
        super().__init__(args)
        self.level = 0.0

    def state_dict(self):
        return {"level": torch.tensor(self.level)}


def changed(**attributes):
    """A `Target` with other attributes."""

    def make(args):
        envs = Target(args)
        vars(envs).update(attributes)
        return envs

    return make


scalar_steps = changed(steps=torch.zeros(()))
no_limit = changed(max_steps=float("inf"))
no_log = changed(log=None)
sees_too_much = changed(actor_obs_size=3)


class ReplacesItsLevel(Target):
    """Not recorded, so it may."""

    recordable = False

    def __init__(self, args):
        super().__init__(args)
        self.level = nn.Buffer(torch.zeros(()))

    def step(self, actions):
        self.level = self.level + 0.01
        return super().step(actions)


class LevelForEach(Target):
    """A level of each environment."""

    def __init__(self, args):
        super().__init__(args)
        self.level = nn.Buffer(torch.zeros(args.num_envs))

    def step(self, actions):
        self.level.add_(0.01)
        return super().step(actions)


class Neural(Target):
    """A network makes its observations; and a buffer is an expanded tensor."""

    def __init__(self, args):
        super().__init__(args)
        self.network = nn.Linear(2, 2)
        self.gravity = nn.Buffer(torch.tensor([0.0, 0.0, -9.8]).expand(args.num_envs, 3))

    def reset(self):
        return self.network(super().reset())

    def step(self, actions):
        obs, rewards, terminated, truncated, last_obs = super().step(actions)
        return self.network(obs), rewards, terminated, truncated, self.network(last_obs)


class Later(Target):
    """From the 20th step on, one of its results is another."""

    def __init__(self, args, index, change):
        super().__init__(args)
        self.index, self.change, self.count = index, change, 0

    recordable = False

    def step(self, actions):
        results = list(super().step(actions))
        self.count += 1
        if self.count > 20:
            results[self.index] = self.change(results[self.index])
        return results


def has_a_bug(args):
    x, y = [args]
    return x, y


class AfterReset(Target):
    """An observation tells the step of its episode. The last ones are of the next episode."""

    def __init__(self, args, right=False):
        super().__init__(args)
        self.right = right

    def observe(self):
        return torch.stack([self.steps, self.steps], -1)

    def reset(self):
        super().reset()
        return self.observe()

    def step(self, actions):
        before = self.observe()
        _, rewards, terminated, truncated, _ = super().step(actions)
        obs = self.observe()
        return obs, rewards, terminated, truncated, before + 1 if self.right else obs
