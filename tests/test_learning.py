"""Each variant learns probes that have a known answer, and the defaults solve tasks."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import CONTINUOUS, DISCRETE, each_script, load

GAMMA = 0.8
PLAIN = {"num_envs": 16, "num_steps": 13, "hidden_size": 32, "learning_rate": 1e-2, "update_epochs": 4}
PLAIN |= {"num_minibatches": 2, "anneal_lr": False, "adapt": "none", "norm_rewards": False, "norm_obs": False}
PLAIN |= {"norm_adv": True, "ent_coef": 0.0, "vf_coef": 0.5, "gamma": GAMMA, "eval_episodes": 1}


def learn(case, pays, length=1, iterations=40, truncates=False, **settings):
    """Train on a probe. Return the agent, and its states [length, 2, 1 + length] with a cue of -1 and 1."""
    env_id = case.walk.replace("Walk", "Probe")
    kwargs = json.dumps({"pays": pays, "length": length, "truncates": truncates})
    changed = {"env_id": env_id, "env_kwargs": kwargs, "total_timesteps": 13 * 16 * iterations}
    args = replace(case.script.Args(), **PLAIN | changed | settings)
    path = case.script.train(args)["checkpoint"]
    envs = case.script.make_envs(args, 1)
    agent = case.script.Agent(args, envs.single_observation_space, case.count(envs.single_action_space))
    agent.load_state_dict(load(path)["agent"])
    states = np.array([[[cue, *np.eye(length)[t]] for cue in (-1, 1)] for t in range(length)], np.float32)
    return agent, agent.normalize(torch.tensor(states))


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


SUMS = [[sum(GAMMA**i for i in range(5 - step))] * 2 for step in range(5)]
VALUES = {  # the reward, the episodes, and the values of their states with a cue of -1 and 1
    "a constant": (("always", 1), {}, [[1, 1]]),
    "the observation": (("cue", 1), {}, [[-1, 1]]),
    "an end": (("always", 5), {}, SUMS),
    "a time limit": (("always", 5), {"truncates": True, "iterations": 80}, [[1 / (1 - GAMMA)] * 2] * 5),
}


@pytest.mark.slow
@each_script
@pytest.mark.parametrize("name", VALUES)
def test_the_critic_learns_discounted_values_up_to_an_end_and_beyond_a_time_limit(case, name):
    (pays, length), settings, expected = VALUES[name]
    agent, states = learn(case, pays, length, **settings)
    assert agent.value(states).detach().numpy() == pytest.approx(np.array(expected), abs=0.25)


VARIANTS = {
    "clip": {},
    "a later reward": {"pays": "late", "length": 3},
    "kl-penalty": {"surrogate": "kl-penalty", "adapt": "kl-coef"},
    "adapt clip-coef": {"adapt": "clip-coef"},
    "adapt learning-rate": {"adapt": "learning-rate"},
    "A2C": {"update_epochs": 1, "num_minibatches": 1},
    "normalised": {"norm_rewards": True, "norm_obs": True},
    "only rewards scaled": {"norm_rewards": True, "norm_adv": False},
    "target-kl and clip-vloss": {"target_kl": 0.03, "clip_vloss": True},
}


CASES = [(DISCRETE, name) for name in VARIANTS if name != "only rewards scaled"]
CASES += [(CONTINUOUS, name) for name in VARIANTS]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "name"), CASES, ids=str)
def test_each_variant_learns_to_act_as_the_cue_says(case, name):
    """It takes action 1, or one above the middle, if the cue is 1."""
    agent, states = learn(case, **{"pays": "match", **VARIANTS[name]})
    torch.manual_seed(1)
    with torch.no_grad():
        actions = case.distribution(agent.policy(states[0])).sample((500,))
    high = actions.reshape(500, 2) > (0.5 if case is DISCRETE else 0)
    assert high[:, 0].float().mean() < 0.1
    assert high[:, 1].float().mean() > 0.9


SOLVED = [  # case, environment, steps, and the return that the policy must have
    pytest.param(DISCRETE, "CartPole-v1", 60_000, 450, marks=pytest.mark.slow),
    pytest.param(CONTINUOUS, "Pendulum-v1", 100_000, -400, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("case", "env_id", "steps", "wanted"), SOLVED, ids=str)
def test_the_default_settings_solve_a_task_in_a_short_run(case, env_id, steps, wanted):
    results = case.script.train(case.script.Args(env_id=env_id, total_timesteps=steps))
    assert results["greedy_returns"].mean() >= wanted
