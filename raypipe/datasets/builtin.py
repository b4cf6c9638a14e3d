"""Built-in corpus ``stdlib``: docstrings of Python's standard library, with no download."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
import sklearn
from scipy import sparse

from raypipe.datasets.corpus import Corpus, CorpusError, make_corpus
from raypipe.datasets.docstrings import SKIPPED, DocstringRecord, docstring_records
from raypipe.datasets.files import reading
from raypipe.datasets.text import TOKEN_PATTERN, Tokenisation, vectorise
from raypipe.storage.run_directory import cache_directory

NAME = "stdlib"

logger = logging.getLogger(__name__)


def builtin_corpus(
    max_documents: int | None = None, tokenisation: Tokenisation | None = None
) -> Corpus:
    """The docstrings of Python's standard library as word counts.

    The same Python and scikit-learn give the same corpus. It is kept in the user's cache
    (``$RAYPIPE_CACHE``, by default ``~/.cache/raypipe``); a damaged entry is built anew, and a
    cache that cannot be written only costs the time.

    Args:
        max_documents: use a sample of this many docstrings, drawn by their names: a smaller
            sample is part of a larger one. Those without a word are then still dropped.
        tokenisation: which words count.

    Raises:
        CorpusError: ``max_documents`` below 1, too few documents for the vocabulary, or a Python
            without the sources of its standard library.

    """
    if max_documents is not None and max_documents < 1:
        raise CorpusError(f"max_documents is {max_documents}; allowed is 1 or more")
    settings = tokenisation or Tokenisation()
    path = _cache_path(max_documents, settings)
    try:
        if path.is_file():
            return read_cached(path)
    except (CorpusError, OSError) as error:
        logger.warning("%s; the built-in corpus is built anew", error)
    records = list(docstring_records())
    if max_documents is not None:
        records = _sample(records, max_documents)
    corpus = vectorise(NAME, (r.text for r in records), f"built-in corpus {NAME!r}", settings)
    try:
        write_cached(path, corpus)
    except OSError as error:
        logger.warning("%s: the built-in corpus cannot be cached: %s", path, error)
    return corpus


def read_cached(path: Path) -> Corpus:
    """A corpus that :func:`write_cached` wrote.

    Raises:
        CorpusError: the file is damaged; zip checksums and the fingerprint tell.

    """
    with reading(path, "a cached corpus"):
        with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
            meta = json.loads(stored["meta"].tobytes())
            arrays = (stored["data"], stored["indices"], stored["indptr"])
            counts = sparse.csr_matrix(arrays, shape=tuple(meta["shape"]))
        corpus = make_corpus(
            meta["name"],
            counts,
            source=str(path),
            vocabulary=meta["vocabulary"],
            dropped_documents=meta["dropped_documents"],
        )
        fingerprint = meta["fingerprint"]
    if corpus.fingerprint != fingerprint:
        raise CorpusError(f"{path}: damaged: its content has another fingerprint")
    return corpus


def write_cached(path: Path, corpus: Corpus) -> None:
    """Store a corpus as one ``.npz`` (arrays and a JSON text, no pickles), all or nothing.

    Raises:
        OSError: the folder cannot be written.

    """
    meta = {
        "name": corpus.name,
        "shape": [corpus.documents, corpus.words],
        "vocabulary": corpus.vocabulary,
        "fingerprint": corpus.fingerprint,
        "dropped_documents": corpus.dropped_documents,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    file = tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False)  # noqa: SIM115
    temporary = Path(file.name)
    try:
        with file:
            np.savez_compressed(
                file,
                data=corpus.counts.data,
                indices=corpus.counts.indices,
                indptr=corpus.counts.indptr,
                meta=np.frombuffer(json.dumps(meta).encode("ascii"), dtype=np.uint8),
            )
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _sample(records: list[DocstringRecord], size: int) -> list[DocstringRecord]:
    """The records with the smallest hashes of their names, in their own order."""
    names = [f"{r.module}:{r.qualname}".encode() for r in records]
    order = sorted(range(len(records)), key=lambda i: hashlib.sha256(names[i]).digest())
    return [records[i] for i in sorted(order[:size])]


def _cache_path(max_documents: int | None, settings: Tokenisation) -> Path:
    """The entry of the cache, named by everything that decides its content."""
    parts = [sys.version, sklearn.__version__, sorted(SKIPPED), TOKEN_PATTERN]
    text = json.dumps([*parts, max_documents, asdict(settings)])
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return cache_directory() / f"{NAME}-{platform.python_version()}-{key}.npz"
