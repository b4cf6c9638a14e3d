"""Phase 2, refine: class vectors from confident documents, then pseudo-labels, in tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse
from sklearn.preprocessing import normalize

from experiments.teleclass import refinement
from experiments.teleclass.artifacts import label_lists, pool_options, pseudo_labels_path
from experiments.teleclass.corpus import LabeledCorpus, read_annotations
from experiments.teleclass.encoders import Embeddings, embeddings_of
from experiments.teleclass.evaluation import Counts, count, record_measures
from experiments.teleclass.refinement import ClassSums, ClassVectors, TopDocuments, centered
from experiments.teleclass.settings import RefineSettings
from experiments.teleclass.taxonomy import Taxonomy
from raypipe import StageContext, TaskPool, artifacts

#: labels of documents, bool ``[N, C]``; confidence ``[N]``; measures
Labeled = tuple[sparse.csr_matrix, NDArray[np.float32], Counts | None]


@dataclass(frozen=True)
class _RefineInputs:
    """Inputs that all tasks of a round share; gold labels only for the labels."""

    documents: Embeddings
    classes: ClassVectors
    taxonomy: Taxonomy
    gold: sparse.csr_matrix | None
    settings: RefineSettings


def run_refine(corpus: LabeledCorpus, context: StageContext) -> None:
    """Give the training documents labels; measure them if there are gold labels."""
    settings: RefineSettings = context.settings.refine
    if settings.given is None:
        labels, confidence, counts = _refined(context, corpus, settings)
    else:
        _described(context, corpus).write(context.run_dir)
        path = (context.settings.data.dir or Path()) / settings.given
        annotations = read_annotations(path, corpus.taxonomy)
        if absent := len(annotations.keys() - set(corpus.train.ids.to_pylist())):
            context.say(f"{absent} of {len(annotations)} annotated documents are not in the corpus")
        labels, confidence, counts = _given(corpus, annotations)
    table = pa.table(
        {"id": corpus.train.ids, "labels": label_lists(labels), "confidence": confidence}
    )
    artifacts.write_parquet(context.run_dir, pseudo_labels_path(context.run_dir), table)
    number = int((np.diff(labels.indptr) > 0).sum())
    mean = labels.sum() / max(1, number)
    context.say(f"{number} of {len(table)} documents have labels, {mean:.2f} on average")
    if counts is not None:
        record_measures(context, corpus.taxonomy, "pseudo_labels", "train", counts)


def _given(corpus: LabeledCorpus, annotations: Mapping[str, list[int]]) -> Labeled:
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


def _described(context: StageContext, corpus: LabeledCorpus) -> ClassVectors:
    """Return the vectors of the descriptions, without a center."""
    stored = embeddings_of(context.run_dir, corpus, context.settings.encode, "classes")
    encoded = np.concatenate([vectors for _, vectors in stored.blocks()])
    return ClassVectors.of_descriptions(encoded, np.zeros(encoded.shape[1], np.float32))


def _refined(context: StageContext, corpus: LabeledCorpus, settings: RefineSettings) -> Labeled:
    """Refine the class vectors by documents, then label the documents."""
    documents = embeddings_of(context.run_dir, corpus, context.settings.encode, "train")
    described = _described(context, corpus)
    context.begin(settings.rounds + 1)
    with context.pool(pool_options(context, settings, neural=False)) as pool:
        inputs = _RefineInputs(documents, described, corpus.taxonomy, None, settings)
        parts = _groups(len(documents), pool.capacity / settings.cpus)
        if settings.center:
            calls = [(part, _unit_sums, part, documents) for part in parts]
            total = np.zeros(described.vectors.shape[1] + 1)
            for _, found in context.map(pool, calls):
                total += found
            center = (total[:-1] / max(1.0, total[-1])).astype(np.float32)
            described = ClassVectors.of_descriptions(described.vectors, center)
            inputs = replace(inputs, classes=described)
        first = np.full(documents.rows, -1, np.int32)
        for number in range(settings.rounds):
            choices, sums = _round(context, pool, parts, inputs)
            agreement = float(np.mean(choices == first))
            if agreement >= settings.agreement:
                context.say(f"stopped after {number} rounds: {agreement:.1%} of choices agree")
                break
            first, anchors = choices, settings.anchor * described.vectors
            vectors = refinement.class_vectors(sums, inputs.classes.vectors, anchors)
            inputs = replace(inputs, classes=replace(described, vectors=vectors))
            moved = int((sums.documents > 0).sum())
            context.advance(number + 1, f"{moved} of {len(vectors)} classes have documents")
        inputs.classes.write(context.run_dir)
        labels, confidence, counts = _labeled(
            context, pool, parts, replace(inputs, gold=corpus.train.gold)
        )
        if corpus.test is not None and corpus.test.gold is not None:
            predicted = embeddings_of(context.run_dir, corpus, context.settings.encode, "test")
            measured = replace(inputs, documents=predicted, gold=corpus.test.gold)
            spread = _groups(len(predicted), pool.capacity / settings.cpus)
            *_, found = _labeled(context, pool, spread, measured)
            if found is not None:
                record_measures(context, corpus.taxonomy, "refined", "test", found)
    return refinement.label_sets(labels, len(corpus.taxonomy)), confidence, counts


def _round(
    context: StageContext, pool: TaskPool, parts: Sequence[range], inputs: _RefineInputs
) -> tuple[NDArray[np.int32], ClassSums]:
    """Return the most similar class of each document, and the sums of the classes."""
    settings, documents = inputs.settings, inputs.documents
    count = len(inputs.taxonomy)
    shared = pool.share(inputs)
    choices = np.full(documents.rows, -1, np.int32)
    if settings.top_documents is None:
        total = ClassSums.empty(*inputs.classes.vectors.shape)
        for part, (best, own) in context.map(pool, [(p, _sums, p, shared) for p in parts]):
            choices[_rows(documents, part)] = best
            total += own  # in double precision, whatever the order of the tasks
        return choices, total
    parts_of_tasks = []
    calls = [(part, _best_documents, part, shared) for part in parts]
    for part, (best, of_part) in context.map(pool, calls):
        choices[_rows(documents, part)] = best
        parts_of_tasks.append(of_part)
    top = TopDocuments.merged(parts_of_tasks, settings.top_documents)
    weights = np.ones_like(top.scores) if settings.weights == "equal" else top.scores
    vectors = centered(documents.read_rows(top.rows), inputs.classes.center)
    places = np.arange(len(top.rows))
    return choices, refinement.sums(top.classes, places, weights, vectors, count)


def _labeled(
    context: StageContext, pool: TaskPool, parts: Sequence[range], inputs: _RefineInputs
) -> tuple[NDArray[np.int32], NDArray[np.float32], Counts | None]:
    """Return labels ``[N, max_labels]``, confidence ``[N]`` and measures of all documents."""
    documents = inputs.documents
    labels = np.full((documents.rows, inputs.settings.max_labels), -1, np.int32)
    confidence = np.zeros(documents.rows, np.float32)
    total: Counts | None = None
    shared = pool.share(inputs)
    for part, (best, gaps, counts) in context.map(pool, [(p, _labels, p, shared) for p in parts]):
        labels[_rows(documents, part)] = best
        confidence[_rows(documents, part)] = gaps
        total = _sum(total, counts)
    return labels, confidence, total


def _rows(documents: Embeddings, part: range) -> slice:
    return slice(documents.bounds(part.start)[0], documents.bounds(part.stop - 1)[1])


def _unit_sums(blocks: range, documents: Embeddings) -> NDArray[np.float64]:
    """Task: return the sum of the unit vectors in some blocks, and their number ``[d + 1]``."""
    total = np.zeros(documents.read(blocks.start).shape[1] + 1)
    for number in blocks:
        units = normalize(documents.read(number)).astype(np.float64)
        total += np.append(units.sum(0), units.any(1).sum())
    return total


def _confidences(
    number: int, inputs: _RefineInputs
) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
    """Return a block's centered vectors, most similar classes, and confidence of candidates."""
    taxonomy = inputs.taxonomy
    # each class with itself, its ancestors and its descendants
    related = (taxonomy.ancestors + taxonomy.ancestors.T).astype(bool)
    vectors = centered(inputs.documents.read(number), inputs.classes.center)
    scores = refinement.similarities(vectors, inputs.classes.vectors)
    confidence = refinement.candidates(scores, related, inputs.settings)
    return vectors, scores.argmax(1).astype(np.int32), confidence


def _sums(blocks: range, inputs: _RefineInputs) -> tuple[NDArray[np.int32], ClassSums]:
    """Task: return the most similar classes of the documents in some blocks, and the sums."""
    choices = []
    total = ClassSums.empty(*inputs.classes.vectors.shape)
    for number in blocks:
        vectors, best, confidence = _confidences(number, inputs)
        rows, classes = np.nonzero(confidence > refinement.NEVER)
        weights = confidence[rows, classes]
        if inputs.settings.weights == "equal":
            weights = np.ones_like(weights)
        choices.append(best)
        total += refinement.sums(classes, rows, weights, vectors, len(inputs.taxonomy))
    return np.concatenate(choices), total


def _best_documents(blocks: range, inputs: _RefineInputs) -> tuple[NDArray[np.int32], TopDocuments]:
    """Task: return the most similar classes in some blocks, and the best documents of classes."""
    choices, most = [], inputs.settings.top_documents
    assert most is not None
    tops: list[TopDocuments] = []
    for number in blocks:
        _, best, confidence = _confidences(number, inputs)
        choices.append(best)
        first_row, _ = inputs.documents.bounds(number)
        tops.append(TopDocuments.of_block(confidence, first_row, most))
        tops = [TopDocuments.merged(tops, most)]  # so that memory does not grow
    return np.concatenate(choices), tops[0]


def _labels(
    blocks: range, inputs: _RefineInputs
) -> tuple[NDArray[np.int32], NDArray[np.float32], Counts | None]:
    """Task: return labels, confidence and measures of the documents in some blocks."""
    taxonomy, gold = inputs.taxonomy, inputs.gold
    labels, confidence = [], []
    total: Counts | None = None
    for number in blocks:
        start, stop = inputs.documents.bounds(number)
        scores = inputs.classes.similarities(inputs.documents.read(number))
        best, gaps = refinement.label(scores, inputs.settings)
        labels.append(best)
        confidence.append(gaps)
        if gold is not None:
            predicted = taxonomy.closure(refinement.label_sets(best, len(taxonomy)))
            total = _sum(total, count(scores, predicted, gold[start:stop], taxonomy.depth))
    return np.concatenate(labels), np.concatenate(confidence), total


def _sum(total: Counts | None, counts: Counts | None) -> Counts | None:
    return counts if total is None else total if counts is None else total + counts


def _groups(blocks: int, workers: float) -> list[range]:
    """Return runs of adjacent blocks, a few per worker: one run per task."""
    size = max(1, blocks // max(1, int(4 * workers)))
    return [range(start, min(start + size, blocks)) for start in range(0, blocks, size)]
