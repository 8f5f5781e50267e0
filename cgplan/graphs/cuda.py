"""CUDA graphs through torch.cuda.CUDAGraph: one capture stream, one garbage collection a session.

Note [Failed captures]
    When a capture is invalidated, torch's `capture_end` raises before it tells the allocator to stop serving
    allocations from the pool (seen with torch 2.11): the pool would swallow all later allocations of the stream and
    never be freed. `abort` then does what `capture_end` left out. Where `capture_end` got that far, the two calls
    would fail, and are not made.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from cgplan.errors import BackendError, CaptureError
from cgplan.graphs.backend import Feature, GraphBackend, MemoryReading
from cgplan.graphs.quiet import collector_quiet

CudaPool = Any  # torch.cuda's pool handle, a pair of numbers


@dataclass(slots=True, eq=False)
class CudaGraph:
    """One CUDA graph and the pool that it captures into."""

    pool: CudaPool
    graph: torch.cuda.CUDAGraph
    captured: bool = False


class CudaBackend(GraphBackend):
    """Graphs on one GPU. Raises BackendError if that GPU is not there."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise BackendError(
                f"device {device} was asked for, but torch sees no GPU",
                remedy="Set device: auto or device: cpu to use the tape backend, or install a CUDA build of torch.",
            )
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise BackendError(
                f"device {device} was asked for, but torch sees {torch.cuda.device_count()} GPUs",
                remedy="Choose a lower index, or check CUDA_VISIBLE_DEVICES.",
            )
        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            self._stream = torch.cuda.Stream()

    def new_pool(self) -> CudaPool:
        """An empty pool."""
        return torch.cuda.graph_pool_handle()

    def pool_bytes(self, pool: CudaPool) -> int:
        """Bytes of the allocator's segments that belong to the pool."""
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool, include_traces=False))

    def new_graph(self, pool: CudaPool) -> CudaGraph:
        """An empty graph. The raw graph is kept (in host memory), so that its nodes can be counted."""
        return CudaGraph(pool, torch.cuda.CUDAGraph(keep_graph=True))

    def begin(self, graph: CudaGraph) -> None:
        """Start capturing the current stream. Unsafe calls of other threads do not spoil the capture."""
        graph.graph.capture_begin(pool=graph.pool, capture_error_mode="thread_local")

    def end(self, graph: CudaGraph) -> None:
        """Stop capturing and instantiate the graph."""
        try:
            graph.graph.capture_end()
        except RuntimeError as error:
            self._forget(graph)
            raise CaptureError(
                f"the capture is not valid: {str(error).splitlines()[0]}",
                remedy="Something in the forward synchronised with the device, or a side stream was not joined.",
            ) from error
        graph.captured = True
        graph.graph.instantiate()

    def abort(self, graph: CudaGraph) -> None:
        """Stop capturing and free what the capture took, see Note [Failed captures]."""
        try:
            graph.graph.capture_end()
        except RuntimeError:
            self._forget(graph)
        else:
            graph.graph.reset()

    def replay(self, graph: CudaGraph) -> None:
        """Queue the graph on the current stream."""
        graph.graph.replay()

    def reset(self, graph: CudaGraph) -> None:
        """Free the graph; with the pool's last graph its memory goes back to the allocator's cache."""
        graph.graph.reset()
        graph.captured = False

    def num_nodes(self, graph: CudaGraph) -> int | None:
        """Kernel nodes of the raw graph, child graphs included."""
        runtime = _cuda_runtime()
        if runtime is None or not graph.captured:
            return None
        return _count_kernels(runtime, runtime.cudaGraph_t(graph.graph.raw_cuda_graph()))

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory without holding its block; ``tensor`` itself where this torch cannot do that."""
        if tensor.device != self.device or not self.supports("borrow"):
            return tensor
        return _unowned(tensor)

    def memory(self) -> MemoryReading:
        """Free and total memory of the GPU, and what torch's allocator has reserved of it."""
        free, total = torch.cuda.mem_get_info(self.device)
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)  # a quarter of memory_reserved's time
        return MemoryReading(free, total, stats["reserved_bytes"]["all"]["current"] if stats else 0)

    @contextmanager
    def session(self) -> Iterator[None]:
        """A block on the capture stream, without garbage collection. Other streams' work is done before it starts."""
        if torch.cuda.current_stream(self.device) == self._stream:
            yield
            return
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            with collector_quiet(), torch.cuda.stream(self._stream):
                yield
            torch.cuda.current_stream().wait_stream(self._stream)

    def supports(self, feature: Feature) -> bool:
        """Nodes are counted where cuda-bindings is installed, memory is borrowed where the probe passed."""
        if feature == "node_count":
            return _cuda_runtime() is not None
        if feature == "borrow":
            return _can_borrow(self.device)
        return feature == "driver_bytes"

    def synchronize(self) -> None:
        """Wait for all streams of the GPU."""
        torch.cuda.synchronize(self.device)

    def release_cached(self) -> None:
        """Give cached blocks back to the driver."""
        torch.cuda.empty_cache()

    def time_calls(
        self, call: Callable[[], object], repeats: int, *, queued: bool = False
    ) -> tuple[Sequence[float], Sequence[float]]:
        """Device time between two events around each call, and host time until it returned."""
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(repeats)]
        host = []
        torch.cuda.synchronize(self.device)
        if queued:  # one call ahead of those that count, so that the first of them is queued too
            call()
        for start, end in zip(starts, ends, strict=True):
            if not queued:
                torch.cuda.synchronize(self.device)
            start.record()
            began = time.perf_counter_ns()
            call()
            host.append((time.perf_counter_ns() - began) / 1e3)
            end.record()
        torch.cuda.synchronize(self.device)
        return [s.elapsed_time(e) * 1e3 for s, e in zip(starts, ends, strict=True)], host

    def _forget(self, graph: CudaGraph) -> None:
        """What `capture_end` leaves undone when it raises, see Note [Failed captures]."""
        with suppress(RuntimeError):  # raised where capture_end had stopped the recording before it failed
            torch._C._cuda_endAllocateToPool(self.device.index, graph.pool)
            torch._C._cuda_releasePool(self.device.index, graph.pool)
        graph.graph.reset()


@cache
def _cuda_runtime() -> Any:
    """cuda-bindings' runtime module, which torch's CUDA builds depend on; None if it is not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return runtime


def _count_kernels(runtime: Any, graph: Any) -> int:
    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise BackendError(f"the CUDA runtime answered {result[0]}", remedy="Check the driver with nvidia-smi.")
        return result[1]

    count = runtime.cudaGraphGetNodes(graph)[2]
    kinds = runtime.cudaGraphNodeType
    total = 0
    for node in checked(runtime.cudaGraphGetNodes(graph, count)):
        kind = checked(runtime.cudaGraphNodeGetType(node))
        if kind == kinds.cudaGraphNodeTypeKernel:
            total += 1
        elif kind == kinds.cudaGraphNodeTypeGraph:
            total += _count_kernels(runtime, checked(runtime.cudaGraphChildGraphNodeGetGraph(node)))
    return total


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor on the same memory whose storage does not own it."""
    storage = tensor.untyped_storage()
    unowned = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), tensor.device, storage.nbytes())
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(unowned, tensor.storage_offset(), tensor.size(), tensor.stride())


@cache
def _can_borrow(device: torch.device) -> bool:
    """Whether this torch makes tensors on memory that they do not own; tried once, on a small tensor."""
    probe = torch.arange(4, device=device)
    try:
        same = _unowned(probe[1:])
        return same.data_ptr() == probe[1:].data_ptr() and same.tolist() == [1, 2, 3]
    except (AttributeError, RuntimeError, TypeError):
        return False
