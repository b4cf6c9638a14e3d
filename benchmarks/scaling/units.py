"""Work of a unit; worker processes import nothing else of the benchmark."""

from __future__ import annotations

import os
import time
from typing import Literal

Kind = Literal["noop", "sleep", "spin"]


def unit(kind: Kind, seconds: float, number: int) -> tuple[float, int]:
    """Do nothing, sleep, or spin until this process has used the given seconds of CPU time.

    Return a value and the PID of the parent process. Each node, even a simulated one, has a raylet
    that starts its workers, so the parent identifies the node.
    """
    if kind == "sleep":
        time.sleep(seconds)
    elif kind == "spin":
        begin = time.process_time()
        while time.process_time() - begin < seconds:
            pass
    return float(number % 97), os.getppid()
