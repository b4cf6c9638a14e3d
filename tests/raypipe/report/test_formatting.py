from __future__ import annotations

import math
from datetime import UTC, datetime

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.report.formatting import (
    aligned,
    cell,
    duration,
    heading,
    number,
    percent,
    plus_minus,
    quantity,
    with_unit,
)

_DIGITS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")


def _parse(text: str) -> float:
    text = text.replace("\u202f", "")
    if "10" in text and any(c in "⁻⁰¹²³⁴⁵⁶⁷⁸⁹" for c in text):
        mantissa, _, power = text.rpartition("10")
        return float(mantissa.rstrip("·") or 1) * 10.0 ** int(power.translate(_DIGITS))
    return float(text)


@given(st.floats(min_value=1e-30, max_value=1e44))
def test_a_number_is_written_to_four_significant_digits(value: float) -> None:
    assert _parse(number(value)) == pytest.approx(value, rel=5.1e-4)
    assert _parse(number(-value).replace("-", "", 1)) == pytest.approx(value, rel=5.1e-4)


@given(st.integers(min_value=-(10**14), max_value=10**14))
def test_an_integer_is_written_in_full(value: int) -> None:
    assert int(number(value).replace("\u202f", "")) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1776.35, "1776"),
        (0.5, "0.5"),
        (0.0, "0"),
        (12.3456, "12.35"),
        (123456.0, "123\u202f456"),
        (np.int64(10412), "10\u202f412"),
        (4.06e44, "4.06·10⁴⁴"),
        (1e-5, "10⁻⁵"),
        (math.inf, "∞"),
        (math.nan, "–"),  # noqa: RUF001
    ],
)
def test_number(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0398, "39.8 ms"),
        (2e-5, "20 µs"),
        (14.2, "14.2 s"),
        (59.97, "1 min 00 s"),
        (310.5, "5 min 10 s"),
        (3599.7, "1 h 00 min"),
        (9321, "2 h 35 min"),
        (90000, "1 d 1 h"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_quantity_uses_the_si_prefix() -> None:
    assert quantity(6.4e9, "W") == "6.4 GW"
    assert quantity(999.6, "J") == "1 kJ"
    assert quantity(212030, "J") == "212 kJ"


@pytest.mark.parametrize(
    ("mean", "std", "text"),
    [
        (1776.35, 185.94, "1776 ± 186"),
        (0.02273, 0.00112, "0.0227 ± 0.0011"),
        (1709.0, math.nan, "1709"),
        (4.015e43, 1.636e43, "4·10⁴³ ± 1.6·10⁴³"),
    ],
)
def test_plus_minus(mean: float, std: float, text: str) -> None:
    assert plus_minus(mean, std) == text


@pytest.mark.parametrize(
    ("values", "halves", "texts"),
    [
        ([0.987, 0.4711, 0.09], [], ["0.9870", "0.4711", "0.0900"]),
        ([0.987, 0.92], [0.0063, 0.0112], ["0.9870 ± 0.0063", "0.9200 ± 0.0112"]),
        ([9.3, 8.0], [0.25, math.nan], ["9.30 ± 0.25", "8.00"]),
        ([12.0, 3.0], [], ["12", "3"]),
        ([0.5, math.nan, 0.25], [], ["0.50", "–", "0.25"]),  # noqa: RUF001
        ([0.5, 0.4], [1e-9, 0.01], ["0.5000 ± 10⁻⁹", "0.4000 ± 0.0100"]),
        ([2e-5, 3000.0], [], ["2·10⁻⁵", "3000"]),
        ([1e-9, 3.0], [], ["10⁻⁹", "3"]),
        ([], [], []),
    ],
)
def test_numbers_of_a_column_have_the_same_decimals(
    values: list[float], halves: list[float], texts: list[str]
) -> None:
    assert aligned(values, halves) == texts


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        ("duration_s_mean", 90.0, "1 min 30 s"),
        ("samples_per_s", 402.31, "402.3"),
        ("gpu_peak_bytes", 6.4 * 2**30, "6.4 GiB"),
        ("gpu_peak_bytes_max", 212 * 2**20, "212 MiB"),
        ("gpu_peak_bytes", math.nan, "–"),  # noqa: RUF001
        ("energy_j", 212030.0, "212 kJ"),
        ("power_w", 700.0, "700 W"),
        ("gpu_util_mean", 71.2, "71 %"),
        ("kendalls_w", 0.8, "0.8"),
        ("p_value", 0.0000012, "< 0.0001"),
        ("p_holm", 0.04321, "0.043"),
        ("started_at", datetime(2026, 3, 2, 9, 14, 5, tzinfo=UTC), "2026-03-02 09:14:05 UTC"),
        ("started_at", pd.NaT, "–"),  # noqa: RUF001
        ("device", None, "–"),  # noqa: RUF001
        ("stage", "lda", "lda"),
    ],
)
def test_a_cell_takes_its_unit_from_the_column(column: str, value: object, text: str) -> None:
    assert cell(column, value) == text


def test_a_heading_drops_the_unit() -> None:
    assert heading("duration_s_mean") == "duration (mean)"
    assert heading("samples_per_s") == "samples/s"
    assert heading("kendalls_w") == "kendalls w"


def test_a_number_has_its_unit_and_its_better_direction() -> None:
    assert with_unit("loss", "loss", "nats", "lower") == "loss (nats, lower is better)"
    assert with_unit("f1", "f1", "", "higher", "test") == "f1 (test, higher is better)"
    assert with_unit("time", "time_s", "s", "lower") == "time (lower is better)"
    assert with_unit("loss", "loss", "", "") == "loss"


def test_headings_spell_measures_as_readers_do() -> None:
    assert [heading(name) for name in ("macro_f1", "rouge_l", "eval_mae", "r2")] == [
        "macro F1", "ROUGE-L", "held-out MAE", "R²",
    ]  # fmt: skip
    assert heading("train.training.learning_rate") == "train.training.learning_rate"


@pytest.mark.parametrize(
    ("share", "text"),
    [(1.1, "110 %"), (0.123, "12 %"), (0.0345, "3.5 %"), (0.02, "2 %"), (0.00012, "0.012 %")],
)
def test_percent_has_no_power_of_ten(share: float, text: str) -> None:
    assert percent(share) == text
