"""Learning: probes that isolate one thing to learn and have a known answer, and tasks that are solved."""

import numpy as np
import pytest
import torch
from cli_helpers import CONTINUOUS, PPO, each_script

GAMMA = 0.8
PLAIN = {"num_envs": 16, "num_steps": 13, "hidden_size": 32, "learning_rate": 1e-2, "update_epochs": 4}
PLAIN |= {"num_minibatches": 2, "anneal_lr": False, "adapt": "none", "norm_rewards": False, "norm_obs": False}
PLAIN |= {"norm_adv": True, "ent_coef": 0.0, "vf_coef": 0.5, "gamma": GAMMA, "eval_episodes": 1}


def learn(script, pays, length=1, iterations=40, truncates=False, **settings):
    """Train on a probe. Returns values [length, 2], policy, and states with a cue of -1 and 1."""
    kwargs = f"pays='{pays}', length={length}, truncates={truncates}"
    changed = {"env_id": script.env("Probe"), "env_kwargs": kwargs, "total_timesteps": 13 * 16 * iterations}
    args = script.args(**{**PLAIN, **changed, **settings})
    path = script.module.train(args)["checkpoint"]
    envs = script.module.make_envs(args)
    agent = script.module.Agent(args, envs.single_observation_space, envs.single_action_space)
    agent.load_state_dict(torch.load(path, weights_only=True)["agent"])
    states = np.array([[[cue, *np.eye(length)[t]] for cue in (-1, 1)] for t in range(length)], np.float32)
    with torch.no_grad():
        values = agent.value(agent.normalize(torch.tensor(states)))
    return values.numpy(), script.module.load_policy(path), states


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


SUMS = [[sum(GAMMA**i for i in range(5 - step))] * 2 for step in range(5)]
VALUES = {  # what pays, the episodes, and the values of their states with a cue of -1 and 1
    "a constant": (("always", 1), {}, [[1, 1]]),
    "the observation": (("cue", 1), {}, [[-1, 1]]),
    "an end": (("always", 5), {}, SUMS),
    "a time limit": (("always", 5), {"truncates": True, "iterations": 80}, [[1 / (1 - GAMMA)] * 2] * 5),
}


@pytest.mark.slow
@each_script
@pytest.mark.parametrize("name", VALUES)
def test_values(script, name):
    """The critic learns them: from what is seen, discounted, up to an end, and beyond a time limit."""
    (pays, length), settings, expected = VALUES[name]
    values, _, _ = learn(script, pays, length, **settings)
    assert values == pytest.approx(np.array(expected), abs=0.25)


VARIANTS = {
    "clip": {},
    "a later reward": {"pays": "late", "length": 3},
    "kl-penalty": {"surrogate": "kl-penalty", "adapt": "kl-coef"},
    "adapt clip-coef": {"adapt": "clip-coef"},
    "adapt learning-rate": {"adapt": "learning-rate"},
    "A2C": {"update_epochs": 1, "num_minibatches": 1},
    "normalised": {"norm_rewards": True, "norm_obs": True, "norm_adv": False},
    "target-kl and clip-vloss": {"target_kl": 0.03, "clip_vloss": True},
}


@pytest.mark.slow
@each_script
@pytest.mark.parametrize("name", VARIANTS)
def test_actions(script, name):
    """Each variant learns to act as the cue says: action 6, or above 1, where it is 1, and else not."""
    settings = {"pays": "match", **VARIANTS[name]}
    _, policy, states = learn(script, **settings)
    middle = 5.5 if script is PPO else 1
    assert (np.ravel(policy(states[0])) > middle).tolist() == [False, True]
    torch.manual_seed(1)
    samples = np.ravel(policy(np.repeat(states[0], 500, 0), sample=True)) > middle
    assert samples[:500].mean() < 0.1
    assert samples[500:].mean() > 0.9


SOLVED = {  # script, environment, steps: the return that the policy must have
    (PPO, "CartPole-v1", 60_000): 450,
    (CONTINUOUS, "Pendulum-v1", 100_000): -400,
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("case", SOLVED, ids=lambda case: case[1])
def test_tasks_are_solved(case, seed):
    """By the default settings, in a short run."""
    script, env_id, steps = case
    results = script.module.train(script.module.Args(env_id=env_id, total_timesteps=steps, seed=seed))
    assert results["greedy_returns"].mean() >= SOLVED[case]
