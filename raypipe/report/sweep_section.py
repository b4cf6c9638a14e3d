"""The sweep section: recommendation and plots; Pareto front and trials to open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from raypipe.report.formatting import percent
from raypipe.report.plots import Plot, rows, style
from raypipe.report.sections import (
    Code,
    Fold,
    Heading,
    Part,
    Pill,
    Section,
    TableView,
    cells,
)
from raypipe.report.sweep_curves import curves_plot
from raypipe.report.sweep_pareto import pareto_plot
from raypipe.report.sweep_speed import speed_plot
from raypipe.report.sweep_trials import SweepResults, of_stage, short, sweeps

Tables = Mapping[str, pd.DataFrame]

_MEASURES = ("samples_per_s", "step_time_s", "gpu_util_mean", "peak_bytes", "energy_per_sample_j")


def sweep_section(tables: Tables) -> Section:
    """Return recommendation, plots and tables of each swept stage."""
    parts: list[Part] = []
    for sweep in sweeps(tables):
        parts += [
            Heading(sweep.stage),
            *_recommendation(tables, sweep.stage),
            *sweep_plots(sweep, tables),
            *_front(tables, sweep),
            _trials(sweep),
        ]
    return Section("Sweep", parts)


def sweep_plots(sweep: SweepResults, tables: Tables) -> list[Plot]:
    """Return the plots of speed, Pareto front and learning curves.

    A plot with fewer than two things to compare is left out.
    """
    with style():
        plots = [speed_plot(sweep), pareto_plot(sweep), curves_plot(sweep, tables)]
    return [plot for plot in plots if plot is not None]


def _recommendation(tables: Tables, stage: str) -> list[Part]:
    """Return the reason, and the lines to paste without their comment, which repeats it."""
    table = of_stage(tables, "recommendations", stage)
    if table.empty:
        return [f"No trial of {stage} can be recommended."]
    best = table.iloc[0]
    parts: list[Part] = []
    if isinstance(reason := best.get("reason"), str):
        parts.append(reason)
    if isinstance(snippet := best.get("snippet"), str):
        lines = (line for line in snippet.strip().splitlines() if not line.startswith("#"))
        parts.append(Code("\n".join(lines)))
    return parts


def _front(tables: Tables, sweep: SweepResults) -> list[Part]:
    pareto = rows(tables, "pareto")
    if pareto is None:
        return []
    points = dict(zip(sweep.trials["trial_id"], sweep.trials["point"], strict=True))
    table = pareto[pareto["trial_id"].isin(points)]
    if table.empty:
        return []
    table = table.sort_values("samples_per_s", ascending=False, kind="stable")
    table, names = _with_axes(table, [points[name] for name in table["trial_id"]], sweep)
    measures = "speed, memory and energy"
    columns = [*names, "samples_per_s", "peak_bytes", "energy_per_sample_j"]
    if sweep.kind == "quality" and sweep.metric:
        measures = f"{sweep.metric}, {measures}"
        table = table.rename(columns={"quality": sweep.metric})
        columns.insert(len(names), sweep.metric)
    chosen = list(table["trial_id"] == sweep.chosen)
    count = "1 trial that is" if len(table) == 1 else f"{len(table)} trials that are"
    title = f"Pareto front: {count} not beaten in {measures} at once"
    return [Fold(title, [TableView(table, columns, f"Pareto front of {sweep.stage}", chosen)])]


def _trials(sweep: SweepResults) -> Fold:
    """Return all trials: the recommended first, then by speed; those without one by status."""
    trials = sweep.all_trials.assign(_chosen=sweep.all_trials["trial_id"] == sweep.chosen)
    unexplained = trials["reference"] & trials["reason"].isna()
    trials["reason"] = trials["reason"].mask(unexplained, "reference of the loss")
    order = ["_chosen", "samples_per_s", "status"]
    trials = trials.sort_values(order, ascending=[False, False, True], kind="stable")
    counts = trials["status"].str.replace("_", " ").value_counts()
    trials = trials.assign(
        parity=cells(_percents(trials["parity"])),
        status=cells(Pill.of_status(status) for status in trials["status"]),
    )
    trials, names = _with_axes(trials, list(trials["point"]), sweep)
    if "accumulation" not in names and trials["accumulation"].nunique() > 1:
        names.append("accumulation")
    evaluated = [name for name in trials.columns if str(name).startswith("eval_")]
    columns = [*names, "status", *_MEASURES, "loss_final", "parity", *evaluated, "steps", "reason"]
    view = TableView(
        trials,
        list(dict.fromkeys(columns)),
        f"Trials of {sweep.stage}",
        list(trials["_chosen"]),
    )
    number = "1 trial" if len(trials) == 1 else f"All {len(trials)} trials"
    return Fold(f"{number}: {', '.join(f'{n} {status}' for status, n in counts.items())}", [view])


def _with_axes(
    table: pd.DataFrame, points: Sequence[Mapping[str, Any]], sweep: SweepResults
) -> tuple[pd.DataFrame, list[str]]:
    """Return the table with a column per axis of the sweep, and the names of these columns."""
    keys = sweep.axes or list(points[0] if points else {})
    axes = {short(key, sweep.stage): cells(point.get(key) for point in points) for key in keys}
    table = table.rename(columns={"energy_j_per_sample": "energy_per_sample_j"})
    return table.assign(**axes), list(axes)


def _percents(shares: pd.Series[Any]) -> list[str | None]:
    numbers = pd.to_numeric(shares, errors="coerce")
    return [percent(share) if pd.notna(share) else None for share in numbers]
