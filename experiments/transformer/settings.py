"""The configuration of the transformer trainer, section by section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, ValidationError, model_validator

from experiments.transformer.model import EncoderSettings, TransformerSettings
from raypipe.config.settings import Settings
from raypipe.errors import ConfigError
from raypipe.training.settings import TrainingSettings, TrainStageSettings

#: the keys that decide what is read, beside the files' content
_DECISIVE = {
    "builtin": {"source", "min_documents", "test_share", "vocabulary"},
    "table": {"source", "test_share", "target", "ignore", "few_values"},
    "sequences": {"source", "test_share", "text", "label", "label_index", "vocabulary"},
    "random": {"source", "samples", "held_out", "seed"},
}


class DataSettings(Settings):
    """What is trained on, and what is evaluated on."""

    source: Literal["builtin", "table", "sequences", "random"] = Field(
        "builtin",
        description="docstrings of the standard library; a file of rows or of texts and their "
        "labels; or random samples of a rule to learn",
    )
    file: Path | None = Field(
        None, description="of table and sequences: .parquet, .csv, .npz or .jsonl"
    )
    test_file: Path | None = Field(None, description="to evaluate on; else a share of the file")
    test_share: float = Field(0.2, gt=0, lt=1, description="share kept for it, drawn by hash")
    target: str | None = Field(None, description="table: the column to predict")
    ignore: tuple[str, ...] = Field((), description="table: columns that are no features")
    few_values: PositiveInt = Field(
        20, description="table: whole numbers of at most so many values are categories"
    )
    text: str = Field("text", description="sequences: the column of the texts")
    label: str = Field("label", description="sequences: the column of the labels")
    label_index: int = Field(-1, description="sequences: which one, where a label is a list")
    vocabulary: int = Field(4000, ge=257, description="tokens of the byte-level BPE trained here")
    min_documents: PositiveInt = Field(40, description="builtin: of a package, or it is left out")
    samples: PositiveInt = Field(20_000, description="random: samples to train on")
    held_out: PositiveInt = Field(2_000, description="random: samples to evaluate on")
    seed: int = Field(0, ge=0, lt=2**32, description="random: seed of the samples and their rule")

    @model_validator(mode="after")
    def _whole(self) -> DataSettings:
        from_files = self.source in ("table", "sequences")
        if from_files != (self.file is not None) or (self.test_file and not from_files):
            raise ValueError(
                f"source = {self.source} with file = {self.file}, test_file = {self.test_file}: "
                "table and sequences are read from a file, the others are not"
            )
        if self.source == "table" and self.target is None:
            raise ValueError("source = table: target must name the column to predict")
        return self

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what is read, beside the content of the files."""
        return self.model_dump(mode="json", include=_DECISIVE[self.source])


class ModelSettings(EncoderSettings):
    """The transformer; its input and output follow from the data, but for random samples."""

    vocabulary: int | None = Field(None, ge=0, description="random: number of token ids")
    numeric: int | None = Field(None, ge=0, description="random: numeric features of a table")
    categories: tuple[int, ...] | None = Field(
        None, description="random: number of values of each categorical feature"
    )
    kind: Literal["classification", "regression"] | None = Field(
        None, description="what the outputs are; by default what suits the target"
    )
    outputs: PositiveInt | None = Field(None, description="random: number of classes, or 1")

    def completed(self, found: Mapping[str, Any]) -> TransformerSettings:
        """The transformer's settings, with what the data have.

        Raises:
            ConfigError: a value given that is not that of the data, or values that do not fit.

        """
        given = self.model_dump(exclude_none=True)
        wrong = [
            f"model.{key} = {given[key]}: the data have {value}; leave it out"
            for key, value in found.items()
            if key in given and given[key] != value
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))
        try:
            return TransformerSettings.model_validate({**given, **found})
        except ValidationError as error:
            reasons = [str(each["msg"]).removeprefix("Value error, ") for each in error.errors()]
            raise ConfigError(f"model: {'; '.join(reasons)}") from error


class TrainerSettings(Settings):
    """The transformer trainer; a step is of 32 samples whatever the machine."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
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
