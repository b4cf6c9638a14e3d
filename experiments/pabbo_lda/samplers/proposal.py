"""Next point of a search: where a surrogate expects the largest improvement."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np
from numpy.typing import NDArray

from experiments.pabbo_lda.samplers.scale import Positions, Scale
from experiments.pabbo_lda.surrogate.posterior import Surrogate

#: candidates spread over the whole space; a space with fewer points is listed instead
_SPREAD = 1024
#: standard deviations of the candidates around the best ones, round by round
_WIDTHS = (0.1, 0.02, 0.004)
#: the best candidates of a round, and the new ones around each of them
_CENTERS, _AROUND = 8, 32
#: most evaluated points per function in the training of the surrogate, and the best ones of them
_MOST_KNOWN, _MOST_BEST = 40, 10
#: decimals in which positions of different points differ
_DIGITS = 12


def spread(start: Positions, numbers: NDArray[np.int64]) -> Positions:
    """Return points of a sequence that fills [-1, 1]^d evenly, of shape [len(numbers), d].

    It is the additive recurrence of Roberts (2018), whose steps are powers of the root of
    x^(d + 1) = x + 1.

    Args:
        start: shift of the sequence, in [0, 1), of shape [d].
        numbers: the places of the points in the sequence.

    """
    dimensions = len(start)
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (dimensions + 1))
    steps = root ** -np.arange(1.0, dimensions + 1)
    return 2 * np.mod(start + np.outer(numbers, steps), 1) - 1


def best_point(
    surrogate: Surrogate,
    scales: Sequence[Scale],
    known: Positions,
    values: NDArray[np.float64],
    rng: np.random.Generator,
) -> Positions:
    """Return the position with the largest expected improvement, of shape [d].

    A known point is only returned if there is no other one. Of more than 40 known points, the
    surrogate sees the best ten, and those that are farthest from each other.

    Args:
        surrogate: the model of the objective.
        scales: the scale of each of the d parameters.
        known: positions of evaluated points, of shape [n, d].
        values: their values, of shape [n]; the objective is minimized.
        rng: generator of candidates, and of the choice between equal ones.

    """
    seen = _representative(known, values)

    def improvements(candidates: Positions) -> NDArray[np.float64]:
        return surrogate.expected_improvement(known[seen], values[seen], candidates)

    levels = [scale.levels for scale in scales]
    is_listed = None not in levels and prod(filter(None, levels)) <= _SPREAD
    if is_listed:
        every = np.array(list(product(*(scale.all() for scale in scales))))
        new = _new(every, known)
        candidates = rng.permutation(new if len(new) else every)
        return _best(candidates, improvements(candidates), 1).reshape(-1)
    points = _on_scales(scales, spread(rng.random(len(scales)), np.arange(_SPREAD)))
    new = _new(points, known)
    candidates = new if len(new) else points
    found = improvements(candidates)
    for width in _WIDTHS:
        centers = _best(candidates, found, _CENTERS)
        if width == _WIDTHS[0]:
            centers = np.concatenate([centers, known[[np.argmin(values)]]])
        moved = np.repeat(centers, _AROUND, axis=0)
        moved = np.clip(moved + width * rng.standard_normal(moved.shape), -1, 1)
        near = _new(_on_scales(scales, moved), known)
        if len(near):
            candidates = np.concatenate([candidates, near])
            found = np.concatenate([found, improvements(near)])
    return _best(candidates, found, 1).reshape(-1)


def _representative(known: Positions, values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the numbers of the points that stand for all of them."""
    if len(known) <= _MOST_KNOWN:
        return np.arange(len(known))
    chosen = list(np.argsort(values, kind="stable")[:_MOST_BEST])
    distances = np.linalg.norm(known[:, None] - known[chosen], axis=2).min(axis=1)
    while len(chosen) < _MOST_KNOWN:
        chosen.append(np.argmax(distances))
        away = np.linalg.norm(known - known[chosen[-1]], axis=1)
        distances = np.minimum(distances, away)
    return np.array(chosen)


def _best(points: Positions, improvements: NDArray[np.float64], number: int) -> Positions:
    return points[np.argsort(-improvements, kind="stable")[:number]]


def _on_scales(scales: Sequence[Scale], points: Positions) -> Positions:
    """Return the positions of the values nearest to points."""
    columns = [
        scale.positions(scale.values(points[:, place])) for place, scale in enumerate(scales)
    ]
    return np.stack(columns, axis=1)


def _new(points: Positions, known: Positions) -> Positions:
    """Return the points that are not known, without repetitions."""
    seen = set(map(tuple, np.round(known, _DIGITS)))
    rows = []
    for number, row in enumerate(map(tuple, np.round(points, _DIGITS))):
        if row not in seen:
            seen.add(row)
            rows.append(number)
    return points[rows]
