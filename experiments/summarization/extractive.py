"""Extractive summaries: sentences of a document, the first or the most central ones."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer

#: a sentence ends at white space after a full stop, or at an empty line
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n\s*\n")
#: sentences of a longer document that are compared, and the rounds of the power iteration
_MOST_SENTENCES, _ROUNDS = 500, 50
_DAMPING = 0.85


def lead(document: str, sentences: int) -> str:
    """Return the first sentences of a document."""
    return " ".join(_sentences(document)[:sentences])


def central(documents: Sequence[str], numbers: Sequence[int]) -> list[list[str]]:
    """Task: return for each number that many of the most central sentences of each document.

    They keep their order. Centrality is that of LexRank (Erkan and Radev 2004, "LexRank:
    graph-based lexical centrality as salience in text summarization"): the PageRank of a sentence
    among those of its document, with the cosine of their TF-IDF vectors as weights. A sentence has
    no weight to itself. Of equally central ones the first are taken.
    """
    parts = [_sentences(document)[:_MOST_SENTENCES] for document in documents]
    orders = [_by_centrality(sentences) for sentences in parts]
    return [
        [
            " ".join(sentences[place] for place in sorted(order[:number]))
            for sentences, order in zip(parts, orders, strict=True)
        ]
        for number in numbers
    ]


def _by_centrality(sentences: Sequence[str]) -> list[int]:
    """Return the places of sentences, the most central first."""
    total = len(sentences)
    if total < 2:
        return list(range(total))
    try:
        vectors = TfidfVectorizer().fit_transform(sentences)
    except ValueError:  # no word in any of them
        return list(range(total))
    weights = (vectors @ vectors.T).toarray()
    np.fill_diagonal(weights, 0)
    sums = weights.sum(1, keepdims=True)
    share = np.where(sums > 0, weights / np.where(sums > 0, sums, 1), 1 / total)
    rank = np.full(total, 1 / total)
    for _ in range(_ROUNDS):
        rank = (1 - _DAMPING) / total + _DAMPING * rank @ share
    return [int(place) for place in np.argsort(-rank.round(12), kind="stable")]


def _sentences(document: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(document.strip()) if part]
