"""Elimination in a race: which points are worse than the best, and how many runs would tell."""

from __future__ import annotations

import math
from typing import TypedDict

import numpy as np
import pandas as pd
import scipy  # loads scipy.stats on first use: it takes half a second
from numpy.typing import ArrayLike

from raypipe.stats import ALPHA, friedman, paired_comparisons, runs_needed


class Elimination(TypedDict):
    """Outcome of :func:`eliminate`: ``worse`` are the algorithms that are worse than the best."""

    best: str
    p_friedman: float
    p_holm: dict[str, float]
    worse: list[str]


def eliminate(costs: pd.DataFrame, alpha: float) -> Elimination:
    """Test which algorithms are worse than the best one, as in a round of F-Race.

    The best has the lowest average rank over the runs, then the lowest mean. With three algorithms
    or more, Friedman's test comes first: without a difference among all of them none is worse. Then
    each is compared with the best (:func:`paired_comparisons`, corrected by Holm).

    The procedure is that of Birattari et al. 2002, "A Racing Algorithm for Configuring
    Metaheuristics", with the signed-rank test of irace in place of their t-test on ranks. As there,
    ``alpha`` holds for one round.

    Args:
        costs: runs x algorithms, without missing values; lower is better.
        alpha: the level of significance.

    Returns:
        ``best``; ``p_friedman``, NaN with fewer than three algorithms; ``p_holm`` by algorithm, NaN
        if Friedman's test found no difference; and ``worse``.

    Raises:
        ValueError: a column is not numeric, or two have the same name.

    """
    order = pd.DataFrame({"rank": costs.rank(axis=1).mean(), "mean": costs.mean()})
    best = str(order.sort_values(["rank", "mean"], kind="stable").index[0])
    others = [str(name) for name in costs.columns if name != best]
    p_friedman = friedman(costs)["p_value"]
    if math.isnan(p_friedman) or p_friedman <= alpha:
        pairs = paired_comparisons(costs, control=best)
        p_holm = dict(zip(others, map(float, pairs["p_holm"]), strict=True))
        effects = dict(zip(others, map(float, pairs["effect"]), strict=True))
    else:
        p_holm, effects = dict.fromkeys(others, math.nan), dict.fromkeys(others, 0.0)
    worse = [name for name in others if p_holm[name] <= alpha and effects[name] > 0]
    return Elimination(best=best, p_friedman=p_friedman, p_holm=p_holm, worse=worse)


def runs_for_power(
    differences: ArrayLike, comparisons: int = 1, alpha: float = ALPHA, power: float = 0.8
) -> float:
    """Return how many runs the signed-rank test needs to find a difference like the observed one.

    Noether 1987, "Sample Size Determination for Some Common Nonparametric Tests": with p the
    probability that the sum of two differences is positive, n = (z_alpha + z_power)^2 / (3 (p -
    1/2)^2) by the normal approximation. p is estimated by the share of positive Walsh averages, of
    which equal ones count half.

    Args:
        differences: of the runs so far, at least two.
        comparisons: number of comparisons that share ``alpha`` (Bonferroni).
        alpha: level of significance, two-sided.
        power: probability of finding the difference.

    Returns:
        the number of runs, those so far included; infinite if the differences balance.

    """
    d = np.asarray(differences, dtype=np.float64)
    sums = (d[:, None] + d[None, :])[np.triu_indices(d.size, k=1)]
    share = float(np.mean((sums > 0) + 0.5 * (sums == 0))) if sums.size else 0.5
    if share == 0.5:
        return math.inf
    quantiles = scipy.stats.norm.ppf([1 - alpha / (2 * comparisons), power]).sum()
    count = float(quantiles**2 / (3 * (share - 0.5) ** 2))
    return max(math.ceil(count), runs_needed(comparisons, alpha))
