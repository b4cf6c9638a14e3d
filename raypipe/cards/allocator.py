"""Replay of recorded storages in torch's caching allocator for CUDA, with expandable segments.

The rules and constants are those of ``c10/cuda/CUDACachingAllocator.cpp``: sizes are rounded up to
512 bytes, a request takes the smallest free block that holds it, a large block is split, and freed
neighbors merge. There is a segment for small requests and one for all others. It grows at its end,
so that memory is hardly fragmented, and its unused pages go back to the card when that is full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

_ROUND = 512
_MIB = 2**20
#: requests up to this size are small
_SMALL = _MIB
#: steps in which the two segments grow, and in which unused memory is unmapped
_SMALL_PAGE, _LARGE_PAGE, _UNMAPPED = 2 * _MIB, 20 * _MIB, 2 * _MIB


class _MemoryBlock:
    __slots__ = ("address", "before", "free", "next", "size", "small")

    def __init__(self, size: int, address: int, *, small: bool) -> None:
        self.size, self.address, self.small, self.free = size, address, small, True
        self.before: _MemoryBlock | None = None
        self.next: _MemoryBlock | None = None


@dataclass(frozen=True)
class Peak:
    """Peak memory: bytes in use by tensors, bytes reserved, and the event of the first peak.

    ``fits`` is whether every request was met within the capacity.
    """

    allocated: int
    reserved: int
    event: int
    fits: bool


def replay(events: Iterable[tuple[int, int]], capacity: float | None = None) -> Peak:
    """Return the peak of storages that begin (number, bytes) and end (number, 0).

    Args:
        events: the storages in their order.
        capacity: bytes that may be reserved; if there are no more, unused pages are unmapped.

    """
    allocator = _Allocator(capacity)
    blocks: dict[int, _MemoryBlock] = {}
    allocated = reserved = in_use = at = 0
    for index, (number, size) in enumerate(events):
        if not size:
            block = blocks.pop(number)
            in_use -= block.size
            allocator.release(block)
            continue
        found = allocator.take(size)
        if found is None:
            return Peak(max(allocated, in_use + size), reserved, index, fits=False)
        blocks[number] = found
        in_use += found.size
        reserved = max(reserved, allocator.reserved)
        if in_use > allocated:
            allocated, at = in_use, index
    return Peak(allocated, reserved, at, fits=True)


class _Allocator:
    def __init__(self, capacity: float | None) -> None:
        self._capacity = capacity
        self._last: dict[bool, _MemoryBlock] = {}  # block of each segment
        self.reserved = self._end = 0
        self._free: dict[bool, list[tuple[int, int, _MemoryBlock]]] = {True: [], False: []}

    def take(self, size: int) -> _MemoryBlock | None:
        """Return a block for a request; None if the card is full."""
        size = max(_ROUND, -(-size // _ROUND) * _ROUND)
        small = size <= _SMALL
        free = self._free[small]
        place = bisect_left(free, (size, -1))
        if place == len(free):
            block = self._grown(size, small=small)
        else:
            block = free.pop(place)[2]
        if block is None:
            return None
        rest = block.size - size
        if rest >= _ROUND if small else rest > _SMALL:
            self._split(block, size)
        block.free = False
        return block

    def release(self, block: _MemoryBlock) -> None:
        """Free a block and merge it with free neighbors."""
        block.free = True
        if (before := block.before) is not None and before.free:
            self._drop(before)
            block = _merged(before, block)
        if (following := block.next) is not None and following.free:
            self._drop(following)
            block = _merged(block, following)
        if block.next is None:
            self._last[block.small] = block
        insort(self._free[block.small], (block.size, block.address, block))

    def _grown(self, size: int, *, small: bool) -> _MemoryBlock | None:
        """Return a block at the end of a segment that grows; None if the card is full.

        What is unused within the segment can be unmapped, so that only what is in use counts.
        """
        last = self._last.get(small)
        tail = last.size if last is not None and last.free else 0
        page = _SMALL_PAGE if small else _LARGE_PAGE
        whole = -(-(size - tail) // page) * page
        if self._capacity is not None and self.reserved + whole > self._capacity:
            self._unmap_unused(last)
            if self.reserved + whole > self._capacity:
                return None
        if tail and last is not None:
            self._drop(last)
            last.size += whole
        else:
            before, last = last, _MemoryBlock(whole, self._end, small=small)
            last.before = before
            if before is not None:
                before.next = last
        self._end += whole
        self.reserved += whole
        self._last[small] = last
        return last

    def _unmap_unused(self, kept: _MemoryBlock | None) -> None:
        """Give the pages of free blocks back to the card, but for one block."""
        for free in self._free.values():
            for size, _, block in free:
                if block is not kept:
                    self.reserved -= size // _UNMAPPED * _UNMAPPED
                    block.free = False  # it is not mapped
            free[:] = [entry for entry in free if entry[2] is kept]

    def _split(self, block: _MemoryBlock, size: int) -> None:
        rest = _MemoryBlock(block.size - size, block.address + size, small=block.small)
        rest.before, rest.next, block.next = block, block.next, rest
        if rest.next is not None:
            rest.next.before = rest
        block.size = size
        if rest.next is None:
            self._last[block.small] = rest
        insort(self._free[block.small], (rest.size, rest.address, rest))

    def _drop(self, block: _MemoryBlock) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, (block.size, block.address))]


def _merged(block: _MemoryBlock, following: _MemoryBlock) -> _MemoryBlock:
    """Return a block grown by the one that follows it."""
    block.size += following.size
    block.next, block.free = following.next, True
    if block.next is not None:
        block.next.before = block
    return block
