"""Plots: the style, colors, axes and line labels that all share, and their encoding as files."""

from __future__ import annotations

import hashlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import quote

import matplotlib as mpl
import matplotlib.style
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.style import context
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import isotonic_regression

from raypipe.report.formatting import number, power_of_ten

# The page replaces these by its own, so that a plot follows light and dark mode.
INK, MUTED, GRID, PAPER = "#23272f", "#69707d", "#e2e5ea", "#fffffe"
WIDTH, HEIGHT = 5.2, 3.5  # inches: readable on a phone, two side by side on a desk

# Nine colors for readers with any color vision: under protanopia, deuteranopia and tritanopia
# (model of Machado, Oliveira and Fernandes 2009) the closest pair has an Oklab distance of at least
# 0.08. Every color has a contrast of at least 2.6 on white and on the page's dark ground. The line
# style is the second cue.
_COLORS = (
    *("#e28f00", "#9a2c8f", "#4e94f5", "#2856cf", "#e8265e"),
    *("#9ca2ac", "#00907e", "#7b7303", "#c063c0"),
)
#: smallest text, in points: a phone shows a figure at nine tenths of its size
_SMALLEST = 10.0
_MAX_NAME = 100  # characters of a file name
#: beginnings of the ids of artists that the page makes interactive
TIP, LINE = "tip:", "line:"
_ROOM = 0.13  # of the height of axes, for a line of text
_Line = str | tuple[int, tuple[float, ...]]
_DASHED: _Line = (0, (4, 1.5))
_DASH_DOT: _Line = (0, (6, 1.5, 1.5, 1.5))
_LINES: tuple[_Line, ...] = ("-", "-", "-", "-", "-", _DASHED, _DASHED, _DASHED, _DASH_DOT)
#: line styles of a second round of the colors
_OTHER_LINES: tuple[_Line, ...] = (_DASHED, _DASHED, _DASHED, _DASHED, _DASHED, "-", "-", "-", "-")

_STYLE = "raypipe.report.templates.plots"  # a style sheet


@dataclass(frozen=True)
class Plot:
    """A titled figure with its caption. Plots of the same ``group`` stand below its heading."""

    name: str
    title: str
    caption: str
    figure: Figure
    group: str = ""


class Stroke(NamedTuple):
    """Color and line style of one name, the same in every plot."""

    color: str
    line: _Line


def strokes(names: Sequence[str]) -> dict[str, Stroke]:
    """Return a stroke for each name by its position; the first 18 differ, the first 9 in color."""
    rounds = (_LINES, _OTHER_LINES)
    both = [Stroke(*each) for lines in rounds for each in zip(_COLORS, lines, strict=True)]
    return {name: both[place % len(both)] for place, name in enumerate(names)}


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of all plots; drawing and saving both happen inside."""
    with context(_STYLE):
        yield


def slug(text: str) -> str:
    """Return a plain file name for any text; different texts have different names."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")
    if safe and safe == text and len(safe) <= _MAX_NAME:
        return safe
    return f"{safe[:_MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".lstrip("-")


def encode(plot: Plot) -> dict[str, bytes]:
    """Return the plot as ``{"png": ..., "svg": ...}``; equal plots give equal bytes."""
    files = {}
    for text in plot.figure.findobj(Text):
        text.set_fontsize(max(float(text.get_fontsize()), _SMALLEST))
    with style(), warnings.catch_warnings():
        # a letter that the font of the PNG lacks; the page has the reader's fonts
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        mpl.rcParams["svg.hashsalt"] = plot.name
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            buffer = io.BytesIO()
            plot.figure.savefig(buffer, format=kind, dpi=150, metadata=metadata)
            files[kind] = buffer.getvalue()
    return files


def rows(tables: Mapping[str, pd.DataFrame], name: str) -> pd.DataFrame | None:
    """Return the table, or None if it is missing or empty."""
    table = tables.get(name)
    return None if table is None or table.empty else table


def finite(values: ArrayLike) -> NDArray[np.float64]:
    """Return the finite values as a flat array of floats."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return flat[np.isfinite(flat)]


def needs_log(values: ArrayLike, ratio: float = 10.0) -> bool:
    """Whether values are positive and span more than ``ratio``: a linear axis hides small ones."""
    known = finite(values)
    return bool(known.size and known.min() > 0 and float(known.max()) / float(known.min()) > ratio)


def new_axes(width: float = 0.84, height: float = 0.78) -> tuple[Figure, Axes]:
    """Return a figure and its axes; ``width`` and ``height`` are their shares of the figure."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    return figure, figure.add_axes((0.13, 0.155, width - 0.015, height - 0.02))


def single_stroke() -> Stroke:
    """Return the stroke of a line that has no other one next to it."""
    return Stroke(_COLORS[3], "-")


def write_numbers(axis: Axis) -> None:
    """Write the ticks of an axis as the page writes numbers."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: number(round(value, 12))))


def frame_x(axes: Axes, values: ArrayLike, ratio: float = 30.0) -> None:
    """Write the x axis as numbers, logarithmic if the values span more than ``ratio``."""
    known = finite(values)
    if needs_log(known, ratio):
        set_log(axes.xaxis, float(known.min()), float(known.max()))
        return
    whole = bool((known == np.round(known)).all()) and known.size > 1
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole))
    write_numbers(axes.xaxis)


def set_log(axis: Axis, low: float, high: float, ticks: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Make an axis logarithmic, ``ticks`` per decade; over many decades only powers of ten."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    ratio = high / low
    if ratio < 12:
        ticks = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    elif ratio > 2000:
        ticks = (1.0,)
    axis.set_major_locator(LogLocator(subs=ticks, numticks=7 if axis is axis.axes.xaxis else 10))
    axis.set_minor_locator(NullLocator())
    write = power_of_ten if ratio > 1e6 else number
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))


def frame_y(axes: Axes, values: ArrayLike, ratio: float = 10.0) -> None:
    """Fit the y axis to the finite values with a margin, logarithmic if they span ``ratio``."""
    known = finite(values)
    if not known.size:
        return
    low, high = float(known.min()), float(known.max())
    if needs_log(known, ratio):
        set_log(axes.yaxis, low, high)
        ends = np.log10([low, high])
        margin = 0.05 * (ends[1] - ends[0])
        # matplotlib's ticks overflow beyond, where the perplexity of a diverged model may lie
        axes.set_ylim(*10.0 ** np.clip([ends[0] - margin, ends[1] + margin], -150, 150))
    else:
        margin = (high - low) * 0.06 or max(abs(high) * 0.05, 1e-9)
        axes.set_ylim(low - margin, high + margin)
        write_numbers(axes.yaxis)


def label_lines(axes: Axes, labels: Sequence[tuple[float, str, Stroke]]) -> None:
    """Name lines right of the axes at their last y value, moved apart where they would overlap.

    Call it after the last change of the axes' limits.
    """
    figure = axes.get_figure(root=True)
    if figure is None or not labels:
        return
    height = axes.get_position().height * figure.get_size_inches()[1] * 72  # points
    ends = axes.transData.transform([(1.0, y) for y, _, _ in labels])
    ends = np.clip(axes.transAxes.inverted().transform(ends)[:, 1], 0, 1)
    places = spread(ends, gap=min(13.5 / height, 1 / max(1, len(labels) - 1)))
    for end, place, (_, text, stroke) in zip(ends, places, labels, strict=True):
        axes.plot(
            [1.0, 1.03, 1.07, 1.085],
            [end, end, place, place],
            transform=axes.transAxes,
            color=stroke.color,
            linewidth=1.0,
            clip_on=False,
            label="_leader",
        )
        axes.text(1.1, place, text, transform=axes.transAxes, va="center", fontsize=10)


def draw_legend(figure: Figure, handles: Sequence[Line2D]) -> None:
    """Draw a legend of one row above the axes."""
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.1, 1.0), ncols=len(handles),
        fontsize=10, handlelength=1.4, handletextpad=0.45, columnspacing=1.1, borderaxespad=0.3,
    )  # fmt: skip


def spread(positions: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Return positions in [0, 1] at least ``gap`` apart, in the same order.

    They are the closest to the given ones by least squares: an isotonic regression of the positions
    minus their offsets.
    """
    order = np.argsort(positions, kind="stable")
    offsets = gap * np.arange(len(positions))
    level = isotonic_regression(positions[order] - offsets).x
    placed = np.empty_like(positions)
    placed[order] = np.clip(level, 0, max(0.0, 1 - offsets[-1])) + offsets
    return placed


def tip(artist: Artist, text: str) -> None:
    """Show a text where the pointer is on an artist, in the page."""
    artist.set_gid(TIP + quote(text, safe=""))


def toggle(artist: Artist, name: str) -> None:
    """Let the reader of the page hide an artist, with all others of this name in the figure."""
    artist.set_gid(LINE + quote(name, safe=""))


def mark_best(axes: Axes, x: float, y: float, text: str, *, below: bool) -> None:
    """Mark the best point of a curve with a ring, and write a text below or above it.

    It is on the other side where it has no room.
    """
    axes.plot(
        [x], [y], "o", markersize=9, markerfacecolor="none", markeredgecolor=INK,
        markeredgewidth=1.4, clip_on=False, zorder=5, label="_best",
    )  # fmt: skip
    if not text:
        return
    across, up = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
    if not _ROOM < up < 1 - _ROOM:
        below = up > 0.5
    axes.annotate(
        text, (x, y), (0, -8 if below else 8), textcoords="offset points",
        ha="left" if across < 0.3 else "right" if across > 0.7 else "center",
        va="top" if below else "bottom", zorder=6,
        bbox={"facecolor": PAPER, "alpha": 0.75, "linewidth": 0, "pad": 0.8},
    )  # fmt: skip
