"""The perplexity of a topic model, computed and looked up."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy.sparse import csr_matrix, load_npz
from sklearn.decomposition import LatentDirichletAllocation
from threadpoolctl import threadpool_limits

from experiments.pabbo_lda.objective import TabularObjective, lda_perplexity


@pytest.fixture
def counts() -> csr_matrix:
    """A read-only corpus of 40 documents with an empty one."""
    dense = np.random.default_rng(3).poisson(0.3, (40, 25))
    dense[7] = 0
    matrix = csr_matrix(dense)
    for part in (matrix.data, matrix.indices, matrix.indptr):
        part.flags.writeable = False
    return matrix


def test_perplexity_is_that_of_scikit_learn_with_symmetric_priors(counts: csr_matrix):
    model = LatentDirichletAllocation(
        4, learning_method="online", max_iter=5, batch_size=16, random_state=9
    ).fit(counts)
    assert lda_perplexity(counts, 4, seed=9, max_iter=5, batch_size=16) == model.perplexity(counts)


def test_perplexity_depends_on_its_arguments_alone(counts: csr_matrix):
    np.random.seed(0)  # noqa: NPY002
    first = lda_perplexity(counts, 3, seed=1, max_iter=3, batch_size=16)
    np.random.seed(1)  # noqa: NPY002
    assert lda_perplexity(counts, 3, seed=1, max_iter=3, batch_size=16) == first
    assert lda_perplexity(counts, 3, seed=2, max_iter=3, batch_size=16) != first


def test_refuses_a_model_without_topics(counts: csr_matrix):
    with pytest.raises(ValueError, match="T=0"):
        lda_perplexity(counts, 0, seed=1, max_iter=3, batch_size=16)


@pytest.mark.slow
@pytest.mark.parametrize(("T", "published"), [(2, 1871.23), (7, 1691.05)])
def test_perplexity_agrees_with_the_published_values(data_dir: Path, T: int, published: float):
    corpus = load_npz(data_dir / "lda_bow" / "X_20news_val_bow.npz").tocsr()
    with threadpool_limits(1):
        value = lda_perplexity(corpus, T, seed=42, max_iter=60, batch_size=2048)
    assert value == pytest.approx(published, rel=2e-3)


TABLE = pd.DataFrame(
    [("a", 1, 40, 1e8), ("a", 1, 10, 100.0), ("a", 1, 2, 400.0), ("b", 2, 5, 7.0)],
    columns=["dataset", "seed", "T", "perplexity"],
)


def test_table_returns_recorded_values_and_interpolates_between_them():
    objective = TabularObjective(TABLE)
    assert objective.runs == (("a", 1), ("b", 2))
    assert objective.value("a", 1, 10) == 100.0
    assert objective.recorded("a", 1, 10)
    assert objective.value("a", 1, 20) == pytest.approx(1e5)  # halfway in log T and in log value
    assert not objective.recorded("a", 1, 20)
    assert objective.value("a", 1, 1000) == pytest.approx(1e8)
    assert objective.best("a", 1) == (10, 100.0)


def test_table_refuses_what_it_cannot_answer():
    objective = TabularObjective(TABLE)
    with pytest.raises(ValueError, match="'a', seed 2"):
        objective.value("a", 2, 10)
    with pytest.raises(ValueError, match="perplexity"):
        TabularObjective(TABLE.drop(columns="perplexity"))
    with pytest.raises(ValueError, match="not positive"):
        TabularObjective(TABLE.assign(perplexity=0.0))


def test_table_reads_the_published_layout(tmp_path: Path):
    path = tmp_path / "evaluations.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(
            "dataset,run_id,seed,T,perplexity,seen_by\n20news,0,42,2,1871.2338458807023,GA\n"
        )
    assert TabularObjective.read(path).value("20news", 42, 2) == 1871.2338458807023
