"""The figure of summarisation: ROUGE beside the lead sentences."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from raypipe.report.plots import HEIGHT, MUTED, WIDTH, Plot, rows, strokes, style
from raypipe.report.sections import Section

_MEASURES = {"rouge_1": "ROUGE-1", "rouge_2": "ROUGE-2", "rouge_l": "ROUGE-L"}


def sections(tables: Mapping[str, pd.DataFrame]) -> list[Section]:
    """Return the section of the report, with all plots."""
    return [Section("Evaluation", figures(tables))]


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Plot]:
    """The figure that the table ``measures`` allows."""
    found = rows(tables, "measures", ["method", *_MEASURES])
    if found is None:
        return []
    with style():
        return [_measures(found)]


def _measures(found: pd.DataFrame) -> Plot:
    canvas = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = canvas.add_subplot()
    colours = strokes(list(found["method"]))
    width = 0.8 / len(found)
    for place, row in enumerate(found.to_dict("records")):
        middle = np.arange(len(_MEASURES)) + (place - (len(found) - 1) / 2) * width
        method = str(row["method"])
        heights = [float(row[name]) for name in _MEASURES]
        bars = axes.bar(middle, heights, 0.92 * width, color=colours[method].color, label=method)
        axes.bar_label(bars, fmt="%.3f", fontsize=7.5, color=MUTED, padding=2)
    axes.set_xticks(np.arange(len(_MEASURES)), list(_MEASURES.values()))
    canvas.legend(loc="outside upper left", ncols=3)
    caption = (
        f"F1 over {int(found['documents'].max())} held-out documents, stemmed; of several "
        "references the best. More is better."
    )
    return Plot("measures", "Measures", caption, canvas)
