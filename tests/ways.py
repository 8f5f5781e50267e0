"""Ways in which graphs come about, for tests of what goes wrong with CUDA graphs.

A way is one graph for the whole forward (full), or segments around an eager piece, by each of the three routes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cgplan import (
    CaptureSession,
    Config,
    CUDAGraphMode,
    CUDAGraphOptions,
    CUDAGraphWrapper,
    GraphRunner,
    Input,
    build_plan,
    eager_break_during_capture,
)
from cgplan.backends import GraphBackend

FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE
PAIRS = Input(shape=("num_tokens", 2), dtype="float32", pad=0)
FACTOR = Input(shape=(1,), dtype="float32", pad=1)
KEYS = {"x": PAIRS, "slots": Input(shape=("num_tokens",), dtype="int64", pad=-1)}
WAYS = {
    "full": {"cudagraph_mode": "FULL"},
    "ops": {"cudagraph_mode": "PIECEWISE", "splitting_ops": ["ways::middle"]},
    "modules": {"cudagraph_mode": "PIECEWISE", "splitting_modules": ["middle"]},
    "wrappers": {"cudagraph_mode": "PIECEWISE", "piecewise": "wrappers"},
}
all_ways = pytest.mark.parametrize("way", list(WAYS))
each_size = pytest.mark.parametrize("way", ["full", "modules", "wrappers"])

_LIBRARY = torch.library.Library("ways", "FRAGMENT")
_LIBRARY.define("middle(Tensor x) -> Tensor")
kept: list[Tensor] | None = None


def _middle(x: Tensor) -> Tensor:
    """x + 1, at another address on each call while results are kept."""
    made = x + 1
    if kept is not None:
        kept.append(made)
    return made


_LIBRARY.impl("middle", _middle, "CompositeExplicitAutograd")
torch.library.register_fake("ways::middle", torch.empty_like, lib=_LIBRARY)
_LIBRARY.define("scaled(Tensor x) -> Tensor")
_LIBRARY.impl("scaled", lambda x: x * sum(x[0].tolist()), "CompositeExplicitAutograd")
torch.library.register_fake("ways::scaled", torch.empty_like, lib=_LIBRARY)


@eager_break_during_capture
def _failing_break(x: Tensor) -> Tensor:
    raise ValueError("a broken piece")


def _failing(x: Tensor) -> Tensor:
    raise ValueError(x * 2)


for _name, _kernel in (("failing", _failing), ("failing_break", _failing_break)):
    _LIBRARY.define(f"{_name}(Tensor x) -> Tensor")
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _failing_break(grad)


def failing_backward(x: Tensor) -> Tensor:
    """A gradient that a forward computes, with an eager piece inside that raises."""
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(_FailingBackward.apply(y).sum(), y)[0]


class Middle(nn.Module):
    """The eager piece."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.ways.middle(x)


class Model(nn.Module):
    """``head(stem(x) + 1)``: two segments, and between them an eager piece that returns a fresh tensor."""

    def __init__(self, backend: GraphBackend, way: str, stem: Any = None, head: Any = None) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2, bias=False) if stem is None else stem
        self.middle = Middle()
        self.head = torch.clone if head is None else head
        self.segments = (self.stem, self.head)
        if way == "wrappers":
            fresh = CUDAGraphOptions(copied_arguments=(0,))
            self.segments = (
                CUDAGraphWrapper(self.stem, PIECEWISE, backend=backend),
                CUDAGraphWrapper(self.head, PIECEWISE, backend=backend, options=fresh),
            )
        self.to(backend.device)

    def forward(self, x: Tensor, **more: Tensor) -> Tensor:
        first, last = self.segments
        return last(self.middle(first(x, **more)))


class Cached(nn.Module):
    """Writes a batch to rows of a cache and returns them; the last row of the cache is for padding."""

    def __init__(self, backend: GraphBackend) -> None:
        super().__init__()
        self.cache = full(backend, 0, 9, 2)

    def forward(self, x: Tensor, slots: Tensor) -> Tensor:
        self.cache.index_put_((slots,), x)
        return self.cache[slots]


def open_runner(
    backend: GraphBackend,
    model: Callable[..., Any],
    way: str = "full",
    *,
    inputs: dict[str, Input] | None = None,
    metadata: dict[str, Input] | None = None,
    **compilation: Any,
) -> GraphRunner:
    config = Config.model_validate(
        {
            "inputs": inputs or {"x": PAIRS},
            "metadata": metadata or {},
            "compilation": {"cudagraph_capture_sizes": [4, 8], **WAYS[way], **compilation},
            "device": backend.device.type,
        }
    )
    return CaptureSession(build_plan(config), model, backend, config).run()


def full(backend: GraphBackend, value: float, *shape: int) -> Tensor:
    return torch.full(shape or (4, 2), float(value), device=backend.device)


def double(x: Tensor) -> Tensor:
    return x * 2
