"""What one phase leaves for the next in the run directory: files of Parquet and Arrow."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from scipy import sparse

from experiments.teleclass.data.taxonomy import Taxonomy
from experiments.teleclass.measures import Counts, summarise
from raypipe.context import StageContext
from raypipe.errors import ConfigError
from raypipe.paths import RunDirectory


def write_parquet(run: RunDirectory, path: str, table: pa.Table) -> None:
    """Write a table, all or nothing."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    run.write(path, sink.getvalue().to_pybytes())


def read_parquet(run: RunDirectory, path: str) -> pa.Table:
    """Read a table.

    Raises:
        ConfigError: it is missing or damaged.

    """
    try:
        content = pa.BufferReader(run.read(path))
        return pq.read_table(content, page_checksum_verification=True)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path}: a phase's result is missing or damaged ({error}); run the configuration in "
            "another run directory; vectors are kept in the cache"
        ) from error


def write_arrow(run: RunDirectory, path: str, table: pa.Table) -> None:
    """Write a table so that it can be mapped into memory, all or nothing."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    run.write(path, sink.getvalue().to_pybytes())


def read_arrow(run: RunDirectory, path: str) -> pa.Table:
    """A table that :func:`write_arrow` wrote; on a mounted file system it is mapped, not read.

    Raises:
        OSError, ValueError: it is missing or damaged.

    """
    source = pa.memory_map(path) if run.is_local else pa.BufferReader(run.read(path))
    try:
        table = pa.ipc.open_file(source).read_all()
    except LookupError as error:  # what Arrow raises for places outside of the file
        raise ValueError(f"{path}: is damaged: {error}") from error
    table.validate()  # or damage could make Arrow read beyond the file
    return table


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
