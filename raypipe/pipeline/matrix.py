"""Graph of a matrix: the stages of all its points, each computation once.

A stage depends on the varied keys that it reads and on those of the stages that it needs. Points
with the same values of these keys share the stage. These values are its **variant**, and name it:
the name stays when values or points are added. A row of a table belongs to a point if the point has
all values of the row's variant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raypipe.config.matrix import SEED, SEED_STRIDE, MatrixSettings, Point, point_text, value_text
from raypipe.config.validation import dig
from raypipe.errors import ConfigError
from raypipe.pipeline.comparison import comparison_stage
from raypipe.pipeline.configuration import Configuration
from raypipe.pipeline.experiment import Stage, in_order
from raypipe.pipeline.identity import fingerprint, stage_fingerprint
from raypipe.storage.ledger import Ledger, Row
from raypipe.storage.run_directory import BASE
from raypipe.training.batching import KEYS as BATCH_KEYS
from raypipe.training.batching import BatchConflict

#: sections that say what runs, not how
_NOT_VARIED = ("matrix", "store", "sweep", "tracking")
_NAME_LENGTH = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=,-]")

Stages = Callable[[Configuration], Sequence[Stage]]


@dataclass(frozen=True)
class Graph:
    """The stages of all points, and the values of each variant by key."""

    stages: Sequence[Stage]
    variants: Mapping[str, Point]
    points: int = 1


def graph_of(configuration: Configuration, stages: Stages) -> Graph:
    """Return the stages of all points of a configuration's matrix; without one, of one point.

    Args:
        configuration: the configuration.
        stages: returns the stages of one point, with identities.

    Raises:
        ConfigError: a key that does not exist, a value of the wrong type, or no point at all.

    """
    matrix: MatrixSettings | None = configuration.settings.matrix
    if matrix is None or not matrix.keys:
        alone = [replace(s, settings=configuration.settings) for s in stages(configuration)]
        return Graph(alone, {})
    axes = {key: _keys_of(key, configuration) for key in matrix.keys}
    base = {key: _base_value(key, configuration) for key in axes}
    built = [
        ({**base, **point}, varied.settings, {s.name: s for s in in_order(stages(varied))})
        for point, varied in _configurations(matrix, configuration, axes)
    ]
    if not built:
        raise ConfigError(f"{configuration.origin}: matrix: every point is excluded")
    names = list(dict.fromkeys(name for _, _, of_point in built for name in of_point))
    decisive: dict[str, list[str]] = {}
    for name in names:
        having = [(point, of_point) for point, _, of_point in built if name in of_point]
        decisive[name] = _decisive(name, having, axes, decisive)
    merged: dict[str, Stage] = {}
    variants: dict[str, Point] = {}
    for point, settings, of_point in built:
        labels = {
            name: variant_label({key: point[key] for key in decisive[name]}) for name in of_point
        }
        for stage in of_point.values():
            variant = labels[stage.name]
            needed = {name: labels[name] for name in _all_needs(stage, of_point)}
            placed = replace(stage, settings=settings, variant=variant, variants=needed)
            merged.setdefault(placed.key, placed)
            if decisive[stage.name]:
                variants[variant] = {key: point[key] for key in decisive[stage.name]}
    graph = list(merged.values())
    if len(built) > 1:
        graph.append(comparison_stage(graph))
    return Graph(graph, variants, len(built))


def variant_label(values: Mapping[str, Any]) -> str:
    """Return the name of a variant: its values by key, or ``base`` without any.

    The name is fit for a file: other characters become ``_``, long names are cut, and both get a
    hash, so that different values never share a name.
    """
    if not values:
        return BASE
    name = ",".join(f"{key}={value_text(value)}" for key, value in sorted(values.items()))
    safe = _UNSAFE.sub("_", name)[:_NAME_LENGTH]
    return name if safe == name else f"{safe}~{fingerprint(name)[:8]}"


def refuse_other_axes(ledger: Ledger, configuration: Configuration, where: str) -> None:
    """Refuse a matrix over other keys than the stored one: results have names by their values.

    Raises:
        ConfigError: the stored keys and those of this configuration.

    """
    if not ledger.count("units"):
        return
    stored = (ledger.get("runs", "matrix") or {}).get("keys", [])
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
    rows: dict[str, Row] = {}
    for variant, values in graph.variants.items():
        for key, value in values.items():
            name = f"{variant}/{key}"
            numeric = isinstance(value, int | float) and not isinstance(value, bool)
            number = float(value) if numeric else None
            if ledger.get("variants", name) is None:
                row = {"variant": variant, "key": key, "value": value_text(value)}
                rows[name] = {**row, "number": number}
    ledger.put("variants", rows)


def _axes(configuration: Configuration) -> list[str]:
    matrix: MatrixSettings | None = configuration.settings.matrix
    return sorted(matrix.keys) if matrix is not None else []


def _configurations(
    matrix: MatrixSettings, configuration: Configuration, axes: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Point, Configuration]]:
    """Yield each point with its configuration; those that the constraints rule out are left out."""
    effective = matrix.constraints.effective_batch
    for point in matrix.all_points():
        values: dict[str, Any] = {}
        for key, value in point.items():
            if key == SEED and axes[key] != [SEED]:
                values |= {
                    seed: _value(seed, configuration) + SEED_STRIDE * _run(value, configuration)
                    for seed in axes[key]
                }
            else:
                values[key] = value
        if effective is not None:
            values |= {f"{section}.effective_batch": effective for section in _batched(point)}
        origin = f"{configuration.origin}: matrix ({point_text(point)})"
        try:
            yield point, configuration.with_values(values, origin)
        except BatchConflict:
            if effective is None:
                raise


def _decisive(
    name: str,
    having: Sequence[tuple[Point, Mapping[str, Stage]]],
    axes: Mapping[str, Sequence[str]],
    decisive: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the varied keys on which a stage depends: those it reads, those of its needs.

    A stage may also depend on a key through its units' literals; then points that agree in the keys
    so far have different identities, and further keys are added until they do not.
    """
    found = {
        axis
        for axis, keys in axes.items()
        for _, stages in having[:1]
        if any(_reads(stages[name], key) for key in keys)
    }
    for _, stages in having:
        found.update(key for need in stages[name].needs for key in decisive[need])
    identities = [
        (point, fingerprint([stage_fingerprint(s[name]), [u.budget for u in s[name].units]]))
        for point, s in having
    ]
    while not _determine(found, identities):
        others = [axis for axis in axes if axis not in found]
        alone = (axis for axis in others if _determine({*found, axis}, identities))
        found.add(next(alone, others[0]))
    return [axis for axis in axes if axis in found]


def _determine(keys: set[str], identities: Sequence[tuple[Point, str]]) -> bool:
    """Whether points that agree in these keys have the same identity."""
    together: dict[str, str] = {}
    return all(
        together.setdefault(value_text([point[key] for key in sorted(keys)]), identity) == identity
        for point, identity in identities
    )


def _reads(stage: Stage, key: str) -> bool:
    return any(
        key == read or key.startswith(f"{read}.") or read.startswith(f"{key}.")
        for read in stage.reads or ()
    )


def _all_needs(stage: Stage, stages: Mapping[str, Stage]) -> set[str]:
    """Return the names of the stages that a stage needs, also through others."""
    found: set[str] = set()
    pending = list(stage.needs)
    while pending:
        name = pending.pop()
        if name not in found:
            found.add(name)
            pending += stages[name].needs
    return found


def _keys_of(axis: str, configuration: Configuration) -> list[str]:
    """Return the keys that an axis varies: itself, or for ``seed`` every key of that name."""
    section = axis.partition(".")[0]
    if section in _NOT_VARIED:
        raise ConfigError(
            f"{configuration.origin}: matrix.{axis}: the section {section} cannot be varied"
        )
    if axis != SEED or SEED in type(configuration.settings).model_fields:
        return [axis]
    seeds = list(_seeds(configuration.settings.model_dump(exclude=set(_NOT_VARIED))))
    if not seeds:
        raise ConfigError(
            f"{configuration.origin}: matrix.runs: no key is named seed, so repetitions would be "
            "equal"
        )
    return seeds


def _seeds(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        if name == SEED and isinstance(value, int):
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping):
            yield from _seeds(value, f"{prefix}{name}.")


def _base_value(axis: str, configuration: Configuration) -> Any:
    if axis == SEED and SEED not in type(configuration.settings).model_fields:
        return 0
    return _value(axis, configuration)


def _value(key: str, configuration: Configuration) -> Any:
    """Return the configuration's value of a key; None if it has none."""
    return dig(configuration.settings.model_dump(mode="json"), *key.split("."))


def _run(value: Any, configuration: Configuration) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(
            f"{configuration.origin}: matrix.seed = {value!r}: must be the number of a run, "
            "0 or more (run r adds 1000 x r to every key named seed)"
        )
    return value


def _batched(point: Point) -> set[str]:
    """Return the ``training`` sections of which a point gives batch sizes, or the workers."""
    sections = set()
    for key in point:
        section, _, last = key.rpartition(".")
        if last in BATCH_KEYS:
            sections.add(section)
        elif key.endswith(".scaling.workers"):
            sections.add(f"{section.rpartition('.')[0]}.training")
    return sections
