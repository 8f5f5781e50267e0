"""CaptureSession: captures a plan, in order, in one go; frees everything if it fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cgplan.config import Config
from cgplan.descriptors import BatchDescriptor
from cgplan.errors import CaptureError, PlanError
from cgplan.graphs import GraphBackend, MemoryReading
from cgplan.graphs.host_sync import find_host_sync
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan, config_hash
from cgplan.reports.records import CaptureReport, GraphRecord
from cgplan.runtime.environment import describe_environment
from cgplan.runtime.failures import drop_locals, explain_failure
from cgplan.runtime.graphed import GraphedModel
from cgplan.runtime.outputs import OutputRows
from cgplan.runtime.runner import GraphRunner
from cgplan.runtime.wrapper import CUDAGraphEntry


@dataclass(frozen=True, slots=True)
class CaptureProgress:
    """How far a session is: key ``index`` (from 0) of ``total`` comes next."""

    index: int
    total: int
    mode: CUDAGraphMode
    descriptor: BatchDescriptor


@dataclass(frozen=True, slots=True)
class _Captured:
    """One key: its graphs, and (device memory, pool bytes) before and after the capture."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    entries: tuple[CUDAGraphEntry, ...]
    before: tuple[MemoryReading, int]
    after: tuple[MemoryReading, int]
    warmup_seconds: float
    reading_seconds: float


class CaptureSession:
    """Captures every key of a plan and returns a sealed runner.

    Args:
        plan: What to capture.
        model: Any callable or nn.Module; called with the declared inputs by name.
        backend: The device.
        config: Inputs, metadata and how to capture.
        progress: Called before each key.
    """

    def __init__(
        self,
        plan: Plan,
        model: Callable[..., Any],
        backend: GraphBackend,
        config: Config,
        *,
        progress: Callable[[CaptureProgress], None] | None = None,
    ) -> None:
        self._plan = plan
        self._model = model
        self._backend = backend
        self._config = config
        self._progress = progress or (lambda _: None)

    def run(self) -> GraphRunner:
        """Capture all keys.

        Raises:
            CaptureError: a key could not be captured (HostSyncError, CaptureMemoryError and OutputShapeError say why);
                everything of this session is freed and the model runs as before.
            ModelError: the model failed before its capture began.
        """
        backend, config = self._backend, self._config
        if self._plan.config_hash != config_hash(config):
            raise PlanError(
                f"the plan was made from configuration {self._plan.config_hash}, not from {config_hash(config)}",
                remedy="Pass build_plan(config) of the same configuration.",
            )
        backend.release_cached()
        before, start = backend.memory(), time.perf_counter()
        graphed = GraphedModel(self._plan, config, self._model, backend)
        rows = config.model.output_rows if config.model else "num_tokens"
        outputs = OutputRows(rows, self._plan.query_len, config.compilation.outputs == "clone")
        captured: list[_Captured] = []
        try:
            with backend.session(), torch.no_grad():
                for index, (mode, descriptor) in enumerate(self._plan.keys):
                    self._progress(CaptureProgress(index, len(self._plan.keys), mode, descriptor))
                    captured.append(self._capture(graphed, outputs, mode, descriptor))
                graphed.buffers.restore()
                backend.synchronize()
        except BaseException as error:
            drop_locals(error)
            captured.clear()  # the traceback holds this frame
            graphed.free()
            raise
        graphed.seal()
        inspecting = time.perf_counter()
        records = tuple(self._record(c) for c in captured)
        end = time.perf_counter()
        backend.release_cached()
        inspection = end - inspecting + sum(c.reading_seconds for c in captured)
        report = self._report(graphed, records, before, (end - start, inspection))
        return GraphRunner(graphed, outputs, report, self.run)

    def _capture(
        self, graphed: GraphedModel, outputs: OutputRows, mode: CUDAGraphMode, descriptor: BatchDescriptor
    ) -> _Captured:
        backend, scope, capturing = self._backend, graphed.scope, False
        views = graphed.views(descriptor)
        try:
            start = time.perf_counter()
            for _ in range(self._config.compilation.cudagraph_num_of_warmups):
                graphed.run_eager(descriptor, views)
            backend.synchronize()
            warm = time.perf_counter()
            before = (backend.memory(), backend.pool_bytes(scope.pool))
            read = time.perf_counter()
            capturing = True
            output = graphed.run_graphed(mode, descriptor, views)
        except Exception as error:
            failure = explain_failure(
                error,
                mode,
                descriptor,
                capturing=capturing,
                free=backend.memory().free,
                find_host_sync=lambda: find_host_sync(lambda: graphed.run_eager(descriptor, views), backend.device),
            )
            raise failure from (error if failure is not error else error.__cause__)
        graphed.returns_nothing = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output))
        outputs.check(output, descriptor, graphed.padded_reqs(descriptor))
        entries, scope.entries = scope.entries, []
        if not entries:
            raise CaptureError(
                f"nothing in the model captured for {mode} {descriptor}",
                remedy="With piecewise: wrappers, wrap the model's segments in CUDAGraphWrapper(..., "
                "CUDAGraphMode.PIECEWISE); or choose piecewise: ops, FULL or FULL_DECODE_ONLY.",
            )
        done = time.perf_counter()
        after = (backend.memory(), backend.pool_bytes(scope.pool))
        reading = (read - warm) + (time.perf_counter() - done)
        return _Captured(mode, descriptor, tuple(entries), before, after, warm - start, reading)

    def _record(self, captured: _Captured) -> GraphRecord:
        nodes = [self._backend.num_nodes(graph) for entry in captured.entries for graph in entry.segments]
        return GraphRecord(
            mode=captured.mode,
            descriptor=captured.descriptor,
            graphs=len(nodes),
            nodes=None if None in nodes else sum(n or 0 for n in nodes),
            eager_pieces=sum(entry.eager_pieces for entry in captured.entries),
            pool_growth=captured.after[1] - captured.before[1],
            driver_bytes=self._driver_bytes(captured.before[0], captured.after[0]),
            warmup_seconds=captured.warmup_seconds,
            capture_seconds=sum(entry.capture_seconds for entry in captured.entries),
        )

    def _driver_bytes(self, before: MemoryReading, after: MemoryReading) -> int | None:
        """Free memory lost in between that torch's allocator did not reserve."""
        if not self._backend.supports("driver_bytes") or after.free is None or before.free is None:
            return None
        return (before.free - after.free) - (after.reserved - before.reserved)

    def _report(
        self,
        graphed: GraphedModel,
        records: tuple[GraphRecord, ...],
        before: MemoryReading,
        seconds: tuple[float, float],
    ) -> CaptureReport:
        borrowed, after = self._backend.supports("borrow"), self._backend.memory()
        empty = [str(r.descriptor) for r in records if r.nodes == 0]
        warnings = list(self._plan.warnings)
        if empty:
            warnings.append(f"graphs without any kernel: {', '.join(empty)}; does the model run on this device?")
        if graphed.returns_nothing:
            warnings.append("the model returned no tensor: is there a return in its forward?")
        if isinstance(self._model, torch.nn.Module) and self._model.training:
            warnings.append("the model is in training mode: dropout and batch norm run as in training; call .eval()")
        if not borrowed:
            warnings.append("this torch cannot borrow outputs: each graph holds its own output memory")
        return CaptureReport(
            environment=describe_environment(self._backend, self._plan.config_hash),
            plan=self._plan,
            records=records,
            pool_bytes=self._backend.pool_bytes(graphed.scope.pool),
            static_bytes=graphed.buffers.nbytes,
            driver_bytes=self._driver_bytes(before, after),
            free_before=before.free,
            free_after=after.free,
            session_seconds=seconds[0],
            inspection_seconds=seconds[1],
            split=graphed.route.describe(),
            borrowed_outputs=borrowed,
            warnings=tuple(warnings),
        )
