"""Loop of a study: a source proposes points, their stages run, and outcomes are told back.

The runner asks for further stages whenever a stage has ended. A point whose stages have all ended
is measured and reported to the source; the source then has room for others. Rows that decide what
comes next are durable before their stages start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypipe.config.matrix import Point
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.continuation import all_stored
from raypipe.graph.experiment import Stage
from raypipe.graph.scheduler import Outcomes
from raypipe.store.ledger import Ledger, Row
from raypipe.study.comparison import comparison_stage
from raypipe.study.metric import Measured, Metric
from raypipe.study.placement import PlacedPoint, Placement, PointBuilder, variant_rows


@dataclass(frozen=True)
class Outcome:
    """The outcome of a point: its metrics by name, or why it failed or cannot be."""

    measured: Mapping[str, Measured] = field(default_factory=dict)
    failure: str | None = None
    excluded: bool = False


class Source(Protocol):
    """Chooser of proposals, which are opaque objects.

    ``table`` holds its rows; empty without any. ``is_compared``: whether the points are compared
    at the end.
    """

    table: str
    is_compared: bool

    @property
    def varied(self) -> Sequence[str]:
        """The keys in which its proposals differ."""
        ...

    @property
    def metrics(self) -> Sequence[Metric]:
        """What is measured at each proposal; a source without metrics is told nothing."""
        ...

    @property
    def decisive(self) -> Mapping[str, Any]:
        """What decides its proposals; empty if they follow from configuration and results."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no further proposal can come, apart from those in flight."""
        ...

    @property
    def text(self) -> str:
        """What it does at most, in a line; empty for a single point."""
        ...

    def ask(self) -> Sequence[Any]:
        """Return further proposals to compute now; at first those of earlier commands."""
        ...

    def points(self, asked: Any) -> Iterable[Point]:
        """Return the points at which a proposal runs."""
        ...

    def tell(self, asked: Any, outcome: Outcome) -> str:
        """Record the outcome of a proposal; return a line to show, or nothing."""
        ...

    def rows(self) -> Mapping[str, Row]:
        """Return its rows by key."""
        ...

    def expected(self) -> Iterable[Point]:
        """Return the points that run at most; unknown ones are drawn at random."""
        ...


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
