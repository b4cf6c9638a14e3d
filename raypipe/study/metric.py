"""Metric of a study: what it is, whether less or more is better, and its value at a point.

A matrix takes any column of any table, averaged over the rows that belong to a point. A sweep takes
a column of ``trials``, which may be known only after the first one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from raypipe.config.search import BoundSettings, MetricSettings, Mode
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
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import BASE
from raypipe.store.tables import Column, Table
from raypipe.study.sweep_settings import SweepSettings
from raypipe.training.job import ExternalTask
from raypipe.training.tables import TRIALS
from raypipe.training.task import TrainTask

_MOST_VALUES = 10  # of a column in a message
#: similarity from which a column that is not declared is a misspelling of one that is
_MISSPELLED = 0.85
_NUMBERS = {column.name for column in TRIALS.columns if column.type in ("integer", "real")}


@dataclass(frozen=True)
class Measured:
    """A metric's mean at a point, missing if a part of it has no finite number; its rows."""

    value: float | None
    rows: int


@dataclass(frozen=True)
class Metric:
    """A column of a table, restricted to the rows with certain values of other columns.

    ``mode`` says whether it is minimized or maximized; a condition on it does not need one.
    """

    table: str
    column: str
    where: Mapping[str, Any]
    mode: Mode = "min"

    @property
    def name(self) -> str:
        """The name in tables, such as ``measures.macro_f1 (classifier)``."""
        values = (v if isinstance(v, list | tuple) else [v] for v in self.where.values())
        of = " ".join(str(value) for several in values for value in several)
        return f"{self.table}.{self.column}" + (f" ({of})" if of else "")

    def measure(self, ledger: Ledger, points: Iterable[frozenset[str]]) -> Measured:
        """Return the mean over points; each is given by the variants of its stages.

        Rows are averaged within each point first; those without a value do not count.
        """
        rows = [row for row in ledger.rows(self.table) if self._holds(row)]
        rows = [row for row in rows if _is_number(row.get(self.column))]
        means: list[float] = []
        count = 0
        for variants in points:
            own = [row[self.column] for row in rows if row.get("variant", BASE) in variants]
            means.append(sum(own) / len(own) if own else math.nan)
            count += len(own)
        return Measured(finite_or_none(sum(means) / len(means)) if means else None, count)

    def lacking(self, ledger: Ledger) -> str:
        """Return a message that no row has the metric, with the values that rows have."""
        rows = ledger.rows(self.table)
        if not rows:
            return f"{self.name}: no stage wrote a row of the table {self.table}"
        given = [row[self.column] for row in rows if row.get(self.column) is not None]
        if given and not any(map(_is_number, given)):
            return f"{self.name}: holds {given[0]!r} ({type(given[0]).__name__}), not a number"
        numbers = sorted({name for row in rows for name, value in row.items() if _is_number(value)})
        if self.column not in numbers:
            near = did_you_mean(self.column, numbers)
            listed = ", ".join(numbers) or "none"
            return f"{self.name}: no row of the table has it{near} (numbers: {listed})"
        parts = []
        for column in self.where:
            values = sorted({str(row.get(column)) for row in rows})
            shown = ", ".join(values[:_MOST_VALUES]) + (", ..." if values[_MOST_VALUES:] else "")
            parts.append(f"{column} is one of: {shown}")
        return f"{self.name}: no row of the table has it ({'; '.join(parts) or 'at this point'})"

    def _holds(self, row: Row) -> bool:
        return all(_equal(row.get(column), value) for column, value in self.where.items())


def metric_of(
    settings: MetricSettings | BoundSettings,
    tables: Mapping[str, Table],
    where: str,
    monitors: Mapping[str, str] = MappingProxyType({}),
) -> Metric:
    """Return the metric of a section.

    A training may add any column to ``trials``, which is known after the first one.

    Args:
        settings: the section.
        tables: the declared tables by name.
        where: the file and the key of the section, for messages.
        monitors: ``lower`` or ``higher`` by column of trainings.

    Raises:
        ConfigError: a table or a column that does not exist, or that holds no numbers; or nothing
            says which values are better.

    """
    table, _, column = settings.metric.partition(".")
    what = f"{where}: metric = {settings.metric}"
    if table not in tables:
        near, known = did_you_mean(table, list(tables)), ", ".join(sorted(tables))
        raise ConfigError(f"{what}: there is no table {table}{near} (tables: {known})")
    declared = tables[table]
    if declared.partitioned:
        raise ConfigError(
            f"{what}: {table} has a row per logged step; take the table trials, which has the last "
            "values of each training"
        )
    columns = {each.name: each for each in declared.columns}
    numbers = [name for name, each in columns.items() if each.type in ("integer", "real")]
    is_near = bool(get_close_matches(column, columns, cutoff=_MISSPELLED))
    is_added = table == TRIALS.name and (column.startswith(PREFIX) or not is_near)
    is_open = declared.open or is_added
    if column not in numbers and (column in columns or not is_open):
        problem = "holds no numbers" if column in columns else f"is not a column of {table}"
        near, listed = did_you_mean(column, numbers), ", ".join(numbers) or "none"
        raise ConfigError(f"{what}: {column} {problem}{near} (numbers of {table}: {listed})")
    for name in settings.where:
        if name not in columns and not declared.open:
            near = did_you_mean(name, list(columns))
            raise ConfigError(
                f"{where}: where = {name}: is not a column of {table}{near} (columns: "
                f"{', '.join(columns)})"
            )
    mode = settings.mode if isinstance(settings, MetricSettings) else "min"
    mode = mode or direction(column, declared.columns, monitors if table == TRIALS.name else {})
    if mode is None:
        raise ConfigError(
            f"{where}: mode = null: the table {table} does not say which {column} is better; give "
            "mode: min or mode: max"
        )
    return Metric(table, column, settings.where, mode)


def direction(name: str, declared: Iterable[Column], monitors: Mapping[str, str]) -> Mode | None:
    """Return whether a metric is minimized or maximized; None if nothing tells.

    Its declaration decides, then the monitor's mode, then its name.
    """
    known = next((c.better for c in declared if c.name == name and c.better), "")
    better = known or monitors.get(name) or better_by_name(name)
    modes: dict[str, Mode] = {"lower": "min", "higher": "max"}
    return modes.get(better)


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


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(value: Any, asked: Any) -> bool:
    if isinstance(asked, list | tuple):
        return any(_equal(value, one) for one in asked)
    if isinstance(value, bool) or isinstance(asked, bool):
        return value is asked
    return bool(value == asked)
