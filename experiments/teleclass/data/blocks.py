"""Blocks of documents: the one form that every kind of file is read into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

#: Documents a block: what is a Python object for a moment.
BLOCK = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are what; the last two may be missing from the file."""

    texts: tuple[str, ...]
    id: str
    labels: str | None


@dataclass(frozen=True)
class Labels:
    """Class ids of B documents.

    Attributes:
        values: ``large_string``, those of the first document, then those of the second, ...
        counts: int64 [B], how many each document has; -1 where nothing is said about it.

    """

    values: pa.Array
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Block:
    """Some documents of a file.

    Attributes:
        lines: int64 [B], where each stands, lines from 1 or rows from 0.
        ids: ``large_string`` [B].
        texts: ``large_string`` [B], ``None`` for a file of gold labels.
        labels: their gold labels.

    """

    lines: NDArray[np.int64]
    ids: pa.Array
    texts: pa.Array | None
    labels: Labels


def flat_labels(lists: Sequence[Sequence[str] | None]) -> Labels:
    """Labels from lists of ids; ``None`` where nothing is said."""
    counts = np.array([-1 if ids is None else len(ids) for ids in lists], dtype=np.int64)
    flat = list(chain.from_iterable(ids for ids in lists if ids is not None))
    return Labels(pa.array(flat, pa.large_string()), counts)


def ids_in(text: str) -> list[str]:
    """Ids separated by spaces or commas."""
    return text.replace(",", " ").split()


def join_texts(columns: Sequence[pa.Array]) -> pa.Array:
    """Texts joined by newlines, without those that are empty or missing."""
    joined, *others = (texts.fill_null("") for texts in columns)
    # not null_handling="skip", which leaves out documents that have nothing but nulls
    for texts in others:
        both = pc.and_(pc.not_equal(joined, ""), pc.not_equal(texts, ""))
        separator = pc.if_else(both, "\n", "").cast(pa.large_string())
        joined = pc.binary_join_element_wise(joined, texts, separator)
    return joined


def chunks(items: Iterable[T]) -> Iterator[list[T]]:
    """The items in lists of :data:`BLOCK`."""
    iterator = iter(items)
    while chunk := list(islice(iterator, BLOCK)):
        yield chunk
