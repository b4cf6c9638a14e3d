"""Baselines of the transformer: models of scikit-learn, trained on rows of the same data.

They have no step to choose, and train on the validation part, too: all rows that the transformer
has learned from in one way or the other.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.svm import LinearSVC

from experiments.common.evaluation import measure_rows
from experiments.transformer.comparison import measures, store_predictions
from experiments.transformer.data import Rows, Splits, encode_rows
from experiments.transformer.tables import BOOSTING, LINEAR, LOGISTIC, RIDGE, SVM
from raypipe import StageContext

#: rows that a baseline is trained on at most, drawn at random
_MOST_ROWS = 100_000
#: features of texts, and their product with the classes
_MOST_FEATURES, _MOST_WEIGHTS = 200_000, 2**23
#: classes with which boosting can hold rows of each out for its early stopping
_MOST_STOPPED = 100
#: values of a category that gradient boosting keeps apart
_MOST_VALUES = 255


def run_baselines(data: Splits, context: StageContext) -> None:
    """Train the baselines, and record their measures on the held-out rows."""
    gold = data.held_out.target
    measured, found = {}, {}
    for method in methods(data):
        predicted = context.call(f"baselines/{method}", predict, data, method)
        if isinstance(predicted, str):
            context.say(f"{method}: left out: {predicted}")
        else:
            measured[method] = measures(gold, predicted, data.target)
            found[method] = predicted
    rows = measure_rows(context, {"rows": len(gold)}, measured)
    store_predictions(context, found)
    context.finish(context.stage.name, {"measures": rows})


def methods(data: Splits) -> tuple[str, ...]:
    """Return the baselines of the data: two for classes, of texts and of tables."""
    if data.columns:
        return BOOSTING, LINEAR
    return (LOGISTIC, SVM) if data.target.kind == "classification" else (RIDGE,)


def predict(data: Splits, method: str) -> NDArray[Any] | str:
    """Task: train a baseline; return its predictions ``[n]`` for the held-out rows.

    Of texts it sees TF-IDF of all words, of tables the columns as the transformer has them. If
    scikit-learn refuses the data, its reason is returned.
    """
    total = len(data.train.target)
    chosen = np.arange(total)
    if total > _MOST_ROWS:
        chosen = np.sort(np.random.default_rng(0).choice(total, _MOST_ROWS, replace=False))
    train = Rows(data.train.inputs.take(pa.array(chosen)), data.train.target[chosen])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model = _model(data, method, train).fit(_inputs(data, train), train.target)
        found: NDArray[Any] = model.predict(_inputs(data, data.held_out))
    except ValueError as error:  # no word in any text, a class without rows
        return str(error).partition("\n")[0]
    return found.astype(data.train.target.dtype)


def _model(data: Splits, method: str, train: Rows) -> Any:
    classes = len(data.target.classes)
    if method == BOOSTING:
        numbers, sizes = _widths(data)
        categories = [numbers + i for i, size in enumerate(sizes) if size <= _MOST_VALUES]
        given = {"categorical_features": categories or None, "random_state": 0}
        if not classes:
            return HistGradientBoostingRegressor(**given)
        rows = np.bincount(train.target)  # of a class with one row, none can be held out
        stopping = classes < _MOST_STOPPED and int(rows[rows > 0].min()) > 1
        return HistGradientBoostingClassifier(**given, early_stopping="auto" if stopping else False)
    if method == LINEAR:
        numbers, sizes = _widths(data)
        columns = list(range(numbers, numbers + len(sizes)))
        encoder = OneHotEncoder(handle_unknown="ignore")
        encoded = make_column_transformer((encoder, columns), remainder="passthrough")
        return make_pipeline(encoded, LogisticRegression(max_iter=300) if classes else Ridge())
    # a model has a number per feature and class
    most = min(_MOST_FEATURES, _MOST_WEIGHTS // max(1, classes))
    vectors = TfidfVectorizer(max_features=most, token_pattern=r"(?u)\b\w+\b")
    models = {LOGISTIC: LogisticRegression(C=10, max_iter=300), SVM: LinearSVC(), RIDGE: Ridge()}
    return make_pipeline(vectors, models[method])


def _inputs(data: Splits, rows: Rows) -> Any:
    """Return texts, or a table as an array ``[n, columns]``, numbers first."""
    if not data.columns:
        return rows.inputs["text"].to_pylist()
    encoded = encode_rows(data.columns, rows.inputs)
    parts = [
        encoded[name].combine_chunks().flatten().to_numpy().reshape(len(rows.target), -1)
        for name in ("numeric", "categories")
        if name in encoded.column_names
    ]
    return np.concatenate([part.astype(np.float64) for part in parts], axis=1)


def _widths(data: Splits) -> tuple[int, list[int]]:
    """Return the number of numeric columns, and the size of each categorical one."""
    sizes = data.sizes()
    return sizes["numeric"], list(sizes["categories"])
