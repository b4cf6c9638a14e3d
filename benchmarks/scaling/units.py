"""Work of a unit; worker processes import nothing else of the benchmark."""

from __future__ import annotations

import os
import time
from typing import Literal

Kind = Literal["noop", "sleep"]


def unit(kind: Kind, seconds: float, number: int) -> tuple[float, int]:
    """Do nothing, or sleep for the given seconds.

    Return a value and the PID of the parent process. Each node, even a simulated one, has a raylet
    that starts its workers, so the parent identifies the node.
    """
    if kind == "sleep":
        time.sleep(seconds)
    return float(number % 97), os.getppid()
