"""Baselines of the phases: nearest class name by embedding, and TF-IDF similarity."""

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

from experiments.teleclass.artifacts import record_measures
from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.data.documents import Documents
from experiments.teleclass.embeddings import embeddings_of
from experiments.teleclass.evaluation import Counts, count
from experiments.teleclass.refinement import similarities
from raypipe.pipeline.context import StageContext

_BLOCK = 4096


def run_baselines(corpus: Corpus, context: StageContext) -> None:
    """Measure both baselines on the documents to predict, if they have gold labels.

    Each takes the most similar class with its ancestors. The names' vectors are those of the
    encoder; TF-IDF, of the training documents, sees the classes' names and keywords.
    """
    encoding = context.settings.encode
    documents = corpus.documents(corpus.predicted)
    if documents.gold is None:
        context.say("there are no gold labels to measure the baselines by")
        return
    names = embeddings_of(context.run_dir, corpus, encoding, "names")
    vectors = normalize(np.concatenate([block for _, block in names.blocks()]))
    stored = embeddings_of(context.run_dir, corpus, encoding, corpus.predicted)
    nearest = _measured(
        corpus, ((start, similarities(block, vectors)) for start, block in stored.blocks())
    )
    record_measures(context, corpus.taxonomy, "nearest_name", corpus.predicted, nearest)
    tfidf = context.call("baselines/tfidf", _tfidf_measured, corpus)
    record_measures(context, corpus.taxonomy, "tfidf", corpus.predicted, tfidf)


def _tfidf_measured(corpus: Corpus) -> Counts:
    """Task: return the sums of the measures of TF-IDF similarity."""
    descriptions = corpus.taxonomy.descriptions()
    documents = corpus.documents(corpus.predicted)
    vectorizer = TfidfVectorizer(sublinear_tf=True, stop_words="english", dtype=np.float32)
    vectorizer.fit(chain(*_texts(corpus.train), descriptions))
    classes = vectorizer.transform(descriptions).T
    blocks = (
        (start, (vectorizer.transform(texts) @ classes).toarray())
        for start, texts in zip(count_from(0, _BLOCK), _texts(documents), strict=False)
    )
    return _measured(corpus, blocks)


def _texts(documents: Documents) -> Iterator[list[str]]:
    for start in range(0, len(documents), _BLOCK):
        yield documents.text_list(start, min(start + _BLOCK, len(documents)))


def _measured(corpus: Corpus, blocks: Iterable[tuple[int, NDArray[np.float32]]]) -> Counts:
    """Return the sums if each document has the class with the best score, and its ancestors."""
    taxonomy, gold = corpus.taxonomy, corpus.documents(corpus.predicted).gold
    counts = []
    for start, scores in blocks:
        best = (np.arange(len(scores)), scores.argmax(1))
        chosen = sparse.csr_matrix((np.ones(len(scores), bool), best), scores.shape)
        truth = gold[start : start + len(scores)]  # type: ignore[index]
        counts.append(count(scores, taxonomy.closure(chosen), truth, taxonomy.depth))
    return reduce(add, counts)
