"""Bayesian optimization: expected improvement under a Gaussian process, and under a network."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
from scipy.spatial.distance import cdist
from scipy.stats import norm, qmc
from sklearn.exceptions import ConvergenceWarning
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from experiments.pabbo_lda.space import FloatArray, Point, Space, as_losses
from experiments.pabbo_lda.surrogate import posterior

#: candidates in more than one dimension, a power of two
CANDIDATES = 2048
#: a value that is not finite counts as this one; a cut one is this multiple of the median's excess
_LARGEST, _SPREADS = 1e100, 10


class ExpectedImprovement:
    """Bayesian optimization (Jones et al. 1998) with scikit-learn's Gaussian process.

    The kernel is Matern 5/2 with a length scale per dimension, and noise; its parameters maximize
    the marginal likelihood after each value. Perplexities grow to 1e44, so the process models the
    logarithm of their logarithm. The next point is the unknown candidate with the largest expected
    improvement on the best value. Candidates are all T, or 2048 points of a Sobol sequence if
    priors are searched; the seed decides only these. Values that are not finite count as the worst.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._values: dict[Point, float] = {}

    def ask(self) -> list[Point]:
        """Return the next point; nothing if all candidates are known."""
        candidates = [point for point in self._candidates() if point not in self._values]
        if not candidates:
            return []
        known = list(self._values)
        if not known:
            return [candidates[len(candidates) // 2]]
        places = self._space.positions(candidates)
        gain = self._gain(self._space.positions(known), list(self._values.values()), places)
        # rounded, so that another processor finds the same best one
        return [candidates[int((gain / max(gain.max(), 1e-300)).round(6).argmax())]]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Store the values."""
        self._values.update(zip(points, as_losses(values).tolist(), strict=True))

    def _gain(self, known: FloatArray, values: Sequence[float], places: FloatArray) -> FloatArray:
        """Return the expected improvement [m] at places [m, d], given the known points [n, d]."""
        losses = stabilized(values)
        try:
            process = self._fitted(known, losses)
        except np.linalg.LinAlgError:  # then the candidate farthest from all known points
            gaps: FloatArray = cdist(places, known).min(1)
            return gaps
        mean, deviation = process.predict(places, return_std=True)
        return expected_improvement(mean, deviation, losses.min())

    def _candidates(self) -> list[Point]:
        space = self._space
        if not space.priors:
            return [Point(T) for T in range(space.t_min, space.t_max + 1)]
        sequence = qmc.Sobol(space.dimensions, rng=self._rng)
        return list(dict.fromkeys(space.points(2 * sequence.random(CANDIDATES) - 1)))

    def _fitted(self, positions: FloatArray, losses: FloatArray) -> GaussianProcessRegressor:
        scales = np.full(self._space.dimensions, 0.5)
        kernel = ConstantKernel(1.0, (1e-2, 1e3)) * Matern(scales, (0.02, 10.0), nu=2.5)
        kernel += WhiteKernel(1e-4, (1e-8, 1e-1))
        process = GaussianProcessRegressor(kernel, normalize_y=True)
        with warnings.catch_warnings():  # a parameter at its bound is not a failure
            warnings.simplefilter("ignore", ConvergenceWarning)
            return process.fit(positions, losses)


def stabilized(values: Sequence[float]) -> FloatArray:
    """Return values [n] on the scale that the process models; not finite ones are the worst.

    If all of them exceed 1, as perplexities do, it is the logarithm of the logarithm. Otherwise the
    values that are far above the median are cut.
    """
    losses = as_losses(values).clip(-_LARGEST, _LARGEST)
    if losses.min() > 1:
        twice: FloatArray = np.log(np.log(losses))
        return twice
    best = losses.min()
    cut: FloatArray = np.minimum(losses, best + _SPREADS * (np.median(losses) - best))
    return cut


def expected_improvement(mean: FloatArray, deviation: FloatArray, best: float) -> FloatArray:
    """Return the expected amount [n] by which normal values fall below ``best``."""
    deviation = np.maximum(deviation, 1e-12)
    z = (best - mean) / deviation
    improvement: FloatArray = deviation * (z * norm.cdf(z) + norm.pdf(z))
    return improvement


class SurrogateImprovement(ExpectedImprovement):
    """Bayesian optimization with a prior-fitted network (:mod:`experiments.pabbo_lda.surrogate`).

    The network stands in for the Gaussian process; candidates and stabilized values are the same.
    It needs no training and no fit. ``surrogate`` is another network than the one that ships.
    """

    def __init__(
        self, space: Space, seed: int, surrogate: posterior.Surrogate | None = None
    ) -> None:
        super().__init__(space, seed)
        self._surrogate = surrogate or posterior.load()

    def _gain(self, known: FloatArray, values: Sequence[float], places: FloatArray) -> FloatArray:
        return self._surrogate.expected_improvement(known, stabilized(values), places)
