"""Study of a configuration: which source proposes its points, a grid, a search or a race."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from raypipe.config.matrix import SEED, MatrixSettings
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.hardware import Hardware
from raypipe.store.ledger import Row
from raypipe.store.tables import Table
from raypipe.study.loop import Source, StudyGraph
from raypipe.study.placement import Placement, Stages


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
    placement = Placement(configuration, matrix, stages)
    source: Callable[[Mapping[str, Row]], Source] | None = None
    if matrix.race is not None:
        from raypipe.study.race import race_of

        source = race_of(configuration, matrix.race, tables, points)
        points = [point for point in source({}).expected() if point[SEED] < 2]
    built = [each for each in map(placement.build, points) if each is not None]
    if not points or (not built and matrix.search is None):
        raise ConfigError(f"{configuration.origin}: matrix: every point is excluded")
    if matrix.search is not None:
        from raypipe.study.search import probes, search_of

        built += probes(matrix.search, points[0], placement)
        source = search_of(configuration, matrix, tables, nodes, built[-1].settings)
    allowed = [point for point in points if placement.build(point) is not None]
    text = f"matrix: {len(allowed)} points" if matrix.keys else ""
    placement.learn(built)
    return StudyGraph(
        placement,
        built,
        source or (lambda _: Source(allowed, text, is_compared=len(allowed) > 1)),
    )
