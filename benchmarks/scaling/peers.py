"""The same calls as bare Ray tasks, or by joblib, which store nothing.

python -m benchmarks.scaling.peers ray|joblib FUNCTION NUMBER
"""

from __future__ import annotations

import logging
import sys

from benchmarks.scaling import functions


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


if __name__ == "__main__":
    peer, called, count = sys.argv[1:]
    print({"ray": by_ray, "joblib": by_joblib}[peer](called, int(count)))
