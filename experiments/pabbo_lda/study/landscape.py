"""Noise and optimum of an objective: how far seeds of LDA move its values, and its best T."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy

from raypipe.stats import CONFIDENCE
from raypipe.store.ledger import Row

#: share of the repeated points that the noise is pooled over, and their least number: those with
#: the lowest means, since the noise grows with the value, and values near the best are compared
_LOWEST, _LEAST = 0.1, 5
_COLUMNS = (
    *("points", "fits", "std", "lda_seeds", "std_of_value", "interval"),
    *("best_T", "best_mean", "T_low", "T_high", "T_least", "T_most"),
)


def landscape(evaluations: Sequence[Row], history: Sequence[Row]) -> pd.DataFrame:
    """Return the noise and the optimum of the objective on each corpus.

    Args:
        evaluations: single fits: dataset, seed, value, T and the priors if they are searched.
        history: values of studies; ``lda_seeds`` is the number of fits whose mean a value is, 1
            where it is missing. The largest one counts: with racing, values near the best have all.

    Returns:
        One row per corpus with a point that two seeds evaluated: ``points``, ``fits``, ``std``
        (pooled sample standard deviation of one fit), ``lda_seeds``, ``std_of_value`` (that of the
        mean over these) and ``interval``: two values of one point differ by less in 95 % of cases.
        Where only T is searched: the ``best_T`` with its mean over all seeds, the neighbors
        ``T_low`` to ``T_high`` whose means the noise does not distinguish from it, and the
        smallest and largest T of all.

    """
    if not evaluations or not history:
        return pd.DataFrame(columns=["dataset", *_COLUMNS])
    table, studies = pd.DataFrame(evaluations), pd.DataFrame(history)
    seeds = studies.get("lda_seeds", pd.Series(1, studies.index)).fillna(1)
    averaged = seeds.groupby(studies["dataset"]).max()
    table = table.assign(value=table["value"].astype(float).where(np.isfinite))
    rows = [
        {"dataset": dataset, **found}
        for dataset, corpus in table[table["dataset"].isin(averaged.index)].groupby("dataset")
        if (found := _of_corpus(corpus, int(averaged[dataset])))
    ]
    return pd.DataFrame(rows, columns=["dataset", *_COLUMNS])


def means_by_topics(evaluations: pd.DataFrame) -> pd.DataFrame:
    """Return ``mean`` and ``count`` of the finite values of each T of one corpus."""
    values = evaluations["value"].astype(float)
    return values.where(np.isfinite).groupby(evaluations["T"]).agg(["mean", "count"]).dropna()


def well_known(means: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of :func:`means_by_topics` with values of more than half of the seeds."""
    known: pd.DataFrame = means[means["count"] > means["count"].max() / 2]
    return known


def _of_corpus(corpus: pd.DataFrame, lda_seeds: int) -> dict[str, Any]:
    priors = [name for name in ("alpha", "eta") if name in corpus and corpus[name].notna().any()]
    values = corpus.groupby(["T", *priors], dropna=False)["value"].agg(["count", "mean", "var"])
    repeated = values[values["count"] > 1]
    if repeated.empty:
        return {}
    used = repeated.nsmallest(max(_LEAST, round(_LOWEST * len(repeated))), "mean")
    freedom = used["count"] - 1
    std = float(np.sqrt((freedom * used["var"]).sum() / freedom.sum()))
    half = std * float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom.sum()))
    return {
        "points": len(used),
        "fits": int(used["count"].sum()),
        "std": std,
        "lda_seeds": lda_seeds,
        "std_of_value": std / np.sqrt(lda_seeds),
        "interval": half * np.sqrt(2 / lda_seeds),
        **({} if priors else _optimum(corpus, half)),
    }


def _optimum(corpus: pd.DataFrame, half: float) -> dict[str, Any]:
    """Return the best T of those with more than half of the seeds, and its equals by the noise.

    ``half`` is half of the interval of one fit.
    """
    every = means_by_topics(corpus)
    known = well_known(every)
    place = int(known["mean"].to_numpy().argmin())
    best, (lowest, fits) = int(known.index[place]), known.iloc[place]
    equal = known["mean"] - lowest <= half * np.sqrt(1 / fits + 1 / known["count"])
    low = high = best
    for T in reversed(known.index[known.index < best]):
        if not equal[T]:
            break
        low = T
    for T in known.index[known.index > best]:
        if not equal[T]:
            break
        high = T
    return {
        "best_T": int(best),
        "best_mean": float(lowest),
        "T_low": int(low),
        "T_high": int(high),
        "T_least": int(every.index.min()),
        "T_most": int(every.index.max()),
    }
