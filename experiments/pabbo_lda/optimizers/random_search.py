"""Random search without repetition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.pabbo_lda.optimizers.space import IntegerRange

BATCH = 10


class RandomSearch:
    """Uniform draws on the scale of the range, never a T that is known already."""

    def __init__(self, space: IntegerRange, seed: int) -> None:
        self._unknown = np.arange(space.t_min, space.t_max + 1)
        edges = space.positions(np.stack([self._unknown - 0.5, self._unknown + 0.5]))
        self._weights = edges[1] - edges[0]
        self._rng = np.random.default_rng(seed)

    def ask(self) -> list[int]:
        """Up to ten T drawn in proportion to the room they take on the scale."""
        size = min(BATCH, len(self._unknown))
        if not size:
            return []
        weights = self._weights / self._weights.sum()
        return [int(T) for T in self._rng.choice(self._unknown, size, replace=False, p=weights)]

    def tell(self, points: Sequence[int], values: Sequence[float]) -> None:  # noqa: ARG002
        """Told points are not drawn again."""
        unknown = ~np.isin(self._unknown, points)
        self._unknown, self._weights = self._unknown[unknown], self._weights[unknown]
