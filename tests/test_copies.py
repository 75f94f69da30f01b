"""The tool that keeps the scripts' common text the same: it finds what drifted, and mends it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DRIFTS = {  # what is written in a copy, and the unit that has drifted
    "Both kinds of end stop the sum": ("Both kinds stop the sum", "compute_gae"),
    "SummaryWriter(str(folder)": ("SummaryWriter((folder)", "Run.__init__"),
    "self.var.lerp_": ("self.var.copy_", "RunningMoments.update"),
    "The folder of a run:": ("A folder of a run:", "Run"),
    "@torch.no_grad()\ndef distance_moved": ("def distance_moved", "distance_moved"),
    'RUN_ONLY = "resume", ': ("RUN_ONLY = ", "RUN_ONLY"),
    "    seed: int = 1": ("    seed: float = 1", "--seed"),
}


@pytest.fixture
def tool(tmp_path):
    """A copy of the repository's scripts, in which the tool can be called."""
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / "tools/copies.py", tmp_path / "tools")
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)

    def call(*flags):
        words = [sys.executable, "-S", "tools/copies.py", *flags]
        return subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)

    return call


def test_nothing_has_drifted(tool):
    """The repository's scripts have their common text in common."""
    assert (tool().returncode, tool().stdout, tool().stderr) == (0, "", "")


@pytest.mark.slow
def test_drift_is_found_and_mended(tool, tmp_path):
    """Each unit is named, with exit status 1; `--fix` restores it, but for settings, which it cannot know."""
    path = tmp_path / "ppo_continuous.py"
    before = changed = path.read_text()
    for text, (new, name) in DRIFTS.items():
        assert before.count(text) == 1
        path.write_text(before.replace(text, new))
        found = tool()
        assert found.returncode == 1
        assert found.stdout.splitlines()[0] == f"ppo_continuous.py: {name} is not as in ppo.py"
        if not name.startswith("--"):
            changed = changed.replace(text, new)
    start, end = changed.index("def restore("), changed.index("def load_policy(")
    path.write_text(changed[:start] + changed[end:])
    assert "ppo_continuous.py: restore is not as in ppo.py" in tool().stdout
    assert tool("--fix").returncode == 0
    assert path.read_text() == before


def test_a_stale_list_of_differences(tool, tmp_path):
    """A name in DIFFERENT that ppo.py has not is reported."""
    path = tmp_path / "tools/copies.py"
    path.write_text(path.read_text().replace(" RUN_ONLY ", " NO_SUCH_UNIT RUN_ONLY "))
    assert "NO_SUCH_UNIT" in tool().stdout
