"""Corpora: counts from memory and from bags of words, texts in files, and docstrings."""

from __future__ import annotations

import pickle
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import sparse

from experiments.common.corpora import docstrings, load
from experiments.common.corpora.corpus import CorpusError, make_corpus, validate_counts
from experiments.common.corpora.docstrings import DocstringRecord, docstring_records
from experiments.common.corpora.load import load_corpus, sample
from experiments.common.corpora.text import Tokenization, vectorize
from tests.experiments.rows import write_rows, write_text
from tests.scenario import cases, write_files

DENSE = np.array([[0, 2, 0, 1], [0, 0, 0, 0], [5, 0, 0, 3]])

CONVERSIONS = [
    np.asarray,
    *(getattr(sparse, f"{f}_matrix") for f in ("csr", "csc", "coo", "bsr", "dia", "lil", "dok")),
]
DTYPES = (np.int8, np.uint64, np.float32, np.float64)

# computed once; a change means that stored results no longer match their corpora
FINGERPRINT = "67413d66183571041940cca039b9272aa1b7af62f22cc7488104240f1176f403"

matrices = hnp.arrays(
    np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=6), elements=st.integers(0, 9)
).filter(np.any)


def test_canonical_form_adds_duplicates_drops_zeros_and_leaves_the_input_alone():
    raw = sparse.csr_matrix(([1, 0, 2, 4], [3, 2, 3, 0], [0, 3, 4]), shape=(2, 4))
    counts = validate_counts(raw, "test")
    assert counts.has_canonical_format
    assert counts.data.tolist() == [3, 4]
    assert counts.indices.tolist() == [3, 0]
    assert raw.data.tolist() == [1, 0, 2, 4]
    assert raw.indices.tolist() == [3, 2, 3, 0]


@given(matrices, st.sampled_from(CONVERSIONS), st.sampled_from(DTYPES))
def test_corpus_and_fingerprint_depend_on_the_counts_alone(dense, convert, dtype):
    def of(counts, words=None):
        return make_corpus("c", counts, source="test", vocabulary=words)

    corpus = of(dense)
    assert of(convert(dense.astype(dtype))) == corpus
    assert corpus.counts.dtype == np.int64
    np.testing.assert_array_equal(corpus.counts.toarray(), dense)
    assert (corpus.documents, corpus.words, corpus.tokens) == (*dense.shape, dense.sum())
    assert corpus.empty_documents == (dense.sum(axis=1) == 0).sum()
    wide = sparse.csr_matrix(dense)
    wide.indices, wide.indptr = wide.indices.astype(np.int64), wide.indptr.astype(np.int64)
    assert of(wide).fingerprint == corpus.fingerprint
    changed = dense.copy()
    changed[0, 0] += 1
    words = [f"w{i}" for i in range(dense.shape[1])]
    taller = np.vstack([dense, np.zeros_like(dense[:1])])
    wider = np.hstack([dense, np.zeros_like(dense[:, :1])])
    different = [corpus, of(changed), of(taller), of(wider)]
    different += [of(dense, words), of(dense, [*words[:-1], "other"])]
    assert len({each.fingerprint for each in different}) == len(different)


def test_fingerprint_is_the_same_on_every_platform():
    corpus = make_corpus("c", DENSE, source="test", vocabulary=["a", "b", "c", "\u00e9"])
    assert corpus.fingerprint == FINGERPRINT


#: why a count is invalid, by the count
BAD_COUNTS = {
    -1: "negative", 0.5: "not a whole number", np.nan: "not a finite number",
    np.inf: "not a finite number", -np.inf: "not a finite number", 2.0**31: "more than 2147483647",
}  # fmt: skip


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        *(
            (convert(np.array([[2.0, 0, 1], [0, 3, value]])), f"row 1, column 2 .*{reason}")
            for value, reason in BAD_COUNTS.items()
            for convert in (np.asarray, sparse.csr_matrix, sparse.csc_array)
        ),
        (np.zeros((0, 3)), "no document"),
        (np.zeros((3, 0)), "vocabulary is empty"),
        (np.zeros((3, 3)), "all counts are 0"),
        (np.zeros(3), "1 dimension"),
        (np.array([["a"]], dtype=object), "must be numbers"),
        (sparse.coo_matrix(([1], ([0], [0])), shape=(2**40, 2)), "declares 1099511627776"),
        (sparse.coo_matrix(([0.5, 0.5], ([0, 0], [1, 1])), shape=(1, 2)), "row 0, column 1"),
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


# documents, nonzeros, tokens, empty documents: the table in the README of the data
@pytest.mark.parametrize(
    ("name", "split", "sizes"),
    [
        ("20news", "train", (8000, 324_034, 507_832, 244)),
        ("yelp", "val", (2000, 79_414, 98_026, 2)),
    ],
)
def test_real_corpora_have_the_published_sizes(data_dir, name, split, sizes):
    corpus = load_corpus("bow", name, data_dir / "lda_bow", split=split)
    found = (corpus.documents, corpus.counts.nnz, corpus.tokens, corpus.empty_documents)
    assert (*found, corpus.words, corpus.dropped_documents) == (*sizes, 5000, 0)
    raw = sparse.load_npz(data_dir / "lda_bow" / f"X_{name}_{split}_bow.npz")
    assert (corpus.counts != raw).nnz == 0


def test_bow_with_python_objects_is_refused_and_nothing_is_unpickled(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    path = tmp_path / "X_bomb_val_bow.npz"
    objects = np.array([Bomb()], dtype=object)
    np.savez(path, format=np.array(b"csr"), data=objects, indices=[0], indptr=[0, 1], shape=(1, 1))
    with pytest.raises(CorpusError, match=r"X_bomb_val_bow\.npz"):
        load_corpus("bow", "bomb", tmp_path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CorpusError, match=r"X_bomb_val_bow\.npz"):
        load_corpus("bow", "bomb", tmp_path)
    assert not (tmp_path / "exploded").exists()


TEXTS = [
    "Topic models find topics in documents",
    "",
    "Documents hold words, words hold topics; models count words",
    "the and of 12 x",  # stop words, numbers and single letters: nothing is left
    "Optimizer compares models of topics",
]
ALL = Tokenization(min_df=1, max_df=1.0)
KEEP = {"min_df": 1, "max_df": 1.0}


@given(st.lists(st.text("abc ", max_size=30), min_size=1, max_size=12), st.integers(1, 6))
def test_the_vocabulary_holds_the_most_frequent_words(texts, limit):
    words = Counter(w for text in texts for w in text.split() if len(w) >= 3)
    assume(words)
    expected = sorted(sorted(words), key=lambda w: -words[w])[:limit]
    tokenization = Tokenization(max_features=limit, min_df=1, max_df=1.0, stop_words=None)
    corpus = vectorize("c", texts, "test", tokenization)
    assert corpus.vocabulary == tuple(sorted(expected))
    assert corpus.tokens == sum(words[w] for w in expected)
    kept = sum(any(w in expected for w in text.split()) for text in texts)
    assert (corpus.documents, corpus.dropped_documents) == (kept, len(texts) - kept)


@pytest.mark.parametrize("form", ["txt", "txt.gz", "jsonl", "jsonl.gz", "csv", "csv.gz", "parquet"])
def test_every_format_gives_the_same_corpus(tmp_path, form):
    path, source = tmp_path / f"mine.{form}", form.removesuffix(".gz").replace("txt", "text")
    if source == "text":
        write_text(path, "\n".join(TEXTS) + "\n")
    else:
        write_rows(path, [{"id": number, "text": text} for number, text in enumerate(TEXTS)])
    assert load_corpus(source, "mine", tmp_path, **KEEP) == vectorize("mine", TEXTS, "test", ALL)


def test_folder_of_text_files_is_read_in_order_of_names(tmp_path):
    files = {f"part{i // 2}/{i}.txt": text for i, text in enumerate(TEXTS)}
    write_files(tmp_path / "mine", {**files, "notes.md": "ignored entirely"})
    assert load_corpus("text", "mine", tmp_path, **KEEP) == vectorize("mine", TEXTS, "test", ALL)


def test_missing_values_are_empty_documents(tmp_path):
    rows = [{"text": text} for text in (*TEXTS, None)]
    path = write_rows(tmp_path / "j.jsonl", rows)
    path.write_text(f"{path.read_text()}\n")
    write_rows(tmp_path / "p.parquet", rows)
    (tmp_path / "c.csv").write_text('id,text\n1,models NA 1.0\n2,\n3,"two\nlines"\n')
    for source, name in (("jsonl", "j"), ("parquet", "p")):
        assert load_corpus(source, name, tmp_path, **KEEP).dropped_documents == 3
    corpus = load_corpus("csv", "c", tmp_path, **KEEP)
    assert corpus.vocabulary == ("lines", "models")
    assert (corpus.documents, corpus.dropped_documents) == (2, 1)


@pytest.mark.parametrize(("source", "name", "in_folder", "message"), cases(__file__, "missing"))
def test_a_missing_corpus_is_refused_with_what_there_is(tmp_path, source, name, in_folder, message):
    (tmp_path / "reviews.csv.gz").touch()
    with pytest.raises(CorpusError, match=message):
        load_corpus(source, name, tmp_path if in_folder else None)


@pytest.fixture(scope="module")
def records():
    return list(docstring_records())


def test_sources_are_read_not_imported(tmp_path):
    given = cases(__file__, "sources")
    write_files(tmp_path, given["files"])
    found = list(docstring_records(tmp_path))
    assert found == [DocstringRecord(*each) for each in given["records"]]
    assert (found[3].summary, found[4].package) == ("The package.", "pack")
    assert "never_imported_module" not in sys.modules


def test_corpus_is_large_enough_for_topics_and_deterministic():
    corpus = load_corpus("builtin", "stdlib")
    assert corpus.documents > 5000
    assert corpus.words > 1500
    assert corpus.tokens > 50_000
    assert corpus.empty_documents == 0
    assert (np.diff(corpus.counts.tocsc().indptr) >= 5).all()  # min_df
    load._builtin.cache_clear()  # as in another process
    assert load_corpus("builtin", "stdlib") == corpus


def test_samples_are_nested_and_limited(records):
    small = sample(records, 100)
    large = sample(records, 400)
    assert set(small) < set(large)
    assert len(small) == 100
    assert large == [r for r in records if r in set(large)]
    corpus = load_corpus("builtin", "stdlib", max_documents=400, max_features=200)
    assert corpus.documents + corpus.dropped_documents == 400
    assert corpus.words <= 200


def test_the_sources_are_read_once(monkeypatch, cache, records):
    read = Mock(side_effect=lambda folder: iter(records[:2000]))
    monkeypatch.setattr(docstrings, "_read", read)
    for _ in range(2):
        docstrings._standard_library.cache_clear()  # as in another process
        assert list(docstring_records()) == records[:2000]
    docstrings._standard_library.cache_clear()
    read.assert_called_once()
    assert [path.suffix for path in cache.iterdir()] == [".sqlite"]
