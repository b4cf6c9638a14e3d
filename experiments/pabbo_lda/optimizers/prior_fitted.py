"""Expected improvement under the surrogate that ships."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.pabbo_lda.optimizers.gaussian_process import ExpectedImprovement
from experiments.pabbo_lda.optimizers.space import FloatArray, Space
from raypipe.surrogate import posterior
from raypipe.surrogate.model import LARGEST


class SurrogateImprovement(ExpectedImprovement):
    """Bayesian optimization with a prior-fitted network (:mod:`raypipe.surrogate`).

    The network stands in for the Gaussian process; the candidates are the same. It needs no
    training and no fit, and scales the values itself.
    """

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
        self._surrogate = posterior.load()

    def _gain(self, known: FloatArray, values: Sequence[float], places: FloatArray) -> FloatArray:
        finite = [min(value, LARGEST) for value in values]
        return self._surrogate.expected_improvement(known, finite, places)
