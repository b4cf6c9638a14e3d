"""Placement of points in one graph: each computation once, named by the values it depends on.

A stage depends on the varied keys that it reads and on those of the stages that it needs. Points
with the same values of these keys share the stage. These values are its **variant**, and name it:
the name stays when values or points are added. A row of a table belongs to a point if the point has
all values of the row's variant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from raypipe.config.axes import dotted
from raypipe.config.matrix import (
    SEED,
    SEED_STRIDE,
    MatrixSettings,
    Point,
    is_seed,
    point_text,
    value_text,
)
from raypipe.config.validation import dig
from raypipe.errors import ConfigError
from raypipe.graph.configuration import Configuration
from raypipe.graph.experiment import Stage, in_order, with_needs
from raypipe.graph.identity import fingerprint
from raypipe.stats import finite_or_none
from raypipe.store.ledger import Ledger, Row
from raypipe.store.run_directory import BASE

#: sections that say what runs, not how
_NOT_VARIED = ("matrix", "sweep", "tracking", "notify")
_NAME_LENGTH = 80
_UNSAFE = re.compile(r"[^A-Za-z0-9._+=,-]")

Stages = Callable[[Configuration], Sequence[Stage]]


class BuiltPoint(NamedTuple):
    """A point with the value of every varied key, its settings, and its stages by name."""

    point: Point
    settings: Any
    stages: Mapping[str, Stage]


class PlacedPoint(NamedTuple):
    """A point in the graph: the keys of its stages, their variants, and the stages it added."""

    keys: frozenset[str]
    variants: frozenset[str]
    added: Sequence[Stage]


class Placement:
    """The stages of all points placed so far, and the values of each variant by key.

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
        self._configuration, self._stages_of = configuration, stages
        given = configuration.settings.model_dump(mode="json")
        self._values = dict(dotted(given, lambda _: False))
        self.axes = {key: self._keys_of(key) for key in matrix.keys}
        for key in self.axes.get(SEED, ()):
            if key != SEED and key in self.axes:
                raise ConfigError(
                    f"{configuration.origin}: matrix: {key} is an axis, and repetitions (`runs`, "
                    "`race` or `seed`) set it, too; give one of the two"
                )
        sections = {SEED: 0, **given}
        self._base = {k: self._values.get(k, dig(sections, *k.split("."))) for k in self.axes}
        self._built: dict[str, BuiltPoint] = {}
        self._decisive: dict[str, Sequence[str]] = {}
        self.only: Sequence[str] = ()
        self.stages: dict[str, Stage] = {}
        self.variants: dict[str, Point] = {}

    def empty(self, only: Sequence[str]) -> Placement:
        """Return a placement without points that knows as much.

        Args:
            only: the stages to place, with what they need; empty for all.

        """
        found = copy(self)
        found.only, found.stages, found.variants = only, {}, {}
        return found

    def build(self, point: Point, where: str = "matrix") -> BuiltPoint:
        """Return a point's stages.

        Raises:
            ConfigError: a key that does not exist, or a value that is not valid.

        """
        if (name := value_text(point)) in self._built:
            return self._built[name]
        configuration, values = self._configuration, dict(point)
        origin = f"{configuration.origin}: {where} ({point_text(point)})"
        if SEED in point and self.axes[SEED] != [SEED]:
            run = values.pop(SEED)
            if isinstance(run, bool) or not isinstance(run, int) or run < 0:
                raise ConfigError(
                    f"{configuration.origin}: matrix.seed = {run!r}: must be the number of a run, "
                    "0 or more (run r adds 1000 x r to every key named seed)"
                )
            values |= {key: self._values[key] + SEED_STRIDE * run for key in self.axes[SEED]}
        varied = configuration.with_values(values, origin) if values else configuration
        stages = {stage.name: stage for stage in in_order(self._stages_of(varied))}
        built = BuiltPoint({**self._base, **point}, varied.settings, stages)
        return self._built.setdefault(name, built)

    def learn(self, probes: Sequence[BuiltPoint]) -> None:
        """Learn from points on which varied keys each stage depends.

        They are those that it reads, and those of its needs. A stage may also depend on keys
        through its units' literals; it then counts as depending on all.
        """
        for name in dict.fromkeys(name for built in probes for name in built.stages):
            having = [built for built in probes if name in built.stages]
            reads = having[0].stages[name].reads or ()
            found = {
                axis
                for axis, keys in self.axes.items()
                for key, read in product(keys, reads)
                if f"{key}.".startswith(f"{read}.") or read.startswith(f"{key}.")
            }
            for built in having:
                found.update(key for n in built.stages[name].needs for key in self._decisive[n])
            identities: dict[str, str] = {}
            for built in having if len(having) > 1 else ():
                values = value_text([built.point[key] for key in sorted(found)])
                own = _identity(built.stages[name])
                if identities.setdefault(values, own) != own:
                    found = set(self.axes)
                    break
            self._decisive[name] = [axis for axis in self.axes if axis in found]

    def keys_of(self, stage: str) -> Sequence[str]:
        """Return the varied keys on which a stage depends; all of them if it is not known."""
        return self._decisive.get(stage, list(self.axes))

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
        needed: dict[str, set[str]] = {}  # also through others
        keys = set()
        for name, stage in stages.items():
            needed[name] = set(stage.needs).union(*(needed[need] for need in stage.needs))
            variants = {need: labels[need] for need in needed[name]}
            placed = replace(
                stage, settings=built.settings, variant=labels[name], variants=variants
            )
            keys.add(placed.key)
            earlier = self.stages.get(placed.key)
            if earlier is None:
                added[placed.key] = placed
            elif _identity(earlier) != _identity(placed):
                raise ConfigError(
                    f"{name}: differs between points that agree in "
                    f"{', '.join(self.keys_of(name)) or 'every key it is known to read'}; "
                    "let it read the varied key that it depends on"
                )
        self.stages |= added
        self.variants |= {labels[name]: of_stage for name, of_stage in values.items() if of_stage}
        return PlacedPoint(frozenset(keys), frozenset(labels.values()), list(added.values()))

    def rows(self, ledger: Ledger) -> dict[str, Row]:
        """Return the rows of the table ``variants`` that a ledger does not have."""
        rows: dict[str, Row] = {}
        for variant, values in self.variants.items():
            for key, value in values.items():
                if ledger.get("variants", f"{variant}/{key}") is None:
                    row = {"variant": variant, "key": key, "value": value_text(value)}
                    rows[f"{variant}/{key}"] = {**row, "number": finite_or_none(value)}
        return rows

    def _keys_of(self, axis: str) -> list[str]:
        """Return the keys that an axis varies: itself, or for ``seed`` every key of that name."""
        origin, section = self._configuration.origin, axis.partition(".")[0]
        if section in _NOT_VARIED:
            raise ConfigError(f"{origin}: matrix.{axis}: the section {section} cannot be varied")
        if axis != SEED or SEED in type(self._configuration.settings).model_fields:
            return [axis]
        seeds = [
            key
            for key, value in self._values.items()
            if is_seed(key) and isinstance(value, int) and key.partition(".")[0] not in _NOT_VARIED
        ]
        if not seeds:
            raise ConfigError(
                f"{origin}: matrix.runs: no key is named seed, so repetitions would be equal"
            )
        return seeds


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


def _identity(stage: Stage) -> str:
    return fingerprint([stage.fingerprint, [unit.budget for unit in stage.units]])
