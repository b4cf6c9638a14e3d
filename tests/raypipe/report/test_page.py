from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from raypipe import report
from raypipe.report.html import render
from raypipe.report.plots import Plot, style
from raypipe.report.sections import Bar, Code, Fold, Heading, Pill, Section, TableView
from tests.raypipe.report.page_reader import HOSTILE, Page, report_files


def _plot(name: str = "curve", caption: str = "It bends.", group: str = "") -> Plot:
    with style():
        figure = Figure(figsize=(4, 3))
        axes = figure.add_subplot()
        axes.plot([0, 1, 2], [3, 1, 2], clip_on=True)
        axes.scatter([1], [2], rasterized=True)
        axes.set_title(caption)
    return Plot(name, f"title of {name}", caption, figure, group)


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
        "environment": pd.DataFrame(
            {**COMMAND, "hostname": [text], "memory_bytes": 64 * 2**30}
        ),
        "evaluations": pd.DataFrame({"run_id": "r", "dataset": [text], "T": 7}),
    }  # fmt: skip


FACTS = {"run": "r1"}
COMMAND = {"run_id": "r", "variant": "base", "command_id": "c", "command": "raypipe run x.yaml",
           "started_at": "2026-01-01", "git_commit": None, "git_dirty": None}  # fmt: skip
REPETITION = ("raypipe run x.yaml", "squares:\n  power: 2\n")


def _files(tables: Mapping[str, pd.DataFrame], *plots: Plot) -> dict[str, bytes]:
    return report_files(tables, [Section("Figures", plots)], "A study", FACTS, *REPETITION)


def _page(tables: Mapping[str, pd.DataFrame], *plots: Plot) -> Page:
    return Page(_files(tables, *plots)["index.html"].decode())


def test_the_files_are_the_page_and_its_figures() -> None:
    files = _files(_tables(), _plot(), _plot("b"))
    figures = {f"figures/{n}.{kind}" for n in ("curve", "b") for kind in ("png", "svg")}
    assert set(files) == {"index.html", *figures}
    assert _files(_tables(), _plot(), _plot("b")) == files


def test_the_page_needs_nothing_from_outside() -> None:
    page = _page(_tables(), _plot(), _plot("b"))
    for tag, attrs in page.tags:
        assert tag not in {"link", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert str(attrs.get(name, "#")).startswith(("#", "data:"))
        assert not any(name.startswith("on") for name in attrs)
    assert page.only_own_script
    (policy,) = (attrs["content"] for attrs in page.all("meta") if "http-equiv" in attrs)
    digest = hashlib.sha256(page.scripts[0].encode()).digest()
    assert f"script-src 'sha256-{base64.b64encode(digest).decode()}'" in str(policy)
    assert str(policy).startswith("default-src 'none'")
    raw = _files(_tables(), _plot())["index.html"].decode()
    assert "http://" not in raw
    assert "https://" not in raw
    assert "@import" not in raw
    assert not re.search(r"url\((?!#)", raw)


def test_ids_are_unique_and_every_reference_has_its_target() -> None:
    page = _page(_tables(), _plot(), _plot("b"), _plot("b b"), _plot("b-b"))
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    raw = " ".join(str(value) for _, attrs in page.tags for value in attrs.values())
    used = set(re.findall(r"url\(#([^)]+)\)", raw))
    used |= {str(a["href"])[1:] for _, a in page.tags if str(a.get("href", "")).startswith("#")}
    assert used
    assert used <= set(ids)


def _hostile_table() -> pd.DataFrame:
    values = [HOSTILE, Pill(HOSTILE, HOSTILE), Code(HOSTILE), Bar(0, 50)]
    return pd.DataFrame({HOSTILE: values, f"{HOSTILE}2": reversed(values)}, dtype=object)


@pytest.mark.parametrize(
    ("part", "times"),
    [
        (HOSTILE, 1),
        (Heading(HOSTILE), 1),
        (Code(HOSTILE), 1),
        (Fold(HOSTILE, [HOSTILE, Code(HOSTILE)]), 3),
        # title, caption, the caption in the drawing
        (_plot("plot", HOSTILE), 2),
        (_plot(HOSTILE), 1),
        (_plot("plot", "caption", HOSTILE), 1),
        (TableView(_hostile_table(), list(_hostile_table().columns), HOSTILE), 8),
    ],
    ids=lambda value: "text" if isinstance(value, str) else type(value).__name__,
)
def test_no_part_lets_text_become_markup(part: object, times: int) -> None:
    """Every text of every kind of part is on the page, as text and within its attribute."""
    section = Section("Hostile", [part], css=HOSTILE)  # type: ignore[list-item]
    page = Page(report_files({}, [section], "x", {})["index.html"].decode())
    assert page.only_own_script
    assert "".join(page.text).count(HOSTILE) == times
    assert page.all("section")[0]["class"] == HOSTILE
    names = {name for _, attrs in page.tags for name in attrs}
    assert not any(name.startswith("on") or "script" in name for name in names)
    if isinstance(part, TableView):
        assert page.all("div")[-1]["aria-label"] == HOSTILE
        assert {attrs["class"] for attrs in page.all("span")} > {f"pill {HOSTILE}"}
    elif isinstance(part, Plot):
        assert page.all("svg")[0]["aria-label"].count(HOSTILE) == (part.name == HOSTILE) + (
            HOSTILE in (part.caption, part.group)
        )


def test_no_template_switches_the_escaping_off() -> None:
    folder = Path(str(report.__file__)).parent
    for template in (folder / "templates").glob("*.html"):
        assert not re.search(r"\|\s*safe|autoescape", template.read_text())
    assert [file.name for file in folder.rglob("*.py") if "Markup(" in file.read_text()] == [
        "html.py"  # the SVG of a plot
    ]


def test_tables_have_scoped_headers_and_figures_an_alternative_text() -> None:
    page = _page(_tables(), _plot(caption='It "bends".'))
    assert page.all("th")
    assert {attrs.get("scope") for attrs in page.all("th")} == {"row", "col"}
    [svg] = page.all("svg")
    assert svg["role"] == "img"
    assert svg["aria-label"] == 'title of curve. It "bends".'
    assert 'It "bends".' in page.words
    assert page.all("html")[0]["lang"] == "en"


def test_sections_follow_from_the_tables() -> None:
    assert _page(_tables(), _plot()).headings == [
        "summary", "figures", "training-runs", "stages", "environment", "how-to-repeat", "tables",
    ]  # fmt: skip

    def headings(tables: Mapping[str, pd.DataFrame]) -> list[str]:
        files = report_files(tables, [Section("Own", [])], "x", {"run": "r1"})
        return Page(files["index.html"].decode()).headings

    assert headings({}) == []
    assert headings({name: table.iloc[:0] for name, table in _tables().items()}) == []
    for name in _tables():
        assert headings({key: table for key, table in _tables().items() if key != name})


def test_values_are_written_for_readers() -> None:
    words = _page(_tables()).words
    for text in ("18 min 00 s", "39.8 ms", "402.3", "64.0 GiB", "0.9123"):
        assert text in words
    assert "GPU memory, peak" in words.split("Training runs")[-1]
    stages = words.split("Training runs")[1]
    assert "GPU memory" not in stages.split("Training runs")[0]  # no GPU, no column
    assert "raypipe run x.yaml" in words
    assert "power: 2" in words


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


def test_a_bar_of_the_timeline_spans_its_stages_time() -> None:
    tables = _tables()
    tables["stages"]["duration_s"] = [360.0, 360.0]
    bars = [str(attrs["style"]) for attrs in _page(tables).all("i")]
    assert bars == ["margin-left:0.00%;width:50.00%", "margin-left:50.00%;width:50.00%"]
    tables["stages"]["duration_s"] = [np.nan, 360.0]
    assert len(_page(tables).all("i")) == 1


def test_the_stages_of_a_large_matrix_are_one_row_by_name() -> None:
    tables = _tables()
    at = pd.Timestamp("2026-03-02 09:00:00", tz="UTC")
    tables["stages"] = pd.DataFrame(
        {
            "run_id": "r",
            "stage": ["train"] * 50 + ["evaluate"] * 50,
            "variant": [f"seed={seed}" for seed in range(50)] * 2,
            "status": ["succeeded"] * 99 + ["skipped"],
            "started_at": [at + pd.Timedelta(seconds=10 * place) for place in range(100)],
            "duration_s": 10.0,
            "device": "cpu",
            "gpu_peak_bytes": None,
        }
    )
    page = _page(tables)
    bars = [str(attrs["style"]) for attrs in page.all("i")]
    assert bars[:2] == ["margin-left:0.00%;width:50.00%", "margin-left:50.00%;width:50.00%"]
    assert len(bars) == 102
    assert "train 50 succeeded" in page.words
    assert "evaluate 50 skipped" in page.words
    assert "All 100 stages" in page.words


def test_failures_follow_the_summary_and_are_loud_unless_made_up_for() -> None:
    tables = _tables()
    tables["failures"] = pd.DataFrame(
        {"stage": "lda", "unit": ["u1", "u2"], "attempt": 1, "kind": "out_of_memory",
         "message": "no memory\nat all"}
    )  # fmt: skip
    page = _page(tables)
    assert page.headings[:2] == ["summary", "failures"]
    assert "2 attempts failed: out of memory (2). Every stage succeeded in the end." in page.words
    assert page.all("section")[1]["class"] == "alert recovered"
    tables["stages"]["status"] = ["succeeded", "failed"]
    page = _page(tables)
    assert page.all("section")[1]["class"] == "alert"
    assert "Every stage succeeded" not in page.words


def test_a_caption_that_a_group_shares_is_printed_once() -> None:
    def words(*captions: str, groups: tuple[str, str] = ("Curves", "Curves")) -> str:
        plots = [_plot(*values) for values in zip("ab", captions, groups, strict=True)]
        return re.sub(r"<svg.*?</svg>", "", _files({}, *plots)["index.html"].decode(), flags=re.S)

    assert words("Same.", "Same.").count("Same.") == 1
    assert "One." in words("One.", "Two.")
    assert "Two." in words("One.", "Two.")
    apart = words("Same.", "Same.", groups=("Curves", "Bars"))
    assert "Curves: title of a" in apart
    assert apart.count("Same.") == 2


def test_two_figures_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two figures are named 'a'"):
        _files({}, _plot("a"), _plot("a"))
    with pytest.raises(ValueError, match="two figures are named 'a'"):
        report_files({}, [Section("x", [_plot("a"), Fold("y", [_plot("a")])])], "x", {})


def _environment() -> pd.DataFrame:
    """Two commands, the first on two nodes, the second with uncommitted changes and Optuna 5."""
    rows = [
        {"run_id": "r", "variant": "base", "command_id": f"{command}",
         "command": f"raypipe run {command}", "started_at": f"2026-03-0{day}T09:14:05+00:00",
         "git_commit": f"commit-of-{command}", "git_dirty": dirty, "hostname": host,
         "memory_bytes": 64 * 2**30, "gpu_driver": None, "optuna": optuna, "torch": "2.13.0"}
        for command, day, dirty, host, optuna in (
            ("second", 3, True, "node-a", "5.0.0"),
            ("first", 2, False, "node-a", "4.8.0"),
            ("first", 2, False, "node-b", "4.8.0"),
        )
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_the_environment_is_shown_for_each_command() -> None:
    raw = _files({"environment": _environment()})["index.html"].decode()
    raw = raw.partition('id="environment"')[2].partition("</section>")[0]
    second, first = (" ".join(re.split("<[^>]*>", text)) for text in raw.split("<details>"))
    assert "2026-03-02 09:14:05 UTC" in first
    assert "commit-of-first" in first
    assert "uncommitted changes" not in first
    for text in ("raypipe run first", "node-a", "node-b", "64.0 GiB", "4.8.0", "2.13.0"):
        assert text in first
    assert "commit-of-second with uncommitted changes" in second
    assert "5.0.0" in second
    assert "node-b" not in second
    assert "gpu driver" not in first


def test_an_option_does_not_break_at_its_hyphen() -> None:
    page = render("t", None, {}, [Section("Own", [Code("run --run-dir a --n <b>")])])
    text = page["index.html"].decode()
    assert '<code>run <span class="option">--run-dir</span> a' in text
    assert "&lt;b&gt;" in text


def test_a_narrow_page_wraps_its_navigation_and_tables() -> None:
    page = render("x", None, {}, [Section("s", ["give --maximize NAME"])])["index.html"].decode()
    narrow = page.partition("@media (max-width: 40rem)")[2].partition("@media")[0]
    assert "nav ul { flex-wrap: wrap; overflow: visible; }" in narrow
    assert "th, td { padding: 0.4rem 0.45rem; white-space: normal; }" in narrow
    assert '<p>give <span class="option">--maximize</span> NAME</p>' in page
