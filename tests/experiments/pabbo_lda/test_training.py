"""The networks of PABBO, their losses, the curves they train on, and their metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from experiments.pabbo_lda.optimizers import make_optimizer
from experiments.pabbo_lda.optimizers.pabbo import model_scorer
from experiments.pabbo_lda.pabbo import curve_training, training
from experiments.pabbo_lda.pabbo.curves import CurveSettings, sample_curves, trend_of
from experiments.pabbo_lda.pabbo.functions import Candidates, draw_pairs, sample_functions
from experiments.pabbo_lda.pabbo.model import LARGE, SMALL, PabboModel, PabboModelSettings
from experiments.pabbo_lda.space import Space
from experiments.pabbo_lda.study.study import Study
from experiments.pabbo_lda.tables import STEP_METRICS
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings
from tests.experiments.pabbo_lda.test_optimizers import finish, points
from tests.experiments.references import STEP, parameter_count, torch_encoder


def _model(settings: PabboModelSettings) -> PabboModel:
    torch.manual_seed(0)
    return PabboModel(settings).double()


@pytest.mark.parametrize("settings", [SMALL, LARGE])
def test_the_encoder_is_pytorch_s_with_the_context_as_keys(settings):
    model = _model(settings)
    context = torch.randn(2, 3, 5, settings.d_model, dtype=torch.float64)
    targets = torch.randn(2, 7, settings.d_model, dtype=torch.float64)
    joint = torch.cat((context, targets[:, None].expand(-1, 3, -1, -1)), 2).flatten(0, 1)
    blocked = torch.zeros(12, 12, dtype=torch.bool)
    blocked[:, 5:] = True
    encoder = torch_encoder(
        model.layers, lambda ours: (ours.query_key_value.weight, ours.query_key_value.bias),
        settings.d_model, settings.heads, settings.feed_forward,
    ).train()  # the training path: no fused inference kernel  # fmt: skip
    expected = encoder(joint, mask=blocked)[:, 5:].view(2, 3, 7, -1)
    torch.testing.assert_close(model(context, targets), expected, rtol=1e-10, atol=1e-10)


def test_scores_are_the_acquisition_mlp_of_the_pair_and_the_time():
    model, encoded = _model(SMALL), torch.randn(2, 3, 7, SMALL.d_model, dtype=torch.float64)
    pairs = torch.tensor([[[0, 1], [5, 2]], [[3, 6], [4, 0]]])
    scores = model.score(encoded, pairs, 0.3)
    for b, r, p in product(range(2), range(3), range(2)):
        i, j = pairs[b, p]
        ends = (encoded[b, r, i], encoded[b, r, j], torch.tensor([0.3]).double())
        hidden = torch.relu(model.acquisition_entry(torch.cat(ends)))
        torch.testing.assert_close(scores[b, r, p], model.acquisition(hidden)[0])


def test_parameter_counts_are_those_of_the_published_code():
    assert parameter_count(PabboModel, SMALL) == 38_659
    assert parameter_count(PabboModel, LARGE) == 259_779


TINY = training.PabboSettings(
    model=PabboModelSettings(d_model=8, heads=2, layers=2, feed_forward=8),
    trajectories=3, horizon=4, query_points=9, candidate_pairs=12, prediction_points=8,
    prediction_duels=10, prediction_splits=3, max_context=4,
)  # fmt: skip


def _candidates(seed, stream, samples, points, pairs, dtype=torch.float64) -> Candidates:
    drawn = sample_functions(seed, samples, points, TINY.functions, dtype=dtype)
    chosen = draw_pairs(seed, stream, samples, points, pairs)
    return Candidates.of(drawn.points, drawn.utility, chosen)


def test_the_burn_in_loss_is_the_mean_over_splits_of_the_duels_left_out():
    """Against a plain loop that encodes each split alone, without masks."""
    model, step = _model(TINY.model), replace(STEP, phase=Phase("burn_in", 1, 8, 1e-3), seed=7)
    contexts: list[tuple[Tensor, Tensor]] = []
    hook = model.register_forward_pre_hook(lambda _, given: contexts.append(given))
    total = training.PabboTask(TINY).loss(model, torch.tensor([3]), step).total
    hook.remove()
    ((context, _, mask),) = contexts
    duels = _candidates(7, 10, torch.tensor([3]), 8, 10)
    tokens = model.embed_duels(duels.duels, duels.preferred)[0]
    losses = []
    for split in range(TINY.prediction_splits):
        used = context[0, split][mask[0, split]]
        assert 1 <= len(used) <= TINY.max_context
        inside = (tokens[:, None] - used[None]).abs().sum(2).amin(1) < 1e-12
        assert inside.sum() == len(used)
        encoded = model(used[None, None], model.embed_points(duels.points))[0, 0]
        mean, std = model.predict(encoded)
        i, j = duels.pairs[0][~inside].unbind(1)
        logit = (mean[j] - mean[i]) / torch.sqrt(1 + torch.pi / 8 * (std[i] ** 2 + std[j] ** 2))
        truth = duels.preferred[0][~inside].double()
        losses.append(F.binary_cross_entropy_with_logits(logit, truth))
    torch.testing.assert_close(total, torch.stack(losses).mean())


def test_trajectories_never_ask_twice_and_report_their_log_probability():
    model, samples = _model(TINY.model), torch.arange(5)
    s = TINY.model_copy(update={"horizon": 12})
    candidates = _candidates(0, 13, samples, 9, 12)
    log_probs, chosen = training._trajectories(model, candidates, samples, 0, s)
    # all candidates are asked, each once; those asked before have no probability left
    every = torch.arange(12).expand(5, 3, -1)
    assert torch.equal(chosen.sort(2).values, every)
    torch.testing.assert_close(log_probs.exp().sum(3), torch.ones(5, 3, 12).double())
    for step in range(1, 12):
        assert (log_probs[:, :, step].gather(2, chosen[..., :step]) == -torch.inf).all()
    assert len({tuple(row) for row in chosen[0].tolist()}) > 1


@pytest.mark.parametrize("horizon", [1, 2, 4])
@pytest.mark.parametrize("autocast", [False, True])
def test_one_pass_over_all_steps_has_the_results_of_one_per_step(horizon, autocast):
    """The same trajectories, probabilities and gradient."""
    settings, rel = TINY.model_copy(update={"horizon": horizon}), 0.1 if autocast else 1e-10
    samples, kind = torch.arange(6), torch.float32 if autocast else torch.float64
    found = []
    for trajectories in (training._trajectories, training._trajectories_at_once):
        model = _model(TINY.model).to(kind)
        candidates = _candidates(7, 0, samples, 9, 12, kind)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            log_probs, chosen = trajectories(model, candidates, samples, 7, settings)
        log_probs.gather(3, chosen[..., None]).sum().backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        found.append((log_probs.exp(), chosen, gradients))
    (expected, chosen, gradients), (probs, again, at_once) = found
    assert torch.equal(again, chosen)
    torch.testing.assert_close(probs, expected, rtol=rel, atol=rel)
    assert at_once.keys() == gradients.keys()
    whole = torch.cat([g.flatten() for g in gradients.values()])
    other = torch.cat([g.flatten() for g in at_once.values()])
    assert (other - whole).norm() <= rel * whole.norm()


def test_policy_losses_are_those_of_plain_loops():
    """Published: returns standardized over each trajectory; expected improvement: a sum over all
    candidates. Of 2 functions, 4 runs of 5 steps, and 7 candidates.
    """
    generator = torch.Generator().manual_seed(0)
    utility = torch.randn(2, 7, generator=generator, dtype=torch.float64)
    logits = torch.randn(2, 4, 5, 7, generator=generator, dtype=torch.float64)
    log_probs = logits.log_softmax(3)
    chosen = torch.stack([torch.randperm(7, generator=generator)[:5] for _ in range(8)])
    chosen = chosen.view(2, 4, 5)
    best = utility[:, None].expand(-1, 4, -1).gather(2, chosen).cummax(2).values
    published, improvement = torch.zeros(2, 2, dtype=torch.float64)
    for b, r, t in product(range(2), range(4), range(5)):
        returns = torch.stack([0.9**k * best[b, r, k] for k in range(5)])
        weight = (returns - returns.mean()) / (returns.std() + 2.0**-23)
        published[b] -= weight[t] * log_probs[b, r, t, chosen[b, r, t]] / 4
        before = best[b, r, t - 1] if t else utility[b].min()
        lasts = sum(0.9**k for k in range(5 - t)) / 5
        for p in range(7):
            gain = max(utility[b, p] - before, 0)
            improvement[b] -= log_probs[b, r, t, p].exp() * gain * lasts / 4
    improvement /= utility.std(1) + 1e-3
    torch.testing.assert_close(training.reinforce(log_probs, chosen, best, 0.9), published)
    found = training.expected_improvement(log_probs, utility, best, 0.9)
    torch.testing.assert_close(found, improvement)


def test_metrics_of_the_trainings_are_declared():
    found = set()
    for task in (training.PabboTask(TINY), curve_training.CurvePolicyTask(CURVES)):
        model = task.build_model()
        for phase in task.phases(TrainingSettings(steps=4), 2):
            loss = task.loss(model, torch.arange(2), replace(STEP, phase=phase))
            found |= loss.metrics.keys()
        found |= {f"eval_{name}" for name in task.evaluate(model, torch.device("cpu"), 2)}
    assert found == {column.name for column in STEP_METRICS}


def sample(count: int, **changes: object) -> tuple[Tensor, Tensor, Tensor]:
    """T, trend and error of curves at 48 T that a study may ask for."""
    curves = sample_curves(0, torch.arange(count), 48, CurveSettings(**changes), torch.float64)
    parts = (curves.T, curves.trend, curves.loss - curves.trend)
    return tuple(part[:, curves.started.shape[1] :] for part in parts)


@given(st.floats(0.5, 200), st.floats(0.03, 0.2), st.floats(0.03, 0.2), st.floats(1.2, 2.0))
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
    T, trend, _ = sample(2000, t_max=(1000, 1000))
    best = T.gather(1, trend.argmin(1, keepdim=True))[:, 0]
    shares = {(2, 2): 0.25, (3, 10): 0.2, (11, 50): 0.15, (51, 500): 0.01}
    for (low, high), least in shares.items():
        assert ((best >= low) & (best <= high)).double().mean() > least
    height = (trend[:, -1] - trend.amin(1)) / math.log(10)  # orders of magnitude
    assert (height > 10).double().mean() > 0.1
    assert (height > 1).double().mean() > 0.5
    assert (height < 1).double().mean() > 0.2, "some rise as gently as those of long texts"


def test_the_noise_has_its_size_and_is_independent_between_neighbors():
    _, _, error = sample(3000, noise=(0.02, 0.02), spacing=(1.01, 1.01))
    assert error.std().item() == pytest.approx(0.02, rel=0.02)
    assert error.mean().item() == pytest.approx(0, abs=2e-4)
    neighbors = torch.corrcoef(torch.stack((error[:, 3], error[:, 4])))[0, 1]
    assert abs(neighbors.item()) < 0.06
    spread = sample(3000, spacing=(1.01, 1.01))[2].std(1)
    assert 0.0015 < spread.min() < 0.003
    assert 0.03 < spread.max() < 0.06


@settings(deadline=None, max_examples=30)
@given(st.integers(2, 9), st.integers(60, 300), st.integers(0, 900), st.integers(1, 50))
def test_t_are_distinct_integers_of_the_range(t_min, low, more, n):
    ranges = CurveSettings(t_min=t_min, t_max=(low, low + more))
    curves = sample_curves(0, torch.arange(30), n, ranges, torch.float64)
    T = curves.T[:, curves.started.shape[1] :]
    assert T.shape == (30, n)
    assert (torch.diff(T) > 0).all()
    assert curves.T.min() >= t_min
    assert curves.T.max() <= low + more
    assert curves.points.abs().max() <= 1 + 1e-12


CURVES = curve_training.CurvePolicySettings(
    model=PabboModelSettings(d_model=16, heads=2, layers=1, feed_forward=16),
    curves=CurveSettings(t_max=(60, 60), start=(2, 4)), points=59, steps=6, held_out=64,
)  # fmt: skip


def test_the_distance_is_to_the_nearest_t_within_the_tolerance():
    curves = sample_curves(0, torch.arange(20), 59, CURVES.curves, torch.float64)
    distance, above = curve_training.distance_to_close(curves, 0.01), curve_training.excess(curves)
    for row in range(20):
        used = torch.cat((curves.started[row], torch.ones(59, dtype=torch.bool)))
        T, loss = curves.T[row].double(), curves.loss[row]
        close = T[used & (loss - loss[used].min() <= 0.01)]
        nearest = (T / close[:, None]).log().abs().amin(0)
        torch.testing.assert_close(distance[row], nearest, rtol=0, atol=1e-12)
        assert above[row, used].min() == 0


def test_scores_are_fitted_to_the_distances_of_all_candidates():
    model, samples = _model(CURVES.model), torch.arange(5)
    with torch.no_grad():
        model.acquisition[-1].weight.zero_()
        model.acquisition[-1].bias.fill_(-0.7)
    loss = curve_training.CurvePolicyTask(CURVES).loss(model, samples, replace(STEP, seed=3))
    curves = sample_curves(3, samples, 59, CURVES.curves, torch.float64)
    distance = curve_training.distance_to_close(curves, 0.01)[:, -59:]
    assert float(loss.weight) == 5
    assert loss.total.item() == pytest.approx(float((distance - 0.7).square().mean(1).sum()))


def test_a_study_in_training_is_a_study_in_use():
    """The same T in the same order, with the scores of an untrained model."""
    model = _model(CURVES.model).float().eval()
    samples = torch.arange(40)
    curves = sample_curves(0, samples, CURVES.points, CURVES.curves)
    with torch.no_grad():
        scores, best = curve_training.studies(model, curves, CURVES.steps, None)
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
        scorer, budget = model_scorer(model), len(start) + CURVES.steps
        optimizer = make_optimizer("pabbo_curves", space=Space(2, 60), seed=0, scorer=scorer)
        study = Study(optimizer, points(*start), budget)
        finish(study, lambda point, losses=losses: math.exp(losses[point.T]))
        assert [e.point.T for e in study.history] == start + trained
        assert int(curves.T[row, best[row, -1]]) == study.best[0].T
        compared += 1
    assert compared >= 10
