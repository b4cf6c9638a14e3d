"""SQL over the tables of a run, by DuckDB."""

from __future__ import annotations

import re

import pyarrow as pa

from raypipe.errors import ConfigError
from raypipe.store import tables
from raypipe.store.run_directory import RunDirectory


def sql(run_dir: RunDirectory, query: str) -> pa.Table:
    """Return the rows of a query over the results tables of a run, which it names as they are.

    Tables are read only if the query mentions them. Like everything in DuckDB's SQL, a query may
    also read and write other files.

    Raises:
        ConfigError: DuckDB is missing, the query is wrong, or a table is damaged.

    """
    try:
        import duckdb
    except ImportError as error:
        raise ConfigError(
            "SQL needs DuckDB, which is not installed: pip install 'raypipe-runner[sql]'"
        ) from error
    known = run_dir.list(run_dir.path("results"))
    named = [name for name in known if re.search(rf"\b{re.escape(name)}\b", query, re.IGNORECASE)]
    with duckdb.connect() as connection:
        try:
            for name in named or known:
                connection.register(name, tables.read_arrow(run_dir, name))
            rows = connection.sql(query)
            found = None if rows is None else rows.to_arrow_table()
        except duckdb.Error as error:
            there = f"tables of this run: {', '.join(known) or 'none'}"
            raise ConfigError(f"SQL: {error}\n{there}") from error
    if found is None:
        raise ConfigError("SQL: the query returns no rows; begin it with select")
    return found
