"""Packed sequences: the stream of tokens cut into samples that overlap by one token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from experiments.lm_pretrain.shards import Index, Split, TokenFolder


@dataclass(frozen=True)
class PackedTokens(Dataset[Tensor]):
    """Sample ``i`` is tokens ``[i context, (i + 1) context]`` of a split, int64.

    Each token but the first is predicted once, up to the last whole sample. Cheap to pickle: a
    process maps the shards when it reads.
    """

    folder: TokenFolder
    split: Split
    context: int

    def __len__(self) -> int:
        return (self._index.tokens[self.split] - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        size = self._index.shard
        start, end = index * self.context, (index + 1) * self.context + 1
        parts = [
            self._maps[shard][max(0, start - shard * size) : end - shard * size]
            for shard in range(start // size, (end - 1) // size + 1)
        ]
        return torch.from_numpy(np.concatenate(parts).astype(np.int64))

    @cached_property
    def _index(self) -> Index:
        return self.folder.index()

    @cached_property
    def _maps(self) -> list[NDArray[Any]]:
        return self.folder.maps(self.split)

    def __getstate__(self) -> dict[str, object]:
        return {"folder": self.folder, "split": self.split, "context": self.context}
