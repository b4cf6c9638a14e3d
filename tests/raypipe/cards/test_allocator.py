"""Replays of allocations: what a caching allocator with segments that expand holds at most."""

from __future__ import annotations

import pytest

from raypipe.cards.allocator import replay

MIB = 2**20
#: four blocks, of which two that are not neighbors end before a larger one begins
FRAGMENTS = [(1, 20), (2, 20), (3, 20), (4, 20), (1, 0), (3, 0), (5, 40)]
#: a larger block fits once the pages of the first two are given back
REUSED = [(1, 40), (2, 20), (1, 0), (3, 60), (3, 0), (4, 70)]


def in_bytes(events: list[tuple[int, float]]) -> list[tuple[int, int]]:
    return [(number, int(size * MIB)) for number, size in events]


@pytest.mark.parametrize(
    ("events", "allocated", "reserved"),
    [
        # sizes are rounded to 512 bytes, and blocks up to 1 MiB have a segment of their own
        ([(1, 1 / MIB), (2, 513 / MIB), (3, 1)], 1 + 1536 / MIB, 2),
        ([(1, 1 + 1 / MIB)], 1 + 512 / MIB, 20),
        ([(1, 1 / MIB), (2, 1 + 1 / MIB)], 1 + 1024 / MIB, 22),
        ([(1, 20 + 1 / MIB)], 20 + 512 / MIB, 40),
        # a freed block is used again
        ([(1, 40), (1, 0), (2, 40), (2, 0), (3, 20), (4, 20)], 40, 40),
        # the smallest block that holds a request is taken
        ([(1, 40), (2, 20), (3, 20), (4, 20), (1, 0), (3, 0), (5, 20), (6, 40)], 100, 100),
        # freed neighbors merge
        ([(1, 12), (2, 18), (3, 10), (1, 0), (2, 0), (4, 30)], 40, 40),
        # fragments are reserved but not allocated
        (FRAGMENTS, 80, 120),
        # a segment grows at its end
        ([(1, 30), (2, 30), (1, 0), (2, 0), (3, 60)], 60, 60),
        ([(1, 30), (2, 20), (2, 0), (3, 45)], 75, 80),
    ],
)
def test_the_most_that_is_allocated_and_reserved(
    events: list[tuple[int, float]], allocated: float, reserved: float
) -> None:
    peak = replay(in_bytes(events))
    assert (peak.allocated, peak.reserved) == (allocated * MIB, reserved * MIB)


def test_the_event_of_a_peak_is_its_first() -> None:
    assert replay(in_bytes([(1, 40), (1, 0), (2, 40)])).event == 0


def test_a_full_card_gets_unused_pages_back_before_it_fails() -> None:
    assert replay(in_bytes(FRAGMENTS), 80 * MIB).fits
    full = replay(in_bytes([*FRAGMENTS, (6, 20)]), 80 * MIB)
    assert not full.fits
    assert full.event == 7
    assert replay(in_bytes(REUSED), 100 * MIB).fits
    assert not replay(in_bytes([*REUSED, (5, 20)]), 100 * MIB).fits
