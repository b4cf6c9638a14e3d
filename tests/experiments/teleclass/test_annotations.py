"""Labels that somebody gave: the forms of the file, and what is refused."""

from __future__ import annotations

import gzip
import json

import pytest

from experiments.common.corpora.corpus import CorpusError
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


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as JSON"),
        (b'{"x": "a"', "cannot be read as JSON"),
        (b"\xff", "cannot be read as JSON"),
        (b'[["x", "a"]]', "not a list"),
        (
            b'{"x": ["a", "bb"]}',
            r"document 'x': there is no class 'bb'; the nearest of the 3 class ids is 'b'",
        ),
        (b'{"x": {"classes": ["a"]}}', "document 'x': has none of core_classes, core classes"),
        (b'{"x": "a", "y": "b", "x": "b"}', r"json: 'x' is given 2 times; keep one"),
        (b'{"x": {"labels": "a", "labels": "b"}}', "'labels' is given 2 times"),
        (b'{"x": null}', "None is not a list of class ids"),
        (b'{"x": [true]}', "is not a list of class ids"),
        (b'{"x": [["a"]]}', "is not a list of class ids"),
        (b'{"x": 7.0}', "is not a list of class ids"),
    ],
)
def test_refusals(tmp_path, content, message):
    path = tmp_path / "labels.json"
    path.write_bytes(content)
    with pytest.raises(CorpusError, match=message) as caught:
        read_annotations(path, TAXONOMY)
    assert "labels.json" in str(caught.value)
    with pytest.raises(CorpusError, match=r"none\.json: there is no such file"):
        read_annotations(tmp_path / "none.json", TAXONOMY)
