"""Convergence curves of the studies: best value so far, and fraction of runs that came close."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from experiments.pabbo_lda.figures.optimizer_styles import LABELED, by_optimizer, name_of, runs_of
from experiments.pabbo_lda.study.convergence import NOISE
from raypipe.report.formatting import number
from raypipe.report.plots import (
    HEIGHT,
    MUTED,
    WIDTH,
    Plot,
    Stroke,
    finite,
    frame_y,
    label_lines,
)

_WITHIN = {NOISE: "within the noise", "1_percent": "within 1 %"}
#: columns of ``convergence`` whose distributions :func:`solved` draws, by target
SOLVED = {target: f"evaluations_beyond_start_to_{target}" for target in _WITHIN}
# more points than a curve has pixels
_POINTS = 2000
#: smallest excess that a figure distinguishes from zero, on its logarithmic axis
RESOLUTION = 1e-3


def _percent(excess: float) -> str:
    sign = "≤" if excess <= RESOLUTION else ""
    return f"{sign}{number(float(f'{100 * excess:.2g}'))} %"


@dataclass(frozen=True)
class Quantity:
    """A quantity that curves show: its column, and its name in figures.

    The axis is logarithmic where the values span more than the factor ``log_from``.
    """

    column: str
    name: str
    axis: str
    caption: str
    group: str
    log_from: float
    text: Callable[[float], str]


BEST = Quantity(
    column="best_value",
    name="best",
    axis="lowest value so far",
    caption="Lowest value found",
    group="Best value",
    log_from=3,
    text=number,
)
EXCESS = Quantity(
    column="excess",
    name="excess",
    axis="lowest value so far, above the best known",
    caption="Excess of the lowest value over the best one that any study found for the corpus "
    f"and seed (down to {_percent(RESOLUTION)}),",
    group="Distance to the best known",
    log_from=2,
    text=_percent,
)


def best_of(table: pd.DataFrame, at: str, column: str = "best_value") -> pd.DataFrame:
    """Return the best so far of one optimizer: one row per point of ``at``, one column per run.

    A finished run carries its best forward. A run without any finite value is left out, and so are
    the points before every other run has one. If there are more points than a figure can
    distinguish (times differ in every run), they are thinned evenly by rank.
    """
    known = table[np.isfinite(table["best_value"].astype(float)) & table[column].notna()]
    known = known.sort_values("evaluation")
    series = {run: one.groupby(at)[column].last() for run, one in known.groupby("run")}
    points = np.unique(known[at])
    if len(points) > _POINTS:
        points = points[np.linspace(0, len(points) - 1, _POINTS).astype(int)]
    at_points = {run: one.reindex(points, method="ffill") for run, one in series.items()}
    wide = pd.DataFrame(at_points).astype(float)
    if at == "evaluation":
        wide = wide.reindex(range(1, int(table[at].max()) + 1))
    return wide.ffill().dropna()


def _start(table: pd.DataFrame) -> int:
    """Return the number of evaluations of the start that all studies share; 0 if they do not."""
    studies = [study for _, study in table.groupby(["optimizer", "run"])]
    first = [study[study["batch"] == study["batch"].min()] for study in studies]
    shared = {frozenset(batch["T"]) for batch in first}
    return len(first[0]) if len(shared) == 1 and len(first[0]) > 1 else 0


def _curve(axes: Axes, best: pd.DataFrame, name: str, stroke: Stroke, end: float) -> None:
    """Draw median and interquartile band over runs; dotted where all runs are carried forward."""
    band = best.quantile([0.25, 0.5, 0.75], axis=1).T
    # A step curve needs only the points where it moves, and its ends.
    moves = band.ne(band.shift()).any(axis=1)
    moves.iloc[-1] = True
    moves.loc[band.index[band.index <= end].max()] = True
    band = band[moves]
    x = band.index.to_numpy(float)
    color, line = stroke
    look: dict[str, Any] = {"color": color, "drawstyle": "steps-post"}
    own, rest = band[x <= end], band[x >= x[x <= end].max()]
    axes.plot(own.index, own[0.5], linestyle=line, label=name, **look)
    if len(rest) > 1:
        axes.plot(rest.index, rest[0.5], linestyle=":", linewidth=1.1, label="_carried", **look)
    if best.shape[1] > 1:
        axes.fill_between(
            x, band[0.25], band[0.75], step="post", color=color, alpha=0.12, linewidth=0
        )


def _curves(quantity: Quantity, table: pd.DataFrame, at: str) -> tuple[Figure, Axes, str]:
    """Draw the curves of one corpus over the column ``at``; the text is for the caption."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_axes(LABELED)
    start, last = _start(table), float(table[at].max())
    ends: list[tuple[float, str, Stroke]] = []
    shown: list[float] = []  # values that the y axis must show: from the end of the start on
    most = 0
    for name, group, stroke in by_optimizer(table):
        best = best_of(group, at, quantity.column)
        if best.empty:
            continue
        most = max(most, best.shape[1])
        best = best.reindex(best.index.union([last])).ffill()
        _curve(axes, best, name, stroke, float(group[at].max()))
        beyond = best_of(group, "evaluation", quantity.column).loc[max(1, start) :]
        shown.extend(beyond.quantile([0.25, 0.75], axis=1).to_numpy().ravel())
        final = float(np.median(best.loc[last]))
        text = quantity.text(final if abs(final) >= 1 else float(f"{final:.3g}"))  # has room
        ends.append((final, f"{name_of(name)}  {text}", stroke))
    axes.set_title(quantity.axis)
    frame_y(axes, shown, ratio=quantity.log_from)
    if quantity.text is not number:  # powers of ten are kept
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: quantity.text(value)))
    label_lines(axes, ends)
    note = f", median of {runs_of(most)} with the interquartile band." if most > 1 else "."
    if float(finite(table[quantity.column]).max()) > axes.get_ylim()[1]:
        note += " The first, far higher values are cut off."
    return figure, axes, note


def by_evaluation(
    quantity: Quantity, shaded: Mapping[str, float], dataset: str, table: pd.DataFrame
) -> Plot:
    """Draw a quantity of one corpus by evaluation, with shaded start and noise.

    ``shaded`` is the largest value of the quantity within the noise, of each corpus with one.
    """
    last, start = int(table["evaluation"].max()), _start(table)
    figure, axes, note = _curves(quantity, table, "evaluation")
    if 0 < start < last:
        axes.axvspan(1, start, color=MUTED, alpha=0.09, linewidth=0, label="_start")
        axes.annotate(
            "start",
            (1, 0),
            (4, 4),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            color=MUTED,
            fontsize=7.5,
        )
        note += f" The first {start} evaluations (shaded) are the start of all optimizers."
    if (noise := shaded.get(dataset)) is not None:
        axes.axhspan(
            axes.get_ylim()[0], noise, color=MUTED, alpha=0.12, linewidth=0, label="_noise"
        )
        note += f" Shaded below {quantity.text(noise)}: within the noise of the best known."
    axes.set_xlim(1, max(2, last))
    axes.set_xlabel("evaluation (distinct points)")
    if table.groupby("optimizer")["evaluation"].max().nunique() > 1:
        note += " Dotted: the studies have ended and their best is carried forward."
    caption = f"{quantity.caption} after each evaluation{note}"
    name = f"{quantity.name}_by_evaluation-{dataset}"
    return Plot(name, dataset, caption, figure, f"{quantity.group} by evaluation")


def by_time(quantity: Quantity, dataset: str, table: pd.DataFrame) -> Plot:
    """Draw a quantity of one corpus by the summed CPU time of a study's evaluations."""
    longest = float(table["cpu_s"].max())
    if longest >= 2 * 3600:
        scale, unit = 3600, "h"
    else:
        scale, unit = (60, "min") if longest >= 120 else (1, "s")
    figure, axes, note = _curves(quantity, table.assign(elapsed=table["cpu_s"] / scale), "elapsed")
    axes.set_xlim(0, longest / scale or 1)
    axes.set_xlabel(f"CPU time of LDA evaluations, {unit}")
    caption = f"{quantity.caption} by the summed CPU time of a study's evaluations{note}"
    name = f"{quantity.name}_by_time-{dataset}"
    return Plot(name, dataset, caption, figure, f"{quantity.group} by time")


def solved(target: str, dataset: str, table: pd.DataFrame) -> Plot:
    """Draw the fraction of runs that came close, by evaluations after the start.

    ``target`` is a key of :data:`SOLVED`.

    An empirical distribution with censored runs: the data profile of Moré and Wild (2009,
    doi:10.1137/080724083), section 2.2, with a run as the problem and one evaluation as the unit.
    """
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_axes(LABELED)
    last = max(1.0, float((table["evaluations"] - table["start_evaluations"]).max()))
    ends: list[tuple[float, float, tuple[float, str, Stroke]]] = []
    for name, group, stroke in by_optimizer(table):
        needed = np.sort(finite(group[SOLVED[target]]))
        x = np.concatenate([[0.0], needed, [last]])
        share = np.concatenate([np.arange(needed.size + 1), [needed.size]]) / len(group)
        color, line = stroke
        axes.plot(x, share, color=color, linestyle=line, label=name, drawstyle="steps-post")
        label = (float(share[-1]), f"{name_of(name)}  {100 * share[-1]:.0f} %", stroke)
        ends.append((label[0], -float(needed.sum()), label))
    axes.set_xlim(0, last)
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
    # of equal fractions, the first to get there has the top label
    label_lines(axes, [label for _, _, label in sorted(ends, key=lambda end: end[:2])])
    within = _WITHIN[target]
    axes.set_title(f"runs {within} of the best known value")
    axes.set_xlabel("evaluations after the start")
    most = int(table.groupby("optimizer").size().max())
    caption = f"Fraction of {runs_of(most)} of each optimizer {within} of the best known value"
    caption += " of the corpus and seed, by evaluations after the start."
    name = f"solved-{dataset}" if target != NOISE else f"solved_{target}-{dataset}"
    return Plot(name, dataset, caption, figure, f"Runs {within}")
