"""Tasks, models, settings and batches for the tests of ppo_rlhf.py and grpo.py.

As a program, this file is one process of a test in which processes learn together:

    python tests/language_helpers.py ppo_rlhf FOLDER
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the scripts are

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import grpo
import ppo_rlhf as rlhf

ROOT = Path(__file__).resolve().parent.parent
STOP = 1
LETTERS = ["<unknown>", "<stop>", *"abcdefghijklmnopqrstuvwxyz"]  # the tokens of the models of `write_models`
CALLS = []  # the rows and responses that `vowels` was called with
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


# Reward functions


def vowels(rows, responses):
    """Reward each vowel with a quarter."""
    if any(responses):  # the trial before training has empty responses
        CALLS.append((rows, responses))
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]


def wanted(rows, responses):
    """Reward a response that has the row's answer in it."""
    return [float(row["answer"] in text) for row, text in zip(rows, responses, strict=True)]


def first_digit(rows, responses):
    """Reward a response with its first token."""
    return [float(response.strip()[:1] or 0) for response in responses]


def prompt_and_length(rows, responses):
    """Reward long prompts and short responses."""
    return [len(row["prompt"]) - len(text) / 9 for row, text in zip(rows, responses, strict=True)]


def trl_reward(prompts, completions, completion_ids, answer, **kwargs):
    """Reward stop tokens and the letter a, with the arguments of TRL. The answer b has no reward."""
    rewards = []
    for prompt, completion, ids, wanted in zip(prompts, completions, completion_ids, answer, strict=True):
        text = completion if isinstance(prompt, str) else completion[0]["content"]
        rewards.append(None if wanted == "b" else ids.count(STOP) + 0.1 * text.count("a"))
    return rewards


def with_tokens(rows, responses, tokens):
    """Reward a response with its number of tokens, which include the stop token."""
    return [len(row) for row in tokens]


# Models and batches with a vocabulary of digits


class Digits:
    """A tokenizer that writes each token as its number."""

    bos_token_id, eos_token_id = None, STOP

    def encode(self, text, add_special_tokens=True):
        return [int(word) for word in text.split()]

    def decode(self, tokens, **options):
        return " ".join(map(str, tokens))


def make_task(prompts, script=rlhf, **functions):
    """Return a task of prompts that are written as digits."""
    rows = [{"prompt": prompt} for prompt in prompts]
    return script.Task(Digits(), [STOP], rows, rows[::-1], functions)


def random_gpt(seed, vocabulary=4):
    """Return a small GPT in float64 whose policy is far from uniform."""
    torch.manual_seed(seed)
    gpt = rlhf.GPT(vocabulary, width=16, layers=2, heads=2, context=16).double()
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.4)
    return gpt


def random_critic(seed, vocabulary=4):
    """Return a small network with one output far from 0."""
    return rlhf.ScalarModel(random_gpt(seed, vocabulary), nn.Linear(16, 1))


def new_models(script, vocabulary=4):
    """Return random networks, of which the reference and the reward model are frozen."""
    reference = random_gpt(2, vocabulary).requires_grad_(False)
    if script is grpo:
        return grpo.Models(random_gpt(1, vocabulary), reference)
    reward_model = random_critic(4, vocabulary).requires_grad_(False)
    return rlhf.Models(random_gpt(1, vocabulary), random_critic(3, vocabulary), reference, reward_model)


def to_responses(prompt, rows, padding=0, fill=STOP):
    """Return responses to one prompt, with padding on its left."""
    width = max(map(len, rows))
    prompts = torch.tensor([[fill] * padding + prompt] * len(rows))
    prompt_mask = torch.tensor([[False] * padding + [True] * len(prompt)] * len(rows))
    responses = torch.tensor([row + [fill] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return rlhf.Responses(prompts, prompt_mask, responses, mask)


def random_batch(script, size=16, width=4, vocabulary=4):
    """Return responses of 1 to `width` tokens, where π_old and π_ref are random_gpt(1) with noise."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, width + 1, (size,), generator=generator).tolist()
    lengths[:2] = [1, width]
    rows = [torch.randint(vocabulary, (n,), generator=generator).tolist() for n in lengths]
    responses = to_responses([2, 3], rows, padding=1)
    noise = torch.randn(4, size, width, generator=generator)
    with torch.no_grad():
        log_probs = script.token_log_probs(random_gpt(1, vocabulary), responses, 1.0)
        if script is grpo:
            learnt = torch.arange(size) != 3
            others = log_probs + 0.3 * noise[0], log_probs + 0.3 * noise[1], noise[2, :, 0], learnt
        else:
            values = random_critic(3, vocabulary)(responses)[:, :-1]
            others = log_probs + 0.3 * noise[0], values + noise[1], noise[2], values + noise[3]
    return script.Batch(*responses, *others)


def rows_of(batch, rows):
    """Return some rows of a batch, with all columns."""
    return type(batch)(*(column[rows] for column in batch))


def kept(x, mask):
    """Return the numbers of each row where the mask is true."""
    return [row[row_mask].tolist() for row, row_mask in zip(x, mask, strict=True)]


def tokens_of(batch):
    """Return the tokens of each prompt and of each response."""
    return kept(batch.prompts, batch.prompt_mask), kept(batch.responses, batch.mask)


# Models of transformers


def write_models(folder):
    """Write tiny models whose tokenizer has no padding token, and prompts, to a folder."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {letter: i for i, letter in enumerate(LETTERS)}
    split = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    split.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=split, eos_token="<stop>", unk_token="<unknown>"
    )
    tokenizer.chat_template = "{{ messages[0].content }}{% if add_generation_prompt %}z{% endif %}"
    sizes = {"vocab_size": len(LETTERS), "eos_token_id": STOP, "bos_token_id": STOP, "num_labels": 1}
    llama = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, attention_dropout=0.1, **sizes
    )  # fmt: skip
    gpt2 = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **sizes)
    torch.manual_seed(0)
    for name, config, kind in (("llama", llama, "Llama"), ("gpt2", gpt2, "GPT2")):
        language_model = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
        for suffix, model in (("", language_model), ("-reward", "ForSequenceClassification")):
            getattr(transformers, kind + model)(config).save_pretrained(folder / f"{name}{suffix}")
            tokenizer.save_pretrained(folder / f"{name}{suffix}")
    rows = [{"prompt": "a" * (1 + i % 5), "answer": letter} for i, letter in enumerate("bcdefgh")]
    rows.append({"prompt": [{"role": "user", "content": "ab"}], "answer": "i"})
    for name, part in (("train", rows), ("test", rows[3:6])):
        lines = [json.dumps(row) + "\n" for row in part]
        (folder / f"{name}.jsonl").write_text("".join(lines))


def real_args(script, folder, name="llama", **changes):
    """Return settings of a short run with the folder's models: three iterations of two gradient steps."""
    settings = {
        "model": str(folder / name), "prompts": str(folder / "train.jsonl"), "max_response_length": 8,
        "reward_function": ("language_helpers:vowels", "language_helpers:wanted"), "learning_rate": 1e-3,
        "total_episodes": 96, "batch_size": 32, "num_minibatches": 1, "micro_batch_size": 8,
        "eval_prompts": str(folder / "test.jsonl"), "eval_every": 2, "kl_coef": 0.05,
    }  # fmt: skip
    return replace(script.PRETRAINED, **{**settings, **changes})


def pretrained(script, args):
    """Return models and task of a run with --model."""
    return script.load_pretrained(args, script.load_task(args))


def completions(path):
    """Return the lines of completions.jsonl beside a checkpoint."""
    return [json.loads(line) for line in path.with_name("completions.jsonl").read_text().splitlines()]


# Learning


def groups_of(script, models):
    """Return the trained parameters of each network as groups of an optimizer."""
    networks = (models.actor, models.critic) if script is rlhf else (models.actor,)
    return [{"params": [p for p in network.parameters() if p.requires_grad]} for network in networks]


def update(script, models, optimizer, batch, args):
    """Call `update` of a script."""
    return script.update(models if script is rlhf else models.actor, optimizer, batch, args)


def loss_of(script, models, batch, args):
    """Return the loss and the metrics of a whole minibatch."""
    if script is rlhf:
        return rlhf.ppo_loss(models, batch, batch.mask.sum(), args)
    log_probs = grpo.token_log_probs(models.actor, batch, args.temperature)
    return grpo.grpo_loss(log_probs, batch, batch.mask.sum(), args)


def flat(parameters):
    """Return parameters or other tensors as one vector in float64."""
    return torch.cat([x.detach().double().flatten() for x in parameters])


def gradient(loss, model):
    """Return the gradient of a loss as one vector."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return flat(gradients)


def failing(function, number, error):
    """Return the function, changed so that its call of this number raises the error once it is done."""
    calls = []

    def call_it(*args, **kwargs):
        calls.append(0)
        results = function(*args, **kwargs)
        if len(calls) == number:
            raise error
        return results

    return call_it


class OneDevice(TorchFunctionMode):
    """Put tensors that are made for "mps" on the CPU, but let them meet only each other.

    As with a GPU, single numbers and indices may come from the CPU.
    """

    BETWEEN_DEVICES = "copy_", "_has_compatible_shallow_copy_type", "__set__"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function == torch.Tensor.device.__get__:
            return torch.device("mps") if is_marked(args[0]) else function(*args)
        if function in (torch.Tensor.to, torch.Tensor.cpu):
            devices = [str(x) for x in (*args[1:], kwargs.get("device")) if str(x) in ("cpu", "mps")]
            if devices or function is torch.Tensor.cpu:
                types = [x for x in args[1:] if isinstance(x, torch.dtype)]
                return mark(args[0].clone().to(*types), devices == ["mps"])
        on_device = str(kwargs.get("device")) == "mps"
        if on_device:
            del kwargs["device"]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        others = tensors[:1] if function == torch.Tensor.__getitem__ else tensors
        mixed = any(map(is_marked, others)) and any(x.dim() and not is_marked(x) for x in others)
        if mixed and function.__name__ not in self.BETWEEN_DEVICES:
            raise RuntimeError(f"{function.__name__}: tensors on cpu and mps")
        result = function(*args, **kwargs)
        if on_device or any(map(is_marked, others)):
            for x in tree_leaves(result):
                if isinstance(x, torch.Tensor):
                    mark(x, True)
        return result


def is_marked(tensor):
    return getattr(tensor.untyped_storage(), "on_mps", False)


def mark(tensor, on_mps):
    tensor.untyped_storage().on_mps = on_mps
    return tensor


# Processes


def run_process(where, *words):
    """Run a command in a process of its own. Return what it prints."""
    done = subprocess.run(words, cwd=where, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def share_of_an_update(script, folder):
    """Learn from a batch, or from every second response if there are two processes. Save the results."""
    args = script.Args(batch_size=16, num_minibatches=1, max_grad_norm=0.5)
    models = new_models(script)
    optimizer = torch.optim.SGD(groups_of(script, models), 0.1)
    if script.PROCESSES > 1:
        with torch.no_grad():  # weights are equal once the processes are connected
            for parameter in models.parameters():
                parameter.add_(script.RANK)
        script.connect(models, args)
    batch = random_batch(script)
    share = rows_of(batch, torch.arange(script.RANK, 16, script.PROCESSES))
    results = {
        "metrics": update(script, models, optimizer, share, args),
        "weights": flat(models.parameters()),
        "mean": script.means_over_processes({"a": share.log_probs[:, 0]}, args)["a"],
        "masked_mean": script.masked_mean(share.log_probs, share.mask).item(),
    }
    if script is grpo:
        for aggregation in ("sequence-mean", "token-mean"):
            args.loss_aggregation = aggregation
            results[aggregation] = update(script, models, optimizer, share, args)
    torch.save(results, Path(folder) / f"{script.__name__}-{script.PROCESSES}-{script.RANK}.pt")
    if script.PROCESSES > 1:
        script.dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    share_of_an_update({"ppo_rlhf": rlhf, "grpo": grpo}[sys.argv[1]], sys.argv[2])
