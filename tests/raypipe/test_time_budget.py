"""A command that ends before its time is over, with checkpoints of what it trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.commands import seconds_of
from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from raypipe.training.checkpoint import CheckpointStore
from tests.command import EXAMPLES, start

CONFIG = """
experiment: continuing
train:
  training: {steps: 40, effective_batch: 16, micro_batch: 8, log_every: 5}
  scaling: {cpus_per_worker: 1}
"""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h", 7200), ("90m", 5400), ("3600s", 3600), ("1h30m", 5400), ("0.5h", 1800), ("1d", 86400),
     ("1:30:00", 5400), ("45:00", 2700), ("1-12:00:00", 129600), ("1-12", 129600),
     ("1-00:30", 88200)],
)  # fmt: skip
def test_times_are_read_as_people_and_slurm_write_them(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "90", "2 h", "h", "-2h", "1:2:3:4", "2x", "0s", "nan", "UNLIMITED"]
)
def test_other_texts_are_refused(text: str) -> None:
    """Before anything starts: tests/mistakes.yaml."""
    with pytest.raises(ConfigError, match=r"--time-budget .*must be a time"):
        seconds_of(text)


@pytest.mark.slow
def test_two_workers_on_ray_end_at_the_same_step(tmp_path: Path) -> None:
    """With a stage that has not started yet; the next command does what is left."""
    (tmp_path / "c.yaml").write_text(CONFIG)
    environment = {"RAYPIPE_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(EXAMPLES)}
    given = ["run", "c.yaml", "--run-dir", "run", "train.scaling.workers=2"]
    given += ["train.training.steps=400", "train.training.checkpoint_every=1000"]  # none is due
    given += ["train.training.monitor=null"]  # neither evaluated nor ended on the way
    process = start(
        tmp_path, *given, "pause_s=0.3", "--time-budget", "110s", environment=environment
    )
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130, output
    directory = RunDirectory.at(tmp_path / "run")
    statuses = read_table(directory, "stages").set_index("stage")["status"].to_dict()
    assert statuses == {"train": "interrupted"}
    (saved,) = CheckpointStore(directory, "train").steps
    assert saved < 400
    process = start(tmp_path, *given, environment=environment)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    steps = read_table(directory, "steps")["step"]
    assert sorted(steps) == list(range(5, 401, 5))
    (trial,) = read_table(directory, "trials").to_dict("records")
    assert (trial["steps"], trial["workers"]) == (400, 2)
    assert len(read_table(directory, "doubles")) == 1
