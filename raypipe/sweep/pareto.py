"""Pareto front of speed, peak memory and energy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any

import numpy as np

from raypipe.storage.ledger import Row


def front(rows: Iterable[Row]) -> list[Row]:
    """The trials that no other one dominates, in the given order; equal ones are all kept.

    One dominates another that is nowhere better: more ``samples_per_s``, less peak memory and,
    where every trial has it, less ``energy_j_per_sample``. Succeeded points with
    ``samples_per_s`` count; a peak that is not known is above every other.
    """
    counted = [
        row
        for row in rows
        if row["status"] == "succeeded"
        and not row.get("reference")
        and figure(row.get("samples_per_s")) is not None
    ]
    costs = np.array(
        [
            (
                -row["samples_per_s"],
                peak_bytes(row) or math.inf,
                figure(row.get("energy_j_per_sample")),
            )
            for row in counted
        ],
        dtype=np.float64,  # None becomes NaN
    ).reshape(-1, 3)
    if np.isnan(costs[:, 2]).any():
        costs = costs[:, :2]
    return [row for row, cost in zip(counted, costs, strict=True) if not _dominated(cost, costs)]


def peak_bytes(row: Row) -> int | None:
    """A trial's peak memory: its GPU's, on a CPU the host's; None where it is not known."""
    peak = figure(row.get("host_peak_bytes" if row.get("device") == "cpu" else "gpu_peak_bytes"))
    return int(peak) if peak is not None and peak > 0 else None


def figure(value: Any) -> float | None:
    """A finite number; None for all else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)


def _dominated(cost: np.ndarray[Any, Any], costs: np.ndarray[Any, Any]) -> bool:
    return bool(((costs <= cost).all(axis=1) & (costs < cost).any(axis=1)).any())
