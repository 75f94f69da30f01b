# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.5,<2.14", "numpy", "tensorboard", "tyro>=0.9"]
# ///
"""Group Relative Policy Optimization (GRPO) for language models, in one file.

    python grpo.py
    python grpo.py --task sums
    python grpo.py --model <folder> --reward-model <folder> --prompts prompts.jsonl --learning-rate 1e-6
    torchrun --nproc-per-node 4 grpo.py --model <folder> --reward-function my_module:reward ...

Without --model, it builds a small task. For `reviews`, a small transformer learns to write reviews, a
reward model learns from the choices of a simulated human, and GRPO trains the first with the scores of the
second. The best policy over all likely responses is known, and the run ends by saying how close it came. For
`sums`, a small transformer learns to add from examples half of which are wrong, and GRPO trains it with a
reward of 1 for a right answer. With --model, it trains a model of the transformers library (to be installed)
on your prompts: lines of JSON such as {"prompt": "..."}. A reward function takes two lists of texts, prompts
and responses, and returns as many scores; several are summed.

  [PPO]      Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [Ziegler]  Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593
  [Summary]  Stiennon et al. 2020, "Learning to Summarize from Human Feedback", arXiv:2009.01325
  [RLHF]     Ouyang et al. 2022, "Training Language Models to Follow Instructions with Human Feedback",
             arXiv:2203.02155
  [DPO]      Rafailov et al. 2023, "Direct Preference Optimization: Your Language Model is Secretly a Reward
             Model", arXiv:2305.18290
  [GRPO]     Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
             Models", arXiv:2402.03300; also Guo et al. 2025, "DeepSeek-R1", arXiv:2501.12948
  [RLOO]     Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
             Human Feedback in LLMs", arXiv:2402.14740
  [N+]       Huang et al. 2024, "The N+ Implementation Details of RLHF with PPO", arXiv:2403.17031
  [DAPO]     Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
             arXiv:2503.14476
  [Dr. GRPO] Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783
  [GSPO]     Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071
  [Lite PPO] Liu et al. 2025, "Part I: Tricks or Traps? A Deep Dive into RL for LLM Reasoning",
             arXiv:2508.08221

This file has two halves. The first is GRPO, in the order of the paper; it ends with `train`, the paper's
Algorithm 1. The second, which can be skipped, is what training needs around it.

Up to three networks take part: the actor, which is trained; the reference, a frozen copy of the actor as it
was at first; and the reward model, also frozen. With --kl-coef 0 there is no reference, with reward functions
no reward model. There is no critic: the baseline is the mean reward of a group, the G responses to a prompt.

Shapes: B responses in a batch, group by group; P tokens of the longest prompt, L = --max-response-length,
S = P + L, V tokens in the vocabulary. Prompts are padded on the left, responses on the right. Masks come from
lengths and not from the padding token, which may well be the stop token.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pkgutil
import random
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, make_dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Experiment:  # the comments are the texts of --help
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    plan: bool = False  # only print what the run would do, and which advice it may give
    resume: str | None = None  # resume from this checkpoint, replacing it; other flags override its settings
    checkpoint_seconds: float = 600.0  # time between checkpoints; there is one at the start and the end, too


@dataclass
class Task:
    task: Literal["reviews", "sums"] = "reviews"  # built in; sums have --kl-coef and penalty 0
    model: str | None = None  # the actor: a folder or name for transformers; None is for the built-in task
    reward_model: str | None = None  # folder or name of a model that scores a sequence of the same tokens
    reward_function: tuple[str, ...] = ()  # or functions of texts: module:function, or ...=weight
    prompts: str | None = None  # file with a line of JSON for each prompt
    max_response_length: int = 8  # L: longer responses are cut off, and have no stop token
    missing_eos_penalty: float = 2.0  # subtracted from the score of a response without a stop token
    temperature: float = 1.0  # divides the logits in sampling, and in every log-probability
    reward_model_updates: int = 0  # reviews: iterations between updates of the reward model; 0: none


@dataclass
class Algorithm:
    total_episodes: float = 61_440  # total number of responses, for example 1e5
    batch_size: int = 512  # B: responses per iteration, over all processes
    group_size: int = 8  # G: responses to each prompt
    num_iterations: int = 2  # μ: passes over each batch
    num_minibatches: int = 4  # minibatches per pass, one gradient step each
    micro_batch_size: int = 64  # responses per forward pass in learning, and per call of a reward function
    learning_rate: float = 1e-3  # Adam's step size, decayed linearly to 0; for real models, 1e-6 to 1e-5
    kl_coef: float = 0.1  # β: weight of the KL divergence from the reference; 0 needs no reference
    kl_target: float | None = None  # adapt β to keep this divergence, in nats per response
    kl_in: Literal["reward", "loss", "loss-weighted"] = "reward"  # k1 in the reward, or k3 in the loss
    scale_rewards: Literal["none", "group", "batch"] = "group"  # whose standard deviation divides advantages
    loss_aggregation: Literal["sequence-mean", "token-mean", "constant"] = "constant"  # weights of tokens
    importance_sampling: Literal["token", "sequence"] = "token"  # ratio per token, or response ([GSPO])
    clip_coef: float = 0.2  # ε: lower limit of the ratio of new to old probability is 1 - ε
    clip_coef_high: float = 0.2  # ε_high: upper limit is 1 + ε_high; [DAPO] has 0.28
    mask_truncated: bool = False  # learn nothing from responses without a stop token ([DAPO], §3.4)
    resampling_tries: int = 0  # times that groups of equal scores are sampled anew ([DAPO], §3.2)
    max_grad_norm: float = 1.0  # clip the gradient to this norm


@dataclass
class Performance:
    device: str = "cpu"  # where the networks live: cpu, cuda or mps; the on-the-spot task is for the CPU
    bfloat16: bool = False  # compute in bfloat16; log-probabilities and trained weights stay in float32
    gradient_checkpointing: bool = False  # save memory by computing activations twice
    lora_rank: int = 0  # train adapters of this rank on frozen weights (needs peft); 0 trains all weights


@dataclass
class Args(Performance, Algorithm, Task, Experiment):
    """All settings. The four groups are those of --help."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, np.generic):
                setattr(self, name, value.item())  # checkpoints with NumPy's numbers cannot be loaded


# Defaults for --task sums: right answers are all that counts, and nothing holds the actor to the reference.
SUMS = Args(task="sums", kl_coef=0.0, missing_eos_penalty=0.0)

# ------------------------------------------------- Networks -------------------------------------------------


class Output(NamedTuple):
    """What a model returns, by the names of transformers."""

    past_key_values: Any  # keys and values of all tokens so far, to be passed to the next call
    last_hidden_state: Any = None  # [B, T, W]
    logits: Any = None  # [B, T, V]


class Block(nn.Module):
    """A layer of GPT-2: attention, and a perceptron with one hidden layer; each is added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, visible: Tensor, past: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, W] after this layer, and the keys and values of all S tokens, with those of the past.

        `visible` [B, 1, T, S] says to which tokens each of the T attends.
        """
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, keys, values = qkv.permute(2, 0, 3, 1, 4)
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.output(F.gelu(self.hidden(self.norm2(x)), approximate="tanh")), (keys, values)


class Trunk(nn.Module):
    """GPT-2 (Radford et al. 2019) without its last layer; it is called as models of transformers are."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, past_key_values: Any,
        use_cache: bool,
    ) -> Output:  # fmt: skip
        """Hidden states [B, T, W] of input_ids [B, T], the last T of S tokens; attention_mask is [B, S]."""
        new, total = input_ids.shape[1], attention_mask.shape[1]
        causal = torch.ones(new, total, dtype=torch.bool, device=input_ids.device).tril(total - new)
        hidden, cache = self.tokens(input_ids) + self.positions(position_ids), []
        for i, block in enumerate(self.blocks):
            past = past_key_values[i] if past_key_values else None
            hidden, keys_values = block(hidden, attention_mask[:, None, None, :] & causal, past)
            cache.append(keys_values)
        return Output(cache if use_cache else None, last_hidden_state=self.norm(hidden))


class GPT(nn.Module):
    """A language model: a trunk, whose token embeddings also make the logits."""

    def __init__(self, vocabulary: int, width: int = 64, layers: int = 2, heads: int = 4, context: int = 32):
        super().__init__()
        self.base_model, self.context = Trunk(vocabulary, width, layers, heads, context), context

    def forward(self, *, logits_to_keep: int, **inputs: Any) -> Output:
        """Logits [B, T, V] at the last T = `logits_to_keep` of the trunk's inputs."""
        output = self.base_model(**inputs)
        hidden = output.last_hidden_state[:, -logits_to_keep:]
        return Output(output.past_key_values, logits=hidden @ self.base_model.tokens.weight.T)


class Responses(NamedTuple):
    """B prompts with responses."""

    tokens: Tensor  # [B, S]
    attention: Tensor  # [B, S], true at tokens that are not padding
    mask: Tensor  # [B, L], true at the responses' tokens, which include the stop token


class ScalarModel(nn.Module):
    """A trunk with one output: a reward model."""

    def __init__(self, trunk: nn.Module, head: nn.Module):
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, batch: Responses | Batch) -> Tensor:
        """Outputs [B, L + 1]: before each token of the response, and after the last."""
        output = self.trunk(**model_inputs(batch.tokens, batch.attention))
        hidden = at_least_float32(output.last_hidden_state[:, -batch.mask.shape[1] - 1 :])
        with torch.autocast(hidden.device.type, enabled=False):  # or 16.06 would be 16, as in bfloat16
            return self.head(hidden).squeeze(-1)


class Models(nn.Module):
    """The networks, and what belongs to them."""

    def __init__(self, actor: nn.Module, reference: Any, reward_model: Any):
        super().__init__()
        self.actor, self.reference, self.reward_model = actor, reference, reward_model
        self.reward_functions: list[tuple[Callable, float]] = []  # of texts, with their weights
        self.tokenizer: Any = None
        self.stop_tokens: Any = None  # [K], each of which ends a response
        self.prompts: Any = None  # all prompts [N, P], and their masks [N, P]
        self.prompt_texts: dict[tuple[int, ...], str] = {}  # as in the file, by their tokens
        self.held_out: Any = None  # of sums, those that are never trained on
        self.comparisons: list[tuple[Tensor, ...]] = []  # see `learn_from_comparisons`


def model_inputs(
    tokens: Tensor, attention: Tensor, past: Any = None, use_cache: bool = False
) -> dict[str, Any]:
    """Arguments for a model: tokens [B, T], the last T of S, and a mask [B, S] of what is not padding.

    Positions count tokens and not padding, so a prompt has the same ones in every batch. `past` are the keys
    and values of all tokens but the last T.
    """
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions}
    return inputs | {"past_key_values": past, "use_cache": use_cache}


def at_least_float32(x: Tensor) -> Tensor:
    """x as float32, if it has less precision: numbers from -4 to -8 in bfloat16 are 1/32 apart."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def generate(models: Models, prompts: Tensor, attention: Tensor, args: Args) -> tuple[Responses, Tensor]:
    """Sample a response to each of the prompts [B, P], whose mask is `attention` [B, P].

    Each ends with a stop token or after --max-response-length tokens. Also returns log π [B, L] as sampled.
    To use an inference server, replace this function.
    """
    (size, start), length = prompts.shape, args.max_response_length
    tokens = F.pad(prompts, (0, length), value=int(models.stop_tokens[0]))
    attention = F.pad(attention, (0, length), value=False)
    log_probs = torch.zeros(size, length, device=tokens.device)
    active = torch.ones(size, dtype=torch.bool, device=tokens.device)
    new, past = prompts, None
    for t in range(start, start + length):
        inputs = model_inputs(new, attention[:, :t], past, use_cache=True)
        output = models.actor(**inputs, logits_to_keep=1)
        log_policy = torch.log_softmax(at_least_float32(output.logits[:, -1]) / args.temperature, -1)
        new, past = torch.multinomial(log_policy.exp(), 1), output.past_key_values
        log_probs[:, t - start] = log_policy.gather(1, new).squeeze(1)
        tokens[active, t] = new[active, 0]
        attention[:, t] = active
        active = active & ~torch.isin(new[:, 0], models.stop_tokens)
        if not active.any():
            break
    return Responses(tokens, attention, attention[:, start:]), log_probs


def token_log_probs(model: nn.Module, batch: Responses | Batch, temperature: float) -> Tensor:
    """log π [B, L] of the responses' tokens.

    Logits are divided by the temperature, because the policy that acted is the one with this temperature.
    """
    length = batch.mask.shape[1]
    output = model(**model_inputs(batch.tokens, batch.attention), logits_to_keep=length + 1)
    logits = at_least_float32(output.logits[:, -length - 1 : -1])  # those at a token are for the next one
    log_policy = torch.log_softmax(logits / temperature, -1)
    return log_policy.gather(2, batch.tokens[:, -length:, None]).squeeze(2)


def last_outputs(reward_model: nn.Module, batch: Responses) -> Tensor:
    """The reward model's outputs [B] at the responses' last tokens."""
    return reward_model(batch).gather(1, batch.mask.sum(1, keepdim=True)).squeeze(1)


def ends_with_stop(batch: Responses, stop_tokens: Tensor) -> Tensor:
    """Whether the responses end with a stop token [B], or were cut off."""
    return (torch.isin(batch.tokens[:, -batch.mask.shape[1] :], stop_tokens) & batch.mask).any(1)


def score(models: Models, batch: Responses, args: Args) -> Tensor:
    """Scores [B] by the reward model or the weighted reward functions, less the penalty for no stop token."""
    if models.reward_functions:
        prompts, responses = texts(models, batch)
        scores = torch.zeros(len(prompts), device=args.device)
        with autocast(replace(args, bfloat16=False)):
            for function, weight in models.reward_functions:
                scores += weight * call_reward_function(function, prompts, responses).to(args.device)
    else:
        scores = last_outputs(models.reward_model, batch)
    return scores - args.missing_eos_penalty * ~ends_with_stop(batch, models.stop_tokens)


# ------------------------------------------------- Equations ------------------------------------------------


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where the mask is true, over all processes."""
    total, count = sum_over_processes(torch.stack([(x * mask).sum(), mask.sum()]))
    return total / count


def mean(x: Tensor) -> Tensor:
    """Mean of x over all processes."""
    return masked_mean(x, torch.ones_like(x))


def standard_deviation(x: Tensor) -> Tensor:
    """Standard deviation of x over all processes, with n - 1 in the denominator."""
    count = sum_over_processes(torch.tensor(len(x), device=x.device))
    return (mean((x - mean(x)).square()) * count / (count - 1)).sqrt()


def group_advantages(rewards: Tensor, group_size: int, scale_rewards: str) -> Tensor:
    """Advantages [B] of responses with these rewards [B], whose baseline is the mean of their group of G.

        none     A_i = r_i - mean(r_1 ... r_G)                              [Dr. GRPO], §3.2
        group    A_i = (r_i - mean(r_1 ... r_G)) / (std(r_1 ... r_G) + c)   [GRPO], §4.1.2
        batch    A_i = (r_i - mean(r_1 ... r_G)) / (std(r_1 ... r_B) + c)   [Lite PPO]; c is 1e-4

    Without scaling, the expected gradient is (1 - 1/G) ∇J, because r_i is part of its own baseline. The
    leave-one-out baseline of [RLOO] gives G/(G - 1) times these advantages: apart from this constant, it is
    --scale-rewards none. Division by the group's deviation gives too easy and too hard prompts, whose
    responses nearly all have the same reward, as much weight as others ([Dr. GRPO], §3.1). With the KL in the
    reward, this rescales each prompt's step; with the KL in the loss, it also changes what the reward weighs
    against the KL, and with it the optimum.
    """
    groups = rewards.view(-1, group_size)
    advantages = groups - groups.mean(1, keepdim=True)
    advantages[without_variance(rewards, group_size)] = 0  # also where the mean was rounded
    if scale_rewards == "group":
        advantages = advantages / (groups.std(1, keepdim=True) + 1e-4)
    elif scale_rewards == "batch":
        advantages = advantages / (standard_deviation(rewards) + 1e-4)
    return advantages.flatten()


def without_variance(scores: Tensor, group_size: int) -> Tensor:
    """Which groups [B / G] have the same score for all their responses, and so teach nothing about it."""
    return scores.view(-1, group_size).std(1) < 1e-6


def loss_weights(mask: Tensor, loss_aggregation: str) -> Tensor:
    """The weight [B, L] of each token in a minibatch's loss, which is Σ_it w_it loss_it, over all processes.

        sequence-mean   1/B Σ_i 1/|o_i| Σ_t loss_it   [GRPO], equation 3
        token-mean      1/(Σ_i |o_i|) Σ_it loss_it    [DAPO], §3.3
        constant        1/(B L) Σ_it loss_it          [Dr. GRPO], §3.2

    |o_i| is the number of tokens of response i, and B that of responses in the minibatch. The gradient of
    E[r] is the mean of A_i Σ_t ∇log π over the responses: the constant gives it, divided by L. The mean over
    a sequence divides by the length, which the gradient does not: among right answers it favours the short,
    among wrong ones it spares the long, so that wrong answers grow ([Dr. GRPO], §3.1). The mean over tokens
    has the constant's direction, but minibatches of short responses weigh more.
    """
    lengths = mask.sum(1, keepdim=True).clamp(min=1)
    responses = sum_over_processes(torch.tensor(len(mask), device=mask.device))
    if loss_aggregation == "sequence-mean":
        return mask / (responses * lengths)
    if loss_aggregation == "token-mean":
        return mask / sum_over_processes(mask.sum()).clamp(min=1)
    return mask / (responses * mask.shape[1])


class Batch(NamedTuple):
    """B responses to learn from."""

    tokens: Tensor  # [B, S]
    attention: Tensor  # [B, S]
    mask: Tensor  # [B, L], true at tokens to learn from
    log_probs: Tensor  # [B, L], log π_old
    ref_log_probs: Tensor  # [B, L], log π_ref
    advantages: Tensor  # [B]
    scores: Tensor  # [B], to be shown


CLIPS = "clip_ratio/low_mean", "clip_ratio/high_mean"
METRICS = "loss", *CLIPS, "policy/approxkl_avg", "val/ratio"


def grpo_loss(
    log_probs: Tensor, batch: Batch, weights: Tensor, kl_coef: float, args: Args
) -> tuple[Tensor, Tensor]:
    """The loss to minimise ([GRPO], equation 3, negated), from log π and weights [B, L]; also METRICS [5].

        loss_it = -min(ρ A_i, clip(ρ, 1 - ε, 1 + ε_high) A_i) + β KL_it

    All are sums, as a minibatch may be spread over several forward passes and processes. ρ is π / π_old, by
    --importance-sampling,

        token      of the token    [GRPO]; ignores that the tokens before it are off-policy, too
        sequence   of all tokens of the response, as their geometric mean    [GSPO], §4.1

    Their gradients are the same as long as π = π_old. GSPO clips whole responses, and needs a far smaller ε,
    because such means differ less from 1. KL_it is, by --kl-in, with x = π_ref / π,

        reward          0; instead, -β Σ_t log(π_old / π_ref) is part of the reward (k1)
        loss            k3 = x - 1 - log x    [GRPO], equation 4: customary
        loss-weighted   k3 times the token's π / π_old

    (k1 and k3 are of Schulman 2020, "Approximating KL Divergence".) Only the first has the gradient of
    J = E[score] - β KL(π ‖ π_ref). For each token, the expected gradient of k3 is that of KL(π_ref ‖ π), and
    of the weighted one that of KL(π ‖ π_ref); but in the loss, neither sees what a token does to the KL of
    those after it. Both end elsewhere.
    """
    log_ratio = (log_probs - batch.log_probs) * batch.mask
    token_ratio = ratio = log_ratio.exp()
    if args.importance_sampling == "sequence":
        lengths = batch.mask.sum(1, keepdim=True).clamp(min=1)
        ratio = (log_ratio.sum(1, keepdim=True) / lengths).exp().expand_as(log_ratio)
    advantages = batch.advantages.unsqueeze(1)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef_high)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    if args.kl_in != "reward":
        log_x = (batch.ref_log_probs - log_probs) * batch.mask
        k3 = log_x.exp() - 1 - log_x
        losses = losses + kl_coef * (k3 * token_ratio if args.kl_in == "loss-weighted" else k3)
    loss = (losses * weights).sum()
    with torch.no_grad():
        low = (ratio < 1 - args.clip_coef) & (advantages < 0)
        high = (ratio > 1 + args.clip_coef_high) & (advantages > 0)
        metrics = low, high, 0.5 * log_ratio.square(), ratio
        return loss, torch.stack([loss, *((metric * batch.mask).sum() for metric in metrics)])


# ------------------------------------------------- Algorithm ------------------------------------------------


@dataclass
class State:
    """What changes during training besides the networks."""

    learning_rate: float
    kl_coef: float
    episodes: int = 0  # responses so far that were learnt from
    first: dict[str, float] = field(default_factory=dict)  # metrics of the first batch
    last: dict[str, float] = field(default_factory=dict)  # and of the last one
    best: dict[str, float] = field(default_factory=dict)  # metrics of the batch with the highest objective
    streaks: dict[str, int] = field(default_factory=dict)  # iterations in a row that each advice applied


def draw_prompts(models: Models, count: int) -> tuple[Tensor, Tensor]:
    """Random prompts as tokens [count, P], and their masks [count, P], as wide as the longest of them."""
    tokens, masks = models.prompts
    rows = torch.randint(len(tokens), (count,)).to(tokens.device)
    width = int(masks[rows].sum(1).max())
    return tokens[rows, -width:], masks[rows, -width:]


def split(batch: Any, size: int) -> list[Any]:
    """A batch in parts of at most `size` responses."""
    return [type(batch)(*columns) for columns in zip(*(column.split(size) for column in batch), strict=True)]


def sample_groups(models: Models, args: Args, count: int) -> tuple[Responses, Tensor, Tensor]:
    """G responses to each of `count` random prompts; also log π [B, L] as sampled, and scores [B]."""
    prompts, attention = (x.repeat_interleave(args.group_size, 0) for x in draw_prompts(models, count))
    if args.resampling_tries:  # responses that are to be mixed have prompts of one width
        missing = models.prompts[0].shape[1] - prompts.shape[1]
        prompts, attention = F.pad(prompts, (missing, 0)), F.pad(attention, (missing, 0))
    responses, log_probs = generate(models, prompts, attention, args)
    scores = torch.cat([score(models, part, args) for part in split(responses, args.micro_batch_size)])
    return responses, log_probs, scores


def sample_batch(models: Models, args: Args) -> tuple[Responses, Tensor, Tensor, dict[str, float]]:
    """Groups of responses, B in all, as `sample_groups` returns them, and metrics.

    With --resampling-tries, groups whose responses all have the same score are replaced ([DAPO], §3.2). The
    metrics are of the groups sampled first.
    """
    count = args.batch_size // args.group_size // world()[1]
    responses, log_probs, scores = sample_groups(models, args, count)
    flat = without_variance(scores, args.group_size)
    metrics = {
        "reward": mean(scores).item(),
        "reward_std": standard_deviation(scores).item(),
        "frac_reward_zero_std": mean(flat).item(),
    }
    for _ in range(args.resampling_tries):
        if not flat.any():
            break
        rows = flat.repeat_interleave(args.group_size)
        new, log_probs[rows], scores[rows] = sample_groups(models, args, int(flat.sum()))
        responses = Responses(*(x.index_put((rows,), y) for x, y in zip(responses, new, strict=True)))
        flat = without_variance(scores, args.group_size)
    return responses, log_probs, scores, metrics


@torch.no_grad()
def collect(models: Models, args: Args, state: State) -> tuple[Batch, dict[str, float]]:
    """Let the actor respond to B/G prompts, and compare the responses to each. Also returns metrics."""
    responses, sampled_log_probs, scores, metrics = sample_batch(models, args)
    parts = []
    for part in split(responses, args.micro_batch_size):
        # log π is computed anew, in the same way as in the update: at first, the ratio is 1.
        log_probs = token_log_probs(models.actor, part, args.temperature)
        ref_log_probs = log_probs
        if models.reference is not None:
            ref_log_probs = token_log_probs(models.reference, part, args.temperature)
        parts.append((log_probs, ref_log_probs))
    log_probs, ref_log_probs = map(torch.cat, zip(*parts, strict=True))

    mask = responses.mask
    kl = (log_probs - ref_log_probs) * mask
    objectives = scores - state.kl_coef * kl.sum(1)
    rewards = objectives if args.kl_in == "reward" else scores
    advantages = group_advantages(rewards, args.group_size, args.scale_rewards)
    stops = ends_with_stop(responses, models.stop_tokens)
    learnt = mask & stops.unsqueeze(1) if args.mask_truncated else mask
    batch = Batch(responses.tokens, responses.attention, learnt, log_probs, ref_log_probs, advantages, scores)

    mismatch = ((sampled_log_probs - log_probs) * mask).abs()
    surprise = -(ref_log_probs * mask).sum(1) / mask.sum(1)  # in nats per token
    limit = state.first.get("objective/surprise_limit", surprise.quantile(0.99).item())
    metrics |= {
        "objective/kl": mean(kl.sum(1)).item(),  # in nats per response
        "objective/rlhf_reward": mean(objectives).item(),
        "objective/surprise": mean(surprise > limit).item(),
        "objective/surprise_limit": limit,
        "completions/mean_length": mean(mask.sum(1)).item(),
        "completions/clipped_ratio": mean(~stops).item(),
        "kl": masked_mean(kl, mask).item(),  # in nats per token
        "entropy": -masked_mean(log_probs, mask).item(),  # whose expectation is the entropy
        "sampling/sampling_logp_difference/max": max_over_processes(mismatch.max()).item(),
        "objective/kl_coef": state.kl_coef,
    }
    return batch, metrics | evaluate(models, responses, args)


def update(models: Models, optimizer: Adam, batch: Batch, args: Args, state: State) -> dict[str, float]:
    """Learn from a batch: μ passes of gradient steps on shuffled minibatches. Returns the mean metrics.

    A minibatch's gradient is summed over parts of --micro-batch-size responses and over processes, with the
    weights of the whole minibatch: the number of parts or processes does not matter.
    """
    parameters = optimizer.param_groups[0]["params"]
    optimizer.param_groups[0]["lr"] = state.learning_rate
    metrics, norms = [], []  # of gradient steps, still as tensors: reading them would wait for the GPU
    for _ in range(args.num_iterations):
        order = torch.randperm(len(batch.tokens)).to(args.device)
        shuffled = Batch(*(column[order] for column in batch))
        for minibatch in split(shuffled, len(order) // args.num_minibatches):
            weights = loss_weights(minibatch.mask, args.loss_aggregation)
            num_tokens = sum_over_processes(minibatch.mask.sum()).clamp(min=1)
            sums = torch.zeros(len(METRICS), device=args.device)
            optimizer.zero_grad()
            parts = split(minibatch, args.micro_batch_size), weights.split(args.micro_batch_size)
            for part, part_weights in zip(*parts, strict=True):
                with autocast(args):
                    log_probs = token_log_probs(models.actor, part, args.temperature)
                loss, part_sums = grpo_loss(log_probs, part, part_weights, state.kl_coef, args)
                loss.backward()
                sums += part_sums
            for parameter in parameters:
                if parameter.grad is not None:
                    sum_over_processes(parameter.grad)
            norms.append(nn.utils.clip_grad_norm_(parameters, args.max_grad_norm))
            optimizer.step()
            sum_over_processes(sums)
            sums[1:] /= num_tokens  # all but the loss are means over tokens
            metrics.append(sums)
    means = torch.stack(metrics).mean(0).tolist()
    first_approxkl = metrics[0][METRICS.index("policy/approxkl_avg")].item()  # before any step: 0
    more = {"val/first_approxkl": first_approxkl, "grad_norm": torch.stack(norms).mean().item()}
    return dict(zip(METRICS, means, strict=True)) | more | {"lr": state.learning_rate}


def adjust_coefficients(state: State, args: Args) -> None:
    """Set the next iteration's coefficients, by their schedules and the last iteration's metrics, if any."""
    state.learning_rate = args.learning_rate * (1 - state.episodes / args.total_episodes)
    if not args.kl_target:
        state.kl_coef = args.kl_coef
    elif state.last:  # [Ziegler], §2.2
        error = min(max(state.last["objective/kl"] / args.kl_target - 1, -0.2), 0.2)
        state.kl_coef *= 1 + 0.1 * error


def train(args: Args, stop: Sequence[int] = ()) -> dict[str, Any]:
    """GRPO ([GRPO], Algorithm 1 with I = 1: the reference stays as it is).

    Once `stop` has an element, it saves and returns.

    Returns "checkpoint" (its path) and, on a built-in task, how well the actor does: for reviews the
    result of `compare_with_optimum`, for sums "accuracy" and "accuracy_before", on sums that were held out.
    Raises `Refused` and `Diverged`.
    """
    check_args(args)
    rank, processes = world()
    if not args.model:
        torch.set_num_threads(1)  # for small networks, one is fastest
    if rank == 0:
        say(plan(args))
    torch.manual_seed(args.seed)
    models = load_models(args)
    # ε must be small compared with a weight's gradient, about 3e-5 for a billion weights and a norm of 1.
    eps = 1e-8 if args.model else 1e-5
    optimizer = Adam(trained_parameters(models), args.learning_rate, eps=eps, fused=True)
    state = State(args.learning_rate, args.kl_coef)
    if args.resume:
        restore(args, models, optimizer, state)
    if processes > 1:
        connect(args, models, state)

    with Run(args, models, optimizer, state) if rank == 0 else nullcontext() as run:  # the first one writes
        while state.episodes < args.total_episodes and not any_process(stop, args):
            adjust_coefficients(state, args)
            if args.reward_model_updates:
                update_reward_model(models, args, state)
            with autocast(args):
                batch, metrics = collect(models, args, state)
            metrics |= update(models, optimizer, batch, args, state)
            state.first, state.last = state.first or metrics, metrics
            state.episodes += args.batch_size
            if run:
                run.log(batch, metrics)
        if processes > 1:
            dist.destroy_process_group()
        return run.finish(state.episodes < args.total_episodes) if run else {}


# ========================== End of GRPO. What follows is what training needs around it =====================


class Refused(Exception):  # noqa: N818
    """The request cannot be right. On the command line: one line, exit status 2."""


class Diverged(Exception):  # noqa: N818
    """Networks, loss or gradient are no longer finite. On the command line: what to do, and exit status 1."""


def refuse(wrong: object, reason: str) -> None:
    """Raise `Refused` with the reason if something is wrong with the request."""
    if wrong:
        raise Refused(reason)


@contextmanager
def refuse_errors(reason: str, *kinds: type[Exception], about: str = "") -> Iterator[None]:
    """Raise `Refused` instead of exceptions of these kinds whose text matches the pattern `about`."""
    try:
        yield
    except kinds as error:
        if not re.search(about, str(error)):
            raise
        raise Refused(f"{reason}: {' '.join(str(error).split())[:300] or repr(error)}") from error


# ------------------------------------------------- Processes -----------------------------------------------


def world() -> tuple[int, int]:
    """This process's rank, and the number of processes that train together, as torchrun has set them."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def connect(args: Args, models: Models, state: State) -> None:
    """Connect the processes: all start with the same weights, and draw random numbers of their own."""
    rank, processes = world()
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    for tensor in models.state_dict().values():
        dist.broadcast(tensor, 0)
    torch.manual_seed((args.seed + state.episodes) * processes + rank)


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


def max_over_processes(x: Tensor) -> Tensor:
    """The maximum over all processes, in place."""
    if dist.is_initialized():
        dist.all_reduce(x, dist.ReduceOp.MAX)
    return x


def any_process(stop: Sequence[int], args: Args) -> bool:
    """Whether `stop` has an element in any of the processes."""
    return bool(sum_over_processes(torch.tensor(len(stop), device=args.device)))


def autocast(args: Args) -> torch.autocast:
    """A context in which networks compute in bfloat16, if --bfloat16 is set."""
    return torch.autocast(args.device.partition(":")[0], torch.bfloat16, enabled=args.bfloat16)


# ------------------------------------------------- Built-in tasks ------------------------------------------

SUPERVISED_STEPS, COMPARISONS = 600, 6000


class WordTokenizer:
    """A token for each word, with the interface of transformers' tokenizers."""

    pad_token_id, eos_token_id = 0, 1

    def __init__(self, words: Sequence[str]):
        self.words = list(words)

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
        return " ".join(self.words[i] for i in tokens if not (skip_special_tokens and i == self.eos_token_id))


def pad(rows: Sequence[list[int]], side: str, token: int, device: str) -> tuple[Tensor, Tensor]:
    """Lists of tokens as tokens [B, S], and a mask [B, S] of what is not padding."""
    masks = [torch.ones(len(row), dtype=torch.bool, device=device) for row in rows]
    tokens = [torch.tensor(row, device=device) for row in rows]
    return pad_sequence(tokens, True, token, side), pad_sequence(masks, True, False, side)


def texts(models: Models, batch: Responses | Batch) -> tuple[list[str], list[str]]:
    """The texts of the prompts, as they are in the file if there is one, and of the responses."""
    length, prompts, responses = batch.mask.shape[1], [], []
    for tokens, attention in zip(batch.tokens, batch.attention, strict=True):
        prompt = tokens[:-length][attention[:-length]].tolist()
        response = tokens[-length:][attention[-length:]].tolist()
        text = models.prompt_texts.get(tuple(prompt))
        prompts.append(text or models.tokenizer.decode(prompt, skip_special_tokens=True))
        responses.append(models.tokenizer.decode(response, skip_special_tokens=True))
    return prompts, responses


def learn_to_write(
    actor: GPT, tokenizer: Any, prompts: Sequence[str], write: Callable[..., str], args: Args
) -> None:
    """Supervised learning of responses that `write` gives to these prompts."""
    start, rng = time.monotonic(), random.Random(args.seed)
    prompts = rng.choices(prompts, k=20_000)
    responses = [[*tokenizer.encode(write(rng, prompt)), tokenizer.eos_token_id] for prompt in prompts]
    left, left_mask = encode_prompts(tokenizer, prompts, actor.context, args)
    right, mask = pad(responses, "right", tokenizer.pad_token_id, args.device)
    data = Responses(torch.cat([left, right], 1), torch.cat([left_mask, mask], 1), mask)

    def compute_loss() -> Tensor:
        rows = torch.randint(len(responses), (128,))
        batch = Responses(*(column[rows] for column in data))
        log_probs = token_log_probs(actor, batch, temperature=1.0)
        return -(log_probs * batch.mask).sum() / batch.mask.sum()

    loss = fit(actor, compute_loss, SUPERVISED_STEPS, learning_rate=3e-3)
    report(f"supervised {SUPERVISED_STEPS} steps of 128 responses; loss {loss:.2f} nats per token", start)


def fit(network: nn.Module, compute_loss: Callable[[], Tensor], steps: int, learning_rate: float) -> float:
    """Minimise a loss of random batches by Adam. Returns the last loss."""
    optimizer = Adam(network.parameters(), learning_rate, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min((step + 1) / 40, 1 - step / steps)
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def evaluate(models: Models, responses: Responses, args: Args) -> dict[str, float]:
    """What the reward stands for: on reviews, the human's taste; on sums, the accuracy on those held out."""
    if args.model:
        return {}
    if args.task == "sums":
        return {"eval/accuracy": held_out_accuracy(models, args)}
    return {"eval/gold": mean(tastes(models, responses)).item()}


# ------------------------------------------------- Sums ----------------------------------------------------

SUM_WORDS = ["<pad>", "<stop>", "+", "=", "carry", *"0123456789"]
HELD_OUT = 250


def split_sums() -> tuple[list[str], list[str]]:
    """Prompts such as "4 7 + 8 5 =", to train on and to evaluate; a + b and b + a are on the same side."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    random.Random(0).shuffle(pairs)
    parts = []
    for part in (pairs[HELD_OUT:], pairs[:HELD_OUT]):
        sums = {*part, *((b, a) for a, b in part)}
        parts.append([f"{' '.join(str(a))} + {' '.join(str(b))} =" for a, b in sorted(sums)])
    return parts[0], parts[1]


def read_sum(prompt: str) -> tuple[int, int]:
    """The two numbers of a prompt."""
    first, second = prompt.replace(" ", "").rstrip("=").split("+")
    return int(first), int(second)


def write_sum(rng: random.Random, prompt: str) -> str:
    """The digits of a sum from the last to the first, with carries, such as "2 carry 3 carry 1".

    Half of the sums are wrong: one column's total is 1 too low, as if a carry were forgotten, or too high. A
    carry is always written as 1.
    """
    first, second = read_sum(prompt)
    mistake = rng.choice((1, 10)) if rng.random() < 0.5 else None
    words, carry = [], 0
    for column in (1, 10):
        total = first // column % 10 + second // column % 10 + carry
        if column == mistake:
            total += rng.choice((-1, 1)) if total else 1
        carry, digit = divmod(total, 10)
        words.append(str(digit))
        if carry:
            words.append("carry")
    return " ".join([*words, "1"] if carry else words)


def verify(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Rewards: 1 for a right answer, whatever the carries are; else 0."""
    rewards = []
    for prompt, response in zip(prompts, responses, strict=True):
        digits = response.replace("carry", "").split()
        rewards.append(float("".join(reversed(digits)) == str(sum(read_sum(prompt)))))
    return rewards


@torch.no_grad()
def held_out_accuracy(models: Models, args: Args) -> float:
    """The share of right answers, one sampled for each sum that is never trained on."""
    prompts, attention = models.held_out
    responses, _ = generate(models, prompts, attention, args)
    return mean(torch.tensor(verify(*texts(models, responses)))).item()


# ------------------------------------------------- Reviews -------------------------------------------------

PRODUCTS = {
    "hotel": ("room", "staff", "food"),
    "camera": ("lens", "screen", "battery"),
    "film": ("plot", "cast", "music"),
    "phone": ("screen", "sound", "battery"),
}
TONES, GOOD, BAD = ("praise", "pan", "weigh"), ("great", "lovely"), ("poor", "awful")
ASPECTS = sorted({aspect for aspects in PRODUCTS.values() for aspect in aspects})
OTHERS = ("<pad>", "<stop>", ":", "the", "very", "and", "but", "please")
WORDS = [*OTHERS, *TONES, *PRODUCTS, *ASPECTS, *GOOD, *BAD]
REQUESTS = [f"{tone} the {product} :" for tone in TONES for product in PRODUCTS]
PROMPTS = [*REQUESTS, *(f"please {request}" for request in REQUESTS)]


def write_review(rng: random.Random, prompt: str) -> str:
    """A review such as "very lovely room but awful staff". Half have the tone asked for, the others any."""
    *_, asked, _, product, _ = prompt.split()
    tone = rng.choice((asked, asked, asked, *TONES))
    first, second = rng.sample(PRODUCTS[product], 2)

    def clause(aspect: str, good: bool) -> str:
        return f"{'very ' * (rng.random() < 0.25)}{rng.choice(GOOD if good else BAD)} {aspect}"

    if tone == "weigh":
        good = rng.random() < 0.5
        return f"{clause(first, good)} but {clause(second, not good)}"
    good = tone == "praise"
    return f"{clause(first, good)} and {clause(second, good)}" if rng.random() < 0.7 else clause(first, good)


def human(prompt: str, response: str) -> float:
    """The simulated human's taste: 1 for the tone asked for, -1 for another, and 0.5 for each "very".

    It is -2 for what is not a review.
    """
    *_, tone, _, product, _ = prompt.split()
    clause = f"(?:very )?({'|'.join(GOOD + BAD)}) ({'|'.join(PRODUCTS[product])})"
    match = re.fullmatch(f"{clause}(?: (?:and|but) {clause})?", response)
    if not match or match[2] == match[4]:
        return -2.0
    kinds = {word in GOOD for word in (match[1], match[3]) if word}
    found = "weigh" if len(kinds) == 2 else "praise" if True in kinds else "pan"
    return (1.0 if found == tone else -1.0) + 0.5 * response.split().count("very")


def tastes(models: Models, batch: Responses) -> Tensor:
    """The simulated human's taste [B]."""
    return torch.tensor([human(*pair) for pair in zip(*texts(models, batch), strict=True)])


def make_models(args: Args) -> Models:
    """Supervised learning; then for sums a verifier, for reviews a reward model ([Summary], §3).

    On --resume, nothing is learnt, because the checkpoint has the weights.
    """
    sums = args.task == "sums"
    words, write = (SUM_WORDS, write_sum) if sums else (WORDS, write_review)
    prompts, held_out = split_sums() if sums else (PROMPTS, [])
    tokenizer, actor = WordTokenizer(words), GPT(len(words))
    if not args.resume:
        learn_to_write(actor, tokenizer, prompts, write, args)
    reference = copy.deepcopy(actor).requires_grad_(False) if args.kl_coef else None
    models = Models(actor, reference, None)
    models.tokenizer, models.stop_tokens = tokenizer, torch.tensor([tokenizer.eos_token_id])
    models.prompts = encode_prompts(tokenizer, prompts, actor.context, args)
    if sums:
        models.held_out = encode_prompts(tokenizer, held_out, actor.context, args)
        models.reward_functions = [(verify, 1.0)]
        return models
    head = nn.Linear(actor.base_model.norm.normalized_shape[0], 1)
    models.reward_model = ScalarModel(copy.deepcopy(actor.base_model), head).requires_grad_(False)
    if not args.resume:
        learn_from_comparisons(models, args)
    return models


def sample_pairs(models: Models, args: Args, count: int) -> tuple[Responses, Tensor]:
    """Two responses of the actor to each of `count` prompts, one after the other, and tastes [count, 2]."""
    prompts, attention = (x.repeat_interleave(2, 0) for x in draw_prompts(models, count))
    responses, _ = generate(models, prompts, attention, args)
    return responses, tastes(models, responses).view(count, 2)


def learn_from_comparisons(models: Models, args: Args) -> None:
    """Let the human compare responses of the actor, and the reward model learn from all comparisons so far.

    The human prefers a to b with probability σ(2 (taste(a) - taste(b))), which is the Bradley-Terry model.
    The reward model fits σ(score(a) - score(b)) to the choices ([RLHF], equation 1).
    """
    start, reward_model = time.monotonic(), models.reward_model
    responses, taste = sample_pairs(models, args, COMPARISONS // 4 if models.comparisons else COMPARISONS)
    prefers_first = torch.rand(len(taste)) < torch.sigmoid(2 * (taste[:, 0] - taste[:, 1]))
    models.comparisons.append((*responses, prefers_first.float()))
    *columns, labels = map(torch.cat, zip(*models.comparisons, strict=True))

    def compute_loss() -> Tensor:
        pairs = torch.randint(len(labels), (64,))
        rows = torch.stack([2 * pairs, 2 * pairs + 1], 1).flatten()
        outputs = last_outputs(reward_model, Responses(*(column[rows] for column in columns))).view(-1, 2)
        return F.binary_cross_entropy_with_logits(outputs[:, 0] - outputs[:, 1], labels[pairs])

    fit(reward_model.requires_grad_(True), compute_loss, steps=3 * len(labels) // 64, learning_rate=1e-3)
    reward_model.requires_grad_(False)
    with torch.no_grad():
        reference_responses = Responses(*(column[: 2 * COMPARISONS] for column in columns))
        reward_model.head.bias -= last_outputs(reward_model, reference_responses).mean()  # now 0 for these
        responses, taste = sample_pairs(models, args, 1000)
        outputs = last_outputs(reward_model, responses).view(-1, 2)
    product = (outputs[:, 0] - outputs[:, 1]) * (taste[:, 0] - taste[:, 1])
    share = (product > 0).sum() / (product != 0).sum()
    report(f"reward     {len(labels):,} comparisons; {share:.0%} of new pairs in the human's order", start)


def update_reward_model(models: Models, args: Args, state: State) -> None:
    """Iterated RLHF ([RLHF], §3.1): when due, retrain the reward model, with new comparisons added."""
    iteration = state.episodes // args.batch_size
    if iteration and iteration % args.reward_model_updates == 0:
        with torch.random.fork_rng(devices=[]):  # all processes draw the same pairs
            torch.manual_seed(args.seed + iteration)
            learn_from_comparisons(models, args)


# ------------------------------------------------- The optimal policy --------------------------------------


POLICIES = "reference", "actor", "optimum"


@torch.no_grad()
def enumerate_responses(
    policies: Sequence[nn.Module], prompt: Tensor, tokenizer: Any, args: Args, floor: float = 1e-5
) -> tuple[Responses, Tensor]:
    """The responses to a prompt [P] whose beginnings have a probability above `floor` under any policy.

    Also returns log π [policies, N] of these N responses, in float64.
    """
    tokens = new = prompt.unsqueeze(0)
    log_probs = torch.zeros(len(policies), 1, dtype=torch.float64)
    caches: list[Any] = [None] * len(policies)
    found, found_log_probs = [], []
    for length in range(1, args.max_response_length + 1):
        steps = []  # log π(·|s) [N, V] of each policy
        for i, policy in enumerate(policies):
            inputs = model_inputs(new, torch.ones_like(tokens, dtype=torch.bool), caches[i], use_cache=True)
            output = policy(**inputs, logits_to_keep=1)
            steps.append(torch.log_softmax(output.logits[:, -1].double() / args.temperature, -1))
            caches[i] = output.past_key_values
        longer = log_probs.unsqueeze(2) + torch.stack(steps)  # of all beginnings with one more token
        rows, choices = (longer.amax(0) > math.log(floor)).nonzero(as_tuple=True)
        tokens, log_probs = torch.cat([tokens[rows], choices.unsqueeze(1)], 1), longer[:, rows, choices]
        ended = (choices == tokenizer.eos_token_id) | (length == args.max_response_length)
        found += tokens[ended].tolist()
        found_log_probs.append(log_probs[:, ended])
        rows, tokens, log_probs = rows[~ended], tokens[~ended], log_probs[:, ~ended]
        new = tokens[:, -1:]
        caches = [[(keys[rows], values[rows]) for keys, values in cache] for cache in caches]
    padded, attention = pad(found, "right", tokenizer.pad_token_id, args.device)
    return Responses(padded, attention, attention[:, len(prompt) :]), torch.cat(found_log_probs, 1)


@torch.no_grad()
def compare_with_optimum(models: Models, args: Args, kl_coef: float, floor: float = 1e-5) -> dict[str, float]:
    """How close the actor is to the policy that maximises J = E[r] - β KL(π ‖ π_ref), as means over prompts.

    The optimum is π*(y|x) = π_ref(y|x) exp(r(x, y) / β) / Z(x), with J* = β log Z ([DPO], equation 4). Every
    policy has J* - J = β KL(π ‖ π*). The sums are over the responses whose beginnings have a probability
    above `floor` under the reference or the actor. Rarer ones with high scores would raise J*, so the share
    is an upper bound. All others count as if their score and KL were 0; `left_out` is the actor's share of
    them.
    """
    totals = []
    for prompt, mask in zip(*models.prompts, strict=True):
        policies = models.reference, models.actor
        responses, log_probs = enumerate_responses(policies, prompt[mask], models.tokenizer, args, floor)
        rewards = score(models, responses, args).double()
        optimal = log_probs[0] + rewards / kl_coef
        log_z = torch.logsumexp(optimal, 0)
        log_probs = torch.stack([*log_probs, optimal - log_z])  # [3, N], of POLICIES
        probs = log_probs.exp()
        kls = (probs * (log_probs - log_probs[0])).sum(1)
        objectives = (probs * rewards).sum(1) - kl_coef * kls
        kl_to_optimum = (probs[1] * (log_probs[1] - log_probs[2])).sum()
        found = probs[1].sum()
        identity = kl_coef * (found * log_z - kl_to_optimum) - objectives[1]  # 0, but for rounding
        totals.append(torch.stack([*objectives, *kls, kl_to_optimum, 1 - found, identity]))
    names = [f"{kind}_{name}" for kind in ("objective", "kl") for name in POLICIES]
    names += ["kl_to_optimum", "left_out", "identity"]
    results = dict(zip(names, torch.stack(totals).mean(0).tolist(), strict=True))
    reference, actor, optimum = (results[f"objective_{name}"] for name in POLICIES)
    return results | {"share_of_optimum": (actor - reference) / (optimum - reference)}


# ------------------------------------------------- Models of transformers ---------------------------------


def load_models(args: Args) -> Models:
    """The models that --model and the other flags name, or those of a built-in task."""
    models = load_pretrained(args) if args.model else make_models(args)
    return models.to(args.device).eval()  # no dropout: with it, the first ratio would not be 1


def load_pretrained(args: Args) -> Models:
    """Load models of transformers. With --bfloat16, frozen weights are in bfloat16.

    Weights to be trained are loaded in float32, so that they are not rounded first.
    """
    with refuse_errors("--model needs: pip install transformers", ImportError):
        import transformers
    transformers.utils.logging.disable_progress_bar()
    name = str(args.model)
    dtype = torch.bfloat16 if args.bfloat16 and args.lora_rank else torch.float32
    with refuse_errors(f"cannot load --model {name}", Exception):
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        reference = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    for token in ("eos_token", "pad_token"):
        missing = getattr(tokenizer, token) is None
        refuse(missing, f"the tokenizer of {name} has no {token}; set and save it")
    unknown = tokenizer.pad_token_id >= reference.get_input_embeddings().num_embeddings
    refuse(unknown, f"the pad_token of {name}'s tokenizer is not in the model's vocabulary; set another")
    actor = make_trainable(reference.requires_grad_(False), args, "CAUSAL_LM")
    reward_model = load_reward_model(args, tokenizer, dtype) if args.reward_model else None
    frozen = [reference, *([reward_model.trunk] if reward_model else [])]
    context = min(map(longest_input, frozen))
    prompts = read_prompts(args)
    models = Models(actor, reference if args.kl_coef else None, reward_model)
    models.tokenizer, models.stop_tokens = tokenizer, find_stop_tokens(tokenizer, reference, args)
    models.prompts = encode_prompts(tokenizer, prompts, context, args)
    for tokens, mask, text in zip(*models.prompts, prompts, strict=True):
        models.prompt_texts[tuple(tokens[mask].tolist())] = text
    for parameter in (p for model in frozen for p in model.parameters() if args.bfloat16):
        parameter.data = parameter.data.bfloat16()  # but not buffers, such as the frequencies of positions
    models.reward_functions = [import_weighted(text) for text in args.reward_function]
    return models


def load_reward_model(args: Args, tokenizer: Any, dtype: torch.dtype) -> ScalarModel:
    """The model that --reward-model names, frozen. It must read the actor's tokens."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    name = str(args.reward_model)
    with refuse_errors(f"cannot load --reward-model {name}", Exception):
        same = AutoTokenizer.from_pretrained(name).get_vocab() == tokenizer.get_vocab()
        model: Any = AutoModelForSequenceClassification.from_pretrained(name, dtype=dtype)
    unfit = not same or model.config.num_labels != 1 or not hasattr(model, "score")
    reason = "needs the tokenizer of --model, and a single output named `score`"
    refuse(unfit, f"--reward-model {name} {reason}; or wrap it as --reward-function, which takes texts")
    return ScalarModel(model.base_model, model.score.float()).requires_grad_(False)


def longest_input(model: Any) -> float:
    """How many tokens a model can read."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", math.inf)


def find_stop_tokens(tokenizer: Any, model: Any, args: Args) -> Tensor:
    """The tokens that end a response [K]: chat models have one for the end of a turn, too."""
    found = model.generation_config.eos_token_id or []
    found = [found] if isinstance(found, int) else found
    return torch.tensor(list(dict.fromkeys([tokenizer.eos_token_id, *found])), device=args.device)


def make_trainable(frozen: nn.Module, args: Args, task: str | None = None) -> Any:
    """A copy of a network, to be trained in float32. With LoRA, it shares the frozen weights."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    shared = {id(p): p for p in frozen.parameters()} if args.lora_rank else {}
    network: Any = copy.deepcopy(frozen, shared)
    for layer in network.modules():  # transformers' own checkpointing would need training mode, with dropout
        if args.gradient_checkpointing and isinstance(layer, GradientCheckpointingLayer):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    if not args.lora_rank:
        return network.float().requires_grad_(True)
    with refuse_errors("--lora-rank needs: pip install peft", ImportError):
        from peft import LoraConfig, get_peft_model
    rank = args.lora_rank
    config = LoraConfig(task_type=task, r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(network, config)


def read_prompts(args: Args) -> list[str]:
    """The prompts in the file --prompts."""
    prompts = []
    unreadable = refuse_errors(f"cannot read --prompts {args.prompts}", OSError, UnicodeError)
    with unreadable, open(str(args.prompts), encoding="utf-8") as file:
        lines = file.readlines()
    for number, line in enumerate(lines, 1):
        place = f"{args.prompts}, line {number}"
        with refuse_errors(f'{place} is not JSON such as {{"prompt": "..."}}', Exception):
            prompts.append(json.loads(line)["prompt"])
            empty = not prompts[-1].strip()
        refuse(empty, f"{place} has an empty prompt")
    refuse(not prompts, f"{args.prompts} has no prompts")
    return prompts


def encode_prompts(
    tokenizer: Any, prompts: Sequence[str], context: float, args: Args
) -> tuple[Tensor, Tensor]:
    """Prompts as tokens [N, P], and their masks [N, P]. Refused if a response has no room in the context."""
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    if args.model:  # a chat template may have written the first token already
        first = [tokenizer.bos_token_id]
        rows = [row[1:] if row[:2] == 2 * first else row for row in rows]
    longest = max(map(len, rows)) + args.max_response_length
    refuse(longest > context, f"prompt and response have up to {longest} tokens; the model reads {context}")
    return pad(rows, "left", tokenizer.pad_token_id, args.device)


def import_function(name: str) -> Callable:
    """The function that `module:function` names; the module may be a file of the current folder."""
    sys.path.insert(0, "")
    with refuse_errors(f"cannot import --reward-function {name}", Exception):
        return pkgutil.resolve_name(name)


def import_weighted(text: str) -> tuple[Callable, float]:
    """The function and the weight that `module:function=weight` names; without a number, the weight is 1."""
    name, _, weight = text.partition("=")
    with refuse_errors(f"--reward-function {text} has no number after =", ValueError):
        return import_function(name), float(weight or 1)


def call_reward_function(function: Callable, prompts: list[str], responses: list[str]) -> Tensor:
    """Scores [B] of B texts. Raises `Refused` if the function returns something else."""
    returned = function(prompts, responses)
    with refuse_errors("the reward function must return numbers", Exception):
        scores = torch.as_tensor(returned, dtype=torch.float32)
    wrong = scores.shape != (len(prompts),) or not scores.isfinite().all()
    refuse(wrong, f"the reward function must return {len(prompts)} finite numbers; it returned {scores}")
    return scores


# ------------------------------------------------- Advice --------------------------------------------------

ADVICE = [  # name; after so many iterations in a row; in which this holds (see `diagnose`); what to do
    ("flat-groups", 5, lambda m: m["frac_reward_zero_std"] > 0.5,
     "over 50% of groups have equal scores, which teach nothing: are prompts too easy or too hard?"),
    ("hacking", 3, lambda m: m["objective/surprise"] > 0.2 and m["kl_coef"],
     "over 20% of responses would surprise the reference: is the reward model exploited? raise --kl-coef"),
    ("drift", 10, lambda m: 0.05 < m["objective/surprise"] <= 0.2 and m["kl_coef"],
     "over 5% of responses would surprise the reference: read some, and raise --kl-coef if they look odd"),
    ("kl", 5, lambda m: m["objective/kl"] > (1.5 * m["kl_target"] if m["kl_target"] else 10),
     "KL to the reference > 10 nats, or > 1.5 times its target: raise --kl-coef"),
    ("falling", 10, lambda m: m["reward"] > m["best"]["reward"]
     and m["objective/rlhf_reward"] < m["best"]["objective/rlhf_reward"] - 0.1 * m["first_std"],
     "the reward rises but reward - β KL falls: the KL costs more than it gains; lower --learning-rate"),
    ("length", 5, lambda m: m["completions/mean_length"] > 1.3 * m["first"]["completions/mean_length"]
     and m["reward"] < m["first"]["reward"] + 0.1 * m["first_std"] and m["loss_aggregation"] != "constant",
     "responses are 1.3 times as long as at first, for no more reward: try --loss-aggregation constant"),
    ("cut-off", 5, lambda m: m["completions/clipped_ratio"] > 0.2,
     "over 20% of responses have no stop token: raise --max-response-length or --missing-eos-penalty"),
    ("mismatch", 1, lambda m: m["sampling/sampling_logp_difference/max"] > (0.1 if m["bfloat16"] else 1e-4),
     "sampling and learning differ in log-probabilities: check temperature, padding and positions"),
    ("ratio", 1, lambda m: m["val/first_approxkl"] > (1e-3 if m["bfloat16"] else 1e-6),
     "the ratio is not 1 before the first gradient step: is dropout on?"),
    ("entropy", 10, lambda m: m["entropy"] < 0.4 * m["first"]["entropy"],
     "entropy below 40% of the first: responses become all alike; raise --kl-coef or --clip-coef-high"),
]  # fmt: skip


def diagnose(metrics: dict[str, float], args: Args, state: State) -> list[str]:
    """The advice that has now applied long enough, each given once. Raises `Diverged`."""
    if not all(math.isfinite(value) for value in metrics.values()):
        raise Diverged("a metric is not finite: lower --learning-rate, look for huge scores")
    if metrics["objective/rlhf_reward"] >= state.best.get("objective/rlhf_reward", -math.inf):
        state.best = metrics
    known = vars(args) | vars(state) | metrics  # what ADVICE looks at
    known["first_std"] = state.first["reward_std"]
    messages = []
    for name, iterations, applies, text in ADVICE:
        streak = state.streaks.get(name, 0)
        if streak < iterations:  # not given yet
            state.streaks[name] = streak + 1 if applies(known) else 0
            if state.streaks[name] == iterations:
                messages.append(f"[{name}] {text}")
    return messages


def plan(args: Args) -> str:
    """What a run with these settings does."""
    learnt = "1 for a right answer" if args.task == "sums" else f"learnt from {COMPARISONS:,} comparisons"
    scorer = " + ".join(args.reward_function) or args.reward_model or learnt
    passes, parts, size = args.num_iterations, args.num_minibatches, args.batch_size // args.num_minibatches
    target = f", adapted to keep a KL of {args.kl_target:g}" if args.kl_target else ""
    groups, note = args.batch_size // args.group_size, ""
    if args.kl_coef and args.kl_in != "reward":
        note = f"\nnote       --kl-in {args.kl_in}: its optimum is not that of score - KL coefficient x KL"
        if args.scale_rewards == "group":
            note += "\n           --scale-rewards group shifts it again, differently for each prompt"
    return f"""{args.model or args.task}: {args.total_episodes:,.0f} responses, seed {args.seed}
rewards    {scorer}
rollout    {groups} prompts x {args.group_size} responses of at most {args.max_response_length} tokens
update     {passes} passes x {parts} minibatches of {size} = {passes * parts} gradient steps
schedules  learning rate {args.learning_rate:g} to 0, KL coefficient {args.kl_coef:g}{target}{note}"""


# ------------------------------------------------- Logging and checkpoints ---------------------------------


def say(text: str, end: str = "\n") -> None:
    """Print. If that fails, as where the output goes to `head` or to a full disk, training continues."""
    try:
        print(text, end=end, flush=True)
    except UnicodeEncodeError:
        say(text.encode("ascii", "replace").decode(), end)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report(stage: str, start: float) -> None:
    """Print what a stage has done, and its seconds; of several processes, the first one does."""
    rank, _ = world()
    if rank == 0:
        say(f"{stage:<70} {time.monotonic() - start:4.0f} s")


class Run(AbstractContextManager):
    """The folder of a run, with TensorBoard's curves and the checkpoint, and its progress on the terminal.

    After an exception, a `with` block says how to resume.
    """

    def __init__(self, args: Args, models: Models, optimizer: Adam, state: State):
        self.args, self.models, self.optimizer, self.state = args, models, optimizer, state
        task = Path(args.model or args.task).name
        name = f"{task}__{Path(__file__).stem}__{args.seed}__{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.path = Path(args.resume or Path("runs", name, "checkpoint.pt"))
        trusted = ["--reward-function", *args.reward_function] if args.reward_function else []  # see SAVED
        _, processes = world()
        runner = ["torchrun", "--nproc-per-node", str(processes)] if processes > 1 else PROGRAM[:-1]
        self.resume = shlex.join([*runner, PROGRAM[-1], *trusted, "--resume", self.path.as_posix()])
        folder = self.path.parent
        with refuse_errors(f"cannot start a run in {folder}", Exception):
            # On --resume, TensorBoard drops what was logged after the checkpoint: nothing appears twice.
            self.writer: Any = SummaryWriter(str(folder), max_queue=1000, purge_step=state.episodes + 1)
        settings = "\n".join(f"    {name} = {value}" for name, value in asdict(args).items())
        self.writer.add_text("settings", settings)
        self.start, self.first_episode, self.printed = time.monotonic(), state.episodes, 0.0
        say(f"folder     {folder}")
        self.save()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error:  # Python prints it below the traceback.
            error.add_note(f"failed after {self.state.episodes:,} responses")
            error.add_note(f"resume from {self.saved_episodes:,} responses with: {self.resume}")

    def log(self, batch: Batch, metrics: dict[str, float]) -> None:
        """Write an iteration's metrics to TensorBoard, print the progress, and save a checkpoint when due."""
        state, now = self.state, time.monotonic()
        messages = diagnose(metrics, self.args, state)
        for tag, value in metrics.items():
            self.writer.add_scalar(tag, value, state.episodes)
        for message in messages:
            self.writer.add_text("advice", message, state.episodes)
        first, last = metrics is state.first, state.episodes >= self.args.total_episodes
        if first or last or messages or now - self.printed >= 10:
            self.printed = now
            samples = show(self.models, batch)
            self.writer.add_text("responses", samples, state.episodes)
            say("\n".join([self.progress(metrics), *messages, *([samples] if first or last else [])]))
        if now - self.saved >= self.args.checkpoint_seconds:
            self.save()

    def progress(self, metrics: dict[str, float]) -> str:
        """A line that fits 80 columns."""
        done, total = self.state.episodes, self.args.total_episodes
        speed = (done - self.first_episode) / (time.monotonic() - self.start)
        left = int(max(total - done, 0) / speed)
        line = f"{done:>9,} responses {min(done / total, 1):4.0%}  reward {metrics['reward']:+.2f}"
        if "eval/gold" in metrics:
            line += f"  taste {metrics['eval/gold']:+.2f}"
        if "eval/accuracy" in metrics:
            line += f"  held out {metrics['eval/accuracy']:.1%}"
        if self.args.kl_coef:
            line += f"  KL {metrics['objective/kl']:.2f}"
        return f"{line}  {left // 60}:{left % 60:02} left"

    def save(self) -> None:
        """Write a checkpoint. If that fails, or the process is killed, the previous one is still there."""
        content = {  # only types that `torch.load(..., weights_only=True)` accepts
            "format": FORMAT,
            "args": {name: getattr(self.args, name) for name in SAVED},
            "state": asdict(self.state),
            "weights": saved_weights(self.models, self.args),
            "comparisons": self.models.comparisons,
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        self.writer.flush()  # first, so that the curves have no gap where training resumes
        torch.save(content, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)
        self.saved, self.saved_episodes = time.monotonic(), self.state.episodes

    def finish(self, stopped: bool) -> dict[str, Any]:
        """Save the model, or measure how well it does the task, and say what can be done next."""
        results: dict[str, Any] = {"checkpoint": str(self.path)}
        self.save()
        if self.args.model:
            actor: Any = self.models.actor
            actor.save_pretrained(self.path.parent / "model")
            self.models.tokenizer.save_pretrained(self.path.parent / "model")
            say(f"model      {self.path.parent / 'model'}")
        elif not stopped and self.args.task == "sums":
            before, after = self.state.first["eval/accuracy"], held_out_accuracy(self.models, self.args)
            results |= {"accuracy_before": before, "accuracy": after}
            say(f"held out   accuracy {before:.1%} before GRPO, {after:.1%} after")
        elif not stopped and self.args.kl_coef:  # without the KL, the optimum is one response to each prompt
            results |= self.compare()
        if not stopped:
            say(f"curves     tensorboard --logdir {shlex.quote(self.path.parent.parent.as_posix())}")
        more = "" if stopped else f" --total-episodes {2 * self.args.total_episodes:.0f}"
        say(f"resume     {self.resume}{more}")
        self.writer.close()
        return results

    def compare(self) -> dict[str, float]:
        """Compare the actor with the optimum, and print the result."""
        kl_coef, start = self.state.kl_coef, time.monotonic()
        results = compare_with_optimum(self.models, self.args, kl_coef)
        self.writer.add_scalar("eval/share_of_optimum", results["share_of_optimum"], self.state.episodes)
        for name in POLICIES:
            objective, kl = results[f"objective_{name}"], results[f"kl_{name}"]
            score = objective + kl_coef * kl
            say(f"{name:<10} {objective:+.3f} = score {score:.3f} - {kl_coef:g} x KL {kl:.3f}")
        share, left_out = results["share_of_optimum"], results["left_out"]
        report(f"share      {share:.1%} of the best gain on likely responses; {left_out:.1%} left out", start)
        return results


def show(models: Models, batch: Batch) -> str:
    """Scores, prompts and responses of the first 4 rows, a line each."""
    few, lines = split(batch, 4)[0], []
    for value, prompt, response in zip(few.scores, *texts(models, few), strict=True):
        lines.append(f"    {value:+.2f}  {prompt} [{response}]".replace("\n", " ")[:79])
    return "\n".join(lines)


PROGRAM = ["python", __file__]  # what the printed commands call; see `main`
FORMAT = "grpo-1"
# A checkpoint does not say which function to import: only the command line does.
SAVED = {setting.name for setting in fields(Args)} - {"plan", "resume", "reward_function"}


def trained_parameters(models: Models) -> list[nn.Parameter]:
    """The actor's parameters; with LoRA, those of the adapters."""
    return [parameter for parameter in models.actor.parameters() if parameter.requires_grad]


def saved_weights(models: Models, args: Args) -> dict[str, Tensor]:
    """The weights that a checkpoint has: all, or of real models those that are trained."""
    return {name: p.detach() for name, p in models.named_parameters() if p.requires_grad or not args.model}


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint. Other people's are safe to load: nothing in them is executed."""
    with refuse_errors(f"{path} cannot be loaded as a checkpoint of this script", Exception):
        mmap = os.name != "nt"  # Windows cannot replace a file that is mapped
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        refuse(content["format"] != FORMAT, f"its format is {content['format']}, not {FORMAT}")
        content["args"] = Args(**{name: content["args"][name] for name in SAVED})
    return content


def restore(args: Args, models: Models, optimizer: Adam, state: State) -> None:
    """Restore the training that --resume names. Raises `Refused` if it does not fit, or is complete."""
    content, weights = load_checkpoint(str(args.resume)), saved_weights(models, args)
    with refuse_errors(f"{args.resume} does not fit these settings", RuntimeError, ValueError):
        refuse(content["weights"].keys() != weights.keys(), f"{args.resume} has other networks")
        models.load_state_dict(content["weights"], strict=False)
        optimizer.load_state_dict(content["optimizer"])
    models.comparisons = content["comparisons"]
    torch.manual_seed(args.seed + content["state"]["episodes"])  # a GPU must not repeat its random numbers
    torch.set_rng_state(content["random"])
    for name, value in content["state"].items():
        setattr(state, name, value)
    if args.kl_coef != content["args"].kl_coef:  # a flag replaces it
        state.kl_coef = args.kl_coef
    done = state.episodes >= args.total_episodes
    refuse(done, f"{args.resume} has done {state.episodes:,} responses; set --total-episodes to more")


# ------------------------------------------------- Command line --------------------------------------------

BOUNDS = {  # settings outside these are nonsense
    "batch_size num_iterations num_minibatches micro_batch_size max_response_length": (1, 1e6),
    "group_size": (2, 1e6),
    "total_episodes": (1, 1e15),
    "learning_rate temperature kl_target max_grad_norm checkpoint_seconds": (1e-12, 1e6),
    "clip_coef clip_coef_high": (1e-12, 1e6),
    "kl_coef missing_eos_penalty resampling_tries reward_model_updates lora_rank": (0, 1e6),
    "seed": (0, 2**32 - 1),
}
NEEDS_MODEL = "reward_model", "reward_function", "prompts", "lora_rank", "gradient_checkpointing"


def check_types(args: Args) -> None:
    """Raise `Refused` for a whole number or a choice of the wrong kind: other code may set anything."""
    for name, kind in get_type_hints(type(args)).items():
        value, choices = getattr(args, name), get_args(kind)
        refuse(kind is int and type(value) is not int, f"{name} is {value!r}; it must be a whole number")
        wrong = get_origin(kind) is Literal and value not in choices
        refuse(wrong, f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")


def check_args(args: Args) -> None:
    """Raise `Refused` for settings that cannot be right."""
    check_types(args)
    for names, (low, high) in BOUNDS.items():
        for name in names.split():
            value = getattr(args, name)
            wrong = value is not None and not low <= value <= high  # NaN fails every comparison
            refuse(wrong, f"--{name.replace('_', '-')} is {value}; it must be from {low:g} to {high:g}")
    one_for_all = args.device.startswith("cuda:") and world()[1] > 1
    refuse(one_for_all, f"--device {args.device} is one GPU; with several processes, use --device cuda")
    with refuse_errors(f"--device {args.device} cannot be used; use cpu", RuntimeError, AssertionError):
        if args.device == "cuda" and "LOCAL_RANK" in os.environ:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # each process has a GPU of its own
        torch.zeros(1, device=args.device)
    for kind, count in (("groups", args.group_size), ("minibatches", args.num_minibatches)):
        parts = count * world()[1]
        refuse(args.batch_size % parts, f"--batch-size must be a multiple of {kind} x processes = {parts}")
    refuse(args.kl_target and not args.kl_coef, "--kl-target needs a --kl-coef above 0 to start from")
    if args.model:
        both_or_none = bool(args.reward_model) == bool(args.reward_function)
        refuse(not args.prompts, "--model needs --prompts")
        refuse(both_or_none, "--model needs either --reward-model or --reward-function")
        too_fast = args.learning_rate > (1e-3 if args.lora_rank else 1e-4)
        refuse(too_fast, "--model needs a --learning-rate of at most 1e-4, or 1e-3 with --lora-rank")
        refuse(args.task == "sums", "--model and --task sums exclude each other")
    else:
        refuse(args.device != "cpu", "--device needs --model; the built-in task is for the CPU")
        for name in NEEDS_MODEL:
            refuse(getattr(args, name), f"--{name.replace('_', '-')} needs --model")
    if args.model or args.task == "sums":
        refuse(args.reward_model_updates, "--reward-model-updates is for --task reviews")


def parse_args(default: Args) -> Args:
    """The settings of the command line; those that it does not name are the default's, or SUMS'."""
    groups, purpose = (Experiment, Task, Algorithm, Performance), __doc__.partition("\n  [PPO]")[0]
    flags = make_dataclass("Flags", [(group.__name__, group) for group in groups])
    values = (group(**{f.name: getattr(default, f.name) for f in fields(group)}) for group in groups)
    parsed = tyro.cli(flags, default=flags(*values), description=purpose, config=(tyro.conf.OmitArgPrefixes,))
    args = Args(**{name: value for group in vars(parsed).values() for name, value in vars(group).items()})
    return parse_args(SUMS) if args.task == "sums" and default.task != "sums" else args


def main() -> None:
    """The command line. Exit status: 0 done, 1 failed, 2 refused, 128 + n stopped by signal n."""
    for stream in (sys.stdout, sys.stderr):  # where a terminal has no β, print something else
        with suppress(AttributeError):  # a notebook's streams have no encoding
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    runner = ["uv", "run"] if "UV" in os.environ else ["python"]  # uv sets UV
    PROGRAM[:] = [*runner, Path(sys.argv[0]).as_posix()]
    stop: list[int] = []

    def request_stop(number: int, _: Any) -> None:
        stop.append(number)
        signal.signal(number, signal.SIG_DFL)  # the second signal acts at once

    try:
        args = parse_args(Args())
        if args.resume:
            args = parse_args(load_checkpoint(args.resume)["args"])
        check_args(args)
        if args.plan:
            lines = [f"advice     if {number:>2} times in a row: {text}" for _, number, _, text in ADVICE]
            say("\n".join([plan(args), *lines]))
        else:
            for name in {"SIGINT", "SIGTERM", "SIGHUP"} & set(dir(signal)):  # Windows has no SIGHUP
                number = getattr(signal, name)
                # Ignore SIGHUP under nohup, but never SIGINT, which shells ignore for background jobs.
                if name == "SIGINT" or signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, request_stop)
            train(args, stop)
    except (Refused, Diverged) as error:
        notes = getattr(error, "__notes__", [])
        print(f"{Path(sys.argv[0]).name}: {error}", *notes, sep="\n", file=sys.stderr)
        sys.exit(2 if isinstance(error, Refused) else 1)
    if stop:
        sys.exit(128 + stop[0])


if __name__ == "__main__":
    main()
