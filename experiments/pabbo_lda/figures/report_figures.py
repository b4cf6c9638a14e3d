"""All figures of the report, and those of final values, searched T and simple regret."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.pabbo_lda.figures.convergence_figures import (
    BEST,
    EXCESS,
    RESOLUTION,
    SOLVED,
    best_of,
    by_evaluation,
    by_time,
    solved,
)
from experiments.pabbo_lda.figures.landscape_figure import over_topics
from experiments.pabbo_lda.figures.optimizer_styles import (
    LABELED,
    by_optimizer,
    name_of,
    runs_of,
    strokes_of,
)
from experiments.pabbo_lda.figures.verdict import listed
from experiments.pabbo_lda.study.convergence import NOISE, progress
from raypipe.report.formatting import number, plus_minus
from raypipe.report.plots import (
    HEIGHT,
    INK,
    MUTED,
    PAPER,
    WIDTH,
    Plot,
    Stroke,
    finite,
    frame_y,
    label_lines,
    needs_log,
    rows,
    set_log,
    style,
)

#: most boxes whose names have room below them
_SIDE_BY_SIDE = 7

_Draw = Callable[[str, pd.DataFrame], Plot]


#: tables of the figures
_TABLES = ("study_history", "convergence", "summary", "studies", "regret")


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Plot]:
    """Return all figures that the tables allow, by kind and then by corpus.

    A missing or empty table, or a corpus without a finite value, leaves its figures out.
    """
    drawn: list[Plot] = []
    history, reached, summary, studies, regret = (rows(tables, name) for name in _TABLES)
    with style():
        if history is not None:
            history = progress(history)
            history["excess"] = (history["ratio"] - 1).clip(lower=RESOLUTION)
            noise = _relative_noise(tables, history)
            for quantity, shaded in ((BEST, {}), (EXCESS, noise)):
                by_number = partial(by_evaluation, quantity, shaded)
                drawn += _each_dataset(history, quantity.column, by_number)
                drawn += _each_dataset(history, quantity.column, partial(by_time, quantity))
        if reached is not None:
            is_known = rows(tables, "landscape") is not None
            targets = [name for name in SOLVED if name != NOISE or is_known]
            for target in targets:
                drawn += _each_dataset(reached, "evaluations", partial(solved, target))
                if reached["dataset"].nunique() > 1:
                    drawn.append(solved(target, "all corpora", reached))
        if summary is not None:
            drawn += _each_dataset(summary, "mean", _bars)
        if studies is not None:
            studies = studies.assign(value=_minimized(studies))
            drawn += _each_dataset(studies, "value", _boxes)
        if history is not None:
            drawn += _each_dataset(history, "best_value", _trajectory)
        if regret is not None:
            drawn += [_regret(str(stage), t) for stage, t in regret.groupby("stage", sort=False)]
    return drawn


def _minimized(studies: pd.DataFrame) -> pd.Series[float]:
    """Return the best value of each study as its optimizer sees it: lower is better."""
    values = studies["best_perplexity"].astype(float)
    if "best_coherence" in studies:
        values = values.fillna(-studies["best_coherence"].astype(float))
    return values


def _relative_noise(tables: Mapping[str, pd.DataFrame], history: pd.DataFrame) -> dict[str, float]:
    """Return the interval of the noise of each corpus, as a part of its best known value."""
    shapes = rows(tables, "landscape")
    if shapes is None:
        return {}
    best = history.groupby("dataset")["best_known"].mean()
    parts = shapes.set_index("dataset")["interval"] / best.where(best > 0)
    return {str(name): float(part) for name, part in parts.dropna().items()}


def landscapes(tables: Mapping[str, pd.DataFrame]) -> list[Plot]:
    """Return the objective over T of each corpus whose optimum is known."""
    evaluations = rows(tables, "evaluations")
    shapes = rows(tables, "landscape")
    if evaluations is None or shapes is None:
        return []
    with style():
        return [
            over_topics(
                str(row["dataset"]), evaluations[evaluations["dataset"] == row["dataset"]], row
            )
            for _, row in shapes.dropna(subset="best_T").iterrows()
        ]


def _each_dataset(table: pd.DataFrame, value: str, draw: _Draw) -> list[Plot]:
    """Return one figure per corpus with a finite value, in the table's order of corpora."""
    groups = table.groupby("dataset", sort=False)
    return [draw(str(name), group) for name, group in groups if finite(group[value]).size]


def _trajectory(dataset: str, table: pd.DataFrame) -> Plot:
    """Draw one panel per optimizer: every T it tried, and the median of its best T so far."""
    optimizers = by_optimizer(table)
    columns = min(2, len(optimizers))
    lines = -(-len(optimizers) // columns)
    height = 0.75 + 1.2 * lines
    figure = Figure(figsize=(WIDTH, height))
    grid = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False)
    figure.subplots_adjust(
        left=0.135,
        right=0.98,
        top=1 - 0.28 / height,
        bottom=0.48 / height,
        hspace=0.34,
        wspace=0.09,
    )
    for axes in grid.flat[len(optimizers) :]:
        axes.remove()
    last = max(2, int(table["evaluation"].max()))
    for axes, (name, group, stroke) in zip(grid.flat, optimizers, strict=False):
        axes.plot(group["evaluation"], group["T"], linestyle="", marker="o", markersize=2.2,
                  markeredgewidth=0, color=MUTED, alpha=0.4, label="T",
                  rasterized=len(table) > 1500)  # fmt: skip
        best = best_of(group, "evaluation", "best_T")
        color, line = stroke
        axes.plot(best.index, best.median(axis=1), color=color, label="best T",
                  drawstyle="steps-post", linestyle=line)  # fmt: skip
        axes.set_title(name_of(name), pad=3)
    set_log(grid[0, 0].yaxis, float(table["T"].min()), float(table["T"].max()), (1, 3))
    grid[0, 0].set_xlim(1, last)
    bottoms = grid.flat[max(0, len(optimizers) - columns) : len(optimizers)]
    for axes in bottoms:
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("evaluation")
    figure.supylabel("number of topics T", x=0.012, fontsize=8.5, color=MUTED)
    runs = runs_of(int(table["run"].nunique()))
    caption = f"Gray: every number of topics T evaluated ({runs}). Line: the best T so far"
    caption += ", median over runs." if table["run"].nunique() > 1 else "."
    return Plot(f"t_trajectory-{dataset}", dataset, caption, figure, "Numbers of topics tried")


def _bars(dataset: str, table: pd.DataFrame) -> Plot:
    """Draw mean and standard deviation of final values: bars from zero, or points on a log axis."""
    known = np.isfinite(table["mean"].astype(float))
    lost = ", ".join(name_of(name) for name in table.loc[~known, "optimizer"])
    table = table[known].sort_values("mean", ascending=False, kind="stable")
    figure = Figure(figsize=(WIDTH, max(1.6, 0.75 + 0.34 * len(table))))
    bottom = 0.47 / figure.get_figheight()
    axes = figure.add_axes((0.24, bottom, 0.5, 0.93 - bottom))
    fixed = strokes_of(list(table["optimizer"]))
    mean = table["mean"].to_numpy(float)
    std = np.nan_to_num(table["std"].to_numpy(float), nan=0.0, posinf=0.0)
    y = np.arange(len(table))
    colors = [fixed[name][0] for name in table["optimizer"]]
    logarithmic = needs_log(mean, 20)
    # On a log axis, where a deviation can exceed the mean, its bar ends at the best run.
    below = np.minimum(std, mean - table["min"].to_numpy(float)) if logarithmic else std
    errors = np.where(std > 0, [below, std], np.nan)
    bars: dict[str, Any] = {"ecolor": INK, "elinewidth": 1.0, "capsize": 2.5}
    if logarithmic:
        set_log(axes.xaxis, float(mean.min()), float(mean.max()))
        for i, color in enumerate(colors):
            axes.errorbar(mean[i], y[i], xerr=errors[:, [i]], fmt="o", color=color, **bars)
    else:
        axes.barh(y, mean, height=0.62, color=colors)
        axes.errorbar(mean, y, xerr=errors, fmt="none", **bars)
        # negative coherence is below zero
        least = float(np.nanmin(mean - std)) if np.nanmin(mean) < 0 else 0.0
        axes.set_xlim(1.03 * least, 1.03 * max(0.0, float(np.nanmax(mean + std))))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    for i, (m, s, n) in enumerate(zip(mean, std, table["runs"], strict=True)):
        text = plus_minus(m, s) if n > 1 else number(m)
        axes.text(1.03, y[i], text, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_ylim(-0.6, len(table) - 0.4)
    axes.set_yticks(y, [name_of(name) for name in table["optimizer"]])
    axes.grid(visible=False, axis="y")
    axes.grid(visible=True, axis="x")
    axes.spines["left"].set_visible(not logarithmic)
    axes.set_xlabel("final best value")
    most = int(table["runs"].max())
    caption = f"Final best value of each optimizer, lower is better; {runs_of(most)}"
    caption += ", mean ± standard deviation." if most > 1 else "."
    caption += (
        " Logarithmic axis: points, not bars." if logarithmic else " The axis starts at zero."
    )
    caption += f" Left out for lack of a finite mean: {lost}." if lost else ""
    return Plot(f"final_bars-{dataset}", dataset, caption, figure, "Final best value, mean")


def _boxes(dataset: str, table: pd.DataFrame) -> Plot:
    """Draw quartiles over runs with every run as a point, best median on the left."""
    groups = {}
    for name, group, _ in by_optimizer(table):
        if (known := finite(group["value"])).size:
            groups[name] = known
    names = sorted(groups, key=lambda name: float(np.median(groups[name])))
    fixed = strokes_of(names)
    figure = Figure(figsize=(WIDTH, HEIGHT))
    crowded = len(names) > _SIDE_BY_SIDE
    bottom = 0.26 if crowded else 0.16
    axes = figure.add_axes((0.115, bottom, 0.865, 0.915 - bottom))
    for place, name in enumerate(names):
        known, (color, _) = groups[name], fixed[name]
        if known.size > 1:
            axes.boxplot(
                [known], positions=[place], widths=0.55, showfliers=False, patch_artist=True,
                boxprops={"facecolor": "none", "edgecolor": color, "linewidth": 1.3},
                medianprops={"color": color, "linewidth": 2.2, "solid_capstyle": "butt"},
                whiskerprops={"color": color}, capprops={"color": color}, manage_ticks=False,
            )  # fmt: skip
        # Points side by side in the order of the runs, so that equal values stay visible.
        beside = place + (np.linspace(-0.17, 0.17, known.size) if known.size > 1 else 0.0)
        size = 9 if known.size > 1 else 30
        axes.scatter(np.broadcast_to(beside, known.shape), known, s=size, color=color,
                     edgecolor=PAPER, linewidth=0.4, zorder=3, label=name)  # fmt: skip
    texts = [name_of(name) for name in names]
    if crowded:
        axes.set_xticks(range(len(names)), texts, rotation=40, ha="right", rotation_mode="anchor")
    else:
        axes.set_xticks(range(len(names)), [text.replace(" ", "\n") for text in texts])
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(names) - 0.4)
    frame_y(axes, np.concatenate(list(groups.values())))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_title("final best value")
    most = max(known.size for known in groups.values())
    lost = len(table) - sum(known.size for known in groups.values())
    caption = "The final best value of the one run."
    if most > 1:
        caption = "One point per run. The box spans the quartiles, its line is the median, and the"
        caption += " whiskers reach the furthest run within 1.5 box lengths."
    caption += " The axis does not start at zero."
    caption += f" {runs_of(lost)} without a finite value left out." if lost else ""
    return Plot(f"final_boxes-{dataset}", dataset, caption, figure, "Final best value, every run")


def _regret(stage: str, table: pd.DataFrame) -> Plot:
    """Draw the simple regret of the model and of the other methods, with confidence bands."""
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_axes(LABELED)
    model = f"pabbo_{stage.removeprefix('evaluate_')}"
    methods = [str(name) for name in table["method"].unique()]
    fixed = strokes_of([model, *methods])
    ends: list[tuple[float, str, Stroke]] = []
    for (_, method), group in table.groupby(["trial_id", "method"], sort=False):
        group = group.sort_values("step")
        name = model if method == "pabbo" else str(method)
        stroke = color, line = fixed[name]
        axes.plot(group["step"], group["mean"], color=color, linestyle=line, label=name)
        axes.fill_between(group["step"], group["low"], group["high"], color=color, alpha=0.16,
                          linewidth=0)  # fmt: skip
        last = float(group["mean"].iloc[-1])
        ends.append((last, f"{name_of(name)}  {number(last)}", stroke))
    frame_y(axes, table[["mean", "low", "high"]].where(table[["mean", "low", "high"]] > 0))
    label_lines(axes, [end for end in ends if np.isfinite(end[0])])
    axes.set_title("simple regret")
    axes.set_xlabel("duels")
    axes.set_xlim(float(table["step"].min()), max(1.0, float(table["step"].max())))
    caption = "Utility of the optimum minus that of the best queried point, mean over held-out"
    caption += " functions with its confidence band. The label is the regret after the last duel."
    title = listed([name_of(model if name == "pabbo" else name) for name in methods])
    return Plot(f"regret-{stage}", title, caption, figure, "Simple regret of the model")
