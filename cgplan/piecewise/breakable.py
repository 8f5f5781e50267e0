"""Breakable capture: one forward as several graph segments with eager pieces between them, and a
wrapper around it.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import TracebackType
from typing import Any, ClassVar

import torch

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import Trace, span
from cgplan.backends.blame import blamed_line
from cgplan.backends.context import current_forward_context
from cgplan.backends.host_sync import Args, Function, Kwargs, storages_of, tensors_in
from cgplan.backends.replacing import replaced
from cgplan.errors import CaptureError, CaptureMemoryError, HostSyncError, first_line
from cgplan.graphs.ambient import AmbientState
from cgplan.graphs.pools import GraphPool
from cgplan.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper, Recorded
from cgplan.modes import CUDAGraphMode
from cgplan.piecewise.eager_piece import Copies, EagerPiece, PieceMemory, fill

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
        capture.replay()                     # y holds the result for what is in x now

    The block behaves as a real forward, once: each segment is replayed as soon as it is captured,
    so that the next eager piece and the block's results are computed from real values. The block's
    results lie in the pool, and each replay overwrites them. Eager pieces run on the same stream,
    in the forward context of the replaying call. A piece may write into the memory of its
    arguments. The capture owns its graphs, not the pool.

    Args:
        backend: The device, inside whose ``session`` the block is entered; that of the pool if
            absent.
        pool: Graph pool that the segments and the output slots of eager pieces share; a new one if
            absent.

    Raises:
        CaptureError: on entering inside another capture; on leaving if a segment is not valid.
            After any error the segments are freed, and a new capture may begin.
    """

    def __init__(self, backend: GraphBackend | None = None, pool: Any = None) -> None:
        if backend is None:
            backend = select_backend() if pool is None else pool.backend
        if pool is None:
            pool = backend.new_pool()
        self._backend = backend
        self._pool = pool.handle if isinstance(pool, GraphPool) else pool
        self._items: list[Any] = []
        # Graphs without work. They keep the pool alive while no other graph does; and from torch
        # 2.12 on, to free one would release library workspaces that the others use.
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
        """The backend's graphs and the eager pieces in the order in which they run, without graphs
        that do nothing.
        """
        return tuple(self._items)

    @property
    def graphs(self) -> tuple[Any, ...]:
        """The backend's graphs, one for each segment."""
        return tuple(item for item in self._items if not isinstance(item, EagerPiece))

    @property
    def eager_pieces(self) -> tuple[EagerPiece, ...]:
        """The functions between the segments."""
        return tuple(item for item in self._items if isinstance(item, EagerPiece))

    @property
    def num_graphs(self) -> int:
        """Segments."""
        return len(self.graphs)

    @property
    def num_eager_breaks(self) -> int:
        """Eager pieces."""
        return len(self.eager_pieces)

    @property
    def is_recording(self) -> bool:
        """Whether a segment is being captured: not inside an eager piece, nor before, after or once
        it has failed.
        """
        return self._open is not None

    def __enter__(self) -> BreakableCUDAGraphCapture:
        if _active.capture is not None or self._backend.is_capturing():
            raise CaptureError(
                f"a breakable capture inside another one, at {blamed_line()}",
                remedy="Capture the outer forward alone: it breaks wherever the inner one would.",
            )
        if self._items or self._steps is not None:
            raise CaptureError(
                "this breakable capture was used before", remedy="Make a new one for each capture."
            )
        _active.capture = self
        self._state = AmbientState.now(self._backend.device.type)
        device = self._backend.device.type
        self._memory = PieceMemory(device, self._backend.stream_getter())
        self._modes.enter_context(self._memory)
        self._modes.callback(self._memory.made.clear)
        try:
            # `with ... as capture` drops what the name held once the block has begun, and a CUDA
            # graph that is destroyed while another one is captured makes that capture invalid.
            self._others = list(_living)
            self._begin_segment()
        except BaseException:
            self._discard()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            if kind is not None:
                if self._open is not None:
                    with _quiet_about_empty_graphs():
                        self._open[1].__exit__(kind, error, traceback)
                self._discard()
                return
            if self._open is None:
                raise CaptureError(
                    f"eager piece {self._last_piece} failed while it was captured, and the model "
                    "went on",
                    remedy="Let the error pass, or catch it inside the eager piece.",
                )
            self._end_segment("the end")
            self._steps = list(map(self._step, self._items))
            self._close()
            self._modes.close()
        except BaseException:
            self._discard()
            raise

    def _step(self, item: Any) -> Callable[[], object]:
        if not isinstance(item, EagerPiece):
            return self._backend.launcher(item)
        if item.state == self._state:  # replay sets it once, around all steps
            return item.run
        state = item.state.entered(self._backend.device.type)
        return state(item.run)

    def add_eager(self, function: Function, /, *args: Any, **kwargs: Any) -> Any:
        """End the segment, run ``function`` eagerly, and begin the next segment.

        Returns:
            What the function returned, with tensors replaced by their slots in the graph pool;
            None, and tensors that are memory of an argument, as they are. Results that are not
            tensors must be the same on each replay.

        Raises:
            CaptureError: outside of the block or inside another eager piece; if the segment is not
                valid; if a result is not a dense tensor on the device of the capture. What the
                function raises passes.
        """
        return self.add_named(name_of(function), function, args, kwargs)

    def recorded(self, output: Any, slots: dict[int, torch.Tensor]) -> Recorded:
        """Of a block that was left, with this output and slots of arguments."""
        return Recorded(
            self, output, slots, self.replay, self.reset, self.graphs, self.num_eager_breaks
        )

    def new_slot(self, value: torch.Tensor) -> torch.Tensor:
        """Inside the block: memory of the pool that holds ``value`` now, to be written to ahead of
        each replay.
        """
        assert self.is_recording
        with torch.inference_mode(False):  # else it could be written to only there
            slot = self._backend.slot(value)
            borrowed = self._backend.borrow(slot)
            self._copies.append((borrowed, value.detach()))
        return slot

    def refuse_made(self, tree: Any) -> None:
        """Inside the block: raise CaptureError for a tensor that an eager piece made and did not
        return.
        """
        self._memory.refuse_made(storages_of(tensors_in(tree)))

    def replay(self) -> None:
        """Run segments and eager pieces on what is in their memory now.

        Eager pieces see the caller's forward context, with nothing derived in it yet.

        Raises:
            CaptureError: if nothing was captured, or an eager piece returns something else than it
                did at capture.
        """
        if self._steps is None:
            raise CaptureError(
                "nothing was captured, or it was reset", remedy="Capture before replaying."
            )
        device = self._backend.device.type
        as_captured = AmbientState.now(device) == self._state
        with _deriving({}), nullcontext() if as_captured else self._state.entered(device):
            if Trace.current is None:
                for step in self._steps:
                    step()
                return
            for item, step in zip(self._items, self._steps, strict=True):
                name = item.name if isinstance(item, EagerPiece) else "segment"
                with span(name):
                    step()

    def reset(self) -> None:
        """Free the graphs. The block's results are no longer valid."""
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
        """As ``add_eager``, under a name for messages; ``is_traced``: the function is operators of
        a trace.
        """
        line = blamed_line()
        if not self.is_recording:
            raise CaptureError(
                f"eager piece {name} outside of a segment, at {line}",
                remedy="Call add_eager inside the capture's block, and not from an eager piece.",
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
        # pieces and segments do not see what the others derived, as in a replay
        with self._memory.in_piece(name), _deriving(self._derived):
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

    def _end_segment(self, before: str) -> None:
        """Make a segment of the operators so far, fill the slots that it reads, and run it."""
        assert self._open is not None
        (graph, capturing), self._open = self._open, None
        self._memory.in_segment = False
        try:
            with _quiet_about_empty_graphs():
                capturing.__exit__(None, None, None)
        except (HostSyncError, CaptureMemoryError):  # they say what is wrong
            raise
        except (CaptureError, torch.AcceleratorError) as error:
            streams = []
            for handle, line in self._memory.side.items():
                streams.append(f"side stream {handle:#x} since {line}")
            used = f"; the segment runs on {', '.join(streams)}" if streams else ""
            raise CaptureError(
                f"the segment before {before} is not valid: {first_line(error)}{used}",
                remedy="Let nothing in it wait for the device. Before each eager piece, and at "
                "the end, let the main stream wait for every side stream: "
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
        """End the turn of this capture, and give attributes of modules back what eager pieces bound
        them to.
        """
        for piece in self.eager_pieces:
            piece.end_capture()
        _active.capture = None
        self._open = None
        self._derived = {}
        self._others = []

    def _discard(self) -> None:
        self._close()
        self.reset()
        self._modes.close()


def recording_capture() -> BreakableCUDAGraphCapture | None:
    """The capture that records a segment in this thread."""
    capture = _active.capture
    return capture if capture is not None and capture.is_recording else None


def in_breakable_capture() -> bool:
    """Whether a breakable capture is open in this thread: in its segments and in its eager pieces,
    not on replay.
    """
    return _active.capture is not None


def standing_in(capture: Any) -> AbstractContextManager[object]:
    """A block whose eager pieces go to ``capture.add_named`` while it ``is_recording``, as in a
    breakable capture.
    """
    return replaced(_active, capture=capture)


@contextmanager
def _deriving(derived: dict[str, Any]) -> Iterator[None]:
    """A block in which the forward context, if there is one, has these derived values."""
    context = current_forward_context()
    if context is None:
        yield
        return
    before = context.derived
    context.derived = derived
    try:
        yield
    finally:
        context.derived = before


@contextmanager
def _quiet_about_empty_graphs() -> Iterator[None]:
    """torch warns of a graph without work; here such graphs are dropped."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        yield


def name_of(function: Function) -> str:
    """The name of a function in messages."""
    return getattr(function, "__qualname__", None) or type(function).__qualname__


class BreakableCUDAGraphWrapper(CUDAGraphWrapper):
    """CUDAGraphWrapper whose graphs break at eager pieces: see there for when it captures and when
    it replays.

    Entries hold a BreakableCUDAGraphCapture each. A call that captures also computes its result.

    Args:
        runnable: The forward. Its eager pieces are functions under ``eager_break_during_capture``.
        runtime_mode: PIECEWISE or FULL.
        backend, pool, options: As for CUDAGraphWrapper.
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
        super().__init__(
            runnable,
            runtime_mode,
            backend=backend,
            pool=pool,
            options=options,
        )

    def _record(self, pool: Any, args: Args, kwargs: Kwargs) -> Recorded:
        copied = self._copied_arguments(args, pool)
        given = list(args)
        slots = {}
        with BreakableCUDAGraphCapture(self.backend, pool) as capture:
            for i in copied:
                given[i] = slots[i] = capture.new_slot(args[i])
            output = self.runnable(*given, **kwargs)
            capture.refuse_made(output)
        return capture.recorded(output, slots)
