"""Batches in a fixed order: a step's samples depend on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from raypipe.training.batching import micro_batches, share
from raypipe.training.settings import LoaderSettings
from raypipe.training.task import Phase, TrainTask


class MicroBatchSampler(Sampler[list[int]]):
    """The sample indices of one worker, a list a micro-batch, from a step on.

    The run walks through the dataset without a gap; with ``shuffle`` each epoch has a
    permutation of its own, keyed by (seed, epoch). No sample is lost or doubled at the
    borders of steps, workers or epochs.
    """

    def __init__(
        self,
        phases: Sequence[Phase],
        length: int,
        *,
        shuffle: bool,
        seed: int,
        micro_batch: int,
        rank: int,
        workers: int,
        first_step: int,
    ) -> None:
        if length < 1:
            raise ValueError("the dataset has no samples")
        self._phases = phases
        self._length = length
        self._shuffle = shuffle
        self.seed = seed
        self._micro_batch = micro_batch
        self._rank = rank
        self._workers = workers
        self._first_step = first_step
        self._epoch = -1
        self._order = torch.empty(0, dtype=torch.int64)

    def __iter__(self) -> Iterator[list[int]]:
        step = position = 0
        for phase in self._phases:
            for _ in range(phase.steps):
                if step >= self._first_step:
                    mine = share(phase.samples, self._workers, self._rank)
                    for part in micro_batches(mine, self._micro_batch):
                        yield [self._index(position + offset) for offset in part]
                step += 1
                position += phase.samples

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, self._length)
        if not self._shuffle:
            return offset
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._order = torch.randperm(self._length, generator=generator)
            self._epoch = epoch
        return int(self._order[offset])


def batches(
    task: TrainTask,
    dataset: Dataset[Any],
    sampler: MicroBatchSampler,
    settings: LoaderSettings,
    device: torch.device,
) -> Iterator[Any]:
    """Micro-batches on the device, in the sampler's order."""
    pin = device.type == "cuda" if settings.pin_memory is None else settings.pin_memory
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=settings.workers,
        prefetch_factor=settings.prefetch if settings.workers else None,
        persistent_workers=settings.workers > 0,
        pin_memory=pin and device.type == "cuda",
        collate_fn=task.collate(),
        # its own: the model's draws must not depend on when the loader starts
        generator=torch.Generator().manual_seed(sampler.seed),
    )
    for batch in loader:
        yield to_device(batch, device)


def to_device(batch: Any, device: torch.device) -> Any:
    """A batch with every tensor on the device, copied without waiting where it can be."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [to_device(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch
