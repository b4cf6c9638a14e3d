"""Perplexity curves to train on: their shape, their noise, their keys."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.pabbo_lda.pabbo.curves import Curves, CurveSettings, sample_curves, trend_of

SETTINGS = CurveSettings()


def sample(n: int = 48, count: int = 400, seed: int = 0, **changes: object) -> Curves:
    return sample_curves(
        seed, torch.arange(count), n, SETTINGS.model_copy(update=changes), torch.float64
    )


def offered(curves: Curves) -> Tensor:
    """The T that may be asked for, without those of the start."""
    return curves.T[:, curves.started.shape[1] :]


@given(
    best=st.floats(0.5, 200), gain=st.floats(0.03, 0.2), rise=st.floats(0.03, 0.2),
    power=st.floats(1.2, 2.0),
)  # fmt: skip
def test_the_trend_falls_to_its_best_rises_from_it_and_ends_in_a_cliff(
    best: float, gain: float, rise: float, power: float
):
    def trend(*T: float) -> Tensor:
        parts = [torch.tensor(x, dtype=torch.float64) for x in (best, gain, rise, 1e4, power)]
        return trend_of(torch.tensor(T, dtype=torch.float64), *parts)

    far = trend(best / 8, best / 2, best, best * 2, best * 8)  # the cliff is not yet felt
    steps = torch.diff(far) / math.log(2)
    cliff = (8 * best / 1e4) ** power / math.log(2)
    expected = [-2 * gain, -gain, rise, 2 * rise]
    assert steps.tolist() == pytest.approx(expected, abs=cliff + 1e-9)
    high = trend(1e6, 2e6)
    assert float(high[1] / high[0]) == pytest.approx(2**power, rel=0.05)


def test_minima_lie_anywhere_often_at_the_lower_end_and_the_cliff_is_high():
    curves = sample(count=2000, t_max=(1000, 1000))
    T = offered(curves)
    trend = curves.trend[:, curves.started.shape[1] :]
    best = T.gather(1, trend.argmin(1, keepdim=True))[:, 0]
    shares = {(2, 2): 0.25, (3, 10): 0.2, (11, 50): 0.15, (51, 500): 0.01}
    for (low, high), least in shares.items():
        assert ((best >= low) & (best <= high)).double().mean() > least
    height = (trend[:, -1] - trend.amin(1)) / math.log(10)  # orders of magnitude
    assert (height > 10).double().mean() > 0.1
    assert (height > 1).double().mean() > 0.5
    assert (height < 1).double().mean() > 0.2, "some rise as gently as those of long texts"


def test_the_noise_has_its_size_and_is_independent_between_neighbors():
    curves = sample(count=3000, noise=(0.02, 0.02), spacing=(1.01, 1.01))
    error = (curves.loss - curves.trend)[:, curves.started.shape[1] :]
    assert error.std().item() == pytest.approx(0.02, rel=0.02)
    assert error.mean().item() == pytest.approx(0, abs=2e-4)
    neighbors = torch.corrcoef(torch.stack((error[:, 3], error[:, 4])))[0, 1]
    assert abs(neighbors.item()) < 0.06
    scales = (curves := sample(count=3000, spacing=(1.01, 1.01))).loss - curves.trend
    spread = scales[:, curves.started.shape[1] :].std(1)
    assert 0.0015 < spread.min() < 0.003
    assert 0.03 < spread.max() < 0.06


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
