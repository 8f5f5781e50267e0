"""How cgplan captures and replays graphs on a device.

Note [Lifetimes]
    Resetting its last graph releases a pool. A tensor made in a capture holds a block of the pool;
    once it is dropped, later captures may use the block, and a replay of either graph overwrites
    it. A borrowed tensor holds no block.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from typing import Any, ClassVar, NamedTuple

import torch

from cgplan.backends.context import refuse_forbidden_capture
from cgplan.backends.graph_nodes import Block, GraphNodes, Launch, MemoryKind
from cgplan.buffers.static import Copier, StaticBuffers
from cgplan.errors import BackendError, CaptureError, CgplanError
from cgplan.reports.records import Environment
from cgplan.version import __version__

Pool = Any
Graph = Any


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Memory of a device, in bytes. ``reserved``: by this process's allocator, or the tape;
    ``held``: of that by tensors, where it is known.
    """

    free: int | None
    total: int
    reserved: int
    held: int = 0


class PoolMemory(NamedTuple):
    """Reserved bytes, and those of blocks that tensors hold."""

    nbytes: int
    held: int


class Trace:
    """Chrome trace events of captures and calls. ``current`` is the process's trace."""

    current: ClassVar[Trace | None] = None

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._zero = perf_counter_ns()
        self._threads: dict[int, str] = {}

    def add(self, name: str, began: int, args: dict[str, Any], ended: int | None = None) -> None:
        """Times are those of ``time.perf_counter_ns()``."""
        ended = ended or perf_counter_ns()
        thread = threading.get_native_id()
        self._threads[thread] = threading.current_thread().name
        self.events.append(
            {
                "name": name,
                "cat": "cgplan",
                "ph": "X",
                "ts": (began - self._zero) / 1e3,
                "dur": (ended - began) / 1e3,
                "pid": os.getpid(),
                "tid": thread,
                "args": args,
            }
        )

    @contextmanager
    def on(self) -> Iterator[Trace]:
        """Trace a block. Raises CgplanError inside another one."""
        from torch._dynamo.callback import CallbackArgs, callback_handler

        if Trace.current:
            raise CgplanError("a trace is on already", remedy="End it first.")
        begun = []

        def begins(_: CallbackArgs) -> None:
            begun.append(perf_counter_ns())

        def ends(compiled: CallbackArgs) -> None:
            if begun:  # one that began earlier
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
        """For Perfetto."""
        names = [("process_name", 0, "cgplan")]
        names += [("thread_name", *item) for item in self._threads.items()]
        named = [
            {"name": kind, "ph": "M", "pid": os.getpid(), "tid": thread, "args": {"name": name}}
            for kind, thread, name in names
        ]
        outer_first = sorted(self.events, key=lambda event: (event["ts"], -event["dur"]))
        return json.dumps({"traceEvents": named + outer_first}) + "\n"


@contextmanager
def span(name: str, **args: Any) -> Iterator[dict[str, Any]]:
    """A block that is an event of the current trace."""
    trace = Trace.current
    began = perf_counter_ns()
    try:
        yield args
    finally:
        if trace:
            trace.add(name, began, args)


class GraphBackend(ABC):
    name: str
    device: torch.device
    is_tape: bool = False
    counts_driver_bytes: bool = False  # in ``memory().free``

    def environment(self, config_hash: str = "") -> Environment:
        device, driver, cuda = self.hardware()
        return Environment(
            backend=self.name,
            machine=f"{platform.system()} {platform.machine()}",
            device=device,
            driver=driver,
            cuda=cuda,
            torch=torch.__version__,
            python=platform.python_version(),
            cgplan=__version__,
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            config_hash=config_hash,
            threads=torch.get_num_threads(),
        )

    def hardware(self) -> tuple[str, str | None, str | None]:
        """Device, driver, CUDA."""
        for line in text_of("/proc/cpuinfo").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip(), None, None
        return platform.processor() or platform.machine(), None, None

    @abstractmethod
    def new_pool(self) -> Pool: ...

    @abstractmethod
    def pool_memory(self, *pools: Pool) -> PoolMemory: ...

    def pool_bytes(self, *pools: Pool) -> int:
        return self.pool_memory(*pools).nbytes

    def is_held(self, pool: Pool) -> bool:
        """By tensors, after a capture into it that did not fail."""
        return self.pool_memory(pool).held > 0

    @abstractmethod
    def new_graph(self, pool: Pool) -> Graph:
        """Raises BackendError for another backend's pool."""

    def register_generator(self, generator: torch.Generator) -> None:  # noqa: B027
        """Let later captures draw from it."""

    @abstractmethod
    def begin(self, graph: Graph) -> None:
        """Inside ``session``."""

    @abstractmethod
    def end(self, graph: Graph) -> None:
        """Raises CaptureError for an invalid capture."""

    @abstractmethod
    def abort(self, graph: Graph) -> None: ...

    @abstractmethod
    def is_capturing(self) -> bool: ...

    def replay(self, graph: Graph) -> None:
        """CUDA queues it on the current stream."""
        self.replay_of(graph)()

    @abstractmethod
    def replay_of(self, graph: Graph) -> Callable[[], None]: ...

    def copier(self, buffers: StaticBuffers, *, copy_inputs: bool) -> Copier:
        return Copier(buffers, copy_inputs=copy_inputs)

    def stream_getter(self) -> Callable[[], int]:
        """For the current stream's handle; 0 without streams."""
        return int

    def is_busy(self, stream: int) -> bool:  # noqa: ARG002
        return False

    def annotate(self, name: str) -> AbstractContextManager[object]:  # noqa: ARG002
        return nullcontext()

    @abstractmethod
    def reset(self, graph: Graph) -> None: ...

    @abstractmethod
    def num_nodes(self, graph: Graph) -> int:
        """Kernels, or operators on the tape."""

    def notes(self, graph: Graph) -> tuple[str, ...]:  # noqa: ARG002
        return ()

    @abstractmethod
    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without a hold, see Note [Lifetimes]."""

    def watch(self, tensor: torch.Tensor) -> Callable[[], bool]:  # noqa: ARG002
        """Whether this borrowed tensor, or a view of it, would outlive the pool."""
        return lambda: False

    @abstractmethod
    def in_pool(self, tensor: torch.Tensor, pool: Pool) -> bool:
        """Not inside a capture."""

    @abstractmethod
    def is_empty(self, graph: Graph) -> bool: ...

    def slot(self, value: torch.Tensor) -> torch.Tensor:
        """Inside a capture: memory of its pool like ``value``. On the tape it holds the value."""
        return torch.empty_like(value)

    @abstractmethod
    def memory(self) -> MemoryReading: ...

    @abstractmethod
    def session(self) -> AbstractContextManager[None]:
        """A block of warm-ups and captures, on CUDA on the capture stream; nestable. Raises
        CaptureError as ``gc_paused``, and inside a foreign capture.
        """

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def release_cached(self) -> None: ...

    @contextmanager
    def capturing(self, graph: Graph) -> Iterator[None]:
        """``begin`` and ``end``, or ``abort``. Raises SealedError where ``capture_allowed`` forbids
        it. Autocast caches nothing: earlier casts would be freed, new ones lie in the pool.
        """
        refuse_forbidden_capture()
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
            torch.clear_autocast_cache()

    # --- for bench and audits ---------------------------------------------------------------------

    def time_calls(
        self,
        call: Callable[[], object],
        repeats: int,
        *,
        queued: bool = False,  # noqa: ARG002
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Device and host microseconds of each call. Device time begins when the idle device gets
        the call or, ``queued``, when it ends the call before.
        """
        times = []
        for _ in range(repeats):
            start = perf_counter_ns()
            call()
            times.append((perf_counter_ns() - start) / 1e3)
        return times, times

    def logging_operators(self) -> AbstractContextManager[object]:
        """Captures inside note operators in their graphs' ``launches``."""
        return nullcontext()

    def nodes(self, graph: Graph) -> GraphNodes:  # noqa: ARG002
        raise BackendError(f"the graphs of {self.name} cannot be read", remedy="Set audit: off.")

    def blocks(self) -> list[Block]:
        """Memory reserved for tensors of all backends."""
        return []

    def memory_at(self, address: int) -> MemoryKind | None:  # noqa: ARG002
        """At an address outside of ``blocks``; None for no memory."""
        return "host"


@contextmanager
def autocast_cache(*, on: bool) -> Iterator[None]:
    """Turn autocast's cache of weights on or off. Dynamo compiles for each state: graph code has it
    off, code between graphs on.
    """
    before = torch.is_autocast_cache_enabled()
    uses_autocast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    torch.set_autocast_cache_enabled(on if uses_autocast else before)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def number_of(generator: torch.Generator) -> int:
    """One number for all Python objects of a generator."""
    number: int = generator._cdata  # type: ignore[attr-defined]
    return number


watches: weakref.WeakSet[Any] = weakref.WeakSet()  # told of each capture, by whatever code
captured: weakref.WeakSet[Any] = weakref.WeakSet()  # by torch: while a watch is open


def note_capture(graph: Any, pool: Any, launches: list[Launch]) -> None:
    captured.add(graph)
    for watch in list(watches):
        watch.note(graph, pool, launches)


def forget_capture(graph: Any) -> None:
    captured.discard(graph)
    for watch in list(watches):
        watch.forget(graph)


SESSION_SECONDS = 1800.0
captures_lock = threading.RLock()


@contextmanager
def gc_paused() -> Iterator[None]:
    """A block without garbage collections, which might free a CUDA tensor; nestable. Other threads
    wait, and raise CaptureError after SESSION_SECONDS.
    """
    if not captures_lock.acquire(timeout=SESSION_SECONDS):
        raise CaptureError(
            f"another thread has been capturing for more than {SESSION_SECONDS:g} s",
            remedy="Let no eager piece or warm-up wait for a thread that captures.",
        )
    was_enabled = gc.isenabled()
    try:
        if was_enabled:
            gc.collect(1)
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
        captures_lock.release()


def tensor_on(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(storage, like.storage_offset(), like.size(), like.stride())
    if like.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if like.is_neg() else tensor


def foreign_pool(pool: Any, backend: GraphBackend) -> BackendError:
    return BackendError(
        f"{pool!r:.100} is not a pool of this {backend.name} backend",
        remedy="Make pools with new_pool() of the backend that captures.",
    )


@cache
def text_of(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
