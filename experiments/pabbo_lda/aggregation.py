"""From finished studies to tables: summaries, paired comparisons, rankings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd

from raypipe import stats
from raypipe.ledger import Row


def aggregate(studies: Sequence[Row]) -> dict[str, dict[str, Row]]:
    """The tables ``summary``, ``comparisons`` and ``rankings`` of the ``studies`` rows, by key.

    Runs are blocks: the studies of a run share start, seed and objective. What too few runs
    cannot tell is said in ``conclusion``.
    """
    tables: dict[str, dict[str, Row]] = {"summary": {}, "comparisons": {}, "rankings": {}}
    if not studies:
        return tables
    frame = pd.DataFrame(studies)
    for dataset, group in frame.groupby("dataset", sort=False):
        values = group.pivot_table(
            index="run", columns="optimizer", values="best_perplexity", sort=False
        )
        values = values[list(dict.fromkeys(group["optimizer"]))]
        for optimizer, row in stats.summary(values).iterrows():
            tables["summary"][f"{dataset}/{optimizer}"] = {
                "dataset": dataset,
                "optimizer": optimizer,
                "runs": int(row["n"]),
                **_numbers(row.drop("n")),
                **_effort(group[group["optimizer"] == optimizer]),
            }
        pairs = stats.paired_comparisons(values).rename(columns={"effect": "effect_size"})
        for pair in pairs.to_dict("records"):
            key = f"{dataset}/{pair['first']}/{pair['second']}"
            tables["comparisons"][key] = {
                "dataset": dataset,
                **{str(k): v for k, v in pair.items()},
            }
        test = stats.friedman(values)
        for optimizer, rank in test["average_ranks"].items():
            tables["rankings"][f"{dataset}/{optimizer}"] = {
                "dataset": dataset,
                "optimizer": optimizer,
                "average_rank": rank,
                "runs": test["n"],
                "chi2": test["chi2"],
                "p_value": test["p_value"],
                "kendalls_w": test["kendalls_w"],
                "conclusion": test["conclusion"],
            }
    return tables


def _numbers(row: pd.Series[Any]) -> dict[str, float]:
    return {str(name): float(value) for name, value in row.items()}


def _effort(studies: pd.DataFrame) -> dict[str, float]:
    return {
        "best_T_median": float(studies["best_T"].median()),
        "evaluations_mean": float(studies["unique_evaluations"].mean()),
        "duration_s_mean": float(studies["duration_s"].mean()),
    }
