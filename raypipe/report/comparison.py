"""Comparison of the variants of a matrix: means over seeds, tests between values, best points."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from raypipe.config.matrix import is_seed
from raypipe.report.best import Shape, best_point
from raypipe.report.measures import LOSS, held_out_columns
from raypipe.report.variants import Tables, variants_of
from raypipe.stats import half_width, paired_comparisons
from raypipe.store.tables import Column, Table

#: what a training costs; compared, but not what stands for it
COSTS = ("samples_per_s", "energy_j")


@dataclass(frozen=True)
class ComparedMetric:
    """A compared number: its table and column, what tells its rows apart, and its N values.

    ``points`` ``[N, K]`` has a column for each varied key, as text; missing where the row does not
    depend on the key. Keys may have any name.
    """

    table: str
    column: str
    of: str
    points: pd.DataFrame
    values: pd.Series[float]

    @property
    def name(self) -> str:
        """The name in tables, such as ``measures.macro_f1 (classifier)``."""
        return f"{self.table}.{self.column}" + (f" ({self.of})" if self.of else "")

    def by_value(self, axis: str | None) -> pd.DataFrame:
        """Return the numbers with a column for each value of an axis on which they depend.

        There is a row for each seed and combination of the other axes' values; the index has the
        levels ``seed`` and ``others``. Without an axis, the values are one column for all points.
        """
        seeds = [key for key in self.points if is_seed(str(key))]
        others = [key for key in self.points if key != axis and key not in seeds]
        rows = pd.DataFrame({"value": self.values, "seed": "", "others": ""})
        for name, keys in (("seed", seeds), ("others", others)):
            texts = self.points[keys].fillna("").to_numpy()
            rows[name] = [str(tuple(row)) for row in texts]
        rows["axis"] = "" if axis is None else self.points[axis]
        rows = rows.dropna(subset="axis")
        table = rows.pivot_table(index=["seed", "others"], columns="axis", values="value")
        return table.rename_axis(columns=None)[list(dict.fromkeys(rows["axis"]))]


def metrics_of(tables: Tables) -> list[ComparedMetric]:
    """Return every compared number of trainings and of the table ``measures``."""
    points = pd.DataFrame.from_dict(variants_of(tables), orient="index")
    found = []
    for table, of, rows, columns in _groups(tables):
        rows = rows[rows["variant"].isin(points.index)]
        for column in columns:
            known = rows[rows[column].notna()] if column in rows else rows.iloc[:0]
            if len(known):
                own = points.loc[known["variant"]].reset_index(drop=True)
                values = known[column].astype(float).reset_index(drop=True)
                found.append(ComparedMetric(table, column, of, own, values))
    return found


def _groups(tables: Tables) -> Iterator[tuple[str, str, pd.DataFrame, Sequence[str]]]:
    """Yield a table, what tells its rows from others, these rows, and their compared columns."""
    trials, measures = tables.get("trials"), tables.get("measures")
    if trials is not None and len(trials):
        held_out = [each.name for each in held_out_columns(map(str, trials.columns))]
        done = trials[trials["status"] == "succeeded"]
        for stage, group in done.groupby("stage", sort=False):
            yield "trials", str(stage), group, [*held_out, LOSS.name, *COSTS]
    if measures is not None and len(measures):
        added = ("run_id", "command_id", "variant")
        numeric, real = pd.api.types.is_numeric_dtype, pd.api.types.is_float_dtype
        texts = [n for n in measures if n not in added and not numeric(measures[n])]
        reals = [str(name) for name in measures if real(measures[name])]
        groups = measures.groupby(texts, sort=False, dropna=False) if texts else [((), measures)]
        for names, group in groups:
            yield "measures", " ".join(n for n in names if isinstance(n, str)), group, reals


def compared(tables: Tables, better: Mapping[tuple[str, str], str]) -> dict[str, pd.DataFrame]:
    """Return the tables ``variant_metrics``, ``variant_tests`` and ``best_variants``.

    Args:
        tables: ``variants``, ``trials`` and ``measures``.
        better: ``lower`` or ``higher`` by table and column, the most important first; other
            metrics have no best point.

    """
    metrics = metrics_of(tables)
    axes = [str(key) for metric in metrics[:1] for key in metric.points if not is_seed(str(key))]
    depending = [
        (metric, axis) for axis in axes for metric in metrics if metric.points[axis].notna().any()
    ]
    alone = [] if axes else [(metric, None) for metric in metrics]
    order = list(better)
    chosen = [metric for metric in metrics if (metric.table, metric.column) in better]
    chosen.sort(key=lambda metric: order.index((metric.table, metric.column)))
    return {
        "variant_metrics": _together(summary(*each) for each in depending or alone),
        "variant_tests": _together(tests(*each) for each in depending),
        "best_variants": _together(
            best(metric, better[metric.table, metric.column]) for metric in chosen
        ),
    }


def _together(parts: Iterator[pd.DataFrame]) -> pd.DataFrame:
    known = [part for part in parts if len(part)]
    return pd.concat(known, ignore_index=True) if known else pd.DataFrame()


def summary(metric: ComparedMetric, axis: str | None) -> pd.DataFrame:
    """Return mean, spread and confidence interval at each value of an axis, or of all points.

    Values are first averaged over the other axes, so that each seed counts once. The interval is
    Student's, at 95 %; it is missing for a single seed, and that of a speed or an energy begins at
    0. Where points are missing, the means of two values are over different points; ``unmatched``
    counts the numbers that another value of the axis lacks at the same seed and other values.
    """
    table = metric.by_value(axis)
    partial = table.isna().any(axis=1)
    by_seed = table.groupby(level="seed").mean()
    count, mean, std = by_seed.count(), by_seed.mean(), by_seed.std(ddof=1)
    half = half_width(std, count)
    least = 0.0 if metric.column in COSTS else -np.inf
    return pd.DataFrame(
        {
            "metric": metric.name,
            "axis": axis,
            "value": table.columns,
            "seeds": count,
            "unmatched": table[partial].count(),
            "mean": mean,
            "std": std,
            "low": np.maximum(mean - half, least),
            "high": mean + half,
        }
    ).reset_index(drop=True)


def tests(metric: ComparedMetric, axis: str) -> pd.DataFrame:
    """Return the paired tests between the values of an axis, with seeds as blocks.

    They are those of :func:`raypipe.stats.paired_comparisons`; too few seeds give no winner. At
    each seed, two values are compared by their means over the points of the other axes that both
    have.
    """
    table = metric.by_value(axis)
    if table.shape[1] < 2:
        return pd.DataFrame()
    found = paired_comparisons(table, blocks=table.index.get_level_values("seed"))
    found.insert(0, "axis", axis)
    found.insert(0, "metric", metric.name)
    return found


def best(metric: ComparedMetric, better: str) -> pd.DataFrame:
    """Return the points with the best mean over seeds, a row each if several are equally good.

    None of a baseline, which no axis affects. ``point`` has the values of the axes as JSON.
    """
    rows = metric.points.fillna("").assign(**{metric.name: metric.values})
    keys = [str(key) for key in metric.points]
    axes = tuple(key for key in keys if not is_seed(key) and (rows[key] != "").any())
    shape = Shape(axes, (), tuple(filter(is_seed, keys)), ())
    column = Column(metric.name, "real", "", better=better)  # type: ignore[arg-type]
    found = best_point(Table(metric.table, ""), column, "", rows, shape) if axes else None
    if found is None or found.ties == len(found.points):
        return pd.DataFrame()
    return pd.DataFrame(
        {
            "metric": metric.name,
            "better": better,
            "mean": each.mean,
            "seeds": each.runs,
            "points": len(found.points),
            "point": json.dumps({key: value for key, value in each.values.items() if value}),
        }
        for each in found.ranking[: found.ties]
    )
