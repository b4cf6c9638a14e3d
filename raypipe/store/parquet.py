"""Parquet files: written with page checksums, read completely or rejected.

The footer has no checksum: it may declare other rows than there are, and any number of them.
"""

from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq


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
    check_rows(file, len(table))
    return table


def check_rows(file: pq.ParquetFile, found: int) -> None:
    """Reject a file with other rows than it declares. Raises ValueError."""
    declared = file.metadata.num_rows
    if found != declared:
        raise ValueError(f"it declares {declared} rows and holds {found}")
