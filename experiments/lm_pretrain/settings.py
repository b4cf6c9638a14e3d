"""The configuration of language-model pretraining, section by section."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt

from experiments.lm_pretrain.model import LmSettings, large, medium, tiny
from raypipe.errors import ConfigError
from raypipe.settings import Settings
from raypipe.training.settings import LoaderSettings, TrainingSettings, TrainStageSettings

SIZES = {"tiny": tiny, "medium": medium, "large": large}


class DataSettings(Settings):
    """What is trained on; ``model`` has the vocabulary and the length of a sequence."""

    source: Literal["random"] = Field("random", description="uniform tokens: nothing to learn")
    samples: PositiveInt = Field(100_000, description="sequences to train on")
    held_out: PositiveInt = Field(256, description="sequences to evaluate on")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the tokens")


class ModelSettings(LmSettings):
    """The model, part by part or as a size: ``tiny``, ``medium`` or ``large``."""

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """``model: medium``."""
        if not isinstance(given, str):
            return given
        if given not in SIZES:
            raise ConfigError(
                f"model = {given!r}: must be a size ({', '.join(SIZES)}) or a section"
            )
        return SIZES[given]().model_dump()


class PretrainingSettings(Settings):
    """Pretraining; a step is of 128 sequences whatever the card."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    train: TrainStageSettings = TrainStageSettings(
        training=TrainingSettings(
            effective_batch=128,
            steps=100_000,
            learning_rate=3e-4,
            betas=(0.9, 0.95),
            weight_decay=0.01,
            warmup_steps=4000,
            clip_norm=1.0,
        ),
        loader=LoaderSettings(prefetch=4),
    )
