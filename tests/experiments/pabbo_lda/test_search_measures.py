from __future__ import annotations

import math

import pytest
import torch

from experiments.pabbo_lda.pabbo.held_out_functions import (
    FAR,
    EvaluationSettings,
    held_out_functions,
)
from experiments.pabbo_lda.pabbo.search_measures import (
    by_function,
    duels_to,
    measure_rows,
)
from experiments.pabbo_lda.pabbo.searches import Searches
from experiments.pabbo_lda.pabbo.synthetic_functions import SyntheticFunctionSettings

#: three functions of range 10, two starts, two duels after the first one
REGRET = torch.tensor(
    [[[5.0, 0.4, 0.1], [5, 5, 5]], [[0.0, 0, 0], [5, 5, 0.5]], [[1, 0.6, 0.6], [8, 0.2, 0.2]]]
)
SEARCHES = Searches(
    {"pabbo": REGRET, "random": 2 * REGRET},
    torch.tensor([[True, False], [False, False], [True, True]]),
    torch.full((3,), 10.0),
)


def test_duels_are_counted_after_the_first_one() -> None:
    needed = duels_to(REGRET, SEARCHES.spread, 0.05)
    assert needed.tolist() == [[1, math.inf], [0, 2], [math.inf, 1]]


def test_a_function_is_the_mean_of_its_starts_of_a_kind() -> None:
    every, far = by_function(SEARCHES, "all"), by_function(SEARCHES, "far")
    assert every["regret"]["pabbo"].tolist() == pytest.approx([2.55, 0.25, 0.4])
    assert far["regret"]["pabbo"].tolist() == pytest.approx([0.1, math.nan, 0.4], nan_ok=True)
    assert every["area"]["pabbo"].tolist() == pytest.approx([2.625, 1.375, 0.4])
    # a search that never comes close counts as one duel more than there are
    assert every["duels_to_5_percent"]["pabbo"].tolist() == [2, 1, 2]


def test_the_rows_have_intervals_shares_and_tests_of_each_kind_of_start() -> None:
    rows = {(row["start"], row["method"]): row for row in measure_rows(SEARCHES, "pabbo")}
    assert len(rows) == 3 * 2
    ours = rows["all", "pabbo"]
    assert (ours["functions"], ours["searches"]) == (3, 6)
    assert ours["reached_5_percent"] == pytest.approx(4 / 6)
    assert ours["duels_to_5_percent"] == 1
    assert ours["p_regret"] is None
    assert rows["all", "random"]["p_regret"] == pytest.approx(0.25)
    assert rows["far", "pabbo"]["functions"] == 2
    assert rows["near", "random"]["duels_to_1_percent"] is None
    assert rows["near", "random"]["reached_1_percent"] == pytest.approx(1 / 3)


def test_a_start_is_far_if_both_ends_of_its_duel_are() -> None:
    settings = EvaluationSettings(functions=40, starts=3, query_points=20, candidate_pairs=40)
    held_out = held_out_functions(settings, SyntheticFunctionSettings())
    gap = (held_out.duels[:, :, 0] - held_out.best_point[:, None, None]).abs()
    assert torch.equal(held_out.far, (gap > FAR).all(2))
    assert 0.1 < held_out.far.double().mean() < 0.6
    assert (held_out.spread > 0).all()
