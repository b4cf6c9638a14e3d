from __future__ import annotations

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex
from numpy.testing import assert_allclose

from raypipe.report.sweep_pareto import front
from tests.raypipe.report.sweep_tables import (
    CAPACITY,
    GIB,
    SLOPE,
    STATIC,
    plots_by_kind,
    plots_of,
    systems_tables,
    texts,
)


def test_the_pareto_figure_shows_every_measured_trial_and_names_the_recommended() -> None:
    tables = systems_tables()
    figure = plots_by_kind(tables)["pareto"]
    measured = tables["trials"].dropna(subset=["samples_per_s"])
    for axes, column, scale in zip(
        figure.figure.axes, ["gpu_peak_bytes", "energy_j_per_sample"], [GIB, 1], strict=True
    ):
        points = np.concatenate([c.get_offsets() for c in axes.collections])
        drawn = np.unique(points, axis=0)  # the ring lies on its point
        expected = np.unique(measured[[column, "samples_per_s"]] / [scale, 1], axis=0)
        assert_allclose(drawn, expected)
        assert texts(axes) == ["recommended\nbf16, 128"]
        assert axes.get_xlabel().startswith("← better")
    assert f"{len(measured)} trials" in figure.caption
    assert figure.title == "The recommendation is the fastest, in 98.0 GiB"


def test_without_energy_there_is_one_panel() -> None:
    tables = systems_tables()
    tables["trials"]["energy_j_per_sample"] = None
    assert len(plots_by_kind(tables)["pareto"].figure.axes) == 1


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=20))
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    cost, gain = np.array(points, dtype=float).T
    expected = {
        (c, g) for c, g in points
        if not any(a <= c and b >= g and (a, b) != (c, g) for a, b in points)
    }  # fmt: skip
    x, y = front(cost, gain)
    assert list(zip(x, y, strict=True)) == sorted(expected)


def test_a_named_trial_stays_within_the_axes_and_off_the_points() -> None:
    tables = systems_tables()
    measured = tables["trials"].dropna(subset=["samples_per_s"])["trial_id"]
    for name in measured.iloc[::6]:
        tables["recommendations"]["trial_id"] = name
        figure = plots_by_kind(tables)["pareto"].figure
        figure.draw_without_rendering()
        for axes in figure.axes:
            box = axes.texts[0].get_window_extent()
            assert axes.bbox.padded(3).contains(box.x0, box.y0)
            assert axes.bbox.padded(3).contains(box.x1, box.y1)


def test_the_memory_figure_has_points_lines_capacity_and_crosses() -> None:
    tables = systems_tables([False])
    figure = plots_by_kind(tables)["memory"]
    [axes] = figure.figure.axes
    lines = {str(line.get_label()): line for line in axes.lines}
    for precision, slope in SLOPE.items():
        x, y = (np.asarray(values) for values in lines[precision].get_data())
        assert_allclose(y * GIB, STATIC + slope * x)
    dashed = [line for line in axes.lines if line.get_linestyle() == "--"]
    assert any(np.allclose(line.get_ydata(), CAPACITY / GIB) for line in dashed)
    crosses = [line for line in axes.lines if line.get_marker() == "x"]
    assert [(*c.get_xdata(), *c.get_ydata()) for c in crosses] == [(128, 100), (256, 100)]
    assert len({to_hex(cross.get_color()) for cross in crosses}) == 2
    assert set(texts(axes)) == {"capacity 100.0 GiB", "fp32", "bf16"}
    assert "1.3 %" in figure.title


def test_each_group_of_the_memory_figure_is_named() -> None:
    [axes] = plots_by_kind(systems_tables())["memory"].figure.axes
    names = {"fp32", "fp32, checkpointing", "bf16", "bf16, checkpointing"}
    assert names < set(texts(axes))
    assert "1 worker" not in " ".join(texts(axes))


def test_each_setting_that_changes_the_memory_has_a_figure_of_its_own() -> None:
    tables = systems_tables()
    other = tables["trials"].assign(
        compile=True, trial_id=lambda t: t["trial_id"] + "c", gpu_peak_bytes=3e9
    )
    tables["trials"] = pd.concat([tables["trials"], other])
    figures = [f for f in plots_of(tables) if "memory" in f.name]
    assert [figure.name.rpartition("-")[2] for figure in figures] == ["not compiled", "compiled"]
    first, second = ({str(line.get_label()) for line in f.figure.axes[0].lines} for f in figures)
    assert set(SLOPE) < first
    assert not set(SLOPE) & second  # no fit of another setting


def test_a_capacity_far_above_is_only_said() -> None:
    tables = systems_tables([True])
    tables["memory_fits"]["capacity_bytes"] = 9000 * GIB
    tables["trials"] = tables["trials"][tables["trials"]["status"] == "succeeded"]
    figure = plots_by_kind(tables)["memory"]
    assert figure.figure.axes[0].get_ylim()[1] < 1000
    assert figure.caption.endswith("The capacity, 9000.0 GiB, is far above.")


def test_on_a_cpu_the_memory_is_that_of_the_host() -> None:
    tables = systems_tables([True])
    tables["trials"] = tables["trials"].assign(
        gpu_peak_bytes=None, device="cpu", energy_j_per_sample=None,
        host_peak_bytes=lambda t: (400 + t["micro_batch"]) * 2**20,
    )  # fmt: skip
    tables["memory_fits"]["capacity_bytes"] = None
    figures = plots_by_kind(tables)
    [axes] = figures["memory"].figure.axes
    assert axes.get_title(loc="left") == "peak host memory, MiB"
    drawn = np.concatenate([c.get_offsets() for c in axes.collections])
    assert_allclose(drawn[:, 1], 400 + drawn[:, 0])
    assert "capacity" not in " ".join(texts(axes))
    assert figures["pareto"].figure.axes[0].get_xlabel() == "← better   peak host memory, MiB"


def test_trials_without_accumulation_have_a_line_of_their_own() -> None:
    tables = systems_tables([False])
    fits = tables["memory_fits"]
    single = fits.assign(accumulates=False, static_bytes=GIB)
    tables["memory_fits"] = pd.concat([single, fits.assign(accumulates=True)])
    figure = plots_by_kind(tables)["memory"]
    lines = {str(line.get_label()): line for line in figure.figure.axes[0].lines}
    for label, static in (("bf16", STATIC), ("_further", GIB)):
        x, y = (np.asarray(values) for values in lines[label].get_data())
        assert_allclose(y * GIB, static + SLOPE["bf16"] * x)
    assert "without accumulation" in figure.caption
