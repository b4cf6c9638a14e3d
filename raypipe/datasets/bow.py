"""Bag-of-words files. They keep their empty documents, since dropping them changes perplexities."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
from scipy import sparse

from raypipe.datasets.corpus import Corpus, CorpusError, make_corpus
from raypipe.datasets.files import find_file, open_text, reading


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
    the vocabulary has a word a line.

    Raises:
        CorpusError: a missing file (the corpora of the folder are named), a damaged or incomplete
            one, numbers outside D and W, a vocabulary of another length than W, or values that
            are no counts.

    """
    path = find_file(directory, name, [("docword.", ".txt"), ("docword.", ".txt.gz")])
    words_path = find_file(directory, name, [("vocab.", ".txt"), ("vocab.", ".txt.gz")])
    with reading(words_path, "a vocabulary, a word a line"), open_text(words_path) as file:
        vocabulary = [line.strip() for line in file]
    with reading(path, "a UCI docword file"):
        with open_text(path) as file:
            shape = (_header(file, path, "documents"), _header(file, path, "words"))
            expected = _header(file, path, "entries")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "loadtxt: input contained no data")
                entries = np.loadtxt(file, dtype=np.float64, comments=None, ndmin=2)
        if len(entries) != expected:
            raise CorpusError(
                f"{path}: the header declares {expected} entries, but {len(entries)} follow; "
                "the file is incomplete: copy it anew"
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
        return make_corpus(name, counts, source=str(path), vocabulary=vocabulary)


def _header(file: TextIO, path: Path, what: str) -> int:
    """The next line of the header of a docword file."""
    line = file.readline().strip()
    if not (line.isascii() and line.isdigit()):
        raise CorpusError(f"{path}: the header must give the number of {what}, got {line[:40]!r}")
    return int(line)
