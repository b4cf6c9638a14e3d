"""Marks of plots: values at the pointer, lines that the reader hides, the best point."""

from __future__ import annotations

from urllib.parse import quote

from matplotlib.artist import Artist
from matplotlib.axes import Axes

from raypipe.report.plots import INK, PAPER

#: beginnings of the ids of artists that the page makes interactive
TIP, LINE = "tip:", "line:"
_ROOM = 0.13  # of the height of axes, for a line of text


def tip(artist: Artist, text: str) -> None:
    """Show a text where the pointer is on an artist, in the page."""
    artist.set_gid(TIP + quote(text, safe=""))


def toggle(artist: Artist, name: str) -> None:
    """Let the reader of the page hide an artist, with all others of this name in the figure."""
    artist.set_gid(LINE + quote(name, safe=""))


def mark_best(axes: Axes, x: float, y: float, text: str, *, below: bool) -> None:
    """Mark the best point of a curve with a ring, and write a text below or above it.

    The limits grow where the text has no room.
    """
    axes.plot(
        [x], [y], "o", markersize=9, markerfacecolor="none", markeredgecolor=INK,
        markeredgewidth=1.4, clip_on=False, zorder=5, label="_best",
    )  # fmt: skip
    if not text:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    across, up = to_axes.transform((x, y))
    if below and up < _ROOM:
        axes.set_ylim(bottom=to_axes.inverted().transform((0, up - _ROOM))[1])
    elif not below and up > 1 - _ROOM:
        axes.set_ylim(top=to_axes.inverted().transform((0, up + _ROOM))[1])
    axes.annotate(
        text, (x, y), (0, -8 if below else 8), textcoords="offset points",
        ha="left" if across < 0.3 else "right" if across > 0.7 else "center",
        va="top" if below else "bottom", zorder=6,
        bbox={"facecolor": PAPER, "alpha": 0.75, "linewidth": 0, "pad": 0.8},
    )  # fmt: skip
