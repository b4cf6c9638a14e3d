"""Study of a configuration: points from a grid, a search or a race, as one graph.

A source proposes points, their stages run, and the source receives the outcomes. A configuration
without a matrix is a study of one point.

The runner asks for further stages whenever a stage has ended. A point whose stages have all ended
is measured and reported to the source; the source then has room for others. Rows that decide what
comes next are durable before their stages start.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from raypipe.config.matrix import Point
from raypipe.errors import ConfigError, UnitError
from raypipe.graph.context import Outcomes, Session
from raypipe.graph.experiment import Stage
from raypipe.graph.stored_results import ENTRIES, all_stored
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import BASE
from raypipe.study.placement import BuiltPoint, PlacedPoint, Placement

if TYPE_CHECKING:  # only a search or a race measures
    from raypipe.study.metric import Metric

#: the entry of the ledger with what decides the proposals of a search
_ENTRY = "matrix.search"


class Outcome(NamedTuple):
    """The outcome of a point.

    It has the metrics by name, which may be NaN or infinite, or the reason of a failure.
    ``excluded`` says that the configuration does not allow the point.
    """

    measured: Mapping[str, float] = MappingProxyType({})
    failure: str | None = None
    excluded: bool = False


class Source:
    """Source of proposals, which are opaque objects; this one proposes all points at once.

    ``table`` holds its rows; empty without any. ``is_compared``: whether the points are compared at
    the end of a command. ``varied`` are the keys in which its proposals differ, ``metrics`` what is
    measured at each; a source without metrics receives nothing. ``decisive`` decides its proposals;
    it is empty if they follow from configuration and results. ``text`` says what it does at most.
    """

    table = ""
    varied: Sequence[str] = ()
    metrics: Sequence[Metric] = ()
    decisive: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, points: Sequence[Point], text: str, *, is_compared: bool) -> None:
        self._points = points
        self._left: list[Any] = list(points)
        self.text, self.is_compared = text, is_compared

    @property
    def is_over(self) -> bool:
        """Whether no further proposal can come, apart from those in flight."""
        return not self._left

    def ask(self) -> Sequence[Any]:
        """Return further proposals to compute now; at first those of earlier commands."""
        asked, self._left = self._left, []
        return asked

    def points(self, asked: Any) -> Iterable[Point]:
        """Return the points at which a proposal runs."""
        return (asked,)

    def expected(self) -> Iterable[Point]:
        """Return the points that run at most; unknown ones are drawn at random."""
        return self._points

    def tell(self, asked: Any, outcome: Outcome) -> str:
        """Record the outcome of a proposal; return a line to show, or nothing."""
        del asked, outcome
        return ""

    def rows(self) -> Mapping[str, Row]:
        """Return its rows by key."""
        return {}


class _Flight(NamedTuple):
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
        placement: builds points, which are placed in it.
        source: proposes the points.

    """

    def __init__(self, placement: Placement, source: Source) -> None:
        self._placement, self._source = placement, source
        self._flights: list[_Flight] = []
        self._measured_once = False

    @property
    def is_over(self) -> bool:
        """Whether there are no further stages."""
        return self._source.is_over and not self._flights

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
        while not self.is_over and not self._shared(outcomes.failures):
            over = [each for each in self._flights if each.keys <= outcomes.ended]
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
        ledger.put("variants", self._placement.rows(ledger))
        return found

    def compare(self, session: Session) -> None:
        """Derive the tables of means and tests from the results of all variants."""
        if not self._source.is_compared or self._placement.only:
            return
        import pandas as pd  # a single point has none

        from raypipe.study.comparison import compared

        ledger = session.ledger
        frames = {
            name: pd.DataFrame([{"variant": BASE, **row} for row in ledger.rows(name)])
            for name in ("variants", "trials", "measures")
        }
        for table, found in compared(frames).items():
            plain = found.astype(object).where(found.notna(), None).to_dict("records")
            rows = {
                f"{place:06}": {str(name): value for name, value in row.items()}
                for place, row in enumerate(plain)
            }
            ledger.remove(table, {key for key, _ in ledger.items(table)} - rows.keys())
            ledger.put(table, rows)

    def replay(self, ledger: Ledger) -> tuple[list[Stage], bool]:
        """Return the stages of stored proposals, and whether nothing is left to propose.

        Changes nothing on disk. Use another object for ``further``.
        """
        is_complete = True
        while is_complete and (asked := self._source.ask()):
            self._launch(asked)
            for flight in self._flights:
                stages = [self._placement.stages[key] for key in flight.keys]
                try:
                    if is_stored := all_stored(stages, ledger):
                        self._source.tell(flight.asked, self._outcome(flight, ledger, {}))
                except UnitError:  # the metric is missing
                    is_stored = False
                is_complete = is_complete and is_stored
            self._flights = []
        return list(self._placement.stages.values()), is_complete and self.is_over

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
        if self.is_over:
            ledger.remove(self._source.table, stored.keys() - rows.keys())

    def _shared(self, failed: Collection[str]) -> bool:
        """Whether a failed stage does not depend on what the source varies."""
        placed = [self._placement.stages[key] for key in failed if key in self._placement.stages]
        varied = set(self._source.varied)
        return any(varied.isdisjoint(self._placement.keys_of(stage.name)) for stage in placed)

    def _launch(self, asked: Sequence[Any]) -> list[Stage]:
        """Place points; those that cannot be are in flight without stages."""
        found: list[Stage] = []
        for each in asked:
            placed: list[PlacedPoint] = []
            failure = None
            try:
                for point in self._source.points(each):
                    built = self._placement.build(point, f"matrix.{self._source.table}".rstrip("."))
                    placed.append(self._placement.place(built))
                    found += placed[-1].added
            except ConfigError as error:
                failure, placed = str(error), []
            if not placed and failure is None:
                failure = "the exclusions of the matrix rule it out"
            if self._source.metrics:
                self._flights.append(_Flight(each, placed, failure))
        return found

    def _outcome(self, flight: _Flight, ledger: Ledger, failures: Mapping[str, str]) -> Outcome:
        if flight.failure is not None:
            return Outcome(failure=flight.failure, excluded=True)
        for key in sorted(key for key in flight.keys if key in failures):
            return Outcome(failure=f"{key}: {failures[key]}")
        measured = {}
        for metric in self._source.metrics:
            value = metric.measure(ledger, [point.variants for point in flight.points])
            if value is None:
                if not self._measured_once:
                    message = metric.lacking(ledger)
                    raise UnitError(self._source.table, "error", message)
                return Outcome(failure=metric.lacking(ledger))
            measured[metric.name] = value
        self._measured_once = True
        return Outcome(measured)


@dataclass(frozen=True)
class StudyGraph:
    """The points of a configuration.

    Args:
        placement: builds points; knows on which keys each stage depends.
        probes: the points that show it; all of them for a grid.
        source: returns the source of points for the rows that a ledger has of its table.
        only: the stages that run, with what they need; empty for all.

    """

    placement: Placement
    probes: Sequence[BuiltPoint]
    source: Callable[[Ledger | None], Source]
    only: tuple[str, ...] = ()

    def loop(self, ledger: Ledger) -> PointLoop:
        """Return the loop over its points from the rows of a ledger."""
        return PointLoop(self.placement.empty(self.only), self.source(ledger))

    @property
    def text(self) -> str:
        """Description of the most that it does, in a line; empty for one point without a matrix."""
        return self.source(None).text

    @cached_property
    def probed(self) -> Placement:
        """The stages of the probes and the values of variants, for checks before the start."""
        placement = self.placement.empty(self.only)
        for built in self.probes:
            placement.place(built)
        return placement

    def at_most(self, ledger: Ledger | None) -> list[Stage]:
        """Return the stages that run at most, for a plan."""
        placement = self.placement.empty(self.only)
        for point in self.source(ledger).expected():
            try:
                built = placement.build(point)
            except ConfigError:  # values that exclude each other
                continue
            placement.place(built)
        return list(placement.stages.values())

    def known(self, ledger: Ledger) -> tuple[Sequence[Stage], bool]:
        """Return the stages that the rows of a ledger lead to, and whether they are all."""
        return self.loop(ledger).replay(ledger)

    def entries(self, ledger: Ledger) -> dict[str, Row]:
        """Return the entries of a ledger that must not change, since stored results follow them.

        They are the varied keys, by which results have their names, and what decides the proposals
        of a search. Until a point has ended, no metric was used.
        """
        source = self.source(ledger)
        entries, rows = self._entries(source), ledger.rows(source.table) if source.table else []
        if not ledger.count("units"):
            del entries["matrix"]
        if not rows:
            entries.pop(_ENTRY, None)
        elif _ENTRY in entries and all(row["ended"] is None for row in rows):
            del entries[_ENTRY]["metrics"]
        return entries

    def record(self, ledger: Ledger) -> None:
        """Record the varied keys, and what decides the proposals of a search."""
        ledger.put(ENTRIES, self._entries(self.source(None)))

    def _entries(self, source: Source) -> dict[str, Row]:
        search = {_ENTRY: dict(source.decisive)} if source.decisive else {}
        return {"matrix": {"keys": sorted(self.placement.axes)}, **search}
