"""Decisions about points that a noisy machine measured."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from raypipe.sweep.intervals import mean_interval, sequential_interval, two_way_effects
from raypipe.sweep.standing import Standing, adjusted, compare, standing

Machine = Callable[[np.random.Generator, int], np.ndarray]
SPEEDS = {"a": 100.0, "b": 110.0, "c": 60.0, "d": 99.0}


def race(machine: Machine, seed: int, most: int = 12, negligible: float = 0.03) -> Standing:
    """Rounds as a sweep makes them: all points that may be the best, until it is decided."""
    rng = np.random.default_rng(seed)
    values: dict[str, dict[int, float]] = {name: {} for name in SPEEDS}
    names = list(SPEEDS)
    for number in range(most):
        factors = machine(rng, number)
        for name, factor in zip(names, factors, strict=False):
            values[name][number] = SPEEDS[name] * factor
        found = standing(values, "max", negligible, 0.05)
        names = list(found.order)
        if found.is_decided:
            break
    return found


def noisy(scatter: float) -> Machine:
    return lambda rng, number: np.exp(rng.normal(0, scatter, len(SPEEDS)))


def bursts(rng: np.random.Generator, number: int) -> np.ndarray:
    """Other work, now and then, takes up to nine tenths of the machine."""
    hit = rng.random(len(SPEEDS)) < 0.3
    return np.where(hit, rng.uniform(0.1, 1, len(SPEEDS)), rng.uniform(0.97, 1, len(SPEEDS)))


def slower_halfway(rng: np.random.Generator, number: int) -> np.ndarray:
    return np.exp(rng.normal(0, 0.02, len(SPEEDS))) * (1.0 if number < 2 else 0.3)


def test_a_calm_machine_finds_the_best_in_a_few_rounds() -> None:
    found = [race(noisy(0.01), seed) for seed in range(40)]
    assert {standing.best for standing in found} == {"b"}
    assert all(standing.is_decided for standing in found)
    assert np.mean([max(standing.rounds.values()) for standing in found]) < 5


@pytest.mark.parametrize("machine", [noisy(0.1), noisy(0.3), bursts])
def test_a_noisy_machine_finds_the_best_or_cannot_tell(machine: Machine) -> None:
    """Wrong answers that claim to be decided stay below the 5 % that they may have."""
    found = [race(machine, seed) for seed in range(100)]
    wrong = [state for state in found if state.is_decided and state.best != "b"]
    assert len(wrong) <= 0.05 * len(found)
    assert any(not state.is_decided for state in found)


def test_a_machine_that_gets_slower_decides_nothing() -> None:
    """The points that stay in the race are measured on the slower machine."""
    for seed in range(40):
        found = race(slower_halfway, seed)
        assert found.best == "b"
        assert found.centers["b"] > 1.05 * found.centers["a"]
        assert found.centers["b"] > 1.5 * found.centers["c"]


def test_points_that_are_equal_are_not_told_apart() -> None:
    """What is within the threshold ends the rounds on a calm machine, and is called equal."""
    rng = np.random.default_rng(0)
    values = {
        name: {n: speed * math.exp(rng.normal(0, 0.002)) for n in range(6)}
        for name, speed in (("a", 100.0), ("b", 100.5), ("c", 50.0))
    }
    found = standing(values, "max", 0.03, 0.05)
    assert found.is_decided
    assert set(found.order) == {"a", "b"}
    assert set(found.equal) == {"a", "b"} - {found.best}
    assert found.dropped["c"] in ("a", "b")


def test_one_round_tells_nothing() -> None:
    found = standing({"a": {1: 39.0}, "b": {1: 35.0}}, "max", 0.03, 0.05)
    assert (found.best, found.is_decided, list(found.open)) == ("a", False, ["b"])
    assert not found.comparisons["b"].is_known
    alone = standing({"a": {1: 39.0}}, "max", 0.03, 0.05)
    assert alone.is_decided
    with pytest.raises(ValueError, match="no point"):
        standing({}, "max", 0.03, 0.05)


def test_less_can_be_better() -> None:
    values = {"a": {n: 2.0 + 0.01 * (n % 2) for n in range(6)}, "b": dict.fromkeys(range(6), 1.0)}
    found = standing(values, "min", 0.03, 0.05)
    assert (found.best, dict(found.dropped)) == ("b", {"a": "b"})
    assert found.centers["b"] == pytest.approx(1.0)
    ratio = found.comparisons["a"]
    assert ratio.ratio == pytest.approx(0.5, rel=0.01)
    assert ratio.low < ratio.ratio < ratio.high < 0.55
    assert ratio.inverse.ratio == pytest.approx(2, rel=0.01)


def test_points_are_compared_in_common_rounds_only() -> None:
    slow, fast = {1: 50.0, 2: 51.0, 3: 50.5, 4: 50.2}, {3: 10.1, 4: 10.04, 5: 99.0, 6: 98.0}
    assert compare(slow, fast, 0.05).rounds == 2
    assert compare(slow, fast, 0.05).ratio == pytest.approx(5, rel=0.01)
    apart = compare({1: 1.0}, {2: 1.0}, 0.05)
    assert (apart.rounds, apart.noise, apart.is_known) == (0, None, False)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    st.lists(st.floats(0.1, 10), min_size=2, max_size=6),
)
def test_conditions_of_rounds_cancel(speeds: list[float], conditions: list[float]) -> None:
    """A point that misses rounds has the center that it has with them."""
    values = {
        str(place): {n: speed * factor for n, factor in enumerate(conditions)}
        for place, speed in enumerate(speeds)
    }
    whole = adjusted(values)
    for number in range(1, len(conditions)):
        del values["0"][number]
    assert_allclose(list(adjusted(values).values()), list(whole.values()), rtol=1e-6)


def test_an_interval_that_is_looked_at_after_every_value_holds() -> None:
    rng = np.random.default_rng(1)
    missed = fixed = 0
    for _ in range(400):
        x = rng.standard_normal(25)
        ends = [sequential_interval(x[:n]) for n in range(2, 26)]
        missed += any(not low <= 0 <= high for low, high in ends)
        fixed += any(
            not low <= 0 <= high for low, high in (mean_interval(x[:n]) for n in range(2, 26))
        )
    assert missed <= 0.05 * 400 < fixed
    assert mean_interval([1.0]) == sequential_interval([1.0]) == (-math.inf, math.inf)
    assert sequential_interval([1.0, 1.1], 0.01) == (-math.inf, math.inf)


def test_effects_of_complete_values_are_the_means() -> None:
    y = np.arange(6.0).reshape(2, 3) ** 2
    assert_allclose(two_way_effects(y), y.mean(axis=0))
    y[0, 1] = math.nan
    y[:, 2] = math.nan
    assert np.isnan(two_way_effects(y)[2])
