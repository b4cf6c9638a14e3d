"""Run units as bare Ray tasks on a cluster, unrecorded; print the finish times as JSON.

python -m benchmarks.scaling.bare ADDRESS UNITS SECONDS
"""

from __future__ import annotations

import json
import logging
import sys
import time

import ray

from benchmarks.scaling.units import unit


def main(address: str, units: int, seconds: float) -> None:
    """Submit all tasks to Ray at once."""
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    task = ray.remote(unit).options(num_cpus=1, max_retries=0)
    waiting = [task.remote("sleep", seconds, number) for number in range(units)]
    there: list[float] = []
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        ray.get(ready)
        there.append(time.time())
    print(json.dumps(there))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
