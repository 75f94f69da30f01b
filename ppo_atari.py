# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.5,<2.14", "gymnasium>=1.1", "ale-py>=0.11.1", "numpy", "tensorboard", "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization (PPO) for Atari games, in one file.

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4
    torchrun --nproc-per-node 4 ppo_atari.py --env-id BreakoutNoFrameskip-v4 --num-envs 32
    python ppo_atari.py --evaluate runs/<run>/checkpoint.pt --capture-video

It trains on any game of the Arcade Learning Environment (ALE), under DeepMind's protocol, which `make_envs`
describes. Under torchrun, several processes with equal shares of the environments learn one network.

  [PPO]     Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE]     Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
            Estimation", arXiv:1506.02438
  [Limits]  Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv:1712.00378
  [Matters] Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
  [37]      Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog
  [DQN]     Mnih et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
  [ALE]     Machado et al. 2018, "Revisiting the Arcade Learning Environment", arXiv:1709.06009

This file has two halves. The first is PPO, in the order of the paper; it ends with `train`, the paper's
Algorithm 1. The second, which can be skipped, is what training needs around it.

Shapes: T steps per rollout, N environments of this process, A actions, B rows of a batch. An observation is
the last 4 images, the newest last: [4, 84, 84], bytes.
"""

from __future__ import annotations

import ast
import ctypes
import difflib
import json
import math
import os
import random
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter, summary


@dataclass
class Experiment:  # the comments are the texts of --help
    exp_name: str = Path(__file__).stem  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    plan: bool = False  # only print what the run would do, and which advice it may give
    resume: str | None = None  # resume from this checkpoint and overwrite it; flags override its settings
    evaluate: str | None = None  # only evaluate this checkpoint, greedily
    eval_episodes: int = 10  # games of an evaluation
    eval_max_steps: int = 27_000  # maximum steps per evaluation game; the ALE cuts it after 27,000
    checkpoint_seconds: float = 60.0  # time between checkpoints; one is also written at the start and the end
    log_seconds: float = 10.0  # time between progress lines when the output is not a terminal
    capture_video: bool = False  # record a game of the evaluation in the run folder (needs moviepy)
    track: bool = False  # mirror TensorBoard to Weights & Biases (needs wandb; WANDB_MODE=offline works)
    wandb_project_name: str = "ppo"  # project at Weights & Biases
    wandb_entity: str | None = None  # team at Weights & Biases; None is your own account
    allow_unsafe: bool = False  # accept settings that are refused because they are known to break PPO


@dataclass
class Environment:
    env_id: str = "BreakoutNoFrameskip-v4"  # the game; Breakout and ALE/Breakout-v5 mean the same here
    env_kwargs: str = ""  # the ALE's arguments, as "noop_max=0, full_action_space=True" or as JSON
    num_envs: int = 8  # environments that step in parallel, over all processes
    sticky_actions: float = 0.0  # probability that a frame repeats the last action ([ALE] asks for 0.25)
    clip_rewards: bool = True  # clip rewards to their signs; reported returns are unclipped


@dataclass
class Algorithm:
    total_timesteps: float = 10_000_000  # total number of transitions, of 4 frames each
    num_steps: int = 128  # T: steps of each environment per rollout
    learning_rate: float = 2.5e-4  # Adam's step size; with --adapt learning-rate, its upper limit
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # γ: discount factor
    gae_lambda: float = 0.95  # λ: trades bias (0) against variance (1) of the advantages
    update_epochs: int = 4  # K: passes over each rollout
    num_minibatches: int = 4  # minibatches per epoch, one gradient step each
    norm_adv: bool = True  # normalise the advantages of each minibatch to mean 0, standard deviation 1
    surrogate: Literal["clip", "kl-penalty"] = "clip"  # clipped ratio ([PPO], §3) or KL penalty ([PPO], §4)
    clip_coef: float = 0.1  # ε: the ratio of new to old probability is clipped to 1 ± ε
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


@dataclass
class Performance:
    device: str = "auto"  # where the network lives: cpu, cuda or mps; auto is a GPU if CUDA finds one
    num_threads: int = 0  # CPU threads of PyTorch, and of the games; 0 is one per core
    bfloat16: bool = False  # compute the network's products in bfloat16: faster on GPUs, and CPUs with AMX
    compile: bool = False  # compile the network, on a GPU to CUDA graphs


@dataclass
class Args(Performance, Algorithm, Environment, Experiment):
    """All settings. The four groups are those of --help."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                setattr(self, name, value.item())  # checkpoints with NumPy's numbers cannot be loaded


# ------------------------------------------------- Networks -------------------------------------------------


def initialize(layer: Any, gain: float = math.sqrt(2)) -> Any:
    """Give a layer orthogonal weights and zero biases ([37], detail 2), and return it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """The convolutional network of [DQN], with two heads: actor and critic."""

    def __init__(self, args: Args, action_space: Any):
        super().__init__()
        self.num_actions, self.use_bfloat16 = int(action_space.n), args.bfloat16
        self.trunk = nn.Sequential(
            initialize(nn.Conv2d(4, 32, kernel_size=8, stride=4)), nn.ReLU(),
            initialize(nn.Conv2d(32, 64, kernel_size=4, stride=2)), nn.ReLU(),
            initialize(nn.Conv2d(64, 64, kernel_size=3, stride=1)), nn.ReLU(),
            nn.Flatten(),
            initialize(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
        )  # fmt: skip
        self.actor = initialize(nn.Linear(512, self.num_actions), gain=0.01)  # near-uniform policy
        self.critic = initialize(nn.Linear(512, 1), gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """π(·|s) [B, A] as log-probabilities, and V(s) [B], for observations [B, 4, 84, 84]."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.use_bfloat16):
            # With channels last in memory, a run on the CPU is 20% faster.
            dtype = torch.bfloat16 if self.use_bfloat16 else torch.float32
            images = obs.to(dtype, memory_format=torch.channels_last) / 255
            features = self.trunk(images).float()
        return torch.log_softmax(self.actor(features), -1), self.critic(features).squeeze(-1)

    def act(self, obs: Tensor, noise: Tensor | float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Actions [N] for observations [N, 4, 84, 84], π(·|s) [N, A] as log-probabilities, and V(s) [N].

        Without noise, they are the most likely actions; with `gumbel_noise`, they are samples from π.
        """
        policy, values = self(obs)
        return (policy + noise).argmax(-1), policy, values


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
    """B rows to learn from."""

    obs: Tensor  # [B, 4, 84, 84], bytes
    actions: Tensor  # [B]
    old_policy: Tensor  # [B, A], π_old(·|s) as log-probabilities
    old_values: Tensor  # [B], V_old(s)
    advantages: Tensor  # [B]
    returns: Tensor  # [B]
    weights: Tensor  # [B], 1 for a transition, 0 for a filler row


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


def mean(x: Tensor, weights: Tensor) -> Tensor:
    """The mean of x [B, ...] over the transitions of all processes, given the weights [B] of the rows."""
    return sum_over_processes(weights @ x) / sum_over_processes(weights.sum()).clamp(min=1)


def ppo_loss(agent: Agent, batch: Batch, args: Args, state: State) -> tuple[Tensor, Tensor]:
    """The loss to minimise ([PPO], equation 9, negated), and all METRICS but `grad_norm` [6].

    Both are this process's part: added up over all processes, they are means over the transitions of all.
    """
    policy, values = agent(batch.obs)
    advantages = batch.advantages
    if args.norm_adv:
        centred = advantages - mean(advantages, batch.weights)
        advantages = centred / (mean(centred.square(), batch.weights).sqrt() + 1e-8)
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
    shares = batch.weights / sum_over_processes(batch.weights.sum()).clamp(min=1)  # weights in a mean
    loss = (policy_losses + args.vf_coef * value_losses - state.ent_coef * entropies) @ shares
    with torch.no_grad():  # the approximate KLs are k1 and k3 of Schulman 2020, "Approximating KL Divergence"
        outside = ((ratio - 1).abs() > state.clip_coef).float()
        metrics = policy_losses, value_losses, entropies, -log_ratio, ratio - 1 - log_ratio, outside
        return loss, torch.stack(metrics) @ shares


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout:
    """T steps of N environments, in arrays that are reused: the next rollout starts where this one ends.

    When step t ends an episode, obs[t+1] is its last state, not the first of the next one. Step t+1 then
    ignores its action: it resets the game (Gymnasium's AutoresetMode.NEXT_STEP), or presses FIRE after a lost
    life. Such a filler row is not a transition: `valid` is False, GAE's sum stops before it, and nothing is
    learnt from it.
    """

    def __init__(self, args: Args, agent: Agent):
        _, processes = world()
        steps, n = args.num_steps, args.num_envs // processes
        pixels = torch.zeros(steps + 1, n, 84, 84, 4, dtype=torch.uint8, device=args.device)
        self.obs = pixels.permute(0, 1, 4, 2, 3)  # channels last in memory, as in Agent.forward
        self.policies = torch.zeros(steps, n, agent.num_actions, device=args.device)  # log-probabilities
        self.values = torch.zeros(steps + 1, n, device=args.device)  # V(s)
        self.actions, self.rewards = np.zeros((steps, n), np.int64), np.zeros((steps, n), np.float32)
        self.terminated, self.truncated, self.valid = np.zeros((3, steps, n), bool)
        self.episodes: list[tuple[float, int]] = []  # return and length of the games that ended


@torch.inference_mode()
def collect_rollout(envs: VectorEnv, agent: Agent, rollout: Rollout) -> None:
    """Fill the rollout with the next T steps of the environments under the agent's policy."""
    obs, actions, rewards, valid = rollout.obs, rollout.actions, rollout.rewards, rollout.valid
    terminated, truncated = rollout.terminated, rollout.truncated
    noise = gumbel_noise(*rollout.policies.shape).to(obs.device)  # all steps at once, for speed
    obs[0] = obs[-1]
    done = terminated[-1] | truncated[-1]
    rollout.episodes = []
    for t in range(len(actions)):
        sampled, rollout.policies[t], rollout.values[t] = agent.act(obs[t], noise[t])
        actions[t] = sampled.cpu().numpy()
        valid[t] = ~done
        images, rewards[t], terminated[t], truncated[t], info = envs.step(actions[t])
        obs[t + 1] = torch.as_tensor(images)
        done = terminated[t] | truncated[t]
        if "episode_statistics" in info:  # of whole games: a lost life ends none
            episodes, over = info["episode_statistics"], info["_episode_statistics"]
            rollout.episodes += zip(episodes["r"][over].tolist(), episodes["l"][over].tolist(), strict=True)
    _, _, rollout.values[-1] = agent.act(obs[-1])


@torch.no_grad()
def make_batch(agent: Agent, rollout: Rollout, args: Args) -> tuple[Batch, dict[str, float]]:
    """Estimate the advantages of a rollout, and flatten it to a batch; also return metrics of the data."""
    tensor = partial(torch.as_tensor, device=args.device)
    actions, rewards, values = tensor(rollout.actions), tensor(rollout.rewards), rollout.values
    terminated, truncated, valid = map(tensor, (rollout.terminated, rollout.truncated, rollout.valid))
    advantages, returns = compute_gae(rewards, values, terminated, truncated, args.gamma, args.gae_lambda)
    columns = rollout.obs[:-1], actions, rollout.policies, values[:-1], advantages, returns, valid.float()
    batch = Batch(*(column.flatten(0, 1) for column in columns))  # from [T, N, ...] to [B, ...]
    # What follows is for the logs and for ADVICE.
    errors = batch.returns - batch.old_values
    moments = errors, errors.square(), batch.returns, batch.returns.square(), entropy(batch.old_policy)
    means = mean(torch.stack(moments, 1), batch.weights)
    error, squared_error, mean_return, squared_return, mean_entropy = means
    unexplained = (squared_error - error.square()) / (squared_return - mean_return.square())
    sizes = np.abs(rollout.rewards[rollout.rewards != 0])
    difference = (agent(batch.obs[:64])[0] - batch.old_policy[:64]).abs().max().item()  # a sample, for speed
    return batch, {
        "explained_variance": 1 - unexplained.item(),
        "critic_error": (squared_error / squared_return).sqrt().item(),
        "relative_entropy": (mean_entropy / math.log(agent.num_actions)).item(),
        "reward_max": rewards.abs().max().item(),
        "reward_range": float(sizes.max() / np.median(sizes)) if len(sizes) else 1.0,
        "policy_mismatch": max(difference - (0.1 if args.bfloat16 else 0.0), 0.0),  # bfloat16 rounds
    }


def gradient_step(agent: Agent, optimizer: Adam, args: Args, state: State, batch: Batch) -> Tensor:
    """Take one gradient step on a minibatch of all processes. Returns METRICS [7]."""
    (group,) = optimizer.param_groups
    group["lr"] = state.learning_rate
    optimizer.zero_grad()
    loss, metrics = ppo_loss(agent, batch, args, state)
    loss.backward()
    for parameter in group["params"]:
        if parameter.grad is not None:
            sum_over_processes(parameter.grad)
    grad_norm = nn.utils.clip_grad_norm_(group["params"], args.max_grad_norm)
    optimizer.step()
    return torch.cat([sum_over_processes(metrics), grad_norm.unsqueeze(0)])


@torch.no_grad()
def distance_moved(agent: Agent, batch: Batch) -> float:
    """KL divergence of the current policy from the one that acted, in nats, over all processes."""
    policy, _ = agent(batch.obs)
    return mean(kl_divergence(batch.old_policy, policy), batch.weights).item()


def update(agent: Agent, learn: Callable, batch: Batch, args: Args) -> dict[str, float]:
    """K epochs of gradient steps, which `learn` takes, on shuffled minibatches. Returns the mean metrics.

    The KL divergence is that of the last minibatch. Filler rows remain: minibatches of equal size compile
    better, and each process has the same number of them.
    """
    metrics = []  # of each gradient step, still as tensors: reading them would wait for the GPU
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.obs)).to(args.device)
        for rows in order.tensor_split(args.num_minibatches):
            minibatch = Batch(*(column[rows] for column in batch))
            metrics.append(learn(minibatch))
        if args.target_kl is not None and distance_moved(agent, minibatch) > args.target_kl:
            break
    means = torch.stack(metrics).mean(0).tolist()
    return dict(zip(METRICS, means, strict=True)) | {"kl": distance_moved(agent, minibatch)}


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
    args = replace(args, device=pick_device(args), num_threads=count_threads(args))
    torch.set_num_threads(args.num_threads)
    keep_memory()
    rank, processes = world()
    env_seed = seed_everything(args.seed)
    envs = make_envs(args, args.num_envs // processes)
    with refuse_errors("lower --num-envs or --num-steps", MemoryError, RuntimeError, about="alloc"):
        agent = Agent(args, envs.single_action_space).to(args.device)
        rollout = Rollout(args, agent)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # ε: [37], detail 3
    state = State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)
    if args.resume:
        restore(args, agent, optimizer, state)
    if args.compile:
        agent.compile(mode="reduce-overhead", dynamic=False)
    learn: Callable = partial(gradient_step, agent, optimizer, args, state)
    env_seed = (env_seed + state.global_step) % 2**29 + rank * envs.num_envs  # the ALE wants less than 2**31
    run: Any  # only the first process prints and writes

    with (
        connect(args, agent, env_seed),
        Run(args, envs, agent, optimizer, state, stop) if rank == 0 else closing(envs) as run,
    ):
        rollout.obs[-1] = torch.as_tensor(envs.reset(seed=env_seed)[0])  # where the first rollout starts
        stopped = gather(stop)
        while state.global_step < args.total_timesteps and not stopped:
            adjust_coefficients(state, args)
            collect_rollout(envs, agent, rollout)
            batch, metrics = make_batch(agent, rollout, args)
            state.metrics = metrics | update(agent, learn, batch, args)
            state.global_step += sum(gather([int(rollout.valid.sum())]))
            episodes, stopped = gather(rollout.episodes), gather(stop)
            if rank == 0:
                run.log(episodes)
        if rank == 0:
            run.save()
    return run.finish(stopped) if rank == 0 else {}


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


# ------------------------------------------------- Processes -----------------------------------------------


def world() -> tuple[int, int]:
    """This process's rank, and the number of processes that train together, as torchrun has set them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


@contextmanager
def connect(args: Args, agent: Agent, seed: int) -> Iterator[None]:
    """Connect the processes: all start with the same weights, and draw random numbers of their own.

    If one of them ends early, the others fail in their next exchange, or torchrun ends them.
    """
    _, processes = world()
    if processes == 1:
        yield
        return
    if args.device.startswith("cuda"):
        torch.cuda.set_device(args.device)
    # After Adam: what it imports would otherwise keep the group and gloo's threads until Python ends, and a
    # thread that outlives Python may abort the process.
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    try:
        for tensor in agent.state_dict().values():
            dist.broadcast(tensor, 0)  # other machines may have rounded the initial weights differently
        torch.manual_seed(seed)
        yield
        dist.barrier()  # none leaves while another may still fail
    finally:
        dist.destroy_process_group()


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def gather(items: Sequence) -> list:
    """The items of all processes, in the order of their ranks."""
    everywhere = [items]
    if dist.is_initialized():
        everywhere = [items] * dist.get_world_size()
        dist.all_gather_object(everywhere, items)
    return [item for items in everywhere for item in items]


def pick_device(args: Args) -> str:
    """The device that --device names; of several processes on a machine, each has a GPU of its own."""
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device


def count_threads(args: Args) -> int:
    """The number that --num-threads means; the processes of a machine share its cores."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return args.num_threads or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def keep_memory() -> None:
    """Let the C library keep freed memory rather than return it: a run on the CPU is 5% faster."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        _ = libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; old ones allow no more


# ------------------------------------------------- Environments --------------------------------------------


def make_envs(args: Args, num_envs: int, **kwargs: Any) -> VectorEnv:
    """Games in the ALE's own vector environment, under DeepMind's protocol ([DQN], Methods).

    An action is held for 4 frames, and the last 2 of them are joined by their brighter pixels. An observation
    is the last 4 such images, grey, 84 x 84. A game begins with up to 29 frames without an action; where it
    has a button FIRE, the first of them presses it. After 108,000 frames, half an hour, it is cut. For the
    learner, a lost life ends an episode (see `LostLives`). Raises `Refused` if there is no such game.
    """
    refuse(not find_spec("ale_py"), "Atari games need: pip install ale-py")
    import ale_py

    gym.register_envs(ale_py)
    game = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", args.env_id.removeprefix("ALE/"))
    games = [name[4:-3] for name in gym.registry if name.startswith("ALE/") and name.endswith("-v5")]
    near = ", ".join(difflib.get_close_matches(game, games, cutoff=0))
    refuse(game not in games, f"the ALE has no game {game}; the closest names are {near}")
    settings: dict[str, Any] = {"num_envs": num_envs, "num_threads": min(count_threads(args), num_envs)}
    settings |= {"repeat_action_probability": args.sticky_actions, "reward_clipping": False}
    settings |= {"autoreset_mode": AutoresetMode.NEXT_STEP, "episodic_life": False, "continuous": False}
    with refuse_errors(f"cannot make {args.env_id}", Exception):
        envs: Any = gym.make_vec(f"ALE/{game}-v5", **settings, **kwargs, **parse_kwargs(args.env_kwargs))
    shape = envs.single_observation_space.shape
    refuse(not kwargs and shape != (4, 84, 84), f"its observations are {shape}, not (4, 84, 84)")
    buttons = [action.name for action in envs.unwrapped.ale.get_action_set()]
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs, stats_key="episode_statistics")
    return LostLives(envs, buttons.index("FIRE") if "FIRE" in buttons else 0, args.clip_rewards)


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


class LostLives(gym.vector.VectorWrapper):
    """Ends an episode at each lost life, while the game continues, and clips rewards to their signs.

    In the step after a lost life, the action is replaced by `button`: some games wait for FIRE then.
    """

    def __init__(self, envs: VectorEnv, button: int, clip_rewards: bool):
        super().__init__(envs)
        self.button, self.clip_rewards = button, clip_rewards

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        obs, info = self.env.reset(**kwargs)
        self.lives, self.lost = info["lives"], np.zeros(self.num_envs, bool)
        return obs, info

    def step(self, actions: np.ndarray) -> tuple:
        """As of any vector environment. Only `info["episode_statistics"]` tells the end of a game."""
        actions = np.where(self.lost, self.button, actions)
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self.lost, self.lives = info["lives"] < self.lives, info["lives"]
        rewards = np.sign(rewards) if self.clip_rewards else rewards
        return obs, rewards, terminated | self.lost, truncated, info


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

    def __enter__(self) -> Run:
        if (processes := os.environ.get("LOCAL_WORLD_SIZE", "1")) != "1":
            self.resume = self.resume.replace(
                " ".join(PROGRAM[:-1]), f"torchrun --nproc-per-node {processes}", 1
            )
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.envs.close()
        if is_terminal():
            say("")
        if error and self.wandb:
            self.wandb.finish(exit_code=1)
        if error:  # Python prints it below the traceback
            error.add_note(f"failed after {self.state.global_step:,} steps")
            error.add_note(f"resume from {self.saved_step:,} steps with: {self.resume}")

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
FORMAT = "ppo-atari-2"
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


def load_policy(path: str | Path, device: str = "cpu") -> Callable:
    """A trained policy, as a function from the game's observations to its actions.

    `policy(obs, sample=False)` takes one observation [4, 84, 84], or several [N, 4, 84, 84], as of the
    environments of `make_envs`, and returns as many actions: the most likely ones, or samples.
    """
    content = load_checkpoint(path)
    envs = make_envs(content["args"], num_envs=1)
    envs.close()
    agent = Agent(content["args"], envs.single_action_space).to(device).eval()
    with refuse_errors(f"{path} does not fit its settings", RuntimeError):
        agent.load_state_dict(content["agent"])

    @torch.inference_mode()
    def policy(obs: Any, sample: bool = False) -> Any:
        if np.shape(obs)[-3:] != (4, 84, 84):
            raise ValueError(f"the policy takes observations [4, 84, 84], not {list(np.shape(obs))}")
        batch = torch.as_tensor(np.asarray(obs), device=device).reshape(-1, 4, 84, 84)
        noise = gumbel_noise(len(batch), agent.num_actions).to(device) if sample else 0.0
        actions = agent.act(batch, noise)[0].cpu().numpy()
        return actions[0] if np.ndim(obs) == 3 else actions

    return policy


def evaluate(path: Path, args: Args) -> np.ndarray:
    """Play --eval-episodes games at once with the most likely actions; print and return their returns."""
    args = replace(args, clip_rewards=False)
    policy, envs = load_policy(path, pick_device(args)), make_envs(args, args.eval_episodes)
    seed = seed_everything(args.seed) % 2**29 + 2**30  # not those of training
    obs, _ = envs.reset(seed=seed)
    frames = []
    if args.capture_video:  # the first game once more, in colour and full size
        screen = make_envs(args, 1, grayscale=False, img_height=210, img_width=160)
        screen.reset(seed=seed)
    returns, running = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, bool)
    for _ in range(args.eval_max_steps):
        actions = policy(obs)
        obs, rewards, _, _, info = envs.step(actions)
        returns += running * rewards
        if args.capture_video and running[0]:
            frames.append(screen.step(actions[:1])[0][0, -1].copy())
        running &= ~info.get("_episode_statistics", np.zeros_like(running))
        if not running.any():
            break
    envs.close()
    if args.capture_video:
        from gymnasium.utils.save_video import save_video

        screen.close()
        save_video(frames, str(path.parent / "videos"), fps=15)
    spread = f"± {returns.std():.1f}, from {returns.min():.1f} to {returns.max():.1f}"
    say(f"evaluation return {returns.mean():.1f} {spread}, {len(returns)} episodes")
    return returns


# ------------------------------------------------- Command line --------------------------------------------

BOUNDS = {  # the range of each setting
    "num_envs num_minibatches eval_episodes update_epochs": (1, 1e6),
    "num_threads": (0, 1e4),
    "total_timesteps eval_max_steps": (1, 1e15),
    "num_steps": (8, 1e6),  # a rollout of a few steps may hold nothing but filler rows
    "learning_rate clip_coef max_grad_norm desired_kl target_kl checkpoint_seconds log_seconds": (1e-12, 1e6),
    "gamma gae_lambda sticky_actions": (0, 1),
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
    _, processes = world()
    unequal = f"--num-envs is {args.num_envs}, which {processes} processes cannot share equally"
    refuse(args.num_envs % processes, f"{unequal}; use a multiple of {processes}")
    size, clip = args.num_envs // processes * args.num_steps, args.surrogate == "clip"
    refuse(2 * args.num_minibatches > size, f"--num-minibatches must be at most {size // 2}, half a rollout")
    refuse(args.adapt == "clip-coef" and not clip, "--adapt clip-coef needs --surrogate clip")
    refuse(args.adapt == "kl-coef" and clip, "--adapt kl-coef needs --surrogate kl-penalty")
    refuse(args.target_entropy is not None and not args.ent_coef, "--target-entropy needs --ent-coef above 0")
    both = args.target_entropy is not None and args.anneal_ent_coef
    refuse(both, "--target-entropy and --anneal-ent-coef exclude each other")
    refuse(args.resume and args.evaluate, "--resume and --evaluate exclude each other")
    refuse("" in (args.resume, args.evaluate), "--resume and --evaluate need the path of a checkpoint")
    refuse(args.capture_video and not find_spec("moviepy"), "--capture-video needs: pip install moviepy")
    device, here = pick_device(args), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    few = device.startswith("cuda") and torch.cuda.device_count() < here > 1
    refuse(few, f"each of the {here} processes needs a GPU of its own; use --device cpu")
    refuse(device == "mps" and processes > 1, "--device mps is for one process; use --device cpu")
    one_for_all = args.device.startswith("cuda:") and processes > 1
    refuse(one_for_all, f"--device {args.device} is one GPU; with several processes, use --device cuda")
    with refuse_errors(f"--device {device} cannot be used; use cpu", RuntimeError, AssertionError):
        torch.zeros(1, device=device)
    if not args.allow_unsafe:
        override = "; --allow-unsafe overrides"
        unscaled = args.update_epochs > 1 and not (args.norm_adv or args.clip_rewards)
        refuse(args.update_epochs > 30, f"--update-epochs above 30: the KL explodes; use 3 to 15{override}")
        refuse(clip and args.clip_coef > 0.3, f"--clip-coef above 0.3 hardly clips; use 0.1 to 0.3{override}")
        refuse(unscaled, f"several epochs need --norm-adv or --clip-rewards to bound their steps{override}")


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
    rank, _ = world()

    def request_stop(number: int, _: Any) -> None:
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)  # the second signal acts at once

    try:
        args = parse_args(Args())
        if path := args.resume or args.evaluate:
            args = parse_args(load_checkpoint(path, args.env_id)["args"])
        check_args(args)
        if rank > 0 and (args.plan or args.evaluate):
            return  # the first process does it alone
        if args.plan:
            make_envs(args, num_envs=1).close()
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
    if stop:
        sys.exit(128 + stop[0])


if __name__ == "__main__":
    main()
