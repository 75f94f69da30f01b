# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.5", "numpy", "tensorboard", "tyro>=0.9.1"]
# ///
"""Proximal Policy Optimization (PPO) for thousands of environments on a GPU, in one file.

    python ppo_gpu.py
    python ppo_gpu.py --env-id CheetahRun
    torchrun --nproc-per-node 4 ppo_gpu.py --env-id CheetahRun

Observations, actions and rewards are tensors that stay on the GPU. Without --env-id, it trains pendulums that
are written in PyTorch. Other names are those of MuJoCo Playground, which needs playground_tasks.py. For your
own environments, or those of Isaac Lab, mjlab or ManiSkill, write a class like `Pendulums` that is called
with `Args`, and name it: --env-id my_module:MyClass. Under torchrun, each process has a GPU with environments
of its own, and all train the same networks. A trained policy can be exported: `load_policy` returns a module.

  [PPO]     Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE]     Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
            Estimation", arXiv:1506.02438
  [Limits]  Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv:1712.00378
  [Matters] Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
  [37]      Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog
  [Walk]    Rudin et al. 2022, "Learning to Walk in Minutes Using Massively Parallel Deep Reinforcement
            Learning", arXiv:2109.11978

PPO comes first: networks, equations, then the algorithm up to `train`, which repeats:

    collect_rollout        acts for T steps in N environments
    normalize_rollout      normalises observations and rewards, and updates the running statistics
    make_batch             estimates values and advantages (compute_gae)
    update                 takes K epochs of gradient steps on minibatches, each on the loss of ppo_loss

Shapes: T steps per rollout, N environments, D numbers per observation, A per action, B = T x N transitions.
"""

import io
import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import IO, Any, Literal, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:  # the trailing comments become --help
    exp_name: str = Path(sys.argv[0]).stem or "ppo_gpu"  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    resume: str | None = None  # resume from this checkpoint or `latest`; flags override its settings
    evaluate: str | None = None  # only evaluate this checkpoint or `latest`, greedily
    init: str | None = None  # start a new run from the networks and normalisers of this checkpoint
    eval_every: float = 0  # also evaluate every so many steps (0: never); best.pt has the best mean return
    stop_at: float | None = None  # end training once an evaluation of --eval-every reaches this mean return
    capture_video: bool = False  # record an episode of the evaluation in the run folder (needs moviepy)
    track: bool = False  # also log to Weights & Biases, to its WANDB_PROJECT (needs wandb)
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda or mps
    num_threads: int = 1  # CPU threads of PyTorch: for small networks, one is fastest
    cuda_graphs: bool = True  # record CUDA graphs; switch it off to debug, or if a change cannot be recorded
    compile: bool = False  # on a CPU, compile the gradient step: faster after some 20 s (PyTorch >= 2.13)
    keep_every: float | None = None  # keep a checkpoint every so many transitions, beside the last one

    # Environment
    env_id: str = "Pendulum"  # Pendulum, `module:MyClass`, or a task of playground_tasks.py
    env_kwargs: str = "{}"  # arguments of MyClass besides Args, or changes of a task's config, as JSON
    num_envs: int = 1024  # N: environments that step in parallel, in each process

    # PPO
    total_timesteps: float = 1_000_000  # total number of transitions, also as 1e6
    num_steps: int = 16  # T: steps of each environment per rollout
    learning_rate: float = 1e-3  # Adam's step size; with --desired-kl, its initial value
    anneal_lr: bool = True  # decay the learning rate linearly to 0 (not with --desired-kl)
    desired_kl: float | None = None  # adapt the learning rate to hold this KL divergence (0.01, in nats)
    gamma: float = 0.95  # γ: discount factor
    gae_lambda: float = 0.95  # λ of GAE: lower values give more bias, higher ones more variance
    update_epochs: int = 10  # K: epochs per rollout
    num_minibatches: int = 8  # minibatches per epoch, one gradient step each
    clip_coef: float = 0.2  # ε: the ratio of new to old probability is clipped to 1 ± ε
    clip_vloss: bool = False  # also clip the change of the value to ±ε
    ent_coef: float = 0.0  # c₂: weight of the entropy bonus
    vf_coef: float = 0.5  # c₁: weight of the value loss, ½ (V - return)²
    max_grad_norm: float = 1.0  # clip the gradient to this global norm
    norm_obs: bool = True  # normalise observations by running mean and std
    norm_rewards: bool = True  # divide rewards by the running std of the discounted return
    init_log_std: float = -0.5  # initial log standard deviation of actions
    activation: Literal["elu", "tanh", "relu", "silu"] = "elu"  # activation function of the hidden layers
    hidden_sizes: tuple[int, ...] = (64, 64)  # widths of the hidden layers of actor and critic


# Allowed values, limits included. With more than 30 epochs, or ε above 0.3, the policy moves too far from the
# one that collected the data. To study what is refused, change this table in your program. A setting that you
# add is checked if it has an entry here.
BOUNDS = {
    "seed": (0, 2**31), "eval_every": (0, math.inf), "stop_at": (-1e15, 1e15), "num_threads": (1, 1024),
    "keep_every": (1, math.inf), "num_envs": (1, math.inf), "num_steps": (1, math.inf),
    "total_timesteps": (1, 1e15), "learning_rate": (0, 1), "desired_kl": (1e-6, 10), "gamma": (0, 1),
    "gae_lambda": (0, 1), "update_epochs": (1, 30), "num_minibatches": (1, math.inf),
    "clip_coef": (1e-3, 0.3), "ent_coef": (0, 100), "vf_coef": (0, 100), "max_grad_norm": (1e-6, math.inf),
    "init_log_std": (-10, 2),
}  # fmt: skip

ADAPTED_RATES = 1e-5, 1e-2  # limits of the learning rate with --desired-kl: those of RSL-RL
# Defaults for all other environments. γ and the learning rate are those of Playground for its control suite.
OTHERS = Args(num_envs=2048, num_steps=32, total_timesteps=30_000_000, gamma=0.995, update_epochs=8,
              num_minibatches=16, hidden_sizes=(256, 256))  # fmt: skip
# Set by torchrun: the number of processes, the index of this one, and its index on this machine.
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if PROCESSES > 1 else 0
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0)) if PROCESSES > 1 else 0
if PROCESSES > 1 and torch.cuda.device_count() > LOCAL_RANK:
    torch.cuda.set_device(LOCAL_RANK)  # what "cuda" means in this process, also for environments of your own

# ------------------------------------------------- Networks -------------------------------------------------


def mlp(inputs: int, outputs: int, last_gain: float, args: Args) -> nn.Sequential:
    """Hidden layers and a linear one, with orthogonal weights and zero biases ([37], detail 2)."""
    function = {"elu": nn.ELU, "tanh": nn.Tanh, "relu": nn.ReLU, "silu": nn.SiLU}[args.activation]
    sizes, layers = [inputs, *args.hidden_sizes, outputs], []
    for size, next_size in pairwise(sizes):
        layers += [nn.Linear(size, next_size), function()]
    layers.pop()  # none after the last layer
    for layer in layers[::2]:
        nn.init.orthogonal_(layer.weight, last_gain if layer is layers[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class RunningMoments(nn.Module):
    """Mean and variance [D] of everything seen so far (the parallel algorithm of Chan et al. 1983)."""

    def __init__(self, size: int):
        super().__init__()
        self.mean, self.var = nn.Buffer(torch.zeros(size)), nn.Buffer(torch.ones(size))
        self.count = nn.Buffer(torch.zeros(()))

    def update(self, x: Tensor) -> None:
        """Include x [B, D], and that of all other processes."""
        mean = average(x.mean(0))
        var = average((x - mean).square().mean(0))
        new = len(x) * PROCESSES
        share = new / (self.count + new)  # weight of the new data
        delta = mean - self.mean
        self.var.lerp_(var, share).add_(share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.add_(new)


class Agent(nn.Module):
    """Actor and critic, with the running statistics that normalise their inputs and the rewards."""

    def __init__(self, args: Args, obs_size: int, actor_obs_size: int, action_size: int):
        super().__init__()
        self.sizes = nn.Buffer(torch.tensor([obs_size, actor_obs_size, action_size]))  # for load_policy
        self.actor_obs_size = actor_obs_size  # the critic may see more (Pinto et al. 2017, arXiv:1710.06542)
        self.actor = mlp(actor_obs_size, action_size, 0.01, args)  # means near 0
        self.log_std = nn.Parameter(args.init_log_std * torch.ones(action_size))  # the same in all states
        self.critic = mlp(obs_size, 1, 1.0, args)
        self.obs_moments, self.return_moments = RunningMoments(obs_size), RunningMoments(1)
        self.norm_obs = args.norm_obs

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations [..., D] as the networks see them: (x - mean) / std within ±10, or unchanged.

        The std is at least 0.01, so that a number that was constant so far may begin to change.
        """
        if not self.norm_obs:
            return obs
        mean, std = self.obs_moments.mean, self.obs_moments.var.sqrt().clamp(min=1e-2)
        return ((obs - mean) / std).clamp(-10, 10)

    def policy(self, obs: Tensor) -> Tensor:
        """π(·|s), as means and log standard deviations [..., 2A], for normalised observations [..., D]."""
        means = self.actor(obs[..., : self.actor_obs_size])
        return torch.cat([means, self.log_std.expand_as(means)], -1)

    def value(self, obs: Tensor) -> Tensor:
        """V(s) [...] for normalised observations [..., D]."""
        return self.critic(obs).squeeze(-1)


# ------------------------------------------------- Equations ------------------------------------------------


# `Agent.policy` and these five functions are all that knows the distribution of actions.


def sample(policy: Tensor) -> Tensor:
    """Actions [N, A] drawn from π(·|s) [N, 2A]."""
    means, log_stds = policy.chunk(2, -1)
    return means + log_stds.exp() * torch.randn_like(means)


def most_likely(policy: Tensor) -> Tensor:
    """The most likely actions [..., A] of π(·|s) [..., 2A]: the means."""
    means, _ = policy.chunk(2, -1)
    return means


def log_prob(policy: Tensor, actions: Tensor) -> Tensor:
    """log π(a|s) = -Σ_i (½ ((a_i - μ_i) / σ_i)² + log σ_i + ½ log 2π) [B] of actions [B, A]."""
    means, log_stds = policy.chunk(2, -1)
    distances = (actions - means) / log_stds.exp()
    return -(0.5 * distances.square() + log_stds + 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(policy: Tensor) -> Tensor:
    """H(π) = Σ_i (log σ_i + ½ log 2πe) [B], in nats."""
    _, log_stds = policy.chunk(2, -1)
    return (log_stds + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def kl_divergence(old_policy: Tensor, policy: Tensor) -> Tensor:
    """KL(π_old ‖ π) = Σ_i (log σ_i - log σ'_i + (σ'_i² + (μ'_i - μ_i)²) / 2σ_i² - ½) [B], with ' for old."""
    old_means, old_log_stds = old_policy.chunk(2, -1)
    means, log_stds = policy.chunk(2, -1)
    squares = (2 * old_log_stds).exp() + (old_means - means).square()
    return (log_stds - old_log_stds + 0.5 * squares / (2 * log_stds).exp() - 0.5).sum(-1)


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages and returns [T, N] by generalised advantage estimation ([GAE], equations 11 to 16).

        δ_t = r_t + γ V(s_{t+1}) (1 - terminated_t) - V(s_t)
        A_t = δ_t + γλ (1 - (terminated_t ∨ truncated_t)) A_{t+1}
        return_t = A_t + V(s_t), the critic's target

    All tensors are [T, N]. s_{t+1} is the state that step t led to, also where it ended the episode. Both
    kinds of end stop the sum, but at a time limit (truncated) V(s_{t+1}) still counts ([Limits]).
    """
    next_values = torch.where(terminated, 0, next_values)  # not a product: 0 * NaN is NaN
    deltas = rewards + gamma * next_values - values
    discounts = gamma * gae_lambda * ~(terminated | truncated)
    advantages = torch.zeros_like(deltas)
    advantage = torch.zeros_like(deltas[0])  # A_T = 0: what follows the rollout is in V(s_T)
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + discounts[t] * advantage
        advantages[t] = advantage
    return advantages, advantages + values


class Batch(NamedTuple):
    """B transitions. To add a quantity, add a field, fill it in `make_batch`, and use it in `ppo_loss`."""

    obs: Tensor  # [B, D], normalised
    actions: Tensor  # [B, A]
    old_policy: Tensor  # [B, 2A], π_old(·|s) as means and log standard deviations
    old_values: Tensor  # [B], V_old(s)
    advantages: Tensor  # [B]
    returns: Tensor  # [B]
    rewards: Tensor  # [B], scaled


@dataclass
class State:
    """Progress: what a checkpoint holds besides settings, agent and optimizer."""

    global_step: int = 0  # transitions so far
    returns: list[float] = field(default_factory=list)  # of 100 of the last episodes
    buffers: dict[str, Tensor] = field(default_factory=dict)  # of the environments' `state_dict`
    best_return: float = -math.inf  # of best.pt, in the evaluation that chose it
    best_step: int = 0  # of best.pt
    last_evaluation: int = 0  # step of the last evaluation of --eval-every


def ppo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, and metrics: [PPO], equation 9, negated, with ½ in the value loss."""
    policy, values = agent.policy(batch.obs), agent.value(batch.obs)
    advantages = batch.advantages - average(batch.advantages.mean())  # of the minibatches of all processes
    advantages = advantages / (average(advantages.square().mean()).sqrt() + 1e-8)

    log_ratio = log_prob(policy, batch.actions) - log_prob(batch.old_policy, batch.actions)
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s)
    # L^CLIP = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] ([PPO], equation 7)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_losses = -torch.min(ratio * advantages, clipped_ratio * advantages)

    value_losses = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:  # the larger of two losses: of V, and of V clipped to V_old ± ε ([Matters], §3)
        change = (values - batch.old_values).clamp(-args.clip_coef, args.clip_coef)
        value_losses = torch.max(value_losses, 0.5 * (batch.old_values + change - batch.returns).square())

    entropies = entropy(policy)
    loss = (policy_losses + args.vf_coef * value_losses - args.ent_coef * entropies).mean()
    with torch.no_grad():  # scalars, averaged over the gradient steps, then logged as losses/<name>
        metrics = {
            "policy_loss": policy_losses.mean(),
            "value_loss": value_losses.mean(),
            "entropy": entropies.mean(),
            "std": policy.chunk(2, -1)[1].exp().mean(),
            "kl": kl_divergence(batch.old_policy, policy).mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),  # k3 of Schulman 2020, "Approximating KL Divergence"
            "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
        }
    return loss, metrics


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout(NamedTuple):
    """T steps of N environments, which are reset in the step that ends an episode."""

    obs: Tensor  # [T, N, D], s_t
    next_obs: Tensor  # [T, N, D], s_{t+1}, also where step t ended the episode
    actions: Tensor  # [T, N, A], a_t, as `sample` draws it
    policies: Tensor  # [T, N, 2A], π_old(·|s_t), as `Agent.policy` gives it
    rewards: Tensor  # [T, N], r_t
    terminated: Tensor  # [T, N]
    truncated: Tensor  # [T, N]
    # Of the episode, up to and with this step:
    discounted_returns: Tensor  # [T, N]
    episode_returns: Tensor  # [T, N], NaN in the first episodes, which are shortened
    episode_lengths: Tensor  # [T, N]


@torch.no_grad()
def collect_rollout(
    envs: Any, choose: Callable, current_obs: Tensor, sums: Tensor, args: Args
) -> tuple[Rollout, dict[str, Tensor]]:
    """Act for T steps by `choose`. Returns the rollout, and the means of what the environments log, by name.

    Observations [N, D] and sums [3, N], for the last fields of `Rollout`, become those after the steps.
    """
    rows, logs = [], []
    for _ in range(args.num_steps):
        actions, policies = choose(current_obs)
        obs, rewards, terminated, truncated, next_obs, diverged = take_step(envs, actions)
        sums[0] *= args.gamma
        sums += torch.stack([rewards, rewards, torch.ones_like(rewards)])
        row = current_obs, next_obs, actions, policies, rewards, terminated, truncated, *sums
        rows.append([x.clone() for x in row])  # copies: environments and CUDA graphs reuse memory
        logs.append({name: x.clone() for name, x in (log_of(envs) | {"diverged": diverged}).items()})
        sums.masked_fill_(terminated | truncated, 0)
        current_obs.copy_(obs)
    return Rollout(*(torch.stack(column) for column in zip(*rows, strict=True))), mean_logs(logs)


def take_step(envs: Any, actions: Tensor) -> tuple[Tensor, ...]:
    """A step of the environments. Returns what `step` does, and where a simulation diverged [N].

    A simulation diverged where the reward, or a number of next_obs, is NaN, infinite, or beyond 1e19. That
    ends the episode if the environments terminate there, or have `reset_where`. Such a reward counts as 0.
    """
    obs, rewards, terminated, truncated, next_obs = envs.step(actions.clone())  # theirs to change
    # A sum is NaN or infinite if one of its terms is. Squares, as running statistics have them.
    diverged = ~(rewards.square() + next_obs.square().sum(-1)).isfinite()
    if hasattr(envs, "reset_where"):
        restarted = diverged & ~terminated
        obs = torch.where(restarted.unsqueeze(-1), envs.reset_where(restarted), obs)
        terminated = terminated | diverged  # so that next_obs counts nowhere
    rewards = rewards.masked_fill(terminated & ~rewards.square().isfinite(), 0)
    return obs, rewards, terminated, truncated, next_obs, diverged


@torch.no_grad()
def normalize_rollout(agent: Agent, rollout: Rollout, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised obs and next_obs [T, N, D], and scaled rewards [T, N]. Updates the running statistics.

    Observations are normalised by the statistics that acting used, before they are updated. Rewards are
    divided by the running std, after its update, of the discounted return R_t = γ R_{t-1} + r_t, which starts
    from 0 in each episode, and clipped to ±10 ([Matters], §3).
    """
    obs, next_obs = agent.normalize(rollout.obs), agent.normalize(rollout.next_obs)
    agent.obs_moments.update(rollout.obs.flatten(0, 1))
    rewards = rollout.rewards
    if args.norm_rewards:
        agent.return_moments.update(rollout.discounted_returns.reshape(-1, 1))
        rewards = (rewards * torch.rsqrt(agent.return_moments.var + 1e-8)).clamp(-10, 10)
    return obs, next_obs, rewards


@torch.no_grad()
def make_batch(
    agent: Agent, rollout: Rollout, obs: Tensor, next_obs: Tensor, rewards: Tensor, args: Args
) -> Batch:
    """The transitions of a rollout, with values and advantages of the current critic.

    `obs`, `next_obs` and `rewards` are what `normalize_rollout` returned. Where the task ended an episode,
    `next_obs` may be NaN.
    """
    values, next_values = agent.value(obs), agent.value(next_obs)
    ends = rollout.terminated, rollout.truncated
    advantages, returns = compute_gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    return Batch(
        obs=obs.flatten(0, 1),
        actions=rollout.actions.flatten(0, 1),
        old_policy=rollout.policies.flatten(0, 1),
        old_values=values.flatten(),
        advantages=advantages.flatten(),
        returns=returns.flatten(),
        rewards=rewards.flatten(),
    )


def compute_gradients(agent: Agent, minibatch: Batch, args: Args) -> dict[str, Tensor]:
    """Compute the gradients of the loss, clipped to --max-grad-norm, in the agent. Returns metrics."""
    loss, metrics = ppo_loss(agent, minibatch, args)
    loss.backward()
    if PROCESSES > 1:  # one message for all of them
        gradients = [parameter.grad for parameter in agent.parameters() if parameter.grad is not None]
        nn.utils.vector_to_parameters(average(nn.utils.parameters_to_vector(gradients)), gradients)
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return {name: metric.detach() for name, metric in metrics.items()}


def update(
    agent: Agent, optimizer: Adam, compute: Callable, batch: Batch, orders: Tensor, args: Args
) -> dict[str, Tensor]:
    """K epochs of gradient steps on minibatches, by `compute`: `compute_gradients`, compiled or not.

    `orders` [K, B] shuffle the batch in each epoch; they are drawn outside, since an update that is recorded
    as a CUDA graph gets new numbers as inputs. Returns metrics: of the batch, and means over gradient steps.
    """
    steps = []
    for order in orders:
        for rows in order.tensor_split(args.num_minibatches):
            minibatch = Batch(*(column[rows] for column in batch))
            optimizer.zero_grad()
            metrics = compute(agent, minibatch, args)
            if args.desired_kl is not None and steps:  # before the first step, the policy is the old one
                adapt_learning_rate(optimizer, average(metrics["kl"].clone()), args.desired_kl)
            metrics["charts/learning_rate"] = optimizer.param_groups[0]["lr"].clone()
            optimizer.step()
            steps.append(metrics)
    means = {name: torch.stack([step[name] for step in steps]).mean() for name in steps[0]}
    means["std"] = steps[0]["std"]  # of the policy that acted
    means["first_approx_kl"] = steps[0]["approx_kl"]  # before the first step: 0, up to rounding
    means["kl"] = steps[-1]["kl"]  # of the last minibatch, before its step
    means |= batch_metrics(batch, args)
    return dict(zip(means, average(torch.stack([*means.values()])), strict=True))


def batch_metrics(batch: Batch, args: Args) -> dict[str, Tensor]:
    """How well V_old predicts the returns, and the shares of numbers clipped to ±10.

    If all returns are equal, there is nothing to predict, and NaN, which is not logged.
    """
    errors = batch.returns - batch.old_values  # of the critic
    variance, mean_square = batch.returns.var(correction=0), batch.returns.square().mean()
    can_predict = variance > 1e-12 * mean_square  # not only rounding
    ratios = {
        "explained_variance": 1 - errors.var(correction=0) / variance,
        "critic_error": (errors.square().mean() / mean_square).sqrt(),
    }
    metrics = {name: torch.where(can_predict, ratio, torch.nan) for name, ratio in ratios.items()}
    if args.norm_obs:  # where many are clipped, large ones look the same
        metrics["obs_clipfrac"] = (batch.obs.abs() >= 10).float().mean()
    if args.norm_rewards:
        metrics["reward_clipfrac"] = (batch.rewards.abs() >= 10).float().mean()
    return metrics


def make_optimizer(agent: Agent, args: Args, saved: dict) -> Adam:
    """Adam, new or as in a checkpoint that is resumed. Its learning rates are tensors, for CUDA graphs."""
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # ε: [37], detail 3
    for group in optimizer.param_groups:  # groups of your own keep their ratio to --learning-rate
        group["lr_ratio"] = group["lr"] / args.learning_rate if args.learning_rate > 0 else 1
    if args.resume is not None:
        optimizer.load_state_dict(saved["optimizer"])
    for group in optimizer.param_groups:
        group.setdefault("lr_ratio", 1)  # of version 0.2
        group.update(lr=torch.as_tensor(group["lr"], device=args.device), capturable=args.device == "cuda")
    if args.resume is not None and args.learning_rate != saved["args"]["learning_rate"]:
        set_learning_rate(optimizer, args.learning_rate)  # otherwise, an adapted rate continues
    return optimizer


def set_learning_rate(optimizer: Adam, learning_rate: float) -> None:
    """Set the learning rate in place, as a CUDA graph wants it."""
    for group in optimizer.param_groups:
        group["lr"].fill_(learning_rate * group["lr_ratio"])


def adapt_learning_rate(optimizer: Adam, kl: Tensor, desired_kl: float) -> None:
    """Divide the learning rate by 1.5 if the KL divergence is more than twice the desired one ([Walk]).

    Multiply it by 1.5 if the divergence is less than half.
    """
    factor = torch.where(kl > 2 * desired_kl, 1 / 1.5, torch.where(kl < desired_kl / 2, 1.5, 1.0))
    for group in optimizer.param_groups:
        low, high = (limit * group["lr_ratio"] for limit in ADAPTED_RATES)
        group["lr"].mul_(factor).clamp_(low, high)


def recorded(function: Callable) -> Callable:
    """A function of tensors that is recorded as a CUDA graph: its many small kernels then start as one.

    A graph repeats the same kernels on the same memory: inputs keep their shapes, each call overwrites the
    results of the one before, and Python code does not run again. All else that the function reads or
    changes, such as weights, must stay in its place, and numbers that change must be tensors. The first call
    is an ordinary one, in which libraries choose their kernels and Adam makes its state. The second records,
    which computes nothing, and then replays, as all later ones do.
    See "CUDA Graphs" in PyTorch's notes on CUDA semantics.
    """
    graph, inputs, results = None, None, None

    def call(*values: Tensor) -> Any:
        nonlocal graph, inputs, results
        if inputs is None:
            inputs = [x.clone() for x in values]
            return function(*values)
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # simulators have threads
                    results = function(*inputs)
            except RuntimeError as error:
                error.add_note("It cannot be recorded as a CUDA graph: see --no-cuda-graphs, and Pendulums.")
                raise
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)
        graph.replay()
        return results

    return call


def can_record(args: Args) -> bool:
    """Whether functions are recorded as CUDA graphs."""
    return args.cuda_graphs and args.device == "cuda"


def train(args: Args, envs: Any = None, eval_envs: Any = None, show_commands: bool = False) -> dict:
    """PPO ([PPO], Algorithm 1), then a greedy evaluation. If killed, it loses a minute or an iteration.

    It trains in `envs`, or in those of `make_envs`. With `eval_every`, evaluations need others, `eval_envs`.
    Returns "checkpoint" (its path), "training_return" (of 100 of the last episodes), "greedy_returns",
    "best_return", for which best.pt was chosen (-inf without one), "best_step", and "best_replayed", its
    returns in the episodes of "greedy_returns" (empty without one). Raises `Refused`, a `ValueError`, where
    training would be wrong. With `resume`, settings come from `args`, not from the checkpoint. It seeds the
    global random generators, sets PyTorch's threads, and writes to runs/. Under torchrun, the first process
    logs, saves and evaluates.
    """
    STOP.clear()
    check_settings(args)
    plain = {name: value.item() for name, value in vars(args).items() if isinstance(value, np.generic)}
    args = replace(args, **plain)  # a checkpoint has no numbers of NumPy
    torch.set_num_threads(args.num_threads)
    if envs is not None and args.env_id == Args.env_id and type(envs) is not Pendulums:
        args.env_id = type(envs).__name__  # so that a resumed run does not get other environments
    path = run_path(args)
    state = State()
    saved = load_start(args)
    if args.resume is not None:
        vars(state).update(saved["state"])
    envs, eval_envs = make_both_envs(args, envs, eval_envs)
    seed_everything(hash_seed(args.seed, state.global_step, RANK))  # a resumed run has new episodes
    agent = Agent(args, envs.obs_size, envs.actor_obs_size, envs.action_size).to(args.device)
    if saved:
        agent.load_state_dict(saved["agent"])
    optimizer = make_optimizer(agent, args, saved)
    if PROCESSES > 1:  # after Adam, which imports modules that would keep the connection open at exit
        connect(agent, args)
    if args.resume is not None:
        restore_buffers(envs, saved, args)
    current_obs, sums = begin_episodes(envs, args)
    seed_everything(hash_seed(args.seed, state.global_step, RANK, 1))  # again: reset may have done it
    compute = compiled(compute_gradients) if args.compile else compute_gradients

    # The parts of an iteration, as functions of tensors alone.
    @fast_products()
    @torch.no_grad()
    def choose(obs: Tensor) -> tuple[Tensor, Tensor]:
        policies = agent.policy(agent.normalize(obs))
        return sample(policies), policies

    def collect() -> tuple[Rollout, dict[str, Tensor]]:
        return collect_rollout(envs, choose, current_obs, sums, args)

    @fast_products()
    def prepare(*columns: Tensor) -> Batch:
        rollout = Rollout(*columns)
        return make_batch(agent, rollout, *normalize_rollout(agent, rollout, args), args)

    @fast_products()
    def learn(orders: Tensor, *columns: Tensor) -> dict[str, Tensor]:
        return update(agent, optimizer, compute, Batch(*columns), orders, args)

    if can_record(args):
        prepare, learn = recorded(prepare), recorded(learn)
        if getattr(envs, "recordable", False):
            collect = recorded(collect)  # all T steps are one graph
        else:
            choose = recorded(choose)
    run = Run(path, args, agent, optimizer, state) if RANK == 0 else None

    while state.global_step < args.total_timesteps and not stopped(run, args):
        if args.desired_kl is None:
            remaining = max(0, 1 - state.global_step / args.total_timesteps)
            set_learning_rate(optimizer, args.learning_rate * (remaining if args.anneal_lr else 1))
        begun = time.perf_counter()
        rollout, logs = collect()
        logs["diverged"] = average(logs["diverged"])
        rollout.rewards[-1, -1].item()  # reading a number waits for the GPU
        collected = time.perf_counter()
        batch = prepare(*rollout)
        orders = [torch.randperm(len(batch.obs), device=args.device) for _ in range(args.update_epochs)]
        tensors = learn(torch.stack(orders), *batch)
        metrics = dict(zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True))
        metrics["charts/seconds_collecting"] = collected - begun
        metrics["charts/seconds_learning"] = time.perf_counter() - collected
        state.global_step += rollout.rewards.numel() * PROCESSES
        state.buffers = buffers_of(envs)  # each time: what is not recorded may replace them
        if run is not None:
            run.log(metrics, rollout, logs)
        if run is not None and args.eval_every > 0:
            run.evaluate_if_due(eval_envs)
    if PROCESSES > 1:
        del prepare, learn  # NCCL waits for graphs that use it
        dist.destroy_process_group()
    return {} if run is None else run.finish(eval_envs, show_commands)


# ========================== End of PPO. What follows is what training needs around it ======================


STOP = threading.Event()  # set by Ctrl-C and SIGTERM: training ends after the iteration


class Refused(ValueError):  # noqa: N818
    """Raised at the start for what would train wrongly without an error, or fail only after training."""


def hash_seed(*numbers: int) -> int:
    """A seed from several numbers. Environment i gets this + i; unhashed, seeds 1 and 2 would share most."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1  # some simulators take only 31 bits


def seed_everything(seed: int) -> None:
    """Seed the generators of PyTorch, and of Python and NumPy, from which some environments draw."""
    for function in (torch.manual_seed, random.seed, np.random.seed):
        function(seed)


@contextmanager
def isolated_random_numbers(seed: int) -> Iterator[None]:
    """Seed Python's, NumPy's and PyTorch's CPU generators inside the `with` block.

    After it, they are restored, those of GPUs included, so that training can go on.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    with torch.random.fork_rng(range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0)):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.default_generator.manual_seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def connect(agent: Agent, args: Args) -> None:
    """Connect the processes, and give all the networks of the first one."""
    if not dist.is_initialized():
        # The others wait while the first process evaluates.
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", timeout=timedelta(days=1))
    for x in agent.state_dict().values():
        dist.broadcast(x, 0)


def average(x: Tensor) -> Tensor:
    """The mean over all processes, in place."""
    if PROCESSES > 1:
        dist.all_reduce(x)
        x /= PROCESSES
    return x


def stopped(run: Any, args: Args) -> bool:
    """Whether training is to end: all processes end after the same iteration. Only the first has a run."""
    reached = run is not None and run.stop_at_reached
    if PROCESSES == 1:
        return STOP.is_set() or reached
    signalled, reached = average(torch.tensor([STOP.is_set(), reached], device=args.device).float()).tolist()
    if signalled > 0:
        STOP.set()
    return signalled + reached > 0


@contextmanager
def fast_products() -> Iterator[None]:
    """Matrix products in TF32 inside the `with` block, on GPUs: for networks, not for simulations."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def compiled(function: Callable) -> Callable:
    """`compute_gradients`, compiled with the backward pass in it."""
    torch._dynamo.reset()  # PyTorch limits recompilations per process, and each run compiles anew
    torch._dynamo.config.trace_autograd_ops = True  # lets `backward` be part of the graph
    return torch.compile(function, fullgraph=True)  # with fullgraph, what cannot be compiled is an error


def check_settings(args: Args) -> None:
    """Raise `Refused` for settings that would train wrongly, or have no effect."""
    if forgotten := {setting.name for setting in fields(args)} - {setting.name for setting in fields(Args)}:
        raise Refused(f"checkpoints would forget {forgotten}: replace this module's Args, too")
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # NaN is refused, too
            raise Refused(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
    if min(args.hidden_sizes, default=1) < 1:
        raise Refused("--hidden-sizes must be at least 1")
    if args.num_envs * args.num_steps < 2 * args.num_minibatches:
        raise Refused("each minibatch needs two transitions or more: lower --num-minibatches")
    low, high = ADAPTED_RATES
    if args.desired_kl is not None and not low <= args.learning_rate <= high:
        raise Refused(f"--desired-kl adapts the learning rate from {low} to {high}: it must start there")
    if args.stop_at is not None and args.eval_every == 0:
        raise Refused("--stop-at needs --eval-every")
    if args.device not in ("cpu", "cuda", "mps"):
        raise Refused(f"--device must be cpu, cuda or mps, not {args.device}: see CUDA_VISIBLE_DEVICES")
    if args.compile and (args.device != "cpu" or PROCESSES > 1):
        raise Refused("--compile is for one process with --device cpu; GPUs have CUDA graphs")


# ------------------------------------------------- Environments --------------------------------------------


class Pendulums(nn.Module):
    """N pendulums: Gymnasium's Pendulum-v1 in PyTorch, and an example of environments. They must have:

    - `obs_size`, `actor_obs_size` and `action_size`, and `max_steps`, the time limit
    - `steps` [N] of the current episodes, a tensor that can be written to: at first, `train` writes random
      numbers, so that time limits are spread. Means over an episode need a counter of their own.
    - `reset` and `step`, as below

    They may have:

    - `reset_where`, as below: a simulation that diverges then starts anew, where it would end the run. It is
      called after each step, mostly for none. Numbers that are impossible, but finite, are the environments'
      to end: a single one of 1e10 spoils the running statistics for long.
    - `recordable`, if tensors of `state_dict` are all that `step` changes, each in its place, and the names
      in `log` stay the same. Then a CUDA graph records all steps.
    - `state_dict`, as modules have it. Its tensors are in the checkpoint, also for an evaluation: the level
      of a curriculum, for example, which `reset` must then leave as it is.
    - `log`, a dict of tensors, each of one number or [N]. The iteration's mean, without NaN, is logged as
      `env/...`.
    - `snapshot` and `render`, as `Playground` has them, for --capture-video.
    """

    obs_size = actor_obs_size = 3  # the actor sees the first numbers of an observation, the critic all
    action_size, max_steps = 1, 200
    recordable = True

    def __init__(self, args: Args):
        super().__init__()
        self.steps = nn.Buffer(torch.zeros(args.num_envs, device=args.device))
        self.angle, self.speed = nn.Buffer(self.steps.clone()), nn.Buffer(self.steps.clone())  # rad, rad/s

    def observe(self) -> Tensor:
        return torch.stack([self.angle.cos(), self.angle.sin(), self.speed], -1)

    def reset(self) -> Tensor:
        """Start new episodes everywhere. Returns their first observations [N, D]."""
        return self.reset_where(torch.ones_like(self.steps, dtype=torch.bool))

    def reset_where(self, where: Tensor) -> Tensor:
        """Start new episodes where this is true [N]. Returns the observations [N, D] of all environments."""
        self.angle.copy_(torch.where(where, math.pi * (2 * torch.rand_like(self.angle) - 1), self.angle))
        self.speed.copy_(torch.where(where, 2 * torch.rand_like(self.speed) - 1, self.speed))
        self.steps.mul_(~where)
        return self.observe()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Apply actions [N, A], in units of their bounds, and start a new episode wherever one has ended.

        Returns the observations [N, D] to act on next; rewards, terminated and truncated (by the time limit),
        each [N]; and the observations [N, D] that the actions led to, before new episodes started.

        If a simulator does not keep the latter, as Isaac Lab, take the observation before the step, but only
        where an episode ended: at a time limit, its value stands in for that of the last state, as in RSL-RL.
        Where a simulation diverged, so that a number is NaN or infinite, terminate, or have `reset_where`.
        What changes within an episode, such as a command or noise, is drawn once, before next_obs is taken.
        """
        torque = 2 * actions.squeeze(-1).clamp(-1, 1)  # N m
        error = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        rewards = -(error**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed.add_(0.05 * (15 * self.angle.sin() + 3 * torque)).clamp_(-8, 8)
        self.angle.add_(0.05 * self.speed)
        self.steps.add_(1)
        next_obs, truncated = self.observe(), self.steps >= self.max_steps
        return self.reset_where(truncated), rewards, torch.zeros_like(truncated), truncated, next_obs


def make_envs(args: Args) -> Any:
    """N environments on the device. Put your own here, with what `Pendulums` has."""
    seed_everything(hash_seed(args.seed, 2**42, RANK))  # for what they draw when they are made
    name = args.env_id if ":" in args.env_id else "playground_tasks:Playground"
    make = Pendulums if args.env_id == "Pendulum" else resolve_name(name)
    return make(args, **json.loads(args.env_kwargs))


def make_both_envs(args: Args, envs: Any, eval_envs: Any) -> tuple[Any, Any]:
    """The environments of training and of evaluations: those that are given, or new ones, which are tried.

    With --eval-every, these are others, since the episodes of training go on. The first process evaluates.
    Raises `Refused` for environments with which training or evaluations would be wrong.
    """
    was_given = envs is not None
    envs = envs if was_given else make_envs(args)
    check_envs(envs, args)
    if args.eval_every == 0 or RANK > 0:
        return envs, envs
    eval_envs = make_envs(args) if eval_envs is None and not was_given else eval_envs
    if eval_envs is None or eval_envs is envs:
        raise Refused("with --eval-every, train needs eval_envs: the episodes of envs must go on")
    check_envs(eval_envs, args)
    if eval_envs.steps.data_ptr() == envs.steps.data_ptr():
        raise Refused("eval_envs has the tensors of envs, whose episodes must go on")
    for name in ("obs_size", "actor_obs_size", "action_size"):
        if getattr(eval_envs, name) != getattr(envs, name):
            raise Refused(f"eval_envs has another {name} than envs")
    return envs, eval_envs


@torch.no_grad()
def check_envs(envs: Any, args: Args) -> None:
    """Try a step. Raises `Refused` for environments that are not as `Pendulums` says."""

    def kind(x: Any) -> str:
        return f"{x.dtype} {[*x.shape]} on {x.device.type}" if isinstance(x, Tensor) else type(x).__name__

    if args.capture_video and not (hasattr(envs, "render") and hasattr(envs, "snapshot")):
        raise Refused("--capture-video needs environments with snapshot and render")
    if args.capture_video and not find_spec("moviepy"):
        raise Refused("--capture-video needs: pip install moviepy")
    buffers = buffers_of(envs)
    if any(x.data_ptr() != buffers[name].data_ptr() for name, x in buffers_of(envs).items()):
        raise Refused(f"{args.env_id}: state_dict must not return copies of tensors")
    before = {name: x.clone() for name, x in buffers.items()}
    number = torch.zeros(args.num_envs, device=args.device)
    vector, flag = number.new_zeros(args.num_envs, envs.obs_size), number.bool()
    envs.steps.fill_(1)
    first_obs, outline = envs.reset(), outline_of(envs)
    if envs.steps.any():
        raise Refused(f"{args.env_id}: reset must set steps to 0")
    numbers = {name: [x.clone() for x in tensors] for name, (_, tensors) in outline.items()}
    actions = torch.randn(args.num_envs, envs.action_size, device=args.device)
    obs, rewards, terminated, truncated, next_obs = envs.step(actions)
    for name, result, right in [
        ("what reset returns", first_obs, vector),
        ("what reset_where returns", getattr(envs, "reset_where", lambda where: vector)(flag), vector),
        ("observations", obs, vector),
        ("rewards", rewards, number),
        ("terminated", terminated, flag),
        ("truncated", truncated, flag),
        ("next_obs", next_obs, vector),
    ]:
        if kind(result) != kind(right):  # it may broadcast
            raise Refused(f"{args.env_id}: {name} must be {kind(right)}, not {kind(result)}")
    if getattr(envs, "recordable", False):
        in_checkpoint = {x.untyped_storage().data_ptr() for x in buffers_of(envs).values()}
        for name, (content, tensors) in outline_of(envs).items():
            if name not in outline or content != outline[name][0]:
                reason = f"step changes {name}, unseen by a CUDA graph: change a buffer in its place"
                raise Refused(f"{args.env_id}: {reason}, or recordable = False")
            for x, old in zip(tensors, numbers[name], strict=True):
                if not torch.equal(x, old) and x.untyped_storage().data_ptr() not in in_checkpoint:
                    reason = f"step changes {name}, which is not in state_dict: make it a buffer"
                    raise Refused(f"{args.env_id}: {reason}, or recordable = False")
    put_back(buffers_of(envs), before)


class Outline(pickle.Pickler):
    """Writes an object without the numbers in its tensors: of these, it writes where they are."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.tensors: list[Tensor] = []  # kept, so that no other one gets the address of one of them

    def persistent_id(self, x: Any) -> tuple[int, int] | None:
        if not isinstance(x, Tensor):
            return None
        self.tensors.append(x)
        return id(x), x.data_ptr()


def outline_of(envs: Any) -> dict[str, tuple[bytes, list[Tensor]]]:
    """What a CUDA graph does not see change, by name: Python's values, and which tensors there are."""
    parts: dict[str, Any] = {"random": random.getstate(), "np.random": np.random.get_state()}  # noqa: NPY002
    for kind in reversed(type(envs).__mro__):
        parts |= {name: value for name, value in vars(kind).items() if not name.startswith("__")}
    parts |= vars(envs)
    for group in ("_buffers", "_modules"):
        parts |= parts.pop(group, {})
    parts.pop("log", None)
    found = {}
    for name, part in parts.items():
        outline = Outline(file := io.BytesIO())
        with suppress(Exception):  # of what cannot be pickled, nothing is known
            outline.dump(part)
            found[name] = file.getvalue(), outline.tensors
    return found


@torch.no_grad()
def begin_episodes(envs: Any, args: Args) -> tuple[Tensor, Tensor]:
    """Reset the environments. Returns the first observations [N, D], and sums [3, N] for `collect_rollout`.

    Time limits are spread over environments, as in RSL-RL. These first, shortened episodes are not logged.
    """
    current_obs = envs.reset().clone()
    steps = torch.randint(math.ceil(envs.max_steps), (args.num_envs,), device=args.device)
    envs.steps.copy_(steps)
    if not torch.equal(envs.steps.cpu().long(), steps.cpu()):  # of a property that returns a copy
        raise Refused(f"{args.env_id}: steps must be a tensor to write to, of numbers up to max_steps")
    sums = torch.zeros(3, args.num_envs, device=args.device)
    sums[1] = math.nan  # the returns of these first episodes
    return current_obs, sums


def buffers_of(envs: Any) -> dict[str, Tensor]:
    """The tensors of an environment's `state_dict`, if it has one, by name."""
    return {name: x.detach() for name, x in getattr(envs, "state_dict", dict)().items()}


@torch.no_grad()
def put_back(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Give these tensors the saved numbers."""
    for name, x in tensors.items():
        if not torch.equal(x.cpu(), saved[name].cpu()):  # an expanded one cannot be written to
            x.copy_(saved[name])


def restore_buffers(envs: Any, content: dict, args: Args) -> None:
    """Give the environments the buffers of a checkpoint, where they fit, and say which do not."""
    tensors, saved = buffers_of(envs), content["state"].get("buffers", {})
    fitting = {name: x for name, x in tensors.items() if name in saved and saved[name].shape == x.shape}
    put_back(fitting, saved)
    others = [name for name in tensors if name not in fitting]
    if RANK == 0 and others:
        print(f"not in the checkpoint, or of other sizes, and so not restored: {', '.join(others)}")
    if RANK == 0 and fitting and args.env_kwargs != content["args"].get("env_kwargs", "{}"):
        print(f"with other --env-kwargs, these are still the checkpoint's: {', '.join(fitting)}")


def log_of(envs: Any) -> dict[str, Tensor]:
    """What the environments log of a step."""
    return getattr(envs, "log", {})


def mean_logs(logs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Means of what environments log in several steps, without NaN."""
    names = dict.fromkeys(name for log in logs for name in log)
    numbers = {name: [log[name].float().flatten() for log in logs if name in log] for name in names}
    return {name: torch.cat(columns).nanmean() for name, columns in numbers.items()}


# ------------------------------------------------- Logging and checkpoints ---------------------------------


class Run:
    """The folder of a run: its curves for TensorBoard, and its checkpoint."""

    def __init__(self, path: Path, args: Args, agent: Agent, optimizer: Adam, state: State):
        self.path, self.args, self.agent, self.optimizer, self.state = path, args, agent, optimizer, state
        folder = path.parent
        folder.mkdir(parents=True, exist_ok=True)
        self.lock_file = lock_folder(folder)
        if args.track:
            import wandb

            wandb.init(name=folder.name, config=vars(args), sync_tensorboard=True, reinit="finish_previous")
        print(f"{args.env_id}: {state.global_step:,} of {args.total_timesteps:,.0f} steps, seed {args.seed}")
        print(f"checkpoint {path}, curves: tensorboard --logdir runs", flush=True)
        self.writer = SummaryWriter(str(folder), purge_step=state.global_step + 1)
        # Copies of this file, and of a program that imports it, so that `plot.py` tells changed ones apart.
        for source in {Path(__file__), Path(sys.argv[0])}:
            if source.suffix == ".py" and source.is_file() and not Path(folder, source.name).exists():
                shutil.copyfile(source, Path(folder, source.name))
        self.best_path = path.with_name("best.pt")
        # Not from the checkpoint: if the run was killed, that may be older than best.pt.
        best = load_checkpoint(self.best_path)[1]["state"] if self.best_path.exists() else {}
        state.best_return, state.best_step = best.get("best_return", -math.inf), best.get("best_step", 0)
        self.warned = self.stop_at_reached = False
        self.first_time, self.first_step = time.monotonic(), state.global_step
        self.last_print = self.last_save = -math.inf

    def save(self) -> None:
        """Write the checkpoint of the run, and the curves up to it."""
        if self.last_save == -math.inf:  # only now: until then, a resumed run is as it was
            rows = "\n".join(f"|{name}|{value}|" for name, value in vars(self.args).items())
            self.writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")
        self.writer.flush()  # first, so that the curves have no gap where training resumes
        self.write(self.path)
        self.last_save = time.monotonic()

    def write(self, path: Path) -> None:
        """Write a checkpoint. If the process is killed meanwhile, the previous one is still there."""
        content = {"args": vars(self.args), "state": vars(self.state)}
        content |= {"agent": self.agent.state_dict(), "optimizer": self.optimizer.state_dict()}
        new = path.with_suffix(".tmp")
        torch.save(content, new)
        torch.load(new, weights_only=True)  # what cannot be loaded fails now, not after hours
        new.replace(path)

    def log(self, metrics: dict[str, float], rollout: Rollout, logs: dict[str, Tensor]) -> None:
        """Log an iteration, print progress, and save after the first and then every minute.

        Adds the episodes to the state's returns. Raises `FloatingPointError` if the loss is not finite.
        """
        statistics = torch.cat([x.flatten() for x in self.agent.buffers()])
        if not math.isfinite(metrics["kl"] + metrics["grad_norm"]) or not statistics.isfinite().all():
            check_numbers(rollout)
            raise FloatingPointError("NaN in the loss, or in another process: is --learning-rate too high?")
        self.warn(metrics, rollout, logs)
        args, state, step, now = self.args, self.state, self.state.global_step, time.monotonic()
        scalars = {name if "/" in name else f"losses/{name}": value for name, value in metrics.items()}
        scalars |= {f"env/{name}": x.item() for name, x in logs.items()}
        ended = (rollout.terminated | rollout.truncated) & ~rollout.episode_returns.isnan()
        if ended.any():
            finished = rollout.episode_returns[ended].tolist()
            # 100 at random: the last ones would be those of the highest-numbered environments.
            shuffled = np.random.default_rng(step).permutation(finished).tolist()
            state.returns = [*state.returns, *shuffled][-100:]
            scalars["charts/episodic_return"] = np.mean(finished)
            scalars["charts/episodic_return_std"] = np.std(finished)
            scalars["charts/episodic_return_min"] = np.min(finished)
            scalars["charts/episodic_return_max"] = np.max(finished)
            scalars["charts/episodic_return_100"] = float(np.mean(state.returns))
            scalars["charts/episodic_length"] = rollout.episode_lengths[ended].mean().item()
        scalars["charts/SPS"] = speed = (step - self.first_step) / (now - self.first_time)
        for tag, value in scalars.items():
            if not math.isnan(value):
                self.writer.add_scalar(tag, value, step)
        keep = args.keep_every is not None and step % args.keep_every < rollout.rewards.numel() * PROCESSES
        if now - self.last_save > 60:
            self.save()
        if keep:
            kept = self.path.parent / f"at_{step}" / self.path.name  # resumed, it is a run in this folder
            kept.parent.mkdir(exist_ok=True)
            self.write(kept)
        if step >= args.total_timesteps or now - self.last_print > 5:
            self.last_print = now
            average = f"return {np.mean(state.returns):.5g}" if state.returns else "no episode has ended yet"
            left = timedelta(seconds=round(max(args.total_timesteps - step, 0) / speed))
            line = f"{step:>10,} steps  {average}  KL {max(metrics['kl'], 0):.4f}"
            print(f"{line}  {speed:,.0f}/s  {left} left", flush=True)

    is_checked = is_warned_of_divergence = False

    def warn(self, metrics: dict[str, float], rollout: Rollout, logs: dict[str, Tensor]) -> None:
        """Say, once each, what looks wrong in an iteration."""
        if metrics["first_approx_kl"] > 1e-4 and not self.warned:  # correct runs have up to 1e-8
            print("acting and learning do not compute the same policy: is a mask, or dropout, in only one?")
            self.warned = True
        if logs["diverged"] > 0 and not self.is_warned_of_divergence:
            print("a simulation diverged, and a new episode started there: see env/diverged")
            self.is_warned_of_divergence = True
        obs, next_obs, acted_on = rollout.obs[:-1], rollout.next_obs[:-1], rollout.obs[1:]
        goes_on = ~(rollout.terminated | rollout.truncated)[:-1]
        limits = (rollout.truncated & ~rollout.terminated)[:-1]
        if self.last_save == -math.inf:  # the first iteration
            mean, std = self.agent.obs_moments.mean.abs(), self.agent.obs_moments.var.sqrt()
            small = ((std > 1e-5 * mean) & (std > 0) & (std < 1e-3)).nonzero().flatten().tolist()
            if small and self.args.norm_obs:
                print(f"observations {small} vary by less than 0.001, and are hardly seen: scale them")
            if (next_obs != acted_on)[goes_on].any():
                print("next_obs is not what the next step acts on: is it of another step, or new noise?")
        if not self.is_checked and limits.any():
            self.is_checked = True
            if ((next_obs == acted_on).all(-1) & (next_obs != obs).any(-1))[limits].all():
                print("at time limits, next_obs is what the next step acts on: is it of the next episode?")

    def evaluate_if_due(self, env: Any) -> None:
        """Evaluate if it is due by --eval-every, or training is complete. Keep the best policy in best.pt.

        The episodes are the same each time, but not those of the evaluation at the end. Of policies that are
        equally good, the last one is kept.
        """
        args, state, step = self.args, self.state, self.state.global_step
        passed = step // args.eval_every > state.last_evaluation // args.eval_every
        if not passed and step < args.total_timesteps:
            return
        self.save()  # what is evaluated is the file
        other_seed = hash_seed(args.seed, 2**41)  # the evaluation after training has other episodes
        returns = evaluate(self.path, replace(args, seed=other_seed, capture_video=False), env)
        if STOP.is_set():
            print("this evaluation was stopped, and does not count")
            return
        mean, state.last_evaluation = float(returns.mean()), step
        self.writer.add_scalar("eval/greedy_return", mean, step)
        if mean >= state.best_return:  # NaN is not
            state.best_return, state.best_step = mean, step
            self.write(self.best_path)
        self.save()  # so that a resumed run does not evaluate this policy again
        if args.stop_at is not None and mean >= args.stop_at:
            print(f"training ends: the return has reached --stop-at {args.stop_at:.10g}")
            self.stop_at_reached = True

    def finish(self, env: Any, show_commands: bool) -> dict:
        """Save, evaluate unless the run was stopped, and close the log. Returns the results."""
        complete = self.state.global_step >= self.args.total_timesteps
        if self.state.global_step > self.first_step or self.args.resume is None:
            self.save()
        if show_commands:
            print_commands(self.args, self.path, env, complete)
        state, replayed = self.state, np.zeros(0)
        average = float(np.mean(state.returns)) if state.returns else math.nan
        returns = evaluate(self.path, self.args, env)  # none, if the run was stopped
        if len(returns) > 0:
            tag = "eval/final_return" if self.best_path.exists() else "eval/greedy_return"
            self.writer.add_scalar(tag, returns.mean(), state.global_step)
        if self.best_path.exists():  # in the same episodes, which are not those that chose it
            replayed = evaluate(self.best_path, self.args, env)
        if len(replayed) == len(returns) > 0:  # neither was stopped
            self.writer.add_scalar("eval/best_replayed", replayed.mean(), state.global_step)
            chosen = f"chosen after {state.best_step:,} steps for a mean return of {state.best_return:.5g}"
            both = f"it has {replayed.mean():.5g}, the last policy {returns.mean():.5g}"
            print(f"best.pt: {chosen}; in the new episodes above, {both}")
        self.writer.close()
        self.lock_file.close()
        if complete or self.stop_at_reached:  # although the evaluation may have been stopped
            STOP.clear()
        results = {"checkpoint": str(self.path), "training_return": average, "greedy_returns": returns}
        best = {"best_return": state.best_return, "best_step": state.best_step, "best_replayed": replayed}
        return results | best


def check_numbers(rollout: Rollout) -> None:
    """Raise `FloatingPointError` where a number is NaN, or too large for float32 to have its square."""
    next_obs = rollout.next_obs.masked_fill(rollout.terminated.unsqueeze(-1), 0)  # unused after termination
    columns = {"obs": rollout.obs, "action": rollout.actions, "reward": rollout.rewards, "next_obs": next_obs}
    for name, numbers in columns.items():
        wrong = (~(numbers.abs() < 1e15)).nonzero()
        if len(wrong) > 0:
            t, n, *_ = wrong[0].tolist()
            value = numbers[tuple(wrong[0])].item()
            raise FloatingPointError(f"{name} is {value} in step {t} of the rollout, in environment {n}")


def lock_folder(folder: Path) -> IO:
    """Lock a run's folder until the file is closed or this process ends. Raises `Refused` if it is locked."""
    file = (folder / ".lock").open("w")
    try:
        import fcntl

        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise Refused(f"the run in {folder} is still going") from None
    except (ImportError, OSError):  # Windows, and some file systems, have no such locks
        pass
    return file


def run_path(args: Args) -> Path:
    """Where a run saves its checkpoint. An absolute path: an environment may change the current folder."""
    if args.resume is not None:
        path = find_checkpoint(args.resume, args.exp_name).absolute()
        if path.name == "best.pt":
            raise Refused("best.pt cannot be resumed: resume checkpoint.pt, or use --init best.pt")
        return path
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
    return Path("runs", re.sub(r"[^\w.-]+", "_", name), "checkpoint.pt").absolute()


def find_checkpoint(path: str | Path, exp_name: str = Args.exp_name) -> Path:
    """The checkpoint file of a run's folder or, for "latest", of the newest run with this --exp-name."""
    if path == "latest":
        name = re.escape(re.sub(r"[^\w.-]+", "_", exp_name))
        pattern = re.compile(rf".+__{name}__\d+__[\d-]+")  # see run_path
        runs = [file for file in Path("runs").glob("*/checkpoint.pt") if pattern.fullmatch(file.parent.name)]
        if not runs:
            raise Refused(f"runs/ has no checkpoint of a run with --exp-name {exp_name}")
        path = max(runs, key=lambda file: file.parent.name.split("__")[-1])  # by date
    return Path(path, "checkpoint.pt") if Path(path).is_dir() else Path(path)


def load_checkpoint(path: str | Path, device: str = "cpu") -> tuple[Args, dict]:
    """The settings, and the whole content, of a checkpoint. No code in it is executed."""
    path = find_checkpoint(path)
    try:
        content = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError:  # its message tells how to execute the code in a file
        content = {}
    if "agent" not in content:
        raise Refused(f"{path} is not a checkpoint of this script")
    known = {setting.name for setting in fields(Args)}
    return Args(**{name: value for name, value in content["args"].items() if name in known}), content


def load_start(args: Args) -> dict:
    """The content of the checkpoint that --resume or --init names, if one does."""
    start = args.init if args.resume is None else args.resume
    if start is None:
        return {}
    path = find_checkpoint(start, args.exp_name)
    saved, content = load_checkpoint(path)
    if args.env_id != saved.env_id:
        print(f"{path} was trained on {saved.env_id}")
    for name in ("norm_obs", "norm_rewards", "activation"):
        if getattr(args, name) != getattr(saved, name):
            raise Refused(
                f"--{name.replace('_', '-')} must be as in {start}, whose networks have learnt with it"
            )
    return content


class Policy(nn.Module):
    """A trained policy, which can be exported: from raw observations [..., D] to actions [..., A].

    Observations are what the actor sees, the first D numbers of those of the environments; normalising them
    is part of the policy. Actions are the most likely ones, in units of their bounds, and not clipped.
    """

    def __init__(self, agent: Agent):
        super().__init__()
        self.agent, size = agent, agent.actor_obs_size
        agent.critic = None
        agent.obs_moments.mean = agent.obs_moments.mean[:size].clone()
        agent.obs_moments.var = agent.obs_moments.var[:size].clone()

    def forward(self, obs: Tensor) -> Tensor:
        return most_likely(self.agent.policy(self.agent.normalize(obs)))


def load_policy(path: str | Path, device: str = "cpu") -> Policy:
    """The policy of a checkpoint, as a module."""
    args, content = load_checkpoint(path, device)
    if "hidden_size" in content["args"]:  # of version 0.2
        args.hidden_sizes = (content["args"]["hidden_size"],) * 2
    agent = Agent(args, *content["agent"]["sizes"].tolist()).to(device)
    agent.load_state_dict(content["agent"])
    return Policy(agent).eval().requires_grad_(False)


@torch.no_grad()
def evaluate(path: str | Path, args: Args, envs: Any = None) -> np.ndarray:
    """Play an episode in each environment with the most likely actions; print and return their returns.

    Without `envs`, it makes them by `make_envs`. Random generators are left as they were: training goes on as
    if this had not been called. None are returned if it was stopped, since the episodes that had ended would
    be the short ones.
    """
    path = find_checkpoint(path, args.exp_name).absolute()  # an environment may change the current folder
    if envs is None:
        envs = make_envs(args)
        check_envs(envs, args)
    content = load_checkpoint(path)[1]
    if content["agent"]["sizes"][1:].tolist() != [envs.actor_obs_size, envs.action_size]:
        raise Refused(f"{path} is for observations and actions of other sizes than {args.env_id}")
    restore_buffers(envs, content, args)
    seed = hash_seed(args.seed, 2**40)  # episodes that training has not seen
    mps_state = torch.mps.get_rng_state() if args.device == "mps" else None  # the next line knows CUDA's
    returns = torch.zeros(args.num_envs, device=args.device)
    running, snapshots, logs = torch.ones_like(returns, dtype=torch.bool), [], []
    with isolated_random_numbers(seed):
        policy = load_policy(path, args.device)
        torch.manual_seed(seed)  # those of GPUs, too
        obs = envs.reset()
        for step in range(math.ceil(envs.max_steps) + 1):  # one more, if the limit is `steps > max_steps`
            # Asking a GPU waits for it, so not in each step.
            if STOP.is_set() or (step % 50 == 0 and not running.any()):
                break
            if args.capture_video and running[0]:
                snapshots.append(envs.snapshot())
            actions = policy(obs[:, : envs.actor_obs_size])
            obs, rewards, terminated, truncated, _, diverged = take_step(envs, actions)
            returns += torch.where(running, rewards, 0)
            logs.append({name: x.clone() for name, x in (log_of(envs) | {"diverged": diverged}).items()})
            for name, x in logs[-1].items():
                if x.shape == running.shape:
                    logs[-1][name] = torch.where(running, x, torch.nan)
            running &= ~(terminated | truncated)
    if mps_state is not None:
        torch.mps.set_rng_state(mps_state)
    if STOP.is_set():
        return np.zeros(0)
    if args.capture_video:
        from moviepy import ImageSequenceClip

        video = str(path.with_name("video.mp4" if path.name == "checkpoint.pt" else f"{path.stem}_video.mp4"))
        ImageSequenceClip(envs.render(snapshots), fps=30).write_videofile(video, logger=None)
        print(f"video: {video}")
    shown = f"{returns.mean():.5g} +/- {returns.std(correction=0):.3g} in {len(returns)} episodes"
    trained = f"{content['state']['global_step']:,} steps of {content['args']['env_id']}"
    print(f"evaluation return {shown} with the most likely actions, after {trained}")
    means = mean_logs(logs)
    if means["diverged"] == 0:
        del means["diverged"]
    if means:
        print("means of its steps:", ", ".join(f"{name} {x:.3g}" for name, x in means.items()))
    return returns.cpu().numpy()


def parse_args() -> Args:
    """The settings of the command line; with --resume or --evaluate, the others are the checkpoint's."""
    parse = partial(tyro.cli, Args, description=__doc__.partition("\n  [PPO]")[0])
    args = parse(args=[word for word in sys.argv[1:] if word not in ("-h", "--help")])
    if sum(path is not None for path in (args.resume, args.evaluate, args.init)) > 1:
        raise Refused("--resume, --evaluate and --init cannot be combined")
    if args.resume is None and args.evaluate is None:  # the defaults for this environment, for --help, too
        return parse(default=Args() if args.env_id == Args.env_id else OTHERS)
    path = find_checkpoint(args.evaluate if args.resume is None else args.resume, args.exp_name)
    saved, content = load_checkpoint(path)
    if ":" in saved.env_id and args.env_id == Args.env_id:
        raise Refused(f"{path} needs a module; if you trust it, add --env-id {saved.env_id}")
    of_this_run = "resume", "evaluate", "init", "track", "capture_video", "device", "num_threads"
    args = parse(default=replace(saved, **{name: getattr(Args, name) for name in of_this_run}))
    steps = content["state"]["global_step"]
    if args.resume is not None and "optimizer" not in content:
        raise Refused(f"{path} has no optimizer: begin a run with --init")
    if args.resume is not None and steps >= args.total_timesteps:
        raise Refused(f"{path} has been trained for {steps:,} steps: raise --total-timesteps")
    return replace(args, resume=args.resume and str(path), evaluate=args.evaluate and str(path))


def print_commands(args: Args, path: Path, envs: Any, complete: bool) -> None:
    """Say how to resume a run, to watch its agent, and to check it."""
    script, file = Path(sys.argv[0]), str(path)
    module = ["--env-id", args.env_id] if ":" in args.env_id else []  # a checkpoint imports none by itself
    steps = load_checkpoint(path)[1]["state"]["global_step"]  # of a short run, more than it was to have
    more = ["--total-timesteps", f"{2 * max(steps, args.total_timesteps):.10g}"] if complete else []
    python = ["torchrun", "--nproc-per-node", str(PROCESSES)] if PROCESSES > 1 else ["python"]
    print("resume:", shlex.join([*python, str(script), "--resume", file, *module, *more]))
    if hasattr(envs, "render"):
        print("watch: ", shlex.join(["python", str(script), "--evaluate", file, *module, "--capture-video"]))
    if (coach := script.with_name("coach.py")).exists():  # not beside a copy
        print("check: ", shlex.join(["python", str(coach), "check", str(path.parent)]))


def stop(*_: Any) -> None:
    """End training after this iteration and save, or end the evaluation; a second Ctrl-C stops at once."""
    if multiprocessing.parent_process():  # a process that the environment has forked inherits this handler
        sys.exit(1)
    # Not print, which the signal may have interrupted.
    os.write(2, b"stopping after this iteration or evaluation step; a second Ctrl-C stops at once, unsaved\n")
    STOP.set()
    begun = time.monotonic()

    def stop_at_once(*_: Any) -> None:
        if time.monotonic() - begun > 1:  # sooner, it is the same Ctrl-C again, passed on by `timeout`
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, stop_at_once)


def main() -> None:
    """The command line. The exit status is 2 for what is refused, and 130 for a run that was stopped."""
    sys.path.append(".")  # where the `module:` of --env-id is looked for, too
    sys.modules.setdefault(Path(__file__).stem, sys.modules[__name__])  # else it would import a second copy
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    STOP.clear()
    try:
        args = parse_args()
        for number in handlers:
            signal.signal(number, stop)
        if args.evaluate is not None:
            evaluate(args.evaluate, args)
        else:
            train(args, show_commands=True)
    except Refused as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if STOP.is_set():
        STOP.clear()
        sys.exit(130)


if __name__ == "__main__":
    main()
