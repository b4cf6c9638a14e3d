from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments.pabbo_lda.pabbo.evaluation import (
    EvaluationSettings,
    HeldOut,
    Searches,
    by_function,
    duels_to,
    held_out_functions,
    measure_rows,
    policy_scorer,
    random_scorer,
    regret_rows,
    simple_regret,
)
from experiments.pabbo_lda.pabbo.functions import (
    Candidates,
    SyntheticFunctionSettings,
    sample_functions,
    winners,
)
from experiments.pabbo_lda.pabbo.model import SMALL, PabboModel, score_pairs

SETTINGS = EvaluationSettings(functions=6, starts=3, steps=8, query_points=20, candidate_pairs=40)
FUNCTIONS = SyntheticFunctionSettings()


def _held_out() -> HeldOut:
    return held_out_functions(SETTINGS, FUNCTIONS)


def _oracle(duels: Tensor, preferred: Tensor, candidates: Candidates, used: float) -> Tensor:
    del preferred, used
    return candidates.utility.amax(2)[:, None].expand(-1, duels.shape[1], -1)


def test_an_oracle_finds_the_best_candidate_at_once() -> None:
    held_out = _held_out()
    regret = simple_regret(_oracle, held_out, SETTINGS)
    assert regret.shape == (6, 3, 9)
    gap = held_out.best_utility - held_out.candidates.utility.amax((1, 2))
    torch.testing.assert_close(regret[:, :, 1], gap[:, None].expand(-1, 3))


def test_regret_starts_with_the_first_duel_and_never_grows() -> None:
    held_out = _held_out()
    regret = simple_regret(random_scorer(0, held_out), held_out, SETTINGS)
    first = held_out.best_utility[:, None] - held_out.utility.amax((2, 3))
    torch.testing.assert_close(regret[:, :, 0], first)
    assert (regret.diff(dim=2) <= 0).all()
    assert (regret >= -1e-5).all()


def test_held_out_functions_are_not_training_functions() -> None:
    trained = sample_functions(SETTINGS.seed, torch.arange(6), 20, FUNCTIONS)
    assert not torch.allclose(trained.points, _held_out().candidates.points)


def test_all_runs_together_are_each_run_alone() -> None:
    torch.manual_seed(0)
    model = PabboModel(SMALL).eval()
    held_out = _held_out()
    together = simple_regret(policy_scorer(model), held_out, SETTINGS)
    c, b, r = held_out.candidates, 4, 2
    duels, utility = held_out.duels[b, r], held_out.utility[b, r]
    asked = torch.zeros(40, dtype=torch.bool)
    best = [utility.max()]
    for step in range(SETTINGS.steps):
        used = (step + 1) / SETTINGS.steps
        scores = score_pairs(model, duels, winners(utility), c.points[b], c.pairs[b], used)
        choice = scores.masked_fill(asked, -torch.inf).argmax()
        asked[choice] = True
        duels = torch.cat((duels, c.duels[b, choice][None]))
        utility = torch.cat((utility, c.utility[b, choice][None]))
        best.append(utility.max())
    torch.testing.assert_close(together[b, r], held_out.best_utility[b] - torch.stack(best))


def test_curve_and_band_are_over_functions() -> None:
    regret = torch.rand(50, 4, 3, dtype=torch.float64)
    rows = regret_rows({"pabbo": regret, "one": regret[:1]})
    means = regret.mean(1).numpy()
    half = 1.96 * means.std(0, ddof=1) / np.sqrt(50)
    for step, row in enumerate(rows[:3]):
        expected = [means.mean(0)[step] + sign * half[step] for sign in (0, -1, 1)]
        assert [row["mean"], row["low"], row["high"]] == pytest.approx(expected)
        assert (row["method"], row["step"]) == ("pabbo", step)
    assert rows[3]["low"] == rows[3]["high"], "one function has no band"


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
