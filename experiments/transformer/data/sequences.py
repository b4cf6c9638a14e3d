"""Sequences: labeled texts from a file or the standard library, or token ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.docstrings import docstring_records
from experiments.common.corpora.rows import (
    check_column,
    checksum,
    held_out,
    is_npz,
    read_arrays,
    read_rows,
    text_hashes,
)
from experiments.transformer.data.splits import (
    Kind,
    Rows,
    Splits,
    is_text,
    make_target,
    with_validation,
)
from experiments.transformer.settings import TransformerDataSettings
from raypipe.graph.identity import fingerprint

_TARGET = "target"


def load_builtin(settings: TransformerDataSettings, kind: Kind | None) -> Splits:
    """Return docstrings of Python's standard library, each text once; the class is the package.

    A hash of its name decides whether a docstring is held out.

    Raises:
        CorpusError: every package has fewer documents than ``data.min_documents``, or this Python
            has no sources of its library.

    """
    texts: dict[str, tuple[str, str]] = {}
    for record in docstring_records():
        if record.text.strip():
            name = f"{record.module}:{record.qualname}"
            texts.setdefault(record.text, (name, record.package))
    sizes = Counter(package for _, package in texts.values())
    kept = [
        (name, package, text)
        for text, (name, package) in texts.items()
        if sizes[package] >= settings.min_documents
    ]
    if not kept:
        raise CorpusError(
            f"data.min_documents = {settings.min_documents}: the largest package has "
            f"{max(sizes.values(), default=0)}"
        )
    names, packages, documents = (list(column) for column in zip(*kept, strict=True))
    rows = pa.table({"text": pa.array(documents, pa.large_string()), _TARGET: packages})
    identity = {"content": fingerprint([documents, packages])}
    source = "the standard library"
    hashes = text_hashes(names)
    mask = held_out(hashes, settings.test_share, source, "data.test_share")
    parts, notes = _divided(rows, mask), list[str]()
    given = with_validation(parts[0], None, hashes[~mask], settings, notes)
    return _data(given, parts[1], identity, settings, kind, f"{source}: the package", notes)


def load_sequences(settings: TransformerDataSettings, kind: Kind | None) -> Splits:
    """Return the texts or token ids of a file, split by a hash or with rows of other files.

    Raises:
        CorpusError: a file is corrupt, a column is missing, a text or label is empty, or as
            :func:`~experiments.transformer.data.splits.make_target`.

    """
    path = Path(settings.file or "")
    identity = {"file": checksum(path, "data.file")}
    notes: list[str] = []
    rows = _read(path, settings, notes)
    others: dict[str, pa.Table] = {}
    for key in ("test_file", "validation_file"):
        if (other := getattr(settings, key)) is not None:
            identity[key] = checksum(other, f"data.{key}")
            others[key] = _read(other, settings, notes)
            if others[key].column_names != rows.column_names:
                raise CorpusError(
                    f"{other}: has {others[key].column_names}, but {path} {rows.column_names}"
                )
    inputs = rows.column(0).to_pylist()
    texts = inputs if is_text(rows.column(0).type) else [str(ids) for ids in inputs]
    hashes, test = text_hashes(texts), others.get("test_file")
    if test is None:
        mask = held_out(hashes, settings.test_share, str(path), "data.test_share")
        (rows, test), hashes = _divided(rows, mask), hashes[~mask]
    given = with_validation(rows, others.get("validation_file"), hashes, settings, notes)
    source = f"{path}: {settings.label!r}" if "text" in rows.column_names else f"{path}: target"
    return _data(given, test, identity, settings, kind, source, notes)


def _data(
    given: tuple[pa.Table, NDArray[np.bool_]],
    test: pa.Table,
    identity: Mapping[str, Any],
    settings: TransformerDataSettings,
    kind: Kind | None,
    source: str,
    notes: list[str],
) -> Splits:
    train, validation = given
    parts = train, test
    target, *targets = make_target(train[_TARGET], test[_TARGET], kind, None, source)
    splits = [
        Rows(part.drop_columns([_TARGET]), values)
        for part, values in zip(parts, targets, strict=True)
    ]
    vocabulary = settings.vocabulary
    if "tokens" in train.column_names:
        vocabulary = 1 + max(int(pc.max(pc.list_flatten(part["tokens"])).as_py()) for part in parts)
    return Splits(
        *(splits[0], splits[1], target, validation, identity),
        vocabulary=vocabulary,
        notes=tuple(notes),
    )


def _divided(rows: pa.Table, mask: NDArray[np.bool_]) -> tuple[pa.Table, pa.Table]:
    """Return the training and the held-out rows."""
    return rows.filter(pa.array(~mask)), rows.filter(pa.array(mask))


def _read(path: Path, settings: TransformerDataSettings, notes: list[str]) -> pa.Table:
    """Return ``text`` or ``tokens``, and ``target``; leave out and count rows without a label."""
    if is_npz(path):
        return _token_rows(path)
    rows = read_rows(path)
    for name in (*settings.text, settings.label):
        check_column(rows, name, path)
    for name in settings.text:
        if not is_text(rows[name].type):
            raise CorpusError(f"{path}: column {name!r} is {rows[name].type}; name one of text")
    # a missing title or body is left out; a row without any text is refused below
    texts, *more = (pc.fill_null(rows[name].cast(pa.large_string()), "") for name in settings.text)
    for column in more:
        joined = pc.binary_join_element_wise(texts, column, pa.scalar("\n", pa.large_string()))
        texts = pc.utf8_trim(joined, "\n")
    labels = rows[settings.label]
    if pa.types.is_nested(labels.type):
        texts, labels = _picked(texts, labels, path, settings, notes)
    empty = pc.fill_null(pc.equal(pc.utf8_trim_whitespace(texts), ""), True)
    if (row := pc.index(empty, True).as_py()) >= 0:
        raise CorpusError(f"{path}: the text in row {row}, counted from 0, is empty; leave it out")
    return pa.table({"text": texts, _TARGET: labels})


def _picked(
    texts: pa.ChunkedArray,
    labels: pa.ChunkedArray,
    path: Path,
    settings: TransformerDataSettings,
    notes: list[str],
) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return the rows with labels, and the element ``data.label_index`` of each."""
    index, lists = settings.label_index, labels.to_pylist()
    needed = index + 1 if index >= 0 else -index
    for row, label in enumerate(lists):
        if label is None or not isinstance(label, list) or 0 < len(label) < needed:
            raise CorpusError(
                f"{path}: the label in row {row}, counted from 0, is {label!r}, which has no "
                f"element data.label_index = {index}"
            )
    labeled = pa.array([bool(label) for label in lists])
    if number := labeled.false_count:
        notes.append(f"{path.name}: {number} rows without a label left out")
    chosen = pa.chunked_array([pa.array([label[index] for label in lists if label])])
    return texts.filter(labeled), chosen


def _token_rows(path: Path) -> pa.Table:
    """Return the arrays ``tokens``, int ``[n, L]`` padded by 0 at the end, and ``target``."""
    arrays = read_arrays(path)
    if not {"tokens", _TARGET} <= arrays.keys():
        raise CorpusError(f"{path}: needs the arrays tokens and target; it has {[*arrays]}")
    tokens, target = arrays["tokens"], arrays[_TARGET]
    if tokens.ndim != 2 or tokens.dtype.kind not in "iu" or target.ndim != 1:
        raise CorpusError(
            f"{path}: tokens is {tokens.dtype} {tokens.shape}, target {target.shape}; expected "
            "whole numbers [rows, length] and one target a row"
        )
    if tokens.min() < 0 or tokens.max() >= 2**31:
        raise CorpusError(f"{path}: token ids go from {tokens.min()} to {tokens.max()}; from 0 up")
    real = tokens != 0
    lengths = real.sum(1)
    if (lengths == 0).any():
        raise CorpusError(f"{path}: row {int((lengths == 0).argmax())} has only padding")
    gaps = (np.diff(real.astype(np.int8), axis=1) > 0).any(1)
    if gaps.any():
        raise CorpusError(f"{path}: row {int(gaps.argmax())} has padding (0) before a token")
    offsets = pa.array(np.concatenate(([0], lengths.cumsum())).astype(np.int64))
    ids = pa.LargeListArray.from_arrays(offsets, pa.array(tokens[real].astype(np.int32)))
    return pa.table({"tokens": ids, _TARGET: pa.array(target)})
