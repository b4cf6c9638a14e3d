"""Learning curves of a sweep: the recommended trial among all others, or loss parity with fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from raypipe.report import plots
from raypipe.report.formatting import number, percent
from raypipe.report.plots import INK, MUTED, Plot
from raypipe.report.sweep_trials import (
    MARKERS,
    SweepResults,
    ordered,
    point_name,
    precision_strokes,
)
from raypipe.report.training import running_median

_BLUE = "#2856cf"
_MAX_POINTS = 100  # per line
#: the name of each status in the legend, and its mark at the end of a curve
_ENDS = {"succeeded": ("to the end", ""), "interrupted": ("stopped early", "o")}
_FAILED = ("failed", "X")
_LEGEND = ("recommended", "to the end", "stopped early", "failed")

Curves = Mapping[str, "pd.Series[float]"]


def curves_plot(sweep: SweepResults, tables: Mapping[str, pd.DataFrame]) -> Plot | None:
    """Draw learning curves for the kind quality; for the kind systems the parity of the losses.

    None with fewer than two curves or, for the kind systems, without a trial that has a reference.
    """
    columns = ["trial_id", "step", "loss"]
    steps = plots.rows(tables, "steps")
    steps = pd.DataFrame(columns=columns) if steps is None else steps
    steps = steps[steps["trial_id"].isin(sweep.all_trials["trial_id"])]
    if sweep.kind == "quality":
        return _learning(sweep, steps)
    return _parity(sweep, steps) if plots.finite(sweep.trials["parity"]).size else None


def _learning(sweep: SweepResults, steps: pd.DataFrame) -> Plot | None:
    states = sweep.trials.set_index("trial_id")["status"]
    column = sweep.metric if sweep.metric in steps.columns else "loss"
    measure = "training loss" if column == "loss" else column.replace("_", " ")
    curves = _curves(steps, column)
    if len(curves) < 2:
        return None
    figure, axes = plots.new_axes(0.85, 0.735)
    stopped = _draw_curves(figure, axes, sweep, curves, states)
    better = "higher" if sweep.mode == "max" else "lower"
    axes.set_title(f"{measure} ({better} is better)")
    caption = f"{len(curves)} trials"
    caption += ", running median of the logged loss." if column == "loss" else "."
    caption += f" {stopped} ended early, where their marks are." if stopped else ""
    settings = point_name(sweep)
    caption += f" Recommended: {settings}." if settings else ""
    title = f"{measure.capitalize()} of all trials"
    if sweep.chosen in curves:
        end = number(float(curves[sweep.chosen].iloc[-1]))
        title = f"The recommended trial ends at {measure} {end}"
    return Plot(f"sweep-curves-{sweep.stage}", title, caption, figure)


def _draw_curves(
    figure: Figure, axes: Axes, sweep: SweepResults, curves: Curves, states: pd.Series[str]
) -> int:
    """Draw every curve, a mark where it ended early, and a legend; return the number of marks."""
    marks = 0
    handles: dict[str, Line2D] = {}
    for name, curve in curves.items():
        label, mark = _ENDS.get(str(states.get(name)), _FAILED)
        look: dict[str, Any] = {"color": MUTED, "linewidth": 0.8, "zorder": 2}
        if name == sweep.chosen:
            label, look = "recommended", {"color": _BLUE, "linewidth": 2.0, "zorder": 3}
            alpha = 1.0
        else:
            alpha = 0.45 if len(curves) < 60 else 0.2
        axes.plot(curve.index, curve, alpha=alpha, **look)
        end: dict[str, Any] = {"marker": mark, "markeredgewidth": 0}
        if mark:
            marks += 1
            axes.plot(curve.index[-1:], curve.iloc[-1:], markersize=3.6, **end, **look)
        handles[label] = Line2D([], [], markersize=4, label=label, **end, **look)
    _frame(axes, curves, mode=sweep.mode, always=sweep.chosen)
    if sweep.chosen in curves:
        _label_end(axes, curves[sweep.chosen])
    plots.draw_legend(figure, [handles[label] for label in _LEGEND if label in handles])
    return marks


def _curves(steps: pd.DataFrame, column: str) -> Curves:
    """Return the values of each trial by step; of the loss its running median."""
    known = steps[np.isfinite(pd.to_numeric(steps[column], errors="coerce").astype(float))]
    curves = {}
    for name, trial in known.sort_values("step").groupby("trial_id", sort=False):
        curve = trial.set_index("step")[column].astype(float)
        curve = running_median(curve) if column == "loss" else curve
        places = np.unique(np.linspace(0, len(curve) - 1, _MAX_POINTS).round().astype(int))
        curves[str(name)] = curve.iloc[places]
    return curves


def _frame(axes: Axes, curves: Curves, ticks: int = 6, mode: str = "min", always: str = "") -> None:
    """Frame both axes; the worst values of the worst trials may be outside.

    The curve ``always`` is inside as a whole, and so are the best values of all.
    """
    highest = [float(curve.max()) for curve in curves.values()]
    lowest = [float(curve.min()) for curve in curves.values()]
    if mode == "max":
        ends = [float(np.quantile(lowest, 0.1, method="higher")), max(highest)]
    else:
        ends = [min(lowest), float(np.quantile(highest, 0.9, method="lower"))]
    if always in curves:
        ends += [float(curves[always].min()), float(curves[always].max())]
    plots.frame_y(axes, ends)
    plots.frame_steps(axes, 1.01 * max(float(curve.index[-1]) for curve in curves.values()))
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True))


def _label_end(axes: Axes, curve: pd.Series[float]) -> None:
    """Write "recommended" at the end of its curve, on the side with more room."""
    at = (float(curve.index[-1]), float(curve.iloc[-1]))
    height = axes.transAxes.inverted().transform(axes.transData.transform(at))[1]
    axes.annotate(
        "recommended", at, (-2, -9 if height > 0.5 else 9), textcoords="offset points",
        ha="right", va="center", fontsize=8, color=_BLUE,
    )  # fmt: skip


def _parity(sweep: SweepResults, steps: pd.DataFrame) -> Plot:
    """Draw the losses by precision, and the largest difference of each trial from fp32."""
    trials = sweep.trials[sweep.trials["parity"].notna()]
    names = ordered(trials["precision"])
    fixed = precision_strokes(sweep.trials["precision"])
    curves = _curves(steps, "loss")
    figure, axes = plots.new_axes(0.46 if curves else 0.865)
    if curves:
        losses, axes = axes, figure.add_axes((0.68, 0.135, 0.3, 0.78))
        precisions = dict(zip(sweep.trials["trial_id"], sweep.trials["precision"], strict=True))
        for name, curve in curves.items():
            look: dict[str, Any] = {"color": INK, "linestyle": "--", "zorder": 3}
            if name in precisions:
                look = {"color": fixed[precisions[name]].color}
            losses.plot(curve.index, curve, linewidth=0.9, **look)
        _frame(losses, curves, ticks=4)
        losses.set_title("loss")
    percents = {name: 100 * trials["parity"][trials["precision"] == name] for name in names}
    for place, (name, each) in enumerate(percents.items()):
        x = place + 0.07 * (np.arange(each.size) * 4 % 9 - 4)  # side by side, in no order
        axes.scatter(x, each, s=16, marker=MARKERS.get(name, "p"), color=fixed[name].color,
                     linewidth=0, alpha=0.8)  # fmt: skip
    plots.frame_y(axes, 100 * trials["parity"])
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_title("difference from fp32, %")
    worst = ", ".join(f"{name} {percent(each.max() / 100)}" for name, each in percents.items())
    left = "Left: the logged losses, colored by precision; fp32 references are dashed. Right: "
    caption = f"{left}the" if curves else "The"
    caption += " largest relative difference of a trial's losses from those of the fp32 trial"
    caption += f" with otherwise equal settings; at most: {worst}."
    title = f"Losses are at most {percent(trials['parity'].max())} from fp32's"
    return Plot(f"sweep-curves-{sweep.stage}", title, caption, figure)
