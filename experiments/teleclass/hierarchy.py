"""Phase 4: with every label come all its ancestors."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from scipy import sparse

from experiments.teleclass.artifacts import label_lists, label_matrix
from experiments.teleclass.augmentation import generated_documents
from experiments.teleclass.data.corpus import Corpus
from experiments.teleclass.refine import pseudo_labels_path
from raypipe.pipeline.context import StageContext
from raypipe.storage.artifacts import read_parquet, write_parquet
from raypipe.storage.run_directory import RunDirectory


def training_set_path(run: RunDirectory) -> str:
    """Which documents are trained on, and their labels with all ancestors."""
    return run.artifact("hierarchy", "training_set.parquet")


def add_ancestors(context: StageContext, corpus: Corpus) -> None:
    """Complete the label sets upward, of the documents that have labels and of the written ones.

    Raises:
        ValueError: no document has a label.

    """
    taxonomy, run = corpus.taxonomy, context.run_dir
    stored = read_parquet(run, pseudo_labels_path(run))
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
    write_parquet(run, training_set_path(run), table)
    added = labels.sum() - found.sum() - len(classes)
    context.say(f"{len(table)} documents, {labels.sum()} labels, {added} of them ancestors")
