"""Convergence of studies: best value so far, distance to the best known, evaluations to reach it.

The input is the rows of ``study_history``, one per evaluation of a study, in any order. The best
known value of a corpus and seed is the smallest one of any study in the run directory. A study
that has ended carries its best value forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from raypipe.store.ledger import Row

STUDY = ["dataset", "optimizer", "run"]
#: largest excess over the best known value that counts as reaching it
TARGETS = {"5_percent": 0.05, "1_percent": 0.01}
#: the target that is the interval of :mod:`experiments.pabbo_lda.study.landscape`
NOISE = "noise"


def progress(history: pd.DataFrame | Sequence[Row]) -> pd.DataFrame:
    """Return every evaluation with the distance of its study to the best known value.

    Args:
        history: columns dataset, optimizer, run, seed, evaluation, batch, value, best_value,
            elapsed_s and cpu_s; other columns are kept.

    Returns:
        The rows, ordered by study and evaluation, with ``best_known`` (missing where no value of
        the corpus and seed was finite) and ``ratio``, the best so far divided by it (missing where
        it is not positive, and infinite until the study has a finite value).

    """
    table = pd.DataFrame(history).sort_values([*STUDY, "evaluation"], ignore_index=True)
    value = table["value"].astype(float)
    seen = value.where(np.isfinite(value)).groupby([table["dataset"], table["seed"]])
    table["best_known"] = seen.transform("min")
    positive = table["best_known"].where(table["best_known"] > 0)
    table["ratio"] = table["best_value"].astype(float) / positive
    return table


def best_so_far(studies: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return a column such as ``ratio`` after each evaluation: one column per study.

    The rows are 1 to the largest number of evaluations of a study.
    """
    wide = studies.pivot(index="evaluation", columns=STUDY, values=column).astype(float)
    return wide.reindex(range(1, int(studies["evaluation"].max()) + 1)).ffill()


def convergence(
    studies: pd.DataFrame, intervals: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """Return one row per study of :func:`progress`: its final value and how it got there.

    ``intervals`` are those of the noise by corpus. A value within it of the best known is within
    the noise; where it is not known, no value is.

    ``evaluations_to_*`` and ``time_to_*_s`` (CPU seconds of the study) are missing
    (censored) where the study never came as close. ``area_under_curve`` is the mean of
    log(best so far / best known) over the evaluations after the start, up to the longest study of
    the corpus: 0 is perfect, and 0.01 is one percent above the best known on (geometric) average.
    On a corpus with a best known value that is not positive, such as a negative coherence, it is
    the mean of the difference, in units of the objective.
    """
    grouped = studies.groupby(STUDY)
    last = grouped.last()
    start = studies[studies["batch"] == 0].groupby(STUDY)[["evaluation", "cpu_s"]].last()
    table = pd.DataFrame(
        {
            "seed": last["seed"],
            "best_known": last["best_known"],
            "final_value": last["best_value"].astype(float),
            "final_ratio": last["ratio"],
            "evaluations": last["evaluation"],
            "duration_s": last["elapsed_s"],
            "start_evaluations": start["evaluation"].astype("Int64"),
            "start_s": start["cpu_s"],
        }
    )
    table["best_T"] = grouped["best_T"].last().astype("Int64")  # missing without a finite value
    best_known = studies["best_known"]
    excess = {name: tolerance * best_known.abs() for name, tolerance in TARGETS.items()}
    excess[NOISE] = studies["dataset"].map(dict(intervals or {})).astype(float)
    for name, allowed in excess.items():
        limit = best_known + allowed
        reached = studies[studies["best_value"].astype(float) <= limit].groupby(STUDY)
        first = reached[["evaluation", "cpu_s"]].first().reindex(table.index)
        evaluations = first["evaluation"].astype("Int64")
        beyond = (evaluations - table["start_evaluations"]).clip(lower=0)
        table[f"evaluations_to_{name}"] = evaluations
        table[f"evaluations_beyond_start_to_{name}"] = beyond
        table[f"time_to_{name}_s"] = first["cpu_s"]
    areas = [_area(group, table["start_evaluations"]) for _, group in studies.groupby("dataset")]
    table["area_under_curve"] = pd.concat(areas)
    return table.reset_index()


def _area(studies: pd.DataFrame, start: pd.Series[Any]) -> pd.Series[float]:
    """Return the area under the curve of each study of one corpus."""
    if (studies["best_known"] <= 0).any():
        excess = studies["best_value"].astype(float) - studies["best_known"]
        curve = best_so_far(studies.assign(excess=excess), "excess")
    else:
        curve = best_so_far(studies, "ratio").apply(np.log)
    beyond = curve.index.to_numpy()[:, None] > start[curve.columns].to_numpy(dtype=float)
    area: pd.Series[float] = curve.where(beyond).mean()
    return area


def anytime(studies: pd.DataFrame) -> pd.DataFrame:
    """Return the spread over runs of the best so far and its ratio, after n evaluations.

    One row per corpus, optimizer and n (column ``evaluation``), with ``runs`` and, of
    ``best_value`` and ``ratio``, ``*_mean``, ``*_median``, ``*_q25`` and ``*_q75``.
    """
    parts = []
    for dataset, corpus in studies.groupby("dataset"):
        curves = {column: best_so_far(corpus, column) for column in ("best_value", "ratio")}
        for optimizer in sorted(corpus["optimizer"].unique()):
            runs = {name: curve[dataset, optimizer].T for name, curve in curves.items()}
            part = pd.DataFrame({"dataset": dataset, "optimizer": optimizer,
                                 "runs": runs["best_value"].count()})  # fmt: skip
            for name, values in runs.items():
                part[f"{name}_mean"] = values.mean()
                part = part.join(quartiles(values).add_prefix(f"{name}_"))
            parts.append(part.rename_axis("evaluation").reset_index())
    return pd.concat(parts, ignore_index=True)


def quartiles(values: pd.DataFrame) -> pd.DataFrame:
    """Return ``median``, ``q25`` and ``q75``, a row per column of ``values``.

    They are interpolated linearly, without missing values. An infinite value ranks last, and a
    quartile that depends on one is infinite: the median of partly censored times is infinite where
    it cannot be known.
    """
    table = values.astype(np.float64)
    highest = table.where(np.isfinite(table)).max().fillna(-np.inf)
    # inf - inf is NaN, so infinite values are ranked as the largest float
    found = table.replace(np.inf, np.finfo(np.float64).max).quantile([0.5, 0.25, 0.75])
    return found.mask(found > highest, np.inf).set_axis(["median", "q25", "q75"]).T
