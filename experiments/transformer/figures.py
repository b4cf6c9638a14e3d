"""Figures of the transformer trainer: its measures, and which classes it confuses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from raypipe.report.plots import HEIGHT, MUTED, WIDTH, Plot, rows, strokes, style
from raypipe.report.sections import Section

_SCALES = (("accuracy", "macro_f1"), ("rmse", "mae"))
_OTHERS = "others"


def sections(tables: Mapping[str, pd.DataFrame]) -> list[Section]:
    """Return the section of the report, with all plots."""
    return [Section("Evaluation", figures(tables))]


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Plot]:
    """The figures that the tables ``measures`` and ``confusion`` allow."""
    drawn = []
    with style():
        measures = rows(tables, "measures", ["method"])
        if measures is not None:
            drawn.append(_measures(measures))
        confusion = rows(tables, "confusion", ["gold", "predicted", "rows"])
        if confusion is not None:
            drawn.append(_confusion(confusion))
    return drawn


def _measures(found: pd.DataFrame) -> Plot:
    names = next(
        names for names in _SCALES if names[0] in found.columns and found[names[0]].notna().any()
    )
    canvas = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = canvas.add_subplot()
    colors = strokes(list(found["method"]))
    width = 0.8 / len(found)
    for place, row in enumerate(found.to_dict("records")):
        middle = np.arange(len(names)) + (place - (len(found) - 1) / 2) * width
        method = str(row["method"])
        heights = [float(row[name]) for name in names]
        bars = axes.bar(middle, heights, 0.92 * width, color=colors[method].color, label=method)
        axes.bar_label(bars, fmt="%.3g", fontsize=7.5, color=MUTED, padding=2)
    axes.set_xticks(np.arange(len(names)), [name.replace("_f1", "-F1") for name in names])
    canvas.legend(loc="outside upper left", ncols=2)
    better = "More" if names[0] == "accuracy" else "Less"
    caption = f"On the test rows. {better} is better."
    return Plot("measures", "Measures", caption, canvas)


def _confusion(found: pd.DataFrame) -> Plot:
    wide = found.pivot_table(index="gold", columns="predicted", values="rows", fill_value=0)
    totals = found.groupby("gold")["rows"].sum().sort_values(ascending=False)
    order = [str(name) for name in totals.index if name != _OTHERS]
    order += [_OTHERS] if _OTHERS in {*found["gold"], *found["predicted"]} else []
    square = wide.reindex(index=order, columns=order, fill_value=0).to_numpy(float)
    shares = square / np.maximum(square.sum(1, keepdims=True), 1)
    canvas = Figure(figsize=(WIDTH, WIDTH), layout="constrained")
    axes = canvas.add_subplot()
    axes.grid(visible=False)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.005:
            color = "white" if share > 0.5 else "#23272f"
            text = f"{100 * share:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=color)
    axes.set_xticks(range(len(order)), order, rotation=60, ha="right")
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("predicted")
    axes.set_ylabel("is")
    caption = "Of the test rows of a class, per cent by predicted class; the most frequent classes."
    return Plot("confusion", "Which classes are confused", caption, canvas)
