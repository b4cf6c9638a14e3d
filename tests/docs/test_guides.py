"""The task of docs/training.md and the example notebook, as a newcomer would run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import raypipe, table
from tests.docs.pages import DOCS, PROJECT, Reader, blocks, visiting

NOTEBOOK = PROJECT / "examples" / "notebook.ipynb"


def test_the_task_is_short_and_learns(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    for block in blocks(DOCS / "training.md"):
        if block.is_file:
            reader.follow(block)
    assert len((tmp_path / "digits.py").read_text().splitlines()) < 60
    training = [f"train.training.{key}=16" for key in ("effective_batch", "micro_batch")]
    with visiting(tmp_path):
        raypipe("run", "digits.yaml", "--run-dir", "run", *training, "train.training.log_every=1")
    steps = table(tmp_path / "run", "steps")
    assert list(steps["step"]) == list(range(1, 201))
    assert steps["eval_accuracy"].dropna().iloc[-1] > 0.85
    trial = table(tmp_path / "run", "trials").iloc[0]
    assert (trial["status"], trial["steps"], trial["workers"]) == ("succeeded", 200, 1)
    assert trial["loader_wait_share"] < 1
    samples = table(tmp_path / "run", "gpu_samples")
    assert len(samples)
    assert samples["gpu_uuid"].isna().all()


@pytest.mark.slow
def test_every_cell_of_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("RAYPIPE_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=place).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    shown = "\n".join(each["data"]["text/plain"] for each in outputs if "data" in each)
    assert "succeeded" in shown
    assert "division by zero" in shown
    assert list((tmp_path / "runs").iterdir())
    assert "calls: succeeded" in str(outputs)
