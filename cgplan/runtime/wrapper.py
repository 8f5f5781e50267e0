"""CUDAGraphWrapper: a callable that captures itself once for each batch descriptor and replays afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from cgplan.descriptors import BatchDescriptor
from cgplan.errors import CgplanError, SealedError
from cgplan.graphs import GraphBackend, select_backend
from cgplan.modes import RUNTIME_MODES, CUDAGraphMode
from cgplan.runtime.context import CaptureScope, ForwardContext, current_forward_context


@dataclass(frozen=True, slots=True)
class CUDAGraphOptions:
    """How a wrapper captures.

    Attributes:
        borrow_outputs: Hand out outputs that do not hold their memory in the pool, so that later captures reuse it:
            an output is then valid until the next replay of any graph in the pool. False: outputs hold their memory.
        num_of_warmups: Eager runs before a capture outside of a session; a session has its own.
    """

    borrow_outputs: bool = True
    num_of_warmups: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class CUDAGraphEntry:
    """One captured graph.

    Attributes:
        descriptor: Its key.
        graph: The backend's graph.
        output: What the callable returned at capture, on graph memory; each replay overwrites it.
        input_addresses: Addresses of the tensors among the arguments at capture.
        capture_seconds: From begin to the end of the capture, instantiation included.
    """

    descriptor: BatchDescriptor
    graph: Any
    output: Any
    input_addresses: tuple[int, ...]
    capture_seconds: float


class CUDAGraphWrapper:
    """Runs ``runnable`` by graphs where the forward context's runtime mode is the wrapper's, else as it is.

    The first call with a new descriptor captures, if capturing is allowed: outside of any runner it is, inside a
    session it is, and once a runner is sealed it is an error. Later calls replay: arguments are not looked at, so
    they must lie where they lay at capture. Wrappers can be nested: FULL outside, PIECEWISE inside.

    Args:
        runnable: What is captured.
        runtime_mode: FULL or PIECEWISE.
        backend: Device; chosen as for ``auto`` if absent.
        pool: Graph pool; the session's if absent, and the wrapper's own outside of any session. The wrapper owns its
            graphs, not the pool.
        options: How it captures.
    """

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode,
        *,
        backend: GraphBackend | None = None,
        pool: Any = None,
        options: CUDAGraphOptions = CUDAGraphOptions(),
    ) -> None:
        if runtime_mode not in RUNTIME_MODES or runtime_mode is CUDAGraphMode.NONE:
            raise CgplanError(
                f"a graph wrapper cannot have the mode {runtime_mode}", remedy="Choose FULL or PIECEWISE."
            )
        self.runnable = runnable
        self.runtime_mode = runtime_mode
        self.backend = backend or select_backend()
        self.options = options
        self.entries: dict[BatchDescriptor, CUDAGraphEntry] = {}
        self._pool = pool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, capture or pass through. The result of a replay is the captured output, overwritten."""
        context = current_forward_context()
        if context is None or context.runtime_mode is not self.runtime_mode:
            return self.runnable(*args, **kwargs)
        entry = self.entries.get(context.descriptor)
        if entry is None:
            entry = self._capture(context, args, kwargs)
            if context.scope is not None and self.runtime_mode is CUDAGraphMode.FULL:
                return entry.output  # in a session nobody reads it; between PIECEWISE segments the next piece does
        self.backend.replay(entry.graph)
        return entry.output

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped callable, so that a wrapped module still looks like one."""
        if name == "runnable":  # not set yet
            raise AttributeError(name)
        return getattr(self.runnable, name)

    def reset(self) -> None:
        """Free all graphs. Outputs that were handed out are no longer valid."""
        for entry in self.entries.values():
            self.backend.reset(entry.graph)
        self.entries.clear()

    def _capture(self, context: ForwardContext, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CUDAGraphEntry:
        scope = context.scope
        if scope is not None and not scope.is_open:
            raise SealedError(
                f"no {self.runtime_mode} graph for {context.descriptor}, and the runner is sealed",
                remedy="Add the size to cudagraph_capture_sizes, or capture again in a new session.",
            )
        with self.backend.session():
            for _ in range(self.options.num_of_warmups if scope is None else 0):
                context.derived.clear()
                self.runnable(*args, **kwargs)
            context.derived.clear()  # what a warm-up derived would be frozen into the graph as it is now
            graph = self.backend.new_graph(self._choose_pool(scope))
            start = time.perf_counter()
            with self.backend.capturing(graph):
                output = self.runnable(*args, **kwargs)
            seconds = time.perf_counter() - start
            context.derived.clear()  # and this lies on graph memory
        if self.options.borrow_outputs:
            output = tree_map_only(torch.Tensor, self.backend.borrow, output)
        addresses = tuple(t.data_ptr() for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor))
        entry = CUDAGraphEntry(context.descriptor, graph, output, addresses, seconds)
        self.entries[context.descriptor] = entry
        if scope is not None:
            scope.entries.append(entry)
        return entry

    def _choose_pool(self, scope: CaptureScope | None) -> Any:
        if self._pool is None and scope is None:
            self._pool = self.backend.new_pool()
        return scope.pool if self._pool is None and scope is not None else self._pool
