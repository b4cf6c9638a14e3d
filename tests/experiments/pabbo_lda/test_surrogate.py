"""The surrogate that ships: the network, what its weights have learned, and its training."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF

from experiments.pabbo_lda.pabbo.model import restore_model
from experiments.pabbo_lda.surrogate import posterior
from experiments.pabbo_lda.surrogate.model import restore_surrogate
from experiments.pabbo_lda.surrogate_training.prior import sample_searches
from tests.command import table
from tests.experiments.runs import SMALL, run


@pytest.fixture(scope="module")
def surrogate() -> posterior.Surrogate:
    return posterior.load()


def drawn(n: int, d: int, m: int = 7, seed: int = 0):
    rng = np.random.default_rng(seed)
    return rng.uniform(-1, 1, (n, d)), rng.normal(size=n), rng.uniform(-1, 1, (m, d))


def test_all_weights_ship_and_are_small():
    files = [*Path(posterior.__file__).parents[1].rglob("*.safetensors")]
    assert len(files) == 4
    assert max(file.stat().st_size for file in files) <= 2_000_000


@pytest.mark.parametrize("d", [1, 2, 3])
def test_the_order_of_the_points_and_the_other_candidates_do_not_matter(surrogate, d):
    known, values, candidates = drawn(9, d)
    gain = surrogate.expected_improvement(known, values, candidates)
    order = np.random.default_rng(1).permutation(len(known))
    shuffled = surrogate.expected_improvement(known[order], values[order], candidates)
    assert shuffled == pytest.approx(gain, rel=1e-4, abs=1e-6)
    alone = [surrogate.expected_improvement(known, values, one[None])[0] for one in candidates]
    assert alone == pytest.approx(gain, rel=1e-4, abs=1e-6)
    assert (surrogate.expected_improvement(known, values, candidates) == gain).all()


@given(factor=st.floats(1e-20, 1e20), shift=st.floats(-10, 10), n=st.integers(2, 12))
@settings(deadline=None, max_examples=20)
def test_the_unit_and_the_origin_of_the_values_do_not_matter(surrogate, factor, shift, n):
    known, values, candidates = drawn(n, 2, seed=n)
    mean, deviation = surrogate.predict(known, values, candidates)
    other = surrogate.predict(known, factor * (values + shift), candidates)
    assert other[0] / factor - shift == pytest.approx(mean, rel=1e-3, abs=1e-3)
    assert other[1] / factor == pytest.approx(deviation, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize(
    "values", [[2.0] * 3, [1.0, 1e44, 1e300], [-1e300, 0.0, 1e300], [0.0, 5e-324, 1.0]]
)
def test_extreme_values_have_a_finite_improvement(surrogate, values):
    known, _, candidates = drawn(3, 1)
    gain = surrogate.expected_improvement(known, values, candidates)
    assert np.isfinite(gain).all()
    assert (gain >= 0).all()
    assert np.isfinite(surrogate.predict(known, values, candidates)).all()


def test_a_point_that_no_training_has_seen_is_refused(surrogate):
    known, values, candidates = drawn(5, 2)
    for wrong, message in (
        (drawn(5, 4), "4 dimensions; the surrogate was trained on 1 to 3"),
        ((known[:0], values[:0], candidates), "n >= 1"),
        ((known, values[:3], candidates), r"values has the shape \(3,\); it must be \[5\]"),
        ((known, values, candidates[:, :1]), r"candidates has the shape \(7, 1\)"),
        ((known, values, candidates + 3), r"candidates has positions outside \[-1, 1\]"),
        ((known * np.nan, values, candidates), "known has positions outside"),
        ((known, [*values[:4], np.inf], candidates), "values are not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            surrogate.predict(*wrong)


def test_it_agrees_with_the_posterior_of_a_gaussian_process(surrogate):
    """Values of a Gaussian process with a known kernel, whose posterior is exact."""
    errors = []
    grid = np.linspace(-1, 1, 41)[:, None]
    for seed in range(20):
        known = np.random.default_rng(seed).uniform(-1, 1, (10, 1))
        process = GaussianProcessRegressor(RBF(0.5), optimizer=None, alpha=1e-6)
        values = process.sample_y(known, random_state=seed)[:, 0]
        exact = process.fit(known, values).predict(grid)
        inside = (grid[:, 0] > known.min()) & (grid[:, 0] < known.max())
        mean, _ = surrogate.predict(known, values, grid)
        errors.append(np.abs(mean - exact)[inside].mean() / values.std())
    assert np.mean(errors) < 0.15


def test_a_sample_is_the_same_in_any_batch():
    together = sample_searches(1, torch.tensor([4, 9, 2**40]), 11, 6)
    alone = sample_searches(1, torch.tensor([9]), 11, 6)
    for name in ("known", "values", "queries", "targets", "used"):
        ours, other = getattr(together, name)[1], getattr(alone, name)[0]
        assert torch.allclose(ours, other, atol=1e-4), name


def test_searches_are_finite_and_lie_in_the_space_of_their_function():
    for size in (1, 2, 17, 40):
        s = sample_searches(0, torch.arange(300), size, 10)
        assert s.values.isfinite().all()
        assert s.targets.isfinite().all()
        for points in (s.known, s.queries):
            assert points.abs().max() <= 1
            assert (points * (1 - s.used[:, None]) == 0).all()
        assert (s.values.amin(1) == 0).all(), "the best value is the origin of the scale"
    assert {1.0, 2.0, 3.0} == set(s.used.sum(1).tolist())


def test_training_lowers_the_surprise_of_held_out_functions(tmp_path):
    assert run("surrogate", tmp_path, *SMALL["surrogate"], profile="auto") == 0
    surprise = table(tmp_path, "steps")["eval_surprise"].dropna()
    assert surprise.iloc[-1] < surprise.iloc[0] - 0.1


def test_a_file_of_another_model_is_refused():
    for restore, key in ((restore_surrogate, "surrogate"), (restore_model, "model")):
        with pytest.raises(ValueError, match=f"its metadata lack the key '{key}'"):
            restore(save({"a": torch.zeros(1)}))
    with pytest.raises(ValueError, match="safetensors"):
        restore_surrogate(b"nothing")
