"""Pools and graphs of torch.cuda, and the memory that pools hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class CudaPool:
    """A pool's handle, and the graphs that keep it alive.

    torch forgets a pool with its last graph and then refuses captures into it: the next one gets a new handle.
    ``ranges`` are the addresses of its segments when ``listed`` was (handle, bytes that torch had ever reserved).
    """

    handle: Any
    graphs: weakref.WeakSet[CudaGraph] = field(default_factory=weakref.WeakSet)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    listed: tuple[Any, int] | None = None


@dataclass(slots=True, eq=False, weakref_slot=True)
class CudaGraph:
    """One CUDA graph and the pool that it captures into."""

    pool: CudaPool
    graph: torch.cuda.CUDAGraph
    captured: bool = False
    stream: torch.cuda.Stream | None = None

    def drop(self) -> None:
        """Free the graph; the pool's memory is free for the allocator once its last graph is dropped."""
        self.graph.reset()
        self.pool.graphs.discard(self)
        self.captured = False


def segments_of(device: torch.device, pools: Iterable[CudaPool]) -> list[dict[str, Any]]:
    """The allocator's segments of some pools, as torch's snapshot has them.

    Picked from the list of all: asked for one pool, or without traces, torch.cuda.memory_snapshot takes a reference too
    many from the numbers of the pool's handle (pytorch pull request 196366), and the process crashes some time after
    the 256th pool.
    """
    segments = torch.cuda.memory._snapshot()["segments"]
    handles = {pool.handle for pool in pools}
    return [s for s in segments if s["segment_pool_id"] in handles and s["device"] == device.index]
