"""grpo.py: its loss against TRL's and against exact gradients, its two tasks, its runs."""

import copy
import importlib
import itertools
import json
import math
import random
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import grpo

ROOT = Path(__file__).resolve().parent.parent
STOP, LENGTH, BETA = 1, 3, 0.3
AGGREGATIONS = ["sequence-mean", "token-mean", "constant"]


class Tokenizer:
    """Tokens without a meaning; the padding token is the stop token."""

    pad_token_id = eos_token_id = STOP


def random_gpt(seed, vocabulary=4, context=16):
    """A small GPT far from uniform, in float64."""
    torch.manual_seed(seed)
    gpt = grpo.GPT(vocabulary, width=16, layers=2, heads=2, context=context).double()
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.4)
    return gpt


def to_responses(prompt, responses, padding=0):
    """Responses to one prompt, with so much padding on the left."""
    width = max(map(len, responses))
    tokens = [[STOP] * padding + prompt + row + [STOP] * (width - len(row)) for row in responses]
    mask = [[True] * len(row) + [False] * (width - len(row)) for row in responses]
    attention = [[False] * padding + [True] * len(prompt) + row for row in mask]
    return grpo.Responses(torch.tensor(tokens), torch.tensor(attention), torch.tensor(mask))


def random_batch(seed=0, size=16, width=4, spread=0.3, vocabulary=4):
    """Responses of 1 to `width` tokens; π_old and π_ref differ from random_gpt(1) by some noise."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, width + 1, (size,), generator=generator).tolist()
    lengths[:2] = [1, width]
    rows = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
    responses = to_responses([2, 3], rows, padding=1)
    with torch.no_grad():
        log_probs = grpo.token_log_probs(random_gpt(1, vocabulary), responses, 1.0)
    noise = spread * torch.randn(2, *log_probs.shape, generator=generator, dtype=torch.float64)
    advantages = torch.randn(size, generator=generator, dtype=torch.float64)
    return grpo.Batch(*responses, log_probs + noise[0], log_probs + noise[1], advantages, torch.zeros(size))


def gradient(loss, model):
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def relative_error(estimate, truth):
    return ((estimate - truth).norm() / truth.norm()).item()


# ------------------------------------------------- Advantages ---------------------------------------------


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantages(scale):
    """Reward minus the group's mean, over a sample standard deviation; group by group in NumPy."""
    rewards = np.random.default_rng(0).normal(3, 2, size=24)
    rewards[4:8] = 1.5  # a group without variance
    result = grpo.group_advantages(torch.from_numpy(rewards), 4, scale).numpy()
    for start in range(0, 24, 4):
        group = rewards[start : start + 4]
        divisor = {"none": 1, "group": group.std(ddof=1) + 1e-4, "batch": rewards.std(ddof=1) + 1e-4}[scale]
        np.testing.assert_allclose(result[start : start + 4], (group - group.mean()) / divisor)
    assert not result[4:8].any()
    assert grpo.without_variance(torch.from_numpy(rewards), 4).tolist() == [False, True] + [False] * 4


def test_advantages_are_those_of_a_leave_one_out_baseline():
    """RLOO's advantages, the reward minus the mean of the others' rewards, times (G - 1)/G."""
    rewards = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    leave_one_out = []
    for i, reward in enumerate(rewards.tolist()):
        start = i // 5 * 5
        others = [rewards[j].item() for j in range(start, start + 5) if j != i]
        leave_one_out.append(reward - sum(others) / 4)
    advantages = grpo.group_advantages(rewards, 5, "none")
    torch.testing.assert_close(advantages, 0.8 * torch.tensor(leave_one_out, dtype=torch.float64))


# ------------------------------------------------- Loss ---------------------------------------------------


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
@pytest.mark.parametrize("value", [0.7, 99.9, 1000.3, 5000.7])
def test_equal_rewards_have_no_advantage(scale, value):
    """Not even where the mean of equal numbers is rounded."""
    rewards = torch.tensor([value] * 12 + [0.0, 1.0] * 6)
    advantages = grpo.group_advantages(rewards, 12, scale)
    assert not advantages[:12].any()
    assert advantages[12:].all()


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_loss_weights(aggregation):
    """The weighted sum is the mean that the aggregation names; a response without tokens counts as 0."""
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    losses = torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rows = [
        [x for x, m in zip(*row, strict=True) if m]
        for row in zip(losses.tolist(), mask.tolist(), strict=True)
    ]
    means = {
        "sequence-mean": sum(sum(row) / max(len(row), 1) for row in rows) / 4,
        "token-mean": sum(map(sum, rows)) / 6,
        "constant": sum(map(sum, rows)) / 16,
    }
    result = (grpo.loss_weights(mask, aggregation) * losses).sum().item()
    assert result == pytest.approx(means[aggregation], abs=1e-6)


def test_loss_weights_of_a_minibatch_without_tokens():
    for aggregation in AGGREGATIONS:
        assert not grpo.loss_weights(torch.zeros(3, 4, dtype=torch.bool), aggregation).any()


@pytest.mark.parametrize(
    ("aggregation", "slope"), [("sequence-mean", 1 / 6), ("token-mean", 0), ("constant", 0)]
)
def test_length_bias(aggregation, slope):
    """Wrong answers whose length does not matter: only the mean over sequences makes them longer.

    After each token, the policy stops with probability σ(θ) = ½, and is cut off after 3 tokens. These 8
    responses have their exact proportions, and all are wrong: A = -1. The expected reward does not depend on
    θ, so the gradient must be 0.
    """
    rows = [[1]] * 4 + [[0, 1]] * 2 + [[0, 0, 1], [0, 0, 0]]
    batch = to_responses([2], rows)
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    stops = batch.tokens[:, 1:] == 1
    log_probs = torch.where(stops, nn.functional.logsigmoid(theta), nn.functional.logsigmoid(-theta))
    old = log_probs.detach()
    learnt = grpo.Batch(*batch, old, old, -torch.ones(8, dtype=torch.float64), torch.zeros(8))
    weights = grpo.loss_weights(batch.mask, aggregation)
    loss, _ = grpo.grpo_loss(log_probs, learnt, weights, 0.0, grpo.Args())
    (result,) = torch.autograd.grad(loss, theta)
    assert result.item() == pytest.approx(slope, abs=1e-7)  # if positive, a step makes stopping less likely


def direct_loss(log_probs, batch, args, kl_coef):
    """The loss and the metrics, one token after the other, with the mean over tokens."""
    total, sums, count = 0.0, np.zeros(4), 0
    for i, length in enumerate(batch.mask.sum(1).tolist()):
        advantage = batch.advantages[i].item()
        log_ratios = [(log_probs[i, t] - batch.log_probs[i, t]).item() for t in range(length)]
        for t in range(length):
            token_ratio = math.exp(log_ratios[t])
            ratio = token_ratio
            if args.importance_sampling == "sequence":
                ratio = math.exp(sum(log_ratios) / length)
            low, high = 1 - args.clip_coef, 1 + args.clip_coef_high
            total -= min(ratio * advantage, min(max(ratio, low), high) * advantage)
            if args.kl_in != "reward":
                x = math.exp((batch.ref_log_probs[i, t] - log_probs[i, t]).item())
                weight = token_ratio if args.kl_in == "loss-weighted" else 1
                total += kl_coef * (x - 1 - math.log(x)) * weight
            clips = ratio < low and advantage < 0, ratio > high and advantage > 0
            sums += [*clips, log_ratios[t] ** 2 / 2, ratio]
            count += 1
    return total / count, sums


@pytest.mark.parametrize("kl_in", ["reward", "loss", "loss-weighted"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_loss_and_metrics(kl_in, level):
    args = grpo.Args(kl_in=kl_in, importance_sampling=level, clip_coef=0.1, clip_coef_high=0.25)
    batch = random_batch()
    log_probs = grpo.token_log_probs(random_gpt(1), batch, 1.0)
    weights = grpo.loss_weights(batch.mask, "token-mean")
    loss, metrics = grpo.grpo_loss(log_probs, batch, weights, BETA, args)
    expected, sums = direct_loss(log_probs, batch, args, BETA)
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert metrics.tolist() == pytest.approx([expected, *sums], abs=1e-6)
    assert sums[0] > 0
    assert sums[1] > 0


def test_padding_changes_nothing():
    """Neither what stands in the padding of a response nor a wider prompt changes loss and gradient."""
    batch, actor = random_batch(), random_gpt(1)
    padded = [torch.where(batch.mask, x, 50.0) for x in (batch.log_probs, batch.ref_log_probs)]
    wider = batch._replace(
        tokens=nn.functional.pad(batch.tokens, (3, 0), value=2),
        attention=nn.functional.pad(batch.attention, (3, 0)),
        log_probs=padded[0],
        ref_log_probs=padded[1],
    )
    args = grpo.Args(kl_in="loss", importance_sampling="sequence")
    results = []
    for variant in (batch, wider):
        log_probs = grpo.token_log_probs(actor, variant, 1.0)
        weights = grpo.loss_weights(variant.mask, "sequence-mean")
        loss, metrics = grpo.grpo_loss(log_probs, variant, weights, BETA, args)
        results.append((metrics, gradient(loss, actor)))
    torch.testing.assert_close(results[0], results[1])


# ------------------------------------------------- Exact gradients ----------------------------------------


@pytest.fixture(scope="module")
def everything():
    """All 40 responses of at most 3 tokens from a vocabulary of 4, with an actor, a reference and rewards."""
    rows = []
    for length in range(1, LENGTH + 1):
        for row in itertools.product(range(4), repeat=length):
            if STOP not in row[:-1] and (row[-1] == STOP or length == LENGTH):
                rows.append(list(row))
    batch = to_responses([2, 3], rows, padding=2)
    rewards = torch.randn(len(rows), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return batch, random_gpt(1), random_gpt(2), rewards


def sequence_log_probs(model, batch):
    return (grpo.token_log_probs(model, batch, 1.0) * batch.mask).sum(1)


def true_gradient(everything, beta=BETA):
    """∇J for J = E[r] - β KL(π ‖ π_ref), summed over all responses."""
    batch, actor, reference, rewards = everything
    log_probs, ref_log_probs = sequence_log_probs(actor, batch), sequence_log_probs(reference, batch).detach()
    return gradient((log_probs.exp() * (rewards - beta * (log_probs - ref_log_probs))).sum(), actor)


def expected_gradient(everything, beta=BETA, **settings):
    """The expectation of -grpo_loss's gradient, times L, over all groups of two."""
    batch, actor, reference, rewards = everything
    args = grpo.Args(**settings)
    count = len(rewards)
    log_probs = grpo.token_log_probs(actor, batch, 1.0)
    with torch.no_grad():
        old = log_probs.detach()
        ref_log_probs = grpo.token_log_probs(reference, batch, 1.0)
        probabilities = sequence_log_probs(actor, batch).exp()
        kl = ((old - ref_log_probs) * batch.mask).sum(1)
        totals = rewards - beta * kl if args.kl_in == "reward" else rewards
        first, second = totals.repeat_interleave(count), totals.repeat(count)
        pairs = grpo.group_advantages(torch.stack([first, second], 1).flatten(), 2, args.scale_rewards)
        advantages = pairs.view(count, count, 2)[:, :, 0] @ probabilities
    learnt = grpo.Batch(*batch, old, ref_log_probs, advantages, rewards)
    weights = (
        probabilities.unsqueeze(1) * batch.mask / LENGTH
    )  # those of the constant aggregation, in float64
    return -LENGTH * gradient(grpo.grpo_loss(log_probs, learnt, weights, beta, args)[0], actor)


def test_kl_in_the_reward_has_the_gradient_of_the_objective(everything):
    """Without scaling, for groups of G = 2, the expectation is (1 - 1/G) ∇J; for both kinds of ratio."""
    for level in ("token", "sequence"):
        estimate = expected_gradient(everything, scale_rewards="none", importance_sampling=level)
        assert relative_error(2 * estimate, true_gradient(everything)) < 1e-12


def test_leave_one_out_is_unbiased_and_the_group_deviation_is_not(everything):
    scaled = expected_gradient(everything, scale_rewards="group")
    truth = true_gradient(everything)
    best = (scaled @ truth) / scaled.square().sum()  # whatever the step size is
    assert relative_error(best * scaled, truth) > 0.01


def token_kl_gradient(everything, forward):
    """Σ over prefixes of π(prefix) ∇KL of the next token, where π(prefix) is held constant."""
    _, actor, reference, _ = everything
    total = torch.zeros((), dtype=torch.float64)
    for length in range(LENGTH):
        for prefix in itertools.product([0, 2, 3], repeat=length):  # without the stop token
            inputs = torch.tensor([[2, 3, *prefix]])
            arguments = grpo.model_inputs(inputs, torch.ones_like(inputs, dtype=torch.bool))
            arguments["logits_to_keep"] = length + 1
            actor_logs, ref_logs = (
                torch.log_softmax(m(**arguments).logits[0], -1) for m in (actor, reference)
            )
            reach = sum(actor_logs[i, token] for i, token in enumerate(prefix))
            p, q = actor_logs[-1], ref_logs[-1].detach()
            kl = (p.exp() * (p - q)).sum() if forward else (q.exp() * (q - p)).sum()
            total = total + torch.as_tensor(reach).exp().detach() * kl
    return gradient(total, actor)


@pytest.mark.parametrize(("kl_in", "forward"), [("loss", False), ("loss-weighted", True)])
def test_kl_in_the_loss_has_another_gradient(everything, kl_in, forward):
    """Token by token, k3 has the gradient of KL(π_ref ‖ π), weighted that of KL(π ‖ π_ref): not that of J."""
    estimate = expected_gradient(everything, scale_rewards="none", kl_in=kl_in)
    reward_part = true_gradient(everything, beta=0.0) / 2  # 1 - 1/G
    kl_part = reward_part - estimate
    torch.testing.assert_close(kl_part, BETA * token_kl_gradient(everything, forward))
    matched = expected_gradient(everything, beta=BETA / 2, scale_rewards="none", kl_in=kl_in)
    assert relative_error(2 * matched, true_gradient(everything)) > 0.02


# ------------------------------------------------- TRL ----------------------------------------------------

REWARD = """
def vowels(prompts, responses):
    assert len(prompts) == len(responses)
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]

def letters(prompts, responses):
    return [float(len(text)) for text in responses]

def nan(prompts, responses):
    return [float("nan")] * len(prompts)

def too_few(prompts, responses):
    return [0.0]
"""
WORDS = ["<pad>", "<stop>", "<unknown>", *"abcdefghijklmnopqrstuvwxyz"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with tiny Llamas, a language model and a reward model, prompts, and reward functions."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("models")
    vocabulary = {word: i for i, word in enumerate(WORDS)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split,
        pad_token="<pad>",
        eos_token="<stop>",
        unk_token="<unknown>",
        padding_side="left",
    )
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_labels=1,
        num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.1, vocab_size=len(WORDS),
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    for name, kind in (
        ("llama", transformers.LlamaForCausalLM),
        ("reward", transformers.LlamaForSequenceClassification),
    ):
        kind(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    lines = [json.dumps({"prompt": "a" * n}) + "\n" for n in range(1, 6)]
    (folder / "prompts.jsonl").write_text("".join(lines))
    (folder / "scorers.py").write_text(REWARD)
    return folder


@pytest.fixture(scope="module")
def make_trainer(folder, tmp_path_factory):
    """A function that makes TRL's trainer for the tiny Llama, without dropout."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    prompts = datasets.Dataset.from_dict({"prompt": ["ab", "cde"] * 8})

    def make(rewards, **settings):
        config = trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), per_device_train_batch_size=8, num_generations=4,
            max_completion_length=6, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            temperature=0.7, epsilon=0.2, epsilon_high=0.28, save_strategy="no",
            model_init_kwargs={"dtype": "float32", "attention_dropout": 0.0}, **settings,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(str(folder / "llama"), rewards, args=config, train_dataset=prompts)
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return make


def same_as_trl(trainer, args, kl_coef):
    """Our loss and gradient on random responses are those of TRL's `_compute_loss`."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    batch = random_batch(size=8, width=6, vocabulary=len(WORDS))
    ours = copy.deepcopy(model)
    with torch.no_grad():
        current = grpo.token_log_probs(ours, batch, args.temperature)
    noise = 0.3 * torch.randn(2, *current.shape, generator=torch.Generator().manual_seed(1))
    batch = batch._replace(
        log_probs=current + noise[0], ref_log_probs=current + noise[1], advantages=batch.advantages.float()
    )
    width = batch.mask.shape[1]
    theirs = trainer._compute_loss(
        model,
        {
            "prompt_ids": batch.tokens[:, :-width], "prompt_mask": batch.attention[:, :-width].long(),
            "completion_ids": batch.tokens[:, -width:], "completion_mask": batch.mask.long(),
            "advantages": batch.advantages, "old_per_token_logps": batch.log_probs,
            "ref_per_token_logps": batch.ref_log_probs, "num_items_in_batch": batch.mask.sum(),
        },
    )  # fmt: skip
    log_probs = grpo.token_log_probs(ours, batch, args.temperature)
    weights = grpo.loss_weights(batch.mask, args.loss_aggregation)
    loss, _ = grpo.grpo_loss(log_probs, batch, weights, kl_coef, args)
    torch.testing.assert_close(loss, theirs, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(gradient(loss, ours), gradient(theirs, model), atol=1e-6, rtol=1e-4)


def test_loss_is_that_of_trl(make_trainer):
    """For each aggregation and kind of ratio, with k3 in the loss; weighted k3 for tokens only: TRL errs."""
    trainer = make_trainer(lambda completions, **_: [0.0] * len(completions), beta=0.1)
    losses = {"grpo": "sequence-mean", "bnpo": "token-mean", "dapo": "token-mean", "dr_grpo": "constant"}
    for (loss, aggregation), level in itertools.product(losses.items(), ("token", "sequence")):
        for kl_in in ("loss", "loss-weighted") if level == "token" else ("loss",):
            trainer.loss_type, trainer.importance_sampling_level = loss, level
            trainer.args.use_bias_correction_kl = kl_in == "loss-weighted"
            args = grpo.Args(
                temperature=0.7, loss_aggregation=aggregation, importance_sampling=level, kl_in=kl_in,
                clip_coef_high=0.28,
            )  # fmt: skip
            same_as_trl(trainer, args, 0.1)


@pytest.mark.parametrize("scale", ["none", "group", "batch"])
def test_advantages_are_those_of_trl(make_trainer, scale):
    given = []

    def reward(completions, **_):
        generator = torch.Generator().manual_seed(len(completions))
        given.append(torch.randn(len(completions), generator=generator))
        return given[-1].tolist()

    trainer = make_trainer(reward, scale_rewards=scale)
    inputs = [{"prompt": prompt} for prompt in ("ab", "cde") for _ in range(4)]
    advantages = trainer._generate_and_score_completions(inputs)["advantages"]
    torch.testing.assert_close(grpo.group_advantages(given[-1], 4, scale), advantages)


# ------------------------------------------------- Update -------------------------------------------------


def new_models(vocabulary=4):
    """An actor and a reference."""
    models = grpo.Models(random_gpt(1, vocabulary), random_gpt(2, vocabulary).requires_grad_(False), None)
    models.tokenizer, models.stop_tokens = Tokenizer(), torch.tensor([STOP])
    return models


def updated(batch, args):
    """The actor's weights after an update, and the metrics."""
    torch.manual_seed(5)
    models = new_models()
    optimizer = grpo.Adam(grpo.trained_parameters(models), eps=1e-5)
    metrics = grpo.update(models, optimizer, batch, args, grpo.State(1e-2, BETA))
    return torch.cat([p.detach().flatten() for p in models.actor.parameters()]), metrics


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_change_nothing(aggregation):
    args = grpo.Args(num_iterations=2, num_minibatches=2, loss_aggregation=aggregation, kl_in="loss")
    whole, metrics = updated(random_batch(), args)
    parts, same_metrics = updated(random_batch(), replace(args, micro_batch_size=3))
    torch.testing.assert_close(whole, parts)
    assert metrics == pytest.approx(same_metrics, rel=1e-5)
    start = torch.cat([p.detach().flatten() for p in random_gpt(1).parameters()])
    assert (whole - start).abs().max() > 1e-3


def test_update_takes_the_steps_of_the_loss():
    """Three iterations of one minibatch are three steps of Adam down the clipped gradient of the loss."""
    batch, actor = random_batch(), random_gpt(1)
    args = grpo.Args(num_iterations=3, num_minibatches=1, max_grad_norm=0.01, temperature=0.7)
    optimizer = torch.optim.Adam(actor.parameters(), 1e-2, eps=1e-5)
    losses = []
    for _ in range(3):
        log_probs = grpo.token_log_probs(actor, batch, 0.7)
        loss, _ = grpo.grpo_loss(log_probs, batch, grpo.loss_weights(batch.mask, "constant"), BETA, args)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in actor.parameters() if p.grad is not None]
        norm = math.sqrt(sum(x.square().sum().item() for x in gradients))
        assert norm > 0.01
        for x in gradients:
            x *= 0.01 / norm
        optimizer.step()
    weights, metrics = updated(batch, args)
    expected = torch.cat([p.detach().flatten() for p in actor.parameters()])
    torch.testing.assert_close(weights, expected, atol=1e-5, rtol=1e-3)
    assert metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_coefficients():
    """The learning rate falls linearly to 0; β follows the KL with at most 2% a step (Ziegler, §2.2)."""
    args, state = grpo.Args(total_episodes=1000, learning_rate=0.4, kl_target=2.0), grpo.State(0.4, 0.1)
    for episodes, kl, learning_rate, kl_coef in (
        (0, None, 0.4, 0.1),
        (250, 2.2, 0.3, 0.1 * 1.01),
        (500, 9.0, 0.2, 0.1 * 1.01 * 1.02),
        (750, 0.1, 0.1, 0.1 * 1.01 * 1.02 * 0.98),
    ):
        state.episodes, state.last = episodes, {"objective/kl": kl} if kl else {}
        grpo.adjust_coefficients(state, args)
        assert (state.learning_rate, state.kl_coef) == pytest.approx((learning_rate, kl_coef))


def all_updates(batch, rewards):
    """Weights and metrics after an update, for each way to aggregate the loss; advantages of the rewards."""
    args = grpo.Args(num_iterations=2, num_minibatches=1)
    updates = [updated(batch, replace(args, loss_aggregation=aggregation)) for aggregation in AGGREGATIONS]
    return updates, grpo.group_advantages(rewards, 4, "batch")


def share_of_all_updates(rank, path):
    """The same with a half of the batch, as one of two processes."""
    # Optimizers load this module. If there is a group by then, the module keeps it, and the group's threads,
    # which outlive Python, can abort the process.
    importlib.import_module("torch.distributed.nn")
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}/store", rank=rank, world_size=2)
    half = slice(8 * rank, 8 * rank + 8)
    batch = grpo.Batch(*(column[half] for column in random_batch()))
    torch.save(all_updates(batch, torch.arange(16.0).square()[half]), f"{path}/{rank}.pt")
    group = weakref.ref(torch.distributed.group.WORLD)
    torch.distributed.destroy_process_group()
    assert group() is None, "something keeps the group, and its threads"


@pytest.mark.slow
def test_two_processes_learn_like_one(tmp_path):
    torch.multiprocessing.spawn(share_of_all_updates, (tmp_path,), nprocs=2)
    updates, advantages = all_updates(random_batch(), torch.arange(16.0).square())
    results = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    for their_updates, _ in results:
        for (their_weights, their_metrics), (weights, metrics) in zip(their_updates, updates, strict=True):
            torch.testing.assert_close(their_weights, weights)
            assert their_metrics == pytest.approx(metrics, rel=1e-5)
    torch.testing.assert_close(torch.cat([result[1] for result in results]), advantages)


# ------------------------------------------------- Data ---------------------------------------------------


def odd_tokens(prompts, responses):
    """Reward 1 for each response whose first word is an odd digit."""
    return [float(int((response.split() or "0")[0]) % 2) for response in responses]


class Digits(Tokenizer):
    """Tokens as digits."""

    def decode(self, tokens, skip_special_tokens):
        return " ".join(str(token) for token in tokens if token != STOP)


def models_with_prompts(vocabulary=6):
    """An actor and a reference, and prompts of 1 and of 3 tokens."""
    models = new_models(vocabulary)
    models.prompts = (
        torch.tensor([[STOP, STOP, 2], [4, 2, 3]]),
        torch.tensor([[False, False, True], [True] * 3]),
    )
    models.tokenizer, models.stop_tokens = Digits(), torch.tensor([STOP])
    models.reward_functions = [(odd_tokens, 1.0)]
    return models


SMALL = {"batch_size": 64, "group_size": 2, "max_response_length": 3, "model": "x", "micro_batch_size": 7}


def collected(seed=0, models=None, **changes):
    """Models, settings, a batch and its metrics."""
    torch.manual_seed(seed)
    models, args = models or models_with_prompts(), grpo.Args(**{**SMALL, **changes})
    state = grpo.State(1e-2, args.kl_coef)
    return models, args, state, *grpo.collect(models, args, state)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_collected_batch(temperature):
    """Groups share their prompts; log π, KL, rewards and metrics are those computed anew, row by row."""
    models, args, _, batch, metrics = collected(temperature=temperature, scale_rewards="none")
    prompts, responses = grpo.texts(models, batch)
    assert prompts[::2] == prompts[1::2]
    assert len(set(prompts)) == 2
    log_probs = grpo.token_log_probs(models.actor, batch, temperature)
    ref_log_probs = grpo.token_log_probs(models.reference, batch, temperature)
    torch.testing.assert_close(batch.log_probs, log_probs)
    torch.testing.assert_close(batch.ref_log_probs, ref_log_probs)
    kl = ((log_probs - ref_log_probs) * batch.mask).sum(1).tolist()
    lengths = batch.mask.sum(1).tolist()
    stops = [STOP in row[3 : 3 + n] for row, n in zip(batch.tokens.tolist(), lengths, strict=True)]
    scores = [
        odd_tokens(None, [text])[0] - 2.0 * (not stop) for text, stop in zip(responses, stops, strict=True)
    ]
    rewards = [score - args.kl_coef * x for score, x in zip(scores, kl, strict=True)]
    advantages = []
    for i in range(0, 64, 2):
        half = (rewards[i] - rewards[i + 1]) / 2
        advantages += [half, -half]
    assert batch.scores.tolist() == pytest.approx(scores)
    assert batch.advantages.tolist() == pytest.approx(advantages, abs=1e-5)
    flat = [scores[i] == scores[i + 1] for i in range(0, 64, 2)]
    expected = {
        "reward": np.mean(scores), "reward_std": np.std(scores, ddof=1),
        "frac_reward_zero_std": np.mean(flat),
        "objective/kl": np.mean(kl), "objective/rlhf_reward": np.mean(rewards), "kl": sum(kl) / sum(lengths),
        "completions/mean_length": np.mean(lengths), "completions/clipped_ratio": 1 - np.mean(stops),
        "entropy": -(log_probs * batch.mask).sum().item() / sum(lengths),
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-5)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5
    assert np.mean(stops) < 1 or temperature < 1


def test_kl_in_the_loss_leaves_the_advantages_alone():
    _, _, _, batch, _ = collected(kl_in="loss", scale_rewards="none")
    pairs = batch.scores.view(-1, 2)
    half = (pairs[:, 0] - pairs[:, 1]) / 2
    torch.testing.assert_close(batch.advantages, torch.stack([half, -half], 1).flatten())


def test_without_a_reference_there_is_no_kl():
    models = models_with_prompts()
    models.reference = None
    _, _, _, batch, metrics = collected(models=models, kl_coef=0.0)
    assert torch.equal(batch.ref_log_probs, batch.log_probs)
    assert metrics["objective/kl"] == metrics["kl"] == 0
    assert metrics["objective/rlhf_reward"] == metrics["reward"]


def test_truncated_responses_are_masked():
    *_, batch, metrics = collected(mask_truncated=True)
    *_, other, other_metrics = collected()
    stops = (other.tokens[:, -3:].eq(STOP) & other.mask).any(1)
    assert torch.equal(batch.mask, other.mask & stops.unsqueeze(1))
    assert torch.equal(batch.advantages, other.advantages)
    assert metrics == other_metrics
    assert 0 < stops.float().mean() < 1


@pytest.mark.parametrize("seed", range(3))
def test_groups_without_variance_are_replaced(seed):
    """With tries enough, none is left; they are counted as first sampled."""
    *_, before, first = collected(seed, missing_eos_penalty=0.0)
    models, *_, batch, metrics = collected(seed, resampling_tries=50, missing_eos_penalty=0.0)
    flat = before.scores.view(-1, 2).std(1) == 0
    assert 0 < flat.sum() < 32
    assert metrics["frac_reward_zero_std"] == first["frac_reward_zero_std"] == flat.float().mean().item()
    assert metrics["reward"] == first["reward"]
    assert (batch.scores.view(-1, 2).std(1) > 0).all()
    kept = ~flat.repeat_interleave(2)
    assert torch.equal(batch.tokens[kept][:, -3:], before.tokens[kept][:, -3:])
    prompts, responses = grpo.texts(models, batch)
    assert prompts[::2] == prompts[1::2]
    assert batch.scores.tolist() == odd_tokens(prompts, responses)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-5


# ------------------------------------------------- Tasks --------------------------------------------------


def test_sums_are_written_digit_by_digit():
    rng = random.Random(0)
    written = {grpo.write_sum(rng, "4 7 + 8 5 =") for _ in range(200)}
    assert "2 carry 3 carry 1" in written
    assert {"1 carry 3 carry 1", "3 carry 3 carry 1", "2 carry 2 carry 1", "2 carry 4 carry 1"} < written
    assert grpo.verify(["4 7 + 8 5 ="] * 2, ["2 carry 3 carry 1", "2 carry 3 1"]) == [1.0, 1.0]
    wrong = ["2 carry 3 carry", "1 3 2", "", "2 3 1 0", "+", "2 carry 4 carry 1", "2 3 1 ="]
    assert grpo.verify(["4 7 + 8 5 ="] * len(wrong), wrong) == [0.0] * len(wrong)


def test_half_of_the_examples_are_wrong():
    training, _ = grpo.split_sums()
    rng = random.Random(1)
    prompts = rng.choices(training, k=4000)
    rewards = grpo.verify(prompts, [grpo.write_sum(rng, prompt) for prompt in prompts])
    assert np.mean(rewards) == pytest.approx(0.5, abs=0.03)


def test_held_out_sums_are_never_trained_on():
    parts = [{tuple(sorted(grpo.read_sum(prompt))) for prompt in part} for part in grpo.split_sums()]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(itertools.combinations_with_replacement(range(10, 100), 2))
    assert len(parts[1]) == grpo.HELD_OUT


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Settings of a run of two or three seconds, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "SUPERVISED_STEPS", 10)
    monkeypatch.setattr(grpo, "COMPARISONS", 200)
    monkeypatch.setattr(grpo, "PROMPTS", grpo.PROMPTS[:2])
    settings = {
        "total_episodes": 128,
        "batch_size": 32,
        "group_size": 4,
        "num_iterations": 1,
        "num_minibatches": 2,
    }
    return {"reviews": grpo.Args(**settings), "sums": replace(grpo.SUMS, **settings)}


@pytest.mark.slow
def test_reviews_are_those_of_ppo_rlhf(small, monkeypatch):
    """The same seed gives the same supervised policy and the same reward model."""
    rlhf = pytest.importorskip("ppo_rlhf")
    for name in ("SUPERVISED_STEPS", "COMPARISONS", "PROMPTS"):
        monkeypatch.setattr(rlhf, name, getattr(grpo, name))
    torch.manual_seed(3)
    ours = grpo.load_models(replace(small["reviews"], seed=3)).state_dict()
    torch.manual_seed(3)
    theirs = rlhf.load_models(rlhf.Args(seed=3)).state_dict()
    assert ours.keys() < theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


def test_accuracy_is_of_held_out_sums(small, monkeypatch):
    models = grpo.load_models(small["sums"])
    decode = models.tokenizer.decode
    _, held_out = grpo.split_sums()
    prompts, mask = models.held_out
    shown = {decode(row[m].tolist()) for row, m in zip(prompts, mask, strict=True)}
    assert shown == set(held_out)
    seen = []
    monkeypatch.setattr(grpo, "verify", lambda p, r: seen.extend(p) or [float(len(x) > 12) for x in p])
    accuracy = grpo.held_out_accuracy(models, replace(small["sums"], missing_eos_penalty=3.0))
    assert sorted(seen) == sorted(held_out)
    assert accuracy == pytest.approx(np.mean([len(x) > 12 for x in held_out]), abs=1e-6)


# ------------------------------------------------- Runs ---------------------------------------------------


class StopAfter(list):
    """A list of signals that arrive after so many iterations."""

    def __init__(self, iterations):
        super().__init__()
        self.left = iterations

    def __len__(self):
        self.left -= 1
        return int(self.left < 0)

    def __bool__(self):
        return self.left < 0


def weights(path):
    return torch.cat([x.flatten() for x in grpo.load_checkpoint(path)["weights"].values()])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["reviews", "sums"])
def test_resumed_run_is_identical(small, task, monkeypatch):
    monkeypatch.setattr(grpo, "verify", lambda prompts, responses: [len(text) % 3 for text in responses])
    # Stopped, a run does not measure how close to the optimum it is, which would take seconds.
    args = replace(
        small[task], total_episodes=256, resampling_tries=1, kl_target=2.0 if task == "reviews" else None
    )
    whole = grpo.train(args, StopAfter(4))["checkpoint"]
    half = grpo.train(args, StopAfter(1))["checkpoint"]
    assert not torch.equal(weights(whole), weights(half))
    resumed = grpo.train(replace(args, resume=half), StopAfter(3))["checkpoint"]
    assert torch.equal(weights(whole), weights(resumed))
    assert grpo.load_checkpoint(whole)["state"] == grpo.load_checkpoint(resumed)["state"]


@pytest.mark.slow
def test_run_reports_its_result(small, capsys, monkeypatch):
    results = grpo.train(small["sums"])
    assert (
        results["accuracy_before"]
        == grpo.load_checkpoint(results["checkpoint"])["state"]["first"]["eval/accuracy"]
    )
    assert 0 <= results["accuracy"] < 0.5
    printed = capsys.readouterr().out
    assert f"{results['accuracy']:.1%} after" in printed
    share = {"share_of_optimum": 0.123, "left_out": 0.0}
    for name in ("reference", "actor", "optimum"):
        share |= {f"objective_{name}": 1.0, f"kl_{name}": 0.0}
    monkeypatch.setattr(grpo, "compare_with_optimum", lambda *_: share)
    results = grpo.train(small["reviews"])
    assert results["share_of_optimum"] == 0.123
    assert "12.3% of the best gain" in capsys.readouterr().out


@pytest.mark.slow
def test_sums_are_learnt():
    """Twenty iterations lift the accuracy on sums that are never trained on."""
    torch.manual_seed(0)
    args = replace(grpo.SUMS, seed=11)
    models = grpo.load_models(args)
    before = grpo.held_out_accuracy(models, args)
    optimizer = grpo.Adam(grpo.trained_parameters(models), eps=1e-5)
    state = grpo.State(args.learning_rate, 0.0)
    for _ in range(20):
        batch, _ = grpo.collect(models, args, state)
        grpo.update(models, optimizer, batch, args, state)
    assert grpo.held_out_accuracy(models, args) > before + 0.08


def real_args(folder, **changes):
    """Settings of a short run with the folder's models."""
    settings = {
        "model": str(folder / "llama"), "prompts": str(folder / "prompts.jsonl"), "learning_rate": 1e-4,
        "total_episodes": 64, "batch_size": 32, "group_size": 4, "num_minibatches": 2, "micro_batch_size": 8,
    }  # fmt: skip
    if "reward_function" not in changes:
        settings["reward_model"] = str(folder / "reward")
    return grpo.Args(**{**settings, **changes})


@pytest.mark.parametrize(
    "changes",
    [{}, {"bfloat16": True}, {"gradient_checkpointing": True}, {"lora_rank": 2}, {"kl_coef": 0.0}],
    ids=str,
)
def test_model_from_a_folder(folder, tmp_path, monkeypatch, changes):
    if "lora_rank" in changes:
        pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    metrics = []
    monkeypatch.setattr(grpo.Run, "log", lambda self, batch, m: metrics.append(m))
    args = real_args(folder, reward_function=("scorers:vowels", "scorers:letters=-0.5"), **changes)
    path = Path(grpo.train(args)["checkpoint"])
    assert abs(metrics[0]["objective/kl"]) < (1e-2 if "bfloat16" in changes else 1e-5)
    assert metrics[0]["val/first_approxkl"] < 1e-12  # dropout is off
    assert metrics[0]["sampling/sampling_logp_difference/max"] < (0.1 if "bfloat16" in changes else 1e-4)
    assert (metrics[1]["objective/kl"] != 0) == ("kl_coef" not in changes)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent / "model")
    start = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    assert not torch.equal(loaded(**inputs).logits, start(**inputs).logits)


def test_reward_functions_are_weighted(folder, monkeypatch):
    monkeypatch.chdir(folder)
    args = real_args(folder, reward_function=("scorers:vowels", "scorers:letters=-0.5"))
    models = grpo.load_models(args)
    assert models.reward_model is None
    batch, metrics = grpo.collect(models, args, grpo.State(1e-4, 0.1))
    _, responses = grpo.texts(models, batch)
    vowels = torch.tensor([sum(letter in "aeiou" for letter in text) / 4 for text in responses])
    expected = vowels - 0.5 * torch.tensor([float(len(text)) for text in responses])
    stopped = (batch.tokens[:, -args.max_response_length :] * batch.mask == 1).any(1)
    torch.testing.assert_close(batch.scores, expected - args.missing_eos_penalty * ~stopped)
    assert metrics["reward"] == pytest.approx(batch.scores.mean().item(), abs=1e-5)


def test_resumed_run_of_a_real_model_is_identical(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = real_args(folder)
    whole = grpo.train(args, StopAfter(2))["checkpoint"]
    half = grpo.train(args, StopAfter(1))["checkpoint"]
    resumed = grpo.train(replace(args, resume=half), StopAfter(1))["checkpoint"]
    assert torch.equal(weights(whole), weights(resumed))


@pytest.mark.slow
def test_two_processes_on_the_command_line(folder, tmp_path):
    """They train one model: one folder, one checkpoint, a reward that rises."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        str(ROOT / "grpo.py"), "--model", str(folder / "llama"), "--prompts", str(folder / "prompts.jsonl"),
        "--reward-function", "scorers:vowels", "scorers:letters=0.1", "--learning-rate", "1e-4",
        "--total-episodes", "5120", "--batch-size", "256", "--kl-coef", "0.001",
    ]  # fmt: skip
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("runs/*/checkpoint.pt"))) == 1
    assert done.stdout.count("\nresume ") == 1
    rewards = [
        float(line.split("reward")[1].split()[0]) for line in done.stdout.splitlines() if "  reward " in line
    ]
    assert rewards[-1] > rewards[0] + 0.1


# ------------------------------------------------- Advice and refusals -------------------------------------

HEALTHY = {
    "reward": 1.0, "reward_std": 1.0, "frac_reward_zero_std": 0.1, "objective/kl": 1.0,
    "objective/rlhf_reward": 0.9, "objective/surprise": 0.01, "completions/mean_length": 10.0,
    "completions/clipped_ratio": 0.0, "entropy": 1.0, "sampling/sampling_logp_difference/max": 1e-6,
    "val/first_approxkl": 0.0,
}  # fmt: skip
FIRST = {**HEALTHY, "reward": 0.5, "objective/rlhf_reward": 0.5}


CASES = [
    ("flat-groups", 5, {"frac_reward_zero_std": 0.51}),
    ("hacking", 3, {"objective/surprise": 0.21}),
    ("drift", 10, {"objective/surprise": 0.1}),
    ("kl", 5, {"objective/kl": 11.0}),
    ("falling", 10, {"reward": 1.2, "objective/rlhf_reward": 0.7}),
    ("length", 5, {"completions/mean_length": 14.0, "reward": 0.55}),
    ("cut-off", 5, {"completions/clipped_ratio": 0.3}),
    ("mismatch", 1, {"sampling/sampling_logp_difference/max": 1e-3}),
    ("ratio", 1, {"val/first_approxkl": 1e-4}),
    ("entropy", 10, {"entropy": 0.3}),
]


def test_all_advice_is_tested():
    assert [case[0] for case in CASES] == [advice[0] for advice in grpo.ADVICE]


@pytest.mark.parametrize(("name", "iterations", "changes"), CASES)
def test_advice(name, iterations, changes):
    """Given once, after so many iterations in a row, and about nothing else."""
    args, state = grpo.Args(loss_aggregation="sequence-mean"), grpo.State(1e-4, 0.1, first=FIRST)
    assert grpo.diagnose(HEALTHY, args, state) == []
    for _ in range(iterations - 1):
        assert grpo.diagnose(HEALTHY | changes, args, state) == []
    assert grpo.diagnose(HEALTHY, args, state) == []  # the row is broken
    told = [grpo.diagnose(HEALTHY | changes, args, state) for _ in range(iterations + 5)]
    assert [len(messages) for messages in told] == [0] * (iterations - 1) + [1] + [0] * 5
    assert told[iterations - 1][0].startswith(f"[{name}] ")


def test_length_advice_names_no_present_value():
    state = grpo.State(1e-4, 0.1, first=FIRST)
    long = HEALTHY | {"completions/mean_length": 14.0, "reward": 0.55}
    told = [grpo.diagnose(long, grpo.Args(loss_aggregation="constant"), state) for _ in range(10)]
    assert told == [[]] * 10


def test_kl_advice_keeps_to_its_target():
    args, state = grpo.Args(kl_target=2.0), grpo.State(1e-4, 0.1, first=FIRST)
    told = [grpo.diagnose(HEALTHY | {"objective/kl": 3.2}, args, state) for _ in range(5)]
    assert [len(messages) for messages in told] == [0, 0, 0, 0, 1]


def test_no_surprise_without_a_reference():
    """With --kl-coef 0 there is none, and the surprise is the actor's own."""
    args, state = grpo.Args(kl_coef=0.0), grpo.State(1e-4, 0.0, first=FIRST)
    for surprise in [0.3] * 5 + [0.1] * 15:
        assert grpo.diagnose(HEALTHY | {"objective/surprise": surprise}, args, state) == []


def test_infinite_metrics_end_the_run():
    with pytest.raises(grpo.Diverged, match="not finite"):
        grpo.diagnose(HEALTHY | {"loss": math.inf}, grpo.Args(), grpo.State(1e-4, 0.1))


def test_plan_says_what_moves_the_optimum():
    assert "note" not in grpo.plan(grpo.Args())
    assert "note" not in grpo.plan(grpo.Args(kl_in="loss", kl_coef=0.0))
    assert "--kl-in loss-weighted" in grpo.plan(grpo.Args(kl_in="loss-weighted", scale_rewards="none"))
    assert "--scale-rewards group" in grpo.plan(grpo.Args(kl_in="loss", scale_rewards="group"))


def test_sums_have_their_own_defaults(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--task", "sums", "--seed", "7"])
    args = grpo.parse_args(grpo.Args())
    assert args == replace(grpo.SUMS, seed=7)
    assert (args.kl_coef, args.missing_eos_penalty) == (0, 0)
    monkeypatch.setattr(sys, "argv", ["grpo.py", "--task", "sums", "--kl-coef", "0.2"])
    assert grpo.parse_args(grpo.Args()).kl_coef == 0.2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"group_size": 1}, "--group-size is 1; it must be from 2"),
        ({"group_size": 3}, "--batch-size must be a multiple of groups x processes = 3"),
        ({"num_minibatches": 3}, "--batch-size must be a multiple of minibatches x processes = 3"),
        ({"temperature": 0.0}, "--temperature is 0.0"),
        ({"clip_coef_high": 0.0}, "--clip-coef-high is 0.0"),
        ({"kl_coef": math.nan}, "--kl-coef is nan"),
        ({"kl_coef": 0.0, "kl_target": 2.0}, "--kl-target needs a --kl-coef"),
        ({"scale_rewards": "std"}, "scale_rewards is 'std'; it must be one of"),
        ({"loss_aggregation": "mean"}, "loss_aggregation is 'mean'; it must be one of"),
        ({"max_response_length": 29}, "the model reads 32"),
        ({"lora_rank": 4}, "--lora-rank needs --model"),
        ({"reward_function": ("a:b",)}, "--reward-function needs --model"),
        ({"model": "x"}, "--model needs --prompts"),
        ({"task": "sums", "reward_model_updates": 2}, "--reward-model-updates is for --task reviews"),
        ({"resume": "missing.pt"}, "missing.pt cannot be loaded as a checkpoint"),
        ({"device": "nonsense"}, "--device nonsense cannot be used"),
        ({"device": "meta"}, "--device needs --model"),
        ({"model": "x", "prompts": "y"}, "--model needs either --reward-model or --reward-function"),
        ({"model": "x", "prompts": "y", "reward_model": "z"}, "a --learning-rate of at most 1e-4"),
    ],
)
def test_refused_settings(small, changes, reason):
    with pytest.raises(grpo.Refused, match=reason):
        grpo.train(replace(small["reviews"], **changes))


def test_groups_are_not_split_between_processes(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(grpo.Refused, match="multiple of groups x processes = 12"):
        grpo.check_args(small["reviews"])


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("missing:f", "cannot import --reward-function missing:f"),
        ("scorers:missing", "cannot import --reward-function scorers:missing"),
        ("scorers:vowels=much", "--reward-function scorers:vowels=much has no number after ="),
        ("scorers:nan", "must return 8 finite numbers"),
        ("scorers:too_few", "must return 8 finite numbers"),
    ],
)
def test_refused_functions(folder, tmp_path, monkeypatch, function, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(grpo.Refused, match=reason):
        grpo.train(real_args(folder, reward_function=("scorers:vowels", function)))


def test_command_line_refuses_in_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "grpo.py"), "--batch-size", "100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("grpo.py: --batch-size must be a multiple")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
