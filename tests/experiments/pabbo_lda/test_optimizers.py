"""The optimizers of T: their contract, their operators, and whole studies on recorded values."""

from __future__ import annotations

import math
import random
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.pabbo_lda.objective.tabular import TabularObjective
from experiments.pabbo_lda.optimizers import (
    IntegerRange,
    Optimizer,
    OptimizerName,
    Point,
    PolicySettings,
    Space,
    make_optimizer,
    model_scorer,
)
from experiments.pabbo_lda.optimizers.gaussian_process import expected_improvement
from experiments.pabbo_lda.optimizers.genetic import cross, mutate
from experiments.pabbo_lda.optimizers.sabbo import natural_gradient, rank_losses, worst_neighbor
from experiments.pabbo_lda.optimizers.space import FloatArray, IntArray
from experiments.pabbo_lda.pabbo.model import SMALL, PabboModel, score_pairs
from experiments.pabbo_lda.study.study import Study

NAMES: tuple[OptimizerName, ...] = (
    "ga",
    "es",
    "pabbo_small",
    "pabbo_large",
    "sabbo",
    "random",
    "tpe",
    "golden_section",
    "bisect",
    "gp_ei",
    "pfn_ei",
    "cma_es",
)
#: optimizers that draw nothing at random
FIXED = ("golden_section", "bisect", "gp_ei", "pfn_ei")
#: optimizers that model values
MODELS = ("gp_ei", "pfn_ei")
START = [
    *(733, 811, 133, 355, 777, 115, 452, 940, 879, 345),
    *(576, 153, 950, 602, 162, 238, 422, 511, 660, 285),
]


def nearness(
    duels: FloatArray, preferred: FloatArray, points: FloatArray, pairs: IntArray, used: float
) -> FloatArray:
    """Stands in for a trained model: likes what is near the points preferred in its duels."""
    winners = np.where(preferred == 1, duels[:, 1], duels[:, 0])
    return -np.abs(points[pairs][:, :, None] - winners).sum(axis=(1, 2)) * (1 + used)


def make(name: OptimizerName, seed: int = 0, t_min: int = 2, t_max: int = 1000) -> Optimizer:
    scorer = nearness if name.startswith("pabbo") else None
    return make_optimizer(name, space=Space(t_min, t_max), seed=seed, scorer=scorer)


def told(optimizer: Optimizer, topics: list[int], values: list[float]) -> None:
    optimizer.tell([Point(T) for T in topics], values)


def asked(optimizer: Optimizer, value, start: list[int], batches: int = 12) -> list[list[int]]:
    """The batches of T an optimizer asks for."""
    told(optimizer, start, [value(T) for T in start])
    out = []
    for _ in range(batches):
        batch = optimizer.ask()
        if not batch:
            break
        optimizer.tell(batch, [value(point.T) for point in batch])
        out.append([point.T for point in batch])
    return out


def bowl(T: int) -> float:
    return math.log(T / 31) ** 2 + 1


@pytest.mark.parametrize("name", NAMES)
def test_deterministic_by_seed_and_leaves_global_generators_alone(name: OptimizerName):
    before = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (asked(make(name, seed), bowl, START) for seed in (5, 5, 6))
    assert first == again
    assert first
    assert (first != other) == (name not in FIXED)
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002


@pytest.mark.parametrize("name", [name for name in NAMES if name not in MODELS])
def test_only_the_order_of_values_matters(name: OptimizerName):
    steep = asked(make(name), lambda T: 10 ** min(300.0, bowl(T) * 15), START)
    assert asked(make(name), bowl, START) == steep


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None, max_examples=20)
@given(
    start=st.lists(st.integers(2, 30), max_size=25),
    seed=st.integers(0, 2**32 - 1),
    values=st.lists(
        st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([1e44, math.nan]),
        min_size=29,
        max_size=29,
    ),
)
def test_any_start_and_any_value(
    name: OptimizerName, start: list[int], seed: int, values: list[float]
):
    for batch in asked(make(name, seed, 2, 30), lambda T: values[T - 2], start):
        assert all(type(T) is int and 2 <= T <= 30 for T in batch)


@pytest.mark.parametrize("name", NAMES)
def test_searches_the_smallest_range(name: OptimizerName):
    study = Study(make(name, 1, 2, 3), [Point(2)], budget=9)
    while not study.done:
        study.supply(study.request()[0], 1.0 / len(study.request()))
    assert {e.point.T for e in study.history} == {2, 3}


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("pabbo")])
def test_improves_on_the_start_far_from_it(name: OptimizerName):
    """From a best start value of 115 to within a factor of 1.5 of the minimum at 8."""
    for seed in range(1 if name in FIXED else 5):
        study = Study(make(name, seed), Space(2, 1000).start_points(START), budget=80)
        while not study.done:
            point = study.request()[0]
            study.supply(point, abs(math.log(point.T / 8)))
        assert study.best is not None
        assert study.best[1] < math.log(1.5)


def test_refuses_unknown_names_empty_ranges_and_pabbo_without_a_model():
    with pytest.raises(ValueError, match=r"optimizer 'gp' is not known.*golden_section"):
        make_optimizer("gp", space=Space(2, 9), seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="t_min=9, t_max=9"):
        make("ga", t_min=9, t_max=9)
    with pytest.raises(ValueError, match="scorer"):
        make_optimizer("pabbo_large", space=Space(2, 9), seed=0)


@pytest.mark.parametrize("scale", ["log", "linear"])
@given(t_min=st.integers(1, 50), width=st.integers(1, 2000))
def test_positions_and_integers_are_inverse(scale, t_min: int, width: int):
    space = IntegerRange(t_min, t_min + width, scale)
    points = np.arange(t_min, t_min + width + 1)
    positions = space.positions(points)
    assert positions[[0, -1]] == pytest.approx([-1, 1])
    assert (np.diff(positions) > 0).all()
    assert (space.integers(positions) == points).all()
    assert (space.integers([-7.0, 7.0]) == [t_min, t_min + width]).all()
    grid = space.grid(256)
    assert len(grid) <= max(256, 0)
    assert grid[0] == t_min
    assert grid[-1] == t_min + width
    assert (np.diff(grid) > 0).all()


def test_genetic_operators_work_on_bits():
    rng = np.random.default_rng(0)
    parents = rng.integers(2, 1001, 10_000)
    children = cross(parents, 10, rng)
    pairs, crossed = parents.reshape(-1, 2), children.reshape(-1, 2)
    assert (pairs.sum(axis=1) == crossed.sum(axis=1)).all()
    exchanged = pairs[:, 0] ^ crossed[:, 0]
    assert (exchanged == (pairs[:, 1] ^ crossed[:, 1])).all()
    assert ((exchanged & ~(pairs[:, 0] ^ pairs[:, 1])) == 0).all(), "only bits that differ move"
    flipped = mutate(parents, 10, rng) ^ parents
    assert (np.bitwise_count(flipped) <= 1).all()
    assert (flipped > 0).mean() == pytest.approx(0.2, abs=0.02)
    assert set(np.log2(flipped[flipped > 0])) == set(range(10))


def test_genetic_elite_survives_but_is_not_asked_again():
    ga = make("ga")
    told(ga, START, [0.0 if T == 115 else 1.0 for T in START])
    batches = []
    for _ in range(30):
        batch = ga.ask()
        ga.tell(batch, [2.0] * len(batch))
        batches.append([point.T for point in batch])
    assert {len(batch) for batch in batches} == {15}
    share = np.mean([T == 115 for batch in batches[10:] for T in batch])
    assert share > 0.02, "offspring still descend from the elite of the start"


def test_evolution_strategy_forgets_its_parents():
    es = make("es")
    told(es, [2], [-1e9])  # better than anything that follows
    for _ in range(10):
        batch = es.ask()
        assert len(batch) == 10
        es.tell(batch, [-float(point.T) for point in batch])
    assert np.median([point.T for point in es.ask()]) > 300


@pytest.mark.parametrize("dimensions", [1, 3])
def test_sabbo_worst_neighbor_lies_on_the_sphere_and_is_worse(dimensions: int):
    rng = np.random.default_rng(1)
    z = rng.standard_normal((10, dimensions))
    losses = rank_losses(np.exp(50 * z.sum(axis=1)))
    for radius in (0.01, 0.1):
        shift, widening = worst_neighbor(z, losses, radius)
        divergence = ((widening**2 + shift**2 - 1) / 2 - np.log(widening)).sum()
        assert divergence == pytest.approx(radius**2, rel=0.2)
        weights = np.exp((z**2 - ((z - shift) / widening) ** 2).sum(axis=1) / 2)
        assert losses @ weights / weights.sum() > losses.mean()


def test_sabbo_natural_gradient_is_that_of_the_expectation():
    """For f(x, y) = x^2 + x - 2 y^2 at N(0, 1): by the means 1, 0, by log sigma 2 / 2, -4 / 2."""
    z = np.random.default_rng(2).standard_normal((1_000_000, 2))
    losses = z[:, 0] ** 2 + z[:, 0] - 2 * z[:, 1] ** 2
    by_mean, by_deviation = natural_gradient(z, losses, np.full(len(z), 1 / len(z)))
    assert by_mean == pytest.approx([1.0, 0.0], abs=0.03)
    assert by_deviation == pytest.approx([1.0, -2.0], abs=0.03)


def test_rank_losses():
    losses = rank_losses(np.array([3.0, 1e44, 1.0, np.inf]))
    raw = np.array([math.log(3), math.log(3 / 2)])
    assert losses == pytest.approx(
        [0.25 - raw[1] / raw.sum(), 0.25, 0.25 - raw[0] / raw.sum(), 0.25]
    )
    assert losses.sum() == pytest.approx(0)
    assert rank_losses(np.array([1.0, 1.0, 2.0, 2.0])) == pytest.approx([-0.25, -0.25, 0.25, 0.25])
    assert rank_losses(np.full(10, np.inf)) == pytest.approx(np.zeros(10))


def test_random_search_is_even_in_log_t_and_never_repeats():
    batches = asked(make("random"), bowl, START, batches=10_000)
    drawn = [T for batch in batches for T in batch]
    assert sorted(drawn + START) == list(range(2, 1001))
    first = [make("random", seed).ask()[0].T for seed in range(1000)]
    assert np.mean(np.log(first)) == pytest.approx(np.log([1.5, 1000.5]).mean(), abs=0.2)


def test_tpe_is_optunas():
    sampler = optuna.samplers.TPESampler(seed=3)
    study = optuna.create_study(sampler=sampler)
    distributions = {"T": optuna.distributions.IntDistribution(2, 1000, log=True)}
    for T in START:
        study.add_trial(
            optuna.trial.create_trial(params={"T": T}, distributions=distributions, value=bowl(T))
        )
    expected = []
    for _ in range(12):
        trial = study.ask(distributions)
        study.tell(trial, bowl(trial.params["T"]))
        expected.append([trial.params["T"]])
    assert asked(make("tpe", seed=3), bowl, START) == expected


@given(
    falls=st.lists(st.floats(0.01, 1e6), min_size=0, max_size=60),
    rises=st.lists(st.floats(0.01, 1e6), min_size=0, max_size=60),
    start=st.lists(st.integers(0, 120), max_size=5),
)
def test_golden_section_finds_the_minimum_of_a_unimodal_function(
    falls: list[float], rises: list[float], start: list[int]
):
    values = np.cumsum([0.0, *(-fall for fall in falls), *rises])
    if len(values) < 2:
        return
    golden = make("golden_section", 0, 2, len(values) + 1)
    known = [2 + T % len(values) for T in start]
    batches = asked(golden, lambda T: float(values[T - 2]), known, batches=200)
    assert golden.ask() == [], "it finishes by itself"
    probed = set(known).union(*batches)
    assert 2 + len(falls) in probed


def test_bisection_halves_the_wider_gap_on_the_scale_and_ends_next_to_the_best() -> None:
    bisect = make("bisect", t_min=1, t_max=100)
    told(bisect, [4, 64], [1.0, 2.0])
    assert bisect.ask() == [Point(16)]  # the gap to 64 is a factor of 16, that to 1 is 4
    probed = asked(make("bisect"), bowl, START, batches=100)
    assert {30, 31, 32} <= {T for batch in probed for T in batch}
    assert len(probed) < 25


def test_expected_improvement_is_that_of_a_normal_value() -> None:
    draws = np.random.default_rng(0).normal(0.3, 0.7, 400_000)
    found = expected_improvement(np.array([0.3, 2.0]), np.array([0.7, 0.0]), 0.1)
    assert found[0] == pytest.approx(np.maximum(0.1 - draws, 0).mean(), rel=0.01)
    assert found[1] == 0


@pytest.mark.parametrize("name", MODELS)
def test_models_find_the_minimum_in_three_dimensions(name: OptimizerName) -> None:
    space = Space(2, 1000, alpha=(0.001, 1), eta=(0.001, 1))
    best = space.positions([Point(31, 0.02, 0.1)])
    optimizer = make_optimizer(name, space=space, seed=0)
    study = Study(optimizer, space.start_points(START), budget=60)
    while not study.done:
        point = study.request()[0]
        study.supply(point, 1.1 + float(((space.positions([point]) - best) ** 2).sum()))
    assert study.best is not None
    assert study.best[1] < 1.15


def test_golden_section_needs_few_probes():
    probes = sum(map(len, asked(make("golden_section"), bowl, START, batches=100)))
    assert probes <= 15


def pabbo(scorer, **options) -> Optimizer:
    return make_optimizer(
        "pabbo_small",
        space=Space(2, 1000),
        seed=0,
        scorer=scorer,
        policy=PolicySettings(**options),
    )


def test_pabbo_shows_the_model_true_duels_and_evaluates_the_candidate_it_prefers():
    space = IntegerRange(2, 1000)
    favorite = int(space.grid(256)[80])
    seen = []

    def scorer(duels, preferred, points, pairs, used):
        T, candidates = space.integers(duels), space.integers(points)
        seen.append((T, preferred, candidates[pairs], used))
        scores = (candidates[pairs] == favorite).any(axis=1).astype(float)
        return np.where(pairs[:, 0] == 0, 1.5, scores)  # one order alone must not decide

    optimizer = pabbo(scorer, exploration=0.0, horizon=40, context=7)
    told(optimizer, START, [bowl(T) for T in START])
    assert optimizer.ask() == [Point(favorite)]
    ((duels, preferred, candidates, used),) = seen
    assert used == 0.5
    assert [T for duel in duels for T in duel if T != 115] == START[-7:]
    assert (duels == 115).sum(axis=0).tolist() == [4, 3], "115, the best, takes sides in turn"
    losses = np.vectorize(bowl)(duels)
    assert (preferred == (losses[:, 1] < losses[:, 0])).all()
    assert set(preferred) == {0.0, 1.0}
    first, second = np.split(candidates, 2)
    assert (first == second[:, ::-1]).all()
    assert set(first[:, 0]) == {115}
    assert not set(first[:, 1]) & set(START)


def test_pabbo_explores_at_its_rate():
    calls = []

    def scorer(duels, preferred, points, pairs, used):
        calls.append(used)
        return np.arange(len(pairs), dtype=float)

    asked(pabbo(scorer, exploration=1.0), bowl, START, batches=50)
    assert calls == []
    asked(pabbo(scorer, exploration=0.3), bowl, START, batches=150)
    assert len(calls) == pytest.approx(105, abs=20)


def test_pabbo_refuses_scores_that_mean_nothing():
    optimizer = pabbo(lambda *args: np.full(len(args[3]), np.nan), exploration=0.0)
    told(optimizer, [5, 9], [1.0, 2.0])
    with pytest.raises(ValueError, match="finite score"):
        optimizer.ask()


def test_pabbo_with_the_transformer_itself():
    """The scorer of a model gives the scores of its acquisition head; a study runs on it."""
    torch.manual_seed(0)
    model = PabboModel(SMALL).eval()
    rng = np.random.default_rng(0)
    duels, preferred = rng.uniform(-1, 1, (5, 2)), np.array([0.0, 1, 1, 0, 1])
    points, pairs = rng.uniform(-1, 1, 9), rng.integers(9, size=(30, 2))
    expected = score_pairs(
        model,
        torch.from_numpy(duels).float(),
        torch.from_numpy(preferred).long(),
        torch.from_numpy(points).float(),
        torch.from_numpy(pairs),
        0.25,
    )
    scorer = model_scorer(model)
    scores = scorer(duels, preferred, points, pairs, 0.25)
    assert scores == pytest.approx(expected.numpy(), rel=1e-5, abs=1e-6)
    first, again = (asked(pabbo(scorer), bowl, START) for _ in range(2))
    assert first == again
    assert len(first) == 12


def test_pabbo_finishes_when_all_candidates_are_known():
    batches = asked(make("pabbo_small", t_max=20), bowl, [3, 4], batches=100)
    assert sorted([3, 4, *(T for batch in batches for T in batch)]) == list(range(2, 21))


@pytest.fixture(scope="module")
def recorded(data_dir: Path) -> TabularObjective:
    return TabularObjective.read(data_dir / "lda_published" / "evaluations.csv.gz")


@pytest.mark.parametrize("name", NAMES)
def test_whole_studies_on_the_published_values(name: OptimizerName, recorded: TabularObjective):
    """10 runs x 4 corpora with 80 distinct T; every optimizer beats the best of the start."""
    assert len(recorded.runs) == 40
    budget = {"gp_ei": 30, "pfn_ei": 24}.get(name, 80)  # a fit, or 1000 predictions, per value
    for dataset, seed in recorded.runs:
        study = Study(make(name, seed), Space(2, 1000).start_points(START), budget=budget)
        while not study.done:
            for point in study.request():
                study.supply(point, recorded.value(dataset, seed, point.T))
        assert study.best is not None
        assert len(START) < len(study.history) <= budget
        assert study.best[1] < study.history[len(START) - 1].best_value
