"""``raypipe results``: read a results table of a run directory."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from raypipe.commands.table_view import terminal_width, view
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.graph.tables import CORE
from raypipe.redaction import without_credentials
from raypipe.store import tables
from raypipe.store.run_directory import RunDirectory, is_run
from raypipe.store.tables import by_name

#: rows on a terminal without --limit
_MOST_ROWS = 100


def opened(location: str) -> RunDirectory:
    """Return the run directory at a location. Raises ConfigError if there is none."""
    run = RunDirectory.at(location)
    run.check()
    reason = "it has no status.json and no ledger/"
    if run.is_file:
        reason = "it is a file"
    elif not run.exists(run.path()):
        reason = "it does not exist"
    elif is_run(run.list(run.path())):
        return run
    raise ConfigError(
        f"{run.shown}: is not a run directory: {reason}; `raypipe ls` lists run directories"
    )


def existing(run_dir: str) -> RunDirectory:
    """Return the run directory at a location, with results. Raises ConfigError if there is none."""
    run = opened(run_dir)
    if not run.exists(run.path("results")):
        raise ConfigError(f"{run.shown}: has no results yet: no stage of it has ended")
    return run


def table(run: RunDirectory, name: str) -> pa.Table:
    """Return a table. Raises ConfigError: there is no such table, or it is damaged."""
    names = run.list(run.path("results"))
    if name not in names and name not in by_name(CORE):
        hint = did_you_mean(name, names)
        raise ConfigError(f"{run.shown}: no table {name!r}{hint} (there are: {', '.join(names)})")
    return tables.read_arrow(run, name)


def newest_environment(run: RunDirectory) -> list[dict[str, Any]]:
    """Return the rows of the table ``environment`` of the newest command, one per node."""
    rows: list[dict[str, Any]] = tables.read_arrow(run, "environment").to_pylist()
    newest = max(rows, key=lambda row: str(row["started_at"]), default={})
    return [row for row in rows if row["command_id"] == newest["command_id"]]


def printed(
    run_dir: str,
    name: str | None = None,
    query: str | None = None,
    columns: str | None = None,
    sort: str | None = None,
    limit: int | None = None,
    form: str = "",
) -> str:
    """Return a table, the rows of a query, or the list of tables as text.

    Args:
        run_dir: the run directory.
        name: the table; all tables with their numbers of rows if not given.
        query: SQL over all tables instead.
        columns: names, separated by commas; all if not given.
        sort: names of columns, separated by commas; ``-`` before a name sorts from the largest.
            Missing values come last.
        limit: the first rows; 0 for all, None for as many as a terminal shows.
        form: ``csv``, ``json``, or empty for a reader.

    Raises:
        ConfigError: a table or a column does not exist, or the query is wrong.

    """
    run = existing(run_dir)
    if query is not None:
        rows = tables.sql(run, query)
    elif name is not None:
        rows = table(run, name)
    else:
        names = run.list(run.path("results"))
        counts = [len(tables.read_arrow(run, each)) for each in names]
        rows = pa.table({"table": pa.array(names, pa.string()), "rows": pa.array(counts)})
    if sort:
        order = [_sort_key(rows, each) for each in _names(sort)]
        rows = rows.take(pc.sort_indices(rows, sort_keys=order))
    if limit:
        rows = rows.slice(0, limit)
    if columns:
        rows = rows.select([_column(rows, each, "--columns") for each in _names(columns)])
    if form:
        return _csv(rows) if form == "csv" else _json(rows)
    notes = []
    shown = rows.slice(0, _MOST_ROWS) if limit is None and sys.stdout.isatty() else rows
    if len(shown) < len(rows):
        notes.append(f"{len(shown):,} of {len(rows):,} rows; --limit 0 shows all")
    whole = columns is not None or name is None
    return "\n".join([view(shown, terminal_width(), whole=whole), *notes])


def _csv(rows: pa.Table) -> str:
    """Return a table as CSV; a missing value is an empty field."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows.column_names)
    writer.writerows([map(_plain, row.values()) for row in rows.to_pylist()])
    return text.getvalue().removesuffix("\n")


def _json(rows: pa.Table) -> str:
    """Return a table as a JSON list of objects; NaN and infinity become null."""
    lines = []
    for row in rows.to_pylist():
        values = {name: _plain(value) for name, value in row.items()}
        lost = {n for n, v in values.items() if isinstance(v, float) and not math.isfinite(v)}
        lines.append(json.dumps(values | dict.fromkeys(lost)))
    return "[\n" + ",\n".join(lines) + "\n]" if lines else "[]"


def _plain(value: Any) -> Any:
    """Return a value for CSV or JSON: times as ISO 8601, texts without credentials."""
    if isinstance(value, datetime):
        return value.isoformat()
    return without_credentials(value) if isinstance(value, str) else value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _sort_key(rows: pa.Table, name: str) -> tuple[str, str]:
    if name not in rows.column_names and name.startswith("-"):
        return _column(rows, name[1:], "--sort"), "descending"
    return _column(rows, name, "--sort"), "ascending"


def _column(rows: pa.Table, name: str, option: str) -> str:
    known = rows.column_names
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"{option} {name}: no such column{hint} (there are: {', '.join(known)})")
    return name
