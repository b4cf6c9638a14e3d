"""Identity of a unit: everything that decides its result, as canonical JSON and its hash.

An identity holds the experiment and its version, the settings that the stage reads, the unit's
literals, and the identities of what it needs. Two units with the same identity compute the same
result. A stage has only the settings that it reads (:class:`SettingsView`). Fields marked
:data:`~raypipe.config.settings.Operational` are not part of the identity.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from raypipe.config.settings import identity_values

if TYPE_CHECKING:
    from raypipe.store.ledger import Row

#: ``json.dumps`` would make one for each of a million identities
_CANONICAL = json.JSONEncoder(sort_keys=True, separators=(",", ":"))
_PLAIN = {str, int, float, bool, type(None)}  # faster to look up than a subclass


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
        # the canonical JSON of a list of the three; there may be a million, most without needs
        parts = canonical_json(self.literals), canonical_json(self.needs) if self.needs else "{}"
        return _digest(f'["{self.shared_fingerprint}",{parts[0]},{parts[1]}]')

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


def canonical_json(value: Any) -> str:
    """Return ``value`` as JSON with sorted keys and no spaces, the same on every machine.

    Raises:
        TypeError: a value has no stable form (a path, a callable, a set, an array).

    """
    _check(value)
    return _CANONICAL.encode(value)


def fingerprint(value: Any) -> str:
    """Return the first 128 bits of the SHA-256 of ``canonical_json(value)``, in hexadecimal."""
    return _digest(canonical_json(value))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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


def _check(value: Any, where: str = "identity") -> None:
    """Reject what has no stable form, and keys that JSON would make the same as their texts."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(f"{where}: the key {key!r} is not a string")
            if type(item) not in _PLAIN:
                _check(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for place, item in enumerate(value):
            if type(item) not in _PLAIN:
                _check(item, f"{where}[{place}]")
    elif not isinstance(value, str | int | float | None):
        kind = type(value).__name__
        raise TypeError(f"{where}: a {kind} has no stable form; give plain values")


class SettingsView:
    """Settings restricted to the keys that a stage declared; picklable, immutable.

    A declared section is the settings object itself; a section of which only some keys are
    declared is another view.

    Args:
        settings: the settings, or a section of them.
        reads: the declared dotted keys.
        stage: the stage.
        path: the beginning of the keys in messages: a section and a dot.

    Raises:
        ValueError: a declared key does not exist.
        AttributeError: later, for a key that the stage did not declare.

    """

    def __init__(self, settings: Any, reads: Collection[str], stage: str, path: str = "") -> None:
        fields = type(settings).model_fields if isinstance(settings, BaseModel) else {}
        values: dict[str, Any] = {"_stage": stage, "_path": path}
        for key in sorted(reads):
            name = key.partition(".")[0]
            if name not in fields:
                raise ValueError(
                    f"stage {stage!r} reads {path + key!r}, which is not a key of the settings"
                )
            values[name] = getattr(settings, name)
            if name not in reads:
                inner = [k.removeprefix(f"{name}.") for k in reads if k.startswith(f"{name}.")]
                values[name] = SettingsView(values[name], inner, stage, f"{path}{name}.")
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pickle and copy look for special methods
            raise AttributeError(name)
        raise AttributeError(
            f"stage {self._stage!r} does not read {self._path}{name}; add it to `reads`, so that "
            "it becomes part of the stage's identity"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"settings are immutable: {self._path}{name}")


def values_of(settings: BaseModel, view: SettingsView) -> dict[str, Any]:
    """Return the plain values of a view that decide a result, as nested sections."""
    values: dict[str, Any] = {}
    for name, value in vars(view).items():
        if isinstance(value, SettingsView):
            values[name] = values_of(getattr(settings, name), value)
        else:
            values |= identity_values(settings, (name,))
    return values
