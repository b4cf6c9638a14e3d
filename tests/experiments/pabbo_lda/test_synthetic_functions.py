from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, Matern

from experiments.pabbo_lda.pabbo.functions import (
    SyntheticFunctionSettings,
    _log_normal,
    covariance,
    sample_functions,
)

SETTINGS = SyntheticFunctionSettings()


@pytest.mark.parametrize(
    ("row", "kernel"),
    [(0, RBF(0.4)), (1, Matern(0.4, nu=0.5)), (2, Matern(0.4, nu=1.5)), (3, Matern(0.4, nu=2.5))],
)
def test_kernels_are_scikit_learn_s(row: int, kernel) -> None:
    x = np.linspace(-1, 1, 30)
    distance = torch.from_numpy(np.abs(x[:, None] - x[None, :]) / 0.4)[None]
    ours = covariance(torch.tensor([row]), distance)[0]
    np.testing.assert_allclose(ours.numpy(), kernel(x[:, None]), atol=1e-12)


@pytest.mark.parametrize("points", [50, 200])
def test_no_point_is_above_the_known_optimum(points: int) -> None:
    drawn = sample_functions(0, torch.arange(64), points, SETTINGS)
    assert (drawn.utility <= drawn.best_utility[:, None] + 1e-5).all()
    assert drawn.points.abs().max() <= 1
    assert drawn.best_utility.abs().max() <= 5


def test_a_function_does_not_depend_on_its_batch() -> None:
    samples = torch.tensor([5, 900, 2**40])
    together = sample_functions(1, samples, 20, SETTINGS)
    alone = sample_functions(1, samples[1:2], 20, SETTINGS)
    torch.testing.assert_close(together.utility[1:2], alone.utility)
    other = sample_functions(2, samples, 20, SETTINGS)
    assert not torch.allclose(together.points, other.points)


def test_length_scales_follow_the_cut_log_normal() -> None:
    u = (torch.arange(20000, dtype=torch.float64) + 0.5) / 20000
    drawn = torch.log(_log_normal(u, SETTINGS.length_scale)).numpy()
    low, high = np.log(SETTINGS.length_scale)
    mean, std = np.log(1 / 3), 0.75
    law = scipy.stats.truncnorm((low - mean) / std, (high - mean) / std, loc=mean, scale=std)
    assert scipy.stats.kstest(drawn, law.cdf).statistic < 1e-3


def test_the_draw_is_the_conditional_process() -> None:
    """|g| at two points near and far from the optimum against scikit-learn's posterior."""
    settings = SyntheticFunctionSettings(
        length_scale=(0.5, 0.5001), std=(1.0, 1.0001), sharp_probability=0.0
    )
    drawn = sample_functions(0, torch.arange(40000), 1, settings, dtype=torch.float64)
    distance = drawn.points - drawn.best_point[:, None]
    g = -(drawn.utility - drawn.best_utility[:, None]) - distance.square() / 8
    near = (distance.abs() - 0.2).abs()[:, 0] < 0.02
    # prior mean: the largest of four half-normal draws; its second moment by quadrature
    grid = np.linspace(0, 8, 20001)
    density = 4 * (2 * scipy.stats.norm.cdf(grid) - 1) ** 3 * 2 * scipy.stats.norm.pdf(grid)
    second = np.trapezoid(grid**2 * density, grid)
    expected = []
    for kernel in (RBF(0.5), Matern(0.5, nu=0.5), Matern(0.5, nu=1.5), Matern(0.5, nu=2.5)):
        process = GaussianProcessRegressor(kernel, optimizer=None).fit([[0.0]], [0.0])
        _, std = process.predict([[0.2]], return_std=True)
        rho = kernel([[0.0]], [[0.2]])[0, 0]
        expected.append(std[0] ** 2 + (1 - rho) ** 2 * second)
    assert g[near].square().mean().item() == pytest.approx(np.mean(expected), rel=0.1)


def test_autocast_does_not_reach_the_factorisation() -> None:
    samples = torch.arange(4)
    plain = sample_functions(0, samples, 30, SETTINGS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = sample_functions(0, samples, 30, SETTINGS)
    assert torch.equal(plain.utility, cast.utility)
