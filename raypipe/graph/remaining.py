"""Remaining time of a whole run, from the expected time of each stage and what running ones report.

It is the larger of two bounds that no schedule can beat: the longest chain of stages, and the time
in which the nodes have as many CPU and GPU seconds as are left (Graham, Bounds on multiprocessing
timing anomalies, 1969). Unlike a simulated schedule, they never fall when work is added.

The interval takes all stages as short or all as long as expected: it is wider than 80 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from raypipe.graph.durations import Estimate
from raypipe.graph.experiment import Stage

#: part of a stage without a stored duration that must be done before its own rate counts
_FEWEST = 0.02


@dataclass(frozen=True)
class Progress:
    """How far a running stage is: ``done`` of ``total`` units, ``first`` of them before ``began``.

    ``began`` is a monotonic clock in seconds. A stage that reports nothing has a total of 0.
    """

    began: float
    total: int = 0
    first: int = 0
    done: int = 0

    @property
    def part(self) -> float:
        """The finished part of what this command has to do, from 0 to 1."""
        left = self.total - self.first
        return min(1.0, max(0.0, (self.done - self.first) / left)) if left > 0 else 0.0


@dataclass(frozen=True)
class Remaining:
    """Seconds that are left, with an interval if all stages have one.

    ``unknown`` counts unfinished stages without an estimate. ``seconds`` is then a lower bound.
    """

    seconds: float
    low: float | None = None
    high: float | None = None
    unknown: int = 0


class Forecast:
    """The remaining time of a graph of stages.

    Args:
        stages: in an order in which each follows what it needs.
        estimates: the expected time of the unfinished units of each stage by key; None if unknown.
        cpus: the CPUs of all nodes.
        gpus: the GPUs of all nodes.

    """

    def __init__(
        self,
        stages: Sequence[Stage],
        estimates: Mapping[str, Estimate | None],
        cpus: float,
        gpus: float = 0.0,
    ) -> None:
        self._estimates, self._capacity = estimates, (cpus, gpus)
        # by stage: the part of it that can start only after each stage that it needs
        self._parts = {stage.key: _parts(stage) for stage in stages}

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self._parts)

    def of_stage(self, key: str, progress: Progress | None, now: float) -> Estimate | None:
        """Return what is left of an unfinished stage; None if unknown."""
        return left(self._estimates.get(key), progress, now)

    def of_run(
        self, running: Mapping[str, Progress], ended: Collection[str], now: float
    ) -> Remaining:
        """Return what is left of the run at the time ``now`` of the monotonic clock."""
        known: dict[str, Estimate] = {}
        unknown = 0
        for key in self._parts.keys() - set(ended):
            if (estimate := self.of_stage(key, running.get(key), now)) is not None:
                known[key] = estimate
            else:
                unknown += 1
        if unknown:
            return Remaining(self._bound(known, _shortest), unknown=unknown)
        seconds = self._bound(known, _expected)
        if any(e.low is None or e.high is None or e.high == math.inf for e in known.values()):
            return Remaining(seconds)
        return Remaining(seconds, self._bound(known, _shortest), self._bound(known, _longest))

    def _bound(self, known: Mapping[str, Estimate], share: Callable[[Estimate], float]) -> float:
        """Return the larger bound, with a multiple of the expected time of each stage."""
        ends: dict[str, float] = {}
        cpu_s = gpu_s = 0.0
        for key, parts in self._parts.items():
            own = 0.0
            if (estimate := known.get(key)) is not None:
                factor = share(estimate)
                own = factor * estimate.seconds
                cpu_s += factor * estimate.cpu_s
                gpu_s += factor * estimate.gpu_s
            after = (ends.get(need, 0.0) + part * own for need, part in parts.items())
            ends[key] = max(own, *after) if parts else own
        work = [
            amount / capacity
            for amount, capacity in zip((cpu_s, gpu_s), self._capacity, strict=True)
            if capacity
        ]
        return max([0.0, *ends.values(), *work])


def left(stored: Estimate | None, progress: Progress | None, now: float) -> Estimate | None:
    """Return what is left of a stage, from its stored estimate and its own rate; None if unknown.

    The more of the stage is done, the more its own rate counts. A stage without a stored estimate
    uses an unknown number of CPUs, which are left out.
    """
    if progress is None:
        return stored
    elapsed, part = max(0.0, now - progress.began), progress.part
    own = elapsed * (1 - part) / part if part > 0 else None
    if stored is None:
        return None if own is None or part < _FEWEST else Estimate(own, None, None, 0.0, 0.0)
    if own is None:
        seconds = max(0.0, stored.seconds - elapsed)
    else:
        seconds = (1 - part) * (1 - part) * stored.seconds + part * own
    ratio = _ratio(seconds, stored.seconds)
    low, high = (None if end is None else ratio * end for end in (stored.low, stored.high))
    return Estimate(seconds, low, high, ratio * stored.cpu_s, ratio * stored.gpu_s)


def _parts(stage: Stage) -> dict[str, float]:
    """Return the part of a stage's work that has to follow each stage that it needs."""
    total = sum(unit.budget for unit in stage.units)
    if not total or all(unit.needs is None for unit in stage.units):
        return dict.fromkeys(stage.needed_keys, 1.0)
    parts = dict.fromkeys(stage.needed_keys, 0.0)
    for unit in stage.units:
        for key in stage.needed_by(unit):
            parts[key] += unit.budget / total
    return parts


def _expected(estimate: Estimate) -> float:
    del estimate
    return 1.0


def _shortest(estimate: Estimate) -> float:
    return 1.0 if estimate.low is None else _ratio(estimate.low, estimate.seconds)


def _longest(estimate: Estimate) -> float:
    return 1.0 if estimate.high is None else _ratio(estimate.high, estimate.seconds)


def _ratio(part: float | None, whole: float) -> float:
    return (part or 0.0) / whole if whole > 0 else 0.0
