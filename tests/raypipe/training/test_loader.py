from __future__ import annotations

import os
import random
import signal
from collections import Counter, namedtuple
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import count
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from raypipe.training import loader
from raypipe.training.batching import BatchPlan
from raypipe.training.parallel import Worker
from raypipe.training.schedule import Phase
from raypipe.training.settings import LoaderSettings, TrainingSettings, TrainStageSettings
from raypipe.training.task import Loss, SampleIds, StepContext, TrainTask
from tests.command import is_alive, until

CPU = torch.device("cpu")
Kind = Literal["shuffled", "ordered", "stream"]


class Numbers(Dataset[int]):
    def __init__(self, length: int, broken: int | None = None) -> None:
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise LookupError(f"row {index} is damaged")
        return index


class Stream(IterableDataset[Any]):
    """Numbers, without end if no length is given."""

    def __init__(self, length: int | None = None) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        return count() if self.length is None else iter(range(self.length))


class EpochStream(Stream):
    """An order of its own each epoch, as a stream with a shuffle buffer has."""

    length: int
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        shift = 3 * self.epoch
        return iter([(self.epoch, (i + shift) % self.length) for i in range(self.length)])


class SelfishStream(Stream):
    """It takes each n-th sample in one of n loader processes, as many streams do."""

    length: int

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.length)[info.id :: info.num_workers] if info else range(self.length))


class Listing(TrainTask):
    """A task whose batches are lists of samples."""

    def __init__(
        self, dataset: Dataset[Any], *, shuffle: bool = False, collate: Callable[[Any], Any] = list
    ) -> None:
        self.dataset, self.shuffle, self._collate = dataset, shuffle, collate

    def build_model(self) -> nn.Module:
        pytest.fail("loading needs no model")

    def build_dataset(self) -> Dataset[Any]:
        return self.dataset

    def collate(self) -> Callable[[list[Any]], Any]:
        return self._collate

    def loss(self, model: Any, batch: Any, context: StepContext) -> Loss:
        pytest.fail("loading computes no loss")


def numbers(kind: Kind, length: int) -> Listing:
    if kind == "stream":
        return Listing(Stream(length), shuffle=True)
    return Listing(Numbers(length), shuffle=kind == "shuffled")


def load(
    task: TrainTask, phases: Sequence[Phase], micro: int, first: int = 0,
    *, rank: int = 0, workers: int = 1, seed: int = 0, processes: int = 0,
) -> Any:  # fmt: skip
    stage = TrainStageSettings(
        training=TrainingSettings(seed=seed), loader=LoaderSettings(workers=processes)
    )
    plan = BatchPlan(micro, 1, micro * workers, workers)
    return loader.batches(task, phases, stage, plan, Worker(rank, CPU, workers), first)


def by_step(
    task: TrainTask, phases: Sequence[Phase], micro: int, first: int = 0,
    *, workers: int = 1, seed: int = 0,
) -> list[list[Any]]:  # fmt: skip
    """Each step's samples from the first one on, all workers together."""
    steps: list[list[Any]] = []
    ranks = [
        load(task, phases, micro, first, rank=r, workers=workers, seed=seed) for r in range(workers)
    ]
    samples = [phase.samples for phase in phases for _ in range(phase.steps)]
    for step in samples[first:]:
        taken: list[Any] = []
        for rank, source in enumerate(ranks):
            mine = len(range(step)[rank::workers])  # as many as share() gives
            while mine > 0:
                part = next(source)
                assert 1 <= len(part) <= micro
                mine -= len(part)
                taken += part
        steps.append(taken)
    assert all(next(source, None) is None for source in ranks)
    return steps


def children() -> set[int]:
    """The processes that this one has forked and that still run; Ray's are none of them."""
    return {process.pid for process in active_children() if process.pid is not None}


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(["shuffled", "ordered", "stream"]),
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(0, 6), st.integers(4, 20)), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 20),
    st.integers(0, 2**32 - 1),
)
def test_every_sample_once_an_epoch_whatever_the_cut(
    kind: Kind, length: int, shape: list[tuple[int, int]], micro: int, workers: int,
    first: int, seed: int,
) -> None:  # fmt: skip
    phases = [Phase("p", steps, samples, 0.1) for steps, samples in shape]
    task = numbers(kind, length)
    steps = by_step(task, phases, 100, seed=seed)
    assert by_step(task, phases, micro, first, workers=workers, seed=seed) == steps[first:]
    walk = [index for step in steps for index in step]
    assert len(walk) == sum(steps * samples for steps, samples in shape)
    for start in range(0, len(walk), length):
        epoch = walk[start : start + length]
        assert max(Counter(epoch).values()) == 1
        assert set(epoch) <= set(range(length))
        if kind != "shuffled":
            assert epoch == list(range(len(epoch)))


def test_sample_ids_are_numbers_without_end() -> None:
    phases = [Phase("p", 10**12, 5, 0.1)]
    with closing(load(Listing(SampleIds(), shuffle=True), phases, 3, 10**12 - 1)) as batches:
        end = 5 * 10**12
        assert list(batches) == [[end - 5, end - 4, end - 3], [end - 2, end - 1]]


def test_a_stream_is_told_its_epoch() -> None:
    steps = by_step(Listing(EpochStream(5)), [Phase("p", 3, 4, 0.1)], 3, workers=3)
    first = [(0, i) for i in range(5)]
    second = [(1, i) for i in (3, 4, 0, 1, 2)]
    assert [sample for step in steps for sample in step] == [*first, *second, (2, 1), (2, 2)]


@pytest.mark.parametrize("processes", [0, 1])
def test_an_empty_dataset_is_refused(processes: int) -> None:
    phases = [Phase("p", 1, 1, 0.1)]
    with pytest.raises(ValueError, match="Numbers has no samples"):
        load(numbers("ordered", 0), phases, 1)
    with pytest.raises(ValueError, match="the stream is empty"):
        next(load(numbers("stream", 0), phases, 1, processes=processes))


@pytest.mark.parametrize(
    "task",
    [
        Listing(Numbers(13), shuffle=True),
        Listing(EpochStream(13)),
        Listing(SelfishStream(13)),
        Listing(Stream()),
    ],
    ids=lambda task: type(task.dataset).__name__,
)
def test_loader_processes_change_nothing(task: Listing) -> None:
    """Nor does loading change the random numbers that the model draws."""
    phases, state = [Phase("a", 4, 12, 0.1), Phase("b", 2, 5, 0.1)], torch.get_rng_state()
    for first in (0, 3):
        inline = list(load(task, phases, 3, first, rank=1, workers=2))
        assert len(inline) == 2 * (4 - first) + 2
        with closing(load(task, phases, 3, first, rank=1, workers=2, processes=3)) as spread:
            assert list(spread) == inline
    assert torch.equal(torch.get_rng_state(), state)


def test_each_loader_process_keeps_two_batches_ready(tmp_path: Path) -> None:
    def noted(samples: list[int]) -> list[int]:
        (tmp_path / str(samples[0])).touch()
        return samples

    task, phases = Listing(Numbers(40), collate=noted), [Phase("p", 10, 4, 0.1)]
    with closing(load(task, phases, 4, processes=3)) as batches:
        next(batches)
        until(lambda: len([*tmp_path.iterdir()]) == 1 + 3 * 2, "six batches follow the first")


def test_an_interrupt_does_not_reach_the_loader_processes() -> None:
    phases, before = [Phase("p", 40, 4, 0.1)], children()
    expected = list(load(numbers("stream", 50), phases, 4))
    batches = load(numbers("stream", 50), phases, 4, processes=2)
    got = [next(batches), next(batches)]  # of both processes: they are under way
    assert len(children() - before) == 2
    for child in children() - before:
        os.kill(child, signal.SIGINT)
    assert [*got, *batches] == expected
    assert children() == before


@pytest.mark.parametrize("processes", [0, 2])
def test_closing_and_a_damaged_sample_end_the_loader_processes(processes: int) -> None:
    before, phases = children(), [Phase("p", 5, 4, 0.1)]
    batches = load(numbers("shuffled", 20), phases, 4, processes=processes)
    next(batches)
    batches.close()
    assert children() == before
    batches = load(Listing(Numbers(20, broken=11)), phases, 4, processes=processes)
    with pytest.raises(LookupError, match="row 11 is damaged") as caught:
        list(batches)
    assert caught.tb is not None  # it refers to the loader; the processes have ended all the same
    assert children() == before


def test_what_the_samples_draw_depends_on_the_seed_in_a_loader_process() -> None:
    def draws(samples: list[int]) -> list[float]:
        return [torch.rand(()).item(), random.random(), np.random.random()]  # noqa: NPY002

    task, phases = Listing(Numbers(2), collate=draws), [Phase("p", 1, 2, 0.1)]
    (one,), (same,), (other,) = (
        load(task, phases, 2, seed=seed, processes=1) for seed in (1, 1, 2)
    )
    assert one == same
    assert not set(one) & set(other)


def test_a_loader_process_has_one_thread() -> None:
    def threads(samples: list[int]) -> set[int]:
        return {torch.get_num_threads(), *(pool["num_threads"] for pool in threadpool_info())}

    task, phases = Listing(Numbers(2), collate=threads), [Phase("p", 1, 2, 0.1)]
    with threadpool_limits(limits=2):
        assert list(load(task, phases, 2)) == [{2}]
        assert list(load(task, phases, 2, processes=1)) == [{1}]


@pytest.mark.slow
def test_loader_processes_end_with_a_worker_that_is_killed() -> None:
    spawn = get_context("spawn")  # a process without the threads that this one may have
    here, there = spawn.Pipe()
    worker = spawn.Process(target=_train_until_killed, args=(there,))
    worker.start()
    pids = here.recv()
    assert len(pids) == 2
    worker.kill()
    worker.join()
    until(lambda: not any(map(is_alive, pids)), "the processes end", 400)


def _train_until_killed(parent: Connection) -> None:
    batches = load(numbers("shuffled", 50), [Phase("p", 10**9, 4, 0.1)], 4, processes=2)
    assert next(batches) != next(batches)  # of both processes: they are under way
    parent.send(children())
    signal.pause()


def held_out(
    task: TrainTask, dataset: Dataset[Any], size: int, rank: int = 0, workers: int = 1,
    processes: int = 0,
) -> Iterator[tuple[Any, bool]]:  # fmt: skip
    given = LoaderSettings(workers=processes)
    return loader.eval_batches(task, dataset, size, Worker(rank, CPU, workers), given)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 6))
def test_evaluation_takes_each_sample_once(length: int, size: int, workers: int) -> None:
    dataset = Numbers(length)
    given = [list(held_out(Listing(dataset), dataset, size, r, workers)) for r in range(workers)]
    taken: list[int] = []
    for batches in given:
        assert len(batches) == len(given[0])
        own = [batch for batch, counted in batches if counted]
        assert all(1 <= len(batch) <= size for batch, _ in batches)
        assert len(own) in (len(batches), len(batches) - 1)
        taken += [sample for batch in own for sample in batch]
    assert taken == list(range(length))
    assert len(given[0]) == sum(counted for _, counted in given[0])


def test_evaluation_by_loader_processes_needs_samples_that_can_be_counted() -> None:
    dataset, before, state = Numbers(7), children(), torch.get_rng_state()
    inline = list(held_out(Listing(dataset), dataset, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert inline == [([0, 1], True), ([2, 3], True), ([4, 5], True), ([6], True)]
    assert list(held_out(Listing(dataset), dataset, 2, processes=2)) == inline
    assert children() == before
    for broken, message in ((Stream(3), "map-style"), (Numbers(0), "no samples")):
        with pytest.raises(ValueError, match=message):
            next(held_out(numbers("ordered", 3), broken, 2))


def test_batches_of_any_shape_reach_the_device() -> None:
    pair = namedtuple("pair", "x y")
    one = torch.ones(2)
    batch = {"a": [one, (one, "text")], "b": pair(one, None), "c": 3}
    moved = loader.to_device(batch, torch.device("meta"))
    assert {each.is_meta for each in (moved["a"][0], moved["a"][1][0], moved["b"].x)} == {True}
    shape = loader.over_leaves(moved, lambda leaf: one if isinstance(leaf, torch.Tensor) else leaf)
    assert str(shape) == str(batch)


@pytest.mark.parametrize(
    ("device", "wanted", "pin"),
    [("cuda", None, True), ("cuda", False, False), ("cpu", True, False), ("mps", None, False)],
)
def test_batches_for_a_gpu_are_page_locked(device, wanted, pin, monkeypatch) -> None:
    monkeypatch.setattr(loader, "to_device", lambda batch, device, *, pin: pin)
    given = LoaderSettings(pin_memory=wanted)
    assert [*loader._loaded(list, [range(1)], given, Worker(0, torch.device(device)), [])] == [pin]


@given(samples=st.integers(20, 100), step=st.integers(2, 9), seed=st.integers(0, 99))
def test_a_step_takes_neighbors_by_length(samples: int, step: int, seed: int) -> None:
    """All lengths differ and one window holds them all: a step's are next to each other."""
    lengths = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    for epoch in range(3):
        order = loader.similar_lengths(lengths, step, seed, epoch)
        assert torch.equal(order.sort().values, torch.arange(samples))
        first = -epoch * samples % step
        steps = [lengths[order[i : i + step]] for i in range(first, samples - step + 1, step)]
        rank = {int(length): place for place, length in enumerate(torch.cat(steps).sort().values)}
        for found in steps:
            places = sorted(rank[int(length)] for length in found)
            assert places == list(range(places[0], places[0] + step))


def test_lengths_come_in_no_order() -> None:
    lengths = torch.arange(6400) // 64
    order, later = (loader.similar_lengths(lengths, 64, 0, epoch) for epoch in (0, 1))
    assert not torch.equal(order, later)
    found = lengths[order].view(100, 64)
    spread = (found.max(1).values - found.min(1).values).double().mean()
    assert spread < 10  # of 100
    means = torch.stack([found.double().mean(1), torch.arange(100.0).double()])
    assert abs(torch.corrcoef(means)[0, 1]) < 0.4
    assert loader.longest_first(torch.tensor([3, 9, 3, 5])).tolist() == [1, 3, 0, 2]
