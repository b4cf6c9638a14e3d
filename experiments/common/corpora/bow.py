"""Bag-of-words files. Empty documents are kept, since dropping them would change perplexities."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scipy import sparse

from experiments.common.corpora.corpus import Corpus, CorpusError, make_corpus
from experiments.common.corpora.files import find_file, reading


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
