"""Class structures for the benchmark of TELEClass: two corpora, and draws from them, as files.

The draws change what a method may rely on: sizes of classes, classes without documents, the number
of documents, and the depth of the taxonomy. Every draw is by hashes of ids, so that it is the same
on every machine (with the same Python, whose docstrings are the built-in corpus).
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from experiments.teleclass.corpus import LabeledCorpus, load
from experiments.teleclass.documents import Documents
from experiments.teleclass.settings import TeleclassDataSettings
from experiments.teleclass.taxonomy import Row, Taxonomy, make_taxonomy

#: a class keeps the share 1 / rank ** ZIPF of its documents
ZIPF = 1.0
#: documents of a small corpus
SMALL = 1000
#: one of this many classes keeps its documents, the others are empty
KEPT = 4

_DOTTED = {
    "comp.graphics": "computer graphics",
    "comp.os.ms-windows.misc": "microsoft windows",
    "comp.windows.x": "x window system",
    "comp.sys.ibm.pc.hardware": "ibm pc hardware",
    "comp.sys.mac.hardware": "mac hardware",
    "rec.autos": "autos",
    "rec.motorcycles": "motorcycles",
    "rec.sport.baseball": "baseball",
    "rec.sport.hockey": "hockey",
    "sci.crypt": "cryptography",
    "sci.electronics": "electronics",
    "sci.med": "medicine",
    "sci.space": "space",
    "talk.politics.guns": "guns",
    "talk.politics.mideast": "middle east",
    "talk.politics.misc": "general politics",
    "alt.atheism": "atheism",
    "soc.religion.christian": "christianity",
    "talk.religion.misc": "general religion",
    "misc.forsale": "for sale",
}
_UPPER = {
    "comp": "computers",
    "comp.os": "operating systems",
    "comp.os.ms-windows": "microsoft windows operating system",
    "comp.windows": "window systems",
    "comp.sys": "computer systems",
    "comp.sys.ibm": "ibm computers",
    "comp.sys.ibm.pc": "ibm personal computers",
    "comp.sys.mac": "macintosh computers",
    "rec": "recreation",
    "rec.sport": "sports",
    "sci": "science",
    "talk": "debates",
    "talk.politics": "politics",
    "talk.religion": "religious debates",
    "alt": "alternative topics",
    "soc": "society",
    "soc.religion": "religion",
    "misc": "miscellaneous",
}

Rows = NDArray[np.int64]


def newsgroups(folder: Path) -> LabeledCorpus:
    """Return 20 Newsgroups with 28 classes from a folder with its files."""
    given = {"source": "files", "dir": folder, "text": ("subject", "text")}
    return load(TeleclassDataSettings.model_validate(given))


def structures(folder: Path) -> dict[str, Callable[[], LabeledCorpus]]:
    """Return the corpora by name; ``folder`` holds 20 Newsgroups."""

    def posts() -> LabeledCorpus:
        return newsgroups(folder)

    def docstrings() -> LabeledCorpus:
        return load(TeleclassDataSettings())

    drawn: dict[str, Callable[[], LabeledCorpus]] = {}
    for name, corpus in (("newsgroups", posts), ("builtin", docstrings)):
        drawn[name] = corpus
        for kind, draw in (("imbalanced", imbalanced), ("empty", mostly_empty), ("small", small)):
            drawn[f"{name}_{kind}"] = partial(_drawn, draw, corpus)
    drawn["newsgroups_deep"] = lambda: deep(posts(), folder / "leaf_newsgroups.txt")
    return drawn


def _drawn(
    draw: Callable[[LabeledCorpus], LabeledCorpus], corpus: Callable[[], LabeledCorpus]
) -> LabeledCorpus:
    return draw(corpus())


def imbalanced(corpus: LabeledCorpus) -> LabeledCorpus:
    """Return a corpus in which a few classes, the largest ones, have most of the documents."""
    count = np.bincount(_deepest(corpus.train, corpus.taxonomy), minlength=len(corpus.taxonomy))
    share = np.empty(len(count))
    share[np.argsort(-count, kind="stable")] = 1 / np.arange(1, len(count) + 1) ** ZIPF
    return _filtered(corpus, lambda own, ids: _draws(ids) < share[own])


def mostly_empty(corpus: LabeledCorpus) -> LabeledCorpus:
    """Return a corpus in which only every fourth of the deepest classes has documents."""
    classes = sorted(range(len(corpus.taxonomy)), key=lambda c: _draw(corpus.taxonomy.ids[c]))
    deepest = _deepest(corpus.train, corpus.taxonomy)
    kept = [c for c in classes if (deepest == c).any()][::KEPT]
    return _filtered(corpus, lambda own, _: np.isin(own, kept))


def small(corpus: LabeledCorpus) -> LabeledCorpus:
    """Return a corpus of 1,000 training documents, with all test documents."""
    return LabeledCorpus(corpus.taxonomy, corpus.train.sample(SMALL), corpus.test)


def deep(corpus: LabeledCorpus, groups: Path) -> LabeledCorpus:
    """Return 20 Newsgroups with a class per prefix of the dotted names, five levels deep.

    ``groups`` is the file of leaf ids and names of newsgroups.
    """
    leaves = dict(line.split("\t") for line in groups.read_text().splitlines())
    names = _UPPER | _DOTTED
    edges = [(name.rpartition(".")[0], name) for name in names if "." in name]
    taxonomy = make_taxonomy(
        [Row("newsgroups", id_, name) for id_, name in names.items()],
        [Row("newsgroups", parent, child) for parent, child in edges],
        source="newsgroups",
    )
    place = {id_: c for c, id_ in enumerate(taxonomy.ids)}
    moved = np.zeros((len(corpus.taxonomy), len(taxonomy)), bool)
    for c, id_ in enumerate(corpus.taxonomy.ids):
        if id_ in leaves:
            moved[c, place[leaves[id_]]] = True
    moves = sparse.csr_matrix(moved)

    def relabeled(documents: Documents) -> Documents:
        gold = taxonomy.closure(sparse.csr_matrix(documents.gold @ moves))
        return Documents(documents.ids, documents.texts, gold, documents.dropped)

    assert corpus.test is not None
    return LabeledCorpus(taxonomy, relabeled(corpus.train), relabeled(corpus.test))


def write(corpus: LabeledCorpus, folder: Path) -> None:
    """Write a corpus as the files that ``data.source: files`` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    taxonomy = corpus.taxonomy
    ids = taxonomy.ids
    _lines(folder / "labels.txt", map("\t".join, zip(ids, taxonomy.names, strict=True)))
    _lines(folder / "label_hierarchy.txt", (f"{ids[a]}\t{ids[b]}" for a, b in taxonomy.edges))
    terms = zip(taxonomy.names, taxonomy.keywords, strict=True)
    _lines(folder / "keywords.txt", (f"{name}:{','.join(own)}" for name, own in terms if own))
    for name in ("train", "test"):
        _lines(folder / f"{name}.jsonl", _records(corpus.documents(name), ids))


def _records(documents: Documents, ids: Sequence[str]) -> Iterator[str]:
    assert documents.gold is not None
    for row in range(len(documents)):
        labels = [ids[c] for c in documents.gold[row].indices]
        about = {"id": documents.ids[row].as_py(), "text": documents.texts[row].as_py()}
        yield json.dumps({**about, "labels": labels})


def _lines(path: Path, lines: Iterator[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines))


def _filtered(
    corpus: LabeledCorpus, keep: Callable[[Rows, list[str]], NDArray[np.bool_]]
) -> LabeledCorpus:
    def part(documents: Documents) -> Documents:
        own = _deepest(documents, corpus.taxonomy)
        return documents.take(np.flatnonzero(keep(own, documents.ids.to_pylist())))

    assert corpus.test is not None
    return LabeledCorpus(corpus.taxonomy, part(corpus.train), part(corpus.test))


def _deepest(documents: Documents, taxonomy: Taxonomy) -> Rows:
    """Return the deepest gold class of each document ``[N]``, the first of several."""
    assert documents.gold is not None
    depths = documents.gold.multiply(taxonomy.depth[None]).tocsr()
    return np.asarray(depths.argmax(axis=1)).ravel()


def _draw(text: str) -> float:
    return int(hashlib.sha256(f"draw {text}".encode()).hexdigest()[:12], 16) / 16.0**12


def _draws(texts: Sequence[str]) -> NDArray[np.float64]:
    return np.array([_draw(text) for text in texts])


def sizes(corpus: LabeledCorpus) -> dict[str, int]:
    """Return the numbers of a corpus: classes, levels, documents, and classes with documents."""
    own = Counter(_deepest(corpus.train, corpus.taxonomy).tolist())
    return {
        "classes": len(corpus.taxonomy),
        "levels": int(corpus.taxonomy.depth.max()),
        "train": len(corpus.train),
        "test": len(corpus.documents("test")),
        "occurring": int((np.asarray(corpus.train.gold.sum(0)) > 0).sum()),  # type: ignore[union-attr]
        "largest": max(own.values()),
    }
