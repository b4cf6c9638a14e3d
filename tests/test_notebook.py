"""The example notebook runs from its first cell to the last."""

from __future__ import annotations

import os
from pathlib import Path

import nbclient
import nbformat

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "notebook.ipynb"


PROGRAM = """
import time
import raypipe as rp

def slow(x):
    time.sleep(x)
    return {"y": x}

rp.map(slow, {"x": [1, 3]}, cpus=1)
"""


def test_progress_is_one_output_that_is_updated(tmp_path, monkeypatch):
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PROGRAM)])
    messages: list[str] = []

    class Client(nbclient.NotebookClient):
        def process_message(self, message, cell, cell_index):
            if message["msg_type"] in ("display_data", "update_display_data"):
                messages.append(str(message["content"]["data"].get("text/html", "")))
            return super().process_message(message, cell, cell_index)

    Client(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert any("0 of 1 stages done" in text and "calls" in text for text in messages)
    outputs = [o for o in notebook.cells[0].outputs if o["output_type"] == "display_data"]
    assert len(outputs) == 1
    assert outputs[0]["data"]["text/html"] == ""
    printed = "".join(o.get("text", "") for o in notebook.cells[0].outputs)
    assert "calls: succeeded" in printed


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
