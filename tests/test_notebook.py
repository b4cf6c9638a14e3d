"""The example notebook runs from its first cell to the last."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook.ipynb"


class Ended(NamedTuple):
    """The notebook with its outputs, and the folder of its runs."""

    notebook: nbformat.NotebookNode
    runs: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("notebook")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAYPIPE_CACHE", str(folder / "cache"))
        patch.setenv("RAYPIPE_RUNS", str(folder / "runs"))
        patch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        nbclient.NotebookClient(
            notebook, timeout=300, resources={"metadata": {"path": str(folder)}}
        ).execute()
    return Ended(notebook, folder / "runs")


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(ended):
    shown = "\n".join(
        output["data"]["text/plain"]
        for cell in ended.notebook.cells
        for output in cell.get("outputs", [])
        if "data" in output
    )
    assert "succeeded" in shown
    assert "division by zero" in shown
    assert list(ended.runs.iterdir())
    printed = str([cell.get("outputs") for cell in ended.notebook.cells])
    assert "calls: succeeded" in printed
