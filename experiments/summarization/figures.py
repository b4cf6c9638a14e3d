"""Figure of summarization: ROUGE of the model and of the lead sentences."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.summarization.rouge import MEASURES
from raypipe.report.plots import HEIGHT, MUTED, WIDTH, Plot, rows, strokes, style
from raypipe.report.sections import Section


def sections(tables: Mapping[str, pd.DataFrame]) -> list[Section]:
    """Return the section of the report, with all plots."""
    return [Section("Evaluation", figures(tables), covers=("measures",))]


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Plot]:
    """Return the figure, if the table ``measures`` has rows."""
    measures = rows(tables, "measures", ["method", *MEASURES])
    if measures is None:
        return []
    with style():
        return [_figure(measures)]


def _figure(measures: pd.DataFrame) -> Plot:
    canvas = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = canvas.add_subplot()
    styles = strokes(list(measures["method"]))
    width = 0.8 / len(measures)
    for place, row in enumerate(measures.to_dict("records")):
        middle = np.arange(len(MEASURES)) + (place - (len(measures) - 1) / 2) * width
        method = str(row["method"])
        heights = [float(row[name]) for name in MEASURES]
        bars = axes.bar(middle, heights, 0.92 * width, color=styles[method].color, label=method)
        axes.bar_label(bars, fmt="%.3f", fontsize=7.5, color=MUTED, padding=2)
    axes.set_xticks(np.arange(len(MEASURES)), list(MEASURES.values()))
    canvas.legend(loc="outside upper left", ncols=3)
    caption = (
        f"F1 over {int(measures['documents'].max())} held-out documents, with stemming; with "
        "several references, of the best one. Higher is better."
    )
    return Plot("measures", "Measures", caption, canvas)
