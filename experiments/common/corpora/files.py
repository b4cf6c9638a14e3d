"""Corpus files: search, opening and parsing, with errors that name the file."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TextIO

from experiments.common.corpora.corpus import CorpusError


def find_file(directory: Path, name: str, forms: Sequence[tuple[str, str]]) -> Path:
    """Return the first existing ``directory/<prefix><name><suffix>`` of several forms.

    Args:
        directory: the folder to search.
        name: the corpus.
        forms: pairs of prefix and suffix, the preferred one first.

    Raises:
        CorpusError: the folder or file does not exist (the message lists the folder's corpora and
            the nearest one), or the name points outside of the folder.

    """
    check_name(name)
    if not directory.is_dir():
        raise CorpusError(f"{directory}: no such folder; set data.dir to the folder of the corpora")
    for prefix, suffix in forms:
        path = directory / f"{prefix}{name}{suffix}"
        if name and path.is_file():
            return path
    sought = " or ".join(f"{prefix}{name}{suffix}" for prefix, suffix in forms)
    names = sorted(
        {
            path.name.removeprefix(prefix).removesuffix(suffix)
            for prefix, suffix in forms
            for path in directory.glob(f"{prefix}*{suffix}")
        }
    )
    raise CorpusError(f"{directory}: there is no {sought}; {_offer(name, names, 'corpora')}")


def check_name(name: str) -> None:
    """Reject a corpus name that is a path. Raises CorpusError."""
    if "/" in name or name in (".", "..") or not name.isprintable():
        raise CorpusError(
            f"{name!r} is a path, not the name of a corpus; set data.dir to the folder it lies in"
        )


def check_known(what: str, name: str, known: Sequence[str], source: str) -> None:
    """Reject a name that is not among the known ones.

    Raises:
        CorpusError: the name is unknown; the message lists the known names and the nearest.

    """
    if name not in known:
        raise CorpusError(f"{source}: there is no {what} {name!r}; {_offer(name, known, what)}")


@contextmanager
def reading(path: Path, form: str) -> Iterator[None]:
    """Convert any error of a parser in the body into a :class:`CorpusError` that names the file."""
    try:
        yield
    except CorpusError:
        raise
    except Exception as error:  # parsers raise anything on invalid bytes
        raise CorpusError(
            f"{path}: cannot be read as {form}: {type(error).__name__}: {error}; "
            "the file is damaged, incomplete or of another format: copy it again"
        ) from error


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a UTF-8 text file, plain or ``.gz`` by its suffix, and skip a BOM.

    The codec ``utf-8-sig`` is not used: it takes a partial BOM for the end of the file.
    """
    packed = path.suffix == ".gz"
    with gzip.open(path, "rt", encoding="utf-8") if packed else path.open(encoding="utf-8") as file:
        if file.read(1) != "\ufeff":
            file.seek(0)
        yield file


def json_objects(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file, plain or ``.gz``, one per line, each with its place.

    Raises:
        CorpusError: the file is damaged, or a line is not an object.

    """
    with reading(path, "JSONL, an object a line"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            place = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise CorpusError(f"{place}: not JSON: {error}; give an object a line") from error
            if not isinstance(record, dict):
                raise CorpusError(f"{place}: expected an object, got {type(record).__name__}")
            yield place, record


def _offer(name: str, known: Sequence[str], what: str) -> str:
    """Return the names that exist instead, and the nearest one."""
    if not known:
        return f"no {what} found at all"
    nearest = get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"there are: {', '.join(known)}; the nearest is {nearest!r}"
