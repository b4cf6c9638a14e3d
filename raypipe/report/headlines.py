"""Headline numbers of a table: the best point by each number that can be better, and its rivals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raypipe.redaction import without_credentials
from raypipe.report.formatting import cell, heading, number, plus_minus, with_unit
from raypipe.report.sections import Tile
from raypipe.report.table_shape import ADDED, Means, Shape, as_numbers, is_long, means, point_label
from raypipe.stats import half_width, ranked
from raypipe.store.run_status import KeyResult
from raypipe.store.tables import Column, Table

_MOST_RANGES = 4
_ROUNDING = 1e-9  # relative difference that is none
_MOST_NAMED = 4  # points as good as the best, or behind it
_LONGEST_NAME = 50  # characters; a longer text is not a name


@dataclass(frozen=True)
class Difference:
    """How much better a point is than another one: the mean, and half of its 95 % interval.

    ``half`` is NaN without repetitions. Repetitions with the same seed are paired: what they share
    is not a difference of the points.
    """

    mean: float
    half: float

    @property
    def is_known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.half)

    @property
    def may_be_chance(self) -> bool:
        """Whether the interval includes zero."""
        return self.is_known and abs(self.mean) <= self.half


_NONE = Difference(math.nan, math.nan)


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
        baseline: the strongest baseline, or empty; ``baseline_mean`` is NaN then.
        to_baseline: how much better it is than the baseline.
        to_runner_up: how much better it is than the second best point.
        repeats: the setting with the number of repetitions, or empty.

    """

    table: str
    column: Column
    group: str
    ranking: Sequence[Ranked]
    ties: int
    half: float
    points: pd.DataFrame
    baseline: str = ""
    baseline_mean: float = math.nan
    to_baseline: Difference = _NONE
    to_runner_up: Difference = _NONE
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
    def runner_up(self) -> str:
        """The second best point, or empty."""
        return self.ranking[1].label if len(self.ranking) > 1 else ""

    @property
    def runner_up_mean(self) -> float:
        """The mean of the second best point; NaN without one."""
        return self.ranking[1].mean if len(self.ranking) > 1 else math.nan

    @property
    def runner_up_values(self) -> Mapping[str, Any]:
        """The second best point, by axis."""
        return self.ranking[1].values if len(self.ranking) > 1 else {}

    @property
    def name(self) -> str:
        """The number for readers, with its group."""
        return heading(self.column.name) + (f" ({self.group})" if self.group else "")

    @property
    def point(self) -> str:
        """The best point for readers; empty without axes."""
        return self.ranking[0].label

    @property
    def is_shared(self) -> bool:
        """Whether other points are as good."""
        return self.ties > 1

    @property
    def leaders(self) -> str:
        """The best point, and those that are as good; of many the first ones, and their number."""
        names = [each.label for each in self.ranking[: self.ties]]
        if not all(names):
            return ""
        if len(names) > _MOST_NAMED:
            names = [*names[: _MOST_NAMED - 1], f"{len(names) - _MOST_NAMED + 1} more"]
        return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))

    @property
    def text(self) -> str:
        """The best points with the number of repetitions; empty for one row alone."""
        parts = [
            without_credentials(self.group),
            self.leaders,
            f"mean of {self.runs}" if self.runs > 1 else "",
        ]
        return ", ".join(filter(None, parts))

    @property
    def key_result(self) -> KeyResult:
        """The result as a run's status has it, and the end of a command prints it."""
        column = self.column
        return KeyResult(self.table, column.name, self.mean, column.better, self.text)

    @property
    def label(self) -> str:
        """The number for readers, with its unit and the better direction."""
        column = self.column
        name = heading(column.name)
        return with_unit(name, column.name, column.unit, column.better, self.group)

    @property
    def gain(self) -> float:
        """How much better than the strongest baseline; negative if worse, NaN without one."""
        sign = -1 if self.column.better == "lower" else 1
        return sign * (self.mean - self.baseline_mean)

    @property
    def value(self) -> str:
        """The mean, with its interval if there is one."""
        return with_interval(self.column.name, self.mean, self.half)


def with_interval(column: str, mean: float, half: float) -> str:
    """Return ``0.91 ± 0.02``, or the mean alone."""
    text = cell(column, mean)
    if not math.isfinite(half):
        return text
    return plus_minus(mean, half) if text == number(mean) else f"{text} ± {cell(column, half)}"


def headlines(table: Table, rows: pd.DataFrame, shape: Shape) -> list[Headline]:
    """Return the best point by each number whose column says what is better, for each group."""
    rows = headline_rows(table, rows)
    if table.references:
        rows = rows[~rows[list(table.axes)].isin(list(table.references)).any(axis=1)]
    measured = [column for column in shape.numbers if column.better]
    return [
        found
        for group, part in groups_of(rows, shape.groups)
        for column in measured
        if (found := _headline(table, column, group, part, shape)) is not None
    ]


def headline_rows(table: Table, rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that :attr:`Table.headline` selects."""
    for name, value in table.headline.items():
        if name in rows.columns and (rows[name] == value).any():
            rows = rows[rows[name] == value]
    return rows


def groups_of(rows: pd.DataFrame, names: Sequence[str]) -> Iterator[tuple[str, pd.DataFrame]]:
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


def _headline(
    table: Table, column: Column, group: str, rows: pd.DataFrame, shape: Shape
) -> Headline | None:
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

    ranking = [at(place) for place in contenders[: ties + _MOST_NAMED]]
    rival = at(rivals[0]) if rivals else None
    second = ranking[1] if len(ranking) > 1 else None
    return Headline(
        table=table.name,
        column=column,
        group=group,
        ranking=ranking,
        ties=ties,
        half=float(found.half[contenders[0]]),
        points=found.points[~baseline],
        baseline="" if rival is None else _rival_label(table, rival.values),
        baseline_mean=math.nan if rival is None else rival.mean,
        to_baseline=_difference(column, rows, shape, ranking[0], rival),
        to_runner_up=_difference(column, rows, shape, ranking[0], second),
        repeats=table.repeats,
    )


def _ranked(found: Means, column: Column, chosen: pd.Series[bool]) -> tuple[list[int], int]:
    """Return the places of the chosen points by :func:`raypipe.stats.ranked`."""
    once = found.once[chosen.to_numpy()[found.once["point"]]]
    return ranked(once["value"], once["point"], once["run"], column.better)


def _difference(
    column: Column,
    rows: pd.DataFrame,
    shape: Shape,
    one: Ranked,
    other: Ranked | None,
) -> Difference:
    """Return how much better one point is than another, paired by the seeds that both have.

    A point without common seeds, such as a baseline that was computed once, counts as its mean.
    """
    if not shape.seeds or other is None or not one.values or not other.values:
        return _NONE
    first, second = (_by_seed(column, rows, shape, each.values) for each in (one, other))
    common = first.index.intersection(second.index)
    paired = first[common] - second[common] if len(common) > 1 else first - second.mean()
    sign = -1 if column.better == "lower" else 1
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        half = float(half_width(paired.std(ddof=1), len(paired)))
    if half < _ROUNDING * float(first.abs().max()):
        half = 0.0
    return Difference(sign * float(paired.mean()), half)


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


def _rival_label(table: Table, values: Mapping[str, Any]) -> str:
    """Return the name of a baseline, without the axes that do not name it."""
    named = {name: value for name, value in values.items() if value in table.baselines}
    return point_label(named)


def tile(best: Headline) -> Tile:
    """Return a headline as a tile: the value, the point, and the distance to the baseline.

    A point whose lead on the second best one may be chance is not named alone.
    """
    notes = [best.leaders] if best.leaders else []
    if best.leaders and not best.is_shared and best.to_runner_up.may_be_chance:
        second = f"{best.runner_up} ({cell(best.column.name, best.runner_up_mean)})"
        notes = [f"{best.leaders}, perhaps by chance before {second}"]
    tone = ""
    if best.baseline:
        notes.append(distance(best))
        tone = "good" if best.gain > 0 and not best.to_baseline.may_be_chance else "warn"
    elif len(best.points) > 1:
        notes.append(f"{'lowest' if best.column.better == 'lower' else 'highest'} of "
                     f"{len(best.points)}")  # fmt: skip
    return Tile(best.label, best.value, "; ".join(notes), tone)


def distance(best: Headline) -> str:
    """Return how far the best point is from the strongest baseline, in words."""
    column, rival = best.column.name, best.baseline_mean
    if best.mean == rival:
        return f"the same as {best.baseline}"
    side = "above" if best.mean > rival else "below"
    size = with_interval(column, abs(best.mean - rival), best.to_baseline.half)
    return f"{size} {side} {best.baseline} ({cell(column, rival)})"


def range_tiles(rows: pd.DataFrame, shape: Shape) -> list[Tile]:
    """Return the ranges of the first numbers, of a table that does not say what is better.

    A table of texts has none: its numbers are about the texts.
    """
    if any(is_long(rows[name], _LONGEST_NAME) for name in rows.columns if name not in ADDED):
        return []
    tiles = []
    for column in shape.numbers:
        values = as_numbers(rows[column.name])
        known = values[np.isfinite(values)]
        if known.empty:
            continue
        low, high, mean = (cell(column.name, float(v)) for v in (known.min(), known.max(),
                                                                  known.mean()))  # fmt: skip
        label = with_unit(heading(column.name), column.name, column.unit, column.better)
        if low == high:
            note = "" if len(rows) == 1 else "the same in all rows"
            tiles.append(Tile(label, low, note))
        else:
            note = f"mean {mean} of {len(known)} rows"
            tiles.append(Tile(label, f"{low} to {high}", note))
    return tiles[:_MOST_RANGES]
