"""CUDA graphs, without ``torch.cuda.graph``, whose garbage collections take 35 ms.

Note [Failed captures]
    When torch's `capture_end` raises, (1) the allocator goes on serving from the pool, (2) the
    random generator believes in a capture, and (3) the allocator of pinned memory refuses the pool
    ("already recording to mempool_id") and looks into the graph object. `_forget` makes the calls
    that `capture_end` left out, resets the generator by a small capture, keeps both graph objects
    for ever, and changes the pool's handle. From torch 2.12 on, freeing the small graph would
    release library workspaces.

Note [Workspaces]
    torch allocates a workspace at a stream's first matrix product, and graphs hold its address.
    Without a warm-up it lies in the first graph's pool; from torch 2.12 on, freeing a graph drops
    it (pytorch issue 193402). So a session begins with a small product in a pool for the life of
    the process, where torch finds a dropped workspace again. It takes tens of megabytes, so streams
    are lent again.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from cgplan.backends.backend import (
    GraphBackend,
    MemoryReading,
    PoolMemory,
    captures_lock,
    foreign_pool,
    forget_capture,
    gc_paused,
    span,
    tensor_on,
    text_of,
)
from cgplan.backends.blame import users_lines
from cgplan.backends.graph_nodes import (
    Block,
    CudaNodes,
    GraphNodes,
    Launch,
    MemoryKind,
    OperatorLog,
)
from cgplan.buffers.copy_kernel import (
    INPUTS,
    KernelCopier,
    StagingBlocks,
    fence_behind,
    libcuda,
    load_copy_kernel,
    stream_at,
)
from cgplan.buffers.static import Copier, StaticBuffers
from cgplan.errors import BackendError, CaptureError, CaptureMemoryError, first_line


@dataclass(eq=False)
class CudaPool:
    """After its last graph, or a failed capture, torch refuses the pool: the next capture gets a
    new handle.

    Attributes:
        ranges: Its addresses when ``listed`` was (handles, bytes ever reserved).
    """

    backend: CudaBackend
    handles: tuple[Any, ...] = ()
    graphs: weakref.WeakSet[CudaGraph] = field(default_factory=weakref.WeakSet)
    ranges: list[tuple[int, int]] = field(default_factory=list)
    listed: tuple[Any, int] | None = None
    is_spoiled: bool = False

    def handle(self) -> Any:
        if not self.graphs:
            self.handles = ()
        if self.is_spoiled or not self.handles:
            self.handles += (torch.cuda.graph_pool_handle(),)
        self.is_spoiled = False
        return self.handles[-1]


@dataclass(eq=False)
class CudaGraph:
    pool: CudaPool
    graph: torch.cuda.CUDAGraph
    captured: bool = False
    stream: torch.cuda.Stream | None = None
    launches: list[Launch] = field(default_factory=list)
    proofs: object = None

    def drop(self) -> None:
        forget_capture(self.graph)
        self.graph.reset()
        self.pool.graphs.discard(self)
        self.captured = False


_pools = weakref.WeakSet[CudaPool]()
_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL, _GRAPH
_CHILD = 4


def _check(*codes: int) -> None:
    if any(codes):
        raise BackendError(
            f"the driver could not read a graph's nodes: error {max(codes)}",
            remedy="Look for an earlier failure on the GPU.",
        )


def _nodes_of(graph: int) -> list[int]:
    """cuda-bindings take 0.1 s to import."""
    count = ctypes.c_size_t()
    handle = ctypes.c_void_p(graph)
    get_nodes = libcuda().cuGraphGetNodes
    _check(get_nodes(handle, None, ctypes.byref(count)))
    nodes = (ctypes.c_void_p * count.value)()
    if count.value:  # else an error
        _check(get_nodes(handle, nodes, ctypes.byref(count)))
    # an array makes an object of each in four times the time
    return memoryview(nodes).cast("B").cast("Q").tolist()


def count_kernels(graph: int) -> int:
    driver = libcuda()
    nodes = _nodes_of(graph)
    kinds = (ctypes.c_int32 * len(nodes))()
    start = ctypes.addressof(kinds)
    places = range(start, start + 4 * len(nodes), 4)
    driver.cuGraphNodeGetType.argtypes = [ctypes.c_void_p] * 2
    _check(*map(driver.cuGraphNodeGetType, nodes, places))
    found = list(kinds)
    total = found.count(_KERNEL)
    child = ctypes.c_void_p()
    for node, kind in zip(nodes, found, strict=True):
        if kind == _CHILD:
            handle = ctypes.c_void_p(node)
            _check(driver.cuGraphChildGraphNodeGetGraph(handle, ctypes.byref(child)))
            total += count_kernels(child.value or 0)
    return total


class CudaBackend(GraphBackend):
    name = "cuda"
    counts_driver_bytes = True

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise BackendError(
                f"device {device} was asked for, but torch sees no GPU",
                remedy="Set device: auto or device: cpu, or install a CUDA build of torch.",
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise BackendError(
                f"device {device} was asked for, but torch sees {torch.cuda.device_count()} GPUs",
                remedy="Choose a lower index, or check CUDA_VISIBLE_DEVICES.",
            )
        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self._stream = own_stream(self)
            self._token = torch.zeros(1, device=self.device)
        self._failed: list[torch.cuda.CUDAGraph] = []
        self._open: CudaGraph | None = None
        self._generators: set[torch.Generator] = set()

    def hardware(self) -> tuple[str, str | None, str | None]:
        driver = None
        for word in text_of("/proc/driver/nvidia/version").split():
            if word[0].isdigit() and "." in word:
                driver = word
                break
        return torch.cuda.get_device_name(self.device), driver, torch.version.cuda

    def new_pool(self) -> CudaPool:
        pool = CudaPool(self)
        _pools.add(pool)
        return pool

    def pool_memory(self, *pools: CudaPool) -> PoolMemory:
        nbytes = 0
        held = 0
        for segment in self._of_pools(*pools):
            nbytes += segment["total_size"]
            held += segment["allocated_size"]
        return PoolMemory(nbytes, held)

    def is_held(self, pool: CudaPool) -> bool:
        return not torch._C._cuda_checkPoolLiveAllocations(
            self.device.index,
            pool.handles[-1],
            set(),
        )

    def new_graph(self, pool: CudaPool) -> CudaGraph:
        if not isinstance(pool, CudaPool):
            raise foreign_pool(pool, self)
        return CudaGraph(pool, torch.cuda.CUDAGraph(keep_graph=True))

    def register_generator(self, generator: torch.Generator) -> None:
        self._generators.add(generator)

    def begin(self, graph: CudaGraph) -> None:
        assert not graph.captured, "a graph is captured once"
        stream = torch.cuda.current_stream(self.device)
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("a capture inside another one", remedy="End the open one first.")
        if stream == torch.cuda.default_stream(self.device):
            raise CaptureError(
                "a capture on the default stream", remedy="Capture inside backend.session()."
            )
        handle = graph.pool.handle()
        try:
            self._register_generators(graph.graph)
            graph.graph.capture_begin(
                pool=handle,
                capture_error_mode="thread_local",
            )
        except RuntimeError as error:
            self._forget(graph)
            raise CaptureError(
                f"the capture did not begin: {first_line(error)}",
                remedy="Look for an earlier failure on the GPU.",
            ) from error
        graph.stream = stream
        graph.pool.graphs.add(graph)
        self._open = graph

    def end(self, graph: CudaGraph) -> None:
        """Raises CaptureMemoryError without memory to instantiate."""
        try:
            self._end_recording(graph)
        except RuntimeError as error:
            self._forget(graph)
            raise CaptureError(
                f"the capture is not valid: {first_line(error)}",
                remedy="Let nothing in the forward wait for the device, and join side streams.",
            ) from error
        try:
            with span("instantiate"):
                graph.graph.instantiate()
        except RuntimeError as error:
            self.reset(graph)
            line = first_line(error)
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in line:
                raise CaptureMemoryError(
                    f"no memory to instantiate a graph: {line}",
                    remedy="Capture fewer sizes, or keep more free.",
                ) from error
            raise CaptureError(
                f"the graph cannot be instantiated: {line}",
                remedy="Look for an earlier failure on the GPU.",
            ) from error
        graph.captured = True

    def abort(self, graph: CudaGraph) -> None:
        try:
            self._end_recording(graph)
        except RuntimeError:
            self._forget(graph)
        else:
            self.reset(graph)

    def _end_recording(self, graph: CudaGraph) -> None:
        self._open = None
        with torch.cuda.stream(graph.stream):
            graph.graph.capture_end()

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def replay_of(self, graph: CudaGraph) -> Callable[[], None]:
        assert graph.captured, "the graph was not captured, or was reset"
        return graph.graph.replay

    def copier(
        self,
        buffers: StaticBuffers,
        *,
        copy_inputs: bool,
    ) -> Copier:
        fits = 0 < len(buffers.buffers) <= INPUTS
        kernel = load_copy_kernel(self.device.index) if fits else None
        if kernel is None:
            return Copier(buffers, copy_inputs=copy_inputs)
        blocks = StagingBlocks(partial(fence_behind, device=self.device), self.synchronize)
        return KernelCopier(
            buffers,
            kernel,
            blocks,
            copy_inputs=copy_inputs,
        )

    def stream_getter(self) -> Callable[[], int]:
        return partial(torch._C._cuda_getCurrentRawStream, self.device.index)

    def is_busy(self, stream: int) -> bool:
        return not stream_at(stream, self.device).query()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        return torch.cuda.nvtx.range(name)

    def reset(self, graph: CudaGraph) -> None:
        graph.drop()
        if torch.cuda.current_stream(self.device) == self._stream:
            keep_workspaces(self.device)

    def num_nodes(self, graph: CudaGraph) -> int:
        return count_kernels(graph.graph.raw_cuda_graph())

    def logging_operators(self) -> AbstractContextManager[object]:
        return OperatorLog(
            lambda: None if self._open is None else self._open.launches,
            self.device,
        )

    @cached_property
    def _nodes(self) -> CudaNodes:
        return CudaNodes()

    def nodes(
        self,
        graph: CudaGraph | torch.cuda.CUDAGraph,
    ) -> GraphNodes:
        kept = graph.graph if isinstance(graph, CudaGraph) else graph
        return self._nodes.read(kept.raw_cuda_graph())

    def blocks(self) -> list[Block]:
        owners: dict[Any, Any] = {
            (0, 0): None,
            _pool(self.device.index).id: "library",
        }
        for pool in _pools:
            for handle in pool.handles:
                owners[handle] = pool
        found = []
        for segment in self._segments():
            handle = segment["segment_pool_id"]
            owner = owners.get(handle, handle)
            for block in segment["blocks"]:
                start = block["address"]
                end = start + block["size"]
                is_free = block["state"] != "active_allocated"
                frames = block.get("frames") or ()
                places = [(frame["filename"], frame["line"]) for frame in frames]
                line = str(next(users_lines(places))) if places else ""
                found.append(Block(start, end, owner, is_free, line))
        return found

    def _segments(self) -> list[dict[str, Any]]:
        """Of all pools: asked for one, or without traces, memory_snapshot takes a reference too
        many (pytorch pull request 196366), and the 256th pool crashes the process.
        """
        segments = torch.cuda.memory._snapshot()["segments"]
        return [segment for segment in segments if segment["device"] == self.device.index]

    def _of_pools(self, *pools: CudaPool) -> list[dict[str, Any]]:
        handles: list[Any] = []
        for pool in pools:
            handles += pool.handles
        segments = self._segments()
        return [segment for segment in segments if segment["segment_pool_id"] in handles]

    def memory_at(self, address: int) -> MemoryKind | None:
        return self._nodes.memory_at(address)

    def borrow(self, tensor: Tensor) -> Tensor:
        if tensor.device != self.device:
            return tensor
        storage = tensor.untyped_storage()
        unowned: Any = torch._C._construct_storage_from_data_pointer(
            storage.data_ptr(),
            self.device,
            storage.nbytes(),
        )
        return tensor_on(unowned, tensor)

    def watch(self, tensor: Tensor) -> Callable[[], bool]:
        storage = tensor.untyped_storage()
        held = StorageWeakRef(storage)
        return lambda: not held.expired()

    def in_pool(
        self,
        tensor: Tensor,
        pool: CudaPool,
    ) -> bool:
        if tensor.device != self.device or tensor.layout is not torch.strided:
            return False
        # in a quarter of memory_reserved's time
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        now = pool.handles, stats["reserved_bytes"]["all"]["allocated"]
        if pool.listed != now:
            pool.ranges = []
            for segment in self._of_pools(pool):
                start = segment["address"]
                pool.ranges.append((start, start + segment["total_size"]))
            pool.listed = now
        address = tensor.untyped_storage().data_ptr()
        return any(start <= address < end for start, end in pool.ranges)

    def is_empty(self, graph: CudaGraph) -> bool:
        return not _nodes_of(graph.graph.raw_cuda_graph())

    def memory(self) -> MemoryReading:
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved = stats["reserved_bytes"]["all"]["current"]
        held = stats["allocated_bytes"]["all"]["current"]
        return MemoryReading(free, total, reserved, held)

    @contextmanager
    def session(self) -> Iterator[None]:
        if torch.cuda.current_stream(self.device) == self._stream:
            yield
            return
        if torch.cuda.is_current_stream_capturing():  # synchronising would end it
            raise CaptureError("a capture inside another one", remedy="End the open one first.")
        with torch.cuda.device(self.device), gc_paused():
            torch.cuda.synchronize()
            try:
                with torch.cuda.stream(self._stream):
                    keep_workspaces(self.device)
                    yield
            finally:
                torch.cuda.current_stream().wait_stream(self._stream)

    def synchronize(self) -> None:
        with captures_lock:  # it would end another thread's capture
            torch.cuda.synchronize(self.device)

    def release_cached(self) -> None:
        torch.cuda.empty_cache()

    def time_calls(
        self,
        call: Callable[[], object],
        repeats: int,
        *,
        queued: bool = False,
    ) -> tuple[Sequence[float], Sequence[float]]:
        host = []
        with torch.cuda.device(self.device):
            new_event = partial(torch.cuda.Event, enable_timing=True)
            events = [(new_event(), new_event()) for _ in range(repeats)]
            torch.cuda.synchronize()
            if queued:
                call()  # so that the first one that counts is queued
            for start, end in events:
                if not queued:
                    torch.cuda.synchronize()
                start.record()
                began = time.perf_counter_ns()
                call()
                host.append((time.perf_counter_ns() - began) / 1e3)
                end.record()
            torch.cuda.synchronize()
            device = [start.elapsed_time(end) * 1e3 for start, end in events]
        return device, host

    def _register_generators(
        self,
        graph: torch.cuda.CUDAGraph,
    ) -> None:
        for generator in self._generators:
            graph.register_generator_state(generator)

    def _forget(self, graph: CudaGraph) -> None:
        """See Note [Failed captures]."""
        pool = graph.pool
        handle = pool.handles[-1]
        index = self.device.index
        # capture_end may have stopped the recording
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(index, handle)
            torch._C._cuda_releasePool(index, handle)
        pool.is_spoiled = True
        graph.drop()
        small = torch.cuda.CUDAGraph()
        self._register_generators(small)
        with torch.cuda.stream(self._stream):
            small.capture_begin(capture_error_mode="thread_local")
            self._token.zero_()
            small.capture_end()
            keep_workspaces(self.device)
        self._failed += [graph.graph, small]


_owners = weakref.WeakKeyDictionary[Any, torch.cuda.Stream]()
_lent: list[torch.cuda.Stream] = []


@cache
def _pool(index: int) -> torch.cuda.MemPool:
    with torch.cuda.device(index):
        pool = torch.cuda.MemPool()
    # freed after a failed foreign capture, it aborts the process at exit
    held = ctypes.py_object(pool)
    ctypes.pythonapi.Py_IncRef(held)
    return pool


@cache
def _operands(device: int) -> tuple[torch.Tensor, ...]:
    default = torch.cuda.stream(torch.cuda.default_stream(device))
    with torch.inference_mode(False), default:
        matrix = torch.zeros(16, 16, device=f"cuda:{device}")
        result = torch.zeros_like(matrix)
    return matrix, result


def own_stream(owner: object) -> torch.cuda.Stream:
    index = torch.cuda.current_device()
    taken = {stream.cuda_stream for stream in list(_owners.values())}
    for stream in _lent:
        is_here = stream.device.index == index
        if is_here and stream.cuda_stream not in taken:
            break
    else:
        for _ in range(32):
            stream = torch.cuda.Stream()
            if stream.cuda_stream not in taken:
                break
        _lent.append(stream)
    _owners[owner] = stream
    return stream


@torch.no_grad()
def keep_workspaces(device: torch.device) -> None:
    if torch.cuda.is_current_stream_capturing():
        return
    matrix, result = _operands(device.index)
    pool = _pool(device.index)
    no_autocast = torch.autocast("cuda", enabled=False)
    in_pool = torch.cuda.use_mem_pool(pool, device=device.index)
    with no_autocast, in_pool:
        torch.mm(matrix, matrix, out=result)
        torch.addmm(  # through cuBLASLt
            matrix[0],
            matrix,
            matrix,
            out=result,
        )
