"""Covariance matrix adaptation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cmaes import CMA

from experiments.pabbo_lda.optimizers.space import FloatArray, Point, Space, as_losses

#: first standard deviation, of the range [-1, 1]: a sixth of it, as in Optuna
_SIGMA = 1 / 3
#: stands for a value that is not finite; differences of it are finite
_WORST = 1e300


class CovarianceAdaptation:
    """CMA-ES (Hansen 2016, arXiv 1604.00772) with restarts, by the library ``cmaes``.

    A batch is a population. The first mean is the best start point. When a population has
    converged, a random mean and twice the population follow (Auger, Hansen 2005).
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._search = self._begin(np.zeros(space.dimensions))
        self._positions: list[FloatArray] = []

    def ask(self) -> list[Point]:
        """Return the next population."""
        self._positions = [self._search.ask() for _ in range(self._search.population_size)]
        return self._space.points(np.stack(self._positions))

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Adapt to the values of the last population, or begin at the best start point."""
        losses = np.minimum(as_losses(values), _WORST)
        if not self._positions:
            if points:
                self._search = self._begin(self._space.positions([points[int(losses.argmin())]])[0])
            return
        self._search.tell(list(zip(self._positions, losses.tolist(), strict=True)))
        if self._search.should_stop():
            mean = self._rng.uniform(-1, 1, self._space.dimensions)
            self._search = self._begin(mean, 2 * self._search.population_size)

    def _begin(self, mean: FloatArray, population: int | None = None) -> CMA:
        bounds = np.tile([-1.0, 1.0], (len(mean), 1))
        seed = int(self._rng.integers(2**32))
        return CMA(mean, _SIGMA, bounds=bounds, seed=seed, population_size=population)
