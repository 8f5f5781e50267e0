"""CUDAGraphWrapper, a callable that captures itself once for each descriptor, then replays; and
the pools that graphs share, with what their runners must not do at once.

Note [Sharing a pool]
    A replay overwrites what other graphs of the pool left. The pool refuses a call during another
    call or capture, and on another stream while the last one has work.

Note [Generations]
    A pool gives memory back when its last graph is freed. Where new graphs do not fit, or the pool
    is much too large, all are captured again into a new pool.
"""

import copy
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import NonNegativeInt
from torch import Tensor
from torch.utils._pytree import tree_map_only

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import PoolMemory, autocast_cache
from cgplan.backends.blame import blamed_line
from cgplan.backends.context import (
    AddressPolicy,
    AmbientState,
    CaptureScope,
    ForwardContext,
    WatchedMetadata,
    current_forward_context,
    refuse_forbidden_capture,
)
from cgplan.backends.host_sync import Args, Kwargs
from cgplan.buffers.batch import renewed
from cgplan.config.schema import Options
from cgplan.errors import AddressError, BackendError, CaptureError, CgplanError, SealedError
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import current_look
from cgplan.modes import RUNTIME_MODES, BatchDescriptor, CUDAGraphMode, Key

PoolPolicy = Literal["shared", "per_mode", "per_graph"]


class PoolUse:
    """One call at a time, on one stream at a time.

    Attributes:
        thread: The holder of the lock, or 0.
        waits: Calls on another stream wait; else they raise.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        lock = threading.Lock()
        self.acquire, self.unlock = lock.acquire, lock.release
        self.thread = 0
        self.waits = False
        self.stream: int | None = None
        self.user = ""
        self.is_shared = is_shared
        self._holder = ""

    def release(self) -> None:
        self.thread = 0  # else this thread's next call seems nested
        self.unlock()

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Waits for other threads, as ``take``."""
        self.take(name)
        self._holder = name
        try:
            yield
        finally:
            self._holder = ""
            self.release()

    def take(self, name: str) -> None:
        """Waits for other threads. Raises CgplanError if this one holds the lock."""
        if not self.acquire(False):
            if self.thread == threading.get_ident():
                other = self._holder or self.user
                if self.is_shared and name != other:  # a lone manager has no other to name
                    raise CgplanError(
                        f"{name!r} was called while a call of {other!r} was under way, and both "
                        "capture into one pool",
                        remedy="Call members from one thread, or give each its own GraphPool.",
                    )
                raise CgplanError(
                    "the runner was called while another call was under way",
                    remedy="Call it from one thread at a time, and leave the block of staged "
                    "buffers first.",
                )
            self.acquire()
        self.thread = threading.get_ident()

    def take_stream(self, stream: int, name: str, backend: GraphBackend) -> None:
        """Raises CgplanError if another stream still has work."""
        if self.stream not in (None, stream):
            if self.waits:
                backend.synchronize()
            elif backend.is_busy(self.stream):
                remedy = "Synchronise the first stream before the second one takes over, or "
                if self.is_shared and name != self.user:
                    raise CgplanError(
                        f"{name!r} was called on another stream than {self.user!r} before, whose "
                        "work is not done, and both capture into one pool",
                        remedy=f"{remedy}give each its own GraphPool.",
                    )
                raise CgplanError(
                    "the runner was called from another stream than before, whose work is not done",
                    remedy=f"{remedy}capture a runner for each, with its own backend (as "
                    "cgplan.capture makes one).",
                )
        self.stream = stream
        self.user = name


class GraphPool:
    """A graph pool for several runners, see Note [Sharing a pool]; closing them frees it.

    Args:
        backend: All members use this very object.

    Raises BackendError for another ``backend``.
    """

    def __init__(self, backend: GraphBackend) -> None:
        if not isinstance(backend, GraphBackend):
            raise BackendError(
                f"a GraphPool on {backend!r:.100}, which is not a GraphBackend",
                remedy='Make one with cgplan.backends.select_backend("auto").',
            )
        self.backend = backend
        self.handle = backend.new_pool()
        self.use = PoolUse(is_shared=True)
        self.members: weakref.WeakSet[RunnerPools] = weakref.WeakSet()

    @property
    def nbytes(self) -> int:
        """Reserved bytes."""
        return self.backend.pool_bytes(self.handle)


class RunnerPools:
    """Pools by key, or a given one alone."""

    def __init__(self, policy: PoolPolicy, backend: GraphBackend, given: GraphPool | None) -> None:
        self.policy = policy
        self.generation = 1
        self._backend = backend
        self.is_given = given is not None
        self._given = given
        self._pools: dict[Any, Any] = {} if given is None else {None: given.handle}
        self._old: list[Any] = []
        if given:
            given.members.add(self)

    @property
    def is_private(self) -> bool:
        return self._given is None or len(self._given.members) == 1

    @property
    def nbytes(self) -> int:
        """Reserved bytes of all generations."""
        return self.memory().nbytes

    def memory(self) -> PoolMemory:
        return self._backend.pool_memory(*self._pools.values(), *self._old)

    @property
    def left_bytes(self) -> int:
        """Of blocks of earlier generations that tensors hold."""
        return self._backend.pool_memory(*self._old).held

    @property
    def handles(self) -> tuple[Any, ...]:
        return tuple(self._pools.values())

    def of(self, key: Key) -> Any:
        name = {"shared": None, "per_mode": key[0], "per_graph": key}[self.policy]
        if name not in self._pools:
            self._pools[name] = self._backend.new_pool()
        return self._pools[name]

    def drop(self, key: Key) -> None:
        if self.policy == "per_graph" and key in self._pools:
            self._old.append(self._pools.pop(key))
        self._forget_empty()

    def renew(self) -> None:
        """All graphs are freed: Note [Generations]."""
        self.generation += 1
        if not self.is_given:
            self._old += self._pools.values()
            self._pools = {}
            self._forget_empty()

    def close(self) -> None:
        """Leave a shared pool; all graphs are freed."""
        if self._given:
            self._given.members.discard(self)

    def _forget_empty(self) -> None:
        self._old = [pool for pool in self._old if self._backend.pool_bytes(pool)]


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Recorded:
    graph: Any
    output: Any
    slots: dict[int, Tensor]
    replay: Callable[[], None]
    free: Callable[[], None]
    segments: tuple[Any, ...]
    eager_pieces: int = 0


class CUDAGraphOptions(Options):
    """How a wrapper captures.

    Attributes:
        borrow_outputs: The next replay in the pool overwrites outputs; else they hold their memory.
        num_of_warmups: Eager runs before a capture outside of a session.
        copied_arguments: Positions of arguments, of fixed shape and dtype, that each replay copies
            into the pool.
        address_check: Of arguments and metadata: ``off``, ``first`` (on each graph's first replay),
            ``always``.
        debug_log_enable: Log captures at level DEBUG.
    """

    borrow_outputs: bool = True
    num_of_warmups: NonNegativeInt = 1
    copied_arguments: tuple[NonNegativeInt, ...] = ()
    address_check: AddressPolicy = "first"
    debug_log_enable: bool = True


@dataclass(eq=False, kw_only=True)
class CUDAGraphEntry(Recorded):
    """One captured graph.

    Attributes:
        graph: The backend's graph, or a breakable capture.
        output: On graph memory; each replay overwrites it.
        handed: Returns the output as new tensor objects.
        slots: Memory of the copied arguments, by position.
        manifest: Addresses at capture; None: not checked.
        pooled: Its output's tensors: while one is held, the graph must not be freed.
    """

    descriptor: BatchDescriptor
    handed: Callable[[], Any]
    manifest: Fingerprint | None
    capture_seconds: float
    scope: object = field(repr=False)
    metadata: frozenset[str]
    ambient: AmbientState
    pooled: tuple[Tensor, ...]
    is_checked: bool = False


_OF_FUNCTIONS = frozenset({"__name__", "__qualname__", "__self__", "__wrapped__", "__signature__"})
_DEFAULTS = CUDAGraphOptions()


class CUDAGraphWrapper:
    """Runs ``runnable`` by graphs where the forward context has this runtime mode, else as it is.

    The first call with a new descriptor captures, which a sealed runner refuses. Later calls
    replay: tensors keep their addresses, other arguments their values. FULL may wrap PIECEWISE.

    ``parameters()``, ``eval()`` and ``to()`` do not see a module that its wrapper alone holds:
    ``self.mlp = MLP(); self.run_mlp = CUDAGraphWrapper(self.mlp, ...)``.

    Args:
        backend: Outside of sessions; absent: the GraphPool's, or as for ``auto``.
        pool: Absent: the session's, or its own. The wrapper owns its graphs, not the pool.

    Raises CgplanError for a wrong argument.
    """

    __graph_memory__ = True  # no walk enters it
    _computes_while_capturing: ClassVar[bool] = False

    def __init__(
        self,
        runnable: Callable[..., Any],
        runtime_mode: CUDAGraphMode,
        *,
        backend: GraphBackend | None = None,
        pool: Any = None,
        options: CUDAGraphOptions = _DEFAULTS,
    ) -> None:
        if runtime_mode not in RUNTIME_MODES or runtime_mode is CUDAGraphMode.NONE:
            raise CgplanError(
                f"a graph wrapper cannot have the mode {runtime_mode!r}",
                remedy="Choose CUDAGraphMode.FULL or CUDAGraphMode.PIECEWISE.",
            )
        if not callable(runnable):
            raise CgplanError(
                f"a graph wrapper around {runnable!r:.100}, which cannot be called",
                remedy="Pass a function or module.",
            )
        if isinstance(pool, GraphPool):
            backend = backend or pool.backend
            pool = pool.handle
        self.runnable = runnable
        self.runtime_mode = runtime_mode
        self.options = options
        self.entries: dict[BatchDescriptor, CUDAGraphEntry] = {}
        self._backend = backend
        self._pool = pool
        self._own_pool = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay, capture or pass through. A replay overwrites the output."""
        context = current_forward_context()
        if context is None or context.runtime_mode is not self.runtime_mode:
            with self._passing(context):
                return self.runnable(*args, **kwargs)
        scope = context.scope
        entry = self.entries.get(context.descriptor)
        if entry is None or entry.scope is not (scope and scope.mark):
            entry, output = self._capture(context, args, kwargs)
            # captures on a GPU compute nothing; a session discards FULL's output
            is_read = scope is None or self.runtime_mode is not CUDAGraphMode.FULL
            if is_read and not self._computes_while_capturing:
                self._fill(entry, args)
                entry.replay()
            # unlike entry.output, it keeps later captures off its memory
            return output
        if scope is None:  # a runner compares it once
            entry.ambient.refuse_other_autocast(self.backend.device.type)
        is_due = not entry.is_checked or self._address_check(scope) == "always"
        if is_due and entry.manifest:
            roots = self._roots(entry, context, args, kwargs)
            entry.manifest.refuse_moved(f"{self.runtime_mode} {entry.descriptor}", roots)
            entry.is_checked = True
        self._fill(entry, args)
        entry.replay()
        return entry.handed()

    def _passing(self, context: ForwardContext | None) -> AbstractContextManager[object]:
        look = current_look() if self.runtime_mode is CUDAGraphMode.PIECEWISE else None
        if look:
            return look.in_wrapper(self, is_whole=not self._computes_while_capturing)
        scope = None if context is None else context.scope
        if scope and scope.is_open:  # a warm-up
            return autocast_cache(on=False)
        return nullcontext()

    @property
    def backend(self) -> GraphBackend:
        """Its device, or that of the last session."""
        if self._backend is None:
            self._backend = select_backend()
        return self._backend

    def __getattr__(self, name: str) -> Any:
        """Attributes of the wrapped callable."""
        is_protocol = name.startswith("__") and name not in _OF_FUNCTIONS
        if is_protocol or name == "runnable":
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self
            )
        return getattr(self.runnable, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copies ``runnable``, not the graphs; shares backend and given pool."""
        made = memo[id(self)] = copy.copy(self)
        made.runnable = copy.deepcopy(self.runnable, memo)
        made.entries = {}
        made._own_pool = None
        return made

    def unwrap(self) -> Callable[..., Any]:
        """The innermost wrapped callable."""
        inner = self.runnable
        return inner.unwrap() if isinstance(inner, CUDAGraphWrapper) else inner

    def reset(self, scope: CaptureScope | None = None) -> None:
        """Free all graphs, or those of one scope; their outputs are no longer valid."""
        for key, entry in list(self.entries.items()):
            if scope is None or entry.scope is scope.mark:
                entry.free()
                del self.entries[key]

    def _record(self, pool: Any, args: Args, kwargs: Kwargs) -> Recorded:
        backend = self.backend
        graph = backend.new_graph(pool)
        given = list(args)
        slots = {}
        with backend.capturing(graph):
            for i in self.options.copied_arguments:
                with torch.inference_mode(False):  # else it could be filled only there
                    given[i] = slots[i] = backend.slot(args[i])
            output = self.runnable(*given, **kwargs)
        replay = partial(backend.replay, graph)
        free = partial(backend.reset, graph)
        return Recorded(graph, output, slots, replay, free, (graph,))

    def _warm_up(self, args: Args, kwargs: Kwargs) -> None:
        self.runnable(*args, **kwargs)

    def _fill(self, entry: CUDAGraphEntry, args: Args) -> None:
        for i, slot in entry.slots.items():
            given: Any = args[i] if i < len(args) else None
            fits = isinstance(given, Tensor) and given.shape == slot.shape
            if not fits or given.dtype is not slot.dtype:
                raise AddressError(
                    f"{self.runtime_mode} {entry.descriptor}: argument {i}, which is copied, is "
                    f"{_argument(args, i)}; at capture it was {_described(slot)}",
                    remedy="Pass it by position as at capture; another shape needs "
                    "another descriptor.",
                )
        with torch.no_grad():
            for i, slot in entry.slots.items():
                slot.copy_(args[i])

    def _roots(
        self,
        entry: CUDAGraphEntry,
        context: ForwardContext,
        args: Args,
        kwargs: Kwargs,
    ) -> dict[str, Any]:
        kept = [None if i in entry.slots else arg for i, arg in enumerate(args)]
        roots = {"args": tuple(kept), "kwargs": kwargs}
        if self.runtime_mode is CUDAGraphMode.FULL or context.scope:
            roots["metadata"] = context.metadata
        elif entry.metadata:  # eager pieces may read new ones
            roots["metadata"] = {name: context.metadata.get(name) for name in entry.metadata}
        return roots

    def _refuse(self, context: ForwardContext, args: Args) -> None:
        scope = context.scope
        refuse_forbidden_capture(self.runtime_mode, context.descriptor)
        if scope and not scope.is_open:
            if context.descriptor not in self.entries:
                raise SealedError(
                    f"no {self.runtime_mode} graph for {context.descriptor}, and the runner is "
                    "sealed",
                    remedy="Add the size to cudagraph_capture_sizes, or capture again in a new "
                    "session.",
                )
            raise SealedError(
                f"the {self.runtime_mode} graph for {context.descriptor} was captured again by a "
                "later session",
                remedy="Use the last session's runner.",
            )
        if scope and scope.backend is not None:
            own, given = self._backend, scope.backend
            if own is not None and own.device != given.device:
                raise CaptureError(
                    f"a wrapper on {own.device} inside a session on {given.device}",
                    remedy="Make the wrapper without a backend: it takes the session's.",
                )
            self._backend = given
        if self.backend.is_capturing():
            raise CaptureError(
                "the model holds graph wrappers, and a session captures it as a whole, at "
                f"{blamed_line()}",
                remedy="For PIECEWISE set compilation.piecewise: wrappers, or take the wrappers "
                "out. A wrapper inside another one needs another runtime mode.",
            )
        for i in self.options.copied_arguments:
            is_given = i < len(args) and isinstance(args[i], Tensor)
            if not is_given:
                raise CaptureError(
                    f"copied_arguments names argument {i}, which is {_argument(args, i)}",
                    remedy="Name positions of tensors that are passed by position.",
                )
        if self.options.debug_log_enable:
            logger.debug("capturing a %s graph for %s", self.runtime_mode, context.descriptor)

    def _capture(
        self,
        context: ForwardContext,
        args: Args,
        kwargs: Kwargs,
    ) -> tuple[CUDAGraphEntry, Any]:
        scope = context.scope
        self._refuse(context, args)
        backend = self.backend
        pool = self._pool
        if pool is None and scope:
            pool = scope.pool
        elif pool is None:
            pool = self._own_pool = self._own_pool or backend.new_pool()
        plain = context.metadata
        watched = WatchedMetadata(plain, backend.is_capturing)
        # as in a replay
        with backend.session(), torch.no_grad():
            warmups = self.options.num_of_warmups if scope is None else 0
            for _ in range(warmups):
                context.derived.clear()
                with autocast_cache(on=False):
                    self._warm_up(args, kwargs)
            # else the graph would read what a warm-up derived
            context.derived.clear()
            start = time.perf_counter()
            try:
                if scope is None:
                    context.metadata = watched
                recorded = self._record(pool, args, kwargs)
            finally:
                context.metadata = plain
            seconds = time.perf_counter() - start
            context.derived.clear()  # they are on graph memory
        # outputs can be used in either mode
        with torch.inference_mode(False):
            roots = {"model": self.runnable, "args": args, "kwargs": kwargs}
            output, renewable, pooled = self._outputs_of(recorded, pool, roots)
            slots = {
                i: backend.borrow(slot) if backend.in_pool(slot, pool) else slot
                for i, slot in recorded.slots.items()
            }
        kept = vars(recorded) | {"output": output, "slots": slots}
        entry = CUDAGraphEntry(
            **kept,
            descriptor=context.descriptor,
            handed=renewed(output, renewable),
            manifest=None,
            capture_seconds=seconds,
            scope=scope and scope.mark,
            metadata=frozenset(watched.read),
            ambient=AmbientState.now(backend.device.type),
            pooled=tuple(pooled),
        )
        if self._address_check(scope) != "off":
            checked = self._roots(entry, context, args, kwargs)
            manifest = Fingerprint.of(checked, backend.device)
            entry.manifest = manifest.let_go()
        self.entries[context.descriptor] = entry
        if scope:
            scope.entries.append(entry)
            scope.wrappers[self] = None
        return entry, recorded.output

    def _outputs_of(
        self,
        recorded: Recorded,
        pool: Any,
        roots: Mapping[str, Any],
    ) -> tuple[Any, set[int], list[Tensor]]:
        """On graph memory; the ids of tensors that each call returns as new objects; those in the
        pool.
        """
        backend = self.backend
        renewable = set()
        pooled = []

        @cache
        def ids_of_model() -> set[int]:
            record = Fingerprint.of(roots, backend.device)
            return set(map(id, record.tensors))

        def taken(tensor: Tensor) -> Tensor:
            try:
                in_pool = backend.in_pool(tensor, pool)
            except RuntimeError as error:  # no memory of its own
                raise CaptureError(
                    f"the model returns a {type(tensor).__name__}",
                    remedy="Return dense tensors, such as to_local() of a DTensor.",
                ) from error
            if not in_pool and (type(tensor) is not Tensor or id(tensor) in ids_of_model()):
                return tensor
            if in_pool and self.options.borrow_outputs:
                tensor = backend.borrow(tensor).as_subclass(type(tensor))
            made = tensor.detach()
            renewable.add(id(made))
            if in_pool:
                pooled.append(made)
            return made

        return tree_map_only(Tensor, taken, recorded.output), renewable, pooled

    def _address_check(self, scope: CaptureScope | None) -> AddressPolicy:
        if scope is None:
            return self.options.address_check
        if self.runtime_mode is CUDAGraphMode.FULL:  # the session looks at its model
            return "off"
        if scope.address_check in ("off", "always"):
            return scope.address_check
        return self.options.address_check


def _argument(args: Args, i: int) -> str:
    if i >= len(args):
        return f"missing among {len(args)} arguments"
    return _described(args[i])


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    return f"{value!r:.100}"
