"""Artifacts that one phase leaves for the next, and rows of the table of measures."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse

from experiments.teleclass.data.taxonomy import Taxonomy
from experiments.teleclass.evaluation import Counts, summarize
from raypipe.graph.context import StageContext
from raypipe.store.run_directory import RunDirectory


def pseudo_labels_path(run_dir: RunDirectory) -> str:
    """Return the path of the training documents' ids, class indices and confidence."""
    return run_dir.artifact("refine", "pseudo_labels.parquet")


def training_set_path(run_dir: RunDirectory) -> str:
    """Return the path of the training set: rows, and their labels with all ancestors."""
    return run_dir.artifact("hierarchy", "training_set.parquet")


def generated_documents(context: StageContext) -> tuple[pa.Array, list[int]]:
    """Return the generated texts and the class of each, ordered by class."""
    rows = context.ledger.rows("generated")
    rows.sort(key=lambda row: (row["class_index"], row["number"]))
    texts = pa.array([row["text"] for row in rows], pa.large_string())
    return texts, [int(row["class_index"]) for row in rows]


def vector_lists(vectors: NDArray[np.float32]) -> pa.FixedSizeListArray:
    """Return float32 ``[n, d]`` as a column."""
    values = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])


def label_lists(labels: sparse.csr_matrix) -> pa.ListArray:
    """Return bool ``[N, C]`` as a list of class indices per document."""
    return pa.ListArray.from_arrays(
        pa.array(labels.indptr.astype(np.int32)), pa.array(labels.indices.astype(np.int32))
    )


def label_matrix(lists: pa.ChunkedArray, classes: int) -> sparse.csr_matrix:
    """Return lists of class indices as bool ``[N, C]``."""
    array = lists.combine_chunks()
    values = array.flatten().to_numpy()
    ends = np.cumsum(array.value_lengths().to_numpy())
    starts = np.concatenate(([0], ends))
    data = np.ones(len(values), bool)
    return sparse.csr_matrix((data, values, starts), (len(array), classes))


def record_measures(
    context: StageContext, taxonomy: Taxonomy, method: str, documents: str, counts: Counts
) -> None:
    """Write rows of the table ``measures``, one per level, and report the measures."""
    if not counts.documents[0]:
        context.say(f"{method} on {documents}: no document has a gold label to measure it by")
        return
    about = {"phase": context.stage.name, "method": method, "documents_of": documents}
    rows = {
        f"{context.stage.name}/{method}/{documents}/{row['level']}": about
        | {name: None if value != value else value for name, value in row.items()}  # NaN
        for row in summarize(counts, taxonomy.depth)
    }
    context.ledger.put("measures", rows)
    whole = rows[f"{context.stage.name}/{method}/{documents}/all"]
    names = ("example_f1", "precision_at_1", "precision_at_3", "mrr", "macro_f1")
    shown = ", ".join(f"{name} {whole[name]:.3f}" for name in names)
    context.say(f"{method} on {documents}: {shown}")
