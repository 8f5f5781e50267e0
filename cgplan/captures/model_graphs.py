"""A model with its graphs and the memory that they read."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cgplan.backends import GraphBackend, MemoryReading
from cgplan.backends.backend import autocast_cache, span
from cgplan.backends.capture_answers import answering
from cgplan.backends.context import refuse_forbidden_capture
from cgplan.backends.host_sync import storages_of
from cgplan.buffers.outputs import OutputRows
from cgplan.buffers.static import Tensors
from cgplan.captures.failures import drop_locals, explain_failure, raise_caused
from cgplan.captures.model_runs import ModelRuns, State
from cgplan.captures.rank_sync import SINGLE_RANK, RankSync
from cgplan.captures.rehearsal import Rehearsal
from cgplan.captures.warm_ups import ANEW, WarmUps
from cgplan.errors import CaptureError, CaptureMemoryError
from cgplan.graphs.ambient import AmbientState, random_state_kept
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import OutsideLog, look
from cgplan.graphs.pools import GraphPool, RunnerPools
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper
from cgplan.modes import CUDAGraphMode, Key
from cgplan.piecewise.breaks import any_breaks
from cgplan.piecewise.routes import choose_route
from cgplan.planning.plan import Lane
from cgplan.reports.records import GraphRecord, StateRecord

_STOPPED = (
    "torch has compiled a function of the model as often as torch._dynamo.config.recompile_limit "
    "allows, and runs it uncompiled in graphs of further sizes: raise the limit, or compile the "
    "function with dynamic=True"
)


def driver_bytes(
    backend: GraphBackend,
    before: MemoryReading,
    after: MemoryReading,
) -> int | None:
    """Free memory lost in between, less what torch's allocator reserved."""
    if not backend.counts_driver_bytes or after.free is None or before.free is None:
        return None
    lost = before.free - after.free
    reserved = after.reserved - before.reserved
    return lost - reserved


class _Clock(NamedTuple):
    """Times, and compilations so far; ``stopped``: functions at torch.compile's limit."""

    at: float
    compile_seconds: float
    cached: int
    stopped: int

    @classmethod
    def now(cls) -> _Clock:
        at = time.perf_counter()
        if "torch._dynamo" not in sys.modules:
            return cls(at, 0.0, 0, 0)
        utils = torch._dynamo.utils
        counts = utils.counters
        stopped = 0
        for reason, times in counts["unimplemented"].items():
            if "recompile limit" in reason:
                stopped += times
        return cls(
            at,
            utils.calculate_time_spent().get("total_wall_time", 0.0),
            max(
                counts["inductor"]["fxgraph_cache_hit"],
                counts["aot_autograd"]["autograd_cache_hit"],
            ),
            stopped,
        )


@dataclass(eq=False, repr=False)
class ModelGraphs(ModelRuns):
    """It owns all but the model and a given ``pool``.

    Attributes:
        places: What the last captures wrote of the model, and whether it was put back.
        inspection_seconds: Time that served the report.
        is_alone: No other rank runs the same forwards.
    """

    pool: InitVar[GraphPool | None] = None
    together: RankSync = SINGLE_RANK

    def __post_init__(
        self,
        state: State,
        pool: GraphPool | None,
    ) -> None:
        config = self.config
        backend = self.backend
        device = backend.device
        self.pools = RunnerPools(config.compilation.pool, backend, pool)
        super().__post_init__(state)
        self.outputs = OutputRows(config)
        self.returns_nothing = False
        self.looked_at = ""
        self.places: tuple[StateRecord, ...] = ()
        self.inspection_seconds = 0.0
        self.is_alone = self.together is SINGLE_RANK
        self._rehearsal: Rehearsal | None = None
        self._record: Fingerprint | None = None  # after the last rehearsal
        self._has_failed = False
        self.warm_ups = WarmUps(
            config.compilation.cudagraph_num_of_warmups,
            may_skip=self.is_alone and pool is None and config.compilation.capture_policy != "lazy",
        )
        self._retired: list[tuple[list[Callable[[], bool]], Callable[[], None]]] = []
        self.ambient = AmbientState.now(device.type)
        self.route = choose_route(self.plan, config, self.model, backend, self._calls_breaks)
        self.wrapper = CUDAGraphWrapper(self.route.whole, CUDAGraphMode.FULL, backend=backend)

    def _calls_breaks(self) -> bool:
        if not any_breaks():
            return False
        key = self.plan.keys[-1]
        views = self.views(key[1])
        with self.rehearsing() as rehearsal:
            rehearsal.set_context(key)
            run = partial(self.run, self.model, CUDAGraphMode.NONE, key[1], views)
            return look(run, rehearsal.kept).breaks

    # --- the model around captures ----------------------------------------------------------------

    @contextmanager
    def rehearsing(self) -> Iterator[Rehearsal]:
        """A block of runs on padding; the model is put back. Can be nested."""
        if self._rehearsal is not None:
            yield self._rehearsal
            return
        self.backend.synchronize()
        before = Fingerprint.of(self.roots, self.backend.device, draws=True)
        kept = PutBack(before, self.copy_limit())
        self.use_generators(before.generators)
        self._rehearsal = Rehearsal(self, kept)
        lost: tuple[type[Exception], ...] = (RuntimeError,)
        try:
            yield self._rehearsal
            lost = ()
        finally:
            self._rehearsal = None
            with suppress(*lost):  # a lost device raises its own error
                self._put_back(kept)
            kept.drop_copies()

    def _put_back(self, kept: PutBack) -> None:
        self.backend.synchronize()
        kept.restore()
        self.backend.synchronize()  # the next batch may use another stream
        self.addresses.volatile |= kept.volatile
        self.looked_at = kept.before.summary()
        self._record = kept.before.without_draws()
        self._note_written(kept)
        places = list[StateRecord]()
        for path, (nbytes, how) in kept.outcome.items():
            places.append(StateRecord(path=path, nbytes=nbytes, kept=how))
        self.places = tuple(places)
        if not self.scope.is_open:
            self.seal()

    def _note_written(self, kept: PutBack) -> None:
        facts = self.facts
        limit = self.copy_limit() if self.real_rows is not None else 0
        for path, tensor in kept.written:
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            if path in kept.unwritten_by_captures:
                facts.overwritten.discard(storage._cdata)
            if nbytes > limit and storage._cdata in facts.overwritten:
                continue
            # other views may be written
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            count = nbytes // tensor.itemsize
            facts.written[path] = whole.set_(storage, 0, (count,), (1,))

    def record(self) -> Fingerprint:
        if self._record is not None and not self._record.changes():
            return self._record
        return self.fingerprint()

    @property
    def copied_bytes(self) -> int:
        """On the device, of the model's state."""
        return 0 if self._rehearsal is None else self._rehearsal.kept.copied()

    def copy_limit(self) -> int:
        """In bytes."""
        limit = self.config.compilation.state_copy
        if limit is not None:
            return limit
        free = self.backend.memory().free or 4 << 30
        return free // 4

    @contextmanager
    def captures_again(self) -> Iterator[None]:
        """A block in torch's state of the first captures."""
        self.backend.synchronize()
        self.scope.is_open = True
        without_grad = self.ambient._replace(grad=False)
        in_state = without_grad.entered(self.backend.device.type)
        try:
            with self.rehearsing(), in_state, self.buffers.on_padding():
                with self.backend.session():
                    yield
                self.backend.synchronize()
                if self.real_rows is not None:
                    self.buffers.fill_padding()
        finally:
            self.seal()

    # --- captures ---------------------------------------------------------------------------------

    def capture_key(
        self,
        key: Key,
        *,
        in_service: bool = False,
    ) -> GraphRecord | None:
        """None: captures start again with warm-ups, not ``in_service``, where a failure leaves
        other keys as they are. Raises CaptureError; ModelError: the model failed before its
        capture.
        """
        refuse_forbidden_capture(f"the graph for {key[0]} {key[1]}")
        self.addresses.is_outdated = True
        self.warm_ups.starts_again = False
        began = _Clock.now()
        record = None
        with self.rehearsing() as rehearsal:
            while record is None and not self.warm_ups.starts_again:
                record = self._try_capture(
                    rehearsal,
                    key,
                    began,
                    in_service=in_service,
                )
                rehearsal.kept.restore(between_keys=True)
        return record

    def _try_capture(
        self,
        rehearsal: Rehearsal,
        key: Key,
        began: _Clock,
        *,
        in_service: bool,
    ) -> GraphRecord | None:
        """None: another look, or a warm-up, comes first."""
        mode, descriptor = key
        backend = self.backend
        self.scope.pool = self.pools.of(key)
        self.scope.entries = []
        if self.real_rows is not None:
            self.real_rows.fill(self.views(descriptor))
        warm_ups = 0
        is_capturing = False
        try:
            rehearsal.look(key)
            is_first = mode not in rehearsal.judged
            warm_ups = self._warm_ups_of(rehearsal, key, in_service=in_service)
            with random_state_kept(backend.device, self.generators):
                self._run_warm_ups(rehearsal, key, warm_ups)
                warm = time.perf_counter()
                is_capturing = True
                memory = backend.memory()
                compiled = _Clock.now().compile_seconds
                before = self.pools.memory()
                self.inspection_seconds += time.perf_counter() - warm
                output = self._run_capture(rehearsal, key)
            if is_first:
                rehearsal.refuse_value(mode)
        except Exception as error:
            failure = explain_failure(
                error,
                f"{mode} {descriptor}",
                capturing=is_capturing,
                free=backend.memory().free,
                host_sync=rehearsal.host_sync(mode),
                all_freed=not in_service,
            )
            looks_again = rehearsal.note_failure(mode, failure if is_capturing else None)
            # a verdict of ours stands after a warm-up, too
            is_verdict = type(error) is CaptureError or isinstance(failure, CaptureMemoryError)
            is_cold = is_capturing and not warm_ups and not is_verdict
            if not looks_again and not is_cold:
                raise_caused(failure, error)
            drop_locals(error)
            self.evict([key])
            rehearsal.kept.restore(between_keys=True)
            if is_cold:
                rehearsal.refuse_changed(f"{mode} {descriptor}")
                is_explained = looks_again or _Clock.now().compile_seconds > compiled
                is_held = self.pools.memory().held > 0
                self._has_failed |= is_held
                self.warm_ups.add(key, is_lasting=is_held or not is_explained)
            return None
        self._check_captured(key, output)
        del output  # it holds memory of the pool
        done = time.perf_counter()
        after = self.pools.memory()
        if not warm_ups:
            is_left = rehearsal.has_left or after.held > 0
            if is_left or _Clock.now().compile_seconds > compiled:
                self._drop_cold(rehearsal, key)
                self.warm_ups.add(key, is_lasting=is_left)
                return None
        seconds = warm - began.at if warm_ups else 0.0
        growth = after.nbytes - before.nbytes
        record = self._record_of(key, memory, growth, began, seconds)
        self.inspection_seconds += time.perf_counter() - done
        return record

    def _warm_ups_of(
        self,
        rehearsal: Rehearsal,
        key: Key,
        *,
        in_service: bool,
    ) -> int:
        facts = self.facts
        is_steady = not facts.outside and not facts.changes_python
        is_compiled = rehearsal.kept.before.is_compiled or self.route.splitter is not None
        may_skip = is_steady and not is_compiled and not in_service
        return self.warm_ups.of(key, may_skip=may_skip)

    def _run_smallest(self, rehearsal: Rehearsal, key: Key) -> None:
        """It tells whether the model keeps something for each size."""
        lane = Lane.of(*key)
        smallest = key
        for other in self.plan.keys:
            if Lane.of(*other) == lane:
                smallest = other
        if smallest == key or self._warm_ups_of(rehearsal, smallest, in_service=False):
            return
        held = self.backend.memory().held
        try:
            rehearsal.set_context(smallest)
            self._run_warm_ups(rehearsal, smallest, 1)
            has_left = rehearsal.has_left or self.backend.memory().held != held
        except Exception as error:  # its own capture raises it again
            drop_locals(error)
            has_left = True
        if has_left:
            self.warm_ups.may_skip = False
        rehearsal.set_context(key)

    def _drop_cold(self, rehearsal: Rehearsal, key: Key) -> None:
        """Compute what the model keeps of a capture, then free its graph."""
        with random_state_kept(self.backend.device, self.generators):
            self.run_graphed(key, self.views(key[1]))
        rehearsal.kept.count_as_run(rehearsal.changes)
        self.evict([key])

    def refuse_uncomputed(self) -> None:
        """Raise CaptureError if the model keeps tensors of a failed capture."""
        if self._has_failed and self.pools.left_bytes:
            raise CaptureError(
                "the model keeps tensors of a capture that failed without a warm-up, which no "
                "kernel has computed",
                remedy=ANEW,
            )

    def _run_warm_ups(
        self,
        rehearsal: Rehearsal,
        key: Key,
        runs: int,
    ) -> None:
        kept = rehearsal.kept
        outside = self.facts.outside
        for _ in range(runs):
            log: Any = nullcontext()
            if outside:  # the look has seen one size
                tensors = [*kept.before.tensors, *self.views(key[1]).values()]
                log = OutsideLog(self.backend.device.type, storages_of(tensors))
            with rehearsal.judged_run(key[0]), log:
                self.warm_up(key)
            if outside:
                outside += log.outside.tensors()
        if runs:
            self.backend.synchronize()
            if self.warm_ups.note_run(key):
                self._run_smallest(rehearsal, key)

    def _run_capture(
        self,
        rehearsal: Rehearsal,
        key: Key,
    ) -> Any:
        mode, descriptor = key
        log: AbstractContextManager[object] = nullcontext()
        if self.config.compilation.audit != "off":
            log = self.backend.logging_operators()
        answers = self._answering(mode, capturing=True)
        with rehearsal.judged_run(mode, captures=True), answers, log:
            return self.run_graphed(key, self.views(descriptor))

    def _check_captured(
        self,
        key: Key,
        output: Any,
    ) -> None:
        mode, descriptor = key
        self.returns_nothing = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
        self.outputs.check(output, descriptor, self.padded_reqs(descriptor))
        if self.scope.entries:
            return
        remedy = (
            "Outside of eager pieces the forward computed nothing on padding: name fewer "
            "pieces, or choose FULL or NONE. If padding misses a function under "
            "eager_break_during_capture, set piecewise: modules."
        )
        if self.route.name == "wrappers":
            remedy = (
                "Wrap the model's segments in CUDAGraphWrapper(..., "
                "CUDAGraphMode.PIECEWISE), or choose piecewise: ops, FULL or "
                "FULL_DECODE_ONLY."
            )
        raise CaptureError(f"nothing in the model captured for {mode} {descriptor}", remedy=remedy)

    def _record_of(
        self,
        key: Key,
        memory: MemoryReading,
        growth: int,
        began: _Clock,
        warmup_seconds: float,
    ) -> GraphRecord:
        backend = self.backend
        scope = self.scope
        scope.wrappers = list(dict.fromkeys(scope.wrappers))  # each capture adds its own
        driver = driver_bytes(backend, memory, backend.memory())
        now = _Clock.now()
        counts = list[int]()
        graphs = 0
        eager_pieces = 0
        capture_seconds = 0.0
        for entry in scope.entries:
            graphs += len(entry.segments)
            eager_pieces += entry.eager_pieces
            capture_seconds += entry.capture_seconds
            for graph in entry.segments:
                nodes = backend.num_nodes(graph)
                if nodes is not None:
                    counts.append(nodes)
                self.facts.note(*backend.notes(graph))
        if now.stopped > began.stopped:
            self.facts.note(_STOPPED)
        is_counted = len(counts) == graphs
        return GraphRecord(
            mode=key[0],
            descriptor=key[1],
            graphs=graphs,
            nodes=sum(counts) if is_counted else None,
            eager_pieces=eager_pieces,
            pool_growth=growth,
            driver_bytes=driver,
            warmup_seconds=warmup_seconds,
            capture_seconds=capture_seconds,
            segment_nodes=tuple(counts) if is_counted else (),
            compile_seconds=now.compile_seconds - began.compile_seconds,
            cached=now.cached - began.cached,
        )

    def _answering(
        self,
        mode: CUDAGraphMode,
        *,
        capturing: bool,
    ) -> AbstractContextManager[None]:
        is_told = mode in self.facts.told
        hidden_from = self.config.compilation.hide_capture_from
        if is_told and capturing:  # eager pieces ask torch
            hidden_from = ()
        return answering(hidden_from, lambda _: is_told)

    def warm_up(self, key: Key) -> Any:
        mode, descriptor = key
        is_full = mode is CUDAGraphMode.FULL
        call = self.route.whole if is_full else self.route.warm
        cache = autocast_cache(on=self.runs_python_again(mode))
        with cache, self._answering(mode, capturing=False), span("warm-up"):
            return self.run(call, CUDAGraphMode.NONE, descriptor, self.views(descriptor))

    def run_graphed(
        self,
        key: Key,
        tensors: Tensors,
    ) -> Any:
        """Replay, or capture while the scope is open."""
        mode, descriptor = key
        call = self.wrapper if mode is CUDAGraphMode.FULL else self.route.forward
        return self.run(call, mode, descriptor, tensors)

    def seal(self) -> None:
        """Missing keys and moved memory are errors from now on."""
        self.scope.is_open = False
        if self._rehearsal is not None:
            return
        known: Fingerprint | None = None
        if self.real_rows is None:
            known = self._record
            self._record = None
        self.addresses.seal(known)

    def check_autocast(self) -> None:
        done = "traced" if self.route.name == "ops" else "captured"
        self.ambient.refuse_other_autocast(self.backend.device.type, done)

    # --- graphs -----------------------------------------------------------------------------------

    def entry(self, key: Key) -> CUDAGraphEntry | None:
        """None without a graph, and with ``piecewise: wrappers``."""
        mode, descriptor = key
        wrapper = self.wrapper if mode is CUDAGraphMode.FULL else self.route.chain
        entry = None if wrapper is None else wrapper.entries.get(descriptor)
        return entry if entry is not None and entry.scope is self.scope.mark else None

    def captured(self) -> Iterator[tuple[Key, CUDAGraphEntry]]:
        for wrapper in self.scope.wrappers:
            for entry in wrapper.entries.values():
                if entry.scope is self.scope.mark:
                    yield (wrapper.runtime_mode, entry.descriptor), entry

    def evict(self, keys: Collection[Key]) -> None:
        """Free these graphs; those with held outputs at a later change."""
        self.backend.synchronize()
        self.scope.entries = []
        for wrapper in self.scope.wrappers:
            mine = {descriptor for mode, descriptor in keys if mode is wrapper.runtime_mode}
            for output, free in wrapper.take_out(self.scope, mine):
                self._retired.append(([self.backend.watch(tensor) for tensor in output], free))
                del output  # else it stays held below
        self.addresses.forget(keys)
        waiting = []
        for held, free in self._retired:
            if any(is_held() for is_held in held):
                waiting.append((held, free))
            else:
                free()
        if len(waiting) < len(self._retired):
            self._retired = waiting
            self.backend.release_cached()
        for key in keys:
            self.pools.drop(key)

    def drop_all(self) -> None:
        self.backend.synchronize()
        self._reset()
        self.backend.release_cached()
        self.pools.renew()

    def _reset(self) -> None:
        for wrapper in self.scope.wrappers:
            wrapper.reset(self.scope)
        self.scope.entries = []
        self.scope.wrappers = []

    def free(self) -> None:
        """Free all, for good."""
        together = self.together
        self.together = SINGLE_RANK
        with ExitStack() as stack:
            stack.callback(self._free)
            stack.callback(together.release)
            self.backend.synchronize()

    def _free(self) -> None:
        self._reset()
        for _, free in self._retired:
            free()
        self._retired = []
        self.pools.close()
        self.scope.pool = None
        self.scope.is_open = False
        self.buffers.clear()
        self.addresses.forget_all()
        self.facts.written = {}
        self._record = None
        self.backend.release_cached()
