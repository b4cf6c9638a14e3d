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
from raypipe.training.task import JobTask, TrainTask

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
        self._declared = declared

    def settle(self, row: Row) -> None:
        """Take the metric of a finished trial, or check that it has the one that was given.

        Raises:
            UnitError: it has none, or not this one.

        """
        if row["status"] != "succeeded":
            return
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
        elif self.column not in row and self.column not in _NUMBERS:
            known = [*(name for name in numbers if name.startswith(PREFIX)), LOSS.name]
            near = did_you_mean(self.column, known) if self.column else ""
            named = f"sweep.metric = {self.column}" if self.column else "sweep.metric"
            raise UnitError(
                "sweep",
                "error",
                f"{named}: the first finished trial has no such metric{near} "
                f"(it has: {', '.join(known)}); the other trials were not started",
            )

    def value(self, row: Row) -> float | None:
        """Return the finite value of a trial; None without one."""
        self.settle(row)
        return finite_or_none(row.get(self.column))

    def cost(self, row: Row) -> float | None:
        """Return the value of a trial so that less is better; None without one."""
        value = self.value(row)
        return -value if value is not None and self.mode == "max" else value


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
    declared = declared_columns(configuration)
    monitor = training.settings.training.monitor
    monitors = {} if monitor is None else monitors_of({"monitor": monitor.model_dump()})
    name = sweep.metric
    if name is not None:
        _check(name, configuration, training, monitors)
    elif sweep.kind == "systems":
        name = sweep.metric_name
    elif monitors or sweep.scheduler in ("asha", "median"):
        name = next(iter(monitors), LOSS.name)
    if name is None:
        return sweep
    mode = sweep.mode or direction(name, declared, monitors)
    if not mode:
        raise ConfigError(
            f"{configuration.origin}: sweep.metric = {name}: nothing tells whether less or more of "
            "it is better; give sweep.mode: min or sweep.mode: max"
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


def _check(
    name: str, configuration: Configuration, training: Training, monitors: Mapping[str, str]
) -> None:
    """Raise ConfigError for a metric that no trial will have, if that is known."""
    declared = [column.name for column in configuration.experiment.step_metrics]
    if name in (*_NUMBERS, *declared, *monitors):
        return
    task = training.task(None)
    if isinstance(task, ExternalTask) or name in task.columns():
        return  # what a script reports is known after its first trial
    where = f"{configuration.origin}: sweep.metric = {name}"
    known = sorted({*_NUMBERS, *declared})
    if not name.startswith(PREFIX):
        near = did_you_mean(name, known)
        raise ConfigError(f"{where}: is not a number of the table trials{near}")
    if not _evaluates(task):
        raise ConfigError(
            f"{where}: the task has no held-out data (build_eval_dataset); take {LOSS.name}"
        )
    if declared and name != f"{PREFIX}loss":
        near = did_you_mean(name, declared)
        raise ConfigError(
            f"{where}: is not a declared metric{near} (declared: {', '.join(declared)}; add it to "
            "Experiment(step_metrics=...) if the task has it)"
        )


def _evaluates(task: JobTask) -> bool:
    """Whether a task evaluates its model on held-out data, or in a way of its own."""
    own = type(task)
    names = ("build_eval_dataset", "evaluate")
    return any(getattr(own, name, None) is not getattr(TrainTask, name) for name in names)
