from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.study.pareto import front, peak_bytes

few = st.integers(1, 4)  # few values: many ties


def row(speed: float | None, peak: float | None, energy: float | None = None) -> dict[str, Any]:
    return {
        "status": "succeeded",
        "device": "NVIDIA H100",
        "samples_per_s": speed,
        "gpu_peak_bytes": peak,
        "host_peak_bytes": 7,
        "energy_j_per_sample": energy,
    }


def beats(one: dict[str, Any], other: dict[str, Any], energy: bool) -> bool:
    """The definition, by hand."""
    pairs = [
        (-one["samples_per_s"], -other["samples_per_s"]),
        (one["gpu_peak_bytes"], other["gpu_peak_bytes"]),
    ]
    if energy:
        pairs.append((one["energy_j_per_sample"], other["energy_j_per_sample"]))
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


@given(st.lists(st.builds(row, few, few, few), max_size=12), st.booleans())
def test_nothing_on_the_front_is_dominated_and_all_else_is(rows, energy) -> None:
    if not energy and rows:
        rows[-1]["energy_j_per_sample"] = None
    kept = front(rows)
    for candidate in rows:
        dominated = any(beats(other, candidate, energy) for other in rows)
        assert any(candidate is other for other in kept) == (not dominated)
    assert kept == [row for row in rows if any(row is other for other in kept)]


def test_equal_trials_are_all_kept() -> None:
    rows = [row(5, 3), row(5, 3), row(4, 3), row(4, 2)]
    assert front(rows) == [rows[0], rows[1], rows[3]]


def test_only_succeeded_points_with_a_speed_count() -> None:
    good = row(1, 9)
    others = [
        row(None, 1),
        row(math.nan, 1),
        {key: value for key, value in row(9, 1).items() if key != "samples_per_s"},
        row(9, 1) | {"status": "interrupted"},
        row(9, 1) | {"reference": True},
    ]
    assert front([*others, good]) == [good]
    assert front(others) == []
    assert front([]) == []


def test_an_unknown_peak_is_the_worst() -> None:
    fast, slow, lean = row(9, None), row(8, 0), row(1, 5)
    assert front([fast, slow, lean]) == [fast, lean]


def test_energy_counts_where_all_have_it() -> None:
    fast, thrifty = row(9, 1, 5.0), row(1, 9, 1.0)
    assert front([fast, thrifty]) == [fast, thrifty]
    assert front([fast, thrifty, row(9, 2, math.nan)]) == [fast]


@pytest.mark.parametrize(
    ("gpu", "host", "device", "peak"),
    [
        (10, 7, "NVIDIA H100", 10),
        (10.0, 7, "NVIDIA H100", 10),
        (None, 7, "NVIDIA H100", None),
        (None, 7, "cpu", 7),
        (0, 7, "NVIDIA H100", None),
        (math.nan, 7, "NVIDIA H100", None),
        (None, None, "cpu", None),
    ],
)
def test_the_peak_is_that_of_the_device(gpu, host, device, peak) -> None:
    assert peak_bytes({"device": device, "gpu_peak_bytes": gpu, "host_peak_bytes": host}) == peak
