"""Built-in corpus ``stdlib``: docstrings of Python's standard library, with no download."""

from __future__ import annotations

import hashlib

from experiments.common.corpora.corpus import Corpus, CorpusError
from experiments.common.corpora.docstrings import DocstringRecord, docstring_records
from experiments.common.corpora.text import Tokenization, vectorize

NAME = "stdlib"


def builtin_corpus(
    max_documents: int | None = None, tokenization: Tokenization | None = None
) -> Corpus:
    """Return the docstrings of Python's standard library as word counts.

    The same versions of Python and scikit-learn give the same corpus. The docstrings are cached in
    the user's cache (``$RAYPIPE_CACHE``, by default ``~/.cache/raypipe``).

    Args:
        max_documents: size of a sample of docstrings, drawn by their names; a smaller sample is
            part of a larger one. Sampled docstrings without a word are dropped.
        tokenization: the definition of a word.

    Raises:
        CorpusError: ``max_documents`` is below 1, there are too few documents for the vocabulary,
            or Python lacks the sources of its standard library.

    """
    if max_documents is not None and max_documents < 1:
        raise CorpusError(f"max_documents is {max_documents}; allowed is 1 or more")
    settings = tokenization or Tokenization()
    records = list(docstring_records())
    if max_documents is not None:
        records = _sample(records, max_documents)
    return vectorize(NAME, (r.text for r in records), f"built-in corpus {NAME!r}", settings)


def _sample(records: list[DocstringRecord], size: int) -> list[DocstringRecord]:
    """Return the records with the smallest hashes of their names, in the given order."""
    names = [f"{r.module}:{r.qualname}".encode() for r in records]
    order = sorted(range(len(records)), key=lambda i: hashlib.sha256(names[i]).digest())
    return [records[i] for i in sorted(order[:size])]
