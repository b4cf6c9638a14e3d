"""Noise and optimum of an objective."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from experiments.pabbo_lda.study.aggregation import MEASURES, aggregate
from experiments.pabbo_lda.study.landscape import landscape
from raypipe.store.ledger import Row
from tests.experiments.pabbo_lda.test_aggregation import history, table

HISTORY: list[Row] = [{"dataset": "corpus", "lda_seeds": 1}]


def fits(values: dict[int, list[float]], dataset: str = "corpus", **point: float) -> list[Row]:
    """Evaluations: a list of T's values, one per seed."""
    return [
        {"dataset": dataset, "seed": seed, "T": T, "value": value, **point}
        for T, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]


def test_the_noise_is_pooled_over_the_repeated_points_with_the_lowest_means():
    high = {T: [100.0 * T, 300.0 * T] for T in range(20, 26)}
    low = {T: [12.0, 16.0] for T in range(3, 7)}
    rows = fits({2: [9.0, 11.0, 10.0], **low, 7: [1.0], **high})
    [row] = landscape(rows, [{"dataset": "corpus", "lda_seeds": 4}]).to_dict("records")
    std = math.sqrt((2 * 1.0 + 4 * 8.0) / 6)
    assert (row["points"], row["fits"], row["lda_seeds"]) == (5, 11, 4)
    assert row["std"] == pytest.approx(std)
    assert row["std_of_value"] == pytest.approx(std / 2)
    quantile = scipy_stats.t.ppf(0.975, 6)
    assert row["interval"] == pytest.approx(quantile * std * math.sqrt(2 / 4))
    more = fits({T: [T + 0.0, T + 1.0] for T in range(2, 72)})
    assert landscape(more, HISTORY)["points"].tolist() == [7]


def test_two_values_of_one_point_differ_by_less_than_the_interval_in_95_of_100_cases():
    rng = np.random.default_rng(0)
    values = {T: rng.normal(500, 7, 8).tolist() for T in range(2, 60)}
    interval = landscape(fits(values), HISTORY)["interval"].iloc[0]
    pairs = rng.normal(500, 7, (4000, 2))
    assert 0.9 < np.mean(np.abs(pairs[:, 0] - pairs[:, 1]) < interval) < 0.99


def test_values_that_are_not_finite_are_left_out_and_without_repetitions_nothing_is_known():
    rows = fits({2: [9.0, 11.0, math.inf], 3: [math.nan, 1.0], 4: [math.inf, math.inf]})
    [row] = landscape(rows, HISTORY).to_dict("records")
    assert (row["points"], row["fits"]) == (1, 2)
    assert row["best_T"] == 2
    assert landscape(fits({2: [1.0], 3: [2.0, math.inf]}), HISTORY).empty
    assert landscape([], []).empty
    assert landscape(rows, [{"dataset": "other"}]).empty


def test_the_optimum_is_of_points_with_enough_seeds_and_names_its_equals():
    valley = {2: 30.0, 5: 10.6, 8: 10.1, 11: 10.0, 16: 10.4, 30: 40.0, 60: 90.0}
    values = {T: [mean - 0.1, mean + 0.1, mean, mean] for T, mean in valley.items()}
    rows = fits({**values, 9: [1.0]})  # one lucky fit
    [row] = landscape(rows, HISTORY).to_dict("records")
    found = {name: row[name] for name in ("best_T", "T_low", "T_high", "T_least", "T_most")}
    assert found == {"best_T": 11, "T_low": 8, "T_high": 11, "T_least": 2, "T_most": 60}
    assert row["best_mean"] == pytest.approx(10)


def test_a_search_of_priors_has_noise_and_no_best_number_of_topics():
    rows = fits({2: [9.0, 11.0]}, eta=0.1) + fits({2: [5.0, 6.0]}, eta=0.2)
    [row] = landscape(rows, HISTORY).to_dict("records")
    assert row["std"] == pytest.approx(math.sqrt((2.0 + 0.5) / 2))
    assert math.isnan(row["best_T"])


def test_studies_within_the_noise_are_measured_where_it_is_known():
    values = {"quick": [[30.0, 20.0, 10.5, 10.0]], "slow": [[30.0, 20.0, 19.0, 10.9]]}
    rows = history(values)
    unknown = aggregate(rows)
    assert unknown["landscape"] == {}
    assert {row["evaluations_to_noise"] for row in unknown["convergence"].values()} == {None}
    assert not any("noise" in key for key in unknown["rankings"])
    tables = aggregate(rows, fits({5: [9.7, 10.3] * 4}))
    interval = tables["landscape"]["corpus"]["interval"]
    assert 1 < interval < 2
    reached = table(tables["convergence"], "optimizer")
    assert reached["evaluations_to_noise"].to_dict() == {"quick": 3, "slow": 4}
    assert reached["evaluations_beyond_start_to_noise"].to_dict() == {"quick": 1, "slow": 2}
    measures = {row["measure"] for row in tables["rankings"].values()}
    assert measures == {*MEASURES} - {"confirmed_value"}
