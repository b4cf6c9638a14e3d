"""The built-in corpus of docstrings."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from experiments.common.corpora.docstrings import docstring_records
from experiments.teleclass import corpus as corpus_module
from experiments.teleclass.corpus import builtin_documents


@pytest.fixture(scope="module")
def records():
    return list(docstring_records())


@pytest.fixture
def corpus(records, monkeypatch):
    monkeypatch.setattr(corpus_module, "docstring_records", lambda: iter(records))
    return builtin_documents()


def test_classes_follow_the_dotted_names(corpus):
    taxonomy, train, test = corpus
    assert len(taxonomy) > 100
    assert taxonomy.depth.max() >= 3
    assert {"xml", "xml.dom", "xml.dom.minidom"} <= set(taxonomy.ids)
    assert taxonomy.names[taxonomy.ids.index("xml.dom.minidom")] == "xml dom minidom"
    for parent, child in taxonomy.edges:
        assert taxonomy.ids[child].rpartition(".")[0] == taxonomy.ids[parent]
    assert taxonomy.depth.tolist() == [id_.count(".") + 1 for id_ in taxonomy.ids]
    sizes = np.asarray(train.gold.sum(axis=0) + test.gold.sum(axis=0)).ravel()
    assert sizes.min() >= 12


def test_split_and_samples_hang_on_names_only(corpus):
    taxonomy, train, test = corpus
    assert len(test) / (len(train) + len(test)) == pytest.approx(0.3, abs=0.03)
    assert not set(train.ids.to_pylist()) & set(test.ids.to_pylist())
    small = builtin_documents(200)
    assert small[0].fingerprint == taxonomy.fingerprint
    for sample, whole in zip(small[1:], (train, test), strict=True):
        names = whole.ids.to_pylist()
        chosen = sorted(names, key=lambda name: hashlib.sha256(name.encode()).digest())[:200]
        assert sample.ids.to_pylist() == [name for name in names if name in set(chosen)]
    again = builtin_documents()
    assert [d.fingerprint for d in again] == [d.fingerprint for d in corpus]
