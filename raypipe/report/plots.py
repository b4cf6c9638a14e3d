"""Plots: style, colors and axes that all share, lines, heat map, dots and front, files."""

from __future__ import annotations

import hashlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from textwrap import TextWrapper
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from raypipe.report.formatting import (
    cell,
    heading,
    number,
    scientific,
    short_labels,
    with_interval,
)
from raypipe.stats import on_pareto_front, ranked

# The functions that draw import matplotlib: it takes a second, and many pages have no figure.
if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# The page replaces these by its own, so that a plot follows light and dark mode.
INK, MUTED, GRID, PAPER, BLUE = "#23272f", "#69707d", "#e2e5ea", "#fffffe", "#2856cf"
WIDTH, HEIGHT = 5.2, 3.5  # inches: readable on a phone, two side by side on a desk

# Nine colors for readers with any color vision: under protanopia, deuteranopia and tritanopia
# (model of Machado, Oliveira and Fernandes 2009) the closest pair has an Oklab distance of at least
# 0.08. Every color has a contrast of at least 2.6 on white and on the page's dark ground. The line
# style is the second cue.
_COLORS = (
    *("#e28f00", "#9a2c8f", "#4e94f5", BLUE, "#e8265e"),
    *("#9ca2ac", "#00907e", "#7b7303", "#c063c0"),
)
#: smallest text, in points: a phone shows a figure at nine tenths of its size
_SMALLEST = 10.0
_MAX_NAME = 100  # characters of a file name
#: beginning of the ids of artists that show a text where the pointer is
TIP = "tip:"
#: lines that have a separate color and name
MOST_LINES = 8
#: rows of a chart of dots
MOST_DOTS = 24
_LONGEST = 22  # characters of a label
_LEGEND_LINES = 18  # as many as fit next to the axes
_LABEL_WIDTH, _LABEL_LINES = 17, 3  # characters and lines of a name right of the axes
_LEAST_GAP = 1 / 5  # of an axis, between values that have a tick each
_MOST_WRITTEN = 100  # cells of a heat map
_WIDEST = 60  # characters of a row of a heat map
_MOST_TIPS = 200  # points with a value to show
_MOST_WORDS = 6  # at an upright axis
MOST_POINTS = 1000  # of a line: more than a figure has pixels


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
    line: str


@dataclass(frozen=True)
class Line:
    """A line of a plot: ``y`` over rising ``x``, with a gap where a value is not finite.

    Args:
        name: for its label.
        x: ``[n]``
        y: ``[n]``
        half: ``[n]``, half of an interval around ``y``, NaN where there is none.
        raw: ``[n]``, unsmoothed values, drawn thin.
        points: ``[m, 2]``, single measurements, drawn as small dots.

    """

    name: str
    x: NDArray[np.floating[Any]]
    y: NDArray[np.floating[Any]]
    half: NDArray[np.floating[Any]] | None = None
    raw: NDArray[np.floating[Any]] | None = None
    points: NDArray[np.floating[Any]] | None = None

    @property
    def halves(self) -> NDArray[np.floating[Any]]:
        """Half of the interval around each point, 0 where there is none."""
        return np.zeros(len(self.y)) if self.half is None else np.nan_to_num(self.half)


#: the strokes of a line that has no other one next to it, and of one that is not named
_SINGLE, _OTHER = Stroke(_COLORS[3], "-"), Stroke(MUTED, "-")


def strokes(names: Sequence[str]) -> dict[str, Stroke]:
    """Return a stroke for each name by its position; the first 18 differ, the first 9 in color."""
    found = {}
    for place, name in enumerate(names):
        turn, color = divmod(place, len(_COLORS))
        found[name] = Stroke(_COLORS[color], "--" if (color > 4) != (turn % 2 == 1) else "-")
    return found


@contextmanager
def style() -> Iterator[None]:
    """Apply the style of all plots; drawing and saving both happen inside."""
    from matplotlib.style import context

    with context("raypipe.report.templates.plots"):
        yield


def slug(text: str) -> str:
    """Return a plain file name for any text; different texts have different names."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", text).strip("-.")
    if safe and safe == text and len(safe) <= _MAX_NAME:
        return safe
    return f"{safe[:_MAX_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:6]}".lstrip("-")


def encode(plot: Plot, kinds: Sequence[str] = ("png", "svg")) -> dict[str, bytes]:
    """Return the plot as ``{"png": ..., "svg": ...}``; equal plots give equal bytes."""
    import matplotlib as mpl
    from matplotlib.text import Text

    files = {}
    for text in plot.figure.findobj(Text):
        text.set_fontsize(max(float(text.get_fontsize()), _SMALLEST))
    with style(), warnings.catch_warnings():
        # a letter that the font of the PNG lacks; the page has the reader's fonts
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        mpl.rcParams["svg.hashsalt"] = plot.name
        for kind in kinds:
            buffer = io.BytesIO()
            metadata = {"Software" if kind == "png" else "Date": None}
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


def _new_axes(width: float = 0.84, height: float = 0.0) -> tuple[Figure, Axes]:
    """Return a figure and its axes, which have this share of its width.

    A figure of another height gives its axes the room that labels and texts leave.
    """
    from matplotlib.figure import Figure

    if height:
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        return figure, figure.add_subplot()
    figure = Figure(figsize=(WIDTH, HEIGHT))
    return figure, figure.add_axes((0.13, 0.155, width - 0.015, 0.76))


def frame_x(axes: Axes, values: ArrayLike, ratio: float = 30.0, column: str = "") -> None:
    """Write the x axis for a column, logarithmic if the values span more than ``ratio``."""
    from matplotlib.ticker import MaxNLocator

    known = finite(values)
    if needs_log(known, ratio):
        set_log(axes.xaxis, float(known.min()), float(known.max()))
        return
    whole = bool((known == np.round(known)).all()) and known.size > 1
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole))
    axes.xaxis.set_major_formatter(lambda value, _: cell(column, round(value, 12)))


def frame_y(axes: Axes, values: ArrayLike, ratio: float = 10.0, column: str = "") -> None:
    """Fit the y axis to the finite values of a column, logarithmic if they span ``ratio``."""
    from matplotlib.ticker import MultipleLocator

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
        if column.endswith("_bytes") and high > low:
            step = 2.0 ** math.ceil(math.log2((high - low) / 5))
            axes.yaxis.set_major_locator(MultipleLocator(step))
        axes.yaxis.set_major_formatter(lambda value, _: cell(column, round(value, 12)))


def set_log(axis: Axis, low: float, high: float, ticks: Sequence[float] = (1.0, 2.0, 5.0)) -> None:
    """Make an axis logarithmic, ``ticks`` per decade; over many decades only powers of ten."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    ratio = high / low
    if ratio < 12:
        ticks = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)
    elif ratio > (50 if axis is axis.axes.xaxis else 2000):  # labels are wider than high
        ticks = (1.0,)
    axis.set_major_locator(LogLocator(subs=ticks, numticks=7 if axis is axis.axes.xaxis else 10))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda v, _: scientific(v) if ratio > 1e6 else number(v))


def label_lines(axes: Axes, labels: Sequence[tuple[float, str, Stroke]], title: str = "") -> None:
    """Name lines right of the axes, in the order of their last y values."""
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], color=stroke.color, linestyle=stroke.line, label=text)  # type: ignore[arg-type]
        for _, text, stroke in sorted(labels, key=lambda label: -label[0])
    ]
    axes.legend(
        handles=handles, loc="center left", bbox_to_anchor=(1.02, 0.5), handlelength=0.9,
        handletextpad=0.5, borderaxespad=0.0, borderpad=0.0, title=title or None,
    )  # fmt: skip


def tip(artist: Artist, text: str) -> None:
    """Show a text where the pointer is on an artist, in the page."""
    artist.set_gid(TIP + quote(text, safe=""))


def mark_best(axes: Axes, x: float, y: float, text: str) -> None:
    """Mark the best point of a curve with a ring, and write a text on the side that has room."""
    axes.plot(
        [x], [y], "o", markersize=9, markerfacecolor="none", markeredgecolor=INK,
        markeredgewidth=1.4, clip_on=False, zorder=5, label="_best",
    )  # fmt: skip
    across, up = axes.transAxes.inverted().transform(axes.transData.transform((x, y)))
    axes.annotate(
        text, (x, y), (0, 8 if up < 0.5 else -8), textcoords="offset points",
        ha="left" if across < 0.3 else "right" if across > 0.7 else "center",
        va="bottom" if up < 0.5 else "top", zorder=6,
        bbox={"facecolor": PAPER, "alpha": 0.75, "linewidth": 0, "pad": 0.8},
    )  # fmt: skip


def thinned(values: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return the means of equal parts of more values in a row than a plot shows."""
    if len(values) <= MOST_POINTS:
        return values
    parts = np.array_split(values, MOST_POINTS)
    return np.array([finite(part).mean() if finite(part).size else np.nan for part in parts])


@style()
def lines(
    drawn: Sequence[Line],
    xlabel: str,
    column: str,
    *,
    better: str = "",
    from_0: bool = True,
) -> Figure:
    """Draw lines of a column, the best point of each with a ring if ``better`` is given.

    Few points are dots that show their values at the pointer. More lines than can be distinguished
    share one color, and the one that ends best is named.

    Args:
        drawn: with finite values each.
        xlabel: name of the x axis.
        column: whose values these are, for their name and unit.
        better: which values are better.
        from_0: whether the x axis is linear and begins at 0.

    """
    alone, few = len(drawn) == 1, len(drawn) <= MOST_LINES
    ends = [float(finite(line.y)[-1]) for line in drawn]
    first = ends.index(max(ends) if better == "higher" else min(ends))
    figure, axes = _new_axes(0.84 if alone else 0.56)
    colors = [_SINGLE if alone or place == first else _OTHER for place in range(len(drawn))]
    if few and not alone:
        colors = list(strokes([str(place) for place in range(len(drawn))]).values())
    for place, (line, stroke) in enumerate(zip(drawn, colors, strict=True)):
        if few:
            _draw_measurements(axes, line, stroke)
        _draw(axes, line, stroke, is_named=few or place == first)
        if few and line.raw is None and len(line.x) <= _MOST_TIPS:
            _draw_tips(axes, line, stroke, xlabel, column)
    across = np.concatenate([line.x for line in drawn])
    frame_x(axes, across, np.inf if from_0 else 30.0)
    across = np.unique(across)
    scaled = np.log(across) if axes.get_xscale() == "log" else across
    if from_0:
        axes.set_xlim(0, max(1.0, float(across[-1])))
    elif np.diff(scaled).min(initial=np.inf) >= _LEAST_GAP * np.ptp(scaled):
        axes.set_xticks(across, [number(float(each)) for each in across])
    # what is better if higher, such as an accuracy, is read by its differences
    frame_y(axes, _framed(drawn, better), math.inf if better == "higher" else 30.0, column)
    shown = range(len(drawn)) if few else [first]
    if better:
        _ring_best(axes, [drawn[place] for place in shown], xlabel, column, better)
    if not alone:
        labels, keys = _labels([line.name for line in drawn], shown)
        label_lines(axes, [(ends[place], labels[place], colors[place]) for place in shown], keys)
    axes.set_xlabel(xlabel)
    title = heading(column)
    axes.set_title(title + (" (logarithmic)" if axes.get_yscale() == "log" else ""))
    return figure


def _draw_measurements(axes: Axes, line: Line, stroke: Stroke) -> None:
    """Draw the raw values behind a smoothed line, and the measurements behind a mean."""
    if line.raw is not None:
        axes.plot(line.x, line.raw, color=stroke.color, linewidth=0.6, alpha=0.35)
    if line.points is not None:
        axes.plot(*line.points.T, "o", color=stroke.color, markersize=2.6, alpha=0.45)


def _draw(axes: Axes, line: Line, stroke: Stroke, *, is_named: bool) -> None:
    """Draw a line and its interval, with a cross at the floor in each of its gaps."""
    width, alpha, above = (1.7, 1.0, 3) if is_named else (0.9, 0.5, 2)
    axes.plot(
        line.x, line.y, color=stroke.color, linestyle=stroke.line, label=line.name,
        linewidth=width, alpha=alpha, zorder=above,
    )  # fmt: skip
    if line.halves.any():
        low, high = line.y - line.halves, line.y + line.halves
        axes.fill_between(line.x, low, high, color=stroke.color, alpha=0.18, linewidth=0)
    gaps, floor = line.x[~np.isfinite(line.y)], axes.get_xaxis_transform()
    if gaps.size:
        axes.plot(gaps, 0 * gaps, "x", color=MUTED, transform=floor, clip_on=False)


def _draw_tips(axes: Axes, line: Line, stroke: Stroke, xlabel: str, column: str) -> None:
    """Draw a dot at each point of a line; at the pointer it shows its value."""
    for x, y, half in zip(line.x, line.y, line.halves, strict=True):
        (dot,) = axes.plot([x], [y], "o", color=stroke.color, markersize=4)
        text = with_interval(column, float(y), float(half) or np.nan)
        tip(dot, f"{xlabel} {number(float(x))}: {text}")


def _ring_best(axes: Axes, drawn: Sequence[Line], xlabel: str, column: str, better: str) -> None:
    """Mark the best point of each line, and write the value at the best of them."""
    rings = []
    for line in drawn:
        (at, *_), _ = ranked(line.y, range(len(line.y)), [0] * len(line.y), better)
        rings.append((float(line.x[at]), float(line.y[at])))
    top = min(rings, key=lambda point: point[1] if better == "lower" else -point[1])
    for point in rings:
        text = f"{cell(column, point[1])} at {xlabel} {number(point[0])}"
        mark_best(axes, *point, text if point == top else "")


def _labels(names: Sequence[str], shown: Iterable[int]) -> tuple[list[str], str]:
    """Return the labels of lines, and the title of their legend.

    The title has the keys that all names share, if these would be taller than the figure.
    """
    labels = _wrapped(names)
    keys = {", ".join(re.findall(r"([^,=\s]+)=", name)) for name in names}
    if len(keys) > 1 or sum(labels[place].count("\n") + 1 for place in shown) <= _LEGEND_LINES:
        return labels, ""
    return _wrapped([re.sub(r"[^,=\s]+=", "", name) for name in names]), _wrapped([*keys])[0]


def _wrapped(names: Sequence[str]) -> list[str]:
    """Shorten names and wrap them to the room next to the axes; a line may end after "="."""
    wrapper = TextWrapper(_LABEL_WIDTH, break_on_hyphens=False)
    short = short_labels(names, _LABEL_WIDTH * _LABEL_LINES)
    return [wrapper.fill(text.replace("=", "= ")).replace("= ", "=") for text in short]


def _framed(drawn: Sequence[Line], better: str) -> NDArray[np.float64]:
    """Return the values that the y axis has to show.

    The outermost hundredth of many values would flatten the rest, and so would the worst of many
    lines.
    """
    sign, values = -1 if better == "higher" else 1, []
    for line in drawn:
        own = finite(np.concatenate([line.y - line.halves, line.y + line.halves]))
        low, high = np.quantile(own, [0.005, 0.995]) if own.size > 200 else (own.min(), own.max())
        values.append(own[(own >= low) & (own <= high)])
    worst = [float((sign * own).max()) for own in values]
    limit = np.quantile(worst, 0.9, method="lower") if len(drawn) > MOST_LINES else max(worst)
    return np.concatenate([own[sign * own <= limit] for own in values])


@style()
def heat_map(grid: pd.DataFrame, column: str, better: str, words: pd.DataFrame) -> Figure:
    """Return a heat map of ``[R, C]`` numbers of a column, written into the cells if there are few.

    The best cell has a frame if ``better`` is lower or higher. ``words`` ``[R, C]`` say why a cell
    has no number.
    """
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import FuncFormatter

    values = grid.to_numpy(np.float64)
    down, across = (short_labels(list(map(str, names)), _LONGEST)
                    for names in (grid.index, grid.columns))  # fmt: skip
    figure, axes = _new_axes(height=max(HEIGHT, min(1.2 + 0.36 * len(down), 7.0)))
    # read alike with any color vision, and in gray
    image = axes.imshow(np.ma.masked_invalid(values), cmap="viridis", aspect="auto")
    figure.colorbar(image, format=FuncFormatter(lambda value, _: cell(column, value)))
    is_slanted = len(across) * max(map(len, across)) > _WIDEST
    axes.set_xticks(range(len(across)), across, rotation=45 if is_slanted else 0)
    axes.set_yticks(range(len(down)), down)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    texts = [number(float(value)) for value in values.flat]
    fits = len(texts) <= _MOST_WRITTEN and len(across) * max(map(len, texts)) <= _WIDEST
    known, shades = finite(values), np.asarray(image.norm(values))
    best = known.min(initial=np.inf) if better == "lower" else known.max(initial=-np.inf)
    for ((row, place), value), text in zip(np.ndenumerate(values), texts, strict=True):
        is_number = bool(np.isfinite(value))
        text = text if is_number else str(words.iloc[row, place])
        ink = ("#000000" if shades[row, place] > 0.6 else "#ffffff") if is_number else INK
        is_best = bool(better) and value == best and np.ptp(known) > 0
        mark = axes.text(
            place, row, text if fits else " ", ha="center", va="center", color=ink,
            fontweight="bold" if is_best else "normal",
        )  # fmt: skip
        tip(mark, f"{down[row]}, {across[place]}: {text}")
        if is_best:
            corner = (place - 0.46, row - 0.44)
            axes.add_patch(Rectangle(corner, 0.92, 0.88, fill=False, edgecolor=ink, linewidth=2))
    return figure


@style()
def dots(
    names: Sequence[str],
    mean: NDArray[np.floating[Any]],
    half: NDArray[np.floating[Any]],
    column: str,
    gray: Sequence[bool],
) -> Figure:
    """Draw a row for each point: a dot with its interval and its value; some of them in gray."""
    values = [with_interval(column, float(m), float(h)) for m, h in zip(mean, half, strict=True)]
    figure, axes = _new_axes(height=max(1.3, 0.62 + 0.3 * len(names)))
    for row, (name, text) in enumerate(zip(names, values, strict=True)):
        color = MUTED if gray[row] else _SINGLE.color
        (dot, *_) = axes.errorbar(
            mean[row], row, xerr=np.nan_to_num(half[row]), fmt="o", color=color, markersize=7,
            elinewidth=1.4,
        )  # fmt: skip
        tip(dot, f"{name}: {text}")
        axes.text(1.03, row, text, transform=axes.get_yaxis_transform(), va="center")
    axes.set_yticks(range(len(names)), short_labels(names, _LONGEST))
    axes.set_ylim(len(names) - 0.5, -0.5)
    ends = [float((mean - np.nan_to_num(half)).min()), float((mean + np.nan_to_num(half)).max())]
    if 0 <= ends[0] < 0.6 * ends[1] and not needs_log(ends, 100):
        axes.set_xlim(left=0)  # a dot's distance from the left then shows its size
    frame_x(axes, ends, 100)
    if axes.get_xscale() == "log":
        axes.set_xlabel("logarithmic")
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    return figure


@style()
def scatter(
    points: pd.DataFrame, better: Sequence[str], tips: Sequence[str], chosen: int, mark: str
) -> Figure:
    """Draw points by two columns, one of them with a ring.

    If it is known of both which values are better, steps join the points that no other one beats.

    Args:
        points: ``[n, 2]``: finite numbers, the first column may have texts.
        better: which values of each column are better, or empty.
        tips: the name of each point.
        chosen: the place of the point with the ring, or -1.
        mark: the text at the ring.

    """
    names, across = [str(name) for name in points], points.iloc[:, 0]
    words = [] if pd.api.types.is_numeric_dtype(across) else sorted(across.unique())
    first = pd.Categorical(across, words).codes if words else across
    values = np.column_stack([first, points.iloc[:, 1]]).astype(float)
    figure, axes = _new_axes()
    if all(better):
        signs = [1 if each == "lower" else -1 for each in better]
        best = np.unique(values[on_pareto_front(values * signs)], axis=0)
        steps = "steps-post" if signs[0] > 0 else "steps-pre"
        axes.plot(*best.T, drawstyle=steps, color=INK, linewidth=1.2, zorder=1)
    for pair, text in zip(values, tips, strict=True):
        (dot,) = axes.plot(*pair[:, None], "o", color=_SINGLE.color, markersize=4.2)
        shown = zip(names, pair, strict=True) if not words else [(names[1], pair[1])]
        tip(dot, f"{text}: {', '.join(cell(*each) for each in shown)}")
    if words:
        axes.set_xticks(range(len(words)), short_labels(words, _LONGEST))
    else:
        frame_x(axes, values[:, 0], column=names[0])
    frame_y(axes, values[:, 1], 30, names[1])
    axes.margins(x=0.06)
    axes.grid(visible=True, axis="x")
    if chosen >= 0:
        x, y = map(float, values[chosen])
        mark_best(axes, x, y, mark)
    labels = [heading(n) + (f", {b} is better" if b else "")
              for n, b in zip(names, better, strict=True)]  # fmt: skip
    axes.set(xlabel=labels[0])
    axes.set_title(labels[1])
    return figure


@style()
def parallel(points: pd.DataFrame, tips: Sequence[str], best: int) -> Figure:
    """Draw parallel coordinates: a line per point over an upright axis per column.

    Args:
        points: ``[n, K]``: numbers or texts, the best points first; a missing value is a gap.
        tips: the name of each point.
        best: how many of the first points are in color.

    """
    figure, axes = _new_axes(height=HEIGHT)
    heights = np.empty(points.shape)
    for place, (name, values) in enumerate(points.items()):
        heights[:, place], ticks = _upright(str(name), values)
        axes.plot([place, place], [0, 1], color=MUTED, linewidth=0.7, zorder=1)
        for height, text in ticks:
            axes.annotate(
                text, (place, height), (3, 0), textcoords="offset points", va="center", zorder=6,
                bbox={"facecolor": PAPER, "alpha": 0.75, "linewidth": 0, "pad": 0.8},
            )  # fmt: skip
    for row in reversed(range(len(points))):  # the best lie on top
        stroke, alpha, width = (_SINGLE, 0.8, 1.5) if row < best else (_OTHER, 0.4, 0.9)
        (line,) = axes.plot(heights[row], color=stroke.color, alpha=alpha, linewidth=width)
        tip(line, tips[row])
    names = [heading(str(name).rpartition(".")[2]) for name in points]
    is_slanted = len(names) * max(map(len, names)) > _WIDEST
    axes.set_xticks(
        range(len(names)), short_labels(names, _LONGEST), rotation=30 * is_slanted,
        ha="right" if is_slanted else "center", rotation_mode="anchor",
    )  # fmt: skip
    axes.set_xlim(-0.05, len(names) - 1 + 0.35)  # values stand right of their axis
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


def _upright(name: str, values: pd.Series[Any]) -> tuple[ArrayLike, list[tuple[float, str]]]:
    """Return the heights of values on an axis from 0 to 1, and what is written at which height."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    if is_words := not pd.api.types.is_numeric_dtype(values):
        words = sorted(values.dropna().unique())
        values = pd.Series(pd.Categorical(values, words).codes, values.index).replace(-1, np.nan)
    values = values.where(np.isfinite(values))
    known = np.unique(finite(values))
    if not known.size:
        return values, []
    is_log = not is_words and needs_log(known, 30)
    shown = known
    if len(known) > _MOST_WORDS:
        ticks = MaxNLocator(5, integer=not (known % 1).any())
        locator = LogLocator(numticks=_MOST_WORDS) if is_log else ticks
        shown = np.asarray(locator.tick_values(known[0], known[-1]))
        shown = shown[(shown >= known[0]) & (shown <= known[-1])]
    if len(shown) < 2:
        shown = known[[0, -1]]
    scale: Callable[[ArrayLike], NDArray[np.float64]] = np.log if is_log else np.asarray
    low, high = scale(known[[0, -1]])
    labels = short_labels(words, _LONGEST) if is_words else ()
    texts = [labels[int(at)] if is_words else cell(name, float(at)) for at in shown]
    length = high - low or 1.0
    return (scale(values) - low) / length, [*zip((scale(shown) - low) / length, texts, strict=True)]
