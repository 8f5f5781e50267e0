"""Captures that fail halfway on a GPU: a typed error, nothing left recording, and all memory given back."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from checks import back_at, capture, reserved, same

from cgplan import CaptureError
from cgplan.backends import GraphBackend, select_backend
from cgplan.errors import CaptureMemoryError

pytestmark = pytest.mark.gpu


@pytest.fixture
def cuda() -> GraphBackend:
    backend = select_backend("cuda")
    x = torch.ones(64, 64, device="cuda")
    x @ x  # workspaces that stay
    del x
    with backend.session():  # and those of its stream
        pass
    return backend


class Failing:
    """A CUDA graph one of whose methods raises, before or after it has done its work."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, method: str, error: Exception, *, works: bool = False
    ) -> None:
        self.graph, self.method, self.error, self.works = graph, method, error, works

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.graph, name)
        if name != self.method:
            return found

        def fail(*args: Any, **kwargs: Any) -> None:
            if self.works:
                found(*args, **kwargs)
            self.method = ""  # once
            raise self.error

        return fail


def captures_and_replays(backend: GraphBackend) -> None:
    x = torch.ones(1024, 1024, device="cuda")
    graph, y = capture(backend, lambda: x * 2 + torch.rand_like(x) * 0)
    x.fill_(3)
    backend.replay(graph)
    same(y, x * 2)
    backend.reset(graph)


def captures(backend: GraphBackend, graph: Any, x: torch.Tensor) -> None:
    with backend.capturing(graph):
        (
            x * 2 + torch.rand_like(x)
        ).sum()  # kept by no name: the error's traceback would hold this frame, and it


def fails(backend: GraphBackend, graph: Any, x: torch.Tensor, w: torch.Tensor) -> None:
    with backend.capturing(graph):
        (x @ w).sum().item()


def works_as_before(backend: GraphBackend, before: int) -> None:
    """Random numbers, plain allocations and captures do, and memory is back."""
    assert not torch.cuda.is_current_stream_capturing()
    torch.randn(4, device="cuda")
    captures_and_replays(backend)
    assert back_at(backend, before) or reserved(backend) <= before + (4 << 20)


@pytest.mark.parametrize(
    ("method", "error", "works", "kind", "said"),
    [
        (
            "capture_begin",
            RuntimeError("CUDA error: no"),
            False,
            CaptureError,
            "did not begin: CUDA error: no",
        ),
        (
            "capture_end",
            RuntimeError("CUDA error: invalidated"),
            True,
            CaptureError,
            "not valid: CUDA error: invalid",
        ),
        (
            "instantiate",
            RuntimeError("CUDA error: out of memory"),
            False,
            CaptureMemoryError,
            "no memory to instant",
        ),
        (
            "instantiate",
            torch.OutOfMemoryError("no memory"),
            False,
            CaptureMemoryError,
            "no memory to instantiate",
        ),
        (
            "instantiate",
            RuntimeError("CUDA error: odd"),
            False,
            CaptureError,
            "cannot be instantiated: CUDA error",
        ),
    ],
)
def test_a_step_of_a_capture_that_fails(
    cuda: GraphBackend,
    method: str,
    error: Exception,
    works: bool,
    kind: type[CaptureError],
    said: str,
) -> None:
    x = torch.ones(1024, 1024, device="cuda")
    before = reserved(cuda)
    pool = cuda.new_pool()
    graph = cuda.new_graph(pool)
    graph.graph = Failing(graph.graph, method, error, works=works)
    with cuda.session(), torch.no_grad(), pytest.raises(kind, match=said):
        captures(cuda, graph, x)
    assert back_at(cuda, before)
    assert cuda.pool_bytes(pool) == 0
    works_as_before(cuda, before)
    graph, z = capture(cuda, lambda: x + 1, pool)
    cuda.replay(graph)
    same(z, x + 1)


def test_a_capture_on_the_default_stream_is_refused(cuda: GraphBackend) -> None:
    before = reserved(cuda)
    graph = cuda.new_graph(cuda.new_pool())
    with pytest.raises(CaptureError, match=r"default stream"), cuda.capturing(graph):
        pass
    works_as_before(cuda, before)


def test_a_capture_inside_another_one_leaves_the_outer_one_alone(cuda: GraphBackend) -> None:
    x = torch.ones(256, device="cuda")
    before = reserved(cuda)
    pool = cuda.new_pool()
    outer = cuda.new_graph(pool)
    with cuda.session(), torch.no_grad(), cuda.capturing(outer):
        y = x * 2
        with (
            pytest.raises(CaptureError, match="inside another one"),
            cuda.capturing(cuda.new_graph(pool)),
        ):
            pass
        y = y + torch.rand_like(x) * 0
    x.fill_(4)
    cuda.replay(outer)
    same(y, x * 2)
    cuda.reset(outer)
    del y, outer
    works_as_before(cuda, before)


def test_a_forward_that_changes_the_current_stream(cuda: GraphBackend) -> None:
    """The capture ends on its own stream: with an error, because the other one was not joined, or as it should."""
    x, other = torch.ones(256, device="cuda"), torch.cuda.Stream()
    before = reserved(cuda)
    graph = cuda.new_graph(cuda.new_pool())
    with cuda.session(), torch.no_grad():
        capturing = torch.cuda.current_stream()

        def leaves() -> None:
            with cuda.capturing(graph):
                other.wait_stream(capturing)
                torch.cuda.set_stream(other)
                _ = x * 2

        try:
            with pytest.raises(CaptureError, match="not valid"):
                leaves()
        finally:
            torch.cuda.set_stream(capturing)
    works_as_before(cuda, before)


def test_live_graphs_survive_a_failure_of_another_one(cuda: GraphBackend) -> None:
    """Matrix products use a library workspace that all graphs of the stream share."""
    x, w = torch.randn(64, 512, device="cuda"), torch.randn(512, 512, device="cuda")
    pool = cuda.new_pool()
    graph, y = capture(cuda, lambda: (x @ w) @ w, pool)
    for _ in range(3):
        with cuda.session(), torch.no_grad(), pytest.raises((CaptureError, RuntimeError)):
            fails(cuda, cuda.new_graph(pool), x, w)
        taken = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(16)]
        x.copy_(torch.randn(64, 512, device="cuda"))
        cuda.replay(graph)
        same(y, (x @ w) @ w)
        del taken


def test_backends_that_come_and_go_leave_one_workspace() -> None:
    """A workspace stays as long as the process, so a stream that is free again is taken first."""
    x, w = torch.randn(64, 512, device="cuda"), torch.randn(512, 512, device="cuda")

    def capture_once() -> int:
        backend = select_backend("cuda")
        graph, y = capture(backend, lambda: x @ w)
        backend.replay(graph)
        same(y, x @ w)
        backend.reset(graph)
        del backend, graph, y
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    gc.collect()
    first = capture_once()
    for _ in range(9):
        last = capture_once()
    assert last <= first


def test_each_backend_captures_on_a_stream_of_its_own() -> None:
    """Graphs of one stream compute in one cuBLAS workspace; torch hands out 32 streams in turn."""
    gc.collect()  # backends of other tests
    backends, handles = [], set()
    for _ in range(4):
        backends.append(select_backend("cuda"))
        with backends[-1].session():
            handles.add(torch.cuda.current_stream().cuda_stream)
        for _ in range(31):
            torch.cuda.Stream()
    assert len(handles) == 4


def test_another_thread_takes_memory_during_a_capture(cuda: GraphBackend) -> None:
    held = list[torch.Tensor]()
    x = torch.ones(64, 64, device="cuda")

    def take() -> None:
        held.append(torch.ones(64 << 20, device="cuda"))  # 256 MiB: more than is cached

    def forward() -> torch.Tensor:
        thread = threading.Thread(target=take)
        thread.start()
        thread.join()
        return x * 2

    torch.cuda.empty_cache()
    graph, y = capture(cuda, forward)
    x.fill_(3)
    cuda.replay(graph)
    same(y, x * 2)
    assert held
    assert float(held[0].sum()) == held[0].numel()
    cuda.reset(graph)
