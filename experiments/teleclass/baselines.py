"""Baselines: nearest classes by embedding and TF-IDF, a constant, training with gold labels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import reduce
from itertools import chain
from itertools import count as count_from
from operator import add

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.preprocessing import normalize
from sklearn.svm import LinearSVC

from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.documents import Documents
from experiments.teleclass.encoders import embeddings_of
from experiments.teleclass.evaluation import Counts, count, record_measures
from experiments.teleclass.refinement import similarities
from raypipe import StageContext

_BLOCK = 4096
#: training documents of the reference at most, drawn at random
_MOST_SUPERVISED = 20_000


def run_baselines(corpus: LabeledCorpus, context: StageContext) -> None:
    """Measure the baselines on the documents to predict, if they have gold labels.

    Each takes the most similar class with its ancestors: by the encoder's vectors of the classes'
    names, or of their descriptions (names and keywords), or by TF-IDF of the descriptions. The
    constant prediction is the same for all documents. If other documents than these have gold
    labels, linear classifiers that learn from them are a reference.
    """
    encoding = context.settings.encode
    documents = corpus.documents(corpus.predicted)
    if documents.gold is None:
        context.say("there are no gold labels to measure the baselines by")
        return
    stored = embeddings_of(context.run_dir, corpus, encoding, corpus.predicted)
    for method, name in (("nearest_name", "names"), ("nearest_description", "classes")):
        classes = embeddings_of(context.run_dir, corpus, encoding, name)
        vectors = normalize(np.concatenate([block for _, block in classes.blocks()]))
        scores = ((start, similarities(block, vectors)) for start, block in stored.blocks())
        nearest = _measured(corpus, scores)
        record_measures(context, corpus.taxonomy, method, corpus.predicted, nearest)
    tfidf = context.call("baselines/tfidf", _tfidf_measured, corpus)
    record_measures(context, corpus.taxonomy, "tfidf", corpus.predicted, tfidf)
    constant = _constant_measured(corpus, documents.gold)
    record_measures(context, corpus.taxonomy, "constant", corpus.predicted, constant)
    gold = corpus.train.gold
    if corpus.predicted != "train" and gold is not None and gold.nnz:
        bound = context.call("baselines/supervised", _supervised_measured, corpus)
        record_measures(context, corpus.taxonomy, "supervised", corpus.predicted, bound)


def _constant_measured(corpus: LabeledCorpus, gold: sparse.csr_matrix) -> Counts:
    """Return the sums if all documents have the one class, with ancestors, of the best example-F1.

    It is chosen by the gold labels, and classes are ranked by their frequency in them.
    """
    taxonomy = corpus.taxonomy
    paths = taxonomy.closure(sparse.identity(len(taxonomy), bool, "csr"))
    both = (paths.astype(np.int64) @ gold.T.astype(np.int64)).tocoo()
    sizes = paths.getnnz(axis=1)[both.row] + gold.getnnz(axis=1)[both.col]
    best = int(np.bincount(both.row, 2 * both.data / sizes, len(taxonomy)).argmax())
    frequency = gold.getnnz(axis=0).astype(np.float32)
    counts = []
    for start in range(0, gold.shape[0], _BLOCK):
        truth = gold[start : start + _BLOCK]
        rows = truth.shape[0]
        chosen = paths[np.full(rows, best)]
        counts.append(count(np.tile(frequency, (rows, 1)), chosen, truth, taxonomy.depth))
    return reduce(add, counts)


def _tfidf_measured(corpus: LabeledCorpus) -> Counts:
    """Task: return the sums of the measures of TF-IDF similarity."""
    return _measured(corpus, tfidf_similarities(corpus))


def tfidf_similarities(corpus: LabeledCorpus) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield the first row and the similarity to descriptions ``[B, C]`` of blocks to predict."""
    descriptions = corpus.taxonomy.descriptions()
    documents = corpus.documents(corpus.predicted)
    vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english", dtype=np.float32)
    vectorizer.fit(chain(*_texts(corpus.train), descriptions))
    classes = vectorizer.transform(descriptions).T
    for start, texts in zip(count_from(0, _BLOCK), _texts(documents), strict=False):
        yield start, (vectorizer.transform(texts) @ classes).toarray()


def _supervised_measured(corpus: LabeledCorpus) -> Counts:
    """Task: return the sums of the measures of linear SVMs on TF-IDF, one per class.

    A document has the class of its best score, and those on the positive side.
    """
    gold = corpus.train.gold
    assert gold is not None
    labeled = np.flatnonzero(gold.getnnz(axis=1))
    if len(labeled) > _MOST_SUPERVISED:
        labeled = np.sort(np.random.default_rng(0).choice(labeled, _MOST_SUPERVISED, replace=False))
    train, truth = corpus.train.take(labeled), gold[labeled]
    vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english", dtype=np.float32)
    inputs = vectorizer.fit_transform(chain(*_texts(train)))
    numbers = truth.getnnz(axis=0)
    varied = np.flatnonzero((numbers > 0) & (numbers < len(labeled)))
    common = np.flatnonzero(numbers == len(labeled))
    models = [LinearSVC().fit(inputs, truth[:, [c]].toarray().ravel()) for c in varied]

    def scores(texts: list[str]) -> NDArray[np.float32]:
        found = np.full((len(texts), truth.shape[1]), -np.inf, np.float32)
        found[:, common] = 1.0
        vectors = vectorizer.transform(texts)
        for place, model in zip(varied, models, strict=True):
            found[:, place] = model.decision_function(vectors)
        return found

    parts = _texts(corpus.documents(corpus.predicted))
    blocks = ((start, scores(texts)) for start, texts in zip(count_from(0, _BLOCK), parts))
    return _measured(corpus, blocks, threshold=0.0)


def _texts(documents: Documents) -> Iterator[list[str]]:
    for start in range(0, len(documents), _BLOCK):
        yield documents.text_list(start, min(start + _BLOCK, len(documents)))


def _measured(
    corpus: LabeledCorpus,
    blocks: Iterable[tuple[int, NDArray[np.float32]]],
    threshold: float = np.inf,
) -> Counts:
    """Return the sums if each document has the class with the best score, with its ancestors.

    It also has those whose score is above a threshold.
    """
    taxonomy, gold = corpus.taxonomy, corpus.documents(corpus.predicted).gold
    counts = []
    for start, scores in blocks:
        has = scores > threshold
        has[np.arange(len(scores)), scores.argmax(1)] = True
        chosen = sparse.csr_matrix(has)
        truth = gold[start : start + len(scores)]  # type: ignore[index]
        counts.append(count(scores, taxonomy.closure(chosen), truth, taxonomy.depth))
    return reduce(add, counts)
