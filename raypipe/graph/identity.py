"""Identity of a unit: everything that decides its result, as canonical JSON and its hash.

An identity holds the experiment and its version, the settings that the stage reads, the unit's
literals, and the identities of what it needs. Two units with the same identity compute the same
result. Fields marked :data:`~raypipe.config.settings.Operational` are not part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raypipe.store.ledger import Row


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
