"""Metric of a point: the mean of a column over the rows that belong to the point."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any

from raypipe.config.search import BoundSettings, MetricSettings, Mode
from raypipe.config.validation import did_you_mean
from raypipe.errors import ConfigError
from raypipe.report.measures import PREFIX, better_by_name
from raypipe.stats import finite_or_none
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import BASE
from raypipe.store.tables import Table
from raypipe.training.tables import TRIALS

_MOST_VALUES = 10  # of a column in a message
#: similarity from which a column that is not declared is a misspelling of one that is
_MISSPELLED = 0.85


@dataclass(frozen=True)
class Measured:
    """A metric's mean at a point, missing if a part of it has no finite number; its rows."""

    value: float | None
    rows: int


@dataclass(frozen=True)
class Metric:
    """A column of a table, restricted to the rows with certain values of other columns."""

    table: str
    column: str
    where: Mapping[str, Any]

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
    settings: MetricSettings | BoundSettings, tables: Mapping[str, Table], where: str
) -> Metric:
    """Return the metric of a section.

    A training may add any column to ``trials``, which is known after the first one.

    Args:
        settings: the section.
        tables: the declared tables by name.
        where: the file and the key of the section, for messages.

    Raises:
        ConfigError: a table or a column that does not exist, or that holds no numbers.

    """
    table, _, column = settings.metric.partition(".")
    if table not in tables:
        near = did_you_mean(table, list(tables))
        raise ConfigError(
            f"{where}: metric = {settings.metric}: there is no table {table}{near} "
            f"(tables: {', '.join(sorted(tables))})"
        )
    declared = tables[table]
    if declared.partitioned:
        raise ConfigError(
            f"{where}: metric = {settings.metric}: {table} has a row per logged step; take the "
            "table trials, which has the last values of each training"
        )
    columns = {each.name: each for each in declared.columns}
    numbers = [name for name, each in columns.items() if each.type in ("integer", "real")]
    is_near = bool(get_close_matches(column, columns, cutoff=_MISSPELLED))
    is_added = table == TRIALS.name and (column.startswith(PREFIX) or not is_near)
    is_open = declared.open or is_added
    if column not in numbers and (column in columns or not is_open):
        problem = "holds no numbers" if column in columns else f"is not a column of {table}"
        near = did_you_mean(column, numbers)
        listed = ", ".join(numbers) or "none"
        raise ConfigError(
            f"{where}: metric = {settings.metric}: {column} {problem}{near} (numbers of {table}: "
            f"{listed})"
        )
    for name in settings.where:
        if name not in columns and not declared.open:
            near = did_you_mean(name, list(columns))
            raise ConfigError(
                f"{where}: where = {name}: is not a column of {table}{near} (columns: "
                f"{', '.join(columns)})"
            )
    return Metric(table, column, settings.where)


def mode_of(
    settings: MetricSettings,
    tables: Mapping[str, Table],
    where: str,
    monitors: Mapping[str, str] = MappingProxyType({}),
) -> Mode:
    """Return whether a metric is minimized or maximized, by default what its table declares.

    Of a column that a training adds to ``trials`` the monitor tells (``monitors``: ``lower`` or
    ``higher`` by column), then its name.

    Raises:
        ConfigError: nothing says so.

    """
    if settings.mode is not None:
        return settings.mode
    table, _, name = settings.metric.partition(".")
    declared = {column.name: column.better for column in tables[table].columns}
    better: str = declared.get(name, "")
    if table == TRIALS.name and not better:
        better = monitors.get(name) or ("" if name in declared else better_by_name(name))
    if not better:
        raise ConfigError(
            f"{where}: mode = null: the table {table} does not say which {name} is better; give "
            "mode: min or mode: max"
        )
    return "min" if better == "lower" else "max"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _equal(value: Any, asked: Any) -> bool:
    if isinstance(asked, list | tuple):
        return any(_equal(value, one) for one in asked)
    if isinstance(value, bool) or isinstance(asked, bool):
        return value is asked
    return bool(value == asked)
