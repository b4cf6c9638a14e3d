"""Golden-section search on log T."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.pabbo_lda.optimizers.space import IntegerRange, Point, as_losses

GOLDEN = (3 - 5**0.5) / 2


class GoldenSection:
    """Golden-section search (Kiefer 1953) for the minimum of a function unimodal in T.

    The bracket is the best known T with its nearest known neighbors, or the ends of the range
    where it has none. Each step probes the wider side, the golden fraction (0.382 of its width on
    the scale) away from the best T. When no integer is left inside the bracket, its ends are
    evaluated if they are unknown, and the search finishes.
    """

    def __init__(self, space: IntegerRange) -> None:
        self._space = space
        self._losses: dict[int, float] = {}

    def ask(self) -> list[Point]:
        """Return the next probe, the unknown ends of an exhausted bracket, or nothing."""
        return [Point(T) for T in self._next()]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Store the values."""
        topics = (point.T for point in points)
        self._losses.update(zip(topics, as_losses(values).tolist(), strict=True))

    def _next(self) -> list[int]:
        if not self._losses:
            return [int(self._space.integers(0.0))]
        best = min(self._losses, key=lambda T: (self._losses[T], T))
        below = [T for T in self._losses if best - T > 0]
        above = [T for T in self._losses if T - best > 0]
        left, right = max(below, default=self._space.t_min), min(above, default=self._space.t_max)
        if right - best > 1 or best - left > 1:
            return [self._probe(left, best, right)]
        return [T for T in (left, right) if T not in self._losses]

    def _probe(self, left: int, best: int, right: int) -> int:
        x_left, x_best, x_right = self._space.positions([left, best, right])
        rightwards = right - best > 1 and (best - left <= 1 or x_right - x_best > x_best - x_left)
        target = x_right if rightwards else x_left
        nearest = int(self._space.integers(x_best + GOLDEN * (target - x_best)))
        # Rounding must not return an end of the interval.
        low, high = (best + 1, right - 1) if rightwards else (left + 1, best - 1)
        return int(np.clip(nearest, low, high))
