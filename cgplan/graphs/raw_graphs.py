"""Raw CUDA graphs, as cuda-bindings sees them: their nodes."""

from __future__ import annotations

from functools import cache
from typing import Any

from cgplan.errors import BackendError


@cache
def cuda_runtime() -> Any:
    """cuda-bindings' runtime module, which torch's CUDA builds depend on; None if it is not installed."""
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return runtime


def count_kernels(runtime: Any, graph: Any) -> int:
    """Kernel nodes of a raw graph, child graphs included. Raises BackendError if the runtime fails."""

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
            total += count_kernels(runtime, checked(runtime.cudaGraphChildGraphNodeGetGraph(node)))
    return total
