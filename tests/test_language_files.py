"""Check what ppo_rlhf.py and grpo.py make of other people's models, tokenizers, rows and reward functions.

What would train wrongly is refused before there is a folder of the run; all else works as it is meant.
"""

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import language_helpers as shared
import numpy as np
import pytest
import torch
from helpers import ROOT, flags, load, same
from language_helpers import LETTERS, STOP, Digits, make_task, new_models, real_args

import grpo
import ppo_rlhf as rlhf

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
safetensors = pytest.importorskip("safetensors.torch")

SIZES = {  # of tiny models, by the names that configurations have
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 64, "vocab_size": len(LETTERS), "eos_token_id": STOP, "bos_token_id": STOP,
    "pad_token_id": 0, "initializer_range": 0.5,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with tiny models and prompts."""
    folder = tmp_path_factory.mktemp("models")
    shared.write_models(folder)
    return folder


def write_model(path, folder, kind, config):
    """Write a tiny model of this class, with the tokenizer of the others, to a folder."""
    torch.manual_seed(0)
    getattr(transformers, kind)(config).save_pretrained(path)
    transformers.AutoTokenizer.from_pretrained(folder / "llama").save_pretrained(path)
    return path


def change_tensors(path, change):
    """Rewrite the tensors of a folder's model."""
    tensors = safetensors.load_file(path / "model.safetensors")
    safetensors.save_file(change(tensors), path / "model.safetensors", {"format": "pt"})


def write_rows(path, *prompts):
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": "b"}) + "\n" for prompt in prompts))
    return str(path)


def refused(script, where, args, what, monkeypatch):
    """Check that settings are refused before there is a folder of the run."""
    monkeypatch.chdir(where)
    with pytest.raises(script.Refused, match=what):
        script.train(args)
    assert not (where / "runs").exists()


# Models


def test_prompts_beyond_the_original_context_of_longrope_are_refused(folder, tmp_path, monkeypatch):
    """There, all rows of a batch are rotated by other factors, also the short ones beside a long one."""
    rotations = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8, "factor": 4.0}
    config = transformers.Phi3Config(
        **SIZES, rope_parameters=rotations, original_max_position_embeddings=16, num_key_value_heads=2
    )
    model = write_model(tmp_path / "phi3", folder, "Phi3ForCausalLM", config)
    args = real_args(grpo, folder, model=str(model), prompts=write_rows(tmp_path / "x", "abc", "a" * 8))
    assert shared.pretrained(grpo, replace(args, eval_prompts=None))
    args.prompts = write_rows(tmp_path / "x", "abc", "a" * 9)
    refused(grpo, tmp_path, args, "9 tokens; the model can take 1 to 8", monkeypatch)


OTHERS = {
    "Roberta": {"is_decoder": True},  # its positions begin at 2
    "Bart": {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64},
    "Rwkv": {"attention_hidden_size": 32, "context_length": 64},  # it has no past_key_values
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_to_which_padding_matters_is_refused(name, folder, tmp_path, monkeypatch):
    """Sampling would be as wrong as learning, so that no metric would show it."""
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **OTHERS[name]})
    model = write_model(tmp_path / name, folder, f"{name}ForCausalLM", config)
    monkeypatch.chdir(tmp_path)
    for script in (grpo, rlhf):
        with pytest.raises((script.Refused, AttributeError, TypeError)) as raised:
            script.train(real_args(script, folder, model=str(model)))
        assert name == "Rwkv" or "padding" in str(raised.value)
    assert not (tmp_path / "runs").exists()


def test_a_reward_model_of_whose_weights_some_are_missing_is_refused(folder, tmp_path, monkeypatch):
    """The library would make up numbers for them."""
    for name, change in {
        "head": lambda x: {key.replace("score.", "v_head."): value for key, value in x.items()},
        "layers": lambda x: {key.replace("model.layers.1", "module.layers.1"): x[key] for key in x},
    }.items():
        shutil.copytree(folder / "llama-reward", tmp_path / name)
        change_tensors(tmp_path / name, change)
        args = real_args(rlhf, folder, reward_model=str(tmp_path / name))
        refused(rlhf, tmp_path, args, "lacks .*(score|layers.1)", monkeypatch)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    for script, flag in ((rlhf, "reward_model"), (rlhf, "model"), (grpo, "model")):
        args = real_args(script, folder, **{flag: str(tmp_path / "adapter")})
        refused(script, tmp_path, args, "adapter is no model: merge it", monkeypatch)


@pytest.mark.parametrize("flag", ["model", "reward_model"])
def test_a_model_with_embeddings_of_fewer_tokens_than_the_tokenizer_has_is_refused(
    flag, folder, tmp_path, monkeypatch
):
    name = "llama" if flag == "model" else "llama-reward"
    shutil.copytree(folder / name, tmp_path / "few")
    auto = (
        transformers.AutoModelForCausalLM
        if flag == "model"
        else transformers.AutoModelForSequenceClassification
    )
    model = auto.from_pretrained(folder / name)
    model.resize_token_embeddings(20)
    model.save_pretrained(tmp_path / "few")
    args = real_args(rlhf, folder, **{flag: str(tmp_path / "few")})
    refused(rlhf, tmp_path, args, "embeddings of 20 tokens", monkeypatch)


TRUNKS = {  # hidden states of another size; a trunk of another name
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 16, "do_layer_norm_before": False},
    "Llama4": {"intermediate_size_mlp": 64, "head_dim": 16, "num_key_value_heads": 1, "num_local_experts": 2},
}


@pytest.mark.parametrize("name", TRUNKS)
def test_the_critic_of_an_unusual_trunk_learns(name, folder, tmp_path, monkeypatch):
    kind = "Llama4TextConfig" if name == "Llama4" else f"{name}Config"
    config = getattr(transformers, kind)(**SIZES, **TRUNKS[name])
    model = write_model(tmp_path / name, folder, f"{name}ForCausalLM", config)
    monkeypatch.chdir(tmp_path)
    path = rlhf.train(real_args(rlhf, folder, model=str(model), critic_learning_rate=1e-2))
    head = load(path)["weights"]["critic.head.weight"]
    assert head.shape == (1, 16 if name == "OPT" else 32)
    assert head.any()


def test_a_reward_model_may_have_more_tokens_than_the_policy(folder, tmp_path):
    """Many add a padding token to the policy's tokenizer."""
    shutil.copytree(folder / "llama-reward", tmp_path, dirs_exist_ok=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path)
    models, _ = shared.pretrained(rlhf, real_args(rlhf, folder, reward_model=str(tmp_path)))
    batch = shared.to_responses([4, 5], [[6, 7, 1], [8, 1]])
    before, _ = shared.pretrained(rlhf, real_args(rlhf, folder, reward_model=str(folder / "llama-reward")))
    torch.testing.assert_close(models.reward_model(batch), before.reward_model(batch))


def test_a_checkpoint_of_which_a_part_would_not_be_saved_is_refused(folder, tmp_path, monkeypatch):
    """A model of images and texts, say, of which a language model loads the part that it knows."""
    shutil.copytree(folder / "llama", tmp_path / "vl")
    change_tensors(tmp_path / "vl", lambda x: x | {"vision_tower.weight": torch.ones(2, 2)})
    args = real_args(grpo, folder, model=str(tmp_path / "vl"))
    refused(grpo, tmp_path, args, "vision_tower.weight.*would not be saved", monkeypatch)


def test_masks_in_old_files_are_not_missed(folder, tmp_path):
    """They are computed, and nothing is lost without them."""
    shutil.copytree(folder / "gpt2", tmp_path / "old")
    more = {
        "transformer.h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.0.attn.attention.bias": torch.ones(2, 2),
    }
    change_tensors(tmp_path / "old", lambda x: x | more)
    assert shared.pretrained(grpo, real_args(grpo, folder, model=str(tmp_path / "old")))


def test_a_reward_model_whose_padding_ends_the_prompts_is_accepted(folder, tmp_path):
    """Its own pooling leaves that token out; here, it is read after the last token."""
    shutil.copytree(folder / "llama-reward", tmp_path / "pad")
    config = json.loads((tmp_path / "pad" / "config.json").read_text())
    (tmp_path / "pad" / "config.json").write_text(json.dumps(config | {"pad_token_id": 3}))
    args = real_args(
        rlhf, folder, prompts=write_rows(tmp_path / "x", "ab", "cdb"), reward_model=str(tmp_path / "pad")
    )
    assert shared.pretrained(rlhf, args)


def test_all_prompts_may_be_equally_long(folder, tmp_path, monkeypatch):
    """A model to which padding matters is refused all the same: later prompts may have other lengths."""
    config = transformers.BartConfig(**{**SIZES, **OTHERS["Bart"]})
    model = write_model(tmp_path / "bart", folder, "BartForCausalLM", config)
    args = real_args(grpo, folder, model=str(model), prompts=write_rows(tmp_path / "x", "abc", "def"))
    refused(grpo, tmp_path, args, "padding", monkeypatch)


def test_stop_tokens_of_a_task_are_kept(folder):
    args = real_args(grpo, folder)
    task = grpo.load_task(args)._replace(stop_tokens=[7])
    assert sorted(grpo.load_pretrained(args, task)[1].stop_tokens) == [STOP, 7]


def test_a_checkpoint_with_weights_of_other_names_is_not_resumed(folder, tmp_path, monkeypatch):
    """Otherwise, training would go on from the first weights."""
    monkeypatch.chdir(tmp_path)
    path = grpo.train(real_args(grpo, folder))
    content = load(path)
    content["weights"] = {name.replace("layers", "blocks"): x for name, x in content["weights"].items()}
    torch.save(content, path)
    with pytest.raises(grpo.Refused, match="other names"):
        grpo.train(real_args(grpo, folder, resume=str(path), total_episodes=128))


def test_a_reward_model_is_scored_as_it_scores_itself(folder, tmp_path, monkeypatch):
    """One with a head of another kind beside `score` would be read wrongly."""
    monkeypatch.setattr(transformers.LlamaForSequenceClassification, "forward", halved(
        transformers.LlamaForSequenceClassification.forward
    ))  # fmt: skip
    args = real_args(rlhf, folder, reward_model=str(folder / "llama-reward"))
    refused(rlhf, tmp_path, args, "reward-model", monkeypatch)


def halved(forward):
    def changed(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits / 2 + 1
        return output

    return changed


# Tokenizers and texts


def metaspace_tokenizer(*words):
    """Return a tokenizer of words that begin with ▁, as those of Llama 2 and Mistral."""
    vocabulary = {
        token: i for i, token in enumerate(["<unknown>", "<stop>", *(f"▁{word}" for word in words)])
    }
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unknown>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    model.decoder = tokenizers.decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<stop>", unk_token="<unknown>"
    )


def test_a_prompt_that_the_tokenizer_does_not_know_is_refused(folder, tmp_path, monkeypatch):
    """A folder without the tokenizer's files can give one that knows no word."""
    for script in (grpo, rlhf):
        args = real_args(script, folder, prompts=write_rows(tmp_path / "x", "ab", "ABC"))
        refused(script, tmp_path, args, "'ABC'.*no token that the tokenizer knows", monkeypatch)


def answer(tokenizer, prompt, tokens, stop_tokens=(STOP,), script=rlhf):
    """Return the text of a response of these tokens to a prompt."""
    task = script.Task(tokenizer, list(stop_tokens), [], [], {})
    prompts = script.pad([script.encode(tokenizer, {"prompt": prompt})], "left", "cpu")
    (text,) = script.decode(
        task, [{"prompt": prompt}], script.Responses(*prompts, *script.pad([tokens], "right", "cpu"))
    )
    return text


def test_the_text_of_a_response_is_what_it_adds_to_the_prompt():
    """A tokenizer that drops a space where a text begins would join the words."""
    tokenizer = metaspace_tokenizer("two", "plus", "is", "five")
    tokens = [*tokenizer.encode("five is"), STOP]
    assert tokenizer.decode(tokens, skip_special_tokens=True) == "five is"
    assert answer(tokenizer, "two plus is", tokens) == " five is"
    assert answer(tokenizer, "two plus is", []) == ""
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert answer(tokenizer, [{"role": "user", "content": "two plus"}], tokens) == "five is"


def test_a_stop_token_is_not_part_of_the_text_and_spaces_stay_as_they_are(folder):
    """The stop token is not marked special, and the tokenizer cleans up spaces by default."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder / "llama", clean_up_tokenization_spaces=True
    )
    tokenizer.add_tokens(["<end_of_turn>", "x", " !"])
    stop = tokenizer.convert_tokens_to_ids("<end_of_turn>")
    assert answer(tokenizer, "ab", [*tokenizer.encode("c"), stop], [stop]).strip() == "c"
    assert "<end_of_turn>" in answer(tokenizer, "ab", [stop, *tokenizer.encode("c")], [stop])
    assert answer(tokenizer, "ab", tokenizer.encode("x !")) == " x  !"


def test_a_response_that_completes_a_character_of_the_prompt_is_decoded_alone():
    """Its text does not begin with that of the prompt, which must not become a part of it."""

    def decode(tokens, **options):
        return bytes(tokens).decode(errors="replace")

    task = rlhf.Task(SimpleNamespace(decode=decode), [STOP], [], [], {})
    batch = rlhf.Responses(
        *rlhf.pad([[0x61, 0xC3]], "left", "cpu"), *rlhf.pad([[0xA9, 0x62]], "right", "cpu")
    )
    assert rlhf.decode(task, [{"prompt": "a text"}], batch) == ["\ufffdb"]


def test_an_empty_prompt_of_a_program_is_the_start_token():
    tokenizer = Digits()
    tokenizer.encode = lambda text, add_special_tokens=True: [2] * add_special_tokens + Digits().encode(text)
    for script in (grpo, rlhf):
        task = make_task(["", "3 3"], script)._replace(tokenizer=tokenizer)
        batch, _ = script.generate(new_models(script).actor, task, task.prompts, script.Args())
        assert shared.tokens_of(batch)[0] == [[2], [2, 3, 3]]


# Reward functions


def test_columns_of_trl_reward_functions_are_read_once_for_each_row():
    """Not once for each pair of rows."""
    reads = []

    class Row(dict):
        def get(self, key, default=None):
            reads.append(key)
            return super().get(key, default)

    rows = [Row(prompt="a", answer=str(i), level=i) for i in range(50)] + [Row(prompt="b", other=1)]
    columns = grpo.arguments_of_trl(rows, ["x"] * 51, [[2]] * 51)
    assert columns["answer"] == [str(i) for i in range(50)] + [None]
    assert columns["other"] == [None] * 50 + [1]
    assert columns["prompts"] == ["a"] * 50 + ["b"]
    assert len(reads) == 3 * 51


def test_small_differences_of_large_rewards_count():
    """Float32 has no digits for them."""
    task = make_task(["2 3"], grpo, far=lambda rows, texts: [-2e9 + i for i in range(len(texts))])
    args = grpo.Args(batch_size=8, group_size=4, scale_rewards="none", max_response_length=3)
    batch, *_ = grpo.collect(new_models(grpo), task, args)
    assert batch.advantages.tolist() == [-1.5, -0.5, 0.5, 1.5] * 2


def test_advantages_are_continuous_in_the_scores():
    """Those of a group of equal scores are nearly those of a group of nearly equal ones."""
    args, kl = grpo.Args(group_size=4, kl_coef=0.1), torch.tensor([5.0, 0.0, 0.0, 0.0])
    equal, nearly = (
        grpo.group_advantages(torch.tensor([1.0, 1.0, 1.0, last]), kl, args) for last in (1.0, 0.9999)
    )
    torch.testing.assert_close(equal, nearly, atol=1e-2, rtol=0)
    assert (equal[0] < -1) == (nearly[0] < -1)


def test_a_temperature_of_0_takes_the_larger_of_two_logits_however_close_they_are():
    low = torch.tensor(7.0)
    logits = torch.stack([low, torch.nextafter(low, torch.tensor(8.0))]).expand(1000, 2)
    tokens, _ = rlhf.sample(logits, 0.0)
    assert (tokens == 1).all()


def noisy(rows, responses):
    """Reward at random, by Python's, NumPy's and PyTorch's generators."""
    return [random.random() + np.random.normal() + torch.rand(()).item() for _ in responses]  # noqa: NPY002


@pytest.mark.parametrize("script", [rlhf, grpo])
def test_training_is_the_same_whatever_is_evaluated(script, folder, tmp_path, monkeypatch):
    """Also if reward functions draw random numbers, and evaluation does."""
    monkeypatch.setattr(shared, "noisy", noisy, raising=False)
    args = real_args(script, folder, reward_function=("language_helpers:noisy",), eval_temperature=1.0)
    paths = []
    for eval_every in (1, 1000):
        (tmp_path / str(eval_every)).mkdir()
        monkeypatch.chdir(tmp_path / str(eval_every))
        paths.append(script.train(replace(args, eval_every=eval_every)))
    assert same(load(paths[0])["weights"], load(paths[1])["weights"])


def test_completion_ids_alone_make_a_function_one_of_trl():
    """It counts tokens, not the letters of texts."""
    task = make_task(
        ["2 3"], grpo, short=lambda prompts, completion_ids, **kwargs: [-len(x) for x in completion_ids]
    )
    batch = grpo.tokenize(task, task.prompts * 2, ["0 0", "2"], grpo.Args())
    assert grpo.score(task, task.prompts * 2, batch)[0].tolist() == [-3, -2]


def hidden(function):
    """Decorate without functools.wraps."""
    return lambda *args, **kwargs: function(*args, **kwargs)


@pytest.mark.parametrize("function", [
    hidden(shared.trl_reward), lambda rows, texts: {1.0, 2.0}, lambda rows, texts: {0: 1.0, 1: 2.0},
])  # fmt: skip
def test_a_function_whose_parameters_are_hidden_or_that_returns_no_list_is_refused(function):
    task = make_task(["2 3"], grpo, odd=function)
    batch = grpo.tokenize(task, task.prompts * 2, ["0 0", "2"], grpo.Args())
    with pytest.raises(ValueError, match=r"odd (has only|must return)"):
        grpo.score(task, task.prompts * 2, batch)


POOL = """
import multiprocessing

def reward(rows, responses):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.map(len, responses)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="workers are forked")
def test_a_reward_function_may_have_worker_processes(folder, tmp_path):
    """They are ended by a signal, for which the script has a handler that workers inherit."""
    (tmp_path / "pool.py").write_text(POOL)
    args = real_args(grpo, folder, total_episodes=32, reward_function=("pool:reward",), eval_every=100)
    changed = {name: value for name, value in vars(args).items() if value != getattr(grpo.PRETRAINED, name)}
    names = changed.pop("reward_function")
    command = [sys.executable, str(ROOT / "grpo.py"), *flags(**changed), "--reward-function", *names]
    done = subprocess.run(
        command, cwd=tmp_path, env=shared.ENVIRONMENT, capture_output=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert b"stopping" not in done.stderr


# Progress


def test_saving_a_model_shows_no_progress_bars(folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    transformers.utils.logging.enable_progress_bar()
    path = grpo.train(real_args(grpo, folder, eval_every=1))
    shown = capfd.readouterr()
    assert "Loading weights" in shown.err  # this takes long, once
    assert "Writing" not in shown.err
    assert (path.parent / "model").exists()
