"""The compiled topic model against scikit-learn's, and the objectives that studies minimize."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from inspect import isfunction, unwrap
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse import csr_matrix, load_npz, save_npz
from scipy.special import psi
from sklearn.decomposition import LatentDirichletAllocation
from threadpoolctl import threadpool_limits

from experiments.pabbo_lda.objective import LdaFit
from experiments.pabbo_lda.objective.objectives import TabularObjective, load_objectives
from experiments.pabbo_lda.objective.topic_model import (
    CompiledLatentDirichletAllocation,
    lda_perplexity,
    npmi,
)
from experiments.pabbo_lda.objective.variational_bayes import digamma, exp_digamma
from experiments.pabbo_lda.settings import CorporaSettings, LdaSettings
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


def test_scikit_learn_calls_every_overridden_method():
    """Without this a renamed method would only be slow: scikit-learn's own gives equal values."""
    kinds = (CompiledLatentDirichletAllocation, LatentDirichletAllocation)
    overridden, methods = (
        {name: unwrap(part) for name, part in vars(kind).items() if isfunction(part)}
        for kind in kinds
    )
    inherited = [methods[name] for name in methods.keys() - overridden.keys()]
    assert overridden.keys() <= {name for call in inherited for name in call.__code__.co_names}


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    save_npz(folder / "X_toy_train_bow.npz", corpus(150, seed=1))
    save_npz(folder / "X_toy_val_bow.npz", corpus(80, seed=2))
    table = "dataset,seed,T,perplexity\ntoy,1,2,9.0\ntoy,1,8,4.0\ntoy,2,4,5.0\n"
    (folder / "table.csv").write_text(table)
    return folder


def settings(**changed) -> LdaSettings:
    usual = {"datasets": ("toy",), "t_max": 40, "start": (5,), "max_iter": 4, "batch_size": 16}
    return LdaSettings(**usual | changed)


def objective(folder: Path, **changed):
    data = CorporaSettings(source="bow", dir=folder)
    return load_objectives(data, settings(**changed))[0]


def value(objective, point: Point, seed: int = 9) -> float:
    return objective.function()(objective.data, point, seed, *objective.arguments)


@pytest.mark.parametrize("point", [Point(3), Point(20), Point(5, 0.7), Point(5, 0.02, 0.9)])
def test_perplexities_are_those_of_scikit_learn(folder, point):
    train, held_out = (part.astype(float) for part in (corpus(150, seed=1), corpus(80, seed=2)))
    how = {"n_components": point.T, "doc_topic_prior": point.alpha, "topic_word_prior": point.eta}
    for name, fitted_to in (("perplexity", held_out), ("heldout_perplexity", train)):
        expected = fitted(fitted_to, **how)[1].perplexity(held_out)
        found = value(objective(folder, objective=name), point)
        assert found == pytest.approx(expected, rel=1e-4)


def test_a_corpus_without_parts_is_split_once_for_all():
    asked = settings(datasets=("stdlib",), objective="heldout_perplexity")
    data = CorporaSettings(options={"max_documents": 300, "max_features": 200, "min_df": 2})
    first, again = (load_objectives(data, asked)[0] for _ in range(2))
    train, held_out = first.data
    assert 0.19 < held_out.shape[0] / (train.shape[0] + held_out.shape[0]) < 0.21
    assert first.data_fingerprints == again.data_fingerprints


def test_coherence_counts_the_documents_that_hold_both_words():
    documents = csr_matrix([[1, 2, 0, 0], [3, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 5]])
    topics = np.array([[0.5, 0.4, 0.1, 0.0]])
    # words 0 and 1 share 2 of 4 documents, 1 and 2 share 1, 0 and 2 none
    pair_01 = math.log((2 / 4) / (2 / 4 * 3 / 4)) / -math.log(2 / 4)
    pair_12 = math.log((1 / 4) / (3 / 4 * 1 / 4)) / -math.log(1 / 4)
    assert npmi(documents, topics, words=2) == pytest.approx(pair_01)
    assert npmi(documents, topics, words=3) == pytest.approx((pair_01 - 1 + pair_12) / 3)
    assert npmi(csr_matrix([[1, 1]]), np.ones((1, 2))) == 1
    assert npmi(csr_matrix([[1, 0], [0, 1]]), np.ones((2, 2))) == -1


def test_recorded_values_are_looked_up_or_refused(folder):
    found = objective(folder, objective="tabular", table=folder / "table.csv", seed=1, runs=2)
    assert settings(objective="tabular", table=folder / "table.csv").unseen_seeds == 0
    assert value(found, Point(8), 1) == 4
    assert value(found, Point(4), 1) == pytest.approx(6)  # halfway in log T and in log value
    assert value(found, Point(40), 1) == 4
    assert value(found, Point(4), 2) == 5
    assert found.cost_s(Point(8)) == 0
    with pytest.raises(ValueError, match="'toy', seed 3"):
        value(found, Point(8), 3)
    table = pd.read_csv(folder / "table.csv")
    for wrong, message in (
        (table.drop(columns="perplexity"), "perplexity"),
        (table.assign(perplexity=0.0), "not positive"),
        (table.assign(perplexity="1,234.5"), "a perplexity that is not a number"),
    ):
        with pytest.raises(ValueError, match=message):
            TabularObjective(wrong)


def test_the_key_holds_what_decides_a_value_and_nothing_else(folder):
    plain = objective(folder)
    key = plain.key(Point(5), 42)
    same = objective(folder, cpus=0.5, runs=3, evaluations=5, cache=False, time_limit_s=9)
    assert same.key(Point(5), 42) == key
    points = [(Point(6), 42), (Point(5), 43), (Point(5, 0.1), 42), (Point(5, None, 0.1), 42)]
    others = [{"max_iter": 3}, {"batch_size": 32}, {"precision": "float32"}]
    others += [{"objective": "heldout_perplexity"}, {"objective": "coherence"}]
    other_corpus = replace(plain, data_fingerprints={"corpus": "other"})
    found = {plain.key(*point) for point in points} | {other_corpus.key(Point(5), 42)}
    found |= {objective(folder, **other).key(Point(5), 42) for other in others}
    assert len(found | {key}) == len(points) + len(others) + 2
