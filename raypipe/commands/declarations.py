"""Declarations of the tables of a run: the core's, the sweep's and the experiment's."""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING

from raypipe.pipeline.experiment import Experiment
from raypipe.pipeline.tables import CORE, GROWTH
from raypipe.prediction.tables import PREDICTIONS
from raypipe.storage.tables import Table, by_name
from raypipe.sweep.tables import TABLES as SWEEP_TABLES
from raypipe.training.tables import with_metrics

if TYPE_CHECKING:
    from raypipe.report.about import Declarations


def declared(experiment: Experiment) -> dict[str, Table]:
    """Return the declarations of an experiment's tables by name.

    Trials and steps also have the columns of the experiment's step metrics.
    """
    core = with_metrics(CORE, experiment.step_metrics)
    return by_name((*core, *GROWTH, *SWEEP_TABLES, PREDICTIONS, *experiment.tables))


def of_report(experiment: Experiment) -> Declarations:
    """Return what the report reads of an experiment."""
    from raypipe.report.about import Declarations

    core = {table.name for table in declared(experiment).values()}
    core -= {table.name for table in experiment.tables}
    return Declarations(
        sentence(experiment),
        experiment.tables,
        experiment.step_metrics,
        frozenset(core),
        experiment.asked,
    )


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
