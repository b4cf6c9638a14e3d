"""The search for the largest micro-batch."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raypipe.study.largest_batch import leaves_margin, next_size

GB = 10**9


@example(limit=5, most=16)
@given(limit=st.integers(0, 5000), most=st.integers(1, 5000))
def test_it_finds_the_largest_that_fits(limit: int, most: int) -> None:
    tried: list[int] = []
    best, too_large = 0, None
    while (size := next_size(best, too_large, most)) is not None:
        tried.append(size)
        best, too_large = (size, too_large) if size <= limit else (best, size)
    assert len(set(tried)) == len(tried) <= 2 * math.log2(max(most, 2)) + 6
    assert all(1 <= size <= most for size in tried)
    assert best == most if limit >= most else limit - max(1, limit / 16) <= best <= limit
    assert (best == 0) == (limit == 0)
    if (limit, most) == (5, 16):
        assert tried == [1, 2, 4, 8, 6, 5]


@pytest.mark.parametrize(
    ("peak", "others", "fits"),
    [(9.0, None, True), (9.6, None, False), (9.0, 0.4, True), (9.0, 1.0, False)],
)
def test_the_margin_is_left_free_beside_what_others_hold(
    peak: float, others: float | None, fits: bool
) -> None:
    row = {"device": "card", "gpu_peak_bytes": peak * GB}
    if others is not None:  # context, NCCL buffers and other processes
        row["gpu_memory_used_peak_bytes"] = (peak + others) * GB
    assert leaves_margin(row, 10 * GB) == fits
    assert leaves_margin(row, None)
