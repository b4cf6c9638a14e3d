"""The sections after the results: predictions, environment, and how to repeat the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from raypipe.config.matrix import SEED, is_seed
from raypipe.report.about import About
from raypipe.report.formatting import cell, heading
from raypipe.report.plots import rows
from raypipe.report.sections import Code, Download, Fold, Part, Section, TableView, cells

_FILE = "config.yaml"
_MOST_SEEDS = 12
_KEPT = (
    "The folder `code` keeps the code that ran: `raypipe show --code` prints it, and "
    "`raypipe replay` computes results again."
)
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
_COLUMNS = (
    "stage", "card", "workers", "strategy", "precision", "gradient_checkpointing", "micro_batch",
    "accumulation", "peak_bytes", "measured_peak_bytes", "capacity_bytes", "samples_per_s",
    "interval", "measured_samples_per_s", "hours", "energy_kwh", "cost", "note",
)  # fmt: skip


def repetition_section(about: About) -> Section:
    """Return the commands that repeat a run elsewhere, and what they need."""
    parts: list[Part] = []
    node = last_node(about.tables.get("environment"))
    if about.configuration:
        commands = [*_checkout(node), f"raypipe run {_FILE} --run-dir repeated"]
        parts += [
            "The configuration below has every setting, also those of the profile. Save it, then:",
            Code("\n".join(commands)),
        ]
        if node is not None:
            commit = node.get("git_commit")
            differs = "Files differed from this commit when the run started."
            why = differs if node.get("git_dirty") in (True,) else ""
            why = why if isinstance(commit, str) else "The run did not start in a git repository."
            parts += [f"{why} {_KEPT}"] if why else []
        parts.append(Download(_FILE, about.configuration))
    if about.command and about.command != about.asked_command:  # which the summary shows
        parts += ["To continue this run, or compute more in it:", Code(about.command)]
    if about.seeds:
        parts.append(f"Seeds: {seeds_line(about)}.")
    if about.configuration:
        parts.append(Fold("Resolved configuration", [Code(about.configuration)]))
    return Section("How to repeat", parts)


def last_node(environment: pd.DataFrame | None) -> dict[str, Any] | None:
    """Return the first node of the newest command; None if there is none."""
    if environment is None or environment.empty:
        return None
    if "started_at" in environment and environment["started_at"].notna().any():
        started = pd.to_datetime(environment["started_at"], utc=True, format="ISO8601")
        environment = environment.loc[[started.idxmax()]]
    return {str(name): value for name, value in environment.iloc[0].items()}


def _checkout(node: dict[str, Any] | None) -> list[str]:
    commit = None if node is None else node.get("git_commit")
    return [f"git checkout {commit.rstrip('+')}"] if isinstance(commit, str) else []


def seeds_line(about: About) -> str:
    """Return the seeds of the configuration, and those of a matrix."""
    listed = [f"{key} = {value}" for key, value in about.seeds.items()]
    more = len(listed) - _MOST_SEEDS
    text = ", ".join(listed[:_MOST_SEEDS]) + (f" and {more} more" if more > 0 else "")
    for key, values in about.varied.items():
        if is_seed(key) and key != SEED:
            text += f"; the matrix sets {key} to {', '.join(values)}"
    runs = about.setting("matrix.runs")
    return f"{text}; run r of the matrix (0 to {runs - 1}) adds 1000·r" if runs else text


def environment_section(tables: Mapping[str, pd.DataFrame]) -> Section:
    """Return the environment of the last command of a run, and the earlier commands to open.

    The summary has the last command itself.
    """
    environment = rows(tables, "environment")
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


def predictions_section(tables: Mapping[str, pd.DataFrame]) -> Section:
    """Return the predictions of ``--card``; without any, a section without parts."""
    found = rows(tables, "card_predictions")
    if found is None or found.empty:
        return Section("Predictions", [])
    low, high = found["samples_per_s_low"], found["samples_per_s_high"]
    interval = ["" if pd.isna(a) else f"{a:.3g} to {b:.3g}" for a, b in zip(low, high, strict=True)]
    found = found.assign(interval=cells(interval))
    text = (
        "Predicted from the model on a machine without these cards. Times are of optimizer steps "
        "alone."
    )
    return Section("Predictions", [text, TableView(found, _COLUMNS, "Predictions")])
