"""The section of any results table: headline numbers, plots by its axes, and its first rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd

from raypipe.report.formatting import aligned, cell, heading, number
from raypipe.report.headlines import headlines, range_tiles, tile, with_interval
from raypipe.report.plots import Plot
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
from raypipe.report.table_plots import number_plot
from raypipe.report.table_shape import (
    ADDED,
    LONG,
    Shape,
    is_long,
    means,
    plain,
    shape_of,
    value_label,
)
from raypipe.store.tables import Column, Table

_MOST_ROWS = 50
_FOLDED_FROM = 13  # rows
_MOST_TILES = 8
_MOST_PLOTS = 4
_MOST_TEXTS = 3
_MOST_RANKED = 16
_MOST_FURTHER = 3
_MOST_CHARACTERS = 4000


def table_section(
    table: Table,
    rows: pd.DataFrame,
    axes: Sequence[str] | None = None,
    seed: str | None = None,
    said: Collection[Tile] = (),
) -> Section:
    """Return the section of a table: headline numbers, plots, long texts, and the first 50 rows.

    Numbers are averaged over ``seed``, with Student's 95 % confidence interval. The best values
    come from ``Column.better``, their distance to a baseline from ``Table.baselines``.

    Args:
        table: the declaration; columns that it does not have are shown, too.
        rows: its rows, any number.
        axes: the columns that were varied; by default those that the table declares, otherwise
            those that tell the rows apart.
        seed: the column that numbers the repetitions; by default ``run`` or ``seed``.
        said: headline numbers that the page shows already, which are left out.

    Returns:
        a section without parts if there are no rows.

    """
    title = heading(table.name).capitalize()
    if rows.empty:
        return Section(title, [], covers=(table.name,))
    rows = plain(rows)
    shape = shape_of(table, rows, axes, seed)
    best = headlines(table, rows, shape)
    tiles = [tile(each) for each in best] or range_tiles(rows, shape)
    tiles = [each for each in tiles if each not in said]
    parts: list[Part] = []
    if tiles:
        parts.append(Tiles(tiles[:_MOST_TILES]))
    parts += _plots(table, rows, shape)
    parts += _texts(rows)
    parts.append(_view(table, rows, title, _introduction(table, rows, shape)))
    return Section(title, parts, covers=(table.name,))


def _introduction(table: Table, rows: pd.DataFrame, shape: Shape) -> str:
    count = f"{number(len(rows))} row{'s' * (len(rows) > 1)}"
    text = f"{count}, each {table.row}." if table.row and len(rows) > 1 else f"{count}."
    if table.row and len(rows) == 1:
        text = f"One row: {table.row}."
    if shape.axes:
        counts = {name: rows[name].nunique(dropna=False) for name in shape.axes}
        named = [f"{heading(name)} ({count} values)" for name, count in counts.items()]
        text += f" They differ in {_listed(named)}."
    return text


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else list(names))


def _plots(table: Table, rows: pd.DataFrame, shape: Shape) -> list[Part]:
    """Return plots of the numbers that can be better, otherwise of the first that vary."""
    better = [column for column in shape.numbers if column.better]
    if not better and not shape.axes and any(is_long(rows[name]) for name in rows.columns):
        return []  # the numbers of a table of texts are about the texts
    drawn: list[Plot] = []
    for column in better or _varying(shape.numbers, rows)[:2]:
        plot = number_plot(table, column, rows, shape)
        if plot is not None:
            drawn.append(plot)
    if len(drawn) == 1 and better and len(rows) >= _FOLDED_FROM and shape.axes:
        return [drawn[0], _ranking(better[0], rows, shape)]
    more = drawn[_MOST_PLOTS:]
    folded: list[Part] = [Fold(f"{len(more)} more figures", more)] if more else []
    return [*drawn[:_MOST_PLOTS], *folded]


def _ranking(column: Column, rows: pd.DataFrame, shape: Shape) -> TableView:
    """Return the best points by a number with their further numbers, to stand next to its figure.

    The further numbers are means, too.
    """
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


def _varying(numbers: Sequence[Column], rows: pd.DataFrame) -> list[Column]:
    return [column for column in numbers if rows[column.name].nunique() > 1]


def _texts(rows: pd.DataFrame) -> list[Part]:
    """Return the long texts of the first rows, which a table cannot show."""
    names = [name for name in rows.columns if name not in ADDED and is_long(rows[name])]
    if not names:
        return []
    parts: list[Part] = []
    for place in range(min(_MOST_TEXTS, len(rows))):
        of_row: list[Part] = []
        for name in names:
            text = rows[name].iloc[place]
            if isinstance(text, str) and text:
                cut = "…" if len(text) > _MOST_CHARACTERS else ""
                of_row += [Heading(heading(name)), Code(text[:_MOST_CHARACTERS] + cut)]
        if of_row and len(rows) == 1:
            parts += of_row
        elif of_row:
            parts.append(Fold(f"Texts of row {place + 1} of {number(len(rows))}", of_row))
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
    listed = f"First {_MOST_ROWS} of {number(len(rows))} rows"
    return Fold(listed if len(rows) > _MOST_ROWS else f"All {len(rows)} rows", [view])


def _cut(value: Any) -> Any:
    return f"{value[:LONG]}…" if isinstance(value, str) and len(value) > LONG else value
