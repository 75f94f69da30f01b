"""Make a small model of transformers that adds in words and forgets to carry, to try the scripts on.

    python benchmarks/word_sums.py <folder>

It learns the sums of grpo.py, in some minutes on a CPU. The folder gets the model and tokenizer (llama-sums),
prompts with answers (train.jsonl, and the held-out test.jsonl), and the reward function (reward.py).
docs/language_models.md has the commands that train the model with them.
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the scripts are
import grpo


def main() -> None:
    """The command line."""
    folder = Path(sys.argv[1])
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(grpo.WORDS)}))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<stop>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(grpo.WORDS), hidden_size=64, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=64, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    _, task = grpo.make_sums(grpo.Args(resume="so that nothing is learnt"))
    grpo.learn_to_write(model, task._replace(tokenizer=tokenizer), grpo.write_sum, grpo.Args())
    model.save_pretrained(folder / "llama-sums")
    tokenizer.save_pretrained(folder / "llama-sums")
    for name, rows in ("train", task.prompts), ("test", task.eval_prompts):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(inspect.getsource(grpo.accuracy))


if __name__ == "__main__":
    main()
