"""Tables: which columns are numbers, which are categories, and rows as the model takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from experiments.transformer.data import (
    Category,
    Data,
    Kind,
    Numeric,
    Split,
    as_text,
    is_text,
    make_target,
)
from experiments.transformer.settings import DataSettings
from raypipe.datasets.corpus import CorpusError
from raypipe.datasets.rows import check_column, checksum, held_out, table_of

Column = Numeric | Category
#: a standardised value beyond it is a damaged file, and nears what single precision holds
_MOST = 1e30


def load_table(settings: DataSettings, kind: Kind | None) -> Data:
    """A file of rows, and the file or the share of it that is evaluated on.

    Raises:
        CorpusError: a damaged file, a column that is missing or cannot be used, or what
            :func:`~experiments.transformer.data.make_target` raises.

    """
    path, target = Path(settings.file or ""), str(settings.target)
    identity = {"file": checksum(path, "data.file")}
    table = table_of(path)
    for name in (target, *settings.ignore):
        check_column(table, name, path)
    table = table.drop_columns(list(settings.ignore))
    names = [name for name in table.column_names if name != target]
    if not names:
        raise CorpusError(f"{path}: there is no column beside the target {target!r}")
    if settings.test_file is None:
        _check_flat(table, path)
        hashed = pd.util.hash_pandas_object(table.to_pandas(), index=False)
        hashes = np.asarray(hashed, np.uint64)
        mask = held_out(hashes, settings.test_share, str(path), "data.test_share")
        train, test = table.filter(pa.array(~mask)), table.filter(pa.array(mask))
    else:
        identity["test_file"] = checksum(settings.test_file, "data.test_file")
        train, test = table, table_of(settings.test_file)
        for name in table.column_names:
            check_column(test, name, settings.test_file)
        test = test.select(table.column_names)
        _check_flat(train, path)
        _check_flat(test, settings.test_file)
    source = f"{path}: column {target!r}"
    few = settings.few_values
    made, *targets = make_target(train[target], test[target], kind, few, source)
    columns = tuple(_column(train[name], test[name], name, few, path) for name in names)
    splits = [
        Split(part.select(names), rows) for part, rows in zip((train, test), targets, strict=True)
    ]
    numeric = sum(isinstance(column, Numeric) for column in columns)
    note = f"{numeric} numeric and {len(columns) - numeric} categorical columns"
    return Data(splits[0], splits[1], made, identity, columns, notes=(note,))


def encode_rows(columns: Sequence[Column], rows: pa.Table) -> pa.Table:
    """Rows as the model takes them.

    A missing number is the mean, which standardised is 0, and an indicator where training rows have
    missing ones.

    Returns:
        ``numeric``, float32, and ``categories``, int32, as lists of fixed size; a kind of which
        there is no column is left out.

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
        return _standardised(_numbers(train), _numbers(test), name, source)
    as_text(test, source)
    values = as_text(train, source).drop_null().unique().to_pylist()
    return Category(name, tuple(sorted(values)))


def _standardised(
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
        raise CorpusError(f"{source} has numbers too far apart to be standardised; correct them")
    return Numeric(name, mean, deviation, bool(np.isnan(train).any()))


def _numbers(values: pa.ChunkedArray) -> NDArray[np.float64]:
    """Values with NaN where they are missing."""
    numbers: NDArray[np.float64] = values.cast(pa.float64(), safe=False).to_numpy()
    return numbers


def _indices(column: Category, values: pa.ChunkedArray) -> NDArray[np.int32]:
    texts = as_text(values, column.name)
    found = pc.fill_null(pc.index_in(texts, pa.array(column.values, pa.large_string())), -2)
    known = found.to_numpy().astype(np.int32) + 2
    return np.where(texts.is_null().to_numpy(), 1, known).astype(np.int32)


def _check_flat(table: pa.Table, path: Path) -> None:
    """Raises CorpusError: a column whose values are no text, number or truth value."""
    for name in table.column_names:
        kind = table[name].type
        if pa.types.is_null(kind):
            raise CorpusError(f"{path}: column {name!r} has no value; name it in data.ignore")
        if not (
            pa.types.is_dictionary(kind) or pa.types.is_boolean(kind) or is_text(kind)
        ) and not (pa.types.is_integer(kind) or pa.types.is_floating(kind)):
            raise CorpusError(
                f"{path}: column {name!r} is {kind}; give text, numbers or truth values, or name "
                "it in data.ignore"
            )
