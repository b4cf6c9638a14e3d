from __future__ import annotations

import torch
from torch import Tensor

from experiments.lm_pretrain.model import (
    LanguageModel,
    LmSettings,
)
from experiments.lm_pretrain.training import LanguageModelTask, RandomTokens
from raypipe.training.schedule import Phase
from raypipe.training.task import StepContext

SMALL = LmSettings(vocabulary=11, width=12, heads=3, layers=2, feed_forward=10, context=9)
CONTEXT = StepContext(0, Phase("train", 1, 8, 1e-3), 0)


def _task(settings: LmSettings = SMALL) -> LanguageModelTask:
    tokens = RandomTokens(settings.vocabulary, settings.context, 20, seed=3)
    held_out = RandomTokens(settings.vocabulary, settings.context, 8, seed=3, held_out=True)
    return LanguageModelTask(settings, tokens, held_out)


def _batch(task: LanguageModelTask, size: int) -> Tensor:
    return torch.stack([task.data[index] for index in range(size)])


def _model(task: LanguageModelTask) -> LanguageModel:
    torch.manual_seed(0)
    return task.build_model()


def _gradient(task: LanguageModelTask, parts: list[Tensor]) -> Tensor:
    model = _model(task).double()
    weight = 0.0
    for part in parts:
        loss = task.loss(model, part, CONTEXT)
        loss.total.backward()
        weight += float(loss.weight)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients]) / weight


def test_any_split_into_micro_batches_has_the_same_gradient() -> None:
    task = _task()
    batch = _batch(task, 8)
    whole = _gradient(task, [batch])
    assert whole.norm() > 0
    for size in (4, 3, 1):
        split = _gradient(task, list(batch.split(size)))
        torch.testing.assert_close(split, whole, rtol=0, atol=1e-12)


def test_the_loss_sums_what_each_next_token_costs() -> None:
    task = _task()
    model, batch = _model(task).double(), _batch(task, 3)
    loss = task.loss(model, batch, CONTEXT)
    probabilities = model(batch[:, :-1]).softmax(2)
    expected = -sum(
        probabilities[row, position, batch[row, position + 1]].log()
        for row in range(3)
        for position in range(SMALL.context)
    )
    torch.testing.assert_close(loss.total, expected)
    assert loss.total.dtype == torch.float64
    assert (loss.weight, task.counts) == (3 * SMALL.context, "tokens")
