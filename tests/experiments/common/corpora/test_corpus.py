"""Counts that become a corpus, from memory and from bags of words in files."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

from experiments.common.corpora.bow import load_bow
from experiments.common.corpora.corpus import CorpusError, make_corpus, validate_counts
from experiments.common.corpora.load import load_corpus

DENSE = np.array([[0, 2, 0, 1], [0, 0, 0, 0], [5, 0, 0, 3]])

FORMS = [
    np.asarray,
    *(getattr(sparse, f"{f}_matrix") for f in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")),
]

# computed once; a change means that stored results no longer match their corpora
FINGERPRINT = "67413d66183571041940cca039b9272aa1b7af62f22cc7488104240f1176f403"

matrices = hnp.arrays(
    np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.integers(0, 9)
).filter(np.any)


@pytest.mark.parametrize("convert", FORMS)
@pytest.mark.parametrize("dtype", [np.int8, np.uint64, np.float32, np.float64])
def test_every_form_of_the_same_counts_is_the_same_corpus(convert, dtype):
    corpus = make_corpus("c", convert(DENSE.astype(dtype)), source="test")
    expected = make_corpus("c", DENSE, source="test")
    assert corpus == expected
    assert corpus.counts.dtype == np.int64
    np.testing.assert_array_equal(corpus.counts.toarray(), DENSE)
    assert (corpus.documents, corpus.words, corpus.tokens, corpus.empty_documents) == (3, 4, 11, 1)


def test_canonical_form_adds_duplicates_drops_zeros_and_leaves_the_input_alone():
    raw = sparse.csr_matrix(([1, 0, 2, 4], [3, 2, 3, 0], [0, 3, 4]), shape=(2, 4))
    before = raw.data.copy(), raw.indices.copy()
    counts = validate_counts(raw, "test")
    assert counts.has_canonical_format
    assert counts.data.tolist() == [3, 4]
    assert counts.indices.tolist() == [3, 0]
    np.testing.assert_array_equal(raw.data, before[0])
    np.testing.assert_array_equal(raw.indices, before[1])


@given(matrices)
def test_fingerprint_depends_on_content_alone(dense):
    def fingerprint(counts, words=None):
        return make_corpus("c", counts, source="test", vocabulary=words).fingerprint

    wide = sparse.csr_matrix(dense)
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    assert fingerprint(dense) == fingerprint(wide) == fingerprint(sparse.csc_array(dense))
    changed = dense.copy()
    changed[0, 0] += 1
    words = [f"w{i}" for i in range(dense.shape[1])]
    taller = np.vstack([dense, np.zeros_like(dense[:1])])
    wider = np.hstack([dense, np.zeros_like(dense[:, :1])])
    different = [fingerprint(m) for m in (dense, changed, taller, wider)]
    different += [fingerprint(dense, words), fingerprint(dense, [*words[:-1], "other"])]
    assert len(set(different)) == len(different)


def test_fingerprint_is_the_same_on_every_platform():
    corpus = make_corpus("c", DENSE, source="test", vocabulary=["a", "b", "c", "\u00e9"])
    assert corpus.fingerprint == FINGERPRINT


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-1, "negative"),
        (0.5, "not a whole number"),
        (np.nan, "not a finite number"),
        (np.inf, "not a finite number"),
        (-np.inf, "not a finite number"),
        (2.0**31, "more than 2147483647"),
    ],
)
@pytest.mark.parametrize("convert", [np.asarray, sparse.csr_matrix, sparse.csc_array])
def test_the_first_bad_count_is_named(value, reason, convert):
    counts = DENSE.astype(float)
    counts[2, 3] = value
    with pytest.raises(CorpusError, match=f"myfile: .* row 2, column 3 .*{reason}"):
        validate_counts(convert(counts), "myfile")


def test_bad_counts_do_not_cancel_in_duplicates():
    halves = sparse.coo_matrix(([0.5, 0.5], ([0, 0], [1, 1])), shape=(1, 2))
    with pytest.raises(CorpusError, match="row 0, column 1"):
        validate_counts(halves, "test")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (np.zeros((0, 3)), "no document"),
        (np.zeros((3, 0)), "vocabulary is empty"),
        (np.zeros((3, 3)), "all counts are 0"),
        (np.zeros(3), "1 dimension"),
        (np.array([["a"]], dtype=object), "must be numbers"),
        (np.array([[1j]]), "must be numbers"),
        (sparse.coo_matrix(([1], ([0], [0])), shape=(2**40, 2)), "declares 1099511627776"),
    ],
)
def test_unusable_matrices_are_refused(counts, message):
    with pytest.raises(CorpusError, match=f"myfile: .*{message}"):
        validate_counts(counts, "myfile")


@pytest.mark.parametrize("field", ["indices", "indptr"])
def test_indices_out_of_range_are_refused_before_use(field):
    counts = sparse.csr_matrix(DENSE)
    getattr(counts, field)[1] = 1_000_000
    with pytest.raises(CorpusError, match="indices are broken"):
        validate_counts(counts, "test")


COUNTS = sparse.random(
    12, 9, density=0.15, format="csr", random_state=0, data_rvs=lambda n: np.arange(1, n + 1)
).astype(np.int64)

# documents, nonzeros, tokens, empty documents: the table in the README of the data
PUBLISHED = {
    ("20news", "train"): (8000, 324_034, 507_832, 244),
    ("yelp", "val"): (2000, 79_414, 98_026, 2),
}


def save_bow(folder: Path, name: str, matrix, split: str = "val") -> None:
    sparse.save_npz(folder / f"X_{name}_{split}_bow.npz", matrix)


@pytest.mark.parametrize(("name", "split"), PUBLISHED)
def test_real_corpora_have_the_published_sizes(data_dir, name, split):
    corpus = load_corpus("bow", name, data_dir / "lda_bow", split=split)
    documents, nonzeros, tokens, empty = PUBLISHED[name, split]
    assert corpus.counts.shape == (documents, 5000)
    assert (corpus.counts.nnz, corpus.tokens) == (nonzeros, tokens)
    assert (corpus.empty_documents, corpus.dropped_documents) == (empty, 0)
    raw = sparse.load_npz(data_dir / "lda_bow" / f"X_{name}_{split}_bow.npz")
    assert (corpus.counts != raw).nnz == 0


def test_missing_bow_names_what_there_is_and_the_nearest(tmp_path):
    for name in ("20news", "agnews"):
        save_bow(tmp_path, name, COUNTS)
    with pytest.raises(CorpusError, match=r"X_20new_val_bow\.npz; there are: 20news, agnews; "
                                          "the nearest is '20news'"):  # fmt: skip
        load_bow(tmp_path, "20new")
    with pytest.raises(CorpusError, match="no corpora found"):
        load_bow(tmp_path, "20news", "train")
    with pytest.raises(CorpusError, match="no such folder"):
        load_bow(tmp_path / "nowhere", "20news")
    with pytest.raises(CorpusError, match="allowed are 'train' and 'val'"):
        load_bow(tmp_path, "20news", "test")  # type: ignore[arg-type]


def test_bow_with_python_objects_is_refused_and_nothing_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    path = tmp_path / "X_bomb_val_bow.npz"
    objects = np.array([Bomb()], dtype=object)
    np.savez(path, format=np.array(b"csr"), data=objects, indices=[0], indptr=[0, 1], shape=(1, 1))
    with pytest.raises(CorpusError, match=r"X_bomb_val_bow\.npz"):
        load_bow(tmp_path, "bomb")
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CorpusError, match=r"X_bomb_val_bow\.npz"):
        load_bow(tmp_path, "bomb")
    assert not (tmp_path / "exploded").exists()
