from __future__ import annotations

from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from raypipe.training import loader

lengths_of = st.lists(st.integers(1, 50), min_size=1, max_size=300).map(torch.tensor)


@given(lengths=lengths_of, step=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_every_epoch_has_each_sample_once_in_another_order(
    lengths: torch.Tensor, step: int, seed: int
) -> None:
    chosen = partial(loader.similar_lengths, lengths, step, seed)
    for epoch in range(3):
        found = torch.as_tensor(chosen(epoch))
        assert torch.equal(found.sort().values, torch.arange(len(lengths)))
        assert torch.equal(found, torch.as_tensor(chosen(epoch)))


@given(samples=st.integers(20, 100), step=st.integers(2, 9), seed=st.integers(0, 99))
def test_a_step_inside_an_epoch_takes_neighbours_by_length(
    samples: int, step: int, seed: int
) -> None:
    """All lengths differ and one window holds them all: a step's are next to each other."""
    lengths = torch.randperm(samples, generator=torch.Generator().manual_seed(seed))
    chosen = partial(loader.similar_lengths, lengths, step, seed)
    for epoch in range(3):
        found = lengths[torch.as_tensor(chosen(epoch))]
        first = -epoch * samples % step
        ends = list(range(first, samples - step + 1, step))
        taken = torch.cat([found[start : start + step] for start in ends]).sort().values
        rank = {int(length): place for place, length in enumerate(taken)}
        for start in ends:
            places = sorted(rank[int(length)] for length in found[start : start + step])
            assert places == list(range(places[0], places[0] + step))


def test_lengths_come_in_no_order() -> None:
    lengths = torch.arange(6400) // 64
    found = lengths[torch.as_tensor(loader.similar_lengths(lengths, 64, 0, 0))].view(100, 64)
    means = found.double().mean(1)
    spread = (found.max(1).values - found.min(1).values).double().mean()
    assert spread < 10  # of 100
    assert abs(torch.corrcoef(torch.stack([means, torch.arange(100.0).double()]))[0, 1]) < 0.4
    later = torch.as_tensor(loader.similar_lengths(lengths, 64, 0, 1))
    assert not torch.equal(later, torch.as_tensor(loader.similar_lengths(lengths, 64, 0, 0)))


def test_the_longest_come_first() -> None:
    assert torch.as_tensor(loader.longest_first(torch.tensor([3, 9, 3, 5]))).tolist() == [
        1,
        3,
        0,
        2,
    ]
