from __future__ import annotations

import numpy as np
import pytest

from experiments.summarization.baselines import score
from experiments.summarization.evaluation import gains


def f1(overlap: int, written: int, reference: int) -> float:
    return 2 * overlap / (written + reference)


def test_the_values_are_those_counted_by_hand() -> None:
    # unigrams: the, cat, on, the, mat -> 5 of 6 and 6; bigrams: the cat, on the, the mat
    # the longest common subsequence: the cat on the mat
    found = score(["the cat sat on the mat"], [["the cat is on the mat"]])
    np.testing.assert_allclose(found, [[f1(5, 6, 6), f1(3, 5, 5), f1(5, 6, 6)]])
    # the same words in another order: no bigram, and a subsequence of one
    found = score(["b a"], [["a b"]])
    np.testing.assert_allclose(found, [[1, 0, f1(1, 2, 2)]])
    assert score([""], [["a b"]]).tolist() == [[0, 0, 0]]
    assert score([], []).shape == (0, 3)


def test_words_are_stemmed() -> None:
    assert score(["returning values"], [["returns value"]]).tolist() == [[1, 1, 1]]


def test_of_several_references_the_best_counts_for_each_measure() -> None:
    # by unigrams the second is best (4 of 4 and 4), by bigrams the first (2 of 3 and 3)
    found = score(["a b c d"], [["a b c x", "d c b a"]])
    np.testing.assert_allclose(found, [[1, f1(2, 3, 3), f1(3, 4, 4)]])
    both = score(["a b", "c"], [["a b"], ["x", "c y"]])
    np.testing.assert_allclose(both[:, 0], [1, f1(1, 1, 2)])


def test_the_gain_has_an_interval_that_holds_what_is_sure() -> None:
    draw = np.random.default_rng(1)
    found = gains(np.stack([np.full(50, 0.2), draw.normal(0, 1, 50), draw.normal(9, 1, 50)], 1))
    assert found["rouge_1_gain"] == found["rouge_1_gain_low"] == pytest.approx(0.2)
    assert found["rouge_2_gain_low"] < 0 < found["rouge_2_gain_high"]
    # the interval of a mean of 50 standard deviations of 1: about 2 x 1.96 / sqrt(50)
    assert found["rouge_l_gain_high"] - found["rouge_l_gain_low"] == pytest.approx(0.55, abs=0.15)
    assert gains(np.ones((1, 3)))["rouge_1_gain_low"] == 1
