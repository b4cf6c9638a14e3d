"""What the units do; their processes import nothing else of the benchmark."""

from __future__ import annotations

import os
import time
from typing import Literal

Kind = Literal["noop", "sleep", "spin"]


def unit(kind: Kind, seconds: float, number: int) -> tuple[float, int]:
    """Do nothing, sleep, or spin until this process has used so many seconds of CPU time.

    Returns a value, and the process that started this one: each node, also a simulated one, has a
    raylet, which starts its workers.
    """
    if kind == "sleep":
        time.sleep(seconds)
    elif kind == "spin":
        begin = time.process_time()
        while time.process_time() - begin < seconds:
            pass
    return float(number % 97), os.getppid()
