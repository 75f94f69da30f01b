"""Language models: PPO and GRPO on the reviews of ppo_rlhf.py and on the sums of grpo.py.

    python benchmarks/language.py                     # do the missing runs, one after the other
    python benchmarks/language.py 'ppo-beta*' '*/1'   # of these studies, and of the seed 1
    python benchmarks/language_report.py              # the tables and figures of what is stored

Each script is imported, and where its task is not its own, given that of the other. Runs of a seed begin
with the same supervised model and reward model, as those of the command line do. Each run adds a row to
language.csv, and points of its curve to language_curves.csv, as soon as it is done. Seconds are those of
processor time (of one thread) in training, without evaluations, supervised learning and reward model.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import functools
import io
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pandas as pd
import torch
import tyro
from run import ROOT, git, provenance, refuse_uncommitted

sys.path.insert(0, str(ROOT))
from optimum import compare_with_optimum

import grpo
import ppo_rlhf as rlhf

RUNS, CURVES = ROOT / "results/data/language.csv", ROOT / "results/data/language_curves.csv"
RUN_COLUMNS = """study seed script task flags fault kl_coef episodes tokens gradient_steps seconds gold_before
    gold share_of_optimum objective objective_optimum score score_optimum kl kl_optimum best_score_at_kl
    reference_score left_out peak_mib commit versions machine"""
CURVE_COLUMNS = "study seed episodes tokens seconds score kl gold"
SPACING = 2560  # responses between the points of a curve
BETAS = (1, 0.5, 0.2, 0.05)  # of the frontier, with 0.1


class Study(NamedTuple):
    """Runs with the same flags, and perhaps a fault that is planted in the script."""

    name: str
    script: Any
    task: str  # "reviews" or "sums"
    flags: str = ""
    seeds: tuple[int, ...] = (1,)
    fault: str = ""  # a key of FAULTS


def k3_in_reward(scores: Any, kl: Any, mask: Any, kl_coef: float) -> Any:
    """token_rewards with the estimator k3, which is never negative, in the place of k1."""
    return TOKEN_REWARDS(scores, (-kl).exp() - 1 + kl, mask, kl_coef)


def accuracy(rows: list[dict], texts: list[str]) -> torch.Tensor:
    """1 for a right sum, else 0, [B]."""
    return torch.tensor(grpo.accuracy(rows, texts))


TOKEN_REWARDS = rlhf.token_rewards
FAULTS = {"": {}, "k3 in the reward": {"token_rewards": k3_in_reward}}  # in the place of the script's
JUDGES = {"reviews": rlhf.tastes, "sums": accuracy}  # of held-out responses
LONGEST = {"reviews": 8, "sums": 24}  # tokens of a response
FIVE, TWENTY = (1, 2, 3, 4, 5), (*range(1, 19), 4711, 4712)
GRPO = "--learning-rate 1e-3"  # on reviews, as PPO has it
STUDIES = [  # what matters most is first
    Study("ppo-reviews", rlhf, "reviews", seeds=(*FIVE, 11, 12)),
    Study("grpo-sums", grpo, "sums", seeds=TWENTY),
    Study("ppo-iterated", rlhf, "reviews", "--reward-model-updates 24"),
    Study("ppo-kl-target", rlhf, "reviews", "--kl-target 2", (1, 2, 3)),
    Study("grpo-reviews", grpo, "reviews", f"{GRPO} --kl-coef 0.1", FIVE),
    Study("ppo-sums", rlhf, "sums", "--kl-coef 0 --missing-eos-penalty 0"),
    *(
        Study(f"ppo-beta-{beta}", rlhf, "reviews", f"--kl-coef {beta}", (1, 2, 3)[: 3 if beta < 0.1 else 1])
        for beta in BETAS
    ),
    *(Study(f"grpo-beta-{beta}", grpo, "reviews", f"{GRPO} --kl-coef {beta}") for beta in BETAS),
    Study("rloo-reviews", grpo, "reviews", f"{GRPO} --kl-coef 0.1 --scale-rewards none"),
    *(
        Study(
            f"k3-in-loss-{x}-{y}", grpo, "reviews", f"{GRPO} --kl-in loss --scale-rewards {x} --kl-coef {y}"
        )
        for x in ("none", "group")
        for y in (0.1, 0.5)
    ),
    Study("k3-in-reward", rlhf, "reviews", "--kl-coef 0.5", fault="k3 in the reward"),
    Study("ppo-beta-0.002", rlhf, "reviews", "--kl-coef 0.002"),
    Study("ppo-low-iterated", rlhf, "reviews", "--kl-coef 0.002 --reward-model-updates 24"),
]


@functools.cache
def base_models(task: str, seed: int) -> tuple[rlhf.Models, rlhf.Task]:
    """The models that the runs of a seed begin with, made as the command lines of the scripts make them."""
    rlhf.seed_everything(seed)
    if task == "reviews":
        return rlhf.make_reviews(rlhf.Args(seed=seed))
    made, sums = grpo.make_sums(grpo.Args(seed=seed, kl_coef=1))  # with a reference
    head = torch.nn.Linear(made.actor.norm.normalized_shape[0], 1)
    torch.nn.init.zeros_(head.weight)
    critic = rlhf.ScalarModel(copy.deepcopy(made.actor), head)
    return rlhf.Models(made.actor, critic, made.reference, None), rlhf.Task(*sums)


def for_grpo(models: rlhf.Models, task: rlhf.Task, args: grpo.Args) -> tuple[grpo.Models, grpo.Task]:
    """The same for grpo.py. The score of a review is a reward function of its text."""

    def review_score(rows: list[dict], texts: list[str]) -> torch.Tensor:
        # A text of all 8 tokens had no stop token: `tokenize` adds one to shorter ones only.
        responses = rlhf.tokenize(task, rows, texts, rlhf.Args())
        return rlhf.score(models, task, rows, responses, rlhf.Args())[0]

    functions = {"review_score": review_score} if models.reward_model else task.reward_functions
    reference = models.reference if args.kl_coef else None
    return grpo.Models(models.actor, reference), grpo.Task(*task[:4], functions)


class Recorder:
    """Points of a run's curve. Its clock stops during evaluations."""

    def __init__(self, script: Any, args: Any, judge: Any):
        self.script, self.args, self.judge = script, args, judge
        self.evaluate_policy, self.write_log = script.evaluate, script.Run.log
        self.episodes, self.tokens, self.seconds, self.resumed = 0, 0.0, 0.0, 0.0
        self.recent: list[tuple[float, float]] = []  # score and KL of each iteration since the last point
        self.points: list[dict[str, Any]] = []

    def evaluate(self, models: Any, task: Any, args: Any) -> dict[str, float]:
        """Evaluate as the script does, and record a point."""
        if self.points:
            self.seconds += time.process_time() - self.resumed
        if self.script is grpo:
            task = task._replace(reward_functions={"gold": self.judge})
        metrics = self.evaluate_policy(models, task, args)
        point = {"episodes": self.episodes, "tokens": round(self.tokens), "seconds": self.seconds}
        score, kl = map(statistics.fmean, zip(*self.recent, strict=True)) if self.recent else ("", "")
        self.points.append(point | {"score": score, "kl": kl, "gold": metrics["eval/gold"]})
        self.recent.clear()
        self.resumed = time.process_time()
        return metrics

    def log(self, run: Any, episodes: int, metrics: dict[str, float], samples: dict) -> None:
        """Log as the script does, and keep the metrics of an iteration."""
        self.write_log(run, episodes, metrics, samples)
        if samples:
            self.episodes = episodes + self.args.batch_size
            self.tokens += metrics["completions/mean_length"] * self.args.batch_size
            self.recent.append((metrics["reward"], metrics.get("objective/kl", 0.0)))


def run_study(study: Study, seed: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run: its row of results, and its points."""
    script = study.script
    args = tyro.cli(script.Args, args=[*study.flags.split(), "--seed", str(seed)])
    args = replace(args, eval_every=SPACING // args.batch_size, max_response_length=LONGEST[study.task])
    models, task = copy.deepcopy(base_models(study.task, seed))
    judge = JUDGES[study.task]
    recorder = Recorder(script, args, judge)
    changes = {"evaluate": recorder.evaluate} | FAULTS[study.fault]
    if script is grpo:
        made = for_grpo(models, task, args)
        changes["make_sums"] = lambda _: made
    else:
        changes |= {"make_reviews": lambda _: (models, task), "tastes": judge}
    silence, changed = contextlib.redirect_stdout(io.StringIO()), patch.multiple(script, **changes)
    logged = patch.object(script.Run, "log", lambda run, *values: recorder.log(run, *values))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), silence, changed, logged:
        script.train(args)  # trains the models made above
    points = recorder.points
    result = {
        "kl_coef": args.kl_coef,
        "episodes": recorder.episodes,
        "tokens": round(recorder.tokens),
        "gradient_steps": recorder.episodes // args.batch_size * args.update_epochs * args.num_minibatches,
        "seconds": round(recorder.seconds, 1),
        "gold_before": points[0]["gold"],
        "gold": points[-1]["gold"],
    }
    if study.task == "reviews":
        result |= compare_with_optimum(models, task, rlhf.Args(), args.kl_coef)
    return result, points


def append(path: Path, columns: str, rows: list[dict[str, Any]]) -> None:
    """Add rows to a CSV file."""
    frame = pd.DataFrame(rows, columns=columns.split())
    frame.to_csv(path, mode="a", header=not path.exists(), index=False, float_format="%.5g")


def main() -> None:
    """The command line: do the runs that are missing."""
    refuse_uncommitted()
    patterns, about = sys.argv[1:] or ["*"], provenance()
    made_with = {
        "commit": git("log", "-1", "--format=%h", "--", "ppo_rlhf.py", "grpo.py"),
        "versions": f"python={about['versions']['python']} torch={torch.__version__}",
        "machine": f"{about['machine']['cpu']}, 1 of {about['machine']['cores']} cores",
    }
    for study, seed in [(x, seed) for x in STUDIES for seed in x.seeds]:
        stored = pd.read_csv(RUNS) if RUNS.exists() else pd.DataFrame({"study": [], "seed": []})
        is_stored = ((stored.study == study.name) & (stored.seed == seed)).any()
        if is_stored or not any(fnmatch.fnmatch(f"{study.name}/{seed}", x) for x in patterns):
            continue
        result, points = run_study(study, seed)
        name = {"study": study.name, "seed": seed}
        append(CURVES, CURVE_COLUMNS, [name | point for point in points])
        settings = study._asdict() | {"script": study.script.__name__}
        append(RUNS, RUN_COLUMNS, [settings | name | result | made_with])
        share = result.get("share_of_optimum", result["gold"])
        print(f"{study.name}/{seed:<3} {share:7.1%} {result['seconds']:5.0f} s", flush=True)


if __name__ == "__main__":
    main()
