"""Texts to train on and held-out texts, each a list of documents."""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import SKIPPED, docstring_records
from experiments.common.corpora.files import checksum, open_text, read_rows, reading

_FILE_KEYS = ("files", "held_out_files")


class Texts(NamedTuple):
    """Documents to train on, and held-out documents."""

    train: list[str]
    held_out: list[str]


def keys_read(settings: Any) -> list[str]:
    """Return the keys of the section ``data`` that :func:`read_texts` uses for these settings."""
    keys = ["source", *_FILE_KEYS]
    if any(_is_jsonl(path) for key in _FILE_KEYS for path in getattr(settings, key)):
        keys.append("column")
    if not settings.held_out_files:
        keys.append("held_out_share")
    return keys


def text_content(settings: Any) -> dict[str, Any]:
    """Return fingerprints of the text: of its files, or of Python for the built-in text.

    Raises:
        CorpusError: a file does not exist or has another format.

    """
    if settings.source == "builtin":
        return {"python": sys.version, "skipped": sorted(SKIPPED)}
    return {
        f"data.{key}": [_checksum(path, f"data.{key}") for path in getattr(settings, key)]
        for key in _FILE_KEYS
        if getattr(settings, key)
    }


def read_texts(settings: Any) -> Texts:
    """Read the text of the section ``data``, of which only :func:`keys_read` are used.

    Raises:
        CorpusError: a damaged file, a missing column, a document that is not text, an empty text,
            or a text that cannot be split.

    """
    if settings.source == "builtin":
        return divide(_docstrings(), settings.held_out_share, "the standard library")
    if not settings.held_out_files:
        names = ", ".join(str(path) for path in settings.files)
        return divide(_documents(settings, "files"), settings.held_out_share, names)
    texts = Texts(*(_documents(settings, key) for key in _FILE_KEYS))
    for documents, key in zip(texts, _FILE_KEYS, strict=True):
        if not documents:
            raise CorpusError(f"data.{key}: the files contain no text")
    return texts


def divide(documents: Sequence[str], share: float, source: str) -> Texts:
    """Hold out the last share of a text, by characters; of several documents, whole ones.

    Raises:
        CorpusError: one side would be empty.

    """
    ends = list(accumulate(len(text) for text in documents))
    position = int((1 - share) * ends[-1]) if ends else 0
    if len(documents) == 1:
        (text,) = documents
        train, held_out = [text[:position]], [text[position:]]
    else:
        first = bisect_left(ends, position) + 1
        train, held_out = [*documents[:first]], [*documents[first:]]
    if not any(train) or not any(held_out):
        raise CorpusError(
            f"{source}: the {len(documents)} documents cannot be divided by data.held_out_share = "
            f"{share}: give more text, another share or data.held_out_files"
        )
    return Texts(train, held_out)


def _docstrings() -> list[str]:
    """Return each docstring once, in the order of its hash, which mixes the packages."""
    texts = {record.text for record in docstring_records() if record.text.strip()}
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def _documents(settings: Any, key: str) -> list[str]:
    """Return the non-empty documents of the files; a ``.txt`` file is one document."""
    documents: list[str] = []
    for path in getattr(settings, key):
        if _is_jsonl(path):
            column = settings.column
            documents += read_rows(path, texts=[column])[column].to_pylist()
        else:
            with reading(path, "UTF-8 text"), open_text(path) as file:
                documents.append(file.read())
    return [text for text in documents if text]


def _checksum(path: Path, key: str) -> str:
    if not _is_jsonl(path) and not path.name.removesuffix(".gz").endswith(".txt"):
        raise CorpusError(
            f"{path}: unknown suffix (see {key}); allowed are .txt and .jsonl, also with .gz"
        )
    return checksum(path, key)


def _is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")
