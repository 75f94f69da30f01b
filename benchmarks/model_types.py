"""All model types of transformers: do grpo.py and ppo_rlhf.py compute what a plain forward pass computes?

    pip install -e '.[dev]'
    python benchmarks/model_types.py               # all types, in 15 to 20 minutes on one core
    python benchmarks/model_types.py llama phi3    # only these

For each type of causal language model, it makes a tiny one with random weights, and loads it with each
script: with ppo_rlhf.py once with a critic that begins from the language model, and once, if the type has
models that score sequences, with such a --reward-model. What is not refused is compared with passes of each
row alone, with neither padding, mask, positions nor cache: log π in generation and in learning, its gradient,
and the critic's values; then again, after an update, with the model as it is saved. Some rows are longer than
the windows of attention, and than the rows that the scripts try themselves. results/data/model_types.csv gets
a row for each type and script, which says how it went:

    agree      the largest difference is below 1e-3
    refused    the script says that it would train wrongly
    loud       another error while it loads, before training
    late       an error only in generation or in the update
    WRONG      not refused, but log π, values or gradients are others
    not built  no tiny model could be made here

If "plain passes of halves" differ, too, the model itself has no log π: later tokens change earlier ones.
"""

from __future__ import annotations

import collections
import contextlib
import csv
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from experiments import DATA, ROOT
from torch import Tensor, nn

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))
import transformers
from language_helpers import LETTERS, groups_of, real_args, update, write_models
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import grpo
import ppo_rlhf

FILE = DATA / "model_types.csv"
COLUMNS = ["type", "script", "outcome", "difference", "message", "transformers", "date"]
SCRIPTS = "grpo", "ppo_rlhf", "ppo_rlhf --reward-model"
SECONDS = 240  # for each type, with all scripts
LIMIT = 1e-3  # of differences, which are rounding

# Sizes of tiny models, by the names that configurations have for them
SIZES: dict[int, str] = {
    1: """num_key_value_heads kv_n_heads num_kv_heads topk_group n_group num_expert_group n_groups
        mamba_n_groups n_shared_experts num_shared_experts moe_num_shared_experts first_k_dense_replace
        num_dense_layers moe_layer_start_index swa_num_key_value_heads""",
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers
        num_encoder_layers depth num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads attention_heads num_decoder_attention_heads num_encoder_attention_heads
        num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k linear_num_heads
        linear_num_key_heads linear_num_value_heads swa_num_attention_heads""",
    4: """num_experts n_routed_experts num_local_experts moe_num_experts state_size mamba_d_state""",
    8: """d_rel qk_rope_head_dim rotary_dim time_step_rank mamba_dt_rank""",
    16: """index_n_heads head_dim v_head_dim qk_nope_head_dim q_lora_rank kv_lora_rank linear_key_head_dim
        linear_value_head_dim linear_head_dim index_head_dim swa_head_dim moe_intermediate_size kv_channels
        d_kv dim_head o_lora_rank""",
    24: """sliding_window sliding_window_size window_size attention_chunk_size local_attention_window_len
        index_topk attention_window_size""",  # longer than the rows that the scripts try, shorter than others
    32: """hidden_size d_model n_embd dim embed_dim emb_dim embedding_size vocab_size hidden_dim
        decoder_vocab_size vocab_size_per_layer_input lru_width word_embed_proj_dim""",
    64: """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner d_ff dff dim_ff inner_dim
        ffn_hidden_size expert_ffn_hidden_size shared_expert_intermediate_size intermediate_size_mlp
        shared_intermediate_size max_position_embeddings n_positions max_seq_len n_ctx model_max_length
        shared_experts_intermediate_size max_sequence_length max_target_positions keep_window_size""",
}
SIZE_OF = {name: size for size, names in SIZES.items() for name in names.split()}
NEEDED = {  # also if they have no default
    "head_dim", "num_key_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads",
}  # fmt: skip
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
LAYERS = "num_hidden_layers", "n_layer", "n_layers", "num_layers"

# What else some types need. Where several types need the same, it has a name.
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_chunk_size": 8}
GEMMA3N = {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "laurel_rank": 4,
    "num_kv_shared_layers": 2, "intermediate_size": [64] * 4, "hidden_size_per_layer_input": 8,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
}  # fmt: skip
INDEXER = {
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 24,
    "indexer_compress_ratio": 2, "hc_lowrank": 8, "ple_embed_dim": 32,
}  # fmt: skip
DOTS3 = {
    "head_dim": 24,
    "per_layer_config": {
        "2": {"num_attention_heads": 2, "num_key_value_heads": 2, "kv_lora_rank": 16, "qk_nope_head_dim": 16}
    },
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
INKLING2 = {"unpadded_vocab_size": 30, "rel_extent": 24, "n_layers_per_attn_res_block": 1}
SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_size": [3, 4], "encoder_hash_byte_group_vocab": 500, "vocab_size": 260,
        **{f"{part}_config": {"hidden_size_global": 32, "head_dim": 16, "num_key_value_heads": 2,
                              "vocab_size": 260} for part in ("patcher", "encoder", "decoder", "global")},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cpmant": {"prompt_length": 4, "prompt_types": 4, "segment_types": 4},
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "diffllama": {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    "dory": {
        "num_hidden_layers": 6, "n_input_layers": 2, "n_recurrent_layers": 2, "n_output_layers": 2,
        "layer_types": ["sliding_attention", "mlp", "full_attention", "mlp", "sliding_attention", "mlp"],
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "per_layer_config": {}},
        "audio_config": {"adapter_out_dim": 32, "adapter_input_size": 32},
    },
    "dots3_note_text": DOTS3,
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma3n_text": GEMMA3N,
    "gemma3n": {"text_config": GEMMA3N},
    "granitemoehybrid": {**MAMBA, "layer_types": ["linear_attention", "full_attention"]},
    "inkling2_text": INKLING2,
    "inkling2_loop_text": INKLING2 | {
        "loop_layer_index_start": 1, "loop_layer_index_end": 2, "num_hidden_layers": 3, "loop_gate_rank": 4,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding"],
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"], "full_attn_idxs": None},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "chunk_size": 8},
    "moshi": {"sliding_window": 64},  # as many as positions
    "nemotron_h": {
        "mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 4, "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 64,
    },
    "qwen4_exp": {"text_config": INDEXER},
    "qwen4_exp_text": INDEXER,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {
        "attn_layers": ["local", "lsh"], "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 16, "feed_forward_size": 64, "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4, "num_buckets": 2, "hash_seed": 0,
    },
    "xlnet": {"d_head": 16, "d_inner": 64},
    "xlstm": {"hidden_size": 128, "embedding_dim": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
        "num_hidden_layers": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


# ------------------------------------------------- Tiny models ----------------------------------------------


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of a configuration that make it tiny."""
    small = {
        name: SIZE_OF[name]
        for name, value in config.items()
        if name in SIZE_OF and (is_number(value) or (value is None and name in NEEDED))
    }
    if "kv_lora_rank" in config:  # multi-head latent attention: all heads have keys of their own
        small |= {"num_key_value_heads": 2, "head_dim": SIZE_OF["qk_rope_head_dim"], "qk_head_dim": 24}
    if "use_sliding_window" in config:
        small |= {
            "use_sliding_window": True,
            "sliding_window": SIZE_OF["sliding_window"],
            "max_window_layers": 1,
        }
        if "layer_types" in config:
            small["layer_types"] = ["full_attention", "sliding_attention"]
    depth = next((config[name] for name in LAYERS if is_number(config.get(name))), None)
    lists = {
        name: value
        for name, value in config.items()
        if isinstance(value, list) and len(value) == depth and len({*map(str, value)}) < 4
        if name not in small
    }
    if lists:  # a list with what each layer is: keep one layer of each kind, and two at least
        kinds = list(zip(*lists.values(), strict=True))
        chosen = sorted({str(kind): number for number, kind in reversed([*enumerate(kinds)])}.values())
        chosen = chosen if len(chosen) > 1 else [0, 1]
        small |= {name: [value[number] for number in chosen] for name, value in lists.items()}
        small |= {name: len(chosen) for name in LAYERS if name in small}
    for name, value in config.items():
        if isinstance(value, dict) and name.endswith("_config") and value.get("model_type"):
            small[name] = shrink(value) | {"model_type": value.get("model_type")}
        if name in ENDS and value is not None:
            small[name] = ENDS[name]
    return small


def is_number(value: Any) -> bool:
    """Whether a setting is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def merged(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Settings of the first, changed by the second, and so on in those that are nested."""
    both = first | second
    for name in first.keys() & second.keys():
        if isinstance(first[name], dict) and isinstance(second[name], dict):
            both[name] = merged(first[name], second[name])
    return both


def tiny_config(kind: str) -> Any:
    """A configuration of this type with small sizes."""
    make, special = CONFIG_MAPPING[kind], SPECIAL.get(kind, {})
    try:
        default = make().to_dict()
    except Exception:  # some have no default
        default = special
    settings = merged(shrink(default), special)
    if "is_decoder" in default:  # else it reads what follows, too
        settings.setdefault("is_decoder", True)
    return make(**settings)


@torch.no_grad()
def make_random(model: Any) -> None:
    """Give a model random weights, so large that its policy is far from uniform."""
    for name, parameter in model.named_parameters():
        if parameter.dim() >= 2 and "conv" not in name and "A_log" not in name:
            parameter.normal_(0, 0.25)
        elif parameter.is_floating_point():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)


@torch.no_grad()
def soften(model: Any) -> None:
    """Make the weights of a language model smaller until its policy is far from deterministic, too."""
    tokens = torch.tensor([[5, 6, 7, 8, 9, 10, 11, 12]])
    for _ in range(9):
        try:
            logits = model(input_ids=tokens).logits
        except Exception:  # some compute only without a cache
            logits = model(input_ids=tokens, use_cache=False).logits
        if torch.distributions.Categorical(logits=logits.float()).entropy().mean() > 1:
            return
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(0.7)


def write_tiny_models(kind: str, folder: Path) -> bool:
    """Write a model, prompts, and a model that scores sequences if the type has one: whether it has."""
    torch.manual_seed(0)
    (folder / "letters").mkdir()
    write_models(folder / "letters")  # for their tokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder / "letters" / "llama")
    rows = [
        {"prompt": "".join(LETTERS[5 + i + j] for j in range(1 + i % 5)), "answer": "a"} for i in range(12)
    ]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tiny_config(kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > 5e7:
        raise MemoryError(f"the tiny model has {size:,} parameters")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    make_random(model)
    soften(model.eval())
    model.generation_config.eos_token_id = [1, 2]  # so that some responses end early
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    if kind not in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
        return False
    config = tiny_config(kind)
    config.num_labels = 1
    judge = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    make_random(judge)
    judge.save_pretrained(folder / "judge")
    tokenizer.save_pretrained(folder / "judge")
    return True


# ------------------------------------------------- Comparison -----------------------------------------------


def rows_alone(batch: Any) -> Iterator[tuple[int, Tensor, int]]:
    """The number of each row, its tokens [1, T] without padding, and how many are the prompt's."""
    for row, (prompt, prompt_mask, response, mask) in enumerate(zip(*batch[:4], strict=True)):
        prompt = prompt[prompt_mask]
        yield row, torch.cat([prompt, response[mask]]).unsqueeze(0), len(prompt)


def plain_log_probs(model: Any, batch: Any, whole: bool = True) -> Tensor:
    """log π [N] of the tokens of all responses, one after another, by a pass of each row alone.

    If not `whole`, by another pass for each half of a response: later tokens must not change earlier ones.
    """
    found = []
    for _, tokens, start in rows_alone(batch):
        logits = model(input_ids=tokens).logits[0]
        if not whole:
            half = (start + tokens.shape[1]) // 2
            logits = torch.cat([model(input_ids=tokens[:, :half]).logits[0], logits[half:]])
        log_policy = logits.float().log_softmax(-1)
        found.append(log_policy[start - 1 : -1].gather(1, tokens[0, start:].unsqueeze(1)).squeeze(1))
    return torch.cat(found)


def plain_values(trunk: Any, head: Any, batch: Any) -> Tensor:
    """The critic's values [N] before all tokens, and after the last, by a pass of each row alone."""
    passes = ((trunk(input_ids=tokens).last_hidden_state[0], start) for _, tokens, start in rows_alone(batch))
    return torch.cat([head(hidden[start - 1 :]).squeeze(-1) for hidden, start in passes])


def largest(first: Tensor, second: Tensor) -> float:
    """The largest difference; infinite if one is not a number."""
    return (first - second).abs().max().nan_to_num(torch.inf, torch.inf).item()


def gradient_difference(actor: Any, plain: Any, batch: Any, script: Any) -> float:
    """The difference between gradients of Σ log π by a script and by plain passes, to the latter's norm."""
    found = []
    for model, loss in (
        (actor, (script.token_log_probs(actor, batch, 1.0) * batch.mask).sum()),
        (plain, plain_log_probs(plain, batch).sum()),
    ):
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, [*named.values()], allow_unused=True, materialize_grads=True)
        found.append(dict(zip(named, gradients, strict=True)))
    ours, theirs = (torch.cat([gradients[name].flatten() for name in found[1]]) for gradients in found)
    return ((ours - theirs).norm() / theirs.norm()).nan_to_num(torch.inf).item()


def compare(script: Any, models: Any, task: Any, args: Any, folder: Path) -> Iterator[tuple[str, float]]:
    """Differences between what the script computes with this actor and what the saved model does, by name."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    batch, sampled = script.generate(models.actor, task, task.prompts, args)
    with torch.no_grad():
        alone = plain_log_probs(plain, batch)
        yield "plain passes of halves", largest(plain_log_probs(plain, batch, whole=False), alone)
    yield "generation", largest(sampled[batch.mask], alone)
    yield "learning", largest(script.all_log_probs(models.actor, batch, args)[batch.mask], alone)
    yield "gradient", gradient_difference(models.actor, plain, batch, script)


@torch.no_grad()
def compare_critic(models: Any, task: Any, args: Any) -> Iterator[tuple[str, float]]:
    """The same for the critic, as it is at first."""
    batch, _ = ppo_rlhf.generate(models.actor, task, task.prompts, args)
    critic, wanted = models.critic, batch.mask.new_ones(len(batch.mask), batch.mask.shape[1] + 1)
    wanted[:, 1:] = batch.mask
    values = critic(batch)
    if args.reward_model:
        judge = AutoModelForSequenceClassification.from_pretrained(args.reward_model, dtype=torch.float32)
        trunk = judge.base_model
        last = values.gather(1, batch.mask.sum(1, keepdim=True))[:, 0]
        rows = [(row, tokens) for row, tokens, _ in rows_alone(batch) if tokens[0, -1] != 0]  # 0 is padding
        logits = torch.stack([judge(input_ids=tokens).logits[0, 0] for _, tokens in rows])
        yield "scores", largest(last[[row for row, _ in rows]], logits)
    else:
        plain = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
        trunk = plain.model if plain.base_model is plain else plain.base_model
        nn.init.normal_(critic.head.weight)  # it is 0 at first
        values = critic(batch)
    yield "values", largest(values[wanted], plain_values(trunk, critic.head, batch))


def try_script(name: str, folder: Path) -> dict[str, Any]:
    """The outcome of a type with a script, from the models in the folder."""
    script: Any = grpo if name == "grpo" else ppo_rlhf
    args = real_args(script, folder, "model", max_response_length=28, batch_size=24, update_epochs=1)
    if script is grpo:
        args.group_size = 2
    if "--reward-model" in name:
        args.reward_model = str(folder / "judge")
    script.seed_everything(1)
    try:
        models, task = script.load_pretrained(args, script.load_task(args))
    except script.Refused as error:
        return {"outcome": "refused", "message": error}
    except Exception as error:
        return {"outcome": "loud", "message": in_words(error)}
    differences: dict[str, float] = {}
    try:
        models.eval()
        differences |= compare(script, models, task, args, folder / "model")
        if script is ppo_rlhf:
            differences |= compare_critic(models, task, args)
        optimizer = torch.optim.Adam(groups_of(script, models), args.learning_rate)
        batch, _, _ = script.collect(models, task, args)
        metrics = update(script, models, optimizer, batch, args)
        differences["first ratio"] = (2 * metrics["policy/approxkl_avg"]) ** 0.5
        script.evaluate(models.actor if script is grpo else models, task, args)
        models.actor.save_pretrained(folder / "trained")
        trained = compare(script, models, task, args, folder / "trained")
        differences |= {f"{what}, trained": difference for what, difference in trained}
    except Exception as error:
        if not too_large(differences):
            return {"outcome": "late", "message": in_words(error)}
    what = max(differences, key=lambda name: differences[name])
    wrong = too_large(differences)
    outcome = (
        {"outcome": "WRONG", "message": ", ".join(wrong)} if wrong else {"outcome": "agree", "message": what}
    )
    return {"difference": differences[what], **outcome}


def too_large(differences: dict[str, float]) -> list[str]:
    """What differs by more than rounding, and by how much."""
    return [f"{name} {difference:.2g}" for name, difference in differences.items() if difference >= LIMIT]


def in_words(error: Exception) -> str:
    """The kind of an error, and what it says."""
    return f"{type(error).__name__}: {error}"


# ------------------------------------------------- The sweep ------------------------------------------------


def try_type(kind: str, folder: Path, send: Callable) -> None:
    """Send an outcome for each script. This runs in a process of its own."""
    with (
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        try:
            has_judge = write_tiny_models(kind, folder)
        except Exception as error:
            for script in SCRIPTS[:2]:
                send({"script": script, "outcome": "not built", "message": in_words(error)})
            return
        for script in SCRIPTS[: 3 if has_judge else 2]:
            send({"script": script, **try_script(script, folder)})


def outcomes(kind: str, folder: Path) -> Iterator[dict[str, Any]]:
    """The outcomes of a type, as soon as they are known."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=try_type, args=(kind, folder, sender.send))
    process.start()
    sender.close()
    end, left, problem = time.monotonic() + SECONDS, list(SCRIPTS), ""
    try:
        while receiver.poll(max(0, end - time.monotonic())):
            found = receiver.recv()
            left.remove(found["script"])
            yield found
        problem = f"not done after {SECONDS} seconds"
        process.kill()
    except EOFError:
        process.join()
        if process.exitcode:
            problem = f"the process ended with {process.exitcode}"
    process.join()
    if problem:
        yield {"script": left[0], "outcome": "late", "message": problem}


def to_row(kind: str, found: dict[str, Any]) -> dict[str, str]:
    """An outcome as a row of the table."""
    difference = f"{found['difference']:.2g}" if "difference" in found else ""
    message = " ".join(str(found["message"]).split())[:150]
    values = kind, found["script"], found["outcome"], difference, message
    return dict(zip(COLUMNS, (*values, transformers.__version__, date.today().isoformat()), strict=True))


def write(rows: list[dict[str, str]]) -> None:
    """Write the table."""
    with FILE.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: (row["type"], row["script"])))


def main() -> None:
    """The command line."""
    kinds = sys.argv[1:] or list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    rows = list(csv.DictReader(FILE.open())) if FILE.exists() else []
    counts: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for kind in kinds:
        rows = [row for row in rows if row["type"] != kind]
        with tempfile.TemporaryDirectory() as folder:
            for found in outcomes(kind, Path(folder)):
                counts[found["script"]][found["outcome"]] += 1
                rows.append(to_row(kind, found))
                print(*list(rows[-1].values())[:5], sep="  ", flush=True)
                write(rows)
    for script, count in counts.items():
        print(f"{script}: {', '.join(f'{number} {outcome}' for outcome, number in count.most_common())}")


if __name__ == "__main__":
    main()
