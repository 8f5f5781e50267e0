"""The nodes of a captured graph, and the addresses among their parameters.

docs/audit.md, What it reads, says which words are ``certain``. Beside its pointers cuBLAS's buffer
is zero.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cgplan.backends.blame import Line, blamed_line
from cgplan.backends.host_sync import OperatorMode, tensors_in
from cgplan.errors import BackendError

MemoryKind = Literal["device", "host"]
_SMALL = 64  # bytes
# CU_LAUNCH_PARAM_BUFFER_SIZE, _POINTER
_SIZE = 2
_BUFFER = 1


@dataclass(frozen=True)
class GraphNodes:
    """In order, then those of child graphs.

    Attributes:
        names: Kernel, ``memcpy``, ``memset``, another kind; on the tape the operator.
        opaque: Nodes that work on memory and cannot be read.
        words: uint64, perhaps addresses.
        nodes: int64, the node of each word.
        certain: bool, whether the node surely uses the word.
    """

    names: tuple[str, ...]
    opaque: int
    words: NDArray[np.uint64]
    nodes: NDArray[np.int64]
    certain: NDArray[np.bool_]
    tensors: tuple[Tensor, ...] = ()


class Block(NamedTuple):
    """From ``start`` to before ``end``.

    Attributes:
        pool: The backend's, ``library``, or torch's number of another.
        line: That allocated it, if known.
    """

    start: int
    end: int
    pool: Any
    is_free: bool
    line: str


class Launch(NamedTuple):
    """Nodes from ``first`` to before ``end``. ``operands``: addresses of its storages."""

    first: int
    end: int
    operator: str | None
    line: Line | None
    operands: frozenset[int]


class OperatorLog(OperatorMode):
    def __init__(
        self,
        open_launches: Callable[[], list[Launch] | None],
        device: torch.device,
    ) -> None:
        super().__init__(device.type)
        self._open_launches = open_launches
        self._device = device

    def see(self, func: Any, args: Any, kwargs: Any) -> Any:
        launches = self._open_launches()
        first = nodes_so_far(self._device)
        result = self.run_whole(func, args, kwargs)
        if launches is None or first is None:
            return result
        end = nodes_so_far(self._device)
        if end is None or self._open_launches() is not launches:
            return result
        operands = frozenset(
            tensor.untyped_storage().data_ptr()
            for tensor in tensors_in((args, kwargs, result))
            if tensor.layout is torch.strided and tensor.device == self._device
        )
        name = func._schema.name if hasattr(func, "_schema") else str(func)
        launches.append(Launch(first, end, name, blamed_line(), operands))
        return result


@cache
def cuda_driver() -> Any:
    """Raises BackendError if cuda-bindings is missing or too old."""
    try:
        from cuda.bindings import driver
    except ImportError:
        raise BackendError(
            "graphs' nodes are read with cuda-bindings, which is not installed",
            remedy="pip install 'cgplan[audit]'",
        ) from None
    error, version = driver.cuDriverGetVersion()
    if int(error) or version < 12040 or not hasattr(driver, "cuFuncGetParamInfo"):
        raise BackendError(
            f"graphs' nodes are read with CUDA 12.4 or newer; the driver's version is {version}",
            remedy="Update the GPU driver and cuda-bindings.",
        )
    return driver


@cache
def cuda_runtime() -> Any:
    try:
        from cuda.bindings import runtime
    except ImportError:
        return None
    return runtime


def nodes_so_far(device: torch.device) -> int | None:
    """Of the graph that the current stream captures."""
    runtime = cuda_runtime()
    if runtime is None or not torch.cuda.is_current_stream_capturing():
        return None
    stream = torch.cuda.current_stream(device)
    raw = runtime.cudaStreamGetCaptureInfo(stream.cuda_stream)[3]
    return int(runtime.cudaGraphGetNodes(raw)[2])


class _Read(NamedTuple):
    name: str
    words: bytes = b""
    certain: bytes = b""


class _Kernel(NamedTuple):
    """``certain``: a byte for each word."""

    name: str
    lengths: dict[int, int]
    certain: bytes


def _word_at(address: int) -> int:
    return ctypes.c_size_t.from_address(address).value


class CudaNodes:
    def __init__(self) -> None:
        driver = cuda_driver()
        self._driver = driver
        self._kernels: dict[int, _Kernel] = {}
        kinds = driver.CUgraphNodeType
        self._readers: dict[Any, Callable[[Any], _Read | None]] = {
            kinds.CU_GRAPH_NODE_TYPE_KERNEL: self._kernel,
            kinds.CU_GRAPH_NODE_TYPE_MEMCPY: partial(
                _ends,
                "memcpy",
                driver.cuGraphMemcpyNodeGetParams,
                ("srcHost", "srcDevice", "dstHost", "dstDevice"),
            ),
            kinds.CU_GRAPH_NODE_TYPE_MEMSET: partial(
                _ends,
                "memset",
                driver.cuGraphMemsetNodeGetParams,
                ("dst",),
            ),
        }
        self._child = kinds.CU_GRAPH_NODE_TYPE_GRAPH
        self._harmless = (
            self._child,
            kinds.CU_GRAPH_NODE_TYPE_EMPTY,
            kinds.CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            kinds.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
        )

    def read(self, raw: int) -> GraphNodes:
        found = []
        opaque = 0
        for kind, node in self._nodes(self._driver.CUgraph(raw)):
            reader = self._readers.get(kind)
            read = reader and reader(node)
            if read is None:
                opaque += kind not in self._harmless
                read = _Read(kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower())
            found.append(read)
        words = b"".join(read.words for read in found)
        certain = b"".join(read.certain for read in found)
        lengths = [len(read.certain) for read in found]
        return GraphNodes(
            names=tuple(read.name for read in found),
            opaque=opaque,
            words=np.frombuffer(words, np.uint64),
            nodes=np.repeat(np.arange(len(found)), lengths),
            certain=np.frombuffer(certain, np.bool_),
        )

    def memory_at(self, address: int) -> MemoryKind | None:
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        error, kind = self._driver.cuPointerGetAttribute(attribute, address)
        if int(error):
            return None
        return "host" if kind == 1 else "device"

    def _nodes(self, graph: Any) -> list[tuple[Any, Any]]:
        driver = self._driver
        error, _, length = driver.cuGraphGetNodes(graph)
        if int(error):
            raise BackendError(
                f"the nodes of a graph cannot be read: {error.name}",
                remedy="Audit in the process that captured it.",
            )
        listed = driver.cuGraphGetNodes(graph, length)[1] if length else ()
        nodes = [(driver.cuGraphNodeGetType(node)[1], node) for node in listed]
        children = [node for kind, node in nodes if kind is self._child]
        for child in children:
            nodes += self._nodes(driver.cuGraphChildGraphNodeGetGraph(child)[1])
        return nodes

    def _kernel(self, node: Any) -> _Read | None:
        error, given = self._driver.cuGraphKernelNodeGetParams(node)
        if int(error):
            return None
        function = int(given.func)
        if function not in self._kernels:
            self._kernels[function] = self._look_up(given.func)
        kernel = self._kernels[function]
        parameters = int(given.kernelParams)
        if parameters:  # an array of pointers to them
            words = b""
            for number, length in kernel.lengths.items():
                words += ctypes.string_at(_word_at(parameters + 8 * number), 8 * length)
            return _Read(kernel.name, words, kernel.certain)
        extra = int(given.extra)
        if not extra:
            return None
        tags = [_word_at(extra + 8 * i) for i in range(4)]
        buffer = {tags[0]: tags[1], tags[2]: tags[3]}
        length = _word_at(buffer[_SIZE]) // 8
        words = ctypes.string_at(buffer[_BUFFER], 8 * length)
        return _Read(kernel.name, words, b"\1" * length)

    def _look_up(self, function: Any) -> _Kernel:
        lengths = {}
        certain = b""
        for number in count():
            error, _, size = self._driver.cuFuncGetParamInfo(function, number)
            if int(error):
                break
            length = size // 8
            if length:
                lengths[number] = length
                known = length if size <= _SMALL else 1
                certain += b"\1" * known
                certain += bytes(length - known)
        error, name = self._driver.cuFuncGetName(function)
        return _Kernel("a kernel" if int(error) else name.decode(), lengths, certain)


def _ends(
    name: str,
    get_params: Callable[[Any], Any],
    fields: Sequence[str],
    node: Any,
) -> _Read | None:
    error, given = get_params(node)
    if int(error):
        return None
    words = b""
    for field in fields:
        address = int(getattr(given, field))
        if address:
            words += address.to_bytes(8, "little")
    if not words:
        return None
    return _Read(name, words, b"\1" * (len(words) // 8))
