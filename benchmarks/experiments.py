"""The list of experiments. `run.py` runs them, `memory.py` and `minutes.py` some that need other clocks or
libraries; `report.py` and `figures.py` show their results.

To measure something of your own, add an `Experiment` and run `python benchmarks/run.py --only its-name`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DATA, FIGURES = ROOT / "results/data", ROOT / "results/figures"
Task = tuple[str, int]  # environment and steps: runs of the same task can be compared


@dataclass(frozen=True)
class Experiment:
    """A script with some flags, on some tasks, with several seeds."""

    name: str
    label: str  # in tables and figures
    script: str  # "ppo.py", or "sb3" for Stable-Baselines3 with the settings of `SB3`
    plan: list[tuple[str, int, int]]  # environment, steps and seed of each run
    flags: str = ""
    program: str = "run.py"  # in this folder, that runs it
    commit: str = ""  # that has its script, if today's cannot run it
    change: str = ""  # of the script, by arms.py


@dataclass(frozen=True)
class Study:
    """Experiments side by side: a table, and a figure with a column per task and a row per quantity."""

    experiments: list[str]  # their names
    tasks: list[Task]
    quantities: tuple[str, ...] = ("return",)  # the table has the second one


@dataclass(frozen=True)
class Run:
    """One training run: an experiment on one task with one seed."""

    experiment: Experiment
    env_id: str
    steps: int
    seed: int

    @property
    def key(self) -> tuple[str, str, int, int]:
        """Identifies the run in the CSV files."""
        return self.experiment.name, self.env_id, self.steps, self.seed

    @property
    def name(self) -> str:
        """Identifies the run on the command line."""
        return f"{self.experiment.name}/{self.env_id}_{self.steps}/{self.seed}"

    @property
    def flags(self) -> str:
        """What differs from the defaults, for `runs.csv`. If it changes, the run is missing again."""
        if self.experiment.script != "sb3":
            change = self.experiment.change and f" + {self.experiment.change}"
            return f"{self.experiment.flags}{change}"
        return " ".join(f"{name}={value}" for name, value in SB3[self.env_id].items())

    @property
    def arguments(self) -> list[str]:
        """The command line of a script of ours."""
        own = ["--env-id", self.env_id, "--total-timesteps", str(self.steps), "--seed", str(self.seed)]
        return [*own, *shlex.split(self.experiment.flags)]


def runs() -> list[Run]:
    """All runs."""
    return [Run(experiment, *planned) for experiment in EXPERIMENTS.values() for planned in experiment.plan]


def each(tasks: list[Task], seeds: int, first: int = 1) -> list[tuple[str, int, int]]:
    """These tasks, with so many seeds each."""
    return [(env_id, steps, seed) for env_id, steps in tasks for seed in range(first, first + seeds)]


@contextlib.contextmanager
def script_of(run: Run) -> Iterator[ModuleType]:
    """The script of a run of ours, changed as its experiment says.

    For `UNSAFE`, it takes settings that it refuses otherwise.
    """
    script = importlib.import_module(run.experiment.script.removesuffix(".py"))
    with contextlib.ExitStack() as changes:
        if run.experiment.change:
            arms = importlib.import_module("arms")
            changed = arms.CHANGES[run.experiment.change](script)
            changes.enter_context(mock.patch.multiple(script, **changed))
        if run.experiment.name in UNSAFE:
            changes.enter_context(mock.patch.object(script, "check_settings", return_value=None))
        yield script


# Settings of Stable-Baselines3's PPO by environment: those that its RL Zoo has tuned (hyperparams/ppo.yml),
# for MuJoCo in version 2 or 4. Ant, Pusher and HumanoidStandup have its defaults, normalised, as have Hopper
# and Walker2d, where the tuned ones reach only some 700. Breakout has those of ppo_atari.py.
SB3: dict[str, dict[str, Any]] = json.loads((HERE / "sb3.json").read_text())
SB3_NOTES = {  # where the settings are not those that the RL Zoo tuned for this number of steps
    "Acrobot-v1": "settings for 1M",
    "Ant-v5": "its defaults",
    "Hopper-v5": "its defaults",
    "Walker2d-v5": "its defaults",
    "HumanoidStandup-v5": "its defaults",
    "Pusher-v5": "its defaults",
    "Humanoid-v5": "settings for 10M",
}


@dataclass(frozen=True)
class Published:
    """A return of PPO that others have published."""

    mean: float
    std: float | None  # over seeds, or over episodes of a single seed
    source: str  # in SOURCES
    kind: str  # "final": the policy after training, evaluated; "best": of many evaluations; "training"
    about: str = ""  # version of the environment, steps where they are not the task's, seeds


# The highest that we know of final policies, of others at these steps, and what is higher with longer
# training. "v3" is the version of the environment.
PUBLISHED: dict[str, list[Published]] = {
    "CartPole-v1": [Published(500.0, 0.0, "RL Zoo", "final", "at 100k, one seed")],
    "Acrobot-v1": [Published(-73.5, 18.2, "RL Zoo", "final", "at 1M, one seed")],
    "MountainCar-v0": [Published(-110.4, 19.5, "RL Zoo", "final", "one seed")],
    "LunarLander-v3": [Published(242.1, 31.8, "RL Zoo", "final", "v2, one seed")],
    "HalfCheetah-v5": [
        Published(5819.1, 663.5, "RL Zoo", "final", "v3, one seed"),
        Published(5783.9, 1244.0, "Tianshou", "best", "v3"),
        Published(6240.7, None, "SLM-Lab", "training", "10M"),
    ],
    "Hopper-v5": [
        Published(2410.4, 10.0, "RL Zoo", "final", "v3, one seed"),
        Published(3450.1, None, "XuanCe's page", "best"),
    ],
    "Walker2d-v5": [
        Published(3478.8, 821.7, "RL Zoo", "final", "v3, one seed"),
        Published(4318.6, None, "XuanCe's page", "best"),
        Published(4378.6, None, "SLM-Lab", "training", "10M"),
    ],
    "Ant-v5": [
        Published(1327.2, 451.6, "RL Zoo", "final", "v3, one seed"),
        Published(2810.7, None, "XuanCe's page", "best"),
    ],
    "Humanoid-v5": [
        Published(787.1, 193.5, "Tianshou", "best", "v3, other rewards"),
        Published(2661.3, None, "SLM-Lab", "training", "10M"),
    ],
    "HumanoidStandup-v5": [Published(150104.6, None, "SLM-Lab", "training", "4M")],
    "Swimmer-v5": [
        Published(281.6, 9.7, "RL Zoo", "final", "v3, one seed, γ = 0.9999"),
        Published(108.9, None, "XuanCe's page", "best"),
        Published(282.4, None, "SLM-Lab", "training", "4M"),
    ],
    "Reacher-v5": [Published(-4.1, 0.3, "Tianshou", "best", "v2")],
    "InvertedPendulum-v5": [Published(1000.0, 0.0, "Tianshou", "best", "v2")],
    "InvertedDoublePendulum-v5": [Published(9359.1, None, "XuanCe's page", "best")],
    "Pusher-v5": [Published(-40.4, 7.2, "CleanRL", "training", "v4")],
    "Pendulum-v1": [Published(-172.2, 104.2, "RL Zoo", "final", "one seed")],
    "PongNoFrameskip-v4": [
        Published(21.0, 0.1, "RL Zoo", "final", "at 10M, one seed, sampled actions"),
        Published(20.8, 0.2, "CleanRL's EnvPool", "training", "at 10M"),
    ],
    "BreakoutNoFrameskip-v4": [
        Published(398.0, 33.3, "RL Zoo", "final", "at 10M, one seed, sampled actions"),
        Published(430.1, 8.1, "CleanRL's EnvPool", "training", "at 10M"),
    ],
}
# XuanCe's benchmark, commit adec00d: one setting for MuJoCo, five seeds. Mean and deviation over seeds of the
# last policy, and of each seed's best of some 200 evaluations of three episodes; steps, if not the task's.
# xuance.py computes them from its files.
XUANCE: dict[str, tuple[float, float, float, float, str]] = {
    "HalfCheetah-v5": (5371.1, 719.5, 5454.9, 764.3, ""),
    "Hopper-v5": (2132.5, 1000.9, 2701.9, 1149.5, ""),
    "Walker2d-v5": (3203.1, 1156.3, 4822.6, 695.7, ""),
    "Ant-v5": (1149.0, 345.2, 1583.1, 291.0, ""),
    "Humanoid-v5": (599.4, 109.2, 983.6, 137.9, ""),
    "HumanoidStandup-v5": (88755.2, 29862.0, 122026.5, 28897.1, ""),
    "Swimmer-v5": (83.8, 58.1, 118.5, 7.2, ""),
    "Reacher-v5": (-5.3, 1.3, -2.0, 0.3, ""),
    "InvertedPendulum-v5": (1000.0, 0.0, 1000.0, 0.0, ""),
    "InvertedDoublePendulum-v5": (3355.3, 4206.1, 9351.0, 6.9, ""),
    "Pusher-v5": (-36.0, 4.1, -31.1, 3.3, ""),
    "Pendulum-v1": (-314.8, 119.5, -73.9, 53.2, "at 200k"),
    "CartPole-v1": (500.0, 0.0, 500.0, 0.0, "at 200k"),
    "Acrobot-v1": (-500.0, 0.0, -485.5, 32.5, "at 200k"),
    "MountainCar-v0": (-200.0, 0.0, -200.0, 0.0, "at 200k"),
    "LunarLander-v3": (234.1, 22.6, 260.8, 19.2, "at 300k"),
}
# What counted as the best published return when results/ablation.md's rule was written: there, it scores 1.
SCORE_1 = {
    "Pendulum-v1": -172.2,
    "HalfCheetah-v5": 5819.1,
    "InvertedDoublePendulum-v5": 9231.3,
    "Hopper-v5": 2609.3,
    "Humanoid-v5": 787.1,
    "Walker2d-v5": 4000.0,
}
# Mean return of 100 episodes of uniformly random actions, on the tasks of the ablation.
RANDOM = {
    "Pendulum-v1": -1207.6,
    "HalfCheetah-v5": -282.5,
    "InvertedDoublePendulum-v5": 49.1,
    "Hopper-v5": 16.7,
    "Humanoid-v5": 112.6,
}
SOURCES = {
    "RL Zoo": "https://github.com/DLR-RM/rl-baselines3-zoo/blob/master/benchmark.md",
    "Tianshou": "https://github.com/thu-ml/tianshou/tree/master/examples/mujoco",
    "CleanRL": "https://docs.cleanrl.dev/rl-algorithms/ppo/",
    "CleanRL's EnvPool": "https://github.com/vwxyzjn/cleanrl/tree/master/docs/benchmark",
    "SLM-Lab": "https://github.com/kengz/SLM-Lab/blob/master/docs/BENCHMARKS.md",
    "XuanCe": "https://github.com/agi-brain/xuance-benchmarks",
    "XuanCe's page": "https://github.com/agi-brain/xuance/blob/master/docs/source/documents/benchmark/mujoco/mujoco.rst",
}

# Discrete actions
ACROBOT, ACROBOT_LONG, TAXI = ("Acrobot-v1", 100_000), ("Acrobot-v1", 500_000), ("Taxi-v4", 500_000)
CLASSIC = [("CartPole-v1", 100_000), ("CartPole-v1", 500_000), ACROBOT_LONG]
CLASSIC += [("MountainCar-v0", 1_000_000), ("LunarLander-v3", 1_000_000)]
GRID = [("FrozenLake-v1", 100_000)]
CART = [("CartPole-v1", 100_000)]
SHORT = [ACROBOT, ("LunarLander-v3", 300_000)]
DETAILS = [*SHORT, ("MountainCar-v0", 300_000)]
LONG_EVALUATION = "--eval-episodes 100"
TAXI_FLAGS = "--num-envs 32 --ent-coef 0.1 --anneal-ent-coef"
A2C = "--update-epochs 1 --num-minibatches 1 --num-steps 8 --no-norm-adv"
REINFORCE = "--update-epochs 1 --num-minibatches 1 --gae-lambda 1 --no-norm-adv"
NO_BONUS = f"--ent-coef 0 {LONG_EVALUATION}"
NO_CLIP = "--clip-coef 1000"
VARIED = {  # experiments of the studies: label, tasks and flags
    "penalty-fixed": ("KL penalty, β = 1", SHORT, "--surrogate kl-penalty"),
    "penalty-adaptive": ("KL penalty, adaptive β", SHORT, "--surrogate kl-penalty --adapt kl-coef"),
    "clip-adaptive": ("adaptive clip range", SHORT, "--adapt clip-coef"),
    "no-norm-adv": ("no advantage normalisation", DETAILS, "--no-norm-adv"),
    "clip-vloss": ("value clipping", DETAILS, "--clip-vloss"),
    "no-anneal-lr": ("no learning-rate decay", DETAILS, "--no-anneal-lr"),
    "epochs-1": ("K = 1", SHORT, "--update-epochs 1"),
    "epochs-4": ("K = 4", SHORT, "--update-epochs 4"),
    "epochs-10": ("K = 10", SHORT, "--update-epochs 10"),
    "epochs-30": ("K = 30", SHORT, "--update-epochs 30"),
    "epochs-10-no-clip": ("K = 10, no clip", [ACROBOT], f"--update-epochs 10 {NO_CLIP}"),
    "epochs-30-no-clip": ("K = 30, no clip", [ACROBOT], f"--update-epochs 30 {NO_CLIP}"),
}
UNSAFE = "no-norm-adv", "epochs-10-no-clip", "epochs-30-no-clip"
EVERY = "--eval-every 100000"
FILLER_ROWS = "4c280a11394b6dec137c4da3b800bd21a33ab35e"  # the last text before resets in the same step
NOW_CLASSIC = ["now-classic", "now-acrobot", "now-taxi"]  # the table; the others are earlier ones
LAST_CLASSIC = ["classic", "classic-acrobot", "taxi"]
DISCRETE = [
    Experiment("now-classic", "the defaults", "ppo.py", each(CLASSIC, 10, 301), f"{LONG_EVALUATION} {EVERY}"),
    Experiment(
        "now-acrobot", "`--ent-coef 0`", "ppo.py", each([ACROBOT_LONG], 10, 301), f"{NO_BONUS} {EVERY}"
    ),
    Experiment("now-taxi", f"`{TAXI_FLAGS}`", "ppo.py", each([TAXI], 5, 301), f"{TAXI_FLAGS} {EVERY}"),
    Experiment(
        "classic", "the defaults", "ppo.py", each(CLASSIC, 10, 101), LONG_EVALUATION, commit=FILLER_ROWS
    ),
    Experiment(
        "classic-acrobot",
        "`--ent-coef 0`",
        "ppo.py",
        each([ACROBOT_LONG], 10, 101),
        NO_BONUS,
        commit=FILLER_ROWS,
    ),
    Experiment("taxi", f"`{TAXI_FLAGS}`", "ppo.py", each([TAXI], 5, 111), TAXI_FLAGS, commit=FILLER_ROWS),
    Experiment("sb3-rl-zoo", "Stable-Baselines3", "sb3", each(CLASSIC, 3)),
    Experiment(
        "ppo", "the defaults", "ppo.py", each(DETAILS, 8) + each([*GRID, *CART], 10)
    ),  # for the studies
    Experiment("a2c", "A2C", "ppo.py", each([*GRID, *CART], 10), A2C),
    Experiment(
        "a2c-rate", "A2C, `--learning-rate 3e-3`", "ppo.py", each(CART, 10), f"{A2C} --learning-rate 3e-3"
    ),
    Experiment("reinforce", "REINFORCE", "ppo.py", each(CART, 10), REINFORCE),
]
for name, (label, tasks, flags) in VARIED.items():
    DISCRETE.append(Experiment(name, label, "ppo.py", each(tasks, 8), flags))
EPOCHS = ["epochs-1", "epochs-4", "epochs-10", "ppo", "epochs-30"]
MANY_EPOCHS = ["epochs-10", "epochs-10-no-clip", "epochs-30", "epochs-30-no-clip"]
PENALTIES = ["ppo", "clip-adaptive", "penalty-fixed", "penalty-adaptive"]
STUDIES = {  # K is the number of epochs per rollout, 15 by default
    "epochs": Study(EPOCHS, SHORT, ("return", "kl", "clip_fraction")),
    "clip": Study(MANY_EPOCHS, [ACROBOT], ("return", "kl")),
    "a2c": Study(["ppo", "a2c"], GRID, ("return", "entropy")),
    "reinforce": Study(["ppo", "a2c-rate", "a2c", "reinforce"], CART, ("return", "kl", "entropy")),
    "penalty": Study(PENALTIES, SHORT, ("return", "kl")),
    "details": Study(["ppo", "no-norm-adv", "clip-vloss", "no-anneal-lr"], DETAILS),
}

# Continuous actions
MUJOCO = [(env_id, 1_000_000) for env_id in PUBLISHED if env_id.endswith("-v5")] + [("Pendulum-v1", 100_000)]
BEFORE_STANDUP = [task for task in MUJOCO if task[0] != "HumanoidStandup-v5"]  # it was not in earlier tables
TUNED = [task for task in MUJOCO if task[0] in SB3]
NO_FORCES = """--env-kwargs '{"include_cfrc_ext_in_observation": false}'"""
OWN_FLAGS = {  # of some tasks, besides the defaults: task, label and flags
    "ant": ("Ant-v5", "no contact forces", NO_FORCES),
    "swimmer": ("Swimmer-v5", "`--gamma 0.999`", "--gamma 0.999"),
    "inverted": ("InvertedPendulum-v5", "`--adam-beta2 0.99`", "--adam-beta2 0.99"),
    "pendulum": ("InvertedDoublePendulum-v5", "`--min-log-std -1.5`", "--min-log-std -1.5"),
}
CHEETAH_TASK, SWIMMER = ("HalfCheetah-v5", 1_000_000), ("Swimmer-v5", 1_000_000)
CONTINUOUS = [Experiment("sb3-rl-zoo-mujoco", "Stable-Baselines3", "sb3", each(TUNED, 3))]
LAST = ["continuous", "continuous-ant", "continuous-swimmer", "continuous-inverted"]
ONCE = ["once", "once-ant", "once-swimmer"]  # advantages were computed once per rollout; not all were run
NOT_RECOMPUTED = "5a712e4e1c3508fce94d554ee00592ef475852db"
BEFORE = ["before", "before-ant", "before-swimmer", "before-pendulum"]  # the last table
EARLIER = "9bf2a203a43686678f53cbd296a8d8b3044fe885"
NOW = ["now-continuous", "now-ant", "now-swimmer", "now-inverted"]  # the table; the others are earlier ones
NOW_PLAN = each(MUJOCO, 5, 1301) + each([CHEETAH_TASK], 5, 1306)
# Five seeds of Ant had 2,417 to 2,735, and those of the earlier text at most 1,881: ten show more.
NOW_PLAN += each([("Ant-v5", 1_000_000)], 5, 1306)
CONTINUOUS.append(Experiment(NOW[0], "the defaults", "ppo_continuous.py", NOW_PLAN, f"--compile {EVERY}"))
for name in NOW[1:]:
    env_id, label, flags = OWN_FLAGS[name.removeprefix("now-")]
    plan, flags = each([(env_id, 1_000_000)], 5, 1301), f"--compile {EVERY} {flags}"
    CONTINUOUS.append(Experiment(name, label, "ppo_continuous.py", plan, flags))
for names, first, commit in ((LAST, 801, FILLER_ROWS), (ONCE, 601, NOT_RECOMPUTED), (BEFORE, 101, EARLIER)):
    plan = each(BEFORE_STANDUP, 5, first)
    plan += each([CHEETAH_TASK], 5, first + 5)  # ten seeds where they differ most
    defaults = Experiment(names[0], "the defaults", "ppo_continuous.py", plan, "--compile", commit=commit)
    CONTINUOUS.append(defaults)
    for name in names[1:]:
        env_id, label, flags = OWN_FLAGS[name.rpartition("-")[2]]
        plan, flags = each([(env_id, 1_000_000)], 5, first), f"--compile {flags}"
        CONTINUOUS.append(Experiment(name, label, "ppo_continuous.py", plan, flags, commit=commit))

# One change at a time from the defaults that ppo_continuous.py had: results/ablation.md has the rule and the
# table. Each run names all parts that are compared; the learning rate was 3e-4 by default.
ABLATED = "f509711b78deb33190683d52eeb0051e53ac4fc2"
PARTS = "--activation elu --adam-beta2 0.99 --recompute-advantages --adapt learning-rate"
PARTS += " --init-log-std -0.5 --min-log-std -2.3 --ent-coef 0"
CAME_IN = "--init-log-std -1 --learning-rate 6e-4 --min-log-std -1.5"
PLAINER = f"{CAME_IN} --adam-beta2 0.999 --no-recompute-advantages"
CHANGES = {  # name: what replaces the part
    "ablation": "",
    "ablation-beta2": "--adam-beta2 0.999",
    "ablation-no-recompute": "--no-recompute-advantages",
    "ablation-no-adapt": "--adapt none",
    "ablation-no-floor": "--min-log-std -20",
    "ablation-high-floor": "--min-log-std -1.5",
    "ablation-init-0": "--init-log-std 0",
    "ablation-init-075": "--init-log-std -0.75",
    "ablation-init-1": "--init-log-std -1",
    "ablation-init-1-rate-6": "--init-log-std -1 --learning-rate 6e-4",
    "ablation-init-1-rate-10": "--init-log-std -1 --learning-rate 1e-3",
    "ablation-init-1-rate-6-high-floor": CAME_IN,
    "ablation-plainer": PLAINER,
    "ablation-plainer-no-adapt": f"{PLAINER} --adapt none",
    "ablation-plainer-tanh": f"{PLAINER} --activation tanh",
    "ablation-bonus": "--ent-coef 0.001",
    "ablation-tanh": "--activation tanh",
    "ablation-lambda": "--gae-lambda 0.9",
}
LAST_CHANGE_OF = {  # what these are compared with, too
    "ablation-plainer": "ablation-init-1-rate-6-high-floor",
    "ablation-plainer-tanh": "ablation-plainer",
}
ABLATION_TASKS = [(f"{name}-v5", 1_000_000) for name in ("HalfCheetah", "InvertedDoublePendulum", "Hopper")]
ABLATION_TASKS = [("Pendulum-v1", 100_000), *ABLATION_TASKS, ("Humanoid-v5", 1_000_000)]
LAST_SEED = {  # on HalfCheetah, to see whether it has low seeds; else 503
    "ablation": 510,
    "ablation-high-floor": 504,
    "ablation-bonus": 504,
    "ablation-init-075": 506,
    "ablation-init-1": 510,
    "ablation-init-1-rate-6": 510,
    "ablation-init-1-rate-10": 510,
    "ablation-plainer": 510,
    "ablation-plainer-tanh": 510,
}
ABLATION = []
for name, change in CHANGES.items():
    label, flags = f"`{change}`" if change else "the defaults before", f"--compile {PARTS} {change}".strip()
    label += ": what came of it" * (change == PLAINER)
    plan = each(ABLATION_TASKS, 3, first=501)
    plan += each([CHEETAH_TASK], LAST_SEED.get(name, 503) - 503, first=504)
    ABLATION.append(Experiment(name, label, "ppo_continuous.py", plan, flags, commit=ABLATED))

# results/ablation.md: "A second comparison", of the learning rate, given up after a seed, then of recomputed
# advantages; "A third comparison", of β2
AGAIN_TASKS = [("Walker2d-v5", 1_000_000), ("Hopper-v5", 1_000_000)]
AGAIN = []
for name, start in (("again-1", "-1"), ("again-05", "-0.5")):
    label = f"`--learning-rate 3e-4 --init-log-std {start} --min-log-std -1.5`"
    flags = f"--compile {label.strip('`')}"
    plan = each(AGAIN_TASKS, 1, first=701)
    AGAIN.append(Experiment(name, label, "ppo_continuous.py", plan, flags, commit=NOT_RECOMPUTED))
    plan, flags = each([SWIMMER], 1, first=701), f"{flags} --gamma 0.999"
    AGAIN.append(
        Experiment(f"{name}-swimmer", label, "ppo_continuous.py", plan, flags, commit=NOT_RECOMPUTED)
    )
RECOMPUTE_TASKS = [("Pendulum-v1", 100_000), *AGAIN_TASKS]
for name, tasks, flags in (
    ("recompute", RECOMPUTE_TASKS, "--compile"),
    ("recompute-swimmer", [SWIMMER], "--compile --gamma 0.999"),
):
    label, plan = "recomputed advantages", each(tasks, 3, first=701)
    AGAIN.append(Experiment(name, label, "ppo_continuous.py", plan, flags))
BETA2_TASKS = [*RECOMPUTE_TASKS, ("InvertedPendulum-v5", 1_000_000), ("Humanoid-v5", 1_000_000)]
for name, tasks, flags in (("beta2", BETA2_TASKS, ""), ("beta2-swimmer", [SWIMMER], " --gamma 0.999")):
    plan, flags = each(tasks, 3, first=901), f"--compile --adam-beta2 0.99{flags}"
    AGAIN.append(Experiment(name, "`--adam-beta2 0.99`", "ppo_continuous.py", plan, flags))

# results/one_setting.md: one setting for all of MuJoCo
ONE_TASKS = [("HalfCheetah-v5", 1_000_000), ("Hopper-v5", 1_000_000)]
ONE_ARMS = {  # label in the table, flags, and the change of the script
    "one": ("the defaults", "", "averaged"),
    "one-gamma-995": ("γ = 0.995", "--gamma 0.995", ""),
    "one-gamma-997": ("γ = 0.997", "--gamma 0.997", ""),
    "one-gamma-995-popart": ("γ = 0.995, normalised targets", "--gamma 0.995", "popart"),
    "one-gamma-997-popart": ("γ = 0.997, normalised targets", "--gamma 0.997", "popart"),
    "one-rising-horizon": ("γ from 0.99 to 0.999", "", "rising-horizon"),
    "one-2x1024": ("2 environments, 1,024 steps", "--num-envs 2 --num-steps 1024", ""),
    "one-1x2048": ("1 environment, 2,048 steps", "--num-envs 1 --num-steps 2048", ""),
    "one-coloured-noise": ("coloured noise", "", "coloured-noise"),
    "one-equal-betas": ("β1 = β2 = 0.99", "", "equal-betas"),
    "one-relative-time": ("Adam's time anew in each iteration", "", "relative-time"),
    "one-beta-policy": ("Beta policy", "", "beta-policy"),
}
ONE_THIRD = ["one", "one-equal-betas", "one-1x2048"]  # those with a third seed in stage 1, by the rule
ONE_SWIMMER = ["one-gamma-997-popart", "one-rising-horizon"]  # with a long horizon: on Swimmer, too
ONE_FIVE = [*ONE_TASKS, ("Walker2d-v5", 1_000_000), SWIMMER, ("Ant-v5", 1_000_000)]
ONE_STAGE_2 = {"one": 3, "one-gamma-997-popart": 3}  # arms that went on, and their seeds from 1101
ONE = []
for name, (label, own, change) in ONE_ARMS.items():
    plan, flags = each(ONE_TASKS, 3 if name in ONE_THIRD else 2, 1001), "--compile --eval-episodes 20"
    plan += each([SWIMMER], 3, 1001) if name in ONE_SWIMMER else []
    plan += each(ONE_FIVE[:-1], ONE_STAGE_2.get(name, 0), 1101)
    ONE.append(Experiment(name, label, "ppo_continuous.py", plan, f"{flags} {own}".strip(), change=change))
    plan, flags = each(ONE_FIVE[-1:], ONE_STAGE_2.get(name, 0), 1101), f"{flags} {NO_FORCES} {own}".strip()
    ONE.append(Experiment(f"{name}-ant", label, "ppo_continuous.py", plan, flags, change=change))

# Networks, with the same script: layers of tanh, and a wider critic; training returns after 300,000 steps
NETWORK_TASKS = [(f"{name}-v5", 300_000) for name in ("HalfCheetah", "Hopper", "Walker2d")]
NETWORKS = []
for name, label, flags in (
    ("networks", "the defaults before", "--compile"),
    ("networks-tanh", "`--activation tanh`", "--compile --activation tanh"),
    ("networks-wide-critic", "256 units in the critic alone (edited)", "--compile"),
):
    plan = each(NETWORK_TASKS, 3)
    NETWORKS.append(Experiment(name, label, "ppo_continuous.py", plan, flags, commit=ABLATED))

# Plain PPO: the settings of others, as far as they are not our defaults
NOT_OURS = "--learning-rate 3e-4 --norm-adv --no-recompute-advantages --adapt none --activation tanh"
NOT_OURS += " --no-scale-actions --init-log-std 0 --min-log-std -20"
ROLLOUT = "--num-envs 1 --num-steps 2048"
UNCLIPPED = "--max-grad-norm inf"
RAW = "--no-norm-obs --no-norm-rewards"
SB3_DISCRETE = "--num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 --no-anneal-lr --gae-lambda 0.95"
CLEANRL_DISCRETE = "--num-envs 4 --num-steps 128 --update-epochs 4 --learning-rate 2.5e-4 --gae-lambda 0.95"
PLAIN = {  # by script and whose settings they are
    ("ppo.py", "CleanRL"): f"{CLEANRL_DISCRETE} --clip-vloss {RAW}",
    ("ppo.py", "Stable-Baselines3"): f"{ROLLOUT} {SB3_DISCRETE} --vf-coef 1 --ent-coef 0 {RAW}",
    ("ppo_continuous.py", "CleanRL"): f"{ROLLOUT} --vf-coef 0.5 --clip-vloss {NOT_OURS}",
    ("ppo_continuous.py", "Stable-Baselines3"): f"{ROLLOUT} --no-anneal-lr --vf-coef 1 {NOT_OURS} {RAW}",
    ("ppo_continuous.py", "the paper"): f"{ROLLOUT} {UNCLIPPED} --vf-coef 2 {NOT_OURS} --no-norm-rewards",
}
PLAIN_TASKS = {
    "ppo.py": [("CartPole-v1", 500_000), ("Acrobot-v1", 500_000)],
    "ppo_continuous.py": [(f"{name}-v5", 1_000_000) for name in ("HalfCheetah", "Hopper", "Walker2d")],
}
CLEANRL_RETURNS = {  # as CleanRL's pages have them: in training, of versions 1 and 4
    "CartPole-v1": (490.0, 6.1),
    "Acrobot-v1": (-86.4, 1.3),
    "HalfCheetah-v5": (1442.6, 46.0),
    "Hopper-v5": (2382.9, 271.7),
    "Walker2d-v5": (2288.0, 571.8),
}
PLAINS, PLAINS_BEFORE = [], []
for (script, whose), flags in PLAIN.items():
    name = f"plain-{script.removesuffix('.py')}-{whose.removeprefix('the ').lower()}"
    plan, flags = PLAIN_TASKS[script], f"--compile {flags}"
    seeds = 5 if script == "ppo_continuous.py" else 2  # two say little where returns have two modes
    PLAINS.append(Experiment(f"now-{name}", whose, script, each(plan, seeds, 301), flags))
    PLAINS_BEFORE.append(Experiment(name, whose, script, each(plan, 2), flags, commit=FILLER_ROWS))

# Atari
PONG, BREAKOUT = ("PongNoFrameskip-v4", 2_000_000), ("BreakoutNoFrameskip-v4", 10_000_000)
BREAKOUT_SHORT, BREAKOUT_SB3 = ("BreakoutNoFrameskip-v4", 500_000), ("BreakoutNoFrameskip-v4", 250_000)
BREAKOUTS = each([BREAKOUT_SHORT, BREAKOUT], 1)
ONE_CORE = "--bfloat16 --num-threads 1 --eval-episodes 100"
PONG_FLAGS = "--learning-rate 5e-4 --num-minibatches 8"
ATARI = [
    Experiment("now-pong", f"`{PONG_FLAGS}`", "ppo_atari.py", each([PONG], 3), f"{ONE_CORE} {PONG_FLAGS}"),
    Experiment("now-breakout", "the defaults", "ppo_atari.py", BREAKOUTS, ONE_CORE),
    Experiment(
        "atari-pong",
        f"`{PONG_FLAGS}`",
        "ppo_atari.py",
        each([PONG], 3),
        f"{ONE_CORE} {PONG_FLAGS}",
        commit=FILLER_ROWS,
    ),
    Experiment("atari-breakout", "the defaults", "ppo_atari.py", BREAKOUTS, ONE_CORE, commit=FILLER_ROWS),
    Experiment("atari-sb3", "Stable-Baselines3", "sb3", each([BREAKOUT_SB3], 1)),
]
NOW_ATARI, LAST_ATARI = ["now-pong", "now-breakout"], ["atari-pong", "atari-breakout"]

# Thousands of environments
PENDULUMS = ("Pendulum", 1_000_000)
BALANCE = ("CartpoleBalance", 300_000)
ON_CPU = "--device cpu"
SMALLER = f"{ON_CPU} --num-envs 256 --num-steps 32 --num-minibatches 16 --update-epochs 8 --gamma 0.995"
GPU = []
for name, label, task, flags in (
    ("gpu", "the defaults", PENDULUMS, ON_CPU),
    ("gpu-kl", "`--desired-kl 0.01`", PENDULUMS, f"{ON_CPU} --desired-kl 0.01"),
    ("gpu-balance", "the defaults, 256 environments", BALANCE, f"{SMALLER} --hidden-sizes 256 256"),
    ("gpu-balance-kl", "`--desired-kl 0.01`", BALANCE, f"{SMALLER} --hidden-sizes 256 256 --desired-kl 0.01"),
):
    GPU.append(Experiment(name, label, "ppo_gpu.py", each([task], 5), flags))

# Tasks that need a memory: steps, and the return that counts as solved
MEMORY_TASKS = {
    "Cue-v0": (100_000, 0.95),
    "PositionOnlyAcrobot-v1": (150_000, -100),
    "PositionOnlyCartPole-v1": (100_000, 475),
    "popgym:popgym-RepeatPreviousEasy-v0": (300_000, 0.9),
}
MEMORY_RUNS = each([(task, steps) for task, (steps, _) in MEMORY_TASKS.items()], 3)
SB3_RUNS = [
    run for run in MEMORY_RUNS if "Repeat" not in run[0] or run[2] == 1
]  # a run there takes 23 minutes
CARTPOLE_RUNS = [run for run in MEMORY_RUNS if "CartPole" in run[0]]
MEMORY = [
    Experiment("memory-lstm", "`ppo_lstm.py`", "ppo_lstm.py", MEMORY_RUNS, program="memory.py"),
    Experiment("memory-ppo", "`ppo.py`", "ppo.py", [("Cue-v0", 100_000, 1)], program="memory.py"),
    Experiment("memory-sb3", "RecurrentPPO", "sb3-contrib", SB3_RUNS, program="memory.py"),
    Experiment(
        "memory-sb3-ours", "RecurrentPPO with our settings", "sb3-contrib", CARTPOLE_RUNS, program="memory.py"
    ),
]

# Environments that reset in the same step, beside runs of the script before, with filler rows
CHEETAH_SHORT, HOPPER, LUNAR = ("HalfCheetah-v5", 300_000), ("Hopper-v5", 1_000_000), CLASSIC[-1]
LSTM_TASKS = [("PositionOnlyCartPole-v1", 100_000), ("Cue-v0", 100_000)]
DISCRETE_TASKS = [task for task in CLASSIC if task != ("CartPole-v1", 500_000)]
BEFORE_DISCRETE = each([ACROBOT_LONG], 10, first=201) + each([LUNAR], 5, first=201)
DISCRETE_RUNS = each(DISCRETE_TASKS, 5, first=201) + each([ACROBOT_LONG, LUNAR], 5, first=206)
MUJOCO_RUNS = each([HOPPER], 5, first=901) + each([CHEETAH_SHORT], 10)
LAYOUT = []
for name, script, plan, flags, commit in (
    ("same-step", "ppo.py", DISCRETE_RUNS, LONG_EVALUATION, ""),
    ("same-step-mujoco", "ppo_continuous.py", MUJOCO_RUNS, "--compile", ""),
    ("next-step", "ppo.py", BEFORE_DISCRETE, LONG_EVALUATION, FILLER_ROWS),
    ("next-step-mujoco", "ppo_continuous.py", each([CHEETAH_SHORT], 10), "--compile", FILLER_ROWS),
):
    LAYOUT.append(Experiment(name, "the defaults", script, plan, flags, commit=commit))
plan = each(LSTM_TASKS, 3, first=11)
LAYOUT.append(Experiment("same-step-lstm", "the defaults", "ppo_lstm.py", plan, program="memory.py"))
BOTH_LAYOUTS = [  # experiments before and now, and their tasks
    ("classic", "same-step", DISCRETE_TASKS),
    ("next-step", "same-step", [ACROBOT_LONG, LUNAR]),
    ("continuous", "same-step-mujoco", [HOPPER]),
    ("next-step-mujoco", "same-step-mujoco", [CHEETAH_SHORT]),
    ("memory-lstm", "same-step-lstm", LSTM_TASKS),
]

# Return against minutes
TIMED = [("CartPole-v1", 100_000), ("LunarLander-v3", 1_000_000), ("HalfCheetah-v5", 300_000)]
CHEETAH_RUNS = each(TIMED[2:], 3)
MINUTES = [
    Experiment("minutes-ours", "ours", "ppo.py", each(TIMED[:2], 3), program="minutes.py"),
    Experiment(
        "minutes-ours-compiled", "ours", "ppo_continuous.py", CHEETAH_RUNS, "--compile", program="minutes.py"
    ),
    Experiment("minutes-sb3", "Stable-Baselines3", "sb3", each(TIMED, 3), program="minutes.py"),
    Experiment("minutes-cleanrl", "CleanRL", "cleanrl", each(TIMED, 3), program="minutes.py"),
]


@dataclass(frozen=True)
class Earlier:
    """A table of earlier runs, with which those that count now are compared in a sentence."""

    about: str
    now: list[str]  # experiments, as `newest` of report.py takes them
    names: list[str]  # those of then, with the same labels
    tasks: list[Task]


FILLERS = "With filler rows (commit 4c280a1"
EARLIER_TABLES = {
    "earlier-classic": [
        Earlier(
            f"{FILLERS}, seeds 101 to 115), the same defaults",
            NOW_CLASSIC + LAST_CLASSIC,
            LAST_CLASSIC,
            [*CLASSIC, TAXI],
        )
    ],
    "earlier-mujoco": [
        Earlier(f"{FILLERS}, seeds 801 to 810), the same defaults", NOW + LAST, LAST, MUJOCO),
        Earlier(
            "Advantages computed once per rollout (commit 5a712e4, seeds 601 to 610)",
            NOW + LAST,
            ONCE,
            MUJOCO,
        ),
        Earlier("The defaults before (commit 9bf2a20, seeds 101 to 110)", NOW + LAST, BEFORE, MUJOCO),
    ],
    "earlier-plain": [
        Earlier(
            f"{FILLERS}, seeds 1 and 2), the same settings",
            [experiment.name for experiment in PLAINS],
            [experiment.name for experiment in PLAINS_BEFORE],
            [task for tasks in PLAIN_TASKS.values() for task in tasks],
        )
    ],
    "earlier-atari": [
        Earlier(
            f"{FILLERS}, seeds 1 to 3), the same settings",
            NOW_ATARI + LAST_ATARI,
            LAST_ATARI,
            [PONG],  # Breakout has one seed, so no interval
        )
    ],
}

# Language models, beside TRL (against_trl.py)
TRL_LOSSES = {"constant": "dr_grpo", "token-mean": "dapo", "sequence-mean": "grpo"}  # our name, TRL's

ALL = (
    DISCRETE
    + CONTINUOUS
    + ABLATION
    + AGAIN
    + ONE
    + NETWORKS
    + PLAINS
    + PLAINS_BEFORE
    + ATARI
    + GPU
    + MEMORY
    + LAYOUT
    + MINUTES
)
EXPERIMENTS = {experiment.name: experiment for experiment in ALL}
