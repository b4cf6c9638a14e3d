"""Points of axes: their combinations, random draws, and proposals of Optuna's samplers.

Each proposal has its own sampler, whose seed derives from the seed of the study and the number of
the proposal. It depends on these and on the points so far, not on the memory of a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from raypipe.config.axes import AxisSettings
from raypipe.config.matrix import Point, Sampler, is_seed

if TYPE_CHECKING:  # slow to import, and not needed where all values are listed
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.study import Study

#: significant digits of a value of a range, and the relative width below which it keeps all
_DIGITS, _NARROW = 6, 1e-3


def points(axes: Mapping[str, AxisSettings], samples: int, seed: int) -> Iterator[Point]:
    """Yield all combinations of the listed values, each with ``samples`` draws of the ranges.

    A draw depends only on the seed, its number and the key: further samples or axes do not change
    it.
    """
    lists = {key: axis.listed for key, axis in axes.items() if axis.listed is not None}
    ranges = {key: axis for key, axis in axes.items() if key not in lists}
    draws = [draw(ranges, seed, number) for number in range(samples if ranges else 1)]
    for values in product(*lists.values()):
        for drawn in draws:
            together = dict(zip(lists, values, strict=True)) | drawn
            yield {key: together[key] for key in axes}


def draw(axes: Mapping[str, AxisSettings], seed: int, number: int) -> Point:
    """Return random values of axes by key."""
    from optuna.samplers import RandomSampler

    found = {}
    for key, axis in axes.items():
        entropy = int.from_bytes(sha256(key.encode()).digest()[:8])
        study = optuna_study(["minimize"], RandomSampler(seed=_seed(seed, number, entropy)))
        found[key] = rounded(axis, study.ask({key: distribution(axis)}).params[key])
    return found


def rounded(axis: AxisSettings, value: Any) -> Any:
    """Return a value inside its range, with few digits unless the range is narrow."""
    if axis.low is None or axis.high is None or not isinstance(value, float):
        return value
    if axis.high - axis.low >= _NARROW * max(abs(axis.low), abs(axis.high)):
        value = float(f"{value:.{_DIGITS}g}")
    return min(max(value, float(axis.low)), float(axis.high))


def optuna_study(
    directions: Sequence[Literal["minimize", "maximize"]], sampler: BaseSampler
) -> Study:
    """Return a new study in memory, which prints nothing."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna.create_study(directions=list(directions), sampler=sampler)


def distribution(axis: AxisSettings) -> BaseDistribution:
    """Return Optuna's distribution of an axis."""
    from optuna import distributions

    if axis.values is not None or (axis.log and axis.step is not None):
        return distributions.CategoricalDistribution(axis.listed or ())
    (low, high), step = axis.ends, axis.step
    if axis.is_integer and isinstance(step, int | None):
        whole = int(low), int(high)
        return distributions.IntDistribution(*whole, log=axis.log, step=step or 1)
    return distributions.FloatDistribution(float(low), float(high), log=axis.log, step=step)


def sampler_for(name: Sampler, seed: int, number: int) -> BaseSampler:
    """Return the sampler of a proposal from the seed of the search and the proposal's number."""
    import optuna

    own = _seed(seed, number)
    with warnings.catch_warnings():
        # the interface of some may change: the version of Optuna has an upper bound
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        if name == "tpe":
            return optuna.samplers.TPESampler(seed=own, constant_liar=True)
        if name == "gp":
            return optuna.samplers.GPSampler(seed=own)
        return optuna.samplers.RandomSampler(seed=own)


def _seed(*parts: int) -> int:
    return int(np.random.SeedSequence(parts).generate_state(1).item())


def seedless(point: Mapping[str, Any]) -> Point:
    """Return a point without seeds: points that differ in them only are one."""
    return {key: value for key, value in point.items() if not is_seed(key)}


def shown(point: Mapping[str, Any]) -> str:
    """Return a point as text: the last part of each key, and its value."""
    words = []
    for key, value in point.items():
        text = f"{value:.4g}" if isinstance(value, float) else value
        words.append(f"{key.rpartition('.')[2]}={text}")
    return " ".join(words)
