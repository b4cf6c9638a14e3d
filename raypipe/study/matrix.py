"""Study of a configuration: its points, from a grid, a search or a race, as one graph.

A configuration without a matrix is a study of one point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from raypipe.config.matrix import SEED, MatrixSettings, Point
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.continuation import ENTRIES
from raypipe.graph.experiment import Stage
from raypipe.hardware import Hardware
from raypipe.store.ledger import Ledger, Row
from raypipe.store.tables import Table
from raypipe.study.loop import COMPARISON, PointLoop, Source, comparison_stage
from raypipe.study.placement import BuiltPoint, Placement, PointBuilder, Stages

#: the entry of the ledger with what decides the proposals of a search
_ENTRY = "matrix.search"


class Grid(Source):
    """Source of all points of a matrix at once."""

    def __init__(self, points: Sequence[Point], is_matrix: bool) -> None:
        self._points, self._is_matrix, self._left = points, is_matrix, points
        self.is_compared = len(points) > 1

    @property
    def is_over(self) -> bool:
        """Whether the points were returned."""
        return not self._left

    @property
    def text(self) -> str:
        """The number of points, if there is a matrix."""
        return f"matrix: {len(self._points)} points" if self._is_matrix else ""

    def ask(self) -> Sequence[Point]:
        """Return all points the first time."""
        asked, self._left = self._left, ()
        return asked

    def points(self, asked: Point) -> Iterable[Point]:
        """Return the point."""
        return (asked,)

    def expected(self) -> Iterable[Point]:
        """Return all points."""
        return self._points


@dataclass(frozen=True)
class StudyGraph:
    """The points of a configuration.

    Args:
        configuration: the configuration.
        builder: builds points.
        probes: points that show on which keys each stage depends; all of them for a grid.
        source: returns the source of points for the rows of its table.
        only: the stages that run, with what they need; empty for all.

    """

    configuration: Configuration
    builder: PointBuilder
    probes: Sequence[BuiltPoint]
    source: Callable[[Mapping[str, Row]], Source]
    only: tuple[str, ...] = ()

    def loop(self, ledger: Ledger) -> PointLoop:
        """Return the loop over its points from the rows of a ledger."""
        return PointLoop(self.builder, self._placement(), self._source(ledger))

    @property
    def text(self) -> str:
        """What it does at most, in a line; empty for one point without a matrix."""
        return self._source(None).text

    @cached_property
    def probed(self) -> Placement:
        """The stages of the probes, for checks before anything starts."""
        placement = self._placement()
        for built in self.probes:
            placement.place(built)
        return placement

    @property
    def stages(self) -> list[Stage]:
        """The stages of the probes."""
        return self._with_comparison(self.probed)

    @property
    def variants(self) -> Mapping[str, Point]:
        """The values of each variant of the probes by key."""
        return self.probed.variants

    def at_most(self, ledger: Ledger | None) -> list[Stage]:
        """Return the stages that run at most, for a plan."""
        placement = self._placement()
        for point in self._source(ledger).expected():
            try:
                built = self.builder.build(point)
            except ConfigError:  # values that exclude each other
                continue
            if built is not None:
                placement.place(built)
        return self._with_comparison(placement)

    def known(self, ledger: Ledger) -> tuple[Sequence[Stage], bool]:
        """Return the stages that the rows of a ledger lead to, and whether they are all."""
        return self.loop(ledger).replay(ledger)

    def entries(self, ledger: Ledger) -> dict[str, Row]:
        """Return the entries of a ledger that must not change, since stored results follow them.

        They are the varied keys, by which results have their names, and what decides the proposals
        of a search. Until a point has ended, no metric was used.
        """
        source, entries = self._source(ledger), dict[str, Row]()
        if ledger.count("units"):
            entries["matrix"] = {"keys": sorted(self.builder.axes)}
        if source.decisive and (rows := ledger.rows(source.table)):
            entries[_ENTRY] = dict(source.decisive)
            if all(row["ended"] is None for row in rows):
                del entries[_ENTRY]["metrics"], entries[_ENTRY]["constraints"]
        return entries

    def record(self, ledger: Ledger) -> None:
        """Record the varied keys, and what decides the proposals of a search."""
        entries: dict[str, Row] = {"matrix": {"keys": sorted(self.builder.axes)}}
        if decisive := self._source(None).decisive:
            entries[_ENTRY] = dict(decisive)
        ledger.put(ENTRIES, entries)

    def _source(self, ledger: Ledger | None) -> Source:
        empty = self.source({})
        if ledger is None or not empty.table:
            return empty
        return self.source(dict(ledger.items(empty.table)))

    def _placement(self) -> Placement:
        only = () if COMPARISON in self.only else self.only
        return Placement(self.builder.axes, self.probes, only)

    def _with_comparison(self, placement: Placement) -> list[Stage]:
        stages = list(placement.stages.values())
        is_whole = self._source(None).is_compared and not placement.only
        return [*stages, comparison_stage(stages)] if is_whole else stages


def study_of(
    configuration: Configuration,
    stages: Stages,
    tables: Mapping[str, Table],
    nodes: Sequence[Hardware],
) -> StudyGraph:
    """Return the study of a configuration.

    Args:
        configuration: the configuration.
        stages: returns the stages of one point, with identities.
        tables: the declared tables by name.
        nodes: the hardware, of which the number of concurrent points of a search follows.

    Raises:
        ConfigError: a key, value, table or column that does not exist, or too few points.

    """
    matrix: MatrixSettings = configuration.settings.matrix or MatrixSettings()
    points = list(matrix.all_points())
    builder = PointBuilder(configuration, matrix, stages)
    if matrix.race is not None:
        from raypipe.study.race import race_of

        race = race_of(configuration, matrix.race, tables, points)
        first = (builder.build(each) for each in race({}).expected() if each[SEED] < 2)
        return StudyGraph(
            configuration, builder, [each for each in first if each is not None], race
        )
    if not points:
        raise ConfigError(f"{configuration.origin}: matrix: every point is excluded")
    built = [each for each in map(builder.build, points) if each is not None]
    if matrix.search is not None:
        from raypipe.study.search import probes, search_of

        known = [*built, *probes(matrix.search, points[0], builder)]
        values = known[-1].settings
        search = search_of(configuration, matrix, tables, nodes, values)
        return StudyGraph(configuration, builder, known, search)
    if not built:
        raise ConfigError(f"{configuration.origin}: matrix: every point is excluded")
    allowed = [point for point in points if builder.build(point) is not None]
    return StudyGraph(configuration, builder, built, lambda _: Grid(allowed, bool(matrix.keys)))
