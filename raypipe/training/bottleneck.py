"""Bottleneck of a training's speed: the loader, the computation or the gradient exchange.

``loader: auto`` measures it before the run, with the run's own forward and backward passes whose
gradients are thrown away, and takes the fewest loader processes that keep up.
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

#: forward and backward of one micro-batch; whether the workers exchange gradients; waits for it
Pass = Callable[[Any, bool], None]
#: real micro-batches, loaded by so many processes
Load = Callable[[int], Generator[Any, None, None]]

_WARM_UP, _MEASURED = 3, 8
#: a loader this much slower than computing alone keeps up
_TOLERANCE = 0.05
#: shares of a step from which the loader, or the exchange, is what to work on
_LOADER_BOUND, _COMMUNICATION_BOUND = 0.1, 0.2


@dataclass(frozen=True)
class Diagnosis:
    """Seconds of a step by what they go to, with the number of loader processes chosen."""

    loader_workers: int
    compute_s: float
    communication_s: float
    loader_s: float

    @property
    def bound(self) -> Literal["loader", "communication", "compute"]:
        """What a step waits for."""
        whole = self.compute_s + self.communication_s + self.loader_s
        if self.loader_s >= _LOADER_BOUND * whole:
            return "loader"
        if self.communication_s >= _COMMUNICATION_BOUND * whole:
            return "communication"
        return "compute"

    def __str__(self) -> str:
        return (
            f"{self.bound}-bound with {self.loader_workers} loader processes: a step takes "
            f"{1e3 * self.compute_s:.3g} ms of computing, {1e3 * self.communication_s:.3g} ms of "
            f"communication, {1e3 * self.loader_s:.3g} ms of waiting for data"
        )


def candidates(cores: int, workers_on_node: int) -> list[int]:
    """The numbers of loader processes to try: 0 and the powers of two that there are cores for."""
    most = max(1, cores // workers_on_node)
    return [0, *(2**n for n in range(4) if 2**n <= most)]


def needed(numbers: Sequence[int], prefetch: int) -> int:
    """How many micro-batches of the run each worker has to have for ``diagnose``."""
    return max(numbers) * prefetch + _WARM_UP + _MEASURED


def diagnose(
    load: Load, run: Pass, numbers: Sequence[int], prefetch: int, accumulation: int, worker: Worker
) -> Diagnosis:
    """Measure with one batch again and again, without exchange, and with real batches.

    Every worker calls this, and they agree on the slowest one's times. ``numbers`` are the
    numbers of loader processes to try, in rising order; the first that keeps up is taken, else
    the fastest. It is for ``accumulation`` micro-batches a step.
    """

    def seconds(batches: Iterable[Any], exchange: bool) -> float:
        """Of a micro-batch, after the first ones, on the slowest worker."""
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
    if worker.workers > 1:
        computed = min(exchanged, seconds(same, False))
        run(same[0], True)  # FSDP keeps what was not exchanged until the next exchange
    real: dict[int, float] = {}
    for number in numbers:
        with closing(load(number)) as loaded:
            # what was loaded ahead while the processes started is no measure of their speed
            deque(islice(loaded, number * prefetch), maxlen=0)
            real[number] = seconds(islice(loaded, _WARM_UP + _MEASURED), True)
        if real[number] <= (1 + _TOLERANCE) * exchanged:
            break
    best = min(real, key=real.__getitem__)
    return Diagnosis(
        loader_workers=best,
        compute_s=computed * accumulation,
        communication_s=exchanged - computed,
        loader_s=max(0.0, real[best] - exchanged) * accumulation,
    )
