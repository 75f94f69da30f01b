# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.5", "numpy", "tensorboard", "tyro>=0.9.1"]
# ///
r"""Group Relative Policy Optimization (GRPO) for language models, in one file.

    python grpo.py
    python grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts train.jsonl --eval-prompts test.jsonl \
        --reward-function my_module:reward --device cuda --bfloat16
    torchrun --nproc-per-node 4 grpo.py ...

Without --model, a small transformer learns to add in words from examples that often forget to carry, and GRPO
trains it with a reward of 1 for a right answer. With --model, it trains a model of the transformers library
(to be installed; PRETRAINED has its defaults) on the prompts of a file, one line of JSON each, such as
{"prompt": "2 + 3 =", "answer": "5"}. A prompt is a text, or a list of chat messages. Responses and rewards
are written to completions.jsonl in the run's folder. A reward function takes B such lines as dicts and the
texts of B responses, and returns B numbers. TRL's reward functions are called as TRL does:

    def reward(rows, responses):
        return [float(response.split()[-1:] == [row["answer"]]) for row, response in zip(rows, responses)]

By default, advantages are divided by the group's deviation as in [GRPO], all tokens of a batch weigh the same
as in [Dr. GRPO], and there is no KL penalty.

  [GRPO]     Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
             Models", arXiv:2402.03300; also Guo et al. 2025, "DeepSeek-R1", arXiv:2501.12948
  [RLOO]     Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization for Learning from
             Human Feedback in LLMs", arXiv:2402.14740
  [DAPO]     Yu et al. 2025, "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
             arXiv:2503.14476
  [Dr. GRPO] Liu et al. 2025, "Understanding R1-Zero-Like Training: A Critical Perspective", arXiv:2503.20783
  [GSPO]     Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071
  [KL]       Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html

Shapes: B responses in a batch, group by group; P tokens of the longest prompt, L of the longest response,
S = P + L; V tokens in the vocabulary. Prompts are padded on the left, responses on the right. Masks come from
lengths, so any token can serve as padding.
"""

from __future__ import annotations

import copy
import inspect
import json
import math
import multiprocessing
import os
import pickle
import pkgutil
import random
import re
import shlex
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import numpy as np
import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import clip_grad_norm_, rnn
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint
from torch.utils.tensorboard import SummaryWriter


@dataclass
class Args:  # the trailing comments become --help
    exp_name: str = Path(sys.argv[0]).stem or "grpo"  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    resume: str | None = None  # resume from this checkpoint; other flags override its settings
    eval_every: int = 10  # iterations between evaluations; each writes a checkpoint and the model
    track: bool = False  # mirror TensorBoard to Weights & Biases, to its WANDB_PROJECT (needs wandb)

    # Task
    model: str | None = None  # folder or name of a transformers model; None is for the built-in sums
    prompts: str | None = None  # file with a line of JSON for each prompt
    eval_prompts: str | None = None  # the same for held-out prompts
    reward_function: tuple[str, ...] = ()  # functions of rows and responses, as module:function; summed
    max_response_length: int = 24  # longer responses are cut off, and have no stop token
    mask_truncated: bool = False  # learn nothing from responses that are cut off ([DAPO], §3.4)
    temperature: float = 1.0  # divides the logits in sampling, and in every log-probability
    eval_temperature: float = 1.0  # divides the logits in evaluation; 0 is greedy

    # GRPO
    total_episodes: float = 61_440  # total number of responses, for example 1e5
    batch_size: int = 512  # B: responses per iteration, over all processes
    group_size: int = 8  # G: responses to each prompt
    update_epochs: int = 2  # μ: passes over each batch
    num_minibatches: int = 4  # minibatches per epoch, one gradient step each
    learning_rate: float = 4e-4  # Adam's step size, decayed linearly to 0
    kl_coef: float = 0.0  # β: weight of the KL divergence from the reference; 0 needs no reference
    kl_in: Literal["reward", "loss"] = "reward"  # k1 in the reward, or k3 in the loss
    scale_rewards: Literal["none", "group"] = "group"  # divide by the group's deviation; [Dr. GRPO]: none
    loss_aggregation: Literal["sequence-mean", "token-mean", "constant"] = "constant"  # constant: [Dr. GRPO]
    ratio: Literal["token", "sequence"] = "token"  # of new to old probability; sequence: [GSPO]
    clip_coef: float = 0.2  # ε: lower limit of the ratio is 1 - ε; [GSPO] has 3e-4
    clip_coef_high: float = 0.2  # ε_high: upper limit is 1 + ε_high; [DAPO] has 0.28, [GSPO] 4e-4
    max_grad_norm: float = 1.0  # clip the gradient to this norm; see `loss_weights`

    # Speed and memory
    device: str = "cpu"  # cpu, cuda or mps; small networks are fastest on the CPU
    micro_batch_size: int = 128  # responses per forward pass in learning; fewer take less memory
    micro_batch_tokens: int = 16_384  # and at most so many tokens, with prompts and padding
    generation_batch_size: int = 256  # responses that are generated at once
    cuda_graphs: bool = True  # with --model on an NVIDIA GPU: record a step of generation, and replay it
    bfloat16: bool = False  # needs --model; log-probabilities and trained weights stay in float32
    gradient_checkpointing: bool = False  # save memory by computing activations twice
    lora_rank: int = 0  # train adapters of this rank on frozen weights (needs peft); 0 trains all weights


# Limits of the settings, both included. With more than 30 epochs, or a large ε, the policy moves too far
# from the one that collected the data. To study what is refused, change this table in your program. A number
# of your own in Args is checked once it has an entry here.
BOUNDS = {
    "seed": (0, 2**31), "eval_every": (1, math.inf), "max_response_length": (1, math.inf),
    "temperature": (1e-3, 100), "eval_temperature": (0, 100), "total_episodes": (1, 1e15),
    "batch_size": (1, math.inf), "update_epochs": (1, 30), "num_minibatches": (1, math.inf),
    "learning_rate": (0, 1), "kl_coef": (0, 1e4), "clip_coef": (1e-5, 0.3), "max_grad_norm": (1e-6, math.inf),
    "micro_batch_size": (1, math.inf), "generation_batch_size": (1, math.inf), "lora_rank": (0, 2**16),
    "micro_batch_tokens": (1, math.inf), "group_size": (2, math.inf), "clip_coef_high": (1e-5, 0.5),
}  # fmt: skip

# The defaults with --model
PRETRAINED = Args(
    max_response_length=512, eval_temperature=0.0, learning_rate=1e-6, micro_batch_size=64,
    micro_batch_tokens=8192,
)  # fmt: skip

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # how many there are, and the number of this one (torchrun)
RANK = int(os.environ.get("RANK", 0)) if PROCESSES > 1 else 0
# Metrics to print, besides evaluations
SHOWN = "reward", "objective/kl", "policy/approxkl_avg", "completions/clipped_ratio", "frac_reward_zero_std"

# ------------------------------------------------- Batches --------------------------------------------------


class Models(nn.Module):
    """The actor, and with a KL penalty the reference: a frozen copy of the actor as it was at first."""

    def __init__(self, actor: Any, reference: Any):
        super().__init__()
        self.actor, self.reference = actor, reference


class Task(NamedTuple):
    """What the actor is to learn."""

    tokenizer: Any
    stop_tokens: list[int]  # each of them ends a response; those of the model are added
    prompts: list[dict]  # rows: a "prompt", and what else the reward functions need
    eval_prompts: list[dict]  # held out
    reward_functions: dict[str, Callable]  # by name; of B rows and the texts of B responses


class Responses(NamedTuple):
    """B prompts with responses."""

    prompts: Tensor  # [B, P]
    prompt_mask: Tensor  # [B, P], true at tokens that are not padding
    responses: Tensor  # [B, L]
    mask: Tensor  # [B, L], true at the responses' tokens, which include the stop token


def read_lengths(batch: Any) -> list[list[int]]:
    """The lengths of B prompts and of B responses. To read from a GPU is to wait for it: do it once."""
    return torch.stack([batch.prompt_mask.sum(1), batch.mask.sum(1)]).tolist()


def micro_batches(batch: Any, rows: Tensor, lengths: list[list[int]], args: Args) -> Iterator[tuple]:
    """Parts of these rows of a batch: the rows' numbers, and the rows without columns that are all padding.

    Rows of similar length are together, --micro-batch-size rows and --micro-batch-tokens tokens at most (but
    one row at least). `lengths` are those of all rows, by `read_lengths`.
    """
    prompt_lengths, response_lengths = lengths
    parts: list[list[int]] = [[]]
    longest = 0  # prompt of the last part
    for row in sorted(rows.tolist(), key=response_lengths.__getitem__):
        longest, count = max(longest, prompt_lengths[row]), len(parts[-1]) + 1
        too_large = count * (longest + response_lengths[row]) > args.micro_batch_tokens
        if parts[-1] and (count > args.micro_batch_size or too_large):
            parts.append([])
            longest = prompt_lengths[row]
        parts[-1].append(row)
    order = torch.tensor([row for part in parts for row in part], device=batch.mask.device)
    for part, numbers in zip(parts, order.split([len(part) for part in parts]), strict=True):
        longest, length = max(prompt_lengths[row] for row in part), response_lengths[part[-1]]
        columns = [column[numbers] for column in batch]
        prompts = [column[:, -longest:] for column in columns[:2]]
        others = [column[:, :length] if column.dim() == 2 else column for column in columns[2:]]
        yield numbers, type(batch)(*prompts, *others)


# ------------------------------------------------- Generation -----------------------------------------------


def model_inputs(tokens: Tensor, attention: Tensor, past: Any = None, use_cache: bool = False) -> dict:
    """Arguments for a model: tokens [B, T], the last T of S, and a mask [B, S] of what is not padding."""
    positions = (attention.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]  # padding is not counted
    inputs = {"input_ids": tokens, "attention_mask": attention, "position_ids": positions}
    return inputs | {"past_key_values": past, "use_cache": use_cache}


@torch.no_grad()
def generate(actor: nn.Module, task: Task, rows: list[dict], args: Args) -> tuple[Responses, Tensor]:
    """A response to the prompt of each of B rows, and log π [B, L] as sampled; temperature 0 is greedy.

    To use an inference server, replace this function, and send it the actor's weights before each call.
    """
    prompts, prompt_mask = pad([encode(task.tokenizer, row) for row in rows], "left", args.device)
    stop_tokens = torch.tensor(task.stop_tokens, device=args.device)
    shape = len(rows), args.max_response_length
    responses, mask = prompts.new_zeros(shape), prompt_mask.new_zeros(shape)
    log_probs = torch.zeros(shape, device=args.device)
    write = write_by_graph if can_use_graphs(actor, args) else write_responses
    with autocast(args):
        for start in range(0, len(rows), args.generation_batch_size):
            part = slice(start, start + args.generation_batch_size)
            written = responses[part], mask[part], log_probs[part]  # views, to be filled
            write(actor, prompts[part], prompt_mask[part], written, stop_tokens, args.temperature)
    length = mask.sum(1).max()
    return Responses(prompts, prompt_mask, responses[:, :length], mask[:, :length]), log_probs[:, :length]


def sample(logits: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """A token for each row of logits [B, V], and its log π, [B, 1] each. Temperature 0 is greedy."""
    log_policy = torch.log_softmax(logits.float() / max(temperature, 1e-6), 1)
    noise = torch.empty_like(log_policy).exponential_()
    tokens = (log_policy.exp() / noise).argmax(1, keepdim=True)  # as `multinomial`, which reads from the GPU
    if temperature == 0:  # 1e-6 above only avoids a division by 0
        tokens = logits.argmax(1, keepdim=True)
    return tokens, log_policy.gather(1, tokens)


def write_responses(
    actor: Any, prompts: Tensor, prompt_mask: Tensor, written: tuple, stop_tokens: Tensor, temperature: float
) -> None:
    """Write responses to B prompts, their mask and log π, [B, L] each, token by token, into `written`."""
    responses, mask, log_probs = written
    rows = torch.arange(len(prompts), device=prompts.device)
    active = torch.ones_like(rows, dtype=torch.bool)  # no stop token so far
    new, attention, past = prompts, prompt_mask, None
    for t in range(responses.shape[1]):
        output = actor(**model_inputs(new, attention, past, use_cache=True), logits_to_keep=1)
        past = output.past_key_values
        new, new_log_probs = sample(output.logits[:, -1], temperature)
        responses[rows, t], mask[rows, t] = new.squeeze(1), active
        log_probs[rows, t] = new_log_probs.squeeze(1)
        attention = torch.cat([attention, active.unsqueeze(1)], 1)
        active = active & (new != stop_tokens).all(1)
        num_active = active.sum().item()
        if num_active == 0:
            break
        kinds = {type(layer).__name__ for layer in getattr(past, "layers", [])}
        can_select = kinds and kinds <= {"DynamicLayer", "DynamicSlidingWindowLayer"}
        if can_select and num_active <= len(rows) / 2:  # go on without the rows that have ended
            kept = active.nonzero().squeeze(1)
            past.batch_select_indices(kept)
            rows, active, new, attention = rows[kept], active[kept], new[kept], attention[kept]


def ended(batch: Responses, task: Task) -> Tensor:
    """Whether each response [B] has a stop token. The others were cut off."""
    stop_tokens = torch.tensor(task.stop_tokens, device=batch.mask.device)
    return (torch.isin(batch.responses, stop_tokens) & batch.mask).any(1)


# ------------------------------------------------- Log-probabilities ----------------------------------------


def token_log_probs(model: Any, batch: Responses | Batch, temperature: float) -> Tensor:
    """log π [B, L] of the responses' tokens, where π is the policy that acts, with its temperature."""
    tokens = torch.cat([batch.prompts, batch.responses], 1)
    inputs = model_inputs(tokens, torch.cat([batch.prompt_mask, batch.mask], 1))
    length = batch.mask.shape[1]
    # The output at each position is for the token after it. So the first is that at the prompt's last token.
    if getattr(model, "logits_in_parts", False):
        outputs = model.get_decoder()(**inputs).last_hidden_state
        weight = model.get_output_embeddings().weight
    else:
        outputs, weight = model(**inputs, logits_to_keep=length + 1).logits, None  # or of all tokens
    outputs, following = outputs[:, -length - 1 :].float(), F.pad(batch.responses, (0, 1))
    log_probs = TokenLogProbs.apply(outputs.flatten(0, 1), weight, following.reshape(-1, 1), temperature)
    return log_probs.view(following.shape)[:, :-1]  # after the last token, nothing follows


class TokenLogProbs(torch.autograd.Function):
    """log π [M, 1] of tokens [M, 1], from hidden states [M, W] and the last layer's weights [V, W].

    With a large vocabulary, logits take most of the memory. So they are computed for 256 tokens at a time,
    and again in the backward pass. Without weights, `hidden` is the logits [M, V] themselves, and the
    backward pass writes their gradient over them. It is (1(v = token) - π(v)) / temperature.
    """

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature):
        log_probs = torch.empty_like(tokens, dtype=hidden.dtype)
        log_z = torch.empty_like(log_probs)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(tokens), 256):
                rows = slice(start, start + 256)
                logits = (hidden[rows] if weight is None else hidden[rows] @ weight.T) / temperature
                log_z[rows] = logits.logsumexp(1, keepdim=True)
                log_probs[rows] = logits.gather(1, tokens[rows]) - log_z[rows]
        ctx.save_for_backward(hidden, weight, tokens, log_z)
        ctx.temperature = temperature
        return log_probs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        hidden, weight, tokens, log_z = ctx.saved_tensors
        hidden_gradient = hidden if weight is None else torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        gradient = gradient / ctx.temperature
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(tokens), 256):
                rows = slice(start, start + 256)
                logits = hidden[rows] if weight is None else hidden[rows] @ weight.T
                policy = logits.div_(ctx.temperature).sub_(log_z[rows]).exp_()  # in place, as what follows
                logits_gradient = policy.mul_(-gradient[rows]).scatter_add_(1, tokens[rows], gradient[rows])
                if weight is not None:
                    hidden_gradient[rows] = logits_gradient @ weight
                if weight_gradient is not None:
                    weight_gradient.addmm_(logits_gradient.T, hidden[rows])
        return hidden_gradient, weight_gradient, None, None


@torch.no_grad()
def all_log_probs(model: nn.Module, batch: Responses, args: Args) -> Tensor:
    """log π [B, L] of the responses' tokens, without gradients."""
    log_probs = torch.zeros(batch.mask.shape, device=args.device)
    for rows, part in micro_batches(batch, torch.arange(len(log_probs)), read_lengths(batch), args):
        with autocast(args):
            log_probs[rows, : part.mask.shape[1]] = token_log_probs(model, part, args.temperature)
    return log_probs


def check_sampling(difference: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics of the difference [B, L] between log π in sampling and in learning: it must be rounding."""
    average, largest = masked_mean(difference.abs(), mask).item(), (difference.abs() * mask).max().item()
    if not average <= 0.5:  # larger, or not a number
        raise FloatingPointError(f"log π differs by {average:.2f} between sampling and learning")
    name = "sampling/sampling_logp_difference"
    return {f"{name}/mean": average, f"{name}/max": largest}


# ------------------------------------------------- Equations ------------------------------------------------


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where the mask is true, over all processes."""
    total, count = sum_over_processes(torch.stack([(x * mask).sum(), mask.sum()]))
    return total / count


def means_over_processes(columns: dict[str, Tensor], args: Args) -> dict[str, float]:
    """Means over all processes; not of numbers that are NaN, where a reward function gave None."""
    on_device = {name: x.to(args.device, torch.float32) for name, x in columns.items()}
    means = {name: masked_mean(x.nan_to_num(), ~x.isnan()).item() for name, x in on_device.items()}
    return {name: value for name, value in means.items() if not math.isnan(value)}


def group_advantages(scores: Tensor, kl: Tensor, args: Args) -> Tensor:
    """Advantages [B] of responses with these scores s and KLs, Σ_t log π/π_ref, [B]; r is s - β KL.

        none     A_i = r_i - mean(r_1 ... r_G)                          [Dr. GRPO], §3.2
        group    A_i = (r_i - mean(r_1 ... r_G)) / (deviation + 1e-4)   [GRPO], §4.1.2

    Without scaling, the expected gradient is (1 - 1/G) ∇J for J = E[s] - β KL(π ‖ π_ref), because r_i is part
    of its own baseline; the leave-one-out baseline of [RLOO] gives G/(G - 1) times these advantages. Scaling
    gives too easy and too hard prompts as much weight as others ([Dr. GRPO], §3.1). The deviation is that of
    s. It divides the KL, too, so that J's optimum stays where it is: there, r is the same for all responses
    to a prompt. Where r varies more than s, because of the KL, the deviation goes over to 1 (or to that of r,
    if this is larger), so that equal scores do not make a small KL large.
    """
    scores, kl = scores.double().view(-1, args.group_size), kl.double().view(-1, args.group_size)
    penalized = scores - args.kl_coef * kl if args.kl_in == "reward" else scores
    advantages = penalized - penalized.mean(1, keepdim=True)
    if args.scale_rewards == "group":
        deviation, other = scores.std(1, keepdim=True), penalized.std(1, keepdim=True)
        share = (deviation / other.clamp(min=1e-12)).clamp(max=1)
        deviation = share * deviation + (1 - share) * other.clamp(min=1)
        advantages = advantages / (deviation + 1e-4)
    return advantages.flatten().float()


def loss_weights(mask: Tensor, num_tokens: Tensor, args: Args) -> Tensor:
    """The weight [B, L] of each token in a minibatch's loss, which is Σ_it w_it loss_it.

        sequence-mean   1/B Σ_i 1/|o_i| Σ_t loss_it   [GRPO], equation 3
        token-mean      1/(Σ_i |o_i|) Σ_it loss_it    [DAPO], §3.3
        constant        1/(B L) Σ_it loss_it          [Dr. GRPO], §3.2; here, L is --max-response-length

    |o_i| is the number of tokens of response i. B and `num_tokens` = Σ_i |o_i| are of the whole minibatch,
    over all micro-batches and processes, with responses that --mask-truncated leaves out; the mask may be of
    a part. The constant gives the gradient of E[r],
    divided by L. The mean over a sequence divides by its length, too: among right answers it favours the
    short, among wrong ones it spares the long ([Dr. GRPO], §3.1). The mean over tokens has the constant's
    direction, but minibatches of short responses weigh more.

    With the constant, the gradient is smaller the longer L is beside the responses, and --max-grad-norm acts
    less: for 60 tokens of 512, it is an eighth of the mean over tokens. Adam's steps are not smaller.
    """
    num_responses = args.batch_size // args.num_minibatches
    if args.loss_aggregation == "sequence-mean":
        return mask / (num_responses * mask.sum(1, keepdim=True))
    if args.loss_aggregation == "token-mean":
        return mask / num_tokens
    return mask / (num_responses * args.max_response_length)


class Batch(NamedTuple):
    """B responses to learn from."""

    prompts: Tensor  # [B, P]
    prompt_mask: Tensor  # [B, P]
    responses: Tensor  # [B, L]
    mask: Tensor  # [B, L]
    log_probs: Tensor  # [B, L], log π_old
    ref_log_probs: Tensor  # [B, L], log π_ref
    advantages: Tensor  # [B]
    learnt: Tensor  # [B], false at responses from which nothing is learnt: --mask-truncated


def grpo_loss(log_probs: Tensor, batch: Batch, num_tokens: Tensor, args: Args) -> tuple[Tensor, dict]:
    """The loss to minimise ([GRPO], equation 3, negated), from log π [B, L]; also metrics.

        loss_it = -min(ρ_it A_i, clip(ρ_it, 1 - ε, 1 + ε_high) A_i) + β KL_it

    ρ is the ratio π / π_old of the token, or by --ratio sequence exp(1/|o_i| Σ_t log(π / π_old)), which is
    the same for all tokens of a response ([GSPO], equation 7). KL_it is, by --kl-in, with x = π_ref / π,

        reward    0; instead, β Σ_t log(π_old / π_ref), k1 of [KL], lowers the response's score
        loss      k3 of [KL], x - 1 - log x ([GRPO], equation 4)

    k1 in the reward has the gradient of KL(π ‖ π_ref). k3 in the loss has, for each token, that of
    KL(π_ref ‖ π), and does not see what a token does to the KL of those after it: training ends at another
    policy.
    Loss and metrics of the parts of a minibatch add up to those of the minibatch.
    """
    log_ratio = token_log_ratio = (log_probs - batch.log_probs) * batch.mask
    if args.ratio == "sequence":
        log_ratio = token_log_ratio.sum(1, keepdim=True) / batch.mask.sum(1, keepdim=True)
    ratio = log_ratio.exp()
    advantages = batch.advantages.unsqueeze(1)
    clipped = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef_high)
    losses = -torch.min(ratio * advantages, clipped * advantages)
    if args.kl_in == "loss":
        log_x = (batch.ref_log_probs - log_probs) * batch.mask
        losses = losses + args.kl_coef * (log_x.exp() - 1 - log_x)
    weights = loss_weights(batch.mask, num_tokens, args) * batch.learnt.unsqueeze(1)
    loss = (losses * weights).sum()
    with torch.no_grad():
        no_gradient = (ratio * advantages > clipped * advantages) & batch.mask
        return loss, {
            "loss/policy_avg": loss,
            "policy/clipfrac_avg": no_gradient.sum() / num_tokens,
            "policy/approxkl_avg": 0.5 * token_log_ratio.square().sum() / num_tokens,
        }


# ------------------------------------------------- Algorithm ------------------------------------------------


def next_prompts(prompts: list[dict], first: int, count: int, seed: int) -> list[dict]:
    """Prompts from the number `first` on: all are used in a random order, then again in another one."""
    orders: dict[int, list[int]] = {}  # by the number of the pass over all prompts
    rows = []
    for number in range(first, first + count):
        lap, place = divmod(number, len(prompts))
        if lap not in orders:
            generator = torch.Generator().manual_seed(10**9 * seed + lap)
            orders[lap] = torch.randperm(len(prompts), generator=generator).tolist()
        rows.append(prompts[orders[lap][place]])
    return rows


def score(task: Task, rows: list[dict], batch: Responses) -> tuple[Tensor, dict]:
    """The scores [B] of B responses, in float64 on the CPU, and by function the rewards that they sum."""
    rewards = call_functions(task, rows, batch)
    return torch.stack(list(rewards.values())).nansum(0), rewards


@torch.no_grad()
def collect(models: Models, task: Task, args: Args, episodes: int = 0) -> tuple[Batch, dict, dict]:
    """B responses with advantages, G to each of the next prompts; also metrics, and what is to be written.

    An example with B = 4, G = 2 and no KL penalty. The second prompt has two tokens, and padding before them;
    a short response has padding after its stop token, and the last one is cut off:

        prompts     [[5, 6, 7], [5, 6, 7], [-, 8, 9], [-, 8, 9]]
        responses   [[3, stop, -], [4, 4, stop], [4, stop, -], [3, 3, 3]]
        mask        [[1, 1, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]]
        scores      [1, 0, 1, 1]
        advantages  [0.71, -0.71, 0, 0]    less the group's mean of 0.5, over its deviation of 0.71

    Each token of a response has the advantage of the response. Nothing is learnt from the second group.
    """
    count = args.batch_size // args.group_size // PROCESSES
    chosen = next_prompts(task.prompts, episodes // args.group_size + RANK * count, count, args.seed)
    rows = [row for row in chosen for _ in range(args.group_size)]
    responses, sampled_log_probs = generate(models.actor, task, rows, args)
    # log π is computed anew, in the same way as in the update: at first, the ratio is 1.
    log_probs = ref_log_probs = all_log_probs(models.actor, responses, args)
    if models.reference is not None:
        ref_log_probs = all_log_probs(models.reference, responses, args)
    scores, rewards = score(task, rows, responses)
    groups, mask = scores.view(-1, args.group_size), responses.mask
    kl = ((log_probs - ref_log_probs) * mask).sum(1)
    advantages = group_advantages(scores, kl.cpu(), args).to(args.device)
    has_ended = ended(responses, task)
    learnt = has_ended if args.mask_truncated else torch.ones_like(has_ended)
    batch = Batch(*responses, log_probs, ref_log_probs, advantages, learnt)

    means = {f"rewards/{name}": numbers for name, numbers in rewards.items()} | {
        "reward": scores,
        "frac_reward_zero_std": groups.amax(1) == groups.amin(1),
        "completions/mean_length": mask.sum(1),
        "completions/clipped_ratio": ~has_ended,
    }
    if models.reference is not None:
        means["objective/kl"] = kl  # in nats per response
    metrics = means_over_processes(means, args)
    metrics["entropy"] = -masked_mean(log_probs, mask).item()  # an estimate, in nats per token
    samples = {"response": decode(task, rows, responses), "row": rows, "reward": scores.tolist()}
    for name, numbers in rewards.items():
        samples[name] = [None if math.isnan(number) else number for number in numbers.tolist()]
    return batch, metrics | check_sampling(sampled_log_probs - log_probs, mask), samples


def update(actor: nn.Module, optimizer: Adam, batch: Batch, args: Args) -> dict[str, float]:
    """Learn from a batch: μ epochs of gradient steps on shuffled minibatches. Returns the mean metrics.

    A minibatch's gradient is the sum of those of its micro-batches, over all processes.
    """
    parameters = optimizer.param_groups[0]["params"]
    sums: dict[str, Tensor] = {}  # of metrics, still as tensors: reading them would wait for the GPU
    norms, lengths = [], read_lengths(batch)
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.mask))
        for rows in order.split(len(order) // args.num_minibatches):
            num_tokens = torch.tensor(sum(lengths[1][row] for row in rows.tolist()), device=args.device)
            sum_over_processes(num_tokens)
            for _, part in micro_batches(batch, rows, lengths, args):
                with autocast(args):
                    log_probs = token_log_probs(actor, part, args.temperature)
                loss, metrics = grpo_loss(log_probs, part, num_tokens, args)
                loss.backward()
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0) + value.detach()
            sum_gradients(parameters)
            norms.append(clip_grad_norm_(parameters, args.max_grad_norm, error_if_nonfinite=True))
            optimizer.step()
            optimizer.zero_grad()  # now, so that no gradients take memory while responses are generated
    means = {name: sum_over_processes(total).item() / len(norms) for name, total in sums.items()}
    return means | {"grad_norm": torch.stack(norms).mean().item()}


def train(args: Args, task: Task | None = None) -> Path:
    """GRPO ([GRPO], Algorithm 1 with I = 1: the reference stays as it is). Returns the checkpoint's path.

    Raises `Refused` for what would train wrongly. After an error in training, what is learnt is saved.
    """
    check(args, task)
    use_device(args)
    seed_everything(args.seed)
    models, task = load_pretrained(args, task or load_task(args)) if args.model else make_sums(args)
    models.eval()  # no dropout: with it, the first ratio would not be 1
    optimizer = Adam([p for p in models.parameters() if p.requires_grad], fused=True)
    connect(models, args)  # after Adam is made: what it imports would keep the connection open at exit
    episodes = restore(args.resume, models, optimizer) if args.resume else 0
    run = Run(args, models, optimizer, task, episodes)
    try:
        while episodes < args.total_episodes and not stopped(args):
            numbers = args.seed, episodes, RANK  # so that a resumed run draws the same random numbers
            seed_everything(*numbers)
            metrics = {}
            if episodes // args.batch_size % args.eval_every == 0:
                metrics = evaluate(models.actor, task, args)
                run.keep_best(episodes, metrics)
                run.save(episodes)
                seed_everything(*numbers)  # training is the same whatever is evaluated
            elif time.monotonic() - run.last_save > 600:
                run.save(episodes)
            batch, batch_metrics, samples = collect(models, task, args, episodes)
            learning_rate = args.learning_rate * (1 - episodes / args.total_episodes)
            optimizer.param_groups[0]["lr"] = learning_rate
            metrics |= batch_metrics | {"lr": learning_rate}
            metrics |= update(models.actor, optimizer, batch, args)
            episodes += args.batch_size
            run.log(episodes - args.batch_size, metrics, samples)
        run.save(episodes)
        if episodes >= args.total_episodes:
            metrics = evaluate(models.actor, task, args)
            run.keep_best(episodes, metrics)
            run.log(episodes, metrics, {})
    except BaseException as error:
        run.save(episodes)  # the gradient steps that were taken
        if RANK == 0:
            error.add_note(f"saved; to continue: --resume {run.path}")
        raise
    run.finish()
    return run.path


# ========================== End of GRPO. What follows is what training needs around it =====================


STOP = threading.Event()  # set by Ctrl-C and SIGTERM: training ends after the iteration


def stopped(args: Args) -> bool:
    """Whether training is to end: all processes end after the same iteration."""
    return sum_over_processes(torch.tensor(float(STOP.is_set()), device=args.device)).item() > 0


class Refused(ValueError):  # noqa: N818
    """Raised at the start for what would train wrongly without an error, or fail only after training."""


def seed_everything(*numbers: int) -> None:
    """Seed the generators of PyTorch, and of Python and NumPy, from which reward functions may draw."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    for function in (torch.manual_seed, random.seed, np.random.seed):
        function(seed)


def pad(rows: list[list[int]], side: str, device: str) -> tuple[Tensor, Tensor]:
    """Lists of tokens as tokens [B, S], and a mask [B, S] of what is not padding."""
    tokens = [torch.tensor(row, dtype=torch.long) for row in rows]  # on the CPU: to copy each one is slow
    masks = [torch.ones_like(row, dtype=torch.bool) for row in tokens]
    padded = rnn.pad_sequence(tokens, True, 0, side), rnn.pad_sequence(masks, True, 0, side)
    return padded[0].to(device), padded[1].to(device)


def unpad(tokens: Tensor, mask: Tensor) -> list[list[int]]:
    """The tokens of each row, without padding."""
    return [row[kept].tolist() for row, kept in zip(tokens.cpu(), mask.cpu(), strict=True)]


def encode(tokenizer: Any, row: dict) -> list[int]:
    """The tokens of a row's prompt: a text, or chat messages, of which the last may be half an answer.

    A text gets the start token that the tokenizer puts before texts, once; not what it puts after them.
    """
    prompt = row["prompt"]
    if isinstance(prompt, str):
        text = tokenizer.encode(prompt, add_special_tokens=False)
        whole = tokenizer.encode(prompt)
        for n in range(len(whole) - len(text) + 1):
            if text and whole[n : n + len(text)] == text:
                return text if text[:n] == whole[:n] else whole[:n] + text
        return whole if text else whole[:1]
    for message in prompt if isinstance(prompt, list) and prompt else [prompt]:
        parts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(part, str) for part in parts):  # templates write something for anything
            raise Refused(f'a message is {{"role": "user", "content": "a text"}}, not {message!r:.200}')
    how = "continue_final_message" if prompt[-1]["role"] == "assistant" else "add_generation_prompt"
    options = {how: True} | (row.get("chat_template_kwargs") or {})
    return tokenizer.apply_chat_template(prompt, return_dict=False, **options)


def decode(task: Task, rows: list[dict], batch: Responses) -> list[str]:
    """The texts of B responses, without special and stop tokens.

    After a text, this is what the response adds to it: alone, some tokenizers would drop a space before it.
    """
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    decoded, texts = partial(task.tokenizer.decode, **options), []
    prompts, responses = unpad(batch.prompts, batch.prompt_mask), unpad(batch.responses, batch.mask)
    for row, prompt, response in zip(rows, prompts, responses, strict=True):
        tokens = response[:-1] if response and response[-1] in task.stop_tokens else response
        before = prompt if isinstance(row["prompt"], str) else []
        text, whole = decoded(before), decoded(before + tokens)
        texts.append(whole[len(text) :] if whole.startswith(text) else decoded(tokens))
    return texts


def tokenize(task: Task, rows: list[dict], texts: list[str], args: Args) -> Responses:
    """The prompts of these rows, and responses that are given as texts."""
    tokenizer, length = task.tokenizer, args.max_response_length
    prompts = [encode(tokenizer, row) for row in rows]
    responses = [[*tokenizer.encode(text), tokenizer.eos_token_id][:length] for text in texts]
    return Responses(*pad(prompts, "left", args.device), *pad(responses, "right", args.device))


def arguments_of_trl(rows: list[dict], texts: list[str], tokens: list[list[int]]) -> dict[str, Any]:
    """What TRL's GRPOTrainer passes to a reward function; a key of the rows is a list, by its name."""
    prompts = [row["prompt"] for row in rows]
    completions: list[Any] = [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]
    keys = dict.fromkeys(key for row in rows for key in row if key not in ("prompt", "completion"))
    columns = {key: [row.get(key) for row in rows] for key in keys}
    return columns | {"prompts": prompts, "completions": completions, "completion_ids": tokens}


def call_functions(task: Task, rows: list[dict], batch: Responses, may_be_none: bool = False) -> dict:
    """Rewards [B] of B responses by each reward function, in float64 on the CPU; NaN where it gives None.

    A function that has a parameter `tokens` gets the responses' tokens, too; one that has a parameter
    `completions` or `completion_ids` is called as TRL does. Raises `ValueError` for what is not a finite
    number or None, and if all functions give None for a response.
    """
    texts, rewards = decode(task, rows, batch), {}
    for name, function in task.reward_functions.items():
        tokens, copies = unpad(batch.responses, batch.mask), copy.deepcopy(rows)  # they may be changed
        parameters = inspect.signature(function).parameters
        kinds = {parameter.kind for parameter in parameters.values()}
        if kinds and kinds <= {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            raise Refused(f"{name} has only *args and **kwargs: if it is decorated, use functools.wraps")
        if {"completions", "completion_ids"} & parameters.keys():
            values = function(**arguments_of_trl(copies, texts[:], tokens))
        else:
            more = {"tokens": tokens} if "tokens" in parameters else {}
            values = function(copies, texts[:], **more)
        values = values.tolist() if hasattr(values, "tolist") else values  # of PyTorch or NumPy
        is_list = isinstance(values, (list, tuple)) and len(values) == len(rows)
        if not is_list or not all(value is None or math.isfinite(value) for value in values):
            raise ValueError(f"{name} must return {len(rows)} finite numbers or None, not {values!r:.200}")
        numbers = [math.nan if value is None else float(value) for value in values]
        rewards[name] = torch.tensor(numbers, dtype=torch.float64)
    if rewards and not may_be_none and (missing := torch.stack([*rewards.values()]).isnan().all(0)).any():
        raise ValueError(f"no reward function gives a reward for {rows[missing.int().argmax()]!r:.200}")
    return rewards


def evaluate(actor: nn.Module, task: Task, args: Args) -> dict[str, float]:
    """Mean rewards of a response to each held-out prompt, by each reward function."""
    if not task.eval_prompts:
        return {}
    rows = task.eval_prompts[RANK::PROCESSES]
    responses, _ = generate(actor, task, rows, replace(args, temperature=args.eval_temperature))
    _, rewards = score(task, rows, responses)
    return means_over_processes({f"eval/{name}": values for name, values in rewards.items()}, args)


def autocast(args: Args) -> torch.autocast:
    """A context in which networks compute in bfloat16, if --bfloat16 is set."""
    return torch.autocast(args.device.partition(":")[0], torch.bfloat16, enabled=args.bfloat16)


def use_device(args: Args) -> None:
    """Choose this process's GPU. With --bfloat16, it computes float32 in TF32: the last layer, above all."""
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if args.device.startswith("cuda") and args.bfloat16:
        torch.set_float32_matmul_precision("high")


def connect(models: Models, args: Args) -> None:
    """Connect the processes that torchrun started, and give all of them the weights of the first."""
    if PROCESSES > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        for tensor in models.state_dict().values():
            dist.broadcast(tensor, 0)


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if PROCESSES > 1:
        dist.all_reduce(x)
    return x


def sum_gradients(parameters: list[Tensor]) -> None:
    """Sum gradients over all processes, in place. One process alone may have used an expert."""
    if PROCESSES > 1:
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)


# ------------------------------------------------- The built-in task ----------------------------------------


class Block(nn.Module):
    """A layer of GPT-2: attention, and a perceptron with one hidden layer; each is added to its input."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.output = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, visible: Tensor, past: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """x [B, T, W] after this layer, and all S keys and values; visible [B, 1, T, S] is the mask."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        query, keys, values = qkv.permute(2, 0, 3, 1, 4)
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        attended = F.scaled_dot_product_attention(query, keys, values, attn_mask=visible)
        x = x + self.projection(attended.transpose(1, 2).flatten(2))
        return x + self.output(F.gelu(self.hidden(self.norm2(x)), approximate="tanh")), (keys, values)


class GPT(nn.Module):
    """GPT-2 (Radford et al. 2019), to be called as models of transformers are."""

    def __init__(self, vocabulary: int, width: int = 64, layers: int = 2, heads: int = 4, context: int = 32):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache, logits_to_keep=0):
        """Hidden states [B, T, W] of input_ids, the last T of S tokens, and the last logits (0: all)."""
        new, total = input_ids.shape[1], attention_mask.shape[1]
        causal = torch.ones(new, total, dtype=torch.bool, device=input_ids.device).tril(total - new)
        visible = attention_mask[:, None, None, :] & causal
        hidden, cache = self.tokens(input_ids) + self.positions(position_ids), []
        for block, past in zip(self.blocks, past_key_values or [None] * len(self.blocks), strict=True):
            hidden, keys_values = block(hidden, visible, past)
            cache.append(keys_values)
        hidden = self.norm(hidden)
        logits = hidden[:, -logits_to_keep:] @ self.tokens.weight.T
        return SimpleNamespace(last_hidden_state=hidden, logits=logits, past_key_values=cache)


ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
WORDS = ["<pad>", "<stop>", "plus", "=", "is", ",", "so", "hundred", *ONES, *TENS]


class WordTokenizer:
    """A token for each of WORDS, with the interface of transformers' tokenizers."""

    bos_token_id, eos_token_id = None, 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [WORDS.index(word) for word in text.split()]

    def decode(self, tokens: list[int], **options: Any) -> str:
        return " ".join(WORDS[token] for token in tokens)


def make_sums(args: Args) -> tuple[Models, Task]:
    """A transformer that has learnt to add, with mistakes. On --resume, the checkpoint has its weights."""
    torch.set_num_threads(1)  # for small networks, one is fastest
    actor, tokenizer, rng = GPT(len(WORDS)).to(args.device), WordTokenizer(), random.Random(0)
    task = Task(tokenizer, [tokenizer.eos_token_id], [], [], {"accuracy": accuracy})
    for a in range(20, 100):
        for b in range(a, 100):  # a + b and b + a are on the same side
            rows = task.eval_prompts if rng.random() < 0.06 else task.prompts
            for x, y in {(a, b), (b, a)}:
                prompt = f"{spell(x)} plus {spell(y)} ="
                rows.append({"prompt": prompt, "answer": spell(x + y), "a": x, "b": y})
    if not args.resume:
        learn_to_write(actor, task, write_sum, args)
    return Models(actor, copy.deepcopy(actor).requires_grad_(False) if args.kl_coef else None), task


def spell(number: int) -> str:
    """A number below 200 in words."""
    if number >= 100:
        return f"one hundred {spell(number - 100)}" if number > 100 else "one hundred"
    if number < 20:
        return ONES[number]
    tens = TENS[number // 10 - 2]
    return f"{tens} {ONES[number % 10]}" if number % 10 else tens


def write_sum(rng: random.Random, row: dict) -> str:
    """An answer for the supervised learning: 7 of 10 forget to carry.

    "six plus seven is thirteen , fifty plus seventy is one hundred twenty , so one hundred thirty three"
    """
    a, b = row["a"], row["b"]
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    total = a + b - 10 if ones >= 10 and rng.random() < 0.7 else a + b
    ones_line = f"{spell(a % 10)} plus {spell(b % 10)} is {spell(ones)}"
    tens_line = f"{spell(a // 10 * 10)} plus {spell(b // 10 * 10)} is {spell(tens)}"
    return f"{ones_line} , {tens_line} , so {spell(total)}"


def accuracy(rows: list[dict], texts: list[str]) -> list[float]:
    """Rewards: 1 for a response that ends with the right sum, else 0."""
    return [float(text.endswith(f", so {row['answer']}")) for row, text in zip(rows, texts, strict=True)]


def learn_to_write(actor: GPT, task: Task, write: Callable, args: Args, steps: int = 600) -> None:
    """Supervised learning of responses that `write` gives to random prompts."""
    rng = random.Random(args.seed)
    optimizer = Adam(actor.parameters(), fused=True)
    for step in range(steps):
        rows = rng.choices(task.prompts, k=128)
        batch = tokenize(task, rows, [write(rng, row) for row in rows], args)
        log_probs = token_log_probs(actor, batch, temperature=1.0)
        loss = -(log_probs * batch.mask).sum() / batch.mask.sum()
        optimizer.param_groups[0]["lr"] = 5e-3 * min((step + 1) / 40, 1 - step / steps)
        loss.backward()
        clip_grad_norm_(actor.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"supervised learning: loss {loss.item():.2f}", flush=True)


# ------------------------------------------------- Models of transformers -----------------------------------


def load_task(args: Args) -> Task:
    """The task that the flags name, without stop tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    functions = {name: pkgutil.resolve_name(name) for name in args.reward_function}
    return Task(tokenizer, [], read_rows(args.prompts), read_rows(args.eval_prompts), functions)


def read_rows(file: str | None) -> list[dict]:
    """The rows of a file with a line of JSON for each."""
    rows = []
    lines = Path(file).read_text(encoding="utf-8-sig").split("\n") if file else []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise Refused(f"{file}, line {number}: {error}") from error
    return rows


def check_task(task: Task, args: Args) -> None:
    """Raise `Refused` for prompts that cannot be learnt from. Tries the reward functions, too."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.model).get_text_config()
    names = "max_position_embeddings", "max_target_positions", "max_seq_len"
    contexts = [getattr(config, name, None) or sys.maxsize for name in names]
    # Beyond its original context, longrope rotates all rows of a batch otherwise, short ones, too.
    if "longrope" in str(getattr(config, "rope_parameters", None)):
        contexts.append(config.rope_parameters["original_max_position_embeddings"])
    longest = min(contexts) - args.max_response_length
    if not task.prompts or 0 < len(task.eval_prompts) < PROCESSES:
        raise Refused("there are no prompts, or fewer prompts of the evaluation than processes")
    for row in [*task.prompts, *task.eval_prompts]:
        if not isinstance(row, dict) or "prompt" not in row:
            raise Refused(f'{row!r:.200} is no {{"prompt": ...}}')
        tokens = encode(task.tokenizer, row)
        unknown = getattr(task.tokenizer, "unk_token_id", None)
        if unknown in tokens and set(tokens) <= {*task.tokenizer.all_special_ids}:
            raise Refused(f"{row!r:.200} has no token that the tokenizer knows: are its files there?")
        if not 0 < len(tokens) <= longest:
            limits = f"the model can take 1 to {longest}, with --max-response-length"
            raise Refused(f"{row!r:.200} has {len(tokens)} tokens; {limits}")
    columns = {"episodes", "response", "row", "reward"}  # of completions.jsonl
    if columns & task.reward_functions.keys() or not task.reward_functions:
        raise Refused(f"reward functions are needed, which have other names than {columns}")
    nothing = torch.zeros(2, 0, dtype=torch.long)  # two empty responses to the first prompt
    call_functions(task, task.prompts[:1] * 2, Responses(nothing, nothing > 0, nothing, nothing > 0))


def load_pretrained(args: Args, task: Task) -> tuple[Models, Task]:
    """The model that --model names, and the task with its stop tokens. Both are tried."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    check_task(task, args)
    # transformers 5.24 says that 5.40 renames this argument; the extra `rlhf` is for versions below.
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    frozen = load_network(AutoModelForCausalLM, str(args.model), task.tokenizer)
    logging.disable_progress_bar()  # they are for loading, not for each time that the model is saved
    actor = make_trainable(frozen, args, "CAUSAL_LM")
    if args.bfloat16:
        use_bfloat16(actor, frozen)
    ends = frozen.generation_config.eos_token_id  # chat models have one for the end of a turn, too
    ends = [task.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    stop_tokens = {*task.stop_tokens, *ends} - {None}
    if args.mask_truncated and not stop_tokens:
        raise Refused("--mask-truncated would learn nothing: there is no stop token")
    models = Models(actor, frozen if args.kl_coef else None).to(args.device)
    # Logits in parts are computed twice. It saves memory and costs time: not on a CPU.
    in_parts = args.device != "cpu" and has_linear_head(models.actor, args)
    for network in filter(None, (models.actor, models.reference)):
        network.logits_in_parts = in_parts
    check_actor(models.actor, task, args)
    return models, task._replace(stop_tokens=list(stop_tokens))


def load_network(auto: Any, name: str, tokenizer: Any) -> Any:
    """A frozen network in float32. Raises `Refused` if its files are not all that it needs, or are more."""
    folder = Path(name).resolve()  # adapters name it, wherever they are loaded
    options = {"dtype": torch.float32, "output_loading_info": True}
    network, loading = auto.from_pretrained(str(folder) if folder.exists() else name, **options)
    if loading["missing_keys"]:  # transformers makes up numbers for these
        raise Refused(f"{name} lacks {sorted(loading['missing_keys'])}, which {type(network).__name__} needs")
    masks = "masked_bias", "attn.bias", "attention.bias"  # of the context, which old files have
    lost = sorted(key for key in loading["unexpected_keys"] if not key.endswith(masks))
    if lost and "CausalLM" in auto.__name__:  # of images, say
        raise Refused(f"{name} has {lost[:3]}... ({len(lost)}), which would not be saved after training")
    tokens, rows = max(tokenizer.get_vocab().values()) + 1, network.get_input_embeddings().num_embeddings
    if tokens > rows:
        raise Refused(f"{name} has embeddings of {rows} tokens, and the tokenizer has {tokens}")
    return network.requires_grad_(False)


@torch.no_grad()
def check_actor(actor: Any, task: Task, args: Args) -> None:
    """Raise `Refused` unless a short and a long row, padded, have the log π of a plain pass of each alone."""
    rows = sorted((encode(task.tokenizer, row) for row in task.prompts[:100]), key=len)
    prompts, prompt_mask = pad([rows[0], rows[-1]], "left", args.device)
    prompts, prompt_mask = F.pad(prompts, (1, 0)), F.pad(prompt_mask, (1, 0))  # both are padded
    length = min(16, args.max_response_length)
    responses, sampled = prompts.new_zeros(2, length), torch.zeros(2, length, device=args.device)
    mask = responses > 0
    written, no_stop_token = (responses, mask, sampled), prompts.new_zeros(0)
    with autocast(args):
        write_responses(actor, prompts, prompt_mask, written, no_stop_token, args.temperature)
        learnt = token_log_probs(actor, Responses(prompts, prompt_mask, responses, mask), args.temperature)
        for i in range(2):
            tokens = torch.cat([prompts[i][prompt_mask[i]], responses[i]])
            outputs = actor(input_ids=tokens.unsqueeze(0), logits_to_keep=length + 1)
            logits = outputs.logits[0, -length - 1 : -1]
            log_policy = torch.log_softmax(logits.float() / args.temperature, 1)
            alone = log_policy.gather(1, responses[i].unsqueeze(1)).squeeze(1)
            for where, log_probs in {"generation": sampled, "learning": learnt}.items():
                error = (log_probs[i] - alone).abs().max().item()
                if not error < (0.5 if args.bfloat16 else 1e-3):
                    reason = "does it count padding as positions, or have no past_key_values?"
                    raise Refused(f"--model: in {where}, padding changes log π by {error:.2g}: {reason}")


def can_use_graphs(actor: Any, args: Args) -> bool:
    """Whether `write_by_graph` can be used: on a GPU, if the model can have a cache of fixed size."""
    if not (args.cuda_graphs and args.model and args.device.startswith("cuda")):
        return False
    from transformers.cache_utils import StaticCache, StaticLayer

    config = actor.config
    is_static = all(type(layer) is StaticLayer for layer in StaticCache(config, max_cache_len=8).layers)
    return is_static and actor._can_compile_fullgraph and config._attn_implementation == "sdpa"


def write_by_graph(
    actor: Any, prompts: Tensor, prompt_mask: Tensor, written: tuple, stop_tokens: Tensor, temperature: float
) -> None:
    """As `write_responses`, but the third step is recorded as a CUDA graph, and replayed for all that follow.

    For each token, a GPU waits for the CPU to start thousands of small computations; a graph starts them at
    once. It repeats them on the same memory: all that changes from step to step is a tensor that is changed
    in place.
    """
    from transformers import StaticCache

    class Cache(StaticCache):
        """Keys are kept in the precision of attention, as values are: there, autocast would round them."""

        def update(self, keys: Tensor, values: Tensor, *others: Any, **more: Any) -> Any:
            return super().update(keys.to(values.dtype), values, *others, **more)

    responses, mask, log_probs = written
    (size, prompt_length), length = prompts.shape, responses.shape[1]
    capacity = math.ceil((prompt_length + length) / 8) * 8  # attention is fastest with a multiple of 8
    cache = Cache(actor.config, max_cache_len=capacity)
    visible = F.pad(prompt_mask, (0, capacity - prompt_length))  # [B, S], what is not padding, so far
    token, position = prompts[:, -1:].clone(), prompt_mask.sum(1, keepdim=True) - 1
    active = torch.ones(size, 1, dtype=torch.bool, device=prompts.device)
    t = torch.zeros(1, dtype=torch.long, device=prompts.device)

    def choose(logits: Tensor) -> None:
        new, new_log_probs = sample(logits[:, -1], temperature)
        responses.index_copy_(1, t, new)
        mask.index_copy_(1, t, active)
        log_probs.index_copy_(1, t, new_log_probs)
        visible.index_copy_(1, prompt_length + t, active)
        active.logical_and_((new != stop_tokens).all(1, keepdim=True))
        token.copy_(new)
        position.add_(1)
        t.add_(1)

    def step() -> None:
        inputs = {"input_ids": token, "attention_mask": visible[:, None, None], "position_ids": position}
        choose(actor(**inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits)

    inputs = model_inputs(prompts, prompt_mask, cache, use_cache=True)
    causal = torch.ones(prompt_length, capacity, dtype=torch.bool, device=prompts.device).tril()
    itself = torch.eye(prompt_length, capacity, dtype=torch.bool, device=prompts.device)
    # Padding sees itself: attention to nothing is not a number.
    inputs["attention_mask"] = visible[:, None, None] & causal | itself
    choose(actor(**inputs, logits_to_keep=1).logits)
    next_step = step
    for number in range(1, length):
        if number % 16 == 0 and not active.any():
            break
        if number == 2:  # step 1 has set up memory, and autocast keeps the weights that it has rounded
            next_step = record(step)
        next_step()


def record(step: Callable[[], None]) -> Callable[[], None]:
    """Record a step as a CUDA graph, which has no effect yet. The result replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def make_trainable(frozen: nn.Module, args: Args, task_type: str | None = None) -> Any:
    """A copy of a network, to be trained in float32. With LoRA, it shares the frozen weights."""
    shared = {id(p): p for p in frozen.parameters()} if args.lora_rank else {}
    network: Any = copy.deepcopy(frozen, shared)
    if args.gradient_checkpointing:  # transformers' own method would need training mode, with dropout
        from transformers.modeling_layers import GradientCheckpointingLayer

        options = {"use_reentrant": False, "preserve_rng_state": False}
        for layer in network.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = partial(checkpoint, layer.forward, **options)
    if not args.lora_rank:
        return network.float().requires_grad_(True)
    from peft import LoraConfig, get_peft_model

    rank = args.lora_rank
    config = LoraConfig(task_type=task_type, r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    return get_peft_model(network, config)


def use_bfloat16(trained: Any, frozen: Any) -> None:
    """Round frozen matrices to bfloat16 as autocast does, so that a network and its frozen copy are equal.

    Last layers, which give logits, compute in float32: in bfloat16, numbers from 16 to 32 are 1/8 apart.
    """
    heads = [network.get_output_embeddings() for network in (trained, frozen)]
    for module in frozen.modules():
        if type(module).__name__ in ("Linear", "Conv1D") and module not in heads:  # GPT-2's are Conv1D
            module.weight.data = module.weight.data.bfloat16()
    for head in filter(None, heads):
        head.forward = partial(without_autocast, head.forward)


@torch.no_grad()
def has_linear_head(model: Any, args: Args) -> bool:
    """Whether logits are the last layer's weights times hidden states; some models scale or limit them."""
    head, tokens = model.get_output_embeddings(), torch.tensor([[1, 2, 3]], device=args.device)
    if type(head) is not nn.Linear or head.bias is not None:
        return False
    inputs = model_inputs(tokens, torch.ones_like(tokens, dtype=torch.bool))
    with autocast(args):
        hidden = getattr(model.get_decoder()(**inputs), "last_hidden_state", None)
        return hidden is not None and torch.equal(head(hidden), model(**inputs).logits)


def without_autocast(forward: Callable, hidden: Tensor) -> Tensor:
    """Call a layer in float32."""
    with torch.autocast(hidden.device.type, enabled=False):
        return forward(hidden.float())


# ------------------------------------------------- Logging, checkpoints, command line -----------------------


class Run:
    """The folder of a run: curves for TensorBoard, responses, a checkpoint. Only the first process writes."""

    def __init__(self, args: Args, models: Models, optimizer: Adam, task: Task, episodes: int):
        self.args, self.models, self.optimizer, self.task = args, models, optimizer, task
        name = f"{Path(args.model or 'built-in').name}__{args.exp_name}__{args.seed}"
        name = re.sub(r"[^\w.-]+", "_", f"{name}__{datetime.now():%Y%m%d-%H%M%S-%f}")
        self.path = Path(args.resume or Path("runs", name, "checkpoint.pt")).absolute()
        self.completions = self.path.with_name("completions.jsonl")
        self.start_time = self.last_save = time.monotonic()
        self.start, self.last_print = episodes, 0.0
        if RANK > 0:
            return
        folder = self.path.parent
        if args.track:
            import wandb

            wandb.init(name=folder.name, config=asdict(args), sync_tensorboard=True, reinit="finish_previous")
        stop_tokens = [task.tokenizer.decode([token]) for token in task.stop_tokens] or "none"
        print(f"{args.total_episodes:,.0f} responses, seed {args.seed}, stop tokens: {stop_tokens}")
        for kind, pattern in {"parameters": "", "parameters of experts": r"\.experts\."}.items():
            found = [p for name, p in models.actor.named_parameters() if re.search(pattern, name)]
            total, trained = sum(p.numel() for p in found), sum(p.numel() for p in found if p.requires_grad)
            if total:
                print(f"trained: {trained:,} of {total:,} {kind} ({trained / total:.1%})")
        print(f"checkpoint {self.path}, curves: tensorboard --logdir runs", flush=True)
        self.writer = SummaryWriter(str(folder), purge_step=episodes)
        rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        self.writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")
        # Copies of this file, and of a program that imports it, so that `plot.py` tells changed ones apart.
        for path in {Path(__file__), Path(sys.argv[0])}:
            if path.suffix == ".py" and path.is_file() and not Path(folder, path.name).exists():
                Path(folder, path.name).write_bytes(path.read_bytes())
        if self.completions.exists():  # the last line may be incomplete, if the process was killed
            lines = self.completions.read_bytes().split(b"\n")[:-1]
            kept = [line + b"\n" for line in lines if json.loads(line)["episodes"] < episodes]
            self.completions.write_bytes(b"".join(kept))

    def save(self, episodes: int) -> None:
        """Write a checkpoint and the model. Until the checkpoint is complete, the previous one stays."""
        self.last_save = time.monotonic()
        if RANK > 0:
            return
        self.writer.flush()  # first, so that the curves have no gap where training resumes
        named = self.models.named_parameters()
        weights = {name: p.detach() for name, p in named if p.requires_grad or not self.args.model}
        content = {"args": asdict(self.args), "episodes": episodes, "weights": weights}
        new = self.path.with_suffix(".tmp")
        torch.save(content | {"optimizer": self.optimizer.state_dict()}, new)
        torch.load(new, weights_only=True, mmap=True)  # what cannot be loaded fails now, not after hours
        new.replace(self.path)
        if self.args.model:
            self.write_model("model")

    def keep_best(self, episodes: int, metrics: dict[str, float]) -> None:
        """Write the model to best/, too, if its evaluation is the best so far, by the sum of its rewards."""
        if RANK > 0 or not (metrics and self.args.model):
            return
        file = self.path.with_name("best") / "evaluation.json"
        best = json.loads(file.read_text()) if file.exists() else {}
        evaluation = {"episodes": episodes, "sum": sum(metrics.values())} | metrics
        if best.keys() == evaluation.keys() and best["sum"] >= evaluation["sum"]:
            return
        self.write_model("best", evaluation)

    def write_model(self, name: str, evaluation: dict | None = None) -> None:
        """Write the model to a folder of the run. Until it is complete, the previous one stays."""
        folder, new = self.path.with_name(name), self.path.with_name(f"{name}.tmp")
        shutil.rmtree(new, ignore_errors=True)
        self.models.actor.save_pretrained(new)
        self.task.tokenizer.save_pretrained(new)
        if evaluation:
            (new / "evaluation.json").write_text(json.dumps(evaluation, indent=1))
        shutil.rmtree(folder, ignore_errors=True)
        new.replace(folder)

    def log(self, episodes: int, metrics: dict[str, float], samples: dict) -> None:
        """Log an iteration or an evaluation; print evaluations, and all else every five seconds."""
        if RANK > 0:
            return
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, episodes)
        # Half a character, which JSON may have, is written as it stands there.
        with self.completions.open("a", encoding="utf-8", errors="backslashreplace") as file:
            for values in zip(*samples.values(), strict=True):
                sample = {"episodes": episodes} | dict(zip(samples, values, strict=True))
                file.write(json.dumps(sample, ensure_ascii=False, default=str) + "\n")
        shown = [f"{name} {value:.3g}" for name, value in metrics.items() if name in SHOWN or "eval/" in name]
        now, done = time.monotonic(), episodes + self.args.batch_size - self.start
        if now - self.last_print < 5 and "eval/" not in " ".join(shown):
            return
        self.last_print = now
        seconds = (now - self.start_time) / done * max(self.args.total_episodes - done - self.start, 0)
        left = timedelta(seconds=round(seconds))
        print(f"{episodes:>9,} responses  {left} left", *shown, sep="  ", flush=True)
        if samples:
            prompt, response = str(samples["row"][0]["prompt"])[-200:], samples["response"][0][-200:]
            print(f"{'':10}{prompt!r} -> {response!r}, reward {samples['reward'][0]:.3g}", flush=True)

    def finish(self) -> None:
        """Close the log and the connections of processes."""
        if RANK == 0:
            self.writer.close()
        if PROCESSES > 1:
            dist.destroy_process_group()


def load_checkpoint(path: str | Path) -> tuple[Args, dict]:
    """The settings and the content of a checkpoint, of which tensors are read when they are used."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError:  # its message tells how to execute the code in a file
        content = {}
    if "episodes" not in content or not content["args"].keys() <= vars(Args()).keys():
        raise Refused(f"{path} is not a checkpoint of this version of this script")
    return Args(**content["args"]), content


def restore(path: str, models: Models, optimizer: Adam) -> int:
    """Continue the training in which this checkpoint was saved. Returns the number of responses so far."""
    _, content = load_checkpoint(path)
    of_a_model = content["args"]["model"]  # frozen weights are not in the checkpoint
    if models.load_state_dict(content["weights"], strict=not of_a_model).unexpected_keys:
        raise Refused(f"{path} has weights of other names than the model: is a library newer, or a flag?")
    optimizer.load_state_dict(copy.deepcopy(content["optimizer"]))  # tensors in memory, not of the file
    return content["episodes"]


def check(args: Args, task: Task | None = None) -> None:
    """Raise `Refused` for settings that would train wrongly, or have no effect."""
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # NaN is refused, too
            raise Refused(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
    for name, kind in get_type_hints(Args).items():
        value, choices = getattr(args, name), get_args(kind)
        if get_origin(kind) is Literal and value not in choices:
            raise Refused(f"--{name.replace('_', '-')} must be one of {choices}, not {value!r}")
    divisor = math.lcm(args.group_size, args.num_minibatches) * PROCESSES
    others = args.eval_prompts or args.lora_rank or args.bfloat16 or args.gradient_checkpointing
    for wrong, reason in [
        (args.batch_size % divisor,
         "--batch-size must be a multiple of --group-size and --num-minibatches, x processes"),
        (args.kl_in == "loss" and not args.kl_coef, "--kl-in loss needs a --kl-coef above 0"),
        (args.kl_in == "loss" and args.ratio == "sequence", "--ratio sequence cannot go with --kl-in loss"),
        (task and not args.model, "a task of your own needs --model"),
        (len({*args.reward_function}) < len(args.reward_function), "--reward-function names one twice"),
        (args.model and Path(args.model, "adapter_config.json").exists(),
         "an adapter is no model: merge it first, as docs/language_models.md shows"),
        (task is None and len({bool(args.model), bool(args.prompts), bool(args.reward_function)}) > 1,
         "--model, --prompts and --reward-function need each other"),
        (not args.model and (others or args.max_response_length > 24),
         "--eval-prompts, --lora-rank, --bfloat16, --gradient-checkpointing, over 24 tokens need --model"),
    ]:  # fmt: skip
        if wrong:
            raise Refused(reason)


def parse_args() -> Args:
    """The settings of the command line; with --resume, the others are the checkpoint's."""
    flags = [word.partition("=")[0].replace("_", "-") for word in sys.argv]
    if flags.count("--reward-function") > 1:  # the last one would replace the others
        raise Refused("--reward-function takes several functions, one after the other")
    parse = partial(tyro.cli, Args, description=__doc__.partition("\n  [")[0])
    args = parse(default=PRETRAINED if "--model" in flags else Args())
    if not args.resume:
        return args
    path = Path(args.resume)
    path = path / "checkpoint.pt" if path.is_dir() else path
    saved, content = load_checkpoint(path)
    args = replace(parse(default=replace(saved, reward_function=(), track=False)), resume=str(path))
    if saved.reward_function and not args.reward_function:
        raise Refused(f"{path} needs --reward-function {' '.join(saved.reward_function)} again")
    if content["episodes"] >= args.total_episodes:
        done = f"{content['episodes']:,} responses"
        raise Refused(f"{path} has been trained on {done}: raise --total-episodes")
    return args


def print_commands(args: Args, path: Path) -> None:
    """Say how to resume a run, to read its responses, and to check it."""
    script, more = Path(sys.argv[0]), []
    if args.reward_function:
        more += ["--reward-function", *args.reward_function]
    episodes = load_checkpoint(path)[1]["episodes"]
    if episodes >= args.total_episodes:
        more += ["--total-episodes", str(2 * episodes)]
    print("resume:", shlex.join(["python", str(script), "--resume", str(path), *more]))
    print("read:  ", shlex.join(["tail", "-n", "3", str(path.with_name("completions.jsonl"))]))
    if (coach := script.with_name("coach.py")).exists():  # not beside a copy
        print("check: ", shlex.join(["python", str(coach), "check", str(path.parent)]))


def stop(*_: Any) -> None:
    """End training after this iteration, and save; a second Ctrl-C stops at once, and saves, too."""
    if multiprocessing.parent_process():  # a worker of a reward function inherits this handler
        sys.exit(1)
    os.write(2, b"stopping after this iteration; a second Ctrl-C stops at once; both save what is learnt\n")
    STOP.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """The command line. The exit status is 2 for what is refused, and 130 for a run that was stopped."""
    sys.path.append(".")  # where the `module:` of --reward-function is looked for, too
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    STOP.clear()
    try:
        args = parse_args()
        for number in handlers:
            signal.signal(number, stop)
        path = train(args)
        if RANK == 0:
            print_commands(args, path)
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
