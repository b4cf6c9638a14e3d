"""Sharpness-aware black-box optimization."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

from experiments.pabbo_lda.optimizers.space import FloatArray, Point, Space, as_losses

BATCH = 10
RADIUS = 0.1
FIRST_DEVIATION = 0.5
SMALLEST_DEVIATION = 0.03
MEAN_RATE = 1.0


class SABBO:
    """Natural-gradient descent of a Gaussian N(mu, diag(sigma^2)) on its worst neighbor.

    Ye et al., "Sharpness-Aware Black-Box Optimization" (arXiv 2410.12457), Algorithm 1, in d
    dimensions. With J(theta) = E[f(x)], x ~ N(mu, diag(sigma^2)), the step minimizes
    max J(theta') over KL(theta' || theta) <= rho^2: the inner maximum is the ascent step of that
    length in the Fisher metric (the divergence to second order), the outer step the natural
    gradient at theta', applied at theta.

    Departures from the paper: both gradients come from the same batch of 10 drawn from theta, the
    one at theta' by importance weights, so that a step costs no second batch; and values are
    replaced by the rank utilities of natural evolution strategies (Wierstra et al. 2014,
    section 3.1), whose default rates these are (1, and (3 + ln d) / (5 sqrt d) for the deviations),
    so that values of 1e44 move the mean no further than values of 1e4. Positions are on the scale
    of the space, [-1, 1]; mu starts at the best start value, sigma at a quarter of each range and
    never falls below 0.03, a tenth in T on log T in [2, 1000].
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        d = space.dimensions
        self._deviation_rate = (3 + np.log(d)) / (5 * np.sqrt(d))
        self._mean = np.zeros(d)
        self._deviation = np.full(d, FIRST_DEVIATION)
        self._noise: FloatArray = np.empty((0, d))

    def ask(self) -> list[Point]:
        """Return ten draws from the Gaussian, clipped to the space."""
        self._noise = self._rng.standard_normal((BATCH, len(self._mean)))
        return self._space.points(self._mean + self._deviation * self._noise)

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Update the distribution, or set its first mean from the start values."""
        losses = as_losses(values)
        if len(self._noise):
            self._step(rank_losses(losses))
        elif len(points):
            self._mean = self._space.positions(points)[np.argmin(losses)]

    def _step(self, losses: FloatArray) -> None:
        shift, widening = worst_neighbor(self._noise, losses)
        z = (self._noise - shift) / widening
        weights = np.exp((self._noise**2 - z**2).sum(axis=1) / 2)
        weights /= weights.sum()
        slope, spread = natural_gradient(z, losses - weights @ losses, weights)

        mean = self._mean - MEAN_RATE * self._deviation * BATCH * slope
        self._mean = np.clip(mean, -1, 1)
        deviation = self._deviation * np.exp(-self._deviation_rate * BATCH * spread)
        self._deviation = np.clip(deviation, SMALLEST_DEVIATION, 1)


def natural_gradient(
    z: FloatArray, losses: FloatArray, weights: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Return the gradient of the expected loss: by the mean (in sigma), by log sigma, [d] each.

    ``z`` [n, d] are the samples standardized by the Gaussian at which the gradient is taken,
    ``weights`` [n] their weights in the expectation. The Fisher matrix of a dimension is
    diag(1, 2), hence the factor 1/2.
    """
    column = losses[:, None]
    return weights @ (column * z), weights @ (column * (z**2 - 1)) / 2


def worst_neighbor(
    z: FloatArray, losses: FloatArray, radius: float = RADIUS
) -> tuple[FloatArray, FloatArray]:
    """Return the Gaussian of the largest expected loss within a divergence of ``radius ** 2``.

    Returns:
        its mean, in standard deviations from the current one, and the ratio of the deviations,
        [d] each.

    """
    slope, spread = natural_gradient(z, losses, np.full(len(z), 1 / len(z)))
    # KL(theta + d || theta) = sum (d_mean^2 + 2 d_log_sigma^2) / 2 to second order.
    length = np.sqrt((slope**2 + 2 * spread**2).sum() / 2)
    if length == 0:
        return np.zeros_like(slope), np.ones_like(spread)
    return radius * slope / length, np.exp(radius * spread / length)


def rank_losses(losses: FloatArray) -> FloatArray:
    """Return losses that depend on ranks alone: zero mean, equal losses for equal values.

    The best of n has the loss -u_1 + 1/n, where u_k = max(0, log(n/2 + 1) - log k) / sum.
    """
    count = len(losses)
    utilities = np.maximum(0, np.log(count / 2 + 1) - np.log(np.arange(1, count + 1)))
    utilities /= utilities.sum()
    _, inverse, counts = np.unique(
        rankdata(losses, method="min"), return_inverse=True, return_counts=True
    )
    ends = np.cumsum(counts)
    totals = np.diff(np.concatenate([[0.0], np.cumsum(utilities)[ends - 1]]))
    return 1 / count - (totals / counts)[inverse]
