"""A stage's context without Ray, small taxonomies, and corpora with pseudo-labels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import pyarrow as pa
import pytest
from scipy import sparse

from experiments.teleclass.artifacts import label_lists, pseudo_labels_path
from experiments.teleclass.corpus import LabeledCorpus
from experiments.teleclass.documents import Documents
from experiments.teleclass.settings import TeleclassSettings
from experiments.teleclass.taxonomy import Row, Taxonomy, make_taxonomy
from raypipe.config.settings import Settings
from raypipe.graph.context import StageContext
from raypipe.graph.experiment import Stage, Unit
from raypipe.graph.identity import Identity
from raypipe.store.artifacts import write_parquet
from tests.raypipe.composed import session_in


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    """The context of a stage in this process."""
    unit = Unit("stage", identity=Identity.of({}, {}))
    return StageContext(Stage("stage", lambda context: None, [unit]), session_in(tmp_path / "run"))


def with_sections(context: StageContext, **sections: Settings) -> StageContext:
    """The context with these sections; the others have their defaults."""
    context.__dict__["settings"] = TeleclassSettings().model_copy(update=sections)
    return context


def taxonomy_of(
    ids: Iterable[str], edges: Iterable[Sequence[str]] = (), keywords: Sequence | None = None
) -> Taxonomy:
    """Classes, whose names are ``name_`` and their ids, below each other."""
    classes = [Row("", id_, f"name_{id_}") for id_ in ids]
    rows = [Row(f"edge {place}", *edge) for place, edge in enumerate(edges)]
    return make_taxonomy(classes, rows, keywords, source="test")


def labeled_corpus(context, taxonomy, texts, direct, confidence) -> LabeledCorpus:
    """Documents d0, d1, ..., whose classes ``[documents, classes]`` are stored as pseudo-labels."""
    ids = pa.array([f"d{i}" for i in range(len(texts))], pa.large_string())
    labels = label_lists(sparse.csr_matrix(direct))
    table = pa.table({"id": ids, "labels": labels, "confidence": confidence})
    write_parquet(context.run_dir, pseudo_labels_path(context.run_dir), table)
    documents = Documents(ids, pa.array(texts, pa.large_string()), None, {})
    return LabeledCorpus(taxonomy, documents, None)
