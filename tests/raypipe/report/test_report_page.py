from __future__ import annotations

import re
from collections.abc import Mapping
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from raypipe.report.page import report_files
from raypipe.report.plots import Plot, style

HOSTILE = '<script>alert("x")</script>&"\'$'
VOID = {"meta", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """A strict reader: every element closed in order; what it holds, by kind."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]

    @property
    def headings(self) -> list[str]:
        return [str(attrs["id"]) for attrs in self.all("section")]


def _figure(name: str = "curve", caption: str = "It bends.", group: str = "") -> Plot:
    with style():
        canvas = Figure(figsize=(4, 3))
        axes = canvas.add_subplot()
        axes.plot([0, 1, 2], [3, 1, 2], clip_on=True)
        axes.scatter([1], [2], rasterized=True)
    return Plot(name, f"title of {name}", caption, canvas, group)


def _tables(text: str = "20news") -> dict[str, pd.DataFrame]:
    at = pd.to_datetime(["2026-03-02 09:14:05", "2026-03-02 09:20:05"], utc=True)
    return {
        "stages": pd.DataFrame(
            {"run_id": "r", "stage": ["train_small", text], "status": "succeeded",
             "started_at": at, "duration_s": [360.0, 1080.0], "device": "cpu",
             "gpu_peak_bytes": None}
        ),
        "trials": pd.DataFrame(
            {"run_id": "r", "trial_id": [text], "stage": "train_small", "status": "succeeded",
             "micro_batch": 16, "samples_per_s": 402.31, "step_time_s": 0.0398,
             "gpu_peak_bytes": 2.1e9, "loss_final": 0.91234}
        ),
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
        "environment": pd.DataFrame({"run_id": "r", "hostname": [text], "memory_bytes": 64e9}),
        "evaluations": pd.DataFrame({"run_id": "r", "dataset": [text], "T": 7}),
    }  # fmt: skip


FACTS = {"run": "r1", "command": "raypipe run x.yaml", "configuration": "lda:\n  runs: 2\n"}


def _page(
    tables: Mapping[str, pd.DataFrame], *figures: Plot, facts: Mapping[str, str] = FACTS
) -> Page:
    return Page(report_files(tables, figures, "A study", facts)["index.html"].decode())


def test_the_files_are_the_page_and_its_figures() -> None:
    files = report_files(_tables(), [_figure(), _figure("b")], "x", FACTS)
    figures = {f"figures/{n}.{kind}" for n in ("curve", "b") for kind in ("png", "svg")}
    assert set(files) == {"index.html", *figures}
    assert report_files(_tables(), [_figure(), _figure("b")], "x", FACTS) == files


def test_the_page_needs_nothing_from_outside() -> None:
    page = _page(_tables(), _figure(), _figure("b"))
    for tag, attrs in page.tags:
        assert tag not in {"link", "script", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert str(attrs.get(name, "#")).startswith(("#", "data:image/png"))
        assert not any(name.startswith("on") for name in attrs)
    raw = report_files(_tables(), [_figure()], "x", FACTS)["index.html"].decode()
    assert "http://" not in raw
    assert "https://" not in raw
    assert "@import" not in raw
    assert not re.search(r"url\((?!#)", raw)


def test_ids_are_unique_and_every_reference_has_its_target() -> None:
    page = _page(_tables(), _figure(), _figure("b"))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    raw = " ".join(str(value) for _, attrs in page.tags for value in attrs.values())
    used = set(re.findall(r"url\(#([^)]+)\)", raw))
    used |= {str(a["href"])[1:] for _, a in page.tags if str(a.get("href", "")).startswith("#")}
    assert used
    assert used <= set(ids)


def test_text_from_outside_cannot_become_markup() -> None:
    tables = _tables(HOSTILE)
    tables["failures"] = pd.DataFrame(
        {"stage": [HOSTILE], "unit": HOSTILE, "attempt": 1, "kind": HOSTILE, "message": HOSTILE}
    )
    tables["stages"]["status"] = HOSTILE
    facts = {HOSTILE: HOSTILE, "command": HOSTILE, "configuration": HOSTILE}
    figure = _figure(HOSTILE, HOSTILE, HOSTILE)
    files = report_files(tables, [figure, _figure("b", HOSTILE, HOSTILE)], HOSTILE, facts)
    page = Page(files["index.html"].decode())
    assert not page.all("script")
    assert HOSTILE in page.words
    assert all(re.fullmatch(r"(figures/)?[\w.-]+", name) for name in files)


def test_tables_have_scoped_headers_and_figures_an_alternative_text() -> None:
    page = _page(_tables(), _figure(caption='It "bends".'))
    assert page.all("th")
    assert {attrs.get("scope") for attrs in page.all("th")} == {"row", "col"}
    [svg] = page.all("svg")
    assert svg["role"] == "img"
    assert svg["aria-label"] == 'title of curve. It "bends".'
    assert 'It "bends".' in page.words
    assert page.all("html")[0]["lang"] == "en"


def test_the_figures_follow_the_colors_of_the_page() -> None:
    page = _page(_tables(), _figure())
    styles = " ".join(str(attrs.get("style", "")) for _, attrs in page.tags)
    assert "var(--ink)" in styles
    assert "var(--paper)" in styles
    assert "prefers-color-scheme: dark" in report_files({}, [], "x", {})["index.html"].decode()


def test_sections_follow_from_the_tables() -> None:
    assert _page(_tables(), _figure()).headings == [
        "stages", "results", "figures", "statistics", "training", "environment", "repeat", "tables",
    ]  # fmt: skip
    assert _page({}, facts={}).headings == []
    empty = {name: table.iloc[:0] for name, table in _tables().items()}
    assert _page(empty, facts={"run": "r1"}).headings == []
    for name in _tables():
        rest = {key: table for key, table in _tables().items() if key != name}
        assert _page(rest).headings


def test_an_experiments_own_tables_may_have_the_names_of_comparisons() -> None:
    own = pd.DataFrame({"run_id": ["r"], "accuracy": [0.9]})
    names = ["summary", "rankings", "comparisons", "against_control", "across_corpora"]
    page = _page(dict.fromkeys(names, own), facts={})
    assert page.headings == ["tables"]
    assert all(name in page.words for name in names)


def test_values_are_written_for_readers() -> None:
    words = _page(_tables()).words
    for text in ("1776 ± 186", "1680 ± 25", "18 min 00 s", "39.8 ms", "402.3", "64 GB", "0.9123"):
        assert text in words
    assert "GPU memory, peak" in words.split("Training runs")[-1]
    stages = words.split("Results")[0]
    assert "GPU memory" not in stages  # no GPU, no column
    assert "raypipe run x.yaml" in words
    assert "runs: 2" in words


def test_conclusions_are_said_in_words() -> None:
    words = _page(_tables()).words
    assert "They differ. Friedman χ² = 9.6, p = 0.0019, Kendall's W = 0.96." in words
    assert "sabbo is lower (against ga)" in words
    assert "no difference found (2 pairs)" in words
    assert "Average rank: 20news 1.3, ga 1.7." in words


def test_the_lowest_mean_stands_out() -> None:
    tables = _tables()
    [lowest] = re.findall(
        r'<tr class="first"><th scope="row">([^<]*)',
        report_files(tables, [], "x", {})["index.html"].decode(),
    )
    assert lowest == "20news"
    tables["summary"]["mean"] = [np.inf, np.nan]
    page = _page(tables)
    assert "no finite value" in page.words
    assert not [row for row in page.all("tr") if row.get("class") == "first"]


@pytest.mark.parametrize(
    ("statuses", "shown"),
    [
        (["succeeded", "skipped"], "succeeded"),
        (["succeeded", "failed"], "failed"),
        (["interrupted", "out_of_memory"], "out of memory"),
        (["succeeded", "interrupted"], "interrupted"),
    ],
)
def test_the_title_carries_the_worst_status(statuses: list[str], shown: str) -> None:
    tables = _tables()
    tables["stages"]["status"] = statuses
    assert f"A study {shown}" in _page(tables).words


def test_failures_come_first_and_are_loud_unless_made_up_for() -> None:
    tables = _tables()
    tables["failures"] = pd.DataFrame(
        {"stage": "lda", "unit": ["u1", "u2"], "attempt": 1, "kind": "out_of_memory",
         "message": "no memory\nat all"}
    )  # fmt: skip
    page = _page(tables)
    assert page.headings[0] == "failures"
    assert "2 attempts failed: out of memory (2). Every stage succeeded in the end." in page.words
    assert page.all("section")[0]["class"] == "alert recovered"
    tables["stages"]["status"] = ["succeeded", "failed"]
    page = _page(tables)
    assert page.all("section")[0]["class"] == "alert"
    assert "Every stage succeeded" not in page.words


def test_a_caption_that_a_group_shares_is_printed_once() -> None:
    page = _page({}, _figure("a", "Same.", "Curves"), _figure("b", "Same.", "Curves"))
    assert page.words.count("Same.") == 1
    page = _page({}, _figure("a", "One.", "Curves"), _figure("b", "Two.", "Curves"))
    assert "One." in page.words
    assert "Two." in page.words
    page = _page({}, _figure("a", "Same.", "Curves"), _figure("b", "Same.", "Bars"))
    assert "Curves: title of a" in page.words
    assert page.words.count("Same.") == 2


def test_two_figures_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two figures are named 'a'"):
        report_files({}, [_figure("a"), _figure("a")], "x", {})


def test_statistics_name_the_measure_and_say_what_the_corpora_have_in_common() -> None:
    words = _page(_tables()).words
    for text in (
        "final value",
        "Average rank:",
        "Across corpora",
        "Not tested.",
        "area under curve",
    ):
        assert text in words
