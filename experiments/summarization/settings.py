"""The configuration of summarisation, section by section."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from experiments.summarization.generation import GenerationSettings
from experiments.summarization.model import T5Settings, mt5_1_2b, small, t5_220m
from experiments.summarization.tokens import FEWEST_TOKENS
from raypipe.config.settings import Settings
from raypipe.errors import ConfigError
from raypipe.hardware import Precision
from raypipe.training.settings import TrainingSettings, TrainStageSettings

SIZES = {"small": small, "t5_220m": t5_220m, "mt5_1_2b": mt5_1_2b}

#: a name or several
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
    Field(min_length=1),
]

#: the keys that decide what is read, beside the content of the files
_DECISIVE = {
    "builtin": {"source", "held_out_share", "min_words"},
    "files": {"source", "held_out_share", "document", "summary"},
}


class DataSettings(Settings):
    """What is trained on, and what is held out."""

    source: Literal["builtin", "files"] = Field(
        "builtin",
        description="bodies and first lines of the standard library's docstrings; or files",
    )
    files: tuple[Path, ...] = Field(
        (), description="of rows: .jsonl and .csv, each also .gz, and .parquet"
    )
    held_out_files: tuple[Path, ...] = Field((), description="to evaluate on; else a share")
    held_out_share: float = Field(
        0.1, gt=0, lt=1, description="of the documents, drawn by a hash of their text"
    )
    document: Names = Field(
        ("document",),
        description="the column of the documents, or several: of each file the first that it has",
    )
    summary: Names = Field(("summary",), description="the column of the summaries, likewise")
    min_words: PositiveInt = Field(5, description="builtin: words of a body, or it is left out")
    prefix: str = Field("", description="what every document begins with, such as 'summarize: '")
    source_length: int = Field(512, ge=8, description="tokens of a document at most, its end too")
    target_length: int = Field(64, ge=2, description="tokens of a summary at most, its end too")

    @model_validator(mode="after")
    def _whole(self) -> DataSettings:
        if (self.source == "files") != bool(self.files) or (
            self.held_out_files and self.source != "files"
        ):
            raise ValueError(
                f"source = {self.source} with {len(self.files)} files and "
                f"{len(self.held_out_files)} held_out_files: files are read with source = files"
            )
        return self

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what is read, beside the content of the files."""
        keys = _DECISIVE[self.source] - ({"held_out_share"} if self.held_out_files else set())
        return self.model_dump(mode="json", include=keys)

    def encoding(self) -> dict[str, Any]:
        """The settings that decide how it is encoded, beside the tokenizer."""
        return self.model_dump(mode="json", include={"prefix", "source_length", "target_length"})


class ModelSettings(T5Settings):
    """The model: a size to train from scratch, its parts, or the name of a pretrained one."""

    pretrained: str | None = Field(
        None, description="a name or directory: begin with its weights, and take its tokenizer"
    )

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """``model: small``, or ``model: google-t5/t5-base``, or ``model: ./a/directory``."""
        if not isinstance(given, str):
            return given
        if given in SIZES:
            return cls.model_validate(SIZES[given]().model_dump()).model_dump()
        from experiments.summarization.pretrained import pretrained_settings

        try:
            found = pretrained_settings(given)
        except ValueError as error:
            raise ConfigError(
                f"model = {given!r}: is no size ({', '.join(SIZES)}), and no pretrained model can "
                f"be read there: {error}"
            ) from error
        return {**found.model_dump(), "pretrained": given}

    @property
    def sizes(self) -> T5Settings:
        """The settings of the transformer alone."""
        return T5Settings.model_validate(self.model_dump(exclude={"pretrained"}))


class SummarizationTraining(TrainStageSettings):
    """A training stage of a T5, whose activations grow beyond 65,504, the most that fp16 holds."""

    unusable: ClassVar[Mapping[Precision, str]] = {
        "fp16": "T5 and mT5 overflow in it; use bf16 or fp32"
    }


class SummarizationSettings(Settings):
    """Summarisation; the batch sizes are those published for the card."""

    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="share of a target's weight that all tokens share in training"
    )
    copying: bool = Field(
        False, description="from scratch: begin with a decoder that copies what it attends to"
    )
    train: SummarizationTraining = SummarizationTraining(
        training=TrainingSettings(
            effective_batch=8,
            epochs=3,
            learning_rate=1e-3,
            warmup_steps=0.05,
            clip_norm=1.0,
        )
    )
    generation: GenerationSettings = GenerationSettings()
    export: bool = Field(
        False, description="write the trained model as the library transformers reads it"
    )

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> SummarizationSettings:
        model = self.model
        if model.pretrained is None and model.vocabulary < FEWEST_TOKENS:
            raise ValueError(
                f"model.vocabulary = {model.vocabulary}: the BPE trained here has {FEWEST_TOKENS} "
                "tokens or more; raise it"
            )
        return self
