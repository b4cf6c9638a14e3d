"""What the units do; their processes import nothing else of the benchmark."""

from __future__ import annotations

import time
from typing import Literal

Kind = Literal["noop", "sleep", "spin"]


def unit(kind: Kind, seconds: float, number: int) -> float:
    """Do nothing, sleep, or spin until this process has used so many seconds of CPU time."""
    if kind == "sleep":
        time.sleep(seconds)
    elif kind == "spin":
        begin = time.process_time()
        while time.process_time() - begin < seconds:
            pass
    return float(number % 97)
