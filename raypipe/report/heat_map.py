"""A heat map of numbers with their values in its cells."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.colors import FuncNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from raypipe.report.formatting import aligned, cell, number, short_labels
from raypipe.report.marks import tip
from raypipe.report.plots import HEIGHT, WIDTH, finite

#: width of a character, in units of a figure
LETTER = 0.0152
#: characters of a label
LONGEST = 22
_LEAST_RANKS = 4  # different numbers, for ranks to say more than the numbers
_COLORS = "viridis"  # read alike with any color vision, and in gray


def heat_figure(
    grid: NDArray[np.float64],
    down: Sequence[str],
    across: Sequence[str],
    better: str = "",
    most: int = 100,
) -> Figure:
    """Return a heat map of ``[R, C]`` numbers, written into the cells if there are few.

    The best cell has a frame if ``better`` is lower or higher. Colors follow the ranks of numbers
    that are crowded at one end, see :func:`grid_range`.
    """
    rows, columns = grid.shape
    below, beside = short_labels(across, LONGEST), short_labels(down, LONGEST)
    left = min(0.36, 0.05 + LETTER * max(map(len, beside)) + 0.05)
    slanted = columns * max(map(len, below)) * LETTER > 0.9 - left
    height = max(HEIGHT, min(0.75 + 0.36 * rows + (0.8 if slanted else 0), 7.0))
    figure = Figure(figsize=(WIDTH, height))
    bottom = (1.3 if slanted else 0.55) / height
    axes = figure.add_axes((left, bottom, 0.985 - left, 1 - bottom - 0.08 / height))
    known = finite(grid)
    norm = _norm(known)
    axes.imshow(np.ma.masked_invalid(grid), cmap=_COLORS, aspect="auto", norm=norm)
    turned: dict[str, Any] = (
        {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    )
    axes.set_xticks(range(columns), below, **turned)
    axes.set_yticks(range(rows), beside)
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    texts = aligned([float(value) for value in grid.flat])
    longest = max(map(len, texts), default=1)
    fits = grid.size <= most and longest * LETTER * 0.95 * columns <= 0.985 - left
    best = _best(known, better)
    for ((row, place), value), text in zip(np.ndenumerate(grid), texts, strict=True):
        if not np.isfinite(value):
            continue
        ink = "#000000" if float(norm(value)) > 0.6 else "#ffffff"
        mark = axes.text(
            place, row, text if fits else " ", ha="center", va="center", fontsize=10, color=ink,
            fontweight="bold" if value == best else "normal",
        )  # fmt: skip
        tip(mark, f"{down[row]}, {across[place]}: {text}")
        if value == best:
            corner = (place - 0.46, row - 0.44)
            axes.add_patch(Rectangle(corner, 0.92, 0.88, fill=False, edgecolor=ink, linewidth=2))
    return figure


def _best(known: NDArray[np.float64], better: str) -> float | None:
    """Return the best of the numbers; None if it is not known what is better, or all are alike."""
    if not better or not known.size or known.min() == known.max():
        return None
    return float(known.min() if better == "lower" else known.max())


def _is_crowded(known: NDArray[np.float64]) -> bool:
    """Whether half of the numbers or more lie within a quarter of their range, at one end of it."""
    low, high = float(known.min()), float(known.max())
    share = (float(np.median(known)) - low) / (high - low or 1.0)
    return np.unique(known).size >= _LEAST_RANKS and not 0.25 <= share <= 0.75


def _norm(known: NDArray[np.float64]) -> Normalize:
    """Return the color scale: the numbers, or their ranks where most of them are crowded."""
    if not known.size or not _is_crowded(known):
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        return Normalize(low, high if high > low else low + 1.0)
    values = np.unique(known)
    ranks = np.linspace(0.0, 1.0, values.size)
    scale = (partial(np.interp, xp=values, fp=ranks), partial(np.interp, xp=ranks, fp=values))
    return FuncNorm(scale, float(values[0]), float(values[-1]))


def grid_range(column: str, grid: NDArray[np.float64], better: str = "") -> str:
    """Return what the colors of a heat map mean, and its frame."""
    known = finite(grid)
    if not known.size:
        return ""
    ends = [float(known.min()), float(known.max())]
    low, high = (cell(column, value) for value in ends)
    if low == number(ends[0]):
        low, high = aligned(ends)
    text = f"Dark is {low}, bright {high}"
    text += "; colors between them follow the ranks." if _is_crowded(known) else "."
    return text + (" A frame marks the best." if _best(known, better) is not None else "")
