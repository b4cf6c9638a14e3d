"""PABBO's sampler for Optuna."""

from __future__ import annotations

import math
import pickle
import warnings

import numpy as np
import optuna
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from optuna.distributions import FloatDistribution, IntDistribution
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)
from optuna.trial import TrialState, create_trial

from experiments.pabbo_lda.samplers.optuna import PabboSampler, spread
from experiments.pabbo_lda.space import Scale
from tests.experiments.pabbo_lda.surrogates import Nearest

optuna.logging.set_verbosity(optuna.logging.ERROR)

#: a step that does not divide the range shortens it
ROUNDED = pytest.mark.filterwarnings("ignore:The distribution is specified by")
X = {"x": FloatDistribution(0.0, 1.0)}


def sampler(**options):
    return PabboSampler(**{"seed": 0, "surrogate": Nearest()} | options)


def study_of(own=None, **options):
    return optuna.create_study(sampler=own or sampler(), **options)


def points(study):
    return [tuple(trial.params.values()) for trial in study.trials]


def smooth(trial):
    return (trial.suggest_float("x", 0, 1) - 0.7) ** 2 + abs(trial.suggest_int("n", 1, 100) - 30)


class TestOptunasOwnTests(BasicSamplerTestCase, RelativeSamplerTestCase, SingleOnlySamplerTestCase):
    """Optuna's tests of samplers, with the surrogate at once and after some trials."""

    @pytest.fixture(params=[0, 5])
    def sampler(self, request):
        return lambda: sampler(n_startup_trials=request.param, warn_independent_sampling=False)


def test_trials_come_near_the_optimum_of_log_integer_and_stepped_parameters():
    def objective(trial):
        rate = trial.suggest_float("rate", 1e-6, 1.0, log=True)
        depth = trial.suggest_int("depth", 1, 64, log=True)
        share = trial.suggest_float("share", 0, 1, step=0.125)
        return (math.log10(rate) + 3) ** 2 + math.log2(depth / 8) ** 2 + (share - 0.5) ** 2

    study = study_of()
    study.optimize(objective, n_trials=60)
    assert study.best_value < 0.5
    assert len(set(points(study))) == 60


def test_maximizing_proposes_the_points_of_minimizing_the_negative():
    up, down = study_of(direction="maximize"), study_of()
    up.optimize(lambda trial: -smooth(trial), n_trials=9)
    down.optimize(smooth, n_trials=9)
    assert points(up) == points(down)


def test_the_seed_decides_the_points():
    seeds = [0, 0, 1]
    found = []
    for seed in seeds:
        study = study_of(sampler(seed=seed))
        study.optimize(smooth, n_trials=8)
        found.append(points(study))
    assert found[0] == found[1] != found[2]


def test_a_study_continues_from_its_storage_as_if_it_had_not_ended(tmp_path):
    whole = study_of()
    whole.optimize(smooth, n_trials=10)
    storage = f"sqlite:///{tmp_path}/study.db"
    for trials in (6, 4):  # the first trial is drawn by the independent sampler
        part = study_of(storage=storage, study_name="parts", load_if_exists=True)
        part.optimize(smooth, n_trials=trials)
    assert points(part) == points(whole)


def test_reseeding_reaches_the_independent_sampler():
    class Counting(optuna.samplers.RandomSampler):
        count = 0

        def reseed_rng(self):
            self.count += 1

    independent = Counting()
    sampler(independent_sampler=independent).reseed_rng()
    assert independent.count == 1


def test_a_sampler_can_be_pickled():
    study = study_of()
    study.optimize(smooth, n_trials=6)
    study.sampler = pickle.loads(pickle.dumps(study.sampler))
    study.optimize(smooth, n_trials=1)
    assert len(study.trials) == 7


def test_trials_count_by_their_state():
    own = sampler(n_startup_trials=1)
    study = study_of(own)

    def add(x, state=TrialState.COMPLETE, **about):
        study.add_trial(create_trial(params={"x": x}, distributions=X, state=state, **about))

    add(0.0, value=3.0)
    add(0.1, TrialState.PRUNED, intermediate_values={1: 9.0, 5: 4.0})
    add(0.2, TrialState.PRUNED, intermediate_values={1: 9.0, 5: math.nan})
    add(0.3, TrialState.PRUNED)
    add(0.4, TrialState.FAIL)
    add(0.5, value=math.inf)
    add(0.6, value=1.0, constraints={"memory": 0.5})
    add(0.7, value=2.0, constraints={"memory": -0.5})
    add(0.8, TrialState.RUNNING)
    study.ask(X)
    seen = own._surrogate
    told = dict(zip(np.round((seen.known[:, 0] + 1) / 2, 9), seen.values, strict=True))
    assert told == pytest.approx({0.0: 3.0, 0.1: 4.0, 0.5: 4.0, 0.6: 4.0, 0.7: 2.0, 0.8: 2.0})


def test_positions_are_on_the_scale_of_the_parameter():
    own = sampler(n_startup_trials=1)
    study = study_of(own)
    space = {"rate": FloatDistribution(1e-4, 1.0, log=True), "size": IntDistribution(0, 10, step=5)}
    study.enqueue_trial({"rate": 1e-2, "size": 10})
    study.tell(study.ask(space), 1.0)
    study.ask(space)
    np.testing.assert_allclose(own._surrogate.known, [[0, 1]], atol=1e-12)


def test_of_many_trials_the_surrogate_sees_the_best_and_distant_ones():
    own = sampler(n_startup_trials=1)
    study = study_of(own)
    for x in np.linspace(0, 1, 201):
        study.add_trial(create_trial(params={"x": float(x)}, distributions=X, value=abs(x - 0.3)))
    study.ask(X)
    seen = (own._surrogate.known[:, 0] + 1) / 2
    assert len(seen) == 40
    assert {0.0, 1.0, 0.3} <= set(np.round(seen, 9))
    assert np.diff(np.sort(seen)).max() < 0.06


def test_equal_or_infinite_values_are_no_obstacle():
    for value in (1.0, math.inf):
        study = study_of()
        study.optimize(lambda trial, value=value: trial.suggest_float("x", 0, 1) * 0 + value, 8)
        assert len(set(points(study))) == 8


def test_running_trials_differ():
    study = study_of()
    study.optimize(smooth, n_trials=6)
    space = study.trials[0].distributions
    asked = [study.ask(space) for _ in range(6)]
    assert len({tuple(trial.params.values()) for trial in asked}) == 6


def test_processes_that_share_a_storage_propose_different_points(tmp_path):
    where = {"storage": f"sqlite:///{tmp_path}/study.db", "study_name": "shared"}
    studies = [study_of(**where, load_if_exists=True) for _ in range(2)]
    studies[0].optimize(smooth, n_trials=6)
    space = studies[0].trials[0].distributions
    asked = [study.ask(space) for study in studies * 2]
    assert len({tuple(trial.params.values()) for trial in asked}) == 4


def test_threads_share_a_sampler():
    study = study_of()
    study.optimize(smooth, n_trials=20, n_jobs=2)
    assert {trial.state for trial in study.trials} == {TrialState.COMPLETE}
    assert len(set(points(study))) >= 15  # two may be drawn at the same moment


def test_pruned_trials_are_no_obstacle():
    def objective(trial):
        value = smooth(trial)
        for step in range(3):
            trial.report(value + 3 - step, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study = study_of(pruner=optuna.pruners.MedianPruner(n_startup_trials=2))
    study.optimize(objective, n_trials=20)
    states = {trial.state for trial in study.trials}
    assert states == {TrialState.COMPLETE, TrialState.PRUNED}


def test_a_discrete_space_is_exhausted_before_a_point_is_repeated():
    study = study_of(sampler(n_startup_trials=1))

    def objective(trial):
        return abs(trial.suggest_int("n", 0, 4) - 2) + trial.suggest_float("x", 0, 1, step=1)

    study.optimize(objective, n_trials=12)
    drawn = points(study)
    assert len(set(drawn[:10])) == 10
    assert set(drawn[10:]) <= set(drawn[:10])


def test_what_the_surrogate_does_not_take_is_drawn_otherwise_with_one_warning():
    def mixed(trial):
        trial.suggest_categorical("kind", ["a", "b"])
        return smooth(trial)

    def wide(trial):
        return sum(trial.suggest_float(name, 0, 1) for name in "abcd")

    def growing(trial):
        low = trial.suggest_float("low", 0, 1)
        return trial.suggest_float("high", low, 2)

    for objective, reason in (
        (mixed, "does not take the parameter kind"),
        (wide, "has 4 numeric parameters, and takes 3"),
        (growing, "does not take high"),
    ):
        own = sampler(n_startup_trials=2)
        study = study_of(own)
        with pytest.warns(UserWarning, match=rf"PabboSampler {reason}.*TPESampler") as caught:
            study.optimize(objective, n_trials=8)
        assert len(caught) == 1
        assert (own._surrogate.known is None) == (objective is wide)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            quiet = study_of(sampler(n_startup_trials=2, warn_independent_sampling=False))
            quiet.optimize(objective, n_trials=8)


def test_several_objectives_are_refused():
    study = study_of(directions=["minimize", "maximize"])
    with pytest.raises(ValueError, match="one objective, and the study has 2; take NSGAII"):
        study.optimize(lambda trial: (trial.suggest_float("x", 0, 1), 0), n_trials=1)


@st.composite
def distributions(draw):
    if draw(st.booleans()):
        low, high = sorted(draw(st.tuples(*[st.integers(-(10**9), 10**9)] * 2)))
        if draw(st.booleans()):
            return IntDistribution(abs(low) + 1, abs(low) + 1 + high - low, log=True)
        return IntDistribution(low, high, step=draw(st.integers(1, 10**4)))
    kind = draw(st.sampled_from(["plain", "log", "step"]))
    if kind == "step":
        low, width = draw(st.floats(-1e3, 1e3)), draw(st.floats(0, 1e3))
        return FloatDistribution(low, low + width, step=draw(st.floats(1e-3, 1e3)))
    least = 5e-324 if kind == "log" else None
    ends = st.floats(least, 1e308, allow_nan=False, allow_infinity=False)
    ends = ends if least else ends.filter(lambda end: end >= -1e308)
    low, high = sorted(draw(st.tuples(ends, ends)))
    return FloatDistribution(low, high, log=kind == "log")


@settings(max_examples=80, deadline=None)
@given(st.lists(distributions(), min_size=1, max_size=3), st.integers(0, 2**32 - 1))
@ROUNDED
def test_suggested_values_lie_in_the_domain(found, seed):
    space = {str(number): each for number, each in enumerate(found)}
    study = study_of(sampler(seed=seed, n_startup_trials=2))
    for value in (1.0, 0.5, 2.0, -1.0):
        trial = study.ask(space)
        for name, each in space.items():
            drawn = trial.params[name]
            assert type(drawn) is (int if isinstance(each, IntDistribution) else float)
            assert each.low <= drawn <= each.high
            steps = (drawn - each.low) / each.step if each.step else 0
            assert steps == pytest.approx(round(steps), abs=1e-8)
        study.tell(trial, value)


@ROUNDED
@settings(max_examples=200, deadline=None)
@given(distributions(), st.floats(-1, 1))
def test_a_scale_leads_to_a_value_and_back(each, position):
    if each.single():
        return
    step = None if each.step is None else float(each.step)
    scale = Scale(float(each.low), float(each.high), each.log, step)
    (value,) = scale.values([position])
    assert each.low <= value <= each.high
    (again,) = scale.values(scale.positions([value]))
    assert again == pytest.approx(value, rel=1e-9, abs=1e-9 * (each.high / 2 - each.low / 2))


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_the_first_points_are_spread(dimensions):
    found = spread(np.full(dimensions, 0.3), np.arange(64))
    assert found.shape == (64, dimensions)
    assert (np.abs(found) <= 1).all()
    for column in found.T:
        counts, _ = np.histogram(column, bins=8, range=(-1, 1))
        assert counts.min() >= 5


def test_the_surrogate_that_ships_is_the_default():
    study = study_of(PabboSampler(seed=0))
    study.optimize(smooth, n_trials=7)
    assert len(set(points(study))) == 7
