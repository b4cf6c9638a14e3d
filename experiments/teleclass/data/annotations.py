"""Labels that somebody, mostly a language model, gave to documents: JSON files of class ids."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from experiments.teleclass.data.taxonomy import Taxonomy, unknown_class
from raypipe.datasets.corpus import CorpusError
from raypipe.datasets.files import open_text, reading

_KEYS = ("core_classes", "core classes", "labels")


def read_annotations(path: Path, taxonomy: Taxonomy) -> dict[str, list[int]]:
    """The class indices of each document of a file ``{document id: classes}``, plain or ``.gz``.

    Classes are an id, a list of ids, or an object that holds them as ``core_classes``,
    ``core classes`` or ``labels``.

    Raises:
        CorpusError: no such file, another form, a document that is given twice, or a class that
            the taxonomy lacks.

    """
    form = "JSON, an object {document id: class ids}"
    if not path.is_file():
        raise CorpusError(f"{path}: there is no such file; it is to be {form}")
    with reading(path, form), open_text(path) as file:
        content = json.load(file, object_pairs_hook=lambda pairs: _once(pairs, path))
    if not isinstance(content, dict):
        raise CorpusError(f"{path}: must be {form}, not a {type(content).__name__}")
    index = {name: number for number, name in enumerate(taxonomy.ids)}
    found: dict[str, list[int]] = {}
    for document, value in content.items():
        classes = []
        for name in _class_ids(value, f"{path}, document {document!r}"):
            if name not in index:
                raise CorpusError(
                    f"{path}, document {document!r}: {unknown_class(name, taxonomy.ids)}"
                )
            classes.append(index[name])
        found[document] = list(dict.fromkeys(classes))
    return found


def _once(pairs: list[tuple[str, Any]], path: Path) -> dict[str, Any]:
    """An object of JSON, of whose equal keys the parser would keep the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        (name, times), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise CorpusError(f"{path}: {name!r} is given {times} times; keep one of them")
    return found


def _class_ids(value: Any, place: str) -> list[str]:
    if isinstance(value, dict):
        key = next((key for key in _KEYS if key in value), None)
        if key is None:
            raise CorpusError(f"{place}: has none of {', '.join(_KEYS)}; give its classes so")
        value = value[key]
    given = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int) for item in given):
        raise CorpusError(f"{place}: {value!r} are no class ids; give a list of texts or numbers")
    return [str(item) for item in given]
