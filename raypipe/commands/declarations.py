"""Declarations of the tables of a run: the core's, the sweep's and the experiment's."""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from raypipe.graph.experiment import Experiment
from raypipe.graph.tables import CORE
from raypipe.store import tables
from raypipe.store.tables import Table, by_name
from raypipe.study.tables import TABLES as STUDIES
from raypipe.training.tables import with_metrics

if TYPE_CHECKING:
    from raypipe.report.run_results import Declarations, RunResults
    from raypipe.store.run_directory import RunDirectory


def declared(experiment: Experiment) -> dict[str, Table]:
    """Return the declarations of an experiment's tables by name.

    Trials and steps also have the columns of the experiment's step metrics.
    """
    core = with_metrics(CORE, experiment.step_metrics)
    return by_name((*core, *STUDIES, *experiment.tables))


def of_report(experiment: Experiment) -> Declarations:
    """Return what the report reads of an experiment."""
    from raypipe.report.run_results import Declarations

    core = {table.name for table in declared(experiment).values()}
    core -= {table.name for table in experiment.tables}
    return Declarations(
        sentence(experiment),
        experiment.tables,
        experiment.step_metrics,
        frozenset(core),
        experiment.asked,
    )


def results_of(run_dir: RunDirectory) -> RunResults:
    """Read the results of a run, without the code of its experiment and the logged steps.

    Raises:
        ConfigError: a table or the configuration is damaged.

    """
    # with matplotlib, slow to import
    from raypipe.report.run_results import Declarations, RunResults

    configuration = ""
    with suppress(FileNotFoundError):
        configuration = run_dir.read(run_dir.config).decode(errors="replace")
    core = by_name((*CORE, *STUDIES))
    known = {table.name: table for table in tables.declarations(run_dir)}
    left_out = {name for name, table in core.items() if table.partitioned}
    found = {name: tables.read_table(run_dir, name) for name in known if name not in left_out}
    own = Declarations(
        tables=[table for name, table in known.items() if name not in core],
        step_metrics=known["trials"].columns if "trials" in known else (),
        core=frozenset(core),
    )
    return RunResults(found, configuration=configuration, declared=own, directory=run_dir)


def sentence(experiment: Experiment) -> str:
    """Return the first line of the docstring of an experiment's module; empty without one.

    An experiment whose stages raypipe itself makes has none.
    """
    stages = inspect.unwrap(getattr(experiment.stages, "func", experiment.stages))  # of a partial
    module = getattr(stages, "__module__", "")
    if module.partition(".")[0] == "raypipe" or module not in sys.modules:
        return ""
    text = inspect.getdoc(sys.modules[module]) or ""
    return text.partition("\n")[0].strip()
