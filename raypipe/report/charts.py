"""Charts from arrays: lines, heat map, dots with intervals, scatter with a front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import ArrayLike, NDArray

from raypipe.report import plots
from raypipe.report.formatting import aligned, cell, number, short_labels, with_interval
from raypipe.report.plots import HEIGHT, INK, MUTED, PAPER, WIDTH, Stroke, finite, tip, toggle
from raypipe.stats import on_pareto_front, ranked

#: lines with a color and a name of their own
MOST_LINES = 8
#: rows of a chart of dots
MOST_DOTS = 24
#: characters of a label
LONGEST = 22
_LETTER = 0.0152  # width of a character, in units of a figure
_MOST_TIPS = 200  # points with a value to show
_MOST_POINTS = 1000  # of a line: more than a figure has pixels
_COLORS = "viridis"  # read alike with any color vision, and in gray


@dataclass(frozen=True)
class Line:
    """A line of a chart: ``y`` over rising ``x``, with a gap where a value is not finite.

    Args:
        name: for the label beside it.
        x: ``[n]``
        y: ``[n]``
        half: ``[n]``, half of an interval around ``y``, NaN where there is none.
        raw: ``[n]``, unsmoothed values, drawn thin.
        end: the marker of its last point.
        column: whose values these are, for their unit.

    """

    name: str
    x: NDArray[np.floating[Any]]
    y: NDArray[np.floating[Any]]
    half: NDArray[np.floating[Any]] | None = None
    raw: NDArray[np.floating[Any]] | None = None
    end: str = ""
    column: str = ""

    def best(self, better: str) -> int:
        """Return the place of the best value; the first of equal ones."""
        order, _ = ranked(self.y, range(len(self.y)), [0] * len(self.y), better)
        return order[0]


def lines(
    drawn: Sequence[Line],
    xlabel: str,
    title: str,
    *,
    better: str = "",
    steps: bool = True,
    dots: bool = False,
    from_zero: bool = False,
    chosen: str = "",
    marks: Mapping[str, float] | None = None,
) -> Figure:
    """Draw lines, the best point of each with a ring if ``better`` is lower or higher.

    More lines than can be distinguished share one color, and one of them is named: the chosen
    one, which is bold, else the one that ends best.

    Args:
        drawn: with finite values each.
        xlabel: name of the x axis.
        title: of the y axis.
        better: which values are better.
        steps: whether the x axis is linear and begins at 0.
        dots: whether few points are drawn, which show their values at the pointer.
        from_zero: whether the y axis begins at 0.
        chosen: the name of a line.
        marks: names of further places of the x axis.

    """
    few = len(drawn) <= MOST_LINES
    sign = -1 if better == "higher" else 1
    names = [line.name for line in drawn]
    ends = [sign * float(finite(line.y)[-1]) for line in drawn]
    first = names.index(chosen) if chosen else int(np.argmin(ends))
    labels = short_labels(names, 20)
    figure, axes = plots.new_axes(0.6 if len(drawn) > 1 else 0.84)
    palette = plots.strokes([str(place) for place in range(MOST_LINES)])
    labelled: list[tuple[float, str, Stroke]] = []
    for place, line in enumerate(drawn):
        is_named = few or place == first
        alone = plots.single_stroke() if is_named else Stroke(MUTED, "-")
        stroke = palette[str(place)] if few and len(drawn) > 1 else alone
        begun = len(axes.lines)
        bold = place == first if chosen else few
        if line.raw is not None and few:
            axes.plot(line.x, line.raw, color=stroke.color, linewidth=0.6, alpha=0.35)
        axes.plot(
            line.x, line.y, color=stroke.color, linestyle=stroke.line, label=line.name,
            linewidth=1.7 if bold else 0.9, alpha=1.0 if few or bold else 0.5,
            zorder=3 if bold else 2,
        )  # fmt: skip
        if dots and few and len(line.x) <= _MOST_TIPS:
            _dots_of(axes, line, xlabel, stroke, alone=len(drawn) == 1)
        if line.end:
            axes.plot(line.x[-1:], line.y[-1:], line.end, color=stroke.color, markersize=6)
        if few and len(drawn) > 1:
            for artist in axes.lines[begun:]:
                toggle(artist, labels[place])
        if line.half is not None and np.isfinite(line.half).any():
            low, high = line.y - line.half, line.y + line.half
            axes.fill_between(line.x, low, high, color=stroke.color, alpha=0.18, linewidth=0)
        if is_named:
            labelled.append((float(finite(line.y)[-1]), labels[place], stroke))
        gaps = line.x[~np.isfinite(line.y)]
        if gaps.size:
            floor = axes.get_xaxis_transform()
            axes.plot(gaps, 0 * gaps, "x", color=MUTED, transform=floor, clip_on=False)
    x = np.concatenate([line.x for line in drawn])
    plots.frame_x(axes, x, np.inf if steps else 30.0)
    if steps:
        axes.set_xlim(0, max(1.0, float(x.max())))
    plots.frame_y(axes, _framed(drawn, better, chosen), np.inf if from_zero else 30.0)
    if from_zero:
        axes.set_ylim(bottom=0)
    if better and not chosen:
        _ring(axes, drawn if few else [drawn[first]], xlabel, better)
    for name, step in (marks or {}).items():
        axes.axvline(step, color="0.6", linewidth=0.8, linestyle=":")
        at = (step, 0.97)
        axes.annotate(f" {name}", at, xycoords=axes.get_xaxis_transform(), va="top")
    if len(drawn) > 1:
        plots.label_lines(axes, labelled)
    axes.set_xlabel(xlabel)
    axes.set_title(title + (" (logarithmic)" if axes.get_yscale() == "log" else ""))
    return figure


def _dots_of(axes: Axes, line: Line, xlabel: str, stroke: Stroke, *, alone: bool) -> None:
    halves = np.full(len(line.x), np.nan) if line.half is None else line.half
    for x, y, half in zip(line.x, line.y, halves, strict=True):
        if np.isfinite(y):
            (dot,) = axes.plot([x], [y], "o", color=stroke.color, markersize=4)
            text = with_interval(line.column, float(y), float(half))
            name = "" if alone else f"{line.name}, "
            tip(dot, f"{name}{xlabel} {number(float(x))}: {text}")


def _framed(drawn: Sequence[Line], better: str, chosen: str) -> NDArray[np.float64]:
    """Return the values that the y axis has to show.

    The outermost hundredth of many values would flatten the rest, and so would the worst of many
    lines. The chosen line is shown as a whole.
    """
    values, whole = [], []
    for line in drawn:
        half = np.zeros(len(line.y)) if line.half is None else np.nan_to_num(line.half)
        own = finite(np.concatenate([line.y - half, line.y + half]))
        low, high = np.quantile(own, [0.005, 0.995]) if own.size > 200 else (own.min(), own.max())
        values.append(own[(own >= low) & (own <= high)])
        if line.name == chosen:
            whole.append(own)
    if len(drawn) > MOST_LINES:
        sign = -1 if better == "higher" else 1
        worst = [float((sign * own).max()) for own in values]
        limit = np.quantile(worst, 0.9, method="lower")
        values = [own[sign * own <= limit] for own in values]
    return np.concatenate([*values, *whole])


def _ring(axes: Axes, drawn: Sequence[Line], xlabel: str, better: str) -> None:
    """Mark the best point of each line, and name that of the best line."""
    bests = [(line, line.best(better)) for line in drawn]
    values = [float(line.y[at]) for line, at in bests]
    first = values.index(min(values) if better == "lower" else max(values))
    for place, (line, at) in enumerate(bests):
        x, y = float(line.x[at]), float(line.y[at])
        text = f"{cell(line.column, y)} at {xlabel} {number(x)}" if place == first else ""
        plots.mark_best(axes, x, y, text, below=better == "lower")


def thinned(values: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Return the means of equal parts of more values in a row than a chart shows."""
    if len(values) <= _MOST_POINTS:
        return values
    parts = np.array_split(values, _MOST_POINTS)
    return np.array([finite(part).mean() if finite(part).size else np.nan for part in parts])


def heat_map(
    grid: NDArray[np.float64],
    down: Sequence[str],
    across: Sequence[str],
    better: str = "",
    words: Mapping[tuple[int, int], str] | None = None,
    most: int = 100,
) -> Figure:
    """Return a heat map of ``[R, C]`` numbers, written into the cells if there are few.

    The best cell has a frame if ``better`` is lower or higher. ``words`` say why a cell has no
    number.
    """
    rows, columns = grid.shape
    below, beside = short_labels(across, LONGEST), short_labels(down, LONGEST)
    left = min(0.36, 0.05 + _LETTER * max(map(len, beside)) + 0.05)
    slanted = columns * max(map(len, below)) * _LETTER > 0.9 - left
    height = max(HEIGHT, min(0.75 + 0.36 * rows + (0.8 if slanted else 0), 7.0))
    figure = Figure(figsize=(WIDTH, height))
    bottom = (1.3 if slanted else 0.55) / height
    axes = figure.add_axes((left, bottom, 0.985 - left, 1 - bottom - 0.08 / height))
    known = finite(grid)
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    norm = Normalize(low, high if high > low else low + 1.0)
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
    fits = grid.size <= most and longest * _LETTER * 0.95 * columns <= 0.985 - left
    best = _best(known, better)
    for ((row, place), value), text in zip(np.ndenumerate(grid), texts, strict=True):
        ink = INK
        if np.isfinite(value):
            ink = "#000000" if float(norm(value)) > 0.6 else "#ffffff"
        elif (text := (words or {}).get((row, place), "")) == "":
            continue
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


def color_caption(column: str, grid: NDArray[np.float64], better: str = "") -> str:
    """Return what the colors of a heat map mean, and its frame."""
    known = finite(grid)
    if not known.size:
        return ""
    ends = [float(known.min()), float(known.max())]
    low, high = (cell(column, value) for value in ends)
    if low == number(ends[0]):
        low, high = aligned(ends)
    text = f"Dark is {low}, bright {high}."
    return text + (" A frame marks the best." if _best(known, better) is not None else "")


def dots(
    names: Sequence[str],
    mean: NDArray[np.floating[Any]],
    half: NDArray[np.floating[Any]],
    column: str,
    gray: Sequence[bool],
) -> Figure:
    """Draw a row for each point: a dot with its interval and its value; some of them in gray."""
    labels = short_labels(names, LONGEST)
    values = [with_interval(column, float(m), float(h)) for m, h in zip(mean, half, strict=True)]
    height = max(1.3, 0.62 + 0.3 * len(names))
    figure = Figure(figsize=(WIDTH, height))
    left = min(0.42, 0.03 + _LETTER * max(map(len, labels)))
    right = 0.03 + _LETTER * max(map(len, values))
    bottom = 0.42 / height
    axes = figure.add_axes((left, bottom, max(0.2, 1 - left - right - 0.01), 1 - bottom - 0.05))
    ends = [mean - np.nan_to_num(half), mean + np.nan_to_num(half)]
    for row, (name, text) in enumerate(zip(names, values, strict=True)):
        color = MUTED if gray[row] else plots.single_stroke().color
        if np.isfinite(half[row]):
            axes.plot([ends[0][row], ends[1][row]], [row, row], color=color, linewidth=1.4)
        (dot,) = axes.plot(
            [mean[row]], [row], "o", color=color, markersize=7, clip_on=False, zorder=3
        )
        tip(dot, f"{name}: {text}")
        beside = axes.get_yaxis_transform()
        axes.text(1.03, row, text, transform=beside, va="center", fontsize=10)
    axes.set_yticks(range(len(names)), labels)
    axes.set_ylim(len(names) - 0.5, -0.5)
    low, high = float(np.min(ends)), float(np.max(ends))
    if not plots.needs_log([low, high], 100):
        if low >= 0 and low < 0.6 * high:
            low = 0.0  # a dot's distance from the left then shows its size
        margin = 0.06 * (high - low) or abs(high) * 0.05 or 1.0
        axes.set_xlim(low - margin * (low != 0), high + margin)
    plots.frame_x(axes, [low, high], 100)
    axes.xaxis.set_major_locator(axes.xaxis.get_major_locator() if low else MaxNLocator(4))
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    return figure


def scatter(
    x: ArrayLike,
    y: ArrayLike,
    xlabel: str,
    title: str,
    *,
    line: tuple[ArrayLike, ArrayLike, str],
    tips: Sequence[str],
    kinds: Sequence[str] = (),
    crosses: Sequence[bool] = (),
    large: Sequence[bool] = (),
    ring: int | None = None,
) -> Figure:
    """Draw points and a line of steps through some of them.

    Args:
        x: ``[n]``, finite.
        y: ``[n]``, finite.
        xlabel: name of the x axis.
        title: of the y axis.
        line: x and y of the line, and its drawstyle.
        tips: the text of each point at the pointer.
        kinds: the name of each point's color.
        crosses: whether each point is a gray cross.
        large: whether each point is large.
        ring: the place of a point with a ring, which is called recommended.

    """
    across, up = np.asarray(x, np.float64), np.asarray(y, np.float64)
    figure, axes = plots.new_axes(height=0.74)
    names = sorted(set(kinds) - {""})
    strokes = plots.strokes(names) if len(names) > 1 else {}
    axes.plot(line[0], line[1], drawstyle=line[2], color=INK, linewidth=1.2, zorder=1)
    for place, text in enumerate(tips):
        stroke = strokes.get(kinds[place] if kinds else "", plots.single_stroke())
        look: dict[str, Any] = {"color": stroke.color, "marker": "o", "markersize": 4.2}
        if large and large[place]:
            look |= {"markersize": 6.5, "markeredgecolor": PAPER, "zorder": 3}
        if crosses and crosses[place]:
            look |= {"color": MUTED, "marker": "x", "markersize": 4}
        (dot,) = axes.plot([across[place]], [up[place]], linestyle="", **look)
        tip(dot, text)
    plots.frame_x(axes, across)
    axes.margins(x=0.06)
    axes.grid(visible=True, axis="x")
    plots.frame_y(axes, up, 30)
    if ring is not None:
        plots.mark_best(axes, across[ring], up[ring], "recommended", below=False)
    axes.set_xlabel(xlabel)
    axes.set_title(title)
    if strokes:
        handles = [Line2D([], [], marker="o", linestyle="", color=strokes[name].color, label=name)
                   for name in names]  # fmt: skip
        plots.draw_legend(figure, handles)
    return figure


def front(
    x: ArrayLike, y: ArrayLike, signs: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], str]:
    """Return the line through the points that no other one beats in both; 1 is for lower better."""
    points = np.stack([np.asarray(x, np.float64), np.asarray(y, np.float64)], axis=1)
    best = np.unique(points[on_pareto_front(points * signs)], axis=0)
    return best[:, 0], best[:, 1], "steps-post" if signs[0] > 0 else "steps-pre"
