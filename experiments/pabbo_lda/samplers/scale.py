"""Scale of a parameter: its values, and their positions in [-1, 1]."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Positions = NDArray[np.float64]


@dataclass(frozen=True)
class Scale:
    """Range of a number, both ends included.

    ``log`` places values evenly by their logarithm. ``step`` is the distance of neighboring values,
    from ``low`` on; None if every number of the range is a value.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None

    @property
    def levels(self) -> int | None:
        """The number of values; None without a step."""
        return None if self.step is None else round((self.high - self.low) / self.step) + 1

    def all(self) -> Positions:
        """Return the positions of all values, of shape [levels]."""
        if self.step is None or self.levels is None:
            raise ValueError("a scale without a step has no list of values")
        return self.positions(self.low + self.step * np.arange(self.levels))

    def positions(self, values: ArrayLike) -> Positions:
        """Return the position of each value: -1 for ``low``, 1 for ``high``."""
        center, half = self._center_and_half
        return np.clip((self._coordinates(values) - center) / half, -1, 1)

    def values(self, positions: ArrayLike) -> NDArray[np.float64]:
        """Return the value nearest to each position in [-1, 1]."""
        center, half = self._center_and_half
        found = center + half * np.asarray(positions, dtype=np.float64)
        if self.log:
            found = np.exp(found)
        if self.step is not None:
            found = self.low + self.step * np.round((found - self.low) / self.step)
        return np.clip(found, self.low, self.high)

    def _coordinates(self, values: ArrayLike) -> NDArray[np.float64]:
        plain = np.asarray(values, dtype=np.float64)
        return np.log(plain) if self.log else plain

    @property
    def _center_and_half(self) -> tuple[float, float]:
        """The middle of the range and half of its width, which may be too small for a float."""
        low, high = self._coordinates([self.low, self.high])
        return low / 2 + high / 2, (high / 2 - low / 2) or 1.0
