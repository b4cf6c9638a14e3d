"""Documents and their reference summaries: of the standard library, or from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from raypipe.datasets.corpus import CorpusError
from raypipe.datasets.docstrings import docstring_records
from raypipe.datasets.files import check_known
from raypipe.datasets.rows import checksum, held_out, read_rows, text_hashes
from raypipe.pipeline.identity import fingerprint

if TYPE_CHECKING:  # a task that encodes needs no torch, which the settings of the model import
    from experiments.summarization.settings import DataSettings

SHARE_KEY = "data.held_out_share"


@dataclass(frozen=True)
class Pairs:
    """Documents, and of each its summaries: one, or several references."""

    documents: Sequence[str]
    summaries: Sequence[Sequence[str]]

    def __len__(self) -> int:
        return len(self.documents)

    def where(self, mask: NDArray[np.bool_]) -> Pairs:
        """Those of the mask."""
        kept = np.flatnonzero(mask).tolist()
        return Pairs([self.documents[i] for i in kept], [self.summaries[i] for i in kept])


@dataclass(frozen=True)
class Data:
    """What is trained on and what is held out; no document is in both."""

    train: Pairs
    held_out: Pairs
    identity: Mapping[str, Any]
    notes: tuple[str, ...] = ()


def load(settings: DataSettings) -> Data:
    """The pairs of the settings.

    Raises:
        CorpusError: a file that is missing or damaged, a column that is missing or holds no text,
            a document or summary that is empty, or nothing left on one side.

    """
    if settings.source == "builtin":
        pairs = _docstrings(settings.min_words)
        content = {"content": fingerprint([pairs.documents, pairs.summaries])}
        return _divided(pairs, settings.held_out_share, "the standard library", content)
    keys = ("files", "held_out_files") if settings.held_out_files else ("files",)
    identity: dict[str, Any] = {  # before the files are read: that one is missing is said best here
        key: [checksum(path, f"data.{key}") for path in getattr(settings, key)] for key in keys
    }
    train = _read(settings.files, settings)
    if not settings.held_out_files:
        names = ", ".join(str(path) for path in settings.files)
        return _divided(train, settings.held_out_share, names, identity)
    further = _read(settings.held_out_files, settings)
    seen = set(further.documents)
    leaked = np.array([document in seen for document in train.documents])
    if leaked.all():
        raise CorpusError("data.files: every document is in data.held_out_files, too")
    notes = [f"{leaked.sum()} documents left out that are held out, too"] if leaked.any() else []
    return Data(train.where(~leaked), further, identity, tuple(notes))


def _divided(pairs: Pairs, share: float, source: str, identity: Mapping[str, Any]) -> Data:
    """A share held out, drawn by a hash of the document: equal ones are on the same side."""
    mask = held_out(text_hashes(list(pairs.documents)), share, source, SHARE_KEY)
    return Data(pairs.where(~mask), pairs.where(mask), identity)


def _docstrings(min_words: int) -> Pairs:
    """Bodies of docstrings and their first lines, each body once.

    A first line is a summary where an empty line follows it (PEP 257, multi-line docstrings);
    otherwise it is the beginning of a sentence.
    """
    found: dict[str, str] = {}
    for record in docstring_records():
        _, _, rest = record.text.partition("\n")
        gap, _, _ = rest.partition("\n")
        body, summary = rest.strip(), record.summary.strip()
        if summary and not gap.strip() and len(body.split()) >= min_words:
            found.setdefault(body, summary)
    if not found:
        raise CorpusError(f"data.min_words = {min_words}: no docstring's body has so many words")
    return Pairs([*found], [(summary,) for summary in found.values()])


def _read(paths: Sequence[Path], settings: DataSettings) -> Pairs:
    """The rows of files, one after the other.

    A list of documents is joined by spaces, a list of summaries is several references; empty
    parts of either are left out.
    """
    documents: list[str] = []
    summaries: list[list[str]] = []
    for path in paths:
        rows = read_rows(path)
        documents += map(" ".join, _texts(rows, settings.document, "data.document", path))
        summaries += _texts(rows, settings.summary, "data.summary", path)
    return Pairs(documents, summaries)


def _texts(rows: pa.Table, names: Sequence[str], key: str, path: Path) -> list[list[str]]:
    """The texts of each row, from the first of the columns that the file has."""
    name = next((name for name in names if name in rows.column_names), names[0])
    check_known("column", name, rows.column_names, f"{path} ({key})")
    column = rows[name].combine_chunks()
    several = pa.types.is_list(column.type) or pa.types.is_large_list(column.type)
    kind = column.type.value_type if several else column.type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise CorpusError(f"{path}: column {name!r} is {column.type}; {key} must name one of texts")
    values = column.to_pylist() if several else [[text] for text in column.to_pylist()]
    texts = [[part.strip() for part in row or () if part and part.strip()] for row in values]
    if [] in texts:
        raise CorpusError(
            f"{path}: {name!r} in row {texts.index([])}, counted from 0, is empty; leave the row "
            "out"
        )
    return texts


def count_words(texts: Sequence[str]) -> float:
    """Words of a text on average."""
    counts = pc.list_value_length(pc.utf8_split_whitespace(pa.array(texts, pa.large_string())))
    return float(pc.mean(counts).as_py())
