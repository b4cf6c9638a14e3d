"""Labels that somebody gave: the forms of the file, and what is refused."""

from __future__ import annotations

import gzip
import json

import pytest

from experiments.teleclass.corpus import read_annotations
from experiments.teleclass.taxonomy import Row, make_taxonomy

TAXONOMY = make_taxonomy([Row("", id_, id_) for id_ in ("a", "b", "7")], [], source="test")


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda classes: classes,
        lambda classes: {"core_classes": classes, "other": 1},
        lambda classes: {"core classes": classes},
        lambda classes: {"labels": classes},
    ],
)
def test_every_form(tmp_path, suffix, wrap):
    given = {"x": ["b", "a"], "y": "7", "z": 7, "none": [], "twice": ["a", "b", "a"]}
    content = json.dumps({name: wrap(classes) for name, classes in given.items()}).encode()
    path = tmp_path / f"labels{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    expected = {"x": [1, 0], "y": [2], "z": [2], "none": [], "twice": [0, 1]}
    assert read_annotations(path, TAXONOMY) == expected
