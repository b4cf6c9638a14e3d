"""Racing of the LDA seeds of a point."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.pabbo_lda.objective.objectives import CorpusObjective
from experiments.pabbo_lda.settings import LdaSettings
from experiments.pabbo_lda.study.evaluations import lda_seeds
from experiments.pabbo_lda.study.racing import LOWEST, most_for_a_race
from experiments.pabbo_lda.study.study_runner import StudySpec
from tests.experiments.pabbo_lda import test_study_runner
from tests.experiments.pabbo_lda.test_study_runner import (
    cache,
    interrupted_after,
    outcome,
    run,
    study_settings,
)

__all__ = ["cache"]  # every test has a cache of its own

POINTS = st.lists(st.lists(st.floats(1, 1e6), min_size=2, max_size=4), min_size=1, max_size=8)


class Noisy:
    """A curve over T, with noise that depends on the seed."""

    def value(self, dataset: str, seed: int, T: int) -> float:
        noise = np.random.default_rng((seed, T)).normal(0, 0.01)
        return 100 * math.exp(0.3 * math.log(T / 12) ** 2 + noise)


@pytest.fixture(autouse=True)
def formula(monkeypatch) -> None:
    def objective(dataset: str) -> CorpusObjective:
        return CorpusObjective(dataset, "tabular", {"corpus": dataset}, Noisy())

    monkeypatch.setattr(test_study_runner, "objective", objective)


def raced(**changed) -> LdaSettings:
    usual = {"datasets": ("hills",), "optimizers": ("random", "tpe", "ga"), "runs": 2}
    usual |= {"evaluations": 14, "seeds": 3, "racing": True, "cache": False}
    return study_settings(**{**usual, **changed})


def test_the_limit_is_the_prediction_interval_of_one_fit():
    """Two points with three fits each: four degrees of freedom, the mean of three fits."""
    logs = np.array([[0.0, 0.01, 0.02], [0.5, 0.53, 0.5]])
    variance = float(np.var(logs, axis=1, ddof=1).mean())
    half = scipy.stats.t.ppf(0.975, 4) * math.sqrt(variance * (1 + 1 / 3))
    assert most_for_a_race(np.exp(logs).tolist()) == pytest.approx(math.exp(0.01 + half))
    below = logs - 1  # not positive: the noise is that of the values
    assert most_for_a_race(below.tolist()) == pytest.approx(-0.99 + half)


def test_only_the_lowest_points_say_how_large_the_noise_is():
    near = [[100 + n, 101 + n] for n in range(LOWEST)]
    assert most_for_a_race(near) == most_for_a_race([*near, [500.0, 9000.0]])


@given(POINTS)
def test_the_limit_is_above_the_lowest_fit_of_the_best_point(fits):
    best = min(fits, key=np.mean)
    assert most_for_a_race(fits) >= min(best) * (1 - 1e-9)


def test_without_two_fits_of_a_point_nothing_is_clear():
    assert most_for_a_race([]) == math.inf
    assert most_for_a_race([[5.0]]) == math.inf
    assert most_for_a_race([[5.0, math.inf], [math.nan, 4.0]]) == math.inf


def test_a_point_that_is_clearly_worse_has_one_fit_and_others_have_all(tmp_path: Path):
    ledger, pool, error = run(tmp_path / "run", raced())
    whole, every, _ = run(tmp_path / "whole", raced(racing=False))
    assert error is None
    assert len(pool.ran) == len(set(pool.ran)) < len(every.ran)
    rows = ledger.rows("study_history")
    assert {row["lda_seeds"] for row in rows} == {1, 3}
    for row in rows:
        seeds = lda_seeds(row["seed"], row["lda_seeds"])
        fits = [Noisy().value("hills", seed, row["T"]) for seed in seeds]
        assert row["value"] == pytest.approx(fmean(fits))
        assert row["lda_seeds"] == 3 or row["batch"] > 0
    best = {(row["optimizer"], row["run"]): row["best_T"] for row in ledger.rows("studies")}
    for row in rows:  # the best T has all seeds
        if row["T"] == best[row["optimizer"], row["run"]]:
            assert row["lda_seeds"] == 3
    by_random = [row["T"] for row in rows if row["optimizer"] == "random"]
    assert by_random == [
        row["T"] for row in whole.rows("study_history") if row["optimizer"] == "random"
    ]
    last = [row for row in rows if row["evaluation"] == 14]
    for row in last:
        of_study = [r for r in rows if (r["optimizer"], r["run"]) == (row["optimizer"], row["run"])]
        assert row["elapsed_s"] == sum(each["lda_seeds"] for each in of_study)


@settings(max_examples=6, deadline=None)
@given(order=st.integers(0, 2**32), kill=st.integers(1, 60))
def test_neither_order_nor_an_interruption_changes_a_race(order, kill, tmp_path_factory):
    whole, _, _ = run(tmp_path_factory.mktemp("whole"), raced())
    folder = tmp_path_factory.mktemp("run")
    run(folder, raced(), order, interrupted_after(kill))
    ledger, _, error = run(folder, raced(), order + 1)
    assert error is None
    assert outcome(ledger) == outcome(whole)


def test_further_fits_of_other_runs_in_the_cache_do_not_change_a_race(tmp_path: Path):
    alone, _, _ = run(tmp_path / "alone", raced())
    run(tmp_path / "all", raced(racing=False, cache=True))
    after, _, _ = run(tmp_path / "after", raced(cache=True))
    for name in ("studies", "study_history"):
        values = [
            {key: row["value" if name == "study_history" else "best_T"]
             for key, row in ledger.items(name)} for ledger in (alone, after)
        ]  # fmt: skip
        assert values[0] == values[1]


def test_racing_decides_a_study_and_needs_two_seeds():
    spec = StudySpec(CorpusObjective("hills", "tabular", {}, Noisy()), "tpe", 0, 0)
    assert spec.unit(raced(), None).literals["lda"] == {"seeds": 3, "racing": True}
    assert spec.unit(raced(racing=False), None).literals["lda"] == {"seeds": 3}
    with pytest.raises(ValueError, match=r"set lda\.seeds to 2 or more"):
        raced(seeds=1)
