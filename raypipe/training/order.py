"""Sample order of an epoch: as stored, shuffled, or grouped by length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: the indices of an epoch's samples, by the number of the epoch
Order = Callable[[int], Tensor | range]

#: steps whose samples are sorted by length together
_WINDOW = 50


def stored(samples: int) -> Order:
    """The order of the dataset."""
    return lambda _: range(samples)


def longest_first(lengths: Tensor) -> Order:
    """What takes most memory before all else."""
    return lambda _: lengths.argsort(descending=True, stable=True)


def shuffled(samples: int, seed: int) -> Order:
    """A permutation for each epoch, keyed by (seed, epoch)."""
    return lambda epoch: torch.randperm(samples, generator=_generator(seed, epoch))


def similar_lengths(lengths: Tensor, step: int, seed: int) -> Order:
    """A permutation for each epoch with samples of similar lengths in each step of ``step``.

    Shuffled, sorted by length within windows of 50 steps, and the steps shuffled again, so that
    lengths come in no order. A step that takes the end of one epoch and the beginning of the next
    has random ones. Padding is what it saves.
    """
    samples = len(lengths)

    def order(epoch: int) -> Tensor:
        generator = _generator(seed, epoch)
        found = torch.randperm(samples, generator=generator)
        begun = min(-epoch * samples % step, samples)  # they end a step of the epoch before
        steps = (samples - begun) // step
        whole = found[begun : begun + steps * step]
        windows = [part[lengths[part].argsort(stable=True)] for part in whole.split(_WINDOW * step)]
        if steps:
            by_step = torch.cat(windows).view(steps, step)
            mixed = by_step[torch.randperm(steps, generator=generator)]
            found[begun : begun + steps * step] = mixed.flatten()
        return found

    return order


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)
