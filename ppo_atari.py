# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.5,<2.14",
#     "gymnasium>=1.1",
#     "ale-py>=0.11.1",
#     "numpy",
#     "tensorboard",
#     "tyro>=0.9",
# ]
# ///
"""Proximal Policy Optimization for Atari games, in one file.

    python ppo_atari.py --env-id BreakoutNoFrameskip-v4
    torchrun --nproc-per-node 4 ppo_atari.py --env-id BreakoutNoFrameskip-v4 --num-envs 32

trains on any game of the Arcade Learning Environment, under DeepMind's protocol, which `make_envs` describes.
Under torchrun, processes with equal shares of the environments learn one network together.

Reading order: `Agent` (the networks), the equations (`compute_gae`, `ppo_loss`), `collect_rollout`, `update`,
and `train`, which is Algorithm 1 of the PPO paper. Where an equation or a detail comes from:

  PPO paper         Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  GAE paper         Schulman et al. 2016, "High-Dimensional Continuous Control Using GAE", arXiv:1506.02438
  Pardo 2018        "Time Limits in Reinforcement Learning", arXiv:1712.00378
  Engstrom 2020     "Implementation Matters in Deep Policy Gradients", arXiv:2005.12729
  Andrychowicz 2021 "What Matters In On-Policy Reinforcement Learning?", arXiv:2006.05990
  Huang 2022        "The 37 Implementation Details of Proximal Policy Optimization", ICLR Blog Track
  Mnih 2015         "Human-level control through deep reinforcement learning", Nature 518
  Machado 2018      "Revisiting the Arcade Learning Environment", arXiv:1709.06009

Shapes: T steps a rollout (--num-steps), N environments of this process (--num-envs over the processes), A
actions, B rows of a batch. An observation is 4 images, the last the newest: [4, 84, 84], bytes.
"""

from __future__ import annotations

import ctypes
import difflib
import math
import os
import random
import re
import shlex
import shutil
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from gymnasium.vector import AutoresetMode, VectorEnv
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor, nn
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
    env_id: str = "BreakoutNoFrameskip-v4"
    """The game. BreakoutNoFrameskip-v4, ALE/Breakout-v5 and Breakout mean the same here."""
    num_envs: int = 8
    """Environments that step in parallel, over all processes."""
    sticky_actions: float = 0.0
    """Probability that a frame repeats the last action (Machado 2018 asks for 0.25)."""
    clip_rewards: bool = True
    """Learn from the sign of the rewards. Returns that are reported are the game's own."""

    # Algorithm
    total_timesteps: int = 10_000_000
    """Environment transitions in all, of 4 frames each."""
    num_steps: int = 128
    """T: steps of each environment in a rollout."""
    learning_rate: float = 2.5e-4
    """Adam's step size; with --adapt learning-rate, the most that it may be."""
    anneal_lr: bool = True
    """Let the learning rate fall linearly to 0."""
    gamma: float = 0.99
    """γ: discount factor."""
    gae_lambda: float = 0.95
    """λ: trades bias (0) against variance (1) of the advantages."""
    update_epochs: int = 4
    """K: passes over each rollout."""
    num_minibatches: int = 4
    """Parts of a pass; each makes one gradient step."""
    norm_adv: bool = True
    """Give the advantages of each minibatch mean 0 and standard deviation 1."""
    recompute_advantages: bool = False
    """Compute the advantages anew with the current critic before each pass (Andrychowicz 2021, §3.5)."""
    surrogate: Literal["clip", "kl-penalty"] = "clip"
    """Objective: the clipped ratio (PPO paper, §3) or the KL penalty (§4)."""
    clip_coef: float = 0.1
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
    """End an iteration's passes when the KL from the old policy exceeds this; it adapts nothing."""
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

    # Performance
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the network lives. auto: on a GPU that CUDA knows, if there is one."""
    num_threads: int = 0
    """CPU threads of PyTorch and of the games; 0: the machine's cores, over its processes."""
    bfloat16: bool = False
    """Compute the network's products in bfloat16: faster on GPUs, and on CPUs with AMX."""
    compile: bool = False
    """Compile acting and the gradient of the loss, on a GPU into CUDA graphs (a CPU needs a C++ compiler)."""


# A checkpoint's format, and the settings that it fixes: its networks and its rollouts depend on them.
FORMAT = "ppo-atari-1"
FIXED = "env_id", "num_envs", "num_steps"
BOUNDS = {  # settings outside these are nonsense
    "num_envs num_minibatches eval_episodes update_epochs": (1, 1e6),
    "num_threads": (0, 1e4),
    "total_timesteps": (1, 1e15),
    "num_steps": (8, 1e6),  # a rollout of a few steps may hold nothing but filler rows
    "gamma gae_lambda sticky_actions": (0, 1),
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
    _, size = world()
    rows, clip = args.num_envs // size * args.num_steps, args.surrogate == "clip"
    have = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    most = f"at most {rows // 8}, for 8 of the {rows} rows of a process each: some are fillers"
    shares = f"--num-envs is {args.num_envs}, which {size} processes cannot share equally"
    refuse(args.num_envs % size, f"{shares}; give a multiple of {size}")
    refuse(args.num_minibatches > rows / 8, f"--num-minibatches is {args.num_minibatches}; it must be {most}")
    refuse(args.adapt == "clip-coef" and not clip, "--adapt clip-coef needs --surrogate clip")
    refuse(args.adapt == "kl-coef" and clip, "--adapt kl-coef needs --surrogate kl-penalty")
    refuse(args.target_entropy is not None and not args.ent_coef, "--target-entropy needs --ent-coef above 0")
    refuse(not have.get(args.device, True), f"--device {args.device} is not available here; use --device cpu")
    refuse("" in (args.resume, args.evaluate), "--resume and --evaluate take a path, and this one is empty")
    refuse(args.evaluate and args.plan, "--plan tells of training, --evaluate does none; give one")
    beside = Path(args.resume or "checkpoint.pt").with_name("checkpoint.pt")
    taken = args.resume and Path(args.resume) != beside and beside.exists()
    refuse(taken, f"{args.resume} lies beside {beside}, which it would overwrite; move one of them")
    refuse(not find_spec("ale_py"), "Atari games need: pip install ale-py")
    gpus, here = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    few = pick_device(args).type == "cuda" and here > gpus
    refuse(few, f"{here} processes need a GPU each, and this machine has {gpus}; use --device cpu")
    refuse(args.device == "mps" and size > 1, "--device mps is for one process; use --device cpu")
    blind = args.adapt != "none" and args.update_epochs * args.num_minibatches == 1
    refuse(blind, "--adapt needs several gradient steps an iteration: the KL is that before the last ones")
    old = args.capture_video and not hasattr(gym.wrappers.vector, "RecordVideo")
    refuse(old, "--capture-video needs: pip install 'gymnasium>=1.3'")
    refuse(args.capture_video and not find_spec("moviepy"), "--capture-video needs: pip install moviepy")
    track, compiles = args.track and not args.evaluate, args.compile and not args.evaluate
    refuse(track and not find_spec("wandb"), "--track needs: pip install wandb")
    if compiles:
        from torch._dynamo import config

        refuse(not hasattr(config, "trace_autograd_ops"), "--compile needs a newer PyTorch; 2.13 will do")
        compilers = os.environ.get("CXX", "g++"), "clang++"
        refuse(not any(map(shutil.which, compilers)), f"--compile needs a compiler: {' or '.join(compilers)}")
    if not args.allow_unsafe:
        unscaled = args.update_epochs > 1 and not (args.norm_adv or args.clip_rewards)
        override = "; --allow-unsafe overrides"
        refuse(args.update_epochs > 30, f"--update-epochs above 30: the KL explodes; use 3 to 15{override}")
        refuse(clip and args.clip_coef > 0.3, f"--clip-coef above 0.3 hardly clips; use 0.1 to 0.3{override}")
        refuse(unscaled, f"several epochs need --norm-adv or --clip-rewards to bound their steps{override}")


def world() -> tuple[int, int]:
    """This process's rank and the number of processes that train together, as torchrun has set them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def collective(operation: Callable, *args: Any) -> None:
    """Do this with the other processes. Raises `TrainingFailed` if it fails, as where one of them is gone.

    NCCL does not fail, but waits: then torchrun ends the process.
    """
    try:
        operation(*args)
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise TrainingFailed(f"the processes cannot exchange data (is one gone?): {reason}") from error


def total(x: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        collective(dist.all_reduce, x, operation)
    return x


def attempt(call: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the environments; raise `TrainingFailed` for whatever goes wrong in them."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        raise TrainingFailed(str(error) or f"an environment's process failed: {error!r}") from error


class LostLives(gym.vector.VectorWrapper):
    """Ends an episode, to the learner, at each lost life, while the game goes on; makes rewards their signs.

    In the step after a lost life the action is `pressed`, whatever the agent wants, as in DeepMind's
    wrappers: a filler row, like that in which a game is reset.
    """

    def __init__(self, envs: VectorEnv, pressed: int, clip_rewards: bool):
        super().__init__(envs)
        self.pressed, self.clip_rewards = pressed, clip_rewards

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """As of any vector environment."""
        obs, info = self.env.reset(**kwargs)
        self.lives, self.lost = info["lives"], np.zeros(self.num_envs, dtype=bool)
        return obs, info

    def step(self, actions: np.ndarray) -> tuple:
        """As of any vector environment; the games' own ends are in the info of `RecordEpisodeStatistics`."""
        actions = np.where(self.lost, self.pressed, actions)
        obs, rewards, terminated, truncated, info = self.env.step(actions)
        self.lost, self.lives = info["lives"] < self.lives, info["lives"]
        learnt = np.sign(rewards) if self.clip_rewards else rewards
        return obs, learnt, terminated | self.lost, truncated, info


class Screens(gym.vector.VectorWrapper):
    """Makes the first game renderable, for videos, by stepping its twin, seen in colour and full size."""

    render_mode = "rgb_array"

    def __init__(self, envs: VectorEnv, twin: VectorEnv):
        super().__init__(envs)
        self.twin = twin

    def reset(self, **kwargs: Any) -> tuple[np.ndarray, dict[str, Any]]:
        """As of any vector environment; a seed is needed, or the twin would differ."""
        self.images, _ = self.twin.reset(**kwargs)
        return self.env.reset(**kwargs)

    def step(self, actions: np.ndarray) -> tuple:
        """As of any vector environment."""
        self.images, *_ = self.twin.step(actions[:1])
        return self.env.step(actions)

    def render(self) -> tuple[np.ndarray, ...]:
        """The first game's image [210, 160, 3], in the place of each game's."""
        return (self.images[0, -1],) * self.num_envs


def make_envs(args: Args, num_envs: int, video: Path | None = None) -> VectorEnv:
    """N games in the ALE's own vector environment, under DeepMind's protocol (Mnih 2015, Methods).

    An action is held for 4 frames, of the last 2 of which the brighter pixels count; an observation is the
    last 4 such images, grey, 84 x 84. A game begins with a frame of FIRE where it has that button, which is
    pressed after each lost life, too, for some games wait for it; and with up to 29 frames without an action.
    After 108,000 frames, half an hour, it is cut. `LostLives` says what an episode is to the learner. With a
    folder `video`, the first environment's first game is recorded there. Raises `Refused` for no such game.
    """
    import ale_py

    gym.register_envs(ale_py)
    game = re.sub(r"(NoFrameskip|Deterministic)?-v\d+$", "", args.env_id.removeprefix("ALE/"))
    games = [name[4:-3] for name in gym.registry if name.startswith("ALE/") and name.endswith("-v5")]
    near = ", ".join(difflib.get_close_matches(game, games, 3, 0.5) or games)
    refuse(game not in games, f"cannot train on {args.env_id}: the ALE has no {game}, but {near}")
    settings: dict[str, Any] = {"num_envs": num_envs, "num_threads": min(count_threads(args), num_envs)}
    settings |= {"repeat_action_probability": args.sticky_actions, "reward_clipping": False}
    try:
        envs: Any = gym.make_vec(f"ALE/{game}-v5", **settings)
        buttons = [action.name for action in envs.unwrapped.ale.get_action_set()]
        if video:
            screen = {"num_envs": 1, "grayscale": False, "img_height": 210, "img_width": 160}
            envs = Screens(envs, gym.make_vec(f"ALE/{game}-v5", **settings | screen))
            first: dict[str, Any] = {"record_first_only": True, "episode_trigger": lambda n: n == 0}
            envs = gym.wrappers.vector.RecordVideo(envs, str(video), **first, fps=15)
    except Exception as error:  # such as games that are not installed
        reason = " ".join((str(error) or repr(error)).split())
        raise Refused(f"cannot train on {args.env_id}: {reason}") from error
    mode = envs.metadata.get("autoreset_mode")
    refuse(mode is not AutoresetMode.NEXT_STEP, f"the ALE's autoreset mode is {mode}, not NEXT_STEP")
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs, stats_key="rollout_episode")
    return LostLives(envs, buttons.index("FIRE") if "FIRE" in buttons else 0, args.clip_rewards)


class Agent(nn.Module):
    """The convolutional network of Mnih 2015, with two heads: actor and critic."""

    def __init__(self, args: Args, actions: Any):
        super().__init__()
        self.num_actions, self.precision = int(actions.n), torch.bfloat16 if args.bfloat16 else torch.float32
        convolutions = nn.Conv2d(4, 32, 8, 4), nn.Conv2d(32, 64, 4, 2), nn.Conv2d(64, 64, 3, 1)
        hidden, self.actor = nn.Linear(3136, 512), nn.Linear(512, self.num_actions)
        self.critic = nn.Linear(512, 1)
        parts = [part for layer in convolutions for part in (layer, nn.ReLU())]
        self.trunk = nn.Sequential(*parts, nn.Flatten(), hidden, nn.ReLU())
        for layer in (*convolutions, hidden, self.actor, self.critic):  # Huang 2022
            gain = 0.01 if layer is self.actor else 1.0 if layer is self.critic else math.sqrt(2)
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
        self.weights = list(self.parameters())  # looked up once

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Observations [B, 4, 84, 84] to log π(·|s) [B, A] and V(s) [B]."""
        with torch.autocast(obs.device.type, torch.bfloat16, enabled=self.precision is torch.bfloat16):
            images = obs.to(self.precision, memory_format=torch.channels_last).div_(255)
            features = self.trunk(images).float()
        return self.actor(features).log_softmax(-1), self.critic(features).squeeze(-1)

    def noise(self, *shape: int) -> Tensor:
        """Gumbel noise [*shape, A] for `act`."""
        return -torch.empty(*shape, self.num_actions, device=self.weights[0].device).exponential_().log()

    def act(self, obs: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Observations [N, 4, 84, 84] to actions [N], the log policy [N, A] they come from, and values [N].

        Without noise, the likeliest actions; with Gumbel noise [N, A], actions sampled from π, for then
        argmax(log π + noise) is distributed as π (the Gumbel-max trick). A rollout's noise is drawn at once.
        """
        policy, values = self(obs)
        return (policy if noise is None else policy + noise).argmax(-1), policy, values


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


# Rows to learn from: obs [B, 4, 84, 84], bytes; actions [B]; what the old network made of them, policy [B, A]
# = log π_old(·|s), log_probs [B] = log π_old(a|s) and values [B] = V_old(s); returns [B] and advantages [B].
# Sums weighted by weights [B], added up over the processes, are means over the rows of all of them.
Batch = namedtuple("Batch", "obs actions policy log_probs values returns advantages weights")
Figures = dict[str, float]  # what is logged, by TensorBoard tag
FIGURES = ("policy_loss", "value_loss", "entropy", "old_approx_kl", "approx_kl", "clipfrac", "kl")


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
    """The scalar loss to minimise (PPO paper, equation 9, negated) and the figures [7] named in `FIGURES`.

    `policy` [B, A] and `values` [B] are what the network, as it is now, makes of `batch.obs`. Both results
    are this process's part of a sum over all processes.
    """
    advantages = batch.advantages
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
    loss = (policy_losses + args.vf_coef * value_losses - state.ent_coef * entropies) @ batch.weights
    with torch.no_grad():  # the approximate KLs are k1 and k3 of Schulman 2020, "Approximating KL Divergence"
        outside = ((ratio - 1).abs() > state.clip_coef).float()
        kl = kl_divergence(batch.policy, policy)
        figures = (policy_losses, value_losses, entropies, -log_ratio, ratio - 1 - log_ratio, outside, kl)
        return loss, torch.stack(figures) @ batch.weights


def gradient(agent: Agent, batch: Batch, state: State, args: Args) -> tuple[Tensor, Tensor]:
    """The gradient of the loss as one vector, and `FIGURES`: both this process's part of a sum over all."""
    policy, values = agent(batch.obs)
    loss, figures = ppo_loss(policy, values, batch, state, args)
    vector = torch.cat([part.flatten() for part in torch.autograd.grad(loss, agent.weights)])
    return vector, figures


@cache
def compiled(function: Callable, device: str) -> Callable:
    """`function`, which may take gradients, as one graph; on a GPU, as a CUDA graph for each batch size."""
    from torch._dynamo import config

    config.trace_autograd_ops = True
    options = {"mode": "reduce-overhead"} if device == "cuda" else {"options": {"cpp_wrapper": True}}
    graph = torch.compile(function, dynamic=None if device == "cuda" else True, fullgraph=True, **options)

    def call(*args: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()  # what the last call has returned is copied by now
        return graph(*args)

    return call


def deal(rows: Tensor, parts: int, size: int) -> tuple[Tensor, Tensor]:
    """One pass's minibatches: `rows` [R] in a random order, and their weights, both [parts, size].

    CUDA graphs want equal sizes: places that are left over, spread evenly, hold any row with weight 0. Else a
    weight is 1 over the number of rows that the minibatch has in all processes.
    """
    order = rows[torch.randperm(len(rows), device=rows.device)]
    order = torch.cat([order, order[:1].expand(parts * size - len(rows))])
    filled = (torch.arange(parts * size, device=rows.device) < len(rows)).float()
    order, filled = (x.view(size, parts).T for x in (order, filled))
    return order, filled / total(filled.sum(1, keepdim=True)).clamp(min=1)


def normalize(advantages: Tensor, weights: Tensor) -> Tensor:
    """Advantages [parts, size] of mean 0 and standard deviation 1 in each minibatch, over all processes."""
    centred = advantages - total((advantages * weights).sum(1, keepdim=True))
    return centred / (total((centred.square() * weights).sum(1, keepdim=True)).sqrt() + 1e-8)


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
    """T steps of N environments, allocated once. The next rollout starts from the last row.

    obs [T+1, N, 4, 84, 84], bytes: obs[t+1] is the true successor of (obs[t], actions[t]), also where an
    episode ends. policy [T, N, A] and values [T+1, N] are the acting network's, on its device, as obs is.
    actions, rewards, terminated, truncated, valid [T, N], on the CPU: valid is false in the filler rows, in
    which a game is reset, or a button pressed for the agent.
    """

    def __init__(self, args: Args, agent: Agent, num_envs: int):
        device, steps = agent.weights[0].device, (args.num_steps, num_envs)
        self.images = torch.zeros(num_envs, 4, 84, 84, dtype=torch.uint8, pin_memory=device.type == "cuda")
        shape = args.num_steps + 1, num_envs, 84, 84, 4  # in memory the channels come last, for convolutions
        self.obs = torch.zeros(shape, dtype=torch.uint8, device=device).permute(0, 1, 4, 2, 3)
        self.policy = torch.zeros(*steps, agent.num_actions, device=device)
        self.values = torch.zeros(args.num_steps + 1, num_envs, device=device)
        self.actions, self.rewards = torch.zeros(steps, dtype=torch.int64), torch.zeros(steps)
        self.terminated, self.truncated, self.valid = torch.zeros(3, *steps, dtype=torch.bool)
        self.episodes: list[tuple[float, int]] = []  # return and length of the games that ended


@torch.inference_mode()
def collect_rollout(envs: VectorEnv, agent: Agent, rollout: Rollout, args: Args) -> None:
    """Fill `rollout` with the next T steps of the games under the agent's policy.

    Raises `TrainingFailed` if the games do.
    """
    images, actions, rewards = (x.numpy() for x in (rollout.images, rollout.actions, rollout.rewards))
    terminated, truncated, valid = (x.numpy() for x in (rollout.terminated, rollout.truncated, rollout.valid))
    rollout.obs[0], done = rollout.obs[-1], terminated[-1] | truncated[-1]
    noise, rollout.episodes = agent.noise(*rewards.shape), []
    act = compiled(agent.act, noise.device.type) if args.compile else agent.act
    for t, (obs, noise_t) in enumerate(zip(rollout.obs.unbind(), noise.unbind(), strict=False)):
        action, rollout.policy[t], rollout.values[t] = act(obs, noise_t)
        actions[t], valid[t] = action.cpu().numpy(), ~done  # after an end, a step prepares the next episode
        images[:], rewards[t], terminated[t], truncated[t], info = attempt(envs.step, actions[t])
        rollout.obs[t + 1].copy_(rollout.images, non_blocking=True)
        done = terminated[t] | truncated[t]
        if "rollout_episode" in info:
            over = info["_rollout_episode"]
            returns, lengths = info["rollout_episode"]["r"][over], info["rollout_episode"]["l"][over]
            rollout.episodes += zip(returns.tolist(), lengths.tolist(), strict=True)
    rollout.values[-1] = act(rollout.obs[-1], noise[-1])[2]


def update(agent: Agent, optimizer: Adam, rollout: Rollout, state: State, args: Args) -> Figures:
    """Learn from a rollout: K epochs of minibatches (PPO paper, Algorithm 1). Returns figures to log."""
    obs, policy, values, device = rollout.obs, rollout.policy, rollout.values, rollout.obs.device
    rewards, actions, valid = (x.to(device) for x in (rollout.rewards, rollout.actions, rollout.valid))
    ends = rollout.terminated.to(device), rollout.truncated.to(device), args.gamma, args.gae_lambda
    rows = valid.flatten().nonzero().squeeze(-1)  # filler rows are not learnt from
    with torch.no_grad():
        advantages, returns = compute_gae(rewards, values, *ends)
        errors, targets = (returns - values[:-1])[valid], returns[valid]
        sums = torch.stack([x.sum() for x in (valid, errors, errors.square(), targets, targets.square())])
        batched, _ = agent(obs[-3:-1].flatten(0, 1))  # not the batch size that has acted
        mismatch = (batched.chunk(2)[1] - policy[-1]).abs().amax(-1) * valid[-1]

    parts = args.num_minibatches
    size = math.ceil(valid.numel() / parts)
    figures, norms = list[Tensor](), list[Tensor]()
    optimizer.param_groups[0]["lr"] = state.learning_rate
    (vector,) = optimizer.param_groups[0]["params"]
    step = compiled(gradient, device.type) if args.compile else gradient
    for epoch in range(args.update_epochs):
        if epoch > 0 and args.recompute_advantages:
            with torch.no_grad():
                anew = torch.stack([agent(images)[1] for images in obs.unbind()])
                advantages, returns = compute_gae(rewards, anew, *ends)
        stored = obs[:-1], actions, policy, log_prob(policy, actions), values[:-1], returns
        order, weights = deal(rows, parts, size)
        learnt = advantages.flatten()[order]
        if args.norm_adv:
            learnt = normalize(learnt, weights)
        for places, *own in zip(order, learnt, weights, strict=True):  # copies images a minibatch at a time
            batch = Batch(*(x.flatten(0, 1)[places] for x in stored), *own)
            gradients, now = step(agent, batch, state, args)
            vector.grad = total(gradients)
            norms.append(nn.utils.clip_grad_norm_(vector, args.max_grad_norm))
            optimizer.step()
            figures.append(now.clone())
        last = torch.stack(figures[-parts:]).mean(0)[-1:]  # the KL, as the steps of this pass have met it
        if args.target_kl is not None and total(last.clone()) > args.target_kl:
            break

    n, error, squared_error, target, squared_target = total(sums).tolist()  # each reading awaits the device
    explained = 1 - (squared_error - error**2 / n) / max(squared_target - target**2 / n, 1e-12)
    read = total(torch.cat([torch.stack(figures).mean(0)[:-1], last])).tolist()
    once = torch.stack([torch.stack(norms).mean(), total(mismatch.max(), dist.ReduceOp.MAX)]).tolist()
    all_figures = [*read, *once, explained, math.sqrt(squared_error / max(squared_target, 1e-12))]
    names = *FIGURES, "grad_norm", "policy_mismatch", "explained_variance", "relative_error"
    return {f"losses/{name}": value for name, value in zip(names, all_figures, strict=True)}


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
    """explained variance < 0 after a tenth: the critic misleads; use --clip-rewards or raise --vf-coef"""
    early = state.global_step <= 0.1 * args.total_timesteps
    # Where returns hardly vary, as in a solved CartPole, explaining their variance is no task for a critic.
    return not early and figures["losses/explained_variance"] < 0 and figures["losses/relative_error"] > 0.1


def collapse(figures: Figures, state: State, args: Args) -> bool:
    """entropy < 0.05 and returns no better than at first: it explores no more; raise --ent-coef"""
    poor = figures.get("charts/episodic_return_100", math.inf) <= state.start_return
    return poor and figures["losses/entropy"] < 0.05


def mismatch(figures: Figures, state: State, args: Args) -> bool:
    """acting and learning policies differ by > 1e-4 (bfloat16: 0.1): off-policy data; try --device cpu"""
    return figures["losses/policy_mismatch"] > (0.1 if args.bfloat16 else 1e-4)


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
    fixed = "surrogate clip_coef kl_coef vf_coef clip_vloss gamma gae_lambda norm_adv clip_rewards"
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
    """The device that --device names; each process of a machine takes a GPU of its own."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    return torch.device(name, int(os.environ.get("LOCAL_RANK", 0))) if name == "cuda" else torch.device(name)


def count_threads(args: Args) -> int:
    """The number that --num-threads means."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return args.num_threads or max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def keep_memory() -> None:
    """Let the C library keep memory that is freed, or each minibatch's arrays are mapped and cleared anew."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):  # glibc
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD
        _ = libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD; old ones allow no more


def seed_everything(seed: int) -> int:
    """Seed PyTorch, and NumPy and Python for environments that draw from them; return the environments' seed.

    It is a hash, for Gymnasium gives environment i its seed + i: runs with seeds 1 and 2 would share most.
    """
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(seed)
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1


@torch.inference_mode()
def evaluate(agent: Agent, args: Args, mode: str, folder: Path) -> dict[str, np.ndarray]:
    """Play a whole game in each of --eval-episodes environments; print and return "returns" and "lengths".

    mode "greedy" takes the likeliest actions (recorded below `folder`, with --capture-video: the first game),
    "stochastic" samples. Returns are the game's own, undiscounted; lengths are in steps.
    """
    n, video = args.eval_episodes, folder / "videos" if args.capture_video and mode == "greedy" else None
    envs = make_envs(args, n, video)
    obs, _ = attempt(envs.reset, seed=seed_everything(args.seed) % 2**29 + 2**30)  # not the training's
    returns, lengths, running = np.zeros(n), np.zeros(n, dtype=int), np.ones(n, dtype=bool)
    while running.any():
        inputs = torch.as_tensor(obs, device=agent.weights[0].device)
        action, *_ = agent.act(inputs, agent.noise(n) if mode == "stochastic" else None)
        obs, *_, info = attempt(envs.step, action.cpu().numpy())
        over = running & info.get("_rollout_episode", False)
        if over.any():
            returns[over], lengths[over] = (info["rollout_episode"][key][over] for key in "rl")
            running &= ~over
    envs.close()
    seen = f", a video in {video}" if video else ""
    spread = f"± {returns.std():.1f}, from {returns.min():.1f} to {returns.max():.1f}"
    print(f"{mode:<10} return {returns.mean():.1f} {spread}, {n} episodes, length {lengths.mean():.1f}{seen}")
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

    Of several processes, the first one speaks and writes. Raises `Refused` before anything is written, and
    `TrainingFailed` when training cannot go on.
    """
    check_args(args)
    (rank, size), device = world(), pick_device(args)
    torch.set_num_threads(count_threads(args))
    keep_memory()
    env_seed = seed_everything(args.seed)
    envs = make_envs(args, args.num_envs // size)
    agent = Agent(args, envs.single_action_space).to(device)
    vector = flatten_parameters(agent)
    optimizer = Adam([vector], args.learning_rate, eps=1e-5, fused=args.device != "mps")
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
        folder = Path(args.evaluate).parent
        return {} if rank else {mode: evaluate(agent, args, mode, folder) for mode in modes}
    done = state.global_step >= args.total_timesteps
    refuse(done, f"{args.resume} has done {state.global_step:,} steps; set --total-timesteps to more")
    if rank == 0:
        print("\n".join(plan(args) if args.plan else plan(args)[:5]), flush=True)
    if args.plan:
        return {}
    if size > 1 and device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        rollout, figures = Rollout(args, agent, envs.num_envs), dict[str, float]()
    except RuntimeError as error:  # torch's, where there is no memory for it
        steps = f"{args.num_envs:,} x {args.num_steps:,} steps"
        raise Refused(f"a rollout of {steps} finds no memory; lower --num-envs or --num-steps.") from error
    if size > 1:
        # After Adam: what that imports would else keep the group, and gloo's threads with it, to the end. A
        # thread that outlives Python may abort the process.
        collective(dist.init_process_group, "nccl" if device.type == "cuda" else "gloo")
        collective(dist.broadcast, vector.data, 0)  # machines may round the first weights otherwise
        torch.manual_seed(env_seed + state.global_step + rank)  # random numbers are each process's own
    if rank == 0:
        folder, writer = open_run(args, state)
        path = folder / "checkpoint.pt"
        here = os.environ.get("LOCAL_WORLD_SIZE", str(size))
        start = ["torchrun", "--nproc-per-node", here] if size > 1 else ["python"]
        resume = shlex.join([*start, sys.argv[0], "--resume", str(path)])
        print(f"folder     {folder}", flush=True)
        learner = writer, agent, optimizer, state, args

    def catch(number: int, _: Any) -> None:
        caught.append(number)  # training stops after this iteration
        signal.signal(number, handlers[number])  # the second one acts at once

    caught: list[int] = []
    stopped = False
    handlers: dict[int, Any] = {n: signal.signal(n, catch) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        if rank == 0:
            save_checkpoint(path, *learner)
        seed = (env_seed + state.global_step) % 2**29 + rank * envs.num_envs  # the ALE wants less than 2**31
        rollout.obs[-1] = torch.as_tensor(attempt(envs.reset, seed=seed)[0])
        first_step, begun, saved, shown = state.global_step, time.monotonic(), time.monotonic(), 0.0
        while state.global_step < args.total_timesteps and not stopped:  # PPO paper, Algorithm 1
            adjust_coefficients(state, args, figures)
            collect_rollout(envs, agent, rollout, args)
            figures = update(agent, optimizer, rollout, state, args)

            sums = total(torch.tensor([int(rollout.valid.sum()), len(caught)], device=device)).tolist()
            state.global_step, stopped = state.global_step + sums[0], sums[1] > 0
            everywhere = [rollout.episodes] * size
            if size > 1:
                collective(dist.all_gather_object, everywhere, rollout.episodes)
            rollout.episodes = [episode for episodes in everywhere for episode in episodes]
            now = time.monotonic()
            figures["charts/SPS"] = (state.global_step - first_step) / (now - begun)
            if rank > 0:
                continue
            messages = report(writer, figures, rollout, state, args)
            if messages or now - shown >= 1:
                print("\n".join([status(figures, state, args), *messages]), flush=True)
                shown = now
            if now - saved >= args.checkpoint_seconds:
                save_checkpoint(path, *learner)
                saved = now
        if size > 1:
            collective(dist.barrier)  # none leaves while another may still fail
    except BaseException:
        if rank == 0 and path.exists():
            print(f"Failed after step {state.global_step:,}. Last checkpoint: {resume}", file=sys.stderr)
        raise
    finally:
        envs.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if rank > 0:
        return {}
    save_checkpoint(path, *learner)
    if stopped and state.global_step < args.total_timesteps:
        number = caught[0] if caught else signal.SIGTERM  # it was another process that was told to stop
        print(f"{signal.Signals(number).name} after step {state.global_step:,}. To go on: {resume}")
        raise SystemExit(128 + number)
    results = {mode: evaluate(agent, args, mode, folder) for mode in modes}
    for mode, result in results.items():
        writer.add_scalar(f"eval/{mode}_return", result["returns"].mean(), state.global_step)
    writer.close()
    print(f"view       tensorboard --logdir {folder.parent}")
    print(f"watch      {shlex.join(['python', sys.argv[0], '--evaluate', str(path)])} --capture-video")
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
        # All processes of a machine refuse the same.
        if isinstance(error, TrainingFailed) or os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, Refused) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


if __name__ == "__main__":
    main()
