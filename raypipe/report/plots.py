"""What every figure shares: the style, the colours, labels at the lines, saving."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

from raypipe.report.formatting import number, power_of_ten

# The page replaces these by its own, so that a figure follows light and dark mode.
INK, MUTED, GRID, PAPER = "#23272f", "#69707d", "#e2e5ea", "#fffffe"
WIDTH, HEIGHT = 5.2, 3.5  # inches: readable on a phone, two side by side on a desk

# Nine colours chosen so that the closest pair stays apart under protanopia, deuteranopia and
# tritanopia (Oklab distance >= 0.08 with the model of Machado, Oliveira and Fernandes 2009) and
# every one keeps a contrast of 2.6 on white and on the page's dark ground. The line style is the
# second cue.
_COLOURS = (
    "#e28f00",
    "#9a2c8f",
    "#4e94f5",
    "#2856cf",
    "#e8265e",
    "#9ca2ac",
    "#00907e",
    "#7b7303",
    "#c063c0",
)
_LONGEST = 100  # of file names
_DASHED, _DASH_DOT = (0, (4, 1.5)), (0, (6, 1.5, 1.5, 1.5))
_LINES = ("-", "-", "-", "-", "-", _DASHED, _DASHED, _DASHED, _DASH_DOT)

_RC: dict[Any, Any] = {
    "font.family": ["DejaVu Sans"],
    "font.size": 8.5,
    "text.color": INK,
    "figure.facecolor": PAPER,
    "figure.dpi": 100,
    "savefig.facecolor": PAPER,
    "axes.facecolor": "none",
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.7,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 8.5,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "ytick.major.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.7,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "text.parse_math": False,  # a dollar sign in a name is a dollar sign
}


@dataclass(frozen=True)
class Figure:
    """A drawn figure; ``group`` is the heading it stands under in the report."""

    name: str
    title: str
    caption: str
    figure: Canvas
    group: str = ""


class Stroke(NamedTuple):
    """How the lines of one name are drawn in every figure."""

    colour: str
    line: str | tuple[int, tuple[float, ...]]


def strokes(names: Sequence[str]) -> dict[str, Stroke]:
    """One stroke for each name, fixed by its place; the tenth name shares the first's colour."""
    count = len(_COLOURS)
    return {name: Stroke(_COLOURS[i % count], _LINES[i % count]) for i, name in enumerate(names)}


@contextmanager
def style() -> Iterator[None]:
    """The look of all figures; building and saving both happen inside it."""
    with mpl.rc_context({}):
        mpl.rcParams.update(_RC)
        yield


def slug(text: str) -> str:
    """A file name from any text; texts that differ give names that differ."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")
    if safe and safe == text and len(safe) <= _LONGEST:
        return safe
    return f"{safe[:_LONGEST]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".lstrip("-")


def encode(figure: Figure) -> dict[str, bytes]:
    """The figure as ``{"png": ..., "svg": ...}``; equal figures give equal bytes."""
    files = {}
    with style():
        mpl.rcParams["svg.hashsalt"] = figure.name
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            figure.figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
            files[kind] = buffer.getvalue()
    return files


def rows(
    tables: Mapping[str, pd.DataFrame], name: str, columns: Sequence[str]
) -> pd.DataFrame | None:
    """The table, or None where it is missing or empty.

    Raises ValueError when the table has rows but lacks one of the columns.
    """
    table = tables.get(name)
    if table is None or table.empty:
        return None
    if lacking := [column for column in columns if column not in table.columns]:
        raise ValueError(
            f"table {name!r} has no column {', '.join(map(repr, lacking))}; "
            f"it has {', '.join(map(repr, table.columns))}"
        )
    return table


def finite(values: ArrayLike) -> NDArray[np.float64]:
    """The finite values, flat, as floats."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return flat[np.isfinite(flat)]


def needs_log(values: ArrayLike, ratio: float = 10.0) -> bool:
    """Whether positive values span more than ``ratio``, so that a linear axis hides the small."""
    known = finite(values)
    return bool(known.size and known.min() > 0 and known.max() / known.min() > ratio)


def set_log(axis: Axis, low: float, high: float, ticks: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Logarithmic ticks written out, ``ticks`` a decade; powers of ten only over many decades."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    ratio = high / low
    if ratio < 12:
        ticks = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    elif ratio > 2000:
        ticks = (1.0,)
    axis.set_major_locator(LogLocator(subs=ticks, numticks=7 if axis is axis.axes.xaxis else 10))
    axis.set_minor_locator(NullLocator())
    written = power_of_ten if ratio > 1e6 else number
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(value)))


def frame_y(axes: Axes, values: ArrayLike, ratio: float = 10.0) -> None:
    """Fit the y axis to the finite values with a little air, logarithmic where they demand it."""
    known = finite(values)
    if not known.size:
        return
    low, high = float(known.min()), float(known.max())
    if needs_log(known, ratio):
        set_log(axes.yaxis, low, high)
        margin = (high / low) ** 0.05
        axes.set_ylim(low / margin, high * margin)
    else:
        margin = (high - low) * 0.06 or max(abs(high) * 0.05, 1e-9)
        axes.set_ylim(low - margin, high + margin)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def label_lines(axes: Axes, labels: Sequence[tuple[float, str, Stroke]]) -> None:
    """Name lines at the right edge, at their last y, moved apart where they would collide.

    Call it when the limits of the axes are final.
    """
    canvas = axes.get_figure(root=True)
    if canvas is None or not labels:
        return
    height = axes.get_position().height * canvas.get_size_inches()[1] * 72  # points
    ends = axes.transData.transform([(1.0, y) for y, _, _ in labels])
    ends = np.clip(axes.transAxes.inverted().transform(ends)[:, 1], 0, 1)
    places = spread(ends, gap=min(11.5 / height, 1 / max(1, len(labels) - 1)))
    for end, place, (_, text, stroke) in zip(ends, places, labels, strict=True):
        axes.plot(
            [1.0, 1.03, 1.07, 1.085],
            [end, end, place, place],
            transform=axes.transAxes,
            color=stroke.colour,
            linewidth=1.0,
            clip_on=False,
            label="_leader",
        )
        axes.text(1.1, place, text, transform=axes.transAxes, va="center", fontsize=8)


def spread(positions: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Positions in [0, 1], at least ``gap`` apart, in the same order and close to where they were.

    The closest in the sense of least squares: isotonic regression on the positions less their
    offsets.
    """
    order = np.argsort(positions, kind="stable")
    offsets = gap * np.arange(len(positions))
    level = isotonic_regression(positions[order] - offsets).x
    placed = np.empty_like(positions)
    placed[order] = np.clip(level, 0, max(0.0, 1 - offsets[-1])) + offsets
    return placed
