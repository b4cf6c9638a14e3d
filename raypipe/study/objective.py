"""Objective of a sweep: the column of ``trials`` to compare, and whether less or more is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Training
from raypipe.report.measures import (
    LOSS,
    PREFIX,
    better_by_name,
    monitors_of,
    training_measures,
)
from raypipe.stats import finite_or_none
from raypipe.store.ledger import Row
from raypipe.store.tables import Column
from raypipe.study.sweep_settings import SweepSettings
from raypipe.training.job import ExternalTask
from raypipe.training.tables import TRIALS
from raypipe.training.task import TrainTask

Mode = Literal["min", "max"]
_NUMBERS = {column.name for column in TRIALS.columns if column.type in ("integer", "real")}


class Objective:
    """The metric of a sweep. One that is not known before the start is that of the first trial.

    Args:
        sweep: the section with all that is known before the start (:func:`with_metric`).
        declared: the columns of ``trials`` and ``steps`` of which it is declared what is better.

    """

    def __init__(self, sweep: SweepSettings, declared: Sequence[Column]) -> None:
        self.column = sweep.metric or ""
        self.mode: Mode = sweep.mode or "min"
        self._further, self._declared = sweep.further_metrics, declared

    def settle(self, row: Row) -> None:
        """Take the metric of a finished trial, or check that it has the one that was given.

        Raises:
            UnitError: it has none, or not this one.

        """
        # a held-out metric counts also where it ended in NaN: other trials may have a value
        numbers = [
            name
            for name, value in row.items()
            if name.startswith(PREFIX) or finite_or_none(value) is not None
        ]
        measures = training_measures(numbers, self._declared, {})
        if not self.column and measures:
            self.column = measures[0].name
            self.mode = "max" if measures[0].better == "higher" else "min"
        for column in (self.column, *self._further):
            if column not in row and column not in _NUMBERS:
                known = [*(name for name in numbers if name.startswith(PREFIX)), LOSS.name]
                near = did_you_mean(column, known) if column else ""
                raise UnitError(
                    "sweep",
                    "error",
                    f"sweep.metric = {column}: the first finished trial has no such metric{near} "
                    f"(it has: {', '.join(known)}); the other trials were not started",
                )

    def costs(self, row: Row) -> list[float] | None:
        """Return the values of a trial so that less is better; None if it lacks one."""
        if row["status"] not in ("succeeded", "interrupted"):
            return None
        modes = {self.column: self.mode, **self._further}
        values = {name: finite_or_none(row.get(name)) for name in modes}
        costs = [v if modes[name] == "min" else -v for name, v in values.items() if v is not None]
        return costs if len(costs) == len(modes) else None


def declared_columns(configuration: Configuration) -> list[Column]:
    """Return the declared columns of trainings, those of the experiment first."""
    return [*configuration.experiment.step_metrics, *TRIALS.columns]


def with_metric(configuration: Configuration, training: Training) -> SweepSettings:
    """Return the section ``sweep`` with the metric and its mode, as far as they are known.

    By default the metric is the speed; for ``kind: quality`` the monitored one, else that of the
    first trial. A scheduler that stops trials needs one before: the training loss.

    Raises:
        ConfigError: no trial will have the metric, or nothing tells which values are better.

    """
    sweep: SweepSettings = configuration.settings.sweep
    declared, where = declared_columns(configuration), f"{configuration.origin}: sweep.metric"
    monitor = training.settings.training.monitor
    monitors = {} if monitor is None else monitors_of({"monitor": monitor.model_dump()})
    for name in (sweep.metric, *sweep.further_metrics):
        if name is not None and name not in monitors:
            _check(name, f"{where} = {name}", configuration, training)
    name = sweep.metric_name
    if not name and (monitors or sweep.scheduler is not None):
        name = next(iter(monitors), LOSS.name)
    if not name:
        return sweep
    mode = sweep.mode or direction(name, declared, monitors)
    if not mode:
        raise ConfigError(
            f"{where} = {name}: nothing tells whether less or more of it is better; give "
            "sweep.mode: min or sweep.mode: max"
        )
    return sweep.model_copy(update={"metric": name, "mode": mode})


def direction(
    name: str, declared: Iterable[Column], monitors: Mapping[str, str]
) -> Mode | Literal[""]:
    """Return whether a metric is minimized or maximized; empty if nothing tells.

    Its declaration decides, then the monitor's mode, then its name.
    """
    known = next((c.better for c in declared if c.name == name and c.better), "")
    better = known or monitors.get(name) or better_by_name(name)
    return {"lower": "min", "higher": "max"}.get(better, "")  # type: ignore[return-value]


def _check(name: str, where: str, configuration: Configuration, training: Training) -> None:
    """Raise ConfigError for a metric that no trial will have, if that is known."""
    declared = [column.name for column in configuration.experiment.step_metrics]
    task = training.task(None)
    if name in (*_NUMBERS, *declared) or isinstance(task, ExternalTask) or name in task.columns():
        return  # what a script reports is known after its first trial
    if not name.startswith(PREFIX):
        near = did_you_mean(name, sorted({*_NUMBERS, *declared}))
        raise ConfigError(f"{where}: is not a number of the table trials{near}")
    own = ("build_eval_dataset", "evaluate")
    if all(getattr(type(task), each, None) is getattr(TrainTask, each) for each in own):
        raise ConfigError(
            f"{where}: the task has no held-out data (build_eval_dataset); take {LOSS.name}"
        )
    if declared and name != f"{PREFIX}loss":
        near = did_you_mean(name, declared)
        raise ConfigError(
            f"{where}: is not a declared metric{near} (declared: {', '.join(declared)}; add it to "
            "Experiment(step_metrics=...) if the task has it)"
        )
