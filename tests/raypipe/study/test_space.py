from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raypipe.config.axes import AxisSettings
from raypipe.study.space import place, points
from raypipe.study.sweep_settings import SweepSettings

RANGES = st.tuples(st.integers(1, 1000), st.integers(1, 1000)).filter(lambda r: r[0] < r[1])


def axes(**given: object) -> dict[str, AxisSettings]:
    return {name: AxisSettings.model_validate(axis) for name, axis in given.items()}


def test_grids_are_combined():
    found = list(points(axes(a={"grid": [1, 2]}, b={"grid": ["x", "y", None]}), 5, 0))
    assert found == [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y", None)]


def test_each_combination_has_the_same_draws():
    drawn = axes(a={"grid": [1, 2]}, lr={"low": 1e-4, "high": 1e-1, "log": True})
    found = list(points(drawn, 3, 0))
    assert [point["a"] for point in found] == [1, 1, 1, 2, 2, 2]
    assert [point["lr"] for point in found[:3]] == [point["lr"] for point in found[3:]]
    assert len({point["lr"] for point in found}) == 3


def test_more_draws_and_more_axes_leave_the_others_as_they_are():
    lr = {"low": 1e-4, "high": 1e-1, "log": True}
    few = [point["lr"] for point in points(axes(lr=lr), 3, 7)]
    many = [point["lr"] for point in points(axes(lr=lr, w={"choice": [1, 2]}), 9, 7)]
    assert many[:3] == few
    assert [point["lr"] for point in points(axes(lr=lr), 3, 8)] != few


@given(RANGES, st.floats(0, 1, exclude_max=True), st.booleans())
def test_a_draw_lies_in_its_range(bounds, share, log):
    low, high = bounds
    whole = place(AxisSettings(low=low, high=high, log=log), share)
    assert isinstance(whole, int)
    assert low <= whole <= high
    real = place(AxisSettings(low=float(low), high=float(high), log=log), share)
    assert isinstance(real, float)
    assert low <= real <= high


def test_draws_are_even():
    shares = [(i + 0.5) / 400 for i in range(400)]
    whole = [place(AxisSettings(low=1, high=4), share) for share in shares]
    assert [whole.count(n) for n in (1, 2, 3, 4)] == [100] * 4
    logs = [place(AxisSettings(low=1e-4, high=1e-2, log=True), share) for share in shares]
    assert sum(value < 1e-3 for value in logs) == 200
    assert math.isclose(logs[0], 1e-4, rel_tol=0.01)


@pytest.mark.parametrize(
    "axis",
    [
        {},
        {"low": 1},
        {"low": 2, "high": 2},
        {"low": 0, "high": 1, "log": True},
        {"grid": [1], "choice": [2]},
        {"grid": [1], "log": True},
        {"choice": []},
        4,
    ],
)
def test_an_axis_is_of_one_kind(axis):
    with pytest.raises(ValidationError):
        AxisSettings.model_validate(axis)


def test_axes_may_be_nested_or_dotted():
    nested = {"training": {"micro_batch": [1, 2], "lr": {"low": 1, "high": 2}}, "b.c": [3]}
    spelled = SweepSettings.spelled_out({"stage": "t", "axes": nested})
    given = {
        key: {name: value for name, value in axis.items() if value}
        for key, axis in spelled["axes"].items()
    }
    assert given == {
        "training.micro_batch": {"grid": [1, 2]},
        "training.lr": {"low": 1, "high": 2},
        "b.c": {"grid": [3]},
    }
    assert SweepSettings.spelled_out(spelled) == spelled


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"scheduler": "asha"}, "kind = quality"),
        ({"metric": "eval_loss"}, "kind = quality"),
    ],
)
def test_settings_that_contradict_each_other(given, message):
    with pytest.raises(ValidationError, match=message):
        SweepSettings(stage="train", axes={"a": {"grid": [1]}}, **given)
