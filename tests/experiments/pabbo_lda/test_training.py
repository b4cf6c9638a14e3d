from __future__ import annotations

import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.pabbo_lda.duels import Candidates, draw_pairs
from experiments.pabbo_lda.functions import sample_functions
from experiments.pabbo_lda.losses import _over_function, _over_trajectory, _trajectories
from experiments.pabbo_lda.model import ModelSettings, PabboModel
from experiments.pabbo_lda.training import PabboSettings, PabboTask
from raypipe.training.settings import TrainingSettings
from raypipe.training.task import Phase, StepContext

TINY = PabboSettings(
    model=ModelSettings(d_model=8, heads=2, layers=2, feed_forward=8),
    trajectories=3, horizon=4, query_points=9, candidate_pairs=12, prediction_points=8,
    prediction_duels=10, prediction_splits=3, max_context=4,
)  # fmt: skip
BURN_IN = Phase("burn_in", 1, 8, 1e-3)
POLICY = Phase("policy", 1, 8, 1e-3)


def _model(settings: PabboSettings = TINY) -> PabboModel:
    torch.manual_seed(0)
    return PabboTask(settings).build_model().double()


def _gradient(task: PabboTask, phase: Phase, parts: list[Tensor]) -> Tensor:
    model = _model(task.settings)
    weight = 0.0
    for part in parts:
        loss = task.loss(model, part, StepContext(0, phase, 7))
        loss.total.backward()
        weight += float(loss.weight)
    gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([g.flatten() for g in gradients]) / weight


@pytest.mark.parametrize("phase", [BURN_IN, POLICY])
@pytest.mark.parametrize("advantage", ["trajectory", "function"])
def test_any_split_into_micro_batches_has_the_same_gradient(phase: Phase, advantage: str) -> None:
    task = PabboTask(TINY.model_copy(update={"advantage": advantage}))
    samples = torch.arange(8)
    whole = _gradient(task, phase, [samples])
    assert whole.norm() > 0
    for size in (4, 2, 1):
        split = _gradient(task, phase, list(samples.split(size)))
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-10)


def test_the_burn_in_loss_is_the_mean_over_splits_of_the_duels_left_out() -> None:
    """Against a plain loop that encodes each split alone, without masks."""
    model, seed = _model(), 7
    total = PabboTask(TINY).loss(model, torch.tensor([3]), StepContext(0, BURN_IN, seed)).total
    contexts: list[tuple[Tensor, Tensor]] = []
    original = PabboModel.forward

    def spy(self: PabboModel, context: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        contexts.append((context, mask))
        return original(self, context, targets, mask)

    PabboModel.forward = spy  # type: ignore[method-assign]
    try:
        PabboTask(TINY).loss(model, torch.tensor([3]), StepContext(0, BURN_IN, seed))
    finally:
        PabboModel.forward = original  # type: ignore[method-assign]
    (context, mask), = contexts
    functions = sample_functions(seed, torch.tensor([3]), 8, TINY.functions, dtype=torch.float64)
    pairs = draw_pairs(seed, 10, torch.tensor([3]), 8, 10)
    duels = Candidates.of(functions.points, functions.utility, pairs)
    tokens = model.embed_duels(duels.duels, duels.preferred)[0]
    losses = []
    for split in range(TINY.prediction_splits):
        used = context[0, split][mask[0, split]]
        assert 1 <= len(used) <= TINY.max_context
        inside = (tokens[:, None] - used[None]).abs().sum(2).amin(1) < 1e-12
        assert inside.sum() == len(used)
        encoded = model(used[None, None], model.embed_points(functions.points))[0, 0]
        mean, std = model.predict(encoded)
        i, j = pairs[0][~inside].unbind(1)
        logit = (mean[j] - mean[i]) / torch.sqrt(1 + torch.pi / 8 * (std[i] ** 2 + std[j] ** 2))
        truth = duels.preferred[0][~inside].double()
        losses.append(F.binary_cross_entropy_with_logits(logit, truth))
    torch.testing.assert_close(total, torch.stack(losses).mean())


def test_trajectories_never_ask_twice_and_report_their_log_probability() -> None:
    model, samples = _model(), torch.arange(5)
    s = TINY.model_copy(update={"horizon": 12})
    functions = sample_functions(0, samples, 9, s.functions, dtype=torch.float64)
    pairs = draw_pairs(0, 13, samples, 9, 12)
    candidates = Candidates.of(functions.points, functions.utility, pairs)
    log_prob, utility = _trajectories(model, candidates, samples, 0, s)
    assert log_prob.shape == (5, 3, 12)
    # asking every candidate once: each trajectory sees all utilities, and its last duel is certain
    every = candidates.utility.sum(2).sort(1).values
    torch.testing.assert_close(
        utility.sum(3).sort(2).values, every[:, None].expand(-1, 3, -1), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(log_prob[..., -1], torch.zeros(5, 3).double())
    assert (log_prob <= 0).all()
    assert len({tuple(row) for row in utility[0, :, :, 0].tolist()}) > 1


def test_the_published_returns_are_standardised_over_time() -> None:
    best = torch.tensor([[[1.0, 2.0, 4.0]]])
    returns = torch.tensor([1.0, 2.0 * 0.5, 4.0 * 0.25])
    expected = (returns - returns.mean()) / (returns.std() + 1e-7)
    torch.testing.assert_close(_over_trajectory(best, 0.5)[0, 0], expected)


def test_returns_to_go_against_the_other_trajectories() -> None:
    best = torch.randn(2, 4, 5, dtype=torch.float64).cummax(2).values
    weight = _over_function(best, 0.9)
    to_go = torch.zeros_like(best)
    for t in range(5):
        for later in range(t, 5):
            to_go[:, :, t] += 0.9 ** (later - t) * best[:, :, later]
    others = (to_go.sum(1, keepdim=True) - to_go) / 3
    difference = to_go - others
    scale = difference.square().mean((1, 2), keepdim=True).sqrt()
    torch.testing.assert_close(weight, difference / scale)
    # a constant added to a function and its scale drop out
    torch.testing.assert_close(_over_function(3 * best + 5, 0.9), weight)


def test_equal_trajectories_have_no_advantage() -> None:
    assert _over_function(torch.ones(1, 3, 4), 0.98).abs().max() == 0


def test_phases() -> None:
    training = TrainingSettings(steps=2000, effective_batch=16)
    burn_in, policy = PabboTask(PabboSettings(policy_learning_rate=1e-4)).phases(training, 16)
    assert (burn_in.name, burn_in.steps, burn_in.samples) == ("burn_in", 800, 16)
    assert (policy.name, policy.steps, policy.samples) == ("policy", 1200, 8)
    assert policy.learning_rate == 1e-4
    (only,) = PabboTask(PabboSettings(burn_in=1.0)).phases(training, 16)
    assert (only.name, only.steps) == ("burn_in", 2000)
    with pytest.raises(ValueError, match=r"training\.steps is missing"):
        PabboTask(TINY).phases(TrainingSettings(epochs=1), 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"candidate_pairs": 37}, "form fewer pairs"),
        ({"prediction_duels": 29}, "form fewer pairs"),
        ({"horizon": 13}, "exceeds candidate_pairs"),
        ({"max_context": 10}, "leaves none"),
        ({"trajectories": 1}, "at least 2"),
    ],
)
def test_contradicting_settings_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PabboTask(TINY.model_copy(update=changes))


def test_the_task_is_picklable() -> None:
    assert pickle.loads(pickle.dumps(PabboTask(TINY))).settings == TINY


def test_a_short_burn_in_learns_to_predict_winners() -> None:
    task = PabboTask(PabboSettings(prediction_splits=2))
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    losses = []
    for step in range(120):
        loss = task.loss(model, torch.arange(16 * step, 16 * step + 16), StepContext(step, BURN_IN, 0))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
        losses.append(float(loss.total) / float(loss.weight))
    assert sum(losses[-20:]) / 20 < 0.64
    assert sum(losses[:5]) / 5 > 0.68
