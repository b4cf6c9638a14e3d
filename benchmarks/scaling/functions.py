"""Functions whose calls are counted: they do nothing, or use a CPU for a time."""

from __future__ import annotations

import time


def empty(number: int) -> int:
    """Return the argument."""
    return number


def busy_1ms(number: int) -> int:
    """Use a CPU for a millisecond."""
    return _busy(number, 1e-3)


def busy_10ms(number: int) -> int:
    """Use a CPU for ten milliseconds."""
    return _busy(number, 1e-2)


def _busy(number: int, seconds: float) -> int:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
    return number
