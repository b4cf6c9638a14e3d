"""Columns of results tables in one line each."""

from __future__ import annotations

import re
from typing import Any

from raypipe import Column

_DECLARED = re.compile(r"(\w+)(?: (lower|higher))?(?: \[(.+?)\])?: (.*)")


def columns(**declared: str) -> tuple[Column, ...]:
    """Return columns from ``name="type: meaning"``, a real one on ``_s`` in seconds.

    The type may be followed by which values are better, ``lower`` or ``higher``, and by a unit in
    brackets: ``real lower [nats]: meaning``.

    Raises:
        ValueError: a text has another form.

    """
    found = []
    for name, text in declared.items():
        if (match := _DECLARED.fullmatch(text)) is None:
            raise ValueError(f"{name}: expected 'type [better] [unit]: meaning', not {text!r}")
        kind, better, unit, meaning = match.groups("")
        if kind == "real" and name.endswith("_s"):
            unit = "s"
        given: Any = (kind, meaning, unit, better)
        found.append(Column(name, *given))
    return tuple(found)
