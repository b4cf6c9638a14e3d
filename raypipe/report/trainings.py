"""Numbers that stand for a training, in the order of their importance, and their values by step.

The report, the comparison of a matrix and the key result of ``raypipe ls`` use the same order.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from raypipe.report.tables import as_numbers
from raypipe.store.tables import Column

Tables = Mapping[str, pd.DataFrame]

#: the stage of a trial of a sweep; ``trained_stage`` is the stage that it trained
SWEEP = "sweep"
#: names of metrics of which lower or higher is better, unless the experiment says otherwise
_LOWER = re.compile(
    r"loss|perplexity|entropy|error|regret|nll|(^|_)(mae|mse|rmse|ppl|wer|time|bytes|energy)(_|$)"
)
_HIGHER = re.compile(
    r"accuracy|(^|_)(acc|auc|auroc|bleu|f1|mfu|mrr|precision|r2|recall|rouge)(_|$)"
)
_RATE = re.compile(r"_per_s$")
#: begins the names of columns with held-out metrics
PREFIX = "eval_"
#: stands for a training without evaluations
LOSS = Column("loss_final", "real", "Training loss of the last logged step.", better="lower")
#: columns of ``trials`` that another measurement of the same trial changes; all are above 0
REPEATED = (
    *("samples_per_s", "tokens_per_s", "step_time_s", "flops_per_s", "mfu"),
    *("energy_j", "energy_j_per_sample"),
)


def better_by_name(name: str) -> str:
    """Return ``lower`` or ``higher`` as the name of a metric tells; empty if it does not."""
    if _LOWER.search(name) and not _RATE.search(name):
        return "lower"
    return "higher" if _HIGHER.search(name) or _RATE.search(name) else ""


def monitors_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the monitored columns ``eval_...`` of a configuration, with ``lower`` or ``higher``.

    Monitors are the sections that are named so; any other content of them is ignored. The metric of
    a sweep counts, too, and comes first.
    """
    found: dict[str, str] = {}
    if isinstance(sweep := settings.get("sweep"), Mapping):
        metric, mode = str(sweep.get("metric")), sweep.get("mode")
        better = {"max": "higher", "min": "lower"}.get(str(mode)) or better_by_name(metric)
        if metric.startswith(PREFIX) and better:
            found[metric] = better
    for name, value in settings.items():
        if not isinstance(value, Mapping):
            continue
        if name == "monitor" and isinstance(own := value.get("metric"), str):
            mode = {"max": "higher", "min": "lower"}.get(str(value.get("mode")))
            found[f"{PREFIX}{own}"] = mode or better_by_name(own) or "lower"
        else:
            found |= monitors_of(value)
    return found


def held_out_columns(
    names: Iterable[str],
    declared: Sequence[Column] = (),
    monitors: Mapping[str, str] = MappingProxyType({}),
) -> list[Column]:
    """Return the held-out metrics among the names of columns, the most important first.

    Monitored metrics come first, then the declared ones, then others, each time with the loss last.
    ``better`` is what is declared, else the monitor's mode, else what the name tells; it may be
    empty. Declarations of other columns are ignored.
    """
    known = {each.name: each for each in declared if each.name.startswith(PREFIX)}
    found = []
    for name in filter(lambda name: name.startswith(PREFIX), names):
        column = known.get(name, Column(name, "real", ""))
        better: Any = column.better or monitors.get(name) or better_by_name(name)
        found.append(replace(column, better=better))
    places = {name: place for place, name in enumerate([*monitors, *known])}

    def importance(column: Column) -> tuple[bool, bool, bool, int]:
        name = column.name
        is_loss, place = name == f"{PREFIX}loss", places.get(name, 0)
        return name not in monitors, name not in known, is_loss, place

    return sorted(found, key=importance)


def training_measures(
    names: Iterable[str], declared: Sequence[Column], monitors: Mapping[str, str]
) -> list[Column]:
    """Return the numbers that stand for a training, the most important first.

    They are the held-out metrics of which it is known what is better; without any, the loss.
    """
    names = list(names)
    found = [each for each in held_out_columns(names, declared, monitors) if each.better]
    return found or [each for each in (LOSS,) if each.name in names]


def evaluations(
    tables: Tables, metrics: Sequence[Column], monitors: Mapping[str, str]
) -> list[tuple[Column, pd.DataFrame]]:
    """Return every held-out metric with its evaluations, the most important metric first.

    Trials of a sweep are left out. Rows are by step, with ``stage``, ``trial_id``, ``step``, the
    finite ``value``, and ``baseline``: the same metric of a baseline, NaN without one. ``better``
    of a metric may be empty.

    Args:
        tables: of the run.
        metrics: declarations of the columns ``eval_...``; others are taken from their names.
        monitors: the monitored columns (:func:`raypipe.report.trainings.monitors_of`).

    """
    steps = staged(tables, "steps").sort_values("step", kind="stable")
    found = []
    for column in held_out_columns(map(str, steps), metrics, monitors):
        value, baseline = (
            as_numbers(steps[name]) if name in steps else np.nan
            for name in (column.name, column.baseline)
        )
        rows = steps[["stage", "trial_id", "step"]].assign(value=value, baseline=baseline)
        rows = rows[np.isfinite(rows["value"])]
        found += [(column, rows)] if len(rows) else []
    return found


def is_better(value: float, baseline: float, better: str) -> bool:
    """Whether a value is better than that of a baseline, if there is one."""
    is_above = value > baseline if better == "higher" else value < baseline
    return is_above or not math.isfinite(baseline)


def best_place(values: pd.Series[float], better: str) -> Any:
    """Return the label of the best value; of the first one of equal ones."""
    return values.idxmax() if better == "higher" else values.idxmin()


def staged(tables: Tables, name: str) -> pd.DataFrame:
    """Return the rows that are not of sweeps; the table ``trials`` has the stage of a row."""
    table = tables.get(name, pd.DataFrame())
    if table.empty:
        return pd.DataFrame(columns=["stage", "trial_id", "step"])
    if "stage" not in table:
        trials = tables.get("trials", pd.DataFrame({"trial_id": [], "stage": []}))
        stages = table["trial_id"].map(dict(zip(trials["trial_id"], trials["stage"], strict=True)))
        names = table["trial_id"].astype(str).str.partition("@")[0]
        table = table.assign(stage=stages.where(stages.notna(), names))
    return table[table["stage"] != SWEEP]
