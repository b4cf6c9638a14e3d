"""Rows of calls: what a function may return."""

from __future__ import annotations

import datetime
from collections import namedtuple
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from raypipe.errors import UnitError
from raypipe.functions.returned_row import call, lacking, row_of


@dataclass
class Scores:
    accuracy: float
    name: str


@pytest.mark.parametrize(
    ("returned", "row"),
    [
        (0.5, {"value": 0.5}),
        (np.float32(0.5), {"value": 0.5}),
        (torch.tensor(3), {"value": 3}),
        (np.array(2.5), {"value": 2.5}),
        (True, {"value": True}),
        (np.longdouble("0.5"), {"value": 0.5}),
        (Decimal("0.1"), {"value": 0.1}),
        (Fraction(1, 3), {"value": 1 / 3}),
        ({"a": np.int64(3), "b": np.bool_(True)}, {"a": 3, "b": True}),
        (
            {"when": datetime.date(2026, 1, 2), "where": Path("a/b")},
            {"when": "2026-01-02", "where": "a/b"},
        ),
        (Scores(0.5, "x"), {"accuracy": 0.5, "name": "x"}),
        (namedtuple("Pair", "a b")(1, 2), {"a": 1, "b": 2}),
        ({"x": 1, "y": 2}, {"y": 2}),  # an argument, returned as it was given
        (pd.NaT, {"value": None}),
        (pd.NA, {"value": None}),
        ({"a": np.datetime64("NaT"), "b": np.ma.masked}, {"a": None, "b": None}),
        (np.ma.array(5.0, mask=True), {"value": None}),
        (pd.Timestamp("2026-01-02 03:04"), {"value": "2026-01-02T03:04:00"}),
        (
            np.datetime64("2026-01-02T03:04:05.000000006"),
            {"value": "2026-01-02T03:04:05.000000006"},
        ),
    ],
)
def test_returned_values_become_plain(returned, row):
    found = row_of(returned, {"x": 1})
    assert found == row
    assert {type(v) for v in found.values()} <= {int, float, str, bool, type(None)}


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (None, r"returned nothing \(None\); return a mapping"),
        ({}, "an empty mapping"),
        (np.zeros((3, 2)), "a value of type ndarray"),
        ([1, 2], "a value of type list"),
        ({"losses": [1, 2]}, "a value of type list for 'losses'"),
        ({"model": object()}, "a value of type object for 'model'"),
        ({"a": {"b": 1}}, "a value of type dict for 'a'"),
        ({"a\udcff": 2}, r"the key 'a.udcff'; must be printable text"),
        ({1: 2}, "the key 1; must be printable text"),
        ({"x": 2}, "'x', which is also an argument"),
        ({"worker": 2}, "'worker', which is a column that raypipe writes"),
        ({"n": 2**63}, "more than 64 bits for 'n'"),
    ],
)
def test_what_is_not_a_row_is_an_invalid_value(returned, problem):
    with pytest.raises(UnitError, match=problem) as raised:
        call("calls/x=1", ("worker",), (), lambda x: returned, {"x": 1})
    assert raised.value.kind == "invalid_value"


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ({"loss": 1}, ""),
        (
            {"loss": "low"},
            "'low' for 'loss', but `maximize` or `minimize` names it: return a number",
        ),
        ({"loss": True}, "True for 'loss'"),
        ({"other": 1}, "(returned: other)"),
        ({"losses": 1}, "(returned: losses); did you mean losses?"),
    ],
)
def test_a_number_that_is_to_be_optimized_must_be_returned(returned, problem):
    assert problem in lacking(returned, ("loss",))


def test_an_exit_of_the_function_is_an_error_of_the_call():
    with pytest.raises(RuntimeError, match=r"called sys.exit\(3\)"):
        call("k", (), (), lambda: exit(3), {})
