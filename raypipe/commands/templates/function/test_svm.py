"""The function by itself: the arguments of one call, and the measures that it returns."""

from svm import score


def test_most_held_out_digits_are_recognized():
    measures = score(C=1, gamma=0.1, seed=0)
    assert measures["accuracy"] > 0.95
    assert 0 < measures["support_vectors"] < 1257  # of the training digits


def test_the_result_depends_on_nothing_but_the_arguments():
    assert score(C=1, gamma=0.01, seed=3) == score(C=1, gamma=0.01, seed=3)
