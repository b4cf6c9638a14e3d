"""Pareto front of a sweep's trials: speed, peak memory and energy."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from raypipe.stats import finite_or_none, on_pareto_front
from raypipe.storage.ledger import Row


def front(rows: Iterable[Row]) -> list[Row]:
    """Return the trials that no other one dominates, in the given order; equal ones are all kept.

    The objectives are more ``samples_per_s``, less peak memory and, if every trial has it, less
    ``energy_j_per_sample``. Only points that succeeded with a finite ``samples_per_s`` count; an
    unknown peak is larger than any other.
    """
    measured = [
        row
        for row in rows
        if row["status"] == "succeeded"
        and not row.get("reference")
        and finite_or_none(row.get("samples_per_s")) is not None
    ]
    costs = np.array(
        [
            (
                -row["samples_per_s"],
                peak_bytes(row) or math.inf,
                finite_or_none(row.get("energy_j_per_sample")),
            )
            for row in measured
        ],
        dtype=np.float64,  # None becomes NaN
    ).reshape(-1, 3)
    if np.isnan(costs[:, 2]).any():
        costs = costs[:, :2]
    return [row for row, kept in zip(measured, on_pareto_front(costs), strict=True) if kept]


def peak_bytes(row: Row) -> int | None:
    """Return the peak memory of a trial: its GPU's, on a CPU the host's; None if unknown."""
    name = "host_peak_bytes" if row.get("device") == "cpu" else "gpu_peak_bytes"
    peak = finite_or_none(row.get(name))
    return int(peak) if peak is not None and peak > 0 else None
