"""Tests of exercises/ppo.ipynb: its cells run, and its stored outputs are small and complete."""

import re
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
from nbclient import NotebookClient  # noqa: E402

FOLDER = Path(__file__).resolve().parent.parent / "exercises"
STORED = nbformat.read(FOLDER / "ppo.ipynb", as_version=4)
CODE = [cell for cell in STORED.cells if cell.cell_type == "code"]


def printed(notebook):
    """Return all that the cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    streams = [output for output in outputs if output.output_type == "stream"]
    assert {output.name for output in streams} == {"stdout"}
    return "".join(output.text for output in streams)


def numbers(text):
    """Return the share of the optimum's gain, and the cosine of the gradient of most samples, as printed."""
    share = re.search(r"([\d.]+)% of the gain", text)[1]
    cosine = re.findall(r"cosine ([\d.]+)", text)[-1]
    return float(share), float(cosine)


@pytest.mark.slow
def test_the_notebook_runs_and_its_language_model_reaches_the_optimum(tmp_path):
    """Nothing is written beside it."""
    before = {*FOLDER.iterdir()}
    notebook = nbformat.from_dict({**STORED, "cells": [dict(cell) for cell in STORED.cells]})
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER)}}).execute()
    share, cosine = numbers(printed(notebook))
    assert share > 99
    assert cosine > 0.999
    assert "exit status 1" in printed(notebook)  # of `coach.py check` on the broken run
    assert {path for path in FOLDER.iterdir() if path.name != "__pycache__"} <= before


def test_the_stored_outputs_are_of_one_run_of_all_cells_and_small():
    assert [cell.execution_count for cell in CODE] == [*range(1, len(CODE) + 1)]
    share, cosine = numbers(printed(STORED))
    assert share > 99
    assert cosine > 0.999
    pictures = [output for cell in CODE for output in cell.outputs if "image/png" in output.get("data", {})]
    assert len(pictures) >= 6
    assert (FOLDER / "ppo.ipynb").stat().st_size < 1_000_000


def test_links_of_the_notebook_lead_to_files():
    text = "".join(cell.source for cell in STORED.cells if cell.cell_type == "markdown")
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert len(links) > 3
    assert [link for link in links if not (FOLDER / link).exists()] == []
