"""Wrappers of forwards that engines call themselves: what they capture, replay and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from checks import same
from torch import Tensor, nn

from cgplan import BreakableCUDAGraphWrapper, GraphPool, capture_allowed
from cgplan.backends import GraphBackend
from cgplan.backends.context import CaptureScope, forward_context
from cgplan.errors import AddressError, CgplanError, SealedError
from cgplan.graphs.wrapper import CUDAGraphOptions, CUDAGraphWrapper
from cgplan.modes import BatchDescriptor, CUDAGraphMode

pytestmark = pytest.mark.usefixtures("quiet_collector")

NONE, PIECEWISE, FULL = CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL


def batch(backend: GraphBackend, count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(seed)).to(backend.device)


def test_a_wrapper_outside_of_any_session(backend: GraphBackend) -> None:
    calls: list[str] = []

    def forward(x: Tensor, *, scale: float = 2.0) -> Tensor:
        calls.append("run")
        return x * scale

    wrapper = CUDAGraphWrapper(
        forward, FULL, backend=backend, options=CUDAGraphOptions(num_of_warmups=2)
    )
    x = batch(backend, 4)
    same(wrapper(x), x * 2)  # no context: as it is
    assert calls == ["run"]
    assert not wrapper.entries
    with forward_context(PIECEWISE, BatchDescriptor(4)):
        same(wrapper(x), x * 2)  # another mode: as it is
    assert not wrapper.entries
    calls.clear()
    for seed in range(3):
        x.copy_(batch(backend, 4, seed))
        with forward_context(FULL, BatchDescriptor(4)):
            same(wrapper(x, scale=3.0), x * 3)
    assert calls == ["run"] * 3, "two warm-ups and the capture"
    entry = wrapper.entries[BatchDescriptor(4)]
    assert entry.descriptor == BatchDescriptor(4)
    assert entry.manifest.places["args[0]"].address == x.data_ptr()
    assert entry.capture_seconds > 0
    with forward_context(FULL, BatchDescriptor(4)):
        moved = wrapper(batch(backend, 4, 9), scale=100.0)  # arguments are not looked at
    same(moved, x * 3)
    wrapper.reset()
    assert not wrapper.entries
    with forward_context(FULL, BatchDescriptor(4)):
        same(wrapper(x), x * 2)


def test_a_wrapper_still_looks_like_its_module(backend: GraphBackend) -> None:
    wrapper = CUDAGraphWrapper(nn.Linear(2, 3), FULL, backend=backend)
    assert wrapper.out_features == 3
    with pytest.raises(AttributeError):
        _ = wrapper.nothing
    for mode in (NONE, CUDAGraphMode.FULL_AND_PIECEWISE):
        with pytest.raises(CgplanError, match="cannot have the mode"):
            CUDAGraphWrapper(lambda x: x, mode, backend=backend)


def test_outputs_of_a_wrapper_may_hold_their_memory(backend: GraphBackend) -> None:
    pool, x = backend.new_pool(), torch.ones(4, device=backend.device)
    options = CUDAGraphOptions(borrow_outputs=False)
    wrappers = [
        CUDAGraphWrapper(lambda x, k=k: x * k, FULL, backend=backend, pool=pool, options=options)
        for k in (2, 3)
    ]
    with forward_context(FULL, BatchDescriptor(4)):
        outs = [wrapper(x) for wrapper in wrappers]
    same(outs, [x * 2, x * 3])


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
@pytest.mark.parametrize("names_backend", [False, True])
def test_wrappers_capture_into_a_pool_of_runners(
    backend: GraphBackend, kind: type[CUDAGraphWrapper], names_backend: bool
) -> None:
    pool, x = GraphPool(backend), torch.ones(4, device=backend.device)
    wrapper = kind(
        lambda x: x * 2, PIECEWISE, backend=backend if names_backend else None, pool=pool
    )
    assert wrapper.backend is backend
    with forward_context(PIECEWISE, BatchDescriptor(4)):
        for factor in range(3):
            same(wrapper(x.fill_(factor)), x * 2)
    assert pool.nbytes > 0


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_code_that_must_not_capture(backend: GraphBackend, kind: type[CUDAGraphWrapper]) -> None:
    """Graphs that are there replay; another one is an error ahead of its warm-ups."""
    calls: list[int] = []

    def forward(x: Tensor) -> Tensor:
        calls.append(len(x))
        return x * 2

    wrapper = kind(forward, PIECEWISE, backend=backend)
    small, large = batch(backend, 2), batch(backend, 4)
    with forward_context(PIECEWISE, BatchDescriptor(2)):
        wrapper(small)
        with capture_allowed(False):
            same(wrapper(small), small * 2)
    with forward_context(PIECEWISE, BatchDescriptor(4)):
        with capture_allowed(False), pytest.raises(SealedError) as caught:
            wrapper(large)
        assert "graph for PIECEWISE size=4" in caught.value.message
        assert f"{__file__}:" in caught.value.message
        assert 4 not in calls
        with capture_allowed(False), capture_allowed(True):
            same(wrapper(large), large * 2)


@pytest.mark.parametrize("inner", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
@pytest.mark.parametrize("outer", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
def test_unwrapping_leaves_nothing_that_captures(
    backend: GraphBackend, inner: type[CUDAGraphWrapper], outer: type[CUDAGraphWrapper]
) -> None:
    wrappers = [inner(lambda x: x * 2, PIECEWISE, backend=backend)]
    wrappers.append(outer(wrappers[0], FULL, backend=backend))
    plain, x = wrappers[1].unwrap(), batch(backend, 4)
    for mode in (PIECEWISE, FULL):
        with forward_context(mode, BatchDescriptor(4)):
            same(plain(x), x * 2)
    assert not any(wrapper.entries for wrapper in wrappers)


def test_a_sealed_scope_captures_nothing_more(backend: GraphBackend) -> None:
    wrapper = CUDAGraphWrapper(lambda x: x * 2, FULL, backend=backend)
    scope, x = CaptureScope(backend.new_pool()), batch(backend, 4)
    with forward_context(FULL, BatchDescriptor(4), scope=scope):
        wrapper(x)
    scope.is_open = False
    with forward_context(FULL, BatchDescriptor(4), scope=scope):
        same(wrapper(x), x * 2)
    with (
        forward_context(FULL, BatchDescriptor(8), scope=scope),
        pytest.raises(SealedError) as caught,
    ):
        wrapper(x)
    assert "size=8" in caught.value.message
    assert "cudagraph_capture_sizes" in caught.value.remedy


def test_copied_arguments_of_a_capture_in_inference_mode(backend: GraphBackend) -> None:
    wrapper = CUDAGraphWrapper(
        lambda x: x * 2, PIECEWISE, backend=backend, options=CUDAGraphOptions(copied_arguments=(0,))
    )
    x = torch.ones(4, device=backend.device)
    with torch.inference_mode(), forward_context(PIECEWISE, BatchDescriptor(4)):
        same(wrapper(x.clone()), x * 2)
    with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(4)):
        same(wrapper(x * 3), x * 6)


@pytest.mark.parametrize("kind", [CUDAGraphWrapper, BreakableCUDAGraphWrapper])
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda x, y: (x[:1], y),
            r"argument 0, .* is torch.float32 \[1, 3\]; at capture it was torch.float32 \[4, 3\]",
        ),
        (lambda x, y: (x, y.double()), r"argument 1, .* is torch.float64 \[4, 3\]"),
        (lambda x, y: (x.int(), y), r"argument 0, .* is torch.int32"),
        (lambda x, y: (x, 5.0), r"argument 1, .* is 5.0; at capture"),
        (lambda x, y: (x,), "argument 1, .* is missing among 1 arguments"),
    ],
)
def test_copied_arguments_are_those_of_the_capture(
    backend: GraphBackend, kind: Any, change: Any, said: str
) -> None:
    options = CUDAGraphOptions(copied_arguments=(0, 1), address_check="off")
    mode = (PIECEWISE,) if kind is CUDAGraphWrapper else ()
    wrapper = kind(lambda x, y: x * y, *mode, backend=backend, options=options)
    x, y = (torch.arange(12.0, device=backend.device).view(4, 3) + k for k in range(2))
    with torch.no_grad(), forward_context(PIECEWISE, BatchDescriptor(4)):
        for _ in range(2):
            same(wrapper(x, y), x * y)
        with pytest.raises(AddressError, match=rf"PIECEWISE size=4: {said}"):
            wrapper(*change(x, y))
        same(wrapper(x + 1, y), (x + 1) * y)
