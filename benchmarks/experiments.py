"""The list of experiments. `run.py` runs them; `report.py` and `figures.py` show their results.

To measure something of your own, add an `Experiment` and run `python benchmarks/run.py --only its-name`.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
Task = tuple[str, int]  # environment and steps: runs of the same task can be compared


@dataclass(frozen=True)
class Experiment:
    """A script with some flags, on some tasks, with several seeds."""

    name: str
    label: str  # in tables and figures
    script: str  # "ppo.py", or "sb3" for Stable-Baselines3
    plan: list[tuple[str, int, int]]  # environment, steps and seed of each run
    flags: str = ""  # for a script of ours
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # for Stable-Baselines3


@dataclass(frozen=True)
class Study:
    """Experiments side by side: a table, and a figure with a column per task and a row per quantity."""

    title: str
    experiments: list[str]  # their names
    tasks: list[Task]
    quantities: tuple[str, ...] = ("return",)


@dataclass(frozen=True)
class Run:
    """One training run: an experiment on one task with one seed."""

    experiment: Experiment
    env_id: str
    steps: int
    seed: int

    @property
    def name(self) -> str:
        """Identifies the run; also the path of its result."""
        env = self.env_id.rpartition(":")[2].replace("/", "-")
        return f"{self.experiment.name}/{env}_{self.steps}/{self.seed}"

    @property
    def task(self) -> Task:
        """Environment, without the module or namespace that registers it, and steps."""
        return self.env_id.rpartition("/")[2], self.steps

    @property
    def path(self) -> Path:
        """The file with its result."""
        return RESULTS / f"{self.name}.json"

    @property
    def flags(self) -> list[str]:
        """The flags of a script of ours."""
        own = ["--env-id", self.env_id, "--total-timesteps", str(self.steps), "--seed", str(self.seed)]
        return [*own, *shlex.split(self.experiment.flags)]


def runs() -> list[Run]:
    """All runs."""
    return [Run(experiment, *planned) for experiment in EXPERIMENTS.values() for planned in experiment.plan]


def each(tasks: list[Task], seeds: int, first: int = 1) -> list[tuple[str, int, int]]:
    """These tasks, with so many seeds each."""
    return [(env_id, steps, seed) for env_id, steps in tasks for seed in range(first, first + seeds)]


# The best return published for PPO, as far as we know: mean, spread, and its source or steps. Classic control
# and Atari are from Stable-Baselines3's RL Zoo, with settings tuned for each environment, and from CleanRL.
PUBLISHED: dict[str, tuple[float, float | None, str]] = {
    "CartPole-v1": (500.0, 0.0, "at 100k"),
    "Acrobot-v1": (-73.5, 18.2, "at 1M"),
    "MountainCar-v0": (-110.4, 19.5, "at 1M"),
    "LunarLander-v3": (242.1, 31.8, "at 1M, v2"),
    "HalfCheetah-v5": (5819.1, 663.5, "(RL Zoo, v3)"),
    "Hopper-v5": (2609.3, 700.8, "(Tianshou, v3)"),
    "Walker2d-v5": (4000.0, None, "(ikostrikov)"),
    "Ant-v5": (3258.4, 1079.3, "(Tianshou, v3)"),
    "Humanoid-v5": (787.1, 193.5, "(Tianshou, v3)"),
    "Swimmer-v5": (281.6, 9.7, "(RL Zoo, v3)"),
    "Reacher-v5": (-4.1, 0.3, "(Tianshou, v2)"),
    "InvertedPendulum-v5": (1000.0, 0.0, "(Tianshou, v2)"),
    "InvertedDoublePendulum-v5": (9231.3, 270.4, "(Tianshou, v2)"),
    "Pusher-v5": (-40.4, 7.2, "(CleanRL, v4)"),
    "Pendulum-v1": (-172.2, 104.2, "(RL Zoo, v1)"),
    "PongNoFrameskip-v4": (21.0, 0.1, "at 10M (RL Zoo)"),
    "BreakoutNoFrameskip-v4": (414.7, 28.1, "at 10M (CleanRL)"),
    "BeamRiderNoFrameskip-v4": (3397.0, 1662.4, "at 10M (RL Zoo)"),
    "QbertNoFrameskip-v4": (15627.1, 3313.5, "at 10M (RL Zoo)"),
    "SpaceInvadersNoFrameskip-v4": (960.3, 425.4, "at 10M (RL Zoo)"),
}
VARIANTS = {  # of the scripts in the measurements of speed, with their flags
    "ours": "",
    "compiled": "--compile",
    "workers": "--compile --async-envs",
    "bfloat16": "--bfloat16",
}

# ------------------------------------------------- Discrete actions ----------------------------------------

# The settings that Stable-Baselines3's RL Zoo has tuned for each environment (hyperparams/ppo.yml).
RL_ZOO: dict[str, dict[str, Any]] = {
    "CartPole-v1": {
        "n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20,
        "learning_rate": "linear 0.001", "clip_range": "linear 0.2",
    },
    "Acrobot-v1": {"normalize": True, "n_envs": 16, "n_steps": 256, "gae_lambda": 0.94, "n_epochs": 4},
    "MountainCar-v0": {"normalize": True, "n_envs": 16, "n_steps": 16, "gae_lambda": 0.98, "n_epochs": 4},
    "LunarLander-v3": {
        "n_envs": 16, "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98, "gamma": 0.999, "n_epochs": 4,
        "ent_coef": 0.01,
    },
}  # fmt: skip
ACROBOT, ACROBOT_LONG = [("Acrobot-v1", 100_000)], [("Acrobot-v1", 500_000)]
CLASSIC = [("CartPole-v1", 100_000), ("CartPole-v1", 500_000), *ACROBOT_LONG]
CLASSIC += [("MountainCar-v0", 1_000_000), ("LunarLander-v3", 1_000_000)]
GRID = [("FrozenLake-v1", 100_000)]
SHORT = [*ACROBOT, ("LunarLander-v3", 300_000)]
DETAILS = [*SHORT, ("MountainCar-v0", 300_000)]
DEATHS = [(f"time_limit_as_death:TimeLimitAsDeath/{env_id}", steps) for env_id, steps in DETAILS]
LONG_EVALUATION = "--eval-episodes 100"
TAXI_FLAGS = "--num-envs 32 --ent-coef 0.1 --anneal-ent-coef"
A2C = "--update-epochs 1 --num-minibatches 1 --num-steps 8 --no-norm-adv"
ADAPTIVE_PENALTY = "--surrogate kl-penalty --adapt kl-coef"

DISCRETE = [
    Experiment("classic", "the defaults", "ppo.py", each(CLASSIC, 10, first=101), LONG_EVALUATION),
    Experiment(
        "classic-acrobot",
        "`--ent-coef 0`",
        "ppo.py",
        each(ACROBOT_LONG, 10, first=101),
        f"--ent-coef 0 {LONG_EVALUATION}",
    ),
    Experiment("taxi", f"`{TAXI_FLAGS}`", "ppo.py", each([("Taxi-v4", 500_000)], 5, first=111), TAXI_FLAGS),
    Experiment("sb3-rl-zoo", "Stable-Baselines3", "sb3", each(CLASSIC, 3), settings=RL_ZOO),
    Experiment("ppo", "the defaults", "ppo.py", each(DETAILS, 8) + each(GRID, 10)),  # for the studies
    Experiment("a2c", "A2C", "ppo.py", each(GRID, 10), A2C),
    Experiment("penalty-fixed", "KL penalty, β = 1", "ppo.py", each(SHORT, 8), "--surrogate kl-penalty"),
    Experiment("penalty-adaptive", "KL penalty, adaptive β", "ppo.py", each(SHORT, 8), ADAPTIVE_PENALTY),
    Experiment("clip-adaptive", "adaptive clip range", "ppo.py", each(SHORT, 8), "--adapt clip-coef"),
    Experiment("no-norm-adv", "no advantage normalisation", "ppo.py", each(DETAILS, 8), "--no-norm-adv"),
    Experiment("clip-vloss", "value clipping", "ppo.py", each(DETAILS, 8), "--clip-vloss"),
    Experiment("no-anneal-lr", "no learning-rate decay", "ppo.py", each(DETAILS, 8), "--no-anneal-lr"),
    Experiment("time-limit-as-death", "time limits as deaths", "ppo.py", each(DEATHS, 8)),
]
for k in (1, 4, 10, 30):
    DISCRETE.append(Experiment(f"epochs-{k}", f"K = {k}", "ppo.py", each(SHORT, 8), f"--update-epochs {k}"))
for k in (10, 30):
    flags = f"--update-epochs {k} --clip-coef 1000 --allow-unsafe"
    DISCRETE.append(Experiment(f"epochs-{k}-no-clip", f"K = {k}, no clip", "ppo.py", each(ACROBOT, 8), flags))
STUDIES = {  # K is the number of epochs per rollout, 15 by default
    "epochs": Study(
        "Epochs per rollout (K = 15 by default)",
        ["epochs-1", "epochs-4", "epochs-10", "ppo", "epochs-30"],
        SHORT,
        ("return", "kl", "clip_fraction"),
    ),
    "clip": Study(
        "Many epochs (K), with and without the clip",
        ["epochs-10", "epochs-10-no-clip", "epochs-30", "epochs-30-no-clip"],
        ACROBOT,
        ("return", "kl"),
    ),
    "a2c": Study("PPO and A2C on the 4×4 grid world", ["ppo", "a2c"], GRID, ("return", "entropy")),
    "penalty": Study(
        "Clipping and KL penalties",
        ["ppo", "clip-adaptive", "penalty-fixed", "penalty-adaptive"],
        SHORT,
        ("return", "kl"),
    ),
    "details": Study(
        "One detail changed at a time",
        ["ppo", "no-norm-adv", "clip-vloss", "no-anneal-lr", "time-limit-as-death"],
        DETAILS,
    ),
}

# ------------------------------------------------- Continuous actions --------------------------------------

MUJOCO = [(env_id, 1_000_000) for env_id in PUBLISHED if env_id.endswith("-v5")]
MUJOCO += [("Pendulum-v1", 100_000)]
LOCOMOTION = [("HalfCheetah-v5", 300_000), ("Hopper-v5", 300_000), ("Walker2d-v5", 300_000)]
ABLATION = {  # label and flags, by name of the experiment
    "mujoco-but-no-stagger": ("time limits in unison", "--no-stagger"),
    "mujoco-but-fixed-lr": ("learning rate not adapted to the KL", "--adapt none"),
    "mujoco-but-no-floor": ("log std without a limit", "--min-log-std -20"),
    "mujoco-but-std-1": ("initial log std 0", "--init-log-std 0"),
    "mujoco-but-std-0.37": ("initial log std -1", "--init-log-std -1"),
    "mujoco-but-norm-adv": ("advantages normalised in each minibatch", "--norm-adv"),
    "mujoco-but-no-recompute": ("advantages not recomputed", "--no-recompute-advantages"),
    "mujoco-but-vf-coef-0.5": ("value coefficient 0.5", "--vf-coef 0.5"),
    "mujoco-but-clip-vloss": ("value clipping", "--clip-vloss"),
    "mujoco-but-envs-32": ("32 × 64 steps", "--num-envs 32 --num-steps 64"),
    "mujoco-but-minibatch-256": ("minibatches of 256", "--num-minibatches 8"),
    "mujoco-but-gamma-0.98": ("γ = 0.98", "--gamma 0.98"),
    "mujoco-but-lambda-0.9": ("λ = 0.9", "--gae-lambda 0.9"),
    "mujoco-but-lr-1e-4": ("learning rate 1e-4", "--learning-rate 1e-4"),
    "mujoco-but-no-anneal-lr": ("no learning-rate decay", "--no-anneal-lr"),
    "mujoco-but-width-256": ("networks of 256-256", "--hidden-size 256"),
}
ABLATION_SEEDS = 3
SCREENING = each(LOCOMOTION, ABLATION_SEEDS, first=11)  # other seeds than those of the table of returns
# The settings that the RL Zoo has tuned for version 4; Ant's are Stable-Baselines3's defaults, normalised.
WIDE = {"net_arch": {"pi": [256, 256], "vf": [256, 256]}, "activation_fn": "ReLU", "log_std_init": -2}
TUNED = {"normalize": True, "n_envs": 1, "n_steps": 512, "policy_kwargs": WIDE | {"ortho_init": False}}
RL_ZOO_MUJOCO: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": TUNED | {
        "batch_size": 64, "gamma": 0.98, "learning_rate": 2.0633e-05, "ent_coef": 0.000401762,
        "clip_range": 0.1, "n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096,
    },
    "Hopper-v5": TUNED | {
        "batch_size": 32, "gamma": 0.999, "learning_rate": 9.80828e-05, "ent_coef": 0.00229519, "n_epochs": 5,
        "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671,
    },
    "Walker2d-v5": TUNED | {
        "batch_size": 32, "learning_rate": 5.05041e-05, "ent_coef": 0.000585045, "clip_range": 0.1,
        "n_epochs": 20, "max_grad_norm": 1, "vf_coef": 0.871923,
    },
    "Ant-v5": {"normalize": True, "n_envs": 1},
    "Swimmer-v5": {
        "normalize": True, "n_envs": 4, "n_steps": 1024, "batch_size": 256, "gamma": 0.9999,
        "learning_rate": 6e-4, "gae_lambda": 0.98,
    },
    "Humanoid-v5": TUNED | {
        "batch_size": 256, "gamma": 0.95, "learning_rate": 3.56987e-05, "ent_coef": 0.00238306,
        "clip_range": 0.3, "n_epochs": 5, "gae_lambda": 0.9, "max_grad_norm": 2, "vf_coef": 0.431892,
    },
}  # fmt: skip
SB3_MUJOCO = each([(env_id, 1_000_000) for env_id in RL_ZOO_MUJOCO], 3)
NO_FORCES = """--env-kwargs '{"include_cfrc_ext_in_observation": false}'"""
SWIMMER_FLAGS = "--gamma 0.9999 --gae-lambda 0.98"
OWN_FLAGS = {  # of three tasks, besides the defaults: task, label and flags, by name of the experiment
    "continuous-ant": ("Ant-v5", "no contact forces", NO_FORCES),
    "continuous-swimmer": ("Swimmer-v5", f"`{SWIMMER_FLAGS}`", SWIMMER_FLAGS),
    "continuous-pendulum": ("InvertedDoublePendulum-v5", "`--min-log-std -1.5`", "--min-log-std -1.5"),
}
CONTINUOUS = [
    Experiment("continuous", "the defaults", "ppo_continuous.py", each(MUJOCO, 5, first=101), "--compile"),
    Experiment("mujoco", "the defaults", "ppo_continuous.py", SCREENING, "--compile"),
]
CONTINUOUS += [
    Experiment(
        name,
        label,
        "ppo_continuous.py",
        each([(env_id, 1_000_000)], 5, first=101),
        f"--compile {flags}",
    )
    for name, (env_id, label, flags) in OWN_FLAGS.items()
]
CONTINUOUS += [
    Experiment(name, label, "ppo_continuous.py", SCREENING, f"--compile {flags}")
    for name, (label, flags) in ABLATION.items()
]
CONTINUOUS += [
    Experiment("sb3-rl-zoo-mujoco", "Stable-Baselines3", "sb3", SB3_MUJOCO, settings=RL_ZOO_MUJOCO)
]

# ------------------------------------------------- Atari ---------------------------------------------------

PONG, BREAKOUT = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"
GAMES = [(env_id, 10_000_000) for env_id in PUBLISHED if "NoFrameskip" in env_id]
SB3_ATARI: dict[str, Any] = {
    "n_envs": 8, "n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": "linear 0.00025",
    "clip_range": 0.1, "ent_coef": 0.01, "vf_coef": 0.25, "scheduled": 500_000,
}  # fmt: skip
ONE_CORE = "--bfloat16 --num-threads 1 --eval-episodes 100"
PONG_FLAGS = "--learning-rate 5e-4 --num-minibatches 8"
BREAKOUTS = [(BREAKOUT, 500_000, 1), (BREAKOUT, 10_000_000, 1)]
PIXELS = [
    Experiment(
        "atari-pong",
        f"`{PONG_FLAGS}`",
        "ppo_atari.py",
        each([(PONG, 2_000_000)], 3),
        f"{ONE_CORE} {PONG_FLAGS}",
    ),
    Experiment("atari-breakout", "the defaults", "ppo_atari.py", BREAKOUTS, ONE_CORE),
    Experiment(
        "atari-sb3", "Stable-Baselines3", "sb3", [(BREAKOUT, 250_000, 1)], settings={BREAKOUT: SB3_ATARI}
    ),
    Experiment("atari-gpu", "the defaults", "ppo_atari.py", each(GAMES, 3), "--bfloat16"),
]

EXPERIMENTS = {experiment.name: experiment for experiment in DISCRETE + CONTINUOUS + PIXELS}
