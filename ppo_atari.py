# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.5", "gymnasium>=1.1", "ale-py>=0.12", "numpy", "tensorboard", "tyro>=0.9.1",
# ]
# ///
"""Proximal Policy Optimization (PPO) for Atari games, in one file.

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4
    python ppo_atari.py --env-id ALE/Pong-v5 --learning-rate 5e-4 --num-minibatches 8
    python ppo_atari.py --evaluate latest --capture-video

It trains on any game of the Arcade Learning Environment (ALE), under DeepMind's protocol: see `make_envs`.

  [PPO]     Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE]     Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
            Estimation", arXiv:1506.02438
  [Limits]  Pardo et al. 2018, "Time Limits in Reinforcement Learning", arXiv:1712.00378
  [Matters] Engstrom et al. 2020, "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
  [37]      Huang et al. 2022, "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog
  [DQN]     Mnih et al. 2015, "Human-level control through deep reinforcement learning", Nature 518
  [ALE]     Machado et al. 2018, "Revisiting the Arcade Learning Environment", arXiv:1709.06009

PPO comes first: networks, equations, then the algorithm up to `train`, which repeats:

    collect_rollout        acts for T steps in N environments
    make_batch             estimates advantages (compute_gae)
    update                 takes K epochs of gradient steps on minibatches, each on the loss of ppo_loss

Shapes: T steps per rollout, N environments, A actions, B = T x N transitions. An observation is the last 4
images, the newest last: [4, 84, 84], bytes.
"""

import ctypes
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
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:  # the trailing comments become --help
    exp_name: str = Path(sys.argv[0]).stem or "ppo_atari"  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    resume: str | None = None  # resume from this checkpoint or `latest`; flags override its settings
    evaluate: str | None = None  # only evaluate this checkpoint or `latest`, greedily
    init: str | None = None  # start a new run from the networks of this checkpoint
    eval_episodes: int = 10  # games of an evaluation
    eval_every: float = 0  # also evaluate every so many steps (0: never); best.pt has the best mean return
    stop_at: float | None = None  # end training once an evaluation of --eval-every reaches this mean return
    capture_video: bool = False  # record a game of the evaluation, as the agent sees it (needs moviepy)
    track: bool = False  # also log to Weights & Biases, to its WANDB_PROJECT (needs wandb)
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda or mps
    num_threads: int = torch.get_num_threads()  # CPU threads of PyTorch, and of the games
    bfloat16: bool = False  # compute products in bfloat16: faster on some CPUs, far slower on others

    # Environment
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id; ALE/Breakout-v5 has sticky actions ([ALE])
    env_kwargs: str = "{}"  # arguments of ale_py's AtariVectorEnv, as JSON
    num_envs: int = 8  # N: environments that step in parallel
    clip_rewards: bool = True  # clip rewards to their signs; reported returns are unclipped

    # PPO
    total_timesteps: float = 10_000_000  # total number of transitions, of 4 frames each; also as 1e6
    num_steps: int = 128  # T: steps of each environment per rollout
    learning_rate: float = 2.5e-4  # Adam's step size
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # γ: discount factor
    gae_lambda: float = 0.95  # λ of GAE: lower values give more bias, higher ones more variance
    update_epochs: int = 4  # K: epochs per rollout
    num_minibatches: int = 4  # minibatches per epoch, one gradient step each
    norm_adv: bool = True  # normalise the advantages of each minibatch to mean 0, standard deviation 1
    clip_coef: float = 0.1  # ε: the ratio of new to old probability is clipped to 1 ± ε
    clip_vloss: bool = False  # also clip the change of the value to ±ε
    target_kl: float | None = None  # stop an iteration if an epoch's last minibatch has a KL above this
    ent_coef: float = 0.01  # c₂: weight of the entropy bonus
    vf_coef: float = 0.5  # c₁: weight of the value loss, ½ (V - return)²
    max_grad_norm: float = 0.5  # clip the gradient to this global norm


# Allowed values, limits included. With more than 30 epochs, or ε above 0.3, the policy moves too far from the
# one that collected the data. To study what is refused, change this table in your program. A setting that you
# add is checked if it has an entry here.
BOUNDS = {
    "seed": (0, 2**31), "eval_episodes": (1, math.inf), "eval_every": (0, math.inf),
    "stop_at": (-1e15, 1e15), "num_threads": (1, 1024), "num_envs": (1, math.inf),
    "num_steps": (1, math.inf), "total_timesteps": (1, 1e15), "learning_rate": (0, 1), "gamma": (0, 1),
    "gae_lambda": (0, 1), "update_epochs": (1, 30), "num_minibatches": (1, math.inf),
    "clip_coef": (1e-3, 0.3), "target_kl": (1e-6, math.inf), "ent_coef": (0, 100), "vf_coef": (0, 100),
    "max_grad_norm": (1e-6, math.inf),
}  # fmt: skip


# ------------------------------------------------- Networks -------------------------------------------------


def initialize(layer: nn.Module, gain: float = math.sqrt(2)) -> nn.Module:
    """Give a layer orthogonal weights and zero biases ([37], detail 2), and return it."""
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    """The convolutional network of [DQN], with two heads: actor and critic."""

    def __init__(self, args: Args, num_actions: int):
        super().__init__()
        self.use_bfloat16 = args.bfloat16
        self.trunk = nn.Sequential(
            initialize(nn.Conv2d(4, 32, kernel_size=8, stride=4)), nn.ReLU(),
            initialize(nn.Conv2d(32, 64, kernel_size=4, stride=2)), nn.ReLU(),
            initialize(nn.Conv2d(64, 64, kernel_size=3, stride=1)), nn.ReLU(),
            nn.Flatten(),
            initialize(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
        )  # fmt: skip
        self.actor = initialize(nn.Linear(512, num_actions), gain=0.01)  # near-uniform at first
        self.critic = initialize(nn.Linear(512, 1), gain=1.0)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """π(·|s) [B, A] as log-probabilities, and V(s) [B], for observations [B, 4, 84, 84]."""
        dtype = torch.bfloat16 if self.use_bfloat16 else torch.float32
        images = obs.to(dtype, memory_format=torch.channels_last) / 255  # in this format, CPUs are 20% faster
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.use_bfloat16):
            features = self.trunk(images).float()
        return torch.log_softmax(self.actor(features), -1), self.critic(features).squeeze(-1)


# ------------------------------------------------- Equations ------------------------------------------------


# `Agent.forward` and these five functions are all that knows the distribution of actions.


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
    """B transitions. To add a quantity, add a field, fill it in `make_batch`, and use it in `ppo_loss`."""

    obs: Tensor  # [B, 4, 84, 84], bytes
    actions: Tensor  # [B]
    old_policy: Tensor  # [B, A], π_old(·|s) as log-probabilities
    old_values: Tensor  # [B], V_old(s)
    advantages: Tensor  # [B]
    returns: Tensor  # [B]
    weights: Tensor  # [B], 1, or 0 where FIRE was pressed in place of the action


@dataclass
class State:
    """Coefficients and progress: what a checkpoint holds besides settings, agent and optimizer."""

    learning_rate: float
    global_step: int = 0  # transitions so far
    returns: list[float] = field(default_factory=list)  # of the last 100 games
    best_return: float = -math.inf  # of best.pt, in the evaluation that chose it
    best_step: int = 0  # of best.pt
    last_evaluation: int = 0  # step of the last evaluation of --eval-every


def ppo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, and metrics: [PPO], equation 9, negated, with ½ in the value loss."""
    policy, values = agent(batch.obs)
    shares = batch.weights / batch.weights.sum().clamp(min=1)  # of the rows in a mean
    advantages = batch.advantages
    if args.norm_adv:
        centred = advantages - advantages @ shares
        advantages = centred / ((centred.square() @ shares).sqrt() + 1e-8)

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
    loss = (policy_losses + args.vf_coef * value_losses - args.ent_coef * entropies) @ shares
    with torch.no_grad():  # scalars, averaged over the gradient steps, then logged as losses/<name>
        metrics = {
            "policy_loss": policy_losses @ shares,
            "value_loss": value_losses @ shares,
            "entropy": entropies @ shares,
            # k3 of Schulman 2020, "Approximating KL Divergence"
            "approx_kl": (ratio - 1 - log_ratio) @ shares,
            "clipfrac": ((ratio - 1).abs() > args.clip_coef).type_as(shares) @ shares,
        }
    return loss, metrics


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout:
    """T steps of N environments. The next rollout starts where this one ends, in the same arrays.

    A game that ends is reset in the same step: obs[t+1] is then the first observation of the next one. Where
    the frame limit cut a game, the value of its last state counts, and is in `last_values`. At a lost life,
    which ends an episode but not the game, the next step presses FIRE, and is not learnt from.

        step     t           t+1           t+2
        action   drawn       FIRE          drawn
        end      terminated  no            no
        weight   1           0             1
    """

    def __init__(self, args: Args, num_actions: int):
        shape = args.num_steps, args.num_envs
        pixels = torch.zeros(args.num_steps + 1, args.num_envs, 84, 84, 4, dtype=torch.uint8)
        self.obs = pixels.permute(0, 1, 4, 2, 3).to(args.device)  # s_t; channels last in memory
        self.policies = torch.zeros(*shape, num_actions, device=args.device)  # π_old(·|s_t)
        self.actions = torch.zeros(shape, dtype=torch.int64, device=args.device)  # a_t, as `sample` draws it
        self.values = torch.zeros(args.num_steps + 1, args.num_envs, device=args.device)  # V(s_t)
        self.last_values = torch.zeros(shape, device=args.device)  # V(s_{t+1}), where truncated
        self.rewards = np.zeros(shape)  # r_t, not clipped
        self.terminated, self.truncated = np.zeros(shape, bool), np.zeros(shape, bool)
        self.forced = np.zeros(shape, bool)  # whether FIRE was pressed in place of a_t
        # So far, of the unfinished game in each environment:
        self.game_returns, self.game_lengths = np.zeros(args.num_envs), np.zeros(args.num_envs, int)


@torch.inference_mode()
def collect_rollout(
    envs: VectorEnv, forward: Callable, rollout: Rollout, args: Args
) -> list[tuple[float, int]]:
    """Act for T steps by `forward`, which is the agent. Returns return and length of each game that ended."""
    games = []
    rollout.obs[0] = rollout.obs[-1]
    for t in range(args.num_steps):
        rollout.policies[t], rollout.values[t] = forward(rollout.obs[t])
        rollout.actions[t] = sample(rollout.policies[t])
        images, rewards, terminated, truncated, infos = envs.step(rollout.actions[t].cpu().numpy())
        rollout.obs[t + 1] = torch.as_tensor(images)
        rollout.rewards[t], rollout.terminated[t], rollout.truncated[t] = rewards, terminated, truncated
        rollout.forced[t] = infos["forced"]
        if truncated.any():
            _, rollout.last_values[t] = forward(torch.as_tensor(infos["final_obs"], device=args.device))
        rollout.game_returns += rewards
        rollout.game_lengths += 1
        for n in np.flatnonzero(infos["game_over"]):
            games.append((float(rollout.game_returns[n]), int(rollout.game_lengths[n])))
            rollout.game_returns[n] = rollout.game_lengths[n] = 0
    _, rollout.values[-1] = forward(rollout.obs[-1])
    return games


def make_batch(rollout: Rollout, args: Args) -> Batch:
    """The transitions of a rollout, with advantages, from rewards clipped to their signs ([DQN])."""
    tensor = partial(torch.tensor, device=args.device)
    terminated, truncated = tensor(rollout.terminated), tensor(rollout.truncated)
    rewards = tensor(np.sign(rollout.rewards) if args.clip_rewards else rollout.rewards, dtype=torch.float32)
    values = rollout.values[:-1]
    next_values = torch.where(truncated, rollout.last_values, rollout.values[1:])
    ends = terminated, truncated
    advantages, returns = compute_gae(rewards, values, next_values, *ends, args.gamma, args.gae_lambda)
    return Batch(
        obs=rollout.obs[:-1].flatten(0, 1),
        actions=rollout.actions.flatten(),
        old_policy=rollout.policies.flatten(0, 1),
        old_values=values.flatten(),
        advantages=advantages.flatten(),
        returns=returns.flatten(),
        weights=tensor(~rollout.forced, dtype=torch.float32).flatten(),
    )


def compute_gradients(agent: Agent, minibatch: Batch, args: Args) -> dict[str, Tensor]:
    """Compute the gradients of the loss, clipped to --max-grad-norm, in the agent. Returns metrics."""
    agent.zero_grad()  # here, since a CUDA graph writes to the gradients with which it was recorded
    loss, metrics = ppo_loss(agent, minibatch, args)
    loss.backward()
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return {name: metric.detach() for name, metric in metrics.items()}


@torch.no_grad()
def mean_kl(agent: Agent, batch: Batch) -> float:
    """KL divergence of the current policy from the one that acted, in nats; of a minibatch, to save time."""
    policy, _ = agent(batch.obs)
    weighted = kl_divergence(batch.old_policy, policy) @ batch.weights
    return (weighted / batch.weights.sum().clamp(min=1)).item()


def update(
    agent: Agent, optimizer: Adam, compute: Callable, batch: Batch, args: Args, state: State
) -> dict[str, float]:
    """K epochs of gradient steps on shuffled minibatches, by `compute`: `compute_gradients` of the columns.

    Returns metrics: of the batch, means over the gradient steps, and the last minibatch's KL divergence.
    """
    metrics = batch_metrics(batch, state)
    for group in optimizer.param_groups:
        group["lr"] = state.learning_rate * group.get("lr_ratio", 1)
    steps = []  # metrics of each gradient step, still as tensors: reading them would wait for the GPU
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.obs)).to(args.device)
        for rows in order.tensor_split(args.num_minibatches):
            minibatch = Batch(*(column[rows] for column in batch))
            step_metrics = compute(*minibatch)
            optimizer.step()
            # Copies, since a CUDA graph overwrites them.
            steps.append({name: metric.clone() for name, metric in step_metrics.items()})
        if args.target_kl is not None and mean_kl(agent, minibatch) > args.target_kl:
            break
    for name in steps[0]:
        metrics[name] = torch.stack([step[name] for step in steps]).mean().item()
    metrics["first_approx_kl"] = steps[0]["approx_kl"].item()  # before the first step: 0, up to rounding
    metrics["kl"] = mean_kl(agent, minibatch)
    return metrics


def batch_metrics(batch: Batch, state: State) -> dict[str, float]:
    """The learning rate, and how well V_old predicts the returns.

    If all returns are equal, there is nothing to predict, and no metric for it.
    """
    learnt = batch.weights > 0
    errors, returns = (batch.returns - batch.old_values)[learnt], batch.returns[learnt]
    variance, mean_square = returns.var(correction=0), returns.square().mean()
    metrics = {"charts/learning_rate": state.learning_rate}
    if variance > 1e-12 * mean_square:  # not only rounding
        metrics["explained_variance"] = (1 - errors.var(correction=0) / variance).item()
        metrics["critic_error"] = (errors.square().mean() / mean_square).sqrt().item()
    return metrics


def recorded(function: Callable, *examples: Tensor) -> Callable:
    """A function of tensors, recorded as a CUDA graph: its many small kernels are then launched as one.

    All calls must have the shapes of the examples. What it returns is overwritten by the next call. Weights
    must change in place, as an optimizer changes them. Without CUDA, it is the function itself.
    """
    if not examples[0].is_cuda:
        return function
    inputs = [example.clone() for example in examples]
    torch.cuda.set_device(inputs[0].device)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):  # trial runs, in which libraries choose their kernels
        for _ in range(3):
            function(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = function(*inputs)

    def replay(*values: Tensor) -> Any:
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)
        graph.replay()
        return outputs

    return replay


def train(args: Args, show_commands: bool = False) -> dict:
    """PPO ([PPO], Algorithm 1), then a greedy evaluation. If killed, it loses a minute or an iteration.

    Returns "checkpoint" (its path), "training_return" (of the last 100 games), "greedy_returns",
    "best_return", for which best.pt was chosen (-inf without one), "best_step", and "best_replayed", its
    returns in the games of "greedy_returns" (empty without one). Raises `Refused`, a `ValueError`, where
    training would be wrong. With `resume`, settings come from `args`, not from the checkpoint. It seeds the
    global random generators, sets PyTorch's threads, and writes to runs/.
    """
    STOP.clear()
    check_settings(args)
    plain = {name: value.item() for name, value in vars(args).items() if isinstance(value, np.generic)}
    args = replace(args, **plain)  # a checkpoint has no numbers of NumPy
    torch.set_num_threads(args.num_threads)
    keep_freed_memory()
    path = run_path(args)
    state = State(args.learning_rate)
    saved = load_start(args)
    if args.resume is not None:
        vars(state).update(saved["state"])
    seed = hash_seed(args.seed, state.global_step) // 2  # a resumed run has new games; the ALE adds to it
    eval_envs, envs = make_eval_env(args), make_envs(args, args.num_envs)
    if envs.metadata.get("autoreset_mode") is not AutoresetMode.SAME_STEP:
        raise Refused("the environments must reset in the same step: see AutoresetMode.SAME_STEP")
    seed_everything(seed)
    num_actions = int(envs.single_action_space.n)
    agent = Agent(args, num_actions).to(args.device)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # ε: [37], detail 3
    for group in optimizer.param_groups:  # groups of your own keep their ratio to --learning-rate
        group["lr_ratio"] = group["lr"] / args.learning_rate if args.learning_rate > 0 else 1
    if saved:
        agent.load_state_dict(saved["agent"])
    if args.resume is not None:
        optimizer.load_state_dict(saved["optimizer"])
    rollout = Rollout(args, num_actions)
    example = [column[: len(column) // args.num_minibatches] for column in make_batch(rollout, args)]
    compute = recorded(lambda *columns: compute_gradients(agent, Batch(*columns), args), *example)
    with torch.no_grad():
        forward = recorded(agent, rollout.obs[0])
    rollout.obs[-1] = torch.as_tensor(envs.reset(seed=seed)[0])  # where the first rollout starts
    run = Run(path, args, agent, optimizer, state)

    while state.global_step < args.total_timesteps and not (STOP.is_set() or run.stop_at_reached):
        remaining = max(0, 1 - state.global_step / args.total_timesteps)
        state.learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)
        episodes = collect_rollout(envs, forward, rollout, args)
        batch = make_batch(rollout, args)
        metrics = update(agent, optimizer, compute, batch, args, state)
        state.global_step += len(batch.obs)
        run.log(metrics, episodes)
        if args.eval_every > 0:
            run.evaluate_if_due(eval_envs)
    results = run.finish(eval_envs, show_commands)
    close(eval_envs)
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


def keep_freed_memory() -> None:
    """Let the C library keep freed memory, on Linux: a run on the CPU is 12% faster."""
    if sys.platform == "linux":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


def check_settings(args: Args) -> None:
    """Raise `Refused` for settings that would train wrongly, or have no effect."""
    if forgotten := {setting.name for setting in fields(args)} - {setting.name for setting in fields(Args)}:
        raise Refused(f"checkpoints would forget {forgotten}: replace this module's Args, too")
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # NaN is refused, too
            raise Refused(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
    size = args.num_envs * args.num_steps
    if size < 2 * args.num_minibatches or size % args.num_minibatches > 0:
        # All of the same size, since a CUDA graph has only one.
        raise Refused(
            f"--num-minibatches must divide the {size} transitions of a rollout, into 2 or more each"
        )
    if not args.norm_adv and args.update_epochs * args.num_minibatches > 1:
        raise Refused("several gradient steps need --norm-adv")
    if args.stop_at is not None and args.eval_every == 0:
        raise Refused("--stop-at needs --eval-every")


# ------------------------------------------------- Environments --------------------------------------------


# Arguments of ale_py's AtariVectorEnv. Rewards are clipped, and lost lives are noticed, in this file.
PROTOCOL: dict[str, Any] = {
    "frameskip": 4, "maxpool": True, "grayscale": True, "img_height": 84, "img_width": 84, "stack_num": 4,
    "episodic_life": False, "life_loss_info": False, "reward_clipping": False,
    "continuous": False, "batch_size": 0,
}  # fmt: skip


def make_envs(args: Args, num_envs: int) -> VectorEnv:
    """Games in the ALE's own vector environment, under DeepMind's protocol ([DQN], Methods).

    An action is held for 4 frames, and the last 2 of them are joined by their brighter pixels. An observation
    is the last 4 such images, grey, 84 x 84. A game begins with up to 29 frames without an action; where it
    has a button FIRE, the first of them presses it. After 108,000 frames, half an hour, it is cut. For the
    learner, a lost life ends an episode (see `LostLives`).
    """
    import ale_py  # noqa: F401 - registers the games
    from ale_py.vector_env import AtariVectorEnv

    settings = dict(gym.spec(args.env_id).kwargs)
    if "game" not in settings:
        raise Refused(f"{args.env_id} is not an Atari game: use ppo.py or ppo_continuous.py")
    settings.pop("frameskip", None)
    # Python refuses another value of the protocol in --env-kwargs.
    envs = AtariVectorEnv(
        **(settings | json.loads(args.env_kwargs)),
        **PROTOCOL,
        num_envs=num_envs,
        num_threads=min(args.num_threads, num_envs),
        autoreset_mode=AutoresetMode.SAME_STEP,
    )
    buttons = [action.name for action in envs.ale.get_action_set()]
    return LostLives(envs, buttons.index("FIRE") if "FIRE" in buttons else None)


class LostLives(gym.vector.VectorWrapper):
    """Ends an episode at each lost life, while the game continues.

    In the step after it, the button FIRE is pressed in place of the action, if the game has one, since some
    games wait for it. `info` says where a game is over, and where FIRE was pressed: "game_over" and "forced".
    """

    def __init__(self, envs: VectorEnv, fire: int | None):
        super().__init__(envs)
        self.fire = fire
        self.metadata = envs.metadata | {"render_modes": ["rgb_array"]}  # `evaluate` makes a video

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        obs, info = self.env.reset(**kwargs)
        self.lives, self.lost = info["lives"], np.zeros(self.num_envs, bool)
        return obs, info

    def step(self, actions: np.ndarray) -> tuple:
        forced = self.lost if self.fire is not None else np.zeros(self.num_envs, bool)
        obs, rewards, terminated, truncated, info = self.env.step(np.where(forced, self.fire or 0, actions))
        game_over = terminated | truncated  # the lives are then those of the next game
        self.lost, self.lives = (info["lives"] < self.lives) & ~game_over, info["lives"]
        more = {"game_over": game_over, "forced": forced}
        return obs, rewards, terminated | self.lost, truncated, info | more


def make_eval_env(args: Args) -> VectorEnv:
    """The games of the evaluation, made before training: what fails there fails at once."""
    if args.eval_episodes < 1:
        raise Refused("--eval-episodes must be at least 1")
    if args.capture_video and not find_spec("moviepy"):
        raise Refused("--capture-video needs: pip install moviepy")
    return make_envs(args, args.eval_episodes)


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


def load_start(args: Args) -> dict:
    """The content of the checkpoint that --resume or --init names, if one does."""
    start = args.init if args.resume is None else args.resume
    if start is None:
        return {}
    path = find_checkpoint(start, args.exp_name)
    saved, content = load_checkpoint(path)
    if args.env_id != saved.env_id:
        print(f"{path} was trained on {saved.env_id}")
    if args.clip_rewards != saved.clip_rewards:
        raise Refused(f"--clip-rewards must be as in {start}, whose critic has learnt with it")
    return content


def load_policy(path: str | Path, device: str = "cpu") -> Callable:
    """A trained policy, as a function from observations [..., 4, 84, 84] to the most likely actions [...]."""
    args, content = load_checkpoint(path, device)
    num_actions = len(content["agent"]["actor.bias"])
    agent = Agent(args, num_actions).to(device).eval()
    agent.load_state_dict(content["agent"])

    @torch.inference_mode()
    def policy(obs: np.ndarray) -> np.ndarray:
        log_policy, _ = agent(torch.as_tensor(obs, device=device).reshape(-1, 4, 84, 84))
        return most_likely(log_policy).reshape(obs.shape[:-3]).cpu().numpy()

    return policy


def evaluate(path: str | Path, args: Args, envs: VectorEnv | None = None) -> np.ndarray:
    """Play --eval-episodes games at once with the most likely actions; print and return their returns.

    Without `envs`, it makes them by `make_eval_env`, and closes them. Random generators are left as they
    were: training goes on as if this had not been called. None are returned if it was stopped, since the
    games that had ended would be the short ones.
    """
    path = find_checkpoint(path, args.exp_name).absolute()
    if envs is None:
        envs = make_eval_env(args)
        result = evaluate(path, args, envs)
        close(envs)
        return result
    content = load_checkpoint(path)[1]
    num_actions = len(content["agent"]["actor.bias"])
    if num_actions != envs.single_action_space.n:  # the ALE would wait for ever
        raise Refused(f"{path} is for a game of {num_actions} actions, not for {args.env_id}")
    seed = hash_seed(args.seed, 2**40) // 2  # games that training has not seen
    frames = []  # of the first game
    totals, returns = np.zeros(args.eval_episodes), np.full(args.eval_episodes, np.nan)
    with isolated_random_numbers(seed):
        policy = load_policy(path, args.device)
        obs, _ = envs.reset(seed=seed)
        while np.isnan(returns).any() and not STOP.is_set():
            if args.capture_video and np.isnan(returns[0]):
                frames.append(np.repeat(obs[0, -1, :, :, None], 3, -1))
            obs, rewards, _, _, infos = envs.step(policy(obs))
            totals += rewards
            first = infos["game_over"] & np.isnan(returns)
            returns[first] = totals[first]
    if STOP.is_set():
        return np.zeros(0)
    if args.capture_video:
        from gymnasium.utils.save_video import save_video

        folder = str(path.with_name("videos" if path.name == "checkpoint.pt" else f"{path.stem}_videos"))
        save_video(frames, folder, fps=15)
        print(f"videos: {folder}")
    trained = f"{content['state']['global_step']:,} steps of {content['args']['env_id']}"
    shown = f"{np.mean(returns):.5g} +/- {np.std(returns):.3g} in {len(returns)} games"
    print(f"evaluation return {shown} with the most likely actions, after {trained}")
    return returns


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
    of_this_run = "resume", "evaluate", "init", "track", "capture_video", "device", "num_threads"
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
