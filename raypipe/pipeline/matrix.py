"""Graph of a matrix: the stages of all its points (:mod:`raypipe.pipeline.placement`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from raypipe.config.matrix import MatrixSettings, Point
from raypipe.errors import ConfigError
from raypipe.hardware import Hardware
from raypipe.pipeline.comparison import comparison_stage
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.experiment import Stage
from raypipe.pipeline.growing import GrowingMatrix, growing_matrix
from raypipe.pipeline.placement import Placement, PointBuilder, Stages, variant_rows
from raypipe.storage.ledger import Ledger
from raypipe.storage.tables import Table


@dataclass(frozen=True)
class Graph:
    """The stages of all points, and the values of each variant by key.

    With ``growing``, which adds the stages of points while it runs, they are those of some points.
    """

    stages: Sequence[Stage]
    variants: Mapping[str, Point]
    points: int = 1
    growing: GrowingMatrix | None = None


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
        growing = growing_matrix(configuration, stages, tables, nodes)
        placement = growing.probed()
        return Graph(
            list(placement.stages.values()), placement.variants, len(growing.probes), growing
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
    return Graph(graph, placement.variants, len(built))


def refuse_other_axes(ledger: Ledger, configuration: Configuration, where: str) -> None:
    """Refuse a matrix over other keys than the stored one: results have names by their values.

    Raises:
        ConfigError: the stored keys and those of this configuration.

    """
    if not ledger.count("units"):
        return
    recorded = ledger.get("runs", "matrix")
    if recorded is None and ledger.damage:  # lost; the identities still tell other units apart
        return
    stored = (recorded or {}).get("keys", [])
    asked = _axes(configuration)
    if stored != asked:
        raise ConfigError(
            f"{where}: its results are of a matrix over {', '.join(stored) or 'no key'}, this one "
            f"is over {', '.join(asked) or 'no key'}; use another --run-dir, or vary the same keys "
            "(give a key that keeps its value as a list of one value)"
        )


def record_matrix(ledger: Ledger, configuration: Configuration, graph: Graph) -> None:
    """Record the varied keys, and the values of the variants that are new."""
    ledger.put("runs", {"matrix": {"keys": _axes(configuration)}})
    if graph.growing is not None:  # the growth records its variants
        graph.growing.record(ledger)
        return
    ledger.put("variants", variant_rows(graph.variants, ledger))


def _axes(configuration: Configuration) -> list[str]:
    matrix: MatrixSettings | None = configuration.settings.matrix
    return sorted(matrix.keys) if matrix is not None else []
