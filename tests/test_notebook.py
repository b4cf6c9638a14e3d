"""The example notebook runs from its first cell to the last."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook.ipynb"


def test_every_cell_of_the_notebook_runs(tmp_path, monkeypatch):
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYPIPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = "\n".join(
        output["data"]["text/plain"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    )
    assert "succeeded" in shown
    assert "division by zero" in shown
    assert os.listdir(tmp_path / "runs") != []  # noqa: PTH208
    assert "ZeroDivisionError" in str([cell.get("outputs") for cell in notebook.cells])
