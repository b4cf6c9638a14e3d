"""A stage's context without Ray, and a corpus with pseudo-labels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from scipy import sparse

from experiments.teleclass.artifacts import label_lists, pseudo_labels_path
from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.documents import Documents
from raypipe.graph.context import Session, StageContext
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.graph.progress import Display
from raypipe.launch.inline import InlineLauncher
from raypipe.store.artifacts import write_parquet
from raypipe.store.ledger import Ledger
from raypipe.store.run_directory import RunDirectory
from raypipe.tracking import Trackers
from tests.experiments.teleclass.sections import taxonomy_of


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    """The context of a stage in this process."""
    run = RunDirectory.at(tmp_path / "run")
    trackers = Trackers((), run, "r", "teleclass", {})
    session = Session(run, "r", Ledger(run), InlineLauncher(), Display(), [], trackers)
    unit = Unit("stage", identity=Identity.of({}, {}))
    return StageContext(Stage("stage", lambda context: None, [unit]), session)


#: a corpus, and the text of each document to train on with its classes and their ancestors
Labeled = tuple[LabeledCorpus, list[tuple[str, set[int]]]]


@pytest.fixture
def labeled(context: StageContext) -> Callable[[int], Labeled]:
    """Ten documents, every third without labels, and so many written ones for class 2.

    Class 0 is over 1, 1 over 2, 3 over 2.
    """
    words = ["galaxy", "comet", "orbit", "planet", "stove", "onion", "pepper", "kettle", "rudder"]
    sets = np.random.default_rng(0).permutation(list(combinations(words, 4)))
    every_text = [" ".join(each) for each in sets]

    def prepare(written: int) -> Labeled:
        taxonomy = taxonomy_of("0123", ["01", "12", "32"])
        texts, new = every_text[:10], every_text[10 : 10 + written]
        lists = [[[], [2], [1, 3]][i % 3] for i in range(10)]
        direct = np.zeros((10, 4), bool)
        for row, classes in enumerate(lists):
            direct[row, classes] = True
        ids = pa.array([f"d{i}" for i in range(10)], pa.large_string())
        labels = label_lists(sparse.csr_matrix(direct))
        table = pa.table({"id": ids, "labels": labels, "confidence": [1.0] * 10})
        write_parquet(context.run_dir, pseudo_labels_path(context.run_dir), table)
        about = {"class_index": 2, "class": "2", "name": "name 2"}
        context.ledger.put(
            "generated", {f"2/{i}": {**about, "number": i, "text": t} for i, t in enumerate(new)}
        )
        every = {0, 1, 2, 3}
        expected = [
            (t, every if classes == [2] else {0, 1, 3})
            for t, classes in zip(texts, lists, strict=True)
            if classes
        ]
        documents = Documents(ids, pa.array(texts, pa.large_string()), None, {})
        return LabeledCorpus(taxonomy, documents, None), expected + [(t, every) for t in new]

    return prepare
