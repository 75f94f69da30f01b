"""Check ppo_rlhf.py and grpo.py: equations against independent computations and TRL's, models, and runs.

Text that both scripts have in common (tools/copies.py) is tested in one of them.
"""

import json
import math
import os
import random
import shutil
import signal
import sys
from dataclasses import replace
from functools import partial
from itertools import combinations_with_replacement, product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import language_helpers as shared
import numpy as np
import optimum
import pytest
import torch
from helpers import ROOT, call, checkpoint_in, curves, flags, load, same
from language_helpers import (
    STOP,
    Digits,
    completions,
    failing,
    first_digit,
    flat,
    gradient,
    kept,
    loss_of,
    make_task,
    new_models,
    prompt_and_length,
    random_batch,
    random_gpt,
    real_args,
    run_process,
    to_responses,
    tokens_of,
)
from torch import nn

import grpo
import ppo_rlhf as rlhf


def label(part):
    """Return the name of a script or function, and any other part of a case as it is."""
    return getattr(part, "__name__", str(part))


both = pytest.mark.parametrize("script", [rlhf, grpo], ids=label)
LENGTH, BETA = 3, 0.3


# Exact gradients: expectations over all responses


def relative_error(estimate, truth):
    return ((estimate - truth).norm() / truth.norm()).item()


@pytest.fixture(scope="module")
def everything():
    """Return all 40 responses of at most 3 tokens from a vocabulary of 4, with networks and scores."""
    rows = []
    for length in range(1, LENGTH + 1):
        for row in product(range(4), repeat=length):
            if STOP not in row[:-1] and (row[-1] == STOP or length == LENGTH):
                rows.append(list(row))
    batch = to_responses([2, 3], rows, padding=2)
    scores = torch.randn(len(rows), generator=torch.Generator().manual_seed(0))
    return batch, random_gpt(1), random_gpt(2), scores


def sequence_log_probs(model, batch):
    return (rlhf.token_log_probs(model, batch, 1.0).double() * batch.mask).sum(1)


def true_gradient(everything, beta=BETA):
    """Return ∇J of J = E[score] - β KL(π ‖ π_ref), summed over all responses."""
    batch, actor, reference, scores = everything
    log_probs, ref_log_probs = sequence_log_probs(actor, batch), sequence_log_probs(reference, batch).detach()
    return gradient((log_probs.exp() * (scores - beta * (log_probs - ref_log_probs))).sum(), actor)


def expected_ppo_gradient(everything, estimator=lambda kl: kl, learn_stop=True):
    """Return the expectation of the gradient of -ppo_loss, with λ = 1 and a random critic."""
    batch, actor, reference, scores = everything
    critic, args = shared.random_critic(3), rlhf.Args()
    with torch.no_grad():
        log_probs = rlhf.token_log_probs(actor, batch, 1.0)
        ref_log_probs = rlhf.token_log_probs(reference, batch, 1.0)
        rewards = rlhf.token_rewards(scores, estimator(log_probs - ref_log_probs), batch.mask, BETA)
        values = critic(batch)[:, :-1]
        advantages, returns = rlhf.compute_gae(rewards, values, batch.mask, gae_lambda=1.0)
        advantages = advantages * sequence_log_probs(actor, batch).exp().unsqueeze(1)
    if not learn_stop:
        advantages = advantages * (batch.responses != STOP)
    learnt = rlhf.Batch(*batch, log_probs, values, advantages, returns)
    models = rlhf.Models(actor, critic, reference, None)
    return -gradient(rlhf.ppo_loss(models, learnt, torch.tensor(1), args)[0], actor)


def test_expected_ppo_gradient_is_that_of_the_objective(everything):
    """With k3 in the reward, or if the stop token is not learnt, it is another gradient."""
    batch, actor, *_ = everything
    assert sequence_log_probs(actor, batch).exp().sum().item() == pytest.approx(1, abs=1e-6)
    truth = true_gradient(everything)
    assert relative_error(expected_ppo_gradient(everything), truth) < 1e-5
    k3 = expected_ppo_gradient(everything, estimator=lambda kl: (-kl).exp() - 1 + kl)
    assert relative_error(k3, truth) > 0.1
    assert relative_error(expected_ppo_gradient(everything, learn_stop=False), truth) > 0.1


def policies_after_prefixes(*models):
    """Yield the probability of each beginning of a response, and log π of each model for the next token."""
    for length in range(LENGTH):
        for prefix in product([0, 2, 3], repeat=length):
            tokens = torch.tensor([[2, 3, *prefix]])
            inputs = rlhf.model_inputs(tokens, torch.ones_like(tokens, dtype=torch.bool))
            log_policies = [model(**inputs).logits[0].log_softmax(-1) for model in models]
            reach = sum(log_policies[0][1 + i, token].item() for i, token in enumerate(prefix))
            yield math.exp(reach), [log_policy[-1] for log_policy in log_policies]


def test_expected_gradient_of_the_entropy_bonus_is_that_of_the_entropy(everything):
    """The entropy after each prefix counts with the prefix's probability."""
    batch, actor, reference, _ = everything
    log_probs = rlhf.token_log_probs(actor, batch, 1.0).detach()
    zeros, probs = torch.zeros_like(log_probs), sequence_log_probs(actor, batch).exp().detach()
    learnt = rlhf.Batch(*batch, log_probs, zeros, zeros, zeros)
    models, args = rlhf.Models(actor, shared.random_critic(3), reference, None), rlhf.Args(ent_coef=0.7)
    parts = [shared.rows_of(learnt, slice(i, i + 1)) for i in range(len(probs))]
    losses = torch.stack([rlhf.ppo_loss(models, part, torch.tensor(1), args)[0] for part in parts])
    bonus, total = -gradient((probs * losses).sum(), actor), torch.zeros((), dtype=torch.float64)
    for probability, (log_policy,) in policies_after_prefixes(actor):
        total = total - probability * (log_policy.exp() * log_policy).sum()
    assert relative_error(bonus, 0.7 * gradient(total, actor)) < 1e-5


def expected_grpo_gradient(everything, **settings):
    """Return the expectation of the gradient of -grpo_loss over all groups of two."""
    batch, actor, reference, scores = everything
    args = grpo.Args(group_size=2, batch_size=1, num_minibatches=1, max_response_length=1, **settings)
    log_probs = grpo.token_log_probs(actor, batch, 1.0)
    old, ref_log_probs = log_probs.detach(), grpo.token_log_probs(reference, batch, 1.0).detach()
    probs = sequence_log_probs(actor, batch).exp().detach()
    kl, count = ((old - ref_log_probs) * batch.mask).sum(1), len(scores)
    firsts, seconds = torch.arange(count).repeat_interleave(count), torch.arange(count).repeat(count)
    pairs = torch.stack([firsts, seconds], 1).flatten()
    advantages = grpo.group_advantages(scores[pairs], kl[pairs], args).view(count, count, 2)[:, :, 0]
    all_learnt = torch.ones(count, dtype=torch.bool)
    learnt = grpo.Batch(*batch, old, ref_log_probs, (advantages.double() @ probs).float(), all_learnt)
    expected = 0
    for i, prob in enumerate(probs):
        one = slice(i, i + 1)
        loss, _ = grpo.grpo_loss(log_probs[one], shared.rows_of(learnt, one), batch.mask.sum(), args)
        expected = expected + prob * loss
    return -gradient(expected, actor)


def test_expected_grpo_gradient_is_that_of_the_objective(everything):
    """Without scaling, it is that gradient times 1 - 1/G. With scaling, it has another direction."""
    truth = true_gradient(everything)
    estimate = expected_grpo_gradient(everything, kl_coef=BETA, scale_rewards="none")
    assert relative_error(2 * estimate, truth) < 1e-5
    scaled = expected_grpo_gradient(everything, kl_coef=BETA, scale_rewards="group")
    assert relative_error((scaled @ truth) / scaled.square().sum() * scaled, truth) > 0.01


def test_kl_in_the_loss_has_the_gradient_of_the_reverse_kl_token_by_token(everything):
    """For each token, k3 has the gradient of KL(π_ref ‖ π), where the probability of a prefix is fixed."""
    _, actor, reference, _ = everything
    total = torch.zeros((), dtype=torch.float64)
    for probability, (log_p, log_q) in policies_after_prefixes(actor, reference):
        log_q = log_q.detach()
        total = total + probability * (log_q.exp() * (log_q - log_p)).sum()
    score_part = true_gradient(everything, beta=0.0) / 2  # 1 - 1/G
    estimate = expected_grpo_gradient(everything, kl_in="loss", kl_coef=BETA, scale_rewards="none")
    assert relative_error(score_part - estimate, BETA * gradient(total, actor)) < 1e-4
    matched = expected_grpo_gradient(everything, kl_in="loss", kl_coef=BETA / 2, scale_rewards="none")
    assert relative_error(2 * matched, true_gradient(everything)) > 0.02


def test_at_a_ratio_of_1_sequence_ratios_have_the_gradient_of_token_ratios(everything):
    """With the aggregation sequence-mean, each response counts once."""
    batch, actor, _, scores = everything
    unscaled = {"scale_rewards": "none", "ratio": "sequence"}
    estimate = expected_grpo_gradient(everything, **unscaled)
    assert relative_error(2 * estimate, true_gradient(everything, 0)) < 1e-5
    log_probs = sequence_log_probs(actor, batch)
    probs = log_probs.exp().detach()
    advantages = (scores - (probs * scores).sum()) / 2
    truth = gradient((probs * advantages / batch.mask.sum(1) * log_probs).sum(), actor)
    estimate = expected_grpo_gradient(everything, loss_aggregation="sequence-mean", **unscaled)
    assert relative_error(estimate, truth) < 1e-5


# Advantages and losses


@pytest.mark.parametrize("scale", ["none", "group"])
@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_group_advantages_equal_a_computation_in_numpy(scale, kl_in):
    """Each group is computed by itself. In one, all scores are equal."""
    scores, kl = np.random.default_rng(0).normal(3, [[2], [9]], size=(2, 24)).astype(np.float32)
    scores[4:8], kl[8:12] = 1.5, 2 * scores[8:12]
    args = grpo.Args(group_size=4, scale_rewards=scale, kl_in=kl_in, kl_coef=0.2)
    result = grpo.group_advantages(torch.from_numpy(scores), torch.from_numpy(kl), args).numpy()
    larger = set()
    for start in range(0, 24, 4):
        group = slice(start, start + 4)
        rewards = scores[group] - 0.2 * kl[group] * (kl_in == "reward")
        of_scores, other = scores[group].std(ddof=1), rewards.std(ddof=1)
        larger.add(of_scores > other)
        share = min(of_scores / max(other, 1e-12), 1)
        divisor = share * of_scores + (1 - share) * max(other, 1) + 1e-4 if scale == "group" else 1
        np.testing.assert_allclose(result[group], (rewards - rewards.mean()) / divisor, rtol=1e-4, atol=1e-6)
    assert kl_in == "loss" or larger == {True, False}


@pytest.mark.parametrize("aggregation", ["sequence-mean", "token-mean", "constant"])
def test_weighted_losses_add_up_to_the_mean_that_the_aggregation_names(aggregation):
    """The sums of the parts of a minibatch add up to it, too."""
    lengths, width = [3, 1, 4, 2], 6
    mask = torch.arange(4) < torch.tensor(lengths).unsqueeze(1)
    losses = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    args = grpo.Args(batch_size=12, num_minibatches=3, max_response_length=width)
    args.loss_aggregation = aggregation
    sums = [sum(row[:n]) for row, n in zip(losses.tolist(), lengths, strict=True)]
    means = {
        "sequence-mean": sum(total / n for total, n in zip(sums, lengths, strict=True)) / 4,
        "token-mean": sum(sums) / 10,
        "constant": sum(sums) / (4 * width),
    }
    for parts in ([slice(4)], [slice(1), slice(1, 4)]):
        weighted = [grpo.loss_weights(mask[part], mask.sum(), args) * losses[part] for part in parts]
        assert sum(x.sum().item() for x in weighted) == pytest.approx(means[aggregation], abs=1e-6)


@pytest.mark.parametrize(("kl_in", "kind"), [("reward", "token"), ("loss", "token"), ("reward", "sequence")])
def test_grpo_loss_and_metrics_are_those_of_a_loop_over_tokens(kl_in, kind):
    """The fourth response is one from which nothing is learnt."""
    args = grpo.Args(kl_in=kl_in, kl_coef=BETA, loss_aggregation="token-mean", ratio=kind)
    args.clip_coef, args.clip_coef_high = 0.1, 0.25
    batch, models = random_batch(grpo), new_models(grpo)
    log_probs = grpo.token_log_probs(models.actor, batch, 1.0)
    loss, metrics = loss_of(grpo, models, batch, args)
    rows = []
    for i, t in batch.mask.nonzero().tolist():
        advantage, log_ratio = batch.advantages[i].item(), (log_probs - batch.log_probs)[i, t].item()
        ratio, log_x = math.exp(log_ratio), (batch.ref_log_probs - log_probs)[i, t].item()
        if kind == "sequence":
            count = batch.mask[i].sum()
            ratio = (log_probs[i, :count].sum() - batch.log_probs[i, :count].sum()).div(count).exp().item()
        token_loss = -min(ratio * advantage, min(max(ratio, 0.9), 1.25) * advantage)
        token_loss += BETA * (math.exp(log_x) - 1 - log_x) * (kl_in == "loss")
        is_clipped = (ratio < 0.9 and advantage < 0) or (ratio > 1.25 and advantage > 0)
        rows.append([token_loss * (i != 3), is_clipped, log_ratio**2 / 2])
    expected = np.mean(rows, 0)
    assert loss.item() == pytest.approx(expected[0], abs=1e-5)
    names = ["loss/policy_avg", "policy/clipfrac_avg", "policy/approxkl_avg"]
    assert [metrics[name].item() for name in names] == pytest.approx(expected, abs=1e-5)
    assert expected[1:].all()


@pytest.mark.parametrize("more", [{}, {"clip_vloss": True, "ent_coef": 0.2}], ids=str)
def test_ppo_loss_metrics_and_critic_gradient_are_those_of_a_loop_over_tokens(more):
    args = rlhf.Args(clip_coef=0.3, **more)
    batch, models = random_batch(rlhf), new_models(rlhf)
    log_probs, values = rlhf.token_log_probs(models.actor, batch, 1.0), models.critic(batch)
    inputs = [torch.cat(columns, 1) for columns in ((batch.prompts, batch.responses), batch[1:4:2])]
    policy = models.actor(**rlhf.model_inputs(*inputs)).logits[:, -batch.mask.shape[1] - 1 : -1].softmax(-1)
    loss, metrics = rlhf.ppo_loss(models, batch, batch.mask.sum(), args)
    rows, value_losses, num_clipped = [], [], 0
    for i, t in batch.mask.nonzero().tolist():
        advantage, log_ratio = batch.advantages[i, t].item(), (log_probs - batch.log_probs)[i, t].item()
        ratio = math.exp(log_ratio)
        policy_loss = -min(ratio * advantage, min(max(ratio, 0.7), 1.3) * advantage)
        value_losses.append((values[i, t] - batch.returns[i, t]) ** 2 / 2)
        if more:
            old, target = batch.values[i, t].item(), batch.returns[i, t].item()
            near = min(max(values[i, t].item(), old - 0.3), old + 0.3)
            if abs(values[i, t].item() - old) > 0.3 and (near - target) ** 2 / 2 > value_losses[-1].item():
                value_losses[-1] = torch.tensor((near - target) ** 2 / 2)
                num_clipped += 1
        entropy = -sum(x * math.log(x) for x in policy[i, t].tolist())
        is_clipped = (ratio < 0.7 and advantage < 0) or (ratio > 1.3 and advantage > 0)
        rows.append([policy_loss, value_losses[-1].item(), entropy, log_ratio**2 / 2, is_clipped])
    names = ["loss/policy_avg", "loss/value_avg", "policy/entropy_avg", "policy/approxkl_avg"]
    names.append("policy/clipfrac_avg")
    means = np.mean(rows, 0)
    assert [metrics[name].item() for name in names] == pytest.approx(means, rel=1e-4)
    assert loss.item() == pytest.approx(means[0] + means[1] - 0.2 * bool(more) * means[2], rel=1e-4)
    assert bool(num_clipped) == bool(more)
    expected = gradient(sum(value_losses) / len(value_losses), models.critic)
    torch.testing.assert_close(gradient(loss, models.critic), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("has_weight", [True, False], ids=["hidden-states", "logits"])
def test_log_probs_entropy_and_gradients_are_those_of_log_softmax(has_weight):
    """Autocast does not round them. A token with probability 0 adds nothing to the entropy."""
    torch.manual_seed(0)
    tokens, (weights, others) = torch.randint(5, (700, 1)), torch.randn(2, 700, 1)
    hidden, weight = (torch.randn(n, 4, dtype=torch.float64, requires_grad=True) for n in (700, 6))
    logits = hidden @ weight.T
    if not has_weight:
        logits = logits.detach().index_fill(1, torch.tensor(5), -1e9).requires_grad_(True)
    inputs = (hidden, weight) if has_weight else (logits,)
    log_policy = torch.log_softmax(logits / 0.6, 1)
    expected = log_policy.gather(1, tokens)
    expected_entropy = -(log_policy.exp() * log_policy).sum(1, keepdim=True)
    close = partial(torch.testing.assert_close, check_dtype=False, atol=1e-4, rtol=1e-4)
    for parts in ("log π", "entropy"), ("log π",), ("entropy",):  # that are part of the loss
        scripts = (rlhf, grpo) if parts == ("log π",) else (rlhf,)  # grpo.py's has no entropy

        def loss(log_probs, entropy, parts=parts):
            terms = {"log π": (weights * log_probs).sum(), "entropy": (others * entropy).sum()}
            return sum(terms[part] for part in parts)

        truth = torch.autograd.grad(loss(expected, expected_entropy), inputs, retain_graph=True)
        for script in scripts:
            given = (hidden.float(), weight.float()) if has_weight else (logits.float(), None)
            with torch.autocast("cpu", torch.bfloat16):
                results = script.TokenLogProbs.apply(*given, tokens, 0.6)
                log_probs, entropy = results if script is rlhf else (results, expected_entropy)
                ours = torch.autograd.grad(loss(log_probs, entropy), inputs)
            close((log_probs, entropy), (expected, expected_entropy))
            close(ours, truth)


@both
def test_padding_changes_neither_gradients_nor_metrics(script):
    """The tokens in the padding differ, and so do the widths of prompts."""
    batch, results = random_batch(script), []
    for padding in (0, STOP, 3):
        prompts = nn.functional.pad(batch.prompts[:, 1:], (padding, 0), value=padding)
        prompt_mask = nn.functional.pad(batch.prompt_mask[:, 1:], (padding, 0))
        responses = torch.where(batch.mask, batch.responses, padding)
        others = [torch.where(batch.mask, x, 9.0 * padding) if x.dim() == 2 else x for x in batch[4:]]
        changed = script.Batch(prompts, prompt_mask, responses, batch.mask, *others)
        models = new_models(script)
        loss, metrics = loss_of(script, models, changed, learning_args(script, num_minibatches=1))
        results.append((gradient(loss, models.actor), metrics))
    for other in results[1:]:
        torch.testing.assert_close(results[0], other, atol=1e-5, rtol=1e-5)


def test_the_critic_gives_values_before_each_token_and_after_the_last():
    """They are the outputs of trunk and head for the same row without padding."""
    batch, critic = random_batch(rlhf), shared.random_critic(3)
    for i, (prompt, response) in enumerate(zip(*tokens_of(batch), strict=True)):
        tokens = torch.tensor([prompt + response])
        inputs = rlhf.model_inputs(tokens, torch.ones_like(tokens, dtype=torch.bool))
        expected = critic.head(critic.trunk(**inputs).last_hidden_state.float())[0, len(prompt) - 1 :, 0]
        torch.testing.assert_close(critic(batch)[i, : len(response) + 1], expected)


# TRL


@pytest.fixture(scope="module")
def make_trainer(folder, tmp_path_factory):
    """Return a function that makes TRL's trainer of the tiny Llama, without dropout."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    prompts = datasets.Dataset.from_dict({"prompt": ["ab", "cde"] * 8})

    def make(reward, **settings):
        config = trl.GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")), per_device_train_batch_size=8, num_generations=4,
            max_completion_length=6, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
            temperature=0.7, epsilon=0.2, epsilon_high=0.28, save_strategy="no",
            model_init_kwargs={"dtype": "float32", "attention_dropout": 0.0}, **settings,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(str(folder / "llama"), reward, args=config, train_dataset=prompts)
        trainer.current_gradient_accumulation_steps = 1
        return trainer

    return make


@pytest.mark.slow
def test_grpo_loss_and_gradient_are_those_of_trl(make_trainer):
    """All of TRL's aggregations are compared, with k3 in the loss."""
    trainer = make_trainer(lambda completions, **_: [0.0] * len(completions), beta=0.1)
    trainer.args.use_bias_correction_kl = False
    model = trainer.accelerator.unwrap_model(trainer.model)
    batch = random_batch(grpo, size=8, width=6, vocabulary=len(shared.LETTERS))
    with torch.no_grad():
        current = grpo.token_log_probs(model, batch, 0.7)
    noise = 0.3 * torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(1))
    batch = batch._replace(log_probs=current + noise[0], ref_log_probs=current + noise[1])
    batch = batch._replace(learnt=torch.ones_like(batch.learnt))
    inputs = {
        "prompt_ids": batch.prompts, "prompt_mask": batch.prompt_mask.long(),
        "completion_ids": batch.responses, "completion_mask": batch.mask.long(),
        "advantages": batch.advantages, "old_per_token_logps": batch.log_probs,
        "ref_per_token_logps": batch.ref_log_probs, "num_items_in_batch": batch.mask.sum(),
    }  # fmt: skip
    losses = {"grpo": "sequence-mean", "bnpo": "token-mean", "dapo": "token-mean", "dr_grpo": "constant"}
    for loss_type, aggregation in losses.items():
        trainer.loss_type = loss_type
        args = grpo.Args(
            temperature=0.7, loss_aggregation=aggregation, kl_in="loss", kl_coef=0.1, clip_coef_high=0.28,
            batch_size=8, num_minibatches=1, max_response_length=6,
        )  # fmt: skip
        theirs = trainer._compute_loss(model, inputs)
        their_gradient = gradient(theirs, model)
        ours, _ = loss_of(grpo, SimpleNamespace(actor=model), batch, args)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(gradient(ours, model), their_gradient, atol=1e-6, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("scale", ["none", "group"])
def test_advantages_are_those_of_trl(make_trainer, scale):
    given = []

    def reward(completions, **_):
        given.append(torch.randn(len(completions), generator=torch.Generator().manual_seed(0)))
        return given[-1].tolist()

    trainer = make_trainer(reward, scale_rewards=scale)
    inputs = [{"prompt": prompt} for prompt in ("ab", "cde") for _ in range(4)]
    theirs = trainer._generate_and_score_completions(inputs)["advantages"]
    args = grpo.Args(group_size=4, scale_rewards=scale)
    torch.testing.assert_close(grpo.group_advantages(given[-1], torch.zeros(8), args), theirs)


# Sampling


def test_responses_are_sampled_from_the_policy_and_end_at_a_stop_token():
    """Log-probabilities and frequencies are those of the policy without a cache, at a temperature of 0.5."""
    torch.manual_seed(0)
    temperature = 0.5
    actor, task = random_gpt(1), make_task(["0 2 3", "2"])
    task.stop_tokens[:] = [STOP, 3]
    args = rlhf.Args(temperature=temperature, max_response_length=4, generation_batch_size=700)
    batch, sampled = rlhf.generate(actor, task, task.prompts * 1000, args)
    log_probs = rlhf.token_log_probs(actor, batch, temperature)
    torch.testing.assert_close(sampled[batch.mask], log_probs[batch.mask], atol=1e-5, rtol=1e-5)
    assert batch.prompts[:2].tolist() == [[0, 2, 3], [0, 0, 2]]
    assert batch.prompt_mask[:2].tolist() == [[True] * 3, [False, False, True]]
    lengths = batch.mask.sum(1)
    assert lengths.max() == batch.mask.shape[1] == 4
    for row, length in zip(batch.responses.tolist(), lengths.tolist(), strict=True):
        ends = [t for t, token in enumerate(row[:length], 1) if token in (STOP, 3)]
        assert ends in ([], [length])
        assert ends or length == 4
    assert torch.equal(batch.mask, torch.arange(4) < lengths.unsqueeze(1))
    for start, prompt in enumerate(("0 2 3", "2")):
        tokens = torch.tensor([Digits().encode(prompt)])
        inputs = rlhf.model_inputs(tokens, torch.ones_like(tokens, dtype=torch.bool))
        policy = (actor(**inputs).logits[0, -1] / temperature).softmax(0)
        frequency = batch.responses[start::2, 0].bincount(minlength=4) / 1000
        assert (frequency - policy).abs().max() < 0.06
    assert not torch.equal(batch.responses[:700], batch.responses[700:1400])


def test_texts_get_a_stop_token_unless_they_are_cut_off():
    """`decode` gives back the texts, without the stop token."""
    task, args = make_task(["2 3", "3"]), rlhf.Args(max_response_length=4)
    batch = rlhf.tokenize(task, task.prompts, ["0 2", "2 2 2 2 2"], args)
    assert batch.prompts.tolist() == [[2, 3], [0, 3]]
    assert batch.prompt_mask.tolist() == [[True, True], [False, True]]
    assert batch.responses.tolist() == [[0, 2, STOP, 0], [2, 2, 2, 2]]
    assert batch.mask.tolist() == [[True, True, True, False], [True] * 4]
    assert rlhf.decode(task, task.prompts, batch) == [" 0 2", " 2 2 2 2"]


@pytest.mark.parametrize(
    ("name", "precision"), [("llama", "float32"), ("gpt2", "float32"), ("llama", "bfloat16")]
)
def test_generation_by_a_cuda_graph_writes_the_same_responses(name, precision, folder, monkeypatch):
    """On a CPU, the step that a graph would replay is computed each time."""
    args = real_args(grpo, folder, name, bfloat16=precision == "bfloat16", max_response_length=18)
    models, task = shared.pretrained(grpo, replace(args, kl_coef=0.0))
    actor, rows = models.actor.eval(), task.prompts * 8
    for p in actor.parameters():
        p.data *= 3 if p.dim() > 1 else 1  # far from uniform
    usual, log_probs = grpo.generate(actor, task, rows, replace(args, temperature=0.0))
    monkeypatch.setattr(grpo, "record", lambda step: step)
    assert grpo.can_use_graphs(actor, replace(args, device="cuda"))
    assert not grpo.can_use_graphs(actor, replace(args, device="cuda", cuda_graphs=False))
    monkeypatch.setattr(grpo, "can_use_graphs", lambda *given: True)
    greedy, by_graph = grpo.generate(actor, task, rows, replace(args, temperature=0.0))
    if precision == "float32":
        assert tokens_of(greedy) == tokens_of(usual)
        torch.testing.assert_close(by_graph * greedy.mask, log_probs * usual.mask, atol=1e-4, rtol=1e-4)
    torch.manual_seed(1)
    batch, sampled = grpo.generate(actor, task, rows, args)
    learnt = grpo.all_log_probs(actor, batch, args)
    assert ((sampled - learnt) * batch.mask).abs().max() < (1e-4 if precision == "float32" else 0.1)
    assert torch.equal(batch.mask, torch.arange(batch.mask.shape[1]) < batch.mask.sum(1, keepdim=True))
    lengths = batch.mask.sum(1)
    assert lengths.min() < 9  # rows end at different times
    assert lengths.max() > 9
    for row in tokens_of(batch)[1]:
        assert STOP not in row[:-1]


def test_responses_that_have_ended_are_dropped_from_generation(folder):
    """The other responses do not change: their log π is that of learning."""
    args = real_args(grpo, folder, max_response_length=16)
    models, task = shared.pretrained(grpo, args)
    task.stop_tokens[:], sizes = range(1, 16), []
    models.actor.eval().register_forward_pre_hook(
        lambda *given: sizes.append(len(given[2]["input_ids"])), with_kwargs=True
    )
    batch, sampled = grpo.generate(models.actor, task, task.prompts * 16, args)
    steps = len(sizes)
    log_probs = grpo.all_log_probs(models.actor, batch, args)
    torch.testing.assert_close(sampled[batch.mask], log_probs[batch.mask], atol=1e-4, rtol=1e-4)
    assert sizes[0] == 128
    assert sizes[steps - 1] <= 16
    ended = torch.isin(batch.responses, torch.arange(1, 16)) & batch.mask
    assert torch.equal(ended.any(1), ended.gather(1, batch.mask.sum(1, keepdim=True) - 1).squeeze(1))


def test_greedy_responses_are_those_of_transformers(folder):
    args = real_args(rlhf, folder)
    models, task = shared.pretrained(rlhf, args)
    batch, _ = rlhf.generate(models.eval().actor, task, task.prompts, replace(args, temperature=0.0))
    for prompt, response in zip(*tokens_of(batch), strict=True):
        inputs = torch.tensor([prompt])
        more = {"attention_mask": torch.ones_like(inputs), "pad_token_id": STOP}
        theirs = models.actor.generate(inputs, do_sample=False, max_new_tokens=8, **more)
        assert theirs[0, len(prompt) :].tolist() == response


@both
def test_each_stop_token_of_a_chat_model_ends_a_response(script, folder, tmp_path):
    """The model's generation configuration names them. Prompts of messages are written by its template."""
    shutil.copytree(folder / "llama", tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    args = real_args(script, folder, model=str(tmp_path))
    models, task = shared.pretrained(script, args)
    assert sorted(task.stop_tokens) == [STOP, 5, 9]
    rows = task.prompts * 40
    batch, _ = script.generate(models.actor, task, rows, args)
    prompts, responses = tokens_of(batch)
    assert "".join(shared.LETTERS[token] for token in prompts[7]) == "abz"
    assert [shared.LETTERS[token] for token in prompts[1]] == ["a", "a"]
    assert not any({STOP, 5, 9} & set(row[:-1]) for row in responses)
    last = [row[-1] for row in responses]
    assert {STOP, 5, 9} < set(last)
    if script is rlhf:
        _, rewards = script.score(models, task, rows, batch, replace(args, missing_eos_penalty=9.0))
        assert rewards["missing_eos"].tolist() == [-9.0 * (token not in (STOP, 5, 9)) for token in last]
    texts = script.decode(task, rows, batch)
    ended = [row[:-1] if row[-1] in (STOP, 5, 9) else row for row in responses]
    spelled = ["".join(shared.LETTERS[token] for token in row if token > STOP) for row in ended]
    assert [text.replace(" ", "") for text in texts] == spelled


def test_a_last_message_of_the_assistant_is_continued(folder):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role[0] + message.content + 'x' }}{% endfor %}"
        "{% if add_generation_prompt %}a{% endif %}"
    )
    question = {"role": "user", "content": "bc"}
    texts = []
    for messages in ([question], [question, {"role": "assistant", "content": "de"}]):
        tokens = rlhf.encode(tokenizer, {"prompt": messages})
        texts.append("".join(shared.LETTERS[token] for token in tokens))
    assert texts == ["ubcxa", "ubcxade"]
    tokenizer.chat_template = "{{ 'yes' if enable_thinking else 'no' }}"  # arguments of a row's template
    for thinks, text in ((True, "yes"), (False, "no")):
        row = {"prompt": [question], "chat_template_kwargs": {"enable_thinking": thinks}}
        assert "".join(shared.LETTERS[token] for token in rlhf.encode(tokenizer, row)) == text


@pytest.mark.parametrize(("before", "after"), [([], []), ([0], []), ([], [1]), ([0], [1]), ([0, 5], [6, 1])])
def test_a_prompt_has_the_start_tokens_of_its_tokenizer_once_and_not_its_end_tokens(before, after):
    """The text may begin with the start tokens, too, and it may end with an end token of its own."""

    def encode(text, add_special_tokens=True):
        tokens = [int(letter) for letter in text]
        return [*before, *tokens, *after] if add_special_tokens else tokens

    tokenizer = SimpleNamespace(encode=encode)
    for text, tokens in (("23", [2, 3]), ("231", [2, 3, 1]), ("1", [1]), ("2323", [2, 3, 2, 3])):
        assert rlhf.encode(tokenizer, {"prompt": text}) == before + tokens
        assert rlhf.encode(tokenizer, {"prompt": "".join(map(str, before)) + text}) == before + tokens
    assert rlhf.encode(tokenizer, {"prompt": ""}) == (before + after)[:1]


def test_sampling_that_disagrees_with_learning_stops_the_run():
    """A model without a cache forgets the prompt in generation."""
    difference, mask = torch.tensor([[0.1, -0.3, 9.0]]), torch.tensor([[True, True, False]])
    metrics = rlhf.check_sampling(difference, mask)
    assert list(metrics.values()) == pytest.approx([0.2, 0.3])
    with pytest.raises(FloatingPointError, match="sampling"):
        rlhf.check_sampling(5 * difference, mask)


# Collecting and learning


def test_all_prompts_are_used_before_any_comes_again():
    """The seed decides their order, wherever a run starts."""
    prompts = [{"prompt": str(i)} for i in range(5)]
    endless = [row["prompt"] for row in rlhf.next_prompts(prompts, 0, 23, seed=1)]
    for start in range(0, 20, 5):
        assert sorted(endless[start : start + 5]) == list("01234")
    assert endless[:5] != endless[5:10]
    assert [row["prompt"] for row in rlhf.next_prompts(prompts, 7, 9, seed=1)] == endless[7:16]
    assert [row["prompt"] for row in rlhf.next_prompts(prompts, 0, 23, seed=2)] != endless


@pytest.mark.parametrize(("rows", "tokens"), [(3, 10**6), (100, 24), (100, 1)])
def test_micro_batches_keep_their_limits_and_leave_out_only_padding(rows, tokens):
    """Each row is in one part, and each part has a row at least."""
    batch, seen = random_batch(rlhf, size=23, width=6), []
    args = rlhf.Args(micro_batch_size=rows, micro_batch_tokens=tokens)
    chosen = torch.tensor([20, 1, 2, 3, 8, 9, 10, 11, 12, 22])
    for numbers, part in rlhf.micro_batches(batch, chosen, rlhf.read_lengths(batch), args):
        seen += numbers.tolist()
        assert len(numbers) == 1 or (
            len(numbers) <= rows and part.mask.numel() + part.prompts.numel() <= tokens
        )
        assert tokens_of(part) == tokens_of(shared.rows_of(batch, numbers))
        assert part.mask.any(0).all()
        assert part.prompt_mask.any(0).all()
        assert kept(part.returns, part.mask) == kept(batch.returns[numbers], batch.mask[numbers])
    assert sorted(seen) == sorted(chosen.tolist())
    assert tokens == 1 or len(seen) < 23


@both
def test_collected_advantages_and_metrics_are_those_of_a_loop_over_responses(script):
    """The update after that starts at a ratio of 1: log π is that of the policy that acts."""
    torch.manual_seed(0)
    models, temperature = new_models(script), 0.6
    functions = {"first": first_digit, "length": prompt_and_length}
    task = make_task(["2 3", "0 2 2"], script, **functions)
    more = {"group_size": 4, "mask_truncated": True}
    if script is rlhf:
        more = {"missing_eos_penalty": 0.7, "gae_lambda": 0.9}
    settings = {"batch_size": 80, "micro_batch_size": 7, "max_response_length": 3, "temperature": temperature}
    args = script.Args(kl_coef=0.25, **settings, **more)
    batch, metrics, samples = script.collect(models, task, args)
    with torch.no_grad():
        log_probs = script.token_log_probs(models.actor, batch, temperature)
        ref_log_probs = script.token_log_probs(models.reference, batch, temperature)
    torch.testing.assert_close(batch.log_probs[batch.mask], log_probs[batch.mask])
    prompts, responses = tokens_of(batch)
    texts = ["".join(f" {token}" for token in row if token != STOP) for row in responses]
    rows = [{"prompt": " ".join(map(str, prompt))} for prompt in prompts]
    assert (samples["row"], samples["response"]) == (rows, texts)
    assert {row["prompt"] for row in rows} == {"2 3", "0 2 2"}
    rewards = {"first": first_digit(rows, texts), "length": prompt_and_length(rows, texts)}
    stops = [row[-1] == STOP for row in responses]
    lengths = list(map(len, responses))
    if script is rlhf:
        with torch.no_grad():
            values, outputs = models.critic(batch), models.reward_model(batch)
        rewards["missing_eos"] = [0.0 if stop else -0.7 for stop in stops]
        rewards["reward_model"] = [outputs[i, length].item() for i, length in enumerate(lengths)]
    for name, expected in rewards.items():
        assert samples[name] == pytest.approx(expected, abs=1e-5)
        assert metrics[f"rewards/{name}"] == pytest.approx(np.mean(expected), abs=1e-5)
    scores = np.sum(list(rewards.values()), 0)
    token_kls = kept(log_probs - ref_log_probs, batch.mask)
    kl = np.array([sum(row) for row in token_kls])
    if script is rlhf:
        advantages, returns = [], []
        for row, score, v in zip(token_kls, scores, kept(values[:, :-1], batch.mask), strict=True):
            token_rewards, v = [-0.25 * x for x in row], [*v, 0.0]
            token_rewards[-1] += score
            deltas = [reward + v[t + 1] - v[t] for t, reward in enumerate(token_rewards)]
            for t in range(len(deltas)):
                advantages.append(sum(0.9**k * delta for k, delta in enumerate(deltas[t:])))
                returns.append(advantages[-1] + v[t])
        whitened = (np.array(advantages) - np.mean(advantages)) / np.std(advantages)
        np.testing.assert_allclose(batch.advantages[batch.mask], whitened, atol=1e-4)
        np.testing.assert_allclose(batch.returns[batch.mask], returns, atol=1e-4)
        special = {
            "objective/rlhf_reward": (scores - 0.25 * kl).mean(),
            "val/explained_variance": 1 - np.var(advantages) / np.var(returns),
        }  # fmt: skip
    else:
        groups = (scores - 0.25 * kl).reshape(-1, 4)
        of_scores, others = scores.reshape(-1, 4).std(1, ddof=1), groups.std(1, ddof=1)
        shares = np.minimum(of_scores / np.maximum(others, 1e-12), 1)
        deviations = shares * of_scores + (1 - shares) * np.maximum(others, 1) + 1e-4
        flat_groups = np.ptp(scores.reshape(-1, 4), 1) < 1e-6
        expected = (groups - groups.mean(1, keepdims=True)) / deviations[:, None]
        np.testing.assert_allclose(batch.advantages, expected.flatten(), atol=1e-4)
        assert all(len(set(map(tuple, prompts[i : i + 4]))) == 1 for i in range(0, 80, 4))
        torch.testing.assert_close(batch.ref_log_probs[batch.mask], ref_log_probs[batch.mask])
        assert batch.learnt.tolist() == stops
        special = {"frac_reward_zero_std": flat_groups.mean()}
    expected = special | {
        "reward": scores.mean(), "objective/kl": kl.mean(), "completions/mean_length": np.mean(lengths),
        "completions/clipped_ratio": 1 - np.mean(stops), "entropy": -log_probs[batch.mask].mean().item(),
    }  # fmt: skip
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert samples["reward"] == pytest.approx(scores, abs=1e-5)
    average, largest = (metrics[f"sampling/sampling_logp_difference/{name}"] for name in ("mean", "max"))
    assert 0 < average < largest < 1e-4
    assert 0 < np.mean(stops) < 1
    optimizer = torch.optim.SGD(shared.groups_of(script, models), 0.0)
    assert shared.update(script, models, optimizer, batch, args)["policy/approxkl_avg"] < 1e-9


def test_advantages_have_no_kl_if_it_is_in_the_loss_or_without_a_reference():
    task = make_task(["2 3"], grpo, first=first_digit)
    args = grpo.Args(batch_size=32, group_size=2, max_response_length=3, scale_rewards="none", kl_coef=0.5)
    for models, kl_in in ((new_models(grpo), "loss"), (grpo.Models(random_gpt(1), None), "reward")):
        batch, metrics, samples = grpo.collect(models, task, replace(args, kl_in=kl_in))
        pairs = torch.tensor(samples["first"]).view(-1, 2)
        half = (pairs[:, 0] - pairs[:, 1]) / 2
        torch.testing.assert_close(batch.advantages, torch.stack([half, -half], 1).flatten())
        assert ("objective/kl" in metrics) == (models.reference is not None)
        assert torch.equal(batch.log_probs, batch.ref_log_probs) == (models.reference is None)


def learning_args(script, **changes):
    """Return settings with batches of 16 and all terms of the loss."""
    extra = {} if script is rlhf else {"kl_in": "loss", "kl_coef": BETA}
    return script.Args(**{"batch_size": 16, "num_minibatches": 2, **extra, **changes})


@both
@pytest.mark.parametrize("limit", [0.01, 100.0])
def test_an_update_is_adam_with_the_gradient_of_each_network_clipped(script, limit):
    """Two epochs of one minibatch are two steps. The size of micro-batches changes nothing."""
    args = learning_args(script, num_minibatches=1, max_grad_norm=limit, temperature=0.7, micro_batch_size=3)
    if script is grpo:
        args.loss_aggregation = "token-mean" if limit < 1 else "sequence-mean"
    batch, models, direct = random_batch(script), new_models(script), new_models(script)
    optimizers = [torch.optim.Adam(shared.groups_of(script, x), 0.01, eps=1e-3) for x in (models, direct)]
    metrics = shared.update(script, models, optimizers[0], batch, args)
    norms, seen = [], []
    for _ in range(2):
        loss, step_metrics = loss_of(script, direct, batch, args)
        optimizers[1].zero_grad()
        loss.backward()
        for network in (direct.actor, direct.critic) if script is rlhf else (direct.actor,):
            gradients = [p.grad for p in network.parameters() if p.grad is not None]
            norms.append(flat(gradients).norm().item())
            for x in gradients:
                x *= min(1, limit / norms[-1])
        optimizers[1].step()
        seen.append({name: value.item() for name, value in step_metrics.items()})
    assert 0.01 < min(norms) <= max(norms) < 100
    assert all(p.grad is None for p in models.parameters())  # none takes memory in generation
    torch.testing.assert_close(flat(models.parameters()), flat(direct.parameters()), atol=1e-5, rtol=1e-4)
    names = ["grad_norm", "critic_grad_norm"] if script is rlhf else ["grad_norm"]
    logged, count = [metrics.pop(name) for name in names], len(names)
    assert logged == pytest.approx([np.mean(norms[i::count]) for i in range(count)], rel=1e-4)
    assert metrics == pytest.approx({name: (seen[0][name] + seen[1][name]) / 2 for name in metrics}, rel=1e-4)


@both
def test_each_epoch_has_each_response_once_in_a_new_order(script):
    """The gradients and metrics of an epoch's minibatches have the mean of those of the whole batch."""
    batch = shared.rows_of(random_batch(script), torch.arange(12))
    batch = batch._replace(mask=torch.ones_like(batch.mask))  # so that minibatches have as many tokens
    models, gradients, metrics = new_models(script), [], []
    learnt = list(models.actor.parameters())
    optimizer = torch.optim.SGD(shared.groups_of(script, models), 0.0)
    optimizer.register_step_pre_hook(lambda *_: gradients.append(flat(p.grad for p in learnt)))
    for count in (1, 3):
        args = learning_args(script, batch_size=12, num_minibatches=count, max_grad_norm=1e9)
        metrics.append(shared.update(script, models, optimizer, batch, args))
    norms = "grad_norm", "critic_grad_norm"  # are not linear
    expected = {name: value for name, value in metrics[0].items() if name not in norms}
    assert {name: metrics[1][name] for name in expected} == pytest.approx(expected, rel=1e-3)
    whole, again, *parts = gradients
    assert len(parts) == 6
    for mean in (again, sum(parts[:3]) / 3, sum(parts[3:]) / 3):
        torch.testing.assert_close(mean, whole, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(parts[0], parts[3])


def test_kl_coefficient_is_adapted_and_saved(folder, tmp_path, monkeypatch):
    """It changes by a tenth of the relative error, which counts up to 20%."""
    args = rlhf.Args(kl_coef=2.0, kl_target=5.0)
    for kl, factor in ((5.0, 1.0), (5.5, 1.01), (4.5, 0.99), (50.0, 1.02), (-1.0, 0.98)):
        assert rlhf.adapted_kl_coef(kl, args) == pytest.approx(2 * factor)
    assert rlhf.adapted_kl_coef(50.0, replace(args, kl_target=None)) == 2
    monkeypatch.chdir(tmp_path)
    path = rlhf.train(real_args(rlhf, folder, kl_target=0.001, total_episodes=128))
    metrics = curves(path.parent)
    saved, _ = rlhf.load_checkpoint(path)
    coefficients = [*metrics["kl_coef"].values(), saved.kl_coef]
    for i, kl in enumerate(metrics["objective/kl"].values()):
        expected = rlhf.adapted_kl_coef(kl, replace(args, kl_coef=coefficients[i], kl_target=0.001))
        assert coefficients[i + 1] == pytest.approx(expected)


@pytest.mark.slow
@both
def test_tensors_on_the_device_never_meet_those_on_the_cpu(script, tmp_path, monkeypatch):
    """The built-in task and its evaluations run on a stand-in for a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    fit = rlhf.fit  # the supervised model and the reward model learn in two steps
    monkeypatch.setattr(rlhf, "fit", lambda network, loss, _, rate, name: fit(network, loss, 2, rate, name))
    monkeypatch.setattr(grpo, "learn_to_write", partial(grpo.learn_to_write, steps=2))
    compare = rlhf.compare_responses
    monkeypatch.setattr(
        rlhf, "compare_responses", lambda models, task, _, args: compare(models, task, 64, args)
    )

    def reduce(x):  # as NCCL does
        assert x.device.type == "mps"
        return x

    monkeypatch.setattr(script, "sum_over_processes", reduce)
    with shared.OneDevice():
        script.train(script.Args(device="mps", total_episodes=64, batch_size=64, kl_coef=0.1))
        with pytest.raises(RuntimeError, match="mps"):
            torch.ones(2, device="mps") + torch.ones(2)


# Models of transformers


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with tiny models and prompts."""
    folder = tmp_path_factory.mktemp("models")
    shared.write_models(folder)
    return folder


def test_the_built_in_gpt_is_gpt2_of_transformers():
    """With the same weights, log-probabilities and samples are the same."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11, n_embd=16, n_layer=2, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0,
    )  # fmt: skip
    theirs, ours = transformers.GPT2LMHeadModel(config).double().eval(), random_gpt(1, vocabulary=11)
    names = {
        "transformer.": "", "wte": "tokens", "wpe": "positions", "ln_f": "norm", "h.": "blocks.",
        "ln_": "norm", "attn.c_attn": "qkv", "attn.c_proj": "projection", "mlp.c_fc": "hidden",
        "mlp.c_proj": "output",
    }  # fmt: skip
    for name, weight in theirs.named_parameters():
        transposed = name.endswith("weight") and ".c_" in name
        for their_part, our_part in names.items():
            name = name.replace(their_part, our_part)
        own = ours.get_parameter(name).detach()
        weight.data.copy_(own.T if transposed else own)
    batch = to_responses([2, 3], [[0, 2, STOP], [3, 3, 0, 0, 2, STOP]], padding=3)
    own, other = (rlhf.token_log_probs(model, batch, 0.7) for model in (ours, theirs))
    torch.testing.assert_close(own[batch.mask], other[batch.mask])
    task, generated = make_task(["2 3", "7 8 9 10"]), []
    task.stop_tokens.clear()
    for model in (ours, theirs):
        torch.manual_seed(0)
        generated.append(rlhf.generate(model, task, task.prompts, rlhf.Args(max_response_length=6))[0])
    assert all(torch.equal(own, other) for own, other in zip(*generated, strict=True))


VARIANTS = [
    (rlhf, "llama", {"bfloat16": True}),
    pytest.param(rlhf, "gpt2", {"lora_rank": 2, "bfloat16": True}, marks=pytest.mark.slow),
    (grpo, "llama", {"lora_rank": 2, "kl_coef": 0.0}),
    (grpo, "gpt2", {"gradient_checkpointing": True}),
]


@pytest.mark.parametrize(("script", "name", "changes"), VARIANTS, ids=label)
def test_a_model_of_transformers_learns_and_can_be_loaded(
    script, name, changes, folder, tmp_path, monkeypatch
):
    """At first, the actor is the reference bit for bit."""
    transformers = pytest.importorskip("transformers")
    if "lora_rank" in changes:
        pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    more = {"reward_model": str(folder / f"{name}-reward")} if script is rlhf else {}
    path = script.train(real_args(script, folder, name, **changes, **more))
    metrics = curves(path.parent)
    if script is rlhf or "kl_coef" not in changes:
        kl = metrics["objective/kl"]
        assert kl[0] == 0
        assert abs(kl[64]) > 1e-4
    mismatch = metrics["sampling/sampling_logp_difference/max"]
    assert max(mismatch.values()) < (0.1 if "bfloat16" in changes else 1e-4)  # there is no dropout
    assert metrics["lr"] == pytest.approx({0: 1e-3, 32: 1e-3 * 2 / 3, 64: 1e-3 / 3})
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
        for place in (folder / name, path.parent / "model")
    )
    assert not torch.equal(before(**inputs).logits, after(**inputs).logits)
    learnt = load(path)["weights"]
    if "lora_rank" not in changes:
        for key, weight in after.named_parameters():
            assert torch.equal(weight, learnt[f"actor.{key}"])
        moved = (flat(after.parameters()) - flat(before.parameters())).abs().max().item()
        assert moved == pytest.approx(4e-3, rel=0.3)  # steps of Adam are as large as the learning rate
        if script is rlhf:  # the critic has a learning rate of its own
            judge = transformers.AutoModelForSequenceClassification.from_pretrained(more["reward_model"])
            critic = flat(learnt[f"critic.trunk.{key}"] for key, _ in judge.base_model.named_parameters())
            moved = (critic - flat(judge.base_model.parameters())).abs().max().item()
            assert moved == pytest.approx(4e-4, rel=0.3)
    else:
        assert all("lora" in key or "head" in key for key in learnt)
    assert transformers.AutoTokenizer.from_pretrained(path.parent / "model").get_vocab()


HEADS = [  # whether logits are linear in the hidden states
    (rlhf, "llama", {}, True),
    (rlhf, "gpt2", {"lora_rank": 2}, True),
    (rlhf, "Gemma2", {"final_logit_softcapping": 3.0, "head_dim": 16}, False),
    (rlhf, "Phi", {}, False),  # its last layer has a bias
    (grpo, "llama", {}, True),
    (grpo, "Cohere", {"logit_scale": 0.5}, False),
]


@pytest.mark.parametrize(("script", "name", "changes", "linear"), HEADS, ids=label)
def test_log_probs_are_those_of_the_logits(script, name, changes, linear, folder, tmp_path, monkeypatch):
    """So are their gradients. On a GPU, logits that are linear in the hidden states are computed in parts.

    Here, nothing is moved to the GPU.
    """
    transformers = pytest.importorskip("transformers")
    if changes == {"lora_rank": 2}:
        pytest.importorskip("peft")
    if name[0].isupper():
        config = getattr(transformers, f"{name}Config")(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=32, vocab_size=len(shared.LETTERS),
            eos_token_id=STOP, bos_token_id=STOP, pad_token_id=STOP, **changes,
        )  # fmt: skip
        torch.manual_seed(0)
        getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path / name)
        transformers.AutoTokenizer.from_pretrained(folder / "llama").save_pretrained(tmp_path / name)
        args = real_args(script, folder, tmp_path / name)
    else:
        args = real_args(script, folder, name, **changes)
    assert not shared.pretrained(script, args)[0].actor.logits_in_parts
    has_linear_head = script.has_linear_head
    monkeypatch.setattr(script, "has_linear_head", lambda model, _: has_linear_head(model, args))
    monkeypatch.setattr(script.Models, "to", lambda self, device: self)
    for check in ("check_actor", "check_critic"):  # they need a GPU
        monkeypatch.setattr(script, check, lambda *given: None, raising=False)
    models, _ = shared.pretrained(script, replace(args, device="cuda"))
    model = models.actor
    assert model.logits_in_parts == models.reference.logits_in_parts == linear
    parameters = [p for p in model.parameters() if p.requires_grad]
    for p in parameters:
        p.data *= 3 if p.dim() > 1 else 1  # far from uniform
    batch = random_batch(script, size=5, width=6, vocabulary=len(shared.LETTERS))
    weights = torch.randn(5, 6, generator=torch.Generator().manual_seed(0)) * batch.mask
    whole = []  # logits of all tokens at once
    hook = model.get_output_embeddings().register_forward_hook(lambda *_: whole.append(0))
    log_probs = script.token_log_probs(model, batch, 0.7)
    ours = torch.autograd.grad((weights * log_probs).sum(), parameters)
    hook.remove()
    assert bool(whole) != linear
    tokens = torch.cat([batch.prompts, batch.responses], 1)
    mask = torch.cat([batch.prompt_mask, batch.mask], 1)
    logits = model(**script.model_inputs(tokens, mask)).logits[:, -7:-1]
    expected = torch.log_softmax(logits / 0.7, 2).gather(2, batch.responses.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(log_probs[batch.mask], expected[batch.mask], atol=1e-5, rtol=1e-4)
    truth = torch.autograd.grad((weights * expected).sum(), parameters)
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(("name", "lora_rank"), [("llama", 0), ("gpt2", 2)])
def test_gradient_checkpointing_computes_layers_twice_and_the_same_gradients(name, lora_rank, folder):
    """Layers are computed again in the backward pass, without dropout."""
    if lora_rank:
        pytest.importorskip("peft")
    batch, gradients, calls = to_responses([4, 5], [[6, 7, 1], [8, 1]]), [], []
    for checkpointing in (False, True):
        torch.manual_seed(1)
        args = real_args(rlhf, folder, name, gradient_checkpointing=checkpointing, lora_rank=lora_rank)
        models, _ = shared.pretrained(rlhf, args)
        rlhf.connect(models, args)
        layers = [module for module in models.actor.modules() if type(module).__name__.endswith("MLP")]
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: calls.append(0))
        calls.clear()
        rlhf.token_log_probs(models.actor, batch, 1.0)[0].sum().backward()
        assert len(calls) == (4 if checkpointing else 2) == len(layers) * (1 + checkpointing)
        gradients.append(flat(p.grad for p in models.actor.parameters() if p.requires_grad))
    assert torch.equal(*gradients)
    assert gradients[0].any()


def test_bfloat16_keeps_trained_weights_in_float32_and_rounds_frozen_ones(folder):
    transformers = pytest.importorskip("transformers")
    file = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32)
    args = real_args(rlhf, folder, bfloat16=True, reward_model=str(folder / "llama-reward"))
    for script, settings in ((grpo, real_args(grpo, folder, bfloat16=True)), (rlhf, args)):
        models, _ = shared.pretrained(script, settings)
        assert all(map(torch.equal, models.actor.parameters(), file.parameters()))
        assert all(x.requires_grad for x in models.actor.parameters())
        assert torch.bfloat16 in {x.dtype for x in models.reference.parameters()}
        assert {x.dtype for x in models.reference.buffers()} == {torch.float32}  # for positions
        assert not any(x.requires_grad for x in models.reference.parameters())
    assert torch.bfloat16 in {x.dtype for x in models.reward_model.trunk.parameters()}
    assert {x.dtype for x in models.critic.parameters()} == {torch.float32}
    assert all(x.requires_grad for x in models.critic.parameters())
    assert not any(x.requires_grad for x in models.reward_model.parameters())
    batch, tokens = to_responses([4, 5], [[6, 7, 1], [8, 1]]), torch.tensor([[3, 4, 5]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(models.critic(batch), models.reward_model(batch), atol=1e-6, rtol=1e-6)
        logits = models.actor(**rlhf.model_inputs(tokens, torch.ones_like(tokens, dtype=torch.bool))).logits
    assert not torch.equal(logits, logits.bfloat16().float())


def test_lora_stores_the_frozen_weights_once_and_trains_few(folder):
    pytest.importorskip("peft")
    models, _ = shared.pretrained(rlhf, real_args(rlhf, folder, lora_rank=2))
    trained = sum(p.numel() for p in models.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in models.reference.parameters())
    assert sum(p.numel() for p in models.parameters()) == frozen + trained
    assert trained < 0.5 * frozen


def test_the_critic_starts_from_the_reward_model(folder):
    """Without one, its values are 0 at first. Autocast does not round them to bfloat16."""
    batch = to_responses([4, 5], [[6, 7, 1], [8, 1]])
    models, _ = shared.pretrained(rlhf, real_args(rlhf, folder, reward_model=str(folder / "llama-reward")))
    assert models.reward_model(batch).any()
    torch.testing.assert_close(models.critic(batch), models.reward_model(batch))
    assert not {id(p) for p in models.critic.parameters()} & {id(p) for p in models.reward_model.parameters()}
    models, _ = shared.pretrained(rlhf, real_args(rlhf, folder))
    assert models.reward_model is None
    assert not models.critic(batch).any()
    nn.init.constant_(models.critic.head.weight, 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        values = models.critic(batch)
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_an_adapter_can_be_merged_from_another_folder(folder, tmp_path, monkeypatch):
    """In training, a relative path named the model."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    shutil.copytree(folder / "llama", tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    path = grpo.train(real_args(grpo, folder, model="llama", lora_rank=2)).resolve()
    monkeypatch.chdir(folder)
    merged = peft.AutoPeftModelForCausalLM.from_pretrained(path.parent / "model").merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    models, _ = shared.pretrained(grpo, real_args(grpo, folder, lora_rank=2))
    models.load_state_dict(load(path)["weights"], strict=False)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    torch.testing.assert_close(again(**inputs).logits, models.actor(**inputs).logits, atol=1e-5, rtol=1e-5)


def test_the_documented_reward_function_reads_the_score_after_the_end_token(folder, tmp_path):
    """The function is in docs/language_models.md. Its scores do not depend on padding."""
    transformers = pytest.importorskip("transformers")
    (text,) = (
        block.partition("```")[0]
        for block in (ROOT / "docs/language_models.md").read_text().split("```python\n")
        if "AutoModelForSequenceClassification" in block.partition("```")[0]
    )
    args = real_args(rlhf, folder, "gpt2", reward_model=str(folder / "gpt2-reward"))
    models, task = shared.pretrained(rlhf, args)
    rows, texts = task.prompts[:7], ["a", "bcd", "", "efghi", "jj", "k", "lmno"]
    expected = rlhf.last_output(models.reward_model, rlhf.tokenize(task, rows, texts, args)).squeeze(1)
    for side, pad_token in (("right", None), ("left", "<stop>"), ("right", "<unknown>")):
        shutil.copytree(folder / "gpt2-reward", tmp_path / side, dirs_exist_ok=True)
        tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / side)
        tokenizer.padding_side, tokenizer.pad_token = side, pad_token
        tokenizer.save_pretrained(tmp_path / side)
        names = {**vars(transformers), "torch": torch, "folder": tmp_path / side}
        names["AutoTokenizer"] = transformers.AutoTokenizer
        names["AutoModelForSequenceClassification"] = transformers.AutoModelForSequenceClassification
        exec(text, names)
        torch.testing.assert_close(names["reward"](rows, texts), expected, atol=1e-5, rtol=1e-5)


# Runs: rewards, evaluation, checkpoints


def words(script, args):
    """Return the settings that are not the defaults as words of a command."""
    changed = {name: value for name, value in vars(args).items() if value != getattr(script.PRETRAINED, name)}
    functions = changed.pop("reward_function")
    return [*flags(**changed), "--reward-function", *functions]


def command(script, where, *words):
    """Call a script's `main` in a folder."""
    where.mkdir(exist_ok=True)
    return call(SimpleNamespace(script=script, file=f"{script.__name__}.py"), where, *words)


@both
def test_rewards_and_completions_are_logged_and_evaluation_is_greedy(script, folder, tmp_path, monkeypatch):
    """Reward functions get the rows of the prompts' file."""
    monkeypatch.chdir(tmp_path)
    shared.CALLS.clear()
    args = real_args(script, folder, learning_rate=0.0, total_episodes=64, eval_every=1)
    path = script.train(args)
    models, task = shared.pretrained(script, args)
    train_rows, test_rows = task.prompts, task.eval_prompts
    metrics, lines = curves(path.parent), completions(path)
    collected = [c for c in shared.CALLS if len(c[0]) == 32]
    evaluated = [c for c in shared.CALLS if len(c[0]) == 3]
    assert (len(collected), len(evaluated)) == (2, 3)
    names = args.reward_function
    for i, (rows, responses) in enumerate(collected):
        assert all(row in train_rows for row in rows)
        part = [line for line in lines if line["episodes"] == 32 * i]
        assert [line["row"] for line in part] == rows
        assert [line["response"] for line in part] == responses
        rewards = shared.vowels(rows, responses), shared.wanted(rows, responses)
        for name, expected in zip(names, rewards, strict=True):
            assert [line[name] for line in part] == expected
            assert metrics[f"rewards/{name}"][32 * i] == pytest.approx(np.mean(expected))
        assert metrics["reward"][32 * i] == pytest.approx(np.sum(rewards) / 32)
    assert len(lines) == 64
    batch, _ = script.generate(models.eval().actor, task, test_rows, replace(args, temperature=0.0))
    greedy = script.decode(task, test_rows, batch)
    for rows, responses in evaluated:
        assert (rows, responses) == (test_rows, greedy)
    for name, function in zip(names, (shared.vowels, shared.wanted), strict=True):
        mean = np.mean(function(test_rows, greedy))
        assert metrics[f"eval/{name}"] == pytest.approx({0: mean, 32: mean, 64: mean})
    best = json.loads((path.with_name("best") / "evaluation.json").read_text())
    assert best["episodes"] == 0  # nothing is learnt, and the first of equals is kept


def test_a_reward_function_may_change_its_rows_and_responses():
    """It gets copies: prompts and the arguments of other functions stay the same."""

    def careless(rows, responses):
        for row in rows:
            row["prompt"] = "3 3 3 3"
        responses.clear()
        return [1.0, 1.0]

    task = make_task(["2 3", "2"], careless=careless, length=prompt_and_length)
    batch = rlhf.tokenize(task, task.prompts, ["0", "2 2"], rlhf.Args())
    rewards = rlhf.call_functions(task, task.prompts, batch)
    assert task.prompts == make_task(["2 3", "2"]).prompts
    assert rewards["length"].tolist() == prompt_and_length(task.prompts, [" 0", " 2 2"])


@both
def test_reward_functions_may_be_those_of_trl_and_return_none(script, folder, tmp_path, monkeypatch):
    """None is no reward, and other functions still count. It is an error if all functions return None."""
    monkeypatch.chdir(tmp_path)
    names = "language_helpers:trl_reward", "language_helpers:with_tokens"
    path = script.train(real_args(script, folder, reward_function=names, total_episodes=64, eval_every=1))
    metrics, lines = curves(path.parent), completions(path)
    for episodes in (0, 32):
        part = [line[names[0]] for line in lines if line["episodes"] == episodes]
        known = [reward for reward in part if reward is not None]
        assert metrics[f"rewards/{names[0]}"][episodes] == pytest.approx(np.mean(known))
    assert 0 < sum(line[names[0]] is None for line in lines) < 64
    for line in lines:
        assert (line[names[0]] is None) == (line["row"]["answer"] == "b")
        assert line["reward"] == pytest.approx((line[names[0]] or 0) + line[names[1]])
        if line[names[0]] is not None:
            assert line[names[0]] % 1 == pytest.approx(0.1 * line["response"].count("a"))
    args = real_args(script, folder, reward_function=names[:1])
    with pytest.raises(ValueError, match="no reward function gives a reward"):
        script.train(args)
    refused(script, tmp_path / "other", replace(args, reward_function=names[1:] * 2), "twice")
    columns = {"a": torch.tensor([math.nan]), "b": torch.ones(2)}
    evaluated = script.means_over_processes(columns, args)
    assert evaluated == {"b": 1.0}


def test_the_best_model_is_kept(folder, tmp_path, monkeypatch):
    """It is the best by the sum of the evaluation's rewards, also after a resume."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    scores = iter([1.0, 5.0, 2.0, 3.0, 7.0])
    monkeypatch.setattr(rlhf, "evaluate", lambda *given: {"eval/a": next(scores), "eval/b": -1.0})
    path = rlhf.train(real_args(rlhf, folder, eval_every=1))
    best, last = path.with_name("best"), path.with_name("model")
    assert json.loads((best / "evaluation.json").read_text())["episodes"] == 32
    models = [transformers.AutoModelForCausalLM.from_pretrained(x).state_dict() for x in (best, last)]
    assert not same(*models)
    rlhf.train(real_args(rlhf, folder, eval_every=10, resume=str(path), total_episodes=128))
    found = json.loads((best / "evaluation.json").read_text())
    assert (found["episodes"], found["eval/a"]) == (128, 7.0)
    # An evaluation of other reward functions cannot be compared.
    monkeypatch.setattr(rlhf, "evaluate", lambda *given: {"eval/other": -9.0})
    rlhf.train(real_args(rlhf, folder, resume=str(path), total_episodes=160))
    assert json.loads((best / "evaluation.json").read_text())["eval/other"] == -9.0
    assert transformers.AutoTokenizer.from_pretrained(best).get_vocab()
    assert not list(path.parent.glob("*.tmp"))


@pytest.mark.slow
def test_an_interrupted_run_resumes_bit_for_bit(folder, tmp_path, monkeypatch):
    """Weights, optimizer, curves and completions are those of a run without an interruption.

    Settings are those of the checkpoint. Flags beside --resume replace them.
    """
    args = real_args(rlhf, folder, total_episodes=160, num_minibatches=2)
    command(rlhf, tmp_path / "whole", *words(rlhf, args))
    function = rlhf.collect
    monkeypatch.setattr(rlhf, "collect", failing(function, 4, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        command(rlhf, tmp_path / "parts", *words(rlhf, args))
    whole, path = checkpoint_in(tmp_path / "whole"), checkpoint_in(tmp_path / "parts")
    early = load(path)
    assert (early["episodes"], early["args"]) == (96, vars(args))
    monkeypatch.setattr(rlhf, "collect", function)
    for attempt in range(2):
        if attempt == 1:  # as if the process had been killed before it wrote another checkpoint
            torch.save(early, path)
            with path.with_name("completions.jsonl").open("ab") as file:
                file.write(b'{"episodes": 12, "response": "\xe6')  # half a character of UTF-8
        torch.rand(7)  # nothing may depend on what this process did before
        more = "--reward-function", *args.reward_function, "--generation-batch-size", 512
        command(rlhf, tmp_path, "--resume", path, *more)
        ours, theirs = load(path), load(whole)
        assert ours["args"] == vars(replace(args, resume=str(path), generation_batch_size=512))
        for name in ("weights", "optimizer", "episodes"):
            assert same(ours[name], theirs[name]), name
        assert curves(path.parent) == curves(whole.parent)
        assert completions(path) == completions(whole)


STOPS = [pytest.param(rlhf, signal.SIGINT, marks=pytest.mark.slow), (grpo, signal.SIGTERM)]


@pytest.mark.parametrize(("script", "number"), STOPS, ids=label)
def test_a_stopped_run_is_saved_and_resumes_bit_for_bit(script, number, folder, tmp_path, monkeypatch):
    """Training ends after the iteration, without an evaluation."""
    args, calls = real_args(script, folder, total_episodes=128, num_minibatches=2), []
    command(script, tmp_path / "whole", *words(script, args))
    update = script.update

    def interrupted(*arguments):
        calls.append(0)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return update(*arguments)

    monkeypatch.setattr(script, "update", interrupted)
    done = command(script, tmp_path / "parts", *words(script, args))
    assert done.status == 130
    assert "--total-episodes" not in done.out.partition("resume: ")[2]
    whole, path = checkpoint_in(tmp_path / "whole"), checkpoint_in(tmp_path / "parts")
    assert load(path)["episodes"] == 96
    monkeypatch.setattr(script, "update", update)
    more = "--reward-function", *args.reward_function
    assert command(script, tmp_path, "--resume", path.parent, *more).status == 0
    for name in ("weights", "optimizer", "episodes"):
        assert same(load(path)[name], load(whole)[name]), name
    assert curves(path.parent) == curves(whole.parent)
    over = command(script, tmp_path, "--resume", path, *more)  # it is finished
    assert (over.status, over.err.count("\n")) == (2, 1)
    assert "128 responses: raise --total-episodes" in over.err


@pytest.mark.parametrize(("script", "where", "number", "kind"), [
    (rlhf, "evaluate", 2, RuntimeError), (grpo, "update", 3, KeyboardInterrupt),
    (rlhf, "update", 3, KeyboardInterrupt), (grpo, "log", 2, RuntimeError),
])  # fmt: skip
def test_an_error_anywhere_loses_no_gradient_step(script, where, number, kind, folder, tmp_path, monkeypatch):
    """The error tells how to resume."""
    monkeypatch.chdir(tmp_path)
    error, owner = kind("out of memory"), script.Run if where == "log" else script
    monkeypatch.setattr(owner, where, failing(getattr(owner, where), number, error))
    with pytest.raises(kind, match="out of memory"):
        script.train(real_args(script, folder, num_minibatches=2))
    path = checkpoint_in(tmp_path)
    assert load(path)["episodes"] == 64
    assert any(f"--resume {path}" in note for note in error.__notes__)
    content = load(path)
    content.pop("comparisons", None)  # as an earlier version wrote it
    torch.save(content, path)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert (
        load(script.train(real_args(script, folder, num_minibatches=2, resume=str(path))))["episodes"] == 96
    )
    lines = completions(path)
    assert [line["episodes"] for line in lines[-32:]] == [64] * 32
    assert len(error.__notes__) == 1


def test_a_run_without_a_reference_cannot_be_resumed_with_a_kl_penalty(tmp_path, monkeypatch):
    """A new reference would be another network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(grpo, "learn_to_write", lambda *given: None)
    args = grpo.Args(batch_size=32, num_minibatches=2, total_episodes=32)
    path = grpo.train(args)
    with pytest.raises(RuntimeError, match="reference"):
        grpo.train(replace(args, resume=str(path), total_episodes=64, kl_coef=0.1))


# Processes


@pytest.mark.slow
@both
def test_two_processes_learn_like_one(script, tmp_path):
    """Each of two processes has half a batch. Weights and metrics are those of one process with all of it."""
    name = script.__name__
    for launcher in ([sys.executable], shared.TORCHRUN):
        run_process(tmp_path, *launcher, shared.__file__, name, str(tmp_path))
    one, *others = (torch.load(tmp_path / f"{name}-{part}.pt") for part in ("1-0", "2-0", "2-1"))
    for other in others:
        torch.testing.assert_close(other.pop("weights"), one["weights"], atol=1e-6, rtol=1e-5)
        for key, value in other.items():
            assert value == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.slow
def test_two_processes_write_one_checkpoint_and_evaluate_like_one(folder, tmp_path):
    args = real_args(grpo, folder)
    command(grpo, tmp_path / "one", *words(grpo, args))
    (tmp_path / "two").mkdir()
    file = str(ROOT / "grpo.py")
    assert run_process(tmp_path / "two", *shared.TORCHRUN, file, *words(grpo, args)).count("checkpoint ") == 1
    paths = [checkpoint_in(tmp_path / name) for name in ("one", "two")]
    assert load(paths[1])["episodes"] == load(paths[0])["episodes"]
    assert len(list(paths[1].parent.glob("events*"))) == 1
    one, two = (curves(path.parent) for path in paths)
    for name in one:
        if name.startswith("eval/"):
            assert two[name][0] == pytest.approx(one[name][0])
    lines, name = completions(paths[1]), args.reward_function[0]
    assert [line["episodes"] for line in lines] == [0] * 16 + [32] * 16 + [64] * 16  # one process writes
    assert two[f"rewards/{name}"][0] != pytest.approx(np.mean([line[name] for line in lines[:16]]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the test makes up GPUs")
def test_each_process_has_a_gpu_of_its_own(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for number in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", number)
        with pytest.raises((AssertionError, RuntimeError)):  # chosen before it turns out that there is none
            grpo.train(grpo.Args(device="cuda"))
    assert chosen == [0, 1]


# The built-in tasks


def test_the_human_likes_apt_words_in_the_tone_of_the_prompt():
    for tone, subject, response, taste in (
        ("praise", "hotel", "great room", 1),
        ("weigh", "hotel", "very lovely room but very awful staff", 2),
        ("pan", "film", "great plot and lovely cast", -1),
        ("pan", "film", "poor plot and poor plot", -2),
        ("pan", "film", "poor room", -2),
        ("pan", "film", "", -2),
    ):
        assert rlhf.human({"tone": tone, "product": subject}, response) == taste


def test_examples_of_sums_forget_to_carry_and_held_out_sums_are_not_trained_on():
    """Held-out sums are in the training data in neither order."""
    _, task = grpo.make_sums(grpo.Args(resume="nothing is learnt"))
    parts = [{tuple(sorted((row["a"], row["b"]))) for row in x} for x in (task.prompts, task.eval_prompts)]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == set(combinations_with_replacement(range(20, 100), 2))
    rng, rows = random.Random(1), random.Random(0).choices(task.prompts, k=500)
    for row in rows:
        text, total = grpo.write_sum(rng, row), row["a"] + row["b"]
        assert text.endswith((f"so {grpo.spell(total)}", f"so {grpo.spell(total - 10)}"))
        assert len(task.tokenizer.encode(text)) < grpo.Args.max_response_length
    texts = ["a , so thirty", "", "a , so thirty one", "a , so one hundred thirty"]
    assert grpo.accuracy([{"answer": "thirty"}] * 4, texts) == [1, 0, 0, 0]


@pytest.mark.slow
def test_the_reward_model_is_updated_on_time_also_after_a_resume(tmp_path, monkeypatch):
    """The reward model learns from more comparisons at each update."""
    monkeypatch.chdir(tmp_path)
    fit, compare, steps = rlhf.fit, rlhf.compare_responses, []

    def few_pairs(models, task, count, args):
        compare(models, task, count // 20, args)

    def short_fit(network, loss, count, rate, name):
        steps.append((name, count))
        fit(network, loss, 80 if name == "supervised learning" else 10, rate, name)

    monkeypatch.setattr(rlhf, "fit", short_fit)
    monkeypatch.setattr(rlhf, "compare_responses", few_pairs)
    args = rlhf.Args(batch_size=32, num_minibatches=1, total_episodes=96, reward_model_updates=2)
    path = rlhf.train(args)
    assert steps == [
        ("supervised learning", 600), ("reward model", 14), ("reward model", 17),
    ]  # fmt: skip
    whole = load(path)
    assert len(whole["comparisons"]) == 375
    for row, chosen, rejected in whole["comparisons"][-75:]:
        assert row["prompt"].endswith(":")
        assert isinstance(chosen, str)
        assert isinstance(rejected, str)
    taste = [rlhf.human(row, chosen) - rlhf.human(row, other) for row, chosen, other in whole["comparisons"]]
    assert 0 < np.mean(taste) < 3  # the human errs at times only
    (tmp_path / "parts").mkdir()
    monkeypatch.chdir(tmp_path / "parts")
    with monkeypatch.context() as patch:
        patch.setattr(rlhf, "collect", failing(rlhf.collect, 3, RuntimeError()))
        with pytest.raises(RuntimeError):
            rlhf.train(args)
    part = checkpoint_in(tmp_path / "parts")
    resumed = load(rlhf.train(replace(args, resume=str(part))))
    assert same(resumed["weights"], whole["weights"])
    assert resumed["comparisons"] == whole["comparisons"]


def test_the_optimum_is_that_of_an_enumeration_of_all_responses(everything):
    """With a floor, only responses above it are enumerated."""
    batch, actor, reference, _ = everything
    models, task = new_models(rlhf), make_task(["2 3"])
    args = rlhf.Args(max_response_length=LENGTH, missing_eos_penalty=0.5)
    scores, rewards = rlhf.score(models, task, task.prompts * 40, batch, args)
    assert torch.equal(scores, rewards["reward_model"] + rewards["missing_eos"])
    scores = scores.double()
    log_probs, ref_log_probs = (sequence_log_probs(model, batch).detach() for model in (actor, reference))
    scores = scores - (ref_log_probs.exp() * scores).sum()  # the reference's mean is 0
    best = BETA * torch.logsumexp(ref_log_probs + scores / BETA, 0)
    objective = (log_probs.exp() * (scores - BETA * (log_probs - ref_log_probs))).sum()
    result = optimum.compare_with_optimum(models, task, args, BETA, floor=1e-9)
    expected = {"left_out": 0.0, "objective_optimum": best.item(), "objective": objective.item()}
    expected["share_of_optimum"] = (objective / best).item()
    expected["kl"] = (log_probs.exp() * (log_probs - ref_log_probs)).sum().item()
    assert {name: result[name] for name in expected} == pytest.approx(expected, abs=1e-5, rel=1e-4)
    assert result["best_score_at_kl"] >= result["score"]
    likely = torch.maximum(log_probs, ref_log_probs).exp() > 0.02
    rough = optimum.compare_with_optimum(models, task, args, BETA, floor=0.02)
    assert rough["left_out"] == pytest.approx(1 - log_probs[likely].exp().sum().item(), abs=1e-5)
    assert rough["left_out"] > 0.01


@pytest.mark.nightly
def test_ppo_comes_close_to_the_optimum(tmp_path, monkeypatch):
    """This run on reviews has a sixteenth of the default length. The human's taste for them rises, too."""
    monkeypatch.chdir(tmp_path)
    path = rlhf.train(rlhf.Args(total_episodes=2_560))
    models, task, args = optimum.load(path)
    result = optimum.compare_with_optimum(models, task, args, args.kl_coef)
    assert result["share_of_optimum"] > 0.85
    assert result["left_out"] < 0.05
    gold = list(curves(path.parent)["eval/gold"].values())
    assert gold[-1] > gold[0] + 0.5


def test_the_code_in_the_comparison_of_ppo_and_grpo_is_that_of_the_scripts():
    page = (ROOT / "docs/ppo_and_grpo.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```python\n")[1:]]
    assert len(blocks) == 3
    for block in blocks:
        script = "grpo.py" if block.startswith("# grpo.py") else "ppo_rlhf.py"
        lines = [line.strip() for line in (ROOT / script).read_text().splitlines()]
        missing = [x for x in block.splitlines() if not x.startswith("#") and x.strip() not in lines]
        assert not missing


# Refusals


def refused(script, where, args, what, *more):
    """Check that the command line refuses settings in one line, and makes no folder."""
    done = command(script, where, *words(script, args), *more)
    assert done.status == 2, done.err
    last = done.err.splitlines()[-1]
    assert last.startswith(f"{script.__name__}.py: ")
    assert what in last
    assert not (where / "runs").exists()


PROMPTS = [  # lines of a file of prompts, and a part of the message
    (['{"prompt": "ab"}', '{"prompt": '], "line 2"),
    (['{"messages": [], "id": 1}'], "'messages'"),
    (['["prompt"]'], "['prompt']"),
    (['{"prompt": [{"role": "user", "value": "a"}]}'], "'value'"),
    (['{"prompt": [{"role": "user", "content": ["a"]}]}'], "['a']"),
    ([], "no prompts"),
    (['{"prompt": ""}'], "0 tokens"),
    (['{"prompt": "%s"}' % ("a" * 25)], "25 tokens"),
]


@pytest.mark.parametrize(("lines", "what"), PROMPTS, ids=label)
def test_wrong_prompts_are_refused_and_named(lines, what, folder, tmp_path):
    """Blank lines at the end are allowed."""
    path = tmp_path / "prompts.jsonl"
    args = real_args(grpo, folder, prompts=str(path))
    path.write_text("\n".join([*lines, "", ""]))
    refused(grpo, tmp_path, args, what)
    path.write_text('{"prompt": "ab", "answer": "c"}\n\n')
    assert len(grpo.load_task(args).prompts) == 1


async def asynchronous(rows, responses):
    return [1.0] * len(rows)


FUNCTIONS = [  # reward functions of two responses, and what is raised
    (asynchronous, ValueError),
    (lambda rows: [1.0, 1.0], TypeError),
    (lambda rows, texts: None, ValueError),
    (lambda rows, texts: [1.0], ValueError),
    (lambda rows, texts: [1.0, math.nan], ValueError),
    (lambda rows, texts: np.array([1.0, math.inf]), ValueError),
    (lambda rows, texts: torch.ones(2, 1), TypeError),
    (lambda rows, texts: ["1", "2"], TypeError),
    (lambda rows, texts: [rows[0]["no_such_key"]] * 2, KeyError),
]


@pytest.mark.filterwarnings("ignore:coroutine")
@pytest.mark.parametrize(("function", "error"), FUNCTIONS, ids=label)
def test_wrong_reward_functions_fail_before_the_model_is_loaded(
    function, error, folder, tmp_path, monkeypatch
):
    """A user's own bug keeps its traceback. There is no folder of the run yet."""
    monkeypatch.setattr(shared, "odd", function, raising=False)
    monkeypatch.setattr(grpo, "load_network", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as raised:
        grpo.train(real_args(grpo, folder, reward_function=("language_helpers:odd",)))
    if error is ValueError:
        assert "language_helpers:odd" in str(raised.value)
    if error is KeyError:
        assert raised.traceback[-1].path == Path(__file__)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("task", "what"), [
    (make_task([], first=first_digit), "prompts"),
    (make_task(["2"]), "reward functions"),
    (make_task(["2"], row=first_digit), "row"),
    (make_task(["2"], first=first_digit)._replace(prompts=["2"]), "prompt"),
    (make_task(["2", "2 " * 25], first=first_digit), "25 tokens"),
    (make_task(["2", ""], first=first_digit), "0 tokens"),
])  # fmt: skip
def test_a_task_of_a_program_needs_prompts_and_reward_functions(task, what, folder):
    with pytest.raises(ValueError, match=what):
        rlhf.train(real_args(rlhf, folder), task)


def test_bfloat16_and_a_task_of_a_program_need_a_model():
    """Built-in networks would compute logits in bfloat16. The built-in task would replace the other one."""
    with pytest.raises(ValueError, match="--bfloat16"):
        rlhf.train(rlhf.Args(bfloat16=True))
    with pytest.raises(ValueError, match="--model"):
        rlhf.train(rlhf.Args(), make_task(["2"], first=first_digit))


def test_wrong_files_and_models_are_refused(folder, tmp_path):
    transformers = pytest.importorskip("transformers")
    args = real_args(grpo, folder)
    refused(grpo, tmp_path, replace(args, max_response_length=32), "can take 1 to 0")
    refused(grpo, tmp_path, args, "one after the other", "--reward-function", "language_helpers:vowels")
    config = transformers.AutoConfig.from_pretrained(folder / "llama")
    transformers.LlamaModel(config).save_pretrained(tmp_path / "base")
    transformers.AutoTokenizer.from_pretrained(folder / "llama").save_pretrained(tmp_path / "base")
    refused(grpo, tmp_path, replace(args, model="base"), "base lacks ['lm_head.weight']")
    with mock.patch.object(grpo, "PROCESSES", 4), pytest.raises(grpo.Refused, match="fewer prompts"):
        grpo.check_task(grpo.load_task(args), args)


def test_wrong_reward_models_are_refused(folder, tmp_path):
    """Their scores would mean nothing: other tokens, two outputs, or a head that is not trained."""
    transformers = pytest.importorskip("transformers")
    for name in ("tokens", "labels", "context"):
        shutil.copytree(folder / "llama-reward", tmp_path / name)
    file = tmp_path / "tokens" / "tokenizer.json"
    text = file.read_text().replace('"a": 2', '"a": 3').replace('"b": 3', '"b": 2')
    file.write_text(text)
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "tokens").get_vocab()["a"] == 3
    config = json.loads((folder / "llama-reward" / "config.json").read_text())
    labels = {"id2label": {"0": "bad", "1": "good"}, "label2id": {"bad": 0, "good": 1}}
    (tmp_path / "labels" / "config.json").write_text(json.dumps(config | labels))
    (tmp_path / "context" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 12}))
    for path, what in (
        (tmp_path / "tokens", "other tokens"),
        (tmp_path / "labels", "2 labels"),
        (folder / "llama", "LlamaForCausalLM"),
        (tmp_path / "context", "can take 1 to 4"),
    ):
        refused(rlhf, tmp_path, real_args(rlhf, folder, reward_model=str(path)), what)


def test_a_checkpoint_of_another_script_or_without_its_reward_functions_is_refused(tmp_path):
    named = "language_helpers:vowels"
    for args, what in (
        (grpo.Args(), "not a checkpoint of this version"),
        (rlhf.Args(reward_function=(named,)), f"--reward-function {named}"),
    ):
        torch.save({"args": vars(args), "episodes": 0}, tmp_path / "checkpoint.pt")
        done = command(rlhf, tmp_path, "--resume", "checkpoint.pt")
        assert (done.status, what in done.err) == (2, True), done.err


WRONG = [
    (rlhf, {"num_minibatches": 3}, "--batch-size"),
    (rlhf, {"model": "x", "prompts": "y"}, "--reward-model or --reward-function"),
    (rlhf, {"kl_target": 5.0, "kl_coef": 0.0}, "--kl-target"),
    (grpo, {"group_size": 3}, "--batch-size"),
    (grpo, {"learning_rate": -1.0}, "--learning-rate"),
    (grpo, {"kl_in": "loss"}, "--kl-coef"),
    (grpo, {"kl_in": "loss", "kl_coef": 0.1, "ratio": "sequence"}, "--ratio"),
]


@pytest.mark.parametrize(("script", "settings", "name"), WRONG, ids=label)
def test_wrong_settings_are_refused_in_one_line(script, settings, name, folder, tmp_path):
    model = {"model": str(folder / "llama")} if "model" in settings else {}
    done = command(script, tmp_path, *flags(**settings | model))
    assert done.status == 2
    (line,) = done.err.splitlines()
    assert line.startswith(f"{script.__name__}.py: ")
    assert name in line
    assert not list(tmp_path.iterdir())
