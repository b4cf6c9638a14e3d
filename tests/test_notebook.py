"""The example notebook runs from its first cell to the last."""

from __future__ import annotations

from pathlib import Path

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook.ipynb"


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYPIPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "\n".join(each["data"]["text/plain"] for each in outputs if "data" in each)
    assert "succeeded" in shown
    assert "division by zero" in shown
    assert list((tmp_path / "runs").iterdir())
    assert "calls: succeeded" in str(outputs)
