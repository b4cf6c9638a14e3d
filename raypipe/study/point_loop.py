"""Loop over points: a source chooses further ones from the outcomes of earlier ones.

The runner asks for further stages whenever a stage has ended. A point whose stages have all ended
is measured and reported to the source; the source then has room for others. Rows that decide what
comes next are durable before their stages start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from raypipe.config.matrix import MatrixSettings, Point
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.continuation import all_stored
from raypipe.graph.experiment import Stage
from raypipe.graph.scheduler import Outcomes
from raypipe.store.ledger import Ledger, Row
from raypipe.study.metric import Measured, Metric
from raypipe.study.placement import (
    BuiltPoint,
    PlacedPoint,
    Placement,
    PointBuilder,
    variant_rows,
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a point: its metrics by name, or why it failed or cannot be."""

    measured: Mapping[str, Measured] = field(default_factory=dict)
    failure: str | None = None
    excluded: bool = False


class Source(Protocol):
    """Chooser of points, which are opaque objects; ``table`` holds its rows."""

    @property
    def table(self) -> str:
        """The table of its rows."""
        ...

    @property
    def varied(self) -> Sequence[str]:
        """The keys in which its points differ."""
        ...

    @property
    def metrics(self) -> list[Metric]:
        """The metrics to measure at each point."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether no further point can come, apart from points in flight."""
        ...

    def stored(self) -> list[Any]:
        """Return the points of earlier commands."""
        ...

    def ask(self) -> list[Any]:
        """Return further points to compute now."""
        ...

    def point(self, asked: Any) -> Point:
        """Return the values of the varied keys of a point."""
        ...

    def tell(self, asked: Any, outcome: Outcome) -> str:
        """Record the outcome of a point; return a line to show, or nothing."""
        ...

    def rows(self) -> dict[str, Row]:
        """Return its rows by key."""
        ...


@dataclass(frozen=True)
class _Flight:
    """A point that is being computed."""

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
        matrix: the matrix, at all points of which each point of the source runs.
        placement: knows on which keys each stage depends; points are placed in it.
        source: chooses the points.
        last: returns the stages that end the graph, from all others.

    """

    def __init__(
        self,
        builder: PointBuilder,
        matrix: MatrixSettings,
        placement: Placement,
        source: Source,
        last: Callable[[Sequence[Stage]], Sequence[Stage]],
    ) -> None:
        self._builder, self._matrix = builder, matrix
        self._placement, self._source, self._last = placement, source, last
        self._flights: list[_Flight] = []
        self._measured_once = False
        self._is_begun = self._is_closed = False

    def further(
        self,
        ledger: Ledger,
        outcomes: Outcomes,
        say: Callable[[str], None],
    ) -> list[Stage]:
        """Report the points that have ended, and return the stages of further ones.

        Nothing follows the failure of a stage that all points share: they would all fail.

        Args:
            ledger: the run's; rows of the source are recorded in it.
            outcomes: the stages that have ended.
            say: shows a line.

        Raises:
            UnitError: a point has no row with the metric.

        """
        found: list[Stage] = []
        if not self._is_begun:
            self._is_begun = True
            found += self._launch(self._source.stored())
        while not self._shared(outcomes.failures):
            over: list[_Flight] = []
            running: list[_Flight] = []
            for flight in self._flights:
                (running if outcomes.running(flight.keys) else over).append(flight)
            self._flights = running
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
            self._forget(ledger)
            found += self._last(list(self._placement.stages.values()))
        ledger.put("variants", variant_rows(self._placement.variants, ledger))
        return found

    def replay(self, ledger: Ledger) -> tuple[list[Stage], bool]:
        """Return the stages of stored points, and whether nothing is left to compute.

        Changes nothing on disk. Use another object for ``further``.
        """
        is_complete, asked = True, self._source.stored() or self._source.ask()
        while asked:
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
            asked = self._source.ask() if is_complete else []
        stages = list(self._placement.stages.values())
        is_complete = is_complete and self._source.is_over
        last = self._last(stages) if is_complete else ()
        return [*stages, *last], is_complete

    def _record(self, ledger: Ledger) -> None:
        """Record the rows of the source that changed."""
        stored = dict(ledger.items(self._source.table))
        changed: dict[str, Row] = {}
        for key, row in self._source.rows().items():
            earlier = stored.get(key, {})
            if any(name not in earlier or earlier[name] != row[name] for name in row):
                # a result belongs to the command that measured it, whatever came after it
                same = earlier.get("status") == row["status"]
                changed[key] = {**(earlier if same else {}), **row}
        ledger.put(self._source.table, changed)

    def _forget(self, ledger: Ledger) -> None:
        """Remove rows that the source no longer has, such as rounds of a race at another level."""
        table = self._source.table
        ledger.remove(table, {key for key, _ in ledger.items(table)} - self._source.rows().keys())

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
                for built in self._built(self._source.point(each)):
                    placed.append(self._placement.place(built))
                    found += placed[-1].added
            except ConfigError as error:
                failure, placed = str(error), []
            if not placed and failure is None:
                failure = "the constraints or exclusions of the matrix rule it out"
            self._flights.append(_Flight(each, placed, failure))
        return found

    def _built(self, values: Point) -> list[BuiltPoint]:
        points = self._matrix.all_points(values)
        found = [self._builder.build(point, f"matrix.{self._source.table}") for point in points]
        return [each for each in found if each is not None]

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
