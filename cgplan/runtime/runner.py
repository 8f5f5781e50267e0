"""GraphRunner: a model with its graphs. A call dispatches, copies in, pads, replays and slices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from operator import itemgetter
from time import perf_counter_ns
from typing import Any

import torch

from cgplan.config import Config
from cgplan.descriptors import BatchDescriptor
from cgplan.errors import CgplanError, InputError
from cgplan.graphs import GraphBackend
from cgplan.graphs.copying import CopyIn
from cgplan.modes import CUDAGraphMode
from cgplan.planning import Plan
from cgplan.reports.records import CaptureReport
from cgplan.runtime.batch import BatchReader
from cgplan.runtime.debug import DebugChecks
from cgplan.runtime.dispatching import BatchRouter, Route
from cgplan.runtime.graphed import GraphedModel
from cgplan.runtime.launching import BatchLauncher, under_way
from cgplan.runtime.outputs import OutputRows
from cgplan.runtime.prepared import BatchPreparer, PreparedBatch, Values, on_device
from cgplan.runtime.staging import StagedBuffers
from cgplan.runtime.stats import RunnerStats

MOST_PREPARED = 4096  # sizes of batches that are kept ready; the one that was prepared first goes first
_NOT_MET = (LookupError, AttributeError, TypeError)  # what looking up a wrong call may raise


class GraphRunner:
    """Runs a model by captured graphs. A CaptureSession makes it; ``close`` frees what it owns.

    It owns the static buffers, the graphs and their pool. Outputs are borrowed unless ``compilation.outputs`` is
    ``clone``: views of graph memory, overwritten by the next call of this runner, and the same tensor objects each
    time. Not for use from several threads, and on one stream at a time: a call from another stream is refused while
    the stream of the last call still has work.

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
        self.stats = RunnerStats(graphed.plan)
        self._capture_again = capture_again
        self._reader = BatchReader({**graphed.config.inputs, **graphed.config.metadata}, graphed.backend.device)
        names = self._reader.names
        self._num_inputs = len(names)
        self._pick: Callable[[Mapping[str, Any]], tuple[Any, ...]]
        self._pick = itemgetter(*names) if len(names) > 1 else lambda given: tuple([given[name] for name in names])
        first = self._reader.counting("num_tokens") or self._reader.counting("num_reqs") or (0, 0)
        self._counted = (*first, *(self._reader.counting("num_reqs") or first))
        self._handed: list[weakref.ref[StagedBuffers]] = []
        self._open(graphed, outputs)

    def _open(self, graphed: GraphedModel, outputs: OutputRows) -> None:
        self._graphed, self._outputs, self._closed = graphed, outputs, False
        compilation = graphed.config.compilation
        self._debug = DebugChecks(graphed) if compilation.debug else None
        self._copier = graphed.backend.copier(graphed.buffers, copy_inputs=compilation.cudagraph_copy_inputs)
        self._launcher = BatchLauncher(graphed)
        self._acquire, self._release, self._launch = (
            self._launcher.acquire, self._launcher.release, self._launcher.launch,
        )  # fmt: skip
        self.graphs_changed()

    def graphs_changed(self) -> None:
        """Drop what was prepared for calls, after graphs were captured or freed; staged buffers are of no use then."""
        for reference in self._handed:
            if (staged := reference()) is not None:
                staged.retire()
        self._handed.clear()
        self._batches: dict[tuple[Any, ...], PreparedBatch] = {}
        self._staged: dict[tuple[Any, ...], StagedBuffers] = {}
        self._router = BatchRouter(self.plan, self._reader)
        self.stats.plan = self.plan
        nvtx = self.config.report.nvtx
        self._preparer = BatchPreparer(
            self._graphed, self._outputs, self._copier, self._router, self.stats, self._debug, nvtx=nvtx
        )

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
            inputs: Every declared input and metadata tensor, by name, unpadded, on the runner's device or on the host.
                Host tensors may be written to as soon as the call has returned.
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
            CgplanError: the runner is closed, or another call is under way.
        """
        if args:
            raise InputError("the runner takes no positional arguments", remedy="Pass every input by its name.")
        if not self._acquire(False):
            raise under_way()
        try:
            stats, began = self.stats, 0
            if stats.until_timed:
                stats.until_timed -= 1
            else:
                began = perf_counter_ns()
            copy_in: CopyIn | None = None
            try:  # see Note [The hot path] in prepared.py
                values: Values = self._pick(inputs)
                i, dim, j, other = self._counted
                batch = self._batches[values[i].shape[dim], values[j].shape[other], uniform_decode, num_active_loras]
                if len(inputs) == self._num_inputs:
                    for is_alike, way in batch.ways:
                        if is_alike(*values):
                            copy_in = way
                            break
            except _NOT_MET:
                pass
            if copy_in is None:
                batch, values, copy_in = self._look_closer(inputs, uniform_decode, num_active_loras)
            output = self._launch(batch, copy_in, values)
            if began:
                stats.add_time(perf_counter_ns() - began)
            return output
        finally:
            self._release()

    def _look_closer(
        self, inputs: Mapping[str, Any], uniform_decode: bool | None, num_active_loras: int
    ) -> tuple[PreparedBatch, Values, CopyIn]:
        """Check a call that is not like an earlier one, and prepare its batch if it is the first of its size."""
        route = self.route(inputs, uniform_decode, num_active_loras)
        values = self._pick(inputs)
        i, dim, j, other = self._counted
        asked = (values[i].shape[dim], values[j].shape[other], uniform_decode, num_active_loras)
        batch = self._batches.get(asked)
        if batch is None:
            batch = self._preparer.prepare(route)
            while len(self._batches) >= MOST_PREPARED:
                self._batches.pop(next(iter(self._batches)))
            self._batches[asked] = batch
        return batch, values, batch.way(values)

    def stage(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
    ) -> StagedBuffers:
        """The static buffers' own views, to be written in place: no copy is made.

        ::

            with runner.stage(num_tokens=13) as buffers:
                buffers["input_ids"].copy_(ids)
            logits = buffers.output

        Leaving the block runs the batch, see StagedBuffers.

        Args:
            num_tokens: Tokens of the batch, at most ``plan.max_capture_size``.
            num_reqs: Requests; needed where an input counts them and it does not follow from the tokens.
            uniform_decode, num_active_loras: As for a call.

        Raises:
            InputError: there cannot be such a batch, or it does not fit into the static buffers.
            DispatchMissError, CgplanError: As for a call.
        """
        staged = self._staged.get((num_tokens, num_reqs, uniform_decode, num_active_loras))
        return self._new_stage(num_tokens, num_reqs, uniform_decode, num_active_loras) if staged is None else staged

    def _new_stage(
        self, num_tokens: int, num_reqs: int | None, uniform_decode: bool | None, num_active_loras: int
    ) -> StagedBuffers:
        self._check_open()
        route = self._router.of_counts(num_tokens, num_reqs, uniform_decode, num_active_loras)
        views = self._graphed.buffers.views(num_tokens, route.batch.num_reqs or 0)
        staged = StagedBuffers(self._launcher, self._preparer.prepare(route), views)
        while len(self._staged) >= MOST_PREPARED:
            self._staged.pop(next(iter(self._staged)))
            self._handed = [reference for reference in self._handed if reference() is not None]
        self._handed.append(weakref.ref(staged))
        self._staged[num_tokens, num_reqs, uniform_decode, num_active_loras] = staged
        return staged

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
        if not self._acquire(False):
            raise under_way()
        try:
            route, graphed = self.route(inputs, uniform_decode, num_active_loras), self._graphed
            tokens, reqs = route.batch.num_tokens, route.batch.num_reqs
            values = self._pick(inputs)
            if route.mode is CUDAGraphMode.NONE or not padded:
                tensors = zip(self._reader.names, on_device(values, self.backend.device), strict=True)
                return graphed.run_eager(route.unpadded, dict(tensors))
            key = route.descriptor
            copy = self._copier.prepare(tokens, reqs or 0, key.num_tokens, graphed.padded_reqs(key))
            copy.run(values, self._launcher.current_stream())
            return self._outputs.cut(graphed.run_eager(key, graphed.views(key)), tokens, reqs)
        finally:
            self._release()

    def route(
        self, inputs: Mapping[str, torch.Tensor], uniform_decode: bool | None = None, num_active_loras: int = 0
    ) -> Route:
        """Check a batch and dispatch it, without running anything. Arguments and errors as for a call."""
        self._check_open()
        return self._router.of_tensors(inputs, uniform_decode, num_active_loras)

    def input_views(self, num_tokens: int, num_reqs: int | None = None) -> dict[str, torch.Tensor]:
        """Views of the static buffers for a batch, by name: write into them and pass them to the call.

        They may be written to at any time, so padding behind each batch is reset as far as they reach. ``stage`` does
        without that, and is to be preferred. The runner owns the memory.
        """
        self._check_open()
        self._router.check_size(num_tokens)
        reqs = min(num_tokens, self.plan.max_num_seqs) if num_reqs is None else num_reqs
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
        Raises InputError for what is no name, CgplanError if the runner is closed.
        """
        self._check_open()
        self._graphed.invalidate(name)
        self.graphs_changed()  # each batch is looked at again

    def recapture(self) -> None:
        """Capture the same plan again, with the model's memory as it is now.

        The old graphs, pool and static buffers are freed first: outputs and ``input_views`` that were handed out are
        no longer valid. Raises as CaptureSession.run does; the runner is then closed, and cannot capture again.
        """
        self._check_open()
        self.close()
        fresh = self._capture_again()
        self.report = fresh.report
        self.stats.captures += fresh.stats.captures
        self._open(fresh._graphed, fresh._outputs)

    def close(self) -> None:
        """Free graphs, pool and static buffers. Outputs that were handed out are no longer valid.

        Raises:
            CgplanError: a call is under way.
        """
        if not self._acquire(False):
            raise under_way()
        try:
            if not self._closed:
                self._closed = True
                self.graphs_changed()
                self._copier.close()
                self._graphed.free()
        finally:
            self._release()

    def _check_open(self) -> None:
        if self._closed:
            raise CgplanError("the runner is closed", remedy="Capture again.")


__all__ = ["GraphRunner", "Route", "RunnerStats"]
