"""The heat map of a sweep's speed: micro-batch by precision, a panel per checkpointing setting."""

from __future__ import annotations

from math import floor, log2
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from raypipe.report.formatting import number, quantity
from raypipe.report.plots import GRID, INK, MUTED, WIDTH, Plot, finite
from raypipe.report.sweep_trials import SweepResults, describe, ordered, short

_BLUE, _RED = "#2856cf", "#e8265e"
#: the word in a cell without a speed, the worst status first, and its explanation
_WORDS = {
    "out_of_memory": ("OOM", "ran out of memory"),
    "failed": ("failed", "ended with an error"),
    "interrupted": ("stopped", "ended before a speed was measured"),
    "skipped": ("skipped", "not run, see the table of trials"),
}
_MAX_ROWS = 16


def speed_plot(sweep: SweepResults) -> Plot | None:
    """Draw the best speed of each micro-batch and precision, or why there is none.

    None if there are fewer than two cells.
    """
    trials = sweep.trials[sweep.trials["micro_batch"].notna() & (sweep.trials["precision"] != "")]
    trials = trials.assign(row=_rows(trials["micro_batch"]))
    cells = dict(iter(trials.groupby(["gradient_checkpointing", "precision", "row"])))
    if len(cells) < 2:
        return None
    sizes = [list(group.unique()) for _, group in trials.groupby("row")["micro_batch"]]
    precisions = ordered(list(trials["precision"]))
    panels = sorted(trials["gradient_checkpointing"].unique())
    speeds = trials["samples_per_s"].dropna()
    height = max(1.55, 0.62 + max(0.235, 0.34 - 0.015 * len(sizes)) * len(sizes))
    figure = Figure(figsize=(WIDTH, height))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    left = 0.115 if all(len(of_row) == 1 for of_row in sizes) else 0.2
    right = min(0.985, left + 0.22 * len(precisions) * len(panels))
    figure.subplots_adjust(left, 0.06 / height, right, 1 - 0.53 / height, wspace=0.06)
    words: set[str] = set()
    for axes, checkpointing in zip(grid, panels, strict=True):
        _empty_grid(axes, precisions, sizes)
        setting = f", checkpointing {'on' if checkpointing else 'off'}"
        axes.set_title("samples/s" + (setting if len(panels) > 1 else ""), pad=20)
        for x, precision in enumerate(precisions):
            for y in range(len(sizes)):
                cell = cells.get((checkpointing, precision, y))
                if cell is not None:
                    words.add(_draw_cell(axes, x, y, cell, speeds, sweep.chosen))
    grid[0].set_ylabel("micro-batch")
    return Plot(f"sweep-speed-{sweep.stage}", _title(trials), _caption(sweep, words), figure)


def _rows(sizes: pd.Series[float]) -> pd.Series[int]:
    """Return the row of each micro-batch: one per value or, of many values, one per octave."""
    rows = sizes.map(lambda size: floor(log2(size))) if sizes.nunique() > _MAX_ROWS else sizes
    return rows.rank(method="dense").astype(int) - 1


def _empty_grid(axes: Axes, precisions: list[str], sizes: list[list[float]]) -> None:
    axes.set(xlim=(-0.5, len(precisions) - 0.5), ylim=(len(sizes) - 0.5, -0.5))
    axes.set_xticks(range(len(precisions)), precisions)
    axes.set_yticks(range(len(sizes)), [_range(of_row) for of_row in sizes])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)


def _range(sizes: list[float]) -> str:
    low, high = min(sizes), max(sizes)
    return f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"


def _draw_cell(
    axes: Axes, x: int, y: int, cell: pd.DataFrame, speeds: pd.Series[float], chosen: str
) -> str:
    """Draw the best speed of a cell on its shade, or a word; return the status of the word."""
    box: dict[str, Any] = {"xy": (x - 0.47, y - 0.45), "width": 0.94, "height": 0.9}
    look: dict[str, Any] = {"color": INK}
    recommended = bool((cell["trial_id"] == chosen).any())
    best = cell["samples_per_s"].max()
    status = ""
    if np.isfinite(best):
        low, high = speeds.min(), speeds.max()
        share = (best - low) / (high - low) if high > low else 1.0
        axes.add_patch(Rectangle(**box, facecolor=_BLUE, alpha=0.06 + 0.5 * share, linewidth=0))
        text = quantity(float(best), "").replace(" ", "")
    else:
        status = next((status for status in _WORDS if (cell["status"] == status).any()), "failed")
        text = _WORDS[status][0]
        if status in {"out_of_memory", "failed"}:
            axes.add_patch(Rectangle(**box, facecolor=_RED, alpha=0.16, linewidth=0))
        else:
            axes.add_patch(Rectangle(**box, facecolor="none", edgecolor=GRID, hatch="////", lw=0))
            look["color"] = MUTED
    if recommended:
        axes.add_patch(Rectangle(**box, facecolor="none", edgecolor=INK, linewidth=1.8, zorder=3))
        look["fontweight"] = "bold"
    axes.text(x, y, text, ha="center", va="center_baseline", fontsize=7.5, **look)
    return status


def _caption(sweep: SweepResults, words: set[str]) -> str:
    drawn = ("gradient_checkpointing", "precision", "micro_batch")
    keys = {f"{sweep.stage}.training.{name}" for name in drawn}
    others = [short(key, sweep.stage) for key in sweep.axes if key not in keys]
    caption = "Samples per second"
    caption += f", the best over {' and '.join(others)}." if others else "."
    text = "; ".join(f"{word}: {why}" for status, (word, why) in _WORDS.items() if status in words)
    caption += f" {text[0].upper()}{text[1:]}." if text else ""
    return caption + (" Outlined: the recommended cell." if sweep.recommended is not None else "")


def _title(trials: pd.DataFrame) -> str:
    if not finite(trials["samples_per_s"]).size:
        return "No trial has measured a speed"
    fastest = trials.sort_values("samples_per_s", na_position="first").iloc[-1]
    return f"Fastest: {describe(fastest)}, {number(float(fastest['samples_per_s']))} samples/s"
