"""Corpora from text: tokenized by scikit-learn, empty documents dropped and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from sklearn.feature_extraction.text import CountVectorizer

from raypipe.datasets.corpus import Corpus, CorpusError, make_corpus
from raypipe.datasets.files import (
    check_known,
    check_name,
    find_file,
    json_objects,
    open_text,
    reading,
)
from raypipe.storage import parquet

#: Runs of at least three letters: parts of identifiers count as words, numbers do not.
TOKEN_PATTERN = r"[^\W\d_]{3,}"

TableFormat = Literal["jsonl", "csv", "parquet"]


@dataclass(frozen=True)
class Tokenisation:
    """Which words make the vocabulary.

    Attributes:
        max_features: keep this many words, the most frequent first, ties in alphabetical order.
        min_df: drop words in fewer documents (a number, or a share of the documents).
        max_df: drop words in more documents (a number, or a share of the documents).
        stop_words: scikit-learn's English list, or ``None`` for no list.

    """

    max_features: int = 5000
    min_df: int | float = 5
    max_df: int | float = 0.5
    stop_words: Literal["english"] | None = "english"

    def __post_init__(self) -> None:
        if self.max_features < 1:
            raise CorpusError(f"max_features is {self.max_features}; allowed is 1 or more")


def load_text(directory: Path, name: str, tokenisation: Tokenisation | None = None) -> Corpus:
    """The corpus in a text file or a folder of them.

    ``directory/<name>.txt`` or ``.txt.gz`` holds a document a line; in the folder
    ``directory/<name>`` each ``.txt`` file, subfolders included, is a document.

    Raises:
        CorpusError: neither exists, bytes that are not UTF-8, or no word is left.

    """
    check_name(name)
    folder = directory / name
    if name and folder.is_dir():
        return vectorise(name, _folder_texts(folder), str(folder), tokenisation)
    path = find_file(directory, name, [("", ".txt"), ("", ".txt.gz")])
    return vectorise(name, _line_texts(path), str(path), tokenisation)


def load_table(
    directory: Path,
    name: str,
    form: TableFormat,
    column: str = "text",
    tokenisation: Tokenisation | None = None,
) -> Corpus:
    """The corpus in one column of ``directory/<name>.<form>``, a document a row.

    JSONL and CSV may be ``.gz``. A missing value is an empty document.

    Raises:
        CorpusError: no such file or column (those that exist are named), a damaged file, values
            that are no text, or no word is left.

    """
    readers: dict[TableFormat, Callable[[Path, str], Iterator[str]]] = {
        "jsonl": _jsonl_texts,
        "csv": _csv_texts,
        "parquet": _parquet_texts,
    }
    check_known("format", form, list(readers), str(directory))
    forms = [("", f".{form}")] if form == "parquet" else [("", f".{form}"), ("", f".{form}.gz")]
    path = find_file(directory, name, forms)
    return vectorise(name, readers[form](path, column), str(path), tokenisation)


def vectorise(
    name: str, texts: Iterable[str], source: str, tokenisation: Tokenisation | None = None
) -> Corpus:
    """Count the words of texts; documents without a word of the vocabulary are dropped.

    Args:
        name: what results call it.
        texts: the documents, read once.
        source: what error messages name.
        tokenisation: which words count.

    Raises:
        CorpusError: no word is left, or settings scikit-learn refuses.

    """
    settings = tokenisation or Tokenisation()
    arguments = {k: v for k, v in asdict(settings).items() if k != "max_features"}
    vectoriser = CountVectorizer(token_pattern=TOKEN_PATTERN, dtype=np.int64, **arguments)
    try:
        counts = vectoriser.fit_transform(texts)
    except CorpusError:
        raise
    except ValueError as error:
        raise CorpusError(
            f"{source}: no corpus with {settings}: {error}; "
            "lower min_df, raise max_df or give more documents"
        ) from error
    # Not CountVectorizer's own limit: how it breaks ties depends on the processor's sort.
    totals = np.asarray(counts.sum(axis=0)).ravel()
    kept = np.sort(np.argsort(-totals, kind="stable")[: settings.max_features])
    counts = counts[:, kept]
    filled = np.diff(counts.indptr) > 0
    return make_corpus(
        name,
        counts[filled],
        source=source,
        vocabulary=[str(word) for word in vectoriser.get_feature_names_out()[kept]],
        dropped_documents=int((~filled).sum()),
    )


def _folder_texts(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.txt")):
        with reading(path, "UTF-8 text"), open_text(path) as file:
            text = file.read()
        yield text


def _line_texts(path: Path) -> Iterator[str]:
    with reading(path, "UTF-8 text, a document a line"), open_text(path) as file:
        yield from file


def _jsonl_texts(path: Path, column: str) -> Iterator[str]:
    for place, record in json_objects(path):
        check_known("column", column, list(record), place)
        yield _text(record[column], column, place)


def _csv_texts(path: Path, column: str) -> Iterator[str]:
    with reading(path, "CSV with a header"):
        check_known("column", column, list(pd.read_csv(path, nrows=0).columns), str(path))
        # usecols first, then as strings: "NA" and "1.0" are words of a document, not values
        chunks = pd.read_csv(
            path, usecols=[column], dtype=str, keep_default_na=False, chunksize=10_000
        )
        with chunks:
            for chunk in chunks:
                yield from chunk[column].fillna("")


def _parquet_texts(path: Path, column: str) -> Iterator[str]:
    with reading(path, "Parquet"), pq.ParquetFile(path) as file:
        check_known("column", column, file.schema_arrow.names, str(path))
        row = 0
        for batch in file.iter_batches(columns=[column]):
            for value in batch.column(0).to_pylist():
                yield _text(value, column, f"{path}, row {row}")
                row += 1
        parquet.check_rows(file, row)


def _text(value: object, column: str, place: str) -> str:
    """The document in a cell; a missing one is empty."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise CorpusError(
            f"{place}: column {column!r} holds {type(value).__name__}, not text; name another one"
        )
    return value
