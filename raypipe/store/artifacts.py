"""Artifacts that one stage leaves for the next: Parquet and Arrow files of a run directory."""

from __future__ import annotations

import pyarrow as pa

from raypipe.errors import ConfigError
from raypipe.store import parquet
from raypipe.store.run_directory import RunDirectory


def write_parquet(run: RunDirectory, path: str, table: pa.Table) -> None:
    """Write a table atomically."""
    run.write(path, parquet.to_bytes(table))


def read_parquet(run: RunDirectory, path: str) -> pa.Table:
    """Read a table.

    Raises:
        ConfigError: it is missing or damaged.

    """
    try:
        return parquet.from_bytes(run.read(path))
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
