"""Files that no workload can read: messages say where and what to do (table: ``files.yaml``)."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import docstring_records
from experiments.common.corpora.load import load_corpus
from experiments.lm_pretrain.data import read_texts, text_content
from experiments.lm_pretrain.settings import LmDataSettings
from experiments.teleclass.corpus import read_annotations
from experiments.teleclass.documents import read_documents
from experiments.teleclass.taxonomy import read_taxonomy
from tests.experiments.rows import write_rows
from tests.experiments.summarization.test_data import of_files
from tests.experiments.teleclass.conftest import taxonomy_of
from tests.experiments.transformer.test_data import table
from tests.experiments.transformer.test_data import texts as sequences
from tests.scenario import cases

TABLE = cases(__file__, "files")
CLASSES, ABC = taxonomy_of(("0", "10", "11", "12")), taxonomy_of("ab7")
DEEP, CUT = "[" * 100_000, gzip.compress(b"a\t0\n" * 99)[:-9].decode("latin-1")
OTHERS = [
    ("documents", "a.jsonl", DEEP, r"cannot be read as JSONL.*RecursionError"),
    ("corpus", "m.jsonl", DEEP, "m.jsonl"),
    ("gold", "cut.gz", CUT, r"cut.gz: cannot be read.*copy it again"),
]


def write(path: Path, content: Any) -> Path:
    if isinstance(content, str):
        path.write_bytes(content.encode("latin-1"))
    elif content is not None:
        write_rows(path, content)
    return path


def texts(path: Path) -> None:
    settings = LmDataSettings(source="text", files=(path,))
    text_content(settings)
    read_texts(settings)


def corpus(path: Path, **options: Any) -> None:
    source = "text" if path.suffix == ".txt" else path.suffix[1:]
    load_corpus(source, path.stem, path.parent, **{"min_df": 1, "max_df": 1.0, **options})


def gold(path: Path) -> None:
    read_documents(write(path.with_name("a.txt"), "a\tsome text\n"), CLASSES, labels=path)


def validation(path: Path) -> None:
    rows = [{"text": f"red {i}", "label": "ab"[i % 2]} for i in range(60)]
    sequences(write_rows(path.with_name("train.jsonl"), rows), validation_file=path)


READERS: dict[str, Callable[..., object]] = {
    "documents": lambda path: read_documents(path, CLASSES, max_documents=1),
    "gold": gold,
    "annotations": lambda path: read_annotations(path, ABC),
    "corpus": corpus,
    "texts": texts,
    "sequences": lambda path, **given: sequences(path, **{"test_file": path} | given),
    "table": lambda path, **given: table(path, **{"test_file": path} | given),
    "pairs": of_files,
    "docstrings": lambda path: list(docstring_records(path.parent)),
    "validation": validation,
}
ROWS = [(reader, *row) for reader in READERS for row in TABLE[reader]] + OTHERS


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[3][:40]}")
def test_a_file_that_cannot_be_read(tmp_path, row):
    reader, name, content, message, *given = row
    path = write(tmp_path / name, content)
    with pytest.raises(CorpusError, match=message):
        READERS[reader](path, **(given[0] if given else {}))


@pytest.mark.parametrize(("contents", "message"), TABLE["taxonomy"])
def test_a_taxonomy_that_cannot_be_read(tmp_path, contents, message):
    names = ("labels.txt", "hierarchy.txt", "keywords.txt")
    files = [write(tmp_path / name, text) for name, text in zip(names, contents, strict=True)]
    with pytest.raises(CorpusError, match=message):
        read_taxonomy(*files)
