from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import Regression, job

from raypipe.errors import FailureKind, UnitError
from raypipe.training.job import TrainingJob, Worker
from raypipe.training.loop import train
from raypipe.training.memory import failure_kind, gpu_peak_bytes, host_peak_bytes
from raypipe.training.recovery import train_to_the_end


class Script:
    """A launcher whose attempts fail as written, and what was told of it."""

    def __init__(self, *kinds: Any) -> None:
        self.kinds: list[FailureKind] = list(kinds)
        self.attempts: list[tuple[int, int, int]] = []
        self.told: list[tuple[int, str, str]] = []

    def launch(self, job: TrainingJob) -> dict[str, Any]:
        self.attempts.append((job.attempt, job.plan.micro_batch, job.plan.accumulation))
        assert job.plan.effective_batch == 32
        if self.kinds:
            raise UnitError(job.trial_id, self.kinds.pop(0), "as written")
        return {"done": True}

    def on_failure(self, job: TrainingJob, error: UnitError, outcome: str) -> None:
        self.told.append((job.attempt, error.kind, outcome))

    def run(self, max_restarts: int = 3) -> tuple[TrainingJob, dict[str, Any]]:
        asked = job(Regression(), Path("nowhere"), (8, 2, 32, 2))
        settings = asked.settings.model_copy(update={"max_restarts": max_restarts})
        return train_to_the_end(replace(asked, settings=settings), self.launch, self.on_failure)


def test_out_of_memory_halves_down_to_one_and_then_gives_up() -> None:
    script = Script(*["out_of_memory"] * 4)
    with pytest.raises(UnitError) as caught:
        script.run(max_restarts=0)
    assert caught.value.kind == "out_of_memory"
    assert script.attempts == [(1, 8, 2), (2, 4, 4), (3, 2, 8), (4, 1, 16)]
    assert [attempt for attempt, _, _ in script.told] == [1, 2, 3, 4]
    assert script.told[0][2] == "again with micro-batch 4 x accumulation 4"
    assert script.told[-1][2] == "gave up"


def test_the_job_that_succeeded_comes_back() -> None:
    script = Script("worker_died", "out_of_memory", "node_lost")
    done, outcome = script.run()
    assert outcome == {"done": True}
    assert (done.attempt, done.plan.micro_batch, done.plan.accumulation) == (4, 4, 4)
    assert script.attempts == [(1, 8, 2), (2, 8, 2), (3, 4, 4), (4, 4, 4)]
    assert [kind for _, kind, _ in script.told] == ["worker_died", "out_of_memory", "node_lost"]


@pytest.mark.parametrize("restarts", [0, 2])
def test_deaths_are_limited_apart_from_out_of_memory(restarts: int) -> None:
    script = Script("out_of_memory", *["worker_died"] * 3)
    with pytest.raises(UnitError) as caught:
        script.run(restarts)
    assert caught.value.kind == "worker_died"
    assert len(script.attempts) == restarts + 2
    assert [outcome == "gave up" for _, _, outcome in script.told] == [False] * (restarts + 1) + [
        True
    ]


@pytest.mark.parametrize("kind", ["error", "timeout", "invalid_value"])
def test_what_would_only_happen_again_is_not_tried_again(kind: FailureKind) -> None:
    script = Script(kind)
    with pytest.raises(UnitError):
        script.run()
    assert script.told == [(1, kind, "gave up")]


def test_a_bug_of_the_launcher_is_not_taken_for_a_failed_attempt() -> None:
    script = Script()
    script.launch = lambda job: {}[job]  # type: ignore[method-assign, index]
    with pytest.raises(KeyError):
        script.run()
    assert script.told == []


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("x"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (MemoryError(), "host_out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
         "host_out_of_memory"),
        (FloatingPointError("the loss is nan"), "invalid_value"),
        (RuntimeError("device-side assert"), "error"),
        (ValueError("bad"), "error"),
    ],
)  # fmt: skip
def test_kinds_of_failure(error: Exception, kind: FailureKind) -> None:
    assert failure_kind(error) == kind


def test_peaks_of_memory() -> None:
    assert gpu_peak_bytes(torch.device("cpu")) is None
    assert host_peak_bytes() > 2**26  # Python with torch; in bytes, not kilobytes


def test_a_rehearsed_out_of_memory_ends_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def launch(job: TrainingJob) -> dict[str, Any]:
        try:
            return train(job, Worker(0, torch.device("cpu")))
        except Exception as error:
            raise UnitError(job.trial_id, failure_kind(error), str(error)) from error

    plain = launch(job(Regression(), tmp_path / "plain"))
    told = Script()
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>4")
    asked = job(Regression(), tmp_path / "faulty")
    done, outcome = train_to_the_end(asked, launch, told.on_failure)
    assert (done.plan.micro_batch, done.plan.accumulation) == (4, 4)
    assert [kind for _, kind, _ in told.told] == ["out_of_memory"] * 2
    assert outcome["loss_final"] == pytest.approx(plain["loss_final"], rel=1e-12)
