"""Stand-ins for devices with less memory than this machine, and with a driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from cgplan.graphs import MemoryReading
from cgplan.graphs.backend import Feature
from cgplan.graphs.tape import TapeBackend


class WithDriver(TapeBackend):
    """A tape with a driver that takes memory for graphs in chunks, on a device of a given size.

    Args:
        rate: Bytes for each recorded operator.
        chunk: What the driver takes at a time. ``keeps``: it gives none back.
        total: Bytes of the device.
        workspace: Bytes that the first graph's warm-up leaves in the allocator for good.
    """

    def __init__(
        self, rate: int = 1000, chunk: int = 4096, total: int = 1 << 30, *, keeps: bool = False, workspace: int = 0
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

    def supports(self, feature: Feature) -> bool:
        return feature == "driver_bytes" or super().supports(feature)

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
