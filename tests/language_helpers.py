"""What the tests of the language models share; as a program, a process of test_two_processes_learn_like_one.

python tests/language_helpers.py ppo_rlhf FOLDER
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # of the scripts

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import grpo
import ppo_rlhf as rlhf

STOP = 1
LETTERS = ["<unknown>", "<stop>", *"abcdefghijklmnopqrstuvwxyz"]  # the tokens of the fixture `folder`
CALLS = []  # of `vowels`: rows and responses


def vowels(rows, responses):
    """A reward function: a quarter for each vowel."""
    if any(responses):  # not the trial before training
        CALLS.append((rows, responses))
    return [sum(letter in "aeiou" for letter in text) / 4 for text in responses]


def wanted(rows, responses):
    """A reward function that reads a row's other keys."""
    return [float(row["answer"] in text) for row, text in zip(rows, responses, strict=True)]


class Digits:
    """A tokenizer: each token is written as its number."""

    bos_token_id, eos_token_id = None, STOP

    def encode(self, text):
        return [int(word) for word in text.split()]

    def decode(self, tokens, skip_special_tokens=False):
        return " ".join(str(token) for token in tokens if not (skip_special_tokens and token == STOP))


def random_gpt(seed, vocabulary=4):
    """A small GPT far from uniform, in float64."""
    torch.manual_seed(seed)
    gpt = rlhf.GPT(vocabulary, width=16, layers=2, heads=2, context=16).double()
    for parameter in gpt.parameters():
        nn.init.normal_(parameter, std=0.4)
    return gpt


def random_critic(seed, vocabulary=4):
    """A small network with one output far from 0."""
    return rlhf.ScalarModel(random_gpt(seed, vocabulary), nn.Linear(16, 1))


def new_models(script, vocabulary=4):
    """Random networks, of which some are frozen."""
    reference = random_gpt(2, vocabulary).requires_grad_(False)
    if script is grpo:
        return grpo.Models(random_gpt(1, vocabulary), reference)
    reward_model = random_critic(4, vocabulary).requires_grad_(False)
    return rlhf.Models(random_gpt(1, vocabulary), random_critic(3, vocabulary), reference, reward_model)


def to_responses(prompt, rows, padding=0, fill=STOP):
    """Responses to one prompt, with so much padding on its left."""
    width = max(map(len, rows))
    prompts = torch.tensor([[fill] * padding + prompt] * len(rows))
    prompt_mask = torch.tensor([[False] * padding + [True] * len(prompt)] * len(rows))
    responses = torch.tensor([row + [fill] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return rlhf.Responses(prompts, prompt_mask, responses, mask)


def random_batch(script, size=16, width=4, vocabulary=4):
    """Responses of 1 to `width` tokens; π_old and π_ref differ from random_gpt(1) by some noise."""
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
    """These rows of a batch, with all columns."""
    return type(batch)(*(column[rows] for column in batch))


def groups_of(script, models):
    """The trained parameters of each network, for an optimizer."""
    networks = (models.actor, models.critic) if script is rlhf else (models.actor,)
    return [{"params": [p for p in network.parameters() if p.requires_grad]} for network in networks]


def pretrained(script, args):
    """Models and task of a run with --model."""
    return script.load_pretrained(args, script.load_task(args))


def update(script, models, optimizer, batch, args):
    """`update` of a script."""
    return script.update(models if script is rlhf else models.actor, optimizer, batch, args)


def loss_of(script, models, batch, args):
    """The loss and the metrics of a whole minibatch."""
    if script is rlhf:
        return rlhf.ppo_loss(models, batch, batch.mask.sum(), args)
    log_probs = grpo.token_log_probs(models.actor, batch, args.temperature)
    return grpo.grpo_loss(log_probs, batch, batch.mask.sum(), args)


def flat(parameters):
    """Parameters or other tensors as one vector."""
    return torch.cat([x.detach().double().flatten() for x in parameters])


class OneDevice(TorchFunctionMode):
    """A stand-in for a GPU: tensors that are made for "mps" live on the CPU, but meet only each other.

    As on a GPU, single numbers and indices may come from the CPU.
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


def share_of_an_update(script, folder):
    """Learn from a batch, or from every second response if there are two processes; save what comes of it."""
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
        "mean": script.means_over_processes({"a": share.log_probs[:, 0]})["a"],
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
