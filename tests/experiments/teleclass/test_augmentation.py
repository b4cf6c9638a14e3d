"""Written documents: who writes how many, for whom."""

from __future__ import annotations

import json
import sys
import types
from collections import Counter

import numpy as np
import pytest

from experiments.teleclass.artifacts import generated_documents
from experiments.teleclass.augment import documents_per_class, run_augment
from experiments.teleclass.generators import Assignment, from_keywords, load_generator
from experiments.teleclass.settings import AugmentSettings, TeleclassDataSettings
from raypipe.errors import ConfigError, UnitError
from tests.experiments.teleclass.conftest import labeled_corpus, taxonomy_of, with_sections

#: 0 over 1 and 2, 2 over 3; 4 alone
TERMS = [(), ("key_word",), (), ("deep", "deeper"), ()]
TAXONOMY = taxonomy_of("01234", ["01", "02", "23"], TERMS)
DIRECT = np.array([[0, 1, 0, 0, 0]] * 3 + [[0, 0, 0, 1, 0]] * 2 + [[0] * 5], bool)


@pytest.fixture
def corpus(context):
    """Six documents, of which three have class 1 and two class 3."""
    texts = [f"text {i}" for i in range(6)]
    confidence = np.array([0.1, 0.3, 0.2, 0.5, 0.4, 0], np.float32)
    return labeled_corpus(context, TAXONOMY, texts, DIRECT, confidence)


@pytest.fixture
def generator(monkeypatch):
    """Registers functions as ``made:<name>``; what the first was asked is kept."""
    module = types.ModuleType("made")
    asked: list[Assignment] = []

    def remember(assignment):
        asked.append(assignment)
        return [f"for {assignment.name} {i}" for i in range(assignment.documents + 2)]

    module.remember = remember
    module.text = lambda assignment: "a text"
    module.numbers = lambda assignment: [1]
    module.blank = lambda assignment: ["", " ", f"only {assignment.name}"]
    module.constant = 3
    monkeypatch.setitem(sys.modules, "made", module)
    return asked


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


def test_starved_are_classes_with_few_documents_ancestors_counted(context, corpus, generator):
    assert run(context, corpus, generator="made:remember") == {2: 2, 3: 2, 4: 2}
    asked = {assignment.name: assignment for assignment in generator}
    deep = asked["name 3"]
    assert deep.path == ("name 0", "name 2", "name 3")
    assert (deep.keywords, deep.siblings, deep.documents) == (("deep", "deeper"), (), 2)
    assert deep.examples == asked["name 2"].examples == ("text 3", "text 4")
    assert (asked["name 2"].siblings, asked["name 4"].path) == (("name 1",), ("name 4",))
    assert len({assignment.seed for assignment in generator}) == 3
    texts, classes = generated_documents(context)
    assert texts.to_pylist() == [f"for name {c} {i}" for c in (2, 3, 4) for i in range(2)]
    assert classes == [2, 2, 3, 3, 4, 4]
    sizes = {row["class"]: row["documents"] for row in context.ledger.rows("classes")}
    assert sizes == {"0": 5, "1": 3, "2": 2, "3": 2, "4": 0}
    run(context, corpus, generator="made:remember")
    assert len(generator) == 3  # nothing is asked twice


@pytest.mark.parametrize(
    ("share", "starved", "number"),
    [(0.2, 10, 2), (0.2, 4, 5), (0.2, 85, 1), (0.01, 85, 1), (None, 85, 5), (0.2, 0, 5)],
)
def test_generated_documents_cannot_swamp_the_labeled_ones(share, starved, number):
    settings = AugmentSettings(documents=5, max_share=share)
    assert documents_per_class(settings, starved, labeled=100) == number


def test_the_share_of_generated_documents_holds_for_a_run(context, corpus):
    assert run(context, corpus, max_share=0.2) == {2: 1, 3: 1, 4: 1}


@pytest.mark.parametrize("name", ["text", "numbers"])
def test_a_generator_that_returns_something_else_fails(context, corpus, generator, name):
    with pytest.raises(UnitError, match=f"made:{name} must return a list of texts"):
        run(context, corpus, generator=f"made:{name}")


def test_blank_texts_are_left_out(context, corpus, generator):
    assert run(context, corpus, generator="made:blank") == {2: 1, 3: 1, 4: 1}


@pytest.mark.parametrize(
    "name", ["made", "made:", ":f", "made:none", "no.such.module:f", "made:constant", ""]
)
def test_what_is_no_generator_is_refused(generator, name):
    with pytest.raises(ConfigError, match=r"augment\.generator = "):
        load_generator(name)


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
