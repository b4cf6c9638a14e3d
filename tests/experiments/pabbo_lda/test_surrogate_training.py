"""Training of the surrogate: its functions, its searches, and its loss."""

from __future__ import annotations

import pytest
import torch

from experiments.pabbo_lda.surrogate.model import SurrogateSettings, restore_surrogate
from experiments.pabbo_lda.surrogate_training.experiment import (
    PriorFittingSettings,
    PriorFittingTask,
)
from experiments.pabbo_lda.surrogate_training.prior import sample_searches
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext

TINY = SurrogateSettings(d_model=16, heads=2, layers=2, feed_forward=16, distance=4, components=2)
SETTINGS = PriorFittingSettings(model=TINY, evaluations=12, queries=8, held_out=16)


def context(step: int) -> StepContext:
    return StepContext(step, Phase("train", 10, 8, 1e-3), seed=3)


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


def test_training_lowers_the_surprise_of_held_out_functions():
    task = PriorFittingTask(SETTINGS)
    torch.manual_seed(0)
    model = task.build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    device = torch.device("cpu")
    with torch.no_grad():
        before = task.evaluate(model, device, 64)["surprise"]
    for step in range(30):
        loss = task.loss(model, torch.arange(16) + 16 * step, context(step))
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    with torch.no_grad():
        assert task.evaluate(model, device, 64)["surprise"] < before - 0.1


def test_a_file_of_another_model_is_refused():
    from safetensors.torch import save

    with pytest.raises(ValueError, match="lack the key 'surrogate'"):
        restore_surrogate(save({"a": torch.zeros(1)}))
    with pytest.raises(ValueError, match="safetensors"):
        restore_surrogate(b"nothing")
