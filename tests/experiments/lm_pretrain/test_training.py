from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments.lm_pretrain.model import (
    LanguageModel,
    LmSettings,
)
from experiments.lm_pretrain.training import LanguageModelTask, RandomTokens
from raypipe.store.run_directory import RunDirectory
from raypipe.store.tables import read_table
from raypipe.training.batching import BatchPlan
from raypipe.training.job import TrainingJob
from raypipe.training.loop import train
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import TrainingSettings, TrainStageSettings
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


@pytest.mark.parametrize(
    "changed",
    [
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "recompute": "cheap"},
        {"precision": "bf16"},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
        pytest.param({"compile": True, "gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_the_loop_trains_it_alike_however_it_is_computed(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    settings = LmSettings(vocabulary=50, width=32, heads=2, layers=2, feed_forward=48, context=16)

    def losses(name: str, **training: Any) -> list[float]:
        given = TrainingSettings(steps=5, log_every=1, learning_rate=1e-2, **training)
        data = RandomTokens(50, 16, 64)
        job = TrainingJob("lm", "run", LanguageModelTask(settings, data, data),
            TrainStageSettings(training=given), BatchPlan(4, 2, 8, 1),
            RunDirectory.at(tmp_path / name))  # fmt: skip
        outcome = train(job, Worker(0, torch.device("cpu")))
        assert outcome["eval_loss"] > 0
        assert outcome["tokens_per_s"] > 0
        return list(read_table(job.run_dir, "steps")["loss"])

    plain, other = losses("plain"), losses("other", **changed)
    rel = 1e-2 if "precision" in changed else 1e-5
    torch.testing.assert_close(other, plain, rtol=rel, atol=0)
