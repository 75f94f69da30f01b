"""Tests of the documents: their code blocks run, and the flags, files and metrics that they name exist."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import gymnasium as gym
import helpers
import numpy as np
import pytest
import torch
import tyro

import coach
import grpo
import plot
import ppo
import ppo_atari
import ppo_continuous
import ppo_gpu
import ppo_lstm
import ppo_rlhf

SCRIPTS = {
    "ppo.py": ppo,
    "ppo_continuous.py": ppo_continuous,
    "ppo_atari.py": ppo_atari,
    "ppo_lstm.py": ppo_lstm,
}
ROOT = Path(__file__).resolve().parent.parent
NAMES = (
    "README.md",
    "CONTRIBUTING.md",
    "results/README.md",
    *(
        str(p.relative_to(ROOT))
        for name in ("docs", "exercises", "policies")
        for p in ROOT.glob(f"{name}/*.md")
    ),
)
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in NAMES}
README, METRICS, VARIANTS = PAGES["README.md"], PAGES["docs/metrics.md"], PAGES["docs/scripts.md"]
TESTED = README + PAGES["docs/first_hour.md"]
TESTED += "".join(text for name, text in PAGES.items() if name.startswith("docs/recipes"))
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TESTED, re.DOTALL | re.MULTILINE)
PROGRAMS = [text for language, text in BLOCKS if language == "python"]
PROGRAMS = [text for text in PROGRAMS if "huggingface_hub" not in text]  # test_policies.py has a Hub for them
COMMANDS = [
    line for language, text in BLOCKS if language == "sh" for line in re.findall("^[^#].*", text, re.M)
]
SET_UP = [line for line in COMMANDS if re.match(r"(python3 -m venv|source|pip|uv) ", line)]
LOOPS = [line for line in COMMANDS if line.startswith("for ")]
CALLS = [line for line in dict.fromkeys(COMMANDS) if re.match(r"python (ppo\w*|plot|coach)\.py", line)]
TOOLS = {"plot.py": plot, "coach.py": coach}
CHANGED = ppo, ppo_continuous, ppo_lstm  # by programs; what they replace is put back
# Settings with which a command takes about a second. Where a script lacks one, it is left out.
SHORT = {"total_timesteps": 130, "num_envs": 6, "num_steps": 16, "update_epochs": 1, "num_minibatches": 1}
SHORT |= {"eval_episodes": 2}


def parameters(texts: list[str]) -> list:
    """Return texts as parameters of a test, with marks for those that take long."""
    found = []
    for text in texts:
        marks = []
        if re.search("--compile|torch.export|--capture-video|atari|import ppo_gpu|optuna", text):
            marks = [pytest.mark.slow]
        if re.search("import jax|torchrun", text):
            marks = [pytest.mark.nightly]
        found.append(pytest.param(text, marks=marks, id=text.splitlines()[0].strip("# ")))
    return found


def shortened(script) -> list[str]:
    """Return flags that make a command of this script short."""
    names = [field.name for field in fields(script.Args) if field.name in SHORT]
    return [word for name in names for word in (f"--{name.replace('_', '-')}", str(SHORT[name]))]


def call(name: str, folder: Path, *args: str):
    """Run a script or a tool in a folder. It must succeed. Return its output."""
    if name in SCRIPTS:  # by default, it is the name of the file that runs, here that of pytest
        args += ("--exp-name", Path(name).stem)
    done = helpers.call(SimpleNamespace(script=(SCRIPTS | TOOLS)[name], file=name), folder, *args)
    assert done.status == 0, done.err
    return done.out


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make a folder with `my_env.py`, the policies, and runs of `ppo.py` and `ppo_continuous.py`."""
    folder = tmp_path_factory.mktemp("user")
    shutil.copytree(ROOT / "policies", folder / "policies")
    (program,) = (text for text in PROGRAMS if text.startswith("# my_env.py"))
    (folder / "my_env.py").write_text(program, encoding="utf-8")
    call("ppo.py", folder, *shortened(ppo))
    words = "--env-id", "Pendulum-v1", "--eval-every", "1000"
    call("ppo_continuous.py", folder, *words, *shortened(ppo_continuous))
    return folder


@pytest.fixture
def user(folder, tmp_path, monkeypatch):
    """Work as a user in a copy of this folder. Changes of the scripts are undone afterwards."""
    before, copy = [dict(vars(script)) for script in CHANGED], tmp_path / "user"
    shutil.copytree(folder, copy)
    monkeypatch.chdir(copy)
    monkeypatch.syspath_prepend(str(copy))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **_: None, finish=lambda: None))
    yield copy
    for script, names in zip(CHANGED, before, strict=True):
        vars(script).update(names)
    gym.registry.pop("Corridor-v0", None)
    sys.modules.pop("my_env", None)


def checkpoint_of(script: str, folder: Path) -> Path:
    """Return the checkpoint of a script in the user's folder; `ppo_gpu.py` trains only now."""
    if script == "ppo_gpu":
        args = ppo_gpu.Args(exp_name="for_export", num_envs=64, total_timesteps=2000, device="cpu")
        return Path(ppo_gpu.train(args)["checkpoint"])
    pattern = {"ppo": "CartPole*", "ppo_continuous": "Pendulum*"}[script]
    (path,) = folder.glob(f"runs/{pattern}/checkpoint.pt")
    return path


def test_each_command_of_the_pages_is_run_by_a_test_below():
    """`python my_env.py` runs with the other programs."""
    assert set(COMMANDS) - {*SET_UP, *LOOPS, *CALLS} == {"python my_env.py"}
    assert {language for language, _ in BLOCKS} == {"python", "sh", "text"}


@pytest.mark.parametrize("program", parameters(PROGRAMS))
def test_each_python_block_runs_by_the_command_in_its_first_line(program, user, monkeypatch, capsys):
    """Its training is short here."""
    for module in ("optuna", "onnxscript", "onnxruntime", "jax", "mjlab", "minigrid", "envpool"):
        if re.search(rf"(import|from|install.*) {module}\b", program):
            pytest.importorskip(module)
    if "Taxi-v4" in program and "Taxi-v4" not in gym.registry:
        pytest.skip("Gymnasium 1.1 has Taxi-v3")
    if program.startswith("# my_processes.py"):
        run_by_torchrun(program, user)
        return
    trained_by = next((name for name in ("ppo_gpu", "ppo_continuous") if f"import {name}" in program), "ppo")
    command = re.match(r"# (\w+\.py): python \1 (.*)|", program)
    words = (command[2] or "").split()
    words = [str(checkpoint_of(trained_by, user)) if "checkpoint" in word else word for word in words]
    if "ppo.main()" in program:
        imported = re.findall(r"^import (ppo\w*)(?: as ppo)?$", program, re.M)[-1]
        words += shortened(SCRIPTS[f"{imported}.py"])
    program = re.sub(r"total_timesteps=[\d_]+", "total_timesteps=2000", program)
    if "ppo_gpu" in program:
        for name in ("Agent", "make_batch", "normalize_rollout"):  # what the program changes is undone
            monkeypatch.setattr(ppo_gpu, name, getattr(ppo_gpu, name))
        program = program.replace("total_timesteps=2000", "num_envs=64, total_timesteps=8192")
        if "Playground" in program:
            monkeypatch.setattr(ppo_gpu, "evaluate", lambda *_: np.zeros(1))  # of 1,000 steps
        else:  # Playground takes long to compile
            program = program.replace("CartpoleBalance", "Pendulum")
    (user / "program.py").write_text(program.replace("n_trials=10", "n_trials=2"), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["program.py", *words])
    runpy.run_path(str(user / "program.py"), run_name="__main__")
    warned = "do not compute the same policy" in capsys.readouterr().out
    assert warned == program.startswith("# symmetry.py")  # of which the text says so
    if command[1] == "export.py":
        check_exported(user, checkpoint_of("ppo", user))


def run_by_torchrun(program: str, folder: Path) -> None:
    """Run two processes by the command in the first line. They make only one run, with the steps of both."""
    (folder / "my_processes.py").write_text(program, encoding="utf-8")
    words = shlex.split(program.splitlines()[0].partition("torchrun ")[2])
    words += shortened(ppo_continuous)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("runs/*my_processes*/checkpoint.pt")
    steps = ppo_continuous.load_checkpoint(path)[1]["state"]["global_step"]
    assert steps % (2 * 6 * 16) == 0


def check_exported(folder: Path, checkpoint: Path) -> None:
    """Check that both exported policies act as the checkpoint's policy does, in batches of any size."""
    from onnx.reference import ReferenceEvaluator

    obs = torch.randn(7, 4)
    expected = ppo.load_policy(checkpoint, gym.make("CartPole-v1"))(obs.numpy())
    exported = torch.export.load(str(folder / "policy.pt2")).module()
    np.testing.assert_array_equal(exported(obs).numpy(), expected)
    (actions,) = ReferenceEvaluator(str(folder / "policy.onnx")).run(None, {"obs": obs.numpy()})
    np.testing.assert_array_equal(actions, expected)


@pytest.mark.parametrize("line", parameters(CALLS))
def test_each_command_runs(line, user):
    """Its training is short here, and the checkpoint that it names is one that exists."""
    line = line.replace("runs/.../checkpoint.pt", str(checkpoint_of("ppo", user)))
    name, *args = shlex.split(line, comments=True)[1:]
    if name in TOOLS:
        call(name, user, *args)
    else:
        # A run that is resumed must have more steps than before, and keeps the sizes of its networks.
        shorter = ["--total-timesteps", "600"] if "--resume" in args else shortened(SCRIPTS[name])
        assert "evaluation return" in call(name, user, *args, *shorter)


def test_every_flag_exists():
    """The flags of the documents are those of a script, or of a program that they call."""
    settings = [script.Args for script in (*SCRIPTS.values(), ppo_gpu, ppo_rlhf, grpo)]
    names = {field.name for kind in (*settings, coach.Plan, coach.Check) for field in fields(kind)}
    flags = {f"--{prefix}{name.replace('_', '-')}" for name in names for prefix in ("", "no-")}
    others = {"--help", "--compare", "--nproc-per-node", "--fix", "--check", "--logdir"}
    others |= {"--torch-backend", "--no-deps", "--index-url", "--no-build-isolation"}  # of uv and pip
    others |= {"--with"}  # of uv
    others |= {"--fast", "--lowest", "--all"}  # of .ci/run and pytest
    others |= {"--line", "--file", "--tag", "--output"}  # of exercises/check.py and plot.py
    others |= {"--nnodes", "--rdzv-backend", "--rdzv-endpoint"}  # of torchrun
    others |= {"--only", "--store", "--dry-run", "--peers", "--cleanrl", "--purejaxrl"}
    for name, text in PAGES.items():
        assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text)) <= flags | others, name


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_the_flags_of_each_variant_are_accepted_together(script):
    variants = re.findall(r"^\| [^|`]+ \| `(--[^`]+)` \| ([^|]*)\|$", VARIANTS, re.MULTILINE)
    assert len(variants) > 5
    for flags, also in variants:
        if script is ppo or f"{script.__name__}.py" in also:
            helpers.check(script, tyro.cli(script.Args, args=shlex.split(flags)))


def test_local_links_lead_to_files_and_headings():
    for name, text in PAGES.items():
        path, text = ROOT / name, re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        files = re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
        for target, anchor in re.findall(r"\]\((?!http)([^)#]*)(?:#([^)]+))?\)", text):
            files.append(target or path.name)
            if anchor and not target.endswith(".py"):
                linked = (path.parent / files[-1]).read_text(encoding="utf-8")
                headings = re.findall(r"^#+ (.*)$", linked, re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
        assert [file for file in files if not (path.parent / file).is_file()] == [], name


def test_links_to_lines_lead_to_the_functions_that_they_name():
    found = 0
    for name, text in PAGES.items():
        for function, target, line in re.findall(r"\[`([\w.]+)`\]\(([^)]+\.py)#L(\d+)\)", text):
            lines = ((ROOT / name).parent / target).read_text(encoding="utf-8").splitlines()
            assert f"def {function.split('.')[-1]}(" in lines[int(line) - 1], (name, function)
            found += 1
    assert found > 30


def test_the_tests_that_pages_name_exist():
    """A link to a test has its name, and leads to its file."""
    named = [
        (name, *found) for name in PAGES for found in re.findall(r"\[`(test_\w+)`\]\(([^)]+)\)", PAGES[name])
    ]
    assert len(named) > 5
    for page, test, target in named:
        file = (ROOT / page).parent / target
        assert f"def {test}(" in file.read_text(encoding="utf-8"), (page, test)


def tags_in(folder: Path) -> set[str]:
    """Return the tags of a run's scalars."""
    return {*helpers.curves(folder), "charts/SPS"}


def documented_tags() -> set[str]:
    """Return the tags that have a row in a table."""
    rows = [line.split(" | ")[0] for line in METRICS.splitlines() if line.startswith("| `")]
    return {tag for row in rows for tag in re.findall(r"`(\w+/\w+)`", row)}


@pytest.mark.parametrize("name", parameters(list(SCRIPTS)))
def test_every_metric_is_documented(name, folder, tmp_path):
    if name in ("ppo_atari.py", "ppo_lstm.py"):
        folder = tmp_path
        call(name, folder, *shortened(SCRIPTS[name]))
    tags = tags_in(next(folder.glob(f"runs/*/{name}")).parent)  # the copy of the script
    assert len(tags) > 10
    assert tags <= documented_tags()


def test_every_documented_metric_is_written(folder, tmp_path):
    """Those of Atari games are only looked for in the text of the script."""
    call("ppo.py", tmp_path, "--adapt", "clip-coef", "--anneal-ent-coef", *shortened(ppo))
    call("ppo.py", tmp_path, "--surrogate", "kl-penalty", "--adapt", "kl-coef", *shortened(ppo))
    written = set().union(*(tags_in(run) for path in (folder, tmp_path) for run in path.glob("runs/*")))
    atari = (ROOT / "ppo_atari.py").read_text(encoding="utf-8")
    assert [tag for tag in documented_tags() - written if f'"{tag.split("/")[1]}"' not in atari] == []


def test_the_equations_of_the_readmes_table_are_above_the_ruled_line_of_ppo():
    first_half = (ROOT / "ppo.py").read_text(encoding="utf-8").split("# ========")[0]
    (table,) = re.findall(r"\| paper \| code \|\n(.*?)\n\n", README, re.DOTALL)
    names = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.rsplit(" | ", 1)[1])]
    assert len(names) > 5
    for name in names:
        assert re.search(rf"^(def|class) {name}\b", first_half, re.MULTILINE), name
