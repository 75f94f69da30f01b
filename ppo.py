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

PPO comes first, in the order of the paper, up to `train`. An iteration, and what each part returns:

    train                    the results, after repeating:
      adjust_coefficients    nothing: it sets the coefficients in the state
      collect_rollout        the episodes that ended, after it has filled the rollout with T steps
      make_batch             its transitions, with advantages (compute_gae) and returns
      update                 metrics, after K epochs of gradient steps, each on a minibatch
        ppo_loss             the loss of the minibatch, and metrics

Shapes: T steps per rollout, N environments, D numbers per observation, A actions, B transitions in a batch.
"""

import json
import math
import pickle
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

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
    adapt: Literal["none", "kl-coef", "clip-coef", "learning-rate"] = "none"  # adapt this to --desired-kl
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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():  # NumPy's numbers could not be loaded from a checkpoint
            setattr(self, name, value.item() if isinstance(value, np.generic) else value)


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
        share = len(x) / (self.count + len(x))  # of the new data
        delta = x.mean(0) - self.mean
        self.var.lerp_(x.var(0, correction=0), share).add_(share * (1 - share) * delta.square())
        self.mean.add_(share * delta)
        self.count.add_(len(x))


class Agent(nn.Module):
    """Actor and critic, with the running statistics they depend on: a saved agent is complete."""

    def __init__(self, args: Args, obs_space: gym.spaces.Box, num_actions: int):
        super().__init__()
        obs_size = obs_space.shape[0]
        self.actor = mlp(obs_size, args.hidden_size, num_actions, last_gain=0.01)  # near-uniform at first
        self.critic = mlp(obs_size, args.hidden_size, 1, last_gain=1.0)
        self.obs_moments, self.return_moments = RunningMoments(obs_size), RunningMoments(1)
        unit = (obs_space.low == 0) & (obs_space.high == 1)  # one-hot, for example: these stay as they are
        self.norm_mask = nn.Buffer(torch.from_numpy(~unit), persistent=False) if args.norm_obs else None

    def normalize(self, obs: Tensor) -> Tensor:
        """Raw observations [..., D] as the networks see them: (x - mean) / std within ±10, or unchanged."""
        if self.norm_mask is None:
            return obs
        scaled = (obs - self.obs_moments.mean) * torch.rsqrt(self.obs_moments.var + 1e-8)
        return torch.where(self.norm_mask, scaled.clamp(-10, 10), obs)

    def policy(self, obs: Tensor) -> Tensor:
        """π(·|s), as log-probabilities [..., A], for normalised observations [..., D]."""
        return torch.log_softmax(self.actor(obs), -1)  # to forbid an action: logit -1e8, not -inf

    def value(self, obs: Tensor) -> Tensor:
        """V(s) [...] for normalised observations [..., D]."""
        return self.critic(obs).squeeze(-1)


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
    next_values = torch.where(terminated, 0, values[1:])  # not a product: a last state may be NaN
    deltas = rewards + gamma * next_values - values[:-1]
    ended = terminated | truncated
    advantages = torch.zeros_like(values)
    for t in reversed(range(len(rewards))):
        advantages[t] = deltas[t] + gamma * gae_lambda * torch.where(ended[t], 0, advantages[t + 1])
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
    kl: float = math.nan  # of the last iteration
    entropy: float = math.nan  # of the last iteration


def ppo_loss(agent: Agent, batch: Batch, args: Args, state: State) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss to minimise ([PPO], equation 9, negated), and metrics."""
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
    with torch.no_grad():  # approx_kl is k3 of Schulman 2020, "Approximating KL Divergence"
        metrics = {
            "policy_loss": policy_losses.mean(),
            "value_loss": value_losses.mean(),
            "entropy": entropies.mean(),
            "approx_kl": (ratio - 1 - log_ratio).mean(),
            "clipfrac": ((ratio - 1).abs() > state.clip_coef).float().mean(),
        }
    return loss, metrics


# ------------------------------------------------- Algorithm ------------------------------------------------


class Rollout:
    """T steps of N environments, in arrays that are reused: the next rollout starts where this one ends.

    When step t ends an episode, obs[t+1] is its last state, so the value there is row t+1 of the values. Step
    t+1 then ignores its action, returns a reward of 0, and only resets the environment
    (AutoresetMode.NEXT_STEP of Gymnasium). It is a filler row: not valid, and not learnt from.

        step   t       t+1     t+2
        obs    s       last s  first s of the next episode
        end    yes     no      no
        valid  yes     no      yes
    """

    def __init__(self, args: Args, obs_size: int, num_actions: int):
        shape = args.num_steps, args.num_envs
        self.obs = np.zeros((args.num_steps + 1, args.num_envs, obs_size), np.float32)
        self.policies = torch.zeros(*shape, num_actions, device=args.device)  # π_old(·|s)
        self.actions = np.zeros(shape, np.int64)
        self.rewards = np.zeros(shape, np.float32)
        self.terminated = np.zeros(shape, bool)
        self.truncated = np.zeros(shape, bool)
        self.valid = np.zeros(shape, bool)
        self.discounted_returns = np.zeros(shape, np.float32)  # for scale_rewards
        # What the environments reported in each step. Gymnasium joins it, with the type of the first value:
        # if environment 0 reports 0, and not 0.0, then 0.5 of environment 1 becomes 0.
        self.infos = [{}] * args.num_steps


@torch.inference_mode()
def collect_rollout(envs: VectorEnv, agent: Agent, rollout: Rollout, args: Args) -> list[tuple[float, int]]:
    """Fill the rollout with the next T steps. Returns the return and length of each episode that ended."""
    obs, actions, rewards, valid = rollout.obs, rollout.actions, rollout.rewards, rollout.valid
    terminated, truncated = rollout.terminated, rollout.truncated
    episodes = []
    obs[0] = obs[-1]
    valid[0] = ~(terminated[-1] | truncated[-1])  # of the previous rollout
    # argmax(log π + noise) is a sample from π (the Gumbel-max trick); all the noise at once is faster.
    noise = -torch.empty(*actions.shape, envs.single_action_space.n).exponential_().log().to(args.device)
    for t, step_noise in enumerate(noise):
        policy = agent.policy(agent.normalize(torch.as_tensor(obs[t], device=args.device)))
        rollout.policies[t] = policy
        actions[t] = (policy + step_noise).argmax(-1).cpu().numpy()
        obs[t + 1], rewards[t], terminated[t], truncated[t], info = envs.step(actions[t])
        rollout.infos[t] = info
        if "episode" in info:
            ended = info["_episode"]
            episodes += zip(info["episode"]["r"][ended], info["episode"]["l"][ended], strict=True)
    valid[1:] = ~(terminated | truncated)[:-1]
    if not (np.isfinite(rewards).all() and np.isfinite(obs[1:][~terminated]).all()):
        raise FloatingPointError("a reward or an observation is NaN or infinite: look at the environment")
    return episodes


def scale_rewards(agent: Agent, rollout: Rollout, args: Args) -> Tensor:
    """Rewards [T, N] divided by the running std of the discounted return, then clipped to ±10.

    The discounted return is R_t = γ R_{t-1} + r_t, starting from 0 in each episode ([Matters], §3).
    """
    returns = rollout.discounted_returns
    for t in range(args.num_steps):  # for t = 0, returns[-1] is the last row of the previous rollout
        returns[t] = (args.gamma * returns[t - 1] + rollout.rewards[t]) * rollout.valid[t]
    agent.return_moments.update(torch.as_tensor(returns[rollout.valid], device=args.device).unsqueeze(-1))
    rewards = torch.as_tensor(rollout.rewards, device=args.device)
    return (rewards * torch.rsqrt(agent.return_moments.var + 1e-8)).clamp(-10, 10)


@torch.no_grad()
def make_batch(agent: Agent, rollout: Rollout, args: Args) -> Batch:
    """Estimate the advantages of a rollout, and flatten it to a batch without filler rows."""
    tensor = partial(torch.as_tensor, device=args.device)
    raw_obs, actions, valid = tensor(rollout.obs), tensor(rollout.actions), tensor(rollout.valid)
    terminated, truncated = tensor(rollout.terminated), tensor(rollout.truncated)
    rewards = scale_rewards(agent, rollout, args) if args.norm_rewards else tensor(rollout.rewards)
    obs = agent.normalize(raw_obs)
    values = agent.value(obs)
    advantages, returns = compute_gae(rewards, values, terminated, truncated, args.gamma, args.gae_lambda)
    agent.obs_moments.update(raw_obs[:-1][valid])  # only now: acting and learning use the same statistics
    columns = obs[:-1], actions, rollout.policies, values[:-1], advantages, returns
    return Batch(*(column[valid] for column in columns))


@torch.no_grad()
def distance_moved(agent: Agent, batch: Batch) -> float:
    """KL divergence of the current policy from the one that acted, in nats."""
    return kl_divergence(batch.old_policy, agent.policy(batch.obs)).mean().item()


def update(agent: Agent, optimizer: Adam, batch: Batch, args: Args, state: State) -> dict[str, float]:
    """K epochs of gradient steps on shuffled minibatches. Returns mean metrics."""
    errors = batch.returns - batch.old_values
    metrics = {
        "charts/learning_rate": state.learning_rate,
        "charts/clip_coef": state.clip_coef,
        "charts/kl_coef": state.kl_coef,
        "charts/ent_coef": state.ent_coef,
        "explained_variance": 1 - (errors.var(correction=0) / batch.returns.var(correction=0)).item(),
        "critic_error": (errors.square().mean() / batch.returns.square().mean()).sqrt().item(),
    }
    optimizer.param_groups[0]["lr"] = state.learning_rate
    steps = []  # metrics of each, still as tensors: reading them would wait for the GPU
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.obs)).to(args.device)
        for rows in order.tensor_split(args.num_minibatches):
            minibatch = Batch(*(column[rows] for column in batch))
            loss, step_metrics = ppo_loss(agent, minibatch, args, state)
            optimizer.zero_grad()
            loss.backward()
            step_metrics["grad_norm"] = nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
            optimizer.step()
            steps.append(step_metrics)
        if args.target_kl is not None and distance_moved(agent, batch) > args.target_kl:
            break
    for name in steps[0]:
        metrics[name] = torch.stack([each[name] for each in steps]).mean().item()
    metrics["first_approx_kl"] = steps[0]["approx_kl"].item()  # before the first step: 0, up to rounding
    metrics["kl"] = distance_moved(agent, batch)
    return metrics


def adjust_coefficients(state: State, args: Args) -> None:
    """Set the coefficients of an iteration, by their schedules and the metrics of the last one, if any."""
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
    rate = 1.5 if args.adapt == "learning-rate" else 2.0  # of Rudin et al. 2022, and of [PPO], §4
    caution = 1.0  # above 1, the next update becomes smaller
    if state.kl > 1.5 * args.desired_kl:
        caution = rate
    elif state.kl < args.desired_kl / 1.5:
        caution = 1 / rate
    if args.adapt == "kl-coef":
        state.kl_coef = min(max(state.kl_coef * caution, 1e-4), 1e4)
    elif args.adapt == "clip-coef":
        state.clip_coef = min(max(state.clip_coef / caution, 0.01), 0.3)
    elif args.adapt == "learning-rate" and not math.isnan(state.kl):  # not in the first iteration
        state.learning_rate = min(max(state.learning_rate / caution, 1e-5), scheduled_lr)
    if args.target_entropy is not None:
        if state.entropy > args.target_entropy + 0.05:
            state.ent_coef = max(state.ent_coef / 1.1, 1e-5)
        elif state.entropy < args.target_entropy - 0.05:
            state.ent_coef = min(max(state.ent_coef * 1.1, 1e-5), 10.0)


def train(args: Args) -> dict:
    """PPO ([PPO], Algorithm 1), then a greedy evaluation. If it is stopped, at most a minute is lost.

    Returns "checkpoint" (its path), "training_return" (of the last 100 episodes) and "greedy_returns". Raises
    `ValueError` for invalid settings. With `resume`, the other settings are still those of `args`.
    """
    check_args(args)
    torch.set_num_threads(1)  # for small networks, one is fastest
    envs = make_envs(args)
    if envs.metadata.get("autoreset_mode") is not AutoresetMode.NEXT_STEP:
        raise ValueError("the environments must reset in the next step: see Rollout")
    env_seed = seed_everything(args.seed)
    obs_space, num_actions = envs.single_observation_space, int(envs.single_action_space.n)
    agent = Agent(args, obs_space, num_actions).to(args.device)
    optimizer = Adam(agent.parameters(), args.learning_rate, eps=1e-5, fused=True)  # ε: [37], detail 3
    state = State(args.learning_rate, args.clip_coef, args.kl_coef, args.ent_coef)
    rollout = Rollout(args, obs_space.shape[0], num_actions)
    if args.resume:
        restore(args.resume, agent, optimizer, state)
    run = Run(args, agent, optimizer, state)

    # Where the first rollout starts. Some simulators take seeds below 2**31 only.
    rollout.obs[-1], _ = envs.reset(seed=(env_seed + state.global_step) % 2**31)
    while state.global_step < args.total_timesteps:
        adjust_coefficients(state, args)
        episodes = collect_rollout(envs, agent, rollout, args)
        batch = make_batch(agent, rollout, args)
        metrics = update(agent, optimizer, batch, args, state)
        state.global_step += len(batch.obs)
        state.kl, state.entropy = metrics["kl"], metrics["entropy"]
        run.log(metrics, episodes)
    envs.close()
    return run.finish()


# ========================== End of PPO. What follows is what training needs around it ======================


def seed_everything(seed: int) -> int:
    """Seed all random generators, and return a seed for the environments."""
    for function in (random.seed, np.random.seed, torch.manual_seed):
        function(seed)
    # A hash, because Gymnasium seeds environment i with this + i: seeds 1 and 2 would share most of them.
    return int(np.random.SeedSequence(seed).generate_state(1)[0]) >> 1


def check_args(args: Args) -> None:
    """Raise `ValueError` for invalid settings."""
    size = args.num_envs * args.num_steps
    sizes = size, args.num_minibatches, args.update_epochs, args.hidden_size, args.eval_episodes
    devices = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    for wrong, reason in [
        (min(*sizes, args.total_timesteps) < 1 or args.seed < 0, "sizes must be positive, --seed at least 0"),
        (4 * args.num_minibatches > size, f"--num-minibatches must be at most {size // 4} for this rollout"),
        (args.adapt == "kl-coef" and args.surrogate == "clip", "kl-coef needs --surrogate kl-penalty"),
        (args.capture_video and not find_spec("moviepy"), "--capture-video needs: pip install moviepy"),
        (args.track and not find_spec("wandb"), "--track needs: pip install wandb"),
        (not devices.get(args.device.split(":")[0]), f"--device {args.device} is not there; use cpu"),
        (re.search("^ALE/|NoFrameskip", args.env_id), f"{args.env_id} is an Atari game: use ppo_atari.py"),
    ]:
        if wrong:
            raise ValueError(reason)
    try:
        env = make_env(args, **({"render_mode": "rgb_array"} if args.capture_video else {}))
    except (ValueError, TypeError) as error:
        raise ValueError(f"--env-kwargs {args.env_kwargs}: {error}") from error
    env.close()
    actions = env.action_space
    if not isinstance(actions, gym.spaces.Discrete) or actions.start != 0:
        raise ValueError(f"{args.env_id} has {actions}: see ppo_continuous.py (Box) or docs/recipes.md")
    if path := args.resume or args.evaluate:
        try:
            load_policy(path, env)
        except RuntimeError as error:
            raise ValueError(f"{path} is of another script, or not for {args.env_id}") from error


# ------------------------------------------------- Environments --------------------------------------------


def make_env(args: Args, **kwargs) -> gym.Env:
    """One environment. Put your own here, or wrappers; --env-id is then only a name."""
    return gym.make(args.env_id, **json.loads(args.env_kwargs) | kwargs)


def make_envs(args: Args) -> VectorEnv:
    """N environments, in this process or in one each. Observations are flat, dicts in alphabetical order."""
    seed = seed_everything(args.seed)

    def make(index: int) -> gym.Env:
        seed_everything(seed + index)  # a process needs its own random numbers
        return gym.wrappers.RecordEpisodeStatistics(gym.wrappers.FlattenObservation(make_env(args)))

    vectorize = AsyncVectorEnv if args.async_envs else SyncVectorEnv
    return vectorize([partial(make, index) for index in range(args.num_envs)])


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
        rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        self.writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")
        # A copy of this file, so that `plot.py` tells runs of changed copies apart.
        Path(folder, Path(__file__).name).write_bytes(Path(__file__).read_bytes())
        self.returns: list[float] = []  # of the last 100 episodes
        self.average = math.nan  # their mean
        self.warned = False
        self.first_time, self.first_step, self.last_print = time.monotonic(), state.global_step, 0.0
        self.save()

    def save(self) -> None:
        """Write a checkpoint. If the process is killed meanwhile, the previous one is still there."""
        self.writer.flush()  # first, so that the curves have no gap where training resumes
        content = {"args": asdict(self.args), "state": asdict(self.state), "random": torch.get_rng_state()}
        content |= {"agent": self.agent.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(content, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)
        self.last_save = time.monotonic()

    def log(self, metrics: dict[str, float], episodes: list[tuple[float, int]]) -> None:
        """Log an iteration, print progress, and save a checkpoint every minute."""
        stuck = metrics["grad_norm"] == 0 and not self.last_print  # in the first iteration
        if stuck or not math.isfinite(metrics["kl"] + metrics["grad_norm"]):
            raise FloatingPointError("the gradient is 0 or not finite: look at the loss and --learning-rate")
        if metrics["first_approx_kl"] > 1e-4 and not self.warned:  # correct runs have up to 1e-8
            print("KL > 0 before the first gradient step: acting and learning do not compute the same policy")
            self.warned = True
        args, step, now = self.args, self.state.global_step, time.monotonic()
        scalars = {name if "/" in name else f"losses/{name}": value for name, value in metrics.items()}
        if episodes:
            returns, lengths = np.transpose(episodes)
            self.returns = [*self.returns, *returns.tolist()][-100:]
            scalars["charts/episodic_return"] = returns.mean()
            scalars["charts/episodic_return_std"] = returns.std()
            scalars["charts/episodic_return_min"] = returns.min()
            scalars["charts/episodic_return_max"] = returns.max()
            scalars["charts/episodic_return_100"] = self.average = float(np.mean(self.returns))
            scalars["charts/episodic_length"] = lengths.mean()
        scalars["charts/SPS"] = speed = (step - self.first_step) / (now - self.first_time)
        for tag, value in scalars.items():
            self.writer.add_scalar(tag, value, step)
        if step >= args.total_timesteps or now - self.last_print > 5:
            self.last_print = now
            shown = f"return {self.average:.5g}" if self.returns else "no episode has ended yet"
            minutes = max(args.total_timesteps - step, 0) / speed / 60
            line = f"{step:>10,} steps  {shown}  KL {max(metrics['kl'], 0):.4f}"
            print(f"{line}  {speed:,.0f}/s  {minutes:.0f} min left", flush=True)
        if now - self.last_save > 60:
            self.save()

    def finish(self) -> dict:
        """Save, evaluate, and close the log. Returns the results."""
        self.save()
        returns = evaluate(self.path, self.args)
        self.writer.add_scalar("eval/greedy_return", returns.mean(), self.state.global_step)
        self.writer.close()
        return {"checkpoint": str(self.path), "training_return": self.average, "greedy_returns": returns}


def load_checkpoint(path: str | Path, device: str = "cpu") -> tuple[Args, dict]:
    """The settings and the whole content of a checkpoint. Raises `ValueError` for any other file."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        known = {name: value for name, value in content["args"].items() if hasattr(Args, name)}
        return Args(**known), content
    except (pickle.UnpicklingError, EOFError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a checkpoint of this script") from error


def restore(path: str, agent: Agent, optimizer: Adam, state: State) -> None:
    """Continue the training in which this checkpoint was saved."""
    _, content = load_checkpoint(path)
    agent.load_state_dict(content["agent"])
    optimizer.load_state_dict(content["optimizer"])
    torch.set_rng_state(content["random"])
    vars(state).update(content["state"])


def load_policy(path: str | Path, env: gym.Env, device: str = "cpu") -> Callable:
    """A trained policy, as a function from the environment's observations to the most likely actions.

    It takes one observation or, if the space is a `Box`, a batch of them.
    """
    args, content = load_checkpoint(path, device)
    space, num_actions = env.observation_space, int(env.action_space.n)
    agent = Agent(args, gym.spaces.flatten_space(space), num_actions).to(device).eval()
    agent.load_state_dict(content["agent"])

    @torch.inference_mode()
    def act(obs: Any) -> np.ndarray:
        batch = isinstance(space, gym.spaces.Box) and np.ndim(obs) > len(space.shape)
        flat = np.reshape(obs, (len(obs), -1)) if batch else gym.spaces.flatten(space, obs)
        flat = torch.as_tensor(flat, dtype=torch.float32, device=device)
        return agent.policy(agent.normalize(flat)).argmax(-1).cpu().numpy()[()]

    return act


def evaluate(path: str | Path, args: Args) -> np.ndarray:
    """Play --eval-episodes episodes with the most likely actions; print and return their returns."""
    env = make_env(args, **({"render_mode": "rgb_array"} if args.capture_video else {}))
    if args.capture_video:
        env = gym.wrappers.RecordVideo(env, str(Path(path).parent / "videos"), lambda episode: True)
    act = load_policy(path, env, args.device)
    seed = (seed_everything(args.seed) + 2**30) % 2**31  # episodes that training has not seen
    returns = np.zeros(args.eval_episodes)
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=seed + episode)
        for _ in range(10_000):  # some environments never end
            obs, reward, terminated, truncated, _ = env.step(act(obs))
            returns[episode] += reward
            if terminated or truncated:
                break
        else:
            print(f"episode {episode + 1} was stopped after 10,000 steps")
    env.close()
    print(f"evaluation return {returns.mean():.5g} ± {returns.std():.3g} with the most likely actions")
    return returns


def parse_args() -> Args:
    """The settings of the command line; with --resume or --evaluate, the others are the checkpoint's."""
    description = __doc__.partition("\n  [PPO]")[0]
    args = tyro.cli(Args, description=description)
    if path := args.resume or args.evaluate:
        saved, _ = load_checkpoint(path)
        if ":" in saved.env_id and args.env_id != saved.env_id:
            raise ValueError(f"{path} imports a module; if you trust it, add --env-id {saved.env_id}")
        of_this_run = "resume", "evaluate", "track", "capture_video", "device"
        default = replace(saved, **{name: getattr(Args, name) for name in of_this_run})
        args = tyro.cli(Args, description=description, default=default)
    check_args(args)
    return args


def print_commands(args: Args, path: str) -> None:
    """Say how to resume a run, to watch its agent, and to check it."""
    script = Path(sys.argv[0])
    module = f" --env-id {args.env_id}" if ":" in args.env_id else ""  # a checkpoint imports none by itself
    print(f"resume: python {script} --resume {path}{module} --total-timesteps {2 * args.total_timesteps:.0f}")
    print(f"watch:  python {script} --evaluate {path}{module} --capture-video")
    if (coach := script.with_name("coach.py")).exists():  # not beside a copy
        print(f"check:  python {coach} check {Path(path).parent}")


def main() -> None:
    """The command line. Invalid settings end with exit status 2."""
    sys.path.append(".")  # where the `module:` of --env-id is looked for, too
    try:
        args = parse_args()
    except (ValueError, OSError, ImportError, gym.error.Error) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    if args.evaluate:
        evaluate(args.evaluate, args)
    else:
        print_commands(args, train(args)["checkpoint"])


if __name__ == "__main__":
    main()
