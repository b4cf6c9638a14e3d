"""The optimizers: one contract of asking and telling for all, their operators, whole studies."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import get_args
from unittest.mock import Mock

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.pabbo_lda.objective.objectives import TabularObjective
from experiments.pabbo_lda.optimizers import T_ONLY, OptimizerName, make_optimizer, populations
from experiments.pabbo_lda.optimizers.bayesian import expected_improvement
from experiments.pabbo_lda.optimizers.pabbo import PolicySettings
from experiments.pabbo_lda.settings import START
from experiments.pabbo_lda.space import Point, Scale, Space
from experiments.pabbo_lda.study.study import Evaluation, Study

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
#: optimizers that use values, not only their order
MODELS = ("gp_ei", "pfn_ei", "pabbo_curves")
USUAL = Space(2, 1000)
WIDE = Space(2, 1000, alpha=(1e-3, 10.0), eta=(1e-3, 10.0))


def pseudo(duels, preferred, points, pairs, used):
    """Stands in for a trained model: any function of all it is shown."""
    phase = (duels * [1.7, 3.1]).sum() + (preferred + 0.5).sum() + used
    return (points[pairs] * [5.3, 2.9] + phase).sum(axis=1) % 1.0


def make(name: OptimizerName, seed: int = 0, space: Space = USUAL):
    return make_optimizer(name, space=space, seed=seed, scorer=pseudo)


def points(*topics: int) -> list[Point]:
    return [Point(T) for T in topics]


def asked(optimizer, value, start: Sequence[int] = START, batches: int = 12):
    """The T that an optimizer asks for in so many batches."""
    optimizer.tell(points(*start), [value(T) for T in start])
    out = []
    while batches and (batch := optimizer.ask()):
        optimizer.tell(batch, [value(point.T) for point in batch])
        out += [point.T for point in batch]
        batches -= 1
    return out


def finish(study: Study, value: Callable[[Point], float], order: random.Random | None = None):
    """The study, after every value that it asked for, in its order or in any."""
    while not study.done:
        wanted = study.request()
        assert wanted, "a study that is not done needs a value"
        point = order.choice(wanted) if order else wanted[0]
        study.supply(point, value(point))
    return study


def bowl(T: int) -> float:
    return math.log(T / 31) ** 2 + 1


def odd_value(seed: int, point: Point) -> float:
    """Any function of the points: ties, huge values, and some that are no numbers."""
    draw = random.Random(f"{seed} {point}")
    odd = draw.choice([math.nan, math.inf, -math.inf, 1e44, 1.0])
    return odd if draw.random() < 0.3 else draw.uniform(0, 1e4)


@st.composite
def cases(draw: st.DrawFn, name: OptimizerName) -> tuple[Space, list[int], int, int | None, int]:
    """A study's inputs: space, start, budget, iterations, seed."""
    slow = name in ("gp_ei", "pfn_ei")  # a fit, or a prediction of every candidate, per value
    start, budget, widest = (3, 5, 100) if slow else (25, 45, 2000)
    t_min = draw(st.integers(1, 50))
    t_max = t_min + draw(st.integers(1, 3) | st.integers(4, widest))
    ratios = st.sampled_from([1.002, 1.3, 100.0])
    ranges = st.none()
    if name not in T_ONLY:
        ranges |= st.builds(lambda low, ratio: (low, low * ratio), st.floats(1e-3, 1), ratios)
    return (
        Space(t_min, t_max, draw(ranges), draw(ranges)),
        draw(st.lists(st.integers(t_min, t_max), max_size=start)),
        draw(st.integers(1, budget)),
        draw(st.none() | st.integers(0, 6)),
        draw(st.integers(0, 2**32 - 1)),
    )


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=6)
@given(data=st.data(), order=st.randoms(use_true_random=False), more=st.integers(0, 45))
def test_a_study_depends_on_its_case_alone(name, data, order, more):
    """Not on the order of values, nor on its budget but in where it ends.

    After a kill the stored values are there first, which is an order like any other.
    """
    space, start, budget, iterations, seed = data.draw(cases(name))

    def history(budget: int, order: random.Random | None = None) -> tuple[Evaluation, ...]:
        study = Study(make(name, seed, space), space.start_points(start), budget, iterations)
        return finish(study, partial(odd_value, seed), order).history

    whole = history(budget)
    for point in (row.point for row in whole if row.batch > 0):  # after the start
        assert type(point.T) is int
        assert space.t_min <= point.T <= space.t_max
        for value, ends in ((point.alpha, space.alpha), (point.eta, space.eta)):
            assert (value is None) == (ends is None)
            assert value is None or type(value) is float
            assert value is None or ends[0] <= value <= ends[1]
    # as text, in which a value that is no number equals itself
    assert str(history(budget, order)) == str(whole)
    assert len({row.point for row in whole}) == len(whole) <= budget
    assert str(history(budget + more)[: len(whole)]) == str(whole)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_decides_and_global_generators_are_left_alone(name):
    before = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, other = (asked(make(name, seed), bowl) for seed in (5, 6))
    drawn = name not in ("golden_section", "bisect", "gp_ei", "pfn_ei", "pabbo_curves")  # fixed
    assert (first != other) == drawn
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
    if name not in MODELS:  # only the order of values matters
        assert asked(make(name, 5), lambda T: 10 ** min(300.0, bowl(T) * 15)) == first


@pytest.mark.parametrize(
    "name",
    ["ga", "es", "sabbo", "tpe", "cma_es"]
    + [pytest.param(name, marks=pytest.mark.slow) for name in ("gp_ei", "pfn_ei")],
)
def test_finds_the_bottom_of_a_bowl_in_three_dimensions(name):
    """Better than random search, after 20 evaluations that are spread over the space."""
    budget, seeds = (50, 1) if name in MODELS else (100, 2 if name == "tpe" else 20)
    ours = np.mean([best_found(name, seed, budget) for seed in range(seeds)])
    assert ours < 0.8 * np.mean([best_found("random", seed, budget) for seed in range(20)])


@cache
def best_found(name: OptimizerName, seed: int, budget: int) -> float:
    center = WIDE.positions([Point(8, 0.01, 2.0)])
    start = WIDE.points(np.random.default_rng(seed + 100).uniform(-1, 1, (20, 3)))
    study = Study(make(name, seed, WIDE), start, budget)
    finish(study, lambda point: 1.1 + float(((WIDE.positions([point]) - center) ** 2).sum()))
    return study.history[-1].best_value - 1.1


def test_refuses_unknown_names_empty_ranges_priors_and_pabbo_without_a_model():
    with pytest.raises(ValueError, match=r"optimizer 'gp' is not known.*golden_section"):
        make("gp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="t_min=9, t_max=9"):
        Space(9, 9)
    with pytest.raises(ValueError, match="scorer"):
        make_optimizer("pabbo_large", space=USUAL, seed=0)
    for name in T_ONLY:
        with pytest.raises(ValueError, match=rf"{name} searches T alone, not alpha and eta: leave"):
            make(name, space=WIDE)
    for ends in ((0.0, 1.0), (0.2, 0.1), (0.1, 0.1), (0.1, math.inf)):
        with pytest.raises(ValueError, match="0 < low < high"):
            Space(2, 9, eta=ends)


@given(t_min=st.integers(1, 50), width=st.integers(1, 2000))
def test_positions_and_topics_are_inverse(t_min, width):
    scale = Space(t_min, t_min + width).topics
    every = np.arange(t_min, t_min + width + 1)
    positions = scale.positions(every)
    assert positions[[0, -1]] == pytest.approx([-1, 1])
    assert (np.diff(positions) > 0).all()
    assert (scale.values(positions) == every).all()
    assert (scale.values([-7.0, 7.0]) == [t_min, t_min + width]).all()
    grid = scale.grid(256)
    assert len(grid) <= 256
    assert (grid[0], grid[-1]) == (t_min, t_min + width)


@given(st.floats(1e-3, 50), st.sampled_from([1.0005, 1.02, 3.0, 1e4]), st.floats(-1, 1))
def test_priors_have_three_digits_and_stay_in_their_range(low, ratio, position):
    prior = Scale(low, low * ratio, log=True, digits=3)
    value = float(prior.values(position))
    assert prior.low <= value <= prior.high
    assert value in (prior.low, prior.high, float(f"{value:.2e}"))
    assert value == pytest.approx(low * ratio ** ((position + 1) / 2), rel=0.0051)
    assert prior.values(prior.positions(value)) == value, "an evaluation is asked for again"


def test_points_and_their_start():
    space = Space(2, 1000, eta=(0.01, 100.0))
    three = [Point(2, eta=0.01), Point(1000, eta=100.0), Point(31, eta=1.0)]
    positions = space.positions(three)
    assert positions[:, 1] == pytest.approx([-1, 1, 0])
    assert space.points(positions) == three
    assert str(three[2]) == "T=31, eta=1.0"
    with pytest.raises(ValueError, match="lacks its eta"):
        space.positions([Point(5)])
    usual = Space(2, 1000, alpha=(0.005, 0.3)).start_points([733, 30, 2])
    assert usual == [Point(733, 0.005), Point(30, 0.0333), Point(2, 0.3)]


def test_genetic_operators_work_on_bits():
    rng = np.random.default_rng(0)
    parents = rng.integers(2, 1001, 10_000)
    children = populations.cross(parents, 10, rng)
    pairs, crossed = parents.reshape(-1, 2), children.reshape(-1, 2)
    assert (pairs.sum(axis=1) == crossed.sum(axis=1)).all()
    exchanged = pairs[:, 0] ^ crossed[:, 0]
    assert (exchanged == (pairs[:, 1] ^ crossed[:, 1])).all()
    flipped = populations.mutate(parents, 10, rng) ^ parents
    assert (np.bitwise_count(flipped) <= 1).all()
    assert (flipped > 0).mean() == pytest.approx(0.2, abs=0.02)
    assert set(np.log2(flipped[flipped > 0])) == set(range(10))


@pytest.mark.parametrize("dimensions", [1, 3])
def test_sabbo_worst_neighbor_lies_on_the_sphere_and_is_worse(dimensions):
    rng = np.random.default_rng(1)
    z = rng.standard_normal((10, dimensions))
    losses = populations.rank_losses(np.exp(50 * z.sum(axis=1)))
    for radius in (0.01, 0.1):
        shift, widening = populations.worst_neighbor(z, losses, radius)
        divergence = ((widening**2 + shift**2 - 1) / 2 - np.log(widening)).sum()
        assert divergence == pytest.approx(radius**2, rel=0.2)
        weights = np.exp((z**2 - ((z - shift) / widening) ** 2).sum(axis=1) / 2)
        assert losses @ weights / weights.sum() > losses.mean()


def test_sabbo_natural_gradient_is_that_of_the_expectation():
    """For f(x, y) = x^2 + x - 2 y^2 at N(0, 1): by the means 1, 0, by log sigma 2 / 2, -4 / 2."""
    z = np.random.default_rng(2).standard_normal((1_000_000, 2))
    losses = z[:, 0] ** 2 + z[:, 0] - 2 * z[:, 1] ** 2
    by_mean, by_deviation = populations.natural_gradient(z, losses, np.full(len(z), 1 / len(z)))
    assert by_mean == pytest.approx([1.0, 0.0], abs=0.03)
    assert by_deviation == pytest.approx([1.0, -2.0], abs=0.03)


def test_rank_losses():
    share = math.log(3 / 2) / math.log(9 / 2)
    for values, expected in (
        ([3.0, 1e44, 1.0, np.inf], [0.25 - share, 0.25, share - 0.75, 0.25]),
        ([1.0, 1.0, 2.0, 2.0], [-0.25, -0.25, 0.25, 0.25]),
        ([np.inf] * 10, [0.0] * 10),
    ):
        assert populations.rank_losses(np.array(values)) == pytest.approx(expected)


def test_random_search_is_even_in_log_t_and_never_repeats():
    drawn = asked(make("random"), bowl, batches=10_000)
    assert sorted([*drawn, *START]) == list(range(2, 1001))
    first = [make("random", seed).ask()[0].T for seed in range(1000)]
    assert np.mean(np.log(first)) == pytest.approx(np.log([1.5, 1000.5]).mean(), abs=0.2)
    space = Space(2, 3, alpha=(0.1, 0.102), eta=(0.999, 1.0))
    study = Study(make("random", 1, space), [], budget=99)
    known = {row.point for row in finish(study, lambda point: 1.0).history}
    assert known == {
        Point(T, alpha, eta) for T in (2, 3) for alpha in (0.1, 0.101, 0.102) for eta in (0.999, 1)
    }


def test_tpe_is_optunas():
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=3))
    space = {"T": optuna.distributions.IntDistribution(2, 1000, log=True)}
    for T in START:
        trial = optuna.trial.create_trial(params={"T": T}, distributions=space, value=bowl(T))
        study.add_trial(trial)
    expected = []
    for _ in range(12):
        trial = study.ask(space)
        study.tell(trial, bowl(trial.params["T"]))
        expected.append(trial.params["T"])
    assert asked(make("tpe", seed=3), bowl) == expected


@given(
    falls=st.lists(st.floats(0.01, 1e6), max_size=60),
    rises=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=60),
    start=st.lists(st.integers(0, 120), max_size=5),
)
def test_golden_section_finds_the_minimum_of_a_unimodal_function(falls, rises, start):
    values = np.cumsum([0.0, *(-fall for fall in falls), *rises])
    golden = make("golden_section", space=Space(2, len(values) + 1))
    known = [2 + T % len(values) for T in start]
    found = asked(golden, lambda T: float(values[T - 2]), known, batches=200)
    assert golden.ask() == [], "it finishes by itself"
    assert 2 + len(falls) in {*known, *found}


def test_golden_section_and_bisection_need_few_probes():
    bisect = make("bisect", space=Space(1, 100))
    bisect.tell(points(4, 64), [1.0, 2.0])
    assert bisect.ask() == [Point(16)]  # the gap to 64 is a factor of 16, that to 1 is 4
    probed = asked(make("bisect"), bowl, batches=100)
    assert {30, 31, 32} <= {*probed}
    assert len(probed) < 25
    assert len(asked(make("golden_section"), bowl, batches=100)) <= 15


def test_expected_improvement_is_that_of_a_normal_value():
    draws = np.random.default_rng(0).normal(0.3, 0.7, 400_000)
    found = expected_improvement(np.array([0.3, 2.0]), np.array([0.7, 0.0]), 0.1)
    assert found[0] == pytest.approx(np.maximum(0.1 - draws, 0).mean(), rel=0.01)
    assert found[1] == 0


def pabbo(scorer, **options):
    policy = PolicySettings(**options)
    return make_optimizer("pabbo_small", space=USUAL, seed=0, scorer=scorer, policy=policy)


def test_pabbo_shows_the_model_true_duels_and_evaluates_the_candidate_it_prefers():
    scale = USUAL.topics
    favorite = int(scale.grid(256)[80])
    seen = []

    def scorer(duels, preferred, points, pairs, used):
        T, candidates = scale.values(duels), scale.values(points)
        seen.append((T, preferred, candidates[pairs], used))
        scores = (candidates[pairs] == favorite).any(axis=1).astype(float)
        return np.where(pairs[:, 0] == 0, 1.5, scores)  # one order alone must not decide

    optimizer = pabbo(scorer, exploration=0.0, horizon=40, context=7)
    optimizer.tell(points(*START), [bowl(T) for T in START])
    assert optimizer.ask() == [Point(favorite)]
    ((duels, preferred, candidates, used),) = seen
    assert used == 0.5
    assert [T for duel in duels for T in duel if T != 115] == list(START[-7:])
    assert (duels == 115).sum(axis=0).tolist() == [4, 3], "115, the best, takes sides in turn"
    losses = np.vectorize(bowl)(duels)
    assert (preferred == (losses[:, 1] < losses[:, 0])).all()
    first, second = np.split(candidates, 2)
    assert (first == second[:, ::-1]).all()
    assert set(first[:, 0]) == {115}
    assert not set(first[:, 1]) & set(START)


def test_pabbo_explores_at_its_rate_and_finishes_when_all_candidates_are_known():
    scorer = Mock(side_effect=lambda *shown: np.arange(len(shown[3]), dtype=float))
    asked(pabbo(scorer, exploration=1.0), bowl, batches=50)
    assert not scorer.called
    asked(pabbo(scorer, exploration=0.3), bowl, batches=150)
    assert scorer.call_count == pytest.approx(105, abs=20)
    every = asked(make("pabbo_small", space=Space(2, 20)), bowl, [3, 4], batches=100)
    assert sorted([3, 4, *every]) == list(range(2, 21))


@pytest.mark.parametrize("name", NAMES)
def test_whole_studies_on_the_published_values(name, data_dir):
    """80 distinct T on each corpus; every optimizer beats the best of the start."""
    recorded = TabularObjective.read(data_dir / "lda_published" / "evaluations.csv.gz")
    assert len(recorded.runs) == 40
    budget = {"gp_ei": 30, "pfn_ei": 24}.get(name, 80)  # a fit, or 1000 predictions, per value
    for dataset, seed in recorded.runs[::10]:
        study = Study(make(name, seed), points(*START), budget=budget)
        finish(study, lambda point, at=(dataset, seed): recorded.value(*at, point.T))
        assert len(START) < len(study.history) <= budget
        assert study.best[1] < study.history[len(START) - 1].best_value
