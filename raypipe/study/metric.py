"""Metric of a study: what it is, whether less or more is better, and its value at a point.

A matrix takes any column of any table, averaged over the rows that belong to a point. A sweep takes
a column of ``trials``, which may be known only after the first one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, NamedTuple

from raypipe.config.matrix import MetricSettings, Mode
from raypipe.config.validation import did_you_mean, near_and_all
from raypipe.errors import ConfigError, UnitError, named
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Training
from raypipe.report.results import LOSS, PREFIX, better_by_name, monitors_of, training_measures
from raypipe.stats import finite_or_none
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import BASE
from raypipe.store.tables import Column, Table, by_name
from raypipe.study.sweep_settings import SweepSettings
from raypipe.training.tables import TRIALS, with_metrics

_MOST_VALUES = 10  # of a column in a message
#: similarity from which a column that is not declared is a misspelling of one that is
_MISSPELLED = 0.85


class Metric(NamedTuple):
    """A column of a table, restricted to the rows with certain values of other columns.

    ``mode`` says whether it is minimized or maximized.
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

    def measure(self, ledger: Ledger, points: Iterable[frozenset[str]]) -> float | None:
        """Return the mean over points, each given by the variants of its stages.

        Rows are averaged within each point first; those without a value do not count. The mean is
        None if no point has a row, and not finite if one of them has none, or a value that is not.
        """
        rows = [row for row in ledger.rows(self.table) if _is_number(row.get(self.column))]
        for column, value in self.where.items():
            rows = [row for row in rows if _equal(row.get(column), value)]
        parts = [
            [row[self.column] for row in rows if row.get("variant", BASE) in variants]
            for variants in points
        ]
        means = [sum(own) / len(own) if own else math.nan for own in parts]
        return sum(means) / len(means) if any(parts) else None

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
            known = near_and_all(self.column, numbers, "numbers")
            return f"{self.name}: no row of the table has it{known}"
        parts = []
        for column in self.where:
            values = sorted({str(row.get(column)) for row in rows})
            parts.append(f"{column} is one of: {named(values, _MOST_VALUES)}")
        return f"{self.name}: no row of the table has it ({'; '.join(parts) or 'at this point'})"


def metric_of(
    settings: MetricSettings,
    tables: Mapping[str, Table],
    where: str,
    monitors: Mapping[str, str],
    added: Collection[str] | None = None,
) -> Metric:
    """Return the metric of a section.

    A training may add any column to ``trials``, which is known after the first one.

    Args:
        settings: the section.
        tables: the declared tables by name.
        where: the file and the key of the section, for messages.
        monitors: ``lower`` or ``higher`` by column of trainings.
        added: columns that trainings add to ``trials`` in addition to ``eval_...``; None for any.

    Raises:
        ConfigError: a table or a column that does not exist, or that holds no numbers; or nothing
            says which values are better.

    """
    table, _, column = settings.metric.partition(".")
    what = f"{where}: metric = {settings.metric}"
    if table not in tables:
        known = near_and_all(table, sorted(tables), "tables")
        raise ConfigError(f"{what}: there is no table {table}{known}")
    declared = tables[table]
    if declared.partitioned:
        raise ConfigError(
            f"{what}: {table} has a row per logged step; take the table trials, which has the last "
            "values of each training"
        )
    columns = {each.name: each for each in declared.columns}
    numbers = [name for name, each in columns.items() if each.type in ("integer", "real")]
    is_trials = table == TRIALS.name
    monitors = monitors if is_trials else {}
    is_open = declared.open or column in monitors
    if is_trials and column.startswith(PREFIX):  # held-out ones are all declared or none
        none_declared = not any(name.startswith(PREFIX) for name in columns)
        is_open = is_open or none_declared or column == f"{PREFIX}loss"
    elif is_trials and added is not None:
        is_open = is_open or column in added
    elif is_trials:
        is_open = is_open or not get_close_matches(column, columns, cutoff=_MISSPELLED)
    if column not in numbers and (column in columns or not is_open):
        problem = "holds no numbers" if column in columns else f"is not a column of {table}"
        known = near_and_all(column, numbers, f"numbers of {table}")
        raise ConfigError(f"{what}: {column} {problem}{known}")
    for name in settings.where:
        if name not in columns and not declared.open:
            known = near_and_all(name, list(columns), "columns")
            raise ConfigError(f"{where}: where = {name}: is not a column of {table}{known}")
    # the declaration decides, then the monitor, then the name
    better: str = columns[column].better if column in columns else ""
    better = better or monitors.get(column) or better_by_name(column)
    modes: dict[str, Mode] = {"lower": "min", "higher": "max"}
    mode = settings.mode or modes.get(better)
    if mode is None:
        raise ConfigError(
            f"{where}: mode = null: the table {table} does not say which {column} is better; give "
            "mode: min or mode: max"
        )
    return Metric(table, column, settings.where, mode)


def with_metric(configuration: Configuration, training: Training) -> SweepSettings:
    """Return the section ``sweep`` with the metric and its mode, as far as they are known.

    By default the metric is the speed; for ``kind: quality`` the monitored one, else that of the
    first trial. A scheduler that stops trials needs one before: the training loss.

    Raises:
        ConfigError: no trial will have the metric, or nothing tells which values are better.

    """
    from raypipe.training.job import ExternalTask  # which only a sweep needs

    sweep: SweepSettings = configuration.settings.sweep
    monitors = monitors_of(training.settings.training.model_dump())
    where = f"{configuration.origin}: sweep"
    tables = by_name(with_metrics((TRIALS,), configuration.experiment.step_metrics))
    task, added = training.task(None), None
    if isinstance(task, ExternalTask):  # a script has metrics of any names
        tables[TRIALS.name] = replace(tables[TRIALS.name], open=True)
    else:
        added = task.columns()
    default = next(iter(monitors), LOSS.name if sweep.scheduler else "")
    if not (name := sweep.metric_name or default):
        return sweep
    section = MetricSettings.model_construct(metric=f"trials.{name}", mode=sweep.mode)
    metric = metric_of(section, tables, where, monitors, added)
    return sweep.model_copy(update={"metric": name, "mode": metric.mode})


def with_metric_of(
    sweep: SweepSettings, row: Row, declared: Sequence[Column] = ()
) -> SweepSettings:
    """Return the section with the metric of its first finished trial, unless it has one.

    Args:
        sweep: the section with all that is known before the start (:func:`with_metric`).
        row: the trial.
        declared: the columns of ``trials``, of which some declare what is better.

    Raises:
        UnitError: the trial has none, or not the one of the section.

    """
    # a held-out metric counts also where it ended in NaN: other trials may have a value
    known = [name for name in row if name.startswith(PREFIX)]
    known += [LOSS.name] if finite_or_none(row.get(LOSS.name)) is not None else []
    measures = training_measures(known, declared, {})
    if sweep.metric is None and measures:
        mode = "max" if measures[0].better == "higher" else "min"
        sweep = sweep.model_copy(update={"metric": measures[0].name, "mode": mode})
    numbers = {each.name for each in TRIALS.columns if each.type in ("integer", "real")}
    for column in (sweep.metric or "", *sweep.further_metrics):
        if column not in row and column not in numbers:
            near = did_you_mean(column, known) if column else ""
            raise UnitError(
                "sweep",
                "error",
                f"sweep.metric = {column}: the first finished trial has no such metric{near} "
                f"(it has: {', '.join(known)}); the other trials were not started",
            )
    return sweep


def costs_of(sweep: SweepSettings, row: Row) -> list[float] | None:
    """Return the metrics of a trial so that less is better; None if it lacks one."""
    if row.get("status") not in ("succeeded", "interrupted"):
        return None
    modes = {sweep.metric or "": sweep.mode, **sweep.further_metrics}
    values = {name: finite_or_none(row.get(name)) for name in modes}
    costs = [cost(value, modes[name]) for name, value in values.items() if value is not None]
    return None if None in values.values() else costs


def cost(value: Any, mode: Mode | None) -> Any:
    """Return a number, or a table of numbers, so that less is better."""
    return -value if mode == "max" else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(value: Any, asked: Any) -> bool:
    if isinstance(asked, list | tuple):
        return any(_equal(value, one) for one in asked)
    return isinstance(value, bool) is isinstance(asked, bool) and bool(value == asked)
