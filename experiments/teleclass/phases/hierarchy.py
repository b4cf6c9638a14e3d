"""Phase 4, hierarchy: add all ancestors to the label sets."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from scipy import sparse

from experiments.teleclass.artifacts import (
    generated_documents,
    label_lists,
    label_matrix,
    pseudo_labels_path,
    training_set_path,
)
from experiments.teleclass.data.corpus import LabeledCorpus
from raypipe.graph.context import StageContext
from raypipe.store.artifacts import read_parquet, write_parquet


def run_hierarchy(corpus: LabeledCorpus, context: StageContext) -> None:
    """Write the training set: labeled and generated documents with all ancestors of their labels.

    Raises:
        ValueError: no document has a label.

    """
    taxonomy, run_dir = corpus.taxonomy, context.run_dir
    stored = read_parquet(run_dir, pseudo_labels_path(run_dir))
    found = label_matrix(stored.column("labels"), len(taxonomy))
    rows = np.flatnonzero(np.diff(found.indptr))
    _, classes = generated_documents(context)
    ones = (np.ones(len(classes), bool), (np.arange(len(classes)), classes))
    written = sparse.csr_matrix(ones, (len(classes), len(taxonomy)))
    labels = taxonomy.closure(sparse.vstack((found[rows], written), "csr"))
    if not labels.shape[0]:
        raise ValueError("no document has a label, so there is nothing to train on")
    table = pa.table(
        {
            "origin": ["document"] * len(rows) + ["generated"] * len(classes),
            "row": np.concatenate((rows, np.arange(len(classes)))),
            "labels": label_lists(labels),
        }
    )
    write_parquet(run_dir, training_set_path(run_dir), table)
    added = labels.sum() - found.sum() - len(classes)
    context.say(f"{len(table)} documents, {labels.sum()} labels, {added} of them ancestors")
