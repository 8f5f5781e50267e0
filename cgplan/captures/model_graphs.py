"""A model with its graphs and the memory that they read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import InitVar, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.backends.backend import autocast_cache, span
from cgplan.backends.capture_answers import answering
from cgplan.backends.context import CaptureScope, forward_context
from cgplan.buffers.outputs import OutputRows
from cgplan.buffers.static import StaticBoxes, Tensors
from cgplan.captures.addresses import AddressChecks
from cgplan.captures.rank_sync import SINGLE_RANK, RankSync
from cgplan.captures.rehearsal import ForwardFacts, Rehearsal
from cgplan.config import Config
from cgplan.errors import InputError
from cgplan.graphs.ambient import AmbientState, number_of
from cgplan.graphs.fingerprint import Fingerprint, is_within
from cgplan.graphs.footprint import look
from cgplan.graphs.pools import GraphPool, RunnerPools
from cgplan.graphs.put_back import PutBack
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper
from cgplan.modes import BatchDescriptor, CUDAGraphMode, Key
from cgplan.piecewise.breaks import any_breaks
from cgplan.piecewise.routes import choose_route
from cgplan.planning import Plan
from cgplan.planning.costs import widest
from cgplan.reports.records import StateRecord

State = Sequence[object] | Mapping[str, object] | None
BeforeKey = Callable[[CUDAGraphMode, BatchDescriptor, Tensors], object]


class _Metadata(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        raise InputError(
            f"the model reads metadata {name!r}, which is not declared",
            remedy=f"Declare it under `metadata`; declared are {', '.join(self) or 'none'}.",
        )


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
    """It owns all but the model and a given ``pool``.

    Attributes:
        roots: The objects whose state counts, by name.
        places: What the last captures wrote of the model, and whether it was put back.
        is_alone: No other rank runs the same forwards.
    """

    plan: Plan
    config: Config
    model: Callable[..., Any]
    backend: GraphBackend
    state: InitVar[State] = None
    before_key: BeforeKey | None = None
    real_rows: RealRows | None = None
    pool: InitVar[GraphPool | None] = None
    ranks: RankSync = SINGLE_RANK
    on_demand: bool = False

    def __post_init__(
        self,
        state: State,
        pool: GraphPool | None,
    ) -> None:
        config = self.config
        backend = self.backend
        self.pools = RunnerPools(
            config.compilation.pool,
            backend,
            pool,
        )
        policy = config.compilation.address_policy
        self.scope = CaptureScope(None, backend, address_check=policy)
        self.allocate_buffers(self.plan.keys)
        self.generators: tuple[torch.Generator, ...] = ()
        self.facts = ForwardFacts()
        self.roots: dict[str, Any] = {"model": self.model}
        if isinstance(state, Mapping):
            self.roots = dict(state)
        elif state is not None:
            self.roots = {f"state[{index}]": item for index, item in enumerate(state)}
            for name, item in self.roots.items():
                if not Fingerprint.of({name: item}, backend.device).tensors:
                    self.facts.note(
                        f"{name} ({type(item).__name__}) holds no tensor: `state` lists the "
                        "objects whose tensors the model uses"
                    )
        self.addresses = AddressChecks(self.roots, backend.device, policy)
        self.outputs = OutputRows(config)
        self.looked_at = ""
        self.places: tuple[StateRecord, ...] = ()
        self.is_alone = self.ranks is SINGLE_RANK
        self._rehearsal: Rehearsal | None = None
        self._fingerprint: Fingerprint | None = None  # after the last rehearsal
        self._retired: list[tuple[list[Callable[[], bool]], Callable[[], None]]] = []
        self.ambient = AmbientState.now(backend.device.type)
        self.route = choose_route(
            self.plan,
            config,
            self.model,
            backend,
            self._calls_breaks,
        )
        self.wrapper = CUDAGraphWrapper(
            self.route.whole,
            CUDAGraphMode.FULL,
            backend=backend,
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

    # --- buffers ----------------------------------------------------------------------------------

    def allocate_buffers(self, keys: Sequence[Key]) -> None:
        """Captures on demand make buffers as needed. Raises CaptureMemoryError and
        BackendError.
        """
        config = self.config
        most = widest(keys)
        self.most_tokens = max(most.values(), default=0)
        if not most:
            most = {(1,) * (len(config.dim_names) - 1): 0}
        rows = {}
        for sizes, tokens in most.items():
            rows[sizes] = tokens, min(tokens, self.plan.max_num_seqs)
        self.buffers = StaticBoxes(
            rows,
            config.tensors_at,
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

    # --- the model around captures ----------------------------------------------------------------

    @contextmanager
    def rehearsing(self) -> Iterator[Rehearsal]:
        """A block of runs on padding; the model is put back. Can be nested."""
        if self._rehearsal is not None:
            yield self._rehearsal
            return
        self.backend.synchronize()
        before = Fingerprint.of(
            self.roots,
            self.backend.device,
            draws=True,
        )
        put_back = PutBack(before, self.copy_limit())
        self.use_generators(before.generators)
        self._rehearsal = Rehearsal(self, put_back)
        lost: tuple[type[Exception], ...] = (RuntimeError,)
        try:
            yield self._rehearsal
            lost = ()
        finally:
            self._rehearsal = None
            with suppress(*lost):  # a lost device raises its own error
                self._end_rehearsal(put_back)
            put_back.drop_copies()

    def _end_rehearsal(self, put_back: PutBack) -> None:
        self.backend.synchronize()
        put_back.restore()
        self.backend.synchronize()  # the next batch may use another stream
        self.addresses.volatile |= put_back.volatile
        self.looked_at = put_back.before.summary()
        self._fingerprint = put_back.before.without_draws()
        self._note_written(put_back)
        places = list[StateRecord]()
        for path, (nbytes, outcome) in put_back.outcome.items():
            place = StateRecord(
                path=path,
                nbytes=nbytes,
                kept=outcome,
            )
            places.append(place)
        self.places = tuple(places)
        if not self.scope.is_open:
            self.seal()

    def _note_written(self, put_back: PutBack) -> None:
        facts = self.facts
        limit = 0
        if self.real_rows is not None:
            limit = self.copy_limit()
        for written in put_back.written.values():
            tensor = written.tensor
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            if not written.captures:
                facts.overwritten.discard(storage._cdata)
            if nbytes > limit and storage._cdata in facts.overwritten:
                continue
            # other views may be written
            whole = torch.empty(
                0,
                dtype=tensor.dtype,
                device=tensor.device,
            )
            count = nbytes // tensor.itemsize
            whole.set_(storage, 0, (count,), (1,))
            facts.written[written.path] = whole

    def copy_limit(self) -> int:
        """In bytes."""
        limit = self.config.compilation.state_copy
        if limit is None:
            free = self.backend.memory().free or 4 << 30
            limit = free // 4
        return limit

    @property
    def copied_bytes(self) -> int:
        """On the device, of the model's state."""
        return 0 if self._rehearsal is None else self._rehearsal.put_back.copied()

    def fingerprint(self) -> Fingerprint:
        if self._fingerprint is not None and not self._fingerprint.changes():
            return self._fingerprint
        return Fingerprint.of(self.roots, self.backend.device)

    def use_generators(self, found: Iterable[torch.Generator]) -> None:
        known = set(map(number_of, self.generators))
        for generator in found:
            if number_of(generator) not in known:
                self.generators += (generator,)
                self.backend.register_generator(generator)

    @contextmanager
    def captures_again(self) -> Iterator[Rehearsal]:
        """A block in torch's state of the first captures."""
        self.backend.synchronize()
        self.scope.is_open = True
        without_grad = self.ambient._replace(grad=False)
        in_state = without_grad.entered(self.backend.device.type)
        try:
            with self.rehearsing() as rehearsal, in_state, self.buffers.on_padding():
                with self.backend.session():
                    yield rehearsal
                self.backend.synchronize()
                if self.real_rows is not None:
                    self.buffers.fill_padding()
        finally:
            self.seal()

    def seal(self) -> None:
        """Missing keys and moved memory are errors from now on."""
        self.scope.is_open = False
        if self._rehearsal is not None:
            return
        if self.real_rows is not None:
            self.addresses.seal()
            return
        self.addresses.seal(self._fingerprint)
        self._fingerprint = None

    # --- runs -------------------------------------------------------------------------------------

    @contextmanager
    def in_context(self, key: Key) -> Iterator[None]:
        """A block in the context of ``before_key``."""
        if self.before_key is None:
            yield
            return
        put_back = PutBack(self.fingerprint(), 0)
        try:
            self.before_key(*key, self.views(key[1]))
            yield
        finally:
            put_back.restore_python(())

    def runs_python_again(self, mode: CUDAGraphMode) -> bool:
        """Whether a replay runs Python between wrappers."""
        return mode is CUDAGraphMode.PIECEWISE and self.route.name == "wrappers"

    def frozen(
        self,
        mode: CUDAGraphMode,
        paths: Iterable[str],
    ) -> list[str]:
        """Paths that no replay changes."""
        if self.runs_python_again(mode):
            return []
        return [path for path in paths if not is_within(path, self.facts.aside)]

    def answering_packages(
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

    def check_autocast(self) -> None:
        done = "traced" if self.route.name == "ops" else "captured"
        self.ambient.refuse_other_autocast(self.backend.device.type, done)

    def warm_up(self, key: Key) -> Any:
        mode, descriptor = key
        call = self.route.warm
        if mode is CUDAGraphMode.FULL:
            call = self.route.whole
        cache = autocast_cache(on=self.runs_python_again(mode))
        with cache, self.answering_packages(mode, capturing=False), span("warm-up"):
            return self.run(call, CUDAGraphMode.NONE, descriptor, self.views(descriptor))

    def run_graphed(
        self,
        key: Key,
        tensors: Tensors,
    ) -> Any:
        """Replay, or capture while the scope is open."""
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
        """``values``: in the order of their declaration, on the device or on the host."""
        named = {}
        for name, value in zip(self.config.tensors, values, strict=True):
            named[name] = value.to(self.backend.device)
        return self.run_eager(descriptor, named)

    def run(
        self,
        call: Callable[..., Any],
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        tensors: Tensors,
    ) -> Any:
        """The metadata goes into the forward context."""
        inputs = {}
        for name in self.config.inputs:
            inputs[name] = tensors[name]
        metadata = _Metadata()
        for name in self.config.metadata:
            metadata[name] = tensors[name]
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
        """Free these graphs; where somebody holds an output, a later call does."""
        self.backend.synchronize()
        self.scope.entries = []
        for wrapper in self.scope.wrappers:
            mine = {descriptor for mode, descriptor in keys if mode is wrapper.runtime_mode}
            for output, free in wrapper.take_out(self.scope, mine):
                held = list(map(self.backend.watch, output))
                self._retired.append((held, free))
                del output  # else it stays held below
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

    def free(self) -> None:
        """Free all, for good."""
        ranks = self.ranks
        self.ranks = SINGLE_RANK
        with ExitStack() as stack:
            stack.callback(self._free)
            stack.callback(ranks.release)
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
        self._fingerprint = None
        self.backend.release_cached()
