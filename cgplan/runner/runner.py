"""GraphRunner: a model with its graphs. A call dispatches, copies in, pads, replays and slices."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from time import perf_counter_ns
from typing import Any

import torch

from cgplan.backends import GraphBackend
from cgplan.buffers.batch import BatchReader
from cgplan.buffers.copier import CopyIn
from cgplan.captures.live import LiveGraphs
from cgplan.config import Config
from cgplan.errors import CgplanError, InputError
from cgplan.graphs.pools import PoolUse
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning import Plan
from cgplan.planning.costs import GraphCosts
from cgplan.reports.records import CaptureReport, ReplanReport
from cgplan.runner.debug import DebugChecks
from cgplan.runner.prepared import BatchLauncher, BatchPreparer, PreparedBatch, Values, leave_alone, on_device
from cgplan.runner.replan import OnDemand
from cgplan.runner.routing import BatchRouter, Route, as_flag, as_rows
from cgplan.runner.staging import StagedBuffers
from cgplan.runner.stats import RunnerStats
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes

# Of the last call: its flags, what is like its tensors, the batch, and how such are copied in.
Recent = tuple[bool | None, int, Callable[..., bool], Any, CopyIn]
NONE_YET: Recent = (None, 0, lambda *_: False, None, leave_alone)


class RunnerState:
    """The graphs of a model with all that calls are prepared from, made anew whenever graphs come or go.

    Args:
        live: The model with its graphs.
        capture: Captures a plan, of its keys those given; absent: as a session does.
        use: Who runs the graphs of its pools.
        name: What messages call the runner.

    Attributes:
        stats: What calls were answered with so far.
    """

    def __init__(
        self,
        live: LiveGraphs,
        capture: Callable[[Plan, Collection[Key] | None], LiveGraphs],
        use: PoolUse,
        name: str,
    ) -> None:
        graphed = live.graphed
        self.stats = RunnerStats(graphed.plan)
        self._capture_plan, self._use, self._name = capture, use, name
        self._reader = BatchReader({**graphed.config.inputs, **graphed.config.metadata}, graphed.backend.device)
        names = self._reader.names
        self._num_inputs = len(names)
        self._pick: Callable[[Mapping[str, Any]], tuple[Any, ...]]
        self._pick = itemgetter(*names) if len(names) > 1 else lambda given: tuple([given[name] for name in names])
        first = self._reader.counting("num_tokens") or self._reader.counting("num_reqs") or (0, 0)
        self._counted = (*first, *(self._reader.counting("num_reqs") or first))
        self._handed: list[weakref.ref[StagedBuffers]] = []
        self._demand = OnDemand(live, self.stats)
        self._open()

    def _open(self) -> None:
        """Take the graphs that ``_demand`` holds."""
        live = self._demand.live
        self._graphed, self._outputs = live.graphed, live.outputs
        graphed, compilation = live.graphed, live.graphed.config.compilation
        self._copier = graphed.backend.copier(graphed.buffers, copy_inputs=compilation.cudagraph_copy_inputs)
        self._launcher = BatchLauncher(graphed, self._use, self._name)
        self._acquire, self._release, self._launch = (
            self._launcher.acquire, self._launcher.release, self._launcher.launch,
        )  # fmt: skip
        self.graphs_changed()
        self._closed = self._is_freed = self._suspended = False  # last: what takes no lock looks at it first

    def graphs_changed(self) -> None:
        """Drop what was prepared for calls, after graphs were captured or freed; staged buffers are of no use then. The
        lock is held, or nobody has the runner yet.
        """
        for reference in self._handed:
            if (staged := reference()) is not None:
                staged.retire()
        self._handed.clear()
        self._batches: dict[tuple[Any, ...], PreparedBatch] = {}
        self._recent = NONE_YET
        self._staged: dict[tuple[Any, ...], StagedBuffers] = {}
        live = self._demand.live
        wanted = live.wanted if self._demand.is_lazy else None
        asked = None if live.asked is wanted or live.asked.keys == self.plan.keys else live.asked
        self._router = BatchRouter(
            self.plan, self._reader, live.graphed.most_tokens, wanted, live.reason_against, asked
        )
        self.stats.plan = self.plan
        self._debug = DebugChecks(self._graphed) if self.config.compilation.debug else None
        nvtx = self.config.report.nvtx
        self._preparer = BatchPreparer(
            self._graphed, self._outputs, self._copier, self._router, self.stats, self._debug, nvtx=nvtx
        )

    @property
    def report(self) -> CaptureReport:
        """What the captures cost, those since the session included."""
        return self._demand.live.report

    @property
    def plan(self) -> Plan:
        """What is captured now."""
        return self._graphed.plan

    @property
    def wanted(self) -> Plan:
        """What may be captured: with ``capture_policy: lazy`` all that batches can ask for, elsewhere ``plan``."""
        return self._demand.live.wanted if self._demand.is_lazy else self.plan

    @property
    def config(self) -> Config:
        """What was asked for."""
        return self._graphed.config

    @property
    def model(self) -> Callable[..., Any]:
        """The model as it was given; whoever calls it sets the forward context that it may read."""
        return self._graphed.model

    @property
    def backend(self) -> GraphBackend:
        """The device."""
        return self._graphed.backend

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or failed to capture again: for good. One that is suspended, or captures, is not."""
        return self._closed and not self._suspended

    def invalidate(self, name: str) -> None:
        """Say that memory which the graphs use has moved (a KV cache that was allocated anew, say).

        Calls that a graph would serve raise AddressError with that name until ``recapture``; so does leaving a block of
        staged buffers that is under way. The name is a label for that message alone: all graphs are refused.
        Raises InputError for what is no name, CgplanError if the runner is closed.
        """
        self._check_open()
        self._graphed.invalidate(name)
        self._look_again()

    def refuse(self, error: CgplanError) -> None:
        """Have calls that a graph would serve raise an error like this one until ``recapture``: another rank is lost,
        and what a graph sums with it would be wrong without a word. From any thread.
        """
        self._graphed.refuse(error)
        self._look_again()

    def _look_again(self) -> None:
        for batch in list(self._batches.values()):
            batch.look_again()
        for reference in list(self._handed):
            if (staged := reference()) is not None:
                staged.look_again()

    def recapture(self) -> None:
        """Capture the same plan again, with the model's memory as it is now; keys that failed are forgotten.

        The old graphs, pools and static buffers are freed first: outputs and ``input_views`` that were handed out are
        no longer valid. No call comes in between, of another member of the pool neither. Raises as CaptureSession.run
        does; the runner is then closed, and cannot capture again. Raises CgplanError, and changes nothing, if a call is
        under way.
        """
        with self._use.held(self._name):
            if not self._suspended:
                self._check_open()
            live = self._demand.live
            keys = live.keys if self._demand.is_lazy else None
            self._suspended = True
            try:
                self._free_once()
                self._demand.live = self._capture_plan(live.asked, keys)
                self._open()
            finally:
                self._suspended = False
            self.stats.captures += len(self.plan.keys)

    @contextmanager
    def no_capture(self) -> Iterator[None]:
        """A block in which no call captures: a batch whose graph is not there runs by a larger one, or eagerly."""
        with self._demand.forbidden():
            yield

    def retry_failed(self) -> None:
        """Forget which keys could not be captured (``report.failed``): the next batch that asks for one tries again.

        Raises:
            CgplanError: a call is under way.
        """
        with self._use.held(self._name):
            self._demand.live.retry_failed()
            self.graphs_changed()

    def replan(
        self,
        *,
        traffic: Traffic | None = None,
        times: StepTimes | None = None,
        costs: GraphCosts | None = None,
        apply: bool = True,
    ) -> ReplanReport:
        """Plan anew for the batches that were asked for, inside the budget, and exchange the graphs for those.

        Sizes that the new plan lacks are evicted; new ones are captured, the largest first, into the pools that are
        there, or all into new ones, see Note [Generations] in pools.py. Outputs that were handed out are no longer
        valid. A key that cannot be captured does not raise: ``report.failed`` of the runner says why.

        Args:
            traffic: What to plan for; absent: the batches since the last replan.
            times: Step times; absent: measured now, on padding.
            costs: What graphs cost; absent: what captures so far have cost.
            apply: False: propose only.

        Returns:
            What changed; it prints as tables.

        Raises:
            CgplanError: ``compilation.capture_policy`` is not ``adaptive``, a call is under way, or captures are
                forbidden.
            TrafficError: no batch was asked for since.
            BudgetError: the budget does not pay for a single graph.
            AddressError: the model's memory has moved: ``recapture`` first.
        """
        with self._use.held(self._name):
            self._check_open()
            try:
                self._launcher.check()
                if apply:
                    self.graphs_changed()  # what is prepared holds outputs, and evicted graphs wait for theirs
                return self._demand.replan(traffic, times, costs, self._reopen, apply=apply)
            finally:
                if self._demand.live.graphed is not self._graphed:
                    self._open()
                if apply:
                    self.graphs_changed()

    def _reopen(self, plan: Plan) -> LiveGraphs:
        """Give all memory back, and make static buffers for a plan, without a graph yet."""
        self._free()
        return self._capture_plan(plan, ())

    def close(self) -> None:
        """Free graphs, pools and static buffers, for good. Outputs that were handed out are no longer valid.

        Raises:
            CgplanError: a call is under way.
        """
        with self._use.held(self._name):
            self._free_once()
            self._suspended = False

    def suspend(self) -> None:
        """Give graphs, pools and static buffers back as ``close`` does, until ``recapture`` makes them anew.

        Raises CgplanError as ``close`` does, and of a closed runner. Calls in between raise it, too.
        """
        with self._use.held(self._name):
            if not self._suspended:
                self._check_open()
                self._free_once()
                self._suspended = True

    def _free_once(self) -> None:
        if not self._is_freed:  # a close that was interrupted is made good by the next one
            self._free()

    def _free(self) -> None:
        self._closed = True
        self.graphs_changed()
        self._copier.close()
        self._graphed.free()
        self._is_freed = True

    def _check_open(self) -> None:
        if self._suspended:
            raise CgplanError("the runner is suspended", remedy="Call runner.recapture() first.")
        if self._closed:
            raise CgplanError("the runner is closed", remedy="Capture again.")


MOST_PREPARED = 4096  # sizes of batches that are kept ready; the one that was prepared first goes first
_NOT_MET = (LookupError, AttributeError, TypeError, RuntimeError, ValueError)  # what looking up a wrong call may raise


class GraphRunner(RunnerState):
    """Runs a model by captured graphs. A CaptureSession makes it; ``close`` frees what it owns.

    It owns the static buffers, the graphs and their pools. Outputs are borrowed unless ``compilation.outputs`` is
    ``clone``: views of graph memory, overwritten by the next call of this runner, and the same tensor objects each
    time. One whose shape, strides or requires_grad was changed in place is left to its holder, and the next call
    gives another. (Other memory of the same shape, given to one by ``.data =`` or ``set_``, would not be noticed.)
    With ``capture_policy: lazy`` a call may capture the key that its batch asks for; ``replan`` exchanges the
    graphs of an adaptive runner. Not for use from several threads, and on one stream at a time: a call from another
    stream is refused while the stream of the last call still has work.

    Attributes:
        stats: What calls were answered with so far.
    """

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
            raise self._launcher.under_way()
        try:
            stats, began = self.stats, 0
            if stats.until_timed:
                stats.until_timed -= 1
            else:
                began = perf_counter_ns()
            copy_in: CopyIn | None = None
            try:  # see Note [The hot path] in prepared.py
                values: Values = self._pick(inputs)
                uniform, loras, is_alike, batch, way = self._recent
                if len(inputs) != self._num_inputs:
                    pass
                elif uniform is uniform_decode and loras is num_active_loras and is_alike(*values):
                    copy_in = way
                else:
                    # What is equal to a count or flag need not be one: 1.0 and True are no counts.
                    if type(num_active_loras) is not int or not (
                        uniform_decode is None or type(uniform_decode) is bool
                    ):
                        uniform_decode = as_flag(uniform_decode)
                        num_active_loras = as_rows("num_active_loras", num_active_loras)
                    i, dim, j, other = self._counted
                    asked = values[i].shape[dim], values[j].shape[other], uniform_decode, num_active_loras
                    batch = self._batches[asked]
                    for is_alike, way in batch.ways:
                        if is_alike(*values):
                            copy_in = way
                            self._recent = uniform_decode, num_active_loras, is_alike, batch, way
                            break
            except _NOT_MET:
                pass
            if copy_in is None:
                _, _, is_alike, batch, way = NONE_YET  # it may capture, and graphs wait for outputs that are held here
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
        uniform_decode, num_active_loras = as_flag(uniform_decode), as_rows("num_active_loras", num_active_loras)
        route, demand = self.route(inputs, uniform_decode, num_active_loras), self._demand
        values: Values = self._pick(inputs)
        if demand.may_capture(route):
            values = demand.safe(values)
            self._capture_for(route)
            route = self.route(inputs, uniform_decode, num_active_loras)
        i, dim, j, other = self._counted
        asked = (values[i].shape[dim], values[j].shape[other], uniform_decode, num_active_loras)
        batch = self._batches.get(asked)
        if batch is None:
            batch = self._preparer.prepare(route)
            if not demand.is_open(route):
                while len(self._batches) >= MOST_PREPARED:
                    self._batches.pop(next(iter(self._batches)))
                self._batches[asked] = batch
        return batch, values, batch.way(values)

    def _capture_for(self, route: Route) -> None:
        """Capture what a batch asks for; the lock is held."""
        self._launcher.check()
        try:
            if route.wanted is not None:
                self.graphs_changed()  # what is prepared holds outputs, and a graph that is given up waits for its own
                self._demand.capture(route.wanted)
        finally:
            self.graphs_changed()

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

        Leaving the block runs the batch, see StagedBuffers. With ``capture_policy: lazy`` its key is captured here,
        ahead of the block, unless another block is open.

        Args:
            num_tokens: Tokens of the batch, at most what the static buffers hold: the largest size of the session. A
                batch that no graph serves runs eagerly, as in a call.
            num_reqs: Requests; needed where an input counts them and it does not follow from the tokens.
            uniform_decode, num_active_loras: As for a call.

        Raises:
            InputError: there cannot be such a batch, or it does not fit into the static buffers.
            DispatchMissError, CgplanError: As for a call.
        """
        counts = (num_tokens, num_reqs, uniform_decode, num_active_loras)
        if (
            num_tokens.__class__ is int  # 1.0 and True are equal to 1, and no counts; sooner than by type()
            and num_active_loras.__class__ is int
            and (num_reqs is None or num_reqs.__class__ is int)
            and (uniform_decode is True or uniform_decode is None or uniform_decode is False)
        ):
            try:
                return self._staged[counts]
            except _NOT_MET:
                pass
        return self._new_stage(*counts)

    def _new_stage(
        self, num_tokens: int, num_reqs: int | None, uniform_decode: bool | None, num_active_loras: int
    ) -> StagedBuffers:
        self._check_open()
        num_tokens, uniform_decode = as_rows("num_tokens", num_tokens), as_flag(uniform_decode)
        num_reqs = None if num_reqs is None else as_rows("num_reqs", num_reqs)
        num_active_loras = as_rows("num_active_loras", num_active_loras)
        counts = (num_tokens, num_reqs, uniform_decode, num_active_loras)
        if (known := self._staged.get(counts)) is not None:  # from numbers of other classes
            return known
        route, demand = self._router.of_counts(*counts), self._demand
        if demand.may_capture(route) and self._acquire(False):  # not inside another block, whose rows are written
            try:
                self._capture_for(route)
            finally:
                self._release()
        kept, preparer = self._staged, self._preparer  # which are exchanged together with the graphs
        route = self._router.of_counts(*counts)
        staged = self._build_stage(route, preparer)
        if not demand.is_open(route):
            while len(kept) >= MOST_PREPARED:
                kept.pop(next(iter(kept)))
            kept[counts] = staged
        if len(self._handed) > 2 * MOST_PREPARED:
            self._handed = [reference for reference in self._handed if reference() is not None]
        return staged

    def _build_stage(self, route: Route, preparer: BatchPreparer) -> StagedBuffers:
        """Blocks may be made inside of another one, so without the lock: whether another thread has exchanged the
        graphs meanwhile is looked at last, once it would find the block that it has to retire.
        """
        launcher, graphed, tokens = self._launcher, self._graphed, route.batch.num_tokens
        self._check_open()
        try:
            views = partial(graphed.buffers.views, tokens, route.batch.num_reqs or 0)
            staged = StagedBuffers(launcher, preparer.prepare(route), views)
        except Exception:
            if self._preparer is preparer:
                raise
            raise launcher.under_way() from None
        self._handed.append(weakref.ref(staged))
        if self._preparer is not preparer:
            staged.retire()
            raise launcher.under_way()
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
            raise self._launcher.under_way()
        try:
            route, graphed = self.route(inputs, uniform_decode, num_active_loras), self._graphed
            self._launcher.take_stream()
            tokens, reqs = route.batch.num_tokens, route.batch.num_reqs
            values = self._pick(inputs)
            if route.mode is CUDAGraphMode.NONE or not padded:
                tensors = zip(self._reader.names, on_device(values, self.backend.device), strict=True)
                return graphed.run_eager(route.unpadded, dict(tensors))
            key = route.descriptor
            copy = self._copier.prepare(tokens, reqs or 0, key.num_tokens, graphed.padded_reqs(key))
            copy.run(values, self._launcher.current_stream())
            before = graphed.buffers.versions()
            try:
                output = graphed.run_eager(key, graphed.views(key))
            finally:
                self._copier.note_writes(before)
            return self._outputs.cut(output, tokens, reqs)
        finally:
            self._release()

    def route(
        self, inputs: Mapping[str, torch.Tensor], uniform_decode: bool | None = None, num_active_loras: int = 0
    ) -> Route:
        """Check a batch and dispatch it, without running anything. Arguments and errors as for a call."""
        self._check_open()
        loras = as_rows("num_active_loras", num_active_loras)
        return self._router.of_tensors(inputs, as_flag(uniform_decode), loras)

    def input_views(self, num_tokens: int, num_reqs: int | None = None) -> dict[str, torch.Tensor]:
        """Views of the static buffers for a batch, by name: write into them and pass them to the call.

        They may be written to at any time, so padding behind each batch is reset as far as they reach. ``stage`` does
        without that, and is to be preferred. The runner owns the memory.
        """
        self._check_open()
        num_tokens = as_rows("num_tokens", num_tokens)
        self._router.check_size(num_tokens)
        reqs = min(num_tokens, self.plan.max_num_seqs) if num_reqs is None else as_rows("num_reqs", num_reqs)
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


__all__ = ["GraphRunner", "Route", "RunnerStats"]
