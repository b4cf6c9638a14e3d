"""What the commands show without running anything: the plan, the hardware, tables, the report."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from raypipe import hardware
from raypipe.commands.run import stages_of
from raypipe.config import configuration as config
from raypipe.errors import ConfigError
from raypipe.launch import in_cluster
from raypipe.pipeline.context import is_done
from raypipe.pipeline.runner import refuse_changes
from raypipe.storage import tables as results
from raypipe.storage.ledger import Ledger
from raypipe.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    import pandas as pd


def plan(path: str, overrides: Sequence[str], *, run_dir: str | None, profile: str) -> pd.DataFrame:
    """``raypipe plan``: a row a stage, what is to do, what is done, what it costs."""
    import pandas as pd

    document = config.read(path)
    nodes = [hardware.detect()]
    configuration = config.resolve(document, overrides, profile, nodes)
    stages = stages_of(configuration, (), nodes)
    ledger = None
    if run_dir is not None:
        run = RunDirectory.at(run_dir)
        run.check()
        ledger = Ledger(run, writable=False)
        refuse_changes(ledger, stages, run.shown)
    rows = []
    for stage in stages:
        done = [unit for unit in stage.units if ledger is not None and is_done(ledger, unit)]
        rows.append(
            {
                "stage": stage.name,
                "needs": ", ".join(stage.needs),
                "units": len(stage.units),
                "done": len(done),
                "to do": len(stage.units) - len(done),
                "cost": stage.cost,
            }
        )
    return pd.DataFrame(rows)


def doctor() -> dict[str, Any]:
    """``raypipe doctor``: this machine, the packages, and the Ray cluster if there is one."""
    from raypipe.launch.cluster import RayLauncher
    from raypipe.provenance import environment_row, git_commit

    report: dict[str, Any] = {
        **environment_row(),
        "git_commit": git_commit(),
        "hardware": hardware.detect().as_dict(),
        "cluster": None,
    }
    if in_cluster():
        launcher = RayLauncher()
        try:
            nodes = launcher.on_every_node(hardware.detect)
            report["cluster"] = [node.as_dict() for node in nodes]
        finally:
            launcher.close()
    return report


def table(run_dir: str, name: str | None) -> pd.DataFrame:
    """``raypipe results``: a table, or without a name the tables with their numbers of rows."""
    import pandas as pd

    run = _existing(run_dir)
    names = run.list(run.path("results"))
    if name is None:
        rows = [{"table": each, "rows": len(results.read_table(run, each))} for each in names]
        return pd.DataFrame(rows, columns=["table", "rows"])
    if name not in names and name not in results.SCHEMAS:
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{run.shown}: no table {name!r}{hint} (there are: {', '.join(names)})")
    return results.read_table(run, name)


def report(run_dir: str) -> str:
    """``raypipe report``: write the page and the figures again from the tables."""
    from raypipe.report.build import build

    run = _existing(run_dir)
    try:
        text = run.read(run.config).decode()
    except FileNotFoundError as error:
        raise ConfigError(f"{run.shown}: has no config.yaml; is it a run directory?") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{run.shown}/config.yaml: is damaged or unreadable: {error}") from error
    document = config.parse(text, f"{run.shown}/config.yaml")
    experiment = config.load_experiment(document.experiment, run.config)
    path = run.config if run.is_local else "CONFIG"  # raypipe run reads it from a disk
    command = shlex.join(["raypipe", "run", path, "--run-dir", run.shown])
    try:
        return build(run, experiment, command)
    except OSError as error:
        raise ConfigError(f"{run.shown}/report: cannot be written: {error}") from error


def _existing(run_dir: str) -> RunDirectory:
    run = RunDirectory.at(run_dir)
    run.check()
    if not run.exists(run.path("results")):
        raise ConfigError(f"{run.shown}: no run directory (it has no results/)")
    return run
