"""ppo_rlhf.py: its equations against independent computations, its GPT against transformers', its runs."""

import itertools
import json
import math
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
    return (rlhf.token_log_probs(model, batch, 1.0)[0] * batch.mask).sum(1)


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
        log_probs, _ = rlhf.token_log_probs(actor, batch, 1.0)
        ref_log_probs, _ = rlhf.token_log_probs(reference, batch, 1.0)
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
    models.tokenizer = Tokenizer()
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
        lambda batch: rlhf.token_log_probs(actor, batch, 0.7)[0],
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
    responses, sampled = rlhf.generate(actor, prompts, attention, Tokenizer(), args)
    log_probs, _ = rlhf.token_log_probs(actor, responses, temperature)
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
    for own, other in zip(*(rlhf.token_log_probs(m, batch, 0.7) for m in (ours, theirs)), strict=True):
        torch.testing.assert_close(own[batch.mask], other[batch.mask])
    args = rlhf.Args(max_response_length=6)
    generated = []
    for model in (ours, theirs):
        torch.manual_seed(0)
        generated.append(
            rlhf.generate(model, batch.tokens[:, :5], batch.attention[:, :5], Tokenizer(), args)[0]
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


@pytest.mark.parametrize("updates", [0, 2])
def test_resumed_run_is_identical(small, updates):
    args = replace(small, reward_model_updates=updates)
    whole = rlhf.train(args, StopAfter(4))["checkpoint"]
    half = rlhf.train(args, StopAfter(1))["checkpoint"]
    assert not torch.equal(weights(whole), weights(half))
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


def test_lora_shares_the_frozen_weights(folder):
    pytest.importorskip("peft")
    models = rlhf.load_models(real_args(folder, lora_rank=2))
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
    _, responses = rlhf.texts(models.tokenizer, batch)
    expected = torch.tensor([sum(letter in "aeiou" for letter in text) / 4 for text in responses])
    stopped = (batch.tokens[:, -args.max_response_length :] * batch.mask == 1).any(1)
    scores = expected - args.missing_eos_penalty * ~stopped
    assert metrics["objective/scores"] == pytest.approx(scores.mean().item(), abs=1e-5)


def test_resumed_run_of_a_real_model_is_identical(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = real_args(folder)
    whole = rlhf.train(args, StopAfter(2))["checkpoint"]
    half = rlhf.train(args, StopAfter(1))["checkpoint"]
    resumed = rlhf.train(replace(args, resume=half), StopAfter(1))["checkpoint"]
    assert torch.equal(weights(whole), weights(resumed))


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
        ({"resume": "missing.pt"}, "missing.pt is not a checkpoint"),
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
        ('{"prompt": " "}', "line 1 has an empty prompt"),
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
        ({"model": "missing"}, "cannot load --model missing"),
        ({"reward_function": "missing:f"}, "cannot import --reward-function missing:f"),
        ({"reward_function": "rewards:missing"}, "cannot import --reward-function rewards:missing"),
        ({"reward_function": "rewards:nan"}, "must return 8 finite numbers"),
        ({"reward_function": "rewards:too_few"}, "must return 8 finite numbers"),
        ({"reward_function": "rewards:raises"}, "no such thing"),
    ],
)
def test_refused_files_and_functions(folder, tmp_path, monkeypatch, changes, reason):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(rlhf.Refused, match=reason):
        rlhf.train(real_args(folder, **changes))


def test_command_line_refuses_in_one_line(tmp_path):
    command = [sys.executable, str(ROOT / "ppo_rlhf.py"), "--temperature", "0"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("ppo_rlhf.py: --temperature is 0.0")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
