"""Memory of the tape backend: a private pool whose blocks are reused as soon as they are
dropped.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

ALIGNMENT = 64  # bytes, as torch's CPU allocator aligns


@dataclass(slots=True)
class _Segment:
    """One piece of host memory, and its free spans: offset -> length."""

    memory: memoryview
    free: dict[int, int] = field(default_factory=dict)

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

    A block is taken while the storage that ``take`` returned lives: it is free at the moment when
    the last tensor on it is dropped. ``alias_of`` gives a second storage on the same memory that
    does not take the block and only keeps the memory itself. Best fit, else a new segment of just
    the size asked for.

    Args:
        limit: Bytes that the pool may reserve, None for no limit. Beyond it ``take`` raises
            torch.OutOfMemoryError, as a GPU would.

    Attributes:
        backend: The backend that made it.
        aliases: A storage beside each that takes a block now, by the address of the latter.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.aliases: dict[int, torch.UntypedStorage] = {}
        self.backend: object = None
        self._limit = limit
        self._segments: list[_Segment] = []

    @property
    def nbytes(self) -> int:
        """Bytes reserved, taken or free."""
        return sum(segment.memory.nbytes for segment in self._segments)

    @property
    def free_bytes(self) -> int:
        """Bytes reserved and not taken."""
        return sum(sum(segment.free.values()) for segment in self._segments)

    def spans(self) -> Iterator[tuple[int, int, bool]]:
        """Stretches of addresses that are taken or free, by their beginning and end, and whether
        they are free.
        """
        for segment in self._segments:
            base, at = np.frombuffer(segment.memory, np.uint8).ctypes.data, 0
            for offset, length in [*sorted(segment.free.items()), (segment.memory.nbytes, 0)]:
                if at < offset:
                    yield base + at, base + offset, False
                if length:
                    yield base + offset, base + offset + length, True
                at = offset + length

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of ``nbytes`` bytes on a block of the pool. It still holds its former
        contents.
        """
        size = max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT
        spans = [
            (length, index, offset)
            for index, segment in enumerate(self._segments)
            for offset, length in segment.free.items()
            if length >= size
        ]
        span, index, offset = min(spans) if spans else self._grow(size)
        segment = self._segments[index]
        del segment.free[offset]
        if span > size:
            segment.free[offset + size] = span - size
        # frombuffer keeps the buffer object alive as long as the storage: when the last tensor on
        # the block goes, so does this view, and its finalizer runs at that very moment.
        view = segment.memory[offset : offset + max(nbytes, 1)]
        storage = torch.frombuffer(view, dtype=torch.uint8).untyped_storage()
        beside = segment.memory[offset : offset + max(nbytes, 1)]
        key = storage._cdata
        self.aliases[key] = torch.frombuffer(beside, dtype=torch.uint8).untyped_storage()
        weakref.finalize(view, self._dropped, key, segment, offset, size).atexit = False
        return storage

    def alias_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """The storage beside ``storage`` that does not take its block; None if it is not of this
        pool.
        """
        return self.aliases.get(storage._cdata)

    def trim(self) -> None:
        """Drop the segments of which no block is taken."""
        self._segments = [s for s in self._segments if s.free.get(0) != s.memory.nbytes]

    def _dropped(self, key: int, segment: _Segment, offset: int, size: int) -> None:
        del self.aliases[key]
        segment.give_back(offset, size)

    def _grow(self, size: int) -> tuple[int, int, int]:
        if self._limit is not None and self.nbytes + size > self._limit:
            raise torch.OutOfMemoryError(
                f"tape pool out of memory: {size} bytes asked for, {self.nbytes} of {self._limit} "
                "reserved"
            )
        raw = np.empty(size + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self._segments.append(_Segment(memoryview(raw.data)[start : start + size], {0: size}))
        return size, len(self._segments) - 1, 0
