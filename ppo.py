# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.5", "gymnasium[classic-control,toy-text]>=1.1", "numpy", "tensorboard", "tyro>=0.9.1",
# ]
# ///
"""Proximal Policy Optimization (PPO) for discrete actions, in one file.

    python ppo.py --env-id CartPole-v1 --total-timesteps 1e5
    python ppo.py --env-id FrozenLake-v1 --env-kwargs '{"is_slippery": false}'
    python ppo.py --evaluate runs/<run>/checkpoint.pt --capture-video

It trains on any Gymnasium environment with `Discrete` actions and observations that flatten to a vector. To
use your own, register it and name it (`--env-id my_module:MyEnv-v0`), or change make_env.

  [PPO]     Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE]     Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
            Estimation", arXiv:1506.02438
  [Limits]  Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv:1712.00378
  [Matters] Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
  [37]      Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog

PPO comes first: networks, equations, then the algorithm up to `train`, which repeats:

    adjust_coefficients    sets the learning rate, ε, β and c₂, by schedules or by the last update
    collect_rollout        acts for T steps in N environments
    normalize_rollout      normalises observations and rewards, and updates the running statistics
    make_batch             estimates values and advantages (compute_gae)
    update                 takes K epochs of gradient steps on minibatches, each on the loss of ppo_loss

Shapes: T steps per rollout, N environments, B = T x N transitions, D numbers per observation, A actions.
"""

import json
import math
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
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
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:  # the trailing comments become --help
    exp_name: str = Path(sys.argv[0]).stem or "ppo"  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    resume: str | None = None  # resume from this checkpoint; flags override its settings
    evaluate: str | None = None  # only evaluate this checkpoint, greedily
    eval_episodes: int = 10  # episodes of an evaluation
    capture_video: bool = False  # record the evaluation in the run folder (needs moviepy)
    track: bool = False  # mirror TensorBoard to Weights & Biases, to its WANDB_PROJECT (needs wandb)
    device: str = "cpu"  # cpu, cuda or mps; small networks are fastest on the CPU
    compile: bool = False  # compile the gradient step: pays off after about 25 s (PyTorch >= 2.13)

    # Environment
    env_id: str = "CartPole-v1"  # Gymnasium id; `module:EnvId-v0` imports the module first
    env_kwargs: str = "{}"  # environment arguments, as JSON
    num_envs: int = 16  # N: environments that step in parallel
    async_envs: bool = False  # one process per environment: worthwhile when steps are slow

    # PPO
    total_timesteps: float = 500_000  # total number of transitions; 1e6 is fine
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
    adapt: Literal["none", "kl-coef", "clip-coef", "learning-rate"] = "none"  # adapt this to the KL
    desired_kl: float = 0.01  # KL divergence per iteration at which --adapt aims, in nats
    target_kl: float | None = None  # stop an iteration after an epoch whose KL divergence exceeds this
    ent_coef: float = 0.01  # c₂: weight of the entropy bonus
    anneal_ent_coef: bool = False  # decay the entropy coefficient linearly to 0
    target_entropy: float | None = None  # adapt the entropy coefficient to hold this entropy, in nats
    vf_coef: float = 0.5  # c₁: weight of the value loss, ½ (V - return)²
    max_grad_norm: float = 0.5  # clip the gradient to this global norm
    norm_obs: bool = True  # normalise observations, unless bounded by 0 and 1, by running mean and std
    norm_rewards: bool = True  # divide rewards by the running std of the discounted return ([Matters], §3)
    hidden_size: int = 64  # width of the two hidden layers of the actor, and of the critic

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if hasattr(value, "item"):  # of NumPy or PyTorch: a checkpoint holds plain Python numbers
                setattr(self, name, value.item())
            if isinstance(value, Path):
                setattr(self, name, str(value))
        for name in ("resume", "evaluate"):  # a run folder is accepted, too
            path = getattr(self, name)
            if path and Path(path).is_dir():
                setattr(self, name, str(Path(path, "checkpoint.pt")))


# Limits of the settings, both included. With more than 30 epochs, or ε above 0.3, the policy moves too far
# from the one that collected the data. To study what is refused, change this table in your program. A number
# of your own in Args is checked once it has an entry here.
BOUNDS = {
    "seed": (0, 2**31), "eval_episodes": (1, math.inf), "num_envs": (1, math.inf), "num_steps": (1, math.inf),
    "total_timesteps": (1, 1e15), "learning_rate": (0, 1), "gamma": (0, 1), "gae_lambda": (0, 1),
    "update_epochs": (1, 30), "num_minibatches": (1, math.inf), "clip_coef": (1e-3, 0.3), "kl_coef": (0, 1e4),
    "desired_kl": (1e-6, 10), "target_kl": (1e-6, math.inf), "ent_coef": (0, 100), "target_entropy": (0, 100),
    "vf_coef": (0, 100), "max_grad_norm": (1e-6, math.inf), "hidden_size": (1, 2**16),
}  # fmt: skip


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

    def update(self, x: Tensor) -> None:
        """Include x [B, D]."""
        share = len(x) / (self.count + len(x))  # weight of the new data
        delta = x.mean(0) - self.mean
        self.var.lerp_(x.var(0, correction=0), share).add_(share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.add_(len(x))


class Agent(nn.Module):
    """Actor and critic, with the running statistics that normalise their inputs and the rewards."""

    def __init__(self, args: Args, obs_space: gym.spaces.Box, num_actions: int):
        super().__init__()
        obs_size = obs_space.shape[0]
        self.actor = mlp(obs_size, args.hidden_size, num_actions, last_gain=0.01)  # near-uniform at first
        self.critic = mlp(obs_size, args.hidden_size, 1, last_gain=1.0)
        self.obs_moments, self.return_moments = RunningMoments(obs_size), RunningMoments(1)
        self.norm_obs = args.norm_obs
        unit = (obs_space.low == 0) & (obs_space.high == 1)  # one-hot, for example: these stay as they are
        self.unit_obs = nn.Buffer(torch.from_numpy(unit), persistent=False)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations [..., D] as the networks see them: (x - mean) / std within ±10, or unchanged."""
        if not self.norm_obs:
            return obs
        mean, scale = self.obs_moments.mean, torch.rsqrt(self.obs_moments.var + 1e-8)
        return torch.where(self.unit_obs, obs, (obs - mean) * scale).clamp(-10, 10)

    def policy(self, obs: Tensor) -> Tensor:
        """π(·|s), as log-probabilities [..., A], for normalised observations [..., D]."""
        # To forbid an action, set its logit to -1e8 here: with -inf, the entropy would be NaN. A mask in the
        # observation must have the bounds 0 and 1, otherwise it is normalised.
        return torch.log_softmax(self.actor(obs), -1)

    def value(self, obs: Tensor) -> Tensor:
        """V(s) [...] for normalised observations [..., D]."""
        return self.critic(obs).squeeze(-1)


# ------------------------------------------------- Equations ------------------------------------------------


# `Agent.policy` and these five functions are all that knows the distribution of actions.


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
    """B transitions to learn from. To add a quantity, compute it in `make_batch` and use it in `ppo_loss`."""

    obs: Tensor  # [B, D], normalised
    actions: Tensor  # [B]
    old_policy: Tensor  # [B, A], π_old(·|s) as log-probabilities
    old_values: Tensor  # [B], V_old(s)
    advantages: Tensor  # [B]
    returns: Tensor  # [B]
    rewards: Tensor  # [B], scaled


@dataclass
class State:
    """Coefficients and progress: what a checkpoint holds besides the networks and the optimizer."""

    learning_rate: float
    clip_coef: float
    kl_coef: float
    ent_coef: float
    global_step: int = 0  # transitions so far
    kl: float | None = None  # of the last iteration; None before the first
    entropy: float | None = None  # likewise
    returns: list[float] = field(default_factory=list)  # of the last 100 episodes


def ppo_loss(agent: Agent, batch: Batch, args: Args, state: State) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, and metrics: [PPO], equation 9, negated, with ½ in the value loss."""
    policy, values = agent.policy(batch.obs), agent.value(batch.obs)
    advantages = batch.advantages
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    log_ratio = log_prob(policy, batch.actions) - log_prob(batch.old_policy, batch.actions)
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s)
    if args.surrogate == "clip":  # L^CLIP = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] ([PPO], equation 7)
        clipped_ratio = ratio.clamp(1 - state.clip_coef, 1 + state.clip_coef)
        policy_losses = -torch.min(ratio * advantages, clipped_ratio * advantages)
    else:  # L^KLPEN = E[r A - β KL(π_old ‖ π)] ([PPO], equation 8)
        policy_losses = state.kl_coef * kl_divergence(batch.old_policy, policy) - ratio * advantages

    value_losses = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:  # the larger of two losses: of V, and of V clipped to V_old ± ε
        change = (values - batch.old_values).clamp(-state.clip_coef, state.clip_coef)
        value_losses = torch.max(value_losses, 0.5 * (batch.old_values + change - batch.returns).square())

    entropies = entropy(policy)
    loss = (policy_losses + args.vf_coef * value_losses - state.ent_coef * entropies).mean()
    with torch.no_grad():  # scalars, averaged over the gradient steps, then logged as losses/<name>
        metrics = {
            "policy_loss": policy_losses.mean(),
            "value_loss": value_losses.mean(),
            "entropy": entropies.mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),  # k3 of Schulman 2020, "Approximating KL Divergence"
            "clipfrac": ((ratio - 1).abs() > state.clip_coef).float().mean(),
        }
    return loss, metrics


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout:
    """T steps of N environments. The next rollout starts where this one ends, in the same arrays.

    An environment whose episode ends is reset in the same step. `next_obs` holds the last observation of the
    old episode, whose value counts at a time limit, and `current_obs` the first one of the next.
    """

    def __init__(self, args: Args, obs_size: int):
        shape = args.num_steps, args.num_envs
        self.current_obs = np.zeros((args.num_envs, obs_size), np.float32)  # what the next step acts on
        self.obs = np.zeros((*shape, obs_size), np.float32)  # s_t
        self.next_obs = np.zeros((*shape, obs_size), np.float32)  # s_{t+1}
        self.policies: Tensor  # π_old(·|s_t) [T, N, ...], as `Agent.policy` gives it
        self.actions: Tensor  # a_t [T, N, ...], as `sample` draws it
        self.rewards = np.zeros(shape)  # r_t, in float64: returns are sums of them
        self.terminated, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        # So far, of the unfinished episode in each environment:
        self.episode_returns, self.episode_lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, int)
        self.discounted_returns = np.zeros(args.num_envs)


def collect_rollout(envs: VectorEnv, agent: Agent, rollout: Rollout, args: Args) -> list[tuple[float, int]]:
    """Act for T steps. Returns the return and the length of each episode that ended."""
    policies, actions, episodes = [], [], []
    for t in range(args.num_steps):
        rollout.obs[t] = rollout.current_obs
        with torch.inference_mode():
            obs = torch.tensor(rollout.obs[t], device=args.device)
            policy = agent.policy(agent.normalize(obs))
            action = sample(policy)
        env_action = action.cpu().numpy().copy()  # a copy: environments may change it in place
        rollout.current_obs, rewards, terminated, truncated, infos = envs.step(env_action)
        policies.append(policy)
        actions.append(action)
        rollout.next_obs[t], rollout.rewards[t] = rollout.current_obs, rewards
        rollout.terminated[t], rollout.truncated[t] = terminated, truncated
        rollout.episode_returns += rewards
        rollout.episode_lengths += 1
        for n in np.flatnonzero(rollout.terminated[t] | rollout.truncated[t]):
            rollout.next_obs[t, n] = infos["final_obs"][n]
            episodes.append((float(rollout.episode_returns[n]), int(rollout.episode_lengths[n])))
            rollout.episode_returns[n] = rollout.episode_lengths[n] = 0
    rollout.policies, rollout.actions = torch.stack(policies), torch.stack(actions)
    counted = rollout.obs, rollout.next_obs[~rollout.terminated], rollout.rewards
    if not all(np.isfinite(numbers).all() for numbers in counted):
        raise FloatingPointError("a reward or an observation is NaN or infinite: look at the environment")
    return episodes


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
def make_batch(
    agent: Agent, rollout: Rollout, obs: Tensor, next_obs: Tensor, rewards: Tensor, args: Args
) -> Batch:
    """The transitions of a rollout, with values and advantages of the current critic.

    `obs`, `next_obs` and `rewards` are what `normalize_rollout` returned. Where the task ended an episode,
    `next_obs` may be NaN.
    """
    tensor = partial(torch.as_tensor, device=args.device)
    values, next_values = agent.value(obs), agent.value(next_obs)
    ends = tensor(rollout.terminated), tensor(rollout.truncated)
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


@torch.no_grad()
def mean_kl(agent: Agent, batch: Batch) -> float:
    """KL divergence of the current policy from the one that acted, in nats."""
    return kl_divergence(batch.old_policy, agent.policy(batch.obs)).mean().item()


def compute_gradients(agent: Agent, minibatch: Batch, args: Args, state: State) -> dict[str, Tensor]:
    """Compute the gradients of the loss, clipped to --max-grad-norm, in the agent. Returns metrics."""
    loss, metrics = ppo_loss(agent, minibatch, args, state)
    loss.backward()
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return metrics


def update(
    agent: Agent, optimizer: Adam, compute: Callable, batch: Batch, args: Args, state: State
) -> dict[str, float]:
    """K epochs of gradient steps on shuffled minibatches, each by `compute`, which is `compute_gradients`.

    Returns metrics: of the batch, means over the gradient steps, and the KL divergence after the last.
    """
    metrics = batch_metrics(batch, args, state)
    optimizer.param_groups[0]["lr"] = state.learning_rate
    steps = []  # metrics of each gradient step, still as tensors: reading them would wait for the GPU
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.obs)).to(args.device)
        for rows in order.tensor_split(args.num_minibatches):
            minibatch = Batch(*(column[rows] for column in batch))
            optimizer.zero_grad()
            steps.append(compute(agent, minibatch, args, state))
            optimizer.step()
        if args.target_kl is not None and mean_kl(agent, batch) > args.target_kl:
            break
    for name in steps[0]:
        metrics[name] = torch.stack([step[name] for step in steps]).mean().item()
    metrics["first_approx_kl"] = steps[0]["approx_kl"].item()  # before the first step: 0, up to rounding
    metrics["kl"] = mean_kl(agent, batch)
    return metrics


def batch_metrics(batch: Batch, args: Args, state: State) -> dict[str, float]:
    """The coefficients, how well V_old predicts the returns, and the share of rewards that are clipped."""
    errors = batch.returns - batch.old_values  # of the critic
    metrics = {
        "charts/learning_rate": state.learning_rate,
        "charts/clip_coef": state.clip_coef,
        "charts/kl_coef": state.kl_coef,
        "charts/ent_coef": state.ent_coef,
        "explained_variance": 1 - (errors.var(correction=0) / batch.returns.var(correction=0)).item(),
        "critic_error": (errors.square().mean() / batch.returns.square().mean()).sqrt().item(),
    }
    if args.norm_rewards:  # where many are clipped, large rewards look the same
        metrics["reward_clipfrac"] = (batch.rewards.abs() >= 10).float().mean().item()
    return metrics


def adjust_coefficients(state: State, args: Args) -> None:
    """Set the coefficients in the state for an iteration, by their schedules or by the last update."""
    remaining = max(0, 1 - state.global_step / args.total_timesteps)
    scheduled_lr = args.learning_rate * (remaining if args.anneal_lr else 1)
    if args.adapt != "learning-rate":
        state.learning_rate = scheduled_lr
    if args.adapt != "clip-coef":
        state.clip_coef = args.clip_coef
    if args.adapt != "kl-coef":
        state.kl_coef = args.kl_coef
    if args.target_entropy is None:
        state.ent_coef = args.ent_coef * (remaining if args.anneal_ent_coef else 1)
    if state.kl is None or state.entropy is None:  # before the first update
        return

    kl_too_high, kl_too_low = state.kl > 1.5 * args.desired_kl, state.kl < args.desired_kl / 1.5
    if args.adapt == "kl-coef" and (kl_too_high or kl_too_low):  # [PPO], §4
        state.kl_coef = min(max(state.kl_coef * (2 if kl_too_high else 0.5), 1e-4), 1e4)
    if args.adapt == "clip-coef" and (kl_too_high or kl_too_low):
        state.clip_coef = min(max(state.clip_coef * (0.5 if kl_too_high else 2), 0.01), 0.3)
    if args.adapt == "learning-rate":  # by the factor of Rudin et al. 2022, arXiv:2109.11978
        factor = 1 / 1.5 if kl_too_high else 1.5 if kl_too_low else 1
        state.learning_rate = min(max(state.learning_rate * factor, 1e-5), scheduled_lr)
    if args.target_entropy is not None and abs(state.entropy - args.target_entropy) > 0.05:
        factor = 1 / 1.1 if state.entropy > args.target_entropy else 1.1
        state.ent_coef = min(max(state.ent_coef * factor, 1e-5), 10.0)


def train(args: Args) -> dict:
    """PPO ([PPO], Algorithm 1), then a greedy evaluation. If killed, it loses a minute or an iteration.

    Returns "checkpoint" (its path), "training_return" (of the last 100 episodes) and "greedy_returns". Raises
    `ValueError` for invalid settings. With `resume`, the settings are those of `args`, too. It seeds
    the global random generators, sets the number of PyTorch's threads, and writes to runs/.
    """
    args = replace(args, evaluate=None)  # a copy, in which NumPy's numbers are plain ones
    check(args)
    torch.set_num_threads(1)  # for small networks, one is fastest
    state = State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)
    if args.resume:
        _, saved = load_checkpoint(args.resume)
        vars(state).update(saved["state"])
    envs = make_envs(args, seed_everything(args.seed, state.global_step))
    if envs.metadata.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
        raise ValueError("the environments must reset in the same step: see AutoresetMode.SAME_STEP")
    env_seed = seed_everything(args.seed, state.global_step)  # again: environments may have drawn numbers
    obs_space, num_actions = envs.single_observation_space, int(envs.single_action_space.n)
    agent = Agent(args, obs_space, num_actions).to(args.device)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # ε: [37], detail 3
    if args.resume:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
    compute = compiled(compute_gradients) if args.compile else compute_gradients
    rollout = Rollout(args, obs_space.shape[0])
    run = Run(args, agent, optimizer, state)

    rollout.current_obs, _ = envs.reset(seed=env_seed)
    while state.global_step < args.total_timesteps and not STOP.is_set():
        adjust_coefficients(state, args)
        episodes = collect_rollout(envs, agent, rollout, args)
        obs, next_obs, rewards = normalize_rollout(agent, rollout, args)
        batch = make_batch(agent, rollout, obs, next_obs, rewards, args)
        metrics = update(agent, optimizer, compute, batch, args, state)
        state.global_step += len(batch.obs)
        state.kl, state.entropy = float(metrics["kl"]), float(metrics["entropy"])
        run.log(metrics, episodes)
    results = run.finish()
    envs.close()
    return results


# ========================== End of PPO. What follows is what training needs around it ======================


STOP = threading.Event()  # set by Ctrl-C and SIGTERM: training ends after the iteration


def seed_everything(seed: int, step: int = 0) -> int:
    """Seed all random generators for training from a step on. Returns a seed for the environments."""
    if step > 0:  # a resumed run has new episodes
        seed = hash_seed(seed, step)
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(seed)
    # A hash, because Gymnasium seeds environment i with this + i: seeds 1 and 2 would share most of them.
    return hash_seed(seed)


def hash_seed(*numbers: int) -> int:
    """A seed below 2**31, which is all that some simulators take, from one or several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


def compiled(function: Callable) -> Callable:
    """`compute_gradients`, compiled with the backward pass in it."""
    torch._dynamo.reset()  # PyTorch limits recompilations per process, and each run compiles anew
    torch._dynamo.config.trace_autograd_ops = True  # lets `backward` be part of the graph
    fast = torch.compile(function, fullgraph=True)  # with fullgraph, what cannot be compiled is an error

    def compute(agent: Agent, minibatch: Batch, args: Args, state: State) -> dict[str, Tensor]:
        # Each new value of a Python number would be compiled anew: coefficients become tensors.
        changing = {name: torch.tensor(getattr(state, name)) for name in ("clip_coef", "kl_coef", "ent_coef")}
        return fast(agent, minibatch, args, replace(state, **changing))

    return compute


def check_bounds(args: Args) -> None:
    """Raise `ValueError` where a setting is not of its type, or not within BOUNDS."""
    types: dict[Any, Any] = {kind: kind for kind in (bool, int, str, str | None)}
    types |= {float: int | float, float | None: int | float | None}  # 1 is a float, too
    for name, kind in get_type_hints(Args).items():
        value, choices = getattr(args, name), get_args(kind)
        if get_origin(kind) is Literal and value not in choices:
            raise ValueError(f"--{name.replace('_', '-')} must be {' or '.join(choices)}, not {value}")
        is_flag = isinstance(value, bool) and kind is not bool  # True is an int, but it is not meant as 1
        if is_flag or not isinstance(value, types.get(kind, object)):
            expected = getattr(kind, "__name__", kind)
            raise ValueError(f"--{name.replace('_', '-')} must be of type {expected}, not {value!r}")
    for name, (low, high) in BOUNDS.items():
        value, default = getattr(args, name), getattr(Args, name)
        unused = value is None and default is None
        if not unused and not low <= value <= high:
            limits = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise ValueError(f"--{name.replace('_', '-')} must be {limits}, not {value}")


def check_settings(args: Args) -> None:
    """Raise `ValueError` for settings with which training cannot be right."""
    check_bounds(args)
    one_step = args.update_epochs * args.num_minibatches == 1
    clips_nothing = args.surrogate != "clip" and not args.clip_vloss
    largest = args.num_envs * args.num_steps // 2  # so that each minibatch has two transitions or more
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    for wrong, reason in [
        (args.num_minibatches > largest, f"--num-minibatches must be at most {largest}; raise --num-steps"),
        (not (args.norm_adv or one_step), "several gradient steps need --norm-adv"),
        (args.adapt == "kl-coef" and args.surrogate == "clip", "kl-coef needs --surrogate kl-penalty"),
        (args.adapt == "clip-coef" and args.surrogate != "clip", "clip-coef needs --surrogate clip"),
        (args.kl_coef != Args.kl_coef and args.surrogate == "clip", "--kl-coef needs --surrogate kl-penalty"),
        (clips_nothing and args.clip_coef != Args.clip_coef, "--clip-coef needs --surrogate clip"),
        (args.desired_kl != Args.desired_kl and args.adapt == "none", "--desired-kl needs --adapt"),
        (args.anneal_ent_coef and args.target_entropy is not None, "--target-entropy adapts c₂: no schedule"),
        (args.compile and torch.__version__ < "2.13", "--compile needs PyTorch 2.13"),
        (args.compile and not shutil.which(compiler), f"--compile needs the C++ compiler {compiler}"),
        (args.track and not find_spec("wandb"), "--track needs: pip install wandb"),
        (Path("runs").is_file(), "runs is a file, where a folder of that name is needed"),
    ]:
        if wrong:
            raise ValueError(reason)


def check(args: Args) -> None:
    """Raise `ValueError` for what cannot be trained or evaluated, before anything is written."""
    if not (args.resume or args.evaluate):
        check_settings(args)
    if args.eval_episodes < 1:
        raise ValueError("--eval-episodes must be at least 1")
    if args.capture_video and not find_spec("moviepy"):
        raise ValueError("--capture-video needs: pip install moviepy")
    if re.search("^ALE/|NoFrameskip", args.env_id):
        raise ValueError(f"{args.env_id} is an Atari game: use ppo_atari.py")
    try:
        torch.zeros((), device=args.device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {args.device} is not available; use cpu") from error
    try:
        env = make_env(args, **({"render_mode": "rgb_array"} if args.capture_video else {}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{args.env_id} with --env-kwargs {args.env_kwargs}: {error}") from error
    env.close()
    actions = env.action_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        raise ValueError(f"{args.env_id} has {actions}: see ppo_continuous.py (Box) or docs/recipes.md")
    try:
        obs_space = gym.spaces.flatten_space(env.observation_space)
    except NotImplementedError:  # of a kind that Gymnasium does not know
        obs_space = None
    if not isinstance(obs_space, gym.spaces.Box):
        raise ValueError(f"{env.observation_space} does not flatten to a vector: see docs/recipes.md")
    if path := args.resume or args.evaluate:
        saved, content = load_checkpoint(path)
        for name in ("norm_obs", "norm_rewards"):
            if getattr(args, name) != getattr(saved, name):
                flag = f"--{name.replace('_', '-')}"
                raise ValueError(f"{flag} must be as in {path}, whose networks have learnt with it")
        try:
            Agent(args, obs_space, int(actions.n)).load_state_dict(content["agent"])
        except RuntimeError as error:
            raise ValueError(f"{path} is of another script or size, or not for {args.env_id}") from error
    if args.resume:  # only now: another script's checkpoint may have settings that are right there
        check_settings(args)


# ------------------------------------------------- Environments --------------------------------------------


def make_env(args: Args, **kwargs) -> gym.Env:
    """One environment. Put your own here, or wrappers; --env-id is then only a name."""
    return gym.make(args.env_id, **json.loads(args.env_kwargs) | kwargs)


class DropInfo(gym.Wrapper):
    """Drops the info, which nothing here reads: joining it is slow, and fails where types differ.

    To use one of its numbers, return it in `step`, and 0 in `reset`. `collect_rollout` then finds it in
    `infos`; where an episode ended, that is the reset's 0, and the last step's is in `infos["final_info"]`.
    """

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        return self.env.reset(**kwargs)[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        obs, reward, terminated, truncated, _ = self.env.step(action)
        # Plain values, since the reset may overwrite arrays that the environment reuses.
        return obs, to_float(reward), bool(terminated), bool(truncated), {}


def to_float(reward: Any) -> float:
    """A reward as a plain number: it may be an array or a tensor with one element."""
    return float(reward.item() if hasattr(reward, "item") else reward)


def make_envs(args: Args, seed: int) -> VectorEnv:
    """N environments, here or in a process each, with flat observations.

    The parts of a `Dict` are in the order of its space: alphabetical, if it was made from a plain dict.
    """
    main_process = os.getpid()
    on_sigterm = signal.SIG_IGN if signal.getsignal(signal.SIGTERM) is stop else signal.SIG_DFL

    def make(index: int) -> gym.Env:
        seed_everything(seed + index)  # for environments that draw from the generators of Python or NumPy
        if os.getpid() != main_process:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that trains
            signal.signal(signal.SIGTERM, on_sigterm)
        # FlattenObservation copies, so a reset cannot overwrite `final_obs` in an array that is reused.
        return DropInfo(gym.wrappers.FlattenObservation(make_env(args)))

    vectorize = AsyncVectorEnv if args.async_envs else SyncVectorEnv
    makers = [partial(make, index) for index in range(args.num_envs)]
    return vectorize(makers, autoreset_mode=AutoresetMode.SAME_STEP)


# ------------------------------------------------- Logging and checkpoints ---------------------------------


class Run:
    """The folder of a run: its curves for TensorBoard, and its checkpoint."""

    def __init__(self, args: Args, agent: Agent, optimizer: Adam, state: State):
        self.args, self.agent, self.optimizer, self.state = args, agent, optimizer, state
        name = f"{args.env_id}__{args.exp_name}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.path = Path(args.resume or Path("runs", re.sub(r"[^\w.-]+", "_", name), "checkpoint.pt"))
        folder = self.path.parent
        if args.track:
            import wandb

            wandb.init(name=folder.name, config=asdict(args), sync_tensorboard=True, reinit="finish_previous")
        print(f"{args.env_id}: {state.global_step:,} of {args.total_timesteps:,.0f} steps, seed {args.seed}")
        print(f"checkpoint {self.path}, curves: tensorboard --logdir runs", flush=True)
        self.writer = SummaryWriter(str(folder), purge_step=state.global_step + 1)
        # Copies of this file, and of a program that imports it, so that `plot.py` tells changed ones apart.
        for path in {Path(__file__), Path(sys.argv[0])}:
            if path.suffix == ".py" and path.is_file() and not Path(folder, path.name).exists():
                Path(folder, path.name).write_bytes(path.read_bytes())
        self.warned = False
        self.first_time, self.first_step = time.monotonic(), state.global_step
        self.last_print = self.last_save = -math.inf

    def save(self) -> None:
        """Write a checkpoint. If the process is killed meanwhile, the previous one is still there."""
        if self.last_save == -math.inf:  # only now: until then, a resumed run is as it was
            rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(self.args).items())
            self.writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")
        self.writer.flush()  # first, so that the curves have no gap where training resumes
        content = {"args": asdict(self.args), "state": asdict(self.state), "random": torch.get_rng_state()}
        content |= {"agent": self.agent.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(content, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)
        self.last_save = time.monotonic()

    def log(self, metrics: dict[str, float], episodes: list[tuple[float, int]]) -> None:
        """Log an iteration, print progress, and save after the first and then every minute.

        Adds the episodes to the state's returns. Raises `FloatingPointError` if the loss is not finite.
        """
        if not math.isfinite(metrics["kl"] + metrics["grad_norm"]):
            raise FloatingPointError(
                "NaN in the loss: a high --learning-rate, huge observations, a logit of -inf?"
            )
        if metrics["first_approx_kl"] > 1e-4 and not self.warned:  # correct runs have up to 1e-8
            print("acting and learning do not compute the same policy: is a mask, or dropout, in only one?")
            self.warned = True
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

    def finish(self) -> dict:
        """Save, evaluate unless the run was stopped, and close the log. Returns the results."""
        if self.state.global_step > self.first_step or not self.args.resume:
            self.save()
        average = float(np.mean(self.state.returns)) if self.state.returns else math.nan
        returns = np.zeros(0) if STOP.is_set() else evaluate(self.path, self.args)
        if len(returns):
            self.writer.add_scalar("eval/greedy_return", returns.mean(), self.state.global_step)
        self.writer.close()
        return {"checkpoint": str(self.path), "training_return": average, "greedy_returns": returns}


def load_checkpoint(path: str | Path, device: str = "cpu") -> tuple[Args, dict]:
    """The settings and the whole content of a checkpoint. Raises `ValueError` for any other file."""
    if Path(path).is_dir():  # of a run
        path = Path(path, "checkpoint.pt")
    if not Path(path).is_file():
        raise FileNotFoundError(f"{path} does not exist")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        if "agent" not in content:
            raise LookupError("of a language model")
        known = {name: value for name, value in content["args"].items() if hasattr(Args, name)}
        return Args(**known), content
    except (pickle.UnpicklingError, OSError, EOFError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint of this script") from error


def load_policy(path: str | Path, env: gym.Env, device: str = "cpu") -> Callable:
    """A trained policy, as a function from the environment's observations to the most likely actions.

    It takes one observation or, if the space is a `Box`, a batch of them.
    """
    args, content = load_checkpoint(path, device)
    space, num_actions = env.observation_space, int(env.action_space.n)
    agent = Agent(args, gym.spaces.flatten_space(space), num_actions).to(device).eval()
    agent.load_state_dict(content["agent"])

    @torch.inference_mode()
    def policy(obs: Any) -> np.ndarray:
        batch = isinstance(space, gym.spaces.Box) and np.ndim(obs) > len(space.shape)
        flat = np.reshape(obs, (len(obs), -1)) if batch else gym.spaces.flatten(space, obs)
        flat = torch.as_tensor(flat, dtype=torch.float32, device=device)
        return most_likely(agent.policy(agent.normalize(flat))).cpu().numpy()[()]

    return policy


def evaluate(path: str | Path, args: Args) -> np.ndarray:
    """Play --eval-episodes episodes with the most likely actions; print and return their returns."""
    seed = (seed_everything(args.seed) + 2**30) % 2**31  # episodes that training has not seen
    seed_everything(seed)
    env = make_env(args, **({"render_mode": "rgb_array"} if args.capture_video else {}))
    if args.capture_video:
        folder = str(Path(path).parent / "videos")
        env = gym.wrappers.RecordVideo(env, folder, lambda episode: True)
        print(f"videos: {folder}")
    policy = load_policy(path, env, args.device)
    returns: list[float] = []
    while len(returns) < args.eval_episodes and not STOP.is_set():
        obs, _ = env.reset(seed=seed + len(returns))
        total = 0.0
        for _ in range(10_000):  # some environments never end
            obs, reward, terminated, truncated, _ = env.step(policy(obs))
            total += to_float(reward)
            if terminated or truncated:
                break
        else:
            print(f"episode {len(returns) + 1} was stopped after 10,000 steps")
        returns.append(total)
    env.close()
    if STOP.is_set():
        return np.zeros(0)
    steps = load_checkpoint(path)[1]["state"]["global_step"]
    shown = f"{np.mean(returns):.5g} ± {np.std(returns):.3g} with the most likely actions"
    print(f"evaluation return {shown}, after {steps:,} steps")
    return np.array(returns)


def parse_args() -> Args:
    """The settings of the command line; with --resume or --evaluate, the others are the checkpoint's."""
    if {"True", "False"} & {*sys.argv}:
        raise ValueError("write --track or --no-track, for example, without True or False")
    parse = partial(tyro.cli, Args, description=__doc__.partition("\n  [PPO]")[0])
    args = parse()
    if args.resume and args.evaluate:
        raise ValueError("--resume and --evaluate cannot be combined")
    if "" in (args.resume, args.evaluate):
        raise ValueError("--resume and --evaluate need the path of a checkpoint")
    if path := args.resume or args.evaluate:
        saved, content = load_checkpoint(path)
        if ":" in saved.env_id and args.env_id != saved.env_id:
            raise ValueError(f"{path} imports a module; if you trust it, add --env-id {saved.env_id}")
        of_this_run = "resume", "evaluate", "track", "capture_video", "device"
        args = parse(default=replace(saved, **{name: getattr(Args, name) for name in of_this_run}))
        steps = content["state"]["global_step"]
        if args.resume and steps >= args.total_timesteps:
            raise ValueError(f"{path} has been trained for {steps:,} steps: raise --total-timesteps")
    check(args)
    return args


def print_commands(args: Args, path: str) -> None:
    """Say how to resume a run, to watch its agent, and to check it."""
    script = Path(sys.argv[0])
    module = f" --env-id {args.env_id}" if ":" in args.env_id else ""  # a checkpoint imports none by itself
    step, total = load_checkpoint(path)[1]["state"]["global_step"], args.total_timesteps
    steps = f" --total-timesteps {total * (step // total + 1):.0f}" if step >= total else ""
    print(f"resume: python {script} --resume {path}{module}{steps}")
    print(f"watch:  python {script} --evaluate {path}{module} --capture-video")
    if (coach := script.with_name("coach.py")).exists():  # not beside a copy
        print(f"check:  python {coach} check {Path(path).parent}")


def stop(*_: Any) -> None:
    """End training after this iteration, and save; a second Ctrl-C stops at once."""
    os.write(2, b"stopping after this iteration; a second Ctrl-C stops at once, without saving it\n")
    STOP.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """The command line. Invalid settings end with exit status 2, and a run that was stopped with 130."""
    sys.path.append(".")  # where the `module:` of --env-id is looked for, too
    try:
        args = parse_args()
    except (ValueError, OSError, ImportError, gym.error.Error) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    if args.evaluate:
        evaluate(args.evaluate, args)
        return
    STOP.clear()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    try:
        print_commands(args, train(args)["checkpoint"])
    finally:
        for worker in multiprocessing.active_children():  # they ignore what ends this process
            worker.kill()
    if STOP.is_set():
        sys.exit(130)


if __name__ == "__main__":
    main()
