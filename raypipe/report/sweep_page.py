"""The sweeps on the page: what is recommended and why; all trials, fronts and fits to open."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

import pandas as pd

from raypipe.report.html import fold, html_table, status_mark
from raypipe.report.sweep_trials import Sweep, of_stage, point_of, short, sweeps

_MEASURES = (
    "samples_per_s",
    "step_time_s",
    "gpu_util_mean",
    "peak_bytes",
    "energy_per_sample_j",
    "loss_final",
    "parity",
    "steps",
    "reason",
)
#: not shown where a sweep has one value of them
_SETTINGS = (
    "gradient_checkpointing",
    "accumulates",
    "compile",
    "strategy",
    "workers",
    "device",
)
_FIT_COLUMNS = (
    "precision",
    *_SETTINGS,
    "static_bytes",
    "per_sample_bytes",
    "largest_micro_batch",
    "failed_micro_batch",
    "largest_error",
    "trials",
    "capacity_bytes",
)


def sweep_section(tables: Mapping[str, pd.DataFrame]) -> str:
    """For each swept stage its recommendation, and its tables behind lines; empty without one."""
    found = sweeps(tables)
    parts = []
    for sweep in found:
        parts.append(f"<h3>{escape(sweep.stage)}</h3>")
        parts.append(_recommendation(of_stage(tables, "recommendations", sweep.stage)))
        parts += [_front(tables.get("pareto"), sweep), _fits(tables, sweep), _trials(sweep)]
    return "\n".join(part for part in parts if part)


def _recommendation(table: pd.DataFrame) -> str:
    """The reason, and the lines to paste without the comment, which is the reason again."""
    if table.empty:
        return "<p>No trial can be recommended.</p>"
    best = table.iloc[0]
    parts = []
    if isinstance(reason := best.get("reason"), str):
        parts.append(f"<p>{escape(reason)}</p>")
    if isinstance(snippet := best.get("snippet"), str):
        lines = (line for line in snippet.strip().splitlines() if not line.startswith("#"))
        parts.append(f"<pre><code>{escape(chr(10).join(lines))}</code></pre>")
    return "\n".join(parts)


def _front(pareto: pd.DataFrame | None, sweep: Sweep) -> str:
    if pareto is None or pareto.empty:
        return ""
    table = pareto[pareto["trial_id"].isin(sweep.trials["trial_id"])]
    if table.empty:
        return ""
    if "samples_per_s" in table.columns:
        table = table.sort_values("samples_per_s", ascending=False, kind="stable")
    points = [point_of(text) for text in table.get("point", pd.Series("", table.index))]
    table, names = _with_axes(table, points, sweep)
    columns = [*names, "samples_per_s", "peak_bytes", "energy_per_sample_j"]
    chosen = list(table["trial_id"] == sweep.chosen)
    shown = html_table(table, columns, f"Pareto front of {sweep.stage}", emphasised=chosen)
    one = len(table) == 1
    title = f"Pareto front: {'1 trial that is' if one else f'{len(table)} trials that are'}"
    return fold(f"{title} not beaten in speed, memory and energy at once", shown)


def _fits(tables: Mapping[str, pd.DataFrame], sweep: Sweep) -> str:
    table = of_stage(tables, "memory_fits", sweep.stage)
    if table.empty:
        return ""
    table = table.rename(columns={"bytes_per_sample": "per_sample_bytes"})
    if "largest_error" in table.columns:
        table = table.assign(largest_error=_percents(table["largest_error"]))
    same = {name for name in _SETTINGS if name in table.columns and table[name].nunique() < 2}
    columns = [name for name in _FIT_COLUMNS if name not in same]
    shown = html_table(table, columns, f"Memory fits of {sweep.stage}")
    return fold(f"Memory: {len(table)} fits of static + micro-batch x bytes per sample", shown)


def _trials(sweep: Sweep) -> str:
    """Every trial, the recommended first, then by speed; those without one by status."""
    trials = sweep.all_trials.assign(_chosen=sweep.all_trials["trial_id"] == sweep.chosen)
    reasons = trials.get("reason", pd.Series(None, trials.index, dtype=object))
    trials["reason"] = reasons.mask(trials["reference"] & reasons.isna(), "reference of the loss")
    order = ["_chosen", "samples_per_s", "status"]
    trials = trials.sort_values(order, ascending=[False, False, True], kind="stable")
    trials = trials.assign(parity=_percents(trials["parity"]))
    statuses = [str(status) for status in trials["status"]]
    counts = pd.Series(statuses).str.replace("_", " ").value_counts()
    marks = [status_mark(status) for status in statuses]
    trials, names = _with_axes(trials, list(trials["point"]), sweep)
    evaluated = [name for name in trials.columns if str(name).startswith("eval_")]
    if "accumulation" not in names and trials["accumulation"].nunique() > 1:
        names.append("accumulation")
    columns = [*names, "status", *_MEASURES[:-2], *evaluated, *_MEASURES[-2:]]
    table = html_table(
        trials,
        list(dict.fromkeys(columns)),
        f"Trials of {sweep.stage}",
        cells={"status": marks},
        emphasised=list(trials["_chosen"]),
    )
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    return fold(
        f"All {len(trials)} trials: {said}" if len(trials) > 1 else f"1 trial: {said}", table
    )


def _with_axes(
    table: pd.DataFrame, points: list[dict[str, Any]], sweep: Sweep
) -> tuple[pd.DataFrame, list[str]]:
    """The table with a column for each key that varies, and the names of these columns."""
    keys = sweep.axes or list(points[0] if points else {})
    table = table.rename(columns={"energy_j_per_sample": "energy_per_sample_j"})
    for key in keys:
        table[short(key, sweep.stage)] = [point.get(key) for point in points]
    return table, [short(key, sweep.stage) for key in keys]


def _percents(shares: pd.Series[Any]) -> list[Any]:
    known = pd.to_numeric(shares, errors="coerce")
    return [f"{100 * share:.2g} %" if pd.notna(share) else None for share in known]
