"""Declarations of the tables of a run: the core's, the sweep's and the experiment's."""

from __future__ import annotations

from raypipe.pipeline.experiment import Experiment
from raypipe.pipeline.tables import CORE, GROWTH
from raypipe.storage.tables import Table, by_name
from raypipe.sweep.tables import TABLES as SWEEP_TABLES
from raypipe.training.tables import with_metrics


def declared(experiment: Experiment) -> dict[str, Table]:
    """Return the declarations of an experiment's tables by name.

    Trials and steps also have the columns of the experiment's step metrics.
    """
    core = with_metrics(CORE, experiment.step_metrics)
    return by_name((*core, *GROWTH, *SWEEP_TABLES, *experiment.tables))
