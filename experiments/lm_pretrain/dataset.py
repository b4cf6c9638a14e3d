"""Training samples: sequences of a token stream that overlap by one token, or of random tokens."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from experiments.common.blocks import Split
from experiments.lm_pretrain.model import LmSettings
from experiments.lm_pretrain.shards import Index, TokenFolder
from raypipe.training.keyed_random import words

_TRAINING, _HELD_OUT = 0, 1


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
        return self.window(index * self.context)

    def window(self, start: int) -> Tensor:
        """Return the ``context + 1`` tokens from a token of the stream on, int64."""
        size, end = self._index.shard, start + self.context + 1
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


@dataclass(frozen=True)
class RandomTokens(Dataset[Tensor]):
    """Uniform random tokens: nothing to learn, but the full work of a step.

    Sample ``i``, int64 ``[context + 1]``, depends only on ``(seed, held_out, i)``.
    """

    vocabulary: int
    context: int
    samples: int
    seed: int = 0
    held_out: bool = False

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """Return the samples of a batch in one draw; PyTorch's loader calls it.

        Raises:
            IndexError: an index outside [0, samples).

        """
        if not all(0 <= index < self.samples for index in indices):
            raise IndexError(f"sample {indices} of {self.samples}")
        stream = _HELD_OUT if self.held_out else _TRAINING
        draws = words(self.seed, stream, torch.tensor(indices), self.context + 1)
        return list((draws * self.vocabulary) >> 32)


def model_of(folder: TokenFolder, settings: LmSettings) -> LmSettings:
    """Return the model for some tokens: characters and bytes decide its vocabulary."""
    index = folder.index()
    if index.kind == "bpe":
        return settings
    return settings.model_copy(update={"vocabulary": index.vocabulary})
