"""``raypipe report``: write the report page and its figures again."""

from __future__ import annotations

import shlex

from raypipe.commands.results import existing
from raypipe.config.document import parse
from raypipe.errors import ConfigError
from raypipe.pipeline.configuration import load_experiment


def report(run_dir: str) -> str:
    """Write the page and the figures from the tables; return the path of the page."""
    from raypipe.report.build import build

    run = existing(run_dir)
    try:
        text = run.read(run.config).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{run.shown}: has no config.yaml; is it a run directory?") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run.shown}/config.yaml: is damaged or unreadable: {error}") from error
    document = parse(text, f"{run.shown}/config.yaml")
    experiment = load_experiment(document.experiment, run.config)
    path = run.config if run.is_local else "CONFIG"  # raypipe run reads it from a disk
    command = shlex.join(["raypipe", "run", path, "--run-dir", run.shown])
    try:
        return build(run, experiment, command)
    except OSError as error:
        raise ConfigError(f"{run.shown}/report: cannot be written: {error}") from error
