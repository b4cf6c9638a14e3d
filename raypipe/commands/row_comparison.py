"""Comparison of rows that were computed again with the stored ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from raypipe.store.ledger import Row
from raypipe.store.tables import Table
from raypipe.training.tables import SETTINGS, TRIALS

#: columns that raypipe adds to every row
_ADDED = ("run_id", "variant", "command_id")
#: columns of time, memory, energy, speed and use, by their names and their units
_MEASURED = re.compile(r"(_s|_bytes|_w|_j|_j_per_\w+)$")
_UNITS = frozenset({"s", "B", "W", "J", "%", "1/s"})
#: columns that say where and how a row was computed; the second ones only where they are declared
_PLACES = frozenset({"worker", "hostname", "host", "node", "pid"})
_WAYS = frozenset(
    (
        *("attempt", "attempts", "cached", "device", "workers", "strategy", "mfu"),
        *("micro_batch", "accumulation", "loader_wait_share"),
    )
)
_MOST_NAMED = 8

#: columns of trainings that the configuration gives: equal values say nothing about the results
_GIVEN = frozenset(("trial_id", "stage", "status", *(column.name for column in SETTINGS)))
_PARAMETER = "param_"

Outcome = Literal[
    "equal", "within the tolerance", "differs", "failed", "changed", "nothing to compare"
]


class Pair(NamedTuple):
    """A row by its table and key: as it is stored, and as it was computed again."""

    table: str
    key: str
    stored: Row | None
    now: Row | None


@dataclass(frozen=True)
class Deviation:
    """A column whose values differ: in how many rows, by how much, and the first such pair.

    ``largest`` is relative; infinite where a value is not a number, or a whole row is missing.
    """

    column: str
    rows: int
    largest: float
    stored: Any
    now: Any

    def __str__(self) -> str:
        """Return it in words."""
        by = f" by up to {self.largest:.2g}" if math.isfinite(self.largest) else ""
        rows = f" in {self.rows} rows" if self.rows > 1 else ""
        return f"{self.column}{by}{rows} (stored {self.stored!r}, now {self.now!r})"


@dataclass(frozen=True)
class Replayed:
    """A unit, or a table that units share: how it compares with what is stored.

    ``changed`` is a unit that was not computed: something else decides its result now. ``reason``
    says what, or why a unit failed.
    """

    unit: str
    outcome: Outcome
    columns: tuple[Deviation, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        """Return it in a line."""
        named = [str(each) for each in self.columns[:_MOST_NAMED]]
        if len(self.columns) > _MOST_NAMED:
            named.append(f"{len(self.columns) - _MOST_NAMED} more columns")
        about = self.reason or "; ".join(named)
        return f"{self.unit}: {self.outcome}{': ' * bool(about)}{about}"


@dataclass(frozen=True)
class RowComparison:
    """Comparison of rows, column by column.

    Attributes:
        tables: declarations, which tell measured columns from results.
        tolerance: the relative difference up to which numbers count as equal.
        not_compared: receives the columns that are left out.

    """

    tables: Mapping[str, Table]
    tolerance: float
    not_compared: set[str]

    def of(self, name: str, pairs: Iterable[Pair]) -> Replayed:
        """Return how the rows of a unit compare."""
        found: dict[str, Deviation] = {}
        compared = False
        for table, key, old, new in pairs:
            if old is None or new is None:
                old, new = ({"whole row": each and key} for each in (old, new))
            for column in {**old, **new}:
                if column in _ADDED:
                    continue
                column_name, values = f"{table}.{column}", (old.get(column), new.get(column))
                if self._is_measured(table, column):
                    self.not_compared.add(column_name)
                    continue
                if by := _distance(*values):
                    known = found.get(column_name, Deviation(column_name, 0, 0.0, *values))
                    largest = max(by, known.largest)
                    found[column_name] = replace(known, rows=known.rows + 1, largest=largest)
                compared |= values != (None, None) and not _is_given(table, column)
        if not found:
            return Replayed(name, "equal" if compared else "nothing to compare")
        near = all(each.largest <= self.tolerance for each in found.values())
        return Replayed(name, "within the tolerance" if near else "differs", (*found.values(),))

    def _is_measured(self, table: str, column: str) -> bool:
        """Whether a column measures time, memory or speed, or says where a row was computed."""
        if column in _PLACES or _MEASURED.search(column):
            return True
        columns = self.tables[table].columns if table in self.tables else ()
        about = next((each for each in columns if each.name == column), None)
        if about is None:
            return False
        return column in _WAYS or about.type == "time" or about.unit in _UNITS


def _is_given(table: str, column: str) -> bool:
    """Whether the configuration gives a value, and no computation."""
    return table == TRIALS.name and (column in _GIVEN or column.startswith(_PARAMETER))


def _distance(stored: Any, now: Any) -> float:
    """Return the relative difference of two values: 0 if equal, infinite if not numbers."""
    if isinstance(stored, list) and isinstance(now, list) and len(stored) == len(now):
        return max(map(_distance, stored, now), default=0.0)
    if stored == now:
        return 0.0
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in (stored, now)):
        return math.inf
    if math.isfinite(stored) and math.isfinite(now):
        return float(abs(stored - now) / max(abs(stored), abs(now)))
    return 0.0 if math.isnan(stored) and math.isnan(now) else math.inf
