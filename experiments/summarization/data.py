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

from experiments.common.blocks import held_out, text_hashes, validation
from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import docstring_records
from experiments.common.corpora.files import check_known, checksum, is_text, read_rows
from raypipe import fingerprint

SHARE_KEY = "data.held_out_share"
_HELD_OUT, _VALIDATION = "data.held_out_files", "data.validation_files"


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
class PairSplits:
    """Training pairs, pairs that choose the best step, and held-out pairs.

    No document is in two of them; ``validation`` may be empty. ``content`` is the fingerprint of
    what was read, ``notes`` are remarks for the user.
    """

    train: Pairs
    validation: Pairs
    held_out: Pairs
    content: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def keys_read(settings: Any) -> list[str]:
    """Return the keys of the section ``data`` that :func:`load` uses for these settings."""
    keys = ["source", "files", "held_out_files", "validation_files"]
    keys += ["min_words"] if settings.source == "builtin" else ["document", "summary"]
    shares = ("held_out", "validation")
    return keys + [f"{name}_share" for name in shares if not getattr(settings, f"{name}_files")]


def load(settings: Any) -> PairSplits:
    """Return the pairs of the section ``data``, of which only :func:`keys_read` are used.

    Raises:
        CorpusError: a file is missing or damaged, a column is missing or does not hold text, a
            document or summary is empty, or one side would be empty.

    """
    if settings.source == "builtin":
        pairs = _docstrings(settings.min_words)
        texts = {"content": fingerprint([pairs.documents, pairs.summaries])}
        return _divide(settings, pairs, {}, "the standard library", texts)
    columns = settings.document, settings.summary
    content: dict[str, Any] = {
        f"data.{key}": tuple(checksum(path, f"data.{key}") for path in getattr(settings, key))
        for key in ("files", "held_out_files", "validation_files")
        if getattr(settings, key)
    }
    parts = {
        key: _read(getattr(settings, key.removeprefix("data.")), checksums, *columns)
        for key, checksums in content.items()
    }
    names = ", ".join(str(path) for path in settings.files)
    return _divide(settings, parts.pop("data.files"), parts, names, content)


def _divide(
    settings: Any, train: Pairs, given: Mapping[str, Pairs], source: str, content: Mapping[str, Any]
) -> PairSplits:
    """Hold out a part of the training pairs, and another to choose the best step, unless given.

    Shares are selected by a hash of the document: equal documents are on the same side. A document
    of a given part is left out of those that see it earlier.
    """
    notes: list[str] = []
    test, chosen = given.get(_HELD_OUT), given.get(_VALIDATION)
    if test is None:
        hashes = text_hashes(list(train.documents))
        mask = held_out(hashes, settings.held_out_share, source, SHARE_KEY)
        train, test = train.where(~mask), train.where(mask)
    else:
        train = _without(train, "data.files", test, _HELD_OUT, notes)
    if chosen is None:
        mask, remarks = validation(text_hashes(list(train.documents)), settings.validation_share)
        notes += remarks
        train, chosen = train.where(~mask), train.where(mask)
    else:
        chosen = _without(chosen, _VALIDATION, test, _HELD_OUT, notes)
        train = _without(train, "data.files", chosen, _VALIDATION, notes)
    return PairSplits(train, chosen, test, content, tuple(notes))


def _without(pairs: Pairs, key: str, others: Pairs, other_key: str, notes: list[str]) -> Pairs:
    """Return the pairs whose documents are not among the others; the rest is a note."""
    known = set(others.documents)
    leaked = np.array([document in known for document in pairs.documents])
    if leaked.all():
        raise CorpusError(f"{key}: every document is also in {other_key}")
    if leaked.any():
        notes.append(f"{leaked.sum()} documents of {key} are left out: {other_key} has them, too")
    return pairs.where(~leaked)


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


@lru_cache(maxsize=3)  # the tokenize stage needs what was read to check the configuration
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
    if not is_text(kind):
        raise CorpusError(f"{path}: column {name!r} is {column.type}; {key} must name one of texts")
    values = column.to_pylist() if several else [[text] for text in column.to_pylist()]
    texts = [[part.strip() for part in row or () if part and part.strip()] for row in values]
    if [] in texts:
        raise CorpusError(
            f"{path}: {name!r} in row {texts.index([])}, counted from 0, is empty; leave the row "
            "out"
        )
    return texts
