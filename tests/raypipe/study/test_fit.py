"""The search for the largest micro-batch."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.study.fit import Fit, memory_line, next_micro_batch

GB = 10**9


@given(
    limit=st.integers(0, 5000),
    most=st.integers(1, 5000),
)
def test_it_finds_the_largest_that_fits(limit, most):
    fitting, too_large, trials = set(), None, 0
    while (size := next_micro_batch(fitting, too_large, most)) is not None:
        trials += 1
        assert 1 <= size <= most
        assert size not in fitting
        assert too_large is None or size < too_large
        if size <= limit:
            fitting.add(size)
        else:
            too_large = size
    best = max(fitting, default=0)
    if limit >= most:
        assert best == most
    else:
        assert best <= limit
        assert limit - best <= max(1, limit / 16)
        assert (best == 0) == (limit == 0)
    assert trials <= 2 * math.log2(max(most, 2)) + 6


def test_it_doubles_and_then_halves_the_gap():
    assert next_micro_batch([], None, 64) == 1
    assert next_micro_batch([1, 2], None, 64) == 4
    assert next_micro_batch([1, 2, 4], None, 6) == 6
    assert next_micro_batch([1, 2, 4, 8], 16, 64) == 12
    assert next_micro_batch([8], 9, 64) is None
    assert next_micro_batch([], 1, 64) is None
    assert next_micro_batch([64], None, 64) is None


@given(static=st.integers(0, 10 * GB), slope=st.integers(10**6, GB))
def test_the_memory_line_goes_through_exact_peaks(static, slope):
    peaks = {size: static + slope * size for size in (4, 8, 16)}
    found = memory_line(peaks)
    assert found == pytest.approx((static, slope), rel=1e-3, abs=10**5)


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        (None, 16),  # unknown: 9.4 of 10 GB
        ({8: 5 * GB + 10**8, 16: 94 * GB // 10 + 10**8}, 16),
        # 0.6 GB of context and NCCL buffers would fill the card
        ({8: 56 * GB // 10, 16: 10 * GB}, 8),
    ],
)
def test_the_margin_is_left_free_beside_what_others_hold(used, expected):
    maker = SimpleNamespace(device=("card", 10 * GB))
    fit = Fit(None, maker, ["bf16"], 64)
    [search] = fit.searches
    for size, peak in ((8, 5 * GB), (16, 94 * GB // 10)):
        search.found[size] = {"device": "card", "gpu_peak_bytes": peak}
        if used is not None:
            search.found[size]["gpu_memory_used_peak_bytes"] = used[size]
    [row] = fit.rows()
    assert row["micro_batch"] == expected
