"""Figures of TELEClass: the measures of each method, also by level, and the sizes of classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from raypipe.report.plots import HEIGHT, MUTED, WIDTH, Plot, rows, set_log, strokes, style
from raypipe.report.sections import Part, Section, TableView

_SIZES = "class_sizes"
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


def sections(tables: Mapping[str, pd.DataFrame]) -> list[Section]:
    """Return the section of the report, with all plots."""
    drawn = figures(tables)
    covers = ["measures", *("classes" for plot in drawn if plot.name == _SIZES)]
    return [Section("Classification", [*drawn, *_table(tables)], covers=covers)]


def _table(tables: Mapping[str, pd.DataFrame]) -> list[Part]:
    """Return the measures of every method over all classes."""
    found = rows(tables, "measures")
    if found is None:
        return []
    found = found[found["level"] == "all"]
    several = found["documents_of"].nunique() > 1
    names = [
        METHODS.get(str(method), str(method)) + (f" ({documents})" if several else "")
        for method, documents in zip(found["method"], found["documents_of"], strict=True)
    ]
    shown = found.assign(method=names).rename(columns=MEASURES)
    return [TableView(shown, ["method", *MEASURES.values()], "Measures over all classes")]


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Plot]:
    """The figures that the tables ``measures`` and ``classes`` allow."""
    drawn = []
    with style():
        found = rows(tables, "measures")
        if found is not None:
            found = found.set_index("method").loc[[m for m in METHODS if m in set(found["method"])]]
            drawn.append(_measures(found[found["level"] == "all"]))
            # a level without a gold label has no value
            levels = found[(found["level"] != "all") & found["macro_f1"].notna()]
            if levels["level"].nunique() > 1:
                drawn.append(_levels(levels))
        classes = rows(tables, "classes")
        if classes is not None and classes["gold"].notna().any():
            drawn.append(_sizes(classes))
    return drawn


def _measures(found: pd.DataFrame) -> Plot:
    """Every measure of every method."""
    canvas = _bars(found, list(MEASURES), list(MEASURES.values()))
    caption = (
        "All measures over all classes; higher is better. The pseudo-labels are measured on the "
        "training documents, everything else on the documents that are predicted. The baselines "
        "take the most similar class with its ancestors; training with gold labels is a "
        "reference."
    )
    return Plot("measures", "Measures by method", caption, canvas)


def _levels(found: pd.DataFrame) -> Plot:
    """Macro-F1 by level of the taxonomy."""
    levels = sorted(found["level"].unique(), key=int)
    wide = found.pivot_table(index="method", columns="level", values="macro_f1", sort=False)
    about = found[~found.index.duplicated()][["documents_of"]].join(wide)
    canvas = _bars(about, levels, [f"level {n}" for n in levels])
    canvas.axes[0].set_ylabel("macro-F1")
    caption = "Macro-F1 over the classes of a level; level 1 has the roots of the taxonomy."
    return Plot("macro_f1_by_level", "Macro-F1 by level", caption, canvas)


def _bars(
    found: pd.DataFrame,
    columns: Sequence[str],
    labels: Sequence[str],
) -> Figure:
    """Draw columns of a table as groups of bars, one bar per row."""
    canvas = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = canvas.add_subplot()
    colors = strokes(list(METHODS))
    width = 0.8 / len(found)
    for place, (method, row) in enumerate(found.iterrows()):
        heights = row[list(columns)].astype(float)
        middle = np.arange(len(columns)) + (place - (len(found) - 1) / 2) * width
        name = METHODS[str(method)]
        if row["documents_of"] == "train" and "test" in set(found["documents_of"]):
            name += " (training documents)"
        bars = axes.bar(middle, heights, 0.92 * width, color=colors[str(method)].color, label=name)
        axes.bar_label(bars, fmt="%.2f", fontsize=6.5, rotation=90, color=MUTED, padding=2)
    axes.set_xticks(np.arange(len(columns)), labels)
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, min(1.12, axes.get_ylim()[1] * 1.12))
    canvas.legend(loc="outside upper left", ncols=2, fontsize=7.5)
    return canvas


def _sizes(classes: pd.DataFrame) -> Plot:
    """Documents per class by pseudo-labels against those by gold labels."""
    canvas = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = canvas.add_subplot()
    gold, labeled = classes["gold"] + 1, classes["documents"] + 1
    most = float(max(gold.max(), labeled.max())) * 1.3
    axes.plot([1, most], [1, most], color=MUTED, linewidth=0.8)
    color = strokes(["classes"])["classes"].color
    axes.scatter(gold, labeled, s=12, color=color, alpha=0.7, linewidth=0)
    for axis in (axes.xaxis, axes.yaxis):
        set_log(axis, 0.9, most, ticks=(1.0,))
    axes.set_xlabel("documents with the class by gold labels, + 1")
    axes.set_ylabel("documents by pseudo-labels, + 1")
    caption = (
        "A dot is a class, ancestors of labels counted. Above the line a class gets more documents "
        "than it has; at the bottom it is starved, and documents are written for it."
    )
    return Plot(_SIZES, "Documents per class", caption, canvas)
