"""PABBO as a search algorithm of Ray Tune: the protocol of its searchers, without a cluster."""

from __future__ import annotations

import math

import pytest
from ray import tune

from experiments.pabbo_lda.samplers.ray_tune import PabboSearch
from tests.experiments.pabbo_lda.surrogates import Nearest

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


def test_points_lie_in_the_space_of_tune_and_come_near_the_optimum():
    found = drive(search(), 30)
    assert all(
        1e-4 <= p["rate"] <= 1 and p["model"]["depth"] in range(1, 9) and len(p) == 2 for p in found
    )
    assert min(map(loss, found)) < 0.3


@pytest.mark.parametrize("result", [None, {}, {"loss": math.nan}, {"loss": math.inf}])
def test_a_trial_without_a_value_fails(result):
    surrogate = Nearest()
    searcher = search(surrogate=surrogate)
    searcher.suggest("t")
    searcher.on_trial_result("t", {"training_iteration": 1, **(result or {})})
    searcher.on_trial_complete("t", result)
    found = drive(searcher, 2)
    searcher.suggest("next")
    assert surrogate.values.tolist() == [loss(point) for point in found]


def test_a_trial_that_ends_early_counts_with_its_last_result():
    surrogate = Nearest()
    searcher = search(n_startup_trials=1, surrogate=surrogate)
    searcher.suggest("t")
    searcher.on_trial_result("t", {"loss": 5.0, "training_iteration": 1})
    searcher.on_trial_result("t", {"loss": 4.0, "training_iteration": 2})
    searcher.on_trial_complete("t", {"loss": 4.0, "training_iteration": 2})
    searcher.suggest("next")
    assert surrogate.values.tolist() == [4.0]


def test_a_restored_search_goes_on_as_if_it_had_not_ended(tmp_path):
    whole = drive(search(), 8)
    part = search()
    first = drive(part, 5)
    part.save(str(tmp_path / "state.pkl"))
    restored = PabboSearch(seed=1)
    restored.restore(str(tmp_path / "state.pkl"))
    assert first + drive(restored, 3, first=5) == whole
