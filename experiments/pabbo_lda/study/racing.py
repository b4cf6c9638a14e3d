"""Racing: the further fits of a point are left out where its first one is clearly worse."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import scipy

from raypipe.stats import CONFIDENCE

#: points that the noise is pooled over: those with the lowest means, as it grows with the value
LOWEST = 5


def most_for_a_race(fits: Sequence[Sequence[float]]) -> float:
    """Return the largest first value of a point that is not clearly worse than the best point.

    A first value above it lies beyond the prediction interval (95 %, Student's t) of one fit around
    the mean of the best point. The noise is the pooled sample variance of the fits of the five
    lowest points: that of their logarithms where all values are positive.

    Args:
        fits: the values of each point with two fits or more, in any order.

    Returns:
        The limit; infinite where no noise is known.

    """
    known = [values for values in fits if len(values) > 1 and np.isfinite(values).all()]
    if not known:
        return math.inf
    lowest = [np.array(values) for values in sorted(known, key=np.mean)[:LOWEST]]
    in_logs = min(values.min() for values in lowest) > 0
    if in_logs:
        lowest = [np.log(values) for values in lowest]
    freedom = sum(len(values) - 1 for values in lowest)
    variance = sum(float(((values - values.mean()) ** 2).sum()) for values in lowest) / freedom
    quantile = float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom))
    half = quantile * math.sqrt(variance * (1 + 1 / len(lowest[0])))
    limit = float(lowest[0].mean()) + half
    return math.exp(limit) if in_logs else limit
