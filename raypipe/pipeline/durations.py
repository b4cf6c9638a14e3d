"""Durations of stages, remembered across runs for each type of machine, and estimates from them.

A stage's time is assumed to be proportional to its **work**: samples of a training, budgets of
other units. The rate holds for the same stage with the same settings, apart from those that only
say how much there is to do. Something new has no estimate: ``None`` instead of a guess.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import scipy  # loads scipy.stats on first use

from raypipe.hardware import Hardware
from raypipe.pipeline.experiment import Stage, Unit
from raypipe.pipeline.identity import fingerprint
from raypipe.storage.cache import Cache

#: settings that change how much work there is, or which of several equal works it is
_AMOUNTS = frozenset({"steps", "epochs", "seed", "runs", "evaluations", "iterations"})
#: measured runs of a stage that are kept
_MOST = 20
_CONFIDENCE = 0.8


@dataclass(frozen=True)
class Estimate:
    """Expected seconds of a stage; the 80 % interval is missing after a single measurement.

    ``cpu_s`` and ``gpu_s`` are the expected seconds of reserved CPUs and GPUs.
    """

    seconds: float
    low: float | None
    high: float | None
    cpu_s: float
    gpu_s: float


class Durations:
    """Measured durations in the user's cache; several processes may use them at once."""

    def __init__(self, nodes: Sequence[Hardware]) -> None:
        kinds = sorted([node.cpus, *(gpu.name for gpu in node.gpus)] for node in nodes)
        self._machine = fingerprint(kinds)

    def remember(self, stage: Stage, units: Sequence[Unit], row: Mapping[str, float]) -> None:
        """Record ``seconds``, ``cpu_s`` and ``gpu_s`` that these units of a stage took."""
        amount = work(stage, units)
        if not units or amount <= 0 or row["seconds"] <= 0:
            return
        with Cache("durations") as cache:
            key = self._key(stage)
            stored = cache.get([key]).get(key, {}).get("runs", [])
            cache.put({key: {"runs": [*stored, {**row, "work": amount}][-_MOST:]}})

    def estimates(self, stages: Iterable[tuple[Stage, Sequence[Unit]]]) -> list[Estimate | None]:
        """Return the expected time of each stage for the given units; None where unknown."""
        asked = [(self._key(stage), work(stage, units)) for stage, units in stages]
        with Cache("durations") as cache:
            stored = cache.get({key for key, _ in asked})
        return [estimate(stored.get(key, {}).get("runs", []), amount) for key, amount in asked]

    def _key(self, stage: Stage) -> str:
        identity = stage.units[0].identity if stage.units else None
        shared = without_amounts(identity.shared) if identity is not None else {}
        return fingerprint([self._machine, stage.name, shared])


def work(stage: Stage, units: Sequence[Unit]) -> float:
    """Return the size of units: samples or epochs of a training, otherwise their budgets."""
    if stage.training is None:
        return float(sum(unit.budget for unit in units))
    training = stage.training.settings.training
    if training.steps:
        return float(len(units) * training.steps * (training.effective_batch or 1))
    return float(len(units) * (training.epochs or 1))


def estimate(runs: Sequence[Mapping[str, float]], amount: float) -> Estimate | None:
    """Return the expected time of an amount of work from measured runs; None without any.

    The logarithms of the rates are taken as normal: the interval is that of the next run.
    """
    if amount <= 0:
        return Estimate(0.0, 0.0, 0.0, 0.0, 0.0)
    if not runs:
        return None
    logs = [math.log(run["seconds"] / run["work"]) for run in runs]
    seconds = amount * math.exp(statistics.fmean(logs))
    low = high = None
    if (count := len(logs)) > 1:
        quantile = float(scipy.stats.t.ppf((1 + _CONFIDENCE) / 2, count - 1))
        factor = math.exp(quantile * statistics.stdev(logs) * math.sqrt(1 + 1 / count))
        low, high = seconds / factor, seconds * factor
    total = sum(run["work"] for run in runs)
    shares = (amount * sum(run[name] for run in runs) / total for name in ("cpu_s", "gpu_s"))
    return Estimate(seconds, low, high, *shares)


def without_amounts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that only say how much there is to do."""
    return {
        key: without_amounts(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in _AMOUNTS
    }
