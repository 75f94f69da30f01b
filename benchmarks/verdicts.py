"""What `coach.py check` says of sound runs, and of runs of copies with a planted bug.

    pip install -e '.[benchmarks]'
    python benchmarks/verdicts.py --dry-run       # list the runs
    python benchmarks/verdicts.py --jobs 2        # do what is missing, then check all of them
    python benchmarks/report.py                   # the tables of docs/metrics.md

The runs stay in benchmarks/unfinished/verdicts, so that changed rules can be tried on them at once; those of
a script that has changed since are done again. What `check` says, and at which iteration it was known first,
goes to results/data/verdicts.csv, with the script's commit.
"""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import tyro

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # where coach.py is
import coach  # noqa: E402

RUNS = ROOT / "benchmarks/unfinished/verdicts"
VERDICTS = ROOT / "results/data/verdicts.csv"
# Ten bugs and ten sound runs by someone who did not know the rules, tried when all limits had been chosen.
HELD_OUT = ROOT / "benchmarks/held_out.json"

# The task of each script, on which bugs are planted.
TASKS = {
    "ppo_minimal": "",
    "ppo": "--total-timesteps 1e5",
    "ppo_continuous": "--env-id Pendulum-v1 --total-timesteps 1e5",
    "ppo_lstm": "--env-id memory_tasks:PositionOnlyCartPole-v1 --total-timesteps 1e5",
    "ppo_atari": "--env-id BreakoutNoFrameskip-v4 --total-timesteps 2e4 --eval-episodes 1",
    "ppo_gpu": "--device cpu",
    "ppo_rlhf": "",
    "grpo": "",
}
FAMILY = "ppo", "ppo_continuous", "ppo_lstm", "ppo_atari", "ppo_gpu"
LANGUAGE = "ppo_rlhf", "grpo"
# A bug: by script, the flags that are added to its task, or what is replaced in its text by what.
Bug = dict[str, str | tuple[str, str]]


def of(names: tuple[str, ...], *given: str) -> Bug:
    """The same bug in several scripts."""
    return dict.fromkeys(names, given if len(given) == 2 else given[0])  # type: ignore[arg-type]


RATIO = "log_ratio = log_prob(policy, batch.actions) - log_prob(batch.old_policy, batch.actions)"
ITSELF = "log_ratio = log_prob(policy, batch.actions) - log_prob(policy, batch.actions).detach()"
OBJECTIVE = "-torch.min(ratio * advantages, clipped_ratio * advantages)"
TABLE = "-torch.min(ratio[..., None] * advantages, clipped_ratio[..., None] * advantages).mean(0)"
TABLE_OF_ALL = (
    "-torch.min(ratio.reshape(-1, 1) * advantages.flatten(),"
    " clipped_ratio.reshape(-1, 1) * advantages.flatten()).mean()"
)
LAST = "nn.Tanh(), layers[2])"
BUGS: dict[str, Bug] = {
    "the sign of the policy loss": (
        of(("ppo_minimal",), "policy_loss = -torch.min", "policy_loss = torch.min")
        | of(FAMILY, "policy_losses = -torch.min", "policy_losses = torch.min")
        | of(("ppo_rlhf",), "policy_loss = -torch.min", "policy_loss = torch.min")
        | of(("grpo",), "losses = -torch.min", "losses = torch.min")
    ),
    "the entropy bonus is too large": of(("ppo_minimal", *FAMILY, "ppo_rlhf"), "--ent-coef 1"),
    "the ratio is always 1": (
        of(("ppo_minimal",), "- old_log_probs\n", "- policy.log_prob(actions).detach()\n")
        | of(FAMILY, RATIO, ITSELF)
        | of(LANGUAGE, "(log_probs - batch.log_probs)", "(log_probs - log_probs.detach())")
    ),
    "the loss is of shape [B, B]": (
        of(("ppo_minimal", *FAMILY), OBJECTIVE, TABLE) | of(("ppo_lstm",), OBJECTIVE, TABLE_OF_ALL)
    ),
    "advantages are computed forwards": (
        of(("ppo_minimal", *FAMILY), "for t in reversed(range(len(deltas))):", "for t in range(len(deltas)):")
        | of(("ppo_rlhf",), "in reversed(range(deltas.shape[1])):", "in range(deltas.shape[1]):")
    ),
    "ends of episodes are ignored": (
        of(
            ("ppo_minimal",),
            "next_values, terminated, truncated,",
            "next_values, terminated * 0, truncated * 0,",
        )
        | of(
            ("ppo", "ppo_continuous", "ppo_lstm"),
            "    ends = tensor(rollout.terminated), tensor(rollout.truncated)\n",
            "    ends = [torch.zeros_like(rewards, dtype=torch.bool)] * 2\n",
        )
        | of(
            ("ppo_gpu",),
            "    ends = rollout.terminated, rollout.truncated\n",
            "    ends = [torch.zeros_like(rewards, dtype=torch.bool)] * 2\n",
        )
        | of(
            ("ppo_atari",),
            "    ends = terminated, truncated\n",
            "    ends = [torch.zeros_like(rewards, dtype=torch.bool)] * 2\n",
        )
    ),
    "advantages belong to other rows": (
        of(
            ("ppo_minimal",),
            "        for _ in range(args.update_epochs):",
            "        batch[3] = advantages.T.flatten()\n        for _ in range(args.update_epochs):",
        )
        | of(
            ("ppo", "ppo_continuous", "ppo_atari", "ppo_gpu"),
            "advantages=advantages.flatten(),",
            "advantages=advantages.T.flatten(),",
        )
        | of(("ppo_lstm",), "advantages=advantages,", "advantages=advantages.roll(1, 1),")
        | of(
            ("ppo_rlhf",),
            "whiten(advantages, mask), returns)",
            "whiten(advantages, mask).roll(1, 0), returns)",
        )
        | of(
            ("grpo",),
            "group_advantages(scores, kl.cpu(), args)",
            "group_advantages(scores, kl.cpu(), args).roll(1, 0)",
        )
    ),
    "rewards are negated": (
        of(
            ("ppo_minimal",),
            "            rewards, values, next_values",
            "            -rewards, values, next_values",
        )
        | of(FAMILY, "compute_gae(rewards, values", "compute_gae(-rewards, values")
        | of(("ppo_rlhf",), "compute_gae(rewards_per_token, values", "compute_gae(-rewards_per_token, values")
        | of(
            ("grpo",),
            "group_advantages(scores, kl.cpu(), args)",
            "group_advantages(-scores, kl.cpu(), args)",
        )
    ),
    "acting and learning differ": (
        of(("ppo_minimal", "ppo"), LAST, "nn.Tanh(), nn.Dropout(0.1), layers[2])")
        | of(("ppo_continuous",), "function(), layers[2])", "function(), nn.Dropout(0.1), layers[2])")
        | of(
            ("ppo_lstm",),
            "nn.Linear(obs_size, size)), nn.Tanh())",
            "nn.Linear(obs_size, size)), nn.Tanh(), nn.Dropout(0.1))",
        )
        | of(
            ("ppo_atari",),
            "initialize(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),",
            "initialize(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(), nn.Dropout(0.1),",
        )
        | of(
            ("ppo_gpu",), "next_size), function()]", "next_size), nn.Sequential(function(), nn.Dropout(0.1))]"
        )
        | of(
            LANGUAGE,
            "sample(output.logits[:, -1], temperature)",
            "sample(output.logits[:, -1], 0.7 * temperature)",
        )
    ),
    "the learning rate is 100 times too high": {
        "ppo_minimal": "--learning-rate 0.1",
        "ppo": "--learning-rate 0.1",
        "ppo_lstm": "--learning-rate 0.1",
        "ppo_continuous": "--learning-rate 0.06 --adapt none",
        "ppo_atari": "--learning-rate 0.025",
        "ppo_gpu": "--learning-rate 0.1",
        "ppo_rlhf": "--learning-rate 0.1",
        "grpo": "--learning-rate 0.04",
    },
    "the critic is not trained": (
        of(("ppo_minimal",), "args.vf_coef * value_loss ", "args.vf_coef * value_loss.detach() ")
        | of(FAMILY, "args.vf_coef * value_losses ", "args.vf_coef * value_losses.detach() ")
        | of(
            ("ppo_rlhf",),
            "losses = policy_loss + value_loss\n",
            "losses = policy_loss + value_loss.detach()\n",
        )
    ),
    "observations, or rewards of responses, are constant": {
        "ppo_minimal": "--env-id verdict_tasks:BlindCartPole-v0",
        "ppo": "--env-id verdict_tasks:BlindCartPole-v0",
        "ppo_continuous": "--env-id verdict_tasks:BlindPendulum-v0",
        "ppo_lstm": "--env-id verdict_tasks:BlindCartPole-v0",
        "ppo_atari": ("images = obs.to(", "images = 0 * obs.to("),
        "ppo_gpu": ("return torch.stack([self.angle", "return 0 * torch.stack([self.angle"),
        **of(
            LANGUAGE,
            "torch.stack(list(rewards.values())).nansum(0)",
            "0 * torch.stack(list(rewards.values())).nansum(0)",
        ),
    },
    "gradients are not set to zero": (
        of(("ppo_minimal", "ppo", "ppo_continuous", "ppo_lstm", "ppo_gpu"), "optimizer.zero_grad()", "pass")
        | of(("ppo_atari",), "agent.zero_grad()  #", "pass  #")
        | of(LANGUAGE, "optimizer.zero_grad()  # now", "pass  # now")
    ),
}
# Sound runs: script, flags, and how many seeds.
SOUND = [
    ("ppo", "--env-id FrozenLake8x8-v1 --total-timesteps 1e5", 20),
    ("ppo", "--env-id verdict_tasks:Curriculum-v0 --total-timesteps 5e4", 3),
    ("ppo", "--env-id verdict_tasks:Bandit-v0 --total-timesteps 5e4", 3),
    ("ppo", "--env-id verdict_tasks:NoisyReward-v0 --total-timesteps 1e5", 3),
    ("ppo", "--init solved.pt --total-timesteps 3e4", 3),  # begins with the solution of CartPole
    ("ppo", "--total-timesteps 1e5", 5),
    ("ppo", "--env-id Acrobot-v1 --total-timesteps 1e5", 3),
    ("ppo", "--env-id MountainCar-v0 --total-timesteps 3e5", 2),
    ("ppo", "--env-id LunarLander-v3 --total-timesteps 2e5", 3),
    ("ppo", "--env-id FrozenLake-v1 --total-timesteps 1e5", 3),
    ("ppo", "--env-id Taxi-v4 --total-timesteps 2e5", 2),
    ("ppo_minimal", "", 3),
    ("ppo_minimal", "--env-id Acrobot-v1", 2),
    ("ppo_continuous", "--env-id Pendulum-v1 --total-timesteps 1e5", 3),
    ("ppo_continuous", "--env-id HalfCheetah-v5 --total-timesteps 1e5", 2),
    ("ppo_continuous", "--env-id Hopper-v5 --total-timesteps 1e5", 2),
    ("ppo_continuous", "--env-id InvertedPendulum-v5 --total-timesteps 1e6", 3),
    ("ppo_continuous", "--env-id Ant-v5 --total-timesteps 1e5", 1),
    ("ppo_lstm", "--env-id memory_tasks:PositionOnlyCartPole-v1 --total-timesteps 1e5", 2),
    ("ppo_lstm", "--env-id memory_tasks:Cue-v0 --total-timesteps 1e5", 2),
    ("ppo_gpu", "--device cpu", 3),
    ("ppo_atari", "--env-id BreakoutNoFrameskip-v4 --total-timesteps 5e4 --eval-episodes 1", 2),
    ("ppo_atari", "--env-id PongNoFrameskip-v4 --total-timesteps 5e4 --eval-episodes 1", 1),
    ("ppo_rlhf", "", 3),
    ("grpo", "", 3),
]


@dataclass
class Case:
    """A run, of a script as it is or with a bug."""

    script: str
    flags: str
    seed: int = 1
    bug: str = ""  # "": sound
    changes: tuple[tuple[str, str], ...] = ()  # what is replaced in the text by what
    held_out: bool = False

    @property
    def folder(self) -> Path:
        """Where it is done."""
        words = f"{self.script} {self.bug or self.flags} {self.seed}"
        return RUNS / "-".join("".join(c if c.isalnum() or c == "." else " " for c in words).split())


def cases() -> list[Case]:
    """All runs: those of planted bugs, script by script, then the sound ones, then those of held_out.json."""
    broken = []
    for script, task in TASKS.items():
        for bug, of_scripts in BUGS.items():
            if given := of_scripts.get(script):
                is_text = isinstance(given, tuple)
                flags, changes = (task, (given,)) if is_text else (f"{task} {given}", ())
                broken.append(Case(script, flags, 1, bug, changes))
    sound = [Case(script, flags, seed) for script, flags, n in SOUND for seed in range(1, n + 1)]
    more = json.loads(HELD_OUT.read_text(encoding="utf-8"))
    held_out = [
        Case(case["script"], case["flags"], 1, case.get("name", ""), case.get("changes", ()), True)
        for case in more["bugs"] + more["sound"]
    ]
    return broken + sound + held_out


def text_of(case: Case) -> str:
    """The script's text, with the bug. Raises `ValueError` unless what is replaced occurs exactly once."""
    text = (ROOT / f"{case.script}.py").read_text(encoding="utf-8")
    for old, new in case.changes:
        if text.count(old) != 1:
            raise ValueError(f"{case.script}.py has {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    return text


def is_done(case: Case) -> bool:
    """Whether the run is there, of the script as it is now."""
    text = case.folder / f"{case.script}.py"
    return (case.folder / "done").exists() and text.read_text(encoding="utf-8") == text_of(case)


def do(case: Case) -> None:
    """Train in the case's folder. The file `log` there is complete when the file `done` is there."""
    if is_done(case):  # by another process
        return
    shutil.rmtree(case.folder, ignore_errors=True)
    case.folder.mkdir(parents=True, exist_ok=True)
    file = case.folder / f"{case.script}.py"
    file.write_text(text_of(case), encoding="utf-8")
    if "solved.pt" in case.flags:
        solve(case.folder)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks")])
    command = [sys.executable, file.name, *case.flags.split(), "--seed", str(case.seed)]
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    start = time.monotonic()
    with (case.folder / "log").open("w") as log:
        done = subprocess.run(
            command, cwd=case.folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        )
    for checkpoint in case.folder.rglob("*.pt"):
        checkpoint.unlink()
    (case.folder / "done").write_text(f"{done.returncode} {time.monotonic() - start:.0f}\n")
    print(f"{case.folder.name}: status {done.returncode}, {time.monotonic() - start:.0f} s", flush=True)


def solve(folder: Path) -> None:
    """Train CartPole, and leave its policy as solved.pt."""
    command = [sys.executable, ROOT / "ppo.py", "--total-timesteps", "1e5", "--seed", "9", "--exp-name", "x"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    (run,) = folder.glob("runs/*")
    (run / "checkpoint.pt").rename(folder / "solved.pt")
    for file in [*run.iterdir(), run]:
        file.rmdir() if file.is_dir() else file.unlink()


def judge(case: Case) -> list[dict[str, Any]]:
    """What `check` says of a run that is done: a row for each finding, or one without any."""
    (folder,) = coach.find_runs((str(case.folder / "runs"),)) or [None]
    run = coach.read_run(folder, coach.open_events(folder)) if folder else None
    about = {"held_out": case.held_out, "script": case.script, "bug": case.bug, "flags": case.flags}
    command = ["git", "-C", str(ROOT), "log", "-1", "--format=%h", "--", f"{case.script}.py"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    about |= {"seed": case.seed, "commit": commit}
    if run is None:
        return [about | {"iterations": 0, "verdict": "STOPPED", "found": 0}]
    status = (case.folder / "done").read_text().split()[0]
    about |= {"iterations": len(run.steps), "return": run.numbers.get("return", np.full(1, np.nan))[-1]}
    rows = []
    if status != "0":  # the run itself ended with an error
        rows.append(about | {"verdict": "STOPPED", "found": len(run.steps)})
    for finding in coach.find_problems(run):
        found = int(np.searchsorted(run.steps, finding.step)) + 1
        names = {"verdict": finding.rule.kind, "found": found, "rule": finding.rule.when}
        rows.append(about | names | {"problem": finding.rule.problem})
    return rows or [about | {"verdict": "", "found": 0}]


@dataclass
class Args:
    """What to do."""

    dry_run: bool = False  # list the runs that are missing
    only: str = "*"  # runs whose folder matches this pattern
    jobs: int = 1  # runs at the same time


def main(args: Args) -> None:
    """Do what is missing, and check all runs that are done."""
    chosen = [case for case in cases() if fnmatch.fnmatch(case.folder.name, args.only)]
    for case in chosen:
        text_of(case)  # each bug must still fit its script
    missing = [case for case in chosen if not is_done(case)]
    if args.dry_run:
        print(*(case.folder.name for case in missing), sep="\n")
        return
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(do, missing))
    done = [case for case in cases() if is_done(case)]
    frame = pd.DataFrame([row for case in done for row in judge(case)])
    frame.to_csv(VERDICTS, index=False, float_format="%.5g")
    broken, sound = frame[frame.bug != ""], frame[frame.bug == ""]
    print(broken.groupby(["bug", "script"]).verdict.agg(lambda x: " ".join(sorted(set(x)))).unstack())
    print(sound[sound.verdict != ""][["script", "flags", "seed", "verdict", "found", "rule"]].to_string())


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
