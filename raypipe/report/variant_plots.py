"""Figures of the variants of a matrix: heat map of two axes, and parallel coordinates of all."""

from __future__ import annotations

from itertools import combinations

import matplotlib as mpl
import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raypipe.report.comparison import PointMeans
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

_MOST_VALUES = 24  # of an axis of a heat map
_MOST_LABELS = 12  # of an axis of parallel coordinates
_LENGTH = 14  # characters of a value
_COLORS = "viridis"  # read alike with any color vision, and in gray


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
