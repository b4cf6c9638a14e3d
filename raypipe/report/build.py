"""The report of a run directory, from its tables and its experiment's figures."""

from __future__ import annotations

import yaml

from raypipe import results
from raypipe.config import Configuration
from raypipe.paths import RunDirectory
from raypipe.report.page import report_files
from raypipe.report.training import training_figures


def build(run: RunDirectory, configuration: Configuration, command: str) -> str:
    """Write ``report/index.html`` and ``report/figures/``; returns the path of the page."""
    tables = results.read_tables(run)
    experiment = configuration.experiment
    figures = list(experiment.figures(tables)) if experiment.figures else []
    figures += training_figures(tables)
    stages = tables.get("stages")
    facts = {
        "experiment": experiment.name,
        "run": str(stages["run_id"].iloc[0]) if stages is not None and len(stages) else "",
        "started": str(stages["started_at"].min()) if stages is not None and len(stages) else "",
        "command": command,
        "configuration": yaml.safe_dump(configuration.resolved(), sort_keys=False),
    }
    for name, content in report_files(tables, figures, experiment.name, facts).items():
        run.write(f"{run.report}/{name}", content)
    return f"{run.report}/index.html"
