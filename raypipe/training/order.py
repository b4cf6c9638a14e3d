"""Sample order of an epoch: as stored, shuffled, or grouped by length."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

#: returns the sample indices of an epoch, given its number
Order = Callable[[int], Tensor | range]

#: number of steps whose samples are sorted by length together
_WINDOW = 50


def stored(samples: int) -> Order:
    """Return the order of the dataset."""
    return lambda _: range(samples)


def longest_first(lengths: Tensor) -> Order:
    """Return the order by falling length, so that peak memory is reached at the start."""
    return lambda _: lengths.argsort(descending=True, stable=True)


def shuffled(samples: int, seed: int) -> Order:
    """Return a random permutation per epoch, keyed by (seed, epoch)."""
    return lambda epoch: torch.randperm(samples, generator=_generator(seed, epoch))


def similar_lengths(lengths: Tensor, step: int, seed: int) -> Order:
    """Return a permutation per epoch that groups ``step`` samples of similar lengths per step.

    Grouping by length reduces padding. Samples are shuffled and sorted by length within windows
    of 50 steps. The steps are then shuffled, so that lengths follow no order. A step that spans
    the end of one epoch and the beginning of the next has samples of random lengths.
    """
    samples = len(lengths)

    def order(epoch: int) -> Tensor:
        generator = _generator(seed, epoch)
        found = torch.randperm(samples, generator=generator)
        begun = min(-epoch * samples % step, samples)  # they complete a step of the previous epoch
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
