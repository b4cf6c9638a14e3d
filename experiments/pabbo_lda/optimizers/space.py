"""The integers an optimiser searches, seen as positions in [-1, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

Scale = Literal["log", "linear"]


@dataclass(frozen=True)
class IntegerRange:
    """The integers ``t_min .. t_max``, placed on [-1, 1] evenly in T or in log T.

    On the logarithmic scale a step is a factor, which is how the perplexity of a topic model varies
    with its number of topics.

    Raises:
        ValueError: unless ``1 <= t_min < t_max``.

    """

    t_min: int
    t_max: int
    scale: Scale = "log"

    def __post_init__(self) -> None:
        if not 1 <= self.t_min < self.t_max:
            raise ValueError(
                f"the range of T must hold at least two values from 1 on, "
                f"not t_min={self.t_min}, t_max={self.t_max}"
            )

    def positions(self, points: ArrayLike) -> FloatArray:
        """The position in [-1, 1] of each T."""
        low, high = self._warp(self.t_min), self._warp(self.t_max)
        return 2 * (self._warp(points) - low) / (high - low) - 1

    def integers(self, positions: ArrayLike) -> IntArray:
        """The T nearest to each position; positions beyond [-1, 1] give the end values."""
        low, high = self._warp(self.t_min), self._warp(self.t_max)
        inside = np.clip(np.asarray(positions, dtype=np.float64), -1, 1)
        warped = low + (inside + 1) / 2 * (high - low)
        points = np.exp(warped) if self.scale == "log" else warped
        return np.clip(np.rint(points), self.t_min, self.t_max).astype(np.int64)

    def grid(self, size: int) -> IntArray:
        """At most ``size`` T, evenly spaced on the scale, ascending, with both ends."""
        count = self.t_max - self.t_min + 1
        if count <= size:
            return np.arange(self.t_min, self.t_max + 1)
        return np.unique(self.integers(np.linspace(-1, 1, size)))

    def _warp(self, points: ArrayLike) -> FloatArray:
        values = np.asarray(points, dtype=np.float64)
        return np.log(values) if self.scale == "log" else values


def as_losses(values: Sequence[float]) -> FloatArray:
    """The values as an array in which everything that is not finite counts as the worst."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.inf)
