"""Parquet and Arrow files: written atomically, with page checksums; read completely or rejected.

The footer of Parquet has no checksum: it may declare other rows than there are, and any number of
them.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.errors import ConfigError
from raypipe.store.run_directory import RunDirectory


def to_bytes(table: pa.Table) -> bytes:
    """Return the table as the content of a file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def from_bytes(content: bytes) -> pa.Table:
    """Return the table in the content of a file.

    Raises:
        ValueError: it has other rows than it declares.
        Exception: any kind, from KeyError to UnicodeDecodeError, for invalid bytes.

    """
    with pq.ParquetFile(pa.BufferReader(content), page_checksum_verification=True) as file:
        return read(file)


def read(file: pq.ParquetFile) -> pa.Table:
    """Return all rows of a file, read in batches so that memory follows the actual rows.

    Raises as :func:`from_bytes`.
    """
    table = pa.Table.from_batches(file.iter_batches(), schema=file.schema_arrow)
    declared = file.metadata.num_rows
    if len(table) != declared:
        raise ValueError(f"it declares {declared} rows and holds {len(table)}")
    return table


def write_parquet(run: RunDirectory, path: str, table: pa.Table) -> None:
    """Write a table atomically."""
    run.write(path, to_bytes(table))


def read_parquet(run: RunDirectory, path: str) -> pa.Table:
    """Read a table.

    Raises:
        ConfigError: it is missing or damaged.

    """
    try:
        return from_bytes(run.read(path))
    except Exception as error:  # on foreign bytes Arrow raises anything
        raise ConfigError(
            f"{path}: a stage's result is missing or damaged ({error}); run the configuration in "
            "another run directory"
        ) from error


def write_arrow(run: RunDirectory, path: str, table: pa.Table) -> None:
    """Write a table atomically, in a format that can be mapped into memory."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    run.write(path, sink.getvalue().to_pybytes())


def read_arrow(run: RunDirectory, path: str) -> pa.Table:
    """Return a table of :func:`write_arrow`; on a mounted file system it is mapped, not read.

    Raises:
        OSError, ValueError: it is missing or damaged.

    """
    source = pa.memory_map(path) if run.is_local else pa.BufferReader(run.read(path))
    try:
        table = pa.ipc.open_file(source).read_all()
        table.validate()  # or damage could make Arrow read beyond the file
    except Exception as error:  # on foreign bytes Arrow raises anything
        raise ValueError(f"{path}: is damaged: {error}") from error
    return table
