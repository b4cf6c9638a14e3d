"""Work of a unit; worker processes import nothing else of the benchmark."""

from __future__ import annotations

import os
import time


def unit(seconds: float) -> int:
    """Sleep for the given seconds; return the PID of the parent process.

    Each node, even a simulated one, has a raylet that starts its workers, so the parent identifies
    the node.
    """
    time.sleep(seconds)
    return os.getppid()
