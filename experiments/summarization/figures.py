"""Figure of summarization: ROUGE of the model and of the lead sentences."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.common.certainty import gain_sentence
from experiments.summarization.rouge import MEASURES
from raypipe.report.plots import HEIGHT, MUTED, WIDTH, Plot, rows, strokes, style
from raypipe.report.sections import Part, Section, TableView


def sections(tables: Mapping[str, pd.DataFrame]) -> list[Section]:
    """Return the section of the report, with all plots."""
    parts = [*figures(tables), *_table(tables)]
    return [Section("Evaluation", parts, covers=("measures",), certainty=_gain(tables))]


def figures(tables: Mapping[str, pd.DataFrame]) -> list[Plot]:
    """Return the figure, if the table ``measures`` has rows."""
    measures = rows(tables, "measures")
    if measures is None:
        return []
    with style():
        return [_figure(measures)]


def _table(tables: Mapping[str, pd.DataFrame]) -> list[Part]:
    measures = rows(tables, "measures")
    if measures is None:
        return []
    columns = ["method", *MEASURES, "words"]
    return [TableView(measures, columns, "Measures", meanings={"words": "Mean length in words."})]


def _gain(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return the gain over the strongest baseline with its interval over documents."""
    columns = [f"rouge_2_gain{end}" for end in ("", "_low", "_high")]
    compared = rows(tables, "gains")
    if compared is None:
        return []
    row = min(compared.to_dict("records"), key=lambda row: float(row["rouge_2_gain"]))
    gain, low, high = (float(row[name]) for name in columns)
    data, baseline = (
        f"{int(row['documents'])} held-out documents",
        f"the {row['baseline']}, the best baseline",
    )
    metric = "the summarizer's ROUGE-2"
    return [gain_sentence(data, metric, baseline, (gain, low, high), "higher")]


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
        axes.bar_label(bars, fmt="%.2f", fontsize=7.5, color=MUTED, padding=2)
    axes.set_xticks(np.arange(len(MEASURES)), list(MEASURES.values()))
    canvas.legend(loc="outside upper left", ncols=2)
    caption = (
        f"F1 over {int(measures['documents'].max())} held-out documents, with stemming; with "
        "several references, of the best one. Higher is better."
    )
    return Plot("measures", "ROUGE by method", caption, canvas)
