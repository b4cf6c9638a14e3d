"""Figures of a sweep: what is fast, what it costs, what fits, how the trials learn."""

from __future__ import annotations

from collections.abc import Mapping
from math import floor, log2
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from raypipe.report.formatting import number, quantity
from raypipe.report.plots import GRID, INK, MUTED, WIDTH, Figure, finite, style
from raypipe.report.sweep_curves import curves
from raypipe.report.sweep_memory import memory
from raypipe.report.sweep_pareto import pareto
from raypipe.report.sweep_trials import Sweep, describe, ordered, short, sweeps

_BLUE, _RED = "#2856cf", "#e8265e"
#: what stands in a cell without a speed, the worst first, and what it means
_WORDS = {
    "out_of_memory": ("OOM", "ran out of memory"),
    "failed": ("failed", "ended with an error"),
    "interrupted": ("stopped", "ended before a speed was measured"),
    "skipped": ("skipped", "not run, the table of trials says why"),
}
_MOST_ROWS = 16


def sweep_figures(tables: Mapping[str, pd.DataFrame]) -> list[Figure]:
    """Speed, Pareto front, memory and learning curves, one figure each a swept stage.

    Reads ``trials``, ``recommendations``, ``pareto``, ``memory_fits`` and ``steps``. A figure
    with fewer than two things to compare is left out; without a sweep there is none.
    """
    drawn: list[Figure | None] = []
    with style():
        for sweep in sweeps(tables):
            drawn += [_speed(sweep), pareto(sweep), *memory(sweep), curves(sweep, tables)]
    return [figure for figure in drawn if figure is not None]


def _speed(sweep: Sweep) -> Figure | None:
    """Heat map of the speed: micro-batch down, precision across, a panel each checkpointing."""
    trials = sweep.trials[sweep.trials["micro_batch"].notna() & (sweep.trials["precision"] != "")]
    trials = trials.assign(row=_rows(trials["micro_batch"]))
    cells = dict(iter(trials.groupby(["gradient_checkpointing", "precision", "row"])))
    if len(cells) < 2:
        return None
    sizes = [list(group.unique()) for _, group in trials.groupby("row")["micro_batch"]]
    precisions = ordered(list(trials["precision"]))
    panels = sorted(trials["gradient_checkpointing"].unique())
    speeds = trials["samples_per_s"].dropna()
    height = 0.62 + max(0.235, 0.34 - 0.015 * len(sizes)) * len(sizes)
    figure = Canvas(figsize=(WIDTH, height))
    grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    left = 0.115 if all(len(of_row) == 1 for of_row in sizes) else 0.2
    right = min(0.985, left + 0.22 * len(precisions) * len(panels))
    figure.subplots_adjust(left, 0.06 / height, right, 1 - 0.53 / height, wspace=0.06)
    words: list[str] = []
    for axes, checkpointing in zip(grid, panels, strict=True):
        _empty_grid(axes, precisions, sizes)
        setting = f", checkpointing {'on' if checkpointing else 'off'}"
        axes.set_title("samples/s" + (setting if len(panels) > 1 else ""), pad=20)
        for x, precision in enumerate(precisions):
            for y in range(len(sizes)):
                cell = cells.get((checkpointing, precision, y))
                if cell is not None:
                    words += _draw_cell(axes, x, y, cell, speeds, sweep.chosen)
    grid[0].set_ylabel("micro-batch")
    caption, title = _words_of(sweep, trials, words)
    name, group = f"sweep-speed-{sweep.stage}", f"Sweep of {sweep.stage}"
    return Figure(name, title, caption, figure, group)


def _rows(sizes: pd.Series[float]) -> pd.Series[int]:
    """The row of each micro-batch: one a value or, of more than can be read, one an octave."""
    rows = sizes.map(lambda size: floor(log2(size))) if sizes.nunique() > _MOST_ROWS else sizes
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
) -> list[str]:
    """The best speed of a cell on its shade, or the word for why there is none, also returned."""
    box: dict[str, Any] = {"xy": (x - 0.47, y - 0.45), "width": 0.94, "height": 0.9}
    look: dict[str, Any] = {"color": INK}
    recommended = bool((cell["trial_id"] == chosen).any())
    best = cell["samples_per_s"].max()
    word = ""
    if np.isfinite(best):
        low, high = speeds.min(), speeds.max()
        share = (best - low) / (high - low) if high > low else 1.0
        axes.add_patch(Rectangle(**box, facecolor=_BLUE, alpha=0.06 + 0.5 * share, linewidth=0))
        text = quantity(float(best), "").replace(" ", "")
    else:
        word = next((status for status in _WORDS if (cell["status"] == status).any()), "failed")
        text = _WORDS[word][0]
        bad = word in {"out_of_memory", "failed"}
        if bad:
            axes.add_patch(Rectangle(**box, facecolor=_RED, alpha=0.16, linewidth=0))
        else:
            axes.add_patch(Rectangle(**box, facecolor="none", edgecolor=GRID, hatch="////", lw=0))
        look["color"] = INK if bad else MUTED
    if recommended:
        axes.add_patch(Rectangle(**box, facecolor="none", edgecolor=INK, linewidth=1.8, zorder=3))
        look["fontweight"] = "bold"
    axes.text(x, y, text, ha="center", va="center_baseline", fontsize=7.5, **look)
    return [word] if word else []


def _words_of(sweep: Sweep, trials: pd.DataFrame, words: list[str]) -> tuple[str, str]:
    """Caption and title."""
    drawn = ("gradient_checkpointing", "precision", "micro_batch")
    cell = {f"{sweep.stage}.training.{name}" for name in drawn}
    others = [short(key, sweep.stage) for key in sweep.axes if key not in cell]
    caption = "Samples a second"
    caption += f", the best over {' and '.join(others)}." if others else "."
    said = "; ".join(f"{word}: {why}" for status, (word, why) in _WORDS.items() if status in words)
    caption += f" {said[0].upper()}{said[1:]}." if said else ""
    if sweep.recommended is not None:
        caption += " Outlined: the recommended cell."
    if not finite(trials["samples_per_s"]).size:
        return caption, "No trial has measured a speed"
    fastest = trials.sort_values("samples_per_s", na_position="first").iloc[-1]
    speed = number(float(fastest["samples_per_s"]))
    return caption, f"Fastest: {describe(fastest)}, {speed} samples/s"
