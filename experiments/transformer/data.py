"""Data of the trainer: tables, labeled texts or docstrings, split and described."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from experiments.common.blocks import Part, held_out, text_hashes, validation
from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import docstring_records
from experiments.common.corpora.files import check_known, checksum, is_text, read_rows, text_column
from experiments.transformer.settings import TransformerDataSettings
from raypipe import fingerprint

Kind = Literal["classification", "regression"]

_TARGET = "target"
#: largest standardized value; beyond it the file is corrupt, and fp32 near its limit
_MOST = 1e30


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


Column = Numeric | Category


@dataclass(frozen=True)
class Rows:
    """The rows of a split.

    Attributes:
        inputs: a column ``text``, or the columns of a table.
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
        columns: features of a table; none of texts.
        vocabulary: number of token ids of texts.
        notes: remarks for the user.

    """

    train: Rows
    held_out: Rows
    target: PredictionTarget
    validation: NDArray[np.bool_]
    identity: Mapping[str, Any]
    columns: tuple[Column, ...] = ()
    vocabulary: int = 0
    notes: tuple[str, ...] = ()

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


def load(settings: TransformerDataSettings, kind: Kind | None) -> Splits | None:
    """Return the data of the settings; None for samples that are drawn at random.

    Rows are held out, and chosen for validation, by a hash of the row, of the text, or of a
    docstring's name, unless other files give them.

    Raises:
        CorpusError: a file is corrupt, a column is missing or cannot be used, or as
            :func:`make_target`.

    """
    if settings.source == "random":
        return None
    notes: list[str] = []
    others: dict[str, pa.Table] = {}
    path, target, few = Path(settings.file or ""), _TARGET, None
    if settings.source == "builtin":
        train, names = _docstrings(settings)
        identity: dict[str, Any] = {"content": fingerprint([*train.to_pydict().values()])}
        source, described, hashes = "the standard library", "the package", text_hashes(names)
    else:
        keys = ("file", "test_file", "validation_file")
        paths = {key: given for key in keys if (given := getattr(settings, key)) is not None}
        identity = {key: checksum(given, f"data.{key}") for key, given in paths.items()}
        read = _read_table if settings.source == "table" else _read_sequences
        others = {key: read(given, settings, notes) for key, given in paths.items()}
        train = others.pop("file")
        for key, other in others.items():
            for name in train.column_names:
                check_known("column", name, other.column_names, str(paths[key]))
            others[key] = other.select(train.column_names)
        source = str(path)
        if settings.source == "table":
            target, few = str(settings.target), settings.few_values
            described = f"column {target!r}"
            values = pd.util.hash_pandas_object(train.to_pandas(), index=False)
            hashes = np.asarray(values, np.uint64)
        else:
            described = repr(settings.label)
            hashes = text_hashes(train["text"].to_pylist())
    test = others.get("test_file")
    if test is None:
        mask = held_out(hashes, settings.test_share, source, "data.test_share")
        train, test = train.filter(pa.array(~mask)), train.filter(pa.array(mask))
        hashes = hashes[~mask]
    train, chosen = _with_validation(train, others.get("validation_file"), hashes, settings, notes)
    parts = train, test
    made, *targets = make_target(train[target], test[target], kind, few, f"{source}: {described}")
    names = [name for name in train.column_names if name != target]
    splits = [Rows(part.select(names), values) for part, values in zip(parts, targets, strict=True)]
    columns: tuple[Column, ...] = ()
    vocabulary = settings.vocabulary
    if settings.source == "table":
        columns = tuple(_column(train[name], test[name], name, settings, path) for name in names)
        numeric = sum(isinstance(column, Numeric) for column in columns)
        notes.append(f"{numeric} numeric and {len(columns) - numeric} categorical columns")
        vocabulary = 0
    return Splits(
        *(splits[0], splits[1], made, chosen, identity, columns), vocabulary, tuple(notes)
    )


def _docstrings(settings: TransformerDataSettings) -> tuple[pa.Table, list[str]]:
    """Return docstrings of the standard library with their packages, and the docstrings' names.

    Each text is there once. Raises CorpusError if no package has enough documents.
    """
    texts: dict[str, tuple[str, str]] = {}
    for record in docstring_records():
        if record.text.strip():
            name = f"{record.module}:{record.qualname}"
            texts.setdefault(record.text, (name, record.package))
    sizes = Counter(package for _, package in texts.values())
    kept = [
        (text, package, name)
        for text, (name, package) in texts.items()
        if sizes[package] >= settings.min_documents
    ]
    if not kept:
        raise CorpusError(
            f"data.min_documents = {settings.min_documents}: the largest package has "
            f"{max(sizes.values(), default=0)}"
        )
    documents, packages, names = (list(column) for column in zip(*kept, strict=True))
    return pa.table({"text": pa.array(documents, pa.large_string()), _TARGET: packages}), names


def _read_table(path: Path, settings: TransformerDataSettings, notes: list[str]) -> pa.Table:
    """Return the columns of a table except those of ``data.ignore``."""
    del notes
    table = read_rows(path)
    for name in (str(settings.target), *settings.ignore):
        check_known("column", name, table.column_names, str(path))
    table = table.drop_columns(list(settings.ignore))
    if table.num_columns < 2:
        raise CorpusError(f"{path}: there is no column other than the target {settings.target!r}")
    for name in table.column_names:
        kind = table[name].type
        if pa.types.is_null(kind):
            raise CorpusError(f"{path}: column {name!r} has no value; name it in data.ignore")
        if not pa.types.is_dictionary(kind) and not _is_plain(kind):
            raise CorpusError(
                f"{path}: column {name!r} is {kind}; give text, numbers or truth values, or name "
                "it in data.ignore"
            )
    return table


def _read_sequences(path: Path, settings: TransformerDataSettings, notes: list[str]) -> pa.Table:
    """Return ``text`` and ``target``; leave out and count rows without a label."""
    rows = read_rows(path)
    check_known("column", settings.label, rows.column_names, str(path))
    # a missing title or body is left out; a row without any text is refused below
    texts, *more = (pc.fill_null(text_column(rows, name, path), "") for name in settings.text)
    for column in more:
        joined = pc.binary_join_element_wise(texts, column, pa.scalar("\n", pa.large_string()))
        texts = pc.utf8_trim(joined, "\n")
    labels = rows[settings.label]
    if pa.types.is_nested(labels.type):
        texts, labels = _picked(texts, labels, path, settings, notes)
    empty = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), True)
    if (row := pc.index(empty, True).as_py()) >= 0:
        raise CorpusError(f"{path}: the text in row {row}, counted from 0, is empty; leave it out")
    return pa.table({"text": texts, _TARGET: labels})


def _picked(
    texts: pa.ChunkedArray,
    labels: pa.ChunkedArray,
    path: Path,
    settings: TransformerDataSettings,
    notes: list[str],
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return the rows with labels, and the element ``data.label_index`` of each."""
    index, lists = settings.label_index, labels.to_pylist()
    needed = index + 1 if index >= 0 else -index
    for row, label in enumerate(lists):
        if label is None or not isinstance(label, list) or 0 < len(label) < needed:
            raise CorpusError(
                f"{path}: the label in row {row}, counted from 0, is {label!r}, which has no "
                f"element data.label_index = {index}"
            )
    labeled = pa.array([bool(label) for label in lists])
    if number := labeled.false_count:
        notes.append(f"{path.name}: {number} rows without a label left out")
    chosen = pa.chunked_array([pa.array([label[index] for label in lists if label])])
    return texts.filter(labeled), chosen


def _with_validation(
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
    texts = [_as_text(part, source) for part in parts]
    names = sorted({*texts[0].unique().to_pylist(), *texts[1].unique().to_pylist()})
    if len(texts[0].unique()) < 2:
        raise CorpusError(f"{source} has only one class in the training rows: {names[:1]}")
    indices = [
        pc.index_in(text, pa.array(names, pa.large_string())).to_numpy().astype(np.int64)
        for text in texts
    ]
    return PredictionTarget(kind, tuple(names)), indices[0], indices[1]


def _as_text(values: pa.ChunkedArray, source: str) -> pa.ChunkedArray:
    """Return plain values as text. Raises CorpusError for nested types and times."""
    kind = values.type.value_type if pa.types.is_dictionary(values.type) else values.type
    if not _is_plain(kind):
        raise CorpusError(f"{source} is {kind}; give text, numbers or truth values")
    return values.cast(kind).cast(pa.large_string())


def _is_plain(kind: pa.DataType) -> bool:
    """Whether values of the type are text, numbers or truth values."""
    return bool(pa.types.is_boolean(kind)) or _is_number(kind) or is_text(kind)


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


def encode_rows(columns: Sequence[Column], rows: pa.Table) -> pa.Table:
    """Return rows as the model takes them.

    A missing number is the mean, which is 0 after standardization; a column whose training rows
    have missing values also gets an indicator.

    Returns:
        ``numeric``, float32, and ``categories``, int32, as lists of fixed size, each if there is
        such a column.

    """
    numeric, categories, indicators = [], [], []
    for column in columns:
        values = rows[column.name]
        if isinstance(column, Numeric):
            numbers = _numbers(values)
            scaled = (numbers - column.mean) / column.deviation
            numeric.append(np.nan_to_num(scaled, nan=0.0).astype(np.float32))
            if column.indicator:
                indicators.append(np.isnan(numbers).astype(np.int32))
        else:
            categories.append(_indices(column, values))
    encoded = {}
    for name, parts in (("numeric", numeric), ("categories", [*categories, *indicators])):
        if parts:
            flat = pa.array(np.stack(parts, 1).reshape(-1))
            encoded[name] = pa.FixedSizeListArray.from_arrays(flat, len(parts))
    return pa.table(encoded)


def _column(
    train: pa.ChunkedArray,
    test: pa.ChunkedArray,
    name: str,
    settings: TransformerDataSettings,
    path: Path,
) -> Column:
    source = f"{path}: column {name!r}"
    if len(train) == train.null_count:
        raise CorpusError(f"{source} has no value in the training rows; name it in data.ignore")
    many = pa.types.is_integer(train.type) and (
        pc.count_distinct(train).as_py() > settings.few_values
    )
    if pa.types.is_floating(train.type) or many:
        if not (pa.types.is_floating(test.type) or pa.types.is_integer(test.type)):
            raise CorpusError(f"{source} is a number, but {test.type} in data.test_file")
        return _standardized(_numbers(train), _numbers(test), name, source)
    _as_text(test, source)
    values = _as_text(train, source).drop_null().unique().to_pylist()
    return Category(name, tuple(sorted(values)))


def _standardized(
    train: NDArray[np.float64], test: NDArray[np.float64], name: str, source: str
) -> Numeric:
    for part in (train, test):
        if np.isinf(part).any():
            row = int(np.isinf(part).argmax())
            raise CorpusError(f"{source} is {part[row]} in row {row}; give finite numbers")
    known = train[~np.isnan(train)]
    if not len(known):
        raise CorpusError(f"{source} has no value in the training rows; name it in data.ignore")
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(known.mean()), float(known.std()) or 1.0
        most = np.nanmax(np.abs((np.concatenate((train, test)) - mean) / deviation))
    if not (np.isfinite([mean, deviation]).all() and most < _MOST):
        raise CorpusError(f"{source} has numbers too far apart to be standardized; correct them")
    return Numeric(name, mean, deviation, bool(np.isnan(train).any()))


def _numbers(values: pa.ChunkedArray) -> NDArray[np.float64]:
    """Return values with NaN for missing ones."""
    numbers: NDArray[np.float64] = values.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def _indices(column: Category, values: pa.ChunkedArray) -> NDArray[np.int32]:
    texts = _as_text(values, column.name)
    places = pc.fill_null(pc.index_in(texts, pa.array(column.values, pa.large_string())), -2)
    indices = places.to_numpy().astype(np.int32) + 2
    return np.where(texts.is_null().to_numpy(), 1, indices).astype(np.int32)
