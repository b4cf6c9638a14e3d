"""The environment section: the commands of a run, and the nodes and packages of each."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from raypipe.report.plots import rows
from raypipe.report.sections import Code, Fold, Section, TableView

#: columns that describe a command, the same in the rows of all its nodes
_COMMAND = ("run_id", "command_id", "started_at", "command", "git_commit", "git_dirty")
#: columns that describe a node; all further ones are versions of packages
_NODE = (
    "hostname", "cpus", "memory_bytes", "gpus", "gpu_count", "gpu_memory_bytes", "gpu_driver",
    "cuda_driver", "platform",
)  # fmt: skip


def environment_section(tables: Mapping[str, pd.DataFrame]) -> Section:
    """Return the commands by start, and the nodes and package versions that each of them had.

    Rows of earlier versions of raypipe name no command and count as one.
    """
    environment = rows(tables, "environment", ["hostname"])
    if environment is None:
        return Section("Environment", [])
    environment = _numbered(environment)
    packages = [n for n in environment.columns if n not in (*_COMMAND, *_NODE, "number")]
    versions = environment.melt("number", packages, "package", "version").dropna()
    shown = ["number", "started_at", "command", "git_commit", "uncommitted_changes", "nodes"]
    parts = [
        TableView(_commands(environment), shown, "Commands of this run"),
        _by_command(environment, list(_NODE), "Nodes"),
        Fold("Versions of packages", [_by_command(versions, ["package", "version"], "Packages")]),
    ]
    return Section("Environment", parts)


def _numbered(environment: pd.DataFrame) -> pd.DataFrame:
    """Return the rows with all columns of a command and its number, in the order of the start."""
    columns = dict.fromkeys([*_COMMAND, *_NODE, *environment.columns])
    environment = environment.reindex(columns=list(columns))
    started = pd.to_datetime(environment["started_at"], utc=True, format="ISO8601")
    environment = environment.assign(started_at=started).sort_values("started_at", kind="stable")
    commands = environment["command_id"].fillna("").astype(str)
    return environment.assign(number=pd.factorize(commands)[0] + 1)


def _commands(environment: pd.DataFrame) -> pd.DataFrame:
    """Return a row per command."""
    groups = environment.groupby("number")
    commands = groups.first().reset_index()
    return commands.assign(
        command=[None if pd.isna(text) else Code(str(text)) for text in commands["command"]],
        uncommitted_changes=commands["git_dirty"].map({True: "yes", False: "no"}),
        nodes=groups["hostname"].agg(lambda names: ", ".join(names.astype(str).unique())).array,
    )


def _by_command(table: pd.DataFrame, columns: list[str], label: str) -> TableView:
    """Return the distinct rows, and the numbers of their commands unless there is only one."""
    groups = table.groupby(columns, sort=False, dropna=False)["number"]
    distinct = groups.agg(lambda numbers: ", ".join(map(str, numbers.unique()))).reset_index()
    distinct = distinct.rename(columns={"number": "commands"})
    several = table["number"].nunique() > 1
    return TableView(distinct, [*columns, "commands"] if several else columns, label)
