"""Resource allocator: no over-subscription, no deadlock, ranks and backfilling."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.pipeline.allocator import Allocator, Claim, Lease

CPU = {"a": {"CPU": 2.0}}
GPUS = {"a": {"CPU": 16.0, "GPU": 8.0}}
TWO = {"a": {"CPU": 4.0, "GPU": 2.0}, "b": {"CPU": 4.0, "GPU": 2.0}}


def one(cpus: float = 1.0, gpus: float = 0.0, **options) -> Claim:
    return Claim({"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}, **options)


def workers(number: int, gpus: float = 1.0) -> Claim:
    return one(1.0, gpus, fewest=number, most=number)


def held(leases: list[Lease], nodes: Mapping[str, Mapping[str, float]]) -> dict[str, dict]:
    used = {node: dict.fromkeys(resources, 0.0) for node, resources in nodes.items()}
    for lease in leases:
        for node, number in lease.processes.items():
            for name, amount in lease.claim.bundle.items():
                used[node][name] += number * amount
    return used


def test_eight_trainings_run_on_eight_gpus_and_the_ninth_waits():
    allocator = Allocator(GPUS)
    leases = [allocator.request(workers(1)) for _ in range(9)]
    assert allocator.admit(0.0) == leases[:8]
    allocator.release(leases[3])
    assert allocator.admit(1.0) == leases[8:]


def test_the_highest_rank_starts_first():
    allocator = Allocator(CPU)
    low, high = allocator.request(one(2.0), 1.0), allocator.request(one(2.0), 5.0)
    assert allocator.admit(0.0) == [high]
    allocator.release(high)
    assert allocator.admit(0.0) == [low]


def test_a_large_claim_is_not_starved_by_small_ones_of_unknown_duration():
    allocator = Allocator(GPUS)
    small = [allocator.request(workers(1)) for _ in range(8)]
    assert len(allocator.admit(0.0)) == 8
    large = allocator.request(workers(8), rank=9.0)
    more = [allocator.request(workers(1)) for _ in range(8)]
    for lease in small[:-1]:
        allocator.release(lease)
        assert allocator.admit(1.0) == []
    allocator.release(small[-1])
    assert allocator.admit(2.0) == [large]
    assert not any(lease.granted for lease in more)


def test_a_large_claim_uses_a_gap_that_is_there_before_small_ones_break_it_up():
    allocator = Allocator(GPUS)
    small = [allocator.request(workers(1), rank=3.0, seconds=100.0) for _ in range(8)]
    large = allocator.request(workers(8), rank=1.0, seconds=10.0)
    assert allocator.admit(0.0) == [large]
    allocator.release(large)
    assert allocator.admit(10.0) == small
    again = allocator.request(workers(8), rank=3.0, seconds=10.0)
    urgent = allocator.request(workers(1), rank=9.0, seconds=100.0)
    allocator.release(small[0])
    assert allocator.admit(20.0) == [urgent]  # the large one does not fit, and gains nothing
    for lease in (*small[1:], urgent):
        allocator.release(lease)
    assert allocator.admit(120.0) == [again]


def test_a_short_claim_fills_the_gap_before_a_large_one_starts():
    allocator = Allocator(GPUS)
    running = allocator.request(workers(7), seconds=100.0)
    assert allocator.admit(0.0) == [running]
    large = allocator.request(workers(8), rank=9.0)
    long, short = (allocator.request(workers(1), seconds=s) for s in (101.0, 99.0))
    assert allocator.admit(0.0) == [short]
    allocator.release(running)
    allocator.release(short)
    assert allocator.admit(100.0) == [large]
    assert not long.granted


def test_what_a_waiting_claim_does_not_need_goes_to_others():
    allocator = Allocator(GPUS)
    running = allocator.request(workers(8))
    allocator.admit(0.0)
    waiting, beside = allocator.request(workers(4), rank=1.0), allocator.request(one(4.0))
    too_many = allocator.request(one(8.0))
    assert allocator.admit(0.0) == [beside]
    allocator.release(running)
    assert allocator.admit(0.0) == [waiting, too_many]


def test_a_claim_that_fits_no_longer_blocks_nobody():
    allocator = Allocator(TWO)
    spread = allocator.request(workers(4), rank=9.0)
    allocator.nodes = {"a": TWO["a"]}  # the other one was lost
    other = allocator.request(workers(2))
    assert not allocator.fits(spread.claim)
    assert allocator.admit(0.0) == [other]
    allocator.release(other)
    allocator.nodes = TWO
    assert allocator.admit(0.0) == [spread]
    assert spread.processes == {"a": 2, "b": 2}


def test_a_claim_is_spread_only_if_no_node_has_room_for_all_of_it():
    allocator = Allocator(TWO)
    first = allocator.request(workers(1))
    second, third = allocator.request(workers(2)), allocator.request(workers(1))
    allocator.admit(0.0)
    assert first.processes == third.processes == {"a": 1}
    assert second.processes == {"b": 2}


def test_an_elastic_claim_gets_what_there_is_room_for():
    allocator = Allocator(GPUS)
    allocator.request(workers(3))
    elastic = allocator.request(one(1.0, 1.0, fewest=2, most=64))
    allocator.admit(0.0)
    assert elastic.processes == {"a": 5}


def test_a_measured_claim_has_its_node_to_itself():
    allocator = Allocator({"a": {"CPU": 4.0}})
    pool = allocator.request(one(pool=True))
    small = allocator.request(one())
    allocator.admit(0.0)
    alone = allocator.request(one(alone=True), rank=1.0)
    assert allocator.admit(0.0) == []
    allocator.release(small)
    pool.running = 1.0
    assert allocator.admit(0.0) == []
    assert allocator.share(pool) == 0.0  # the claim waits for the pool's task only
    pool.running = 0.0
    assert allocator.admit(0.0) == [alone]
    assert allocator.share(pool) == 0.0
    after = allocator.request(one())
    assert allocator.admit(0.0) == []
    allocator.release(alone)
    assert allocator.admit(0.0) == [after]
    assert allocator.share(pool) == 3.0


def test_a_pool_uses_what_is_left_and_gives_way():
    allocator = Allocator({"a": {"CPU": 8.0}})
    pool = allocator.request(one(pool=True))
    assert allocator.admit(0.0) == [pool]
    assert allocator.share(pool) == 8.0
    pool.running = 8.0
    training = allocator.request(one(3.0))
    assert allocator.admit(0.0) == []
    assert allocator.share(pool) == 5.0
    pool.running = 5.0
    assert allocator.admit(0.0) == [training]
    allocator.release(training)
    assert allocator.share(pool) == 8.0


def test_the_pool_of_the_highest_rank_comes_first():
    allocator = Allocator({"a": {"CPU": 8.0}})
    low, high = allocator.request(one(pool=True)), allocator.request(one(pool=True), rank=1.0)
    allocator.admit(0.0)
    high.queued, low.queued = 3.0, 100.0
    assert allocator.share(high) == 8.0
    assert allocator.share(low) == 5.0


def test_custom_resources_limit_a_pool():
    allocator = Allocator({"a": {"CPU": 8.0, "tasks": 8.0}, "b": {"CPU": 8.0}})
    pool = allocator.request(Claim({"CPU": 1.0, "tasks": 1.0}, pool=True))
    allocator.admit(0.0)
    assert allocator.share(pool) == 8.0


def test_idle_cpus_are_divided_among_processes():
    allocator = Allocator({"a": {"CPU": 8.0}, "b": {"CPU": 2.0}})
    first = allocator.request(one(fewest=2, most=2))
    allocator.admit(0.0)
    assert first.processes == {"b": 2}
    assert allocator.cpus_per_process(first) == 1.0
    second, third = allocator.request(one()), allocator.request(one())
    allocator.admit(0.0)
    assert allocator.cpus_per_process(second) == 4.0
    allocator.release(third)
    assert allocator.cpus_per_process(second) == 8.0
    pool = allocator.request(one(pool=True))
    allocator.admit(0.0)
    pool.queued = 1.0
    assert allocator.cpus_per_process(second) == 1.0


NODES = st.dictionaries(
    st.sampled_from("abcd"),
    st.fixed_dictionaries(
        {"CPU": st.sampled_from([1.0, 2.0, 8.0]), "GPU": st.sampled_from([0.0, 1.0, 4.0])}
    ),
    min_size=1,
)
CLAIMS = st.builds(
    lambda cpus, gpus, fewest, extra, kind: Claim(
        {"CPU": cpus, "GPU": gpus},
        fewest,
        fewest + extra,
        alone=kind == "alone",
        pool=kind == "pool" and not gpus,
    ),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0.0, 0.0, 0.25, 1.0, 2.0]),
    st.integers(1, 4),
    st.sampled_from([0, 0, 3]),
    st.sampled_from(["", "", "", "alone", "pool"]),
)


@settings(max_examples=300, deadline=None)
@given(NODES, st.lists(st.tuples(CLAIMS, st.floats(0, 9), st.integers(1, 50))), st.data())
def test_every_claim_that_fits_is_served_once_within_the_resources(nodes, asked, data):
    """Leases end in any order, with or without known durations; nothing else is granted."""
    allocator = Allocator(nodes)
    known = data.draw(st.booleans())
    queue = [(claim, rank, seconds) for claim, rank, seconds in asked if allocator.fits(claim)]
    running: list[Lease] = []
    waiting: list[Lease] = []
    served = 0
    now = 0.0
    while queue or waiting or running:
        for claim, rank, seconds in queue[: data.draw(st.integers(0, len(queue)))]:
            waiting.append(allocator.request(claim, rank, seconds if known else math.inf))
            queue.pop(0)
        for lease in allocator.admit(now):
            waiting.remove(lease)
            running.append(lease)
            served += 1
            assert lease.claim.pool or (
                lease.claim.fewest <= sum(lease.processes.values()) <= lease.claim.most
            )
        used = held(running, nodes)
        for node, resources in nodes.items():
            assert all(used[node][name] <= resources[name] + 1e-6 for name in resources)
            there = [lease for lease in running if lease.processes.get(node)]
            assert len(there) == 1 or not any(lease.claim.alone for lease in there)
        assert running or not waiting, "deadlock"
        for lease in running:
            assert (
                lease.claim.pool or allocator.cpus_per_process(lease) >= lease.claim.bundle["CPU"]
            )
            if lease.claim.pool:
                assert allocator.share(lease) <= sum(node["CPU"] for node in nodes.values()) + 1e-6
        if running:
            ended = running.pop(data.draw(st.integers(0, len(running) - 1)))
            allocator.release(ended)
            now += data.draw(st.integers(0, 20))
    assert served == sum(allocator.fits(claim) for claim, _, _ in asked)


@settings(max_examples=300, deadline=None)
@given(NODES, st.lists(st.tuples(CLAIMS, st.floats(0, 9)), min_size=2), st.data())
def test_a_lease_is_handed_over_only_to_one_that_would_get_it(nodes, asked, data):
    def begun() -> tuple[Allocator, list[Lease]]:
        allocator = Allocator(nodes)
        half = [allocator.request(*each) for each in asked[: len(asked) // 2]]
        allocator.admit(0.0)
        return allocator, half + [allocator.request(*each) for each in asked[len(asked) // 2 :]]

    (allocator, leases), (other, others) = begun(), begun()
    running = [n for n, lease in enumerate(leases) if lease.granted and not lease.claim.pool]
    if not running:
        return
    ended = data.draw(st.sampled_from(running))
    heir = allocator.hand_over(leases[ended], 1.0)
    other.release(others[ended])
    others_granted = {lease.number for lease in other.admit(1.0)}
    if heir is None:
        assert not any(
            others[n].claim == others[ended].claim
            and others[n].processes == leases[ended].processes
            for n in others_granted
        )
        allocator.release(leases[ended])
    else:
        assert heir.granted
        assert heir.claim == leases[ended].claim
        assert heir.processes == leases[ended].processes
    granted = {lease.number for lease in allocator.admit(1.0)} | ({heir.number} if heir else set())
    assert granted == others_granted


@settings(max_examples=200, deadline=None)
@given(NODES, st.lists(CLAIMS.filter(lambda claim: not claim.pool), min_size=2), st.data())
def test_those_that_pass_do_not_delay_the_first_in_line(nodes, claims, data):
    """With true durations, the first in line starts no later than without those behind it."""
    seconds = [data.draw(st.integers(1, 50)) for _ in claims]

    def start_of_head(others: bool) -> float | None:
        allocator, now = Allocator(nodes), 0.0
        half = len(claims) // 2
        asked = [
            allocator.request(*each)
            for each in zip(claims[:half], [1.0] * half, seconds, strict=False)
        ]
        running = allocator.admit(now)
        for lease in asked:
            if not lease.granted:
                allocator.release(lease)
        head = allocator.request(claims[half], 5.0, 1.0)
        if not allocator.fits(claims[half]):
            return None
        if others:
            for claim, each in zip(claims[half + 1 :], seconds[half + 1 :], strict=True):
                allocator.request(claim, 0.0, each)
        while not head.granted:
            running += allocator.admit(now)
            if head.granted:
                break
            now = min(lease.ends for lease in running)
            for lease in [lease for lease in running if lease.ends <= now]:
                running.remove(lease)
                allocator.release(lease)
        return now

    assert start_of_head(others=True) == start_of_head(others=False)


@pytest.mark.parametrize("known", [True, False])
def test_nodes_that_come_and_go_lose_no_claim(known):
    allocator = Allocator(TWO)
    first = allocator.request(workers(4), seconds=10.0 if known else math.inf)
    second = allocator.request(workers(1), seconds=10.0 if known else math.inf)
    assert allocator.admit(0.0) == [first]
    allocator.nodes = {"b": TWO["b"]}
    assert allocator.admit(1.0) == []
    allocator.release(first)  # its group failed
    assert allocator.admit(2.0) == [second]
