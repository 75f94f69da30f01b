"""Plan a run, and check runs: advice for all scripts here, in one place.

    python coach.py plan --env-id HalfCheetah-v5 --total-timesteps 1e6
    python coach.py check runs/*
    python coach.py check "runs/*" --watch

`plan` says which script fits an environment, and what a run will do. It takes any flag of the script, and
refuses unsafe settings. It needs the scripts beside this file.

`check` reads what runs have logged for TensorBoard, those of CleanRL too. For each run, it prints its metrics
at first and now, and what it finds. WRONG is what no sound run has, and it stays. A QUESTION is about
something that may be right for your task, and is asked while it is so. `check` needs no other file.

The exit status is 0 without a WRONG, 1 with one, and 2 if a plan is refused, or a run cannot be read.
docs/metrics.md explains the metrics and the rules, and says what they found in runs with planted bugs.
"""

import contextlib
import importlib
import json
import logging
import math
import operator
import os
import re
import shlex
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

# ------------------------------------------------- Metrics and rules ---------------------------------------


class Metric(NamedTuple):
    """A number that runs log."""

    name: str  # in the rules
    label: str  # in the printed table; without one, it is not in there
    healthy: str  # "below x" and "above x" are compared with the number
    tags: tuple[str, ...]  # the first one that a run has


METRICS = [
    Metric("return", "return", "rises", ("charts/episodic_return",)),
    Metric("return_std", "", "", ("charts/episodic_return_std",)),
    Metric("return_min", "", "", ("charts/episodic_return_min",)),
    Metric("return_max", "", "", ("charts/episodic_return_max",)),
    Metric("greedy_return", "greedy return", "as the return", ("eval/greedy_return",)),
    Metric("length", "length", "as the task asks", ("charts/episodic_length",)),
    Metric("reward", "reward", "rises", ("reward",)),
    Metric("response_length", "length of responses", "as the task asks", ("completions/mean_length",)),
    Metric("kl", "KL divergence", "below 0.05", ("losses/kl", "losses/approx_kl")),
    Metric("approx_kl", "", "", ("losses/approx_kl",)),
    Metric("token_kl", "KL per token", "below 0.05", ("policy/approxkl_avg",)),
    Metric("first_kl", "KL before the 1st step", "below 1e-4", ("losses/first_approx_kl",)),
    Metric("clipfrac", "clip fraction", "below 0.4", ("losses/clipfrac", "policy/clipfrac_avg")),
    Metric("entropy", "entropy", "falls slowly", ("losses/entropy",)),
    Metric("token_entropy", "entropy per token", "falls slowly", ("entropy",)),
    Metric("std", "standard deviation", "below 3", ("losses/std",)),
    Metric("explained_variance", "explained variance", "above 0", ("losses/explained_variance",)),
    Metric("critic_explained_variance", "explained variance", "above 0", ("val/explained_variance",)),
    Metric("critic_error", "critic error", "falls", ("losses/critic_error",)),
    Metric("policy_loss", "policy loss", "near 0", ("losses/policy_loss", "loss/policy_avg")),
    Metric("value_loss", "value loss", "bounded", ("losses/value_loss", "loss/value_avg")),
    Metric("grad_norm", "gradient norm", "bounded", ("losses/grad_norm",)),
    Metric("language_grad_norm", "gradient norm", "bounded", ("grad_norm",)),
    Metric("reward_clipfrac", "clipped rewards", "below 0.01", ("losses/reward_clipfrac",)),
    Metric("obs_clipfrac", "clipped observations", "below 0.02", ("losses/obs_clipfrac",)),
    Metric("reference_kl", "KL from the reference", "below 10", ("objective/kl",)),
    Metric("sampling_difference", "sampling vs. learning", "below 0.1",
           ("sampling/sampling_logp_difference/mean",)),
    Metric("equal_groups", "groups of equal reward", "below 0.5", ("frac_reward_zero_std",)),
    Metric("cut_off", "responses cut off", "below 0.1", ("completions/clipped_ratio",)),
    Metric("gold", "held-out score", "rises", ("eval/gold",)),
]  # fmt: skip

SHOWN = "return", "reward", "kl", "token_kl"  # with --watch
# Prefixes of metrics that are not logged in every iteration, and metrics that must be finite.
NOT_IN_EACH = "return", "greedy", "length", "gold"
FINITE = {"reward", "kl", "token_kl", "entropy", "token_entropy", "policy_loss", "value_loss"}
# Settings that the rules compare, or that their numbers are made of.
SETTINGS = {
    "update_epochs", "num_minibatches", "clip_coef", "gamma", "norm_adv", "norm_rewards", "min_log_std",
    "init_log_std", "num_envs", "max_grad_norm",
}  # fmt: skip
# Numbers that are made of other ones, and in which row of the table a finding about one is shown.
# docs/metrics.md defines all names of the rules.
DERIVED = {
    "gain": "return", "largest_gain": "return", "equal_returns": "return", "episodes": "return",
    "missing_return": "", "length_share": "length", "greedy_gap": "greedy_return", "largest_kl": "kl",
    "entropy_share": "entropy", "grad_excess": "grad_norm", "approx_kl": "kl", "reward_gain": "reward",
    "equal_rewards": "reward", "gold_drop": "gold",
}  # fmt: skip


# Sections of docs/metrics.md.
SETTING, UPDATE, RETURN = "Unsafe settings", "The update", "The return does not rise"
DATA, LANGUAGE = "The data and the critic", "Language models"


class Rule(NamedTuple):
    """A condition, how many iterations in a row it must hold, what is then wrong, and what to do."""

    when: str  # comparisons: false while a number is unknown, so that "not gain > 1" is true
    iterations: int
    problem: str
    remedy: str
    section: str

    @property
    def kind(self) -> str:
        """Whether no sound run has it."""
        return "WRONG" if self in RULES else "QUESTION"


# Settings that `plan` refuses. `check` finds them among the settings that a run has logged.
UNSAFE = [
    Rule("update_epochs > 30", 1, "more than 30 epochs per rollout",
         "the policy moves too far from the one that collected the data; 3 to 10 epochs are usual", SETTING),
    Rule("clip_coef > 0.3", 1, "a clip range above 0.3",
         "probabilities change by more than 30% before the clip stops their gradient; 0.1 to 0.3 is usual",
         SETTING),
    Rule("unnormalised_steps > 1", 1, "several gradient steps on advantages that are not normalised",
         "the policy loss has the scale of the rewards, and all other coefficients must fit it: use "
         "--norm-adv (ppo_continuous.py: or --norm-rewards), or --update-epochs 1 --num-minibatches 1",
         SETTING),
]  # fmt: skip
# What no sound run has, the most serious first. One such finding stays, also when its metric recovers. All
# limits were chosen on sound runs, and on runs with planted bugs: docs/metrics.md has both in a table.
RULES = [
    *UNSAFE,
    Rule("monitored < 1", 1, "the KL divergence or the clip fraction is not logged",
         "log both, as losses/approx_kl and losses/clipfrac: they show how far an update moves the policy",
         UPDATE),
    Rule("finite < 1", 1, "a loss, the KL divergence, the entropy or a reward is not finite",
         "look for NaN in rewards and observations; lower --learning-rate", UPDATE),
    Rule("first_kl > 1e-4", 2, "acting and learning do not compute the same policy",
         "before the first gradient step, the KL divergence must be 0, up to rounding: look for dropout, "
         "other masks, or a normaliser that changes between acting and learning", UPDATE),
    Rule("sampling_difference > 0.1", 2, "sampling and learning do not compute the same log-probabilities",
         "compare those of one response: temperature, padding, cache, dtype", LANGUAGE),
    Rule("clipfrac = 0 and kl > 0.02 and steps > 1", 3, "no sample is ever clipped, though the policy moves",
         "the ratio is always 1: are the old log-probabilities those of the policy that acted?", UPDATE),
    Rule("approx_kl = 0 and clipfrac = 0 and steps > 1 and progress > 0.2 and not entropy_share < 0.1", 5,
         "the approximate KL divergence is exactly 0",
         "the ratio is always 1, or no step is taken: are the old log-probabilities those of the policy that "
         "acted, and do the weights change?", UPDATE),
    Rule("largest_kl > 0.3 and largest_gain < 0.5 and entropy_share < 0.05", 8,
         "an update was far too large, and the policy collapsed",
         "in changed code, check the sign of the policy loss first; else start again with a third of the "
         "--learning-rate", UPDATE),
    Rule("largest_kl > 0.3 and largest_gain < 0.5 and gain < -0.5", 8,
         "an update was far too large, and the return fell",
         "in changed code, check the sign of the policy loss first; else start again with a third of the "
         "--learning-rate", UPDATE),
    Rule("kl > 0.1", 8, "updates are much too large",
         "lower --learning-rate (if it adapts to the KL: --desired-kl), or --update-epochs; if the KL stays"
         " so large when the rate has decayed, acting and learning differ", UPDATE),
    Rule("kl > 0.05", 8, "updates are too large",
         "lower --learning-rate (if it adapts to the KL: --desired-kl), or --update-epochs; if the KL stays"
         " so large when the rate has decayed, acting and learning differ", UPDATE),
    Rule("clipfrac > 0.8", 5, "nearly all samples are clipped",
         "clipped samples have no gradient, so that nothing holds the policy: lower --learning-rate, or "
         "--update-epochs", UPDATE),
    Rule("clipfrac > 0.4", 20, "many samples are clipped for long, and the policy drifts",
         "lower --learning-rate, or --update-epochs", UPDATE),
    Rule("token_kl > 1", 1, "an update of the language model was extremely large",
         "start again with a lower --learning-rate", LANGUAGE),
    Rule("token_kl = 0 and clipfrac = 0 and steps > 1 and progress > 0.2 and not equal_groups > 0.99", 5,
         "the KL divergence per token is exactly 0",
         "the ratio is always 1, or no step is taken: are the old log-probabilities those of the policy that "
         "acted, and do the weights change?", LANGUAGE),
]  # fmt: skip
# What may be right for the task. It is asked while it is so: in one of the last iterations.
QUESTIONS = [
    Rule("largest_kl > 1", 1, "an update was extremely large",
         "did the return recover? If not, lower --learning-rate", UPDATE),
    Rule("episodes < 1 and progress > 0.1", 10, "no episode has ended, or none is logged",
         "are episodes longer than the run so far? If they never end, nothing tells whether the run learns: "
         "give the environment a time limit (max_episode_steps). Log returns as charts/episodic_return",
         RETURN),
    Rule("equal_returns > 0", 20, "all returns have been the same",
         "are rewards rare, or is the task solved? If neither, print the rewards of a few episodes", RETURN),
    Rule("gain < -0.5", 10, "the return is lower than at first",
         "does the task become harder? If not, check the sign of the policy loss, the ends of episodes in "
         "the advantages, that advantages belong to their actions, that the learner sees the environment's "
         "rewards, and that actions reach their environment", RETURN),
    Rule("entropy_share < 0.05 and gain < 1", 20,
         "the policy is almost deterministic, and the return has hardly risen",
         "was the task solved when the run began? If not, the policy collapsed: lower --learning-rate, or "
         "raise --ent-coef; check that the rewards favour what you want", RETURN),
    Rule("std < 0.05 and gain < 1", 20, "the policy is almost deterministic, and the return has hardly risen",
         "was the task solved when the run began? If not, raise --min-log-std, or --ent-coef", RETURN),
    Rule("kl < 1e-5 and progress < 0.9 and not gain > 1 and not entropy_share < 0.05", 20,
         "the policy hardly changes",
         "is the task solved, or a reward still to be found? If not: does the optimizer step, is each part "
         "of the loss of shape [B], is --learning-rate too low?", RETURN),
    Rule("clipfrac = 0 and kl < 1e-3 and steps > 1 and progress < 0.9 and not gain > 1 and not "
         "entropy_share < 0.05", 20, "no sample is ever clipped",
         "is the task solved, or a reward still to be found? If not, updates are very small: raise "
         "--learning-rate or --update-epochs, or lower --ent-coef", UPDATE),
    Rule("entropy_share > 0.9 and progress > 0.5", 10, "the policy is nearly as random as at first",
         "are rewards rare? If not, lower --ent-coef, or raise --learning-rate; check that advantages belong "
         "to their actions", RETURN),
    Rule("std > 3", 10, "the policy became very random",
         "are the actions at their bounds the best ones? If not, lower --ent-coef, or --learning-rate: 1 is "
         "half of an action's range", DATA),
    Rule("gain < 0.5 and progress > 0.5", 10, "the return has not risen beyond its noise",
         "was the task solved when the run began, or are rewards rare? If not, see the symptoms in "
         "docs/metrics.md", RETURN),
    Rule("explained_variance < 0.05 and not critic_error < 0.1 and progress > 0.1", 20,
         "the critic predicts little",
         "are rewards rare, or noise, or the same in all states? If not, check that the observations tell "
         "what the return depends on, and that --vf-coef is above 0 and the values are not detached", DATA),
    Rule("critic_error > 0.9 and progress > 0.3", 20, "the critic's error is as large as the returns",
         "are rewards rare, or noise? If not, check that --vf-coef is above 0, and the values not detached",
         DATA),
    Rule("grad_excess > 100", 20, "the gradient is clipped to less than a hundredth",
         "does the return rise all the same? If not: in changed code, check the advantages; else scale the "
         "rewards (--norm-rewards), or lower --vf-coef", UPDATE),
    Rule("reward_clipfrac > 0.5", 10, "most scaled rewards are clipped",
         "are all returns equal, because the task is solved? If not, the learner sees no difference between "
         "rewards: subtract their mean, or use --no-norm-rewards", DATA),
    Rule("obs_clipfrac > 0.02", 10, "many observations are more than ten deviations from their mean",
         "are such extremes part of the task? If a number stands for a missing one, give 0 instead, and a "
         "binary number that says so", DATA),
    Rule("length < 10 and length_share < 0.5 and gain > 0.3", 20,
         "the return rises, and episodes shorten to nothing",
         "is a quick end what you want? Watch the agent. If it is not, look for rewards that are negative in "
         "each step", RETURN),
    Rule("greedy_gap > 0.5 and progress > 0.2", 1, "the greedy return is far below the return of training",
         "must the best policy be random here? If not, lower --ent-coef or train longer; in changed code, "
         "check that training and evaluation see the same observations", RETURN),
    Rule("missing_return > 0 and progress > 0.999", 1, "the return is below Gymnasium's threshold for solved",
         "does the unchanged script, or results/README.md, reach no more in as many steps? If it does, look "
         "for what slows learning", RETURN),
    Rule("gamma < 0.5 and length > 2", 1, "the discount factor is below 0.5",
         "are only the next two rewards to count? If not: the horizon is 1 / (1 - γ) steps, and 0.9 to 0.999 "
         "is usual", RETURN),
    Rule("sampling_difference > 0.003", 5, "sampling and learning differ somewhat",
         "is it the rounding of bfloat16, or another program that samples? If not, compare the "
         "log-probabilities of one response: temperature, padding, cache", LANGUAGE),
    Rule("equal_rewards > 0", 10, "all responses have had the same reward",
         "are rewards rare? If not, print those of a few responses", LANGUAGE),
    Rule("reward_gain < -2", 10, "the reward is lower than at first",
         "does the task become harder? If not, lower --learning-rate; check the sign of the policy loss, and "
         "which reward is of which response", LANGUAGE),
    Rule("reward_gain < 1 and progress > 0.5", 10, "the reward is hardly higher than at first",
         "was it high at first? If not, raise --learning-rate, if the KL divergence per token is below "
         "0.001, and check the reward function", LANGUAGE),
    Rule("equal_groups > 0.9 and reward_gain < 1", 10, "nearly all groups of responses have equal rewards",
         "are the prompts solved? If not, they are too hard, or the model is destroyed: nothing is learnt",
         LANGUAGE),
    Rule("critic_explained_variance < 0.05 and progress > 0.3", 10,
         "the critic of the language model predicts little",
         "does the reward rise all the same? If not, raise --critic-learning-rate, above all in short runs",
         LANGUAGE),
    Rule("cut_off > 0.5", 10, "most responses are cut off",
         "are they meant to fill --max-response-length? If not, raise it, or check the stop tokens, which a "
         "run prints at its start", LANGUAGE),
    Rule("gold_drop > 0.5 and reward_gain > 2", 10, "the reward rises, and the held-out score falls",
         "are the completions still good? If not, the reward model is exploited: raise --kl-coef, or stop "
         "earlier", LANGUAGE),
    Rule("reference_kl > 30", 10, "the policy is far from the reference",
         "are the completions still good? If not, the reward is exploited: raise --kl-coef", LANGUAGE),
]  # fmt: skip


# ------------------------------------------------- Reading runs --------------------------------------------


@dataclass
class RunLog:
    """What a run has logged."""

    folder: Path
    settings: dict[str, str]
    steps: np.ndarray  # [I], transitions or responses of each of I iterations, as they were logged
    last_time: float  # of the last entry, in seconds since 1970
    total: float = math.nan  # how many steps were asked for, if that is logged
    finished: bool = False  # whether all iterations are there
    live: bool | None = None  # whether a process still trains, if the run's lock tells
    numbers: dict[str, np.ndarray] = field(default_factory=dict)  # what the rules compare, [I] each


def find_runs(paths: tuple[str, ...]) -> list[Path]:
    """The folders with TensorBoard's files, at any depth below these paths or patterns."""
    folders: set[Path] = set()
    for path in [Path(path) for text in paths for path in ([text] if Path(text).exists() else glob(text))]:
        files = path.rglob("*tfevents*") if path.is_dir() else [path]
        folders |= {file.parent for file in files if "tfevents" in file.name and file.is_file()}
    return sorted(folders)


def open_events(folder: Path) -> EventAccumulator:
    """A reader of what a run logs; each `Reload` reads what is new."""
    logging.getLogger("tensorboard").setLevel("ERROR")  # it warns of each step that a --resume repeats
    return EventAccumulator(str(folder), size_guidance={"scalars": 0})  # 0: all, not a sample


def read_settings(events: EventAccumulator) -> dict[str, str]:
    """The settings, from the table that the script has logged."""
    tags = [tag for tag in events.Tags()["tensors"] if re.match("(settings|hyperparameters)/", tag)]
    if not tags:
        return {}
    table = events.Tensors(tags[0])[-1].tensor_proto.string_val[0].decode()
    return dict(re.findall(r"^\|(\w+)\|(.*?)\|$", table, re.M | re.S))


def read_run(folder: Path, events: EventAccumulator) -> RunLog | None:
    """What a run has logged in its complete iterations; None if there is none yet."""
    events.Reload()
    logged = events.Tags()["scalars"]
    tags = {metric.name: next((tag for tag in metric.tags if tag in logged), None) for metric in METRICS}
    entries = {name: events.Scalars(tag) for name, tag in tags.items() if tag}
    # Returns are no iterations, as CleanRL logs each episode's; nor are evaluations.
    own = [name for name in entries if not name.startswith(NOT_IN_EACH)]
    steps = {event.step for name in own or entries for event in entries[name]}
    if logged and not steps:
        raise ValueError(f"none of its tags is known: {', '.join(logged[:5])}")
    if not steps:
        return None
    last_time = max(column[-1].wall_time for column in entries.values())
    run = RunLog(folder, read_settings(events), np.array(sorted(steps)), last_time)
    settings = numbers_of(run.settings)
    run.total = total_steps(run.settings)
    # Language models log the number of responses before an iteration, the other scripts that after it.
    language = "token_kl" in entries or "reward" in entries
    batch = as_number(run.settings.get("batch_size")) if language else 0
    run.finished = bool(run.steps[-1] + batch >= run.total)
    if "greedy_return" in entries:
        last, stop_at = entries["greedy_return"][-1], as_number(run.settings.get("stop_at"))
        is_enough = last.value >= stop_at or math.isclose(last.value, stop_at, rel_tol=1e-6)  # float32
        run.finished |= is_enough and last.step == run.steps[-1]
    run.live = is_live(folder)
    if not run.finished and run.live is not False and time.time() - last_time < 60:
        run.steps = run.steps[: -1 if own else 0]  # the last one may be half-written; or none is logged yet
    if not len(run.steps):
        return None
    run.numbers |= {name: np.full(len(run.steps), value) for name, value in settings.items()}
    for name in entries:
        values = {event.step: event.value for event in entries[name]}
        run.numbers[name] = np.array([values.get(step, math.nan) for step in run.steps.tolist()])
    # Not from `numbers`, where NaN also stands for what was not logged in an iteration.
    must_be_finite = [event for name in FINITE & entries.keys() for event in entries[name]]
    first_nan = min((e.step for e in must_be_finite if not math.isfinite(e.value)), default=math.inf)
    run.numbers["finite"] = (run.steps < first_nan).astype(float)
    monitored = ("kl" in entries or "token_kl" in entries) and "clipfrac" in entries
    run.numbers["monitored"] = np.where(run.steps == run.steps[0], 1.0, monitored)  # it may be half-written
    run.numbers["progress"] = (run.steps + batch) / run.total
    add_derived(run)
    if not language:
        run.numbers["episodes"] = np.zeros(len(run.steps))
    if "return" in entries:
        add_returns(run, entries, is_each=not {event.step for event in entries["return"]} <= steps)
    if "reward" in entries:
        add_rewards(run)
    return run


def is_live(folder: Path) -> bool | None:
    """Whether a process holds the lock of a run's folder; None where there is no lock."""
    try:
        import fcntl  # not on Windows

        with (folder / ".lock").open() as file:
            fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except (ImportError, OSError):
        return None
    return False


def threshold_of(settings: dict[str, str]) -> float:
    """The return at which Gymnasium takes an environment for solved; NaN if it does not know one."""
    if settings.get("env_kwargs", "{}") not in ("{}", "None") or not find_spec("gymnasium"):
        return math.nan
    import gymnasium as gym

    spec = gym.registry.get(settings.get("env_id", ""))
    return math.nan if spec is None or spec.reward_threshold is None else spec.reward_threshold


def as_number(value: Any) -> float:
    """A setting as a number: True is 1, False is 0, and what is no number is NaN."""
    try:
        return float({"True": 1, "False": 0}.get(str(value), value))
    except (TypeError, ValueError):
        return math.nan


def total_steps(settings: dict[str, str]) -> float:
    """The steps of all iterations; NaN if they are not known. CleanRL leaves out an incomplete iteration."""
    if "num_iterations" in settings:
        return as_number(settings["num_iterations"]) * as_number(settings.get("batch_size"))
    return as_number(settings.get("total_timesteps", settings.get("total_episodes")))


def numbers_of(settings: dict[str, Any]) -> dict[str, float]:
    """What the rules compare of settings, as logged or as in `Args`."""
    numbers = {name: as_number(value) for name, value in settings.items() if name in SETTINGS}
    if settings.get("surrogate") == "kl-penalty":
        numbers["clip_coef"] = math.nan  # it clips nothing
    numbers["steps"] = numbers.get("update_epochs", math.nan) * numbers.get("num_minibatches", math.nan)
    # Scaled rewards in the place of normalised advantages were measured in ppo_continuous.py, the only script
    # with --min-log-std.
    scaled = "min_log_std" in numbers and numbers.get("norm_rewards") == 1
    normalised = numbers.get("norm_adv", 1) == 1 or scaled
    numbers["unnormalised_steps"] = 0 if normalised else numbers["steps"]
    return numbers


def add_derived(run: RunLog) -> None:
    """Add what is derived from losses and evaluations."""
    numbers = run.numbers
    if "grad_norm" in numbers and "max_grad_norm" in numbers:
        numbers["grad_excess"] = numbers["grad_norm"] / numbers["max_grad_norm"]
    if "kl" in numbers:
        numbers["largest_kl"] = np.fmax.accumulate(numbers["kl"])
    if run.settings.get("surrogate") == "kl-penalty":
        numbers.pop("clipfrac", None)  # nothing is clipped: it counts ratios that may be as they are
    if run.settings.get("scale_actions") == "False":
        numbers.pop("std", None)  # in units of the environment, which the rules do not know
    gaussian = numbers.keys() & {"std", "init_log_std"} or "continuous" in run.settings.get("exp_name", "")
    if "entropy" in numbers and not gaussian and not np.nanmin(numbers["entropy"]) < 0:
        largest = np.fmax.accumulate(numbers["entropy"])
        numbers["entropy_share"] = numbers["entropy"] / np.maximum(largest, 0.1)
    if "gold" in numbers and not np.isnan(numbers["gold"]).all():
        evaluated = ~np.isnan(numbers["gold"])
        last = np.maximum(evaluated.cumsum() - 1, 0)  # index of the last evaluation
        gold = numbers["gold"][evaluated][last]
        best = np.maximum.accumulate(gold)
        numbers["gold_drop"] = (best - gold) / (best - gold[0] + 1e-8)


def add_returns(run: RunLog, entries: dict[str, list], is_each: bool) -> None:
    """Add what is derived from returns and lengths, which both become means of the last 100 episodes.

    There are E entries, each the mean of the episodes that ended in an iteration or (`is_each`) an episode.
    One that is not finite is left out: it is the mean of no episode, or the losses are not finite, too.
    """
    names = [name for name in entries if name.startswith(("return", "length"))]
    size = min(len(entries[name]) for name in names)  # the last entry may be half-written
    finite = np.isfinite([event.value for event in entries["return"][:size]])
    if not finite.any():
        return
    columns = {name: np.array([event.value for event in entries[name][:size]])[finite] for name in names}
    steps = np.array([event.step for event in entries["return"][:size]])[finite]
    returns, lengths = columns["return"], columns.get("length", np.ones(len(steps)))
    counts = np.maximum(np.diff(steps, prepend=0) / lengths, 1)  # [E], episodes of an entry, about
    if is_each:
        counts = np.ones(len(steps))
    seen = counts.cumsum()  # [E], episodes so far
    min_entries = 1 if "return_std" in columns else 5  # in a mean
    squares = returns**2 + columns.get("return_std", np.zeros(len(returns))) ** 2

    def windowed(values: np.ndarray, starts: Any, ends: Any) -> np.ndarray:
        """Means over the entries from starts to ends (exclusive), weighted by the numbers of episodes."""
        sums = np.concatenate([[0.0], (counts * values).cumsum()])
        weights = np.concatenate([[0.0], seen])
        return (sums[ends] - sums[starts]) / (weights[ends] - weights[starts])

    # The first 50 episodes, and two of each environment, since the very first to end are short ones.
    num_envs = run.numbers.get("num_envs", np.ones(1))[0]
    enough = (seen >= 50) & (steps >= 2 * num_envs * np.maximum.accumulate(lengths))
    first_end = int(enough.argmax()) + 1 if enough.any() else len(returns)
    first_end = min(max(first_end, min_entries), len(returns))
    ends = np.arange(len(returns)) + 1
    starts = np.searchsorted(seen, seen - 100, side="right")
    starts = np.clip(ends - min_entries, 0, starts)

    first_return, mean_returns = windowed(returns, 0, first_end), windowed(returns, starts, ends)
    mean_lengths = windowed(lengths, starts, ends)
    first_variance = windowed(squares, 0, first_end) - first_return**2
    variances = windowed(squares, starts, ends) - mean_returns**2
    if "return_std" not in columns:  # of single entries, around their trend
        squares = counts * np.diff(returns, 2, prepend=returns[:1].repeat(2)) ** 2 / 6
        first_variance, variances = windowed(squares, 0, first_end), windowed(squares, starts, ends)
    deviations = np.sqrt(np.maximum(first_variance + variances, 0) / 2)
    gain = (mean_returns - first_return) / (deviations + 1e-6 * abs(first_return) + 1e-8)
    gain[starts < first_end] = math.nan  # too early to tell
    lowest, highest = columns.get("return_min", returns), columns.get("return_max", returns)
    equal = np.minimum.accumulate(lowest) == np.maximum.accumulate(highest)

    derived = {"return": mean_returns, "gain": gain}
    if "length" in columns:
        derived["length"] = mean_lengths
        derived["length_share"] = mean_lengths / windowed(lengths, 0, first_end)
    derived["equal_returns"] = (equal & (seen >= 100)).astype(float)
    derived["largest_gain"] = np.fmax.accumulate(gain)
    derived["episodes"] = seen
    last_entry = np.searchsorted(steps, run.steps, side="right") - 1  # of each iteration
    for name, column in derived.items():
        unknown = 0 if name == "episodes" else math.nan
        run.numbers[name] = np.where(last_entry >= 0, column[last_entry], unknown)
    if "greedy_return" in run.numbers:
        unit = np.maximum(mean_returns - first_return, 3 * deviations)[np.maximum(last_entry, 0)]
        gaps = (run.numbers["return"] - run.numbers["greedy_return"]) / np.maximum(unit, 1e-8)
        last = len(gaps) - 1 - int(np.argmin(np.isnan(gaps[::-1])))  # iteration of the last evaluation
        run.numbers["greedy_gap"] = np.where(np.arange(len(gaps)) < last, math.nan, gaps[last])
    best = np.fmax(run.numbers["return"], run.numbers.get("greedy_return", math.nan))
    run.numbers["missing_return"] = threshold_of(run.settings) - best


def add_rewards(run: RunLog) -> None:
    """Add what is derived from the mean rewards of a language model's batches."""
    rewards = run.numbers["reward"]
    last = np.array([rewards[max(0, i - 9) : i + 1].mean() for i in range(len(rewards))])
    gain = (last - rewards[:5].mean()) / (noise(rewards) + 1e-8)
    gain[:14] = math.nan  # the first 5 and the last 10 must not overlap
    run.numbers["reward_gain"] = gain
    run.numbers["equal_rewards"] = np.cumprod(rewards == rewards[0]).astype(float)


def noise(values: np.ndarray) -> float:
    """The standard deviation around the trend, from second differences: a steady rise has none."""
    return math.sqrt(np.square(np.diff(values, 2)).mean() / 6) if len(values) > 2 else 0.0


# ------------------------------------------------- Checking ------------------------------------------------


class Finding(NamedTuple):
    """A rule that has applied to a run."""

    rule: Rule
    step: int  # at which it had applied for long enough
    iterations: int  # in which its comparisons were true
    value: float  # of the first number that it compares, now


def names_in(rule: Rule) -> list[str]:
    """The numbers that a rule compares."""
    return [comparison.removeprefix("not ").split()[0] for comparison in rule.when.split(" and ")]


def compare(when: str, numbers: dict[str, Any]) -> np.ndarray:
    """Whether all comparisons of a rule are true: [I], or a scalar, as the numbers are."""
    signs = {"<": operator.lt, ">": operator.gt, "=": operator.eq}
    result = np.array(True)
    for comparison in when.split(" and "):
        name, sign, limit = comparison.removeprefix("not ").split()
        true = np.asarray(signs[sign](numbers.get(name, math.nan), float(limit)))  # false for NaN
        result = result & (~true if comparison.startswith("not ") else true)
    return result


def now(values: np.ndarray) -> float:
    """The mean of a number in the last five iterations in which it was known."""
    return float(values[~np.isnan(values)][-5:].mean())


def find_problems(run: RunLog) -> list[Finding]:
    """What the rules find, in their order. Of several limits of a number, the first stands for the others.

    If a quarter of a run has fewer iterations than a question needs, these will do, but not less than 8.
    """
    gap = np.diff(run.steps).mean() if len(run.steps) > 1 else math.nan
    quarter = run.total / gap // 4
    most = math.inf if math.isnan(quarter) else max(8, quarter)
    findings: list[Finding] = []
    for rule in RULES + QUESTIONS:
        name, sign, *_ = rule.when.split()
        true = np.broadcast_to(compare(rule.when, run.numbers), run.steps.shape)
        if any(found.rule.when.split()[:2] == [name, sign] for found in findings):
            continue
        latest = true[-max(5, math.ceil(0.15 * len(true))) :]
        if rule in QUESTIONS and not latest.any():
            continue
        needed = rule.iterations if rule in RULES else int(min(rule.iterations, most))
        streaks = np.convolve(true, np.ones(needed), "valid") == needed
        if needed <= len(true) and streaks.any():
            last = int(streaks.argmax()) + needed - 1
            findings.append(Finding(rule, int(run.steps[last]), int(true.sum()), now(run.numbers[name])))
    return findings


def describe(finding: Finding) -> str:
    """What is wrong, since when, and what to do."""
    rule, step, iterations, value = finding
    count = "1 iteration" if iterations == 1 else f"{iterations} iterations"
    where = f"{rule.when}: in {count}, reported from step {step:,}, now {value:.3g}"
    if rule in UNSAFE or rule.when == "monitored < 1":  # of the whole run
        where = rule.when
    lines = [f"{finding.rule.kind}: {rule.problem} ({where})", rule.remedy]
    return "\n    ".join([*lines, f"docs/metrics.md, {rule.section!r}, has more"])


def progress(run: RunLog) -> str:
    """How far a run is, and whether it goes on."""
    total = "" if math.isnan(run.total) else f" of {run.total:,.0f}"
    minutes = (time.time() - run.last_time) / 60
    state = ""
    if run.live is False and not run.finished:
        state = ", stopped before its end"
    elif minutes > 5 and not run.finished:
        state = f", nothing new for {minutes:,.0f} minutes: has it stopped?"
    return f"{run.folder}: {run.steps[-1]:,}{total} steps, {len(run.steps):,} iterations{state}"


def verdict(metric: Metric, value: float, run: RunLog, findings: list[Finding]) -> str:
    """The last column of the table: what was found about a metric or, without that, whether it is healthy."""
    names = [(names_in(found.rule)[0], found.rule.kind) for found in findings]
    kinds = [kind for name, kind in names if DERIVED.get(name, name) == metric.name]
    if kinds:
        return min(kinds, key=["WRONG", "QUESTION"].index)
    if metric.name in ("return", "reward"):
        gain, noise_level = ("gain", 0.5) if metric.name == "return" else ("reward_gain", 2)
        rise = run.numbers[gain][-1]
        if math.isnan(rise):
            return ""
        return "rose" if rise > noise_level else "fell" if rise < -noise_level else "within noise"
    side, _, limit = metric.healthy.partition(" ")
    if side == "below":
        return "ok" if value < float(limit) else "high"
    if side == "above":
        is_small = metric.name == "explained_variance" and run.numbers.get("critic_error", [1])[-1] < 0.1
        return "ok" if value > float(limit) else "low, small error" if is_small else "low"
    return ""


def report(run: RunLog) -> tuple[str, bool]:
    """A table of a run's metrics, then what was found; and whether something is wrong."""
    findings = find_problems(run)
    wrong = [found for found in findings if found.rule.kind == "WRONG"]
    lines = [progress(run), f"  {'':24}{'at first':>10}{'median':>11}{'now':>11}   healthy"]
    for metric in METRICS:
        values = run.numbers.get(metric.name, np.zeros(0))
        values = values[~np.isnan(values)]
        if metric.label and len(values):
            numbers = values[:5].mean(), np.median(values), now(values)
            row = f"  {metric.label:24}" + " ".join(f"{number:>10.4g}" for number in numbers)
            word = verdict(metric, now(values), run, findings)
            lines.append(f"{row}   {metric.healthy:16} {word}".rstrip())
    lines += [describe(found) for found in findings]
    if len(wrong) > 1:
        lines.append("Begin with the first one: it may be the cause of the others.")
    elif not wrong and findings:
        lines.append("No verdict: answer the questions before you trust the run.")
    elif not wrong:
        lines.append("Nothing is wrong, as far as the metrics tell.")
        if "token_kl" in run.numbers:
            lines.append("Read some responses in completions.jsonl.")
        else:
            lines.append("Compare the return with a known one, and watch the agent.")
    if not wrong and len(run.steps) < 10:
        lines.append("There are few iterations, though: many faults show only after ten.")
    return "\n".join(lines) + "\n", bool(wrong)


@dataclass
class Check:
    """Check runs by what they have logged. Status 1: something is WRONG; 2: a run cannot be read."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ("runs",)  # folders with runs, at any depth
    watch: bool = False  # repeat while runs go on, and print what is new
    stop: bool = False  # with --watch: end at the first WRONG
    every: float = 10.0  # seconds between repetitions
    wait: float = 60.0  # seconds for a run to begin, if all others have ended: its imports take a while
    patience: float = 10.0  # minutes without anything new after which a run is taken for dead


def read_safely(folder: Path, events: EventAccumulator) -> RunLog | str:
    """What a run has logged or, where that cannot be read, why: a broken run must not hide the others."""
    try:
        with np.errstate(all="ignore"):  # what cannot be computed is NaN, and no rule applies to it
            run = read_run(folder, events)
        return run or f"{folder}: no complete iteration is logged yet"
    except Exception as error:  # of TensorBoard, or of numbers that no script here logs
        return f"{folder}: unreadable, {type(error).__name__}: {error}"


def check(paths: list[Path]) -> int:
    """Print a report on each run. Returns the exit status."""
    if not paths:
        print("coach.py: there are no TensorBoard files", file=sys.stderr)
    wrong, unread = [], []
    for folder in paths:
        run = read_safely(folder, open_events(folder))
        if isinstance(run, str):
            print(run, end="\n\n")
            unread.append(run)
            continue
        text, has_problems = report(run)
        print(text)
        if has_problems:
            wrong.append(str(folder))
    if len(paths) > 1:
        print(f"Something is wrong with {len(wrong)} of {len(paths)} runs", *wrong, sep="\n  ", flush=True)
    if wrong:
        return 1
    return 2 if len(unread) == len(paths) or any(": unreadable, " in text for text in unread) else 0


def print_news(run: RunLog, told: set[str]) -> bool:
    """Print how far a run is, and what is found for the first time. Returns whether something is wrong."""
    shown = [f"{name} {run.numbers[name][-1]:.5g}" for name in SHOWN if name in run.numbers]
    print(time.strftime("%H:%M:%S"), progress(run), *shown, sep="  ", flush=True)
    findings = find_problems(run)
    for found in findings:
        if found.rule.when not in told:
            print(describe(found), flush=True)
            told.add(found.rule.when)
    return any(found.rule.kind == "WRONG" for found in findings)


def watch(args: Check) -> int:
    """Print what is new in runs until all have ended, then a report on each. Returns the exit status.

    Runs that had ended before are left out, if others go on.
    """
    readers: dict[Path, EventAccumulator] = {}
    sizes: dict[Path, int] = {}  # iterations that were read
    told: dict[Path, set[str]] = {}  # what was found
    ended: set[Path] = set()
    ended_before: set[Path] = set()
    start = last_news = time.time()
    announced = False

    def look(folder: Path) -> bool:
        """Read what is new in a run, and print it. Returns whether something is wrong."""
        if folder not in readers:
            readers[folder] = open_events(folder)
        run = read_safely(folder, readers[folder])
        if isinstance(run, str):
            if ": unreadable, " in run or not folder.exists() or is_live(folder) is False:
                ended.add(folder)
            return False
        is_first, size = folder not in sizes, sizes.get(folder, 0)
        sizes[folder] = len(run.steps)
        if run.finished or run.live is False or time.time() - run.last_time > 60 * args.patience:
            ended.add(folder)
            if is_first and run.last_time < start:
                ended_before.add(folder)
                return False
        return len(run.steps) > size and print_news(run, told.setdefault(folder, set()))

    with contextlib.suppress(KeyboardInterrupt):
        while True:
            before = dict(sizes)
            for folder in find_runs(args.runs):
                if folder not in ended and look(folder) and args.stop:
                    return 1
            if sizes != before:
                last_news = time.time()
            all_ended = ended and ended == readers.keys()
            if all_ended and (ended != ended_before or time.time() - start > args.wait):
                break
            if time.time() - last_news > (60 * args.patience if readers else args.wait):
                break
            if all_ended and not announced:
                print(f"All runs have ended. Waiting {args.wait:g} s for another.", flush=True)
                announced = True
            time.sleep(max(args.every, 0.0))
    folders = find_runs(args.runs)
    watched = [folder for folder in folders if folder not in ended_before]
    if watched and ended_before:
        print(f"Not shown: {len(ended_before)} of {len(folders)} runs, which had ended before.")
    return check(watched or folders)


# ------------------------------------------------- Planning ------------------------------------------------


Script = Literal["ppo", "ppo_continuous", "ppo_atari", "ppo_lstm", "ppo_gpu", "ppo_rlhf", "grpo"]


@dataclass
class Plan:
    """Plan a run: which script fits, and what it will do. All other flags are the script's."""

    env_id: str | None = None  # the environment; without it, name a --script, or a language model by --model
    env_kwargs: str | None = None  # environment arguments, as JSON
    script: Script | None = None  # the script; None is for the one that fits
    rules: bool = False  # also print the rules by which `check` will judge the run
    check_env: bool = False  # also try the environment with Gymnasium's check_env


class Choice(NamedTuple):
    """A script, and why it fits."""

    script: str
    reason: str
    recipe: str = ""  # the section of docs/recipes.md by which the script must be changed, if it must


# Words in names and arguments of environments of which one observation does not tell enough.
MEMORY = (
    r"memor\w+|partial\w*|pomdp|position_only|(no|without|mask|hide)_vel\w*|hidden|masked|recall|cue|t_maze"
)


def choose(plan: Plan, names: set[str]) -> Choice:
    """The script for an environment and these flags. Raises `ValueError` if there is none."""
    if plan.script:
        return Choice(plan.script, "as --script says")
    if "--reward-model" in names:
        return Choice("ppo_rlhf", "a reward model scores the responses of a language model")
    if names & {"--model", "--prompts", "--reward-function"}:
        return Choice("grpo", "a function rewards the responses of a language model (or --script ppo_rlhf)")
    if not plan.env_id:
        raise ValueError("name an environment (--env-id), a --script, or a language model (--model)")
    if re.search("(^|:)ALE/|NoFrameskip", plan.env_id):
        return Choice("ppo_atari", "it is an Atari game")
    if plan.env_id == "Pendulum" or is_on_gpu(plan.env_id):
        return Choice("ppo_gpu", "its environments step as tensors")
    import gymnasium as gym

    env = make_env(plan.env_id, plan.env_kwargs)
    env.close()
    actions, shape = env.action_space, env.observation_space.shape or ()
    seen = f"observations of shape {shape}" if shape else f"observations {env.observation_space}"
    reason = f"actions {actions}, {seen}"
    script = "ppo_continuous" if isinstance(actions, gym.spaces.Box) else "ppo"
    is_plain = isinstance(actions, gym.spaces.Discrete) and actions.start == 0
    is_plain |= isinstance(actions, gym.spaces.Box) and len(actions.shape) == 1
    if not is_plain:
        return Choice(script, reason, "Other actions")
    parts = env.observation_space.values() if isinstance(env.observation_space, gym.spaces.Dict) else ()
    if any(len(part.shape or ()) == 3 for part in parts):
        return Choice(script, reason, "An image and a vector")
    if script == "ppo" and names & {"--cell", "--num-layers"}:
        return Choice("ppo_lstm", f"{reason}, and a flag of its memory")
    given = f"{plan.env_id} {plan.env_kwargs}"
    words = re.sub("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", given).lower()
    if script == "ppo" and (hint := re.search(rf"(?<![a-z])({MEMORY})(?![a-z])", words)):
        return Choice("ppo_lstm", f"{reason}, and {hint[0]!r} hints at a memory (else --script ppo)")
    return Choice(script, reason, "Small images" if len(shape) == 3 else "")


def make_env(env_id: str, env_kwargs: str | None) -> Any:
    """An environment as Gymnasium makes it. Raises `ValueError` if it does not."""
    import gymnasium as gym

    try:
        return gym.make(env_id, **json.loads(env_kwargs or "{}"))
    except (gym.error.Error, TypeError, json.JSONDecodeError) as error:
        given = f" with --env-kwargs {env_kwargs}" if env_kwargs else ""
        raise ValueError(f"{env_id}{given}: {error}") from error


def is_on_gpu(env_id: str) -> bool:
    """Whether this is a class or function of a module, or of MuJoCo Playground: not one of Gymnasium's."""
    import gymnasium as gym

    module, _, name = env_id.rpartition(":")
    if module:
        found = getattr(importlib.import_module(module), name, None)
        return callable(found) and not (isinstance(found, type) and issubclass(found, gym.Env))
    if re.search(r"-v\d+$", env_id) or not find_spec("mujoco_playground"):
        return False
    with contextlib.redirect_stdout(None):  # what its simulators print when they are imported
        from mujoco_playground import registry
    return env_id in registry.ALL_ENVS


def parse(script: ModuleType, flags: list[str], names: set[str]) -> Any:
    """A script's settings for these flags."""
    default = script.Args()
    if "--model" in names and hasattr(script, "PRETRAINED"):
        default = script.PRETRAINED
    args = tyro.cli(script.Args, args=flags, default=default, prog=f"coach.py plan: {script.__name__}.py")
    if hasattr(script, "OTHERS") and args.env_id != default.env_id:
        args = tyro.cli(script.Args, args=flags, default=script.OTHERS)
    return args


def refusals(script: ModuleType, args: Any, by_script: bool) -> list[str]:
    """Why these settings are refused: because they are unsafe, or by the script itself."""
    numbers = numbers_of(asdict(args))
    reasons = [f"{rule.problem}: {rule.remedy}" for rule in UNSAFE if compare(rule.when, numbers).all()]
    try:
        if hasattr(script, "check"):
            script.check(args)
        else:
            script.check_settings(args)
            if by_script and hasattr(script, "make_eval_env"):
                script.make_eval_env(args).close()
    except Exception as error:  # of the script's checks, or of the environment
        reasons.append(str(error) or type(error).__name__)
    return reasons


Row = tuple[str, str, str]  # label, value, usual range


def iterations(args: Any) -> int:
    """How many there are in a run."""
    if hasattr(args, "total_episodes"):
        return math.ceil(args.total_episodes / args.batch_size)
    return math.ceil(args.total_timesteps / (args.num_envs * args.num_steps))


def rows_of_environments(args: Any) -> list[Row]:
    """What a run of a script for environments will do."""
    has = asdict(args).get
    batch, steps = args.num_envs * args.num_steps, args.update_epochs * args.num_minibatches
    schedule = ", decayed linearly to 0" if has("anneal_lr", True) else ", constant"
    if has("adapt") == "learning-rate":
        schedule += f", adapted to a KL of {args.desired_kl:g}"
    policy_loss = f"clipped, ε = {args.clip_coef:g}"
    if has("surrogate") == "kl-penalty":
        adapted = f", adapted to a KL of {args.desired_kl:g}" if args.adapt == "kl-coef" else ""
        policy_loss = f"with a KL penalty, β = {args.kl_coef:g}{adapted}"
    stop = f", until a KL of {args.target_kl:g}" if has("target_kl") else ""
    normalised = {
        "advantages": has("norm_adv", True),
        "observations": has("norm_obs", "clip_rewards" not in asdict(args)),
        "rewards": has("norm_rewards", "clip_rewards" not in asdict(args)),
    }
    text = ", ".join(name for name, is_so in normalised.items() if is_so) or "nothing"
    if not normalised["advantages"] and steps > 1:
        text += "; not advantages: see the note"
    if has("clip_rewards"):
        text += "; rewards are clipped to their signs"
    horizon = f"{1 / (1 - args.gamma):,.0f} steps" if args.gamma < 1 else "without end"
    return [
        ("rollout N x T", f"{args.num_envs} x {args.num_steps} = {batch:,} transitions", ""),
        (
            "iterations",
            f"about {iterations(args):,}, for {args.total_timesteps:,.0f} transitions",
            "30 or more",
        ),
        ("epochs K", f"{args.update_epochs}{stop}", "3 to 10"),
        ("minibatches", f"{args.num_minibatches} of {batch // args.num_minibatches:,}", "of 64 to 2,048"),
        ("gradient steps", f"{steps:,} per iteration, about {steps * iterations(args):,} in all", ""),
        ("learning rate", f"{args.learning_rate:g}{schedule}", "1e-4 to 1e-3"),
        ("policy loss", policy_loss, "0.1 to 0.3"),
        ("value loss", f"c₁ = {args.vf_coef:g}{', clipped' if has('clip_vloss') else ''}", "0.5 to 1"),
        ("entropy bonus", f"c₂ = {args.ent_coef:g}", "0 to 0.05"),
        ("gradient norm", f"at most {args.max_grad_norm:g}", "0.5"),
        ("normalised", text, "advantages"),
        ("discount γ", f"{args.gamma:g}, a horizon of {horizon}", "0.9 to 0.999"),
        ("GAE's λ", f"{args.gae_lambda:g}", "0.9 to 0.99"),
    ]


def rows_of_language_models(args: Any) -> list[Row]:
    """What a run of a script for language models will do."""
    has, steps = asdict(args).get, args.update_epochs * args.num_minibatches
    target = f", adapted to a KL of {has('kl_target'):g}" if has("kl_target") else ""
    ratio = " ratio of whole responses" if has("ratio") == "sequence" else ""
    rows = [
        ("batch", f"{args.batch_size:,} responses of at most {args.max_response_length} tokens", ""),
        ("iterations", f"about {iterations(args):,}, for {args.total_episodes:,.0f} responses", "30 or more"),
        ("epochs K", f"{args.update_epochs}", "1 to 4"),
        ("minibatches", f"{args.num_minibatches} of {args.batch_size // args.num_minibatches:,}", ""),
        ("gradient steps", f"{steps:,} per iteration, about {steps * iterations(args):,} in all", ""),
        ("learning rate", f"{args.learning_rate:g}, decayed linearly to 0", ""),
        ("policy loss", f"clipped{ratio}, ε = {args.clip_coef:g}", "0.1 to 0.3"),
        ("KL penalty", f"β = {args.kl_coef:g}{target}, from the reference", "0 to 0.1"),
        ("temperature", f"{args.temperature:g}", "0.7 to 1"),
        ("gradient norm", f"at most {args.max_grad_norm:g}", ""),
    ]
    if has("group_size"):
        rows.append(("advantages", f"of {args.group_size} responses to each prompt, minus their mean", ""))
    else:
        clipped = ", values clipped" if has("clip_vloss") else ""
        critic = f"learning rate {args.critic_learning_rate:g}, λ = {args.gae_lambda:g}{clipped}"
        rows.append(("critic", critic, ""))
        if has("ent_coef"):
            rows.append(("entropy bonus", f"c₂ = {args.ent_coef:g}", "0 to 0.01"))
    return rows


def plan(args: Plan, flags: list[str]) -> int:
    """Print the plan of a run, or why it is refused. Returns the exit status."""
    for name in ("env_kwargs", "env_id"):
        if value := getattr(args, name):
            flags = [f"--{name.replace('_', '-')}", value, *flags]
    names = {flag.partition("=")[0].replace("_", "-") for flag in flags}
    if names & {"--resume", "--evaluate"}:
        raise ValueError("a plan is for a new run, without --resume and --evaluate")
    choice = choose(args, names)
    script = importlib.import_module(choice.script)
    settings = parse(script, flags, names)
    reasons = refusals(script, settings, by_script=not choice.recipe)
    if reasons:
        for reason in reasons:
            print(f"refused: {reason}", file=sys.stderr)
        return 2
    if choice.script == "ppo_gpu":
        script.check_envs(script.make_envs(settings), settings)
    elif "--model" in names:
        script.check_task(script.load_task(settings), settings)
    language = hasattr(settings, "total_episodes")
    if args.check_env:
        if language or choice.script == "ppo_gpu":
            raise ValueError("--check-env is for environments of Gymnasium")
        from gymnasium.utils.env_checker import check_env

        env = make_env(settings.env_id, args.env_kwargs).unwrapped
        check_env(env, skip_render_check=True)  # it prints warnings, and raises what is wrong
    print(f"{'script':15}{choice.script}.py: {choice.reason}")
    if args.check_env:
        print(f"{'environment':15}passes Gymnasium's check_env")
    if choice.recipe:
        print(f"{'recipe':15}docs/recipes.md, {choice.recipe!r}, changes the script for this environment")
    for label, value, usual in (rows_of_language_models if language else rows_of_environments)(settings):
        print(f"{label:15}{value:56} {f'usual: {usual}' if usual else ''}".rstrip())
    if not language and not getattr(settings, "norm_adv", True) and numbers_of(asdict(settings))["steps"] > 1:
        print("note: scaled rewards take the place of normalised advantages, as was measured for this script")
    if iterations(settings) < 30:
        print("note: so few iterations are hardly enough: collect less in each, or train for more steps")
    coach = Path(sys.argv[0])  # the scripts are beside it
    file = (
        "<the recipe's file>" if choice.recipe else shlex.quote(str(coach.with_name(f"{choice.script}.py")))
    )
    print(f"run:   python {file} {shlex.join(flags)}".rstrip())
    task_name = Path(settings.model or "built-in").name if language else settings.env_id
    experiment = settings.exp_name if "--exp-name" in names else choice.script
    folder = re.sub(r"[^\w.-]+", "_", f"{task_name}__{experiment}__{settings.seed}")
    print(f'check: python {shlex.quote(str(coach))} check "runs/{folder}__*" --watch')
    if args.rules:
        print("\n`check` compares, in (n) iterations in a row (docs/metrics.md explains the names):")
        for rule in RULES + QUESTIONS:
            is_of_language = rule.section == "Language models"
            if is_of_language == language or rule.section == "The update":
                print(f"  {rule.kind}: {rule.problem}: {rule.when} ({rule.iterations})\n      {rule.remedy}")
    return 0


def main() -> None:
    """The command line: the first word is the command, and the exit status is what it returns."""
    commands = {"plan": Plan, "check": Check}
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        is_help = len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help")
        print(__doc__ if is_help else f"coach.py: {sys.argv[1]} is not plan or check")
        sys.exit(0 if is_help else 2)
    sys.path.append(os.getcwd())  # where the `module:` of --env-id is looked for, too
    name, words = sys.argv[1], sys.argv[2:]
    try:
        if name == "plan":
            args, flags = tyro.cli(Plan, args=words, prog="coach.py plan", return_unknown_args=True)
            status = plan(args, flags)
        else:
            options = tyro.cli(Check, args=words, prog="coach.py check")
            for path in options.runs:
                if not options.watch and not find_runs((path,)):
                    print(f"coach.py: no TensorBoard files in {path}", file=sys.stderr)
            status = watch(options) if options.watch else check(find_runs(options.runs))
    except (ValueError, OSError, ImportError) as error:
        print(f"coach.py: {error}", file=sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130  # as shells have it
    except Exception:  # of an environment or a reward function
        traceback.print_exc()
        status = 2
    sys.exit(status)


if __name__ == "__main__":
    main()
