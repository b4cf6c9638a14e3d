"""Corpus as word counts: the common form of all document sources."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from raypipe import ConfigError

#: Maximum count: a larger one means a damaged file; below it, no sum of counts overflows int64.
MAX_COUNT = 2**31 - 1
#: Maximum rows: more mean a damaged header, which is rejected before memory is allocated.
MAX_DOCUMENTS = 2**27


class CorpusError(ConfigError):
    """A corpus that cannot be used; the message names the source, the place and the remedy."""


@dataclass(frozen=True)
class Corpus:
    """Documents as word counts.

    Two corpora are equal if name, fingerprint and the two numbers of documents are.

    Attributes:
        name: the name in results.
        counts: ``csr_matrix`` (documents, words), int64 counts of at least 1, indices sorted,
            no duplicates, no explicit zeros.
        vocabulary: the word of each column, or ``None`` if the source has no words.
        fingerprint: SHA-256 (hexadecimal) of the content, the same on every platform.
        dropped_documents: number of documents that the reader dropped because they had no word.
        empty_documents: number of rows of ``counts`` without a word.
        skipped_letters: share of the letters of the texts that belong to no word.

    """

    name: str
    counts: sparse.csr_matrix = field(repr=False, compare=False)
    vocabulary: tuple[str, ...] | None = field(repr=False, compare=False)
    fingerprint: str
    dropped_documents: int
    empty_documents: int
    skipped_letters: float = field(default=0.0, repr=False, compare=False)

    @property
    def documents(self) -> int:
        """Number of rows."""
        return int(self.counts.shape[0])

    @property
    def words(self) -> int:
        """Number of columns."""
        return int(self.counts.shape[1])

    @property
    def tokens(self) -> int:
        """Sum of all counts."""
        return int(self.counts.data.sum())


def make_corpus(
    name: str,
    counts: Any,
    *,
    source: str,
    vocabulary: Sequence[str] | None = None,
    dropped_documents: int = 0,
    skipped_letters: float = 0.0,
) -> Corpus:
    """Validate ``counts`` and wrap them as a :class:`Corpus`.

    Args:
        name: the name in results.
        counts: sparse matrix or dense array (documents, words).
        source: the origin for error messages, usually a file.
        vocabulary: one word per column, in column order.
        dropped_documents: number of documents that were dropped before.
        skipped_letters: share of the letters of the texts that belong to no word.

    Raises:
        CorpusError: see :func:`validate_counts`; also if the vocabulary has another length.

    """
    matrix = validate_counts(counts, source)
    words = None if vocabulary is None else tuple(vocabulary)
    if words is not None and len(words) != matrix.shape[1]:
        raise CorpusError(
            f"{source}: the vocabulary has {len(words)} words, but the counts have "
            f"{matrix.shape[1]} columns; give one word for each column"
        )
    return Corpus(
        name=name,
        counts=matrix,
        vocabulary=words,
        fingerprint=corpus_fingerprint(matrix, words),
        dropped_documents=dropped_documents,
        empty_documents=int((np.diff(matrix.indptr) == 0).sum()),
        skipped_letters=skipped_letters,
    )


def validate_counts(counts: Any, source: str) -> sparse.csr_matrix:
    """Return word counts in canonical form; the input is not modified.

    Args:
        counts: sparse matrix or dense array (documents, words) of integers of any type. Repeated
            entries of a cell are checked and then added.
        source: the origin for error messages.

    Returns:
        ``csr_matrix``, int64, sorted indices, no duplicates, no explicit zeros.

    Raises:
        CorpusError: a count is negative, fractional, non-finite or absurdly large (with its row and
            column), there is no document, column or token, or the indices are invalid.

    """
    entries = _entries(counts, source)
    documents, words = entries.shape
    if documents == 0:
        raise CorpusError(f"{source}: there is no document; give a matrix with rows")
    if words == 0:
        raise CorpusError(f"{source}: the vocabulary is empty; give a matrix with columns")
    if documents > MAX_DOCUMENTS:
        raise CorpusError(
            f"{source}: it declares {documents} documents, more than the {MAX_DOCUMENTS} allowed; "
            "the file is damaged or has to be split"
        )
    offence = _first_bad_count(entries.data)
    if offence is not None:
        position, reason = offence
        raise CorpusError(
            f"{source}: the count in row {entries.row[position]}, column {entries.col[position]} "
            f"(counted from 0) is {entries.data[position]}: {reason}; give raw word counts, "
            "not frequencies or TF-IDF weights"
        )
    matrix = sparse.csr_matrix(
        (entries.data.astype(np.int64), (entries.row, entries.col)), shape=entries.shape
    )
    matrix.eliminate_zeros()
    matrix.sort_indices()
    if matrix.nnz == 0:
        raise CorpusError(f"{source}: all counts are 0; give documents with at least one word")
    return matrix


def corpus_fingerprint(counts: sparse.csr_matrix, vocabulary: tuple[str, ...] | None) -> str:
    """Return the SHA-256 (hexadecimal) over shape, canonical CSR arrays and vocabulary.

    Integers are hashed as little-endian int64: index width, byte order and file format make no
    difference.
    """
    head = {"shape": [int(n) for n in counts.shape], "nnz": int(counts.nnz), "words": vocabulary}
    digest = hashlib.sha256(json.dumps(head, separators=(",", ":")).encode("ascii"))
    for array in (counts.indptr, counts.indices, counts.data):
        digest.update(np.ascontiguousarray(array, dtype="<i8").data)
    return digest.hexdigest()


def _entries(counts: Any, source: str) -> sparse.coo_matrix:
    """Return the stored entries with their rows and columns, duplicates apart."""
    if not sparse.issparse(counts):
        counts = np.asarray(counts)
        if counts.dtype == np.float16:  # not a type of scipy.sparse
            counts = counts.astype(np.float64)
    if counts.ndim != 2:
        raise CorpusError(f"{source}: expected documents x words, got {counts.ndim} dimension(s)")
    if counts.dtype.kind not in "biuf":
        raise CorpusError(f"{source}: counts must be numbers, but their type is {counts.dtype}")
    if sparse.issparse(counts) and hasattr(counts, "check_format"):
        # Check indices before compiled code uses them: out-of-range ones would crash it.
        try:
            counts.check_format(full_check=True)
        except ValueError as error:
            raise CorpusError(
                f"{source}: the indices are broken: {error}; save it again"
            ) from error
    return sparse.coo_matrix(counts)


def _first_bad_count(values: NDArray[Any]) -> tuple[int, str] | None:
    """Return the position of the first value that is not a count, and why; ``None`` if all are."""
    if values.dtype.kind == "f":
        values = values.astype(np.float64)
        bad = ~((values >= 0) & (values <= MAX_COUNT) & (values == np.floor(values)))
    else:
        bad = (values < 0) | (values > MAX_COUNT)
    if not bad.any():
        return None
    position = int(bad.argmax())
    value = values[position]
    if not np.isfinite(value):
        reason = "not a finite number"
    elif value < 0:
        reason = "negative"
    elif value > MAX_COUNT:
        reason = f"more than {MAX_COUNT}"
    else:
        reason = "not a whole number"
    return position, reason
