"""A model with its graphs: a call is looked up, copied in (or written straight into the static
buffers by the caller), replayed and cut.
"""

from __future__ import annotations

import logging
import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import get_ident
from time import perf_counter_ns
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.backends.backend import Trace, span
from cgplan.backends.context import is_capture_allowed
from cgplan.backends.replacing import replaced
from cgplan.buffers.batch import Batch, BatchReader, alike_to, unknown_input
from cgplan.buffers.static import Copier
from cgplan.captures.captured_keys import CapturedKeys
from cgplan.captures.model_graphs import ModelGraphs
from cgplan.config import Config
from cgplan.errors import CgplanError, DispatchMissError, InputError
from cgplan.graphs.wrapper import PoolUse
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.planning import Plan
from cgplan.planning.dispatcher import Modes, set_of_modes
from cgplan.pricing import GraphCosts
from cgplan.reports.layout import describe_sizes
from cgplan.reports.records import AuditReport, CaptureReport, ReplanReport, VerifyRecord
from cgplan.runner.prepared import PreparedCall, Values
from cgplan.runner.replan import Replanner
from cgplan.runner.routing import BatchRouter, RoutedBatch
from cgplan.runner.stats import RunnerStats
from cgplan.runner.verifier import Verifier
from cgplan.traffic.histogram import Traffic
from cgplan.traffic.step_times import StepTimes
from cgplan.units import counted, format_bytes

_MISSING = object()
_UNREAD = object()


class StagedBuffers(Mapping[str, Tensor]):
    """The runner's static rows of one batch, by name.

    Inside the block, which can be entered again, the caller writes in place. Leaving it runs the
    batch, and raises as a call; then ``output`` is there.

    Raises:
        InputError: a tensor is put in instead of written in place, or its name is not declared.
        CgplanError: used outside of its block; entered during a call, while another stream has
            work, or after its graphs are gone.
    """

    __slots__ = (
        "__weakref__",
        "_entered",
        "_launcher",
        "_marks",
        "_output",
        "_reqs",
        "_tokens",
        "_views",
        "call",
    )
    __hash__ = object.__hash__

    def __init__(self, launcher: Launcher, call: PreparedCall) -> None:
        batch = call.route.batch
        buffers = launcher.graphs.buffers[()]
        self._launcher = weakref.ref(launcher)
        self.call: PreparedCall | None = call
        self._marks = buffers.marks
        self._tokens = batch.num_tokens
        self._reqs = batch.num_reqs or 0
        self._views = buffers.views(self._tokens, self._reqs)
        self._entered: Launcher | None = None  # inside the block
        self._output: Any = _MISSING

    def __enter__(self) -> StagedBuffers:
        launcher = self._launcher()
        call = self.call
        if launcher is None or call is None:
            raise CgplanError(
                "the graphs that these buffers were staged for are gone",
                remedy="Call runner.stage(...) again.",
            )
        use = launcher.use
        use.take(launcher.name)
        # as take_stream, which is slower
        if use.stream != launcher.stream() or use.user is not launcher.name:
            try:
                launcher.take_stream()
            except BaseException:
                use.release()
                raise
        marks = self._marks
        # a block that raises leaves rows written
        if self._tokens > marks.tokens or self._reqs > marks.reqs:
            marks.extend(self._tokens, self._reqs)
        self._output = _MISSING
        self._entered = launcher
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        launcher = self._entered
        call = self.call
        if launcher is None or call is None:
            raise self._ended()
        try:
            if kind is None:
                values: Values = ()
                if call.route.mode is CUDAGraphMode.NONE:
                    values = [view.detach() for view in self._views.values()]
                with torch._C.DisableTorchFunction():
                    launcher.launch(call, values)
                self._output = call.output() if launcher.graphs.outputs.clone else _UNREAD
            last = launcher.last_staged
            launcher.last_staged = self
            if last is not None and last is not self:
                last.drop_output()
        finally:
            self._entered = None
            launcher.use.release()

    @property
    def output(self) -> Any:
        """Valid as a call's. Raises CgplanError before the end of the block, and after a batch of
        other counts was staged.
        """
        call = self.call
        if self._output is _MISSING or call is None:
            raise CgplanError(
                "these staged buffers have no output",
                remedy="Read it after the `with` block and before the next batch is staged.",
            )
        if self._output is _UNREAD:
            self._output = call.output()
        return self._output

    def drop_output(self) -> None:
        self._output = _MISSING

    def retire(self) -> None:
        """Its graphs are gone."""
        self.call = None
        self._views = {}
        self.drop_output()

    def __getitem__(self, name: str) -> Tensor:
        if self._entered is None:
            raise self._ended()
        if name not in self._views:
            raise unknown_input(name, self._views)
        return self._views[name].detach()

    def __setitem__(self, name: str, value: Tensor) -> None:
        own = self[name].data_ptr()
        # it is the same after `buffers[name] += 1`
        if not isinstance(value, Tensor) or value.data_ptr() != own:
            raise InputError(
                "values cannot be put into staged buffers: graphs read their memory",
                remedy="Write in place: buffers[name].copy_(tensor), .fill_(number).",
            )

    def __contains__(self, name: object) -> bool:
        return name in self._views

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def _ended(self) -> CgplanError:
        return CgplanError(
            "the staged buffers were used outside of their `with` block",
            remedy="Write into them inside `with runner.stage(...) as buffers:`; later their "
            "memory belongs to others.",
        )


class Launcher:
    """The caller holds the lock."""

    def __init__(
        self,
        graphs: ModelGraphs,
        use: PoolUse,
        name: str,
    ) -> None:
        self.graphs = graphs
        self.verifier = Verifier(graphs)
        self.use = use
        self.name = name
        self.stream = graphs.backend.stream_getter()
        self.last_staged: Any = None  # its last StagedBuffers
        self._addresses = graphs.addresses
        self._checks_once = graphs.config.compilation.address_policy != "always"
        self._is_plain = False  # a call without autocast has passed
        kind = graphs.backend.device.type
        self._is_autocast = torch.is_autocast_enabled  # of CUDA, and faster
        if kind != "cuda":
            self._is_autocast = partial(torch.is_autocast_enabled, kind)

    def take_stream(self) -> None:
        """Raises CgplanError if another stream has work."""
        self.use.take_stream(self.stream(), self.name, self.graphs.backend)

    def launch(
        self,
        call: PreparedCall,
        values: Values,
        is_alike: bool = False,
    ) -> None:
        """``is_alike``: the tensors are dense, and like those of the last call."""
        stream = self.stream()
        use = self.use
        if stream != use.stream or use.user is not self.name:
            self.take_stream()
        if not self._is_plain or self._is_autocast():
            self.graphs.check_autocast()
            self._is_plain = not self._is_autocast()
        if call.needs_check and not self._addresses.holds():
            self._addresses.check(call.route.key)
            call.needs_check = not self._checks_once
        call.copy_in(values, stream, is_alike)
        call.count.calls += 1
        due = call.due
        due.left -= 1
        if due.left:
            call.replay()
        else:
            with torch._C._EnableTorchFunction():
                self.verifier.replay(call, values)


# the oldest goes first
MOST_PREPARED = 4096
_traits = operator.attrgetter("shape", "dtype", "layout")
_is_nested = operator.attrgetter("is_nested")
_device = Tensor.get_device  # -1 for the host; faster than a torch.device
_MISFITS = (LookupError, RuntimeError, AttributeError, TypeError)
Flags = tuple[bool | None, int, Modes]
Seen = tuple[Any, ...]  # what a batch looks like, and flags
logger = logging.getLogger(__name__)


class GraphRunner:
    """Runs a model by captured graphs. It owns them, their pools and static buffers; ``close``
    frees them. A CaptureSession makes it.

    Unless ``compilation.outputs`` is ``clone``, the next call overwrites outputs. Calls of other
    threads wait; CgplanError is raised for a call inside a call, and while another stream has work
    of the last one.

    Attributes:
        stats: Counts how calls were answered.
        graphs, router: For other parts of cgplan; ``recapture`` replaces them.
    """

    graphs: ModelGraphs

    def __init__(
        self,
        captured: CapturedKeys,
        capture_plan: Callable[[Plan, Collection[Key], bool], CapturedKeys],
        use: PoolUse,
        name: str,
        stats: RunnerStats | None,
    ) -> None:
        graphs = captured.graphs
        config = graphs.config
        self.stats = stats or RunnerStats(graphs.plan)
        self._capture_plan = capture_plan
        self._use = use
        self._held = partial(use.held, name)
        self._name = name
        self._reader = BatchReader(config.tensors, config.dim_names, graphs.backend.device)
        names = self._reader.names
        self._count = len(names)
        self._takes_positions = not config.metadata
        self._pick: Callable[[Mapping[str, Any]], Values] = operator.itemgetter(*names)
        if len(names) == 1:
            self._pick = lambda given: (given[names[0]],)
        self._asked_ns = 0  # when the call began, for a trace
        self._forbidden = 0  # nested `no_capture`
        self._handed: weakref.WeakSet[StagedBuffers] = weakref.WeakSet()
        self._replanner = Replanner(self.stats)
        self.stats.replays_before = self.stats.replays
        self._replayed = self.stats.replays  # of the last time awake that had any
        self._serve(captured)

    # Each of these ends more than the one above.

    def _look_up_anew(self) -> None:
        self._calls: dict[Seen, PreparedCall] = {}
        self._staged: dict[Seen, StagedBuffers] = {}
        self._last: PreparedCall | None = None

    def _expire_calls(self) -> None:
        for staged in list(self._handed):
            staged.retire()
        self._handed.clear()
        self._look_up_anew()
        self._launcher.last_staged = None

    def _route_anew(self) -> None:
        self._expire_calls()
        self.stats.plan = self.graphs.plan
        self.router = BatchRouter(self._captured)

    def _serve(self, captured: CapturedKeys) -> None:
        graphs = captured.graphs
        self._captured = captured
        self.graphs = graphs
        self.stats.captures += len(self.plan.keys)
        self._copiers = dict[tuple[int, ...], Copier]()
        for sizes in graphs.buffers:
            self._copier(sizes)
        self._launcher = Launcher(graphs, self._use, self._name)
        self._route_anew()
        self._state: Literal["open", "asleep", "closed"] = "open"

    def __str__(self) -> str:
        plan = self.plan
        cost = format_bytes(self.report.total_bytes)
        graphs = counted(len(plan.keys), "graph")
        sizes = f"{graphs}, sizes {describe_sizes(plan.capture_sizes)}; {cost}"
        head = f"{self._name} on {self.backend.device} ({self._state}): {plan.mode}, {sizes}"
        return f"{head}\ninputs: {', '.join(self.config.tensors)}\n{self.stats}"

    @property
    def report(self) -> CaptureReport:
        """What all captures cost so far."""
        return self._captured.report

    def audit(self) -> AuditReport:
        """Who owns the memory behind the graphs' pointers. Raises BackendError without
        cuda-bindings or a recent driver.
        """
        self._check_open()
        return self._captured.audit()

    @property
    def plan(self) -> Plan:
        """What is captured now."""
        return self.graphs.plan

    @property
    def reachable(self) -> Plan:
        """``plan``, and what is captured on demand."""
        return self._captured.wanted if self.graphs.on_demand else self.plan

    @property
    def config(self) -> Config:
        return self.graphs.config

    @property
    def model(self) -> Callable[..., Any]:
        """The model; callers set its forward context."""
        return self.graphs.model

    @property
    def backend(self) -> GraphBackend:
        return self.graphs.backend

    @property
    def is_closed(self) -> bool:
        """Closed, or failed to capture again; not while asleep."""
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
            inputs: Other inputs and the metadata. All are unpadded, on the runner's device or on
                the host; host tensors may be written to after the call.
            uniform_decode: Every request has ``plan.query_len`` tokens. Absent: counts tell it for
                1; else the batch is mixed.
            num_active_loras: Distinct adapters.
            invalid_modes: Runtime modes that the batch may not run in.

        Returns the output without padding; borrowed, see the class.

        Raises:
            InputError: a tensor does not match its declaration; nothing ran.
            CaptureError: autocast is not as at capture.
            AddressError: memory that the graph uses has moved.
            DispatchMissError: no graph serves the batch and ``compilation.on_miss`` is ``error``.
            CgplanError: the runner is closed.
        """
        if tensors and (inputs or not self._takes_positions):
            inputs = self._by_name(tensors, inputs)
            tensors = ()
        # PoolUse.take in line
        if self._use.acquire(False):
            self._use.thread = get_ident()
        else:
            self._use.take(self._name)
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
            is_alike = False
            key: Seen | None = None
            with torch._C.DisableTorchFunction():  # under a mode an attribute takes 1 us
                try:
                    values = tensors or self._pick(inputs)
                    # TensorGuards crash on nested ones
                    if len(tensors or inputs) != self._count or True in map(_is_nested, values):
                        call = None
                    elif call and flags == call.flags and call.is_alike(*values):
                        is_alike = True
                    else:
                        key = *map(_traits, values), *map(_device, values), *flags
                        call = self._calls.get(key)
                except _MISFITS:  # _look_up names them
                    call = None
                if call is None:
                    call, values = self._look_up(self._by_name(tensors, inputs), flags, key)
                # equal shapes, other strides or inference mode
                elif call is self._last and not is_alike:
                    call.is_alike = alike_to(values)
                self._last = call
                self._launcher.launch(call, values, is_alike)
            output = call.output()
            if began:
                stats.add_time(perf_counter_ns() - began)
            return output
        finally:
            self._use.thread = 0
            self._use.unlock()

    def alike_call(self, tensors: Values) -> PreparedCall | None:
        """The last call, if it was of tensors like these, without flags."""
        call = self._last
        is_nested = True in map(_is_nested, tensors)
        if call and call.flags == (None, 0, None) and not is_nested and call.is_alike(*tensors):
            return call
        return None

    def call_again(
        self,
        call: PreparedCall,
        tensors: Values,
    ) -> Any:
        """``self(*tensors)`` by the ``call`` that ``alike_call`` has just found, unless another
        thread's call came between, or this one is timed.
        """
        self._use.take(self._name)
        try:
            if call is self._last and self.stats.until_timed:
                self.stats.until_timed -= 1
                with torch._C.DisableTorchFunction():
                    self._launcher.launch(call, tensors, True)
                return call.output()
        finally:
            self._use.release()
        return self(*tensors)

    def _by_name(
        self,
        tensors: Values,
        inputs: dict[str, Tensor],
    ) -> dict[str, Tensor]:
        names = self.config.inputs
        given = dict(zip(names, tensors, strict=False))
        if len(given) < len(tensors) or given.keys() & inputs:
            raise InputError(
                f"{len(tensors)} tensors by position and {', '.join(inputs) or 'none'} by name do "
                "not fit the inputs",
                remedy=f"Pass inputs by position in the order {', '.join(names)}, or by name; "
                "metadata by name.",
            )
        return given | inputs

    def _look_up(
        self,
        inputs: Mapping[str, Any],
        flags: Flags,
        key: Seen | None = None,
    ) -> tuple[PreparedCall, Values]:
        """With a ``key`` the call is kept."""
        route = self.route(inputs, *flags)
        values = [inputs[name] for name in self._reader.names]
        if self._may_capture(route):
            buffers = self.graphs.buffers
            for index, value in enumerate(values):
                # captures overwrite outputs of earlier calls; they put static buffers back
                if value.device == self.backend.device and not buffers.owns(value):
                    values[index] = value.clone()
            with torch._C._EnableTorchFunction():
                self._capture_for(route)
            route = self.route(inputs, *flags)
        call = self._new_call(route, values)
        if key is not None and not self._awaits_capture(route):
            call.flags = flags
            call.is_alike = alike_to(values)
            _keep(self._calls, key, call)
        return call, values

    def _awaits_capture(self, route: RoutedBatch) -> bool:
        return route.missing is not None and route.missing not in self._captured.failed

    def _may_capture(self, route: RoutedBatch) -> bool:
        return not self._forbidden and is_capture_allowed() and self._awaits_capture(route)

    def _new_call(
        self,
        route: RoutedBatch,
        values: Values | None,
    ) -> PreparedCall:
        reason = None
        mode = route.mode
        if mode is CUDAGraphMode.NONE:
            reason = self.router.reason_for_none(route)
        logger.debug(
            "%s: %s runs as %s %s", self._name, route.batch, mode, reason or route.descriptor
        )
        count = self.stats.count_of(route, reason)
        call = PreparedCall.of(route, count, values, self.graphs, self._copier)
        self._launcher.verifier.schedule(call)
        if self.config.report.nvtx or Trace.current:
            self._show(call, staged=values is None)
        return call

    def _copier(self, sizes: tuple[int, ...]) -> Copier:
        if sizes not in self._copiers:
            graphs = self.graphs
            copies = graphs.config.compilation.cudagraph_copy_inputs
            self._copiers[sizes] = graphs.backend.copier(graphs.buffers[sizes], copy_inputs=copies)
        return self._copiers[sizes]

    def _show(
        self,
        call: PreparedCall,
        *,
        staged: bool,
    ) -> None:
        copy_in = call.copy_in
        replay = call.replay
        trace = Trace.current
        route = call.route
        began = 0
        name = f"{route.mode} {route.descriptor}"
        batch = route.batch
        annotate = self.backend.annotate if self.config.report.nvtx else nullcontext

        def copied(values: Values, *rest: Any) -> None:
            nonlocal began
            start = perf_counter_ns()
            began = start if staged else self._asked_ns or start
            self._asked_ns = 0
            with span("copy", bytes=sum(value.nbytes for value in values)):
                copy_in(values, *rest)
            if trace and trace is Trace.current and not staged:
                trace.add("dispatch", began, {}, start)

        def shown() -> None:
            with annotate(f"cgplan {name}"), span("launch"):
                replay()
            if trace and trace is Trace.current:
                trace.add(name, began, {"num_tokens": batch.num_tokens, "num_reqs": batch.num_reqs})

        call.copy_in = copied
        call.replay = shown

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """A block whose calls, captures and compilations are recorded; ``trace.to_json()`` is for
        Perfetto.
        """
        pick = self._pick

        def asked(given: Mapping[str, Any]) -> Values:
            self._asked_ns = perf_counter_ns()
            return pick(given)

        with nullcontext(Trace.current) if Trace.current else Trace().on() as trace:
            self._look_up_anew()
            try:
                # so that `asked` is called
                with replaced(self, _pick=asked, _takes_positions=False):
                    yield trace
            finally:
                self._look_up_anew()

    @contextmanager
    def _changing(self) -> Iterator[CapturedKeys]:
        self._launcher.take_stream()
        self._expire_calls()
        before = set(self.plan.keys)
        generation = self.graphs.pools.generation
        try:
            yield self._captured
        finally:
            now = set(self.plan.keys)
            changed = before ^ now
            if self.graphs.pools.generation != generation:
                changed = before | now  # captured again
            self._launcher.verifier.forget(changed)
            self.stats.evictions += len(before - now)
            self.stats.captures += len(now - before)
            self._route_anew()

    def _capture_for(self, route: RoutedBatch) -> None:
        assert route.missing
        self.graphs.check_autocast()
        with self._changing() as captured:
            captured.capture([route.missing])
            failed = captured.failed.get(route.missing)
            if failed:
                self.stats.failures += 1
                logger.debug(
                    "%s: %s %s was not captured: %s", self._name, *route.missing, failed.detail
                )

    def stage(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        invalid_modes: Modes = None,
    ) -> StagedBuffers:
        """The static buffers' rows, to be written in place without a copy; leaving the block runs
        the batch. The same counts give the same object: read its output first. Where ``stage``
        captures on demand, it overwrites borrowed outputs.

            with runner.stage(num_tokens=13) as buffers:
                buffers["input_ids"].copy_(ids)
            logits = buffers.output

        ``num_reqs`` is needed where an input counts requests and tokens do not tell them. Raises
        InputError for a batch that the static buffers do not hold. Otherwise as a call.
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
        batch = self.router.staged(num_tokens, num_reqs, uniform_decode, counts_reqs=counts_reqs)
        route = self.router.route(batch, *flags)
        # not inside another block
        if self._may_capture(route) and not self._use.thread:
            with self._held():
                self._capture_for(route)
            route = self.router.route(batch, *flags)
        staged = StagedBuffers(self._launcher, self._new_call(route, None))
        self._handed.add(staged)
        if not self._awaits_capture(route):
            _keep(self._staged, counts, staged)
        return staged

    def padded(
        self,
        num_tokens: int,
        *sizes: int,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
    ) -> int | None:
        """Tokens to which a call pads a batch, also by a key still to be captured; None: it runs
        eagerly. ``sizes``: the other named dimensions. Raises InputError.
        """
        self._check_open()
        if num_tokens < 1:
            raise InputError(f"a batch of {num_tokens} tokens", remedy="Ask for at least one.")
        batch = Batch(operator.index(num_tokens), None, sizes)
        route = self.router.route(batch, uniform_decode, num_active_loras, None)
        key = route.key
        if self._may_capture(route):
            key = route.missing or key
        mode, descriptor = key
        return None if mode is CUDAGraphMode.NONE else descriptor.num_tokens

    def run_eagerly(
        self,
        *tensors: Tensor,
        padded: bool = True,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        **inputs: Tensor,
    ) -> Any:
        """What a replay must equal: the model's own code, with padding unless ``padded=False``."""
        inputs = self._by_name(tensors, inputs)
        with self._held():
            route = self.route(inputs, uniform_decode, num_active_loras)
            graphs = self.graphs
            self._launcher.take_stream()
            values = self._pick(inputs)
            descriptor = route.descriptor
            if route.mode is CUDAGraphMode.NONE or not padded:
                return graphs.run_unpadded(route.unpadded, values)
            call = self._new_call(route, values)
            call.copy_in(values, self._launcher.stream(), False)
            copier = self._copier(descriptor.sizes)
            before = copier.buffers.versions()
            try:
                output = graphs.run_eager(descriptor, graphs.views(descriptor))
            finally:
                copier.note_writes(before)
            return graphs.outputs.cut(output, route.batch)

    def verify(
        self,
        *tensors: Tensor,
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        **inputs: Tensor,
    ) -> VerifyRecord:
        """Compare a replay with the model's own code; the model's tensors are put back. Raises as a
        call, and DispatchMissError.
        """
        inputs = self._by_name(tensors, inputs)
        with self._held():
            self._launcher.take_stream()
            call, values = self._look_up(inputs, (uniform_decode, num_active_loras, None))
            if call.route.mode is CUDAGraphMode.NONE:
                raise DispatchMissError(
                    f"no graph serves the batch: {call.count.reason}",
                    remedy="Pass a batch that a graph serves, of at most "
                    f"{max(self.plan.capture_sizes, default=0)} tokens.",
                )
            self._captured.check_addresses(call.route.key)
            call.copy_in(values, self._launcher.stream(), False)
            return self._launcher.verifier.verify(call, values, leaves=False)[0]

    def route(
        self,
        inputs: Mapping[str, Tensor],
        uniform_decode: bool | None = None,
        num_active_loras: int = 0,
        invalid_modes: Modes = None,
    ) -> RoutedBatch:
        """Dispatch a batch; nothing runs. Arguments and errors as for a call."""
        self._check_open()
        return self.router.route(
            self._reader.read(inputs), uniform_decode, num_active_loras, invalid_modes
        )

    def input_views(
        self,
        num_tokens: int,
        num_reqs: int | None = None,
    ) -> dict[str, Tensor]:
        """Views of the runner's static buffers, to be written and passed to the call. Each call
        resets their padding: prefer ``stage``.
        """
        self._check_open()
        self._refuse_sizes()
        num_tokens = self.router.check_size(num_tokens)
        most = min(num_tokens, self.plan.max_num_seqs)
        reqs = most if num_reqs is None else num_reqs
        if not 0 < reqs <= most:
            raise InputError(
                f"{num_tokens} tokens are 1 to {most} requests, asked for {reqs}",
                remedy="Ask for fewer, or raise scheduler.max_num_seqs.",
            )
        return self.graphs.buffers[()].expose(num_tokens, reqs)

    def graph(
        self,
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
    ) -> Any:
        """The backend's graph of a FULL key, if any."""
        if mode is not CUDAGraphMode.FULL:
            return None
        entry = self.graphs.entry((mode, descriptor))
        return None if entry is None else entry.graph

    def invalidate(self, name: str) -> None:
        """Say that memory of the graphs, such as a KV cache, has moved: until ``recapture``,
        replays raise AddressError with that name.
        """
        self._check_open()
        self.graphs.addresses.invalidate(name)
        staged = [block.call for block in self._handed if block.call]
        for call in (*self._calls.values(), *staged):
            call.needs_check = call.route.mode is not CUDAGraphMode.NONE

    def recapture(self) -> None:
        """Capture the plan again, failed keys too, for the model's present memory; outputs and
        ``input_views`` expire. Raises as CaptureSession.run; then the runner is closed.
        """
        with self._held():
            if self._state != "asleep":
                self._check_open()
            captured = self._captured
            on_demand = self.config.compilation.is_lazy
            keys = captured.keys if on_demand else captured.asked.keys
            self._free()
            self._state = "asleep"
            try:
                self._capture_again(keys, on_demand=on_demand)
            except BaseException:
                self._state = "closed"
                raise

    def _capture_again(
        self,
        keys: Collection[Key],
        *,
        on_demand: bool,
    ) -> None:
        self._serve(self._capture_plan(self._captured.asked, keys, on_demand))
        self.stats.replays_before = self.stats.replays

    def exchange(
        self,
        captured: Collection[Key] = (),
        evicted: Collection[Key] = (),
    ) -> None:
        """Free the graphs of some keys, and capture wanted others. Raises AddressError."""
        with self._held():
            self._check_open()
            with self._changing() as keys:
                keys.capture(captured, evicted=evicted)

    @contextmanager
    def no_capture(self) -> Iterator[None]:
        """A block in which no call captures, but uses a larger graph, or runs eagerly."""
        self._forbidden += 1
        try:
            yield
        finally:
            self._forbidden -= 1

    def retry_failed(self) -> None:
        """Capture keys of ``report.failed`` when a batch asks for them."""
        with self._held():
            self._captured.failed.clear()
            self._expire_calls()

    def replan(
        self,
        *,
        traffic: Traffic | None = None,
        times: StepTimes | str | Path | None = None,
        costs: GraphCosts | None = None,
        apply: bool = True,
    ) -> ReplanReport:
        """Plan again for recent batches, inside the budget, and exchange graphs. Outputs are no
        longer valid; failed keys are in ``report.failed``.

        Args:
            traffic: Absent: the batches since the last replan.
            times: Or their file. Absent: measured now, on padding.
            costs: Absent: those of the captures so far.
            apply: False: propose only.

        Raises:
            CgplanError: ``capture_policy`` is not ``adaptive``, or captures are forbidden.
            TrafficError: there were no batches.
            BudgetError: the budget does not pay for a graph.
            AddressError: ``recapture`` first: memory has moved.
        """
        with self._held():
            self._check_open()
            if self._forbidden:
                raise CgplanError(
                    "replan inside runner.no_capture()", remedy="Call it after the block."
                )
            if isinstance(times, str | Path):
                times = StepTimes.load(times)
            self._launcher.take_stream()
            self.graphs.check_autocast()
            if not apply:
                return self._replanner.replan(self._captured, traffic, times, costs)
            self._expire_calls()
            try:
                return self._replanner.replan(self._captured, traffic, times, costs, self._replace)
            finally:
                self._route_anew()

    def _replace(self, plan: Plan) -> CapturedKeys:
        self._free()
        self._serve(self._capture_plan(plan, (), self.graphs.on_demand))
        return self._captured

    def close(self) -> None:
        """Free graphs, pools and static buffers; outputs expire."""
        with self._held():
            self._free()

    def sleep(self) -> None:
        """Free graphs, pools and static buffers until ``wake``; outputs expire, and calls meanwhile
        raise CgplanError.
        """
        with self._held():
            if self._state != "asleep":
                self._check_open()
                self._before_sleep = self.graphs.addresses.take_record()
                self._free()
                self._state = "asleep"

    suspend = sleep  # its former name

    def wake(self) -> None:
        """Capture the keys that replayed since the last start, wake or ``stats.reset()``, or else
        before it, with the model's current memory, and others when a batch asks for them; with
        several ranks, all.

        Raises, and the runner stays asleep:
            AddressError: a parameter, or a tensor that graphs read, is gone or looks otherwise.
            CaptureError, ModelError: as CaptureSession.run.
        """
        with self._held():
            if self._state != "asleep":
                self._check_open()
                return
            graphs = self.graphs
            self._before_sleep.refuse_reshaped(graphs.roots)
            self._replayed = self.stats.replays - self.stats.replays_before or self._replayed
            keys = self._captured.asked.keys
            is_alone = graphs.is_alone
            if is_alone:
                keys = tuple(key for key in keys if self._replayed[key])
            self._capture_again(keys, on_demand=is_alone)

    def _free(self) -> None:
        """A second call completes what was interrupted."""
        self._state = "closed"
        self._expire_calls()
        while self._copiers:
            self._copiers.popitem()[1].close()
        self.graphs.free()

    def _refuse_sizes(self) -> None:
        names = self.config.dim_names[1:]
        if names:
            raise InputError(
                f"batches of {', '.join(names)} cannot be written in place: their padding lies "
                "between rows",
                remedy="Call the runner with tensors.",
            )

    def _check_open(self) -> None:
        if self._state == "asleep":
            raise CgplanError("the runner is asleep", remedy="Call runner.wake() first.")
        if self._state == "closed":
            raise CgplanError("the runner is closed", remedy="Capture again.")


def _keep(
    prepared: dict[Seen, Any],
    key: Seen,
    value: Any,
) -> None:
    if len(prepared) >= MOST_PREPARED:
        prepared.pop(next(iter(prepared)))
    prepared[key] = value
