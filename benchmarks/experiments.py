"""What is measured: the list of experiments. `run.py` runs it, `report.py` reads what came of it.

To measure something of your own, add an `Experiment` and run `python benchmarks/run.py --only its-name`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


@dataclass(frozen=True)
class Experiment:
    """One script with one set of flags, on some environments for some steps, with a row of seeds."""

    name: str
    script: str  # "ppo.py", or "sb3" for Stable-Baselines3
    steps: Mapping[str, int | tuple[int, ...]]  # transitions to train for, by environment
    seeds: int
    flags: str = ""  # for a script of ours
    changes: tuple[tuple[str, str], ...] = ()  # of its text, each in one place: for what has no flag
    first_seed: int = 1
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # for Stable-Baselines3


@dataclass(frozen=True)
class Study:
    """Experiments side by side: a table, and a figure with a column a task and a row a quantity."""

    title: str
    labels: Mapping[str, str]  # by name of the experiment
    tasks: Mapping[str, int | tuple[int, ...]]
    quantities: tuple[str, ...] = ("return",)


@dataclass(frozen=True)
class Run:
    """One training: an experiment on one environment with one seed."""

    experiment: Experiment
    env_id: str
    steps: int
    seed: int

    @property
    def name(self) -> str:
        """Identifies the run, and is the path of its result."""
        env = self.env_id.rpartition(":")[2].replace("/", "-")
        return f"{self.experiment.name}/{env}_{self.steps}/{self.seed}"

    @property
    def task(self) -> tuple[str, int]:
        """Environment and steps: runs with the same task can be compared."""
        return self.env_id.rpartition("/")[2], self.steps

    @property
    def path(self) -> Path:
        """The file with its result."""
        return RESULTS / f"{self.name}.json"

    @property
    def flags(self) -> list[str]:
        """The flags of a script of ours."""
        own = ["--env-id", self.env_id, "--total-timesteps", str(self.steps), "--seed", str(self.seed)]
        return [*own, *self.experiment.flags.split()]


def runs() -> list[Run]:
    """All runs, in the order in which they are worth having."""
    return [
        Run(experiment, env_id, steps, seed)
        for experiment in EXPERIMENTS
        for env_id, lengths in experiment.steps.items()
        for steps in (lengths if isinstance(lengths, tuple) else (lengths,))
        for seed in range(experiment.first_seed, experiment.first_seed + experiment.seeds)
    ]


# The settings that Stable-Baselines3's RL Zoo has tuned for each environment (hyperparams/ppo.yml).
RL_ZOO = {
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

CLASSIC = {"CartPole-v1": (100_000, 500_000), "Acrobot-v1": 500_000}
CLASSIC |= {"MountainCar-v0": 1_000_000, "LunarLander-v3": 1_000_000}
SHORT = {"Acrobot-v1": 100_000, "LunarLander-v3": 300_000}
DETAILS = {**SHORT, "MountainCar-v0": 300_000}
DEATHS = {f"time_limit_as_death:TimeLimitAsDeath/{env_id}": steps for env_id, steps in DETAILS.items()}
ACROBOT, GRID = {"Acrobot-v1": 100_000}, {"FrozenLake-v1": 100_000}
# MuJoCo's tasks, and Pendulum, for the table of ppo_continuous.py.
MUJOCO = {f"{name}-v5": 1_000_000 for name in ("HalfCheetah", "Hopper", "Walker2d", "Ant", "Humanoid")}
MUJOCO |= {f"{name}-v5": 1_000_000 for name in ("Swimmer", "Reacher", "InvertedPendulum")}
MUJOCO |= {f"{name}-v5": 1_000_000 for name in ("InvertedDoublePendulum", "Pusher")}
MUJOCO["Pendulum-v1"] = 100_000
# The search for ppo_continuous.py's defaults, from where it began, with what the script had then. Its seeds,
# and those of the ablation, are not those of the table; what became a candidate has those of the table, too.
LOCOMOTION = {"HalfCheetah-v5": 300_000, "Hopper-v5": 300_000, "Walker2d-v5": 300_000}
EARLIER = "--adapt none --desired-kl 0.01 --no-stagger --min-log-std -20"
BETA_999 = (("flatten_parameters(agent), (0.9, 0.99)", "flatten_parameters(agent), (0.9, 0.999)"),)
NO_WARM_UP = (("if state.global_step == 0 and args.norm_obs:", "if False:"),)
EARLIER_TEXT = BETA_999 + NO_WARM_UP
START = (
    "--compile --num-envs 8 --num-steps 256 --num-minibatches 32 --update-epochs 10 --learning-rate 3e-4 "
    "--anneal-lr --gamma 0.99 --gae-lambda 0.95 --no-norm-adv --recompute-advantages --no-clip-vloss "
    "--vf-coef 0.25 --init-log-std -0.5 --hidden-size 64 --target-kl None " + EARLIER
)
# Statistics that move every step, as Gymnasium's wrappers have them: a row is stored normalised with those of
# its time, where the script stores raw rows, and moves the statistics between iterations.
PER_STEP = (
    (
        "        return torch.where(self.one_hot, obs,",
        "        return obs\n\n    def scaled(self, obs):\n"
        "        scaled = (obs - self.obs_moments.mean) * torch.rsqrt(self.obs_moments.var + 1e-8)\n"
        "        return torch.where(self.one_hot, obs,",
    ),
    (
        "        step = attempt(envs.step, agent.env_actions(actions[t]))\n",
        "        step = attempt(envs.step, agent.env_actions(actions[t]))\n"
        "        successor = torch.as_tensor(step[0], dtype=torch.float32)\n"
        "        agent.obs_moments.update(successor)\n"
        "        step = (agent.scaled(successor).numpy(), *step[1:])\n",
    ),
    (
        "        done = terminated[t] | truncated[t]\n        if done",
        "        mask, sums = rollout.valid[t], rollout.rewards[t] + 0.99 * rollout.discounted_return\n"
        "        rollout.discounted_return = sums * mask\n"
        "        if valid[t].any():\n"
        "            agent.return_moments.update(sums[mask].unsqueeze(-1))\n"
        "        rollout.rewards[t] *= torch.rsqrt(agent.return_moments.var + 1e-8)\n"
        "        rollout.rewards[t].clamp_(-10, 10)\n"
        "        done = terminated[t] | truncated[t]\n        if done",
    ),
    ("            rewards = scale_rewards(agent, rollout, args.gamma)\n", "            pass\n"),
    ("    if args.norm_obs:  # not earlier", "    if False:  # not earlier"),
    (
        "        inputs = torch.as_tensor(obs, dtype=torch.float32, device=agent.one_hot.device)\n",
        "        inputs = agent.scaled(torch.as_tensor(obs, dtype=torch.float32))\n",
    ),
    (
        "        first_step, start, saved,",
        "        agent.obs_moments.update(rollout.obs[-1])\n"
        "        rollout.obs[-1] = agent.scaled(rollout.obs[-1])\n"
        "        first_step, start, saved,",
    ),
)


def activation(function: str) -> tuple[tuple[str, str], ...]:
    """Changes of the script's text: this function in the place of ELU."""
    layers = (f"(F.linear(x, *{layer}))" for layer in ("first", "second"))
    return tuple((f"F.elu{layer}", f"{function}{layer}") for layer in layers)


TANH, RELU, SILU = (activation(function) for function in ("torch.tanh", "F.relu", "F.silu"))
CLIP_3 = (("scaled.clamp(-10, 10))", "scaled.clamp(-3, 3))"),)
# At first, --target-kl ended an iteration's passes, but took nothing back.
STAY = (("vector.lerp_(before, 0.5 if halvings < 10 else 1.0)", "limit = math.inf"),)
SCREENED = {  # by name: label, flags, changes of the script's text
    "start": ("the start", "", TANH),
    "per-step": ("normalisers move every step", "", (*TANH, *PER_STEP)),
    "norm-adv": ("advantages normalised in each minibatch", "--norm-adv", TANH),
    "no-recompute": ("advantages not recomputed", "--no-recompute-advantages", TANH),
    "std-1": ("initial log std 0", "--init-log-std 0", TANH),
    "std-0.37": ("initial log std -1", "--init-log-std -1", TANH),
    "envs-16": ("16 × 128 steps", "--num-envs 16 --num-steps 128", TANH),
    "envs-32": ("32 × 64 steps", "--num-envs 32 --num-steps 64", TANH),
    "envs-32-norm-adv": (
        "32 × 64 steps, advantages normalised",
        "--num-envs 32 --num-steps 64 --norm-adv",
        TANH,
    ),
    "gamma-0.98": ("γ = 0.98", "--gamma 0.98", TANH),
    "lambda-0.9": ("λ = 0.9", "--gae-lambda 0.9", TANH),
    "minibatch-256": ("minibatches of 256", "--num-minibatches 8", TANH),
    "epochs-5": ("5 epochs", "--update-epochs 5", TANH),
    "obs-clip-3": ("observations within ±3", "", (*TANH, *CLIP_3)),
    "relu": ("ReLU", "", RELU),
    "relu-lambda-0.9": ("ReLU, λ = 0.9", "--gae-lambda 0.9", RELU),
    "silu": ("SiLU", "", SILU),
    "elu": ("ELU", "", ()),
    "tanh-std-0.5": ("initial log std -0.7", "--init-log-std -0.7", TANH),
    "relu-std-0.5": ("ReLU, initial log std -0.7", "--init-log-std -0.7", RELU),
    "silu-std-0.5": ("SiLU, initial log std -0.7", "--init-log-std -0.7", SILU),
    "elu-std-0.5": ("ELU, initial log std -0.7", "--init-log-std -0.7", ()),
    "elu-std-0.37": ("ELU, initial log std -1", "--init-log-std -1", ()),
    "elu-obs-clip-3": ("ELU, observations within ±3", "", CLIP_3),
}
CHEETAH, ANT, HUMANOID = ({f"{name}-v5": 300_000} for name in ("HalfCheetah", "Ant", "Humanoid"))
LONG, LONG_CHEETAH = dict.fromkeys(LOCOMOTION, 1_000_000), {"HalfCheetah-v5": 1_000_000}
LONG_HOPPER, LONG_WALKER = {"Hopper-v5": 1_000_000}, {"Walker2d-v5": 1_000_000}
DOUBLE, SWIMMER = {"InvertedDoublePendulum-v5": 1_000_000}, {"Swimmer-v5": 1_000_000}
PENDULUM = {"Pendulum-v1": 100_000}
SEARCH = (  # tasks, how many seeds, entries
    (LOCOMOTION, 2, "start per-step norm-adv no-recompute std-1 envs-32"),
    (CHEETAH, 2, "gamma-0.98"),
    (LONG, 2, "start"),
    (LONG_CHEETAH, 2, "per-step"),
    (LONG, 1, "envs-32 envs-32-norm-adv lambda-0.9"),
    (LONG_CHEETAH, 1, "norm-adv std-0.37 envs-16 gamma-0.98 relu relu-lambda-0.9 silu"),
    (LONG_CHEETAH, 1, "elu elu-std-0.5 elu-std-0.37"),
    (LONG_HOPPER, 1, "elu"),
    (LONG_WALKER, 1, "relu silu elu"),
    (ANT, 1, "start norm-adv std-0.37 lambda-0.9 minibatch-256 epochs-5 obs-clip-3"),
    (ANT, 1, "silu elu elu-std-0.5 elu-std-0.37"),
    (HUMANOID, 1, "start norm-adv lambda-0.9 elu elu-obs-clip-3"),
    (SWIMMER, 1, "elu elu-std-0.37"),
    (DOUBLE, 1, "elu"),
    (PENDULUM, 1, "elu elu-std-0.5 elu-std-0.37"),
    (LOCOMOTION, 2, "elu elu-std-0.5 tanh-std-0.5 relu-std-0.5 silu-std-0.5"),
)
# The ablation of what came of it: one detail changed at a time.
BATCH_NORM = (  # advantages with mean 0 and standard deviation 1 over a whole rollout
    (
        "        order = rows[torch.randperm(len(rows)).to(device)]\n",
        "        scaled = batch.advantages - batch.advantages[rows].mean()\n"
        "        batch = batch._replace(advantages=scaled / (scaled[rows].std() + 1e-8))\n"
        "        order = rows[torch.randperm(len(rows)).to(device)]\n",
    ),
)
FLOOR = (("self.log_std.expand_as(mean)", "self.log_std.clamp(min=-2.3).expand_as(mean)"),)
LIMITED = f"--compile --target-kl 0.1 --init-log-std -0.7 {EARLIER}"
ABLATION = {  # by name: label, flags, changes of the script's text
    "no-stagger": ("time limits in unison", "--no-stagger", ()),
    "no-warm-up": ("no first rollout for the normalisers", "", NO_WARM_UP),
    "fixed-lr": ("learning rate not adapted to the KL", "--adapt none", ()),
    "beta-0.999": ("Adam's β2 0.999", "", BETA_999),
    "no-floor": ("log std without a limit", "--min-log-std -20", ()),
    "std-1": ("initial log std 0", "--init-log-std 0", ()),
    "std-0.5": ("initial log std -0.7", "--init-log-std -0.7", ()),
    "std-0.37": ("initial log std -1", "--init-log-std -1", ()),
    "tanh": ("tanh for ELU", "", TANH),
    "silu": ("SiLU for ELU", "", SILU),
    "relu": ("ReLU for ELU", "", RELU),
    "norm-adv": ("advantages normalised in each minibatch", "--norm-adv", ()),
    "norm-adv-batch": ("advantages normalised in each rollout", "", BATCH_NORM),
    "no-recompute": ("advantages not recomputed", "--no-recompute-advantages", ()),
    "vf-coef-0.5": ("value coefficient 0.5", "--vf-coef 0.5", ()),
    "clip-vloss": ("value clipping", "--clip-vloss", ()),
    "envs-32": ("32 × 64 steps", "--num-envs 32 --num-steps 64", ()),
    "minibatch-256": ("minibatches of 256", "--num-minibatches 8", ()),
    "epochs-5": ("5 epochs", "--update-epochs 5", ()),
    "gamma-0.98": ("γ = 0.98", "--gamma 0.98", ()),
    "lambda-0.9": ("λ = 0.9", "--gae-lambda 0.9", ()),
    "lr-1e-4": ("learning rate 1e-4", "--learning-rate 1e-4", ()),
    "no-anneal-lr": ("no learning-rate decay", "--no-anneal-lr", ()),
    "width-256": ("networks of 256-256", "--hidden-size 256", ()),
    "obs-clip-3": ("observations within ±3", "", CLIP_3),
    "per-step": ("normalisers move every step, no first rollout for them", "", PER_STEP + NO_WARM_UP),
    "gamma-0.995": ("γ = 0.995", "--gamma 0.995", ()),
    "lr-1e-3": ("learning rate 1e-3", "--learning-rate 1e-3", ()),
    "desired-kl-0.015": ("KL kept near 0.015", "--desired-kl 0.015", ()),
    "floor-0.2": ("log std not below -1.6", "--min-log-std -1.6", ()),
    "target-kl": ("KL limited to 0.1", "--target-kl 0.1", ()),
}
# In the table and the figure, as far as it was run; the first is what the others are compared with.
ABLATED = {"mujoco": "the defaults"} | {f"mujoco-but-{name}": label for name, (label, *_) in ABLATION.items()}
FULL_LENGTH = {  # entries of the ablation that were also run as the table of returns is: seeds, names
    "HalfCheetah-v5": (3, "vf-coef-0.5 lambda-0.9 norm-adv no-stagger"),
    "Hopper-v5": (3, "vf-coef-0.5 lambda-0.9 norm-adv"),
    "Walker2d-v5": (3, "vf-coef-0.5 lambda-0.9 norm-adv"),
    "Humanoid-v5": (2, "fixed-lr no-warm-up"),
    "InvertedDoublePendulum-v5": (5, "no-floor beta-0.999"),
}
CANDIDATES = {  # for continuous control's defaults, by name of the experiment
    "mujoco-start": "the start",
    "mujoco-narrow": "initial log std -1, passes end at a KL of 0.05",
    "mujoco-elu-std-0.5": "ELU, initial log std -0.7",
    "mujoco-limited": "the same, β2 0.99, KL limited to 0.1",
    "mujoco-floor": "the same, log std not below -2.3",
    "mujoco-adapted": "today's, initial log std -0.7",
    "mujoco": "today's defaults",
}
A2C = "--update-epochs 1 --num-minibatches 1 --num-steps 8 --no-norm-adv"

EXPERIMENTS = [
    Experiment("ppo", "ppo.py", CLASSIC, 10),
    # Studies. "ppo" is the default configuration again, at their lengths: what the others are compared with.
    Experiment("ppo", "ppo.py", DETAILS, 3),
    Experiment("epochs-1", "ppo.py", SHORT, 3, "--update-epochs 1"),
    Experiment("epochs-4", "ppo.py", SHORT, 3, "--update-epochs 4"),
    Experiment("epochs-10", "ppo.py", SHORT, 3, "--update-epochs 10"),
    Experiment("epochs-30", "ppo.py", SHORT, 3, "--update-epochs 30"),
    Experiment(
        "epochs-10-no-clip", "ppo.py", ACROBOT, 3, "--update-epochs 10 --clip-coef 1000 --allow-unsafe"
    ),
    Experiment(
        "epochs-30-no-clip", "ppo.py", ACROBOT, 3, "--update-epochs 30 --clip-coef 1000 --allow-unsafe"
    ),
    Experiment("ppo", "ppo.py", GRID, 10),
    Experiment("a2c", "ppo.py", GRID, 10, A2C),
    Experiment("penalty-fixed", "ppo.py", SHORT, 3, "--surrogate kl-penalty"),
    Experiment("penalty-adaptive", "ppo.py", SHORT, 3, "--surrogate kl-penalty --adapt kl-coef"),
    Experiment("clip-adaptive", "ppo.py", SHORT, 3, "--adapt clip-coef"),
    Experiment("no-norm-adv", "ppo.py", DETAILS, 3, "--no-norm-adv"),
    Experiment("clip-vloss", "ppo.py", DETAILS, 3, "--clip-vloss"),
    Experiment("no-anneal-lr", "ppo.py", DETAILS, 3, "--no-anneal-lr"),
    Experiment("time-limit-as-death", "ppo.py", DEATHS, 3),
    # What a row of the classic table is with a flag of its own.
    Experiment("no-entropy-bonus", "ppo.py", {"Acrobot-v1": 500_000}, 10, "--ent-coef 0"),
    Experiment("mujoco", "ppo_continuous.py", MUJOCO, 5, "--compile"),
    Experiment("mujoco", "ppo_continuous.py", LOCOMOTION, 2, "--compile", first_seed=11),
    *(
        Experiment(
            f"mujoco-but-{name}", "ppo_continuous.py", LOCOMOTION, 2, f"--compile {flags}", changes, 11
        )
        for name, (_, flags, changes) in ABLATION.items()
    ),
    *(
        Experiment(
            f"mujoco-but-{name}",
            "ppo_continuous.py",
            {env_id: MUJOCO[env_id]},
            seeds,
            f"--compile {ABLATION[name][1]}",
            ABLATION[name][2],
        )
        for env_id, (seeds, names) in FULL_LENGTH.items()
        for name in names.split()
    ),
    *(
        Experiment(
            f"mujoco-{name}",
            "ppo_continuous.py",
            tasks,
            seeds,
            f"{START} {flags}",
            changes + EARLIER_TEXT,
            11,
        )
        for tasks, seeds, names in SEARCH
        for name, (_, flags, changes) in SCREENED.items()
        if name in names.split()
    ),
    # Candidates for the defaults, with the table's seeds.
    Experiment("mujoco-start", "ppo_continuous.py", MUJOCO, 1, START, TANH + EARLIER_TEXT),
    Experiment(
        "mujoco-narrow",
        "ppo_continuous.py",
        MUJOCO,
        1,
        f"{START} --init-log-std -1 --target-kl 0.05",
        TANH + STAY + EARLIER_TEXT,
    ),
    Experiment(
        "mujoco-lambda-0.9", "ppo_continuous.py", LONG, 1, f"{START} --gae-lambda 0.9", TANH + EARLIER_TEXT
    ),
    Experiment(
        "mujoco-elu-std-0.5", "ppo_continuous.py", MUJOCO, 5, f"{START} --init-log-std -0.7", EARLIER_TEXT
    ),
    Experiment("mujoco-adapted", "ppo_continuous.py", MUJOCO, 5, "--compile --init-log-std -0.7"),
    Experiment("mujoco-limited", "ppo_continuous.py", MUJOCO, 1, LIMITED, NO_WARM_UP),
    Experiment("mujoco-floor", "ppo_continuous.py", MUJOCO, 1, LIMITED, FLOOR + NO_WARM_UP),
    # The peer, with the settings that its own authors have tuned, under the same protocol.
    Experiment("sb3-rl-zoo", "sb3", CLASSIC, 3, settings=RL_ZOO),
]

# Atari. On a GPU with one run at a time: --jobs 1.
PONG, BREAKOUT = "PongNoFrameskip-v4", "BreakoutNoFrameskip-v4"
GAMES = [PONG, BREAKOUT, *(f"{game}NoFrameskip-v4" for game in ("BeamRider", "Qbert", "SpaceInvaders"))]
SB3_ATARI = {
    "n_envs": 8, "n_steps": 128, "batch_size": 256, "n_epochs": 4, "learning_rate": "linear 0.00025",
    "clip_range": 0.1, "ent_coef": 0.01, "vf_coef": 0.25, "scheduled": 500_000,
}  # fmt: skip
ONE_CORE = "--bfloat16 --num-threads 1 --eval-episodes 100"
PONG_FLAGS = f"{ONE_CORE} --learning-rate 5e-4 --num-minibatches 8"
EXPERIMENTS += [
    Experiment("atari-pong", "ppo_atari.py", {PONG: 2_000_000}, 1, PONG_FLAGS),
    Experiment("atari-breakout", "ppo_atari.py", {BREAKOUT: 500_000}, 1, ONE_CORE),
    Experiment("atari-sb3", "sb3", {BREAKOUT: 250_000}, 1, settings={BREAKOUT: SB3_ATARI}),
    Experiment("atari-gpu", "ppo_atari.py", dict.fromkeys(GAMES, 10_000_000), 3, "--compile --bfloat16"),
]
ATARI = {  # in the table, by name of the experiment
    "atari-pong": "`--learning-rate 5e-4 --num-minibatches 8`",
    "atari-breakout": "the defaults",
    "atari-sb3": "Stable-Baselines3, at these settings",
    "atari-gpu": "the defaults",
}

STUDIES = {
    "classic": Study(
        "ppo.py at its defaults, and Stable-Baselines3 with the RL Zoo's settings for each environment",
        {"ppo": "ppo.py", "sb3-rl-zoo": "Stable-Baselines3, RL Zoo's settings"},
        {**CLASSIC, "CartPole-v1": 100_000},
        ("return", "return against seconds"),
    ),
    "epochs": Study(
        "Passes over each rollout (K)",
        {
            "epochs-1": "K = 1",
            "epochs-4": "K = 4",
            "epochs-10": "K = 10",
            "ppo": "K = 15, the default",
            "epochs-30": "K = 30",
        },
        SHORT,
        ("return", "kl", "clip_fraction"),
    ),
    "clip": Study(
        "Many passes with and without the clip",
        {
            "epochs-10": "K = 10",
            "epochs-10-no-clip": "K = 10, no clip",
            "epochs-30": "K = 30",
            "epochs-30-no-clip": "K = 30, no clip",
        },
        ACROBOT,
        ("return", "kl"),
    ),
    "a2c": Study(
        "PPO and A2C on the 4×4 grid world, at equal steps",
        {"ppo": "PPO, the defaults", "a2c": "A2C"},
        GRID,
        ("return", "entropy"),
    ),
    "penalty": Study(
        "Clipping and penalties",
        {
            "ppo": "clip, the default",
            "clip-adaptive": "clip, adaptive range",
            "penalty-fixed": "KL penalty, β = 1",
            "penalty-adaptive": "KL penalty, adaptive β",
        },
        SHORT,
        ("return", "kl"),
    ),
    "details": Study(
        "One detail changed at a time",
        {
            "ppo": "the defaults",
            "no-norm-adv": "no advantage normalisation",
            "clip-vloss": "value clipping",
            "no-anneal-lr": "no learning-rate decay",
            "time-limit-as-death": "time limits as deaths",
        },
        DETAILS,
    ),
}
