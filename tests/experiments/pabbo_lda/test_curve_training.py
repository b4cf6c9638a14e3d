"""The optimizer that is trained on perplexity curves: its training and its use are one."""

from __future__ import annotations

import math

import pytest
import torch

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
from experiments.pabbo_lda.pabbo.curves import CurveSettings, sample_curves
from experiments.pabbo_lda.pabbo.model import PabboModel, PabboModelSettings
from experiments.pabbo_lda.settings import MainSettings
from experiments.pabbo_lda.space import Point, Space
from experiments.pabbo_lda.study.study import Study
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext

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
        used = [i >= 4 or bool(curves.started[row, i]) for i in range(63)]
        least = min(float(v) for v, use in zip(curves.loss[row], used, strict=True) if use)
        close = [
            float(T)
            for T, v, use in zip(curves.T[row], curves.loss[row], used, strict=True)
            if use and v - least <= 0.01
        ]
        for i, T in enumerate(curves.T[row].tolist()):
            nearest = min(abs(math.log(T / other)) for other in close)
            assert float(distance[row, i]) == pytest.approx(nearest, abs=1e-12)
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
        assert study.best is not None
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
