"""Sentences taken from a document as its summary, and ROUGE."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.feature_extraction.text import TfidfVectorizer

from experiments.summarization.baselines import central, lead, score
from experiments.summarization.evaluation import gains

STORY = (
    "It rained. The cat chased the red mouse. The red mouse hid from the cat. "
    "Nothing else happened. The dog saw the cat and a bird."
)


@pytest.mark.parametrize(
    ("sentences", "expected"), [(1, "First one."), (2, "First one. Is it?"), (9, None)]
)
def test_the_lead_is_the_first_sentences(sentences, expected):
    document = "First one.  Is it?\nYes, v1.5 of\nit\n\nA heading\n\nEnd"
    whole = "First one. Is it? Yes, v1.5 of\nit A heading End"
    assert lead(document, sentences) == (expected or whole)


def test_the_central_sentence_shares_most_words_with_the_others():
    assert central([STORY], [1]) == [["The cat chased the red mouse."]]
    assert central([STORY, STORY], [1]) == [2 * central([STORY], [1])[0]]


def test_centrality_is_the_stationary_distribution_of_the_graph():
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
def test_short_and_wordless_documents_have_a_summary(document):
    assert central([document], [2]) == [[lead(document, 2)]]


def f1(overlap: int, written: int, reference: int) -> float:
    return 2 * overlap / (written + reference)


def test_the_values_are_those_counted_by_hand():
    # unigrams: the, cat, on, the, mat -> 5 of 6 and 6; bigrams: the cat, on the, the mat
    # the longest common subsequence: the cat on the mat
    found = score(["the cat sat on the mat"], [["the cat is on the mat"]])
    np.testing.assert_allclose(found, [[f1(5, 6, 6), f1(3, 5, 5), f1(5, 6, 6)]])
    # the same words in another order: no bigram, and a subsequence of one
    found = score(["b a"], [["a b"]])
    np.testing.assert_allclose(found, [[1, 0, f1(1, 2, 2)]])
    assert score([""], [["a b"]]).tolist() == [[0, 0, 0]]
    assert score([], []).shape == (0, 3)


def test_words_are_stemmed():
    assert score(["returning values"], [["returns value"]]).tolist() == [[1, 1, 1]]


def test_of_several_references_the_best_counts_for_each_measure():
    # by unigrams the second is best (4 of 4 and 4), by bigrams the first (2 of 3 and 3)
    found = score(["a b c d"], [["a b c x", "d c b a"]])
    np.testing.assert_allclose(found, [[1, f1(2, 3, 3), f1(3, 4, 4)]])
    both = score(["a b", "c"], [["a b"], ["x", "c y"]])
    np.testing.assert_allclose(both[:, 0], [1, f1(1, 1, 2)])


def test_the_gain_has_an_interval_that_holds_what_is_sure():
    draw = np.random.default_rng(1)
    found = gains(np.stack([np.full(50, 0.2), draw.normal(0, 1, 50), draw.normal(9, 1, 50)], 1))
    assert found["rouge_1_gain"] == found["rouge_1_gain_low"] == pytest.approx(0.2)
    assert found["rouge_2_gain_low"] < 0 < found["rouge_2_gain_high"]
    # the interval of a mean of 50 standard deviations of 1: about 2 x 1.96 / sqrt(50)
    assert found["rouge_l_gain_high"] - found["rouge_l_gain_low"] == pytest.approx(0.55, abs=0.15)
    assert gains(np.ones((1, 3)))["rouge_1_gain_low"] == 1
