"""Headline numbers of a table: the best point by each number that can be better, and its rivals."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from raypipe.report.formatting import cell, heading, number, plus_minus, with_unit
from raypipe.report.sections import Tile
from raypipe.report.table_shape import ADDED, Means, Shape, as_numbers, is_long, means, point_label
from raypipe.stats import half_width, lowest
from raypipe.storage.tables import Column, Table

_MOST_RANGES = 4
_ROUNDING = 1e-9  # relative difference that is none
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
class Headline:
    """The best point of a table by a number.

    Args:
        table: name of the table.
        column: the number.
        group: the values of the columns that separate what is not comparable, or empty.
        values: the best point, by axis; empty without axes.
        mean: its mean over repetitions.
        half: half of the 95 % confidence interval; NaN for one repetition.
        runs: the number of repetitions.
        points: the compared points by axis, without baselines.
        baseline: the strongest baseline, or empty; ``baseline_mean`` is NaN then.
        runner_up: the second best point, or empty.
        to_baseline: how much better it is than the baseline.
        to_runner_up: how much better it is than the second best point.
        repeats: the setting with the number of repetitions, or empty.
        tied: further points that are as good.
        runner_up_values: the second best point, by axis.

    """

    table: str
    column: Column
    group: str
    values: Mapping[str, Any]
    mean: float
    half: float
    runs: int
    points: pd.DataFrame
    baseline: str
    baseline_mean: float
    runner_up: str
    runner_up_mean: float
    to_baseline: Difference = _NONE
    to_runner_up: Difference = _NONE
    repeats: str = ""
    tied: Sequence[str] = ()
    runner_up_values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The number for readers, with its group."""
        return heading(self.column.name) + (f" ({self.group})" if self.group else "")

    @property
    def point(self) -> str:
        """The best point for readers; empty without axes."""
        return point_label(self.values)

    @property
    def is_shared(self) -> bool:
        """Whether other points are as good."""
        return bool(self.tied)

    @property
    def leaders(self) -> str:
        """The best point, and those that are as good."""
        *names, last = [self.point, *self.tied]
        return " and ".join(filter(None, [", ".join(names), last]))

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
        values = as_numbers(rows[column.name])
        index = pd.RangeIndex(len(rows))
        points = pd.DataFrame({"row": index + 1})
        ones = pd.Series(1, index)
        found = Means(points, values.reset_index(drop=True), ones * np.nan, ones)
    finite = np.isfinite(found.mean)
    baseline = is_baseline(table, found.points)
    if not (finite & ~baseline).any():
        baseline[:] = False
    ranked = found.mean[finite].sort_values(ascending=column.better == "lower", kind="stable")
    contenders = [place for place in ranked.index if not baseline[place]]
    if not contenders:
        return None
    rivals = [place for place in ranked.index if baseline[place]]
    if shape.seeds and found.runs[contenders].nunique() > 1:
        contenders = _first_by_common_seeds(column, rows, shape, found.points.loc[contenders])
    best, second = contenders[0], contenders[1] if len(contenders) > 1 else None
    rival = rivals[0] if rivals else None

    def point(place: int | None) -> dict[str, Any]:
        return {} if place is None else dict(found.points.loc[place])

    def mean(place: int | None) -> float:
        return math.nan if place is None else float(found.mean[place])

    return Headline(
        table=table.name,
        column=column,
        group=group,
        values=point(best),
        mean=mean(best),
        half=float(found.half[best]),
        runs=int(found.runs[best]) if shape.seeds else 1,
        points=found.points[~baseline & finite],
        baseline=_rival_label(table, point(rival)),
        baseline_mean=mean(rival),
        runner_up=point_label(point(second)),
        runner_up_mean=mean(second),
        to_baseline=_difference(column, rows, shape, point(best), point(rival)),
        to_runner_up=_difference(column, rows, shape, point(best), point(second)),
        repeats=table.repeats,
        runner_up_values=point(second),
        tied=[
            point_label(point(place))
            for place in contenders[1:]
            if math.isclose(found.mean[place], found.mean[best], rel_tol=_ROUNDING)
        ],
    )


def _first_by_common_seeds(
    column: Column, rows: pd.DataFrame, shape: Shape, points: pd.DataFrame
) -> list[Any]:
    """Return the places of ranked points, with the best one by :func:`lowest` first."""
    values = {
        place: _by_seed(column, rows, shape, dict(point)) for place, point in points.iterrows()
    }
    by_seed = pd.concat(values, axis=1)
    best = points.index[lowest(by_seed if column.better == "lower" else -by_seed)]
    return [best, *(place for place in points.index if place != best)]


def _difference(
    column: Column,
    rows: pd.DataFrame,
    shape: Shape,
    one: Mapping[str, Any],
    other: Mapping[str, Any],
) -> Difference:
    """Return how much better one point is than another, paired by the seeds that both have.

    A point without common seeds, such as a baseline that was computed once, counts as its mean.
    """
    if not shape.seeds or not one or not other:
        return _NONE
    first, second = (_by_seed(column, rows, shape, values) for values in (one, other))
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
    known = as_numbers(rows.loc[own, column.name]).dropna()
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
