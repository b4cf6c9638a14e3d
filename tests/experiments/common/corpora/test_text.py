from __future__ import annotations

import gzip
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.feature_extraction.text import CountVectorizer

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.load import load_corpus
from experiments.common.corpora.text import WORD_PATTERN, Tokenization, vectorize
from tests.experiments.rows import write_rows

TEXTS = [
    "Topic models find topics in documents",
    "",
    "Documents hold words, words hold topics; models count words",
    "the and of 12 x",  # stop words, numbers and single letters: nothing is left
    "Optimizer compares models of topics",
]
ALL = Tokenization(min_df=1, max_df=1.0)
KEEP = {"min_df": 1, "max_df": 1.0}


def write(folder: Path, form: str, name: str = "mine") -> None:
    """The texts in one of the file formats."""
    path = folder / f"{name}.{form}"
    if form.startswith("txt"):
        content = ("\n".join(TEXTS) + "\n").encode()
        path.write_bytes(gzip.compress(content) if form.endswith("gz") else content)
    else:
        write_rows(path, [{"id": number, "text": text} for number, text in enumerate(TEXTS)])


def test_counts_equal_those_of_scikit_learn():
    corpus = vectorize("c", TEXTS, "test", ALL)
    reference = CountVectorizer(stop_words="english", token_pattern=WORD_PATTERN)
    counts = reference.fit_transform(TEXTS).toarray()
    np.testing.assert_array_equal(corpus.counts.toarray(), counts[[0, 2, 4]])
    assert corpus.vocabulary == tuple(reference.get_feature_names_out())
    assert (corpus.dropped_documents, corpus.empty_documents) == (2, 0)


@given(st.lists(st.text("abc ", max_size=30), min_size=1, max_size=12), st.integers(1, 6))
def test_the_vocabulary_holds_the_most_frequent_words(texts, limit):
    words = Counter(w for text in texts for w in text.split() if len(w) >= 3)
    expected = sorted(sorted(words), key=lambda w: -words[w])[:limit]
    tokenization = Tokenization(max_features=limit, min_df=1, max_df=1.0, stop_words=None)
    try:
        corpus = vectorize("c", texts, "test", tokenization)
    except CorpusError:
        assert not words
        return
    assert corpus.vocabulary == tuple(sorted(expected))
    assert corpus.tokens == sum(words[w] for w in expected)
    kept = sum(any(w in expected for w in text.split()) for text in texts)
    assert (corpus.documents, corpus.dropped_documents) == (kept, len(texts) - kept)


FORMS = ["txt", "txt.gz", "jsonl", "jsonl.gz", "csv", "csv.gz", "parquet"]


@pytest.mark.parametrize("form", FORMS)
def test_every_format_gives_the_same_corpus(tmp_path, form):
    write(tmp_path, form)
    source = "text" if form.startswith("txt") else form.removesuffix(".gz")
    assert load_corpus(source, "mine", tmp_path, **KEEP) == vectorize("mine", TEXTS, "test", ALL)


def test_folder_of_text_files_is_read_in_order_of_names(tmp_path):
    for i, text in enumerate(TEXTS):
        path = tmp_path / "mine" / f"part{i // 2}" / f"{i}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "mine" / "notes.md").write_text("ignored entirely")
    assert load_corpus("text", "mine", tmp_path, **KEEP) == vectorize("mine", TEXTS, "test", ALL)


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet"])
def test_a_missing_column_is_named_with_those_there_are(tmp_path, form):
    write(tmp_path, form)
    with pytest.raises(
        CorpusError,
        match=f"mine.{form}.*no column 'texts'; there are: id, text; the nearest is 'text'",
    ):
        load_corpus(form, "mine", tmp_path, column="texts", **KEEP)


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


@pytest.mark.parametrize(
    "tokenization",
    [Tokenization(), Tokenization(min_df=0.9, max_df=0.1), Tokenization(min_df=-1)],
    ids=["too rare", "contradictory", "not allowed"],
)
def test_no_word_left_says_so(tokenization):
    with pytest.raises(CorpusError, match=r"mine: no word is left with min_df=.*lower min_df"):
        vectorize("c", ["only words", "seen once"], "mine", tokenization)


def test_a_corpus_without_documents_says_so():
    with pytest.raises(CorpusError, match="mine: no documents: every line or file is empty"):
        vectorize("c", ["", " \n"], "mine")


def test_missing_files_name_what_there_is(tmp_path):
    write(tmp_path, "csv.gz", name="reviews")
    with pytest.raises(CorpusError, match=r"no revews\.csv or revews\.csv\.gz; there are: reviews"):
        load_corpus("csv", "revews", tmp_path)
    with pytest.raises(CorpusError, match="no corpora found"):
        load_corpus("text", "reviews", tmp_path)


def test_load_corpus_refuses_what_does_not_belong(tmp_path):
    with pytest.raises(CorpusError, match=r"no source 'jsonlines'; .* nearest is 'jsonl'"):
        load_corpus("jsonlines", "x", tmp_path)  # type: ignore[arg-type]
    with pytest.raises(CorpusError, match=r"source=text: there is no option 'colum'"):
        load_corpus("text", "x", tmp_path, colum="body")
    with pytest.raises(CorpusError, match=r"source=text: there is no option 'split'"):
        load_corpus("text", "x", tmp_path, split="val")
    with pytest.raises(CorpusError, match=r"no corpus 'stdlb'; .* nearest is 'stdlib'"):
        load_corpus("builtin", "stdlb")
    with pytest.raises(CorpusError, match=r"set data\.dir"):
        load_corpus("bow", "x")
