"""Numbers, durations, sizes and headings as readers see them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.report.formatting import (
    cell,
    duration,
    heading,
    number,
    percent,
    plus_minus,
    short_labels,
    with_unit,
)
from tests.scenario import cases

_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
NONE = "–"  # noqa: RUF001


def _parse(text: str) -> float:
    text = text.replace("\u202f", "")
    if "10" in text and any(c in "⁻⁰¹²³⁴⁵⁶⁷⁸⁹" for c in text):
        mantissa, _, power = text.rpartition("10")
        return float(mantissa.rstrip("·") or 1) * 10.0 ** int(power.translate(_DIGITS))
    return float(text)


@given(st.floats(min_value=1e-30, max_value=1e44), st.integers(-(10**14), 10**14))
def test_a_number_has_four_significant_digits_and_an_integer_all(value: float, whole: int) -> None:
    assert _parse(number(value)) == pytest.approx(value, rel=5.1e-4)
    assert _parse(number(-value).replace("-", "", 1)) == pytest.approx(value, rel=5.1e-4)
    assert int(number(whole).replace("\u202f", "")) == whole


FUNCTIONS = {
    f.__name__: f for f in (cell, duration, heading, number, percent, plus_minus, with_unit)
}


@pytest.mark.parametrize(
    ("write", "arguments", "text"),
    [
        *((FUNCTIONS[name], *case) for name, each in cases(__file__, "formatting").items()
          for case in each),
        (number, [np.int64(10412)], "10\u202f412"),
        (cell, ["at", datetime(2026, 3, 2, 9, 14, 5, tzinfo=UTC)], "2026-03-02 09:14:05 UTC"),
        (cell, ["started_at", pd.NaT], NONE),
    ],
)  # fmt: skip
def test_readers_see(write: Callable[..., str], arguments: list[Any], text: str) -> None:
    assert write(*arguments) == text


def test_labels_that_are_cut_stay_different() -> None:
    names = [f"evaluate_large, far, quadratic, {kind}" for kind in ("near", "far")]
    for longest in (12, 22, 80):
        labels = short_labels([*names, "a"], longest)
        assert len(set(labels)) == 3
        assert all(len(label) <= longest for label in labels)
    assert len(set(short_labels(["a" * 30 + str(n) + "b" * 30 for n in range(12)], 22))) == 12
