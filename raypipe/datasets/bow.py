"""Bag-of-words files. Empty documents are kept, since dropping them would change perplexities."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import pandas as pd
from scipy import sparse

from raypipe.datasets.corpus import Corpus, CorpusError, make_corpus
from raypipe.datasets.files import find_file, open_text, reading

#: documents an entry of a docword file: with more, its header is damaged, and would cost memory
_MAX_SPARSITY = 1000
#: characters of a line of its header, and digits of the number
_MAX_HEADER, _MAX_DIGITS = 64, 18


def load_bow(directory: Path, name: str, split: Literal["train", "val"] = "val") -> Corpus:
    """The corpus in ``directory/X_<name>_<split>_bow.npz``, as ``scipy.sparse.save_npz`` wrote it.

    Raises:
        CorpusError: no such file (the corpora of the folder are named), a file that is damaged,
            holds Python objects or is no CSR, CSC or COO matrix, or values that are no counts.

    """
    if split not in ("train", "val"):
        raise CorpusError(f"split is {split!r}; allowed are 'train' and 'val'")
    path = find_file(directory, name, [("X_", f"_{split}_bow.npz")])
    with reading(path, "a sparse matrix of scipy.sparse.save_npz without Python objects"):
        with path.open("rb") as file:  # given a path, numpy leaves damaged files open
            counts = sparse.load_npz(file)  # never unpickles
        if counts.format not in ("csr", "csc", "coo"):
            raise CorpusError(f"{path}: the matrix is stored as {counts.format}; save it as CSR")
        return make_corpus(name, counts, source=str(path))


def load_uci(directory: Path, name: str) -> Corpus:
    """The corpus in ``docword.<name>.txt`` and ``vocab.<name>.txt``, each plain or ``.gz``.

    The format of the UCI "Bag of Words" data set: three lines with the number of documents D,
    of words W and of entries, then an entry a line, ``document word count``, numbered from 1;
    the vocabulary has a word a line. Each word of a document has one entry.

    Raises:
        CorpusError: a missing file (the corpora of the folder are named), a damaged or incomplete
            one, numbers outside D and W, a vocabulary of another length than W, or values that
            are no counts.

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
                    f"{shape[1]} columns; {words_path.name} is to have a word for each"
                )
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "loadtxt: input contained no data")
                entries = np.loadtxt(file, dtype=np.float64, comments=None, ndmin=2)
        if len(entries) != expected:
            raise CorpusError(
                f"{path}: the header declares {expected} entries, but {len(entries)} follow; "
                "the file is incomplete: copy it anew"
            )
        if shape[0] > _MAX_SPARSITY * max(expected, _MAX_SPARSITY):
            raise CorpusError(
                f"{path}: the header declares {shape[0]} documents, but only {expected} entries; "
                "the file is damaged: copy it anew"
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
            f"{columns[again] + 1}, as one before; the file is damaged: copy it anew"
        )
    return corpus


def _header(file: TextIO, path: Path, what: str) -> int:
    """The next line of the header of a docword file."""
    line = file.readline(_MAX_HEADER).strip()
    if not (line.isascii() and line.isdigit() and len(line) <= _MAX_DIGITS):
        raise CorpusError(f"{path}: the header must give the number of {what}, got {line[:40]!r}")
    return int(line)
