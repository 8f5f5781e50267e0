"""Breakable capture: graph segments with eager pieces between them, which are functions, modules
or operators. docs/piecewise.md, State, says what eager pieces may do.

Note [Output slots]
    A piece may return a fresh tensor each time, but a segment reads one address. So each run copies
    the result into a slot: memory of the pool, taken in the next segment. Arguments need none, nor
    does state (of modules that the piece was called on or with) that it does not bind again. Views
    of one memory get slots in one block.

    Each run hands the user's function new tensor objects, which it may change. Unlike ``.data``,
    ``detach()`` shares the count of writes, which the runner watches.

Note [Breaks at operators]
    A dispatch mode sees a segment's operators. It stands above the backend's modes, so it steps
    aside where other code breaks the capture. Composite operators reach it below autograd only:
    torch raises an error for gradients.
"""

from __future__ import annotations

import fnmatch
import functools
import re
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import (
    is_namedtuple_instance,
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)
from torch.utils.weak import WeakIdKeyDictionary

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import Trace, autocast_cache, span
from cgplan.backends.blame import Line, blamed_line
from cgplan.backends.context import AmbientState, deriving
from cgplan.backends.host_sync import (
    Args,
    Function,
    Kwargs,
    OperatorMode,
    Refusals,
    as_its_caller,
    operator_of,
    storages_of,
    tensors_in,
)
from cgplan.backends.replacing import replaced
from cgplan.buffers.batch import alike_to, hides_tensors, never
from cgplan.errors import (
    CaptureError,
    CaptureMemoryError,
    ConfigError,
    HostSyncError,
    did_you_mean,
    first_line,
)
from cgplan.graphs.footprint import current_look, modules_reached
from cgplan.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper, GraphPool, Recorded
from cgplan.graphs.written import bytes_of
from cgplan.modes import CUDAGraphMode
from cgplan.units import listed

_DEFAULTS = CUDAGraphOptions()
_living: weakref.WeakSet[BreakableCUDAGraphCapture] = weakref.WeakSet()


class _Active(threading.local):
    capture: BreakableCUDAGraphCapture | None = None


_active = _Active()


class BreakableCUDAGraphCapture:
    """Captures a block as graph segments with eager pieces between them, and replays it.

        with backend.session(), torch.no_grad(), BreakableCUDAGraphCapture(pool=pool) as capture:
            h = stem(x)
            h = capture.add_eager(attention, h)
            y = head(h)
        capture.replay()  # y holds the result for what is in x now

    The block runs once as a real forward. The results lie in the pool; each replay overwrites them.
    Eager pieces run in the replaying call's stream and forward context, and may write into their
    arguments. The capture owns its graphs, not the pool.

    Args:
        backend: The pool's if absent; the block is inside its ``session``.
        pool: A new one if absent.

    Raises:
        CaptureError: on entering inside another capture; on leaving if a segment is not valid. An
            error frees the segments.
    """

    def __init__(self, backend: GraphBackend | None = None, pool: Any = None) -> None:
        if backend is None:
            backend = select_backend() if pool is None else pool.backend
        if pool is None:
            pool = backend.new_pool()
        self._backend = backend
        self._pool = pool.handle if isinstance(pool, GraphPool) else pool
        self._items: list[Any] = []
        # they keep the pool; from torch 2.12 on, freeing one releases library workspaces
        self._empty: list[Any] = []
        self._open: tuple[Any, AbstractContextManager[None]] | None = None
        self._last_piece = ""
        self._others: list[BreakableCUDAGraphCapture] = []
        _living.add(self)
        self._copies = Copies()
        self._derived: dict[str, Any] = {}
        self._modes = ExitStack()
        self._steps: list[Callable[[], object]] | None = None

    @property
    def segments(self) -> tuple[Any, ...]:
        """Graphs and eager pieces, in order."""
        return tuple(self._items)

    @property
    def graphs(self) -> tuple[Any, ...]:
        """One a segment."""
        return tuple(item for item in self._items if not isinstance(item, EagerPiece))

    @property
    def eager_pieces(self) -> tuple[EagerPiece, ...]:
        """The functions between the segments."""
        return tuple(item for item in self._items if isinstance(item, EagerPiece))

    @property
    def is_recording(self) -> bool:
        """Whether a segment is being captured."""
        return self._open is not None

    def __enter__(self) -> BreakableCUDAGraphCapture:
        if _active.capture or self._backend.is_capturing():
            raise CaptureError(
                f"a breakable capture inside another one, at {blamed_line()}",
                remedy="Capture the outer forward alone: it breaks where the inner one would.",
            )
        if self._items or self._steps is not None:
            raise CaptureError(
                "this breakable capture was used before", remedy="Make a new one for each capture."
            )
        _active.capture = self
        device = self._backend.device.type
        self._state = AmbientState.now(device)
        self._memory = PieceMemory(device, self._backend.stream_getter())
        self._modes.enter_context(self._memory)
        self._modes.callback(self._memory.made.clear)
        try:
            # rebinding `as capture` must not free CUDA graphs here: it would end the capture
            self._others = list(_living)
            self._begin_segment()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *raised: Any) -> None:
        try:
            if kind is not None:
                if self._open:
                    self._leave(kind, *raised)
                return
            if self._open is None:
                raise CaptureError(
                    f"eager piece {self._last_piece} failed while it was captured, and the model "
                    "went on",
                    remedy="Let the error pass, or catch it inside the eager piece.",
                )
            self._end_segment("the end")
            self._steps = list(map(self._step, self._items))
        finally:
            self._close()

    def _step(self, item: Any) -> Callable[[], object]:
        if not isinstance(item, EagerPiece):
            return self._backend.replay_of(item)
        if item.state == self._state:
            return item.run
        state = item.state.entered(self._backend.device.type)
        return state(item.run)

    def add_eager(self, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        """End the segment, run ``function`` eagerly, and begin the next segment.

        Returns:
            The result, with tensors replaced by their slots in the pool; tensors in memory of an
            argument stay. Other results must not change.

        Raises:
            CaptureError: outside of a segment; for an invalid segment; for a result that is not a
                dense tensor on the device.
        """
        return self.add_named(name_of(function), function, args, kwargs)

    def recorded(self, output: Any, slots: dict[int, torch.Tensor]) -> Recorded:
        """For graph wrappers, once the block was left."""
        return Recorded(
            self,
            output,
            slots,
            self.replay,
            self.reset,
            self.graphs,
            len(self.eager_pieces),
        )

    def new_slot(self, value: torch.Tensor) -> torch.Tensor:
        """Memory of the pool that holds ``value``, for work ahead of each replay."""
        assert self.is_recording
        with torch.inference_mode(False):
            slot = self._backend.slot(value)
            borrowed = self._backend.borrow(slot)
            self._copies.append((borrowed, value.detach()))
        return slot

    def refuse_made(self, tree: Any) -> None:
        """CaptureError for what an eager piece made and did not return."""
        self._memory.refuse_made(storages_of(tensors_in(tree)))

    def replay(self) -> None:
        """Run segments and eager pieces on what is in their memory now.

        Raises CaptureError without a capture, or for other results of a piece.
        """
        if self._steps is None:
            raise CaptureError(
                "nothing was captured, or it was reset", remedy="Capture before replaying."
            )
        device = self._backend.device.type
        as_captured = AmbientState.now(device) == self._state
        with deriving({}), nullcontext() if as_captured else self._state.entered(device):
            if Trace.current is None:
                for step in self._steps:
                    step()
                return
            for item, step in zip(self._items, self._steps, strict=True):
                name = item.name if isinstance(item, EagerPiece) else "segment"
                with span(name):
                    step()

    def reset(self) -> None:
        """Free the graphs and the block's results."""
        graphs = [*self.graphs, *self._empty]
        self._steps = None
        self._items = []
        self._empty = []
        self._copies = []
        for graph in graphs:
            self._backend.reset(graph)

    def add_named(
        self,
        name: str,
        function: Function,
        args: Args,
        kwargs: Kwargs,
        *,
        is_traced: bool = False,
    ) -> Any:
        """``add_eager``; ``is_traced``: of a trace."""
        line = str(blamed_line())
        if not self.is_recording:
            raise CaptureError(
                f"eager piece {name} outside of a segment, at {line}",
                remedy="Call add_eager inside the capture's block, outside of eager pieces.",
            )
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                self.refuse_made(value)
        self._last_piece = name
        self._end_segment(f"eager piece {name}, at {line}")
        piece = EagerPiece(
            name,
            line,
            function,
            self._backend,
            self._pool,
            is_traced=is_traced,
        )
        self._items.append(piece)
        with self._memory.in_piece(name), deriving(self._derived):
            piece.first_run(args, kwargs)
        self._begin_segment()
        self._memory.in_segment = False
        handed, self._copies = piece.hand_out()
        self._memory.in_segment = True
        return handed

    def _begin_segment(self) -> None:
        graph = self._backend.new_graph(self._pool)
        capturing = self._backend.capturing(graph)
        capturing.__enter__()
        self._open = (graph, capturing)
        self._memory.side.clear()
        self._memory.in_segment = True

    def _leave(self, *raised: Any) -> Any:
        assert self._open
        graph, capturing = self._open
        self._open = None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
            capturing.__exit__(*raised)
        return graph

    def _end_segment(self, before: str) -> None:
        self._memory.in_segment = False
        try:
            graph = self._leave(None, None, None)
        except (HostSyncError, CaptureMemoryError):
            raise
        except (CaptureError, torch.AcceleratorError) as error:
            used = ""
            for handle, line in self._memory.side.items():
                used += f"; the segment runs on side stream {handle:#x} since {line}"
            raise CaptureError(
                f"the segment before {before} is not valid: {first_line(error)}{used}",
                remedy="Let nothing in it wait for the device. Let the main stream wait for every "
                "side stream before each eager piece and at the end: "
                "torch.cuda.current_stream().wait_stream(side).",
            ) from error
        is_empty = self._backend.is_empty(graph)
        kept = self._empty if is_empty else self._items
        kept.append(graph)
        with torch.no_grad():
            fill(self._copies, together=False)
        self._copies = []
        if not is_empty:
            self._backend.replay(graph)

    def _close(self) -> None:
        """Without ``_steps`` the capture has failed."""
        for piece in self.eager_pieces:
            piece.end_capture()
        _active.capture = None
        self._open = None
        self._derived = {}
        self._others = []
        if self._steps is None:
            self.reset()
        self._modes.close()


def recording_capture() -> BreakableCUDAGraphCapture | None:
    """Of this thread, while it records a segment."""
    capture = _active.capture
    return capture if capture and capture.is_recording else None


def in_breakable_capture() -> bool:
    """Whether a breakable capture, or an eager piece of it, runs in this thread."""
    return _active.capture is not None


def standing_in(capture: Any) -> AbstractContextManager[object]:
    """While it ``is_recording``, ``capture.add_named`` gets the eager pieces."""
    return replaced(_active, capture=capture)


def name_of(function: Function) -> str:
    return getattr(function, "__qualname__", None) or type(function).__qualname__


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """CUDAGraphWrapper whose graphs break at functions under ``eager_break_during_capture``. A call
    that captures also computes its result.
    """

    _computes_while_capturing: ClassVar[bool] = True

    def __init__(
        self,
        runnable: Function,
        runtime_mode: CUDAGraphMode = CUDAGraphMode.PIECEWISE,
        *,
        backend: GraphBackend | None = None,
        pool: Any = None,
        options: CUDAGraphOptions = _DEFAULTS,
    ) -> None:
        super().__init__(runnable, runtime_mode, backend=backend, pool=pool, options=options)

    def _record(self, pool: Any, args: Args, kwargs: Kwargs) -> Recorded:
        given = list(args)
        slots = {}
        with BreakableCUDAGraphCapture(self.backend, pool) as capture:
            for i in self.options.copied_arguments:
                slots[i] = capture.new_slot(args[i])
                given[i] = slots[i]
            output = self.runnable(*given, **kwargs)
            capture.refuse_made(output)
        return capture.recorded(output, slots)


P = ParamSpec("P")
R = TypeVar("R")

_NO_FORWARD = nn.Module.forward
_decorated = False


def eager_break_during_capture(function: Callable[P, R]) -> Callable[P, R]:
    """Make a function or method an eager piece of the breakable capture that calls it;
    BreakableCUDAGraphCapture.add_eager says what it may return.

    In FULL captures, other eager pieces and traces it runs as it is.
    """
    global _decorated
    _decorated = True
    return as_eager_piece(function, name_of(function))


def any_breaks() -> bool:
    return _decorated


def as_eager_piece(
    function: Callable[P, R],
    name: str,
    *,
    is_traced: bool = False,
) -> Callable[P, R]:

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return function(*args, **kwargs)
        capture = recording_capture()
        if capture:
            with _operator_breaks_aside():
                return capture.add_named(  # type: ignore[no-any-return]
                    name,
                    function,
                    args,
                    kwargs,
                    is_traced=is_traced,
                )
        look = current_look()
        if look:
            return look.run_unrecorded(function, args, kwargs)  # type: ignore[no-any-return]
        return function(*args, **kwargs)

    return call


class Breaks(OperatorMode):
    """Modules and operators that are eager pieces; for operators see Note [Breaks at operators].

    Args:
        patterns: Dotted names of submodules; ``*``, ``?`` and ``[...]`` stand for parts of one
            component. The outermost match is the piece.
        names: ``namespace::name`` or ``namespace::name.overload``.

    Attributes:
        outer: The outermost modules with a forward.
        numbers: Operators that captures called with numbers, which replays repeat.

    Raises:
        ConfigError: ``model`` is no module, or a pattern matches none.
    """

    def __init__(
        self,
        model: Function,
        patterns: Sequence[str],
        names: Collection[str],
        device: str,
    ) -> None:
        super().__init__(device)
        self.modules = submodules_matching(model, patterns) if patterns else {}
        self.numbers: dict[str, None] = {}
        self._names = frozenset(names)
        called = [
            name
            for name, module in self.modules.items()
            if getattr(module.forward, "__func__", None) is not _NO_FORWARD
        ]
        heads = tuple(f"{name}." for name in called)
        self.outer = [name for name in called if not name.startswith(heads)]

    def forward(self, model: Function, *args: Any, **kwargs: Any) -> Any:
        is_recording = recording_capture() is not None
        if not is_recording and current_look() is None:
            return model(*args, **kwargs)
        with ExitStack() as stack:
            for name, module in self.modules.items():
                piece = as_eager_piece(module.forward, name)
                stack.enter_context(replaced(module, forward=piece))
            if self._names:
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
                if is_recording:
                    stack.enter_context(self)
            return model(*args, **kwargs)

    def see(self, func: Any, args: Args, kwargs: Kwargs) -> Any:
        capture = recording_capture()
        if capture is None or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        if self._names.isdisjoint(operator_of(func).names):
            return self.run(func, args, kwargs)
        name = func._schema.name
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) in (int, float, complex):
                self.numbers[name] = None
        run = as_its_caller(func, func, self.device)
        is_traced = torch.Tag.inplace_view not in func.tags
        return capture.add_named(name, run, args, kwargs, is_traced=is_traced)


@contextmanager
def _operator_breaks_aside() -> Iterator[None]:
    mode = _get_current_dispatch_mode()
    if not isinstance(mode, Breaks):
        yield
        return
    mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        mode.__enter__()  # type: ignore[no-untyped-call]


def submodules_matching(model: Function, patterns: Sequence[str]) -> dict[str, nn.Module]:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            "compilation.splitting_modules needs an nn.Module",
            remedy="Put eager_break_during_capture on functions.",
        )
    named = dict(model.named_modules(remove_duplicate=False))
    del named[""]
    matching = set()
    for pattern in patterns:
        wanted = pattern.split(".")
        found = []
        for name in named:
            parts = name.split(".")
            fits = all(map(fnmatch.fnmatchcase, parts, wanted))
            if fits and len(parts) == len(wanted):
                found.append(name)
        if not found:
            numbered = [re.sub(r"(?<=\.)\d+(?![^.])", "*", name) for name in named]
            layers = list(dict.fromkeys(numbered))  # as one
            hint = did_you_mean(pattern, [*layers, *named], "Did you mean {}?", 3)
            has = f"The model has {listed(layers, 10) or 'no submodules'}."
            raise ConfigError(
                f"splitting_modules: no submodule matches {pattern!r}; give paths, such as "
                "layers.*.mlp",
                remedy=hint or has,
            )
        matching.update(found)
    first: dict[int, str] = {}
    for name, module in named.items():
        if name in matching:
            first.setdefault(id(module), name)
    return {name: named[name] for name in first.values()}


_LEAF = tree_structure(None)
_EMPTY = tree_structure(())
Copies = list[tuple[Tensor, Tensor]]  # slot, value
Attribute = tuple[torch.nn.Module, str]
Make = Callable[[], Any]


@dataclass(eq=False)
class EagerPiece:
    """Slots and captured arguments are borrowed.

    Attributes:
        line: Where the model called it.
        is_traced: The function is operators of a trace.
        state: Torch's thread-local state, for ``run``.
    """

    name: str
    line: str
    function: Function
    backend: GraphBackend
    pool: Any
    is_traced: bool

    def __post_init__(self) -> None:
        self.state = AmbientState.now(self.backend.device.type)
        self._results: list[Place] = []
        self._bound: dict[Attribute, Tensor] = {}
        # slots, and the attributes' own values
        self._standing: list[tuple[Attribute, Tensor, Tensor]] = []

    def first_run(
        self,
        args: Args,
        kwargs: Kwargs,
    ) -> None:
        modules = modules_reached(self.function, args, kwargs)
        before = _attributes(modules)
        leaves = tree_leaves((args, kwargs))  # keeps their ids
        given = list(map(_identity, leaves))
        # replays write borrowed tensors before the piece reads them
        self._args = list(args)
        self._kwargs = dict(kwargs)
        self._makers: list[tuple[Any, Any, Make]] = []
        self._keep(self._args, range(len(args)))
        self._keep(self._kwargs, kwargs)
        with autocast_cache(on=True):
            result = self.function(*args, **kwargs)
        self._refuse_other_arguments(given, tree_leaves((args, kwargs)))
        after = _attributes(modules)
        in_state = _addresses(before) & _addresses(after)
        in_arguments = {address for _, address in given}

        def is_fresh(tensor: Tensor) -> bool:
            address = _address(tensor)
            if address == 0 or address not in in_arguments | in_state:
                return True
            return address not in in_arguments and self._is_captured(tensor)

        self._values, self._spec = tree_flatten(result)
        for value in self._values:
            self._refuse_unreachable(value)
            if not isinstance(value, Tensor):
                place = Place(value=value)
            elif is_fresh(value):
                place = Place(slot=value)
            else:
                place = Place(memory=_memory(value))
            self._results.append(place)
        self._find_shared()
        for attribute, value in after.items():
            if type(value) is not Tensor:
                continue
            if before.get(attribute) is value or not is_fresh(value):
                continue
            if self._is_dense(value) and not _repeated(value):
                self._bound[attribute] = value

    def _refuse_other_arguments(
        self,
        given: Iterable[Any],
        leaves: list[Any],
    ) -> None:
        """The piece may take values out of containers, but put no others in."""
        rest = iter(given)
        for leaf in leaves:
            if _identity(leaf) not in rest:
                raise CaptureError(
                    f"eager piece {self.name} puts values into a list or dict that it was given, "
                    "or gives a tensor other memory (set_, resize_, .data = ...), at "
                    f"{self.line}; graphs would keep those of the capture",
                    remedy="Return the values, or write them in place (copy_) into a tensor that "
                    "is an argument. Keep records in another object.",
                )

    def _refuse_unreachable(self, value: Any) -> None:
        found = ""
        if hides_tensors(value):
            found = f"a {type(value).__name__}, whose tensors cannot be reached"
        elif isinstance(value, Tensor) and not self._is_dense(value):
            found = described(value)
        if found:
            raise CaptureError(
                f"eager piece {self.name} returned {found}, at {self.line}",
                remedy=f"Return dense tensors on {self.backend.device}, in tuples, lists, dicts "
                "or registered pytree nodes.",
            )

    def _find_shared(self) -> None:
        sharing = {}
        for i, place in enumerate(self._results):
            slot = place.slot
            if slot is None or slot.is_conj() or slot.is_neg():
                continue
            if slot.numel():
                sharing[i] = _address(slot)
        counts = Counter(sharing.values())
        self._shared = []
        self._blocks = {}
        for i, address in sharing.items():
            value = self._values[i]
            if counts[address] > 1 or _repeated(value):
                self._shared.append(i)
                self._blocks[address] = bytes_of(value.untyped_storage())
        self._sharing = _sharing(self._values, self._shared)

    @torch.inference_mode(mode=False)  # its tensors cannot be written outside
    def hand_out(self) -> tuple[Any, Copies]:
        """The result, and copies to make before the next segment runs; inside its capture."""
        blocks = {address: self.backend.slot(memory) for address, memory in self._blocks.items()}
        handed = self._values
        copies = Copies()
        for i, place in enumerate(self._results):
            value = place.slot
            if value is None:
                continue
            if i in self._shared:
                block = blocks[_address(value)]
                count = block.numel() // value.itemsize
                whole = block[: count * value.itemsize].view(value.dtype)
                handed[i] = whole.as_strided(
                    value.shape,
                    value.stride(),
                    value.storage_offset(),
                )
            else:
                handed[i] = self.backend.slot(value)
            slot = self.backend.borrow(handed[i])
            self._results[i] = Place(slot)
            copies.append((slot, value.detach()))
        for attribute, value in self._bound.items():
            standing = self.backend.slot(value)
            setattr(*attribute, standing)
            self._standing.append((attribute, standing, value))
            slot = self.backend.borrow(standing)
            self._bound[attribute] = slot
            copies.append((slot, value.detach()))
        self._only = None  # for one leaf, or ()
        self._slot: Tensor | None = None
        self._is_alike = never
        if not self._bound and not self._shared and self._spec in (_LEAF, _EMPTY):
            self._only = self._results[0] if self._results else Place(value=())
        self._is_flat = self._spec == tree_structure(tuple(handed))
        del self._values, self._blocks
        return tree_unflatten(handed, self._spec), copies

    def end_capture(self) -> None:
        for attribute, slot, value in self._standing:
            if getattr(*attribute, None) is slot:
                setattr(*attribute, value)
        self._standing = []

    def run(self) -> None:
        """Raises CaptureError if the results have changed their form."""
        for where, key, make in self._makers:
            where[key] = make()
        result = self.function(*self._args, **self._kwargs)
        slot = self._slot
        if (
            slot is not None
            and type(result) is Tensor
            and not result.is_nested
            and self._is_alike(result)
        ):
            slot.copy_(result)
            return
        only = self._only
        if only is None or not only.fits(result):
            self._deliver(result)
        elif only.slot is not None:
            if result.requires_grad:
                result = result.detach()
            only.slot.copy_(result)
            self._slot = only.slot
            self._is_alike = alike_to([result])

    def _deliver(self, result: Any) -> None:
        if self._is_flat and type(result) is tuple and len(result) == len(self._results):
            values: Sequence[Any] = result
        else:
            values, spec = tree_flatten(result)
            if spec != self._spec:
                raise self._changed(f"the structure {spec}", f"{self._spec}")
        copies = []
        for place, value in zip(self._results, values, strict=True):
            if not place.fits(value):
                raise self._changed(
                    described(value),
                    f"{place}",
                )
            if place.slot is not None:
                copies.append((place.slot, value))
        if self._shared and _sharing(values, self._shared) != self._sharing:
            raise self._changed(
                "a tensor that does not share memory with other results as it did, or is expanded "
                "otherwise,",
                "in their memory",
            )
        for attribute, slot in self._bound.items():
            value = getattr(*attribute, None)
            if not isinstance(value, Tensor):
                continue
            if value.shape == slot.shape and value.dtype is slot.dtype:
                copies.append((slot, value))
        fill(copies, together=not self._shared)

    def _keep(
        self,
        where: Any,
        keys: Iterable[Any],
    ) -> None:
        for key in keys:
            make = self._maker(where[key])
            if make is None:
                continue
            where[key] = make()
            if not self.is_traced:
                self._makers.append((where, key, make))

    def _maker(self, node: Any) -> Make | None:
        """None if all runs get the same object."""
        if type(node) is Tensor and node.layout is torch.strided:
            kept = node
            if self._is_captured(node):
                kept = self.backend.borrow(node)
            return kept.detach().detach
        if not any(map(self._is_captured, tree_leaves(node))):
            return None
        if type(node) is dict:
            names = list(node)
            make_values = self._maker(list(node.values()))
            assert make_values
            return lambda: dict(zip(names, make_values(), strict=True))
        if type(node) in (tuple, list) or is_namedtuple_instance(node):
            build = getattr(node, "_make", type(node))
            makers = [self._maker(value) or _itself(value) for value in node]
            return lambda: build([make() for make in makers])
        return None

    def _is_captured(
        self,
        leaf: Any,
    ) -> bool:
        if not isinstance(leaf, Tensor):
            return False
        return self.backend.in_pool(leaf, self.pool)

    def _is_dense(self, value: Tensor) -> bool:
        is_here = value.device == self.backend.device
        return is_here and value.layout is torch.strided

    def _changed(
        self,
        found: str,
        wanted: str,
    ) -> CaptureError:
        return CaptureError(
            f"eager piece {self.name} returned {found} on replay; at capture it was {wanted}, at "
            f"{self.line}",
            remedy="Return the same structure, shapes, dtypes and numbers for every batch of a "
            "key: a changing number as a tensor, with padding for rows that vary, and clones of "
            "results that share memory only sometimes. runner.run_eagerly takes other batches.",
        )


class PieceMemory(OperatorMode):
    """Refuses what a piece made and did not return. It does not see into compiled code.

    Attributes:
        piece: The one that runs.
        made: Ids of storages that pieces made.
        side: The line where the segment began to use each side stream.
    """

    def __init__(
        self,
        device: str,
        stream: Callable[[], int],
    ) -> None:
        super().__init__(device)
        self.piece: str | None = None
        self.in_segment = False
        self.made: dict[int, tuple[str, StorageWeakRef]] = {}
        self.side: dict[int, Line] = {}
        self._read: dict[int, weakref.ref[Tensor]] = {}  # by segments
        self._own = WeakIdKeyDictionary()  # made by operators
        self._stream = stream
        self._main = stream()

    def see(
        self,
        func: Any,
        args: Args,
        kwargs: Kwargs,
    ) -> Any:
        tensors = tensors_in((args, kwargs))
        given = storages_of(tensors)
        tags = getattr(func, "tags", ())
        if self.in_segment:
            if torch.Tag.cudagraph_unsafe in tags:
                Refusals().refuse_unsafe(func._schema.name)
            stream = self._stream()
            if stream != self._main and stream not in self.side:
                self.side[stream] = blamed_line()
            if self.made:
                self.refuse_made(given)
            for tensor in tensors:
                if tensor not in self._own:
                    self._read[id(tensor)] = weakref.ref(tensor)
        result = self.run(func, args, kwargs)
        results = tensors_in(result)
        for tensor in results:
            self._own[tensor] = None
        # else it may be older memory
        if self.piece is not None and torch.Tag.inplace_view not in tags:
            for storage, reference in storages_of(results).items():
                if storage not in given:
                    self.made[storage] = self.piece, reference
        return result

    @contextmanager
    def in_piece(self, name: str) -> Iterator[None]:
        """CaptureError if the piece drops a tensor that segments read."""
        self.piece = name
        before = [reference for reference in self._read.values() if reference() is not None]
        yield
        self.piece = None
        for reference in before:
            if reference() is None:
                raise CaptureError(
                    f"eager piece {name} replaces a tensor that graph code reads before it, at "
                    f"{blamed_line()}; a graph would read that of the capture",
                    remedy="Write it in place (copy_), or read it in the eager piece.",
                )

    def refuse_made(self, storages: Iterable[int]) -> None:
        """CaptureError if a piece made one of these, by id."""
        for storage in storages:
            if storage in self.made:
                raise CaptureError(
                    "graph code reads a tensor that an eager piece made and did not return, at "
                    f"{blamed_line()}; a graph would read that of the capture. The piece is "
                    f"{self.made[storage][0]}",
                    remedy="Return the tensor from the eager piece, or write it in place (copy_) "
                    "into one that stays.",
                )


class Place(NamedTuple):
    """Where a result lies on each replay.

    Attributes:
        slot: Of a fresh tensor; its value until it has a slot.
        memory: Of a tensor in an argument's or a module's memory.
    """

    slot: Tensor | None = None
    memory: tuple[Any, ...] = ()
    value: Any = None

    def fits(self, found: Any) -> bool:
        slot = self.slot
        if slot is not None:
            if not isinstance(found, Tensor) or found.shape != slot.shape:
                return False
            return found.dtype is slot.dtype and found.device == slot.device
        if self.memory:
            return isinstance(found, Tensor) and _memory(found) == self.memory
        value = self.value
        if value is found:
            return True
        return type(value) is type(found) and bool(value == found)

    def __str__(self) -> str:
        if self.memory:
            address, shape, *_ = self.memory
            return (
                f"its own argument's memory, or a module's, at {address:#x}, of shape {list(shape)}"
            )
        if self.slot is not None:
            return described(self.slot)
        return described(self.value)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def fill(
    copies: Copies,
    *,
    together: bool,
) -> None:
    """``together``: in one call, if no slots share memory."""
    if together and len(copies) > 1:
        slots, values = zip(*copies, strict=True)
        torch._foreach_copy_(slots, [value.detach() for value in values])
        return
    for slot, value in copies:
        if value.requires_grad:
            value = value.detach()
        if not together:
            slot = _once(slot)
            value = _once(value)
        slot.copy_(value)


def _once(tensor: Tensor) -> Tensor:
    for dim in _repeated(tensor):
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _repeated(tensor: Tensor) -> list[int]:
    """The expanded dimensions, which cannot be copied into."""
    return [
        dim for dim, stride in enumerate(tensor.stride()) if stride == 0 and tensor.shape[dim] > 1
    ]


def _itself(value: Any) -> Make:
    return lambda: value


def described(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = f"{value.dtype}, {value.layout}"
        return f"a tensor of shape {list(value.shape)}, {kind}, on {value.device}"
    return f"{value!r:.200}"


def _attributes(modules: Sequence[torch.nn.Module]) -> dict[Attribute, Any]:
    found = {}
    for module in modules:
        held = vars(module) | module._buffers | module._parameters
        for name, value in held.items():
            found[module, name] = value
    return found


def _identity(leaf: Any) -> tuple[int, int]:
    return id(leaf), _address(leaf)


def _addresses(attributes: dict[Attribute, Any]) -> set[int]:
    return {
        _address(value)
        for value in attributes.values()
        if type(value) in (Tensor, torch.nn.Parameter)
    }


def _address(value: Any) -> int:
    """Of the storage; 0 without memory."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return 0
    return value.untyped_storage().data_ptr()


def _sharing(
    values: Sequence[Any],
    which: Sequence[int],
) -> list[tuple[Any, ...]]:
    """By value: the first one in the same memory, the distance from it in bytes, and strides."""
    firsts: dict[int, tuple[int, int]] = {}
    found = []
    for i in which:
        value = values[i]
        begin = value.storage_offset() * value.itemsize
        first, begin_of_first = firsts.setdefault(_address(value), (i, begin))
        strides = [stride for dim, stride in enumerate(value.stride()) if value.shape[dim] > 1]
        found.append((first, begin - begin_of_first, strides))
    return found
