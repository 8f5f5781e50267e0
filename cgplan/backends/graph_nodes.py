"""The nodes of a captured graph, the addresses among their parameters, and the memory that these
lie in.

Note [Words]
    A kernel node holds the values of the kernel's parameters. A pointer among them is a word of 8
    bytes: a parameter of its own, a member of a struct, or an item of an array that is passed by
    value. Nothing says which words the kernel reads, and what lies behind the items that it does
    read is left from an earlier launch: a `cat` of two tensors after one of sixty holds the
    addresses of all sixty. So words are ``certain`` in parameters of at most 64 bytes and at the
    beginning of larger ones, where a tensor's address stands before its strides, and that of a
    tensor map. cuBLAS hands over all parameters as one buffer, which it fills with zeros before:
    its words are certain.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cgplan.backends.blame import blamed_line
from cgplan.backends.host_sync import as_its_caller, tensors_in
from cgplan.errors import BackendError

if TYPE_CHECKING:
    from cgplan.backends.backend import GraphBackend

MemoryKind = Literal["device", "host"]
_SMALL = 64  # bytes of a parameter whose words are all certain
# CU_LAUNCH_PARAM_BUFFER_SIZE and _POINTER of cuda.h: tags in front of a raw buffer's size, place
_SIZE, _BUFFER = 2, 1


@dataclass(frozen=True, slots=True)
class GraphNodes:
    """The nodes of one graph in the order of their capture, those of child graphs behind their own.

    Attributes:
        names: Of each node: the kernel, ``memcpy``, ``memset``, or another kind; on the tape the
            operator.
        opaque: Nodes that work on memory and cannot be read.
        words: uint64, one for each word that may be an address.
        nodes: int64, the node of each word.
        certain: bool, whether the node is certain to use the word; see Note [Words].
        tensors: Tensors that the graph itself keeps alive.
    """

    names: tuple[str, ...]
    opaque: int
    words: NDArray[np.uint64]
    nodes: NDArray[np.int64]
    certain: NDArray[np.bool_]
    tensors: tuple[Tensor, ...] = ()


class Block(NamedTuple):
    """A stretch of a device's memory that an allocator has reserved, from ``start`` to just before
    ``end``.
    """

    start: int
    end: int
    # the backend's pool, ``library``, or torch's number of another pool; None for memory outside of
    # pools
    pool: Any
    is_free: bool
    line: str  # that allocated it, where torch records the history of its memory


class Launch(NamedTuple):
    """An operator of a capture, and the nodes of the graph that it made, from ``first`` to just
    before ``end``.
    """

    first: int
    end: int
    operator: str
    line: str
    operands: frozenset[int]  # addresses of the storages that it was given and that it returned


class OperatorLog(TorchDispatchMode):
    """Notes the operators of captures in the ``launches`` of the backend's graphs."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend = backend

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: Dynamo runs what it has compiled, as without a mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self._backend.open_graph()
        call = as_its_caller(func, func, self._backend.device.type)
        result = call(*args, **(kwargs or {}))
        if (
            before is not None
            and (after := self._backend.open_graph()) is not None
            and after[0] is before[0]
        ):
            dense = [
                t
                for t in tensors_in((args, kwargs, result))
                if t.layout is torch.strided and t.device == self._backend.device
            ]
            operands = frozenset(t.untyped_storage().data_ptr() for t in dense)
            name = func._schema.name if hasattr(func, "_schema") else str(func)
            before[0].launches.append(Launch(before[1], after[1], name, blamed_line(), operands))
        return result


@cache
def cuda_driver() -> Any:
    """cuda-bindings' driver module. Raises BackendError where it is missing, or too old to name
    kernels' parameters.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise BackendError(
            "graphs' nodes are read with cuda-bindings, which is not installed",
            remedy="pip install cuda-bindings",
        ) from None
    error, version = driver.cuDriverGetVersion()
    if int(error) or version < 12040 or not hasattr(driver, "cuFuncGetParamInfo"):
        raise BackendError(
            f"graphs' nodes are read with CUDA 12.4 or newer; the driver's version is {version}",
            remedy="Update the GPU driver and cuda-bindings.",
        )
    return driver


class _Kernel(NamedTuple):
    name: str
    words: tuple[tuple[int, int], ...]  # number of a parameter, and how many words it has, if any
    certain: bytes  # 1 for each word that is, 0 for others


_Read = tuple[str, bytes, bytes]  # a node's name, its words, and which of them are certain


class CudaNodes:
    """Reads CUDA graphs by the driver. Raises BackendError as ``cuda_driver``."""

    def __init__(self) -> None:
        self._driver = driver = cuda_driver()
        self._kernels: dict[int, _Kernel] = {}
        kinds = driver.CUgraphNodeType
        self._readers: dict[Any, Callable[[Any], _Read | None]] = {
            kinds.CU_GRAPH_NODE_TYPE_KERNEL: self._kernel,
            kinds.CU_GRAPH_NODE_TYPE_MEMCPY: self._memcpy,
            kinds.CU_GRAPH_NODE_TYPE_MEMSET: self._memset,
        }
        self._child = kinds.CU_GRAPH_NODE_TYPE_GRAPH
        self._harmless = {  # they touch no memory themselves
            self._child, kinds.CU_GRAPH_NODE_TYPE_EMPTY, kinds.CU_GRAPH_NODE_TYPE_WAIT_EVENT,
            kinds.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
        }  # fmt: skip

    def read(self, raw: int) -> GraphNodes:
        """The nodes of the graph with this handle."""
        found, opaque = list[_Read](), 0
        for kind, node in self._nodes(self._driver.CUgraph(raw)):
            read = self._readers[kind](node) if kind in self._readers else None
            opaque += read is None and kind not in self._harmless
            found.append(read or (kind.name.removeprefix("CU_GRAPH_NODE_TYPE_").lower(), b"", b""))
        counts = [len(certain) for _, _, certain in found]
        return GraphNodes(
            names=tuple(name for name, _, _ in found),
            opaque=opaque,
            words=np.frombuffer(b"".join(words for _, words, _ in found), np.uint64),
            nodes=np.repeat(np.arange(len(found)), counts),
            certain=np.frombuffer(b"".join(certain for _, _, certain in found), np.bool_),
        )

    def memory_at(self, address: int) -> MemoryKind | None:
        """The kind of memory that the driver has at an address; None where it has none."""
        attribute = self._driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        error, kind = self._driver.cuPointerGetAttribute(attribute, address)
        return None if int(error) else "host" if kind == 1 else "device"

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
        children = (
            self._nodes(driver.cuGraphChildGraphNodeGetGraph(n)[1])
            for kind, n in nodes
            if kind is self._child
        )
        return [*nodes, *chain.from_iterable(children)]

    def _kernel(self, node: Any) -> _Read | None:
        error, given = self._driver.cuGraphKernelNodeGetParams(node)
        if int(error):
            return None
        number = int(given.func)
        if number not in self._kernels:
            self._kernels[number] = self._looked_up(given.func)
        kernel = self._kernels[number]
        if places := int(given.kernelParams):
            at = (ctypes.c_size_t * max((i + 1 for i, _ in kernel.words), default=0)).from_address(
                places
            )
            return (
                kernel.name,
                b"".join(ctypes.string_at(at[i], 8 * words) for i, words in kernel.words),
                kernel.certain,
            )
        if not int(given.extra):
            return None
        tags = (ctypes.c_size_t * 4).from_address(int(given.extra))
        buffer = {tags[0]: tags[1], tags[2]: tags[3]}
        words = ctypes.c_size_t.from_address(buffer[_SIZE]).value // 8
        return kernel.name, ctypes.string_at(buffer[_BUFFER], 8 * words), b"\1" * words

    def _looked_up(self, function: Any) -> _Kernel:
        driver, words, certain = self._driver, list[tuple[int, int]](), b""
        for number in count():
            error, _, size = driver.cuFuncGetParamInfo(function, number)
            if int(error):
                break
            if held := size // 8:
                words.append((number, held))
                certain += b"\1" * held if size <= _SMALL else b"\1" + bytes(held - 1)
        error, name = driver.cuFuncGetName(function)
        return _Kernel("a kernel" if int(error) else name.decode(), tuple(words), certain)

    def _memcpy(self, node: Any) -> _Read | None:
        error, given = self._driver.cuGraphMemcpyNodeGetParams(node)
        ends = (
            [given.srcHost, given.srcDevice, given.dstHost, given.dstDevice]
            if not int(error)
            else []
        )
        addresses = [int(end) for end in ends if int(end)]
        return (
            ("memcpy", struct.pack(f"{len(addresses)}Q", *addresses), b"\1" * len(addresses))
            if addresses
            else None
        )

    def _memset(self, node: Any) -> _Read | None:
        error, given = self._driver.cuGraphMemsetNodeGetParams(node)
        return None if int(error) else ("memset", struct.pack("Q", int(given.dst)), b"\1")
