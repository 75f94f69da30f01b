"""Tests of ppo_gpu.py: environments, rollouts, updates, CUDA graphs, runs and several processes."""

import contextlib
import copy
import importlib.util
import io
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import gpu_envs
import graph_emulator
import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
from helpers import checkpoint_in, curves, flags, load, same, weights
from torch.distributions import Independent, Normal, kl_divergence
from torch.optim import Adam

import playground_tasks
import ppo_gpu as ppo

CASE = SimpleNamespace(script=ppo, file="ppo_gpu.py")
SMALL = {"num_envs": 16, "num_steps": 8, "num_minibatches": 4, "update_epochs": 2}
SMALL |= {"hidden_sizes": (16, 16)}
SMALL |= {"device": "cpu", "total_timesteps": 8 * 16 * 8}
SCRIPTED = "gpu_envs:Scripted"
TRAINED = 16 * 8 * 45  # transitions of the run `trained`, in which some pendulums finish a whole episode


def make_args(**changes):
    return ppo.Args(**SMALL | {"env_id": "gpu_envs:Target"} | changes)


def make_agent(args, sizes=(4, 3, 2), seed=0):
    """Return an agent whose policy depends on the observation, and whose statistics are not a new one's."""
    torch.manual_seed(seed)
    agent = ppo.Agent(args, *sizes)
    with torch.no_grad():
        for parameter in agent.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    agent.obs_moments.update(0.5 + 2 * torch.randn(50, sizes[0]))
    agent.return_moments.update(1 + 3 * torch.randn(50, 1))
    return agent


def make_batch(agent, rollout, args):
    return ppo.make_batch(agent, rollout, *ppo.normalize_rollout(agent, rollout, args), args)


def call(folder, *words, **settings):
    """Call the script. A setting may be several words."""
    given = [
        word for name, x in settings.items() if isinstance(x, tuple) for word in (*flags(**{name: ""}), *x)
    ]
    single = {name: x for name, x in settings.items() if not isinstance(x, tuple)}
    return helpers.call(CASE, folder, *(str(word).rstrip("=") for word in given), *flags(**single), *words)


def run(folder, *words, **settings):
    """Call the script with small settings. It must succeed. Return its output and its checkpoint."""
    folder.mkdir(exist_ok=True, parents=True)
    done = call(folder, *words, **{"env_id": "gpu_envs:Target"} | SMALL | settings)
    assert (done.status, done.err) == (0, ""), done.err
    return done.out, checkpoint_in(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Run the script on the pendulums. Return its folder, its output, and the path of its checkpoint."""
    folder = tmp_path_factory.mktemp("gpu")
    printed, path = run(folder, env_id="Pendulum", total_timesteps=TRAINED)
    return SimpleNamespace(folder=folder, printed=printed, path=path)


# Environments


def test_pendulums_step_end_and_start_as_gymnasiums():
    """Observations, rewards and time limits agree for 1,000 steps, and first states in distribution."""
    envs = ppo.Pendulums(make_args(num_envs=3)).double()
    envs.reset()
    theirs = [gym.make("Pendulum-v1") for _ in range(3)]
    rng, ends = np.random.default_rng(0), 0
    for env in theirs:
        env.reset()
    for _ in range(1000):
        actions = rng.uniform(-1.5, 1.5, (3, 1)).astype(np.float32)
        states = torch.stack([envs.angle, envs.speed]).numpy()
        obs, rewards, terminated, truncated, next_obs = envs.step(torch.from_numpy(actions).double())
        assert not terminated.any()
        for n, env in enumerate(theirs):
            env.unwrapped.state = states[:, n]  # the same again, as errors of rounding grow near the top
            their_obs, their_reward, _, their_end, _ = env.step(2 * actions[n])
            np.testing.assert_allclose(next_obs[n], their_obs, atol=1e-5)
            assert rewards[n].item() == pytest.approx(their_reward, abs=1e-5)
            assert truncated[n] == their_end
            assert torch.equal(obs[n], next_obs[n]) != their_end
            if their_end:
                env.reset()
                ends += 1
    assert ends == 3 * 5
    many = ppo.Pendulums(make_args(num_envs=20_000))
    many.reset()
    for values, bound in ((many.angle, np.pi), (many.speed, 1)):
        assert values.abs().max() <= bound
        assert values.std().item() == pytest.approx(bound / np.sqrt(3), rel=0.02)
        assert values.mean().item() == pytest.approx(0, abs=0.03 * bound)


WRONG = {
    "another_shape": r"rewards must be .*\[16\] .* not .*\[16, 1\]",
    "Moved": "step changes steps, .* in its place, or recordable = False",
    "CountsInPython": "step changes count",
    "DrawsFromNumpy": "step changes np.random",
    "HiddenState": "step changes drift, which is not in state_dict",
    "CopiesItsSteps": "steps must be a tensor to write to",
    "KeepsItsSteps": "reset must set steps to 0",
    "PreviousAction": "step changes last, which is not in state_dict",
    "CopiesItsState": "state_dict must not return copies",
    "ResetsToAnotherShape": r"what reset_where returns must be .*\[16, 2\]",
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_environments_are_refused_before_training(name, tmp_path):
    """The command line says why in one sentence, with exit status 2 and without a folder of a run."""
    done = call(tmp_path, **SMALL, env_id=f"gpu_envs:{name}")
    assert (done.status, done.out, list(tmp_path.iterdir())) == (2, "", [])
    assert re.fullmatch(f"ppo_gpu.py: gpu_envs:{name}:? .*{WRONG[name]}.*\n", done.err)
    args = make_args(env_id=f"gpu_envs:{name}")
    with pytest.raises(ValueError, match=WRONG[name]):  # of a program, which gives the environments
        ppo.train(args, getattr(gpu_envs, name)(args))


def test_env_kwargs_are_arguments_of_a_class(tmp_path):
    """A wrong one is Python's own error."""
    words = "--env-kwargs", '{"scale": 3}'
    args = make_args(env_id="gpu_envs:Configured", env_kwargs=words[1])
    assert ppo.make_envs(args).scale == 3
    _, path = run(tmp_path / "a", *words, env_id="gpu_envs:Configured")
    assert load(path)["args"]["env_kwargs"] == words[1]
    more = {"env_id": "gpu_envs:Configured", "device": "cpu", "env_kwargs": '{"scale": 4}'}
    said = call(tmp_path, "--evaluate", path, **more).out
    assert "with other --env-kwargs, these are still the checkpoint's: steps, obs, scale" in said
    done = call(tmp_path, "--env-kwargs", '{"scales": 3}', **SMALL, env_id="gpu_envs:Configured")
    assert done.status == 1
    assert "unexpected keyword argument 'scales'" in done.err


def test_the_seed_decides_what_environments_draw_when_they_are_made():
    masses = []
    for seed in (3, 3, 4):
        torch.rand(5), np.random.default_rng().random()
        masses.append(torch.stack(ppo.make_envs(make_args(env_id="gpu_envs:RandomMasses", seed=seed)).masses))
    assert torch.equal(masses[0], masses[1])
    assert (masses[0] != masses[2]).any(1).all()


@pytest.mark.parametrize("name", ["Curriculum", "ReplacesItsLevel"])
def test_a_curriculum_is_evaluated_and_resumed_at_the_level_of_the_checkpoint(name, tmp_path, monkeypatch):
    """Steps of the check and of evaluations do not raise the level. The number of environments may change."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id=f"gpu_envs:{name}", total_timesteps=8 * 16 * 6)
    results = ppo.train(args)
    path = results["checkpoint"]
    level = load(path)["state"]["buffers"]["level"].item()
    assert level == pytest.approx(6 * 8 * 0.01)
    assert ppo.evaluate(path, args, ppo.make_envs(args)) == pytest.approx(results["greedy_returns"])
    more = replace(args, resume=path, num_envs=32, total_timesteps=args.total_timesteps + 1)
    ppo.train(more)
    assert load(path)["state"]["buffers"]["level"].item() == pytest.approx(level + 8 * 0.01)


def test_a_run_is_named_after_the_environments_that_a_program_gives(tmp_path, monkeypatch):
    """So the command line does not resume or evaluate it in other environments."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="Pendulum")
    path = ppo.train(args, gpu_envs.Target(args))["checkpoint"]
    assert "Target" in path
    assert load(path)["args"]["env_id"] == "Target"


def test_a_run_stops_before_it_saves_statistics_that_are_not_finite(tmp_path, monkeypatch):
    """A huge observation is clipped for the networks, but spoils the statistics."""
    monkeypatch.chdir(tmp_path)
    args = make_args(keep_every=1.0)
    envs = gpu_envs.Changed(args, 0, lambda obs: torch.where(obs > 0, 1e20, obs), after=20)
    with pytest.raises(FloatingPointError, match=r"obs is 1\.0+\d*e\+20 in step \d"):
        ppo.train(args, envs)
    kept = [*tmp_path.glob("runs/*/at_*/checkpoint.pt")]
    assert sorted(load(path)["state"]["global_step"] for path in kept) == [128, 2 * 128]
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert all(x.isfinite().all() for x in load(path)["agent"].values())


def test_an_error_in_an_environment_keeps_its_traceback(tmp_path):
    done = call(tmp_path, env_id="gpu_envs:has_a_bug", **SMALL)
    assert done.status == 1
    assert "in has_a_bug" in done.err


def test_a_warning_is_printed_once_if_next_obs_is_of_the_next_episode(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = make_args()
    right = gpu_envs.Changed(args, 4, lambda x: x + 1), gpu_envs.Still(args)
    for envs, count in ((gpu_envs.Target(args), 1), *((envs, 0) for envs in right)):
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            ppo.train(args, envs)
        assert said.getvalue().count("next_obs is what the next step acts on") == count


def test_ctrl_c_ends_an_evaluation_at_once_without_a_result(trained, monkeypatch):
    monkeypatch.setattr(ppo.STOP, "is_set", lambda: True)
    args = make_args(env_id="Pendulum")
    envs = ppo.make_envs(args)
    monkeypatch.setattr(envs, "step", lambda actions: 1 / 0)
    assert len(ppo.evaluate(trained.path, args, envs)) == 0


def test_a_simulation_that_diverges_and_terminates_ends_its_episode_with_reward_0(tmp_path, monkeypatch):
    """Training and evaluation go on, and the share of such steps is logged."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="Diverges")
    path = Path(ppo.train(args, gpu_envs.Diverges(args))["checkpoint"])
    logged = curves(path.parent)
    assert sum(logged["env/diverged"].values()) * 8 * 16 == pytest.approx(9)  # of 1 + 64 steps
    # The first episode is not logged. All others are of 7 steps, the last of which gives nothing.
    assert {*logged["charts/episodic_return"].values()} == {6}
    envs = gpu_envs.Diverges(args)
    envs.max_steps = 20
    assert ppo.evaluate(path, args, envs).tolist() == [20, 6, *[20] * 14]


def test_a_simulation_that_diverges_without_a_word_starts_anew_and_the_others_go_on(tmp_path, monkeypatch):
    """If the environments can reset some. Its reward is 0 there, the share is logged, and it is said once."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="gpu_envs:Explodes", total_timesteps=128 * 6)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        path = Path(ppo.train(args, ppo.make_envs(args))["checkpoint"])
    assert said.getvalue().count("a simulation diverged, and a new episode started there") == 1
    logged = curves(path.parent)
    assert 0 < np.mean([*logged["env/diverged"].values()]) < 0.3
    assert all(np.isfinite([*values.values()]).all() for values in logged.values())
    rollout, _ = collect(gpu_envs.Explodes(args), args, 3)
    exploded = rollout.next_obs[..., 1].isinf()
    assert exploded.any()
    assert torch.equal(rollout.terminated, exploded)
    assert (rollout.rewards[exploded & ~rollout.truncated] == 0).all()
    assert (rollout.obs[1:][exploded[:-1]][:, 1] == 0).all()  # it has started anew
    assert rollout.obs.isfinite().all()
    said = io.StringIO()
    monkeypatch.setattr(ppo, "most_likely", ppo.sample)  # the most likely actions are not so strong
    with contextlib.redirect_stdout(said):
        assert ppo.evaluate(path, args, gpu_envs.Explodes(args)).shape == (16,)
    assert re.search(r"means of its steps: diverged 0\.\d", said.getvalue())


def test_an_error_names_the_environment_and_the_number_that_is_not_finite(tmp_path, monkeypatch):
    """Where all numbers of the environments are finite, the error says so."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="Diverges")
    with pytest.raises(FloatingPointError, match="reward is nan in step 5 of the rollout, in environment 1"):
        ppo.train(args, gpu_envs.Diverges(args, says_so=False))


def test_the_environments_log_is_averaged_over_an_iteration_without_nan(tmp_path):
    """An environment may log one number, a number of each environment, and NaN where it has none."""
    _, path = run(tmp_path, env_id="gpu_envs:Logs")
    logged = curves(path.parent)
    assert [*logged["env/step"].values()] == [8 * i + 4.5 for i in range(8)]
    assert {*logged["env/reward/number"].values()} == {7.5}
    assert {*logged["env/success"].values()} == {1}


def test_the_mean_return_is_not_that_of_the_last_environments(tmp_path):
    """Returns of environments differ by their number. In an iteration, far more than 100 episodes end."""
    _, path = run(tmp_path, env_id="gpu_envs:Terrain", num_envs=1000, total_timesteps=8 * 1000 * 3)
    returns = load(path)["state"]["returns"]
    assert len(returns) == 100
    assert np.mean(returns) == pytest.approx(5 * 0.4995, abs=0.8)
    assert np.std(returns) == pytest.approx(5 / np.sqrt(12), abs=0.4)
    logged = curves(path.parent)
    assert logged["charts/episodic_return"][16_000] == pytest.approx(5 * 0.4995, abs=0.05)


def test_the_seconds_of_collecting_and_of_learning_are_logged(trained):
    logged = curves(trained.path.parent, left_out=())
    for name in ("collecting", "learning"):
        seconds = logged[f"charts/seconds_{name}"]
        assert len(seconds) == 45
        assert min(seconds.values()) > 0


def test_physics_is_computed_with_the_precision_that_the_program_has(tmp_path, monkeypatch):
    """Only the networks may use TF32, and the setting is as before after training."""
    monkeypatch.chdir(tmp_path)
    value, networks = ppo.Agent.value, set()

    def watched(agent, obs):
        networks.add(torch.get_float32_matmul_precision())
        return value(agent, obs)

    monkeypatch.setattr(ppo.Agent, "value", watched)
    args = make_args()
    ppo.train(args, gpu_envs.Precise(args))
    assert gpu_envs.Precise.seen == {torch.get_float32_matmul_precision()} == {"highest"}
    assert networks == {"high"}


def test_training_takes_one_thread_of_a_cpu(tmp_path):
    """More only wait for each other, with small networks."""
    run(tmp_path / "a", num_threads=2)
    assert torch.get_num_threads() == 2
    run(tmp_path / "b")
    assert torch.get_num_threads() == 1


def test_the_share_of_clipped_rewards_and_the_policys_deviation_are_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = make_args(gamma=0.0)
    envs = gpu_envs.Changed(args, 1, lambda x: torch.where(torch.rand_like(x) < 0.005, -1e3, x))
    logged = curves(Path(ppo.train(args, envs)["checkpoint"]).parent)
    assert 0 < np.mean([*logged["losses/reward_clipfrac"].values()]) < 0.03
    assert logged["losses/std"][128] == pytest.approx(np.exp(-0.5))


# Networks


@pytest.mark.parametrize(("sizes", "name"), [((8, 5, 3), "tanh"), ((7,), "relu"), ((), "silu")])
def test_networks_have_the_hidden_layers_and_the_activation_that_were_asked_for(sizes, name, tmp_path):
    """A trained policy is loaded with them. Without a hidden layer, it is linear."""
    _, path = run(tmp_path, activation=name, hidden_sizes=sizes)
    policy = ppo.load_policy(path)
    layers = [layer for layer in policy.agent.actor if hasattr(layer, "weight")]
    assert [layer.out_features for layer in layers] == [*sizes, 1]
    x = obs = torch.randn(6, 1)
    mean, std = policy.agent.obs_moments.mean, policy.agent.obs_moments.var.sqrt()
    x = (x - mean) / std
    for layer in layers[:-1]:
        x = getattr(torch.nn.functional, name)(layer(x)) if name != "tanh" else layer(x).tanh()
    torch.testing.assert_close(policy(obs), layers[-1](x))


def test_a_number_that_was_constant_may_begin_to_change():
    """A command, say: its deviation was 0 so far. Changes of 0.05 are neither clipped nor lost."""
    agent = ppo.Agent(make_args(), 2, 2, 1)
    agent.obs_moments.update(torch.stack([torch.randn(500), torch.full((500,), 3.0)], -1))
    seen = agent.normalize(torch.tensor([[0.0, 3.05], [0.0, 2.99]]))[:, 1]
    assert seen.tolist() == pytest.approx([5, -1], rel=1e-3)


def test_observations_and_rewards_may_be_learnt_from_as_they_are(tmp_path):
    """Value targets are then sums of raw rewards, and a run cannot be resumed otherwise."""
    args = make_args(norm_obs=False, norm_rewards=False, gamma=0.0)
    agent = ppo.Agent(args, 4, 3, 2)
    rollout = random_rollout(args, agent)
    batch = make_batch(agent, rollout, args)
    assert torch.equal(batch.obs, rollout.obs.flatten(0, 1))
    torch.testing.assert_close(batch.returns, rollout.rewards.flatten())
    words = "--no-norm-obs", "--no-norm-rewards"
    more = {"env_id": "gpu_envs:Target", "total_timesteps": 1e4}
    _, path = run(tmp_path, *words)
    assert "losses/reward_clipfrac" not in curves(path.parent)
    for word in words:
        done = call(tmp_path, "--resume", path, word.replace("no-", ""), device="cpu", **more)
        assert done.status == 2
        assert f"{word.replace('no-', '')} must be as in" in done.err
    done = call(tmp_path, "--resume", path, "--activation=tanh", *words, device="cpu", **more)
    assert done.status == 2
    assert "--activation must be as in" in done.err


def test_a_run_starts_from_the_networks_and_normalisers_of_another(trained, tmp_path):
    """Its optimizer, steps and returns are new."""
    settings = {"env_id": "Pendulum", "learning_rate": 0, "total_timesteps": 128}
    _, path = run(tmp_path, "--init", trained.path, **settings)
    old, new = load(trained.path), load(path)
    for name, x in old["agent"].items():
        assert torch.equal(x, new["agent"][name]) or "moments" in name, name
    assert new["agent"]["obs_moments.count"] == TRAINED + 128
    assert new["state"]["global_step"] == 128
    assert {slots["step"].item() for slots in new["optimizer"]["state"].values()} == {2 * 4}


def test_a_policy_of_version_0_2_is_loaded(trained, tmp_path):
    """It had one width for two hidden layers."""
    content = load(trained.path)
    del content["args"]["hidden_sizes"], content["args"]["activation"]
    content["args"]["hidden_size"] = 16
    torch.save(content, tmp_path / "checkpoint.pt")
    obs = torch.randn(5, 3)
    assert torch.equal(ppo.load_policy(tmp_path)(obs), ppo.load_policy(trained.path)(obs))


# Rollout and batch


def collect(envs, args, seed=0):
    """Return a rollout of these environments, and what they log."""
    agent = make_agent(args, (envs.obs_size, envs.actor_obs_size, envs.action_size), seed)
    with torch.no_grad():
        return ppo.collect_rollout(
            envs, partial(choose, agent), envs.reset().clone(), torch.zeros(3, args.num_envs), args
        )


@torch.no_grad()
def choose(agent, obs):
    """Return actions, and the policy that they are drawn from."""
    policies = agent.policy(agent.normalize(obs))
    return ppo.sample(policies), policies


def random_rollout(args, agent, seed=0):
    """Return random rows, with ends of all kinds in all steps, and NaN for the state after a terminal one."""
    torch.manual_seed(seed)
    shape = args.num_steps, args.num_envs
    obs, next_obs = 1 + 2 * torch.randn(2, *shape, agent.obs_moments.mean.numel())
    actions, policies = choose(agent, obs)
    terminated, truncated = torch.rand(2, *shape) < 0.15
    next_obs[terminated] = torch.nan
    rewards = 0.3 + torch.randn(shape)
    sums = torch.randn(3, *shape)
    return ppo.Rollout(obs, next_obs, actions, policies, rewards, terminated, truncated, *sums)


def test_the_actor_sees_the_first_numbers_of_an_observation_and_the_critic_all():
    agent = make_agent(make_args())
    obs = torch.randn(5, 4)
    changed = obs + torch.tensor([0, 0, 0, 1.0])
    assert torch.equal(agent.policy(obs), agent.policy(changed))
    assert not torch.equal(agent.policy(obs), agent.policy(obs + torch.tensor([0, 0, 1.0, 0])))
    assert (agent.value(obs) != agent.value(changed)).all()


def replay(n, episode, steps, actions):
    """Return rows of one `Scripted` environment, and the sums of its episodes, with γ = 0.9."""
    rows, sums, discounted, total, step, action = [], [], 0.0, np.nan, 0, 0.0
    for t in range(steps):
        obs = gpu_envs.Scripted.observe(n, episode, step, action)
        step, action = step + 1, float(actions[t])
        reward = gpu_envs.Scripted.reward(n, episode, step)
        terminated, truncated = gpu_envs.Scripted.ends(n, episode, step)
        next_obs = gpu_envs.Scripted.observe(n, episode, step, action)
        discounted, total = 0.9 * discounted + reward, total + reward
        rows.append((obs, reward, terminated, truncated, next_obs))
        sums.append((discounted, total, step))
        if terminated or truncated:
            episode, step, discounted, total, action = episode + 1, 0, 0.0, 0.0, 0.0
    return rows, sums


def test_rollouts_hold_each_step_of_the_environments_and_samples_of_the_policy():
    """Rows of several rollouts follow the script, with ends in all places.

    So do discounted returns, returns and lengths. Returns of first episodes are NaN.
    """
    args = make_args(env_id=SCRIPTED, num_envs=7, num_steps=5, gamma=0.9)
    agent, envs = make_agent(args), gpu_envs.Scripted(args)
    obs, sums = envs.reset().clone(), torch.zeros(3, 7)
    sums[1] = torch.nan
    rollouts, noise = [], []
    for _ in range(8):
        with torch.no_grad():
            rollout, _ = ppo.collect_rollout(envs, partial(choose, agent), obs, sums, args)
            policy = agent.policy(agent.normalize(rollout.obs))
        torch.testing.assert_close(rollout.policies, policy)
        means, log_stds = policy.chunk(2, -1)
        noise.append((rollout.actions - means) / log_stds.exp())
        rollouts.append(rollout)
    noise = torch.stack(noise)
    assert abs(noise.mean()) < 0.15
    assert abs(noise.std() - 1) < 0.1
    joined = ppo.Rollout(*(torch.cat(column) for column in zip(*rollouts, strict=True)))
    kinds = set()
    for n in range(7):
        rows, sums = replay(n, 1, 40, joined.actions[:, n, 0])
        obs, rewards, terminated, truncated, next_obs = map(np.array, zip(*rows, strict=True))
        np.testing.assert_allclose(joined.obs[:, n], obs, rtol=1e-6)
        np.testing.assert_allclose(joined.rewards[:, n], rewards, rtol=1e-5)
        np.testing.assert_array_equal(joined.terminated[:, n], terminated)
        np.testing.assert_array_equal(joined.truncated[:, n], truncated)
        np.testing.assert_allclose(joined.next_obs[:, n][~terminated], next_obs[~terminated], rtol=1e-6)
        results = joined.discounted_returns, joined.episode_returns, joined.episode_lengths
        for column, expected in zip(results, np.transpose(sums), strict=True):
            np.testing.assert_allclose(column[:, n], expected, rtol=1e-5)
        ends = zip(terminated, truncated, np.arange(40) % 5, strict=True)
        kinds |= {(a, b, step in (0, 4)) for a, b, step in ends if a or b}
    # terminated, truncated, both; in the first or last step of a rollout, and elsewhere
    assert len(kinds) == 6


def test_a_batch_has_exact_rewards_advantages_returns_and_observations():
    """Two batches and the statistics agree with NumPy in float64.

    A batch has all rows, observations are normalised as they were when acting, and no result is NaN.
    """
    args = make_args(num_envs=6, num_steps=9, gamma=0.9, gae_lambda=0.8)
    agent = make_agent(args)
    moments = agent.return_moments
    mean, std, count = moments.mean.item(), moments.var.sqrt().item(), int(moments.count)
    seen = [mean - std, mean + std] * (count // 2)  # other numbers with the same moments
    for seed in range(2):
        before, rollout = copy.deepcopy(agent), random_rollout(args, agent, seed)
        batch = make_batch(agent, rollout, args)
        assert all(column.isfinite().all() for column in batch)
        rewards = rollout.rewards.double().numpy()
        seen += rollout.discounted_returns.flatten().tolist()
        scaled = np.clip(rewards / np.sqrt(np.var(seen) + 1e-8), -10, 10)
        with torch.no_grad():
            obs = before.normalize(rollout.obs)
            values, next_values = before.value(obs), before.value(before.normalize(rollout.next_obs))
        ends = rollout.terminated.numpy(), rollout.truncated.numpy()
        advantages = helpers.direct_gae(scaled, values.numpy(), *ends, 0.9, 0.8, next_values.numpy())
        np.testing.assert_allclose(batch.advantages, advantages.flatten(), rtol=1e-3, atol=1e-4)
        returns = (advantages + values.numpy()).flatten()
        np.testing.assert_allclose(batch.returns, returns, rtol=1e-3, atol=1e-4)
        assert torch.equal(batch.obs, obs.flatten(0, 1))
        assert torch.equal(batch.actions, rollout.actions.flatten(0, 1))
        assert torch.equal(batch.old_policy, rollout.policies.flatten(0, 1))
        np.testing.assert_allclose(batch.old_values, values.flatten(), rtol=1e-5)
        assert agent.obs_moments.count == 50 + (seed + 1) * 54
    assert moments.var.item() == pytest.approx(np.var(seen), rel=1e-4)


# Update


def reference_update(agent, batch, orders, args, rate):
    """Take K epochs with torch.distributions and gradients clipped by hand. Return gradient norms and KLs."""
    optimizer, norms, kls = Adam(agent.parameters(), rate, eps=1e-5), [], []
    for order in orders:
        for rows in np.array_split(order.numpy(), args.num_minibatches):
            obs, actions, old, old_values, advantages, returns, _ = (column[rows] for column in batch)
            advantages = (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
            mean, log_std = agent.policy(obs).chunk(2, -1)
            normal = Independent(Normal(mean, log_std.exp()), 1)
            old_mean, old_log_std = old.chunk(2, -1)
            old_normal = Independent(Normal(old_mean, old_log_std.exp()), 1)
            ratio = (normal.log_prob(actions) - old_normal.log_prob(actions)).exp()
            low, high = 1 - args.clip_coef, 1 + args.clip_coef
            worse = torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low)) * advantages
            values = agent.value(obs)
            value_losses = (values - returns) ** 2
            if args.clip_vloss:
                near = torch.maximum(
                    torch.minimum(values, old_values + args.clip_coef), old_values - args.clip_coef
                )
                value_losses = torch.maximum(value_losses, (near - returns) ** 2)
            value_loss = value_losses.mean() / 2
            kls.append(kl_divergence(old_normal, normal).mean().item())
            loss = args.vf_coef * value_loss - worse.mean() - args.ent_coef * normal.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.cat([x.grad.flatten() for x in agent.parameters()]).norm().item())
            for x in agent.parameters():
                x.grad *= min(1, args.max_grad_norm / (norms[-1] + 1e-6))
            optimizer.step()
    return norms, kls


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip_coef": 0.02, "ent_coef": 0.1, "vf_coef": 2.0},
        {"clip_coef": 0.02, "clip_vloss": True},
        {"max_grad_norm": 0.1, "num_minibatches": 5},
    ],
)
def test_an_update_equals_an_independent_implementation(changes):
    """Weights agree after all epochs in float64, on batches with ratios that are clipped."""
    args = make_args(num_envs=8, num_steps=9, learning_rate=3e-3, **changes)
    agent = make_agent(args)
    batch = make_batch(agent, random_rollout(args, agent), args)
    batch = ppo.Batch(*(column.double() for column in batch))
    agent.double()
    other = copy.deepcopy(agent)
    optimizer = Adam(agent.parameters(), torch.tensor(args.learning_rate), eps=1e-5, fused=True)
    orders = torch.stack([torch.randperm(72), torch.randperm(72)])
    metrics = ppo.update(agent, optimizer, ppo.compute_gradients, batch, orders, args)
    norms, kls = reference_update(other, batch, orders, args, args.learning_rate)
    torch.testing.assert_close(weights(agent), weights(other), rtol=1e-7, atol=1e-9)
    assert metrics["grad_norm"] == pytest.approx(np.mean(norms))
    assert metrics["clipfrac"] > 0.05 or args.clip_coef > 0.1
    assert metrics["kl"] == pytest.approx(kls[-1], rel=1e-4)
    errors = batch.returns - batch.old_values
    assert metrics["explained_variance"] == pytest.approx(1 - (errors.var() / batch.returns.var()).item())


def test_each_epoch_learns_from_every_row_once_in_another_order(tmp_path, monkeypatch):
    """The learning rate decays linearly to 0 at the end of training."""
    update, seen = ppo.update, []
    monkeypatch.setattr(ppo, "update", lambda *x: seen.extend(x[4].clone()) or update(*x))
    _, path = run(tmp_path, learning_rate=0.01)
    assert len(seen) == 8 * 2
    assert all(torch.equal(order.sort().values, torch.arange(128)) for order in seen)
    assert len({tuple(order.tolist()) for order in seen}) == 16
    rates = [*curves(path.parent)["charts/learning_rate"].values()]
    assert rates == pytest.approx([0.01 * (1 - i / 8) for i in range(8)])


def test_groups_of_parameters_keep_their_ratio_to_the_learning_rate(tmp_path, monkeypatch):
    """Also where it is adapted, and after a resume."""
    adam = ppo.Adam

    def two_groups(parameters, lr, **settings):
        first, *rest = parameters
        return adam([{"params": rest}, {"params": [first], "lr": lr / 10}], lr, **settings)

    monkeypatch.setattr(ppo, "Adam", two_groups)
    for i, words in enumerate([(), ("--desired-kl", "0.02"), ("--no-anneal-lr",)]):
        _, path = run(tmp_path / str(i), *words)
        assert (
            call(
                tmp_path, "--resume", path, total_timesteps=1280, device="cpu", env_id="gpu_envs:Target"
            ).status
            == 0
        )
        one, other = (group["lr"].item() for group in load(path)["optimizer"]["param_groups"])
        assert other == pytest.approx(one / 10)
        assert words != ("--no-anneal-lr",) or one == pytest.approx(1e-3)


def test_a_head_that_the_loss_does_not_use_gets_no_step_in_several_processes(monkeypatch):
    """As with one process, where PyTorch leaves it as it is."""
    monkeypatch.setattr(ppo, "PROCESSES", 2)
    monkeypatch.setattr(ppo, "average", lambda x: x)
    args = make_args()
    agent = make_agent(args)
    agent.head = torch.nn.Linear(3, 3)
    batch = make_batch(agent, random_rollout(args, agent), args)
    ppo.compute_gradients(agent, batch, args)
    assert agent.head.weight.grad is None
    assert agent.actor[0].weight.grad.abs().sum() > 0


def test_if_all_returns_are_equal_no_explained_variance_is_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = make_args(gamma=0.0, norm_rewards=False)
    envs = gpu_envs.Changed(args, 1, torch.ones_like)
    logged = curves(Path(ppo.train(args, envs)["checkpoint"]).parent)
    assert not {"losses/explained_variance", "losses/critic_error"} & logged.keys()
    assert all(np.isfinite([*values.values()]).all() for values in logged.values())


def test_desired_kl_adapts_the_learning_rate_before_each_gradient_step_but_the_first(tmp_path, monkeypatch):
    """The rate follows RSL-RL's rule and limits."""
    compute, found = ppo.compute_gradients, []

    def watched(agent, *given):
        metrics = compute(agent, *given)
        found.append(metrics["kl"].item())
        return metrics

    monkeypatch.setattr(ppo, "compute_gradients", watched)
    settings = {"update_epochs": 10, "total_timesteps": 10 * 128, "learning_rate": 3e-3, "ent_coef": 0.3}
    _, path = run(tmp_path / "a", desired_kl=0.02, **settings)
    rate, rates = 3e-3, []
    for i, kl in enumerate(found):
        kl = 0.02 if i % 40 == 0 else kl
        rate = rate / 1.5 if kl > 0.04 else rate * 1.5 if kl < 0.01 else rate
        rate = min(max(rate, 1e-5), 1e-2)
        rates.append(rate)
    logged = curves(path.parent)["charts/learning_rate"]
    assert [*logged.values()] == pytest.approx(np.reshape(rates, (-1, 40)).mean(1), rel=1e-4)
    assert min(rates) < 3e-3 < max(rates)
    assert load(path)["optimizer"]["param_groups"][0]["lr"].item() == pytest.approx(rates[-1], rel=1e-4)


def test_a_resumed_run_goes_on_with_the_adapted_learning_rate_unless_a_flag_gives_one(tmp_path):
    settings = {"env_id": "gpu_envs:Target", "device": "cpu"}
    _, path = run(tmp_path, desired_kl=0.02, learning_rate=1e-5)
    last = load(path)["optimizer"]["param_groups"][0]["lr"].item()
    assert last > 1e-3
    for rate, total in ((None, 1152), (2e-5, 1280)):
        more = settings | {"total_timesteps": total} | ({"learning_rate": rate} if rate else {})
        assert call(tmp_path, "--resume", path, **more).status == 0
        first = curves(path.parent)["charts/learning_rate"][total]
        expected = rate or last
        assert expected / 20 < first < expected * 20  # it is adapted within the iteration, too


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.13", reason="needs PyTorch 2.13")
def test_compile_gives_the_same_weights_up_to_rounding(tmp_path):
    _, plain = run(tmp_path / "plain", total_timesteps=128)
    _, fast = run(tmp_path / "compiled", "--compile", total_timesteps=128)
    plain, fast = load(plain)["agent"], load(fast)["agent"]
    for name in plain:
        torch.testing.assert_close(fast[name], plain[name], rtol=1e-3, atol=1e-5)


# CUDA graphs: those of torch.cuda on a GPU, and an emulator's on a CPU


ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture
def cuda(monkeypatch):
    """Let `train` record CUDA graphs, with an emulator where there is no GPU."""
    if ON_GPU:
        strict = {"check_input_liveness": True} if torch.__version__ >= "2.13" else {}
        monkeypatch.setattr(torch.cuda, "graph", partial(torch.cuda.graph, **strict))
        return
    monkeypatch.setattr(ppo, "can_record", lambda args: args.cuda_graphs)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph_emulator.CUDAGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph_emulator.graph)


GRAPHS = {"max_grad_norm": 0.3, "total_timesteps": 16 * 8 * 7, "device": DEVICE}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env_id", "words"),
    [
        ("Pendulum", []),
        ("Pendulum", ["--desired-kl=0.01"]),
        ("gpu_envs:Curriculum", []),
        ("gpu_envs:Smooth", []),
    ],
)
def test_training_with_cuda_graphs_gives_the_same_checkpoint_and_curves(env_id, words, tmp_path, cuda):
    """They are the same bit for bit on a CPU. Steps of `Smooth` are not recorded, but all else is.

    The test fails if results are kept without a copy, if memory is freed or replaced that a graph uses, if a
    number that changes is not a tensor, or if a recorded function reads the device.
    """
    _, plain = run(tmp_path / "plain", "--no-cuda-graphs", *words, env_id=env_id, **GRAPHS)
    _, graphs = run(tmp_path / "graphs", *words, env_id=env_id, **GRAPHS)
    one, other = load(plain), load(graphs)
    if ON_GPU:
        for name, x in one["agent"].items():
            torch.testing.assert_close(other["agent"][name], x, rtol=1e-2, atol=1e-3)
        return
    for content in (one, other):
        for x in content["state"]["buffers"].values():
            x.nan_to_num_(7)  # NaN is not equal to NaN
    for name in ("agent", "state"):
        assert same(one[name], other[name]), name
    assert same(one["optimizer"]["state"], other["optimizer"]["state"])
    assert curves(plain.parent) == curves(graphs.parent)


# Runs


def test_a_run_prints_its_checkpoint_and_the_return_of_whole_episodes(trained):
    """The checkpoint loads without executing code, and counts all transitions and gradient steps."""
    assert re.search(rf"^ +{TRAINED:,} steps  return -1\d\d\d", trained.printed, re.MULTILINE)
    (path,) = re.findall(r"^checkpoint (\S+),", trained.printed, re.MULTILINE)
    assert (trained.folder / path).samefile(trained.path)
    content = load(trained.path)
    assert content["state"]["global_step"] == TRAINED
    assert content["agent"]["obs_moments.count"] == content["agent"]["return_moments.count"] == TRAINED
    assert {slots["step"].item() for slots in content["optimizer"]["state"].values()} == {45 * 2 * 4}


def test_a_run_that_was_killed_resumes_from_its_last_checkpoint_with_new_episodes(trained, tmp_path):
    """Two resumes are identical, bit for bit, and the curves have no gap and no step twice."""
    folders = [shutil.copytree(trained.path.parent, tmp_path / name) for name in "ab"]
    for folder in folders:
        done = call(tmp_path, "--resume", folder, device="cpu", total_timesteps=TRAINED + 10 * 128)
        assert (done.status, done.err) == (0, "")
    one, other = (load(folder / "checkpoint.pt") for folder in folders)
    for name in ("agent", "optimizer"):
        assert same(one[name], other[name])
    assert one["agent"]["obs_moments.count"] == one["state"]["global_step"] == TRAINED + 10 * 128
    steps = [*curves(folders[0])["losses/kl"]]
    assert steps == [128 * (i + 1) for i in range(55)]


def test_a_run_resumes_with_another_number_of_environments_and_on_another_device(trained, tmp_path):
    """Episodes are new, which the script says, and all else continues."""
    path, content = tmp_path / "checkpoint.pt", load(trained.path)
    content["optimizer"]["param_groups"][0]["capturable"] = True  # as on a GPU
    torch.save(content, path)
    done = call(tmp_path, "--resume", path, device="cpu", num_envs=32, total_timesteps=TRAINED + 512)
    assert (done.status, done.err) == (0, "")
    assert "not restored: angle, speed, steps" in done.out or "not restored: steps, angle, speed" in done.out
    assert load(path)["agent"]["obs_moments.count"] == load(path)["state"]["global_step"] == TRAINED + 512
    assert not load(path)["optimizer"]["param_groups"][0]["capturable"]


def test_a_loaded_policy_and_an_evaluation_act_with_the_means_of_the_policy(trained, tmp_path):
    """A loaded policy takes the actor's part of raw observations. An evaluation plays an episode in each."""
    act, content = ppo.load_policy(trained.path), load(trained.path)
    obs = torch.randn(5, 3)
    assert not act(obs).requires_grad
    assert torch.equal(ppo.load_policy(trained.path.parent)(obs), act(obs))  # a run folder is accepted, too
    agent = ppo.Agent(ppo.Args(**content["args"]), 3, 3, 1)
    agent.load_state_dict(content["agent"])
    assert torch.equal(act(obs), agent.policy(agent.normalize(obs))[:, :1])
    _, path = run(tmp_path, env_id=SCRIPTED)  # of whose four numbers the actor sees three
    agent = ppo.Agent(ppo.load_checkpoint(path)[0], 4, 3, 2)
    agent.load_state_dict(load(path)["agent"])
    obs = torch.randn(5, 4)
    assert torch.equal(ppo.load_policy(path)(obs[:, :3]), agent.policy(agent.normalize(obs))[:, :2])
    args = make_args(env_id="Pendulum", num_envs=5)
    returns = ppo.evaluate(trained.path, args, ppo.make_envs(args))
    envs, totals = ppo.make_envs(args), torch.zeros(5)
    torch.manual_seed(ppo.hash_seed(1, 2**40))
    obs = envs.reset()
    for _ in range(200):
        obs, rewards, *_ = envs.step(act(obs))
        totals += rewards
    np.testing.assert_allclose(returns, totals, rtol=1e-5)


def test_keep_every_keeps_checkpoints_that_resume_in_folders_of_their_own(tmp_path):
    _, path = run(tmp_path, keep_every=300, total_timesteps=8 * 128)
    folders = sorted(path.parent.glob("at_*"), key=lambda folder: int(folder.name[3:]))
    assert [folder.name for folder in folders] == ["at_384", "at_640", "at_1024"]
    for folder in folders:
        assert load(folder / path.name)["state"]["global_step"] == int(folder.name[3:])
    assert same(load(folders[-1] / path.name), load(path))
    before = path.read_bytes()
    done = call(tmp_path, "--resume", folders[0], device="cpu", env_id="gpu_envs:Target")
    assert (done.status, done.err) == (0, "")
    assert load(folders[0] / path.name)["state"]["global_step"] == 1024
    assert path.read_bytes() == before


def test_a_checkpoint_of_other_sizes_does_not_run(trained, tmp_path):
    """PyTorch names the sizes of networks. A policy for other actions might broadcast."""
    done = call(tmp_path, "--resume", trained.path, total_timesteps=1e5, device="cpu", hidden_sizes=(32, 32))
    assert (done.status, [*tmp_path.iterdir()]) == (1, [])
    assert "size mismatch for actor.0.weight" in done.err
    done = call(tmp_path, "--evaluate", trained.path, env_id="gpu_envs:Scripted", device="cpu")
    assert (done.status, done.err.count("\n"), [*tmp_path.iterdir()]) == (2, 1, [])
    assert "is for observations and actions of other sizes" in done.err


def test_an_evaluation_of_one_environment_prints_a_deviation_of_0(trained, tmp_path):
    done = call(tmp_path, "--evaluate", trained.path, num_envs=1, device="cpu")
    assert "+/- 0 in 1 episodes" in done.out


def test_environments_may_reuse_the_memory_of_their_results(tmp_path):
    """The run would warn if an observation had changed after acting."""
    printed, _ = run(tmp_path, env_id=SCRIPTED)
    assert "do not compute the same policy" not in printed


def test_an_evaluation_plays_to_the_end_whatever_the_environments_count_as_the_limit(tmp_path, monkeypatch):
    """Here, the fourth step is the last."""
    monkeypatch.chdir(tmp_path)
    args = make_args(env_id="gpu_envs:Late")
    assert ppo.train(args)["greedy_returns"].tolist() == [1 + 2 + 3 + 4] * 16


def test_a_reset_that_seeds_the_generator_does_not_decide_how_a_run_explores(tmp_path, monkeypatch):
    """Other seeds have other noise."""
    monkeypatch.chdir(tmp_path)
    found = []
    for seed in (1, 2):
        collect = ppo.collect_rollout
        watched = lambda *given: found.append(collect(*given)) or found[-1]  # noqa: B023, E731
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ppo, "collect_rollout", watched)
            patch.setattr(ppo, "Agent", partial(fixed_agent, ppo.Agent))
            ppo.train(make_args(env_id="gpu_envs:SeedsInReset", seed=seed, total_timesteps=128))
    (one, _), (other, _) = found
    assert not torch.equal(one.actions - one.policies[..., :1], other.actions - other.policies[..., :1])


def fixed_agent(make, *given):
    """Return an agent whose weights do not depend on the seed."""
    torch.manual_seed(5)
    return make(*given)


def test_what_a_module_with_environments_changes_in_the_script_takes_effect(tmp_path):
    """The script is not imported a second time."""
    (tmp_path / "my_envs.py").write_text(
        "import gpu_envs, ppo_gpu\n"
        "class Mine(ppo_gpu.Agent):\n"
        "    def policy(self, obs):\n"
        "        return super().policy(obs) + 7\n"
        "ppo_gpu.Agent = Mine\n"
        "Envs = gpu_envs.Target\n"
    )
    small = {name: value for name, value in SMALL.items() if name != "hidden_sizes"}
    words = [sys.executable, str(helpers.ROOT / "ppo_gpu.py"), *flags(env_id="my_envs:Envs", **small)]
    paths = f"{Path(__file__).parent}{os.pathsep}{helpers.ROOT}"
    done = subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, check=False)
    assert done.returncode == 0
    logged = curves(checkpoint_in(tmp_path).parent)
    assert min(logged["losses/std"].values()) > 100  # exp(7 - 0.5)


def test_an_evaluation_counts_the_first_episode_of_each_environment_alone(tmp_path):
    _, path = run(tmp_path, env_id=SCRIPTED)
    args = make_args(env_id=SCRIPTED, num_envs=7)
    envs = gpu_envs.Scripted(args)
    returns = ppo.evaluate(path, args, envs)
    expected = []
    for n in range(7):
        last = next(step for step in range(1, 7) if any(gpu_envs.Scripted.ends(n, 1, step)))
        expected.append(sum(gpu_envs.Scripted.reward(n, 1, step) for step in range(1, last + 1)))
    np.testing.assert_allclose(returns, expected, rtol=1e-5)


def test_a_video_is_recorded_where_the_environments_can_render(tmp_path):
    """The pendulums cannot render, and are refused."""
    pytest.importorskip("moviepy")
    _, path = run(tmp_path, "--capture-video", "--eval-every", "1e9")
    for name in ("video.mp4", "best_video.mp4"):
        assert path.with_name(name).stat().st_size > 1000
    refused = call(tmp_path, "--capture-video", **SMALL)
    assert refused.status == 2
    assert "environments with snapshot and render" in refused.err


def test_ctrl_c_and_sigterm_save_a_run_that_resumes(tmp_path, monkeypatch):
    """Training ends after the iteration, without an evaluation, with exit status 130."""
    collect, count = ppo.collect_rollout, itertools.count(1)
    signals = {3: signal.SIGINT, 5: signal.SIGTERM}  # by iteration

    def interrupted(*given):
        number = signals.get(next(count))
        if number is not None:
            os.kill(os.getpid(), number)
        return collect(*given)

    monkeypatch.setattr(ppo, "collect_rollout", interrupted)
    done = call(tmp_path, **SMALL | {"env_id": "Pendulum", "total_timesteps": TRAINED})
    path = checkpoint_in(tmp_path)
    for iterations in (3, 5):
        assert done.status == 130
        assert "evaluation" not in done.out
        assert load(path)["state"]["global_step"] == iterations * 128
        done = call(tmp_path, "--resume", path.parent, device="cpu")
    assert done.status == 0
    assert load(path)["state"]["global_step"] == TRAINED


REFUSALS = {
    "--num-minibatches 8193": "lower --num-minibatches",
    "--desired-kl 0.01 --learning-rate 0.1": "from 1e-05 to 0.01",
    "--hidden-sizes 64 0": "--hidden-sizes must be at least 1",
    "--device cuda:1": "--device must be cpu, cuda or mps, not cuda:1: see CUDA_VISIBLE_DEVICES",
    "--device mps --compile": "--compile is for one process with --device cpu",
    "--stop-at 5": "--stop-at needs --eval-every",
    "--evaluate a --init b": "cannot be combined",
}


@pytest.mark.parametrize("words", REFUSALS)
def test_mistakes_end_in_one_line_before_anything_is_written(words, tmp_path):
    done = call(tmp_path, "--device", "cpu", *words.split())
    assert (done.status, done.out, list(tmp_path.iterdir())) == (2, "", [])
    assert REFUSALS[words] in done.err
    assert done.err.count("\n") == 1


def test_help_describes_each_flag_with_the_defaults_of_the_environment(tmp_path):
    """The pendulums have defaults of their own."""
    helpers.assert_help(CASE, tmp_path)
    shown = call(tmp_path, "--env-id", "gpu_envs:Target", "--help").out
    assert re.search(r"--num-envs INT [^-]*default: 2048", shown)
    done = call(tmp_path, "--env-id", "gpu_envs:Target", "--num-minibatches", 2048 * 32 // 2 + 1)
    assert "lower --num-minibatches" in done.err  # 2,048 environments of 32 steps


# Several processes

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
WORKER = Path(__file__).with_name("gpu_worker.py")


@pytest.mark.parametrize("name", ["ppo_gpu", "grpo"])
def test_a_process_that_is_alone_logs_and_saves_although_its_rank_is_set(name, monkeypatch):
    """Some clusters set RANK without WORLD_SIZE."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    spec = importlib.util.spec_from_file_location(f"{name}_again", helpers.ROOT / f"{name}.py")
    monkeypatch.setitem(sys.modules, spec.name, script := importlib.util.module_from_spec(spec))
    spec.loader.exec_module(script)
    assert (script.RANK, script.PROCESSES) == (0, 1)


@pytest.mark.slow
def test_two_processes_learn_as_one_with_twice_the_environments(tmp_path):
    """Running moments equal NumPy's. Halves of a rollout give the weights and metrics of the whole one.

    In `train`, observations differ between processes, but weights and statistics do not. One process can
    resume a run of two, and the reverse, and a curriculum goes on in both. The first process evaluates, and
    its 12th evaluation ends both by --stop-at.
    """
    for launcher in ([sys.executable], TORCHRUN):
        subprocess.run([*launcher, str(WORKER), str(tmp_path)], check=True, timeout=200)
    one, *others = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    x = 1000 + 0.1 * np.random.default_rng(0).normal(size=(2, 600, 3))
    for each in (one, *others):
        mean, var, count = each["moments"]
        np.testing.assert_allclose(mean, x.reshape(-1, 3).mean(0), rtol=1e-6)
        np.testing.assert_allclose(var, x.reshape(-1, 3).var(0), rtol=0.02)
        assert count == 1200
        torch.testing.assert_close(each["weights"], one["weights"], rtol=1e-5, atol=1e-6)
        for name, value in one["metrics"].items():
            if name not in ("explained_variance", "critic_error"):  # means of both
                assert each["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
        # For each of two gradient steps: two for advantages, one of all gradients. Then all metrics.
        assert len(each["messages"]) == (0 if each is one else 2 * 3 + 1)
    assert same(*(other["trained"] for other in others))
    assert not torch.equal(others[0]["obs"], others[1]["obs"])
    path = checkpoint_in(tmp_path)
    assert load(path)["state"]["global_step"] == load(path)["agent"]["obs_moments.count"].item() == 4096
    for each in (one, *others):  # 8 iterations of 8 steps, then 12 more; checks and evaluations have a few
        assert each["level"].item() == pytest.approx(0.67 if each is one else 1.63, abs=0.08)
    done = call(tmp_path, "--resume", path, total_timesteps=5000, env_id="gpu_envs:Curriculum")
    assert (done.status, done.err) == (0, "")
    assert load(path)["state"]["global_step"] >= 5000


# Learning


@pytest.mark.nightly
def test_the_defaults_solve_the_pendulums_in_half_of_their_steps(tmp_path):
    """The return reaches about -150. A random policy has -1200."""
    done = call(tmp_path, device="cpu", total_timesteps=500_000)
    (result,) = curves(checkpoint_in(tmp_path).parent)["eval/greedy_return"].values()
    assert result > -180, done.out


# MuJoCo Playground: pip install -e ".[playground]"


@pytest.mark.slow
def test_playground_steps_as_the_environment_itself_and_trains(tmp_path, monkeypatch):
    """At the time limit, an environment returns to the state in which it started.

    Of observations in two parts, the robot's comes first, then the one that only the simulator knows.
    """
    registry = pytest.importorskip("mujoco_playground").registry
    import jax

    load_env = registry.load

    def load_with_parts(*args):
        env = load_env(*args)
        reset, step = env.reset, env.step

        def parts(state):
            return state.replace(obs={"state": state.obs[:2], "privileged_state": state.obs})

        env.reset, env.step = lambda key: parts(reset(key)), lambda *x: parts(step(*x))
        return env

    monkeypatch.setattr(registry, "load", load_with_parts)
    args = make_args(env_id="CartpoleBalance", num_envs=10, num_minibatches=2, total_timesteps=240)
    envs = playground_tasks.Playground(args)
    assert (envs.actor_obs_size, envs.obs_size, envs.action_size, envs.max_steps) == (2, 7, 1, 1000)
    envs.max_steps = 3
    first = envs.reset().clone()
    plain, state = jax.jit(jax.vmap(envs.env.step)), envs.state
    for t in range(1, 7):
        actions = torch.rand(10, 1) * 3 - 1.5
        state = plain(state, np.clip(actions.numpy(), -1, 1))
        obs, rewards, terminated, truncated, next_obs = envs.step(actions)
        np.testing.assert_allclose(next_obs[:, :2], np.asarray(state.obs["state"]), atol=1e-5)
        np.testing.assert_allclose(next_obs[:, 2:], np.asarray(state.obs["privileged_state"]), atol=1e-5)
        np.testing.assert_allclose(rewards, np.asarray(state.reward), atol=1e-5)
        assert not terminated.any()
        assert truncated.all() == truncated.any() == (t % 3 == 0)
        assert torch.equal(obs, first if t % 3 == 0 else next_obs)
        state = envs.start if t % 3 == 0 else state
    assert not torch.equal(first, envs.reset())
    short = playground_tasks.Playground(args, episode_length=50)
    assert short.max_steps == 50
    with pytest.raises((KeyError, AttributeError)):
        playground_tasks.Playground(args, episode_lenght=50)
    monkeypatch.chdir(tmp_path)
    results = ppo.train(args, envs)
    assert results["training_return"] > 0
    assert len(results["greedy_returns"]) == 10
