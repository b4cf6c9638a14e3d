"""A table of rows with axes and numbers: headline numbers, a plot of each number, best rows.

Calls of a function, a matrix, a search, a race, a sweep and trainings are all shown by this module.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raypipe.report import charts, plots
from raypipe.report.best import (
    ADDED,
    LONG,
    Headline,
    Results,
    as_numbers,
    is_baseline,
    is_long,
    is_number,
    means,
    point_label,
    value_label,
)
from raypipe.report.formatting import (
    aligned,
    cell,
    counted,
    heading,
    listed,
    number,
    with_interval,
    with_unit,
)
from raypipe.report.plots import Plot, finite
from raypipe.report.sections import (
    Code,
    Fold,
    Heading,
    Part,
    Section,
    TableView,
    Tile,
    Tiles,
    cells,
)
from raypipe.store.tables import Column, Table

_MOST_ROWS = 50
_FOLDED_FROM = 13  # rows
_MOST_TILES = 8
_MOST_RANGES = 4
_MOST_PLOTS = 4
_MOST_TEXTS = 3
_MOST_RANKED = 16
_MOST_FURTHER = 3
_MOST_CHARACTERS = 4000
_MOST_CELLS = 24  # of an axis of a heat map
_LARGEST = 1e300  # matplotlib overflows beyond
_LEAST_DOTS = 3  # the headline compares two
_LONGEST_NAME = 50  # characters; a longer text is not a name


def table_section(results: Results, said: Collection[Tile] = ()) -> Section:
    """Return the section of a table: headline numbers, plots, long texts, and the first 50 rows.

    Numbers are averaged over repetitions, with Student's 95 % confidence interval. The best values
    come from ``Column.better``, their distance to a baseline from ``Table.baselines``. ``said`` are
    headline numbers that the page shows already, which are left out.
    """
    table, rows = results.table, results.rows
    title = heading(table.name).capitalize()
    if rows.empty:
        return Section(title, [], covers=(table.name,))
    tiles = [tile(each) for each in results.headlines] or range_tiles(results)
    tiles = [each for each in tiles if each not in said]
    parts: list[Part] = [Tiles(tiles[:_MOST_TILES])] if tiles else []
    better = [column for column in results.shape.numbers if column.better]
    varying = [c for c in results.shape.numbers if rows[c.name].nunique() > 1]
    drawn = [plot for column in better or varying[:2] for plot in number_plots(results, column)]
    parts += drawn[:_MOST_PLOTS]
    if len(drawn) == 1 and better and len(rows) >= _FOLDED_FROM and results.shape.axes:
        parts.append(best_rows(results, better[0]))
    if more := drawn[_MOST_PLOTS:]:
        parts.append(Fold(f"{len(more)} more figures", more))
    parts += _texts(rows)
    parts.append(_view(table, rows, title, _introduction(results)))
    return Section(title, parts, covers=(table.name,))


def _introduction(results: Results) -> str:
    table, rows = results.table, results.rows
    count = counted(len(rows), "row")
    text = f"{count}, each {table.row}." if table.row and len(rows) > 1 else f"{count}."
    if table.row and len(rows) == 1:
        text = f"One row: {table.row}."
    axes = results.shape.axes
    named = [f"{heading(name)} ({rows[name].nunique(dropna=False)} values)" for name in axes]
    return f"{text} They differ in {listed(named)}." if named else text


def tile(best: Headline) -> Tile:
    """Return a headline as a tile: the value, the point, and the distance to the baseline.

    A point whose lead on the second best one may be chance is not named alone.
    """
    column, second, baseline = best.column, best.second, best.baseline
    notes = [best.leaders] if best.leaders else []
    if best.leaders and best.ties == 1 and second is not None and second.may_be_chance:
        rival = f"{second.label} ({cell(column.name, second.mean)})"
        notes = [f"{best.leaders}, perhaps by chance before {rival}"]
    tone = ""
    if baseline is not None:
        rival = f"{baseline.label} ({cell(column.name, baseline.mean)})"
        side = "above" if best.mean > baseline.mean else "below"
        size = with_interval(column.name, abs(best.mean - baseline.mean), baseline.half)
        equal = best.mean == baseline.mean
        notes.append(f"the same as {baseline.label}" if equal else f"{size} {side} {rival}")
        tone = "good" if baseline.gain > 0 and not baseline.may_be_chance else "warn"
    elif len(best.points) > 1:
        notes.append(f"{'lowest' if column.better == 'lower' else 'highest'} of "
                     f"{len(best.points)}")  # fmt: skip
    value = with_interval(column.name, best.mean, best.half)
    return Tile(best.label, value, "; ".join(notes), tone)


def range_tiles(results: Results) -> list[Tile]:
    """Return the ranges of the first numbers, of a table that does not say what is better.

    A table of texts has none: its numbers are about the texts.
    """
    rows = results.rows
    if any(is_long(rows[name], _LONGEST_NAME) for name in rows.columns if name not in ADDED):
        return []
    tiles = []
    for column in results.shape.numbers:
        known = finite(as_numbers(rows[column.name]))
        if not known.size:
            continue
        low, high, mean = (cell(column.name, float(v)) for v in (known.min(), known.max(),
                                                                  known.mean()))  # fmt: skip
        label = with_unit(heading(column.name), column.name, column.unit, column.better)
        if low == high:
            tiles.append(Tile(label, low, "" if len(rows) == 1 else "the same in all rows"))
        else:
            tiles.append(Tile(label, f"{low} to {high}", f"mean {mean} of {known.size} rows"))
    return tiles[:_MOST_RANGES]


def number_plots(results: Results, column: Column, words: str = "") -> list[Plot]:
    """Draw a number by the axes of its table; none if there is nothing to compare.

    The first two axes give a heat map without baselines, averaged over the others, and each further
    one a chart of its own. A numeric axis gives a line, other axes give dots. ``words`` is the
    column that says why a row has no number; of rows with one the best counts, not the mean.
    """
    rows, shape = results.rows, results.shape
    values = finite(as_numbers(rows[column.name]))
    drawn = [values, *(finite(as_numbers(rows[name])) for name in shape.axes)]
    if (
        not shape.axes
        or values.size < 2
        or any(np.abs(each).max(initial=0) > _LARGEST for each in drawn)
    ):
        return []
    with plots.style():
        pair = _heat_axes(results)
        if pair:
            heat = _heat_map(results, column, words, *pair)
            others = [name for name in shape.axes if name not in pair]
            return [heat, *(p for name in others for p in _over(results, column, [name]))]
        return _over(results, column, shape.axes)


def _heat_axes(results: Results) -> tuple[str, ...]:
    """Return the two axes of a heat map: the first two with several values apart from baselines."""
    own = results.own
    varied = [name for name in results.shape.axes if 1 < own[name].nunique() <= _MOST_CELLS]
    if len(varied) < 2:
        return ()
    first, second = varied[:2]
    count = len(own[[first, second]].drop_duplicates())
    full = own[first].nunique() * own[second].nunique()
    return (first, second) if count >= 3 and count >= full / 4 else ()


def _heat_map(results: Results, column: Column, words: str, first: str, second: str) -> Plot:
    own = results.own
    for name in (first, second):  # a value such as null is one of the compared
        if own[name].isna().any():
            own = own.assign(**{name: own[name].astype(object).where(own[name].notna(), "none")})
    if words:
        order = own.sort_values(column.name, ascending=column.better == "lower", kind="stable")
        own = order.drop_duplicates([first, second])
    found = means(own, [first, second], column.name, results.shape.seeds)
    down, across = _ordered(own[first]), _ordered(own[second])
    grid = np.full((len(down), len(across)), np.nan)
    for one, other, mean in zip(found.points[first], found.points[second], found.mean, strict=True):
        grid[down.index(one), across.index(other)] = mean
    reasons = {}
    for one, other, word in zip(own[first], own[second], own.get(words, []), strict=False):
        reasons[down.index(one), across.index(other)] = str(word)
    others = [n for n in results.shape.axes if n not in (first, second)]
    over = [*(["repetitions"] if results.shape.seeds else []), *map(_last, others)]
    what = "The best" if words else "Mean"
    caption = f"{what} over {listed(over)}. " if over else ""
    named = list(map(value_label, down)), list(map(value_label, across))
    figure = charts.heat_map(grid, *named, column.better, reasons)
    figure.axes[0].set(xlabel=_last(second), ylabel=_last(first))
    title = f"{heading(column.name)} by {_last(first)} and {_last(second)}"
    caption += charts.color_caption(column.name, grid, column.better)
    name = f"{results.table.name}-{column.name}-heat"
    return Plot(name, title, f"{caption}{_better(column)}", figure)


def _over(results: Results, column: Column, axes: Sequence[str]) -> list[Plot]:
    """Draw the means of a number over one numeric axis, or at each point of other axes."""
    (axis, *others), rows = axes, results.rows
    if not others and is_number(rows[axis]) and not results.shape.groups:
        return [_line(results, column, axis)]
    return _dots(results, column, axes)


def _line(results: Results, column: Column, axis: str) -> Plot:
    """Draw the means along a numeric axis, with intervals and the best point marked."""
    found = means(results.rows, [axis], column.name, results.shape.seeds)
    x: NDArray[np.floating[Any]] = np.unique(finite(as_numbers(results.rows[axis])))
    at = as_numbers(found.points[axis]).to_numpy()
    known = np.isfinite(at)
    places = np.searchsorted(x, at[known])
    y: NDArray[np.floating[Any]] = np.full(len(x), np.nan)  # a gap where nothing is finite
    half = y.copy()
    y[places], half[places] = (v.to_numpy(float)[known] for v in (found.mean, found.half))
    fewer = [charts.thinned(values) for values in (x, y, half)]
    line = charts.Line("", fewer[0], fewer[1], fewer[2], column=column.name)
    figure = charts.lines(
        [line], _last(axis), heading(column.name), better=column.better, steps=False, dots=True
    )
    caption = _intervals(found.half, results) + _better(column)
    if np.isnan(line.y).any():
        caption += " The line has a gap, and a cross, where a value is missing or not finite."
    if len(line.x) < len(x):
        caption += f" {number(len(found.mean))} points, averaged over neighbors."
    title = f"{heading(column.name)} by {_last(axis)}"
    return Plot(f"{results.table.name}-{column.name}-{axis}", title, caption.strip(), figure)


def _dots(results: Results, column: Column, axes: Sequence[str]) -> list[Plot]:
    """Draw a dot per point, with its interval and its value; baselines in gray."""
    shape = results.shape
    found = means(results.rows, [*shape.groups, *axes], column.name, shape.seeds)
    known = found.mean[np.isfinite(found.mean)]
    if len(known) < _LEAST_DOTS:
        return []
    ascending = column.better != "higher"
    order = known.sort_values(ascending=ascending, kind="stable").index
    shown = list(order[: charts.MOST_DOTS])
    varied = [name for name in found.points if found.points[name].nunique() > 1]
    names = [point_label(dict(found.points.loc[place, varied])) for place in shown]
    baseline = is_baseline(results.table, found.points)[shown]
    mean, half = (values[shown].to_numpy(float) for values in (found.mean, found.half))
    figure = charts.dots(names, mean, half, column.name, list(baseline))
    caption = _intervals(found.half, results) + _better(column)
    if baseline.any():
        caption += " Gray: baselines."
    if len(known) > len(shown):
        caption += f" The {'first' if not column.better else 'best'} {len(shown)} of {len(known)}."
    title = f"{heading(column.name)} by {' and '.join(_last(str(n)) for n in varied or axes)}"
    name = f"{results.table.name}-{column.name}-{'-'.join(axes)}"
    return [Plot(name, title, caption.strip(), figure)]


def _ordered(values: pd.Series[Any]) -> list[object]:
    """Return the values of an axis: numbers in their order, then other values as they come."""
    distinct = list(dict.fromkeys(values.dropna()))
    numbers = as_numbers(pd.Series(distinct, dtype=object))
    return [distinct[place] for place in numbers.sort_values(kind="stable").index]


def _intervals(half: pd.Series[float], results: Results) -> str:
    if half.notna().any():
        return "Mean over repetitions with its 95 % interval."
    return "Mean over repetitions." if results.shape.seeds else ""


def _better(column: Column) -> str:
    return f" {column.better.capitalize()} is better." if column.better else ""


def _last(key: str) -> str:
    """Return the last part of a dotted key, for readers."""
    return heading(key.rpartition(".")[2])


def best_rows(results: Results, column: Column) -> TableView:
    """Return the best points by a number with their further numbers, which are means, too."""
    rows, shape = results.rows, results.shape
    by = [*shape.groups, *shape.axes]
    found = means(rows, by, column.name, shape.seeds)
    order = found.mean.sort_values(ascending=column.better == "lower", kind="stable").index
    chosen = list(order[:_MOST_RANKED])
    name = heading(column.name)
    shown = {axis.rpartition(".")[2]: list(found.points.loc[chosen, axis].map(value_label))
             for axis in by}  # fmt: skip
    shown[name] = _aligned(column.name, found.mean[chosen], found.half[chosen])
    if found.runs.nunique() > 1:
        shown["repetitions"] = list(found.runs[chosen])
    for other in [each for each in shape.numbers if each.name != column.name][:_MOST_FURTHER]:
        further = means(rows, by, other.name, shape.seeds)
        points = further.points.assign(**{"": further.mean})
        values = found.points.loc[chosen].merge(points, "left", by)[""]
        shown[heading(other.name)] = _aligned(other.name, values)
    count = f"The best {len(chosen)} of {len(order)} points." if len(order) > len(chosen) else ""
    return TableView(pd.DataFrame(shown), list(shown), f"Best points by {name}", caption=count)


def _aligned(
    column: str, mean: pd.Series[float], half: pd.Series[float] | None = None
) -> list[str]:
    """Return the cells of means, with their intervals if given, to the same decimal place."""
    halves = [math.nan] * len(mean) if half is None else half.tolist()
    if cell(column, 1.0) == number(1.0):
        return aligned(mean.tolist(), halves)
    return [with_interval(column, *pair) for pair in zip(mean, halves, strict=True)]


def _texts(rows: pd.DataFrame) -> list[Part]:
    """Return the long texts of the first rows, which a table cannot show."""
    names = [name for name in rows.columns if name not in ADDED and is_long(rows[name])]
    parts: list[Part] = []
    for place in range(min(_MOST_TEXTS, len(rows))):
        of_row: list[Part] = []
        for name in names:
            text = rows[name].iloc[place]
            if isinstance(text, str) and text:
                cut = "…" if len(text) > _MOST_CHARACTERS else ""
                of_row += [Heading(heading(name)), Code(text[:_MOST_CHARACTERS] + cut)]
        if of_row and len(rows) > 1:
            of_row = [Fold(f"Texts of row {place + 1} of {number(len(rows))}", of_row)]
        parts += of_row
    return parts


def _view(table: Table, rows: pd.DataFrame, title: str, caption: str) -> TableView | Fold:
    first = rows.head(_MOST_ROWS)
    columns = [name for name in first.columns if name not in ADDED]
    short = {
        name: cells(_cut(value) for value in first[name])
        for name in columns
        if is_long(first[name])
    }
    meanings = {
        column.name: f"{column.meaning} ({column.unit})" if column.unit else column.meaning
        for column in table.columns
    }
    view = TableView(first.assign(**short), columns, title, meanings=meanings, caption=caption)
    if len(rows) < _FOLDED_FROM:
        return view
    text = f"First {_MOST_ROWS} of {number(len(rows))} rows"
    return Fold(text if len(rows) > _MOST_ROWS else f"All {len(rows)} rows", [view])


def _cut(value: Any) -> Any:
    return f"{value[:LONG]}…" if isinstance(value, str) and len(value) > LONG else value
