"""Eight trainings of one GPU each run at the same time on a node that has eight for Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import read_table

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_eight_trainings_run_at_once_and_the_ninth_after_one_of_them(tmp_path: Path) -> None:
    code = (
        "import pathlib; from tests.raypipe.launch import gpu_node; "
        f"raise SystemExit(gpu_node.main(pathlib.Path({str(tmp_path)!r}), 9))"
    )
    command = (sys.executable, "-c", code)
    process = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert process.returncode == 0, process.stdout + process.stderr
    run_dir = RunDirectory.at(tmp_path / "run")
    trials, stages = read_table(run_dir, "trials"), read_table(run_dir, "stages")
    assert set(trials["status"]) == set(stages["status"]) == {"succeeded"}
    assert "waits for 1 CPU and 1 GPU that other stages use" in process.stdout
