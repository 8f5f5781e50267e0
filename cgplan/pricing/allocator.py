"""A model of PyTorch's allocator: c10/cuda/CUDACachingAllocator.cpp of torch 2.11 to 2.13, with
the default PYTORCH_CUDA_ALLOC_CONF.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import NamedTuple

MIN_BLOCK_SIZE = 512  # kMinBlockSize: sizes are rounded up to it
SMALL_SIZE = 1 << 20  # kSmallSize: most bytes in small segments
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a small segment
LARGE_BUFFER = 20 << 20  # kLargeBuffer, large_segment_size(): a segment between the limits
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: from here segments fit their request
ROUND_LARGE = 2 << 20  # kRoundLarge: ... rounded up to it
_Block = tuple[int, int]  # size, address


class Allocation(NamedTuple):
    """A block that was taken or given back.

    Attributes:
        block: Unique among living blocks.
        nbytes: Bytes asked for; None: given back.
    """

    block: int
    nbytes: int | None


def round_size(nbytes: int) -> int:
    """Bytes of a request's block (``round_size``)."""
    return max(-(-nbytes // MIN_BLOCK_SIZE), 1) * MIN_BLOCK_SIZE


def segment_size(size: int) -> int:
    """Bytes of a new segment (``get_allocation_size``)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def unit_of(pools: Iterable[int]) -> int:
    """Bytes that these pools grow by: a segment, or 1 on the tape."""
    return 1 if any(nbytes % ROUND_LARGE for nbytes in pools) else ROUND_LARGE


class CachingPool:
    """A private pool, which keeps its ``reserved`` bytes."""

    def __init__(self) -> None:
        self.reserved = 0
        self._end = 0  # the address beyond the last segment
        self._free: tuple[list[_Block], list[_Block]] = ([], [])
        self._size: dict[int, int] = {}  # of free blocks by address
        self._start: dict[int, int] = {}  # free blocks by the address beyond
        self._taken: dict[int, _Block] = {}

    def run(self, events: Iterable[Allocation]) -> None:
        """Take and give back blocks; 0 bytes take none, unknown ones are ignored."""
        for event in events:
            if event.nbytes is None:
                self._release(event.block)
            elif event.nbytes:
                self._allocate(event.block, round_size(event.nbytes))

    def _allocate(
        self,
        block: int,
        size: int,
    ) -> None:
        """``get_free_block``: the smallest that fits, the lowest of equals."""
        is_small = size <= SMALL_SIZE
        free = self._free[is_small]
        place = bisect_left(free, (size, -1))
        if place < len(free):
            _, address = free[place]
            found = self._remove(address, is_small)
        else:
            found = segment_size(size)
            address = self._end
            self.reserved += found
            self._end += found + 1  # no neighbour of the next segment
        rest = found - size
        least = MIN_BLOCK_SIZE if is_small else SMALL_SIZE + 1  # should_split
        if rest >= least:
            self._insert(address + size, rest, is_small)
            found = size
        self._taken[block] = found, address

    def _release(self, block: int) -> None:
        if block not in self._taken:
            return
        size, address = self._taken.pop(block)
        is_small = size <= SMALL_SIZE
        before = self._start.get(address)
        if before is not None:
            size += self._remove(before, is_small)
            address = before
        if address + size in self._size:
            size += self._remove(address + size, is_small)
        self._insert(address, size, is_small)

    def _insert(self, address: int, size: int, is_small: bool) -> None:
        free = self._free[is_small]
        insort(free, (size, address))
        self._size[address] = size
        self._start[address + size] = address

    def _remove(
        self,
        address: int,
        is_small: bool,
    ) -> int:
        size = self._size.pop(address)
        del self._start[address + size]
        free = self._free[is_small]
        place = bisect_left(free, (size, address))
        del free[place]
        return size
