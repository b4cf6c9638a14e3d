"""Replay of recorded storages in torch's caching allocator for CUDA, with expandable segments.

The rules and constants are those of ``c10/cuda/CUDACachingAllocator.cpp``: sizes are rounded up to
512 bytes, a request takes the smallest free block that holds it, a large block is split, and freed
neighbors merge. There is a segment for small requests and one for all others. It grows at its end,
so that memory is hardly fragmented.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

_ROUND = 512
_MIB = 2**20
#: requests up to this size are small
_SMALL = _MIB
#: steps in which the two segments grow
_SMALL_PAGE, _LARGE_PAGE = 2 * _MIB, 20 * _MIB


@dataclass(frozen=True)
class Peak:
    """Peak memory: bytes in use by tensors, bytes reserved, and the event of the first peak."""

    allocated: int
    reserved: int
    event: int


class _Segment:
    """Address range that grows at its end; of its blocks, only the free ones are known."""

    def __init__(self, page: int, least_rest: int) -> None:
        self.page, self.least_rest, self.end = page, least_rest, 0
        self._ordered: list[tuple[int, int]] = []  # (size, address)
        self._sizes: dict[int, int] = {}  # by address
        self._starts: dict[int, int] = {}  # by the address behind the block

    @property
    def tail(self) -> int:
        """The size of the free block at the end."""
        return self.end - self._starts.get(self.end, self.end)

    def put(self, address: int, size: int) -> None:
        """Add a free block, merged with free neighbors."""
        if (before := self._starts.get(address)) is not None:
            address, size = before, self._remove(before) + size
        if address + size in self._sizes:
            size += self._remove(address + size)
        self._sizes[address], self._starts[address + size] = size, address
        insort(self._ordered, (size, address))

    def take(self, size: int) -> tuple[int, int] | None:
        """Return the address and the size of the smallest block that holds a request, if any."""
        place = bisect_left(self._ordered, (size, -1))
        if place == len(self._ordered):
            return None
        whole, address = self._ordered[place]
        self._remove(address)
        if whole - size < self.least_rest:
            return address, whole
        self.put(address + size, whole - size)
        return address, size

    def _remove(self, address: int) -> int:
        size = self._sizes.pop(address)
        del self._starts[address + size]
        del self._ordered[bisect_left(self._ordered, (size, address))]
        return size


def replay(events: Iterable[tuple[int, int]]) -> Peak:
    """Return the peak of storages that begin (number, bytes) and end (number, 0), in their order.

    A full card would get the pages of unused blocks back, which is not counted on.
    """
    small, large = _Segment(_SMALL_PAGE, _ROUND), _Segment(_LARGE_PAGE, _SMALL + 1)
    blocks: dict[int, tuple[_Segment, int, int]] = {}
    allocated = reserved = in_use = at = 0
    for index, (number, size) in enumerate(events):
        if not size:
            segment, address, size = blocks.pop(number)
            in_use -= size
            segment.put(address, size)
            continue
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        segment = small if size <= _SMALL else large
        block = segment.take(size)
        if block is None:
            pages = -(-(size - segment.tail) // segment.page) * segment.page
            segment.put(segment.end, pages)
            segment.end += pages
            reserved += pages
            block = segment.take(size)
            assert block is not None
        address, size = block
        blocks[number] = segment, address, size
        in_use += size
        if in_use > allocated:
            allocated, at = in_use, index
    return Peak(allocated, reserved, at)
