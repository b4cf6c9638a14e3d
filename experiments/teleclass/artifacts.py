"""Columns of what one phase leaves for the next, and the table of measures."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse

from experiments.teleclass.data.taxonomy import Taxonomy
from experiments.teleclass.measures import Counts, summarise
from raypipe.pipeline.context import StageContext


def vector_lists(vectors: NDArray[np.float32]) -> pa.FixedSizeListArray:
    """Float32 ``[n, d]`` as a column."""
    values = pa.array(np.ascontiguousarray(vectors, np.float32).reshape(-1))
    return pa.FixedSizeListArray.from_arrays(values, vectors.shape[1])


def label_lists(labels: sparse.csr_matrix) -> pa.ListArray:
    """Bool ``[N, C]`` as a list of class indices a document."""
    return pa.ListArray.from_arrays(
        pa.array(labels.indptr.astype(np.int32)), pa.array(labels.indices.astype(np.int32))
    )


def label_matrix(lists: pa.ChunkedArray, classes: int) -> sparse.csr_matrix:
    """Lists of class indices as bool ``[N, C]``."""
    array = lists.combine_chunks()
    values = array.flatten().to_numpy()
    ends = np.cumsum(array.value_lengths().to_numpy())
    starts = np.concatenate(([0], ends))
    data = np.ones(len(values), bool)
    return sparse.csr_matrix((data, values, starts), (len(array), classes))


def record_measures(
    context: StageContext, taxonomy: Taxonomy, method: str, documents: str, counts: Counts
) -> None:
    """Rows of the table ``measures``, one a level; and a word to the user."""
    if not counts.documents[0]:
        context.say(f"{method} on {documents}: no document has a gold label to measure it by")
        return
    about = {"phase": context.stage.name, "method": method, "documents_of": documents}
    rows = {
        f"{context.stage.name}/{method}/{documents}/{row['level']}": about
        | {name: None if value != value else value for name, value in row.items()}  # NaN
        for row in summarise(counts, taxonomy.depth)
    }
    context.ledger.put("measures", rows)
    whole = rows[f"{context.stage.name}/{method}/{documents}/all"]
    names = ("example_f1", "precision_at_1", "precision_at_3", "mrr", "macro_f1")
    shown = ", ".join(f"{name} {whole[name]:.3f}" for name in names)
    context.say(f"{method} on {documents}: {shown}")
