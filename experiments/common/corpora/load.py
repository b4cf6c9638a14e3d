"""Entry point to all corpora, and the built-in one: docstrings of Python's standard library."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import PositiveInt, ValidationError

from experiments.common.corpora.bow import load_bow
from experiments.common.corpora.corpus import Corpus, CorpusError
from experiments.common.corpora.docstrings import DocstringRecord, docstring_records
from experiments.common.corpora.files import check_known
from experiments.common.corpora.text import Tokenization, load_table, load_text, vectorize
from raypipe import Settings

Source = Literal["builtin", "bow", "text", "jsonl", "csv", "parquet"]

NAME = "stdlib"


class _BuiltinOptions(Tokenization):
    """Options of the built-in corpus."""

    max_documents: PositiveInt | None = None
    """Size of a sample of docstrings by their names; a smaller one is part of a larger one."""


class _BowOptions(Settings):
    """Options of a bag-of-words file."""

    split: Literal["train", "val"] = "val"
    """The part of the corpus."""


class _TableOptions(Tokenization):
    """Options of a table."""

    column: str = "text"
    """The column of the documents."""


_OPTIONS: Mapping[str, type[Settings]] = {
    "builtin": _BuiltinOptions,
    "bow": _BowOptions,
    "text": Tokenization,
    **dict.fromkeys(("jsonl", "csv", "parquet"), _TableOptions),
}


def load_corpus(
    source: Source, name: str, directory: Path | None = None, **settings: Any
) -> Corpus:
    """Load one corpus.

    The same versions of Python and scikit-learn give the same built-in corpus. Its docstrings are
    cached in the user's cache (``$RAYPIPE_CACHE``, by default ``~/.cache/raypipe``).

    Args:
        source: ``builtin`` (its only name is ``stdlib``); ``bow`` for
            ``X_<name>_<split>_bow.npz``; ``text`` for a file
            with one document per line or a folder of files; ``jsonl``, ``csv``, ``parquet`` for a
            column.
        name: the corpus.
        directory: the folder of the files; not used by ``builtin``.
        settings: ``max_documents`` (builtin); ``split`` (bow); ``column`` (tables); the fields of
            :class:`Tokenization` (all but bow).

    Raises:
        CorpusError: the source, the name or a setting is unknown, the folder is missing, there are
            too few documents for the vocabulary, or the source's reader raises.

    """
    check_known("source", source, get_args(Source), "data.source")
    for key in settings:
        known = list(_OPTIONS[source].model_fields)
        check_known("option", key, known, f"data.options of data.source={source}")
    try:
        options: Any = _OPTIONS[source].model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][:1]))
        raise CorpusError(
            f"data.options.{place} = {first['input']!r}: {first['msg'].lower()} "
            f"(data.source={source})"
        ) from error
    if source == "builtin":
        check_known("corpus", name, [NAME], "data.source=builtin")
        return _builtin(options.model_dump_json())
    if directory is None:
        raise CorpusError(f"data.source={source} reads files: set data.dir to their folder")
    if source == "bow":
        return load_bow(directory, name, options.split)
    if source == "text":
        return load_text(directory, name, options)
    return load_table(directory, name, source, options.column, options)


@lru_cache(maxsize=1)
def _builtin(text: str) -> Corpus:
    """Return the built-in corpus; the stages of every point of a sweep ask for it.

    The options are JSON, which tells a fraction of 1.0 from a number of 1.
    """
    options = _BuiltinOptions.model_validate_json(text)
    records = sample(list(docstring_records()), options.max_documents)
    texts = (record.text for record in records)
    return vectorize(NAME, texts, f"built-in corpus {NAME!r}", options)


def sample(records: list[DocstringRecord], size: int | None) -> list[DocstringRecord]:
    """Return the records with the smallest hashes of their names, in the given order."""
    if size is None:
        return records
    names = [f"{r.module}:{r.qualname}".encode() for r in records]
    order = sorted(range(len(records)), key=lambda i: hashlib.sha256(names[i]).digest())
    return [records[i] for i in sorted(order[:size])]
