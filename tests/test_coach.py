"""Tests of coach.py: its rules, its verdicts on healthy and broken runs, its plans, and the skill."""

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

METRICS = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
SKILL = ROOT / "skills/ppo-trainer/SKILL.md"
HEALTHY = {  # of one iteration of ppo.py
    "losses/kl": 0.006, "losses/approx_kl": 0.005, "losses/first_approx_kl": 1e-9, "losses/clipfrac": 0.1,
    "losses/entropy": 0.6, "losses/explained_variance": 0.7, "losses/critic_error": 0.3,
    "losses/policy_loss": -0.01, "losses/value_loss": 0.1, "losses/grad_norm": 0.3,
}  # fmt: skip
SETTINGS = {
    "env_id": "Walk-v0", "total_timesteps": 100_000, "num_envs": 4, "update_epochs": 10,
    "num_minibatches": 4, "max_grad_norm": 0.5, "clip_coef": 0.2, "gamma": 0.99, "norm_adv": True,
    "surrogate": "clip",
}  # fmt: skip


class Writer:
    """This class writes a run as the scripts do, iteration by iteration, with random returns that rise."""

    def __init__(self, folder, **settings):
        self.folder, self.step, self.random = folder, 0, np.random.default_rng(0)
        self.writer = SummaryWriter(str(folder))
        rows = "\n".join(f"|{name}|{value}|" for name, value in (SETTINGS | settings).items())
        self.writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")

    def write(self, iterations, mean=None, length=20.0, deviation=5.0, left_out=(), **changes):
        """Write iterations of 1,000 steps. `changes` are metrics; without a mean, the return rises."""
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
    """Return the problems and questions that are found in a run, with the steps at which they were known."""
    run = coach.read_run(folder, coach.open_events(folder))
    return {finding.rule.problem: finding.step for finding in coach.find_problems(run)}


def call(*words, folder="."):
    """Run coach.py in a folder, in this process. Return its status, output and errors."""
    done = helpers.call(SimpleNamespace(script=coach, file="coach.py"), folder, *words)
    return done.status, done.out, done.err


CASES = [  # part of the problem, iterations that the rule needs, metrics beyond its limit, and within
    ("do not compute the same policy", 2, {"first_approx_kl": 2e-4}, {"first_approx_kl": 9e-5}),
    ("an update was extremely large", 1, {"kl": 1.1}, {"kl": 0.09}),
    ("divergence is exactly 0", 5, {"approx_kl": 0, "clipfrac": 0}, {"approx_kl": 0}),
    ("though the policy moves", 3, {"clipfrac": 0, "kl": 0.03}, {"clipfrac": 0.01, "kl": 0.03}),
    ("though the policy moves", 3, {"clipfrac": 0, "kl": 0.03}, {"clipfrac": 0, "kl": 0.01}),
    ("updates are much too large", 8, {"kl": 0.11}, {"kl": 0.09}),
    ("updates are too large", 8, {"kl": 0.06}, {"kl": 0.04}),
    ("nearly all samples are clipped", 5, {"clipfrac": 0.85}, {"clipfrac": 0.75}),
    ("the policy drifts", 20, {"clipfrac": 0.45}, {"clipfrac": 0.35}),
    ("almost deterministic", 20, {"entropy": 0.02, "mean": 20}, {"entropy": 0.02}),
    ("almost deterministic", 20, {"entropy": 0.02, "mean": 20}, {"entropy": 0.05, "mean": 20}),
    ("almost deterministic", 20, {"std": 0.04, "mean": 20}, {"std": 0.06, "mean": 20}),
    ("very random", 10, {"std": 3.1}, {"std": 2.9}),
    ("hardly changes", 20, {"kl": 9e-6, "mean": 20}, {"kl": 2e-5, "mean": 20}),
    ("hardly changes", 20, {"kl": 9e-6, "mean": 20}, {"kl": 9e-6}),
    ("no sample is ever clipped", 20, {"clipfrac": 0, "kl": 9e-4, "mean": 20}, {"clipfrac": 0, "mean": 20}),
    ("predicts little", 20, {"explained_variance": 0.04}, {"explained_variance": 0.06}),
    ("predicts little", 20, {"explained_variance": -3}, {"explained_variance": -3, "critic_error": 0.09}),
    ("most scaled rewards are clipped", 10, {"reward_clipfrac": 0.6}, {"reward_clipfrac": 0.4}),
    ("more than ten deviations", 10, {"obs_clipfrac": 0.03}, {"obs_clipfrac": 0.01}),
    ("lower than at first", 10, {"mean": 12}, {"mean": 20}),
]


@pytest.mark.parametrize(("said", "iterations", "bad", "good"), CASES)
def test_a_rule_speaks_beyond_its_limit_after_its_iterations_in_a_row(said, iterations, bad, good, tmp_path):
    """One iteration less does not make it speak, nor do metrics within its limit."""
    writer = Writer(tmp_path).write(21, mean=20.0)
    writer.write(iterations - 1, **bad).write(1).write(iterations + 2, **good)
    due = writer.step + 1000 * iterations
    writer.write(iterations + 2, **bad)
    (step,) = [step for problem, step in findings(tmp_path).items() if said in problem]
    late = 3000 if "mean" in bad else 0  # the means of the last 100 episodes follow with a delay
    assert due <= step <= due + late


@pytest.mark.parametrize(
    ("said", "first", "then"),
    [
        ("all returns have been the same", {"mean": 0.0, "deviation": 0.0}, {"mean": 0.0, "deviation": 0.0}),
        ("beyond its noise", {"mean": 20.0}, {"mean": 20.5}),
        ("as random as at first", {"mean": 20.0}, {"mean": 40.0, "entropy": 0.6}),
        ("shorten to nothing", {"mean": 20.0}, {"length": 9.0, "mean": 40.0}),
        ("", {"mean": 20.0}, {"entropy": 0.5}),
    ],
)
def test_rules_on_a_whole_run_find_constant_returns_and_those_that_do_not_rise(said, first, then, tmp_path):
    """They also find a policy that stays random and episodes that vanish, but nothing in a healthy run."""
    Writer(tmp_path).write(40, **first).write(55, **then)
    found = findings(tmp_path)
    assert said in " ".join(found)
    assert said or not found


@pytest.mark.parametrize(("greedy", "asks"), [(50.0, True), (80.0, False)])
def test_a_greedy_return_far_below_the_return_of_training_is_a_question(greedy, asks, tmp_path):
    """Returns rise from 20 to about 110. The last evaluation counts."""
    writer = Writer(tmp_path).write(40, deviation=1.0)
    writer.writer.add_scalar("eval/greedy_return", 0.0, writer.step)
    writer.write(50, deviation=1.0)
    writer.writer.add_scalar("eval/greedy_return", greedy, writer.step)
    writer.write(5, deviation=1.0)
    run = coach.read_run(tmp_path, coach.open_events(tmp_path))
    gap = run.numbers["greedy_gap"]
    assert np.isnan(gap[:89]).all()
    np.testing.assert_allclose(gap[89:], (108 - greedy) / (108 - 21.5), atol=0.03)
    status, out, _ = call("check", tmp_path)
    assert status == 0
    assert ("QUESTION: the greedy return is far below" in out) == asks


def test_a_run_that_reached_stop_at_has_ended(tmp_path):
    """Its steps are fewer than --total-timesteps."""
    for name, greedy, ended in (("a", 0.7, True), ("b", 0.6, False)):
        writer = Writer(tmp_path / name, stop_at=0.7).write(20)
        writer.writer.add_scalar("eval/greedy_return", greedy, writer.step)
        writer.writer.flush()
        assert coach.read_run(tmp_path / name, coach.open_events(tmp_path / name)).finished == ended
        writer.write(1)  # it was resumed
        assert not coach.read_run(tmp_path / name, coach.open_events(tmp_path / name)).finished


def test_the_gain_is_the_rise_of_the_return_in_standard_deviations(tmp_path):
    """It is the last 100 episodes' mean minus that of the first 50, over the root of their mean variance."""
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
def test_runs_of_cleanrl_are_read(rises, tmp_path):
    """They log each episode, and no standard deviations; their last iteration may be incomplete."""
    random, folder = np.random.default_rng(2), tmp_path / "CartPole-v1__ppo__1__1760000000"
    with SummaryWriter(str(folder)) as writer:
        sizes = {"num_iterations": 60, "batch_size": 512, "total_timesteps": 31_000}
        rows = "\n".join(f"|{name}|{value}|" for name, value in (SETTINGS | sizes).items())
        writer.add_text("hyperparameters", f"|param|value|\n|-|-|\n{rows}")
        for step in range(20, 30_721, 20):
            value = random.normal(20 + 30 * rises * min(1, step / 15_000), 8)
            writer.add_scalar("charts/episodic_return", value, step)
            writer.add_scalar("charts/episodic_length", 20.0, step)
            if step % 512 < 20:
                for tag in ("approx_kl", "clipfrac", "entropy", "explained_variance", "value_loss"):
                    value = HEALTHY[f"losses/{tag}"] * (1 - step / 3e5)
                    writer.add_scalar(f"losses/{tag}", value, step // 512 * 512)
    run = coach.read_run(folder, coach.open_events(folder))
    assert len(run.steps) == 60
    assert run.finished
    assert run.numbers["return"][-1] == pytest.approx(20 + 30 * rises, abs=3)
    assert run.numbers["gain"][-1] == pytest.approx(30 / 8 * rises, abs=1)
    assert ("beyond its noise" in str(findings(folder))) != rises


def test_each_episode_of_cleanrl_counts_once(tmp_path):
    """Eight environments end their episodes in turn, and short ones weigh no more than long ones."""
    random = np.random.default_rng(3)
    ends = [np.cumsum(random.exponential(25, 60).round() + 8) for _ in range(8)]
    lengths = [np.diff(env, prepend=0) for env in ends]
    episodes = sorted(zip(np.concatenate(ends), np.concatenate(lengths), strict=True))
    with SummaryWriter(str(tmp_path)) as writer:
        for count, (end, length) in enumerate(episodes, 1):
            writer.add_scalar("charts/episodic_return", length, int(8 * end))
            writer.add_scalar("charts/episodic_length", length, int(8 * end))
            if count % 40 == 0:
                for tag, value in HEALTHY.items():
                    writer.add_scalar(tag, value, int(8 * end) + 1)
    run = coach.read_run(tmp_path, coach.open_events(tmp_path))
    seen = round(run.numbers["episodes"][-1])
    returns = [length for _, length in episodes]
    assert seen in range(430, 450)  # those of the last iteration, which may be incomplete, are left out
    assert run.numbers["return"][-1] == pytest.approx(np.mean(returns[seen - 100 : seen]), rel=1e-5)


def test_before_the_first_update_nothing_is_said_of_a_run_of_cleanrl(tmp_path):
    """It logs episodes at once, and losses after the first rollout."""
    with SummaryWriter(str(tmp_path)) as writer:
        for step in range(20, 200, 20):
            writer.add_scalar("charts/episodic_return", 20.0, step)
    status, out, _ = call("check", tmp_path)
    assert status == 2
    assert "no complete iteration is logged yet" in out


def test_with_a_kl_penalty_the_clip_fraction_is_not_judged(tmp_path):
    """Nothing is clipped."""
    Writer(tmp_path, surrogate="kl-penalty").write(60, clipfrac=0.9)
    assert findings(tmp_path) == {}


def test_a_policy_that_begins_deterministic_is_not_as_random_as_at_first(tmp_path):
    """Its entropy is the largest of the run, and near 0."""
    Writer(tmp_path).write(20, mean=20.0, entropy=1e-7).write(80, mean=20.0, entropy=1e-7)
    assert "the policy is nearly as random as at first" not in findings(tmp_path)
    assert "the policy is almost deterministic, and the return has hardly risen" in findings(tmp_path)


def test_a_run_that_does_not_log_the_clip_fraction_or_the_kl_divergence_is_wrong(tmp_path):
    kl = {name for name in HEALTHY if "kl" in name or "clip" in name}
    for i, left_out in enumerate(({"losses/clipfrac"}, kl, {*HEALTHY, "losses/entropy"})):
        Writer(tmp_path / str(i), total_timesteps=30_000).write(30, left_out=left_out)
        status, out, _ = call("check", tmp_path / str(i))
        assert status == 1
        assert "WRONG: the KL divergence or the clip fraction is not logged" in out


def test_a_first_iteration_that_is_half_written_is_not_wrong(tmp_path):
    """The clip fraction may still come."""
    Writer(tmp_path, total_timesteps=1000).write(1, left_out=["losses/clipfrac"])
    status, out, _ = call("check", tmp_path)
    assert status == 0
    assert "few iterations" in out


@pytest.mark.parametrize("tag", ["losses/value_loss", "losses/entropy"])
def test_a_nan_is_reported_from_its_first_step(tag, tmp_path):
    writer = Writer(tmp_path).write(5)
    writer.writer.add_scalar(tag, np.nan, 5000)
    writer.write(3)
    writer.writer.add_scalar(tag, np.nan, 8000)
    writer.write(1)
    (step,) = [step for problem, step in findings(tmp_path).items() if "finite" in problem]
    assert step == 5000


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"update_epochs": 31}, "more than 30 epochs"),
        ({"clip_coef": 0.31}, "clip range above 0.3"),
        ({"norm_adv": False}, "not normalised"),
        ({"norm_adv": False, "norm_rewards": True}, "not normalised"),
        ({"gamma": 0.4}, "discount factor"),
        ({"norm_adv": False, "norm_rewards": True, "min_log_std": -2.3}, ""),
        ({"norm_adv": False, "update_epochs": 1, "num_minibatches": 1}, ""),
        ({"clip_coef": 1000.0, "surrogate": "kl-penalty"}, ""),
        ({"update_epochs": 30, "clip_coef": 0.3}, ""),
    ],
)
def test_unsafe_settings_are_found_in_the_log_of_a_run(settings, said, tmp_path):
    """Scaled rewards replace normalised advantages in ppo_continuous.py alone, which has `min_log_std`."""
    Writer(tmp_path, **settings).write(10)
    found = " ".join(findings(tmp_path))
    assert said in found
    assert said or not found


def test_check_shows_a_table_of_each_run_and_ends_with_the_worst_status(tmp_path):
    """The most serious problem of a run comes first."""
    Writer(tmp_path / "runs/good").write(100)
    Writer(tmp_path / "runs/bad").write(50, mean=20.0).write(30, kl=0.2, clipfrac=0.5).write(20)
    status, out, _ = call("check", "runs/*", folder=tmp_path)
    bad, good = out.split("runs/good")
    assert status == 1
    assert bad.index("updates are much too large") < bad.index("the policy drifts")
    assert "in 30 iterations, reported from step 58,000, now 0.006" in bad
    assert re.search(r"KL divergence +0.006 +0.006 +0.006 .*WRONG", bad)
    assert re.search(r"explained variance +0.7 +0.7 +0.7 .*ok", bad)
    assert "WRONG" not in good
    assert "QUESTION" not in good
    assert call("check", "runs/good", folder=tmp_path)[0] == 0
    assert call("check", folder=tmp_path)[1] == out  # runs/ is the default


WORDS = [  # the row, metrics, and the last column
    ("KL divergence", {}, "below 0.05 ok"),
    ("clip fraction", {"clipfrac": 0.5}, "below 0.4 high"),
    ("explained variance", {}, "above 0 ok"),
    ("explained variance", {"explained_variance": -10.1}, "above 0 low"),
    ("explained variance", {"explained_variance": -10.1, "critic_error": 0.01}, "above 0 low, small error"),
    ("return", {}, "rises rose"),
    ("return", {"mean": 21.5}, "rises within noise"),  # 20 at first, with a deviation of 5
    ("return", {"mean": 10.0}, "rises QUESTION"),
    ("value loss", {}, "bounded"),
]


@pytest.mark.parametrize(("label", "changes", "ending"), WORDS)
def test_the_last_column_says_how_a_number_compares_with_what_is_healthy(label, changes, ending, tmp_path):
    writer = Writer(tmp_path).write(30, mean=20.0)
    writer.write(19, **changes)  # no rule that needs 20 iterations speaks
    _, out, _ = call("check", tmp_path)
    (row,) = re.findall(f"^  {label} .*", out, re.M)
    assert " ".join(row.split()).endswith(ending)


SPIKES = [
    ({"kl": 1.1}, 1, 0),
    ({"kl": 0.2}, 7, 0),
    ({"kl": 0.2}, 8, 1),
    ({"first_approx_kl": 1e-3}, 1, 0),
    ({"first_approx_kl": 1e-3}, 2, 1),
    ({"mean": -30.0}, 30, 0),
]


@pytest.mark.parametrize(("changes", "iterations", "status"), SPIKES)
def test_watching_with_stop_and_the_check_at_the_end_agree(changes, iterations, status, tmp_path):
    """What is WRONG after some iteration is so after all later ones, and a QUESTION stops nothing."""
    writer = Writer(tmp_path, total_timesteps=100_000).write(10)
    statuses = []
    for count in [0, *[1] * iterations, *[5] * 5]:
        writer.write(count, **(changes if count == 1 else {}))
        statuses.append(call("check", tmp_path)[0])
    assert statuses == sorted(statuses)
    assert statuses[-1] == status
    writer.write((100_000 - writer.step) // 1000)
    assert call("check", tmp_path)[0] == status


def test_a_run_in_which_no_episode_ends_is_asked_about(tmp_path):
    """Nothing tells whether it has learnt."""
    names = "return", "return_std", "return_min", "return_max", "length"
    Writer(tmp_path).write(40, left_out=[f"charts/episodic_{name}" for name in names])
    status, out, _ = call("check", tmp_path)
    assert status == 0
    assert "QUESTION: no episode has ended, or none is logged" in out
    assert "No verdict" in out


CARTPOLE = {"env_id": "CartPole-v1"}


@pytest.mark.parametrize(
    ("mean", "settings", "asks"),
    [
        (125.0, CARTPOLE, True),
        (499.0, CARTPOLE, False),
        (125.0, CARTPOLE | {"env_kwargs": '{"sutton_barto_reward": true}'}, False),
        (125.0, {"env_id": "my_env:CartPole-v9"}, False),
    ],
)
def test_a_return_below_gymnasiums_threshold_is_a_question_at_the_end(mean, settings, asks, tmp_path):
    """CartPole-v1 is solved at 475. Other rewards may have another threshold."""
    writer = Writer(tmp_path, total_timesteps=60_000, **settings).write(30, mean=20.0).write(20, mean=mean)
    assert "below Gymnasium" not in str(findings(tmp_path))
    writer.write(10, mean=mean)
    assert ("below Gymnasium" in str(findings(tmp_path))) == asks


@pytest.mark.parametrize("broken", ["garbage", "two writers", "text"])
def test_a_broken_run_does_not_hide_the_others(broken, tmp_path):
    Writer(tmp_path / "z").write(20, kl=4.0)
    folder = tmp_path / "a"
    if broken == "two writers":
        first, second = Writer(folder).write(5), Writer(folder)
        for _ in range(10):
            first.write(1)
            second.write(1)
    else:
        writer = Writer(folder).write(5)
        if broken == "text":
            writer.writer.add_text("charts/episodic_return", "20")
            writer.writer.add_text("settings", "no table")
            writer.write(1)
        else:
            (file,) = folder.glob("*tfevents*")
            file.write_bytes(file.read_bytes()[:700] + b"garbage" * 100)
    status, out, _ = call("check", tmp_path)
    assert status == 1
    assert "WRONG: updates are much too large" in out


def test_a_run_that_cannot_be_read_is_named_and_the_status_is_2(tmp_path, monkeypatch):
    """Not 0: nobody knows whether it is healthy."""
    for name in "ab":
        Writer(tmp_path / name).write(20)
    read = coach.read_run

    def fail(folder, events):
        if folder.name == "a":
            raise ValueError("damaged")
        return read(folder, events)

    monkeypatch.setattr(coach, "read_run", fail)
    status, out, _ = call("check", tmp_path)
    assert status == 2
    assert f"{tmp_path / 'a'}: unreadable, ValueError: damaged" in out
    assert "Nothing is wrong" in out


def test_a_run_whose_process_has_ended_is_not_taken_for_live(tmp_path):
    """A run of the scripts holds a lock while it trains."""
    Writer(tmp_path).write(20)
    lock = tmp_path / ".lock"
    holder = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX); "
    holder += "print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", holder, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        _, out, _ = call("check", tmp_path)
        assert "19,000 of 100,000 steps, 19 iterations\n" in out  # the last one may be half-written
        process.communicate(b"\n")
    _, out, _ = call("check", tmp_path)
    assert "20,000 of 100,000 steps, 20 iterations, stopped before its end" in out
    _, out, _ = call("check", tmp_path, "--watch", "--wait", 0, "--every", 0.1)
    assert "stopped before its end" in out


def test_a_truncated_file_of_a_healthy_run_is_healthy(tmp_path):
    """A metric that is missing in the last iteration is not NaN, wherever the file ends."""
    Writer(tmp_path, total_timesteps=50_000).write(50)
    (file,) = tmp_path.glob("*tfevents*")
    content = file.read_bytes()
    for share in (0.3, 0.6, 0.97):
        for extra in range(0, 1200, 100):
            file.write_bytes(content[: int(share * len(content)) + extra])
            assert findings(tmp_path) == {}


def test_with_many_environments_the_first_short_episodes_are_not_the_start(tmp_path):
    """The first episodes to end are the good ones here, so the start is two episodes of each environment."""
    writer = Writer(tmp_path, num_envs=50).write(3, mean=40.0, length=60.0)
    writer.write(20, mean=-50.0, length=200.0).write(77, mean=0.0, length=200.0)
    assert findings(tmp_path) == {}


@pytest.mark.parametrize("setting", [{"init_log_std": -0.5}, {"exp_name": "ppo_continuous_action"}])
def test_the_entropy_of_a_gaussian_that_stays_does_not_mean_that_it_is_random(setting, tmp_path):
    """A Gaussian's entropy has no largest value."""
    Writer(tmp_path, **setting).write(20, mean=20.0, entropy=6.0).write(80, mean=25.0, entropy=6.0)
    assert "the policy is nearly as random as at first" not in findings(tmp_path)


def test_deviations_in_units_of_the_environment_are_not_judged(tmp_path):
    """A deviation of 5 is too large where 1 is half of an action's range, but not in unknown units."""
    Writer(tmp_path, scale_actions=False).write(40, std=5.0)
    assert "the policy became very random" not in findings(tmp_path)


def test_without_a_run_or_an_iteration_the_status_is_2(tmp_path):
    Writer(tmp_path / "new").write(0)
    status, out, _ = call("check", tmp_path / "new")
    assert status == 2
    assert "no complete iteration is logged yet" in out
    status, _, err = call("check", tmp_path / "typo")
    assert status == 2
    assert f"no TensorBoard files in {tmp_path / 'typo'}" in err
    Writer(tmp_path / "bad").write(30, kl=0.3)
    (tmp_path / "empty").mkdir()
    status, out, err = call("check", tmp_path / "empty", tmp_path / "bad")
    assert status == 1  # the one does not hide the other
    assert f"no TensorBoard files in {tmp_path / 'empty'}" in err


def test_a_log_without_any_known_tag_is_not_taken_for_a_healthy_run(tmp_path):
    with SummaryWriter(str(tmp_path / "other")) as writer:
        writer.add_scalar("rollout/ep_rew_mean", 20.0, 1000)
    Writer(tmp_path / "good").write(30)
    status, out, _ = call("check", tmp_path)
    assert status == 2
    assert "unreadable, ValueError: none of its tags is known: rollout/ep_rew_mean" in out
    assert "Nothing is wrong" in out


def test_watch_prints_each_finding_once_and_ends_with_the_run_and_the_status_of_check(tmp_path):
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


def test_a_run_that_begins_and_ends_between_two_looks_is_checked(tmp_path):
    """It had not ended before, though it is seen for the first time when it has."""
    live = Writer(tmp_path / "live", total_timesteps=12_000).write(10)
    command = [
        sys.executable,
        ROOT / "coach.py",
        "check",
        tmp_path,
        "--watch",
        "--every",
        "2",
        "--patience",
        "0.5",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watching:
        assert "live" in watching.stdout.readline()
        Writer(tmp_path / "new", total_timesteps=30_000).write(30, kl=0.3)
        assert "new" in watching.stdout.readline()
        live.write(2)
        out = watching.stdout.read()
    assert watching.returncode == 1
    assert "Not shown" not in out


def test_watch_ends_where_there_is_no_run(tmp_path):
    status, _, err = call("check", tmp_path / "typo", "--watch", "--wait", 0, "--every", 0.1)
    assert (status, err) == (2, "coach.py: there are no TensorBoard files\n")


def test_watch_ends_when_no_run_logs_anything_new(tmp_path):
    """Runs that had ended before are left out, and counted."""
    Writer(tmp_path / "old", total_timesteps=30_000).write(30, kl=0.3)
    Writer(tmp_path / "new").write(10)
    status, out, _ = call("check", tmp_path, "--watch", "--every", 0.1, "--patience", 0.05)
    assert status == 0
    assert "9,000 of 100,000 steps" in out
    assert "Not shown: 1 of 2 runs" in out
    assert "updates" not in out


def test_watch_with_stop_ends_at_the_first_problem(tmp_path):
    """Runs that had ended before are left out."""
    Writer(tmp_path / "old", total_timesteps=30_000).write(30, kl=0.3)
    Writer(tmp_path / "new").write(30, clipfrac=0.9)
    status, out, _ = call("check", tmp_path, "--watch", "--stop", "--every", 0.1)
    assert status == 1
    assert "nearly all samples are clipped" in out
    assert "at first" not in out
    assert "updates" not in out


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ({"mean": 60}, "QUESTION: an update was extremely large"),
        ({"mean": 20}, "QUESTION: an update was extremely large"),
        ({"mean": 12}, "WRONG: an update was far too large, and the return fell"),
        ({"mean": 20, "entropy": 0.01}, "WRONG: an update was far too large, and the policy collapsed"),
    ],
)
def test_one_large_update_is_wrong_only_if_it_did_harm(then, said, tmp_path):
    """Otherwise it is a question, also when it is over."""
    Writer(tmp_path).write(13, mean=20).write(1, mean=20, kl=1.2).write(40, **then)
    status, out, _ = call("check", tmp_path)
    assert status == (1 if "WRONG" in said else 0)
    assert said in out
    assert out.count("an update was") == 1


def test_a_return_that_is_not_a_number_is_that_of_no_episode(tmp_path):
    """Some programs log the mean of none."""
    writer = Writer(tmp_path).write(20, mean=20)
    writer.write(1, left_out=["charts/episodic_return"])
    writer.writer.add_scalar("charts/episodic_return", np.nan, writer.step)
    writer.write(30, mean=60)
    assert findings(tmp_path) == {}
    assert coach.read_run(tmp_path, coach.open_events(tmp_path)).numbers["gain"][-1] > 3


def test_a_question_is_asked_while_it_is_so(tmp_path):
    """Returns that were lower than at first for a while, and rose, need no answer."""
    writer = Writer(tmp_path).write(20, mean=20).write(15, mean=5)
    status, out, _ = call("check", tmp_path)
    assert status == 0
    assert "QUESTION: the return is lower than at first" in out
    assert "No verdict: answer the questions" in out
    writer.write(15, mean=60)
    status, out, _ = call("check", tmp_path)
    assert status == 0
    assert "QUESTION" not in out
    assert "Nothing is wrong" in out


LANGUAGE = {  # of one iteration of grpo.py or ppo_rlhf.py
    "policy/approxkl_avg": 0.01, "policy/clipfrac_avg": 0.05, "entropy": 0.5, "loss/policy_avg": -0.01,
    "grad_norm": 0.3, "frac_reward_zero_std": 0.4, "completions/clipped_ratio": 0.01, "objective/kl": 4.0,
    "completions/mean_length": 18.0, "val/explained_variance": 0.8,
    "sampling/sampling_logp_difference/mean": 3e-7,
}  # fmt: skip


@pytest.mark.parametrize(
    ("said", "rise", "changes"),
    [
        ("", 0.5, {}),
        ("the language model was extremely large", 0.5, {"policy/approxkl_avg": 1.5}),
        ("sampling and learning differ somewhat", 0.5, {"sampling/sampling_logp_difference/mean": 0.01}),
        ("not compute the same log-prob", 0.5, {"sampling/sampling_logp_difference/mean": 0.2}),
        ("most responses are cut off", 0.5, {"completions/clipped_ratio": 0.6}),
        ("far from the reference", 0.5, {"objective/kl": 40.0}),
        ("the critic of the language model predicts little", 0.5, {"val/explained_variance": 0.01}),
        ("the reward is hardly higher than at first", 0.0, {}),
        ("the reward is lower than at first", -0.4, {}),
        ("all groups of responses have equal rewards", 0.0, {"frac_reward_zero_std": 0.95}),
    ],
)
def test_problems_of_language_models_are_found(said, rise, changes, tmp_path):
    """Nothing is found in a healthy run, though it solves most groups at its end."""
    random = np.random.default_rng(0)
    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_text("settings", "|setting|value|\n|-|-|\n|total_episodes|12800.0|\n|batch_size|128|")
        for i in range(100):
            reward = random.normal(0.4 + rise * min(1, i / 50), 0.03)
            solved = {"frac_reward_zero_std": 0.95 if i > 60 else 0.4}
            for tag, value in (LANGUAGE | solved | {"reward": reward} | changes).items():
                writer.add_scalar(tag, value, 128 * i)
    found = " ".join(findings(tmp_path))
    assert said in found
    assert said or not found
    run = coach.read_run(tmp_path, coach.open_events(tmp_path))
    gain = run.numbers["reward_gain"]
    assert run.finished
    assert gain[-1] == pytest.approx(rise / 0.03, rel=0.4, abs=1.5)
    assert np.isnan(gain).tolist() == [True] * 14 + [False] * 86


def test_rules_need_fewer_iterations_in_short_runs(tmp_path):
    """A question of 20 iterations needs 10 in a run of 40, and 8 in a run of 12."""
    for total, said in ((40_000, 11), (12_000, 9), (200_000, 21)):
        Writer(tmp_path / str(total), total_timesteps=total).write(1).write(21, grad_norm=60)
        (step,) = findings(tmp_path / str(total)).values()
        assert step == 1000 * said


def test_what_is_wrong_stays_so_when_a_run_is_resumed_with_more_steps(tmp_path):
    """Its rules do not depend on the number of steps."""
    for total in (32_000, 232_000):
        writer = Writer(tmp_path / str(total), total_timesteps=total)
        writer.write(10).write(8, kl=0.2).write((total - writer.step) // 1000)
        assert call("check", tmp_path / str(total))[0] == 1
    Writer(tmp_path / "short", total_timesteps=32_000).write(5).write(10, clipfrac=0.5).write(17)
    assert call("check", tmp_path / "short")[0] == 0  # not for 20 iterations, which a longer run would need


# Plans


PLANS = {  # words: the script, and other parts of the plan
    "--env-id CartPole-v1 --total-timesteps 1e5 --gamma 0.9 --check-env": (
        "ppo.py",
        ["16 x 64 = 1,024", "about 98, for 100,000", "about 5,880 in all", "a horizon of 10 steps"],
    ),
    "--env-id Pendulum-v1 --adapt none": (
        "ppo_continuous.py",
        ["observations, rewards; not advantages", "note: scaled rewards take the place"],
    ),
    "--env-id=CartPole-v1 --script ppo_lstm --total-timesteps 10_000": (
        "ppo_lstm.py",
        ["16 x 128", "note: so few iterations"],
    ),
    "--env-id gpu_envs:Target --device cpu": ("ppo_gpu.py", ["2048 x 32"]),
    "--env-id gpu_envs:target --device cpu": ("ppo_gpu.py", ["2048 x 32"]),  # a function
    "--env-id memory_tasks:PositionOnlyCartPole-v1": ("ppo_lstm.py", ["16 x 128", "hints at a memory"]),
    "--env-id memory_tasks:PositionOnlyCartPole-v1 --script ppo": ("ppo.py", ["as --script says"]),
    "--env-id user_envs:Rescue-v0": ("ppo.py", []),  # no cue
    "--env-id user_envs:Walk": ("ppo.py", []),  # also a class, but one of Gymnasium
    '--env-id user_envs:Rescue-v0 --env-kwargs {"mask_velocity":true}': ("ppo_lstm.py", ["at a memory"]),
    "--env-id CartPole-v1 --cell gru": ("ppo_lstm.py", ["a flag of its memory"]),
    "--env-id user_envs:Pairs-v0": ("ppo.py", ["docs/recipes.md, 'Other actions'"]),
    '--env-id user_envs:Walk-v0 --env-kwargs {"observation":"mixed"}': (
        "ppo.py",
        ["'An image and a vector'"],
    ),
    "--script grpo --kl-coef 0.04": ("grpo.py", ["8 responses to each prompt", "β = 0.04"]),
    "--script ppo_rlhf": ("ppo_rlhf.py", ["240, for 61,440 responses"]),
}


@pytest.mark.parametrize("words", PLANS)
def test_a_plan_names_the_script_that_fits_its_sizes_and_the_command(words):
    script, texts = PLANS[words]
    status, out, err = call("plan", *words.split(), folder=ROOT / "tests")
    assert (status, err) == (0, "")
    assert re.search(rf"^script +{re.escape(script)}:", out, re.M)
    for text in texts:
        assert text in out
    (command,) = re.findall(r"^run: +python (.*)$", out, re.M)
    if "recipe" not in out:
        assert command.startswith(script)


@pytest.mark.parametrize(("script", "language"), [("ppo_gpu", False), ("grpo", True)])
def test_a_plan_shows_the_rules_that_will_judge_the_run_when_asked(script, language):
    plain, out = (call("plan", "--script", script, *more)[1] for more in ((), ("--rules",)))
    assert "WRONG" not in plain
    assert "WRONG: acting and learning do not compute the same policy: first_kl > 1e-4 (2)" in out
    assert ("QUESTION: the return is lower than at first: gain < -0.5 (10)" in out) != language
    assert ("token_kl > 1 (1)" in out) == language


REFUSED = {  # words, and parts of the reasons
    "--env-id CartPole-v1 --clip-coef 0.7 --no-norm-adv": ["clip range above 0.3", "not normalised"],
    "--env-id CartPole-v1 --num-envs 0": ["must be"],
    "--env-id user_envs:Pairs-v0 --num-minibatches 0": ["must be"],
    "--env-id CartPole-v1 --script ppo_continuous": ["Discrete(2)"],
    "--env-id CartPole-v1 --wings 2": ["--wings"],
    "--env-id Cartpole-v1": ["CartPole"],
    "--env-id ale_py:ALE/Pong-v5": ["ALE"],  # ppo_atari.py takes ALE/Pong-v5, and no other script should
    "--env-id user_envs:Global-v0 --check-env": ["AssertionError", "seed"],
    "--total-timesteps 1e5": ["--env-id"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_plan_is_refused_with_its_reasons_and_status_2(words, tmp_path, monkeypatch):
    status, out, err = call("plan", *words.split(), folder=tmp_path)
    assert (status, out) == (2, "")
    assert all(text in err for text in REFUSED[words])
    assert list(tmp_path.iterdir()) == []


# Documents


def test_the_names_and_sections_of_rules_are_in_the_documents():
    """Each name in a rule has a row in a table of docs/metrics.md, or is a setting."""
    rules = coach.RULES + coach.QUESTIONS
    assert {rule.section for rule in rules} <= set(re.findall(r"^#+ (.*)$", METRICS, re.M))
    table = METRICS.split("The names in the rules:")[1].split("\n\n")[1]
    explained = set(re.findall(r"^\| `(\w+)`", table, re.M))
    used = {name for rule in rules for name in coach.names_in(rule)}
    assert used == explained | {"update_epochs", "clip_coef", "gamma", "unnormalised_steps"}


def test_the_skill_is_in_the_format_of_skills():
    """It begins with its name, which is that of its folder, and a description of at most 1,024 characters."""
    _, front, _ = SKILL.read_text(encoding="utf-8").split("---\n", 2)
    fields = dict(line.split(": ", 1) for line in front.strip().split("\n"))
    assert fields["name"] == SKILL.parent.name == "ppo-trainer"
    assert len(fields["description"]) <= 1024


@pytest.mark.nightly
def test_the_commands_of_the_skill_run_one_after_another(tmp_path):
    """They run in a folder that has the scripts, and the run is healthy."""
    for package in ("matplotlib", "pandas", "moviepy"):
        pytest.importorskip(package)
    for name in ("coach.py", "ppo.py", "plot.py"):
        (tmp_path / name).symlink_to(ROOT / name)
    text = SKILL.read_text(encoding="utf-8")
    commands = [line for block in re.findall(r"```sh\n(.*?)```", text, re.S) for line in block.splitlines()]
    assert len(commands) == 5
    for command in commands:
        checkpoint = "".join(map(str, tmp_path.glob("runs/*/*.pt")))
        command = command.replace("runs/<run>/checkpoint.pt", checkpoint)
        command = command.replace("python", shlex.quote(sys.executable), 1)
        command = command.replace("--capture-video", "--capture-video --eval-episodes 1")
        command = command.replace("100_000", "40_000")  # enough to tell
        command = command.replace("--watch", "--watch --every 1")  # before the run has ended
        done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, command + done.stdout + done.stderr
    assert list(tmp_path.glob("runs/*/videos/*.mp4"))


# Runs of the scripts


BROKEN = [  # flags on CartPole, and the first problem
    pytest.param("", None, marks=pytest.mark.slow),
    pytest.param(
        "--learning-rate 1",
        "WRONG: an update was far too large, and the policy collapsed",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        "--ent-coef 10",
        "QUESTION: the policy is nearly as random as at first",
        marks=pytest.mark.nightly,
    ),
    pytest.param("--vf-coef 0", "QUESTION: the critic predicts little", marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("words", "problem"), BROKEN)
def test_check_names_the_problem_of_a_broken_run_and_none_of_a_healthy_one(words, problem, tmp_path):
    command = [sys.executable, ROOT / "ppo.py", "--total-timesteps", "20000", "--eval-episodes", "1"]
    command += words.split()
    done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
    (shown,) = re.findall(r"^check: +python (.*)$", done.stdout, re.M)  # its last line
    status, out, _ = call(*shlex.split(shown)[1:], folder=tmp_path)
    said = [kind + problem for kind, problem in re.findall("^(WRONG: |QUESTION: )(.*?) [(]", out, re.M)]
    said = [text for text in said if "Gymnasium" not in text]  # 20,000 steps do not solve CartPole
    assert status == (1 if problem and "WRONG" in problem else 0)
    assert problem in said if problem else not said


@pytest.mark.slow
def test_runs_of_the_page_are_read(tmp_path):
    """It logs its settings, and the same tags as ppo.py."""
    command = [sys.executable, ROOT / "ppo_minimal.py", "--total-timesteps", "20000", "--update-epochs", "31"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    status, out, _ = call("check", folder=tmp_path)
    assert status == 1
    assert re.findall("^WRONG: (.*?) [(]", out, re.M) == ["more than 30 epochs per rollout"]
    assert "20,480 of 20,000 steps, 20 iterations\n" in out
