"""A model of PyTorch's caching allocator, for one private pool: how much memory a list of
allocations reserves.

The rules and the names of the constants are those of c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.h in torch 2.11 to 2.13, with the settings that PYTORCH_CUDA_ALLOC_CONF has
by default (no expandable segments, no rounding to powers of two, no limit on splitting).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

MIN_BLOCK_SIZE = 512  # kMinBlockSize: all sizes are rounded up to it
SMALL_SIZE = 1 << 20  # kSmallSize: up to here a request is served from small segments
SMALL_BUFFER = 2 << 20  # kSmallBuffer: bytes of a small segment
# kLargeBuffer, large_segment_size(): bytes of a segment for requests between the two limits
LARGE_BUFFER = 20 << 20
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: from here on a request gets a segment of its own size
ROUND_LARGE = 2 << 20  # kRoundLarge: ... rounded up to it


class Allocation(NamedTuple):
    """Something that happened to a block of memory.

    Attributes:
        block: Which block; a number that the living blocks do not share.
        nbytes: Bytes asked for; None where the block was given back.
        inside: The operator with Python code of its own that it happened in; empty outside of any.
    """

    block: int
    nbytes: int | None
    inside: str = ""


def round_size(nbytes: int) -> int:
    """Bytes of the block that a request gets (``round_size``)."""
    return max(-(-nbytes // MIN_BLOCK_SIZE), 1) * MIN_BLOCK_SIZE


def segment_size(size: int) -> int:
    """Bytes that are taken from the device where no free block holds ``size`` bytes
    (``get_allocation_size``).
    """
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE_ALLOC else -(-size // ROUND_LARGE) * ROUND_LARGE


def unit_of(pools: Iterable[int]) -> int:
    """Bytes that pools of these sizes grow by: those of a segment, or 1 where the pools do not
    consist of segments, as on the tape.
    """
    return 1 if any(nbytes % ROUND_LARGE for nbytes in pools) else ROUND_LARGE


class CachingPool:
    """One private pool. Segments are never given back: a living graph keeps them.

    Addresses are not known ahead; later segments are taken to lie higher. They only decide between
    free blocks of equal size.

    Attributes:
        reserved: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._end = 0  # the address beyond the last segment
        # small, large: (size, address) in order
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._size: dict[int, int] = {}  # of free blocks by address
        self._start: dict[int, int] = {}  # addresses of free blocks by the address beyond them
        self._taken: dict[int, tuple[int, int, bool]] = {}  # address, size, small

    def run(self, events: Iterable[Allocation]) -> None:
        """Allocations and releases, in order; 0 bytes take no block, and a block that is not there
        is not released.
        """
        for event in events:
            if event.nbytes is None:
                self._release(event.block)
            elif event.nbytes:
                self._allocate(event.block, round_size(event.nbytes))

    def _allocate(self, block: int, size: int) -> None:
        """Take the smallest free block that holds ``size`` bytes, the lowest among equals
        (``get_free_block``).
        """
        small = size <= SMALL_SIZE
        free = self._free[small]
        index = bisect_left(free, (size, -1))
        if index < len(free):
            address = free[index][1]
            found = self._remove(address, small)
        else:
            address, found = self._end, segment_size(size)
            self.reserved += found
            self._end += found + 1  # no neighbour of the next segment
        rest = found - size
        if rest >= MIN_BLOCK_SIZE if small else rest > SMALL_SIZE:  # should_split
            self._insert(address + size, rest, small)
            found = size
        self._taken[block] = address, found, small

    def _release(self, block: int) -> None:
        """Give a block back, merged with its free neighbours (``try_merge_blocks``)."""
        if block not in self._taken:
            return
        address, size, small = self._taken.pop(block)
        before = self._start.get(address)
        if before is not None:
            address, size = before, size + self._remove(before, small)
        if address + size in self._size:
            size += self._remove(address + size, small)
        self._insert(address, size, small)

    def _insert(self, address: int, size: int, small: bool) -> None:
        insort(self._free[small], (size, address))
        self._size[address], self._start[address + size] = size, address

    def _remove(self, address: int, small: bool) -> int:
        size, free = self._size.pop(address), self._free[small]
        del self._start[address + size], free[bisect_left(free, (size, address))]
        return size
