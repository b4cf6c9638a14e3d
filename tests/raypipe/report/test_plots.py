from __future__ import annotations

import dataclasses
import io
import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread

from raypipe.report.formatting import short_labels
from raypipe.report.plots import (
    Plot,
    encode,
    frame_y,
    label_lines,
    rows,
    slug,
    spread,
    strokes,
    style,
)
from raypipe.report.table_plots import number_plot
from raypipe.report.table_shape import shape_of
from raypipe.store.tables import Column, Table


def _figure(name: str = "curve") -> Plot:
    with style():
        canvas = Figure(figsize=(4, 3))
        canvas.add_subplot().plot([0, 1, 2], [3, 1, 2], color="#e8265e")
    return Plot(name, "A curve", "It bends.", canvas)


def test_a_figure_is_a_png_of_150_dpi_and_an_svg() -> None:
    files = encode(_figure())
    assert list(files) == ["png", "svg"]
    image = imread(io.BytesIO(files["png"]))
    assert image.shape[:2] == (450, 600)
    assert image[..., :3].std() > 0.01
    assert ET.fromstring(files["svg"]).tag.endswith("svg")
    assert b"#e8265e" in files["svg"]


def test_equal_figures_give_equal_bytes() -> None:
    assert encode(_figure()) == encode(_figure())


@given(st.text(), st.text())
def test_a_slug_is_a_plain_file_name_and_tells_texts_apart(first: str, second: str) -> None:
    for text in (first, second):
        assert Path(slug(text)).name == slug(text) != ""
        assert not slug(text).startswith((".", "-"))
    assert (slug(first) == slug(second)) == (first == second)


def test_a_name_keeps_its_stroke_when_names_are_added() -> None:
    few, many = strokes(["ga", "es"]), strokes(["ga", "es", "tpe"])
    assert {name: many[name] for name in few} == few
    assert len({stroke.color for stroke in strokes([str(i) for i in range(9)]).values()}) == 9
    assert (
        len(
            {
                (stroke.color, str(stroke.line))
                for stroke in strokes([str(i) for i in range(18)]).values()
            }
        )
        == 18
    )


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_spread_keeps_order_and_distance(positions: list[float]) -> None:
    gap = 0.1
    placed = spread(np.array(positions), gap)
    order = np.argsort(positions, kind="stable")
    assert (np.diff(placed[order]) >= gap - 1e-9).all()
    assert placed.min() >= -1e-9
    assert placed.max() <= 1 + 1e-9


def test_the_perplexity_of_a_diverged_model_is_drawn() -> None:
    with style():
        canvas = Figure(figsize=(4, 3))
        axes = canvas.add_subplot()
        axes.plot([1e-5, 1e305])
        frame_y(axes, np.array([1e-5, 1e305]))
        low, high = axes.get_ylim()
        assert encode(Plot("perplexity", "", "", canvas))
    assert 0 < low < 1e-5
    assert high == pytest.approx(1e150)  # ticks beyond overflow


def test_spread_leaves_positions_that_do_not_collide() -> None:
    positions = np.array([0.9, 0.1, 0.5])
    np.testing.assert_allclose(spread(positions, 0.1), positions)


def _axes() -> Axes:
    return Figure().add_subplot()


def test_the_y_axis_is_logarithmic_only_where_the_range_demands_it() -> None:
    narrow, wide, signed = _axes(), _axes(), _axes()
    frame_y(narrow, [1500, 2600, np.nan])
    frame_y(wide, [1500, 1e44, np.inf])
    frame_y(signed, [-1, 1e6])
    assert narrow.get_yscale() == signed.get_yscale() == "linear"
    assert wide.get_yscale() == "log"
    low, high = wide.get_ylim()
    assert 0 < low < 1500
    assert 1e44 < high < np.inf


def test_labels_at_the_lines_do_not_overlap() -> None:
    with style():
        canvas = Figure(figsize=(5, 3.5))
        axes = canvas.add_axes((0.1, 0.1, 0.6, 0.8))
        frame_y(axes, [1000, 2000])
        fixed = strokes([str(i) for i in range(9)])
        label_lines(axes, [(1010.0, name, stroke) for name, stroke in fixed.items()])
        canvas.draw_without_rendering()
        boxes = sorted(text.get_window_extent().extents[[1, 3]].tolist() for text in axes.texts)
    assert len(boxes) == 9
    assert all(below[1] <= above[0] + 1 for below, above in pairwise(boxes))


def test_a_table_is_none_when_missing_or_empty() -> None:
    table = pd.DataFrame({"stage": ["lda"]})
    assert rows({}, "stages") is None
    assert rows({"stages": table.iloc[:0]}, "stages") is None
    assert rows({"stages": table}, "stages") is table


def test_a_dollar_sign_in_a_name_is_drawn_as_such() -> None:
    figure = _figure()
    with style():
        figure.figure.axes[0].set_title("$x_{<b>")
    svg = encode(dataclasses.replace(figure, name="x"))["svg"].decode()
    assert "$x_{&lt;b&gt;" in svg


def test_a_line_has_a_gap_where_a_result_is_not_finite():
    table = Table("calls", "a call", (Column("acc", "real", "", better="higher"),), axes=("x",))
    values = [0.1, 0.2, math.nan, 0.4, math.inf, 0.6]
    rows = pd.DataFrame({"x": range(6), "acc": values})
    plot = number_plot(table, table.columns[0], rows, shape_of(table, rows))
    assert plot is not None
    line = plot.figure.axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), range(6))
    np.testing.assert_array_equal(line.get_ydata(), [0.1, 0.2, math.nan, 0.4, math.nan, 0.6])
    low, high = plot.figure.axes[0].get_xlim()
    assert low < 0
    assert high > 5
    assert (
        "The line has a gap, and a cross, where a value is missing or not finite." in plot.caption
    )


def test_labels_that_are_cut_stay_different():
    names = [f"evaluate_large, far, quadratic, {kind}" for kind in ("near", "far")]
    for longest in (12, 22, 80):
        labels = short_labels([*names, "a"], longest)
        assert len(set(labels)) == 3
        assert all(len(label) <= longest for label in labels)
    assert len(set(short_labels(["a" * 30 + str(n) + "b" * 30 for n in range(12)], 22))) == 12
