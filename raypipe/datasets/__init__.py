"""Corpora: the built-in one, bag-of-words files, text files."""

from __future__ import annotations

from raypipe.datasets.builtin import builtin_corpus
from raypipe.datasets.corpus import Corpus, CorpusError, make_corpus, validate_counts
from raypipe.datasets.docstrings import DocstringRecord, docstring_records
from raypipe.datasets.load import Source, load_corpus
from raypipe.datasets.text import Tokenization

__all__ = [
    "Corpus",
    "CorpusError",
    "DocstringRecord",
    "Source",
    "Tokenization",
    "builtin_corpus",
    "docstring_records",
    "load_corpus",
    "make_corpus",
    "validate_counts",
]
