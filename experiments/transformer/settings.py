"""The configuration of the transformer trainer, section by section."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from experiments.transformer.model import TransformerSettings
from raypipe.settings import Settings
from raypipe.training.settings import TrainingSettings, TrainStageSettings


class DataSettings(Settings):
    """What is trained on; the section ``model`` says what a sample consists of."""

    source: Literal["random"] = Field("random", description="random samples of a rule to learn")
    samples: PositiveInt = Field(20_000, description="samples to train on")
    held_out: PositiveInt = Field(2_000, description="samples to evaluate on")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the samples and of their rule")


class TrainerSettings(Settings):
    """The transformer trainer; a step is of 32 samples whatever the machine."""

    data: DataSettings = DataSettings()
    model: TransformerSettings
    train: TrainStageSettings = TrainStageSettings(
        training=TrainingSettings(
            effective_batch=32,
            epochs=10,
            learning_rate=1e-4,
            weight_decay=0.01,
            warmup_steps=100,
            clip_norm=1.0,
        )
    )
