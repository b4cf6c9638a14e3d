"""Datasets of the classifier: the tokenized training set, and random samples."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch.utils.data import Dataset

from experiments.teleclass.tokenize_stage import BLOCK, read_tokens
from raypipe.store.run_directory import RunDirectory

#: token ids, class indices, the vector of phase 1 (empty if it is not an input)
Sample = tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.float32]]

NOTHING = np.empty(0, np.float32)
_LONGEST = 10_000


@dataclass(frozen=True)
class TokenizedDocuments(Dataset[Sample]):
    """Rows of the training set as tokens, class indices and vectors, memory-mapped.

    Attributes:
        run_dir: the run directory that holds it.
        rows: the positions of the samples, int64.

    """

    run_dir: RunDirectory
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        block, row = divmod(int(self.rows[index]), BLOCK)
        tokens, labels, vectors = self._block(block)
        vector = NOTHING if vectors is None else vectors[row].values.to_numpy()
        return tokens[row].values.to_numpy(), labels[row].values.to_numpy(), vector

    @cached_property
    def width(self) -> int:
        """The dimensions of the vectors; 0 where there are none."""
        return len(self[0][2])

    def _block(self, number: int) -> tuple[pa.Array, pa.Array, pa.Array | None]:
        if number not in self._blocks:
            table = read_tokens(self.run_dir, number)
            names = ("tokens", "labels", "vector")
            self._blocks[number] = tuple(  # one chunk each; combine_chunks would copy it
                table.column(name).chunk(0) if name in table.column_names else None
                for name in names
            )
        return self._blocks[number]

    @cached_property
    def _blocks(self) -> dict[int, tuple[pa.Array, ...]]:
        return {}

    def __getstate__(self) -> dict[str, object]:
        return {"run_dir": self.run_dir, "rows": self.rows}


@dataclass(frozen=True)
class LongestSamples(Dataset[Sample]):
    """Random samples of the full length, for measurements without data."""

    length: int
    vocabulary: int
    classes: int
    width: int

    def __len__(self) -> int:
        return _LONGEST

    def __getitem__(self, index: int) -> Sample:
        draw = np.random.default_rng(index)
        tokens = draw.integers(1, self.vocabulary, self.length, dtype=np.int32)
        labels = draw.integers(0, self.classes, 3, dtype=np.int32)
        return tokens, labels, draw.standard_normal(self.width, dtype=np.float32)
