"""The benchmark of samplers on tables of tuning problems."""

from __future__ import annotations

import numpy as np
from optuna.samplers import RandomSampler

from benchmarks import tuning
from benchmarks.tuning_problems import PROBLEMS


def test_all_samplers_start_from_the_same_points_of_a_table() -> None:
    problem = next(each for each in PROBLEMS if len(each.axes) == 2)
    places = np.meshgrid(*(axis.positions for axis in problem.axes.values()), indexing="ij")
    table = places[0] + 10 * places[1]  # linear, so that a look-up between the values is exact
    runs = [tuning.sequence(problem, table, RandomSampler(seed=seed), 0) for seed in (1, 2)]
    assert {len(run) for run in runs} == {tuning.EVALUATIONS}
    drawn = np.random.default_rng(0).uniform(-1, 1, (tuning.START, 2))
    for run in runs:
        np.testing.assert_allclose(run[: tuning.START], drawn @ [1, 10])
    assert runs[0] != runs[1]


def test_no_two_problems_share_a_seed() -> None:
    seeds = [tuning.seed_of(problem, seed) for problem in PROBLEMS for seed in range(tuning.SEEDS)]
    assert len(set(seeds)) == len(PROBLEMS) * tuning.SEEDS
