"""Settings of the transformer trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from experiments.common.corpora.files import check_files
from raypipe import ConfigError, Operational, Settings, TrainingSettings, TrainStageSettings

_HEAD_WIDTH = 64
#: a hash begins with the bytes and their number, in 64 bits
_LONGEST_BYTES = 7


class TransformerDataSettings(Settings):
    """Training and held-out data."""

    source: Literal["builtin", "table", "sequences", "random"] = "builtin"
    """Docstrings of the standard library (builtin), a file of rows (table), a file of texts with
    labels (sequences), or random samples of a rule (random).
    """
    file: Operational[Path | None] = None
    """File of a table or of sequences: .parquet, .csv or .jsonl."""
    test_file: Operational[Path | None] = None
    """File of held-out rows; by default a fraction of `file` is held out."""
    test_share: float = Field(0.2, gt=0, lt=1)
    """Fraction of the rows held out, selected by a hash of the row."""
    validation_file: Operational[Path | None] = None
    """File of rows that choose the best step of the training; by default a fraction of the training
    rows does.
    """
    validation_share: float = Field(0.05, ge=0, lt=1)
    """Fraction of the training rows, selected by a hash of the row, that is not trained on but
    chooses the best step of the training; 0 takes the last step.
    """
    target: str | None = None
    """Column to predict (table)."""
    ignore: tuple[str, ...] = ()
    """Columns that are not features (table)."""
    few_values: PositiveInt = 20
    """Most distinct values of a column of whole numbers that count as categories (table)."""
    text: tuple[str, ...] = Field(("text",), min_length=1)
    """Columns of the text, joined by newlines, such as title and body (sequences)."""
    label: str = "label"
    """Column of the labels (sequences)."""
    label_index: int = -1
    """Index of the label to predict where labels are lists (sequences)."""
    vocabulary: int = Field(4000, ge=257)
    """Size of the byte-level BPE vocabulary trained on the texts."""
    min_documents: PositiveInt = 40
    """Fewest documents of a package; smaller ones are left out (builtin)."""
    samples: PositiveInt = 20_000
    """Samples to train on (random)."""
    held_out: PositiveInt = 2_000
    """Held-out samples (random)."""
    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of the samples and the rule (random)."""

    @model_validator(mode="after")
    def _whole(self) -> TransformerDataSettings:
        check_files(self, ["table", "sequences"], "file", "test_file", "validation_file")
        if self.source == "table" and self.target is None:
            raise ValueError("source = table: target must name the column to predict")
        return self


class NgramSettings(Settings):
    """The branch on n-grams of a text, those of words and those of bytes."""

    words: int = Field(2, ge=0)
    """Longest n-grams of words; 0 for none."""
    bytes: tuple[int, int] | None = (3, 5)
    """Shortest and longest n-grams of the bytes of the words, from 1 to 7; null for none."""
    most: PositiveInt = 65_536
    """Number of n-grams that the branch knows at most: those that occur in the most training texts,
    and in two or more.
    """
    width: PositiveInt = 64
    """Width of the vector of an n-gram."""
    share: float = Field(0.9, gt=0, lt=1)
    """Weight of the n-grams in the output; the rest is that of the encoder."""

    @model_validator(mode="after")
    def _some(self) -> Self:
        if self.bytes and not 1 <= self.bytes[0] <= self.bytes[1] <= _LONGEST_BYTES:
            raise ValueError(
                f"bytes = {list(self.bytes)}: give the shortest and the longest n-grams, from 1 to "
                f"{_LONGEST_BYTES}"
            )
        if not (self.words or self.bytes):
            raise ValueError("words = 0 and bytes = null leave no n-grams; give one of them")
        return self


class EncoderSettings(Settings):
    """Size of the transformer encoder."""

    length: PositiveInt = 128
    """Longest sequence in tokens; longer ones are cut."""
    hidden: PositiveInt = 256
    """Width of the hidden states."""
    layers: PositiveInt = 3
    """Number of encoder layers."""
    heads: PositiveInt | None = None
    """Number of attention heads; by default one per 64 of the width."""
    feed_forward: PositiveInt | None = None
    """Hidden width of the feed-forward block; by default 4 x hidden."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout rate of attention weights and block outputs."""
    ngrams: NgramSettings | None = None
    """A linear branch on n-grams next to the encoder; by default none (texts)."""

    @model_validator(mode="after")
    def _whole_heads(self) -> Self:
        if self.hidden % self.head_count:
            raise ValueError(f"heads={self.heads} must divide hidden={self.hidden}")
        return self

    @property
    def head_count(self) -> int:
        """The number of attention heads; by default the most of width 64 or more that fit."""
        if self.heads is not None:
            return self.heads
        most = max(1, self.hidden // _HEAD_WIDTH)
        return next(heads for heads in range(most, 0, -1) if self.hidden % heads == 0)

    @property
    def feed_forward_width(self) -> int:
        """The hidden width of the feed-forward block."""
        return self.feed_forward or 4 * self.hidden


class TransformerSettings(EncoderSettings):
    """Input, size and output of the transformer.

    The input is sequences (``vocabulary``, ``length``) or tables (``numeric``, ``categories``).
    """

    vocabulary: int = Field(0, ge=0)
    """Number of token ids, including the padding 0; 0 for tables."""
    numeric: int = Field(0, ge=0)
    """Number of numeric features of a table."""
    categories: tuple[Annotated[int, Field(gt=0)], ...] = ()
    """Number of values of each categorical feature of a table."""
    kind: Literal["classification", "regression"] = "classification"
    """Kind of prediction."""
    outputs: PositiveInt = 2
    """Number of classes, or 1 for a regression."""

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        table = self.numeric + len(self.categories)
        if bool(self.vocabulary) == bool(table):
            raise ValueError(
                "give either vocabulary (the input is sequences) or numeric and categories "
                f"(tables): vocabulary={self.vocabulary}, and there are {table} features"
            )
        if self.ngrams is not None and not self.vocabulary:
            raise ValueError("ngrams are those of sequences; leave it out for a table")
        if self.vocabulary == 1:
            raise ValueError("vocabulary=1 is only the padding; it must also count the tokens")
        if (self.outputs == 1) != (self.kind == "regression"):
            raise ValueError(
                f"outputs={self.outputs} does not fit kind={self.kind}: a regression has 1 output, "
                "a classification one for each of at least 2 classes"
            )
        return self

    @property
    def tokens(self) -> int:
        """Tokens of a sample in the encoder: [CLS], and the longest sequence or a row."""
        return 1 + (self.length if self.vocabulary else self.numeric + len(self.categories))


class TransformerModelSettings(EncoderSettings):
    """The transformer. Its input and output sizes follow from the data unless they are random."""

    vocabulary: int | None = Field(None, ge=0)
    """Number of token ids (random)."""
    numeric: int | None = Field(None, ge=0)
    """Number of numeric features (random)."""
    categories: tuple[int, ...] | None = None
    """Number of values of each categorical feature (random)."""
    kind: Literal["classification", "regression"] | None = None
    """Kind of prediction; by default it follows from the target."""
    outputs: PositiveInt | None = None
    """Number of classes, or 1 for a regression (random)."""

    def completed(self, sizes: Mapping[str, Any]) -> TransformerSettings:
        """Return the transformer's settings, completed by the sizes of the data.

        Raises:
            ConfigError: a given value contradicts the data, or values do not fit together.

        """
        given = self.model_dump(exclude_none=True)
        wrong = [
            f"model.{key} = {given[key]}: the data have {value}; leave it out"
            for key, value in sizes.items()
            if key in given and given[key] != value
        ]
        if wrong:
            raise ConfigError("\n".join(wrong))
        try:
            return TransformerSettings.model_validate({**given, **sizes})
        except ValidationError as error:
            reasons = [str(item["msg"]).removeprefix("Value error, ") for item in error.errors()]
            raise ConfigError(f"model: {'; '.join(reasons)}") from error


class TrainerSettings(Settings):
    """Settings of the transformer trainer."""

    data: TransformerDataSettings = TransformerDataSettings()
    """Training and held-out data."""
    model: TransformerModelSettings = TransformerModelSettings()
    """Size of the transformer."""
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
    """The training; an optimizer step takes 32 samples on every machine."""
