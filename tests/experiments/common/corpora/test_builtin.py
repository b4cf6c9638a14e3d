from __future__ import annotations

import json.decoder
import sys
import textwrap

import numpy as np
import pytest

from experiments.common.corpora import docstrings
from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import DocstringRecord, docstring_records
from experiments.common.corpora.load import load_corpus, sample


@pytest.fixture(scope="module")
def records():
    return list(docstring_records())


@pytest.fixture
def library(monkeypatch, tmp_path, records):
    """Reading the sources replaced by some of their records, and an empty cache."""
    reads = []

    def fake(folder):
        reads.append(folder)
        return iter(records[:2000])

    monkeypatch.setattr(docstrings, "_read", fake)
    monkeypatch.setenv("RAYPIPE_CACHE", str(tmp_path / "cache"))
    docstrings._standard_library.cache_clear()
    yield reads
    docstrings._standard_library.cache_clear()


def in_another_process():
    """The records as a process that begins finds them."""
    docstrings._standard_library.cache_clear()
    return list(docstring_records())


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


def test_corpus_is_large_enough_for_topics_and_deterministic():
    corpus = load_corpus("builtin", "stdlib")
    assert corpus.documents > 5000
    assert corpus.words > 1500
    assert corpus.tokens > 50_000
    assert corpus.empty_documents == 0
    assert (np.diff(corpus.counts.tocsc().indptr) >= 5).all()  # min_df
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
    with pytest.raises(CorpusError, match=r"data\.options\.max_documents = 0: .*greater than 0"):
        load_corpus("builtin", "stdlib", max_documents=0)


def test_the_sources_are_read_once(library, tmp_path, records):
    assert in_another_process() == records[:2000]
    assert in_another_process() == records[:2000]
    assert len(library) == 1
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".sqlite"]
