"""Values that are means over seeds of LDA."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.pabbo_lda.objective.objectives import CorpusObjective
from experiments.pabbo_lda.optimizers import OptimizerName
from experiments.pabbo_lda.settings import LdaSettings
from experiments.pabbo_lda.study.aggregation import aggregate
from experiments.pabbo_lda.study.evaluations import lda_seeds, mean_value
from experiments.pabbo_lda.study.study_runner import StudySpec
from raypipe.graph.launcher import TaskResult
from tests.experiments.pabbo_lda import test_study_runner
from tests.experiments.pabbo_lda.test_study_runner import (
    cache,
    interrupted_after,
    run,
    study_settings,
)

__all__ = ["cache"]  # every test has a cache of its own

FINITE = st.floats(-1e6, 1e6)
INVALID = st.sampled_from([math.nan, math.inf, -math.inf])


class AnySeed:
    """Values that a formula gives for any seed."""

    def value(self, dataset: str, seed: int, T: int) -> float:
        return 10 + math.log(T / 12) ** 2 + seed % 97 / 97


@pytest.fixture(autouse=True)
def formula(monkeypatch) -> None:
    def objective(dataset: str) -> CorpusObjective:
        return CorpusObjective(dataset, "tabular", {"corpus": dataset}, AnySeed())

    monkeypatch.setattr(test_study_runner, "objective", objective)


def small(**changed) -> LdaSettings:
    usual = {"datasets": ("hills",), "optimizers": ("random", "tpe"), "runs": 2, "evaluations": 6}
    return study_settings(**{**usual, **changed})


@given(st.integers(0, 2**32 - 1), st.integers(1, 9), st.integers(1, 9))
def test_more_seeds_begin_with_those_of_fewer(seed, count, more):
    fewer, all_seeds = lda_seeds(seed, count), lda_seeds(seed, count + more)
    assert all_seeds[:count] == fewer
    assert fewer[0] == seed
    assert len(set(all_seeds)) == count + more
    assert all(0 <= each < 2**32 for each in all_seeds)


def test_runs_share_no_seed():
    seeds = [each for run in range(200) for each in lda_seeds(42 + run, 5)]
    assert len(set(seeds)) == len(seeds)


@given(st.lists(FINITE, min_size=1, max_size=5))
def test_the_value_is_the_mean_of_finite_values(values):
    assert mean_value(values) == pytest.approx(fmean(values), rel=1e-9, abs=1e-6)
    assert mean_value(values[:1]) == values[0]


@given(st.lists(FINITE, max_size=3), INVALID, st.lists(FINITE | INVALID, max_size=3))
def test_a_value_that_is_not_finite_decides_the_mean(before, invalid, after):
    found = mean_value([*before, invalid, *after])
    assert found == invalid or (math.isnan(found) and math.isnan(invalid))
    assert mean_value([1.7e308, 1.7e308]) == math.inf


@settings(max_examples=10, deadline=None)
@given(order=st.integers(0, 2**32), seeds=st.integers(1, 3))
def test_every_fit_is_computed_once_and_the_value_is_their_mean(order, seeds, tmp_path_factory):
    lda = small(cache=False, seeds=seeds)
    ledger, pool, error = run(tmp_path_factory.mktemp("run"), lda, order)
    assert error is None
    assert len(pool.ran) == len(set(pool.ran)) == len(ledger.rows("evaluations"))
    for row in ledger.rows("study_history"):
        fits = [AnySeed().value("hills", each, row["T"]) for each in lda_seeds(row["seed"], seeds)]
        assert row["value"] == pytest.approx(fmean(fits))
        assert row["lda_seeds"] == seeds
    last = [row for row in ledger.rows("study_history") if row["evaluation"] == 6]
    assert all(row["elapsed_s"] == 6 * seeds for row in last)


def test_more_seeds_take_the_fits_of_fewer_from_the_cache(tmp_path: Path):
    run(tmp_path / "one", small(optimizers=("random",)))
    ledger, pool, _ = run(tmp_path / "three", small(optimizers=("random",), seeds=3))
    start = [row for row in ledger.rows("evaluations") if row["T"] in (90, 150, 190)]
    assert len(start) == 3 * 2 * 3
    assert sorted(row["seed"] for row in start if row["cached"]) == [0, 0, 0, 1, 1, 1]
    assert not any(f"seed {seed}/T=90" in " ".join(pool.ran) for seed in (0, 1))


def test_an_interrupted_mean_continues_with_the_missing_fits(tmp_path: Path):
    lda = small(cache=False, seeds=3)
    whole, _, _ = run(tmp_path / "whole", lda)
    run(tmp_path / "run", lda, fate=interrupted_after(7))
    ledger, pool, _ = run(tmp_path / "run", lda)
    assert test_study_runner.outcome(ledger) == test_study_runner.outcome(whole)
    assert len(pool.ran) < len(ledger.rows("evaluations"))


def test_one_fit_that_is_not_finite_makes_its_topics_the_worst(tmp_path: Path):
    bad = f"hills/seed {lda_seeds(0, 2)[1]}/T=150"

    def fate(key: str) -> TaskResult | None:
        return TaskResult(key, math.inf, duration_s=1.0, cpu_s=0.5) if key == bad else None

    ledger, _, error = run(tmp_path / "run", small(cache=False, seeds=2), fate=fate)
    assert error is None
    values = {(row["run"], row["T"]): row["value"] for row in ledger.rows("study_history")}
    assert values[0, 150] == math.inf
    assert math.isfinite(values[1, 150])


def test_a_fit_that_fails_for_good_fails_its_studies(tmp_path: Path):
    bad = f"hills/seed {lda_seeds(0, 2)[1]}/T=150"

    def fate(key: str) -> TaskResult | None:
        return TaskResult(key, error="took too long", kind="timeout") if key == bad else None

    ledger, _, error = run(tmp_path / "run", small(cache=False, seeds=2), fate=fate)
    assert error is not None
    assert {row["run"] for row in ledger.rows("studies")} == {1}


def test_the_best_topics_are_fitted_with_seeds_that_no_search_saw(tmp_path: Path):
    lda = small(cache=False, seeds=2, final_seeds=3)
    ledger, _, error = run(tmp_path / "run", lda)
    assert error is None
    for row in ledger.rows("studies"):
        unseen = lda_seeds(row["seed"], 5)[2:]
        expected = fmean(AnySeed().value("hills", seed, row["best_T"]) for seed in unseen)
        assert row["confirmed_value"] == pytest.approx(expected)
        assert row["duration_s"] == 6 * 2  # of the search alone
    again, pool, _ = run(tmp_path / "run", lda)
    assert not pool.ran
    tables = aggregate(*map(again.rows, ("study_history", "evaluations", "studies")))
    reached = {row["confirmed_value"] for row in tables["convergence"].values()}
    assert reached == {row["confirmed_value"] for row in again.rows("studies")}
    assert any("/confirmed_value/" in key for key in tables["rankings"])


def test_an_interrupted_final_comparison_continues(tmp_path: Path):
    lda = small(cache=False, final_seeds=2)
    whole, every, _ = run(tmp_path / "whole", lda)
    for kill in (len(every.ran) - 1, len(every.ran) - 3):
        run(tmp_path / str(kill), lda, fate=interrupted_after(kill))
        ledger, _, _ = run(tmp_path / str(kill), lda)
        assert test_study_runner.outcome(ledger) == test_study_runner.outcome(whole)


def test_a_study_without_a_finite_value_has_nothing_to_confirm(tmp_path: Path):
    def fate(key: str) -> TaskResult:
        return TaskResult(key, math.nan, duration_s=1.0, cpu_s=0.5)

    ledger, _, error = run(tmp_path / "run", small(cache=False, final_seeds=2), fate=fate)
    assert error is None
    assert {row["confirmed_value"] for row in ledger.rows("studies")} == {None}


def test_the_numbers_of_seeds_decide_a_study_unless_they_are_the_published_ones():
    def literals(name: OptimizerName = "tpe", **changed) -> Mapping[str, Any]:
        spec = StudySpec(CorpusObjective("hills", "tabular", {}, AnySeed()), name, 0, 0)
        return spec.unit(small(**changed), None).literals

    assert "lda" not in literals()
    assert literals(seeds=2)["lda"] == {"seeds": 2}
    assert literals(final_seeds=3)["lda"] == {"final_seeds": 3}
    assert literals("pabbo_small", seeds=2)["lda"].keys() == {"policy", "seeds"}
    assert LdaSettings().unseen_seeds == 3


def test_recorded_values_have_one_seed(tmp_path: Path):
    with pytest.raises(ValueError, match="seeds = 2 with recorded values"):
        small(objective="tabular", table=tmp_path / "values.csv", seeds=2)
    recorded = small(objective="tabular", table=tmp_path / "values.csv", final_seeds=3)
    assert recorded.unseen_seeds == 0
