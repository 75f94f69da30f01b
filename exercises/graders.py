"""Cases on which the exercises are tried, and typical wrong answers, each with what is wrong with it.

These are spoilers: read solutions.py instead if you want to see answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import solutions
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

Inputs = tuple[Any, ...]
IN_PLACE = "An argument is changed in place, which the caller still needs."


class Wrong(ValueError):  # noqa: N818
    """What is wrong, where the output cannot be compared at all."""


def one(function: Callable, inputs: Inputs) -> Any:
    """The result of a function that returns one."""
    with torch.enable_grad():
        result = function(*inputs)
    if isinstance(result, list | tuple):
        raise Wrong("Return one tensor, not a list or a tuple (torch.stack makes one of many).")
    return result


def several(function: Callable, inputs: Inputs) -> Any:
    """The results of a function that returns several: a tuple, unless the function is wrong."""
    with torch.enable_grad():
        results = function(*inputs)
    return tuple(results) if isinstance(results, list) else results


@dataclass(frozen=True)
class Exercise:
    """How to grade one function."""

    number: int  # of its section in exercises.py
    cases: dict[str, Inputs]
    wrong: dict[str, Callable]  # what is wrong: a function that does so
    observe: Callable[[Callable, Inputs], Any] = one
    parts: tuple[str, ...] = ()  # names of several results


def tensor(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def bools(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.bool)


def with_gradient(function: Callable, inputs: Inputs) -> tuple[Any, Tensor]:
    """The result, and the gradient of its sum with regard to the first input: 0 if it has none."""
    leaf = inputs[0].clone().requires_grad_()
    first = leaf.clone()
    result = one(function, (first, *inputs[1:]))
    if not torch.equal(first, inputs[0]):
        raise Wrong(IN_PLACE)
    if not isinstance(result, Tensor) or not result.requires_grad:
        return result, torch.zeros_like(leaf)
    (gradient,) = torch.autograd.grad(result.sum(), leaf, materialize_grads=True)
    return result.detach(), gradient


# 1. The ratio

ACTIONS = torch.tensor([2, 0, 1, 1])
LOGITS = random(4, 3)
OLD_LOG_PROBS = tensor(-1.5, -0.4, -1.2, -2.3)
UNLIKELY = tensor([0.0, 140.0, 3.0], [5.0, 0.0, 150.0])  # probabilities of e^-140, which is 0 in float32


def naive_log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    probs = logits.exp() / logits.exp().sum(-1, keepdim=True)
    return probs[torch.arange(len(actions)), actions].log()


def table_of_log_probs(logits: Tensor, actions: Tensor) -> Tensor:
    return logits.log_softmax(-1)[:, actions]


LOG_PROB = Exercise(
    1,
    {
        "4 rows": (LOGITS, ACTIONS),
        "1 row": (LOGITS[:1], ACTIONS[:1]),
        "logits of 200 and more": (200 + 100 * LOGITS, ACTIONS),
    },
    {
        "These are logits, not log-probabilities: the logarithm of the sum of their exponentials is missing (log_softmax).": (
            lambda logits, actions: logits.gather(-1, actions[:, None])[:, 0]
        ),
        "These are probabilities: their logarithm is missing.": (
            lambda logits, actions: solutions.log_prob(logits, actions).exp()
        ),
        "The sign: this is the cross-entropy, minus the log-probability.": (
            lambda logits, actions: F.cross_entropy(logits, actions, reduction="none")
        ),
        "This is one number, the mean over the batch: return one log-probability for each action.": (
            lambda logits, actions: solutions.log_prob(logits, actions).mean()
        ),
        "This is one number, the cross-entropy: return one log-probability for each action.": F.cross_entropy,
        "The softmax is over the batch, not over the actions: use dim=-1.": (
            lambda logits, actions: logits.log_softmax(0).gather(-1, actions[:, None])[:, 0]
        ),
        "This is a [B, B] table: indexing with [:, actions] takes every action in every state. Use gather, or a pair of indices.": (
            table_of_log_probs
        ),
        "This is [B, A], the log-probabilities of all actions: take those of the given ones (gather).": (
            lambda logits, actions: logits.log_softmax(-1)
        ),
        "The shape is [B, 1]: squeeze it, or the difference to a [B] tensor becomes a [B, B] table.": (
            lambda logits, actions: logits.log_softmax(-1).gather(-1, actions[:, None])
        ),
        "Large logits overflow: exp(200) is infinite in float32. log_softmax subtracts the largest first.": (
            naive_log_prob
        ),
        "Probabilities are divided by a sum over the whole batch: divide by that of their own state (dim=-1).": (
            lambda logits, actions: (
                solutions.log_prob(logits, actions) + logits.logsumexp(-1) - logits.logsumexp((0, 1))
            )
        ),
        "The logarithm of a softmax is -inf where the probability is 0 in float32: use log_softmax.": (
            lambda logits, actions: logits.softmax(-1).log().gather(-1, actions[:, None])[:, 0]
        ),
        "A small number is added to the probabilities before the logarithm, so that small ones are wrong: use log_softmax.": (
            lambda logits, actions: (logits.softmax(-1).gather(-1, actions[:, None])[:, 0] + 1e-8).log()
        ),
    },
    observe=with_gradient,
)
RATIO = Exercise(
    1,
    {
        "4 rows": (LOGITS, ACTIONS, OLD_LOG_PROBS),
        "1 row": (LOGITS[:1], ACTIONS[:1], OLD_LOG_PROBS[:1]),
        "probabilities of 1e-60": (UNLIKELY, torch.tensor([0, 1]), tensor(-140.2, -149.7)),
    },
    {
        "This is the logarithm of the ratio: exp is missing.": (
            lambda logits, actions, old: solutions.log_prob(logits, actions) - old
        ),
        "The ratio is upside down: the new probability is above, the old one below.": (
            lambda logits, actions, old: (old - solutions.log_prob(logits, actions)).exp()
        ),
        "This is the ratio of the log-probabilities. The ratio of probabilities is exp(log π - log π_old).": (
            lambda logits, actions, old: solutions.log_prob(logits, actions) / old
        ),
        "This is the difference of the probabilities, not their ratio.": (
            lambda logits, actions, old: solutions.log_prob(logits, actions).exp() - old.exp()
        ),
        "Tiny probabilities are 0 in float32, and 0 / 0 is NaN: subtract the log-probabilities first, then take exp.": (
            lambda logits, actions, old: solutions.log_prob(logits, actions).exp() / old.exp()
        ),
        "This is a [B, B] table by broadcasting: one of the log-probabilities is [B, 1], the other [B]. It would train, badly, without an error.": (
            lambda logits, actions, old: (solutions.log_prob(logits, actions)[:, None] - old).exp()
        ),
        "This is a [B, B] table: indexing with [:, actions] takes every action in every state. It would train, badly, without an error.": (
            lambda logits, actions, old: (table_of_log_probs(logits, actions) - old).exp()
        ),
        "The ratio is 1 everywhere: the policy is compared with itself, not with the one that acted.": (
            lambda logits, actions, old: torch.ones(len(actions))
        ),
        "This is the probability: it is not divided by the old one.": (
            lambda logits, actions, old: solutions.log_prob(logits, actions).exp()
        ),
        "These logits are not log-probabilities: the logarithm of the sum of their exponentials is missing (log_softmax).": (
            lambda logits, actions, old: (logits.gather(-1, actions[:, None])[:, 0] - old).exp()
        ),
        "A small number is added to the probabilities before the logarithm, so that tiny ones are wrong: use log_softmax.": (
            lambda logits, actions, old: (
                (logits.softmax(-1) + 1e-10).log().gather(-1, actions[:, None])[:, 0] - old
            ).exp()
        ),
        "A small number is added to the old probability, so that tiny ones are lost: subtract the log-probabilities, then take exp.": (
            lambda logits, actions, old: solutions.log_prob(logits, actions).exp() / (old.exp() + 1e-8)
        ),
    },
    observe=with_gradient,
)

# 2. Returns


def forwards(rewards: Tensor, gamma: float) -> Tensor:
    returns = rewards.clone()
    for t in range(1, len(rewards)):
        returns[t] = rewards[t] + gamma * returns[t - 1]
    return returns


def discounted_from_the_start(rewards: Tensor, gamma: float) -> Tensor:
    discounted = rewards * gamma ** torch.arange(len(rewards))
    return discounted.flip(0).cumsum(0).flip(0)


def one_discount(rewards: Tensor, gamma: float) -> Tensor:
    following = rewards.flip(0).cumsum(0).flip(0) - rewards
    return rewards + gamma * following


RETURNS = Exercise(
    2,
    {
        "rewards of 1, 0, 2": (tensor(1, 0, 2), 0.5),
        "a single reward": (tensor(3), 0.9),
        "γ = 1": (tensor(1, 2, -1, 4), 1.0),
        "γ = 0": (tensor(1, 2, -1, 4), 0.0),
        "7 rewards": (random(7), 0.9),
    },
    {
        "This goes forwards in time: a return sums what follows a step, so begin at the end.": forwards,
        "You discount from the first step of the episode, not from step t: G_t begins with r_t, undiscounted.": (
            discounted_from_the_start
        ),
        "Rewards are not discounted.": lambda rewards, gamma: rewards.flip(0).cumsum(0).flip(0),
        "Only the next reward counts here: all that follow do.": (
            lambda rewards, gamma: rewards + gamma * torch.cat([rewards[1:], 0 * rewards[:1]])
        ),
        "All following rewards are discounted by γ, however late: each further step adds a factor γ.": one_discount,
        "This is the return of the first step: return one for each step.": (
            lambda rewards, gamma: solutions.discounted_returns(rewards, gamma)[0]
        ),
        "Each step has the return of the first one: what was before step t is not part of G_t.": (
            lambda rewards, gamma: solutions.discounted_returns(rewards, gamma)[0].repeat(len(rewards))
        ),
        "The step's own reward is missing: G_t begins with r_t.": (
            lambda rewards, gamma: solutions.discounted_returns(rewards, gamma) - rewards
        ),
        "This is the return of the next step: G_t begins with r_t.": (
            lambda rewards, gamma: torch.cat(
                [solutions.discounted_returns(rewards, gamma)[1:], 0 * rewards[:1]]
            )
        ),
        "Discounted once too often: r_t itself has no factor.": (
            lambda rewards, gamma: gamma * solutions.discounted_returns(rewards, gamma)
        ),
        "The returns are in reverse order: the last step's comes first.": (
            lambda rewards, gamma: solutions.discounted_returns(rewards, gamma).flip(0)
        ),
        "The returns are normalised: that is not part of their definition.": (
            lambda rewards, gamma: solutions.normalize_advantages(
                solutions.discounted_returns(rewards, gamma)
            )
        ),
    },
)

# 3. Advantages

REWARDS, VALUES, LAST_VALUES = random(3, 4, 2, seed=1)
NO_END = torch.zeros(4, 2, dtype=torch.bool)
ENDS = bools([0, 0], [1, 0], [0, 1], [0, 0])
OTHERS = bools([0, 1], [0, 0], [1, 0], [0, 1])  # other ends, by a time limit


def critic(ended: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the states and of the ones after them, which are the next row's unless an episode ended."""
    following = torch.cat([VALUES[1:], LAST_VALUES[-1:]])
    return VALUES, torch.where(ended, LAST_VALUES, following)


TD_ERRORS = Exercise(
    3,
    {
        "no episode ends": (REWARDS, *critic(NO_END), NO_END, 0.9),
        "two steps are terminal": (REWARDS, *critic(ENDS), ENDS, 0.9),
        "time limits ended other episodes": (REWARDS, *critic(ENDS | OTHERS), ENDS, 0.9),
    },
    {
        "You bootstrap across the end of an episode: where `terminated`, V(s_{t+1}) counts as 0.": (
            lambda r, v, n, ended, gamma: r + gamma * n - v
        ),
        "The reward of the last step of an episode is lost: only V(s_{t+1}) counts as 0 there.": (
            lambda r, v, n, ended, gamma: (r + gamma * n) * ~ended - v
        ),
        "δ is 0 at the end of an episode: only V(s_{t+1}) counts as 0 there.": (
            lambda r, v, n, ended, gamma: (r + gamma * n - v) * ~ended
        ),
        "V(s_t) counts as 0 at the end of an episode, too: only V(s_{t+1}) does.": (
            lambda r, v, n, ended, gamma: r + (gamma * n - v) * ~ended
        ),
        "V(s_t) counts as 0 at the end of an episode, in the place of V(s_{t+1}).": (
            lambda r, v, n, ended, gamma: r + gamma * n - v * ~ended
        ),
        "`terminated` is the wrong way round: V(s_{t+1}) counts where the episode ended, and only there.": (
            lambda r, v, n, ended, gamma: r + gamma * n * ended - v
        ),
        "The sign: δ is positive if it went better than the critic expected.": (
            lambda *inputs: -solutions.td_errors(*inputs)
        ),
        "V(s_{t+1}) is not discounted by γ.": lambda r, v, n, ended, gamma: r + n * ~ended - v,
        "V(s_t) is discounted, too: only V(s_{t+1}) is one step later.": (
            lambda r, v, n, ended, gamma: r + gamma * (n * ~ended - v)
        ),
        "V(s_t) is missing: this is the target r + γ V(s_{t+1}), not the error.": (
            lambda r, v, n, ended, gamma: r + gamma * n * ~ended
        ),
        "V(s_{t+1}) is missing: this is the reward minus V(s_t).": lambda r, v, n, ended, gamma: r - v,
        "V(s_{t+1}) and V(s_t) are swapped.": lambda r, v, n, ended, gamma: r + gamma * v * ~ended - n,
        "The last step of the rollout has no V(s_{t+1}): the rollout ends there, the episode does not. Use `next_values`.": (
            lambda r, v, n, ended, gamma: r + gamma * torch.cat([v[1:], 0 * v[:1]]) * ~ended - v
        ),
        "You take the next row of `values` for V(s_{t+1}): where a time limit ended an episode, that is of another one. Use `next_values`.": (
            lambda r, v, n, ended, gamma: r + gamma * torch.cat([v[1:], n[-1:]]) * ~ended - v
        ),
        "The last step of the rollout has the value of the first one for V(s_{t+1}). Use `next_values`.": (
            lambda r, v, n, ended, gamma: r + gamma * v.roll(-1, 0) * ~ended - v
        ),
    },
)


def backwards(deltas: Tensor, keep: Tensor, factor: float) -> Tensor:
    """A_t = δ_t + factor · keep_t · A_{t+1}."""
    advantages, advantage = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = deltas[t] + factor * advantage * keep[t]
        advantages[t] = advantage
    return advantages


def previous(ended: Tensor) -> Tensor:
    """Row t is row t - 1; before the rollout, nothing ends."""
    return torch.cat([torch.zeros_like(ended[:1]), ended[:-1]])


def gae_forwards(deltas: Tensor, ended: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    advantages, advantage = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for t in range(len(deltas)):
        advantage = deltas[t] + gamma * gae_lambda * advantage * ~ended[t]
        advantages[t] = advantage
    return advantages


def delta_is_masked(deltas: Tensor, ended: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    advantages, advantage = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantage = (deltas[t] + gamma * gae_lambda * advantage) * ~ended[t]
        advantages[t] = advantage
    return advantages


def reset_after(deltas: Tensor, ended: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """The step before an end is cut off from it, and the end from nothing: A is set to 0 after its row."""
    advantages, advantage = torch.zeros_like(deltas), torch.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):
        advantages[t] = deltas[t] + gamma * gae_lambda * advantage
        advantage = advantages[t] * ~ended[t]
    return advantages


GAE = Exercise(
    3,
    {
        "λ = 0": (REWARDS, NO_END, 0.9, 0.0),
        "λ = 0.95": (REWARDS, NO_END, 0.9, 0.95),
        "λ = 1": (REWARDS, NO_END, 0.9, 1.0),
        "an episode ends in the middle": (REWARDS, ENDS, 0.9, 0.95),
    },
    {
        "You sum across the end of an episode: where `ended`, A_{t+1} is of the next one and does not count.": (
            lambda deltas, ended, gamma, lam: backwards(deltas, ~NO_END[:1].expand_as(ended), gamma * lam)
        ),
        "The sum stops one step too early: `ended[t]` cuts A_{t+1} off from A_t, not A_t from A_{t-1}.": reset_after,
        "The sum stops one step too late: use `ended[t]`, not `ended[t - 1]`.": (
            lambda deltas, ended, gamma, lam: backwards(deltas, ~previous(ended), gamma * lam)
        ),
        "The last step of an episode loses its own δ_t: only A_{t+1} does not count there.": delta_is_masked,
        "`ended` is the wrong way round: A_{t+1} counts where the episode ended, and only there.": (
            lambda deltas, ended, gamma, lam: backwards(deltas, ended, gamma * lam)
        ),
        "All environments stop where one of them ends: each column has ends of its own.": (
            lambda deltas, ended, gamma, lam: backwards(
                deltas, ~ended.any(1, keepdim=True).expand_as(ended), gamma * lam
            )
        ),
        "This goes forwards in time: A_t sums what follows, so begin at the end.": gae_forwards,
        "γ is missing: the factor of each step is γλ.": (
            lambda deltas, ended, gamma, lam: backwards(deltas, ~ended, lam)
        ),
        "λ is missing: the factor of each step is γλ.": (
            lambda deltas, ended, gamma, lam: backwards(deltas, ~ended, gamma)
        ),
        "The last step of the rollout is left out: its advantage is its own δ.": (
            lambda deltas, ended, gamma, lam: torch.cat(
                [backwards(deltas[:-1], ~ended[:-1], gamma * lam), 0 * deltas[-1:]]
            )
        ),
        "This is the advantage of the first step: return those of all steps.": (
            lambda *inputs: solutions.gae(*inputs)[0]
        ),
        "These are the δ themselves, which is right for λ = 0 only.": lambda deltas, *others: deltas.clone(),
        "The sum is multiplied by 1 - λ, as the mean of n-step returns is; that of the δ is not ([GAE], equation 16).": (
            lambda deltas, ended, gamma, lam: (1 - lam) * backwards(deltas, ~ended, gamma * lam)
        ),
        "The sign: A is positive if δ is.": lambda *inputs: -solutions.gae(*inputs),
    },
)

# 4. Time limits


def gae_with(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    dead: Tensor,
    ended: Tensor,
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, if `dead` states are worth 0, and `ended` stops the sum."""
    advantages = backwards(rewards + gamma * next_values * ~dead - values, ~ended, gamma * lam)
    return advantages, advantages + values


def of_another_episode(r, v, n, term, trunc, gamma, lam):  # type: ignore[no-untyped-def]
    return gae_with(r, v, torch.cat([v[1:], n[-1:]]), term, term | trunc, gamma, lam)


def state_before_the_limit(r, v, n, term, trunc, gamma, lam):  # type: ignore[no-untyped-def]
    return gae_with(r, v, torch.where(trunc, v, n), term, term | trunc, gamma, lam)


def times(terminated: Tensor, truncated: Tensor) -> Inputs:
    """Inputs with these ends."""
    return REWARDS, *critic(terminated | truncated), terminated, truncated, 0.9, 0.95


COMPUTE_GAE = Exercise(
    4,
    {
        "no episode ends": times(NO_END, NO_END),
        "two steps are terminated": times(ENDS, NO_END),
        "two steps are truncated": times(NO_END, ENDS),
        "some are terminated, others truncated": times(ENDS, OTHERS),
        "two steps are both": times(ENDS, ENDS),
    },
    {
        "You treat a time limit as the end of the task: where only `truncated`, V(s_{t+1}) counts, as more reward would have followed.": (
            lambda r, v, n, term, trunc, *f: gae_with(r, v, n, term | trunc, term | trunc, *f)
        ),
        "You sum across a time limit: where `truncated`, A_{t+1} is of the next episode and does not count.": (
            lambda r, v, n, term, trunc, *f: gae_with(r, v, n, term, term, *f)
        ),
        "You bootstrap where the task has ended: where `terminated`, V(s_{t+1}) counts as 0.": (
            lambda r, v, n, term, trunc, *f: gae_with(r, v, n, NO_END, term | trunc, *f)
        ),
        "You sum across the ends of episodes: where one ended, A_{t+1} is of the next one and does not count.": (
            lambda r, v, n, term, trunc, *f: gae_with(r, v, n, term, NO_END, *f)
        ),
        "You take no notice of either end.": (
            lambda r, v, n, term, trunc, *f: gae_with(r, v, n, NO_END, NO_END, *f)
        ),
        "`truncated` counts as an end of the task, and `terminated` as a time limit: they are swapped.": (
            lambda r, v, n, term, trunc, *f: gae_with(r, v, n, trunc, term | trunc, *f)
        ),
        "Where a step is terminated and truncated at once, the task has ended: V(s_{t+1}) counts as 0.": (
            lambda r, v, n, term, trunc, *f: gae_with(r, v, n, term & ~trunc, term | trunc, *f)
        ),
        "You take the next row of `values` for V(s_{t+1}): at an end, that is of another episode. Use `next_values`.": (
            of_another_episode
        ),
        "At a time limit you take V(s_t), the value of the state before. `next_values` has that of the state after.": (
            state_before_the_limit
        ),
        "The returns are the advantages: V(s_t) is missing.": (
            lambda *inputs: (solutions.compute_gae(*inputs)[0],) * 2
        ),
        "The returns are r + γ V(s_{t+1}), the target for λ = 0: return A_t + V(s_t).": (
            lambda r, v, n, term, trunc, gamma, lam: (
                solutions.compute_gae(r, v, n, term, trunc, gamma, lam)[0],
                r + gamma * n * ~term,
            )
        ),
        "The returns are A_t + V(s_{t+1}): the critic's target for s_t is A_t + V(s_t).": (
            lambda *inputs: (solutions.compute_gae(*inputs)[0], solutions.compute_gae(*inputs)[0] + inputs[2])
        ),
        "The returns are sums of rewards without the critic: return A_t + V(s_t).": (
            lambda r, v, n, term, trunc, gamma, lam: (
                solutions.compute_gae(r, v, n, term, trunc, gamma, lam)[0],
                backwards(r, ~(term | trunc), gamma),
            )
        ),
        "Advantages and returns are swapped.": lambda *inputs: solutions.compute_gae(*inputs)[::-1],
        "Only the advantages are returned: return a pair, advantages and returns.": (
            lambda *inputs: solutions.compute_gae(*inputs)[0]
        ),
        "The last step of the rollout has no V(s_{t+1}): the rollout ends there, the episode does not. Use `next_values`.": (
            lambda r, v, n, term, trunc, *f: gae_with(
                r, v, torch.cat([n[:-1], 0 * n[:1]]), term, term | trunc, *f
            )
        ),
        "The advantages are normalised here: that comes later, in each minibatch.": (
            lambda *inputs: (
                solutions.normalize_advantages(solutions.compute_gae(*inputs)[0]),
                solutions.compute_gae(*inputs)[1],
            )
        ),
        "The advantages are normalised before the returns are made of them, which then have another scale than the rewards.": (
            lambda *inputs: (
                solutions.normalize_advantages(solutions.compute_gae(*inputs)[0]),
                solutions.normalize_advantages(solutions.compute_gae(*inputs)[0]) + inputs[1],
            )
        ),
    },
    observe=several,
    parts=("the advantages", "the returns"),
)

# 5. Normalisation

FIVE = tensor(3, -1, 2, 0, 6)
NORMALIZE = Exercise(
    5,
    {
        "5 advantages": (FIVE,),
        "small advantages": (1e-4 * FIVE,),
        "all are equal": (tensor(2, 2, 2),),
        "a single one": (tensor(5),),
    },
    {
        "The mean is not subtracted.": lambda a: a / (a.std() + 1e-8) if len(a) > 1 else 0 * a,
        "They are not divided by their deviation.": lambda a: a - a.mean(),
        "They are divided by their variance, not by its root.": (
            lambda a: (a - a.mean()) / (a.var() + 1e-8) if len(a) > 1 else 0 * a
        ),
        "The deviation of one element is NaN (it is divided by B - 1, which is 0): return 0 for a single advantage.": (
            lambda a: (a - a.mean()) / (a.std() + 1e-8)
        ),
        "A single advantage is returned as it is: there is nothing to compare it with, so return 0.": (
            lambda a: solutions.normalize_advantages(a) if len(a) > 1 else a.clone()
        ),
        "Equal advantages give 0 / 0, NaN: add 1e-8 to the deviation.": (
            lambda a: (a - a.mean()) / a.std() if len(a) > 1 else 0 * a
        ),
        "NaN where all are equal, and for a single advantage: add 1e-8 to the deviation, which is NaN itself for one element.": (
            lambda a: (a - a.mean()) / a.std()
        ),
        "The variance is divided by B: torch.std divides it by B - 1, as is asked. (Either is fine in training.)": (
            lambda a: (a - a.mean()) / (a.std(correction=0) + 1e-8)
        ),
        "The mean alone is divided by the deviation: put the difference in parentheses.": (
            lambda a: a - a.mean() / (a.std() + 1e-8) if len(a) > 1 else 0 * a
        ),
        "1e-8 is added to the variance, not to the deviation, so that small advantages become too small.": (
            lambda a: (a - a.mean()) / (a.var() + 1e-8).sqrt() if len(a) > 1 else 0 * a
        ),
        "They are divided by the largest absolute value, not by the standard deviation.": (
            lambda a: (a - a.mean()) / ((a - a.mean()).abs().max() + 1e-8)
        ),
    },
)

# 6. The clipped objective

SIX = tensor(1.5, 1.5, 0.6, 0.6, 1.1, 0.9), tensor(1, -1, 1, -1, 2, -2)
CLIP_CASES: dict[str, Inputs] = {
    "A > 0, ratio 1.5": (tensor(1.5), tensor(2), 0.2),
    "A > 0, ratio 0.6": (tensor(0.6), tensor(2), 0.2),
    "A < 0, ratio 1.5": (tensor(1.5), tensor(-2), 0.2),
    "A < 0, ratio 0.6": (tensor(0.6), tensor(-2), 0.2),
    "A > 0, ratio 1.1": (tensor(1.1), tensor(2), 0.2),
    "A < 0, ratio 0.9": (tensor(0.9), tensor(-2), 0.2),
    "A > 0, ratio 1.21": (tensor(1.21), tensor(2), 0.2),
    "A < 0, ratio 0.81": (tensor(0.81), tensor(-2), 0.2),
    "A < 0, ratio 12": (tensor(12), tensor(-2), 0.2),
    "all at once": (*SIX, 0.2),
}


def objective(r: Tensor, a: Tensor, low: float, high: float) -> Tensor:
    return torch.min(r * a, r.clamp(low, high) * a)


CLIPPED_LOSS = Exercise(
    6,
    CLIP_CASES,
    {
        "The sign: this is the objective, which is maximised. An optimizer minimises, so the loss is its negative.": (
            lambda r, a, e: objective(r, a, 1 - e, 1 + e).mean()
        ),
        "The ratio is not clipped.": lambda r, a, e: -(r * a).mean(),
        "The minimum is missing: clip(r) A alone has no gradient where the policy has moved the wrong way, too.": (
            lambda r, a, e: -(r.clamp(1 - e, 1 + e) * a).mean()
        ),
        "This is the maximum of both terms, where the objective has the minimum: so the clip acts at the wrong limits.": (
            lambda r, a, e: -torch.max(r * a, r.clamp(1 - e, 1 + e) * a).mean()
        ),
        "The clip is on the wrong side for A < 0: such an action should become less likely, so 1 - ε is the limit.": (
            lambda r, a, e: -(r.clamp(max=1 + e) * a).mean()
        ),
        "Only 1 + ε is a limit: for A < 0, 1 - ε is the one that counts.": (
            lambda r, a, e: -torch.min(r * a, r.clamp(max=1 + e) * a).mean()
        ),
        "Only 1 - ε is a limit: for A > 0, 1 + ε is the one that counts.": (
            lambda r, a, e: -torch.min(r * a, r.clamp(min=1 - e) * a).mean()
        ),
        "The loss has an upper limit for A < 0: that is dual-clip PPO (Ye et al. 2020), not [PPO].": (
            lambda r, a, e: (
                -torch.where(
                    a < 0, torch.max(objective(r, a, 1 - e, 1 + e), 3 * a), objective(r, a, 1 - e, 1 + e)
                ).mean()
            )
        ),
        "The ratio is clipped to ±ε, not to 1 ± ε.": lambda r, a, e: -objective(r, a, -e, e).mean(),
        "The product of ratio and advantage is clipped: clip the ratio, then multiply.": (
            lambda r, a, e: -torch.min(r * a, (r * a).clamp(1 - e, 1 + e)).mean()
        ),
        "The product of ratio and advantage is clipped, and the minimum is missing: clip the ratio, then multiply.": (
            lambda r, a, e: -(r * a).clamp(1 - e, 1 + e).mean()
        ),
        "The advantages are clipped: clip the ratio.": (
            lambda r, a, e: -torch.min(r * a, r * a.clamp(1 - e, 1 + e)).mean()
        ),
        "The clipped term is not multiplied by the advantage.": (
            lambda r, a, e: -torch.min(r * a, r.clamp(1 - e, 1 + e)).mean()
        ),
        "This is the minimum of two means: take the minimum for each transition, then the mean.": (
            lambda r, a, e: -torch.min((r * a).mean(), (r.clamp(1 - e, 1 + e) * a).mean())
        ),
        "This is a sum: take the mean, so that the step does not depend on the size of the minibatch.": (
            lambda r, a, e: -objective(r, a, 1 - e, 1 + e).sum()
        ),
        "This is one loss for each transition: take the mean.": (
            lambda r, a, e: -objective(r, a, 1 - e, 1 + e)
        ),
        "This is the maximum of r A and clip(r) A, without a minus sign: the loss is the maximum of -r A and -clip(r) A.": (
            lambda r, a, e: torch.max(r * a, r.clamp(1 - e, 1 + e) * a).mean()
        ),
    },
    observe=with_gradient,
)
GRADIENT = Exercise(
    6,
    CLIP_CASES,
    {
        "These are the transitions whose ratio is within 1 ± ε. Beyond one of the limits there is a gradient, too: it pulls back.": (
            lambda r, a, e: (r - 1).abs() < e
        ),
        "This is the wrong way round: these are the transitions without a gradient.": (
            lambda *inputs: ~solutions.has_gradient(*inputs)
        ),
        "The limits are swapped: for A > 0 the gradient is 0 above 1 + ε, for A < 0 below 1 - ε.": (
            lambda r, a, e: ~(((a > 0) & (r < 1 - e)) | ((a < 0) & (r > 1 + e)))
        ),
        "The clip is on the wrong side for A < 0: there the gradient is 0 below 1 - ε, not above 1 + ε.": (
            lambda r, a, e: r < 1 + e
        ),
        "The clip is on the wrong side for A > 0: there the gradient is 0 above 1 + ε, not below 1 - ε.": (
            lambda r, a, e: r > 1 - e
        ),
        "The case A < 0 is missing: there the gradient is 0 below 1 - ε.": lambda r, a, e: (
            ~((a > 0) & (r > 1 + e))
        ),
        "The case A > 0 is missing: there the gradient is 0 above 1 + ε.": lambda r, a, e: (
            ~((a < 0) & (r < 1 - e))
        ),
        "Every transition has a gradient here. Where is the clip? (Put comparisons in parentheses: & binds tighter than > and <.)": lambda r, a, e: (
            torch.ones_like(r, dtype=torch.bool)
        ),
    },
)

# 7. The value loss

V_CASES: dict[str, Inputs] = {
    "changes within the clip": (tensor(1.1, 0.4), tensor(1, 0.5), tensor(3, -1), 0.2),
    "changes too far towards the return": (tensor(2, -0.5), tensor(1, 0.5), tensor(3, -1), 0.2),
    "changes away from the return": (tensor(0.5, 1.5), tensor(1, 0.5), tensor(3, -1), 0.2),
    "all at once": (tensor(1.1, 2, 0.5), tensor(1, 1, 1), tensor(3, 3, 3), 0.2),
}


def squares(v: Tensor, old: Tensor, ret: Tensor, c: float) -> tuple[Tensor, Tensor]:
    return (v - ret).square(), (old + (v - old).clamp(-c, c) - ret).square()


VALUE_LOSS = Exercise(
    7,
    V_CASES,
    {
        "The value is not clipped: what is limited is its change since the rollout, values - old_values.": lambda v, old, ret, c: (
            0.5 * (v - ret).square().mean()
        ),
        "This is the error of the clipped value alone: take the larger of both errors.": (
            lambda v, old, ret, c: 0.5 * squares(v, old, ret, c)[1].mean()
        ),
        "This is the smaller of both errors: take the larger one, as the clip must not help.": (
            lambda v, old, ret, c: 0.5 * torch.min(*squares(v, old, ret, c)).mean()
        ),
        "The factor ½ is missing.": lambda v, old, ret, c: torch.max(*squares(v, old, ret, c)).mean(),
        "This is a sum: take the mean.": lambda v, old, ret, c: (
            0.5 * torch.max(*squares(v, old, ret, c)).sum()
        ),
        "This is one loss for each transition: take the mean.": (
            lambda v, old, ret, c: 0.5 * torch.max(*squares(v, old, ret, c))
        ),
        "This is the larger of two means: take the larger error of each transition, then the mean.": (
            lambda v, old, ret, c: 0.5 * torch.max(*(x.mean() for x in squares(v, old, ret, c)))
        ),
        "The value itself is clipped to ±ε: clip its change, values - old_values.": (
            lambda v, old, ret, c: 0.5 * torch.max((v - ret).square(), (v.clamp(-c, c) - ret).square()).mean()
        ),
        "The clipped change is not added to the old value.": (
            lambda v, old, ret, c: (
                0.5 * torch.max((v - ret).square(), ((v - old).clamp(-c, c) - ret).square()).mean()
            )
        ),
        "The distance to the return is clipped: clip the change, values - old_values.": (
            lambda v, old, ret, c: 0.5 * (v - ret).clamp(-c, c).square().mean()
        ),
        "The ratio of the values is clipped: clip their difference.": (
            lambda v, old, ret, c: (
                0.5
                * torch.max((v - ret).square(), (old * (v / old).clamp(1 - c, 1 + c) - ret).square()).mean()
            )
        ),
        "These are absolute errors, not squared ones.": (
            lambda v, old, ret, c: 0.5 * torch.max(*squares(v, old, ret, c)).sqrt().mean()
        ),
        "The sign: the value loss is minimised.": (
            lambda v, old, ret, c: -0.5 * torch.max(*squares(v, old, ret, c)).mean()
        ),
    },
    observe=with_gradient,
)

# 8. Entropy

FORBIDDEN = tensor([0.0, -torch.inf, 1.0], [2.0, 0.0, -torch.inf])


def entropy_terms(logits: Tensor, dim: int = -1) -> Tensor:
    log_probs = logits.log_softmax(dim)
    return -log_probs.exp() * log_probs.clamp(min=torch.finfo(logits.dtype).min)


def without_forbidden(logits: Tensor) -> Tensor:
    return torch.where(logits.isinf(), 0.0, logits)


ENTROPY = Exercise(
    8,
    {
        "4 policies of 3 actions": (LOGITS,),
        "uniform": (torch.zeros(2, 4),),
        "a forbidden action": (FORBIDDEN,),
    },
    {
        "The sign: an entropy is never negative.": lambda logits: -entropy_terms(logits).sum(-1),
        "This is the mean over the actions: sum their terms.": lambda logits: entropy_terms(logits).mean(-1),
        "This is one number: return an entropy for each state.": lambda logits: (
            entropy_terms(logits).sum(-1).mean()
        ),
        "This is one number, summed over the batch, too: return an entropy for each state.": (
            lambda logits: entropy_terms(logits).sum()
        ),
        "A forbidden action gives 0 times -inf, NaN: its term is 0.": (
            lambda logits: -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        ),
        "These are bits: use the natural logarithm.": lambda logits: (
            entropy_terms(logits).sum(-1) / torch.tensor(2.0).log()
        ),
        "The softmax is over the batch, not over the actions: use dim=-1.": (
            lambda logits: entropy_terms(logits, 0).sum(-1)
        ),
        "Probabilities are multiplied by logits, not by log-probabilities (log_softmax).": (
            lambda logits: -(logits.softmax(-1) * logits.clamp(min=-1e30)).sum(-1)
        ),
        "Log-probabilities are summed without their weights, the probabilities.": (
            lambda logits: -logits.log_softmax(-1).sum(-1)
        ),
        "These are the terms of the actions: sum them.": entropy_terms,
        "This is minus the log-probability of the most likely action, not the mean over all actions.": (
            lambda logits: -logits.log_softmax(-1).max(-1).values
        ),
        "The entropy is right, but its gradient is NaN where an action is forbidden (0 times inf): replace the log-probability of -inf before you multiply, not the product afterwards.": (
            lambda logits: -(logits.softmax(-1) * logits.log_softmax(-1)).nan_to_num(0).sum(-1)
        ),
        "A forbidden action counts as one with a logit of 0.": (
            lambda logits: entropy_terms(without_forbidden(logits)).sum(-1)
        ),
    },
    observe=with_gradient,
)

# 9. The KL divergence

NEW_LOGITS = random(4, 3, seed=2)


kl = solutions.kl_divergence

KL = Exercise(
    9,
    {
        "4 policies of 3 actions": (LOGITS, NEW_LOGITS),
        "equal policies": (LOGITS, LOGITS + 2),
        "a large step": (LOGITS, 10 * NEW_LOGITS),
        "a probability of 0": (tensor([200, 0]), tensor([1, 0])),
    },
    {
        "This is the wrong direction, KL(π ‖ π_old). The mean is over the actions of π_old.": (
            lambda old, new: kl(new, old)
        ),
        "The sign: a KL divergence is never negative.": lambda old, new: -kl(old, new),
        "The weights are those of π: the mean is over the actions of π_old.": lambda old, new: -kl(new, old),
        "This is the mean over the actions: sum their terms.": lambda old, new: kl(old, new) / old.shape[-1],
        "This is one number: return a divergence for each state.": lambda old, new: kl(old, new).mean(),
        "This is one number, summed over the batch, too: return a divergence for each state.": (
            lambda old, new: kl(old, new).sum()
        ),
        "Logits are subtracted, not log-probabilities (log_softmax): equal policies must have a divergence of 0.": (
            lambda old, new: (old.softmax(-1) * (old - new)).sum(-1)
        ),
        "Log-probabilities are not weighted by the probabilities of π_old.": (
            lambda old, new: (old.log_softmax(-1) - new.log_softmax(-1)).sum(-1)
        ),
        "This is the cross-entropy: the entropy of π_old must be subtracted.": (
            lambda old, new: -(old.softmax(-1) * new.log_softmax(-1)).sum(-1)
        ),
        "Logarithms are taken of probabilities, which gives NaN where one is 0: subtract log-probabilities (log_softmax).": (
            lambda old, new: (old.softmax(-1) * (old.softmax(-1) / new.softmax(-1)).log()).sum(-1)
        ),
        "This is the mean of both directions: KL(π_old ‖ π) is asked.": lambda old, new: (
            (kl(old, new) + kl(new, old)) / 2
        ),
        "This is the sum of both directions: KL(π_old ‖ π) is asked.": lambda old, new: (
            kl(old, new) + kl(new, old)
        ),
        "These are the terms of the actions: sum them.": (
            lambda old, new: old.softmax(-1) * (old.log_softmax(-1) - new.log_softmax(-1))
        ),
    },
)


def k1(log_ratio: Tensor) -> Tensor:
    return -log_ratio


def k3(log_ratio: Tensor) -> Tensor:
    return log_ratio.exp() - 1 - log_ratio


ESTIMATES = Exercise(
    9,
    {
        "4 rows": (OLD_LOG_PROBS, tensor(-1.2, -0.9, -1.3, -1.8)),
        "1 row": (tensor(-1), tensor(-1.5)),
        "equal policies": (OLD_LOG_PROBS, OLD_LOG_PROBS.clone()),
    },
    {
        "The sign of k1: it is log π_old - log π.": (
            lambda old, new: (-k1(new - old).mean(), k3(new - old).mean())
        ),
        "The ratio is upside down in both: r = π / π_old, the new probability above.": (
            lambda old, new: (k1(old - new).mean(), k3(old - new).mean())
        ),
        "The ratio of k3 is upside down: r = π / π_old, since the actions are those of π_old.": (
            lambda old, new: (k1(new - old).mean(), k3(old - new).mean())
        ),
        "k3 lacks - log r.": lambda old, new: (k1(new - old).mean(), ((new - old).exp() - 1).mean()),
        "k3 lacks - 1: it must be 0 where the policies are equal.": (
            lambda old, new: (k1(new - old).mean(), ((new - old).exp() - (new - old)).mean())
        ),
        "The sign of log r in k3: (r - 1) - log r.": (
            lambda old, new: (k1(new - old).mean(), ((new - old).exp() - 1 + (new - old)).mean())
        ),
        "The second is k2, ½ (log r)²: k3 is (r - 1) - log r.": (
            lambda old, new: (k1(new - old).mean(), 0.5 * (new - old).square().mean())
        ),
        "k1 has no absolute value: it may be negative.": (
            lambda old, new: (k1(new - old).abs().mean(), k3(new - old).mean())
        ),
        "k3 is taken of the mean log-ratio: take the mean at the end, of k3 of each action.": (
            lambda old, new: (k1(new - old).mean(), k3((new - old).mean()))
        ),
        "k1 and k3 are swapped.": lambda old, new: (k3(new - old).mean(), k1(new - old).mean()),
        "These are sums: take the means.": lambda old, new: (k1(new - old).sum(), k3(new - old).sum()),
        "There is one for each action: take the means.": lambda old, new: (k1(new - old), k3(new - old)),
        "k1 is weighted by the old probabilities: the actions are samples of π_old, so each counts once.": (
            lambda old, new: ((old.exp() * k1(new - old)).mean(), k3(new - old).mean())
        ),
    },
    observe=several,
    parts=("k1", "k3"),
)


def by_limits(high: float, low: float, up: float, down: float) -> Callable:
    """β is multiplied by `up` above `high` times the target, by `down` below `low` times it."""

    def adapt(kl_coef: float, kl: float, target: float) -> float:
        return kl_coef * up if kl > high * target else kl_coef * down if kl < low * target else kl_coef

    return adapt


def halved_too_often(kl_coef: float, kl: float, target: float) -> float:
    return kl_coef * 2 if kl > 1.5 * target else kl_coef / 2


ADAPT = Exercise(
    9,
    {
        "much too far": (0.4, 0.05, 0.01),
        "1.7 times the target": (0.4, 0.017, 0.01),
        "1.2 times the target": (0.4, 0.012, 0.01),
        "0.8 times the target": (0.4, 0.008, 0.01),
        "0.6 times the target": (0.4, 0.006, 0.01),
        "much too little": (0.4, 0.001, 0.01),
        "much too far, with β = 0.9": (0.9, 0.05, 0.01),
    },
    {
        "This is the wrong way round: a policy that moved too far needs a larger penalty.": by_limits(
            1.5, 1 / 1.5, 0.5, 2
        ),
        "Between both limits, β stays as it is.": by_limits(1, 1, 2, 0.5),
        "β is halved whenever it is not doubled: only below the target divided by 1.5.": halved_too_often,
        "The limits are 1.5 times the target, and the target divided by 1.5, not 2.": by_limits(
            2, 0.5, 2, 0.5
        ),
        "β is multiplied and divided by 1.5: 1.5 is the factor of the limits, 2 that of β.": (
            by_limits(1.5, 1 / 1.5, 1.5, 1 / 1.5)
        ),
        "The lower limit is the target divided by 1.5, not half of it.": by_limits(1.5, 0.5, 2, 0.5),
        "The lower limit is the target divided by 1.5, not the target.": by_limits(1.5, 1, 2, 0.5),
        "The upper limit is 1.5 times the target, not the target.": by_limits(1, 1 / 1.5, 2, 0.5),
        "β is never halved.": by_limits(1.5, 1 / 1.5, 2, 1),
        "β is never doubled.": by_limits(1.5, 1 / 1.5, 1, 0.5),
        "β stays as it is.": by_limits(1, 1, 1, 1),
    },
)

# 10. Running statistics

M_BEFORE, V_BEFORE = tensor(1, -2), tensor(2, 0.5)
NEW_ROWS = tensor([3, 0], [5, 1], [4, -1])


def moments_with(variance: Callable, share: Callable, count: Callable) -> Callable:
    """Moments from a rule for the variance, the share of the new rows and the new count."""

    def combine(mean: Tensor, var: Tensor, n: int, new: Tensor) -> tuple[Tensor, Tensor, int]:
        part = share(n, len(new))
        new_var = variance(var, new, mean, part)
        return mean + part * (new.mean(0) - mean), new_var, count(n, len(new))

    return combine


def population(x: Tensor) -> Tensor:
    return x.var(0, correction=0)


def combined(var: Tensor, new: Tensor, mean: Tensor, part: float) -> Tensor:
    between = part * (1 - part) * (new.mean(0) - mean).square()
    return (1 - part) * var + part * population(new) + between


def by_rows(n: int, m: int) -> float:
    return m / (n + m)


def added(n: int, m: int) -> int:
    return n + m


def sample_variance(var: Tensor, new: Tensor, mean: Tensor, part: float) -> Tensor:
    between = part * (1 - part) * (new.mean(0) - mean).square()
    return (1 - part) * var + part * new.var(0) + between


def after_the_mean(var: Tensor, new: Tensor, mean: Tensor, part: float) -> Tensor:
    """The squared difference is that between the new rows and the combined mean."""
    late = (1 - part) * (new.mean(0) - mean)
    return (1 - part) * var + part * population(new) + part * (1 - part) * late.square()


def over_all_numbers(mean: Tensor, var: Tensor, n: int, new: Tensor) -> tuple[Tensor, Tensor, int]:
    part = by_rows(n, len(new))
    between = part * (1 - part) * (new.mean() - mean).square()
    combined = (1 - part) * var + part * new.var(correction=0) + between
    return mean + part * (new.mean() - mean), combined, n + len(new)


def moments_by_squares(mean: Tensor, var: Tensor, n: int, new: Tensor) -> tuple[Tensor, Tensor, int]:
    total = n + len(new)
    new_mean = (n * mean + new.sum(0)) / total
    squares = (n * (var + mean.square()) + new.square().sum(0)) / total
    return new_mean, squares - new_mean.square(), total


MOMENTS = Exercise(
    10,
    {
        "3 rows after 5": (M_BEFORE, V_BEFORE, 5, NEW_ROWS),
        "1 row after 5": (M_BEFORE, V_BEFORE, 5, NEW_ROWS[:1]),
        "the first rows": (tensor(0, 0), tensor(1, 1), 0, NEW_ROWS),
        "rows around 1,000": (
            tensor(1000, 2000),
            tensor(0.01, 0.5),
            5,
            tensor([1000.1, 2001], [1000.2, 2000]),
        ),
    },
    {
        "The variance between the groups is missing: their means differ, which spreads the rows, too.": (
            moments_with(lambda v, new, m, p: (1 - p) * v + p * population(new), by_rows, added)
        ),
        "The old and the new rows have the same weight: weigh them by their numbers.": (
            moments_with(combined, lambda n, m: 0.5 if n else 1.0, added)
        ),
        "The old and the new rows have the same weight, and the variance between the groups is missing.": (
            moments_with(lambda v, new, m, p: (1 - p) * v + p * population(new), lambda n, m: 0.5, added)
        ),
        "These are the moments of the new rows alone.": (
            lambda mean, var, n, new: (new.mean(0), population(new), n + len(new))
        ),
        "The variance of the new rows is divided by their number minus 1: use correction=0.": (
            moments_with(sample_variance, by_rows, added)
        ),
        "The count does not grow.": moments_with(combined, by_rows, lambda n, m: n),
        "The count grows by 1: it is of rows, not of calls.": moments_with(
            combined, by_rows, lambda n, m: n + 1
        ),
        "The count is that of the new rows alone.": moments_with(combined, by_rows, lambda n, m: m),
        "These are standard deviations: return variances.": (
            moments_with(lambda *inputs: combined(*inputs).sqrt(), by_rows, added)
        ),
        "The moments are over all numbers: each of the D has its own (dim 0).": over_all_numbers,
        "Weight the squared difference of the means by the share of the old rows times that of the new ones.": (
            moments_with(
                lambda v, new, m, p: (1 - p) * v + p * population(new) + (new.mean(0) - m).square(),
                by_rows,
                added,
            )
        ),
        "This is E[x²] - E[x]², which loses all digits where the mean is large against the deviation: combine the variances and the squared difference of the means.": (
            moments_by_squares
        ),
        "The difference of the means is taken after the mean has changed: take it from the old mean.": (
            moments_with(after_the_mean, by_rows, added)
        ),
    },
    observe=several,
    parts=("the mean", "the variance", "the count"),
)

# 11. Minibatches


def share_together(minibatches: list[Tensor], size: int) -> float:
    """The share of neighbours, rows i and i + 1, that are in the same minibatch."""
    places = {int(row): index for index, rows in enumerate(minibatches) for row in rows}
    return sum(places.get(row, -1) == places.get(row + 1, -2) for row in range(size - 1)) / (size - 1)


def properties(function: Callable, inputs: Inputs) -> tuple[bool, ...]:
    """What is asked of minibatches, and whether they have it. See PROPERTIES."""
    size, number = inputs
    epochs = [function(*inputs) for _ in range(20)]
    if not all(isinstance(minibatches, list | tuple) for minibatches in epochs):
        raise Wrong("Return a list of tensors.")
    first, second = ([torch.as_tensor(rows) for rows in minibatches] for minibatches in epochs[:2])
    if not first or any(rows.dim() != 1 or rows.dtype in (torch.bool, torch.float32) for rows in first):
        raise Wrong("Return a list of vectors of row numbers, int64.")
    rows, again = torch.cat(first), torch.cat(second)
    sizes = [len(part) for part in first]
    together = [share_together(minibatches, size) for minibatches in epochs]
    return (
        len(first) == number,
        bool(((rows >= 0) & (rows < size)).all()),
        len(rows.unique()) == len(rows),
        bool(torch.isin(torch.arange(size), rows).all()),
        max(sizes) - min(sizes) <= 1,
        size < 10 or not torch.equal(rows, rows.sort().values),
        size < 10 or not torch.equal(rows, again),
        number == 1 or size < 10 or sum(together) < 10,
    )


PROPERTIES = (
    "as many minibatches as asked for",
    "row numbers from 0 to batch_size - 1",
    "no row twice",
    "no row left out",
    "sizes that differ by one at most",
    "a shuffled order",
    "another order in each epoch",
    "neighbours in time mostly in different minibatches",
)


def seeded(size: int, number: int) -> list[Tensor]:
    order = torch.randperm(size, generator=torch.Generator().manual_seed(1))
    return list(order.tensor_split(number))


MINIBATCHES = Exercise(
    11,
    {
        "64 rows, 4 minibatches": (64, 4),
        "10 rows, 3 minibatches": (10, 3),
        "33 rows, 16 minibatches": (33, 16),
        "8 rows, 8 minibatches": (8, 8),
        "7 rows, 1 minibatch": (7, 1),
        "11 rows, 4 minibatches": (11, 4),
    },
    {
        "The rows are not shuffled: neighbours in a minibatch are neighbours in time.": (
            lambda size, number: list(torch.arange(size).tensor_split(number))
        ),
        "Rows are drawn with replacement: some come twice, others never.": (
            lambda size, number: [
                torch.randint(0, size, (len(x),)) for x in torch.arange(size).tensor_split(number)
            ]
        ),
        "The rows that are left over are dropped: the sizes may differ by one.": (
            lambda size, number: list(torch.randperm(size)[: size // number * number].split(size // number))
        ),
        "The rows that are left over make one minibatch more, a small one: the advantages of a single row cannot be normalised.": (
            lambda size, number: list(torch.randperm(size).split(size // number))
        ),
        "The last minibatch is much smaller, or missing: torch.chunk rounds the sizes up. See torch.tensor_split.": (
            lambda size, number: list(torch.randperm(size).chunk(number))
        ),
        "The last minibatch has all the rows that are left over: the sizes may differ by one only.": (
            lambda size, number: list(
                torch.randperm(size).tensor_split([size // number * i for i in range(1, number)])
            )
        ),
        "Rows are shuffled in blocks, so that neighbours in time stay together: any two rows must be able to meet in a minibatch.": (
            lambda size, number: [
                list(torch.arange(size).tensor_split(number))[i] for i in torch.randperm(number)
            ]
        ),
        "The order is the same in each epoch: shuffle anew in each call, without a fixed seed.": seeded,
        "`num_minibatches` is taken for the size of a minibatch: it is their number.": (
            lambda size, number: list(torch.randperm(size).split(number))
        ),
    },
    observe=properties,
)

# 12. An update


class Agent(nn.Module):
    """A small agent with different networks for actor and critic."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = nn.Linear(3, 4), nn.Linear(3, 1)
        with torch.no_grad():
            for seed, parameter in enumerate(self.parameters()):
                parameter.copy_(random(*parameter.shape, seed=seed, scale=0.5))


ACTOR = 16  # the number of its weights, which are the first


def weights_after(function: Callable, inputs: Inputs) -> Tensor:
    """All weights of the agent after an update with gradient steps of size 0.1."""
    agent, settings = Agent(), inputs[1:]
    optimizer = torch.optim.SGD(agent.parameters(), 0.1)
    result = function(agent, optimizer, *settings)
    if result is not None:
        raise Wrong("An update changes the agent, and returns nothing.")
    return torch.cat([parameter.detach().flatten() for parameter in agent.parameters()])


ROWS = torch.arange(8)
BATCH = (
    random(8, 3, seed=3),
    torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]),
    random(8, seed=4, scale=0.3) - 1.4,
    tensor(3, -1, 2, 0, 6, -4, 1, 2),
    random(8, seed=5, scale=2.0),
)
HALVES = [[ROWS[:4], ROWS[4:]], [ROWS[::2], ROWS[1::2]], [ROWS[[0, 5, 6, 3]], ROWS[[7, 1, 4, 2]]]]


def changed_update(**changes: Any) -> Callable:
    """An update with something changed. Without changes, it is right."""

    def update(agent, optimizer, batch, epochs, clip_coef, vf_coef, ent_coef, max_grad_norm):  # type: ignore[no-untyped-def]
        obs, actions, old, advantages, returns = batch
        if changes.get("normalized") == "once":
            advantages = solutions.normalize_advantages(advantages)
        for minibatches in epochs[: changes.get("epochs")]:
            if changes.get("recomputed") == "epoch":
                old = solutions.log_prob(agent.actor(obs), actions).detach()
            if changes.get("steps") == "epoch" or changes.get("zero") == "epoch":
                optimizer.zero_grad()
            for rows in minibatches:
                logits, values = agent.actor(obs[rows]), agent.critic(obs[rows])
                if not changes.get("table"):
                    values = values.squeeze(-1)
                ratios = solutions.ratio(logits, actions[rows], old[rows])
                if changes.get("recomputed") == "step":
                    ratios = ratios / ratios.detach()
                a = advantages[rows]
                if changes.get("normalized") == "unguarded":
                    a = (a - a.mean()) / (a.std() + 1e-8)
                elif changes.get("normalized") == "population":
                    a = (a - a.mean()) / (a.std(correction=0) + 1e-8)
                elif "normalized" not in changes:
                    a = solutions.normalize_advantages(a)
                policy_loss = solutions.clipped_loss(ratios, a, changes.get("clip", clip_coef))
                error = values - returns[rows]
                value = changes.get("half", 0.5) * error.square().mean()
                bonus = solutions.entropy(logits)
                bonus = bonus.sum() if changes.get("bonus") == "sum" else bonus.mean()
                loss = (
                    changes.get("policy", 1) * policy_loss
                    + changes.get("vf", vf_coef) * value
                    - changes.get("ent", 1) * ent_coef * bonus
                )
                if "zero" not in changes and changes.get("steps") != "epoch":
                    optimizer.zero_grad()
                loss.backward()
                norm = changes.get("norm", "together")
                if norm == "together":
                    nn.utils.clip_grad_norm_(agent.parameters(), max_grad_norm)
                elif norm == "values":
                    nn.utils.clip_grad_value_(agent.parameters(), max_grad_norm)
                elif norm == "each":
                    for parameter in agent.parameters():
                        nn.utils.clip_grad_norm_(parameter, max_grad_norm)
                elif norm == "actor":
                    nn.utils.clip_grad_norm_(agent.actor.parameters(), max_grad_norm)
                elif norm == "networks":
                    nn.utils.clip_grad_norm_(agent.actor.parameters(), max_grad_norm)
                    nn.utils.clip_grad_norm_(agent.critic.parameters(), max_grad_norm)
                if "steps" not in changes:
                    optimizer.step()
            if "steps" in changes:
                optimizer.step()

    return update


COEFS = 0.2, 0.7, 0.3
UPDATE = Exercise(
    12,
    {
        "one step, without value loss and bonus": (None, BATCH, [[ROWS]], 0.2, 0.0, 0.0, 1e9),
        "one step, without bonus": (None, BATCH, [[ROWS]], 0.2, 0.7, 0.0, 1e9),
        "one step": (None, BATCH, [[ROWS]], *COEFS, 1e9),
        "two epochs of one minibatch": (None, BATCH, [[ROWS], [ROWS]], *COEFS, 1e9),
        "three epochs of two minibatches": (None, BATCH, HALVES, *COEFS, 1e9),
        "a gradient above the limit": (None, BATCH, HALVES, *COEFS, 0.05),
        "a minibatch of one row": (None, BATCH, [[ROWS[:1], ROWS[1:]]], *COEFS, 1e9),
    },
    {
        "Gradients add up over the steps: call optimizer.zero_grad() before each backward().": changed_update(
            zero="never"
        ),
        "Gradients add up over the minibatches of an epoch: call optimizer.zero_grad() before each backward().": (
            changed_update(zero="epoch")
        ),
        "No weight changes: is optimizer.step() called for each minibatch, and zero_grad() before backward(), not after it?": changed_update(
            epochs=0
        ),
        "One step per epoch, on gradients that add up: take one for each minibatch.": changed_update(
            steps="epoch"
        ),
        "One step per epoch, on the gradient of its last minibatch: take one for each minibatch.": changed_update(
            steps="last"
        ),
        "Only one epoch is done.": changed_update(epochs=1),
        "The policy loss has the wrong sign.": changed_update(policy=-1),
        "The entropy bonus has the wrong sign: the loss has - ent_coef · entropy, so that more entropy is better.": changed_update(
            ent=-1
        ),
        "The entropy is summed over the minibatch: take the mean, as of the other losses.": changed_update(
            bonus="sum"
        ),
        "The entropy bonus is missing.": changed_update(ent=0),
        "The value loss is missing.": changed_update(vf=0.0),
        "The value loss is not multiplied by vf_coef.": changed_update(vf=1.0),
        "The value loss lacks its ½.": changed_update(half=1.0),
        "The value loss is a [B, B] table by broadcasting: values are [B, 1], returns [B]. Squeeze the values.": changed_update(
            table=True
        ),
        "The ratio is not clipped.": changed_update(clip=1e9),
        "The advantages are not normalised.": changed_update(normalized="never"),
        "A minibatch of one row makes all weights NaN: its advantage is 0, as in normalize_advantages.": changed_update(
            normalized="unguarded"
        ),
        "The variance of the advantages is divided by their number: torch.std divides it by their number minus 1.": changed_update(
            normalized="population"
        ),
        "The advantages are normalised once for the whole batch: do it in each minibatch.": changed_update(
            normalized="once"
        ),
        "The ratio is always 1: the policy is compared with itself, not with `old_log_probs`.": changed_update(
            recomputed="step"
        ),
        "The old log-probabilities are computed anew in each epoch: they are those of the policy that acted, in `batch`.": (
            changed_update(recomputed="epoch")
        ),
        "The clip of the gradient has no effect: call clip_grad_norm_ after backward() and before step().": changed_update(
            norm="never"
        ),
        "Each number of the gradient is clipped: clip the norm of all together (clip_grad_norm_).": changed_update(
            norm="values"
        ),
        "The gradient of each parameter is clipped alone: clip the norm of all together.": changed_update(
            norm="each"
        ),
        "The gradients of actor and critic are clipped apart: clip the norm of all together.": changed_update(
            norm="networks"
        ),
        "The critic's gradient is not clipped: clip the norm of all parameters together.": changed_update(
            norm="actor"
        ),
    },
    observe=weights_after,
)

# 13. Tokens

STOP = 9
TOKENS = torch.tensor(
    [[1, 9, 3, 4], [9, 1, 2, 3], [1, 2, 3, 9], [1, 2, 3, 4], [1, 9, 9, 9], [1, 9, 2, 9], [1, 9, 9, 2]]
)


def first_stop(tokens: Tensor, stop: int) -> Tensor:
    """Index of the first stop token, 0 where there is none."""
    return (tokens == stop).int().argmax(-1, keepdim=True)


def last_stop(tokens: Tensor, stop: int) -> Tensor:
    """True up to the last stop token; everywhere where there is none."""
    is_stop = tokens == stop
    following = is_stop.flip(-1).cumsum(-1).flip(-1)
    return (following > 0) | ~is_stop.any(-1, keepdim=True)


POSITIONS = torch.arange(4)
MASK = Exercise(
    13,
    {
        "stops in the middle": (TOKENS[:1], STOP),
        "stops at once": (TOKENS[1:2], STOP),
        "stops at the end": (TOKENS[2:3], STOP),
        "no stop token": (TOKENS[3:4], STOP),
        "another stop token follows": (TOKENS[4:], STOP),
        "all at once": (TOKENS, STOP),
    },
    {
        "The stop token is left out: it is part of the response, as the model has chosen it.": (
            lambda tokens, stop: (tokens == stop).cumsum(-1) == 0
        ),
        "This is everything but stop tokens: what stands after the first one is padding, whatever it is, and the stop token belongs to the response.": (
            lambda tokens, stop: tokens != stop
        ),
        "This is the wrong way round: true is what belongs to the response.": (
            lambda tokens, stop: ~solutions.response_mask(tokens, stop)
        ),
        "This is one token too many: the response ends with the stop token.": (
            lambda tokens, stop: torch.cat(
                [
                    torch.ones_like(tokens[:, :1], dtype=torch.bool),
                    solutions.response_mask(tokens, stop)[:, :-1],
                ],
                -1,
            )
        ),
        "A response without a stop token loses all but its first token: argmax is 0 where there is none. It is as long as the row.": (
            lambda tokens, stop: first_stop(tokens, stop) >= POSITIONS
        ),
        "A response without a stop token is left out: it was cut off, and is as long as the row.": (
            lambda tokens, stop: (
                solutions.response_mask(tokens, stop) & (tokens == stop).any(-1, keepdim=True)
            )
        ),
        "The length is the number of other tokens plus 1 here: but other tokens may follow the first stop token.": (
            lambda tokens, stop: (tokens != stop).sum(-1, keepdim=True) >= POSITIONS
        ),
        "This goes up to the second stop token: the response ends with the first one.": (
            lambda tokens, stop: (tokens == stop).cumsum(-1) <= 1
        ),
        "This goes up to the last stop token: the response ends with the first one.": last_stop,
        "This is everything: what stands after the first stop token is padding.": (
            lambda tokens, stop: torch.ones_like(tokens, dtype=torch.bool)
        ),
        "These are only the stop tokens: what stands before belongs to the response, too.": lambda tokens, stop: (
            tokens == stop
        ),
        "All stop tokens after the first one belong to the response here: they are padding.": (
            lambda tokens, stop: ((tokens == stop).cumsum(-1) == 0) | (tokens == stop)
        ),
    },
)
LOG_PROBS, REF_LOG_PROBS = random(2, 3, 4, seed=6)
LENGTHS = bools([1, 1, 0, 0], [1, 1, 1, 1], [1, 0, 0, 0])
SCORES = tensor(2, -1, 3)


def at_last(scores: Tensor, mask: Tensor) -> Tensor:
    """[P, L]: the score at the last token, else 0."""
    return F.one_hot(mask.sum(-1) - 1, mask.shape[-1]) * scores[:, None]


def after_last(scores: Tensor, mask: Tensor) -> Tensor:
    return F.one_hot(mask.sum(-1).clamp(max=mask.shape[-1] - 1), mask.shape[-1]) * scores[:, None]


def at_last_column(scores: Tensor, mask: Tensor) -> Tensor:
    return F.one_hot(torch.tensor(mask.shape[-1] - 1), mask.shape[-1]) * scores[:, None]


TOKEN_REWARDS = Exercise(
    13,
    {
        "scores of 0": (torch.zeros(3), LOG_PROBS, REF_LOG_PROBS, LENGTHS, 0.5),
        "the policy is the reference": (SCORES, LOG_PROBS, LOG_PROBS, LENGTHS, 0.5),
        "scores and a KL divergence": (SCORES, LOG_PROBS, REF_LOG_PROBS, LENGTHS, 0.5),
        "β = 0": (SCORES, LOG_PROBS, REF_LOG_PROBS, LENGTHS, 0.0),
    },
    {
        "The sign of the KL term: the policy is penalised where it is more likely than the reference to choose the token.": (
            lambda s, new, ref, mask, b: b * (new - ref) * mask + at_last(s, mask)
        ),
        "The KL term is not multiplied by β.": lambda s, new, ref, mask, b: (
            -(new - ref) * mask + at_last(s, mask)
        ),
        "The KL term goes beyond the response: multiply it by the mask.": (
            lambda s, new, ref, mask, b: -b * (new - ref) + at_last(s, mask)
        ),
        "The score is added in several columns: pair each response with its own last token, by two lists of indices or scatter_add.": (
            lambda s, new, ref, mask, b: (
                (-b * (new - ref) + s[:, None] * F.one_hot(mask.sum(-1) - 1, mask.shape[-1]).any(0)) * mask
            )
        ),
        "The KL term is missing.": lambda s, new, ref, mask, b: at_last(s, mask).float(),
        "The score is missing.": lambda s, new, ref, mask, b: -b * (new - ref) * mask,
        "Every token has the score: it comes once, at the last token.": (
            lambda s, new, ref, mask, b: (-b * (new - ref) + s[:, None]) * mask
        ),
        "The score is divided among the tokens: it comes once, at the last token.": (
            lambda s, new, ref, mask, b: (-b * (new - ref) + (s / mask.sum(-1))[:, None]) * mask
        ),
        "The score stands in the last column, where shorter responses have padding: it belongs to the last token of the response.": (
            lambda s, new, ref, mask, b: -b * (new - ref) * mask + at_last_column(s, mask)
        ),
        "The score stands in the last column, and the mask removes it from shorter responses: it belongs to their last token.": (
            lambda s, new, ref, mask, b: (-b * (new - ref) + at_last_column(s, mask)) * mask
        ),
        "The score stands one position too late: the last token is at index length - 1.": (
            lambda s, new, ref, mask, b: -b * (new - ref) * mask + after_last(s, mask)
        ),
        "The score stands at the first token: it belongs to the last one.": (
            lambda s, new, ref, mask, b: -b * (new - ref) * mask + F.one_hot(torch.tensor(0), 4) * s[:, None]
        ),
        "The whole KL divergence stands at the last token: each token has its own term.": (
            lambda s, new, ref, mask, b: at_last(s - b * ((new - ref) * mask).sum(-1), mask)
        ),
        "The KL term has an upper limit of 0 here: where the policy is less likely than the reference to choose the token, it is positive.": (
            lambda s, new, ref, mask, b: -b * (new - ref).clamp(min=0) * mask + at_last(s, mask)
        ),
        "The KL term is the absolute value of the log-ratio: where the policy is less likely than the reference to choose the token, it is positive.": (
            lambda s, new, ref, mask, b: -b * (new - ref).abs() * mask + at_last(s, mask)
        ),
        "The KL term is k3 of the log-ratio here: in the reward, it is the log-ratio itself.": (
            lambda s, new, ref, mask, b: -b * k3(ref - new) * mask + at_last(s, mask)
        ),
        "The KL term is weighted by the token's probability: tokens are samples of the policy, so each counts once.": (
            lambda s, new, ref, mask, b: -b * new.exp() * (new - ref) * mask + at_last(s, mask)
        ),
        "The score takes the place of the last token's KL term: add it.": (
            lambda s, new, ref, mask, b: torch.where(
                at_last(torch.ones(3), mask) > 0, s[:, None], -b * (new - ref) * mask
            )
        ),
        "The score is multiplied by β, too.": (
            lambda s, new, ref, mask, b: -b * (new - ref) * mask + b * at_last(s, mask)
        ),
    },
)

# 14. GRPO

GROUPS = tensor([1, 0, 0, 1], [3, 2, 5, 4], [0, 0, 0, 1])


def leave_one_out(scores: Tensor) -> Tensor:
    others = (scores.sum(-1, keepdim=True) - scores) / (scores.shape[-1] - 1)
    return scores - others


GROUP = Exercise(
    14,
    {
        "3 groups of 4": (GROUPS,),
        "small scores": (0.02 * GROUPS,),
        "equal scores in one group": (tensor([1, 1, 1], [0, 2, 1]),),
        "1 group": (GROUPS[:1],),
    },
    {
        "The mean and the deviation are those of the whole batch: responses are compared with those to the same prompt (dim=-1).": (
            lambda s: (s - s.mean()) / (s.std() + 1e-4)
        ),
        "The deviation is that of the whole batch: take that of the group (dim=-1).": (
            lambda s: (s - s.mean(-1, keepdim=True)) / (s.std() + 1e-4)
        ),
        "The mean is that of the whole batch: take that of the group (dim=-1).": (
            lambda s: (s - s.mean()) / (s.std(-1, keepdim=True) + 1e-4)
        ),
        "The mean and the deviation are over the prompts (dim=0): compare responses to the same prompt, in a row.": (
            lambda s: (s - s.mean(0)) / (s.std(0) + 1e-4)
        ),
        "They are not divided by the deviation of the group.": lambda s: s - s.mean(-1, keepdim=True),
        "The mean of the group is not subtracted.": lambda s: s / (s.std(-1, keepdim=True) + 1e-4),
        "They are divided by the variance, not by its root.": (
            lambda s: (s - s.mean(-1, keepdim=True)) / (s.var(-1, keepdim=True) + 1e-4)
        ),
        "Equal scores give 0 / 0, NaN: add 1e-4 to the deviation.": (
            lambda s: (s - s.mean(-1, keepdim=True)) / s.std(-1, keepdim=True)
        ),
        "The variance is divided by G: torch.std divides it by G - 1, as is asked.": (
            lambda s: (s - s.mean(-1, keepdim=True)) / (s.std(-1, keepdim=True, correction=0) + 1e-4)
        ),
        "The mean is that of the other responses, and there is no deviation: this is RLOO. GRPO's mean has the response itself, too.": leave_one_out,
        "The mean is that of the other responses: GRPO's has the response itself, too.": (
            lambda s: leave_one_out(s) / (s.std(-1, keepdim=True) + 1e-4)
        ),
        "1e-8 is added to the deviation, where GRPO adds 1e-4.": (
            lambda s: (s - s.mean(-1, keepdim=True)) / (s.std(-1, keepdim=True) + 1e-8)
        ),
        "1e-4 is added to the variance, not to the deviation.": (
            lambda s: (s - s.mean(-1, keepdim=True)) / (s.var(-1, keepdim=True) + 1e-4).sqrt()
        ),
        "The sign: a response that is better than its group has a positive advantage.": (
            lambda s: -solutions.group_advantages(s)
        ),
        "These are the ratios of the scores to the group's mean: subtract the mean.": (
            lambda s: s / s.mean(-1, keepdim=True)
        ),
    },
)

EXERCISES = {
    "log_prob": LOG_PROB,
    "ratio": RATIO,
    "discounted_returns": RETURNS,
    "td_errors": TD_ERRORS,
    "gae": GAE,
    "compute_gae": COMPUTE_GAE,
    "normalize_advantages": NORMALIZE,
    "clipped_loss": CLIPPED_LOSS,
    "has_gradient": GRADIENT,
    "value_loss": VALUE_LOSS,
    "entropy": ENTROPY,
    "kl_divergence": KL,
    "kl_estimates": ESTIMATES,
    "adapt_kl_coef": ADAPT,
    "update_moments": MOMENTS,
    "make_minibatches": MINIBATCHES,
    "update": UPDATE,
    "response_mask": MASK,
    "token_rewards": TOKEN_REWARDS,
    "group_advantages": GROUP,
}
