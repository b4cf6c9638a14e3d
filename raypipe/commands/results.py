"""Results of a run: its tables, which ``raypipe results`` prints as text, and its best points."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from raypipe.config.validation import near_and_all
from raypipe.errors import ConfigError
from raypipe.graph.tables import CORE
from raypipe.redaction import without_credentials
from raypipe.store import tables
from raypipe.store.run_directory import RunDirectory, is_run
from raypipe.study.tables import TABLES as STUDIES

if TYPE_CHECKING:
    from raypipe.report.results import RunResults

#: rows on a terminal
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
    if name not in (*names, *tables.by_name(CORE)):
        raise ConfigError(f"{run.shown}: no table {name!r}{near_and_all(name, names)}")
    return tables.read_arrow(run, name)


def results_of(run: RunDirectory, *, steps: bool = False) -> RunResults:
    """Read the results of a run without the code of its experiment.

    Args:
        run: the run directory.
        steps: whether the logged steps and the samples of GPUs are among them.

    Raises:
        ConfigError: a table or the configuration is damaged.

    """
    from raypipe.report.results import Declarations, RunResults  # with pandas

    configuration = ""
    try:
        known = {each.name: each for each in tables.declarations(run)}
        with suppress(FileNotFoundError):
            configuration = run.read(run.config).decode(errors="replace")
    except OSError as error:
        raise ConfigError(f"{run.shown}: cannot be read: {error}") from error
    core = tables.by_name((*CORE, *STUDIES))
    left_out = {name for name, each in core.items() if each.partitioned and not steps}
    found = {name: tables.read_table(run, name) for name in known if name not in left_out}
    own = Declarations(
        tables=[each for name, each in known.items() if name not in core],
        core={
            name: each.extended(known[name].columns) if name in known else each
            for name, each in core.items()
        },
    )
    return RunResults(found, configuration=configuration, declared=own, directory=run)


def results(
    run_dir: str,
    name: str | None,
    columns: str | None,
    sort: str | None,
    query: str | None,
    form: str,
) -> str:
    """Return a table, the rows of a query, or the list of tables as text.

    Args:
        run_dir: the run directory.
        name: the table; all tables with their numbers of rows if not given.
        columns: names, separated by commas; all if not given.
        sort: names of columns, separated by commas; ``-`` before a name sorts from the largest.
            Missing values come last.
        query: SQL over all tables instead.
        form: ``csv``, ``json``, or empty for a reader.

    Raises:
        ConfigError: a table or a column does not exist, or the query is wrong.

    """
    from raypipe.commands.table_view import terminal_width, view

    run = existing(run_dir)
    if query is not None:
        rows = tables.sql(run, query)
    elif name is not None:
        rows = table(run, name)
    else:
        names = run.list(run.path("results"))
        counts = [tables.count_rows(run, each) for each in names]
        rows = pa.table({"table": pa.array(names, pa.string()), "rows": pa.array(counts)})
    if sort:
        order = []
        for key in _names(sort):
            is_falling = key not in rows.column_names and key.startswith("-")
            column = _column(rows, key.removeprefix("-") if is_falling else key, "--sort")
            order.append((column, "descending" if is_falling else "ascending"))
        rows = rows.sort_by(order)
    if columns:
        rows = rows.select([_column(rows, each, "--columns") for each in _names(columns)])
    if form == "csv":
        output = io.StringIO()
        lines = (map(_plain, row.values()) for row in rows.to_pylist())
        csv.writer(output, lineterminator="\n").writerows([rows.column_names, *lines])
        return output.getvalue().removesuffix("\n")
    if form == "json":
        objects = [{k: _finite(_plain(v)) for k, v in row.items()} for row in rows.to_pylist()]
        return "[\n" + ",\n".join(map(json.dumps, objects)) + "\n]" if objects else "[]"
    shown = rows.slice(0, _MOST_ROWS) if sys.stdout.isatty() else rows
    text = view(shown, terminal_width(), whole=columns is not None or name is None)
    if len(shown) == len(rows):
        return text
    return f"{text}\n{len(shown):,} of {len(rows):,} rows; --csv prints all"


def _plain(value: Any) -> Any:
    """Return a value for CSV or JSON: times as ISO 8601, texts without credentials."""
    if isinstance(value, datetime):
        return value.isoformat()
    return without_credentials(value) if isinstance(value, str) else value


def _finite(value: Any) -> Any:
    """Return a value for JSON, which has neither NaN nor infinity: null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _column(rows: pa.Table, name: str, option: str) -> str:
    if name not in rows.column_names:
        known = near_and_all(name, rows.column_names)
        raise ConfigError(f"{option} {name}: no such column{known}")
    return name
