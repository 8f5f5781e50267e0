"""The backend protocol: the operations of a device by which cgplan captures and replays graphs.

Note [Lifetimes]
    A pool is released when the last graph captured into it is reset. Tensors made during a capture
    live in the pool. While such a tensor is held its block is taken; once it is dropped the block
    is free for the next capture into the same pool, and a replay of either graph overwrites it.
    `borrow` gives a tensor on that memory that does not hold the block. Static buffers are
    allocated outside the pool and belong to the runner.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, ClassVar, Literal

import torch

from cgplan.backends.context import refuse_forbidden_capture
from cgplan.backends.graph_nodes import Block, GraphNodes, MemoryKind
from cgplan.buffers.copier import Copier
from cgplan.buffers.static import StaticBuffers
from cgplan.errors import BackendError, CaptureError, CgplanError

Pool = Any
Graph = Any
Feature = Literal["driver_bytes"]


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a device, in bytes.

    Attributes:
        free: Not taken by any process; None where the system does not say.
        total: Installed.
        reserved: Held by the allocator of this process (on the tape: by its pools).
    """

    free: int | None
    total: int
    reserved: int


class Trace:
    """A record of captures and calls on the host, in Chrome's trace event format, which Perfetto
    opens. Events are in microseconds and in the order in which they ended. ``current`` is the trace
    that is on in this process.
    """

    current: ClassVar[Trace | None] = None

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._zero = perf_counter_ns()
        self._threads: dict[int, str] = {}

    def add(
        self,
        name: str,
        began: int,
        args: dict[str, Any],
        ended: int | None = None,
    ) -> None:
        """Add an event from ``began`` until ``ended``, or now, by ``time.perf_counter_ns()``."""
        ended = ended or perf_counter_ns()
        thread = threading.get_native_id()
        self._threads[thread] = threading.current_thread().name
        event = {
            "name": name,
            "cat": "cgplan",
            "ph": "X",
            "ts": (began - self._zero) / 1e3,
            "dur": (ended - began) / 1e3,
            "pid": os.getpid(),
            "tid": thread,
            "args": args,
        }
        self.events.append(event)

    @contextmanager
    def on(self) -> Iterator[Trace]:
        """Trace a block, with the compilations of torch.compile in it. Raises CgplanError inside
        another such block.
        """
        from torch._dynamo.callback import CallbackArgs, callback_handler

        if Trace.current is not None:
            raise CgplanError("a trace is on already", remedy="End it first.")
        begun: list[int] = []

        def begins(_: CallbackArgs) -> None:
            begun.append(perf_counter_ns())

        def ends(compiled: CallbackArgs) -> None:
            if begun:  # a compilation that was under way before has no beginning here
                self.add("compile", begun.pop(), {"id": compiled.compile_id})

        callback_handler.register_start_callback(begins)
        callback_handler.register_end_callback(ends)
        Trace.current = self
        try:
            yield self
        finally:
            Trace.current = None
            callback_handler.remove_start_callback(begins)
            callback_handler.remove_end_callback(ends)

    def to_json(self) -> str:
        """The trace as the text of a file."""
        names = [("process_name", 0, "cgplan")]
        names += [("thread_name", *item) for item in self._threads.items()]
        named = [
            {"name": kind, "ph": "M", "pid": os.getpid(), "tid": thread, "args": {"name": name}}
            for kind, thread, name in names
        ]
        # readers want an event before those inside it
        outer_first = sorted(self.events, key=lambda event: (event["ts"], -event["dur"]))
        return json.dumps({"traceEvents": [*named, *outer_first]}) + "\n"


@contextmanager
def span(name: str, **args: Any) -> Iterator[dict[str, Any]]:
    """A block that is an event of the current trace, with these arguments and those that the block
    adds to them.
    """
    trace = Trace.current
    began = perf_counter_ns()
    try:
        yield args
    finally:
        if trace is not None:
            trace.add(name, began, args)


class GraphBackend(ABC):
    """Captures the launches of a function on a device, and replays them. Reports show ``name``
    beside every figure.
    """

    name: str
    device: torch.device

    @abstractmethod
    def new_pool(self) -> Pool:
        """A private memory pool for captured tensors, empty until the first capture."""

    @abstractmethod
    def pool_bytes(self, *pools: Pool) -> int:
        """Bytes that these pools have reserved together, whether their blocks are taken or free."""

    @abstractmethod
    def new_graph(self, pool: Pool) -> Graph:
        """An empty graph that will capture into ``pool``. Raises BackendError for a pool of another
        backend.
        """

    def register_generator(self, generator: torch.Generator) -> None:  # noqa: B027
        """Let later captures draw from this generator, which the backend holds; the default one
        needs no call.
        """

    @abstractmethod
    def begin(self, graph: Graph) -> None:
        """Start capturing in this thread; inside ``session``."""

    @abstractmethod
    def end(self, graph: Graph) -> None:
        """Stop capturing and make the graph ready to replay. Raises CaptureError if the capture is
        not valid.
        """

    @abstractmethod
    def abort(self, graph: Graph) -> None:
        """Stop a capture that failed and free what it took; the device works as before."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether launches of this thread now go into a graph."""

    def replay(self, graph: Graph) -> None:
        """Run the graph on the memory of its capture; on CUDA queued on the current stream."""
        self.launcher(graph)()

    @abstractmethod
    def launcher(self, graph: Graph) -> Callable[[], None]:
        """``replay`` of one captured graph as a function."""

    def copier(self, buffers: StaticBuffers, *, copy_inputs: bool) -> Copier:
        """The copier of batches into static buffers. The caller owns both, and closes it first."""
        return Copier(buffers, copy_inputs=copy_inputs)

    def stream_getter(self) -> Callable[[], int]:
        """A function that returns the handle of the current stream; 0 without streams."""
        return int

    def fetch(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Queue a copy of a device tensor to the host; the function waits for it and returns it."""
        copy = tensor.clone()
        return lambda: copy

    def send(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """Whole numbers, or equally long lists of them, int64 on the device, without waiting."""
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def is_busy(self, stream: int) -> bool:  # noqa: ARG002
        """Whether the device has not yet done all that was queued on a stream."""
        return False

    def annotate(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002
        """A block that profilers of the device show under a name."""
        return nullcontext()

    @abstractmethod
    def reset(self, graph: Graph) -> None:
        """Free the graph. The last reset of a pool makes the pool's memory free."""

    @abstractmethod
    def num_nodes(self, graph: Graph) -> int | None:
        """Kernel nodes of the graph (tape: operators); None where they cannot be counted."""

    @abstractmethod
    def open_graph(self) -> tuple[Graph, int] | None:
        """The graph that this thread's operator is captured into, and how many nodes it has yet."""

    @abstractmethod
    def nodes(self, graph: Graph) -> GraphNodes:
        """The nodes of a captured graph. Raises BackendError where they cannot be read."""

    @abstractmethod
    def blocks(self) -> list[Block]:
        """The memory of the device that is reserved for tensors, with the graph pools of all
        backends; no two overlap.
        """

    @abstractmethod
    def memory_at(self, address: int) -> MemoryKind | None:
        """The kind of memory at an address outside of ``blocks``; None for no memory."""

    def notes(self, graph: Graph) -> tuple[str, ...]:  # noqa: ARG002
        """What the backend does not know of a captured graph, for the report."""
        return ()

    @abstractmethod
    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the same memory that does not hold its block, see Note [Lifetimes]; one
        outside of pools itself.
        """

    def watch(self, tensor: torch.Tensor) -> Callable[[], bool]:  # noqa: ARG002
        """A function that says whether this borrowed tensor, or a view of it, is still held, and
        would outlive the pool's memory. False where tensors keep their memory.
        """
        return lambda: False

    @abstractmethod
    def in_pool(self, tensor: torch.Tensor, pool: Pool) -> bool:
        """Whether the tensor lies in the pool and holds its block; not asked during a capture."""

    @abstractmethod
    def is_empty(self, graph: Graph) -> bool:
        """Whether a captured graph has nothing to run; False where that cannot be told."""

    def slot(self, value: torch.Tensor) -> torch.Tensor:
        """Inside a capture: memory of its pool laid out like ``value``, which work ahead of the
        graph writes into. A tape computes while it records, so there it holds the value at once.
        """
        return torch.empty_like(value)

    @abstractmethod
    def memory(self) -> MemoryReading:
        """Memory of the device now."""

    @abstractmethod
    def session(self) -> AbstractContextManager[None]:
        """A block in which warm-ups and captures run, without garbage collections; on CUDA on the
        capture stream. A session inside a session is part of it. Raises CaptureError as
        ``gc_paused``, and, on CUDA, inside a capture of another backend.
        """

    @abstractmethod
    def supports(self, feature: Feature) -> bool:
        """``driver_bytes``: whether the driver takes device memory for graphs."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was queued."""

    @abstractmethod
    def release_cached(self) -> None:
        """Give memory that the allocator holds but does not use back to the device."""

    @abstractmethod
    def time_calls(
        self, call: Callable[[], object], repeats: int, *, queued: bool = False
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Device and host microseconds of each of ``repeats`` calls.

        Device time ends when the device has finished the call. It begins when the idle device is
        handed the call, or, ``queued``, when the device has finished the call before. Host time
        ends when the call returns.
        """

    @contextmanager
    def capturing(self, graph: Graph) -> Iterator[None]:
        """``begin`` and ``end`` around a block, ``abort`` if it raises. Raises SealedError where
        ``capture_allowed`` forbids captures.

        Autocast's cache of cast weights is off inside: a weight cast before would be read after it
        was freed, and one cast inside would lie in the pool, where the next graph overwrites it.
        """
        refuse_forbidden_capture("a graph")
        torch.clear_autocast_cache()
        try:
            with autocast_cache(on=False), span("capture"):
                self.begin(graph)
                try:
                    yield
                except BaseException:
                    self.abort(graph)
                    raise
                self.end(graph)
        finally:
            # a forward may have turned it on: casts that it made lie in the pool
            torch.clear_autocast_cache()


@contextmanager
def autocast_cache(*, on: bool) -> Iterator[None]:
    """A block with autocast's cache of cast weights on or off, where autocast is on. Dynamo
    compiles code once for each state of the cache: graph code is warmed up with it off, and code
    between graphs is captured with it on. Without autocast the state stays, so that code compiled
    earlier is used.
    """
    before = torch.is_autocast_cache_enabled()
    uses_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    torch.set_autocast_cache_enabled(on if uses_autocast else before)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


SESSION_SECONDS = 1800.0  # to wait for another thread's session, as torch's process groups do
_lock = threading.RLock()
_depth = 0


@contextmanager
def gc_paused() -> Iterator[None]:
    """A block of captures without garbage collections: one might free a CUDA tensor in the middle
    of a capture. Young garbage is collected before; to collect all takes a third of a second in a
    process that has compiled. Blocks may be nested; those of other threads wait. Raises
    CaptureError where another thread's block does not end within SESSION_SECONDS.
    """
    global _depth
    if not _lock.acquire(timeout=SESSION_SECONDS):
        raise CaptureError(
            f"another thread has been capturing for more than {SESSION_SECONDS:g} s",
            remedy="Captures of a process take turns. Let no eager piece or warm-up wait for a "
            "thread that captures.",
        )
    was_enabled = gc.isenabled()
    _depth += 1
    try:
        if _depth == 1:
            gc.collect(1)
        gc.disable()
        yield
    finally:
        _depth -= 1
        if was_enabled:
            gc.enable()
        _lock.release()


def tensor_on(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A new tensor on ``storage`` with the layout of ``like``."""
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(storage, like.storage_offset(), like.size(), like.stride())
    if like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if like.is_neg() else tensor


def foreign_pool(pool: Any, backend: GraphBackend) -> BackendError:
    return BackendError(
        f"{pool!r:.100} is not a pool of this {backend.name} backend",
        remedy="Make pools with backend.new_pool(), of the same backend object that captures.",
    )
