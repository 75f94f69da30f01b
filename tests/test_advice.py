"""Advice: every condition is raised by a run that is broken for it, and none by healthy runs."""

from __future__ import annotations

import dataclasses
import math

import gymnasium as gym
import pytest
import torch

import ppo

HEALTHY = {
    "losses/policy_loss": -0.01, "losses/value_loss": 0.5, "losses/entropy": 0.6,
    "losses/old_approx_kl": 0.005, "losses/approx_kl": 0.005, "losses/clipfrac": 0.1,
    "losses/grad_norm": 40.0, "losses/kl": 0.006,
    "losses/explained_variance": 0.5, "losses/relative_error": 0.3, "losses/policy_mismatch": 1e-7,
}  # fmt: skip
CLEANRL = {
    "num_envs": 4, "num_steps": 128, "learning_rate": 2.5e-4, "gae_lambda": 0.95, "update_epochs": 4,
    "norm_obs": False, "norm_rewards": False, "clip_vloss": True,
}  # fmt: skip

UNBOUNDED = {  # nothing holds the policy near the old one
    "surrogate": "kl-penalty", "kl_coef": 0.0, "learning_rate": 0.005, "anneal_lr": False, "ent_coef": 0.1,
    "total_timesteps": 15_000,
}  # fmt: skip


class Bait(gym.Env):
    """Action 1 pays 1 at once and costs 3 at the end of the episode: with γ = 0, a policy takes the bait."""

    observation_space = gym.spaces.Discrete(6)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.time, self.debt = 0, 0
        return 0, {}

    def step(self, action):
        self.time += 1
        self.debt += 3 * int(action)
        last = self.time == 5
        return self.time, float(action) - last * self.debt, last, False, {}


gym.register("Bait-v0", Bait)


def run(monkeypatch, tmp_path, capsys, **settings):
    """Train in an empty folder; return the names of all advice that began, in order."""
    monkeypatch.chdir(tmp_path)
    ppo.train(ppo.Args(**{"eval_episodes": 1, "eval_max_steps": 500, **settings}))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[")]
    return [line[1 : line.index("]")] for line in lines if "is over" not in line]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("kl_watch", UNBOUNDED),
        ("kl_act", UNBOUNDED),
        ("drift", {"clip_coef": 0.01, "learning_rate": 0.02, "total_timesteps": 30_000}),
        ("idle", {"learning_rate": 1e-8, "total_timesteps": 60_000}),
        ("critic", {"vf_coef": 0.0, "total_timesteps": 40_000}),
        ("collapse", {"env_id": "Bait-v0", "gamma": 0.0, "ent_coef": 0.0, "total_timesteps": 20_000}),
    ],
)
def test_a_broken_run_is_told_so(monkeypatch, tmp_path, capsys, name, settings):
    """A run with one thing wrong raises the advice for that."""
    assert name in run(monkeypatch, tmp_path, capsys, **settings)


def test_a_policy_that_differs_between_acting_and_learning_is_noticed(monkeypatch, tmp_path, capsys):
    """Acting with a slightly different policy from the one that is learnt raises `mismatch` in every run."""
    original = ppo.Agent.act

    def stale(self, obs, noise=None):
        return original(self, obs + 0.05, noise)

    monkeypatch.setattr(ppo.Agent, "act", stale)
    assert "mismatch" in run(monkeypatch, tmp_path, capsys, total_timesteps=10_000)


@pytest.mark.parametrize(
    "settings",
    [
        {"env_id": "CartPole-v1", "total_timesteps": 100_000},
        {"env_id": "CartPole-v1", "total_timesteps": 60_000, **CLEANRL},
        {"env_id": "MountainCar-v0", "total_timesteps": 60_000},
        {"env_id": "Acrobot-v1", "total_timesteps": 60_000},
        {"env_id": "LunarLander-v3", "total_timesteps": 40_000},
        {"env_id": "FrozenLake-v1", "total_timesteps": 60_000},
        {"env_id": "Taxi-v4" if "Taxi-v4" in ppo.gym.registry else "Taxi-v3", "total_timesteps": 60_000},
        {"env_id": "CliffWalking-v1", "total_timesteps": 60_000},
    ],
    ids=lambda settings: settings["env_id"] + ("-cleanrl" if "num_envs" in settings else ""),
)
def test_a_healthy_run_is_left_in_peace(monkeypatch, tmp_path, capsys, settings):
    """No advice at the defaults, nor at CleanRL's settings, where each minibatch's gradient is clipped."""
    if settings["env_id"] == "LunarLander-v3":
        pytest.importorskip("Box2D")
    assert run(monkeypatch, tmp_path, capsys, **settings) == []


def figures(**changed):
    """The figures of a healthy iteration, but for some."""
    return {**HEALTHY, **{f"losses/{name}": value for name, value in changed.items()}}


def new_state(step=0, **changed):
    """A state at some step of training."""
    return ppo.State(1e-3, 0.2, 1.0, 0.01, global_step=step, **changed)


@pytest.mark.parametrize(
    ("name", "changed", "step"),
    [
        ("kl_watch", {"kl": 0.06}, 0),
        ("kl_act", {"kl": 0.11}, 0),
        ("drift", {"clipfrac": 0.41}, 0),
        ("idle", {"clipfrac": 0.0, "kl": 1e-7}, 0),
        ("critic", {"explained_variance": -0.1}, 200_000),
        ("collapse", {"entropy": 0.04}, 0),
        ("mismatch", {"policy_mismatch": 2e-4}, 0),
    ],
)
def test_each_condition_begins_once_and_ends_once(name, changed, step):
    """It begins after its number of iterations in a row, ends after as many without, and is silent else."""
    args, state = ppo.Args(), new_state(step, start_return=20.0)
    held = next(count for condition, count in ppo.ADVICE.items() if condition.__name__ == name)
    bad = figures(**changed) | {"charts/episodic_return_100": 10.0}
    said = [ppo.diagnose(bad, state, args) for _ in range(held + 30)]
    about = [[text for text in messages if text.startswith(f"[{name}]")] for messages in said]
    assert [len(messages) for messages in about] == [0] * (held - 1) + [1] + [0] * 30
    assert "--" in about[held - 1][0], "the message must name a flag to change"
    assert name in state.active
    good = figures() | {"charts/episodic_return_100": 30.0}
    said = [ppo.diagnose(good, state, args) for _ in range(held + 30)]
    about = [[text for text in messages if text.startswith(f"[{name}]")] for messages in said]
    assert [len(messages) for messages in about] == [0] * (held - 1) + [1] + [0] * 30
    assert "is over" in about[held - 1][0]
    assert state.active == []


@pytest.mark.parametrize(
    ("changed", "step", "returns", "args"),
    [
        ({"kl": 0.049, "clipfrac": 0.39}, 0, 10.0, {}),
        ({"clipfrac": 0.0, "kl": 1e-7}, 300_000, 10.0, {}),  # the learning rate is annealed away
        (
            {"clipfrac": 0.0, "kl": 1e-7},
            0,
            10.0,
            {"update_epochs": 1, "num_minibatches": 1},
        ),  # A2C never clips
        ({"clipfrac": 0.0, "kl": 2e-6}, 0, 10.0, {}),
        ({"explained_variance": -5.0}, 10_000, 10.0, {}),  # the critic has only begun
        ({"explained_variance": -5.0, "relative_error": 0.01}, 200_000, 10.0, {}),  # returns hardly vary
        ({"explained_variance": math.nan}, 200_000, 10.0, {}),  # returns do not vary at all
        ({"entropy": 0.01}, 0, 21.0, {}),  # a deterministic policy that is better than at the start
        ({"policy_mismatch": 0.9e-4}, 0, 10.0, {}),
        ({"grad_norm": 1e4}, 0, 10.0, {}),
    ],
)
def test_nothing_is_said_on_the_safe_side_of_each_threshold(changed, step, returns, args):
    """What looks like trouble but is not raises no advice, however long it lasts."""
    state = new_state(step, start_return=20.0)
    values = figures(**changed) | {"charts/episodic_return_100": returns}
    assert not any(ppo.diagnose(values, state, ppo.Args(**args)) for _ in range(100))


def test_advice_that_flickers_is_said_once():
    """A condition that holds two iterations in three neither begins again nor ends."""
    args, state = ppo.Args(), new_state()
    said = []
    for iteration in range(300):
        said += ppo.diagnose(figures(kl=0.07 if iteration % 10 else 0.04), state, args)
    assert len(said) == 1


@pytest.mark.parametrize("name", ["policy_loss", "value_loss", "entropy", "approx_kl", "grad_norm", "kl"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_figures_that_are_not_finite_stop_training(name, value):
    """A loss, gradient or KL that is NaN or infinite raises TrainingFailed."""
    with pytest.raises(ppo.TrainingFailed, match="not finite"):
        ppo.diagnose(figures(**{name: value}), new_state(), ppo.Args())


def test_a_run_whose_loss_explodes_keeps_its_last_good_checkpoint(monkeypatch, tmp_path, capsys):
    """When the networks turn to NaN, what is on disk is from before."""
    monkeypatch.chdir(tmp_path)
    original = ppo.ppo_loss

    def explode(policy, values, batch, state, args):
        loss, values_ = original(policy, values, batch, state, args)
        return (loss * math.nan if state.global_step > 5_000 else loss), values_

    monkeypatch.setattr(ppo, "ppo_loss", explode)
    with pytest.raises(ppo.TrainingFailed, match="not finite"):
        ppo.train(ppo.Args(total_timesteps=20_000, checkpoint_seconds=1e-9))
    content = torch.load(next(tmp_path.glob("runs/*/checkpoint.pt")), weights_only=True)
    assert 5_000 < content["state"]["global_step"] < 8_000
    assert all(value.isfinite().all() for value in content["agent"].values())
    assert "--resume" in capsys.readouterr().err


def test_the_plan_names_every_condition_and_writes_nothing(monkeypatch, tmp_path, capsys):
    """--plan prints sizes, gradient steps, schedules, objective and all advice, and leaves no trace."""
    monkeypatch.chdir(tmp_path)
    assert ppo.train(ppo.Args(plan=True, num_envs=8, num_steps=128, total_timesteps=102_400)) == {}
    text = capsys.readouterr().out
    steps = ppo.Args.update_epochs * ppo.Args.num_minibatches
    assert "8 environments x 128 steps = 1,024 rows, x 100" in text
    assert f"{steps} gradient steps, {100 * steps:,} in all" in text
    assert f"learning_rate {ppo.Args.learning_rate}" in text
    for condition, held in ppo.ADVICE.items():
        assert condition.__doc__ in text, condition.__name__
        assert f"{held:>2} iterations" in text
    assert list(tmp_path.iterdir()) == []


def test_advice_survives_a_resume():
    """What has begun is in the state that a checkpoint keeps, so a resumed run does not say it again."""
    args, state = ppo.Args(), new_state()
    for _ in range(5):
        ppo.diagnose(figures(kl=0.2), state, args)
    restored = ppo.State(**dataclasses.asdict(state))
    assert restored.active == ["kl_act", "kl_watch"]
    assert ppo.diagnose(figures(kl=0.2), restored, args) == []
