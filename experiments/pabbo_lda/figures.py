"""Figures of the report: convergence by evaluation and by time, and final values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from raypipe import formatting, plots

Tables = Mapping[str, pd.DataFrame]

#: names of the optimizers and methods in figures, in the order of their colors
NAMES = {
    "ga": "GA",
    "es": "ES",
    "pabbo_small": "PABBO small",
    "pabbo_large": "PABBO large",
    "sabbo": "SABBO",
    "random": "random",
    "tpe": "TPE",
    "golden_section": "golden section",
    "pabbo_curves": "PABBO curves",
    "bisect": "bisection",
    "gp_ei": "GP with EI",
    "pfn_ei": "PFN with EI",
    "cma_es": "CMA-ES",
    "shipped": "shipped model",
    "preferential_gp": "preferential GP",
}
# more points than a curve has pixels
_POINTS = 2000
#: most boxes whose names have room below them
_SIDE_BY_SIDE = 7


def strokes_of(present: Sequence[str]) -> dict[str, plots.Stroke]:
    """Return the stroke of each optimizer, the same for every selection of optimizers."""
    return plots.strokes([*NAMES, *sorted(set(present) - set(NAMES))])


def by_optimizer(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame, plots.Stroke]]:
    """Return the optimizers of a table in the fixed order, each with its rows and its stroke."""
    groups = {str(name): group for name, group in table.groupby("optimizer", sort=True)}
    fixed = strokes_of(list(groups))
    return [(name, groups[name], fixed[name]) for name in fixed if name in groups]


def name_of(optimizer: str) -> str:
    """Return the name of an optimizer in figures."""
    return NAMES.get(optimizer, optimizer.replace("_", " "))


def runs_of(count: int) -> str:
    """Return a number of runs in words."""
    return "1 run" if count == 1 else f"{count} runs"


def figures(tables: Tables) -> list[plots.Plot]:
    """Return all figures that the tables allow, by kind and then by corpus.

    A missing or empty table, or a corpus without a finite value, leaves its figures out.
    """
    drawn: list[plots.Plot] = []
    with plots.style():
        if (history := plots.rows(tables, "study_history")) is not None:
            for draw in (_by_evaluation, _by_time):
                drawn += [draw(name, table) for name, table in _known(history, "best_value")]
        if (summary := plots.rows(tables, "summary")) is not None:
            drawn += [_bars(name, table) for name, table in _known(summary, "mean")]
        if (studies := plots.rows(tables, "studies")) is not None:
            values = studies["best_perplexity"].astype(float)
            if "best_coherence" in studies:  # as an optimizer sees it: lower is better
                values = values.fillna(-studies["best_coherence"].astype(float))
            studies = studies.assign(value=values)
            drawn += [_boxes(name, table) for name, table in _known(studies, "value")]
    return drawn


def _known(table: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield each corpus with a finite value, in the table's order of corpora."""
    for name, group in table.groupby("dataset", sort=False):
        if plots.finite(group[column]).size:
            yield str(name), group


def best_of(table: pd.DataFrame, at: str) -> pd.DataFrame:
    """Return the best so far of one optimizer: one row per point of ``at``, one column per run.

    A finished run carries its best forward. A run without any finite value is left out, and so are
    the points before every other run has one. If there are more points than a figure can
    distinguish (times differ in every run), they are thinned evenly by rank.
    """
    known = table[np.isfinite(table["best_value"].astype(float))].sort_values("evaluation")
    series = {run: one.groupby(at)["best_value"].last() for run, one in known.groupby("run")}
    points = np.unique(known[at])
    if len(points) > _POINTS:
        points = points[np.linspace(0, len(points) - 1, _POINTS).astype(int)]
    at_points = {run: one.reindex(points, method="ffill") for run, one in series.items()}
    return pd.DataFrame(at_points).astype(float).ffill().dropna()


def _curves(table: pd.DataFrame, at: str) -> tuple[Figure, Axes, str]:
    """Draw the lowest value of one corpus over the column ``at``; the text is for the caption."""
    figure = Figure(figsize=(plots.WIDTH, plots.HEIGHT))
    axes = figure.add_axes((0.13, 0.155, 0.5, 0.76))  # room on the right for names and values
    last, start, most = float(table[at].max()), _start(table), 0
    ends: list[tuple[float, str, plots.Stroke]] = []
    shown: list[float] = []  # values that the y axis must show: from the end of the start on
    for name, group, (color, line) in by_optimizer(table):
        best = best_of(group, at)
        if best.empty:
            continue
        most = max(most, best.shape[1])
        best = best.reindex(best.index.union([last])).ffill()
        band = best.quantile([0.25, 0.5, 0.75], axis=1).T
        # a step curve needs only the points where it moves, and its end
        band = band[band.ne(band.shift()).any(axis=1) | (band.index == last)]
        x, step = band.index, "steps-post"
        axes.plot(x, band[0.5], color=color, linestyle=line, drawstyle=step, label=name)
        if best.shape[1] > 1:
            axes.fill_between(
                x, band[0.25], band[0.75], step="post", color=color, alpha=0.12, linewidth=0
            )
        beyond = best_of(group, "evaluation").loc[max(1, start) :]
        shown.extend(beyond.quantile([0.25, 0.75], axis=1).to_numpy().ravel())
        final = float(np.median(best.loc[last]))
        text = formatting.number(final if abs(final) >= 1 else float(f"{final:.3g}"))  # has room
        ends.append((final, f"{name_of(name)}  {text}", plots.Stroke(color, line)))
    axes.set_title("lowest value so far")
    plots.frame_y(axes, shown, ratio=3)
    plots.label_lines(axes, ends)
    note = f", median of {runs_of(most)} with the interquartile band." if most > 1 else "."
    if float(plots.finite(table["best_value"]).max()) > axes.get_ylim()[1]:
        note += " The first, far higher values are cut off."
    if table.groupby("optimizer")["evaluation"].max().nunique() > 1:
        note += " A study that has ended carries its best forward."
    return figure, axes, note


def _start(table: pd.DataFrame) -> int:
    """Return the number of evaluations of the start that all studies share; 0 if they do not."""
    studies = [study for _, study in table.groupby(["optimizer", "run"])]
    first = [study[study["batch"] == study["batch"].min()] for study in studies]
    shared = {frozenset(batch["T"]) for batch in first}
    return len(first[0]) if len(shared) == 1 and len(first[0]) > 1 else 0


def _by_evaluation(dataset: str, table: pd.DataFrame) -> plots.Plot:
    """Draw the lowest value of one corpus by evaluation, with a shaded start."""
    last, start = int(table["evaluation"].max()), _start(table)
    figure, axes, note = _curves(table, "evaluation")
    if 0 < start < last:
        axes.axvspan(1, start, color=plots.MUTED, alpha=0.09, linewidth=0, label="_start")
        note += f" The first {start} evaluations (shaded) are the start of all optimizers."
    axes.set_xlim(1, max(2, last))
    axes.set_xlabel("evaluation (distinct points)")
    caption = f"Lowest value found after each evaluation{note}"
    return plots.Plot(
        f"best_by_evaluation-{dataset}", dataset, caption, figure, "Best by evaluation"
    )


def _by_time(dataset: str, table: pd.DataFrame) -> plots.Plot:
    """Draw the lowest value of one corpus by the summed CPU time of a study's evaluations."""
    longest = float(table["cpu_s"].max())
    units = {"h": 3600, "min": 60, "s": 1}
    unit = next((unit for unit, seconds in units.items() if longest >= 2 * seconds), "s")
    elapsed = table["cpu_s"] / units[unit]
    figure, axes, note = _curves(table.assign(elapsed=elapsed), "elapsed")
    axes.set_xlim(0, float(elapsed.max()) or 1)
    axes.set_xlabel(f"CPU time of LDA evaluations, {unit}")
    caption = f"Lowest value found by the summed CPU time of a study's evaluations{note}"
    return plots.Plot(f"best_by_time-{dataset}", dataset, caption, figure, "Best by time")


def _bars(dataset: str, table: pd.DataFrame) -> plots.Plot:
    """Draw mean and standard deviation of final values: bars from zero, or points on a log axis."""
    known = np.isfinite(table["mean"].astype(float))
    lost = ", ".join(name_of(name) for name in table.loc[~known, "optimizer"])
    table = table[known].sort_values("mean", ascending=False, kind="stable")
    figure = Figure(figsize=(plots.WIDTH, max(1.6, 0.75 + 0.34 * len(table))))
    bottom = 0.47 / figure.get_figheight()
    axes = figure.add_axes((0.24, bottom, 0.5, 0.93 - bottom))
    fixed = strokes_of(list(table["optimizer"]))
    colors = [fixed[name].color for name in table["optimizer"]]
    y, mean = np.arange(len(table)), table["mean"].to_numpy(float)
    std = np.nan_to_num(table["std"].to_numpy(float), nan=0.0, posinf=0.0)
    logarithmic = plots.needs_log(mean, 20)
    # On a log axis, where a deviation can exceed the mean, its bar ends at the best run.
    below = np.minimum(std, mean - table["min"].to_numpy(float)) if logarithmic else std
    if logarithmic:
        plots.set_log(axes.xaxis, float(mean.min()), float(mean.max()))
        axes.scatter(mean, y, color=colors)
    else:
        axes.barh(y, mean, height=0.62, color=colors)
        # negative coherence is below zero
        ends = np.nanmin(mean - std) if np.nanmin(mean) < 0 else 0.0, np.nanmax(mean + std)
        axes.set_xlim(1.03 * float(ends[0]), 1.03 * max(0.0, float(ends[1])))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: formatting.number(value)))
    bars = np.where(std > 0, [below, std], np.nan)
    bar_style: dict[str, Any] = {"ecolor": plots.INK, "elinewidth": 1.0, "capsize": 2.5}
    axes.errorbar(mean, y, xerr=bars, fmt="none", **bar_style)
    for place, m, s, n in zip(y, mean, std, table["runs"], strict=True):
        text = formatting.plus_minus(m, s) if n > 1 else formatting.number(m)
        axes.text(1.03, float(place), text, transform=axes.get_yaxis_transform(), va="center")
    axes.set_ylim(-0.6, len(table) - 0.4)
    axes.set_yticks(y, [name_of(name) for name in table["optimizer"]])
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("final best value")
    most = int(table["runs"].max())
    caption = f"Final best value of each optimizer, lower is better; {runs_of(most)}"
    caption += ", mean ± standard deviation." if most > 1 else "."
    if logarithmic:
        caption += " Logarithmic axis: points, not bars."
    caption += f" Left out for lack of a finite mean: {lost}." if lost else ""
    return plots.Plot(f"final_bars-{dataset}", dataset, caption, figure, "Final best value, mean")


def _boxes(dataset: str, table: pd.DataFrame) -> plots.Plot:
    """Draw quartiles over runs with every run as a point, best median on the left."""
    values = {name: plots.finite(group["value"]) for name, group, _ in by_optimizer(table)}
    groups = {name: known for name, known in values.items() if known.size}
    names = sorted(groups, key=lambda name: float(np.median(groups[name])))
    fixed, crowded = strokes_of(names), len(names) > _SIDE_BY_SIDE
    figure = Figure(figsize=(plots.WIDTH, plots.HEIGHT))
    bottom = 0.26 if crowded else 0.16
    axes = figure.add_axes((0.115, bottom, 0.865, 0.915 - bottom))
    for place, name in enumerate(names):
        known, color = groups[name], fixed[name].color
        if known.size > 1:
            drawn = axes.boxplot([known], positions=[place], widths=0.55, showfliers=False,
                                 manage_ticks=False)  # fmt: skip
            for line in (line for lines in drawn.values() for line in lines):
                line.set_color(color)
        # points side by side in the order of the runs, so that equal values stay visible
        beside = place + (np.linspace(-0.17, 0.17, known.size) if known.size > 1 else 0.0)
        marker: dict[str, Any] = {"edgecolor": plots.PAPER, "linewidth": 0.4, "zorder": 3}
        size = 9 if known.size > 1 else 30
        x = np.broadcast_to(beside, known.shape)
        axes.scatter(x, known, s=size, color=color, label=name, **marker)
    texts = [name_of(name) for name in names]
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"}
    if crowded:
        axes.set_xticks(range(len(names)), texts, **turned)
    else:
        axes.set_xticks(range(len(names)), [text.replace(" ", "\n") for text in texts])
    axes.set_xlim(-0.6, len(names) - 0.4)
    plots.frame_y(axes, np.concatenate(list(groups.values())))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("final best value")
    lost = len(table) - sum(known.size for known in groups.values())
    caption = "One point per run. The box spans the quartiles, its line is the median, and the"
    caption += " whiskers reach the furthest run within 1.5 box lengths."
    caption += " The axis does not start at zero."
    caption += f" {runs_of(lost)} without a finite value left out." if lost else ""
    return plots.Plot(
        f"final_boxes-{dataset}", dataset, caption, figure, "Final best value, every run"
    )
