"""Make a small language model that adds in words and forgets to carry, to try grpo.py and ppo_rlhf.py on.

    python benchmarks/word_sums.py <folder>

In a few minutes on a CPU, a GPT-2 of 5 million weights learns from texts that are made on the spot:

    What is forty seven plus thirty five?
    seven plus five is twelve, forty plus thirty is seventy, so eighty two.

In 7 of 10 texts with a carry, it is forgotten: "so seventy two". The folder gets the model with its tokenizer
and chat template (gpt2-sums), prompts with answers (train.jsonl, and the held-out test.jsonl), and the reward
function (reward.py). docs/language_models.md has the commands that train the model with them.
"""

from __future__ import annotations

import inspect
import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SPECIAL_TOKENS = ["<|end|>", "<|user|>", "<|assistant|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
STEPS, BATCH_SIZE, LEARNING_RATE = 300, 32, 1e-3


def reward(rows, responses):
    """1 for each response that ends with the right sum, else 0."""
    pairs = zip(rows, responses, strict=True)
    return [float(response.endswith(f", so {row['answer']}.")) for row, response in pairs]


def words(number: int) -> str:
    """A number below 200 in words."""
    if number >= 100:
        return f"one hundred {words(number - 100)}" if number > 100 else "one hundred"
    if number < 20:
        return ONES[number]
    tens = TENS[number // 10 - 2]
    return f"{tens} {ONES[number % 10]}" if number % 10 else tens


def make_row(a: int, b: int) -> dict:
    """A line of the prompts file: chat messages, and what the reward function needs."""
    question = f"What is {words(a)} plus {words(b)}?"
    return {"prompt": [{"role": "user", "content": question}], "answer": words(a + b)}


def write_response(rng: random.Random, a: int, b: int) -> str:
    """The way to the sum of two numbers, often with a forgotten carry."""
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    total = a + b
    if ones >= 10 and rng.random() < 0.7:
        total -= 10
    ones_line = f"{words(a % 10)} plus {words(b % 10)} is {words(ones)}"
    tens_line = f"{words(a // 10 * 10)} plus {words(b // 10 * 10)} is {words(tens)}"
    return f"{ones_line}, {tens_line}, so {words(total)}."


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer."""
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(texts, vocab_size=400, special_tokens=SPECIAL_TOKENS, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<|end|>")
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main() -> None:
    """The command line."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    rng = random.Random(0)
    pairs = [(a, b) for a in range(20, 100) for b in range(20, 100)]
    rng.shuffle(pairs)
    held_out, pairs = pairs[:200], pairs[200:]

    tokenizer = make_tokenizer([write_response(rng, *pair) for pair in pairs])
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=512, n_embd=256, n_layer=6, n_head=4,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=tokenizer.eos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    print(f"{model.num_parameters():,} weights, {len(tokenizer)} tokens", flush=True)

    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.99), fused=True)
    for step in range(STEPS):
        inputs, labels = [], []
        for pair in rng.sample(pairs, BATCH_SIZE):
            messages = make_row(*pair)["prompt"]
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            response = [*tokenizer.encode(write_response(rng, *pair)), tokenizer.eos_token_id]
            inputs.append(torch.tensor(prompt + response))
            labels.append(torch.tensor([-100] * len(prompt) + response))
        tokens = torch.nn.utils.rnn.pad_sequence(inputs, True, 0)  # padding on the right is never seen
        targets = torch.nn.utils.rnn.pad_sequence(labels, True, -100)
        logits = model(tokens[:, :-1]).logits
        loss = cross_entropy(logits.flatten(0, 1), targets[:, 1:].flatten())
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min((step + 1) / 50, 1 - step / STEPS)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 25 == 0 or step == STEPS - 1:
            print(f"step {step}: {loss.item():.3f} nats per token", flush=True)

    model.save_pretrained(folder / "gpt2-sums")
    tokenizer.save_pretrained(folder / "gpt2-sums")
    for name, chosen in ("train", pairs), ("test", held_out):
        lines = [json.dumps(make_row(*pair)) + "\n" for pair in chosen]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "reward.py").write_text(inspect.getsource(reward))


if __name__ == "__main__":
    main()
