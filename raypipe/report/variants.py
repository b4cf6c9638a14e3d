"""Variants of a matrix and its points: a row belongs to the points that have its values."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from raypipe.config.matrix import is_seed

Tables = Mapping[str, pd.DataFrame]


def variants_of(tables: Tables) -> dict[str, dict[str, str]]:
    """Return the values of each variant by key, as text."""
    table = tables.get("variants", pd.DataFrame())
    found: dict[str, dict[str, str]] = {}
    for row in table.itertuples():
        found.setdefault(str(row.variant), {})[str(row.key)] = str(row.value)
    return found


def varied(tables: Tables) -> dict[str, list[str]]:
    """Return the values of each varied key of a matrix, as text; seeds are among them."""
    found: dict[str, dict[str, None]] = {}
    for values in variants_of(tables).values():
        for key, value in values.items():
            found.setdefault(key, {})[value] = None
    return {key: list(values) for key, values in found.items()}


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
    others = [name for name, values in variants.items() if not values.items() <= point.items()]
    found = {}
    for name, table in tables.items():
        if "variant" in table.columns and name != "variants":
            table = table[~table["variant"].isin(others)]
        found[name] = table.reset_index(drop=True)
    return found


def point_name(point: Mapping[str, str]) -> str:
    """Return the name of a point, such as ``lda.objective=nll,seed=1``."""
    return ",".join(f"{key}={value}" for key, value in sorted(point.items()))
