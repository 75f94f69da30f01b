"""Tests of ppo_minimal.py: it learns what ppo.py learns, and CartPole."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import helpers
import pytest
import torch

import ppo
import ppo_minimal

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1"])  # ended by the task, and by a time limit
def test_the_page_and_the_script_learn_the_same_weights(env_id, tmp_path, monkeypatch):
    """From one seed, both meet the same episodes. Five iterations are 200 gradient steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ppo, "hash_seed", lambda *numbers: numbers[0])  # the page does not hash its seed
    args = ppo_minimal.Args(env_id, seed=3, total_timesteps=5 * 1024)
    settings = dataclasses.asdict(args) | {"norm_obs": False, "norm_rewards": False, "eval_episodes": 1}
    weights = ppo_minimal.train(args).state_dict()
    checkpoint = ppo.train(ppo.Args(**settings))["checkpoint"]
    others = torch.load(checkpoint, weights_only=True)["agent"]
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_page_learns_cartpole_and_logs_returns_lengths_and_losses(tmp_path):
    """CartPole's reward is 1 in each step, so returns are lengths. A random policy has about 20."""
    command = [sys.executable, ROOT / "ppo_minimal.py", "--total-timesteps", "30000"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("runs/*")
    logged = helpers.curves(folder)
    assert logged["charts/episodic_return"] == logged["charts/episodic_length"]
    steps = [*logged["charts/episodic_return"]]
    assert steps == [*range(1024, 31_000, 1024)]
    assert logged["charts/episodic_return"][steps[-1]] > 100
    for name in "policy_loss", "value_loss", "entropy", "approx_kl", "clipfrac", "explained_variance":
        assert [*logged[f"losses/{name}"]] == steps
