"""The section of any table: numbers that are those of pandas, for any rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from raypipe.report.parts import Fold, Section, TableView, render
from raypipe.report.plots import Plot
from raypipe.report.sections import table_section
from raypipe.report.tables import Results, means, plain
from raypipe.store.tables import Column, Table
from tests.raypipe.report.page_reader import HOSTILE, Page


def _section(table: Table, rows: pd.DataFrame, *axes: str) -> Section:
    return table_section(Results(replace(table, axes=axes), plain(rows)))


def _all(parts: object, kind: type) -> list:
    found = []
    for part in parts:  # type: ignore[attr-defined]
        found += [part] if isinstance(part, kind) else []
        found += _all(part.parts, kind) if isinstance(part, Fold) else []
    return found


def test_long_tables_show_their_first_rows_and_their_number() -> None:
    n = np.arange(100_000)
    rows = pd.DataFrame({"n": n, "text": [*"ab"] * 50_000, "value": np.sin(n)})
    section = _section(Table("waves", "a sample"), rows)
    (view,) = _all(section.parts, TableView)
    assert list(view.rows["n"]) == list(range(50))
    assert view.caption == "100\u202f000 rows, each a sample"
    assert not _all(section.parts, Plot)


CELLS = {
    "numbers": st.one_of(st.floats(), st.integers(-(10**6), 10**6), st.none()),
    "constant_bytes": st.just(7),
    "flags": st.booleans(),
    "few": st.sampled_from(["a", "b", None]),
    "texts": st.one_of(st.text(max_size=300), st.just(HOSTILE), st.none()),
    "mixed": st.one_of(st.text(max_size=3), st.integers(-9, 9), st.booleans(), st.lists(st.none())),
    "real_s": st.floats(-10, 10),
}
KINDS = st.lists(st.sampled_from(sorted(CELLS)), min_size=1, unique=True)
ROWS = KINDS.flatmap(lambda kinds: st.lists(
    st.fixed_dictionaries({kind: CELLS[kind] for kind in kinds}), min_size=1, max_size=30
))  # fmt: skip


@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(ROWS.map(pd.DataFrame), st.booleans(), st.integers(0, 3))
def test_any_rows_give_a_page(rows: pd.DataFrame, declared: bool, axes: int) -> None:
    columns = tuple(Column(name, "real", "m", better="lower") for name in rows.columns[-2:])
    table = Table("any", "a row", columns if declared else ())
    section = _section(table, rows, *rows.columns[:-2][:axes])
    page = Page(render("x", None, [section])["index.html"].decode())
    assert page.only_own_script
    assert f"{len(rows)} row" in page.words
    *_, view = _all(section.parts, TableView)
    assert len(view.rows) == min(50, len(rows))


POINTS = st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(-1e6, 1e6) | st.none())


@settings(max_examples=25)
@given(st.lists(POINTS, min_size=1, max_size=60))
def test_means_are_those_of_pandas(values: list[tuple[int, int, float | None]]) -> None:
    rows = pd.DataFrame(values, columns=["x", "seed", "y"]).astype({"y": float})
    found = means(rows, ["x"], "y", ["seed"])
    known = rows.dropna(subset="y").groupby(["x", "seed"])["y"].mean()
    expected = known.groupby(level="x").agg(["mean", "sem", "count"])
    got = pd.DataFrame({"mean": found.mean, "half": found.half, "count": found.runs})
    got = got.set_index(found.points["x"]).sort_index()
    assert_allclose(got["mean"], expected["mean"], rtol=1e-9, atol=1e-6)
    assert_allclose(got["count"], expected["count"])
    quantiles = scipy.stats.t.ppf(0.975, expected["count"].where(expected["count"] > 1) - 1)
    assert_allclose(got["half"], quantiles * expected["sem"], rtol=1e-6, atol=1e-6)


def test_a_curve_of_many_points_is_thinned_to_means_of_neighbors() -> None:
    rows = pd.DataFrame({"n": np.arange(50_000.0), "value": np.arange(50_000.0) ** 2})
    section = _section(Table("waves", "a sample"), rows, "n")
    (plot,) = _all(section.parts, Plot)
    x, y = plot.figure.axes[0].lines[0].get_data()
    assert len(x) == 1000
    assert_allclose(y, rows["value"].to_numpy().reshape(1000, 50).mean(1))
    assert "50\u202f000 points, averaged over neighbors." in plot.caption


def test_lines_without_values_of_the_axis_are_named() -> None:
    rows = pd.DataFrame({"method": [*"aabbcc"], "rate": [0.1, 0.2] * 2 + [0.1, None]})
    section = _section(
        Table("scores", "a fit"), rows.assign(loss=[4.0, 3, 2, 1, None, 5]), "method", "rate"
    )
    (plot,) = _all(section.parts, Plot)
    assert [line.get_label() for line in plot.figure.axes[0].lines[::3]] == ["a", "b"]
    assert plot.caption == "Without values over rate: c."


def test_of_many_repetitions_a_sample_is_drawn() -> None:
    rows = pd.DataFrame({"n": [1, 2] * 20_000, "seed": np.repeat(np.arange(20_000), 2)})
    section = _section(Table("waves", "a sample"), rows.assign(value=rows["seed"] * 1.0), "n")
    (plot,) = _all(section.parts, Plot)
    dots = plot.figure.axes[0].lines[0].get_xdata()
    assert (len(dots), set(dots)) == (1000, {1, 2})
    assert "Dots are a sample of the repetitions." in plot.caption


def test_a_heat_map_has_means_frames_the_best_and_has_missing_values_of_an_axis() -> None:
    rows = pd.DataFrame(
        [
            {"C": C, "depth": depth, "seed": seed, "accuracy": C / 10 + (depth or 9) + seed / 10}
            for C in (1, 2)
            for depth in (8.0, 4.0, None)
            for seed in range(3)
        ]
    )
    accuracy = Column("accuracy", "real", "Share of right answers.", better="higher")
    section = _section(Table("scores", "a fit", (accuracy,)), rows, "C", "depth")
    (plot,) = _all(section.parts, Plot)
    axes = plot.figure.axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["4", "8", "none"]
    cells = np.asarray(axes.get_images()[0].get_array())
    assert_allclose(cells, rows.pivot_table("accuracy", "C", "depth", dropna=False).to_numpy())
    (frame,) = axes.patches
    assert_allclose(frame.get_center(), [2, 1])  # the best
    view = next(part for part in section.parts if isinstance(part, TableView))
    assert list(view.rows.iloc[0]) == ["2", "none", pytest.approx(9.3), pytest.approx(0.248, 0.01)]
