"""Trainings on a node that has eight GPUs for Ray: alone on all of them, and eight side by side."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load

from raypipe.launch.inline import InlineLauncher
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from raypipe.training.batching import BatchPlan
from raypipe.training.settings import TrainingSettings, TrainStageSettings
from tests.raypipe.launch.test_train import ignore, job

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def trained(folder: Path, number: int) -> RunDirectory:
    """Run so many trainings in a process whose Ray has eight GPUs."""
    code = (
        "import pathlib; from tests.raypipe.launch import gpu_node; "
        f"raise SystemExit(gpu_node.main(pathlib.Path({str(folder)!r}), {number}))"
    )
    command = (sys.executable, "-c", code)
    process = subprocess.run(command, capture_output=True, text=True, timeout=1100)
    assert process.returncode == 0, process.stdout + process.stderr
    run_dir = RunDirectory.at(folder / "run")
    trials, stages = read_table(run_dir, "trials"), read_table(run_dir, "stages")
    assert set(trials["status"]) == set(stages["status"]) == {"succeeded"}
    assert f"{trials['workers'].max()} worker" in process.stdout
    return run_dir


def test_eight_trainings_run_at_once_and_the_ninth_after_one_of_them(tmp_path: Path) -> None:
    run_dir = trained(tmp_path, 9)
    assert set(read_table(run_dir, "trials")["workers"]) == {1}
    stages = read_table(run_dir, "stages")
    start = pd.to_datetime(stages["started_at"])
    end = start + pd.to_timedelta(stages["duration_s"], unit="s")
    # a stage is recorded shortly after its GPU is free
    assert start.max() > end.min() - pd.Timedelta(seconds=5)


def test_a_lone_training_uses_all_gpus_and_keeps_its_effective_batch(tmp_path: Path) -> None:
    """A step has four samples, so it uses four of the eight."""
    run_dir = trained(tmp_path, 1)
    [trial] = read_table(run_dir, "trials").to_dict("records")
    assert (trial["workers"], trial["micro_batch"], trial["effective_batch"]) == (4, 1, 4)
    alone = job(tmp_path / "alone", 4, 1, 1, steps=3)
    training = TrainingSettings(steps=3, micro_batch=4, accumulation=1, effective_batch=4)
    plan = BatchPlan(4, 1, 4, 1)
    InlineLauncher().train(
        replace(alone, settings=TrainStageSettings(training=training), plan=plan), ignore
    )
    found = load(run_dir.read(run_dir.model("t0")))
    expected = load(alone.run_dir.read(alone.run_dir.model("t")))
    for name, weights in expected.items():
        torch.testing.assert_close(found[name], weights, rtol=1e-9, atol=1e-12)
