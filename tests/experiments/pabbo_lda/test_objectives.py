from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import sparse
from sklearn.decomposition import LatentDirichletAllocation

from experiments.pabbo_lda.objective.objectives import TabularObjective, load_objectives
from experiments.pabbo_lda.objective.topic_model import npmi
from experiments.pabbo_lda.settings import CorporaSettings, LdaSettings
from experiments.pabbo_lda.space import Point

PASSES, BATCH, SEED = 3, 32, 7


def counts(documents: int, seed: int) -> sparse.csr_matrix:
    drawn = np.random.default_rng(seed).poisson(0.3, (documents, 60))
    return sparse.csr_matrix(drawn.astype(np.int64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    sparse.save_npz(folder / "X_toy_train_bow.npz", counts(150, 1))
    sparse.save_npz(folder / "X_toy_val_bow.npz", counts(80, 2))
    table = pd.DataFrame(
        {"dataset": "toy", "seed": [1, 1, 2], "T": [2, 8, 4], "perplexity": [9.0, 4.0, 5.0]}
    )
    table.to_csv(folder / "table.csv", index=False)
    return folder


def settings(**changed) -> LdaSettings:
    usual = {"datasets": ("toy",), "t_max": 40, "start": (5,), "max_iter": PASSES}
    return LdaSettings(**{**usual, "batch_size": BATCH, **changed})


def objective(folder: Path, **changed):
    data = CorporaSettings(source="bow", dir=folder)
    return load_objectives(data, settings(**changed))[0]


def value(objective, point: Point, seed: int = SEED) -> float:
    return objective.function()(objective.data, point, seed, *objective.arguments)


def reference(fit_to: sparse.csr_matrix, point: Point) -> LatentDirichletAllocation:
    return LatentDirichletAllocation(
        point.T,
        doc_topic_prior=point.alpha,
        topic_word_prior=point.eta,
        learning_method="online",
        max_iter=PASSES,
        batch_size=BATCH,
        random_state=SEED,
    ).fit(fit_to)


@pytest.mark.parametrize("point", [Point(3), Point(20), Point(5, 0.7), Point(5, 0.02, 0.9)])
def test_perplexities_are_those_of_scikit_learn(folder, point):
    train, held_out = counts(150, 1), counts(80, 2)
    expected = reference(held_out, point).perplexity(held_out)
    assert value(objective(folder), point) == pytest.approx(expected, rel=1e-4)
    expected = reference(train, point).perplexity(held_out)
    found = value(objective(folder, objective="heldout_perplexity"), point)
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_corpus_without_parts_is_split_once_for_all():
    asked = settings(datasets=("stdlib",), objective="heldout_perplexity")
    data = CorporaSettings(options={"max_documents": 300, "max_features": 200, "min_df": 2})
    first, again = (load_objectives(data, asked)[0] for _ in range(2))
    train, held_out = first.data
    assert 0.19 < held_out.shape[0] / (train.shape[0] + held_out.shape[0]) < 0.21
    assert first.data_fingerprints == again.data_fingerprints


def test_coherence_counts_the_documents_that_hold_both_words():
    documents = sparse.csr_matrix([[1, 2, 0, 0], [3, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 5]])
    topics = np.array([[0.5, 0.4, 0.1, 0.0]])
    # words 0 and 1 share 2 of 4 documents, 1 and 2 share 1, 0 and 2 none
    pair_01 = math.log((2 / 4) / (2 / 4 * 3 / 4)) / -math.log(2 / 4)
    pair_12 = math.log((1 / 4) / (3 / 4 * 1 / 4)) / -math.log(1 / 4)
    assert npmi(documents, topics, words=2) == pytest.approx(pair_01)
    assert npmi(documents, topics, words=3) == pytest.approx((pair_01 - 1 + pair_12) / 3)
    assert npmi(sparse.csr_matrix([[1, 1]]), np.ones((1, 2))) == 1
    assert npmi(sparse.csr_matrix([[1, 0], [0, 1]]), np.ones((2, 2))) == -1


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
    others = [{"max_iter": 4}, {"batch_size": 16}, {"precision": "float32"}]
    others += [{"objective": "heldout_perplexity"}, {"objective": "coherence"}]
    other_corpus = replace(plain, data_fingerprints={"corpus": "other"})
    found = {plain.key(*point) for point in points} | {other_corpus.key(Point(5), 42)}
    found |= {objective(folder, **other).key(Point(5), 42) for other in others}
    assert len(found | {key}) == len(points) + len(others) + 2
