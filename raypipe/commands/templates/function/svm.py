"""The function that the experiment calls, once for every combination of its arguments."""

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC


def score(C, gamma, seed):
    """Return the measures of a support vector machine on handwritten digits, by name."""
    pixels, digits = load_digits(return_X_y=True)
    pixels, held_out, digits, expected = train_test_split(
        pixels / 16, digits, test_size=0.3, random_state=seed
    )
    machine = SVC(C=C, gamma=gamma).fit(pixels, digits)
    return {
        "accuracy": machine.score(held_out, expected),
        "support_vectors": len(machine.support_),
    }
