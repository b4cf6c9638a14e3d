"""Phase 4 and the tokens: what is stored is what training reads."""

from __future__ import annotations

import pickle

import numpy as np
import pyarrow as pa
import pytest
from experiments.teleclass.training_set import (
    TokenisedDocuments,
    add_ancestors,
    make_tokenizer,
    token_lists,
    tokenise,
    tokenizer_path,
    training_set_path,
)
from hypothesis import given
from hypothesis import strategies as st
from scipy import sparse
from tokenizers import Tokenizer

from experiments.teleclass import training_set
from experiments.teleclass.artifacts import label_lists, label_matrix
from experiments.teleclass.corpus import Corpus
from experiments.teleclass.documents import Documents
from experiments.teleclass.line_files import Row
from experiments.teleclass.refine import pseudo_labels_path
from experiments.teleclass.settings import ClassifierSettings
from experiments.teleclass.taxonomy import make_taxonomy
from raypipe.artifacts import read_parquet, write_parquet

TAXONOMY = make_taxonomy(
    [Row("", f"c{i}", f"name {i}") for i in range(4)],
    [Row("", "c0", "c1"), Row("", "c1", "c2"), Row("", "c3", "c2")],
    source="test",
)
SETTINGS = ClassifierSettings(vocabulary=512, length=12)
TRAINED = make_tokenizer(["the cat sat on the mat", "naïve café"] * 20, SETTINGS)


@given(st.text(max_size=40))
def test_tokens_of_a_short_text_are_the_text(text):
    tokenizer = Tokenizer.from_str(TRAINED)
    (tokens,) = token_lists(TRAINED, [text]).to_pylist()
    assert len(tokens) <= SETTINGS.length
    assert all(0 < token < tokenizer.get_vocab_size() <= SETTINGS.vocabulary for token in tokens)
    tokenizer.no_truncation()
    whole = tokenizer.encode(text).ids
    assert tokens == whole[: SETTINGS.length]
    assert tokenizer.decode(whole) == text


def test_equal_texts_train_equal_tokenizers():
    texts = ["the cat sat on the mat", "naïve café"] * 20
    assert make_tokenizer(texts, SETTINGS) == TRAINED
    assert len(token_lists(TRAINED, ["the cat sat"]).to_pylist()[0]) < 6  # merged, not bytes


def prepare(context, written: int):
    """Ten documents, every third without labels, and written ones for class 2."""
    lists = [[] if i % 3 == 0 else [2] if i % 3 == 1 else [1, 3] for i in range(10)]
    direct = np.zeros((10, 4), bool)
    for row, classes in enumerate(lists):
        direct[row, classes] = True
    ids = pa.array([f"d{i}" for i in range(10)], pa.large_string())
    texts = pa.array([f"text {'abc' * i}" for i in range(10)], pa.large_string())
    table = {"id": ids, "labels": label_lists(sparse.csr_matrix(direct)), "confidence": [1.0] * 10}
    write_parquet(context.run, pseudo_labels_path(context.run), pa.table(table))
    rows = {f"2/{i}": {"class_index": 2, "text": f"written {i}"} for i in range(written)}
    context.ledger.put("generated", rows)
    expected = [
        (f"text {'abc' * i}", {0, 1, 2, 3} if classes == [2] else {0, 1, 3})
        for i, classes in enumerate(lists)
        if classes
    ]
    expected += [(f"written {i}", {0, 1, 2, 3}) for i in range(written)]
    return Corpus(TAXONOMY, Documents(ids, texts, None, {}), None), expected


@pytest.mark.parametrize("written", [0, 3])
def test_the_training_set_has_all_ancestors_and_reads_back(context, monkeypatch, written):
    monkeypatch.setattr(training_set, "_BLOCK", 4)  # several blocks, of both kinds of documents
    corpus, expected = prepare(context, written)
    add_ancestors(context, corpus)
    table = read_parquet(context.run, training_set_path(context.run))
    labels = label_matrix(table.column("labels"), 4)
    assert [set(row.indices) for row in labels] == [classes for _, classes in expected]
    tokenise(context, corpus, SETTINGS)
    tokenizer = context.run.read(tokenizer_path(context.run)).decode()
    rows = np.array([*reversed(range(len(expected))), 0, 5])
    stored = TokenisedDocuments(context.run, rows)
    for data in (stored, pickle.loads(pickle.dumps(stored))):
        assert len(data) == len(rows)
        for index, row in enumerate(rows):
            tokens, classes = data[index]
            assert tokens.tolist() == token_lists(tokenizer, [expected[row][0]])[0].as_py()
            assert set(classes.tolist()) == expected[row][1]
    # the mapped blocks do not travel
    assert len(pickle.dumps(stored)) == len(pickle.dumps(TokenisedDocuments(context.run, rows)))


def test_without_any_label_there_is_nothing_to_train_on(context):
    corpus, _ = prepare(context, 0)
    table = read_parquet(context.run, pseudo_labels_path(context.run))
    none = label_lists(sparse.csr_matrix((10, 4), dtype=bool))
    table = table.set_column(1, "labels", none)
    write_parquet(context.run, pseudo_labels_path(context.run), table)
    with pytest.raises(ValueError, match="nothing to train on"):
        add_ancestors(context, corpus)
