from __future__ import annotations

import json.decoder
import sys
import textwrap

import numpy as np
import pytest

from raypipe.datasets import CorpusError, Tokenization, builtin_corpus, docstring_records
from raypipe.datasets import builtin as module
from raypipe.datasets.builtin import read_cached, write_cached
from raypipe.datasets.docstrings import SKIPPED, DocstringRecord

SMALL = Tokenization(max_features=200)


@pytest.fixture(scope="module")
def records():
    return list(docstring_records())


@pytest.fixture
def library(monkeypatch, tmp_path, records):
    """Reading the sources replaced by their records, and an empty cache."""
    reads = []

    def fake():
        reads.append(1)
        return iter(records)

    monkeypatch.setattr(module, "docstring_records", fake)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    return reads


def test_records_are_the_docstrings_of_the_modules(records):
    found = {(r.module, r.qualname): r for r in records}
    for name, qualname, kind, documented in [
        ("json.decoder", "", "module", json.decoder),
        ("json.decoder", "JSONDecoder", "class", json.decoder.JSONDecoder),
        ("json.decoder", "JSONDecoder.raw_decode", "function", json.decoder.JSONDecoder.raw_decode),
        ("json", "dumps", "function", json.dumps),
    ]:
        record = found[name, qualname]
        text = documented.__doc__ or ""
        assert " ".join(record.text.split()) == " ".join(text.split())
        assert record.kind == kind
        assert record.package == "json"
    assert found["json", "dumps"].summary.startswith("Serialize ``obj``")


def test_records_come_in_order_from_no_skipped_folder(records):
    modules = [r.module for r in records]
    assert modules == sorted(modules)
    assert SKIPPED.isdisjoint(part for name in modules for part in name.split("."))
    assert all(r.text.strip() for r in records)


def test_sources_are_read_not_imported(tmp_path):
    (tmp_path / "pack" / "tests").mkdir(parents=True)
    (tmp_path / "pack" / "tests" / "t.py").write_text('"""A test."""')
    (tmp_path / "pack" / "__init__.py").write_text('"""The package.\n\nMore."""')
    (tmp_path / "never_imported_module.py").write_text(
        textwrap.dedent('''
            raise SystemExit
            try:
                import a
            except ImportError:
                def fallback():
                    """Inside a handler."""
            class A:
                if True:
                    async def method(self):
                        """A method."""
                        def inner():
                            """Inside a method."""
                class B:
                    "  "
        ''')
    )
    assert list(docstring_records(tmp_path)) == [
        DocstringRecord("never_imported_module", "fallback", "function", "Inside a handler."),
        DocstringRecord("never_imported_module", "A.method", "function", "A method."),
        DocstringRecord("never_imported_module", "A.method.inner", "function", "Inside a method."),
        DocstringRecord("pack", "", "module", "The package.\n\nMore."),
    ]
    assert "never_imported_module" not in sys.modules


def test_without_sources_it_says_so(tmp_path):
    with pytest.raises(CorpusError, match="no Python sources"):
        list(docstring_records(tmp_path))
    (tmp_path / "bad.py").write_text("def (")
    with pytest.raises(CorpusError, match=r"bad\.py: not a readable Python source"):
        list(docstring_records(tmp_path))


def test_corpus_is_large_enough_for_topics_and_deterministic(library, tmp_path, monkeypatch):
    corpus = builtin_corpus()
    assert corpus.documents > 5000
    assert corpus.words > 1500
    assert corpus.tokens > 50_000
    assert corpus.empty_documents == 0
    assert (np.diff(corpus.counts.tocsc().indptr) >= 5).all()  # min_df
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "other"))
    assert builtin_corpus() == corpus
    assert len(library) == 2


def test_samples_are_nested_and_limited(library, records):
    small = module._sample(records, 100)
    large = module._sample(records, 400)
    assert set(small) < set(large)
    assert len(small) == 100
    assert large == [r for r in records if r in set(large)]
    corpus = builtin_corpus(400, SMALL)
    assert corpus.documents + corpus.dropped_documents == 400
    assert corpus.words <= 200
    with pytest.raises(CorpusError, match="max_documents is 0"):
        builtin_corpus(0)


def test_the_cache_serves_equal_settings_only(library, tmp_path):
    first = builtin_corpus(400, SMALL)
    second = builtin_corpus(400, SMALL)
    assert len(library) == 1
    assert second == first
    assert second.vocabulary == first.vocabulary
    assert (second.counts != first.counts).nnz == 0
    builtin_corpus(401, SMALL)
    builtin_corpus(400, Tokenization(max_features=201))
    assert len(library) == 3
    assert sorted(p.suffix for p in (tmp_path / "cache").iterdir()) == [".npz"] * 3


@pytest.mark.parametrize("damage", ["truncated", "overwritten", "emptied", "other content"])
def test_a_damaged_cache_entry_is_built_anew(library, tmp_path, caplog, damage):
    first = builtin_corpus(400, SMALL)
    (path,) = (tmp_path / "cache").iterdir()
    content = path.read_bytes()
    middle = len(content) // 2
    if damage == "truncated":
        path.write_bytes(content[:middle])
    elif damage == "overwritten":
        path.write_bytes(content[:middle] + bytes(64) + content[middle + 64 :])
    elif damage == "emptied":
        path.write_bytes(b"")
    else:  # sound as a file, but its counts are not those of its fingerprint
        with np.load(path) as stored:
            arrays = dict(stored)
        arrays["data"] = arrays["data"] + 1
        np.savez(path, **arrays)
    assert builtin_corpus(400, SMALL) == first
    assert "is rebuilt" in caplog.text
    assert read_cached(path) == first


def test_a_cache_that_cannot_be_written_costs_only_time(library, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "file" / "cache"))
    assert builtin_corpus(400, SMALL).documents > 300
    assert "cannot be cached" in caplog.text


def test_an_interrupted_write_leaves_nothing(library, tmp_path, monkeypatch):
    corpus = builtin_corpus(400, SMALL)
    target = tmp_path / "new" / "entry.npz"

    def fail(*args, **kwargs):
        raise OSError("disk full")

    monkeypatch.setattr(np, "savez_compressed", fail)
    with pytest.raises(OSError, match="disk full"):
        write_cached(target, corpus)
    assert list(target.parent.iterdir()) == []
