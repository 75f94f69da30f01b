"""Train the policies of the folder policies/, and write a card for each, and their table.

    pip install -e ".[box2d,mujoco,rlhf]" pandas filelock
    python benchmarks/policies.py                  # those that have no card yet: 20 minutes in all
    python benchmarks/policies.py --only Hopper    # one of them

Each is the stored run with the highest final return on its task, made again with the same flags and seed. Its
file has the settings, networks and normalisers, but not the optimizer. It plays 100 episodes for its card.
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
DESCRIPTION = """
A policy for `{env_id}`, trained by `{script}`: one of {count} stored runs, which differ in their seeds, and the one with the highest return.

| | |
| --- | --- |
| return in 100 episodes, with the most likely actions | {mean:.5g} ± {std:.3g} |
| {kind} of all {count} runs, ± over seeds | {all_mean:.5g} ± {all_std:.3g} |
| steps of the environment | {steps:,} |
| trained by | `{train}` |
| with the text of commit | {commit} |
| on | {machine}; {versions} |

In the repository that has `{script}`, in an environment with its packages:

```sh
{watch}
{start}
```

The first command plays it; with `--capture-video`, it records what it plays. The second begins a new run with its networks and
normalisers.{note}
The file has no code in it, and is loaded with `weights_only=True`.
"""
HEAD = """# Trained policies

Made by `python benchmarks/policies.py`; each has a card, which says how it was trained. Each is the best of the stored runs on its task, so it
is better than a run that you start: the last column has the mean of all. The other returns are of 100 episodes with the most likely actions. The commands run in
the environment of the [README](../README.md#start), with the packages of the task.

| policy | script | steps | return, ± over episodes | all seeds |
| --- | --- | --- | --- | --- |
"""
TAIL = """
```sh
python ppo.py --evaluate policies/LunarLander-v3.pt --capture-video
python ppo.py --init policies/LunarLander-v3.pt --env-id LunarLander-v3 --total-timesteps 1e6
```

The first command writes videos into `policies/LunarLander-v3_videos/`; for MuJoCo without a display, write `MUJOCO_GL=egl` before it. The second begins a run with
the policy's networks and normalisers. A policy without its optimizer cannot be resumed.
[To the Hugging Face Hub and back](../docs/recipes_scale.md#the-hugging-face-hub).
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
    def card(self) -> Path:
        return FOLDER / f"{self.env_id}.md"

    @property
    def words(self) -> list[str]:
        """How the command line names the environment; that of `ppo_gpu.py` is the default."""
        env_id = f"{self.module}:{self.env_id}" if self.module else self.env_id
        return [] if self.script == "ppo_gpu.py" else ["--env-id", env_id]

    def seeds(self) -> pd.Series:
        """The final returns of the stored runs by seed, the highest first. Of the cue task: those in training."""
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
    """Train a policy, save what of its checkpoint is the policy, and play it for its card."""
    about, (_, script, *flags) = in_words(provenance()), policy.training()
    folder = UNFINISHED / policy.env_id
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / script), *flags], check=True, cwd=folder)
    checkpoint = max(folder.glob("runs/*/checkpoint.pt"), key=lambda path: path.stat().st_mtime)
    module = importlib.import_module(script.removesuffix(".py"))
    args, content = module.load_checkpoint(checkpoint)
    del content["optimizer"]
    path = policy.card.with_suffix(".pt")
    torch.save(content, path)
    if "eval_episodes" in vars(args):
        args = replace(args, eval_episodes=100)
    else:  # ppo_gpu.py plays one in each environment
        args = replace(args, num_envs=100, device="cpu")
    returns, all_returns = module.evaluate(path, args), policy.seeds()
    steps = content["state"]["global_step"]
    named = ["--env-id", f"{policy.module}:{policy.env_id}"] if policy.module else []
    file = f"policies/{path.name}"
    text = DESCRIPTION.format(
        env_id=policy.env_id,
        script=script,
        count=len(all_returns),
        mean=returns.mean(),
        std=returns.std(),
        kind="final return" if policy.script != "ppo_lstm.py" else "return in training",
        all_mean=all_returns.mean(),
        all_std=all_returns.std(),
        steps=steps,
        train=shlex.join(policy.training()),
        watch=shlex.join(["python", script, "--evaluate", file, *named]),
        start=shlex.join(["python", script, "--init", file, *policy.words]),
        note=" Its module must be named, since a file imports none by itself." if named else "",
        **about,
    )
    result = EvalResult(
        task_type="reinforcement-learning",
        dataset_type=policy.env_id,
        dataset_name=policy.env_id,
        metric_type="mean_reward",
        metric_value=f"{returns.mean():.2f} +/- {returns.std():.2f}",
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


def table() -> str:
    """The rows of the policies that have a card."""
    rows = []
    for policy in POLICIES:
        if policy.card.exists():
            card, seeds = ModelCard.load(policy.card), policy.seeds()
            mean, _, std = card.data.eval_results[0].metric_value.partition(" +/- ")
            steps = torch.load(policy.card.with_suffix(".pt"), weights_only=True)["state"]["global_step"]
            returns = f"{float(mean):.5g} ± {float(std):.3g} | {seeds.mean():.5g} ± {seeds.std():.3g}"
            link = f"[{policy.env_id}]({policy.card.name})"
            rows.append(f"| {link} | `{policy.script}` | {steps:,} | {returns} ({len(seeds)}) |")
    return "\n".join(rows)


def main(only: str = "") -> None:
    """Make the policies that have no card, or whose name contains `only`."""
    refuse_uncommitted()
    FOLDER.mkdir(exist_ok=True)
    for policy in POLICIES:
        if only in policy.env_id if only else not policy.card.exists():
            make(policy)
    (FOLDER / "README.md").write_text(f"{HEAD}{table()}\n{TAIL}", encoding="utf-8")


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
