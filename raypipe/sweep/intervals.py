"""Confidence intervals of means, and effects in a two-way layout."""

from __future__ import annotations

import math

import numpy as np
import scipy  # loads scipy.stats on first use: it takes half a second
from numpy.typing import ArrayLike, NDArray

from raypipe.stats import ALPHA

#: precision g of the mixture of a sequential interval
_MIXTURE = 0.01


def mean_interval(values: ArrayLike, alpha: float = ALPHA) -> tuple[float, float]:
    """Return Student's confidence interval of a mean; infinite with fewer than two values."""
    x = np.asarray(values, dtype=np.float64)
    if x.size < 2:
        return -math.inf, math.inf
    radius = scipy.stats.t.ppf(1 - alpha / 2, x.size - 1) * x.std(ddof=1) / math.sqrt(x.size)
    return float(x.mean() - radius), float(x.mean() + radius)


def sequential_interval(values: ArrayLike, alpha: float = ALPHA) -> tuple[float, float]:
    """Return a confidence interval of a mean that may be computed after every further value.

    Intervals for a fixed number of values miss the mean with a probability far above ``alpha`` if
    one looks after each value and stops at the first clear result. This one is a confidence
    sequence: with a probability of 1 - ``alpha`` the intervals of all numbers of values contain
    the mean. It is the t-test's of Lindon et al. 2022, "Anytime-Valid Linear Models and Regression
    Adjusted Causal Inference": the mixture likelihood ratio with the weight N(0, 1/g) for the mean
    in standard deviations. A small g suits means that are large against the scatter, so that three
    values can decide.

    Args:
        values: independent, of about normal distribution with unknown variance.
        alpha: probability that any of the intervals misses the mean.

    Returns:
        the lower and the upper end; infinite with too few values.

    """
    x = np.asarray(values, dtype=np.float64)
    n = x.size
    if n < 2:
        return -math.inf, math.inf
    share = _MIXTURE / (_MIXTURE + n)
    bound = (1 / (alpha * math.sqrt(share))) ** (2 / n)
    if bound * share >= 1:
        return -math.inf, math.inf
    t = math.sqrt((n - 1) * (bound - 1) / (1 - bound * share))
    radius = t * float(x.std(ddof=1)) / math.sqrt(n)
    return float(x.mean()) - radius, float(x.mean()) + radius


def two_way_effects(values: ArrayLike) -> NDArray[np.float64]:
    """Return the column effects ``[k]`` of values ``[n, k]``, NaN where unknown.

    The values are fitted by a row effect plus a column effect, with least squares. A column effect
    is the fit's mean over all rows: of complete values, the column's mean. It is NaN for a column
    without values.
    """
    y = np.asarray(values, dtype=np.float64)
    known = ~np.isnan(y)
    rows, columns = np.nonzero(known)
    design = np.zeros((rows.size, sum(y.shape)))
    design[np.arange(rows.size), rows] = 1
    design[np.arange(rows.size), y.shape[0] + columns] = 1
    found = np.linalg.lstsq(design, y[known], rcond=None)[0]
    of_rows, of_columns = found[: y.shape[0]], found[y.shape[0] :]
    seen = known.any(axis=1)
    level = float(of_rows[seen].mean()) if seen.any() else math.nan
    return np.where(known.any(axis=0), of_columns + level, math.nan)
