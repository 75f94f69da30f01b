"""Tests of the tools: the common text of the scripts is the same in each."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_text_that_scripts_share_is_equal_unless_the_tool_lists_it():
    tool = subprocess.run([sys.executable, "-S", ROOT / "tools/copies.py"], capture_output=True, text=True)
    assert (tool.returncode, tool.stdout, tool.stderr) == (0, "", "")


def load_tool(name):
    """Import a tool as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tools_same_compares_all_scripts():
    scripts = {line.split()[0] for line in load_tool("same").RUNS.strip().splitlines()}
    others = {
        "plot.py",
        "coach.py",
        "memory_tasks.py",
        "playground_tasks.py",
        "ppo_minimal.py",
    }
    assert scripts == {path.name for path in ROOT.glob("*.py")} - others
