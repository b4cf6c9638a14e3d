"""Written documents: who writes how many, for whom."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest

from experiments.teleclass.artifacts import generated_documents
from experiments.teleclass.augment import run_augment
from experiments.teleclass.generators import Assignment, from_keywords
from experiments.teleclass.settings import AugmentSettings, TeleclassDataSettings
from raypipe.errors import UnitError
from tests.experiments.teleclass.conftest import labeled_corpus, taxonomy_of, with_sections

#: 0 over 1 and 2, 2 over 3; 4 alone
TERMS = [(), ("key_word",), (), ("deep", "deeper"), ()]
TAXONOMY = taxonomy_of("01234", ["01", "02", "23"], TERMS)
DIRECT = np.array([[0, 1, 0, 0, 0]] * 3 + [[0, 0, 0, 1, 0]] * 2 + [[0] * 5], bool)
#: what the generator ``remember`` was asked for
ASKED: list[Assignment] = []


def remember(assignment):
    ASKED.append(assignment)
    return ["", " ", *(f"for {assignment.name} {i}" for i in range(assignment.documents + 2))]


def numbers(assignment):
    return [1]


@pytest.fixture
def corpus(context):
    """Six documents, of which three have class 1 and two class 3."""
    texts = [f"text {i}" for i in range(6)]
    confidence = np.array([0.1, 0.3, 0.2, 0.5, 0.4, 0], np.float32)
    return labeled_corpus(context, TAXONOMY, texts, DIRECT, confidence)


def run(context, corpus, folder=None, **changed):
    data = TeleclassDataSettings(**{"source": "files", "dir": folder} if folder else {})
    augment = AugmentSettings(**{"starved_below": 3, "documents": 2, "max_share": None} | changed)
    run_augment(corpus, with_sections(context, data=data, augment=augment))
    return Counter(row["class_index"] for row in context.ledger.rows("generated"))


def test_texts_of_keywords_are_as_many_as_asked_and_decided_by_the_seed():
    def ask(documents=4, seed=1, examples=("some near words",)):
        path = ("the_root", "the_class")
        return from_keywords(
            Assignment("the class", path, ("one_key", "two"), (), examples, documents, seed)
        )

    assert [len(ask(n)) for n in (1, 3)] == [1, 3]
    assert ask() == ask() != ask(seed=2)
    for text in (*ask(), *ask(examples=())):
        assert {"root", "class", "one", "key", "two"} <= set(text.split())
        assert "_" not in text
    assert all("near" in text for text in ask())


def test_starved_are_classes_with_few_documents_ancestors_counted(context, corpus):
    """Of what a generator returns, blank texts and those beyond the number are left out."""
    ASKED.clear()
    assert run(context, corpus, generator=f"{__name__}:remember") == {2: 2, 3: 2, 4: 2}
    asked = {assignment.name: assignment for assignment in ASKED}
    deep = asked["name 3"]
    assert deep.path == ("name 0", "name 2", "name 3")
    assert (deep.keywords, deep.siblings, deep.documents) == (("deep", "deeper"), (), 2)
    assert deep.examples == asked["name 2"].examples == ("text 3", "text 4")
    assert (asked["name 2"].siblings, asked["name 4"].path) == (("name 1",), ("name 4",))
    assert len({assignment.seed for assignment in ASKED}) == 3
    texts, classes = generated_documents(context)
    assert texts.to_pylist() == [f"for name {c} {i}" for c in (2, 3, 4) for i in range(2)]
    assert classes == [2, 2, 3, 3, 4, 4]
    sizes = {row["class"]: row["documents"] for row in context.ledger.rows("classes")}
    assert sizes == {"0": 5, "1": 3, "2": 2, "3": 2, "4": 0}
    run(context, corpus, generator=f"{__name__}:remember")
    assert len(ASKED) == 3  # nothing is asked twice


@pytest.mark.parametrize(("share", "documents", "number"), [(0.2, 2, 1), (2, 9, 3), (2, 2, 2)])
def test_the_share_limits_generated_documents(context, corpus, share, documents, number):
    """They cannot swamp the five labeled ones."""
    assert run(context, corpus, max_share=share, starved_below=0) == {}
    written = run(context, corpus, max_share=share, documents=documents)
    assert written == {2: number, 3: number, 4: number}


@pytest.mark.parametrize("name", ["builtins:str", f"{__name__}:numbers"])
def test_a_generator_that_returns_something_else_fails(context, corpus, name):
    with pytest.raises(UnitError, match=f"{name} must return a list of texts"):
        run(context, corpus, generator=name)


def test_files_give_starved_classes_so_many_each(context, corpus, tmp_path):
    labels = {f"g{i}": {"core_classes": str(i % 5)} for i in range(25)} | {"lost": ["3"]}
    labels["g0"] = {"core_classes": ["3", "4", "1"]}
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    (tmp_path / "texts.txt").write_text("".join(f"g{i}\twritten {i}\n" for i in range(26)))
    written = run(
        context, corpus, tmp_path, source="files", texts="texts.txt", labels="labels.json"
    )
    assert written == {2: 2, 3: 2, 4: 2}
    texts, classes = generated_documents(context)
    assert sorted(zip(classes, texts.to_pylist(), strict=True)) == [
        (2, "written 2"), (2, "written 7"), (3, "written 0"), (3, "written 3"),
        (4, "written 0"), (4, "written 4"),
    ]  # fmt: skip
