"""The scripts' common text is the same in each."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_nothing_has_drifted():
    """What differs on purpose is in the tool's list."""
    tool = subprocess.run([sys.executable, "-S", ROOT / "tools/copies.py"], capture_output=True, text=True)
    assert (tool.returncode, tool.stdout, tool.stderr) == (0, "", "")
