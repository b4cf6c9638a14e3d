"""Durations of stages, remembered across runs for each type of machine, and estimates from them.

A stage's time is assumed to be proportional to its **work**: samples of a training, budgets of
other units. The rate holds for the same stage with the same settings, apart from those that only
say how much there is to do. The rate at other values of a stage's **features**, such as the
effective batch, is predicted from measurements that differ in them (:func:`predict`). Something new
has no estimate: ``None`` instead of a guess.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # loads scipy.stats on first use

from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import fingerprint
from raypipe.hardware import Hardware
from raypipe.store.cache import Cache

#: settings that change how much work there is, or which of several equal works it is
_AMOUNTS = frozenset({"steps", "epochs", "seed", "runs", "evaluations", "iterations"})
#: measured runs of a stage that are kept, and those with different features
_MOST, _MOST_FEATURES = 20, 60
_CONFIDENCE = 0.8
#: a prediction needs as many measurements more than varied features
_SPARE = 3
#: a feature may lie outside the measured range by this factor
_BEYOND = 2.0
#: a prediction whose interval is wider than this factor each way is not an estimate
_WIDEST = 10.0
_ROUNDING = 1e-9


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
        measured = {**row, "work": amount}
        key, similar = self._key(stage), self._similar(stage)
        with Cache("durations") as cache:
            stored = cache.get({key, similar})
            runs = [*_runs(stored, key), measured][-_MOST:]
            cache.put({key: {"runs": runs}})
            if stage.features:
                features = dict(stage.features)
                others = [run for run in _runs(stored, similar) if run["features"] != features]
                runs = [*others, {**measured, "features": features}][-_MOST_FEATURES:]
                cache.put({similar: {"runs": runs}})

    def estimates(self, stages: Iterable[tuple[Stage, Sequence[Unit]]]) -> list[Estimate | None]:
        """Return the expected time of each stage for the given units; None where unknown.

        Measurements with the same settings come first, then those with other features.
        """
        asked = [(stage, work(stage, units)) for stage, units in stages]
        keys = [(self._key(stage), self._similar(stage)) for stage, _ in asked]
        with Cache("durations") as cache:
            stored = cache.get({key for pair in keys for key in pair})
        found = []
        for (stage, amount), (key, similar) in zip(asked, keys, strict=True):
            known = estimate(_runs(stored, key), amount)
            if known is None and stage.features:
                known = predict(_runs(stored, similar), stage.features, amount)
            found.append(known)
        return found

    def _key(self, stage: Stage) -> str:
        settings = without_amounts(_shared(stage))
        return fingerprint([self._machine, stage.name, settings, dict(stage.features)])

    def _similar(self, stage: Stage) -> str:
        """Return the key of the stage with any values of its features."""
        settings = without_amounts(_without(_shared(stage), stage.featured))
        return fingerprint([self._machine, stage.name, settings, sorted(stage.features)])


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


def predict(
    runs: Sequence[Mapping[str, Any]], features: Mapping[str, float], amount: float
) -> Estimate | None:
    """Return the expected time of an amount of work from runs with other features, one run each.

    The logarithm of the rate is a linear function of the logarithms of the features, fitted by
    least squares. The interval is the prediction interval of the next run (Draper & Smith, Applied
    Regression Analysis, 3rd ed. 1998).

    Args:
        runs: measured runs, each with all ``features``.
        features: the features of the asked stage.
        amount: its work.

    Returns:
        None if there are fewer than 3 more runs than varied features, if the runs do not separate
        the features, if a feature is below half its smallest or above twice its largest measured
        value or differs from its only one, or if the interval exceeds a factor of 10 each way.

    """
    names = sorted(features)
    if not runs:
        return None
    measured = np.log([[run["features"][name] for name in names] for run in runs])
    asked = np.log([features[name] for name in names])
    least, most = measured.min(axis=0), measured.max(axis=0)
    varied = most - least > _ROUNDING
    beyond = np.where(varied, math.log(_BEYOND), 0.0) + _ROUNDING
    count, spare = len(runs), len(runs) - int(varied.sum())
    if spare < _SPARE or (asked < least - beyond).any() or (asked > most + beyond).any():
        return None
    center = measured.mean(axis=0)
    design = np.column_stack([np.ones(count), (measured - center)[:, varied]])
    if np.linalg.matrix_rank(design) < design.shape[1]:
        return None
    point = np.concatenate([[1.0], (asked - center)[varied]])
    logs = np.log([run["seconds"] / run["work"] for run in runs])
    inverse = np.linalg.pinv(design)
    coefficients = inverse @ logs
    residuals = logs - design @ coefficients
    freedom = spare - 1
    variance = float(residuals @ residuals) / freedom
    leverage = float(np.sum((point @ inverse) ** 2))
    quantile = float(scipy.stats.t.ppf((1 + _CONFIDENCE) / 2, freedom))
    width = quantile * math.sqrt(variance * (1 + leverage))
    if width > math.log(_WIDEST):
        return None
    seconds, factor = amount * math.exp(float(point @ coefficients)), math.exp(width)
    total = sum(run["seconds"] for run in runs)
    shares = (seconds * sum(run[name] for run in runs) / total for name in ("cpu_s", "gpu_s"))
    return Estimate(seconds, seconds / factor, seconds * factor, *shares)


def _runs(stored: Mapping[str, Mapping[str, Any]], key: str) -> list[dict[str, Any]]:
    return list(stored.get(key, {}).get("runs", []))


def _shared(stage: Stage) -> Mapping[str, Any]:
    identity = stage.units[0].identity if stage.units else None
    return {} if identity is None else identity.shared


def _without(values: Mapping[str, Any], keys: Iterable[str], prefix: str = "") -> dict[str, Any]:
    """Return nested settings without these dotted keys."""
    keys = frozenset(keys)
    return {
        name: _without(value, keys, f"{prefix}{name}.") if isinstance(value, Mapping) else value
        for name, value in values.items()
        if f"{prefix}{name}" not in keys
    }


def without_amounts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those that only say how much there is to do."""
    return {
        key: without_amounts(value) if isinstance(value, Mapping) else value
        for key, value in values.items()
        if key not in _AMOUNTS
    }
