"""One key of a plan: warmed up, captured, measured."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch.utils._pytree import tree_leaves

from cgplan.backends import GraphBackend, MemoryReading
from cgplan.captures.failures import explain_failure
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.errors import CaptureError
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.wrapper import CUDAGraphEntry
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.reports.records import GraphRecord

_WRAP = (
    "With piecewise: wrappers, wrap the model's segments in CUDAGraphWrapper(..., CUDAGraphMode.PIECEWISE); or choose "
    "piecewise: ops, FULL or FULL_DECODE_ONLY."
)
_COMPUTE = (
    "Outside of eager pieces the forward computed nothing on the padding values of the capture: name fewer of them, or "
    "choose FULL or NONE. Where it has functions under eager_break_during_capture that it did not call then, set "
    "piecewise: modules."
)


@dataclass(frozen=True, slots=True)
class CapturedKey:
    """One key: its graphs, and (device memory, bytes of all pools) before and after the capture.

    Attributes:
        eager_pieces: Functions that run eagerly between the graphs.
        warmup_seconds: Time of the eager warm-ups, and of the look at the first key of a mode.
        capture_seconds: From begin to instantiated graph, of all its graphs.
        reading_seconds: Time that the two readings took.
    """

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    entries: tuple[CUDAGraphEntry, ...]
    eager_pieces: int
    before: tuple[MemoryReading, int]
    after: tuple[MemoryReading, int]
    warmup_seconds: float
    capture_seconds: float
    reading_seconds: float

    @property
    def key(self) -> Key:
        """As plans hold it."""
        return self.mode, self.descriptor

    def record(self, backend: GraphBackend) -> GraphRecord:
        """What a report holds of it. Counts the nodes, which takes time."""
        nodes = [backend.num_nodes(graph) for entry in self.entries for graph in entry.segments]
        return GraphRecord(
            mode=self.mode,
            descriptor=self.descriptor,
            graphs=len(nodes),
            nodes=None if None in nodes else sum(n or 0 for n in nodes),
            eager_pieces=self.eager_pieces,
            pool_growth=self.after[1] - self.before[1],
            driver_bytes=driver_bytes(backend, self.before[0], self.after[0]),
            warmup_seconds=self.warmup_seconds,
            capture_seconds=self.capture_seconds,
            segment_nodes=tuple(n for n in nodes if n is not None) if None not in nodes else (),
        )


def driver_bytes(backend: GraphBackend, before: MemoryReading, after: MemoryReading) -> int | None:
    """Free memory lost in between that torch's allocator did not reserve; None where there is no driver."""
    if not backend.supports("driver_bytes") or after.free is None or before.free is None:
        return None
    return (before.free - after.free) - (after.reserved - before.reserved)


def capture_key(graphed: ModelGraphs, key: Key, *, in_service: bool = False) -> CapturedKey:
    """Warm up and capture one key, inside the backend's session. The model is as it was afterwards.

    Args:
        graphed: The model; the graphs are its own.
        key: What is captured.
        in_service: Whether a key that fails leaves the others as they are; for the message.

    Raises:
        CaptureError: the key could not be captured; its subclasses say why.
        ModelError: the model failed before its capture began.
    """
    (mode, descriptor), backend, scope, capturing = key, graphed.backend, graphed.scope, False
    scope.pool = graphed.pools.of(key)
    with graphed.keeping_state(), ExitStack() as stack:
        try:
            start = time.perf_counter()
            graphed.look(mode, descriptor)
            # A capture between two batches does not change later random numbers.
            stack.enter_context(random_state_kept(backend.device, graphed.generators))
            # Compiled parts are compiled by a run ahead of the capture, never in it.
            for _ in range(graphed.config.compilation.cudagraph_num_of_warmups or int(graphed.is_compiled)):
                graphed.warm_up(mode, descriptor)
            backend.synchronize()
            warm = time.perf_counter()
            before = (backend.memory(), graphed.pools.nbytes)
            read = time.perf_counter()
            capturing = True
            with graphed.noting_capture():
                output = graphed.run_graphed(mode, descriptor, graphed.views(descriptor))
        except Exception as error:
            failure = explain_failure(
                error,
                mode,
                descriptor,
                capturing=capturing,
                free=backend.memory().free,
                host_sync=graphed.footprints[mode].host_sync if mode in graphed.footprints else None,
                all_freed=not in_service,
            )
            raise failure from (error if failure is not error else error.__cause__)
        graphed.returns_nothing = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output))
        graphed.outputs.check(output, descriptor, graphed.padded_reqs(descriptor))
        entries, scope.entries = scope.entries, []
        if not entries:
            raise CaptureError(
                f"nothing in the model captured for {mode} {descriptor}",
                remedy=_WRAP if graphed.route.name == "wrappers" else _COMPUTE,
            )
        done = time.perf_counter()
        scope.wrappers = list(dict.fromkeys(scope.wrappers))  # each capture adds its own
        after = (backend.memory(), graphed.pools.nbytes)
        reading = (read - warm) + (time.perf_counter() - done)
        seconds = sum(entry.capture_seconds for entry in entries)
        pieces = sum(entry.eager_pieces for entry in entries)
        return CapturedKey(mode, descriptor, tuple(entries), pieces, before, after, warm - start, seconds, reading)
