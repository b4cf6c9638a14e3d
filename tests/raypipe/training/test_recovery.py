from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import HeldOut, Regression, job
from torch import nn

from raypipe.errors import BatchLimit, FailureKind, UnitError
from raypipe.training.failure_kinds import (
    LOADER_DIED,
    expandable_segments,
    failure_kind,
    gpu_peak_bytes,
    host_peak_bytes,
    unit_error,
)
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.recovery import train_to_the_end
from raypipe.training.task import Loss, StepContext, TrainTask


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


@pytest.mark.parametrize(
    ("kinds", "restarts", "attempts", "end"),
    [
        (["out_of_memory"] * 4, 0, [(8, 2), (4, 4), (2, 8), (1, 16)], "out_of_memory"),
        (["worker_died", "out_of_memory", "node_lost"], 3, [(8, 2), (8, 2), (4, 4), (4, 4)], None),
        # deaths are limited apart from out of memory
        (["out_of_memory", *["worker_died"] * 3], 0, [(8, 2), (4, 4)], "worker_died"),
        (["out_of_memory", *["worker_died"] * 3], 2, [(8, 2), *[(4, 4)] * 3], "worker_died"),
        # what would only happen again is not tried again
        *(([kind], 3, [(8, 2)], kind) for kind in ("error", "timeout", "invalid_value")),
    ],
)
def test_what_is_tried_again(
    kinds: list[FailureKind], restarts: int, attempts: list[tuple[int, int]], end: str | None
) -> None:
    script = Script(*kinds)
    if end is None:
        done, outcome = script.run(restarts)
        assert outcome == {"done": True}
        assert (done.attempt, done.plan.micro_batch, done.plan.accumulation) == (4, 4, 4)
    else:
        with pytest.raises(UnitError) as caught:
            script.run(restarts)
        assert caught.value.kind == end
        assert script.told[-1][2] == "gave up"
    numbers = range(1, len(attempts) + 1)
    assert script.attempts == [(n, *cut) for n, cut in zip(numbers, attempts, strict=True)]
    expected = list(zip(numbers, kinds, strict=False))
    assert [(attempt, kind) for attempt, kind, _ in script.told] == expected
    halved = [text for _, kind, text in script.told[:1] if kind == "out_of_memory"]
    assert halved in ([], ["again with micro-batch 4 x accumulation 4"])


@dataclass
class Tight:
    """A device on which micro-batches above ``most`` do not fit; a smaller phase takes 5."""

    most: int
    fits_with: str = "nothing"
    tried: list[str] = field(default_factory=list)

    def launch(self, job: TrainingJob) -> dict[str, Any]:
        training, plan = job.settings.training, job.plan
        size = min(plan.micro_batch, 5)
        state = {
            "gradient_checkpointing": training.gradient_checkpointing,
            "bf16": training.precision == "bf16",
            "fsdp": job.settings.scaling.strategy == "fsdp",
        }
        self.tried.append(f"{plan.micro_batch} {'+'.join(k for k, on in state.items() if on)}")
        if size > self.most and not state.get(self.fits_with):
            limit = BatchLimit("training", size)
            raise UnitError(job.trial_id, "out_of_memory", "full", limit)
        return {}


def test_halving_goes_below_the_size_that_did_not_fit() -> None:
    """The phase that fails takes 5 samples: 32 -> 16 -> 8 would fail just the same."""
    tight = Tight(4)
    done, _ = train_to_the_end(job(Regression(), Path("no"), (32, 1, 32, 1)), tight.launch, ignore)
    assert tight.tried == ["32 ", "4 "]
    assert (done.plan.accumulation, done.attempt) == (8, 2)


def test_further_steps_follow_at_micro_batch_one_in_their_order() -> None:
    asked = job(Regression(), Path("no"), (2, 1, 2, 1))
    steps = ("gradient_checkpointing", "bf16")
    settings = asked.settings.model_copy(update={"on_oom": steps})
    tight = Tight(0, fits_with="bf16")
    done, _ = train_to_the_end(replace(asked, settings=settings), tight.launch, ignore)
    assert tight.tried == ["2 ", "1 ", "1 gradient_checkpointing", "1 gradient_checkpointing+bf16"]
    assert done.settings.training.precision == "bf16"
    with pytest.raises(UnitError):
        train_to_the_end(replace(asked, settings=settings), Tight(0).launch, ignore)


def test_a_training_that_cannot_be_compiled_goes_on_without() -> None:
    script = Script("compile_error")
    asked = job(Regression(), Path("nowhere"), (8, 2, 32, 2), compile=True)
    done, _ = train_to_the_end(asked, script.launch, script.on_failure)
    assert script.told == [(1, "compile_error", "again without training.compile")]
    assert not done.settings.training.compile
    with pytest.raises(UnitError):  # the task itself compiles something
        train_to_the_end(done, Script("compile_error").launch, ignore)


class Long(Regression):
    """Samples of 64 that can be of 32 and 16."""

    length = 64

    def shortened(self) -> tuple[TrainTask, str] | None:
        if self.length == 16:
            return None
        shorter = Long()
        shorter.length = self.length // 2
        return shorter, f"samples of at most {shorter.length}"


def test_samples_are_shortened_as_often_as_they_can_be_before_the_next_step() -> None:
    asked = job(Long(), Path("no"), (2, 1, 2, 1))
    settings = asked.settings.model_copy(update={"on_oom": ("shorten", "bf16")})
    script = Script(*["out_of_memory"] * 4)
    told, tried = [], []

    def launch(job: TrainingJob) -> dict[str, Any]:
        assert isinstance(job.task, Long)
        tried.append((job.plan.micro_batch, job.task.length, job.settings.training.precision))
        if script.kinds:
            raise UnitError(job.trial_id, script.kinds.pop(0), "full")
        return {}

    def on_failure(job: TrainingJob, error: UnitError, outcome: str) -> None:
        told.append(outcome)

    train_to_the_end(replace(asked, settings=settings), launch, on_failure)
    assert tried == [(2, 64, "fp32"), (1, 64, "fp32"), (1, 32, "fp32"), (1, 16, "fp32"),
                     (1, 16, "bf16")]  # fmt: skip
    assert told[1:] == [
        "again with samples of at most 32", "again with samples of at most 16", "again with bf16"
    ]  # fmt: skip


def launch(job: TrainingJob) -> dict[str, Any]:
    try:
        return train(job, Worker(0, torch.device("cpu")))
    except Exception as error:
        raise unit_error(job.trial_id, error) from error


def ignore(job: TrainingJob, error: UnitError, outcome: str) -> None:
    pass


def test_an_evaluation_that_does_not_fit_shrinks_alone(tmp_path: Path) -> None:
    """The evaluation holds 8 samples in chunks; the device takes 3 without gradient."""

    class Narrow(HeldOut):
        def loss(self, model: nn.Module, batch: Any, context: StepContext) -> Loss:
            if not torch.is_grad_enabled() and len(batch["x"]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().loss(model, batch, context)

    told: list[str] = []

    def on_failure(job: TrainingJob, error: UnitError, outcome: str) -> None:
        told.append(outcome)

    plain = launch(job(HeldOut(), tmp_path / "plain", (8, 2, 16, 1)))
    asked = job(Narrow(), tmp_path / "narrow", (8, 2, 16, 1))
    done, outcome = train_to_the_end(asked, launch, on_failure)
    assert told == ["again with evaluation batch 4", "again with evaluation batch 2"]
    assert done.plan == asked.plan
    assert outcome["loss_final"] == plain["loss_final"]
    assert outcome["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-12)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("x"), "out_of_memory"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors"), "out_of_memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "out_of_memory"),
        (RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\n"
                      "Cuda failure 2 'out of memory'"), "out_of_memory"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "out_of_memory"),
        (RuntimeError("CUDA driver error: out of memory"), "out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
         "out_of_memory"),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling"),
         "out_of_memory"),
        (RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\n"
                      "Failed to CUDA malloc 4 bytes"), "out_of_memory"),
        (RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\n"
                      "Failed to CUDA host alloc 4 bytes"), "host_out_of_memory"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"),
         "host_out_of_memory"),
        (RuntimeError("Caught AcceleratorError in pin memory thread for device 0.\n"
                      "torch.AcceleratorError: CUDA error: out of memory"), "host_out_of_memory"),
        (RuntimeError("Caught AcceleratorError in pin memory thread for device 0.\n"
                      "torch.AcceleratorError: CUDA error: device-side assert"), "error"),
        (RuntimeError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, "
                      "OpType=ALLREDUCE) ran for 600012 milliseconds before timing out."),
         "worker_hung"),
        (RuntimeError("[x.cc:81] Timed out waiting 1800000ms for recv operation to complete"),
         "worker_hung"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling"), "error"),
        (MemoryError(), "host_out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
         "host_out_of_memory"),
        (RuntimeError(LOADER_DIED), "worker_died"),
        (FloatingPointError("the loss is nan"), "invalid_value"),
        (RuntimeError("device-side assert"), "error"),
        (ValueError("bad"), "error"),
    ],
)  # fmt: skip
def test_kinds_of_failure(error: Exception, kind: FailureKind) -> None:
    assert failure_kind(error) == kind


@pytest.mark.parametrize(
    ("text", "full", "empty"),
    [
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
         "out_of_memory", "error"),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "out_of_memory", "error"),
        ("FIND was unable to find an engine to execute this computation",
         "out_of_memory", "error"),
        # also what the allocation of page-locked memory says
        ("CUDA error: out of memory", "out_of_memory", "host_out_of_memory"),
    ],
)  # fmt: skip
def test_a_full_card_decides_what_an_unclear_message_means(
    text: str, full: FailureKind, empty: FailureKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, kind in ((2**20, full), (2**33, empty)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2**34))
        assert failure_kind(RuntimeError(text)) == kind


def test_page_locked_memory_is_the_hosts() -> None:
    def pin_memory() -> None:
        raise RuntimeError("CUDA error: out of memory")

    with pytest.raises(RuntimeError) as caught:
        pin_memory()
    assert failure_kind(caught.value) == "host_out_of_memory"


def test_peaks_of_memory() -> None:
    assert gpu_peak_bytes(torch.device("cpu")) is None
    assert host_peak_bytes() > 2**26  # Python with torch; in bytes, not kilobytes


def test_a_rehearsed_out_of_memory_ends_with_the_same_losses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = launch(job(Regression(), tmp_path / "plain"))
    told = Script()
    monkeypatch.setenv("RAYPIPE_FAULTS", "oom:micro_batch>4")
    asked = job(Regression(), tmp_path / "faulty")
    done, outcome = train_to_the_end(asked, launch, told.on_failure)
    assert (done.plan.micro_batch, done.plan.accumulation) == (4, 4)
    assert [kind for _, kind, _ in told.told] == ["out_of_memory"] * 2
    assert outcome["loss_final"] == pytest.approx(plain["loss_final"], rel=1e-12)


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_the_user_has_configured_the_allocator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(each, "")  # restored after the test
        monkeypatch.delenv(each)
    assert expandable_segments()[name] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert expandable_segments() == {}
