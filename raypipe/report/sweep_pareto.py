"""The Pareto front of a sweep: speed against memory and energy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from raypipe.report.formatting import number, quantity
from raypipe.report.plots import (
    HEIGHT,
    INK,
    MUTED,
    PAPER,
    WIDTH,
    Figure,
    finite,
    frame_y,
    needs_log,
    set_log,
)
from raypipe.report.sweep_trials import GROUP, MARKERS, Sweep, describe, ordered, precision_strokes


def pareto(sweep: Sweep) -> Figure | None:
    """Samples a second of every measured trial against its peak memory and its energy.

    None where no two settings can be compared: other axes, as the learning rate, cost nothing.
    """
    trials = sweep.trials[sweep.trials["status"] == "succeeded"]
    trials = trials.dropna(subset=["samples_per_s", "peak_bytes"])
    if len(trials[["micro_batch", "accumulation", *GROUP]].drop_duplicates()) < 2:
        return None
    size, unit = sweep.memory_unit
    trials = trials.assign(memory=trials["peak_bytes"] / size)
    panels = [("memory", f"peak {'GPU' if sweep.on_gpu else 'host'} memory, {unit}")]
    if finite(trials["energy_j_per_sample"]).size > 1:
        panels.append(("energy_j_per_sample", "energy, J a sample"))
    figure = Canvas(figsize=(WIDTH, HEIGHT))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    figure.subplots_adjust(0.115, 0.135, 0.98, 0.86, wspace=0.1)
    for axes, (column, label) in zip(grid, panels, strict=True):
        _panel(axes, trials.dropna(subset=[column]), column, sweep)
        axes.set_xlabel(label)
    frame_y(grid[0], trials["samples_per_s"])
    grid[0].set_title("samples per second")
    figure.draw_without_rendering()  # the places of the points are final
    for axes, (column, _) in zip(grid, panels, strict=True):
        _name(axes, trials, column, sweep)
    _legend(figure, trials)
    return Figure(
        f"sweep-pareto-{sweep.stage}",
        _title(trials, sweep),
        _caption(trials, sweep, len(panels)),
        figure,
        f"Sweep of {sweep.stage}",
    )


def _panel(axes: Axes, trials: pd.DataFrame, column: str, sweep: Sweep) -> None:
    """Every trial as a point, those of the front in full colour, and the panel's own front."""
    x, y = front(trials[column].to_numpy(float), trials["samples_per_s"].to_numpy(float))
    axes.plot(x, y, drawstyle="steps-post", color=MUTED, linewidth=1.0, label="_front", zorder=1)
    colours = precision_strokes(list(trials["precision"]))
    for key, group in trials.groupby(["precision", "gradient_checkpointing"]):
        precision, checkpointing = str(key[0]), bool(key[1])
        colour = colours[precision].colour
        for on_front, points in group.groupby(group["trial_id"].isin(sweep.front)):
            axes.scatter(
                points[column],
                points["samples_per_s"],
                s=30 if on_front else 18,
                marker=MARKERS.get(precision, "p"),
                facecolor=PAPER if checkpointing else colour,
                edgecolor=colour,
                linewidth=1.2,
                alpha=1.0 if on_front or not sweep.front else 0.6,
                zorder=3 if on_front else 2,
            )
    values = trials[column].to_numpy(float)
    if needs_log(values):
        set_log(axes.xaxis, float(values.min()), float(values.max()))
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: number(round(v, 9))))
    axes.margins(x=0.08)
    axes.grid(visible=True, axis="x")


def front(
    cost: NDArray[np.float64], gain: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The points that no other beats in both less cost and more gain, by rising cost."""
    order = np.lexsort((-gain, cost))
    best = np.maximum.accumulate(gain[order])
    rises = np.r_[True, np.diff(best) > 0]
    return cost[order][rises], gain[order][rises]


def _name(axes: Axes, trials: pd.DataFrame, column: str, sweep: Sweep) -> None:
    """A ring around the recommended trial, and its name where there is most room."""
    known = trials.dropna(subset=[column])
    found = known[known["trial_id"] == sweep.chosen]
    if found.empty:
        return
    at = (float(found[column].iloc[0]), float(found["samples_per_s"].iloc[0]))
    axes.scatter(*at, s=110, facecolor="none", edgecolor=INK, linewidth=1.4, zorder=4)
    text = describe(found.iloc[0]).replace("micro-batch ", "").replace("checkpointing", "ckpt.")
    size = np.array([4.4 * len(text), 9.0])  # points, as everything below
    scale = 72 / axes.figure.dpi
    low, high = np.array(axes.bbox.extents).reshape(2, 2) * scale
    points = axes.transData.transform(known[[column, "samples_per_s"]].to_numpy(float)) * scale
    ring = axes.transData.transform(at) * scale

    def room(shift: NDArray[np.float64]) -> tuple[bool, float]:
        """Whether the name is within the axes there, and how far the nearest point is."""
        centre = ring + shift
        inside = (centre - size / 2 > low - 2).all() and (centre + size / 2 < high + 2).all()
        gaps = np.maximum(np.abs(points - centre) - size / 2, 0)
        return bool(inside), round(float(np.hypot(*gaps.T).min()))

    aside = size[0] / 2 + 10
    places = [np.array([x, y]) for y in (0, 15, -15) for x in (aside, -aside, 0) if x or y]
    shift = max(places, key=room)
    axes.annotate(
        text, at, tuple(shift), textcoords="offset points", ha="center", va="center", fontsize=8
    )


def _legend(figure: Canvas, trials: pd.DataFrame) -> None:
    precisions = ordered(list(trials["precision"]))
    colours = precision_strokes(precisions)
    look: dict[str, Any] = {"linestyle": "", "markersize": 5.5, "markeredgewidth": 1.2}
    keys = [
        Line2D([], [], marker=MARKERS.get(p, "p"), color=colours[p].colour, label=p, **look)
        for p in precisions
    ]
    if trials["gradient_checkpointing"].nunique() > 1:
        keys.append(Line2D([], [], marker="o", color=INK, markerfacecolor="none",
                           label="checkpointing", **look))  # fmt: skip
    keys.append(Line2D([], [], color=MUTED, linewidth=1.0, label="front"))
    figure.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0.1, 1.0), ncols=len(keys), fontsize=7.5,
        handlelength=1.0, handletextpad=0.4, columnspacing=1.1, borderaxespad=0.3,
    )  # fmt: skip


def _title(trials: pd.DataFrame, sweep: Sweep) -> str:
    chosen = trials[trials["trial_id"] == sweep.chosen]
    if chosen.empty:
        return "Speed, memory and energy" if _has_energy(trials) else "Speed and memory"
    trial = chosen.iloc[0]
    share = 100 * trial["samples_per_s"] / trials["samples_per_s"].max()
    speed = "is the fastest" if share > 99.95 else f"reaches {share:.0f} % of the highest speed"
    return f"The recommendation {speed}, in {quantity(float(trial['peak_bytes']), 'B')}"


def _has_energy(trials: pd.DataFrame) -> bool:
    return bool(finite(trials["energy_j_per_sample"]).size > 1)


def _caption(trials: pd.DataFrame, sweep: Sweep, panels: int) -> str:
    caption = f"{len(trials)} trials; better is higher and further left. "
    caption += "Line: the fastest for at most so much memory"
    caption += " or energy." if panels > 1 else "."
    count = int(trials["trial_id"].isin(sweep.front).sum())
    if 0 < count < len(trials):
        beaten = "speed, memory and energy at once" if panels > 1 else "both at once"
        caption += f" In full colour: the {count} trials that no other beats in {beaten}."
    if (trials["trial_id"] == sweep.chosen).any():
        caption += " Ringed: the recommended one."
    return caption
