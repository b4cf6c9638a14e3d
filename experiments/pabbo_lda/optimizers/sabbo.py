"""Sharpness-aware black-box optimisation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata

from experiments.pabbo_lda.optimizers.space import FloatArray, IntegerRange, as_losses

BATCH = 10
RADIUS = 0.1
FIRST_DEVIATION = 0.5
SMALLEST_DEVIATION = 0.03
MEAN_RATE = 1.0
DEVIATION_RATE = 0.6


class SABBO:
    """Natural-gradient descent of a Gaussian N(mu, sigma^2) on its worst neighbour.

    Ye et al., "Sharpness-Aware Black-Box Optimization" (arXiv 2410.12457), Algorithm 1, in one
    dimension. With J(theta) = E[f(x)], x ~ N(mu, sigma^2), the step minimises
    max J(theta') over KL(theta' || theta) <= rho^2: the inner maximum is the ascent step of that
    length in the Fisher metric (the divergence to second order), the outer step the natural
    gradient at theta', applied at theta.

    Where this departs from the paper: both gradients come from the one batch of 10 drawn from
    theta, that at theta' by importance weights, so that a step costs no second batch; and values
    are replaced by the rank utilities of natural evolution strategies (Wierstra et al. 2014,
    section 3.1), whose default rates for one dimension these are (1 and 0.6), so that values of
    1e44 move the mean no further than values of 1e4. Positions are on the scale of the range,
    [-1, 1]; mu starts at the best start value, sigma at a quarter of the range and never falls
    below 0.03, a tenth in T on log T in [2, 1000].
    """

    def __init__(self, space: IntegerRange, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._mean = 0.0
        self._deviation = FIRST_DEVIATION
        self._noise: FloatArray = np.empty(0)

    def ask(self) -> list[int]:
        """Ten draws from the Gaussian, those beyond the range moved to its ends."""
        self._noise = self._rng.standard_normal(BATCH)
        return [int(T) for T in self._space.integers(self._mean + self._deviation * self._noise)]

    def tell(self, points: Sequence[int], values: Sequence[float]) -> None:
        """One step of the distribution, or its first mean from the start values."""
        losses = as_losses(values)
        if len(self._noise):
            self._step(rank_losses(losses))
        elif len(points):
            self._mean = float(self._space.positions(points[int(np.argmin(losses))]))

    def _step(self, losses: FloatArray) -> None:
        shift, widening = worst_neighbour(self._noise, losses)
        z = (self._noise - shift) / widening
        weights = np.exp((self._noise**2 - z**2) / 2)
        weights /= weights.sum()
        slope, spread = natural_gradient(z, losses - weights @ losses, weights)

        mean = self._mean - MEAN_RATE * self._deviation * BATCH * slope
        self._mean = float(np.clip(mean, -1, 1))
        deviation = self._deviation * np.exp(-DEVIATION_RATE * BATCH * spread)
        self._deviation = float(np.clip(deviation, SMALLEST_DEVIATION, 1))


def natural_gradient(z: FloatArray, losses: FloatArray, weights: FloatArray) -> tuple[float, float]:
    """Of the expected loss, by the mean in units of sigma, and by log sigma.

    ``z`` are the samples standardised by the Gaussian where the gradient is taken, ``weights``
    their shares of the expectation. The Fisher matrix is diag(1, 2), hence the half.
    """
    return float(weights @ (losses * z)), float(weights @ (losses * (z**2 - 1))) / 2


def worst_neighbour(
    z: FloatArray, losses: FloatArray, radius: float = RADIUS
) -> tuple[float, float]:
    """The Gaussian of the largest expected loss within a divergence of ``radius ** 2``.

    Returns:
        its mean, in standard deviations from the present one, and the ratio of the deviations.

    """
    slope, spread = natural_gradient(z, losses, np.full(len(z), 1 / len(z)))
    # KL(theta + d || theta) = (d_mean^2 + 2 d_log_sigma^2) / 2 to second order.
    length = np.sqrt((slope**2 + 2 * spread**2) / 2)
    if length == 0:
        return 0.0, 1.0
    return radius * slope / length, float(np.exp(radius * spread / length))


def rank_losses(losses: FloatArray) -> FloatArray:
    """Losses in place of values: their ranks alone decide; zero mean, equal values equal losses.

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
