"""The same work as bare Ray tasks, or by joblib, which store nothing; prints what it returns.

python -m benchmarks.scaling.peers ray|joblib FUNCTION NUMBER
python -m benchmarks.scaling.peers cluster ADDRESS NUMBER SECONDS
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

from benchmarks.scaling import functions
from benchmarks.scaling.units import unit


def by_ray(name: str, number: int) -> int:
    """Submit all calls as tasks of a CPU each; return the sum of their values."""
    import ray  # the start of each peer is measured, too

    ray.init(include_dashboard=False, logging_level=logging.ERROR)
    task = ray.remote(max_retries=0)(getattr(functions, name))
    return sum(ray.get([task.remote(each) for each in range(number)]))


def by_joblib(name: str, number: int) -> int:
    """Run all calls in as many processes as there are CPUs; return the sum of their values."""
    from joblib import Parallel, delayed

    call = delayed(getattr(functions, name))
    return sum(Parallel(n_jobs=-1)(call(each) for each in range(number)))


def on_cluster(address: str, number: int, seconds: float) -> list[float]:
    """Submit all sleeping units to a cluster at once; return the times at which they ended."""
    import ray

    ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    task = ray.remote(unit).options(num_cpus=1, max_retries=0)
    waiting = [task.remote(seconds) for _ in range(number)]
    there: list[float] = []
    while waiting:
        ready, waiting = ray.wait(waiting, num_returns=1)
        ray.get(ready)
        there.append(time.time())
    return there


if __name__ == "__main__":
    peer, about, count, *length = sys.argv[1:]
    run: Any = {"ray": by_ray, "joblib": by_joblib, "cluster": on_cluster}[peer]
    print(json.dumps(run(about, int(count), *map(float, length))))
