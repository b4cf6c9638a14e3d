"""The trials of a sweep: every column that the report reads, whatever was measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from raypipe.report.formatting import cell
from raypipe.report.measures import REPEATED
from raypipe.report.plots import Stroke, rows, strokes
from raypipe.report.sections import cells

#: the stage of a trial of a sweep; ``trained_stage`` is the stage that it trained
SWEEP = "sweep"
#: the marker of each precision, in the order of the documentation
MARKERS = {"fp32": "o", "tf32": "s", "bf16": "D", "fp16": "^"}
#: settings that decide the memory of a trial, in addition to the micro-batch
GROUP = ("precision", "gradient_checkpointing", "compile", "strategy", "workers")

_NUMBERS = (
    "micro_batch", "accumulation", "workers", "samples_per_s", "energy_j_per_sample",
    "gpu_peak_bytes", "host_peak_bytes", "parity",
)  # fmt: skip
_FLAGS = ("gradient_checkpointing", "compile", "reference")
_TEXTS = ("trial_id", "precision", "strategy", "status", "kind")

#: columns of ``sweep_points`` that are not axes
_NOT_AXES = ["run_id", "command_id", "trained_stage", "kind", "reference"]


@dataclass(frozen=True)
class SweepResults:
    """The trials of one swept stage and their results.

    ``trials`` are the points of the sweep, ``all_trials`` also the fp32 trials that are only
    references of the loss. Both have every column that a plot reads, ``peak_bytes``, ``point`` (the
    settings by dotted key), and a speed unless the trial failed. ``front`` are the trials on the
    Pareto fronts. ``chosen`` is the id of the trial
    recommended for the ``metric``, or empty, and ``value`` that of its point, NaN if unknown.
    ``mode`` is whether the metric is minimized or maximized. Trials that were measured again occur
    once, with the medians.
    """

    stage: str
    kind: str
    trials: pd.DataFrame
    all_trials: pd.DataFrame
    front: frozenset[str]
    chosen: str
    metric: str
    value: float
    mode: str
    on_gpu: bool

    @property
    def recommended(self) -> pd.Series[Any] | None:
        """The row of the recommended trial."""
        trial = self.trials[self.trials["trial_id"] == self.chosen]
        return trial.iloc[0] if len(trial) else None

    @property
    def memory_unit(self) -> tuple[float, str]:
        """The unit of memory of the plots in bytes, and its name."""
        large = self.trials["peak_bytes"].max() >= 2 * 2**30
        return (2**30, "GiB") if large else (2**20, "MiB")

    @property
    def axes(self) -> list[str]:
        """The dotted keys that have more than one value, in the order of the points."""
        values: dict[str, set[str]] = {}
        for point in self.trials["point"]:
            for key, value in point.items():
                values.setdefault(key, set()).add(repr(value))
        return [key for key, different in values.items() if len(different) > 1]


def sweeps(tables: Mapping[str, pd.DataFrame]) -> list[SweepResults]:
    """Return the sweeps of a run, in the order of the table ``trials``."""
    trials = rows(tables, "trials")
    if trials is None or (swept := trials[trials["stage"] == SWEEP]).empty:
        return []
    points = rows(tables, "sweep_points")
    if points is not None:
        further = [name for name in points.columns if name not in swept.columns]
        swept = swept.merge(points[["trial_id", *further]], on="trial_id", how="left")
    stages = swept.groupby("trained_stage", sort=False)
    return [_sweep(str(stage), group, tables) for stage, group in stages]


def of_stage(tables: Mapping[str, pd.DataFrame], name: str, stage: str) -> pd.DataFrame:
    """Return the rows of a table that belong to a swept stage, possibly none."""
    table = tables.get(name)
    if table is None:
        return pd.DataFrame()
    return table[table["trained_stage"] == stage].reset_index(drop=True)


def _sweep(stage: str, table: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> SweepResults:
    trials = _medians(_clean(table).assign(point=cells(points_of(table, tables))))
    on_gpu = bool(np.isfinite(trials["gpu_peak_bytes"]).any())
    measured = trials["status"].isin(["succeeded", "interrupted"])
    trials["samples_per_s"] = trials["samples_per_s"].where(measured)
    trials["peak_bytes"] = trials["gpu_peak_bytes" if on_gpu else "host_peak_bytes"]
    recommendation = of_stage(tables, "recommendations", stage)
    pareto = rows(tables, "pareto")
    return SweepResults(
        stage=stage,
        kind=next((kind for kind in trials["kind"] if kind), "systems"),
        trials=trials[~trials["reference"]].reset_index(drop=True),
        all_trials=trials.reset_index(drop=True),
        front=frozenset() if pareto is None else frozenset(pareto["trial_id"]),
        chosen=_first(recommendation, "trial_id"),
        metric=_first(recommendation, "metric"),
        value=_value(recommendation, trials),
        mode=_first(recommendation, "mode") or "min",
        on_gpu=on_gpu,
    )


def points_of(trials: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> list[dict[str, Any]]:
    """Return the settings that each trial of a swept stage varies, by dotted key."""
    points = tables.get("sweep_points")
    if points is None:
        return [{} for _ in trials.index]
    points = points[points["trial_id"].isin(trials["trial_id"])].set_index("trial_id")
    keys = list(points.columns.drop(_NOT_AXES, errors="ignore"))
    values = points[[key for key in keys if points[key].notna().any()]].astype(object)
    rows = values.where(values.notna(), None).to_dict("index")
    return [{str(k): v for k, v in rows.get(trial, {}).items()} for trial in trials["trial_id"]]


def _clean(table: pd.DataFrame) -> pd.DataFrame:
    """Return a copy with every column that a plot reads: NaN, false or empty where unknown."""
    unknown = pd.Series(None, table.index, dtype=object)
    columns: dict[str, Any] = {}
    for name in _NUMBERS:
        column = pd.to_numeric(table.get(name, unknown), errors="coerce").astype(float)
        columns[name] = column.where(np.isfinite(column))
    columns |= {name: table.get(name, unknown).eq(True).astype(bool) for name in _FLAGS}
    columns |= {name: table.get(name, unknown).fillna("").astype(str) for name in _TEXTS}
    columns["workers"] = columns["workers"].fillna(1.0)
    return table.assign(**columns)


def _medians(trials: pd.DataFrame) -> pd.DataFrame:
    """Return the trials without repeated measurements, with the medians over these."""
    names = [name for name in REPEATED if name in trials.columns]
    numbers = trials[names].apply(pd.to_numeric, errors="coerce")
    first = trials["repeats"].fillna(trials["trial_id"])
    medians = numbers.groupby(first).transform("median")
    return trials.assign(**{name: medians[name] for name in names})[trials["repeats"].isna()]


def _first(table: pd.DataFrame, column: str) -> str:
    if table.empty or (values := table[column].dropna()).empty:
        return ""
    return str(values.iloc[0])


def _value(recommendation: pd.DataFrame, trials: pd.DataFrame) -> float:
    """Return the mean of the metric at the recommended point; NaN if unknown."""
    if value := _first(recommendation, "value"):
        return float(value)
    metric = _first(recommendation, "metric") or "samples_per_s"
    chosen = trials[trials["trial_id"] == _first(recommendation, "trial_id")]
    return float(chosen[metric].iloc[0]) if len(chosen) and metric in chosen else np.nan


def short(key: str, stage: str) -> str:
    """Return a dotted key for readers: ``train.training.micro_batch`` is ``micro-batch``."""
    key = key.removeprefix(f"{stage}.").removeprefix("training.")
    return key.replace("micro_batch", "micro-batch").replace("_", " ")


def ordered(precisions: Iterable[str]) -> list[str]:
    """Return the precisions that occur, in their fixed order."""
    present = set(precisions)
    return [p for p in MARKERS if p in present] + sorted(present - set(MARKERS))


def precision_strokes(precisions: Iterable[str]) -> dict[str, Stroke]:
    """Return the stroke of each precision, the same for every selection of them."""
    names = ("tf32", "fp16", "", "fp32", "bf16", *sorted(set(precisions) - set(MARKERS)))
    return strokes(names)


def describe(trial: pd.Series[Any]) -> str:
    """Return a trial by the settings that decide its speed: ``bf16, micro-batch 64``."""
    size = trial["micro_batch"]
    parts = [trial["precision"], f"micro-batch {size:.0f}" if np.isfinite(size) else ""]
    parts.append("checkpointing" if trial["gradient_checkpointing"] else "")
    return ", ".join(part for part in parts if part) or str(trial["trial_id"])


def point_name(sweep: SweepResults) -> str:
    """Return the recommended trial by the axes of its sweep: ``learning rate 0.001, seed 2``."""
    chosen = sweep.recommended
    if chosen is None:
        return ""
    point = {key: chosen["point"].get(key) for key in sweep.axes}
    return ", ".join(f"{short(key, sweep.stage)} {cell('', v)}" for key, v in point.items())
