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

from raypipe.report.formatting import number
from raypipe.report.plots import (
    HEIGHT,
    INK,
    MUTED,
    WIDTH,
    Plot,
    draw_legend,
    finite,
    frame_steps,
    frame_y,
    new_axes,
    rows,
)
from raypipe.report.sweep_trials import MARKERS, Sweep, ordered, point_name, precision_strokes
from raypipe.report.training import running_median

_BLUE = "#2856cf"
_MAX_POINTS = 100  # per line


def curves_plot(sweep: Sweep, tables: Mapping[str, pd.DataFrame]) -> Plot | None:
    """Draw learning curves for the kind quality; for the kind systems the parity of the losses.

    None with fewer than two curves or, for the kind systems, without a trial that has a reference.
    """
    columns = ["trial_id", "step", "loss"]
    steps = rows(tables, "steps", columns)
    steps = pd.DataFrame(columns=columns) if steps is None else steps
    steps = steps[steps["trial_id"].isin(sweep.all_trials["trial_id"])]
    if sweep.kind == "quality":
        return _learning(sweep, steps)
    return _parity(sweep, steps) if finite(sweep.trials["parity"]).size else None


def _learning(sweep: Sweep, steps: pd.DataFrame) -> Plot | None:
    states = sweep.trials.set_index("trial_id")["status"]
    population = "parent" in sweep.trials and sweep.trials["parent"].notna().any()
    if population:
        steps, states = _with_ancestors(steps, sweep.trials)
    column = sweep.metric if sweep.metric in steps.columns else "loss"
    lines = _lines(steps, column)
    if len(lines) < 2:
        return None
    figure, axes = new_axes(0.85, 0.735)
    stopped = 0
    for name, line in lines.items():
        chosen = name == sweep.chosen
        look: dict[str, Any] = {"color": _BLUE if chosen else MUTED, "zorder": 3 if chosen else 2}
        alpha = 1.0 if chosen else (0.45 if len(lines) < 60 else 0.2)
        axes.plot(line.index, line, linewidth=2.0 if chosen else 0.8, alpha=alpha, **look)
        if states.get(name) != "succeeded":
            stopped += 1
            mark = "o" if states.get(name) == "interrupted" else "X"
            axes.plot(line.index[-1:], line.iloc[-1:], marker=mark, markersize=3.6,
                      markeredgewidth=0, **look)  # fmt: skip
    _frame(axes, lines)
    axes.set_title(_measure(column))
    _legend(figure, sweep, lines, states)
    caption = f"{len(lines)} trials"
    caption += ", running median of the logged loss. " if column == "loss" else ". "
    caption += f"{stopped} ended early, where their marks are. " if stopped else ""
    if population:
        caption += "Each curve begins with those of the trials whose weights it continued. "
    settings = point_name(sweep)
    caption += f"Recommended: {settings}." if settings else ""
    chosen_line = lines.get(sweep.chosen)
    title = f"{_measure(column).capitalize()} of all trials"
    if chosen_line is not None:
        end = number(float(chosen_line.iloc[-1]))
        title = f"The recommended trial ends at {_measure(column)} {end}"
    return Plot(f"sweep-curves-{sweep.stage}", title, caption.strip(), figure)


def _with_ancestors(
    steps: pd.DataFrame, trials: pd.DataFrame
) -> tuple[pd.DataFrame, pd.Series[str]]:
    """Return the steps of each last trial of a population, preceded by those of its ancestors.

    Also return the status of each: a trial that was abandoned before the end was interrupted.
    """
    named = trials.set_index("trial_id")
    parents = named["parent"].dropna().to_dict()
    leaves = named.index.difference(pd.Index(list(parents.values())))
    curves = []
    for leaf in leaves:
        line = [leaf]
        while line[-1] in parents:
            line.append(parents[line[-1]])
        curves.append(steps[steps["trial_id"].isin(line)].assign(trial_id=leaf))
    early = (named["status"] == "succeeded") & (named["until"] < named["until"].max())
    return pd.concat(curves), named["status"].mask(early, "interrupted").loc[leaves]


def _measure(column: str) -> str:
    return "training loss" if column == "loss" else column.replace("_", " ")


def _lines(steps: pd.DataFrame, column: str) -> dict[str, pd.Series[float]]:
    """Return the values of each trial by step; of the loss its running median."""
    known = steps[np.isfinite(pd.to_numeric(steps[column], errors="coerce").astype(float))]
    lines = {}
    for name, trial in known.sort_values("step").groupby("trial_id", sort=False):
        line = trial.set_index("step")[column].astype(float)
        line = running_median(line) if column == "loss" else line
        places = np.unique(np.linspace(0, len(line) - 1, _MAX_POINTS).round().astype(int))
        lines[str(name)] = line.iloc[places]
    return lines


def _frame(axes: Axes, lines: Mapping[str, pd.Series[float]]) -> None:
    """Frame both axes; the highest values of the worst trials may be outside."""
    ends = [float(line.max()) for line in lines.values()]
    low = min(float(line.min()) for line in lines.values())
    frame_y(axes, [low, float(np.quantile(ends, 0.9, method="lower"))])
    frame_steps(axes, 1.01 * max(float(line.index[-1]) for line in lines.values()))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _legend(
    figure: Figure,
    sweep: Sweep,
    lines: Mapping[str, pd.Series[float]],
    states: pd.Series[str],
) -> None:
    keys = []
    if sweep.chosen in lines:
        keys.append(Line2D([], [], color=_BLUE, linewidth=2.0, label="recommended"))
    present = {states.get(name) for name in lines if name != sweep.chosen}
    if "succeeded" in present:
        keys.append(Line2D([], [], color=MUTED, linewidth=0.8, label="to the end"))
    for status, mark, label in (("interrupted", "o", "stopped early"), ("failed", "X", "failed")):
        if status in present:
            keys.append(Line2D([], [], color=MUTED, linewidth=0.8, marker=mark, markersize=4,
                               markeredgewidth=0, label=label))  # fmt: skip
    draw_legend(figure, keys)


def _parity(sweep: Sweep, steps: pd.DataFrame) -> Plot:
    """Draw the losses by precision, and the largest difference of each trial from fp32."""
    trials = sweep.trials[sweep.trials["parity"].notna()]
    names = ordered(trials["precision"])
    fixed = precision_strokes(names)
    percent = 100 * trials["parity"]
    figure = Figure(figsize=(WIDTH, HEIGHT))
    lines = _lines(steps, "loss")
    if lines:
        _losses(figure.add_axes((0.115, 0.135, 0.46, 0.78)), sweep, lines)
    axes = figure.add_axes((0.68, 0.135, 0.3, 0.78) if lines else (0.115, 0.135, 0.865, 0.78))
    for place, name in enumerate(names):
        mine = percent[trials["precision"] == name].to_numpy()
        beside = place + 0.07 * (
            np.arange(mine.size) * 4 % 9 - 4
        )  # side by side, in no particular order
        axes.scatter(beside, mine, s=16, marker=MARKERS.get(name, "p"),
                     color=fixed[name].color, linewidth=0, alpha=0.8)  # fmt: skip
    frame_y(axes, percent)
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_title("difference from fp32, %")
    worst = ", ".join(
        f"{name} {percent[trials['precision'] == name].max():.2g} %" for name in names
    )
    left = "Left: the logged losses, colored by precision; fp32 references are dashed. Right: "
    caption = f"{left}the" if lines else "The"
    caption += " largest relative difference of a trial's losses from those of the fp32 trial"
    caption += f" with otherwise equal settings; at most: {worst}."
    title = f"Losses are at most {percent.max():.2g} % from fp32's"
    return Plot(f"sweep-curves-{sweep.stage}", title, caption, figure)


def _losses(axes: Axes, sweep: Sweep, lines: Mapping[str, pd.Series[float]]) -> None:
    precisions = sweep.trials.set_index("trial_id")["precision"]
    fixed = precision_strokes(precisions)
    for name, line in lines.items():
        if name in precisions.index:
            axes.plot(line.index, line, color=fixed[precisions[name]].color, linewidth=0.9)
        else:
            axes.plot(line.index, line, color=INK, linewidth=0.9, linestyle="--", zorder=3)
    _frame(axes, lines)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_title("loss")
