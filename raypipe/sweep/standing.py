"""Standing of a sweep's points: which may be the best, after the measurements so far.

Points are compared with each other within rounds, so that a machine that gets slower, or is
disturbed for a while, does not decide. A point is dropped once it is worse than another one, as in
a race (Maron and Moore 1994, "Hoeffding Races"). The intervals hold after any number of rounds
(``sequential_interval``), and their level is shared by all comparisons of a point (Bonferroni): the
best point is dropped with a probability of at most ``alpha``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Literal

import numpy as np

from raypipe.sweep.intervals import mean_interval, sequential_interval, two_way_effects

#: a positive measure of a point by round
Values = Mapping[int, float]


@dataclass(frozen=True)
class Comparison:
    """Ratio of the measure of one point to that of another one, with its confidence interval.

    ``noise`` is the relative standard deviation of the ratio from round to round; None with fewer
    than two common rounds.
    """

    ratio: float
    low: float
    high: float
    rounds: int
    noise: float | None

    @property
    def is_known(self) -> bool:
        """Whether there were enough rounds for an interval."""
        return math.isfinite(self.high)

    @property
    def inverse(self) -> Comparison:
        """The ratio of the second point to the first."""
        low = 1 / self.high if self.is_known else 0.0
        high = 1 / self.low if self.low > 0 else math.inf
        return Comparison(1 / self.ratio, low, high, self.rounds, self.noise)


@dataclass(frozen=True)
class Standing:
    """The points that may be the best.

    Attributes:
        centers: the measure of every point, at the mean conditions of all rounds.
        intervals: their 95 % confidence intervals.
        rounds: the number of rounds of each point.
        order: the points that may be the best, the one with the best center first.
        dropped: the others, with a point that each is worse than.
        open: those of ``order`` that may be better than the first one by more than ``negligible``.
        apart: those of ``open`` whose measurements are all worse than all of the first one, by more
            than either varies: too few to be certain, and no tie.
        equal: those that differ from the first one by at most that, with confidence.
        comparisons: the first one relative to each other point.
        least_rounds: the fewest rounds that two of ``order`` have in common.

    """

    centers: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    rounds: Mapping[str, int]
    order: Sequence[str]
    dropped: Mapping[str, str]
    open: Sequence[str]
    apart: Sequence[str]
    equal: Sequence[str]
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    least_rounds: int = 0

    @property
    def best(self) -> str:
        """The point with the best center of those that may be the best."""
        return self.order[0]

    @property
    def is_decided(self) -> bool:
        """Whether no other point can be better than the best by more than what is negligible."""
        return not self.open


def compare(first: Values, second: Values, alpha: float) -> Comparison:
    """Compare two points over the rounds in which both were measured."""
    common = sorted(first.keys() & second.keys())
    logs = np.array([math.log(first[n]) - math.log(second[n]) for n in common])
    low, high = sequential_interval(logs, alpha)
    noise = math.expm1(float(logs.std(ddof=1))) if logs.size > 1 else None
    ratio = math.exp(float(logs.mean())) if logs.size else math.nan
    return Comparison(ratio, math.exp(low), _exp(high), len(common), noise)


def standing(
    values: Mapping[str, Values], mode: Literal["max", "min"], negligible: float, alpha: float
) -> Standing:
    """Return which points may be the best.

    Args:
        values: the measure of each point by round, above 0; every point has a round.
        mode: whether more or less of it is better.
        negligible: the relative difference that does not matter.
        alpha: the probability of a wrong decision.

    Raises:
        ValueError: there is no point.

    """
    if not values:
        raise ValueError("there is no point to compare")
    names = list(values)
    level = alpha / max(1, len(names) - 1)
    gain = {n: v if mode == "max" else {k: 1 / x for k, x in v.items()} for n, v in values.items()}
    ratios = {(a, b): compare(gain[a], gain[b], level) for a in names for b in names if a != b}
    worse = {
        name: max((o for o in names if o != name), key=lambda o: ratios[o, name].low, default="")
        for name in names
    }
    dropped = {n: o for n, o in worse.items() if o and ratios[o, n].low > 1}
    centers = adjusted(gain)
    # of two points, each cannot be worse than the other; if all were dropped, rounds contradict
    left = [name for name in names if name not in dropped] or names
    order = sorted(left, key=lambda name: (-centers[name], names.index(name)))
    best, trifle = order[0], 1 + negligible
    against = {name: ratios[best, name] for name in names if name != best}
    rest = order[1:]
    shown = {name: c if mode == "max" else 1 / c for name, c in centers.items()}
    return Standing(
        centers=shown,
        intervals={name: _interval(values[name], shown[name]) for name in names},
        rounds={name: len(values[name]) for name in names},
        order=order,
        dropped={name: other for name, other in dropped.items() if name not in left},
        open=[name for name in rest if against[name].low * trifle < 1],
        apart=[
            name
            for name in rest
            if against[name].low * trifle < 1 and _is_apart(gain[best], gain[name])
        ],
        equal=[n for n in rest if against[n].low * trifle >= 1 and against[n].high <= trifle],
        comparisons={
            name: found if mode == "max" else found.inverse for name, found in against.items()
        },
        least_rounds=min((ratios[a, b].rounds for a in order for b in order if a != b), default=0),
    )


def _is_apart(first: Values, second: Values) -> bool:
    """Whether the first is better in all of its rounds, by more than either varies."""
    (low, high), (least, most) = ((min(v.values()), max(v.values())) for v in (first, second))
    rounds = min(len(first), len(second))
    return rounds > 1 and low - most > max(high - low, most - least)


def adjusted(values: Mapping[str, Values]) -> dict[str, float]:
    """Return each point's measure at the mean conditions of all rounds.

    Points that were dropped early were measured in other rounds than the rest. The logarithms are
    fitted by the sum of an effect of the point and one of the round.
    """
    rounds = sorted({number for of_point in values.values() for number in of_point})
    logs = [
        [
            math.log(of_point[number]) if number in of_point else math.nan
            for of_point in values.values()
        ]
        for number in rounds
    ]
    effects = two_way_effects(logs)
    return {name: math.exp(effect) for name, effect in zip(values, effects, strict=True)}


def _interval(values: Values, center: float) -> tuple[float, float]:
    """Return the 95 % interval of a point's measure, around its adjusted center."""
    logs = [math.log(value) for value in values.values()]
    low, high = mean_interval(logs)
    shift = math.log(center) - fmean(logs)
    return math.exp(low + shift), _exp(high + shift)


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
