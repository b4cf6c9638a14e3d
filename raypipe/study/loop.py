"""Loop of a study: a source proposes points, their stages run, and outcomes are told back.

The runner asks for further stages whenever a stage has ended. A point whose stages have all ended
is measured and reported to the source; the source then has room for others. Rows that decide what
comes next are durable before their stages start.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pandas as pd

from raypipe.config.matrix import Point
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.context import Outcomes, StageContext
from raypipe.graph.continuation import all_stored
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.report.comparison import COSTS, compared
from raypipe.report.measures import monitors_of, training_measures
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import BASE
from raypipe.study.metric import Measured, Metric
from raypipe.study.placement import PlacedPoint, Placement, PointBuilder, variant_rows

#: name of the stage that compares the variants of a matrix once all of them are done
COMPARISON = "compare_variants"


@dataclass(frozen=True)
class Outcome:
    """The outcome of a point: its metrics by name, or why it failed or cannot be."""

    measured: Mapping[str, Measured] = field(default_factory=dict)
    failure: str | None = None
    excluded: bool = False


class Source(ABC):
    """Chooser of proposals, which are opaque objects.

    ``table`` holds its rows; empty without any. ``is_compared``: whether the points are compared at
    the end. ``varied`` are the keys in which its proposals differ, ``metrics`` what is measured at
    each; a source without metrics is told nothing. ``decisive`` decides its proposals; it is empty
    if they follow from configuration and results.
    """

    table = ""
    is_compared = False
    varied: Sequence[str] = ()
    metrics: Sequence[Metric] = ()
    decisive: Mapping[str, Any] = MappingProxyType({})

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether no further proposal can come, apart from those in flight."""

    @property
    @abstractmethod
    def text(self) -> str:
        """What it does at most, in a line; empty for a single point."""

    @abstractmethod
    def ask(self) -> Sequence[Any]:
        """Return further proposals to compute now; at first those of earlier commands."""

    @abstractmethod
    def points(self, asked: Any) -> Iterable[Point]:
        """Return the points at which a proposal runs."""

    @abstractmethod
    def expected(self) -> Iterable[Point]:
        """Return the points that run at most; unknown ones are drawn at random."""

    def tell(self, asked: Any, outcome: Outcome) -> str:
        """Record the outcome of a proposal; return a line to show, or nothing."""
        del asked, outcome
        return ""

    def rows(self) -> Mapping[str, Row]:
        """Return its rows by key."""
        return {}


@dataclass(frozen=True)
class _Flight:
    """A proposal that is being computed."""

    asked: Any
    points: Sequence[PlacedPoint]
    failure: str | None = None

    @property
    def keys(self) -> set[str]:
        return {key for point in self.points for key in point.keys}


class PointLoop:
    """The points of a source, placed in one graph.

    Args:
        builder: builds points.
        placement: knows on which keys each stage depends; points are placed in it.
        source: proposes the points.

    """

    def __init__(self, builder: PointBuilder, placement: Placement, source: Source) -> None:
        self._builder, self._placement, self._source = builder, placement, source
        self._flights: list[_Flight] = []
        self._measured_once = self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether there are no further stages."""
        return self._is_closed

    def further(
        self, ledger: Ledger, outcomes: Outcomes, say: Callable[[str], None]
    ) -> list[Stage]:
        """Report the proposals that have ended, and return the stages of further ones.

        Nothing follows the failure of a stage that all points share: they would all fail.

        Args:
            ledger: the run's; rows of the source are recorded in it.
            outcomes: the stages that have ended.
            say: shows a line.

        Raises:
            UnitError: a point has no row with the metric.

        """
        found: list[Stage] = []
        while not self._is_closed and not self._shared(outcomes.failures):
            over = [each for each in self._flights if not outcomes.running(each.keys)]
            self._flights = [each for each in self._flights if each not in over]
            for flight in over:
                outcome = self._outcome(flight, ledger, outcomes.failures)
                if line := self._source.tell(flight.asked, outcome):
                    say(line)
            asked = self._source.ask()
            self._record(ledger)
            found += self._launch(asked)
            if not over and not asked:
                break
        if self._source.is_over and not self._flights and not self._is_closed:
            self._is_closed = True
            found += self._last()
        ledger.put("variants", variant_rows(self._placement.variants, ledger))
        return found

    def replay(self, ledger: Ledger) -> tuple[list[Stage], bool]:
        """Return the stages of stored proposals, and whether nothing is left to propose.

        Changes nothing on disk. Use another object for ``further``.
        """
        is_complete = True
        while is_complete and (asked := self._source.ask()):
            self._launch(asked)
            for flight in self._flights:
                if not all_stored([self._placement.stages[key] for key in flight.keys], ledger):
                    is_complete = False
                    continue
                try:
                    self._source.tell(flight.asked, self._outcome(flight, ledger, {}))
                except UnitError:  # the metric is missing
                    is_complete = False
            self._flights = []
        is_complete = is_complete and self._source.is_over
        last = self._last() if is_complete else []
        return [*self._placement.stages.values(), *last], is_complete

    def _last(self) -> list[Stage]:
        """Return the stage that ends the graph, if there is one."""
        stages = list(self._placement.stages.values())
        is_whole = self._source.is_compared and not self._placement.only
        return [comparison_stage(stages)] if is_whole else []

    def _record(self, ledger: Ledger) -> None:
        """Record the rows of the source that changed, and remove those that it no longer has."""
        if not self._source.table:
            return
        stored, rows = dict(ledger.items(self._source.table)), self._source.rows()
        changed: dict[str, Row] = {}
        for key, row in rows.items():
            earlier = stored.get(key, {})
            if any(name not in earlier or earlier[name] != row[name] for name in row):
                # a result belongs to the command that measured it, whatever came after it
                same = earlier.get("status") == row["status"]
                changed[key] = {**(earlier if same else {}), **row}
        ledger.put(self._source.table, changed)
        if self._source.is_over and not self._flights:
            ledger.remove(self._source.table, stored.keys() - rows.keys())

    def _shared(self, failed: Collection[str]) -> list[str]:
        """Return the failed stages that do not depend on what the source varies."""
        placed = (self._placement.stages.get(key) for key in failed)
        varied = set(self._source.varied)
        return [
            stage.key
            for stage in placed
            if stage is not None and varied.isdisjoint(self._placement.keys_of(stage.name))
        ]

    def _launch(self, asked: Sequence[Any]) -> list[Stage]:
        """Place points; those that cannot be are in flight without stages."""
        found: list[Stage] = []
        for each in asked:
            placed: list[PlacedPoint] = []
            failure = None
            try:
                for point in self._source.points(each):
                    built = self._builder.build(point, f"matrix.{self._source.table}".rstrip("."))
                    if built is not None:
                        placed.append(self._placement.place(built))
                        found += placed[-1].added
            except ConfigError as error:
                failure, placed = str(error), []
            if not placed and failure is None:
                failure = "the constraints or exclusions of the matrix rule it out"
            if self._source.metrics:
                self._flights.append(_Flight(each, placed, failure))
        return found

    def _outcome(self, flight: _Flight, ledger: Ledger, failures: Mapping[str, str]) -> Outcome:
        if flight.failure is not None:
            return Outcome(failure=flight.failure, excluded=True)
        failed = sorted(key for key in flight.keys if key in failures)
        if failed:
            return Outcome(failure=f"{failed[0]}: {failures[failed[0]]}")
        variants = [point.variants for point in flight.points]
        measured = {}
        for metric in self._source.metrics:
            found = metric.measure(ledger, variants)
            if not found.rows:
                if not self._measured_once:
                    message = metric.lacking(ledger)
                    raise UnitError(self._source.table, "error", message)
                return Outcome(failure=metric.lacking(ledger))
            measured[metric.name] = found
        self._measured_once = True
        return Outcome(measured)


def comparison_stage(stages: Sequence[Stage]) -> Stage:
    """Return the stage that compares all others, which are those of a matrix."""
    needs = {stage.key: stage.fingerprint for stage in stages}
    budgets = {stage.key: [unit.budget for unit in stage.units] for stage in stages}
    identity = Identity.of({"stage": COMPARISON}, {"budgets": budgets}, needs)
    return Stage(
        COMPARISON,
        _compare,
        [Unit(COMPARISON, identity=identity)],
        needs=tuple(needs),
        reads=(),
        workload="statistics over seeds",
        always_rerun=True,
        after_failures=True,
    )


def _compare(context: StageContext) -> None:
    """Derive the tables of means, tests and best points from the results of all variants."""
    ledger, declared = context.session.ledger, context.session.tables
    names = ("variants", "trials", "measures")
    frames = {name: _frame(ledger.rows(name)) for name in names}
    columns = {name: declared[name].columns for name in names if name in declared}
    measured = [
        *(("measures", column) for column in columns.get("measures", ())),
        *(
            ("trials", column)
            for column in training_measures(
                frames["trials"].columns,
                columns.get("trials", ()),
                monitors_of(context.session.settings.model_dump()),
            )
        ),
        *(("trials", c) for c in columns.get("trials", ()) if c.name in COSTS),
    ]
    better = {(name, column.name): column.better for name, column in measured if column.better}
    for table, found in compared(frames, better).items():
        rows = _of_frame(found)
        ledger.remove(table, {key for key, _ in ledger.items(table)} - rows.keys())
        ledger.put(table, rows)


def _frame(rows: Sequence[Row]) -> pd.DataFrame:
    """Return rows as a table with their variants."""
    frame = pd.DataFrame(rows)
    if len(frame):
        frame["variant"] = frame["variant"].fillna(BASE) if "variant" in frame else BASE
    return frame


def _of_frame(found: pd.DataFrame) -> dict[str, Row]:
    """Return the rows of a table by their place, without missing values."""
    rows = found.astype(object).where(found.notna(), None).to_dict("records")
    return {f"{place:06}": {str(n): v for n, v in row.items()} for place, row in enumerate(rows)}
