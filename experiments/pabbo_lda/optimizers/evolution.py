"""A (mu, lambda) evolution strategy on the scale of the space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.pabbo_lda.optimizers.space import FloatArray, Point, Space, as_losses

PARENTS = 5
OFFSPRING = 10
FIRST_STEP = 0.5
SMALLEST_STEP = 0.06


class EvolutionStrategy:
    """(5, 10) selection with Gaussian mutation; parents do not survive.

    Every individual has one step size for all n dimensions, mutated before its position by a
    log-normal factor with rate ``1 / sqrt(2 n)`` (Beyer and Schwefel 2002,
    "Evolution strategies", section 5).
    Positions and steps are on the scale of the space, [-1, 1]: the first step is a quarter of it;
    the smallest, a factor of 1.2 in T on log T in [2, 1000], keeps the search from stopping
    between two integers.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._learning_rate = (2 * space.dimensions) ** -0.5
        self._parents: FloatArray = np.empty((0, space.dimensions))
        self._steps: FloatArray = np.empty(0)
        self._children: FloatArray = np.empty((0, space.dimensions))
        self._child_steps: FloatArray = np.empty(0)

    def ask(self) -> list[Point]:
        """Return ten offspring; random ones while there are no parents."""
        shape = (OFFSPRING, self._space.dimensions)
        if len(self._parents):
            chosen = self._rng.integers(len(self._parents), size=OFFSPRING)
            factors = np.exp(self._learning_rate * self._rng.standard_normal(OFFSPRING))
            steps = np.clip(self._steps[chosen] * factors, SMALLEST_STEP, 1)
            moves = steps[:, None] * self._rng.standard_normal(shape)
            self._children = np.clip(self._parents[chosen] + moves, -1, 1)
        else:
            steps = np.full(OFFSPRING, FIRST_STEP)
            self._children = self._rng.uniform(-1, 1, shape)
        self._child_steps = steps
        return self._space.points(self._children)

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Select the best five points as the next parents."""
        if not len(self._children):  # the start, which is not a generation of offspring
            self._children = self._space.positions(points)
            self._child_steps = np.full(len(points), FIRST_STEP)
        best = np.argsort(as_losses(values), kind="stable")[:PARENTS]
        self._parents, self._steps = self._children[best], self._child_steps[best]
        self._children = self._children[:0]
