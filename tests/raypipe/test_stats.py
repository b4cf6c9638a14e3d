from __future__ import annotations

import math
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from raypipe.stats import (
    friedman,
    holm,
    paired_comparisons,
    ranked,
    runs_needed,
)

quick = settings(max_examples=60, deadline=None)
WHOLE = st.integers(-20, 20).map(float)


def frame(values, names="abcdefgh") -> pd.DataFrame:
    values = np.asarray(values, dtype=float)
    return pd.DataFrame(values, columns=list(names[: values.shape[1]]))


def tables(algorithms=(2, 4), runs=(1, 7), elements=WHOLE):
    """Runs x algorithms of whole numbers, so that ties are frequent and arithmetic is exact."""
    shape = st.tuples(st.integers(*runs), st.integers(*algorithms))
    return hnp.arrays(float, shape, elements=elements).map(frame)


def pair_of(values: pd.DataFrame) -> pd.Series:
    (pair,) = (row for _, row in paired_comparisons(values).iterrows())
    return pair


def test_holm_by_hand():
    # sorted: 0.005 x 4 = 0.02, 0.01 x 3 = 0.03, 0.03 x 2 = 0.06, 0.04 x 1 -> not below 0.06
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.5, 0.9]), [1.0, 1.0])
    assert holm([]).size == 0


def test_pair_equals_scipy_on_its_own_example():
    # Darwin's maize: heights of crossed minus self-fertilised plants (scipy.stats.wilcoxon)
    d = [6, 8, 14, 16, 23, 24, 28, 29, 41, -48, 49, 56, 60, -67, 75]
    pair = pair_of(pd.DataFrame({"cross": d, "self": np.zeros(15)}))
    assert (pair["statistic"], pair["p_value"]) == (24, pytest.approx(0.041259765625))
    assert pair["p_holm"] == pair["p_value"]
    assert pair["effect"] == pytest.approx((96 - 24) / 120)
    assert (pair["n"], pair["dropped"], pair["equal"]) == (15, 0, 0)
    assert pair["conclusion"] == "self is lower"


@quick
@given(tables(algorithms=(2, 2), runs=(1, 9)))
def test_pair_equals_the_enumeration_of_all_signs(values):
    """Also with ties: the exact two-sided p-value, from its definition."""
    pair = pair_of(values)
    d = (values["a"] - values["b"]).to_numpy()
    d = d[d != 0]
    ranks = stats.rankdata(np.abs(d))
    signs = np.array(list(product([-1, 1], repeat=d.size)))
    null, observed = signs @ ranks, (np.sign(d) * ranks).sum()
    tail = min((null >= observed - 1e-9).mean(), (null <= observed + 1e-9).mean())
    assert pair["p_value"] == pytest.approx(min(1, 2 * tail))
    assert pair["equal"] == (values["a"] == values["b"]).sum()
    assert pair["effect"] == pytest.approx(observed / ranks.sum() if d.size else 0)
    assert pair["p_value"] >= 2 / 2**d.size or not d.size


@quick
@given(
    tables(
        elements=st.sampled_from([1.0, 2.0, 3.0, 1e44, 1.7e308, -1.7e308, np.inf, -np.inf, np.nan])
    )
)
def test_any_values_give_finite_statistics(values):
    table = paired_comparisons(values)
    assert table["p_value"].between(0, 1).all()
    assert (table["p_holm"] >= table["p_value"]).all()
    assert table["effect"].between(-1, 1).all()
    assert (table["n"] + table["dropped"] == len(values)).all()
    result = friedman(values)
    assert result["n"] + result["dropped"] == len(values)
    if result["n"] and values.shape[1] >= 3:
        assert -1e-9 <= result["kendalls_w"] <= 1 + 1e-9


def test_infinite_values_rank_last_and_missing_ones_are_counted():
    inf, nan = math.inf, math.nan
    values = pd.DataFrame({"a": [1, 2, 3, inf, nan, 1], "b": [2, 4, inf, inf, 1, nan]})
    pair = pair_of(values)
    assert (pair["n"], pair["dropped"], pair["equal"]) == (4, 2, 1)
    assert (pair["effect"], pair["p_value"]) == (-1, 0.25)


@pytest.mark.parametrize(
    ("algorithms", "needed"), [(2, 6), (3, 7), (4, 8), (6, 10), (8, 11)]
)  # 2 / 2^n times the number of pairs is at most 0.05
def test_too_few_runs_cannot_tell_and_the_number_named_suffices(algorithms, needed):
    pairs = algorithms * (algorithms - 1) // 2
    assert runs_needed(pairs) == needed
    assert pairs * 2 / 2**needed <= 0.05 < pairs * 2 / 2 ** (needed - 1)
    clearly = np.arange(needed)[:, None] * 0.01 + np.arange(algorithms) * np.ones((needed, 1))
    few = paired_comparisons(frame(clearly[:-1]))
    assert set(few["conclusion"]) == {f"cannot tell: needs at least {needed} runs"}
    enough = paired_comparisons(frame(clearly))
    assert (enough["conclusion"] == enough["first"] + " is lower").all()


def test_conclusions_without_a_significant_difference():
    same = np.arange(8.0)
    other = same + np.array([1, -1, 2, -2, 3, -3, 4, -4])
    mostly = same + np.repeat([0, 1], 4)
    table = paired_comparisons(pd.DataFrame({"a": same, "b": same, "c": other, "d": mostly}))
    conclusions = dict(zip(table["first"] + table["second"], table["conclusion"], strict=True))
    assert conclusions["ab"] == conclusions["ac"] == "no difference found"
    assert conclusions["ad"] == "cannot tell: only 4 runs differ, needs at least 8"
    assert table.iloc[0][["p_value", "effect", "equal"]].tolist() == [1, 0, 8]


def test_a_control_makes_a_family_of_fewer_tests_which_fewer_runs_decide():
    rng = np.random.default_rng(1)
    values = pd.DataFrame(rng.normal([[0, 5, 5, 5, 5, 9]], 1, (9, 6)), columns=list("abcdef"))
    against = paired_comparisons(values, control="c")
    assert list(zip(against["first"], against["second"], strict=True)) == [
        (name, "c") for name in "abdef"
    ]
    every = paired_comparisons(values).set_index(["first", "second"])
    same = every.loc[[("a", "c"), ("b", "c")], "p_value"].tolist()
    assert against["p_value"].tolist()[:2] == same
    assert against["p_holm"].tolist() == holm(against["p_value"]).tolist()
    assert against["conclusion"][0] == "a is lower"
    assert against["conclusion"][4] == "c is lower"
    assert every["conclusion"].str.startswith("cannot tell").all()


@pytest.mark.parametrize("columns", [0, 1])
def test_fewer_than_two_algorithms_have_no_pairs(columns):
    table = paired_comparisons(frame(np.ones((3, columns))))
    assert table.empty
    assert table.columns.tolist() == paired_comparisons(frame(np.ones((3, 2)))).columns.tolist()


def test_friedman_equals_scipy_and_a_worked_example():
    # Conover (1999), section 5.8: twelve homeowners rank four grasses
    ranks = [
        [4, 3, 2, 1], [4, 2, 3, 1], [3, 1.5, 1.5, 4], [3, 1, 2, 4], [4, 2, 1, 3], [2, 2, 2, 4],
        [1, 3, 2, 4], [2, 4, 1, 3], [3.5, 1, 2, 3.5], [4, 1, 3, 2], [4, 2, 3, 1], [3.5, 1, 2, 3.5],
    ]  # fmt: skip
    result = friedman(frame(ranks))
    assert result["chi2"] == pytest.approx(8.0973, abs=1e-4)
    reference = stats.friedmanchisquare(*np.transpose(ranks))
    assert result["p_value"] == pytest.approx(reference.pvalue)
    assert result["kendalls_w"] == pytest.approx(result["chi2"] / 36)
    assert list(result["average_ranks"].values()) == pytest.approx(np.mean(ranks, axis=0))
    assert (result["n"], result["dropped"], result["conclusion"]) == (
        12,
        0,
        "the algorithms differ",
    )


def test_friedman_says_when_it_cannot_tell():
    same = friedman(frame(np.ones((5, 3))))
    assert (same["chi2"], same["p_value"], same["conclusion"]) == (0, 1, "no difference found")
    two = friedman(frame(np.arange(10).reshape(5, 2)))
    assert two["conclusion"] == "cannot tell: needs at least 3 algorithms"
    assert math.isnan(two["p_value"])
    ranking = np.arange(3) + np.zeros((5, 1))
    few = friedman(frame(ranking[:2]))
    assert few["conclusion"] == "cannot tell: needs at least 3 runs"
    enough = friedman(frame(ranking[:3]))
    assert (enough["kendalls_w"], enough["conclusion"]) == (1, "the algorithms differ")
    missing = friedman(frame(np.where(np.eye(5, 3), np.nan, ranking)))
    assert (missing["n"], missing["dropped"]) == (2, 3)
    assert friedman(frame(np.full((2, 3), np.nan)))["conclusion"].startswith("cannot tell")


@pytest.mark.parametrize("function", [paired_comparisons, friedman])
def test_tables_that_are_no_numbers_are_refused(function):
    with pytest.raises(ValueError, match="values of algorithm 'b' are"):
        function(pd.DataFrame({"a": [1.0], "b": ["x"]}))
    with pytest.raises(ValueError, match="algorithm 'a' has two columns"):
        function(pd.DataFrame([[1.0, 2.0]], columns=["a", "a"]))


def test_nullable_columns_count_as_missing():
    values = pd.DataFrame({"a": pd.array([1.0, None, 3.0], dtype="Float64"), "b": [1, 2, 4]})
    assert pair_of(values)["dropped"] == 1


def best_of(values: pd.DataFrame, better: str = "lower") -> list[int]:
    table = values.to_numpy()
    runs, points = np.indices(table.shape)
    order, ties = ranked(table.ravel(), points.ravel(), runs.ravel(), better)
    assert len(order) == np.isfinite(table).any(axis=0).sum()
    return order[:ties]


def test_the_best_is_not_the_one_whose_difficult_runs_are_missing():
    easy, hard = 1.0, 9.0
    values = pd.DataFrame({"a": [easy, hard], "b": [easy + 0.5, hard + 0.5], "c": [easy + 1, None]})
    assert values.mean().idxmin() == "c"
    assert best_of(values) == [0]
    assert best_of(values.assign(c=[easy - 0.1, None])) == [2]  # better where it can be compared
    assert best_of(values.assign(c=np.nan)) == [0]
    assert best_of(values.assign(b=[easy, hard])) == [0, 1]
    assert best_of(pd.DataFrame({"a": [2.0, None], "b": [None, 1.0]})) == [1]  # no common run
    assert best_of(pd.DataFrame({"a": [2.0], "b": [np.inf], "c": [np.nan]}), "higher") == [0]
    assert best_of(pd.DataFrame({"a": [np.nan, np.inf]})) == []


@given(
    hnp.arrays(float, st.tuples(st.integers(1, 5), st.integers(1, 5)),
               elements=st.sampled_from([1.0, 2.0, 3.0, math.inf, math.nan])),
    st.sampled_from(["lower", "higher"]),
)  # fmt: skip
def test_the_best_is_not_beaten_by_one_with_more_runs(values, better):
    found = best_of(pd.DataFrame(values), better)
    table = pd.DataFrame(np.where(np.isfinite(values), values, np.nan))
    table = table if better == "lower" else -table
    for best in found:
        for rival in table.columns[table.count() > table[best].count()]:
            both = table[[best, rival]].dropna()
            assert both.empty or not both[rival].mean() < both[best].mean()
        assert table[best].mean() == pytest.approx(table[found[0]].mean())
    if table.notna().all(axis=None):
        assert table[found[0]].mean() == table.mean().min()
