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

from raypipe.stats import friedman, holm, paired_comparisons, ranked, runs_needed
from tests.scenario import cases

CASES = cases(__file__, "stats")
quick = settings(max_examples=60, deadline=None)
WHOLE = st.integers(-20, 20).map(float)


def frame(values, names="abcdefgh") -> pd.DataFrame:
    values = np.asarray(values, dtype=float)
    return pd.DataFrame(values, columns=list(names[: values.shape[1]]))


def tables(algorithms=(2, 4), runs=(1, 7), elements=WHOLE):
    """Runs x algorithms of whole numbers, so that ties are frequent and arithmetic is exact."""
    shape = st.tuples(st.integers(*runs), st.integers(*algorithms))
    return hnp.arrays(float, shape, elements=elements).map(frame)


def test_holm_by_hand():
    # sorted: 0.005 x 4 = 0.02, 0.01 x 3 = 0.03, 0.03 x 2 = 0.06, 0.04 x 1 -> not below 0.06
    np.testing.assert_allclose(holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(holm([0.5, 0.9]), [1.0, 1.0])
    assert holm([]).size == 0


@pytest.mark.parametrize("case", CASES["pairs"], ids=lambda case: ", ".join(case["values"]))
def test_what_the_comparison_of_a_pair_says(case):
    table = paired_comparisons(pd.DataFrame(case["values"])).set_index(["first", "second"])
    for names, said in case["says"].items():
        pair = table.loc[tuple(names.split())]
        assert pair[list(said)].to_dict() == pytest.approx(said)


@quick
@given(tables(algorithms=(2, 2), runs=(1, 9)))
def test_pair_equals_the_enumeration_of_all_signs(values):
    """Also with ties: the exact two-sided p-value, from its definition."""
    (pair,) = paired_comparisons(values).to_dict("records")
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


@pytest.mark.parametrize("case", CASES["friedman"])
def test_what_friedman_s_test_says(case):
    result = friedman(frame(case["runs"]))
    found = {**result, **result["average_ranks"]}
    assert {name: found[name] for name in case["says"]} == pytest.approx(case["says"], nan_ok=True)


@pytest.mark.parametrize("function", [paired_comparisons, friedman])
def test_tables_that_are_no_numbers_are_refused(function):
    with pytest.raises(ValueError, match="values of algorithm 'b' are"):
        function(pd.DataFrame({"a": [1.0], "b": ["x"]}))
    with pytest.raises(ValueError, match="algorithm 'a' has two columns"):
        function(pd.DataFrame([[1.0, 2.0]], columns=["a", "a"]))


def test_nullable_columns_count_as_missing():
    values = pd.DataFrame({"a": pd.array([1.0, None, 3.0], dtype="Float64"), "b": [1, 2, 4]})
    assert paired_comparisons(values)["dropped"].tolist() == [1]


def best_of(values: pd.DataFrame, better: str) -> list[int]:
    table = values.to_numpy()
    runs, points = np.indices(table.shape)
    order, ties = ranked(table.ravel(), points.ravel(), runs.ravel(), better)
    assert len(order) == np.isfinite(table).any(axis=0).sum()
    return order[:ties]


@pytest.mark.parametrize(("values", "better", "best"), CASES["best"])
def test_the_best_is_not_the_one_whose_difficult_runs_are_missing(values, better, best):
    assert best_of(pd.DataFrame(values), better) == best


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
