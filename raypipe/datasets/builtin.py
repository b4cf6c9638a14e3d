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
from raypipe.datasets.text import TOKEN_PATTERN, Tokenization, vectorize
from raypipe.storage.run_directory import cache_directory

NAME = "stdlib"

logger = logging.getLogger(__name__)


def builtin_corpus(
    max_documents: int | None = None, tokenization: Tokenization | None = None
) -> Corpus:
    """Return the docstrings of Python's standard library as word counts.

    The same versions of Python and scikit-learn give the same corpus. It is cached in the user's
    cache (``$RAYPIPE_CACHE``, by default ``~/.cache/raypipe``). A damaged entry is rebuilt; a cache
    that cannot be written only costs time.

    Args:
        max_documents: size of a sample of docstrings, drawn by their names; a smaller sample is
            part of a larger one. Sampled docstrings without a word are dropped.
        tokenization: the definition of a word.

    Raises:
        CorpusError: ``max_documents`` is below 1, there are too few documents for the vocabulary,
            or Python lacks the sources of its standard library.

    """
    if max_documents is not None and max_documents < 1:
        raise CorpusError(f"max_documents is {max_documents}; allowed is 1 or more")
    settings = tokenization or Tokenization()
    path = _cache_path(max_documents, settings)
    try:
        if path.is_file():
            return read_cached(path)
    except (CorpusError, OSError) as error:
        logger.warning("%s; the built-in corpus is rebuilt", error)
    records = list(docstring_records())
    if max_documents is not None:
        records = _sample(records, max_documents)
    corpus = vectorize(NAME, (r.text for r in records), f"built-in corpus {NAME!r}", settings)
    try:
        write_cached(path, corpus)
    except OSError as error:
        logger.warning("%s: the built-in corpus cannot be cached: %s", path, error)
    return corpus


def read_cached(path: Path) -> Corpus:
    """Return a corpus that :func:`write_cached` wrote.

    Raises:
        CorpusError: the file is damaged, by its zip checksums or fingerprint.

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
    """Write a corpus atomically as one ``.npz`` (arrays and a JSON text, no pickles).

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
    """Return the records with the smallest hashes of their names, in the given order."""
    names = [f"{r.module}:{r.qualname}".encode() for r in records]
    order = sorted(range(len(records)), key=lambda i: hashlib.sha256(names[i]).digest())
    return [records[i] for i in sorted(order[:size])]


def _cache_path(max_documents: int | None, settings: Tokenization) -> Path:
    """Return the path of the cache entry, named by everything that decides its content."""
    parts = [sys.version, sklearn.__version__, sorted(SKIPPED), TOKEN_PATTERN]
    text = json.dumps([*parts, max_documents, asdict(settings)])
    key = hashlib.sha256(text.encode()).hexdigest()[:16]
    return cache_directory() / f"{NAME}-{platform.python_version()}-{key}.npz"
