from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from raypipe import report
from raypipe.report.page import page_files
from raypipe.report.parts import Code, Fold, Heading, Pill, Section, TableView, Tile
from raypipe.report.plots import Plot, slug
from raypipe.report.results import RunResults
from tests.raypipe.report.page_reader import HOSTILE, Page, page_of, plot_of
from tests.raypipe.report.test_golden_pages import stored_run

RUN = stored_run("training")


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    plots = plot_of(caption='It "bends".'), *map(plot_of, ("b", "b b", "b-b"))
    tables = {name: RUN.tables[name] for name in ("stages", "trials", "environment")}
    return page_files(replace(RUN, tables=tables, sections=[Section("Figures", plots)]))


@pytest.fixture(scope="module")
def page(files: dict[str, bytes]) -> Page:
    return Page(files["index.html"].decode())


def test_the_files_are_the_page_and_its_figures(files: dict[str, bytes]) -> None:
    names = ("curve", "b", slug("b b"), "b-b")
    figures = {f"figures/{name}.{kind}" for name in names for kind in ("png", "svg")}
    assert set(files) == {"index.html", *figures}


def test_the_page_needs_nothing_from_outside(page: Page) -> None:
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
    assert not re.search(r"https?://|@import|url\((?!#)", page.source)


def test_ids_are_unique_and_every_reference_has_its_target(page: Page) -> None:
    ids = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(ids) == len(set(ids))
    raw = " ".join(str(value) for _, attrs in page.tags for value in attrs.values())
    used = set(re.findall(r"url\(#([^)]+)\)", raw))
    used |= {str(a["href"])[1:] for _, a in page.tags if str(a.get("href", "")).startswith("#")}
    assert used
    assert used <= set(ids)


def _hostile_table() -> pd.DataFrame:
    values = [HOSTILE, Pill(HOSTILE, HOSTILE), Code(HOSTILE)]
    return pd.DataFrame({HOSTILE: values, f"{HOSTILE}2": reversed(values)}, dtype=object)


@pytest.mark.parametrize(
    ("part", "times"),
    [
        (HOSTILE, 1),
        (Heading(HOSTILE), 1),
        (Code(HOSTILE), 1),
        (Fold(HOSTILE, [HOSTILE, Code(HOSTILE)]), 3),
        # title, caption, the caption in the drawing
        (plot_of("plot", HOSTILE), 2),
        (plot_of(HOSTILE), 1),
        (plot_of("plot", "caption", HOSTILE), 1),
        (TableView(_hostile_table(), list(_hostile_table().columns), HOSTILE), 8),
        ((Tile(HOSTILE, HOSTILE, HOSTILE, HOSTILE),), 3),
        ({HOSTILE: [HOSTILE]}, 2),
    ],
    ids=lambda value: "text" if isinstance(value, str) else type(value).__name__,
)
def test_no_part_lets_text_become_markup(part: object, times: int) -> None:
    """Every text of every kind of part is on the page, as text and within its attribute."""
    section = Section("Hostile", [part], css=HOSTILE)  # type: ignore[list-item]
    page = page_of(RunResults({}, "x", sections=[section]))
    assert page.only_own_script
    assert "".join(page.text).count(HOSTILE) == times
    assert page.all("section")[0]["class"] == HOSTILE
    names = {name for _, attrs in page.tags for name in attrs}
    assert not any(name.startswith("on") or "script" in name for name in names)
    if isinstance(part, TableView):
        assert page.all("div")[-1]["aria-label"] == HOSTILE
        assert {attrs["class"] for attrs in page.all("span")} == {f"pill {HOSTILE}"}
    elif isinstance(part, Plot):
        named = (part.name == HOSTILE) + (part.caption == HOSTILE)
        assert page.all("svg")[0]["aria-label"].count(HOSTILE) == named


def test_no_template_switches_the_escaping_off() -> None:
    folder = Path(str(report.__file__)).parents[1]
    for file in (*folder.glob("*/templates/*.*"), *folder.glob("ui/*.py")):
        assert not re.search(rb"\|\s*safe|autoescape|Markup\(\w", file.read_bytes()), file
    safe = [file.stem for file in folder.glob("report/**/*.py") if "Markup(" in file.read_text()]
    assert safe == ["parts"]  # the SVG of a plot


def test_the_page_is_written_for_readers(page: Page) -> None:
    assert {attrs.get("scope") for attrs in page.all("th")} == {"row", "col"}
    svg, *_ = page.all("svg")
    assert (svg["role"], svg["aria-label"]) == ("img", 'title of curve. It "bends".')
    assert page.all("html")[0]["lang"] == "en"
    assert "raypipe run x.yaml" in page.words
    assert "steps: 400" in page.words


def test_sections_follow_from_the_tables(page: Page) -> None:
    assert page.headings == [
        "summary", "figures", "training-runs", "stages", "environment", "how-to-repeat",
    ]  # fmt: skip

    def headings(tables: Mapping[str, pd.DataFrame]) -> list[str]:
        return page_of(RunResults(tables, "x", sections=[Section("Own", [])])).headings

    assert headings({}) == []
    assert headings({name: table.iloc[:0] for name, table in RUN.tables.items()}) == []
    for name in RUN.tables:
        assert headings({key: table for key, table in RUN.tables.items() if key != name})


def test_two_figures_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two figures are named 'a'"):
        page_of(RunResults({}, sections=[Section("x", [plot_of("a"), Fold("y", [plot_of("a")])])]))
