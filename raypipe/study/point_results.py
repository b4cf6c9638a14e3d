"""Results of a sweep's points: their trials repeat each other or differ in the seed only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from raypipe.report.measures import REPEATED
from raypipe.stats import finite_or_none
from raypipe.store.ledger import Row
from raypipe.study.pareto import peak_bytes
from raypipe.study.space import point_key, seedless
from raypipe.training.batching import KEYS

#: from the most to the least exact
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class PointResult:
    """Results of the trials of a point; infinite if unknown.

    ``value`` is the mean over the seeds of ``values``, each the median of its measurements, which
    are from ``low`` to ``high``. ``trial`` is the one nearest to it. ``seeds`` includes those that
    did not succeed, ``repeats`` is the number of measurements of a seed.
    """

    settings: dict[str, Any]
    trial: Row
    values: list[float]
    seeds: int
    repeats: int
    value: float
    low: float
    high: float
    peak: float
    energy: float
    parity: float

    @property
    def is_plain(self) -> bool:
        """Whether it computes in fp32 without checkpointing and compilation."""
        return self.trial.get("precision") == "fp32" and not self.extras

    @property
    def extras(self) -> int:
        """The number of settings that a plain training does without."""
        return sum(bool(self.trial.get(key)) for key in ("gradient_checkpointing", "compile"))

    @property
    def coarseness(self) -> int:
        """The place of its precision, the most exact first."""
        precision = self.trial.get("precision")
        return _PRECISIONS.index(precision) if precision in _PRECISIONS else len(_PRECISIONS)

    def recommended_settings(self) -> dict[str, Any]:
        """Return the swept settings except the seed, with all batch sizes if one was swept."""
        keys = {f"{self.trial['trained_stage']}.training.{key}": key for key in KEYS}
        if not keys.keys() & self.settings.keys():
            return self.settings
        sizes = {key: self.trial.get(name) for key, name in keys.items()}
        return self.settings | {key: size for key, size in sizes.items() if size is not None}


def point_results(rows: Sequence[Row], metric: str) -> list[PointResult]:
    """Return the points with a trial that has the metric and whose measurements all succeeded."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(point_key(row.get("point") or {}), []).append(row)
    found = (_result(group, metric) for group in groups.values())
    return [point for point in found if point is not None]


def medians(rows: Iterable[Row]) -> list[Row]:
    """Return one row per trial that was measured again, with the medians of its measurements.

    Its status is that of a measurement that did not succeed, if there is one.
    """
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.get("repeats") or row["trial_id"], []).append(row)
    found = []
    for group in groups.values():
        first = next((row for row in group if not row.get("repeats")), group[0])
        status = next((row["status"] for row in group if row["status"] != "succeeded"), "succeeded")
        measured = {name: _finite(group, name) for name in REPEATED}
        middle = {name: median(values) for name, values in measured.items() if values}
        found.append({**first, **middle, "status": status})
    return found


def _finite(rows: Iterable[Row], column: str) -> list[float]:
    values = (finite_or_none(row.get(column)) for row in rows)
    return [value for value in values if value is not None]


def _result(rows: Sequence[Row], metric: str) -> PointResult | None:
    seeds = medians(rows)
    trials = sorted(
        (
            row
            for row in seeds
            if row["status"] == "succeeded" and finite_or_none(row.get(metric)) is not None
        ),
        key=lambda row: str(row["trial_id"]),
    )
    if not trials:
        return None
    values = [float(row[metric]) for row in trials]
    measured = _finite((row for row in rows if row["status"] == "succeeded"), metric)
    mean = math.fsum(values) / len(values)
    known = _finite(trials, "energy_j_per_sample")
    return PointResult(
        settings=seedless(trials[0].get("point") or {}),
        trial=min(trials, key=lambda row: abs(row[metric] - mean)),
        values=values,
        seeds=len(seeds),
        repeats=len(rows) // len(seeds),
        value=mean,
        low=min(measured),
        high=max(measured),
        peak=max(peak_bytes(row) or math.inf for row in trials),
        energy=math.fsum(known) / len(known) if known else math.inf,
        parity=max(_parity(row) for row in trials),
    )


def _parity(row: Row) -> float:
    """Return the largest parity; 0 without a reference, infinite if a loss was not finite."""
    parity = row.get("parity")
    if parity is None:
        return 0.0
    return math.inf if math.isnan(parity) else float(parity)
