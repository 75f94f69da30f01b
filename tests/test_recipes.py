"""Tests of the recipes: their policies are right, and no transition is learnt twice or lost."""

import ast
import copy
import importlib
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import scripted_envs
import torch
from helpers import direct_gae, float64, normalized

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
    """Load a program by `recipe(name)`. What it replaces in the scripts is put back afterwards."""
    scripts = ppo, ppo_continuous, ppo_lstm
    before = [dict(vars(script)) for script in scripts]

    def load(name, program=None):
        (tmp_path / name).write_text(program or PROGRAMS[name], encoding="utf-8")
        return runpy.run_path(str(tmp_path / name), run_name="recipe")

    yield load
    for script, names in zip(scripts, before, strict=True):
        vars(script).clear()
        vars(script).update(names)


def names_set(tree, alias):
    """Return the names that a program sets in a script, which it imports as `alias`."""
    targets = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return {
        node.attr
        for node in targets
        if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == alias
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_replaces_only_what_its_script_has(name):
    """Otherwise, its function would never be called, and the script would train without it."""
    tree = ast.parse(PROGRAMS[name])
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    for script in (alias for alias in imports if (ROOT / f"{alias.name}.py").exists()):
        has = vars(importlib.import_module(script.name)).keys()
        assert names_set(tree, script.asname or script.name) <= has


@pytest.fixture
def pairs(recipe):
    """Return `check_policy`, the agent of `my_choices.py`, observations, actions, and forbidden ones."""
    check_policy, choices = recipe("my_policy_test.py")["check_policy"], recipe("my_choices.py")["CHOICES"]
    torch.manual_seed(1)
    env = gym.wrappers.FlattenObservation(ppo.make_env(ppo.Args()))
    env.reset(seed=1)
    obs = torch.from_numpy(np.stack([env.step(np.array([0, 0]))[0] for _ in range(8)])).float()
    agent = ppo.Agent(ppo.Args(), env.observation_space, int(env.action_space.n))
    for parameter in agent.actor.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    actions = torch.cartesian_prod(*map(torch.arange, choices.tolist()))
    allowed = obs[:, :8].reshape(8, 2, 4)
    forbidden = [(allowed[:, 0, first] == 0) | (allowed[:, 1, second] == 0) for first, second in actions]
    return check_policy, agent, obs, actions, torch.stack(forbidden)


def test_the_two_choices_of_an_action_are_independent_and_masked(pairs):
    """Probabilities, entropy, KL divergence and samples are those of all twelve actions."""
    check_policy, *given = pairs
    check_policy(*given)


def unmasked_to_learn(policy, agent, obs):
    free = obs.clone()
    free[:, :8] = 1
    return policy(agent, obs if torch.is_inference_mode_enabled() else free)


def sometimes_at_random(sample, policy):
    actions = sample(policy)
    chance = torch.rand(len(actions), generator=torch.Generator().manual_seed(1)) < 0.05
    return torch.where(chance.unsqueeze(-1), torch.zeros_like(actions), actions)


MISTAKES = {  # a function, and its replacement, whose first input is the function
    "the mask is of wrong columns": ("policy", lambda policy, agent, obs: policy(agent, obs.roll(1, -1))),
    "the mask is only used to act": ("policy", unmasked_to_learn),
    "log-probabilities are means over numbers": ("log_prob", lambda old, *inputs: old(*inputs) / 2),
    "a temperature is only used to act": ("sample", lambda sample, policy: sample(policy / 1.5)),
    "one of 20 actions is random": ("sample", sometimes_at_random),
    "each number is drawn from the policy of the other": (
        "sample",
        lambda sample, policy: sample(policy.roll(1, -2)),
    ),
    "the most likely actions are others": ("most_likely", lambda old, policy: (old(policy) + 1) % 3),
    "the entropy is half of it": ("entropy", lambda entropy, policy: entropy(policy) / 2),
    "the KL divergence is reversed": ("kl_divergence", lambda kl, old, new: kl(new, old)),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_check_policy_sees_mistakes_with_which_training_goes_on(mistake, pairs, monkeypatch):
    check_policy, agent, obs, actions, forbidden = pairs
    name, replacement = MISTAKES[mistake]
    owner = type(agent) if name == "policy" else ppo
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *inputs: replacement(function, *inputs))
    known = [forbidden] if mistake == "the mask is of wrong columns" else []
    with pytest.raises(AssertionError):
        check_policy(agent, obs, actions, *known)


def wider(sample, policy):
    means, log_stds = policy.chunk(2, -1)
    return sample(torch.cat([means, log_stds + 0.2], -1))


def wider_to_learn(policy, agent, obs):
    found = policy(agent, obs)
    return found if torch.is_inference_mode_enabled() else found + 0.2


DENSITY_MISTAKES = {  # likewise
    "log-probabilities are means over numbers": ("log_prob", lambda old, *inputs: old(*inputs) / 2),
    "log-probabilities lack a constant": ("log_prob", lambda old, *inputs: old(*inputs) + 0.1),
    "a wider policy is drawn from": ("sample", wider),
    "a wider policy is learnt": ("policy", wider_to_learn),
    "both numbers have the same noise": (
        "sample", lambda sample, policy: policy[..., :2] + policy[..., 2:].exp() * torch.randn(len(policy), 1)
    ),
    "one of 20 actions is 0": ("sample", sometimes_at_random),
    "the most likely actions are others": ("most_likely", lambda old, policy: old(policy).roll(1, -1)),
    "the entropy lacks a factor": ("entropy", lambda entropy, policy: entropy(policy) - np.log(2 * np.pi)),
    "the KL divergence is reversed": ("kl_divergence", lambda kl, old, new: kl(new, old)),
}  # fmt: skip


def two_actions():
    """Return an agent of `ppo_continuous.py`, whose actions are two numbers, and observations."""
    torch.manual_seed(1)
    agent = ppo_continuous.Agent(ppo_continuous.Args(), gym.spaces.Box(-1, 1, (6,)), 2)
    return agent, torch.randn(2, 6)


@pytest.mark.parametrize("name", ["the script's Gaussian", "my_squashed.py", "my_beta.py"])
def test_check_density_accepts_right_policies(name, recipe):
    check_density = recipe("my_policy_test.py")["check_density"]
    if name in PROGRAMS:
        recipe(name)
    check_density(*two_actions())


@pytest.mark.parametrize("mistake", DENSITY_MISTAKES)
def test_check_density_sees_mistakes_with_which_training_goes_on(mistake, recipe, monkeypatch):
    check_density = recipe("my_policy_test.py")["check_density"]
    name, replacement = DENSITY_MISTAKES[mistake]
    owner = ppo_continuous.Agent if name == "policy" else ppo_continuous
    function = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *inputs: replacement(function, *inputs))
    with pytest.raises(AssertionError):
        check_density(*two_actions())


def text_with(words: str) -> str:
    (text,) = (text for text in TEXTS if words in text)
    return text


@pytest.mark.slow
def test_check_policy_accepts_the_masks_of_taxi(recipe, tmp_path, monkeypatch):
    """The page's text for Taxi stands at the end of the program."""
    (tmp_path / "my_policy_test.py").write_text(PROGRAMS["my_policy_test.py"], encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_policy_test", raising=False)
    recipe("my_masks.py", PROGRAMS["my_masks.py"] + text_with("check_policy(agent"))


def test_of_eleven_torques_the_first_and_last_are_the_bounds_and_the_sixth_is_0(recipe):
    """The page's text for HalfCheetah replaces parts of the program."""
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


@pytest.mark.slow
def test_a_pruned_trial_ends_early_and_is_saved_and_the_next_one_trains(recipe, tmp_path, monkeypatch):
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
def test_agents_with_a_memory_act_as_they_learn(name, recipe):
    """Policies and values step by step are those of one pass through all steps, also from a first memory."""
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


def test_a_loaded_policy_with_a_memory_acts_by_the_means(recipe, tmp_path):
    """An action has the means of the learnt policy, here two. Each episode has a memory of its own."""
    recipe("my_memory.py")
    torch.manual_seed(1)
    env = scripted_envs.Still(gym.spaces.Discrete(2))  # the recipe's space of a `Box` of two numbers
    args = ppo_lstm.Args(hidden_size=8)
    agent = ppo_lstm.Agent(args, env.observation_space, 2)
    for parameter in agent.parameters():
        parameter.data += 0.5 * torch.randn(parameter.shape)
    torch.save({"args": vars(args), "agent": agent.state_dict()}, tmp_path / "checkpoint.pt")
    act = ppo_lstm.load_policy(tmp_path / "checkpoint.pt", env)
    obs, starts = torch.randn(12, 1, 2), torch.arange(12).unsqueeze(1) % 5 == 0
    with torch.no_grad():
        policies, _ = agent(agent.normalize(obs), starts, torch.zeros(2, 1, 8))
    actions = [act(obs[t, 0].numpy(), bool(starts[t, 0])) for t in range(12)]
    np.testing.assert_allclose(actions, policies[:, 0, :2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("settings", [{"scale_actions": False}, {"env_id": "unbounded"}])
def test_squashed_actions_without_scaled_bounds_are_refused(settings, recipe):
    """Otherwise, tanh would shrink the actions without a word."""
    recipe("my_squashed.py")
    args = ppo_continuous.Args(**settings)
    highest = np.inf if args.env_id == "unbounded" else 1
    with pytest.raises(ValueError, match="--scale-actions"):
        ppo_continuous.rescaler(gym.spaces.Box(-highest, highest, (2,)), args)


def test_the_second_stream_of_rewards_never_ends(recipe):
    """Its advantages are sums over all that follows in an environment, the episodes after included.

    Novelty is that of the states that steps led to, the last one of an episode included.
    """
    recipe("my_rnd.py")
    args = ppo.Args(env_id="user_envs:Walk-v0", num_envs=6, num_steps=11, norm_rewards=False)
    envs = ppo.make_envs(args, 1)
    torch.manual_seed(1)
    agent = ppo.Agent(args, envs.single_observation_space, 3)
    agent.obs_moments.update(2 + 3 * torch.randn(50, 3))
    before, rollout = copy.deepcopy(agent), ppo.Rollout(args, 3)
    rollout.current_obs, _ = envs.reset(seed=10)
    ppo.collect_rollout(envs, agent, rollout, args)
    first = copy.deepcopy(rollout)
    batch = ppo.make_batch(agent, rollout, *ppo.normalize_rollout(agent, rollout, args), args)
    ppo.collect_rollout(envs, agent, rollout, args)
    ended = first.terminated | first.truncated
    assert ended[:-1].any()
    assert ended[-1].any()
    assert not ended[-1].all()

    exact = copy.deepcopy(before).double()
    seen, led_to = (
        torch.from_numpy(normalized(before, x))
        for x in (np.concatenate([first.obs, rollout.obs[:1]]), first.next_obs)
    )
    values, novelty = float64(exact.curious_critic(seen).squeeze(-1)), float64(exact.novelty(led_to))
    never, gae = np.zeros_like(ended), (args.gamma, args.gae_lambda)
    curious = direct_gae(novelty / novelty.std(), values, never, never, *gae)
    task_values, next_values = float64(exact.value(seen[:-1])), float64(exact.value(led_to))
    task = direct_gae(first.rewards, task_values, first.terminated, first.truncated, *gae, next_values)
    returns = curious + values[:-1]
    np.testing.assert_allclose(batch.curious_returns, returns.flatten(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch.advantages, (task + curious).flatten(), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch.next_obs, led_to.flatten(0, 1), atol=1e-5)


class Leaves:
    """The first of two agents is done after two steps, with a reward of 5. The second has four steps."""

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
        terminated = {name: over[name] and name == "first" for name in present}
        truncated = {name: over[name] and name == "second" for name in present}
        return obs, rewards, terminated, truncated, {name: {} for name in present}


@pytest.fixture
def leaves(recipe):
    """Put teams whose first agent leaves into `my_agents.py`."""
    recipe("my_agents.py")["Team"].__init__.__globals__["Meeting"] = Leaves


def test_what_follows_when_an_agent_has_left_is_not_learnt_and_is_no_episode(leaves):
    """A team resets when all of its agents have left. Statistics leave out agents that have left, too."""
    args = ppo.Args(num_envs=4, num_steps=11)
    envs = ppo.make_envs(args, 1)
    torch.manual_seed(1)
    rollout, agent = ppo.Rollout(args, 1), ppo.Agent(args, envs.single_observation_space, 2)
    before = copy.deepcopy(agent)
    rollout.current_obs, _ = envs.reset(seed=1)
    episodes = ppo.collect_rollout(envs, agent, rollout, args)
    assert sorted(episodes) == [(4.0, 4)] * 4 + [(6.0, 2)] * 6
    batch = ppo.make_batch(agent, rollout, *ppo.normalize_rollout(agent, rollout, args), args)

    gamma, decay = args.gamma, args.gamma * args.gae_lambda
    value = [float64(before.value(torch.tensor([[float(time)]]))).item() for time in range(5)]
    kinds = {"first": ([1.0, 5.0], 0), "second": ([1.0] * 4, 1)}  # rewards; whether V(s) counts at the end
    rows, discounted = {}, []
    for start in (0, 4, 8):
        for name, (rewards, bootstraps) in kinds.items():
            steps = min(len(rewards), 11 - start)
            running = 0.0
            for time in range(steps):
                running = gamma * running + rewards[time]
                discounted += 2 * [running]  # two teams
                rows[start + time, name] = (start, time, steps, rewards, bootstraps)
    scale, expected_obs, expected = np.std(discounted), [], []
    for _, (_, time, steps, rewards, bootstraps) in sorted(rows.items()):
        advantage = 0.0
        for step in range(time, steps):
            counts = 1 if step + 1 < len(rewards) else bootstraps
            delta = rewards[step] / scale + gamma * counts * value[step + 1] - value[step]
            advantage += decay ** (step - time) * delta
        expected_obs.append(time)
        expected.append(advantage)
    # In each step, the agents of the first team come before those of the second.
    order = sorted((t, team, name, i) for i, (t, name) in enumerate(sorted(rows)) for team in range(2))
    chosen = [i for *_, i in order]
    np.testing.assert_allclose(batch.obs[:, 0], np.take(expected_obs, chosen), atol=1e-6)
    np.testing.assert_allclose(batch.advantages, np.take(expected, chosen), rtol=1e-4, atol=1e-5)
    for moments, numbers in (agent.obs_moments, np.repeat(expected_obs, 2)), (
        agent.return_moments, discounted
    ):  # fmt: skip
        assert moments.count == len(numbers) == 34
        np.testing.assert_allclose(moments.mean, np.mean(numbers), rtol=1e-5)
        np.testing.assert_allclose(moments.var, np.var(numbers), rtol=1e-5)


def test_a_run_counts_the_steps_of_agents_that_are_there(leaves, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = ppo.Args(num_envs=4, num_steps=11, total_timesteps=30, eval_episodes=1)
    results = ppo.train(args)
    assert ppo.load_checkpoint(results["checkpoint"])[1]["state"]["global_step"] == 34
    assert results["greedy_returns"].tolist() == [5.0]  # in four steps, means over two: 1, 3, 0.5 and 0.5
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
rows = slice(None) if count == 1 else slice(0, 30) if rank == 0 else slice(30, 60)
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
    """Each has half of a batch. The plain script learns from the whole batch."""
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
    for name in "grad_norm", "kl", "policy_loss", "value_loss", "first_approx_kl", "clipfrac":
        assert others[name] == pytest.approx(metrics[name], rel=1e-4)
