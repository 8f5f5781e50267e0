"""Reading the nodes of graphs, where that is not possible."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from cgplan.backends import GraphBackend, cuda
from cgplan.backends.graph_nodes import CudaNodes, cuda_driver
from cgplan.errors import BackendError


@pytest.fixture(autouse=True)
def _looked_up_again() -> Iterator[None]:
    cuda_driver.cache_clear()
    yield
    cuda_driver.cache_clear()


def test_without_cuda_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendError, match="cuda-bindings, which is not installed"):
        CudaNodes()


def test_a_driver_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(
        cuDriverGetVersion=lambda: (0, 12020), cuFuncGetParamInfo=None
    )  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    with pytest.raises(BackendError, match="driver's version is 12020"):
        CudaNodes()


def test_the_log_has_the_operators_of_the_forward(backend: GraphBackend) -> None:
    graph, x = backend.new_graph(backend.new_pool()), torch.ones(4, 3, device=backend.device)
    log = backend.logging_operators()
    with backend.session(), torch.no_grad(), log, backend.capturing(graph):
        y = (x * 2).relu_().sum(1)
    backend.replay(graph)
    assert y.tolist() == [6.0] * 4
    assert [one.operator for one in graph.launches] == ["aten::mul", "aten::relu_", "aten::sum"]
    assert all("y = (x * 2)" in str(one.line) for one in graph.launches)


@pytest.mark.gpu
def test_a_handle_that_is_no_graph() -> None:
    with pytest.raises(BackendError, match="cannot be read"):
        CudaNodes().read(0)


class Driver:
    """As libcuda: graph 3 has a kernel, a copy and, as its child, graph 2 of two kernels."""

    def __init__(self, code: int = 0) -> None:
        kinds = {31: 0, 32: 1, 33: 4, 21: 0, 22: 0}

        def cuGraphGetNodes(graph: Any, nodes: Any, count: Any) -> int:
            found = [node for node in kinds if node // 10 == graph.value]
            count._obj.value = len(found)
            if nodes is not None:
                nodes[:] = found
            return 0

        def cuGraphNodeGetType(node: int, at: int) -> int:
            ctypes.c_int.from_address(at).value = kinds[node]
            return code

        def cuGraphChildGraphNodeGetGraph(node: Any, graph: Any) -> int:
            assert node.value == 33
            graph._obj.value = 2
            return 0

        self.cuGraphGetNodes = cuGraphGetNodes
        self.cuGraphNodeGetType = cuGraphNodeGetType
        self.cuGraphChildGraphNodeGetGraph = cuGraphChildGraphNodeGetGraph


def test_kernels_of_child_graphs_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "libcuda", Driver)
    assert cuda.count_kernels(3) == 3


def test_an_error_of_the_driver_is_told_when_nodes_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "libcuda", lambda: Driver(code=1))
    with pytest.raises(BackendError, match="error 1"):
        cuda.count_kernels(3)
