"""Documents and reference summaries, from files or from Python's standard library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raypipe.datasets.corpus import CorpusError
from raypipe.datasets.docstrings import docstring_records
from raypipe.datasets.files import check_known
from raypipe.datasets.rows import checksum, held_out, read_rows, text_hashes
from raypipe.pipeline.identity import fingerprint

SHARE_KEY = "data.held_out_share"


@dataclass(frozen=True)
class Pairs:
    """Documents, and the summaries of each: one or several references."""

    documents: Sequence[str]
    summaries: Sequence[Sequence[str]]

    def __len__(self) -> int:
        return len(self.documents)

    def where(self, mask: NDArray[np.bool_]) -> Pairs:
        """Return the pairs where the mask is true."""
        rows = np.flatnonzero(mask).tolist()
        return Pairs([self.documents[i] for i in rows], [self.summaries[i] for i in rows])


@dataclass(frozen=True)
class Data:
    """Training pairs and held-out pairs; no document is in both.

    ``content`` is the fingerprint of what was read, ``notes`` are remarks for the user.
    """

    train: Pairs
    held_out: Pairs
    content: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def keys_read(settings: Any) -> list[str]:
    """Return the keys of the section ``data`` that :func:`load` uses for these settings."""
    keys = ["source", "files", "held_out_files"]
    keys += ["min_words"] if settings.source == "builtin" else ["document", "summary"]
    return keys if settings.held_out_files else [*keys, "held_out_share"]


def load(settings: Any) -> Data:
    """Return the pairs of the section ``data``, of which only :func:`keys_read` are used.

    Raises:
        CorpusError: a file is missing or damaged, a column is missing or does not hold text, a
            document or summary is empty, or one side would be empty.

    """
    if settings.source == "builtin":
        pairs = _docstrings(settings.min_words)
        texts = {"content": fingerprint([pairs.documents, pairs.summaries])}
        return _divide(pairs, settings.held_out_share, "the standard library", texts)
    columns = settings.document, settings.summary
    content: dict[str, Any] = {
        f"data.{key}": tuple(checksum(path, f"data.{key}") for path in getattr(settings, key))
        for key in ("files", "held_out_files")
        if getattr(settings, key)
    }
    train = _read(settings.files, content["data.files"], *columns)
    if not settings.held_out_files:
        names = ", ".join(str(path) for path in settings.files)
        return _divide(train, settings.held_out_share, names, content)
    further = _read(settings.held_out_files, content["data.held_out_files"], *columns)
    known = set(further.documents)
    leaked = np.array([document in known for document in train.documents])
    if leaked.all():
        raise CorpusError("data.files: every document is also in data.held_out_files")
    notes = [f"{leaked.sum()} held-out documents are left out of training"] if leaked.any() else []
    return Data(train.where(~leaked), further, content, tuple(notes))


def _divide(pairs: Pairs, share: float, source: str, content: Mapping[str, Any]) -> Data:
    """Hold out a share by a hash of the document: equal documents are on the same side."""
    mask = held_out(text_hashes(list(pairs.documents)), share, source, SHARE_KEY)
    return Data(pairs.where(~mask), pairs.where(mask), content)


def _docstrings(min_words: int) -> Pairs:
    """Return bodies of docstrings with their first lines, each body once.

    A first line is a summary if an empty line follows it (PEP 257, multi-line docstrings);
    otherwise it is the beginning of a sentence.
    """
    pairs: dict[str, str] = {}
    for record in docstring_records():
        _, _, rest = record.text.partition("\n")
        gap, _, _ = rest.partition("\n")
        body, summary = rest.strip(), record.summary.strip()
        if summary and not gap.strip() and len(body.split()) >= min_words:
            pairs.setdefault(body, summary)
    if not pairs:
        raise CorpusError(f"data.min_words = {min_words}: exceeds the length of every docstring")
    return Pairs([*pairs], [(summary,) for summary in pairs.values()])


@lru_cache(maxsize=2)  # the tokenize stage needs what was read to check the configuration
def _read(
    paths: Sequence[Path],
    checksums: tuple[str, ...],
    document: Sequence[str],
    summary: Sequence[str],
) -> Pairs:
    """Return the rows of all files; the checksums are the key of the cache.

    A list of documents is joined by spaces, a list of summaries is several references; empty
    parts of either are left out.
    """
    del checksums
    documents: list[str] = []
    summaries: list[list[str]] = []
    for path in paths:
        rows = read_rows(path)
        documents += map(" ".join, _texts(rows, document, "data.document", path))
        summaries += _texts(rows, summary, "data.summary", path)
    return Pairs(documents, summaries)


def _texts(rows: pa.Table, names: Sequence[str], key: str, path: Path) -> list[list[str]]:
    """Return the texts of each row, from the first of the columns that the file has."""
    name = next((name for name in names if name in rows.column_names), names[0])
    check_known("column", name, rows.column_names, f"{path} ({key})")
    column = rows[name].combine_chunks()
    several = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    kind = column.type.value_type if several else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise CorpusError(f"{path}: column {name!r} is {column.type}; {key} must name one of texts")
    values = column.to_pylist() if several else [[text] for text in column.to_pylist()]
    texts = [[part.strip() for part in row or () if part and part.strip()] for row in values]
    if [] in texts:
        raise CorpusError(
            f"{path}: {name!r} in row {texts.index([])}, counted from 0, is empty; leave the row "
            "out"
        )
    return texts
