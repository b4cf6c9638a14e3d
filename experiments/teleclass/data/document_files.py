"""Readers of document and gold-label files, block by block."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq
from numpy.typing import NDArray

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.files import check_known, reading
from experiments.teleclass.data.blocks import (
    BLOCK,
    Columns,
    DocumentBlock,
    Labels,
    chunks,
    flat_labels,
    ids_in,
    join_texts,
)
from experiments.teleclass.data.line_files import malformed, numbered_lines
from raypipe.store import parquet

#: bytes of CSV parsed at a time; no document may be longer
CSV_BLOCK = 2**24


def unit(path: Path) -> str:
    """Return the unit of places in a file: lines from 1, or rows from 0."""
    return "row" if path.name.removesuffix(".gz").endswith((".csv", ".parquet")) else "line"


def document_blocks(path: Path, columns: Columns) -> Iterator[DocumentBlock]:
    """Yield the documents of a file in the format of its suffix.

    ``.jsonl``, ``.csv`` (each plain or ``.gz``) and ``.parquet`` are tables: a document's text is
    its non-empty text columns, joined by newlines; without an id column, row numbers from 0 are
    the ids. ``.txt``, plain or ``.gz``, has lines ``id<TAB>text``.

    Raises:
        CorpusError: the file does not exist, is corrupt, has an unknown suffix or lacks a column,
            a value has another type, or a document has no id.

    """
    readers = {
        ".jsonl": _jsonl_blocks,
        ".csv": _csv_blocks,
        ".txt": _txt_blocks,
        ".parquet": _parquet_blocks,
    }
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; name a file of documents")
    if not columns.texts:
        raise CorpusError(f"{path}: no text column is given; name at least one")
    for suffix, reader in readers.items():
        if path.name.removesuffix(".gz").endswith(suffix):
            return reader(path, columns)
    raise CorpusError(
        f"{path}: unknown suffix; allowed are .jsonl, .csv, .txt, each also with .gz, and .parquet"
    )


def gold_blocks(path: Path) -> Iterator[DocumentBlock]:
    """Yield the lines ``document id<TAB>class id,class id,...`` of a file, plain or ``.gz``.

    Raises:
        CorpusError: the file is corrupt, or a line has another format.

    """
    form = "document id<TAB>class id,class id,..."
    for chunk in chunks(numbered_lines(path, form)):
        numbers, ids, listed = _split_lines(path, chunk, form)
        for (number, line), classes in zip(chunk, listed, strict=True):
            if "\t" in classes:  # two lines in one
                raise malformed(path, number, line, form)
        yield DocumentBlock(numbers, ids, None, flat_labels([ids_in(text) for text in listed]))


def _txt_blocks(path: Path, _: Columns) -> Iterator[DocumentBlock]:
    form = "id<TAB>text"
    for chunk in chunks(numbered_lines(path, form)):
        numbers, ids, texts = _split_lines(path, chunk, form)
        nothing = flat_labels([None] * len(texts))
        yield DocumentBlock(numbers, ids, pa.array(texts, pa.large_string()), nothing)


def _split_lines(
    path: Path, chunk: list[tuple[int, str]], form: str
) -> tuple[NDArray[np.int64], pa.Array, list[str]]:
    """Return the numbers of lines, and their parts before and after the first tab."""
    ids, rest = [], []
    for number, line in chunk:
        id_, tab, right = line.partition("\t")
        if not tab or not id_.strip():
            raise malformed(path, number, line, form)
        ids.append(id_.strip())
        rest.append(right)
    numbers = np.array([number for number, _ in chunk], dtype=np.int64)
    return numbers, pa.array(ids, pa.large_string()), rest


def _jsonl_blocks(path: Path, columns: Columns) -> Iterator[DocumentBlock]:
    form = "an object each"
    start = 0
    has_id = False
    with reading(path, "JSONL, an object a line"):
        for chunk in chunks(numbered_lines(path, form)):
            places = [f"{path}, line {number}" for number, _ in chunk]
            records = [_record(line, place) for (_, line), place in zip(chunk, places, strict=True)]
            has_id = columns.id in records[0] if start == 0 else has_id
            parts: list[list[str | None]] = [[] for _ in columns.texts]
            ids, labels = [], []
            for row, (record, place) in enumerate(zip(records, places, strict=True), start):
                for column, part in zip(columns.texts, parts, strict=True):
                    check_known("column", column, list(record), place)
                    part.append(_json_text(record[column], column, place))
                ids.append(_json_id(record.get(columns.id), place) if has_id else str(row))
                value = None if columns.labels is None else record.get(columns.labels)
                labels.append(None if value is None else _json_ids(value, columns.labels, place))
            yield DocumentBlock(
                np.array([number for number, _ in chunk], dtype=np.int64),
                pa.array(ids, pa.large_string()),
                join_texts([pa.array(part, pa.large_string()) for part in parts]),
                flat_labels(labels),
            )
            start += len(chunk)


def _record(line: str, place: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair is not text
    except ValueError as error:
        raise CorpusError(f"{place}: not JSON: {error}; give an object a line") from error
    if not isinstance(record, dict):
        raise CorpusError(f"{place}: expected an object, got {type(record).__name__}")
    return record


def _json_text(value: object, column: str, place: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise _not_text(place, column, type(value).__name__)
    return value


def _json_id(value: object, place: str) -> str:
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise CorpusError(f"{place}: {value!r} is not a document id; give a text or a whole number")
    return str(value)


def _json_ids(value: object, column: str | None, place: str) -> list[str]:
    if not isinstance(value, list) or any(
        isinstance(item, bool) or not isinstance(item, int | str) for item in value
    ):
        raise CorpusError(f"{place}: {column!r} must be a list of class ids, got {value!r}")
    return [str(item) for item in value]


def _csv_blocks(path: Path, columns: Columns) -> Iterator[DocumentBlock]:
    reading_options = pa.csv.ReadOptions(block_size=CSV_BLOCK, use_threads=False)
    parsing = pa.csv.ParseOptions(newlines_in_values=True)
    start = 0
    with reading(path, "CSV with a header, UTF-8"):
        with pa.csv.open_csv(path, reading_options, parsing) as reader:
            wanted = _wanted(path, columns, reader.schema.names)
        types = dict.fromkeys(wanted, pa.large_string())
        # as text: by default "NA" and "1.0" would be converted to values
        conversion = pa.csv.ConvertOptions(column_types=types, include_columns=wanted)
        with pa.csv.open_csv(path, reading_options, parsing, conversion) as reader:
            for batch in reader:
                labels = flat_labels([None] * len(batch))
                if columns.labels in wanted:
                    labels = flat_labels(
                        [ids_in(text) for text in batch[columns.labels].to_pylist()]
                    )
                yield _table_block(path, batch, start, columns, labels)
                start += len(batch)


def _parquet_blocks(path: Path, columns: Columns) -> Iterator[DocumentBlock]:
    start = 0
    with reading(path, "Parquet"), pq.ParquetFile(path) as file:
        wanted = _wanted(path, columns, file.schema_arrow.names)
        for batch in file.iter_batches(BLOCK, columns=wanted):
            labels = flat_labels([None] * len(batch))
            if columns.labels in wanted:
                labels = _list_labels(path, columns.labels, batch[columns.labels])
            yield _table_block(path, batch, start, columns, labels)
            start += len(batch)
        parquet.check_rows(file, start)


def _wanted(path: Path, columns: Columns, names: Sequence[str]) -> list[str]:
    """Return the columns to read; refuse a file without the text columns."""
    for column in columns.texts:
        check_known("column", column, list(dict.fromkeys(names)), str(path))
    sought = dict.fromkeys([*columns.texts, columns.id, columns.labels])
    wanted = [column for column in sought if column is not None and column in names]
    for column in wanted:
        if names.count(column) > 1:
            raise CorpusError(f"{path}: several columns are named {column!r}; rename all but one")
    return wanted


def _table_block(
    path: Path, batch: pa.RecordBatch, start: int, columns: Columns, labels: Labels
) -> DocumentBlock:
    """Return a block of rows from ``start``."""
    rows = np.arange(start, start + len(batch), dtype=np.int64)
    numbers = pa.array(rows).cast(pa.large_string())
    ids = batch[columns.id] if columns.id in batch.schema.names else numbers
    if not (pa.types.is_integer(ids.type) or _is_text(ids.type)):
        raise CorpusError(
            f"{path}: column {columns.id!r} holds {ids.type}; document ids are texts or whole "
            "numbers"
        )
    ids = _checked(ids)
    bad = pc.equal(ids.fill_null(""), "").to_numpy(zero_copy_only=False)
    if bad.any():
        raise CorpusError(
            f"{path}, row {rows[bad.argmax()]}: the document has no id in column {columns.id!r}; "
            "give it one"
        )
    for column in columns.texts:
        if not _is_text(batch[column].type):
            raise _not_text(str(path), column, str(batch[column].type))
    texts = [_checked(batch[column]) for column in columns.texts]
    return DocumentBlock(rows, ids, join_texts(texts), labels)


def _list_labels(path: Path, column: str | None, lists: pa.Array) -> Labels:
    """Return the labels in a column of lists."""
    kind = lists.type
    if pa.types.is_null(kind):
        return flat_labels([None] * len(lists))
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        raise CorpusError(f"{path}: column {column!r} holds {kind}; give lists of class ids")
    counts = pc.list_value_length(lists).fill_null(-1).cast(pa.int64())
    values = _checked(lists.flatten()).fill_null("")
    return Labels(values, counts.to_numpy())


def _checked(values: pa.Array) -> pa.Array:
    """Return the values as text; check their UTF-8, which Arrow trusts files for."""
    texts = values.cast(pa.large_string())
    texts.validate(full=True)
    return texts


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    return pa.types.is_null(kind) or any(is_kind(kind) for is_kind in kinds)


def _not_text(place: str, column: str, kind: str) -> CorpusError:
    return CorpusError(f"{place}: column {column!r} holds {kind}, not text; name another one")
