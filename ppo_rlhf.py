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
and returns B numbers:

    def reward(rows, responses):
        return [float(response.split()[-1:] == [row["answer"]]) for row, response in zip(rows, responses)]

  [PPO]     Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347
  [GAE]     Schulman et al. 2016, "High-Dimensional Continuous Control Using Generalized Advantage
            Estimation", arXiv:1506.02438
  [RLHF]    Ouyang et al. 2022, "Training Language Models to Follow Instructions with Human Feedback",
            arXiv:2203.02155
  [KL]      Schulman 2020, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html

Shapes: B responses in a batch; P tokens of the longest prompt, L of the longest response, S = P + L; V tokens
in the vocabulary. Prompts are padded on the left, responses on the right. Masks come from lengths, so any
token can serve as padding.
"""

from __future__ import annotations

import copy
import json
import math
import os
import pkgutil
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

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
    reward_model: str | None = None  # folder or name of a model that scores a sequence of the same tokens
    reward_function: tuple[str, ...] = ()  # functions of rows and responses, as module:function; summed
    max_response_length: int = 8  # longer responses are cut off, and have no stop token
    missing_eos_penalty: float = 2.0  # subtracted from the score of a response without a stop token
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
    gae_lambda: float = 1.0  # λ: trades bias (0) against variance (1) of the advantages; papers have 0.95
    clip_coef: float = 0.2  # ε: the ratio of new to old probability is clipped to 1 ± ε
    max_grad_norm: float = 1.0  # clip the actor's gradient to this norm, and the critic's

    # Speed and memory
    device: str = "cpu"  # cpu, cuda or mps; small networks are fastest on the CPU
    micro_batch_size: int = 64  # responses per forward pass in learning: their logits are [64, L, V]
    generation_batch_size: int = 256  # responses that are generated at once
    bfloat16: bool = False  # needs --model; log-probabilities and trained weights stay in float32
    gradient_checkpointing: bool = False  # save memory by computing activations twice
    lora_rank: int = 0  # train adapters of this rank on frozen weights (needs peft); 0 trains all weights

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if hasattr(value, "item"):  # of NumPy or PyTorch: a checkpoint holds plain Python numbers
                setattr(self, name, value.item())
            if isinstance(value, Path):
                setattr(self, name, str(value))
        if self.resume and Path(self.resume).is_dir():  # the folder of a run will do
            self.resume = str(Path(self.resume, "checkpoint.pt"))


# Limits of the settings, both included. With more than 30 epochs, or ε above 0.3, the policy moves too far
# from the one that collected the data. To study what is refused, change this table in your program. A number
# of your own in Args is checked once it has an entry here.
BOUNDS = {
    "seed": (0, 2**31), "eval_every": (1, math.inf), "max_response_length": (1, math.inf),
    "temperature": (1e-3, 100), "eval_temperature": (0, 100), "total_episodes": (1, 1e15),
    "batch_size": (1, math.inf), "update_epochs": (1, 30), "num_minibatches": (1, math.inf),
    "learning_rate": (0, 1), "kl_coef": (0, 1e4), "clip_coef": (1e-3, 0.3), "max_grad_norm": (1e-6, math.inf),
    "micro_batch_size": (1, math.inf), "generation_batch_size": (1, math.inf), "lora_rank": (0, 2**16),
    "critic_learning_rate": (0, 1), "gae_lambda": (0, 1), "missing_eos_penalty": (0, math.inf),
}  # fmt: skip

# The defaults with --model
PRETRAINED = Args(
    max_response_length=512, missing_eos_penalty=0.0, eval_temperature=0.0, learning_rate=1e-6,
    critic_learning_rate=1e-5, micro_batch_size=4,
)  # fmt: skip
PROCESSES = int(os.environ.get("WORLD_SIZE", 1))  # how many there are, and the number of this one (torchrun)
RANK = int(os.environ.get("RANK", 0)) if PROCESSES > 1 else 0
# Metrics to print, besides evaluations
SHOWN = "reward", "objective/kl", "policy/approxkl_avg", "completions/clipped_ratio", "val/explained_variance"

# ------------------------------------------------- Networks -------------------------------------------------


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


class Models(nn.Module):
    """The actor and the critic; frozen, the reference (the actor as it was at first) and a reward model."""

    def __init__(self, actor: Any, critic: Any, reference: Any, reward_model: Any):
        super().__init__()
        self.actor, self.critic, self.reference, self.reward_model = actor, critic, reference, reward_model


class Task(NamedTuple):
    """What the actor is to learn."""

    tokenizer: Any
    stop_tokens: list[int]  # each of them ends a response
    prompts: list[dict]  # rows: a "prompt", and what else the reward functions need
    eval_prompts: list[dict]  # held out; of reviews, all prompts again
    reward_functions: dict[str, Callable]  # by name; of B rows and the texts of B responses


class Responses(NamedTuple):
    """B prompts with responses."""

    prompts: Tensor  # [B, P]
    prompt_mask: Tensor  # [B, P], true at tokens that are not padding
    responses: Tensor  # [B, L]
    mask: Tensor  # [B, L], true at the responses' tokens, which include the stop token


def take(batch: Any, rows: Tensor) -> Any:
    """These rows of a batch, without columns that are padding in all of them."""
    part = type(batch)(*(column[rows] for column in batch))
    prompt_length, length = part.prompt_mask.sum(1).max(), part.mask.sum(1).max()
    prompts = [column[:, -prompt_length:] for column in part[:2]]
    others = [column[:, :length] if column.dim() == 2 else column for column in part[2:]]
    return type(batch)(*prompts, *others)


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
    prompts, prompt_mask = pad([encode(task.tokenizer, row["prompt"]) for row in rows], "left", args.device)
    stop_tokens = torch.tensor(task.stop_tokens, device=args.device)
    shape = len(rows), args.max_response_length
    responses, mask = prompts.new_zeros(shape), prompt_mask.new_zeros(shape)
    log_probs = torch.zeros(shape, device=args.device)
    with autocast(args):
        for part in torch.arange(len(rows), device=args.device).split(args.generation_batch_size):
            new, attention, past = prompts[part], prompt_mask[part], None
            active = torch.ones_like(part, dtype=torch.bool)  # no stop token so far
            for t in range(args.max_response_length):
                output = actor(**model_inputs(new, attention, past, use_cache=True), logits_to_keep=1)
                past = output.past_key_values
                log_policy = torch.log_softmax(output.logits[:, -1].float() / max(args.temperature, 1e-6), 1)
                new = torch.multinomial(log_policy.exp(), 1)
                responses[part, t], mask[part, t] = new.squeeze(1), active
                log_probs[part, t] = log_policy.gather(1, new).squeeze(1)
                attention = torch.cat([attention, active.unsqueeze(1)], 1)
                active = active & ~torch.isin(new.squeeze(1), stop_tokens)
                if not active.any():
                    break
    length = mask.sum(1).max()
    return Responses(prompts, prompt_mask, responses[:, :length], mask[:, :length]), log_probs[:, :length]


class TokenLogProbs(torch.autograd.Function):
    """log π [B, S] of tokens [B, S, 1] from their logits [B, S, V], which are divided by the temperature.

    For large vocabularies, logits take most of the memory. They are there once: softmax is computed for 256
    tokens at a time, and in the backward pass their gradient, 1(v = token) - π(v), takes their place.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
        chunks = logits.flatten(0, 1).split(256)
        log_z = torch.cat([(chunk / temperature).logsumexp(1) for chunk in chunks]).view(tokens.shape)
        ctx.save_for_backward(logits, tokens, log_z)
        ctx.temperature = temperature
        return (logits.gather(2, tokens) / temperature - log_z).squeeze(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, log_z = ctx.saved_tensors
        policy = logits.div_(ctx.temperature).sub_(log_z).exp_()
        gradient = gradient.unsqueeze(2) / ctx.temperature
        return policy.mul_(-gradient).scatter_add_(2, tokens, gradient), None, None


def token_log_probs(model: nn.Module, batch: Responses | Batch, temperature: float) -> Tensor:
    """log π [B, L] of the responses' tokens, where π is the policy that acts, with its temperature."""
    tokens = torch.cat([batch.prompts, batch.responses], 1)
    attention = torch.cat([batch.prompt_mask, batch.mask], 1)
    length = batch.mask.shape[1]
    output = model(**model_inputs(tokens, attention), logits_to_keep=length + 1)
    logits = output.logits.float()  # of the last tokens, or of all; not sliced, which would take memory
    following = F.pad(tokens[:, 1:], (0, 1))[:, -logits.shape[1] :].unsqueeze(2)
    return TokenLogProbs.apply(logits, following, temperature)[:, -length - 1 : -1]


@torch.no_grad()
def in_parts(function: Callable[[Responses], Tensor], batch: Responses, args: Args) -> Tensor:
    """The outputs [B, L] or [B, L + 1] of a function, as [B, L + 1]; --micro-batch-size rows at a time."""
    outputs = torch.zeros(len(batch.mask), batch.mask.shape[1] + 1, device=args.device)
    for rows in batch.mask.sum(1).argsort().split(args.micro_batch_size):  # those of similar length together
        with autocast(args):
            part_outputs = function(take(batch, rows))
        outputs[rows, : part_outputs.shape[1]] = part_outputs
    return outputs


def all_log_probs(model: nn.Module, batch: Responses, args: Args) -> Tensor:
    """log π [B, L] of the responses' tokens, without gradients."""
    return in_parts(lambda part: token_log_probs(model, part, args.temperature), batch, args)[:, :-1]


def check_sampling(difference: Tensor, mask: Tensor) -> dict[str, float]:
    """Metrics of the difference [B, L] between log π in sampling and in learning: it must be rounding."""
    average, largest = masked_mean(difference.abs(), mask).item(), (difference.abs() * mask).max().item()
    if average > 0.5:
        raise FloatingPointError(f"log π differs by {average:.2f} from sampling: no past_key_values?")
    name = "sampling/sampling_logp_difference"
    return {f"{name}/mean": average, f"{name}/max": largest}


def ended(batch: Responses, task: Task) -> Tensor:
    """Whether each response [B] has a stop token. The others were cut off."""
    stop_tokens = torch.tensor(task.stop_tokens, device=batch.mask.device)
    return (torch.isin(batch.responses, stop_tokens) & batch.mask).any(1)


def score(models: Models, task: Task, rows: list[dict], batch: Responses, args: Args) -> dict[str, Tensor]:
    """Rewards [B] by the reward model and by each reward function, and for missing stop tokens."""
    rewards = {"missing_eos": torch.where(ended(batch, task), 0.0, -args.missing_eos_penalty)}
    if models.reward_model is not None:
        outputs = in_parts(models.reward_model, batch, args)
        rewards["reward_model"] = outputs.gather(1, batch.mask.sum(1, keepdim=True)).squeeze(1)
    texts = decode(task.tokenizer, batch)
    for name, function in task.reward_functions.items():
        rewards[name] = call_reward(name, function, rows, texts).to(args.device)
    return rewards


# ------------------------------------------------- Equations ------------------------------------------------


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of x where the mask is true, over all processes."""
    total, count = sum_over_processes(torch.stack([(x * mask).sum(), mask.sum()]))
    return total / count


def mean(x: Tensor) -> float:
    """Mean of x over all processes."""
    return masked_mean(x, torch.ones_like(x, dtype=torch.float32)).item()


def whiten(x: Tensor, mask: Tensor) -> Tensor:
    """x [B, L] with mean 0 and standard deviation 1 over the mask, and 0 outside it."""
    centered = x - masked_mean(x, mask)
    return centered * torch.rsqrt(masked_mean(centered.square(), mask) + 1e-8) * mask


def token_rewards(scores: Tensor, kl: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Rewards [B, L] from scores [B] and kl = log π - log π_ref [B, L] ([RLHF], equation 2, without its γ).

        r_t = -β kl_t, plus the score at the last token

    PPO then maximises J = E[score] - β KL(π ‖ π_ref), as the expectation of Σ_t kl_t is the KL divergence.
    This holds for this estimator only, k1 of [KL]: k3 in the reward has another gradient. In the loss, any
    estimator per token ignores the token's effect on the KL of later ones.
    """
    rewards = -kl_coef * kl * mask
    return rewards.scatter_add(1, mask.sum(1, keepdim=True) - 1, scores.unsqueeze(1))


def compute_gae(rewards: Tensor, values: Tensor, mask: Tensor, gae_lambda: float) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B, L] by generalised advantage estimation ([GAE], equations 11 to 16; γ = 1).

        δ_t = r_t + V_{t+1} - V_t
        A_t = δ_t + λ A_{t+1}
        return_t = A_t + V_t, the critic's target

    V_t is the value before token t. After the last token, where the episode ends, V and A are 0.
    """
    values = values * mask
    deltas = rewards + F.pad(values[:, 1:], (0, 1)) - values
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
    advantages: Tensor  # [B, L]
    returns: Tensor  # [B, L]


def ppo_loss(models: Models, batch: Batch, num_tokens: Tensor, args: Args) -> tuple[Tensor, dict]:
    """The loss to minimise ([PPO], equation 9, negated; no entropy bonus), and metrics.

    They are sums divided by the whole minibatch's number of tokens: those of its parts add up to means. The
    losses need no weights, as actor and critic are separate networks with learning rates of their own.
    """
    log_probs = token_log_probs(models.actor, batch, args.temperature)
    log_ratio = (log_probs - batch.log_probs) * batch.mask
    ratio = log_ratio.exp()  # r(θ) = π(a|s) / π_old(a|s)
    # L^CLIP = E[min(r A, clip(r, 1 - ε, 1 + ε) A)] ([PPO], equation 7)
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(ratio * batch.advantages, clipped_ratio * batch.advantages)

    values = models.critic(batch)[:, :-1]
    value_loss = 0.5 * (values - batch.returns).square()

    metrics = {
        "loss/policy_avg": policy_loss,
        "loss/value_avg": value_loss,
        "policy/approxkl_avg": 0.5 * log_ratio.square(),
        "policy/clipfrac_avg": ratio * batch.advantages > clipped_ratio * batch.advantages,  # no gradient
    }
    means = {name: (x.detach() * batch.mask).sum() / num_tokens for name, x in metrics.items()}
    return ((policy_loss + value_loss) * batch.mask).sum() / num_tokens, means


# ------------------------------------------------- Algorithm ------------------------------------------------


@torch.no_grad()
def collect(models: Models, task: Task, args: Args) -> tuple[Batch, dict, dict]:
    """Responses to B prompts with estimated advantages; also metrics, and what is to be written."""
    rows = [task.prompts[i] for i in torch.randint(len(task.prompts), (args.batch_size // PROCESSES,))]
    responses, sampled_log_probs = generate(models.actor, task, rows, args)
    # log π is computed anew, in the same way as in the update: at first, the ratio is 1.
    log_probs = all_log_probs(models.actor, responses, args)
    ref_log_probs = all_log_probs(models.reference, responses, args)
    values = in_parts(models.critic, responses, args)[:, :-1]
    rewards = score(models, task, rows, responses, args)
    scores = torch.stack(list(rewards.values())).sum(0)
    mask = responses.mask
    kl = (log_probs - ref_log_probs) * mask
    rewards_per_token = token_rewards(scores, kl, mask, args.kl_coef)
    advantages, returns = compute_gae(rewards_per_token, values, mask, args.gae_lambda)
    batch = Batch(*responses, log_probs, whiten(advantages, mask), returns)

    means = {f"rewards/{name}": values for name, values in rewards.items()} | {
        "reward": scores,
        "objective/kl": kl.sum(1),  # in nats per response
        "objective/rlhf_reward": scores - args.kl_coef * kl.sum(1),
        "completions/mean_length": mask.sum(1),
        "completions/clipped_ratio": ~ended(responses, task),
    }
    error, spread = (masked_mean((x - masked_mean(x, mask)).square(), mask) for x in (advantages, returns))
    metrics = {name: mean(values) for name, values in means.items()} | {
        "entropy": -masked_mean(log_probs, mask).item(),  # an estimate, in nats per token
        "val/explained_variance": 1 - (error / (spread + 1e-8)).item(),
    }
    samples = {"response": decode(task.tokenizer, responses), "row": rows, "reward": scores.tolist()}
    samples |= {name: values.tolist() for name, values in rewards.items()}
    return batch, metrics | check_sampling(sampled_log_probs - log_probs, mask), samples


def update(models: Models, optimizer: Adam, batch: Batch, args: Args) -> dict[str, float]:
    """Learn from a batch: K epochs of gradient steps on shuffled minibatches. Returns the mean metrics.

    A minibatch's gradient is the sum of those of its micro-batches, over all processes.
    """
    sums: dict[str, Tensor] = {}  # of metrics, still as tensors: reading them would wait for the GPU
    for _ in range(args.update_epochs):
        order = torch.randperm(len(batch.mask)).to(args.device)
        for rows in order.split(len(order) // args.num_minibatches):
            lengths = batch.mask[rows].sum(1)
            num_tokens = sum_over_processes(lengths.sum())
            optimizer.zero_grad()
            for part_rows in rows[lengths.argsort()].split(args.micro_batch_size):
                with autocast(args):
                    loss, metrics = ppo_loss(models, take(batch, part_rows), num_tokens, args)
                loss.backward()
                for name, value in metrics.items():
                    sums[name] = sums.get(name, 0) + value
            for name, group in zip(("grad_norm", "critic_grad_norm"), optimizer.param_groups, strict=True):
                for gradient in [p.grad for p in group["params"] if p.grad is not None]:
                    sum_over_processes(gradient)
                norm = clip_grad_norm_(group["params"], args.max_grad_norm, error_if_nonfinite=True)
                sums[name] = sums.get(name, 0) + norm / PROCESSES
            optimizer.step()
    steps = args.update_epochs * args.num_minibatches
    return {name: sum_over_processes(total).item() / steps for name, total in sums.items()}


def train(args: Args, task: Task | None = None) -> Path:
    """PPO ([PPO], Algorithm 1) from human feedback. Returns the checkpoint's path."""
    args = replace(args)  # a copy, in which NumPy's numbers are plain ones
    check(args)
    if args.device == "cuda":  # each process has a GPU
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.manual_seed(args.seed)
    models, task = load_pretrained(args, task or load_task(args)) if args.model else make_reviews(args)
    networks = models.actor, models.critic
    groups = [[p for p in network.parameters() if p.requires_grad] for network in networks]
    optimizer = Adam([{"params": group} for group in groups], fused=True)
    connect(models, args)  # after Adam is made: what it imports would keep the connection open at exit
    episodes = restore(args.resume, models, optimizer) if args.resume else 0
    run = Run(args, models, optimizer, task, episodes)
    while episodes < args.total_episodes and not stopped(args):
        torch.manual_seed(10**9 * args.seed + episodes + RANK)  # a resumed run draws the same numbers
        due = episodes // args.batch_size % args.eval_every == 0
        if due or time.monotonic() - run.last_save > 600:
            run.save(episodes)
        metrics = evaluate(models, task, args) if due else {}
        try:
            batch, batch_metrics, samples = collect(models, task, args)
        except BaseException as error:  # of a reward function, or a second Ctrl-C
            run.save(episodes)
            error.add_note(f"saved; to continue: --resume {run.path}")
            raise
        remaining = 1 - episodes / args.total_episodes
        rates = {"lr": args.learning_rate * remaining, "critic_lr": args.critic_learning_rate * remaining}
        for group, rate in zip(optimizer.param_groups, rates.values(), strict=True):
            group["lr"] = rate
        metrics |= batch_metrics | update(models, optimizer, batch, args) | rates
        run.log(episodes, metrics, samples)
        episodes += args.batch_size
    run.save(episodes)
    if episodes >= args.total_episodes:
        run.log(episodes, evaluate(models, task, args), {})
    run.finish()
    return run.path


# ========================== End of PPO. What follows is what training needs around it ======================


STOP = threading.Event()  # set by Ctrl-C and SIGTERM: training ends after the iteration


def stopped(args: Args) -> bool:
    """Whether training is to end: all processes end after the same iteration."""
    return sum_over_processes(torch.tensor(float(STOP.is_set()), device=args.device)).item() > 0


def pad(rows: list[list[int]], side: str, device: str) -> tuple[Tensor, Tensor]:
    """Lists of tokens as tokens [B, S], and a mask [B, S] of what is not padding."""
    tokens = [torch.tensor(row, device=device) for row in rows]
    masks = [torch.ones_like(row, dtype=torch.bool) for row in tokens]
    return rnn.pad_sequence(tokens, True, 0, side), rnn.pad_sequence(masks, True, 0, side)


def encode(tokenizer: Any, prompt: str | list[dict]) -> list[int]:
    """The tokens of a prompt: a text, or a list of chat messages."""
    if not isinstance(prompt, str):
        return tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    tokens = tokenizer.encode(prompt)
    start = tokens[:2] == [tokenizer.bos_token_id] * 2  # the text begins with a start token, too
    end = len(tokens) > 1 and tokens[-1] == tokenizer.eos_token_id  # some tokenizers append one
    return tokens[start : len(tokens) - end]


def decode(tokenizer: Any, batch: Responses) -> list[str]:
    """The texts of B responses, without special tokens."""
    pairs = zip(batch.responses.cpu(), batch.mask.cpu(), strict=True)
    return [tokenizer.decode(tokens[mask].tolist(), skip_special_tokens=True) for tokens, mask in pairs]


def tokenize(task: Task, rows: list[dict], texts: list[str], args: Args) -> Responses:
    """The prompts of these rows, and responses that are given as texts."""
    tokenizer, length = task.tokenizer, args.max_response_length
    prompts = [encode(tokenizer, row["prompt"]) for row in rows]
    responses = [[*tokenizer.encode(text), tokenizer.eos_token_id][:length] for text in texts]
    return Responses(*pad(prompts, "left", args.device), *pad(responses, "right", args.device))


def call_reward(name: str, function: Callable, rows: list[dict], texts: list[str]) -> Tensor:
    """Rewards [B] of B responses by a function. Raises `ValueError` if they are not B finite numbers."""
    results = function(rows, texts)
    rewards = torch.as_tensor([] if results is None else results, dtype=torch.float32, device="cpu")
    if rewards.shape != (len(texts),) or not rewards.isfinite().all():
        raise ValueError(f"{name} must return {len(texts)} finite numbers, not {results}")
    return rewards


def evaluate(models: Models, task: Task, args: Args) -> dict[str, float]:
    """Mean rewards of a response to each prompt of the evaluation; for reviews, also the human's taste."""
    if not task.eval_prompts:
        return {}
    rows = task.eval_prompts[RANK::PROCESSES]
    responses, _ = generate(models.actor, task, rows, replace(args, temperature=args.eval_temperature))
    rewards = score(models, task, rows, responses, args)
    if not args.model:
        rewards["gold"] = tastes(rows, decode(task.tokenizer, responses)).to(args.device)
    return {f"eval/{name}": mean(values) for name, values in rewards.items()}


def autocast(args: Args) -> torch.autocast:
    """A context in which networks compute in bfloat16, if --bfloat16 is set."""
    return torch.autocast(args.device.partition(":")[0], torch.bfloat16, enabled=args.bfloat16)


def connect(models: Models, args: Args) -> None:
    """Connect the processes that torchrun started, and give all of them the weights of the first."""
    models.eval()  # no dropout: with it, the first ratio would not be 1
    if PROCESSES > 1:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
        for tensor in models.state_dict().values():
            dist.broadcast(tensor, 0)


def sum_over_processes(x: Tensor) -> Tensor:
    """The sum over all processes, in place."""
    if PROCESSES > 1:
        dist.all_reduce(x)
    return x


# ------------------------------------------------- The built-in task ---------------------------------------

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

    def encode(self, text: str) -> list[int]:
        return [WORDS.index(word) for word in text.split()]

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(WORDS[i] for i in tokens if not (skip_special_tokens and i == self.eos_token_id))


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
    models = Models(actor, reward_model, reference, reward_model.requires_grad_(False))
    if not args.resume:
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
    match = re.fullmatch(f"{clause}(?: (?:and|but) {clause})?", response)
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


def learn_from_comparisons(models: Models, task: Task, args: Args) -> None:
    """Let the human compare 6,000 pairs of responses, and the reward model learn from the choices.

    The human prefers a to b with probability σ(2 (taste(a) - taste(b))), which is the Bradley-Terry model.
    The reward model maximises log σ(score(chosen) - score(rejected)) ([RLHF], equation 1).
    """
    count = 6000
    rows = [task.prompts[i] for i in torch.randint(len(task.prompts), (count,))]
    responses, _ = generate(models.actor, task, rows + rows, args)
    taste = tastes(rows + rows, decode(task.tokenizer, responses))
    prefers_first = torch.rand(count) < torch.sigmoid(2 * (taste[:count] - taste[count:]))
    first, second = torch.arange(2 * count).split(count)
    chosen, rejected = torch.where(prefers_first, first, second), torch.where(prefers_first, second, first)

    def compute_loss() -> Tensor:
        pairs = torch.randint(count, (64,))
        batch = take(responses, torch.cat([chosen[pairs], rejected[pairs]]))
        scores = models.reward_model(batch).gather(1, batch.mask.sum(1, keepdim=True))
        return -F.logsigmoid(scores[:64] - scores[64:]).mean()

    fit(models.reward_model, compute_loss, 3 * count // 64, 1e-3, "reward model")
    models.reward_model.requires_grad_(False)


def fit(network: nn.Module, compute_loss: Callable, steps: int, learning_rate: float, name: str) -> None:
    """Minimise a loss of random batches by Adam."""
    optimizer = Adam(network.requires_grad_(True).parameters(), learning_rate, fused=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = learning_rate * min((step + 1) / 40, 1 - step / steps)
        optimizer.zero_grad()
        loss = compute_loss()
        loss.backward()
        clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
    print(f"{name}: loss {loss.item():.2f}", flush=True)


# ------------------------------------------------- Models of transformers ----------------------------------


def load_task(args: Args) -> Task:
    """The task that the flags name, without stop tokens. Raises `ValueError` for wrong prompts or rewards."""
    from transformers import AutoConfig, AutoTokenizer

    functions = {name: pkgutil.resolve_name(name) for name in args.reward_function}
    tokenizer, config = AutoTokenizer.from_pretrained(args.model), AutoConfig.from_pretrained(args.model)
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    longest = context - args.max_response_length
    files = args.prompts, args.eval_prompts
    prompts, held_out = (read_rows(file, tokenizer, longest) if file else [] for file in files)
    if 0 < len(held_out) < PROCESSES:
        raise ValueError(f"{args.eval_prompts} has fewer prompts than there are processes")
    for name, function in functions.items():
        call_reward(name, function, prompts[:1] * 2, ["", ""])
    return Task(tokenizer, [], prompts, held_out, functions)


def read_rows(file: str, tokenizer: Any, longest: int) -> list[dict]:
    """The lines of a file of prompts. Raises `ValueError` for one that is wrong or too long."""
    rows = []
    for number, line in enumerate(Path(file).read_text(encoding="utf-8").strip().split("\n"), 1):
        try:
            row = json.loads(line)
            length = len(encode(tokenizer, row["prompt"]))
        except Exception as error:
            raise ValueError(f'{file}, line {number}: {error!r}, not {{"prompt": ...}}') from error
        if not 0 < length <= longest:
            raise ValueError(f"{file}, line {number}: {length} tokens; the model can take 1 to {longest}")
        rows.append(row)
    return rows


def load_pretrained(args: Args, task: Task) -> tuple[Models, Task]:
    """The models that the flags name, and the task with their stop tokens."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    folder = Path(args.model or "").resolve()  # adapters name it, wherever they are loaded
    name = str(folder) if folder.exists() else args.model
    reference = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).requires_grad_(False)
    actor = make_trainable(reference, args, "CAUSAL_LM")
    reward_model, trunk = None, reference.base_model
    head = nn.Linear(reference.config.get_text_config().hidden_size, 1, bias=False)
    nn.init.zeros_(head.weight)  # the critic's values are 0 at first, or those of the reward model
    if args.reward_model:
        if AutoTokenizer.from_pretrained(args.reward_model).get_vocab() != task.tokenizer.get_vocab():
            raise ValueError("--reward-model has other tokens than --model; wrap it as --reward-function")
        model = AutoModelForSequenceClassification.from_pretrained(args.reward_model, dtype=torch.float32)
        trunk, head = model.base_model, model.score.float()
        reward_model = ScalarModel(trunk, head).requires_grad_(False)
    critic = ScalarModel(make_trainable(trunk, args), copy.deepcopy(head).requires_grad_(True))
    if args.bfloat16:
        use_bfloat16(actor, reference)
        use_bfloat16(critic.trunk, trunk)
    ends = reference.generation_config.eos_token_id  # chat models have one for the end of a turn, too
    stop_tokens = {task.tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}
    models = Models(actor, critic, reference, reward_model).to(args.device)
    return models, task._replace(stop_tokens=list(stop_tokens))


def make_trainable(frozen: nn.Module, args: Args, task_type: str | None = None) -> Any:
    """A copy of a network, to be trained in float32. With LoRA, it shares the frozen weights."""
    shared = {id(p): p for p in frozen.parameters()} if args.lora_rank else {}
    network: Any = copy.deepcopy(frozen, shared)
    if args.gradient_checkpointing:  # transformers' own method would need training mode, with dropout
        from transformers.modeling_layers import GradientCheckpointingLayer

        for layer in network.modules():
            if isinstance(layer, GradientCheckpointingLayer):
                layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
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


def without_autocast(forward: Callable, hidden: Tensor) -> Tensor:
    """Call a layer in float32."""
    with torch.autocast(hidden.device.type, enabled=False):
        return forward(hidden.float())


# ------------------------------------------------- Logging, checkpoints, command line ----------------------


class Run:
    """The folder of a run: curves for TensorBoard, responses, a checkpoint. Only the first process writes."""

    def __init__(self, args: Args, models: Models, optimizer: Adam, task: Task, episodes: int):
        self.args, self.models, self.optimizer, self.task = args, models, optimizer, task
        name = f"{Path(args.model or 'built-in').name}__{args.exp_name}__{args.seed}"
        name = re.sub(r"[^\w.-]+", "_", f"{name}__{datetime.now():%Y%m%d-%H%M%S-%f}")
        self.path = Path(args.resume or Path("runs", name, "checkpoint.pt"))
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
        print(f"checkpoint {self.path}, curves: tensorboard --logdir runs", flush=True)
        self.writer = SummaryWriter(str(folder), purge_step=episodes)
        rows = "\n".join(f"|{name}|{value}|" for name, value in asdict(args).items())
        self.writer.add_text("settings", f"|setting|value|\n|-|-|\n{rows}")
        # Copies of this file, and of a program that imports it, so that `plot.py` tells changed ones apart.
        for path in {Path(__file__), Path(sys.argv[0])}:
            if path.suffix == ".py" and path.is_file() and not Path(folder, path.name).exists():
                Path(folder, path.name).write_bytes(path.read_bytes())
        if self.completions.exists():  # the last line may be incomplete, if the process was killed
            lines = self.completions.read_text(encoding="utf-8").split("\n")[:-1]
            kept = [line + "\n" for line in lines if json.loads(line)["episodes"] < episodes]
            self.completions.write_text("".join(kept), encoding="utf-8")

    def save(self, episodes: int) -> None:
        """Write a checkpoint and the model. Until the checkpoint is complete, the previous one stays."""
        self.last_save = time.monotonic()
        if RANK > 0 or (self.args.resume and episodes == self.start):  # the checkpoint is there already
            return
        self.writer.flush()  # first, so that the curves have no gap where training resumes
        named = self.models.named_parameters()
        weights = {name: p.detach() for name, p in named if p.requires_grad or not self.args.model}
        content = {"args": asdict(self.args), "episodes": episodes, "weights": weights}
        torch.save(content | {"optimizer": self.optimizer.state_dict()}, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)
        if self.args.model:
            self.models.actor.save_pretrained(self.path.parent / "model")
            self.task.tokenizer.save_pretrained(self.path.parent / "model")

    def log(self, episodes: int, metrics: dict[str, float], samples: dict) -> None:
        """Log an iteration or an evaluation; print evaluations, and all else every five seconds."""
        if RANK > 0:
            return
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, episodes)
        with self.completions.open("a", encoding="utf-8") as file:
            for values in zip(*samples.values(), strict=True):
                sample = {"episodes": episodes} | dict(zip(samples, values, strict=True))
                file.write(json.dumps(sample, ensure_ascii=False) + "\n")
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
    """The settings and the whole content of a checkpoint. Raises `ValueError` for any other file."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        return Args(**content["args"]), content
    except Exception as error:
        raise ValueError(f"{path} is not a checkpoint of this version of this script") from error


def restore(path: str, models: Models, optimizer: Adam) -> int:
    """Continue the training in which this checkpoint was saved. Returns the number of responses so far."""
    _, content = load_checkpoint(path)
    models.load_state_dict(content["weights"], strict=not content["args"]["model"])
    optimizer.load_state_dict(content["optimizer"])
    return content["episodes"]


def check_bounds(args: Args) -> None:
    """Raise `ValueError` where a setting is not of its type, or not within BOUNDS."""
    types: dict[Any, Any] = {kind: kind for kind in (bool, int, str, str | None)}
    types |= {float: int | float, float | None: int | float | None}  # 1 is a float, too
    for name, kind in get_type_hints(Args).items():
        value, choices = getattr(args, name), get_args(kind)
        if get_origin(kind) is Literal and value not in choices:
            raise ValueError(f"--{name.replace('_', '-')} must be {' or '.join(choices)}, not {value}")
        is_flag = isinstance(value, bool) and kind is not bool  # True is an int, but it is not meant as 1
        if is_flag or not isinstance(value, types.get(kind, object)):
            expected = getattr(kind, "__name__", kind)
            raise ValueError(f"--{name.replace('_', '-')} must be of type {expected}, not {value!r}")
    for name, (low, high) in BOUNDS.items():
        value, default = getattr(args, name), getattr(Args, name)
        unused = value is None and default is None
        if not unused and not low <= value <= high:
            limits = f"from {low} to {high}" if high < math.inf else f"at least {low}"
            raise ValueError(f"--{name.replace('_', '-')} must be {limits}, not {value}")


def check(args: Args) -> None:
    """Raise `ValueError` for settings that cannot be right, before anything is written."""
    check_bounds(args)
    judged = args.reward_model or args.reward_function
    others = args.eval_prompts or args.lora_rank or args.bfloat16 or args.max_response_length > 24
    for wrong, reason in [
        (args.batch_size % (args.num_minibatches * PROCESSES),
         "--batch-size must be a multiple of --num-minibatches x processes"),
        (len({bool(args.model), bool(args.prompts), bool(judged)}) > 1,
         "--model needs --prompts and a --reward-model or --reward-function; and the other way around"),
        (not args.model and others,
         "--eval-prompts, --lora-rank, --bfloat16 and a --max-response-length above 24 need --model"),
        (args.model and Path(args.model, "adapter_config.json").exists(),
         f"{args.model} is an adapter: merge it first, as docs/language_models.md shows"),
        (args.track and not find_spec("wandb"), "--track needs: pip install wandb"),
        (Path("runs").is_file(), "runs is a file, where a folder of that name is needed"),
    ]:  # fmt: skip
        if wrong:
            raise ValueError(reason)
    try:
        torch.empty(1, device=args.device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {args.device} is not there; use cpu") from error


def parse_args() -> Args:
    """The settings of the command line; with --resume, the others are the checkpoint's."""
    if {"True", "False"} & {*sys.argv}:
        raise ValueError("write --track or --no-track, for example, without True or False")
    flags = [word.partition("=")[0] for word in sys.argv]
    if flags.count("--reward-function") > 1:
        raise ValueError("--reward-function takes several functions, one after the other")
    parse = partial(tyro.cli, Args, description=__doc__.partition("\n  [")[0])
    args = parse(default=PRETRAINED if "--model" in flags else Args())
    if args.resume:
        saved, content = load_checkpoint(args.resume)
        args = parse(default=replace(saved, reward_function=(), track=False))
        if saved.reward_function and not args.reward_function:
            raise ValueError(f"{args.resume} needs --reward-function {' '.join(saved.reward_function)} again")
        if content["episodes"] >= args.total_episodes:
            done = f"{content['episodes']:,} responses"
            raise ValueError(f"{args.resume} has been trained on {done}: raise --total-episodes")
    return args


def print_commands(args: Args, path: Path) -> None:
    """Say how to resume a run, to read its responses, and to check it."""
    script = Path(sys.argv[0])
    functions = f" --reward-function {' '.join(args.reward_function)}" if args.reward_function else ""
    finished = load_checkpoint(path)[1]["episodes"] >= args.total_episodes
    episodes = f" --total-episodes {2 * args.total_episodes:.0f}" if finished else ""
    print(f"resume: python {script} --resume {path}{functions}{episodes}")
    print(f"read:   tail -n 3 {path.with_name('completions.jsonl')}")
    if (coach := script.with_name("coach.py")).exists():  # not beside a copy
        print(f"check:  python {coach} check {path.parent}")


def stop(*_: Any) -> None:
    """End training after this iteration, and save; a second Ctrl-C stops at once."""
    os.write(2, b"stopping after this iteration; a second Ctrl-C stops at once, without saving it\n")
    STOP.set()
    signal.signal(signal.SIGINT, signal.default_int_handler)


def main() -> None:
    """The command line. Invalid settings end with exit status 2, and a run that was stopped with 130."""
    sys.path.append(".")  # where the `module:` of --reward-function is looked for, too
    try:
        args = parse_args()
        check(args)
        task = load_task(args) if args.model else None
    except (ValueError, OSError, ImportError, AttributeError) as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        sys.exit(2)
    STOP.clear()
    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    path = train(args, task)
    if RANK == 0:
        print_commands(args, path)
    if STOP.is_set():
        sys.exit(130)


if __name__ == "__main__":
    main()
