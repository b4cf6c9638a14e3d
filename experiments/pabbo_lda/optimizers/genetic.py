"""A genetic algorithm on the bits of T."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.pabbo_lda.optimizers.space import IntArray, IntegerRange, as_losses

POPULATION = 20
CROSSOVER = 0.9
MUTATION = 0.2
ELITE = 5
TOURNAMENT = 3


class GeneticAlgorithm:
    """Tournament selection, one-point crossover and bit-flip mutation, with an elite.

    The settings are those of the published study; a mutation flips one bit drawn at random, the
    textbook mutation of a bit string (Goldberg 1989, chapter 3), and a T that leaves the range is
    moved to its nearer end. The elite is carried over without being asked for again.
    """

    def __init__(self, space: IntegerRange, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._bits = space.t_max.bit_length()
        self._population: IntArray = np.empty(0, dtype=np.int64)
        self._losses = np.empty(0)

    def ask(self) -> list[int]:
        """The offspring of this generation; random T as long as the population is incomplete."""
        missing = POPULATION - len(self._population)
        if missing > 0:
            low, high = self._space.t_min, self._space.t_max
            drawn = self._rng.integers(low, high, missing, endpoint=True)
            return [int(T) for T in drawn]
        offspring = cross(self._select(POPULATION - ELITE), self._bits, self._rng)
        offspring = mutate(offspring, self._bits, self._rng)
        return [int(T) for T in np.clip(offspring, self._space.t_min, self._space.t_max)]

    def tell(self, points: Sequence[int], values: Sequence[float]) -> None:
        """The elite and the told points become the population."""
        complete = len(self._population) == POPULATION
        kept = slice(ELITE if complete else None)
        population = np.concatenate([self._population[kept], np.asarray(points, dtype=np.int64)])
        losses = np.concatenate([self._losses[kept], as_losses(values)])
        order = np.argsort(losses, kind="stable")[:POPULATION]
        self._population, self._losses = population[order], losses[order]

    def _select(self, count: int) -> IntArray:
        # The population is sorted, so the best of a tournament is its smallest index.
        entrants = self._rng.integers(POPULATION, size=(count, TOURNAMENT))
        selected: IntArray = self._population[entrants.min(axis=1)]
        return selected


def cross(parents: IntArray, bits: int, rng: np.random.Generator) -> IntArray:
    """Exchange, with probability 0.9, the bits of neighbours below a point drawn at random."""
    children = parents.copy()
    for first in range(0, len(parents) - 1, 2):
        if bits > 1 and rng.random() < CROSSOVER:
            low_bits = (1 << int(rng.integers(1, bits))) - 1
            children[first : first + 2] ^= (children[first] ^ children[first + 1]) & low_bits
    return children


def mutate(children: IntArray, bits: int, rng: np.random.Generator) -> IntArray:
    """Flip, with probability 0.2, one of the bits drawn at random."""
    flips = 1 << rng.integers(bits, size=len(children))
    return children ^ np.where(rng.random(len(children)) < MUTATION, flips, 0)
