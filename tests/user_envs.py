"""Environments of a user. They are small and fast, and can do wrong things.

`--env-id user_envs:Walk-v0` has discrete actions, `user_envs:WalkBox-v0` continuous ones; so for each name.
"""

import random
from collections import defaultdict

import gymnasium as gym
import numpy as np
from gymnasium import spaces

ACTIONS = {"discrete": spaces.Discrete(3), "box": spaces.Box(-2.0, 4.0, (1,))}
VECTOR = spaces.Box(-5, 5, (3,), np.float32)


OBSERVATIONS = {
    "vector": VECTOR,
    "discrete": spaces.Discrete(6),
    "dict": spaces.Dict(position=VECTOR, room=spaces.Discrete(4)),
    "image": spaces.Box(0, 255, (4, 4, 3), np.uint8),
    "mixed": spaces.Dict(image=spaces.Box(0, 255, (4, 4, 3), np.uint8), position=VECTOR),
    "words": spaces.Dict(position=VECTOR, words=spaces.Sequence(spaces.Discrete(9))),
}
# A log of all instances in this process: seeds of resets, steps, and finished episodes as (return, length).
LOG: dict[str, list] = defaultdict(list)


class Walk(gym.Env):
    """Episodes of 1 to 12 steps are terminated, truncated or both.

    The last discrete action, or a positive one, returns a reward of 1.5, others 0.5. The fault begins with
    step `at` of all instances in a process.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}  # noqa: RUF012

    def __init__(
        self, action="discrete", observation="vector", fault="", at=0, endless=False, render_mode=None
    ):
        self.action_space, self.observation_space = ACTIONS[action], OBSERVATIONS[observation]
        self.fault, self.at, self.endless, self.render_mode = fault, at, endless, render_mode
        LOG["made"].append(self)

    def close(self):
        LOG["closed"].append(self)

    def observe(self):
        self.observation_space.seed(int(self.np_random.integers(2**31)))
        return self.observation_space.sample()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            LOG["seeds"].append(seed)
        self.length, self.kind = self.np_random.integers(1, 13), self.np_random.integers(3)
        self.rewards = []
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action) or np.isnan(action).any(), action
        LOG["steps"].append(action)
        pays = action == 2 if isinstance(self.action_space, spaces.Discrete) else action > 0
        self.rewards.append(1.5 if pays else 0.5)
        over = len(self.rewards) >= self.length and not self.endless
        if over:
            LOG["episodes"].append((sum(self.rewards), len(self.rewards)))
        obs, reward = self.observe(), self.rewards[-1]
        if len(LOG["steps"]) >= self.at:
            if self.fault == "raise":
                raise RuntimeError("the simulator broke")
            if self.fault == "nan reward":
                reward = np.nan
            kind_of_end = "nan at a time limit" if self.kind == 1 else "nan at the end"
            if self.fault == "nan observation" or (over and self.fault == kind_of_end):
                obs = obs * np.nan
        return obs, reward, over and self.kind != 1, over and self.kind != 0, {"steps": len(self.rewards)}

    def render(self):
        return np.full((32, 32, 3), 10 * len(self.rewards), np.uint8)


class Probe(gym.Env):
    """An observation is a cue of -1 or 1, drawn at the start, and the one-hot step: one thing to learn.

    The reward is 1 "always"; or if the action matches the cue ("match"); or in the third step, if the first
    action matched ("late"); or it is the "cue" itself. A cue of 1 means action 1, or one greater than 1.
    """

    def __init__(self, pays, length=1, truncates=False, action="discrete"):
        self.pays, self.length, self.truncates = pays, length, truncates
        self.action_space, self.middle = ACTIONS[action], {"discrete": 0.5, "box": 1.0}[action]
        if action == "discrete":
            self.action_space = spaces.Discrete(2)
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


class Global(Walk):
    """Observations come from global generators, one of their numbers when the instance is made."""

    def __init__(self, **options):
        super().__init__(**options)
        self.drawn = np.random.random()  # noqa: NPY002

    def observe(self):
        obs = np.float32([self.drawn, np.random.random(), random.random()])  # noqa: NPY002
        LOG["drawn"].append(obs.tolist())
        return obs


class Blind(Walk):
    """It takes `render_mode`, and ignores it."""

    def __init__(self, render_mode=None):
        super().__init__()


for kind in ACTIONS:
    ending = "Box-v0" if kind == "box" else "-v0"
    gym.register(f"Walk{ending}", Walk, kwargs={"action": kind})
    gym.register(f"Probe{ending}", Probe, kwargs={"action": kind})
gym.register("Global-v0", Global)
gym.register("GlobalBox-v0", Global, kwargs={"action": "box"})
gym.register("Blind-v0", Blind)
gym.register("Rescue-v0", lambda mask_velocity=False, **options: Walk(**options))
gym.register("Words-v0", Walk, kwargs={"observation": "words"})
OTHERS = {
    "Pairs-v0": spaces.MultiDiscrete([2, 3]),
    "FromOne-v0": spaces.Discrete(3, start=1),
    "FarBox-v0": spaces.Box(np.float32([-1, 5]), np.float32([1, np.inf])),
}
for name, space in OTHERS.items():
    ACTIONS[name] = space
    gym.register(name, Walk, kwargs={"action": name})
