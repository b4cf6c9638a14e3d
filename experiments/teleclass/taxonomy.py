"""Taxonomy: classes in a directed acyclic graph, and readers of TELEClass's file formats."""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.files import open_text, reading


class Row(NamedTuple):
    """Two fields of a line, and their place in the file."""

    place: str
    left: str
    right: str


@dataclass(frozen=True)
class Taxonomy:
    """C classes with any number of parents each; :func:`make_taxonomy` validates them.

    Attributes:
        ids: ids of the classes in files and predictions.
        names: names of the classes, not necessarily unique.
        edges: (parent, child) as positions in ``ids``, sorted, each once.
        keywords: terms of each class, possibly none.
        dropped: counts of what the reader left out, by reason; not part of equality.

    """

    ids: tuple[str, ...]
    names: tuple[str, ...] = field(repr=False)
    edges: tuple[tuple[int, int], ...] = field(repr=False)
    keywords: tuple[tuple[str, ...], ...] = field(repr=False)
    dropped: Mapping[str, int] = field(compare=False)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def parents(self) -> list[list[int]]:
        """The classes directly above each class."""
        parents: list[list[int]] = [[] for _ in self.ids]
        for parent, child in self.edges:
            parents[child].append(parent)
        return parents

    @cached_property
    def children(self) -> list[list[int]]:
        """The classes directly below each class."""
        children: list[list[int]] = [[] for _ in self.ids]
        for parent, child in self.edges:
            children[parent].append(child)
        return children

    @cached_property
    def depth(self) -> NDArray[np.int64]:
        """Length of the longest path from a root to each class, int64 [C]; 1 for roots."""
        depth = np.ones(len(self), dtype=np.int64)
        for c in self._order:
            for parent in self.parents[c]:
                depth[c] = max(depth[c], depth[parent] + 1)
        return depth

    @cached_property
    def ancestors(self) -> sparse.csr_matrix:
        """Classes that each class implies, bool [C, C]: row c has c and all its ancestors."""
        rows: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * len(self)
        for c in self._order:
            rows[c] = np.unique(np.concatenate([[c], *(rows[p] for p in self.parents[c])]))
        indptr = np.cumsum([0, *map(len, rows)])
        indices = np.concatenate(rows)
        ones = np.ones(len(indices), dtype=np.bool_)
        return sparse.csr_matrix((ones, indices, indptr), shape=(len(self), len(self)))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) of the content, the same on every platform."""
        content = json.dumps([self.ids, self.names, self.edges, self.keywords])
        return hashlib.sha256(content.encode("ascii")).hexdigest()

    def closure(self, labels: sparse.csr_matrix) -> sparse.csr_matrix:
        """Return label sets with all ancestors: TELEClass's phase "hierarchy".

        Args:
            labels: bool [N, C], one row per document; it is not changed.

        Returns:
            bool [N, C] in canonical form.

        Raises:
            ValueError: the number of columns is not the number of classes.

        """
        if labels.shape[1] != len(self):
            raise ValueError(
                f"the labels have {labels.shape[1]} columns, but there are {len(self)} classes; "
                "give one column for each class"
            )
        closed = sparse.csr_matrix(labels.astype(np.bool_) @ self.ancestors)
        closed.eliminate_zeros()
        closed.sort_indices()
        return closed

    def descriptions(self) -> list[str]:
        """Return the text of each class to embed: its name, and its keywords if it has any."""
        return [
            f"{name}: {', '.join(terms)}".replace("_", " ") if terms else name.replace("_", " ")
            for name, terms in zip(self.names, self.keywords, strict=True)
        ]

    @cached_property
    def _order(self) -> list[int]:
        """All classes, parents before children."""
        return list(TopologicalSorter(dict(enumerate(self.parents))).static_order())


def make_taxonomy(
    classes: Sequence[Row],
    edges: Sequence[Row],
    keywords: Sequence[Sequence[str]] | None = None,
    *,
    source: str,
    dropped: Mapping[str, int] | None = None,
) -> Taxonomy:
    """Validate classes and edges, and return their taxonomy.

    Args:
        classes: id and name of each class.
        edges: ids of parent and child; repeated ones are dropped and counted.
        keywords: the terms of each class, in the order of ``classes``.
        source: the source that an error without a place names.
        dropped: counts of what was left out before, by reason.

    Raises:
        CorpusError: there are no classes, an id is repeated or holds white space or commas (which
            separate ids in files), or an edge has an unknown class, joins a class to itself or
            closes a cycle. The message names the place.

    """
    if not classes:
        raise CorpusError(f"{source}: there are no classes; give a line id<TAB>name for each")
    first: dict[str, Row] = {}
    for row in classes:
        if "," in row.left or row.left.split() != [row.left]:
            raise CorpusError(
                f"{row.place}: {row.left!r} cannot be the id of a class: predictions separate ids "
                "by spaces, gold labels by commas; use one word without commas"
            )
        if not row.right:
            raise CorpusError(f"{row.place}: class {row.left!r} has no name; give it one")
        if row.left in first:
            raise CorpusError(
                f"{row.place}: class id {row.left!r} is repeated, it is already at "
                f"{first[row.left].place}; give each class a unique id"
            )
        first[row.left] = row
    ids = tuple(first)
    position = {id_: c for c, id_ in enumerate(ids)}
    places: dict[tuple[int, int], str] = {}
    for row in edges:
        for id_ in (row.left, row.right):
            if id_ not in position:
                raise CorpusError(f"{row.place}: {unknown_class(id_, ids)}")
        if row.left == row.right:
            raise CorpusError(
                f"{row.place}: class {row.left!r} is its own parent; remove that edge"
            )
        places.setdefault((position[row.left], position[row.right]), row.place)
    counts = Counter(dropped or {})
    counts["repeated edges"] += len(edges) - len(places)
    taxonomy = Taxonomy(
        ids=ids,
        names=tuple(row.right for row in classes),
        edges=tuple(sorted(places)),
        keywords=tuple(tuple(terms) for terms in keywords or [()] * len(ids)),
        dropped={reason: n for reason, n in counts.items() if n},
    )
    _refuse_cycles(taxonomy, places)
    return taxonomy


def read_taxonomy(labels: Path, hierarchy: Path, keywords: Path | None = None) -> Taxonomy:
    """Return the taxonomy in files of TELEClass's format, UTF-8, each plain or ``.gz``.

    Args:
        labels: lines ``id<TAB>name``.
        hierarchy: lines ``parent id<TAB>child id``.
        keywords: lines ``name:term,term``, for every class of that name; names that no class has
            are dropped and counted.

    Raises:
        CorpusError: a file is missing or corrupt, a line is malformed, or as
            :func:`make_taxonomy`.

    """
    classes = list(tab_rows(labels, "id<TAB>name"))
    edges = list(tab_rows(hierarchy, "parent id<TAB>child id"))
    terms: dict[str, dict[str, None]] = {row.right: {} for row in classes}
    unknown = 0
    if keywords is not None:
        for number, line in numbered_lines(keywords, "name:term,term"):
            name, colon, listed = (part.strip() for part in line.rpartition(":"))
            if not colon or not name:
                raise malformed(keywords, number, line, "name:term,term")
            if name in terms:
                terms[name] |= dict.fromkeys(term for t in listed.split(",") if (term := t.strip()))
            else:
                unknown += 1
    return make_taxonomy(
        classes,
        edges,
        [tuple(terms[row.right]) for row in classes],
        source=str(labels),
        dropped={"keywords of unknown classes": unknown},
    )


def unknown_class(id_: str, ids: Sequence[str]) -> str:
    """Return the error message for an id that no class has."""
    nearest = get_close_matches(id_, ids, n=1, cutoff=0.0)[0]
    return (
        f"there is no class {id_!r}; the nearest of the {len(ids)} class ids is {nearest!r}: "
        "correct the id or add the class to the labels"
    )


def _refuse_cycles(taxonomy: Taxonomy, places: Mapping[tuple[int, int], str]) -> None:
    """Refuse a cycle, naming its classes and the last of its edges in the source."""
    sorter = TopologicalSorter(dict(enumerate(taxonomy.parents)))
    try:
        sorter.prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1]
        closing = set(pairwise(cycle))
        place = [place for edge, place in places.items() if edge in closing][-1]
        path = " -> ".join(f"{taxonomy.ids[c]} ({taxonomy.names[c]})" for c in cycle)
        shown = textwrap.shorten(path, 1000, placeholder=" ...")
        raise CorpusError(
            f"{place}: this edge closes a cycle of classes: {shown}; remove one of its edges"
        ) from error


def numbered_lines(path: Path, form: str) -> Iterator[tuple[int, str]]:
    """Yield the number, from 1, and the content of each non-blank line of a UTF-8 text file.

    Raises:
        CorpusError: the file does not exist, is corrupt or is not UTF-8.

    """
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; expected lines {form}")
    with reading(path, f"UTF-8 text, lines {form}"), open_text(path) as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield number, line.removesuffix("\n")


def tab_rows(path: Path, form: str, *, strip: bool = True) -> Iterator[Row]:
    """Yield the lines ``left<TAB>right`` of a file, their fields stripped of white space.

    With ``strip=False`` the right field is the rest of the line as it is, further tabs included.

    Raises:
        CorpusError: as :func:`numbered_lines`, or a line has another number of fields.

    """
    for number, line in numbered_lines(path, form):
        left, tab, right = line.partition("\t")
        if not tab or (strip and "\t" in right):
            raise malformed(path, number, line, form)
        yield Row(f"{path}, line {number}", left.strip(), right.strip() if strip else right)


def malformed(path: Path, number: int, line: str, form: str) -> CorpusError:
    """Return the error for a line in another format."""
    shown = textwrap.shorten(line, 80, placeholder=" ...")
    return CorpusError(f"{path}, line {number}: expected {form}, got {shown!r}; correct that line")
