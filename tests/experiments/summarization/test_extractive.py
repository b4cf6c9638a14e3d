"""Sentences that are taken from a document as its summary."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from experiments.summarization.baselines import central, lead

STORY = (
    "It rained. The cat chased the red mouse. The red mouse hid from the cat. "
    "Nothing else happened. The dog saw the cat and a bird."
)


@pytest.mark.parametrize(
    ("sentences", "expected"), [(1, "First one."), (2, "First one. Is it?"), (9, None)]
)
def test_the_lead_is_the_first_sentences(sentences, expected) -> None:
    document = "First one.  Is it?\nYes, v1.5 of\nit\n\nA heading\n\nEnd"
    whole = "First one. Is it? Yes, v1.5 of\nit A heading End"
    assert lead(document, sentences) == (expected or whole)


def test_the_central_sentence_shares_most_words_with_the_others() -> None:
    assert central([STORY], [1]) == [["The cat chased the red mouse."]]
    assert central([STORY, STORY], [1]) == [2 * central([STORY], [1])[0]]


def test_centrality_is_the_stationary_distribution_of_the_graph() -> None:
    sentences = [f"{part}." for part in STORY.rstrip(".").split(". ")]
    vectors = TfidfVectorizer().fit_transform(sentences)
    weights = (vectors @ vectors.T).toarray() - np.eye(len(sentences))
    sums = weights.sum(1, keepdims=True).round(9)
    share = np.where(sums > 0, weights / np.maximum(sums, 1e-9), 1 / len(sentences))
    walk = 0.15 / len(sentences) + 0.85 * share
    values, columns = np.linalg.eig(walk.T)
    stationary = np.abs(columns[:, values.real.argmax()].real)
    order = np.argsort(-stationary)
    for number in (1, 2, 3):
        expected = " ".join(sentences[place] for place in sorted(order[:number]))
        assert central([STORY], [number]) == [[expected]]


@pytest.mark.parametrize("document", ["", "One sentence only.", "1 2. 3! 4?", "? ! ."])
def test_short_and_wordless_documents_have_a_summary(document: str) -> None:
    assert central([document], [2]) == [[lead(document, 2)]]
