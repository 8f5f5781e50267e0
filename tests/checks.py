"""What several test files check and measure with."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cgplan.backends import GraphBackend
from cgplan.errors import CaptureError
from cgplan.graphs.fingerprint import Fingerprint
from cgplan.graphs.footprint import look
from cgplan.graphs.put_back import PutBack

MIB = 1 << 20


def capture(
    backend: GraphBackend, forward: Callable[[], Any], pool: Any = None, warmups: int = 1
) -> tuple[Any, Any]:
    """(graph, output) of a forward, warmed up on the capture stream as a session does."""
    graph = backend.new_graph(backend.new_pool() if pool is None else pool)
    with backend.session(), torch.no_grad():
        for _ in range(warmups):
            forward()
        with backend.capturing(graph):
            output = forward()
    return graph, output


class Wrapper(Tensor):
    """A tensor that wraps another one, as quantized weights do."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapper:
        made = Tensor._make_wrapper_subclass(
            cls, inner.size(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("an operator ran")


class Tally(list[Any]):
    """Items that captures do not put back when they restore the model's state."""

    __graph_memory__ = True


def host_sync_of(forward: Callable[[], Any], device: torch.device) -> CaptureError | None:
    """The first operator of an eager run that needs the host, or is tagged as unsafe in a graph."""
    return look(forward, PutBack(Fingerprint.of({}, device), 0)).host_sync


def same(found: Any, wanted: Any) -> None:
    """Bit for bit, NaN equal to NaN, structures and dtypes alike."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def reserved(backend: GraphBackend) -> int:
    """Bytes that the allocator holds once nothing is cached and no garbage is left. A session's stream has made its
    workspaces, which stay.
    """
    with backend.session():
        pass
    gc.collect()
    backend.release_cached()
    return backend.memory().reserved


def back_at(backend: GraphBackend, before: int) -> bool:
    """Whether memory is back at a baseline: exactly on the tape, on CUDA but for one of its smallest segments, which
    the few bytes of a random generator's state may hold.
    """
    backend.release_cached()
    slack = 2 * MIB if backend.device.type == "cuda" else 0
    return backend.memory().reserved <= before + slack
