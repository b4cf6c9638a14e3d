"""Comparison of the variants of a matrix: means over seeds, and tests between an axis's values.

A row of a table belongs to the points that have all values of its variant (table ``variants``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy  # loads scipy.stats on first use

from raypipe.config.matrix import SEED
from raypipe.report.plots import rows
from raypipe.report.sections import Heading, Part, Section, TableView
from raypipe.stats import paired_comparisons, runs_needed

Tables = Mapping[str, pd.DataFrame]

#: metrics of training runs that are compared; of ``measures`` it is every real number
TRIAL_METRICS = ("loss_final", "samples_per_s", "energy_j")
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Metric:
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
    values = list(_variants(tables).values())
    # what variants with more keys have of fewer ones
    parts = {
        keys: {
            frozenset((key, other[key]) for key in keys) for other in values if keys < other.keys()
        }
        for keys in {frozenset(one) for one in values}
    }
    return [one for one in values if frozenset(one.items()) not in parts[frozenset(one)]]


def of_point(tables: Tables, point: Mapping[str, str]) -> dict[str, pd.DataFrame]:
    """Return the tables with only the rows that belong to a point."""
    variants = _variants(tables)
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
class Observations:
    """Every compared number of a run, and the values of its variants.

    Args:
        numbers: columns ``metric``, ``variant`` and ``value``.
        variants: a row for each variant and a column for each varied key, as text; missing where
            the variant does not depend on the key. Keys may have any name.

    """

    numbers: pd.DataFrame
    variants: pd.DataFrame

    @classmethod
    def of(cls, tables: Tables) -> Observations:
        """Return the compared numbers of variants in the tables of a run."""
        variants = pd.DataFrame.from_dict(_variants(tables), orient="index")
        found = [
            pd.DataFrame({"metric": metric.name, "variant": names, "value": values})
            for metric, names, values in _metrics(tables)
        ]
        columns = ["metric", "variant", "value"]
        numbers = pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=columns)
        return cls(numbers[numbers["variant"].isin(variants.index)], variants)

    @property
    def axes(self) -> list[str]:
        """The varied keys apart from the seed."""
        return [str(key) for key in self.variants.columns if key != SEED]

    def blocks(self, axis: str) -> Iterator[tuple[str, pd.DataFrame]]:
        """Yield each metric that depends on an axis: seeds x values, averaged over other axes."""
        numbers = self.numbers.assign(axis=self._column(axis))
        numbers["seed"] = self._column(SEED).fillna("0") if SEED in self.variants else "0"
        for metric, group in numbers.dropna(subset=["axis"]).groupby("metric", sort=False):
            table = group.pivot_table(
                index="seed", columns="axis", values="value", aggfunc="mean"
            ).rename_axis(index=None, columns=None)
            yield str(metric), table[list(dict.fromkeys(group["axis"]))]

    def _column(self, key: str) -> pd.Series:
        return self.numbers["variant"].map(self.variants[key])


def summary(observed: Observations, axis: str) -> pd.DataFrame:
    """Return mean, spread and confidence interval of each metric at each value of an axis.

    Values are first averaged over the other axes, so that each seed counts once. The interval is
    Student's, at 95 %; it is missing for a single seed.

    Returns:
        columns ``metric``, ``axis``, ``value`` (of the axis), ``seeds``, ``mean``, ``std``, ``low``
        and ``high``.

    """
    found = []
    for metric, table in observed.blocks(axis):
        for value in table.columns:
            seeds = table[value].dropna()
            count = len(seeds)
            half = np.nan
            if count > 1:
                quantile = scipy.stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1)
                half = float(quantile * seeds.std(ddof=1) / np.sqrt(count))
            mean = float(seeds.mean())
            row = {"metric": metric, "axis": axis, "value": value, "seeds": count, "mean": mean}
            spread = float(seeds.std(ddof=1)) if count > 1 else np.nan
            found.append(row | {"std": spread, "low": mean - half, "high": mean + half})
    columns = ["metric", "axis", "value", "seeds", "mean", "std", "low", "high"]
    return pd.DataFrame(found, columns=columns)


def tests(observed: Observations, axis: str) -> pd.DataFrame:
    """Return the paired tests between the values of an axis, with seeds as blocks.

    They are those of :func:`raypipe.stats.paired_comparisons`, corrected within each metric; too
    few seeds give no winner.
    """
    found = [
        paired_comparisons(table).assign(metric=metric, axis=axis)
        for metric, table in observed.blocks(axis)
        if table.shape[1] > 1
    ]
    if not found:
        return pd.DataFrame(columns=["metric", "axis", "first", "second"])
    together = pd.concat(found, ignore_index=True)
    names = ("metric", "axis")
    return together[[*names, *(name for name in together.columns if name not in names)]]


def variants_section(tables: Tables, shown: Mapping[str, str] | None) -> Section:
    """Return the comparison of the variants.

    ``shown`` is the point of the experiment's own sections.
    """
    observed = Observations.of(tables)
    if observed.numbers.empty:
        return Section("Variants", [])
    parts: list[Part] = [_introduction(tables, shown)]
    for axis in observed.axes:
        means = summary(observed, axis)
        if means.empty:
            continue
        columns = [name for name in means.columns if name != "axis"]
        parts += [Heading(axis), TableView(means, columns, f"Means by {axis}")]
        compared = tests(observed, axis)
        if compared.empty:
            continue
        columns = ["metric", "first", "second", "n", "p_holm", "effect", "conclusion"]
        parts.append(TableView(compared, columns, f"Paired tests of {axis}"))
        pairs = compared.groupby("metric").size().max()
        needed = runs_needed(int(pairs))
        if compared["n"].max() < needed:
            parts.append(
                f"No winner can be told with fewer than {needed} seeds: give `runs: {needed}` in "
                "the matrix."
            )
    return Section("Variants", parts)


def _introduction(tables: Tables, shown: Mapping[str, str] | None) -> str:
    axes: dict[str, set[str]] = {}
    for values in _variants(tables).values():
        for key, value in values.items():
            axes.setdefault(key, set()).add(value)
    listed = ", ".join(f"{key} ({len(values)} values)" for key, values in sorted(axes.items()))
    text = f"{len(points(tables))} points over {listed}."
    if shown:
        text += f" The experiment's own sections show the point {point_name(shown)}; "
        text += "`raypipe report RUN_DIR --variant POINT` shows another one."
    return text


def _variants(tables: Tables) -> dict[str, dict[str, str]]:
    """Return the values of each variant by key, as text."""
    table = rows(tables, "variants", ["variant", "key", "value"])
    if table is None:
        return {}
    found: dict[str, dict[str, str]] = {}
    for row in table.itertuples():
        found.setdefault(str(row.variant), {})[str(row.key)] = str(row.value)
    return found


def _metrics(tables: Tables) -> Iterator[tuple[Metric, pd.Series, pd.Series]]:
    """Yield each metric with the variants and values of its rows."""
    trials, measures = tables.get("trials"), tables.get("measures")
    if trials is not None and len(trials):
        done = trials[trials["status"] == "succeeded"]
        for stage, group in done.groupby("stage", sort=False):
            yield from _columns("trials", str(stage), group, TRIAL_METRICS)
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
) -> Iterator[tuple[Metric, pd.Series, pd.Series]]:
    for column in columns:
        if column in group.columns and group[column].notna().any():
            known = group[group[column].notna()]
            yield Metric(table, column, of), known["variant"], known[column].astype(float)
