"""Captures with eager pieces that several test files use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cgplan import (
    BreakableCUDAGraphCapture,
    CaptureSession,
    GraphRunner,
    Input,
    build_plan,
    eager_break_during_capture,
)
from cgplan.backends import GraphBackend
from cgplan.config import validate_config
from cgplan.piecewise.breakable import EagerPiece


def capture(backend: GraphBackend, forward: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """(capture, output) of a forward, warmed up as a session does."""
    with backend.session(), torch.no_grad():
        forward()
        with BreakableCUDAGraphCapture(
            backend, backend.new_pool() if pool is None else pool
        ) as made:
            output = forward()
    return made, output


def randn(backend: GraphBackend, *shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(backend.device)


@eager_break_during_capture
def doubled(x: Tensor) -> Tensor:
    """Through the host, so that inside a segment it would be an error."""
    return torch.tensor(x.tolist(), device=x.device) * 2


@eager_break_during_capture
def add_in_place(x: Tensor, value: float = 1.0) -> Tensor:
    return x.add_(len(x.tolist()) * value)


@eager_break_during_capture
def nothing(*_: Any) -> None:
    """Only a break."""


class Boom(Exception):
    pass


def explode(*_: Any) -> None:
    raise Boom


class Changing:
    """A piece that returns what it is told to."""

    result: Any = None

    def __call__(self, x: Tensor) -> Any:
        return self.result(x) if callable(self.result) else self.result


def kinds(made: BreakableCUDAGraphCapture) -> str:
    """S for a segment, e for an eager piece, in order."""
    return "".join("e" if isinstance(item, EagerPiece) else "S" for item in made.segments)


def open_runner(
    backend: GraphBackend, model: Callable[..., Any], width: int = 8, **compilation: Any
) -> GraphRunner:
    config = validate_config(
        {
            "inputs": {"x": Input(shape=("num_tokens", width), dtype="float32", pad=0)},
            "compilation": {
                "cudagraph_mode": "PIECEWISE",
                "cudagraph_capture_sizes": [1, 2, 4, 8],
                "outputs": "clone",
                **compilation,
            },
            "device": backend.device.type,
        }
    )
    return CaptureSession(build_plan(config), model, backend, config).run()


class Broken(nn.Module):
    """Two layers with a module between them that the user's code does not know as a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleDict({"mix": Mix(), "out": nn.Linear(6, 6)}) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["out"](layer["mix"](x))
        return x


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.eager_runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.eager_runs += 1
        return self.inner(x).softmax(1)


class Attends(nn.Module):
    """Attention through PyTorch's operator, which returns a fresh tensor on each call; rows do not see each other."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            q, k, v = (part.unflatten(1, (2, 2, 2)) for part in layer(x).chunk(3, dim=1))
            x = x + F.scaled_dot_product_attention(q, k, v).flatten(1).tanh() * 2
        return x * x.sigmoid()


class Counting(nn.Module):
    """A layer whose piece is a method and moves a state on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(3))

    @eager_break_during_capture
    def step(self, x: Tensor) -> Tensor:
        """Add the state."""
        self.count += 1
        return x + self.count * len(x.tolist())

    def forward(self, x: Tensor) -> Tensor:
        self.count *= 2
        return self.step(x * 2) + self.count
