"""``raypipe report``: write the report page and its figures again."""

from __future__ import annotations

import shlex
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from raypipe import import_path
from raypipe.commands.configuration import stored_experiment
from raypipe.commands.declarations import declared, of_report
from raypipe.commands.results import existing
from raypipe.config.document import Document, parse
from raypipe.errors import ConfigError
from raypipe.store import run_status, tables
from raypipe.store.ledger import Ledger
from raypipe.store.lock import is_held
from raypipe.store.run_directory import RunDirectory


def report(location: str, variant: str | None = None) -> str:
    """Write the page and the figures; return the path of the page.

    The tables are first brought up to date with the ledger, which a killed command is ahead of.
    The experiment that the run names is imported from the search path, but never from the run
    directory, which may be someone else's. Raises ConfigError.
    """
    from raypipe.report.page import build

    run_dir = existing(location)
    shown = run_dir.shown
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
        return build(run_dir, experiment.name, experiment.report, command, variant, own)
    except OSError as error:
        raise ConfigError(f"{shown}/report: cannot be written: {error}") from error


def stored_document(run_dir: RunDirectory) -> Document:
    """Return the configuration of a run's newest command.

    Raises:
        ConfigError: it is missing or damaged.

    """
    shown = run_dir.shown
    try:
        text = run_dir.read(run_dir.config).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{shown}: has no config.yaml; is it a run directory?") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{shown}/config.yaml: is damaged or unreadable: {error}") from error
    return parse(text, f"{shown}/config.yaml")


def refuse_code_inside(run: RunDirectory, module: str) -> None:
    """Raise ConfigError if Python would find a module in a run directory."""
    if not run.is_local:
        return
    import_path.prefer()
    run_dir = Path(run.path())
    package, *within = module.split(".")
    spec = None
    with suppress(ValueError):  # it is not the name of a module
        spec = find_spec(package)  # imports nothing, since the name has no dot
    places = (spec.submodule_search_locations or [str(spec.origin)]) if spec is not None else []
    for path in (Path.cwd(), *(Path(place, *within) for place in places)):
        if path.resolve().is_relative_to(run_dir):
            raise ConfigError(
                f"{run_dir}/config.yaml: experiment = {module}: would be imported from the run "
                "directory, whose files are never run as code; run the command in the directory "
                "that has the experiment"
            )


def command_of(run_dir: RunDirectory) -> str:
    """Return the newest command of a run directory, as its status has it.

    Of a damaged status it is the one that continues the run's configuration.
    """
    if (status := run_status.read(run_dir)) is not None and status.command:
        return status.command
    path = run_dir.config if run_dir.is_local else "CONFIG"  # raypipe run reads it from a disk
    return shlex.join(["raypipe", "run", path, "--run-dir", run_dir.shown])
