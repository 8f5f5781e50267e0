"""A model of PyTorch's caching allocator: how much memory a list of allocations reserves.

Rules and names of constants are those of c10/cuda/CUDACachingAllocator.cpp and
c10/core/AllocatorConfig.h in torch 2.11 to 2.13, with the defaults of PYTORCH_CUDA_ALLOC_CONF (no
expandable segments, no rounding to powers of two, no limit on splitting).
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
_Block = tuple[int, int]  # size, address


class Allocation(NamedTuple):
    """A block of memory that was taken or given back.

    Attributes:
        block: A number that the living blocks do not share.
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
    """Bytes of a new segment for a request of ``size`` bytes (``get_allocation_size``)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    if size < MIN_LARGE_ALLOC:
        return LARGE_BUFFER
    return -(-size // ROUND_LARGE) * ROUND_LARGE


def unit_of(pools: Iterable[int]) -> int:
    """Bytes that pools of these sizes grow by: those of a segment, or 1 if the pools have no
    segments, as on the tape.
    """
    return 1 if any(nbytes % ROUND_LARGE for nbytes in pools) else ROUND_LARGE


class CachingPool:
    """One private pool. It keeps its segments, as that of a living graph.

    Addresses only decide between free blocks of equal size; later segments lie higher.

    Attributes:
        reserved: Bytes of all segments.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._end = 0  # the address beyond the last segment
        # (size, address) in order, of large and of small blocks
        self._free: tuple[list[_Block], list[_Block]] = ([], [])
        self._size: dict[int, int] = {}  # of free blocks by address
        self._start: dict[int, int] = {}  # addresses of free blocks by the address beyond them
        self._taken: dict[int, _Block] = {}

    def run(self, events: Iterable[Allocation]) -> None:
        """Take and give back blocks, in order. 0 bytes take no block; unknown blocks are not given
        back.
        """
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
        """Take the smallest free block that is large enough, the lowest of equals
        (``get_free_block``).
        """
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
        """Give a block back, merged with its free neighbours (``try_merge_blocks``)."""
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
