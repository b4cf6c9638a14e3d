"""Perplexity curves to train on, and the optimizer that is trained on them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.pabbo_lda.experiment import stages
from experiments.pabbo_lda.optimizers import Optimizer, make_optimizer
from experiments.pabbo_lda.optimizers.pabbo import model_scorer
from experiments.pabbo_lda.pabbo.curve_training import (
    CurvePolicySettings,
    CurvePolicyTask,
    distance_to_close,
    excess,
    studies,
)
from experiments.pabbo_lda.pabbo.curves import Curves, CurveSettings, sample_curves, trend_of
from experiments.pabbo_lda.pabbo.model import PabboModel, PabboModelSettings
from experiments.pabbo_lda.settings import MainSettings
from experiments.pabbo_lda.space import Point, Space
from experiments.pabbo_lda.study.study import Study
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext

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
def test_the_trend_falls_to_its_best_rises_from_it_and_ends_in_a_cliff(best, gain, rise, power):
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
    curves = sample(count=3000, spacing=(1.01, 1.01))
    spread = (curves.loss - curves.trend)[:, curves.started.shape[1] :].std(1)
    assert 0.0015 < spread.min() < 0.003
    assert 0.03 < spread.max() < 0.06
    assert not torch.equal(sample(seed=1).loss, sample().loss)


@settings(deadline=None, max_examples=30)
@given(
    t_min=st.integers(2, 9),
    low=st.integers(60, 300),
    more=st.integers(0, 900),
    n=st.integers(1, 50),
)
def test_t_are_distinct_integers_of_the_range(t_min, low, more, n):
    curves = sample(n=n, count=30, t_min=t_min, t_max=(low, low + more))
    T = offered(curves)
    assert T.shape == (30, n)
    assert (torch.diff(T) > 0).all()
    assert T.min() >= t_min
    assert curves.T.min() >= t_min
    assert curves.T.max() <= low + more
    assert curves.points.min() >= -1
    assert curves.points.max() <= 1 + 1e-12


TINY = CurvePolicySettings(
    model=PabboModelSettings(d_model=16, heads=2, layers=1, feed_forward=16),
    curves=CurveSettings(t_max=(60, 60), start=(2, 4)), points=59, steps=6, held_out=64,
)  # fmt: skip
PHASE = Phase("train", 1, 8, 1e-3)


def tiny_model(seed: int = 0) -> PabboModel:
    torch.manual_seed(seed)
    return CurvePolicyTask(TINY).build_model()


def pabbo(scorer, t_max: int = 1000, seed: int = 0) -> Optimizer:
    return make_optimizer("pabbo_curves", space=Space(2, t_max), seed=seed, scorer=scorer)


def test_the_distance_is_to_the_nearest_t_within_the_tolerance():
    curves = sample_curves(0, torch.arange(20), 59, TINY.curves, torch.float64)
    distance, above = distance_to_close(curves, 0.01), excess(curves)
    for row in range(20):
        used = torch.cat((curves.started[row], torch.ones(59, dtype=torch.bool)))
        T, loss = curves.T[row].double(), curves.loss[row]
        close = T[used & (loss - loss[used].min() <= 0.01)]
        nearest = (T / close[:, None]).log().abs().amin(0)
        torch.testing.assert_close(distance[row], nearest, rtol=0, atol=1e-12)
        assert above[row, used].min() == 0


def test_scores_are_fitted_to_the_distances_of_all_candidates():
    model, samples = tiny_model().double(), torch.arange(5)
    with torch.no_grad():
        model.acquisition[-1].weight.zero_()
        model.acquisition[-1].bias.fill_(-0.7)
    loss = CurvePolicyTask(TINY).loss(model, samples, StepContext(0, PHASE, 3))
    curves = sample_curves(3, samples, 59, TINY.curves, torch.float64)
    distance = distance_to_close(curves, 0.01)[:, -59:]
    assert float(loss.weight) == 5
    assert loss.total.item() == pytest.approx(float((distance - 0.7).square().mean(1).sum()))


def test_a_study_in_training_is_a_study_in_use():
    """The same T in the same order, with the scores of an untrained model."""
    model = tiny_model(3).eval()
    samples = torch.arange(40)
    curves = sample_curves(0, samples, TINY.points, TINY.curves)
    with torch.no_grad():
        scores, best = studies(model, curves, TINY.steps, None)
    compared = 0
    for row in samples.tolist():
        size = int(curves.started[row].sum())
        start = curves.T[row, :size].tolist()
        trained: list[int] = []
        for step in scores[row]:
            ranked = [int(T) + 2 for T in step.argsort(descending=True)]
            trained.append(next(T for T in ranked if T not in trained))
        if len({*start, *trained}) < len(start) + len(trained):
            continue  # in training a T of the start may be asked for again, to no avail
        losses = dict(zip(curves.T[row].tolist(), curves.loss[row].tolist(), strict=True))
        study = Study(
            pabbo(model_scorer(model), 60), [Point(T) for T in start], len(start) + TINY.steps
        )
        while not study.done:
            for point in study.request():
                study.supply(point, math.exp(losses[point.T]))
        assert [e.point.T for e in study.history] == start + trained
        assert int(curves.T[row, best[row, -1]]) == study.best[0].T
        compared += 1
    assert compared >= 10


def test_the_stage_is_there_only_where_the_studies_use_it():
    options = {"max_documents": 300, "max_features": 200, "min_df": 2}
    plain = {"data": {"options": options}, "lda": {"t_max": 60, "start": [9, 30]}}
    names = [stage.name for stage in stages(MainSettings.model_validate(plain))]
    assert "train_curves" not in names
    plain["lda"]["optimizers"] = ["pabbo_curves", "pabbo_small", "tpe"]
    with_ours = {stage.name: stage for stage in stages(MainSettings.model_validate(plain))}
    assert list(with_ours) == [*names[:-2], "train_curves", *names[-2:]]
    assert set(with_ours["lda"].needs) == {"hardware", "train_small", "train_curves"}
    ours, small, _ = with_ours["lda"].units[:3]
    assert set(ours.literals["lda"]) == {"final_seeds"}  # its policy is that of its training
    assert small.literals["lda"]["policy"]["exploration"] == 0.3
    assert ours.needs == ("train_curves",)
    assert small.needs == ("train_small",)
