"""Numbers, durations, sizes and headings as readers see them."""

from __future__ import annotations

import math
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


@pytest.mark.parametrize(
    ("write", "arguments", "text"),
    [
        (number, (1776.35,), "1776"),
        (number, (123456.0,), "123\u202f456"),
        (number, (np.int64(10412),), "10\u202f412"),
        (number, (4.06e44,), "4.06·10⁴⁴"),
        (number, (1e-5,), "10⁻⁵"),
        (number, (math.inf,), "∞"),
        (number, (math.nan,), NONE),
        (duration, (0.0398,), "39.8 ms"),
        (duration, (2e-5,), "20 µs"),
        (duration, (59.97,), "1 min 00 s"),
        (duration, (310.5,), "5 min 10 s"),
        (duration, (3599.7,), "1 h 00 min"),
        (duration, (9321,), "2 h 35 min"),
        (duration, (90000,), "1 d 1 h"),
        (plus_minus, (1776.35, 185.94), "1776 ± 186"),
        (plus_minus, (0.02273, 0.00112), "0.0227 ± 0.0011"),
        (plus_minus, (1709.0, math.nan), "1709"),
        (plus_minus, (4.015e43, 1.636e43), "4·10⁴³ ± 1.6·10⁴³"),
        (percent, (1.1,), "110 %"),
        (percent, (0.00012,), "0.012 %"),
        (cell, ("duration_s_mean", 90.0), "1 min 30 s"),
        (cell, ("samples_per_s", 402.31), "402.3"),
        (cell, ("gpu_peak_bytes_max", 212 * 2**20), "212 MiB"),
        (cell, ("gpu_peak_bytes", math.nan), NONE),
        (cell, ("energy_j", 212030.0), "212\u202f030 J"),
        (cell, ("gpu_util_mean", 71.2), "71 %"),
        (cell, ("kendalls_w", 0.8), "0.8"),
        (cell, ("p_value", 0.0000012), "< 0.0001"),
        (cell, ("p_holm", 0.04321), "0.043"),
        (cell, ("at", datetime(2026, 3, 2, 9, 14, 5, tzinfo=UTC)), "2026-03-02 09:14:05 UTC"),
        (cell, ("started_at", pd.NaT), NONE),
        (cell, ("device", None), NONE),
        (heading, ("duration_s_mean",), "duration (mean)"),
        (heading, ("kendalls_w",), "Kendall's W"),
        (heading, ("macro_f1",), "macro F1"),
        (heading, ("eval_mae",), "held-out MAE"),
        (heading, ("r2",), "R²"),
        (heading, ("train.training.learning_rate",), "train.training.learning_rate"),
        (with_unit, ("loss", "nats", "lower"), "loss (nats, lower is better)"),
        (with_unit, ("f1", "", "higher", "test"), "F1 (test, higher is better)"),
        (with_unit, ("time_s", "s", "lower"), "time (lower is better)"),
        (with_unit, ("loss", "", ""), "loss"),
    ],
)
def test_readers_see(write: Callable[..., str], arguments: tuple[Any, ...], text: str) -> None:
    assert write(*arguments) == text


def test_labels_that_are_cut_stay_different() -> None:
    names = [f"evaluate_large, far, quadratic, {kind}" for kind in ("near", "far")]
    for longest in (12, 22, 80):
        labels = short_labels([*names, "a"], longest)
        assert len(set(labels)) == 3
        assert all(len(label) <= longest for label in labels)
    assert len(set(short_labels(["a" * 30 + str(n) + "b" * 30 for n in range(12)], 22))) == 12
