"""Leaderboard of the optimizers, from the measures of their studies."""

from __future__ import annotations

import math
from pathlib import Path

import pandas as pd

from benchmarks.topics.protocol import SEEDS
from raypipe import stats

STUDIES = Path(__file__).parents[1] / "results" / "topics" / "studies.parquet"
#: the strongest simple baseline; all others are tested against it
CONTROL = "gp_ei"
_BLOCK = ["start", "run"]


def leaderboard(studies: pd.DataFrame) -> pd.DataFrame:
    """Return one row per optimizer, the best average rank first.

    Args:
        studies: columns corpus, start, optimizer, run, and the measures of
            :func:`benchmarks.topics.protocol.study`.

    Returns:
        ``optimizer``; ``rank`` by the area, the mean over corpora, and half its 95 % interval
        ``rank_half``, with corpora as the sample; ``reached``, the share of studies that came
        within 1 %; the median of ``evaluations``, infinite if half of them or more did not; the
        means of ``area`` and ``regret``; and ``better`` and ``worse``, the numbers of corpora on
        which the area differs from that of ``gp_ei`` by the signed-rank test over starts and LDA
        seeds, corrected by Holm for all corpora and optimizers. Both are missing for ``gp_ei``.

    """
    ranks = _ranks(studies)
    groups = studies.groupby("optimizer")
    table = pd.DataFrame(
        {
            "rank": ranks.mean(),
            "rank_half": stats.half_width(ranks.std(ddof=1), ranks.count()),
            "reached": groups["reached"].mean(),
            "evaluations": _evaluations(studies).groupby(studies["optimizer"]).median(),
            "area": groups["area"].mean(),
            "regret": groups["regret"].mean(),
        }
    )
    tests = against_control(studies)
    if len(tests):
        for name, sign in (("better", -1), ("worse", 1)):
            clear = (tests["p_holm"] <= stats.ALPHA) & (tests["effect"] * sign > 0)
            table[name] = clear.groupby(tests["first"]).sum()
    return table.sort_values("rank").rename_axis("optimizer").reset_index()


def _ranks(studies: pd.DataFrame) -> pd.DataFrame:
    """Return corpora x optimizers: the mean rank of the area over the corpus's blocks."""
    wide = studies.pivot(index=["corpus", *_BLOCK], columns="optimizer", values="area")
    ranked: pd.DataFrame = wide.rank(axis=1).groupby("corpus").mean()
    return ranked


def against_control(studies: pd.DataFrame) -> pd.DataFrame:
    """Return the paired tests of the area against ``gp_ei``: a row per corpus and optimizer.

    Runs of one start and LDA seed are one block, with the mean of their areas: from the published
    start an optimizer without random draws repeats itself.
    """
    parts = []
    studies = studies.assign(seed=studies["run"] % SEEDS)
    for corpus, rows in studies.groupby("corpus"):
        wide = rows.pivot_table("area", ["start", "seed"], "optimizer", aggfunc="mean")
        if CONTROL in wide:
            parts.append(stats.paired_comparisons(wide, CONTROL).assign(corpus=corpus))
    if not parts:
        return pd.DataFrame()
    tests = pd.concat(parts, ignore_index=True)
    return tests.assign(p_holm=stats.holm(tests["p_value"]))


def medians(studies: pd.DataFrame) -> pd.DataFrame:
    """Return the median evaluations to within 1 %: (corpus, start) x optimizers.

    It is infinite if half of the studies or more did not come there.
    """
    return studies.assign(evaluations=_evaluations(studies)).pivot_table(
        index=["corpus", "start"], columns="optimizer", values="evaluations", aggfunc="median"
    )


def _evaluations(studies: pd.DataFrame) -> pd.Series:
    """Return the evaluations to within 1 %, infinite for a study that did not come there."""
    return studies["evaluations"].astype(float).where(studies["reached"], math.inf)
