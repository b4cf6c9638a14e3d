"""Arithmetic of phase 2: top documents of classes, class vectors, labels of documents.

All functions work on blocks of rows and keep only the best few, so that memory does not grow with
the number of documents. Scores are cosine similarities; ties go to the smaller index.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.preprocessing import normalize

from experiments.teleclass.settings import RefineSettings
from raypipe import RunDirectory

Floats = NDArray[np.float32]
Rows = NDArray[np.int64]

#: score of a class or a document without a vector
NEVER = -np.inf
_RANKED = 32


class TopDocuments(NamedTuple):
    """The best documents of classes: a class, a row and a score each ``[n]``.

    They are ordered by class, then by score, the best first, then by row.
    """

    classes: Rows
    rows: Rows
    scores: Floats

    def best(self, k: int) -> TopDocuments:
        """Return the ``k`` best documents of each class."""
        order = np.lexsort((self.rows, -self.scores, self.classes))
        classes = self.classes[order]
        kept = order[np.arange(len(order)) - np.searchsorted(classes, classes) < k]
        return TopDocuments(self.classes[kept], self.rows[kept], self.scores[kept])

    @staticmethod
    def of_block(scores: Floats, first_row: int, k: int) -> TopDocuments:
        """Return the best of a block of documents ``[B, C]`` that begins at this row.

        No document has the score :data:`NEVER`.
        """
        possible = scores > NEVER
        if len(scores) > k:
            possible &= scores >= np.partition(scores, -k, axis=0)[-k]
        rows, classes = np.nonzero(possible)
        return TopDocuments(classes, rows + first_row, scores[rows, classes]).best(k)

    @staticmethod
    def merged(parts: Iterable[TopDocuments], k: int) -> TopDocuments:
        """Return the best documents of all parts, at least one, in any order."""
        return TopDocuments(*map(np.concatenate, zip(*parts, strict=True))).best(k)


def similarities(documents: Floats, classes: Floats) -> Floats:
    """Return cosine similarities ``[B, C]``; :data:`NEVER` where a vector is zero.

    ``classes`` ``[C, d]`` have length 1 or 0, ``documents`` ``[B, d]`` any length.
    """
    length = np.linalg.norm(documents, axis=1)
    scores: Floats = documents @ classes.T
    scores /= np.where(length > 0, length, 1)[:, None]
    scores[length == 0] = NEVER
    scores[:, ~classes.any(1)] = NEVER
    return scores


def margins(scores: Floats, related: sparse.csr_matrix) -> Floats:
    """Return each class's margin over the best class that is not its ancestor or descendant.

    Args:
        scores: similarities ``[B, C]``.
        related: bool ``[C, C]``: each class with itself, its ancestors and its descendants.

    Returns:
        ``[B, C]``; the similarity itself for a class that is related to all others.

    """
    count = scores.shape[1]
    dense = related.toarray()
    order = ranked(scores, min(_RANKED, count))
    best = np.full_like(scores, -np.inf)
    left = np.ones(scores.shape, bool)
    for rank in order.T:
        unrelated = left & ~dense[rank]
        if unrelated.any():
            values = scores[np.arange(len(scores)), rank]
            best = np.where(unrelated, values[:, None], best)
            left &= ~unrelated
        if not left.any():
            break
    for start in range(0, len(pairs := np.argwhere(left)), 4096):
        rows, classes = pairs[start : start + 4096].T
        best[rows, classes] = np.where(dense[classes], -np.inf, scores[rows]).max(1)
    rivals = np.isfinite(best)
    return np.where(rivals, scores - np.where(rivals, best, 0), scores)


def candidates(scores: Floats, related: sparse.csr_matrix, settings: RefineSettings) -> Floats:
    """Return the confidence of documents in classes ``[B, C]``; :data:`NEVER` for no candidate.

    With ``candidates: first_choice`` a document is a candidate of the classes that are more similar
    than all unrelated ones: its most similar class, and relatives of it.

    Args:
        scores: similarities ``[B, C]``.
        related: as for :func:`margins`.
        settings: ``candidates`` and ``confidence`` are used.

    """
    if settings.candidates == "all" and settings.confidence == "similarity":
        return scores
    margin = margins(scores, related)
    confidence = scores if settings.confidence == "similarity" else margin
    if settings.candidates == "all":
        return confidence
    return np.where(margin > 0, confidence, NEVER).astype(np.float32)


@dataclass(frozen=True)
class ClassSums:
    """Sums over the documents of each class.

    Attributes:
        vectors: float64 [C, d], unit vectors times their weights.
        weights: float64 [C].
        documents: int64 [C].

    """

    vectors: NDArray[np.float64]
    weights: NDArray[np.float64]
    documents: Rows

    @staticmethod
    def empty(classes: int, dimensions: int) -> ClassSums:
        """Return the sums of no document."""
        zeros = np.zeros(classes)
        return ClassSums(np.zeros((classes, dimensions)), zeros, zeros.astype(np.int64))

    def __add__(self, other: ClassSums) -> ClassSums:
        return ClassSums(
            self.vectors + other.vectors,
            self.weights + other.weights,
            self.documents + other.documents,
        )


def sums(classes: Rows, rows: Rows, weights: Floats, vectors: Floats, number: int) -> ClassSums:
    """Return the sums of classes ``[C]`` from pairs of a class and a row.

    Args:
        classes: class of each pair ``[n]``.
        rows: row of each pair in ``vectors``, ``[n]``.
        weights: weight of each pair ``[n]``; negative ones count as zero.
        vectors: vectors ``[m, d]`` of any length.
        number: the number of classes C.

    """
    positive = weights.clip(0).astype(np.float64)
    member = sparse.csr_matrix((positive, (classes, rows)), (number, len(vectors)))
    units = normalize(vectors).astype(np.float64)
    total = np.bincount(classes, positive, number).astype(np.float64)  # integers without a pair
    return ClassSums(member @ units, total, np.bincount(classes, minlength=number))


def class_vectors(total: ClassSums, earlier: Floats, anchors: Floats) -> Floats:
    """Return new class vectors ``[C, d]``: the direction of a class's documents and its anchor.

    A weight counts relative to the mean weight of all pairs, so that an anchor of length k weighs
    as much as k documents.

    Args:
        total: the sums of all documents.
        earlier: class vectors ``[C, d]`` so far, kept for a class without a vector, without
            documents, or whose documents have no vector.
        anchors: vectors ``[C, d]``; zero for none.

    """
    mean = total.weights.sum() / max(1, total.documents.sum())
    added = total.vectors / (mean if mean > 0 else 1.0)
    known = added.any(1, keepdims=True) & earlier.any(1, keepdims=True)
    new: Floats = np.where(known, normalize(added + anchors), earlier)
    return new.astype(np.float32)


def best_labels(scores: Floats, most: int) -> tuple[NDArray[np.int32], Floats]:
    """Return the ``most + 1`` best classes of each document, and their scores.

    If there are fewer classes, the rest is -1 with the score of the last one.
    """
    count = min(most + 1, scores.shape[1])
    classes = ranked(scores, count)
    values = np.take_along_axis(scores, classes, 1)
    classes = np.where(values > NEVER, classes, -1)
    missing = most + 1 - count
    return (
        np.pad(classes, ((0, 0), (0, missing)), constant_values=-1).astype(np.int32),
        np.pad(values, ((0, 0), (0, missing)), mode="edge"),
    )


def cut_at_gap(
    classes: NDArray[np.int32], scores: Floats, least: int
) -> tuple[NDArray[np.int32], Floats]:
    """Return labels up to the largest gap between neighbors, at least ``least``, and that gap.

    Args:
        classes: the best classes ``[B, m + 1]`` of :func:`best_labels`, -1 for none.
        scores: scores of these classes.
        least: smallest number of labels per document.

    Returns:
        Labels ``[B, m]``, -1 after the last; the lead of the last label over the next class
        ``[B]``, 0 if there is no next class.

    """
    # there is no gap after the last class
    values = np.where(classes >= 0, scores, 0)
    gaps = np.where(classes[:, 1:] >= 0, values[:, :-1] - values[:, 1:], -1)
    cut = np.maximum(gaps.argmax(1) + 1, least)
    labels = np.where(np.arange(gaps.shape[1]) < cut[:, None], classes[:, :-1], -1)
    return labels, np.take_along_axis(gaps, cut[:, None] - 1, 1)[:, 0].clip(0)


def ranked(scores: Floats, count: int) -> NDArray[np.int64]:
    """Return the columns of the ``count`` largest values of each row; ties by index."""
    if count < scores.shape[1]:
        kept = np.sort(np.argpartition(-scores, count - 1, axis=1)[:, :count], axis=1)
        least = np.take_along_axis(scores, kept, 1).min(1)
        # argpartition keeps arbitrary columns among those equal to the last one
        tied = np.count_nonzero(scores >= least[:, None], axis=1) > count
        kept[tied] = np.argsort(-scores[tied], axis=1, kind="stable")[:, :count]
    else:
        kept = np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    order = np.argsort(-np.take_along_axis(scores, kept, 1), axis=1, kind="stable")
    return np.take_along_axis(kept, order, 1)


def label(scores: Floats, settings: RefineSettings) -> tuple[NDArray[np.int32], Floats]:
    """Return labels ``[B, max_labels]``, -1 after the last, and confidence ``[B]`` of a block.

    ``scores`` are similarities ``[B, C]``, or other scores with the same meaning of a gap.
    """
    best, values = best_labels(scores, settings.max_labels)
    return cut_at_gap(best, values, settings.min_labels)


def label_sets(labels: NDArray[np.int32], classes: int) -> sparse.csr_matrix:
    """Return labels of :func:`label` as bool ``[B, C]``."""
    rows, places = np.nonzero(labels >= 0)
    indices = labels[rows, places]
    shape = (len(labels), classes)
    matrix = sparse.csr_matrix((np.ones(len(indices), bool), (rows, indices)), shape)
    matrix.sort_indices()
    return matrix


def centered(vectors: Floats, center: Floats) -> Floats:
    """Return vectors ``[n, d]`` of length 1 minus a center ``[d]``; zero for a zero vector."""
    known = vectors.any(1, keepdims=True)
    return np.where(known, normalize(vectors) - center, 0).astype(np.float32)


@dataclass(frozen=True)
class ClassVectors:
    """Vectors of classes, and the center that is subtracted from the vectors of documents.

    Attributes:
        vectors: float32 [C, d] of length 1, or 0 for a class without a vector.
        center: float32 [d].

    """

    vectors: Floats
    center: Floats

    @staticmethod
    def of_descriptions(encoded: Floats, center: Floats) -> ClassVectors:
        """Return the vectors of descriptions as they were encoded ``[C, d]``, centered."""
        return ClassVectors(normalize(centered(encoded, center)), center)

    def similarities(self, documents: Floats) -> Floats:
        """Return the similarity of encoded documents to classes ``[B, C]``.

        It is :data:`~experiments.teleclass.refinement.NEVER` where a vector is zero.
        """
        return similarities(centered(documents, self.center), self.vectors)

    def write(self, run_dir: RunDirectory) -> None:
        """Store the vectors in a run directory."""
        stream = io.BytesIO()
        np.savez(stream, vectors=self.vectors, center=self.center)
        run_dir.write(_path(run_dir), stream.getvalue())

    @staticmethod
    def read(run_dir: RunDirectory) -> ClassVectors:
        """Return the vectors of a run directory.

        Raises:
            OSError, ValueError: they are missing or corrupt.

        """
        with np.load(io.BytesIO(run_dir.read(_path(run_dir))), allow_pickle=False) as stored:
            return ClassVectors(stored["vectors"], stored["center"])


def _path(run_dir: RunDirectory) -> str:
    return run_dir.artifact("refine", "classes.npz")
