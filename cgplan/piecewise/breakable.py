"""Breakable capture: graph segments with eager pieces between them."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, ClassVar

import torch

from cgplan.backends import GraphBackend, select_backend
from cgplan.backends.backend import Trace, span
from cgplan.backends.blame import blamed_line
from cgplan.backends.context import AmbientState, deriving
from cgplan.backends.host_sync import Args, Function, Kwargs, storages_of, tensors_in
from cgplan.backends.replacing import replaced
from cgplan.errors import CaptureError, CaptureMemoryError, HostSyncError, first_line
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
        if _active.capture is not None or self._backend.is_capturing():
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
                if self._open is not None:
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
        line = blamed_line()
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
        assert self._open is not None
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
    return capture if capture is not None and capture.is_recording else None


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
