"""A split that was tokenised, as samples; mapped into memory, not read."""

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

from experiments.summarization.tokenise import Split, pairs_path
from experiments.summarization.tokens import END
from raypipe.storage.artifacts import read_arrow
from raypipe.storage.run_directory import RunDirectory
from raypipe.training.keyed_random import words

#: source and target, int64 ``[S]`` and ``[T]``, each ended
Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StoredPairs(Dataset[Pair]):
    """The pairs of a split, their sources cut; cheap to pickle, a process opens it when it reads.

    Attributes:
        run: whose tokens they are.
        split: which of them.
        source_length: tokens of a source at most, its end too.

    """

    run: RunDirectory
    split: Split
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
        """Tokens of the source and of the target of each sample, int64 ``[samples, 2]``."""
        source, target = (
            pc.list_value_length(self._columns[name]).to_numpy(zero_copy_only=False)
            for name in ("source", "target")
        )
        both = np.stack((np.minimum(source, self.source_length), target), axis=1)
        return torch.from_numpy(both.astype(np.int64))

    @cached_property
    def _columns(self) -> dict[str, Any]:
        table: pa.Table = read_arrow(self.run, pairs_path(self.run, self.split))
        # one chunk each; combine_chunks would copy it
        return {name: table.column(name).chunk(0) for name in table.column_names}

    def __getstate__(self) -> dict[str, object]:
        return {"run": self.run, "split": self.split, "source_length": self.source_length}


@dataclass(frozen=True)
class RandomPairs(Dataset[Pair]):
    """Uniform tokens of full length: nothing to learn, but the most work of a step.

    Sample ``i`` depends on ``i`` alone.
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
        """As of stored ones: all are the same."""
        return torch.tensor([[self.source_length, self.target_length]]).expand(self.samples, 2)
