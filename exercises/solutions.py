"""An answer to each exercise. A test compares them with the scripts and with torch.distributions."""

import torch
from torch import Tensor, nn


def log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def ratio(logits: Tensor, actions: Tensor, old_log_probs: Tensor) -> Tensor:
    return (log_prob(logits, actions) - old_log_probs).exp()


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    returns = torch.zeros_like(rewards)
    following = 0.0
    for t in reversed(range(len(rewards))):
        following = rewards[t] + gamma * following
        returns[t] = following
    return returns


def td_errors(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, gamma: float
) -> Tensor:
    return rewards + gamma * next_values * ~terminated - values


def gae(deltas: Tensor, ended: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    advantages = torch.zeros_like(deltas)
    advantage = torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + gamma * gae_lambda * advantage * ~ended[t]
        advantages[t] = advantage
    return advantages


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    deltas = td_errors(rewards, values, next_values, terminated, gamma)
    advantages = gae(deltas, terminated | truncated, gamma, gae_lambda)
    return advantages, advantages + values


def normalize_advantages(advantages: Tensor) -> Tensor:
    if len(advantages) == 1:
        return torch.zeros_like(advantages)  # the deviation of one number is NaN
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def clipped_loss(ratios: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    clipped_ratios = ratios.clamp(1 - clip_coef, 1 + clip_coef)
    return -torch.min(ratios * advantages, clipped_ratios * advantages).mean()


def has_gradient(ratios: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    too_likely = (advantages > 0) & (ratios > 1 + clip_coef)
    too_unlikely = (advantages < 0) & (ratios < 1 - clip_coef)
    return ~(too_likely | too_unlikely)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float) -> Tensor:
    clipped_values = old_values + (values - old_values).clamp(-clip_coef, clip_coef)
    squared_error = (values - returns).square()
    clipped_squared_error = (clipped_values - returns).square()
    return 0.5 * torch.max(squared_error, clipped_squared_error).mean()


def entropy(logits: Tensor) -> Tensor:
    log_probs = logits.log_softmax(-1)
    # 0 times -inf is NaN, in the sum and in the gradient: so the lowest float stands in the place of -inf.
    finite = log_probs.clamp(min=torch.finfo(logits.dtype).min)
    return -(log_probs.exp() * finite).sum(-1)


def kl_divergence(old_logits: Tensor, logits: Tensor) -> Tensor:
    old_log_probs, log_probs = old_logits.log_softmax(-1), logits.log_softmax(-1)
    return (old_log_probs.exp() * (old_log_probs - log_probs)).sum(-1)


def kl_estimates(old_log_probs: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    log_ratio = log_probs - old_log_probs
    return -log_ratio.mean(), (log_ratio.exp() - 1 - log_ratio).mean()


def adapt_kl_coef(kl_coef: float, kl: float, target: float) -> float:
    if kl > 1.5 * target:
        return 2 * kl_coef
    if kl < target / 1.5:
        return kl_coef / 2
    return kl_coef


def update_moments(
    mean: Tensor, var: Tensor, count: int, new: Tensor
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    new_mean, new_var, total = new.mean(0), new.var(0, correction=0), count + len(new)
    share = len(new) / total
    difference = new_mean - mean
    combined = (1 - share) * var + share * new_var + share * (1 - share) * difference.square()
    return mean + share * difference, combined, total


def make_minibatches(batch_size: int, num_minibatches: int) -> list[Tensor]:
    return list(torch.randperm(batch_size).tensor_split(num_minibatches))


def update(
    agent: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], epochs: list[list[Tensor]],
    clip_coef: float, vf_coef: float, ent_coef: float, max_grad_norm: float,
) -> None:  # fmt: skip
    for minibatches in epochs:
        for rows in minibatches:
            obs, actions, old_log_probs, advantages, returns = (x[rows] for x in batch)
            logits = agent.actor(obs)
            values = agent.critic(obs).squeeze(-1)
            ratios = ratio(logits, actions, old_log_probs)
            loss = clipped_loss(ratios, normalize_advantages(advantages), clip_coef)
            loss = loss + vf_coef * 0.5 * (values - returns).square().mean()
            loss = loss - ent_coef * entropy(logits).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
            optimizer.step()


def response_mask(tokens: Tensor, stop_token: int) -> Tensor:
    is_stop = (tokens == stop_token).long()
    stops_before = is_stop.cumsum(-1) - is_stop  # before this token, without it
    return stops_before == 0


def token_rewards(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:  # fmt: skip
    rewards = -kl_coef * (log_probs - ref_log_probs) * mask
    last = mask.sum(-1) - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def group_advantages(scores: Tensor) -> Tensor:
    centered = scores - scores.mean(-1, keepdim=True)
    return centered / (scores.std(-1, keepdim=True) + 1e-4)
