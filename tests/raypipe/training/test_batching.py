from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from raypipe.training.batching import KEYS, BatchConflict, BatchPlan, micro_batches, resolve, share
from tests import scenario

size = st.integers(1, 40)
level = st.fixed_dictionaries({}, optional=dict.fromkeys(KEYS, size))


def forwards(plan: BatchPlan) -> int:
    """The most forwards a worker takes in a step."""
    (runs,) = {
        len(micro_batches(plan.effective_batch, plan.workers, rank, plan.micro_batch))
        for rank in range(plan.workers)
    }
    return runs


@given(st.integers(1, 100), st.integers(1, 12), size)
def test_workers_have_as_many_even_micro_batches(samples: int, workers: int, micro: int) -> None:
    """The shares of the workers are a partition of a step, and differ by one at most."""
    shares = [share(samples, workers, rank) for rank in range(workers)]
    assert [i for part in shares for i in part] == list(range(samples))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    cut = [micro_batches(samples, workers, rank, micro) for rank in range(workers)]
    assert {len(parts) for parts in cut} == {math.ceil(math.ceil(samples / workers) / micro)}
    for rank, parts in enumerate(cut):
        assert [i for part in parts for i in part] == list(shares[rank])
        lengths = {len(part) for part in parts}
        assert max(lengths) <= micro
        assert max(lengths) - min(lengths) <= 1
        if micro > 1 and samples >= workers:
            assert min(lengths) >= 1


@given(size, size, st.integers(1, 8), st.integers(1, 40))
def test_another_number_of_workers_keeps_the_effective_batch(
    micro: int, accumulation: int, workers: int, others: int
) -> None:
    plan = BatchPlan(micro, accumulation, micro * accumulation * workers, workers)
    assert plan.for_workers(workers) == plan
    other = plan.for_workers(others)
    assert (other.effective_batch, other.workers) == (plan.effective_batch, others)
    assert other.micro_batch <= plan.micro_batch
    assert forwards(other) == other.accumulation


@given(size, size, st.integers(1, 8), st.integers(0, 39))
def test_halving_keeps_the_effective_batch_and_ends_at_one(
    micro: int, accumulation: int, workers: int, missing: int
) -> None:
    full = micro * accumulation * workers
    effective = full - missing
    assume(-(-effective // workers) >= micro and effective >= workers)
    sizes = {"micro_batch": micro, "effective_batch": effective}
    plan = resolve([sizes], workers)
    assert missing or plan == BatchPlan(micro, accumulation, full, workers)
    while (smaller := plan.halved()) is not None:
        product = plan.micro_batch * plan.accumulation
        divisors = [n for n in range(1, plan.micro_batch // 2 + 1) if product % n == 0]
        assert smaller.micro_batch == divisors[-1]
        assert (smaller.effective_batch, smaller.workers) == (effective, workers)
        assert missing or smaller.micro_batch * smaller.accumulation == product
        assert forwards(smaller) == smaller.accumulation  # what `trials` says is what is done
        plan = smaller
    assert plan.micro_batch == 1


@given(st.lists(level, min_size=1, max_size=4), st.integers(1, 6), st.integers(0, 3))
def test_a_plan_obeys_the_highest_level_that_says_something(
    levels: list[dict[str, int]], workers: int, workers_level: int
) -> None:
    try:
        plan = resolve(levels, workers, workers_level)
    except BatchConflict as conflict:
        found = conflict.level
        with pytest.raises(BatchConflict):  # it contradicts itself, whatever the others say
            resolve([levels[found]], workers)
        assert found <= workers_level
        return
    assert plan.workers == workers
    assert forwards(plan) == plan.accumulation
    assert plan.micro_batch * plan.accumulation * workers >= plan.effective_batch >= workers
    top = next((given for given in levels if given), {})
    if len(top) == 1 and top.get("effective_batch", workers) >= workers:
        ((key, value),) = top.items()
        # no cut of 16 samples makes 5 forwards: it becomes 4
        rounded = key == "accumulation" and plan.accumulation < value
        assert rounded or getattr(plan, key) == value
    again = resolve([{key: getattr(plan, key) for key in KEYS}], workers)
    assert again == plan


@pytest.mark.parametrize(
    ("levels", "workers", "expected"), scenario.cases(__file__, "tables")["batch_sizes"]
)
def test_the_rule(levels: Any, workers: int, expected: list[int]) -> None:
    plan = resolve(levels, workers, len(levels))
    assert [plan.micro_batch, plan.accumulation, plan.effective_batch] == expected
