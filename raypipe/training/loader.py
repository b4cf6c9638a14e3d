"""Deterministic data loader: the samples of a step depend on seed and step alone.

The run traverses the data without gaps for any number of workers and loader processes and any
micro-batch. A dataset with random draws must key them by the sample: use a separate generator
seeded with the index, not the global one.

Loader processes are forked: a dataset in memory is shared, not copied, and a dataset defined in a
script or a notebook need not be importable. A forked process cannot use CUDA and inherits locks of
threads that it lacks, so a dataset must create CPU tensors and must not call Ray. Each process has
its own queue, so that it can read a stream in order. torch's ``DataLoader`` does not serve:
it ends its processes when it is garbage-collected, and shows streams their number, by which some
skip samples.

On a GPU, batches are copied from page-locked memory without blocking. The host runs ahead of the
device: the copy is queued behind the forward and backward pass of the previous micro-batch, so
loading overlaps with computation. A separate CUDA stream would hide only the copy, which is short.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from functools import lru_cache, partial
from itertools import count, cycle, islice
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from raypipe import process_tree
from raypipe.training.batching import BatchPlan, micro_batches
from raypipe.training.failure_kinds import LOADER_DIED
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase, steps
from raypipe.training.settings import LoaderSettings, TrainStageSettings
from raypipe.training.task import SampleIds, TrainTask

#: returns the sample indices of an epoch, given its number
Order = Callable[[int], Tensor | range]
#: returns the batch of the samples at some positions in the data
Fetch = Callable[[range], Any]

#: number of steps whose samples are sorted by length together
_WINDOW = 50


def batches(
    task: TrainTask,
    phases: Sequence[Phase],
    settings: TrainStageSettings,
    plan: BatchPlan,
    worker: Worker,
    first_step: int,
    *,
    measured: bool = False,
) -> Generator[Any, None, None]:
    """Yield a worker's micro-batches from a step on, on its device.

    Close the generator to end its loader processes. If the task knows the lengths of its samples,
    those of a step are similar; a ``measured`` run begins with the longest.

    A stream (``IterableDataset``) must give every reader the same samples in the same order. If
    it draws at random, it must seed its own generator, in ``set_epoch(epoch)`` if it has that
    method. It must not shard itself among workers. ``task.shuffle`` does not apply to it. A resumed
    run reads the samples before ``first_step`` again, and every loader process reads the whole
    stream, so put expensive per-sample work in ``task.collate``.

    Raises:
        ValueError: the dataset has no samples.

    """
    dataset, seed = task.build_dataset(), settings.training.seed
    collate = task.collate() or default_collate
    fetch: Fetch
    if isinstance(dataset, IterableDataset):
        fetch = _streamed(dataset, collate)
    else:
        order = _order(task, dataset, phases[0].samples, seed, measured=measured)
        fetch = _Indexed(dataset, collate, order)
    walk = positions(phases, plan.micro_batch, worker, first_step)
    return _loaded(fetch, walk, settings.loader, worker, [seed, first_step])


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
    length = _length(dataset)
    parts = micro_batches(length, worker.workers, worker.rank, batch_size)
    fetch = _Indexed(dataset, task.collate() or default_collate, lambda _: range(length))
    walk = (part or range(1) for part in parts)
    own = settings.model_copy(update={"workers": min(settings.workers, len(parts))})
    with closing(_loaded(fetch, walk, own, worker, [])) as loaded:
        for part, batch in zip(parts, loaded, strict=True):
            yield batch, bool(part)


def positions(
    phases: Sequence[Phase], micro_batch: int, worker: Worker, first_step: int
) -> Iterator[range]:
    """Yield the positions in the data that one worker takes, a range per micro-batch.

    Positions continue across steps, phases and epochs. Each belongs to exactly one micro-batch
    of one worker.
    """
    for _, phase, _, first in steps(phases, first_step):
        parts = micro_batches(phase.samples, worker.workers, worker.rank, micro_batch)
        for part in filter(None, parts):
            yield range(first + part.start, first + part.stop)


def longest_first(lengths: Tensor) -> Tensor:
    """Return the samples by falling length, so that peak memory is reached at the start."""
    return lengths.argsort(descending=True, stable=True)


def similar_lengths(lengths: Tensor, step: int, seed: int, epoch: int) -> Tensor:
    """Return a permutation of an epoch that groups ``step`` samples of similar lengths per step.

    Grouping by length reduces padding. Samples are shuffled and sorted by length within windows
    of 50 steps. The steps are then shuffled, so that lengths follow no order. A step that spans
    the end of one epoch and the beginning of the next has samples of random lengths.
    """
    samples, generator = len(lengths), _generator(seed, epoch)
    order = torch.randperm(samples, generator=generator)
    begun = min(-epoch * samples % step, samples)  # they complete a step of the previous epoch
    steps = (samples - begun) // step
    whole = order[begun : begun + steps * step]
    windows = [part[lengths[part].argsort(stable=True)] for part in whole.split(_WINDOW * step)]
    mixed = torch.cat(windows).view(steps, step)[torch.randperm(steps, generator=generator)]
    whole.copy_(mixed.flatten())
    return order


def to_device(batch: Any, device: torch.device, *, pin: bool = False) -> Any:
    """Return a batch with every tensor on the device, from page-locked memory if ``pin``."""

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return (leaf.pin_memory() if pin else leaf).to(device, non_blocking=True)

    return over_leaves(batch, moved)


def over_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    """Return a batch with ``function`` of everything in it, through mappings, tuples and lists."""
    if isinstance(batch, Mapping):
        return {key: over_leaves(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [over_leaves(value, function) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return function(batch)


class _Indexed:
    """Batches of a map-style dataset in an order."""

    def __init__(self, dataset: Dataset[Any], collate: Callable[..., Any], order: Order) -> None:
        self._dataset, self._collate, self._length = dataset, collate, _length(dataset)
        self._order = lru_cache(maxsize=1)(order)

    def __call__(self, positions: range) -> Any:
        indices: list[int] = []
        while positions:
            epoch, first = divmod(positions.start, self._length)
            part = self._order(epoch)[first : first + len(positions)]
            indices += part if isinstance(part, range) else part.tolist()
            positions = positions[len(part) :]
        if hasattr(self._dataset, "__getitems__"):  # many samples at once, as for the DataLoader
            return self._collate(self._dataset.__getitems__(indices))
        return self._collate([self._dataset[index] for index in indices])


def _streamed(stream: IterableDataset[Any], collate: Callable[..., Any]) -> Fetch:
    """Return what fetches batches of a stream at rising positions; what lies between is skipped."""
    numbered = enumerate(_repeated(stream))

    def fetch(positions: range) -> Any:
        wanted = (sample for place, sample in numbered if place in positions)
        return collate(list(islice(wanted, len(positions))))

    return fetch


def _repeated(stream: IterableDataset[Any]) -> Iterator[Any]:
    for epoch in count():
        if hasattr(stream, "set_epoch"):
            stream.set_epoch(epoch)
        sample = empty = object()
        for sample in stream:
            yield sample
        if sample is empty:
            raise ValueError(f"epoch {epoch} of the dataset has no samples: the stream is empty")


def _order(
    task: TrainTask, dataset: Dataset[Any], step: int, seed: int, *, measured: bool
) -> Order:
    samples, lengths = _length(dataset), task.lengths()
    if lengths is not None and measured:
        return lambda _: longest_first(lengths)
    if not task.shuffle or isinstance(dataset, SampleIds):
        return lambda _: range(samples)
    if lengths is not None:
        return partial(similar_lengths, lengths, step, seed)
    return lambda epoch: torch.randperm(samples, generator=_generator(seed, epoch))


def _loaded(
    fetch: Fetch, walk: Iterable[range], settings: LoaderSettings, worker: Worker, draws: list[int]
) -> Generator[Any, None, None]:
    """Yield the batches at the positions of a walk, on the device of the worker.

    What the samples draw in a loader process depends on ``draws``, the worker and the process.
    """
    processes, device = settings.workers, worker.device
    pin = settings.pin_memory is not False and device.type == "cuda"
    if not processes:
        yield from (to_device(fetch(part), device, pin=pin) for part in walk)
        return
    fork = multiprocessing.get_context("fork")
    pools = [
        ProcessPoolExecutor(1, fork, _in_loader_process, (fetch, [*draws, worker.rank, number]))
        for number in range(processes)
    ]
    queued: deque[Future[Any]] = deque()
    try:
        for pool, part in zip(cycle(pools), walk, strict=False):
            queued.append(pool.submit(_fetched, part))
            if len(queued) > processes * settings.prefetch:
                yield to_device(queued.popleft().result(), device, pin=pin)
        while queued:
            yield to_device(queued.popleft().result(), device, pin=pin)
    except BrokenProcessPool as error:
        raise RuntimeError(LOADER_DIED) from error
    finally:
        for pool in pools:
            pool.shutdown(cancel_futures=True)


_process_fetch: Fetch


def _in_loader_process(fetch: Fetch, draws: Sequence[int]) -> None:
    """Prepare a loader process, which fetches with one thread."""
    global _process_fetch
    _process_fetch = fetch
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the worker ends its loaders
    # end with a killed worker: loader processes hold its GPU memory and connections
    process_tree.end_with_parent()
    threadpool_limits(limits=1)
    torch.set_num_threads(1)
    (seed,) = np.random.SeedSequence(draws).generate_state(1)
    torch.manual_seed(int(seed))
    random.seed(int(seed))
    np.random.seed(seed)  # noqa: NPY002 - the generator that a dataset may draw from


def _fetched(part: range) -> Any:
    return _process_fetch(part)


def _length(dataset: Dataset[Any]) -> int:
    length: int = len(dataset)  # type: ignore[arg-type]
    if not length:
        raise ValueError(f"the dataset {type(dataset).__name__} has no samples")
    return length


def _generator(seed: int, epoch: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch)
