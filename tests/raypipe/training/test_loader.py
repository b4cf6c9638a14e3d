from __future__ import annotations

from collections import Counter, namedtuple
from collections.abc import Sequence

import pytest
import torch
from example_tasks import SAMPLES, Points, Regression
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.training.loader import MicroBatchSampler, batches, to_device
from raypipe.training.settings import LoaderSettings
from raypipe.training.task import Phase

CPU = torch.device("cpu")


def sampler(
    phases: Sequence[Phase], length: int, micro: int, rank: int, workers: int, first: int = 0,
    *, shuffle: bool = True, seed: int = 0,
) -> MicroBatchSampler:  # fmt: skip
    return MicroBatchSampler(
        phases, length, shuffle=shuffle, seed=seed, micro_batch=micro, rank=rank,
        workers=workers, first_step=first,
    )  # fmt: skip


def by_step(
    phases: Sequence[Phase], length: int, micro: int, workers: int, seed: int = 0
) -> list[list[int]]:
    """Each step's samples, all workers together."""
    steps: list[list[int]] = []
    ranks = [iter(sampler(phases, length, micro, r, workers, seed=seed)) for r in range(workers)]
    for phase in phases:
        for _ in range(phase.steps):
            taken: list[int] = []
            for rank, source in enumerate(ranks):
                mine = len(range(phase.samples)[rank::workers])  # as many as share() gives
                while mine > 0:
                    part = next(source)
                    assert len(part) == min(micro, mine)
                    mine -= len(part)
                    taken += part
            steps.append(taken)
    assert all(next(source, None) is None for source in ranks)
    return steps


@settings(max_examples=60)
@given(
    st.integers(1, 30),
    st.lists(st.tuples(st.integers(1, 6), st.integers(4, 20)), min_size=1, max_size=3),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 2**32 - 1),
)
def test_every_sample_once_an_epoch_whatever_the_cut(
    length: int, shape: list[tuple[int, int]], micro: int, workers: int, seed: int
) -> None:
    phases = [Phase("p", steps, samples, 0.1) for steps, samples in shape]
    steps = by_step(phases, length, micro, workers, seed)
    assert steps == by_step(phases, length, 100, 1, seed)
    walk = [index for step in steps for index in step]
    for first in range(0, len(walk), length):
        epoch = Counter(walk[first : first + length])
        assert max(epoch.values()) == 1
        assert set(epoch) <= set(range(length))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    phases = [Phase("p", 3, 40, 0.1)]
    epochs = by_step(phases, 40, 7, 2)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert epochs != by_step(phases, 40, 7, 2, seed=1)
    plain = list(sampler(phases, 40, 40, 0, 1, shuffle=False))
    assert plain == [list(range(40))] * 3


@pytest.mark.parametrize("first", range(8))
def test_a_run_continues_from_any_step(first: int) -> None:
    phases = [Phase("a", 4, 10, 0.1), Phase("b", 3, 5, 0.1)]
    for rank in range(2):
        whole = list(sampler(phases, 13, 2, rank, 2))
        forwards = [3, 3, 3, 3, *([2, 2, 2] if rank == 0 else [1, 1, 1])]
        assert list(sampler(phases, 13, 2, rank, 2, first)) == whole[sum(forwards[:first]) :]


def test_an_empty_dataset_is_refused() -> None:
    with pytest.raises(ValueError, match="no samples"):
        sampler([Phase("p", 1, 1, 0.1)], 0, 1, 0, 1)


def test_loader_processes_change_nothing() -> None:
    phases = [Phase("p", 4, 12, 0.1)]

    def load(workers: int) -> list[dict[str, torch.Tensor]]:
        source = sampler(phases, SAMPLES, 5, 0, 1)
        loader = LoaderSettings(workers=workers, prefetch=1)
        return list(batches(Regression(), Points(), source, loader, CPU))

    inline, spread = load(0), load(2)
    assert len(inline) == len(spread) == 12
    for one, other in zip(inline, spread, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    taken = torch.cat([batch["id"] for batch in inline])
    assert len(taken.unique()) == 48


def test_the_loader_leaves_the_models_random_numbers_alone() -> None:
    source = sampler([Phase("p", 2, 4, 0.1)], SAMPLES, 4, 0, 1)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    for _ in batches(Regression(), Points(), source, LoaderSettings(), CPU):
        pass
    assert torch.equal(torch.rand(2), expected)


def test_batches_of_any_shape_reach_the_device() -> None:
    pair = namedtuple("pair", "x y")
    one = torch.ones(2)
    batch = {"a": [one, (one, "text")], "b": pair(one, None), "c": 3}
    moved = to_device(batch, torch.device("meta"))
    assert moved["a"][0].device.type == moved["a"][1][0].device.type == "meta"
    assert isinstance(moved["a"][1], tuple)
    assert moved["a"][1][1] == "text"
    assert isinstance(moved["b"], pair)
    assert moved["b"].x.device.type == "meta"
    assert (moved["b"].y, moved["c"]) == (None, 3)
