"""Training samples: sequences of a token stream that overlap by one token, or of random tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from experiments.common.blocks import Split
from experiments.lm_pretrain.model import LmSettings
from experiments.lm_pretrain.shards import TokenFolder, tokens_between
from raypipe.training.keyed_random import words

_TRAINING, _HELD_OUT = 0, 1
_MOST_VALIDATION = 2**18


@dataclass(frozen=True)
class PackedTokens(Dataset[Tensor]):
    """Sample ``i`` is tokens ``[i context, (i + 1) context]`` of a split, int64.

    Each token but the first is predicted once, up to the last whole sample. Cheap to pickle: a
    process maps the shards when it reads. ``first`` is the token that sample 0 begins with, and
    ``end`` the one before which the last sample ends.
    """

    folder: TokenFolder
    split: Split
    context: int
    first: int = 0
    end: int | None = None

    def __len__(self) -> int:
        end = self._tokens if self.end is None else self.end
        return max(0, end - self.first - 1) // self.context

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        return self.window(self.first + index * self.context)

    def window(self, start: int) -> Tensor:
        """Return the ``context + 1`` tokens from a token of the stream on, int64."""
        tokens = tokens_between(self._maps, start, start + self.context + 1)
        return torch.from_numpy(tokens.astype(np.int64))

    @cached_property
    def _tokens(self) -> int:
        return self.folder.index().tokens[self.split]

    @cached_property
    def _maps(self) -> list[NDArray[Any]]:
        return self.folder.maps(self.split)

    def __getstate__(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


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


def validation_tokens(folder: TokenFolder, share: float) -> int:
    """Return the number of training tokens that choose the step and the mixture: the first ones.

    They are ``share`` of the training tokens, at most 2^18. The model does not train on them. The
    end of the training text is of more use to the model: the held-out text often continues it.
    """
    return min(int(folder.index().tokens["train"] * share), _MOST_VALIDATION)


def model_of(folder: TokenFolder, settings: LmSettings) -> LmSettings:
    """Return the model for some tokens: characters and bytes decide its vocabulary."""
    index = folder.index()
    if index.kind == "bpe":
        return settings
    return settings.model_copy(update={"vocabulary": index.vocabulary})
