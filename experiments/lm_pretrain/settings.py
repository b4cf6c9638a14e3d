"""The configuration of language-model pretraining, section by section."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from experiments.lm_pretrain.export import check_exportable
from experiments.lm_pretrain.model import LmSettings, large, medium, tiny
from experiments.lm_pretrain.tokenizer import Kind
from raypipe.config.settings import Settings
from raypipe.datasets.bpe import FEWEST_TOKENS
from raypipe.errors import ConfigError
from raypipe.training.settings import LoaderSettings, TrainingSettings, TrainStageSettings

SIZES = {"tiny": tiny, "medium": medium, "large": large}


class DataSettings(Settings):
    """What is trained on, and what is evaluated on; ``model`` has the length of a sequence."""

    source: Literal["builtin", "text", "random"] = Field(
        "builtin",
        description="docstrings of the standard library; files; or uniform tokens, which teach "
        "nothing",
    )
    files: tuple[Path, ...] = Field((), description="of text: .txt and .jsonl, each also .gz")
    held_out_files: tuple[Path, ...] = Field((), description="to evaluate on; else a share")
    held_out_share: float = Field(0.1, gt=0, lt=1, description="the last of the text")
    column: str = Field("text", description="of .jsonl, the key of a document")
    tokens: Kind = Field(
        "bpe",
        description="byte-level BPE of model.vocabulary tokens, trained here; or characters; or "
        "bytes",
    )
    samples: PositiveInt = Field(100_000, description="random: sequences to train on")
    held_out: PositiveInt = Field(256, description="random: sequences to evaluate on")
    seed: int = Field(0, ge=0, lt=2**32, description="random: seed of the tokens")

    @model_validator(mode="after")
    def _whole(self) -> DataSettings:
        if (self.source == "text") != bool(self.files) or (
            self.held_out_files and self.source != "text"
        ):
            raise ValueError(
                f"source = {self.source} with {len(self.files)} files and "
                f"{len(self.held_out_files)} held_out_files: text is read from files, the others "
                "are not"
            )
        return self

    def decisive(self) -> dict[str, Any]:
        """The settings that decide what is trained on, beside the text."""
        if self.source == "random":
            return self.model_dump(include={"source", "samples", "held_out", "seed"})
        return {"tokens": self.tokens}


class ModelSettings(LmSettings):
    """The model, part by part or as a size: ``tiny``, ``medium`` or ``large``."""

    vocabulary: PositiveInt = Field(
        1024, description="tokens of a BPE, or random ones; characters and bytes bring theirs"
    )

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


class SampleSettings(Settings):
    """The text that is continued after the training."""

    prompt: str = Field("", description="what to continue; nothing begins a document")
    tokens: PositiveInt = Field(200, description="tokens at most; the end of the text ends it")
    temperature: float = Field(0.8, ge=0, description="0 takes the most probable token")
    top_k: PositiveInt | None = Field(None, description="drawn from so many, or from all")
    seed: int = Field(0, ge=0, lt=2**32, description="seed of the draws")


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
    sample: SampleSettings = SampleSettings()
    export: bool = Field(False, description="write the trained model for Hugging Face's library")

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> PretrainingSettings:
        data, vocabulary = self.data, self.model.vocabulary
        if data.source != "random" and data.tokens == "bpe" and vocabulary < FEWEST_TOKENS:
            raise ValueError(
                f"model.vocabulary = {vocabulary}: a byte-level BPE has {FEWEST_TOKENS} or more; "
                "raise it or set data.tokens=bytes"
            )
        return self

    @model_validator(mode="after")
    def _can_be_exported(self) -> PretrainingSettings:
        if self.export:
            check_exportable(self.model)
        if self.export and self.data.source == "random":
            raise ValueError(
                "export = true with data.source = random: there is no tokenizer; train on text or "
                "leave export out"
            )
        return self
