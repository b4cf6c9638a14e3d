"""Documents: ids and texts in Arrow arrays, with gold labels if they are known."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
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
from experiments.common.corpora.files import is_text, read_rows
from experiments.teleclass.taxonomy import Taxonomy, tab_rows, unknown_class
from raypipe import fingerprint

_LISTS = pa.list_(pa.large_string())


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
        """The fingerprint of ids, texts and gold labels."""
        gold = None if self.gold is None else [self.gold.indptr, self.gold.indices]
        numbers = gold and [array.tolist() for array in gold]
        return fingerprint([self.ids.to_pylist(), self.texts.to_pylist(), numbers])

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
        """
        if max_documents is None or len(self) <= max_documents:
            return self
        digests = [hashlib.sha256(id_.encode()).digest() for id_ in self.ids.to_pylist()]
        order = sorted(range(len(self)), key=digests.__getitem__)
        return self.take(sorted(order[:max_documents]))

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
        path: a table, ``.jsonl``, ``.csv`` (each plain or ``.gz``) or ``.parquet``; or ``.txt``,
            plain or ``.gz``, with lines ``id<TAB>text``.
        taxonomy: the classes of the gold labels.
        columns: text columns of a table, joined by newlines, empty ones left out.
        id_column: column of the ids in a table; if it is missing, row numbers from 0 are the ids.
        labels_column: lists of class ids (CSV: separated by spaces or commas), if it exists.
        labels: a file ``document id<TAB>class id,class id,...``, read instead of the column.
        max_documents: size of a sample (:meth:`Documents.sample`).

    Raises:
        CorpusError: the file cannot be read or has no document, a document id is repeated, or a
            class is unknown. Messages name the places.

    """
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; name a file of documents")
    if path.name.removesuffix(".gz").endswith(".txt"):
        lines = list(tab_rows(path, "id<TAB>text", strip=False))
        ids = pa.array([line.left for line in lines], pa.large_string())
        texts = pa.array([line.right for line in lines], pa.large_string())
        lists, places = pa.nulls(len(lines), _LISTS), [line.place for line in lines]
    else:
        ids, texts, lists = _table(path, columns, id_column, labels_column)
        places = [f"{path}, row {row}" for row in range(len(ids))]
    _check_ids(ids, places)
    dropped = {}
    if labels is not None:
        entries = list(tab_rows(labels, "document id<TAB>class id,class id,..."))
        named = pa.array([entry.left for entry in entries], pa.large_string())
        _check_ids(named, [entry.place for entry in entries])
        listed = pa.array([_ids_in(entry.right) for entry in entries], _LISTS)
        _classes(named, listed, [entry.place for entry in entries], taxonomy)
        lists = listed.take(pc.index_in(ids, value_set=named))
    gold = _classes(ids, lists, places, taxonomy)
    filled = np.flatnonzero(pc.not_equal(pc.utf8_trim_whitespace(texts), "").to_numpy(False))
    dropped["empty documents"] = len(ids) - len(filled)
    if not len(filled):
        raise CorpusError(
            f"{path}: there is no document with text ({len(ids)} without); give at least one"
        )
    whole = Documents(ids, texts, gold, {}).take(filled).sample(max_documents)
    known = pc.is_in(whole.ids, value_set=ids.filter(lists.is_valid()))
    dropped["documents beyond max_documents"] = len(filled) - len(whole)
    if labels is not None:
        dropped["gold of other documents"] = len(named) - known.true_count
    has_gold = labels is not None or known.true_count > 0
    if has_gold:
        dropped["documents without gold"] = known.false_count
    return Documents(
        ids=whole.ids,
        texts=whole.texts,
        gold=taxonomy.closure(whole.gold) if has_gold and whole.gold is not None else None,
        dropped={reason: number for reason, number in dropped.items() if number},
    )


def _table(
    path: Path, columns: Sequence[str], id_column: str, labels_column: str
) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return the ids, texts and labels of a table's rows; no labels are null."""
    rows = read_rows(path, columns, (id_column, labels_column)).combine_chunks()
    joined, *others = (rows[name].chunk(0).fill_null("") for name in columns)
    for texts in others:
        both = pc.and_(pc.not_equal(joined, ""), pc.not_equal(texts, ""))
        separator = pc.if_else(both, "\n", "").cast(pa.large_string())
        joined = pc.binary_join_element_wise(joined, texts, separator)
    ids = pa.array(range(len(rows)))
    if id_column in rows.column_names:
        ids = rows[id_column].chunk(0)
        if not (pa.types.is_integer(ids.type) or is_text(ids.type)):
            raise CorpusError(
                f"{path}: column {id_column!r} holds {ids.type}; document ids are texts or whole "
                "numbers"
            )
    lists = pa.nulls(len(rows), _LISTS)
    if labels_column in rows.column_names:
        lists = rows[labels_column].chunk(0)
        if is_text(lists.type) and path.name.removesuffix(".gz").endswith(".csv"):
            lists = pa.array([_ids_in(text) for text in lists.to_pylist()], _LISTS)
        if not (pa.types.is_nested(lists.type) or pa.types.is_null(lists.type)):
            raise CorpusError(
                f"{path}: column {labels_column!r} holds {lists.type}; give lists of class ids"
            )
    return ids.cast(pa.large_string()), joined, lists.cast(_LISTS)


def _ids_in(text: str) -> list[str]:
    """Return the ids in a text, separated by spaces or commas."""
    return text.replace(",", " ").split()


def _check_ids(ids: pa.Array, places: Sequence[str]) -> None:
    """Reject a missing or repeated id. Raises CorpusError, naming the places."""
    first: dict[str, str] = {}
    for id_, place in zip(ids.to_pylist(), places, strict=True):
        if not id_:
            raise CorpusError(f"{place}: the document has no id; give it one")
        if id_ in first:
            raise CorpusError(
                f"{place}: document id {id_!r} is repeated, it is already at {first[id_]}; give "
                "each document a unique id"
            )
        first[id_] = place


def _classes(
    ids: pa.Array, lists: pa.Array, places: Sequence[str], taxonomy: Taxonomy
) -> sparse.csr_matrix:
    """Return lists of class ids as bool ``[N, C]``. Raises CorpusError for an unknown class."""
    values, counts = lists.flatten(), pc.list_value_length(lists).fill_null(0).to_numpy(False)
    classes = pc.index_in(values, value_set=pa.array(taxonomy.ids, pa.large_string()))
    ends = np.cumsum(counts)
    if classes.null_count:
        first = int(classes.is_null().to_numpy(False).argmax())
        row = int(np.searchsorted(ends, first, side="right"))
        raise CorpusError(
            f"{places[row]}, document {ids[row].as_py()!r}: "
            f"{unknown_class(str(values[first].as_py()), taxonomy.ids)}"
        )
    ones = np.ones(len(classes), dtype=np.bool_)
    shape = (len(lists), len(taxonomy))
    return sparse.csr_matrix((ones, classes.to_numpy(), np.append(0, ends)), shape=shape)
