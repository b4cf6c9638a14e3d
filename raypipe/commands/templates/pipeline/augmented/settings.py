"""Settings: the sections of the configuration."""

from pydantic import Field, NonNegativeFloat, PositiveInt

from raypipe import Settings, TrainStageSettings


class PrepareSettings(Settings):
    """Training digits, in several copies."""

    copies: PositiveInt = Field(4, description="Copies of each training digit, itself included.")
    degrees: NonNegativeFloat = Field(15, description="Largest rotation of a copy, in degrees.")
    seed: int = Field(0, ge=0, description="Seed of the rotations.")


class ModelSettings(Settings):
    """Classifier with one hidden layer."""

    width: PositiveInt = Field(128, description="Number of hidden units.")


class AugmentedSettings(Settings):
    """All sections; each stage reads its own and those of no stage, such as ``model``."""

    prepare: PrepareSettings = PrepareSettings()
    model: ModelSettings = ModelSettings()
    train: TrainStageSettings = TrainStageSettings()
