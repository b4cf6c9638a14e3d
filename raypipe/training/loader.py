"""Deterministic data loader: the samples of a step depend on seed and step alone.

The run traverses the data without gaps for any number of workers and loader processes and any
micro-batch. A dataset with random draws must key them by the sample: use a separate generator
seeded with the index, not the global one.

On a GPU, batches are copied from page-locked memory without blocking. The host runs ahead of the
device: the copy is queued behind the forward and backward pass of the previous micro-batch, so
loading overlaps with computation. A separate CUDA stream would hide only the copy, which is short.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
from raypipe.training.order import Order
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import LoaderSettings, TrainStageSettings
from raypipe.training.task import SampleIds, TrainTask


@dataclass(frozen=True)
class Walk:
    """Positions in the data that one worker takes: one range per micro-batch, from a step on.

    Positions continue across steps, phases and epochs. Each belongs to exactly one micro-batch
    of one worker.
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
    """Yield the indices of each micro-batch of a walk, in a dataset of ``length`` samples."""
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
    """Micro-batches of a walk, read from a stream.

    Each loader process reads the whole stream and keeps the micro-batches k, k + n, ... The
    DataLoader polls its n processes in turn, which restores the order.
    """

    def __init__(self, stream: IterableDataset[Any], walk: Walk) -> None:
        self._stream = stream
        self._walk = walk

    def __iter__(self) -> Iterator[list[Any]]:
        info = get_worker_info()
        process, processes = (0, 1) if info is None else (info.id, info.num_workers)
        # many streams shard themselves by the worker info, which would lose samples here
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
    """Yield a worker's micro-batches from a step on, on its device.

    Close the generator to end its loader processes. If the task knows the lengths of its samples,
    those of a step are similar; a ``measured`` run begins with the longest.

    A stream (``IterableDataset``) must give every reader the same samples in the same order. If
    it draws at random, it must seed its own generator, in ``set_epoch(epoch)`` if it has that
    method. It must not shard itself among workers or by ``get_worker_info()``, which is None
    while it is read. ``task.shuffle`` does not apply to it. A resumed run reads the samples
    before ``first_step`` again, and every loader process reads the whole stream, so put expensive
    per-sample work in ``task.collate``.

    Raises:
        ValueError: the dataset has no samples.

    """
    dataset, seed = task.build_dataset(), settings.training.seed
    walk = Walk(phases, plan.micro_batch, worker.rank, worker.workers, first_step)
    indices = None
    if isinstance(dataset, IterableDataset):
        dataset = _StreamReader(dataset, walk)
    else:
        chosen = _order(task, dataset, phases[0].samples, seed, measured=measured)
        indices = sample_indices(walk, _length(dataset), chosen)
    draws = (seed * 1_000_003 + first_step) * 4096 + worker.rank
    processes = settings.loader.workers
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
    """Yield a worker's share of a map-style dataset, in order: ``(batch, whether it counts)``.

    The counted batches of all workers hold each sample once. Every worker gets the same number
    of batches, since with FSDP all workers take part in each forward pass. A worker without
    samples left gets a batch of the first sample, which does not count.

    Raises:
        ValueError: the dataset is a stream or has no samples.

    """
    if isinstance(dataset, IterableDataset):
        raise ValueError(  # noqa: TRY004 - ValueError, as for any setting
            "the evaluation dataset is an IterableDataset: give a map-style one, with len()"
        )
    length, workers = _length(dataset), worker.workers
    parts = micro_batches(length, workers, worker.rank, batch_size)
    indices = (list(part) or [0] for part in parts)
    processes = min(settings.workers, len(parts))
    loaded = _load(task, dataset, indices, settings, worker.device, processes, worker.rank)
    with closing(loaded):
        for part, batch in zip(parts, loaded, strict=True):
            yield batch, bool(part)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return a batch with every tensor on the device, copied without blocking if possible."""
    return over_leaves(
        batch,
        lambda leaf: leaf.to(device, non_blocking=True) if isinstance(leaf, Tensor) else leaf,
    )


def over_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return a batch with ``function`` of everything in it, through mappings, tuples and lists."""
    if isinstance(batch, Mapping):
        return {key: over_leaves(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [over_leaves(value, function) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch)


def _load(
    task: TrainTask,
    dataset: Dataset[Any],
    indices: Iterator[list[int]] | None,
    settings: LoaderSettings,
    device: torch.device,
    processes: int,
    draws: int,
) -> Generator[Any, None, None]:
    """Yield batches on the device, from the given indices or from a stream's lists of samples.

    The indices cover the whole run in one pass, so loader processes live as long as the run.
    The processes are forked: a dataset in memory is shared, not copied, and a dataset defined in
    a script or a notebook need not be importable. A forked process cannot use CUDA and inherits
    locks of threads that it lacks, so a dataset must create CPU tensors and must not call Ray.
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
        # separate generator: the model's draws must not depend on when the loader starts
        generator=torch.Generator().manual_seed(draws),
    )
    iterator: Any = iter(loader)
    try:
        for batch in iterator:
            yield to_device(batch, device)
    finally:
        # end the processes now: garbage collection is delayed while an exception refers to them
        if processes:
            iterator._shutdown_workers()


def _in_loader_process(process: int) -> None:
    del process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the worker ends its loaders
    # end with a killed worker: loader processes hold its GPU memory and connections
    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    threadpool_limits(limits=1)


def _length(dataset: Dataset[Any]) -> int:
    length: int = len(dataset)  # type: ignore[arg-type]
    if length < 1:
        raise ValueError(f"the dataset {type(dataset).__name__} has no samples")
    return length
