"""Corpus: the taxonomy with its documents, from files or built in, and given annotations."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import DocstringRecord, docstring_records
from experiments.common.corpora.files import open_text, reading
from experiments.common.corpora.text import WORD_PATTERN
from experiments.teleclass.documents import Documents, read_documents
from experiments.teleclass.settings import TeleclassDataSettings
from experiments.teleclass.taxonomy import (
    Row,
    Taxonomy,
    make_taxonomy,
    read_taxonomy,
    unknown_class,
)

#: a smaller module counts as part of its package, or is left out if it has none
MIN_DOCUMENTS = 12
#: fraction of test documents
TEST_SHARE = 0.3
#: most keywords per class
MAX_KEYWORDS = 80
#: words of every module's docstring, which are not keywords
GENERIC = frozenset({"module", "package", "python"})
_FORMS = (".jsonl", ".jsonl.gz", ".parquet", ".csv", ".csv.gz", ".txt", ".txt.gz")
_KEYS = ("core_classes", "core classes", "labels")


@dataclass(frozen=True)
class LabeledCorpus:
    """A taxonomy, training documents, and documents to predict (None for the training ones)."""

    taxonomy: Taxonomy
    train: Documents
    test: Documents | None

    def documents(self, name: str) -> Documents:
        """Return the documents ``train`` or ``test``."""
        return self.test if name == "test" and self.test is not None else self.train

    @property
    def predicted(self) -> str:
        """The name of the documents that are predicted."""
        return "train" if self.test is None else "test"

    def identity(self) -> dict[str, str]:
        """Return the fingerprints of the content of the files, never their paths."""
        about = {"taxonomy": self.taxonomy.fingerprint, "train": self.train.fingerprint}
        return about if self.test is None else {**about, "test": self.test.fingerprint}


@lru_cache(maxsize=1)  # a sweep builds the stages of every trial
def load(settings: TeleclassDataSettings) -> LabeledCorpus:
    """Return the corpus of the settings.

    Raises:
        CorpusError: a file is missing or cannot be used.

    """
    if settings.dir is None:
        return LabeledCorpus(*builtin_documents(settings.max_documents))
    folder = settings.dir
    keywords = None if settings.keywords is None else folder / settings.keywords
    taxonomy = read_taxonomy(folder / settings.labels, folder / settings.hierarchy, keywords)

    def documents(path: Path, gold: str | None) -> Documents:
        return read_documents(
            path,
            taxonomy,
            columns=settings.text,
            id_column=settings.id,
            labels_column=settings.gold,
            labels=None if gold is None else folder / gold,
            max_documents=settings.max_documents,
        )

    train = _file(folder, "train", settings.train)
    if train is None:
        raise CorpusError(
            f"{folder}: there is no file train with one of {', '.join(_FORMS)}; "
            "name the documents in data.train"
        )
    test = _file(folder, "test", settings.test)
    return LabeledCorpus(
        taxonomy,
        documents(train, settings.train_labels),
        None if test is None else documents(test, settings.test_labels),
    )


def _file(folder: Path, name: str, given: str | None) -> Path | None:
    """Return the given file, or the one with the default name if it exists."""
    if given is not None:
        return folder / given
    return next((p for form in _FORMS if (p := folder / f"{name}{form}").is_file()), None)


def builtin_documents(max_documents: int | None = None) -> tuple[Taxonomy, Documents, Documents]:
    """Return taxonomy, training and test documents from Python's standard library.

    Documents are the docstrings of classes, functions and methods, without repeated texts or
    names. Classes are the modules and packages with at least 12 documents in and below them; a
    document has its deepest class and all ancestors. Keywords are the first words of a module's
    own docstring. A hash of its name decides whether a document is a test document. The same
    Python gives the same corpus.

    Args:
        max_documents: size of a sample of each (:meth:`Documents.sample`), with the same taxonomy.

    Raises:
        CorpusError: this Python has no sources of its library.

    """
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


def read_annotations(path: Path, taxonomy: Taxonomy) -> dict[str, list[int]]:
    """Return the class indices of each document in a file ``{document id: classes}``, or ``.gz``.

    The classes are an id, a list of ids, or an object with a key ``core_classes``,
    ``core classes`` or ``labels``.

    Raises:
        CorpusError: the file does not exist or has another format, a document appears twice, or
            the taxonomy lacks a class.

    """
    form = "JSON, an object {document id: class ids}"
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; expected {form}")
    with reading(path, form), open_text(path) as file:
        content = json.load(file, object_pairs_hook=lambda pairs: _once(pairs, path))
    if not isinstance(content, dict):
        raise CorpusError(f"{path}: expected {form}, not a {type(content).__name__}")
    index = {name: number for number, name in enumerate(taxonomy.ids)}
    annotations: dict[str, list[int]] = {}
    for document, value in content.items():
        classes = []
        for name in _class_ids(value, f"{path}, document {document!r}"):
            if name not in index:
                raise CorpusError(
                    f"{path}, document {document!r}: {unknown_class(name, taxonomy.ids)}"
                )
            classes.append(index[name])
        annotations[document] = list(dict.fromkeys(classes))
    return annotations


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """Return a JSON object; refuse repeated keys, of which the parser would keep the last."""
    content = dict(pairs)
    if len(content) < len(pairs):
        (name, times), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise CorpusError(f"{path}: {name!r} is given {times} times; keep one of them")
    return content


def _class_ids(value: Any, place: str) -> list[str]:
    if isinstance(value, dict):
        key = next((key for key in _KEYS if key in value), None)
        if key is None:
            raise CorpusError(f"{place}: has none of {', '.join(_KEYS)}; give its classes so")
        value = value[key]
    given = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int) for item in given):
        raise CorpusError(f"{place}: {value!r} is not a list of class ids; give texts or numbers")
    return [str(item) for item in given]
