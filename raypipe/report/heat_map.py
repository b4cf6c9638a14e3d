"""A heat map of numbers with their values in its cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from raypipe.report.formatting import cell, number
from raypipe.report.marks import tip
from raypipe.report.plots import HEIGHT, WIDTH, finite

#: width of a character, in units of a figure
LETTER = 0.0152
_LONGEST = 22  # characters of a label
_COLORS = "viridis"  # read alike with any color vision, and in gray


def heat_figure(
    grid: NDArray[np.float64], down: Sequence[str], across: Sequence[str], most: int = 100
) -> Figure:
    """Return a heat map of ``[R, C]`` numbers, written into the cells if there are few."""
    rows, columns = grid.shape
    left = min(0.36, 0.05 + LETTER * max(len(short(text)) for text in down) + 0.05)
    slanted = columns * max(len(short(text)) for text in across) * LETTER > 0.9 - left
    height = max(HEIGHT, min(0.75 + 0.36 * rows + (0.8 if slanted else 0), 7.0))
    figure = Figure(figsize=(WIDTH, height))
    bottom = (1.3 if slanted else 0.55) / height
    axes = figure.add_axes((left, bottom, 0.985 - left, 1 - bottom - 0.08 / height))
    known = finite(grid)
    axes.imshow(np.ma.masked_invalid(grid), cmap=_COLORS, aspect="auto")
    turned: dict[str, Any] = (
        {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    )
    axes.set_xticks(range(columns), [short(text) for text in across], **turned)
    axes.set_yticks(range(rows), [short(text) for text in down])
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    longest = max((len(number(float(value))) for value in known), default=1)
    fits = grid.size <= most and longest * LETTER * 0.95 * columns <= 0.985 - left
    for (row, place), value in np.ndenumerate(grid):
        if not np.isfinite(value):
            continue
        share = (value - low) / (high - low or 1.0)
        text = number(float(value))
        about = f"{down[row]}, {across[place]}: {text}"
        mark = axes.text(
            place, row, text if fits else " ", ha="center", va="center", fontsize=10,
            color="#000000" if share > 0.6 else "#ffffff",
        )  # fmt: skip
        tip(mark, about)
    return figure


def grid_range(column: str, grid: NDArray[np.float64]) -> str:
    """Return what the colors of a heat map mean."""
    known = finite(grid)
    if not known.size:
        return ""
    low, high = float(known.min()), float(known.max())
    return f"Dark is {cell(column, low)}, bright {cell(column, high)}."


def short(text: str) -> str:
    """Return a label cut to what a figure has room for."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
