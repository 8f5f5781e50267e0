"""Pools and graphs of torch.cuda, and the memory that pools hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, eq=False)
class CudaPool:
    """A pool: torch's handle of it, and the graphs that keep it alive.

    torch forgets a pool with its last graph and then refuses captures into it, and it refuses them after a capture that
    failed, see Note [Failed captures] in cuda.py: the next capture gets a new handle. Graphs that were captured before
    keep theirs, and all of them are one pool here.

    Attributes:
        handles: Of all memory that it consists of; the last one is captured into.
        ranges: Addresses of its segments when ``listed`` was (handles, bytes that torch had ever reserved).
    """

    handles: tuple[Any, ...]
    graphs: weakref.WeakSet[CudaGraph] = field(default_factory=weakref.WeakSet)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    listed: tuple[Any, int] | None = None
    is_spoiled: bool = False

    @property
    def handle(self) -> Any:
        """What captures are made into."""
        return self.handles[-1]

    def make_ready(self) -> None:
        """Take a new handle where torch would refuse the present one."""
        if not self.graphs:
            self.handles = (torch.cuda.graph_pool_handle(),)
        elif self.is_spoiled:
            self.handles += (torch.cuda.graph_pool_handle(),)
        self.is_spoiled = False


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
    handles = {handle for pool in pools for handle in pool.handles}
    return [s for s in segments if s["segment_pool_id"] in handles and s["device"] == device.index]
