"""The function: accuracy of a support vector machine on handwritten digits."""

import os
import time
from pathlib import Path

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC


def score(C: float, seed: int) -> dict[str, float]:
    """Return the accuracy, and append a line to ``$GRID_LOG``: how often each call ran."""
    time.sleep(float(os.environ.get("GRID_SLEEP_S", "0")))
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images / 16, labels, test_size=0.3, random_state=seed)
    train_x, test_x, train_y, test_y = parts
    accuracy = SVC(C=C).fit(train_x, train_y).score(test_x, test_y)
    if log := os.environ.get("GRID_LOG"):
        with Path(log).open("a") as file:
            file.write(f"{C} {seed}\n")
    return {"accuracy": float(accuracy)}
