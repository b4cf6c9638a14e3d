"""Training samples: the token pairs of a split, mapped into memory, or random pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.utils.data import Dataset

from experiments.common.blocks import Part
from experiments.summarization.tokenize_stage import pairs_path
from experiments.summarization.tokenizer import END
from raypipe.store.artifacts import read_arrow
from raypipe.store.run_directory import RunDirectory
from raypipe.training.keyed_random import words

#: source and target, int64 ``[S]`` and ``[T]``; both end with END
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StoredPairs(Dataset[Pair]):
    """The pairs of a split; cheap to pickle, because a process opens the file when it reads.

    Attributes:
        run_dir: the run directory.
        split: the split.
        source_length: maximum number of tokens of a source, including its end.

    """

    run_dir: RunDirectory
    split: Part
    source_length: int

    def __len__(self) -> int:
        return len(self._columns["target"])

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        source, target = (
            torch.tensor(self._columns[name][index].values.to_numpy(), dtype=torch.int64)
            for name in ("source", "target")
        )
        if len(source) > self.source_length:
            source = torch.cat((source[: self.source_length - 1], source[-1:]))
        return source, target

    def lengths(self) -> Tensor:
        """Return the numbers of tokens of each source and target, int64 ``[samples, 2]``."""
        source, target = (
            pc.list_value_length(self._columns[name]).to_numpy(zero_copy_only=False)
            for name in ("source", "target")
        )
        both = np.stack((np.minimum(source, self.source_length), target), axis=1)
        return torch.from_numpy(both.astype(np.int64))

    @cached_property
    def _columns(self) -> dict[str, Any]:
        table: pa.Table = read_arrow(self.run_dir, pairs_path(self.run_dir, self.split))
        # each column is one chunk; combine_chunks would copy it
        return {name: table.column(name).chunk(0) for name in table.column_names}

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("run_dir", "split", "source_length")}


@dataclass(frozen=True)
class RandomPairs(Dataset[Pair]):
    """Uniform random tokens of full length: nothing to learn, but the full work of a step.

    Sample ``i`` depends only on ``i``.
    """

    vocabulary: int
    source_length: int
    target_length: int
    samples: int

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Pair:
        if not 0 <= index < self.samples:
            raise IndexError(f"sample {index} of {self.samples}")
        size = self.source_length + self.target_length
        draws = words(0, 0, torch.tensor([index]), size)[0]
        ids = END + (draws * (self.vocabulary - END) >> 32)
        ids[self.source_length - 1] = ids[-1] = END
        return ids[: self.source_length], ids[self.source_length :]

    def lengths(self) -> Tensor:
        """Return the numbers of tokens of each source and target, int64 ``[samples, 2]``."""
        return torch.tensor([[self.source_length, self.target_length]]).expand(self.samples, 2)
