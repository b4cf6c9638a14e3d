"""Figures of TELEClass: the measures of each method, also by level, and the sizes of classes.

The report would draw the rows of all levels as repetitions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from raypipe import parts, plots

METHODS = {
    "nearest_name": "nearest class name",
    "tfidf": "TF-IDF similarity",
    "constant": "same labels for all",
    "pseudo_labels": "pseudo-labels",
    "refined": "refined class vectors",
    "classifier": "classifier",
    "nearest_description": "nearest class description",
    "supervised": "trained with gold labels",
}
MEASURES = {
    "example_f1": "example-F1",
    "precision_at_1": "P@1",
    "precision_at_3": "P@3",
    "mrr": "MRR",
    "micro_f1": "micro-F1",
    "macro_f1": "macro-F1",
}
#: bars with their height written above, which more of them have no room for
_MOST_LABELED = 24


def sections(tables: Mapping[str, pd.DataFrame]) -> list[parts.Section]:
    """Return the section of the report, with all plots and the measures over all classes."""
    content: list[parts.Part] = []
    covers = ["measures"]
    with plots.style():
        if (measures := plots.rows(tables, "measures")) is not None:
            content += _measures(measures)
        classes = plots.rows(tables, "classes")
        if classes is not None and classes["gold"].notna().any():
            content.append(_sizes(classes))
            covers.append("classes")
    return [parts.Section("Classification", content, covers=covers)]


def _measures(measures: pd.DataFrame) -> list[parts.Part]:
    """Return the measures of every method as a figure and a table, and macro-F1 by level."""
    several = measures["documents_of"].nunique() > 1
    names = [
        METHODS[method] + (" (training documents)" if several and documents == "train" else "")
        for method, documents in zip(measures["method"], measures["documents_of"], strict=True)
    ]
    shown = measures.assign(method=names).rename(columns=MEASURES)
    whole = shown[shown["level"] == "all"]
    caption = (
        "All measures over all classes; higher is better. The pseudo-labels are measured on the "
        "training documents, everything else on the documents that are predicted. The baselines "
        "take the most similar class with its ancestors; training with gold labels is a "
        "reference."
    )
    bars = _bars(whole.set_index("method")[list(MEASURES.values())])
    content: list[parts.Part] = [plots.Plot("measures", "Measures by method", caption, bars)]
    # a level without a gold label has no value
    levels = shown[(shown["level"] != "all") & shown["macro-F1"].notna()]
    if levels["level"].nunique() > 1:
        wide = levels.pivot_table(index="method", columns="level", values="macro-F1", sort=False)
        wide = wide[sorted(wide.columns, key=lambda level: int(str(level)))].rename(
            columns=lambda level: f"level {level}"
        )
        caption = "Macro-F1 over the classes of a level; level 1 has the roots of the taxonomy."
        content.append(plots.Plot("macro_f1_by_level", "Macro-F1 by level", caption, _bars(wide)))
    columns = ["method", *MEASURES.values()]
    return [*content, parts.TableView(whole, columns, "Measures over all classes")]


def _bars(wide: pd.DataFrame) -> Figure:
    """Draw the columns of a table as groups of bars, one bar per row."""
    canvas = Figure(figsize=(plots.WIDTH, plots.HEIGHT), layout="constrained")
    axes = canvas.add_subplot()
    colors = plots.strokes(list(wide.index))
    for place, (method, heights) in enumerate(wide.iterrows()):
        middle = np.arange(wide.shape[1]) + (place - (len(wide) - 1) / 2) * 0.8 / len(wide)
        color = colors[str(method)].color
        bars = axes.bar(middle, heights.astype(float), 0.74 / len(wide), color=color, label=method)
        if wide.size <= _MOST_LABELED:
            axes.bar_label(
                bars, fmt="%.2f", fontsize=6.5, rotation=90, color=plots.MUTED, padding=2
            )
    axes.set_xticks(range(wide.shape[1]), list(wide.columns))
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, min(1.12, axes.get_ylim()[1] * 1.12))
    canvas.legend(loc="outside upper left", ncols=2, fontsize=7.5)
    return canvas


def _sizes(classes: pd.DataFrame) -> plots.Plot:
    """Documents per class by pseudo-labels against those by gold labels."""
    canvas = Figure(figsize=(plots.WIDTH, plots.HEIGHT), layout="constrained")
    axes = canvas.add_subplot()
    gold, labeled = classes["gold"] + 1, classes["documents"] + 1
    most = float(max(gold.max(), labeled.max())) * 1.3
    axes.plot([1, most], [1, most], color=plots.MUTED, linewidth=0.8)
    color = plots.strokes(["classes"])["classes"].color
    axes.scatter(gold, labeled, s=12, color=color, alpha=0.7, linewidth=0)
    for axis in (axes.xaxis, axes.yaxis):
        plots.set_log(axis, 0.9, most, ticks=(1.0,))
    axes.set_xlabel("documents with the class by gold labels, + 1")
    axes.set_ylabel("documents by pseudo-labels, + 1")
    caption = (
        "A dot is a class, ancestors of labels counted. Above the line a class gets more documents "
        "than it has; at the bottom it is starved, and documents are written for it."
    )
    return plots.Plot("class_sizes", "Documents per class", caption, canvas)
