"""Stand-ins for devices: with less memory than this machine, with a driver, with streams, with outputs that end."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from cgplan.backends import MemoryReading
from cgplan.backends.tape import TapeBackend, TapePool


class LimitedPool(TapePool):
    limit = 0

    def _new_segment(self, size: int) -> int:
        if self.nbytes + size > self.limit:
            raise torch.OutOfMemoryError(
                f"tape pool out of memory: {size} bytes asked for, {self.nbytes} of {self.limit} reserved"
            )
        return super()._new_segment(size)


def limited(pool: TapePool, limit: int | None) -> TapePool:
    """The pool, which holds ``limit`` bytes at most; beyond them ``take`` raises torch.OutOfMemoryError."""
    if limit is not None:
        pool.__class__ = LimitedPool
        pool.limit = limit  # type: ignore[attr-defined]
    return pool


class LimitedTape(TapeBackend):
    """Of each pool ``limit`` bytes."""

    def __init__(self, limit: int | None) -> None:
        super().__init__()
        self.limit = limit

    def new_pool(self) -> TapePool:
        return limited(super().new_pool(), self.limit)


class WithDriver(TapeBackend):
    """A tape with a driver that takes memory for graphs in chunks, on a device of a given size.

    Args:
        rate: Bytes for each recorded operator.
        chunk: What the driver takes at a time. ``keeps``: it gives none back.
        total: Bytes of the device.
        workspace: Bytes that the first graph's warm-up leaves in the allocator for good.
    """

    counts_driver_bytes = True

    def __init__(
        self,
        rate: int = 1000,
        chunk: int = 4096,
        total: int = 1 << 30,
        *,
        keeps: bool = False,
        workspace: int = 0,
    ) -> None:
        super().__init__()
        self.rate, self.chunk, self.total, self.keeps = rate, chunk, total, keeps
        self.workspace, self.warm = workspace, False
        self.nodes = 0
        self.taken = 0
        self.captures = 0

    def synchronize(self) -> None:
        self.warm = True

    def end(self, graph: Any) -> None:
        super().end(graph)
        self.captures += 1
        self._count(len(graph.steps))

    def reset(self, graph: Any) -> None:
        if graph.steps is not None:
            self._count(-len(graph.steps))
        super().reset(graph)

    def memory(self) -> MemoryReading:
        reserved = super().memory().reserved + self.workspace * self.warm
        return MemoryReading(self.total - reserved - self.taken, self.total, reserved)

    def _count(self, operators: int) -> None:
        self.nodes += operators
        needed = -(-self.nodes * self.rate // self.chunk) * self.chunk
        self.taken = max(self.taken, needed) if self.keeps else needed


class Watching(TapeBackend):
    """A tape on which it matters whether somebody still holds an output, as on a GPU: all do while ``held``."""

    held = False

    def watch(self, tensor: torch.Tensor) -> Callable[[], bool]:
        return lambda: self.held


class Unowned(TapeBackend):
    """A tape whose borrowed outputs do not hold their memory, and which knows who holds them, as on a GPU."""

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = super().borrow(tensor).untyped_storage()  # held by the tape; the one below is not
        raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
        with _disable_current_modes():
            alias = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
            return torch.empty(0, dtype=tensor.dtype).set_(
                alias, tensor.storage_offset(), tensor.shape, tensor.stride()
            )

    def watch(self, tensor: torch.Tensor) -> Callable[[], bool]:
        held = StorageWeakRef(tensor.untyped_storage())
        return lambda: not held.expired()


class WithStreams(TapeBackend):
    """A tape with streams: ``now`` is the current one, ``busy`` are those with work left."""

    now = 1

    def __init__(self) -> None:
        super().__init__()
        self.busy: set[int] = set()

    def stream_getter(self) -> Callable[[], int]:
        return lambda: self.now

    def is_busy(self, stream: int) -> bool:
        return stream in self.busy
