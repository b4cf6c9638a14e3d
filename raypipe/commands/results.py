"""``raypipe results``: read a results table of a run directory."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.commands.run_summary import opened
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.graph.tables import CORE
from raypipe.redaction import without_credentials
from raypipe.store import tables
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import by_name

#: rows that are written at once
_ROWS = 1000


def table(run: RunDirectory, name: str | None) -> pa.Table:
    """Return a table; without a name, the tables with their numbers of rows.

    Raises:
        ConfigError: there is no such table, or it is damaged.

    """
    names = run.list(run.path("results"))
    if name is None:
        counts = [len(tables.read_arrow(run, each)) for each in names]
        return pa.table(
            {"table": pa.array(names, pa.string()), "rows": pa.array(counts, pa.int64())}
        )
    if name not in names and name not in by_name(CORE):
        hint = did_you_mean(name, names)
        raise ConfigError(f"{run.shown}: no table {name!r}{hint} (there are: {', '.join(names)})")
    return tables.read_arrow(run, name)


def without_empty(listed: pa.Table) -> tuple[pa.Table, list[str]]:
    """Return those of the listed tables that have rows, and the names of the others."""
    if "rows" not in listed.column_names or "table" not in listed.column_names:
        return listed, []  # columns were chosen
    is_empty = pc.equal(listed["rows"], 0)
    return listed.filter(pc.invert(is_empty)), listed.filter(is_empty)["table"].to_pylist()


def existing(run_dir: str) -> RunDirectory:
    """Return the run directory at a location, with results. Raises ConfigError if there is none."""
    run = opened(run_dir)
    if not run.exists(run.path("results")):
        raise ConfigError(f"{run.shown}: has no results yet: no stage of it has ended")
    return run


def chosen(
    rows: pa.Table, columns: str | None = None, sort: str | None = None, limit: int | None = None
) -> pa.Table:
    """Return some rows and columns of a table.

    Args:
        rows: the table.
        columns: names, separated by commas; all if not given.
        sort: names of columns, separated by commas; ``-`` before a name sorts from the largest.
            Missing values come last.
        limit: the first rows; all if not given.

    Raises:
        ConfigError: a column does not exist.

    """
    if sort:
        order = [_sort_key(rows, name) for name in _names(sort)]
        rows = rows.take(pc.sort_indices(rows, sort_keys=order))
    if limit is not None:
        rows = rows.slice(0, limit)
    if columns:
        rows = rows.select([_column(rows, name, "--columns") for name in _names(columns)])
    return rows


def to_csv(rows: pa.Table) -> Iterator[str]:
    """Yield a table as CSV, in parts; a missing value is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows.column_names)
    for batch in rows.to_batches(max_chunksize=_ROWS):
        columns = [[_plain(value) for value in column] for column in batch.to_pydict().values()]
        writer.writerows(zip(*columns, strict=True))
        yield text.getvalue()
        text.seek(0)
        text.truncate()
    yield text.getvalue()


def to_json(rows: pa.Table) -> Iterator[str]:
    """Yield a table as a JSON list of objects, in parts; NaN and infinity become null."""
    before = "["
    for batch in rows.to_batches(max_chunksize=_ROWS):
        lines = [json.dumps(_finite(row)) for row in batch.to_pylist()]
        if lines:
            yield before + "\n" + ",\n".join(lines)
            before = ","
    yield "[]\n" if before == "[" else "\n]\n"


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sort_key(rows: pa.Table, name: str) -> tuple[str, str]:
    if name not in rows.column_names and name.startswith("-"):
        return _column(rows, name[1:], "--sort"), "descending"
    return _column(rows, name, "--sort"), "ascending"


def _column(rows: pa.Table, name: str, option: str) -> str:
    known: Sequence[str] = rows.column_names
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"{option} {name}: no such column{hint} (there are: {', '.join(known)})")
    return name


def _plain(value: Any) -> Any:
    """Return a value for CSV or JSON: times as ISO 8601, texts without credentials."""
    if isinstance(value, datetime):
        return value.isoformat()
    return without_credentials(value) if isinstance(value, str) else value


def _finite(row: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: _plain(value) for name, value in row.items()}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in plain.items()
    }
