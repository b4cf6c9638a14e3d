"""Points of a sweep: all combinations of the grids, with draws for the other axes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from itertools import product

import numpy as np

from raypipe.config.axes import AxisSettings, Value
from raypipe.graph.identity import canonical_json

Point = dict[str, Value]


def points(axes: Mapping[str, AxisSettings], samples: int, seed: int) -> Iterator[Point]:
    """Return the points: the values of all axes by key.

    With grids only, these are all combinations; otherwise ``samples`` draws for each combination.
    A draw depends only on the seed, its number and the key: further samples or axes do not change
    it.
    """
    grids = {key: axis.grid for key, axis in axes.items() if axis.grid is not None}
    drawn = {key: axis for key, axis in axes.items() if axis.grid is None}
    for values in product(*grids.values()):
        fixed = dict(zip(grids, values, strict=True))
        for number in range(samples if drawn else 1):
            chosen = {key: draw(axis, key, number, seed) for key, axis in drawn.items()}
            together = fixed | chosen
            yield {key: together[key] for key in axes}


def draw(axis: AxisSettings, key: str, number: int, seed: int) -> Value:
    """Return the value of a choice or a range in draw ``number``."""
    entropy = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8])
    return place(axis, float(np.random.default_rng([seed, number, entropy]).random()))


def place(axis: AxisSettings, share: float) -> Value:
    """Return the value at a quantile in [0, 1) of a choice or a range."""
    if axis.choice is not None:
        return axis.choice[int(share * len(axis.choice))]
    if axis.low is None or axis.high is None:
        raise ValueError("a grid has no place for a draw")
    low, high = float(axis.low), float(axis.high)
    if axis.is_integer:  # each integer n covers [n - 0.5, n + 0.5)
        low, high = low - 0.5, high + 0.5
    if axis.log:
        value = math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    else:
        value = low + share * (high - low)
    if axis.is_integer:
        return int(min(max(round(value), axis.low), axis.high))
    return min(max(value, float(axis.low)), float(axis.high))


def seedless(point: Mapping[str, Value]) -> Point:
    """Return a point without the seeds of trainings: points that differ in them only are one."""
    return {key: value for key, value in point.items() if not key.endswith(".training.seed")}


def point_key(point: Mapping[str, Value]) -> str:
    """Return the text that is the same for all seeds of a point, and for no other point."""
    return canonical_json(seedless(point))
