"""What this machine's GPU does with our scripts, and with others' on the same tasks.

    python benchmarks/gpu.py                  # everything; without a GPU, a small version that says nothing
    python benchmarks/gpu.py --only pendulum
    python benchmarks/gpu.py --store          # adds rows to results/data/speeds.csv, with the card's name

It measures pendulums in PyTorch, with CUDA graphs and without; CheetahRun of MuJoCo Playground, and the same
by Brax's PPO with Playground's settings; Breakout; and in the shape of Qwen2.5-0.5B, iterations of GRPO, by
ours and by TRL, and of ppo_rlhf.py. It needs `pip install -e '.[atari,playground,rlhf]' trl datasets`, and on
a GPU "jax[cuda13]". What is not installed is left out.

Each measurement is a process of its own, and its time is that of a clock. "speed" is that after the third
iteration: start, compiling and recording do not count. "seconds" are from the start of the process to the end
of training, or those of an iteration of a language model; its parts are "collect" ("generate" is most of it)
and "update". "goal" are those until the mean return of 100 training episodes was -200 (pendulums). "memory"
is the peak in GiB: what PyTorch allocated on the GPU (JAX's is not in it), or the process on a CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import peers
import torch
import tyro
from experiments import ROOT
from run import SPEEDS, in_words, provenance, refuse_uncommitted, store

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GOAL = -200
Result = dict[str, float]


@dataclass(frozen=True)
class Case:
    """What is measured: a command of ours, or a peer's name, on a GPU and, smaller, on a CPU."""

    name: str
    large: str
    small: str
    needs: tuple[str, ...] = ()  # modules


PLAYGROUND = ("mujoco_playground",)
LANGUAGE = ("transformers", "trl", "datasets")
ATARI = "--num-threads 16 --total-timesteps 250000 --eval-episodes 1"
FEW_GAMES = "--num-envs 2 --num-steps 8 --num-minibatches 1 --total-timesteps 64 --eval-episodes 1"
FEW = "--num-envs 4 --num-steps 4 --num-minibatches 2 --update-epochs 1 --hidden-sizes 8 8"
TINY = f"--env-id CartpoleBalance {FEW} --total-timesteps 64"
CASES = [
    Case("pendulum", "ppo_gpu.py", f"ppo_gpu.py {FEW} --total-timesteps 200"),
    *(
        Case(
            f"pendulum-{num_envs}{flag}",
            f"ppo_gpu.py --num-envs {num_envs} --total-timesteps {steps} {flag}".strip(),
            f"ppo_gpu.py {FEW} --total-timesteps 200",
        )
        for num_envs in (1024, 4096, 16384)
        for flag, steps in (("", 15_000_000), ("--no-cuda-graphs", 2_000_000))
    ),
    Case("cheetah", "ppo_gpu.py --env-id CheetahRun --total-timesteps 2e7", f"ppo_gpu.py {TINY}", PLAYGROUND),
    Case("cheetah-brax", "brax CheetahRun 20000000", "brax CartpoleBalance 64", PLAYGROUND),
    *(
        Case(
            f"breakout-{num_envs}",
            f"ppo_atari.py --num-envs {num_envs} {ATARI}",
            f"ppo_atari.py {FEW_GAMES}",
            ("ale_py",),
        )
        for num_envs in (8, 64, 256)
    ),
    Case("language-ours", "grpo 128 256 16", "grpo 8 4 8", LANGUAGE[:1]),
    Case("language-rlhf", "ppo_rlhf 128 256 16", "ppo_rlhf 8 4 8", LANGUAGE[:1]),
    Case("language-trl", "trl 128 256 16", "trl 8 4 8", LANGUAGE),
]


def memory() -> float:
    """The peak so far, in GiB."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    kib = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]
    return int(kib) / 2**20


def summary(rows: peers.Rows, start: float, skipped: int) -> Result:
    """Rows of steps, return and time, as a result. The speed is that after the skipped ones."""
    (first, _, begin), (last, _, end) = rows[min(skipped, len(rows) - 1)], rows[-1]
    speed = (last - first) / (end - begin) if last > first else np.nan
    return {"steps": last, "seconds": end - start, "speed": speed}


def ours(start: float, file: str, *words: str) -> Result:
    """Train with one of our scripts, by its command."""
    script: Any = importlib.import_module(file.removesuffix(".py"))
    chosen = tyro.cli(script.Args, args=words)
    if getattr(chosen, "env_id", "Pendulum") not in ("Pendulum", script.Args.env_id):
        chosen = tyro.cli(script.Args, args=words, default=script.OTHERS)
    results = script.train(replace(chosen, device=DEVICE))
    folder = Path(results["checkpoint"]).parent
    returns = {}
    with contextlib.suppress(KeyError):  # if no episode has ended
        returns = {event.step: event.value for event in peers.events(folder, "charts/episodic_return_100")}
    times = peers.events(folder, "charts/SPS")  # one in each iteration
    rows = [(event.step, returns.get(event.step, np.nan), event.wall_time) for event in times]
    result = summary(rows, start, skipped=2) | {"training": rows[-1][1], "memory": memory()}
    result["greedy"] = float(np.mean(results["greedy_returns"]))
    if chosen.env_id == "Pendulum":
        reached = [now - start for _, value, now in rows if value >= GOAL]
        result["goal"] = min(reached, default=np.inf)
    return result


def brax(start: float, env_id: str, steps: str) -> Result:
    """Brax's PPO with Playground's settings for this environment, but for the number of steps."""
    import jax
    from brax.training.agents.ppo import networks
    from brax.training.agents.ppo import train as ppo
    from mujoco_playground import registry, wrapper
    from mujoco_playground.config import dm_control_suite_params

    settings = dict(dm_control_suite_params.brax_ppo_config(env_id))
    settings["num_timesteps"] = int(steps)
    if int(steps) < 1000:
        settings |= {"num_envs": 4, "batch_size": 4, "num_minibatches": 1, "unroll_length": 4}
        settings |= {"num_evals": 2, "num_updates_per_batch": 1, "num_eval_envs": 2, "num_resets_per_eval": 1}
        settings["episode_length"] = 10
    network = partial(networks.make_ppo_networks, **settings.pop("network_factory", {}))
    rows: peers.Rows = []
    # JAX 0.10 has it no more, and Brax 0.14 calls it.
    jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: jax.numpy.stack([x]), tree)

    def progress(step: int, metrics: dict) -> None:
        rows.append((step, float(metrics.get("eval/episode_reward", np.nan)), time.time()))

    impl = {"impl": "jax"} if "impl" in registry.get_default_config(env_id) else None
    env = registry.load(env_id, config_overrides=impl)
    wrap = wrapper.wrap_for_brax_training
    ppo.train(env, progress_fn=progress, wrap_env_fn=wrap, network_factory=network, seed=1, **settings)
    # Of evaluations: the first is before training, and compiling is between it and the second.
    return summary(rows, start, skipped=1) | {"greedy": rows[-1][1]}


def write_model(small: bool) -> None:
    """Write the folder "model", Qwen2.5-0.5B's shape with random weights, and prompts.jsonl."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    size = {"vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24}
    size |= {"num_attention_heads": 14, "num_key_value_heads": 2}
    if small:
        size = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        size |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    words = ["<stop>", *(f"w{i}" for i in range(size["vocab_size"] - 1))]
    tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token="<stop>", pad_token="<stop>")
    tokenizer.save_pretrained("model")
    torch.manual_seed(0)
    config = Qwen2Config(**size, tie_word_embeddings=True, eos_token_id=0, max_position_embeddings=4096)
    with torch.device(DEVICE):
        model = Qwen2ForCausalLM(config)
    model.to(torch.float32 if small else torch.bfloat16).save_pretrained("model")
    rng = random.Random(0)
    lengths = [rng.randrange(40, 120) for _ in range(256)]
    known = min(5000, size["vocab_size"] - 1)
    texts = [" ".join(f"w{rng.randrange(known)}" for _ in range(length)) for length in lengths]
    Path("prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))


def use_its_tokenizer() -> None:
    """Read the tokenizer as it was written: by its name, Qwen2's own class would be taken."""
    import transformers

    transformers.AutoTokenizer.from_pretrained = transformers.PreTrainedTokenizerFast.from_pretrained


def length_reward(rows: list[dict], responses: list[str]) -> list[float]:
    """A number that differs between responses."""
    return [float(len(response) % 7) for response in responses]


def iterations(times: list[float], batch: int) -> Result:
    """The seconds of an iteration, of which the first is left out, and responses per second."""
    between = statistics.median(np.diff(times))
    return {"steps": batch, "seconds": between, "speed": batch / between, "memory": memory()}


def language(file: str, batch: str, length: str, micro: str) -> Result:
    """Iterations of a script: a batch of responses of a length, which are learnt from `micro` at a time."""
    script: Any = importlib.import_module(file)
    write_model(int(length) < 256)
    use_its_tokenizer()
    ends, parts = [], {"generate": [], "collect": [], "update": []}

    def timed(name: str) -> Any:
        function = getattr(script, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.time()
            results = function(*args, **kwargs)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            parts[name].append(time.time() - begin)
            if name == "update":
                ends.append(time.time())
            return results

        return call

    for name in parts:
        setattr(script, name, timed(name))
    groups = {"group_size": 8} if file == "grpo" else {}
    script.train(
        script.Args(
            model="model", prompts="prompts.jsonl", reward_function=("gpu:length_reward",), device=DEVICE,
            bfloat16=DEVICE == "cuda", batch_size=int(batch), update_epochs=1, num_minibatches=1,
            max_response_length=int(length), micro_batch_size=int(micro), generation_batch_size=int(batch),
            total_episodes=4 * int(batch), eval_every=1000, **groups,
        )
    )  # fmt: skip
    result = iterations(ends, int(batch))
    return result | {name: statistics.median(times[1:]) for name, times in parts.items()}


def trl(batch: str, length: str, micro: str) -> Result:
    """Iterations of TRL's GRPOTrainer."""
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    small = int(length) < 256
    write_model(small)
    use_its_tokenizer()
    ends = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            if DEVICE == "cuda":
                torch.cuda.synchronize()
            ends.append(time.time())

    config = GRPOConfig(
        output_dir="trl", per_device_train_batch_size=int(micro), num_generations=8, num_iterations=1,
        gradient_accumulation_steps=int(batch) // int(micro), max_completion_length=int(length), beta=0.0,
        bf16=not small, use_cpu=small, max_steps=4, save_strategy="no", report_to="none", disable_tqdm=True,
        gradient_checkpointing=False, model_init_kwargs={"dtype": "float32"}, learning_rate=1e-6,
    )  # fmt: skip
    trainer = GRPOTrainer(
        "model", lambda completions, **_: length_reward([], completions), config,
        Dataset.from_json("prompts.jsonl"), processing_class=AutoTokenizer.from_pretrained("model"),
        callbacks=[Clock()],
    )  # fmt: skip
    trainer.train()
    return iterations(ends, int(batch))


def measure(command: str, start: float) -> Result:
    """Do one measurement, in this process, which was started then, and a folder of its own."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
    name, *words = command.split()
    functions: dict[str, Any] = {"brax": partial(brax, start), "trl": trl}
    functions |= {file: partial(language, file) for file in ("grpo", "ppo_rlhf")}
    function = functions.get(name, partial(ours, start, name))
    output = contextlib.redirect_stdout(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), output:
        return function(*words)


def in_a_process(command: str) -> Result:
    """`measure`, in a process of its own."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, command, time.time()).result()


def versions() -> str:
    """Of what takes part."""
    found = []
    for package in ("torch", "gymnasium", "ale-py", "jax", "brax", "playground", "transformers", "trl"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package}={version(package)}")
    return " ".join(found)


@dataclass
class Args:  # the comments are the texts of --help
    only: str = ""  # measurements whose name begins with this
    small: bool = DEVICE == "cpu"  # the small version: whether everything runs
    store: bool = False  # store the results for the tables


def main() -> None:
    """The command line."""
    args, failed = tyro.cli(Args, description=__doc__), []
    if args.store:
        refuse_uncommitted()
    about = in_words(provenance()) | {"versions": versions()}
    if DEVICE == "cuda":
        about["machine"] = torch.cuda.get_device_name()
    print(f"on {about['machine']}: {about['versions']}", flush=True)
    done = set()
    for case in CASES:
        command = case.small if args.small else case.large
        if not case.name.startswith(args.only) or command in done:
            continue
        done.add(command)
        missing = [module for module in case.needs if not find_spec(module)]
        if missing:
            print(f"{case.name}: not installed: {', '.join(missing)}", flush=True)
            continue
        try:
            result = in_a_process(command)
        except Exception as error:
            failed.append(case.name)
            print(f"{case.name} failed: {error}    ({command})", flush=True)
            continue
        shown = "  ".join(f"{name} {value:,.4g}" for name, value in result.items() if not np.isnan(value))
        print(f"{case.name}: {shown}    ({command})", flush=True)
        if args.store:
            task, _, number = case.name.partition("-")
            number = number.partition("-")[0]
            row = {"env_id": task, "num_envs": int(number) if number.isdigit() else 0, "variant": command}
            row["rounds"] = 1
            row |= {"timesteps": int(result.pop("steps"))} | result | about
            store(SPEEDS, [row], ["env_id", "num_envs", "variant", "machine"])
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
