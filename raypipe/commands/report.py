"""``raypipe report``: write the report page and its figures again."""

from __future__ import annotations

import shlex

from raypipe.commands.configuration import stored_experiment
from raypipe.commands.declarations import of_report
from raypipe.commands.results import existing
from raypipe.config.document import parse
from raypipe.errors import ConfigError


def report(location: str, variant: str | None = None) -> str:
    """Write the page and the figures from the tables; return the path of the page."""
    from raypipe.report.build import build

    run_dir = existing(location)
    shown = run_dir.shown
    try:
        text = run_dir.read(run_dir.config).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{shown}: has no config.yaml; is it a run directory?") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown}/config.yaml: is damaged or unreadable: {error}") from error
    document = parse(text, f"{shown}/config.yaml")
    experiment = stored_experiment(document)
    path = run_dir.config if run_dir.is_local else "CONFIG"  # raypipe run reads it from a disk
    command = shlex.join(["raypipe", "run", path, "--run-dir", shown])
    try:
        declared = of_report(experiment)
        return build(run_dir, experiment.name, experiment.report, command, variant, declared)
    except OSError as error:
        raise ConfigError(f"{shown}/report: cannot be written: {error}") from error
