"""Bag-of-words files. Empty documents are kept, since dropping them would change perplexities."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import pandas as pd
from scipy import sparse

from experiments.common.corpora.corpus import Corpus, CorpusError, make_corpus
from experiments.common.corpora.files import find_file, open_text, reading

#: documents per entry of a docword file; more mean a damaged header, and would cost memory
_MAX_SPARSITY = 1000
#: maximum length of a header line in characters, and digits of its number
_MAX_HEADER, _MAX_DIGITS = 64, 18


def load_bow(directory: Path, name: str, split: Literal["train", "val"] = "val") -> Corpus:
    """Return the corpus in ``directory/X_<name>_<split>_bow.npz``, from ``scipy.sparse.save_npz``.

    Raises:
        CorpusError: the file does not exist (the message lists the folder's corpora), is damaged,
            holds Python objects, is not a CSR, CSC or COO matrix, or has values other than counts.

    """
    if split not in ("train", "val"):
        raise CorpusError(f"split is {split!r}; allowed are 'train' and 'val'")
    path = find_file(directory, name, [("X_", f"_{split}_bow.npz")])
    with reading(path, "a sparse matrix of scipy.sparse.save_npz without Python objects"):
        with path.open("rb") as file:  # numpy leaves damaged files open if given a path
            counts = sparse.load_npz(file)  # never unpickle
        if counts.format not in ("csr", "csc", "coo"):
            raise CorpusError(f"{path}: the matrix is stored as {counts.format}; save it as CSR")
        return make_corpus(name, counts, source=str(path))


def load_uci(directory: Path, name: str) -> Corpus:
    """Return the corpus in ``docword.<name>.txt`` and ``vocab.<name>.txt``, each plain or ``.gz``.

    This is the UCI "Bag of Words" format: three lines with the numbers of documents D, words W and
    entries, then one entry per line, ``document word count``, numbered from 1. The vocabulary has
    one word per line. Each word of a document has one entry.

    Raises:
        CorpusError: a file is missing (the message lists the folder's corpora), damaged or
            incomplete; a number is outside D or W; the vocabulary does not have W words; or a value
            is not a count.

    """
    path = find_file(directory, name, [("docword.", ".txt"), ("docword.", ".txt.gz")])
    words_path = find_file(directory, name, [("vocab.", ".txt"), ("vocab.", ".txt.gz")])
    with reading(words_path, "a vocabulary, a word a line"), open_text(words_path) as file:
        vocabulary = [line.strip() for line in file]
    if "" in vocabulary:
        raise CorpusError(f"{words_path}: line {vocabulary.index('') + 1} has no word; give one")
    with reading(path, "a UCI docword file"):
        with open_text(path) as file:
            shape = (_header(file, path, "documents"), _header(file, path, "words"))
            expected = _header(file, path, "entries")
            if shape[1] != len(vocabulary):
                raise CorpusError(
                    f"{path}: the vocabulary has {len(vocabulary)} words, but the counts have "
                    f"{shape[1]} columns; {words_path.name} must have one word per column"
                )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "loadtxt: input contained no data")
                entries = np.loadtxt(file, dtype=np.float64, comments=None, ndmin=2)
        if len(entries) != expected:
            raise CorpusError(
                f"{path}: the header declares {expected} entries, but {len(entries)} follow; "
                "the file is incomplete: copy it again"
            )
        if shape[0] > _MAX_SPARSITY * max(expected, _MAX_SPARSITY):
            raise CorpusError(
                f"{path}: the header declares {shape[0]} documents, but only {expected} entries; "
                "the file is damaged: copy it again"
            )
        if expected and entries.shape[1] != 3:
            raise CorpusError(f"{path}: an entry must be 'document word count', three numbers")
        entries = entries.reshape(-1, 3)
        for column, what in enumerate(("document", "word")):
            ids, limit = entries[:, column], shape[column]
            bad = ~((ids >= 1) & (ids <= limit) & (ids == np.floor(ids)))
            if bad.any():
                first = int(bad.argmax())
                raise CorpusError(
                    f"{path}: entry {first + 1} names {what} {ids[first]:g}; "
                    f"the header allows whole numbers from 1 to {limit}"
                )
        rows, columns = entries[:, :2].astype(np.int64).T - 1
        counts = sparse.coo_matrix((entries[:, 2], (rows, columns)), shape=shape)
        corpus = make_corpus(name, counts, source=str(path), vocabulary=vocabulary)
    if corpus.counts.nnz < np.count_nonzero(entries[:, 2]):
        cells = pd.Series(rows * shape[1] + columns)
        again = int(cells.duplicated().to_numpy().argmax())
        raise CorpusError(
            f"{path}: entry {again + 1} is of document {rows[again] + 1} and word "
            f"{columns[again] + 1}, as one before; the file is damaged: copy it again"
        )
    return corpus


def _header(file: TextIO, path: Path, what: str) -> int:
    """Return the number in the next header line of a docword file."""
    line = file.readline(_MAX_HEADER).strip()
    if not (line.isascii() and line.isdigit() and len(line) <= _MAX_DIGITS):
        raise CorpusError(f"{path}: the header must give the number of {what}, got {line[:40]!r}")
    return int(line)
