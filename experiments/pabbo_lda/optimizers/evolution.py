"""A (mu, lambda) evolution strategy on the scale of T."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.pabbo_lda.optimizers.space import FloatArray, IntegerRange, as_losses

PARENTS = 5
OFFSPRING = 10
LEARNING_RATE = 2**-0.5
FIRST_STEP = 0.5
SMALLEST_STEP = 0.06


class EvolutionStrategy:
    """(5, 10) selection with Gaussian mutation; parents do not survive.

    Every individual carries its own step size, mutated before its position by a log-normal factor
    with rate ``1 / sqrt(2 n)``, n = 1 (Beyer and Schwefel 2002, "Evolution strategies", section 5).
    Positions and steps are on the scale of the range, [-1, 1]: the first step is a quarter of it;
    the smallest, a factor of 1.2 in T on log T in [2, 1000], keeps the search from ending between
    two integers.
    """

    def __init__(self, space: IntegerRange, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._parents: FloatArray = np.empty(0)
        self._steps: FloatArray = np.empty(0)
        self._children: FloatArray = np.empty(0)
        self._child_steps: FloatArray = np.empty(0)

    def ask(self) -> list[int]:
        """Ten offspring; random ones as long as there are no parents."""
        if len(self._parents):
            chosen = self._rng.integers(len(self._parents), size=OFFSPRING)
            factors = np.exp(LEARNING_RATE * self._rng.standard_normal(OFFSPRING))
            steps = np.clip(self._steps[chosen] * factors, SMALLEST_STEP, 1)
            moves = steps * self._rng.standard_normal(OFFSPRING)
            self._children = np.clip(self._parents[chosen] + moves, -1, 1)
        else:
            steps = np.full(OFFSPRING, FIRST_STEP)
            self._children = self._rng.uniform(-1, 1, OFFSPRING)
        self._child_steps = steps
        return [int(T) for T in self._space.integers(self._children)]

    def tell(self, points: Sequence[int], values: Sequence[float]) -> None:
        """The best five of the told points are the next parents."""
        if not len(self._children):  # the start: values that nobody has mutated yet
            self._children = self._space.positions(points)
            self._child_steps = np.full(len(points), FIRST_STEP)
        best = np.argsort(as_losses(values), kind="stable")[:PARENTS]
        self._parents, self._steps = self._children[best], self._child_steps[best]
        self._children = np.empty(0)
