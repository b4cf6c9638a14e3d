"""Training and held-out rows as they were read: inputs, targets, and how they are encoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from experiments.common.blocks import Part
from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.rows import validation
from experiments.transformer.settings import TransformerDataSettings

Kind = Literal["classification", "regression"]


@dataclass(frozen=True)
class PredictionTarget:
    """The target: classes, or a number that is standardized by the training rows."""

    kind: Kind
    classes: tuple[str, ...] = ()
    mean: float = 0.0
    deviation: float = 1.0


@dataclass(frozen=True)
class Numeric:
    """A numeric column and its standardization; ``indicator`` adds a feature for missing values."""

    name: str
    mean: float
    deviation: float
    indicator: bool


@dataclass(frozen=True)
class Category:
    """A categorical column: index 0 is an unknown value, 1 a missing one, 2 the first value."""

    name: str
    values: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of indices."""
        return 2 + len(self.values)


@dataclass(frozen=True)
class Rows:
    """The rows of a split.

    Attributes:
        inputs: a column ``text`` or ``tokens`` (a list of ids), or the columns of a table.
        target: class indices, int64, or standardized numbers, float32 ``[n]``.

    """

    inputs: pa.Table
    target: NDArray[Any]


@dataclass(frozen=True)
class Splits:
    """The rows of all splits.

    Attributes:
        train: rows to learn from, those of the validation part included.
        held_out: held-out rows.
        target: the target of both.
        validation: which of ``train`` choose the best step instead of being trained on, ``[n]``.
        identity: fingerprints of the content, never a path.
        columns: features of a table.
        vocabulary: number of token ids of sequences.
        notes: remarks for the user.

    """

    train: Rows
    held_out: Rows
    target: PredictionTarget
    validation: NDArray[np.bool_]
    identity: Mapping[str, Any]
    columns: tuple[Numeric | Category, ...] = ()
    vocabulary: int = 0
    notes: tuple[str, ...] = ()

    @property
    def has_texts(self) -> bool:
        """Whether the inputs are texts: not token ids, and not a table."""
        return not self.columns and "text" in self.train.inputs.column_names

    def split(self, name: Part) -> Rows:
        """Return a split; ``train`` are here the rows that the model is trained on."""
        if name == "held_out":
            return self.held_out
        mask = self.validation if name == "validation" else ~self.validation
        return Rows(self.train.inputs.filter(pa.array(mask)), self.train.target[mask])

    def sizes(self) -> dict[str, Any]:
        """Return the settings of the model that follow from the data."""
        numeric = [column for column in self.columns if isinstance(column, Numeric)]
        categories = [column.size for column in self.columns if isinstance(column, Category)]
        indicators = [2 for column in numeric if column.indicator]
        return {
            "vocabulary": self.vocabulary,
            "numeric": len(numeric),
            "categories": (*categories, *indicators),
            "kind": self.target.kind,
            "outputs": len(self.target.classes) or 1,
        }


def with_validation(
    train: pa.Table,
    given: pa.Table | None,
    hashes: NDArray[np.uint64],
    settings: TransformerDataSettings,
    notes: list[str],
) -> tuple[pa.Table, NDArray[np.bool_]]:
    """Return all rows to learn from, and which of them choose the best step.

    They are the rows of ``data.validation_file``, or a share of the training rows by their hashes.

    Raises:
        CorpusError: a column has another type in ``data.validation_file``.

    """
    if given is None:
        mask, remarks = validation(hashes, settings.validation_share)
        notes += remarks
        return train, mask
    try:
        rows = pa.concat_tables([train, given], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise CorpusError(f"{settings.validation_file}: differs from data.file: {error}") from error
    return rows, np.arange(len(rows)) >= len(train)


def make_target(
    train: pa.ChunkedArray,
    held_out: pa.ChunkedArray,
    kind: Kind | None,
    few: int | None,
    source: str,
) -> tuple[PredictionTarget, NDArray[Any], NDArray[Any]]:
    """Return the target, and its values in the training and the held-out rows.

    Args:
        train: values of the training rows.
        held_out: values of the held-out rows.
        kind: kind of prediction; by default text, truth values and whole numbers with few distinct
            values are classes, and other numbers are a regression.
        few: largest number of distinct values that counts as few; None for any number.
        source: name of the data in errors.

    Raises:
        CorpusError: a value is missing or not finite, the target is constant or has an unsupported
            type, or the kind does not suit it.

    """
    parts = [train, held_out]
    for part in parts:
        _check_complete(part, source)
    numeric = all(_is_number(part.type) for part in parts)
    if kind is None:
        whole = all(pa.types.is_integer(part.type) for part in parts)
        distinct = pc.count_distinct(train).as_py()
        classes = not numeric or (whole and (few is None or distinct <= few))
        kind = "classification" if classes else "regression"
    if kind == "regression":
        if not numeric:
            raise CorpusError(
                f"{source} is {train.type}, not a number; model.kind = regression needs numbers"
            )
        values = [part.to_numpy().astype(np.float64) for part in parts]
        target = PredictionTarget(kind, (), float(values[0].mean()), float(values[0].std()))
        if not target.deviation > 0:
            raise CorpusError(f"{source} is the same in all training rows; nothing to learn")
        scaled = [((v - target.mean) / target.deviation).astype(np.float32) for v in values]
        return target, scaled[0], scaled[1]
    texts = [as_text(part, source) for part in parts]
    names = sorted({*texts[0].unique().to_pylist(), *texts[1].unique().to_pylist()})
    if len(texts[0].unique()) < 2:
        raise CorpusError(f"{source} has only one class in the training rows: {names[:1]}")
    indices = [
        pc.index_in(text, pa.array(names, pa.large_string())).to_numpy().astype(np.int64)
        for text in texts
    ]
    return PredictionTarget(kind, tuple(names)), indices[0], indices[1]


def as_text(values: pa.ChunkedArray, source: str) -> pa.ChunkedArray:
    """Return plain values as text. Raises CorpusError for nested types and times."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not is_plain(kind):
        raise CorpusError(f"{source} is {kind}; give text, numbers or truth values")
    return values.cast(kind).cast(pa.large_string())


def is_plain(kind: pa.DataType) -> bool:
    """Whether values of the type are text, numbers or truth values."""
    return bool(pa.types.is_boolean(kind)) or _is_number(kind) or is_text(kind)


def is_text(kind: pa.DataType) -> bool:
    """Whether values of the type are text."""
    return bool(
        pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    )


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind))


def _check_complete(values: pa.ChunkedArray, source: str) -> None:
    """Refuse values that are missing, empty or not finite. Raises CorpusError."""
    missing = values.is_null(nan_is_null=True)
    if is_text(values.type):
        missing = pc.or_(missing, pc.fill_null(pc.equal(pc.utf8_trim_whitespace(values), ""), True))
    if (row := pc.index(missing, True).as_py()) >= 0:
        raise CorpusError(f"{source} is missing in row {row}, counted from 0; give it a value")
    if pa.types.is_floating(values.type):
        row = pc.index(pc.is_finite(values), False).as_py()
        if row >= 0:
            raise CorpusError(f"{source} is {values[row].as_py()} in row {row}; give a number")
