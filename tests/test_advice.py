"""Advice: each row speaks at its threshold, once, and else is silent; what it says of broken runs is true."""

import math
import re
from dataclasses import asdict

import pytest
from cli_helpers import CONTINUOUS, PPO, call, each_script_fast

HEALTHY = {
    "policy_loss": -0.01, "value_loss": 0.5, "entropy": 0.6, "clipfrac": 0.1, "grad_norm": 40.0, "kl": 0.006,
    "explained_variance": 0.5, "critic_error": 0.3, "relative_entropy": 0.7, "reward_range": 3.0,
    "reward_max": 10.0, "policy_mismatch": 1e-7, "std_min": 0.5, "std_max": 0.6, "outside": 0.1,
}  # fmt: skip
# Name, iterations, metrics that give it, and changes of which each keeps it silent. `progress` is the part of
# training that is done; it is 0.3 where it is not given.
ROWS = [
    ("explosion", 1, {"kl": 1.1}, [{"kl": 0.9}]),
    ("kl", 5, {"kl": 0.07}, [{"kl": 0.04}, {"desired_kl": 0.04}]),
    ("clipping", 10, {"clipfrac": 0.41}, [{"clipfrac": 0.39}, {"surrogate": "kl-penalty"}]),
    ("idle", 20, {"kl": 9e-7}, [{"kl": 1.1e-6}, {"progress": 0.6}]),
    ("critic", 20, {"explained_variance": -0.01}, [
        {"explained_variance": 0.01}, {"explained_variance": math.nan}, {"critic_error": 0.09},
        {"progress": 0.09},
    ]),
    ("collapse", 10, {"entropy": 0.04, "return": 19.0}, [{"entropy": 0.06}, {"return": 21.0}]),
    ("random", 10, {"relative_entropy": 0.96, "progress": 0.6}, [
        {"relative_entropy": 0.94}, {"progress": 0.4}, {"ent_coef": 0.0}, {"kl": 0.9e-6},
    ]),
    ("narrow", 10, {"std_min": 0.019}, [{"std_min": 0.021}]),
    ("wide", 10, {"std_max": 3.1}, [{"std_max": 2.9}]),
    ("outside", 10, {"outside": 0.81}, [{"outside": 0.79}]),
    ("rewards", 1, {"reward_range": 1001.0}, [{"reward_range": 999.0}, {"reward_max": 9.0}]),
    ("mismatch", 1, {"policy_mismatch": 1.1e-4}, [{"policy_mismatch": 0.9e-4}]),
]  # fmt: skip
CASES = [
    pytest.param(script, *row, id=f"{script.module.__name__}-{row[0]}")
    for script in (PPO, CONTINUOUS)
    for row in ROWS
    if row[0] in {name for name, *_ in script.module.ADVICE}
]


def advise(script, iterations, state=None, **changed):
    """The names of the advice in each of some iterations, and the state after them."""
    settings = {"desired_kl": changed.pop("desired_kl", 0.01), "surrogate": changed.pop("surrogate", "clip")}
    args = script.module.Args(total_timesteps=1000, adapt="none", **settings)
    state = state or script.module.State(1e-3, 0.2, 1.0, 0.01, first_return=20.0, recent_returns=[25.0])
    state.global_step = int(1000 * changed.pop("progress", 0.3))
    state.ent_coef = changed.pop("ent_coef", 0.01)
    state.recent_returns = [changed.pop("return", 25.0)]
    said = [script.module.diagnose(HEALTHY | changed, args, state) for _ in range(iterations)]
    return [[message[1 : message.index("]")] for message in messages] for messages in said], state


def test_all_rows_are_tested():
    """No row of ADVICE is left out, and a row's number of iterations is the one that is tested."""
    numbers = {name: iterations for name, iterations, *_ in ROWS}
    for script in (PPO, CONTINUOUS):
        assert all(numbers[name] == number for name, number, _, _ in script.module.ADVICE)
    assert set(numbers) == {row[0] for script in (PPO, CONTINUOUS) for row in script.module.ADVICE}


@each_script_fast
def test_a_healthy_run_is_left_in_peace(script):
    """At any time of it."""
    for progress in (0.01, 0.3, 0.99):
        assert advise(script, 100, progress=progress)[0] == [[]] * 100


@pytest.mark.parametrize(("script", "name", "iterations", "bad", "silent"), CASES)
def test_a_row(script, name, iterations, bad, silent):
    """It is given after its iterations in a row, once, also after a resume, and not on the safe side."""
    said, state = advise(script, iterations - 1, **bad)
    assert not any(name in names for names in said)
    restored = script.module.State(**asdict(state))
    said, state = advise(script, 40, restored, **bad)
    assert [name in names for names in said] == [True] + 39 * [False]
    _, state = advise(script, 5, script.module.State(**asdict(state)))
    assert not any(name in names for names in advise(script, 40, state, **bad)[0])
    for safe in silent:
        assert not any(name in names for names in advise(script, 100, **{**bad, **safe})[0]), safe
    said, state = advise(script, iterations - 1, **bad)
    _, state = advise(script, 1, state)
    assert not any(name in names for names in advise(script, iterations - 1, state, **bad)[0]), "not in a row"
    text = next(text for row, _, _, text in script.module.ADVICE if row == name)
    assert "--" in text or name == "rewards", "it must say what to change"


@each_script_fast
@pytest.mark.parametrize("bad", [{"kl": 1e-9}, {"entropy": 0.01, "return": 5.0}, {"std_min": 0.001}])
def test_nothing_contradicts_an_explosion(script, bad):
    """After a KL above 1, a policy that stands still or is sure of itself is its result."""
    _, state = advise(script, 1, kl=300.0)
    assert advise(script, 100, state, **bad)[0] == [[]] * 100


@each_script_fast
@pytest.mark.parametrize("bad", [{"entropy": 0.01, "return": 5.0}, {"std_min": 0.001}])
def test_nothing_contradicts_an_explosion_in_its_own_iteration(script, bad):
    """It alone is given, also where another advice would be due."""
    _, state = advise(script, 9, **bad)
    assert advise(script, 1, state, **bad, kl=300.0)[0] == [["explosion"]]


@each_script_fast
@pytest.mark.parametrize("name", ["policy_loss", "value_loss", "grad_norm", "kl"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_that_are_not_finite_stop_training(script, name, value):
    """They raise `Diverged`."""
    with pytest.raises(script.module.Diverged, match="not finite"):
        advise(script, 1, **{name: value})


HASTY, SURE = {"explosion", "kl", "clipping"}, {"idle", "random", "collapse", "wide", "narrow", "outside"}
PROVOCATIONS = {  # flags on CartPole: what must be said, and what would be false
    "": (set(), {"idle", "collapse", "random", "rewards", "mismatch", "kl", "explosion"}),
    "--learning-rate 1": ({"explosion"}, SURE | {"critic", "rewards"}),
    "--learning-rate 0.3": ({"explosion"}, SURE | {"critic", "rewards"}),
    "--learning-rate 0.05": ({"kl"}, {"idle", "random"}),
    "--learning-rate 1e-7": ({"idle"}, HASTY | {"random", "collapse"}),
    "--gamma 0.5": (set(), {"idle", "collapse", "rewards", "random"}),
    "--ent-coef 0": (set(), {"idle", "collapse", "random"}),
    "--ent-coef 1": (set(), HASTY | {"idle", "collapse"}),
    "--ent-coef 10": ({"random"}, HASTY | {"idle", "collapse"}),
    "--vf-coef 0": ({"critic"}, {"idle", "collapse", "rewards"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", PROVOCATIONS)
def test_a_broken_run_is_told_the_truth(flags, tmp_path):
    """What must be said is said, and nothing that is false."""
    steps = 40_000 if flags != "--learning-rate 1e-7" else 60_000
    result = call(PPO, tmp_path, *flags.split(), "--total-timesteps", steps, "--eval-episodes", 1)
    said = set(re.findall(r"^\[(\w+)\]", result.out, re.MULTILINE))
    must, false = PROVOCATIONS[flags]
    assert must <= said
    assert not said & false
    if "explosion" in must:
        before = result.out[: result.out.index("[explosion]")]
        assert len(re.findall(r"^ *[\d,]+ steps", before, re.MULTILINE)) == 1, "it must be said at once"


@pytest.mark.slow
@pytest.mark.parametrize("script", [PPO, CONTINUOUS], ids=["ppo", "ppo_continuous"])
def test_one_huge_reward_is_noticed(script, tmp_path):
    """One reward of 1e6 among small ones is said in the iteration that has it; rare rewards of 1 are not."""
    flags = ["--env-id", script.env(), "--total-timesteps", 9000, "--eval-episodes", 1]
    for at, expected in ((3000, 1), (10**6, 0)):
        result = call(script, tmp_path, *flags, "--env-kwargs", f"fault='one reward', at={at}")
        assert result.out.count("[rewards]") == expected
