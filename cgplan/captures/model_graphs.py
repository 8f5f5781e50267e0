"""ModelGraphs: a model with its graphs and the memory that they read. A session fills it, and a
runner calls it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from cgplan.backends import GraphBackend, MemoryReading
from cgplan.backends.backend import autocast_cache, span
from cgplan.backends.capture_answers import answering
from cgplan.backends.context import CaptureScope, forward_context, refuse_forbidden_capture
from cgplan.backends.graph_nodes import OperatorLog
from cgplan.buffers.outputs import OutputRows
from cgplan.buffers.static import StaticBoxes, StaticBuffers, Tensors
from cgplan.captures.failures import drop_locals, explain_failure
from cgplan.captures.rank_sync import SINGLE_RANK, PeerMemory, RankSync
from cgplan.config import Config
from cgplan.errors import AddressError, CaptureError, HostSyncError, InputError
from cgplan.graphs.ambient import AmbientState, number_of, random_state_kept
from cgplan.graphs.fingerprint import Change, Fingerprint, is_ignored, is_within
from cgplan.graphs.footprint import Footprint, examine, judge, listed, look, refuse_value
from cgplan.graphs.pools import GraphPool, RunnerPools
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.watch import Watch
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphOptions, CUDAGraphWrapper
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.piecewise.breaks import any_breaks
from cgplan.piecewise.routes import choose_route
from cgplan.piecewise.split import refuse_missing_ops
from cgplan.planning import Plan
from cgplan.planning.build import DEFAULT_SPLITTING_OPS
from cgplan.planning.costs import widest
from cgplan.reports.records import GraphRecord, StateRecord

BeforeKey = Callable[[CUDAGraphMode, BatchDescriptor, Tensors], object]


class _Metadata(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise InputError(
            f"the model reads metadata {name!r}, which is not declared",
            remedy=f"Declare it under `metadata`; declared are {', '.join(self) or 'none'}.",
        )


def _never() -> bool:
    return False


def driver_bytes(backend: GraphBackend, before: MemoryReading, after: MemoryReading) -> int | None:
    """Free memory lost in between that torch's allocator did not reserve; None where there is no
    driver.
    """
    if not backend.supports("driver_bytes") or after.free is None or before.free is None:
        return None
    return (before.free - after.free) - (after.reserved - before.reserved)


_STOPPED = (
    "torch has compiled a function of the model as often as torch._dynamo.config.recompile_limit "
    "allows, and runs it "
    "uncompiled in graphs of further sizes: raise the limit, or compile the function with "
    "dynamic=True"
)


def _compilations() -> tuple[float, int, int]:
    """Seconds that torch.compile took in this process, how many compilations torch's caches on disk
    answered, and for how many functions it met its limit.
    """
    if "torch._dynamo" not in sys.modules:
        return 0.0, 0, 0
    utils = torch._dynamo.utils
    counts = utils.counters
    cached = max(
        counts["inductor"]["fxgraph_cache_hit"], counts["aot_autograd"]["autograd_cache_hit"]
    )
    stopped = sum("recompile limit" in reason for reason in counts["unimplemented"].elements())
    return utils.calculate_time_spent().get("total_wall_time", 0.0), cached, stopped


@dataclass(frozen=True)
class RealRows:
    """Captures and comparisons run on rows of real batches, not on padding.

    Attributes:
        fill: Fills the static rows of a key with real rows, and copies of them behind.
        meant_padding: Inputs whose padding means something: it is not exchanged for copies of real
            rows.
    """

    fill: Callable[[Tensors], None]
    meant_padding: Collection[str] = ()


class ModelGraphs:
    """The model, its FULL graphs, their pools and static buffers. It owns all but the model and a
    given ``pool``.

    Args:
        pool: A pool that other runners use too; absent: pools as ``compilation.pool`` says.
        state: The objects whose state counts; absent: the model.
        together: The sessions of other ranks.
        before_key, real_rows: See CaptureSession.

    Attributes:
        plan: The keys that may be captured, and later those that are.
        most_tokens: Tokens of the largest key that the static buffers hold.
        scope: The pool of the key that is captured, its entries, and whether capturing is still
            allowed.
        route: How PIECEWISE segments come about.
        roots: The objects that are looked at for state, by name.
        generators: The random generators that the model draws from, but for the default one.
        looked_at: One line on what the last captures looked at.
        state: Places that the last captures wrote, and whether they were put back.
        holds: Whether nothing has moved, as far as each call looks; else ``check_addresses``
            decides.
        written: The model's tensors that graphs write, by path.
        overwritten: Ids of the storages that each run overwrites at places given by inputs, and
            does not read before.
        changes_python: Whether runs change Python: eager pieces may.
        is_coarse: Whether something is computed in half precision or TensorFloat32.
        notes: Warnings for the report.
        inspection_seconds: Time of the captures that went into reading memory and counting nodes.
        is_alone: Whether no other rank runs the same forwards beside this one.
    """

    def __init__(
        self,
        plan: Plan,
        config: Config,
        model: Callable[..., Any],
        backend: GraphBackend,
        pool: GraphPool | None = None,
        state: Sequence[object] | Mapping[str, object] | None = None,
        together: RankSync = SINGLE_RANK,
        before_key: BeforeKey | None = None,
        real_rows: RealRows | None = None,
    ) -> None:
        self.plan, self.config, self.model, self.backend = plan, config, model, backend
        self._before_key, self.real_rows = before_key, real_rows
        self.pools = RunnerPools(config.compilation.pool, backend, pool)
        self.scope = CaptureScope(None, backend, address_check=config.compilation.address_policy)
        self.allocate_buffers(plan.keys)
        self.roots: dict[str, Any] = {"model": model}
        if state is not None:
            named = state.items() if isinstance(state, Mapping) else enumerate(state)
            self.roots = {
                name if isinstance(name, str) else f"state[{name}]": item for name, item in named
            }
        self.generators: tuple[torch.Generator, ...] = ()
        self.outputs = OutputRows(config)
        self.returns_nothing = False
        self.looked_at = ""
        self.state: tuple[StateRecord, ...] = ()
        self.notes = [
            f"{name} ({type(item).__name__}) holds no tensor: `state` lists the objects whose "
            "tensors the model uses"
            for name, item in (self.roots if isinstance(state, Sequence) else {}).items()
            if not Fingerprint.of({name: item}, backend.device).tensors
        ]
        self.inspection_seconds = 0.0
        self.is_alone, self._together = together is SINGLE_RANK, together
        self._kept: PutBack | None = None  # while captures may change the model
        self._sealed: Fingerprint | None = None  # the state that graphs rely on
        self._watch: Watch | None = None  # of it
        self.holds: Callable[[], bool] = _never
        self._reads = set[str]()  # paths of the model's tensors that graphs read
        self.written: dict[str, Tensor] = {}
        self.overwritten = set[int]()
        self.is_coarse = self.changes_python = False
        self._record: Fingerprint | None = None
        self._has_captured = True
        self._volatile: set[str] = set()
        self._told = set[CUDAGraphMode]()  # modes in which packages are told of captures
        self._aside = set[str]()  # paths that eager pieces changed
        # modes whose footprint was compared with the run after it
        self._judged = set[CUDAGraphMode]()
        self._footprints: dict[CUDAGraphMode, Footprint] = {}  # while captures may change the model
        # that a capture met, and not the look ahead of it
        self._late_syncs: dict[CUDAGraphMode, HostSyncError] = {}
        self._checked: set[Key] = set()
        self._moved: str | None = None
        self._retired: list[tuple[list[Callable[[], bool]], Callable[[], None]]] = []
        self._ambient = AmbientState.now(backend.device.type)
        self.route = choose_route(plan, config, model, backend, self._calls_breaks)
        # buffers do not move, and check_addresses looks at the model
        options = CUDAGraphOptions(address_check="off")
        self.wrapper = CUDAGraphWrapper(
            self.route.whole, CUDAGraphMode.FULL, backend=backend, options=options
        )

    def allocate_buffers(self, keys: Sequence[Key]) -> None:
        """Make static buffers for the batches of these keys. Raises CaptureMemoryError and
        BackendError.
        """
        config, most = self.config, widest(keys)
        self.most_tokens = max(most.values(), default=0)
        self.buffers = StaticBoxes()
        for sizes, tokens in (most or {(1,) * (len(config.dim_names) - 1): 0}).items():
            reqs, specs = min(tokens, self.plan.max_num_seqs), config.tensors_at(sizes)
            self.buffers[sizes] = StaticBuffers(specs, tokens, reqs, self.backend.device)

    # --- captures ---------------------------------------------------------------------------------

    @contextmanager
    def keeping_state(self) -> Iterator[PutBack]:
        """A block of captures, or of other runs that no batch asked for: the model is as it was
        after it, see Note [What is put back] in put_back.py. A block inside a block is part of it.
        """
        if self._kept is not None:
            yield self._kept
            return
        backend = self.backend
        lost: tuple[type[Exception], ...] = (RuntimeError,)
        backend.synchronize()
        self._kept = kept = PutBack(
            Fingerprint.of(self.roots, backend.device, draws=True), self.copy_limit()
        )
        self._use_generators(kept.before.generators)
        try:
            yield kept
            lost = ()
        finally:
            self._kept = None
            self._footprints.clear()
            self._judged.clear()
            self._late_syncs.clear()
            with suppress(*lost):  # a device that is lost says so by the error that is under way
                backend.synchronize()
                kept.restore()
                backend.synchronize()  # the next batch may come on another stream
                self._volatile |= kept.volatile
                self.looked_at = kept.before.summary()
                # a Graphed watches the model, and so holds all of it, too
                if self.real_rows is not None:
                    self._record = kept.before.without_draws()
                self._note_written(kept)
                self.state = tuple(
                    StateRecord(path=p, nbytes=n, kept=how) for p, (n, how) in kept.outcome.items()
                )
                if not self.scope.is_open:
                    self.seal()
            kept.drop_copies()

    def record(self) -> Fingerprint:
        """What the model holds now, without random generators of the host."""
        if self._record is not None and not self._record.changes():
            return self._record
        return Fingerprint.of(self.roots, self.backend.device)

    @property
    def copied_bytes(self) -> int:
        return 0 if self._kept is None else self._kept.copied()

    @contextmanager
    def captures_again(self) -> Iterator[None]:
        """A block in which more keys may be captured, between batches: static buffers hold padding,
        and afterwards what they held before; torch is in the state of the first captures.
        """
        self.backend.synchronize()
        self.scope.is_open = True
        without_grad = self._ambient._replace(grad=False)
        try:
            with (
                self.keeping_state(),
                without_grad.entered(self.backend.device.type),
                self.buffers.on_padding(),
            ):
                with self.backend.session():
                    yield
                self.backend.synchronize()
                if self.real_rows is not None:  # they are no writes of the model
                    self.buffers.clear_all()
        finally:
            self.seal()

    def capture_key(self, key: Key, *, in_service: bool = False) -> GraphRecord:
        """Warm up and capture one key, inside the backend's session. The model is as it was
        afterwards, and ``scope.entries`` holds the key's graphs until the next one. ``in_service``:
        a failure leaves other keys as they are. Raises CaptureError: the key could not be captured;
        ModelError: the model failed before its capture began.
        """
        (mode, descriptor), backend, scope, capturing = key, self.backend, self.scope, False
        refuse_forbidden_capture(f"the graph for {mode} {descriptor}")
        scope.pool, scope.entries = self.pools.of(key), []
        with self.keeping_state() as kept, ExitStack() as stack:
            if self.real_rows is not None:
                self.real_rows.fill(self.views(descriptor))
            try:
                start, (compiling, cached, stopped) = time.perf_counter(), _compilations()
                self.look(mode, descriptor)
                # A capture between two batches does not change later random numbers.
                stack.enter_context(random_state_kept(backend.device, self.generators))
                # Parts are compiled, and tables made on first use, by a run ahead of the capture,
                # never in it.
                is_first = mode not in self._judged
                needs_one = kept.before.is_compiled or kept.has_made
                for _ in range(self.config.compilation.cudagraph_num_of_warmups or int(needs_one)):
                    with kept.run(enters_made=is_first) as changed:
                        self.warm_up(mode, descriptor)
                    self._judge(mode, changed)
                backend.synchronize()
                warm = time.perf_counter()
                before, pool_before = backend.memory(), self.pools.nbytes
                read = time.perf_counter()
                capturing = True
                log = (
                    nullcontext()
                    if self.config.compilation.audit == "off"
                    else OperatorLog(backend.open_graph, backend.device)
                )
                run = kept.run(captures=True, enters_made=is_first)
                with run as changed, self._answering(mode, capturing=True), log:
                    output = self.run_graphed(mode, descriptor, self.views(descriptor))
                self._judge(mode, changed)
                if is_first:
                    refuse_value(self._footprints[mode], kept)
            except Exception as error:
                footprint = self._footprints.get(mode)
                failure = explain_failure(
                    error,
                    f"{mode} {descriptor}",
                    capturing=capturing,
                    free=backend.memory().free,
                    host_sync=None if footprint is None else footprint.host_sync,
                    all_freed=not in_service,
                )
                if (
                    capturing
                    and isinstance(failure, HostSyncError)
                    and self._needs_another_look(mode, failure)
                ):
                    drop_locals(error)
                    kept.restore(between_keys=True)
                    self.evict([key])
                    return self.capture_key(key, in_service=in_service)
                if mode not in self._judged:
                    self._footprints.pop(mode, None)  # the look and the run after it are of one key
                raise failure from (error if failure is not error else error.__cause__)
            self.returns_nothing = not any(isinstance(leaf, Tensor) for leaf in tree_leaves(output))
            self.outputs.check(output, descriptor, self.padded_reqs(descriptor))
            if not scope.entries:
                raise CaptureError(
                    f"nothing in the model captured for {mode} {descriptor}", remedy=self._remedy()
                )
            done = time.perf_counter()
            compiled, found, stopping = _compilations()
            kept.restore(between_keys=True)
            scope.wrappers = list(dict.fromkeys(scope.wrappers))  # each capture adds its own
            after, pool_after = backend.memory(), self.pools.nbytes
            graphs = [graph for entry in scope.entries for graph in entry.segments]
            notes = [note for graph in graphs for note in backend.notes(graph)] + [_STOPPED] * (
                stopping > stopped
            )
            self.notes = list(dict.fromkeys([*self.notes, *notes]))
            nodes = [backend.num_nodes(graph) for graph in graphs]
            counts = tuple(n for n in nodes if n is not None)
            counted = len(counts) == len(nodes)
            self.inspection_seconds += (read - warm) + (time.perf_counter() - done)
            return GraphRecord(
                mode=mode,
                descriptor=descriptor,
                graphs=len(nodes),
                nodes=sum(counts) if counted else None,
                eager_pieces=sum(entry.eager_pieces for entry in scope.entries),
                pool_growth=pool_after - pool_before,
                driver_bytes=driver_bytes(backend, before, after),
                warmup_seconds=warm - start,
                capture_seconds=sum(entry.capture_seconds for entry in scope.entries),
                segment_nodes=counts if counted else (),
                compile_seconds=compiled - compiling,
                cached=found - cached,
            )

    def _remedy(self) -> str:
        if self.route.name == "wrappers":
            return (
                "With piecewise: wrappers, wrap the model's segments in CUDAGraphWrapper(..., "
                "CUDAGraphMode.PIECEWISE); or choose piecewise: ops, FULL or FULL_DECODE_ONLY."
            )
        return (
            "Outside of eager pieces the forward computed nothing on the padding values of the "
            "capture: name fewer of "
            "them, or choose FULL or NONE. Where it has functions under "
            "eager_break_during_capture that it did not "
            "call then, set piecewise: modules."
        )

    def look(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Look at the forward, once for each mode, ahead of its warm-ups. Raises as
        ``footprint.examine``.
        """
        self.announce(mode, descriptor)
        if mode in self._footprints:
            return
        answers = {
            "hidden_from": self.config.compilation.hide_capture_from,
            "capture_visible_because": self._late_syncs.get(mode),
        }
        assert self._kept is not None
        views, route = self.views(descriptor), self.route
        is_piecewise = mode is CUDAGraphMode.PIECEWISE
        breaks = route.breaks if is_piecewise else None
        model = partial(breaks.forward, self.model) if breaks else self.model
        run = partial(self._run, model, CUDAGraphMode.NONE, descriptor, views)
        ops = self.config.compilation.splitting_ops
        default = DEFAULT_SPLITTING_OPS if route.name == "ops" else ()
        is_split = is_piecewise and route.name in ("ops", "modules")
        split = (default if ops is None else ops) if is_split else ()
        # Python code between wrappers runs on each replay.
        part = "eager piece" if is_piecewise and route.name == "wrappers" else "segment"
        options = {"part": part, "eager_ops": split, "is_whole": not is_piecewise, **answers}
        pieces = route.breaks.modules.values() if route.breaks else ()
        own = {id(t) for module in pieces for t in (*module.parameters(), *module.buffers())}
        with span("look"):
            found = examine(run, self._kept, inputs=list(views.values()), **options)
        # tagged as unsafe
        if found.host_sync is not None and not isinstance(found.host_sync, HostSyncError):
            raise found.host_sync
        if breaks and found.error is None:
            refuse_missing_ops(split, found.names)
        read = set(map(id, found.reads.values()))
        places = self._kept.before.places.items()
        self._reads |= found.reads.keys() | {
            path for path, place in places if id(place.value) in read
        }
        self.overwritten |= found.overwritten
        self.is_coarse |= self._computes_coarsely(found, [*views.values(), *found.reads.values()])
        if self.plan.mode is CUDAGraphMode.PIECEWISE:  # no FULL graph reads tensors of pieces
            of_pieces = {path for path, place in places if id(place.value) in own}
            self._volatile |= of_pieces - self._reads
        if found.capture_visible_because is not None:
            self._note(
                f"{', '.join(sorted(found.packages_that_ask))} is told of captures, and may run "
                "slower kernels there than in eager "
                "calls (attention with masks that mask nothing): as in eager calls, "
                f"{found.capture_visible_because.message}"
            )
        self._footprints[mode] = found
        if found.capture_visible_because is not None:
            self._told.add(mode)
        if is_piecewise and route.name in ("modules", "wrappers"):
            route.operators = found.operators
        self._use_generators(tuple(found.generators.values()))

    def _computes_coarsely(self, found: Footprint, tensors: Sequence[Tensor]) -> bool:
        halves = torch.float16, torch.bfloat16
        if self._ambient.autocast is not None or any(tensor.dtype in halves for tensor in tensors):
            return True
        convolves = torch.backends.cudnn.allow_tf32 and any("conv" in name for name in found.names)
        has_tf32 = convolves or torch.get_float32_matmul_precision() != "highest"
        return has_tf32 and self.backend.device.type == "cuda"

    def _judge(self, mode: CUDAGraphMode, changed: Mapping[str, Change]) -> None:
        """Compare the look with the run after it, once for each mode. Raises as
        ``footprint.judge``, and CaptureError for changes of Python where ``strict`` is set.
        """
        if mode in self._judged or self._kept is None:
            return
        found, compilation = self._footprints[mode], self.config.compilation
        # Python between wrappers
        runs_again = mode is CUDAGraphMode.PIECEWISE and self.route.name == "wrappers"
        judge(found, changed, self._kept, runs_again=runs_again)
        if compilation.strict and found.writes_input is not None:
            raise CaptureError(
                f"the forward writes into an argument, at {found.writes_input}; a graph would "
                "write into its copy",
                remedy="Write into a tensor of the model, or return the result.",
            )
        python = [path for path in changed if not is_ignored(path, compilation.ignore)]
        self.changes_python |= bool(python)
        self._aside |= found.aside
        python = self.of_graphs(mode, python)
        if python and compilation.strict:
            raise CaptureError(
                f"each run changes {changed[python[0]]}; a replay runs no Python",
                remedy="Keep it in a tensor, or name it in `ignore` if it decides nothing: "
                f"ignore=[{python[0]!r}].",
            )
        self._judged.add(mode)
        if python:
            self._note(
                f"the forward changes {listed(python)}; replays do not, nor do they see it change"
            )

    def of_graphs(self, mode: CUDAGraphMode, paths: Iterable[str]) -> list[str]:
        """Paths that code in graphs changed: eager pieces, and code between wrappers, run on each
        replay.
        """
        if mode is CUDAGraphMode.PIECEWISE and self.route.name == "wrappers":
            return []
        return [path for path in paths if not is_within(path, self._aside)]

    def _note(self, warning: str) -> None:
        if warning not in self.notes:
            self.notes.append(warning)

    def _note_written(self, kept: PutBack) -> None:
        for path, tensor in kept.written:
            if path in kept.left_by_captures:  # graphs do not overwrite it
                self.overwritten.discard(tensor.untyped_storage()._cdata)
            storage = tensor.untyped_storage()
            is_small = self.real_rows is not None and storage.nbytes() <= self.copy_limit()
            if is_small or storage._cdata not in self.overwritten:
                # All of it: other views may have been written, too.
                whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                self.written[path] = whole.set_(
                    storage, 0, (storage.nbytes() // tensor.itemsize,), (1,)
                )

    @property
    def has_context(self) -> bool:
        """Whether an engine sets its own context for each key."""
        return self._before_key is not None

    def announce(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Let ``before_key`` set its context for runs on padding, until ``PutBack.restore`` puts it
        back.
        """
        if self._before_key is None:
            return
        try:
            with self.keeping_state() as kept, kept.setting_context():
                self._before_key(mode, descriptor, self.views(descriptor))
        except Exception as error:
            raise explain_failure(error, f"{mode} {descriptor}") from error

    @contextmanager
    def in_context(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Iterator[None]:
        """A block in the context that ``before_key`` sets; it is put back after the block, between
        captures, too.
        """
        kept = (
            PutBack(Fingerprint.of(self.roots, self.backend.device), 0)
            if self.has_context
            else None
        )
        try:
            if self._before_key is not None:
                self._before_key(mode, descriptor, self.views(descriptor))
            yield
        finally:
            if kept is not None:
                kept.restore_python(())

    def _needs_another_look(self, mode: CUDAGraphMode, failure: HostSyncError) -> bool:
        """Whether packages have to be told of the capture: this size needs the host, and the one
        looked at does not.
        """
        found = self._footprints[mode]
        if found.capture_visible_because is None and found.packages_that_ask:
            self._late_syncs[mode] = failure
            del self._footprints[mode]
        return mode not in self._footprints

    def _answering(self, mode: CUDAGraphMode, *, capturing: bool) -> AbstractContextManager[None]:
        """The block of a warm-up or a capture, in which packages are told what they were told in
        the look.
        """
        is_told = mode in self._told
        # eager pieces: the truth
        packages = () if is_told and capturing else self.config.compilation.hide_capture_from
        return answering(packages, lambda _: is_told)

    def _calls_breaks(self) -> bool:
        if not any_breaks():
            return False
        mode, smallest = self.plan.keys[-1]
        run = partial(self._run, self.model, CUDAGraphMode.NONE, smallest, self.views(smallest))
        with self.keeping_state() as kept:
            self.announce(mode, smallest)
            return look(run, kept).breaks

    def copy_limit(self) -> int:
        limit = self.config.compilation.state_copy
        return (self.backend.memory().free or 4 << 30) // 4 if limit is None else limit

    def _use_generators(self, found: Sequence[torch.Generator]) -> None:
        known = set(map(number_of, self.generators))
        for generator in found:
            if number_of(generator) not in known:
                self.generators += (generator,)
                self.backend.register_generator(generator)

    def warm_up(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> Any:
        """Run what a key captures, without capturing; where a trace is captured, it is found or
        made here. Returns the output.
        """
        is_full = mode is CUDAGraphMode.FULL
        # wrappers turn it off for themselves
        in_eager = not is_full and self.route.name == "wrappers"
        with autocast_cache(on=in_eager), self._answering(mode, capturing=False), span("warm-up"):
            call = self.route.whole if is_full else self.route.warm
            return self._run(call, CUDAGraphMode.NONE, descriptor, self.views(descriptor))

    def seal(self) -> None:
        """End the captures: a missing key is an error from now on, and the model's memory must stay
        where it is.
        """
        self.scope.is_open = False
        policy = self.config.compilation.address_policy
        if self._kept is None and (self._has_captured or self._sealed is None) and policy != "off":
            sealed = Fingerprint.of(self.roots, self.backend.device)
            sealed.volatile |= self._volatile
            sealed.narrow(self._reads)
            self._sealed, self._watch, self.holds, self._has_captured = sealed, None, _never, False
            if policy == "first":  # each check is a walk
                sealed.let_go()
            else:
                generators = [
                    p for p in sealed.steady() if issubclass(type(p.value), torch.Generator)
                ]
                modules, held = sealed.modules()
                self._watch = Watch(sealed, [*sealed.checked(), *generators, *modules], held)
                self.holds = self._watch.holds

    # --- graphs -----------------------------------------------------------------------------------

    def entry(self, key: Key) -> CUDAGraphEntry | None:
        """The entry that serves a key: ``graph`` replays the whole forward into ``output``. For a
        PIECEWISE key, whose ``graph.replay`` runs eager pieces, the forward context has to be set.
        None where there is none, or where the model's own code runs between graphs
        (``piecewise: wrappers``).
        """
        mode, descriptor = key
        wrapper = self.wrapper if mode is CUDAGraphMode.FULL else self.route.chain
        entry = None if wrapper is None else wrapper.entries.get(descriptor)
        return entry if entry is not None and entry.scope is self.scope.mark else None

    def captured(self) -> Iterator[tuple[Key, CUDAGraphEntry]]:
        """All entries by key; those of PIECEWISE by wrappers have one for each wrapper."""
        for wrapper in self.scope.wrappers:
            for entry in wrapper.entries.values():
                if entry.scope is self.scope.mark:
                    yield (wrapper.runtime_mode, entry.descriptor), entry

    def peer_memory(self) -> PeerMemory:
        """Memory of other ranks that the graphs read."""
        return self._together.peer_memory()

    def captured_addresses(self) -> dict[int, str]:
        """Where the model's tensors lay when the captures ended, by address; empty without an
        address check.
        """
        places = {} if self._sealed is None else self._sealed.places
        return {place.address: path for path, place in places.items() if place.address is not None}

    def evict(self, keys: Collection[Key]) -> None:
        """Free the graphs of these keys; the plan stays as it is.

        A graph whose output somebody still holds is freed on the first change after it was dropped.
        Its numbers are no longer valid all the same.
        """
        self.backend.synchronize()
        self.scope.entries = []
        for wrapper in self.scope.wrappers:
            mine = {descriptor for mode, descriptor in keys if mode is wrapper.runtime_mode}
            for output, free in wrapper.take_out(self.scope, mine):
                self._retired.append(([self.backend.watch(tensor) for tensor in output], free))
                del output  # or the loop below would find it held, by this function
        self._checked.difference_update(keys)
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
        """Free all graphs and their pools at once; more can be captured."""
        self.backend.synchronize()
        self._reset()
        self.backend.release_cached()
        self.pools.renew()

    def _reset(self) -> None:
        for wrapper in self.scope.wrappers:
            wrapper.reset(self.scope)
        self.scope.entries, self.scope.wrappers = [], []

    def free(self) -> None:
        together, self._together = self._together, SINGLE_RANK  # other ranks wait for it once
        with ExitStack() as stack:  # memory is freed whatever the steps before it raise
            stack.callback(self._free)
            stack.callback(together.release)
            self.backend.synchronize()

    def _free(self) -> None:
        self._reset()
        for _, free in self._retired:
            free()
        self._retired = []
        self.pools.close()
        self.scope.pool, self.scope.is_open = None, False
        self.buffers.clear()
        self._sealed, self._watch, self.holds = None, None, _never
        self.written, self._reads = {}, set()
        self.backend.release_cached()

    # --- checks -----------------------------------------------------------------------------------

    def invalidate(self, name: str) -> None:
        """Refuse replays from now on, because ``name`` has moved."""
        # they may hold the old memory
        self._moved, self._sealed, self._watch, self.holds = name, None, None, _never

    def check_valid(self) -> None:
        if self._moved is not None:
            raise AddressError(
                f"the model was captured before {self._moved!r} moved: a replay would use the old "
                "memory",
                remedy="Call runner.recapture().",
            )

    def check_autocast(self) -> None:
        """Raise CaptureError if autocast is not as at capture: graphs would give other dtypes than
        eager calls.
        """
        done = "traced" if self.route.name == "ops" else "captured"
        self._ambient.refuse_other_autocast(self.backend.device.type, done)

    def check_addresses(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor, *, again: bool = False
    ) -> None:
        """Raise AddressError if a parameter or buffer of the model has moved since the captures, as
        often as ``compilation.address_check`` says, or ``again``.
        """
        self.check_valid()
        if (sealed := self._sealed) is None:
            return
        key, watch = (mode, descriptor), self._watch
        is_checked = key in self._checked and not again  # at each graph's first replay
        holds = is_checked if watch is None else watch.holds_all()
        if not holds:
            sealed.refuse_moved(f"{mode} {descriptor}", self.roots, may_grow=True)
            self._checked.add(key)
            if watch is not None:  # something was exchanged that no graph reads
                self._has_captured = True
                self.seal()

    # --- runs -------------------------------------------------------------------------------------

    def padded_reqs(self, descriptor: BatchDescriptor) -> int:
        """Requests of a key; PIECEWISE keys leave the number open, then as many as there can be."""
        if descriptor.num_reqs is not None:
            return descriptor.num_reqs
        return min(descriptor.num_tokens, self.plan.max_num_seqs)

    def views(self, descriptor: BatchDescriptor) -> dict[str, Tensor]:
        """The tensors that the key's graph reads, by name."""
        return self.buffers[descriptor.sizes].views(
            descriptor.num_tokens, self.padded_reqs(descriptor)
        )

    def run_eager(self, descriptor: BatchDescriptor, tensors: Tensors) -> Any:
        """The model's own code on these tensors; parts under torch.compile find the code that
        warm-ups compiled.
        """
        with autocast_cache(on=self.route.name == "wrappers"):
            return self._run(self.model, CUDAGraphMode.NONE, descriptor, tensors)

    def run_graphed(
        self, mode: CUDAGraphMode, descriptor: BatchDescriptor, tensors: Tensors
    ) -> Any:
        """The model with the graphs of ``mode``, captured on the way if the scope is open."""
        self._has_captured |= self.scope.is_open
        call = self.wrapper if mode is CUDAGraphMode.FULL else self.route.forward
        return self._run(call, mode, descriptor, tensors)

    def _run(
        self,
        call: Callable[..., Any],
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        tensors: Tensors,
    ) -> Any:
        metadata = _Metadata((name, tensors[name]) for name in self.config.metadata)
        with torch.no_grad(), forward_context(mode, descriptor, metadata, scope=self.scope):
            return call(**{name: tensors[name] for name in self.config.inputs})
