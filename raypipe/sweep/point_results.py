"""Results of a sweep's points: the trials of a point differ in the seed only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.stats import finite_or_none
from raypipe.storage.ledger import Row
from raypipe.sweep.pareto import peak_bytes
from raypipe.sweep.space import point_key, seedless
from raypipe.training.batching import KEYS

#: from the most to the least exact
_PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")


@dataclass(frozen=True)
class PointResult:
    """Results of the trials of a point; infinite if unknown.

    ``trial`` is the one nearest to the mean ``value``; ``seeds`` includes those that did not
    succeed.
    """

    key: str
    settings: dict[str, Any]
    trial: Row
    values: list[float]
    seeds: int
    value: float
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
    """Return the points with a succeeded trial that has the metric."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(point_key(row.get("point") or {}), []).append(row)
    found = (_result(key, group, metric) for key, group in groups.items())
    return [point for point in found if point is not None]


def _result(key: str, rows: Sequence[Row], metric: str) -> PointResult | None:
    trials = sorted(
        (
            row
            for row in rows
            if row["status"] == "succeeded" and finite_or_none(row.get(metric)) is not None
        ),
        key=lambda row: str(row["trial_id"]),
    )
    if not trials:
        return None
    values = [float(row[metric]) for row in trials]
    mean = math.fsum(values) / len(values)
    energies = [finite_or_none(row.get("energy_j_per_sample")) for row in trials]
    known = [energy for energy in energies if energy is not None]
    return PointResult(
        key=key,
        settings=seedless(trials[0].get("point") or {}),
        trial=min(trials, key=lambda row: abs(row[metric] - mean)),
        values=values,
        seeds=len(rows),
        value=mean,
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
