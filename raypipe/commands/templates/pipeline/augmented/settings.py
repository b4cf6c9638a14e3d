"""Settings: the sections of the configuration."""

from pydantic import Field, NonNegativeFloat, PositiveInt

from raypipe import Settings, TrainStageSettings


class PrepareSettings(Settings):
    """Training digits, in several copies."""

    copies: PositiveInt = 4
    """Copies of each training digit, itself included."""
    degrees: NonNegativeFloat = 15
    """Largest rotation of a copy, in degrees."""
    seed: int = Field(0, ge=0)
    """Seed of the rotations."""


class ModelSettings(Settings):
    """Classifier with one hidden layer."""

    width: PositiveInt = 128
    """Number of hidden units."""


class AugmentedSettings(Settings):
    """All sections; each stage reads its own and those of no stage, such as ``model``."""

    prepare: PrepareSettings = PrepareSettings()
    model: ModelSettings = ModelSettings()
    train: TrainStageSettings = TrainStageSettings()
