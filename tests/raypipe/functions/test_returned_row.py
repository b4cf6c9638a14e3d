"""Rows of calls: what a function may return."""

from __future__ import annotations

import datetime
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from raypipe.errors import UnitError
from raypipe.functions.returned_row import call, row_of
from tests.scenario import cases

CASES = cases(__file__, "returned")
NANOSECONDS = "2026-01-02T03:04:05.000000006"


@pytest.mark.parametrize(
    ("returned", "row"),
    [
        ({"a": 0.5, "b": np.float32(0.5)}, {"a": 0.5, "b": 0.5}),
        ({"a": torch.tensor(3), "b": np.array(2.5)}, {"a": 3, "b": 2.5}),
        (True, {"value": True}),
        (np.longdouble("0.5"), {"value": 0.5}),
        ({"a": Decimal("0.1"), "b": Fraction(1, 3)}, {"a": 0.1, "b": 1 / 3}),
        ({"a": np.int64(3), "b": np.bool_(True)}, {"a": 3, "b": True}),
        (datetime.date(2026, 1, 2), {"value": "2026-01-02"}),
        ({"x": 1, "y": 2}, {"y": 2}),  # an argument, returned as it was given
        ({"a": pd.NaT, "b": pd.NA}, {"a": None, "b": None}),
        ({"a": np.datetime64("NaT"), "b": np.ma.masked}, {"a": None, "b": None}),
        (np.ma.array(5.0, mask=True), {"value": None}),
        (pd.Timestamp("2026-01-02 03:04"), {"value": "2026-01-02T03:04:00"}),
        ({"a": np.datetime64(NANOSECONDS)}, {"a": NANOSECONDS}),
    ],
)
def test_returned_values_become_plain(returned, row):
    found = row_of(returned, {"x": 1})
    assert found == row
    assert {type(v) for v in found.values()} <= {int, float, str, bool, type(None)}


@pytest.mark.parametrize(
    ("returned", "problem"), [*CASES, (np.zeros((3, 2)), "a value of type ndarray")]
)
def test_what_is_not_a_row_is_an_invalid_value(returned, problem):
    with pytest.raises(UnitError, match=problem) as raised:
        call("calls/x=1", (), ("worker",), ("loss",), lambda x: returned, {"x": 1})
    assert raised.value.kind == "invalid_value"
