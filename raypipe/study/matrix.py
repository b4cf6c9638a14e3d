"""Graph of a matrix: the stages of all its points (:mod:`raypipe.study.placement`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from raypipe.config.matrix import SEED, MatrixSettings, Point
from raypipe.config.search import SearchSettings
from raypipe.config.validation import dig
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.continuation import ENTRIES
from raypipe.graph.experiment import Stage
from raypipe.hardware import Hardware
from raypipe.report.measures import monitors_of
from raypipe.stats import runs_needed
from raypipe.store.ledger import Ledger, Row
from raypipe.store.tables import Table
from raypipe.study.comparison import comparison_stage
from raypipe.study.metric import metric_of, mode_of
from raypipe.study.optuna_samplers import distribution, sampler_for, study_of
from raypipe.study.placement import BuiltPoint, Placement, PointBuilder, Stages, variant_rows
from raypipe.study.point_loop import PointLoop, Source
from raypipe.study.race import Race, first_runs
from raypipe.study.search import TABLE, Bound, Search

#: the entry of the ledger with what decides the proposals of a search
_ENTRY = "matrix.search"
#: points at which a value of an axis is tried before it counts as impossible
_TRIES = 8


@dataclass(frozen=True)
class Graph:
    """The stages of all points, and the values of each variant by key.

    With ``adaptive``, which adds the stages of points while it runs, they are those of some points.
    """

    stages: Sequence[Stage]
    variants: Mapping[str, Point]
    points: int = 1
    adaptive: AdaptiveMatrix | None = None
    varied: Sequence[str] = ()

    def entries(self, ledger: Ledger) -> dict[str, Row]:
        """Return the entries of a ledger that must not change, since stored results follow them."""
        entries = {"matrix": {"keys": list(self.varied)}} if ledger.count("units") else {}
        return entries | (self.adaptive.entries(ledger) if self.adaptive is not None else {})

    def known(self, ledger: Ledger) -> tuple[Sequence[Stage], bool]:
        """Return the stages that the rows of a ledger lead to, and whether they are all."""
        if self.adaptive is None:
            return self.stages, True
        return self.adaptive.loop(ledger).replay(ledger)

    def record(self, ledger: Ledger) -> None:
        """Record the varied keys, and the values of the variants that are new."""
        ledger.put(ENTRIES, {"matrix": {"keys": list(self.varied)}})
        if self.adaptive is not None:  # the loop records its variants
            self.adaptive.record(ledger)
        else:
            ledger.put("variants", variant_rows(self.variants, ledger))


def graph_of(
    configuration: Configuration,
    stages: Stages,
    tables: Mapping[str, Table],
    nodes: Sequence[Hardware],
) -> Graph:
    """Return the stages of all points of a configuration's matrix; without one, of one point.

    Args:
        configuration: the configuration.
        stages: returns the stages of one point, with identities.
        tables: the declared tables by name.
        nodes: the hardware.

    Raises:
        ConfigError: a key that does not exist, a value of the wrong type, or no point at all.

    """
    matrix: MatrixSettings | None = configuration.settings.matrix
    if matrix is None or not matrix.keys:
        alone = [replace(s, settings=configuration.settings) for s in stages(configuration)]
        return Graph(alone, {})
    if matrix.search is not None or matrix.race is not None:
        adaptive = adaptive_matrix(configuration, stages, tables, nodes)
        placement = adaptive.probed()
        return Graph(
            list(placement.stages.values()),
            placement.variants,
            len(adaptive.probes),
            adaptive,
            sorted(matrix.keys),
        )
    builder = PointBuilder(configuration, matrix, stages)
    found = (builder.build(point) for point in matrix.all_points())
    built = [each for each in found if each is not None]
    if not built:
        raise ConfigError(f"{configuration.origin}: matrix: every point is excluded")
    placement = Placement(builder.axes, built)
    for each in built:
        placement.place(each)
    graph = list(placement.stages.values())
    if len(built) > 1:
        graph.append(comparison_stage(graph))
    return Graph(graph, placement.variants, len(built), varied=sorted(matrix.keys))


@dataclass(frozen=True)
class AdaptiveMatrix:
    """A matrix with a search or a race.

    Args:
        configuration: the configuration.
        builder: builds points.
        probes: points that show on which keys each stage depends.
        source: returns the source of points for the rows of a ledger.
        decisive: what decides the proposals; another value is refused.
        search: the section of a search, its ranges with the types of their keys.
        only: the stages that run, with what they need; empty for all.

    """

    configuration: Configuration
    builder: PointBuilder
    probes: Sequence[BuiltPoint]
    source: Callable[[Ledger | None], Source]
    decisive: Mapping[str, Any]
    search: SearchSettings | None = None
    only: tuple[str, ...] = ()

    @property
    def matrix(self) -> MatrixSettings:
        """The section of the configuration."""
        section: MatrixSettings = self.configuration.settings.matrix
        return section

    def probed(self) -> Placement:
        """Return the stages of the probes, for checks before anything starts."""
        placement = Placement(self.builder.axes, self.probes, self.only)
        for built in self.probes:
            placement.place(built)
        return placement

    def loop(self, ledger: Ledger | None) -> PointLoop:
        """Return the loop over its points from the rows of a ledger."""
        placement = Placement(self.builder.axes, self.probes, self.only)
        last = _compare if self.matrix.race is not None else _nothing
        return PointLoop(self.builder, self.matrix, placement, self.source(ledger), last)

    def entries(self, ledger: Ledger) -> dict[str, Row]:
        """Return what decides the proposals of a search, once there are some.

        Until a point has ended, no metric was used.
        """
        rows, decisive = ledger.rows(TABLE), dict(self.decisive)
        if all(row["ended"] is None for row in rows):
            decisive = {k: v for k, v in decisive.items() if k not in ("metrics", "constraints")}
        return {_ENTRY: decisive} if rows else {}

    def record(self, ledger: Ledger) -> None:
        """Record what decides the proposals of a search."""
        if self.decisive:
            ledger.put(ENTRIES, {_ENTRY: dict(self.decisive)})

    def at_most(self, ledger: Ledger | None) -> Placement:
        """Return the stages that run at most, for a plan; unknown points are drawn at random."""
        placement = Placement(self.builder.axes, self.probes, self.only)
        search, race = self.search, self.matrix.race
        points: list[Point] = []
        if search is not None:
            points = list(_expected_points(search, ledger))
        if race is not None:
            points = [{SEED: run} for run in range(race.most_runs)]
        for proposed in points:
            for point in self.matrix.all_points(proposed):
                try:
                    built = self.builder.build(point)
                except ConfigError:  # values that exclude each other
                    continue
                if built is not None:
                    placement.place(built)
        return placement

    def text(self) -> str:
        """Return what the matrix does at most, in a line."""
        search, race = self.matrix.search, self.matrix.race
        fixed = len(list(self.matrix.all_points()))
        if race is not None:
            first = first_runs(race, fixed)
            return f"race: {fixed} points, {first} to {race.most_runs} seeds each"
        if search is None:
            return ""
        each = f", each at {fixed} points of the matrix" if fixed > 1 else ""
        return f"search: at most {search.trials} points by {search.sampler}{each}"


def adaptive_matrix(
    configuration: Configuration,
    stages: Stages,
    tables: Mapping[str, Table],
    nodes: Sequence[Hardware],
) -> AdaptiveMatrix:
    """Return the matrix of a configuration that has a search or a race.

    Args:
        configuration: the configuration.
        stages: returns the stages of one point, with identities.
        tables: the declared tables by name.
        nodes: the hardware, of which the number of concurrent points follows.

    Raises:
        ConfigError: a key, value, table or column that does not exist, or too few points.

    """
    matrix: MatrixSettings = configuration.settings.matrix
    builder = PointBuilder(configuration, matrix, stages)
    if matrix.race is not None:
        return _racing(configuration, matrix, builder, tables)
    return _searching(configuration, matrix, builder, tables, nodes)


def _racing(
    configuration: Configuration,
    matrix: MatrixSettings,
    builder: PointBuilder,
    tables: Mapping[str, Table],
) -> AdaptiveMatrix:
    where = f"{configuration.origin}: matrix.race"
    settings = matrix.race
    if settings is None:
        raise ValueError("the matrix has no race")
    metric = metric_of(settings.objective, tables, where)
    mode = mode_of(settings.objective, tables, where, _monitors(configuration))
    points = list(matrix.all_points())
    if len(points) < 2:
        raise ConfigError(f"{where}: the matrix has {len(points)} point; a race needs two or more")
    least = runs_needed(1, settings.alpha)
    if settings.most_runs < least:
        raise ConfigError(
            f"{where}.most_runs = {settings.most_runs}: with fewer than {least} seeds no test can "
            f"reach alpha = {settings.alpha:g}; raise it"
        )
    seeds = [{**point, SEED: run} for run in (0, 1) for point in points]
    probes = [built for each in seeds if (built := builder.build(each)) is not None]
    return AdaptiveMatrix(
        configuration, builder, probes, lambda _: Race(settings, metric, mode, points), {}
    )


def _searching(
    configuration: Configuration,
    matrix: MatrixSettings,
    builder: PointBuilder,
    tables: Mapping[str, Table],
    nodes: Sequence[Hardware],
) -> AdaptiveMatrix:
    where = f"{configuration.origin}: matrix.search"
    settings = matrix.search
    if settings is None:
        raise ValueError("the matrix has no search")
    at, monitors = f"{where}.metrics", _monitors(configuration)
    objectives = [
        (metric_of(each, tables, at), mode_of(each, tables, at, monitors))
        for each in settings.metrics
    ]
    bounds = [
        Bound(metric_of(each, tables, f"{where}.constraints"), each.at_most, each.at_least)
        for each in settings.constraints
    ]
    fixed = list(matrix.all_points())
    if not fixed:
        raise ConfigError(f"{configuration.origin}: matrix: every point is excluded")
    concurrent = settings.concurrent or _concurrent(settings, nodes, len(fixed))
    plain = settings.model_dump(mode="json", exclude={"trials", "concurrent"})
    decisive = {**plain, "points": fixed, "modes": [mode for _, mode in objectives]}

    probes = list(_probes(settings, matrix, builder))
    typed = _typed(settings, probes[-1].settings)

    def source(ledger: Ledger | None) -> Search:
        rows = {} if ledger is None else dict(ledger.items(TABLE))
        return Search(typed, objectives, bounds, concurrent, rows)

    return AdaptiveMatrix(configuration, builder, probes, source, decisive, typed)


def _monitors(configuration: Configuration) -> dict[str, str]:
    return monitors_of(configuration.settings.model_dump())


def _concurrent(settings: SearchSettings, nodes: Sequence[Hardware], points: int) -> int:
    """Return the number of points in flight: the devices, but at most a quarter of all points."""
    devices = sum(len(node.gpus) for node in nodes) or sum(node.cpus for node in nodes)
    return max(1, min(-(-devices // points), settings.trials // 4))


def _typed(settings: SearchSettings, values: BaseModel) -> SearchSettings:
    """Return a search whose ranges are of real numbers where the key is, as in ``low: 1``."""
    plain, axes = values.model_dump(), dict(settings.axes)
    for key, axis in axes.items():
        if axis.is_integer and isinstance(dig(plain, *key.split(".")), float):
            ends = {"low": float(axis.low or 0), "high": float(axis.high or 0)}
            axes[key] = axis.model_copy(update=ends)
    return settings.model_copy(update={"axes": axes})


def _probes(
    settings: SearchSettings, matrix: MatrixSettings, builder: PointBuilder
) -> Iterator[BuiltPoint]:
    """Yield points that show on which keys each stage depends, and that the axes are possible.

    They are the configuration's own values at every fixed point, and at one of them the ends and a
    draw of each axis. A value that is impossible there is tried with drawn values of other axes.

    Raises:
        ConfigError: a key that does not exist, or a value that is possible at no point tried.

    """
    own = [builder.build(point) for point in matrix.all_points()]
    yield from (built for built in own if built is not None)
    fixed = next(matrix.all_points())
    draws = list(_draws(settings, _TRIES, seed=0))
    values = {key: _values_to_probe(settings, key) for key in sorted(settings.axes)}
    for draw in draws[:2]:
        for key in values:
            values[key] = [*values[key], draw[key]]
    for key, of_axis in values.items():
        for value in of_axis:
            points = [{**fixed, key: value}, *({**fixed, **draw, key: value} for draw in draws)]
            built = _first_possible(points, builder)
            if built is not None:
                yield built


def _first_possible(points: Sequence[Point], builder: PointBuilder) -> BuiltPoint | None:
    first: ConfigError | None = None
    for point in points:
        try:
            built = builder.build(point, "matrix.search")
        except ConfigError as error:
            first = first or error
        else:
            if built is not None:
                return built
    if first is not None:
        raise first
    return None


def _values_to_probe(settings: SearchSettings, key: str) -> list[Any]:
    axis = settings.axes[key]
    listed = axis.grid if axis.grid is not None else axis.choice
    return list(listed) if listed is not None else [axis.low, axis.high]


def _draws(settings: SearchSettings, count: int, seed: int) -> Iterator[Point]:
    """Yield random points of the axes."""
    distributions = {key: distribution(axis) for key, axis in sorted(settings.axes.items())}
    study = study_of(["minimize"], sampler_for("random", seed, 0, count))
    for _ in range(count):
        yield dict(study.ask(distributions).params)


def _expected_points(settings: SearchSettings, ledger: Ledger | None) -> Iterator[Point]:
    """Yield the stored points of a search, and drawn ones in place of those to come."""
    stored = (
        []
        if ledger is None
        else list(Search(settings, (), (), 1, dict(ledger.items(TABLE))).proposals.values())
    )
    yield from (each.values for each in stored if each.status != "excluded")
    yield from list(_draws(settings, settings.trials, settings.seed))[len(stored) :]


def _compare(stages: Sequence[Stage]) -> Sequence[Stage]:
    return [comparison_stage(stages)]


def _nothing(stages: Sequence[Stage]) -> Sequence[Stage]:
    del stages
    return ()
