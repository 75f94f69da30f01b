"""What the recipes promise beyond running: their policies are right, and nothing is learnt twice or lost."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import ppo
import ppo_continuous
import ppo_lstm

ROOT = Path(__file__).resolve().parent.parent
PAGES = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/recipes*.md"))
PROGRAMS = {
    text.split()[1].rstrip(":"): text
    for text in re.findall(r"^```python\n(# .*?)^```", PAGES, re.DOTALL | re.MULTILINE)
}


TEXTS = re.findall(r"^```text\n(.*?)^```", PAGES, re.DOTALL | re.MULTILINE)  # parts of programs


@pytest.fixture
def recipe(tmp_path):
    """`recipe(name)` has what a program defines; what it replaces in the scripts is put back afterwards."""
    scripts = ppo, ppo_continuous, ppo_lstm
    before = [dict(vars(script)) for script in scripts]

    def load(name, program=None):
        (tmp_path / name).write_text(program or PROGRAMS[name], encoding="utf-8")
        return runpy.run_path(str(tmp_path / name), run_name="recipe")

    yield load
    for script, names in zip(scripts, before, strict=True):
        vars(script).clear()
        vars(script).update(names)


@pytest.fixture
def pairs(recipe):
    """`check_policy`, and what to give it: the agent of `my_choices.py`, masked observations, all actions."""
    check_policy, choices = recipe("my_policy_test.py")["check_policy"], recipe("my_choices.py")["CHOICES"]
    torch.manual_seed(1)
    env = gym.wrappers.FlattenObservation(ppo.make_env(ppo.Args()))
    env.reset(seed=1)
    obs = torch.from_numpy(np.stack([env.step(np.array([0, 0]))[0] for _ in range(8)])).float()
    agent = ppo.Agent(ppo.Args(), env.observation_space, int(env.action_space.n))
    for parameter in agent.actor.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return check_policy, agent, obs, torch.cartesian_prod(*map(torch.arange, choices.tolist()))


def test_choices_are_independent(pairs):
    """Masks are kept; probabilities, entropy, KL and what is drawn are those of all twelve actions."""
    check_policy, agent, obs, actions = pairs
    allowed = obs[:, :8].reshape(8, 2, 4)
    forbidden = [(allowed[:, 0, first] == 0) | (allowed[:, 1, second] == 0) for first, second in actions]
    check_policy(agent, obs, actions, torch.stack(forbidden))


MISTAKES = [
    "mask of wrong columns",
    "mask only to act",
    "mean over numbers",
    "temperature only to act",
    "at random in one of 20 steps",
    "another policy is returned",
    "half of the entropy",
    "KL the other way round",
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_test_of_a_policy_sees(mistake, pairs, monkeypatch):
    """Mistakes with which training goes on, and learns something else."""
    check_policy, agent, *given = pairs
    act, log_prob, entropy, kl = ppo.act, ppo.log_prob, ppo.entropy, ppo.kl_divergence
    policy = type(agent).policy

    def unmasked_to_learn(self, obs):
        free = obs.clone()
        free[:, :8] = 1
        return policy(self, obs if torch.is_inference_mode_enabled() else free)

    def sometimes_at_random(agent, obs, noise):
        policy, actions = act(agent, obs, noise)
        chance = np.random.default_rng(1).random(len(actions)) < 0.05
        return policy, np.where(chance[:, None], 0, actions)

    if mistake == "mask of wrong columns":
        allowed = given[0][:, :8].reshape(8, 2, 4)
        forbidden = [(allowed[:, 0, first] == 0) | (allowed[:, 1, second] == 0) for first, second in given[1]]
        given.append(torch.stack(forbidden))
        monkeypatch.setattr(type(agent), "policy", lambda self, obs: policy(self, obs.roll(1, -1)))
    if mistake == "mask only to act":
        monkeypatch.setattr(type(agent), "policy", unmasked_to_learn)
    if mistake == "mean over numbers":
        monkeypatch.setattr(ppo, "log_prob", lambda *inputs: log_prob(*inputs) / 2)
    if mistake == "temperature only to act":
        monkeypatch.setattr(ppo, "act", lambda agent, obs, noise: act(agent, obs, 1.5 * noise))
    if mistake == "at random in one of 20 steps":
        monkeypatch.setattr(ppo, "act", sometimes_at_random)
    if mistake == "another policy is returned":
        monkeypatch.setattr(ppo, "act", lambda *inputs: (act(*inputs)[0].roll(1), act(*inputs)[1]))
    if mistake == "half of the entropy":
        monkeypatch.setattr(ppo, "entropy", lambda policy: entropy(policy) / 2)
    if mistake == "KL the other way round":
        monkeypatch.setattr(ppo, "kl_divergence", lambda old, new: kl(new, old))
    with pytest.raises(AssertionError):
        check_policy(agent, *given)


def text_with(words: str) -> str:
    (text,) = (text for text in TEXTS if words in text)
    return text


@pytest.mark.parametrize("columns", ["as on the page", "another"])
def test_the_test_of_a_policy_sees_the_mask_of_taxi(columns, recipe, tmp_path, monkeypatch):
    """The text for Taxi, at the end of the program: it passes, and fails with a mask of other columns."""
    (tmp_path / "my_policy_test.py").write_text(PROGRAMS["my_policy_test.py"], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_policy_test", raising=False)
    program = PROGRAMS["my_masks.py"] + text_with("check_policy(agent")
    if columns == "as on the page":
        recipe("my_masks.py", program)
        return
    start = "obs[..., : logits.shape[-1]]"
    assert start in program
    with pytest.raises(AssertionError, match="the mask"):
        recipe("my_masks.py", program.replace(start, "obs[..., 1 : logits.shape[-1] + 1]"))


def test_torques_are_chosen(recipe):
    """The text for HalfCheetah: the first and the last choice are the bounds, the sixth is no torque."""
    pytest.importorskip("mujoco")
    program = PROGRAMS["my_choices.py"]
    start, end = program.index("class Pairs"), program.index("CHOICES =")
    choices, place = text_with("CHOICES = np.full"), text_with("HalfCheetah")
    program = program[:start] + choices + program[program.index("\n", end) :]
    env_line = re.search(r"^ppo.make_env = .*", program, re.MULTILINE)[0]
    recipe("my_choices.py", program.replace(env_line, place))
    chosen, plain = ppo.make_env(ppo.Args()), gym.make("HalfCheetah-v5")
    chosen.reset(seed=1)
    plain.reset(seed=1)
    pairs = ([0] * 6, [-1] * 6), ([10] * 6, [1] * 6), ([5, 5, 5, 6, 7, 8], [0, 0, 0, 0.2, 0.4, 0.6])
    for choice, torque in pairs:
        obs, *_ = chosen.step(np.array(choice))
        expected, *_ = plain.step(np.array(torque))
        np.testing.assert_allclose(obs["obs"], expected)
    agent = ppo.Agent(ppo.Args(), gym.spaces.flatten_space(chosen.observation_space), 11)
    assert agent.policy(torch.zeros(3, 66 + 17)).shape == (3, 6, 11)


def test_trials_are_pruned(recipe, tmp_path, monkeypatch):
    """A trial that the pruner stops ends early and is saved; the next one is not stopped with it."""
    optuna = pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    program, _, _ = PROGRAMS["my_sweep.py"].partition("pruner = ")
    made = recipe("my_sweep.py", program.replace("50_000", "10_000"))
    pruner = optuna.pruners.ThresholdPruner(lower=1e9, n_warmup_steps=2)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    study.optimize(made["objective"], n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["PRUNED", "PRUNED"]
    assert [len(trial.intermediate_values) for trial in study.trials] == [2, 2]
    assert len([*tmp_path.glob("runs/*/checkpoint.pt")]) == 2
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    study.optimize(made["objective"], n_trials=1)
    (trial,) = study.trials
    assert trial.state.name == "COMPLETE"
    assert trial.last_step > 2


@pytest.mark.parametrize("name", ["my_memory.py", "my_masked_memory.py", "my_window.py"])
def test_what_acts_with_a_memory_is_what_learns(name, recipe):
    """Step by step, the policies and values are those of one pass through all steps, also from a memory."""
    recipe(name)
    torch.manual_seed(1)
    args = ppo_lstm.Args(hidden_size=8)
    agent = ppo_lstm.Agent(args, gym.spaces.Box(-9, 9, (10,)), 4).eval()
    for parameter in agent.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    obs, starts = torch.randn(40, 3, 10), torch.rand(40, 3) < 0.1
    obs[..., :4] = torch.rand(40, 3, 4) < 0.5  # the mask of one of the recipes
    obs[..., 3] = 1
    starts[0] = torch.tensor([True, False, False])
    memory = first_memory = torch.randn(ppo_lstm.MEMORY_VECTORS[args.cell], 3, 8)
    with torch.no_grad():
        policies, values = agent(obs, starts, first_memory)
        for t in range(40):
            policy, value, memory = agent.step(obs[t], starts[t], memory)
            torch.testing.assert_close(policy, policies[t], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(value, values[t], rtol=1e-4, atol=1e-5)
    if name == "my_masked_memory.py":
        torch.testing.assert_close(policies.exp().sum(-1), torch.ones(40, 3))
        np.testing.assert_array_equal(policies.exp() > 1e-6, obs[..., :4] == 1)


@pytest.mark.parametrize("settings", [{"scale_actions": False}, {"env_id": "unbounded"}])
def test_tanh_needs_bounds(settings, recipe):
    """Where tanh would shrink the actions without a word, the settings are refused."""
    recipe("my_squashed.py")
    args = ppo_continuous.Args(**settings)
    highest = np.inf if args.env_id == "unbounded" else 1
    with pytest.raises(ValueError, match="--scale-actions"):
        ppo_continuous.rescaler(gym.spaces.Box(-highest, highest, (2,)), args)


class Leaves:
    """Of two agents, the first leaves after two steps, with a reward of 5; the second stays for four."""

    possible_agents, render_mode = ["first", "second"], None

    def observation_space(self, agent):
        return gym.spaces.Box(-9, 9, (1,), np.float32)

    def action_space(self, agent):
        return gym.spaces.Discrete(2)

    def report(self):
        return {name: np.float32([self.time]) for name in self.agents}

    def reset(self, seed=None, options=None):
        self.agents, self.time = [*self.possible_agents], 0
        return self.report(), {}

    def step(self, actions):
        assert actions.keys() == {*self.agents}
        self.time += 1
        obs, present = self.report(), self.agents
        over = {"first": self.time == 2, "second": self.time == 4}
        rewards = {name: 5.0 if name == "first" and over[name] else 1.0 for name in present}
        self.agents = [name for name in present if not over[name]]
        no = dict.fromkeys(present, False)
        return obs, rewards, {name: over[name] for name in present}, no, {name: {} for name in present}


def test_agents_that_leave(recipe):
    """What follows is not learnt from, and is no episode; their team resets when all have left."""
    made = recipe("my_agents.py")
    made["Team"].__init__.__globals__["Meeting"] = Leaves
    args = ppo.Args(num_envs=4, num_steps=11)
    envs = ppo.make_envs(args, 1)
    rollout, agent = ppo.Rollout(args, 1, 2), ppo.Agent(args, envs.single_observation_space, 2)
    rollout.obs[-1], _ = envs.reset(seed=1)
    episodes = ppo.collect_rollout(envs, agent, rollout, args)
    assert sorted(episodes) == [(4.0, 4)] * 4 + [(6.0, 2)] * 4
    first, second = rollout.valid[:, 0], rollout.valid[:, 1]
    assert first.tolist() == [True, True, False, False, False] * 2 + [True]
    assert second.tolist() == [True, True, True, True, False] * 2 + [True]
    assert rollout.obs[:5, 1, 0].tolist() == [0, 1, 2, 3, 4]
    assert rollout.obs[5, :, 0].tolist() == [0, 0, 0, 0]
    with pytest.raises(ValueError, match="multiple of 2"):
        ppo.make_envs(ppo.Args(num_envs=3), 1)


# Two processes


CHECK = """
import os, runpy, torch
import ppo_continuous as ppo
rank, count = 0, 1
if "RANK" in os.environ:
    made = runpy.run_path("my_processes.py", run_name="recipe")
    rank, count = made["RANK"], made["COUNT"]
args = ppo.Args(num_minibatches=1, update_epochs=5, norm_adv=False)
torch.manual_seed(0)
agent = ppo.Agent(args, ppo.gym.spaces.Box(-9, 9, (3,)), 2)
for parameter in agent.parameters():
    parameter.data += 0.1 * torch.randn(parameter.shape)
obs, actions, noise = torch.randn(60, 3), torch.randn(60, 2), 0.1 * torch.randn(60, 4)
old = agent.policy(obs).detach() + noise
rest, parts = [torch.randn(60) for _ in range(4)], torch.tensor([[[5.0]], [[6.0]]]) + torch.randn(2, 60, 3)
rows = slice(None) if count == 1 else slice(0, 23) if rank == 0 else slice(23, 60)
batch = ppo.Batch(*(column[rows] for column in (obs, actions, old, *rest)))
state = ppo.State(1e-3, 0.2, 1.0, 0.0)
optimizer = torch.optim.Adam(agent.parameters(), 1e-3, eps=1e-5)
metrics = ppo.update(agent, optimizer, ppo.compute_gradients, batch, args, state, lambda: batch)
for part in parts:
    agent.obs_moments.update(part[rows])
state.global_step += len(batch.obs)
if rank == 0:
    torch.save((agent.state_dict(), metrics, state.global_step), f"{count}.pt")
"""


@pytest.mark.slow
def test_two_processes_learn_like_one(tmp_path):
    """Parts of a batch, of 23 and 37 transitions: all is as the plain script has it with the whole batch."""
    (tmp_path / "my_processes.py").write_text(PROGRAMS["my_processes.py"], encoding="utf-8")
    (tmp_path / "check.py").write_text(CHECK, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command in [sys.executable], torchrun:
        done = subprocess.run(
            [*command, "check.py"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
    (one, metrics, steps), (two, others, sum_of_steps) = (torch.load(tmp_path / f"{n}.pt") for n in (1, 2))
    assert steps == sum_of_steps == 60
    for name in one:
        torch.testing.assert_close(two[name], one[name], rtol=1e-5, atol=1e-6, msg=name)
    for name in "grad_norm", "kl", "policy_loss", "value_loss", "first_approx_kl", "clipfrac", "std":
        assert others[name] == pytest.approx(metrics[name], rel=1e-4)
