"""A study: its batches, its budget and its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import pytest

from experiments.pabbo_lda.space import Point
from experiments.pabbo_lda.study.study import PATIENCE, Evaluation, HistoryMismatchError, Study


def points(*topics: int) -> list[Point]:
    return [Point(T) for T in topics]


class Script:
    """Asks for given batches of T and remembers what it is told."""

    def __init__(self, batches: Iterable[list[int]]) -> None:
        self._batches = iter(batches)
        self.told: list[tuple[list[int], list[float]]] = []

    def ask(self) -> list[Point]:
        return points(*next(self._batches, []))

    def tell(self, points: Sequence[Point], values: Sequence[float]) -> None:
        self.told.append(([point.T for point in points], list(values)))


def finish(study: Study, value: Callable[[int], float]) -> tuple[Evaluation, ...]:
    while not study.done:
        wanted = study.request()
        assert wanted, "a study that is not done needs a value"
        study.supply(wanted[0], value(wanted[0].T))
    return study.history


def test_tells_whole_batches_in_the_order_asked():
    script = Script([[5, 9, 5, 7], [7, 3]])
    study = Study(script, points(7, 2, 7), budget=10)
    assert study.request() == points(7, 2)
    study.supply(Point(2), 20.0)
    assert study.request() == points(7)
    assert (study.evaluated, len(study.history)) == (1, 0)
    assert script.told == []
    study.supply(Point(7), 70.0)
    assert script.told == [([7, 2, 7], [70.0, 20.0, 70.0])]
    assert study.request() == points(5, 9)
    study.supply(Point(9), 90.0)
    study.supply(Point(5), 50.0)
    assert study.request() == points(3)
    study.supply(Point(3), 30.0)
    assert script.told[1:] == [([5, 9, 5, 7], [50.0, 90.0, 50.0, 70.0]), ([7, 3], [70.0, 30.0])]
    assert study.done
    assert study.request() == []
    assert study.asked == 3 + 4 + 2
    rows = [
        (e.evaluation, e.batch, e.point.T, e.value, e.best_point.T, e.best_value)
        for e in study.history
    ]
    assert rows == [
        (1, 0, 7, 70.0, 7, 70.0),
        (2, 0, 2, 20.0, 2, 20.0),
        (3, 1, 5, 50.0, 2, 20.0),
        (4, 1, 9, 90.0, 2, 20.0),
        (5, 2, 3, 30.0, 2, 20.0),
    ]


def test_ends_after_twenty_batches_without_a_new_point():
    script = Script([[7]] * 19 + [[8]] + [[7, 8]] * 50)
    study = Study(script, points(7), budget=99)
    assert [e.point.T for e in finish(study, float)] == [7, 8]
    assert len(script.told) == 1 + 19 + 1 + PATIENCE


def test_iterations_count_batches_that_bring_nothing_new():
    script = Script([[7], [8], [9], [10]])
    study = Study(script, points(7), budget=99, iterations=3)
    assert [(e.point.T, e.batch) for e in finish(study, float)] == [(7, 0), (8, 2), (9, 3)]
    assert [
        e.point.T for e in finish(Study(Script([[8]]), points(7), 99, iterations=0), float)
    ] == [7]


def test_values_that_are_not_finite_are_kept_but_never_best():
    values = {2: math.nan, 3: math.inf, 4: 5.0, 5: -math.inf, 6: math.nan}
    study = Study(Script([[4], [5, 6]]), points(2, 3), budget=9)
    for T in (2, 3):
        study.supply(Point(T), values[T])
    assert study.best is None
    assert [(e.best_point, e.best_value) for e in study.history] == [(None, math.inf)] * 2
    history = finish(study, values.__getitem__)
    assert [e.best_point and e.best_point.T for e in history] == [None, None, 4, 4, 4]
    assert math.isnan(history[0].value)
    assert study.best == (Point(4), 5.0)


def test_a_recorded_history_must_be_proposed_again():
    batches = [[5, 9], [3, 4]]
    recorded = points(7, 2, 5, 9, 3)
    study = Study(Script(batches), points(7, 2), budget=9, recorded=recorded)
    assert [row.point for row in finish(study, float)] == points(7, 2, 5, 9, 3, 4)
    other = Study(Script([[5, 8]]), points(7, 2), budget=9, recorded=recorded)
    other.supply(Point(7), 7.0)
    with pytest.raises(HistoryMismatchError, match="proposed T=8, stored T=9 at evaluation 4"):
        other.supply(Point(2), 2.0)
    with pytest.raises(HistoryMismatchError, match="proposed T=2, stored T=7 at evaluation 1"):
        Study(Script(batches), points(2, 7), budget=9, recorded=recorded)
