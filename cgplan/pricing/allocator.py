"""A model of PyTorch's caching allocator, for one private pool: how much memory a list of allocations reserves.

The rules and the names of the constants are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h
in torch 2.11 to 2.13, with the settings that PYTORCH_CUDA_ALLOC_CONF has by default (no expandable segments, no
rounding to powers of two, no limit on splitting).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

MIN_BLOCK_SIZE = 512  # kMinBlockSize: all sizes are rounded up to it
SMALL_SIZE = 1 << 20  # kSmallSize: up to here a request is served from small segments
SMALL_BUFFER = 2 << 20  # kSmallBuffer: bytes of a small segment
LARGE_BUFFER = 20 << 20  # kLargeBuffer, large_segment_size(): bytes of a segment for requests between the two limits
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
    """Bytes that are taken from the device where no free block holds ``size`` bytes (``get_allocation_size``)."""
    if size <= SMALL_SIZE:
        return SMALL_BUFFER
    return LARGE_BUFFER if size < MIN_LARGE_ALLOC else -(-size // ROUND_LARGE) * ROUND_LARGE


def unit_of(pools: Iterable[int]) -> int:
    """Bytes that pools of these sizes grow by: those of a segment, or 1 where the pools do not consist of segments, as
    on the tape.
    """
    return 1 if any(nbytes % ROUND_LARGE for nbytes in pools) else ROUND_LARGE


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment, with its neighbours there."""

    address: int
    size: int
    small: bool
    stream: int
    before: _Block | None = None
    after: _Block | None = None
    taken: bool = False

    @property
    def order(self) -> tuple[int, int, int]:
        """``BlockComparatorSize``."""
        return self.stream, self.size, self.address


class CachingPool:
    """One private pool. Segments are never given back: a living graph keeps them.

    Addresses are not known ahead; later segments are taken to lie higher. They only decide between free blocks of
    equal size.

    Attributes:
        reserved: Bytes of all segments.
        allocated: Bytes of the blocks that are taken now, as rounded.
        peak: The most that ``allocated`` has been.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self.allocated = 0
        self.peak = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # small, large; each in order
        self._at: dict[int, _Block] = {}  # free blocks by address
        self._taken: dict[int, _Block] = {}

    @property
    def num_free_blocks(self) -> int:
        """Free blocks; neighbours are merged, so that an empty pool has one for each segment."""
        return len(self._at)

    def run(self, events: Iterable[Allocation]) -> None:
        """Allocations and releases, in order. A block that was there before them may be given back, too."""
        for event in events:
            if event.nbytes is None:
                self.release(event.block)
            else:
                self.allocate(event.block, event.nbytes)

    def allocate(self, block: int, nbytes: int, stream: int = 0) -> None:
        """Take a block for ``nbytes`` bytes; 0 bytes take none.

        Args:
            block: The number that ``release`` knows it by.
            nbytes: Bytes asked for.
            stream: Free blocks serve the stream alone that they were allocated on.
        """
        if nbytes == 0:
            return
        size = round_size(nbytes)
        small = size <= SMALL_SIZE
        found = self._fit(size, small, stream)
        if found is None:
            found = _Block(self.reserved, segment_size(size), small, stream)
            self.reserved += found.size
        rest = found.size - size
        if rest >= MIN_BLOCK_SIZE if small else rest > SMALL_SIZE:  # should_split
            self._split(found, size)
        found.taken = True
        self._taken[block] = found
        self.allocated += found.size
        self.peak = max(self.peak, self.allocated)

    def release(self, block: int) -> None:
        """Give a block back, merged with its free neighbours (``try_merge_blocks``); an unknown one is none of ours."""
        found = self._taken.pop(block, None)
        if found is None:
            return
        found.taken = False
        self.allocated -= found.size
        before, after = found.before, found.after
        if before is not None and not before.taken:
            self._remove(before)
            found.address, found.size, found.before = before.address, before.size + found.size, before.before
            if found.before is not None:
                found.before.after = found
        if after is not None and not after.taken:
            self._remove(after)
            found.size, found.after = found.size + after.size, after.after
            if found.after is not None:
                found.after.before = found
        self._insert(found)

    def _fit(self, size: int, small: bool, stream: int) -> _Block | None:
        """The smallest free block that holds ``size`` bytes, the lowest among equals (``get_free_block``)."""
        free = self._free[small]
        index = bisect_left(free, (stream, size, -1))
        if index == len(free) or free[index][0] != stream:
            return None
        found = self._at.pop(free[index][2])
        del free[index]
        return found

    def _split(self, block: _Block, size: int) -> None:
        """Cut ``block`` down to ``size`` bytes; the rest is free."""
        rest = _Block(block.address + size, block.size - size, block.small, block.stream, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.size, block.after = size, rest
        self._insert(rest)

    def _insert(self, block: _Block) -> None:
        insort(self._free[block.small], block.order)
        self._at[block.address] = block

    def _remove(self, block: _Block) -> None:
        free = self._free[block.small]
        del free[bisect_left(free, block.order)]
        del self._at[block.address]
