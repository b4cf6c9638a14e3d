"""Comparison of finished studies: noise, convergence, summaries, paired tests, rankings.

The best known value of a corpus and seed is the smallest one of any study in the run directory. A
study that has ended carries its best value forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy

from raypipe import stats

Row = dict[str, Any]
STUDY = ["dataset", "optimizer", "run"]
#: largest excess over the best known value that counts as reaching it
TARGETS = {"5_percent": 0.05, "1_percent": 0.01}
#: the target that is the interval of :func:`landscape`
NOISE = "noise"
#: measures that optimizers are ranked by, columns of ``convergence``; lower is better
MEASURES = (
    "final_value",
    "confirmed_value",
    "evaluations_to_1_percent",
    "evaluations_to_noise",
    "area_under_curve",
)
#: measures that every study has
_ALWAYS = ("final_value", "evaluations_to_1_percent", "area_under_curve")
#: optimizer that all others are compared with; this takes fewer runs than comparing all pairs
CONTROL = "random"
#: share of the repeated points that the noise is pooled over, and their least number: those with
#: the lowest means, since the noise grows with the value, and values near the best are compared
_LOWEST, _LEAST = 0.1, 5
_OPTIMUM = ("best_T", "best_mean", "T_low", "T_high", "T_least", "T_most")

_KEYS = {
    "landscape": ["dataset"],
    "convergence": ["dataset", "optimizer", "run"],
    "summary": ["dataset", "optimizer"],
    "comparisons": ["dataset", "measure", "first", "second"],
    "against_control": ["dataset", "measure", "first", "second"],
    "rankings": ["dataset", "measure", "optimizer"],
}


def aggregate(
    history: Sequence[Row], evaluations: Sequence[Row] = (), studies: Sequence[Row] = ()
) -> dict[str, dict[str, Row]]:
    """Return every table derived from the three tables of the stage ``lda``, its rows by key.

    Runs are blocks: the studies of a run share start, seed and objective. ``conclusion`` says
    when too few runs or corpora allow none.
    """
    if not history:
        return {name: {} for name in _KEYS}
    shapes = landscape(evaluations, history)
    intervals = {shape["dataset"]: shape["interval"] for shape in shapes}
    reached = convergence(progress(history), intervals)
    confirmed = {tuple(row[key] for key in STUDY): row.get("confirmed_value") for row in studies}
    keys = reached[STUDY].itertuples(index=False, name=None)
    reached["confirmed_value"] = pd.Series([confirmed.get(key) for key in keys], dtype=float)
    tests = [
        _tests(str(dataset), measure, _blocks(corpus, measure))
        for dataset, corpus in reached.groupby("dataset")
        for measure in MEASURES
        if corpus[measure].notna().any() or measure in _ALWAYS
    ]
    rankings, pairs, against = (pd.concat(tables) for tables in zip(*tests, strict=True))
    tables = {
        "landscape": pd.DataFrame(shapes),
        "convergence": reached,
        "summary": _summary(reached),
        "comparisons": pairs,
        "against_control": against,
        "rankings": rankings,
    }
    return {name: _by_key(table, _KEYS[name]) for name, table in tables.items()}


def progress(history: pd.DataFrame | Sequence[Row]) -> pd.DataFrame:
    """Return every evaluation with the distance of its study to the best known value.

    Args:
        history: rows of the table ``study_history``, in any order.

    Returns:
        The rows, ordered by study and evaluation, with ``best_known`` (missing where no value of
        the corpus and seed was finite) and ``ratio``, the best so far divided by it (missing where
        it is not positive, and infinite until the study has a finite value).

    """
    table = pd.DataFrame(history).sort_values([*STUDY, "evaluation"], ignore_index=True)
    table["best_value"] = table["best_value"].astype(float)
    value = table["value"].astype(float)
    seen = value.where(np.isfinite(value)).groupby([table["dataset"], table["seed"]])
    table["best_known"] = seen.transform("min")
    table["ratio"] = table["best_value"] / table["best_known"].where(table["best_known"] > 0)
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
    last = studies.groupby(STUDY).last()
    start = studies[studies["batch"] == 0].groupby(STUDY)[["evaluation", "cpu_s"]].last()
    table = last[["seed", "best_known"]].assign(
        final_value=last["best_value"],
        final_ratio=last["ratio"],
        evaluations=last["evaluation"],
        duration_s=last["elapsed_s"],
        start_evaluations=start["evaluation"].astype("Int64"),
        start_s=start["cpu_s"],
        best_T=last["best_T"].astype("Int64"),  # missing without a finite value
    )
    best_known = studies["best_known"]
    excess = {name: tolerance * best_known.abs() for name, tolerance in TARGETS.items()}
    excess[NOISE] = studies["dataset"].map(dict(intervals or {})).astype(float)
    for name, allowed in excess.items():
        reached = studies[studies["best_value"] <= best_known + allowed].groupby(STUDY)
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
        excess = studies["best_value"] - studies["best_known"]
        curve = best_so_far(studies.assign(excess=excess), "excess")
    else:
        curve = best_so_far(studies, "ratio").apply(np.log)
    beyond = curve.index.to_numpy()[:, None] > start[curve.columns].to_numpy(dtype=float)
    area: pd.Series[float] = curve.where(beyond).mean()
    return area


def landscape(evaluations: Sequence[Row], history: Sequence[Row]) -> list[Row]:
    """Return the noise and the optimum of the objective on each corpus.

    Args:
        evaluations: single fits: dataset, seed, value, T and the priors if they are searched.
        history: values of studies; ``lda_seeds`` is the number of fits whose mean a value is, 1
            where it is missing. The largest one counts.

    Returns:
        One row per corpus with a point that two seeds evaluated: ``points``, ``fits``, ``std``
        (pooled sample standard deviation of one fit), ``lda_seeds``, ``std_of_value`` (that of the
        mean over these) and ``interval``: two values of one point differ by less in 95 % of cases.
        Where only T is searched: the ``best_T`` with its mean over all seeds, the neighbors
        ``T_low`` to ``T_high`` whose means the noise does not distinguish from it, and the
        smallest and largest T of all.

    """
    averaged: dict[str, int] = {}
    for row in history:
        averaged[row["dataset"]] = max(averaged.get(row["dataset"], 1), row.get("lda_seeds") or 1)
    found = []
    for dataset, seeds in sorted(averaged.items()):
        fits = pd.DataFrame([row for row in evaluations if row["dataset"] == dataset])
        if len(fits) and (shape := _of_corpus(fits, seeds)):
            found.append({"dataset": dataset, **shape})
    return found


def _of_corpus(corpus: pd.DataFrame, lda_seeds: int) -> Row:
    """Return the row of a corpus; empty if no point has two finite values."""
    corpus = corpus.assign(value=corpus["value"].astype(float).where(np.isfinite))
    priors = [name for name in ("alpha", "eta") if name in corpus and corpus[name].notna().any()]
    values = corpus.groupby(["T", *priors], dropna=False)["value"].agg(["count", "mean", "var"])
    repeated = values[values["count"] > 1]
    if repeated.empty:
        return {}
    used = repeated.nsmallest(max(_LEAST, round(_LOWEST * len(repeated))), "mean")
    freedom = used["count"] - 1
    std = float(np.sqrt((freedom * used["var"]).sum() / freedom.sum()))
    half = std * float(scipy.stats.t.ppf((1 + stats.CONFIDENCE) / 2, freedom.sum()))
    return {
        "points": len(used),
        "fits": int(used["count"].sum()),
        "std": std,
        "lda_seeds": lda_seeds,
        "std_of_value": std / np.sqrt(lda_seeds),
        "interval": half * np.sqrt(2 / lda_seeds),
        **(dict.fromkeys(_OPTIMUM) if priors else _optimum(corpus, half)),
    }


def _optimum(corpus: pd.DataFrame, half: float) -> Row:
    """Return the best T of those with more than half of the seeds, and its equals by the noise.

    ``half`` is half of the interval of one fit.
    """
    every = corpus.groupby("T")["value"].agg(["mean", "count"]).dropna()
    known = every[every["count"] > every["count"].max() / 2]
    best = known["mean"].idxmin()
    lowest, fits = known.loc[best]
    differs = known["mean"] - lowest > half * np.sqrt(1 / fits + 1 / known["count"])
    others = known.index[differs]
    # between the nearest T on each side that the noise distinguishes from the best
    low = others[others < best].max()
    high = others[others > best].min()
    equal = known.index[~(known.index <= low) & ~(known.index >= high)]
    bounds = (equal.min(), equal.max(), every.index.min(), every.index.max())
    return dict(zip(_OPTIMUM, (int(best), float(lowest), *map(int, bounds)), strict=True))


def _blocks(corpus: pd.DataFrame, measure: str) -> pd.DataFrame:
    """Return runs x optimizers of a measure; never reached is worse than any number, and ties."""
    values = corpus[measure].astype(float)
    if measure.startswith("evaluations_to"):
        values = values.fillna(np.inf)
    return corpus.assign(**{measure: values}).pivot(
        index="run", columns="optimizer", values=measure
    )


def _tests(dataset: str, measure: str, values: pd.DataFrame) -> tuple[pd.DataFrame, ...]:
    """Return ranks with Friedman's test, and Wilcoxon's test of all pairs and against random."""
    test = stats.friedman(values)
    about = {"dataset": dataset, "measure": measure}
    ranking = pd.Series(test["average_ranks"], name="average_rank").rename_axis("optimizer")
    named = {name: test[name] for name in ("chi2", "p_value", "kendalls_w", "conclusion")}
    ranks = ranking.reset_index().assign(**about, runs=test["n"], **named)
    pairs = stats.paired_comparisons(values)
    against = stats.paired_comparisons(values, CONTROL) if CONTROL in values else pairs[:0]
    tables = []
    for table in (pairs, against):
        table = table.rename(columns={"effect": "effect_size"}).assign(**about)
        if values.shape[1] > 2 and not test["p_value"] <= stats.ALPHA:
            table["conclusion"] += f" (exploratory; Friedman's test: {test['conclusion']})"
        tables.append(table)
    return ranks, *tables


def _summary(reached: pd.DataFrame) -> pd.DataFrame:
    """Return each optimizer on each corpus, over its runs; missing values are excluded."""
    groups = reached.groupby(["dataset", "optimizer"])
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values: inf or missing results
        final = groups["final_value"].agg(["count", "mean", "std", "min", "max", "median"])
        return (
            final.rename(columns={"count": "runs"})
            .assign(
                confirmed_mean=groups["confirmed_value"].mean(),
                confirmed_std=groups["confirmed_value"].std(),
                best_T_median=groups["best_T"].median(),
                evaluations_mean=groups["evaluations"].mean(),
                duration_s_mean=groups["duration_s"].mean(),
                area_under_curve_median=groups["area_under_curve"].median(),
            )
            .reset_index()
        )  # fmt: skip


def _by_key(table: pd.DataFrame, keys: list[str]) -> dict[str, Row]:
    """Return the rows as plain values by key, missing values as None; key columns come first."""
    if table.empty:
        return {}
    table = table[[*keys, *table.columns.difference(keys, sort=False)]].astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return {
        "/".join(str(row[key]) for key in keys): {str(name): v for name, v in row.items()}
        for row in rows
    }
