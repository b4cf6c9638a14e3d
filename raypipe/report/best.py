"""Which result is best: roles of a table's columns, means over repetitions, ranking of points.

Every view of a run (report, ``show``, ``ls``, ``compare``, the end line, Python) asks this module.
Roles follow from the table's declaration where it names them, otherwise from the rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED, is_seed, text_value
from raypipe.redaction import printable, without_credentials
from raypipe.report.formatting import heading, listed, with_unit
from raypipe.report.variants import Tables, variants_of
from raypipe.stats import half_width, ranked
from raypipe.store.run_status import KeyResult
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
_ROUNDING = 1e-9  # relative difference that is none
#: points as good as the best, or behind it, that are named
MOST_NAMED = 4


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


@dataclass(frozen=True)
class Rival:
    """A point that the best one is compared with: a baseline, or the second best.

    ``gain`` is how much better the best point is, and ``half`` half of its 95 % interval, NaN
    without repetitions. Repetitions with the same seed are paired: what they share is not a
    difference of the points.
    """

    label: str
    mean: float
    gain: float
    half: float = math.nan

    @property
    def is_tested(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.half)

    @property
    def may_be_chance(self) -> bool:
        """Whether the interval of the gain includes zero."""
        return abs(self.gain) <= self.half


@dataclass(frozen=True)
class Ranked:
    """A point with its mean over repetitions: its values by axis, none without axes."""

    values: Mapping[str, Any]
    mean: float
    runs: int

    @property
    def label(self) -> str:
        """The point for readers."""
        return without_credentials(point_label(self.values))


@dataclass(frozen=True)
class Headline:
    """The best point of a table by a number.

    Args:
        table: name of the table.
        column: the number.
        group: the values of the columns that separate what is not comparable, or empty.
        ranking: the first points, the best ones first; ``runs`` is 1 without repetitions.
        ties: how many of them are as good as the best.
        half: half of the 95 % confidence interval of the best mean; NaN for one repetition.
        points: the compared points by axis, without baselines.
        baseline: the strongest baseline.
        second: the second best point.
        repeats: the setting with the number of repetitions, or empty.

    """

    table: str
    column: Column
    group: str
    ranking: Sequence[Ranked]
    ties: int
    half: float
    points: pd.DataFrame
    baseline: Rival | None = None
    second: Rival | None = None
    repeats: str = ""

    @property
    def metric(self) -> str:
        """The table and the column."""
        return f"{self.table}.{self.column.name}"

    @property
    def label_of_metric(self) -> str:
        """The table and the column, with the group."""
        return self.metric + (f" ({self.group})" if self.group else "")

    @property
    def values(self) -> Mapping[str, Any]:
        """The best point by axis; the first one if others are as good."""
        return self.ranking[0].values

    @property
    def mean(self) -> float:
        """The mean of the best point over its repetitions."""
        return self.ranking[0].mean

    @property
    def runs(self) -> int:
        """The number of repetitions of the best point."""
        return self.ranking[0].runs

    @property
    def name(self) -> str:
        """The number for readers, with its group."""
        return heading(self.column.name) + (f" ({self.group})" if self.group else "")

    @property
    def label(self) -> str:
        """The number for readers, with its unit and the better direction."""
        column = self.column
        name = heading(column.name)
        return with_unit(name, column.name, column.unit, column.better, self.group)

    @property
    def leaders(self) -> str:
        """The best point, and those that are as good; of many the first ones, and their number."""
        names = [each.label for each in self.ranking[: self.ties]]
        if len(names) > MOST_NAMED:
            names = [*names[: MOST_NAMED - 1], f"{len(names) - MOST_NAMED + 1} more"]
        return listed(names) if all(names) else ""

    @property
    def text(self) -> str:
        """The best points with the number of repetitions; empty for one row alone."""
        repeated = f"mean of {self.runs}" if self.runs > 1 else ""
        return ", ".join(filter(None, [without_credentials(self.group), self.leaders, repeated]))

    @property
    def key_result(self) -> KeyResult:
        """The result as a run's status has it, and the end of a command prints it."""
        column = self.column
        return KeyResult(self.table, column.name, self.mean, column.better, self.text)


@dataclass(frozen=True)
class Results:
    """A table of the experiment with its plain rows, joined with the values of the matrix."""

    table: Table
    rows: pd.DataFrame
    axes: Sequence[str] | None = None
    seed: str | None = None

    @cached_property
    def shape(self) -> Shape:
        """The roles of its columns."""
        return shape_of(self.table, self.rows, self.axes, self.seed)

    @property
    def own(self) -> pd.DataFrame:
        """The rows that are not of a baseline."""
        return self.rows[~is_baseline(self.table, self.rows[list(self.shape.axes)])]

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best point by each number that can be better, for each group."""
        return headlines(self.table, self.rows, self.shape)


def joined(table: Table, rows: pd.DataFrame, tables: Tables) -> Results:
    """Return rows with a column for each key of the matrix that they depend on; keys are axes.

    In a table of calls null may be an argument, and is a value of an axis like others. In other
    tables a missing value says that the axis does not apply.
    """
    variants = variants_of(tables)
    for name in table.axes if table.open else ():
        if name in rows.columns and rows[name].isna().any() and rows[name].notna().any():
            values = rows[name].astype(object)
            rows = rows.assign(**{name: values.where(values.notna(), "null")})
    if VARIANT.name not in rows.columns or not variants:
        return Results(table, plain(rows))
    names = rows[VARIANT.name].astype(str)
    own: tuple[str, ...] = table.axes
    if not own:
        own = shape_of(table, plain(rows[names == names.iloc[0]])).axes
    keys = list(dict.fromkeys(key for name in names.unique() for key in variants.get(name, {})))
    if table.open:  # its axes are the arguments that the keys vary
        keys = [key for key in keys if key.removeprefix("arguments.") not in table.axes]
    columns = {
        MATRIX_SEED if key == SEED else key: _column(names, variants, key)
        for key in keys
        if key not in rows.columns or key == SEED
    }
    compared = [key for key in columns if key != MATRIX_SEED and not is_seed(key)]
    return Results(table, plain(rows.assign(**columns)), [*own, *compared])


def _column(
    names: pd.Series[str], variants: Mapping[str, Mapping[str, str]], key: str
) -> list[Any]:
    """Return the value of a key for each row: numbers if all values are, otherwise texts."""
    texts = {name: values[key] for name, values in variants.items() if key in values}
    values = {name: text_value(text) for name, text in texts.items()}
    are_numbers = all(
        isinstance(value, int | float) and not isinstance(value, bool)
        for value in values.values()
        if value is not None
    )
    chosen: Mapping[str, Any] = values if are_numbers else texts
    return [chosen.get(name) for name in names]


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
        if name in columns and (name == seed or (name not in given and rows[name].nunique() > 1))
    )
    if axes is None and not table.axes:
        texts = any(is_long(rows[name]) for name in columns)  # what else a row says is about them
        given = [] if texts else _found_axes(rows, columns, declared, (*seeds, *groups))
    varied = tuple(
        name
        for name in dict.fromkeys(given)
        if name in columns and name not in (*seeds, *groups) and rows[name].nunique() > 1
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
    most = min(_MOST_VALUES, len(rows) // 2)
    repeating = [name for name in numbers if rows[name].nunique() <= most]
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
    if few and not axes and len(numbers) > 1 and rows[numbers[0]].nunique() == len(rows):
        axes = numbers[:1]  # a curve over the first column
    return axes


def _can_be_axis(values: pd.Series[Any]) -> bool:
    distinct = values.nunique()
    if distinct < 2 or pd.api.types.is_datetime64_any_dtype(values):
        return False
    known = values.dropna().astype(str)
    few = distinct <= _MOST_VALUES and int(known.str.len().max()) <= _LONGEST
    return is_number(values) or few


def _combinations(rows: pd.DataFrame, names: Sequence[str]) -> int:
    return len(rows[list(names)].drop_duplicates()) if names else 1


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


def headlines(table: Table, rows: pd.DataFrame, shape: Shape) -> list[Headline]:
    """Return the best point by each number whose column says what is better, for each group.

    They are of the rows that :attr:`Table.headline` selects.
    """
    for name, value in table.headline.items():
        if name in rows.columns and (rows[name] == value).any():
            rows = rows[rows[name] == value]
    if table.references:
        rows = rows[~rows[list(table.axes)].isin(list(table.references)).any(axis=1)]
    measured = [column for column in shape.numbers if column.better]
    return [
        found
        for group, part in _groups(rows, shape.groups)
        for column in measured
        if (found := best_point(table, column, group, part, shape)) is not None
    ]


def _groups(rows: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield the values of the columns that separate what is not comparable, with their rows."""
    varied = [name for name in names if rows[name].nunique() > 1]
    if not varied:
        yield "", rows
        return
    for values, part in rows.groupby(varied, sort=False, dropna=False):
        yield point_label(dict(zip(varied, values, strict=True))), part


def is_baseline(table: Table, points: pd.DataFrame) -> pd.Series[bool]:
    """Whether each point is a baseline or a reference, and not a contender."""
    return points.isin([*table.baselines, *table.references]).any(axis=1)


def best_point(
    table: Table, column: Column, group: str, rows: pd.DataFrame, shape: Shape
) -> Headline | None:
    """Return the best point by a number, with its rivals; None if no value is finite."""
    found = means(rows, shape.axes, column.name, shape.seeds)
    if not shape.axes and not shape.seeds and len(rows) > 1:  # each row is a point
        numbered = rows.assign(row=np.arange(len(rows)) + 1)
        found = means(numbered, ["row"], column.name)
    baseline = is_baseline(table, found.points)
    if baseline.all():
        baseline[:] = False
    rivals, _ = _ranked(found, column, baseline)
    contenders, ties = _ranked(found, column, ~baseline)
    if not contenders:
        return None

    def at(place: int) -> Ranked:
        runs = int(found.runs[place]) if shape.seeds else 1
        return Ranked(dict(found.points.loc[place]), float(found.mean[place]), runs)

    ranking = [at(place) for place in contenders[: ties + MOST_NAMED]]
    baselines = [
        _rival(column, rows, shape, ranking[0], at(place), table.baselines) for place in rivals[:1]
    ]
    seconds = [_rival(column, rows, shape, ranking[0], each) for each in ranking[1:2]]
    return Headline(
        table=table.name,
        column=column,
        group=group,
        ranking=ranking,
        ties=ties,
        half=float(found.half[contenders[0]]),
        points=found.points[~baseline],
        baseline=next(iter(baselines), None),
        second=next(iter(seconds), None),
        repeats=table.repeats,
    )


def _ranked(found: Means, column: Column, chosen: pd.Series[bool]) -> tuple[list[int], int]:
    """Return the places of the chosen points by :func:`raypipe.stats.ranked`."""
    once = found.once[chosen.to_numpy()[found.once["point"]]]
    return ranked(once["value"], once["point"], once["run"], column.better)


def _rival(
    column: Column,
    rows: pd.DataFrame,
    shape: Shape,
    best: Ranked,
    other: Ranked,
    names: Sequence[str] = (),
) -> Rival:
    """Return a point with the gain of the best one, paired by the seeds that both have.

    A point without common seeds, such as a baseline that was computed once, counts as its mean.
    A baseline is called by its name alone.
    """
    shown = {axis: value for axis, value in other.values.items() if value in names}
    label = point_label(shown) if names else other.label
    sign = -1 if column.better == "lower" else 1
    if not shape.seeds or not best.values:
        return Rival(label, other.mean, sign * (best.mean - other.mean))
    first, second = (_by_seed(column, rows, shape, each.values) for each in (best, other))
    common = first.index.intersection(second.index)
    paired = first[common] - second[common] if len(common) > 1 else first - second.mean()
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        half = float(half_width(paired.std(ddof=1), len(paired)))
    if half < _ROUNDING * float(first.abs().max()):
        half = 0.0
    return Rival(label, other.mean, sign * float(paired.mean()), half)


def _by_seed(
    column: Column, rows: pd.DataFrame, shape: Shape, values: Mapping[str, Any]
) -> pd.Series[float]:
    """Return the mean of a number for each repetition of a point."""
    own = pd.Series(data=True, index=rows.index)
    for name, value in values.items():
        own &= rows[name].isna() if pd.isna(value) else rows[name] == value
    known = as_numbers(rows.loc[own, column.name])
    known = known[np.isfinite(known)]
    seeds = [rows.loc[known.index, name] for name in shape.seeds]
    return known.groupby(seeds, sort=False, dropna=False).mean()


def point_label(values: Mapping[str, Any]) -> str:
    """Return a point for readers: ``transformer, learning_rate=0.01``; texts stand for themselves.

    A dotted key is cut to its last part if no other one ends with it.
    """
    names = short_keys(list(values))
    parts = []
    for name, value in values.items():
        text = value_label(value)
        word = isinstance(value, str) and not _is_numeric_text(value)
        parts.append(text if word else f"{names[name]}={text}")
    return ", ".join(parts)


def short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each dotted key, or all of it where another one ends with it."""
    lasts = [key.rpartition(".")[2] for key in keys]
    return {
        key: last if lasts.count(last) == 1 else key for key, last in zip(keys, lasts, strict=True)
    }


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
