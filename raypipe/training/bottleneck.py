"""Bottleneck analysis of training: data loader, computation or gradient exchange.

``loader: auto`` measures the bottleneck before the run with the run's own forward and backward
passes, discards their gradients, and chooses the fewest loader processes that keep up.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from raypipe.training import parallel
from raypipe.training.job import Worker

#: runs forward and backward of a micro-batch and waits for the device; the flag: whether the
#: workers exchange gradients
Pass = Callable[[Any, bool], None]
#: yields real micro-batches, loaded by the given number of processes
Load = Callable[[int], Generator[Any, None, None]]

_WARM_UP, _MEASURED = 3, 8
#: relative slowdown over computation alone up to which a loader keeps up
_TOLERANCE = 0.05
#: shares of the step time from which the loader, or the gradient exchange, is the bottleneck
_LOADER_BOUND, _COMMUNICATION_BOUND = 0.1, 0.2


@dataclass(frozen=True)
class Diagnosis:
    """Seconds per step by cause, and the chosen number of loader processes.

    ``communication_s`` is None if it is part of ``compute_s``.
    """

    loader_workers: int
    compute_s: float
    communication_s: float | None
    loader_s: float

    @property
    def bound(self) -> Literal["loader", "communication", "compute"]:
        """Bottleneck of a step."""
        communication_s = self.communication_s or 0.0
        whole = self.compute_s + communication_s + self.loader_s
        if self.loader_s >= _LOADER_BOUND * whole:
            return "loader"
        if communication_s >= _COMMUNICATION_BOUND * whole:
            return "communication"
        return "compute"

    def __str__(self) -> str:
        work = "computing and communication"
        if self.communication_s is not None:
            work = f"computing, {1e3 * self.communication_s:.3g} ms of communication"
        return (
            f"{self.bound}-bound with {self.loader_workers} loader processes: a step takes "
            f"{1e3 * self.compute_s:.3g} ms of {work}, {1e3 * self.loader_s:.3g} ms of waiting for "
            "data"
        )


def candidates(cores: int, workers_on_node: int) -> list[int]:
    """Return the numbers of loader processes to try: 0 and powers of two up to 8.

    They are limited to the cores per worker, but include 1 in any case.
    """
    most = max(1, cores // workers_on_node)
    return [0, *(2**n for n in range(4) if 2**n <= most)]


def needed(numbers: Sequence[int], prefetch: int) -> int:
    """Return the number of micro-batches per worker that ``diagnose`` needs."""
    return max(numbers) * prefetch + _WARM_UP + _MEASURED


def diagnose(
    load: Load,
    run: Pass,
    numbers: Sequence[int],
    prefetch: int,
    accumulation: int,
    worker: Worker,
    *,
    sharded: bool = False,
) -> Diagnosis:
    """Measure a repeated batch with and without gradient exchange, and then real batches.

    Every worker must call this; all of them use the times of the slowest worker. ``numbers`` are
    the numbers of loader processes to try, in rising order. The first that keeps up is chosen,
    otherwise the fastest. The times are for ``accumulation`` micro-batches per step. A ``sharded``
    model exchanges in every pass: without, each worker would keep the whole gradient.
    """

    def seconds(batches: Iterable[Any], exchange: bool) -> float:
        """Return the seconds per micro-batch after the warm-up, on the slowest worker."""
        marks = []
        for batch in batches:
            run(batch, exchange)
            marks.append(time.perf_counter())
        mean = (marks[-1] - marks[_WARM_UP - 1]) / _MEASURED
        slowest: float = max(parallel.gather(mean, worker.workers))
        return slowest

    with closing(load(0)) as loaded:
        same = [next(loaded)] * (_WARM_UP + _MEASURED)
    exchanged = computed = seconds(same, True)
    if worker.workers > 1 and not sharded:
        computed = min(exchanged, seconds(same, False))
    real: dict[int, float] = {}
    for number in numbers:
        with closing(load(number)) as loaded:
            # skip batches prefetched during startup: they do not reflect the loader's speed
            deque(islice(loaded, number * prefetch), maxlen=0)
            real[number] = seconds(islice(loaded, _WARM_UP + _MEASURED), True)
        if real[number] <= (1 + _TOLERANCE) * exchanged:
            break
    best = min(real, key=real.__getitem__)
    return Diagnosis(
        loader_workers=best,
        compute_s=computed * accumulation,
        communication_s=None if sharded else exchanged - computed,
        loader_s=max(0.0, real[best] - exchanged) * accumulation,
    )
