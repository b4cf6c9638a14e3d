"""Tables of finished studies: summaries, convergence, paired comparisons, rankings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from experiments.pabbo_lda.study.convergence import (
    NOISE,
    STUDY,
    TARGETS,
    anytime,
    convergence,
    progress,
    quartiles,
)
from experiments.pabbo_lda.study.landscape import landscape
from raypipe import stats
from raypipe.store.ledger import Row

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

_KEYS = {
    "landscape": ["dataset"],
    "anytime": ["dataset", "optimizer", "evaluation"],
    "convergence": ["dataset", "optimizer", "run"],
    "summary": ["dataset", "optimizer"],
    "comparisons": ["dataset", "measure", "first", "second"],
    "against_control": ["dataset", "measure", "first", "second"],
    "rankings": ["dataset", "measure", "optimizer"],
    "across_corpora": ["measure", "optimizer"],
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
    steps = progress(history)
    shapes = landscape(evaluations, history)
    intervals = dict(zip(shapes["dataset"], shapes["interval"], strict=True))
    reached = convergence(steps, intervals)
    confirmed = {tuple(row[key] for key in STUDY): row.get("confirmed_value") for row in studies}
    keys = zip(*(reached[key] for key in STUDY), strict=True)
    reached["confirmed_value"] = pd.Series([confirmed.get(key) for key in keys], dtype=float)
    tests = [
        _tests(str(dataset), measure, _blocks(corpus, measure))
        for dataset, corpus in reached.groupby("dataset")
        for measure in MEASURES
        if corpus[measure].notna().any() or measure in _ALWAYS
    ]
    rankings, pairs, against = (pd.concat(tables) for tables in zip(*tests, strict=True))
    tables = {
        "landscape": shapes,
        "anytime": anytime(steps),
        "convergence": reached,
        "summary": _summary(reached),
        "comparisons": pairs,
        "against_control": against,
        "rankings": rankings,
        "across_corpora": _across_corpora(rankings),
    }
    return {name: _by_key(table, _KEYS[name]) for name, table in tables.items()}


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
    ranks = ranking.reset_index().assign(
        **about,
        runs=test["n"],
        chi2=test["chi2"],
        p_value=test["p_value"],
        kendalls_w=test["kendalls_w"],
        conclusion=test["conclusion"],
    )
    pairs = stats.paired_comparisons(values)
    against = stats.paired_comparisons(values, CONTROL) if CONTROL in values else pairs[:0]
    tables = []
    for table in (pairs, against):
        table = table.rename(columns={"effect": "effect_size"}).assign(**about)
        if values.shape[1] > 2 and not test["p_value"] <= stats.ALPHA:
            table["conclusion"] += f" (exploratory; Friedman's test: {test['conclusion']})"
        tables.append(table)
    return ranks, *tables


def _across_corpora(rankings: pd.DataFrame) -> pd.DataFrame:
    """Return the agreement of the corpora: average ranks, wins and Kendall's W of their ranks.

    There is a p-value only with enough corpora to distinguish a pair of optimizers.
    """
    needed = stats.runs_needed(1)
    parts = []
    for measure, group in rankings.groupby("measure"):
        ranks = group.pivot(index="dataset", columns="optimizer", values="average_rank").dropna()
        if len(ranks) < 2:
            continue
        test = stats.friedman(ranks)
        tested = len(ranks) >= needed
        part = pd.DataFrame(
            {
                "measure": measure,
                "corpora": len(ranks),
                "average_rank": pd.Series(test["average_ranks"]),
                "wins": ranks.eq(ranks.min(axis=1), axis=0).sum(),
                "kendalls_w": test["kendalls_w"],
                "p_value": test["p_value"] if tested else np.nan,
                "conclusion": test["conclusion"].replace(" runs", " corpora")
                if tested
                else f"not tested: {len(ranks)} corpora cannot distinguish optimizers, "
                f"at least {needed} can",
            }
        )
        parts.append(part.rename_axis("optimizer").reset_index())
    return pd.concat(parts) if parts else pd.DataFrame(columns=_KEYS["across_corpora"])


def _summary(reached: pd.DataFrame) -> pd.DataFrame:
    """Return each optimizer on each corpus, over its runs."""
    parts = []
    for dataset, corpus in reached.groupby("dataset"):
        groups = corpus.groupby("optimizer")
        final = location_and_spread(_blocks(corpus, "final_value"))
        confirmed = location_and_spread(_blocks(corpus, "confirmed_value"))
        part = final.rename_axis("optimizer").assign(
            confirmed_mean=confirmed["mean"],
            confirmed_std=confirmed["std"],
            best_T_median=groups["best_T"].median(),
            evaluations_mean=groups["evaluations"].mean(),
            duration_s_mean=groups["duration_s"].mean(),
            area_under_curve_median=groups["area_under_curve"].median(),
        )
        for target in (*TARGETS, NOISE):
            name = f"evaluations_to_{target}"
            part[f"runs_to_{target}"] = groups[name].count()
            spread = quartiles(_blocks(corpus, name)).add_prefix(f"{name}_")
            part = part.join(spread.replace(np.inf, np.nan))  # censored
        parts.append(part.reset_index().assign(dataset=dataset))
    return pd.concat(parts, ignore_index=True)


def location_and_spread(values: pd.DataFrame) -> pd.DataFrame:
    """Return a row per column of ``values``; missing values are excluded."""
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values: inf or missing results
        columns = {
            "runs": values.count(),
            "mean": values.mean(),
            "std": values.std(ddof=1),
            "min": values.min(),
            "max": values.max(),
            "median": values.median(),
        }
    return pd.DataFrame(columns)


def _by_key(table: pd.DataFrame, keys: list[str]) -> dict[str, Row]:
    """Return the rows as plain values by key, missing values as None; key columns come first."""
    table = table[[*keys, *table.columns.difference(keys, sort=False)]].astype(object)
    rows = table.where(table.notna(), None).to_dict("records")
    return {
        "/".join(str(row[key]) for key in keys): {str(name): v for name, v in row.items()}
        for row in rows
    }
