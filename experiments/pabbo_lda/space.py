"""The search space of an optimizer: points, and their positions in [-1, 1]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


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
class Scale:
    """The values of a parameter, both ends included, and their positions in [-1, 1].

    ``log`` places values evenly by their logarithm: a step is a factor. ``step`` is the distance of
    neighboring values, from ``low`` on; None if every number of the range is a value. With
    ``digits``, values are rounded to as many significant digits, so that two can be equal; the ends
    of the range may have more.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None
    digits: int | None = None

    @property
    def levels(self) -> int | None:
        """The number of values; None without a step."""
        return None if self.step is None else round((self.high - self.low) / self.step) + 1

    def positions(self, values: ArrayLike) -> FloatArray:
        """Return the position of each value: -1 for ``low``, 1 for ``high``, and so on beyond."""
        low, half = self._low_and_half
        return (self._coordinates(values) / 2 - low / 2) / half * 2 - 1

    def values(self, positions: ArrayLike) -> FloatArray:
        """Return the value nearest to each position, positions clipped to [-1, 1]."""
        low, half = self._low_and_half
        inside = np.clip(np.asarray(positions, dtype=np.float64), -1, 1)
        found = (low + half) + half * inside
        if self.log:
            found = np.exp(found)
        if self.step is not None:
            found = self.low + self.step * np.round((found - self.low) / self.step)
        inside = np.clip(self._rounded(found), self.low, self.high)
        return inside.astype(np.float64)

    def grid(self, size: int) -> FloatArray:
        """Return at most ``size`` values, evenly spaced, ascending, with both ends."""
        if self.step is not None and self.levels is not None and self.levels <= size:
            return (self.low + self.step * np.arange(self.levels)).astype(np.float64)
        return np.unique(self.values(np.linspace(-1, 1, size)))

    def nearest(self, value: float) -> float:
        """Return the value of the scale without a step that is nearest to any number."""
        return float(np.clip(self._rounded(value), self.low, self.high))

    def _rounded(self, values: ArrayLike) -> FloatArray:
        if self.digits is None:
            return np.asarray(values, dtype=np.float64)
        texts = np.vectorize(f"{{:.{self.digits - 1}e}}".format, otypes=[object])(values)
        return np.asarray(texts, dtype=np.float64)

    def _coordinates(self, values: ArrayLike) -> FloatArray:
        plain = np.asarray(values, dtype=np.float64)
        return np.log(plain) if self.log else plain

    @cached_property
    def _low_and_half(self) -> tuple[float, float]:
        """The lower end and half of the width, on a range whose width may exceed a float."""
        low, high = self._coordinates([self.low, self.high])
        return low, (high / 2 - low / 2) or 1.0


@dataclass(frozen=True)
class Space:
    """The search space: T on its logarithm, and the logarithm of each prior that has a range.

    The perplexity of a topic model varies with factors of its number of topics. The dimensions are
    in the order of ``Point``.

    Raises:
        ValueError: for an empty range.

    """

    t_min: int
    t_max: int
    alpha: tuple[float, float] | None = None
    eta: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.t_min < self.t_max:
            raise ValueError(
                f"the range of T must hold at least two values from 1 on, "
                f"not t_min={self.t_min}, t_max={self.t_max}"
            )
        for prior in self.priors.values():
            if not 0 < prior.low < prior.high < math.inf:
                raise ValueError(
                    f"the range of a prior must be two finite numbers with 0 < low < high, "
                    f"not {(prior.low, prior.high)}"
                )

    @cached_property
    def topics(self) -> Scale:
        """The scale of T."""
        return Scale(self.t_min, self.t_max, log=True, step=1)

    @cached_property
    def priors(self) -> dict[str, Scale]:
        """The scales of the searched priors, by their names in ``Point``."""
        ranges = {"alpha": self.alpha, "eta": self.eta}
        return {name: Scale(*ends, log=True, digits=3) for name, ends in ranges.items() if ends}

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
        scales = [self.topics, *self.priors.values()]
        columns = (
            scale.values(column).tolist() for scale, column in zip(scales, positions.T, strict=True)
        )
        rows = zip(*columns, strict=True)
        return [Point(round(T), **dict(zip(self.priors, rest, strict=True))) for T, *rest in rows]

    def start_points(self, start: Sequence[int]) -> list[Point]:
        """Return the start of a study: each T with the searched priors nearest to 1/T."""
        priors = self.priors.items()
        return [Point(T, **{name: prior.nearest(1 / T) for name, prior in priors}) for T in start]


def as_losses(values: Sequence[float]) -> FloatArray:
    """Return the values as an array; a value that is not finite becomes the worst one."""
    array = np.asarray(values, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.inf)
