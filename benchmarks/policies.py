"""Train the policies of the folder policies/, play them, and write their cards and their table.

    pip install -e ".[benchmarks]"
    python benchmarks/policies.py                  # trains those that have no file: 15 minutes for all
    python benchmarks/policies.py --only Hopper-v5    # trains this one again

Each is the stored run with the highest final return on its task, made again with the same flags and seed. Its
file has the settings, networks and normalisers, but no optimizer. It plays 100 episodes for its card.
"""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import torch
import tyro
from experiments import EXPERIMENTS, HERE, ROOT
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from run import RUNS, in_words, provenance, refuse_uncommitted

sys.path.insert(0, str(ROOT))  # where the scripts are
FOLDER = ROOT / "policies"
UNFINISHED = HERE / "unfinished" / "policies"
FOLLOW = """--capture-video --eval-episodes 1 --env-kwargs '{"camera_name": "track"}'"""
CHOICE = "It has the best seed of {} stored runs (the first, if several are equal)."
DESCRIPTION = """
A policy for `{env_id}`, trained by `{script}`. {choice}

| | |
| --- | --- |
| return in {count:,} episodes, with the most likely actions | {returns} |
| of the first {some:,}, which the command below plays | {played} |
| {kind} of all stored runs, ± over seeds | {all_returns} |
| steps of the environment | {steps:,} |
| trained by | `{train}` |
| commit | {commit} |
| machine | {machine} |
| versions | {versions} |

In a clone of the repository, in the environment of its README:

```sh
{watch}
{start}
```

The first command plays {episodes}{film}. The second begins a run with its networks and normalisers.{note}
The file has no code in it, and is loaded with `weights_only=True`.
"""
HEAD = """# Trained policies

Each policy is the best of several seeds. The last column has the mean of all seeds: expect this of a run of
your own. (Of Cue-v0, it is the return in training, with sampled actions.) The column before it has the
policy's return in 100 new episodes (`ppo_gpu.py`: 1,024) with the most likely actions. Those of
`ppo_continuous.py` were chosen by only ten episodes: Pendulum-v1's is below the mean. A name links to the
policy's card, with its command, commit and versions. `python benchmarks/policies.py` trains those that are
missing, and writes the cards.

| policy | script | steps | return, ± over episodes | all seeds, ± over seeds |
| --- | --- | --- | --- | --- |
"""
TAIL = """
In the environment of the [README](../README.md#start):

```sh
python ppo.py --evaluate policies/LunarLander-v3.pt --capture-video
python ppo.py --init policies/LunarLander-v3.pt --env-id LunarLander-v3 --learning-rate 1e-4
```

The first command plays ten episodes and writes videos into `policies/LunarLander-v3_videos/`. The second
begins a run with the networks and normalisers of the policy; with the default learning rate, the return may
fall. For robots of MuJoCo, a camera that follows them is better, and without a display, rendering
needs EGL. On a CPU, an episode takes a minute to draw:

```sh
MUJOCO_GL=egl python ppo_continuous.py --evaluate policies/HalfCheetah-v5.pt --capture-video \\
    --eval-episodes 1 --env-kwargs '{"camera_name": "track"}'
```

These files have no optimizer, so they cannot be resumed. There is also a recipe that brings a policy [to the
Hugging Face Hub and back](../docs/recipes.md#the-hugging-face-hub).
"""


@dataclass(frozen=True)
class Policy:
    """A policy, and the experiment of which it is a run."""

    experiment: str
    env_id: str
    steps: int
    module: str = ""  # of the environment, which --env-id must name

    @property
    def script(self) -> str:
        return EXPERIMENTS[self.experiment].script

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.env_id}.pt"

    @property
    def card(self) -> Path:
        return self.file.with_suffix(".md")

    @property
    def words(self) -> list[str]:
        """How the command line names the environment; that of `ppo_gpu.py` is the default."""
        env_id = f"{self.module}:{self.env_id}" if self.module else self.env_id
        return [] if self.script == "ppo_gpu.py" else ["--env-id", env_id]

    def seeds(self) -> pd.Series:
        """The final returns of the stored runs by seed, the highest first (Cue-v0: those in training)."""
        table = pd.read_csv(RUNS).set_index(["experiment", "env_id", "steps"])
        rows = table.loc[[(self.experiment, self.env_id, self.steps)]].set_index("seed")
        returns = rows.training if rows.greedy.isna().all() else rows.greedy
        return returns.sort_index().sort_values(ascending=False, kind="stable")

    def training(self) -> list[str]:
        """The command that trains it. An evaluation during training changes nothing, and is left out."""
        flags = re.sub(r"--eval-\w+ \d+", "", EXPERIMENTS[self.experiment].flags)
        numbers = ["--total-timesteps", str(self.steps), "--seed", str(self.seeds().index[0])]
        return ["python", self.script, *self.words, *numbers, *shlex.split(flags)]


POLICIES = [
    Policy("now-classic", "CartPole-v1", 100_000),
    Policy("now-classic", "Acrobot-v1", 500_000),
    Policy("now-classic", "MountainCar-v0", 1_000_000),
    Policy("now-classic", "LunarLander-v3", 1_000_000),
    Policy("now-continuous", "Pendulum-v1", 100_000),
    Policy("now-continuous", "HalfCheetah-v5", 1_000_000),
    Policy("now-continuous", "Hopper-v5", 1_000_000),
    Policy("now-continuous", "Walker2d-v5", 1_000_000),
    Policy("same-step-lstm", "Cue-v0", 100_000, module="memory_tasks"),
    Policy("gpu", "Pendulum", 1_000_000),
]


def make(policy: Policy) -> None:
    """Train a policy, and save what of its checkpoint is the policy, and what it was made with."""
    about, (_, script, *flags) = in_words(provenance()), policy.training()
    folder = UNFINISHED / policy.env_id
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / script), *flags], check=True, cwd=folder)
    checkpoint = max(folder.glob("runs/*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    content = torch.load(checkpoint, weights_only=True)
    del content["optimizer"]
    torch.save(content | {"made": about}, policy.file)


def write_card(policy: Policy) -> None:
    """Play 100 episodes, and describe the policy in the form of the Hugging Face Hub."""
    module = importlib.import_module(policy.script.removesuffix(".py"))
    args, content = module.load_checkpoint(policy.file)
    if policy.script == "ppo_gpu.py":  # it plays one episode in each environment
        args, played, episodes = replace(args, device="cpu"), args.num_envs, "these episodes"
    else:
        played, episodes = args.eval_episodes, f"the first {args.eval_episodes} of these episodes"
        args = replace(args, eval_episodes=100)
    returns, all_returns = module.evaluate(policy.file, args), policy.seeds()
    mean, std = f"{returns.mean():.2f}", f"{returns.std():.2f}"
    named = policy.words if policy.module else []  # a file imports no module by itself
    file, film = f"policies/{policy.file.name}", ""
    if policy.env_id.endswith("-v5"):
        film = f", and records videos with `{FOLLOW}` (without a display, put `MUJOCO_GL=egl` in front)"
    elif policy.script in ("ppo.py", "ppo_continuous.py"):  # the others' tasks have no picture
        film = ", and records videos with `--capture-video`"
    text = DESCRIPTION.format(
        env_id=policy.env_id,
        script=policy.script,
        choice=CHOICE.format(len(all_returns)),
        count=len(returns),
        some=played,
        played=f"{returns[:played].mean():.2f}",
        returns=in_digits(float(mean), float(std)),
        kind="return in training" if policy.script == "ppo_lstm.py" else "final return",
        all_returns=f"{in_digits(all_returns.mean(), all_returns.std())} ({len(all_returns)} seeds)",
        steps=content["state"]["global_step"],
        train=shlex.join(policy.training()),
        watch=shlex.join(["python", policy.script, "--evaluate", file, *named]),
        start=shlex.join(["python", policy.script, "--init", file, *policy.words]),
        episodes=episodes,
        film=film,
        note=" The module must be named, since a policy file never imports code." if named else "",
        **content["made"],
    )
    result = EvalResult(
        task_type="reinforcement-learning",
        dataset_type=policy.env_id,
        dataset_name=policy.env_id,
        metric_type="mean_reward",
        metric_value=f"{mean} +/- {std}",
    )
    data = ModelCardData(
        license="mit",
        library_name="ppo-reference",
        pipeline_tag="reinforcement-learning",
        tags=["reinforcement-learning", "deep-reinforcement-learning", "ppo", policy.env_id],
        model_name=f"PPO-{policy.env_id}",
        eval_results=[result],
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n# PPO on {policy.env_id}\n{text}").save(policy.card)


def in_digits(mean: float, std: float) -> str:
    """A return and its deviation: two decimals for small ones."""
    digits = 2 if abs(mean) < 10 else 1
    return f"{mean:,.{digits}f} ± {std:,.{digits}f}"


def table() -> str:
    """A row for each policy, with the returns of its card."""
    rows = []
    for policy in POLICIES:
        mean, _, std = ModelCard.load(policy.card).data.eval_results[0].metric_value.partition(" +/- ")
        seeds, steps = policy.seeds(), torch.load(policy.file, weights_only=True)["state"]["global_step"]
        returns = f"{in_digits(float(mean), float(std))} | {in_digits(seeds.mean(), seeds.std())}"
        link = f"[{policy.env_id}]({policy.card.name})"
        rows.append(f"| {link} | `{policy.script}` | {steps:,} | {returns} ({len(seeds)} seeds) |")
    return "\n".join(rows)


def main(only: str = "") -> None:
    """Train the policies that have no file, and the one with this name; then write all cards."""
    refuse_uncommitted()
    if only and only not in [policy.env_id for policy in POLICIES]:
        sys.exit(f"no policy is called {only}")
    FOLDER.mkdir(exist_ok=True)
    for policy in POLICIES:
        if policy.env_id == only or not policy.file.exists():
            make(policy)
    for policy in POLICIES:
        write_card(policy)
    (FOLDER / "README.md").write_text(f"{HEAD}{table()}\n{TAIL}", encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
