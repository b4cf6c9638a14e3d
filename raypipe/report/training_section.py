"""The section of training runs: held-out curves, loss, speed, and all runs."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from raypipe.report.about import About
from raypipe.report.evaluation_plots import evaluation_plots
from raypipe.report.evaluations import EvaluationCurve
from raypipe.report.formatting import heading, number
from raypipe.report.measures import PREFIX
from raypipe.report.plots import Plot, rows
from raypipe.report.sections import Fold, Part, Pill, Section, TableView, cells
from raypipe.report.sweep_trials import SWEEP
from raypipe.report.training import training_plots

_COLUMNS = (
    "trial_id", "status", "precision", "micro_batch", "accumulation", "workers", "effective_batch",
    "steps", "samples_per_s", "step_time_s", "gpu_util_mean", "gpu_peak_bytes", "energy_j",
    "loss_final",
)  # fmt: skip
_LAST_COLUMNS = ("attempts", "device")
_MOST_PLOTS = 6
_MOST_TRIALS = 20  # that are not folded


def training_section(about: About) -> Section:
    """Return the plots and the trials of training stages; a sweep's trials are in its section."""
    found = about.evaluations
    curves = evaluation_plots(found)
    plots: list[Plot] = [*curves, *training_plots(about.tables)]
    count = max(_MOST_PLOTS, len(curves))
    if count > len(plots) and len(plots) % 2:  # two in a row: the schedule, which was given, moves
        plots.sort(key=lambda plot: plot.name.startswith("learning_rate-"))
        count = len(plots) - 1
    parts: list[Part] = [*plots[:count]]
    if further := plots[count:]:
        title = f"{len(further)} more figures of loss, speed and hardware"
        if len(further) == 1:
            title = f"Another figure: {further[0].title}"
        parts.append(Fold(title, further))
    trials = rows(about.tables, "trials", ["trial_id", "stage", "status"])
    if trials is not None and len(own := trials[trials["stage"] != SWEEP]):
        view = _trials(own, found)
        parts.append(
            view if len(own) <= _MOST_TRIALS else Fold(f"All {len(own)} training runs", [view])
        )
    return Section("Training runs", parts)


def _trials(trials: pd.DataFrame, found: Sequence[EvaluationCurve]) -> TableView:
    """Return the trials with every held-out metric: of the model, and the best with its step."""
    best: dict[str, dict[str, str]] = {}
    for each in (each for each in found if each.better):
        name = f"best_{each.metric.removeprefix(PREFIX)}"
        value, step = float(each.values[each.best]), each.steps[each.best]
        best.setdefault(name, {})[each.trial] = f"{number(value)} at step {step:.0f}"
    ends = [name for name in map(str, trials.columns) if name.startswith(PREFIX)]
    trials = trials.assign(
        status=cells(Pill.of_status(str(status)) for status in trials["status"]),
        **{name: trials["trial_id"].map(values) for name, values in best.items()},
    )
    measured = [column for name in ends for column in (name, f"best_{name.removeprefix(PREFIX)}")]
    columns = [*_COLUMNS, *measured, *_LAST_COLUMNS]
    meanings = {name: f"{heading(name)} at the last evaluation" for name in ends}
    return TableView(trials, columns, "Training runs", meanings=meanings)
