"""Statistics for comparisons: paired tests, Friedman's test, Pareto front.

A table of values has one row per run and one column per algorithm; the values of a row share their
start and seed. Infinite values are allowed and rank last (or first). A missing value excludes its
run from the comparisons it belongs to, and is counted.
"""

from __future__ import annotations

import math
from itertools import combinations
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy  # loads a module on first use: scipy.stats takes half a second
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    import pandas as pd

#: Significance level of every conclusion.
ALPHA = 0.05
#: Level of every confidence interval of a mean.
CONFIDENCE = 0.95
#: Relative difference of two means that is none.
_ROUNDING = 1e-9


def half_width(deviation: ArrayLike, count: ArrayLike) -> NDArray[np.float64]:
    """Return half the width of Student's 95 % confidence interval of means.

    Args:
        deviation: sample standard deviations (ddof 1).
        count: numbers of values.

    Returns:
        in the shape of the arguments; NaN for fewer than two values.

    """
    n = np.asarray(count, dtype=np.float64)
    known = np.where(n > 1, n, np.nan)
    if np.isnan(known).all():  # scipy is slow to import, and this is the result of most small runs
        return known * np.asarray(deviation, dtype=np.float64)
    # of Student's distribution, as scipy.stats.t.ppf, which is slow to import
    quantile = scipy.special.stdtrit(known - 1, (1 + CONFIDENCE) / 2)
    half: NDArray[np.float64] = quantile * np.asarray(deviation, dtype=np.float64) / np.sqrt(known)
    return half


def ranked(
    values: ArrayLike, points: ArrayLike, runs: ArrayLike, better: str
) -> tuple[list[int], int]:
    """Rank points by their means over runs: the rule that decides which result is the best.

    Only finite values count. A point whose difficult runs are missing would win by its easy ones.
    So the best point is one that no point with more runs beats on the runs that both have.

    Args:
        values: ``[N]``, of which a point and a run have one at most.
        points: ``[N]``, the point of each, a number from 0.
        runs: ``[N]``, the run of each, a number from 0.
        better: whether ``lower`` or ``higher`` values are better.

    Returns:
        the points that have a value, the best first, and how many of them are as good as the best,
        up to rounding. Those are in the order of their numbers.

    """
    numbers = np.asarray(values, dtype=np.float64)
    known = np.isfinite(numbers)
    if not known.any():
        return [], 0
    costs = (numbers if better == "lower" else -numbers)[known]
    of, run = (np.asarray(codes)[known] for codes in (points, runs))
    counts = np.bincount(of)
    with np.errstate(invalid="ignore"):
        means = np.bincount(of, costs) / counts
    order = [int(place) for place in np.argsort(means, kind="stable") if counts[place]]

    def is_beaten(place: int) -> bool:
        own = np.full(run.max() + 1, np.nan)
        own[run[of == place]] = costs[of == place]
        common = np.isfinite(own[run])
        lead = np.bincount(of[common], (costs - own[run])[common], len(counts))
        return bool(((counts > counts[place]) & (lead < 0)).any())

    uneven = len(set(counts[order])) > 1
    best = next(place for place in order if not (uneven and is_beaten(place)))
    close = [p for p in sorted(order) if math.isclose(means[p], means[best], rel_tol=_ROUNDING)]
    tied = [place for place in close if not (uneven and is_beaten(place))]
    first = set(tied)
    return [*tied, *(place for place in order if place not in first)], len(tied)


def paired_comparisons(
    values: pd.DataFrame, control: str | None = None, blocks: ArrayLike | None = None
) -> pd.DataFrame:
    """Test pairs of algorithms with the two-sided Wilcoxon signed-rank test.

    Runs in which the two are equal are excluded (Wilcoxon 1945). The p-value is that of
    ``scipy.stats.wilcoxon``: exact for few runs, its normal limit for many. Holm's step-down
    procedure (1979) corrects for the number of pairs. The effect size is the matched-pairs
    rank-biserial correlation (Kerby 2014): the share of the rank sum where ``first`` is higher
    minus the share where it is lower.

    Args:
        values: runs x algorithms; a run with a missing value is excluded from the pair.
        control: the algorithm to compare all others with, chosen before seeing the values. It is
            ``second`` in each pair. By default all pairs are compared, with a larger correction.
        blocks: the run of each row, ``[rows]``, where a run has several rows. A run's values in a
            pair are the means over its rows that have both. By default each row is a run.

    Returns:
        One row per pair of columns, in their order: ``first``, ``second``, ``n`` (runs with both
        values), ``dropped`` (runs without), ``equal`` (runs without a difference), ``statistic``
        (the smaller rank sum), ``p_value``, ``p_holm``, ``effect`` (-1 to 1), and ``conclusion``:
        which one is lower, that no difference was found, or that there are too few runs to tell. If
        no run differs, the p-value is 1 and the effect 0.

    Raises:
        ValueError: a column is not numeric, or two have the same name.

    """
    import pandas as pd  # slow to import, and seldom needed here

    table = _checked(values)
    couples = list(combinations(table.columns, 2))
    if control is not None:
        couples = [(name, control) for name in table.columns if name != control]
    rows = []
    for a, b in couples:
        pair = table[[a, b]]
        if blocks is not None:
            pair = pair.where(pair.notna().all(axis=1)).groupby(np.asarray(blocks)).mean()
        first, second = pair.to_numpy().T
        rows.append({"first": a, "second": b, **_signed_rank(first, second)})
    names = ["first", "second", "n", "dropped", "equal", "statistic", "p_value", "effect"]
    pairs = pd.DataFrame(rows, columns=names)
    pairs.insert(7, "p_holm", holm(pairs["p_value"].to_numpy(dtype=np.float64)))
    needed = runs_needed(len(pairs))
    pairs["conclusion"] = [_conclusion(row, needed) for _, row in pairs.iterrows()]
    return pairs


def runs_needed(comparisons: int, alpha: float = ALPHA) -> int:
    """Return the number of differing runs from which a pair can be significant after correction.

    The smallest two-sided p-value of n pairs is 2 / 2^n, and Holm multiplies the smallest p-value
    by the number of comparisons.
    """
    return math.ceil(math.log2(2 * max(comparisons, 1) / alpha))


def holm(p_values: ArrayLike) -> NDArray[np.float64]:
    """Return p-values corrected for their number (Holm 1979), in the given order."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    factors = np.arange(p.size, 0, -1)
    corrected[order] = np.minimum(np.maximum.accumulate(factors * p[order]), 1.0)
    return corrected


def friedman(values: pd.DataFrame) -> dict[str, Any]:
    """Test whether some algorithms rank lower than others over the runs (Friedman).

    Ties share their average rank; the p-value is from the chi-squared distribution, see
    ``scipy.stats.friedmanchisquare``. The effect size is Kendall's W = chi2 / (n (k - 1)): 0 for no
    agreement of the runs, 1 for the same ranking in each.

    Args:
        values: runs x algorithms (k); runs with a missing value are excluded.

    Returns:
        ``n`` and ``dropped`` (runs used and excluded), ``chi2``, ``p_value``, ``kendalls_w``,
        ``average_ranks`` (1 is the lowest value), ``conclusion``. With fewer than three algorithms
        or without a run, the numbers are NaN.

    Raises:
        ValueError: a column is not numeric, or two have the same name.

    """
    table = _checked(values)
    complete = table.dropna()
    n, k = complete.shape
    chi2 = p_value = math.nan
    conclusion = "cannot tell: needs at least 3 algorithms"
    if k >= 3:
        columns = complete.to_numpy()
        if n and (columns == columns[:, :1]).all():
            chi2, p_value = 0.0, 1.0  # nothing to rank; scipy would divide zero by zero
        elif n:
            chi2, p_value = map(float, scipy.stats.friedmanchisquare(*columns.T))
        needed = next(m for m in range(2, 100) if scipy.stats.chi2.sf(m * (k - 1), k - 1) <= ALPHA)
        conclusion = "no difference found"
        if p_value <= ALPHA:
            conclusion = "the algorithms differ"
        elif n < needed:
            conclusion = f"cannot tell: needs at least {needed} runs"
    ranks = complete.rank(axis=1).mean()
    return {
        "n": n,
        "dropped": len(table) - n,
        "chi2": chi2,
        "p_value": p_value,
        "kendalls_w": chi2 / (n * (k - 1)) if n and k > 1 else math.nan,
        "average_ranks": {str(name): float(rank) for name, rank in ranks.items()},
        "conclusion": conclusion,
    }


def finite_or_none(value: object) -> float | None:
    """Return a finite number as a float, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)


def on_pareto_front(costs: ArrayLike) -> NDArray[np.bool_]:
    """Whether no other row of costs ``[n, k]`` dominates a row: ``[n]``.

    A row dominates another one if no cost of it is larger and at least one is smaller. Equal rows
    do not dominate each other.
    """
    rows = np.asarray(costs, dtype=np.float64)
    dominated = [((rows <= row).all(axis=1) & (rows < row).any(axis=1)).any() for row in rows]
    return ~np.array(dominated, dtype=bool)


def _checked(values: pd.DataFrame) -> pd.DataFrame:
    """Return the values as float64. Raises ValueError."""
    if not values.columns.is_unique:
        twice = values.columns[values.columns.duplicated()][0]
        raise ValueError(f"algorithm {twice!r} has two columns; rename one")
    for name in values.columns:
        if values[name].dtype.kind not in "biuf":
            raise ValueError(
                f"the values of algorithm {name!r} are {values[name].dtype}, no numbers"
            )
    return values.astype(np.float64)


def _signed_rank(a: NDArray[np.float64], b: NDArray[np.float64]) -> dict[str, float]:
    """Return the test and effect size of one pair, before correction."""
    both = ~(np.isnan(a) | np.isnan(b))
    differing = both & (a != b)  # before subtracting: inf - inf is NaN
    with np.errstate(over="ignore"):
        difference = a[differing] - b[differing]
    counts = {
        "n": int(both.sum()),
        "dropped": int((~both).sum()),
        "equal": int(both.sum() - differing.sum()),
    }
    if difference.size == 0:
        return {**counts, "statistic": 0.0, "p_value": 1.0, "effect": 0.0}
    ranks = scipy.stats.rankdata(np.abs(difference))
    lower, higher = ranks[difference < 0].sum(), ranks[difference > 0].sum()
    return {
        **counts,
        "statistic": float(min(lower, higher)),
        "p_value": _p_value(difference, ranks),
        "effect": float((higher - lower) / ranks.sum()),
    }


def _p_value(difference: NDArray[np.float64], ranks: NDArray[np.float64]) -> float:
    """Return the p-value of ``scipy.stats.wilcoxon``, without its slow loop for few ties."""
    if difference.size > 13 or np.unique(ranks).size == ranks.size:
        return float(scipy.stats.wilcoxon(difference).pvalue)
    test = scipy.stats.permutation_test(
        (np.sign(difference) * ranks,),
        np.sum,
        permutation_type="samples",
        vectorized=True,
        n_resamples=np.inf,
    )
    return float(test.pvalue)


def _conclusion(pair: pd.Series, needed: int) -> str:
    """Return the conclusion of a row of :func:`paired_comparisons`, in words."""
    differing = pair["n"] - pair["equal"]
    if pair["p_holm"] <= ALPHA:
        return f"{pair['first'] if pair['effect'] < 0 else pair['second']} is lower"
    if pair["n"] < needed:
        return f"cannot tell: needs at least {needed} runs"
    if 0 < differing < needed:
        return f"cannot tell: only {differing} runs differ, needs at least {needed}"
    return "no difference found"
