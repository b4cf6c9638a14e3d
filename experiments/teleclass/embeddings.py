"""Embeddings of texts in a run directory: blocks of rows, each a memory-mapped Arrow file."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from experiments.teleclass.artifacts import vector_lists
from experiments.teleclass.data.corpus import LabeledCorpus
from experiments.teleclass.settings import EncodeSettings
from raypipe.store.artifacts import read_arrow, write_arrow
from raypipe.store.run_directory import RunDirectory

Vectors = NDArray[np.float32]
_COLUMN, _FINGERPRINT, _CHECKSUM = "embedding", b"fingerprint", b"crc32"


@dataclass(frozen=True)
class Embeddings:
    """The vectors ``[n, d]`` of ``n`` texts, in blocks of ``block`` rows; the last may be shorter.

    Cheap to pickle: a task opens the blocks it works on. On a local file system a block is
    memory-mapped, so that its rows are read when they are used.
    """

    run_dir: RunDirectory
    name: str
    rows: int
    block: int

    def __len__(self) -> int:
        return -(-self.rows // self.block)

    def bounds(self, number: int) -> tuple[int, int]:
        """Return the rows ``[start, stop)`` of a block."""
        start = number * self.block
        return start, min(start + self.block, self.rows)

    def read(self, number: int) -> Vectors:
        """Return the vectors of a block, read-only.

        Raises:
            OSError, ValueError: the block does not exist or is corrupt.

        """
        return self._vectors(self._table(number))

    def read_rows(self, rows: NDArray[np.int64]) -> Vectors:
        """Return the vectors ``[k, d]`` of these rows."""
        numbers = rows // self.block
        vectors = np.empty((len(rows), self.read(0).shape[1]), np.float32)
        for number in np.unique(numbers).tolist():
            here = numbers == number
            vectors[here] = self.read(number)[rows[here] - number * self.block]
        return vectors

    def write(self, number: int, vectors: Vectors, fingerprint: str) -> None:
        """Store a block atomically, with the fingerprint of its encoder and texts."""
        column = vector_lists(vectors)
        about = {_FINGERPRINT: fingerprint, _CHECKSUM: str(zlib.crc32(column.values.buffers()[1]))}
        table = pa.table({_COLUMN: column}).replace_schema_metadata(about)
        write_arrow(self.run_dir, self._path(number), table)

    def holds(self, number: int, fingerprint: str) -> bool:
        """Whether an intact block with this fingerprint is stored."""
        if not self.run_dir.exists(self._path(number)):
            return False
        try:
            table = self._table(number)
            vectors = self._vectors(table)
        except (OSError, ValueError):
            return False
        start, stop = self.bounds(number)
        about = table.schema.metadata or {}
        return (
            len(vectors) == stop - start
            and about.get(_FINGERPRINT) == fingerprint.encode()
            and about.get(_CHECKSUM) == str(zlib.crc32(vectors.data)).encode()
        )

    def blocks(self) -> Iterator[tuple[int, Vectors]]:
        """Yield the first row and the vectors of each block."""
        for number in range(len(self)):
            yield self.bounds(number)[0], self.read(number)

    def _table(self, number: int) -> pa.Table:
        return read_arrow(self.run_dir, self._path(number))

    @staticmethod
    def _vectors(table: pa.Table) -> Vectors:
        chunks = table.column(0).chunks if table.column_names == [_COLUMN] else []
        if len(chunks) != 1 or not pa.types.is_fixed_size_list(chunks[0].type):
            raise ValueError(f"block of vectors is corrupt: it holds {table.schema}")
        # combine_chunks would copy even a single chunk
        vectors: Vectors = chunks[0].values.to_numpy(zero_copy_only=True)
        return vectors.reshape(-1, chunks[0].type.list_size)

    def _path(self, number: int) -> str:
        return self.run_dir.artifact("encode", self.name, f"{number:06d}.arrow")


def text_sets(corpus: LabeledCorpus) -> dict[str, int]:
    """Return the number of texts in each set that is encoded, by name."""
    classes = len(corpus.taxonomy.ids)
    sets = {"train": len(corpus.train), "classes": classes, "names": classes}
    return sets if corpus.test is None else {**sets, "test": len(corpus.test)}


def embeddings_of(
    run_dir: RunDirectory, corpus: LabeledCorpus, settings: EncodeSettings, name: str
) -> Embeddings:
    """Return the stored vectors of a set of texts."""
    return Embeddings(run_dir, name, text_sets(corpus)[name], settings.block)
