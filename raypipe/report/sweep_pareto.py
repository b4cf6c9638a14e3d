"""The Pareto front of a sweep: speed against quality, memory and energy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from raypipe.hardware import bytes_text
from raypipe.report import plots
from raypipe.report.formatting import number
from raypipe.report.plots import INK, MUTED, PAPER, Plot
from raypipe.report.sweep_trials import (
    GROUP,
    MARKERS,
    SweepResults,
    describe,
    ordered,
    point_name,
    precision_strokes,
)
from raypipe.stats import on_pareto_front


@dataclass(frozen=True)
class Panel:
    """A measure on the horizontal axis, and whether less of it is better."""

    column: str
    label: str
    less: bool = True

    @property
    def title(self) -> str:
        """The label with the direction that is better."""
        return f"\u2190 better   {self.label}" if self.less else f"{self.label}   better \u2192"


def pareto_plot(sweep: SweepResults) -> Plot | None:
    """Draw samples per second of every measured trial against its memory, energy and quality.

    None with fewer than two trials. Without a quality they must differ in settings that cost
    something: other axes, such as the learning rate, are free.
    """
    trials = sweep.trials[sweep.trials["status"] == "succeeded"]
    trials = trials.dropna(subset=["samples_per_s", "peak_bytes"])
    quality = _quality(trials, sweep)
    costs = trials if quality else trials[["micro_batch", "accumulation", *GROUP]].drop_duplicates()
    if len(costs) < 2:
        return None
    size, unit = sweep.memory_unit
    trials = trials.assign(memory=trials["peak_bytes"] / size)
    panels = [quality] if quality else []
    panels.append(Panel("memory", f"peak {'GPU' if sweep.on_gpu else 'host'} memory, {unit}"))
    if plots.finite(trials["energy_j_per_sample"]).size > 1:
        panels.append(Panel("energy_j_per_sample", "energy, J per sample"))
    figure = Figure(figsize=(plots.WIDTH, plots.HEIGHT))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(0.115, 0.135, 0.98, 0.86, wspace=0.1)
    for axes, panel in zip(grid, panels, strict=True):
        _panel(axes, trials.dropna(subset=[panel.column]), panel, sweep)
        axes.set_xlabel(panel.title)
    plots.frame_y(grid[0], trials["samples_per_s"])
    grid[0].set_title("samples per second (higher is better)")
    figure.draw_without_rendering()  # the positions of the points are final
    for axes, panel in zip(grid, panels, strict=True):
        _name(axes, trials, panel.column, sweep)
    _legend(figure, trials)
    caption = _caption(trials, sweep, panels)
    title = _title(trials, sweep, panels)
    return Plot(f"sweep-pareto-{sweep.stage}", title, caption, figure)


def _quality(trials: pd.DataFrame, sweep: SweepResults) -> Panel | None:
    """Return the measure of quality of a sweep that trains to the end; None without one."""
    if sweep.kind != "quality" or sweep.metric not in trials.columns:
        return None
    values = pd.to_numeric(trials[sweep.metric], errors="coerce")
    if plots.finite(values).size < 2:
        return None
    name = "training loss" if sweep.metric == "loss_final" else sweep.metric.replace("_", " ")
    return Panel(sweep.metric, name, less=sweep.mode == "min")


def _panel(axes: Axes, trials: pd.DataFrame, panel: Panel, sweep: SweepResults) -> None:
    """Draw every trial as a point, opaque on the sweep's front, and the front of this panel."""
    column, sign = panel.column, 1 if panel.less else -1
    cost, gain = trials[column].to_numpy(float), trials["samples_per_s"].to_numpy(float)
    x, y = front(sign * cost, gain)
    axes.plot(
        sign * x, y, drawstyle="steps-post", color=MUTED, linewidth=1.0, label="_front", zorder=1
    )
    fixed = precision_strokes(list(trials["precision"]))
    for key, group in trials.groupby(["precision", "gradient_checkpointing"]):
        precision, checkpointing = str(key[0]), bool(key[1])
        color = fixed[precision].color
        for on_front, points in group.groupby(group["trial_id"].isin(sweep.front)):
            axes.scatter(
                points[column],
                points["samples_per_s"],
                s=30 if on_front else 18,
                marker=MARKERS.get(precision, "p"),
                facecolor=PAPER if checkpointing else color,
                edgecolor=color,
                linewidth=1.2,
                alpha=1.0 if on_front or not sweep.front else 0.6,
                zorder=3 if on_front else 2,
            )
    values = trials[column].to_numpy(float)
    if plots.needs_log(values):
        plots.set_log(axes.xaxis, float(values.min()), float(values.max()))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        plots.write_numbers(axes.xaxis)
    axes.margins(x=0.08)
    axes.grid(visible=True, axis="x")


def front(
    cost: NDArray[np.float64], gain: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the points that no other beats in both cost and gain, by rising cost."""
    points = np.stack([cost, -gain], axis=1)
    cost, loss = np.unique(points[on_pareto_front(points)], axis=0).T
    return cost, -loss


def _name(axes: Axes, trials: pd.DataFrame, column: str, sweep: SweepResults) -> None:
    """Draw a ring around the recommended trial, and its name where there is most room."""
    known = trials.dropna(subset=[column])
    chosen = known[known["trial_id"] == sweep.chosen]
    if chosen.empty:
        return
    at = (float(chosen[column].iloc[0]), float(chosen["samples_per_s"].iloc[0]))
    axes.scatter(*at, s=110, facecolor="none", edgecolor=INK, linewidth=1.4, zorder=4)
    text = "recommended"
    if sweep.kind != "quality":
        name = describe(chosen.iloc[0]).replace("micro-batch ", "")
        text += f"\n{name.replace('checkpointing', 'ckpt.')}"
    lines = text.split("\n")
    size = np.array([4.4 * max(map(len, lines)), 10.0 * len(lines)])  # points, as all below
    scale = 72 / axes.figure.dpi
    low, high = np.array(axes.bbox.extents).reshape(2, 2) * scale
    points = axes.transData.transform(known[[column, "samples_per_s"]].to_numpy(float)) * scale
    ring = axes.transData.transform(at) * scale

    def room(shift: NDArray[np.float64]) -> tuple[bool, float]:
        """Return whether the name fits into the axes there, and the distance to the next point."""
        center = ring + shift
        inside = (center - size / 2 > low - 2).all() and (center + size / 2 < high + 2).all()
        gaps = np.maximum(np.abs(points - center) - size / 2, 0)
        return bool(inside), round(float(np.hypot(*gaps.T).min()))

    aside = size[0] / 2 + 10
    above = size[1] / 2 + 10
    places = [np.array([x, y]) for y in (0, above, -above) for x in (aside, -aside, 0) if x or y]
    shift = max(places, key=room)
    axes.annotate(
        text, at, tuple(shift), textcoords="offset points", ha="center", va="center", fontsize=8
    )


def _legend(figure: Figure, trials: pd.DataFrame) -> None:
    precisions = ordered(list(trials["precision"]))
    fixed = precision_strokes(precisions)
    look: dict[str, Any] = {"linestyle": "", "markersize": 5.5, "markeredgewidth": 1.2}
    keys = [
        Line2D([], [], marker=MARKERS.get(p, "p"), color=fixed[p].color, label=p, **look)
        for p in precisions
    ]
    if trials["gradient_checkpointing"].nunique() > 1:
        keys.append(Line2D([], [], marker="o", color=INK, markerfacecolor="none",
                           label="checkpointing", **look))  # fmt: skip
    keys.append(Line2D([], [], color=MUTED, linewidth=1.0, label="front"))
    plots.draw_legend(figure, keys)


def _title(trials: pd.DataFrame, sweep: SweepResults, panels: Sequence[Panel]) -> str:
    chosen = trials[trials["trial_id"] == sweep.chosen]
    if chosen.empty:
        measures = _listed(["speed", *_measures(panels)])
        return measures[0].upper() + measures[1:]
    trial = chosen.iloc[0]
    memory = bytes_text(float(trial["peak_bytes"]))
    if panels[0].column == sweep.metric:
        value, speed = number(float(trial[sweep.metric])), number(float(trial["samples_per_s"]))
        return f"The recommendation: {panels[0].label} {value} at {speed} samples/s, in {memory}"
    share = 100 * trial["samples_per_s"] / trials["samples_per_s"].max()
    speed = "is the fastest" if share > 99.95 else f"reaches {share:.0f} % of the highest speed"
    return f"The recommendation {speed}, in {memory}"


def _measures(panels: Sequence[Panel]) -> list[str]:
    words = {"memory": "memory", "energy_j_per_sample": "energy"}
    return [words.get(panel.column, "quality") for panel in panels]


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]])


def _caption(trials: pd.DataFrame, sweep: SweepResults, panels: Sequence[Panel]) -> str:
    words = _measures(panels)
    limits = " or ".join(word for word in words if word != "quality")
    caption = f"{len(trials)} trials. Line: the highest speed "
    caption += "at a quality that is at least as good, or " if "quality" in words else ""
    caption += f"within an amount of {limits}."
    count = int(trials["trial_id"].isin(sweep.front).sum())
    if 0 < count < len(trials):
        one = "trial" if count == 1 else "trials"
        measures = _listed(["speed", *_measures(panels)])
        caption += f" Opaque: the {count} {one} that no other beats in {measures} at once."
    if (trials["trial_id"] == sweep.chosen).any():
        caption += " Ringed: the recommended one."
        if sweep.kind == "quality" and (name := point_name(sweep)):
            caption += f" It has {name}."
    return caption
