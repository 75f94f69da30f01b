"""Environments of a user: small, fast, and able to do what environments do wrong.

`--env-id user_envs:Walk-v0` has discrete actions, `user_envs:WalkBox-v0` continuous ones; so for each name.
"""

import multiprocessing
import os
import signal
import time
from collections import defaultdict
from functools import partial
from pathlib import Path

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

ACTIONS = {"discrete": spaces.Discrete(3, start=5), "box": spaces.Box(-2.0, 4.0, (1,), np.float64)}
VECTOR = spaces.Box(-5, 5, (3,), np.float32)
OBSERVATIONS = {
    "vector": VECTOR,
    "discrete": spaces.Discrete(6),
    "dict": spaces.Dict(position=VECTOR, room=spaces.Discrete(4)),
    "tuple": spaces.Tuple((spaces.Discrete(3), VECTOR)),
    "text": spaces.Dict(name=spaces.Text(3), position=VECTOR),
    "image": spaces.Box(0, 255, (32, 32, 3), np.uint8),
    "sequence": spaces.Sequence(spaces.Discrete(3)),
    "board": spaces.Box(0, 2, (3, 2), np.uint8),
}
# What all instances in this process did: seeds of resets, first observations, times of steps, times at which
# checkpoints were written, and finished episodes as (steps of all instances, return, length).
LOG: dict[str, list] = defaultdict(list)


class Walk(gym.Env):
    """Episodes of 1 to 12 steps that end in all ways.

    The last action, or a positive one, pays 1.5, others 0.5. From the step `at` of all instances in a process
    on, it does what `fault` says.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(
        self, action="discrete", observation="vector", fault="", at=0, number=15, endless=False, sleep=0.0,
        render_mode=None,
    ):  # fmt: skip
        self.action_space, self.observation_space = ACTIONS[action], OBSERVATIONS[observation]
        self.fault, self.at, self.number, self.endless, self.sleep = fault, at, number, endless, sleep
        self.render_mode = render_mode
        if fault == "tell" and multiprocessing.parent_process():
            Path("worker").touch()
        if fault == "third" and multiprocessing.current_process().name.endswith("-2"):
            raise RuntimeError("there are two licences")
        if fault == "only one" and LOG["open"]:
            raise RuntimeError("the simulator is in use")
        LOG["open"].append(self)

    def observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            LOG["seeds"].append(seed)
            self.seed = seed
        if self.fault == "reset" and len(LOG["steps"]) >= self.at:
            raise RuntimeError(f"the simulator of seed {self.seed} broke")
        self.length, self.kind = self.np_random.integers(1, 13), self.np_random.integers(3)
        self.rewards = []
        obs = self.observe()
        LOG["starts"].append(repr(obs))
        return (obs * np.nan if self.fault == "nan start" else obs), {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action!r} is not an action")
        time.sleep(self.sleep)
        LOG["steps"].append(time.time())
        self.rewards.append(1.5 if action >= 7 or (action > 0 and action < 5) else 0.5)
        over = len(self.rewards) >= self.length and not self.endless
        obs, reward = self.observe(), self.rewards[-1]
        if len(LOG["steps"]) >= self.at:
            obs, reward = self.fail(obs, reward)
        if over:
            LOG["episodes"].append((len(LOG["steps"]), sum(self.rewards), len(self.rewards)))
        info = {"legal actions": np.arange(self.length)} if self.fault == "infos" else {}
        return obs, reward, over and self.kind != 1, over and self.kind != 0, info

    def fail(self, obs, reward):
        first, worker = len(LOG["steps"]) == self.at, multiprocessing.parent_process()
        if self.fault == "raise":
            raise RuntimeError(f"the simulator of seed {self.seed} broke")
        if self.fault == "shape":
            obs = np.zeros(4, np.float32)
        if self.fault == "column":
            obs = obs[:, None]
        if self.fault == "nan observation":
            obs = obs * np.nan
        if self.fault in ("nan reward", "huge reward"):
            reward = np.nan if self.fault == "nan reward" else 1e38
        if self.fault == "one reward" and first:
            reward = 1e6
        if self.fault == "kill" and worker:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault in ("signal", "signals") and first:
            for _ in range(2 if self.fault == "signals" else 1):
                os.kill(os.getpid(), self.number)
        if self.fault == "signal group" and first and self.seed % 4 == 0:
            os.killpg(0, self.number)
        if self.fault == "watch":
            for path in Path("runs").glob("*/checkpoint.pt"):
                LOG["saved"].append(path.stat().st_mtime)
        return obs, reward

    def close(self):
        LOG["open"] = [env for env in LOG["open"] if env is not self]

    def render(self):
        return np.full((32, 32, 3), 10 * len(self.rewards), np.uint8)


class Blind(Walk):
    """A walk that cannot be shown."""

    metadata = {"render_modes": []}  # noqa: RUF012

    def __init__(self, action="discrete"):
        super().__init__(action)


class Dark(Walk):
    """A walk that takes a render_mode, and cannot be shown."""

    metadata = {"render_modes": []}  # noqa: RUF012


class Probe(gym.Env):
    """Seen are a cue of -1 or 1, drawn at the start, and the one-hot step. It isolates one thing to learn.

    `pays` is what pays 1: "always", "match" (the action is as the cue says) or "late" (the first action is as
    the cue says; it pays in the third step); or "cue", which pays the cue. A cue of 1 says action 6, or > 1.
    """

    def __init__(self, pays, length=1, truncates=False, action="discrete", render_mode=None):
        self.pays, self.length, self.truncates = pays, length, truncates
        self.action_space, self.middle = ACTIONS[action], {"discrete": 5.5, "box": 1.0}[action]
        if action == "discrete":
            self.action_space = spaces.Discrete(2, start=5)
        self.observation_space = spaces.Box(-1, 1, (1 + length,), np.float32)

    def observe(self):
        one_hot = np.eye(self.length)[self.time % self.length]  # a time limit does not show
        return np.array([self.cue, *one_hot], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue, self.time = self.np_random.choice([-1, 1]), 0
        return self.observe(), {}

    def step(self, action):
        matches = float((np.asarray(action).item() > self.middle) == (self.cue > 0))
        self.first = matches if self.time == 0 else self.first
        pays = {
            "always": 1.0,
            "match": matches,
            "late": self.first * (self.time == 2),
            "cue": float(self.cue),
        }
        self.time += 1
        over = self.time == self.length
        return self.observe(), pays[self.pays], over and not self.truncates, over and self.truncates, {}


class Native(SyncVectorEnv):
    """A vector environment of the environment's own."""

    def __init__(self, num_envs, mode, **options):
        super().__init__([partial(Walk, **options)] * num_envs, autoreset_mode=mode)


def needs_package(**options):
    """An environment whose package is missing."""
    raise gym.error.DependencyNotInstalled("no_such_package is not installed,\nrun `pip install it`")


for kind in ACTIONS:
    ending = "Box-v0" if kind == "box" else "-v0"
    gym.register(f"Walk{ending}", Walk, kwargs={"action": kind})
    gym.register(f"Blind{ending}", Blind, kwargs={"action": kind})
    gym.register(f"Dark{ending}", Dark, kwargs={"action": kind})
    gym.register(f"Probe{ending}", Probe, kwargs={"action": kind})
    gym.register(f"NeedsPackage{ending}", needs_package)
    for mode in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
        vector = {"vector_entry_point": partial(Native, mode=mode)}
        gym.register(f"Native{mode.value}{ending}", Walk, kwargs={"action": kind}, **vector)
