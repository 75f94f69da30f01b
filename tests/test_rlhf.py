"""ppo_rlhf.py: its equations against independent computations, its GPT against transformers', its runs."""

import copy
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import ppo_rlhf as rlhf

ROOT = Path(__file__).resolve().parent.parent
STOP, LENGTH, BETA = 1, 3, 0.3


class Tokenizer:
    """Tokens without a meaning; the padding token is the stop token."""

    pad_token_id = eos_token_id = STOP


def random_gpt(seed, vocabulary=4, context=16):
    """A small GPT far from uniform, in float64."""
    torch.manual_seed(seed)
    gpt = rlhf.GPT(vocabulary, width=16, layers=2, heads=2, context=context).double()
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.4)
    return gpt


def with_stop(actor):
    """Models of which only the actor takes part."""
    models = rlhf.Models(actor, None, None, None)
    models.stop_tokens = torch.tensor([STOP])
    return models


def random_critic(seed, vocabulary=4):
    return rlhf.ScalarModel(random_gpt(seed, vocabulary).base_model, nn.Linear(16, 1).double())


def to_responses(prompt, responses, padding=0):
    """Responses to one prompt, with so much padding on the left."""
    width = max(map(len, responses))
    tokens = [[STOP] * padding + prompt + row + [STOP] * (width - len(row)) for row in responses]
    mask = [[True] * len(row) + [False] * (width - len(row)) for row in responses]
    attention = [[False] * padding + [True] * len(prompt) + row for row in mask]
    return rlhf.Responses(torch.tensor(tokens), torch.tensor(attention), torch.tensor(mask))


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
    return (rlhf.token_log_probs(model, batch, 1.0) * batch.mask).sum(1)


def gradient(loss, model):
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def true_gradient(everything):
    """∇J for J = E[r] - β KL(π ‖ π_ref), summed over all responses."""
    batch, actor, reference, rewards = everything
    log_probs, ref_log_probs = sequence_log_probs(actor, batch), sequence_log_probs(reference, batch).detach()
    return gradient((log_probs.exp() * (rewards - BETA * (log_probs - ref_log_probs))).sum(), actor)


def expected_ppo_gradient(everything, estimator=lambda kl: kl, mask_stop=False):
    """The expectation of -ppo_loss's gradient over all responses, with λ = 1 and a random critic."""
    batch, actor, reference, rewards = everything
    critic = random_critic(3)
    args = rlhf.Args(vf_coef=0.0, gae_lambda=1.0)
    with torch.no_grad():
        log_probs = rlhf.token_log_probs(actor, batch, 1.0)
        ref_log_probs = rlhf.token_log_probs(reference, batch, 1.0)
        kl = estimator(log_probs - ref_log_probs) * batch.mask
        token_rewards = rlhf.token_rewards(rewards, kl, batch.mask, BETA)
        values = critic(batch)[:, :-1]
        advantages, returns = rlhf.compute_gae(token_rewards, values, batch.mask, args.gae_lambda)
        probabilities = sequence_log_probs(actor, batch).exp().unsqueeze(1)
    learnt = rlhf.Batch(*batch, log_probs, values, probabilities * advantages, returns, rewards)
    if mask_stop:  # a fault: the stop token is not learnt
        stops = batch.tokens[:, -LENGTH:] == STOP
        learnt = learnt._replace(advantages=learnt.advantages * ~stops)
    models = rlhf.Models(actor, critic, reference, None)
    return -gradient(rlhf.ppo_loss(models, learnt, args)[0], actor)


def relative_error(estimate, truth):
    return ((estimate - truth).norm() / truth.norm()).item()


def test_probabilities_of_all_responses_add_up_to_1(everything):
    batch, actor, *_ = everything
    assert sequence_log_probs(actor, batch).exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_expected_gradient_is_that_of_the_objective(everything):
    assert relative_error(expected_ppo_gradient(everything), true_gradient(everything)) < 1e-12


def test_k3_in_the_reward_and_a_missing_stop_token_fail_the_same_test(everything):
    truth = true_gradient(everything)
    k3 = expected_ppo_gradient(everything, estimator=lambda kl: (-kl).exp() - 1 + kl)
    assert relative_error(k3, truth) > 0.1
    assert relative_error(expected_ppo_gradient(everything, mask_stop=True), truth) > 0.1


def test_optimum_satisfies_its_identity(everything):
    batch, actor, reference, _ = everything
    models = rlhf.Models(actor, random_critic(3), reference, random_critic(4))
    models.prompts = torch.tensor([[STOP, 2, 3]]), torch.tensor([[False, True, True]])
    models.tokenizer, models.stop_tokens = Tokenizer(), torch.tensor([STOP])
    args = rlhf.Args(max_response_length=LENGTH, missing_eos_penalty=0.5)
    result = rlhf.compare_with_optimum(models, args, BETA)
    scores = rlhf.score(models, batch, args).double()
    log_probs, ref_log_probs = sequence_log_probs(actor, batch), sequence_log_probs(reference, batch)
    optimum = BETA * torch.logsumexp(ref_log_probs + scores / BETA, 0)
    objective = (log_probs.exp() * (scores - BETA * (log_probs - ref_log_probs))).sum()
    assert result["left_out"] == pytest.approx(0, abs=1e-12)
    assert result["identity"] == pytest.approx(0, abs=1e-12)
    assert result["objective_optimum"] == pytest.approx(optimum.item(), abs=1e-10)
    assert result["objective_actor"] == pytest.approx(objective.item(), abs=1e-10)
    floor = 0.02  # the optimum over the responses above it is a lower bound
    kept = torch.maximum(log_probs, ref_log_probs).exp() > floor
    rough = rlhf.compare_with_optimum(models, args, BETA, floor)
    expected = BETA * torch.logsumexp((ref_log_probs + scores / BETA)[kept], 0)
    assert kept.sum() < len(kept)
    assert rough["objective_optimum"] == pytest.approx(expected.item(), abs=1e-10)
    assert rough["objective_optimum"] < result["objective_optimum"]
    assert rough["left_out"] == pytest.approx(1 - log_probs[kept].exp().sum().item(), abs=1e-10)


def test_gae_is_a_double_sum():
    torch.manual_seed(0)
    lengths, width, lam = [1, 4, 6], 6, 0.9
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    rewards, values = torch.randn(2, 3, width, dtype=torch.float64)
    advantages, returns = rlhf.compute_gae(rewards * mask, values, mask, lam)
    for row, length in enumerate(lengths):
        v = [*values[row, :length].tolist(), 0.0]
        deltas = [rewards[row, t].item() + v[t + 1] - v[t] for t in range(length)]
        for t in range(length):
            expected = sum(lam**k * delta for k, delta in enumerate(deltas[t:]))
            assert advantages[row, t].item() == pytest.approx(expected)
            assert returns[row, t].item() == pytest.approx(expected + v[t])
    assert not advantages[~mask].any()


def test_score_is_on_the_last_token():
    mask = torch.tensor([[True, False, False], [True, True, True]])
    rewards = rlhf.token_rewards(torch.tensor([1.0, 2.0]), torch.ones(2, 3), mask, kl_coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([[0.9, 0, 0], [-0.1, -0.1, 1.9]]))


def test_padding_is_no_stop_token():
    batch = to_responses([2, 3], [[0, 0], [0, STOP], [0, 0, 0]])
    assert rlhf.ends_with_stop(batch, torch.tensor([STOP])).tolist() == [False, True, False]


@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_collect(whiten_rewards):
    """Log-probabilities, rewards, advantages and metrics, each computed again, response by response."""
    models = rlhf.Models(random_gpt(1), random_critic(3), random_gpt(2), random_critic(4))
    models.prompts = torch.tensor([[STOP, 2, 3], [0, 2, 2]]), torch.tensor([[False, True, True], [True] * 3])
    models.tokenizer, models.stop_tokens = Tokenizer(), torch.tensor([STOP])
    args = rlhf.Args(model="any", batch_size=40, micro_batch_size=7, max_response_length=4, temperature=0.8)
    args = replace(args, missing_eos_penalty=0.7, gae_lambda=0.9, whiten_rewards=whiten_rewards)
    beta = 0.25
    batch, metrics = rlhf.collect(models, args, rlhf.State(1e-3, beta))
    with torch.no_grad():
        log_probs = rlhf.token_log_probs(models.actor, batch, 0.8)
        ref_log_probs = rlhf.token_log_probs(models.reference, batch, 0.8)
        values, outputs = models.critic(batch), models.reward_model(batch)
    torch.testing.assert_close(batch.log_probs, log_probs)
    torch.testing.assert_close(batch.values, values[:, :-1])
    starts = {tuple(row) for row in batch.tokens[:, :3].tolist()}
    assert starts == {(STOP, 2, 3), (0, 2, 2)}
    rows = []
    for i, mask in enumerate(batch.mask):
        length = int(mask.sum())
        tokens = batch.tokens[i, 3 : 3 + length].tolist()
        row = {"length": length, "stops": tokens[-1] == STOP, "values": [*values[i, :length].tolist(), 0.0]}
        row["score"] = outputs[i, length].item() - 0.7 * (not row["stops"])
        row["kl"] = (log_probs - ref_log_probs)[i, :length].tolist()
        row["rewards"] = [-beta * kl for kl in row["kl"]]
        row["rewards"][-1] += row["score"]
        row["log_prob"] = log_probs[i, :length].sum().item()
        row["surprise"] = -ref_log_probs[i, :length].mean().item()
        rows.append(row)
    everything = torch.tensor([reward for row in rows for reward in row["rewards"]])
    mean, std = everything.mean().item(), everything.std(correction=0).item()
    advantages, returns = [], []
    for row in rows:
        if whiten_rewards:
            row["rewards"] = [(reward - mean) / std + mean for reward in row["rewards"]]
        v = row["values"]
        deltas = [reward + v[t + 1] - v[t] for t, reward in enumerate(row["rewards"])]
        for t in range(row["length"]):
            advantages.append(sum(0.9**k * delta for k, delta in enumerate(deltas[t:])))
            returns.append(advantages[-1] + v[t])
    advantages, returns = torch.tensor(advantages).double(), torch.tensor(returns).double()
    whitened = (advantages - advantages.mean()) / advantages.std(correction=0)
    torch.testing.assert_close(batch.advantages[batch.mask], whitened, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(batch.returns[batch.mask], returns, atol=1e-4, rtol=1e-4)

    def average(value):
        return pytest.approx(sum(map(value, rows)) / len(rows), rel=1e-4, abs=1e-6)

    assert metrics["objective/kl"] == average(lambda row: sum(row["kl"]))
    assert metrics["objective/entropy"] == average(lambda row: -row["log_prob"])
    assert metrics["objective/scores"] == average(lambda row: row["score"])
    assert metrics["objective/non_score_reward"] == average(lambda row: -beta * sum(row["kl"]))
    assert metrics["objective/rlhf_reward"] == average(lambda row: row["score"] - beta * sum(row["kl"]))
    assert metrics["response/length"] == average(lambda row: row["length"])
    assert metrics["response/cut_off"] == average(lambda row: not row["stops"])
    limit = metrics["objective/surprise_limit"]
    surprises = torch.tensor([row["surprise"] for row in rows])
    assert limit == pytest.approx(surprises.quantile(0.99).item(), rel=1e-5)
    assert metrics["objective/surprise"] == average(lambda row: row["surprise"] > limit)
    assert metrics["val/num_eos_tokens"] == sum(row["stops"] for row in rows)
    scores = torch.tensor([row["score"] for row in rows])
    assert metrics["objective/scores_std"] == pytest.approx(scores.std(correction=0).item(), rel=1e-4)
    assert metrics["policy/entropy_avg"] == pytest.approx(-log_probs[batch.mask].mean().item(), rel=1e-4)
    explained = 1 - (advantages.var() / returns.var()).item()
    assert metrics["val/explained_variance"] == pytest.approx(explained, rel=1e-3)
    assert metrics["val/sampling_mismatch"] < 1e-5


def test_surprise_is_measured_by_the_first_batch():
    models = rlhf.Models(random_gpt(1), random_critic(3), random_gpt(2), random_critic(4))
    models.prompts = torch.tensor([[2, 3]]), torch.tensor([[True, True]])
    models.tokenizer, models.stop_tokens = Tokenizer(), torch.tensor([STOP])
    args = rlhf.Args(model="any", batch_size=16, max_response_length=4)
    for limit, share in ((0.0, 1.0), (1e9, 0.0)):
        state = rlhf.State(1e-3, 0.1, first={"objective/surprise_limit": limit})
        assert rlhf.collect(models, args, state)[1]["objective/surprise"] == share


@pytest.mark.parametrize("clip_vloss", [False, True])
def test_loss_and_metrics_token_by_token(clip_vloss):
    torch.manual_seed(0)
    responses = to_responses([2, 3], [[0] * (i % 4) + [STOP] for i in range(8)])
    models = rlhf.Models(random_gpt(1), random_critic(3), random_gpt(2), None)
    args = rlhf.Args(clip_vloss=clip_vloss, clip_coef=0.3, vf_coef=0.7, temperature=0.9)
    with torch.no_grad():
        new = rlhf.token_log_probs(models.actor, responses, 0.9)
        values = models.critic(responses)[:, :-1]
    shifts, changes, advantages, errors = torch.randn(4, 8, 4, dtype=torch.float64)
    batch = rlhf.Batch(
        *responses, new - shifts / 2, values - changes / 2, advantages, values + errors, torch.zeros(8)
    )
    loss, metrics = rlhf.ppo_loss(models, batch, args)
    sums = dict.fromkeys(rlhf.METRICS, 0.0)
    for i, t in responses.mask.nonzero().tolist():
        log_ratio, advantage = shifts[i, t].item() / 2, advantages[i, t].item()
        ratio, change, error = math.exp(log_ratio), changes[i, t].item() / 2, errors[i, t].item()
        value_loss = error**2 / 2
        if clip_vloss:
            clipped = min(max(change, -0.3), 0.3)
            value_loss = max(value_loss, (error + change - clipped) ** 2 / 2)
        sums["loss/policy_avg"] -= min(ratio * advantage, min(max(ratio, 0.7), 1.3) * advantage)
        sums["loss/value_avg"] += value_loss
        sums["policy/approxkl_avg"] += log_ratio**2 / 2
        sums["policy/clipfrac_avg"] += not 0.7 <= ratio <= 1.3
        sums["val/clipfrac_avg"] += abs(change) > 0.3
        sums["val/ratio"] += ratio
    assert dict(zip(rlhf.METRICS, metrics.tolist(), strict=True)) == pytest.approx(sums)
    assert loss.item() == pytest.approx(sums["loss/policy_avg"] + 0.7 * sums["loss/value_avg"])


def test_update_takes_a_clipped_step():
    """The first step of Adam is the learning rate times g / (|g| + ε), with g clipped for each network."""
    torch.manual_seed(0)
    models = rlhf.Models(random_gpt(1), random_critic(3), random_gpt(2).requires_grad_(False), None)
    before = copy.deepcopy(models)
    responses = to_responses([2, 3], [[0] * (i % 4) + [STOP] for i in range(8)])
    old, values, advantages, returns = torch.randn(4, 8, 4, dtype=torch.float64)
    batch = rlhf.Batch(*responses, -old.abs(), values, advantages, returns, torch.zeros(8))
    args = rlhf.Args(batch_size=8, num_minibatches=1, update_epochs=1, max_grad_norm=1e-3)
    optimizer = rlhf.Adam(rlhf.trained_parameters(models), eps=1e-5)
    metrics = rlhf.update(models, optimizer, batch, args, rlhf.State(0.02, 0.1))
    loss, sums = rlhf.ppo_loss(before, batch, args)
    (loss / batch.mask.sum()).backward()
    for name in ("actor", "critic"):
        parameters = list(getattr(before, name).parameters())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        assert norm > 1e-3
        for p, g, new in zip(parameters, gradients, getattr(models, name).parameters(), strict=True):
            clipped = g * 1e-3 / (norm + 1e-6)
            torch.testing.assert_close(p - new, 0.02 * clipped / (clipped.abs() + 1e-5))
    expected = (sums / batch.mask.sum()).tolist()
    assert [metrics[name] for name in rlhf.METRICS] == pytest.approx(expected)
    assert metrics["val/first_approxkl"] == pytest.approx(metrics["policy/approxkl_avg"])
    assert metrics["lr"] == 0.02


def test_update_sees_each_response_once_per_epoch(monkeypatch):
    models = rlhf.Models(random_gpt(1), random_critic(3), random_gpt(2), None)
    responses = to_responses([2, 3], [[0, STOP]] * 12)
    zeros = torch.zeros(12, 2, dtype=torch.float64)
    batch = rlhf.Batch(*responses, zeros, zeros, zeros, zeros, torch.arange(12.0))
    seen = []
    loss = rlhf.ppo_loss

    def spy(models, part, args):
        seen.append(part.scores.tolist())
        return loss(models, part, args)

    monkeypatch.setattr(rlhf, "ppo_loss", spy)
    args = rlhf.Args(batch_size=12, num_minibatches=3, update_epochs=2, micro_batch_size=2)
    optimizer = rlhf.Adam(rlhf.trained_parameters(models))
    rlhf.update(models, optimizer, batch, args, rlhf.State(1e-3, 0.1))
    assert [len(part) for part in seen] == [2] * 12
    epochs = [list(itertools.chain(*parts)) for parts in (seen[:6], seen[6:])]
    for epoch in epochs:
        assert sorted(epoch) == list(range(12))
        assert epoch != sorted(epoch)
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize(
    ("kl", "factor"), [(3.0, 0.98), (5.4, 0.99), (6.0, 1.0), (6.6, 1.01), (7.2, 1.02), (60.0, 1.02)]
)
def test_kl_target(kl, factor):
    """[Ziegler], §2.2: e = clip(KL / target - 1, -0.2, 0.2), and β is multiplied by 1 + 0.1 e."""
    state = rlhf.State(1.0, kl_coef=0.5, episodes=300)
    args = rlhf.Args(kl_target=6.0, learning_rate=1e-3, total_episodes=1000)
    rlhf.adjust_coefficients(state, args)
    assert (state.kl_coef, state.learning_rate) == (0.5, pytest.approx(7e-4))
    state.last = {"objective/kl": kl}
    rlhf.adjust_coefficients(state, args)
    assert state.kl_coef == pytest.approx(0.5 * factor)
    rlhf.adjust_coefficients(state, replace(args, kl_target=None))
    assert state.kl_coef == 0.1  # the setting


@pytest.mark.slow
def test_functions_of_trl():
    """Those of TRL's PPO that are right; its whitening has the unbiased variance."""
    ppo_trainer = pytest.importorskip("trl.experimental.ppo.ppo_trainer")
    utils = pytest.importorskip("trl.trainer.utils")
    torch.manual_seed(0)
    x, mask = torch.randn(5, 7) * 3 + 2, torch.rand(5, 7) < 0.6
    unbiased = ((mask.sum() - 1) / mask.sum()).sqrt()
    theirs = ppo_trainer.masked_whiten(x, mask) * mask / unbiased
    torch.testing.assert_close(rlhf.whiten(x, mask), theirs)
    actor = random_gpt(1)
    batch = to_responses([2, 3], [[0, 2, STOP], [3, 3, 0, 0, 2, STOP]], padding=3)
    length = batch.mask.shape[1]
    inputs = rlhf.model_inputs(batch.tokens, batch.attention)
    logits = actor(**inputs, logits_to_keep=length + 1).logits[:, :-1] / 0.7
    log_probs = rlhf.token_log_probs(actor, batch, 0.7)
    theirs = utils.selective_log_softmax(logits, batch.tokens[:, -length:])
    torch.testing.assert_close(log_probs, theirs)
    args = rlhf.Args(max_response_length=6)
    prompts = torch.tensor([[2, 3]]).repeat(50, 1)
    responses, _ = rlhf.generate(with_stop(actor), prompts, torch.ones_like(prompts) > 0, args)
    cut = ppo_trainer.truncate_response(STOP, -1, responses.tokens[:, 2:])
    assert torch.equal(cut != -1, responses.mask)


def test_whitening_sees_only_the_mask():
    torch.manual_seed(0)
    x, mask = torch.randn(5, 7) * 3 + 2, torch.rand(5, 7) < 0.6
    inside = x[mask]
    whitened = rlhf.whiten(x, mask)
    torch.testing.assert_close(whitened[mask], (inside - inside.mean()) / inside.std(correction=0))
    kept = rlhf.whiten(x, mask, shift_mean=False)
    torch.testing.assert_close(kept[mask].mean(), inside.mean())
    assert not whitened[~mask].any()


def test_padding_and_company_change_nothing():
    actor, critic = random_gpt(1), random_critic(3)
    alone = to_responses([2, 3], [[0, 2, STOP]])
    together = to_responses([2, 3], [[0, 2, STOP], [3, 3, 0, 0, 2, STOP]], padding=3)
    for model in (
        lambda batch: rlhf.token_log_probs(actor, batch, 0.7),
        lambda batch: critic(batch)[:, :-1],
    ):
        torch.testing.assert_close(model(alone)[0], model(together)[0, :3])
    torch.testing.assert_close(rlhf.last_outputs(critic, alone)[0], rlhf.last_outputs(critic, together)[0])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_sampled_log_probs_are_those_computed_without_a_cache(temperature):
    torch.manual_seed(0)
    actor, args = random_gpt(1), rlhf.Args(temperature=temperature, max_response_length=6)
    prompts = torch.tensor([[0, 2, 3], [STOP, STOP, 2]]).repeat(50, 1)
    attention = torch.tensor([[True, True, True], [False, False, True]]).repeat(50, 1)
    responses, sampled = rlhf.generate(with_stop(actor), prompts, attention, args)
    log_probs = rlhf.token_log_probs(actor, responses, temperature)
    torch.testing.assert_close(
        sampled.double() * responses.mask, log_probs * responses.mask, atol=1e-6, rtol=1e-6
    )
    lengths = responses.mask.sum(1)
    assert 1 <= lengths.min() < lengths.max() == 6
    for row, mask in zip(responses.tokens[:, 3:].tolist(), responses.mask, strict=True):
        stop = row.index(STOP) + 1 if STOP in row else 6
        assert mask.sum() == stop
        assert mask[:stop].all()


def test_micro_batches_change_nothing():
    results = []
    for size in (64, 3):
        torch.manual_seed(5)
        actor, critic = random_gpt(1), random_critic(3)
        models = rlhf.Models(actor, critic, random_gpt(2).requires_grad_(False), None)
        batch = to_responses([2, 3], [[0] * (i % 4) + [STOP] for i in range(16)])
        values, log_probs, advantages, returns = torch.randn(4, 16, 4, dtype=torch.float64)
        args = rlhf.Args(batch_size=16, num_minibatches=2, update_epochs=2, micro_batch_size=size)
        optimizer = rlhf.Adam(rlhf.trained_parameters(models), eps=1e-5)
        learnt = rlhf.Batch(*batch, -log_probs.abs(), values, advantages, returns, torch.zeros(16))
        metrics = rlhf.update(models, optimizer, learnt, args, rlhf.State(1e-2, 0.1))
        results.append((torch.cat([p.detach().flatten() for p in models.parameters()]), metrics))
    torch.testing.assert_close(results[0][0], results[1][0])
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-5)


def test_gpt_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=11,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
    )
    theirs, ours = transformers.GPT2LMHeadModel(config).double().eval(), random_gpt(1, vocabulary=11)
    trunk, state = theirs.transformer, ours.base_model
    pairs = [(trunk.wte, state.tokens), (trunk.wpe, state.positions), (trunk.ln_f, state.norm)]
    for block, own in zip(trunk.h, state.blocks, strict=True):
        pairs += [(block.ln_1, own.norm1), (block.ln_2, own.norm2), (block.attn.c_attn, own.qkv)]
        pairs += [
            (block.attn.c_proj, own.projection),
            (block.mlp.c_fc, own.hidden),
            (block.mlp.c_proj, own.output),
        ]
    with torch.no_grad():
        for their_layer, our_layer in pairs:
            transposed = type(their_layer).__name__ == "Conv1D"
            their_layer.weight.copy_(our_layer.weight.T if transposed else our_layer.weight)
            if hasattr(their_layer, "bias"):
                their_layer.bias.copy_(our_layer.bias)
    batch = to_responses([2, 3], [[0, 2, STOP], [3, 3, 0, 0, 2, STOP]], padding=3)
    own, other = (rlhf.token_log_probs(model, batch, 0.7) for model in (ours, theirs))
    torch.testing.assert_close(own[batch.mask], other[batch.mask])
    args = rlhf.Args(max_response_length=6)
    generated = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        generated.append(
            rlhf.generate(with_stop(model), batch.tokens[:, :5], batch.attention[:, :5], args)[0]
        )
    assert all(torch.equal(own, other) for own, other in zip(*generated, strict=True))


@pytest.mark.parametrize(
    ("prompt", "response", "taste"),
    [
        ("praise the hotel :", "great room", 1),
        ("please weigh the hotel :", "very lovely room but very awful staff", 2),
        ("pan the film :", "great plot and lovely cast", -1),
        ("pan the film :", "poor plot and poor plot", -2),
        ("pan the film :", "poor room", -2),
        ("pan the film :", "poor plot and", -2),
        ("pan the film :", "", -2),
    ],
)
def test_human_taste(prompt, response, taste):
    assert rlhf.human(prompt, response) == taste


# ------------------------------------------------- Advice -------------------------------------------------

HEALTHY = {
    "objective/surprise": 0.01, "objective/kl": 2.0, "objective/scores": 1.0, "objective/scores_std": 1.0,
    "objective/rlhf_reward": 0.8, "response/length": 6.0, "response/cut_off": 0.05,
    "val/sampling_mismatch": 1e-6, "val/first_approxkl": 1e-12, "policy/entropy_avg": 0.9,
    "val/explained_variance": 0.5,
}  # fmt: skip
CASES = {  # advice: metrics that call for it, after so many iterations
    "hacking": ({"objective/surprise": 0.21}, 3),
    "drift": ({"objective/surprise": 0.06}, 10),
    "kl": ({"objective/kl": 10.1}, 5),
    "falling": ({"objective/scores": 1.1, "objective/rlhf_reward": 0.69}, 10),
    "length": ({"response/length": 7.9}, 5),
    "cut-off": ({"response/cut_off": 0.21}, 5),
    "mismatch": ({"val/sampling_mismatch": 2e-4}, 1),
    "ratio": ({"val/first_approxkl": 2e-6}, 1),
    "entropy": ({"policy/entropy_avg": 0.35}, 10),
    "critic": ({"val/explained_variance": -0.01}, 10),
}


def advice_over(sequence, args=None):
    """The names of the advice of each iteration, after one with healthy metrics."""
    state = rlhf.State(1e-3, 0.1, first=HEALTHY)
    rlhf.diagnose(HEALTHY, args or rlhf.Args(), state)
    found = []
    for metrics in sequence:
        messages = rlhf.diagnose(metrics, args or rlhf.Args(), state)
        found.append([message[1 : message.index("]")] for message in messages])
    return found


def test_every_advice_has_a_case():
    assert [name for name, *_ in rlhf.ADVICE] == list(CASES)


@pytest.mark.parametrize("name", CASES)
def test_advice(name):
    changes, iterations = CASES[name]
    ill = HEALTHY | changes
    expected = [[] for _ in range(30)]
    expected[iterations - 1] = [name]  # once
    assert advice_over([ill] * 30) == expected
    if iterations > 1:  # a healthy iteration in between: not in a row
        row = [*[ill] * (iterations - 1), HEALTHY]
        assert not any(advice_over(row * 3))


def test_ratio_in_bfloat16():
    """Rounding makes it differ from 1 a little."""
    for value, said in ((1e-5, False), (1e-2, True)):
        metrics = HEALTHY | {"val/first_approxkl": value}
        state = rlhf.State(1e-4, 0.1, first=HEALTHY)
        messages = rlhf.diagnose(metrics, rlhf.Args(bfloat16=True), state)
        assert any("[ratio]" in message for message in messages) == said


def test_healthy_metrics_get_no_advice():
    almost = {
        "objective/surprise": 0.04,
        "objective/kl": 9.9,
        "response/length": 7.7,
        "response/cut_off": 0.19,
    }
    limits = {"val/sampling_mismatch": 9e-5, "policy/entropy_avg": 0.4, "objective/rlhf_reward": 0.71}
    assert not any(advice_over([HEALTHY] * 30))
    assert not any(advice_over([HEALTHY | almost | limits] * 30))
    rough = HEALTHY | {"val/sampling_mismatch": 0.09}
    assert not any(advice_over([rough] * 3, rlhf.Args(bfloat16=True)))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metrics_that_are_not_finite_end_the_run(value):
    with pytest.raises(rlhf.Diverged, match="a metric is not finite"):
        advice_over([HEALTHY | {"loss/value_avg": value}])


# ------------------------------------------------- Runs ---------------------------------------------------


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Settings of a run of two or three seconds, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rlhf, "SUPERVISED_STEPS", 60)
    monkeypatch.setattr(rlhf, "COMPARISONS", 200)
    monkeypatch.setattr(rlhf, "PROMPTS", rlhf.PROMPTS[:2])
    names = [f"{kind}_{name}" for kind in ("objective", "kl") for name in ("reference", "actor", "optimum")]
    names += ["share_of_optimum", "left_out"]
    monkeypatch.setattr(
        rlhf, "compare_with_optimum", lambda *_: dict.fromkeys(names, 0.0)
    )  # it takes seconds
    return rlhf.Args(total_episodes=128, batch_size=32, update_epochs=1, num_minibatches=2)


def weights(path):
    return torch.cat([x.flatten() for x in rlhf.load_checkpoint(path)["weights"].values()])


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


@pytest.mark.slow
@pytest.mark.parametrize("updates", [0, 2])
def test_resumed_run_is_identical(small, updates):
    args = replace(small, reward_model_updates=updates)
    whole = rlhf.train(args, StopAfter(4))["checkpoint"]
    half = rlhf.train(args, StopAfter(1))["checkpoint"]
    assert not torch.equal(weights(whole), weights(half))
    content = rlhf.load_checkpoint(whole)
    assert {group["eps"] for group in content["optimizer"]["param_groups"]} == {1e-5}
    assert content["state"]["episodes"] == 128
    assert abs(content["state"]["first"]["objective/kl"]) < 1e-6  # as the actor is the reference at first
    assert len(content["comparisons"]) == (2 if updates else 1)
    resumed = rlhf.train(replace(args, resume=half), StopAfter(3))["checkpoint"]
    assert torch.equal(weights(whole), weights(resumed))


REWARD = """
def vowels(prompts, responses):
    assert len(prompts) == len(responses)
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]

def nan(prompts, responses):
    return [float("nan")] * len(prompts)

def raises(prompts, responses):
    raise RuntimeError("no such thing")

def huge(prompts, responses):
    return [1e30] * len(prompts)

def too_few(prompts, responses):
    return [0.0]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with tiny models of transformers, a tokenizer, prompts, and reward functions."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("models")
    words = ["<pad>", "<stop>", "<unknown>", *"abcdefghijklmnopqrstuvwxyz"]
    split = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unknown>")
    )
    split.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, pad_token="<pad>", eos_token="<stop>", unk_token="<unknown>"
    )
    sizes = {"vocab_size": len(words), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 1}
    llama = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_labels=1,
        num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.1, **sizes
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, num_labels=1, **sizes)
    torch.manual_seed(0)
    for name, config, language_model, scorer in (
        ("llama", llama, transformers.LlamaForCausalLM, transformers.LlamaForSequenceClassification),
        ("gpt2", gpt2, transformers.GPT2LMHeadModel, transformers.GPT2ForSequenceClassification),
    ):
        for suffix, kind in (("", language_model), ("-reward", scorer)):
            kind(config).save_pretrained(folder / f"{name}{suffix}")
            tokenizer.save_pretrained(folder / f"{name}{suffix}")
    (folder / "prompts.jsonl").write_text(
        "".join(json.dumps({"prompt": "a" * n}) + "\n" for n in range(1, 6))
    )
    (folder / "rewards.py").write_text(REWARD)
    return folder


def real_args(folder, name="llama", **changes):
    """Settings of a short run with the folder's models."""
    settings = {
        "model": str(folder / name), "prompts": str(folder / "prompts.jsonl"), "learning_rate": 1e-4,
        "total_episodes": 64, "batch_size": 32, "update_epochs": 2, "num_minibatches": 2,
        "micro_batch_size": 8,
    }  # fmt: skip
    if "reward_function" not in changes:
        settings["reward_model"] = str(folder / f"{name}-reward")
    return rlhf.Args(**{**settings, **changes})


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"bfloat16": True}, {"gradient_checkpointing": True}, {"lora_rank": 2}, {"share_critic": True}],
    ids=str,
)
def test_models_from_a_folder(folder, tmp_path, monkeypatch, name, changes):
    if "lora_rank" in changes:
        pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    metrics = []
    monkeypatch.setattr(rlhf.Run, "log", lambda self, batch, m: metrics.append(m))
    path = Path(rlhf.train(real_args(folder, name, **changes))["checkpoint"])
    assert abs(metrics[0]["objective/kl"]) < (1e-2 if "bfloat16" in changes else 1e-5)
    assert metrics[0]["val/first_approxkl"] < 1e-12  # dropout, which GPT-2 has by default, is off
    assert metrics[0]["val/sampling_mismatch"] < (0.1 if "bfloat16" in changes else 1e-4)
    assert metrics[1]["objective/kl"] != 0
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path.parent / "model")
    start = transformers.AutoModelForCausalLM.from_pretrained(folder / name)
    inputs = {"input_ids": torch.tensor([[3, 4, 5]])}
    assert not torch.equal(loaded(**inputs).logits, start(**inputs).logits)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_gradient_checkpointing_computes_layers_again(folder, name, lora_rank):
    """In the backward pass, in evaluation mode; gradients are the same."""
    if lora_rank:
        pytest.importorskip("peft")
    batch, gradients, calls = to_responses([4, 5], [[6, 7, 1], [8, 1]]), [], []
    for gradient_checkpointing in (False, True):
        torch.manual_seed(1)
        changes = {"gradient_checkpointing": gradient_checkpointing, "lora_rank": lora_rank}
        actor = rlhf.load_models(real_args(folder, name, **changes)).actor
        layers = [module for module in actor.modules() if type(module).__name__.endswith("MLP")]
        for layer in layers:
            layer.register_forward_pre_hook(lambda *_: calls.append(0))
        calls.clear()
        rlhf.token_log_probs(actor, batch, 1.0).sum().backward()
        assert len(layers) == 2
        assert len(calls) == (4 if gradient_checkpointing else 2)
        assert not actor.training
        gradients.append([p.grad for p in actor.parameters() if p.requires_grad])
    for x, y in zip(*gradients, strict=True):
        assert torch.equal(x, y)
    assert any(x.any() for x in gradients[0])


def test_lora_shares_the_frozen_weights(folder):
    pytest.importorskip("peft")
    models = rlhf.load_models(real_args(folder, lora_rank=2))
    adapters = [module for module in models.modules() if hasattr(module, "lora_A")]
    assert {module.scaling["default"] for module in adapters} == {2.0}, "whatever the rank is"
    trained = sum(p.numel() for group in rlhf.trained_parameters(models) for p in group["params"])
    stored = sum(p.numel() for p in models.parameters())  # each counts once
    frozen = sum(p.numel() for m in (models.reference, models.reward_model) for p in m.parameters())
    assert stored == frozen + trained
    assert trained < 0.5 * frozen


def test_reward_function(folder, monkeypatch):
    monkeypatch.chdir(folder)
    args = real_args(folder, reward_function="rewards:vowels")
    models = rlhf.load_models(args)
    batch, metrics = rlhf.collect(models, args, rlhf.State(1e-4, 0.1))
    _, responses = rlhf.texts(models, batch)
    expected = torch.tensor([sum(letter in "aeiou" for letter in text) / 4 for text in responses])
    stopped = (batch.tokens[:, -args.max_response_length :] * batch.mask == 1).any(1)
    scores = expected - args.missing_eos_penalty * ~stopped
    assert metrics["objective/scores"] == pytest.approx(scores.mean().item(), abs=1e-5)


def test_a_reward_function_that_fails(folder, tmp_path, monkeypatch):
    """Its exception is shown as it is."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(RuntimeError, match="no such thing") as error:
        rlhf.train(real_args(folder, reward_function="rewards:raises"))
    assert error.value.__notes__[0] == "failed after 0 responses"


def test_a_reward_function_gets_the_prompts_of_the_file(folder, tmp_path, monkeypatch):
    """With their special tokens and spaces, which decoding would change; and it computes in float32."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "seen_by.py").write_text(
        "import torch\nseen = []\n\ndef reward(prompts, responses):\n    seen.extend(prompts)\n"
        "    return (torch.full((len(prompts), 1), 257.0) @ torch.ones(1, 1)).squeeze(1)\n"
    )
    prompts = ["<stop>ab<stop>", "abc"]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    args = real_args(folder, reward_function="seen_by:reward", prompts="p.jsonl", bfloat16=True)
    models = rlhf.load_models(replace(args, missing_eos_penalty=0.0))
    with rlhf.autocast(args):
        batch, _ = rlhf.collect(models, replace(args, missing_eos_penalty=0.0), rlhf.State(1e-4, 0.1))
    assert set(sys.modules["seen_by"].seen) == set(prompts)
    assert set(batch.scores.tolist()) == {257.0}


def test_stop_tokens_of_a_chat_model(folder, tmp_path):
    """Each that the model's generation configuration names ends a response."""
    transformers = pytest.importorskip("transformers")
    shutil.copytree(folder / "llama", tmp_path / "chat")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    model.generation_config.eos_token_id = [1, 5, 9]
    model.save_pretrained(tmp_path / "chat")
    args = real_args(folder, model=str(tmp_path / "chat"), reward_function="math:prod", batch_size=200)
    models = rlhf.load_models(args)
    assert models.stop_tokens.tolist() == [1, 5, 9]
    prompts, attention = rlhf.draw_prompts(models, 200)
    batch, _ = rlhf.generate(models, prompts, attention, args)
    ended = rlhf.ends_with_stop(batch, models.stop_tokens)
    last = set()
    for tokens, mask, stopped in zip(batch.tokens, batch.mask, ended, strict=True):
        *first, end = tokens[-args.max_response_length :][mask].tolist()
        assert not {1, 5, 9} & set(first)
        assert stopped == (end in {1, 5, 9})
        last.add(end)
    assert {1, 5, 9} < last


def test_a_first_token_that_a_chat_template_has_written():
    """The tokenizer does not add it once more."""

    class Doubling(Tokenizer):
        bos_token_id = 7

        def encode(self, text):
            return [7, *map(int, text)]

    tokens, mask = rlhf.encode_prompts(Doubling(), ["72", "23"], 32, rlhf.Args(model="x"))
    assert [row[seen].tolist() for row, seen in zip(tokens, mask, strict=True)] == [[7, 2], [7, 2, 3]]


OTHER_MODELS = {  # what is special in them
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False},  # narrower embeddings
    "Falcon": {},  # dropout as modules, where others have numbers
    "Phimoe": {"intermediate_size": 64, "num_key_value_heads": 1, "num_local_experts": 4},  # noisy routers
}


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_dropout_of_other_models_is_off(folder, tmp_path, monkeypatch, kind):
    """And noise, too: before the first gradient step, the ratio is 1."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    sizes = {"vocab_size": 29, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = getattr(transformers, f"{kind}Config")(
        max_position_embeddings=32, attention_dropout=0.1, **sizes, **OTHER_MODELS[kind]
    )
    shutil.copytree(folder / "llama", tmp_path / "model")
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    args = real_args(folder, model=str(tmp_path / "model"), reward_function="rewards:vowels")
    metrics = []
    monkeypatch.setattr(rlhf.Run, "log", lambda self, batch, m: metrics.append(m))
    rlhf.train(replace(args, gradient_checkpointing=True, total_episodes=32))
    assert metrics[0]["val/first_approxkl"] < 1e-12


def test_trained_weights_are_loaded_as_they_are(folder):
    """Only what is frozen is rounded to bfloat16."""
    transformers = pytest.importorskip("transformers")
    models = rlhf.load_models(real_args(folder, bfloat16=True))
    file = transformers.AutoModelForCausalLM.from_pretrained(folder / "llama")
    for x, y in zip(models.actor.parameters(), file.parameters(), strict=True):
        assert torch.equal(x, y)
    frozen = (*models.reference.parameters(), *models.reward_model.trunk.parameters())
    assert {x.dtype for x in frozen} == {torch.bfloat16}
    assert {x.dtype for x in models.reference.buffers()} == {torch.float32}  # those of positions


def test_values_are_not_rounded():
    """The last layer of a critic computes in float32 where the others compute in bfloat16."""
    torch.manual_seed(0)
    model = rlhf.ScalarModel(rlhf.GPT(9).base_model, nn.Linear(64, 1))
    nn.init.constant_(model.head.bias, 18.0)
    with torch.autocast("cpu", torch.bfloat16):
        values = model(to_responses([4, 5], [[6, 7, 1], [8, 1]]))
    assert values.dtype == torch.float32
    assert not torch.equal(values, values.bfloat16().float())


def test_equal_scores(folder, tmp_path, monkeypatch):
    """Where no response has a reward yet, training continues."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_rewards.py").write_text("def zero(prompts, responses): return [0.0] * len(prompts)")
    args = real_args(folder, reward_function="no_rewards:zero", missing_eos_penalty=0.0)
    assert rlhf.load_checkpoint(rlhf.train(args)["checkpoint"])["state"]["episodes"] == 64


def finite(path):
    """Whether all that a checkpoint has is finite."""
    content = rlhf.load_checkpoint(path)
    moments = [x for slots in content["optimizer"]["state"].values() for x in slots.values()]
    return all(x.isfinite().all() for x in (*content["weights"].values(), *moments))


@pytest.mark.parametrize(("iterations", "seconds"), [(1, 600), (3, 600), (3, 1e-9)])
def test_gradients_that_are_not_numbers_end_the_run(folder, tmp_path, monkeypatch, iterations, seconds):
    """The last checkpoint is from before."""
    monkeypatch.chdir(tmp_path)
    loss, calls = rlhf.ppo_loss, []

    def poisoned(models, part, args):
        calls.append(0)
        value, metrics = loss(models, part, args)
        if len(calls) == 8 * min(iterations, 2):  # the last step's gradient: its loss is a number
            value = value + (0 * next(models.critic.parameters()).sum()).abs().sqrt()
        return value, metrics

    monkeypatch.setattr(rlhf, "ppo_loss", poisoned)
    with pytest.raises(rlhf.Diverged, match="a metric is not finite") as error:
        rlhf.train(real_args(folder, total_episodes=32 * iterations, checkpoint_seconds=seconds))
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert finite(path)
    done = 32 * min(iterations, 2)
    saved = torch.load(path, weights_only=True)["state"]["episodes"]
    resume = f"resume from {saved} responses with: {resume_command(path)}"
    assert error.value.__notes__ == [f"failed after {done} responses", resume]


def resume_command(path, *words):
    return shlex.join(["python", rlhf.__file__, *words, "--resume", str(path.relative_to(Path.cwd()))])


def test_an_error_says_how_to_resume(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(rlhf, "update", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        rlhf.train(real_args(folder, reward_function="rewards:vowels"))
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    command = resume_command(path, "--reward-function", "rewards:vowels")
    resume = f"resume from 0 responses with: {command}"
    assert error.value.__notes__ == ["failed after 0 responses", resume]


@pytest.mark.parametrize("changes", [{}, {"bfloat16": True}, {"gradient_checkpointing": True}], ids=str)
def test_models_need_no_peft_and_load_in_silence(folder, monkeypatch, request, capfd, changes):
    transformers = pytest.importorskip("transformers")
    remembered = transformers.utils.is_peft_available
    remembered.cache_clear()
    request.addfinalizer(remembered.cache_clear)  # or later tests would find no PEFT either
    transformers.utils.logging.enable_progress_bar()
    monkeypatch.setitem(sys.modules, "peft", None)
    rlhf.load_models(real_args(folder, **changes))
    out, err = capfd.readouterr()
    assert "Loading" not in out + err
    with pytest.raises(rlhf.Refused, match="--lora-rank needs: pip install peft"):
        rlhf.load_models(real_args(folder, lora_rank=2))


def test_critic_starts_from_the_reward_model(folder):
    models = rlhf.load_models(real_args(folder))
    batch = to_responses([4, 5], [[6, 7, 1], [8, 1]])
    torch.testing.assert_close(models.critic(batch), models.reward_model(batch))
    for changes in ({"share_critic": True}, {"reward_function": "math:prod"}):
        models = rlhf.load_models(real_args(folder, **changes))
        assert not models.critic(batch).any()
        shared = {id(p) for p in models.actor.parameters()} & {id(p) for p in models.critic.parameters()}
        assert bool(shared) == ("share_critic" in changes)


def test_a_kl_coefficient_that_is_no_longer_adapted(folder, tmp_path, monkeypatch):
    """Without --kl-target, a resumed run has the setting again."""
    monkeypatch.chdir(tmp_path)
    args = real_args(folder, kl_target=6.0, total_episodes=96)
    path = rlhf.train(args, StopAfter(2))["checkpoint"]
    assert rlhf.load_checkpoint(path)["state"]["kl_coef"] < 0.1
    rlhf.train(replace(args, kl_target=None, resume=path))
    assert rlhf.load_checkpoint(path)["state"]["kl_coef"] == 0.1


@pytest.mark.parametrize("name", ["ppo_rlhf", "grpo"])
def test_one_gpu_for_all_processes_is_refused(name, monkeypatch):
    script = importlib.import_module(name)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(script.Refused, match="use --device cuda"):
        script.check_args(script.Args(device="cuda:0"))


@pytest.mark.parametrize("kl_target", [None, 6.0])
def test_resumed_run_of_a_real_model_is_identical(folder, tmp_path, monkeypatch, kl_target):
    monkeypatch.chdir(tmp_path)
    args = real_args(folder, kl_target=kl_target, total_episodes=96)
    whole = rlhf.train(args, StopAfter(3))["checkpoint"]
    half = rlhf.train(args, StopAfter(2))["checkpoint"]
    resumed = rlhf.train(replace(args, resume=half), StopAfter(1))["checkpoint"]
    assert torch.equal(weights(whole), weights(resumed))
    for path in (whole, resumed):  # the KL is far below its target
        expected = 0.1 * (0.98**2 if kl_target else 1)
        assert rlhf.load_checkpoint(path)["state"]["kl_coef"] == pytest.approx(expected)


# ------------------------------------------------- Refusals ----------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"temperature": 0.0}, "--temperature is 0.0"),
        ({"num_minibatches": 3}, "--batch-size must be a multiple"),
        ({"max_response_length": 29}, "the model reads 32"),
        ({"lora_rank": 4}, "--lora-rank needs --model"),
        ({"kl_coef": math.nan}, "--kl-coef is nan"),
        ({"model": "x"}, "--model needs --prompts"),
        ({"resume": "missing.pt"}, "missing.pt cannot be loaded as a checkpoint"),
        ({"device": "nonsense"}, "--device nonsense cannot be used"),
    ],
)
def test_refused_settings(small, changes, reason):
    with pytest.raises(rlhf.Refused, match=reason):
        rlhf.train(replace(small, **changes))


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is not JSON"),
        ('{"prompt": "a"}\n\n', "line 2 is not JSON"),
        ('{"text": "a"}', "line 1 is not JSON such as"),
        ('["a"]', "line 1 is not JSON such as"),
        ('{"prompt": 3}', "line 1 is not JSON such as"),
        ('{"prompt": ["a"]}', "line 1 is not JSON such as"),
        ('{"prompt": "a"}\n{"prompt": " "}', "line 2 has an empty prompt"),
        ("", "has no prompts"),
        (json.dumps({"prompt": "a" * 30}), "the model reads 32"),
    ],
)
def test_refused_prompts(folder, tmp_path, lines, reason):
    path = tmp_path / "prompts.jsonl"
    path.write_text(lines)
    with pytest.raises(rlhf.Refused, match=reason):
        rlhf.load_models(real_args(folder, prompts=str(path)))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompts": "missing.jsonl"}, "cannot read --prompts missing.jsonl"),
        ({"model": "./no/folder"}, "cannot load --model ./no/folder"),
        ({"reward_function": "missing:f"}, "cannot import --reward-function missing:f"),
        ({"reward_function": "rewards:missing"}, "cannot import --reward-function rewards:missing"),
        ({"reward_function": "rewards:nan"}, "must return 8 finite numbers"),
        ({"reward_function": "rewards:too_few"}, "must return 8 finite numbers"),
        ({"reward_model": "./no/folder"}, "cannot load --reward-model ./no/folder"),
    ],
)
def test_refused_files_and_functions(folder, tmp_path, monkeypatch, changes, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(rlhf.Refused, match=reason):
        rlhf.train(real_args(folder, **changes))


def test_refused_models(folder, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    for name, suffix, change in (
        ("no-pad", "", lambda: setattr(tokenizer, "pad_token", None)),
        ("other", "-reward", lambda: tokenizer.add_tokens(["more"])),
    ):
        kind = "SequenceClassification" if suffix else "CausalLM"
        auto_class = getattr(transformers, f"AutoModelFor{kind}")
        auto_class.from_pretrained(folder / f"llama{suffix}").save_pretrained(tmp_path / name)
        change()
        tokenizer.save_pretrained(tmp_path / name)
    short = transformers.AutoConfig.from_pretrained(folder / "llama-reward", max_position_embeddings=10)
    scorer = transformers.AutoModelForSequenceClassification.from_config(short)
    for part in (scorer, transformers.AutoTokenizer.from_pretrained(folder / "llama")):
        part.save_pretrained(tmp_path / "short")
    with pytest.raises(rlhf.Refused, match="the model reads 10"):
        rlhf.load_models(real_args(folder, reward_model=str(tmp_path / "short")))
    with pytest.raises(rlhf.Refused, match="has no pad_token"):
        rlhf.load_models(replace(real_args(folder), model=str(tmp_path / "no-pad")))
    with pytest.raises(rlhf.Refused, match="needs the tokenizer of --model"):
        rlhf.load_models(real_args(folder, reward_model=str(tmp_path / "other")))
    models = rlhf.Models(random_gpt(1), random_critic(3), random_gpt(2), None)
    monkeypatch.setattr(rlhf, "load_pretrained", lambda args: models)
    with pytest.raises(rlhf.Refused, match="the reference must be frozen"):
        rlhf.load_models(real_args(folder))


def test_command_line_refuses_in_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "ppo_rlhf.py"), "--temperature", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("ppo_rlhf.py: --temperature is 0.0")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# ------------------------------------------------- Slow tests ---------------------------------------------

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def flags(args):
    """Settings as words of a command line."""
    words = []
    for name, value in vars(args).items():
        if value != getattr(rlhf.Args(), name):
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def command_line(words, folder, status=0):
    """Run a command in a folder of its own. Returns what it prints, to both streams."""
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_run_reaches_90_percent_of_the_optimum(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    results = rlhf.train(rlhf.Args(total_episodes=15_360))
    assert results["share_of_optimum"] > 0.9
    assert results["left_out"] < 0.05
    assert results["identity"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_command_line(folder, tmp_path):
    """A run with a reward function, and the commands that it prints at its end or after an error."""
    (tmp_path / "rewards.py").write_text(REWARD)
    script = str(ROOT / "ppo_rlhf.py")
    args = real_args(folder, reward_function="rewards:vowels", total_episodes=32)
    out, _ = command_line([sys.executable, script, *flags(args)], tmp_path)
    assert "1,024" not in out
    resume = out.splitlines()[-1].removeprefix("resume ").split()
    out, _ = command_line([sys.executable, *resume[1:]], tmp_path)
    assert "64 responses 100%" in out
    diverging = replace(args, reward_function="rewards:huge")
    _, err = command_line([sys.executable, script, *flags(diverging)], tmp_path, status=1)
    first, second, third = err.splitlines()[-3:]
    assert first.startswith("ppo_rlhf.py: a metric is not finite")
    assert second == "failed after 32 responses"
    assert third.startswith("resume from 0 responses with: python")
    failing = replace(args, reward_function="rewards:nan")
    _, err = command_line([sys.executable, script, *flags(failing)], tmp_path, status=2)
    assert "ppo_rlhf.py: the reward function must return 8 finite numbers" in err


@pytest.mark.slow
def test_two_processes_learn_like_one(tmp_path):
    """Halves of a batch in two processes: the weights and metrics of all of it in one."""
    for launcher in ([sys.executable], TORCHRUN):
        command_line([*launcher, __file__, str(tmp_path)], tmp_path)
    one, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("1-0", "2-0", "2-1"))
    for other in (first, second):
        torch.testing.assert_close(one["weights"], other["weights"])
        assert one["metrics"] == pytest.approx(other["metrics"], rel=1e-6)
        torch.testing.assert_close(one["whitened"][other["rows"]], other["whitened"])
    assert not torch.equal(first["noise"], second["noise"])


@pytest.mark.slow
def test_torchrun(folder, tmp_path):
    """Two processes write one folder, and one report."""
    out, _ = command_line([*TORCHRUN, str(ROOT / "ppo_rlhf.py"), *flags(real_args(folder))], tmp_path)
    assert out.count("folder ") == out.count("64 responses 100%") == 1
    assert re.search(r"resume     torchrun --nproc-per-node 2 \S*ppo_rlhf.py", out)
    (path,) = tmp_path.glob("runs/*/checkpoint.pt")
    assert rlhf.load_checkpoint(path)["state"]["episodes"] == 64
    assert len(list(path.parent.glob("events*"))) == 1


def share_of_an_update(folder):
    """A process of `test_two_processes_learn_like_one`, with every second response, if there are two."""
    torch.set_num_threads(1)
    rank, processes = rlhf.world()
    actor, critic = random_gpt(10 + rank), random_critic(20 + rank)  # equal once they are connected
    models = rlhf.Models(actor, critic, random_gpt(2).requires_grad_(False), None)
    args = rlhf.Args(batch_size=16, num_minibatches=1, update_epochs=3)
    optimizer = rlhf.Adam(rlhf.trained_parameters(models), eps=1e-5)
    state = rlhf.State(1e-2, 0.1)
    torch.manual_seed(5)
    responses = to_responses([2, 3], [[0] * (i % 4) + [STOP] for i in range(16)])
    values, log_probs, advantages, returns = torch.randn(4, 16, 4, dtype=torch.float64)
    batch = rlhf.Batch(*responses, -log_probs.abs(), values, advantages, returns, torch.zeros(16))
    rows = torch.arange(rank, 16, processes)  # those of two processes have 32 and 24 tokens
    if processes > 1:
        rlhf.connect(args, models, state)
    noise = torch.rand(4)
    share = rlhf.Batch(*(column[rows] for column in batch))
    whitened = rlhf.whiten(share.returns, share.mask)
    metrics = rlhf.update(models, optimizer, share, args, state)
    weights = torch.cat([p.detach().flatten() for p in models.parameters()])
    results = {"weights": weights, "metrics": metrics, "rows": rows, "whitened": whitened, "noise": noise}
    torch.save(results, Path(folder) / f"{processes}-{rank}.pt")
    if processes > 1:
        rlhf.dist.destroy_process_group()


if __name__ == "__main__":
    share_of_an_update(sys.argv[1])
