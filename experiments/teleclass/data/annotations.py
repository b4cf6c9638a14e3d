"""Annotations: JSON files with class ids per document, for example from a language model."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.common.corpora.corpus import CorpusError
from experiments.common.corpora.files import open_text, reading
from experiments.teleclass.data.taxonomy import Taxonomy, unknown_class

_KEYS = ("core_classes", "core classes", "labels")


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
