"""A function whose calls take milliseconds, so that thousands of them are sent in chunks."""

from __future__ import annotations

import time


def square(number: int) -> int:
    """Sleep four milliseconds: other rounds need the CPUs, too."""
    time.sleep(0.004)
    return number**2
