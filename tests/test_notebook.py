"""The example notebook runs from its first cell to the last."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import nbclient
import nbformat
import pytest

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook.ipynb"


class Ended(NamedTuple):
    """The notebook with its outputs, the HTML that was displayed, and the folder of its runs."""

    notebook: nbformat.NotebookNode
    displayed: list[str]
    runs: Path


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("notebook")
    displayed: list[str] = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, cell_index):
            if message["msg_type"] in ("display_data", "update_display_data"):
                displayed.append(str(message["content"]["data"].get("text/html", "")))
            return super().process_message(message, cell, cell_index)

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAYPIPE_CACHE", str(folder / "cache"))
        patch.setenv("RAYPIPE_RUNS", str(folder / "runs"))
        patch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
        notebook = nbformat.read(NOTEBOOK, as_version=4)
        Client(notebook, timeout=300, resources={"metadata": {"path": str(folder)}}).execute()
    return Ended(notebook, displayed, folder / "runs")


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
    assert "ZeroDivisionError" in str([cell.get("outputs") for cell in ended.notebook.cells])


def test_progress_is_one_output_that_is_updated(ended):
    assert any("0 of 1 stages done" in text and "calls" in text for text in ended.displayed)
    for cell in ended.notebook.cells:
        outputs = cell.get("outputs", [])
        progress = [o for o in outputs if "stages done" in str(o) or _is_empty(o)]
        assert len(progress) <= 1
        assert all(map(_is_empty, progress))
    printed = str([cell.get("outputs") for cell in ended.notebook.cells])
    assert "calls: succeeded" in printed


def _is_empty(output: nbformat.NotebookNode) -> bool:
    """Whether an output is a display that has ended."""
    return output["output_type"] == "display_data" and output["data"].get("text/html") == ""
