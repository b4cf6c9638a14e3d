"""Comparison of the points of a matrix: means over seeds, and paired tests between values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from raypipe.config.matrix import is_seed
from raypipe.report.results import LOSS, Tables, held_out_columns, variants_of, varied
from raypipe.stats import half_width, paired_comparisons
from raypipe.store.tables import ADDED

#: what a training costs; compared, but not what stands for it
COSTS = ("samples_per_s", "energy_j")


class ComparedMetric(NamedTuple):
    """A compared number: its column, the name in tables, and its N values.

    ``points`` ``[N, K]`` has a column for each varied key, as text; missing where the row does not
    depend on the key. Keys may have any name.
    """

    column: str
    name: str
    points: pd.DataFrame
    values: pd.Series[float]

    def by_value(self, axis: str | None) -> pd.DataFrame:
        """Return the numbers with a column for each value of an axis on which they depend.

        There is a row for each seed and combination of the other axes' values; the index has the
        levels ``seed`` and ``others``. Without an axis, the values are one column for all points.
        """
        seeds = [key for key in self.points if is_seed(str(key))]
        others = [key for key in self.points if key != axis and key not in seeds]
        rows = pd.DataFrame({"value": self.values, "axis": ""})
        for name, keys in (("seed", seeds), ("others", others)):
            rows[name] = [str(tuple(row)) for row in self.points[keys].fillna("").to_numpy()]
        if axis is not None:
            rows["axis"] = self.points[axis]
        rows = rows.dropna(subset="axis")
        table = rows.pivot_table(index=["seed", "others"], columns="axis", values="value")
        return table.rename_axis(columns=None)[list(dict.fromkeys(rows["axis"]))]


def _metrics(tables: Tables) -> Iterator[ComparedMetric]:
    """Yield every compared number of trainings and of the table ``measures``."""
    points = pd.DataFrame.from_dict(variants_of(tables), orient="index")
    for table, of, rows, columns in _groups(tables):
        own = rows[rows["variant"].isin(points.index)].reset_index(drop=True)
        for column in (name for name in columns if name in own and own[name].notna().any()):
            values = own[column].dropna().astype(float)
            places = points.loc[own.loc[values.index, "variant"]].set_axis(values.index)
            name = f"{table}.{column}" + (f" ({of})" if of else "")
            yield ComparedMetric(column, name, places, values)


def _groups(tables: Tables) -> Iterator[tuple[str, str, pd.DataFrame, Sequence[str]]]:
    """Yield a table, what tells its rows from others, these rows, and their compared columns."""
    trials, measures = (tables.get(name, pd.DataFrame()) for name in ("trials", "measures"))
    if len(trials):
        held_out = [each.name for each in held_out_columns(map(str, trials.columns))]
        done = trials[trials["status"] == "succeeded"]
        for stage, group in done.groupby("stage", sort=False):
            yield "trials", str(stage), group, [*held_out, LOSS.name, *COSTS]
    if len(measures):
        own = measures.drop(columns=[*ADDED], errors="ignore")
        texts = list(own.select_dtypes(exclude="number"))
        reals = list(map(str, measures.select_dtypes("float")))
        groups = measures.groupby(texts, sort=False, dropna=False) if texts else [((), measures)]
        for names, group in groups:
            yield "measures", " ".join(n for n in names if isinstance(n, str)), group, reals


def compared(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return the tables ``variant_metrics`` and ``variant_tests``.

    ``tables`` are ``variants``, ``trials`` and ``measures``. The tests are those of
    :func:`raypipe.stats.paired_comparisons` between the values of an axis, with seeds as blocks;
    too few seeds give no winner. At each seed, two values are compared by their means over the
    points of the other axes that both have.
    """
    metrics = list(_metrics(tables))
    axes: list[str | None] = [key for key in varied(tables) if not is_seed(key)]
    means, pairs = list[pd.DataFrame](), list[pd.DataFrame]()
    for axis, metric in product(axes or [None], metrics):
        if axis is not None and metric.points[axis].isna().all():
            continue
        about: dict[str, Any] = {"metric": metric.name, "axis": axis}
        table = metric.by_value(axis)
        means.append(summary(table, is_cost=metric.column in COSTS).assign(**about))
        if axis is not None and table.shape[1] > 1:
            seeds = table.index.get_level_values("seed")
            pairs.append(paired_comparisons(table, blocks=seeds).assign(**about))
    return {
        name: pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()
        for name, parts in (("variant_metrics", means), ("variant_tests", pairs))
    }


def summary(table: pd.DataFrame, *, is_cost: bool) -> pd.DataFrame:
    """Return mean, spread and confidence interval of each value of an axis, a column of a table.

    Values are first averaged over the other axes, so that each seed counts once. The interval is
    Student's, at 95 %; it is missing for a single seed, and that of a cost begins at 0. Where
    points are missing, the means of two values are over different points; ``unmatched`` counts the
    numbers that another value of the axis lacks at the same seed and other values.
    """
    by_seed = table.groupby(level="seed").mean()
    count, mean, std = by_seed.count(), by_seed.mean(), by_seed.std(ddof=1)
    half = half_width(std, count)
    found = {
        "value": table.columns, "seeds": count,
        "unmatched": table[table.isna().any(axis=1)].count(), "mean": mean, "std": std,
        "low": np.maximum(mean - half, 0.0 if is_cost else -np.inf), "high": mean + half,
    }  # fmt: skip
    return pd.DataFrame(found).reset_index(drop=True)
