"""Train the same model with grpo.py and with TRL's GRPOTrainer: reward curves, seconds and memory.

    pip install -e '.[benchmarks,rlhf,trl]'
    python benchmarks/against_trl.py     # does what language.csv lacks
    python benchmarks/report.py          # the table
    python benchmarks/figures.py         # the figure

A small Llama learns to add two numbers from examples half of which are wrong. Both libraries then train it
with a reward of 1 for a right answer and the same settings. Each run is a process of its own with one thread.
A seed's two runs follow each other, and which is first alternates. The reward function measures: both call it
once per batch, so a step is what happens from one call to the next. Seconds are of CPU time.

Ours decays the learning rate per batch, TRL's per gradient step, so TRL gets our schedule. What differs:

  - Both use each prompt once before any again, in orders of their own.
  - TRL repeats a batch's minibatches in the second pass; ours shuffles again. Random numbers differ anyway.
  - TRL's dapo divides by the mean number of tokens per minibatch; our token-mean, by the minibatch's own.
  - TRL computes entropies in learning. Ours writes TensorBoard's log, all responses and two checkpoints.

Llama has no dropout, which TRL leaves on, and relative positions: TRL passes none in learning, so padding on
the left would shift those of GPT-2.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import torch
from experiments import HERE
from experiments import TRL_LOSSES as LOSSES

sys.path.insert(0, str(HERE.parent))
import grpo

SEEDS = range(1, 4)
STEPS = 50  # batches of 256 responses
WORDS = ["<pad>", "<stop>", "+", "=", *"0123456789"]
calls: list[tuple] = []  # of the reward function: mean, time, and peak of memory


def reward(rows: list[dict], responses: list[str]) -> list[float]:
    """1 for a right answer. Notes the mean, the time, and the peak of the process's memory so far."""
    rewards = [float(response == row["answer"]) for row, response in zip(rows, responses, strict=True)]
    kib = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    if any(responses):  # ours first tries it on empty ones
        calls.append((sum(rewards) / len(rewards), time.process_time(), int(kib) / 1024))
    return rewards


def reward_for_trl(completions: list[str], answer: list[str], **_) -> list[float]:
    """The same for TRL, which passes the columns of the prompts as keyword arguments."""
    return reward([{"answer": text} for text in answer], completions)


def spell(number: int) -> str:
    """Digits from the last to the first, in the order of adding: "2 3 1" for 132."""
    return " ".join(reversed(str(number)))


def write_sum(rng: random.Random, row: dict) -> str:
    """An answer for the supervised learning; half of them are wrong."""
    return spell(row["sum"] + (rng.choice((-10, -1, 1, 10)) if rng.random() < 0.5 else 0))


def make_model(folder: Path) -> None:
    """Write a Llama that has learnt to add, with mistakes, its tokenizer, and the prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<stop>")
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(WORDS), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=32, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    actor, rows = LlamaForCausalLM(config), []
    for x, y in itertools.product(range(1, 100), range(10, 100)):  # two lengths, so prompts are padded
        rows.append({"prompt": " ".join(f"{x}+{y}="), "sum": x + y, "answer": spell(x + y)})
    task = grpo.Task(tokenizer, [tokenizer.eos_token_id], rows, [], {})
    grpo.learn_to_write(actor, task, write_sum, grpo.Args())
    actor.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train_ours(folder: str, loss: str, seed: int) -> None:
    """Train with grpo.py."""
    args = grpo.Args(
        model=folder, prompts=f"{folder}/prompts.jsonl", reward_function=("__main__:reward",), seed=seed,
        total_episodes=256 * STEPS, batch_size=256, generation_batch_size=256, num_minibatches=4,
        micro_batch_size=64, update_epochs=2, group_size=8, max_response_length=8, temperature=1.0,
        learning_rate=1e-3, max_grad_norm=1.0, kl_coef=0.0, loss_aggregation=loss, scale_rewards="group",
        clip_coef=0.2, clip_coef_high=0.2, eval_every=STEPS,
    )  # fmt: skip
    grpo.train(args)


def train_trl(folder: str, loss: str, seed: int) -> None:
    """Train with TRL. A step of TRL's is a minibatch: 8 per batch."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step // 8 / STEPS)
    config = GRPOConfig(
        output_dir="trl", seed=seed, max_steps=8 * STEPS, generation_batch_size=256,
        per_device_train_batch_size=64, num_iterations=2, num_generations=8, max_completion_length=8,
        temperature=1.0, max_grad_norm=1.0, beta=0.0, loss_type=LOSSES[loss], scale_rewards="group",
        epsilon=0.2, epsilon_high=0.2, logging_steps=8, save_strategy="no", report_to="none",
        use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    prompts = Dataset.from_json(f"{folder}/prompts.jsonl")
    trainer = GRPOTrainer(
        model, reward_for_trl, config, prompts,
        processing_class=AutoTokenizer.from_pretrained(folder), optimizers=(optimizer, schedule),
    )  # fmt: skip
    trainer.train()


def train_and_store(library: str, loss: str, seed: str, folder: str) -> None:
    """A run in the process's current folder. It is added to the stored ones."""
    train = train_ours if library == "grpo" else train_trl
    train(folder, loss, int(seed))
    from language import CURVE_COLUMNS, CURVES, RUN_COLUMNS, RUNS, append  # after the memory is measured
    from run import in_words, provenance

    rewards, times, peaks = zip(*calls, strict=True)
    study = {"study": f"llama-{library}-{loss}", "seed": seed}
    points = [
        {"episodes": 256 * (i + 1), "seconds": times[i] - times[0], "score": rewards[i]}
        for i in range(len(calls))
    ]
    append(CURVES, CURVE_COLUMNS, [study | point for point in points])
    flags = f"--loss-aggregation {loss}" if library == "grpo" else f"loss_type={LOSSES[loss]}"
    about = provenance()
    about["versions"] |= {name: version(name) for name in ("trl", "transformers")}
    result = {
        "script": library,
        "task": "llama-sums",
        "flags": flags,
        "episodes": 256 * STEPS,
        "seconds": times[-1] - times[0],
        "score": sum(rewards[-10:]) / 10,  # mean reward of the last ten batches
        "peak_mib": max(peaks),
    }
    append(RUNS, RUN_COLUMNS, [study | result | in_words(about)])


def run_missing() -> None:
    """Make the model, and do the runs that are not stored."""
    from run import refuse_uncommitted

    refuse_uncommitted()
    stored = (HERE.parent / "results/data/language.csv").read_text()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for loss, seed in itertools.product(LOSSES, SEEDS):
            for library in ("grpo", "trl") if seed % 2 else ("trl", "grpo"):
                if f"llama-{library}-{loss},{seed}," not in stored:
                    command = [sys.executable, str(HERE / "against_trl.py"), library, loss, str(seed), folder]
                    environment = os.environ | {"OMP_NUM_THREADS": "1"}
                    subprocess.run(command, cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train_and_store(*sys.argv[1:])
    else:
        run_missing()
