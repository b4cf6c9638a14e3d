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


def central(documents: Sequence[str], sentences: int) -> list[str]:
    """Task: return the most central sentences of each document, in their order.

    Centrality is that of LexRank (Erkan and Radev 2004, "LexRank: graph-based lexical centrality as
    salience in text summarization"): the PageRank of a sentence among those of its document, with
    the cosine of their TF-IDF vectors as weights. A sentence has no weight to itself. Of equally
    central ones the first are taken.
    """
    return [_central(document, sentences) for document in documents]


def _central(document: str, number: int) -> str:
    parts = _sentences(document)[:_MOST_SENTENCES]
    if len(parts) <= number:
        return " ".join(parts)
    try:
        vectors = TfidfVectorizer().fit_transform(parts)
    except ValueError:  # no word in any of them
        return " ".join(parts[:number])
    weights = (vectors @ vectors.T).toarray()
    np.fill_diagonal(weights, 0)
    sums = weights.sum(1, keepdims=True)
    share = np.where(sums > 0, weights / np.where(sums > 0, sums, 1), 1 / len(parts))
    rank = np.full(len(parts), 1 / len(parts))
    for _ in range(_ROUNDS):
        rank = (1 - _DAMPING) / len(parts) + _DAMPING * rank @ share
    best = np.argsort(-rank.round(12), kind="stable")[:number]
    return " ".join(parts[place] for place in sorted(best))


def _sentences(document: str) -> list[str]:
    return [part for part in _SENTENCE_END.split(document.strip()) if part]
