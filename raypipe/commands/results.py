"""``raypipe results``: read a results table of a run directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.pipeline.tables import CORE
from raypipe.storage import tables
from raypipe.storage.run_directory import RunDirectory
from raypipe.storage.tables import by_name

if TYPE_CHECKING:
    import pandas as pd


def table(run_dir: str, name: str | None) -> pd.DataFrame:
    """Return a table; without a name, the tables with their numbers of rows."""
    import pandas as pd

    run = existing(run_dir)
    names = run.list(run.path("results"))
    if name is None:
        rows = [{"table": each, "rows": len(tables.read_table(run, each))} for each in names]
        return pd.DataFrame(rows, columns=["table", "rows"])
    if name not in names and name not in by_name(CORE):
        hint = did_you_mean(name, names)
        raise ConfigError(f"{run.shown}: no table {name!r}{hint} (there are: {', '.join(names)})")
    return tables.read_table(run, name)


def existing(run_dir: str) -> RunDirectory:
    """Return the run directory at a location. Raises ConfigError if there is none."""
    run = RunDirectory.at(run_dir)
    run.check()
    if not run.exists(run.path("results")):
        raise ConfigError(f"{run.shown}: is not a run directory (it has no results/)")
    return run
