"""A table of rows with axes and numbers: tiles, a plot of each number, best rows.

Calls of a function, a matrix, a search, a sweep and trainings are all shown by this module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from raypipe.report import plots
from raypipe.report.formatting import (
    cell,
    counted,
    heading,
    listed,
    number,
    with_interval,
    with_unit,
)
from raypipe.report.parts import Code, Fold, Heading, Part, Section, TableView, Tile, cells
from raypipe.report.plots import Line, Plot, finite, thinned
from raypipe.report.results import (
    LONG,
    Headline,
    Means,
    Results,
    as_numbers,
    is_baseline,
    is_long,
    is_number,
    means,
    point_label,
    value_label,
)
from raypipe.store.tables import ADDED, Column, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_ROWS = 50
_LEAST_RANKED = 12  # rows
_MOST_RANGES = 4
_MOST_TEXTS = 3
_MOST_RANKED = 16
_MOST_FURTHER = 3
_MOST_CHARACTERS = 4000
_MOST_CELLS = 24  # of an axis of a heat map
_LARGEST = 1e300  # matplotlib overflows beyond
_LEAST_DOTS = 3  # the headline compares two


def table_section(results: Results) -> Section:
    """Return the section of a table: plots, long texts, and the first 50 rows.

    Numbers are averaged over repetitions, with Student's 95 % confidence interval. The best values
    come from ``Column.better``; the first screen has them.
    """
    table, rows = results.table, results.rows
    title = heading(table.name).capitalize()
    parts = [*result_parts(results), *_texts(rows), _view(table, rows, title)]
    return Section(title, parts, covers=(table.name,))


def tile(best: Headline) -> Tile:
    """Return a headline as a tile: the value, the point, and the distance to the baseline.

    A point whose lead on the second best one may be chance is not named alone.
    """
    column, second, baseline = best.column, best.second, best.baseline
    notes, tone = [best.leaders] if best.leaders else [], ""
    if best.leaders and best.ties == 1 and second is not None and second.may_be_chance:
        rival = f"{second.label} ({cell(column.name, second.mean)})"
        notes = [f"{best.leaders}, perhaps by chance before {rival}"]
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
    """Return the ranges of the first numbers, of a table that does not say what is better."""
    tiles = []
    for column in results.shape.numbers[:_MOST_RANGES]:
        values = finite(as_numbers(results.rows[column.name]))
        if values.size:
            ends = dict.fromkeys(cell(column.name, end) for end in (values.min(), values.max()))
            mean = cell(column.name, float(values.mean()))
            note = f"mean {mean} of {values.size} rows" if len(ends) > 1 else ""
            tiles.append(Tile(with_unit(column.name, column.unit, ""), " to ".join(ends), note))
    return tiles


def result_parts(results: Results) -> list[Part]:
    """Return a plot of each number that can be better, and the best points of the first one."""
    rows, shape = results.rows, results.shape
    better = [column for column in shape.numbers if column.better]
    varying = [column for column in shape.numbers if rows[column.name].nunique() > 1]
    drawn = [plot for column in better or varying[:2] for plot in number_plots(results, column)]
    is_ranked = better and shape.axes and len(rows) > _LEAST_RANKED
    return [*drawn, *([_best_rows(results, better[0])] if is_ranked else [])]


def number_plots(results: Results, column: Column, words: str = "") -> list[Plot]:
    """Draw a number by the axes of its table; none if there is nothing to compare.

    The first two axes give a heat map without baselines, averaged over the others, and each further
    one a chart of its own. A numeric axis gives a line, other axes give dots. ``words`` is the
    column that says why a row has no number; of rows with one the best counts, not the mean.
    """
    rows, axes = results.rows, results.shape.axes
    values = finite(as_numbers(rows[column.name]))
    drawn = [values, *(finite(as_numbers(rows[name])) for name in axes)]
    is_drawable = all(np.abs(each).max(initial=0) <= _LARGEST for each in drawn)
    if not axes or values.size < 2 or not is_drawable:
        return []
    own = results.own
    pair = [name for name in axes if 1 < own[name].nunique() <= _MOST_CELLS][:2]
    full = math.prod(own[name].nunique() for name in pair)
    if len(pair) < 2 or len(own[pair].drop_duplicates()) < max(3, full / 4):
        return _over(results, column, axes)
    heat = _heat_map(results, column, words, pair)
    return [heat, *(p for n in axes if n not in pair for p in _over(results, column, [n]))]


def _heat_map(results: Results, column: Column, words: str, pair: list[str]) -> Plot:
    own = results.own
    for name in pair:  # a value such as null is one of the compared
        own = own.assign(**{name: own[name].astype(object).where(own[name].notna(), "none")})
    if words:
        order = own.sort_values(column.name, ascending=column.better == "lower", kind="stable")
        own = order.drop_duplicates(pair)
    found = means(own, pair, column.name, results.shape.seeds)
    labels = [own[name].drop_duplicates().sort_values(key=as_numbers, kind="stable")
              for name in pair]  # fmt: skip
    grids = [
        table.pivot(index=pair[0], columns=pair[1], values="")
        .reindex(index=labels[0], columns=labels[1])
        .rename(index=value_label, columns=value_label)
        for table in (
            found.points.assign(**{"": found.mean}),
            own.drop_duplicates(pair)[pair].assign(**{"": own[words] if words else ""}),
        )
    ]
    figure = plots.heat_map(grids[0], column.name, column.better, grids[1].fillna(""))
    figure.axes[0].set(xlabel=_last(pair[1]), ylabel=_last(pair[0]))
    others = [_last(name) for name in results.shape.axes if name not in pair]
    over = [*(["repetitions"] if results.shape.seeds else []), *others]
    caption = f"{'The best' if words else 'Mean'} over {listed(over)}." if over else ""
    caption += " A frame marks the best." if column.better else ""
    return _plot(results, column, pair, caption, figure)


def _over(results: Results, column: Column, axes: Sequence[str]) -> list[Plot]:
    """Draw the means of a number over one numeric axis, or at each point of other axes."""
    shape, rows = results.shape, results.rows
    found = means(rows, [*shape.groups, *axes], column.name, shape.seeds)
    caption = "Mean over repetitions" if shape.seeds else ""
    caption += " with its 95 % interval." if found.half.notna().any() else "." * bool(caption)
    if len(axes) == 1 and is_number(rows[axes[0]]) and not shape.groups:
        return [_line(results, column, axes[0], found, caption)]
    if len(found.mean) >= _LEAST_DOTS:
        return [_dots(results, column, axes, found, caption)]
    return []


def _line(results: Results, column: Column, axis: str, found: Means, caption: str) -> Plot:
    """Draw the means along a numeric axis, with intervals and the best point marked."""
    curve = pd.DataFrame({"y": found.mean, "half": found.half})
    curve = curve.set_axis(as_numbers(found.points[axis]))
    every = np.unique(finite(as_numbers(results.rows[axis])))  # gaps where a number is missing
    curve = curve[curve.index.notna()].reindex(every)
    x, y, half = (thinned(v.to_numpy(float)) for v in (curve.index, curve["y"], curve["half"]))
    line = Line("", x, y, half)
    figure = plots.lines([line], _last(axis), column.name, better=column.better, from_0=False)
    if np.isnan(y).any():
        caption += " The line has a gap, and a cross, where a value is missing or not finite."
    if len(x) < len(curve):
        caption += f" {number(len(found.mean))} points, averaged over neighbors."
    return _plot(results, column, [axis], caption, figure)


def _dots(
    results: Results, column: Column, axes: Sequence[str], found: Means, caption: str
) -> Plot:
    """Draw a dot per point, with its interval and its value; baselines in gray."""
    order = found.mean.sort_values(ascending=column.better != "higher", kind="stable")
    shown = list(order.index[: plots.MOST_DOTS])
    varied = [name for name in map(str, found.points) if found.points[name].nunique() > 1]
    names = [point_label(dict(found.points.loc[place, varied])) for place in shown]
    baseline = is_baseline(results.table, found.points)[shown]
    mean, half = (values[shown].to_numpy(float) for values in (found.mean, found.half))
    figure = plots.dots(names, mean, half, column.name, list(baseline))
    if baseline.any():
        caption += " Gray: baselines."
    if len(order) > len(shown):
        caption += f" The {'first' if not column.better else 'best'} {len(shown)} of {len(order)}."
    return _plot(results, column, axes, caption, figure)


def _plot(
    results: Results, column: Column, by: Sequence[str], caption: str, figure: Figure
) -> Plot:
    title = f"{heading(column.name)} by {listed([_last(str(axis)) for axis in by])}"
    caption += f" {column.better.capitalize()} is better." if column.better else ""
    name = "-".join([results.table.name, column.name, *by])
    return Plot(name, title, caption.strip(), figure)


def _last(key: str) -> str:
    """Return the last part of a dotted key, for readers."""
    return heading(key.rpartition(".")[2])


def _best_rows(results: Results, column: Column) -> TableView:
    """Return the best points by a number with the means of their further numbers."""
    rows, shape = results.rows, results.shape
    by = [*shape.groups, *shape.axes]
    found = means(rows, by, column.name, shape.seeds)
    points = found.points.assign(**{column.name: found.mean, "±": found.half})
    if found.runs.nunique() > 1:
        points["repetitions"] = found.runs
    others = [each.name for each in shape.numbers if each.name != column.name][:_MOST_FURTHER]
    numbers = rows[others].apply(as_numbers).groupby([rows[name] for name in by], dropna=False)
    points = points.merge(numbers.mean().reset_index(), "left", by) if others else points
    order = points.sort_values(column.name, ascending=column.better == "lower", kind="stable")
    best = order.head(_MOST_RANKED)
    best = best.assign(**{name: cells(map(value_label, best[name])) for name in by})
    caption = f"The best {len(best)} of {len(order)} points." if len(order) > len(best) else ""
    return TableView(best, list(best), f"Best points by {heading(column.name)}", caption=caption)


def _texts(rows: pd.DataFrame) -> Iterator[Fold]:
    """Yield the long texts of the first rows, which a table cannot show."""
    names = [name for name in rows.columns if name not in ADDED and is_long(rows[name])]
    for place, row in enumerate(rows[names].head(_MOST_TEXTS).to_dict("records")):
        parts: list[Part] = []
        for name, text in row.items():
            if isinstance(text, str) and text:
                cut = "…" if len(text) > _MOST_CHARACTERS else ""
                parts += [Heading(heading(str(name))), Code(text[:_MOST_CHARACTERS] + cut)]
        if parts:
            yield Fold(f"Texts of row {place + 1} of {number(len(rows))}", parts)


def _view(table: Table, rows: pd.DataFrame, title: str) -> TableView:
    first, caption = rows.head(_MOST_ROWS), counted(len(rows), "row")
    if table.row:
        caption += f"{', each' if len(rows) > 1 else ':'} {table.row}"
    return TableView(first.map(_cut), (), title, meanings=table.meanings, caption=caption)


def _cut(value: Any) -> Any:
    return f"{value[:LONG]}…" if isinstance(value, str) and len(value) > LONG else value
