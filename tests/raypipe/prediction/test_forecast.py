"""Forecasts of a task whose sizes and operations are known."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.prediction.calibration import Calibration
from raypipe.prediction.cards import cards
from raypipe.prediction.forecast import Forecasts
from raypipe.training.settings import ScalingSettings, TrainingSettings, TrainStageSettings
from tests.raypipe.prediction.test_step import Squares

CARD = cards()["A100 SXM 80GB"]


def settings(workers: int = 1, strategy: Any = "ddp", **training: Any) -> TrainStageSettings:
    values = {"steps": 2, "precision": "bf16", "effective_batch": 64, **training}
    scaling = ScalingSettings(workers=workers, strategy=strategy)
    return TrainStageSettings(training=TrainingSettings(**values), scaling=scaling)


def test_operations_of_the_model_count_once_in_the_utilization() -> None:
    plain, recomputed = settings(), settings(gradient_checkpointing=True)
    forecasts = Forecasts(Squares(), plain, 64, "", lambda _: None)
    rows = [forecasts.row(CARD, each, Calibration(), size=64) for each in (plain, recomputed)]
    flops = [row["mfu"] * row["step_time_s"] for row in rows]
    assert flops[1] == pytest.approx(flops[0], rel=1e-9)
    assert rows[1]["mfu"] < rows[0]["mfu"]  # as the speed


def test_the_utilization_needs_no_recordings_of_its_own() -> None:
    said: list[str] = []
    sharded = settings(workers=2, strategy="fsdp")
    forecasts = Forecasts(Squares(), sharded, 64, "", said.append)
    row = forecasts.row(CARD, sharded, Calibration(), size=forecasts.most)
    assert row["micro_batch"] == 32
    assert len(said) == 2  # the two of the line
