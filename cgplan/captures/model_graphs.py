"""A model with its graphs and the memory that they read, its runs ahead of captures, and the
steps that several ranks take together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from cgplan.backends import GraphBackend
from cgplan.backends.backend import autocast_cache, number_of, span
from cgplan.backends.context import AmbientState, CaptureScope, forward_context
from cgplan.backends.host_sync import storage_id
from cgplan.backends.replacing import answering, replaced
from cgplan.buffers.batch import OutputRows
from cgplan.buffers.static import StaticBoxes, Tensors
from cgplan.captures.failures import explain_failure
from cgplan.config import Config
from cgplan.errors import CaptureError, ConfigError, HostSyncError, InputError
from cgplan.graphs.change_detector import AddressChecks
from cgplan.graphs.fingerprint import Change, Fingerprint, is_ignored, is_within
from cgplan.graphs.footprint import Footprint, look
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper, GraphPool, RunnerPools
from cgplan.graphs.written import WritesOfEngine, copy_limit
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.piecewise.breakable import any_breaks
from cgplan.piecewise.routes import SplitRoute, choose_route
from cgplan.piecewise.trace import refuse_missing_ops
from cgplan.planning import Plan
from cgplan.pricing import widest
from cgplan.reports.records import CaptureReport, StateRecord


class PeerMemory(NamedTuple):
    """``mapped``: (first address, the one after the last, name); ``addresses``: those in a table
    that graphs read.
    """

    mapped: Sequence[tuple[int, int, str]] = ()
    addresses: Sequence[int] = ()


class RankSync:
    """Steps of all ranks; if one fails, all raise. This class, for a single rank, never waits."""

    def begin(self, plan: Plan, free: int | None) -> int | None:  # noqa: ARG002
        """Agree on the plan; returns the least free device memory."""
        return free

    def any_refuses(
        self,
        refused: bool,
        because: BaseException | None = None,  # noqa: ARG002
    ) -> bool:
        """``because``: this rank ran out of memory."""
        return refused

    def dropped(self) -> None:
        """All graphs were freed during a session."""

    def end(self) -> None:
        """After the last capture: make graph buffers known to all."""

    def failed(self, error: BaseException) -> BaseException:
        """The error to raise, the same on all ranks."""
        return error

    def peer_memory(self) -> PeerMemory:
        return PeerMemory()

    def release(self) -> None:
        """Before graphs and their pool are freed."""

    def completed(self, report: CaptureReport) -> CaptureReport:
        return report


SINGLE_RANK = RankSync()


REBUILD_AND_WARM_UP = "Build the model again, and set compilation.cudagraph_num_of_warmups: 1."
_HALVES = {torch.float16, torch.bfloat16}
_FROM_INPUTS = "on first use, from inputs, and keeps it"
State = Sequence[object] | Mapping[str, object] | None
BeforeKey = Callable[[CUDAGraphMode, BatchDescriptor, Tensors], object]


class DeclaredMetadata(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise InputError(
            f"the model reads metadata {name!r}, which is not declared",
            remedy=f"Declare it under `metadata`; declared are {', '.join(self) or 'none'}.",
        )


class ForwardFacts:
    """What captures found of the forward, while its graphs live.

    Attributes:
        capture_visible: Modes in which packages see captures.
        aside: Paths that eager pieces change.
        written: State that comparisons compare and put back.
        overwritten: Ids of storages that each run overwrites unread, as far as looks saw.
        read_first: Others that a look saw written: they are never ``overwritten``.
        restored: Of ``overwritten``, what comparisons put back, as another size may read it.
        bytes_read: As of `Footprint`.
        is_coarse: In half precision or TensorFloat32.
        outside: Tensors that graphs read, neither the model's nor inputs.
    """

    def __init__(self) -> None:
        self.capture_visible = set[CUDAGraphMode]()
        self.aside = set[str]()
        self.written = dict[str, Tensor]()
        self.overwritten = set[int]()
        self.read_first = set[int]()
        self.restored = dict[str, Tensor]()
        self.bytes_read = dict[tuple[int, int], dict[int, int]]()
        self.changes_python = set[str]()
        self.is_coarse = False
        self.outside = list[Tensor]()
        self.notes = list[str]()

    @property
    def storages_written(self) -> set[int]:
        written = {tensor.untyped_storage()._cdata for tensor in self.written.values()}
        return self.overwritten | written

    @property
    def weight_bytes(self) -> int:
        """That each run reads and none writes."""
        written = self.storages_written
        return sum(
            min(nbytes, sum(parts.values()))
            for (storage, nbytes), parts in self.bytes_read.items()
            if storage not in written
        )

    @property
    def state_bytes(self) -> int:
        """Other memory of the model that runs may read."""
        return sum(nbytes for _, nbytes in self.bytes_read) - self.weight_bytes

    def note(self, *warnings: str) -> None:
        for warning in warnings:
            if warning not in self.notes:
                self.notes.append(warning)


@dataclass(frozen=True)
class RealRows:
    """Captures and comparisons run on rows of real batches.

    Attributes:
        fill: Fills static rows with real rows and copies.
        meant_padding: Inputs that keep their padding.
    """

    fill: Callable[[Tensors], None]
    meant_padding: Collection[str] = ()


@dataclass(eq=False, repr=False)
class ModelGraphs:
    """A model with its graphs. It owns all but the model and a given ``pool``.

    Attributes:
        roots: The objects whose state counts, by name.
        is_alone: No other rank runs the same forwards.
    """

    plan: Plan
    config: Config
    model: Callable[..., Any]
    backend: GraphBackend
    before_key: BeforeKey | None = None
    on_demand: bool = False
    state: State = None
    real_rows: RealRows | None = None
    pool: GraphPool | None = None
    ranks: RankSync = SINGLE_RANK

    def __post_init__(self) -> None:
        self.route: SplitRoute
        self.wrapper: CUDAGraphWrapper
        backend = self.backend
        state = self.state
        compilation = self.config.compilation
        policy = compilation.address_policy
        self.pools = RunnerPools(compilation.pool, backend, self.pool)
        self.scope = CaptureScope(None, backend, address_check=policy)
        self._first_use: dict[Key | None, list[Tensor]] = {}  # which graphs read
        self.allocate_buffers(self.plan.keys)
        self.generators: tuple[torch.Generator, ...] = ()
        self.facts = ForwardFacts()
        self.roots: dict[str, Any] = {}
        if isinstance(state, Mapping):
            self.roots |= state
        elif state is None:
            self.roots["model"] = self.model
        elif not isinstance(state, Iterable):
            raise ConfigError(
                f"state is {state!r:.80}",
                remedy="List the objects whose tensors the model uses: state=[model].",
            )
        else:
            for index, item in enumerate(state):
                self.roots[f"state[{index}]"] = item
        self.addresses = AddressChecks(self.roots, backend.device, policy)
        self.ambient = AmbientState.now(backend.device.type)
        self.outputs = OutputRows(self.config)
        self.looked_at = ""
        self.state_records: tuple[StateRecord, ...] = ()
        self.is_alone = self.ranks is SINGLE_RANK
        self.verify = compilation.verify if self.is_alone else "off"
        if compilation.debug:
            self.verify = "always"
        self.judges_first_use = self.verify != "off" and policy == "always"
        self._rehearsal: Rehearsal | None = None
        self._fingerprint: Fingerprint | None = None  # after the last rehearsal
        self._retired: list[tuple[list[Callable[[], bool]], Callable[[], None]]] = []

    # --- buffers ----------------------------------------------------------------------------------

    def allocate_buffers(self, keys: Sequence[Key]) -> None:
        """Captures on demand make them as needed. Raises CaptureMemoryError and BackendError."""
        most = widest(keys)
        self.most_tokens = max(most.values(), default=0)
        rows = {
            sizes: (tokens, min(tokens, self.plan.max_num_seqs)) for sizes, tokens in most.items()
        }
        self.buffers = StaticBoxes(
            rows,
            self.config.tensors_at,
            self.backend.device,
        )
        if not self.on_demand:
            for sizes in rows:
                self.buffers[sizes]

    def padded_reqs(self, descriptor: BatchDescriptor) -> int:
        """The most requests, if a key leaves them open."""
        if descriptor.num_reqs is not None:
            return descriptor.num_reqs
        return min(descriptor.num_tokens, self.plan.max_num_seqs)

    def views(self, descriptor: BatchDescriptor) -> dict[str, Tensor]:
        return self.buffers[descriptor.sizes].views(
            descriptor.num_tokens,
            self.padded_reqs(descriptor),
        )

    def use_generators(self, found: Iterable[torch.Generator]) -> None:
        known = set(map(number_of, self.generators))
        for generator in found:
            if number_of(generator) not in known:
                self.generators += (generator,)
                self.backend.register_generator(generator)

    # --- runs -------------------------------------------------------------------------------------

    def runs_python_again(self, mode: CUDAGraphMode) -> bool:
        """Whether a replay runs Python between wrappers."""
        return mode is CUDAGraphMode.PIECEWISE and self.route.name == "wrappers"

    def frozen(self, mode: CUDAGraphMode, paths: Iterable[str]) -> list[str]:
        """Paths that no replay changes."""
        if self.runs_python_again(mode):
            return []
        return [path for path in paths if not is_within(path, self.facts.aside)]

    def capture_answers(
        self,
        mode: CUDAGraphMode,
        *,
        capturing: bool,
    ) -> AbstractContextManager[None]:
        is_visible = mode in self.facts.capture_visible
        hidden_from = self.config.compilation.hide_capture_from
        if is_visible and capturing:  # torch itself tells segments yes, eager pieces no
            hidden_from = ()
        return answering(
            hidden_from,
            lambda _: is_visible,
        )

    def check_autocast(self) -> None:
        done = "traced" if self.route.name == "ops" else "captured"
        self.ambient.refuse_other_autocast(self.backend.device.type, done)

    def warm_up(self, key: Key) -> Any:
        mode, descriptor = key
        call = self.route.warm
        if mode is CUDAGraphMode.FULL:
            call = self.route.whole
        cache = autocast_cache(on=self.runs_python_again(mode))
        with cache, self.capture_answers(mode, capturing=False), span("warm-up"):
            return self.run(call, CUDAGraphMode.NONE, descriptor, self.views(descriptor))

    def run_wrapped(self, key: Key, tensors: Tensors) -> Any:
        """Through the wrapper: an open scope captures a key without a graph; else it replays."""
        mode, descriptor = key
        call = self.route.forward
        if mode is CUDAGraphMode.FULL:
            call = self.wrapper
        return self.run(call, mode, descriptor, tensors)

    def run_eager(
        self,
        descriptor: BatchDescriptor,
        tensors: Tensors,
    ) -> Any:
        with autocast_cache(on=self.route.name == "wrappers"):
            return self.run(self.model, CUDAGraphMode.NONE, descriptor, tensors)

    def run_unpadded(
        self,
        descriptor: BatchDescriptor,
        values: Iterable[Tensor],
    ) -> Any:
        """``values``: as declared, on the device or on the host."""
        moved = (value.to(self.backend.device) for value in values)
        return self.run_eager(descriptor, dict(zip(self.config.tensors, moved, strict=True)))

    def run(
        self,
        call: Callable[..., Any],
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        tensors: Tensors,
    ) -> Any:
        inputs = {name: tensors[name] for name in self.config.inputs}
        metadata = DeclaredMetadata({name: tensors[name] for name in self.config.metadata})
        with (
            torch.no_grad(),
            forward_context(
                mode,
                descriptor,
                metadata,
                scope=self.scope,
            ),
        ):
            return call(**inputs)

    # --- its route --------------------------------------------------------------------------------

    def choose_route(self, given: SplitRoute | None = None) -> None:
        """May run the model on padding. Raises as piecewise.routes.choose_route."""
        self.route = given or choose_route(
            self.plan,
            self.config,
            self.model,
            self.backend,
            self._calls_breaks,
        )
        self.wrapper = CUDAGraphWrapper(
            self.route.whole,
            CUDAGraphMode.FULL,
            backend=self.backend,
        )

    def _calls_breaks(self) -> bool:
        if not any_breaks():
            return False
        key = self.plan.keys[-1]
        views = self.views(key[1])
        with self.rehearsing() as rehearsal:
            rehearsal.set_context(key)
            run = partial(
                self.run,
                self.model,
                CUDAGraphMode.NONE,
                key[1],
                views,
            )
            return look(run, rehearsal.put_back).breaks

    # --- the model around captures ----------------------------------------------------------------

    @contextmanager
    def rehearsing(self) -> Iterator[Rehearsal]:
        """A block of runs on padding; the model is put back. Nestable."""
        if self._rehearsal:
            yield self._rehearsal
            return
        self.backend.synchronize()
        before = Fingerprint.of(
            self.roots,
            self.backend.device,
            draws=True,
        )
        # a mapping is of `graphed`, whose objects may hold none
        given = {} if isinstance(self.state, Mapping | None) else self.roots
        for name, item in given.items():
            found = any(place.path.startswith(name) for place in before.of_tensors)
            # another root may have led there first
            if not found and not Fingerprint.of({name: item}, self.backend.device).tensors:
                self.facts.note(
                    f"{name} ({type(item).__name__}) holds no tensor: `state` lists the objects "
                    "whose tensors the model uses"
                )
        put_back = PutBack(before, copy_limit(self.config.compilation, self.backend))
        self.use_generators(before.generators)
        self._rehearsal = Rehearsal(self, put_back)
        suppressed: tuple[type[Exception], ...] = (RuntimeError,)
        try:
            # the cache of parametrizations ends with the caller's block
            with replaced(parametrize, _cache_enabled=0):
                yield self._rehearsal
            suppressed = ()
        finally:
            self._rehearsal = None
            with suppress(*suppressed):  # a lost device raises its own error
                self._end_rehearsal(put_back)
            put_back.storages.clear()

    def fingerprint(self) -> Fingerprint:
        if self._fingerprint and not self._fingerprint.changes():
            return self._fingerprint
        return Fingerprint.of(self.roots, self.backend.device)

    @contextmanager
    def in_context(self, key: Key) -> Iterator[None]:
        if self.before_key is None:
            yield
            return
        before = self.fingerprint()
        views = self.views(key[1])
        writes = WritesOfEngine(
            copy_limit(self.config.compilation, self.backend),
            set(map(storage_id, (*before.tensors, *views.values()))),
        )
        try:
            try:
                with writes:
                    self.before_key(*key, views)
            finally:
                # replays read what the engine wrote for their batch; bindings stay for the run
                writes.put_back()
            yield
        finally:
            before.undo_attributes()

    def _end_rehearsal(self, put_back: PutBack) -> None:
        self.backend.synchronize()
        put_back.keeps_first_use = any(key in put_back.captured for key, _ in self.captured())
        put_back.restore()
        self.backend.synchronize()  # the next batch may use another stream
        self.addresses.volatile |= put_back.volatile
        if put_back.keeps_first_use:
            earlier = self._first_use.get(None, []) + put_back.held.get(None, [])
            self._first_use |= {**put_back.held, None: earlier}
        self.looked_at = put_back.before.summary()
        self._fingerprint = put_back.before.without_draws()
        self.state_records = tuple(
            StateRecord(path=path, nbytes=nbytes, kept=kept)
            for path, (nbytes, kept) in put_back.outcome.items()
        )
        facts = self.facts
        of_sizes = []
        for path in put_back.python_of_sizes:
            is_told = path in facts.changes_python
            if not is_told and not is_ignored(path, self.config.compilation.ignore):
                of_sizes += self.frozen(self.plan.mode, [path])
        if of_sizes:
            facts.note(
                f"the forward sets {_listed(of_sizes)} anew for each size; a replay does not, so "
                "code that reads it later may find that of another size"
            )
        self._choose_compared(put_back)
        if not self.scope.is_open:
            self.seal()

    def _choose_compared(self, put_back: PutBack) -> None:
        """The state that comparisons compare, and that which they only put back."""
        facts = self.facts
        limit = copy_limit(self.config.compilation, self.backend)
        most_overwritten = limit if self.real_rows else 0  # else padding shows in it
        left = limit // 2  # a comparison copies it twice
        all_written = put_back.storages.written.values()
        for written in sorted(all_written, key=lambda each: each.storage.nbytes()):
            tensor = written.tensor
            storage = written.storage
            nbytes = storage.nbytes()
            if not written.is_captured:  # no graph overwrites it: compare it
                facts.overwritten.discard(storage._cdata)
            # other views may be written
            whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)
            if nbytes <= most_overwritten or storage._cdata not in facts.overwritten:
                facts.written[written.path] = whole
                continue
            left -= nbytes
            if left >= 0:
                facts.restored[written.path] = whole

    @property
    def copied_bytes(self) -> int:
        return 0 if self._rehearsal is None else self._rehearsal.put_back.storages.copied["device"]

    @contextmanager
    def first_captures(self) -> Iterator[None]:
        """A block; if it raises, no graph stays."""
        with (
            span("capture session"),
            self.rehearsing() as rehearsal,
            self.backend.session(),
            torch.no_grad(),
        ):
            try:
                yield
            except BaseException:
                rehearsal.put_back.captured.clear()
                raise
            self.buffers.refill()
            self.backend.synchronize()

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
        finally:
            self.seal()

    def seal(self) -> None:
        """Missing keys and moved memory are errors from now on, in a rehearsal from its end."""
        self.scope.is_open = False
        if self._rehearsal:
            return
        self.addresses.seal(self._fingerprint)
        if not self.real_rows:  # their comparisons need it
            self._fingerprint = None

    # --- graphs -----------------------------------------------------------------------------------

    def entry(self, key: Key) -> CUDAGraphEntry | None:
        """None without a graph, and with ``piecewise: wrappers``."""
        mode, descriptor = key
        wrapper = self.wrapper if mode is CUDAGraphMode.FULL else self.route.chain
        if wrapper is None:
            return None
        entry = wrapper.entries.get(descriptor)
        if entry is None or entry.scope is not self.scope.mark:
            return None
        return entry

    def captured(self) -> Iterator[tuple[Key, CUDAGraphEntry]]:
        scope = self.scope
        for wrapper in scope.wrappers:
            for entry in wrapper.entries.values():
                if entry.scope is scope.mark:
                    yield (wrapper.runtime_mode, entry.descriptor), entry

    def evict(self, keys: Collection[Key]) -> None:
        """Where somebody holds an output, a later ``evict`` frees the graph."""
        self.backend.synchronize()
        self.scope.entries = []
        for wrapper in self.scope.wrappers:
            for mode, descriptor in keys:
                entry = wrapper.entries.get(descriptor)
                if mode is not wrapper.runtime_mode or entry is None:
                    continue
                if entry.scope is self.scope.mark:
                    held = list(map(self.backend.watch, entry.pooled))
                    self._retired.append((held, entry.free))
                    del wrapper.entries[descriptor]
                del entry  # else its output stays held below
        self.addresses.forget(keys)
        retired = self._retired
        self._retired = []
        for held, free in retired:
            if any(is_held() for is_held in held):
                self._retired.append((held, free))
            else:
                free()
        if len(self._retired) < len(retired):
            self.backend.release_cached()
        for key in keys:
            self.pools.drop(key)
            self._first_use.pop(key, None)

    def drop_all(self) -> None:
        self.backend.synchronize()
        self._reset()
        self.backend.release_cached()
        self.pools.renew()

    def _reset(self) -> None:
        scope = self.scope
        for wrapper in scope.wrappers:
            wrapper.reset(scope)
        scope.entries = []
        scope.wrappers = {}
        self._first_use = {}

    def free(self) -> None:
        ranks = self.ranks
        self.ranks = SINGLE_RANK
        try:
            self.backend.synchronize()
        finally:
            try:
                ranks.release()
            finally:
                self._free()

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
        self._fingerprint = None
        self.backend.release_cached()


class Rehearsal:
    """Runs ahead of captures, and captures."""

    def __init__(
        self,
        graphs: ModelGraphs,
        put_back: PutBack,
    ) -> None:
        self.put_back = put_back
        self._graphs = graphs
        self.footprints: dict[CUDAGraphMode, Footprint] = {}
        self.judged = set[CUDAGraphMode]()  # by their first run
        self._changed: Mapping[str, Change] = {}
        # met only by a capture
        self._late_syncs: dict[CUDAGraphMode, HostSyncError] = {}

    # --- looks ------------------------------------------------------------------------------------

    def set_context(self, key: Key) -> None:
        self.put_back.key = key
        graphs = self._graphs
        if graphs.before_key is None:
            return
        mode, descriptor = key
        try:
            with self.put_back.setting_context():
                graphs.before_key(mode, descriptor, graphs.views(descriptor))
        except Exception as error:
            raise explain_failure(error, f"{mode} {descriptor}") from error

    def look(self, key: Key) -> None:
        """Run the forward and watch its operators, once for each mode; again where a library has to
        see the capture. Raises CaptureError.
        """
        self.set_context(key)
        mode, descriptor = key
        graphs = self._graphs
        looks_at_each = graphs.config.compilation.is_lazy and self.put_back.is_first_run
        if mode in self.footprints and not looks_at_each:
            return
        route = graphs.route
        model = graphs.model
        is_piecewise = mode is CUDAGraphMode.PIECEWISE
        split = route.splitting_ops if is_piecewise else ()
        breaks = route.breaks if is_piecewise else None
        if breaks:
            model = partial(breaks.forward, model)
        views = graphs.views(descriptor)
        look_at = partial(
            look,
            partial(graphs.run, model, CUDAGraphMode.NONE, descriptor, views),
            self.put_back,
            inputs=list(views.values()),
            part="eager piece" if graphs.runs_python_again(mode) else "segment",
            eager_ops=split,
            is_whole=not is_piecewise,
            hidden_from=graphs.config.compilation.hide_capture_from,
        )
        because = self._late_syncs.get(mode)
        with span("look"):
            found = look_at(capture_visible_because=because)
            put_back = self.put_back
            if put_back.before.is_compiled and put_back.perhaps_made and found.error is None:
                found.reads |= look_at(capture_visible_because=because).reads
                if graphs.judges_first_use:
                    graphs.addresses.first_use |= found.reads.keys() & put_back.last.keys()
            if because is None and found.packages_that_ask and found.host_sync is not None:
                found = look_at(capture_visible_because=found.host_sync)
        if found.seeded is not None:
            raise CaptureError(
                f"the forward, or another thread, sets the state of {found.seeded}; a replay "
                "would not",
                remedy="Seed generators outside of the forward, or keep that part in an eager "
                "piece. If another thread called torch.manual_seed, call recapture() while it is "
                "quiet.",
            )
        if found.host_sync and not isinstance(found.host_sync, HostSyncError):
            raise found.host_sync  # tagged cudagraph_unsafe
        if breaks and found.error is None:
            refuse_missing_ops(split, found.names)
        self.footprints[mode] = found
        if is_piecewise and route.name in ("modules", "wrappers"):
            route.operators = found.operators
        self._note_found(mode, found, views.values())

    def _note_found(
        self,
        mode: CUDAGraphMode,
        found: Footprint,
        views: Iterable[Tensor],
    ) -> None:
        graphs = self._graphs
        facts = graphs.facts
        addresses = graphs.addresses
        read = set(map(id, found.reads.values()))
        of_pieces = set[int]()
        # else FULL graphs read the tensors of eager pieces, too
        if graphs.plan.mode is CUDAGraphMode.PIECEWISE and graphs.route.breaks:
            for module in graphs.route.breaks.modules.values():
                of_pieces.update(map(id, module.parameters()))
                of_pieces.update(map(id, module.buffers()))
        addresses.reads |= found.reads.keys()
        for path, place in self.put_back.before.places.items():
            if id(place.value) in read:
                addresses.reads.add(path)
            elif id(place.value) in of_pieces and path not in addresses.reads:
                addresses.volatile.add(path)
        facts.read_first |= found.written.keys() - found.overwritten
        facts.overwritten |= found.overwritten
        facts.overwritten -= facts.read_first
        facts.bytes_read |= found.bytes_read
        facts.outside += found.outside
        facts.is_coarse |= self._is_coarse(found, [*views, *found.reads.values()])
        because = found.capture_visible_because
        if because:
            facts.capture_visible.add(mode)
            packages = ", ".join(sorted(found.packages_that_ask))
            facts.note(
                f"{packages} is told of captures, and may run slower kernels there than in eager "
                f"calls (attention with masks that mask nothing): as in eager calls, "
                f"{because.message}"
            )
        graphs.use_generators(found.generators.values())

    def _is_coarse(
        self,
        found: Footprint,
        tensors: list[Tensor],
    ) -> bool:
        device = self._graphs.backend.device.type
        if AmbientState.now(device).autocast is not None:
            return True
        if not _HALVES.isdisjoint([tensor.dtype for tensor in tensors]):
            return True
        if device != "cuda":
            return False
        if torch.get_float32_matmul_precision() != "highest":
            return True
        return torch.backends.cudnn.allow_tf32 and any("conv" in name for name in found.names)

    def forget_look(self, mode: CUDAGraphMode, failure: Any) -> bool:
        """Returns whether another look helps: the capture alone needed the host, and packages are
        told.
        """
        found = self.footprints.get(mode)
        if found is None:  # the look itself failed
            return False
        is_hidden = found.packages_that_ask and found.capture_visible_because is None
        if is_hidden and isinstance(failure, HostSyncError):
            self._late_syncs[mode] = failure
            del self.footprints[mode]
            return True
        if mode not in self.judged:  # the look may have ended early
            del self.footprints[mode]
        return False

    # --- runs after a look ------------------------------------------------------------------------

    @contextmanager
    def from_same_state(self, key: Key, *, replays: bool) -> Iterator[None]:
        """A block that counts as one run."""
        self.put_back.rewind()
        self.set_context(key)
        with self.put_back.run(replays=replays):
            yield

    @contextmanager
    def judged_run(
        self,
        mode: CUDAGraphMode,
        *,
        captures: bool = False,
    ) -> Iterator[None]:
        """A block of one run; a mode's first is compared with the look. Raises CaptureError for
        what a replay would not repeat.
        """
        is_first = mode not in self.judged
        if captures:
            made = self.put_back.hold_made()
            if is_first and self._graphs.judges_first_use:  # no warm-up has shown what it reads
                self._graphs.addresses.first_use.update(made)
        with self.put_back.run(
            captures=captures,
            computes=not captures or mode is CUDAGraphMode.PIECEWISE,  # its captures do
            enters_made=is_first,
        ) as self._changed:
            yield
        if is_first:
            self._judge(mode)

    def _judge(self, mode: CUDAGraphMode) -> None:
        graphs = self._graphs
        facts = graphs.facts
        found = self.footprints[mode]
        compilation = graphs.config.compilation
        if not graphs.runs_python_again(mode):
            self._refuse_rebound(found)
        made = self.put_back.made_of_inputs
        if made:
            self._refuse(f"computes {_listed(made)} {_FROM_INPUTS}")
        if compilation.strict and found.writes_input:
            raise CaptureError(
                f"the forward writes into an argument, at {found.writes_input}; a graph would "
                "write into its copy",
                remedy="Write into a tensor of the model, or return the result.",
            )
        python = list(self.changes)
        facts.changes_python.update(python)
        facts.aside |= found.aside
        python = graphs.frozen(mode, python)
        if python and compilation.strict:
            raise CaptureError(
                f"each run changes {self._changed[python[0]]}; a replay runs no Python",
                remedy="Keep it in a tensor, or name it in `ignore` if it decides nothing: "
                f"ignore=[{python[0]!r}].",
            )
        self.judged.add(mode)
        if python:
            facts.note(
                f"the forward changes {_listed(python)}; replays do not, nor do they see it change"
            )

    @property
    def changes(self) -> dict[str, Change]:
        """Of Python, by the last run."""
        ignore = self._graphs.config.compilation.ignore
        found = self._changed.items()
        return {path: change for path, change in found if not is_ignored(path, ignore)}

    @property
    def left(self) -> str:
        """Paths of Python and tensors that the last run changed, and not each run does."""
        return _listed([*self._left_python, *self.put_back.storages.newly_written])

    @property
    def _left_python(self) -> dict[str, Change]:
        is_steady = self.put_back.is_steady
        return {path: change for path, change in self.changes.items() if not is_steady(path)}

    def refuse_changed(self, what: str) -> None:
        """After a run that failed."""
        for change in self._left_python.values():
            if change.where is None:  # nothing can put it back
                raise CaptureError(
                    f"{what}: the capture failed without a warm-up, and left {change}",
                    remedy=REBUILD_AND_WARM_UP,
                )

    def refuse_first_use(self) -> None:
        put_back = self.put_back
        # one that each run needs has failed the capture
        lines = put_back.kept_of_values
        if lines:
            self._refuse(f"computes a value for the host ({lines[0]}) {_FROM_INPUTS}")
        prepared = put_back.prepared
        if prepared:
            self._refuse(f"prepares {_listed(prepared)} on first use, and changes it later")
        # this key kept no value that it read, whatever later ones make; one that failed may have
        put_back.values_read.pop(put_back.key, None)
        lost = put_back.storages.lost
        if lost:
            raise CaptureError(
                f"not all sizes write {_listed(lost)}, and nothing copied it before one did, so "
                "its values are lost",
                remedy="Build the model again, and set compilation.capture_policy: lazy, which "
                "looks at each size ahead of its other runs.",
            )

    def _refuse(self, does: str) -> None:
        remedy = (
            "Run the model on one real batch before the capture. Fill a table once for all sizes, "
            "or make a new one for each. Where a flag outside of the model (functools.cache) says "
            "that it is filled, build the model again."
        )
        if any(change.where is None for change in self.put_back.last.values()):
            remedy = f"Not all of what it changed can be undone, so build the model again. {remedy}"
        raise CaptureError(f"the forward {does}", remedy=remedy)

    def _refuse_rebound(self, found: Footprint) -> None:
        changed = self._changed
        stale = [path for path in found.stale if path in changed]
        ignore = self._graphs.config.compilation.ignore
        for change in found.rebound:
            # a cached_property is new
            if not change.is_new and not is_ignored(change.path, ignore):
                stale.append(str(change))
        if stale:
            raise CaptureError(
                f"an eager piece reads {_listed(stale)}, which graph code binds on each call; a "
                "replay would not",
                remedy="Pass it to the piece as an argument, of a list or dict a copy (list(it)), "
                "or have the piece compute it.",
            )
        if found.carried:
            raise CaptureError(
                f"an eager piece changes {found.carried[0]}, of an object that each call makes; "
                "replays would give it the one of the capture, as the last call left it",
                remedy="If it is a cache, turn it off (use_cache=False). Else keep the object in "
                "the model, or make it inside of the piece.",
            )
        refused = self.put_back.rebound(found.reads, changed)
        for path, change in changed.items():
            if path in refused or is_within(path, found.aside):
                continue
            # as a growing cache that the look's run made: no look knew its path
            if change.is_of_tensors and change.was.shape != change.now.shape:
                refused.append(path)
        if refused:
            raise CaptureError(
                f"the forward reads {_listed(refused)} and binds it again on each call; a graph "
                "reads the one of the capture",
                remedy="Write in place (self.cache.add_(x), a one-element tensor for a counter), "
                "pass it as an input, or do it outside of the forward.",
            )


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(path.removeprefix("model.") for path in [*paths][:5])
