"""Documents: ids and texts in Arrow arrays, with gold labels if they are known."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from scipy import sparse

from experiments.common.corpora.corpus import CorpusError
from experiments.teleclass.data.blocks import BLOCK, Columns, DocumentBlock
from experiments.teleclass.data.document_files import document_blocks, gold_blocks, unit
from experiments.teleclass.data.taxonomy import Taxonomy, unknown_class

#: documents hashed at a time
HASHED = 65_536


@dataclass(frozen=True, eq=False)
class Documents:
    """N documents; two of the same content have the same fingerprint.

    Attributes:
        ids: ``large_string`` [N], all different.
        texts: ``large_string`` [N], none blank.
        gold: bool [N, C], with all ancestors; ``None`` if there are no gold labels.
        dropped: counts of what the reader left out or missed, by reason.

    """

    ids: pa.Array = field(repr=False)
    texts: pa.Array = field(repr=False)
    gold: sparse.csr_matrix | None = field(repr=False)
    dropped: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) of ids, texts and gold labels, whatever their memory layout."""
        shape = None if self.gold is None else self.gold.shape
        digest = hashlib.sha256(repr((len(self), shape)).encode("ascii"))
        for texts in (self.ids, self.texts):
            for start in range(0, len(self), HASHED):
                for part in _buffers(texts[start : start + HASHED]):
                    digest.update(part)
        if self.gold is not None:
            for array in (self.gold.indptr, self.gold.indices):
                digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        return digest.hexdigest()

    def take(self, rows: Sequence[int] | NDArray[Any]) -> Documents:
        """Return the documents at these positions, in this order."""
        chosen = np.asarray(rows, dtype=np.int64)
        return Documents(
            ids=self.ids.take(pa.array(chosen)),
            texts=self.texts.take(pa.array(chosen)),
            gold=None if self.gold is None else self.gold[chosen],
            dropped=self.dropped,
        )

    def sample(self, max_documents: int | None) -> Documents:
        """Return the documents whose ids have the smallest hashes, in order; all for ``None``.

        A smaller sample is part of a larger one.

        Raises:
            CorpusError: ``max_documents`` is below 1.

        """
        check_size(max_documents)
        if max_documents is None or len(self) <= max_documents:
            return self
        return self.take(_smallest(self.ids, max_documents))

    def text_list(self, start: int, stop: int) -> list[str]:
        """Return the texts ``[start, stop)``."""
        texts: list[str] = self.texts[start:stop].to_pylist()
        return texts


def read_documents(
    path: Path,
    taxonomy: Taxonomy,
    *,
    columns: Sequence[str] = ("text",),
    id_column: str = "id",
    labels_column: str = "labels",
    labels: Path | None = None,
    max_documents: int | None = None,
) -> Documents:
    """Return the documents of a file, with gold labels if there are any.

    Documents of white space only are dropped. ``dropped`` counts "empty documents", "documents
    beyond max_documents", "documents without gold" and "gold of other documents".

    Args:
        path: ``.jsonl``, ``.csv``, ``.txt``, each plain or ``.gz``, or ``.parquet``; see
            :func:`~experiments.teleclass.data.document_files.document_blocks`.
        taxonomy: the classes of the gold labels.
        columns: text columns of a table, joined by newlines.
        id_column: column of the ids in a table; if it is missing, row numbers from 0 are the ids.
        labels_column: lists of class ids (CSV: separated by spaces or commas), if it exists.
        labels: a file ``document id<TAB>class id,class id,...``, read instead of the column.
        max_documents: size of a sample (:meth:`Documents.sample`).

    Raises:
        CorpusError: the file cannot be read or has no document, a document id is repeated, a class
            is unknown, or ``max_documents`` is below 1. Messages name the places.

    """
    check_size(max_documents)
    table = Columns(tuple(columns), id_column, None if labels is not None else labels_column)
    places: list[tuple[pa.Array, NDArray[np.int64]]] = []
    parts: list[_Part] = []
    counts: Counter[str] = Counter()
    for block in document_blocks(path, table):
        part = _Part(block.ids, block.texts, *_gold(path, block, taxonomy))
        filled = pc.not_equal(pc.utf8_trim_whitespace(block.texts), "").to_numpy(False)
        counts["empty documents"] += int((~filled).sum())
        parts.append(part if filled.all() else part.take(np.flatnonzero(filled)))
        places.append((block.ids, block.lines))
        if max_documents is not None and sum(len(p.ids) for p in parts) > 2 * max_documents + BLOCK:
            whole = _concatenate(parts)  # rarely: each text is copied a few times at most
            parts = [whole.take(_smallest(whole.ids, max_documents))]
    _check_unique(path, places)
    if not any(len(part.ids) for part in parts):
        raise CorpusError(
            f"{path}: there is no document with text ({counts['empty documents']} without); "
            "give at least one"
        )
    whole = _concatenate(parts)
    if max_documents is not None:
        whole = whole.take(_smallest(whole.ids, max_documents))
        total = sum(len(ids) for ids, _ in places) - counts["empty documents"]
        counts["documents beyond max_documents"] = total - len(whole.ids)
    if labels is not None:
        whole, counts["gold of other documents"] = _with_gold(whole, labels, taxonomy)
    known = labels is not None or bool(whole.given.any())
    if known:
        counts["documents without gold"] = int((~whole.given).sum())
    return Documents(
        ids=whole.ids,
        texts=whole.texts,
        gold=taxonomy.closure(whole.gold) if known else None,
        dropped={reason: n for reason, n in counts.items() if n},
    )


def check_size(max_documents: int | None) -> None:
    """Refuse a sample without documents. Raises CorpusError."""
    if max_documents is not None and max_documents < 1:
        raise CorpusError(f"max_documents is {max_documents}; allowed is 1 or more")


@dataclass(frozen=True)
class _Part:
    """Some documents; ``given`` marks those with known gold labels."""

    ids: pa.Array
    texts: pa.Array
    gold: sparse.csr_matrix
    given: NDArray[np.bool_]

    def take(self, rows: NDArray[np.int64]) -> _Part:
        chosen = pa.array(rows)
        return _Part(
            self.ids.take(chosen), self.texts.take(chosen), self.gold[rows], self.given[rows]
        )


def _concatenate(parts: Sequence[_Part]) -> _Part:
    return _Part(
        pa.concat_arrays([part.ids for part in parts]),
        pa.concat_arrays([part.texts for part in parts]),
        sparse.vstack([part.gold for part in parts], format="csr"),
        np.concatenate([part.given for part in parts]),
    )


def _gold(
    path: Path, block: DocumentBlock, taxonomy: Taxonomy
) -> tuple[sparse.csr_matrix, NDArray[np.bool_]]:
    """Return the labels of a block as bool [B, C], and which documents have an entry."""
    values, counts = block.labels.values, block.labels.counts
    classes = pc.index_in(values, value_set=pa.array(taxonomy.ids, pa.large_string()))
    ends = np.cumsum(np.maximum(counts, 0))
    if classes.null_count:
        first = int(classes.is_null().to_numpy(False).argmax())
        row = int(np.searchsorted(ends, first, side="right"))
        raise CorpusError(
            f"{path}, {unit(path)} {block.lines[row]}, document {block.ids[row].as_py()!r}: "
            f"{unknown_class(values[first].as_py(), taxonomy.ids)}"
        )
    indptr = np.concatenate([[0], ends])
    ones = np.ones(len(classes), dtype=np.bool_)
    shape = (len(counts), len(taxonomy))
    return sparse.csr_matrix((ones, classes.to_numpy(), indptr), shape=shape), counts >= 0


def _with_gold(part: _Part, path: Path, taxonomy: Taxonomy) -> tuple[_Part, int]:
    """Return the documents with the labels of a file, and its number of unknown documents."""
    blocks = list(gold_blocks(path))
    _check_unique(path, [(block.ids, block.lines) for block in blocks])
    # the last row is for documents that the file does not name
    nothing = sparse.csr_matrix((1, len(taxonomy)), dtype=np.bool_)
    matrices = [_gold(path, block, taxonomy)[0] for block in blocks]
    gold = sparse.vstack([*matrices, nothing], format="csr")
    lines = gold.shape[0] - 1
    named = pa.chunked_array([block.ids for block in blocks], pa.large_string())
    rows = pc.index_in(part.ids, value_set=named).fill_null(lines).to_numpy()
    given = rows < lines
    return _Part(part.ids, part.texts, gold[rows], given), lines - int(given.sum())


def _check_unique(path: Path, places: Sequence[tuple[pa.Array, NDArray[np.int64]]]) -> None:
    """Refuse a repeated id, naming both places."""
    ids = pa.chunked_array([ids for ids, _ in places], pa.large_string())
    codes = pc.index_in(ids, value_set=ids.unique()).to_numpy()
    if len(codes) == 0 or len(codes) == codes.max() + 1:
        return
    _, firsts = np.unique(codes, return_index=True)
    again = np.ones(len(codes), dtype=np.bool_)
    again[firsts] = False
    second = int(again.argmax())
    first = int((codes == codes[second]).argmax())
    numbers = np.concatenate([lines for _, lines in places])
    raise CorpusError(
        f"{path}: document id {ids[second].as_py()!r} is repeated, in {unit(path)} "
        f"{numbers[first]} and {numbers[second]}; give each document a unique id"
    )


def _smallest(ids: pa.Array, size: int) -> NDArray[np.int64]:
    """Return the positions of the ids with the smallest SHA-256, ascending."""
    digests = b"".join(hashlib.sha256(id_.encode()).digest()[:8] for id_ in _strings(ids))
    order = np.argsort(np.frombuffer(digests, dtype=">u8"), kind="stable")
    return np.sort(order[:size])


def _strings(array: pa.Array) -> Iterator[str]:
    for start in range(0, len(array), HASHED):
        yield from array[start : start + HASHED].to_pylist()


def _buffers(texts: pa.Array) -> tuple[bytes, memoryview]:
    """Return the ends of the texts of a ``large_string`` array, and their bytes."""
    _, offsets, characters = texts.buffers()
    bounds = np.frombuffer(offsets, dtype=np.int64)[texts.offset : texts.offset + len(texts) + 1]
    return (bounds[1:] - bounds[0]).tobytes(), memoryview(characters)[bounds[0] : bounds[-1]]
