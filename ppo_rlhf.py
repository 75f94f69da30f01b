# /// script
# requires-python = ">=3.11"
# dependencies = ["torch>=2.5", "numpy", "tensorboard", "tyro>=0.9.1"]
# ///
r"""Proximal Policy Optimization (PPO) for language models, from human feedback (RLHF), in one file.

    python ppo_rlhf.py
    python ppo_rlhf.py --model Qwen/Qwen2.5-0.5B-Instruct --prompts prompts.jsonl --reward-model <folder> \
        --device cuda --bfloat16
    torchrun --nproc-per-node 4 ppo_rlhf.py ...

Without --model, it goes through all of RLHF: a small transformer learns to write reviews, a reward model
learns from the choices of a simulated human, and PPO trains the first with the scores of the second. With
--model, it trains a model of the transformers library (to be installed; PRETRAINED has its defaults) on the
prompts of a file, one line of JSON each, such as {"prompt": "2 + 3 =", "answer": "5"}. A prompt is a text, or
a list of chat messages. Responses and rewards are written to completions.jsonl in the run's folder. Rewards
come from --reward-model, or from a function that takes B such lines as dicts and the texts of B responses,
and returns B numbers. TRL's reward functions are called as TRL does:

    def reward(rows, responses):
        return [float(response.split()[-1:] == [row["answer"]]) for row, response in zip(rows, responses)]

  [PPO]     Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE]     Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
            Estimation", arXiv:1506.02438
  [RLHF]    Ouyang et al. 2022, "Training Language Models to Follow Instructions with Human Feedback",
            arXiv:2203.02155
  [Ziegler] Ziegler et al. 2019, "Fine-Tuning Language Models from Human Preferences", arXiv:1909.08593
  [KL]      Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html

Shapes: B responses in a batch; P tokens of the longest prompt, L of the longest response, S = P + L; V tokens
in the vocabulary. Prompts are padded on the left, responses on the right. Masks come from lengths, so any
token can serve as padding.
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
from typing import Any, NamedTuple

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
    exp_name: str = Path(sys.argv[0]).stem or "ppo_rlhf"  # part of the run folder's name
    seed: int = 1  # random seed; on the CPU, runs with the same seed are identical
    resume: str | None = None  # resume from this checkpoint; other flags override its settings
    eval_every: int = 10  # iterations between evaluations; each writes a checkpoint and the model
    track: bool = False  # mirror TensorBoard to Weights & Biases, to its WANDB_PROJECT (needs wandb)

    # Task
    model: str | None = None  # folder or name of a transformers model; None is for the built-in reviews
    prompts: str | None = None  # file with a line of JSON for each prompt
    eval_prompts: str | None = None  # the same for held-out prompts
    reward_model: str | None = None  # folder or name of a model that scores texts of --model's tokens
    reward_function: tuple[str, ...] = ()  # functions of rows and responses, as module:function; summed
    max_response_length: int = 8  # longer responses are cut off, and have no stop token
    missing_eos_penalty: float = 2.0  # subtracted from the score of a response without a stop token
    reward_model_updates: int = 0  # reviews: iterations between updates of the reward model; 0: none
    temperature: float = 1.0  # divides the logits in sampling, and in every log-probability
    eval_temperature: float = 1.0  # divides the logits in evaluation; 0 is greedy

    # PPO
    total_episodes: float = 61_440  # total number of responses, for example 1e5
    batch_size: int = 256  # B: prompts per iteration, over all processes; each gets one response
    update_epochs: int = 2  # K: passes over each batch
    num_minibatches: int = 4  # minibatches per epoch, one gradient step each
    learning_rate: float = 1e-3  # Adam's step size for the actor, decayed linearly to 0
    critic_learning_rate: float = 1e-3  # the same for the critic
    kl_coef: float = 0.1  # β: weight of the KL divergence from the reference in the reward
    kl_target: float | None = None  # adapt β to keep this KL divergence, in nats per response ([Ziegler])
    gae_lambda: float = 1.0  # λ: trades bias (0) against variance (1) of the advantages; papers have 0.95
    clip_coef: float = 0.2  # ε: the ratio of new to old probability is clipped to 1 ± ε
    clip_vloss: bool = False  # also clip the change of the value to ±ε
    ent_coef: float = 0.0  # c₂: weight of the entropy bonus
    max_grad_norm: float = 1.0  # clip the actor's gradient to this norm, and the critic's

    # Speed and memory
    device: str = "cpu"  # cpu, cuda or mps; small networks are fastest on the CPU
    micro_batch_size: int = 64  # responses per forward pass in learning; fewer take less memory
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
    "learning_rate": (0, 1), "kl_coef": (0, 1e4), "clip_coef": (1e-3, 0.3), "max_grad_norm": (1e-6, math.inf),
    "micro_batch_size": (1, math.inf), "generation_batch_size": (1, math.inf), "lora_rank": (0, 2**16),
    "micro_batch_tokens": (1, math.inf), "critic_learning_rate": (0, 1), "gae_lambda": (0, 1),
    "missing_eos_penalty": (0, math.inf), "reward_model_updates": (0, math.inf), "kl_target": (1e-3, 1e4),
    "ent_coef": (-10, 10),
}  # fmt: skip

# The defaults with --model
PRETRAINED = Args(
    max_response_length=512, missing_eos_penalty=0.0, eval_temperature=0.0, learning_rate=1e-6,
    critic_learning_rate=1e-4, micro_batch_tokens=8192,
)  # fmt: skip

PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # how many there are, and the number of this one (torchrun)
RANK = int(os.environ.get("RANK", 0)) if PROCESSES > 1 else 0
# Metrics to print, besides evaluations
SHOWN = "reward", "objective/kl", "policy/approxkl_avg", "completions/clipped_ratio", "val/explained_variance"

# ------------------------------------------------- Batches --------------------------------------------------


class Models(nn.Module):
    """The actor and the critic; frozen, the reference (the actor as it was at first) and a reward model."""

    def __init__(self, actor: Any, critic: Any, reference: Any, reward_model: Any):
        super().__init__()
        self.actor, self.critic, self.reference, self.reward_model = actor, critic, reference, reward_model
        # Of reviews: the row of the prompt, the response that the human chose, and the one that was rejected.
        self.comparisons: list[tuple[dict, str, str]] = []


class Task(NamedTuple):
    """What the actor is to learn."""

    tokenizer: Any
    stop_tokens: list[int]  # each of them ends a response; those of the model are added
    prompts: list[dict]  # rows: a "prompt", and what else the reward functions need
    eval_prompts: list[dict]  # held out; of reviews, all prompts again
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


# ------------------------------------------------- Log-probabilities and values -----------------------------


def log_probs_and_entropy(model: Any, batch: Any, temperature: float) -> tuple[Tensor, Tensor]:
    """log π of the responses' tokens and π's entropy at each, [B, L], where π acts with this temperature."""
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
    columns = TokenLogProbs.apply(outputs.flatten(0, 1), weight, following.reshape(-1, 1), temperature)
    # After the last token, nothing follows.
    log_probs, entropy = (column.view(following.shape)[:, :-1] for column in columns)
    return log_probs, entropy


class TokenLogProbs(torch.autograd.Function):
    """log π [M, 1] of tokens [M, 1], from hidden states [M, W] and the last layer's weights [V, W].

    And the entropy [M, 1] of π. With a large vocabulary, logits take most of the memory. So they are computed
    for 256 tokens at a time, and again in the backward pass. Without weights, `hidden` is the logits [M, V]
    themselves, and the backward pass writes their gradient over them. With respect to (logit of v) /
    temperature, log π of the token has the gradient 1(v = token) - π(v), the entropy H -π(v) (log π(v) + H).
    """

    @staticmethod
    def forward(ctx, hidden, weight, tokens, temperature):
        log_probs = torch.empty_like(tokens, dtype=hidden.dtype)
        log_z, entropy = torch.empty_like(log_probs), torch.empty_like(log_probs)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(tokens), 256):
                rows = slice(start, start + 256)
                logits = (hidden[rows] if weight is None else hidden[rows] @ weight.T) / temperature
                log_z[rows] = logits.logsumexp(1, keepdim=True)
                log_probs[rows] = logits.gather(1, tokens[rows]) - log_z[rows]
                policy = logits.sub_(log_z[rows]).exp_()
                entropy[rows] = torch.special.entr(policy).sum(1, keepdim=True)
        ctx.save_for_backward(hidden, weight, tokens, log_z, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, entropy_gradient: Tensor | None) -> tuple:
        hidden, weight, tokens, log_z, entropy = ctx.saved_tensors
        hidden_gradient = hidden if weight is None else torch.empty_like(hidden)
        weight_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        gradient = torch.zeros_like(log_z) if gradient is None else gradient / ctx.temperature
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(tokens), 256):
                rows = slice(start, start + 256)
                logits = hidden[rows] if weight is None else hidden[rows] @ weight.T
                policy = logits.div_(ctx.temperature).sub_(log_z[rows]).exp_()  # in place, as what follows
                if entropy_gradient is not None:
                    entropy_part = torch.xlogy(policy, policy) + policy * entropy[rows]
                    entropy_part *= entropy_gradient[rows] / ctx.temperature
                logits_gradient = policy.mul_(-gradient[rows]).scatter_add_(1, tokens[rows], gradient[rows])
                if entropy_gradient is not None:
                    logits_gradient -= entropy_part
                if weight is not None:
                    hidden_gradient[rows] = logits_gradient @ weight
                if weight_gradient is not None:
                    weight_gradient.addmm_(logits_gradient.T, hidden[rows])
        return hidden_gradient, weight_gradient, None, None


def token_log_probs(model: nn.Module, batch: Responses | Batch, temperature: float) -> Tensor:
    """log π [B, L] of the responses' tokens, where π is the policy that acts, with its temperature."""
    return log_probs_and_entropy(model, batch, temperature)[0]


class ScalarModel(nn.Module):
    """A trunk with one output: a critic or a reward model."""

    def __init__(self, trunk: nn.Module, head: nn.Module):
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, batch: Responses | Batch) -> Tensor:
        """Outputs [B, L + 1]: before each token of the response, and after the last."""
        tokens = torch.cat([batch.prompts, batch.responses], 1)
        attention = torch.cat([batch.prompt_mask, batch.mask], 1)
        output = self.trunk(**model_inputs(tokens, attention))
        hidden = output.last_hidden_state[:, -batch.mask.shape[1] - 1 :]
        return without_autocast(self.head, hidden).squeeze(-1)


def last_output(model: nn.Module, batch: Responses) -> Tensor:
    """A reward model's outputs [B, 1] after the last token of each response."""
    return model(batch).gather(1, batch.mask.sum(1, keepdim=True))


@torch.no_grad()
def in_micro_batches(function: Callable[[Responses], Tensor], batch: Responses, args: Args) -> Tensor:
    """The outputs of a function of parts of a batch, [B, L] with zeros beyond what it returns for a part."""
    outputs = torch.zeros(batch.mask.shape, device=args.device)
    for rows, part in micro_batches(batch, torch.arange(len(outputs)), read_lengths(batch), args):
        with autocast(args):
            part_outputs = function(part)
        outputs[rows, : part_outputs.shape[1]] = part_outputs
    return outputs


def all_log_probs(model: nn.Module, batch: Responses, args: Args) -> Tensor:
    """log π [B, L] of the responses' tokens, without gradients."""
    return in_micro_batches(lambda part: token_log_probs(model, part, args.temperature), batch, args)


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


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x [B, L] with mean 0 and standard deviation 1 over the mask, and 0 outside it."""
    centered = x - masked_mean(x, mask)
    return centered * torch.rsqrt(masked_mean(centered.square(), mask) + 1e-8) * mask


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards [B, L] from scores [B] and kl = log π - log π_ref [B, L] ([RLHF], eq. 2, without pretraining).

        r_t = -β kl_t, plus the score at the last token

    PPO then maximises J = E[score] - β KL(π ‖ π_ref), as the expectation of Σ_t kl_t is the KL divergence.
    This holds for this estimator only, k1 of [KL]: k3 in the reward has another gradient. In the loss, any
    estimator per token ignores the token's effect on the KL of later ones.
    """
    penalties = -kl_coef * kl * mask
    return penalties.scatter_add(1, mask.sum(1, keepdim=True) - 1, scores.unsqueeze(1))


def compute_gae(
    rewards_per_token: Tensor, values: Tensor, mask: Tensor, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, L] by generalised advantage estimation ([GAE], equations 11 to 16; γ = 1).

        δ_t = r_t + V_{t+1} - V_t
        A_t = δ_t + λ A_{t+1}
        return_t = A_t + V_t, the critic's target

    V_t is the value before token t. After the last token, where the episode ends, V and A are 0.
    """
    values = values * mask
    deltas = rewards_per_token + F.pad(values[:, 1:], (0, 1)) - values
    advantages, advantage = torch.zeros_like(deltas), torch.zeros_like(deltas[:, 0])
    for t in reversed(range(deltas.shape[1])):
        advantage = deltas[:, t] + gae_lambda * advantage
        advantages[:, t] = advantage
    return advantages, advantages + values


class Batch(NamedTuple):
    """B responses to learn from."""

    prompts: Tensor  # [B, P]
    prompt_mask: Tensor  # [B, P]
    responses: Tensor  # [B, L]
    mask: Tensor  # [B, L]
    log_probs: Tensor  # [B, L], log π_old
    values: Tensor  # [B, L], V_old
    advantages: Tensor  # [B, L]
    returns: Tensor  # [B, L]


def ppo_loss(models: Models, batch: Batch, num_tokens: Tensor, args: Args) -> tuple[Tensor, dict]:
    """The loss to minimise ([PPO], equation 9, negated), and metrics.

        loss_t = -min(ρ_t A_t, clip(ρ_t, 1 - ε, 1 + ε) A_t) + ½ (V_t - return_t)² - c₂ H_t

    Loss and metrics are divided by the whole minibatch's number of tokens, so that those of its parts add up
    to means. The value loss needs no weight c₁: actor and critic have weights and rates of their own.
    """
    log_probs, entropy = log_probs_and_entropy(models.actor, batch, args.temperature)
    log_ratio = (log_probs - batch.log_probs) * batch.mask
    ratio = log_ratio.exp()  # ρ = π(a|s) / π_old(a|s), which is r(θ) in [PPO]
    # L^CLIP = E[min(ρ A, clip(ρ, 1 - ε, 1 + ε) A)] ([PPO], equation 7)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * batch.advantages, clipped_ratio * batch.advantages)

    values = models.critic(batch)[:, :-1]
    value_loss = 0.5 * (values - batch.returns).square()
    if args.clip_vloss:  # the larger of this, and that of the value clipped to V_old ± ε
        clipped_values = batch.values + (values - batch.values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, 0.5 * (clipped_values - batch.returns).square())

    losses = policy_loss + value_loss
    if args.ent_coef:
        losses = losses - args.ent_coef * entropy
    metrics = {
        "loss/policy_avg": policy_loss,
        "loss/value_avg": value_loss,
        "policy/entropy_avg": entropy,
        "policy/approxkl_avg": 0.5 * log_ratio.square(),
        "policy/clipfrac_avg": ratio * batch.advantages > clipped_ratio * batch.advantages,  # no gradient
    }
    means = {name: (x.detach() * batch.mask).sum() / num_tokens for name, x in metrics.items()}
    return (losses * batch.mask).sum() / num_tokens, means


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


def score(models: Models, task: Task, rows: list[dict], batch: Responses, args: Args) -> tuple[Tensor, dict]:
    """The scores [B] of B responses, and by name the rewards that they sum.

    These are the reward model's, those of the functions, and the penalty for a missing stop token.
    """
    rewards = {"missing_eos": torch.where(ended(batch, task), 0.0, -args.missing_eos_penalty)}
    if models.reward_model is not None:
        outputs = in_micro_batches(partial(last_output, models.reward_model), batch, args)
        rewards["reward_model"] = outputs[:, 0]
    functions = call_functions(task, rows, batch, may_be_none=models.reward_model is not None)
    rewards |= {name: values.to(args.device, torch.float32) for name, values in functions.items()}
    return torch.stack(list(rewards.values())).nansum(0), rewards


@torch.no_grad()
def collect(models: Models, task: Task, args: Args, episodes: int = 0) -> tuple[Batch, dict, dict]:
    """Responses to the next B prompts with estimated advantages; also metrics, and what is to be written.

    An example with B = 2, β = 0.1, λ = 1, and scores of 1 for the first response and 0 for the second. The
    second prompt has two tokens, and padding before them; the first response ends with a stop token after
    two tokens, and has padding after them:

        prompts     [[5, 6, 7], [-, 8, 9]]          prompt_mask   [[1, 1, 1], [0, 1, 1]]
        responses   [[3, stop, -], [4, 4, stop]]    mask          [[1, 1, 0], [1, 1, 1]]
        kl          [[0.5, 0, -], [0, -1, 0]]       log π - log π_ref of each token
        per token   [[-0.05, 1, -], [0, 0.1, 0]]    rewards: -β kl, and the score at the last token
        values      [[0.2, 0.4, -], [0.3, 0, 0]]    of the critic, before each token
        advantages  [[0.75, 0.6, -], [-0.2, 0.1, 0]]    sum of the rewards from here, less the value
        returns     [[0.95, 1, -], [0.1, 0.1, 0]]   what the critic is to predict

    Then the advantages are whitened: they get mean 0 and deviation 1 over the five tokens.
    """
    count = args.batch_size // PROCESSES
    rows = next_prompts(task.prompts, episodes + RANK * count, count, args.seed)
    responses, sampled_log_probs = generate(models.actor, task, rows, args)
    # log π is computed anew, in the same way as in the update: at first, the ratio is 1.
    log_probs = all_log_probs(models.actor, responses, args)
    ref_log_probs = all_log_probs(models.reference, responses, args)
    values = in_micro_batches(lambda part: models.critic(part)[:, :-1], responses, args)
    scores, rewards = score(models, task, rows, responses, args)
    mask = responses.mask
    kl = (log_probs - ref_log_probs) * mask
    rewards_per_token = token_rewards(scores, kl, mask, args.kl_coef)
    advantages, returns = compute_gae(rewards_per_token, values, mask, args.gae_lambda)
    batch = Batch(*responses, log_probs, values, whiten(advantages, mask), returns)

    means = {f"rewards/{name}": numbers for name, numbers in rewards.items()} | {
        "reward": scores,
        "objective/kl": kl.sum(1),  # in nats per response
        "objective/rlhf_reward": scores - args.kl_coef * kl.sum(1),
        "completions/mean_length": mask.sum(1),
        "completions/clipped_ratio": ~ended(responses, task),
    }
    # Advantages are what the critic does not explain of the returns: returns - values.
    error, spread = (masked_mean((x - masked_mean(x, mask)).square(), mask) for x in (advantages, returns))
    metrics = means_over_processes(means, args) | {
        "entropy": -masked_mean(log_probs, mask).item(),  # an estimate, in nats per token
        "val/explained_variance": 1 - (error / (spread + 1e-8)).item(),
    }
    samples = {"response": decode(task, rows, responses), "row": rows, "reward": scores.tolist()}
    for name, numbers in rewards.items():
        samples[name] = [None if math.isnan(number) else number for number in numbers.tolist()]
    return batch, metrics | check_sampling(sampled_log_probs - log_probs, mask), samples


def update(models: Models, optimizer: Adam, batch: Batch, args: Args) -> dict[str, float]:
    """Learn from a batch: K epochs of gradient steps on shuffled minibatches. Returns the mean metrics.

    A minibatch's gradient is the sum of those of its micro-batches, over all processes.
    """
    sums: dict[str, Tensor] = {}  # of metrics, still as tensors: reading them would wait for the GPU
    lengths = read_lengths(batch)
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.mask))
        for rows in order.split(len(order) // args.num_minibatches):
            num_tokens = torch.tensor(sum(lengths[1][row] for row in rows.tolist()), device=args.device)
            sum_over_processes(num_tokens)
            for _, part in micro_batches(batch, rows, lengths, args):
                with autocast(args):
                    loss, metrics = ppo_loss(models, part, num_tokens, args)
                loss.backward()
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0) + value
            for name, group in zip(("grad_norm", "critic_grad_norm"), optimizer.param_groups, strict=True):
                sum_gradients(group["params"])
                norm = clip_grad_norm_(group["params"], args.max_grad_norm, error_if_nonfinite=True)
                sums[name] = sums.get(name, 0) + norm / PROCESSES
            optimizer.step()
            optimizer.zero_grad()  # now, so that no gradients take memory while responses are generated
    steps = args.update_epochs * args.num_minibatches
    return {name: sum_over_processes(total).item() / steps for name, total in sums.items()}


def adapted_kl_coef(kl: float, args: Args) -> float:
    """β after an iteration with this KL divergence: larger if it is above --kl-target ([Ziegler], §2.2)."""
    if args.kl_target is None:
        return args.kl_coef
    error = min(max(kl / args.kl_target - 1, -0.2), 0.2)
    return args.kl_coef * (1 + 0.1 * error)


def train(args: Args, task: Task | None = None) -> Path:
    """PPO ([PPO], Algorithm 1) from human feedback. Returns the checkpoint's path.

    Raises `Refused` for what would train wrongly. After an error in training, what is learnt is saved.
    """
    args = replace(args)  # a copy, in which β may change
    check(args, task)
    use_device(args)
    seed_everything(args.seed)
    models, task = load_pretrained(args, task or load_task(args)) if args.model else make_reviews(args)
    models.eval()  # no dropout: with it, the first ratio would not be 1
    networks = models.actor, models.critic
    groups = [[p for p in network.parameters() if p.requires_grad] for network in networks]
    optimizer = Adam([{"params": group} for group in groups], fused=True)
    connect(models, args)  # after Adam is made: what it imports would keep the connection open at exit
    episodes = restore(args.resume, models, optimizer) if args.resume else 0
    run = Run(args, models, optimizer, task, episodes)
    try:
        while episodes < args.total_episodes and not stopped(args):
            numbers = args.seed, episodes, RANK  # so that a resumed run draws the same random numbers
            seed_everything(*numbers)
            metrics = {}
            if episodes // args.batch_size % args.eval_every == 0:
                metrics = evaluate(models, task, args)
                run.keep_best(episodes, metrics)
                run.save(episodes)
                seed_everything(*numbers)  # training is the same whatever is evaluated
            elif time.monotonic() - run.last_save > 600:
                run.save(episodes)
            batch, batch_metrics, samples = collect(models, task, args, episodes)
            remaining = 1 - episodes / args.total_episodes
            rates = {"lr": args.learning_rate * remaining, "critic_lr": args.critic_learning_rate * remaining}
            for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
                group["lr"] = rate
            metrics |= batch_metrics | rates | {"kl_coef": args.kl_coef}
            metrics |= update(models, optimizer, batch, args)
            args.kl_coef = adapted_kl_coef(metrics["objective/kl"], args)
            episodes += args.batch_size
            update_reward_model(models, task, args, episodes // args.batch_size)
            run.log(episodes - args.batch_size, metrics, samples)
        run.save(episodes)
        if episodes >= args.total_episodes:
            metrics = evaluate(models, task, args)
            run.keep_best(episodes, metrics)
            run.log(episodes, metrics, {})
    except BaseException as error:
        run.save(episodes)  # the gradient steps that were taken
        if RANK == 0:
            error.add_note(f"saved; to continue: --resume {run.path}")
        raise
    run.finish()
    return run.path


# ========================== End of PPO. What follows is what training needs around it ======================


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


def evaluate(models: Models, task: Task, args: Args) -> dict[str, float]:
    """Mean rewards of a response to each prompt of the evaluation; for reviews, also the human's taste."""
    if not task.eval_prompts:
        return {}
    rows = task.eval_prompts[RANK::PROCESSES]
    responses, _ = generate(models.actor, task, rows, replace(args, temperature=args.eval_temperature))
    _, rewards = score(models, task, rows, responses, args)
    if not args.model:
        rewards["gold"] = tastes(rows, decode(task, rows, responses))
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


PRODUCTS = {
    "hotel": ("room", "staff", "food"), "camera": ("lens", "screen", "battery"),
    "film": ("plot", "cast", "music"), "phone": ("screen", "sound", "battery"),
}  # fmt: skip
TONES, GOOD, BAD = ("praise", "pan", "weigh"), ("great", "lovely"), ("poor", "awful")
WORDS = ["<pad>", "<stop>", ":", "the", "very", "and", "but", "please"]
WORDS += [*TONES, *PRODUCTS, *sorted({word for words in PRODUCTS.values() for word in words}), *GOOD, *BAD]


class WordTokenizer:
    """A token for each of WORDS, with the interface of transformers' tokenizers."""

    bos_token_id, eos_token_id = None, 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [WORDS.index(word) for word in text.split()]

    def decode(self, tokens: list[int], **options: Any) -> str:
        return " ".join(WORDS[token] for token in tokens)


def make_reviews(args: Args) -> tuple[Models, Task]:
    """Supervised learning, then a reward model ([RLHF], §3.1). On --resume, a checkpoint has the weights."""
    torch.set_num_threads(1)  # for small networks, one is fastest
    rows = []
    for product in PRODUCTS:
        for tone in TONES:
            for request in (f"{tone} the {product} :", f"please {tone} the {product} :"):
                rows.append({"prompt": request, "tone": tone, "product": product})
    actor, tokenizer = GPT(len(WORDS)).to(args.device), WordTokenizer()
    task = Task(tokenizer, [tokenizer.eos_token_id], rows, 10 * rows, {})
    if not args.resume:
        learn_to_write(actor, task, write_review, 3e-3, args)
    head = nn.Linear(actor.norm.normalized_shape[0], 1).to(args.device)
    reward_model = ScalarModel(copy.deepcopy(actor), head)
    reference = copy.deepcopy(actor).requires_grad_(False)
    critic = reward_model  # until that has learnt
    models = Models(actor, critic, reference, reward_model.requires_grad_(False))
    if not args.resume:
        compare_responses(models, task, 6000, args)
        learn_from_comparisons(models, task, args)
    models.critic = copy.deepcopy(reward_model).requires_grad_(True)
    return models, task


def write_review(rng: random.Random, row: dict) -> str:
    """A review such as "very lovely room but awful staff". Half have the tone asked for, the others any."""
    tone = rng.choice((row["tone"], row["tone"], row["tone"], *TONES))
    first, second = rng.sample(PRODUCTS[row["product"]], 2)

    def clause(aspect: str, good: bool) -> str:
        return f"{'very ' * (rng.random() < 0.25)}{rng.choice(GOOD if good else BAD)} {aspect}"

    if tone == "weigh":
        good = rng.random() < 0.5
        return f"{clause(first, good)} but {clause(second, not good)}"
    good = tone == "praise"
    return f"{clause(first, good)} and {clause(second, good)}" if rng.random() < 0.7 else clause(first, good)


def human(row: dict, response: str) -> float:
    """The simulated human's taste: ±1 for the tone, 0.5 for each "very"; -2 for what is not a review."""
    clause = f"(?:very )?({'|'.join(GOOD + BAD)}) ({'|'.join(PRODUCTS[row['product']])})"
    match = re.fullmatch(f"{clause}(?: (?:and|but) {clause})?", response.strip())
    if not match or match[2] == match[4]:
        return -2.0
    kinds = {word in GOOD for word in (match[1], match[3]) if word}
    found = "weigh" if len(kinds) == 2 else "praise" if True in kinds else "pan"
    return (1.0 if found == row["tone"] else -1.0) + 0.5 * response.split().count("very")


def tastes(rows: list[dict], texts: list[str]) -> Tensor:
    """The simulated human's taste [B]."""
    return torch.tensor([human(row, text) for row, text in zip(rows, texts, strict=True)])


def learn_to_write(actor: GPT, task: Task, write: Callable, learning_rate: float, args: Args) -> None:
    """Supervised learning of responses that `write` gives to random prompts."""
    rng = random.Random(args.seed)

    def compute_loss() -> Tensor:
        rows = rng.choices(task.prompts, k=128)
        batch = tokenize(task, rows, [write(rng, row) for row in rows], args)
        log_probs = token_log_probs(actor, batch, temperature=1.0)
        return -(log_probs * batch.mask).sum() / batch.mask.sum()

    fit(actor, compute_loss, 600, learning_rate, "supervised learning")


def compare_responses(models: Models, task: Task, count: int, args: Args) -> None:
    """Let the human compare pairs of the actor's responses, for the reward model to learn from.

    The human prefers a to b with probability σ(2 (taste(a) - taste(b))), which is the Bradley-Terry model.
    """
    rows = [task.prompts[i] for i in torch.randint(len(task.prompts), (count,))]
    responses, _ = generate(models.actor, task, rows + rows, args)
    texts = decode(task, rows + rows, responses)
    taste = tastes(rows + rows, texts)
    prefers_first = torch.rand(count) < torch.sigmoid(2 * (taste[:count] - taste[count:]))
    for i, row in enumerate(rows):
        pair = texts[i], texts[count + i]
        chosen, rejected = pair if prefers_first[i] else pair[::-1]
        models.comparisons.append((row, chosen, rejected))


def learn_from_comparisons(models: Models, task: Task, args: Args) -> None:
    """Let the reward model maximise log σ(output(chosen) - output(rejected)) ([RLHF], equation 1)."""
    count = len(models.comparisons)

    def compute_loss() -> Tensor:
        pairs = [models.comparisons[i] for i in torch.randint(count, (64,)).tolist()]
        rows, chosen, rejected = (list(column) for column in zip(*pairs, strict=True))
        outputs = last_output(models.reward_model, tokenize(task, rows + rows, chosen + rejected, args))
        return -F.logsigmoid(outputs[:64] - outputs[64:]).mean()

    fit(models.reward_model, compute_loss, 3 * count // 64, 1e-3, "reward model")
    models.reward_model.requires_grad_(False)


def update_reward_model(models: Models, task: Task, args: Args, iteration: int) -> None:
    """Iterated RLHF ([RLHF], §3.1): the reward model learns from comparisons of the actor's responses, too.

    Choices say nothing of the level of scores: the mean of the first responses stays what it was.
    """
    if not args.reward_model_updates or iteration % args.reward_model_updates:
        return
    torch.manual_seed(10**9 * args.seed + iteration)  # all processes draw the same pairs
    rows, chosen, _ = (list(column) for column in zip(*models.comparisons[:1000], strict=True))
    first_responses = tokenize(task, rows, chosen, args)
    before = last_output(models.reward_model, first_responses).mean()
    compare_responses(models, task, 1500, args)
    learn_from_comparisons(models, task, args)
    with torch.no_grad():
        models.reward_model.head.bias += before - last_output(models.reward_model, first_responses).mean()


def fit(network: nn.Module, compute_loss: Callable, steps: int, learning_rate: float, name: str) -> None:
    """Minimise a loss of random batches by Adam."""
    optimizer = Adam(network.requires_grad_(True).parameters(), learning_rate, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min((step + 1) / 40, 1 - step / steps)
        loss = compute_loss()
        loss.backward()
        clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"{name}: loss {loss.item():.2f}", flush=True)


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
    """Raise `Refused` for prompts or a reward model that cannot be learnt from. Tries functions, too."""
    from transformers import AutoConfig, AutoTokenizer

    configs = [AutoConfig.from_pretrained(args.model)]
    if args.reward_model:
        configs.append(AutoConfig.from_pretrained(args.reward_model))
        kinds, labels = ", ".join(configs[1].architectures or ["an unknown kind"]), configs[1].num_labels
        if "SequenceClassification" not in kinds or labels != 1:
            wanted = "a model for sequence classification with 1 label"
            raise Refused(f"--reward-model must be {wanted}, not {kinds} with {labels} labels")
        its_tokens = AutoTokenizer.from_pretrained(args.reward_model).get_vocab()
        if not task.tokenizer.get_vocab().items() <= its_tokens.items():
            raise Refused("--reward-model has other tokens than --model; wrap it as --reward-function")
    contexts, names = [], ("max_position_embeddings", "max_target_positions", "max_seq_len")
    for config in (config.get_text_config() for config in configs):
        contexts += [getattr(config, name, None) or sys.maxsize for name in names]
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
            limits = f"the models can take 1 to {longest}, with --max-response-length"
            raise Refused(f"{row!r:.200} has {len(tokens)} tokens; {limits}")
    columns = {"episodes", "response", "row", "reward", "reward_model", "missing_eos"}  # completions.jsonl
    if columns & task.reward_functions.keys() or not (task.reward_functions or args.reward_model):
        raise Refused(f"reward functions are needed, which have other names than {columns}")
    nothing = torch.zeros(2, 0, dtype=torch.long)  # two empty responses to the first prompt
    empty = Responses(nothing, nothing > 0, nothing, nothing > 0)
    call_functions(task, task.prompts[:1] * 2, empty, may_be_none=args.reward_model is not None)


def load_pretrained(args: Args, task: Task) -> tuple[Models, Task]:
    """The models that the flags name, and the task with their stop tokens. All are tried."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
    from transformers.utils import logging

    check_task(task, args)
    # transformers 5.24 says that 5.40 renames this argument; the extra `rlhf` is for versions below.
    warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
    reference = load_network(AutoModelForCausalLM, str(args.model), task.tokenizer)
    reward_model, trunk = None, reference.base_model
    if trunk is reference:  # Llama 4's has another name
        trunk = reference.model
    if args.reward_model:
        judge = load_network(AutoModelForSequenceClassification, args.reward_model, task.tokenizer)
        trunk, head = judge.base_model, judge.score.float()
        reward_model = ScalarModel(trunk, head)
    else:
        size = trunk(input_ids=torch.tensor([[1, 2]])).last_hidden_state.shape[-1]
        head = nn.Linear(size, 1, bias=False)
    logging.disable_progress_bar()  # they are for loading, not for each time that the model is saved
    actor = make_trainable(reference, args, "CAUSAL_LM")
    critic = ScalarModel(make_trainable(trunk, args), copy.deepcopy(head).requires_grad_(True))
    if args.bfloat16:
        use_bfloat16(actor, reference)
        use_bfloat16(critic.trunk, trunk)
    ends = reference.generation_config.eos_token_id  # chat models have one for the end of a turn, too
    ends = [task.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]
    stop_tokens = {*task.stop_tokens, *ends} - {None}
    models = Models(actor, critic, reference, reward_model).to(args.device)
    # Logits in parts are computed twice. It saves memory and costs time: not on a CPU.
    in_parts = args.device != "cpu" and has_linear_head(models.actor, args)
    for network in filter(None, (models.actor, models.reference)):
        network.logits_in_parts = in_parts
    check_actor(models.actor, task, args)
    check_critic(models.critic, judge if args.reward_model else None, task, args)
    if not args.reward_model:
        nn.init.zeros_(models.critic.head.weight)  # its values are 0 at first, or those of the reward model
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


@torch.no_grad()
def check_critic(critic: ScalarModel, judge: Any, task: Task, args: Args) -> None:
    """Raise `Refused` unless a short and a long prompt, padded, have the values of a plain pass of each.

    With a reward model, from which the critic begins, these are the scores that it gives itself.
    """
    rows = sorted((encode(task.tokenizer, row) for row in task.prompts[:100]), key=len)
    prompts, prompt_mask = pad([rows[0], rows[-1]], "left", args.device)
    prompts, prompt_mask = F.pad(prompts, (1, 0)), F.pad(prompt_mask, (1, 0))  # both are padded
    nothing = prompts[:, :0]
    with autocast(args):
        values = critic(Responses(prompts, prompt_mask, nothing, nothing > 0))
        for i in range(2):
            tokens = prompts[i][prompt_mask[i]].unsqueeze(0)
            if judge is None:
                alone = without_autocast(critic.head, critic.trunk(input_ids=tokens).last_hidden_state[:, -1])
            else:
                # With a padding token, it would not be read after a row that ends with it.
                judge.config.get_text_config().pad_token_id = None
                alone = judge(input_ids=tokens).logits
            error = (values[i] - alone[0]).abs().max().item()
            if not error < (0.5 if args.bfloat16 else 1e-3):
                raise Refused(f"critic or --reward-model: padding, or its `score`, is off by {error:.2g}")


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
        content["comparisons"] = self.models.comparisons
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
    models.comparisons = content.get("comparisons", [])  # checkpoints of earlier versions have none
    return content["episodes"]


def check(args: Args, task: Task | None = None) -> None:
    """Raise `Refused` for settings that would train wrongly, or have no effect."""
    for name, (low, high) in BOUNDS.items():
        value = getattr(args, name)
        if value is not None and not low <= value <= high:  # NaN is refused, too
            raise Refused(f"--{name.replace('_', '-')} must be from {low} to {high}, not {value}")
    judged = args.reward_model or args.reward_function
    others = args.eval_prompts or args.lora_rank or args.bfloat16 or args.gradient_checkpointing
    for wrong, reason in [
        (args.batch_size % (args.num_minibatches * PROCESSES),
         "--batch-size must be a multiple of --num-minibatches x processes"),
        (task is None and len({bool(args.model), bool(args.prompts), bool(judged)}) > 1,
         "--model needs --prompts and a --reward-model or --reward-function; and the other way around"),
        (not args.model and (others or args.max_response_length > 24),
         "--eval-prompts, --lora-rank, --bfloat16, --gradient-checkpointing, over 24 tokens need --model"),
        (task and not args.model, "a task of your own needs --model"),
        (len({*args.reward_function}) < len(args.reward_function), "--reward-function names one twice"),
        (any(Path(name, "adapter_config.json").exists() for name in (args.model, args.reward_model) if name),
         "an adapter is no model: merge it first, as docs/language_models.md shows"),
        (args.kl_target and not args.kl_coef, "--kl-target needs a --kl-coef above 0, which it multiplies"),
        (args.model and args.reward_model_updates, "--reward-model-updates is for the built-in reviews"),
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
