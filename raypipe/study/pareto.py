"""Pareto front of a sweep's trials: speed, peak memory, energy and quality."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import numpy as np

from raypipe.stats import finite_or_none, on_pareto_front
from raypipe.store.ledger import Row


def front(
    rows: Iterable[Row], quality: str | None = None, mode: Literal["max", "min"] = "min"
) -> list[Row]:
    """Return the trials that no other one dominates, in the given order; equal ones are all kept.

    The objectives are more ``samples_per_s``, less peak memory, a better ``quality`` if one is
    given and, if every trial has it, less ``energy_j_per_sample``. Only points that succeeded with
    a finite speed and quality count; an unknown peak is larger than any other.

    Args:
        rows: the trials.
        quality: the column of the measure of quality.
        mode: whether more or less of it is better.

    """
    needed = ["samples_per_s", *([quality] if quality else [])]
    measured = [
        row
        for row in rows
        if row["status"] == "succeeded"
        and not row.get("reference")
        and all(finite_or_none(row.get(name)) is not None for name in needed)
    ]
    sign = -1 if mode == "max" else 1
    costs = np.array(
        [
            (
                -row["samples_per_s"],
                peak_bytes(row) or math.inf,
                sign * row[quality] if quality else 0.0,
                finite_or_none(row.get("energy_j_per_sample")),
            )
            for row in measured
        ],
        dtype=np.float64,  # None becomes NaN
    ).reshape(-1, 4)
    if np.isnan(costs[:, 3]).any():
        costs = costs[:, :3]
    return [row for row, kept in zip(measured, on_pareto_front(costs), strict=True) if kept]


def peak_bytes(row: Row) -> int | None:
    """Return the peak memory of a trial: its GPU's, on a CPU the host's; None if unknown."""
    name = "host_peak_bytes" if row.get("device") == "cpu" else "gpu_peak_bytes"
    peak = finite_or_none(row.get(name))
    return int(peak) if peak is not None and peak > 0 else None
