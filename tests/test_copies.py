"""The scripts' common text is the same in each."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_nothing_has_drifted():
    """What differs on purpose is in the tool's list."""
    tool = subprocess.run([sys.executable, "-S", ROOT / "tools/copies.py"], capture_output=True, text=True)
    assert (tool.returncode, tool.stdout, tool.stderr) == (0, "", "")


def load_tool(name):
    """A tool, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_copied_unit_brings_its_imports():
    """A function that was added to the original, with a module that only it needs, arrives in the copy."""
    copies = load_tool("copies")
    original = "import json\nimport math\n\n\nclass Args:\n    a: int = 1\n\n\ndef f():\n    return 1\n"
    changed = original + "\n\ndef g():\n    return math.pi + len(json.dumps(1))\n"
    copy = "import json\n\n\nclass Args:\n    a: int = 1\n\n\ndef f():\n    return 2\n"
    fixed = copies.fixed(changed, copy, set())
    assert copies.drifted(changed, fixed, set()) == []
    scope = {}
    exec(fixed, scope)
    assert scope["g"]() > 4
    assert fixed.count("import json") == 1


def test_a_selection_of_no_run_fails():
    """`tools/same.py` compares all seven scripts, and says so if it has nothing to compare."""
    same = ROOT / "tools/same.py"
    tool = subprocess.run(
        [sys.executable, same, "HEAD", "--only", "no such run"], capture_output=True, text=True
    )
    assert tool.returncode != 0
    assert "no such run" in tool.stderr
    scripts = {line.split()[0] for line in load_tool("same").RUNS.strip().splitlines()}
    assert scripts == {path.name for path in ROOT.glob("*.py")} - {"plot.py", "coach.py", "memory_tasks.py"}
