"""Section of the report on the variants of a matrix: tables, heat maps, parallel coordinates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import comb
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raypipe.config.levels import nested
from raypipe.config.matrix import is_seed, text_value
from raypipe.config.yaml_text import dump_yaml
from raypipe.report.comparison import (
    Observations,
    PointMeans,
    Tables,
    point_name,
    points,
    seeds_of,
    summary,
    tests,
    variants_of,
)
from raypipe.report.formatting import number
from raypipe.report.heat_map import grid_range, heat_figure
from raypipe.report.plots import (
    GRID,
    HEIGHT,
    MUTED,
    PAPER,
    WIDTH,
    Plot,
    finite,
    new_axes,
    slug,
    style,
)
from raypipe.report.search import searched_keys
from raypipe.report.sections import Code, Fold, Heading, Part, Section, TableView
from raypipe.stats import runs_needed

_MOST_PLOTS = 4
_MOST_VALUES = 24  # of an axis of a heat map
_MOST_LABELS = 12  # of an axis of parallel coordinates
_LENGTH = 14  # characters of a value
_COLORS = "viridis"  # read alike with any color vision, and in gray


def variants_section(tables: Tables, shown: Mapping[str, str] | None) -> Section:
    """Return the comparison of the variants.

    ``shown`` is the point of the experiment's own sections.
    """
    observed = Observations.of(tables)
    if observed.numbers.empty:
        return Section("Variants", [])
    values = observed.numbers.groupby("metric", sort=False)["value"].nunique()
    same = [str(metric) for metric, count in values.items() if count == 1]
    parts: list[Part] = [_introduction(tables, shown), *_best_points(tables, observed)]
    searched = searched_keys(tables)  # their values are compared in the section of the search
    for axis in (axis for axis in observed.axes if axis not in searched):
        parts += _of_axis(observed, axis, same)
    if not observed.axes:
        means = summary(observed, None)
        means = means[~means["metric"].isin(same)]
        columns = [name for name in means.columns if name not in ("axis", "value", "unmatched")]
        parts.append(TableView(means, columns, "Means over seeds"))
    if same:
        parts.append(f"The same at every point, and left out: {', '.join(same)}.")
    return Section("Variants", parts)


def seeds_needed(tables: Tables) -> int:
    """Return the seeds with which the paired tests can tell a winner on every axis of a matrix."""
    values: dict[str, set[str]] = {}
    for variant in variants_of(tables).values():
        for key, value in variant.items():
            values.setdefault(key, set()).add(value)
    left_out = searched_keys(tables)
    counts = [len(v) for k, v in values.items() if not is_seed(k) and k not in left_out]
    return runs_needed(comb(max(counts, default=2), 2))


def _of_axis(observed: Observations, axis: str, same: Sequence[str]) -> list[Part]:
    """Return means and tests of an axis, without metrics that are the same at every point."""
    means = summary(observed, axis)
    means = means[~means["metric"].isin(list(same))]
    if means.empty:
        return []
    partial = bool(means["unmatched"].any())
    hidden = ["axis"] if partial else ["axis", "unmatched"]
    columns = [name for name in means.columns if name not in hidden]
    parts: list[Part] = [Heading(axis), TableView(means, columns, f"Means by {axis}")]
    if partial:
        parts.append(
            f"Some points are missing, so the means by {axis} are not over the same points. The "
            "tests compare two values at the points that both have."
        )
    compared = tests(observed, axis)
    compared = compared[~compared["metric"].isin(list(same))]
    if compared.empty:
        return parts
    columns = ["metric", "first", "second", "n", "p_holm", "effect", "conclusion"]
    parts.append(TableView(compared, columns, f"Paired tests of {axis}"))
    return parts


def _best_points(tables: Tables, observed: Observations) -> list[Part]:
    """Return the best point for each metric with its YAML, and figures of these metrics."""
    found = tables.get("best_variants")
    if found is None or found.empty:
        return []
    points = [point_name(json.loads(point)) for point in found["point"]]
    shown = found.assign(point=pd.Series(map(Code, points), found.index, dtype=object))
    columns = ["metric", "better", "mean", "seeds", "points", "point"]
    parts: list[Part] = [
        Heading("Best points"),
        "The mean over seeds decides; the tests below tell whether it is more than chance.",
        TableView(shown, columns, "Best points"),
    ]
    for metric, point in zip(found["metric"], found["point"], strict=True):
        parts.append(Fold(f"Configuration of the best {metric}", [Code(best_yaml(point))]))
    best = set(found["metric"])
    for means in observed.by_point():
        if means.metric.name in best:
            plots = [parallel_coordinates(means)]
            if means.metric.table == "trials" or len(means.axes) > 2:
                plots += heat_maps(means)  # two axes of another table are in its own section
            parts += [plot for plot in plots if plot is not None][:_MOST_PLOTS]
    return parts


def yaml_values(point: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a point whose values are texts."""
    return {key: text_value(text) for key, text in point.items()}


def best_yaml(point: str) -> str:
    """Return the values of a point, given as JSON, as a part of a configuration."""
    return dump_yaml(nested(yaml_values(json.loads(point))))


def _introduction(tables: Tables, shown: Mapping[str, str] | None) -> str:
    axes: dict[str, set[str]] = {}
    for values in variants_of(tables).values():
        for key, value in values.items():
            if not is_seed(key):
                axes.setdefault(key, set()).add(value)
    compared = {point_name({k: v for k, v in p.items() if not is_seed(k)}) for p in points(tables)}
    seeds, count = seeds_of(tables), len(compared)
    text = f"{count} point{'s' * (count > 1)}"
    if axes:
        listed = (f"{key} ({len(values)} values)" for key, values in sorted(axes.items()))
        text += f" over {', '.join(listed)}"
    text += f", with {seeds} seeds." if seeds > 1 else "."
    if shown:
        text += f" The experiment's own sections show the point {point_name(shown)}; "
        text += "raypipe report RUN_DIR --variant POINT shows another one."
    return text


def heat_maps(means: PointMeans) -> list[Plot]:
    """Return a heat map for each pair of axes, averaged over the others."""
    return [
        _heat_map(means, first, second)
        for first, second in combinations(means.axes, 2)
        if max(means.points[first].nunique(), means.points[second].nunique()) <= _MOST_VALUES
    ]


def _heat_map(means: PointMeans, first: str, second: str) -> Plot:
    rows, columns = _values(means.points[first]), _values(means.points[second])
    sums, counts = np.zeros((2, len(rows), len(columns)))
    y, x = means.points[first].map(rows.index), means.points[second].map(columns.index)
    known = np.isfinite(means.means)
    np.add.at(sums, (y[known], x[known]), means.means[known])
    np.add.at(counts, (y[known], x[known]), 1)
    grid = np.divide(sums, counts, out=np.full_like(sums, np.nan), where=counts > 0)
    others = [key for key in means.axes if key not in (first, second)]
    with style():
        figure = heat_figure(grid, list(map(str, rows)), list(map(str, columns)))
        figure.axes[0].set(xlabel=_last(second, means.axes), ylabel=_last(first, means.axes))
    name = slug(f"heat-{means.metric.name}-{first}-{second}")
    caption = "Mean over seeds" + (f", and over {', '.join(others)}." if others else ".")
    shown = grid_range(means.metric.column, grid)
    return Plot(name, means.metric.name, f"{caption} {shown}", figure)


def parallel_coordinates(means: PointMeans) -> Plot | None:
    """Return a line for each point through its values and its mean; None for a single axis."""
    varied = means.axes
    if len(varied) < 2 or len(finite(means.means)) < 2:
        return None
    places = []
    with style():
        figure, axes = new_axes(width=0.75, height=0.74)
        for place, key in enumerate(varied):
            values = _values(means.points[key])
            height = dict(zip(values, np.linspace(0, 1, len(values)), strict=True))
            places.append(means.points[key].map(height).to_numpy())
            if len(values) <= _MOST_LABELS:
                for value in values:
                    axes.text(
                        place + 0.03, height[value], _short(value),
                        fontsize=10, va="center", zorder=3,
                        bbox={"facecolor": PAPER, "alpha": 0.7, "linewidth": 0, "pad": 0.6},
                    )  # fmt: skip
        shares = _shares(means.means)
        lines = np.stack([*places, shares], axis=1)
        colors = mpl.colormaps[_COLORS]
        for line, share in zip(lines, shares, strict=True):
            if np.isfinite(share):
                axes.plot(line, color=colors(0.15 + 0.8 * share), linewidth=1.1, alpha=0.8)
        known = finite(means.means)
        for share, value in ((0.0, known.min()), (1.0, known.max())):
            axes.text(len(varied) + 0.04, share, number(float(value)), fontsize=10, va="center")
        for place in range(len(varied) + 1):
            axes.axvline(place, color=GRID if place < len(varied) else MUTED, linewidth=0.8)
        labels = [_last(key, varied) for key in varied]
        axes.set_xticks(range(len(varied) + 1), [*labels, means.metric.column])
        axes.set_yticks([])
        axes.set(xlim=(-0.1, len(varied) + 0.02), ylim=(-0.06, 1.06))
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        figure.set_size_inches(min(2.0, max(1.0, len(varied) / 4)) * WIDTH, HEIGHT)
    name = slug(f"parallel-{means.metric.name}")
    caption = f"A line for each of {len(means.means)} points; color and last axis: mean over seeds."
    return Plot(name, means.metric.name, caption, figure)


def _values(column: pd.Series) -> list[str]:
    """Return the values of an axis: numbers in their order, other values as they were given."""
    values = list(dict.fromkeys(column))
    try:
        return sorted(values, key=float)
    except ValueError:
        return values


def _shares(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the place of each value between the smallest and the largest, in [0, 1]."""
    known = finite(values)
    low, high = known.min(), known.max()
    shares: NDArray[np.float64] = (values - low) / (high - low or 1.0)
    return shares


def _short(value: str) -> str:
    return value if len(value) <= _LENGTH else f"{value[: _LENGTH - 1]}…"


def _last(key: str, keys: list[str]) -> str:
    """Return the last part of a dotted key if it tells it from the others."""
    last = key.rpartition(".")[2]
    return last if [other.rpartition(".")[2] for other in keys].count(last) == 1 else key
