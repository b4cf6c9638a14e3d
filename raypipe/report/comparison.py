"""Comparison of the variants of a matrix: means over seeds, tests between values, best points.

A row of a table belongs to the points that have all values of its variant (table ``variants``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from raypipe.config.matrix import is_seed
from raypipe.report.measures import LOSS, held_out_columns
from raypipe.stats import half_width, paired_comparisons, ranked

Tables = Mapping[str, pd.DataFrame]

#: what a training costs; compared, but not what stands for it
COSTS = ("samples_per_s", "energy_j")


@dataclass(frozen=True)
class ComparedMetric:
    """A compared number: its table and column, and what tells its rows apart."""

    table: str
    column: str
    of: str

    @property
    def name(self) -> str:
        """The name in tables, such as ``measures.macro_f1 (classifier)``."""
        return f"{self.table}.{self.column}" + (f" ({self.of})" if self.of else "")


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


def seeds_of(tables: Tables) -> int:
    """Return the number of different seeds of the points; 0 without a matrix."""
    found = {frozenset((k, v) for k, v in one.items() if is_seed(k)) for one in points(tables)}
    return len(found)


def of_point(tables: Tables, point: Mapping[str, str]) -> dict[str, pd.DataFrame]:
    """Return the tables with only the rows that belong to a point."""
    variants = variants_of(tables)
    belonging = {name for name, values in variants.items() if values.items() <= point.items()}
    found = {}
    for name, table in tables.items():
        if "variant" in table.columns and name != "variants":
            known = table["variant"].isin(list(variants))
            table = table[~known | table["variant"].isin(list(belonging))]
        found[name] = table.reset_index(drop=True)
    return found


def point_name(point: Mapping[str, str]) -> str:
    """Return the name of a point, such as ``lda.objective=nll,seed=1``."""
    return ",".join(f"{key}={value}" for key, value in sorted(point.items()))


@dataclass(frozen=True)
class PointMeans:
    """A metric over S seeds at P points of A axes, and its means.

    Args:
        metric: the metric.
        points: ``[P, A]``, the values of the axes as text; a column for each key.
        by_seed: ``[S, P]``, missing where a point has no number.

    """

    metric: ComparedMetric
    points: pd.DataFrame
    by_seed: pd.DataFrame

    @property
    def means(self) -> NDArray[np.float64]:
        """The means over seeds, ``[P]``."""
        return self.by_seed.mean().to_numpy(dtype=np.float64)

    @property
    def axes(self) -> list[str]:
        """The axes with at least two values."""
        return [str(key) for key in self.points if self.points[key].nunique() > 1]


@dataclass(frozen=True)
class Observations:
    """Every compared number of a run, and the values of its variants.

    Args:
        numbers: columns ``metric``, ``variant`` and ``value``.
        variants: a row for each variant and a column for each varied key, as text; missing where
            the variant does not depend on the key. Keys may have any name.
        metrics: by name.

    """

    numbers: pd.DataFrame
    variants: pd.DataFrame
    metrics: Mapping[str, ComparedMetric]

    @classmethod
    def of(cls, tables: Tables) -> Observations:
        """Return the compared numbers of variants in the tables of a run."""
        variants = pd.DataFrame.from_dict(variants_of(tables), orient="index")
        metrics, found = dict[str, ComparedMetric](), []
        for metric, names, values in _metrics(tables):
            metrics[metric.name] = metric
            rows = {"metric": metric.name, "variant": names, "value": values}
            found.append(pd.DataFrame(rows))
        columns = ["metric", "variant", "value"]
        numbers = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)
        known = numbers["variant"].isin(list(variants.index))
        return cls(numbers[known], variants, metrics)

    @property
    def axes(self) -> list[str]:
        """The varied keys apart from seeds."""
        return [str(key) for key in self.variants.columns if not is_seed(str(key))]

    def by_value(self, axis: str | None) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield each metric that depends on an axis, with a column for each value of the axis.

        There is a row for each seed and combination of the other axes' values; the index has the
        levels ``seed`` and ``others``. Without an axis, the values are one column for all points.
        """
        numbers = self.numbers.assign(axis="" if axis is None else self._column(axis))
        numbers["seed"] = self._joined(self._seeds)
        numbers["others"] = self._joined([key for key in self.axes if key != axis])
        for metric, group in numbers.dropna(subset=["axis"]).groupby("metric", sort=False):
            table = group.pivot_table(
                index=["seed", "others"], columns="axis", values="value", aggfunc="mean"
            ).rename_axis(columns=None)
            yield str(metric), table[list(dict.fromkeys(group["axis"]))]

    def by_point(self) -> Iterator[PointMeans]:
        """Yield the means over seeds of each metric that depends on an axis."""
        for metric, group in self.numbers.groupby("metric", sort=False):
            known = self.variants.reindex(group["variant"]).reset_index(drop=True)
            axes = [axis for axis in self.axes if known[axis].notna().any()]
            if not axes:
                continue
            rows = known[axes].fillna("")
            places = rows.groupby(axes, sort=False).ngroup()
            seeds = self._joined(self._seeds)[group.index]
            values = group["value"].groupby([seeds.to_numpy(), places.to_numpy()]).mean().unstack()
            points = rows.drop_duplicates().reset_index(drop=True)
            yield PointMeans(self.metrics[str(metric)], points, values)

    @property
    def _seeds(self) -> list[str]:
        return [str(key) for key in self.variants.columns if is_seed(str(key))]

    def _joined(self, keys: Sequence[str]) -> pd.Series:
        """Return the values of keys of each number as one text."""
        values = [self._column(key).fillna("") for key in keys]
        return pd.Series(list(map(str, zip(*values, strict=True))) or "", self.numbers.index)

    def _column(self, key: str) -> pd.Series:
        return self.numbers["variant"].map(self.variants[key])


def summary(observed: Observations, axis: str | None) -> pd.DataFrame:
    """Return mean, spread and confidence interval of each metric at each value of an axis.

    Without an axis, at all points together.
    Values are first averaged over the other axes, so that each seed counts once. The interval is
    Student's, at 95 %; it is missing for a single seed, and that of a speed or an energy begins at
    0. Where points are missing, the means of two values are over different points; ``unmatched``
    counts the numbers that another value of the axis lacks at the same seed and other values.

    Returns:
        columns ``metric``, ``axis``, ``value`` (of the axis), ``seeds``, ``unmatched``, ``mean``,
        ``std``, ``low`` and ``high``.

    """
    found = []
    for metric, table in observed.by_value(axis):
        partial = table.isna().any(axis=1)
        for value in table.columns:
            seeds = table[value].dropna().groupby(level="seed").mean()
            count, mean = len(seeds), float(seeds.mean())
            half = float(half_width(seeds.std(ddof=1), count))
            spread = float(seeds.std(ddof=1)) if count > 1 else np.nan
            least = 0.0 if any(f".{cost}" in metric for cost in COSTS) else -np.inf
            found.append(
                {
                    "metric": metric,
                    "axis": axis,
                    "value": value,
                    "seeds": count,
                    "unmatched": int(table.loc[partial, value].count()),
                    "mean": mean,
                    "std": spread,
                    "low": float(np.maximum(mean - half, least)),  # NaN stays
                    "high": mean + half,
                }
            )
    columns = ["metric", "axis", "value", "seeds", "unmatched", "mean", "std", "low", "high"]
    return pd.DataFrame(found, columns=columns)


def tests(observed: Observations, axis: str) -> pd.DataFrame:
    """Return the paired tests between the values of an axis, with seeds as blocks.

    They are those of :func:`raypipe.stats.paired_comparisons`, corrected within each metric; too
    few seeds give no winner. At each seed, two values are compared by their means over the points
    of the other axes that both have.
    """
    found = [
        paired_comparisons(table, blocks=table.index.get_level_values("seed")).assign(
            metric=metric, axis=axis
        )
        for metric, table in observed.by_value(axis)
        if table.shape[1] > 1
    ]
    if not found:
        return pd.DataFrame(columns=["metric", "axis", "first", "second"])
    together = pd.concat(found, ignore_index=True)
    names = ("metric", "axis")
    return together[[*names, *(name for name in together.columns if name not in names)]]


def best(observed: Observations, better: Mapping[tuple[str, str], str]) -> pd.DataFrame:
    """Return the points with the best mean over seeds, for each metric that an axis affects.

    Points that are equally good have a row each (:func:`raypipe.stats.ranked`).

    Args:
        observed: the compared numbers.
        better: ``lower`` or ``higher`` by table and column, the most important first; other
            metrics have no best point.

    Returns:
        columns ``metric``, ``better``, ``mean``, ``seeds``, ``points`` (that were compared) and
        ``point``, the values of the axes by key as JSON.

    """
    found = []
    order = list(better)
    chosen = [e for e in observed.by_point() if (e.metric.table, e.metric.column) in better]
    chosen.sort(key=lambda each: order.index((each.metric.table, each.metric.column)))
    for each in chosen:
        direction = better[each.metric.table, each.metric.column]
        values = each.by_seed.to_numpy(dtype=np.float64)
        seeds, places = np.indices(values.shape)
        first, ties = ranked(values.ravel(), places.ravel(), seeds.ravel(), direction)
        if ties == len(each.means):
            continue  # a baseline, which no axis affects
        for place in first[:ties]:
            known = values[np.isfinite(values[:, place]), place]
            point = {k: v for k, v in each.points.iloc[place].items() if v}
            found.append(
                {
                    "metric": each.metric.name,
                    "better": direction,
                    "mean": float(known.mean()),
                    "seeds": len(known),
                    "points": len(each.means),
                    "point": json.dumps(point),
                }
            )
    return pd.DataFrame(found, columns=["metric", "better", "mean", "seeds", "points", "point"])


def variants_of(tables: Tables) -> dict[str, dict[str, str]]:
    """Return the values of each variant by key, as text."""
    table = tables.get("variants")
    found: dict[str, dict[str, str]] = {}
    if table is None or table.empty:
        return found
    for row in table.itertuples():
        found.setdefault(str(row.variant), {})[str(row.key)] = str(row.value)
    return found


def _metrics(tables: Tables) -> Iterator[tuple[ComparedMetric, pd.Series, pd.Series]]:
    """Yield each metric with the variants and values of its rows."""
    trials, measures = tables.get("trials"), tables.get("measures")
    if trials is not None and len(trials):
        done = trials[trials["status"] == "succeeded"]
        for stage, group in done.groupby("stage", sort=False):
            held_out = [each.name for each in held_out_columns(map(str, trials.columns))]
            yield from _columns("trials", str(stage), group, [*held_out, LOSS.name, *COSTS])
    if measures is not None and len(measures):
        texts = [
            name
            for name in measures.columns
            if name not in ("run_id", "command_id", "variant")
            and not pd.api.types.is_numeric_dtype(measures[name])
        ]
        reals = [n for n in measures.columns if pd.api.types.is_float_dtype(measures[n])]
        groups = measures.groupby(texts, sort=False, dropna=False) if texts else [((), measures)]
        for names, group in groups:
            of = " ".join(str(name) for name in names if isinstance(name, str))
            yield from _columns("measures", of, group, reals)


def _columns(
    table: str, of: str, group: pd.DataFrame, columns: Sequence[str]
) -> Iterator[tuple[ComparedMetric, pd.Series, pd.Series]]:
    for column in columns:
        if column in group.columns and group[column].notna().any():
            known = group[group[column].notna()]
            yield ComparedMetric(table, column, of), known["variant"], known[column].astype(float)
