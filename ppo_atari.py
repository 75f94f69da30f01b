# /// script
# requires-python = ">=3.11"
# dependencies = [
#     "torch>=2.5", "gymnasium>=1.1", "ale-py>=0.11.1", "numpy", "tensorboard", "tyro>=0.9.1",
# ]
# ///
"""Proximal Policy Optimization (PPO) for Atari games, in one file.

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4
    python ppo_atari.py --env-id ALE/Pong-v5 --learning-rate 5e-4 --num-minibatches 8
    python ppo_atari.py --evaluate runs/<run>/checkpoint.pt --capture-video

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

    collect_rollout        acts for T steps in N environments, and fills the rollout
    make_batch             estimates advantages (compute_gae), and flattens the rollout
    update                 takes K epochs of gradient steps on minibatches, each on the loss of ppo_loss

Shapes: T steps per rollout, N environments, A actions, B transitions in a batch. An observation is the last 4
images, the newest last: [4, 84, 84], bytes.
"""

import ctypes
import json
import math
import os
import pickle
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:  # the trailing comments become --help
    exp_name: str = Path(sys.argv[0]).stem or "ppo_atari"  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    resume: str | None = None  # resume from this checkpoint; flags override its settings
    evaluate: str | None = None  # only evaluate this checkpoint, greedily
    eval_episodes: int = 10  # games of an evaluation
    eval_every: float = 0  # also evaluate every so many steps (0: never); best.pt has the best mean return
    stop_at: float | None = None  # end training once an evaluation of --eval-every reaches this mean return
    capture_video: bool = False  # record a game of the evaluation, as the agent sees it (needs moviepy)
    track: bool = False  # mirror TensorBoard to Weights & Biases, to its WANDB_PROJECT (needs wandb)
    device: str = "cuda" if torch.cuda.is_available() else "cpu"  # cpu, cuda or mps
    num_threads: int = torch.get_num_threads()  # CPU threads of PyTorch, and of the games
    bfloat16: bool = False  # compute products in bfloat16: faster on some CPUs, far slower on others

    # Environment
    env_id: str = "BreakoutNoFrameskip-v4"  # Gymnasium id; ALE/Breakout-v5 has sticky actions ([ALE])
    env_kwargs: str = "{}"  # arguments of ale_py's AtariVectorEnv, as JSON
    num_envs: int = 8  # N: environments that step in parallel
    clip_rewards: bool = True  # clip rewards to their signs; reported returns are unclipped

    # PPO
    total_timesteps: float = 10_000_000  # total number of transitions, of 4 frames each; 1e6 is fine
    num_steps: int = 128  # T: steps of each environment per rollout
    learning_rate: float = 2.5e-4  # Adam's step size
    anneal_lr: bool = True  # decay the learning rate linearly to 0
    gamma: float = 0.99  # γ: discount factor
    gae_lambda: float = 0.95  # λ: trades bias (0) against variance (1) of the advantages
    update_epochs: int = 4  # K: passes over each rollout
    num_minibatches: int = 4  # minibatches per epoch, one gradient step each
    norm_adv: bool = True  # normalise the advantages of each minibatch to mean 0, standard deviation 1
    clip_coef: float = 0.1  # ε: the ratio of new to old probability is clipped to 1 ± ε
    clip_vloss: bool = False  # also clip the change of the value to ±ε ([Matters], §3)
    target_kl: float | None = None  # stop an iteration if an epoch's last minibatch has a KL above this
    ent_coef: float = 0.01  # c₂: weight of the entropy bonus
    vf_coef: float = 0.5  # c₁: weight of the value loss, ½ (V - return)²
    max_grad_norm: float = 0.5  # clip the gradient to this global norm

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
    "seed": (0, 2**31), "eval_episodes": (1, math.inf), "eval_every": (0, math.inf),
    "stop_at": (-1e15, 1e15), "num_threads": (1, 1024), "num_envs": (1, math.inf),
    "num_steps": (2, math.inf), "total_timesteps": (1, 1e15), "learning_rate": (0, 1), "gamma": (0, 1),
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

    Both kinds of end stop the sum, but at a time limit (truncated) V(s_{t+1}) still counts ([Limits]).
    So row t+1 of `values` [T+1, N] must be the value of the state that step t led to, even where it ended the
    episode. All other tensors are [T, N].
    """
    next_values = torch.where(terminated, 0, values[1:])  # not a product: 0 * NaN is NaN
    deltas = rewards + gamma * next_values - values[:-1]
    ended = terminated | truncated
    advantages = torch.zeros_like(values)
    for t in reversed(range(len(rewards))):
        advantages[t] = deltas[t] + gamma * gae_lambda * torch.where(ended[t], 0, advantages[t + 1])
    return advantages[:-1], advantages[:-1] + values[:-1]


class Batch(NamedTuple):
    """B transitions to learn from."""

    obs: Tensor  # [B, 4, 84, 84], bytes
    actions: Tensor  # [B]
    old_policy: Tensor  # [B, A], π_old(·|s) as log-probabilities
    old_values: Tensor  # [B], V_old(s)
    advantages: Tensor  # [B]
    returns: Tensor  # [B]
    weights: Tensor  # [B], 1 for a transition, 0 for a filler row


@dataclass
class State:
    """Coefficients and progress, as a checkpoint has them besides the networks and the optimizer."""

    learning_rate: float
    global_step: int = 0  # transitions so far
    returns: list[float] = field(default_factory=list)  # of the last 100 games
    best_return: float = -math.inf  # of best.pt, in the evaluation that chose it
    best_step: int = 0  # of best.pt
    last_evaluation: int = 0  # step of the last evaluation of --eval-every


def mean(x: Tensor, weights: Tensor) -> Tensor:
    """The mean of x [B] over the transitions, given the weights [B] of the rows."""
    return weights @ x / weights.sum().clamp(min=1)


def ppo_loss(agent: Agent, batch: Batch, args: Args) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise, and metrics: [PPO], equation 9, negated, with ½ in the value loss."""
    policy, values = agent(batch.obs)
    advantages = batch.advantages
    if args.norm_adv:
        centred = advantages - mean(advantages, batch.weights)
        advantages = centred / (mean(centred.square(), batch.weights).sqrt() + 1e-8)

    log_ratio = log_prob(policy, batch.actions) - log_prob(batch.old_policy, batch.actions)
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s)
    # L^CLIP = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] ([PPO], equation 7)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_losses = -torch.min(ratio * advantages, clipped_ratio * advantages)

    value_losses = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:  # the larger of two losses: of V, and of V clipped to V_old ± ε
        change = (values - batch.old_values).clamp(-args.clip_coef, args.clip_coef)
        value_losses = torch.max(value_losses, 0.5 * (batch.old_values + change - batch.returns).square())

    entropies = entropy(policy)
    shares = batch.weights / batch.weights.sum().clamp(min=1)  # weights in a mean
    loss = (policy_losses + args.vf_coef * value_losses - args.ent_coef * entropies) @ shares
    with torch.no_grad():  # scalars, averaged over the gradient steps, then logged as losses/<name>
        metrics = {
            "policy_loss": policy_losses @ shares,
            "value_loss": value_losses @ shares,
            "entropy": entropies @ shares,
            "approx_kl": (ratio - 1 - log_ratio) @ shares,  # k3 of Schulman 2020
            "clipfrac": ((ratio - 1).abs() > args.clip_coef).type_as(shares) @ shares,
        }
    return loss, metrics


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout:
    """T steps of N environments, in arrays that are reused: the next rollout starts where this one ends.

    When step t ends an episode, that is a game or a life, obs[t+1] is its last state, so the value there is
    row t+1 of the values. Step t+1 then ignores its action: it resets the game and returns a reward of 0
    (AutoresetMode.NEXT_STEP of Gymnasium), or presses FIRE after a lost life: a filler row, not learnt from.

        step   t       t+1     t+2
        obs    s       last s  first s of the next episode
        end    yes     no      no
        valid  yes     no      yes
    """

    def __init__(self, args: Args, num_actions: int):
        shape = args.num_steps, args.num_envs
        pixels = torch.zeros(args.num_steps + 1, args.num_envs, 84, 84, 4, dtype=torch.uint8)
        self.obs = pixels.permute(0, 1, 4, 2, 3).to(args.device)  # channels last in memory
        self.policies = torch.zeros(*shape, num_actions, device=args.device)  # π_old(·|s)
        self.values = torch.zeros(args.num_steps + 1, args.num_envs, device=args.device)  # V(s)
        self.actions = np.zeros(shape, np.int64)
        self.rewards = np.zeros(shape, np.float32)
        self.terminated = np.zeros(shape, bool)
        self.truncated = np.zeros(shape, bool)
        self.valid = np.zeros(shape, bool)


@torch.inference_mode()
def act(forward: Callable, obs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, np.ndarray]:
    """π(·|s) [N, A], as log-probabilities, V(s) [N], and actions [N] drawn from π.

    `forward` is the agent, for observations [N, 4, 84, 84]. argmax(log π + noise) is a sample from π if the
    noise [N, A] has a Gumbel distribution.
    """
    policy, values = forward(obs)
    return policy, values, (policy + noise).argmax(-1).cpu().numpy()


def collect_rollout(envs: VectorEnv, forward: Callable, rollout: Rollout, args: Args) -> list[tuple]:
    """Fill the rollout with the next T steps. Returns the return and length of each game that ended."""
    obs, actions, rewards, valid = rollout.obs, rollout.actions, rollout.rewards, rollout.valid
    terminated, truncated = rollout.terminated, rollout.truncated
    episodes = []
    gumbel = -torch.empty(rollout.policies.shape).exponential_().log()  # all at once is faster
    obs[0] = obs[-1]
    for t, noise in enumerate(gumbel.to(args.device)):
        valid[t] = ~(terminated[t - 1] | truncated[t - 1])  # at t = 0: the previous rollout's last row
        rollout.policies[t], rollout.values[t], actions[t] = act(forward, obs[t], noise)
        images, rewards[t], terminated[t], truncated[t], info = envs.step(actions[t])
        obs[t + 1] = torch.as_tensor(images)
        if "episode" in info:  # a whole game, while `terminated` is also true where a life is lost
            ended = info["_episode"]
            episodes += zip(info["episode"]["r"][ended], info["episode"]["l"][ended], strict=True)
    _, rollout.values[-1], _ = act(forward, obs[-1], noise)
    return episodes


def make_batch(rollout: Rollout, args: Args) -> Batch:
    """All rows of a rollout, with advantages; filler rows weigh 0."""
    tensor = partial(torch.as_tensor, device=args.device)
    obs, policy, values, rewards = rollout.obs, rollout.policies, rollout.values, tensor(rollout.rewards)
    actions, valid = tensor(rollout.actions), tensor(rollout.valid)
    terminated, truncated = tensor(rollout.terminated), tensor(rollout.truncated)
    advantages, returns = compute_gae(rewards, values, terminated, truncated, args.gamma, args.gae_lambda)
    return Batch(
        obs=obs[:-1].flatten(0, 1),
        actions=actions.flatten(),
        old_policy=policy.flatten(0, 1),
        old_values=values[:-1].flatten(),
        advantages=advantages.flatten(),
        returns=returns.flatten(),
        weights=valid.float().flatten(),
    )


def compute_gradients(agent: Agent, minibatch: Batch, args: Args) -> dict[str, Tensor]:
    """Compute the gradients of the loss, clipped to --max-grad-norm, in the agent. Returns metrics."""
    agent.zero_grad()
    loss, metrics = ppo_loss(agent, minibatch, args)
    loss.backward()
    metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
    return metrics


@torch.no_grad()
def mean_kl(agent: Agent, batch: Batch) -> float:
    """KL divergence of the current policy from the one that acted, in nats; of a minibatch, to save time."""
    policy, _ = agent(batch.obs)
    return mean(kl_divergence(batch.old_policy, policy), batch.weights).item()


def update(agent: Agent, optimizer: Adam, compute: Callable, batch: Batch, args: Args, state: State) -> dict:
    """K epochs of gradient steps, by `compute_gradients`. Returns mean metrics; "kl" is of the last one."""
    valid = batch.weights > 0
    errors, returns = batch.advantages[valid], batch.returns[valid]  # return - V_old(s), return
    metrics = {
        "charts/learning_rate": state.learning_rate,
        "explained_variance": 1 - (errors.var(correction=0) / returns.var(correction=0)).item(),
        "critic_error": (errors.square().mean() / returns.square().mean()).sqrt().item(),
    }
    optimizer.param_groups[0]["lr"] = state.learning_rate
    steps = []  # metrics of each, still as tensors: reading them would wait for the GPU
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.obs)).to(args.device)
        for rows in order.tensor_split(args.num_minibatches):
            minibatch = Batch(*(column[rows] for column in batch))
            step_metrics = compute(*minibatch)
            optimizer.step()
            steps.append(torch.stack([*step_metrics.values()]))  # a copy: a CUDA graph overwrites them
        if args.target_kl is not None and mean_kl(agent, minibatch) > args.target_kl:
            break
    metrics |= dict(zip(step_metrics, torch.stack(steps).mean(0).tolist(), strict=True))
    first = dict(zip(step_metrics, steps[0].tolist(), strict=True))
    metrics["first_approx_kl"] = first["approx_kl"]  # before the first step: 0, up to rounding
    metrics["kl"] = mean_kl(agent, minibatch)
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


def train(args: Args) -> dict:
    """PPO ([PPO], Algorithm 1), then a greedy evaluation. If killed, it loses a minute or an iteration.

    Returns "checkpoint" (its path), "training_return" (of the last 100 episodes), "greedy_returns",
    "best_return", for which best.pt was chosen (-inf without one), "best_step", and "best_replayed", its
    returns in the games of "greedy_returns" (empty without one). Raises `ValueError` for invalid settings.
    With `resume`, the settings are those of `args`, too.
    """
    args = replace(args, evaluate=None)  # a copy, in which NumPy's numbers are plain ones
    check(args)
    torch.set_num_threads(args.num_threads)
    state = State(args.learning_rate)
    if args.resume:
        _, saved = load_checkpoint(args.resume)
        vars(state).update(saved["state"])
    if sys.platform == "linux":  # let the C library keep freed memory: a run on the CPU is 12% faster
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD
    eval_envs, envs = make_envs(args, args.eval_episodes), make_envs(args, args.num_envs)
    if envs.metadata.get("autoreset_mode") is not AutoresetMode.NEXT_STEP:
        raise ValueError("the environments must reset in the next step: see Rollout")
    env_seed = seed_everything(args.seed, state.global_step) % 2**29  # the ALE wants less than 2**31
    num_actions = int(envs.single_action_space.n)
    agent = Agent(args, num_actions).to(args.device)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # ε: [37], detail 3
    if args.resume:
        agent.load_state_dict(saved["agent"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
    rollout = Rollout(args, num_actions)
    example = [column[: len(column) // args.num_minibatches] for column in make_batch(rollout, args)]
    compute = recorded(lambda *columns: compute_gradients(agent, Batch(*columns), args), *example)
    with torch.no_grad():
        forward = recorded(agent, rollout.obs[0])
    run = Run(args, agent, optimizer, state)

    rollout.obs[-1] = torch.as_tensor(envs.reset(seed=env_seed)[0])  # where the first rollout starts
    while state.global_step < args.total_timesteps and not (STOP.is_set() or run.stop_at_reached):
        remaining = 1 - state.global_step / args.total_timesteps
        state.learning_rate = args.learning_rate * (remaining if args.anneal_lr else 1)
        episodes = collect_rollout(envs, forward, rollout, args)
        batch = make_batch(rollout, args)
        metrics = update(agent, optimizer, compute, batch, args, state)
        state.global_step += int(batch.weights.sum())
        run.log(metrics, episodes)
        if args.eval_every > 0:
            run.evaluate_if_due(eval_envs)
    results = run.finish(eval_envs)
    eval_envs.close()
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


def hash_seed(*numbers: int) -> int:
    """A seed below 2**31, which is all that some simulators take, from one or several numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0]) >> 1


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
    size = args.num_envs * args.num_steps
    for wrong, reason in [
        (size % args.num_minibatches > 0, f"--num-minibatches must divide the {size} steps of a rollout"),
        (4 * args.num_minibatches > size, f"--num-minibatches must be at most {size // 4} for this rollout"),
        (not (args.norm_adv or one_step), "several gradient steps need --norm-adv"),
        (args.stop_at is not None and args.eval_every == 0, "--stop-at needs --eval-every"),
        (args.track and not find_spec("wandb"), "--track needs: pip install wandb"),
        (Path("runs").is_file(), "runs is a file, where a folder of that name is needed"),
    ]:
        if wrong:
            raise ValueError(reason)


def check(args: Args) -> None:
    """Raise `ValueError` for what cannot be trained or evaluated, before anything is written."""
    if not (args.resume or args.evaluate):
        check_settings(args)
    if args.resume and Path(args.resume).name == "best.pt":
        raise ValueError("best.pt cannot be resumed: copy it into another folder, as checkpoint.pt")
    if args.eval_episodes < 1 or args.num_threads < 1:
        raise ValueError("--eval-episodes and --num-threads must be at least 1")
    if args.capture_video and not find_spec("moviepy"):
        raise ValueError("--capture-video needs: pip install moviepy")
    if not find_spec("ale_py"):
        raise ValueError("Atari games need: pip install 'ale-py>=0.11.1'")
    import ale_py  # noqa: F401 - registers the games

    if "game" not in gym.spec(args.env_id).kwargs:
        raise ValueError(f"{args.env_id} is not an Atari game: use ppo.py or ppo_continuous.py")
    try:
        torch.zeros((), device=args.device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {args.device} is not available; use cpu") from error
    try:
        for name in json.loads(args.env_kwargs):
            if name not in GAME_SETTINGS:
                raise ValueError(f"{name!r} is DeepMind's or unknown; it may set {', '.join(GAME_SETTINGS)}")
        envs = make_envs(args, 1)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{args.env_id} with --env-kwargs {args.env_kwargs}: {error}") from error
    envs.close()
    if path := args.resume or args.evaluate:
        _, content = load_checkpoint(path)
        try:
            Agent(args, int(envs.single_action_space.n)).load_state_dict(content["agent"])
        except RuntimeError as error:
            raise ValueError(f"{path} is of another script or size, or not for {args.env_id}") from error
    if args.resume:  # only now: another script's checkpoint may have settings that are right there
        check_settings(args)


# ------------------------------------------------- Environments --------------------------------------------


# What --env-kwargs may set. The rest is DeepMind's protocol, with which all published results were made.
GAME_SETTINGS = (
    "noop_max", "repeat_action_probability", "full_action_space", "max_num_frames_per_episode",
    "use_fire_reset", "thread_affinity_offset",
)  # fmt: skip


def make_envs(args: Args, num_envs: int) -> VectorEnv:
    """Games in the ALE's own vector environment, under DeepMind's protocol ([DQN], Methods).

    An action is held for 4 frames, and the last 2 of them are joined by their brighter pixels. An observation
    is the last 4 such images, grey, 84 x 84. A game begins with up to 29 frames without an action; where it
    has a button FIRE, the first of them presses it. After 108,000 frames, half an hour, it is cut. For the
    learner, a lost life ends an episode (see `LostLives`).
    """
    from ale_py.vector_env import AtariVectorEnv

    settings = gym.spec(args.env_id).kwargs | {"frameskip": 4, "reward_clipping": False}
    settings |= {"num_envs": num_envs, "num_threads": min(args.num_threads, num_envs)}
    settings |= json.loads(args.env_kwargs)
    envs = AtariVectorEnv(**settings)
    buttons = [action.name for action in envs.ale.get_action_set()]
    button = buttons.index("FIRE") if "FIRE" in buttons else 0
    return LostLives(gym.wrappers.vector.RecordEpisodeStatistics(envs), button, args.clip_rewards)


class LostLives(gym.vector.VectorWrapper):
    """Ends an episode at each lost life, while the game continues, and clips rewards to their signs.

    In the step after a lost life, the action is replaced by `button`: some games wait for FIRE then.
    """

    def __init__(self, envs: VectorEnv, button: int, clip_rewards: bool):
        super().__init__(envs)
        self.button, self.clip_rewards = button, clip_rewards

    def reset(self, **kwargs) -> tuple[np.ndarray, dict]:
        obs, info = self.env.reset(**kwargs)
        self.lives, self.lost = info["lives"], np.zeros(self.num_envs, bool)
        return obs, info

    def step(self, actions: np.ndarray) -> tuple:
        actions = np.where(self.lost, self.button, actions)
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self.lost, self.lives = info["lives"] < self.lives, info["lives"]
        rewards = np.sign(rewards) if self.clip_rewards else rewards
        return obs, rewards, terminated | self.lost, truncated, info


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

    def finish(self, envs: VectorEnv) -> dict:
        """Save, evaluate unless the run was stopped, and close the log. Returns the results."""
        if self.state.global_step > self.first_step or not self.args.resume:
            self.save()
        state, replayed = self.state, np.zeros(0)
        average = float(np.mean(state.returns)) if state.returns else math.nan
        was_stopped = STOP.is_set()
        returns = np.zeros(0) if was_stopped else evaluate(self.path, self.args, envs)
        if len(returns) > 0:
            tag = "eval/final_return" if self.best_path.exists() else "eval/greedy_return"
            self.writer.add_scalar(tag, returns.mean(), state.global_step)
        if self.best_path.exists() and not was_stopped:  # in the same games, which did not choose it
            replayed = evaluate(self.best_path, self.args, envs)
        if len(replayed) > 0:
            self.writer.add_scalar("eval/best_replayed", replayed.mean(), state.global_step)
            chosen = f"chosen after {state.best_step:,} steps for a mean return of {state.best_return:.5g}"
            both = f"it has {replayed.mean():.5g}, the last policy {returns.mean():.5g}"
            print(f"best.pt: {chosen}; in the new games above, {both}")
        self.writer.close()
        results = {"checkpoint": str(self.path), "training_return": average, "greedy_returns": returns}
        best = {"best_return": state.best_return, "best_step": state.best_step, "best_replayed": replayed}
        return results | best


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


def load_policy(path: str | Path, device: str = "cpu") -> Callable:
    """A trained policy, as a function from observations [..., 4, 84, 84] to the most likely actions [...]."""
    args, content = load_checkpoint(path, device)
    num_actions = len(content["agent"]["actor.bias"])
    agent = Agent(args, num_actions).to(device).eval()
    agent.load_state_dict(content["agent"])

    @torch.inference_mode()
    def policy(obs: np.ndarray) -> np.ndarray:
        log_policy, _ = agent(torch.as_tensor(obs, device=device).reshape(-1, 4, 84, 84))
        return log_policy.argmax(-1).reshape(obs.shape[:-3]).cpu().numpy()

    return policy


def evaluate(path: str | Path, args: Args, envs: VectorEnv | None = None) -> np.ndarray:
    """Play --eval-episodes games at once with the most likely actions; print and return their returns.

    Without `envs`, it makes them by `make_envs`, and closes them. Random generators are left as they were:
    training goes on as if this had not been called.
    """
    if envs is None:
        envs = make_envs(args, args.eval_episodes)
        returns = evaluate(path, args, envs)
        envs.close()
        return returns
    seed = hash_seed(args.seed) % 2**29 + 2**30  # games that training has not seen
    frames = []  # of the first game
    returns = np.full(args.eval_episodes, np.nan)
    with isolated_random_numbers(seed):
        policy = load_policy(path, args.device)
        obs, _ = envs.reset(seed=seed)
        while np.isnan(returns).any() and not STOP.is_set():
            if args.capture_video and np.isnan(returns[0]):
                frames.append(np.repeat(obs[0, -1, :, :, None], 3, -1))
            obs, _, _, _, info = envs.step(policy(obs))
            if "episode" in info:
                first = info["_episode"] & np.isnan(returns)
                returns[first] = info["episode"]["r"][first]
    if STOP.is_set():
        return np.zeros(0)
    if args.capture_video:
        from gymnasium.utils.save_video import save_video

        folder = str(Path(path).with_name("best_videos" if Path(path).name == "best.pt" else "videos"))
        save_video(frames, folder, fps=15)
        print(f"videos: {folder}")
    steps = load_checkpoint(path)[1]["state"]["global_step"]
    shown = f"{np.mean(returns):.5g} ± {np.std(returns):.3g} with the most likely actions"
    print(f"evaluation return {shown}, after {steps:,} steps")
    return returns


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
        of_this_run = "resume", "evaluate", "track", "capture_video", "device", "num_threads"
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
    print_commands(args, train(args)["checkpoint"])
    if STOP.is_set():
        sys.exit(130)


if __name__ == "__main__":
    main()
