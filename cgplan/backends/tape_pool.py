"""Memory of the tape backend: a private pool whose blocks are reused as soon as they are dropped."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import numpy as np
import torch

ALIGNMENT = 64  # bytes; what torch's CPU allocator gives


@dataclass(slots=True)
class _Segment:
    """One piece of host memory, and its free spans as offset -> length."""

    memory: memoryview
    free: dict[int, int] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def give_back(self, offset: int, length: int) -> None:
        """Free a span, joined with its free neighbours."""
        for start, span in list(self.free.items()):
            if start + span == offset:
                del self.free[start]
                offset, length = start, span + length
            elif offset + length == start:
                del self.free[start]
                length += span
        self.free[offset] = length


class TapePool:
    """A pool that hands out blocks of host memory, reuses them, and counts its bytes exactly.

    A block is taken while the storage that ``take`` returned lives: it is free at the moment when the last tensor on
    it is dropped. ``alias_of`` gives a second storage on the same memory that does not take the block, and keeps
    nothing but the memory itself from vanishing. Best fit, else a new segment of just the size asked for.

    Args:
        limit: Bytes that the pool may reserve, None for no limit. Beyond it ``take`` raises torch.OutOfMemoryError,
            as a GPU would.

    Attributes:
        backend: The backend that made it.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.backend: object = None
        self._segments: list[_Segment] = []
        self._aliases: dict[int, torch.UntypedStorage] = {}  # by address of the storage that takes the block

    @property
    def nbytes(self) -> int:
        """Bytes reserved, taken or free."""
        return sum(segment.nbytes for segment in self._segments)

    @property
    def free_bytes(self) -> int:
        """Bytes reserved and not taken."""
        return sum(sum(segment.free.values()) for segment in self._segments)

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of ``nbytes`` bytes on a block of the pool. Its contents are what was there before."""
        size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        segment, offset = self._fit(size) or self._grow(size)
        span = segment.free.pop(offset)
        if span > size:
            segment.free[offset + size] = span - size
        # frombuffer keeps the buffer object alive as long as the storage: when the last tensor on the block goes,
        # so does this view, and its finalizer runs at that very moment.
        view = segment.memory[offset : offset + max(nbytes, 1)]
        storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        alias = torch.frombuffer(segment.memory[offset : offset + max(nbytes, 1)], dtype=torch.uint8)
        key = storage._cdata
        self._aliases[key] = alias.untyped_storage()
        weakref.finalize(view, self._dropped, key, segment, offset, size).atexit = False
        return storage

    def alias_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """The storage beside ``storage`` that does not take its block; None if it is not of this pool."""
        return self._aliases.get(storage._cdata)

    def taken(self) -> frozenset[int]:
        """Addresses of the storages that take a block now."""
        return frozenset(self._aliases)

    def taken_memory(self) -> list[torch.UntypedStorage]:
        """The memory of the blocks that are taken now, without a hold on them."""
        return list(self._aliases.values())

    def trim(self) -> None:
        """Drop the segments of which no block is taken."""
        self._segments = [s for s in self._segments if s.free.get(0) != s.nbytes]

    def _dropped(self, key: int, segment: _Segment, offset: int, size: int) -> None:
        del self._aliases[key]
        segment.give_back(offset, size)

    def _fit(self, size: int) -> tuple[_Segment, int] | None:
        spans = (
            (length, index, offset)
            for index, segment in enumerate(self._segments)
            for offset, length in segment.free.items()
            if length >= size
        )
        best = min(spans, default=None)
        return None if best is None else (self._segments[best[1]], best[2])

    def _grow(self, size: int) -> tuple[_Segment, int]:
        if self.limit is not None and self.nbytes + size > self.limit:
            raise torch.OutOfMemoryError(
                f"tape pool out of memory: {size} bytes asked for, {self.nbytes} of {self.limit} reserved"
            )
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        segment = _Segment(memoryview(raw.data)[start : start + size], {0: size})
        self._segments.append(segment)
        return segment, 0
