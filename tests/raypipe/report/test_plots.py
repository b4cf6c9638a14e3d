"""Style and charts: what figures draw, and that labels and axes fit."""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.image import imread

from raypipe.graph.tables import CORE
from raypipe.report import plots
from raypipe.report.plots import Line, Plot, encode, frame_y, slug, style
from raypipe.report.results import Declarations, RunResults
from raypipe.report.sections import number_plots, training_plots
from raypipe.report.tables import Results
from raypipe.store.tables import Column, Table, by_name
from tests.raypipe.report.page_reader import plot_of
from tests.scenario import cases

CASES = cases(__file__, "plots")


def test_a_figure_is_a_png_of_150_dpi_and_an_svg_and_the_same_each_time() -> None:
    files = encode(plot_of())
    assert list(files) == ["png", "svg"]
    image = imread(io.BytesIO(files["png"]))
    assert image.shape[:2] == (450, 600)
    assert image[..., :3].std() > 0.01
    assert ET.fromstring(files["svg"]).tag.endswith("svg")
    assert b"#e8265e" in files["svg"]
    assert encode(plot_of()) == files


@given(st.text(), st.text())
@example("../../x", "..")
@example("é\n", "")
@example("a\0b", "x" * 5000)
def test_a_slug_is_a_plain_file_name_and_tells_texts_apart(first: str, second: str) -> None:
    for text in (first, second):
        assert re.fullmatch(r"\w[\w.-]{0,118}", slug(text), re.ASCII)
    assert (slug(first) == slug(second)) == (first == second)


@pytest.mark.parametrize(("values", "scale"), CASES["scales"])
def test_the_y_axis_is_logarithmic_only_where_the_range_demands_it(values, scale) -> None:
    with style():
        canvas = Figure(figsize=(4, 3))
        axes = canvas.add_subplot()
        axes.plot(values)
        frame_y(axes, values)
        assert encode(Plot("y", "", "", canvas))
    low, high = axes.get_ylim()
    assert axes.get_yscale() == scale
    assert low < min(values)
    assert min(1e150, max(value for value in values if value < np.inf)) <= high < np.inf


def test_a_dollar_sign_in_a_name_is_drawn_as_such() -> None:
    assert "$x_{&lt;b&gt;" in encode(plot_of(caption="$x_{<b>"))["svg"].decode()


@pytest.mark.parametrize(("count", "better", "named", "best"), CASES["named"])
def test_few_lines_are_named_by_their_ends_and_of_many_only_the_best(count, better, named, best):
    x = np.arange(10.0)
    with style():
        drawn = [Line(f"run {n}", x, x + n) for n in range(count)]
        axes = plots.lines(drawn, "step", "loss", better=better).axes[0]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == named
    assert [text.get_text() for text in axes.texts] == best


@pytest.mark.parametrize("ticks", [["0.5", "1", "2"], ["0.001", "0.01", "0.1"]])
def test_a_long_name_is_written_in_lines_and_few_values_of_an_axis_have_a_tick_each(ticks):
    x = np.array(ticks, float)
    names = [f"seed=0, clip_norm=1, learning_rate={rate}" for rate in ("0.001", "0.0003")]
    with style():
        drawn = [Line(name, x, x + len(name)) for name in names]
        axes = plots.lines(drawn, "clip norm", "loss", from_0=False).axes[0]
    shown = [text.get_text() for text in axes.get_legend().get_texts()]
    assert "seed=0,\nclip_norm=1,\nlearning_rate=\n0.0003" in shown
    assert all(len(line) <= 17 for text in shown for line in text.splitlines())
    assert [text.get_text() for text in axes.get_xticklabels()] == ticks


@pytest.mark.parametrize(("better", "scale"), [("lower", "log"), ("higher", "linear")])
def test_what_is_better_if_higher_is_drawn_to_scale(better: str, scale: str) -> None:
    with style():
        drawn = [Line("run", np.arange(4.0), np.array([0.004, 0.1, 0.3, 0.5]))]
        axes = plots.lines(drawn, "step", "accuracy", better=better).axes[0]
    assert axes.get_yscale() == scale


def test_a_line_has_a_gap_where_a_result_is_not_finite():
    table = Table("calls", "a call", (Column("acc", "real", "", better="higher"),), axes=("x",))
    rows = pd.DataFrame({"x": range(6), "acc": [0.1, 0.2, math.nan, 0.4, math.inf, 0.6]})
    (plot,) = number_plots(Results(table, rows), table.columns[0])
    line = plot.figure.axes[0].lines[0]
    np.testing.assert_array_equal(line.get_xdata(), range(6))
    np.testing.assert_array_equal(line.get_ydata(), [0.1, 0.2, math.nan, 0.4, math.nan, 0.6])
    low, high = plot.figure.axes[0].get_xlim()
    assert low < 0
    assert high > 5
    assert "has a gap, and a cross, where a value is missing or not finite." in plot.caption


# training runs


def _steps(**columns: object) -> pd.DataFrame:
    step = np.arange(10, 601, 10)
    loss = 1 + 5 * np.exp(-step / 100) + np.random.default_rng(3).normal(0, 0.05, 60)
    rows = {"trial_id": "trial-0", "step": step, "lr": 1e-3, "samples_per_s": 400.0, "loss": loss}
    return pd.DataFrame(rows).assign(**columns)


def _named(**tables: pd.DataFrame) -> dict[str, Plot]:
    run = RunResults(tables, declared=Declarations(core=by_name(CORE)))
    return {figure.name: figure for figure in training_plots(run)}


def test_nothing_to_draw_gives_no_figures() -> None:
    assert _named() == {}
    assert _named(steps=_steps().iloc[:0]) == {}
    assert _named(steps=_steps(loss=np.nan, samples_per_s=np.nan)) == {}


def test_the_loss_curve_is_the_table_and_its_running_median() -> None:
    steps = _steps()
    trials = pd.DataFrame({"trial_id": ["trial-0"], "stage": ["train_small"]})
    figures = _named(steps=steps.sample(frac=1, random_state=0), trials=trials)
    assert list(figures) == ["loss-train_small"]  # the speed and the rate do not change
    raw, smooth = figures["loss-train_small"].figure.axes[0].lines
    np.testing.assert_array_equal(raw.get_xdata(), steps["step"])
    np.testing.assert_array_equal(raw.get_ydata(), steps["loss"])
    median = steps["loss"].rolling(3, center=True, min_periods=1).median()
    np.testing.assert_allclose(smooth.get_ydata(), median)


@pytest.mark.parametrize(("values", "heights"), CASES["heights"])
def test_a_point_is_a_line_over_an_upright_axis_per_column(values, heights) -> None:
    points = pd.DataFrame({"key": values, "score": [3.0, 2.0, 1.0]})
    figure = plots.parallel(points, ["first", "second", "third"], 1)
    lines = [line for line in figure.axes[0].lines if str(line.get_gid()).startswith(plots.TIP)]
    drawn = {line.get_gid(): np.asarray(line.get_ydata(), float) for line in lines}
    found = np.array([drawn[f"{plots.TIP}{name}"] for name in ("first", "second", "third")])
    np.testing.assert_allclose(found, np.column_stack([heights, [1, 0.5, 0]]))
    assert encode(Plot("x", "", "", figure))["svg"]
