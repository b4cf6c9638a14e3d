"""A genetic algorithm on the bits of T and of the priors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.pabbo_lda.optimizers.space import IntArray, Point, Space, as_losses

POPULATION = 20
CROSSOVER = 0.9
MUTATION = 0.2
ELITE = 5
TOURNAMENT = 3
PRIOR_BITS = 10
LARGEST_GENE = (1 << PRIOR_BITS) - 1


class GeneticAlgorithm:
    """Tournament selection, one-point crossover and bit-flip mutation, with an elite.

    The settings are those of the published study. A mutation flips one random bit, the textbook
    mutation of a bit string (Goldberg 1989, chapter 3); a T outside the range moves to its nearer
    end. A chromosome is the bits of T, followed by ten bits for each searched prior: the index of
    one of 1024 values that are even in the logarithm. The elite survives without another
    evaluation.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._prior_bits = PRIOR_BITS * len(space.priors)
        self._bits = space.t_max.bit_length() + self._prior_bits
        self._population: IntArray = np.empty(0, dtype=np.int64)
        self._losses = np.empty(0)

    def ask(self) -> list[Point]:
        """Return the next offspring; random ones while the population is incomplete."""
        missing = POPULATION - len(self._population)
        if missing > 0:
            low, high = self._space.t_min, self._space.t_max
            topics = self._rng.integers(low, high, missing, endpoint=True)
            priors = self._rng.integers(1 << self._prior_bits, size=missing)
            return self._decode(topics << self._prior_bits | priors)
        offspring = cross(self._select(POPULATION - ELITE), self._bits, self._rng)
        return self._decode(mutate(offspring, self._bits, self._rng))

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Select the next population from the elite and the points."""
        complete = len(self._population) == POPULATION
        kept = slice(ELITE if complete else None)
        population = np.concatenate([self._population[kept], self._encode(points)])
        losses = np.concatenate([self._losses[kept], as_losses(values)])
        order = np.argsort(losses, kind="stable")[:POPULATION]
        self._population, self._losses = population[order], losses[order]

    def _select(self, count: int) -> IntArray:
        # The population is sorted, so the best of a tournament is its smallest index.
        entrants = self._rng.integers(POPULATION, size=(count, TOURNAMENT))
        selected: IntArray = self._population[entrants.min(axis=1)]
        return selected

    def _encode(self, points: Sequence[Point]) -> IntArray:
        chromosomes = np.array([point.T for point in points], dtype=np.int64)
        for column in self._space.positions(points).T[1:]:
            genes = np.rint((column + 1) / 2 * LARGEST_GENE).astype(np.int64)
            chromosomes = chromosomes << PRIOR_BITS | genes
        return chromosomes

    def _decode(self, chromosomes: IntArray) -> list[Point]:
        topics = np.clip(chromosomes >> self._prior_bits, self._space.t_min, self._space.t_max)
        shifts = range(self._prior_bits - PRIOR_BITS, -1, -PRIOR_BITS)
        genes = [chromosomes >> shift & LARGEST_GENE for shift in shifts]
        positions = [self._space.topics.positions(topics)]
        positions += [2 * gene / LARGEST_GENE - 1 for gene in genes]
        return self._space.points(np.stack(positions, axis=1))


def cross(parents: IntArray, bits: int, rng: np.random.Generator) -> IntArray:
    """Exchange, with probability 0.9, the bits of neighbors below a random position."""
    children = parents.copy()
    for first in range(0, len(parents) - 1, 2):
        if bits > 1 and rng.random() < CROSSOVER:
            low_bits = (1 << int(rng.integers(1, bits))) - 1
            children[first : first + 2] ^= (children[first] ^ children[first + 1]) & low_bits
    return children


def mutate(children: IntArray, bits: int, rng: np.random.Generator) -> IntArray:
    """Flip, with probability 0.2, one random bit."""
    flips = 1 << rng.integers(bits, size=len(children))
    return children ^ np.where(rng.random(len(children)) < MUTATION, flips, 0)
