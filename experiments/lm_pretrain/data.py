"""The text that is trained on and the text that is held out, each a list of documents."""

from __future__ import annotations

import hashlib
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from raypipe.datasets.corpus import CorpusError
from raypipe.datasets.docstrings import SKIPPED, docstring_records
from raypipe.datasets.files import check_known, json_objects, open_text, reading

if TYPE_CHECKING:  # a task that tokenises needs no torch, which the settings of the model import
    from experiments.lm_pretrain.settings import DataSettings


class Texts(NamedTuple):
    """The documents to train on, and those that are held out."""

    train: list[str]
    held_out: list[str]


def text_identity(settings: DataSettings) -> dict[str, Any]:
    """What the text is: of files their content, of the built-in one the Python it comes from.

    Raises:
        CorpusError: a file that is not there, or of another form.

    """
    if settings.source == "builtin":
        identity: dict[str, Any] = {"python": sys.version, "skipped": sorted(SKIPPED)}
    else:
        identity = {"files": [_checksum(path) for path in settings.files]}
        if any(_is_jsonl(path) for path in (*settings.files, *settings.held_out_files)):
            identity["column"] = settings.column
    if settings.held_out_files:
        return identity | {"held_out_files": [_checksum(path) for path in settings.held_out_files]}
    return identity | {"held_out_share": settings.held_out_share}


def read_texts(settings: DataSettings) -> Texts:
    """Read the text of the settings.

    Raises:
        CorpusError: a damaged file, a missing column, a document that is no text, no text at all,
            or nothing left on one side.

    """
    if settings.source == "builtin":
        return divided(_docstrings(), settings.held_out_share, "the standard library")
    train = _documents(settings.files, settings.column)
    names = ", ".join(str(path) for path in settings.files)
    if not settings.held_out_files:
        return divided(train, settings.held_out_share, names)
    held_out = _documents(settings.held_out_files, settings.column)
    for documents, key in ((train, "files"), (held_out, "held_out_files")):
        if not documents:
            raise CorpusError(f"data.{key}: there is no text in them")
    return Texts(train, held_out)


def divided(documents: Sequence[str], share: float, source: str) -> Texts:
    """The last share of a text held out: of its characters, or of several documents whole ones.

    Raises:
        CorpusError: nothing is left on one side.

    """
    ends = list(accumulate(len(text) for text in documents))
    position = int((1 - share) * ends[-1]) if ends else 0
    if len(documents) == 1:
        (text,) = documents
        train, held_out = [text[:position]], [text[position:]]
    else:
        kept = bisect_left(ends, position) + 1
        train, held_out = [*documents[:kept]], [*documents[kept:]]
    if not any(train) or not any(held_out):
        raise CorpusError(
            f"{source}: the {len(documents)} documents cannot be divided by data.held_out_share = "
            f"{share}: give more text, another share or data.held_out_files"
        )
    return Texts(train, held_out)


def _docstrings() -> list[str]:
    """Each docstring once, in an order that mixes the packages: by a hash of the text."""
    texts = {record.text for record in docstring_records() if record.text.strip()}
    return sorted(texts, key=lambda text: hashlib.sha256(text.encode()).digest())


def _documents(paths: Sequence[Path], column: str) -> list[str]:
    """The documents of files that are not empty; a ``.txt`` file is one."""
    found = []
    for path in paths:
        for place, text in _rows(path, column) if _is_jsonl(path) else _whole(path):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise CorpusError(f"{place}: half of a surrogate pair is no text") from error
            if text:
                found.append(text)
    return found


def _whole(path: Path) -> Iterator[tuple[str, str]]:
    with reading(path, "UTF-8 text"), open_text(path) as file:
        yield str(path), file.read()


def _rows(path: Path, column: str) -> Iterator[tuple[str, str]]:
    """Places and texts of the objects of a JSONL file."""
    for place, row in json_objects(path):
        check_known("column", column, list(row), f"{place} (data.column)")
        if not isinstance(row[column], str):
            raise CorpusError(f"{place}: {column!r} is {type(row[column]).__name__}, not text")
        yield place, row[column]


def _checksum(path: Path) -> str:
    """The SHA-256 of a file. Raises CorpusError: it is not there, or of another form."""
    if not _is_jsonl(path) and not path.name.removesuffix(".gz").endswith(".txt"):
        raise CorpusError(
            f"{path}: the suffix says nothing; allowed are .txt and .jsonl, also with .gz"
        )
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; see data.files and data.held_out_files")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_jsonl(path: Path) -> bool:
    return path.name.removesuffix(".gz").endswith(".jsonl")
