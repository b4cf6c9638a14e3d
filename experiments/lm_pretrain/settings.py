"""Settings of language-model pretraining."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from experiments.common.corpora.files import check_files
from experiments.common.tokenizer import FEWEST_TOKENS
from experiments.lm_pretrain.model import LmSettings, large, medium, tiny
from experiments.lm_pretrain.tokenizer import Kind
from raypipe import ConfigError, Operational, Settings, TrainingSettings, TrainStageSettings

SIZES = {"tiny": tiny, "medium": medium, "large": large}


class LmDataSettings(Settings):
    """Training data and held-out data; `model.context` is the length of a sequence."""

    source: Literal["builtin", "text", "random"] = "builtin"
    """Source of the text: the docstrings of Python's standard library, files, or uniform random
    tokens, from which nothing can be learned.
    """
    files: Operational[tuple[Path, ...]] = ()
    """Text files to train on (source `text`): .txt and .jsonl, each also as .gz."""
    held_out_files: Operational[tuple[Path, ...]] = ()
    """Text files to evaluate on; if not given, `held_out_share` applies."""
    held_out_share: float = Field(0.1, gt=0, lt=1)
    """Share of the text that is held out, at its end."""
    validation_share: float = Field(0.05, ge=0, lt=1)
    """Share of the training text, at its start, that is not trained on but chooses the best step of
    the training, and the weight of the language model in its mixture with n-grams; 0 takes the last
    step, and leaves the mixture out.
    """
    most_passes: PositiveFloat | None = None
    """Most passes over the training text: a training on a short text has fewer steps than
    `train.training` says.
    """
    column: str = "text"
    """Key of the document in each row of a .jsonl file."""
    tokens: Kind = "bpe"
    """Kind of token: byte-level BPE with `model.vocabulary` tokens, trained on the training text;
    characters; or bytes.
    """
    samples: PositiveInt = 100_000
    """Number of training sequences (source `random`)."""
    held_out: PositiveInt = 256
    """Number of held-out sequences (source `random`)."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the random tokens (source `random`)."""

    @model_validator(mode="after")
    def _complete(self) -> LmDataSettings:
        check_files(self, ["text"], "files", "held_out_files")
        return self


class LmModelSettings(LmSettings):
    """Size and parts of the model: a section, or a size (`tiny`, `medium`, `large`)."""

    vocabulary: PositiveInt = 1024
    """Number of different tokens, for a BPE and for random tokens; characters and bytes decide it
    themselves.
    """

    @classmethod
    def spelled_out(cls, given: Any) -> Any:
        """Return the section for ``model: medium``."""
        if not isinstance(given, str):
            return given
        if given not in SIZES:
            raise ConfigError(
                f"model = {given!r}: must be a size ({', '.join(SIZES)}) or a section"
            )
        return SIZES[given]().model_dump()


class SampleSettings(Settings):
    """Text that the model writes after the training."""

    prompt: Operational[str] = ""
    """Text to continue; an empty prompt begins a document."""
    tokens: PositiveInt = 200
    """Maximum number of tokens; an end of text ends the sample earlier."""
    temperature: float = Field(0.8, ge=0)
    """Temperature of the draws; 0 takes the most probable token."""
    top_k: PositiveInt | None = None
    """Number of most probable tokens to draw from; all if not given."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the draws."""


class PretrainingSettings(Settings):
    """Language-model pretraining; the effective batch is 128 sequences on every card."""

    data: LmDataSettings = LmDataSettings()
    """Training data and held-out data."""
    model: LmModelSettings = LmModelSettings()
    """Size and parts of the model."""
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
    )
    """Length, optimizer and resources of the training."""
    sample: SampleSettings = SampleSettings()
    """Text that the model writes after the training."""
    export: Operational[bool] = False
    """Whether to write the trained model in the format of transformers."""

    @model_validator(mode="after")
    def _vocabulary_fits(self) -> PretrainingSettings:
        data, vocabulary = self.data, self.model.vocabulary
        if data.source != "random" and data.tokens == "bpe" and vocabulary < FEWEST_TOKENS:
            raise ValueError(
                f"model.vocabulary = {vocabulary}: a byte-level BPE has {FEWEST_TOKENS} tokens or "
                "more; raise it or set data.tokens=bytes"
            )
        return self

    @model_validator(mode="after")
    def _can_be_exported(self) -> PretrainingSettings:
        if self.export and self.model.mlp != "swiglu":
            raise ValueError(
                f"export = true with model.mlp = {self.model.mlp}: transformers has no such "
                "architecture; use swiglu (LlamaForCausalLM), or leave export out"
            )
        if self.export and self.data.source == "random":
            raise ValueError(
                "export = true with data.source = random: there is no tokenizer; train on text or "
                "leave export out"
            )
        return self
