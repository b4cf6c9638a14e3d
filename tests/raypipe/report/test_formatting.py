"""Numbers, durations, sizes and headings as readers see them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pandas as pd
import pytest

from raypipe.report import formatting
from raypipe.report.formatting import short_labels
from tests.scenario import cases


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        *((name, *case) for name, each in cases(__file__, "formatting").items()
          for case in each),
        ("number", [np.int64(10412)], "10\u202f412"),
        ("cell", ["at", datetime(2026, 3, 2, 9, 14, 5, tzinfo=UTC)], "2026-03-02 09:14:05 UTC"),
        ("cell", ["started_at", pd.NaT], "\u2013"),
    ],
)  # fmt: skip
def test_readers_see(name: str, arguments: list[Any], text: str) -> None:
    assert getattr(formatting, name)(*arguments) == text


def test_labels_that_are_cut_stay_different() -> None:
    names = [f"evaluate_large, far, quadratic, {kind}" for kind in ("near", "far")]
    for longest in (12, 22, 80):
        labels = short_labels([*names, "a"], longest)
        assert len(set(labels)) == 3
        assert all(len(label) <= longest for label in labels)
    assert len(set(short_labels(["a" * 30 + str(n) + "b" * 30 for n in range(12)], 22))) == 12
