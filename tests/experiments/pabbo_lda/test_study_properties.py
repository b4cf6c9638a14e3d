"""Whatever the optimizer, space, budget and values: a study depends on nothing else.

Not on the order in which values arrive, nor on being killed and continued, nor on its budget but
in where it ends.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.pabbo_lda.optimizers import (
    T_ONLY,
    Optimizer,
    OptimizerName,
    Point,
    Space,
    make_optimizer,
)
from experiments.pabbo_lda.optimizers.space import FloatArray, IntArray
from experiments.pabbo_lda.study.study import Study

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)


def pseudo_scorer(
    duels: FloatArray, preferred: FloatArray, points: FloatArray, pairs: IntArray, used: float
) -> FloatArray:
    """Stands in for a trained model: any function of all it is shown."""
    phase = (duels * [1.7, 3.1]).sum() + (preferred + 0.5).sum() + used
    return (points[pairs] * [5.3, 2.9] + phase).sum(axis=1) % 1.0


class Within:
    """An optimizer whose proposals are looked at."""

    def __init__(self, optimizer: Optimizer, space: Space) -> None:
        self._optimizer, self._space = optimizer, space

    def ask(self) -> list[Point]:
        batch = self._optimizer.ask()
        for point in batch:
            assert isinstance(point, Point)
            assert type(point.T) is int
            assert self._space.t_min <= point.T <= self._space.t_max
            priors = ((point.alpha, self._space.alpha), (point.eta, self._space.eta))
            for value, ends in priors:
                assert (value is None) == (ends is None)
                if value is not None and ends is not None:
                    assert type(value) is float
                    assert ends[0] <= value <= ends[1]
        return batch

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        self._optimizer.tell(points, values)


@dataclass(frozen=True)
class Case:
    """All that a study may depend on."""

    space: Space
    start: tuple[int, ...]
    budget: int
    iterations: int | None
    seed: int
    values: int

    def study(self, name: OptimizerName) -> Study:
        scorer = pseudo_scorer if name.startswith("pabbo") else None
        optimizer = make_optimizer(name, space=self.space, seed=self.seed, scorer=scorer)
        start = self.space.start_points(self.start)
        return Study(Within(optimizer, self.space), start, self.budget, self.iterations)

    def value(self, point: Point) -> float:
        """Any function of the points: ties, huge values, and some that are no numbers."""
        draw = random.Random(f"{self.values} {point}")
        odd = draw.choice([math.nan, math.inf, -math.inf, 1e44, 1.0])
        return odd if draw.random() < 0.3 else draw.uniform(0, 1e4)

    def finish(self, study: Study, order: random.Random | None = None) -> list[str]:
        """The history, as text: a value that is no number equals itself there."""
        while not study.done:
            wanted = study.request()
            assert wanted, "a study that is not done needs a value"
            point = order.choice(wanted) if order else wanted[0]
            study.supply(point, self.value(point))
        return list(map(str, study.history))


@st.composite
def cases(draw: st.DrawFn, name: OptimizerName) -> Case:
    t_min = draw(st.integers(1, 50))
    t_max = t_min + draw(st.integers(1, 3) | st.integers(4, 2000))
    ratios = st.sampled_from([1.002, 1.3, 100.0])
    ranges = st.none()
    if name not in T_ONLY:
        ranges |= st.builds(lambda low, ratio: (low, low * ratio), st.floats(1e-3, 1), ratios)
    return Case(
        Space(t_min, t_max, draw(ranges), draw(ranges)),
        tuple(draw(st.lists(st.integers(t_min, t_max), max_size=25))),
        draw(st.integers(1, 45)),
        draw(st.none() | st.integers(0, 6)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=12)
@given(data=st.data(), order=st.randoms(use_true_random=False))
def test_order_of_arrival_changes_nothing(
    name: OptimizerName, data: st.DataObject, order: random.Random
):
    case = data.draw(cases(name))
    study = case.study(name)
    in_order = case.finish(study)
    assert case.finish(case.study(name), order) == in_order
    assert len({row.point for row in study.history}) == len(in_order) <= case.budget


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=12)
@given(data=st.data(), order=st.randoms(use_true_random=False), cut=st.integers(0, 45))
def test_killed_at_any_moment_and_continued(
    name: OptimizerName, data: st.DataObject, order: random.Random, cut: int
):
    case = data.draw(cases(name))
    killed, stored = case.study(name), dict[Point, float]()
    while len(stored) < cut and not killed.done:
        point = order.choice(killed.request())
        stored[point] = case.value(point)
        killed.supply(point, stored[point])

    continued = case.study(name)
    while known := [point for point in continued.request() if point in stored]:
        for point in known:
            continued.supply(point, stored.pop(point))
    assert not stored, "every stored value is asked for again"
    assert continued.request() == killed.request()
    assert list(map(str, continued.history)) == list(map(str, killed.history))
    assert case.finish(continued, order) == case.finish(case.study(name))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=12)
@given(data=st.data(), more=st.integers(0, 25))
def test_a_larger_budget_continues_the_same_study(
    name: OptimizerName, data: st.DataObject, more: int
):
    case = data.draw(cases(name))
    short = case.finish(case.study(name))
    larger = replace(case, budget=case.budget + more)
    long = case.finish(larger.study(name))
    assert long[: len(short)] == short
    assert len(short) == min(case.budget, len(long))
