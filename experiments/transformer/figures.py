"""Figure of the transformer trainer: which classes it confuses."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from experiments.transformer.tables import BRANCHES, TRANSFORMER
from raypipe import formatting, parts, plots, stats

_OTHERS = "others"
_MOST_PAIRS = 10


def sections(tables: Mapping[str, pd.DataFrame]) -> list[parts.Section]:
    """Return the section with the confused classes; the measures have a section as any table."""
    content: list[parts.Part] = []
    if (confusion := plots.rows(tables, "confusion")) is not None:
        with plots.style():
            content = [_confusion(confusion), _most_confused(confusion)]
    return [parts.Section("Confusion", content, covers=("confusion",), certainty=_tested(tables))]


def _tested(tables: Mapping[str, pd.DataFrame]) -> list[str]:
    """Return McNemar's test of the transformer against the baseline that is right most often."""
    pairs = plots.rows(tables, "comparisons")
    if pairs is None:
        return []
    own = pairs[(pairs["method"] == TRANSFORMER) & ~pairs["baseline"].isin(BRANCHES)]
    if own.empty:
        return []
    gains = own["only_method_right"].astype(float) - own["only_baseline_right"].astype(float)
    row, gain = own.iloc[int(gains.to_numpy().argmin())], float(gains.min())
    p_value = float(row["p_holm"])
    judged = "more than chance" if p_value <= stats.ALPHA else "it may be chance"
    return [
        f"Of the {int(row['rows'])} held-out rows, the {TRANSFORMER} has "
        f"{formatting.number(abs(gain))} "
        f"{'more' if gain > 0 else 'fewer'} right than {row['baseline']}, the best baseline "
        f"(McNemar's test, p {formatting.probability(p_value)}): {judged}."
    ]


def _most_confused(confusion: pd.DataFrame) -> parts.TableView:
    """Return the pairs of different classes with the most rows."""
    totals = confusion.groupby("gold")["rows"].transform("sum").astype(float)
    shares = [f"{100 * share:.0f} %" for share in confusion["rows"] / totals]
    names = {"gold": "actual class", "predicted": "predicted class"}
    shown = confusion.rename(columns=names).assign(**{"share of the actual class": shares})
    named = (confusion["gold"] != _OTHERS) & (confusion["predicted"] != _OTHERS)
    wrong = shown[named & (confusion["gold"] != confusion["predicted"]) & (confusion["rows"] > 0)]
    wrong = wrong.sort_values("rows", ascending=False, kind="stable").head(_MOST_PAIRS)
    columns = [*names.values(), "rows", "share of the actual class"]
    return parts.TableView(wrong, columns, "Most frequent confusions")


def _confusion(found: pd.DataFrame) -> plots.Plot:
    wide = found.pivot_table(index="gold", columns="predicted", values="rows", fill_value=0)
    totals = found.groupby("gold")["rows"].sum().sort_values(ascending=False)
    order = [str(name) for name in totals.index if name != _OTHERS]
    order += [_OTHERS] if _OTHERS in {*found["gold"], *found["predicted"]} else []
    square = wide.reindex(index=order, columns=order, fill_value=0).to_numpy(float)
    shares = square / np.maximum(square.sum(1, keepdims=True), 1)
    canvas = Figure(figsize=(plots.WIDTH, plots.WIDTH), layout="constrained")
    axes = canvas.add_subplot()
    axes.grid(visible=False)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for (row, column), share in np.ndenumerate(shares):
        if share >= 0.005:
            color = "white" if share > 0.5 else "#101010"
            text = f"{100 * share:.0f}"
            axes.text(column, row, text, ha="center", va="center", fontsize=10, color=color)
    axes.set_xticks(range(len(order)), order, rotation=60, ha="right")
    axes.set_yticks(range(len(order)), order)
    axes.set_xlabel("predicted")
    axes.set_ylabel("actual")
    caption = (
        "Percent of the held-out rows of a class, by predicted class: a row sums to 100, and the "
        "diagonal is right. The most frequent classes; all others count as one."
    )
    return plots.Plot("confusion", "Which classes are confused", caption, canvas)
