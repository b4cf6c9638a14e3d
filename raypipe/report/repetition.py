"""The section on how to repeat a run: commit, command, configuration and seeds."""

from __future__ import annotations

from typing import Any

import pandas as pd

from raypipe.config.matrix import SEED, is_seed
from raypipe.report.about import About
from raypipe.report.sections import Code, Download, Fold, Part, Section

_FILE = "config.yaml"
_MOST_SEEDS = 12
_KEPT = (
    "The folder `code` keeps the code that ran: `raypipe show --code` prints it, and "
    "`raypipe replay` computes results again."
)


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
