"""The objective over the number of topics: every fit, the means over seeds, and the noise."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from experiments.pabbo_lda.study.landscape import means_by_topics, well_known
from raypipe.report.formatting import number
from raypipe.report.plots import (
    HEIGHT,
    INK,
    MUTED,
    WIDTH,
    Plot,
    finite,
    frame_y,
    set_log,
    single_stroke,
)

#: noise intervals above the lowest mean that are shown at least
_LEAST_SHOWN = 4


def over_topics(dataset: str, evaluations: pd.DataFrame, shape: pd.Series) -> Plot:
    """Draw the values of one corpus over T, and the band within the noise of the lowest mean.

    The y axis shows the lower one of the two sides of the optimum; what is higher is cut off.

    Args:
        dataset: the corpus.
        evaluations: its fits, with the columns T and value.
        shape: its row of the table ``landscape``.

    """
    figure = Figure(figsize=(WIDTH, HEIGHT))
    axes = figure.add_axes((0.12, 0.155, 0.85, 0.76))
    means = well_known(means_by_topics(evaluations))["mean"]
    best, lowest, interval = int(shape["best_T"]), float(shape["best_mean"]), shape["interval"]
    color, line = single_stroke()
    axes.plot(evaluations["T"], evaluations["value"], linestyle="", marker="o", markersize=3,
              markeredgewidth=0, color=MUTED, alpha=0.5, label="one seed",
              rasterized=len(evaluations) > 1500)  # fmt: skip
    axes.plot(means.index, means, color=color, linestyle=line, label="mean")
    axes.axhspan(lowest, lowest + interval, color=color, alpha=0.14, linewidth=0, label="noise")
    axes.plot([best], [lowest], marker="o", markersize=7, color=color, linestyle="", label="best")
    axes.axvline(best, color=MUTED, linestyle=":", linewidth=1)
    axes.annotate(f"T = {best}", (best, 0), (4, 4), xycoords=axes.get_xaxis_transform(),
                  textcoords="offset points", color=INK, fontsize=9)  # fmt: skip
    set_log(axes.xaxis, float(evaluations["T"].min()), float(evaluations["T"].max()))
    sides = [finite(means[means.index < best]), finite(means[means.index > best])]
    limit = max(
        min((side.max() for side in sides if side.size), default=lowest),
        lowest + _LEAST_SHOWN * interval,
    )
    shown = finite(evaluations["value"])
    frame_y(axes, [min(shown.min(), lowest - interval), limit])
    axes.set_xlabel("number of topics T")
    axes.set_title("value of the objective, lower is better")
    caption = (
        "Every fit (gray) and the mean over the seeds of each T that more than half of them tried "
        f"(line), lowest at T = {best}. Shaded: within the noise of it, "
        f"{number(float(interval))}: two values of one T differ by less in 95 % of cases."
    )
    if shown.max() > axes.get_ylim()[1]:
        caption += " Higher values are cut off."
    return Plot(f"landscape-{dataset}", dataset, caption, figure, "Objective over T")
