"""The measures against scikit-learn and against slow loops that follow the definitions."""

from __future__ import annotations

from dataclasses import fields
from functools import reduce
from itertools import pairwise
from operator import add

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from sklearn.metrics import f1_score

from experiments.teleclass.evaluation import count, summarize


@st.composite
def cases(draw):
    """Scores with many ties, label sets, levels of classes."""
    documents, classes = draw(st.integers(1, 8)), draw(st.integers(1, 7))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = np.array([-np.inf, -1.5, 0, 0.25, 0.5, 1, 3], dtype=np.float32)
    scores = random.choice(values, size=(documents, classes))
    density = draw(st.floats(0, 1))
    predicted, gold = random.random((2, documents, classes)) < density
    level = random.integers(1, draw(st.integers(1, 4)) + 1, size=classes)
    return scores, sparse.csr_matrix(predicted), sparse.csr_matrix(gold), level


def slow(scores, predicted, gold, level, number):
    """The measures of one level, a document and a label at a time."""
    classes = [c for c in range(len(level)) if number in (0, level[c])]
    found = {"example_f1": [], "precision_at_1": [], "precision_at_3": [], "mrr": []}
    kept = []
    for row in range(len(scores)):
        truth = {c for c in classes if gold[row, c]}
        guess = {c for c in classes if predicted[row, c]}
        if not truth:
            continue
        kept.append(row)
        found["example_f1"].append(2 * len(truth & guess) / (len(truth) + len(guess)))
        ranking = sorted(classes, key=lambda c: (-scores[row, c], c))
        for k in (1, 3):
            found[f"precision_at_{k}"].append(len(set(ranking[:k]) & truth) / k)
        for c in truth:
            above = [o for o in classes if o not in truth and scores[row, o] >= scores[row, c]]
            found["mrr"].append(1 / (len(above) + 1))
    means = {name: np.mean(values) if values else np.nan for name, values in found.items()}
    return means, kept, classes


@given(cases())
def test_every_level_equals_the_definitions_and_sklearn(case):
    scores, predicted, gold, level = case
    table = summarize(count(scores, predicted, gold, level), level)
    assert [row["level"] for row in table] == ["all", *map(str, range(1, level.max() + 1))]
    for number, row in enumerate(table):
        expected, kept, classes = slow(scores, predicted.toarray(), gold.toarray(), level, number)
        assert (row["documents"], row["classes"]) == (len(kept), len(classes))
        truth, guess = (m.toarray()[np.ix_(kept, classes)] for m in (gold, predicted))
        if kept:
            occurring = np.flatnonzero(truth.any(axis=0))
            settings = {"zero_division": 0}
            of_classes = [f1_score(truth[:, c], guess[:, c], **settings) for c in occurring]
            expected |= {
                "micro_f1": f1_score(truth.ravel(), guess.ravel(), **settings),
                "macro_f1": np.mean(of_classes),
                "labels_mean": guess.sum(1).mean(),
                "gold_mean": truth.sum(1).mean(),
            }
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, nan_ok=True), name


@given(cases(), st.lists(st.integers(0, 8), max_size=3))
def test_blocks_add_up_to_the_whole(case, cuts):
    scores, predicted, gold, level = case
    whole = count(scores, predicted, gold, level)
    bounds = sorted({0, len(scores), *(min(cut, len(scores)) for cut in cuts)})
    blocks = [count(scores[a:b], predicted[a:b], gold[a:b], level) for a, b in pairwise(bounds)]
    merged = reduce(add, reversed(blocks), count(scores[:0], predicted[:0], gold[:0], level))
    for field in fields(whole):
        one, other = getattr(whole, field.name), getattr(merged, field.name)
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_what_cannot_be_judged_is_refused():
    labels = sparse.csr_matrix((2, 3), dtype=np.bool_)
    level = np.ones(3, dtype=np.int64)
    scores = np.zeros((2, 3), np.float32)
    for arguments in (
        (scores[:1], labels, labels, level),
        (scores, labels[:, :2], labels, level),
        (scores, labels, labels[:1], level),
        (scores, labels, labels, level[:2]),
    ):
        with pytest.raises(ValueError, match="must be documents x"):
            count(*arguments)
    scores[1, 2] = np.nan
    with pytest.raises(ValueError, match="document 1, class 2 is NaN"):
        count(scores, labels, labels, level)
