"""The search space of an optimizer: points, and their positions in [-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

Scale = Literal["log", "linear"]


class Point(NamedTuple):
    """An argument of the objective; a prior that is not searched is None, which means 1/T."""

    T: int
    alpha: float | None = None  # document-topic prior
    eta: float | None = None  # topic-word prior

    @property
    def given(self) -> dict[str, float]:
        """The coordinates that are not None, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.given.items())


@dataclass(frozen=True)
class IntegerRange:
    """The integers ``t_min .. t_max``, placed on [-1, 1] evenly in T or in log T.

    On the logarithmic scale a step is a factor, as the perplexity of a topic model varies with its
    number of topics.

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
        """Return the position in [-1, 1] of each T."""
        low, high = self._warp(self.t_min), self._warp(self.t_max)
        return 2 * (self._warp(points) - low) / (high - low) - 1

    def integers(self, positions: ArrayLike) -> IntArray:
        """Return the T nearest to each position, positions clipped to [-1, 1]."""
        low, high = self._warp(self.t_min), self._warp(self.t_max)
        inside = np.clip(np.asarray(positions, dtype=np.float64), -1, 1)
        warped = low + (inside + 1) / 2 * (high - low)
        points = np.exp(warped) if self.scale == "log" else warped
        return np.clip(np.rint(points), self.t_min, self.t_max).astype(np.int64)

    def grid(self, size: int) -> IntArray:
        """Return at most ``size`` T, evenly spaced on the scale, ascending, with both ends."""
        count = self.t_max - self.t_min + 1
        if count <= size:
            return np.arange(self.t_min, self.t_max + 1)
        return np.unique(self.integers(np.linspace(-1, 1, size)))

    def _warp(self, points: ArrayLike) -> FloatArray:
        values = np.asarray(points, dtype=np.float64)
        return np.log(values) if self.scale == "log" else values


@dataclass(frozen=True)
class LogRange:
    """The values of a prior, placed on [-1, 1] evenly in their logarithm.

    Values have three significant digits, so that two evaluations can be equal; the ends of the
    range may have more.

    Raises:
        ValueError: unless ``0 < low < high``, both finite.

    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < math.inf:
            raise ValueError(
                f"the range of a prior must be two finite numbers with 0 < low < high, "
                f"not {(self.low, self.high)}"
            )

    def positions(self, values: ArrayLike) -> FloatArray:
        """Return the position in [-1, 1] of each value."""
        low, high = math.log(self.low), math.log(self.high)
        logs = np.log(np.asarray(values, dtype=np.float64))
        return np.clip(2 * (logs - low) / (high - low) - 1, -1, 1)

    def values(self, positions: ArrayLike) -> list[float]:
        """Return the rounded value at each position, positions clipped to [-1, 1]."""
        low, high = math.log(self.low), math.log(self.high)
        inside = np.clip(np.asarray(positions, dtype=np.float64), -1, 1)
        return [self.nearest(value) for value in np.exp(low + (inside + 1) / 2 * (high - low))]

    def nearest(self, value: float) -> float:
        """Return the value rounded to three significant digits and clipped to the range."""
        return float(min(max(float(f"{value:.2e}"), self.low), self.high))


@dataclass(frozen=True)
class Space:
    """The search space: T, and each prior that has a range.

    The dimensions are in the order of ``Point``.

    Raises:
        ValueError: for an empty range.

    """

    t_min: int
    t_max: int
    alpha: tuple[float, float] | None = None
    eta: tuple[float, float] | None = None
    scale: Scale = "log"

    def __post_init__(self) -> None:
        self.topics, self.priors  # noqa: B018 - rejects empty ranges

    @property
    def topics(self) -> IntegerRange:
        """The range of T."""
        return IntegerRange(self.t_min, self.t_max, self.scale)

    @property
    def priors(self) -> dict[str, LogRange]:
        """The ranges of the searched priors, by their names in ``Point``."""
        ranges = {"alpha": self.alpha, "eta": self.eta}
        return {name: LogRange(*ends) for name, ends in ranges.items() if ends is not None}

    @property
    def dimensions(self) -> int:
        """The number of coordinates of a point."""
        return 1 + len(self.priors)

    def positions(self, points: Sequence[Point]) -> FloatArray:
        """Return the positions [n, d] in [-1, 1] of points.

        Raises:
            ValueError: a point lacks a searched prior.

        """
        columns = [self.topics.positions([point.T for point in points])]
        for name, prior in self.priors.items():
            values = [getattr(point, name) for point in points]
            if None in values:
                raise ValueError(f"a point lacks its {name}, which is searched: {points}")
            columns.append(prior.positions(values))
        return np.stack(columns, axis=1)

    def points(self, positions: FloatArray) -> list[Point]:
        """Return the point nearest to each row of ``positions`` [n, d]."""
        topics = (int(T) for T in self.topics.integers(positions[:, 0]))
        columns = zip(self.priors.items(), positions.T[1:], strict=True)
        priors = {name: prior.values(column) for (name, prior), column in columns}
        return [
            Point(T, **{name: values[row] for name, values in priors.items()})
            for row, T in enumerate(topics)
        ]

    def start_points(self, start: Sequence[int]) -> list[Point]:
        """Return the start of a study: each T with the searched priors nearest to 1/T."""
        priors = self.priors.items()
        return [Point(T, **{name: prior.nearest(1 / T) for name, prior in priors}) for T in start]


def as_losses(values: Sequence[float]) -> FloatArray:
    """Return the values as an array; a value that is not finite becomes the worst one."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.inf)
