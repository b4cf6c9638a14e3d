"""Blocks of documents: the form that every file format is read into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

#: documents per block; only one block at a time is held as Python objects
BLOCK = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Columns:
    """The columns of a table by role; the file may lack the last two."""

    texts: tuple[str, ...]
    id: str
    labels: str | None


@dataclass(frozen=True)
class Labels:
    """Class ids of B documents.

    Attributes:
        values: ``large_string``, document by document.
        counts: int64 [B], labels per document; -1 for a document without an entry.

    """

    values: pa.Array
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class DocumentBlock:
    """Consecutive documents of a file.

    Attributes:
        lines: int64 [B], their places in the file: lines from 1 or rows from 0.
        ids: ``large_string`` [B].
        texts: ``large_string`` [B]; ``None`` for a file of gold labels.
        labels: gold labels.

    """

    lines: NDArray[np.int64]
    ids: pa.Array
    texts: pa.Array | None
    labels: Labels


def flat_labels(lists: Sequence[Sequence[str] | None]) -> Labels:
    """Return labels from lists of ids; ``None`` for a document without an entry."""
    counts = np.array([-1 if ids is None else len(ids) for ids in lists], dtype=np.int64)
    flat = list(chain.from_iterable(ids for ids in lists if ids is not None))
    return Labels(pa.array(flat, pa.large_string()), counts)


def ids_in(text: str) -> list[str]:
    """Return the ids in a text, separated by spaces or commas."""
    return text.replace(",", " ").split()


def join_texts(columns: Sequence[pa.Array]) -> pa.Array:
    """Join columns of texts by newlines, leaving out empty and missing ones."""
    joined, *others = (texts.fill_null("") for texts in columns)
    # null_handling="skip" would drop documents that have only nulls
    for texts in others:
        both = pc.and_(pc.not_equal(joined, ""), pc.not_equal(texts, ""))
        separator = pc.if_else(both, "\n", "").cast(pa.large_string())
        joined = pc.binary_join_element_wise(joined, texts, separator)
    return joined


def chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """Yield the items in lists of :data:`BLOCK`."""
    iterator = iter(items)
    while chunk := list(islice(iterator, BLOCK)):
        yield chunk
