"""The cause of a worker's death that only its log knows."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray.exceptions import TaskUnschedulableError, WorkerCrashedError

from raypipe.launch import failures
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.settings import ScalingSettings, TrainStageSettings

WATCHDOG = (
    "[rank1]:[E1125] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
    "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    ("error", "earlier", "later", "expected"),
    [
        (WorkerCrashedError(), "", f"step 1\n{WATCHDOG}terminate called\n", "worker_hung"),
        (WorkerCrashedError(), WATCHDOG, "Killed\n", "worker_died"),  # of an earlier attempt
        (TaskUnschedulableError("gone"), "", WATCHDOG, "node_lost"),
    ],
)
def test_the_watchdogs_last_words(
    error: Exception,
    earlier: str,
    later: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "is_node_gone", lambda nodes: False)
    run = RunDirectory.at(tmp_path)
    settings = TrainStageSettings(scaling=ScalingSettings(workers=2))
    job = TrainingJob("t", "run", None, settings, BatchPlan(1, 1, 2, 2), run)  # type: ignore[arg-type]
    path = run.log("t-1")
    run.append(path, earlier.encode())
    before = failures.log_sizes(job)
    run.append(path, later.encode())
    failure = failures.group_failure("t", error, set(), before)
    assert (failure.unit, failure.kind) == ("t", expected)
    for words in ("one of them hangs", "WorkNCCL"):
        assert (words in failure.message) == (expected == "worker_hung")
