from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from example_tasks import HeldOut, Regression, job
from torch import nn

from raypipe.errors import BatchLimit, FailureKind, UnitError
from raypipe.launch.inline import InlineLauncher
from raypipe.training import failure_kinds
from raypipe.training.job import TrainingJob
from raypipe.training.recovery import train_to_the_end
from raypipe.training.task import Loss, StepContext, TrainTask
from tests import scenario

CASES = scenario.cases(__file__, "tables")


class Long(Regression):
    """Samples of 64 that can be of 32 and 16."""

    length = 64

    def shortened(self) -> tuple[TrainTask, str] | None:
        shorter = Long()
        shorter.length = self.length // 2
        return (shorter, f"samples of at most {shorter.length}") if self.length > 16 else None


class Script:
    """A launcher whose attempts fail as written, what they were, and what was told of it.

    ``limit`` is the largest number of samples that a phase takes in a forward pass, if known.
    """

    def __init__(self, *kinds: Any, limit: int | None = None) -> None:
        self.kinds: list[FailureKind] = list(kinds)
        self.limit = limit
        self.attempts: list[str] = []
        self.effective_batches: set[int] = set()
        self.told: list[tuple[int, str, str]] = []

    def launch(self, job: TrainingJob) -> dict[str, Any]:
        training, length = job.settings.training, getattr(job.task, "length", 64)
        state = {
            f"{job.plan.micro_batch} x {job.plan.accumulation}": True,
            "recomputed": training.gradient_checkpointing,
            f"length {length}": length < 64,
            "fsdp": job.settings.scaling.strategy == "fsdp",
            "bf16": training.precision == "bf16",
            "compiled": training.compile,
        }
        self.attempts.append(" ".join(name for name, on in state.items() if on))
        self.effective_batches.add(job.plan.effective_batch)
        if self.kinds:
            size = min(job.plan.micro_batch, self.limit or 0)
            limit = BatchLimit("training", size) if size else None
            raise UnitError(job.trial_id, self.kinds.pop(0), "as written", limit)
        return {"done": True}

    def on_failure(self, job: TrainingJob, error: UnitError, outcome: str) -> None:
        self.told.append((job.attempt, error.kind, outcome))


@pytest.mark.parametrize("case", CASES["attempts"])
def test_what_is_tried_again(case: dict[str, Any]) -> None:
    plan, kinds, tried, end = (case.get(name) for name in ("plan", "kinds", "tried", "end"))
    asked = job(Long(), Path("nowhere"), plan, **case.get("training", {}))
    asked = replace(asked, settings=asked.settings.model_copy(update=case.get("given")))
    script = Script(*kinds, limit=case.get("limit"))
    if end is None:
        done, outcome = train_to_the_end(asked, script.launch, script.on_failure)
        assert (done.attempt, outcome) == (len(tried), {"done": True})
    else:
        with pytest.raises(UnitError) as caught:
            train_to_the_end(asked, script.launch, script.on_failure)
        assert caught.value.kind == end
        assert script.told.pop() == (len(tried), end, "gave up")
    assert script.attempts == tried
    assert script.effective_batches == {plan[2]}
    again = list(enumerate(kinds[: len(tried) - 1], start=1))
    assert [(attempt, kind) for attempt, kind, _ in script.told] == again
    assert all(text.startswith("again ") for *_, text in script.told)
    assert "says" not in case or script.told[0][2] == case["says"]


def test_an_evaluation_that_does_not_fit_shrinks_alone(tmp_path: Path) -> None:
    """The evaluation holds 8 samples in chunks; the device takes 3 without gradient."""

    class Narrow(HeldOut):
        def loss(self, model: nn.Module, batch: Any, context: StepContext) -> Loss:
            if not torch.is_grad_enabled() and len(batch["x"]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().loss(model, batch, context)

    script, launch = Script(), partial(InlineLauncher().train, report=print)
    plain = launch(job(HeldOut(), tmp_path / "plain", (8, 2, 16, 1)))
    asked = job(Narrow(), tmp_path / "narrow", (8, 2, 16, 1))
    done, outcome = train_to_the_end(asked, launch, script.on_failure)
    told = [text for _, _, text in script.told]
    assert told == ["again with evaluation batch 4", "again with evaluation batch 2"]
    assert done.plan == asked.plan
    assert outcome["loss_final"] == plain["loss_final"]
    assert outcome["eval_loss"] == pytest.approx(plain["eval_loss"], rel=1e-12)


ERRORS: list[tuple[FailureKind, Exception]] = [
    ("out_of_memory", torch.OutOfMemoryError("x")),
    ("host_out_of_memory", MemoryError()),
    ("worker_died", RuntimeError(failure_kinds.LOADER_DIED)),
    ("invalid_value", FloatingPointError("the loss is nan")),
    ("error", ValueError("bad")),
    *((kind, RuntimeError(text)) for kind, texts in CASES["kinds"].items() for text in texts),
]


@pytest.mark.parametrize(("kind", "error"), ERRORS)
def test_kinds_of_failure(kind: FailureKind, error: Exception) -> None:
    failure = failure_kinds.unit_error("fit", error)
    named, hung = f"{type(error).__name__}: {error}", f"{failure_kinds._HUNG}: {error}"
    text = {"error": named, "worker_hung": hung}.get(kind, str(error))
    assert (failure.kind, failure.message) == (kind, text)


@pytest.mark.parametrize(("text", "full", "empty"), CASES["unclear"])
def test_a_full_card_decides_what_an_unclear_message_means(
    text: str, full: FailureKind, empty: FailureKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, kind in ((2**29 - 1, full), (2**29, empty)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 2**34))
        assert failure_kinds.failure_kind(RuntimeError(text)) == kind


def test_page_locked_memory_is_the_hosts() -> None:
    def allocate() -> None:
        raise RuntimeError("CUDA error: out of memory")

    def pin_memory() -> None:
        allocate()

    with pytest.raises(RuntimeError) as caught:
        pin_memory()
    assert failure_kinds.failure_kind(caught.value) == "host_out_of_memory"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_expand_unless_the_user_has_configured_the_allocator(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {})
    assert failure_kinds.expandable_segments()[name] == "expandable_segments:True"
    monkeypatch.setenv(name, "max_split_size_mb:128")
    assert failure_kinds.expandable_segments() == {}
