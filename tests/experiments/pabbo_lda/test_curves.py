"""Perplexity curves to train on: their shape, their noise, their keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.pabbo_lda.curves import Curves, CurveSettings, linex, sample_curves

SETTINGS = CurveSettings()


def sample(n: int = 48, count: int = 400, seed: int = 0, **changes: object) -> Curves:
    return sample_curves(
        seed, torch.arange(count), n, SETTINGS.model_copy(update=changes), torch.float64
    )


def offered(curves: Curves) -> Tensor:
    """The T that may be asked for, without those of the start."""
    return curves.T[:, curves.started.shape[1] :]


@given(
    optimum=st.floats(0.5, 900), slope=st.floats(0.01, 0.3), cliff=st.floats(1.0, 2.5)
)  # fmt: skip
def test_the_trend_has_its_one_minimum_at_the_optimum(optimum: float, slope: float, cliff: float):
    T = torch.logspace(-1, 3, 400, dtype=torch.float64)
    at = torch.tensor(optimum, dtype=torch.float64)
    values = linex(T, at, torch.tensor(slope), torch.tensor(cliff))
    rises = torch.diff(values) > 0
    assert (rises == (T[1:] > optimum))[(T[1:] / optimum - 1).abs() > 0.03].all()
    assert linex(at, at, torch.tensor(slope), torch.tensor(cliff)) == 0
    # below the optimum about ``slope`` for each factor e, above it a power of T
    left = linex(at * math.exp(-9), at, torch.tensor(slope), torch.tensor(cliff))
    assert float(left) == pytest.approx(slope * (9 - 1 / cliff), rel=1e-3)
    right = linex(at * math.exp(9), at, torch.tensor(slope), torch.tensor(cliff))
    assert float(right) == pytest.approx(slope / cliff * math.exp(9 * cliff), rel=2e-3)


def test_minima_lie_anywhere_also_at_the_lower_end_and_the_cliff_is_high():
    curves = sample(count=2000, t_max=(1000, 1000))
    T = offered(curves)
    trend = curves.trend[:, curves.started.shape[1] :]
    best = T.gather(1, trend.argmin(1, keepdim=True))[:, 0]
    for low, high, least in ((2, 2, 0.02), (3, 10, 0.15), (11, 100, 0.25), (101, 1000, 0.25)):
        assert ((best >= low) & (best <= high)).double().mean() > least
    end = trend[:, -1] / math.log(10)  # the orders of magnitude that a perplexity reaches
    assert (end > 10).double().mean() > 0.1
    assert (trend >= 0).all()


def test_the_noise_has_its_size_and_is_independent_between_neighbours():
    curves = sample(count=3000, noise=(0.02, 0.02))
    error = (curves.loss - curves.trend)[:, curves.started.shape[1] :]
    assert error.std().item() == pytest.approx(0.02, rel=0.02)
    assert error.mean().item() == pytest.approx(0, abs=2e-4)
    neighbours = torch.corrcoef(torch.stack((error[:, 3], error[:, 4])))[0, 1]
    assert abs(neighbours.item()) < 0.06
    scales = (curves := sample(count=3000)).loss - curves.trend
    spread = scales[:, curves.started.shape[1] :].std(1)
    assert 0.003 < spread.min() < 0.008
    assert 0.02 < spread.max() < 0.045


def test_equal_t_of_a_curve_have_equal_values_whatever_else_is_drawn():
    curves, others = sample(n=48), sample(n=90)
    for row in range(50):
        first = dict(zip(curves.T[row].tolist(), curves.loss[row].tolist(), strict=True))
        second = dict(zip(others.T[row].tolist(), others.loss[row].tolist(), strict=True))
        shared = first.keys() & second.keys()
        assert len(shared) > 20
        assert all(first[T] == second[T] for T in shared)


def test_curves_depend_on_seed_and_sample_alone():
    whole = sample(count=8)
    parts = [
        sample_curves(0, samples, 48, SETTINGS, torch.float64)
        for samples in torch.tensor([3, 0, 7, 1, 2, 6, 5, 4]).split(3)
    ]
    for name in ("T", "points", "trend", "loss", "started"):
        mixed = torch.cat([getattr(part, name) for part in parts])
        assert torch.equal(mixed, getattr(whole, name)[[3, 0, 7, 1, 2, 6, 5, 4]])
    assert not torch.equal(sample(count=8, seed=1).loss, whole.loss)


@settings(deadline=None, max_examples=30)
@given(
    t_min=st.integers(2, 9),
    low=st.integers(60, 300),
    more=st.integers(0, 900),
    n=st.integers(1, 50),
)
def test_t_are_distinct_integers_of_the_range(t_min: int, low: int, more: int, n: int):
    curves = sample(n=n, count=30, t_min=t_min, t_max=(low, low + more))
    T = offered(curves)
    assert T.shape == (30, n)
    assert (torch.diff(T) > 0).all()
    assert T.min() >= t_min
    assert curves.T.min() >= t_min
    assert curves.T.max() <= low + more
    assert curves.points.min() >= -1
    assert curves.points.max() <= 1 + 1e-12


def test_small_t_are_all_there_and_the_ends_are_at_the_ends():
    curves = sample(t_max=(1000, 1000))
    assert (offered(curves)[:, :12] == torch.arange(2, 14)).all()
    assert (offered(curves)[:, -1] > 850).all()
    positions = {2: -1.0, 1000: 1.0}
    for T, position in positions.items():
        there = curves.points[curves.T == T]
        assert there.tolist() == pytest.approx([position] * len(there))


def test_a_start_is_a_handful_to_twenty_even_in_t_or_in_log_t():
    curves = sample(count=2000, t_max=(1000, 1000))
    counts = curves.started.sum(1)
    assert sorted(set(counts.tolist())) == list(range(2, 21))
    assert (curves.started.long().diff(dim=1) <= 0).all(), "a shorter start has the first ones"
    start = curves.T[:, :20].double()
    far = (start > 100).double().mean(1)
    assert 0.4 < (far > 0.65).double().mean() < 0.6, "nine in ten of an even draw lie above 100"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise": (0.1, 0.01)}, "noise"),
        ({"slope": (0.0, 0.1)}, "slope"),
        ({"start": (1, 5)}, "two values"),
        ({"t_min": 200, "t_max": (200, 300)}, "t_max"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, object], message: str):
    with pytest.raises(ValueError, match=message):
        CurveSettings(**changes)
