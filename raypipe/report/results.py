"""Results of a run: its points and curves, which of them is best, and how certain that is.

Every view of a run (report, ``show``, ``ls``, ``compare``, the end line, Python) asks this module.
Roles of columns follow from the declaration of their table where it names them, otherwise from the
rows. Nothing here draws.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raypipe.config.matrix import SEED, is_seed, text_value
from raypipe.config.yaml_text import load_yaml
from raypipe.errors import ConfigError
from raypipe.redaction import printable, without_credentials
from raypipe.report.formatting import counted, heading, listed, with_unit
from raypipe.report.measures import (
    PREFIX,
    REPEATED,
    held_out_columns,
    monitors_of,
    training_measures,
)
from raypipe.stats import half_width, ranked, runs_needed
from raypipe.store.run_directory import RunDirectory
from raypipe.store.run_status import KeyResult
from raypipe.store.tables import ADDED, VARIANT, Column, Table, read_arrow

if TYPE_CHECKING:
    from raypipe.report.parts import Section

Tables = Mapping[str, pd.DataFrame]

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
_NUMERIC = ("integer", "floating", "mixed-integer-float")  # of pandas
_SCALARS = (str, Real, pd.Timestamp, type(None))
_ROUNDING = 1e-9  # relative difference that is none
_MOST_ROWS = 3  # with a number that is not finite that are named
_DIRECTIONS: Mapping[str, Any] = {"min": "lower", "max": "higher"}
#: the stage of a trial of a sweep; ``trained_stage`` is the stage that it trained
SWEEP = "sweep"
SPEED = Column("samples_per_s", "real", "", better="higher")
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

    @cached_property
    def shape(self) -> Shape:
        """The roles of its columns."""
        return shape_of(self.table, self.rows, self.axes)

    @property
    def own(self) -> pd.DataFrame:
        """The rows that are not of a baseline."""
        return self.rows[~is_baseline(self.table, self.rows[list(self.shape.axes)])]

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best point by each number that can be better, for each group."""
        return headlines(self.table, self.rows, self.shape)


def variants_of(tables: Tables) -> dict[str, dict[str, str]]:
    """Return the values of each variant of a matrix by key, as text."""
    table = tables.get("variants", pd.DataFrame({"variant": [], "key": [], "value": []}))
    texts = table[["variant", "key", "value"]].astype(str)
    return {str(name): dict(zip(own["key"], own["value"], strict=True))
            for name, own in texts.groupby("variant", sort=False)}  # fmt: skip


def joined(table: Table, rows: pd.DataFrame, tables: Tables) -> Results:
    """Return rows with a column for each key of the matrix that they depend on; keys are axes.

    In a table of calls null may be an argument, and is a value of an axis like others. In other
    tables a missing value says that the axis does not apply. A key has numbers if all of its values
    are.
    """
    variants = variants_of(tables)
    for name in table.axes if table.open else ():
        if name in rows.columns and rows[name].isna().any() and rows[name].notna().any():
            values = rows[name].astype(object)
            rows = rows.assign(**{name: values.where(values.notna(), "null")})
    if VARIANT.name not in rows.columns or not variants:
        return Results(table, plain(rows))
    names = rows[VARIANT.name].astype(str)
    own = table.axes or shape_of(table, plain(rows[names == names.iloc[0]])).axes
    columns: dict[str, list[Any]] = {}
    for key in dict.fromkeys(key for name in names.unique() for key in variants.get(name, {})):
        is_argument = table.open and key.removeprefix("arguments.") in table.axes
        if not is_argument and (key == SEED or key not in rows.columns):
            texts = [variants.get(name, {}).get(key) for name in names]
            parsed = [None if text is None else text_value(text) for text in texts]
            is_numeric = all(type(value) in (int, float, type(None)) for value in parsed)
            columns[MATRIX_SEED if key == SEED else key] = parsed if is_numeric else texts
    compared = [key for key in columns if key != MATRIX_SEED and not is_seed(key)]
    return Results(table, plain(rows.assign(**columns)), [*own, *compared])


def plain(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows with a plain index and names, and any value that is not a scalar as its text."""
    rows = rows.reset_index(drop=True).rename(columns=str)
    rows = rows.loc[:, ~rows.columns.duplicated()]
    for name in rows.columns:
        if rows[name].dtype == object:
            plain_values = rows[name].map(lambda v: v if isinstance(v, _SCALARS) else str(v))
            rows = rows.assign(**{name: plain_values.astype(object)})
    return rows


def shape_of(table: Table, rows: pd.DataFrame, axes: Sequence[str] | None = None) -> Shape:
    """Return the roles of the columns of plain rows.

    Args:
        table: the declaration; it may lack columns of the rows.
        rows: as :func:`plain` returns them.
        axes: the columns that were varied; by default those that the table declares, otherwise
            those that tell the rows apart; none of a table of long texts.

    """
    columns = [name for name in rows.columns if name not in ADDED]
    declared = {column.name: column for column in table.columns}
    groups = tuple(name for name in table.groups if name in columns)
    given = list(table.axes if axes is None else axes)
    of_matrix = [name for name in columns if "." in name and is_seed(name)]
    several = rows[columns].nunique()
    seeds = tuple(
        name
        for name in (*_REPETITIONS, *of_matrix)
        if name in columns and name not in given and several[name] > 1
    )
    is_open = axes is None and not table.axes
    if is_open and not any(is_long(rows[name]) for name in columns):
        measures = {name for name, column in declared.items() if column.better}
        given = _found_axes(rows.drop(columns=[*ADDED, *measures], errors="ignore"),
                            [*seeds, *groups])  # fmt: skip
    varied = tuple(
        name
        for name in dict.fromkeys(given)
        if name in columns and name not in (*seeds, *groups) and several[name] > 1
    )
    taken = {*given, *seeds, *groups, *_REPETITIONS, *of_matrix}
    free = (name for name in columns if name not in taken and is_number(rows[name]))
    numbers = [declared.get(name, Column(name, "real", "")) for name in free]
    if table.open:  # what it declares is about the call, and shown if nothing was returned
        numbers = [each for each in numbers if each.better or each.name not in declared] or numbers
    numbers.sort(key=lambda column: not column.better)
    return Shape(varied, groups, seeds, tuple(numbers))


def _found_axes(rows: pd.DataFrame, taken: Sequence[str]) -> list[str]:
    """Return the columns that tell the rows apart: texts first, then numbers that repeat."""
    several = rows.nunique()
    free = [name for name in map(str, rows) if name not in taken and several[name] > 1
            and not pd.api.types.is_datetime64_any_dtype(rows[name])]  # fmt: skip
    numbers = [name for name in free if is_number(rows[name])]
    texts = [name for name in free if name not in numbers and several[name] <= _MOST_VALUES
             and not is_long(rows[name], _LONGEST)]  # fmt: skip
    most = min(_MOST_VALUES, len(rows) // 2)
    axes: list[str] = []
    for name in (*texts, *(name for name in numbers if several[name] <= most)):
        count = _combinations(rows, [*taken, *axes])
        if count == len(rows) or len(axes) == _MOST_AXES:
            break
        if _combinations(rows, [*taken, *axes, name]) > count:
            axes.append(name)
    if not axes and len(numbers) > 1 and several[numbers[0]] == len(rows) <= _MOST_POINTS:
        return numbers[:1]  # a curve over the first column
    return axes


def _combinations(rows: pd.DataFrame, names: Sequence[str]) -> int:
    return len(rows[list(names)].drop_duplicates()) if names else 1


def is_number(values: pd.Series[Any]) -> bool:
    """Whether a column has numbers, and not only missing values."""
    known = values.dropna()
    return bool(len(known)) and pd.api.types.infer_dtype(known) in _NUMERIC


def is_long(values: pd.Series[Any], length: int = LONG) -> bool:
    """Whether a column has texts longer than this number of characters, by its first rows."""
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
        found.points[~baseline], baseline_rival, second, table.repeats,
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


def varied(tables: Tables) -> dict[str, list[str]]:
    """Return the values of each varied key of a matrix, as text; seeds are among them."""
    variants = pd.DataFrame.from_dict(variants_of(tables), orient="index")
    return {str(key): list(values.dropna().unique()) for key, values in variants.items()}


def points(tables: Tables) -> list[dict[str, str]]:
    """Return the values of every point by key; a variant within another one is not a point."""
    values = list(variants_of(tables).values())
    # what variants with more keys have of fewer ones
    parts = {
        keys: {
            frozenset((key, other[key]) for key in keys) for other in values if keys < other.keys()
        }
        for keys in {frozenset(one) for one in values}
    }
    return [one for one in values if frozenset(one.items()) not in parts[frozenset(one)]]


def count_points(tables: Tables, *, seeds: bool) -> int:
    """Return the number of different points of a matrix apart from seeds, or of its seeds."""
    return len(
        {
            frozenset((key, value) for key, value in point.items() if is_seed(key) == seeds)
            for point in points(tables)
        }
    )


def seeds_needed(tables: Tables) -> int:
    """Return the seeds with which the paired tests can tell a winner on every axis of a matrix."""
    search = Searched.of(tables)
    left_out = search.keys if search is not None else ()
    counts = [len(v) for k, v in varied(tables).items() if not is_seed(k) and k not in left_out]
    most = max(counts, default=2)
    return runs_needed(most * (most - 1) // 2)


@dataclass(frozen=True)
class Searched:
    """A search: its points with a column per searched key, and its metrics."""

    points: pd.DataFrame
    keys: Sequence[str]
    metrics: Sequence[Column]

    @classmethod
    def of(cls, tables: Tables) -> Searched | None:
        """Return the search of a run; None if it has none."""
        table = tables.get("search", pd.DataFrame())
        if table.empty:
            return None
        values = [json.loads(text) for text in table["point"]]
        keys = list(dict.fromkeys(key for point in values for key in point))
        columns: dict[str, Any] = {key: [point.get(key) for point in values] for key in keys}
        modes = json.loads(table["objectives"].iloc[0])
        metrics = [Column(n, "real", "", better=_DIRECTIONS[mode]) for n, mode in modes.items()]
        columns |= {name: np.nan for name in modes if name not in table}  # nothing was measured
        return cls(plain(table.assign(**columns)), keys, metrics)

    @property
    def measured(self) -> pd.DataFrame:
        """The points with metrics."""
        return self.points[self.points["status"] == "succeeded"]

    @property
    def front(self) -> pd.DataFrame:
        """The points that meet all conditions and that no other one is better than."""
        on_front = self.points[self.points["on_front"].astype(bool)]
        return on_front.sort_values(self.metrics[0].name, kind="stable")

    @property
    def results(self) -> Results:
        """The points that meet all conditions as rows of a table with the metrics."""
        table = Table("search", "a point", tuple(self.metrics), axes=tuple(self.keys))
        feasible = self.measured[self.measured["feasible"].astype(bool)]
        return Results(table, plain(feasible.drop(columns=["number"])))

    @property
    def headlines(self) -> list[Headline]:
        """The best point by each metric, which meets all conditions."""
        results, found = self.results, []
        several = [key for key in self.keys if self.points[key].map(repr).nunique() > 1]
        # also where all points with a number are equal: a point is named, and counts once
        shape = replace(results.shape, axes=tuple(several or self.keys))
        for best in headlines(results.table, results.rows, shape):
            owner, _, rest = best.column.name.partition(".")
            shown, _, group = rest.removesuffix(")").partition(" (")
            column = replace(best.column, name=shown)
            found.append(replace(best, table=owner, column=column, group=group))
        return found


@dataclass(frozen=True)
class Swept:
    """The trials of one swept stage, and the recommended one.

    ``trials`` have a column per axis, its dotted key, and a speed unless the trial failed. Trials
    that were measured again occur once, with the medians. ``recommendation`` is the row of the
    table, empty without one.
    """

    stage: str
    axes: Sequence[str]
    trials: pd.DataFrame
    recommendation: Mapping[str, Any]
    metric: Column

    @property
    def chosen(self) -> str:
        """The id of the recommended trial; empty without one."""
        return str(self.recommendation.get("trial_id", ""))

    @property
    def headline(self) -> Headline | None:
        """The recommended point, which need not be the one with the best number."""
        chosen = self.trials[self.trials["trial_id"] == self.chosen]
        value = float(self.recommendation.get("value", np.nan))
        if chosen.empty or not np.isfinite(value):
            return None
        values = {axis: chosen[axis].iloc[0] for axis in self.axes}
        ranking, points = [Ranked(values, value, 1)], pd.DataFrame([values])
        return Headline("trials", self.metric, self.stage, ranking, 1, np.nan, points)


def sweeps(tables: Tables) -> list[Swept]:
    """Return the sweeps of a run, in the order of the table ``trials``."""
    trials, axes = (tables.get(name, pd.DataFrame()) for name in ("trials", "sweep_points"))
    if trials.empty or axes.empty:
        return []
    keys = [str(name) for name in axes if "." in str(name)]
    swept = trials.merge(axes[["trial_id", *(axes.columns.difference(trials.columns))]])
    best = tables.get("recommendations", pd.DataFrame({"trained_stage": []}))
    found = []
    for stage, own in swept[swept["stage"] == SWEEP].groupby("trained_stage", sort=False):
        several = [key for key in keys if own[key].map(repr).nunique() > 1]
        rows = best[best["trained_stage"] == stage]
        row = {} if rows.empty else dict(rows.iloc[0].dropna())
        name = str(row.get("metric", SPEED.name))
        better = _DIRECTIONS[row.get("mode", "max" if name == SPEED.name else "min")]
        metric = Column(name, "real", "", better=better)
        found.append(Swept(str(stage), several, _medians(own), row, metric))
    return found


def _medians(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials without repeated measurements, with the medians over these.

    A trial that failed has no speed.
    """
    has_ended = trials["status"].isin(["succeeded", "interrupted"])
    numbers = trials[[name for name in REPEATED if name in trials]].apply(as_numbers)
    numbers[SPEED.name] = numbers[SPEED.name].where(has_ended)
    repeats = trials["repeats"].astype(object)  # a column of numbers if all are missing
    medians = numbers.groupby(repeats.where(repeats.notna(), trials["trial_id"])).transform(
        "median"
    )
    return trials.assign(**medians)[repeats.isna()].reset_index(drop=True)


@dataclass(frozen=True)
class EvaluationCurve:
    """The values of a held-out metric in one training run, by step.

    Args:
        stage: the stage of the run.
        trial: its trial_id.
        column: the metric, such as ``eval_loss``; ``better`` may be empty.
        steps: ``[n]``, rising.
        values: ``[n]``, finite.
        baseline: name of the same metric of a baseline, or empty.
        baseline_values: ``[n]``, its values, NaN where there are none.
        kept: the position of the model that the run kept: the last one, unless held-out data chose.
        chosen: whether held-out data chose the model.

    """

    stage: str
    trial: str
    column: Column
    steps: NDArray[np.floating[Any]]
    values: NDArray[np.floating[Any]]
    baseline: str
    baseline_values: NDArray[np.floating[Any]]
    kept: int
    chosen: bool

    @property
    def sign(self) -> int:
        """The factor that makes lower values better."""
        return -1 if self.column.better == "higher" else 1

    @property
    def best(self) -> int:
        """The position of the best value; the first of equal ones."""
        return int((self.sign * self.values).argmin())

    def beats_baseline(self, place: int) -> bool:
        """Whether a value is better than that of the baseline, if that has one."""
        gain = self.sign * (self.baseline_values[place] - self.values[place])
        return not np.isfinite(gain) or bool(gain > 0)


def evaluations(
    tables: Tables, metrics: Sequence[Column], monitors: Mapping[str, str]
) -> list[EvaluationCurve]:
    """Return every held-out metric of every training run, the most important metric first.

    Trials of a sweep are left out.

    Args:
        tables: of the run.
        metrics: declarations of the columns ``eval_...``; others are taken from their names.
        monitors: the monitored columns (:func:`raypipe.report.measures.monitors_of`).

    """
    trials = tables.get("trials", pd.DataFrame()).reindex(columns=["trial_id", "best_step"])
    chosen = dict(trials.dropna().to_numpy())
    steps = staged(tables, "steps").sort_values("step", kind="stable")
    found = []
    for column in held_out_columns(map(str, steps), metrics, monitors):
        known = steps[np.isfinite(as_numbers(steps[column.name]))]
        rival = column.baseline if column.baseline in steps else ""
        for (stage, trial), own in known.groupby(["stage", "trial_id"], sort=False):
            at, values = (as_numbers(own[n]).to_numpy() for n in ("step", column.name))
            others = as_numbers(own[rival]).to_numpy() if rival else np.full(len(own), np.nan)
            places = np.flatnonzero(at == chosen.get(trial, np.nan))
            kept = int(places[0]) if len(places) else len(at) - 1
            baseline, about = heading(rival.removeprefix(PREFIX)), (str(stage), str(trial), column)
            curve = EvaluationCurve(*about, at, values, baseline, others, kept, trial in chosen)
            found.append(curve)
    return found


def staged(tables: Tables, name: str) -> pd.DataFrame:
    """Return the rows that are not of sweeps; the table ``trials`` has the stage of a row."""
    table = tables.get(name, pd.DataFrame())
    if table.empty:
        return pd.DataFrame(columns=["stage", "trial_id", "step"])
    if "stage" not in table:
        trials = tables.get("trials", pd.DataFrame({"trial_id": [], "stage": []}))
        stages = table["trial_id"].map(dict(zip(trials["trial_id"], trials["stage"], strict=True)))
        names = table["trial_id"].astype(str).str.partition("@")[0]
        table = table.assign(stage=stages.where(stages.notna(), names))
    return table[table["stage"] != SWEEP]


@dataclass(frozen=True)
class Declarations:
    """An experiment's own description of itself.

    Args:
        sentence: what it does, or empty.
        tables: its tables.
        core: the tables that every run has by name, with the columns that its trainings add; a
            table that is in neither is undeclared. None if they are not known.
        asked: returns the units that the newest command asked for, if that differs by command.

    """

    sentence: str = ""
    tables: Sequence[Table] = ()
    core: Mapping[str, Table] | None = None
    asked: Callable[[], Collection[str]] | None = None


@dataclass(frozen=True)
class RunResults:
    """A run: its tables, its experiment, the command that continues it, and its configuration.

    ``sections`` are the experiment's own. ``directory`` tells missing numbers from NaN, which are
    the same in the tables.
    """

    tables: Tables
    title: str = ""
    command: str = ""
    configuration: str = ""
    declared: Declarations = field(default_factory=Declarations)
    sections: Sequence[Section] = ()
    directory: RunDirectory | None = None

    def core(self, name: str) -> Table:
        """Return the declaration of a table that every run has; empty if it is not known."""
        return (self.declared.core or {}).get(name, Table(name, ""))

    @cached_property
    def bests(self) -> list[Headline]:
        """The best results, the most important first: all views of a run name these.

        They are those of :attr:`headlines`; without any, those that its sweeps recommend.
        """
        return self.headlines or self.recommended

    @property
    def key_result(self) -> KeyResult | None:
        """The first of the best results, which stands for the run; None without any."""
        return self.bests[0].key_result if self.bests else None

    @cached_property
    def headlines(self) -> list[Headline]:
        """The best results of its search and of its tables; without any, of its trainings."""
        return self.measured or self.training_headlines

    @cached_property
    def measured(self) -> list[Headline]:
        """The best points of a search and of all tables of the experiment."""
        search = Searched.of(self.tables)
        sought = search.headlines if search is not None else []
        named = {best.metric for best in sought}
        own = [best for results in self.results for best in results.headlines]
        return [*sought, *(best for best in own if best.metric not in named)]

    @cached_property
    def results(self) -> list[Results]:
        """The tables of the experiment that have rows."""
        declared = list(self.declared.tables)
        if self.declared.core is not None:
            known = {table.name for table in declared} | self.declared.core.keys()
            declared += [Table(name, "") for name in self.tables if name not in known]
        written = [table for table in declared if len(self.tables.get(table.name, ()))]
        return [joined(table, self.tables[table.name], self.tables) for table in written]

    @cached_property
    def trained(self) -> list[Results]:
        """Its trainings with the number that stands for them; of a matrix those of each stage."""
        trials = self.tables.get("trials", pd.DataFrame())
        if not {"trial_id", "stage", "status"} <= {*trials.columns}:
            return []
        done = trials[(trials["status"] == "succeeded") & (trials["stage"] != SWEEP)]
        key, stages = "trial_id", [("", done)]
        if self.varied:
            done = done[done["variant"].isin(list(variants_of(self.tables)))]
            key, stages = "variant", [(f"-{stage}", own) for stage, own in done.groupby("stage")]
        found = []
        for stage, own in stages:
            known = [str(column) for column in own if own[column].notna().any()]
            metrics = self.core("trials").columns
            for measure in training_measures(known, metrics, self.monitors)[:1]:
                axes = () if self.varied else (key,)
                table = Table(f"trials{stage}", "a training", (measure,), axes=axes)
                found.append(joined(table, own[[key, measure.name]], self.tables))
        return found

    @property
    def training_headlines(self) -> list[Headline]:
        """The best training; of a matrix the best point by each training stage."""
        found = [best for results in self.trained for best in results.headlines]
        return [replace(best, table="trials") for best in found]

    @cached_property
    def sweeps(self) -> list[Swept]:
        """The swept stages with their trials."""
        return sweeps(self.tables)

    @property
    def recommended(self) -> list[Headline]:
        """The recommended point of each swept stage."""
        return [best for sweep in self.sweeps if (best := sweep.headline) is not None]

    @cached_property
    def failures(self) -> pd.DataFrame:
        """The failed attempts of units that the newest command asked for, as far as it is known.

        A matrix asks for all of its units.
        """
        found = self.tables.get("failures", pd.DataFrame(columns=["stage", "unit", "kind"]))
        if self.declared.asked is None or self.varied:
            return found
        return found[found["unit"].isin(list(self.declared.asked()))]

    @cached_property
    def not_finite(self) -> list[str]:
        """How many results are NaN or infinite, and where; they are in no mean and never best."""
        return [text for results in self.results for text in self._not_finite(results)]

    def _not_finite(self, results: Results) -> Iterator[str]:
        table, rows, shape = results.table, results.rows, results.shape
        named = [column.name for column in table.columns if column.better]
        if table.open and not named:
            named = [column.name for column in shape.numbers]
        where = [name for name in (*shape.groups, *shape.axes, *shape.seeds)
                 if rows[name].nunique(dropna=False) > 1]  # fmt: skip
        for name in (name for name in named if name in rows):
            values = as_numbers(rows[name])
            is_bad = ~np.isfinite(values)
            if is_bad.any() and self.directory is not None:
                cells = read_arrow(self.directory, table.name).column(name)
                is_bad &= cells.is_valid().to_numpy()  # NaN is a value
            texts, bad = [], values[is_bad]
            for kind, own in bad.groupby(bad.map(str), sort=False):
                labels = [without_credentials(point_label(dict(rows.loc[at, where])))
                          or f"row {at + 1}" for at in own.index[:_MOST_ROWS]]  # fmt: skip
                more = len(own) - len(labels)
                labels += [f"{more} more"] * (more > 0)
                texts.append(f"{'NaN' if kind == 'nan' else kind} at {listed(labels)}")
            if texts:
                count = f"{'any' if is_bad.all() else len(bad)} of {counted(len(rows), 'row')}"
                yield f"{table.name}.{name} is not finite in {count}: {'; '.join(texts)}."

    @property
    def beaten(self) -> list[str]:
        """A sentence for each result that is not better than a baseline of the same run.

        The end of a command warns of them; in the report the headline numbers have the distance.
        """
        lost: dict[str, list[str]] = {}
        for best in self.measured:
            if best.baseline is not None and best.baseline.gain <= 0:
                subject = f"{best.leaders or 'The best row'} {'are' if best.ties > 1 else 'is'}"
                text = f"{subject} not better than the baseline {best.baseline.label} in"
                lost.setdefault(text, []).append(best.name)
        for each in self.evaluations:
            if each.column.better and not each.beats_baseline(each.best):
                text = f"{each.trial} is not better than the baseline {each.baseline} in"
                lost.setdefault(text, []).append(heading(each.column.name))
        return [f"{text} {listed(names)}." for text, names in lost.items()]

    @cached_property
    def nodes(self) -> pd.DataFrame:
        """The rows of the newest command in ``environment``, one per node; maybe none."""
        found = self.tables.get("environment", pd.DataFrame())
        if not {"started_at", "command_id"} <= {*found.columns}:
            return found
        known = found.dropna(subset="started_at").sort_values("started_at", kind="stable")
        newest = known["command_id"].iloc[-1:]
        return found[found["command_id"].isin(newest)].drop_duplicates("hostname")

    @cached_property
    def evaluations(self) -> list[EvaluationCurve]:
        """The held-out metrics of its trainings."""
        return evaluations(self.tables, self.core("trials").columns, self.monitors)

    @property
    def tested(self) -> list[str]:
        """The outcome of the experiment's own tests, in words.

        They are of one point, so there are none in a matrix, whose points have intervals over
        seeds.
        """
        return [] if self.varied else [text for each in self.sections for text in each.certainty]

    @cached_property
    def calls(self) -> tuple[int, int] | None:
        """How many of the calls that were asked for are stored, and how many were asked for.

        None for a matrix, and for an experiment that is not a function.
        """
        table = next((table for table in self.declared.tables if table.open), None)
        if table is None or self.declared.asked is None or self.varied:
            return None
        asked, rows = set(self.declared.asked()), self.tables.get(table.name)
        name = table.columns[0].name
        stored = set() if rows is None else {f"{table.name}/{call}" for call in rows[name]}
        return len(asked & stored), len(asked)

    @cached_property
    def varied(self) -> dict[str, list[str]]:
        """The values of each varied key of the matrix, as text; seeds are among them."""
        return varied(self.tables)

    @cached_property
    def monitors(self) -> dict[str, str]:
        """The monitored columns of its trainings and its sweep's metric, each with its mode."""
        return monitors_of(self.settings)

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """The resolved configuration; empty if it cannot be read."""
        found = None
        with suppress(ConfigError):
            found = load_yaml(self.configuration, "config.yaml")
        return found if isinstance(found, dict) else {}
