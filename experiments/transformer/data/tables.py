"""Tables: numeric and categorical columns, and rows encoded as the model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.rows import check_column, checksum, held_out, table_of
from experiments.transformer.data.splits import (
    Category,
    Kind,
    Numeric,
    Rows,
    Splits,
    as_text,
    is_plain,
    make_target,
    with_validation,
)
from experiments.transformer.settings import TransformerDataSettings

Column = Numeric | Category
#: largest standardized value; beyond it the file is corrupt, and fp32 near its limit
_MOST = 1e30


def load_table(settings: TransformerDataSettings, kind: Kind | None) -> Splits:
    """Return the rows of a file, split by a hash or with rows of other files.

    Raises:
        CorpusError: a file is corrupt, a column is missing or cannot be used, or as
            :func:`~experiments.transformer.data.splits.make_target`.

    """
    path, target = Path(settings.file or ""), str(settings.target)
    identity = {"file": checksum(path, "data.file")}
    table = table_of(path)
    for name in (target, *settings.ignore):
        check_column(table, name, path)
    table = table.drop_columns(list(settings.ignore))
    names = [name for name in table.column_names if name != target]
    if not names:
        raise CorpusError(f"{path}: there is no column other than the target {target!r}")
    _check_columns(table, path)
    others: dict[str, pa.Table] = {}
    for key in ("test_file", "validation_file"):
        if (other := getattr(settings, key)) is not None:
            identity[key] = checksum(other, f"data.{key}")
            rows = table_of(other)
            for name in table.column_names:
                check_column(rows, name, other)
            others[key] = rows.select(table.column_names)
            _check_columns(others[key], other)
    hashes = np.asarray(pd.util.hash_pandas_object(table.to_pandas(), index=False), np.uint64)
    train, test, notes = table, others.get("test_file"), list[str]()
    if test is None:
        mask = held_out(hashes, settings.test_share, str(path), "data.test_share")
        train, test = table.filter(pa.array(~mask)), table.filter(pa.array(mask))
        hashes = hashes[~mask]
    given = others.get("validation_file")
    train, validation = with_validation(train, given, hashes, settings, notes)
    source, few = f"{path}: column {target!r}", settings.few_values
    made, *targets = make_target(train[target], test[target], kind, few, source)
    columns = tuple(_column(train[name], test[name], name, few, path) for name in names)
    splits = [
        Rows(part.select(names), values)
        for part, values in zip((train, test), targets, strict=True)
    ]
    numeric = sum(isinstance(column, Numeric) for column in columns)
    notes.append(f"{numeric} numeric and {len(columns) - numeric} categorical columns")
    parts, remarks = (splits[0], splits[1]), tuple(notes)
    return Splits(*parts, made, validation, identity, columns, notes=remarks)


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
    train: pa.ChunkedArray, test: pa.ChunkedArray, name: str, few: int, path: Path
) -> Column:
    source = f"{path}: column {name!r}"
    if len(train) == train.null_count:
        raise CorpusError(f"{source} has no value in the training rows; name it in data.ignore")
    whole = pa.types.is_integer(train.type)
    if pa.types.is_floating(train.type) or (whole and pc.count_distinct(train).as_py() > few):
        if not (pa.types.is_floating(test.type) or pa.types.is_integer(test.type)):
            raise CorpusError(f"{source} is a number, but {test.type} in data.test_file")
        return _standardized(_numbers(train), _numbers(test), name, source)
    as_text(test, source)
    values = as_text(train, source).drop_null().unique().to_pylist()
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
    texts = as_text(values, column.name)
    places = pc.fill_null(pc.index_in(texts, pa.array(column.values, pa.large_string())), -2)
    indices = places.to_numpy().astype(np.int32) + 2
    return np.where(texts.is_null().to_numpy(), 1, indices).astype(np.int32)


def _check_columns(table: pa.Table, path: Path) -> None:
    """Refuse columns that are empty, or not text, numbers or truth values. Raises CorpusError."""
    for name in table.column_names:
        kind = table[name].type
        if pa.types.is_null(kind):
            raise CorpusError(f"{path}: column {name!r} has no value; name it in data.ignore")
        if not pa.types.is_dictionary(kind) and not is_plain(kind):
            raise CorpusError(
                f"{path}: column {name!r} is {kind}; give text, numbers or truth values, or name "
                "it in data.ignore"
            )
