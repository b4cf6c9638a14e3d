"""The cause of a worker's death that only its log knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from raypipe.errors import FailureKind, UnitError
from raypipe.launch.failures import explained, log_sizes
from raypipe.store.run_directory import RunDirectory
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.settings import ScalingSettings, TrainStageSettings

WATCHDOG = (
    "[rank1]:[E1125] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
    "OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds before timing out.\n"
)


@pytest.mark.parametrize(
    ("kind", "earlier", "later", "expected"),
    [
        ("worker_died", "", f"step 1\n{WATCHDOG}terminate called\n", "worker_hung"),
        ("worker_died", WATCHDOG, "Killed\n", "worker_died"),  # of an earlier attempt
        ("node_lost", "", WATCHDOG, "node_lost"),
    ],
)
def test_the_watchdogs_last_words(
    kind: FailureKind, earlier: str, later: str, expected: FailureKind, tmp_path: Path
) -> None:
    run = RunDirectory.at(tmp_path)
    settings = TrainStageSettings(scaling=ScalingSettings(workers=2))
    job = TrainingJob("t", "run", None, settings, BatchPlan(1, 1, 2, 2), run)  # type: ignore[arg-type]
    path = Path(run.log("t-1"))
    run.append(str(path), earlier.encode())
    before = log_sizes(job)
    run.append(str(path), later.encode())
    failure = explained(job, UnitError("group-1", kind, "died"), before)
    assert (failure.unit, failure.kind) == ("t", expected)
    assert ("one of them hangs" in failure.message) == (expected == "worker_hung")
    assert ("WorkNCCL" in failure.message) == (expected == "worker_hung")
