"""coach.py: its rules, what it reads of runs, verdicts on broken and healthy ones, plans; and the skill."""

import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import helpers
import numpy as np
import pytest
from helpers import ROOT
from torch.utils.tensorboard import SummaryWriter

import coach
import grpo

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
                "losses/entropy": 0.6 - 0.4 * self.step / 100_000,
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


def call(*words, folder="."):
    """Run coach.py in a folder, in this process. Returns its status, output and errors."""
    done = helpers.call(SimpleNamespace(script=coach, file="coach.py"), folder, *words)
    return done.status, done.out, done.err


CASES = [  # part of what is said, iterations that it takes, what makes it so, and what keeps it silent
    ("do not compute the same policy", 2, {"first_approx_kl": 2e-4}, {"first_approx_kl": 9e-5}),
    ("an update was extremely large", 1, {"kl": 1.1, "mean": 20}, {"kl": 0.9, "mean": 20}),
    ("though the policy moves", 3, {"clipfrac": 0, "kl": 0.03}, {"clipfrac": 0.01, "kl": 0.03}),
    ("though the policy moves", 3, {"clipfrac": 0, "kl": 0.03}, {"clipfrac": 0, "kl": 0.01}),
    ("updates are much too large", 5, {"kl": 0.11}, {"kl": 0.09}),
    ("updates are too large", 5, {"kl": 0.06}, {"kl": 0.04}),
    ("nearly all samples are clipped", 5, {"clipfrac": 0.85}, {"clipfrac": 0.75}),
    ("the policy drifts", 20, {"clipfrac": 0.45}, {"clipfrac": 0.35}),
    ("almost deterministic, with a poor return", 20, {"entropy": 0.02, "mean": 20}, {"entropy": 0.02}),
    (
        "almost deterministic, with a poor return",
        20,
        {"entropy": 0.02, "mean": 20},
        {"entropy": 0.05, "mean": 20},
    ),
    ("almost deterministic, with a poor return", 20, {"std": 0.04, "mean": 20}, {"std": 0.06, "mean": 20}),
    ("too random", 10, {"std": 3.1}, {"std": 2.9}),
    ("hardly changes", 20, {"kl": 9e-7, "mean": 20}, {"kl": 2e-6, "mean": 20}),
    ("hardly changes", 20, {"kl": 9e-7, "mean": 20}, {"kl": 9e-7}),
    ("no sample is ever clipped", 20, {"clipfrac": 0, "kl": 9e-4, "mean": 20}, {"clipfrac": 0, "mean": 20}),
    ("predicts little", 20, {"explained_variance": 0.04}, {"explained_variance": 0.06}),
    ("predicts little", 20, {"explained_variance": -3}, {"explained_variance": -3, "critic_error": 0.02}),
    ("most scaled rewards are clipped", 10, {"reward_clipfrac": 0.6}, {"reward_clipfrac": 0.4}),
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
        ("as random as at first", {"mean": 20.0, "entropy": 0.6}),
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
    """The mean of the last 100 episodes minus that of the first 50, over the root of their mean variance."""
    random = np.random.default_rng(1)
    episodes = random.normal(np.linspace(10, 60, 400), 7.0).reshape(40, 10)  # of each iteration
    writer = Writer(tmp_path, num_envs=1, total_timesteps=40_000).writer
    for i, returns in enumerate(episodes, 1):
        values = HEALTHY | {"charts/episodic_return": returns.mean(), "charts/episodic_length": 100.0}
        values["charts/episodic_return_std"] = returns.std()
        for tag, value in values.items():
            writer.add_scalar(tag, value, 1000 * i)
    writer.close()
    gain = coach.read_run(tmp_path, coach.open_events(tmp_path)).numbers["gain"]
    first = episodes[:5]
    for i in range(40):
        last = episodes[max(0, i - 9) : i + 1]
        deviation = np.sqrt((first.var() + last.var()) / 2)
        expected = (last.mean() - first.mean()) / deviation if i >= 14 else np.nan
        assert gain[i] == pytest.approx(expected, rel=1e-4, nan_ok=True), i


@pytest.mark.parametrize("rises", [False, True])
def test_runs_of_cleanrl(rises, tmp_path):
    """Each episode is an entry; there are no deviations; an incomplete last iteration is left out."""
    random, folder = np.random.default_rng(2), tmp_path / "CartPole-v1__ppo__1__1760000000"
    with SummaryWriter(str(folder)) as writer:
        sizes = {"num_iterations": 195, "batch_size": 512}
        rows = "\n".join(f"|{name}|{value}|" for name, value in (SETTINGS | sizes).items())
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
    """Without a clip fraction, without it and any KL divergence, or with nothing but returns."""
    kl = {name for name in HEALTHY if "kl" in name or "clip" in name}
    for i, left_out in enumerate(({"losses/clipfrac"}, kl, {*HEALTHY, "losses/entropy"})):
        Writer(tmp_path / str(i)).write(30, left_out=left_out)
        status, out, _ = call("check", tmp_path / str(i))
        assert status == 1
        assert "WRONG: the KL divergence or the clip fraction is not logged" in out


@pytest.mark.parametrize("tag", ["losses/value_loss", "losses/entropy", "charts/episodic_return"])
def test_what_is_not_finite_is_wrong(tag, tmp_path):
    writer = Writer(tmp_path).write(5)
    writer.writer.add_scalar(tag, np.nan, 5000)
    writer.write(3)
    writer.writer.add_scalar(tag, np.nan, 8000)
    writer.write(1)
    (step,) = [step for problem, step in findings(tmp_path).items() if "NaN" in problem]
    assert step == 5000  # the first one


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
    assert bad.index("updates are much too large") < bad.index("the policy drifts")
    assert "in 30 iterations, reported from step 55,000, now 0.006" in bad
    assert re.search(r"KL divergence +0.006 +0.006 .*WRONG", bad)
    assert re.search(r"explained variance +0.7 +0.7 .*ok", bad)
    assert "WRONG" not in good
    assert call("check", "runs/good", folder=tmp_path)[0] == 0
    assert call("check", folder=tmp_path)[1] == out  # runs/ is what is checked by default


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 0.9, 0.97])
def test_a_truncated_file_of_a_healthy_run_is_healthy(share, tmp_path):
    """What is missing in the last iteration is not NaN, wherever the file ends."""
    Writer(tmp_path).write(100)
    (file,) = tmp_path.glob("*tfevents*")
    content = file.read_bytes()
    for extra in range(0, 1200, 100):
        file.write_bytes(content[: int(share * len(content)) + extra])
        assert findings(tmp_path) == {}


def test_folders_with_brackets(tmp_path):
    """A folder that is there is no pattern."""
    Writer(tmp_path / "x[1]").write(30, kl=0.2)
    Writer(tmp_path / "x1").write(30)
    assert call("check", tmp_path / "x[1]")[0] == 1
    assert call("check", tmp_path / "x1")[0] == 0


def test_short_episodes_that_end_first_are_not_the_start(tmp_path):
    """With many environments, the first to end are the good ones: what counts is two episodes of each."""
    writer = Writer(tmp_path, num_envs=50).write(3, mean=40.0, length=60.0)
    writer.write(20, mean=-50.0, length=200.0).write(77, mean=0.0, length=200.0)
    assert findings(tmp_path) == {}


def test_the_entropy_of_a_gaussian_is_no_share(tmp_path):
    """It has no largest value: one that stays does not mean that the policy is random."""
    for name, settings in (
        ("a", {"init_log_std": -0.5}),
        ("b", {"exp_name": "ppo_continuous_action"}),
        ("c", {}),
    ):
        Writer(tmp_path / name, **settings).write(20, mean=20.0, entropy=6.0).write(
            80, mean=25.0, entropy=6.0
        )
        assert ("the policy is as random as at first" in findings(tmp_path / name)) == (name == "c")


def test_deviations_in_units_of_the_environment(tmp_path):
    """A deviation of 5 is too large where 1 is half of the range, and unknown in other units."""
    for scaled in (True, False):
        Writer(tmp_path / str(scaled), scale_actions=scaled).write(40, std=5.0)
        assert ("the policy became too random" in findings(tmp_path / str(scaled))) == scaled


def test_watch_leaves_out_what_had_ended(tmp_path):
    """The report is on the run that went on, and says how many are not shown."""
    Writer(tmp_path / "old", total_timesteps=30_000).write(30, kl=0.3)
    Writer(tmp_path / "new").write(30)
    status, out, _ = call("check", tmp_path, "--watch", "--every", 0.1, "--patience", 0.02)
    assert status == 0
    assert "Not shown: 1 of 2 runs" in out
    assert "updates" not in out


def test_a_path_without_runs_is_named(tmp_path):
    """Beside one with runs, too."""
    Writer(tmp_path / "a").write(30)
    status, _, err = call("check", tmp_path / "a", tmp_path / "typo")
    assert (status, err) == (2, f"coach.py: no TensorBoard files in {tmp_path / 'typo'}\n")


def test_nothing_to_check(tmp_path):
    """It is status 2: neither healthy nor wrong."""
    status, _, err = call("check", tmp_path)
    assert (status, err) == (2, f"coach.py: no TensorBoard files in {tmp_path}\n")
    Writer(tmp_path / "new").write(0)
    status, out, _ = call("check", tmp_path)
    assert status == 2
    assert "no complete iteration is logged yet" in out


def test_watch(tmp_path):
    """It prints what is new, once, and ends when the run has ended, with the status of `check`."""
    writer = Writer(tmp_path, total_timesteps=40_000).write(10)
    command = [sys.executable, ROOT / "coach.py", "check", tmp_path, "--watch", "--every", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        lines = [watching.stdout.readline()]
        writer.write(10, kl=0.3)
        while "WRONG" not in lines[-1]:
            lines.append(watching.stdout.readline())
        writer.write(20, kl=0.3)
        rest = watching.stdout.read()
    assert watching.returncode == 1
    assert "9,000 of 40,000 steps" in lines[0]  # the last iteration may be half-written
    assert "40,000 of 40,000 steps" in rest
    table = rest.index("at first")
    assert "WRONG" not in rest[:table]
    assert "updates are much too large" in rest[table:]


def test_watch_ends_when_a_run_is_dead(tmp_path):
    """Nothing new for --patience, in minutes."""
    Writer(tmp_path).write(10)
    status, out, _ = call("check", tmp_path, "--watch", "--every", 0.1, "--patience", 0.01)
    assert status == 0
    assert "9,000 of 100,000 steps" in out


def test_watch_stops_at_the_first_problem(tmp_path):
    """With --stop. Runs that had ended before are left out."""
    Writer(tmp_path / "old", total_timesteps=30_000).write(30, kl=0.3)
    Writer(tmp_path / "new").write(30, clipfrac=0.9)
    status, out, _ = call("check", tmp_path, "--watch", "--stop", "--every", 0.1)
    assert status == 1
    assert "nearly all samples are clipped" in out
    assert "at first" not in out
    assert "updates" not in out


def test_what_is_over_is_not_wrong(tmp_path):
    """It is told, and so is what is still true beside it: a stricter limit that is over hides nothing."""
    Writer(tmp_path / "a").write(20, mean=20).write(10, kl=0.2).write(70)
    Writer(tmp_path / "b").write(20, mean=20).write(10, kl=0.2).write(70, kl=0.07)
    status, out, _ = call("check", tmp_path / "a")
    assert status == 0
    assert "EARLIER: updates are much too large" in out
    assert "WRONG" not in out
    status, out, _ = call("check", tmp_path / "b")
    assert status == 1
    assert "EARLIER: updates are much too large" in out
    assert "WRONG: updates are too large" in out


def test_what_is_not_logged_is_not_called_well(tmp_path):
    """A metric that no rule has looked at has no verdict."""
    Writer(tmp_path).write(30, left_out=("losses/critic_error",), explained_variance=-3.0)
    _, out, _ = call("check", tmp_path)
    (row,) = re.findall("^  explained variance.*", out, re.M)
    assert not row.endswith("ok")
    (row,) = re.findall("^  value loss.*", out, re.M)
    assert row.endswith("bounded")


LANGUAGE = {  # of one iteration of grpo.py or ppo_rlhf.py
    "policy/approxkl_avg": 0.01, "policy/clipfrac_avg": 0.05, "entropy": 0.5, "loss/policy_avg": -0.01,
    "grad_norm": 0.3, "frac_reward_zero_std": 0.4, "completions/clipped_ratio": 0.01, "objective/kl": 4.0,
    "completions/mean_length": 18.0, "val/explained_variance": 0.8,
    "sampling/sampling_logp_difference/mean": 3e-7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "rise", "changes"),
    [
        (None, 0.5, {}),
        ("an update of the language model was extremely large", 0.5, {"policy/approxkl_avg": 1.5}),
        (
            "sampling and learning do not compute the same log-probabilities",
            0.5,
            {"sampling/sampling_logp_difference/mean": 0.2},
        ),
        ("most responses are cut off", 0.5, {"completions/clipped_ratio": 0.6}),
        ("the policy is far from the reference", 0.5, {"objective/kl": 40.0}),
        ("the critic of the language model predicts little", 0.5, {"val/explained_variance": 0.01}),
        ("the reward is hardly higher than at first", 0.0, {}),
        ("the reward is lower than at first", -0.4, {}),
        ("nearly all groups of responses have equal rewards", 0.0, {"frac_reward_zero_std": 0.95}),
    ],
)
def test_language_models(said, rise, changes, tmp_path):
    """Each kind of trouble is found; and none in a healthy run, which solves most groups at its end."""
    random = np.random.default_rng(0)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("settings", "|setting|value|\n|-|-|\n|total_episodes|12800.0|\n|batch_size|128|")
        for i in range(100):
            reward = random.normal(0.4 + rise * min(1, i / 50), 0.03)
            solved = {"frac_reward_zero_std": 0.95 if i > 60 else 0.4}
            for tag, value in (LANGUAGE | solved | {"reward": reward} | changes).items():
                writer.add_scalar(tag, value, 128 * i)
    found = list(findings(tmp_path))
    assert (said in found) if said else found == []
    run = coach.read_run(tmp_path, coach.open_events(tmp_path))
    gain = run.numbers["reward_gain"]
    assert run.finished
    assert gain[-1] == pytest.approx(rise / 0.03, rel=0.4, abs=1.5)
    assert np.isnan(gain).tolist() == [True] * 14 + [False] * 86


def test_few_iterations(tmp_path):
    """A rule that needs 20 iterations takes 10 in a run of 40, and 8 in a run of 12."""
    for total, said in ((40_000, 11), (12_000, 9), (200_000, 21)):
        Writer(tmp_path / str(total), total_timesteps=total).write(1).write(21, clipfrac=0.5)
        (step,) = findings(tmp_path / str(total)).values()
        assert step == 1000 * said


# Plans


def plan(*words, folder="."):
    return call("plan", *words, "--seconds", 0, folder=folder)


PLANS = {  # words: the script, and what else the plan says
    "--env-id CartPole-v1 --total-timesteps 1e5": (
        "ppo.py",
        ["16 x 64 = 1,024", "about 98, for 100,000", "about 5,880 in all"],
    ),
    "--env-id Taxi-v4 --anneal-ent-coef --gamma 0.9": ("ppo.py", ["a horizon of 10 steps"]),
    "--env-id Pendulum-v1 --adapt none": (
        "ppo_continuous.py",
        ["observations, rewards; not advantages", "note: scaled rewards take the place"],
    ),
    "--env-id Pendulum-v1 --norm-adv": ("ppo_continuous.py", ["advantages, observations, rewards"]),
    "--env-id=CartPole-v1 --script ppo_lstm": ("ppo_lstm.py", ["16 x 128"]),
    "--env-id Pendulum": ("ppo_gpu.py", ["1024 x 16"]),
    "--env-id gpu_envs:Target --device cpu": ("ppo_gpu.py", ["2048 x 32"]),
    "--env-id user_envs:Pairs-v0": ("ppo.py", ["docs/recipes.md, 'Other actions'"]),
    "--env-id user_envs:FromOne-v0": ("ppo.py", ["docs/recipes.md, 'Other actions'"]),
    '--env-id user_envs:Walk-v0 --env-kwargs {"observation":"image"}': ("ppo.py", ["'Small images'"]),
    '--env-id user_envs:Walk-v0 --env-kwargs {"observation":"mixed"}': (
        "ppo.py",
        ["'An image and a vector'"],
    ),
    "--env-id CartPole-v1 --total-timesteps 10_000": ("ppo.py", ["note: so few iterations"]),
    "--script grpo --kl-coef 0.04": ("grpo.py", ["8 responses to each prompt", "β = 0.04"]),
    "--script ppo_rlhf": ("ppo_rlhf.py", ["240, for 61,440 responses"]),
}


@pytest.mark.parametrize("words", PLANS)
def test_plans(words, tmp_path):
    """The script that fits, the sizes, the rules and the command."""
    script, texts = PLANS[words]
    status, out, err = plan(*words.split(), folder=ROOT / "tests")
    assert (status, err) == (0, "")
    assert re.search(rf"^script +{re.escape(script)}:", out)
    for text in [*texts, "monitored < 1 (1): "]:
        assert text in out
    language = script in ("grpo.py", "ppo_rlhf.py")
    assert ("kl > 0.05 (5): updates are too large" in out) == (not language)
    assert ("std > 3 (10): " in out) == (script in ("ppo_continuous.py", "ppo_gpu.py"))
    assert ("token_kl > 1 (1): " in out) == language
    assert ("equal_groups > 0.9" in out) == (script == "grpo.py")
    (command,) = re.findall(r"^run: +python (.*)$", out, re.M)
    if "recipe" not in out:
        assert command.startswith(script)


REFUSED = {  # words, and what is said
    "--env-id CartPole-v1 --update-epochs 99": ["more than 30 epochs"],
    "--env-id CartPole-v1 --clip-coef 0.7 --no-norm-adv": ["clip range above 0.3", "not normalised"],
    "--env-id Pendulum-v1 --no-norm-rewards": ["not normalised"],
    "--script ppo_rlhf --update-epochs 31": ["more than 30 epochs"],
    "--env-id CartPole-v1 --num-envs 0": ["must be"],
    "--env-id CartPole-v1 --script ppo_continuous": ["Discrete(2)"],
    "--env-id CartPole-v1 --wings 2": ["--wings"],
    "--env-id Cartpole-v1": ["CartPole"],
    "--env-id no_module:Env-v0": ["no_module"],
    "--env-id CartPole-v1 --env-kwargs {": ["--env-kwargs {"],
    "--total-timesteps 1e5": ["--env-id"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_refused_plans(words, tmp_path):
    """Each reason in a line, status 2, and no plan."""
    status, out, err = plan(*words.split(), folder=tmp_path)
    assert (status, out) == (2, "")
    assert all(text in err for text in REFUSED[words])
    assert list(tmp_path.iterdir()) == []


TIMED = {  # words of a plan: the number of steps in all
    "--env-id user_envs:Walk-v0": 500_000,
    "--env-id user_envs:Walk-v0 --total-timesteps 3000": 3000,  # shorter than it is measured for
    "--env-id Pendulum --num-envs 64": 1_000_000,
    "--script grpo --batch-size 32 --max-response-length 4 --total-episodes 1000": 1000,
}


@pytest.mark.parametrize("words", TIMED)
def test_the_time_is_measured(words, monkeypatch):
    """It is that of all steps at the speed that is printed; no run is left behind."""
    monkeypatch.setattr(grpo, "learn_to_write", lambda *given: None)
    status, out, err = call("plan", *words.split(), "--seconds", 0.5, folder=ROOT / "tests")
    assert status == 0, err
    (amount, unit, speed) = re.findall(r"^time: +about (\S+) (\w+) .* ([\d,]+) \w+ per second", out, re.M)[0]
    seconds = float(amount) * {"s": 1, "minutes": 60, "hours": 3600}[unit]
    ideal = TIMED[words] / float(speed.replace(",", ""))
    assert seconds > 0.55 * ideal  # of three iterations, the first one may be the fastest
    assert not (ROOT / "tests/runs").exists()


# Documents


def test_the_documents_have_the_rules():
    """Each rule is a row of docs/metrics.md, in its order, and the section that it names is there."""
    rules = [rule for rule in coach.RULES if rule not in coach.UNSAFE]
    rows = [f"| `{rule.when}` | {rule.problem} | {rule.remedy} |" for rule in coach.UNSAFE]
    rows += [f"| `{x.when}` | {x.iterations} | {x.problem} | {x.remedy} |" for x in rules + coach.QUESTIONS]
    assert [line for line in METRICS.splitlines() if re.match(r"\| `[^`]+ [<>=] ", line)] == rows
    headings = re.findall(r"^#+ (.*)$", METRICS, re.M)
    assert {rule.section for rule in coach.RULES + coach.QUESTIONS} <= set(headings)


def test_the_names_in_the_rules_are_explained():
    """Each has a row in the table of names, or is a setting."""
    table = METRICS.split("The names in the rules:")[1].split("\n\n")[1]
    explained = set(re.findall(r"^\| `(\w+)`", table, re.M))
    numbers = {"update_epochs", "clip_coef", "gamma", "unnormalised_steps"}  # in the section on settings
    used = {
        name for rule in coach.RULES + coach.QUESTIONS for name in re.findall(r"[a-z_]{3,}|kl", rule.when)
    }
    assert used - {"and", "not"} == explained | numbers


@pytest.mark.parametrize("section", ["The return does not rise", "Language models"])
def test_the_symptoms_are_what_rules_say(section):
    """The first column of a table of symptoms has problems of rules; each rule of that section is in it."""
    text = METRICS.split(f"## {section}\n")[1].split("\n## ")[0]
    symptoms = re.findall(r"^\| ([^|]+) \|", text, re.M)[1:]
    symptoms = {symptom for symptom in symptoms if set(symptom) - set("- ")}
    rules = coach.RULES + coach.QUESTIONS
    assert symptoms <= {rule.problem for rule in rules}
    assert {rule.problem for rule in rules if rule.section == section} <= symptoms


def test_the_skill_is_in_the_format_of_skills():
    """Front matter with a name, that of the folder, and a description of at most 1,024 characters."""
    _, front, body = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in front.strip().split("\n"))
    assert fields["name"] == SKILL.parent.name == "ppo-trainer"
    assert 50 < len(fields["description"]) <= 1024
    assert len(body.splitlines()) < 500
    assert (ROOT / "docs/metrics.md").exists()


@pytest.mark.slow
def test_the_commands_of_the_skill(tmp_path):
    """They run one after another, as they are, in a folder that has the scripts; the run is healthy."""
    for name in ("coach.py", "ppo.py", "plot.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = SKILL.read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        if "plot.py" in command:
            pytest.importorskip("matplotlib")
            pytest.importorskip("pandas")
        if "--capture-video" in command:
            pytest.importorskip("moviepy")
        command = command.replace(
            "runs/<run>/checkpoint.pt", str(next(iter(tmp_path.glob("runs/*/*.pt")), ""))
        )
        command = command.replace("python", shlex.quote(sys.executable), 1)
        command = command.replace("--capture-video", "--capture-video --eval-episodes 1")
        command = command.replace("100_000", "40_000")  # enough to tell
        command = command.replace("--watch", "--watch --every 1")  # before the run has ended
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, command + done.stdout + done.stderr
    assert list(tmp_path.glob("runs/*/videos/*.mp4"))


# Runs of the scripts


BROKEN = {  # flags on CartPole: what is said first
    "": None,
    "--learning-rate 1": "an update was extremely large",
    "--ent-coef 10": "the policy is as random as at first",
    "--vf-coef 0": "the critic predicts little",
}


@pytest.mark.slow
@pytest.mark.parametrize("words", BROKEN)
def test_broken_runs_are_named(words, tmp_path):
    """By their first problem; and nothing is said of a healthy run."""
    command = [
        sys.executable,
        ROOT / "ppo.py",
        "--total-timesteps",
        "20000",
        "--eval-episodes",
        "1",
        *words.split(),
    ]
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    (shown,) = re.findall(r"^check: +python (.*)$", done.stdout, re.M)  # its last line
    status, out, _ = call(*shlex.split(shown)[1:], folder=tmp_path)
    said = re.findall("^(?:WRONG|EARLIER|QUESTION): (.*?) [(]", out, re.M)
    assert status == (1 if BROKEN[words] else 0)
    assert said[:1] == [BROKEN[words]] * len(said[:1])
    assert bool(said) == bool(words)
