"""Built-in corpus: docstrings of the standard library, classified by package and module."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from experiments.common.corpora.docstrings import DocstringRecord, docstring_records
from experiments.common.corpora.text import WORD_PATTERN
from experiments.teleclass.data.documents import Documents, check_size
from experiments.teleclass.data.line_files import Row
from experiments.teleclass.data.taxonomy import Taxonomy, make_taxonomy

#: a smaller module counts as part of its package, or is left out if it has none
MIN_DOCUMENTS = 12
#: fraction of test documents
TEST_SHARE = 0.3
#: most keywords per class
MAX_KEYWORDS = 80
#: words of every module's docstring, which are not keywords
GENERIC = frozenset({"module", "package", "python"})


def builtin_documents(
    max_documents: int | None = None,
) -> tuple[Taxonomy, Documents, Documents]:
    """Return taxonomy, training and test documents from Python's standard library.

    Documents are the docstrings of classes, functions and methods, without repeated texts or
    names. Classes are the modules and packages with at least 12 documents in and below them; a
    document has its deepest class and all ancestors. Keywords are the first words of a module's
    own docstring. A hash of its name decides whether a document is a test document. The same
    Python gives the same corpus.

    Args:
        max_documents: size of a sample of each (:meth:`Documents.sample`), with the same taxonomy.

    Raises:
        CorpusError: ``max_documents`` is below 1, or this Python has no sources of its library.

    """
    check_size(max_documents)
    records, described, dropped = _records()
    sizes = Counter(prefix for record in records for prefix in _prefixes(record.module))
    ids = sorted(prefix for prefix, size in sizes.items() if size >= MIN_DOCUMENTS)
    taxonomy = _taxonomy(ids, described)
    position = {id_: c for c, id_ in enumerate(ids)}
    # sizes grow upward: the classes of a document are its first prefixes
    around = [[position[p] for p in _prefixes(r.module) if p in position] for r in records]
    rows = [row for row, classes in enumerate(around) if classes]
    dropped["documents of small modules"] = len(records) - len(rows)
    deepest = np.array([around[row][-1] for row in rows])
    kept = [records[row] for row in rows]
    names = [_name(record) for record in kept]
    ones = np.ones(len(rows), dtype=np.bool_)
    gold = sparse.csr_matrix((ones, (np.arange(len(rows)), deepest)), shape=(len(rows), len(ids)))
    whole = Documents(
        ids=pa.array(names, pa.large_string()),
        texts=pa.array([record.text for record in kept], pa.large_string()),
        gold=taxonomy.closure(gold),
        dropped={reason: n for reason, n in dropped.items() if n},
    )
    test = _is_test(names)
    train, held_out = (whole.take(np.flatnonzero(chosen)) for chosen in (~test, test))
    return taxonomy, train.sample(max_documents), held_out.sample(max_documents)


def _records() -> tuple[list[DocstringRecord], dict[str, str], Counter[str]]:
    """Return the documents, the docstrings of modules, and counts of dropped documents."""
    found: dict[str, DocstringRecord] = {}
    texts: set[str] = set()
    described: dict[str, str] = {}
    dropped: Counter[str] = Counter()
    for record in docstring_records():
        if record.kind == "module":
            described[record.module] = record.text
        elif record.text in texts:
            dropped["repeated texts"] += 1
        elif _name(record) in found:
            dropped["repeated names"] += 1
        else:
            texts.add(record.text)
            found[_name(record)] = record
    return list(found.values()), described, dropped


def _taxonomy(ids: Sequence[str], described: Mapping[str, str]) -> Taxonomy:
    """Return the classes with their keywords; a parent is the part before the last dot."""
    source = "built-in corpus"
    names = [" ".join(re.split(r"[._]+", id_.strip("._"))) for id_ in ids]
    parents = [(id_.rpartition(".")[0], id_) for id_ in ids]
    return make_taxonomy(
        [Row(source, id_, name) for id_, name in zip(ids, names, strict=True)],
        [Row(source, parent, id_) for parent, id_ in parents if parent],
        [_content_words(described.get(id_, "")) for id_ in ids],
        source=source,
    )


def _content_words(text: str) -> list[str]:
    """Return the distinct content words of a text, in order."""
    words = dict.fromkeys(re.findall(WORD_PATTERN, text.lower()))
    return [word for word in words if word not in ENGLISH_STOP_WORDS | GENERIC][:MAX_KEYWORDS]


def _prefixes(module: str) -> list[str]:
    """Return the packages around a module and itself: ``xml``, ``xml.dom`` for ``xml.dom``."""
    parts = module.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]


def _name(record: DocstringRecord) -> str:
    return f"{record.module}:{record.qualname}"


def _is_test(names: Sequence[str]) -> NDArray[np.bool_]:
    """Whether each document is a test document, by a hash other than that of samples."""
    digests = b"".join(hashlib.sha256(f"test {name}".encode()).digest()[:8] for name in names)
    return np.frombuffer(digests, dtype=">u8") < TEST_SHARE * 2.0**64
