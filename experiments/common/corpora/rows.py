"""Files of rows as Arrow tables, and the selection of held-out rows."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq
from numpy.typing import NDArray

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.files import check_known, json_objects, reading
from raypipe.store import parquet

#: bytes parsed at a time, which is also the maximum length of a row
_BLOCK = 2**26
_SHARES = 10_000
#: rows that a validation part must have: fewer hardly tell which step is the best one
_FEWEST_VALIDATION = 20


def checksum(path: Path, key: str) -> str:
    """Return the SHA-256 of the file that ``key`` names. Raises CorpusError if it is missing."""
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; see {key}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_npz(path: Path) -> bool:
    """Whether the suffix is that of numpy's ``.npz`` files."""
    return path.suffix == ".npz"


def read_rows(path: Path) -> pa.Table:
    """Return the rows of a ``.parquet``, ``.csv`` or ``.jsonl`` file, the latter two also ``.gz``.

    In CSV, an empty field or an unquoted ``NA`` is a missing value.

    Raises:
        CorpusError: the suffix is unknown, the file is damaged or has no row, or two columns have
            the same name.

    """
    name = path.name.removesuffix(".gz")
    with reading(path, "a table"):
        if path.name.endswith(".parquet"):
            with pq.ParquetFile(path) as file:  # read_table would look up columns by name
                table = parquet.read(file)
        elif name.endswith(".csv"):
            table = pa.csv.read_csv(
                path,
                pa.csv.ReadOptions(use_threads=False, block_size=_BLOCK),
                pa.csv.ParseOptions(newlines_in_values=True),
                pa.csv.ConvertOptions(strings_can_be_null=True, quoted_strings_can_be_null=False),
            )
        elif name.endswith(".jsonl"):
            for _ in json_objects(path):  # Arrow crashes on a null row
                pass
            with pa.input_stream(str(path), compression="detect") as stream:
                options = pa.json.ReadOptions(use_threads=False, block_size=_BLOCK)
                table = pa.json.read_json(stream, options)
        else:
            raise CorpusError(
                f"{path}: the suffix says nothing; allowed are .parquet, .npz, and .csv and "
                ".jsonl, also with .gz"
            )
        table.validate(full=True)  # Arrow does not verify that text is UTF-8
    if not len(table):
        raise CorpusError(f"{path}: there is no row")
    twice = [name for name, count in Counter(table.column_names).items() if count > 1]
    if twice:
        raise CorpusError(f"{path}: several columns are called {twice[0]!r}; rename them")
    return table


def read_arrays(path: Path) -> dict[str, NDArray[np.generic]]:
    """Return the arrays of an ``.npz`` file, all of the same length.

    Raises:
        CorpusError: the file is damaged or has no row, or the arrays differ in length.

    """
    with reading(path, "arrays"), np.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
        lengths = {name: len(array) if array.ndim else None for name, array in arrays.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise CorpusError(f"{path}: the arrays must have rows, equally many; they have {lengths}")
    return arrays


def table_of(path: Path) -> pa.Table:
    """Return the columns of a file; those of a matrix in ``.npz`` are ``name_0``, ``name_1``, ...

    Raises:
        CorpusError: see the readers; or an array has three dimensions.

    """
    if not is_npz(path):
        return read_rows(path)
    columns: dict[str, pa.Array] = {}
    for name, array in read_arrays(path).items():
        if array.ndim > 2:
            raise CorpusError(f"{path}: {name} has {array.ndim} dimensions; allowed are 1 and 2")
        parts = {name: array}
        if array.ndim == 2:
            parts = {f"{name}_{column}": array[:, column] for column in range(array.shape[1])}
        columns |= {key: pa.array(np.ascontiguousarray(value)) for key, value in parts.items()}
    return pa.table(columns)


def check_column(table: pa.Table, name: str, path: Path) -> None:
    """Reject a column that does not exist. Raises CorpusError."""
    check_known("column", name, table.column_names, str(path))


def text_hashes(texts: list[str]) -> NDArray[np.uint64]:
    """Return a hash of each text, the same on every platform."""
    digests = b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts)
    return np.frombuffer(digests, "<u8")


def held_out(hashes: NDArray[np.uint64], share: float, source: str, key: str) -> NDArray[np.bool_]:
    """Return which rows are held out; equal rows are on the same side.

    Args:
        hashes: of the rows.
        share: approximate fraction of the rows.
        source: the origin for error messages.
        key: the setting that holds the share.

    Raises:
        CorpusError: all rows are on one side.

    """
    mask: NDArray[np.bool_] = hashes % np.uint64(_SHARES) < round(share * _SHARES)
    if mask.all() or not mask.any():
        raise CorpusError(
            f"{source}: of {len(mask)} rows {int(mask.sum())} are held out; give more "
            f"rows, another {key} or a separate file"
        )
    return mask


def validation(hashes: NDArray[np.uint64], share: float) -> tuple[NDArray[np.bool_], list[str]]:
    """Return which training rows choose the best step, and a remark if there are too few.

    Equal rows are on the same side. The choice does not depend on that of :func:`held_out`.

    Args:
        hashes: of the training rows.
        share: approximate fraction of the rows.

    """
    mask: NDArray[np.bool_] = hashes // np.uint64(_SHARES) % np.uint64(_SHARES) < round(
        share * _SHARES
    )
    if _FEWEST_VALIDATION <= mask.sum() < len(mask):
        return mask, []
    note = (
        f"no validation part: data.validation_share = {share:g} of {len(mask)} training rows is "
        f"{mask.sum()}, and {_FEWEST_VALIDATION} are needed; the model of the last step is measured"
    )
    return np.zeros_like(mask), [note]
