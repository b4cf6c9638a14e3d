"""Section of training runs: held-out metrics, loss, speed and hardware by step, and all runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from raypipe.report import plots
from raypipe.report.formatting import heading
from raypipe.report.measures import PREFIX
from raypipe.report.parts import Pill, Section, TableView, cells, own_columns
from raypipe.report.plots import Line, Plot, finite, thinned
from raypipe.report.results import (
    SWEEP,
    EvaluationCurve,
    RunResults,
    as_numbers,
    point_label,
    staged,
)


def training_section(run: RunResults) -> Section:
    """Return the plots and the trials of training stages; a sweep's trials are in its section."""
    trials = run.tables.get("trials", pd.DataFrame({"stage": [], "status": []}))
    view = trials_view(run, trials[trials["stage"] != SWEEP], "Training runs")
    return Section("Training runs", [*training_plots(run), view])


def trials_view(
    run: RunResults, trials: pd.DataFrame, label: str, first: Sequence[str] = ("trial_id",)
) -> TableView:
    """Return the columns of trials that their table shows, and their held-out metrics."""
    shown = run.core("trials").shown or own_columns(trials)
    ends = [str(name) for name in trials if str(name).startswith(PREFIX)]
    meanings = {name: f"{heading(name)} at the last evaluation" for name in ends}
    meanings = run.core("trials").meanings | meanings
    columns = list(dict.fromkeys([*first, *shown, *ends]))
    trials = trials.assign(status=cells(map(Pill.of_status, trials["status"].astype(str))))
    return TableView(trials, columns, label, meanings=meanings)


def training_plots(run: RunResults) -> Iterator[Plot]:
    """Draw held-out metrics, loss and speed by step, and the use of the hardware by time.

    Each stage has its own plots, of what its tables declare as shown. A sweep's trials have other
    plots.
    """
    groups: dict[tuple[str, str], list[EvaluationCurve]] = {}
    for each in run.evaluations:
        groups.setdefault((each.stage, each.column.name), []).append(each)
    for (stage, metric), curves in groups.items():
        labels = short_names([curve.trial for curve in curves])
        drawn = [Line(labels[c.trial], thinned(c.steps), thinned(c.values)) for c in curves]
        if max(len(line.x) for line in drawn) > 1:
            better = curves[0].column.better
            caption = f"{better.capitalize()} is better; a ring is the best step." if better else ""
            yield step_plot(stage, metric, drawn, "optimizer step", caption, better)
    for name in ("steps", "gpu_samples"):
        rows = staged(run.tables, name)
        xlabel = "optimizer step"
        if "at" in rows:
            begun = rows.groupby("stage")["at"].transform("min")
            rows = rows.assign(step=(rows["at"] - begun).dt.total_seconds())
            xlabel = "time, s"
        for column in (column for column in run.core(name).shown if column in rows):
            for own_stage, own in rows.groupby("stage", sort=False):
                if np.unique(finite(as_numbers(own[column]))).size > 1:
                    drawn = step_lines(own, column)
                    yield step_plot(str(own_stage), column, drawn, xlabel)


def step_plot(
    stage: str, column: str, drawn: Sequence[Line], xlabel: str, caption: str = "", better: str = ""
) -> Plot:
    """Return the plot of a column of a stage."""
    figure, name = plots.lines(drawn, xlabel, column, better=better), heading(column)
    return Plot(f"{column}-{stage}", f"{name[:1].upper()}{name[1:]}: {stage}", caption, figure)


def step_lines(
    rows: pd.DataFrame, column: str, labels: Mapping[str, str] | None = None
) -> list[Line]:
    """Return a line per trial, attempt and worker.

    It is the running median over a thirtieth of the points, which keeps jumps.
    """
    each = "rank" if "rank" in rows else "trial_id"
    rows = rows[np.isfinite(as_numbers(rows[column]))].dropna(subset=each)
    rows = rows.sort_values("step", kind="stable")
    if labels is None and each == "trial_id":
        labels = short_names(list(dict.fromkeys(map(str, rows[each]))))
    several = dict.fromkeys(name for name in (each, "trial_id", "attempt") if name in rows)
    drawn = []
    for (of, *_), own in rows.groupby(list(several), sort=False):
        raw = as_numbers(own[column])
        window = max(1, len(raw) // 30) | 1
        smooth = raw.rolling(window, center=True, min_periods=1).median()
        x, y, thin = (thinned(values.to_numpy(float)) for values in (own["step"], smooth, raw))
        label = f"worker {of:.0f}" if labels is None else labels[str(of)]
        drawn.append(Line(label, x, y, raw=thin if window > 1 else None))
    return drawn


def short_names(trials: Sequence[str]) -> dict[str, str]:
    """Return short names of trials, ``train@model.layers=2,seed=1``, by what tells them apart."""
    parts = {}
    for trial in trials:
        stage, _, variant = trial.partition("@")
        values = [part.partition("=")[::2] for part in variant.split(",") if part]
        parts[trial] = dict([("", stage), *values])
    table = pd.DataFrame.from_dict(parts, orient="index")
    varied = table.loc[:, table.nunique(dropna=False) > 1]
    return {str(trial): point_label(dict(row.dropna())) or str(trial)
            for trial, row in varied.iterrows()}  # fmt: skip
