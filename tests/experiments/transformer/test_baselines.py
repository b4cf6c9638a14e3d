"""The models of scikit-learn that the transformer is compared with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pcsv
import pytest

from experiments.transformer.baselines import methods, predict
from experiments.transformer.data import PredictionTarget, Rows, Splits, load
from experiments.transformer.settings import TransformerDataSettings

#: of 80 training rows, on which the baselines train as on the others
VALIDATION = np.arange(80) % 4 == 0


def texts(kind: str = "classification") -> Splits:
    """Each class has a word of its own."""
    draws = np.random.default_rng(0)
    labels = draws.integers(0, 3, 120)
    words = [f"{['red', 'green', 'blue'][label]} {draws.integers(0, 9)} thing" for label in labels]
    target = labels if kind == "classification" else labels.astype(np.float32)
    parts = [
        Rows(pa.table({"text": words[rows]}), target[rows])
        for rows in (slice(0, 80), slice(80, 120))
    ]
    classes = ("a", "b", "c") if kind == "classification" else ()
    return Splits(*parts, PredictionTarget(kind, classes), VALIDATION, {})


def test_texts_are_classified_by_their_words() -> None:
    data = texts()
    assert methods(data) == ("tfidf, logistic regression", "tfidf, linear svm")
    for method in methods(data):
        np.testing.assert_array_equal(predict(data, method), data.held_out.target)


@pytest.mark.parametrize("target", ["above", "size"])
def test_tables_have_two_baselines_that_see_every_column(tmp_path: Path, target: str) -> None:
    """Half of the target is in a number, with gaps, and half in a category."""
    draws = np.random.default_rng(1)
    number = draws.normal(size=600)
    kind = draws.choice(["low", "high"], 600)
    size = number + np.where(kind == "high", 4.0, 0.0)
    columns = {"number": pa.array(number, mask=draws.random(600) < 0.05), "kind": kind}
    columns[target] = np.where(size > 2, "yes", "no") if target == "above" else size
    pcsv.write_csv(pa.table(columns), tmp_path / "t.csv")
    data = load(
        TransformerDataSettings(source="table", file=tmp_path / "t.csv", target=target), None
    )
    assert data is not None
    gold = data.held_out.target
    assert methods(data) == ("gradient boosting", "linear model")
    for method in methods(data):
        found = predict(data, method)
        if target == "above":
            assert (found == gold).mean() > 0.9
        else:
            assert ((found - gold) ** 2).mean() < 0.2 * gold.var()


def test_a_class_with_one_row_among_many_is_no_failure(tmp_path: Path) -> None:
    """Boosting would hold rows of each class out to decide when to stop."""
    draws = np.random.default_rng(2)
    number = draws.normal(size=13_000)
    label = np.where(number > 0, "yes", "no").astype(object)
    label[7] = "rare"
    pcsv.write_csv(pa.table({"number": number, "label": label}), tmp_path / "t.csv")
    data = load(
        TransformerDataSettings(source="table", file=tmp_path / "t.csv", target="label"), None
    )
    assert data is not None
    found = predict(data, "gradient boosting")
    assert (found == data.held_out.target).mean() > 0.99


def test_texts_without_words_are_left_out_with_the_reason() -> None:
    data = texts()
    parts = [
        Rows(pa.table({"text": ["!?"] * len(part.target)}), part.target)
        for part in (data.train, data.held_out)
    ]
    found = predict(Splits(*parts, data.target, VALIDATION, {}), "tfidf, linear svm")
    assert isinstance(found, str)
    assert "empty vocabulary" in found
