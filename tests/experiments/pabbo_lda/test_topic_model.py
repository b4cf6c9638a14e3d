"""The compiled topic model against scikit-learn's."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import isfunction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, load_npz
from scipy.special import psi
from sklearn.decomposition import LatentDirichletAllocation
from threadpoolctl import threadpool_limits

from experiments.pabbo_lda.objective import LdaFit
from experiments.pabbo_lda.objective.topic_model import (
    CompiledLatentDirichletAllocation,
    lda_perplexity,
)
from experiments.pabbo_lda.objective.variational_bayes import digamma, exp_digamma
from experiments.pabbo_lda.space import Point


def corpus(documents: int = 60, words: int = 40, seed: int = 3) -> csr_matrix:
    """A corpus with an empty document and words of very different frequency."""
    rng = np.random.default_rng(seed)
    dense = rng.poisson(2.0 / np.arange(1, words + 1), (documents, words))
    dense[7] = 0
    return csr_matrix(dense)


def fitted(counts: csr_matrix, **options: Any) -> list[LatentDirichletAllocation]:
    """The compiled model and the one of scikit-learn."""
    usual = {"learning_method": "online", "max_iter": 4, "batch_size": 16, "random_state": 9}
    kinds = (CompiledLatentDirichletAllocation, LatentDirichletAllocation)
    return [kind(**usual | options).fit(counts) for kind in kinds]


@given(st.lists(st.floats(1e-3, 1e8), min_size=1, max_size=40))
def test_the_series_are_those_of_digamma(numbers):
    x = np.array(numbers)
    found, work = np.empty_like(x), np.empty((3, len(x)))
    exp_digamma(x, found, work, work.view(np.int64))
    expected = np.exp(psi(x))
    known = expected > 1e-300
    np.testing.assert_allclose(found[known], expected[known], rtol=5e-12)
    assert (found[~known] <= 1e-299).all()
    assert [digamma(number) for number in numbers] == pytest.approx(psi(x), rel=1e-11, abs=1e-11)


# 15 and 16 are where the loops change; with 80 most topics leave the documents
@pytest.mark.parametrize("T", [1, 2, 5, 15, 16, 17, 33, 80])
@pytest.mark.parametrize(
    "options",
    [{}, {"learning_method": "batch"}, {"doc_topic_prior": 0.02, "topic_word_prior": 0.9}],
)
def test_values_are_scikit_learns(T, options):
    compiled, reference = fitted(corpus().astype(float), n_components=T, **options)
    assert compiled.bound_ == pytest.approx(reference.bound_, rel=1e-5)
    np.testing.assert_allclose(compiled.components_, reference.components_, rtol=1e-4, atol=1e-6)
    held_out = corpus(20, seed=4).astype(float)
    found, expected = compiled.transform(held_out), reference.transform(held_out)
    # an iteration more or less, where the change is at its tolerance, shows here
    np.testing.assert_allclose(found, expected, atol=5e-3)
    assert compiled.perplexity(held_out) == pytest.approx(reference.perplexity(held_out), rel=1e-5)


def test_scikit_learn_calls_every_overridden_method(monkeypatch):
    """Without this a renamed method would only be slow: scikit-learn's own gives equal values."""
    overridden = {
        name: method
        for name, method in vars(CompiledLatentDirichletAllocation).items()
        if isfunction(method)
    }
    assert overridden.keys() <= vars(LatentDirichletAllocation).keys()
    called = set()

    def record(name, method):
        def recorded(*arguments, **options):
            called.add((name, sys._getframe(1).f_globals["__name__"].partition(".")[0]))
            return method(*arguments, **options)

        return recorded

    for name, method in overridden.items():
        monkeypatch.setattr(CompiledLatentDirichletAllocation, name, record(name, method))
    compiled, _ = fitted(corpus().astype(float))
    compiled.perplexity(corpus(20).astype(float))
    assert {name for name, caller in called if caller == "sklearn"} == overridden.keys()


def test_words_whose_probability_underflows():
    """With a prior of 1e-3 a word that no topic has is e^-1000 likely."""
    dense = np.zeros((40, 30))
    dense[:20, :10] = dense[20:, 10:20] = 1
    options = {"n_components": 2, "doc_topic_prior": 1e-3, "topic_word_prior": 1e-3}
    compiled, reference = fitted(csr_matrix(dense), learning_method="batch", **options)
    new = csr_matrix(np.ones((3, 30)))  # has words that the corpus does not have
    found, expected = compiled.perplexity(new), reference.perplexity(new)
    assert expected > 1e44
    assert np.log(found) == pytest.approx(np.log(expected), rel=1e-6)


@pytest.mark.parametrize("T", [3, 40])
def test_float32_is_close_and_its_value_a_float64(T):
    whole, half = (
        lda_perplexity(corpus(), Point(T), 1, LdaFit(3, 16, kind))
        for kind in ("float64", "float32")
    )
    assert half == pytest.approx(whole, rel=1e-3)
    assert half != whole


def test_the_matrix_may_be_read_only_and_its_indices_long():
    counts = corpus()
    expected = lda_perplexity(counts, Point(3), 1, LdaFit(3, 16, "float64"))
    for part in (counts.data, counts.indices, counts.indptr):
        part.flags.writeable = False
    assert lda_perplexity(counts, Point(3), 1, LdaFit(3, 16, "float64")) == expected
    counts.indices, counts.indptr = counts.indices.astype(np.int64), counts.indptr.astype(np.int64)
    assert lda_perplexity(counts, Point(3), 1, LdaFit(3, 16, "float64")) == expected


@pytest.mark.slow
def test_values_do_not_depend_on_whether_the_machine_code_was_compiled_before(tmp_path):
    code = """
from tests.experiments.pabbo_lda.test_topic_model import LdaFit, Point, corpus, lda_perplexity
for kind in ("float64", "float32"):
    for T in (20, 64, 100):
        print(lda_perplexity(corpus(), Point(T), 1, LdaFit(2, 16, kind)))
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-c", code]
    compiled, loaded = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert list(tmp_path.rglob("*.nbi"))
    assert compiled == loaded


@pytest.mark.parametrize(("T", "published"), [(2, 1871.23), (7, 1691.05)])
def test_perplexity_agrees_with_the_published_values(data_dir, T, published):
    counts = load_npz(data_dir / "lda_bow" / "X_20news_val_bow.npz").tocsr()
    with threadpool_limits(1):
        value = lda_perplexity(counts, Point(T), 42, LdaFit(60, 2048, "float64"))
    assert value == pytest.approx(published, rel=2e-3)
