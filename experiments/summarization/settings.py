"""Settings of summarization."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from experiments.common.corpora.files import check_files
from experiments.summarization.generation import GenerationSettings
from experiments.summarization.model import T5Settings, mt5_1_2b, small, t5_220m
from experiments.summarization.tokenizer import FEWEST_TOKENS
from raypipe import ConfigError, Operational, Settings, TrainingSettings, TrainStageSettings

SIZES = {"small": small, "t5_220m": t5_220m, "mt5_1_2b": mt5_1_2b}

#: one name or several
Names = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda given: (given,) if isinstance(given, str) else given),
    Field(min_length=1),
]


class SummarizationDataSettings(Settings):
    """Documents and reference summaries, and their encoding."""

    source: Literal["builtin", "files"] = "builtin"
    """Source of the pairs: the docstrings of Python's standard library (the body is the document,
    the first line its summary), or files.
    """
    files: Operational[tuple[Path, ...]] = ()
    """Files to train on (source `files`): .jsonl and .csv, each also as .gz, and .parquet."""
    held_out_files: Operational[tuple[Path, ...]] = ()
    """Files to evaluate on; if not given, `held_out_share` applies."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the documents that is held out, by a hash of them."""
    validation_files: Operational[tuple[Path, ...]] = ()
    """Files that choose the best step of the training; if not given, `validation_share` applies."""
    validation_share: float = Field(0.05, ge=0, lt=1)
    """Share of the training documents, by a hash of them, that is not trained on but chooses the
    best step of the training; 0 takes the last step.
    """
    document: Names = ("document",)
    """Column of the documents; with several names, each file's first match."""
    summary: Names = ("summary",)
    """Column of the summaries; with several names, each file's first match."""
    min_words: PositiveInt = 5
    """Minimum length of a document, in words (source `builtin`)."""
    prefix: str = ""
    """Text before every document, such as the `summarize: ` of T5."""
    source_length: int = Field(512, ge=8)
    """Maximum length of a document in tokens, including its end."""
    target_length: int = Field(64, ge=2)
    """Maximum length of a summary in tokens, including its end."""

    @model_validator(mode="after")
    def _complete(self) -> SummarizationDataSettings:
        check_files(self, ["files"], "files", "held_out_files", "validation_files")
        return self


class SummarizationModelSettings(T5Settings):
    """The model: a size to train from scratch, its parts, or the name of a pretrained model."""

    pretrained: Operational[str | None] = None
    """Name or directory of a pretrained model, for its weights and its tokenizer."""

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return the section for ``model: small``, a pretrained model's name, or a directory."""
        if not isinstance(given, str):
            return given
        if given in SIZES:
            return cls.model_validate(SIZES[given]().model_dump()).model_dump()
        from experiments.summarization.pretrained import pretrained_settings

        try:
            sizes = pretrained_settings(given)
        except ValueError as error:
            raise ConfigError(
                f"model = {given!r}: is not a size ({', '.join(SIZES)}), and cannot be read as a "
                f"pretrained model: {error}"
            ) from error
        return {**sizes.model_dump(), "pretrained": given}

    @property
    def sizes(self) -> T5Settings:
        """Settings of the transformer alone."""
        return T5Settings.model_validate(self.model_dump(exclude={"pretrained"}))


class SummarizationTraining(TrainStageSettings):
    """Training of a T5, whose activations exceed 65,504, the largest number of fp16."""

    unusable: ClassVar[Mapping[Any, str]] = {"fp16": "T5 and mT5 overflow in it; use bf16 or fp32"}


class SummarizationSettings(Settings):
    """Summarization; the batch sizes are those published for the card."""

    data: SummarizationDataSettings = SummarizationDataSettings()
    """Documents and reference summaries, and their encoding."""
    model: SummarizationModelSettings = SummarizationModelSettings()
    """The model, as a section, a size, or a pretrained model."""
    label_smoothing: float = Field(0.0, ge=0, lt=1)
    """Label smoothing: share of each target's weight that is spread over all tokens."""
    copying: bool = False
    """Whether a model from scratch begins with a decoder that copies what it attends to."""
    train: SummarizationTraining = SummarizationTraining(
        training=TrainingSettings(
            effective_batch=8,
            epochs=3,
            learning_rate=1e-3,
            warmup_steps=0.05,
            clip_norm=1.0,
        )
    )
    """Length, optimizer and resources of the training."""
    generation: GenerationSettings = GenerationSettings()
    """Search for a summary, greedy or with several beams."""
    export: Operational[bool] = False
    """Whether to write the trained model in the format of transformers."""

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> SummarizationSettings:
        model = self.model
        if model.pretrained is None and model.vocabulary < FEWEST_TOKENS:
            raise ValueError(
                f"model.vocabulary = {model.vocabulary}: the BPE trained here has {FEWEST_TOKENS} "
                "tokens or more; raise it"
            )
        return self
