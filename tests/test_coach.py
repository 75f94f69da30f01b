"""coach.py: its rules, what it reads of runs, verdicts on broken and healthy ones, plans; and the skill."""

import re
import subprocess
import sys

import numpy as np
import pytest
from helpers import ROOT
from torch.utils.tensorboard import SummaryWriter

import coach

METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
SKILL = ROOT / "skills/ppo-trainer/SKILL.md"
HEALTHY = {  # of one iteration of ppo.py
    "losses/kl": 0.006, "losses/approx_kl": 0.005, "losses/first_approx_kl": 1e-9, "losses/clipfrac": 0.1,
    "losses/entropy": 0.6, "losses/explained_variance": 0.7, "losses/critic_error": 0.3,
    "losses/policy_loss": -0.01, "losses/value_loss": 0.1, "losses/grad_norm": 0.3,
}  # fmt: skip
SETTINGS = {
    "env_id": "CartPole-v1", "total_timesteps": 100_000, "num_envs": 4, "update_epochs": 10,
    "num_minibatches": 4, "clip_coef": 0.2, "gamma": 0.99, "norm_adv": True, "surrogate": "clip",
}  # fmt: skip


class Writer:
    """Writes a run as the scripts do, iteration by iteration, with random returns that rise."""

    def __init__(self, folder, **settings):
        self.folder, self.step, self.random = folder, 0, np.random.default_rng(0)
        self.writer = SummaryWriter(str(folder))
        rows = "\n".join(f"|{name}|{value}|" for name, value in (SETTINGS | settings).items())
        self.writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")

    def write(self, iterations, mean=None, length=20.0, deviation=5.0, left_out=(), **changes):
        """Iterations of 1,000 steps. `changes` are metrics; without a mean, the return rises."""
        changed = {f"losses/{name}": value for name, value in changes.items()}
        for _ in range(iterations):
            self.step += 1000
            center = 20 + self.step / 1000 if mean is None else mean
            returns = self.random.normal(center, deviation, max(1, round(1000 / length)))
            scalars = HEALTHY | {
                "charts/episodic_return": returns.mean(),
                "charts/episodic_return_std": returns.std(),
                "charts/episodic_return_min": returns.min(),
                "charts/episodic_return_max": returns.max(),
                "charts/episodic_length": length,
            }
            for tag, value in (scalars | changed).items():
                if tag not in left_out:
                    self.writer.add_scalar(tag, value, self.step)
        self.writer.flush()
        return self


def findings(folder):
    """The problems and questions that are found in a run, with the steps at which they were known."""
    run = coach.read_run(folder, coach.open_events(folder))
    return {
        found.rule.problem: found.step for found in coach.find_problems(run, coach.RULES + coach.QUESTIONS)
    }


def call(*words, folder=None):
    """Run coach.py as a program. Returns its status, output and errors."""
    command = [sys.executable, ROOT / "coach.py", *map(str, words)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


CASES = [  # part of what is said, iterations that it takes, what makes it so, and what keeps it silent
    ("do not compute the same policy", 2, {"first_approx_kl": 2e-4}, {"first_approx_kl": 9e-5}),
    ("went much too far", 1, {"kl": 1.1}, {"kl": 0.9}),
    ("go far too far", 5, {"kl": 0.11}, {"kl": 0.09}),
    ("updates go too far", 5, {"kl": 0.06}, {"kl": 0.04}),
    ("nearly all samples are clipped", 5, {"clipfrac": 0.85}, {"clipfrac": 0.75}),
    ("the policy drifts", 20, {"clipfrac": 0.45}, {"clipfrac": 0.35}),
    ("hardly random, with a poor return", 20, {"entropy": 0.02, "mean": 20}, {"entropy": 0.02}),
    ("hardly random, with a poor return", 20, {"entropy": 0.02, "mean": 20}, {"entropy": 0.05, "mean": 20}),
    ("hardly random, with a poor return", 20, {"std": 0.04, "mean": 20}, {"std": 0.06, "mean": 20}),
    ("too random", 10, {"std": 3.1}, {"std": 2.9}),
    ("hardly changes", 20, {"kl": 9e-7, "mean": 20}, {"kl": 2e-6, "mean": 20}),
    ("hardly changes", 20, {"kl": 9e-7, "mean": 20}, {"kl": 9e-7}),
    ("no sample is ever clipped", 20, {"clipfrac": 0, "mean": 20}, {"clipfrac": 0.001, "mean": 20}),
    ("predicts little", 20, {"explained_variance": 0.04}, {"explained_variance": 0.06}),
    ("predicts little", 20, {"explained_variance": -3}, {"explained_variance": -3, "critic_error": 0.02}),
    ("at the limit of their clip", 10, {"reward_clipfrac": 0.6}, {"reward_clipfrac": 0.4}),
    ("lower than at first", 10, {"mean": 12}, {"mean": 20}),
]


@pytest.mark.parametrize(("said", "iterations", "bad", "silent"), CASES)
def test_a_rule(said, iterations, bad, silent, tmp_path):
    """It is told at the end of so many iterations in a row, and not of one less, nor beyond its limit."""
    Writer(tmp_path / "a").write(20, mean=20.0).write(iterations - 1, **bad).write(1)
    Writer(tmp_path / "b").write(20, mean=20.0).write(60, **silent)
    for folder in (tmp_path / "a", tmp_path / "b"):
        assert not [problem for problem in findings(folder) if said in problem]
    Writer(tmp_path / "c").write(20, mean=20.0).write(iterations + 2, **bad)
    (step,) = [step for problem, step in findings(tmp_path / "c").items() if said in problem]
    late = 3000 if "mean" in bad else 0  # the means of the last 100 episodes follow with a delay
    assert 20_000 + 1000 * iterations <= step <= 20_000 + 1000 * iterations + late


@pytest.mark.parametrize(
    ("said", "changes"),
    [
        ("all returns have been the same", {"mean": 0.0, "deviation": 0.0}),
        ("hardly higher", {"mean": 20.5}),
        ("as random as at first", {"mean": 20.0}),
        ("shorten to nothing", {"length": 9.0, "mean": 40.0}),
    ],
)
def test_what_only_a_whole_run_tells(said, changes, tmp_path):
    """Returns that never differ or never rise, a policy that stays random, and episodes that vanish."""
    Writer(tmp_path / "a").write(
        20, mean=20.0 if "deviation" not in changes else 0.0, deviation=changes.get("deviation", 5.0)
    ).write(75, **changes)
    Writer(tmp_path / "b").write(40, mean=20.0).write(55, entropy=0.5)
    assert [step for problem, step in findings(tmp_path / "a").items() if said in problem]
    assert findings(tmp_path / "b") == {}


def test_the_gain(tmp_path):
    """The mean of the last 100 episodes minus that of the first 50, over the deviation of the first 50."""
    random = np.random.default_rng(1)
    episodes = random.normal(np.linspace(10, 60, 400), 7.0).reshape(40, 10)  # of each iteration
    writer = Writer(tmp_path, num_envs=1).writer
    for i, returns in enumerate(episodes, 1):
        values = HEALTHY | {"charts/episodic_return": returns.mean(), "charts/episodic_length": 100.0}
        values["charts/episodic_return_std"] = returns.std()
        for tag, value in values.items():
            writer.add_scalar(tag, value, 1000 * i)
    writer.close()
    gain = coach.read_run(tmp_path, coach.open_events(tmp_path)).numbers["gain"]
    first = episodes[:5]
    for i in range(40):
        expected = (episodes[i - 9 : i + 1].mean() - first.mean()) / first.std() if i >= 14 else np.nan
        assert gain[i] == pytest.approx(expected, rel=1e-4, nan_ok=True), i


@pytest.mark.parametrize("rises", [False, True])
def test_runs_of_cleanrl(rises, tmp_path):
    """Each episode is an entry; there are no deviations; an incomplete last iteration is left out."""
    random, folder = np.random.default_rng(2), tmp_path / "CartPole-v1__ppo__1__1760000000"
    with SummaryWriter(str(folder)) as writer:
        rows = "\n".join(f"|{name}|{value}|" for name, value in SETTINGS.items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        for step in range(20, 99_841, 20):
            value = random.normal(20 + 30 * rises * min(1, step / 50_000), 8)
            writer.add_scalar("charts/episodic_return", value, step)
            writer.add_scalar("charts/episodic_length", 20.0, step)
            if step % 512 < 20:
                for tag in (
                    "approx_kl",
                    "clipfrac",
                    "entropy",
                    "explained_variance",
                    "policy_loss",
                    "value_loss",
                ):
                    writer.add_scalar(
                        f"losses/{tag}", HEALTHY[f"losses/{tag}"] * (1 - step / 1e6), step // 512 * 512
                    )
    run = coach.read_run(folder, coach.open_events(folder))
    assert len(run.steps) == 195
    assert run.finished
    assert run.numbers["return"][-1] == pytest.approx(20 + 30 * rises, abs=3)
    assert run.numbers["gain"][-1] == pytest.approx(30 / 8 * rises, abs=1)
    assert ("hardly higher" in str(findings(folder))) != rises


def test_a_run_that_is_not_monitored_fails(tmp_path):
    for i, tag in enumerate(("losses/clipfrac", "losses/")):
        left_out = {name for name in HEALTHY if name.startswith(tag) and ("kl" in name or "clip" in name)}
        Writer(tmp_path / str(i)).write(30, left_out=left_out)
        status, out, _ = call("check", tmp_path / str(i))
        assert status == 1
        assert "WRONG: the KL divergence or the clip fraction is not logged" in out


@pytest.mark.parametrize("tag", ["losses/value_loss", "losses/entropy", "charts/episodic_return"])
def test_what_is_not_finite_is_wrong(tag, tmp_path):
    writer = Writer(tmp_path).write(5)
    writer.writer.add_scalar(tag, np.nan, 5000)
    writer.writer.flush()
    assert [problem for problem in findings(tmp_path) if "NaN" in problem]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"update_epochs": 31}, "more than 30 epochs"),
        ({"clip_coef": 0.31}, "clip range above 0.3"),
        ({"norm_adv": False}, "not normalised"),
        ({"norm_adv": False, "norm_rewards": True}, "not normalised"),
        ({"norm_adv": False, "norm_rewards": False, "min_log_std": -2.3}, "not normalised"),
        ({"gamma": 0.4}, "discount factor"),
        ({"norm_adv": False, "norm_rewards": True, "min_log_std": -2.3}, ""),
        ({"norm_adv": False, "update_epochs": 1, "num_minibatches": 1}, ""),
        ({"clip_coef": 1000.0, "surrogate": "kl-penalty"}, ""),
        ({"update_epochs": 30, "clip_coef": 0.3}, ""),
    ],
)
def test_unsafe_settings_of_a_run(settings, said, tmp_path):
    """They are found in its settings: scaled rewards are enough in ppo_continuous.py alone."""
    Writer(tmp_path, **settings).write(30)
    found = " ".join(findings(tmp_path))
    assert said in found
    assert said or not found


def test_check_of_several_runs(tmp_path):
    """A table of each, the most serious problem first, and the worst status of all."""
    Writer(tmp_path / "runs/good").write(100)
    Writer(tmp_path / "runs/bad").write(50, mean=20.0).write(30, kl=0.2, clipfrac=0.5).write(20)
    status, out, _ = call("check", "runs/*", folder=tmp_path)
    bad, good = out.split("runs/good")
    assert status == 1
    assert bad.index("updates go far too far") < bad.index("the policy drifts")
    assert "since step 55,000, no longer" in bad
    assert re.search(r"KL divergence +0.006 +0.006 .*WRONG", bad)
    assert re.search(r"entropy +0.6 +0.6 .*ok", bad)
    assert "WRONG" not in good
    assert call("check", "runs/good", folder=tmp_path)[0] == 0
    assert call("check", folder=tmp_path)[1] == out  # runs/ is what is checked by default


def test_nothing_to_check(tmp_path):
    """It is status 2: neither healthy nor wrong."""
    status, _, err = call("check", tmp_path)
    assert (status, err) == (2, f"coach.py: no TensorBoard files in {tmp_path}\n")
    Writer(tmp_path / "new").write(0)
    status, out, _ = call("check", tmp_path)
    assert status == 2
    assert "no iteration is logged yet" in out


def test_watch(tmp_path):
    """It prints what is new, once, and ends when the run has ended, with the status of `check`."""
    writer = Writer(tmp_path, total_timesteps=40_000).write(10)
    command = [sys.executable, ROOT / "coach.py", "check", tmp_path, "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        lines = [watching.stdout.readline()]
        writer.write(10, kl=0.3)
        while "WRONG" not in lines[-1]:
            lines.append(watching.stdout.readline())
        writer.write(20)
        rest = watching.stdout.read()
    assert watching.returncode == 1
    assert "10,000 of 40,000 steps" in lines[0]
    assert "40,000 of 40,000 steps" in rest
    table = rest.index("at first")
    assert "WRONG" not in rest[:table]
    assert "updates go far too far" in rest[table:]


def test_watch_ends_when_a_run_is_dead(tmp_path):
    """Nothing new for --patience, in minutes."""
    Writer(tmp_path).write(10)
    status, out, _ = call("check", tmp_path, "--watch", "--every", 0.1, "--patience", 0.01)
    assert status == 0
    assert "10,000 of 100,000 steps" in out
