"""Points of a table: the roles of its columns, means over repetitions, and the best point.

Roles follow from the declaration of the table.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from raypipe.config.matrix import SEED, is_seed, text_value
from raypipe.redaction import printable, without_credentials
from raypipe.report.formatting import heading, listed, with_unit
from raypipe.stats import half_width, ranked
from raypipe.store.tables import ADDED, Column, Table

#: the column with the seed of a matrix, which is joined to the rows
MATRIX_SEED = "matrix seed"
#: columns that number the repetitions of a row, unless they are axes
_REPETITIONS = ("run", SEED, MATRIX_SEED)
_NUMERIC = ("integer", "floating", "mixed-integer-float")  # of pandas
_SCALARS = (str, Real, pd.Timestamp, type(None))
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
        points: the number of compared points, without baselines.
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
    points: int
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
        return with_unit(self.column.name, self.column.unit, self.column.better, self.group)

    @property
    def leaders(self) -> str:
        """The best point, and those that are as good; of many the first ones, and their number."""
        names = [each.label for each in self.ranking[: self.ties]]
        named = 1 if any(", " in name for name in names) else MOST_NAMED - 1
        if len(names) > named + 1:
            names = [*names[:named], f"{len(names) - named} more"]
        return listed(names) if all(names) else ""

    @property
    def text(self) -> str:
        """The best points with the number of repetitions; empty for one row alone."""
        repeated = f"mean of {self.runs}" if self.runs > 1 else ""
        return ", ".join(filter(None, [without_credentials(self.group), self.leaders, repeated]))

    @property
    def result(self) -> str:
        """The result in words: ``accuracy 0.931 (transformer, mean of 3)``."""
        return f"{self.column.name} {self.mean:.4g}" + (f" ({self.text})" if self.text else "")


@dataclass(frozen=True)
class Results:
    """A table of the experiment with its plain rows.

    The keys of the matrix on which the rows depend are joined to them, and are axes.
    """

    table: Table
    rows: pd.DataFrame

    @cached_property
    def shape(self) -> Shape:
        """The roles of its columns, of which the declaration may lack some."""
        table, rows = self.table, self.rows
        columns = [name for name in rows.columns if name not in ADDED]
        declared = {column.name: column for column in table.columns}
        counts = rows[columns].nunique().to_dict()
        several = {name for name, count in counts.items() if count > 1}
        groups = tuple(name for name in table.groups if name in columns)
        repetitions = (*_REPETITIONS, *(name for name in columns if "." in name and is_seed(name)))
        seeds = tuple(name for name in repetitions if name in several - {*table.axes})
        axes = tuple(name for name in dict.fromkeys(table.axes) if name in several - {*groups})
        taken = {*table.axes, *groups, *repetitions}
        free = (name for name in columns if name not in taken and is_number(rows[name]))
        numbers = [declared.get(name, Column(name, "real", "")) for name in free]
        if table.open:  # what it declares is about the call, and shown if nothing was returned
            returned = [each for each in numbers if each.better or each.name not in declared]
            numbers = returned or numbers
        numbers.sort(key=lambda column: not column.better)
        return Shape(axes, groups, seeds, tuple(numbers))

    @property
    def own(self) -> Results:
        """The results without the rows of a baseline."""
        is_own = ~is_baseline(self.table, self.rows[list(self.shape.axes)])
        return replace(self, rows=self.rows[is_own])

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best point by each number that can be better, for each group."""
        return headlines(self, self.shape)


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with a plain index and names, and any value that is not a scalar as its text."""
    rows = rows.reset_index(drop=True).rename(columns=str)
    rows = rows.loc[:, ~rows.columns.duplicated()]
    for name in rows.columns:
        if rows[name].dtype == object:
            plain_values = rows[name].map(lambda v: v if isinstance(v, _SCALARS) else str(v))
            rows = rows.assign(**{name: plain_values.astype(object)})
    return rows


def is_number(values: pd.Series[Any]) -> bool:
    """Whether a column has numbers, and not only missing values."""
    known = values.dropna()
    return bool(len(known)) and pd.api.types.infer_dtype(known) in _NUMERIC


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
    point, run = (
        known.groupby(list(names), sort=False, dropna=False, observed=True).ngroup() if names else 0
        for names in (by, seeds)
    )
    table = pd.DataFrame({"value": values, "point": point, "run": run})
    once = table.groupby(["point", "run"], sort=False)["value"].mean().reset_index()
    grouped = once.groupby("point")["value"]
    runs = (once if seeds else table).groupby("point").size()
    half = half_width(grouped.std(ddof=1), runs if seeds else np.ones(len(runs)))
    points = known[list(by)][~table["point"].duplicated()].reset_index(drop=True)
    return Means(points, grouped.mean(), pd.Series(half, runs.index, dtype=float), runs, once)


def headlines(results: Results, shape: Shape) -> list[Headline]:
    """Return the best point by each number whose column says what is better, for each group.

    They are of the rows that :attr:`Table.headline` selects.
    """
    table, rows = results.table, results.rows
    for name, value in table.headline.items():
        if name in rows.columns and (rows[name] == value).any():
            rows = rows[rows[name] == value]
    if table.references:
        rows = rows[~rows[list(table.axes)].isin(list(table.references)).any(axis=1)]
    measured = [column for column in shape.numbers if column.better]
    varied = [name for name in shape.groups if rows[name].nunique() > 1]
    found = list[Headline | None]()
    for values, part in rows.groupby(varied, sort=False, dropna=False) if varied else [((), rows)]:
        group = point_label(dict(zip(varied, values, strict=True)))
        found += [best_point(table, column, group, part, shape) for column in measured]
    return [best for best in found if best is not None]


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
    runs = found.runs if shape.seeds else pd.Series(1, found.runs.index)
    ranking = [
        Ranked(dict(found.points.loc[place]), float(found.mean[place]), int(runs[place]))
        for place in contenders[: ties + MOST_NAMED]
    ]
    second = baseline_rival = None
    if len(ranking) > 1:
        second = _rival(found, column, contenders, contenders[1], ranking[1].label)
    if rivals:
        values = dict(found.points.loc[rivals[0]])
        name = point_label({k: v for k, v in values.items() if v in table.baselines})
        baseline_rival = _rival(found, column, contenders, rivals[0], name)
    return Headline(
        table.name, column, group, ranking, ties, float(found.half[contenders[0]]),
        int((~baseline).sum()), baseline_rival, second, table.repeats,
    )  # fmt: skip


def _ranked(found: Means, column: Column, chosen: pd.Series[bool]) -> tuple[list[int], int]:
    """Return the places of the chosen points by :func:`raypipe.stats.ranked`."""
    once = found.once[chosen.to_numpy()[found.once["point"]]]
    return ranked(once["value"], once["point"], once["run"], column.better)


def _rival(found: Means, column: Column, order: Sequence[int], other: int, label: str) -> Rival:
    """Return a point with the gain of the first of an order, paired by the seeds that both have.

    A point without common seeds, such as a baseline that was computed once, counts as its mean.
    """
    by_run = found.once.set_index("run")
    first, second = (by_run.loc[by_run["point"] == place, "value"] for place in (order[0], other))
    common = first.index.intersection(second.index)
    paired = first[common] - second[common] if len(common) > 1 else first - second.mean()
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        half = float(half_width(paired.std(ddof=1), len(paired)))
    if half < _ROUNDING * float(first.abs().max()):
        half = 0.0
    sign = -1 if column.better == "lower" else 1
    return Rival(label, float(found.mean[other]), sign * float(paired.mean()), half)


def point_label(values: Mapping[str, Any]) -> str:
    """Return a point for readers: ``transformer, learning_rate=0.01``; texts stand for themselves.

    A dotted key is cut to its last part if no other one ends with it.
    """
    lasts = [name.rpartition(".")[2] for name in values]
    parts = []
    for (name, value), last in zip(values.items(), lasts, strict=True):
        text = value_label(value)
        word = isinstance(value, str) and isinstance(text_value(value), str)
        parts.append(text if word else f"{last if lasts.count(last) == 1 else name}={text}")
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
