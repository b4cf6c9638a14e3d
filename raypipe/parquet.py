"""Parquet: written with checksums of its pages, read whole or not at all.

The footer has no checksum, and Arrow takes as much memory as it says that there are rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def to_bytes(table: pa.Table) -> bytes:
    """The table as a file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue().to_pybytes())


def from_bytes(content: bytes) -> pa.Table:
    """The table of a file.

    Raises:
        ValueError: it holds other rows than it declares.
        Exception: anything, from KeyError to Unicode's: Arrow, on foreign bytes.

    """
    with opened(pa.BufferReader(content)) as file:
        table = file.read()
        check_rows(file, len(table))
    return table


@contextmanager
def opened(source: Path | pa.NativeFile) -> Iterator[pq.ParquetFile]:
    """A file to be read, whose footer does not contradict itself; raises as :func:`from_bytes`."""
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        # not the columns': pyarrow ends the process where their metadata are damaged
        groups = (file.metadata.row_group(i) for i in range(file.num_row_groups))
        check_rows(file, sum(group.num_rows for group in groups))
        yield file


def check_rows(file: pq.ParquetFile, found: int) -> None:
    """Refuse a file that gives other rows than it declares. Raises ValueError."""
    declared = file.metadata.num_rows
    if found != declared:
        raise ValueError(f"it declares {declared} rows and holds {found}")
