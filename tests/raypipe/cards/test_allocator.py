from __future__ import annotations

from raypipe.cards.allocator import replay

MIB = 2**20
#: four blocks, of which two that are not neighbors end before a larger one begins
FRAGMENTS = [
    *((number, 20 * MIB) for number in (1, 2, 3, 4)),
    *((1, 0), (3, 0), (5, 40 * MIB)),
]


def test_sizes_are_rounded_and_small_ones_have_a_segment_of_their_own() -> None:
    peak = replay([(1, 1), (2, 513), (3, MIB)])
    assert peak.allocated == 512 + 1024 + MIB
    assert peak.reserved == 2 * MIB
    assert replay([(1, MIB + 1)]).reserved == 20 * MIB
    assert replay([(1, 1), (2, MIB + 1)]).reserved == 22 * MIB
    assert replay([(1, 20 * MIB + 1)]).reserved == 40 * MIB


def test_a_freed_block_is_used_again() -> None:
    events = [(1, 40 * MIB), (1, 0), (2, 40 * MIB), (2, 0), (3, 20 * MIB), (4, 20 * MIB)]
    peak = replay(events)
    assert peak.allocated == peak.reserved == 40 * MIB
    assert peak.event == 0


def test_the_smallest_block_that_holds_a_request_is_taken() -> None:
    held = [(1, 40 * MIB), (2, 20 * MIB), (3, 20 * MIB), (4, 20 * MIB), (1, 0), (3, 0)]
    assert replay([*held, (5, 20 * MIB), (6, 40 * MIB)]).reserved == 100 * MIB


def test_freed_neighbors_merge() -> None:
    parts = [(1, 12 * MIB), (2, 18 * MIB), (3, 10 * MIB), (1, 0), (2, 0), (4, 30 * MIB)]
    assert replay(parts).reserved == 40 * MIB


def test_fragments_are_reserved_but_not_allocated() -> None:
    peak = replay(FRAGMENTS)
    assert (peak.allocated, peak.reserved) == (80 * MIB, 120 * MIB)


def test_a_segment_grows_at_its_end() -> None:
    events = [(1, 30 * MIB), (2, 30 * MIB), (1, 0), (2, 0), (3, 60 * MIB)]
    assert replay(events).reserved == 60 * MIB
    grown = [(1, 30 * MIB), (2, 20 * MIB), (2, 0), (3, 45 * MIB)]
    assert replay(grown).reserved == 80 * MIB


def test_a_full_card_gets_unused_pages_back_before_it_fails() -> None:
    assert replay(FRAGMENTS, 80 * MIB).fits
    full = replay([*FRAGMENTS, (6, 20 * MIB)], 80 * MIB)
    assert not full.fits
    assert full.event == 7
    events = [(1, 40 * MIB), (2, 20 * MIB), (1, 0), (3, 60 * MIB), (3, 0), (4, 70 * MIB)]
    assert replay(events, 100 * MIB).fits
    assert not replay([*events, (5, 20 * MIB)], 100 * MIB).fits
