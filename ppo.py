# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.5,<2.14", "gymnasium[classic-control,toy-text]>=1.1", "numpy", "tensorboard", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO) for discrete actions, in one file.

    python ppo.py --env-id CartPole-v1 --total-timesteps 1e5
    python ppo.py --env-id FrozenLake-v1 --env-kwargs is_slippery=False
    python ppo.py --evaluate runs/<run>/checkpoint.pt --capture-video

It trains on any Gymnasium environment with `Discrete` actions and observations that flatten to a vector. To
use your own, register it and name it (`--env-id my_module:MyEnv-v0`), or copy this file and change make_env.

  [PPO]     Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE]     Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
            Estimation", arXiv:1506.02438
  [Limits]  Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv:1712.00378
  [Matters] Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
  [37]      Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog

This file has two halves. The first is PPO, in the order of the paper; it ends with `train`, the paper's
Algorithm 1. The second, which can be skipped, is what training needs around it.

Shapes: T steps per rollout, N environments, D numbers per observation, A actions, B transitions in a batch.
"""

from __future__ import annotations

import ast
import json
import math
import multiprocessing
import os
import random
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn
from torch.optim.adam import Adam, adam
from torch.utils.tensorboard import SummaryWriter, summary


@dataclass
class Experiment:  # the comments are the texts of --help
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    plan: bool = False  # only print what the run would do, and which advice it may give
    resume: str | None = None  # resume from this checkpoint and overwrite it; flags override its settings
    evaluate: str | None = None  # only evaluate this checkpoint, greedily
    eval_episodes: int = 10  # episodes of an evaluation
    eval_max_steps: int = 10_000  # maximum steps per evaluation episode: some environments never end
    checkpoint_seconds: float = 60.0  # time between checkpoints; one is also written at the start and the end
    log_seconds: float = 10.0  # time between progress lines when the output is not a terminal
    capture_video: bool = False  # record the evaluation in the run folder (needs moviepy)
    track: bool = False  # mirror TensorBoard to Weights & Biases (needs wandb; WANDB_MODE=offline works)
    wandb_project_name: str = "ppo"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases; None is your own account
    allow_unsafe: bool = False  # accept settings that are refused because they are known to break PPO


@dataclass
class Environment:
    env_id: str = "CartPole-v1"  # Gymnasium id; `module:EnvId-v0` imports the module first
    env_kwargs: str = ""  # environment arguments, as "is_slippery=False, map_name='8x8'" or as JSON
    num_envs: int = 16  # N: environments that step in parallel


@dataclass
class Algorithm:
    total_timesteps: float = 500_000  # total number of transitions, for example 1e6
    num_steps: int = 64  # T: steps of each environment per rollout
    learning_rate: float = 1e-3  # Adam's step size; with --adapt learning-rate, its upper limit
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # γ: discount factor
    gae_lambda: float = 0.98  # λ: trades bias (0) against variance (1) of the advantages
    update_epochs: int = 15  # K: passes over each rollout
    num_minibatches: int = 4  # minibatches per epoch, one gradient step each
    norm_adv: bool = True  # normalise the advantages of each minibatch to mean 0, standard deviation 1
    surrogate: Literal["clip", "kl-penalty"] = "clip"  # clipped ratio ([PPO], §3) or KL penalty ([PPO], §4)
    clip_coef: float = 0.2  # ε: the ratio of new to old probability is clipped to 1 ± ε
    clip_vloss: bool = False  # also clip the change of the value to ±ε ([Matters], §3)
    kl_coef: float = 1.0  # β: weight of the KL penalty
    adapt: Literal["none", "kl-coef", "clip-coef", "learning-rate"] = "none"  # what holds --desired-kl
    desired_kl: float = 0.01  # KL divergence per iteration that --adapt aims at, in nats
    target_kl: float | None = None  # stop an iteration after an epoch whose KL divergence exceeds this
    ent_coef: float = 0.01  # c₂: weight of the entropy bonus
    anneal_ent_coef: bool = False  # decay the entropy coefficient linearly to 0
    target_entropy: float | None = None  # adapt the entropy coefficient to hold this entropy, in nats
    vf_coef: float = 0.5  # c₁: weight of the value loss, ½ (V - return)²
    max_grad_norm: float = 0.5  # clip the gradient to this global norm
    norm_obs: bool = True  # normalise observations, unless bounded by 0 and 1, by running mean and std
    norm_rewards: bool = True  # divide rewards by the running std of the discounted return ([Matters], §3)
    hidden_size: int = 64  # width of the two hidden layers of the actor, and of the critic


@dataclass
class Performance:
    device: str = "cpu"  # where the networks live: cpu, cuda or mps; small ones are fastest on the CPU
    num_threads: int = 1  # PyTorch's CPU threads: for small networks, one is fastest
    compile: bool = False  # faster gradient steps, after some 20 seconds of compiling
    async_envs: bool = False  # one process per environment: worthwhile when steps are slow


@dataclass
class Args(Performance, Algorithm, Environment, Experiment):
    """All settings. The four groups are those of --help."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                setattr(self, name, value.item())  # checkpoints with NumPy's numbers cannot be loaded


# ------------------------------------------------- Networks -------------------------------------------------


def mlp(inputs: int, hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Two tanh layers and a linear one, with orthogonal weights and zero biases ([37], detail 2)."""
    layers = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class RunningMoments(nn.Module):
    """Mean and variance [D] of everything seen so far (the parallel algorithm of Chan et al. 1983)."""

    def __init__(self, size: int):
        super().__init__()
        self.mean, self.var = nn.Buffer(torch.zeros(size)), nn.Buffer(torch.ones(size))
        self.count = nn.Buffer(torch.zeros(()))

    @torch.no_grad()
    def update(self, x: Tensor) -> None:
        """Include x [B, D]."""
        share = len(x) / (self.count + len(x))  # of the new data
        delta = x.mean(0) - self.mean
        self.var.lerp_(x.var(0, correction=0), share).add_(share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.add_(len(x))


class Agent(nn.Module):
    """Actor and critic, with the running statistics they depend on: a saved agent is complete."""

    def __init__(self, args: Args, obs_space: Any, action_space: Any):
        super().__init__()
        self.obs_size = len(obs_space.low)
        self.num_actions, self.first_action = int(action_space.n), int(action_space.start)
        self.actor = mlp(self.obs_size, args.hidden_size, self.num_actions, last_gain=0.01)  # near-uniform
        self.critic = mlp(self.obs_size, args.hidden_size, 1, last_gain=1.0)
        self.obs_moments, self.return_moments = RunningMoments(self.obs_size), RunningMoments(1)
        # Which entries are normalised [D]: not the one-hot ones, nor others that are bounded by 0 and 1.
        unit = (obs_space.low == 0) & (obs_space.high == 1)
        self.norm_obs, self.normalised = args.norm_obs, nn.Buffer(torch.from_numpy(~unit))

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations [..., D] as the networks see them: unchanged, or (x - mean) / std within ±10."""
        if not self.norm_obs:
            return obs
        scaled = (obs - self.obs_moments.mean) * torch.rsqrt(self.obs_moments.var + 1e-8)
        return torch.where(self.normalised, scaled.clamp(-10, 10), obs)

    def policy(self, obs: Tensor) -> Tensor:
        """π(·|s), as log-probabilities [..., A], for normalised observations [..., D]."""
        return torch.log_softmax(self.actor(obs), -1)

    def value(self, obs: Tensor) -> Tensor:
        """V(s) [...] for normalised observations [..., D]."""
        return self.critic(obs).squeeze(-1)

    def act(self, raw_obs: np.ndarray, noise: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        """Actions [N] for raw observations [N, D], and π(·|s) [N, A] as log-probabilities.

        Without noise, they are the most likely actions; with `gumbel_noise`, they are samples from π.
        """
        obs = torch.as_tensor(raw_obs, dtype=torch.float32, device=self.normalised.device)
        policy = self.policy(self.normalize(obs))
        return (policy + noise).argmax(-1), policy


def gumbel_noise(*shape: int) -> Tensor:
    """Noise with which argmax(log π + noise) is a sample from π (the Gumbel-max trick)."""
    return -torch.empty(shape).exponential_().log()


# ------------------------------------------------- Equations ------------------------------------------------


def log_prob(log_policy: Tensor, actions: Tensor) -> Tensor:
    """log π(a|s) [B] of actions [B], from log π(·|s) [B, A]."""
    return log_policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def entropy(log_policy: Tensor) -> Tensor:
    """H(π) = -Σ_a π(a) log π(a) [B], in nats."""
    return -(log_policy.exp() * log_policy).sum(-1)


def kl_divergence(old_log_policy: Tensor, log_policy: Tensor) -> Tensor:
    """KL(π_old ‖ π) = Σ_a π_old(a) (log π_old(a) - log π(a)) [B], in nats."""
    return (old_log_policy.exp() * (old_log_policy - log_policy)).sum(-1)


def compute_gae(
    rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [T, N] by generalised advantage estimation ([GAE], equations 11 to 16).

        δ_t = r_t + γ V(s_{t+1}) (1 - terminated_t) - V(s_t)
        A_t = δ_t + γλ (1 - (terminated_t ∨ truncated_t)) A_{t+1}
        return_t = A_t + V(s_t), the critic's target

    Both kinds of end stop the sum, but at a time limit (truncated) V(s_{t+1}) still counts ([Limits], §3.2).
    So row t+1 of `values` [T+1, N] must be the value of the state that step t led to, even where it ended the
    episode. All other tensors are [T, N].
    """
    deltas = rewards + gamma * values[1:] * ~terminated - values[:-1]
    decays = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.zeros_like(values)
    for t in reversed(range(len(rewards))):
        advantages[t] = deltas[t] + decays[t] * advantages[t + 1]
    return advantages[:-1], advantages[:-1] + values[:-1]


class Batch(NamedTuple):
    """B transitions to learn from."""

    obs: Tensor  # [B, D], normalised
    actions: Tensor  # [B]
    old_policy: Tensor  # [B, A], π_old(·|s) as log-probabilities
    old_values: Tensor  # [B], V_old(s)
    advantages: Tensor  # [B]
    returns: Tensor  # [B]


@dataclass
class State:
    """What changes during training besides the networks."""

    learning_rate: float
    clip_coef: float
    kl_coef: float
    ent_coef: float
    global_step: int = 0  # transitions so far
    metrics: dict[str, float] = field(default_factory=dict)  # of the last iteration
    recent_returns: list[float] = field(default_factory=list)  # of the last 100 episodes
    first_return: float = math.nan  # mean return of the first episodes
    streaks: dict[str, int] = field(default_factory=dict)  # for how many iterations each ADVICE has held


COEFFICIENTS = "learning_rate", "clip_coef", "kl_coef", "ent_coef"
# What a gradient step returns: means over its minibatch, and the norm of its gradient.
METRICS = "policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "grad_norm"


def ppo_loss(agent: Agent, batch: Batch, args: Args, state: State) -> tuple[Tensor, Tensor]:
    """The loss to minimise ([PPO], equation 9, negated), and all METRICS but `grad_norm` [6]."""
    policy, values = agent.policy(batch.obs), agent.value(batch.obs)
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    log_ratio = log_prob(policy, batch.actions) - log_prob(batch.old_policy, batch.actions)
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s)
    if args.surrogate == "clip":  # L^CLIP = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] ([PPO], equation 7)
        clipped = ratio.clamp(1 - state.clip_coef, 1 + state.clip_coef)
        policy_losses = -torch.min(ratio * advantages, clipped * advantages)
    else:  # L^KLPEN = E[r A - β KL(π_old ‖ π)] ([PPO], equation 8)
        policy_losses = state.kl_coef * kl_divergence(batch.old_policy, policy) - ratio * advantages
    value_losses = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:  # the larger of two losses: of V, and of V clipped to V_old ± ε
        clipped = batch.old_values + (values - batch.old_values).clamp(-state.clip_coef, state.clip_coef)
        value_losses = torch.max(value_losses, 0.5 * (clipped - batch.returns).square())
    entropies = entropy(policy)
    loss = (policy_losses + args.vf_coef * value_losses - state.ent_coef * entropies).mean()
    with torch.no_grad():  # the approximate KLs are k1 and k3 of Schulman 2020, "Approximating KL Divergence"
        outside = ((ratio - 1).abs() > state.clip_coef).float()
        metrics = policy_losses, value_losses, entropies, -log_ratio, ratio - 1 - log_ratio, outside
        return loss, torch.stack(metrics).mean(1)  # one tensor: 3% faster than a mean for each


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout:
    """T steps of N environments, in arrays that are reused: the next rollout starts where this one ends.

    When step t ends an episode, obs[t+1] is its last state, not the first of the next one. Step t+1 then
    ignores its action and only resets the environment (AutoresetMode.NEXT_STEP of Gymnasium). Such a filler
    row is not a transition: `valid` is False, GAE's sum stops before it, and nothing is learnt from it.
    """

    def __init__(self, args: Args, agent: Agent):
        steps, n = args.num_steps, args.num_envs
        self.obs = np.zeros((steps + 1, n, agent.obs_size), np.float32)
        self.actions = np.zeros((steps, n), np.int64)
        self.rewards, self.discounted_returns = np.zeros((2, steps, n), np.float32)
        self.terminated, self.truncated, self.valid = np.zeros((3, steps, n), bool)
        self.acting_policy = torch.zeros(n, agent.num_actions)  # of the last step, for `policy_mismatch`
        # Of the unfinished episodes, so far:
        self.episode_returns, self.episode_lengths = np.zeros(n), np.zeros(n, int)
        self.episodes: list[tuple[float, int]] = []  # return and length of those that ended


@torch.inference_mode()
def collect_rollout(envs: VectorEnv, agent: Agent, rollout: Rollout) -> None:
    """Fill the rollout with the next T steps of the environments under the agent's policy."""
    obs, actions, rewards, valid = rollout.obs, rollout.actions, rollout.rewards, rollout.valid
    terminated, truncated = rollout.terminated, rollout.truncated
    noise = gumbel_noise(*actions.shape, agent.num_actions).to(agent.normalised.device)  # all at once
    obs[0] = obs[-1]
    valid[0] = ~(terminated[-1] | truncated[-1])
    try:
        for t, step_noise in enumerate(noise):
            sampled, rollout.acting_policy = agent.act(obs[t], step_noise)
            actions[t] = sampled.cpu().numpy()
            results = envs.step(actions[t] + agent.first_action)
            obs[t + 1], rewards[t], terminated[t], truncated[t], _ = results
    finally:  # even if a step failed: a NaN may be why
        check_finite(rollout)
    valid[1:] = ~(terminated | truncated)[:-1]
    rollout.episodes = finished_episodes(rollout)


@torch.no_grad()
def scale_rewards(agent: Agent, rollout: Rollout, gamma: float) -> Tensor:
    """Rewards [T, N] divided by the running std of the discounted return, then clipped to ±10.

    The discounted return is R_t = γ R_{t-1} + r_t, starting from 0 in each episode ([Matters], §3).
    """
    discounted, valid, device = rollout.discounted_returns, rollout.valid, agent.normalised.device
    for t in range(len(discounted)):  # for t = 0, discounted[-1] is the last row of the previous rollout
        discounted[t] = (gamma * discounted[t - 1] + rollout.rewards[t]) * valid[t]
    agent.return_moments.update(torch.as_tensor(discounted[valid], device=device).unsqueeze(-1))
    rewards = torch.as_tensor(rollout.rewards, device=device)
    return (rewards * torch.rsqrt(agent.return_moments.var + 1e-8)).clamp(-10, 10)


@torch.no_grad()
def make_batch(agent: Agent, rollout: Rollout, args: Args) -> tuple[Batch, dict[str, float]]:
    """Estimate the advantages of a rollout, and flatten it to a batch; also return metrics of the data."""
    tensor = partial(torch.as_tensor, device=args.device)
    raw_obs, actions = tensor(rollout.obs), tensor(rollout.actions)
    terminated, truncated, valid = map(tensor, (rollout.terminated, rollout.truncated, rollout.valid))
    rewards = scale_rewards(agent, rollout, args.gamma) if args.norm_rewards else tensor(rollout.rewards)
    obs = agent.normalize(raw_obs)
    values, policy = agent.value(obs), agent.policy(obs[:-1])
    advantages, returns = compute_gae(rewards, values, terminated, truncated, args.gamma, args.gae_lambda)
    columns = obs[:-1], actions, policy, values[:-1], advantages, returns
    batch = Batch(*(column[valid] for column in columns))  # from [T, N, ...] to [B, ...], without filler rows
    agent.obs_moments.update(raw_obs[:-1][valid])  # only now, so that acting and learning use the same
    # What follows is for the logs and for ADVICE.
    errors = batch.returns - batch.old_values
    sizes = np.abs(rollout.rewards[rollout.rewards != 0])
    return batch, {
        "explained_variance": 1 - (errors.var(correction=0) / batch.returns.var(correction=0)).item(),
        "critic_error": (errors.square().mean() / batch.returns.square().mean()).sqrt().item(),
        "relative_entropy": (entropy(batch.old_policy).mean() / math.log(agent.num_actions)).item(),
        "reward_max": rewards.abs().max().item(),
        "reward_range": float(sizes.max() / np.median(sizes)) if len(sizes) else 1.0,
        "policy_mismatch": (rollout.acting_policy - policy[-1]).abs().max().item(),
    }


def gradient_step(agent: Agent, optimizer: Adam, args: Args, state: State, batch: Batch) -> Tensor:
    """Take one gradient step on a minibatch. Returns METRICS [7]."""
    (group,) = optimizer.param_groups
    group["lr"] = state.learning_rate
    optimizer.zero_grad()
    loss, metrics = ppo_loss(agent, batch, args, state)
    loss.backward()
    grad_norm = nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
    optimizer.step()
    return torch.cat([metrics, grad_norm.unsqueeze(0)])


@torch.no_grad()
def distance_moved(agent: Agent, batch: Batch) -> float:
    """KL divergence of the current policy from the one that acted, in nats."""
    return kl_divergence(batch.old_policy, agent.policy(batch.obs)).mean().item()


def update(agent: Agent, learn: Callable, batch: Batch, args: Args) -> dict[str, float]:
    """K epochs of gradient steps, which `learn` takes, on shuffled minibatches. Returns the mean metrics."""
    num_minibatches = max(1, min(args.num_minibatches, len(batch.obs) // 2))  # each has 2 transitions or more
    metrics = []  # of each gradient step, still as tensors: reading them would wait for the GPU
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.obs)).to(args.device)
        for rows in order.tensor_split(num_minibatches):
            metrics.append(learn(Batch(*(column[rows] for column in batch))))
        if args.target_kl is not None and distance_moved(agent, batch) > args.target_kl:
            break
    means = torch.stack(metrics).mean(0).tolist()
    return dict(zip(METRICS, means, strict=True)) | {"kl": distance_moved(agent, batch)}


def adjust_coefficients(state: State, args: Args) -> None:
    """Set the next iteration's coefficients, by their schedules and the last iteration's metrics, if any."""
    remaining = 1 - state.global_step / args.total_timesteps
    scheduled_lr = args.learning_rate * (remaining if args.anneal_lr else 1)
    # What is not adapted is set anew, because a resumed run may have adapted it before.
    if args.adapt != "learning-rate":
        state.learning_rate = scheduled_lr
    if args.adapt != "clip-coef":
        state.clip_coef = args.clip_coef
    if args.adapt != "kl-coef":
        state.kl_coef = args.kl_coef
    if args.target_entropy is None:
        state.ent_coef = args.ent_coef * (remaining if args.anneal_ent_coef else 1)
    if not state.metrics:
        return
    kl, desired_kl = state.metrics["kl"], args.desired_kl
    direction = (kl > 1.5 * desired_kl) - (kl < desired_kl / 1.5)  # 1: KL too large, -1: too small, 0: fine
    if args.adapt == "kl-coef":  # [PPO], §4: β is doubled or halved
        state.kl_coef = min(max(state.kl_coef * 2.0**direction, 1e-4), 1e4)
    elif args.adapt == "clip-coef":
        state.clip_coef = min(max(state.clip_coef / 2.0**direction, 0.01), 0.3)
    elif args.adapt == "learning-rate":  # as in Rudin et al. 2022, but with §4's thresholds
        state.learning_rate = min(max(state.learning_rate / 1.5**direction, 1e-5), scheduled_lr)
    if args.target_entropy is not None:
        surplus = state.metrics["entropy"] - args.target_entropy
        direction = (surplus > 0.05) - (surplus < -0.05)
        state.ent_coef = min(max(state.ent_coef / 1.1**direction, 1e-5), 10.0)


def train(args: Args, stop: Sequence[int] = ()) -> dict[str, Any]:
    """PPO ([PPO], Algorithm 1), then a greedy evaluation. Once `stop` has an element, it saves and returns.

    Returns "checkpoint" (its path), "training_return" (of the last 100 episodes) and "greedy_returns"
    (of the evaluation's episodes). Raises `Refused`, before anything is written, and `Diverged`. To resume,
    pass `replace(load_checkpoint(path)["args"], resume=path)`. All global random generators are seeded.
    Signals are the caller's: without `stop`, Ctrl-C loses what was done since the last checkpoint.
    """
    args = replace(args)  # numbers of NumPy become Python's
    check_args(args)
    torch.set_num_threads(args.num_threads)
    env_seed = seed_everything(args.seed)
    envs = make_envs(args)
    with refuse_errors("lower --hidden-size or --num-steps", MemoryError, RuntimeError, about="alloc"):
        agent = Agent(args, envs.single_observation_space, envs.single_action_space).to(args.device)
        rollout = Rollout(args, agent)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # ε: [37], detail 3
    state = State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)
    if args.resume:
        restore(args, agent, optimizer, state)
    learn: Callable = partial(gradient_step, agent, optimizer, args, state)
    if args.compile:
        learn = compile_gradient_step(agent, optimizer, args, state)

    with Run(args, envs, agent, optimizer, state, stop) as run:
        rollout.obs[-1], _ = envs.reset(seed=env_seed + state.global_step)  # where the first rollout starts
        while state.global_step < args.total_timesteps and not stop:
            adjust_coefficients(state, args)
            collect_rollout(envs, agent, rollout)
            batch, metrics = make_batch(agent, rollout, args)
            state.metrics = metrics | update(agent, learn, batch, args)
            state.global_step += len(batch.obs)
            run.log(rollout.episodes)
        run.save()
    return run.finish(stop)


# ========================== End of PPO. What follows is what training needs around it ======================


class Refused(Exception):  # noqa: N818
    """The request cannot be right. On the command line: one line, and exit status 2."""


class Diverged(Exception):  # noqa: N818
    """Networks, loss or gradient are no longer finite. On the command line: what to do, and exit status 1."""


def refuse(wrong: object, reason: str) -> None:
    """Raise `Refused` with the reason if something is wrong with the request."""
    if wrong:
        raise Refused(reason)


@contextmanager
def refuse_errors(reason: str, *kinds: type[Exception], about: str = "") -> Iterator[None]:
    """Raise `Refused` instead of exceptions of these kinds whose text matches the pattern `about`."""
    try:
        yield
    except kinds as error:
        if not re.search(about, str(error)):
            raise
        raise Refused(f"{reason}: {' '.join(str(error).split())[:300] or repr(error)}") from error


# ------------------------------------------------- Compiling ------------------------------------------------


def compile_gradient_step(agent: Agent, optimizer: Adam, args: Args, state: State) -> Callable:
    """`gradient_step` as one graph. Adam is a function here: `optimizer.step()` cannot be part of a graph."""
    with refuse_errors("--compile needs PyTorch 2.13", AttributeError):
        torch._dynamo.config.trace_autograd_ops = True  # lets `torch.autograd.grad` be part of it
    with refuse_errors("--compile needs a C++ compiler", Exception):
        torch._inductor.cpp_builder.get_cpp_compiler()
    torch.fx.experimental._config.use_duck_shape = False  # sizes that are equal at first may differ later
    (group,) = optimizer.param_groups
    parameters = [p for p in group["params"] if p.requires_grad]
    for p in parameters:
        zeros = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        optimizer.state[p] = optimizer.state[p] or zeros
    averages = [optimizer.state[p]["exp_avg"] for p in parameters]
    squares = [optimizer.state[p]["exp_avg_sq"] for p in parameters]
    steps: Any = [optimizer.state[p]["step"] for p in parameters]
    names = "eps", "weight_decay", "decoupled_weight_decay", "amsgrad", "maximize"
    settings: Any = {name: group[name] for name in names}
    settings["beta1"], settings["beta2"] = group["betas"]
    coefficients: Any = make_dataclass("Coefficients", COEFFICIENTS)  # all that the graph sees of the state

    def graph(batch: Batch, values: Tensor) -> Tensor:  # a tensor can change without compiling anew
        now = coefficients(*values)
        loss, metrics = ppo_loss(agent, batch, args, now)
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True)
        grad_norm = nn.utils.get_total_norm(gradients, foreach=False)
        scale = (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
        clipped: Any = [gradient * scale for gradient in gradients]
        with torch.no_grad():
            adam(parameters, clipped, averages, squares, [], steps, lr=now.learning_rate, **settings)
        return torch.cat([metrics, grad_norm.unsqueeze(0)])

    def check_shapes_only(guards: Sequence[Any]) -> list[bool]:
        """Nothing but the size of a batch can change; checking all else before each call takes 20% longer."""
        return [guard.guard_type == "SHAPE_ENV" for guard in guards]

    graph.__code__ = graph.__code__.replace()  # a copy: Dynamo caches by code object, also between runs
    options: Any = {"cpp_wrapper": True, "guard_filter_fn": check_shapes_only}
    compiled = torch.compile(graph, dynamic=True, fullgraph=True, options=options)

    def step(batch: Batch) -> Tensor:
        return compiled(batch, torch.tensor([float(getattr(state, name)) for name in COEFFICIENTS]))

    return step


# ------------------------------------------------- Environments --------------------------------------------


def make_env(args: Args, **kwargs: Any) -> gym.Env:
    """One environment. To train on a class of your own, put `MyEnv(**kwargs)` in place of `gym.make(...)`.

    To change attributes of an environment that has a vector version (CartPole), return a wrapper: without
    any, `make_envs` uses that version.
    """
    about = "unexpected keyword argument|multiple values|max_episode_steps"
    bad_argument = refuse_errors("an argument does not fit", TypeError, ValueError, about=about)
    with refuse_errors(f"cannot make {args.env_id}", gym.error.Error, ModuleNotFoundError), bad_argument:
        return gym.make(args.env_id, **parse_kwargs(args.env_kwargs), **kwargs)


def make_recordable_env(args: Args) -> gym.Env:
    """One environment, which can be recorded if --capture-video is set."""
    if not args.capture_video:
        return make_env(args)
    env = make_env(args, render_mode="rgb_array")
    shown = env.render_mode == "rgb_array" and "rgb_array" in env.metadata.get("render_modes", ())
    refuse(not shown, f"--capture-video: {args.env_id} cannot be rendered")
    return env


def parse_kwargs(text: str) -> dict[str, Any]:
    """Arguments from `name=value, name=value` in Python, or from JSON."""
    wrong = "--env-kwargs takes name=value, name=value, or JSON"
    with refuse_errors(wrong, ValueError, SyntaxError, AttributeError):
        if text.startswith("{"):
            return json.loads(text)
        call: Any = ast.parse(f"dict({text})", mode="eval").body
        unnamed = call.args or any(keyword.arg is None for keyword in call.keywords)
        refuse(unnamed, f"--env-kwargs is {text}; every argument needs a name, as in name=value")
        return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


class FlatEnv(gym.Wrapper):
    """Environment number `index` of N, with flat observations, and without infos, which may not be alike."""

    def __init__(self, args: Args, index: int):
        if "AsyncVectorEnv" in multiprocessing.current_process().name:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
            random.seed(f"{args.seed} {index}")  # so that environments that use these generators differ
            np.random.seed([args.seed, index])  # noqa: NPY002
        super().__init__(make_env(args))
        self.index, self.space = index, self.env.observation_space
        self.observation_space = gym.spaces.flatten_space(self.space)

    def flatten(self, obs: Any) -> Any:
        """An observation as a vector. Raises `ValueError` if it does not have the shape of its space."""
        flat: Any = gym.spaces.flatten(self.space, obs)
        right_shape = self.space.shape is None or np.shape(obs) == self.space.shape
        if not right_shape or flat.shape != self.observation_space.shape:
            found = f"an observation of shape {np.shape(obs)}, with {len(flat)} numbers"
            raise ValueError(f"environment {self.index} returned {found}; its space is {self.space}")
        return flat

    def reset(self, **kwargs: Any) -> tuple[Any, dict]:
        """As of any environment."""
        return self.flatten(self.env.reset(**kwargs)[0]), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict]:
        """As of any environment."""
        obs, reward, terminated, truncated, _ = self.env.step(action)
        return self.flatten(obs), reward, terminated, truncated, {}


def make_envs(args: Args) -> VectorEnv:
    """N environments that reset in the step after an episode's end.

    They are the environment's own vector version, if it fits; otherwise, they share this process or, with
    --async-envs, have one each. Raises `Refused` for an environment that this script cannot train on.
    """
    refuse(args.env_id.startswith("ALE/"), f"{args.env_id} is an Atari game: use ppo_atari.py")
    env = make_recordable_env(args)
    env.close()
    obs: Any = env.observation_space
    spec: Any = env.spec
    actions = env.action_space
    image = len(obs.shape or ()) > 1 and obs.dtype == np.uint8 and (obs.high == 255).all()
    refuse(image, f"{args.env_id} has images as observations, which are supported for Atari games only")
    other = ": use ppo_continuous.py" if isinstance(actions, gym.spaces.Box) else ""
    refuse(not isinstance(actions, gym.spaces.Discrete), f"its actions are {actions}, not Discrete{other}")
    not_flat = f"its observations do not flatten to a vector: {obs}"
    with refuse_errors(not_flat, NotImplementedError):
        refuse(not obs.is_np_flattenable, not_flat)
    vector = isinstance(obs, gym.spaces.Box) and len(obs.shape) == 1
    own = make_env.__module__ == __name__  # not one that was put in its place
    native = own and spec and spec.vector_entry_point and vector and not args.async_envs
    # Only if its wrappers and its time limit would be those of `make_env`.
    native = native and not spec.additional_wrappers
    if native and (spec.max_episode_steps or not gym.spec(spec.id).max_episode_steps):
        spec.kwargs.pop("render_mode", None)  # only the evaluation is recorded
        with suppress(TypeError):  # it may not take all arguments
            envs = gym.make_vec(spec, args.num_envs)
            if envs.metadata.get("autoreset_mode") is AutoresetMode.NEXT_STEP:
                return envs
    vectorize = AsyncVectorEnv if args.async_envs else SyncVectorEnv
    makers = [partial(FlatEnv, args, index) for index in range(args.num_envs)]
    return vectorize(makers, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)


def check_finite(rollout: Rollout) -> None:
    """Raise `ValueError` if an observation or a reward is not finite."""
    finite: Any = np.isfinite(rollout.obs).all(-1)
    for t, n in np.argwhere(~(finite[:-1] & finite[1:] & np.isfinite(rollout.rewards)))[:1]:  # the first
        values = f"from {rollout.obs[t, n]} to {rollout.obs[t + 1, n]}, reward {rollout.rewards[t, n]}"
        raise ValueError(f"environment {n} returned a value that is not finite in step {t}: {values}")


def finished_episodes(rollout: Rollout) -> list[tuple[float, int]]:
    """Return and length of each episode that ended (Gymnasium's wrapper would cost 10% of a compiled run)."""
    episodes = []
    returns = rollout.episode_returns + np.cumsum(rollout.rewards * rollout.valid, 0, float)
    lengths = rollout.episode_lengths + np.cumsum(rollout.valid, 0)
    for t, n in np.argwhere(rollout.terminated | rollout.truncated):
        episodes.append((float(returns[t, n]), int(lengths[t, n])))
        returns[:, n] -= returns[t, n]
        lengths[:, n] -= lengths[t, n]
    rollout.episode_returns, rollout.episode_lengths = returns[-1], lengths[-1]
    return episodes


def seed_everything(seed: int) -> int:
    """Seed all random generators, and return a seed for the environments."""
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(seed)
    # A hash, because Gymnasium seeds environment i with this + i: seeds 1 and 2 would share most of them.
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1


# ------------------------------------------------- Advice --------------------------------------------------

ADVICE = [  # name; iterations in a row; condition, which `diagnose` evaluates; text
    ("explosion", 1, lambda m: m["kl"] > 1,
     "KL > 1 in one iteration: the update was far too large; start again with a lower --learning-rate"),
    ("kl", 5, lambda m: m["kl"] > max(0.05, 2 * m["desired_kl"]),
     "KL > 0.05, and over twice --desired-kl: updates are too large; lower --learning-rate"),
    ("clipping", 10, lambda m: m["clipfrac"] > 0.4 and m["surrogate"] == "clip",
     "clip fraction > 0.4: the ratio is outside 1 ± ε too often; lower --learning-rate"),
    ("idle", 20, lambda m: m["progress"] < 0.5 and m["kl"] < 1e-6 and not m["exploded"],
     "KL < 1e-6 in the first half of training: the policy hardly changes; raise --learning-rate"),
    ("critic", 20, lambda m: m["explained_variance"] < 0 and m["critic_error"] > 0.1
     and m["progress"] > 0.1 and not m["exploded"],
     "explained variance < 0: the critic is worse than a constant; check --vf-coef and the observations"),
    ("collapse", 10, lambda m: m["entropy"] < 0.05 and m["improvement"] <= 0 and not m["exploded"],
     "entropy < 0.05, and returns no better than at first: exploration has stopped; raise --ent-coef"),
    ("random", 10, lambda m: m["relative_entropy"] > 0.95 and m["progress"] > 0.5
     and m["ent_coef"] > 0 and m["kl"] > 1e-6,
     "entropy within 5% of its maximum after half of training: the policy is still random; lower --ent-coef"),
    ("rewards", 1, lambda m: m["reward_range"] > 1000 and m["reward_max"] >= 10,
     "a reward is over 1000 times the median one: the others hardly count; clip rewards in the environment"),
    ("mismatch", 1, lambda m: m["policy_mismatch"] > 1e-4,
     "acting and learning policies differ by > 1e-4: check what you changed, or use --device cpu"),
]  # fmt: skip


def diagnose(metrics: dict[str, float], args: Args, state: State) -> list[str]:
    """The advice that has now applied long enough, each given once. Raises `Diverged`."""
    if not all(math.isfinite(metrics[name]) for name in ("policy_loss", "value_loss", "grad_norm", "kl")):
        raise Diverged("the loss or its gradient is not finite: lower --learning-rate, look for huge rewards")
    known = vars(args) | vars(state) | metrics  # what ADVICE looks at
    known["progress"] = state.global_step / args.total_timesteps
    known["improvement"] = np.mean(state.recent_returns or math.nan) - state.first_return
    known["exploded"] = metrics["kl"] > 1 or state.streaks.get("explosion")
    messages = []
    for name, iterations, applies, text in ADVICE:
        streak = state.streaks.get(name, 0)
        if streak < iterations:  # not given yet
            state.streaks[name] = streak + 1 if applies(known) else 0
            if state.streaks[name] == iterations:
                messages.append(f"[{name}] {text}")
    return messages


def plan(args: Args) -> str:
    """What a run with these settings does."""
    size, steps = args.num_envs * args.num_steps, args.update_epochs * args.num_minibatches
    return f"""{args.env_id}: {args.total_timesteps:,.0f} steps, rounded up to full rollouts, seed {args.seed}
rollout    {args.num_envs} environments x {args.num_steps} steps = {size:,} transitions, less those that reset
update     {args.update_epochs} epochs x {args.num_minibatches} minibatches = {steps} gradient steps
schedules  learning rate {args.learning_rate:g}{" to 0" * args.anneal_lr}, adapt {args.adapt}
           entropy coefficient {args.ent_coef:g}{" to 0" * args.anneal_ent_coef}"""


# ------------------------------------------------- Logging and checkpoints ---------------------------------


def say(text: str, end: str = "\n") -> None:
    """Print. If that fails, as where the output goes to `head` or to a full disk, training continues."""
    try:
        print(text, end=end, flush=True)
    except UnicodeEncodeError:
        say(text.encode("ascii", "replace").decode(), end)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_terminal() -> bool:
    """Whether standard output is a terminal, and not a file, a pipe, or what a notebook has in its place."""
    return hasattr(sys.stdout, "isatty") and sys.stdout.isatty()


class Run(AbstractContextManager):
    """The folder of a run, with TensorBoard's curves and the checkpoint, and its progress on the terminal.

    A `with` block closes the environments, and after an exception says how to resume.
    """

    def __init__(
        self, args: Args, envs: VectorEnv, agent: Agent, optimizer: Adam, state: State, stop: Sequence[int]
    ):
        self.args, self.envs, self.agent, self.optimizer, self.state = args, envs, agent, optimizer, state
        self.stop = stop
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.path = Path(args.resume or Path("runs", re.sub(r"[^\w.-]+", "_", name), "checkpoint.pt"))
        trusted = ["--env-id", args.env_id] if ":" in args.env_id else []  # see `main`
        trusted += ["--allow-unsafe"] if args.allow_unsafe else []
        self.resume = shlex.join([*PROGRAM, *trusted, "--resume", self.path.as_posix()])
        folder = self.path.parent
        self.wandb: Any = None
        with refuse_errors(f"cannot start a run in {folder}", Exception):
            if args.track:
                import wandb

                run_name = folder.resolve().name
                self.wandb = wandb.init(
                    project=args.wandb_project_name, entity=args.wandb_entity, config=asdict(args),
                    name=run_name, id=run_name, resume="allow", sync_tensorboard=True,
                )  # fmt: skip
            folder.mkdir(parents=True, exist_ok=True)
            self.path.with_suffix(".tmp").touch()  # the writer starts a thread, which would print a traceback
            # On --resume, TensorBoard drops what was logged after the checkpoint: nothing appears twice.
            self.writer: Any = SummaryWriter(str(folder), max_queue=1000, purge_step=state.global_step + 1)
        changed = [name for name in SAVED if getattr(args, name) != getattr(Args(), name)]
        shown = {name: getattr(args, name) for name in dict.fromkeys([*HPARAMS, *changed])}
        settings = {name: x if isinstance(x, (int, float)) else str(x) for name, x in shown.items()}
        for part in summary.hparams(settings, {"charts/episodic_return_100": 0, "eval/greedy_return": 0}):
            self.writer.file_writer.add_summary(part)  # type: ignore[attr-defined]
        self.start, self.first_step, self.printed = 0.0, 0, 0.0
        say(f"{plan(args)}\nfolder     {folder}")
        self.save()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if is_terminal():
            say("")
        if not error:
            stopped_workers = (EOFError, ConnectionError) if self.stop else ()
            with suppress(*stopped_workers):  # a signal to all processes has ended them
                self.envs.close()
            return False
        processes = getattr(self.envs.unwrapped, "processes", ())
        for process in processes:  # they may be dead, or hang
            process.kill()
        self.envs.unwrapped.closed = bool(processes)
        with suppress(Exception):  # the environment's own error says more
            self.envs.close()
        if self.stop and isinstance(error, (EOFError, ConnectionError)):
            self.save()  # a signal to all processes ended a worker: this rollout is lost, and nothing else
            return True
        if self.wandb:
            self.wandb.finish(exit_code=1)
        # Python prints it below the traceback.
        error.add_note(f"failed after {self.state.global_step:,} steps")
        error.add_note(f"resume from {self.saved_step:,} steps with: {self.resume}")
        return False

    def log(self, episodes: list[tuple[float, int]]) -> None:
        """Write an iteration's metrics to TensorBoard, print the progress, and save a checkpoint when due."""
        state, metrics, now = self.state, self.state.metrics, time.monotonic()
        if not self.start:  # the first iteration may compile: speed is measured from its end
            self.start, self.first_step = now, state.global_step
        speed = (state.global_step - self.first_step) / max(now - self.start, 1e-9)
        scalars = {"charts/SPS": speed} if speed > 0 else {}
        scalars |= {f"losses/{name}": value for name, value in metrics.items()}
        scalars |= {f"charts/{name}": getattr(state, name) for name in COEFFICIENTS}
        for name, values in zip(("return", "length"), np.transpose(episodes), strict=False):
            for suffix, statistic in (("", np.mean), ("_std", np.std), ("_min", np.min), ("_max", np.max)):
                scalars[f"charts/episodic_{name}{suffix}"] = float(statistic(values))
        if episodes:
            state.recent_returns = [*state.recent_returns, *(episode[0] for episode in episodes)][-100:]
            scalars["charts/episodic_return_100"] = float(np.mean(state.recent_returns))
            if math.isnan(state.first_return) and len(state.recent_returns) >= 20:
                state.first_return = scalars["charts/episodic_return_100"]
        messages = diagnose(metrics, self.args, state)
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, state.global_step)
        for message in messages:
            self.writer.add_text("advice", message, state.global_step)
        last = state.global_step >= self.args.total_timesteps
        if messages or last or now - self.printed >= (0.2 if is_terminal() else self.args.log_seconds):
            self.printed = now
            print_progress(self.args, state, metrics["kl"], speed, messages)
        if now - self.saved >= self.args.checkpoint_seconds:
            self.save()

    def save(self) -> None:
        """Write a checkpoint. If that fails, or the process is killed, the previous one is still there."""
        moments = [tensor for slots in self.optimizer.state.values() for tensor in slots.values()]
        if not all(tensor.isfinite().all() for tensor in (*self.agent.state_dict().values(), *moments)):
            raise Diverged("a network is not finite: lower --learning-rate, look for huge rewards")
        content = {  # only types that `torch.load(..., weights_only=True)` accepts
            "format": FORMAT,
            "args": {name: getattr(self.args, name) for name in SAVED},
            "state": asdict(self.state),
            "agent": self.agent.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        self.writer.flush()  # first, so that the curves have no gap where training resumes
        torch.save(content, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)
        self.saved, self.saved_step = time.monotonic(), self.state.global_step

    def finish(self, stop: Sequence[int]) -> dict[str, Any]:
        """Evaluate, unless training was stopped, and say what can be done next. Returns the results."""
        training_return = float(np.mean(self.state.recent_returns or math.nan))
        results: dict[str, Any] = {"checkpoint": str(self.path), "training_return": training_return}
        if not stop:
            returns = results["greedy_returns"] = evaluate(self.path, self.args)
            self.writer.add_scalar("eval/greedy_return", returns.mean(), self.state.global_step)
            say(f"curves     tensorboard --logdir {shlex.quote(self.path.parent.parent.as_posix())}")
            if "rgb_array" in self.envs.metadata.get("render_modes", ()):
                say(f"watch      {self.resume.replace('--resume', '--evaluate')} --capture-video")
        done = self.state.global_step >= self.args.total_timesteps
        more = f" --total-timesteps {2 * self.args.total_timesteps:.0f}" if done else ""
        say(f"resume     {self.resume}{more}")
        self.writer.close()
        if self.wandb:
            self.wandb.finish()
        return results


def print_progress(args: Args, state: State, kl: float, speed: float, messages: list[str]) -> None:
    """Print a line that fits 80 columns, and advice. On a terminal, the line is updated in place."""
    step, returns, live = state.global_step, state.recent_returns, is_terminal()
    mean = f"return {np.mean(returns):.1f}" if returns else "no episode finished yet"
    line = f"{step:>11,} steps {min(step / args.total_timesteps, 1):4.0%}  {mean}  KL {max(kl, 0):.4f}"
    if speed > 0:
        left = max(int((args.total_timesteps - step) / speed), 0)
        line += f"  {speed:,.0f}/s  {left // 60}:{left % 60:02} left"
    line = f"\r{line:<79.79}" if live else line
    say("\n".join([line, *messages]), end="" if live and not messages else "\n")


PROGRAM = ["python", __file__]  # what the printed commands call; see `main`
FORMAT = "ppo-discrete-2"
# TensorBoard's page of hyperparameters has these, and all that differ from the defaults.
HPARAMS = "env_id", "seed", "learning_rate", "num_envs", "num_steps", "update_epochs", "gamma", "gae_lambda"
# The settings in a checkpoint; those of Performance may be others when training is resumed.
SAVED = ["exp_name", "seed", *(setting.name for setting in (*fields(Environment), *fields(Algorithm)))]


def load_checkpoint(path: str | Path, trusted: str = "") -> dict[str, Any]:
    """The content of a checkpoint. Other people's are safe to load: nothing in them is executed.

    A module that its env_id names must have been imported already, unless that env_id is `trusted`.
    """
    with refuse_errors(f"{path} cannot be loaded as a checkpoint of this script", Exception):
        content = torch.load(path, map_location="cpu", weights_only=True)
        refuse(content["format"] != FORMAT, f"its format is {content['format']}, not {FORMAT}")
        content["args"] = Args(**{name: content["args"][name] for name in SAVED})
        env_id = content["args"].env_id
        foreign = ":" in env_id and env_id != trusted and env_id.partition(":")[0] not in sys.modules
        refuse(foreign, f"it needs a module; if you trust it, import it, or add --env-id {env_id}")
    return content


def restore(args: Args, agent: Agent, optimizer: Adam, state: State) -> None:
    """Restore the training that --resume names. Raises `Refused` if it does not fit, or is complete."""
    content = load_checkpoint(str(args.resume), args.env_id)
    with refuse_errors(f"{args.resume} does not fit these settings", RuntimeError):
        agent.load_state_dict(content["agent"])
    optimizer.load_state_dict(content["optimizer"])
    seed_everything((args.seed + content["state"]["global_step"]) % 2**32)  # not the first episodes again
    torch.set_rng_state(content["random"])
    for name, value in content["state"].items():
        if name not in COEFFICIENTS or getattr(args, name) == getattr(content["args"], name):
            setattr(state, name, value)  # not where a flag replaces a coefficient
    done = state.global_step >= args.total_timesteps
    refuse(done, f"{args.resume} has done {state.global_step:,} steps; set --total-timesteps to more")


def load_policy(path: str | Path, device: str = "cpu", trusted: str = "") -> Callable:
    """A trained policy, as a function from the environment's own observations to its actions.

    `policy(obs, sample=False)` takes one observation or a batch of them, and returns as many actions: the
    most likely ones, or samples. If a module registers the environment, import it first, or trust its env_id:
    see `load_checkpoint`.
    """
    content = load_checkpoint(path, trusted)
    env = gym.wrappers.FlattenObservation(make_env(content["args"]))
    env.close()
    space = env.env.observation_space
    agent = Agent(content["args"], env.observation_space, env.action_space).to(device).eval()
    with refuse_errors(f"{path} does not fit its settings", RuntimeError):
        agent.load_state_dict(content["agent"])

    @torch.inference_mode()
    def policy(obs: Any, sample: bool = False) -> Any:
        part, part_obs = space, obs
        while isinstance(part, (gym.spaces.Dict, gym.spaces.Tuple)):  # look at its first part
            first: Any = next(iter(part.spaces)) if isinstance(part, gym.spaces.Dict) else 0
            part, part_obs = part[first], part_obs[first]
        single = isinstance(part_obs, str) or np.shape(part_obs) == part.shape
        batch = [obs] if single else gym.vector.utils.iterate(gym.vector.utils.batch_space(space), obs)
        flat = np.stack([np.asarray(gym.spaces.flatten(space, item)) for item in batch])
        if flat.shape[1] != agent.obs_size:
            raise ValueError(f"the policy takes {agent.obs_size} numbers, not {flat.shape[1]}")
        noise = gumbel_noise(len(flat), agent.num_actions).to(device) if sample else 0.0
        actions = agent.act(flat, noise)[0].cpu().numpy() + agent.first_action
        return actions[0] if single else actions

    return policy


def evaluate(path: Path, args: Args) -> np.ndarray:
    """Play --eval-episodes episodes with the most likely actions; print and return their returns."""
    policy = load_policy(path, args.device, trusted=args.env_id)
    trained = make_env(load_checkpoint(path, args.env_id)["args"])
    trained.close()
    env = make_recordable_env(args)
    sizes = [gym.spaces.flatdim(each.observation_space) for each in (trained, env)]
    fits = sizes[0] == sizes[1] and trained.action_space == env.action_space
    refuse(not fits, f"{path} does not fit the observations and actions of {args.env_id}")
    if args.capture_video:
        env = gym.wrappers.RecordVideo(env, str(path.parent / "videos"), lambda episode: True)
    seed = seed_everything(args.seed) + 2**31
    seed_everything(seed)  # episodes that training has not seen, even if they come from a global generator
    returns = np.zeros(args.eval_episodes)
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=seed + episode)
        for _ in range(args.eval_max_steps):
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            returns[episode] += reward
            if terminated or truncated:
                break
    env.close()
    spread = f"± {returns.std():.1f}, from {returns.min():.1f} to {returns.max():.1f}"
    say(f"evaluation return {returns.mean():.1f} {spread}, {len(returns)} episodes")
    return returns


# ------------------------------------------------- Command line --------------------------------------------

BOUNDS = {  # the range of each setting
    "num_envs num_minibatches hidden_size num_threads eval_episodes update_epochs": (1, 1e6),
    "total_timesteps eval_max_steps": (1, 1e15),
    "num_steps": (4, 1e6),  # with fewer, all rows but one may be filler
    "learning_rate clip_coef max_grad_norm desired_kl target_kl checkpoint_seconds log_seconds": (1e-12, 1e6),
    "gamma gae_lambda": (0, 1),
    "ent_coef vf_coef kl_coef target_entropy": (0, 1e6),
    "seed": (0, 2**32 - 1),
}


def check_types(args: Args) -> None:
    """Raise `Refused` for a whole number or a choice of the wrong kind: other code may set anything."""
    for name, kind in get_type_hints(type(args)).items():
        value, choices = getattr(args, name), get_args(kind)
        refuse(kind is int and type(value) is not int, f"{name} is {value!r}; it must be a whole number")
        wrong = get_origin(kind) is Literal and value not in choices
        refuse(wrong, f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def check_args(args: Args) -> None:
    """Raise `Refused` for settings that cannot be right."""
    check_types(args)
    for names, (low, high) in BOUNDS.items():
        for name in names.split():
            value = getattr(args, name)
            wrong = value is not None and not low <= value <= high  # NaN fails every comparison
            refuse(wrong, f"--{name.replace('_', '-')} is {value}; it must be from {low:g} to {high:g}")
    size, clip = args.num_envs * args.num_steps, args.surrogate == "clip"
    refuse(2 * args.num_minibatches > size, f"--num-minibatches must be at most {size // 2}, half a rollout")
    refuse(args.adapt == "clip-coef" and not clip, "--adapt clip-coef needs --surrogate clip")
    refuse(args.adapt == "kl-coef" and clip, "--adapt kl-coef needs --surrogate kl-penalty")
    refuse(args.target_entropy is not None and not args.ent_coef, "--target-entropy needs --ent-coef above 0")
    both = args.target_entropy is not None and args.anneal_ent_coef
    refuse(both, "--target-entropy and --anneal-ent-coef exclude each other")
    refuse(args.resume and args.evaluate, "--resume and --evaluate exclude each other")
    refuse("" in (args.resume, args.evaluate), "--resume and --evaluate need the path of a checkpoint")
    refuse(args.capture_video and not find_spec("moviepy"), "--capture-video needs: pip install moviepy")
    with refuse_errors(f"--device {args.device} cannot be used; use cpu", RuntimeError, AssertionError):
        torch.zeros(1, device=args.device)
    if not args.allow_unsafe:
        override = "; --allow-unsafe overrides"
        unscaled = args.update_epochs > 1 and not (args.norm_adv or args.norm_rewards)
        refuse(args.update_epochs > 30, f"--update-epochs above 30: the KL explodes; use 3 to 15{override}")
        refuse(clip and args.clip_coef > 0.3, f"--clip-coef above 0.3 hardly clips; use 0.1 to 0.3{override}")
        refuse(unscaled, f"several epochs need --norm-adv or --norm-rewards to bound their steps{override}")


def parse_args(default: Args) -> Args:
    """The settings of the command line; those that it does not name are the default's."""
    groups, purpose = (Experiment, Environment, Algorithm, Performance), __doc__.partition("\nThis file")[0]
    flags = make_dataclass("Flags", [(group.__name__, group) for group in groups])
    values = (group(**{f.name: getattr(default, f.name) for f in fields(group)}) for group in groups)
    parsed = tyro.cli(flags, default=flags(*values), description=purpose, config=(tyro.conf.OmitArgPrefixes,))
    return Args(**{name: value for group in vars(parsed).values() for name, value in vars(group).items()})


def main() -> None:
    """The command line. Exit status: 0 done, 1 failed, 2 refused, 128 + n stopped by signal n."""
    for stream in (sys.stdout, sys.stderr):  # where a terminal has no γ, print something else
        with suppress(AttributeError):  # a notebook's streams have no encoding
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    runner = ["uv", "run"] if "UV" in os.environ else ["python"]  # uv sets UV
    PROGRAM[:] = [*runner, Path(sys.argv[0]).as_posix()]
    stop: list[int] = []

    def request_stop(number: int, _: Any) -> None:
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)  # the second signal acts at once

    try:
        args = parse_args(Args())
        if path := args.resume or args.evaluate:
            args = parse_args(load_checkpoint(path, args.env_id)["args"])
        check_args(args)
        if args.plan:
            make_envs(replace(args, async_envs=False)).close()
            lines = [f"advice     if {number:>2} times in a row: {text}" for _, number, _, text in ADVICE]
            say("\n".join([plan(args), *lines]))
        elif args.evaluate:
            evaluate(Path(args.evaluate), args)
        else:
            for name in {"SIGINT", "SIGTERM", "SIGHUP"} & set(dir(signal)):  # Windows has no SIGHUP
                number = getattr(signal, name)
                # Ignore SIGHUP under nohup, but never SIGINT, which shells ignore for background jobs.
                if name == "SIGINT" or signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, request_stop)
            train(args, stop)
    except (Refused, Diverged) as error:
        notes = getattr(error, "__notes__", [])
        print(f"{Path(sys.argv[0]).name}: {error}", *notes, sep="\n", file=sys.stderr)
        sys.exit(2 if isinstance(error, Refused) else 1)
    finally:
        for process in multiprocessing.active_children():  # of environments, if not all could be made
            process.kill()
    if stop:
        sys.exit(128 + stop[0])


if __name__ == "__main__":
    main()
