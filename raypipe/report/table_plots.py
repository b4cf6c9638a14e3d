"""Plots of a table's numbers by its axes: heat map, curve, dots with intervals, distribution."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from raypipe.report import plots
from raypipe.report.formatting import cell, heading, number, short_labels
from raypipe.report.headlines import is_baseline, with_interval
from raypipe.report.heat_map import LETTER, LONGEST, grid_range, heat_figure
from raypipe.report.marks import mark_best, tip
from raypipe.report.plots import INK, MUTED, Plot, finite
from raypipe.report.table_shape import (
    Shape,
    as_numbers,
    is_number,
    means,
    point_label,
    value_label,
)
from raypipe.stats import ranked
from raypipe.store.tables import Column, Table

_MOST_CELLS = 24  # of an axis of a heat map
_MOST_DOTS = 24
_MOST_TIPS = 200
_LARGEST = 1e300  # matplotlib overflows beyond
_MOST_POINTS = 1000
_LEAST_DOTS = 3  # the headline compares two
_FEW_ROWS = 20  # a distribution of fewer says less than the table


def number_plot(table: Table, column: Column, rows: pd.DataFrame, shape: Shape) -> Plot | None:
    """Draw a number by the axes of the table; None if there is nothing to compare.

    Two axes give a heat map, averaged over further ones and without baselines; a numeric axis gives
    a curve; another axis gives dots; many rows without axes give their distribution.
    """
    values = finite(as_numbers(rows[column.name]))
    drawn = [values, *(finite(as_numbers(rows[name])) for name in shape.axes)]
    if values.size < 2 or any(np.abs(each).max(initial=0) > _LARGEST for each in drawn):
        return None
    with plots.style():
        pair = heat_axes(table, rows, shape)
        if pair is not None:
            return _heat_map(table, column, rows, shape, *pair)
        if not shape.axes:
            return _distribution(table, column, values)
        if len(shape.axes) == 1 and is_number(rows[shape.axes[0]]):
            return _curve(table, column, rows, shape)
        return _dots(table, column, rows, shape)


def heat_axes(table: Table, rows: pd.DataFrame, shape: Shape) -> tuple[str, str] | None:
    """Return the two axes of a heat map: the first two with several values apart from baselines."""
    own = rows[~is_baseline(table, rows[list(shape.axes)])] if shape.axes else rows
    varied = [name for name in shape.axes if 1 < own[name].nunique() <= _MOST_CELLS]
    if len(varied) < 2:
        return None
    first, second = varied[:2]
    cells = len(own[[first, second]].drop_duplicates())
    full = own[first].nunique() * own[second].nunique()
    return (first, second) if cells >= 3 and cells >= full / 4 else None


def _heat_map(
    table: Table, column: Column, rows: pd.DataFrame, shape: Shape, first: str, second: str
) -> Plot:
    own = rows[~is_baseline(table, rows[list(shape.axes)])]
    for name in (first, second):  # a value such as null is one of the compared
        if own[name].isna().any():
            own = own.assign(**{name: own[name].astype(object).where(own[name].notna(), "none")})
    found = means(own, [first, second], column.name, shape.seeds)
    down, across = _ordered(own[first]), _ordered(own[second])
    grid = np.full((len(down), len(across)), np.nan)
    places = zip(found.points[first], found.points[second], found.mean, strict=True)
    for one, other, mean in places:
        if one in down and other in across:
            grid[down.index(one), across.index(other)] = mean
    others = [
        name for name in shape.axes if name not in (first, second) and own[name].nunique() > 1
    ]
    over = ["repetitions"] if shape.seeds else []
    caption = f"Mean over {' and '.join([*over, *map(last, others)])}. " if over or others else ""
    named = list(map(value_label, down)), list(map(value_label, across))
    figure = heat_figure(grid, *named, column.better)
    figure.axes[0].set(xlabel=last(second), ylabel=last(first))
    title = f"{heading(column.name)} by {last(first)} and {last(second)}"
    name = f"{table.name}-{column.name}-heat"
    caption += grid_range(column.name, grid, column.better)
    return Plot(name, title, f"{caption}{_better(column)}", figure)


def _curve(table: Table, column: Column, rows: pd.DataFrame, shape: Shape) -> Plot:
    """Draw the means along a numeric axis, with intervals and the best point marked."""
    (axis,) = shape.axes
    found = means(rows, [axis], column.name, shape.seeds)
    x: NDArray[np.floating[Any]] = np.unique(finite(as_numbers(rows[axis])))
    at = as_numbers(found.points[axis]).to_numpy()
    known = np.isfinite(at)
    places = np.searchsorted(x, at[known])
    y: NDArray[np.floating[Any]] = np.full(len(x), np.nan)  # a gap where nothing is finite
    half = y.copy()
    y[places], half[places] = (v.to_numpy(float)[known] for v in (found.mean, found.half))
    thinned = len(x) > _MOST_POINTS
    if thinned:
        x, y, half = (_thinned(values) for values in (x, y, half))
    figure, axes = plots.new_axes()
    stroke = plots.single_stroke()
    axes.plot(x, y, color=stroke.color, zorder=2)
    if np.isfinite(half).any():
        axes.fill_between(x, y - half, y + half, color=stroke.color, alpha=0.18, linewidth=0)
    if len(x) <= _MOST_TIPS:
        for place, value in enumerate(y):
            if np.isfinite(value):
                text = with_interval(column.name, float(value), float(half[place]))
                (dot,) = axes.plot([x[place]], [value], "o", color=stroke.color, markersize=4)
                tip(dot, f"{last(axis)} {value_label(float(x[place]))}: {text}")
    gaps = x[np.isnan(y)]
    if gaps.size:
        floor = axes.get_xaxis_transform()
        axes.plot(gaps, np.zeros(gaps.size), "x", color=MUTED, transform=floor, clip_on=False)
    if plots.needs_log(x, 30):
        plots.set_log(axes.xaxis, float(x.min()), float(x.max()))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(6))
        plots.write_numbers(axes.xaxis)
    axes.set_xlabel(last(axis))
    plots.frame_y(
        axes, np.concatenate([finite(y - np.nan_to_num(half)), finite(y + np.nan_to_num(half))]), 30
    )
    if column.better and finite(y).size:
        order, _ = ranked(y, range(len(y)), [0] * len(y), column.better)
        best = order[0]
        text = f"{cell(column.name, float(y[best]))} at {value_label(float(x[best]))}"
        below = column.better == "lower"
        mark_best(axes, float(x[best]), float(y[best]), text, below=below)
    axes.set_title(heading(column.name))
    title = f"{heading(column.name)} by {last(axis)}"
    caption = _intervals(found.half, shape) + _better(column)
    if gaps.size:
        caption += " The line has a gap, and a cross, where a value is missing or not finite."
    if thinned:
        caption += f" {number(len(found.mean))} points, averaged over neighbors."
    return Plot(f"{table.name}-{column.name}-curve", title, caption.strip(), figure)


def _thinned(values: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return the means of equal parts of many values in a row, without missing ones."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # parts of missing values alone
        return np.array([np.nanmean(part) for part in np.array_split(values, _MOST_POINTS)])


def _dots(table: Table, column: Column, rows: pd.DataFrame, shape: Shape) -> Plot | None:
    """Draw a dot per point, with its interval and its value; baselines in gray."""
    found = means(rows, [*shape.groups, *shape.axes], column.name, shape.seeds)
    known = found.mean[np.isfinite(found.mean)]
    if len(known) < _LEAST_DOTS:
        return None
    ascending = column.better != "higher"
    shown = known.sort_values(ascending=ascending, kind="stable").index[:_MOST_DOTS]
    varied = [name for name in found.points if found.points[name].nunique() > 1]
    names = [point_label(dict(found.points.loc[place, varied])) for place in shown]
    labels = short_labels(names, LONGEST)
    baseline = is_baseline(table, found.points)
    height = max(1.3, 0.62 + 0.3 * len(shown))
    figure = Figure(figsize=(plots.WIDTH, height))
    left = min(0.42, 0.03 + LETTER * max(map(len, labels)))
    values = [with_interval(column.name, float(found.mean[p]), float(found.half[p])) for p in shown]
    right = 0.03 + LETTER * max(map(len, values))
    bottom = 0.42 / height
    axes = figure.add_axes((left, bottom, max(0.2, 1 - left - right - 0.01), 1 - bottom - 0.05))
    color = plots.single_stroke().color
    for row, place in enumerate(shown):
        mean, half = float(found.mean[place]), float(found.half[place])
        tone = MUTED if baseline[place] else color
        if np.isfinite(half):
            axes.plot([mean - half, mean + half], [row, row], color=tone, linewidth=1.4, zorder=1)
        (dot,) = axes.plot([mean], [row], "o", color=tone, markersize=7, clip_on=False, zorder=3)
        tip(dot, f"{point_label(dict(found.points.loc[place]))}: {values[row]}")
        axes.text(
            1.03, row, values[row], transform=axes.get_yaxis_transform(), va="center", fontsize=10
        )
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    edges = finite([known[shown] - found.half[shown].fillna(0),
                    known[shown] + found.half[shown].fillna(0)])  # fmt: skip
    low, high = float(edges.min()), float(edges.max())
    if plots.needs_log(edges, 100):
        plots.set_log(axes.xaxis, low, high)
    else:
        if low >= 0 and low < 0.6 * high:
            low = 0.0  # a dot's distance from the left then shows its size
        margin = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
        axes.set_xlim(low - margin * (low != 0), high + margin)
        axes.xaxis.set_major_locator(MaxNLocator(4))
        plots.write_numbers(axes.xaxis)
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    caption = _intervals(found.half, shape) + _better(column)
    if baseline[shown].any():
        caption += " Gray: baselines."
    if len(known) > len(shown):
        caption += f" The {'first' if not column.better else 'best'} {len(shown)} of {len(known)}."
    by = " and ".join(last(str(name)) for name in varied or shape.axes)
    title = f"{heading(column.name)} by {by}"
    return Plot(f"{table.name}-{column.name}-dots", title, caption.strip(), figure)


def _distribution(table: Table, column: Column, values: NDArray[np.float64]) -> Plot | None:
    if values.size < _FEW_ROWS or values.min() == values.max():
        return None
    figure, axes = plots.new_axes()
    logarithmic = plots.needs_log(values, 1000)
    bins = min(40, max(8, round(np.sqrt(values.size))))
    edges = (
        np.geomspace(values.min(), values.max(), bins + 1)
        if logarithmic
        else np.linspace(values.min(), values.max(), bins + 1)
    )
    counts, edges = np.histogram(values, edges)
    bars = axes.bar(
        edges[:-1], counts, np.diff(edges), align="edge", color=plots.single_stroke().color,
        linewidth=0,
    )  # fmt: skip
    for place, bar in enumerate(bars):
        low, high = (cell(column.name, float(edge)) for edge in edges[place : place + 2])
        tip(bar, f"{low} to {high}: {number(int(counts[place]))} rows")
    if logarithmic:
        plots.set_log(axes.xaxis, float(edges[0]), float(edges[-1]))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        plots.write_numbers(axes.xaxis)
    axes.set_xlabel(heading(column.name))
    axes.set_title("rows")
    plots.write_numbers(axes.yaxis)
    median = float(np.median(values))
    axes.axvline(median, color=INK, linewidth=1.0)
    caption = f"{number(int(values.size))} rows; the line is the median, "
    caption += f"{cell(column.name, median)}.{_better(column)}"
    title = f"Distribution of {heading(column.name)}"
    return Plot(f"{table.name}-{column.name}-rows", title, caption, figure)


def _ordered(values: pd.Series) -> list[object]:
    """Return the values of an axis: numbers in their order, then other values as they come."""
    distinct = list(dict.fromkeys(values.dropna()))
    numbers = as_numbers(pd.Series(distinct, dtype=object))
    places = sorted(range(len(distinct)), key=lambda at: (np.isnan(numbers[at]), numbers[at]))
    known = [distinct[at] for at in places if not np.isnan(numbers[at])]
    return [*known, *(value for at, value in enumerate(distinct) if np.isnan(numbers[at]))]


def _intervals(half: pd.Series, shape: Shape) -> str:
    if half.notna().any():
        return "Mean over repetitions with its 95 % interval."
    return "Mean over repetitions." if shape.seeds else ""


def _better(column: Column) -> str:
    return f" {column.better.capitalize()} is better." if column.better else ""


def last(key: str) -> str:
    """Return the last part of a dotted key, for readers."""
    return heading(key.rpartition(".")[2])
