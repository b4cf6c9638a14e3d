"""The sections of the report that compare optimizers."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest

from experiments.pabbo_lda.figures.report_sections import sections
from tests.raypipe.report.page_reader import HOSTILE, Page, report_files


def _tables(text: str = "20news") -> dict[str, pd.DataFrame]:
    return {
        "summary": pd.DataFrame(
            {"dataset": text, "optimizer": ["ga", text], "runs": 10, "mean": [1776.35, 1679.96],
             "std": [185.94, 25.09], "min": [1600.0, 1640.0], "max": [2000.0, 1700.0],
             "median": [1750.0, 1680.0], "duration_s_mean": 125.0}
        ),
        "rankings": pd.DataFrame(
            {"dataset": text, "measure": "final_value", "optimizer": ["ga", text],
             "average_rank": [1.7, 1.3], "chi2": 9.6, "p_value": 0.0019, "kendalls_w": 0.96,
             "conclusion": "they differ"}
        ),
        "comparisons": pd.DataFrame(
            {"dataset": text, "measure": "final_value", "first": ["ga", "ga", "es"],
             "second": ["sabbo", text, text], "n": 10, "p_value": [0.001, 0.4, 0.5],
             "p_holm": [0.003, 0.8, 0.8],
             "effect_size": [1.0, 0.1, 0.1],
             "conclusion": ["sabbo is lower", "no difference found", "no difference found"]}
        ),
        "across_corpora": pd.DataFrame(
            {"measure": "area_under_curve", "optimizer": ["ga", text], "corpora": 4,
             "average_rank": [1.7, 1.3], "wins": [1, 3], "kendalls_w": 0.7, "p_value": None,
             "conclusion": "not tested"}
        ),
    }  # fmt: skip


def _text(tables: dict[str, pd.DataFrame]) -> str:
    return report_files(tables, sections(tables), "A study", {})["index.html"].decode()


def _page(tables: dict[str, pd.DataFrame]) -> Page:
    return Page(_text(tables))


def test_sections_follow_from_the_tables() -> None:
    assert _page(_tables()).headings == ["results", "figures", "statistics", "tables"]
    assert _page({}).headings == []
    assert _page({name: table.iloc[:0] for name, table in _tables().items()}).headings == []
    for name in _tables():
        assert _page({key: table for key, table in _tables().items() if key != name}).headings


def test_text_from_outside_cannot_become_markup() -> None:
    page = _page(_tables(HOSTILE))
    assert page.only_own_script
    assert HOSTILE in page.words


def test_values_are_written_for_readers() -> None:
    words = _page(_tables()).words
    for text in ("1776 ± 186", "1680 ± 25", "2 min 05 s"):
        assert text in words


def test_conclusions_are_said_in_words() -> None:
    words = _page(_tables()).words
    assert "They differ. Friedman χ² = 9.6, p = 0.0019, Kendall's W = 0.96." in words
    assert "sabbo is lower (against ga)" in words
    assert "no difference found (2 pairs)" in words
    assert "average rank 20news 1.3 ga 1.7" in words


def test_the_lowest_mean_stands_out() -> None:
    tables = _tables()
    [lowest] = re.findall(r'<tr class="first"><th scope="row">([^<]*)', _text(tables))
    assert lowest == "20news"
    words = _page(tables).words
    assert "Lowest mean: 1680 ± 25 by 20news, 10 runs." in words
    assert "This names no winner: no paired test tells it from es, ga and sabbo." in words
    decided = {**tables, "comparisons": tables["comparisons"].assign(p_holm=0.01)}
    assert "no paired test tells it from sabbo." in _page(decided).words  # the other two are higher
    tables["summary"]["mean"] = [np.inf, np.nan]
    page = _page(tables)
    assert "no finite value" in page.words
    assert not [row for row in page.all("tr") if row.get("class") == "first"]


def test_statistics_name_the_measure_and_say_what_the_corpora_have_in_common() -> None:
    words = _page(_tables()).words
    for text in (
        "final value",
        "average rank",
        "Across corpora",
        "Not tested.",
        "area under curve",
    ):
        assert text in words


@pytest.mark.parametrize(
    ("tried", "values", "remark"),
    [
        ([2, 14, 60], [1.0, 2.0, 3.0], "The best T is 2, the fewest topics that a search can have"),
        ([5, 14, 60], [1.0, 2.0, 3.0], "the smallest that was tried: try a smaller lda.t_min"),
        ([5, 14, 60], [3.0, 2.0, 1.0], "the largest that was tried: try a larger lda.t_max"),
        ([5, 14, 60], [3.0, 1.0, 2.0], ""),
        ([5, 14, 60], [np.inf, 1.0, 2.0], ""),
        ([5, 5], [1.0, 1.0], ""),
    ],
)
def test_a_best_number_of_topics_at_the_end_of_the_range_is_said(tried, values, remark) -> None:
    history = pd.DataFrame(
        {"dataset": "20news", "optimizer": "ga", "run": 0, "seed": 0, "batch": 0, "T": tried,
         "evaluation": range(1, len(tried) + 1), "value": values, "best_T": tried,
         "best_value": values, "cpu_s": 1.0}
    )  # fmt: skip
    [results, *_] = sections({"summary": _tables()["summary"], "study_history": history})
    found = [text for text in results.advice if "best T" in text]
    assert ([remark in text for text in found] == [True]) if remark else not found
