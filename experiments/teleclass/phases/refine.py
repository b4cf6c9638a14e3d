"""Phase 2, refine: class vectors from confident documents, then pseudo-labels, in tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse
from sklearn.preprocessing import normalize

from experiments.teleclass import refinement
from experiments.teleclass.artifacts import label_lists, pseudo_labels_path, record_measures
from experiments.teleclass.data.annotations import read_annotations
from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.data.taxonomy import Taxonomy
from experiments.teleclass.embeddings import Embeddings, Vectors, embeddings_of
from experiments.teleclass.evaluation import Counts, count
from experiments.teleclass.refinement import TopDocuments
from experiments.teleclass.settings import EncodeSettings, RefineSettings
from experiments.teleclass.task_pools import groups, pool_options
from raypipe.pipeline.context import StageContext
from raypipe.pipeline.launcher import TaskPool
from raypipe.storage.artifacts import write_parquet

#: labels of documents, bool ``[N, C]``; confidence ``[N]``; measures
Labeled = tuple[sparse.csr_matrix, NDArray[np.float32], Counts | None]


def refine(corpus: Corpus, context: StageContext) -> None:
    """Give the training documents labels; measure them if there are gold labels."""
    data, encoding, settings = (getattr(context.settings, n) for n in ("data", "encode", "refine"))
    if settings.given is None:
        labels, confidence, counts = _refined(context, corpus, encoding, settings)
    else:
        path = (data.dir or Path()) / settings.given
        annotations = read_annotations(path, corpus.taxonomy)
        if absent := len(annotations.keys() - set(corpus.train.ids.to_pylist())):
            context.say(f"{absent} of {len(annotations)} annotated documents are not in the corpus")
        labels, confidence, counts = _given(corpus, annotations)
    table = pa.table(
        {"id": corpus.train.ids, "labels": label_lists(labels), "confidence": confidence}
    )
    write_parquet(context.run_dir, pseudo_labels_path(context.run_dir), table)
    number = int((np.diff(labels.indptr) > 0).sum())
    mean = labels.sum() / max(1, number)
    context.say(f"{number} of {len(table)} documents have labels, {mean:.2f} on average")
    if counts is not None:
        record_measures(context, corpus.taxonomy, "pseudo_labels", "train", counts)


def _given(corpus: Corpus, annotations: Mapping[str, list[int]]) -> Labeled:
    """Return given labels, with the measures of the documents that have some."""
    taxonomy, gold = corpus.taxonomy, corpus.train.gold
    lists = [annotations.get(name, []) for name in corpus.train.ids.to_pylist()]
    starts = np.cumsum([0, *map(len, lists)])
    values = np.concatenate([np.asarray(each, np.int32) for each in lists])
    shape = (len(lists), len(taxonomy))
    labels = sparse.csr_matrix((np.ones(len(values), bool), values, starts), shape)
    labels.sort_indices()
    confidence = (np.diff(starts) > 0).astype(np.float32)
    if gold is None:
        return labels, confidence, None
    rows = np.flatnonzero(confidence)
    predicted = taxonomy.closure(labels[rows])
    scores = predicted.toarray().astype(np.float32)
    return labels, confidence, count(scores, predicted, gold[rows], taxonomy.depth)


def _refined(
    context: StageContext, corpus: Corpus, encoding: EncodeSettings, settings: RefineSettings
) -> Labeled:
    """Refine the class vectors by documents, then label the documents."""
    documents = embeddings_of(context.run_dir, corpus, encoding, "train")
    classes = embeddings_of(context.run_dir, corpus, encoding, "classes")
    described = normalize(np.concatenate([vectors for _, vectors in classes.blocks()]))
    context.begin(settings.rounds + 1)
    with context.pool(pool_options(context, settings, neural=False)) as pool:
        parts = groups(len(documents), pool.capacity / settings.cpus)
        vectors = described
        for number in range(settings.rounds):
            arguments = (documents, corpus.taxonomy, vectors, settings)
            top = _top_documents(context, pool, parts, *arguments)
            chosen = top.members()[1]
            members = documents.read_rows(chosen)
            vectors = refinement.class_vectors(top, members, vectors, settings.anchor * described)
            context.advance(number + 1, f"{len(np.unique(chosen))} documents make the classes")
        labels, confidence, counts = _labeled(
            context, pool, parts, documents, corpus, vectors, settings
        )
    kept = labels[:, 0] >= 0
    if kept.any() and settings.keep < 1:
        kept &= confidence >= np.quantile(confidence[kept], 1 - settings.keep)
    labels[~kept] = -1
    return _matrix(labels, len(corpus.taxonomy)), confidence, counts


def _top_documents(
    context: StageContext,
    pool: TaskPool,
    parts: Sequence[range],
    documents: Embeddings,
    taxonomy: Taxonomy,
    vectors: Vectors,
    settings: RefineSettings,
) -> TopDocuments:
    """Return the most confident documents of each class, over all blocks."""
    related = _related(taxonomy) if settings.confidence == "margin" else None
    shared = pool.share((documents, vectors, related, settings.top_documents))
    calls = [(part, _best_of, part, shared) for part in parts]
    best = TopDocuments.empty(settings.top_documents, len(vectors))
    for _, found in context.map(pool, calls):
        best = best.merge(found)
    return best


def _labeled(
    context: StageContext,
    pool: TaskPool,
    parts: Sequence[range],
    documents: Embeddings,
    corpus: Corpus,
    vectors: Vectors,
    settings: RefineSettings,
) -> tuple[NDArray[np.int32], NDArray[np.float32], Counts | None]:
    """Return the labels ``[N, max_labels]`` of all documents, in their order."""
    shared = pool.share((documents, vectors, corpus.taxonomy, corpus.train.gold, settings))
    calls = [(part, _labels_of, part, shared) for part in parts]
    labels = np.full((documents.rows, settings.max_labels), -1, np.int32)
    confidence = np.zeros(documents.rows, np.float32)
    total: Counts | None = None
    for _, (start, found, sure, counts) in context.map(pool, calls):
        labels[start : start + len(found)] = found
        confidence[start : start + len(found)] = sure
        if counts is not None:
            total = counts if total is None else total + counts
    return labels, confidence, total


def _best_of(
    blocks: range, shared: tuple[Embeddings, Vectors, sparse.csr_matrix | None, int]
) -> TopDocuments:
    """Task: return the most confident documents of each class in some blocks."""
    documents, classes, related, k = shared
    best = TopDocuments.empty(k, len(classes))
    for number in blocks:
        scores = refinement.similarities(documents.read(number), classes)
        if related is not None:
            scores = refinement.margins(scores, related)
        best = best.with_block(scores, documents.bounds(number)[0])
    return best


def _labels_of(
    blocks: range,
    shared: tuple[Embeddings, Vectors, Taxonomy, sparse.csr_matrix | None, RefineSettings],
) -> tuple[int, NDArray[np.int32], NDArray[np.float32], Counts | None]:
    """Task: return the first row, the labels and the confidence of the documents in some blocks."""
    documents, classes, taxonomy, gold, settings = shared
    labels, confidence = [], []
    total: Counts | None = None
    for number in blocks:
        start, stop = documents.bounds(number)
        scores = refinement.similarities(documents.read(number), classes)
        found, sure = label(scores, taxonomy, settings)
        labels.append(found)
        confidence.append(sure)
        if gold is not None:
            predicted = taxonomy.closure(_matrix(found, len(classes)))
            counts = count(scores, predicted, gold[start:stop], taxonomy.depth)
            total = counts if total is None else total + counts
    first = documents.bounds(blocks.start)[0]
    return first, np.concatenate(labels), np.concatenate(confidence), total


def label(
    scores: NDArray[np.float32], taxonomy: Taxonomy, settings: RefineSettings
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return labels ``[B, max_labels]``, -1 after the last, and confidence ``[B]`` of a block.

    Args:
        scores: similarities ``[B, C]``.
        taxonomy: the classes that the top-down search of ``rule=core`` visits.
        settings: the rule.

    """
    least = settings.min_labels
    if settings.rule == "core":
        candidates = refinement.reached(scores, taxonomy.children, taxonomy.roots)
        scores = np.where(candidates, scores, refinement.NEVER)
    best, values = refinement.best_labels(scores, settings.max_labels)
    return refinement.cut_at_gap(best, values, least)


def _related(taxonomy: Taxonomy) -> sparse.csr_matrix:
    """Return bool ``[C, C]``: each class with itself, its ancestors and its descendants."""
    return (taxonomy.ancestors + taxonomy.ancestors.T).astype(bool)


def _matrix(labels: NDArray[np.int32], classes: int) -> sparse.csr_matrix:
    rows, places = np.nonzero(labels >= 0)
    found = labels[rows, places]
    shape = (len(labels), classes)
    matrix = sparse.csr_matrix((np.ones(len(found), bool), (rows, found)), shape)
    matrix.sort_indices()
    return matrix
