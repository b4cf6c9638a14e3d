"""The columns of a results table by their role: axes, groups, repetitions and numbers; their means.

Roles follow from the table's declaration where it names them, otherwise from the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED, is_seed
from raypipe.redaction import printable
from raypipe.stats import half_width
from raypipe.store.tables import COMMAND_ID, RUN_ID, VARIANT, Column, Table

#: columns that the framework adds to every table
ADDED = (RUN_ID.name, VARIANT.name, COMMAND_ID.name)
#: the column with the seed of a matrix, which is joined to the rows
MATRIX_SEED = "matrix seed"
#: columns that number the repetitions of a row, unless they are axes
_REPETITIONS = ("run", SEED, MATRIX_SEED)
_MOST_VALUES = 50  # of an axis that is found in the rows
_LONGEST = 60  # characters of a value of such an axis
_MOST_AXES = 4
_MOST_POINTS = 1000  # of a curve over an axis that is found in the rows
#: characters from which a text is shown in full for the first rows only
LONG = 120
_FIRST_ROWS = 50


@dataclass(frozen=True)
class Shape:
    """The roles of a table's columns.

    Args:
        axes: columns with at least two values, which are compared.
        groups: columns whose values are not comparable.
        seeds: columns that number repetitions, over which numbers are averaged.
        numbers: columns with numbers; those that say which values are better come first. Of an open
            table they are the returned ones.

    """

    axes: tuple[str, ...]
    groups: tuple[str, ...]
    seeds: tuple[str, ...]
    numbers: tuple[Column, ...]


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with a plain index and names, and any value that is not a scalar as its text."""
    rows = rows.reset_index(drop=True).rename(columns=str)
    rows = rows.loc[:, ~rows.columns.duplicated()]
    for name in rows.columns:
        if rows[name].dtype == object:
            rows = rows.assign(**{name: rows[name].map(_scalar).astype(object)})
    return rows


def _scalar(value: Any) -> Any:
    return value if value is None or isinstance(value, str | Real | pd.Timestamp) else str(value)


def shape_of(
    table: Table, rows: pd.DataFrame, axes: Sequence[str] | None = None, seed: str | None = None
) -> Shape:
    """Return the roles of the columns of plain rows.

    Args:
        table: the declaration; it may lack columns of the rows.
        rows: as :func:`plain` returns them.
        axes: the columns that were varied; by default those that the table declares, otherwise
            those that tell the rows apart; none of a table of long texts.
        seed: the column that numbers repetitions; by default ``run`` or ``seed``.

    """
    columns = [name for name in rows.columns if name not in ADDED]
    declared = {column.name: column for column in table.columns}
    groups = tuple(name for name in table.groups if name in columns)
    given = list(table.axes if axes is None else axes)
    dotted = [name for name in columns if "." in name and is_seed(name)]  # of a matrix
    repetitions = (*_REPETITIONS, *dotted) if seed is None else (seed,)
    seeds = tuple(
        name
        for name in repetitions
        if name in columns and (name == seed or (name not in given and _distinct(rows[name]) > 1))
    )
    if axes is None and not table.axes:
        texts = any(is_long(rows[name]) for name in columns)  # what else a row says is about them
        given = [] if texts else _found_axes(rows, columns, declared, (*seeds, *groups))
    varied = tuple(
        name
        for name in dict.fromkeys(given)
        if name in columns and name not in (*seeds, *groups) and _distinct(rows[name]) > 1
    )
    numbers = [
        declared.get(name, Column(name, "real", ""))
        for name in columns
        if name not in (*given, *seeds, *groups, *_REPETITIONS, *dotted) and is_number(rows[name])
    ]
    if table.open:  # what it declares is about the call, and shown if nothing was returned
        numbers = [each for each in numbers if each.better or each.name not in declared] or numbers
    numbers.sort(key=lambda column: not column.better)
    return Shape(varied, groups, seeds, tuple(numbers))


def is_number(values: pd.Series[Any]) -> bool:
    """Whether a column has numbers, and not only missing values."""
    if pd.api.types.is_bool_dtype(values) or not values.notna().any():
        return False
    if values.dtype == object:
        known = values.dropna()
        return all(isinstance(one, Real) and not isinstance(one, bool) for one in known)
    return pd.api.types.is_numeric_dtype(values)


def is_long(values: pd.Series[Any], length: int = LONG) -> bool:
    """Whether a column has texts longer than this number of characters, by its first rows."""
    if values.dtype != object and not pd.api.types.is_string_dtype(values):
        return False
    first = values.head(_FIRST_ROWS)
    return any(isinstance(value, str) and len(value) > length for value in first)


def as_numbers(values: pd.Series[Any]) -> pd.Series[float]:
    """Return a column as floats; a value that is not a number is NaN."""
    return pd.to_numeric(values, errors="coerce").astype(float)


def _found_axes(
    rows: pd.DataFrame,
    columns: Sequence[str],
    declared: Mapping[str, Column],
    taken: Sequence[str],
) -> list[str]:
    """Return the columns that tell the rows apart: texts first, then numbers that repeat."""
    unknown = Column("", "real", "")
    free = [
        name
        for name in columns
        if name not in taken and not declared.get(name, unknown).better and _can_be_axis(rows[name])
    ]
    texts = [name for name in free if not is_number(rows[name])]
    numbers = [name for name in free if is_number(rows[name])]
    repeating = [n for n in numbers if _distinct(rows[n]) <= min(_MOST_VALUES, len(rows) // 2)]
    axes: list[str] = []
    others = [name for name in taken if name in rows.columns]
    combinations = _combinations(rows, others)
    for name in (*texts, *repeating):
        if combinations == len(rows) or len(axes) == _MOST_AXES:
            break
        more = _combinations(rows, [*others, *axes, name])
        if more > combinations:
            axes, combinations = [*axes, name], more
    few = len(rows) <= _MOST_POINTS
    if few and not axes and len(numbers) > 1 and _distinct(rows[numbers[0]]) == len(rows):
        axes = numbers[:1]  # a curve over the first column
    return axes


def _can_be_axis(values: pd.Series[Any]) -> bool:
    distinct = _distinct(values)
    if distinct < 2 or pd.api.types.is_datetime64_any_dtype(values):
        return False
    if is_number(values):
        return True
    known = values.dropna().astype(str)
    return distinct <= _MOST_VALUES and int(known.str.len().max()) <= _LONGEST


def _distinct(values: pd.Series[Any]) -> int:
    return int(values.nunique())


def _combinations(rows: pd.DataFrame, names: Sequence[str]) -> int:
    return len(rows[list(names)].drop_duplicates()) if names else 1


@dataclass(frozen=True)
class Means:
    """The means of a number at P points.

    Args:
        points: ``[P, A]``, the values of the axes.
        mean: ``[P]``
        half: ``[P]``, half of the 95 % confidence interval over repetitions; NaN for one.
        runs: ``[P]``, the number of repetitions, or of rows if there are none.
        once: columns ``value``, ``point`` and ``run``: the number of each repetition, with the
            places of both.

    """

    points: pd.DataFrame
    mean: pd.Series[float]
    half: pd.Series[float]
    runs: pd.Series[int]
    once: pd.DataFrame


def means(rows: pd.DataFrame, by: Sequence[str], number: str, seeds: Sequence[str] = ()) -> Means:
    """Return the means of a number over repetitions at each value of ``by``, in order of the rows.

    Each repetition counts once: its rows are averaged first. Without repetitions, rows of the same
    point are averaged, and there is no interval. Only finite numbers count. Without ``by``, all
    rows are one point.
    """
    values = as_numbers(rows[number])
    values = values[np.isfinite(values)]
    known = rows.loc[values.index]
    keys = [known[name] for name in by] or [pd.Series(0, known.index)]
    keys = [key.rename(place) for place, key in enumerate(keys)]
    levels = list(range(len(keys)))
    repeated = [known[name].rename(f"seed {place}") for place, name in enumerate(seeds)]
    once = values.groupby([*keys, *repeated], sort=False, dropna=False, observed=True).mean()
    grouped = once.groupby(level=levels, sort=False, dropna=False)
    places = grouped.ngroup().to_numpy()
    run = np.zeros(len(once), int)
    if seeds:
        several = [f"seed {place}" for place in range(len(seeds))]
        run = once.groupby(level=several, sort=False, dropna=False).ngroup().to_numpy()
    counts = grouped if seeds else values.groupby(keys, sort=False, dropna=False, observed=True)
    mean, runs = grouped.mean(), counts.size()
    half = half_width(grouped.std(ddof=1), runs if seeds else np.ones(len(runs)))
    points = mean.index.to_frame(index=False)
    points = points.set_axis(list(by), axis=1) if by else points.iloc[:, :0]
    mean, runs = mean.reset_index(drop=True), runs.reset_index(drop=True)
    detail = pd.DataFrame({"value": once.to_numpy(), "point": places, "run": run})
    return Means(points, mean, pd.Series(half, mean.index, dtype=float), runs, detail)


def point_label(values: Mapping[str, Any]) -> str:
    """Return a point for readers: ``transformer, learning_rate=0.01``; texts stand for themselves.

    A dotted key is cut to its last part if no other one ends with it.
    """
    lasts = [name.rpartition(".")[2] for name in values]
    parts = []
    for name, value in values.items():
        last = name.rpartition(".")[2]
        key = last if lasts.count(last) == 1 else name
        text = value_label(value)
        word = isinstance(value, str) and not _is_numeric_text(value)
        parts.append(text if word else f"{key}={text}")
    return ", ".join(parts)


def value_label(value: Any) -> str:
    """Return a value of an axis for readers."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, Real) and not math.isnan(float(value)):
        return f"{float(value):.6g}"
    if value is None or isinstance(value, Real) or value is pd.NaT or value is pd.NA:
        return "none"
    return printable(str(value))


def _is_numeric_text(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return value in ("true", "false", "null")
    return True
