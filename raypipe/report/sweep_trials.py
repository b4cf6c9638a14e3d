"""The trials of a sweep as the report reads them: one value a column, whatever was measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raypipe.report.formatting import cell
from raypipe.report.plots import Stroke, rows, strokes

#: the stage of a trial of a sweep; ``trained_stage`` is the stage it trained
SWEEP = "sweep"
#: the precisions in the order of the documentation, and the marker of each
MARKERS = {"fp32": "o", "tf32": "s", "bf16": "D", "fp16": "^"}
#: what decides the memory of a trial, apart from the micro-batch
GROUP = ("precision", "gradient_checkpointing", "compile", "strategy", "workers")

_NUMBERS = (
    "micro_batch",
    "accumulation",
    "workers",
    "samples_per_s",
    "energy_j_per_sample",
    "gpu_peak_bytes",
    "host_peak_bytes",
    "parity",
    "static_bytes",
    "bytes_per_sample",
    "largest_error",
    "capacity_bytes",
)
_FLAGS = ("gradient_checkpointing", "compile", "reference", "accumulates")
_TEXTS = ("trial_id", "precision", "strategy", "status", "kind")


@dataclass(frozen=True)
class Sweep:
    """One swept stage.

    ``trials`` are its points, ``all_trials`` also the fp32 trials that only served as references
    of the loss; both have every column that a figure reads, ``peak_bytes``, and a speed only where
    the trial was not cut off by a failure. ``fits`` is the stage's part of ``memory_fits``,
    ``front`` holds the trial ids of the Pareto fronts, ``chosen`` is that of the recommended trial
    and empty without one, ``metric`` what it was chosen by.
    """

    stage: str
    kind: str
    trials: pd.DataFrame
    all_trials: pd.DataFrame
    fits: pd.DataFrame
    front: frozenset[str]
    chosen: str
    metric: str
    on_gpu: bool

    @property
    def recommended(self) -> pd.Series[Any] | None:
        """The row of the recommended trial."""
        found = self.trials[self.trials["trial_id"] == self.chosen]
        return found.iloc[0] if len(found) else None

    @property
    def memory_unit(self) -> tuple[float, str]:
        """Bytes in the unit of the figures, and its name."""
        return (1e6, "MB") if self.trials["peak_bytes"].max() < 2e9 else (1e9, "GB")

    @property
    def axes(self) -> list[str]:
        """The dotted keys that take more than one value, in the order of the points."""
        taken: dict[str, set[str]] = {}
        for point in self.trials["point"]:
            for key, value in point.items():
                taken.setdefault(key, set()).add(json.dumps(value))
        return [key for key, values in taken.items() if len(values) > 1]


def sweeps(tables: Mapping[str, pd.DataFrame]) -> list[Sweep]:
    """The swept stages of a run, in the order of the table.

    Raises ValueError when ``trials`` lacks ``trial_id``, ``stage`` or ``status``.
    """
    trials = rows(tables, "trials", ["trial_id", "stage", "status"])
    if trials is None:
        return []
    swept = trials[trials["stage"] == SWEEP]
    if swept.empty:
        return []
    if "trained_stage" not in swept.columns:
        swept = swept.assign(trained_stage=SWEEP)
    stages = swept.groupby("trained_stage", sort=False)
    return [_sweep(str(stage), group, tables) for stage, group in stages]


def of_stage(tables: Mapping[str, pd.DataFrame], name: str, stage: str) -> pd.DataFrame:
    """The rows of a table that belong to a swept stage; an empty frame where there are none."""
    table = tables.get(name)
    if table is None or "trained_stage" not in table.columns:
        return pd.DataFrame()
    return table[table["trained_stage"] == stage].reset_index(drop=True)


def _sweep(stage: str, table: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> Sweep:
    trials = _clean(table)
    on_gpu = bool(np.isfinite(trials["gpu_peak_bytes"]).any())
    ended_well = trials["status"].isin(["succeeded", "interrupted"])
    trials["samples_per_s"] = trials["samples_per_s"].where(ended_well)
    trials["peak_bytes"] = trials["gpu_peak_bytes" if on_gpu else "host_peak_bytes"]
    texts = table["point"] if "point" in table.columns else [""] * len(table)
    trials["point"] = pd.Series([point_of(text) for text in texts], trials.index)
    best = of_stage(tables, "recommendations", stage)
    pareto = rows(tables, "pareto", ["trial_id"])
    points = trials[~trials["reference"]].reset_index(drop=True)
    return Sweep(
        stage=stage,
        kind=next((kind for kind in trials["kind"] if kind), "systems"),
        trials=points,
        all_trials=trials.reset_index(drop=True),
        fits=_clean(of_stage(tables, "memory_fits", stage)),
        front=frozenset() if pareto is None else frozenset(pareto["trial_id"]),
        chosen=_first(best, "trial_id"),
        metric=_first(best, "metric"),
        on_gpu=on_gpu,
    )


def _clean(table: pd.DataFrame) -> pd.DataFrame:
    """A copy with all columns that a figure reads: numbers NaN, flags false, texts empty."""
    nothing = pd.Series(None, table.index, dtype=object)
    columns: dict[str, Any] = {}
    for name in _NUMBERS:
        column = pd.to_numeric(table.get(name, nothing), errors="coerce").astype(float)
        columns[name] = column.where(np.isfinite(column))
    columns |= {name: table.get(name, nothing).eq(True).astype(bool) for name in _FLAGS}
    columns |= {name: table.get(name, nothing).fillna("").astype(str) for name in _TEXTS}
    columns["workers"] = columns["workers"].fillna(1.0)
    return table.assign(**columns)


def _first(table: pd.DataFrame, column: str) -> str:
    known = table[column].dropna() if column in table.columns else table
    return str(known.iloc[0]) if len(known) else ""


def point_of(text: object) -> dict[str, Any]:
    """A point or settings from their JSON text; empty where there are none."""
    if isinstance(text, str) and text:
        text = json.loads(text)
    return dict(text) if isinstance(text, Mapping) else {}


def short(key: str, stage: str) -> str:
    """A dotted key for a reader: ``train_small.training.micro_batch`` is ``micro-batch``."""
    key = key.removeprefix(f"{stage}.").removeprefix("training.")
    return key.replace("micro_batch", "micro-batch").replace("_", " ")


def ordered(precisions: Iterable[str]) -> list[str]:
    """The precisions that occur, in their fixed order."""
    present = set(precisions)
    return [p for p in MARKERS if p in present] + sorted(present - set(MARKERS))


def precision_strokes(precisions: Iterable[str]) -> dict[str, Stroke]:
    """The stroke of each precision, the same whichever of them a sweep has."""
    names = ("tf32", "fp16", "", "fp32", "bf16", *sorted(set(precisions) - set(MARKERS)))
    return strokes(names)


def describe(trial: pd.Series[Any]) -> str:
    """A trial by what decides its speed: ``bf16, micro-batch 64, checkpointing``."""
    size = trial["micro_batch"]
    parts = [trial["precision"], f"micro-batch {size:.0f}" if np.isfinite(size) else ""]
    parts.append("checkpointing" if trial["gradient_checkpointing"] else "")
    return ", ".join(part for part in parts if part) or str(trial["trial_id"])


def point_name(sweep: Sweep) -> str:
    """The recommended trial by the axes of the sweep: ``learning rate 0.001, seed 2``."""
    chosen = sweep.recommended
    if chosen is None:
        return ""
    point = {key: chosen["point"].get(key) for key in sweep.axes}
    return ", ".join(f"{short(key, sweep.stage)} {cell('', v)}" for key, v in point.items())
