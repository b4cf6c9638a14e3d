"""Functions with a known optimum, searches on them, and the process they are compared with."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Kernel, Matern

from experiments.pabbo_lda import experiment
from experiments.pabbo_lda.optimizers.bayesian import expected_improvement
from experiments.pabbo_lda.pabbo import evaluation, functions, preferential_gp
from experiments.pabbo_lda.pabbo.model import SMALL, PabboModel, score_pairs, shipped_weights
from experiments.pabbo_lda.settings import MainSettings
from raypipe.errors import ConfigError

FUNCTIONS = functions.SyntheticFunctionSettings()


def kernels(length: float) -> list[Kernel]:
    return [RBF(length), *(Matern(length, nu=nu) for nu in (0.5, 1.5, 2.5))]


def test_kernels_are_scikit_learn_s():
    x = np.linspace(-1, 1, 30)
    distance = torch.from_numpy(np.abs(x[:, None] - x[None, :]) / 0.4)[None]
    for row, kernel in enumerate(kernels(0.4)):
        ours = functions.covariance(torch.tensor([row]), distance)[0]
        np.testing.assert_allclose(ours.numpy(), kernel(x[:, None]), atol=1e-12)


def test_no_point_is_above_the_known_optimum():
    with torch.autocast("cpu", dtype=torch.bfloat16):  # does not reach the factorization
        drawn = functions.sample_functions(0, torch.arange(64), 200, FUNCTIONS)
    assert (drawn.utility <= drawn.best_utility[:, None] + 1e-5).all()
    assert drawn.points.abs().max() <= 1
    assert drawn.best_utility.abs().max() <= 5


def test_length_scales_follow_the_cut_log_normal():
    u = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    drawn = torch.log(functions._log_normal(u, FUNCTIONS.length_scale)).numpy()
    low, high = np.log(FUNCTIONS.length_scale)
    mean, std = np.log(1 / 3), 0.75
    law = scipy.stats.truncnorm((low - mean) / std, (high - mean) / std, loc=mean, scale=std)
    assert scipy.stats.kstest(drawn, law.cdf).statistic < 1e-3


def test_the_draw_is_the_conditional_process():
    """|g| at two points near and far from the optimum against scikit-learn's posterior."""
    settings = functions.SyntheticFunctionSettings(
        length_scale=(0.5, 0.5001), std=(1.0, 1.0001), sharp_probability=0.0
    )
    drawn = functions.sample_functions(0, torch.arange(40000), 1, settings, dtype=torch.float64)
    distance = drawn.points - drawn.best_point[:, None]
    g = -(drawn.utility - drawn.best_utility[:, None]) - distance.square() / 8
    near = (distance.abs() - 0.2).abs()[:, 0] < 0.02
    # prior mean: the largest of four half-normal draws; its second moment by quadrature
    grid = np.linspace(0, 8, 20001)
    density = 4 * (2 * scipy.stats.norm.cdf(grid) - 1) ** 3 * 2 * scipy.stats.norm.pdf(grid)
    second = np.trapezoid(grid**2 * density, grid)
    expected = []
    for kernel in kernels(0.5):
        process = GaussianProcessRegressor(kernel, optimizer=None).fit([[0.0]], [0.0])
        _, std = process.predict([[0.2]], return_std=True)
        rho = kernel([[0.0]], [[0.2]])[0, 0]
        expected.append(std[0] ** 2 + (1 - rho) ** 2 * second)
    assert g[near].square().mean().item() == pytest.approx(np.mean(expected), rel=0.1)


SETTINGS = evaluation.EvaluationSettings(
    functions=6, starts=3, steps=8, query_points=20, candidate_pairs=40
)


HELD_OUT = evaluation.held_out_functions(SETTINGS, FUNCTIONS)


def test_held_out_functions_are_not_training_functions():
    trained = functions.sample_functions(SETTINGS.seed, torch.arange(6), 20, FUNCTIONS)
    assert not torch.allclose(trained.points, HELD_OUT.candidates.points)


def test_all_runs_together_are_each_run_alone():
    torch.manual_seed(0)
    model = PabboModel(SMALL).eval()
    together = evaluation.simple_regret(evaluation.policy_scorer(model), HELD_OUT, SETTINGS)
    c, b, r = HELD_OUT.candidates, 4, 2
    duels, utility = HELD_OUT.duels[b, r], HELD_OUT.utility[b, r]
    asked = torch.zeros(40, dtype=torch.bool)
    best = [utility.max()]
    for step in range(SETTINGS.steps):
        used = (step + 1) / SETTINGS.steps
        won = functions.winners(utility)
        scores = score_pairs(model, duels, won, c.points[b], c.pairs[b], used)
        choice = scores.masked_fill(asked, -torch.inf).argmax()
        asked[choice] = True
        duels = torch.cat((duels, c.duels[b, choice][None]))
        utility = torch.cat((utility, c.utility[b, choice][None]))
        best.append(utility.max())
    torch.testing.assert_close(together[b, r], HELD_OUT.best_utility[b] - torch.stack(best))


def test_the_parts_of_an_evaluation_are_the_whole():
    models = {"pabbo": shipped_weights("train_small")}
    whole, *parts = (
        evaluation.search(models, SETTINGS, FUNCTIONS, part)
        for part in (None, range(1), range(1, 4), range(4, 6))
    )
    joined = evaluation.Searches.of(parts)
    assert torch.equal(joined.regret["random"], whole.regret["random"])
    torch.testing.assert_close(joined.regret["pabbo"], whole.regret["pabbo"])
    assert torch.equal(joined.far, whole.far)
    torch.testing.assert_close(joined.spread, whole.spread)


def test_curve_and_band_are_over_functions():
    regret = torch.rand(50, 4, 3, dtype=torch.float64)
    rows = evaluation.regret_rows({"pabbo": regret, "one": regret[:1]})
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
SEARCHES = evaluation.Searches(
    {"pabbo": REGRET, "random": 2 * REGRET},
    torch.tensor([[True, False], [False, False], [True, True]]),
    torch.full((3,), 10.0),
)


def test_the_rows_have_means_shares_and_tests_of_each_kind_of_start():
    """A function is the mean of its starts of a kind; duels are counted after the first one."""
    found = evaluation.measure_rows(SEARCHES, "pabbo")
    rows = {(row["start"], row["method"]): row for row in found}
    assert len(rows) == 3 * 2
    ours = rows["all", "pabbo"]
    assert (ours["functions"], ours["searches"]) == (3, 6)
    assert (ours["regret"], ours["area"]) == pytest.approx((3.2 / 3, 4.4 / 3))
    assert ours["reached_5_percent"] == pytest.approx(4 / 6)
    assert ours["duels_to_5_percent"] == 1
    assert ours["p_regret"] is None
    assert rows["all", "random"]["p_regret"] == pytest.approx(0.25)
    # a search that never comes close counts as one duel more than there are
    assert rows["all", "random"]["p_duels_to_5_percent"] == pytest.approx(0.5)
    far = rows["far", "pabbo"]
    assert (far["functions"], far["regret"]) == (2, pytest.approx(0.25))
    assert rows["near", "random"]["duels_to_1_percent"] is None
    assert rows["near", "random"]["reached_1_percent"] == pytest.approx(1 / 3)


def test_the_acquisition_is_the_expected_improvement_on_the_known_point(monkeypatch):
    monkeypatch.setattr(preferential_gp, "DRAWS", 400_000)
    mean = torch.tensor([0.0, 0.5, -1.0], dtype=torch.float64)
    root = torch.tensor([[1.0, 0, 0], [0.5, 0.8, 0], [0.0, 0.3, 0.4]], dtype=torch.float64)
    pairs, known = torch.tensor([[0, 1], [2, 0]]), torch.tensor([True, False, False])
    improvement = preferential_gp._improvement(mean, root @ root.T, pairs, known)
    deviations = (root[1:] - root[0]).norm(dim=1).numpy()
    expected = expected_improvement(np.array([-0.5, 1.0]), deviations, 0.0)
    np.testing.assert_allclose(improvement.numpy(), expected, atol=0.01)


def test_a_missing_library_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setattr(experiment, "find_spec", lambda name: None)
    settings = MainSettings(evaluate_large=evaluation.EvaluationSettings(preferential_gp=True))
    with pytest.raises(ConfigError, match=r"evaluate_large.preferential_gp: .*\[duels\]"):
        experiment.stages(settings)
