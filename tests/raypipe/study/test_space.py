"""Axes of studies: one grammar of lists and ranges, their combinations and draws."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raypipe.config.axes import AxisSettings
from raypipe.study.space import draw, points
from tests.scenario import cases

RANGES = st.tuples(st.integers(1, 1000), st.integers(1, 1000)).filter(lambda r: r[0] < r[1])
CASES = cases(__file__, "axes")
RATE = {"low": 1e-4, "high": 1e-1, "log": True}


def axes(**given: object) -> dict[str, AxisSettings]:
    return {name: AxisSettings.model_validate(axis) for name, axis in given.items()}


@pytest.mark.parametrize(("axis", "values"), CASES["axes"])
def test_an_axis_is_a_list_or_a_range(axis, values):
    listed = axes(a=axis)["a"].listed
    assert (None if listed is None else list(listed)) == values


@pytest.mark.parametrize("axis", CASES["refused"], ids=str)
def test_an_axis_is_of_one_kind(axis):
    with pytest.raises(ValidationError):
        AxisSettings.model_validate(axis)


def test_lists_are_combined_each_with_the_same_draws_of_the_ranges():
    """More draws and more axes leave the others as they are."""
    found = list(points(axes(a=[1, 2], b=["x", "y"]), 5, 0))
    assert found == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")]
    few = [point["rate"] for point in points(axes(rate=RATE), 3, 7)]
    assert few == [0.00180801, 0.000129906, 0.000175598]  # in every version
    found = list(points(axes(a=[1, 2], rate=RATE), 3, 7))
    assert found == [{"a": a, "rate": rate} for a in (1, 2) for rate in few]
    many = points(axes(rate=RATE, w={"low": 1, "high": 64}), 9, 7)
    assert [tuple(point.values()) for point in many][:3] == [*zip(few, (63, 41, 21), strict=True)]
    assert [point["rate"] for point in points(axes(rate=RATE), 3, 8)] != few


@given(RANGES, st.integers(0, 99), st.booleans())
def test_a_draw_lies_in_its_range(bounds, number, log):
    low, high = bounds
    real = {"low": float(low), "high": float(high), "log": log}
    found = draw(axes(whole={"low": low, "high": high, "log": log}, real=real), 0, number)
    assert (type(found["whole"]), type(found["real"])) == (int, float)
    assert all(low <= value <= high for value in found.values())
