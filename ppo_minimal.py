# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.5", "gymnasium[classic-control]>=1.1", "numpy", "tensorboard", "tyro>=0.9.1"]
# ///
"""Proximal Policy Optimization (PPO) in 200 lines, to read beside the paper.

    python ppo_minimal.py                           # solves CartPole in a minute
    python ppo_minimal.py --env-id Acrobot-v1       # any with Discrete actions, numbered from 0
    tensorboard --logdir runs                       # its curves

This is the whole algorithm. `ppo.py` has the same equations, and adds normalisation of observations and
rewards, the KL penalty of the paper, evaluation, checkpoints and speed. A test checks that with equal
settings both learn the same weights, up to rounding, over several iterations.

  [PPO] Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE] Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
        arXiv:1506.02438

Shapes: T steps per rollout, N environments, B = T x N transitions, D numbers per observation.
"""

import time
from dataclasses import dataclass

import gymnasium as gym
import numpy as np
import torch
import tyro
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import FlattenObservation
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:
    env_id: str = "CartPole-v1"  # Gymnasium id of an environment with Discrete actions
    seed: int = 1  # random seed
    total_timesteps: int = 100_000  # total number of transitions, rounded up to whole rollouts
    num_envs: int = 8  # N: environments that step in parallel
    num_steps: int = 128  # T: steps of each environment per rollout
    learning_rate: float = 1e-3  # Adam's step size; decays linearly to 0, in [PPO] only for Atari
    gamma: float = 0.99  # γ: discount factor
    gae_lambda: float = 0.95  # λ: 0 gives advantages of little variance but much bias, 1 the reverse
    update_epochs: int = 10  # K: passes over each rollout
    num_minibatches: int = 4  # minibatches per epoch, one gradient step each
    clip_coef: float = 0.2  # ε: nothing is gained by moving the ratio of new to old probability beyond 1 ± ε
    vf_coef: float = 0.5  # c₁: weight of the value loss
    ent_coef: float = 0.01  # c₂: weight of the entropy bonus
    max_grad_norm: float = 0.5  # clip the gradient to this norm; not in [PPO]


class Agent(nn.Module):
    """The actor π(a|s) and the critic V(s): two networks that share no weights, trained by one loss."""

    def __init__(self, obs_size: int, num_actions: int):
        super().__init__()
        self.actor = mlp(obs_size, num_actions, last_gain=0.01)  # small weights: nearly uniform at first
        self.critic = mlp(obs_size, 1, last_gain=1.0)

    def policy(self, obs: Tensor) -> Categorical:
        return Categorical(logits=self.actor(obs))

    def value(self, obs: Tensor) -> Tensor:
        return self.critic(obs).squeeze(-1)


def mlp(inputs: int, outputs: int, last_gain: float) -> nn.Sequential:
    """Two tanh layers and a linear one, as in [PPO]. Orthogonal weights and zero biases are not in [PPO]."""
    layers = nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)
    for layer, gain in zip(layers, (2**0.5, 2**0.5, last_gain), strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages and returns [T, N] by generalised advantage estimation ([GAE], eq. 16; [PPO], eq. 11, 12).

    δ_t = r_t + γ V(s_{t+1}) - V(s_t), but no V(s_{t+1}) if terminated: no reward follows
    A_t = δ_t + γλ A_{t+1}, but no A_{t+1} if terminated or truncated: it is of the next episode
    return_t = A_t + V(s_t), the critic's target

    A time limit (truncated) is not part of the task: more reward would have followed, so V(s_{t+1}) counts,
    unless the same step is terminated, too. [PPO] does not speak of time limits.
    """
    deltas = rewards + gamma * next_values * ~terminated - values
    ended = terminated | truncated
    advantages = torch.zeros_like(deltas)
    advantage = torch.zeros_like(deltas[0])  # A_T = 0: the rollout ends, and the last δ has V(s_T)
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + gamma * gae_lambda * advantage * ~ended[t]
        advantages[t] = advantage
    return advantages, advantages + values


def ppo_loss(
    agent: Agent, obs: Tensor, actions: Tensor, old_log_probs: Tensor, advantages: Tensor, returns: Tensor,
    args: Args,
) -> tuple[Tensor, dict[str, Tensor]]:  # fmt: skip
    """The loss of a minibatch, which is -(L^CLIP - c₁ L^VF + c₂ S) ([PPO], equation 9), and metrics."""
    policy, values = agent.policy(obs), agent.value(obs)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # not in [PPO]

    log_ratio = policy.log_prob(actions) - old_log_probs
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s): 1 in an iteration's first step, up to rounding
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    # -L^CLIP, equation 7. Where A > 0 and ratio > 1 + ε, or A < 0 and ratio < 1 - ε, min takes the clipped
    # term, a constant: no gradient. Beyond the other limit it takes the other term, which pulls back.
    policy_loss = -torch.min(ratio * advantages, clipped_ratio * advantages).mean()
    value_loss = 0.5 * (values - returns).square().mean()  # L^VF; [PPO] has no 0.5
    entropy = policy.entropy().mean()  # S

    loss = policy_loss + args.vf_coef * value_loss - args.ent_coef * entropy
    metrics = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": entropy,
        "approx_kl": (ratio - 1 - log_ratio).mean(),  # estimates KL(π_old ‖ π): how far the policy has moved
        "clipfrac": ((ratio - 1).abs() > args.clip_coef).float().mean(),  # share of ratios beyond 1 ± ε
    }
    return loss, metrics


def train(args: Args) -> Agent:
    """[PPO], Algorithm 1. Each iteration collects B transitions, and learns from them alone."""
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # fastest for small networks
    # SAME_STEP: a step that ends an episode returns the first observation of the next one. The last
    # observation of the old one is in infos["final_obs"].
    makers = [lambda: FlattenObservation(gym.make(args.env_id))] * args.num_envs
    envs = SyncVectorEnv(makers, autoreset_mode=AutoresetMode.SAME_STEP)
    obs_size, num_actions = envs.single_observation_space.shape[0], envs.single_action_space.n
    agent = Agent(obs_size, num_actions)
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5)  # eps: not in [PPO]
    writer = SummaryWriter(f"runs/{args.env_id}__ppo_minimal__{args.seed}__{time.time():.0f}")
    table = "\n".join(f"|{name}|{value}|" for name, value in vars(args).items())
    writer.add_text("settings", f"|setting|value|\n|-|-|\n{table}")

    shape = args.num_steps, args.num_envs  # [T, N]
    obs = torch.zeros(*shape, obs_size)  # s_t
    actions = torch.zeros(shape, dtype=torch.long)  # a_t
    old_log_probs = torch.zeros(shape)  # log π_old(a_t|s_t): all that the loss needs of π_old
    rewards = torch.zeros(shape)  # r_t
    next_obs = torch.zeros(*shape, obs_size)  # s_{t+1}, also where it is the last of an episode
    terminated = torch.zeros(shape, dtype=torch.bool)  # the task ended the episode at s_{t+1}
    truncated = torch.zeros(shape, dtype=torch.bool)  # a time limit ended it there
    current_obs, _ = envs.reset(seed=args.seed)  # environment n gets seed + n
    episode_return, episode_length = np.zeros(args.num_envs), np.zeros(args.num_envs)  # so far

    batch_size = args.num_steps * args.num_envs  # B
    for global_step in range(0, args.total_timesteps, batch_size):
        # 1. Run the policy for T steps in N environments. It is π_old until step 3 changes the weights.
        episodes = []  # return (sum of rewards) and length of each that ends in this iteration
        for t in range(args.num_steps):
            obs[t] = torch.as_tensor(current_obs)
            with torch.no_grad():
                policy = agent.policy(obs[t])
                actions[t] = policy.sample()
                old_log_probs[t] = policy.log_prob(actions[t])
            current_obs, reward, termination, truncation, infos = envs.step(actions[t].numpy())
            next_obs[t], rewards[t] = torch.as_tensor(current_obs), torch.as_tensor(reward)
            terminated[t], truncated[t] = torch.as_tensor(termination), torch.as_tensor(truncation)
            episode_return += reward
            episode_length += 1
            for n in np.flatnonzero(termination | truncation):  # current_obs[n] is of the next episode
                next_obs[t, n] = torch.as_tensor(infos["final_obs"][n])
                episodes.append((episode_return[n], episode_length[n]))
                episode_return[n] = episode_length[n] = 0

        # 2. Estimate the advantages: how much better each action was than the policy's average.
        with torch.no_grad():  # advantages and returns are constants in the loss
            values, next_values = agent.value(obs), agent.value(next_obs)
        advantages, returns = compute_gae(
            rewards, values, next_values, terminated, truncated, args.gamma, args.gae_lambda
        )

        # 3. Optimise the loss: K epochs of gradient steps on shuffled minibatches.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - global_step / args.total_timesteps)
        batch = [x.flatten(0, 1) for x in (obs, actions, old_log_probs, advantages, returns)]  # [B, ...]
        for _ in range(args.update_epochs):
            for rows in torch.randperm(batch_size).tensor_split(args.num_minibatches):
                loss, metrics = ppo_loss(agent, *(x[rows] for x in batch), args)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

        # 4. Log metrics of the last minibatch, and means over the episodes that ended.
        steps = global_step + batch_size
        # 1 if V predicts the returns, 0 if it does no better than a constant.
        metrics["explained_variance"] = 1 - (returns - values).var() / returns.var()
        for name, metric in metrics.items():
            writer.add_scalar(f"losses/{name}", metric, steps)
        if episodes:
            mean_return, mean_length = np.mean(episodes, axis=0)
            writer.add_scalar("charts/episodic_return", mean_return, steps)
            writer.add_scalar("charts/episodic_length", mean_length, steps)
            print(f"{steps:>8,} steps  return {mean_return:.1f}", flush=True)
    envs.close()
    writer.close()
    return agent


if __name__ == "__main__":
    train(tyro.cli(Args, description=__doc__))
