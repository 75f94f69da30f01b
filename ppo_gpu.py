# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.5", "numpy", "tensorboard", "tyro>=0.9.1"]
# ///
"""Proximal Policy Optimization (PPO) for thousands of environments on a GPU, in one file.

    python ppo_gpu.py
    python ppo_gpu.py --env-id CheetahRun
    torchrun --nproc-per-node 4 ppo_gpu.py --env-id CheetahRun

Observations, actions and rewards are tensors that stay on the GPU. Without --env-id, it trains pendulums that
are written in PyTorch. Other names are those of MuJoCo Playground (pip install playground "jax[cuda13]").
For your own environments, or those of Isaac Lab, mjlab or ManiSkill, write a class like `Pendulums` that is
called with `Args`, and name it: --env-id my_module:MyClass. Under torchrun, each process has a GPU with
environments of its own, and all train the same networks. A trained policy is a module to export: load_policy.

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
    make_batch             estimates advantages (compute_gae), and flattens the rollout
    update                 takes K epochs of gradient steps on minibatches, each on the loss of ppo_loss

Shapes: T steps per rollout, N environments, D numbers per observation, A per action, B = T N transitions.
"""

import io
import math
import os
import pickle
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from difflib import get_close_matches
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

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
    resume: str | None = None  # resume from this checkpoint; flags override its settings
    evaluate: str | None = None  # only evaluate this checkpoint, greedily
    capture_video: bool = False  # record an episode of the evaluation in the run folder (needs moviepy)
    track: bool = False  # mirror TensorBoard to Weights & Biases, to its WANDB_PROJECT (needs wandb)
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda or mps
    cuda_graphs: bool = True  # record CUDA graphs; switch it off to debug, or if a change cannot be recorded
    compile: bool = False  # on a CPU, compile the gradient step: faster after some 20 s (PyTorch >= 2.13)
    keep_every: float | None = None  # keep a checkpoint every so many transitions, beside the last one
    eval_every: float = 0  # also evaluate every so many steps (0: never); best.pt has the best mean return
    stop_at: float | None = None  # end training once an evaluation of --eval-every reaches this mean return

    # Environment
    env_id: str = "Pendulum"  # Pendulum, a name of MuJoCo Playground, or `module:MyClass`
    num_envs: int = 1024  # N: environments that step in parallel, in each process

    # PPO
    total_timesteps: float = 1_000_000  # total number of transitions; 1e6 is fine
    num_steps: int = 16  # T: steps of each environment per rollout
    learning_rate: float = 1e-3  # Adam's step size, decayed linearly to 0 (not with --desired-kl)
    desired_kl: float | None = None  # adapt the learning rate to hold this KL divergence (0.01, in nats)
    gamma: float = 0.95  # γ: discount factor
    gae_lambda: float = 0.95  # λ: trades bias (0) against variance (1) of the advantages
    update_epochs: int = 10  # K: passes over each rollout
    num_minibatches: int = 8  # minibatches per epoch, one gradient step each
    clip_coef: float = 0.2  # ε: the ratio of new to old probability is clipped to 1 ± ε
    ent_coef: float = 0.0  # c₂: weight of the entropy bonus
    vf_coef: float = 0.5  # c₁: weight of the value loss, ½ (V - return)²
    max_grad_norm: float = 1.0  # clip the gradient to this global norm
    init_log_std: float = -0.5  # initial log standard deviation of actions
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
    "seed": (0, 2**31), "num_envs": (1, math.inf), "num_steps": (1, math.inf), "total_timesteps": (1, 1e15),
    "keep_every": (1, math.inf), "eval_every": (0, math.inf), "stop_at": (-1e15, 1e15),
    "learning_rate": (0, 1), "desired_kl": (1e-6, 10), "gamma": (0, 1), "gae_lambda": (0, 1),
    "update_epochs": (1, 30), "num_minibatches": (1, math.inf), "clip_coef": (1e-3, 0.3),
    "ent_coef": (0, 100), "vf_coef": (0, 100), "max_grad_norm": (1e-6, math.inf), "init_log_std": (-10, 2),
    "hidden_size": (1, 2**16),
}  # fmt: skip

# Defaults for all other environments. γ and the learning rate are those of Playground for its control suite.
OTHERS = Args(num_envs=2048, num_steps=32, total_timesteps=30_000_000, gamma=0.995, update_epochs=8,
              num_minibatches=16, hidden_size=256)  # fmt: skip
# As torchrun sets them: how many processes there are, the number of this one, and that among its machine's.
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0)) if PROCESSES > 1 else 0
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0)) if PROCESSES > 1 else 0
if PROCESSES > 1 and torch.cuda.device_count() > LOCAL_RANK:
    torch.cuda.set_device(LOCAL_RANK)  # what "cuda" means in this process, also for environments of your own

# ------------------------------------------------- Networks -------------------------------------------------


def mlp(inputs: int, hidden: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Two ELU layers and a linear one, with orthogonal weights and zero biases ([37], detail 2)."""
    layers = nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)
    for layer, gain in zip(layers, (math.sqrt(2), math.sqrt(2), last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.ELU(), layers[1], nn.ELU(), layers[2])


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
        self.actor = mlp(actor_obs_size, args.hidden_size, action_size, last_gain=0.01)  # near 0 at first
        self.log_std = nn.Parameter(args.init_log_std * torch.ones(action_size))  # the same in all states
        self.critic = mlp(obs_size, args.hidden_size, 1, last_gain=1.0)
        self.obs_moments, self.return_moments = RunningMoments(obs_size), RunningMoments(1)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations [..., D] as the networks see them: (x - mean) / std within ±10."""
        return ((obs - self.obs_moments.mean) * torch.rsqrt(self.obs_moments.var + 1e-8)).clamp(-10, 10)

    def policy(self, obs: Tensor) -> Tensor:
        """π(·|s), as means and log standard deviations [..., 2A], for normalised observations [..., D]."""
        means = self.actor(obs[..., : self.actor_obs_size])
        return torch.cat([means, self.log_std.expand_as(means)], -1)

    def value(self, obs: Tensor) -> Tensor:
        """V(s) [...] for normalised observations [..., D]."""
        return self.critic(obs).squeeze(-1)


# ------------------------------------------------- Equations ------------------------------------------------


def log_prob(policy: Tensor, actions: Tensor) -> Tensor:
    """log π(a|s) = -Σ_i (½ ((a_i - μ_i) / σ_i)² + log σ_i + ½ log 2π) [B] of actions [B, A]."""
    means, log_stds = policy.chunk(2, -1)
    distances = (actions - means) / log_stds.exp()
    return -(0.5 * distances.square() + log_stds + 0.5 * math.log(2 * math.pi)).sum(-1)


def entropy(policy: Tensor) -> Tensor:
    """H(π) = Σ_i (log σ_i + ½ log 2πe) [B], in nats."""
    _, log_stds = policy.chunk(2, -1)
    return (log_stds + 0.5 * math.log(2 * math.pi * math.e)).sum(-1)


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages and returns [T, N] by generalised advantage estimation ([GAE], equations 11 to 16).

        δ_t = r_t + γ V(s_{t+1}) (1 - terminated_t) - V(s_t)
        A_t = δ_t + γλ (1 - (terminated_t ∨ truncated_t)) A_{t+1}
        return_t = A_t + V(s_t), the critic's target

    Both kinds of end stop the sum, but at a time limit (truncated) V(s_{t+1}) still counts ([Limits]).
    So `next_values` are those of the states that the steps led to, before any reset. All tensors are [T, N].
    """
    next_values = next_values.masked_fill(terminated, 0)  # not a product: 0 * NaN is NaN
    deltas = rewards + gamma * next_values - values
    ended = terminated | truncated
    advantages, following = torch.zeros_like(values), torch.zeros_like(values[0])
    for t in reversed(range(len(rewards))):
        following = deltas[t] + gamma * gae_lambda * following.masked_fill(ended[t], 0)
        advantages[t] = following
    return advantages, advantages + values


class Batch(NamedTuple):
    """B transitions to learn from."""

    obs: Tensor  # [B, D], normalised
    actions: Tensor  # [B, A]
    old_log_probs: Tensor  # [B], log π_old(a|s)
    advantages: Tensor  # [B]
    returns: Tensor  # [B]
    rewards: Tensor  # [B], scaled; only for a metric


@dataclass
class State:
    """What changes during training besides the networks."""

    global_step: int = 0  # transitions so far
    returns: list[float] = field(default_factory=list)  # of the last 100 episodes
    episodes: dict[str, Tensor] = field(default_factory=dict)  # unfinished ones, and environments' buffers
    best_return: float = -math.inf  # of best.pt, in the evaluation that chose it
    best_step: int = 0  # of best.pt
    last_evaluation: int = 0  # step of the last evaluation of --eval-every


def ppo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise ([PPO], equation 9, negated), and metrics."""
    policy = agent.policy(batch.obs)
    advantages = batch.advantages - average(batch.advantages.mean())  # of the minibatches of all processes
    advantages /= average(advantages.square().mean()).sqrt() + 1e-8
    log_ratio = log_prob(policy, batch.actions) - batch.old_log_probs
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_losses = -torch.min(ratio * advantages, clipped_ratio * advantages)  # [PPO], equation 7
    value_losses = 0.5 * (agent.value(batch.obs) - batch.returns).square()
    entropies = entropy(policy)
    loss = (policy_losses + args.vf_coef * value_losses - args.ent_coef * entropies).mean()
    with torch.no_grad():
        metrics = {
            "policy_loss": policy_losses.mean(),
            "value_loss": value_losses.mean(),
            "entropy": entropies.mean(),
            "std": policy.chunk(2, -1)[1].exp().mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),  # k3 of Schulman 2020, "Approximating KL Divergence"
            "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),
        }
    return loss, metrics


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout(NamedTuple):
    """T steps of N environments, which are reset in the step that ends an episode. All rows are used."""

    obs: Tensor  # [T, N, D]
    actions: Tensor  # [T, N, A]
    log_probs: Tensor  # [T, N], log π(a|s) of the policy that acted
    rewards: Tensor  # [T, N]
    terminated: Tensor  # [T, N]
    truncated: Tensor  # [T, N]
    last_obs: Tensor  # [T, N, D], of the states that the steps led to, before any reset
    sums: Tensor  # [T, 3, N]: discounted return, return and length of the episode, up to and with this step


@torch.no_grad()
def act(agent: Agent, obs: Tensor) -> tuple[Tensor, Tensor]:
    """Actions [N, A] for observations [N, D], sampled from the policy, and their log π [N]."""
    policy = agent.policy(agent.normalize(obs))
    means, log_stds = policy.chunk(2, -1)
    actions = means + log_stds.exp() * torch.randn_like(means)
    return actions, log_prob(policy, actions)


@torch.no_grad()
def collect_rollout(
    envs: Any, choose: Callable, obs: Tensor, sums: Tensor, args: Args
) -> tuple[Rollout, dict[str, Tensor]]:
    """The next T steps, and by name the means of what the environments log.

    Observations [N, D] and sums [3, N] become those after the steps.
    """
    rows, logs = [], []
    for _ in range(args.num_steps):
        actions, log_probs = choose(obs)
        following, rewards, terminated, truncated, last_obs = envs.step(actions.clone())  # theirs to change
        shapes = [x.shape for x in (following, last_obs, rewards, terminated, truncated)]
        if shapes != [obs.shape] * 2 + [obs.shape[:1]] * 3:  # what has other shapes may broadcast
            raise ValueError(f"a step of {args.env_id} returned other shapes than the first one")
        rewards, diverged = without_diverged(rewards, terminated)
        sums[0] *= args.gamma
        sums += torch.stack([rewards, rewards, torch.ones_like(rewards)])
        row = obs, actions, log_probs, rewards, terminated, truncated, last_obs, sums
        rows.append([x.clone() for x in row])  # memory may be used again
        logged = {"diverged": diverged} | getattr(envs, "log", {})
        logs.append({name: x.clone() for name, x in logged.items()})
        sums.masked_fill_(terminated | truncated, 0)
        obs.copy_(following)
    return Rollout(*(torch.stack(column) for column in zip(*rows, strict=True))), mean_logs(logs)


def without_diverged(rewards: Tensor, terminated: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards [N], with 0 where a simulation diverged: it terminated, and its reward is NaN or infinite.

    And where that is [N].
    """
    diverged = terminated & ~rewards.isfinite()
    return rewards.masked_fill(diverged, 0), diverged


@torch.no_grad()
def normalize_rollout(agent: Agent, rollout: Rollout) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised observations and last observations [T, N, D], and scaled rewards [T, N].

    Updates the running statistics. Rewards are divided by the running std of the discounted return, and
    clipped to ±10 ([Matters], §3).
    """
    agent.return_moments.update(rollout.sums[:, 0].reshape(-1, 1))
    rewards = (rollout.rewards * torch.rsqrt(agent.return_moments.var + 1e-8)).clamp(-10, 10)
    obs, last_obs = agent.normalize(rollout.obs), agent.normalize(rollout.last_obs)
    agent.obs_moments.update(rollout.obs.flatten(0, 1))  # only now: acting and learning use the same
    return obs, last_obs, rewards


@torch.no_grad()
def make_batch(
    agent: Agent, rollout: Rollout, obs: Tensor, last_obs: Tensor, rewards: Tensor, args: Args
) -> Batch:
    """The transitions of a rollout, with advantages, from what `normalize_rollout` returns."""
    values, next_values = agent.value(obs), agent.value(last_obs)
    ends = rollout.terminated, rollout.truncated
    advantages, returns = compute_gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    columns = obs, rollout.actions, rollout.log_probs, advantages, returns, rewards
    return Batch(*(column.flatten(0, 1) for column in columns))


def compute_gradients(agent: Agent, minibatch: Batch, args: Args) -> dict[str, Tensor]:
    """Compute the gradients of the loss, clipped to --max-grad-norm, in the agent. Returns metrics."""
    loss, metrics = ppo_loss(agent, minibatch, args)
    loss.backward()
    if PROCESSES > 1:  # one message for all of them
        gradients = [parameter.grad for parameter in agent.parameters() if parameter.requires_grad]
        nn.utils.vector_to_parameters(average(nn.utils.parameters_to_vector(gradients)), gradients)
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return metrics


def update(
    agent: Agent, optimizer: Adam, compute: Callable, batch: Batch, orders: Tensor, args: Args
) -> dict[str, Tensor]:
    """K epochs of gradient steps on minibatches, each by `compute`, which is `compute_gradients`.

    `orders` [K, B] are those of the epochs; they are drawn outside, as a CUDA graph wants them. Returns
    metrics: of the data, and means over the gradient steps.
    """
    steps = []
    for order in orders:
        for rows in order.tensor_split(args.num_minibatches):
            minibatch = Batch(*(column[rows] for column in batch))
            optimizer.zero_grad()
            metrics = compute(agent, minibatch, args)
            if args.desired_kl is not None and steps:  # before the first step, the policy is the old one
                adapt_learning_rate(optimizer, average(metrics["approx_kl"].clone()), args.desired_kl)
            metrics["charts/learning_rate"] = torch.as_tensor(optimizer.param_groups[0]["lr"]).clone()
            optimizer.step()
            steps.append(metrics)
    means = {name: torch.stack([step[name] for step in steps]).mean() for name in steps[0]}
    means["std"] = steps[0]["std"]  # of the policy that acted
    means["first_approx_kl"] = steps[0]["approx_kl"]  # before the first step: 0, up to rounding
    means["explained_variance"] = 1 - batch.advantages.var() / batch.returns.var()
    means["reward_clipfrac"] = (batch.rewards.abs() >= 10).float().mean()
    return dict(zip(means, average(torch.stack([*means.values()])), strict=True))


def adapt_learning_rate(optimizer: Adam, kl: Tensor, desired_kl: float) -> None:
    """Divide the learning rate by 1.5 if the KL divergence is more than twice the desired one ([Walk]).

    Multiply it by 1.5 if the divergence is less than half. The limits are those of RSL-RL, whose divergence
    is exact; here it is estimated on the minibatch. The rate is a tensor, which a CUDA graph can change.
    """
    learning_rate = optimizer.param_groups[0]["lr"]
    factor = torch.where(kl > 2 * desired_kl, 1 / 1.5, torch.where(kl < desired_kl / 2, 1.5, 1.0))
    learning_rate.mul_(factor).clamp_(1e-5, 1e-2)


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


def train(args: Args, envs: Any = None, eval_envs: Any = None) -> dict:
    """PPO ([PPO], Algorithm 1), then a greedy evaluation, in `envs`, or in those of `make_envs`.

    With `eval_every`, evaluations need others, `eval_envs`, or those of another call of `make_envs`. Returns
    "checkpoint" (its path), "training_return" (of the last 100 episodes), "greedy_returns", "best_return",
    for which best.pt was chosen (-inf without one), "best_step", and "best_replayed", its returns in the
    episodes of "greedy_returns" (empty without one). Raises `ValueError` for invalid settings. With `resume`,
    the settings are those of `args`, too. Under torchrun, the first process logs, saves and evaluates.
    """
    args = replace(args, evaluate=None)  # a copy, in which NumPy's numbers are plain ones
    check(args)
    if envs is None:
        envs = make_envs(args)
        eval_envs = make_eval_envs(args, envs) if eval_envs is None else eval_envs
    elif args.env_id == Args.env_id and type(envs) is not Pendulums:
        args.env_id = type(envs).__name__
    check_envs(envs, args)
    if args.eval_every > 0 and RANK == 0:
        check_eval_envs(eval_envs, envs, args)
    torch.set_float32_matmul_precision("high")  # matrix products in TF32, on GPUs that have it
    torch.manual_seed(args.seed)  # all processes start with the same weights
    agent = Agent(args, envs.obs_size, envs.actor_obs_size, envs.action_size).to(args.device)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)
    state = State()
    if PROCESSES > 1 and not dist.is_initialized():
        # After Adam, which imports what would keep the connection open at exit.
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    saved = restore(args.resume, args, agent, optimizer, state, envs) if args.resume else None
    seed_everything(args.seed + state.global_step)
    with torch.no_grad():
        obs = envs.reset().clone()
    envs.steps.random_(int(envs.max_steps))  # spread the time limits of the environments, as RSL-RL
    sums = torch.zeros(3, args.num_envs, device=args.device)
    sums[1] = math.nan  # the returns of these first, shortened episodes, which are not logged
    recordable = getattr(envs, "recordable", False)
    state.episodes = buffers_of(envs) | ({"obs": obs, "sums": sums} if recordable else {})
    if saved and recordable:
        continue_episodes(state, saved)
    learning_rate = torch.as_tensor(optimizer.param_groups[0]["lr"], device=args.device)
    # As CUDA graphs need them, whatever the checkpoint has: the learning rate changes, so it is a tensor.
    optimizer.param_groups[0].update(lr=learning_rate, capturable=args.device == "cuda")
    compute = compiled(compute_gradients) if args.compile else compute_gradients

    # The parts of an iteration, as functions of tensors alone.
    def choose(obs: Tensor) -> tuple[Tensor, Tensor]:
        return act(agent, obs)

    def collect() -> tuple[Rollout, dict[str, Tensor]]:
        return collect_rollout(envs, choose, obs, sums, args)

    def prepare(*columns: Tensor) -> Batch:
        rollout = Rollout(*columns)
        normalised = normalize_rollout(agent, rollout)
        return make_batch(agent, rollout, *normalised, args)

    def learn(orders: Tensor, *columns: Tensor) -> dict[str, Tensor]:
        return update(agent, optimizer, compute, Batch(*columns), orders, args)

    if can_record(args):
        if recordable:
            collect = recorded(collect)  # all T steps are one graph
        else:
            choose = recorded(choose)
        prepare, learn = recorded(prepare), recorded(learn)
    run = Run(args, agent, optimizer, state) if RANK == 0 else None
    while state.global_step < args.total_timesteps and not stopped(run, args):
        if args.desired_kl is None:
            learning_rate.fill_(args.learning_rate * (1 - state.global_step / args.total_timesteps))
        rollout, logs = collect()
        batch = prepare(*rollout)
        orders = [torch.randperm(len(batch.obs), device=args.device) for _ in range(args.update_epochs)]
        metrics = learn(torch.stack(orders), *batch)
        state.global_step += rollout.rewards.numel() * PROCESSES
        state.episodes |= buffers_of(envs)  # again: what is not recorded may replace them
        if run:
            run.log(metrics, rollout, logs)
        if run and args.eval_every > 0:
            run.evaluate_if_due(eval_envs)
    if PROCESSES > 1:
        del prepare, learn  # NCCL waits for graphs that use it
        dist.destroy_process_group()
    return run.finish(eval_envs if args.eval_every > 0 else envs) if run else {}


# ========================== End of PPO. What follows is what training needs around it ======================


def average(x: Tensor) -> Tensor:
    """The mean over all processes, in place."""
    if PROCESSES > 1:
        dist.all_reduce(x)
        x /= PROCESSES
    return x


def hash_seed(*numbers: int) -> int:
    """A seed of 31 bits from several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


def seed_everything(seed: int) -> None:
    """Seed all random generators of this process; those of the others get other seeds."""
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function((seed + 1000 * RANK) % 2**32)


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


def compiled(function: Callable) -> Callable:
    """`compute_gradients`, compiled with the backward pass in it."""
    torch._dynamo.reset()  # else the ninth run of a process would fail: what is compiled anew is counted
    torch._dynamo.config.trace_autograd_ops = True  # lets `backward` be part of the graph
    return torch.compile(function, fullgraph=True)  # what cannot be compiled is an error


STOP = threading.Event()  # set by Ctrl-C and SIGTERM: training ends after the iteration


def stopped(run: Any, args: Args) -> bool:
    """Whether training is to end: all processes end after the same iteration. Only the first has a run."""
    stop = STOP.is_set() or (run is not None and run.stop_at_reached)
    if PROCESSES == 1:
        return stop
    return average(torch.full((), float(stop), device=args.device)).item() > 0


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
    size = args.num_envs * args.num_steps
    adapted = args.desired_kl is not None and not 1e-5 <= args.learning_rate <= 1e-2
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    for wrong, reason in [
        (4 * args.num_minibatches > size, f"--num-minibatches must be at most {size // 4} for this rollout"),
        (adapted, "--desired-kl adapts the learning rate from 1e-5 to 0.01: --learning-rate must be there"),
        (args.compile and args.device != "cpu", "--compile is for --device cpu; GPUs have CUDA graphs"),
        (args.compile and PROCESSES > 1, "--compile is for one process"),
        (args.compile and torch.__version__ < "2.13", "--compile needs PyTorch 2.13"),
        (args.compile and not shutil.which(compiler), f"--compile needs the C++ compiler {compiler}"),
        (args.stop_at is not None and args.eval_every == 0, "--stop-at needs --eval-every"),
        (args.track and not find_spec("wandb"), "--track needs: pip install wandb"),
        (Path("runs").is_file(), "runs is a file, where a folder of that name is needed"),
    ]:
        if wrong:
            raise ValueError(reason)


def check(args: Args) -> None:
    """Raise `ValueError` for what cannot be trained or evaluated, before anything is written."""
    if not args.evaluate:
        check_settings(args)
    if args.resume and Path(args.resume).name == "best.pt":
        raise ValueError("best.pt cannot be resumed: copy it into another folder, as checkpoint.pt")
    if args.num_envs < 1:
        raise ValueError("--num-envs must be at least 1")
    if args.capture_video and not find_spec("moviepy"):
        raise ValueError("--capture-video needs: pip install moviepy")
    if args.device not in ("cpu", "cuda", "mps"):
        raise ValueError(f"--device must be cpu, cuda or mps, not {args.device}: see CUDA_VISIBLE_DEVICES")
    try:
        torch.zeros((), device=args.device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {args.device} is not available; use cpu") from error
    if args.device == "cuda" and torch.cuda.device_count() <= LOCAL_RANK:
        raise ValueError(f"process {RANK} has no GPU: there are {torch.cuda.device_count()}")


# ------------------------------------------------- Environments --------------------------------------------


class Pendulums(nn.Module):
    """N pendulums: Gymnasium's Pendulum-v1 in PyTorch, and an example of environments. They must have:

    - `obs_size`, `actor_obs_size` and `action_size`, and `max_steps`, the time limit
    - `steps` [N] of the current episodes, a tensor that can be written to
    - `reset` and `step`, as below

    They may have:

    - `recordable`, if tensors of `state_dict` are all that `step` changes, each in its place. Then a CUDA
      graph records all steps, and a resumed run of one process continues the episodes.
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

    def restart(self, where: Tensor) -> None:
        """Start new episodes where this is true [N]."""
        self.angle.copy_(torch.where(where, math.pi * (2 * torch.rand_like(self.angle) - 1), self.angle))
        self.speed.copy_(torch.where(where, 2 * torch.rand_like(self.speed) - 1, self.speed))
        self.steps.mul_(~where)

    def reset(self) -> Tensor:
        """Start new episodes everywhere. Returns their first observations [N, D]."""
        self.restart(torch.ones_like(self.steps, dtype=torch.bool))
        return self.observe()

    def step(self, actions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Apply actions [N, A], in units of their bounds, and start a new episode wherever one has ended.

        Returns the observations [N, D] to act on next; rewards, terminated and truncated (by the time limit),
        each [N]; and the observations [N, D] that the actions led to, before new episodes started.

        If a simulator does not keep the latter, as Isaac Lab, return there the observations before the step:
        at a time limit, their value stands in for that of the last state, as in RSL-RL. Where a simulation
        diverged, terminate: a reward that is NaN or infinite counts as 0 there.
        """
        torque = 2 * actions.squeeze(-1).clamp(-1, 1)  # N m
        error = torch.remainder(self.angle + math.pi, 2 * math.pi) - math.pi
        rewards = -(error**2 + 0.1 * self.speed**2 + 0.001 * torque**2)
        self.speed.add_(0.05 * (15 * self.angle.sin() + 3 * torque)).clamp_(-8, 8)
        self.angle.add_(0.05 * self.speed)
        self.steps.add_(1)
        last_obs, truncated = self.observe(), self.steps >= self.max_steps
        self.restart(truncated)
        return self.observe(), rewards, torch.zeros_like(truncated), truncated, last_obs


class Playground:
    """N environments of MuJoCo Playground. As in its training, each starts all episodes in one state."""

    def __init__(self, args: Args):
        if not find_spec("mujoco_playground"):
            raise ValueError(f"{args.env_id} needs: pip install playground, on a GPU also 'jax[cuda13]'")
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leave memory to PyTorch
        import jax
        from mujoco_playground import registry

        if args.env_id not in registry.ALL_ENVS:
            similar = get_close_matches(args.env_id, registry.ALL_ENVS, cutoff=0)
            raise ValueError(f"MuJoCo Playground has no {args.env_id}, but {', '.join(similar)}")
        jax.config.update("jax_cuda_visible_devices", os.environ.get("LOCAL_RANK", "all"))
        config = registry.get_default_config(args.env_id)
        env = registry.load(args.env_id, config, {"impl": "jax"} if "impl" in config else None)
        self.env, self.action_size, self.max_steps = env, env.action_size, config.episode_length
        self.jax = jax
        self.steps = torch.zeros(args.num_envs, device=args.device)
        obs = jax.eval_shape(env.reset, jax.random.key(0)).obs
        if isinstance(obs, dict) and obs.keys() != {"state", "privileged_state"}:
            raise ValueError(f"{args.env_id} has observations {', '.join(obs)}: only vectors are supported")
        sizes = [part.shape[-1] for part in jax.tree.leaves(obs)]
        self.obs_size, self.actor_obs_size = sum(sizes), sizes[-1]

        def step(state: Any, start: Any, action: Any, cut: Any) -> tuple:
            after = env.step(state, action)
            over = (after.done > 0) | cut
            first, last = (start.data, start.obs), (after.data, after.obs)
            data, obs = jax.tree.map(lambda x, y: jax.numpy.where(over, x, y), first, last)
            results = self.merge(obs), after.reward, after.done > 0, cut, self.merge(after.obs)
            return after.replace(data=data, obs=obs), results, after.metrics

        self.reset_one, self.step_one = env.reset, step  # of one environment
        self.jit_reset, self.jit_step = jax.jit(jax.vmap(env.reset)), jax.jit(jax.vmap(step))

    def merge(self, obs: Any) -> Any:
        """In one array, what the robot sees ("state"), then what only the simulator knows."""
        return self.jax.numpy.concatenate(self.jax.tree.leaves(obs)[::-1], -1)

    def reset(self) -> Tensor:
        key = self.jax.random.key(torch.randint(2**31, ()).item())  # torch.manual_seed decides it
        self.state = self.start = self.jit_reset(self.jax.random.split(key, len(self.steps)))
        self.steps.zero_()
        return torch.from_dlpack(self.merge(self.start.obs))

    def step(self, actions: Tensor) -> tuple[Tensor, ...]:
        self.steps += 1
        action, cut = map(self.jax.dlpack.from_dlpack, (actions.clamp(-1, 1), self.steps >= self.max_steps))
        self.state, results, metrics = self.jit_step(self.state, self.start, action, cut)
        obs, rewards, terminated, truncated, last_obs = map(torch.from_dlpack, results)
        self.log = {name: torch.from_dlpack(x) for name, x in metrics.items()}  # terms of the reward
        self.steps *= ~(terminated | truncated)
        return obs, rewards, terminated, truncated, last_obs

    def snapshot(self) -> Any:
        """The state of the first environment."""
        return self.jax.tree.map(lambda x: x[0], self.state)

    def render(self, snapshots: list) -> list[np.ndarray]:
        """An image [H, W, 3] of each."""
        return self.env.render(snapshots)


def make_envs(args: Args) -> Any:
    """N environments on the device. Put your own here, with what `Pendulums` has."""
    seed_everything(args.seed)  # for what they draw when they are made
    if ":" in args.env_id:
        try:
            make = resolve_name(args.env_id)
        except (AttributeError, ImportError) as error:
            raise ValueError(error) from error
        return make(args)
    return Pendulums(args) if args.env_id == "Pendulum" else Playground(args)


def make_eval_envs(args: Args, envs: Any) -> Any:
    """The environments to evaluate in: with --eval-every others than `envs`, whose episodes go on."""
    # --evaluate has the checkpoint's --eval-every, and of several processes, the first one evaluates.
    return make_envs(args) if args.eval_every > 0 and not args.evaluate and RANK == 0 else envs


def check_envs(envs: Any, args: Args) -> None:
    """Raise `ValueError` if environments are not as `Pendulums` says, or the checkpoint is not for them."""

    def kind(x: Any) -> str:
        return f"{x.dtype} {[*x.shape]} on {x.device.type}" if isinstance(x, Tensor) else type(x).__name__

    for name in ("obs_size", "actor_obs_size", "action_size", "max_steps", "steps"):
        if not hasattr(envs, name):
            raise ValueError(f"{args.env_id} has no {name}: see Pendulums")
    if not 0 < envs.actor_obs_size <= envs.obs_size:
        raise ValueError(f"{args.env_id}: actor_obs_size must be from 1 to obs_size, {envs.obs_size}")
    if not float(envs.max_steps).is_integer() or envs.max_steps < 1:
        raise ValueError(f"{args.env_id}: max_steps must be a number of steps, not {envs.max_steps}")
    if not isinstance(envs.steps, Tensor) or envs.steps.shape != (args.num_envs,):
        raise ValueError(f"{args.env_id}: steps must be a tensor of {args.num_envs} numbers")
    if args.capture_video and not (hasattr(envs, "render") and hasattr(envs, "snapshot")):
        raise ValueError("--capture-video needs environments with snapshot and render")
    state, again = (getattr(envs, "state_dict", dict)() for _ in range(2))
    for name, x in state.items():
        if not isinstance(x, Tensor) or x.data_ptr() != again[name].data_ptr():
            raise ValueError(f"{args.env_id}: {name} of state_dict must be a tensor, and no copy of one")
    rewards = torch.zeros(args.num_envs, device=args.device)
    obs, ends = rewards.new_zeros(args.num_envs, envs.obs_size), rewards.bool()
    buffers = {name: x.clone() for name, x in buffers_of(envs).items()}  # to be put back
    with torch.no_grad():
        first, before = envs.reset(), unseen_state(envs)
        numbers = {name: [x.clone() for x in tensors] for name, (_, tensors) in before.items()}
        results = envs.step(rewards.new_zeros(args.num_envs, envs.action_size))
    if len(results) != 5:
        raise ValueError(f"{args.env_id}: step must return 5 tensors, not {len(results)}")
    names = "what reset returns", "observations", "rewards", "terminated", "truncated", "last_obs"
    expected = obs, obs, rewards, ends, ends, obs
    for name, value, result in zip(names, expected, (first, *results), strict=True):
        if kind(result) != kind(value):
            raise ValueError(f"{args.env_id}: {name} must be {kind(value)}, not {kind(result)}")
    log = getattr(envs, "log", {})
    if not isinstance(log, dict):
        raise ValueError(f"{args.env_id}: log must be a dict, not {kind(log)}")
    for name, x in log.items():
        if not isinstance(x, Tensor) or x.device.type != args.device:
            raise ValueError(f"{args.env_id}: log[{name!r}] must be a tensor on {args.device}, not {kind(x)}")
    saved = {x.untyped_storage().data_ptr() for x in buffers_of(envs).values()}
    for name, (python, tensors) in unseen_state(envs).items():
        if name not in before or python != before[name][0]:
            reason = f"step changes {name}, which a CUDA graph would not see: change a buffer in its place"
            raise ValueError(f"{args.env_id}: {reason}, or set recordable = False")
        for x, old in zip(tensors, numbers[name], strict=True):
            if not torch.equal(x, old) and x.untyped_storage().data_ptr() not in saved:
                reason = f"step changes {name}, which is not in state_dict: make it a buffer"
                raise ValueError(f"{args.env_id}: {reason}, or set recordable = False")
    restore_buffers(envs, buffers)
    if path := args.resume or args.evaluate:
        agent = Agent(args, envs.obs_size, envs.actor_obs_size, envs.action_size)
        try:
            agent.load_state_dict(load_checkpoint(path)[1]["agent"])
        except (RuntimeError, KeyError) as error:
            raise ValueError(f"{path} is of another script or size, or not for {args.env_id}") from error


def check_eval_envs(eval_envs: Any, envs: Any, args: Args) -> None:
    """Raise `ValueError` unless one can evaluate in `eval_envs` while the episodes of `envs` go on."""
    if eval_envs is None or eval_envs is envs:
        raise ValueError("with --eval-every, train needs eval_envs: the episodes of envs must go on")
    check_envs(eval_envs, args)
    if eval_envs.steps.data_ptr() == envs.steps.data_ptr():
        raise ValueError("eval_envs has the tensors of envs, whose episodes must go on")
    for name in ("obs_size", "actor_obs_size", "action_size"):
        if getattr(eval_envs, name) != getattr(envs, name):
            raise ValueError(f"eval_envs has another {name} than envs")


class Unseen(pickle.Pickler):
    """Writes all of an object but the numbers in its tensors; for these, it writes which tensors they are."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.tensors: list[Tensor] = []  # kept, so that no other one gets the address of one of them

    def persistent_id(self, x: Any) -> tuple[int, int] | None:
        if not isinstance(x, Tensor):
            return None
        self.tensors.append(x)
        return id(x), x.data_ptr()


def unseen_state(envs: Any) -> dict[str, tuple]:
    """What a CUDA graph of steps does not see change: Python's values, and which tensors there are, by name.

    Empty if steps are not recorded. Each value is what can be compared, and what must be kept until then.
    """
    if not getattr(envs, "recordable", False):
        return {}
    generators: dict[str, Callable] = {"random": random.getstate, "np.random": np.random.get_state}
    parts: dict[str, Any] = {name: function() for name, function in generators.items()}
    for prefix, module in envs.named_modules() if isinstance(envs, nn.Module) else [("", envs)]:
        attributes: dict[str, Any] = {}
        for kind in reversed(type(module).__mro__):  # what belongs to its classes, too
            attributes |= {} if kind in nn.Module.__mro__ else vars(kind)
        attributes |= getattr(module, "__dict__", {})
        attributes |= getattr(module, "_buffers", {}) | getattr(module, "_parameters", {})
        for name, value in attributes.items():
            if name not in ("log", *vars(nn.Module())) and not name.startswith("__"):
                parts[f"{prefix}.{name}".strip(".")] = value
    found: dict[str, tuple] = {}
    for name, part in parts.items():
        pickler = Unseen(file := io.BytesIO())
        try:
            pickler.dump(part)
        except Exception:  # what cannot be written is only compared as a whole
            found[name] = (id(part), part), []
        else:
            found[name] = file.getvalue(), pickler.tensors
    return found


def buffers_of(envs: Any) -> dict[str, Tensor]:
    """The tensors of an environment's `state_dict`, if it has one, as names of a checkpoint."""
    return {f"envs.{name}": x.detach() for name, x in getattr(envs, "state_dict", dict)().items()}


def restore_buffers(envs: Any, saved: dict[str, Tensor]) -> None:
    """Put the environments' tensors in a checkpoint back, where their sizes agree, and say where not."""
    tensors = buffers_of(envs)
    other = [name for name in tensors if name in saved and saved[name].shape != tensors[name].shape]
    if other and RANK == 0:
        print(f"of other sizes in the checkpoint, so these begin anew: {', '.join(other)}")
    put_back({name: x for name, x in tensors.items() if name in saved and name not in other}, saved)


@torch.no_grad()
def put_back(tensors: dict[str, Tensor], saved: dict[str, Tensor]) -> None:
    """Give these tensors the saved numbers."""
    for name, x in tensors.items():
        if not torch.equal(x.cpu(), saved[name].cpu()):  # an expanded one cannot be written to
            x.copy_(saved[name])


def mean_logs(logs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Means of what environments log in several steps, without NaN."""
    means = {}
    for name in {name: None for log in logs for name in log}:
        values = [log[name].float().flatten() for log in logs if name in log]
        means[name] = torch.cat(values).nanmean()
    return means


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
        self.best_path = self.path.with_name("best.pt")
        # Not from the checkpoint: if the run was killed, that may be older than best.pt.
        best = load_checkpoint(self.best_path)[1]["state"] if self.best_path.exists() else {}
        state.best_return, state.best_step = best.get("best_return", -math.inf), best.get("best_step", 0)
        self.warned = self.stop_at_reached = False
        self.first_time, self.first_step = time.monotonic(), state.global_step
        self.last_print = self.last_save = -math.inf

    def save(self) -> None:
        """Write the checkpoint of the run, and the curves up to it."""
        if self.last_save == -math.inf:  # only now: until then, a resumed run is as it was
            rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(self.args).items())
            self.writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")
        self.writer.flush()  # first, so that the curves have no gap where training resumes
        self.write(self.path)
        self.last_save = time.monotonic()

    def write(self, path: Path) -> None:
        """Write a checkpoint. If the process is killed meanwhile, the previous one is still there."""
        content = {"args": asdict(self.args), "state": asdict(self.state), "random": torch.get_rng_state()}
        content |= {"agent": self.agent.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(content, path.with_suffix(".tmp"))
        path.with_suffix(".tmp").replace(path)

    def log(self, tensors: dict[str, Tensor], rollout: Rollout, logs: dict[str, Tensor]) -> None:
        """Log an iteration, print progress, and save after the first and then every minute.

        Adds the episodes to the state's returns. Raises `FloatingPointError` if the loss is not finite.
        """
        metrics = dict(zip(tensors, torch.stack([*tensors.values()]).tolist(), strict=True))
        buffers = torch.cat([x.flatten() for x in self.agent.buffers()])  # the running statistics
        if not math.isfinite(metrics["approx_kl"] + metrics["grad_norm"]) or not buffers.isfinite().all():
            raise FloatingPointError(f"NaN, or numbers that are too large: {not_finite(rollout)}")
        if metrics["first_approx_kl"] > 1e-4 and not self.warned:  # correct runs have up to 1e-8
            print("acting and learning do not compute the same policy: is a mask, or dropout, in only one?")
            self.warned = True
        args, state, step, now = self.args, self.state, self.state.global_step, time.monotonic()
        scalars = {name if "/" in name else f"losses/{name}": value for name, value in metrics.items()}
        scalars |= {f"env/{name}": x.item() for name, x in logs.items() if not x.isnan()}
        self.check_last_obs(rollout)
        _, returns, lengths = rollout.sums.unbind(1)
        ended = (rollout.terminated | rollout.truncated) & ~returns.isnan()  # of whole episodes
        if ended.any():
            finished = returns[ended].tolist()
            state.returns = [*state.returns, *finished][-100:]
            scalars["charts/episodic_return"] = np.mean(finished)
            scalars["charts/episodic_return_std"] = np.std(finished)
            scalars["charts/episodic_return_min"] = np.min(finished)
            scalars["charts/episodic_return_max"] = np.max(finished)
            scalars["charts/episodic_return_100"] = float(np.mean(state.returns))
            scalars["charts/episodic_length"] = lengths[ended].mean().item()
        scalars["charts/SPS"] = speed = (step - self.first_step) / (now - self.first_time)
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        keep = args.keep_every is not None and step % args.keep_every < rollout.rewards.numel() * PROCESSES
        if keep or now - self.last_save > 60:
            self.save()
        if keep:
            kept = self.path.parent / f"at_{step}" / self.path.name  # resumed, it is a run in this folder
            kept.parent.mkdir(exist_ok=True)
            shutil.copy(self.path, kept)
        if step >= args.total_timesteps or now - self.last_print > 5:
            self.last_print = now
            average = f"return {np.mean(state.returns):.5g}" if state.returns else "no episode has ended yet"
            left = timedelta(seconds=round(max(args.total_timesteps - step, 0) / speed))
            line = f"{step:>10,} steps  {average}  KL {metrics['approx_kl']:.4f}"
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

    ends_are_checked = False

    def check_last_obs(self, rollout: Rollout) -> None:
        """Say once if the last observations of episodes seem to be of the next ones."""
        limits = (rollout.truncated & ~rollout.terminated)[:-1]
        same = (rollout.last_obs[:-1] == rollout.obs[1:]).all(-1)
        if self.ends_are_checked or not limits.any():
            return
        self.ends_are_checked = True
        if same[limits].all():
            print("last_obs is what reset returned, where a time limit was reached: see step of Pendulums")

    def finish(self, envs: Any) -> dict:
        """Save, evaluate unless the run was stopped, and close the log. Returns the results."""
        if self.state.global_step > self.first_step or not self.args.resume:
            self.save()
        state, replayed = self.state, np.zeros(0)
        average = float(np.mean(state.returns)) if state.returns else math.nan
        finished = self.stop_at_reached or state.global_step >= self.args.total_timesteps
        returns = evaluate(self.path, self.args, envs) if finished else np.zeros(0)
        if len(returns) > 0:
            tag = "eval/final_return" if self.best_path.exists() else "eval/greedy_return"
            self.writer.add_scalar(tag, returns.mean(), state.global_step)
        if self.best_path.exists() and finished:  # in the same episodes, which are not those that chose it
            replayed = evaluate(self.best_path, self.args, envs)
        if len(replayed) > 0:
            self.writer.add_scalar("eval/best_replayed", replayed.mean(), state.global_step)
            chosen = f"chosen after {state.best_step:,} steps for a mean return of {state.best_return:.5g}"
            both = f"it has {replayed.mean():.5g}, the last policy {returns.mean():.5g}"
            print(f"best.pt: {chosen}; in the new episodes above, {both}")
        self.writer.close()
        results = {"checkpoint": str(self.path), "training_return": average, "greedy_returns": returns}
        best = {"best_return": state.best_return, "best_step": state.best_step, "best_replayed": replayed}
        return results | best


def not_finite(rollout: Rollout) -> str:
    """Where the first number of a rollout is that is not finite, or beyond 1e18, whose square may not be."""
    last_obs = rollout.last_obs.masked_fill(rollout.terminated.unsqueeze(-1), 0)
    columns = {"observation": rollout.obs, "action": rollout.actions, "reward": rollout.rewards}
    found = []
    for name, column in (columns | {"last_obs": last_obs}).items():
        for step, env, *number in (~(column.abs() <= 1e18)).nonzero()[:1].tolist():
            value = column[step, env, *number].item()
            place = f"number {number[0]} of the {name}" if number else f"the {name}"
            found.append((step, f"{place} of environment {env} is {value:g} in step {step} of the rollout"))
    if not found:
        if PROCESSES > 1:
            return "the numbers of the first process are finite: look at others', or lower --learning-rate"
        return "the environment's numbers are finite: lower --learning-rate"
    return min(found, key=lambda pair: pair[0])[1]


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


def restore(path: str, args: Args, agent: Agent, optimizer: Adam, state: State, envs: Any) -> dict:
    """Restore all that a checkpoint has but its unfinished episodes. Returns its content."""
    saved, content = load_checkpoint(path)
    agent.load_state_dict(content["agent"])
    optimizer.load_state_dict(content["optimizer"])
    if args.learning_rate != saved.learning_rate:  # else an adapted one goes on
        optimizer.param_groups[0]["lr"] = args.learning_rate
    restore_buffers(envs, content["state"]["episodes"])
    vars(state).update(content["state"])
    return content


def continue_episodes(state: State, saved: dict) -> None:
    """Go on with the unfinished episodes of a checkpoint, if the environments are as many as they were."""
    episodes = saved["state"]["episodes"]
    same = episodes.keys() == state.episodes.keys()
    if same and PROCESSES == 1 and all(episodes[name].shape == x.shape for name, x in state.episodes.items()):
        torch.set_rng_state(saved["random"])
        put_back(state.episodes, episodes)


class Policy(nn.Module):
    """A trained policy, which can be exported: from raw observations [..., D] to actions [..., A].

    Observations are what the actor sees, the first D numbers of those of the environments; normalising them
    is part of the policy. Actions are the most likely ones, in units of their bounds, and not clipped.
    """

    def __init__(self, agent: Agent):
        super().__init__()
        self.agent, size = agent, agent.actor_obs_size
        agent.critic = None
        agent.obs_moments.mean, agent.obs_moments.var = (
            x[:size].clone() for x in (agent.obs_moments.mean, agent.obs_moments.var)
        )

    def forward(self, obs: Tensor) -> Tensor:
        means, _ = self.agent.policy(self.agent.normalize(obs)).chunk(2, -1)
        return means


def load_policy(path: str | Path, device: str = "cpu") -> Policy:
    """The policy of a checkpoint, as a module."""
    args, content = load_checkpoint(path, device)
    agent = Agent(args, *content["agent"]["sizes"].tolist()).to(device)
    agent.load_state_dict(content["agent"])
    return Policy(agent).eval().requires_grad_(False)


@torch.no_grad()
def evaluate(path: str | Path, args: Args, envs: Any) -> np.ndarray:
    """Play an episode in each environment with the most likely actions; print and return their returns.

    Random generators are left as they were: training goes on as if this had not been called.
    """
    content = load_checkpoint(path)[1]
    restore_buffers(envs, content["state"]["episodes"])
    seed = args.seed + 2**30  # episodes that training has not seen
    mps_state = torch.mps.get_rng_state() if args.device == "mps" else None  # the next line knows CUDA's
    with isolated_random_numbers(seed):
        policy = load_policy(path, args.device)
        seed_everything(seed)  # those of GPUs, too
        obs = envs.reset()
        returns = torch.zeros(args.num_envs, device=args.device)
        running, snapshots, logs = torch.ones_like(returns, dtype=torch.bool), [], []
        for _ in range(int(envs.max_steps)):
            if STOP.is_set():
                return np.zeros(0)
            if args.capture_video and running[0]:
                snapshots.append(envs.snapshot())
            actions = policy(obs[:, : envs.actor_obs_size])
            obs, rewards, terminated, truncated, _ = envs.step(actions.clone())  # JAX takes no views
            rewards, _ = without_diverged(rewards, terminated)
            returns += torch.where(running, rewards, 0)
            log = getattr(envs, "log", {})
            logs.append(
                {name: x[running] if x.shape == running.shape else x.clone() for name, x in log.items()}
            )
            running &= ~(terminated | truncated)
            if not running.any():
                break
    if mps_state is not None:
        torch.mps.set_rng_state(mps_state)
    if args.capture_video:
        from moviepy import ImageSequenceClip

        video = str(Path(path).with_name("best_video.mp4" if Path(path).name == "best.pt" else "video.mp4"))
        ImageSequenceClip(envs.render(snapshots), fps=30).write_videofile(video, logger=None)
        print(f"video: {video}")
    shown = f"{returns.mean():.5g} ± {returns.std(correction=0):.3g} with the most likely actions"
    print(f"evaluation return {shown}, after {content['state']['global_step']:,} steps")
    if means := mean_logs(logs):
        print("means of its steps:", ", ".join(f"{name} {x:.3g}" for name, x in means.items()))
    return returns.cpu().numpy()


def parse_args() -> Args:
    """The settings of the command line; with --resume or --evaluate, the others are the checkpoint's."""
    if {"True", "False"} & {*sys.argv}:
        raise ValueError("write --track or --no-track, for example, without True or False")
    parse = partial(tyro.cli, Args, description=__doc__.partition("\n  [PPO]")[0])
    args = parse(args=[word for word in sys.argv[1:] if word not in ("-h", "--help")])
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
    else:  # with the defaults that are for this environment, which --help shows, too
        args = parse(default=Args() if args.env_id == Args.env_id else OTHERS)
    check(args)
    return args


def print_commands(args: Args, path: str, can_render: bool) -> None:
    """Say how to resume a run, to watch its agent, and to check it."""
    script = Path(sys.argv[0])
    module = f" --env-id {args.env_id}" if ":" in args.env_id else ""  # a checkpoint imports none by itself
    video = " --capture-video" if can_render else ""
    step, total = load_checkpoint(path)[1]["state"]["global_step"], args.total_timesteps
    steps = f" --total-timesteps {total * (step // total + 1):.0f}" if step >= total else ""
    print(f"resume: python {script} --resume {path}{module}{steps}")
    print(f"watch:  python {script} --evaluate {path}{module}{video}")
    if (coach := script.with_name("coach.py")).exists():  # not beside a copy
        print(f"check:  python {coach} check {Path(path).parent}")


def stop(*_: Any) -> None:
    """End training after this iteration, and save; a second Ctrl-C stops at once."""
    os.write(2, b"stopping after this iteration; a second Ctrl-C stops at once, without saving it\n")
    STOP.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def raised_here(error: BaseException) -> bool:
    """Whether it is this file that raised it."""
    trace = error.__traceback__
    while trace.tb_next:
        trace = trace.tb_next
    return trace.tb_frame.f_globals is globals()


def main() -> None:
    """The command line. Invalid settings end with exit status 2, and a run that was stopped with 130."""
    sys.path.append(".")  # where the `module:` of --env-id is looked for, too
    try:
        args = parse_args()
        envs = make_envs(args)
        eval_envs = make_eval_envs(args, envs)
        check_envs(envs, args)
        if eval_envs is not envs:
            check_eval_envs(eval_envs, envs, args)
    except (ValueError, OSError) as error:
        if not raised_here(error):  # but in an environment
            raise
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    if args.evaluate:
        evaluate(args.evaluate, args, envs)
        return
    STOP.clear()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    results = train(args, envs, eval_envs)
    if results:  # of the first process
        print_commands(args, results["checkpoint"], hasattr(envs, "snapshot"))
    if STOP.is_set():
        sys.exit(130)


if __name__ == "__main__":
    main()
