"""T, alpha and eta as one search space: its points, and the optimizers that search it."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.pabbo_lda.optimizers import (
    T_ONLY,
    OptimizerName,
    Point,
    Space,
    make_optimizer,
)
from experiments.pabbo_lda.optimizers.genetic import GeneticAlgorithm
from experiments.pabbo_lda.optimizers.space import LogRange
from experiments.pabbo_lda.study.study import Study

SPACE = Space(2, 1000, alpha=(1e-3, 10.0), eta=(1e-3, 10.0))
#: far from where 1/T leads
CENTER = Point(8, 0.01, 2.0)


def squared_distance(point: Point) -> float:
    return float(((SPACE.positions([point]) - SPACE.positions([CENTER])) ** 2).sum())


def best_found(name: OptimizerName, seed: int) -> float:
    """After 100 evaluations, of which the first 20 are spread over the space."""
    start = SPACE.points(np.random.default_rng(seed + 100).uniform(-1, 1, (20, 3)))
    study = Study(make_optimizer(name, space=SPACE, seed=seed), start, budget=100)
    while not study.done:
        for point in study.request():
            study.supply(point, squared_distance(point))
    return study.history[-1].best_value


@pytest.mark.parametrize("name", ["ga", "es", "sabbo", "tpe", "cma_es"])
def test_finds_the_bottom_of_a_bowl_better_than_random_search(name: OptimizerName):
    seeds = range(2) if name == "tpe" else range(20)
    ours = np.mean([best_found(name, seed) for seed in seeds])
    assert ours < 0.8 * np.mean([best_found("random", seed) for seed in range(20)])


@pytest.mark.parametrize("name", sorted(T_ONLY))
def test_optimizers_of_t_alone_refuse_priors(name: OptimizerName):
    with pytest.raises(ValueError, match=rf"{name} searches T alone, not alpha and eta: leave"):
        make_optimizer(name, space=SPACE, seed=0)


def test_points_and_positions():
    space = Space(2, 1000, eta=(0.01, 100.0))
    points = [Point(2, eta=0.01), Point(1000, eta=100.0), Point(31, eta=1.0)]
    positions = space.positions(points)
    assert positions.shape == (3, space.dimensions)
    assert positions[:, 1] == pytest.approx([-1, 1, 0])
    assert positions[:2, 0] == pytest.approx([-1, 1])
    assert space.points(positions) == points
    assert space.points(np.array([[-7.0, 7.0]])) == [Point(2, eta=100.0)]
    assert str(points[2]) == "T=31, eta=1.0"
    with pytest.raises(ValueError, match="lacks its eta"):
        space.positions([Point(5)])


@given(
    low=st.floats(1e-3, 50),
    ratio=st.sampled_from([1.0005, 1.02, 3.0, 1e4]),
    position=st.floats(-1, 1),
)
def test_priors_have_three_digits_and_stay_in_their_range(
    low: float, ratio: float, position: float
):
    prior = LogRange(low, low * ratio)
    (value,) = prior.values([position])
    assert prior.low <= value <= prior.high
    assert value in (prior.low, prior.high, float(f"{value:.2e}"))
    exact = low * math.exp((position + 1) / 2 * math.log(ratio))
    assert value == pytest.approx(exact, rel=0.0051)
    assert prior.values(prior.positions([value])) == [value], "an evaluation is asked for again"
    assert json.loads(json.dumps(value)) == value, "and found again among the stored ones"


def test_the_start_has_the_usual_priors_as_far_as_they_are_in_range():
    assert Space(2, 1000).start_points([733, 2]) == [Point(733), Point(2)]
    space = Space(2, 1000, alpha=(0.005, 0.3))
    assert space.start_points([733, 30, 2]) == [
        Point(733, 0.005),
        Point(30, 0.0333),
        Point(2, 0.3),
    ]


@pytest.mark.parametrize("ends", [(0.0, 1.0), (0.2, 0.1), (0.1, 0.1), (0.1, math.inf)])
def test_refuses_empty_ranges(ends: tuple[float, float]):
    with pytest.raises(ValueError, match="0 < low < high"):
        Space(2, 9, eta=ends)


def test_the_genes_of_a_prior_are_those_of_its_points():
    """Crossover and mutation see the point that was evaluated, with all its bits."""
    space = Space(2, 1000, alpha=(1e-3, 100.0), eta=(0.1, 1.0))
    ga = GeneticAlgorithm(space, 0)
    points = space.points(np.random.default_rng(0).uniform(-1, 1, (500, 3)))
    chromosomes = ga._encode(points)
    assert (chromosomes >> 20 == [point.T for point in points]).all()
    # the grid of 1024 values is at most half a step away, and of its points nothing is lost
    on_grid = ga._decode(chromosomes)
    away = np.abs(space.positions(on_grid) - space.positions(points))
    assert away[:, 1].max() <= 1 / 1023 + 2 * 0.005 / math.log(1e5)
    assert away[:, 2].max() <= 1 / 1023 + 2 * 0.005 / math.log(10)
    assert ga._decode(ga._encode(on_grid)) == on_grid


def test_random_search_knows_a_small_space_whole_and_ends():
    space = Space(2, 3, alpha=(0.1, 0.102), eta=(0.999, 1.0))
    study = Study(make_optimizer("random", space=space, seed=1), [], budget=99)
    while not study.done:
        study.supply(study.request()[0], 1.0)
    assert {row.point for row in study.history} == {
        Point(T, alpha, eta) for T in (2, 3) for alpha in (0.1, 0.101, 0.102) for eta in (0.999, 1)
    }
