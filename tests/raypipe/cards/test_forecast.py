"""Forecasts of a task whose sizes and operations are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raypipe.cards.dry_run import StepCase, record
from raypipe.cards.forecast import Forecasts
from raypipe.cards.peak_memory import memory
from raypipe.training.data_sheets import cards
from raypipe.training.schedule import Phase
from raypipe.training.settings import ScalingSettings, TrainingSettings, TrainStageSettings
from raypipe.training.task import Loss, StepContext
from tests.raypipe.cards.test_dry_run import Squares

CARD = cards()["A100 SXM 80GB"]


def settings(workers: int = 1, strategy: Any = "ddp", **training: Any) -> TrainStageSettings:
    values = {"steps": 2, "precision": "bf16", "effective_batch": 64, **training}
    scaling = ScalingSettings(workers=workers, strategy=strategy)
    return TrainStageSettings(training=TrainingSettings(**values), scaling=scaling)


def test_operations_of_the_model_count_once_in_the_utilization() -> None:
    plain, recomputed = settings(), settings(gradient_checkpointing=True)
    forecasts = Forecasts(Squares(), plain, 64, lambda _: None)
    rows = [forecasts.row(CARD, each, 64) for each in (plain, recomputed)]
    flops = [row["mfu"] * row["step_time_s"] for row in rows]
    assert flops[1] == pytest.approx(flops[0], rel=1e-9)
    assert rows[1]["mfu"] < rows[0]["mfu"]  # as the speed


class Chunks(Squares):
    """A loss in chunks of 16 samples: the number of kernels depends on the micro-batch."""

    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        parts = [model(part).square().sum() for part in batch[0].split(16)]
        return Loss(torch.stack(parts).sum(), len(batch[0]))


def test_micro_batches_that_differ_in_more_than_sizes_are_recorded() -> None:
    size = 256
    given = settings(effective_batch=size, gradient_checkpointing=True)
    forecasts = Forecasts(Chunks(), given, size, lambda _: None)
    for each in (1, 16, 48, size):
        phase = Phase("train", 2, each, 1e-3)
        step = record(Chunks(), StepCase(given, phase, 0, each, 1 if each == size else 2, 1, 8.0))
        reserved = memory(step, CARD, 1, bucketed=False).reserved
        assert forecasts.row(CARD, given, each)["peak_bytes"] == reserved
