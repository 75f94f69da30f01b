"""Language models: how close the scripts come to the optimum, and where they end in reward and KL.

    python benchmarks/language.py                             # do the missing runs, one after the other
    python benchmarks/language.py --only 'ppo_rlhf/frontier*' --seeds 1
    python benchmarks/language_report.py                      # the tables and figures of what is stored

All runs are of the built-in tasks of the scripts. Runs of a seed share its supervised model and its
reward model, as separate runs would have them, too. Each run stores one small file.
"""

from __future__ import annotations

import contextlib
import copy
import fnmatch
import importlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from experiments import HERE
from run import ROOT, provenance, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LANGUAGE = HERE / "language_results"
KL_COEFS = (1, 0.5, 0.2, 0.05, 0.02)  # and 0.1, the default
LOW_KL_COEFS = (0.01, 0.002)
TAGS = {  # curves: by their names in the results, their possible tags
    "objective": ("objective/rlhf_reward",),
    "kl": ("objective/kl",),
    "score": ("objective/scores", "reward"),
    "gold": ("eval/gold", "eval/accuracy"),
    "length": ("response/length", "completions/mean_length"),
}
POINTS = 40  # of a stored curve


def unchanged(script: Any) -> None:
    """Nothing is planted in the script."""


def k3_in_reward(script: Any) -> None:
    """The estimator k3, which is never negative, in the place of k1 in the reward."""
    token_rewards = script.token_rewards

    def wrong(scores: Any, kl: Any, mask: Any, kl_coef: float) -> Any:
        return token_rewards(scores, (-kl).exp() - 1 + kl, mask, kl_coef)

    script.token_rewards = wrong


def no_temperature_in_learning(script: Any) -> None:
    """Logits divided by the temperature in sampling only."""
    token_log_probs = script.token_log_probs
    script.token_log_probs = lambda model, batch, temperature: token_log_probs(model, batch, 1.0)


def rarer_responses(script: Any) -> None:
    """An optimum that counts rarer responses, too."""
    script.compare_with_optimum = partial(script.compare_with_optimum, floor=1e-6)


def sums(script: Any) -> None:
    """The sums of grpo.py as a task for ppo_rlhf.py: the same examples and verifier, and a critic."""
    grpo, collect = load_script("grpo"), script.collect

    def make_models(args: Any) -> Any:
        made = grpo.make_models(replace(grpo.SUMS, seed=args.seed))
        actor = made.actor
        head = script.zero_head(actor.base_model.norm.normalized_shape[0])
        critic = script.ScalarModel(copy.deepcopy(actor.base_model), head)
        models = script.Models(actor, critic, copy.deepcopy(actor).requires_grad_(False), None)
        models.tokenizer, models.stop_tokens = made.tokenizer, made.stop_tokens
        models.prompts, models.held_out = made.prompts, made.held_out
        models.reward_function = grpo.verify
        return models

    @torch.no_grad()
    def accuracy(models: Any, args: Any) -> float:
        responses, _ = script.generate(models, *models.held_out, args)
        return float(script.score(models, responses, args).mean())

    def collect_and_evaluate(models: Any, args: Any, state: Any) -> tuple[Any, dict[str, float]]:
        batch, metrics = collect(models, args, state)
        return batch, metrics | {"eval/gold": accuracy(models, args)}

    script.make_models, script.collect = make_models, collect_and_evaluate
    script.tastes = lambda _, responses: torch.zeros(len(responses.mask))  # the human judges reviews only
    script.Run.compare = lambda run: {"accuracy": accuracy(run.models, run.args)}


@dataclass(frozen=True)
class Study:
    """Runs with the same flags, and perhaps a change to the script."""

    script: str
    name: str
    flags: str = ""
    seeds: tuple[int, ...] = (1, 2, 3)
    change: Callable[[Any], None] = unchanged


FIVE = (1, 2, 3, 4, 5)
NO_KL = "--kl-coef 1e-6 --missing-eos-penalty 0"
PUBLISHED = "--kl-in loss --scale-rewards group --loss-aggregation sequence-mean"
STUDIES = [
    Study("ppo_rlhf", "default", seeds=FIVE),
    Study("ppo_rlhf", "rarer", seeds=FIVE, change=rarer_responses),
    Study("grpo", "default", seeds=FIVE),
    Study("grpo", "rloo", "--scale-rewards none"),
    Study("ppo_rlhf", "sums", NO_KL, FIVE, sums),
    Study("grpo", "sums", "--task sums", FIVE),
    *(Study("ppo_rlhf", f"frontier-{beta:g}", f"--kl-coef {beta}") for beta in KL_COEFS),
    *(Study("ppo_rlhf", f"low-{beta:g}", f"--kl-coef {beta}") for beta in LOW_KL_COEFS),
    Study("ppo_rlhf", "iterated-0.002", "--kl-coef 0.002 --reward-model-updates 20", (1, 2)),
    Study("ppo_rlhf", "k3-in-reward", "--kl-coef 0.5", change=k3_in_reward),
    Study("ppo_rlhf", "temperature-0.7", "--temperature 0.7", (1, 2)),
    Study("ppo_rlhf", "temperature-left-out", "--temperature 0.7", change=no_temperature_in_learning),
    *(
        Study("grpo", f"{kl_in}-{beta:g}", f"--kl-in {kl_in} --kl-coef {beta} --scale-rewards none")
        for kl_in in ("reward", "loss", "loss-weighted")
        for beta in (0.05, 0.1, 0.5)
        if (kl_in, beta) != ("reward", 0.1)  # "rloo"
    ),
    *(
        Study("grpo", f"std-{kl_in}-{beta:g}", f"--kl-in {kl_in} --kl-coef {beta}", (1, 2))
        for kl_in in ("reward", "loss", "loss-weighted")
        for beta in (0.05, 0.1, 0.5)
        if (kl_in, beta) != ("reward", 0.1)  # the default
    ),
    Study("grpo", "published", PUBLISHED),
    *(Study("grpo", f"group-{size}", f"--group-size {size}") for size in (2, 4, 16, 32)),
    *(Study("ppo_rlhf", f"lambda-{value:g}", f"--gae-lambda {value}") for value in (0, 0.95)),
]


def load_script(name: str) -> Any:
    """A fresh copy of a script, to change something in."""
    sys.path.insert(0, str(ROOT))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


class ModelCache:
    """The models that each seed begins with; made once, they and the random state after them are copied."""

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Any, Any]] = {}

    def install(self, script: Any, task: str) -> None:
        """Let the script's `load_models` look here first."""
        load_models = script.load_models

        def cached(args: Any) -> Any:
            key = script.__name__, task, args.seed, args.temperature, bool(args.kl_coef)
            if key not in self.made:
                models = load_models(args)
                self.made[key] = copy.deepcopy(models.__dict__), torch.get_rng_state()
                return models
            content, random_state = self.made[key]
            models = script.Models.__new__(script.Models)
            models.__dict__.update(copy.deepcopy(content))
            torch.set_rng_state(random_state)
            return models

        script.load_models = cached


@torch.no_grad()
def best_of_n(script: Any, models: Any, args: Any) -> dict[str, Any]:
    """KL and score of the best of n responses of the reference, which needs no training.

    A response of score r has the probability F(r)^n - F(r-)^n, where F is the distribution of the reference's
    scores, by all responses that are likely.
    """
    best: dict[int, Any] = dict.fromkeys((2**i for i in range(9)), 0.0)
    prompts = list(zip(*models.prompts, strict=True))
    for prompt, mask in prompts:
        responses, (log_probs,) = script.enumerate_responses(
            [models.reference], prompt[mask], models.tokenizer, args, floor=1e-6
        )
        scores, order = script.score(models, responses, args).double().sort()
        log_probs = torch.log_softmax(log_probs[order], 0)

        def kl_and_score(new_log_probs: Any, log_probs: Any = log_probs, scores: Any = scores) -> Any:
            probs = new_log_probs.exp()
            kl = torch.nansum(probs * (new_log_probs - log_probs))
            return torch.stack([kl, (probs * scores).sum()]) / len(prompts)

        below = torch.cat([torch.zeros(1), log_probs.exp().cumsum(0)]).double()
        for n in best:
            best[n] = best[n] + kl_and_score((below[1:] ** n - below[:-1] ** n).clamp(min=0).log())
    return {"best_of_n": [[n, *(round(x, 4) for x in point.tolist())] for n, point in best.items()]}


def thin(values: Any) -> list[float]:
    """A curve as means over parts of equal length."""
    return [float(f"{part.mean():.5g}") for part in np.array_split(np.asarray(values), POINTS)]


def read_curves(folder: Path, batch_size: int) -> dict[str, list[float]]:
    """Curves of a run, with its tokens so far and its seconds since training began."""
    log = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    logged = {
        name: log.Scalars(tag) for name, tags in TAGS.items() for tag in tags if tag in log.Tags()["scalars"]
    }
    found: dict[str, Any] = {name: [event.value for event in events] for name, events in logged.items()}
    found["tokens"] = np.cumsum(found.pop("length")) * batch_size
    found["seconds"] = [event.wall_time - log.FirstEventTimestamp() for event in logged["score"]]
    return {name: thin(values) for name, values in found.items()}


def run_study(study: Study, seed: int, cache: ModelCache) -> dict[str, Any]:
    """One run: its results, and its curves."""
    script = load_script(study.script)
    study.change(script)
    cache.install(script, "sums" if study.name == "sums" else "reviews")
    flags = [*study.flags.split(), "--seed", str(seed)]
    default = script.SUMS if "--task sums" in study.flags else script.Args()
    args = tyro.cli(script.Args, args=flags, default=default)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        start = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            results = script.train(args)
        seconds = time.monotonic() - start
        curves = read_curves(Path(results.pop("checkpoint")).parent, args.batch_size)
    results |= {name: statistics.fmean(curves[name][-2:]) for name in ("score", "gold", "kl")}
    if (study.script, study.name) == ("ppo_rlhf", "default"):
        results |= best_of_n(script, script.load_models(args), args)
    result = {"study": study.name, "script": study.script, "seed": seed, "flags": study.flags}
    passes = args.update_epochs if study.script == "ppo_rlhf" else args.num_iterations
    result["kl_coef"], result["temperature"] = args.kl_coef, args.temperature
    result["gradient_steps"] = passes * args.num_minibatches * int(args.total_episodes // args.batch_size)
    return result | {"seconds": round(seconds, 1), **results, "curves": curves}


@dataclass
class Args:  # the comments are the texts of --help
    only: str = "*"  # which runs: script/study, as a pattern
    seeds: tuple[int, ...] = FIVE  # of these seeds


def main() -> None:
    """The command line: do the runs that are missing."""
    args = tyro.cli(Args, description=__doc__)
    cache = ModelCache()
    for seed in args.seeds:
        for study in STUDIES:
            path = LANGUAGE / study.script / f"{study.name}__{seed}.json"
            wanted = fnmatch.fnmatch(f"{study.script}/{study.name}", args.only)
            if wanted and seed in study.seeds and not path.exists():
                result = run_study(study, seed, cache)
                write(path, result | provenance())
                share = result.get("share_of_optimum", result["gold"])
                print(f"{study.script}/{path.stem:<28} {share:7.1%}  {result['seconds']:5.0f} s", flush=True)


if __name__ == "__main__":
    main()
