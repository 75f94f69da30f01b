"""Environments of which every transition is known, registered when this module is imported.

`--env-id scripted_envs:Scripted-v0` names one. A script belongs to a key, which is the seed of the reset
modulo 1000, so that a test can tell the environments of a vector apart whichever way they are vectorised.
"""

import functools

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv

FIRST_ACTION = 5  # the actions are 5, 6 and 7
BAD_KEY = 12  # the environment that fails, where one is meant to
SEEDS: list[int | None] = []  # of all resets in this process
OPEN = [0]  # environments in this process that were made and not closed


def length(key: int, episode: int) -> int:
    """Steps of an episode, from 1 to 7."""
    return (3 + 2 * key + 5 * episode) % 7 + 1


def ending(key: int, episode: int) -> tuple[bool, bool]:
    """How an episode ends: (terminated, truncated)."""
    return ((True, False), (False, True), (True, True))[(key + episode) % 3]


def reward(key: int, episode: int, step: int, action: int) -> float:
    """The reward of a step, exact in float32."""
    return 100.0 * key + 10 * episode + step + action / 4


def observation(key: int, episode: int, step: int, last_action: int) -> np.ndarray:
    """What is seen before a step; the last action is -1 at an episode's start."""
    return np.array([key, episode, step, last_action], dtype=np.float32)


class Scripted(gym.Env):
    """The script. Options: odd keys never end; a `fault` in the third step of episode 1 of `BAD_KEY`."""

    observation_space = spaces.Box(-np.inf, np.inf, (4,))
    action_space = spaces.Discrete(3, start=FIRST_ACTION)

    def __init__(self, endless: bool = False, fault: str = "", render_mode: str | None = None):
        self.endless, self.fault, self.render_mode = endless, fault, render_mode
        OPEN[0] += 1

    def close(self):
        OPEN[0] -= 1

    def reset(self, *, seed=None, options=None):
        SEEDS.append(seed)
        if seed is not None:
            self.key, self.episode = seed % 1000, -1
        self.episode, self.step_count = self.episode + 1, 0
        if self.fault == "reset" and (self.key, self.episode) == (BAD_KEY, 1):
            raise ValueError("broken on purpose")
        obs = observation(self.key, self.episode, 0, -1)
        if self.fault == "reset-nan" and (self.key, self.episode) == (BAD_KEY, 1):
            obs[0] = np.nan
        return obs, {}

    def step(self, action):
        if not self.action_space.contains(action):
            raise ValueError(f"{action} is not in {self.action_space}")
        value = reward(self.key, self.episode, self.step_count, action)
        self.step_count += 1
        obs = observation(self.key, self.episode, self.step_count, action)
        if self.fault and (self.key, self.episode, self.step_count) == (BAD_KEY, 1, 3):
            if self.fault == "step":
                raise ValueError("broken on purpose")
            if self.fault == "nan":
                obs[1] = np.nan
            if self.fault == "inf":
                value = -np.inf
        over = self.step_count == length(self.key, self.episode) and not (self.endless and self.key % 2)
        terminated, truncated = ending(self.key, self.episode) if over else (False, False)
        return obs, value, terminated, truncated, {}


class ScriptedVector(VectorEnv):
    """The same, stepped at once; it resets in the step after an episode's end, whatever its metadata say."""

    single_observation_space, single_action_space = Scripted.observation_space, Scripted.action_space

    def __init__(self, num_envs: int, metadata: dict | None = None, **options):
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP} if metadata is None else metadata
        self.num_envs, self.envs = num_envs, [Scripted(**options) for _ in range(num_envs)]
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.done = np.zeros(num_envs, dtype=bool)

    def reset(self, *, seed=None, options=None):
        self.done[:] = False
        return np.stack([env.reset(seed=seed + i)[0] for i, env in enumerate(self.envs)]), {}

    def step(self, actions):
        rows = [
            (*env.reset()[:1], 0.0, False, False) if done else env.step(action)[:4]
            for env, done, action in zip(self.envs, self.done, actions, strict=True)
        ]
        obs, rewards, terminated, truncated = map(np.array, zip(*rows, strict=True))
        self.done = terminated | truncated
        return obs, rewards, terminated, truncated, {}

    def close_extras(self, **kwargs):
        for env in self.envs:
            env.close()


class Blank(gym.Env):
    """Any spaces; one-step episodes of sampled observations."""

    def __init__(self, observation: spaces.Space, action: spaces.Space, render_mode: str | None = None):
        self.observation_space, self.action_space, self.render_mode = observation, action, render_mode

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        return self.observation_space.sample(), 1.0, True, False, {}


def needs_dependency(**kwargs):
    """An entry point whose package is missing."""
    raise gym.error.DependencyNotInstalled("no_such_package is not installed,\n  run `pip install it`")


def needs_argument(size, **kwargs):
    """An entry point that `gym.make` cannot call with the id alone."""


def blank(name: str, observation: spaces.Space, action: spaces.Space = Scripted.action_space, **how) -> str:
    """Register a `Blank` environment and return what to pass as --env-id."""
    gym.register(name, entry_point=Blank, kwargs={"observation": observation, "action": action}, **how)
    return f"{__name__}:{name}"


def mislabelled(metadata: dict):
    """The entry point of a vector environment that declares other metadata."""
    return functools.partial(ScriptedVector, metadata=metadata)


gym.register("Scripted-v0", entry_point=Scripted)
gym.register("ScriptedNative-v0", entry_point=Scripted, vector_entry_point=ScriptedVector)
gym.register("Endless-v0", entry_point=Scripted, kwargs={"endless": True})
for fault in ("step", "reset", "nan", "inf", "reset-nan"):
    how = {"entry_point": Scripted, "vector_entry_point": ScriptedVector, "kwargs": {"fault": fault}}
    gym.register(f"Fault-{fault}-v0", **{**how, "vector_entry_point": None})
    gym.register(f"FaultNative-{fault}-v0", **how)
gym.register("NeedsDependency-v0", entry_point=needs_dependency)
gym.register("NeedsArgument-v0", entry_point=needs_argument)
for name, metadata in (
    ("SameStep", {"autoreset_mode": AutoresetMode.SAME_STEP}),
    ("Disabled", {"autoreset_mode": AutoresetMode.DISABLED}),
    ("Unlabelled", {"render_fps": 30}),
    ("Text", {"autoreset_mode": "NextStep"}),
):
    gym.register(f"{name}-v0", entry_point=Scripted, vector_entry_point=mislabelled(metadata))
