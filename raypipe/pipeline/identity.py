"""Identity of a unit: everything that decides its result, as canonical JSON and its hash.

An identity holds the experiment and its version, the settings that the stage reads, the unit's
literals, and the identities of what it needs. Two units with the same identity compute the same
result. Fields marked :data:`~raypipe.config.settings.Operational` are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from raypipe.pipeline.experiment import Experiment, Stage, Unit, in_order
from raypipe.pipeline.settings_view import reads_by_default, values_of, view
from raypipe.training.settings import LENGTH_KEYS

if TYPE_CHECKING:
    from raypipe.storage.ledger import Row


@dataclass(frozen=True)
class Identity:
    """The identity of a unit; ``shared`` is the part that all units of its stage have."""

    shared: Mapping[str, Any]
    shared_fingerprint: str
    literals: Mapping[str, Any]
    needs: Mapping[str, str]

    @classmethod
    def of(
        cls,
        shared: Mapping[str, Any],
        literals: Mapping[str, Any],
        needs: Mapping[str, str] | None = None,
    ) -> Identity:
        """Return the identity of these parts."""
        return cls(shared, fingerprint(shared), literals, needs or {})

    @cached_property
    def fingerprint(self) -> str:
        """The hash of the identity."""
        return fingerprint([self.shared_fingerprint, self.literals, self.needs])

    def record(self) -> Row:
        """Return the form in which a unit's record in the ledger holds it."""
        return {
            "shared": self.shared_fingerprint,
            "literals": dict(self.literals),
            "needs": dict(self.needs),
            "fingerprint": self.fingerprint,
        }

    def differences(self, stored: Row, stored_shared: Row) -> dict[str, tuple[Any, Any]]:
        """Return the dotted keys that differ from a recorded identity, with both values."""
        return {
            **differences(stored_shared, self.shared),
            **differences(stored["literals"], self.literals),
            **differences({"needs": stored["needs"]}, {"needs": self.needs}),
        }


def compose(experiment: Experiment, settings: BaseModel, stages: Sequence[Stage]) -> list[Stage]:
    """Return the stages with the identity of every unit, and the settings that trainings read.

    Raises:
        ValueError: stages that cannot be ordered, or a stage that reads an unknown key.

    """
    composed: dict[str, Stage] = {}
    names = {stage.name for stage in stages}
    for stage in in_order(stages):
        reads = stage.reads
        if reads is None:
            reads = reads_by_default(settings, stage.name, names)
        shared = {
            "experiment": experiment.name,
            "version": experiment.version,
            **_without_length(values_of(settings, reads, stage.name), stage),
        }
        hashed = fingerprint(shared)
        needed = {need: stage_fingerprint(composed[need]) for need in stage.needs}
        budgets = {need: [u.budget for u in composed[need].units] for need in stage.needs}
        extents = {need: _extents(composed[need]) for need in stage.needs}
        units = []
        for unit in stage.units or (Unit(stage.name),):
            needs = needed if unit.needs is None else {need: needed[need] for need in unit.needs}
            literals = {**unit.literals, **({"budgets": budgets} if stage.always_rerun else {})}
            found = {name: each for need in needs for name, each in extents[need].items()}
            identity = Identity(shared, hashed, literals, needs)
            units.append(replace(unit, identity=identity, extents=found))
        training = stage.training
        if training is not None:
            training = replace(training, settings_view=view(settings, reads, stage.name))
        composed[stage.name] = replace(stage, units=units, reads=reads, training=training)
    return [composed[stage.name] for stage in stages]


def _without_length(values: dict[str, Any], stage: Stage) -> dict[str, Any]:
    """Return a training's settings without its length if that is the budget of its unit."""
    training = stage.training
    if training is None or any(
        u.budget_key != training.length_key(stage.name) for u in stage.units
    ):
        return values
    own = dict(values.get(stage.name, {}))
    rest = {k: v for k, v in own.get("training", {}).items() if k not in LENGTH_KEYS}
    own["training"] = {**rest, "length": training.settings.training.length_in}
    return {**values, stage.name: own}


def _extents(stage: Stage) -> dict[str, Sequence[int]]:
    """Return the budgets of a stage and of those that it needs; not of units that cannot grow."""
    found = {name: budgets for unit in stage.units for name, budgets in unit.extents.items()}
    own = [unit.budget for unit in stage.units]
    return {**found, stage.name: own} if any(budget != 1 for budget in own) else found


def stage_fingerprint(stage: Stage) -> str:
    """Return the hash of the identities of all units of a stage."""
    prints = [unit.fingerprint for unit in stage.units]
    return prints[0] if len(prints) == 1 else fingerprint(prints)


def canonical_json(value: Any) -> str:
    """Return ``value`` as JSON with sorted keys and no spaces, the same on every machine.

    Raises:
        TypeError: a value has no stable form (a path, a callable, a set, an array).

    """
    _check(value, "identity")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(value: Any) -> str:
    """Return the first 128 bits of the SHA-256 of ``canonical_json(value)``, in hexadecimal."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def differences(
    stored: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return the dotted keys in which two identities differ, each with (stored, asked)."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*stored, *asked}):
        name = f"{prefix}.{key}" if prefix else key
        left, right = stored.get(key), asked.get(key)
        if isinstance(left, Mapping) and isinstance(right, Mapping):
            found |= differences(left, right, name)
        elif key not in stored or key not in asked or canonical_json(left) != canonical_json(right):
            found[name] = (left, right)
    return found


def _check(value: Any, where: str) -> None:
    if value is None or isinstance(value, str | bool | int | float):
        return
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is not a string")
            _check(item, f"{where}.{key}")
        return
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
        return
    raise TypeError(f"{where}: a {type(value).__name__} has no stable form; give plain values")
