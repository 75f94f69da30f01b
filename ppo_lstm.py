# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.5", "gymnasium[classic-control,toy-text]>=1.1", "numpy", "tensorboard", "tyro>=0.9.1",
# ]
# ///
"""Proximal Policy Optimization (PPO) with memory, for discrete actions, in one file.

    python ppo_lstm.py --env-id CartPole-v1 --total-timesteps 1e5
    python ppo_lstm.py --env-id my_module:MyEnv-v0 --cell gru
    python ppo_lstm.py --evaluate latest --capture-video

It trains on any Gymnasium environment with `Discrete` actions and observations that flatten to a vector, also
where one observation does not say enough: a recurrent network remembers the earlier ones of the episode.

  [PPO]     Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE]     Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
            Estimation", arXiv:1506.02438
  [Limits]  Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv:1712.00378
  [Matters] Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
  [37]      Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog

PPO comes first: networks, equations, then the algorithm up to `train`, which repeats:

    collect_rollout        acts for T steps in N environments
    normalize_rollout      normalises observations and rewards, and updates the running statistics
    make_batch             estimates advantages (compute_gae)
    update                 takes K epochs of gradient steps on minibatches, each on the loss of ppo_loss

Shapes: T steps per rollout, N environments, D numbers per observation, A actions, H numbers in a layer; B is
any shape, here [T, N]. An environment's memory is M vectors of H numbers: 2 for an LSTM (its output and its
cell), 1 for a GRU.
"""

import copy
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
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, get_args, get_origin

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:  # the trailing comments become --help
    exp_name: str = Path(sys.argv[0]).stem or "ppo_lstm"  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    resume: str | None = None  # resume from this checkpoint or `latest`; flags override its settings
    evaluate: str | None = None  # only evaluate this checkpoint or `latest`, greedily
    init: str | None = None  # start a new run from the networks and normalisers of this checkpoint
    eval_episodes: int = 10  # number of evaluation episodes
    eval_every: float = 0  # also evaluate every so many steps (0: never); best.pt has the best mean return
    stop_at: float | None = None  # end training once an evaluation of --eval-every reaches this mean return
    capture_video: bool = False  # record the evaluation in the run folder (needs moviepy)
    track: bool = False  # also log to Weights & Biases, to its WANDB_PROJECT (needs wandb)
    device: str = "cpu"  # cpu, cuda or mps; small networks are fastest on the CPU

    # Environment
    env_id: str = "CartPole-v1"  # Gymnasium id; `module:EnvId-v0` imports the module first
    env_kwargs: str = "{}"  # environment arguments, as JSON
    num_envs: int = 16  # N: number of environments
    async_envs: bool = False  # one process per environment: worthwhile when steps are slow

    # PPO
    total_timesteps: float = 500_000  # total number of transitions, also as 1e6
    num_steps: int = 128  # T: steps of each environment per rollout, and of gradients back in time
    learning_rate: float = 1e-3  # Adam's step size
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # γ: discount factor
    gae_lambda: float = 0.95  # λ of GAE: lower values give more bias, higher ones more variance
    update_epochs: int = 10  # K: epochs per rollout
    num_minibatches: int = 4  # minibatches of whole environments per epoch, one gradient step each
    norm_adv: bool = True  # normalise the advantages of each minibatch to mean 0, standard deviation 1
    clip_coef: float = 0.2  # ε: the ratio of new to old probability is clipped to 1 ± ε
    ent_coef: float = 0.01  # c₂: weight of the entropy bonus
    vf_coef: float = 0.5  # c₁: weight of the value loss, ½ (V - return)²
    max_grad_norm: float = 0.5  # clip the gradient to this global norm
    norm_obs: bool = True  # normalise observations, except one-hot and binary ones, by running mean and std
    norm_rewards: bool = True  # divide rewards by the running std of the discounted return
    cell: Literal["lstm", "gru"] = "lstm"  # kind of memory
    hidden_size: int = 128  # H: width of the encoder, and numbers in each vector of the memory


# Allowed values, limits included. With more than 30 epochs, or ε above 0.3, the policy moves too far from the
# one that collected the data. To study what is refused, change this table in your program. A setting that you
# add is checked if it has an entry here.
BOUNDS = {
    "seed": (0, 2**31), "eval_episodes": (1, math.inf), "eval_every": (0, math.inf),
    "stop_at": (-1e15, 1e15), "num_envs": (1, math.inf), "num_steps": (1, math.inf),
    "total_timesteps": (1, 1e15), "learning_rate": (0, 1), "gamma": (0, 1), "gae_lambda": (0, 1),
    "update_epochs": (1, 30), "num_minibatches": (1, math.inf), "clip_coef": (1e-3, 0.3),
    "ent_coef": (0, 100), "vf_coef": (0, 100), "max_grad_norm": (1e-6, math.inf), "hidden_size": (1, 2**16),
}  # fmt: skip


# ------------------------------------------------- Networks -------------------------------------------------

MEMORY_VECTORS = {"lstm": 2, "gru": 1}  # M


def initialize(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Give a layer orthogonal weights and zero biases ([37], detail 2), and return it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class RunningMoments(nn.Module):
    """Mean and variance [D] of everything seen so far (the parallel algorithm of Chan et al. 1983)."""

    def __init__(self, size: int):
        super().__init__()
        self.mean, self.var = nn.Buffer(torch.zeros(size)), nn.Buffer(torch.ones(size))
        self.count = nn.Buffer(torch.zeros(()))

    def update(self, x: Tensor) -> None:
        """Include x [B, D]."""
        share = len(x) / (self.count + len(x))  # weight of the new data
        delta = x.mean(0) - self.mean
        self.var.lerp_(x.var(0, correction=0), share).add_(share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.add_(len(x))


def split_at_starts(starts: Tensor) -> tuple[Tensor, Tensor]:
    """The position of each row [T, N] in the sequence of its episode, and the sequence's number [T, N]."""
    step = torch.arange(len(starts), device=starts.device).unsqueeze(-1)
    first = starts | (step == 0)
    position = step - torch.where(first, step, 0).cummax(0).values
    sequence = first.T.flatten().cumsum(0).view_as(first.T).T - 1
    return position, sequence


class Agent(nn.Module):
    """Actor and critic on a common memory, with the running statistics that normalise inputs and rewards.

    Below, h is the history, all observations of an episode so far, on which policy and value depend.
    """

    def __init__(self, args: Args, obs_space: gym.spaces.Box, num_actions: int):
        super().__init__()
        obs_size, size = obs_space.shape[0], args.hidden_size
        self.encoder = nn.Sequential(initialize(nn.Linear(obs_size, size)), nn.Tanh())
        self.rnn = nn.LSTM(size, size) if args.cell == "lstm" else nn.GRU(size, size)
        for parameter in self.rnn.parameters():
            if parameter.ndim == 2:
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        self.actor = initialize(nn.Linear(size, num_actions), gain=0.01)  # near-uniform at first
        self.critic = initialize(nn.Linear(size, 1), gain=1.0)
        self.obs_moments, self.return_moments = RunningMoments(obs_size), RunningMoments(1)
        self.norm_obs = args.norm_obs
        self.binary_obs = nn.Buffer(torch.zeros(obs_size, dtype=torch.bool))  # these stay as they are

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations [..., D] as the networks see them: (x - mean) / std within ±10, or unchanged."""
        if not self.norm_obs:
            return obs
        mean, scale = self.obs_moments.mean, torch.rsqrt(self.obs_moments.var + 1e-8)
        return torch.where(self.binary_obs, obs, (obs - mean) * scale).clamp(-10, 10)

    def remember(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """What the recurrent network makes of x [T, N, H], and its memory [M, N, H] after the last row."""
        if isinstance(self.rnn, nn.GRU):
            return self.rnn(x, memory)
        outputs, state = self.rnn(x, (memory[:1], memory[1:]))
        return outputs, torch.cat(state)

    def heads(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """π(·|h) [..., A], as log-probabilities, and V(h) [...], from what `remember` gives [..., H]."""
        # To forbid an action, set its logit to -1e8 in `step` and `forward`, which have the observation. A
        # mask in it must be of MultiBinary, or of integers from 0 to 1, otherwise it is normalised.
        return torch.log_softmax(self.actor(features), -1), self.critic(features).squeeze(-1)

    def step(self, obs: Tensor, starts: Tensor, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """To act: π(·|h) [N, A], V(h) [N] and the next memory [M, N, H], for normalised observations [N, D].

        `starts` [N] is true where the observation is the first of an episode. There, the memory is reset.
        """
        memory = torch.where(starts.unsqueeze(-1), 0, memory)
        features, memory = self.remember(self.encoder(obs).unsqueeze(0), memory)
        return *self.heads(features[0]), memory

    def forward(self, obs: Tensor, starts: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """To learn: π(·|h) [T, N, A] and V(h) [T, N] of T steps, from the memory [M, N, H] before the first.

        Each episode becomes a sequence of its own, so that the recurrent network takes many steps in a call.
        """
        position, sequence = split_at_starts(starts)
        x = self.encoder(obs)
        initial = memory.new_zeros(len(memory), int(sequence.max()) + 1, x.shape[-1])
        initial[:, sequence[0]] = torch.where(starts[0].unsqueeze(-1), 0, memory)
        # Sequences of similar length are padded together, to the next power of two.
        lengths = sequence.flatten().bincount()
        padded_lengths = 2 ** lengths.float().log2().ceil().int()
        features = torch.zeros_like(x)
        for length in padded_lengths.unique().tolist():
            chosen = padded_lengths == length  # which sequences have this padded length
            rows = chosen[sequence]  # [T, N], which rows belong to them
            column = chosen.cumsum(0) - 1  # of each chosen sequence in `padded`
            places = position[rows], column[sequence[rows]]
            padded = x.new_zeros(length, int(chosen.sum()), x.shape[-1]).index_put(places, x[rows])
            outputs, _ = self.remember(padded, initial[:, chosen])
            features = features.index_put((rows,), outputs[places])
        return self.heads(features)


# ------------------------------------------------- Equations ------------------------------------------------


# `Agent.heads` and these five functions are all that knows the distribution of actions.


def sample(log_policy: Tensor) -> Tensor:
    """Actions [N] from π(·|s) [N, A]: argmax of π(a) / e_a with e_a ~ Exp(1), as torch.multinomial does."""
    return (log_policy.exp() / torch.empty_like(log_policy).exponential_()).argmax(-1)


def most_likely(log_policy: Tensor) -> Tensor:
    """The most likely actions [...] of π(·|s) [..., A]."""
    return log_policy.argmax(-1)


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
    """A rollout to learn from. In each column, the second dimension is the environments.

    To add a quantity, add a field, fill it in `make_batch`, and use it in `ppo_loss`.
    """

    obs: Tensor  # [T, N, D], normalised
    starts: Tensor  # [T, N], true for the first observation of an episode
    memory: Tensor  # [M, N, H], the memory before the first row
    actions: Tensor  # [T, N]
    old_policy: Tensor  # [T, N, A], π_old(·|h) as log-probabilities
    old_values: Tensor  # [T, N], V_old(h)
    advantages: Tensor  # [T, N]
    returns: Tensor  # [T, N]
    rewards: Tensor  # [T, N], scaled


@dataclass
class State:
    """Coefficients and progress, as a checkpoint has them besides the networks and the optimizer."""

    learning_rate: float
    global_step: int = 0  # transitions so far
    returns: list[float] = field(default_factory=list)  # of the last 100 episodes
    best_return: float = -math.inf  # of best.pt, in the evaluation that chose it
    best_step: int = 0  # of best.pt
    last_evaluation: int = 0  # step of the last evaluation of --eval-every


def ppo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, and metrics: [PPO], equation 9, negated, with ½ in the value loss."""
    policy, values = agent(batch.obs, batch.starts, batch.memory)
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    log_ratio = log_prob(policy, batch.actions) - log_prob(batch.old_policy, batch.actions)
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s)
    # L^CLIP = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] ([PPO], equation 7)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_losses = -torch.min(ratio * advantages, clipped_ratio * advantages)

    value_losses = 0.5 * (values - batch.returns).square()
    entropies = entropy(policy)
    loss = (policy_losses + args.vf_coef * value_losses - args.ent_coef * entropies).mean()
    with torch.no_grad():  # scalars, averaged over the gradient steps, then logged as losses/<name>
        metrics = {
            "policy_loss": policy_losses.mean(),
            "value_loss": value_losses.mean(),
            "entropy": entropies.mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),  # k3 of Schulman 2020, "Approximating KL Divergence"
            "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
        }
    return loss, metrics


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout:
    """T steps of N environments. The next rollout starts where this one ends, in the same arrays.

    An environment whose episode ends is reset in the same step. `next_obs` holds the last observation of the
    old episode, and `current_obs` the first one of the next, where the memory is reset. The last one's value
    counts at a time limit, and depends on the old memory: it is in `next_values`.
    """

    def __init__(self, args: Args, obs_size: int):
        shape = args.num_steps, args.num_envs
        memory_shape = MEMORY_VECTORS[args.cell], args.num_envs, args.hidden_size
        self.current_obs = np.zeros((args.num_envs, obs_size), np.float32)  # what the next step acts on
        self.current_starts = np.ones(args.num_envs, bool)  # true where it is the first of an episode
        self.current_memory = torch.zeros(memory_shape, device=args.device)  # the memory before it
        self.first_memory = self.current_memory  # the memory before obs[0]
        self.obs = np.zeros((*shape, obs_size), np.float32)  # s_t
        self.next_obs = np.zeros((*shape, obs_size), np.float32)  # s_{t+1}
        self.starts = np.zeros(shape, bool)  # whether s_t is the first state of an episode
        self.policies: Tensor  # π_old(·|h_t) [T, N, ...], as `Agent.heads` gives it
        self.actions: Tensor  # a_t [T, N, ...], as `sample` draws it
        self.values: Tensor  # V(h_t) [T, N]
        self.next_values: Tensor  # V(h_{t+1}) [T, N], also where step t ended the episode
        self.rewards = np.zeros(shape)  # r_t, in float64: returns are sums of them
        self.terminated, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        # So far, of the unfinished episode in each environment:
        self.episode_returns, self.episode_lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, int)
        self.discounted_returns = np.zeros(args.num_envs)


def collect_rollout(envs: VectorEnv, agent: Agent, rollout: Rollout, args: Args) -> list[tuple[float, int]]:
    """Act for T steps. Returns the return and the length of each episode that ended."""
    tensor = partial(torch.tensor, device=args.device)
    rollout.first_memory = memory = rollout.current_memory
    policies, actions, values, last_memories, episodes = [], [], [], [], []
    for t in range(args.num_steps):
        rollout.obs[t], rollout.starts[t] = rollout.current_obs, rollout.current_starts
        with torch.inference_mode():
            obs, starts = agent.normalize(tensor(rollout.obs[t])), tensor(rollout.starts[t])
            policy, value, memory = agent.step(obs, starts, memory)
            action = sample(policy)
        env_action = action.cpu().numpy().copy()  # a copy: environments may change it in place
        rollout.current_obs, rewards, terminated, truncated, infos = envs.step(env_action)
        policies.append(policy)
        actions.append(action)
        values.append(value)
        rollout.next_obs[t], rollout.rewards[t] = rollout.current_obs, rewards
        rollout.terminated[t], rollout.truncated[t] = terminated, truncated
        rollout.current_starts = rollout.terminated[t] | rollout.truncated[t]
        rollout.episode_returns += rewards
        rollout.episode_lengths += 1
        for n in np.flatnonzero(rollout.current_starts):
            # Unlike an assignment alone, np.reshape fails where a single number would be copied D times.
            rollout.next_obs[t, n] = np.reshape(infos["final_obs"][n], rollout.obs.shape[-1])
            last_memories.append(memory[:, n])
            episodes.append((float(rollout.episode_returns[n]), int(rollout.episode_lengths[n])))
            rollout.episode_returns[n] = rollout.episode_lengths[n] = 0
    check_numbers(rollout)
    rollout.policies, rollout.actions = torch.stack(policies), torch.stack(actions)
    rollout.values, rollout.current_memory = torch.stack(values), memory.clone()
    rollout.next_values = find_next_values(agent, rollout, last_memories)
    return episodes


@torch.no_grad()
def find_next_values(agent: Agent, rollout: Rollout, last_memories: list[Tensor]) -> Tensor:
    """V(h_{t+1}) [T, N]: the next row's value, but where step t ended an episode, that of its last state.

    `last_memories` are the memories [M, H] before these last states, in the order of the rows.
    """
    tensor = partial(torch.as_tensor, device=rollout.values.device)
    current_obs = agent.normalize(tensor(rollout.current_obs, dtype=torch.float32))
    _, value, _ = agent.step(current_obs, tensor(rollout.current_starts), rollout.current_memory)
    next_values = torch.cat([rollout.values[1:], value.unsqueeze(0)])
    ended = rollout.terminated | rollout.truncated
    if ended.any():
        last_obs = agent.normalize(tensor(rollout.next_obs[ended]))
        not_first = tensor(np.zeros(len(last_obs), bool))
        _, last_values, _ = agent.step(last_obs, not_first, torch.stack(last_memories, 1))
        next_values[tensor(ended)] = last_values
    return next_values


@torch.no_grad()
def normalize_rollout(agent: Agent, rollout: Rollout, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised obs and next_obs [T, N, D], and scaled rewards [T, N]. Updates the running statistics.

    Observations are normalised by the statistics that acting used, before they are updated. Rewards are
    divided by the running std, after its update, of the discounted return R_t = γ R_{t-1} + r_t, which starts
    from 0 in each episode, and clipped to ±10 ([Matters], §3).
    """
    tensor = partial(torch.tensor, dtype=torch.float32, device=args.device)  # a copy: arrays are reused
    raw_obs, rewards = tensor(rollout.obs), tensor(rollout.rewards)
    obs, next_obs = agent.normalize(raw_obs), agent.normalize(tensor(rollout.next_obs))
    agent.obs_moments.update(raw_obs.flatten(0, 1))
    if args.norm_rewards:
        discounted_returns = np.zeros_like(rollout.rewards)  # R_t [T, N]
        for t, ended in enumerate(rollout.terminated | rollout.truncated):
            discounted_returns[t] = args.gamma * rollout.discounted_returns + rollout.rewards[t]
            rollout.discounted_returns = np.where(ended, 0, discounted_returns[t])
        agent.return_moments.update(tensor(discounted_returns).view(-1, 1))
        rewards = (rewards * torch.rsqrt(agent.return_moments.var + 1e-8)).clamp(-10, 10)
    return obs, next_obs, rewards


@torch.no_grad()
def make_batch(rollout: Rollout, obs: Tensor, rewards: Tensor, args: Args) -> Batch:
    """A rollout to learn from. `obs` and `rewards` are what `normalize_rollout` returned."""
    tensor = partial(torch.tensor, device=args.device)
    values, next_values = rollout.values, rollout.next_values
    ends = tensor(rollout.terminated), tensor(rollout.truncated)
    advantages, returns = compute_gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    return Batch(
        obs=obs,
        starts=tensor(rollout.starts),
        memory=rollout.first_memory,
        actions=rollout.actions,
        old_policy=rollout.policies,
        old_values=rollout.values,
        advantages=advantages,
        returns=returns,
        rewards=rewards,
    )


@torch.no_grad()
def mean_kl(agent: Agent, batch: Batch) -> float:
    """KL divergence of the current policy from the one that acted, in nats."""
    policy, _ = agent(batch.obs, batch.starts, batch.memory)
    return kl_divergence(batch.old_policy, policy).mean().item()


def update(agent: Agent, optimizer: Adam, batch: Batch, args: Args, state: State) -> dict[str, float]:
    """K epochs of gradient steps on minibatches of whole environments.

    Returns metrics: of the batch, means over the gradient steps, and the KL divergence after the last.
    """
    metrics = batch_metrics(batch, args, state)
    for group in optimizer.param_groups:
        group["lr"] = state.learning_rate * group.get("lr_ratio", 1)
    steps = []  # metrics of each gradient step, still as tensors: reading them would wait for the GPU
    for _ in range(args.update_epochs):
        order = torch.randperm(args.num_envs).to(args.device)
        for chosen in order.tensor_split(args.num_minibatches):
            minibatch = Batch(*(column[:, chosen] for column in batch))
            loss, step_metrics = ppo_loss(agent, minibatch, args)
            optimizer.zero_grad()
            loss.backward()
            step_metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            steps.append({name: metric.detach() for name, metric in step_metrics.items()})
    for name in steps[0]:
        metrics[name] = torch.stack([step[name] for step in steps]).mean().item()
    metrics["first_approx_kl"] = steps[0]["approx_kl"].item()  # before the first step: 0, up to rounding
    metrics["kl"] = mean_kl(agent, batch)
    return metrics


def batch_metrics(batch: Batch, args: Args, state: State) -> dict[str, float]:
    """The learning rate, how well V_old predicts the returns, and the shares of numbers clipped to ±10.

    If all returns are equal, there is nothing to predict, and no metric for it.
    """
    errors = batch.returns - batch.old_values  # of the critic
    variance, mean_square = batch.returns.var(correction=0), batch.returns.square().mean()
    metrics = {
        "charts/learning_rate": state.learning_rate,
    }
    if variance > 1e-12 * mean_square:  # not only rounding
        metrics["explained_variance"] = (1 - errors.var(correction=0) / variance).item()
        metrics["critic_error"] = (errors.square().mean() / mean_square).sqrt().item()
    if args.norm_obs:  # where many are clipped, large ones look the same
        metrics["obs_clipfrac"] = (batch.obs.abs() >= 10).float().mean().item()
    if args.norm_rewards:
        metrics["reward_clipfrac"] = (batch.rewards.abs() >= 10).float().mean().item()
    return metrics


def train(args: Args, show_commands: bool = False) -> dict:
    """PPO ([PPO], Algorithm 1), then a greedy evaluation. If killed, it loses a minute or an iteration.

    Returns "checkpoint" (its path), "training_return" (of the last 100 episodes), "greedy_returns",
    "best_return", for which best.pt was chosen (-inf without one), "best_step", and "best_replayed", its
    returns in the episodes of "greedy_returns" (empty without one). Raises `Refused`, a `ValueError`, where
    training would be wrong. With `resume`, settings come from `args`, not from the checkpoint. It seeds the
    global random generators, sets PyTorch's threads, and writes to runs/.
    """
    STOP.clear()
    check_settings(args)
    plain = {name: value.item() for name, value in vars(args).items() if isinstance(value, np.generic)}
    args = replace(args, **plain)  # a checkpoint has no numbers of NumPy
    torch.set_num_threads(1)  # for small networks, one is fastest
    path = run_path(args)
    state = State(args.learning_rate)
    saved = load_start(args)
    if args.resume is not None:
        vars(state).update(saved["state"])
    seed = hash_seed(args.seed, state.global_step)  # a resumed run has new episodes
    eval_env, envs = make_eval_env(args), make_envs(args, seed)
    if envs.metadata.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
        raise Refused("the environments must reset in the same step: see AutoresetMode.SAME_STEP")
    in_this_process = envs.envs if isinstance(envs, SyncVectorEnv) else ()
    if args.eval_every > 0 and any(env.unwrapped is eval_env.unwrapped for env in in_this_process):
        # An evaluation would break off the episode of training.
        raise Refused("make_env must return a new environment in each call")
    if envs.single_action_space != eval_env.action_space:
        raise Refused("make_envs and make_env have different action spaces")
    seed_everything(seed)  # only now: making environments may have drawn numbers
    obs_space, num_actions = eval_env.observation_space, int(eval_env.action_space.n)
    agent = Agent(args, obs_space, num_actions)
    agent.binary_obs |= torch.from_numpy(eval_env.binary_obs)
    agent.to(args.device)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # ε: [37], detail 3
    for group in optimizer.param_groups:  # groups of your own keep their ratio to --learning-rate
        group["lr_ratio"] = group["lr"] / args.learning_rate if args.learning_rate > 0 else 1
    if saved:
        load_weights(agent, saved["agent"], obs_space)
    if args.resume is not None:
        optimizer.load_state_dict(saved["optimizer"])
    rollout = Rollout(args, obs_space.shape[0])
    rollout.current_obs, _ = envs.reset(seed=seed)
    run = Run(path, args, agent, optimizer, state)

    while state.global_step < args.total_timesteps and not (STOP.is_set() or run.stop_at_reached):
        remaining = 1 - state.global_step / args.total_timesteps
        state.learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)
        episodes = collect_rollout(envs, agent, rollout, args)
        obs, _, rewards = normalize_rollout(agent, rollout, args)  # V(h_{t+1}) is in the rollout
        batch = make_batch(rollout, obs, rewards, args)
        metrics = update(agent, optimizer, batch, args, state)
        state.global_step += args.num_steps * args.num_envs
        run.log(metrics, episodes)
        if args.eval_every > 0:
            run.evaluate_if_due(eval_env)
    results = run.finish(eval_env, show_commands)
    close(eval_env)
    close(envs)
    return results


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


def seed_spaces(env: gym.Env, seed: int) -> None:
    """Seed the spaces of an environment, from which it may draw, such as the actions of an opponent.

    They are copied first, since all environments of a class may share them.
    """
    for name in ("action_space", "observation_space"):
        if hasattr(env, name):
            with suppress(AttributeError):  # of a property, which cannot be set
                setattr(env, name, copy.deepcopy(getattr(env, name)))
            getattr(env, name).seed(seed)
    if isinstance(env, gym.Wrapper):
        seed_spaces(env.env, seed)


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


def check_settings(args: Args) -> None:
    """Raise `Refused` for settings that would train wrongly."""
    if forgotten := {setting.name for setting in fields(args)} - {setting.name for setting in fields(Args)}:
        raise Refused(f"checkpoints would forget {forgotten}: replace this module's Args, too")
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # NaN is refused, too
            raise Refused(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
    for setting in fields(Args):
        value, choices = getattr(args, setting.name), get_args(setting.type)
        if get_origin(setting.type) is Literal and value not in choices:
            raise Refused(f"--{setting.name} must be one of {choices}, not {value!r}")
    if args.num_minibatches > args.num_envs:
        raise Refused("--num-minibatches must be at most --num-envs: a minibatch has whole environments")
    if args.num_envs // args.num_minibatches * args.num_steps < 2:
        raise Refused("each minibatch needs two transitions or more: raise --num-steps")
    if not args.norm_adv and args.update_epochs * args.num_minibatches > 1:
        raise Refused("several gradient steps need --norm-adv")
    if args.stop_at is not None and args.eval_every == 0:
        raise Refused("--stop-at needs --eval-every")


# ------------------------------------------------- Environments --------------------------------------------


def make_env(args: Args, **kwargs) -> gym.Env:
    """One environment. Put your own here, or wrappers; --env-id is then only a name."""
    return gym.make(args.env_id, **json.loads(args.env_kwargs) | kwargs)


class Flat(gym.Wrapper):
    """Flattens observations to vectors [D], and drops the info, which is slow to join.

    To use a number of the info, return it in `step`, and 0 in `reset`. `collect_rollout` then finds it in
    `infos` or, where an episode ended, in `infos["final_info"]`.
    """

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.space, self.binary_obs = env.observation_space, find_binary_obs(env.observation_space)
        flat = gym.spaces.flatten_space(self.space)
        self.observation_space = gym.spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32))

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        obs, _ = self.env.reset(**kwargs)
        return flatten(self.space, obs), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        obs, reward = flatten(self.space, obs), float(np.asarray(reward).item())
        # All are copies: the reset in the same step may overwrite arrays that the environment reuses.
        return obs, reward, bool(terminated), bool(truncated), {}


def flatten(space: gym.Space, obs: Any) -> np.ndarray:
    """An observation as a vector [D]. Raises `ValueError` unless a `Box` has as many numbers as its space.

    Gymnasium's function of this name does not, and cuts decimals if the space is one of integers.
    """
    if isinstance(space, gym.spaces.Dict):  # its order is alphabetical, if it was made from a plain dict
        return np.concatenate([flatten(part, obs[name]) for name, part in space.items()])
    if isinstance(space, gym.spaces.Tuple):
        return np.concatenate([flatten(part, value) for part, value in zip(space, obs, strict=True)])
    if isinstance(space, gym.spaces.Box):
        return np.array(obs, np.float32).reshape(math.prod(space.shape))
    return gym.spaces.flatten(space, obs).astype(np.float32)


def make_envs(args: Args, seed: int) -> VectorEnv:
    """N environments with flat observations, in this process or, with --async-envs, in a process each."""
    main_process = os.getpid()

    def make(index: int) -> gym.Env:
        if os.getpid() != main_process:  # Ctrl-C and `timeout` are for the process that trains
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            if hasattr(os, "setpgrp"):
                os.setpgrp()
        seed_everything(seed + index)  # for environments that draw from these generators
        env = make_env(args)
        seed_spaces(env, seed + index)
        return Flat(env)

    vectorize = AsyncVectorEnv if args.async_envs else SyncVectorEnv
    makers = [partial(make, index) for index in range(args.num_envs)]
    envs = vectorize(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    if not args.async_envs and len({id(env.unwrapped) for env in envs.envs}) < args.num_envs:
        raise Refused("make_env must return a new environment in each call")
    return envs


def find_binary_obs(space: gym.Space) -> np.ndarray:
    """Which numbers [D] of a flattened observation are one-hot or binary."""
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        parts = space.values() if isinstance(space, gym.spaces.Dict) else space
        return np.concatenate([find_binary_obs(part) for part in parts])
    if isinstance(space, gym.spaces.Box):
        return ((space.low == 0) & (space.high == 1) & (space.dtype.kind != "f")).flatten()
    categories = gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary
    return np.full(gym.spaces.flatdim(space), isinstance(space, categories))


def check_actions(space: gym.Space, args: Args) -> None:
    """Raise `Refused` for actions that a policy here cannot choose."""
    if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
        raise Refused(
            f"{args.env_id} has actions {space}, not Discrete(n) from 0 (for Box: ppo_continuous.py)"
        )


def make_eval_env(args: Args) -> Flat:
    """The environment of the evaluation, made and tried before training: what fails there fails at once.

    Raises `Refused` for an environment with which training would be wrong.
    """
    with isolated_random_numbers(args.seed):
        env = make_env(args, **({"render_mode": "rgb_array"} if args.capture_video else {}))
        check_actions(env.action_space, args)
        if env.has_wrapper_attr("update_running_mean"):
            raise Refused(
                "remove NormalizeObservation and NormalizeReward: checkpoints do not keep their statistics"
            )
        seed_spaces(env, args.seed)
        flat = Flat(env)
        flat.reset(seed=args.seed)
        flat.step(env.action_space.sample())
        torch.default_generator.manual_seed(2**40)
        flat.reset()
        seed = torch.initial_seed()  # 2**40, unless reset has set another
        flat.reset()
        if 2**40 != seed == torch.initial_seed() and not args.async_envs:
            raise Refused("reset seeds PyTorch's generator: exploration would repeat in each episode")
        if args.capture_video and not find_spec("moviepy"):
            raise Refused("--capture-video needs: pip install moviepy")
        if args.capture_video and not (env.render_mode and np.ndim(env.render()) == 3):
            raise Refused("--capture-video needs an environment with render_mode='rgb_array'")
    return flat


def check_numbers(rollout: Rollout) -> None:
    """Raise `FloatingPointError` where a number is NaN, or too large for float32 to have its square."""
    next_obs = np.where(rollout.terminated[..., np.newaxis], 0, rollout.next_obs)  # unused after termination
    for name, numbers in {"obs": rollout.obs, "next_obs": next_obs, "reward": rollout.rewards}.items():
        wrong = np.argwhere(~(np.abs(numbers) < 1e15))
        if len(wrong) > 0:
            t, n, *_ = wrong[0]
            value = numbers[tuple(wrong[0])]
            raise FloatingPointError(f"{name} is {value} in step {t} of the rollout, in environment {n}")


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

    def log(self, metrics: dict[str, float], episodes: list[tuple[float, int]]) -> None:
        """Log an iteration, print progress, and save after the first and then every minute.

        Adds the episodes to the state's returns. Raises `FloatingPointError` if the loss is not finite.
        """
        if not math.isfinite(metrics["kl"] + metrics["grad_norm"]):
            raise FloatingPointError("NaN in the loss: is --learning-rate too high, or a logit -inf?")
        if metrics["first_approx_kl"] > 1e-4 and not self.warned:  # correct runs have up to 1e-8
            print("acting and learning do not compute the same policy: is a mask, or dropout, in only one?")
            self.warned = True
        mean, std = self.agent.obs_moments.mean, self.agent.obs_moments.var.sqrt()
        is_first = self.last_save == -math.inf
        rounded = (1e-5 * mean.abs() > 0.1 + std).nonzero().flatten().tolist()  # or constant, and large
        if is_first and rounded:
            print(f"float32 has too few digits for observations {rounded}: subtract their means in make_env")
        if is_first and ((std > 0) & (std < 1e-5)).any():  # normalised, its deviation would be below 0.1
            print("an observation varies by less than 1e-5, and is hardly seen: scale it if it matters")
        if is_first and 0 < self.agent.return_moments.var < 1e-10:
            print("returns vary by less than 1e-5, and are hardly seen: scale the rewards")
        args, state, step, now = self.args, self.state, self.state.global_step, time.monotonic()
        scalars = {name if "/" in name else f"losses/{name}": value for name, value in metrics.items()}
        if episodes:
            returns, lengths = np.transpose(episodes)
            state.returns = [*state.returns, *returns.tolist()][-100:]
            scalars["charts/episodic_return"] = returns.mean()
            scalars["charts/episodic_return_std"] = returns.std()
            scalars["charts/episodic_return_min"] = returns.min()
            scalars["charts/episodic_return_max"] = returns.max()
            scalars["charts/episodic_return_100"] = float(np.mean(state.returns))
            scalars["charts/episodic_length"] = lengths.mean()
        scalars["charts/SPS"] = speed = (step - self.first_step) / (now - self.first_time)
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if now - self.last_save > 60:
            self.save()
        if step >= args.total_timesteps or now - self.last_print > 5:
            self.last_print = now
            average = f"return {np.mean(state.returns):.5g}" if state.returns else "no episode has ended yet"
            left = timedelta(seconds=round(max(args.total_timesteps - step, 0) / speed))
            line = f"{step:>10,} steps  {average}  KL {max(metrics['kl'], 0):.4f}"
            print(f"{line}  {speed:,.0f}/s  {left} left", flush=True)

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


def load_weights(agent: Agent, weights: dict[str, Tensor], obs_space: gym.spaces.Box) -> None:
    """Load the networks and normalisers of a checkpoint."""
    # Checkpoints of version 0.2 have no `binary_obs`: there, it was any number with the bounds 0 and 1.
    bounded = torch.from_numpy((obs_space.low == 0) & (obs_space.high == 1))
    agent.load_state_dict({"binary_obs": bounded} | weights)


def load_start(args: Args) -> dict:
    """The content of the checkpoint that --resume or --init names, if one does."""
    start = args.init if args.resume is None else args.resume
    if start is None:
        return {}
    path = find_checkpoint(start, args.exp_name)
    saved, content = load_checkpoint(path)
    if args.env_id != saved.env_id:
        print(f"{path} was trained on {saved.env_id}")
    for name in ("norm_obs", "norm_rewards"):
        if getattr(args, name) != getattr(saved, name):
            raise Refused(
                f"--{name.replace('_', '-')} must be as in {start}, whose networks have learnt with it"
            )
    return content


def load_policy(path: str | Path, env: gym.Env, device: str = "cpu") -> Callable:
    """A trained policy with its memory, as a function `policy(obs, start)` to the most likely actions.

    `start` is true for an episode's first observation. If the space is a `Box`, both may have N rows.
    """
    args, content = load_checkpoint(path, device)
    space, num_actions = env.observation_space, int(env.action_space.n)
    obs_space = Flat(env).observation_space
    agent = Agent(args, obs_space, num_actions).to(device).eval()
    load_weights(agent, content["agent"], obs_space)
    size = obs_space.shape[0]  # D
    memory = torch.zeros(MEMORY_VECTORS[args.cell], 1, args.hidden_size, device=device)

    @torch.inference_mode()
    def policy(obs: Any, start: bool | np.ndarray) -> np.ndarray:
        nonlocal memory
        is_batch = isinstance(space, gym.spaces.Box) and np.shape(obs)[1:] == space.shape != np.shape(obs)
        flat = np.reshape(obs, (len(obs), size)) if is_batch else flatten(space, obs)
        flat = torch.as_tensor(flat, dtype=torch.float32, device=device)
        rows = agent.normalize(flat).reshape(-1, flat.shape[-1])
        starts = torch.as_tensor(np.asarray(start), device=device).expand(len(rows))
        if starts.all():  # of any number of environments
            memory = memory.new_zeros(len(memory), len(rows), args.hidden_size)
        if memory.shape[1] != len(rows):
            raise ValueError(f"{len(rows)} observations, but the memory of {memory.shape[1]} environments")
        log_policy, _, memory = agent.step(rows, starts, memory)
        actions = most_likely(log_policy).cpu().numpy()
        return actions if is_batch else actions[0]

    return policy


def evaluate(path: str | Path, args: Args, env: gym.Env | None = None) -> np.ndarray:
    """Play --eval-episodes episodes with the most likely actions; print and return their returns.

    Without `env`, it makes one by `make_eval_env`, and closes it. Random generators are left as they were:
    training goes on as if this had not been called.
    """
    path = find_checkpoint(path, args.exp_name).absolute()  # an environment may change the current folder
    if env is None:
        env = make_eval_env(args)
        result = evaluate(path, args, env)
        close(env)
        return result
    returns: list[float] = []
    seed = hash_seed(args.seed, 2**40)  # episodes that training has not seen
    with isolated_random_numbers(seed):
        if args.capture_video and not STOP.is_set():
            folder = path.with_name("videos" if path.name == "checkpoint.pt" else f"{path.stem}_videos")
            env = gym.wrappers.RecordVideo(env, str(folder), lambda episode: True)
            print(f"videos: {folder}")
        policy = load_policy(path, env, args.device)
        seed_spaces(env, seed)
        while len(returns) < args.eval_episodes and not STOP.is_set():
            obs, _ = env.reset(seed=seed + len(returns))
            total = 0.0
            for step in range(10_000):  # some environments never end
                obs, reward, terminated, truncated, _ = env.step(policy(obs, start=step == 0))
                total += reward
                if terminated or truncated or STOP.is_set():
                    break
            else:
                print(f"episode {len(returns) + 1} was stopped after 10,000 steps")
            if not STOP.is_set():
                returns.append(total)
        if returns:
            content = load_checkpoint(path)[1]
            trained = f"{content['state']['global_step']:,} steps of {content['args']['env_id']}"
            shown = f"{np.mean(returns):.5g} +/- {np.std(returns):.3g} in {len(returns)} episodes"
            print(f"evaluation return {shown} with the most likely actions, after {trained}")
        if isinstance(env, gym.wrappers.RecordVideo) and env.recording:
            env.stop_recording()
    return np.array(returns)


def close(env: gym.Env | VectorEnv) -> None:
    """Close environments that are no longer needed. If that fails, show the error and go on."""
    try:
        env.close()
    except Exception:
        traceback.print_exc()


def parse_args() -> Args:
    """The settings of the command line; with --resume or --evaluate, the others are the checkpoint's."""
    parse = partial(tyro.cli, Args, description=__doc__.partition("\n  [PPO]")[0])
    args = parse()
    if sum(path is not None for path in (args.resume, args.evaluate, args.init)) > 1:
        raise Refused("--resume, --evaluate and --init cannot be combined")
    if args.resume is None and args.evaluate is None:
        return args
    path = find_checkpoint(args.evaluate if args.resume is None else args.resume, args.exp_name)
    saved, content = load_checkpoint(path)
    if ":" in saved.env_id and args.env_id == Args.env_id:
        raise Refused(f"{path} needs a module; if you trust it, add --env-id {saved.env_id}")
    of_this_run = "resume", "evaluate", "init", "track", "capture_video", "device"
    args = parse(default=replace(saved, **{name: getattr(Args, name) for name in of_this_run}))
    steps = content["state"]["global_step"]
    if args.resume is not None and "optimizer" not in content:
        raise Refused(f"{path} has no optimizer: begin a run with --init")
    if args.resume is not None and steps >= args.total_timesteps:
        raise Refused(f"{path} has been trained for {steps:,} steps: raise --total-timesteps")
    return replace(args, resume=args.resume and str(path), evaluate=args.evaluate and str(path))


def print_commands(args: Args, path: Path, env: gym.Env, complete: bool) -> None:
    """Say how to resume a run, to watch its agent, and to check it."""
    script, file = Path(sys.argv[0]), str(path)
    module = ["--env-id", args.env_id] if ":" in args.env_id else []  # a checkpoint imports none by itself
    steps = load_checkpoint(path)[1]["state"]["global_step"]  # of a short run, more than it was to have
    more = ["--total-timesteps", f"{2 * max(steps, args.total_timesteps):.10g}"] if complete else []
    print("resume:", shlex.join(["python", str(script), "--resume", file, *module, *more]))
    if "rgb_array" in (env.metadata.get("render_modes") or []):
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
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    STOP.clear()
    try:
        args = parse_args()
        # A program that imports this file may divide the work among processes; the file alone does not.
        if int(os.environ.get("WORLD_SIZE", 1)) > 1 and __name__ == "__main__":
            raise Refused("torchrun would train the same run in each process")
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
