"""PABBO's sampler for Optuna, and as a search algorithm of Ray Tune, without a cluster."""

from __future__ import annotations

import math

import numpy as np
import optuna
import pytest
from optuna.distributions import FloatDistribution
from optuna.testing.pytest_samplers import (
    BasicSamplerTestCase,
    RelativeSamplerTestCase,
    SingleOnlySamplerTestCase,
)
from optuna.trial import TrialState, create_trial
from ray import tune

from experiments.pabbo_lda.samplers.optuna import PabboSampler
from experiments.pabbo_lda.samplers.ray_tune import PabboSearch
from tests.scenario import cases


class Nearest:
    """Expects at a point the value of the nearest known one, and more the farther that is."""

    known = values = None

    def expected_improvement(self, known, values, candidates):
        assert known.shape == (len(values), candidates.shape[1])
        assert np.isfinite(values).all()
        assert (np.abs(known) <= 1).all()
        assert (np.abs(candidates) <= 1).all()
        self.known, self.values = known, values
        distances = np.linalg.norm(candidates[:, None] - known[None], axis=2)
        unit = np.ptp(values) or 1.0
        return distances.min(axis=1) * unit - values[distances.argmin(axis=1)]


optuna.logging.set_verbosity(optuna.logging.ERROR)

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

    @pytest.fixture(params=[0, pytest.param(5, marks=pytest.mark.slow)])
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


def test_a_study_continues_from_its_storage_as_if_it_had_not_ended(tmp_path):
    whole = study_of()
    whole.optimize(smooth, n_trials=10)
    storage = f"sqlite:///{tmp_path}/study.db"
    for trials in (6, 4):  # the first trial is drawn by the independent sampler
        part = study_of(storage=storage, study_name="parts", load_if_exists=True)
        part.optimize(smooth, n_trials=trials)
    assert points(part) == points(whole)


def test_trials_count_by_their_state():
    own, trials = sampler(n_startup_trials=1), cases(__file__, "trials")
    study = study_of(own)
    for x, state, about, _ in trials:
        given = {"params": {"x": x}, "distributions": X, "state": TrialState[state]}
        study.add_trial(create_trial(**given, **about))
    study.ask(X)
    seen = own._surrogate
    told = dict(zip(np.round((seen.known[:, 0] + 1) / 2, 9), seen.values, strict=True))
    assert told == pytest.approx({x: value for x, *_, value in trials if value is not None})


def test_processes_that_share_a_storage_propose_different_points(tmp_path):
    where = {"storage": f"sqlite:///{tmp_path}/study.db", "study_name": "shared"}
    studies = [study_of(**where, load_if_exists=True) for _ in range(2)]
    studies[0].optimize(smooth, n_trials=6)
    space = studies[0].trials[0].distributions
    asked = [study.ask(space) for study in studies * 2]
    assert len({tuple(trial.params.values()) for trial in asked}) == 4


def test_a_discrete_space_is_exhausted_before_a_point_is_repeated():
    study = study_of(sampler(n_startup_trials=1))

    def objective(trial):
        return abs(trial.suggest_int("n", 0, 4) - 2) + trial.suggest_float("x", 0, 1, step=1)

    study.optimize(objective, n_trials=12)
    drawn = points(study)
    assert len(set(drawn[:10])) == 10
    assert set(drawn[10:]) <= set(drawn[:10])


@pytest.mark.filterwarnings("error")
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
        quiet = study_of(sampler(n_startup_trials=2, warn_independent_sampling=False))
        quiet.optimize(objective, n_trials=8)


def test_several_objectives_are_refused():
    study = study_of(directions=["minimize", "maximize"])
    with pytest.raises(ValueError, match="one objective, and the study has 2; take NSGAII"):
        study.optimize(lambda trial: (trial.suggest_float("x", 0, 1), 0), n_trials=1)


SPACE = {"rate": tune.loguniform(1e-4, 1.0), "model": {"depth": tune.randint(1, 9)}, "name": "x"}


def search(**options):
    found = PabboSearch(**{"seed": 0, "n_startup_trials": 2, "surrogate": Nearest()} | options)
    assert found.set_search_properties("loss", "min", SPACE)
    return found


def loss(point):
    return abs(math.log10(point["rate"]) + 2) + abs(point["model"]["depth"] - 3)


def drive(searcher, trials, first=0):
    found = []
    for number in range(first, first + trials):
        point = searcher.suggest(f"t{number}")
        found.append(point)
        searcher.on_trial_complete(f"t{number}", {"loss": loss(point), "training_iteration": 1})
    return found


#: last results without a value
FAILED = (None, {}, {"loss": math.nan}, {"loss": math.inf})


@pytest.mark.parametrize("result", [*FAILED, {"loss": 4.0}])
def test_a_trial_that_ends_early_counts_with_its_last_result_or_fails(result):
    surrogate = Nearest()
    searcher = search(surrogate=surrogate)
    searcher.suggest("t")
    searcher.on_trial_result("t", {"loss": 5.0, "training_iteration": 1})
    searcher.on_trial_result("t", {"training_iteration": 2, **(result or {})})
    searcher.on_trial_complete("t", result)
    found = drive(searcher, 2)
    searcher.suggest("next")
    counted = [] if result in FAILED else [4.0]
    assert surrogate.values.tolist() == [*counted, *map(loss, found)]


def test_a_restored_search_goes_on_in_the_space_of_tune_and_comes_near_the_optimum(tmp_path):
    whole = drive(search(), 30)
    assert all(1e-4 <= point["rate"] <= 1 and len(point) == 2 for point in whole)
    assert {point["model"]["depth"] for point in whole} <= {*range(1, 9)}
    assert min(map(loss, whole)) < 0.3
    part = search()
    first = drive(part, 5)
    part.save(str(tmp_path / "state.pkl"))
    restored = PabboSearch(seed=1)
    restored.restore(str(tmp_path / "state.pkl"))
    assert first + drive(restored, 25, first=5) == whole
