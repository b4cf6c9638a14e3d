"""Parquet: written with checksums of its pages, read whole or not at all."""

from __future__ import annotations

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
    source = pa.BufferReader(content)
    with pq.ParquetFile(source, page_checksum_verification=True) as file:
        table = file.read()
        check_rows(file, len(table))
    return table


def check_rows(file: pq.ParquetFile, found: int) -> None:
    """Refuse a file that gave other rows than it declares. Raises ValueError.

    Its footer has no checksum, and Arrow believes what it says of each group of rows.
    """
    declared = file.metadata.num_rows
    if found != declared:
        raise ValueError(f"it declares {declared} rows and holds {found}")
