"""Errors that mislead, come late, or never come: host syncs, cold kernels, lost memory, silent fallbacks.

Each test first shows the hazard with the bare backend, then what a runner makes of it.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from checks import MIB, Tally, same
from checks import capture as bare
from torch import Tensor
from torch.overrides import _len_torch_function_stack
from torch.utils._python_dispatch import _len_torch_dispatch_stack
from ways import (
    GraphBackend,
    Model,
    all_ways,
    each_size,
    failing_backward,
    full,
    open_runner,
)

from cgplan import (
    CaptureError,
    CgplanError,
    HostSyncError,
)
from cgplan.backends import select_backend

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@all_ways
@pytest.mark.parametrize("what", ["item", "mask"])
def test_a_capture_error_that_names_no_operator(backend: GraphBackend, way: str, what: str) -> None:
    """CUDA says "operation not permitted when stream is capturing" and not which one. cgplan names the operator and
    a line of the model, and says what to write in its place.
    """

    def stem(x: Tensor) -> Tensor:
        return x * (x.sum().item() if what == "item" else x[x > 0].sum())

    x = full(backend, 1)
    with pytest.raises((RuntimeError, HostSyncError)):
        bare(backend, lambda: stem(x))
    with pytest.raises(
        HostSyncError, match=r"operator aten::\w+.* needs the host, .*test_late_errors\.py:\d+"
    ) as caught:
        open_runner(backend, Model(backend, way, stem), way)
    assert {"item": "aten::_local_scalar_dense", "mask": "aten::index"}[what] in str(caught.value)
    assert "`return x * (x.sum().item()" in caught.value.message
    assert "torch.where" in caught.value.remedy
    same(x + 1, full(backend, 2))  # and the device works as before


@pytest.mark.parametrize("what", ["operator", "method"])
@each_size
def test_a_host_sync_that_the_forward_swallows(backend: GraphBackend, way: str, what: str) -> None:
    """The model prints a value inside try, and goes on. On a GPU an error of CUDA's makes the capture invalid, one of
    torch's own (a copy to memory that is not pinned) does not; no graph may lack the rest of the block in silence.
    """
    if what == "method" and backend.device.type == "cuda":
        pytest.skip("debug mode finds it")
    ran = Tally()

    def shown(x: Tensor) -> Tensor:
        try:
            ran.append(float(x.sum()) if what == "operator" else x.cpu())
        except Exception:
            ran.append(None)
        return x * 2

    where = (
        ""
        if backend.device.type == "cuda"
        else r"needs the host, .*test_late_errors\.py:\d+: `ran\.append\(float"
    )
    with pytest.raises(CaptureError, match=where):
        open_runner(backend, Model(backend, way, shown), way)
    assert ran[-1] is None or backend.device.type == "cuda", "the forward went on"
    x = full(backend, 1)
    graph, out = bare(backend, lambda: x * 2)  # the device captures as before
    backend.replay(graph)
    same(out, x * 2)


@all_ways
def test_a_host_method_inside_a_custom_operator(backend: GraphBackend, way: str) -> None:
    """Frozen, the number that its Python kernel reads would be that of padding rows. Experts of mixture models loop
    over ``offsets.tolist()`` in such an operator. A GPU refuses it; the tape calls the operator again, and says so.
    """
    model = torch.ops.ways.scaled if way == "full" else Model(backend, way, torch.ops.ways.scaled)
    call = (lambda x: model(x)) if way == "full" else model
    if backend.device.type == "cuda":
        with pytest.raises(HostSyncError, match=r"needs the host, .*ways\.py:\d+: `.*tolist"):
            open_runner(backend, call, way)
        return
    runner = open_runner(backend, call, way)
    assert any(
        "scaled again on each replay, a GPU may refuse it" in warning
        for warning in runner.report.warnings
    )
    for value in (1, 2, 3):
        x = full(backend, value)
        same(runner(x=x), call(x))


def _raise(x: Tensor) -> Tensor:
    raise ValueError(x.shape)


FAILURES: dict[str, Callable[[Tensor], Any]] = {
    "raises": _raise,
    "item": lambda x: x * x.sum().item(),
    "tolist": lambda x: x * len(x.tolist()),
    "operator": torch.ops.ways.failing,
    "break in an operator": torch.ops.ways.failing_break,
    "break in a backward": failing_backward,
    "sparse": lambda x: x.to_sparse() * 2,
}


@pytest.mark.parametrize("failure", FAILURES)
@each_size
def test_a_failed_capture_leaves_no_mode_behind(way: str, failure: str) -> None:
    backend, x = select_backend("cpu"), torch.ones(4, 2)
    calls = Tally()

    def stem(x: Tensor) -> Tensor:
        calls.append(None)  # the look and the warm-up succeed
        return FAILURES[failure](x) if len(calls) > 2 else x * 2

    with pytest.raises(CgplanError):
        open_runner(backend, Model(backend, way, stem), way)
    assert len(calls) > 2
    assert _len_torch_dispatch_stack() == 0
    assert _len_torch_function_stack() == 0
    assert (x * 2).tolist() == [[2.0, 2.0]] * 4
    graph, out = bare(backend, lambda: x * 3)
    backend.replay(graph)
    same(out, x * 3)


@pytest.mark.parametrize("way", ["full", "modules"])
def test_a_host_sync_that_is_swallowed_behind_the_last_operator(
    backend: GraphBackend, way: str
) -> None:
    """On a GPU nothing fails then but the end of the capture, which does not know why."""

    def shown(x: Tensor) -> Tensor:
        y = x * 2
        with suppress(Exception):
            print(float(y.sum()))
        return y

    with pytest.raises(
        HostSyncError,
        match=r"_local_scalar_dense needs the host, .*test_late_errors\.py:\d+: `print",
    ):
        open_runner(backend, shown if way == "full" else Model(backend, way, shown), way)


def lazy() -> Callable[[Tensor], Tensor]:
    """A model that settles something with the host's help on its first call, as kernels that compile or tune do."""
    chosen: list[float] = []

    def forward(x: Tensor) -> Tensor:
        if not chosen:
            chosen.append((x.new_zeros(()) + 2).item())
        return x * chosen[0]

    return forward


def test_nothing_was_warmed_up(backend: GraphBackend) -> None:
    """Kernels that compile, tune or allocate workspaces on their first call fail inside a capture, though the model
    ran well everywhere else. Each key is run once before it is captured (`cudagraph_num_of_warmups`).
    """
    x, forward = full(backend, 1), lazy()
    with pytest.raises((RuntimeError, HostSyncError)):
        bare(backend, lambda: forward(x), warmups=0)
    same(open_runner(backend, lazy())(x=x), x * 2)
    same(
        open_runner(backend, lazy(), cudagraph_num_of_warmups=0)(x=x), x * 2
    )  # the look came before the capture


@all_ways
def test_a_failed_capture_that_keeps_its_memory(backend: GraphBackend, way: str) -> None:
    """The traceback of a capture that failed holds the forward's tensors, and they hold the pool: with the error in
    hand, "try a smaller size" runs out of memory at once. A session lets go of them before it raises.
    """
    failing = False

    def stem(x: Tensor) -> Tensor:
        big = x.sum() + torch.zeros(2 * MIB, device=x.device)
        fails = failing and len(x) == 4  # the second key: the first one's graphs must go as well
        return x * (big.sum().item() if fails else big.sum())

    def grown() -> int:
        backend.release_cached()
        return backend.memory().reserved - before

    x = full(backend, 1)
    open_runner(backend, Model(backend, way, stem), way).close()
    gc.collect()
    backend.release_cached()
    before, failing = backend.memory().reserved, True
    with pytest.raises((RuntimeError, HostSyncError)) as caught:
        bare(backend, lambda: stem(x), warmups=0)
    assert grown() >= 8 * MIB
    traceback.clear_frames(caught.value.__traceback__)
    del caught
    gc.collect()
    with pytest.raises(HostSyncError) as caught:
        open_runner(backend, Model(backend, way, stem), way)
    assert grown() <= 2 * MIB  # a random generator's state may hold one small segment on CUDA
    assert caught.value.remedy
