"""GraphRunner: a model with its graphs. A call dispatches, copies in, pads, replays and slices."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from cgplan.config import Config
from cgplan.descriptors import BatchDescriptor
from cgplan.errors import CgplanError, DispatchMissError, InputError
from cgplan.graphs import GraphBackend
from cgplan.modes import CUDAGraphMode
from cgplan.planning import CudagraphDispatcher, MissReason, Plan
from cgplan.reports.records import CaptureReport
from cgplan.runtime.batch import Batch, BatchReader
from cgplan.runtime.debug import DebugChecks
from cgplan.runtime.graphed import GraphedModel
from cgplan.runtime.outputs import OutputRows

_MISS_REMEDY = {
    MissReason.TOO_LARGE: "Add the size to cudagraph_capture_sizes",
}


@dataclass(slots=True)
class RunnerStats:
    """What calls were answered with.

    Attributes:
        replays: Calls by (runtime mode, descriptor) of the graph that served them.
        eager: Calls that ran eagerly, by reason.
        padded_rows: Rows of padding that graphs computed besides the batches.
    """

    replays: Counter[tuple[CUDAGraphMode, BatchDescriptor]] = field(default_factory=Counter)
    eager: Counter[MissReason] = field(default_factory=Counter)
    padded_rows: int = 0

    def reset(self) -> None:
        """Forget all counts."""
        self.replays.clear()
        self.eager.clear()
        self.padded_rows = 0


@dataclass(frozen=True, slots=True)
class Route:
    """Where a batch goes.

    Attributes:
        batch: Its rows.
        uniform: Whether it counts as uniform decode.
        num_active_loras: Distinct adapters in it.
        mode, descriptor: What the dispatcher answered.
    """

    batch: Batch
    uniform: bool
    num_active_loras: int
    mode: CUDAGraphMode
    descriptor: BatchDescriptor

    @property
    def unpadded(self) -> BatchDescriptor:
        """The batch as an eager forward sees it."""
        tokens, reqs = self.batch.num_tokens, self.batch.num_reqs
        uniform = self.uniform and reqs is not None
        return BatchDescriptor(tokens, reqs, uniform, self.num_active_loras > 0, self.num_active_loras)


class GraphRunner:
    """Runs a model by captured graphs. A CaptureSession makes it; ``close`` frees what it owns.

    It owns the static buffers, the graphs and their pool. Outputs are borrowed unless ``compilation.outputs`` is
    ``clone``: views of graph memory, overwritten by the next call of this runner. Not for use from several threads.

    Attributes:
        report: What the capture cost.
        stats: What calls were answered with so far.
    """

    def __init__(
        self,
        graphed: GraphedModel,
        outputs: OutputRows,
        report: CaptureReport,
        capture_again: Callable[[], GraphRunner],
    ) -> None:
        self.report = report
        self.stats = RunnerStats()
        self._graphed = graphed
        self._outputs = outputs
        self._capture_again = capture_again
        self._closed = False
        self._in_call = threading.Lock()
        self._debug = DebugChecks(graphed) if graphed.config.compilation.debug else None
        self._dispatcher = CudagraphDispatcher(graphed.plan)
        self._reader = BatchReader({**graphed.config.inputs, **graphed.config.metadata}, graphed.backend.device)

    @property
    def plan(self) -> Plan:
        """What was captured."""
        return self._graphed.plan

    @property
    def config(self) -> Config:
        """What was asked for."""
        return self._graphed.config

    @property
    def backend(self) -> GraphBackend:
        """The device."""
        return self._graphed.backend

    def __call__(
        self, *args: Any, uniform_decode: bool | None = None, num_active_loras: int = 0, **inputs: torch.Tensor
    ) -> Any:
        """Run one batch.

        Args:
            inputs: Every declared input and metadata tensor, by name, unpadded, on the runner's device.
            uniform_decode: Whether every request has ``plan.query_len`` tokens. Absent: for a query length of 1 it
                follows from the counts; for a longer one the batch is taken as mixed.
            num_active_loras: Distinct adapters in the batch.

        Returns:
            What the model returns, with the padding sliced off; see the class for how long it is valid.

        Raises:
            InputError: a tensor does not match its declaration; nothing was launched.
            CaptureError: autocast is not as it was at capture.
            AddressError: memory that the graph uses has moved, see ``compilation.address_check``.
            DispatchMissError: no graph serves the batch and ``compilation.on_miss`` is ``error``.
        """
        if args:
            raise InputError("the runner takes no positional arguments", remedy="Pass every input by its name.")
        if not self._in_call.acquire(blocking=False):
            raise CgplanError(
                "the runner was called while another call was under way", remedy="Call it from one thread at a time."
            )
        try:
            return self._call(self.route(inputs, uniform_decode, num_active_loras), inputs)
        finally:
            self._in_call.release()

    def _call(self, route: Route, inputs: Mapping[str, torch.Tensor]) -> Any:
        self._graphed.check_autocast()
        if route.mode is CUDAGraphMode.NONE:
            self._count_miss(route)
            return self._graphed.run_eager(route.unpadded, inputs)
        self._graphed.check_addresses(route.mode, route.descriptor)
        self._stage(route, inputs)
        self.stats.replays[route.mode, route.descriptor] += 1
        self.stats.padded_rows += route.descriptor.num_tokens - route.batch.num_tokens
        if self._debug is not None:
            return self._debug.replay(
                route.mode, route.descriptor, lambda: self._replay(route), lambda output: self._cut(route, output)
            )
        return self._cut(route, self._replay(route))

    def _replay(self, route: Route) -> Any:
        """The padded output of a staged batch."""
        entry = self._graphed.wrapper.entries.get(route.descriptor) if route.mode is CUDAGraphMode.FULL else None
        if entry is not None:
            self.backend.replay(entry.graph)
            return entry.output
        # PIECEWISE: the model's own code runs, with graphs inside
        output = self._graphed.run_graphed(route.mode, route.descriptor, self._graphed.views(route.descriptor))
        self._outputs.check(output, route.descriptor, self._graphed.padded_reqs(route.descriptor))
        return output

    def _cut(self, route: Route, output: Any) -> Any:
        return self._outputs.cut(output, route.batch.num_tokens, route.batch.num_reqs)

    def run_eagerly(
        self,
        *,
        padded: bool = True,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        **inputs: torch.Tensor,
    ) -> Any:
        """As a call, but the model's own code runs and no graph. Padded as a call pads, it is what a replay must equal.

        Args:
            inputs, uniform_decode, num_active_loras: As for a call.
            padded: Pad to the capture size, in the static buffers; False: run the tensors as they are.
        """
        route = self.route(inputs, uniform_decode, num_active_loras)
        if route.mode is CUDAGraphMode.NONE or not padded:
            return self._graphed.run_eager(route.unpadded, inputs)
        self._stage(route, inputs)
        output = self._graphed.run_eager(route.descriptor, self._graphed.views(route.descriptor))
        return self._outputs.cut(output, route.batch.num_tokens, route.batch.num_reqs)

    def route(
        self, inputs: Mapping[str, torch.Tensor], uniform_decode: bool | None = None, num_active_loras: int = 0
    ) -> Route:
        """Check a batch and dispatch it, without running anything. Arguments and errors as for a call."""
        if self._closed:
            raise CgplanError("the runner is closed", remedy="Capture again.")
        batch = self._reader.read(inputs)
        q, reqs, tokens = self.plan.query_len, batch.num_reqs, batch.num_tokens
        if uniform_decode is None:
            uniform_decode = q == 1 and (reqs is None or reqs == tokens)
        elif uniform_decode and (tokens % q or (reqs is not None and reqs != tokens // q)):
            raise InputError(
                f"uniform_decode=True, but {tokens} tokens are not {'whole' if reqs is None else reqs} requests of {q}",
                remedy="Pass uniform_decode=False for a mixed batch.",
            )
        if reqs is not None and reqs > min(tokens, self.plan.max_num_seqs):
            raise InputError(
                f"the batch has {reqs} requests, but {tokens} tokens and scheduler.max_num_seqs "
                f"{self.plan.max_num_seqs} allow {min(tokens, self.plan.max_num_seqs)}",
                remedy="Each request has at least one token; raise scheduler.max_num_seqs for larger batches.",
            )
        if num_active_loras:
            self._check_loras(num_active_loras)
        mode, descriptor = self._dispatcher.dispatch(tokens, uniform_decode, num_active_loras)
        return Route(batch, uniform_decode, num_active_loras, mode, descriptor)

    def input_views(self, num_tokens: int, num_reqs: int | None = None) -> dict[str, torch.Tensor]:
        """Views of the static buffers for a batch, by name: write into them and pass them to the call.

        Needed with ``cudagraph_copy_inputs: false``; otherwise it saves the copies. The runner owns the memory.
        """
        if self._closed:
            raise CgplanError("the runner is closed", remedy="Capture again.")
        most = self.plan.max_capture_size
        reqs = min(num_tokens, self.plan.max_num_seqs) if num_reqs is None else num_reqs
        if not 0 < num_tokens <= most:
            raise InputError(f"static buffers hold 1 to {most} tokens, asked for {num_tokens}", remedy="Ask for fewer.")
        if not 0 < reqs <= min(num_tokens, self.plan.max_num_seqs):
            raise InputError(
                f"{num_tokens} tokens are 1 to {min(num_tokens, self.plan.max_num_seqs)} requests, asked for {reqs}",
                remedy="Ask for fewer, or raise scheduler.max_num_seqs.",
            )
        return self._graphed.buffers.expose(num_tokens, reqs)

    def graph(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Any:
        """The backend's graph of a FULL key, to replay bare. None if the key has none."""
        entry = self._graphed.wrapper.entries.get(descriptor) if mode is CUDAGraphMode.FULL else None
        return None if entry is None else entry.graph

    def invalidate(self, name: str) -> None:
        """Say that memory which the graphs use has moved (a KV cache that was allocated anew, say).

        Calls that a graph would serve raise AddressError with that name until ``recapture``.
        """
        self._graphed.invalidate(name)

    def recapture(self) -> None:
        """Capture the same plan again, with the model's memory as it is now.

        The old graphs, pool and static buffers are freed first: outputs and ``input_views`` that were handed out are
        no longer valid. Raises as CaptureSession.run does; the runner is then closed.
        """
        self.close()
        fresh = self._capture_again()
        self.report, self._graphed, self._outputs = fresh.report, fresh._graphed, fresh._outputs
        self._debug = fresh._debug
        self._closed = False

    def close(self) -> None:
        """Free graphs, pool and static buffers. Outputs that were handed out are no longer valid."""
        if not self._closed:
            self._closed = True
            self._graphed.free()

    def _stage(self, route: Route, inputs: Mapping[str, torch.Tensor]) -> None:
        """Bring a batch into the static buffers, with padding behind it."""
        descriptor = route.descriptor
        padded_reqs = self._graphed.padded_reqs(descriptor)
        copy = self.config.compilation.cudagraph_copy_inputs
        self._graphed.buffers.stage(inputs, descriptor.num_tokens, padded_reqs, copy=copy)

    def _check_loras(self, num_active_loras: int) -> None:
        most = self.plan.max_loras or 0
        if not 0 <= num_active_loras <= (most and most + 1):  # max_loras + 1 stands for any number, as in descriptors
            raise InputError(
                f"num_active_loras is {num_active_loras}, lora.max_loras is {most}",
                remedy="Raise lora.max_loras." if most else "Add a `lora` section to the configuration.",
            )

    def _count_miss(self, route: Route) -> None:
        reason = self._dispatcher.explain(route.batch.num_tokens, route.uniform, route.num_active_loras)
        reason = reason or MissReason.NOTHING_CAPTURED
        if self.config.compilation.on_miss == "error":
            raise DispatchMissError(
                f"no graph serves a batch of {route.batch.num_tokens} tokens: {reason}",
                remedy=f"{_MISS_REMEDY.get(reason, 'Choose another cudagraph_mode')}, or set on_miss: eager.",
            )
        self.stats.eager[reason] += 1
