"""The search for the largest micro-batch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raypipe.errors import UnitError
from raypipe.study import fit
from raypipe.training.batching import BatchPlan

GB = 10**9


def search(limit: int, most: int, capacity: int | None, used: Any) -> tuple[list[int], Any]:
    """The micro-batches tried of a model whose memory ends above a limit, and the row."""
    tried: list[int] = []

    def trial(values: Any) -> Any:
        settings = SimpleNamespace(size=values["t.training.micro_batch"])
        training = SimpleNamespace(task=lambda _: None, settings=settings)
        return SimpleNamespace(training=training, unit=None, lacks=None)

    device, sweep = ("card", capacity), SimpleNamespace(stage="t")
    maker: Any = SimpleNamespace(device=device, trial=trial, sweep=sweep)
    context: Any = SimpleNamespace(say=lambda _: None)
    trials = fit.Fit(context, maker, ["bf16"], most)
    while (job := trials.next()) is not None:
        tried.append(size := job.plan.micro_batch)
        row = {"device": "card", "samples_per_s": 1.0, **used(size)}
        lost = UnitError("t", "out_of_memory", "none left")
        trials.ended("t", row if size <= limit else lost)
    assert trials.is_over
    return tried, trials.rows()[0]


@pytest.fixture(autouse=True, scope="module")
def jobs() -> Any:
    from raypipe.training.job import TrainingJob

    def job_of(context: Any, unit: Any, task: Any, settings: Any) -> TrainingJob:
        return TrainingJob("t", "r", task, settings, BatchPlan(settings.size, 1, 1, 1), unit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit, "job_of", job_of)
        yield


@example(limit=5, most=16)
@given(limit=st.integers(0, 5000), most=st.integers(1, 5000))
def test_it_finds_the_largest_that_fits(limit: int, most: int) -> None:
    tried, row = search(limit, most, None, lambda _: {})
    assert len(set(tried)) == len(tried) <= 2 * math.log2(max(most, 2)) + 6
    assert all(1 <= size <= most for size in tried)
    best = row["micro_batch"] or 0
    assert best == most if limit >= most else limit - max(1, limit / 16) <= best <= limit
    assert (best == 0) == (limit == 0)
    if (limit, most) == (5, 16):
        assert tried == [1, 2, 4, 8, 6, 5]


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        (None, 15),  # unknown: 9.4 of 10 GB
        (GB // 10, 15),
        (GB, 14),  # context, NCCL buffers and other processes
    ],
)
def test_the_margin_is_left_free_beside_what_others_hold(others: int | None, expected: int) -> None:
    def used(size: int) -> dict[str, int]:
        own = size * 6 * GB // 10
        found = {"gpu_peak_bytes": own}
        return found if others is None else {**found, "gpu_memory_used_peak_bytes": own + others}

    assert search(16, 64, 10 * GB, used)[1]["micro_batch"] == expected
