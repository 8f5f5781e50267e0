"""A private pool of the tape."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray

ALIGNMENT = 64  # bytes, as torch


class TapePool:
    """Blocks of host memory, freed by the last tensor on them.

    Args:
        limit: In bytes; beyond it ``take`` raises torch.OutOfMemoryError.

    Attributes:
        aliases: A second storage of each taken block, without a hold, by the first one's address.
    """

    def __init__(
        self,
        limit: int | None = None,
        backend: object = None,
    ) -> None:
        self.backend = backend
        self.aliases: dict[int, torch.UntypedStorage] = {}
        self.graphs = weakref.WeakSet[object]()
        self.nbytes = 0  # reserved, taken or free
        self._limit = limit
        self._segments: dict[int, NDArray[np.uint8]] = {}  # by address
        self._free: dict[int, int] = {}  # lengths by address

    @property
    def held(self) -> int:
        return self.nbytes - sum(self._free.values())

    def spans(self) -> Iterator[tuple[int, int, bool]]:
        """First address, end, and whether it is free."""
        for start, segment in self._segments.items():
            end = start + segment.nbytes
            at = start
            for free in sorted(self._free):
                if not start <= free < end:
                    continue
                if at < free:
                    yield at, free, False
                at = free + self._free[free]
                yield free, at, True
            if at < end:
                yield at, end, False

    def take(self, nbytes: int) -> torch.UntypedStorage:
        """With the block's old contents."""
        nbytes = max(nbytes, 1)
        size = math.ceil(nbytes / ALIGNMENT) * ALIGNMENT
        start = None
        for at, length in self._free.items():
            if length >= size and (start is None or length < self._free[start]):
                start = at
        if start is None:
            start = self._new_segment(size)
        left = self._free.pop(start) - size
        if left:
            self._free[start + size] = left
        base = 0
        for address in self._segments:
            if base < address <= start:
                base = address
        first = start - base
        memory = self._segments[base][first : first + nbytes]
        storage = torch.from_numpy(memory).untyped_storage()
        alias = torch.from_numpy(memory.view()).untyped_storage()
        key = storage._cdata
        self.aliases[key] = alias
        # it dies with the last tensor on the block
        finalizer = weakref.finalize(
            memory,
            self._give_back,
            key,
            start,
            start + size,
        )
        finalizer.atexit = False
        return storage

    def trim(self) -> None:
        for start, segment in list(self._segments.items()):
            if self._free.get(start) == segment.nbytes:
                del self._segments[start], self._free[start]
                self.nbytes -= segment.nbytes

    def _give_back(
        self,
        key: int,
        start: int,
        end: int,
    ) -> None:
        del self.aliases[key]
        for at, length in list(self._free.items()):
            if at + length == start:
                del self._free[at]
                start = at
            elif at == end:
                del self._free[at]
                end += length
        self._free[start] = end - start

    def _new_segment(self, size: int) -> int:
        if self._limit is not None and self.nbytes + size > self._limit:
            raise torch.OutOfMemoryError(
                f"tape pool out of memory: {size} bytes asked for, {self.nbytes} of {self._limit} "
                "reserved"
            )
        raw = np.empty(size + ALIGNMENT, np.uint8)
        skipped = -raw.ctypes.data % ALIGNMENT
        segment = raw[skipped : skipped + size]
        start = segment.ctypes.data
        self._segments[start] = segment
        self.nbytes += size
        self._free[start] = size
        return int(start)
