"""Bisection of the gap next to the best T."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.pabbo_lda.optimizers.space import FloatArray, IntegerRange, Point, as_losses


class Bisection:
    """Probe the middle of the wider gap next to the best known T, on the scale of the range.

    A baseline without a model. The gaps end at the nearest known T, or at the end of the range. The
    search finishes when no integer is left in them.
    """

    def __init__(self, space: IntegerRange) -> None:
        self._space = space
        self._losses: dict[int, float] = {}

    def ask(self) -> list[Point]:
        """Return the next probe; nothing once both gaps are exhausted."""
        if not self._losses:
            return [Point(int(self._space.integers(0.0)))]
        best = min(self._losses, key=lambda T: (self._losses[T], T))
        below = [T for T in self._losses if best > T]
        above = [T for T in self._losses if best < T]
        # one beyond the range, so that its ends can be probed, too
        left = max(below, default=self._space.t_min - 1)
        right = min(above, default=self._space.t_max + 1)
        gaps = [(low, high) for low, high in ((left, best), (best, right)) if high - low > 1]
        if not gaps:
            return []
        low, high = max(gaps, key=lambda gap: float(np.ptp(self._ends(gap))))
        middle = int(self._space.integers(self._ends((low, high)).mean()))
        return [Point(min(max(middle, low + 1), high - 1))]

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        """Store the values."""
        topics = (point.T for point in points)
        self._losses.update(zip(topics, as_losses(values).tolist(), strict=True))

    def _ends(self, gap: tuple[int, int]) -> FloatArray:
        """Return the positions of the ends of a gap; that below T = 1 ends at 0.5."""
        return self._space.positions(np.maximum(gap, 0.5))
