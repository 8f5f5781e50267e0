"""A model with its graphs and the memory that they read."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import InitVar, dataclass
from functools import partial

import torch
from torch.nn.utils import parametrize

from cgplan.backends.backend import span
from cgplan.backends.replacing import replaced
from cgplan.buffers.outputs import OutputRows
from cgplan.buffers.static import Tensors
from cgplan.captures.model_forward import ModelForward, Rehearsal
from cgplan.captures.rank_sync import SINGLE_RANK, RankSync
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import look
from cgplan.graphs.pools import GraphPool, RunnerPools
from cgplan.graphs.put_back import PutBack, copy_limit
from cgplan.graphs.wrapper import CUDAGraphEntry, CUDAGraphWrapper
from cgplan.modes import CUDAGraphMode, Key
from cgplan.piecewise.breaks import any_breaks
from cgplan.piecewise.routes import SplitRoute, choose_route
from cgplan.reports.records import StateRecord


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
class ModelGraphs(ModelForward):
    """A model's forward with its graphs. It owns all but the model and a given ``pool``.

    Attributes:
        is_alone: No other rank runs the same forwards.
    """

    real_rows: RealRows | None = None
    pool: InitVar[GraphPool | None] = None
    ranks: RankSync = SINGLE_RANK

    def __post_init__(self, pool: GraphPool | None) -> None:
        self.pools = RunnerPools(
            self.config.compilation.pool,
            self.backend,
            pool,
        )
        super().__post_init__()
        self.outputs = OutputRows(self.config)
        self.looked_at = ""
        self.state_records: tuple[StateRecord, ...] = ()
        self.is_alone = self.ranks is SINGLE_RANK
        self._rehearsal: Rehearsal | None = None
        self._fingerprint: Fingerprint | None = None  # after the last rehearsal
        self._retired: list[tuple[list[Callable[[], bool]], Callable[[], None]]] = []

    def choose_route(self, given: SplitRoute | None = None) -> None:
        """Make the model ready for runs; may run it on padding. Raises as
        piecewise.routes.choose_route.
        """
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
        if self._rehearsal is not None:
            yield self._rehearsal
            return
        self.backend.synchronize()
        before = Fingerprint.of(
            self.roots,
            self.backend.device,
            draws=True,
        )
        put_back = PutBack(before, copy_limit(self.config.compilation, self.backend))
        self.use_generators(before.generators)
        self._rehearsal = Rehearsal(self, put_back)
        lost: tuple[type[Exception], ...] = (RuntimeError,)
        try:
            # the cache of parametrizations ends with the caller's block
            with replaced(parametrize, _cache_enabled=0):
                yield self._rehearsal
            lost = ()
        finally:
            self._rehearsal = None
            with suppress(*lost):  # a lost device raises its own error
                self._end_rehearsal(put_back)
            put_back.drop_copies()

    def fingerprint(self) -> Fingerprint:
        if self._fingerprint is not None and not self._fingerprint.changes():
            return self._fingerprint
        return Fingerprint.of(self.roots, self.backend.device)

    @contextmanager
    def in_context(self, key: Key) -> Iterator[None]:
        """A block in the context of ``before_key``."""
        if self.before_key is None:
            yield
            return
        before = self.fingerprint()
        try:
            self.before_key(*key, self.views(key[1]))
            yield
        finally:
            before.put_back()

    def _end_rehearsal(self, put_back: PutBack) -> None:
        self.backend.synchronize()
        put_back.restore()
        self.backend.synchronize()  # the next batch may use another stream
        self.addresses.volatile |= put_back.volatile
        self.looked_at = put_back.before.summary()
        self._fingerprint = put_back.before.without_draws()
        self._note_written(put_back)
        records = list[StateRecord]()
        for path, (nbytes, kept) in put_back.outcome.items():
            records.append(StateRecord(path=path, nbytes=nbytes, kept=kept))
        self.state_records = tuple(records)
        if not self.scope.is_open:
            self.seal()

    def _note_written(self, put_back: PutBack) -> None:
        facts = self.facts
        limit = 0
        if self.real_rows is not None:
            limit = copy_limit(self.config.compilation, self.backend)
        for written in put_back.written.values():
            tensor = written.tensor
            storage = tensor.untyped_storage()
            nbytes = storage.nbytes()
            if not written.is_captured:
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

    @property
    def copied_bytes(self) -> int:
        """On the device, of the model's state."""
        return 0 if self._rehearsal is None else self._rehearsal.put_back.copied["device"]

    @contextmanager
    def first_captures(self) -> Iterator[Rehearsal]:
        """A block; if it raises, no graph stays."""
        with (
            span("capture session"),
            self.rehearsing() as rehearsal,
            self.backend.session(),
            torch.no_grad(),
        ):
            try:
                yield rehearsal
            except BaseException:
                rehearsal.put_back.undo_first_use()
                raise
            self.buffers.refill()
            self.backend.synchronize()

    @contextmanager
    def captures_again(self) -> Iterator[Rehearsal]:
        """A block in torch's first state."""
        self.backend.synchronize()
        self.scope.is_open = True
        without_grad = self.ambient._replace(grad=False)
        in_state = without_grad.entered(self.backend.device.type)
        try:
            with self.rehearsing() as rehearsal, in_state, self.buffers.on_padding():
                with self.backend.session():
                    yield rehearsal
                self.backend.synchronize()
        finally:
            self.seal()

    def seal(self) -> None:
        """Missing keys and moved memory are errors from now, or the rehearsal's end, on."""
        self.scope.is_open = False
        if self._rehearsal is not None:
            return
        if self.real_rows is not None:
            self.addresses.seal()
            return
        self.addresses.seal(self._fingerprint)
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
        """For good."""
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
