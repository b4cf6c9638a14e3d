"""Figures of runs whose measures have gaps."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from experiments.teleclass.figures import MEASURES, figures


def measured(**macro_f1: float) -> dict[str, pd.DataFrame]:
    """The table of two methods, with the macro-F1 of each level."""
    rows = [
        {"method": method, "documents_of": "test", "level": level.removeprefix("level_"),
         **dict.fromkeys(MEASURES, 0.5), "macro_f1": value}
        for method in ("tfidf", "classifier")
        for level, value in macro_f1.items()
    ]  # fmt: skip
    return {"measures": pd.DataFrame(rows)}


@pytest.mark.parametrize(
    ("third", "levels"),
    [(0.25, ["level 1", "level 2", "level 3"]), (math.nan, ["level 1", "level 2"])],
)
def test_a_level_without_gold_labels_is_left_out(third: float, levels: list[str]) -> None:
    drawn = {
        figure.name: figure
        for figure in figures(measured(all=0.5, level_1=0.5, level_2=0.4, level_3=third))
    }
    axes = drawn["macro_f1_by_level"].figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == levels


def test_one_level_alone_is_not_drawn() -> None:
    drawn = figures(measured(all=0.5, level_1=0.5, level_2=math.nan))
    assert [figure.name for figure in drawn] == ["measures"]
