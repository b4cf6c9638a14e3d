"""Expected time of stages: the median of the measured rates, times the work that is left.

The **work** of a stage is the samples of a training, or the budgets of other units. Its rate holds
for the same settings on the same type of machine, apart from settings that only say how much there
is to do. Something new has no estimate: ``None`` instead of a guess. A running stage has its own
rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import fingerprint
from raypipe.hardware import Hardware
from raypipe.store.cache import Cache

#: settings that change how much work there is, or which of several equal works it is
_AMOUNTS = frozenset({"steps", "epochs", "seed", "runs", "evaluations", "iterations"})
#: measured runs of a stage that are kept
_MOST = 20
#: part of a stage that must be done before its own rate counts
_FEWEST = 0.02


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of a stage, and those of the CPUs and GPUs that it reserves."""

    seconds: float
    cpu_s: float = 0.0
    gpu_s: float = 0.0

    def times(self, factor: float) -> Estimate:
        """Return the estimate of ``factor`` times as much work."""
        return Estimate(factor * self.seconds, factor * self.cpu_s, factor * self.gpu_s)


class Durations:
    """Measured rates in the user's cache; several processes may use them at once."""

    def __init__(self, nodes: Sequence[Hardware]) -> None:
        kinds = sorted([node.cpus, *(gpu.name for gpu in node.gpus)] for node in nodes)
        self._machine = fingerprint(kinds)

    def remember(self, stage: Stage, units: Sequence[Unit], took: Estimate) -> None:
        """Record what these units of a stage took."""
        amount, key = _work(stage, units), self._key(stage)
        if amount <= 0 or took.seconds <= 0:
            return
        rate = took.times(1 / amount)
        with Cache("durations") as cache:
            rates = cache.get([key]).get(key, {}).get("rates", [])
            rates = [*rates, [rate.seconds, rate.cpu_s, rate.gpu_s]][-_MOST:]
            cache.put({key: {"rates": rates}})

    def estimates(self, stages: Iterable[tuple[Stage, Sequence[Unit]]]) -> list[Estimate | None]:
        """Return the expected time of each stage for the given units; None where unknown."""
        asked = [(self._key(stage), _work(stage, units)) for stage, units in stages]
        with Cache("durations") as cache:
            stored = cache.get({key for key, _ in asked})
        return [_estimate(stored.get(key, {}), amount) for key, amount in asked]

    def _key(self, stage: Stage) -> str:
        identity = stage.units[0].identity if stage.units else None
        shared = {} if identity is None else identity.shared
        return fingerprint([self._machine, stage.name, _without_amounts(shared)])


def left(estimate: Estimate | None, elapsed: float, part: float) -> Estimate | None:
    """Return what is left of a stage after some seconds, of which a part is done; None if unknown.

    Once enough of it is done, its own rate counts.
    """
    if part >= _FEWEST:
        seconds = elapsed * (1 - part) / part
        if estimate is None or estimate.seconds <= 0:
            return Estimate(seconds)
        return estimate.times(seconds / estimate.seconds)
    if estimate is None or estimate.seconds <= 0:
        return estimate
    return estimate.times(max(0.0, 1 - elapsed / estimate.seconds))


def remaining(
    stages: Sequence[Stage], left: Mapping[str, Estimate | None], cpus: float, gpus: float
) -> float | None:
    """Return the seconds until stages have ended; None if the rest of one is unknown.

    It is the larger of two bounds that no schedule can beat: the longest chain of stages, and the
    time in which the nodes have as many CPU and GPU seconds as are left (Graham, Bounds on
    multiprocessing timing anomalies, 1969).

    Args:
        stages: in an order in which each follows what it needs.
        left: what is left of each unfinished stage by key.
        cpus: the CPUs of all nodes.
        gpus: the GPUs of all nodes.

    """
    known = [each for each in left.values() if each is not None]
    if len(known) < len(left):
        return None
    ends: dict[str, float] = {}
    for stage in stages:
        own = left.get(stage.key)
        start = min(max(map(ends.__getitem__, needs), default=0.0) for needs in stage.starts)
        start += own.seconds if own is not None else 0.0
        ends[stage.key] = max([start, *map(ends.__getitem__, stage.needed_keys)])
    on_cpus = sum(each.cpu_s for each in known) / cpus if cpus else 0.0
    on_gpus = sum(each.gpu_s for each in known) / gpus if gpus else 0.0
    return max([on_cpus, on_gpus, *ends.values()])


def _work(stage: Stage, units: Sequence[Unit]) -> float:
    """Return the size of units: samples or epochs of a training, otherwise their budgets."""
    if stage.training is None:
        return float(sum(unit.budget for unit in units))
    training = stage.training.settings.training
    if training.steps:
        return float(len(units) * training.steps * (training.effective_batch or 1))
    return float(len(units) * (training.epochs or 1))


def _estimate(stored: Mapping[str, Any], amount: float) -> Estimate | None:
    if amount <= 0:
        return Estimate(0.0)
    rates = stored.get("rates")
    if not rates:
        return None
    return Estimate(*map(median, zip(*rates, strict=True))).times(amount)


def _without_amounts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that only say how much there is to do."""
    return {
        key: _without_amounts(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in _AMOUNTS
    }
