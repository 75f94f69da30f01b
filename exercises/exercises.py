"""PPO, written by you: twenty functions to fill in, from the ratio to GRPO.

    python exercises/check.py                   # grades all of them
    python exercises/check.py log_prob          # grades one, and says what is wrong

Replace each `raise NotImplementedError` by a few lines. All tensors are float32, unless it says otherwise. Do
not change the arguments in place: the caller still needs them. You may call functions that you have written
before. docs/ppo_explained.md has the ideas in the same order; exercises/solutions.py has an answer to each.

  [PPO] Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE] Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
        arXiv:1506.02438

Shapes: T steps per rollout, N environments, B transitions in a minibatch, A actions; of a language model, P
prompts, G responses to each, L tokens per response.
"""

import torch
from torch import Tensor, nn

# 1. The ratio


def log_prob(logits: Tensor, actions: Tensor) -> Tensor:
    """Log-probabilities [B] of actions [B] (integers) in a policy of logits [B, A].

    π(a|s) is the softmax of the logits. Do not use torch.distributions: this is what it computes. The result
    keeps its gradient, as those of `ratio`, `clipped_loss`, `value_loss` and `entropy` do.
    """
    raise NotImplementedError


def ratio(logits: Tensor, actions: Tensor, old_log_probs: Tensor) -> Tensor:
    """Ratios [B] of probabilities, r = π(a|s) / π_old(a|s) ([PPO], section 3).

    `old_log_probs` [B] are log π_old(a|s), stored when the actions were taken. Probabilities may be as small
    as 1e-60, which float32 cannot hold. Their ratio is about 1 nevertheless.
    """
    raise NotImplementedError


# 2. Returns


def discounted_returns(rewards: Tensor, gamma: float) -> Tensor:
    """Discounted returns [T] of an episode with these rewards [T], which ends after its last reward.

    G_t = r_t + γ r_{t+1} + γ² r_{t+2} + ...
    """
    raise NotImplementedError


# 3. Advantages


def td_errors(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, gamma: float
) -> Tensor:
    """Temporal-difference errors [T, N], δ_t = r_t + γ V(s_{t+1}) - V(s_t) ([GAE], equation 10).

    All tensors are [T, N]. `values` are V(s_t); `next_values` are V(s_{t+1}), of the states that the steps
    led to. `terminated` (bool) says that the task ended the episode at s_{t+1}: no reward follows, so that
    state is worth 0, whatever the critic says.
    """
    raise NotImplementedError


def gae(deltas: Tensor, ended: Tensor, gamma: float, gae_lambda: float) -> Tensor:
    """Generalised advantage estimates [T, N] ([GAE], equation 16; [PPO], equation 11).

    A_t = δ_t + γλ δ_{t+1} + (γλ)² δ_{t+2} + ..., up to the end of the episode, or of the rollout.

    `deltas` [T, N] are those of `td_errors`. `ended` [T, N] (bool) says that step t ended an episode: δ_{t+1}
    is of the next one.
    """
    raise NotImplementedError


# 4. Time limits


def compute_gae(
    rewards: Tensor, values: Tensor, next_values: Tensor, terminated: Tensor, truncated: Tensor,
    gamma: float, gae_lambda: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Advantages [T, N], and returns [T, N]: the critic's targets, A_t + V(s_t).

    All tensors are [T, N]. An episode may end in two ways, even in both at once:

    - `terminated`: the task is over, such as when the pole falls. No reward follows.
    - `truncated`: a time limit ended the episode, but the task would have gone on, and brought more reward.

    `next_values` are the values of the states that the steps led to. Within an episode, that is the next row
    of `values`. Where a step ended an episode, it is not: the next row is of another one.
    """
    raise NotImplementedError


# 5. Normalisation


def normalize_advantages(advantages: Tensor) -> Tensor:
    """Advantages [B] minus their mean, divided by their standard deviation (torch's, plus 1e-8).

    The 1e-8 is there for equal advantages, whose deviation is 0. If there is only one advantage, there is
    nothing to compare it with: return 0.
    """
    raise NotImplementedError


# 6. The clipped objective


def clipped_loss(ratios: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """The loss whose minimum is sought, a scalar: -L^CLIP of [PPO], equation 7.

    `ratios` and `advantages` are [B], and the loss is a mean over them. `clip_coef` is ε.
    """
    raise NotImplementedError


def has_gradient(ratios: Tensor, advantages: Tensor, clip_coef: float) -> Tensor:
    """Which transitions still change the policy: bool [B], true where the gradient of L^CLIP is not 0.

    Compute it from the inequalities, without autograd: when does the clip stop a transition with A > 0, and
    when one with A < 0? No ratio is exactly at a limit, and no advantage is 0.
    """
    raise NotImplementedError


# 7. The value loss


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip_coef: float) -> Tensor:
    """The clipped value loss, a scalar: half of the mean of the larger of two squared errors.

    All tensors are [B]. The first error is that of `values`. The second is that of `values` whose change
    since the rollout, from `old_values`, is clipped to ±`clip_coef`. It is detail 9 of "The 37 Implementation
    Details of PPO" (Huang et al. 2022), and not in the paper.
    """
    raise NotImplementedError


# 8. Entropy


def entropy(logits: Tensor) -> Tensor:
    """Entropies [B], in nats, of policies with logits [B, A]: -Σ_a π(a|s) log π(a|s).

    A logit may be -inf: such an action is forbidden, and adds nothing to the entropy. Its gradient is 0.
    """
    raise NotImplementedError


# 9. The KL divergence


def kl_divergence(old_logits: Tensor, logits: Tensor) -> Tensor:
    """KL(π_old ‖ π) [B], in nats, of policies with logits [B, A]: how far an update has moved the policy.

    It is the mean of log π_old(a|s) - log π(a|s) over the actions that π_old would take. All logits are
    finite, but a probability may be 0 in float32.
    """
    raise NotImplementedError


def kl_estimates(old_log_probs: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Two estimates of KL(π_old ‖ π) from sampled actions, k1 and k3 (both scalars, means over B).

    Both arguments are [B], log-probabilities of the actions that π_old took. With r = π(a|s) / π_old(a|s):
    k1 = -log r has much noise, and may be negative. k3 = (r - 1) - log r has the same expectation, and is
    never negative. (John Schulman, "Approximating KL Divergence", 2020.)
    """
    raise NotImplementedError


def adapt_kl_coef(kl_coef: float, kl: float, target: float) -> float:
    """The next β of the adaptive KL penalty ([PPO], section 4), after an update with this KL divergence.

    Moved too far, above 1.5 times the target: penalise twice as much. Not far enough, below the target
    divided by 1.5: half as much. Between these limits, β stays.
    """
    raise NotImplementedError


# 10. Running statistics


def update_moments(
    mean: Tensor, var: Tensor, count: int, new: Tensor
) -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """Mean [D], variance [D] and number of all rows so far, after `new` rows [B, D] have come.

    `mean`, `var` and `count` are those of the rows before, which are not at hand; `count` is 0 if there were
    none. Variances are divided by the number of rows. The result must be what one would compute from all rows
    at once. (Chan et al. 1979 combine two groups of rows in this way.)
    """
    raise NotImplementedError


# 11. Minibatches


def make_minibatches(batch_size: int, num_minibatches: int) -> list[Tensor]:
    """Row numbers (int64) of the minibatches of one epoch: each of the `batch_size` rows once, shuffled anew.

    Any two rows may meet in a minibatch. If the sizes cannot be equal, they differ by one at most.
    `num_minibatches` is not above `batch_size`.
    """
    raise NotImplementedError


# 12. An update


def update(
    agent: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...], epochs: list[list[Tensor]],
    clip_coef: float, vf_coef: float, ent_coef: float, max_grad_norm: float,
) -> None:  # fmt: skip
    """Learn from a rollout: one gradient step for each minibatch of each epoch ([PPO], Algorithm 1).

    `agent.actor(obs)` gives logits [B, A], `agent.critic(obs)` values [B, 1]. `batch` is (obs [B, D], actions
    [B], old_log_probs [B], advantages [B], returns [B]), B being all rows of the rollout. `epochs` has the
    minibatches of each epoch, as row numbers.

    The loss is clipped_loss + vf_coef · ½ (V - returns)² - ent_coef · entropy, as means over rows ([PPO],
    equation 9 with the sign of a loss). Advantages are normalised in each minibatch, as by
    `normalize_advantages`. The gradient of all parameters together is clipped to `max_grad_norm`.
    """
    raise NotImplementedError


# 13. Tokens


def response_mask(tokens: Tensor, stop_token: int) -> Tensor:
    """Which tokens [P, L] belong to the responses: bool [P, L], true up to the first stop token.

    The stop token is part of its response, as the model has chosen it. What stands after it is padding,
    whatever it is. A response without a stop token was cut off, and is as long as the row.
    """
    raise NotImplementedError


def token_rewards(
    scores: Tensor, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor, kl_coef: float
) -> Tensor:  # fmt: skip
    """Rewards [P, L] of tokens: -β (log π - log π_ref) at each, and the score at the last one.

    `scores` [P] are of whole responses. `log_probs` and `ref_log_probs` [P, L] are of the sampled tokens, in
    the policy and in the reference. `mask` [P, L] is that of `response_mask`: beyond it, rewards are 0.
    (Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", equation 2.)
    """
    raise NotImplementedError


# 14. GRPO


def group_advantages(scores: Tensor) -> Tensor:
    """Advantages [P, G] of the G responses to each of P prompts, without a critic: GRPO.

    A group has all responses to the same prompt. An advantage is the response's score minus the mean of its
    group, divided by the standard deviation of its group (torch's, plus 1e-4, as scores may be equal).
    (Shao et al. 2024, "DeepSeekMath", section 4.1.2.)
    """
    raise NotImplementedError
