"""What decides a result, as canonical JSON and its hash.

An identity holds settings, data fingerprints and seeds, never a path, an address or a time:
two runs with the same identity compute the same thing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any


def canonical_json(value: Any) -> str:
    """``value`` as JSON with sorted keys and no spaces, the same on every machine.

    Raises:
        TypeError: a value has no stable form (a path, a callable, a set, an array).
        ValueError: a float is not finite.

    """
    _check(value, "identity")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(value: Any) -> str:
    """The first 128 bits of the SHA-256 of ``canonical_json(value)``, in hexadecimal."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def differences(
    stored: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The dotted keys in which two identities differ, each with (stored, asked)."""
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
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where}: {value} is not finite and has no stable form")
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
