from __future__ import annotations

from raypipe.prediction.allocator import replay

MIB = 2**20


def test_sizes_are_rounded_and_small_ones_share_a_segment() -> None:
    peak = replay([(1, 1), (2, 513), (3, MIB)])
    assert peak.allocated == 512 + 1024 + MIB
    assert peak.reserved == 2 * MIB
    assert replay([(1, MIB + 1)]).reserved == 20 * MIB
    assert replay([(1, 10 * MIB + 1)]).reserved == 12 * MIB


def test_a_freed_block_is_used_again() -> None:
    events = [(1, 30 * MIB), (1, 0), (2, 30 * MIB), (2, 0), (3, 20 * MIB), (4, 10 * MIB)]
    peak = replay(events)
    assert peak.allocated == peak.reserved == 30 * MIB
    assert peak.event == 0


def test_the_smallest_block_that_holds_a_request_is_taken() -> None:
    held = [(1, 40 * MIB), (2, 20 * MIB), (1, 0), (2, 0)]
    assert replay([*held, (3, 20 * MIB), (4, 40 * MIB)]).reserved == 60 * MIB


def test_freed_neighbors_merge() -> None:
    thirds = [(1, 10 * MIB), (1, 0), (2, 30 * MIB), (2, 0)]
    parts = [(3, 12 * MIB), (4, 18 * MIB), (3, 0), (4, 0), (5, 30 * MIB)]
    assert replay([*thirds, *parts]).reserved == 40 * MIB


def test_fragments_are_reserved_but_not_allocated() -> None:
    events = [(1, 30 * MIB), (2, 30 * MIB), (1, 0), (2, 0), (3, 60 * MIB)]
    peak = replay(events)
    assert (peak.allocated, peak.reserved) == (60 * MIB, 120 * MIB)


def test_a_full_card_gives_unused_segments_back_before_it_fails() -> None:
    events = [(1, 30 * MIB), (2, 30 * MIB), (1, 0), (2, 0), (3, 60 * MIB)]
    assert replay(events, 60 * MIB).fits
    full = replay([*events, (4, 20 * MIB)], 60 * MIB)
    assert not full.fits
    assert full.event == 5


def test_an_expandable_segment_grows_at_its_end() -> None:
    events = [(1, 30 * MIB), (2, 30 * MIB), (1, 0), (2, 0), (3, 60 * MIB)]
    assert replay(events, expandable=True).reserved == 60 * MIB
    grown = [(1, 30 * MIB), (2, 20 * MIB), (2, 0), (3, 45 * MIB)]
    assert replay(grown, expandable=True).reserved == 80 * MIB
    assert replay([(1, 1), (2, MIB)], expandable=True).reserved == 2 * MIB


def test_unused_pages_of_an_expandable_segment_are_given_back() -> None:
    events = [(1, 40 * MIB), (2, 20 * MIB), (1, 0), (3, 60 * MIB), (3, 0), (4, 70 * MIB)]
    assert replay(events, 100 * MIB, expandable=True).fits
    assert not replay([*events, (5, 20 * MIB)], 100 * MIB, expandable=True).fits
