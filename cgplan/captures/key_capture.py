"""One key of a plan: warmed up, captured, measured."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cgplan.backends import GraphBackend, MemoryReading
from cgplan.backends.host_sync import find_host_sync
from cgplan.buffers.outputs import OutputRows
from cgplan.captures.failures import drop_locals, explain_failure
from cgplan.captures.model_graphs import GraphedModel
from cgplan.errors import CaptureError
from cgplan.graphs.ambient import random_state_kept
from cgplan.graphs.operator_log import ALREADY_PROFILED, OperatorCounts, end_prepared_trace
from cgplan.graphs.rebound import check_rebound
from cgplan.graphs.state_kept import capture_noted, look_at_state
from cgplan.graphs.wrapper import CUDAGraphEntry
from cgplan.modes import BatchDescriptor, CUDAGraphMode
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
        warmup_seconds: Time of the eager warm-ups.
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
    def key(self) -> tuple[CUDAGraphMode, BatchDescriptor]:
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


class KeyCapture:
    """Captures keys of a model, one at a time, inside the backend's session.

    Args:
        graphed: The model; the graphs are its own.
        outputs: What the model's outputs are checked against.
        in_service: Whether a key that fails leaves the others as they are.
    """

    def __init__(self, graphed: GraphedModel, outputs: OutputRows, *, in_service: bool = False) -> None:
        self._graphed = graphed
        self._in_service = in_service
        self._outputs = outputs
        self._backend = graphed.backend
        self._watched: set[CUDAGraphMode] = set()

    @classmethod
    def of(cls, graphed: GraphedModel, *, in_service: bool = False) -> KeyCapture:
        """With the outputs that the configuration describes."""
        config = graphed.config
        rows = config.model.output_rows if config.model else "num_tokens"
        outputs = OutputRows(rows, graphed.plan.query_len, config.compilation.outputs == "clone")
        return cls(graphed, outputs, in_service=in_service)

    @property
    def outputs(self) -> OutputRows:
        """How outputs are cut."""
        return self._outputs

    def capture(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> CapturedKey:
        """Warm up and capture one key.

        Raises:
            CaptureError: the key could not be captured; its subclasses say why.
            ModelError: the model failed before its capture began.
        """
        # Whoever captures between two batches draws the numbers that they would have drawn without it.
        with random_state_kept(self._backend.device, self._graphed.generators):
            return self._capture(mode, descriptor)

    def _capture(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> CapturedKey:
        backend, graphed, scope, capturing = self._backend, self._graphed, self._graphed.scope, False
        scope.pool = graphed.pools.of((mode, descriptor))
        try:
            cold = look_at_state()
            start = time.perf_counter()
            for _ in range(graphed.config.compilation.cudagraph_num_of_warmups):
                graphed.warm_up(mode, descriptor)
            backend.synchronize()
            warm = time.perf_counter()
            before = (backend.memory(), graphed.pools.nbytes)
            read = time.perf_counter()
            capturing = True
            with capture_noted(cold):
                output = self._run_watched(mode, descriptor, graphed.views(descriptor))
        except Exception as error:
            failure = explain_failure(
                error,
                mode,
                descriptor,
                capturing=capturing,
                free=backend.memory().free,
                find_host_sync=lambda: find_host_sync(
                    lambda: graphed.run_eager(descriptor, graphed.views(descriptor)), backend.device
                ),
                all_freed=not self._in_service,
            )
            raise failure from (error if failure is not error else error.__cause__)
        graphed.returns_nothing = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output))
        self._outputs.check(output, descriptor, graphed.padded_reqs(descriptor))
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
        captured = sum(entry.capture_seconds for entry in entries)
        eager = sum(entry.eager_pieces for entry in entries)
        return CapturedKey(mode, descriptor, tuple(entries), eager, before, after, warm - start, captured, reading)

    def _run_watched(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, views: dict[str, torch.Tensor]) -> Any:
        """Capture, and see to it that the first key of each mode leaves no state behind that graphs would not see."""
        graphed = self._graphed
        lives = mode is CUDAGraphMode.PIECEWISE and graphed.route.name == "wrappers"  # Python code runs on each replay
        before = None if lives or mode in self._watched else graphed.state()
        output = self._run_noted(mode, descriptor, views)
        if before is not None:
            self._watched.add(mode)
            given = list(views.values())
            graphed.notes += check_rebound(before, lambda: graphed.run_eager(descriptor, views), given)
        return output

    def _run_noted(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, views: dict[str, torch.Tensor]) -> Any:
        """Capture; the first PIECEWISE key tells what runs in segments, unless the forward itself has a profiler."""
        graphed = self._graphed
        if mode is CUDAGraphMode.PIECEWISE:
            try:
                with graphed.route.noting_operators():
                    return graphed.run_graphed(mode, descriptor, views)
            except RuntimeError as error:
                if ALREADY_PROFILED not in str(error):
                    raise
                graphed.route.operators = OperatorCounts()
                drop_locals(error)
                end_prepared_trace()
        return graphed.run_graphed(mode, descriptor, views)

    def drop_all(self) -> None:
        """Free all graphs that were captured so far, and their pool; more can be captured.

        All, because library workspaces are shared: torch 2.12 and later release those of the capture stream with each
        graph that is freed, whoever else still uses them.
        """
        scope = self._graphed.scope
        self._backend.synchronize()
        for wrapper in scope.wrappers:
            wrapper.reset(scope)
        scope.entries, scope.wrappers = [], []
        self._backend.release_cached()
        self._graphed.pools.renew()
