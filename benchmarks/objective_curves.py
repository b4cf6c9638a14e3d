"""Objectives over the number of topics, on samples of the built-in corpus of several sizes.

``python -m benchmarks.objective_curves --out FOLDER`` fits topic models as the quickstart does, and
writes ``objective_curves.csv`` (a row per fit and objective) and ``objective_curves.png``. It shows
which objective has an optimum inside the range, and how deep it is compared with the noise of one
seed. It takes two minutes on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from matplotlib.figure import Figure

from experiments.pabbo_lda.objective.objectives import CorpusObjective, load_objectives
from experiments.pabbo_lda.settings import MainSettings
from experiments.pabbo_lda.space import Point
from experiments.pabbo_lda.study.evaluations import lda_seeds
from raypipe.report.plots import finite, set_log, single_stroke, style

PROJECT = Path(__file__).resolve().parents[1]
DOCUMENTS = (1000, 4000)
TOPICS = (2, 3, 4, 6, 8, 11, 15, 20, 28, 39, 54, 75, 104, 144, 200)
SEEDS = 3
OBJECTIVES = {
    "perplexity": "perplexity of the fitted documents",
    "heldout_perplexity": "perplexity of held-out documents",
    "coherence": "negative coherence",
}
#: perplexities that a figure shows, as multiples of the lowest mean
_SHOWN = (0.97, 1.25)


def quickstart(documents: int, kind: str) -> CorpusObjective:
    """Return an objective of the quickstart on a sample of the built-in corpus."""
    settings = yaml.safe_load((PROJECT / "configs/quickstart.yaml").read_text())
    options = {**settings["data"]["options"], "max_documents": documents}
    how = {name: settings["lda"][name] for name in ("max_iter", "batch_size")}
    sections = MainSettings.model_validate(
        {
            "data": {"source": "builtin", "options": options},
            "lda": {**how, "datasets": ["stdlib"], "objective": kind, "t_max": max(TOPICS),
                    "start": [min(TOPICS)]},
        }
    )  # fmt: skip
    [objective] = load_objectives(sections.data, sections.lda)
    return objective


def measured(
    documents: Sequence[int], topics: Sequence[int], seeds: int
) -> Iterator[dict[str, Any]]:
    """Yield the value of each objective for each size, T and seed."""
    for size in documents:
        for kind in OBJECTIVES:
            objective = quickstart(size, kind)
            function = objective.function()
            for T in topics:
                for seed in lda_seeds(42, seeds):
                    value = function(objective.data, Point(T), seed, *objective.arguments)
                    yield {"documents": size, "objective": kind, "T": T, "seed": seed,
                           "value": value}  # fmt: skip


def depth(curve: pd.DataFrame) -> dict[str, float]:
    """Return the best T, the noise near it and the height of both ends above it in its units."""
    values = curve.groupby("T")["value"].agg(["mean", "var"])
    near = values.nsmallest(5, "mean")
    noise = float(np.sqrt(near["var"].mean()))
    lowest = float(near["mean"].iloc[0])
    left, right = (float(values["mean"].iloc[end] - lowest) / noise for end in (0, -1))
    best = float(near.index[0])
    return {"best_T": best, "lowest": lowest, "noise": noise, "left": left, "right": right}


def drawn(table: pd.DataFrame) -> Figure:
    """Return a panel for each size and objective: every fit, and the mean over seeds."""
    sizes = sorted(table["documents"].unique())
    with style():
        figure = Figure(figsize=(9.6, 2.6 * len(sizes)), layout="constrained")
        grid = figure.subplots(len(sizes), len(OBJECTIVES), squeeze=False)
        color, line = single_stroke()
        for (size, kind), axes in zip(
            ((s, k) for s in sizes for k in OBJECTIVES), grid.flat, strict=True
        ):
            curve = table[(table["documents"] == size) & (table["objective"] == kind)]
            means = curve.groupby("T")["value"].mean()
            axes.plot(curve["T"], curve["value"], "o", color="gray", markersize=3, alpha=0.6)
            axes.plot(means.index, means, color=color, linestyle=line)
            axes.plot([means.idxmin()], [means.min()], "o", color=color, markersize=7)
            set_log(axes.xaxis, float(means.index.min()), float(means.index.max()))
            if kind != "coherence":
                highest = min(_SHOWN[1] * means.min(), 1.05 * finite(curve["value"]).max())
                axes.set_ylim(_SHOWN[0] * means.min(), highest)
            axes.set_title(f"{OBJECTIVES[kind]}\n{size} documents, best T = {means.idxmin()}")
            axes.set_xlabel("number of topics T")
    return figure


def main() -> None:
    """Measure, write the table and the figure, and print how deep each optimum is."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    folder = parser.parse_args().out
    table = pd.DataFrame(measured(DOCUMENTS, TOPICS, SEEDS))
    folder.mkdir(parents=True, exist_ok=True)
    table.to_csv(folder / "objective_curves.csv", index=False)
    drawn(table).savefig(folder / "objective_curves.png", dpi=120)
    rows = {key: depth(curve) for key, curve in table.groupby(["documents", "objective"])}
    print(pd.DataFrame(rows).T.to_string(float_format="{:.4g}".format))


if __name__ == "__main__":
    main()
