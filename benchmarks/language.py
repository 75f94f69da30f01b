"""Language models: how close the scripts come to the exact optimum, and where they end in reward and KL.

    python benchmarks/language.py run                     # do the missing runs, one after the other
    python benchmarks/language.py run --only 'frontier*' --seeds 1
    python benchmarks/language.py report                  # tables of what is stored, and the figures

All runs are of the task that the scripts make on the spot. Runs of a seed share its supervised model and its
reward model, as separate runs would have them, too. Each run stores one small file.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import fnmatch
import importlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
import torch
import tyro
from experiments import HERE
from figures import COLORS, STYLES, THEMES, style
from matplotlib.figure import Figure
from run import ROOT, provenance, write
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LANGUAGE = HERE / "language_results"
KL_COEFS = (1, 0.5, 0.2, 0.1, 0.05, 0.02)
LOW_KL_COEFS = (0.01, 0.002)
TAGS = {"objective/kl": "kl", "objective/scores": "score", "eval/gold": "gold"}


@dataclass(frozen=True)
class Study:
    """Runs with the same flags, and perhaps a fault planted in the script."""

    name: str
    flags: str = ""
    script: str = "ppo_rlhf"
    seeds: tuple[int, ...] = (1, 2, 3)
    fault: Callable[[Any], None] = lambda script: None


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


STUDIES = [
    Study("default", seeds=(1, 2, 3, 4, 5)),
    *(Study(f"frontier-{beta:g}", f"--kl-coef {beta}") for beta in KL_COEFS if beta != 0.1),
    *(Study(f"low-{beta:g}", f"--kl-coef {beta}") for beta in LOW_KL_COEFS),
    *(Study(f"iterated-{beta:g}", f"--kl-coef {beta} --reward-model-updates 20") for beta in LOW_KL_COEFS),
    Study("k3-in-reward-0.1", "--kl-coef 0.1", fault=k3_in_reward),
    Study("k3-in-reward-0.5", "--kl-coef 0.5", fault=k3_in_reward),
    Study("temperature-0.7", "--temperature 0.7"),
    Study("temperature-left-out", "--temperature 0.7", fault=no_temperature_in_learning),
]


def load_script(name: str) -> Any:
    """A fresh copy of a script, to plant a fault in."""
    sys.path.insert(0, str(ROOT))
    sys.modules.pop(name, None)
    return importlib.import_module(name)


class ModelCache:
    """The models that each seed begins with; made once, they and the random state after them are copied."""

    def __init__(self) -> None:
        self.made: dict[Any, tuple[Any, Any]] = {}

    def install(self, script: Any) -> None:
        """Let the script's `make_models` look here first."""
        make_models = script.make_models

        def cached(args: Any) -> Any:
            key = script.__name__, args.seed, getattr(args, "temperature", 1.0)
            if key not in self.made:
                models = make_models(args)
                self.made = {key: (copy.deepcopy(models.__dict__), torch.get_rng_state())}
                return models
            content, random_state = self.made[key]
            models = script.Models.__new__(script.Models)
            models.__dict__.update(copy.deepcopy(content))
            torch.set_rng_state(random_state)
            return models

        script.make_models = cached


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


def run_study(study: Study, seed: int, cache: ModelCache) -> dict[str, Any]:
    """One run: its results, and its curves."""
    script = load_script(study.script)
    cache.install(script)
    study.fault(script)
    args = tyro.cli(script.Args, args=[*study.flags.split(), "--seed", str(seed)])
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        start = time.monotonic()
        with contextlib.redirect_stdout(io.StringIO()):
            results = script.train(args)
        seconds = time.monotonic() - start
        log = EventAccumulator(str(Path(results.pop("checkpoint")).parent), {"scalars": 0}).Reload()
        curves = {name: [round(event.value, 4) for event in log.Scalars(tag)] for tag, name in TAGS.items()}
    results |= {name: statistics.fmean(curves[name][-5:]) for name in ("score", "gold")}
    if study.name == "default" and study.script == "ppo_rlhf":
        results |= best_of_n(script, script.make_models(args), args)
    result = {"study": study.name, "script": study.script, "seed": seed, "flags": study.flags}
    result["kl_coef"] = args.kl_coef
    return result | {"seconds": round(seconds, 1), **results, "curves": curves}


def run_all(only: str, seeds: list[int]) -> None:
    """Do the runs that are missing."""
    cache = ModelCache()
    chosen = [study for study in STUDIES if fnmatch.fnmatch(f"{study.script}/{study.name}", only)]
    for seed in sorted({seed for study in chosen for seed in study.seeds}):
        for study in chosen:
            path = LANGUAGE / study.script / f"{study.name}__{seed}.json"
            if seed in study.seeds and (not seeds or seed in seeds) and not path.exists():
                result = run_study(study, seed, cache)
                write(path, result | provenance())
                share = result.get("share_of_optimum", float("nan"))
                print(f"{path.stem:<30} {share:7.1%}  {result['seconds']:5.0f} s", flush=True)


def load_language() -> pd.DataFrame:
    """All stored runs."""
    return pd.DataFrame([json.loads(path.read_text()) for path in sorted(LANGUAGE.glob("*/*.json"))])


def frontier_figure(results: pd.DataFrame) -> Figure:
    """Score against KL, with the exact frontier; then score and true taste as β falls."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    honest = results[(results.script == "ppo_rlhf") & results.study.str.match("default|frontier|low-0.01")]
    optimum = honest.groupby("kl_coef")[["kl_optimum", "objective_optimum"]].mean().reset_index()
    scores = optimum.objective_optimum + optimum.kl_coef * optimum.kl_optimum
    left.plot(optimum.kl_optimum, scores, "-", color=COLORS[4], label="exact optimum, by β")
    best = np.mean(list(results.best_of_n[results.best_of_n.notna()]), 0)
    left.plot(best[:, 1], best[:, 2], ":", color=COLORS[2], label="best of n, exact")
    kinds = {
        "frontier-": ("PPO, β from 1 to 0.02", COLORS[0], "o"),
        "k3-in-reward": ("fault: k3 in the reward", COLORS[1], "x"),
        "temperature-left-out": ("fault: temperature left out of learning", COLORS[3], "+"),
    }
    for prefix, (label, color, marker) in kinds.items():
        names = (prefix, "default") if prefix == "frontier-" else (prefix,)
        found = results[(results.script == "ppo_rlhf") & results.study.str.startswith(names)]
        score = found.objective_actor + found.kl_coef * found.kl_actor
        left.plot(found.kl_actor, score, marker, color=color, label=label)
    left.set_xlabel("KL to the reference, nats per response")
    left.set_ylabel("score by the reward model")
    left.legend(loc="lower right")
    found = results[(results.script == "ppo_rlhf") & results.study.str.match("default|frontier|low")]
    again = results[results.study.str.startswith("iterated")]
    for rows, column, label, index in (
        (found, "score", "score", 0),
        (found, "gold", "true taste, never learnt from", 1),
        (again, "gold", "true taste, reward model learnt again", 2),
    ):
        means = rows.groupby("study")[["kl_actor", column]].mean().sort_values("kl_actor")
        right.plot(rows.kl_actor, rows[column], ".", color=COLORS[index], alpha=0.5)
        right.plot(means.kl_actor, means[column], STYLES[index], color=COLORS[index], label=label)
    right.set_xlabel("KL to the reference, nats per response, as β falls from 1 to 0.002")
    right.legend(loc="lower left")
    return figure


def draw_language(folder: Path) -> None:
    """Draw the figure for a light and for a dark page."""
    for theme in THEMES:
        with mpl.rc_context(style(theme)):
            frontier_figure(load_language()).savefig(folder / f"language-{theme}.png", dpi=130)


def print_tables() -> None:
    """Print medians over seeds."""
    results = load_language()
    rows = results.groupby(["script", "study"], sort=False)
    table = rows[["share_of_optimum", "kl_actor", "score", "gold", "seconds"]].median()
    table.insert(0, "runs", rows.size())
    print(table.round(3).to_string())


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", choices=["run", "report"])
    parser.add_argument("--only", default="*", help="script/study, as a pattern")
    parser.add_argument("--seeds", type=int, nargs="*", default=[])
    args = parser.parse_args()
    if args.task == "run":
        run_all(args.only, args.seeds)
    else:
        print_tables()
        draw_language(HERE / "figures")


if __name__ == "__main__":
    main()
