"""Section of the report on the variants of a matrix."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

import pandas as pd

from raypipe.config.levels import nested
from raypipe.config.matrix import is_seed, text_value
from raypipe.config.yaml_text import dump_yaml
from raypipe.report.comparison import (
    Observations,
    Tables,
    point_name,
    points,
    seeds_of,
    summary,
    tests,
    variants_of,
)
from raypipe.report.search import searched_keys
from raypipe.report.sections import Code, Fold, Heading, Part, Section, TableView
from raypipe.report.variant_plots import heat_maps, parallel_coordinates
from raypipe.stats import runs_needed

_MOST_PLOTS = 4


def variants_section(tables: Tables, shown: Mapping[str, str] | None) -> Section:
    """Return the comparison of the variants.

    ``shown`` is the point of the experiment's own sections.
    """
    observed = Observations.of(tables)
    if observed.numbers.empty:
        return Section("Variants", [])
    values = observed.numbers.groupby("metric", sort=False)["value"].nunique()
    same = [str(metric) for metric, count in values.items() if count == 1]
    parts: list[Part] = [_introduction(tables, shown), *_best_points(tables, observed)]
    searched = searched_keys(tables)  # their values are compared in the section of the search
    for axis in (axis for axis in observed.axes if axis not in searched):
        parts += _of_axis(observed, axis, same)
    if not observed.axes:
        means = summary(observed, None)
        means = means[~means["metric"].isin(same)]
        columns = [name for name in means.columns if name not in ("axis", "value", "unmatched")]
        parts.append(TableView(means, columns, "Means over seeds"))
    if same:
        parts.append(f"The same at every point, and left out: {', '.join(same)}.")
    return Section("Variants", parts)


def seeds_needed(tables: Tables) -> int:
    """Return the seeds with which the paired tests can tell a winner on every axis of a matrix."""
    values: dict[str, set[str]] = {}
    for variant in variants_of(tables).values():
        for key, value in variant.items():
            values.setdefault(key, set()).add(value)
    left_out = searched_keys(tables)
    counts = [len(v) for k, v in values.items() if not is_seed(k) and k not in left_out]
    return runs_needed(comb(max(counts, default=2), 2))


def _of_axis(observed: Observations, axis: str, same: Sequence[str]) -> list[Part]:
    """Return means and tests of an axis, without metrics that are the same at every point."""
    means = summary(observed, axis)
    means = means[~means["metric"].isin(list(same))]
    if means.empty:
        return []
    partial = bool(means["unmatched"].any())
    hidden = ["axis"] if partial else ["axis", "unmatched"]
    columns = [name for name in means.columns if name not in hidden]
    parts: list[Part] = [Heading(axis), TableView(means, columns, f"Means by {axis}")]
    if partial:
        parts.append(
            f"Some points are missing, so the means by {axis} are not over the same points. The "
            "tests compare two values at the points that both have."
        )
    compared = tests(observed, axis)
    compared = compared[~compared["metric"].isin(list(same))]
    if compared.empty:
        return parts
    columns = ["metric", "first", "second", "n", "p_holm", "effect", "conclusion"]
    parts.append(TableView(compared, columns, f"Paired tests of {axis}"))
    return parts


def _best_points(tables: Tables, observed: Observations) -> list[Part]:
    """Return the best point for each metric with its YAML, and figures of these metrics."""
    found = tables.get("best_variants")
    if found is None or found.empty:
        return []
    points = [point_name(json.loads(point)) for point in found["point"]]
    shown = found.assign(point=pd.Series(map(Code, points), found.index, dtype=object))
    columns = ["metric", "better", "mean", "seeds", "points", "point"]
    parts: list[Part] = [
        Heading("Best points"),
        "The mean over seeds decides; the tests below tell whether it is more than chance.",
        TableView(shown, columns, "Best points"),
    ]
    for metric, point in zip(found["metric"], found["point"], strict=True):
        parts.append(Fold(f"Configuration of the best {metric}", [Code(best_yaml(point))]))
    best = set(found["metric"])
    for means in observed.by_point():
        if means.metric.name in best:
            plots = [parallel_coordinates(means)]
            if means.metric.table == "trials" or len(means.axes) > 2:
                plots += heat_maps(means)  # two axes of another table are in its own section
            parts += [plot for plot in plots if plot is not None][:_MOST_PLOTS]
    return parts


def yaml_values(point: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of a point whose values are texts."""
    return {key: text_value(text) for key, text in point.items()}


def best_yaml(point: str) -> str:
    """Return the values of a point, given as JSON, as a part of a configuration."""
    return dump_yaml(nested(yaml_values(json.loads(point))))


def _introduction(tables: Tables, shown: Mapping[str, str] | None) -> str:
    axes: dict[str, set[str]] = {}
    for values in variants_of(tables).values():
        for key, value in values.items():
            if not is_seed(key):
                axes.setdefault(key, set()).add(value)
    compared = {point_name({k: v for k, v in p.items() if not is_seed(k)}) for p in points(tables)}
    seeds, count = seeds_of(tables), len(compared)
    text = f"{count} point{'s' * (count > 1)}"
    if axes:
        listed = (f"{key} ({len(values)} values)" for key, values in sorted(axes.items()))
        text += f" over {', '.join(listed)}"
    text += f", with {seeds} seeds." if seeds > 1 else "."
    if shown:
        text += f" The experiment's own sections show the point {point_name(shown)}; "
        text += "raypipe report RUN_DIR --variant POINT shows another one."
    return text
