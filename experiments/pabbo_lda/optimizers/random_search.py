"""Random search without repetition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.pabbo_lda.optimizers.space import IntegerRange, Point, Space

BATCH = 10
ATTEMPTS = 100


class RandomTopics:
    """Uniform draws of T on the scale of its range, without known T."""

    def __init__(self, space: IntegerRange, seed: int) -> None:
        self._unknown = np.arange(space.t_min, space.t_max + 1)
        edges = space.positions(np.stack([self._unknown - 0.5, self._unknown + 0.5]))
        self._weights = edges[1] - edges[0]
        self._rng = np.random.default_rng(seed)

    def ask(self) -> list[Point]:
        """Return up to ten T, drawn with the probability of their width on the scale."""
        size = min(BATCH, len(self._unknown))
        if not size:
            return []
        weights = self._weights / self._weights.sum()
        drawn = self._rng.choice(self._unknown, size, replace=False, p=weights)
        return [Point(int(T)) for T in drawn]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:  # noqa: ARG002
        """Exclude the points from further draws."""
        unknown = ~np.isin(self._unknown, [point.T for point in points])
        self._unknown, self._weights = self._unknown[unknown], self._weights[unknown]


class RandomSearch:
    """Uniform draws of points on the scale of a space with priors, without known points.

    It finishes after 100 batches of draws in a row without an unknown point: by then almost every
    point of such a small space is known.
    """

    def __init__(self, space: Space, seed: int) -> None:
        self._space = space
        self._rng = np.random.default_rng(seed)
        self._known: set[Point] = set()

    def ask(self) -> list[Point]:
        """Return up to ten points."""
        batch: dict[Point, None] = {}  # a set that keeps its order
        for _ in range(ATTEMPTS):
            drawn = self._rng.uniform(-1, 1, (BATCH, self._space.dimensions))
            new = (point for point in self._space.points(drawn) if point not in self._known)
            batch |= dict.fromkeys(new)
            if len(batch) >= BATCH:
                break
        return list(batch)[:BATCH]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:  # noqa: ARG002
        """Exclude the points from further draws."""
        self._known.update(points)
