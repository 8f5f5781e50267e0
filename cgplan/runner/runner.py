"""GraphRunner: a model with its graphs. A call is looked up, copied in, replayed, and its output is
cut.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from threading import get_ident
from time import perf_counter_ns
from typing import Any, Literal

from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.backends.backend import Trace, span
from cgplan.backends.context import is_capture_allowed
from cgplan.buffers.batch import Batch, BatchReader
from cgplan.buffers.copier import Copier
from cgplan.captures.captured_keys import CapturedKeys
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.errors import CgplanError, DispatchMissError, InputError
from cgplan.graphs.pools import PoolUse
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning import Plan
from cgplan.planning.costs import GraphCosts
from cgplan.planning.dispatcher import Modes, set_of_modes
from cgplan.reports.layout import describe_sizes
from cgplan.reports.records import AuditReport, CaptureReport, ReplanReport, VerifyRecord
from cgplan.runner.launcher import Launcher
from cgplan.runner.prepared import PreparedCall, Values, alike, on_device
from cgplan.runner.replan import Replanner
from cgplan.runner.routing import BatchRouter, RoutedBatch
from cgplan.runner.staging import StagedBuffers
from cgplan.runner.stats import RunnerStats
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import counted, format_bytes

# kinds of calls that are kept ready; the one that was prepared first goes first
MOST_PREPARED = 4096
_shape = operator.attrgetter("shape")
_dtype = operator.attrgetter("dtype")
_device = Tensor.get_device  # -1 for the host; made and compared sooner than a torch.device
# of missing inputs, nested tensors, no tensors
_NOT_MET = (LookupError, RuntimeError, AttributeError, TypeError)
logger = logging.getLogger(__name__)


class GraphRunner:
    """Runs a model by captured graphs. A CaptureSession makes it; ``close`` frees its memory.

    It owns the static buffers, the graphs and their pools. Outputs are borrowed unless
    ``compilation.outputs`` is ``clone``: new tensor objects on graph memory, which the next call of
    this runner overwrites. Not for use from several threads, and on one stream at a time: a call
    from another stream is an error while the stream of the last call still has work.

    Args:
        captured: The model with its graphs.
        capture: Captures a plan, of its keys those given; None: as a session does.
        use: The lock and the stream of its pools; runners that share a pool share it.
        name: What messages call the runner.

    Attributes:
        stats: What calls were answered with so far.
        graphs: The model with its static buffers and graphs, for other parts of cgplan; others when
            all is captured again.
    """

    graphs: ModelGraphs

    def __init__(
        self,
        captured: CapturedKeys,
        capture: Callable[[Plan, Collection[Key] | None], CapturedKeys],
        use: PoolUse,
        name: str,
    ) -> None:
        graphs = captured.graphs
        config = graphs.config
        self.stats = RunnerStats(graphs.plan)
        self._capture_plan = capture
        self._use = use
        self._name = name
        self._reader = BatchReader(config.tensors, config.dim_names, graphs.backend.device)
        self._num_inputs = len(self._reader.names)
        self._pick = _picker(self._reader.names)
        self._asked_ns = 0  # when the call that is under way was made, while a trace is on
        self._forbidden = 0  # blocks of `no_capture` that are open
        self._handed: weakref.WeakSet[StagedBuffers] = weakref.WeakSet()
        self._replanner = Replanner(self.stats)
        self._open(captured)

    def _open(self, captured: CapturedKeys) -> None:
        self._captured = captured
        self.graphs = captured.graphs
        graphs = captured.graphs
        self._copiers = dict[tuple[int, ...], Copier]()
        for sizes in graphs.buffers:
            self._copier(sizes)
        self._launcher = Launcher(graphs, self._use, self._name)
        self._follow_plan()
        self._state: Literal["open", "suspended", "closed"] = "open"

    def _forget_calls(self) -> None:
        for staged in list(self._handed):
            staged.retire()
        self._handed.clear()
        self._calls: dict[tuple[Any, ...], PreparedCall] = {}
        self._staged: dict[tuple[Any, ...], StagedBuffers] = {}
        self._last: PreparedCall | None = None
        self._launcher.last_staged = None

    def _follow_plan(self) -> None:
        """Route batches by what is captured now."""
        self._forget_calls()
        self.stats.plan = self.plan
        captured = self._captured
        wanted = captured.wanted if captured.is_lazy else None
        planned: Plan | None = captured.asked
        if planned is wanted or captured.asked.keys == self.plan.keys:
            planned = None
        most = self.graphs.most_tokens
        self._router = BatchRouter(self.plan, most, wanted, captured.reason_against, planned)

    def __str__(self) -> str:
        """What is captured, and how batches ran; six lines."""
        plan = self.plan
        cost = format_bytes(self.report.total_bytes)
        graphs = counted(len(plan.keys), "graph")
        sizes = f"{graphs}, sizes {describe_sizes(plan.capture_sizes)}; {cost}"
        head = f"{self._name} on {self.backend.device} ({self._state}): {plan.mode}, {sizes}"
        return f"{head}\ninputs: {', '.join(self.config.tensors)}\n{self.stats}"

    @property
    def report(self) -> CaptureReport:
        """What the captures cost, those since the session included."""
        return self._captured.report

    def audit(self) -> AuditReport:
        """Who owns the memory that each pointer in each captured graph points to. Pointers into
        memory that is free, gone, or held by others alone are findings; those have operators and
        lines with ``compilation.audit: report``.

        Raises:
            BackendError: nodes cannot be read: cuda-bindings is missing, or the driver is too old.
            CgplanError: the runner is closed.
        """
        self._check_open()
        return self._captured.audit()

    @property
    def plan(self) -> Plan:
        """What is captured now."""
        return self.graphs.plan

    @property
    def wanted(self) -> Plan:
        """What may be captured: with ``capture_policy: lazy`` all that batches can ask for,
        elsewhere ``plan``.
        """
        return self._captured.wanted if self._captured.is_lazy else self.plan

    @property
    def config(self) -> Config:
        return self.graphs.config

    @property
    def model(self) -> Callable[..., Any]:
        """The model as it was given; callers set the forward context that it may read."""
        return self.graphs.model

    @property
    def backend(self) -> GraphBackend:
        return self.graphs.backend

    @property
    def is_closed(self) -> bool:
        """Whether it was closed, or failed to capture again: for good. One that is suspended, or
        captures, is not.
        """
        return self._state == "closed"

    def __call__(
        self,
        *tensors: Tensor,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        invalid_modes: Modes = None,
        **inputs: Tensor,
    ) -> Any:
        """Run one batch.

        Args:
            tensors: The first inputs, in the order of their declaration.
            inputs: Every other declared input, and the metadata, by name. All are unpadded, on the
                runner's device or on the host. Host tensors may be written to as soon as the call
                has returned.
            uniform_decode: Whether every request has ``plan.query_len`` tokens. Absent: for a query
                length of 1 it follows from the counts; for a longer one the batch is taken as
                mixed.
            num_active_loras: Distinct adapters in the batch.
            invalid_modes: Runtime modes that cannot run this batch, such as ``{FULL}`` where its
                attention cannot be in a graph (cascade attention).

        Returns:
            The model's output, with the padding sliced off; see the class for how long it is valid.

        Raises:
            InputError: a tensor does not match its declaration; nothing was launched.
            CaptureError: autocast is not as it was at capture.
            AddressError: memory that the graph uses has moved, see ``compilation.address_check``.
            DispatchMissError: no graph serves the batch and ``compilation.on_miss`` is ``error``.
            CgplanError: the runner is closed, or another call is under way.
        """
        if tensors:
            inputs = self._by_name(tensors, inputs)
        if self._use.acquire(False):  # see Note [The hot path] in prepared.py
            self._use.thread = get_ident()
        else:
            self._use.wait(self._name)
        try:
            stats = self.stats
            began = 0
            if stats.until_timed:
                stats.until_timed -= 1
            else:
                began = perf_counter_ns()
            if invalid_modes is not None:
                invalid_modes = set_of_modes(invalid_modes) or None
            flags = (uniform_decode, num_active_loras, invalid_modes)
            call = self._last
            known = False
            try:
                values: Values = self._pick(inputs)
                if len(inputs) != self._num_inputs:
                    call = None
                elif call is not None and flags == call.flags and call.is_alike(*values):
                    known = True
                else:
                    key = *map(_shape, values), *map(_dtype, values), *map(_device, values), *flags
                    call = self._calls.get(key)
            except _NOT_MET:
                call = None
            if call is None:
                call, values = self._prepare(inputs, *flags)
            # another layout, or inference mode is on and was off
            elif call is self._last and not known:
                call.is_alike = alike(values)
            self._last = call
            self._launcher.launch(call, values, known)
            output = call.output()
            if began:
                stats.add_time(perf_counter_ns() - began)
            return output
        finally:
            self._use.thread = 0
            self._use.unlock()

    def _by_name(self, tensors: Values, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        given = dict(zip(names := self.config.inputs, tensors, strict=False))
        if len(given) < len(tensors) or given.keys() & inputs:
            raise InputError(
                f"{len(tensors)} tensors by position and {', '.join(inputs) or 'none'} by name do "
                "not fit the inputs",
                remedy=f"Pass inputs by position in the order {', '.join(names)}, or by name; "
                "metadata by name.",
            )
        return given | inputs

    def _prepare(
        self, inputs: Mapping[str, Any], *flags: *tuple[bool | None, int, Modes]
    ) -> tuple[PreparedCall, Values]:
        route = self.route(inputs, *flags)
        values: Values = [inputs[name] for name in self._reader.names]
        if self._may_capture(route):
            values = self._safe(values)
            self._capture_for(route)
            route = self.route(inputs, *flags)
        call = self._prepared(route, values)
        if not self._is_open(route):
            call.flags = flags
            call.is_alike = alike(values)
            kind = (*map(_shape, values), *map(_dtype, values), *map(_device, values), *flags)
            _keep(self._calls, kind, call)
        return call, values

    def _is_open(self, route: RoutedBatch) -> bool:
        """Whether the batch may get another graph later, so that its way must not be remembered."""
        return route.wanted is not None and route.wanted not in self._captured.failed

    def _may_capture(self, route: RoutedBatch) -> bool:
        return not self._forbidden and is_capture_allowed() and self._is_open(route)

    def _safe(self, values: Values) -> Values:
        """Tensors of a batch that a capture leaves alone: outputs of an earlier call lie where it
        captures.
        """
        device = self.backend.device
        buffers = self.graphs.buffers
        found = list[Tensor]()
        for value in values:
            is_at_risk = value.device == device and not buffers.owns(value)
            found.append(value.clone() if is_at_risk else value)
        return found

    def _prepared(self, route: RoutedBatch, values: Values | None) -> PreparedCall:
        """Calls of a kind, ready; ``values=None``: for batches that are staged. Raises
        DispatchMissError.
        """
        reason = None
        mode = route.mode
        if mode is CUDAGraphMode.NONE:
            reason = self._router.reason_for_none(route, self.config.compilation.on_miss)
        logger.debug(
            "%s: %s runs as %s %s", self._name, route.batch, mode, reason or route.descriptor
        )
        count = self.stats.count_of(route, reason)
        copier = None
        if mode is not CUDAGraphMode.NONE:
            copier = self._copier(route.descriptor.sizes)
        call = PreparedCall.of(route, count, values, self.graphs, copier)
        self._launcher.verifier.schedule(call)
        if self.config.report.nvtx or Trace.current is not None:
            self._show(call, staged=values is None)
        return call

    def _copier(self, sizes: tuple[int, ...]) -> Copier:
        if sizes not in self._copiers:
            buffers = self.graphs.buffers[sizes]
            copies = self.config.compilation.cudagraph_copy_inputs
            self._copiers[sizes] = self.backend.copier(buffers, copy_inputs=copies)
        return self._copiers[sizes]

    def _show(self, call: PreparedCall, *, staged: bool) -> None:
        """Let profilers of the device and the trace, whichever are on, see calls of a kind."""
        copy_in = call.copy_in
        replay = call.replay
        trace = Trace.current
        route = call.route
        began = 0
        name = f"{route.mode} {route.descriptor}"
        batch = route.batch
        annotate = self.backend.annotate if self.config.report.nvtx else nullcontext

        def copied(values: Values, stream: int, known: bool) -> None:
            nonlocal began
            start = perf_counter_ns()
            began = start if staged else self._asked_ns
            with span("copy", bytes=sum(value.nbytes for value in values)):
                copy_in(values, stream, known)
            if trace is not None and trace is Trace.current and not staged:
                trace.add("dispatch", began, {}, start)

        def shown() -> None:
            with annotate(f"cgplan {name}"), span("launch"):
                replay()
            if trace is not None and trace is Trace.current:
                trace.add(name, began, {"num_tokens": batch.num_tokens, "num_reqs": batch.num_reqs})

        call.copy_in = copied
        call.replay = shown

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """A block whose calls, captures and compilations are recorded; ``trace.to_json()`` is the
        file for Perfetto. Calls take some microseconds longer. Staged batches have no dispatch,
        those staged before the block no events.
        """
        pick = self._pick

        def asked(given: Mapping[str, Any]) -> tuple[Any, ...]:
            self._asked_ns = perf_counter_ns()
            return pick(given)

        with nullcontext(Trace.current) if Trace.current else Trace().on() as trace:
            self._last = None
            self._calls = {}
            self._staged = {}
            self._pick = asked
            try:
                yield trace
            finally:
                self._last = None
                self._calls = {}
                self._staged = {}
                self._pick = pick

    @contextmanager
    def _changing(self) -> Iterator[CapturedKeys]:
        """A block that exchanges graphs, which the stats count; the lock is held."""
        self._launcher.take_stream()
        self.graphs.check_autocast()
        # prepared calls hold outputs, and a graph that is evicted waits for its own
        self._forget_calls()
        before = set(self.plan.keys)
        try:
            yield self._captured
        finally:
            self._launcher.verifier.forget(before ^ set(self.plan.keys))
            self.stats.evictions += len(before - set(self.plan.keys))
            self.stats.captures += len(set(self.plan.keys) - before)
            self._follow_plan()

    def _capture_for(self, route: RoutedBatch) -> None:
        assert route.wanted is not None
        with self._changing() as captured:
            captured.check_addresses(route.wanted)
            captured.capture([route.wanted])
            if (failed := captured.failed.get(route.wanted)) is not None:
                self.stats.failures += 1
                logger.debug(
                    "%s: %s %s was not captured: %s", self._name, *route.wanted, failed.detail
                )

    def stage(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        invalid_modes: Modes = None,
    ) -> StagedBuffers:
        """The static buffers' own rows, to be written in place: no copy is made.

            with runner.stage(num_tokens=13) as buffers:
                buffers["input_ids"].copy_(ids)
            logits = buffers.output

        Leaving the block runs the batch, see StagedBuffers. With ``capture_policy: lazy`` its key
        is captured here, ahead of the block, unless another block is open.

        Args:
            num_tokens: At most what the static buffers hold: the largest size of the session. A
                batch that no graph serves runs eagerly, as in a call.
            num_reqs: Needed where an input counts requests and it does not follow from the tokens.
            uniform_decode, num_active_loras, invalid_modes: As for a call.

        Raises:
            InputError: there cannot be such a batch, or it does not fit into the static buffers.
            DispatchMissError, CgplanError: As for a call.
        """
        if invalid_modes is not None:
            invalid_modes = set_of_modes(invalid_modes) or None
        counts = num_tokens, num_reqs, uniform_decode, num_active_loras, invalid_modes
        known = self._staged.get(counts)
        if known is not None:
            return known
        self._check_open()
        self._refuse_sizes()
        counts_reqs = "num_reqs" in self._reader.symbols
        flags = counts[2:]
        batch = self._router.staged(num_tokens, num_reqs, uniform_decode, counts_reqs=counts_reqs)
        route = self._router.route(batch, *flags)
        # not inside another block, whose rows are written
        if self._may_capture(route) and self._use.acquire(False):
            try:
                self._capture_for(route)
            finally:
                self._use.release()
            route = self._router.route(batch, *flags)
        staged = StagedBuffers(self._launcher, self._prepared(route, None))
        self._handed.add(staged)
        if not self._is_open(route):
            _keep(self._staged, counts, staged)
        return staged

    def padded(
        self,
        num_tokens: int,
        *sizes: int,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
    ) -> int | None:
        """Tokens of the key that serves a batch, to which a call pads it; None if the batch would
        run eagerly.

        Nothing runs. With ``capture_policy: lazy`` it is the key that the next such call captures.
        Without ``uniform_decode`` each token counts as a request. ``sizes`` are those of the other
        named dimensions, of which ``route`` tells the padded ones. Raises InputError as a call
        does.
        """
        self._check_open()
        batch = Batch(operator.index(num_tokens), None, sizes)
        route = self._router.route(batch, uniform_decode, num_active_loras, None)
        wanted = route.wanted if self._may_capture(route) else None
        mode, descriptor = wanted or (route.mode, route.descriptor)
        return None if mode is CUDAGraphMode.NONE else descriptor.num_tokens

    def run_eagerly(
        self,
        *tensors: Tensor,
        padded: bool = True,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        **inputs: Tensor,
    ) -> Any:
        """As a call, but the model's own code runs and no graph. Padded as a call pads, it is what
        a replay must equal.

        ``padded=False`` runs the tensors as they are, outside of the static buffers.
        """
        if tensors:
            inputs = self._by_name(tensors, inputs)
        with self._use.held(self._name):
            route = self.route(inputs, uniform_decode, num_active_loras)
            graphs = self.graphs
            self._launcher.take_stream()
            values = self._pick(inputs)
            batch = route.batch
            key = route.descriptor
            if route.mode is CUDAGraphMode.NONE or not padded:
                named = zip(self._reader.names, on_device(values, self.backend.device), strict=True)
                return graphs.run_eager(route.unpadded, dict(named))
            copier = self._copier(key.sizes)
            reqs = graphs.padded_reqs(key)
            copy = copier.prepare(batch.num_tokens, batch.num_reqs or 0, key.num_tokens, reqs)
            copy.path(values)(values, self._launcher.stream(), False)
            before = copier.buffers.versions()
            try:
                output = graphs.run_eager(key, graphs.views(key))
            finally:
                copier.note_writes(before)
            return graphs.outputs.cut(output, batch)

    def verify(
        self,
        *tensors: Tensor,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        **inputs: Tensor,
    ) -> VerifyRecord:
        """Compare the graph that serves a batch with the model's own code, see
        ``compilation.verify``. The model's tensors are afterwards as they were. Arguments and
        errors as for a call.

        Returns:
            The key, the largest difference of each output and written tensor, the tolerance, and
            the times of both runs in microseconds; ``failure`` says what is wrong. It prints as one
            line.

        Raises:
            DispatchMissError: no graph serves the batch.
        """
        if tensors:
            inputs = self._by_name(tensors, inputs)
        with self._use.held(self._name):
            self._launcher.take_stream()
            call, values = self._prepare(inputs, uniform_decode, num_active_loras, None)
            if call.route.mode is CUDAGraphMode.NONE:
                raise DispatchMissError(
                    f"no graph serves the batch: {call.count.reason}",
                    remedy="Pass a batch that a graph serves.",
                )
            call.copy_in(values, self._launcher.stream(), False)
            return self._launcher.verifier.verify(call, values, leaves=False)[0]

    def route(
        self,
        inputs: Mapping[str, Tensor],
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        invalid_modes: Modes = None,
    ) -> RoutedBatch:
        """Check a batch and dispatch it, without running anything. Arguments and errors as for a
        call.
        """
        self._check_open()
        return self._router.route(
            self._reader.read(inputs), uniform_decode, num_active_loras, invalid_modes
        )

    def input_views(self, num_tokens: int, num_reqs: int | None = None) -> dict[str, Tensor]:
        """Views of the static buffers for a batch, by name: write into them and pass them to the
        call.

        They may be written to at any time, so padding behind each batch is reset as far as they
        reach. ``stage`` does without that, and is to be preferred. The runner owns the memory.
        """
        self._check_open()
        self._refuse_sizes()
        self._router.check_size(num_tokens)
        most = min(num_tokens, self.plan.max_num_seqs)
        reqs = most if num_reqs is None else num_reqs
        if not 0 < reqs <= most:
            raise InputError(
                f"{num_tokens} tokens are 1 to {most} requests, asked for {reqs}",
                remedy="Ask for fewer, or raise scheduler.max_num_seqs.",
            )
        return self.graphs.buffers[()].expose(num_tokens, reqs)

    def graph(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Any:
        """The backend's graph of a FULL key, to replay bare. None if the key has none."""
        entry = self.graphs.entry((mode, descriptor)) if mode is CUDAGraphMode.FULL else None
        return None if entry is None else entry.graph

    def invalidate(self, name: str) -> None:
        """Say that memory which the graphs use has moved (a KV cache that was allocated again,
        say).

        Until ``recapture``, calls and staged blocks that a graph would serve raise AddressError
        with that name.
        """
        self._check_open()
        self.graphs.addresses.invalidate(name)
        for call in (*self._calls.values(), *(staged.call for staged in self._handed)):
            # an eager run has no addresses
            if call is not None and call.route.mode is not CUDAGraphMode.NONE:
                call.needs_check = True

    def recapture(self) -> None:
        """Capture the same plan again, with the model's memory as it is now; keys that failed are
        forgotten.

        The old graphs, pools and static buffers are freed first: outputs and ``input_views`` are no
        longer valid. Raises as CaptureSession.run does; the runner is then closed. Raises
        CgplanError, and changes nothing, if a call is under way.
        """
        with self._use.held(self._name):
            if self._state != "suspended":
                self._check_open()
            captured = self._captured
            keys = captured.keys if captured.is_lazy else None
            self._free()
            self._state = "suspended"
            try:
                self._open(self._capture_plan(captured.asked, keys))
            except BaseException:
                self._state = "closed"
                raise
            self.stats.captures += len(self.plan.keys)

    def exchange(self, captured: Collection[Key] = (), evicted: Collection[Key] = ()) -> None:
        """Free the graphs of some keys, and capture others now, as far as they are ``wanted``. With
        ``capture_policy: lazy`` a batch that asks for an evicted key has it captured again. Raises
        CgplanError if a call is under way.
        """
        with self._use.held(self._name):
            self._check_open()
            with self._changing() as keys:
                keys.capture(captured, evicted=evicted)

    @contextmanager
    def no_capture(self) -> Iterator[None]:
        """A block in which no call captures: a batch whose graph is not there runs by a larger one,
        or eagerly.
        """
        self._forbidden += 1
        try:
            yield
        finally:
            self._forbidden -= 1

    def retry_failed(self) -> None:
        """Forget which keys could not be captured (``report.failed``): the next batch that asks for
        one tries again. Raises CgplanError if a call is under way.
        """
        with self._use.held(self._name):
            self._captured.failed.clear()
            self._forget_calls()

    def replan(
        self,
        *,
        traffic: Traffic | None = None,
        times: StepTimes | None = None,
        costs: GraphCosts | None = None,
        apply: bool = True,
    ) -> ReplanReport:
        """Plan again for the batches that were asked for, inside the budget, and exchange the
        graphs for those.

        Outputs that were handed out are no longer valid. A key that cannot be captured does not
        raise: ``report.failed`` of the runner says why. See Note [Generations] in pools.py.

        Args:
            traffic: Absent: the batches since the last replan.
            times: Step times; absent: measured now, on padding.
            costs: Costs of graphs; absent: those of the captures so far.
            apply: False: propose only.

        Raises:
            CgplanError: ``compilation.capture_policy`` is not ``adaptive``, a call is under way, or
                captures are forbidden.
            TrafficError: no batch was asked for since.
            BudgetError: the budget does not pay for a single graph.
            AddressError: the model's memory has moved: ``recapture`` first.
        """
        with self._use.held(self._name):
            self._check_open()
            if self._forbidden:
                raise CgplanError(
                    "replan inside runner.no_capture()", remedy="Call it after the block."
                )
            self._launcher.take_stream()
            self.graphs.check_autocast()
            if not apply:
                return self._replanner.replan(self._captured, traffic, times, costs)
            # prepared calls hold outputs, and evicted graphs wait for theirs
            self._forget_calls()
            try:
                return self._replanner.replan(self._captured, traffic, times, costs, self._reopen)
            finally:
                self._follow_plan()

    def _reopen(self, plan: Plan) -> CapturedKeys:
        """Give all memory back, and make static buffers for a plan."""
        self._free()
        self._open(self._capture_plan(plan, ()))
        return self._captured

    def close(self) -> None:
        """Free graphs, pools and static buffers, for good. Outputs that were handed out are no
        longer valid. Raises CgplanError if a call is under way.
        """
        with self._use.held(self._name):
            self._free()

    def suspend(self) -> None:
        """Give graphs, pools and static buffers back as ``close`` does, until ``recapture``
        captures again.

        Raises CgplanError as ``close`` does, and of a closed runner. Calls in between raise it,
        too.
        """
        with self._use.held(self._name):
            if self._state != "suspended":
                self._check_open()
                self._free()
                self._state = "suspended"

    def _free(self) -> None:
        """Free all; once more does no harm, and completes what was interrupted."""
        self._state = "closed"
        self._forget_calls()
        while self._copiers:  # which hold static buffers
            self._copiers.popitem()[1].close()
        self.graphs.free()

    def _refuse_sizes(self) -> None:
        if names := self.config.dim_names[1:]:
            raise InputError(
                f"batches of {', '.join(names)} cannot be written in place: their padding lies "
                "between rows",
                remedy="Call the runner with tensors.",
            )

    def _check_open(self) -> None:
        if self._state != "open":
            remedy = (
                "Call runner.recapture() first." if self._state == "suspended" else "Capture again."
            )
            raise CgplanError(f"the runner is {self._state}", remedy=remedy)


def _keep(prepared: dict[tuple[Any, ...], Any], key: tuple[Any, ...], value: Any) -> None:
    if len(prepared) >= MOST_PREPARED:
        prepared.pop(next(iter(prepared)))
    prepared[key] = value


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """A function that takes the tensors of these names out of a call's arguments."""
    if len(names) > 1:
        return operator.itemgetter(*names)

    def pick(given: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple(map(given.__getitem__, names))

    return pick
