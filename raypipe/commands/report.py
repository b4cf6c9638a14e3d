"""``raypipe report``: write the report page and its figures again."""

from __future__ import annotations

import shlex

from raypipe.commands.configuration import (
    declared,
    of_report,
    refuse_code_inside,
    stored_document,
    stored_experiment,
)
from raypipe.commands.results import existing
from raypipe.errors import ConfigError
from raypipe.store import run_status, tables
from raypipe.store.ledger import Ledger
from raypipe.store.lock import is_held
from raypipe.store.run_directory import RunDirectory


def report(location: str) -> str:
    """Write the page and the figures; return the path of the page.

    The tables are first brought up to date with the ledger, which a killed command is ahead of.
    The experiment that the run names is imported from the search path, but never from the run
    directory, which may be someone else's. Raises ConfigError.
    """
    from raypipe.report.page import build

    run_dir = existing(location)
    document = stored_document(run_dir)
    if document.experiment:  # a function is not imported
        refuse_code_inside(run_dir, document.experiment)
    experiment = stored_experiment(document)
    try:
        if not is_held(run_dir):  # else its command writes them
            ledger = Ledger.to_read(run_dir)
            if (run := ledger.get("runs", "run")) is not None and not ledger.damage:
                tables.write_tables(run_dir, ledger, declared(experiment), str(run["run_id"]))
        own, command = of_report(experiment), command_of(run_dir)
        return build(run_dir, experiment.name, experiment.report, command, own)
    except OSError as error:
        raise ConfigError(f"{run_dir.shown}/report: cannot be written: {error}") from error


def command_of(run_dir: RunDirectory) -> str:
    """Return the newest command of a run directory, as its status has it.

    Of a damaged status it is the one that continues the run's configuration.
    """
    if (status := run_status.read(run_dir)) is not None and status.command:
        return status.command
    path = run_dir.config if run_dir.is_local else "CONFIG"  # raypipe run reads it from a disk
    return shlex.join(["raypipe", "run", path, "--run-dir", run_dir.shown])
