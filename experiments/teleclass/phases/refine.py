"""Phase 2, refine: class vectors from confident documents, then pseudo-labels, in tasks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
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
from experiments.teleclass.settings import RefineSettings
from experiments.teleclass.task_pools import groups, pool_options
from raypipe.pipeline.context import StageContext
from raypipe.storage.artifacts import write_parquet

#: labels of documents, bool ``[N, C]``; confidence ``[N]``; measures
Labeled = tuple[sparse.csr_matrix, NDArray[np.float32], Counts | None]


@dataclass(frozen=True)
class _Inputs:
    """Inputs that all tasks of a round share; gold labels only for the labels."""

    documents: Embeddings
    classes: Vectors
    taxonomy: Taxonomy
    gold: sparse.csr_matrix | None
    settings: RefineSettings


def run_refine(corpus: Corpus, context: StageContext) -> None:
    """Give the training documents labels; measure them if there are gold labels."""
    settings: RefineSettings = context.settings.refine
    if settings.given is None:
        labels, confidence, counts = _refined(context, corpus, settings)
    else:
        path = (context.settings.data.dir or Path()) / settings.given
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
    values = np.concatenate([np.asarray(classes, np.int32) for classes in lists])
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


def _refined(context: StageContext, corpus: Corpus, settings: RefineSettings) -> Labeled:
    """Refine the class vectors by documents, then label the documents."""
    encoding = context.settings.encode
    documents = embeddings_of(context.run_dir, corpus, encoding, "train")
    classes = embeddings_of(context.run_dir, corpus, encoding, "classes")
    described = normalize(np.concatenate([vectors for _, vectors in classes.blocks()]))
    inputs = _Inputs(documents, described, corpus.taxonomy, None, settings)
    labels = np.full((documents.rows, settings.max_labels), -1, np.int32)
    confidence = np.zeros(documents.rows, np.float32)
    total: Counts | None = None
    context.begin(settings.rounds + 1)
    with context.pool(pool_options(context, settings, neural=False)) as pool:
        parts = groups(len(documents), pool.capacity / settings.cpus)
        for number in range(settings.rounds):
            shared = pool.share(inputs)
            top = TopDocuments.empty(settings.top_documents, len(described))
            for _, best in context.map(pool, [(p, _best_documents, p, shared) for p in parts]):
                top = top.merge(best)
            rows = top.members()[1]
            vectors = refinement.class_vectors(
                top, documents.read_rows(rows), inputs.classes, settings.anchor * described
            )
            inputs = replace(inputs, classes=vectors)
            context.advance(number + 1, f"{len(np.unique(rows))} documents make the classes")
        shared = pool.share(replace(inputs, gold=corpus.train.gold))
        calls = [(part, _labels, part, shared) for part in parts]
        for part, (best_labels, gaps, counts) in context.map(pool, calls):
            start = documents.bounds(part.start)[0]
            labels[start : start + len(gaps)] = best_labels
            confidence[start : start + len(gaps)] = gaps
            total = _sum(total, counts)
    kept = labels[:, 0] >= 0
    if kept.any() and settings.keep < 1:
        kept &= confidence >= np.quantile(confidence[kept], 1 - settings.keep)
    labels[~kept] = -1
    return _matrix(labels, len(corpus.taxonomy)), confidence, total


def _best_documents(blocks: range, inputs: _Inputs) -> TopDocuments:
    """Task: return the most confident documents of each class in some blocks."""
    taxonomy, settings = inputs.taxonomy, inputs.settings
    # each class with itself, its ancestors and its descendants
    related = (taxonomy.ancestors + taxonomy.ancestors.T).astype(bool)
    best = TopDocuments.empty(settings.top_documents, len(inputs.classes))
    for number in blocks:
        scores = refinement.similarities(inputs.documents.read(number), inputs.classes)
        if settings.confidence == "margin":
            scores = refinement.margins(scores, related)
        best = best.with_block(scores, inputs.documents.bounds(number)[0])
    return best


def _labels(
    blocks: range, inputs: _Inputs
) -> tuple[NDArray[np.int32], NDArray[np.float32], Counts | None]:
    """Task: return labels, confidence and measures of the documents in some blocks."""
    taxonomy, gold = inputs.taxonomy, inputs.gold
    labels, confidence = [], []
    total: Counts | None = None
    for number in blocks:
        start, stop = inputs.documents.bounds(number)
        scores = refinement.similarities(inputs.documents.read(number), inputs.classes)
        best, gaps = label(scores, taxonomy, inputs.settings)
        labels.append(best)
        confidence.append(gaps)
        if gold is not None:
            predicted = taxonomy.closure(_matrix(best, len(inputs.classes)))
            total = _sum(total, count(scores, predicted, gold[start:stop], taxonomy.depth))
    return np.concatenate(labels), np.concatenate(confidence), total


def label(
    scores: NDArray[np.float32], taxonomy: Taxonomy, settings: RefineSettings
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return labels ``[B, max_labels]``, -1 after the last, and confidence ``[B]`` of a block.

    ``scores`` are similarities ``[B, C]``.
    """
    if settings.rule == "core":
        candidates = refinement.reached(scores, taxonomy.children, taxonomy.roots)
        scores = np.where(candidates, scores, refinement.NEVER)
    best, values = refinement.best_labels(scores, settings.max_labels)
    return refinement.cut_at_gap(best, values, settings.min_labels)


def _sum(total: Counts | None, counts: Counts | None) -> Counts | None:
    return counts if total is None else total if counts is None else total + counts


def _matrix(labels: NDArray[np.int32], classes: int) -> sparse.csr_matrix:
    rows, places = np.nonzero(labels >= 0)
    indices = labels[rows, places]
    shape = (len(labels), classes)
    matrix = sparse.csr_matrix((np.ones(len(indices), bool), (rows, indices)), shape)
    matrix.sort_indices()
    return matrix
