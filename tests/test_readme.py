"""The README keeps its promises: its flags, files and commands exist, and its set-up is what CI runs."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import ale_py
import gymnasium as gym
import pytest
import tyro

import ppo
import ppo_atari
import ppo_continuous

SCRIPTS = {"ppo.py": ppo, "ppo_continuous.py": ppo_continuous, "ppo_atari.py": ppo_atari}
gym.register_envs(ale_py)
ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = [
    line.split(" # ")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
]


def test_every_flag_exists():
    """Each --flag that the README names belongs to the script, the benchmarks or a tool it calls."""
    names = {field.name for script in SCRIPTS.values() for field in fields(script.Args)}
    flags = {f"--{prefix}{name.replace('_', '-')}" for name in names for prefix in ("", "no-")}
    others = {"--only", "--store", "--help", "--logdir", "--nproc-per-node"}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", README)) <= flags | others


@pytest.mark.parametrize("line", [line for line in COMMANDS if re.match(r"(python|torchrun .*) ppo", line)])
def test_every_command_of_the_scripts_is_understood(line):
    """The command line parses, its settings are accepted, and its environment is known to Gymnasium."""
    name, *words = shlex.split(line.partition("ppo")[1] + line.partition("ppo")[2])
    script = SCRIPTS[name]
    args = tyro.cli(script.Args, args=words)
    if not args.track:
        script.check_args(args)
    assert ":" in args.env_id or args.env_id in gym.registry or args.env_id.startswith("Taxi-")


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_every_variant_is_accepted(script):
    """The flags in the table of variants parse and are accepted together."""
    variants = re.findall(r"^\| [^|`]+ \| `(--[^`]+)` \|$", README, re.MULTILINE)
    assert len(variants) == 8
    for flags in variants:
        script.check_args(tyro.cli(script.Args, args=shlex.split(flags)))


def test_set_up_and_ci_run_the_same_tests():
    """The two set-up commands are there, and CI installs the same extra and runs the same test command."""
    setup = [line for line in COMMANDS if "-m venv" in line]
    assert len(setup) == 2
    assert setup[0].endswith("ppo.py --env-id CartPole-v1")
    assert setup[1].endswith("pip install -e '.[dev]' && .venv/bin/python -m pytest")
    ci = (ROOT / ".ci" / "run").read_text()
    assert "pip\" install --quiet -e '.[dev]'" in ci
    assert '/python" -m pytest\n' in ci


def test_links_and_benchmarks_exist():
    """Each local link and each benchmark that the README names is a file."""
    for folder in (ROOT, ROOT / "benchmarks"):
        text = (folder / "README.md").read_text()
        files = re.findall(r"(?:src|srcset)=\"([^\"]+)\"", text)
        for path, _, anchor in re.findall(r"\]\((?!http)([^)#]*)(#([^)]+))?\)", text):
            files.append(path or "README.md")
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (folder / files[-1]).read_text(), re.MULTILINE)
                assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
        assert all((folder / path).is_file() for path in files), files
    assert all((ROOT / path).is_file() for path in re.findall(r"benchmarks/\w+\.py", README))


def test_names_of_functions_and_advice_exist():
    """Functions that the table of equations points to exist, and the table of advice is complete."""
    equations = README.split("## The paper, line by line")[1].split("Variants are settings")[0]
    for name in re.findall(r"`([a-zA-Z_]+)`", equations):
        assert hasattr(ppo, name) or name in ("ratio",), name
    advice = README.split("## Advice")[1].split("## Runs")[0]
    conditions = {condition.__name__ for script in SCRIPTS.values() for condition in script.ADVICE}
    assert conditions <= set(re.findall(r"`(\w+)`", advice))
