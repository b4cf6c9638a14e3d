"""The section of training runs: held-out curves, loss, speed, and all runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from raypipe.report import plots
from raypipe.report.about import About
from raypipe.report.evaluations import EvaluationCurve
from raypipe.report.formatting import heading, number
from raypipe.report.marks import mark_best, tip, toggle
from raypipe.report.measures import PREFIX
from raypipe.report.plots import Plot, rows
from raypipe.report.sections import Fold, Part, Pill, Section, TableView, cells
from raypipe.report.sweep_trials import SWEEP
from raypipe.report.training import short_names, training_plots

_COLUMNS = (
    "trial_id", "status", "precision", "micro_batch", "accumulation", "workers", "effective_batch",
    "steps", "samples_per_s", "step_time_s", "gpu_util_mean", "gpu_peak_bytes", "energy_j",
    "loss_final",
)  # fmt: skip
_LAST_COLUMNS = ("attempts", "device")
_MOST_PLOTS = 6
_MOST_TRIALS = 20  # that are not folded
_MAX_LABELS = 8
_MOST_TIPS = 60  # points of a run with a value to show


def training_section(about: About) -> Section:
    """Return the plots and the trials of training stages; a sweep's trials are in its section."""
    found = about.evaluations
    curves = evaluation_plots(found)
    figures: list[Plot] = [*curves, *training_plots(about.tables)]
    count = max(_MOST_PLOTS, len(curves))
    if (
        count > len(figures) and len(figures) % 2
    ):  # two in a row: the schedule, which was given, moves
        figures.sort(key=lambda plot: plot.name.startswith("learning_rate-"))
        count = len(figures) - 1
    parts: list[Part] = [*figures[:count]]
    if further := figures[count:]:
        title = f"{len(further)} more figures of loss, speed and hardware"
        if len(further) == 1:
            title = f"Another figure: {further[0].title}"
        parts.append(Fold(title, further))
    trials = rows(about.tables, "trials")
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


def evaluation_plots(found: Sequence[EvaluationCurve]) -> list[Plot]:
    """Draw each metric of each stage by step, a line per run; not those with one value per run."""

    def key(evaluation: EvaluationCurve) -> tuple[str, str]:
        return evaluation.stage, evaluation.metric

    order = {pair: place for place, pair in enumerate(dict.fromkeys(map(key, found)))}
    grouped = groupby(sorted(found, key=lambda one: order[key(one)]), key)
    listed = [(pair, list(curves)) for pair, curves in grouped]
    with plots.style():
        return [
            _plot(*pair, every) for pair, every in listed if max(len(c.steps) for c in every) > 1
        ]


def _plot(stage: str, metric: str, curves: Sequence[EvaluationCurve]) -> Plot:
    few = len(curves) <= _MAX_LABELS
    labels, note = short_names([curve.trial for curve in curves])
    figure, axes = plots.new_axes(0.6 if len(curves) > 1 and few else 0.84)
    plots.frame_steps(axes, max(float(curve.steps[-1]) for curve in curves))
    palette = list(plots.strokes([str(place) for place in range(_MAX_LABELS)]).values())
    better = curves[0].better
    ends = []
    for place, curve in enumerate(curves):
        stroke = palette[place] if few and len(curves) > 1 else plots.single_stroke()
        label = labels.get(curve.trial, curve.trial)
        (line,) = axes.plot(
            curve.steps, curve.values, color=stroke.color, linestyle=stroke.line, label=label,
            linewidth=1.7 if few else 0.9, alpha=1.0 if few else 0.6,
        )  # fmt: skip
        if few and len(curves) > 1:
            toggle(line, label)
        if few and len(curve.steps) <= _MOST_TIPS:
            for step, value in zip(curve.steps, curve.values, strict=True):
                (dot,) = axes.plot([step], [value], "o", color=stroke.color, markersize=3.5)
                tip(dot, f"{label}, step {step:.0f}: {number(float(value))}")
        ends.append((float(curve.values[-1]), label, stroke))
    plots.frame_y(axes, np.concatenate([curve.values for curve in curves]))
    if better:
        _mark(curves, axes)
    if len(curves) > 1 and few:
        plots.label_lines(axes, ends)
    name = curves[0].name
    logarithmic = " (logarithmic)" if axes.get_yscale() == "log" else ""
    axes.set_title(name + logarithmic)
    title = f"{name[:1].upper()}{name[1:]}: {stage}"
    return Plot(f"{metric}-{stage}", title, _caption(curves) + (note if few else ""), figure)


def _mark(curves: Sequence[EvaluationCurve], axes: Axes) -> None:
    """Mark the best step of all runs with its value, and those of few others by a ring alone."""
    first = min(curves, key=lambda curve: float(curve.costs.min()))
    for curve in curves if len(curves) <= _MAX_LABELS else [first]:
        x, y = float(curve.steps[curve.best]), float(curve.values[curve.best])
        text = f"{number(y)} at step {x:.0f}" if curve is first else ""
        mark_best(axes, x, y, text, below=curve.better == "lower")


def _caption(curves: Sequence[EvaluationCurve]) -> str:
    better = curves[0].better
    if not better:
        last = number(float(curves[0].values[-1]))
        return f"At the end {last}." if len(curves) == 1 else f"{len(curves)} runs."
    worse = sum(curve.ends_worse for curve in curves)
    measure = heading(curves[0].metric.removeprefix(PREFIX))
    text = f"{better.capitalize()} is better. The ring is the best step"
    if len(curves) == 1:
        curve = curves[0]
        text += f"; at the end {measure} is {number(float(curve.values[-1]))}"
        return text + (", worse than the best by more than noise." if worse else ".")
    text += f" of each of {len(curves)} runs." if len(curves) <= _MAX_LABELS else " of all runs."
    return text + (f" {worse} of them end worse than their best." if worse else "")
