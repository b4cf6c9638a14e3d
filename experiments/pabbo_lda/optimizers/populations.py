"""Optimizers that ask for a population: genetic, evolution strategies, and natural gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from cmaes import CMA
from scipy.stats import rankdata

from experiments.pabbo_lda.space import FloatArray, IntArray, Point, Space, as_losses

#: of the genetic algorithm
POPULATION, CROSSOVER, MUTATION, ELITE, TOURNAMENT = 20, 0.9, 0.2, 5, 3
PRIOR_BITS = 10
LARGEST_GENE = (1 << PRIOR_BITS) - 1
#: of the evolution strategy
PARENTS, OFFSPRING, FIRST_STEP, SMALLEST_STEP = 5, 10, 0.5, 0.06
#: of the sharpness-aware search
BATCH, RADIUS, FIRST_DEVIATION, SMALLEST_DEVIATION = 10, 0.1, 0.5, 0.03
#: first standard deviation of CMA-ES, of the range [-1, 1]: a sixth of it, as in Optuna
_SIGMA = 1 / 3
#: stands for a value that is not finite in CMA-ES; differences of it are finite
_WORST = 1e300


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

        mean = self._mean - self._deviation * BATCH * slope
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
