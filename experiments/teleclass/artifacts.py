"""What the phases share: their artifacts in a run directory, and their pools of tasks."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy import sparse

from experiments.teleclass.settings import StageSettings
from raypipe import PoolOptions, RunDirectory, StageContext


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


def pool_options(context: StageContext, settings: StageSettings, *, neural: bool) -> PoolOptions:
    """Return the pool of a phase; a neural model runs on a GPU if there is one."""
    gpus = settings.gpus
    names = [gpu.name for node in context.session.nodes for gpu in node.gpus]
    if gpus is None:
        gpus = float(neural and bool(names))
    if gpus and names:
        context.device = names[0]
    return PoolOptions(
        cpus=settings.cpus,
        gpus=gpus,
        keep_processes=True,
        most_tasks=settings.workers,
    )
