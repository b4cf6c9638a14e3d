"""The report of a run directory, from its tables and its experiment's figures."""

from __future__ import annotations

import logging
from collections.abc import Mapping

import pandas as pd

from raypipe.pipeline.experiment import Experiment
from raypipe.redaction import shown_traceback
from raypipe.report.formatting import cell
from raypipe.report.page import report_files
from raypipe.report.plots import Figure
from raypipe.report.sweep import sweep_figures
from raypipe.report.training import training_figures
from raypipe.storage import tables as results
from raypipe.storage.run_directory import RunDirectory

log = logging.getLogger(__name__)


def build(run: RunDirectory, experiment: Experiment, command: str) -> str:
    """Write ``report/index.html`` and ``report/figures/``; returns the path of the page."""
    tables = results.read_tables(run)
    figures = _own(experiment, tables) + sweep_figures(tables) + training_figures(tables)
    facts = {
        "experiment": experiment.name,
        **_about(tables),
        "command": command,
        "configuration": run.read(run.config).decode(),
    }
    for name, content in report_files(tables, figures, experiment.name, facts).items():
        run.write(f"{run.report}/{name}", content)
    return f"{run.report}/index.html"


def _own(experiment: Experiment, tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """The experiment's figures; where its code fails none, and how it failed in the log."""
    try:
        return list(experiment.figures(tables)) if experiment.figures else []
    except Exception:
        told = "the report is without the experiment's figures\n%s"
        log.error(told, shown_traceback())  # noqa: TRY400
        return []


def _about(tables: Mapping[str, pd.DataFrame]) -> dict[str, str]:
    """Which run it is, when it was, how long it took and where."""
    stages, nodes = tables.get("stages"), tables.get("environment")
    facts: dict[str, str] = {}
    if stages is not None and len(stages):
        facts["run"] = str(stages["run_id"].iloc[0])
        facts["started"] = cell("started_at", stages["started_at"].min())
        facts["computing"] = cell("duration_s", stages["duration_s"].sum())
    if nodes is not None and len(nodes):
        facts["nodes"] = ", ".join(dict.fromkeys(nodes["hostname"]))
    return facts
