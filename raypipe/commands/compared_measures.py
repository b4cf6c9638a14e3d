"""The numbers that several runs have in common: rows that are the same, and means over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from raypipe.commands.table_view import cell
from raypipe.config.matrix import SEED
from raypipe.graph.tables import CORE
from raypipe.stats import finite_or_none
from raypipe.store import tables
from raypipe.store.run_directory import BASE, RunDirectory
from raypipe.store.tables import COMMAND_ID, RUN_ID, VARIANT, by_name

#: rows of a table of which no number is declared to be better
_MOST_UNDECLARED = 100


@dataclass(frozen=True)
class Measure:
    """A number of a row in each run, None where there is none.

    ``better`` is lower, higher, or empty if that is not declared. ``counts`` are the repetitions
    that each number is the mean of; empty if the row is not averaged over seeds.
    """

    table: str
    row: str
    column: str
    better: str
    values: tuple[float | None, ...]
    counts: tuple[int, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether the runs have different numbers."""
        return len(set(self.values)) > 1


def measures(runs: Sequence[RunDirectory]) -> list[Measure]:
    """Return the measures of all tables: those declared, else the numbers of short tables."""
    core = by_name(CORE)
    names = dict.fromkeys(name for run in runs for name in run.list(run.path("results")))
    names = {name: None for name in names if name not in core or not core[name].partitioned}
    declared: dict[str, dict[str, str]] = {}
    for name in names:
        columns = core[name].columns if name in core else ()
        declared[name] = {column.name: column.better for column in columns if column.better}
        for run in runs:
            declared[name] |= tables.measures(run, name)
    if not any(better for name, better in declared.items() if name not in core):
        declared |= {name: _numbers(runs, name) for name in names if name not in core}
    found: list[Measure] = []
    for name, better in declared.items():
        if better:
            found += _of_table(name, better, [tables.read_arrow(run, name) for run in runs])
    return found


def _numbers(runs: Sequence[RunDirectory], name: str) -> dict[str, str]:
    """Return the real numbers of a short table, apart from times and axes."""
    parts = [tables.read_arrow(run, name) for run in runs]
    axes = _axes(parts)
    for part in parts:
        rows = {_key(row, axes) for row in part.to_pylist()} if axes else part
        if len(rows) > _MOST_UNDECLARED:
            return {}
    numbers = [
        each.name for part in parts for each in part.schema if pa.types.is_floating(each.type)
    ]
    return {name: "" for name in numbers if not name.endswith("_s") and name not in axes}


def _axes(parts: Sequence[pa.Table]) -> list[str]:
    """Return the columns that identify a setting; none if the table is not averaged over seeds."""
    axes = dict.fromkeys(name for part in parts for name in tables.axes(part.schema))
    known = [part for part in parts if part.num_rows]
    return [VARIANT.name, *axes] if known and all(map(is_averaged, known)) else []


def is_averaged(table: pa.Table) -> bool:
    """Whether the rows of a table are points that differ by a seed, which are averaged."""
    return SEED in table.column_names and bool(tables.axes(table.schema))


def _of_table(name: str, better: Mapping[str, str], parts: Sequence[pa.Table]) -> list[Measure]:
    rows = [part.to_pylist() for part in parts]
    axes = _axes(parts)
    keys = axes or _keys(parts, rows)
    grouped: list[dict[tuple[str, ...], list[dict[str, Any]]]] = []
    for one in rows:
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in one:
            groups.setdefault(_key(row, keys), []).append(row)
        grouped.append(groups)
    known = list(dict.fromkeys(key for groups in grouped for key in groups))
    varied = [len({key[place] for key in known}) > 1 for place in range(len(keys))]
    found: list[Measure] = []
    for key in known:
        label = " ".join(part for part in key if part and part != BASE)
        if axes:
            label = _setting(keys, key, varied)
        for column, direction in better.items():
            numbers = [_known(groups.get(key, ()), column) for groups in grouped]
            values = tuple(finite_or_none(sum(of) / len(of)) if of else None for of in numbers)
            if any(value is not None for value in values):
                counts = tuple(map(len, numbers)) if axes else ()
                found.append(Measure(name, label, column, direction, values, counts))
    return found


def _setting(names: Sequence[str], key: Sequence[str], varied: Sequence[bool]) -> str:
    """Return a setting: the axes that vary with their values, such as ``C=1, gamma=0.1``."""
    parts = zip(names, key, varied, strict=True)
    return ", ".join(
        text if name == VARIANT.name else f"{name}={text}"
        for name, text, is_varied in parts
        if is_varied
    )


def _keys(parts: Sequence[pa.Table], rows: Sequence[list[dict[str, Any]]]) -> list[str]:
    """Return the columns that tell the rows of each run apart: texts, then whole numbers."""
    texts: dict[str, None] = {}
    numbers: dict[str, None] = {}
    for part in parts:
        for each in part.schema:
            if pa.types.is_string(each.type) and each.name not in (RUN_ID.name, COMMAND_ID.name):
                texts[each.name] = None
            elif pa.types.is_integer(each.type):
                numbers[each.name] = None
    keys: list[str] = []
    distinct = [min(1, len(one)) for one in rows]
    for name in (*texts, *numbers):
        if all(count == len(one) for count, one in zip(distinct, rows, strict=True)):
            break
        wider = [len({_key(row, [*keys, name]) for row in one}) for one in rows]
        if wider != distinct:
            keys.append(name)
            distinct = wider
    return keys


def _key(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    return tuple(cell(row.get(name)) for name in names)


def _known(rows: Sequence[Mapping[str, Any]], column: str) -> list[float]:
    """Return the numbers in ascending order, so that their sum does not depend on that of rows."""
    return sorted(row[column] for row in rows if isinstance(row.get(column), int | float))
