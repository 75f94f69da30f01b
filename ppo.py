# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.5,<2.14",
#     "gymnasium[classic-control,toy-text]>=1.1",
#     "numpy",
#     "tensorboard",
#     "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization for discrete actions, in one file.

    python ppo.py --env-id CartPole-v1

trains on any Gymnasium environment with `Discrete` actions and observations that flatten to a vector. To use
your own, register it and name it (`--env-id my_module:MyEnv-v0`), or copy this file, define the class in
it and in `make_env` put `MyEnv()` in the place of `gym.make(...)`.

Reading order: `Agent` (the networks), the equations (`compute_gae`, `ppo_loss`), `collect_rollout`, `update`,
and `train`, which is Algorithm 1 of the PPO paper. Where an equation or a detail comes from:

  PPO paper         Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  GAE paper         Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", arXiv:1506.02438
  Schulman 2015     "Trust Region Policy Optimization", arXiv:1502.05477
  Pardo 2018        "Time Limits in Reinforcement Learning", arXiv:1712.00378
  Engstrom 2020     "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
  Andrychowicz 2021 "What Matters In On-Policy Reinforcement Learning?", arXiv:2006.05990
  Huang 2022        "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track

Shapes: T steps a rollout (--num-steps), N environments (--num-envs), D entries an observation, A actions,
B rows of a batch.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import Adam
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams


@dataclass
class Args:
    # Experiment
    exp_name: str = Path(__file__).stem
    """Name of the experiment: a part of the run folder's name."""
    seed: int = 1
    """Seed of everything random. On the CPU, the same seed and machine give the same curves, bit for bit."""
    plan: bool = False
    """Print what this run would do, and exit."""
    resume: str | None = None
    """Go on from this checkpoint, in its run folder. Flags given with it override those saved in it."""
    evaluate: str | None = None
    """Only evaluate this checkpoint: --eval-episodes with the likeliest and as many with sampled actions."""
    eval_episodes: int = 10
    """Episodes of an evaluation, each in an environment of its own."""
    eval_max_steps: int = 10_000
    """Cut an evaluation's episodes after so many steps: some environments never end."""
    checkpoint_seconds: float = 60.0
    """Seconds between checkpoints. There is one at the start, at the end, and on Ctrl-C or SIGTERM, too."""
    capture_video: bool = False
    """Record the episodes of the greedy evaluation as MP4 files in the run folder (needs moviepy)."""
    track: bool = False
    """Mirror TensorBoard to Weights & Biases (needs wandb; WANDB_MODE=offline works)."""
    wandb_project_name: str = "ppo"
    """Project at Weights & Biases."""
    wandb_entity: str | None = None
    """Team at Weights & Biases; None is your own account."""
    allow_unsafe: bool = False
    """Accept the settings that are refused because they are known to break PPO."""

    # Environment
    env_id: str = "CartPole-v1"
    """Gymnasium id; `module:EnvId-v0` imports the module first."""
    num_envs: int = 16
    """N: environments that step in parallel."""
    async_envs: bool = False
    """One worker process for each environment: pays where a step takes long."""

    # Algorithm
    total_timesteps: int = 500_000
    """Environment transitions in all."""
    num_steps: int = 64
    """T: steps of each environment in a rollout."""
    learning_rate: float = 1e-3
    """Adam's step size; with --adapt learning-rate, the most that it may be."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to 0."""
    gamma: float = 0.99
    """γ: discount factor."""
    gae_lambda: float = 0.98
    """λ: trades bias (0) against variance (1) of the advantages."""
    update_epochs: int = 15
    """K: passes over each rollout."""
    num_minibatches: int = 4
    """Parts of a pass; each makes one gradient step."""
    norm_adv: bool = True
    """Give the advantages of each minibatch mean 0 and standard deviation 1."""
    recompute_advantages: bool = False
    """Compute the advantages anew with the current critic before each pass (Andrychowicz 2021, §3.5)."""
    surrogate: Literal["clip", "kl-penalty"] = "clip"
    """Objective: the clipped ratio (PPO paper, §3) or the KL penalty (§4)."""
    clip_coef: float = 0.2
    """ε: the ratio of new to old probability counts only up to 1 ± ε."""
    clip_vloss: bool = False
    """Clip the change of the value to ±ε, too (Engstrom 2020, §3)."""
    kl_coef: float = 1.0
    """β: weight of the KL penalty."""
    adapt: Literal["none", "kl-coef", "clip-coef", "learning-rate"] = "none"
    """After each iteration, adapt this coefficient so that the KL of an iteration stays near --desired-kl."""
    desired_kl: float = 0.01
    """Set point of --adapt, in nats."""
    target_kl: float | None = None
    """When an iteration's KL from the old policy exceeds this, end its passes and go back to within it."""
    ent_coef: float = 0.01
    """Weight of the entropy bonus."""
    anneal_ent_coef: bool = False
    """Let the entropy coefficient fall linearly to 0."""
    target_entropy: float | None = None
    """Adapt the entropy coefficient so that the entropy of the policy stays near this, in nats."""
    entropy_tolerance: float = 0.05
    """Distance from --target-entropy that is left alone, in nats."""
    vf_coef: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Scale the gradient down to this global norm."""
    norm_obs: bool = True
    """Normalise observations by their running mean and standard deviation; one-hot parts are left alone."""
    norm_rewards: bool = True
    """Divide rewards by the running standard deviation of the discounted return (Engstrom 2020, §3)."""
    hidden_size: int = 64
    """Width of the two hidden layers of the actor, and of the critic."""

    # Performance
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the networks live. auto: CUDA from --hidden-size 512; small networks are faster on the CPU."""
    num_threads: int = 1
    """CPU threads of PyTorch; for small networks, one is the fastest."""
    compile: bool = False
    """Compile the gradient of the loss: faster updates after some 15 seconds (a CPU needs a C++ compiler)."""


# A checkpoint's format, and the settings that it fixes: its networks and its rollouts depend on them.
FORMAT = "ppo-discrete-1"
FIXED = "env_id", "num_envs", "num_steps", "hidden_size", "norm_obs"
BOUNDS = {  # settings outside these are nonsense
    "num_envs num_minibatches hidden_size num_threads eval_episodes update_epochs": (1, 1e6),
    "total_timesteps eval_max_steps": (1, 1e15),
    "num_steps": (2, 1e6),  # a rollout of one step may hold nothing but filler rows
    "gamma gae_lambda": (0, 1),
    "learning_rate clip_coef max_grad_norm desired_kl target_kl checkpoint_seconds": (1e-12, 1e6),
    "ent_coef vf_coef kl_coef entropy_tolerance target_entropy": (0, 1e6),
    "seed": (0, 2**32 - 1),
}


class Refused(Exception):  # noqa: N818
    """The request cannot be right. Ends the program with one line and exit status 2."""


def refuse(holds: object, reason: str) -> None:
    """Raise `Refused` with the reason if the condition holds."""
    if holds:
        raise Refused(f"{reason}.")


class TrainingFailed(Exception):  # noqa: N818
    """Training cannot go on. Ends the program with one line and exit status 1; the last checkpoint stays."""


def check_args(args: Args) -> None:
    """Raise `Refused`, with the reason and what is allowed, for settings that cannot be right."""
    for names, (low, high) in BOUNDS.items():
        for name in names.split():
            value = getattr(args, name)
            outside = value is not None and not low <= value <= high  # NaN fails every comparison
            refuse(outside, f"--{name.replace('_', '-')} is {value}, not in [{low:g}, {high:g}]")
    rows, clip = args.num_envs * args.num_steps, args.surrogate == "clip"
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    most = f"at most {rows // 2}, 2 of a rollout's {rows} rows for each"
    refuse(args.num_minibatches > rows / 2, f"--num-minibatches is {args.num_minibatches}; it must be {most}")
    refuse(args.adapt == "clip-coef" and not clip, "--adapt clip-coef needs --surrogate clip")
    refuse(args.adapt == "kl-coef" and clip, "--adapt kl-coef needs --surrogate kl-penalty")
    refuse(args.target_entropy is not None and not args.ent_coef, "--target-entropy needs --ent-coef above 0")
    refuse(not have.get(args.device, True), f"--device {args.device} is not available here; use --device cpu")
    refuse("" in (args.resume, args.evaluate), "--resume and --evaluate take a path, and this one is empty")
    refuse(args.evaluate and args.plan, "--plan tells of training, --evaluate does none; give one")
    beside = Path(args.resume or "checkpoint.pt").with_name("checkpoint.pt")
    taken = args.resume and Path(args.resume) != beside and beside.exists()
    refuse(taken, f"{args.resume} lies beside {beside}, which it would overwrite; move one of them")
    refuse(args.capture_video and not find_spec("moviepy"), "--capture-video needs: pip install moviepy")
    track, compiles = args.track and not args.evaluate, args.compile and not args.evaluate
    refuse(track and not find_spec("wandb"), "--track needs: pip install wandb")
    if compiles:
        from torch._dynamo import config

        refuse(not hasattr(config, "trace_autograd_ops"), "--compile needs a newer PyTorch; 2.13 will do")
        compilers = os.environ.get("CXX", "g++"), "clang++"
        refuse(not any(map(shutil.which, compilers)), f"--compile needs a compiler: {' or '.join(compilers)}")
    if not args.allow_unsafe:
        unscaled = args.update_epochs > 1 and not (args.norm_adv or args.norm_rewards)
        override = "; --allow-unsafe overrides"
        refuse(args.update_epochs > 30, f"--update-epochs above 30: the KL explodes; use 3 to 15{override}")
        refuse(clip and args.clip_coef > 0.3, f"--clip-coef above 0.3 hardly clips; use 0.1 to 0.3{override}")
        refuse(unscaled, f"several epochs need --norm-adv or --norm-rewards to bound their steps{override}")


def one_hot_mask(space: gym.Space) -> np.ndarray:
    """[D] bool, ordered as `gymnasium.spaces.flatten` does: True for categories and bits, not quantities."""
    if isinstance(space, (gym.spaces.Dict, gym.spaces.Tuple)):
        parts = space.values() if isinstance(space, gym.spaces.Dict) else space
        return np.concatenate([one_hot_mask(part) for part in parts])
    categories = (gym.spaces.Discrete, gym.spaces.MultiDiscrete, gym.spaces.MultiBinary)
    return np.full(gym.spaces.flatdim(space), isinstance(space, categories))


def check_spaces(obs: gym.Space, action: gym.Space) -> None:
    """Raise `Refused` unless this script can train on these spaces, naming the script that can."""
    other = "; ppo_continuous.py trains these" if isinstance(action, gym.spaces.Box) else ""
    refuse(not isinstance(action, gym.spaces.Discrete), f"its actions are {action}, not Discrete{other}")
    image = len(obs.shape or ()) == 3 or (len(obs.shape or ()) == 2 and obs.dtype == np.uint8)
    refuse(image, f"its observations are images of shape {obs.shape}; ppo_atari.py trains on pixels")
    refuse(not obs.is_np_flattenable, f"its observations, {obs}, do not flatten to a vector")


def guard(env: Any, index: int | str) -> Any:
    """Make an environment, or several that step as one, say which it is and where when it fails.

    Nothing here reads their `info`: it is left out, for merging that of many costs a part of each step.
    """

    def guarded(call: Callable, *args: Any, **kwargs: Any) -> Any:
        try:
            return *call(*args, **kwargs)[:-1], {}
        except Exception as error:  # re-raised as a class that worker processes can send whole
            *_, (file, line, *_) = traceback.extract_tb(error.__traceback__)
            raise RuntimeError(f"environment {index} raised {error!r} at {file}:{line}") from error

    env.step, env.reset = partial(guarded, env.step), partial(guarded, env.reset)
    return env


def attempt(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the environments; raise `TrainingFailed` for whatever goes wrong in them."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        raise TrainingFailed(str(error) or f"an environment's process failed: {error!r}") from error


def make_env(args: Args, index: int = 0, video: Path | None = None) -> gym.Wrapper:
    """One environment with flat observations; with a folder `video`, its first episode is recorded there."""
    if multiprocessing.parent_process():  # a worker: Ctrl-C is for the process that trains
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    kwargs: dict[str, Any] = {"render_mode": "rgb_array"} if args.capture_video else {}
    env = gym.make(args.env_id, **kwargs)
    check_spaces(env.observation_space, env.action_space)
    if video:
        env = gym.wrappers.RecordVideo(env, str(video / f"episode-{index}"), lambda n: n == 0)
    return guard(gym.wrappers.FlattenObservation(env), index)


def make_envs(args: Args, num_envs: int, video: Path | None = None) -> tuple[VectorEnv, np.ndarray]:
    """N environments that reset in the step after an episode's end, and their space's `one_hot_mask` [D].

    They are the environment's own vector version where it is registered with one, else share this process, or
    with --async-envs have one each. Raises `Refused` for an environment that this script cannot train on.
    """
    try:
        single = make_env(args)
        one_hot = one_hot_mask(single.env.observation_space)
        if args.capture_video:  # so that what cannot be rendered is refused before training, not after
            single.reset()
            single.render()
        single.close()
        spec = single.unwrapped.spec
        own = spec and spec.vector_entry_point and not gym.spec(spec.id).additional_wrappers
        flat = single.env.observation_space.shape == one_hot.shape
        if own and flat and not args.async_envs and not video:
            envs = gym.make_vec(args.env_id, num_envs, vectorization_mode="vector_entry_point")
            envs = guard(envs, f"0 to {num_envs - 1}")
        else:
            vectorize = gym.vector.AsyncVectorEnv if args.async_envs else gym.vector.SyncVectorEnv
            makers = [partial(make_env, args, index, video) for index in range(num_envs)]
            envs = vectorize(makers, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
        mode = envs.metadata.get("autoreset_mode")
        refuse(mode is not AutoresetMode.NEXT_STEP, f"its autoreset mode is {mode}, not NEXT_STEP")
    except Exception as error:  # whatever the constructor of somebody's environment may raise
        reason = " ".join((str(error) or repr(error)).split())
        raise Refused(f"cannot train on {args.env_id}: {reason}") from error
    return gym.wrappers.vector.RecordEpisodeStatistics(envs, stats_key="rollout_episode"), one_hot


class RunningMoments(nn.Module):
    """Mean and variance [D] of all rows seen so far, merged batch by batch (Chan et al. 1983)."""

    def __init__(self, size: int):
        super().__init__()
        self.mean, self.var = nn.Buffer(torch.zeros(size)), nn.Buffer(torch.ones(size))
        self.count = nn.Buffer(torch.zeros(()))

    @torch.no_grad()
    def update(self, rows: Tensor) -> None:
        """Merge rows [B, D]."""
        share = len(rows) / (self.count + len(rows))  # of the new rows
        delta = rows.mean(0) - self.mean
        self.var.lerp_(rows.var(0, correction=0), share).add_(share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.add_(len(rows))


class MLP(nn.ModuleList):
    """Two tanh layers and a linear one: orthogonal weights of gain √2, last `gain`; biases 0 (Huang 2022)."""

    def __init__(self, inputs: int, hidden: int, outputs: int, gain: float):
        layers = [nn.Linear(inputs, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, outputs)]
        super().__init__(layers)
        for layer, scale in zip(layers, (math.sqrt(2), math.sqrt(2), gain), strict=True):
            nn.init.orthogonal_(layer.weight, scale)
            nn.init.zeros_(layer.bias)
        # For a few rows, looking up modules and calling them takes longer than the arithmetic.
        self.layers = [(layer.weight, layer.bias) for layer in layers]

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        x = F.linear(x, *first).tanh()
        x = F.linear(x, *second).tanh()
        return F.linear(x, *last)


class Agent(nn.Module):
    """Actor, critic and the running statistics that they rely on: all that a saved policy needs."""

    def __init__(self, args: Args, one_hot: np.ndarray, actions: Any):
        super().__init__()
        self.norm_obs, self.num_actions, self.first_action = args.norm_obs, int(actions.n), int(actions.start)
        self.actor = MLP(len(one_hot), args.hidden_size, self.num_actions, gain=0.01)  # near-uniform at first
        self.critic = MLP(len(one_hot), args.hidden_size, 1, gain=1.0)
        self.weights = list(self.parameters())  # looked up once
        self.one_hot = nn.Buffer(torch.from_numpy(one_hot))
        self.obs_moments, self.return_moments = RunningMoments(len(one_hot)), RunningMoments(1)

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations [..., D] to what the networks see: (x - mean) / std within ±10."""
        if not self.norm_obs:
            return obs
        scaled = (obs - self.obs_moments.mean) * torch.rsqrt(self.obs_moments.var + 1e-8)
        return torch.where(self.one_hot, obs, scaled.clamp(-10, 10))

    def policy(self, obs: Tensor) -> Tensor:
        """Normalised observations [..., D] to log π(·|s) [..., A]."""
        return torch.log_softmax(self.actor(obs), -1)

    def value(self, obs: Tensor) -> Tensor:
        """Normalised observations [..., D] to V(s) [...]."""
        return self.critic(obs).squeeze(-1)

    def noise(self, *shape: int) -> Tensor:
        """Gumbel noise [*shape, A] for `act`."""
        exponential = torch.empty(*shape, self.num_actions, device=self.one_hot.device).exponential_()
        return -exponential.log()

    def act(self, obs: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Raw observations [N, D] to actions [N] and the log policy [N, A] that they come from.

        Without noise, the likeliest actions; with Gumbel noise [N, A], actions sampled from π, for then
        argmax(log π + noise) is distributed as π (the Gumbel-max trick). A rollout's noise is drawn at once.
        """
        policy = self.policy(self.normalize(obs))
        return (policy if noise is None else policy + noise).argmax(-1), policy

    def env_actions(self, actions: np.ndarray) -> np.ndarray:
        """Actions [N] from 0 to those of the environments, which may start elsewhere."""
        return actions + self.first_action


def flatten_parameters(module: nn.Module) -> nn.Parameter:
    """Make all parameters views of one vector, and return it.

    Adam then takes one operation, not one for every parameter; for small networks that tells.
    """
    parameters = list(module.parameters())
    vector = nn.Parameter(nn.utils.parameters_to_vector(parameters).detach())
    nn.utils.vector_to_parameters(vector.data, parameters)
    return vector


def log_prob(policy: Tensor, actions: Tensor) -> Tensor:
    """log π(a|s) [B] of actions [B], from log π(·|s) [B, A]."""
    return policy.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def entropy(policy: Tensor) -> Tensor:
    """H(π) = -Σ_a π(a) log π(a) [B], in nats, from log π [B, A]."""
    return -(policy.exp() * policy).sum(-1)


def kl_divergence(old_policy: Tensor, policy: Tensor) -> Tensor:
    """KL(π_old ‖ π) = Σ_a π_old(a) (log π_old(a) - log π(a)) [B], exact, from two log policies [B, A]."""
    return (old_policy.exp() * (old_policy - policy)).sum(-1)


@dataclass
class State:
    """What moves during training besides the networks, as a checkpoint keeps it."""

    learning_rate: float
    clip_coef: float
    kl_coef: float
    ent_coef: float
    global_step: int = 0  # transitions so far
    recent_returns: list[float] = field(default_factory=list)  # of the last 100 episodes
    start_return: float = math.nan  # mean of the first 20 episodes or more
    streaks: dict[str, int] = field(default_factory=dict)  # advice: iterations in a row, < 0 of absence
    active: list[str] = field(default_factory=list)  # advice that has begun and not ended


# Rows to learn from: obs [B, D], normalised; actions [B]; what the old networks made of them, policy [B, A] =
# log π_old(·|s), log_probs [B] = log π_old(a|s) and values [B] = V_old(s); advantages [B] and returns [B].
Batch = namedtuple("Batch", "obs actions policy log_probs values advantages returns")
Figures = dict[str, float]  # what is logged, by TensorBoard tag
FIGURES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac")


def compute_gae(
    rewards: Tensor, values: Tensor, terminated: Tensor, truncated: Tensor, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [T, N] by generalised advantage estimation (GAE paper, equations 11 to 16).

        δ_t = r_t + γ V(s_{t+1}) (1 - terminated_t) - V(s_t)
        A_t = δ_t + γλ (1 - (terminated_t ∨ truncated_t)) A_{t+1}
        return_t = A_t + V(s_t), the critic's TD(λ) target

    A time limit ends the sum but not the future: V(s_{t+1}) still counts there (Pardo 2018, §3.2). So row t+1
    of `values` [T+1, N] must be the value of the true successor of row t; all else is [T, N]. Results in
    filler rows mean nothing, and no other row depends on them.
    """
    deltas = rewards + gamma * values[1:] * ~terminated - values[:-1]
    decays = gamma * gae_lambda * (~(terminated | truncated)).to(values.dtype)
    advantages = [torch.zeros_like(deltas[0])]
    for delta, decay in zip(reversed(deltas.unbind()), reversed(decays.unbind()), strict=True):
        advantages.append(torch.addcmul(delta, decay, advantages[-1]))  # δ_t + decay_t A_{t+1}
    stacked = torch.stack(advantages[:0:-1])
    return stacked, stacked + values[:-1]


def ppo_loss(policy: Tensor, values: Tensor, batch: Batch, state: State, args: Args) -> tuple[Tensor, Tensor]:
    """The scalar loss to minimise (PPO paper, equation 9, negated) and the figures [6] named in `FIGURES`.

    `policy` [B, A] and `values` [B] are what the networks, as they are now, make of `batch.obs`.
    """
    advantages = batch.advantages
    if args.norm_adv and len(advantages) > 1:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    log_ratio = log_prob(policy, batch.actions) - batch.log_probs
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s)
    if args.surrogate == "clip":  # L^CLIP = E[min(r A, clip(r, 1 - ε, 1 + ε) A)], PPO paper, equation 7
        clipped = ratio.clamp(1 - state.clip_coef, 1 + state.clip_coef)
        policy_losses = -torch.min(ratio * advantages, clipped * advantages)
    else:  # L^KLPEN = E[r A - β KL(π_old ‖ π)], PPO paper, equation 8
        policy_losses = state.kl_coef * kl_divergence(batch.policy, policy) - ratio * advantages
    value_losses = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:  # the larger of the losses with and without the value held within ±ε of the old one
        held = batch.values + (values - batch.values).clamp(-state.clip_coef, state.clip_coef)
        value_losses = torch.max(value_losses, 0.5 * (held - batch.returns).square())
    entropies = entropy(policy)
    loss = (policy_losses + args.vf_coef * value_losses - state.ent_coef * entropies).mean()
    with torch.no_grad():  # the approximate KLs are k1 and k3 of Schulman 2020, "Approximating KL Divergence"
        outside = ((ratio - 1).abs() > state.clip_coef).float()
        figures = (policy_losses, value_losses, entropies, -log_ratio, ratio - 1 - log_ratio, outside)
        return loss, torch.stack(figures).mean(1)


def gradient(agent: Agent, batch: Batch, state: State, args: Args) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the loss as one vector, within --max-grad-norm, its norm before that, and `FIGURES`."""
    loss, figures = ppo_loss(agent.policy(batch.obs), agent.value(batch.obs), batch, state, args)
    vector = torch.cat([part.flatten() for part in torch.autograd.grad(loss, agent.weights)])
    norm = torch.linalg.vector_norm(vector)
    return vector * (args.max_grad_norm / (norm + 1e-6)).clamp(max=1), norm, figures


@cache
def compiled(function: Callable) -> Callable:
    """`function`, which may take gradients, as one graph for batches of any size."""
    from torch._dynamo import config

    config.trace_autograd_ops = True
    return torch.compile(function, dynamic=True, fullgraph=True, options={"cpp_wrapper": True})


def adapt(value: float, factor: float, bounds: tuple, measured: float, low: float, high: float) -> float:
    """`value` times `factor` if `measured` is above `high`, divided by it if below `low`; within `bounds`."""
    value *= factor if measured > high else 1 / factor if measured < low else 1
    return min(max(value, bounds[0]), bounds[1])


ADAPTED: dict[str, tuple] = {  # --adapt: the coefficient, its factor where the KL is too high, its bounds
    "kl-coef": ("kl_coef", 2.0, (1e-4, 1e4)),  # PPO paper, §4
    "clip-coef": ("clip_coef", 0.5, (0.01, 0.3)),
    "learning-rate": ("learning_rate", 1 / 1.5, (1e-5, 1e-2)),  # Rudin et al. 2022, and RSL-RL
}


def adjust_coefficients(state: State, args: Args, figures: Figures) -> None:
    """Set the next iteration's coefficients, by the share of training left and the last `figures`, if any."""
    left = 1 - state.global_step / args.total_timesteps
    most = args.learning_rate * (left if args.anneal_lr else 1)
    if args.adapt != "none" and figures:
        name, factor, bounds = ADAPTED[args.adapt]
        band = args.desired_kl / 1.5, args.desired_kl * 1.5  # PPO paper, §4
        setattr(state, name, adapt(getattr(state, name), factor, bounds, figures["losses/kl"], *band))
    state.learning_rate = min(state.learning_rate, most) if args.adapt == "learning-rate" else most
    if args.target_entropy is None:
        state.ent_coef = args.ent_coef * (left if args.anneal_ent_coef else 1)
    elif figures:  # more bonus, more entropy; the coefficient never falls to 0, from which it could not rise
        band = args.target_entropy - args.entropy_tolerance, args.target_entropy + args.entropy_tolerance
        state.ent_coef = adapt(state.ent_coef, 1 / 1.1, (1e-5, 10.0), figures["losses/entropy"], *band)


class Rollout:
    """T steps of N environments, on the CPU, allocated once. The next rollout starts from the last row.

    obs [T+1, N, D]: obs[t+1] is the true successor of (obs[t], actions[t]), also where an episode ends.
    actions, rewards, terminated, truncated, valid [T, N]: valid is false in the filler rows, where Gymnasium
    ignores the action and starts an episode.
    """

    def __init__(self, args: Args, obs_size: int):
        steps = (args.num_steps, args.num_envs)
        self.obs = torch.zeros(args.num_steps + 1, args.num_envs, obs_size)
        self.actions, self.rewards = torch.zeros(steps, dtype=torch.int64), torch.zeros(steps)
        self.terminated, self.truncated, self.valid = torch.zeros(3, *steps, dtype=torch.bool)
        self.discounted_return = torch.zeros(args.num_envs)  # of the episodes under way, for `scale_rewards`
        self.acting_policy = torch.zeros(0)  # [N, A], of the last step, for `update` to compare
        self.episodes: list[tuple[float, int]] = []  # return and length of those that ended


@torch.inference_mode()
def collect_rollout(envs: VectorEnv, agent: Agent, rollout: Rollout) -> None:
    """Fill `rollout` with the next T steps of the environments under the agent's policy.

    Raises `TrainingFailed` if an environment raises, or returns a value that is not finite.
    """
    obs, actions, rewards = rollout.obs.numpy(), rollout.actions.numpy(), rollout.rewards.numpy()
    terminated, truncated, valid = (x.numpy() for x in (rollout.terminated, rollout.truncated, rollout.valid))
    obs[0], done = obs[-1], terminated[-1] | truncated[-1]
    noise, rollout.episodes = agent.noise(*rewards.shape), []
    for t, (inputs, noise_t) in enumerate(zip(rollout.obs.unbind(), noise.unbind(), strict=False)):
        action, rollout.acting_policy = agent.act(inputs.to(noise.device), noise_t)
        actions[t], valid[t] = action.cpu().numpy(), ~done  # after an episode's end, a step only resets
        step = attempt(envs.step, agent.env_actions(actions[t]))
        obs[t + 1], rewards[t], terminated[t], truncated[t], info = step
        done = terminated[t] | truncated[t]
        if done.any():
            returns, lengths = info["rollout_episode"]["r"][done], info["rollout_episode"]["l"][done]
            rollout.episodes += zip(returns.tolist(), lengths.tolist(), strict=True)
    finite = np.isfinite(obs).all(-1)
    for t, n in np.argwhere(~(finite[:-1] & finite[1:] & np.isfinite(rewards)))[:1]:
        values = f"observations {obs[t : t + 2, n].tolist()}, reward {rewards[t, n]}"
        raise TrainingFailed(f"environment {n} returned a value that is not finite in step {t}: {values}")


@torch.no_grad()
def scale_rewards(agent: Agent, rollout: Rollout, gamma: float) -> Tensor:
    """Rewards [T, N] over the running standard deviation of the discounted return, within ±10.

    Engstrom 2020, §3. The return is R_t = γ R_{t-1} + r_t, from 0 in each episode; its mean stays in.
    """
    rewards, decays = rollout.rewards * rollout.valid, gamma * rollout.valid
    discounted = [rollout.discounted_return]
    for reward, decay in zip(rewards.unbind(), decays.unbind(), strict=True):
        discounted.append(torch.addcmul(reward, decay, discounted[-1]))  # 0 in filler rows: starts anew
    rollout.discounted_return = discounted[-1]
    device = agent.one_hot.device
    agent.return_moments.update(torch.stack(discounted[1:])[rollout.valid].unsqueeze(-1).to(device))
    return (rollout.rewards.to(device) * torch.rsqrt(agent.return_moments.var + 1e-8)).clamp(-10, 10)


def update(agent: Agent, optimizer: Adam, rollout: Rollout, state: State, args: Args) -> Figures:
    """Learn from a rollout: K epochs of minibatches (PPO paper, Algorithm 1). Returns figures to log."""
    device = agent.one_hot.device
    raw_obs, actions = rollout.obs.to(device), rollout.actions.to(device)
    ends = rollout.terminated.to(device), rollout.truncated.to(device), args.gamma, args.gae_lambda
    rows = rollout.valid.flatten().nonzero().squeeze(-1).to(device)  # filler rows are not learnt from
    with torch.no_grad():
        obs = agent.normalize(raw_obs)
        rewards = rollout.rewards.to(device)
        if args.norm_rewards:
            rewards = scale_rewards(agent, rollout, args.gamma)
        policy, values = agent.policy(obs[:-1]), agent.value(obs)
        advantages, returns = compute_gae(rewards, values, *ends)
        stored = obs[:-1], actions, policy, log_prob(policy, actions), values[:-1], advantages, returns
        batch = Batch(*(x.flatten(0, 1) for x in stored))
        errors, targets = (batch.returns - batch.values)[rows], batch.returns[rows]
        explained = 1 - errors.var(correction=0) / targets.var(correction=0)
        relative_error = (errors.square().mean() / targets.square().mean()).sqrt()
        mismatch = (rollout.acting_policy - policy[-1]).abs().amax(-1) * rollout.valid[-1].to(device)

    parts = max(1, min(args.num_minibatches, len(rows) // 2))  # at least 2 rows each
    figures, norms = list[Tensor](), list[Tensor]()
    optimizer.param_groups[0]["lr"] = state.learning_rate
    (vector,) = optimizer.param_groups[0]["params"]
    step = compiled(gradient) if args.compile else gradient
    limit = math.inf if args.target_kl is None else args.target_kl
    for epoch in range(args.update_epochs):
        before = vector.detach().clone()
        if epoch > 0 and args.recompute_advantages:
            with torch.no_grad():
                advantages, returns = compute_gae(rewards, agent.value(obs), *ends)
            batch = batch._replace(advantages=advantages.flatten(), returns=returns.flatten())
        order = rows[torch.randperm(len(rows)).to(device)]
        for minibatch in map(Batch, *(x[order].tensor_split(parts) for x in batch)):
            vector.grad, norm, now = step(agent, minibatch, state, args)
            optimizer.step()
            figures.append(now)
            norms.append(norm)
        if epoch + 1 == args.update_epochs or args.target_kl is not None:
            with torch.no_grad():
                kls = list[Tensor]()  # the first is the figure: --adapt must see what was too far
                for halvings in range(12):
                    # How far this update has come from the old policy, exactly. If too far, back by halves
                    # (Schulman 2015, Appendix C), and at last to where this pass began.
                    kls.append(kl_divergence(batch.policy, agent.policy(batch.obs))[rows].mean())
                    if not kls[-1] > limit:
                        break
                    vector.lerp_(before, 0.5 if halvings < 10 else 1.0)
            if halvings > 0:
                break

    if args.norm_obs:  # not earlier: the statistics that acted are those that were learnt with
        agent.obs_moments.update(raw_obs[:-1].flatten(0, 1)[rows])
    once = torch.stack([torch.stack(norms).mean(), kls[0], explained, relative_error, mismatch.max()])
    read = torch.cat([torch.stack(figures).mean(0), once]).tolist()  # each reading waits for the device
    names = *FIGURES, "grad_norm", "kl", "explained_variance", "relative_error", "policy_mismatch"
    return {f"losses/{name}": value for name, value in zip(names, read, strict=True)}


# The conditions that `diagnose` looks for. A docstring is the advice: what is the case, why, what to change.


def kl_watch(figures: Figures, state: State, args: Args) -> bool:
    """KL > 0.05: the policy leaves what its data describe; lower --learning-rate or --update-epochs"""
    return figures["losses/kl"] > 0.05


def kl_act(figures: Figures, state: State, args: Args) -> bool:
    """KL > 0.1: updates outrun their data; set --target-kl 0.03 or halve --learning-rate"""
    return figures["losses/kl"] > 0.1


def drift(figures: Figures, state: State, args: Args) -> bool:
    """clip fraction > 0.4: clipped rows steer no more, and drift; lower --learning-rate or --update-epochs"""
    return figures["losses/clipfrac"] > 0.4


def idle(figures: Figures, state: State, args: Args) -> bool:
    """KL < 1e-6, no clipping in the first half: steps too small; raise --learning-rate or --update-epochs"""
    moving = args.update_epochs * args.num_minibatches == 1 or state.global_step > 0.5 * args.total_timesteps
    return not moving and figures["losses/clipfrac"] == 0 and figures["losses/kl"] < 1e-6


def critic(figures: Figures, state: State, args: Args) -> bool:
    """explained variance < 0 after a tenth: the critic misleads; use --norm-rewards or raise --vf-coef"""
    early = state.global_step <= 0.1 * args.total_timesteps
    # Where returns hardly vary, as in a solved CartPole, explaining their variance is no task for a critic.
    return not early and figures["losses/explained_variance"] < 0 and figures["losses/relative_error"] > 0.1


def collapse(figures: Figures, state: State, args: Args) -> bool:
    """entropy < 0.05 and returns no better than at first: it explores no more; raise --ent-coef"""
    poor = figures.get("charts/episodic_return_100", math.inf) <= state.start_return
    return poor and figures["losses/entropy"] < 0.05


def mismatch(figures: Figures, state: State, args: Args) -> bool:
    """acting and learning policies differ by > 1e-4: off-policy data; try --device cpu, check `act`"""
    return figures["losses/policy_mismatch"] > 1e-4


ADVICE = {kl_watch: 5, kl_act: 5, drift: 10, idle: 20, critic: 20, collapse: 10, mismatch: 1}  # iterations


def diagnose(figures: Figures, state: State, args: Args) -> list[str]:
    """Read an iteration's figures: a message for each condition of `ADVICE` that begins or ends with it.

    A condition begins when it has held, and ends when it has not, for its number of iterations in a row.
    Raises `TrainingFailed` when the loss or the gradient is not finite: the networks are spoilt then.
    """
    if not all(math.isfinite(figures[f"losses/{name}"]) for name in (*FIGURES, "grad_norm", "kl")):
        raise TrainingFailed("loss or gradient not finite; lower --learning-rate, look for huge rewards")
    messages = []
    for condition, held in ADVICE.items():
        name, advice = condition.__name__, str(condition.__doc__)
        streak, sign = state.streaks.get(name, 0), 1 if condition(figures, state, args) else -1
        state.streaks[name] = streak = streak + sign if streak * sign > 0 else sign
        if (name in state.active) != (sign > 0) and abs(streak) >= held:
            state.active = sorted({name} ^ set(state.active))
            messages.append(f"[{name}] " + (advice if sign > 0 else f"is over: {advice.partition(':')[0]}"))
    return messages


def plan(args: Args) -> list[str]:
    """What a run with these settings does: its sizes and settings in 5 lines, then the advice it may give."""
    rows, steps = args.num_envs * args.num_steps, args.update_epochs * args.num_minibatches
    rollouts, part = math.ceil(args.total_timesteps / rows), rows // args.num_minibatches
    moving = "learning_rate anneal_lr ent_coef anneal_ent_coef target_entropy adapt desired_kl target_kl"
    fixed = "surrogate clip_coef kl_coef vf_coef clip_vloss gamma gae_lambda norm_adv norm_obs norm_rewards"
    schedules, objective = (", ".join(f"{n} {getattr(args, n)}" for n in x.split()) for x in (moving, fixed))
    return [
        f"{args.env_id}: {args.total_timesteps:,} steps with seed {args.seed} on {pick_device(args)}",
        f"rollout    {args.num_envs} environments x {args.num_steps} steps = {rows:,} rows, x {rollouts:,}",
        f"update     {args.update_epochs} epochs x {args.num_minibatches} minibatches of {part:,} rows = "
        f"{steps} gradient steps, {steps * rollouts:,} in all",
        f"schedules  {schedules}",
        f"objective  {objective}",
        *(f"advice     after {held:>2} iterations of {advice.__doc__}" for advice, held in ADVICE.items()),
        "stop       at a loss or gradient that is not finite, or an environment that fails",
    ]


def pick_device(args: Args) -> torch.device:
    """The device that --device names."""
    auto = "cuda" if args.hidden_size >= 512 and torch.cuda.is_available() else "cpu"
    return torch.device(auto if args.device == "auto" else args.device)


def seed_everything(seed: int) -> int:
    """Seed PyTorch, and NumPy and Python for environments that draw from them; return the environments' seed.

    It is a hash, for Gymnasium gives environment i its seed + i: runs with seeds 1 and 2 would share most.
    """
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(seed)
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1


@torch.inference_mode()
def evaluate(agent: Agent, args: Args, mode: str, folder: Path) -> dict[str, np.ndarray]:
    """Play one episode in each of --eval-episodes environments; print and return "returns" and "lengths".

    mode "greedy" takes the likeliest actions (recorded below `folder`, with --capture-video), "stochastic"
    samples. Returns are undiscounted.
    """
    n, video = args.eval_episodes, folder / "videos" if args.capture_video and mode == "greedy" else None
    envs, _ = make_envs(replace(args, async_envs=False), n, video)
    obs, _ = attempt(envs.reset, seed=seed_everything(args.seed) + 2**31)  # not the seed of the training
    returns, lengths, running = np.zeros(n), np.zeros(n, dtype=int), np.ones(n, dtype=bool)
    while (playing := running & (lengths < args.eval_max_steps)).any():
        inputs = torch.as_tensor(obs, dtype=torch.float32, device=agent.one_hot.device)
        action, _ = agent.act(inputs, agent.noise(n) if mode == "stochastic" else None)
        obs, reward, terminated, truncated, _ = attempt(envs.step, agent.env_actions(action.cpu().numpy()))
        returns += reward * playing
        lengths += playing
        running &= ~(terminated | truncated)
    envs.close()
    cut = f", {running.sum()} cut at --eval-max-steps" if running.any() else ""
    cut += f", videos in {video}" if video else ""
    spread = f"± {returns.std():.1f}, from {returns.min():.1f} to {returns.max():.1f}"
    print(f"{mode:<10} return {returns.mean():.1f} {spread}, {n} episodes, length {lengths.mean():.1f}{cut}")
    return {"returns": returns, "lengths": lengths}


def save_checkpoint(
    path: Path, writer: SummaryWriter, agent: Agent, optimizer: Adam, state: State, args: Args
) -> None:
    """Write all that training needs to go on. If killed, `path` is still whole: the old file or the new.

    Raises `TrainingFailed` if it cannot be written; then the old one stays.
    """
    unfinished = path.with_suffix(".tmp")
    content = {  # only types that `torch.load(..., weights_only=True)` accepts
        "format": FORMAT,
        "args": asdict(args),
        "state": asdict(state),
        "agent": agent.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": [torch.get_rng_state(), *torch.cuda.get_rng_state_all()],
    }
    try:
        writer.flush()  # first, so that the curves have no gap where training goes on
        torch.save(content, unfinished)
        unfinished.replace(path)
    except (OSError, RuntimeError) as error:  # the latter is torch's, for instance for a full disk
        unfinished.unlink(missing_ok=True)
        raise TrainingFailed(f"the checkpoint cannot be written: {error}") from error


def load_checkpoint(path: str, agent: Any = None, optimizer: Any = None) -> tuple[Args, State]:
    """Read a checkpoint; put it into the agent, the optimiser and the random generators. Raises `Refused`."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, this script's is {FORMAT}")
        if agent:
            agent.load_state_dict(content["agent"])
            optimizer.load_state_dict(content["optimizer"])
            torch.set_rng_state(content["random"][0])
            torch.cuda.set_rng_state_all(content["random"][1 : 1 + torch.cuda.device_count()])
        return Args(**content["args"]), State(**content["state"])
    except Exception as error:  # torch.load raises many kinds: for no file, half a file, some other file
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise Refused(f"{path} is no checkpoint that fits this script and environment: {reason}.") from error


def open_run(args: Args, state: State) -> tuple[Path, SummaryWriter]:
    """The run folder, for --resume that of the checkpoint, else a new one, and TensorBoard's writer in it.

    A new folder's name is safe for any id and belongs to no other run. In an old one, TensorBoard drops what
    was logged after the checkpoint, so that curves have no duplicates.
    """
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__{time.time_ns() // 1000}"
    folder = Path(args.resume).parent if args.resume else Path("runs") / re.sub(r"[^\w.+-]+", "_", name)
    try:
        if args.track:
            import wandb

            names = {"name": folder.name, "project": args.wandb_project_name, "entity": args.wandb_entity}
            wandb.init(**names, id=folder.name, resume="allow", config=asdict(args), sync_tensorboard=True)
        folder.mkdir(parents=True, exist_ok=bool(args.resume))
        writer = SummaryWriter(str(folder), purge_step=state.global_step + 1 if args.resume else None)
    except Exception as error:  # wandb's are of kinds of its own
        raise Refused(f"the run folder{', or W&B run,' * args.track} cannot be made: {error}.") from error
    if not args.resume:
        settings = {flag: "none" if value is None else value for flag, value in asdict(args).items()}
        table = "".join(f"|{flag}|{value}|\n" for flag, value in settings.items())
        writer.add_text("settings", f"|flag|value|\n|-|-|\n{table}")
        for summary in hparams(settings, {"charts/episodic_return": 0, "eval/greedy_return": 0}):
            writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
    return folder, writer


def report(writer: SummaryWriter, figures: Figures, rollout: Rollout, state: State, args: Args) -> list[str]:
    """Complete an iteration's figures, log them to TensorBoard, and return what `diagnose` has to say."""
    for name, values in zip(("return", "length"), zip(*rollout.episodes, strict=True), strict=False):
        for suffix, statistic in (("", np.mean), ("_std", np.std), ("_min", np.min), ("_max", np.max)):
            figures[f"charts/episodic_{name}{suffix}"] = float(statistic(values))
    for name in ("learning_rate", "clip_coef", "kl_coef", "ent_coef"):
        figures[f"charts/{name}"] = getattr(state, name)
    state.recent_returns = (state.recent_returns + [episode[0] for episode in rollout.episodes])[-100:]
    if state.recent_returns:
        figures["charts/episodic_return_100"] = float(np.mean(state.recent_returns))
    if math.isnan(state.start_return) and len(state.recent_returns) >= 20:
        state.start_return = figures["charts/episodic_return_100"]
    messages = diagnose(figures, state, args)
    scalars = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
    writer.file_writer.add_summary(Summary(value=scalars), state.global_step)  # type: ignore[attr-defined]
    for message in messages:
        writer.add_text("advice", message, state.global_step)
    return messages


def status(figures: Figures, state: State, args: Args) -> str:
    """What the terminal shows once a second."""
    left = int(max(args.total_timesteps - state.global_step, 0) / figures["charts/SPS"])
    speed = f"{figures['charts/SPS']:,.0f}/s, {left // 60}:{left % 60:02} left"
    recent, share = state.recent_returns, state.global_step / args.total_timesteps
    returns = f"return {np.mean(recent):.1f} (last {len(recent)} episodes)" if recent else "no episode ended"
    line = f"{state.global_step:>11,} steps {share:>4.0%}  {speed}  {returns}  KL {figures['losses/kl']:.4f}"
    return "  ".join([line, *(f"[{name}]" for name in state.active)])


def train(args: Args) -> dict[str, dict[str, np.ndarray]]:
    """Train, evaluate and say where everything lies; or only plan, or evaluate. Returns `evaluate`'s results.

    Raises `Refused` before anything is written, and `TrainingFailed` when training cannot go on.
    """
    check_args(args)
    torch.set_num_threads(args.num_threads)
    env_seed = seed_everything(args.seed)
    envs, one_hot = make_envs(args, args.num_envs)
    agent = Agent(args, one_hot, envs.single_action_space).to(pick_device(args))
    optimizer = Adam([flatten_parameters(agent)], args.learning_rate, eps=1e-5, fused=args.device != "mps")
    state = State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)
    if checkpoint := args.resume or args.evaluate:
        before, state = load_checkpoint(checkpoint, agent, optimizer)
        for name in ("learning_rate", "clip_coef", "kl_coef", "ent_coef"):
            if getattr(args, name) != getattr(before, name):  # given anew: counts for what adapts, too
                setattr(state, name, getattr(args, name))
    modes = ("greedy", "stochastic")
    if args.evaluate or args.plan:
        envs.close()
    if args.evaluate:
        return {mode: evaluate(agent, args, mode, Path(args.evaluate).parent) for mode in modes}
    done = state.global_step >= args.total_timesteps
    refuse(done, f"{args.resume} has done {state.global_step:,} steps; set --total-timesteps to more")
    print("\n".join(plan(args) if args.plan else plan(args)[:5]), flush=True)
    if args.plan:
        return {}
    try:
        rollout, figures = Rollout(args, len(one_hot)), dict[str, float]()
    except RuntimeError as error:  # torch's, where there is no memory for it
        steps = f"{args.num_envs:,} x {args.num_steps:,} steps"
        raise Refused(f"a rollout of {steps} finds no memory; lower --num-envs or --num-steps.") from error
    folder, writer = open_run(args, state)
    path = folder / "checkpoint.pt"
    resume = shlex.join(["python", sys.argv[0], "--resume", str(path)])
    print(f"folder     {folder}", flush=True)

    def catch(number: int, _: Any) -> None:
        caught.append(number)  # training stops after this iteration
        signal.signal(number, handlers[number])  # the second one acts at once

    caught: list[int] = []
    handlers: dict[int, Any] = {n: signal.signal(n, catch) for n in (signal.SIGINT, signal.SIGTERM)}
    learner = writer, agent, optimizer, state, args
    try:
        save_checkpoint(path, *learner)
        rollout.obs[-1] = torch.as_tensor(attempt(envs.reset, seed=env_seed + state.global_step)[0])
        first_step, start, saved, shown = state.global_step, time.monotonic(), time.monotonic(), 0.0
        while state.global_step < args.total_timesteps and not caught:  # PPO paper, Algorithm 1
            adjust_coefficients(state, args, figures)
            try:
                collect_rollout(envs, agent, rollout)
            except TrainingFailed:
                if caught:  # the signal may have hit the environments' processes, too: stop as intended
                    break
                raise
            figures = update(agent, optimizer, rollout, state, args)

            state.global_step += int(rollout.valid.sum())
            now = time.monotonic()
            figures["charts/SPS"] = (state.global_step - first_step) / (now - start)
            messages = report(writer, figures, rollout, state, args)
            if messages or now - shown >= 1:
                print("\n".join([status(figures, state, args), *messages]), flush=True)
                shown = now
            if now - saved >= args.checkpoint_seconds:
                save_checkpoint(path, *learner)
                saved = now
        if not caught:
            envs.close()
    except BaseException:
        if path.exists():
            print(f"Failed after step {state.global_step:,}. Last checkpoint: {resume}", file=sys.stderr)
        raise
    finally:
        for process in getattr(envs.unwrapped, "processes", ()):  # they may hang or be dead: no use in asking
            process.terminate()
            envs.unwrapped.closed = True
        envs.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    save_checkpoint(path, *learner)
    if caught and state.global_step < args.total_timesteps:
        print(f"{signal.Signals(caught[0]).name} after step {state.global_step:,}. To go on: {resume}")
        raise SystemExit(128 + caught[0])
    results = {mode: evaluate(agent, args, mode, folder) for mode in modes}
    for mode, result in results.items():
        writer.add_scalar(f"eval/{mode}_return", result["returns"].mean(), state.global_step)
    writer.close()
    print(f"view       tensorboard --logdir {folder.parent}")
    print(f"watch      {resume.replace('--resume', '--evaluate')} --capture-video")
    print(f"go on      {resume} --total-timesteps {2 * args.total_timesteps}")
    return results


def main() -> None:
    """The command line. Exit status: 0 done, 1 training failed, 2 refused, 128 + n stopped by signal n."""
    try:
        args = tyro.cli(Args)
        if path := args.resume or args.evaluate:  # flags that are given override the checkpoint's
            refuse(args.resume and args.evaluate, "--resume and --evaluate exclude each other; give one")
            saved, _ = load_checkpoint(path)
            args = tyro.cli(Args, default=replace(saved, plan=False, resume=None, evaluate=None))
            for name in FIXED:
                was = getattr(saved, name)
                refuse(getattr(args, name) != was, f"{path} has {name} {was}, which cannot be changed")
        train(args)
    except (Refused, TrainingFailed) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, Refused) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
