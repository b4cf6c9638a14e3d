"""Placement of points in one graph: each computation once, named by the values it depends on.

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
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Stage, in_order, with_needs
from raypipe.graph.identity import fingerprint
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import BASE
from raypipe.training.batching import KEYS as BATCH_KEYS
from raypipe.training.batching import BatchConflict

#: sections that say what runs, not how
_NOT_VARIED = ("matrix", "sweep", "tracking")
_NAME_LENGTH = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=,-]")

Stages = Callable[[Configuration], Sequence[Stage]]


@dataclass(frozen=True)
class BuiltPoint:
    """A point with the value of every varied key, its settings, and its stages by name."""

    point: Point
    settings: Any
    stages: Mapping[str, Stage]


class PointBuilder:
    """Builds the stages of points, each point once.

    Args:
        configuration: the configuration.
        matrix: its matrix.
        stages: returns the stages of one configuration, with identities.

    Raises:
        ConfigError: a key that cannot be varied.

    """

    def __init__(
        self, configuration: Configuration, matrix: MatrixSettings, stages: Stages
    ) -> None:
        self.axes = {key: _keys_of(key, configuration) for key in matrix.keys}
        for key in self.axes.get(SEED, ()):
            if key != SEED and key in self.axes:
                raise ConfigError(
                    f"{configuration.origin}: matrix: {key} is an axis, and repetitions (`runs`, "
                    "`race` or `seed`) set it, too; give one of the two"
                )
        self.base = {key: _base_value(key, configuration) for key in self.axes}
        self._configuration, self._matrix, self._stages = configuration, matrix, stages
        self._built: dict[str, BuiltPoint | None] = {}

    def build(self, point: Point, where: str = "matrix") -> BuiltPoint | None:
        """Return a point's stages; None if the constraints rule it out.

        Raises:
            ConfigError: a key that does not exist, or a value that is not valid.

        """
        name = value_text(point)
        if name not in self._built:
            self._built[name] = self._build(point, where)
        return self._built[name]

    def _build(self, point: Point, where: str) -> BuiltPoint | None:
        configuration = self._configuration
        effective = self._matrix.constraints.effective_batch
        values: dict[str, Any] = {}
        for key, value in point.items():
            if key == SEED and self.axes[key] != [SEED]:
                values |= {
                    seed: _value(seed, configuration) + SEED_STRIDE * _run(value, configuration)
                    for seed in self.axes[key]
                }
            else:
                values[key] = value
        if effective is not None:
            values |= {f"{section}.effective_batch": effective for section in _batched(point)}
        origin = f"{configuration.origin}: {where} ({point_text(point)})"
        try:
            varied = configuration.with_values(values, origin) if values else configuration
        except BatchConflict:
            if effective is None:
                raise
            return None
        stages = {stage.name: stage for stage in in_order(self._stages(varied))}
        return BuiltPoint({**self.base, **point}, varied.settings, stages)


@dataclass(frozen=True)
class PlacedPoint:
    """A point in the graph: the keys of its stages, their variants, and the stages it added."""

    keys: frozenset[str]
    variants: frozenset[str]
    added: Sequence[Stage]


class Placement:
    """The stages of all points placed so far, and the values of each variant by key.

    Args:
        axes: the keys that each axis varies.
        known: points that show on which varied keys each stage depends.
        only: the stages to place, with what they need; empty for all.

    """

    def __init__(
        self,
        axes: Mapping[str, Sequence[str]],
        known: Sequence[BuiltPoint],
        only: Sequence[str] = (),
    ) -> None:
        self._axes, self.only = axes, only
        self._decisive: dict[str, Sequence[str]] = {}
        for name in dict.fromkeys(name for built in known for name in built.stages):
            having = [(b.point, b.stages) for b in known if name in b.stages]
            self._decisive[name] = _decisive(name, having, axes, self._decisive)
        self.stages: dict[str, Stage] = {}
        self.variants: dict[str, Point] = {}

    def keys_of(self, stage: str) -> Sequence[str]:
        """Return the varied keys on which a stage depends; all of them if it is not known."""
        return self._decisive.get(stage, list(self._axes))

    def place(self, built: BuiltPoint) -> PlacedPoint:
        """Add the stages of a point that no earlier point has.

        Raises:
            ConfigError: a stage differs from an earlier point's although all keys on which it is
                known to depend agree.

        """
        point, stages, added = built.point, built.stages, dict[str, Stage]()
        if self.only:
            stages = {s.name: s for s in with_needs(list(stages.values()), self.only)}
        values = {name: {key: point[key] for key in self.keys_of(name)} for name in stages}
        labels = {name: variant_label(values[name]) for name in stages}
        keys = set()
        for stage in stages.values():
            needed = {name: labels[name] for name in _all_needs(stage, stages)}
            variant = labels[stage.name]
            placed = replace(stage, settings=built.settings, variant=variant, variants=needed)
            keys.add(placed.key)
            earlier = self.stages.get(placed.key)
            if earlier is None:
                added[placed.key] = placed
            elif _identity(earlier) != _identity(placed):
                raise ConfigError(
                    f"{stage.name}: differs between points that agree in "
                    f"{', '.join(self.keys_of(stage.name)) or 'every key it is known to read'}; "
                    "let it read the varied key that it depends on"
                )
        self.stages |= added
        self.variants |= {labels[name]: of_stage for name, of_stage in values.items() if of_stage}
        return PlacedPoint(frozenset(keys), frozenset(labels.values()), list(added.values()))


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


def variant_rows(variants: Mapping[str, Point], ledger: Ledger) -> dict[str, Row]:
    """Return the rows of the table ``variants`` that a ledger does not have."""
    rows: dict[str, Row] = {}
    for variant, values in variants.items():
        for key, value in values.items():
            name = f"{variant}/{key}"
            if ledger.get("variants", name) is None:
                numeric = isinstance(value, int | float) and not isinstance(value, bool)
                number = float(value) if numeric else None
                row = {"variant": variant, "key": key, "value": value_text(value)}
                rows[name] = {**row, "number": number}
    return rows


def _decisive(
    name: str,
    having: Sequence[tuple[Point, Mapping[str, Stage]]],
    axes: Mapping[str, Sequence[str]],
    decisive: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the varied keys on which a stage depends: those it reads, those of its needs.

    A stage may also depend on keys through its units' literals; it then counts as depending on all.
    """
    found = {
        axis
        for axis, keys in axes.items()
        for _, stages in having[:1]
        if any(_reads(stages[name], key) for key in keys)
    }
    for _, stages in having:
        found.update(key for need in stages[name].needs for key in decisive[need])
    identities: dict[str, str] = {}
    for point, stages in having:
        values, own = value_text([point[key] for key in sorted(found)]), _identity(stages[name])
        if identities.setdefault(values, own) != own:
            return list(axes)
    return [axis for axis in axes if axis in found]


def _identity(stage: Stage) -> str:
    return fingerprint([stage.fingerprint, [unit.budget for unit in stage.units]])


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
