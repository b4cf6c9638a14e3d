"""A small experiment whose settings have one of each kind of value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from raypipe import Experiment, Settings, Stage, TrainingSettings, TrainStageSettings


class StudySettings(Settings):
    runs: PositiveInt = 3
    start: tuple[int, ...] = (5, 7)
    share: float = Field(0.5, gt=0)
    order: Literal["random", "sorted"] = "random"
    low: int = 0
    high: int = 10
    folder: Path | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _ordered(self) -> StudySettings:
        if self.low > self.high:
            raise ValueError(f"low = {self.low} is above high = {self.high}")
        return self


class ExampleSettings(Settings):
    fit: TrainStageSettings = TrainStageSettings(training=TrainingSettings(steps=8))
    study: StudySettings = StudySettings()


def stages(settings: ExampleSettings) -> list[Stage]:
    return [Stage("fit", lambda context: None)]


EXPERIMENT = Experiment("example", 1, ExampleSettings, stages)
