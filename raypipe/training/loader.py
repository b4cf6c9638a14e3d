"""Data loader with a fixed order: the samples of a step depend on seed and step alone.

Whatever the workers, the micro-batch and the loader processes, the run walks through the data
without a gap. A dataset that draws at random has to key its draws by the sample: a generator of
its own seeded with the index, not the global one.

On a GPU batches are copied from page-locked memory without waiting. The host runs ahead of the
device, so the copy is queued behind the forward and backward of the micro-batch before it and
loading overlaps with computing; a stream of its own would save the copy alone, which is short.
"""

from __future__ import annotations

import os
import signal
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info
from torch.utils.data._utils import worker as data_worker

from raypipe.training import order
from raypipe.training.batching import BatchPlan, micro_batches
from raypipe.training.job import Worker
from raypipe.training.order import Order
from raypipe.training.settings import LoaderSettings, TrainStageSettings
from raypipe.training.task import Phase, SampleIds, TrainTask


@dataclass(frozen=True)
class Walk:
    """The positions in the data that one worker takes: a range a micro-batch, from a step on.

    Positions count on over steps, phases and epochs. Each belongs to one micro-batch of one
    worker.
    """

    phases: Sequence[Phase]
    micro_batch: int
    rank: int
    workers: int
    first_step: int = 0

    def __iter__(self) -> Iterator[range]:
        step = position = 0
        for phase in self.phases:
            parts = micro_batches(phase.samples, self.workers, self.rank, self.micro_batch)
            done = min(max(self.first_step - step, 0), phase.steps)
            for number in range(done, phase.steps):
                first = position + number * phase.samples
                for part in filter(None, parts):
                    yield range(first + part.start, first + part.stop)
            step += phase.steps
            position += phase.steps * phase.samples


def sample_indices(walk: Iterable[range], length: int, chosen: Order) -> Iterator[list[int]]:
    """The indices at a walk's positions in a dataset of ``length`` samples, epoch after epoch."""
    known, found = 0, chosen(0)
    for positions in walk:
        indices: list[int] = []
        while positions:
            epoch, first = divmod(positions.start, length)
            last = min(first + len(positions), length)
            if epoch != known:
                known, found = epoch, chosen(epoch)
            part = found[first:last]
            indices += part if isinstance(part, range) else part.tolist()
            positions = positions[last - first :]
        yield indices


class _StreamReader(IterableDataset[list[Any]]):
    """The samples of a walk's micro-batches, read from a stream.

    Each loader process reads the whole stream and keeps the micro-batches k, k + n, ...: the
    DataLoader asks its n processes in turn, which puts them into order again.
    """

    def __init__(self, stream: IterableDataset[Any], walk: Walk) -> None:
        self._stream = stream
        self._walk = walk

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        process, processes = (0, 1) if info is None else (info.id, info.num_workers)
        # many streams take their part by this process's number; here that would lose samples
        data_worker._worker_info = None
        samples, read = _repeat(self._stream), 0
        for positions in islice(self._walk, process, None, processes):
            deque(islice(samples, positions.start - read), maxlen=0)
            yield list(islice(samples, len(positions)))
            read = positions.stop


def _repeat(stream: IterableDataset[Any]) -> Iterator[Any]:
    epoch = 0
    while True:
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        sample = empty = object()
        for sample in stream:
            yield sample
        if sample is empty:
            raise ValueError(f"epoch {epoch} of the dataset has no samples: the stream is empty")
        epoch += 1


def batches(
    task: TrainTask,
    phases: Sequence[Phase],
    settings: TrainStageSettings,
    plan: BatchPlan,
    worker: Worker,
    first_step: int = 0,
    *,
    measured: bool = False,
) -> Generator[Any, None, None]:
    """A worker's micro-batches from a step on, on its device; close it to end its processes.

    Where the task knows its samples' lengths, those of a step are similar; a run that is there to
    be ``measured`` begins with the longest.

    A stream (``IterableDataset``) gives the same samples in the same order to whoever reads it:
    one that draws seeds its own generator, by ``set_epoch(epoch)`` if it has that. It must not
    divide itself among workers or by ``get_worker_info()``, which is None while it is read.
    ``task.shuffle`` does not apply to it. A run that is resumed reads what comes before
    ``first_step`` again, and every loader process reads all of the stream: dear work on a sample
    belongs into ``task.collate``.

    Raises:
        ValueError: a dataset without samples.

    """
    dataset, seed = task.build_dataset(), settings.training.seed
    walk = Walk(phases, plan.micro_batch, worker.rank, worker.workers, first_step)
    processes = loader_workers(
        settings.loader, dataset, worker.device, cores(), worker.workers_on_node
    )
    indices = None
    if isinstance(dataset, IterableDataset):
        dataset = _StreamReader(dataset, walk)
    else:
        chosen = _order(task, dataset, phases[0].samples, seed, measured=measured)
        indices = sample_indices(walk, _length(dataset), chosen)
    draws = (seed * 1_000_003 + first_step) * 4096 + worker.rank
    return _load(task, dataset, indices, settings.loader, worker.device, processes, draws)


def _order(
    task: TrainTask, dataset: Dataset[Any], step: int, seed: int, *, measured: bool
) -> Order:
    samples, lengths = _length(dataset), task.lengths()
    if lengths is not None and measured:
        return order.longest_first(lengths)
    if not task.shuffle or isinstance(dataset, SampleIds):
        return order.stored(samples)
    if lengths is not None:
        return order.similar_lengths(lengths, step, seed)
    return order.shuffled(samples, seed)


def eval_batches(
    task: TrainTask,
    dataset: Dataset[Any],
    batch_size: int,
    worker: Worker,
    settings: LoaderSettings,
) -> Generator[tuple[Any, bool], None, None]:
    """A worker's share of a map-style dataset, in order: ``(batch, whether it counts)``.

    The counted batches of all workers hold each sample once. Every worker gets as many batches,
    since with FSDP all of them take part in each forward: one that has run out of samples gets
    a batch of the first sample, which does not count.

    Raises:
        ValueError: a dataset that is a stream or has no samples.

    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(  # noqa: TRY004 - as for any setting
            "the evaluation dataset is an IterableDataset: give a map-style one, with len()"
        )
    length, workers = _length(dataset), worker.workers
    parts = micro_batches(length, workers, worker.rank, batch_size)
    indices = (list(part) or [0] for part in parts)
    processes = loader_workers(settings, dataset, worker.device, cores(), worker.workers_on_node)
    processes = min(processes, len(parts))
    loaded = _load(task, dataset, indices, settings, worker.device, processes, worker.rank)
    with closing(loaded):
        for part, batch in zip(parts, loaded, strict=True):
            yield batch, bool(part)


def loader_workers(
    settings: LoaderSettings,
    dataset: Dataset[Any],
    device: torch.device,
    cores: int,
    workers_on_node: int,
) -> int:
    """How many loader processes a worker has: as the settings say, or by the cores of its node.

    By default 60 % of the cores, shared by the workers of the node, from 1 to 8 each. None where
    the model itself needs the cores (on a CPU), or where there is nothing to load (`SampleIds`).
    """
    if isinstance(settings.workers, int):
        return settings.workers
    if device.type == "cpu" or isinstance(dataset, SampleIds):
        return 0
    return max(1, min(8, 6 * cores // (10 * workers_on_node)))


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


def _load(
    task: TrainTask,
    dataset: Dataset[Any],
    indices: Iterator[list[int]] | None,
    settings: LoaderSettings,
    device: torch.device,
    processes: int,
    draws: int,
) -> Generator[Any, None, None]:
    """Batches on the device: of these indices, or of the lists of samples that a stream gives.

    The indices are one pass for the whole run, so loader processes live as long as the run.
    They are forked: a dataset in memory is shared, not copied, and one that is defined in a
    script or a notebook need not be importable. What a fork cannot do is use CUDA, and it
    inherits locks of threads that it does not have; a dataset makes CPU tensors and does not
    call Ray.
    """
    batching: dict[str, Any] = {"batch_size": None}
    if indices is not None:
        batching = {"batch_sampler": indices}
    loader: DataLoader[Any] = DataLoader(
        dataset,
        **batching,
        num_workers=processes,
        prefetch_factor=settings.prefetch if processes else None,
        pin_memory=settings.pin_memory is not False and device.type == "cuda",
        collate_fn=task.collate() or default_collate,
        worker_init_fn=_in_loader_process,
        multiprocessing_context="fork" if processes and sys.platform == "linux" else None,
        # its own: the model's draws must not depend on when the loader starts
        generator=torch.Generator().manual_seed(draws),
    )
    iterator: Any = iter(loader)
    try:
        for batch in iterator:
            yield to_device(batch, device)
    finally:
        # left to itself it ends them when it is collected: not while an exception refers to it
        if processes:
            iterator._shutdown_workers()


def _in_loader_process(process: int) -> None:
    del process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the worker ends these
    # a worker that is killed takes them along: they hold its GPU memory and its connections
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    threadpool_limits(limits=1)


def _length(dataset: Dataset[Any]) -> int:
    length: int = len(dataset)  # type: ignore[arg-type]
    if length < 1:
        raise ValueError(f"the dataset {type(dataset).__name__} has no samples")
    return length


def cores() -> int:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
