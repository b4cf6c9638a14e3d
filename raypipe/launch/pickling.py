"""Check that a function can be sent to workers, with the name of what prevents it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import cloudpickle


def obstacle(function: Any, used: Mapping[str, Any]) -> str:
    """Return why a function cannot be pickled; empty if it can.

    Args:
        function: the function.
        used: the global and enclosed variables that it uses, by name.

    """
    reason = _reason(function)
    if not reason:
        return ""
    for name, value in used.items():
        if _reason(value):
            return (
                f"it uses the variable {name!r}, a {type(value).__name__}, which cannot be sent to "
                f"workers; create it inside the function ({reason})"
            )
    return f"it cannot be sent to workers ({reason}); move it into a module"


def _reason(value: Any) -> str:
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # objects raise anything when they are pickled
        return f"{type(error).__name__}: {error}"
    return ""
