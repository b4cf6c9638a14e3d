"""Expected improvement under the surrogate that ships."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.pabbo_lda.optimizers.gaussian_process import ExpectedImprovement, stabilized
from experiments.pabbo_lda.optimizers.space import FloatArray, Space
from experiments.pabbo_lda.surrogate import posterior


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
