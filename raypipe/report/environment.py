"""The environment section: nodes, commit and package versions of each command of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pandas as pd

from raypipe.report.formatting import cell, heading
from raypipe.report.plots import rows
from raypipe.report.sections import Code, Fold, Section, TableView

#: columns that are the same in the rows of all nodes of a command
_OF_COMMAND = (
    "run_id",
    "variant",
    "command_id",
    "command",
    "started_at",
    "git_commit",
    "git_dirty",
)


def environment_section(tables: Mapping[str, pd.DataFrame]) -> Section:
    """Return the environment of the last command of a run, and the earlier commands to open.

    The summary has the last command itself.
    """
    environment = rows(tables, "environment", ["hostname", *_OF_COMMAND])
    if environment is None:
        return Section("Environment", [])
    at = pd.to_datetime(environment["started_at"], utc=True, format="ISO8601")
    known = environment.assign(started_at=at).sort_values("started_at", kind="stable")
    groups = known.groupby("command_id", sort=False)
    *earlier, last = [_command(nodes) for _, nodes in groups]
    last = replace(last, parts=[part for part in last.parts if not isinstance(part, Code)])
    return Section("Environment", [last.title, *last.parts, *earlier])


def _command(nodes: pd.DataFrame) -> Fold:
    """Return a command, with a column per node and a row per property or package."""
    about = nodes.iloc[0]
    commit = "no commit" if pd.isna(about["git_commit"]) else f"commit {about['git_commit']}"
    changes = " with uncommitted changes" if nodes["git_dirty"].eq(True).any() else ""
    started = cell("started_at", about["started_at"])
    columns = nodes.columns.drop([*_OF_COMMAND, "hostname"])
    names = [str(name) for name in columns if nodes[name].notna().any()]
    table = pd.DataFrame({"property": [heading(name) for name in names]})
    for _, node in nodes.drop_duplicates("hostname").iterrows():
        table[str(node["hostname"])] = [cell(name, node[name]) for name in names]
    view = TableView(table, list(table.columns), "Nodes and packages")
    return Fold(f"{started}, {commit}{changes}", [Code(str(about["command"])), view])
